"""JAX references of the norm and activation kernels, on one device.

`pallas_kernels.nonlinear.quantize_recomputed_triton` and `norm_triton` document arguments and results. Sums and
elementary functions differ from the kernels' in the last bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats, packing, scaling
from fp8jax.core.blocks import expand_to_rank
from fp8jax.core.groups import take_rows
from fp8jax.core.qtensor import quantize_with_scale
from fp8jax.core.spec import QuantSpec

# Each f has |f'(x)| <= `fp8jax.ops.nonlinear.activation.MAX_SLOPE` and |f(x)| <= |x|, and is made of primitives that
# `fp8jax.rewrite.probes` evaluates. Kernels support a subset, `pallas_kernels.nonlinear.operations_triton.ACTIVATIONS`;
# XLA computes the others.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
# An extra output (scale, dtype) of a kernel. A dtype of 8 bits requests codes, with row scales if the scale is None. A
# dtype of 16 bits or more requests the result itself.
Result = tuple[Array | None, Any] | None
_NAMES = {jnp.dtype(jnp.float8_e4m3fn): "e4m3", jnp.dtype(jnp.float8_e5m2): "e5m2", jnp.dtype(jnp.int16): "int10"}


def statistics(x: Array, eps: float, *, centered: bool) -> tuple[Array, Array]:
    """Return x (..., channels) in fp32, less its mean if centered, and the inverse root of each row (..., 1)."""
    z = x.astype(jnp.float32)
    if centered:
        z = z - jnp.mean(z, -1, keepdims=True)
    return z, jax.lax.rsqrt(jnp.mean(z * z, -1, keepdims=True) + eps)


def apply_normalization(z: Array, rstd: Array, scale: Array | None, bias: Array | None) -> Array:
    """Return a norm's result in fp32, from the results of `statistics`."""
    y = z * (rstd if scale is None else rstd * expand_to_rank(scale.astype(jnp.float32), z.ndim))
    return y if bias is None else y + expand_to_rank(bias.astype(jnp.float32), z.ndim)


def norm_cotangents(
    z: Array, rstd: Array, scale: Array | None, dy: Array, *, centered: bool, has_bias: bool
) -> tuple[Array, Array | None, Array | None]:
    """Return the fp32 cotangents of a norm's input, scale and bias."""
    dy, normal, rows = dy.astype(jnp.float32), z * rstd, tuple(range(dy.ndim - 1))
    t = dy if scale is None else dy * expand_to_rank(scale.astype(jnp.float32), dy.ndim)
    dx = t - normal * jnp.mean(t * normal, -1, keepdims=True)
    if centered:
        dx = dx - jnp.mean(t, -1, keepdims=True)
    return rstd * dx, None if scale is None else jnp.sum(dy * normal, rows), jnp.sum(dy, rows) if has_bias else None


def activation_cotangents(
    function: Callable[[Array], Array], gate: Array, up: Array | None, activated: Array | None, dy: Array
) -> tuple[Array, ...]:
    """Return the fp32 cotangents of an activation's input, or of gate and up. `activated` saves its recomputation."""
    value, vjp_fn = jax.vjp(function, gate)
    dy = dy.astype(jnp.float32)
    if up is None:
        return vjp_fn(dy)
    return *vjp_fn(dy * up), dy * (value if activated is None else activated)


def results(operation: Any, kinds: tuple[int, ...], operands: Any) -> list[Array]:
    """Return the arrays (M, N), rounded to the operation's dtype."""
    from pallas_kernels.nonlinear import quantize_recomputed_triton
    from pallas_kernels.quantization import quantize_triton

    read = functools.partial(_read, operation)
    x, dtype = read(operands.first, operands.first_scale), quantize_triton.PLAIN_DTYPES[operation.dtype]
    if kinds == (quantize_recomputed_triton.NORM,):
        if operation.reads_arrays and operation.centered:
            x = x - operands.mean[:, None]
        return [apply_normalization(x, operands.rstd[:, None], operands.weight, operands.bias).astype(dtype)]
    function = _activation(operation)
    up = read(operands.up, operands.up_scale) if operation.is_gated else None
    if kinds == (quantize_recomputed_triton.RESULT,):
        return [(function(x) if up is None else function(x) * up).astype(dtype)]
    activated = read(operands.activated, operands.activated_scale) if operation.saves_activated else None
    cotangents = activation_cotangents(function, x, up, activated, operands.gradient)
    return [
        cotangents[(quantize_recomputed_triton.GATE, quantize_recomputed_triton.UP).index(kind)].astype(dtype)
        for kind in kinds
    ]


def quantize(
    operation: Any,
    kinds: tuple[int, ...],
    operands: Any,
    scales: tuple[Array, ...],
    dtype: Any,
    *,
    rows: bool,
    columns: bool,
    result_coding: tuple[Array, Any] | None = None,
    sums: bool = False,
) -> Any:
    arrays = results(operation, kinds, operands)
    codes = [_codes(x, scale, dtype) for x, scale in zip(arrays, scales, strict=True)]
    pairs = [(c if rows else None, c.T if columns else None) for c in codes]
    if result_coding is not None:
        from pallas_kernels.nonlinear import quantize_recomputed_triton

        result, (scale, result_dtype) = (quantize_recomputed_triton.RESULT,), result_coding
        pairs += quantize(operation, result, operands, (scale,), result_dtype, rows=False, columns=True)
    return (pairs, [column_sums(x) for x in arrays]) if sums else pairs


def _activation(operation: Any) -> Callable[[Array], Array]:
    from pallas_kernels.nonlinear import operations_triton

    if operation.activation == operations_triton.IDENTITY:
        return lambda x: x
    return ACTIVATIONS[operations_triton.ACTIVATIONS[operation.activation]]


def column_sums(x: Array) -> Array:
    """Return the sum of each column of (M, N), fp32 (N,)."""
    return jnp.sum(x.astype(jnp.float32), 0)


def compute_amaxes(
    operation: Any, kinds: tuple[int, ...], operands: Any, *, every: int = 1, compute_if: Array | None = None
) -> list[Array]:
    find = scaling.compute_amax if every == 1 else scaling.compute_sample_amax
    maxima = [find(x) for x in results(operation, kinds, operands)]
    return maxima if compute_if is None else [jnp.where(compute_if, amax, 0.0) for amax in maxima]


def quantize_and_predict(operation: Any, operands: Any, scale: Array, dtype: Any) -> tuple[Array, list[Array]]:
    from pallas_kernels.nonlinear import quantize_recomputed_triton

    result = (quantize_recomputed_triton.RESULT,)
    cotangents = (quantize_recomputed_triton.GATE, quantize_recomputed_triton.UP)[: 1 + operation.is_gated]
    ((_, codes),) = quantize(operation, result, operands, (scale,), dtype, rows=False, columns=True)
    if scale.ndim > 0:
        maxima = [compute_row_amax(x) for x in results(operation, cotangents, operands)]
    else:
        maxima = compute_amaxes(operation, cotangents, operands)
    return codes, maxima


def cotangents(operation: Any, operands: Any) -> list[Array]:
    from pallas_kernels.nonlinear import quantize_recomputed_triton

    return results(
        operation, (quantize_recomputed_triton.GATE, quantize_recomputed_triton.UP)[: 1 + operation.is_gated], operands
    )


def compute_row_amax(x: Array) -> Array:
    """Return the largest finite magnitude of each row, fp32 (rows,)."""
    magnitude = jnp.abs(x.astype(jnp.float32))
    counts = jnp.isfinite(magnitude) & (magnitude >= formats.TINY)
    return jnp.max(jnp.where(counts, magnitude, 0.0), -1, initial=0.0)


def encode_activation_residuals(
    operation: Any, gate: Array, up: Array | None, coding: Any, *, result: Result = None
) -> tuple[list[Any], Array | None, Any]:
    activated = _activation(operation)(gate)
    y = activated if up is None else activated * up
    residual_arrays = (gate, up, activated if operation.saves_activated else None)
    residuals = [None if x is None or coding is None else _quantize_residual(x, coding) for x in residual_arrays]
    return residuals, None if is_scaled_by_row(result) else scaling.compute_amax(y), _encode_result(y, result)


def glu_row_statistics(
    operation: Any, gate_up: Array, scales: Array | None, gradient: Array | None
) -> tuple[Array, Array | None]:
    y, cotangents = _glu(operation, gate_up, scales, gradient)
    if gradient is None:
        return compute_row_amax(y), None
    dots = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), -1)
    return jnp.maximum(*map(compute_row_amax, cotangents)), dots


def encode_glu(operation: Any, gate_up: Array, factor: Array, coding: Any, dtype: Any) -> Any:
    residuals = None if coding is None else _quantize_residual(gate_up, coding)
    return residuals, _multiplied_codes(_glu(operation, gate_up, None, None)[0], factor, dtype)


def quantize_glu_cotangents(
    operation: Any,
    gate_up: Array,
    scales: Array | None,
    gradient: Array,
    rows: Array,
    factor: Array,
    result_factor: Array,
    dtype: Any,
    result_dtype: Any,
) -> tuple[Array, Array, Array]:
    y, cotangents = _glu(operation, gate_up, scales, gradient)
    codes = _multiplied_codes(jnp.concatenate(cotangents, -1), factor, dtype)
    result_codes = _multiplied_codes(y, result_factor, result_dtype)
    return codes, take_rows(codes, rows).T, take_rows(result_codes, rows).T


def _glu(operation: Any, gate_up: Array, scales: Array | None, gradient: Array | None) -> tuple[Array, list[Array]]:
    """Return the result of a GLU, gate and up side by side, and the cotangents for a gradient."""
    from pallas_kernels.quantization import quantize_triton

    function, dtype = _activation(operation), quantize_triton.PLAIN_DTYPES[operation.dtype]
    gate, up = jnp.split(_read(operation, gate_up, scales), 2, -1)
    cotangents = () if gradient is None else activation_cotangents(function, gate, up, None, gradient)
    return (function(gate) * up).astype(dtype), [ct.astype(dtype) for ct in cotangents]


def _multiplied_codes(x: Array, factor: Array, dtype: Any) -> Array:
    return _codes(x.astype(jnp.float32) * factor[:, None], jnp.ones([]), dtype)


def requantize_if(
    operation: Any, kinds: tuple[int, ...], operands: Any, codes: Array, scale: Array, condition: Array
) -> Array:
    ((new, _),) = quantize(operation, kinds, operands, (scale,), codes.dtype, rows=True, columns=False)
    new, old = (formats.bitcast(x, jnp.uint8) for x in (new, codes))
    return formats.bitcast(jnp.where(condition, new, old), codes.dtype)


def forward(
    operation: Any,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    coding: Any,
    *,
    result: Result = None,
) -> tuple[Array | None, Array | None, Array, Array | None, Array, Any]:
    from pallas_kernels.quantization import quantize_triton

    z, rstd = statistics(x, eps, centered=operation.centered)
    mean = jnp.mean(x.astype(jnp.float32), -1) if operation.centered else None
    y = apply_normalization(z, rstd, weight, bias).astype(quantize_triton.PLAIN_DTYPES[operation.dtype])
    codes, scales = (None, None) if coding is None else _quantize_residual(z if operation.centered else x, coding)
    return codes, scales, rstd[:, 0], mean, scaling.compute_amax(y), _encode_result(y, result)


def backward(
    operation: Any,
    codes: Array,
    scales: Array | None,
    rstd: Array,
    weight: Array | None,
    dy: Array,
    dtype: Any,
    residual: Array | None = None,
) -> tuple[Array, Array | None, Array | None, Array]:
    z = _read(operation, codes, scales)
    if operation.reads_arrays and operation.centered:
        z = z - jnp.mean(z, -1, keepdims=True)
    dx, *sums = norm_cotangents(z, rstd[:, None], weight, dy, centered=operation.centered, has_bias=operation.has_bias)
    if residual is not None:
        dx = dx + residual.astype(jnp.float32)
    dx = dx.astype(dtype)
    return dx, *sums, scaling.compute_amax(dx)  # type: ignore[return-value]


def _read(operation: Any, x: Array, scale: Array | None) -> Array:
    """Return an operand's values in fp32."""
    if operation.format == "int10" and not operation.reads_arrays:
        x = packing.unpack(x, 1, x.shape[1] // 5 * 4)
    x = x.astype(jnp.float32)
    return x if scale is None else x * jnp.repeat(scale.astype(jnp.float32), operation.group, 1)[:, : x.shape[1]]


def is_scaled_by_row(result: Result) -> bool:
    """Return whether the result requests codes with row scales."""
    return result is not None and result[0] is None and jnp.dtype(result[1]).itemsize == 1


def _encode_result(y: Array, result: Result) -> Any:
    """Return the requested output: the array, its codes, or its codes and row scales."""
    if result is None or jnp.dtype(result[1]).itemsize > 1:
        return None if result is None else y
    scale, dtype = result
    if scale is None:
        q = quantize_with_scale(y, QuantSpec(_NAMES[jnp.dtype(dtype)], "token"), None)
        return q.codes, q.scale
    return _codes(y, scale, dtype)


def _codes(y: Array, scale: Array, dtype: Any) -> Array:
    """Quantize under one scale or a scale per row."""
    granularity, shape = ("token", (-1, 1)) if scale.ndim > 0 else ("tensor", (1, 1))
    return quantize_with_scale(y, QuantSpec(_NAMES[jnp.dtype(dtype)], granularity), scale.reshape(shape)).codes


def _quantize_residual(x: Array, coding: Any) -> tuple[Array, Array]:
    scale = {jnp.dtype(jnp.float32): "fp32", jnp.dtype(jnp.bfloat16): "bf16"}[jnp.dtype(coding.scale_dtype)]
    spec = QuantSpec(_NAMES[jnp.dtype(coding.dtype)], "group", coding.size, scale_format=scale)
    q = quantize_with_scale(x, spec, None)
    return q.codes, q.scale
