"""Int8 block products with residuals, and their results in float64."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.matmul.matmul_int8_mosaic import FallbackResidual


def operands(m: int, n: int, k: int, rate: float) -> tuple[Any, np.ndarray]:
    """Returns the arguments of a product, and its result in float64. Unused residual blocks contain garbage."""
    rng = np.random.default_rng(m + n + k)
    a, b, r = (rng.integers(-127, 128, shape).astype(np.int8) for shape in ((m, k), (n, k), (m, k)))
    counts = -(-m // 128), -(-n // 128), -(-k // 128)
    a_scale, b_scale = (rng.uniform(0.5, 2, (rows, counts[2])).astype(np.float32) for rows in counts[:2])
    r_scale = rng.uniform(0.005, 0.02, a_scale.shape).astype(np.float32)
    used = rng.uniform(size=a_scale.shape) < rate
    r_scale[~used] = np.nan

    def spread(blocks: np.ndarray, rows: int) -> np.ndarray:
        return np.kron(blocks.astype(np.float64), np.ones((128, 128)))[:rows, :k]

    left = a * spread(a_scale, m) + r * spread(np.where(used, r_scale, 0), m)
    expected = left @ (b * spread(b_scale, n)).T
    residual = FallbackResidual(jnp.asarray(r), jnp.asarray(r_scale), jnp.asarray(used)) if rate else None
    return (*map(jnp.asarray, (a, b, a_scale, b_scale)), residual), expected


def error(function: Callable[..., Any], shape: tuple[int, int, int], rate: float) -> float:
    """Returns the relative (Frobenius) error of a kernel's fp32 result."""
    (*args, residual), expected = operands(*shape, rate)
    out = np.asarray(function(*args, residual=residual, out_dtype=jnp.float32), np.float64)
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
