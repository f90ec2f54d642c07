"""Gated and plain activations that save their inputs in 8 bits for the backward pass (COAT, section 5.2)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import derivatives, formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Context, Recipe
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
from fp8jax.ops.quantization import fused_outputs
from fp8jax.ops.quantization.fused_reference import ACTIVATIONS, activation_cotangents
from fp8jax.recipes import context_part


def glu(
    gate: Array,
    up: Array,
    *,
    recipe: Recipe | Context | str,
    activation: str = "silu",
) -> Array:
    """Return activation(gate) * up (Shazeer, 2020).

    The forward pass is JAX's. The backward pass reads the codes of `gate` and `up`, and those of activation(gate) if
    the context recomputes no activations. Without a spec in the context, JAX differentiates. `glu_linear` fuses it with
    the next layer and saves less.

    Args:
        gate: (..., channels), any floating dtype.
        up: array of the same shape and dtype.
        recipe: a `Recipe`, its `Context`, or a preset's name.
        activation: "silu", "gelu" (exact) or "gelu_tanh".

    Returns:
        (..., channels) in the dtype of `gate`.

    Raises:
        ValueError: unknown activation, or the shapes or dtypes differ.
    """
    check_glu_inputs(gate, up)
    return activate(activation, gate, up, context_part(recipe))[0]


def activation(x: Array, *, recipe: Recipe | Context | str, activation: str) -> Array:
    """Return activation(x). The backward pass reads the codes of `x`.

    Args:
        x: (..., channels), any floating dtype.
        recipe, activation: as in `glu`.

    Returns:
        (..., channels) in the dtype of `x`.

    Raises:
        ValueError: unknown activation.
    """
    return activate(activation, x, None, context_part(recipe))[0]


def check_glu_inputs(gate: Array, up: Array) -> None:
    """Raise ValueError if gate and up differ in shape or dtype."""
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"glu expects arrays of the same dtype and shape, got {gate.dtype}{gate.shape} and {up.dtype}{up.shape}"
        )


# Bounds of cotangents assume two things of an activation f: |f'(x)| <= MAX_SLOPE, and |f(x)| <= |x|. No code checks
# them. The slope of GELU is at most 1.129, that of SiLU 1.100.
MAX_SLOPE = 1.13


class ActivationResiduals(NamedTuple):
    """Residuals of an activation: codes of gate (or the only input), of `up`, and of activation(gate).

    Unquantized inputs are saved as arrays.
    """

    gate: QTensor | Array
    up: QTensor | Array | None
    activated: QTensor | None


@dataclasses.dataclass(frozen=True)
class ActivationBackward:
    """Backward rule of an activation, a `fp8jax.ops.autodiff.residuals.Recomputable`.

    Attributes:
        activation: name of the activation.
        dtype: dtype of its inputs.
        uses_bounds: whether cotangents get scales from bounds.
        writes_cotangents: whether kernels write 16-bit cotangents, as in `fused_outputs.writes_result`.
        has_bias: whether the preceding layers have biases. Their gradients are sums of the cotangents.
    """

    activation: str
    dtype: DTypeLike
    uses_bounds: bool = False
    writes_cotangents: bool = False
    has_bias: bool = False

    def recompute(self, saved: ActivationResiduals, gradient: CotangentFacts) -> Recomputed:
        activated = ACTIVATIONS[self.activation](dequantize_residual(saved.gate))
        y = (activated if saved.up is None else activated * dequantize_residual(saved.up)).astype(self.dtype)
        dy = gradient.array if (gradient.array.shape, gradient.array.dtype) == (y.shape, y.dtype) else None
        sources, fused_output = self._operands(saved, y, dy), None
        predicted = self._predict_cotangents(saved, gradient, None if dy is None else sources)
        if sources is not None:
            from pallas_kernels.nonlinear.quantize_recomputed_triton import RESULT

            operation, operands = sources
            result_prediction = None if dy is None else predicted
            (fused_output,) = fused_outputs.FusedOutputs(
                operation, (RESULT,), operands, predicted=result_prediction
            ).outputs
        return Recomputed(y, fused_output, predicted)

    def backward(
        self,
        saved: ActivationResiduals,
        dy: Array,
        dtypes: tuple[DTypeLike | None, ...],
        passthrough_cotangent: Array | None,
        predicted: fused_outputs.CotangentPrediction | None,
    ) -> tuple[tuple[Array, ...], tuple[ArrayFacts, ...]]:
        kernel_operands = (
            self._operands(saved, dy, dy, fp8=False) if self.writes_cotangents and {*dtypes} == {self.dtype} else None
        )
        if kernel_operands is not None:
            operation, operands = kernel_operands
            arrays = fused_outputs.run(lambda backend, operands: backend.cotangents(operation, operands), operands)
            return tuple(fused_outputs.reshape_like(x, dy) for x in arrays), ()
        cotangents = self._cotangents(saved, dy)
        cast = tuple(ct.astype(dtype) for ct, dtype in zip(cotangents, dtypes, strict=True))
        if any(dtype != self.dtype for dtype in dtypes):
            return cast, ()
        predicted, sources = predicted or fused_outputs.CotangentPrediction(), self._operands(saved, cast[0], dy)
        outputs: tuple[fused_outputs.FusedOutput | None, ...] = (None,) * len(cast)
        if sources is not None:
            from pallas_kernels.nonlinear.quantize_recomputed_triton import GATE, UP

            kinds = (GATE, UP)[: len(cast)]
            sums = dict(enumerate(predicted.sums))
            outputs = fused_outputs.FusedOutputs(
                sources[0], kinds, sources[1], predicted.amaxes, None, predicted.variants, sums
            ).outputs
        spec, scales = predicted.spec, predicted.scales or (None,) * len(cast)
        scale_facts = (None if spec is None or scale is None else (spec, scale) for scale in scales)
        return cast, tuple(
            ArrayFacts(None, fused_output, scale) for fused_output, scale in zip(outputs, scale_facts, strict=True)
        )

    def _predict_cotangents(
        self, saved: ActivationResiduals, gradient: CotangentFacts, sources: Any
    ) -> fused_outputs.CotangentPrediction:
        """Return scales of the cotangents of gate and up from bounds, or an empty prediction.

        `sources` is the result of `_operands` for the cotangents.
        """
        spec = gradient.spec
        if not self.uses_bounds or spec is None or spec.format != "e5m2" or not fused_outputs.supports(spec):
            return fused_outputs.CotangentPrediction()
        assert isinstance(saved.gate, QTensor)
        has_row_scales = saved.gate.spec.granularity in ("tensor", "token", "group")
        if not has_row_scales or gradient.array.shape != saved.gate.shape:
            return fused_outputs.CotangentPrediction()
        slopes = [jnp.float32(MAX_SLOPE)]
        if saved.up is not None:
            assert isinstance(saved.up, QTensor)
            slopes = [MAX_SLOPE * _row_bounds(saved.up), _row_bounds(saved.gate)]
        rows, fmt = gradient.row_bounds(), formats.get(spec.format)
        bounds = tuple(scaling.compute_amax(rows * slope) for slope in slopes)
        if sources is None:
            cotangents = self._cotangents(saved, gradient.array)
            amaxes = tuple(scaling.compute_amax(ct.astype(self.dtype)) for ct in cotangents)
        else:
            operation, operands = sources
            amaxes = fused_outputs.run(functools.partial(_amaxes_if_loose, operation, fmt), operands, bounds)
        scale_bounds = (
            jnp.where(scaling.is_loose(bound, amax, fmt), amax, bound)
            for bound, amax in zip(bounds, amaxes, strict=True)
        )
        return fused_outputs.CotangentPrediction(
            spec=spec, scales=tuple(scaling.to_scale(bound, fmt) for bound in scale_bounds), needs_sums=self.has_bias
        )

    def _cotangents(self, saved: ActivationResiduals, dy: Array) -> tuple[Array, ...]:
        """Return the fp32 cotangents of gate and up."""
        up, activated = (None if q is None else dequantize_residual(q) for q in saved[1:])
        return activation_cotangents(ACTIVATIONS[self.activation], dequantize_residual(saved.gate), up, activated, dy)

    def _operands(
        self, saved: ActivationResiduals, like: Array, dy: Array | None, *, fp8: bool = True
    ) -> tuple[Any, Any] | None:
        """Return the kernels' operation and operands of the result, or of the cotangents of `dy`; None for XLA."""
        spec = None if isinstance(saved.gate, Array) else saved.gate.spec
        operation = _kernel_operation(self.activation, like, saved.up, spec, saved.activated is not None, fp8=fp8)
        if operation is None:
            return None
        from pallas_kernels.nonlinear import quantize_recomputed_triton

        (x, x_scale), (up, up_scale), (activated, activated_scale) = (
            (None, None) if q is None else fused_outputs.residual_matrices(q) for q in saved
        )
        gradient = None if dy is None else fused_outputs.to_matrix(dy)
        assert x is not None
        return operation, quantize_recomputed_triton.Operands(
            x, x_scale, up, up_scale, activated, activated_scale, gradient
        )


def _amaxes_if_loose(
    operation: Any, fmt: formats.Format, backend: Any, operands: Any, bounds: tuple[Array, ...]
) -> Any:
    """Return the amax of an activation's cotangents, or 0 if a sample of rows shows that no bound is loose.

    The results are fp32 scalars, for the gate and, if gated, for `up`.
    """
    from pallas_kernels.nonlinear.quantize_recomputed_triton import GATE, UP

    kinds = (GATE, UP)[: len(bounds)]
    with jax.named_scope("sample"):
        sample = backend.compute_amaxes(operation, kinds, operands, every=scaling.SAMPLE_EVERY)
    is_loose = [(amax == 0) | scaling.is_loose(bound, amax, fmt) for bound, amax in zip(bounds, sample, strict=True)]
    with jax.named_scope("requantize"):
        return tuple(
            backend.compute_amaxes(operation, kinds, operands, compute_if=functools.reduce(jnp.logical_or, is_loose))
        )


def _row_bounds(residual: QTensor) -> Array:
    """Return an upper bound of the magnitudes in each row, fp32 (rows,), from the scales."""
    scale = fused_outputs.to_matrix(residual.scale).astype(jnp.float32)
    return jnp.max(scale, -1, initial=0.0) * formats.get(residual.spec.format).max


def activate(
    name: str,
    gate: Array,
    up: Array | None,
    recipe: Recipe | Context | str,
    *,
    has_bias: bool = False,
) -> tuple[Array, ArrayFacts]:
    """Return the result of an activation (`glu` if there is an `up`) and its `ArrayFacts`.

    `has_bias`: whether layers with biases compute an input. The pass that quantizes its gradient then also sums it.
    """
    context, function, consumer = context_part(recipe), _function(name), fused_outputs.find_consumer(recipe)
    omits_activated, operation, writes_result = (
        context.recompute_activations or context.spec is None or up is None,
        None,
        fused_outputs.writes_result(recipe),
    )
    if context.spec is not None or fused_outputs.emits_codes(recipe):
        operation = _kernel_operation(
            name, gate, up, context.spec, not omits_activated, forward=True, fp8=not writes_result
        )
    if context.spec is None and operation is None:
        y = function(gate) if up is None else function(gate) * up
        return derivatives.check_differentiable_dtypes("an activation", y, gate, up), NO_FACTS
    g, u = lax.stop_gradient(gate), None if up is None else lax.stop_gradient(up)
    out_spec = None if consumer is None else consumer.spec("x")
    fused_output = scale = codes = None
    # Without the barrier, XLA fuses an approximate GELU into the FP8 product, and fails if that has other readers.
    barrier_gate = lax.optimization_barrier(g)
    activated = function(barrier_gate)
    y = activated if u is None else activated * u
    if operation is None:
        assert context.spec is not None
        residual_arrays = barrier_gate, u, None if omits_activated else activated
        quantized: Any = (None if x is None else quantize_residual(x, context.spec) for x in residual_arrays)
        residuals = ActivationResiduals(*quantized)
        if out_spec is not None and not out_spec.is_folded:
            matrix = fused_outputs.to_matrix(y)
            scale = _scale_from_sample(out_spec, scaling.compute_sample_amax(matrix), scaling.compute_amax(matrix))
    elif writes_result:
        assert context.spec is not None
        residuals, y = _save_and_write_result(operation, g, u, context.spec)
    else:
        residuals, result, scale, codes = _save_and_quantize_result(operation, g, u, context.spec, out_spec)
        (fused_output,) = result.outputs
    inputs = (gate,) if up is None else (gate, up)
    residuals = residuals if context.spec is None else with_checkpoint_name(residuals, ACTIVATION)
    recomputable = ActivationBackward(
        name, gate.dtype, context.recompute_activations and context.amax == "bound", writes_result, has_bias
    )
    y, _ = with_saved_vjp(recomputable, inputs, residuals, y, name="an activation")
    for x, codes_of_x in zip((g, u, activated), residuals, strict=True):
        if context.spec is not None and codes_of_x is not None:
            y = observe_codes(y, current_layer_scope(name), "context", x, codes_of_x)
    facts = fused_outputs.make_array_facts(context, recomputable, residuals, fused_output, consumer, scale, codes)
    y = derivatives.check_differentiable_dtypes("an activation", y, *inputs)
    return y, facts


def _scale_from_sample(out_spec: QuantSpec, sample: Array, amax: Array | float = 0.0) -> Array:
    """Return the scale of a result from the amax of a sample and, if known, of the whole result."""
    return scaling.to_scale(jnp.maximum(scaling.amax_from_sample(sample), amax), formats.get(out_spec.format))


def _kernel_operation(
    name: str,
    like: Array,
    up: Any,
    spec: QuantSpec | None,
    saves_activated: bool,
    *,
    forward: bool = False,
    fp8: bool = True,
) -> Any:
    return fused_outputs.describe_operation(
        like, spec, like.dtype, forward=forward, fp8=fp8,
        activation=name, is_gated=up is not None, saves_activated=saves_activated,
    )  # fmt: skip


def _save_and_write_result(
    operation: Any, gate: Array, up: Array | None, spec: QuantSpec
) -> tuple[ActivationResiduals, Array]:
    """Return the residuals and the result."""
    coding, dtype = fused_outputs.to_coding(spec), gate.dtype
    g, u = fused_outputs.to_matrix(gate), None if up is None else fused_outputs.to_matrix(up)
    parts, _, y = fused_outputs.run(
        lambda backend, *arrays: backend.encode_activation_residuals(operation, *arrays, coding, result=(None, dtype)),
        g,
        u,
    )
    return _to_residuals(parts, gate, spec), fused_outputs.reshape_like(y, gate)


def _to_residuals(parts: Any, like: Array, spec: QuantSpec) -> ActivationResiduals:
    codes: Any = [None if part is None else fused_outputs.to_residual(part[0], part[1], like, spec) for part in parts]
    return ActivationResiduals(*codes)


def _save_and_quantize_result(
    operation: Any, gate: Array, up: Array | None, spec: QuantSpec | None, out_spec: QuantSpec | None
) -> tuple[ActivationResiduals, fused_outputs.FusedOutputs, Array | None, Any]:
    """Return the residuals, the fused result and, if its spec is known, its scale and codes.

    Codes of rows are a pair: codes and row scales.
    """
    from pallas_kernels.nonlinear import quantize_recomputed_triton

    coding, g, u = (
        fused_outputs.to_coding(spec),
        fused_outputs.to_matrix(gate),
        None if up is None else fused_outputs.to_matrix(up),
    )
    exact_operation, kinds = operation._replace(reads_arrays=True), (quantize_recomputed_triton.RESULT,)

    def save_and_quantize(backend: Any, *arrays: Any) -> Any:
        save = functools.partial(backend.encode_activation_residuals, operation, *arrays, coding)
        if out_spec is None or out_spec.is_folded:
            parts, amax, codes = save(result=None if out_spec is None else (None, formats.get(out_spec.format).dtype))
            return parts, amax, None, codes
        operands = quantize_recomputed_triton.Operands(arrays[0], up=arrays[1])
        with jax.named_scope("sample"):
            (sample,) = backend.compute_amaxes(exact_operation, kinds, operands, every=scaling.SAMPLE_EVERY)
        parts, amax, codes = save(result=(_scale_from_sample(out_spec, sample), formats.get(out_spec.format).dtype))
        scale = _scale_from_sample(out_spec, sample, amax)
        with jax.named_scope("requantize"):
            codes = backend.requantize_if(
                exact_operation, kinds, operands, codes, scale, amax > scaling.amax_from_sample(sample)
            )
        return parts, amax, scale, codes

    # Without residuals or row codes to compute, the layers that read the result find its scale.
    is_empty = spec is None and (out_spec is None or not out_spec.is_folded)
    parts, amax, scale, codes = ((), None, None, None) if is_empty else fused_outputs.run(save_and_quantize, g, u)
    residuals = ActivationResiduals(gate, up, None) if spec is None else _to_residuals(parts, gate, spec)
    result = fused_outputs.FusedOutputs(
        exact_operation, kinds, quantize_recomputed_triton.Operands(g, up=u), () if amax is None else (amax,)
    )
    return residuals, result, scale, codes


def _function(name: str) -> Callable[[Array], Array]:
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
