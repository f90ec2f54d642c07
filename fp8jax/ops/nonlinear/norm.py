"""RMSNorm and LayerNorm that save their input in 8 bits for the backward pass (COAT, section 5.2)."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import derivatives, formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Context, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.autodiff.checkpointing import NORM, PRODUCT_AUX, with_checkpoint_name
from fp8jax.ops.autodiff.observations import current_layer_scope, observe_codes
from fp8jax.ops.autodiff.residuals import (
    NO_FACTS,
    ArrayFacts,
    CotangentFacts,
    Recomputed,
    dequantize_residual,
    quantize_residual,
    with_saved_vjp,
)
from fp8jax.ops.quantization import fused_outputs
from fp8jax.ops.quantization.fused_reference import apply_normalization, norm_cotangents, statistics
from fp8jax.ops.quantization.microscaling import RECOMPUTE_HEADROOM
from fp8jax.recipes import context_part


def rms_norm(
    x: Array,
    scale: Array | None = None,
    *,
    recipe: Recipe | Context | str,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
) -> Array:
    """Return x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang and Sennrich, 2019).

    The forward pass is exact, in fp32. The backward pass reads the codes of `x` and the fp32 root of each row. Without
    a spec in the context, JAX differentiates. `norm_linear` fuses it with the next layers and saves less.

    Args:
        x: (..., channels), any floating dtype.
        scale: (channels,), or None.
        recipe: a `Recipe`, its `Context`, or a preset's name.
        eps: added to the mean square.
        dtype: dtype of the result; None means that of `x`.

    Returns:
        (..., channels). Gradients have the dtypes of their inputs.

    Raises:
        ValueError: the shapes do not match.
    """
    return normalize(x, scale, None, context_part(recipe), eps, dtype, centered=False)[0]


def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    recipe: Recipe | Context | str,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
) -> Array:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * scale + bias over the last axis (Ba et al., 2016).

    The forward pass is exact, in fp32. The backward pass reads the fp32 root of each row and the codes of the centered
    `x`, whose error does not grow with the mean.

    Args:
        x: (..., channels), any floating dtype.
        scale: (channels,), or None.
        bias: (channels,), or None.
        eps: added to the variance.
        recipe, dtype: as in `rms_norm`.

    Returns, raises: as `rms_norm`.
    """
    return normalize(x, scale, bias, context_part(recipe), eps, dtype, centered=True)[0]


class NormResiduals(NamedTuple):
    """Residuals of a norm: codes of its (centered) input, fp32 inverse root of each row (..., 1), and parameters.

    An unquantized input is saved as an array.
    """

    codes: QTensor | Array
    rstd: Array
    scale: Array | None
    bias: Array | None


@dataclasses.dataclass(frozen=True)
class NormBackward:
    """Backward rule of a norm, a `fp8jax.ops.autodiff.residuals.Recomputable`."""

    centered: bool
    dtype: DTypeLike

    def recompute(self, saved: NormResiduals, gradient: CotangentFacts) -> Recomputed:
        z, mean = self._input(saved)
        y = apply_normalization(z, saved.rstd, saved.scale, saved.bias).astype(self.dtype)
        operation, fused_output = self._kernel_operation(saved, y), None
        if operation is not None:
            stored_input = fused_outputs.residual_matrices(saved.codes)
            (fused_output,) = _fused_result(
                operation, stored_input, saved.rstd, mean, saved.scale, saved.bias, None
            ).outputs
        return Recomputed(y, fused_output)

    def backward(
        self,
        saved: NormResiduals,
        dy: Array,
        dtypes: tuple[DTypeLike | None, ...],
        passthrough_cotangent: Array | None,
        predicted: Any,
    ) -> tuple[tuple[Array | None, ...], tuple[ArrayFacts, ...]]:
        operation = self._kernel_operation(
            saved, dy, fp8=isinstance(saved.codes, Array) or not saved.codes.spec.is_packed
        )
        if operation is None:
            z, _ = self._input(saved)
            dx, *sums = norm_cotangents(
                z, saved.rstd, saved.scale, dy, centered=self.centered, has_bias=saved.bias is not None
            )
            return _cast(
                (dx if passthrough_cotangent is None else dx + passthrough_cotangent.astype(jnp.float32), *sums), dtypes
            ), ()

        operands = (
            *fused_outputs.residual_matrices(saved.codes),
            saved.rstd.reshape(-1),
            saved.scale,
            fused_outputs.to_matrix(dy),
        )
        other_cotangents = None if passthrough_cotangent is None else fused_outputs.to_matrix(passthrough_cotangent)
        dx, *sums, amax = fused_outputs.run(
            lambda backend, *arrays: backend.backward(operation, *arrays[:-1], dtypes[0], arrays[-1]),
            *operands,
            other_cotangents,
        )
        return _cast((fused_outputs.reshape_like(dx, dy), *sums), dtypes), (ArrayFacts(amax=amax),)

    def _input(self, saved: NormResiduals) -> tuple[Array, Array | None]:
        """Return the (centered) input, and its mean if that is not part of the residuals."""
        z = dequantize_residual(saved.codes)
        if not (self.centered and isinstance(saved.codes, Array)):
            return z, None
        mean = jnp.mean(z, -1, keepdims=True)
        return z - mean, mean

    def _kernel_operation(self, saved: NormResiduals, like: Array, *, fp8: bool = True) -> Any:
        spec = None if isinstance(saved.codes, Array) else saved.codes.spec
        return fused_outputs.describe_operation(
            like, spec, self.dtype, norm=True, fp8=fp8,
            centered=self.centered, has_scale=saved.scale is not None, has_bias=saved.bias is not None,
        )  # fmt: skip


def normalize(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    recipe: Recipe | Context | str,
    eps: float,
    dtype: DTypeLike | None,
    *,
    centered: bool,
    returns_input: bool = False,
) -> tuple[Array, Array | None, ArrayFacts]:
    """Return a norm's result, `x` for its other readers if `returns_input`, and the `ArrayFacts` of the result.

    The backward pass adds the gradient of the returned `x`.
    """
    for name, parameter in (("scale", scale), ("bias", bias)):
        if x.ndim < 1 or (parameter is not None and parameter.shape != x.shape[-1:]):
            shape = None if parameter is None else parameter.shape
            raise ValueError(f"a norm expects x (..., channels) and {name} (channels,), got {x.shape} and {shape}")
    dtype, context = jnp.dtype(x.dtype if dtype is None else dtype), context_part(recipe)
    operation = None
    if context.spec is not None or fused_outputs.emits_codes(recipe):
        operation = fused_outputs.describe_operation(
            x, context.spec, dtype, norm=True, forward=True, fp8=not fused_outputs.writes_result(recipe),
            has_scale=scale is not None, has_bias=bias is not None, centered=centered,
        )  # fmt: skip
    if context.spec is None and operation is None:
        y = apply_normalization(*statistics(x, eps, centered=centered), scale, bias).astype(dtype)
        passthrough, facts = x if returns_input else None, NO_FACTS
    else:
        y, passthrough, facts = _normalize_and_save(
            x, scale, bias, recipe, eps, dtype, operation, centered=centered, returns_input=returns_input
        )
    return derivatives.check_differentiable_dtypes("a norm", y, x, scale, bias), passthrough, facts


def _normalize_and_save(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    recipe: Recipe | Context | str,
    eps: float,
    dtype: Any,
    operation: Any,
    *,
    centered: bool,
    returns_input: bool,
) -> tuple[Array, Array | None, ArrayFacts]:
    """`normalize` with a custom backward pass, by the kernels of `operation`, or by XLA without one."""
    context, consumer = context_part(recipe), fused_outputs.find_consumer(recipe)
    value, weight, shift = lax.stop_gradient((x, scale, bias))
    out_spec, result_bound = None if consumer is None else consumer.spec("x"), None
    if out_spec is not None and not out_spec.is_folded:
        result_bound = ResultBound.from_params(weight, shift, x.shape[-1], out_spec)
    fused_output = codes = out_scale = None
    if operation is None:
        assert context.spec is not None
        z, rstd = statistics(value, eps, centered=centered)
        residuals = NormResiduals(quantize_residual(z if centered else value, context.spec), rstd, weight, shift)
        y = apply_normalization(z, rstd, weight, shift).astype(dtype)
        out_scale = None if result_bound is None else result_bound.scale_from_amax(scaling.compute_amax(y))
    elif fused_outputs.writes_result(recipe):
        residuals, _, _, y, _ = _save_and_quantize_result(
            operation, value, weight, shift, context.spec, eps, None, dtype
        )
        y = fused_outputs.reshape_like(y, value)
    else:
        out_dtype = None if out_spec is None else formats.get(out_spec.format).dtype
        residuals, mean, amax, codes, out_scale = _save_and_quantize_result(
            operation, value, weight, shift, context.spec, eps, result_bound, out_dtype
        )
        z, rstd = value.astype(jnp.float32), residuals.rstd
        if mean is not None:
            z = z - mean.reshape(rstd.shape)
        (fused_output,) = _fused_result(
            operation._replace(reads_arrays=True),
            (fused_outputs.to_matrix(value), None),
            rstd,
            mean,
            weight,
            shift,
            amax,
        ).outputs
        y = apply_normalization(z, rstd, weight, shift).astype(dtype)
    if context.spec is None:
        residuals = residuals._replace(rstd=with_checkpoint_name(residuals.rstd, PRODUCT_AUX))
    else:
        residuals = residuals._replace(
            codes=with_checkpoint_name(residuals.codes, NORM), rstd=with_checkpoint_name(residuals.rstd, NORM)
        )
    recomputable = NormBackward(centered, dtype)
    y, passthrough = with_saved_vjp(
        recomputable, (x, scale, bias), residuals, y, returns_input=returns_input, name="a norm"
    )
    facts = fused_outputs.make_array_facts(context, recomputable, residuals, fused_output, consumer, out_scale, codes)
    if context.spec is not None and (layer_scope := current_layer_scope("norm")) is not None:
        saved = statistics(value, eps, centered=True)[0] if centered else value
        y = observe_codes(y, layer_scope, "context", saved, residuals.codes)
    return y, passthrough, facts


class ResultBound(NamedTuple):
    """A bound on the magnitudes of a norm's result, known before it is computed.

    A normalized value is at most the root of the number of channels. The bound is far too large if eps is far above all
    mean squares, or if one channel's scale is far above the others.

    Attributes:
        max_magnitude: the bound, fp32 scalar.
        outlier_ratio: largest scale / (OUTLIER_FACTOR * geometric mean of the scales), fp32, at least 1.
        spec: spec of the result.
    """

    max_magnitude: Array
    outlier_ratio: Array
    spec: QuantSpec

    @classmethod
    def from_params(cls, scale: Array | None, bias: Array | None, channels: int, spec: QuantSpec) -> "ResultBound":
        max_normalized, outlier_ratio = math.sqrt(channels), jnp.float32(1)
        max_magnitude = jnp.float32(max_normalized)
        if scale is not None:
            scale_amax = scaling.compute_amax(scale)
            max_magnitude = max_normalized * scale_amax
            outlier_ratio = jnp.maximum(scale_amax / (OUTLIER_FACTOR * _geometric_mean(scale)), 1.0)
        if bias is not None:
            max_magnitude = max_magnitude + scaling.compute_amax(bias)
        return cls(jnp.minimum(1.01 * max_magnitude, np.finfo(np.float32).max), outlier_ratio, spec)

    @property
    def scale(self) -> Array:
        """The scale from the bound."""
        return scaling.to_scale(self.max_magnitude, formats.get(self.spec.format))

    def is_loose(self, amax: Array) -> Array:
        """Return whether the scale must come from the result's amax instead (`fp8jax.core.scaling.is_loose`)."""
        return scaling.is_loose(self.max_magnitude * self.outlier_ratio, amax, formats.get(self.spec.format))

    def scale_from_amax(self, amax: Array) -> Array:
        """Return the scale of a result with a known amax."""
        # Wgrad recomputes its input from rounded codes, so it may exceed the amax.
        bound = jnp.where(
            self.is_loose(amax), jnp.minimum(RECOMPUTE_HEADROOM * amax, self.max_magnitude), self.max_magnitude
        )
        return scaling.to_scale(bound, formats.get(self.spec.format))


# A channel's scale is an outlier above this multiple of the geometric mean.
OUTLIER_FACTOR = 8.0


def _geometric_mean(scale: Array) -> Array:
    """Return the geometric mean of the finite nonzero magnitudes, fp32 scalar; 1 if there are none."""
    magnitude = jnp.abs(scale.astype(jnp.float32))
    is_counted = jnp.isfinite(magnitude) & (magnitude >= formats.TINY)
    logarithms = jnp.log2(jnp.where(is_counted, magnitude, 1.0))
    return jnp.exp2(jnp.sum(logarithms) / jnp.maximum(jnp.sum(is_counted, dtype=jnp.float32), 1.0))


def _save_and_quantize_result(
    operation: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    spec: QuantSpec | None,
    eps: float,
    bound: ResultBound | None,
    dtype: DTypeLike | None,
) -> tuple[NormResiduals, Array | None, Array, Any, Array | None]:
    """Return the residuals, the row means (if centered), and the amax, requested output and scale of the result.

    The requested output in `dtype` is the result itself, its codes under a scale, or codes and row scales. The scale is
    None without a bound.
    """
    from pallas_kernels.nonlinear import quantize_recomputed_triton

    # JAX caches traced functions. `make` must not close over tracers.
    coding, out_spec = fused_outputs.to_coding(spec), None if bound is None else bound.spec

    def make(backend: Any, x: Array, scale: Array | None, bias: Array | None, bound: tuple[Array, Array] | None) -> Any:
        result_bound = None if bound is None or out_spec is None else ResultBound(*bound, out_spec)
        result = None if dtype is None else (None if result_bound is None else result_bound.scale, dtype)
        *residual_arrays, amax, codes = backend.forward(operation, x, scale, bias, eps, coding, result=result)
        if result_bound is None:
            return *residual_arrays, amax, codes, None
        rstd, mean = residual_arrays[2:]
        operands = quantize_recomputed_triton.Operands(x, rstd=rstd, mean=mean, weight=scale, bias=bias)
        out_scale, exact_operation = result_bound.scale_from_amax(amax), operation._replace(reads_arrays=True)
        with jax.named_scope("requantize"):
            codes = backend.requantize_if(
                exact_operation,
                (quantize_recomputed_triton.NORM,),
                operands,
                codes,
                out_scale,
                result_bound.is_loose(amax),
            )
        return *residual_arrays, amax, codes, out_scale

    codes, scales, rstd, mean, amax, result, to_scale = fused_outputs.run(
        make,
        fused_outputs.to_matrix(x),
        scale,
        bias,
        None if bound is None else (bound.max_magnitude, bound.outlier_ratio),
    )
    input_residual = x if spec is None else fused_outputs.to_residual(codes, scales, x, spec)
    return (
        NormResiduals(input_residual, fused_outputs.reshape_like(rstd[:, None], x), scale, bias),
        mean,
        amax,
        result,
        to_scale,
    )


def _fused_result(
    operation: Any,
    stored_input: tuple[Array, Array | None],
    rstd: Array,
    mean: Array | None,
    scale: Array | None,
    bias: Array | None,
    amax: Array | None,
) -> fused_outputs.FusedOutputs:
    from pallas_kernels.nonlinear import quantize_recomputed_triton

    mean_by_row = None if mean is None else mean.reshape(-1)
    operands = quantize_recomputed_triton.Operands(
        stored_input[0], stored_input[1], rstd=rstd.reshape(-1), mean=mean_by_row, weight=scale, bias=bias
    )
    return fused_outputs.FusedOutputs(
        operation, (quantize_recomputed_triton.NORM,), operands, () if amax is None else (amax,)
    )


def _cast(cotangents: tuple[Array | None, ...], dtypes: tuple[DTypeLike | None, ...]) -> Any:
    return tuple(None if ct is None else ct.astype(dtype) for ct, dtype in zip(cotangents, dtypes, strict=True))
