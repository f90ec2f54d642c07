"""Several processes that train one run together, on one or several hosts, by `jax.distributed`.

All processes run the same program in the same order. Process 0 writes the run's files and the output; the others read
the same folder. An error of a single process (a missing file, a lock) is exchanged before any process continues. All
processes then end with the same message, and none waits for one that has ended.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax._src.clusters import ClusterEnv
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from experiments.errors import UserError
from experiments.signals import StopSignals
from experiments.train import relay

if TYPE_CHECKING:
    from experiments.train.config import Run

# Exit code of a process that stops because another one has ended or did not join.
OTHER_PROCESS_GONE = 5
_NETWORK = re.compile(r"[A-Z_]+: .*(gloo|nccl|coordination service|barrier)", re.IGNORECASE | re.DOTALL)
# The relay of this process, and a lock that makes this process report its end only once.
_relayed: subprocess.Popen[str] | None = None
_ending = threading.Lock()
_CANNOT = (
    "{} cannot join the others ({}); set --coordinator HOST:PORT, or use auto on a cluster that jax.distributed "
    "supports, such as Slurm"
)
# Bytes of the message that a process sends to the others.
_MESSAGE = 1000


class Agreed(UserError):
    """An error of one process, which every process raises."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def join(settings: Run, stop: StopSignals) -> None:
    """Joins the other processes of a run. Does nothing without `--coordinator`.

    An earlier signal takes effect after the join: otherwise the others would wait for this process for `patience` s.

    Afterwards, this process ends with a message and exit code `OTHER_PROCESS_GONE` when another process ends
    (`experiments/train/relay.py`). `--coordinator auto` uses the cluster detection of `jax.distributed.initialize`
    (Slurm, Open MPI, Kubernetes and others).

    Raises:
        UserError: no cluster is found, or the address is impossible.
    """
    if not settings.coordinator:
        return
    patience = settings.patience
    process = _find_process(settings)
    label = f"--coordinator {settings.coordinator}: process {process.number} of {process.processes}"
    addresses = _relay(process, _silence(settings), label)

    def give_up() -> None:
        print(
            f"error: {label} waited {patience} s (--patience) for the others. Start all of them again, with the "
            "same address, that of the host of process 0, and the same --process-count",
            file=sys.stderr,
        )
        # Another process may have been killed before it joined.
        _abandon(OTHER_PROCESS_GONE if stop.signum is None else 128 + stop.signum)

    # JAX's own time limit would end the process without a message.
    timer = threading.Timer(patience, give_up)
    timer.start()
    stop.notice = (
        f"{label} ends when the others have joined it, or after {patience} s (--patience); a second signal ends it now"
    )
    if stop.signum is not None:
        print(stop.notice, file=sys.stderr, flush=True)
    # In a thread: Python runs signal handlers while it waits for a thread, but not while it waits for XLA.
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        joined = pool.submit(
            jax.distributed.initialize,
            **addresses,
            num_processes=process.processes,
            process_id=process.number,
            local_device_ids=process.devices,
            initialization_timeout=patience + 60,
            # A client sends two heartbeats in this time. A relay checks them more often than the coordinator.
            heartbeat_timeout_seconds=-(-_silence(settings) * 4 // 3),
            shutdown_timeout_seconds=patience,
        )
        joined.result()
    except (ValueError, RuntimeError) as error:  # XLA's errors are RuntimeErrors
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(_CANNOT.format(label, why)) from None
    finally:
        timer.cancel()
        pool.shutdown()
        stop.notice = ""
    # The coordination service has installed a handler of SIGTERM.
    stop.renew()


class _Process(NamedTuple):
    """A process of a run: address, number, process count, and its devices if it has only some of the host's."""

    address: str
    number: int
    processes: int
    devices: Sequence[int] | None = None


def _find_process(settings: Run) -> _Process:
    """Returns address and number of a process, from the command line or the cluster."""
    if settings.coordinator != "auto":
        assert settings.process_id is not None
        assert settings.process_count is not None
        return _Process(settings.coordinator, settings.process_id, settings.process_count)
    # As in jax.distributed.initialize, which would also connect to the coordinator.
    address, processes, number, devices = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, settings.patience
    )
    if address is None or processes is None or number is None:
        raise UserError(_CANNOT.format("--coordinator auto: this process", "no cluster was detected"))
    return _Process(address, number, processes, devices)


def _relay(process_info: _Process, silence: int, label: str) -> dict[str, Any]:
    """Starts this process's relay and a thread that reads it. Returns arguments of `jax.distributed.initialize`."""
    global _relayed
    host, port = process_info.address.rsplit(":", 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        service = free.getsockname()[1]
    numbers = (process_info.number, host, port, service, silence)
    command = [sys.executable, "-I", "-S", relay.__file__, *map(str, numbers)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1, start_new_session=True)
    assert process.stdout is not None
    lines = process.stdout
    kind, detail = (lines.readline().strip() or "error its relay has ended").split(" ", 1)
    if kind == "error":
        raise UserError(f"{label} cannot listen on port {port} ({detail}); use another port")
    _relayed = process

    def watch() -> None:
        line = lines.readline()
        ended = f"process {line.split()[1]} is gone" if line else "its relay has ended"
        end(
            OTHER_PROCESS_GONE,
            False,
            other_process_gone_message(f"process {process_info.number} of {process_info.processes}", ended),
        )

    threading.Thread(target=watch, daemon=True).start()
    address = {"coordinator_address": f"127.0.0.1:{detail}"}
    return address if process_info.number else address | {"coordinator_bind_address": f"127.0.0.1:{service}"}


def several() -> bool:
    """Returns whether there are several processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Returns whether this process writes the run's files."""
    return not several() or jax.process_index() == 0


@contextlib.contextmanager
def agreement() -> Iterator[None]:
    """A context at whose end all processes wait for each other. An error of one process is raised in all.

    Raises:
        UserError: the error of a single process.
        Agreed: the error of the first of several processes that has one. `OSError` has exit code 3.
    """
    if not several():
        yield
        return
    message, code = "", 0
    try:
        yield
    except UserError as error:
        message, code = str(error), error.exit_code
    except OSError as error:
        message, code = str(error), 3
    _raise_first(message, code)


def _raise_first(message: str, code: int) -> None:
    note = np.zeros(_MESSAGE, np.uint8)
    raw = message.encode()[: _MESSAGE - 1]
    note[0], note[1 : 1 + len(raw)] = code, np.frombuffer(raw, np.uint8)
    for process, other in enumerate(np.asarray(multihost_utils.process_allgather(note))):
        if other[0]:
            text = other[1:].tobytes().rstrip(b"\0").decode(errors="ignore")
            raise Agreed(f"process {process}: {text}", int(other[0]))


def check_same(values: Mapping[str, Any]) -> None:
    """Compares values that must be equal in all processes.

    Args:
        values: JSON values by name.

    Raises:
        Agreed: values of a process differ from those of the first. The message has their names.
    """
    if not several():
        return
    digests = [hashlib.sha256(json.dumps(value, default=str).encode()).digest() for value in values.values()]
    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), -1)
    all_digests = np.asarray(multihost_utils.process_allgather(mine))
    for process, other in enumerate(all_digests):
        differs = [name for name, a, b in zip(values, all_digests[0], other, strict=True) if (a != b).any()]
        if differs:
            raise Agreed(
                f"process {process} was started with another {', '.join(differs)} than process 0. Start all processes "
                "with the same text and the same command line, except for --process-id",
                UserError.exit_code,
            )


def is_other_process_gone(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, means that another process has ended or is unreachable."""
    while several() and error is not None:
        # A failure during a wait is a JaxRuntimeError. An immediate failure has another type with the same text.
        if isinstance(error, jax.errors.JaxRuntimeError) or _NETWORK.match(str(error)):
            return "RESOURCE_EXHAUSTED" not in str(error)
        error = error.__cause__ or error.__context__
    return False


def gather(tree: Any) -> Any:
    """Gathers arrays that are sharded over processes to NumPy arrays in each process."""
    if not several():
        return tree
    return multihost_utils.process_allgather(tree, tiled=True)


def signals(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, signum: int | None) -> jax.Array:
    """Returns the signal of each process, repeated for its devices: an input of the training step."""
    local_signal = np.full((1,), signum or 0, np.int32)
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size,), sharding, lambda index: local_signal)


def _silence(settings: Run) -> int:
    """Returns seconds without a heartbeat until a process counts as gone. Less than 3 s needs too many heartbeats."""
    return max(settings.patience, 3)


def other_process_gone_message(label: str, why: str) -> str:
    """Returns the message of a process that ends because another one has ended."""
    return (
        f"error: {label} ends: another one has ended, or cannot be reached ({why}). Start all again: training "
        "goes on from the newest checkpoint"
    )


def end(code: int, agreed: bool, message: str = "") -> int:
    """Prints a message, and returns the exit code if all processes end with it. Otherwise ends this process.

    Args:
        code: exit code of this process.
        agreed: whether all processes end with this code; otherwise waiting for the others could last forever.
        message: text for standard error. If agreed, only process 0 prints it.
    """
    with _ending:
        if message and (not agreed or first()):
            print(message, file=sys.stderr)
        if not agreed and (_relayed is not None or several()):
            _abandon(code)
    if _relayed is not None and _relayed.stdin is not None:
        with contextlib.suppress(OSError):
            _relayed.stdin.write("bye\n")
    return code


def _abandon(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
