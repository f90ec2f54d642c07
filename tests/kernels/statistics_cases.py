"""Compares the kernel of telemetry's statistics with its reference, in Triton's interpreter on a CPU and on a GPU."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fp8jax
from fp8jax.core.qtensor import quantize_with_scale
from fp8jax.ops.optimizers.leaf import Adam
from fp8jax.ops.optimizers.next_moment import next_moment
from fp8jax.ops.quantization import statistics
from pallas_kernels.quantization import statistics_triton
from tests.kernels.quantize_cases import special


class Case(NamedTuple):
    spec: str | None
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    is_transposed: bool = False
    masked_rows: int = 0
    factor: float = 1.0
    given_scale: float | None = None
    is_decoded: bool = False


CASES = [
    Case("e4m3", (2, 8, 256), given_scale=1e-3),
    Case("e4m3:tensor+expand", (2, 3, 40), "float32"),
    Case("e5m2", (50, 72), "float32", is_transposed=True, factor=1e-25),
    Case("e4m3:group128+expand", (9, 300), "float32"),
    Case("e5m2:group16", (300,), "float16", is_decoded=True),
    Case("int8:block32", (40, 100), "float32", factor=1e25),
    Case("e4m3:mx32+token", (9, 96)),
    Case("e4m3:token", (20, 130), masked_rows=7),
    Case(None, (3, 5, 50)),
    Case(None, (10, 130), is_decoded=True),
]


def wrong(case: Case) -> dict[str, Any]:
    """Returns the statistics in which the kernel differs from the reference, with both values."""
    x = special((math.prod(case.shape[:-1]), case.shape[-1]), case.dtype, 6e4).reshape(case.shape)
    x = (x.astype(jnp.float32) * case.factor).astype(x.dtype)
    decoded = codes = mask = None
    if case.spec is None:
        decoded = x.astype(jnp.float8_e5m2).astype(jnp.float32) if case.is_decoded else None
    else:
        codes = jax.jit(fp8jax.quantize, static_argnums=1)(x, case.spec)
        if case.given_scale is not None:
            codes = quantize_with_scale(x, codes.spec, jnp.float32(case.given_scale))
        decoded = codes.dequantize() if case.is_decoded else None
    if case.masked_rows:
        mask = jnp.arange(case.shape[0])[:, None] % case.masked_rows > 0
    settings = {"bits": 8, "is_transposed": case.is_transposed, "row_mask": mask}
    x = x.T if case.is_transposed else x
    expected = jax.jit(lambda *arrays: statistics.compare(*arrays, impl="xla", **settings)[1])(x, decoded, codes)
    names, actual = statistics.compare(x, decoded, codes, impl="triton", **settings)
    pairs = zip(names, np.asarray(expected), np.asarray(actual), strict=True)
    return {name: [float(a), float(b)] for name, a, b in pairs if not np.allclose(a, b, rtol=1e-4, atol=1e-4)}


def wrong_merge() -> list[str]:
    """Returns the statistics that are merged wrongly, for more parts than a block.

    Some logarithms are those of zero.
    """
    parts = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
    logs = [name in statistics.LOG_SUMS for name in statistics.NAMES]
    parts[:, logs] = 150 * parts[:, logs] + 300 * (np.arange(300) > 200)[:, None]
    parts[::3, logs] = -np.inf
    largest = np.max(parts, 0).astype(np.float64)
    log_sums = largest + np.log(np.sum(np.exp(parts - largest), 0))
    expected = np.where(logs, log_sums, np.sum(parts, 0, np.float64))
    expected = np.where([name in statistics.MAXIMA for name in statistics.NAMES], largest, expected)
    actual = statistics_triton.merge(jnp.asarray(parts), 16)
    return [
        name for name, a, b in zip(statistics.NAMES, expected, np.asarray(actual), strict=True) if not np.isclose(a, b)
    ]


class MomentCase(NamedTuple):
    spec: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    is_squared: bool = False
    grad_scale: float | None = None
    apply_if: bool | None = None


MOMENTS = [
    MomentCase("e4m3:group128+expand", (9, 300), "bfloat16", grad_scale=0.5),
    MomentCase("e5m2:group32", (2, 5, 64), is_squared=True, apply_if=True),
    MomentCase("e4m3:group256", (5, 130), apply_if=False),
]


def wrong_moment(case: MomentCase) -> int:
    """Returns the number of values in which the kernel of `next_moment` differs from float64."""
    gradient = special((math.prod(case.shape[:-1]), case.shape[-1]), case.dtype, 6e4).reshape(case.shape)
    old = np.random.default_rng(1).standard_normal(case.shape).astype(np.float32)
    moment = jax.jit(fp8jax.quantize, static_argnums=1)(jnp.asarray(old**2 if case.is_squared else old), case.spec)
    apply_if = None if case.apply_if is None else jnp.asarray(case.apply_if)
    adam = Adam(0.9, 0.99, 1e-8, 0.0, jnp.int32(1), grad_scale=case.grad_scale, apply_if=apply_if)
    actual = next_moment(adam, gradient, moment, is_squared=case.is_squared, impl="triton")
    expected = np.asarray(moment.dequantize(), np.float64)
    if case.apply_if is not False:
        g = np.asarray(gradient, np.float64) * (case.grad_scale or 1)
        decay = np.float32(0.99 if case.is_squared else 0.9)
        expected = float(decay) * expected + float(np.float32(1) - decay) * (g**2 if case.is_squared else g)
    return int(np.sum(~np.isclose(np.asarray(actual, np.float64), expected, rtol=1e-4, atol=1e-6, equal_nan=True)))
