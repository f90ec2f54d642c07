"""INT8 matmuls on one GPU: scales per row and tensor, blocks of 128x128, and blocks with fallback.

Only the matmul is timed, as in `gemm`. A rate counts each block once, so the ideal with a share r of fallback blocks is
1 / (1 + r) of the rate without fallback. "random": fallback blocks are chosen at random. "sequential": whole rows of
blocks fall back, the worst case of arXiv 2503.08040, Figure 8(c). The time includes the preparation from the mask of
blocks, but no quantization. "rows" is what `switchback` multiplies: one kernel, or XLA's matmul with scales applied to
its int32 result.

Predicted before the first run: blocks 1,000 TOP/s at 8192^3, 0.78 of XLA's int8 matmul and 1.33 of bf16; fallback 0.97
of it at r = 0; random 0.96 of the ideal, sequential 0.87 or more. Predicted later, before its first run: rows in
one kernel 0.97 of XLA's int8 matmul without scales, and 1.15 of it with them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench import driver, gemm, timing
from experiments.bench.gemm import NT, Gemm, GemmArm, add_shapes, measure
from pallas_kernels.matmul.matmul_int8_mosaic import BLOCK, FallbackResidual, matmul_int8_block
from pallas_kernels.matmul.matmul_mosaic import matmul

SHAPES = [gemm.SHAPES[i] for i in (0, 1, 2, 4, 6, 9)]
RATES = (0.1, 0.2, 0.3, 0.5)
ORDERS = ("random", "sequential")
XLA, BF16, OURS, FALLBACK = "xla int8 to int32", "xla bf16", "ours int8 block", "ours fallback"
XLA_ROWS, ROWS = "xla int8 rows", "ours int8 rows"


def operands(m: int, n: int, k: int, seed: int) -> dict[str, Any]:
    """Returns normal codes with unequal scales. Residual codes of unused blocks are garbage.

    Keys such as "0.1 random" are masks of the fallback blocks.
    """
    keys = jax.random.split(jax.random.key(seed), 8)

    def codes(key: jax.Array, *shape: int) -> jax.Array:
        return jnp.clip(jnp.round(jax.random.normal(key, shape) * 32), -127, 127).astype(jnp.int8)

    blocks, steps = m // BLOCK, k // BLOCK
    uniform = functools.partial(jax.random.uniform, minval=0.5, maxval=2.0)
    rank = {"random": jax.random.permutation(keys[6], blocks * steps), "sequential": jnp.arange(blocks * steps)}
    used = {
        f"{rate} {order}": (rank[order] < round(rate * blocks * steps)).reshape(blocks, steps)
        for order in ORDERS
        for rate in (0.0, *RATES)
    }
    return used | {
        "a": codes(keys[0], m, k), "b": codes(keys[1], n, k), "r": codes(keys[2], m, k),
        "a_scale": uniform(keys[3], (blocks, steps)), "b_scale": uniform(keys[4], (n // BLOCK, steps)),
        "r_scale": uniform(keys[5], (blocks, steps)) / 128, "row": uniform(keys[7], (m,)), "tensor": jnp.float32(0.375),
    }  # fmt: skip


def oracle(kind: str, x: dict[str, Any], rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Returns the matmul at some rows and columns, in float64.

    The kind is "plain", "rows", "blocks", or the name of a fallback mask.
    """

    def decode(codes: Any, scale: Any, index: np.ndarray) -> np.ndarray:
        values = np.asarray(codes[index], np.float64)
        if kind in ("plain", "rows"):
            return values
        return values * np.repeat(np.asarray(scale, np.float64)[index // BLOCK], BLOCK, 1)

    a = decode(x["a"], x["a_scale"], rows)
    if kind in x:
        a = a + decode(x["r"], jnp.where(x[kind], x["r_scale"], 0), rows)
    product = a @ decode(x["b"], x["b_scale"], cols).T
    by_row = np.asarray(x["row"][rows], np.float64)[:, None] * float(x["tensor"])
    return product * by_row if kind == "rows" else product


def arms() -> list[GemmArm]:
    """Returns the implementations. The kind of a matmul with fallback is the name of its mask."""

    def ours(a: Any, b: Any, sa: Any, sb: Any, *residual: Any) -> Any:
        return matmul_int8_block(a, b, sa, sb, residual=FallbackResidual(*residual) if residual else None)

    def in_rows(a: Any, b: Any, row: Any, tensor: Any) -> Any:
        return matmul(a, b, row_scale=row * tensor)

    def scaled_after(a: Any, b: Any, row: Any, tensor: Any) -> Any:
        sums = dot(a, b, preferred_element_type=jnp.int32).astype(jnp.float32)
        return (sums * row[:, None] * tensor).astype(jnp.bfloat16)

    dot = functools.partial(lax.dot_general, dimension_numbers=NT)
    rows, blocks = ("a", "b", "row", "tensor"), ("a", "b", "a_scale", "b_scale")
    masks = {FALLBACK: "0.0 random"}
    masks |= {f"{FALLBACK} {rate} {order}": f"{rate} {order}" for order in ORDERS for rate in RATES}
    return [
        GemmArm(BF16, "plain", functools.partial(dot, preferred_element_type=jnp.bfloat16), ("a16", "b16")),
        GemmArm(XLA, "plain", functools.partial(dot, preferred_element_type=jnp.int32), ("a", "b")),
        GemmArm(XLA_ROWS, "rows", scaled_after, rows),
        GemmArm(ROWS, "rows", in_rows, rows),
        GemmArm(OURS, "blocks", ours, blocks),
        *(GemmArm(name, mask, ours, (*blocks, "r", "r_scale", mask)) for name, mask in masks.items()),
    ]


def get_rate(name: str) -> float:
    """Returns the share of fallback blocks in the implementation of this name."""
    words = name.removeprefix(FALLBACK).split()
    return float(words[0]) if name.startswith(FALLBACK) and words else 0.0


def rate_rows(case: str, work: float, seconds: dict[str, timing.Seconds]) -> list[timing.Row]:
    """Returns rates relative to XLA's bf16, to XLA's int8, and to the ideal rate with fallback.

    Args:
        case: shape.
        work: operations per program.
        seconds: seconds per program of each implementation.
    """
    table = []
    for name, t in seconds.items():
        ratio = seconds[BF16] / t if BF16 in seconds else None
        table.append(driver.rate_row(case, name, "rate", t, 1e-12 * work, "TOP/s", BF16, ratio))
        for other, metric in ((XLA, "of XLA's int8"), (XLA_ROWS, "of XLA's with scales")):
            if name in ((OURS, ROWS) if other == XLA else (ROWS,)) and other in seconds:
                table.append(timing.row(case, name, metric, seconds[other] / t, "", other, seconds[other] / t))
        if name.startswith(FALLBACK) and OURS in seconds:
            share = seconds[OURS] * (1 + get_rate(name)) / t
            table.append(timing.row(case, name, "of ideal", share, "", f"{OURS} / (1 + r)", share))
    return table


def main(argv: list[str]) -> None:
    parser = driver.parser("gemm_int8", __doc__, rounds=3, burst=0.06)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="number of shapes of the table")
    parser.add_argument("--limit", type=float, default=100, help="seconds after which no further shape is started")
    options = parser.parse_args(argv)
    timing.need_gpu()
    title = "INT8 matmuls: scales per row, and blocks of 128x128 with fallback"
    file = driver.ResultsFile(options, title, driver.notes_of(__doc__))

    def measure_rows(shape: Gemm) -> list[timing.Row]:
        rows_of_shape = measure(shape, arms(), operands, oracle, options)
        return rows_of_shape.rows + rate_rows(rows_of_shape.case, rows_of_shape.work, rows_of_shape.seconds)

    add_shapes(file, SHAPES[: options.shapes], measure_rows, options.limit)
