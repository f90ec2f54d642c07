"""COAT's Table 12 and Figure 4(b) on one GPU: `python -m experiments.papers.coat_speed`.

The cost of the first stage of group scaling in RMSNorm, and the time of each method for a per-tensor scale. Xi et al.,
COAT, ICLR 2025, section 5.2, appendix J. Table 7 is a view of `bench layer` (results/papers.toml).
"""

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp

import fp8jax
from experiments import startup
from experiments.bench import timing
from experiments.papers import common
from experiments.papers.common import Row
from fp8jax.ops.quantization.quantize import quantize

# COAT, Table 12: milliseconds of RMSNorm with and without quantization, by columns of a matrix of 4096 rows.
PAPER_NORM = {1024: (10.1, 8.7), 2048: (29.6, 28.7), 4096: (55.6, 53.2), 8192: (122.6, 117.5)}
NORM, NORM_CODES = "RMSNorm", "RMSNorm with quantization"
JUST_IN_TIME, GROUP, DELAYED = "just in time", "group scaling", "delayed"


def _norm(x: jax.Array) -> jax.Array:
    return fp8jax.rms_norm(x, recipe=fp8jax.recipes.bf16())


def norm_arms() -> dict[str, Any]:
    """Returns functions of a matrix: the norm, the norm with residuals of `coat`, and per-tensor codes of the norm."""

    def norm_with_residuals(x: jax.Array) -> tuple[jax.Array, Any]:
        y, vjp = jax.vjp(lambda x: fp8jax.rms_norm(x, recipe=fp8jax.recipes.coat()), x)
        return y, jax.tree.leaves(vjp)

    def codes(x: jax.Array, **settings: Any) -> Any:
        y, residuals = norm_with_residuals(x)
        return quantize(y, "e4m3", **settings)[0], residuals

    return {
        NORM: _norm,
        NORM_CODES: norm_with_residuals,
        JUST_IN_TIME: lambda x: codes(x, impl="triton"),
        GROUP: lambda x: codes(x, strategy="two_stage"),
        DELAYED: lambda x: codes(x, scale=jnp.float32(0.01)),
    }


def norms(columns: int, rounds: int, burst: float) -> list[Row]:
    """Returns the rows of Table 12 and Figure 4(b) for a matrix of 4096 rows."""
    shape, count = ((64, 128), 1) if timing.dry() else ((4096, columns), timing.copies(2 * 4096 * columns))
    sets = [(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16),) for i in range(count)]
    functions = norm_arms()
    times = timing.seconds(timing.compiled(functions, sets), rounds, burst)
    rows, microseconds = [], {name: 1e6 * t / len(sets) for name, t in times.items()}
    for name, time in microseconds.items():
        first = name in (NORM, NORM_CODES)
        base = NORM if first else JUST_IN_TIME
        paper_slow, paper_fast = PAPER_NORM[columns]
        theirs = paper_slow / paper_fast if name == NORM_CODES else None
        table = "Table 12: time of a norm" if first else "Figure 4(b): norm and codes with one scale, time"
        pivot = (f"(4096, {columns})", name)
        rows.append(Row(f"{name}, (4096, {columns})", "time", time, "µs", f"{base}, (4096, {columns})",
                         time / microseconds[base], None, theirs, table, pivot))  # fmt: skip
        print(f"  (4096, {columns}) {name:30s} {time:8.1f} µs  {time / microseconds[base]:.3f}", flush=True)
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of timing."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.02, help="seconds per round of an implementation")


def table(options: argparse.Namespace) -> common.Table:
    """Returns the results file."""
    startup.recommend_flags()
    timing.need_gpu()
    rows = [row for n in PAPER_NORM for row in norms(n, options.rounds, options.burst)]
    notes = [
        "Table 12: RMSNorm of a bf16 matrix, and the same with what `coat` saves: codes of its input in groups of "
        "1x16, and the amax of its result if the kernel runs. The unit of the paper's times is not plausible, so "
        "ratios are compared. Ours is slower here because a result that is also needed in 16 bits is computed "
        "twice. In a layer with 8-bit matmuls it is not written.",
        "Figure 4(b): our copy of the paper has no values. The norm with quantization, then e4m3 codes of its "
        "result with one scale. 'just in time': a pass over the result. 'group scaling': the amax from the norm. "
        "'delayed': a given scale.",
    ]
    arguments = f"--rounds {options.rounds} --burst {options.burst:g}"
    title = "COAT: time of quantization (Table 12, Figure 4(b))"
    return common.Table("coat_speed", title, rows, notes, arguments=arguments)


if __name__ == "__main__":
    sys.exit(common.run(__doc__, table, add_options))
