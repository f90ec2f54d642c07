"""A LoRA training step of Llama 3.1 8B, with frozen weights in bf16 or as 8-bit codes.

An arm is "RECIPE on BASE": the matmuls of a recipe, and the format of the frozen base. "bf16 on e4m3" decodes the codes
before each matmul, so it saves only memory. One sequence per step. All linear layers have adapters of rank 16. Blocks
are rematerialized. Embedding and head are bf16. "compiled memory" is the arguments and temporary memory of the compiled
step. Weights are random, which does not affect time or memory.
"""

import argparse
import functools
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import jax
import jax.numpy as jnp

import fp8jax
from experiments.bench import driver, timing
from experiments.models.llama import LlamaConfig
from experiments.train import config
from experiments.train.adapters import base_recipe
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task

LLAMA = LlamaConfig(vocab=128_256, dim=4096, layers=32, heads=32, kv_heads=8, mlp_dim=14_336, rope_theta=5e5)
SMALL = LlamaConfig(vocab=256, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=128)
BASELINE = "bf16 on bf16"
ARMS = (BASELINE, "te_current on e4m3", "fast on e4m3", "deepseek on e4m3:block128", "bf16 on e4m3")


class LoraArm(driver.Arm):
    """A training step of adapters, with its state and the frozen base."""

    def __init__(self, name: str, llama: LlamaConfig, batch: int, length: int, rank: int, unroll: int) -> None:
        recipe_name, _, base = name.partition(" on ")
        lora = config.Lora(rank, 2.0 * rank, base=base or "bf16")
        recipe = base_recipe(fp8jax.recipes.get(recipe_name), lora)
        optimizer = make_optimizer(config.Config(), recipe)
        self.task = Task(llama, optimizer, recipe, remat=True, seed=0, unroll=unroll, lora=lora)
        self.shapes = jax.eval_shape(self.task.init), jax.eval_shape(self.task.base)
        self.tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, llama.vocab, jnp.int32)
        self.build = timing.lowered(
            self.task.step, self.shapes[0], self.tokens, self.shapes[1], donate_argnums=0, keep_unused=True
        )
        self.begin = jax.jit(self._begun)

    def _begun(self) -> Any:
        """Returns an initial state with random weights."""
        state = jax.tree.map(_drawn, self.shapes[0])
        moments = jax.tree.map(jnp.zeros_like, state.opt_state)
        return state._replace(opt_state=moments, healthy=jnp.array(True))

    def start(self) -> None:
        """Creates the state and the base."""
        super().start()
        self.inputs = self.tokens, jax.tree.map(_drawn, self.shapes[1])

    def __call__(self) -> jax.Array:
        """Runs one step and returns its loss."""
        return super().__call__()["loss"]  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Frees the state and the base."""
        super().stop()
        jax.tree.map(lambda x: x.delete(), self.inputs[1:])
        self.inputs = ()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    key = jax.random.key(0, impl="rbg")
    if dtype == jnp.uint8:
        # Codes with magnitudes below 2, without NaN.
        return jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(0xBF)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    # Vectors are scales of norms; small arrays are scales of codes.
    return jnp.full(shape, 0.02, dtype) if len(shape) < 3 else 0.02 * jax.random.normal(key, shape, dtype)


def _drawn(x: jax.ShapeDtypeStruct) -> jax.Array:
    small = len(x.shape) == 3 and x.shape[-1] * x.shape[-2] <= 1 << 16 and x.dtype == jnp.float32
    return jnp.full(x.shape, 0.01, x.dtype) if small else _random(x.shape, jnp.dtype(x.dtype))


def main(argv: list[str]) -> None:
    parser = driver.parser("lora", __doc__, rounds=3, steps=4)
    parser.add_argument("--arm", nargs="+", default=list(ARMS), help=f'RECIPE on BASE; must include "{BASELINE}"')
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--unroll", type=int, default=1, help="layers per iteration of the loop over layers")
    options = parser.parse_args(argv)
    timing.need_gpu()
    note = f"The loop over layers is unrolled {options.unroll} times. The arms run in turns. Figures are medians."
    title = "LoRA training steps, by format of the frozen base"
    file = driver.ResultsFile(options, title, [*driver.notes_of(__doc__), note])
    file.add(measure(options))
    file.end()


def measure(options: argparse.Namespace) -> list[timing.Row]:
    """Returns the rows of all arms."""
    names: Sequence[str] = list(dict.fromkeys([BASELINE, *options.arm]))
    llama, length = (SMALL, 32) if timing.dry() else (LLAMA, options.length)
    make = lambda name: LoraArm(name, llama, options.batch, length, options.rank, options.unroll)  # noqa: E731
    arms = driver.built(names, make)
    times = driver.timed(arms, options.rounds, options.steps)
    case, table = f"Llama 3.1 8B, {options.batch} x {options.length:,} tokens", list[timing.Row]()
    needs = {name: driver.memory(arm.program)[1] for name, arm in arms.items()}
    for name, time_ in times.items():
        table.append(driver.time_row(case, name, "step", time_, BASELINE, times[BASELINE] / time_))
        table.append(timing.row(case, name, "needs", needs[name], "GB", BASELINE, needs[BASELINE] / needs[name]))
    return table
