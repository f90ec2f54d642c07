"""Norms and activations whose results are quantized: the kernels' references in plain JAX, with their signatures.

`pallas_kernels.remake_triton` and `norm_triton` say what arguments and results are; here devices play no part. Sums and
elementary functions differ from the kernels' in their last bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.core import scaling
from fp8jax.core.qtensor import quantize_with_scale
from fp8jax.core.spec import QuantSpec

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
_NAMES = {jnp.dtype(jnp.float8_e4m3fn): "e4m3", jnp.dtype(jnp.float8_e5m2): "e5m2"}


def results(operation: Any, kinds: tuple[int, ...], operands: Any) -> list[Array]:
    """The arrays themselves, (M, N), rounded to the operation's dtype."""
    from pallas_kernels import quantize_triton, remake_triton

    read = functools.partial(_read, operation)
    x, dtype = read(operands.first, operands.first_scale), quantize_triton.PLAIN_DTYPES[operation.dtype]
    if kinds == (remake_triton.NORM,):
        if operation.exact and operation.centered:
            x = x - operands.mean[:, None]
        factor = operands.inverse[:, None]
        y = x * (factor * operands.weight.astype(jnp.float32) if operation.scaled else factor)
        return [(y + operands.bias.astype(jnp.float32) if operation.biased else y).astype(dtype)]
    activated, pull = jax.vjp(list(ACTIVATIONS.values())[operation.activation], x)
    up = read(operands.up, operands.up_scale) if operation.gated else None
    if kinds == (remake_triton.RESULT,):
        return [(activated if up is None else activated * up).astype(dtype)]
    dy = operands.gradient.astype(jnp.float32)
    if operation.activated:
        activated = read(operands.activated, operands.activated_scale)
    of = {remake_triton.GATE: pull(dy if up is None else dy * up)[0], remake_triton.UP: dy * activated}
    return [of[kind].astype(dtype) for kind in kinds]


def quantize(
    operation: Any,
    kinds: tuple[int, ...],
    operands: Any,
    scales: tuple[Array, ...],
    dtype: Any,
    *,
    rows: bool,
    columns: bool,
) -> list[tuple[Array | None, Array | None]]:
    spec = QuantSpec(_NAMES[jnp.dtype(dtype)])
    found = zip(results(operation, kinds, operands), scales, strict=True)
    codes = [quantize_with_scale(x, spec, scale.reshape(1, 1)).codes for x, scale in found]
    return [(c if rows else None, c.T if columns else None) for c in codes]


def peaks(operation: Any, kinds: tuple[int, ...], operands: Any) -> list[Array]:
    return [scaling.largest_magnitude(x) for x in results(operation, kinds, operands)]


def keep_activation(operation: Any, gate: Array, up: Array | None, kept: Any) -> tuple[list[Any], Array]:
    activated = list(ACTIVATIONS.values())[operation.activation](gate)
    y = activated if up is None else activated * up
    parts = (gate, up, activated if operation.activated else None)
    return [None if x is None else _keep(x, kept) for x in parts], scaling.largest_magnitude(y)


def forward(
    operation: Any, x: Array, weight: Array | None, bias: Array | None, eps: float, kept: Any
) -> tuple[Array, Array, Array, Array | None, Array]:
    from pallas_kernels import remake_triton

    z, mean = x.astype(jnp.float32), None
    if operation.centered:
        mean = jnp.mean(z, -1)
        z = z - mean[:, None]
    inverse = jax.lax.rsqrt(jnp.mean(z * z, -1) + eps)
    operands = remake_triton.Operands(x, inverse=inverse, mean=mean, weight=weight, bias=bias)
    (y,) = results(operation._replace(exact=True), (remake_triton.NORM,), operands)
    return *_keep(z if operation.centered else x, kept), inverse, mean, scaling.largest_magnitude(y)


def backward(
    operation: Any, codes: Array, scales: Array, inverse: Array, weight: Array | None, dy: Array, dtype: Any
) -> tuple[Array, Array | None, Array | None]:
    dy = dy.astype(jnp.float32)
    normal = _read(operation, codes, scales) * inverse[:, None]
    t = dy if weight is None else dy * weight.astype(jnp.float32)
    dx = t - normal * jnp.mean(t * normal, -1, keepdims=True)
    if operation.centered:
        dx = dx - jnp.mean(t, -1, keepdims=True)
    dweight, dbias = (
        jnp.sum(a, 0) if p else None for a, p in ((dy * normal, operation.scaled), (dy, operation.biased))
    )
    return (inverse[:, None] * dx).astype(dtype), dweight, dbias


def _read(operation: Any, x: Array, scale: Array | None) -> Array:
    """fp32 values of an operand."""
    x = x.astype(jnp.float32)
    return x if scale is None else x * jnp.repeat(scale.astype(jnp.float32), operation.group, 1)


def _keep(x: Array, kept: Any) -> tuple[Array, Array]:
    scale = {jnp.dtype(jnp.float32): "fp32", jnp.dtype(jnp.bfloat16): "bf16"}[jnp.dtype(kept.scale_dtype)]
    spec = QuantSpec(_NAMES[jnp.dtype(kept.dtype)], "group", kept.size, scale_format=scale)
    q = quantize_with_scale(x, spec, None)
    return q.codes, q.scale
