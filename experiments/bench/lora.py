"""A training step of adapters of a Llama 3.1 8B whose own weights are not trained, held in bf16 and as 8-bit codes.

An arm is "RECIPE on BASE": the recipe's products with a base held so; "bf16 on e4m3" decodes the codes to 16 bits for
each product and saves memory alone. One sequence a step, all linear layers of blocks have adapters of rank 16, blocks
are computed again in the backward pass; embedding and head are in bf16 in all arms. Weights are random: time and memory
do not depend on what they say. "needs" are arguments and temporaries of the compiled step.
"""

import argparse
import concurrent.futures
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import jax
import jax.numpy as jnp

import fp8jax
from experiments.bench import timing
from experiments.models.llama import LlamaConfig
from experiments.train import cli, config
from experiments.train.adapters import of_base
from experiments.train.task import Task

LLAMA = LlamaConfig(vocab=128_256, dim=4096, layers=32, heads=32, kv_heads=8, mlp_dim=14_336, rope_theta=5e5)
SMALL = LlamaConfig(vocab=256, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=128)
BASELINE = "bf16 on bf16"
ARMS = (BASELINE, "te_current on e4m3", "fast on e4m3", "deepseek on e4m3:block128", "bf16 on e4m3")


class LoraArm:
    """A step of adapters, and the arrays that it reads and updates."""

    def __init__(self, name: str, llama: LlamaConfig, batch: int, length: int, rank: int, unroll: int) -> None:
        recipe_name, _, base = name.partition(" on ")
        lora = config.Lora(rank, 2.0 * rank, base=base or "bf16")
        recipe = of_base(fp8jax.recipes.get(recipe_name), lora)
        optimizer = cli.make_optimizer(config.Config(), recipe)
        how: dict[str, Any] = {"remat": True, "seed": 0, "unroll": unroll, "lora": lora}
        self.task = Task.build(llama, optimizer, recipe, **how)
        self.shapes = jax.eval_shape(self.task.init), jax.eval_shape(self.task.base)
        self.tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, llama.vocab, jnp.int32)
        self.build = timing.lowered(
            self.task.step, self.shapes[0], self.tokens, self.shapes[1], donate_argnums=0, keep_unused=True
        )
        self.arrays: Any = None

    @functools.cached_property
    def program(self) -> Any:
        """The compiled step."""
        return self.build()

    def __call__(self) -> jax.Array:
        """One step; its loss."""
        if self.arrays is None:
            self.arrays = [jax.tree.map(_drawn, each) for each in self.shapes]
            self.arrays[0] = self.arrays[0]._replace(
                opt_state=jax.tree.map(jnp.zeros_like, self.arrays[0].opt_state), healthy=jnp.array(True)
            )
        self.arrays[0], metrics = self.program(self.arrays[0], self.tokens, self.arrays[1])
        return metrics["loss"]  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Frees the arrays."""
        jax.tree.map(lambda x: x.delete(), self.arrays)
        self.arrays = None

    def needs(self) -> float:
        """GB of arguments and temporaries."""
        found = self.program.memory_analysis()
        fresh = found.output_size_in_bytes - found.alias_size_in_bytes
        return float(found.argument_size_in_bytes + found.temp_size_in_bytes + fresh) / 1e9


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    key = jax.random.key(0, impl="rbg")
    if dtype == jnp.uint8:
        # Codes below 2 in magnitude, none of them a NaN.
        return jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(0xBF)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    # Vectors are scales of norms; few numbers those of codes.
    return jnp.full(shape, 0.02, dtype) if len(shape) < 3 else 0.02 * jax.random.normal(key, shape, dtype)


def _drawn(x: jax.ShapeDtypeStruct) -> jax.Array:
    small = len(x.shape) == 3 and x.shape[-1] * x.shape[-2] <= 1 << 16 and x.dtype == jnp.float32
    return jnp.full(x.shape, 0.01, x.dtype) if small else _random(x.shape, jnp.dtype(x.dtype))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="lora", description=__doc__)
    parser.add_argument("--arm", nargs="+", default=list(ARMS), help=f'RECIPE on BASE, "{BASELINE}" among them')
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--unroll", type=int, default=1, help="layers in a turn of the loop over them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a round, untimed and then as many timed")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    timing.need_gpu()
    notes = [" ".join(part.split()) for part in (__doc__ or "").split("\n\n")[1:]]
    notes.append(
        f"Layers in a turn of the loop: {options.unroll}. Arms run in turns, each from arrays made anew; medians."
    )
    table = measure(options)
    timing.write("lora", "Training steps of adapters on a base that is not trained", table, notes, {}, options.out)


def measure(options: argparse.Namespace) -> list[timing.Row]:
    """Rows of all arms."""
    names: Sequence[str] = list(dict.fromkeys([BASELINE, *options.arm]))
    llama, length = (SMALL, 32) if timing.dry() else (LLAMA, options.length)
    how = options.batch, length, options.rank, options.unroll
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # One is compiled while the next one is traced.
        arms, waiting = {}, list[Any]()
        for name in names:
            arm = arms[name] = LoraArm(name, llama, *how)
            waiting.append(pool.submit(getattr, arm, "program"))
        for done in waiting:
            done.result()
    for name, arm in arms.items():
        print(f"  {name}: loss {float(arm()):.4f}", flush=True)
        arm.stop()
    calls = {name: timing.late(arm) for name, arm in arms.items()}
    times = timing.in_turns(calls, options.rounds, dict.fromkeys(arms, options.steps), lambda n: arms[n].stop())
    case, table = f"Llama 3.1 8B, {options.batch} x {options.length:,} tokens", list[timing.Row]()
    needs = {name: arm.needs() for name, arm in arms.items()}
    for name, time_ in times.items():
        spread = time_.quartiles(lambda t: 1e3 * t)
        base = times[BASELINE]
        table.append(timing.row(case, name, "step", 1e3 * time_, "ms", BASELINE, base / time_, spread))
        table.append(timing.row(case, name, "needs", needs[name], "GB", BASELINE, needs[BASELINE] / needs[name]))
    return table
