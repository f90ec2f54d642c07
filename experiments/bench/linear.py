"""Forward, dgrad and wgrad of Llama's linear layers, with all quantization and transposition: recipes against XLA bf16.

The layer is `fp8jax.linear` of bf16 arrays as a model calls it; the input's codes are saved, nothing is cached.
Predicted before the first run, over XLA bf16 with 16 k tokens: te_current 1.55, with two-stage scales the same,
deepseek 1.1 (its block products reach 0.82 of cuBLASLt's), MOSS's two levels folded 1.4.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fp8jax
from experiments.bench import cases, timing
from fp8jax import recipes

BF16 = "xla bf16"
RECIPES = {
    "te_current": recipes.te_current().linear,
    "te_current, two-stage": recipes.Linear("e4m3", "e4m3", "e5m2", scaling="two_stage"),
    "e4m3 rows": recipes.Linear("e4m3:token", "e4m3:token", "e5m2:token", w_dgrad="e4m3:token", x_wgrad="e4m3:token",
                                dy_wgrad="e5m2:token", saved="e4m3:token"),
    "deepseek": recipes.deepseek().linear,
}  # fmt: skip


def arms() -> dict[str, Any]:
    """Functions of (x, w, dy) that return y, dx and dw."""

    def three(layer: Any, x: Any, w: Any, dy: Any) -> Any:
        y, back = jax.vjp(layer, x, w)
        return y, *back(dy)

    def plain(x: Any, w: Any) -> Any:
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16)

    found = {BF16: functools.partial(three, plain)}
    for name, recipe in RECIPES.items():
        found[name] = functools.partial(three, functools.partial(fp8jax.linear, recipe=recipe))
    return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="linear", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.03, help="seconds of one round of one implementation")
    parser.add_argument("--model", choices=["7b", "13b", "all"], default="7b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    timing.need_gpu()
    shapes = {"7b": cases.LINEARS_7B, "13b": cases.LINEARS_13B, "all": cases.LINEARS_7B + cases.LINEARS_13B}
    rows: list[timing.Row] = []
    for tokens in options.tokens:
        for inputs, outputs in shapes[options.model]:
            draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)  # noqa: E731
            operands = (draw(0, tokens, inputs), draw(1, inputs, outputs) * 0.02, draw(2, tokens, outputs))
            wanted, sets = arms(), [operands]
            ready = timing.compiled(wanted, sets)
            times = timing.seconds(ready, options.rounds, options.burst)
            case = f"{tokens} x {inputs} -> {outputs}"
            exact = [np.asarray(v, np.float32) for v in ready[BF16]()[0]]
            for name, time in times.items():
                rate = 6 * tokens * inputs * outputs / time / 1e12
                ratio = times[BF16] / time
                rows.append(timing.row(case, name, "rate", rate, "TFLOP/s", BF16, ratio))
                if name != BF16:
                    got = [np.asarray(v, np.float32) for v in ready[name]()[0]]
                    error = max(
                        float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, exact, strict=True)
                    )
                    rows.append(timing.row(case, name, "error", error, f"of {BF16}"))
    rows += timing.means(rows, "rate")
    notes = [" ".join((__doc__ or "").split("\n\n")[1].split())]
    timing.write("linear", "Linear layers, forward and backward", rows, notes, {}, options.out)
