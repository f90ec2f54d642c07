"""INT8 products of one GPU in one process: rows by a tensor, blocks of 128x128, and those with a share that falls back.

    python -m experiments.bench gemm_int8
    python -m experiments.bench gemm_int8 --only 'xla|rows'

As `gemm`: all implementations of a shape are compiled, then timed in turns; operands rotate among sets that are larger
than the L2 cache; each result is compared with float64 on a sample. A rate counts the product once: with a share r of
blocks multiplied twice, the ideal is 1 / (1 + r) of the block product's. Blocks fall back at random, or sequentially,
in the order of memory: whole rows of them, the worst case of arXiv 2503.08040, figure 8(c). The fallback product's time
has all that prepares its walk, from which blocks fall back on; quantization is not in any. Rows by a tensor are what
`switchback` multiplies: by one kernel, and by XLA's product, to whose int32 result it applies the scales.

Predicted before the first run: the block product 1,000 TOP/s at 8192^3, 0.78 of XLA's int8 product and 1.33 of bf16;
fallback at r = 0 0.97 of it; random 0.96 of the ideal, sequential 0.87 or more. Before its own first run, later: rows
by a tensor in one kernel 0.97 of XLA's int8 product without scales, and 1.15 of it with them.
"""

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench import cases, timing
from pallas_kernels.matmul.matmul_int8_mosaic import BLOCK, FallbackResidual, matmul_int8_block
from pallas_kernels.matmul.matmul_mosaic import matmul

SHAPES = [cases.GEMMS[i] for i in (0, 1, 2, 4, 6, 9)]
RATES = (0.1, 0.2, 0.3, 0.5)
ORDERS = ("random", "sequential")
NT = (((1,), (1,)), ((), ()))
XLA, BF16, OURS, FALLBACK = "xla int8 to int32", "xla bf16", "ours int8 block", "ours fallback"
XLA_ROWS, ROWS = "xla int8 rows", "ours int8 rows"
# A function, what it takes of a set of operands, and the scales of its product: "", "rows" or "blocks".
Program = tuple[Callable[..., Any], Callable[[Any], tuple[Any, ...]], str]
PROGRAM = 3e-3  # seconds that a program of several products takes, at the least


def operands(m: int, n: int, k: int, seed: int) -> dict[str, Any]:
    """Normal codes with scales that are never all equal; residual codes of blocks not used are garbage."""
    keys = jax.random.split(jax.random.key(seed), 8)

    def codes(key: jax.Array, *shape: int) -> jax.Array:
        return jnp.clip(jnp.round(jax.random.normal(key, shape) * 32), -127, 127).astype(jnp.int8)

    blocks, steps = m // BLOCK, k // BLOCK
    uniform = functools.partial(jax.random.uniform, minval=0.5, maxval=2.0)
    rank = {"random": jax.random.permutation(keys[6], blocks * steps), "sequential": jnp.arange(blocks * steps)}
    used = {
        (order, rate): (rank[order] < round(rate * blocks * steps)).reshape(blocks, steps)
        for order in ORDERS
        for rate in (0.0, *RATES)
    }
    a, b = codes(keys[0], m, k), codes(keys[1], n, k)
    return {
        "a": a, "b": b, "r": codes(keys[2], m, k), "used": used,
        "a_scale": uniform(keys[3], (blocks, steps)), "b_scale": uniform(keys[4], (n // BLOCK, steps)),
        "r_scale": uniform(keys[5], (blocks, steps)) / 128, "row": uniform(keys[7], (m,)), "tensor": jnp.float32(0.375),
    }  # fmt: skip


def oracle(x: dict[str, Any], used: Any, scales: str, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """The product at these rows and columns, in float64."""

    def wide(codes: Any, scale: Any, index: np.ndarray) -> np.ndarray:
        values = np.asarray(codes[index], np.float64)
        if scales != "blocks":
            return values
        return values * np.repeat(np.asarray(scale, np.float64)[index // BLOCK], BLOCK, 1)

    left = wide(x["a"], x["a_scale"], rows)
    if used is not None:
        left = left + wide(x["r"], jnp.where(used, x["r_scale"], 0), rows)
    product = left @ wide(x["b"], x["b_scale"], cols).T
    by_row = np.asarray(x["row"][rows], np.float64)[:, None] * float(x["tensor"])
    return product * by_row if scales == "rows" else product


def functions() -> dict[str, Program]:
    """By name what multiplies."""

    def ours(a: Any, b: Any, sa: Any, sb: Any, *residual: Any) -> Any:
        return matmul_int8_block(a, b, sa, sb, residual=FallbackResidual(*residual) if residual else None)

    def in_rows(a: Any, b: Any, row: Any, tensor: Any) -> Any:
        return matmul(a, b, row_scale=row * tensor)

    def scaled_after(a: Any, b: Any, row: Any, tensor: Any) -> Any:
        sums = dot(a, b, preferred_element_type=jnp.int32).astype(jnp.float32)
        return (sums * row[:, None] * tensor).astype(jnp.bfloat16)

    def rows(x: Any) -> tuple[Any, ...]:
        return x["a"], x["b"], x["row"], x["tensor"]

    def blocks(x: Any) -> tuple[Any, ...]:
        return x["a"], x["b"], x["a_scale"], x["b_scale"]

    def pair(order: str, rate: float) -> Callable[[Any], tuple[Any, ...]]:
        return lambda x: (*blocks(x), x["r"], x["r_scale"], x["used"][order, rate])

    dot = functools.partial(lax.dot_general, dimension_numbers=NT)
    programs: dict[str, Program] = {
        BF16: (functools.partial(dot, preferred_element_type=jnp.bfloat16), lambda x: (x["a16"], x["b16"]), ""),
        XLA: (functools.partial(dot, preferred_element_type=jnp.int32), lambda x: (x["a"], x["b"]), ""),
        XLA_ROWS: (scaled_after, rows, "rows"),
        ROWS: (in_rows, rows, "rows"),
        OURS: (ours, blocks, "blocks"),
        FALLBACK: (ours, pair("random", 0.0), "blocks"),
    }
    programs |= {
        f"{FALLBACK} {rate} {order}": (ours, pair(order, rate), "blocks") for order in ORDERS for rate in RATES
    }
    return programs


def rate_of(name: str) -> float:
    """The share of blocks that fall back in an implementation of this name."""
    words = name.removeprefix(FALLBACK).split()
    return float(words[0]) if name.startswith(FALLBACK) and words else 0.0


def measure(shape: tuple[int, int, int], arms: dict[str, Program], rounds: int, burst: float) -> list[timing.Row]:
    m, n, k = shape
    case, work = "x".join(map(str, shape)), 2 * m * n * k
    count = min(24, max(3, -(-3 * timing.L2_BYTES // (m * k + n * k)), -(-int(PROGRAM * 1e15) // work)))
    make = jax.jit(operands, static_argnums=(0, 1, 2))
    sets = [make(m, n, k, seed) for seed in range(count)]
    widen = jax.jit(lambda codes: codes.astype(jnp.bfloat16))
    sets = [x | {"a16": widen(x["a"]), "b16": widen(x["b"])} for x in sets]
    rows, cols = np.arange(0, m, max(m // 48, 1)), np.arange(0, n, max(n // 48, 1))
    programs: dict[Any, Callable[..., Any]] = {}
    ready: dict[str, Callable[[], Any]] = {}
    table: list[timing.Row] = []
    start = time.perf_counter()
    for name, (function, takes, scales) in arms.items():
        args = [takes(x) for x in sets]
        kind = function, len(args[0])
        try:
            if kind not in programs:
                programs[kind] = timing.traced(lambda sets, one=function: [one(*x) for x in sets], args)
            out = programs[kind](args)[0]
        except Exception as problem:
            if timing.dry():
                raise
            print(f"  {name} failed: {type(problem).__name__} {str(problem)[:300]}".replace("\n", " "), flush=True)
            table.append(timing.row(case, name, "failed", None, type(problem).__name__))
            continue
        used = args[0][6] if len(args[0]) > 4 else None
        wanted = oracle(sets[0], used, scales, rows, cols)
        sample = np.asarray(out[rows][:, cols].astype(jnp.float32), np.float64)
        error = float(np.linalg.norm(sample - wanted) / np.linalg.norm(wanted))
        table.append(timing.row(case, name, "error", error, "of float64"))
        ready[name] = functools.partial(programs[kind], args)
    print(f"{shape}: compiled and checked in {time.perf_counter() - start:.0f} s", flush=True)
    return table + rate_rows(case, work * count, timing.seconds(ready, rounds, burst))


def rate_rows(case: str, work: float, seconds: dict[str, timing.Seconds]) -> list[timing.Row]:
    """Rates against XLA's bf16, and how near products come to XLA's int8 and to the ideal of fallback.

    Args:
        case: shape.
        work: operations of a program.
        seconds: of a program of each.
    """
    table = []
    for name, t in seconds.items():

        def rate(t: float) -> float:
            return work / t / 1e12

        ratio = seconds[BF16] / t if BF16 in seconds else None
        table.append(timing.row(case, name, "rate", rate(t), "TOP/s", BF16, ratio, t.quartiles(rate)))
        for other, metric in ((XLA, "of XLA's int8"), (XLA_ROWS, "of XLA's with scales")):
            if name in ((OURS, ROWS) if other == XLA else (ROWS,)) and other in seconds:
                table.append(timing.row(case, name, metric, seconds[other] / t, "", other, seconds[other] / t))
        if name.startswith(FALLBACK) and OURS in seconds:
            share = seconds[OURS] * (1 + rate_of(name)) / t
            table.append(timing.row(case, name, "of ideal", share, "", f"{OURS} / (1 + r)", share))
    return table


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="gemm_int8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="so many of the table's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", type=float, default=0.06, help="seconds of one round of one implementation")
    parser.add_argument("--limit", type=float, default=100, help="seconds after which no further shape is started")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    timing.need_gpu()
    start, rows = time.time(), []
    notes = ["Product alone, operands already quantized. " + " ".join((__doc__ or "").split("\n\n")[2].split())]
    save = functools.partial(
        timing.write, "gemm_int8", "INT8 products of rows and of blocks of 128x128 with fallback", notes=notes,
        versions={}, out=options.out,
    )  # fmt: skip
    for shape in [(256, 256, 512)] if timing.dry() else SHAPES[: options.shapes]:
        if time.time() - start > options.limit:
            print(f"{shape}: not measured, the time limit is reached")
            continue
        rows += measure(shape, functions(), options.rounds, options.burst)
        save(rows, complete=False)
    save(rows + timing.means(rows, "rate", BF16))
