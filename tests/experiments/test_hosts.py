"""The training program in several processes over loopback: results, stops, failures and resumes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import errors, mesh, signals
from experiments.train import checkpoint, cli, config, hosts
from tests.distance import order
from tests.experiments.test_mesh import FLAGS
from tests.rows import slow

ROOT = Path(__file__).parents[2]
MANY = [*(flag for flag in FLAGS if flag != "--run"), "--sample-tokens", "0"]


def port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def start(count, argv, devices=1, stop=(0, 0, 0), cluster=False, bad="", **differs):
    """Starts the processes of one run.

    `stop` is (process, step before which it comes, signal); `differs` has flags of the last process. Batches with the
    numbers in `bad` have a NaN loss. With `cluster`, the processes are a Slurm job, by its environment variables.
    """
    where = f"localhost:{port()}"
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    flags += f" --xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    processes = []
    for i in range(count):
        at, signum = stop[1:] if i == stop[0] else (0, 0)
        own = [f"--{name.replace('_', '-')}={value}" for name, value in differs.items()] if i == count - 1 else []
        shared = ["--coordinator", where, "--process-count", str(count), "--process-id", str(i)]
        if cluster:
            shared = ["--coordinator", "auto"]
            job = {"JOB_ID": "1", "STEP_NODELIST": "localhost", "NTASKS": str(count), "PROCID": str(i), "LOCALID": "0"}
            env |= {f"SLURM_{name}": value for name, value in job.items()} | {"JAX_COORDINATOR_PORT": where[10:]}
        command = [sys.executable, "-m", "tests.experiments.process", str(at), str(int(signum)), bad]
        command += [*argv, *shared, "--patience", "60", *own]
        processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=-1, stderr=-1, text=True))
    return processes


def end(processes):
    """Returns exit codes, standard outputs and standard errors."""
    try:
        actual = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:  # processes with different programs wait for each other
            process.kill()
    return [process.returncode for process in processes], [x[0] for x in actual], [x[1] for x in actual]


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {kind: {r["step"]: r[kind] for r in rows if kind in r} for kind in ("loss", "valid_loss")}


def check_close(actual, expected):
    """Losses of the same steps agree except for the order of sums, which depends on a process's threads.

    The longest sums are over the 256 entries of the vocabulary. Differences of a step affect all later steps.
    """
    for kind, values in expected.items():
        assert actual[kind].keys() == values.keys()
        columns = ([x[kind][step] for step in values] for x in (actual, expected))
        np.testing.assert_allclose(*columns, rtol=max(values) * order(256))


@pytest.mark.slow
def test_two_processes_stop_together_and_one_goes_on_with_the_same_bits(argv, out, monkeypatch, capsys):
    """Moments are codes. The run of four processes below has amax histories."""
    flags = [*argv, *MANY, "--recipe", "coat_optimizer", "--mesh", "fsdp=2", "--run"]
    command = [*flags, "parts"]
    codes, outputs, complaints = end(start(2, command, stop=(1, 3, signal.SIGTERM)))
    assert codes == [143, 143], (codes, complaints, outputs[0][-3000:])
    stopped = int(re.search(r"stopped by SIGTERM: step (\d+) is saved", complaints[0])[1])
    # The signal before a step is an input of that step, which is read one step later.
    assert 3 <= stopped <= 4
    assert "stopped" not in complaints[1]
    assert "on 2 devices (CPU) in 2 processes" in outputs[0]
    assert "Training" not in outputs[1]
    monkeypatch.setattr(mesh, "SMALLEST", 1024)
    assert cli.main(command) == 0
    assert f"resuming from step {stopped}" in capsys.readouterr().out
    assert cli.main([*flags, "whole"]) == 0
    check_close(*(losses(out / name / "coat_optimizer") for name in ("parts", "whole")))


@pytest.mark.slow
def test_four_processes_with_two_devices_each_train_as_one_process(argv, out, tmp_path):
    """Eight devices; then two of one process; then eight of four processes again."""
    flags = [*argv, *MANY, "--run"]
    for name, stop in (("straight", (0, 0, 0)), ("turns", (2, 2, signal.SIGINT))):
        codes, _, complaints = end(start(4, [*flags, name, "--mesh", "data=4,fsdp=2"], 2, stop))
        assert codes == [130 if stop[1] else 0] * 4, complaints
    codes, _, complaints = end(start(1, [*flags, "turns", "--mesh", "fsdp=2"], 2, (0, 2, signal.SIGTERM)))
    assert codes == [143], complaints
    codes, _, complaints = end(start(4, [*flags, "turns", "--mesh", "data=4,fsdp=2"], 2))
    assert codes == [0] * 4, complaints
    check_close(*(losses(out / name / "mixed") for name in ("turns", "straight")))


# Two batches are bad. The run rewinds to the checkpoints of steps 2 and 4.
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_two_processes_leave_out_the_same_bad_steps_as_one(argv, out, policy):
    """Only a row on the first device has a NaN loss."""
    flags = [*argv, *MANY, "--microbatches", "1", "--mesh", "fsdp=2", "--on-bad-step", policy, "--run"]
    results = {}
    for count in (1, 2):
        name = f"{policy}_by_{count}"
        codes, outputs, complaints = end(start(count, [*flags, name], 2 // count, bad="2,5"))
        assert codes == [0] * count, (codes, complaints, outputs[0][-3000:])
        rows = [json.loads(line) for line in (out / name / "mixed" / "metrics.jsonl").read_text().splitlines()]
        assert [row["bad_steps"] for row in rows if "loss" in row] == [0, 0, 1, 1, 2, 2]
        decisions = [line for line in outputs[0].splitlines() if "loss nan" in line]
        results[count] = losses(out / name / "mixed"), decisions
    check_close(results[2][0], results[1][0])
    assert results[2][1] == results[1][1]
    assert len(results[1][1]) == 2


def check_dies(processes, which):
    """Asserts that one process is killed and the others end with one line and exit code 5."""
    codes, _, complaints = end(processes)
    assert codes == [-signal.SIGKILL if i == which else 5 for i in range(len(codes))], complaints
    for i, text in enumerate(complaints):
        text = re.sub(r"^\[Gloo\].*\n", "", text, flags=re.MULTILINE)
        if i != which:
            assert re.fullmatch(rf"error: process {i} of {len(codes)} ends: another one has ended, .*\n", text), text


@pytest.mark.slow
@pytest.mark.parametrize(("which", "at"), [slow(0, 0), slow(1, 0), (0, 2), slow(1, 2)])
def test_one_of_two_dies_and_the_other_says_so(argv, which, at):
    """During the other's compilation, or after the first step."""
    command = [*argv, "--recipe", "bf16", "--layers", "1", "--run", f"two_{which}_{at}", "--mesh", "fsdp=2"]
    check_dies(start(2, command, stop=(which, at, signal.SIGKILL)), which)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "at"), [(1, 0), (0, 2)])
def test_so_it_is_on_a_cluster(argv, which, at):
    command = [*argv, "--recipe", "bf16", "--layers", "1", "--run", f"job_{which}_{at}", "--mesh", "fsdp=2"]
    check_dies(start(2, command, stop=(which, at, signal.SIGKILL), cluster=True), which)


def test_without_a_cluster_auto_says_so(argv, capsys):
    assert cli.main([*argv, "--coordinator", "auto"]) == 2
    assert "this process cannot join the others (no cluster was detected); set --coordinator" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("which", "at"), [(2, 0), (0, 5)])
def test_one_of_four_dies_the_others_end_and_the_restart_resumes(argv, out, which, at):
    run = f"killed_{which}_{at}"
    command = [*argv, *MANY, "--run", run, "--mesh", "data=2,fsdp=2"]
    check_dies(start(4, command, stop=(which, at, signal.SIGKILL)), which)
    if at:
        codes, outputs, complaints = end(start(4, command))
        assert codes == [0] * 4, complaints
        assert "resuming from step 4" in outputs[0]
        assert sorted(losses(out / run / "mixed")["loss"]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_process_that_is_silent_counts_as_gone(argv):
    command = [*argv, "--recipe", "bf16", "--run", "silent", "--mesh", "fsdp=2"]
    processes = start(2, command, stop=(1, 2, signal.SIGSTOP), patience=5)
    try:
        assert "process 1 is gone" in processes[0].communicate(timeout=600)[1]
    finally:
        processes[1].kill()
    assert processes[0].returncode == 5


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_by_all(argv, out):
    command = [*argv, *MANY, "--run", "hurt", "--mesh", "fsdp=2"]
    assert end(start(2, command))[0] == [0, 0]
    folder = out / "hurt" / "mixed"
    (folder / "result.json").unlink()
    files = [p for p in (folder / "checkpoints" / "6").rglob("*") if p.is_file() and "/d/" in str(p)]
    largest = max(files, key=lambda p: p.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 0x55
    largest.write_bytes(raw)
    codes, outputs, complaints = end(start(2, command))
    assert codes == [0, 0], complaints
    assert "is damaged" in outputs[0]
    assert "resuming from step 4" in outputs[0]
    assert (folder / "damaged-6").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"seed": 7}, "another --seed than process 0"),
        ({"data": "nowhere.txt"}, "process 1: --data nowhere.txt: no such"),
    ],
)
def test_processes_that_differ_end_with_the_same_message(argv, differs, message):
    codes, _, complaints = end(start(2, [*argv, *MANY, "--run", "differ", "--mesh", "fsdp=2"], **differs))
    assert codes == [2, 2], complaints
    assert message in complaints[0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_lm", "int8_fallback"])  # with a state of factors and of thresholds
def test_recipes_train_in_two_processes(argv, out, recipe):
    command = [*argv, "--recipe", recipe, "--steps", "3", "--run", f"two_{recipe}", "--mesh", "fsdp=2"]
    codes, _, complaints = end(start(2, command))
    assert codes == [0, 0], complaints
    assert len(losses(out / f"two_{recipe}" / recipe)["loss"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_waits_in_vain_says_so(argv, process):
    """The first of two waits for the second, and the second for the first."""
    command = [*argv, "--run", "alone"]
    others = ["--coordinator", f"localhost:{port()}", "--process-count", "2", "--patience", "4"]
    actual = subprocess.run(
        [sys.executable, "-m", "experiments.train", *command, *others, "--process-id", str(process)],
        env=dict(os.environ, JAX_PLATFORMS="cpu"), cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert actual.returncode == 5, actual.stderr
    assert f"process {process} of 2 waited 4 s" in actual.stderr


@pytest.mark.parametrize(("signum", "code"), [(None, 5), (signal.SIGTERM, 143)])
def test_a_process_whose_peer_died_before_it_joined_ends_as_if_it_died_later(monkeypatch, capsys, signum, code):
    codes, ended, stop = [], threading.Event(), signals.StopSignals()
    monkeypatch.setattr(hosts, "_relay", lambda *_: {})
    monkeypatch.setattr(hosts, "_abandon", lambda code: codes.append(code) or ended.set())
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: ended.wait(60))
    stop.signum = signum
    hosts.join(config.Run(coordinator="localhost:9", process_id=1, process_count=2, patience=0.1), stop)
    assert codes == [code]
    assert "waited 0.1 s (--patience) for the others. Start all of them again" in capsys.readouterr().err


def test_jax_is_told_who_joins_and_how_long_it_may_wait(monkeypatch):
    arguments, addresses = {}, {"coordinator_address": "127.0.0.1:7"}
    stop, settings = signals.StopSignals(), config.Run(coordinator="auto", patience=30)
    monkeypatch.setattr(hosts, "_find_process", lambda _: hosts._Process("node0:9", 1, 4, [2, 3]))
    monkeypatch.setattr(hosts, "_relay", lambda place, silence, who: addresses)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **kwargs: arguments.update(kwargs, notice=stop.notice))
    hosts.join(settings, stop)
    assert "after 30 s (--patience); a second signal ends it now" in arguments.pop("notice")
    assert stop.notice == ""
    times = {"initialization_timeout": 90, "heartbeat_timeout_seconds": 40, "shutdown_timeout_seconds": 30}
    assert arguments == addresses | times | {"num_processes": 4, "process_id": 1, "local_device_ids": [2, 3]}

    def fail(text):
        def initialize(**_):
            raise RuntimeError(text)

        return initialize

    for text, line in (("\nno route\nto it", r"\(no route\)"), ("", r"\(RuntimeError\)")):
        monkeypatch.setattr(jax.distributed, "initialize", fail(text))
        with pytest.raises(errors.UserError, match=f"process 1 of 4 cannot join the others {line}; set --coordinator"):
            hosts.join(settings, stop)


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_reaches_the_coordinator_through_its_relay_and_ends_with_it(monkeypatch, number):
    ended, end_arguments = threading.Event(), []
    monkeypatch.setattr(hosts, "_relayed", None)
    monkeypatch.setattr(hosts, "end", lambda *args: end_arguments.extend(args) or ended.set())
    addresses = hosts._relay(hosts._Process(f"localhost:{port()}", number, 2), 60, "process")
    assert set(addresses) == {"coordinator_address", *([] if number else ["coordinator_bind_address"])}
    assert len(set(addresses.values())) == len(addresses)
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses.values())
    hosts._relayed.stdin.close()
    assert ended.wait(60)
    assert end_arguments[:2] == [hosts.OTHER_PROCESS_GONE, False]
    assert f"process {number} of 2 ends: another one has ended, or cannot be reached (its relay" in end_arguments[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--coordinator", "node0"], "HOST:PORT"),
        (["--coordinator", "node0:1"], "needs --process-id and --process-count"),
        (["--coordinator", "node0:1", "--process-id", "2", "--process-count", "2"], "from 0 to --process-count 2 - 1"),
        (["--process-id", "1"], "require --coordinator"),
        (["--coordinator", "auto", "--process-count", "1"], "auto detects them"),
        (["--patience", "0"], "at least 1"),
    ],
)
def test_impossible_processes_are_refused(argv, capsys, flags, message):
    assert cli.main([*argv, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def gathered(monkeypatch):
    """Gathers values of processes that run one after the other: each reads those before it, and its own."""
    messages = []
    monkeypatch.setattr(hosts, "several", lambda: True)
    monkeypatch.setattr(
        hosts.multihost_utils, "process_allgather", lambda x: messages.append(np.array(x)) or np.stack(messages)
    )
    return messages


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (errors.UserError("--data x: no such"), "process 1: --data x: no such", 2),
        (errors.DiskError("ä" * 2000), "process 1: ä+", errors.DiskError.exit_code),
        (OSError(28, "No space left on device"), r"process 1: \[Errno 28\] No space left on device", 3),
    ],
    ids=["input", "long", "disk"],
)
def test_what_one_process_finds_wrong_all_raise(gathered, error, said, code):
    with hosts.agreement():
        pass
    with pytest.raises(hosts.Agreed) as own, hosts.agreement():
        raise error
    with pytest.raises(hosts.Agreed) as others, hosts.agreement():
        pass
    with pytest.raises(hosts.Agreed) as first, hosts.agreement():
        raise errors.UserError("of a later process")
    for actual in (own, others, first):
        assert re.fullmatch(said, str(actual.value))
        assert actual.value.exit_code == code
    with pytest.raises(KeyError), hosts.agreement():
        raise KeyError


def test_what_a_process_was_started_with_otherwise_is_named(gathered):
    hosts.check_same({"--seed": 1, "--lr": [1e-3], "text": "a"})
    hosts.check_same({"--seed": 1, "--lr": [1e-3], "text": "a"})
    with pytest.raises(hosts.Agreed, match="process 2 was started with another --seed, text than process 0") as actual:
        hosts.check_same({"--seed": 7, "--lr": [1e-3], "text": "b"})
    assert actual.value.exit_code == 2


def test_a_process_of_slurm_finds_its_place(monkeypatch):
    job = {"JOB_ID": "1", "STEP_NODELIST": "n[3-4]", "NTASKS": "4", "PROCID": "2", "LOCALID": "1"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "9")
    assert hosts._find_process(config.Run(coordinator="auto")) == ("n3:9", 2, 4, [1])


GLOO = "UNKNOWN: Gloo AllGather failed: [external/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"


def raised(error, cause=None):
    try:
        raise error from cause
    except Exception as found:
        return found


def raised_during(error, other):
    try:
        raise other
    except Exception:
        try:
            raise error
        except Exception as found:
            return found


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (jax.errors.JaxRuntimeError("FAILED_PRECONDITION: Buffer Definition Event"), True),
        (ValueError(GLOO), True),  # as XLA on CPUs ends a collective of Orbax
        (raised(RuntimeError("cannot save"), ValueError(GLOO)), True),
        (raised_during(RuntimeError("cannot save"), ValueError(GLOO)), True),
        (ValueError("INTERNAL: NCCL operation ncclAllReduce failed: remote process exited"), True),
        (ValueError("DEADLINE_EXCEEDED: Barrier timed out. Id: orbax"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes"), False),
        (ValueError("DATA_LOSS: Error reading chunk"), False),
        (OSError(28, "No space left on device"), False),
    ],
    ids=repr,
)
def test_the_end_of_another_process_is_told_from_damage_of_files(error, gone, monkeypatch, tmp_path):
    """A process that ends while a checkpoint is written or read ends the others, as at any other time."""
    assert not hosts.is_other_process_gone(error)
    monkeypatch.setattr(hosts, "several", lambda: True)
    assert hosts.is_other_process_gone(error) == gone
    assert (
        (cli._explain(error, "")[0] == hosts.OTHER_PROCESS_GONE) if gone else (cli._explain(error, "") or (3,))[0] == 3
    )

    def fails(*_, **__):
        raise error

    with checkpoint.Checkpoints(tmp_path, 1) as checkpoints:
        monkeypatch.setattr(checkpoints._orbax, "save_checkpointables_async", fails)
        with pytest.raises(type(error) if gone else errors.DiskError):
            checkpoints.save(1, {"x": jnp.ones(3)}, loader={}, config={})
        monkeypatch.setattr(checkpoints._orbax, "load_checkpointables", fails)
        with pytest.raises(type(error) if gone else checkpoint.DamagedError):
            checkpoints._load(1, {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "uint8", "bool", "int32"])
def test_checksums_see_each_element_and_no_mesh(dtype):
    x = jnp.round(jax.random.normal(jax.random.key(0), (8, 16))).astype(dtype)
    cut = jax.device_put(x, NamedSharding(mesh.make(2, 4), P("data", "fsdp")))
    (expected,) = checkpoint.checksums({"x": x}).values()
    assert checkpoint.checksums({"x": cut}) == {"x": expected}
    raw = np.asarray(x).copy()
    for place in ((0, 0), (7, 15), (3, 8)):
        other = raw.copy()
        other[place] = 0 if raw[place] else 1
        assert checkpoint.checksums({"x": jnp.asarray(other)})["x"] != expected
    pairs = (((i, j), (i + 1, j - 1)) for i in range(7) for j in range(1, 16))
    diagonal = next((one, two) for one, two in pairs if raw[one] != raw[two])
    for one, two in ((0, 5), diagonal):
        swapped = raw.copy()
        swapped[one], swapped[two] = raw[two], raw[one]
        assert (swapped != raw).any()
        assert checkpoint.checksums({"x": jnp.asarray(swapped)})["x"] != expected
