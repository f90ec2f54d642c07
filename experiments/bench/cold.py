"""Compilation of a Llama-7B training step by recipe, cold and from the persistent cache, each in its own process.

The step is that of experiments.train, with XLA's own flags; its layers are scanned, so that two stand for 32. "cold" is
tracing, lowering and compilation with empty caches, "cached" the same in a second process, as a training program that
starts anew finds it: XLA's programs in JAX's persistent cache, Triton's kernels in fp8jax's. Predicted before the first
run: bf16 25 s, te_current 15 s more, deepseek 20 s more, coat 40 s more; cached 8 s.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # Several processes share the GPU.

import jax
import jax.numpy as jnp

import fp8jax
from experiments.bench import timing
from experiments.models.llama import LlamaConfig
from experiments.train import cli, config
from experiments.train.task import Task

BF16, RECIPES = "bf16", ("bf16", "te_current", "deepseek", "coat")
LLAMA = LlamaConfig(vocab=32000, dim=4096, layers=2, heads=32, kv_heads=32, mlp_dim=11008)
SMALL = LlamaConfig(vocab=64, dim=64, layers=1, heads=2, kv_heads=2, mlp_dim=128)  # of a dry run
BATCH, LENGTH = 4, 2048
PARTS = ("tracing", "lowering", "compilation")
COMMAND = [sys.executable, "-m", "experiments.bench", "cold"]
# Seconds that 8-bit products may add.
LIMIT = 60.0


def seconds(
    name: str, cache: str, llama: LlamaConfig = LLAMA, batch: int = BATCH, length: int = LENGTH
) -> dict[str, float]:
    """What the training step of a recipe takes in this process to be traced, lowered and compiled."""
    llama, length = (SMALL, 64) if timing.dry() else (llama, length)
    recipe = fp8jax.recipes.get(name)
    task = Task.build(llama, cli.make_optimizer(config.Config(), recipe), recipe, remat=False, seed=0)
    abstract, tokens = jax.eval_shape(task.init), jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    jax.config.update("jax_compilation_cache_dir", cache)
    cli.keep_programs()
    times = [time.perf_counter()]
    traced = jax.jit(task.step, donate_argnums=0).trace(abstract, tokens)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return {what: times[i + 1] - times[i] for i, what in enumerate(PARTS)}


def both(name: str) -> dict[str, float]:
    """Seconds of a recipe, cold in one process and cached in the next."""
    times = {}
    with tempfile.TemporaryDirectory() as cache:
        for what in ("cold", "cached"):
            command = [*COMMAND, "--one", name, "--cache", cache]
            done = subprocess.run(command, env=os.environ | {"FP8JAX_KERNEL_CACHE": f"{cache}/kernels"},
                                  stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
            parts = json.loads(done.stdout.splitlines()[-1])
            times[what] = sum(parts.values())
            times |= {f"{what}, {part}": value for part, value in parts.items()}
    return times


def rows(times: dict[str, dict[str, float]]) -> list[timing.Row]:
    """Rows of all recipes; those of bf16 must be among them."""
    table, case = [], f"batch {BATCH}, length {LENGTH}"
    for name, of in times.items():
        for what, value in of.items():
            table.append(timing.row(case, name, what, value, "s", BF16, value / times[BF16][what]))
        if name != BF16:
            added = of["cold"] - times[BF16]["cold"]
            table.append(timing.row(case, name, "added", added, f"s (limit {LIMIT:g})"))
    return table


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="cold", description=__doc__)
    parser.add_argument("--one", choices=RECIPES, help="this recipe alone, in this process; prints, writes nothing")
    parser.add_argument("--cache", help="with --one: measure in this process, with the caches in this folder")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="bf16 among them")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; several share cores and the GPU")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    timing.need_gpu()
    if options.one:
        print(json.dumps(seconds(options.one, options.cache) if options.cache else both(options.one)))
        return
    running: dict[str, Any] = {}
    waiting, times = list(options.recipes), {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            name = waiting.pop(0)
            running[name] = _start(name)
        name = next(iter(running))
        out, _ = running.pop(name).communicate()
        lines = out.strip().splitlines()
        times[name] = json.loads(lines[-1]) if lines else sys.exit(f"{name} failed")
    notes = [" ".join((__doc__ or "").split("\n\n")[1].split())]
    notes.append(f"{options.jobs} processes at a time; ratios over bf16's.")
    timing.write("cold", "Compilation of a Llama-7B training step", rows(times), notes, {}, options.out)


def _start(name: str) -> Any:
    return subprocess.Popen([*COMMAND, "--one", name], stdout=subprocess.PIPE, text=True)
