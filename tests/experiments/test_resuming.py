"""A run that was killed, stopped and resumed ends with the bits of an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import fp8jax
from experiments.mesh import flatten
from experiments.models.llama import LlamaConfig
from experiments.train import cli, config, report
from experiments.train.checkpoint import Checkpoints, digest
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task
from tests.rows import slow

ROOT = Path(__file__).parents[2]


def start(argv):
    """Starts the training program in its own process, with piped output."""
    command = [sys.executable, "-u", "-m", "experiments.train", *argv]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    pipe = subprocess.PIPE
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {"PYTHONPATH": path}
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)


def final_state(folder, steps):
    """Returns the digests of every leaf of the last checkpoint."""
    meta = json.loads((folder / "checkpoints" / str(steps) / "_CHECKPOINT_METADATA").read_text())
    return meta["custom_metadata"]["leaves"]


def test_killed_and_stopped_and_resumed_equals_left_alone(argv, out):
    steps = 240
    flags = ["--recipe", "coat_optimizer", "--steps", str(steps), "--checkpoint-every", "40", "--eval-every", "100"]
    alone, broken = ([*argv, *flags, "--run", name] for name in ("alone", "broken_off"))
    folder = out / "broken_off" / "coat_optimizer"

    cache = out / ".xla_cache"
    before = set(cache.glob("*"))
    first = start(broken)
    while not list(folder.glob("checkpoints/80")) and first.poll() is None:
        time.sleep(0.01)
    first.kill()
    assert first.wait() == -signal.SIGKILL, first.stdout.read()
    assert set(cache.glob("*")) > before  # The next process finds the compiled step in the cache.

    second = start(broken)
    lines = []
    for line in second.stdout:
        lines.append(line)
        if line.startswith("step "):
            second.send_signal(signal.SIGINT)
            break
    rest = second.stdout.read()
    assert second.wait() == 130, "".join(lines) + rest
    resumed = next(line for line in lines if line.startswith("resuming from step "))
    assert int(resumed.split()[-1]) >= 80
    stopped = int(rest.split("stopped by SIGINT: step ")[1].split()[0])
    assert stopped > int(resumed.split()[-1])
    assert "To resume: python -m experiments.train" in rest
    assert (folder / "checkpoints" / str(stopped)).is_dir()

    assert cli.main(broken) == 0
    assert cli.main(alone) == 0
    expected = final_state(out / "alone" / "coat_optimizer", steps)
    assert len(expected) > 20
    assert final_state(folder, steps) == expected

    rows, whole = (report.read_metrics(f / "metrics.jsonl") for f in (folder, out / "alone" / "coat_optimizer"))
    keys = ("step", "loss", "grad_norm", "lr", "valid_loss")
    assert [[row.get(k) for k in keys] for row in rows] == [[row.get(k) for k in keys] for row in whole]
    assert np.isfinite(rows[-1]["valid_loss"])


# The killed run above has 8-bit moments. These have amax histories, weight bounds, thresholds, keys and fp16 masters.
# No other recipe has a further kind of state.
@pytest.mark.parametrize("name", ["te_delayed", slow("moss"), slow("int8_fallback"), slow("fp8_lm")])
def test_every_kind_of_state_goes_on_from_a_checkpoint_to_the_same_bits(name, tmp_path):
    recipe = fp8jax.recipes.get(name)
    shape = LlamaConfig(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=64)
    task = Task(shape, make_optimizer(config.Config(), recipe), recipe, remat=False, seed=0)
    step = jax.jit(task.step, compiler_options={"xla_llvm_disable_expensive_passes": True})
    batches = np.random.default_rng(0).integers(0, shape.vocab, (4, 2, 17)).astype(np.int32)
    alone = jax.jit(task.init)()
    for tokens in batches[:2]:
        alone, _ = step(alone, tokens)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(2, alone, loader={}, config={})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        resumed, _ = checkpoints.restore(2, jax.eval_shape(task.init))
    for tokens in batches[2:]:
        alone, _ = step(alone, tokens)
        resumed, metrics = step(resumed, tokens)
    assert bool(metrics["healthy"])
    for (leaf, x), y in zip(flatten(alone).items(), flatten(resumed).values(), strict=True):
        assert digest(np.asarray(x)) == digest(np.asarray(y)), leaf


@pytest.mark.slow
def test_sigterm_before_the_first_step_says_how_to_go_on(argv, out):
    process = start([*argv, "--run", "terminated"])
    for line in process.stdout:
        if line.startswith("device"):
            break
    process.terminate()
    rest = process.stdout.read()
    assert process.wait() == 143, rest
    assert "stopped by SIGTERM: " in rest
    assert not list((out / "terminated").glob("*/result.json"))
