"""Scales for the product of `deepseek` that makes the weight's gradient: `python -m experiments.papers.deepseek_wgrad`.

DeepSeek-V3 quantizes both of its operands in groups of 1x128 along the tokens, which a kernel multiplies at 0.78 of
the speed that it has with blocks of 128x128 for one operand. The errors of that and of scales of whole rows, against
the product in fp64. Half a minute on two CPU cores.
"""

import dataclasses
import sys

import jax
import numpy as np
from matplotlib.figure import Figure

import fp8jax
from experiments.papers import common
from experiments.papers.common import Row

TOKENS, INPUTS, OUTPUTS = 4096, 512, 512
GROUP, BLOCK, ROW = "e4m3:group128", "e4m3:block128", "e4m3:token"
# Of the input and of the gradient.
WAYS = {
    "1x128, 1x128 (DeepSeek-V3)": (GROUP, GROUP),
    "1x128, 128x128": (GROUP, BLOCK),
    "128x128, 128x128": (BLOCK, BLOCK),
    "1x128, rows": (GROUP, ROW),
    "rows, rows": (ROW, ROW),
}
BASE = next(iter(WAYS))
NOTES = [
    f"Weight gradients of a linear, {INPUTS} to {OUTPUTS}, from {TOKENS:,} tokens; errors are relative to the product "
    "in fp64 (Frobenius norm). What the operands are in the forward and the other backward product, groups of 1x128, "
    "does not change; the input is quantized a second time from its saved codes, as in training.",
    '"channels": one of 100 inputs is 30 times as large. "tokens": gradients of tokens have log-normal sizes (sigma '
    '2). "both": both; outputs have log-normal sizes (sigma 1), too.',
]


def operands(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input, weight and gradient of a kind of the notes, fp32."""
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(TOKENS, INPUTS)), rng.normal(size=(TOKENS, OUTPUTS))
    if kind in ("channels", "both"):
        x[:, ::100] *= 30
    if kind in ("tokens", "both"):
        dy *= np.exp(2 * rng.normal(size=(TOKENS, 1)))
    if kind == "both":
        dy *= np.exp(rng.normal(size=(1, OUTPUTS)))
    w = rng.normal(size=(INPUTS, OUTPUTS)) / np.sqrt(INPUTS)
    return x.astype(np.float32), w.astype(np.float32), dy.astype(np.float32)


def error(kind: str, way: str) -> float:
    """Relative error of the weight's gradient."""
    x, w, dy = operands(kind)
    x_wgrad, dy_wgrad = WAYS[way]
    part = dataclasses.replace(fp8jax.recipes.deepseek().linear, x_wgrad=x_wgrad, dy_wgrad=dy_wgrad)
    dw = jax.jit(lambda x, w, dy: jax.vjp(lambda w: fp8jax.linear(x, w, recipe=part), w)[1](dy)[0])(x, w, dy)
    want = x.astype(np.float64).T @ dy.astype(np.float64)
    return float(np.linalg.norm(np.asarray(dw, np.float64) - want) / np.linalg.norm(want))


def main() -> int:
    """Regenerates results/deepseek_wgrad.json and .png."""
    arguments = common.parse(__doc__)
    rows, kinds = [], ("plain", "channels", "tokens", "both")
    errors = {(kind, way): error(kind, way) for kind in kinds for way in WAYS}
    for (kind, way), value in errors.items():
        print(f"{kind:9s} {way:28s} {value:.4f} ({value / errors[kind, BASE]:.2f})", flush=True)
        ratio = value / errors[kind, BASE]
        rows.append(Row(way, "error of dW", value, table="error of dW", pivot=(way, kind), baseline=BASE, ratio=ratio))
    figure = Figure(figsize=(8, 3.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for i, way in enumerate(WAYS):
        axes.bar([k + i / 6 for k in range(len(kinds))], [errors[kind, way] for kind in kinds], 1 / 6, label=way)
    axes.set(xticks=[k + 1 / 3 for k in range(len(kinds))], xticklabels=kinds, ylabel="relative error of dW")
    axes.legend(fontsize=7)
    title = "The weight's gradient of deepseek: groups, blocks and rows"
    common.write("deepseek_wgrad", title, rows, NOTES, figure, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
