"""COAT's Tables 7 and 12 and Figure 4(b) on one GPU: `python -m experiments.papers.coat_speed`.

A Llama layer forward and backward by recipe, what the first stage of group scaling adds to RMSNorm, and what the ways
to find a tensor's scale take. Xi et al., COAT, ICLR 2025, sections 5.2 and 6.2, appendix J.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fp8jax
from experiments import flags
from experiments.bench import arms as bench_arms
from experiments.bench import layer, timing
from experiments.models.llama import LlamaConfig
from experiments.papers import common
from experiments.papers.common import Row
from fp8jax.ops.quantization.quantize import quantize

BATCH, LENGTHS, HIDDEN = 4, (2048, 4096), (2048, 4096)
BF16, TE, FAITHFUL, LEAN = layer.BF16, "te_current", bench_arms.FAITHFUL, bench_arms.LEAN
METRICS = ("forward", "backward", "total", "kept")

# COAT, Table 7: milliseconds forward, backward and total, and MB of activations, by (hidden size, length).
PAPER = {
    (2048, 2048): {BF16: (3.36, 8.47, 11.83, 1457), TE: (2.96, 5.32, 8.28, 1210), FAITHFUL: (2.88, 5.16, 8.04, 883)},
    (2048, 4096): {BF16: (6.88, 17.24, 24.12, 2914), TE: (5.94, 11.29, 17.23, 2420),
                   FAITHFUL: (5.89, 10.82, 16.71, 1766)},
    (4096, 2048): {BF16: (7.77, 18.78, 26.55, 2914), TE: (6.19, 11.79, 17.98, 2420),
                   FAITHFUL: (5.89, 10.96, 16.85, 1766)},
    (4096, 4096): {BF16: (16.37, 38.43, 54.80, 5828), TE: (12.66, 24.58, 37.24, 4840),
                   FAITHFUL: (12.16, 23.44, 35.6, 3533)},
}  # fmt: skip
# COAT, Table 12: milliseconds of RMSNorm with and without quantization, by columns of a matrix of 4096 rows.
PAPER_NORM = {1024: (10.1, 8.7), 2048: (29.6, 28.7), 4096: (55.6, 53.2), 8192: (122.6, 117.5)}
NORM, NORM_CODES = "RMSNorm", "RMSNorm with quantization"
JUST_IN_TIME, GROUP, DELAYED = "just in time", "group scaling", "delayed"


def model(hidden: int) -> LlamaConfig:
    """The layer of a Llama of this width, heads of 128 channels, and Llama-7B's SwiGLU of 2.69 times the width."""
    inner = 128 * (hidden * 86 // 4096)
    return LlamaConfig(vocab=256, dim=hidden, layers=1, heads=hidden // 128, kv_heads=hidden // 128, mlp_dim=inner)


def layers(hidden: int, length: int, rounds: int, burst: float) -> list[Row]:
    """Rows of Table 7 for one size."""
    config, tokens = (model(256), 16) if timing.dry() else (model(hidden), length)
    names, ready = (TE, FAITHFUL, LEAN), dict[str, Any]()
    arms = {name: arm for name, arm in layer.arms(tokens, config, names).items() if name in (BF16, *names)}
    for name, arm in arms.items():
        functions = {name: arm.three, f"{name}, forward": arm.forward}
        ready |= timing.compiled(functions, [arm.operands])
    times = timing.seconds(ready, rounds, burst)
    rows, table = [], f"Table 7: hidden size {hidden}, batch {BATCH}, length {length}"
    values = {}
    for name, arm in arms.items():
        total, forward = 1e3 * times[name], 1e3 * times[f"{name}, forward"]
        values[name] = dict(zip(METRICS, (forward, total - forward, total, arm.saved / 1e6), strict=True))
    for name, of in values.items():
        paper = dict(zip(METRICS, PAPER[hidden, length].get(name, (None,) * 4), strict=True))
        base = dict(zip(METRICS, PAPER[hidden, length][BF16], strict=True))
        for metric, value in of.items():
            theirs = paper[metric]
            against = None if theirs is None else base[metric] / theirs
            unit = "MB" if metric == "kept" else "ms"
            rows.append(Row(name, metric, value, unit, BF16, values[BF16][metric] / value, theirs, against, table))
            print(
                f"  {table}: {name:16s} {metric:9s} {value:8.2f} {unit}  {values[BF16][metric] / value:.3f}", flush=True
            )
    return rows


def _norm(x: jax.Array) -> jax.Array:
    return fp8jax.rms_norm(x, recipe=fp8jax.recipes.bf16())


def norm_arms() -> dict[str, Any]:
    """Functions of a matrix: the norm as it is and with what `coat` keeps, and codes of the latter with one scale."""

    def residuals_of(x: jax.Array) -> tuple[jax.Array, Any]:
        y, back = jax.vjp(lambda x: fp8jax.rms_norm(x, recipe=fp8jax.recipes.coat()), x)
        return y, jax.tree.leaves(back)

    def codes(x: jax.Array, **how: Any) -> Any:
        y, residuals = residuals_of(x)
        return quantize(y, "e4m3", **how)[0], residuals

    return {
        NORM: _norm,
        NORM_CODES: residuals_of,
        JUST_IN_TIME: lambda x: codes(x, impl="triton"),
        GROUP: lambda x: codes(x, strategy="two_stage"),
        DELAYED: lambda x: codes(x, scale=jnp.float32(0.01)),
    }


def norms(columns: int, rounds: int, burst: float) -> list[Row]:
    """Rows of Table 12 and of Figure 4(b) for a matrix of 4096 rows."""
    shape, count = ((64, 128), 1) if timing.dry() else ((4096, columns), timing.copies(2 * 4096 * columns))
    sets = [(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16),) for i in range(count)]
    functions = norm_arms()
    times = timing.seconds(timing.compiled(functions, sets), rounds, burst)
    rows, microseconds = [], {name: 1e6 * t / len(sets) for name, t in times.items()}
    for name, time in microseconds.items():
        first = name in (NORM, NORM_CODES)
        base = NORM if first else JUST_IN_TIME
        slow, fast = PAPER_NORM[columns]
        theirs = slow / fast if name == NORM_CODES else None
        table = "Table 12: time of a norm" if first else "Figure 4(b): norm and codes with one scale, time"
        pivot = (f"(4096, {columns})", name)
        rows.append(Row(f"{name}, (4096, {columns})", "time", time, "µs", f"{base}, (4096, {columns})",
                         time / microseconds[base], None, theirs, table, pivot))  # fmt: skip
        print(f"  (4096, {columns}) {name:30s} {time:8.1f} µs  {time / microseconds[base]:.3f}", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Regenerates results/coat_speed.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.04, help="seconds of one round of one implementation")
    parser.add_argument(
        "--hidden", type=int, nargs="+", choices=HIDDEN, default=list(HIDDEN), help="of Table 7's layer"
    )
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    options = parser.parse_args(argv)
    flags.recommend()
    timing.need_gpu()
    rows = [row for n in PAPER_NORM for row in norms(n, options.rounds, options.burst / 2)]
    rows += [row for d in options.hidden for t in LENGTHS for row in layers(d, t, options.rounds, options.burst)]
    notes = [
        "Table 7: one layer of `experiments.models.llama` in bf16, as `fp8jax.nnx.quantize` leaves it; backward is "
        "the whole less the forward pass with what it keeps. Ratios are bf16's over the recipe's, here XLA with "
        "cuDNN's attention, in the paper an implementation in PyTorch on an H100 that is slower than ours in bf16. "
        "TE is our te_current. MB (1e6 bytes) are activations and codes kept, with scales.",
        "Table 12: RMSNorm of a bf16 matrix, and the same with what `coat` keeps of it: codes of its input in "
        "groups of 1x16, and where the kernel is at hand the largest magnitude of its result. The paper's times are "
        "of no plausible unit; ratios compare. A result that is also wanted in 16 bits is computed by the kernel that "
        "keeps codes and again by XLA; in a layer whose products read codes it is not written.",
        "Figure 4(b) has no values in our copy of the paper. The norm with quantization, then e4m3 codes of its "
        "result with one scale: just in time, from a pass over the result, by group scaling, from what the norm "
        "found, and with a given scale, as delayed scaling has.",
    ]
    arguments = f"--rounds {options.rounds} --burst {options.burst:g} --hidden {' '.join(map(str, options.hidden))}"
    title = "COAT: a layer's speed, and what scales cost (Tables 7, 12, Figure 4(b))"
    device = jax.devices()[0].device_kind
    common.write("coat_speed", title, rows, notes, None, options.results, arguments=arguments, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
