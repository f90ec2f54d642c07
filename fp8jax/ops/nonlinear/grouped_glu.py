"""A GLU of the rows of groups, between two grouped products, that saves gate and up in 8 bits.

On GPUs, kernels compute the codes of its result for the product after it, and the codes of its cotangents for the
product before it. Scales are per group, as those of the products.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import derivatives, formats, scaling
from fp8jax.core.groups import ALIGNMENT, Groups, PaddedTokens
from fp8jax.core.qtensor import QTensor, to_bytes
from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.autodiff.checkpointing import ACTIVATION, with_checkpoint_name
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
from fp8jax.ops.dispatch.sharding import explicit_mesh
from fp8jax.ops.quantization import fused_outputs
from fp8jax.ops.quantization.fused_reference import ACTIVATIONS
from fp8jax.ops.quantization.group_scales import group_maxima
from fp8jax.ops.quantization.token_codes import RowsAndColumns, unscaled_columns


class GroupedGluResiduals(NamedTuple):
    """Residuals of a GLU.

    Attributes:
        gate_up: codes of gate and up, side by side, or the array.
        weights: fp32 (rows,), or None.
        groups: of the rows.
        scale: fp32 (groups, 1), of the result's codes; None if the product after it quantizes the result.
    """

    gate_up: QTensor | Array
    weights: Array | None
    groups: Groups
    scale: Array | None


class GluCotangents(NamedTuple):
    """Facts about the cotangents of a GLU that are available when its result is recomputed.

    Attributes:
        spec: of the codes.
        codes: of the cotangent of gate and up.
        weights: cotangent of the weights of rows, if they were 1.
    """

    spec: QuantSpec
    codes: RowsAndColumns
    weights: Array


def grouped_glu(
    gate_up: Array, groups: Groups, recipe: Recipe, *, weights: Array | None = None, activation: str = "silu"
) -> tuple[Array, ArrayFacts]:
    """Return weight * activation(gate) * up of each row, computed in fp32, and facts for the product that reads it.

    Args:
        gate_up: (rows, 2 channels), gate and up side by side, any floating dtype.
        groups: of the rows. Rows of no group may hold anything, and their weights have no gradient.
        weights: fp32 (rows,), such as those of a router; None for 1.
        activation: "silu", "gelu" (exact) or "gelu_tanh".

    Returns:
        (rows, channels) in the dtype of `gate_up`.
    """
    spec, linear, values = recipe.context.spec, recipe.linear, lax.stop_gradient(gate_up)
    y = _weighted_glu(activation, gate_up.dtype, values, None if weights is None else lax.stop_gradient(weights))
    operation = _kernel_operation(activation, gate_up, spec, recipe)
    x_spec, saved_weights = linear.spec("x"), None if weights is None else lax.stop_gradient(weights)
    scale = codes = None
    if operation is None or x_spec is None:
        residual = values if spec is None else quantize_residual(values, spec)
    else:
        tokens, coding, fmt = _padded(groups, gate_up), fused_outputs.to_coding(spec), formats.get(x_spec.format)
        exact = operation._replace(reads_arrays=True)
        (amax, _) = fused_outputs.run(lambda backend, x: backend.glu_row_statistics(exact, x, None, None), values)
        scale, row_scale, factor = _scales(amax, saved_weights, tokens, linear.stateless_strategy("x"), fmt)
        saved_codes, row_codes = fused_outputs.run(
            lambda backend, x, factor: backend.encode_glu(exact, x, factor, coding, fmt.dtype), values, factor
        )
        residual = values if spec is None else fused_outputs.to_residual(saved_codes[0], saved_codes[1], values, spec)
        codes = x_spec, to_bytes(QTensor(row_codes, row_scale, None, None, QuantSpec(x_spec.format, "token")))
    residuals = GroupedGluResiduals(residual, saved_weights, groups, scale)
    residuals = with_checkpoint_name(residuals, ACTIVATION) if spec is not None else residuals
    backward = GroupedGluBackward(activation, jnp.dtype(gate_up.dtype), linear, operation)
    y, _ = with_saved_vjp(backward, (gate_up, weights), residuals, y, name="a GLU of groups")
    layer_scope = current_layer_scope(f"{activation} of groups")
    if layer_scope is not None and spec is not None:
        row_mask = _padded(groups, gate_up).is_in_group[:, None]
        y = observe_codes(y, layer_scope, "context", values, residual, row_mask=row_mask)
    y = derivatives.check_differentiable_dtypes("a GLU of groups", y, gate_up)
    return y, ArrayFacts(recompute_rule=(backward, residuals), codes=codes)


@dataclasses.dataclass(frozen=True)
class GroupedGluBackward:
    """Backward rule of a GLU, a `fp8jax.ops.autodiff.residuals.Recomputable`.

    Attributes:
        activation: name of the activation.
        dtype: of gate, up and the result.
        linear: of the products before and after it.
        operation: the kernels' description of it; None for XLA.
    """

    activation: str
    dtype: DTypeLike
    linear: Linear
    operation: Any

    def recompute(self, saved: GroupedGluResiduals, gradient: CotangentFacts) -> Recomputed:
        gate_up = dequantize_residual(saved.gate_up)
        y, dy = _weighted_glu(self.activation, self.dtype, gate_up, saved.weights), gradient.array
        spec, x_spec = self.linear.spec("dy"), self.linear.spec("x")
        if self.operation is None or saved.scale is None or spec is None or x_spec is None or dy.dtype != self.dtype:
            return Recomputed(y)
        fmt, x_fmt, operation = formats.get(spec.format), formats.get(x_spec.format), self.operation
        tokens = _padded(saved.groups, dy)
        codes, scales = fused_outputs.residual_matrices(saved.gate_up)
        amax, dots = fused_outputs.run(
            lambda backend, *arrays: backend.glu_row_statistics(operation, *arrays), codes, scales, dy
        )
        scale, row_scale, factor = _scales(amax, saved.weights, tokens, self.linear.stateless_strategy("dy"), fmt)
        result_factor = _factor(saved.weights, tokens.take_groups(saved.scale))
        rows, columns, result_columns = fused_outputs.run(
            lambda backend, *arrays: backend.quantize_glu_cotangents(operation, *arrays, fmt.dtype, x_fmt.dtype),
            *(codes, scales, dy, tokens.rows, factor, result_factor),
        )
        cotangents = RowsAndColumns(
            QTensor(rows, row_scale, None, None, QuantSpec(spec.format, "token")),
            unscaled_columns(columns, spec.format, scale),
        )
        dots = jnp.where(tokens.is_in_group, dots, 0.0)
        result = unscaled_columns(result_columns, x_spec.format, saved.scale)
        return Recomputed(y, result, GluCotangents(spec, cotangents, dots))

    def backward(
        self,
        saved: GroupedGluResiduals,
        dy: Array,
        dtypes: tuple[DTypeLike | None, ...],
        passthrough_cotangent: Array | None,
        predicted: GluCotangents | None,
    ) -> tuple[tuple[Array | None, ...], tuple[ArrayFacts, ...]]:
        def function(gate_up: Array, weights: Array | None) -> Array:
            return _weighted_glu(self.activation, self.dtype, gate_up, weights)

        # Without the barrier XLA decodes once for both passes, and keeps fp32 arrays in between.
        gate_up, dy = lax.optimization_barrier((saved.gate_up, dy))
        values = dequantize_residual(gate_up).astype(self.dtype)
        d_gate_up, d_weights = jax.vjp(function, values, saved.weights)[1](dy)
        if predicted is None:
            return (d_gate_up, d_weights), ()
        return (d_gate_up, None if saved.weights is None else predicted.weights), (
            NO_FACTS._replace(codes=(predicted.spec, predicted.codes)),
        )


def _weighted_glu(name: str, dtype: DTypeLike, gate_up: Array, weights: Array | None) -> Array:
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, -1)
    y = ACTIVATIONS[name](gate) * up
    return (y if weights is None else y * weights[:, None]).astype(dtype)


def _kernel_operation(name: str, gate_up: Array, spec: QuantSpec | None, recipe: Recipe) -> Any:
    """Return the kernels' description of a GLU, or None for XLA."""
    linear, context = recipe.linear, recipe.context
    specs = linear.spec("x"), linear.spec("dy")
    is_per_tensor = all(s is not None and fused_outputs.supports(s) for s in specs)
    shares_codes = all(use == SAME for use in (linear.x_residual, linear.x_wgrad, linear.dy_wgrad))
    recomputes = context.spec is None or context.recompute_activations
    group = 16 if spec is None else spec.group_size or 16
    if (
        not (is_per_tensor and shares_codes and recomputes)
        or linear.stateful_strategies
        or explicit_mesh(gate_up) is not None
    ):
        return None
    if gate_up.shape[1] % (2 * math.lcm(group, 16)):
        return None
    return fused_outputs.describe_operation(gate_up, spec, gate_up.dtype, forward=True, activation=name)


def _padded(groups: Groups, x: Array) -> PaddedTokens:
    return PaddedTokens.from_groups(groups, x.shape[0], ALIGNMENT)


def _scales(
    amax: Array, weights: Array | None, tokens: PaddedTokens, strategy: Scaling, fmt: formats.Format
) -> tuple[Array, Array, Array]:
    """Return scales of groups, fp32 (groups, 1), of rows, (rows, 1), and the factor of each row before weighting."""
    if weights is not None:
        amax = amax * jnp.abs(weights)
    amax = jnp.where(jnp.isfinite(amax), amax, 0.0)[:, None]
    scale = scaling.to_scale(strategy.reduce_amax(group_maxima(amax, tokens)), fmt)
    row_scale = tokens.take_groups(scale)
    return scale, row_scale, _factor(weights, row_scale)


def _factor(weights: Array | None, row_scale: Array) -> Array:
    """Return weight / scale of each row, fp32 (rows,); 0 in rows of no group, whose scale is 0."""
    inverse = jnp.where(row_scale > 0, 1 / jnp.where(row_scale > 0, row_scale, 1.0), 0.0)[:, 0]
    return inverse if weights is None else weights * inverse
