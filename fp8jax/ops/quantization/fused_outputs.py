"""Fused outputs: arrays that a kernel recomputes while it quantizes them, so that they are not written to memory.

A norm or an activation describes how its result, or the cotangents of its inputs, are computed (`FusedOutput`). A
quantizer with that description reads those operands in its kernel. The array also exists as an ordinary JAX value. If
nothing else reads it, XLA removes it as dead code. Scales of its codes are per tensor or per row.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from fp8jax.core import blocks, formats, scaling
from fp8jax.core.qtensor import QTensor, from_bytes, to_bytes
from fp8jax.core.recipe import SAME, Context, Linear, Recipe
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.autodiff.residuals import ArrayFacts, Recomputable
from fp8jax.ops.dispatch.choice import Choice, by_platform, missing_triton, on_cuda, record_choice
from fp8jax.ops.dispatch.sharding import merge, reshape, reshard, spec_of
from fp8jax.ops.quantization import fused_reference
from fp8jax.recipes import resolve


@dataclasses.dataclass(eq=False)
class FusedOutputs:
    """A group of arrays that one kernel computes together.

    Attributes:
        operation: `pallas_kernels.nonlinear.operations_triton.Operation`.
        operands: `pallas_kernels.nonlinear.quantize_recomputed_triton.Operands`.
        amaxes: largest finite magnitude of each array; empty if unknown.
        predicted: prediction of an activation's cotangents, if its result's gradient is known.
        variants: cached (scales or None, codes of all arrays), by how they were quantized.
        sums: column sums computed by kernels, by position of the array.
    """

    operation: Any
    kinds: tuple[int, ...]
    operands: Any
    amaxes: tuple[Array, ...] = ()
    predicted: "CotangentPrediction | None" = None
    variants: dict[Any, Any] = dataclasses.field(default_factory=dict)
    sums: dict[int, Array] = dataclasses.field(default_factory=dict)

    @property
    def outputs(self) -> "tuple[FusedOutput, ...]":
        """One `FusedOutput` per array."""
        return tuple(FusedOutput(self, position) for position in range(len(self.kinds)))


class FusedOutput(NamedTuple):
    """One array of a `FusedOutputs` group."""

    group: FusedOutputs
    position: int

    @property
    def arrays(self) -> tuple[Any, tuple[Array, ...], list[Any]]:
        """Arguments of `with_arrays`: operands, amaxes, and row codes as bytes."""
        return self.group.operands, self.group.amaxes, list(self._row_codes.values())

    def with_arrays(self, operands: Any, amaxes: tuple[Array, ...], rows: list[Any]) -> "FusedOutput":
        """Return the output with the same arrays of another trace."""
        variants = dict(zip(self._row_codes, rows, strict=True))
        return self._replace(
            group=FusedOutputs(self.group.operation, self.group.kinds, operands, amaxes, variants=variants)
        )

    @property
    def _row_codes(self) -> dict[Any, Any]:
        return {key: codes for key, codes in self.group.variants.items() if key[0] == "rows"}

    def cast(self, dtype: DTypeLike) -> "FusedOutput | None":
        """Return the output cast to `dtype`, or None. Only fp32 to bf16 of a single array is supported."""
        from pallas_kernels.quantization.quantize_triton import PLAIN_DTYPES

        group = self.group
        dtypes = PLAIN_DTYPES[group.operation.dtype], jnp.dtype(dtype)
        if dtypes[0] == dtypes[1]:
            return self
        if dtypes != (jnp.float32, jnp.bfloat16) or len(group.kinds) > 1:
            return None
        operation = group.operation._replace(dtype=PLAIN_DTYPES.index(jnp.bfloat16))
        amaxes = tuple(formats.round_to(amax, formats.get("bf16")) for amax in group.amaxes)
        return FusedOutput(FusedOutputs(operation, group.kinds, group.operands, amaxes), 0)

    def cache_codes(self, spec: QuantSpec, scale: Array | None, codes: Any) -> None:
        """Store codes (M, N) that a kernel already computed, for later quantization with `spec`.

        Without a scale, `codes` is a pair: folded codes and row scales (M, 1).
        """
        if scale is not None:
            pairs = [to_qtensor_pair(spec, codes, None, scale.reshape(1, 1))]
            self.group.variants[True, False, spec, None] = (scale,), pairs
        else:
            q = QTensor(codes[0], codes[1], None, None, QuantSpec(spec.format, "token"))
            self.group.variants["rows", spec] = to_bytes(q)  # may become an argument of jax.checkpoint


class CotangentPrediction(NamedTuple):
    """Facts about the cotangents of an activation's inputs, known before its backward pass.

    Attributes:
        amaxes: their largest finite magnitudes.
        spec, scales: spec and scales of their quantization, if scales are known.
        codes: QTensors of each cotangent and of its transposed copy.
        needs_sums: whether to compute column sums (the bias gradients) with the codes.
    """

    amaxes: tuple[Array, ...] = ()
    spec: QuantSpec | None = None
    scales: tuple[Array, ...] = ()
    codes: tuple[Any, ...] = ()
    needs_sums: bool = False
    sums: tuple[Array, ...] = ()

    @property
    def variants(self) -> dict[Any, Any]:
        """Their entry of `FusedOutputs.variants`."""
        return {(True, True, self.spec, None): (self.scales, self.codes)} if self.codes else {}


def find_consumer(recipe: Recipe | Context | str) -> Linear | None:
    """Return the linear layers whose input codes the operation computes with its result, or None.

    The codes are of rows only: microscaled and folded, or under a scale from a bound.
    """
    resolved = resolve(recipe)
    spec = resolved.linear.spec("x") if isinstance(resolved, Recipe) and resolved.linear.x_residual == SAME else None
    if not isinstance(resolved, Recipe) or spec is None:
        return None
    uses_bound = resolved.context.amax == "bound" and "x" not in resolved.linear.stateful_strategies and supports(spec)
    return resolved.linear if uses_bound or _needs_only_rows(spec) else None


def make_array_facts(
    context: Context,
    recomputable: Recomputable,
    residuals: Any,
    fused_output: FusedOutput | None,
    consumer: Linear | None,
    scale: Array | None,
    codes: Any,
) -> ArrayFacts:
    """Return the facts about an operation's result.

    Args:
        recomputable, residuals: the rule that recomputes the result, and its residuals.
        consumer, scale: the layers that quantize it, and the scale if known.
        codes: codes already computed, as in `FusedOutput.cache_codes`, or None.
    """
    if fused_output is not None and consumer is not None and codes is not None:
        fused_output.cache_codes(consumer.quantized_spec("x"), scale, codes)
    recompute_rule = (recomputable, residuals) if context.recompute_activations or context.spec is None else None
    return ArrayFacts(recompute_rule, fused_output, None if consumer is None or scale is None else (consumer, scale))


def emits_codes(recipe: Recipe | Context | str) -> bool:
    """Return whether operations without quantized residuals compute the codes that linear layers read, on a GPU.

    Such operations save no codes: the result is recomputed, with equal values, so per-tensor codes are equal too.
    Microscaled codes are rounded again, not shifted (`fp8jax.ops.quantization.microscaling`). Differentiable once.
    """
    resolved = resolve(recipe)
    if not isinstance(resolved, Recipe) or resolved.context.residual is not None or not on_cuda():
        return False
    spec = resolved.linear.spec("x")
    if (
        spec is None
        or resolved.linear.x_residual != SAME
        or resolved.linear.x_wgrad != SAME
        or "x" in resolved.linear.stateful_strategies
    ):
        return False
    return supports(spec) or _needs_only_rows(spec)


def _needs_only_rows(spec: QuantSpec) -> bool:
    """Return whether folded codes of `spec` depend on nothing but their row."""
    return spec.is_folded and spec.outer_scale == "token" and formats.get(spec.format).bits == 8


def writes_result(recipe: Recipe | Context | str) -> bool:
    """Return whether operations write their 16-bit result on a GPU, because layers cannot quantize it in a kernel.

    This is the case if residuals are packed (int10) and neither `quantize_fused` nor folding supports the layers'
    codes.
    """
    resolved = resolve(recipe)
    context = resolved.context if isinstance(resolved, Recipe) else resolved
    if context.spec is None or not context.spec.is_packed:
        return False
    spec = resolved.linear.spec("x") if isinstance(resolved, Recipe) else None
    return spec is None or not (supports(spec) or spec.is_folded)


def supports(spec: QuantSpec) -> bool:
    """Return whether the kernels can compute these codes: plain FP8 per tensor, rounded to nearest."""
    fmt = formats.get(spec.format)
    is_fp8_per_tensor = fmt.is_float and fmt.bits == 8 and spec.granularity == "tensor" and spec.scale_format == "fp32"
    return (
        is_fp8_per_tensor and spec.rounding == "nearest" and not (spec.expand or spec.layer_axes) and spec.flush_to_zero
    )


def to_qtensor_pair(spec: QuantSpec, row: Array | None, column: Array | None, scale: Array) -> Any:
    """Return the QTensors of an array and of its transposed copy, None where codes are None."""
    return tuple(None if codes is None else QTensor(codes, scale, None, None, spec) for codes in (row, column))


def identity_output(x: Array) -> FusedOutput | None:
    """Describe a matrix as a fused output of itself, or return None if no kernel can read it."""
    if not on_cuda() or missing_triton("nonlinear.quantize_recomputed_triton"):
        return None
    from pallas_kernels.nonlinear import quantize_recomputed_triton

    description = describe_operation(x, None, x.dtype, activation="identity", is_gated=False)
    if description is None:
        return None
    return FusedOutputs(
        description, (quantize_recomputed_triton.RESULT,), quantize_recomputed_triton.Operands(x)
    ).outputs[0]


def run(call: Callable[..., Any], *arrays: Any) -> Any:
    """Return `call(backend, *arrays)`: `backend` holds the kernels on a CUDA GPU, else their references."""
    from fp8jax.ops.quantization import fused_kernels

    kernel_impl, reference_impl = (functools.partial(call, backend) for backend in (fused_kernels, fused_reference))
    return by_platform(*arrays, cuda=kernel_impl, default=reference_impl, hide_explicit_axes=True)


def describe_operation(
    x: Array,
    spec: QuantSpec | None,
    dtype: DTypeLike,
    *,
    norm: bool = False,
    forward: bool = False,
    fp8: bool = True,
    **fields: Any,
) -> Any:
    """Describe an operation for the kernels, or return None if XLA must compute it.

    Args:
        x: an operand (..., channels).
        spec: spec of the saved operands; None saves them unquantized.
        norm: whether it is a norm, which reads whole rows.
        forward: whether this is the forward pass, which records the choice.
        fp8: whether kernels read or write FP8 codes.
        fields: further fields of `pallas_kernels.nonlinear.operations_triton.Operation`; an activation by its name.
    """
    reason = None if on_cuda() else "it needs a CUDA GPU"
    reason = (
        reason
        or missing_triton("nonlinear.quantize_recomputed_triton" if fp8 else "nonlinear.cotangents_triton")
        or _unsupported_reason(x, spec)
    )
    if reason is None:
        description = _describe(x, spec, dtype, norm, fields)
        reason = description if isinstance(description, str) else None
    choice = Choice("xla", f"not the kernel: {reason}") if reason else Choice("triton", "the kernel supports it")
    if forward:
        record_choice("norm" if norm else "activation", choice)
    return None if reason else description


def _unsupported_reason(x: Array, spec: QuantSpec | None) -> str | None:
    if 0 in x.shape:
        return f"shape {x.shape} is empty"
    if spec is None:
        return None
    grouped = spec.granularity == "group" and x.ndim > 0 and spec.axis in (-1, x.ndim - 1)
    if not (grouped and (formats.get(spec.format).is_fp8 or spec.is_packed)):
        return f"it keeps codes of FP8 or of ten bits in groups along the last axis, not {spec}"
    if spec.expand or spec.layer_axes or not spec.flush_to_zero or spec.rounding != "nearest":
        return f"it keeps plain codes rounded to nearest, not {spec}"
    return None


def _describe(x: Array, spec: QuantSpec | None, dtype: DTypeLike, norm: bool, fields: dict[str, Any]) -> Any:
    """Return the kernels' description of the operation, or the reason why they cannot compute it."""
    from pallas_kernels.nonlinear import norm_triton, operations_triton
    from pallas_kernels.quantization import quantize_triton, storage_triton

    if jnp.dtype(dtype) not in quantize_triton.PLAIN_DTYPES:
        return f"it does not support results in {jnp.dtype(dtype)}"
    if "activation" in fields:
        if fields["activation"] not in operations_triton.ACTIVATIONS:
            return f"it has no {fields['activation']}"
        fields = fields | {"activation": operations_triton.ACTIVATIONS.index(fields["activation"])}
    storage = to_coding(spec)
    index = quantize_triton.PLAIN_DTYPES.index(jnp.dtype(dtype))
    storage_fields = {"reads_arrays": True} if storage is None else {"group": storage.size, "format": storage.format}
    description = operations_triton.Operation(dtype=index, **storage_fields, **fields)
    unsupported = norm_triton.unsupported_reason if norm else storage_triton.unsupported_reason
    return unsupported((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype, storage) or description


def to_coding(spec: QuantSpec | None) -> Any:
    """Convert a spec to the kernels' `Coding`."""
    if spec is None:
        return None
    from pallas_kernels.quantization.scaling_triton import Coding

    dtype, scale = (jnp.dtype(formats.get(name).dtype) for name in (spec.format, spec.scale_format))
    is_ocp = spec.outer_scale == "none" and spec.exponent_rounding == "down"
    return Coding(spec.granularity, dtype, spec.group_size or 0, is_ocp, scale, spec.rounding == "stochastic")  # type: ignore[arg-type]


def to_matrix(x: Array) -> Array:
    """Reshape (..., channels) to (rows, channels)."""
    return merge(x, x.ndim - 1, 1)


def reshape_like(x: Array, like: Array) -> Array:
    """Reshape (rows, channels) to the leading axes of `like`."""
    return reshape(x, (*like.shape[:-1], x.shape[-1]), (*spec_of(like)[:-1], spec_of(x)[-1]))


def to_residual(codes: Array, scale: Array, like: Array, spec: QuantSpec) -> QTensor:
    """Return codes (M, N), packed or not, and scales as `quantize_residual` returns them for an array like `like`."""
    length = like.shape[-1] if spec.is_packed else None
    axes, like_spec = blocks.explicit_axes(like), PartitionSpec(*spec_of(like))
    # Kernels that need whole rows have gathered the channels.
    arrays = reshape_like(codes, like), reshape_like(scale, like)
    codes, scale = (reshard(x, tuple(blocks.block_partition_spec(like_spec, x.shape, axes)), like) for x in arrays)
    return to_bytes(QTensor(codes, scale, None, None, spec, length))


def residual_matrices(q: QTensor | Array) -> tuple[Array, Array | None]:
    """Return codes and scales of a residual as matrices, or an unquantized residual and None."""
    if isinstance(q, Array):
        return to_matrix(q), None
    q = from_bytes(q)
    return to_matrix(q.codes), to_matrix(q.scale)


FROM_OPERANDS = Choice("triton", "from the operands of the matrix, which is not written to memory")


def quantize_fused(
    fused_output: FusedOutput,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    *,
    shares_codes: bool,
    scale: Array | None,
    strategy: Scaling,
    sums: bool = False,
) -> tuple[QTensor | None, QTensor | None] | None:
    """Quantize a fused output and its transposed copy, or return None if no kernel can.

    Args:
        fused_output: describes the matrix, (M, N).
        rows, columns: specs for `x` and `x.T`, or None.
        shares_codes: whether `rows` and `columns` have the same codes. If False, one of them must be None.
        scale, strategy: as in `fp8jax.ops.quantization.quantize.quantize`.
        sums: whether to compute column sums. They are stored in `fused_output.group.sums` if codes are computed here.

    Returns:
        QTensors of `x` (M, N) and `x.T` (N, M), each None if its spec is None; or None without a kernel.
    """
    spec = rows if columns is None else columns
    if spec is None or not (shares_codes or rows is None or columns is None) or not supports(spec):
        return None
    key = (rows is not None, columns is not None, spec, strategy if scale is None else None)
    scales, pairs = fused_output.group.variants.get(key, (None, None))
    if pairs is not None and (scale is None or scales[fused_output.position] is scale):
        return pairs[fused_output.position]
    if scale is None:
        pairs = _quantize_group(fused_output.group, key, None, sums)
        fused_output.group.variants[key] = None, pairs
        return pairs[fused_output.position]
    if fused_output.group.predicted is not None and rows is None:
        return None, _quantize_and_predict(fused_output.group, spec, scale)
    single = dataclasses.replace(fused_output.group, kinds=(fused_output.group.kinds[fused_output.position],))
    single.sums = {}
    pair = _quantize_group(single, key, scale, sums)[0]
    if single.sums:
        fused_output.group.sums[fused_output.position] = single.sums[0]
    return pair


def _quantize_group(
    group: FusedOutputs, key: Any, scale: Array | None, sums: bool = False
) -> list[tuple[QTensor | None, QTensor | None]]:
    from pallas_kernels.nonlinear.quantize_recomputed_triton import GATE, UP

    rows, columns, spec, strategy = key
    record_choice("quantize", FROM_OPERANDS)
    # JAX caches traced functions. `make` must not close over the result, which holds tracers.
    fmt, operation, kinds = formats.get(spec.format), group.operation, group.kinds
    sums = sums and kinds[0] in (GATE, UP)

    def make(backend: Any, operands: Any, scale: Array | None, amaxes: tuple[Array, ...]) -> Any:
        if scale is None:
            amaxes = amaxes or backend.compute_amaxes(operation, kinds, operands)
            scales = tuple(scaling.to_scale(strategy.reduce_amax(top), fmt) for top in amaxes)
        else:
            scales = (scaling.clamp_scale(scale.reshape(())),)
        quantized = backend.quantize(
            operation, kinds, operands, scales, fmt.dtype, rows=rows, columns=columns, sums=sums
        )
        pairs, totals = quantized if sums else (quantized, [])
        return [(*pair, s.reshape(1, 1)) for pair, s in zip(pairs, scales, strict=True)], totals

    pairs, totals = run(make, group.operands, scale, group.amaxes)
    group.sums.update(enumerate(totals))
    return [to_qtensor_pair(spec, *arrays) for arrays in pairs]


def _quantize_and_predict(group: FusedOutputs, spec: QuantSpec, scale: Array) -> QTensor:
    """Quantize the transposed result of an activation, and predict what its backward pass needs.

    The prediction is the amax of each cotangent, or the cotangents' codes if their scales are given.
    """
    from pallas_kernels.nonlinear.quantize_recomputed_triton import GATE, UP

    record_choice("quantize", FROM_OPERANDS)
    operation, dtype = group.operation, formats.get(spec.format).dtype
    predicted = group.predicted
    assert predicted is not None
    out_dtype = None if predicted.spec is None else formats.get(predicted.spec.format).dtype
    needs_sums = predicted.needs_sums

    def make(backend: Any, operands: Any, scale: Array, scales: tuple[Array, ...]) -> Any:
        scale = scaling.clamp_scale(scale.reshape(()))
        if not scales:
            codes, amaxes = backend.quantize_and_predict(operation, operands, scale, dtype)
            return codes, scale.reshape(1, 1), tuple(amaxes), []
        quantized = backend.quantize(
            operation,
            (GATE, UP)[: len(scales)],
            operands,
            scales,
            out_dtype,
            rows=True,
            columns=True,
            result_coding=(scale, dtype),
            sums=needs_sums,
        )
        (*pairs, (_, codes)), totals = quantized if needs_sums else (quantized, [])
        cotangents = [(*pair, s.reshape(1, 1)) for pair, s in zip(pairs, scales, strict=True)]
        return codes, scale.reshape(1, 1), cotangents, totals

    codes, used_scale, cotangents, totals = run(make, group.operands, scale, predicted.scales)
    if predicted.spec is None:
        group.predicted = predicted._replace(amaxes=cotangents)
    else:
        pairs = tuple(to_qtensor_pair(predicted.spec, *parts) for parts in cotangents)
        group.predicted = predicted._replace(codes=pairs, sums=tuple(totals))
    return QTensor(codes, used_scale, None, None, spec)


def cached_row_codes(fused_output: FusedOutput | None, spec: QuantSpec) -> QTensor | None:
    """Return the row codes stored by `FusedOutput.cache_codes`, or None."""
    codes = None if fused_output is None else fused_output.group.variants.get(("rows", spec))
    return None if codes is None else from_bytes(codes)


def quantize_columns(fused_output: FusedOutput | None, spec: QuantSpec, scale: Array) -> QTensor | None:
    """Quantize the transposed matrix under a scale per row, fp32 (M, 1), or return None if no kernel can.

    Returns:
        QTensor (N, M) of granularity "tensor" and scale 1. The caller applies the row scales.
    """
    if fused_output is None or len(fused_output.group.kinds) > 1:
        return None
    group, fmt = fused_output.group, formats.get(spec.format)
    record_choice("quantize", FROM_OPERANDS)
    operation, kinds, predicted = group.operation, group.kinds, group.predicted

    def make(backend: Any, operands: Any, scale: Array) -> Any:
        if predicted is None:
            ((_, codes),) = backend.quantize(operation, kinds, operands, (scale,), fmt.dtype, rows=False, columns=True)
            return codes, ()
        return backend.quantize_and_predict(operation, operands, scale, fmt.dtype)

    codes, amaxes = run(make, group.operands, scale.reshape(-1))
    if predicted is not None:
        group.predicted = predicted._replace(amaxes=tuple(amaxes))
    return QTensor(codes, jnp.ones((1, 1), jnp.float32), None, None, QuantSpec(spec.format))


def quantize_cotangent(
    fused_output: FusedOutput | None, spec: QuantSpec, outer_scale: Array | None
) -> tuple[QTensor, QTensor] | None:
    """Quantize an activation's cotangent and its transposed copy, or return None if no kernel can.

    Args:
        fused_output: describes the cotangent, (M, N).
        spec: of granularity "mx".
        outer_scale: fp32 (M, 1), as in `fp8jax.ops.quantization.microscaling.fold_rows`; None means 1.

    Returns:
        QTensors (M, N) of granularity "token" and (N, M) of "tensor" with scale 1. The caller applies the row scales.
    """
    if (
        fused_output is None
        or not fused_output.group.amaxes
        or any(amax.ndim != 1 for amax in fused_output.group.amaxes)
    ):
        return None
    group, position = fused_output
    if outer_scale is not None:
        amax = group.amaxes[position]
        single = dataclasses.replace(group, kinds=(group.kinds[position],), amaxes=(amax,), variants={})
        return _quantize_rows_and_transposed(single, spec, outer_scale)[0]
    key = ("cotangents", spec)
    if key not in group.variants:
        group.variants[key] = _quantize_rows_and_transposed(
            group, spec, jnp.ones((group.amaxes[position].size, 1), jnp.float32)
        )
    return group.variants[key][position]


def _quantize_rows_and_transposed(
    group: FusedOutputs, spec: QuantSpec, outer_scale: Array
) -> list[tuple[QTensor, QTensor]]:
    record_choice("quantize", FROM_OPERANDS)
    fmt, operation, kinds = formats.get(spec.format), group.operation, group.kinds
    scales = [scaling.pow2_scale(amax.reshape(-1, 1), outer_scale, fmt) for amax in group.amaxes]

    def make(backend: Any, operands: Any, scales: Any) -> Any:
        flat = tuple(scale.reshape(-1) for scale in scales)
        return backend.quantize(operation, kinds, operands, flat, fmt.dtype, rows=True, columns=True)

    one = jnp.ones((1, 1), jnp.float32)
    return [
        (
            QTensor(codes, scale, None, None, QuantSpec(spec.format, "token")),
            QTensor(transposed, one, None, None, QuantSpec(spec.format)),
        )
        for (codes, transposed), scale in zip(run(make, group.operands, scales), scales, strict=True)
    ]
