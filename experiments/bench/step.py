"""A whole training step of a Llama by recipe: time and memory, against bf16 that recomputes element-wise operations.

The step is that of `experiments.train`: loss, gradients, clipping and AdamW, weights in fp32. Its recipes are presets;
"bf16" keeps for the backward pass what Flax's modules keep, and "bf16, recomputed" only what products and attention
give, as a good engineer would have it: that is the baseline. Arms run one after another, for memory, in several rounds
of another order. "temporaries" are what the compiled program needs beside its arguments, "memory" all of it.
"""

import argparse
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import fp8jax
from experiments import config, train
from experiments.bench import timing
from experiments.bench.layer import BF16, BF16_AGAIN
from experiments.models import sizes
from experiments.models.llama import LlamaConfig
from experiments.tables import coat_memory
from experiments.task import Task

ARMS = (BF16, BF16_AGAIN, "te_current", "coat", "coat_fast")
VOCABULARY = 32_000


@contextlib.contextmanager
def checkpointed(name: str) -> Iterator[bool]:
    """Whether the layers of an arm are checkpointed; while traced in it, they keep what products and attention give."""
    with mock.patch.object(nnx, "remat", functools.partial(nnx.remat, policy=coat_memory.kept_products)):
        yield name == BF16_AGAIN


def build(name: str, llama: LlamaConfig, batch: int, length: int) -> tuple[Task, Any]:
    """An arm's task and its compiled step."""
    recipe = fp8jax.recipes.get(name.partition(",")[0])
    with checkpointed(name) as remat:
        task = Task.build(llama, train.make_optimizer(config.Config(), recipe), recipe, remat=remat, seed=0)
        abstract, tokens = jax.eval_shape(task.init), jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
        return task, jax.jit(task.step, donate_argnums=0).lower(abstract, tokens).compile()


def memory(compiled: Any) -> tuple[float, float]:
    """Bytes of temporaries, and of everything, while a compiled step runs."""
    sizes = compiled.memory_analysis()
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.temp_size_in_bytes, sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + results


def seconds(task: Task, compiled: Callable[..., Any], tokens: jax.Array, steps: int) -> list[float]:
    """Times of so many steps, each of its own, after a quarter as many untimed."""
    state = jax.block_until_ready(jax.jit(task.init)())
    times = []
    for i in range(-max(2, steps // 4), steps):
        start = time.perf_counter()
        state, metrics = compiled(state, tokens)
        jax.block_until_ready(metrics)
        if i >= 0:
            times.append(time.perf_counter() - start)
    return times


def rows(case: str, times: dict[str, timing.Seconds], sizes: dict[str, tuple[float, float]]) -> list[timing.Row]:
    """Milliseconds and GB (1e9 bytes), against bf16 recomputed, and plain bf16."""
    found = []
    for name, median in times.items():
        spread = median.quartiles(lambda t: 1e3 * t)
        base = times[BF16_AGAIN]
        found.append(timing.row(case, name, "step", 1e3 * median, "ms", BF16_AGAIN, base / median, spread))
        found.append(timing.row(case, name, "step, bf16", 1e3 * median, "ms", BF16, times[BF16] / median, spread))
        for i, metric in enumerate(("temporaries", "memory")):
            of, against = sizes[name][i], sizes[BF16_AGAIN][i]
            found.append(timing.row(case, name, metric, of / 1e9, "GB", BF16_AGAIN, against / of))
    return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="step", description=__doc__)
    parser.add_argument("--model", default="1b", choices=sizes.NAMES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="timed in a round")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    timing.need_gpu()
    measure(sizes.get(options.model, VOCABULARY), options)


def measure(llama: LlamaConfig, options: argparse.Namespace) -> None:
    """Times all arms of a model and writes OUT/step.json."""
    case = f"{options.model}, {options.batch} x {options.length} tokens"
    built = {}
    for name in ARMS:
        start = time.perf_counter()
        built[name] = build(name, llama, options.batch, options.length)
        print(f"  {name}: compiled in {time.perf_counter() - start:.0f} s", flush=True)
    shape = (options.batch, options.length + 1)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, llama.vocab, jnp.int32)
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    order = np.random.default_rng(0)
    for _ in range(options.rounds):
        for name in order.permutation(ARMS):
            times[name] += seconds(*built[name], tokens, options.steps)
    medians = {name: timing.Seconds(of) for name, of in times.items()}
    parameters = train.count(jax.eval_shape(built[BF16][0].init).params)
    notes = [
        " ".join((__doc__ or "").split("\n\n")[1].split()),
        f"{parameters:,} parameters. Ratios are the baseline's over the arm's.",
    ]
    found = rows(case, medians, {name: memory(compiled) for name, (_, compiled) in built.items()})
    timing.write("step", "A whole training step", found, notes, {}, options.out)
