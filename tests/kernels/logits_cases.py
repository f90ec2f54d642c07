"""Cases for the kernels of logits, in Triton's interpreter on a CPU and on a GPU."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fp8jax.core.spec import QuantSpec
from fp8jax.ops.losses import head as op

# Full tiles and partial ones; a row of several tiles; double z-loss, smoothing, formats.
CASES = [
    ((130, 150), "bfloat16", 0.0, 0.0, ("e4m3", "e5m2")),
    ((128, 128), "float32", 0.0, 0.1, ("e5m2", "e4m3")),
    ((6, 4100), "bfloat16", 0.02, 0.1, ("e4m3", "e4m3")),
]


def wrong(case: tuple, impl: str) -> dict[str, float]:
    """Returns the error of logsumexp relative to float64, and the number of codes that differ by more than one."""
    (m, n), dtype, steeper, smoothing, formats = case
    random = np.random.default_rng(m)
    z = 3 * random.standard_normal((m, n))
    z[0, : n // 2 + 1] = -np.inf  # an empty tile next to small ones
    z[0, n // 2 + 1 :] -= 200
    z[1, n // 3], z[2, -1], z[3] = np.nan, np.inf, -np.inf
    logits = jnp.asarray(z, dtype)
    z = np.asarray(logits).astype(np.float64)
    top, total = (
        np.asarray(x, np.float64) for x in op.max_and_sum_exp(op.Logits(logits.astype(jnp.float32), logits), impl)
    )
    with np.errstate(all="ignore"):
        lse, result = np.log(np.exp(z - 0).sum(1)), np.where(np.isfinite(top), top, 0) + np.log(total)
        largest = np.max(z[0])
        lse[0] = largest + np.log(np.exp(z[0] - largest).sum())
    ends = {"NaN": np.isnan, "Inf": np.isposinf, "nothing": np.isneginf}
    actual = {f"lse of {name}": float((end(lse) != end(result)).sum()) for name, end in ends.items()}
    real = np.isfinite(lse)
    actual["lse"] = float((np.abs(lse[real] - result[real]) > 1e-5).sum())

    labels, weights = random.integers(0, n, m), random.standard_normal(m)
    labels[4], labels[5] = -1, n  # in another device's shard of the vocabulary
    weights[:4], weights[5] = [1, 0, 0, 0], np.nan
    facts = op.LogitCotangentFacts(
        jnp.asarray(lse, jnp.float32), jnp.asarray(labels, jnp.int32), jnp.asarray(weights, jnp.float32),
        steeper, 1 - smoothing, smoothing / n,
    )  # fmt: skip
    root, factor = np.asarray(facts.lse, np.float64)[:, None], np.asarray(facts.weights, np.float64)[:, None]
    with np.errstate(all="ignore"):
        d = np.exp(z - root) * (1 + steeper * root) - (1 - smoothing) * (np.arange(n) == labels[:, None])
        d = np.where(factor == 0, 0, factor * (d - smoothing / n)).astype(np.float32).astype(logits.dtype)
    scale = np.float32(0.5 / float(ml_dtypes.finfo(_DTYPES[formats[0]]).max))  # some saturate
    rows, columns = map(QuantSpec, formats)
    codes = op.quantize_cotangents(logits, jnp.asarray(d), facts, rows, columns, jnp.float32(scale), impl)
    for q, side, name in zip(codes, (d, d.T), ("rows", "columns"), strict=True):
        x, kind = side.astype(np.float64) / float(np.asarray(q.scale)[0, 0]), _DTYPES[q.spec.format]
        end = float(ml_dtypes.finfo(kind).max)
        expected, code = np.clip(x, -end, end).astype(np.float32).astype(kind), np.asarray(q.codes)
        numbers = [np.where(np.isnan(c.astype(np.float32)), 0, c.view(np.uint8)).astype(int) for c in (expected, code)]
        code_distances = np.abs(np.subtract(*numbers)) & 0x7F  # ignores the sign of zeros
        actual[f"{name}, scale"] = float(abs(float(q.scale[0, 0]) * end - 0.5) > 1e-6)
        actual[f"{name}, NaN"] = float(
            (np.isnan(expected.astype(np.float32)) != np.isnan(code.astype(np.float32))).sum()
        )
        actual[f"{name}, far"], actual[name] = (
            float((code_distances > 1).sum()),
            float((code_distances > 0).mean() > 2e-3),
        )
    return actual


_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
