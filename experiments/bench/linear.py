"""Linear layers of a Llama: forward, dgrad and wgrad with all quantization, compared with bf16 by XLA.

The layer is `fp8jax.linear` with bf16 arrays. The codes of the input are saved; nothing is cached. Predicted before the
first run, relative to XLA in bf16 with 16 k tokens: `te_current` 1.55, `deepseek` 1.1.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import fp8jax
from experiments.bench import driver, timing
from fp8jax import recipes

BF16 = "xla bf16"
TOKENS = 16384
SHAPES = ((4096, 4096), (4096, 11008), (11008, 4096))  # (inputs, outputs) of Llama-7B
RECIPES = {
    "te_current": recipes.te_current().linear,
    "te_current, fast accumulation": recipes.Linear(
        "e4m3", "e4m3", "e5m2", fast_accumulation=("forward", "dgrad", "wgrad")
    ),
    "deepseek": recipes.deepseek().linear,
    "int8_block": recipes.int8_block().linear,
    "int8_fallback, 20 %": recipes.int8_fallback().linear,
    # A single layer has no optimizer whose updates automatic scaling could follow.
    "moss": dataclasses.replace(recipes.moss().linear, w_scaling=None),
    "fast": dataclasses.replace(recipes.fast().linear, w_scaling=None),
}
# One in five 128x128 blocks of standard normal values has an amax above this threshold.
THRESHOLD = 4.35


def layer(recipe: recipes.Linear) -> Any:
    """Returns a function of (x, w) with a fixed key for rounding and a threshold that a fifth of all blocks exceeds."""
    key = jax.random.key(0) if recipe.is_stochastic else None
    if not recipe.stateful_strategies:
        return functools.partial(fp8jax.linear, recipe=recipe, key=key)
    state = fp8jax.init_scaling(recipe)._replace(x=jnp.float32(THRESHOLD))
    return lambda x, w: fp8jax.scaled_linear(x, w, state, recipe=recipe, key=key)[0]


def arms() -> dict[str, Any]:
    """Returns functions from (x, w, dy) to (y, dx, dw)."""

    def three(layer: Any, x: Any, w: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(layer, x, w)
        return y, *vjp(dy)

    def bf16(x: Any, w: Any) -> Any:
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16)

    layers = {BF16: bf16} | {name: layer(recipe) for name, recipe in RECIPES.items()}
    return {name: functools.partial(three, function) for name, function in layers.items()}


def rate_rows(case: str, times: dict[str, timing.Seconds], flops: float) -> list[timing.Row]:
    """Returns rates of the three matmuls with all quantization, relative to XLA in bf16."""
    return [
        driver.rate_row(case, name, "rate", time, 1e-12 * flops, "TFLOP/s", BF16, times[BF16] / time)
        for name, time in times.items()
    ]


def main(argv: list[str]) -> None:
    options = driver.parser("linear", __doc__, rounds=5, burst=0.03).parse_args(argv)
    timing.need_gpu()
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)  # noqa: E731
    file = driver.ResultsFile(options, "Linear layers, forward and backward", driver.notes_of(__doc__))
    for tokens, inputs, outputs in [(256, 256, 128)] if timing.dry() else [(TOKENS, *shape) for shape in SHAPES]:
        case = f"{tokens} x {inputs} -> {outputs}"
        operands = (draw(0, tokens, inputs), draw(1, inputs, outputs) * 0.02, draw(2, tokens, outputs))
        ready = timing.compiled(arms(), [operands], workers=1)
        times = timing.seconds(ready, options.rounds, options.burst)
        rows, expected = rate_rows(case, times, 6.0 * tokens * inputs * outputs), ready[BF16]()
        for name in (name for name in times if name != BF16):
            error = float(driver.relative_error(ready[name](), expected))
            rows.append(timing.row(case, name, "error", error, f"of {BF16}"))
        file.add(rows)
    file.end("rate")
