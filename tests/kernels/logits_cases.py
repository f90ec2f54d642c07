"""What the kernels of logits are tested on: in Triton's interpreter on CPU, and on a GPU."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fp8jax.core.spec import QuantSpec
from fp8jax.ops.losses import head as op

# Tiles that are whole, and parts of them; a row of several tiles; twice the z-loss, smoothing, formats.
CASES = [
    ((130, 150), "bfloat16", 0.0, 0.0, ("e4m3", "e5m2")),
    ((128, 128), "float32", 0.0, 0.1, ("e5m2", "e4m3")),
    ((6, 4100), "bfloat16", 0.02, 0.1, ("e4m3", "e4m3")),
]


def wrong(case: tuple, impl: str) -> dict[str, float]:
    """What differs from float64: logsumexp by how much, and codes, one step where sums are rounded, by how many."""
    (m, n), dtype, steeper, smoothing, formats = case
    random = np.random.default_rng(m)
    z = 3 * random.standard_normal((m, n))
    z[0, : n // 2 + 1] = -np.inf  # a tile of nothing, below small ones
    z[0, n // 2 + 1 :] -= 200
    z[1, n // 3], z[2, -1], z[3] = np.nan, np.inf, -np.inf
    made = jnp.asarray(z, dtype)
    z = np.asarray(made).astype(np.float64)
    top, total = (
        np.asarray(x, np.float64) for x in op.max_and_sum_exp(op.Logits(made.astype(jnp.float32), made), impl)
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
    labels[4], labels[5] = -1, n  # in another device's part of the vocabulary
    weights[:4], weights[5] = [1, 0, 0, 0], np.nan
    of = op.LogitCotangentFacts(
        jnp.asarray(lse, jnp.float32), jnp.asarray(labels, jnp.int32), jnp.asarray(weights, jnp.float32),
        steeper, 1 - smoothing, smoothing / n,
    )  # fmt: skip
    root, factor = np.asarray(of.lse, np.float64)[:, None], np.asarray(of.weights, np.float64)[:, None]
    with np.errstate(all="ignore"):
        d = np.exp(z - root) * (1 + steeper * root) - (1 - smoothing) * (np.arange(n) == labels[:, None])
        d = np.where(factor == 0, 0, factor * (d - smoothing / n)).astype(np.float32).astype(made.dtype)
    scale = np.float32(0.5 / float(ml_dtypes.finfo(_DTYPES[formats[0]]).max))  # some saturate
    rows, columns = map(QuantSpec, formats)
    codes = op.quantize_cotangents(made, jnp.asarray(d), of, rows, columns, jnp.float32(scale), impl)
    for q, side, name in zip(codes, (d, d.T), ("rows", "columns"), strict=True):
        x, kind = side.astype(np.float64) / float(np.asarray(q.scale)[0, 0]), _DTYPES[q.spec.format]
        end = float(ml_dtypes.finfo(kind).max)
        expected, code = np.clip(x, -end, end).astype(np.float32).astype(kind), np.asarray(q.codes)
        numbers = [np.where(np.isnan(c.astype(np.float32)), 0, c.view(np.uint8)).astype(int) for c in (expected, code)]
        far = np.abs(np.subtract(*numbers)) & 0x7F  # of zeros not the sign
        actual[f"{name}, scale"] = float(abs(float(q.scale[0, 0]) * end - 0.5) > 1e-6)
        actual[f"{name}, NaN"] = float(
            (np.isnan(expected.astype(np.float32)) != np.isnan(code.astype(np.float32))).sum()
        )
        actual[f"{name}, far"], actual[name] = float((far > 1).sum()), float((far > 0).mean() > 2e-3)
    return actual


_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
