"""Arrays that a kernel computes where it quantizes them, so that on a GPU they are never written.

A norm or an activation notes for its result what the result is computed from; an activation also for the cotangents of
its inputs. Where such an array is quantized, the kernel reads those operands. The array itself stays an ordinary one:
whoever else reads it makes XLA compute it, and where nobody does, XLA leaves it out.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME, Context, Recipe
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import fused_reference
from fp8jax.ops.choice import Choice, by_platform, missing_triton, on_cuda, tell, unplaced
from fp8jax.ops.recent import Origins, Recent, Same
from fp8jax.ops.saved import from_bytes, to_bytes
from fp8jax.ops.sharding import merge
from fp8jax.recipes import resolve


@dataclasses.dataclass(eq=False)
class Result:
    """What arrays are computed from: those that one kernel makes together, in its order.

    Attributes:
        operation: `pallas_kernels.operations_triton.Operation`.
        kinds: what each of the arrays is.
        operands: `pallas_kernels.remake_triton.Operands`.
        peaks: the largest finite magnitude of each array; none where they are not known.
        ahead: the gradient of an activation's result, where it is known already, and what is known of its cotangents.
        made: codes of all arrays by how they were made.
    """

    operation: Any
    kinds: tuple[int, ...]
    operands: Any
    peaks: tuple[Array, ...] = ()
    ahead: "tuple[Array, Foreseen] | None" = None
    made: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def of(self, operands: Any, peaks: tuple[Array, ...]) -> "Result":
        """The same, computed from the same operands in another trace."""
        return Result(self.operation, self.kinds, operands, peaks)

    def cast(self, dtype: DTypeLike) -> "Result | None":
        """The only array, if it is fp32, rounded to bf16; None for other casts."""
        from pallas_kernels.quantize_triton import PLAIN_DTYPES

        known = (PLAIN_DTYPES[self.operation.dtype], jnp.dtype(dtype)) == (jnp.float32, jnp.bfloat16)
        if not known or len(self.kinds) > 1:
            return None
        operation = self.operation._replace(dtype=PLAIN_DTYPES.index(jnp.bfloat16))
        peaks = tuple(formats.round_to(peak, formats.get("bf16")) for peak in self.peaks)
        return Result(operation, self.kinds, self.operands, peaks)


class Foreseen(NamedTuple):
    """What is known of the cotangents of an activation's inputs before its backward pass makes them.

    Attributes:
        peaks: their largest finite magnitudes; or
        spec, scales: how they will be quantized, under given scales; and
        codes: what that makes of them, as they are and transposed.
    """

    peaks: tuple[Array, ...] = ()
    spec: QuantSpec | None = None
    scales: tuple[Array, ...] = ()
    codes: tuple[Any, ...] = ()

    @property
    def made(self) -> dict[Any, Any]:
        """`Result.made` of them."""
        return {(True, True, self.spec, Same(scale)): self.codes for scale in self.scales if self.codes}


class Part(NamedTuple):
    """An array as one of those of a `Result`."""

    result: Result
    place: int


_parts: Origins[Part] = Origins()
# What follows from the gradient of an activation's result, which was computed last.
_foreseen: Recent[Foreseen] = Recent()
# How arrays are to be quantized, and under which scales.
_given: Origins[tuple[QuantSpec, Array]] = Origins()


def note(result: Result, *arrays: Array) -> None:
    """Says what arrays are computed from, in the order of the result's kinds."""
    for place, array in enumerate(arrays):
        _parts.note(array, Part(result, place))


def find(array: Array) -> Result | None:
    """What alone an array is computed from; None where that is not known, or others are made with it."""
    part = _parts.find(array)
    return part.result if part is not None and len(part.result.kinds) == 1 else None


def part(array: Array) -> Part | None:
    """A matrix as one of the arrays that are computed from the same operands; None where that is not known."""
    return _parts.find(array) if array.ndim == 2 else None


def foresee(gradient: Array, known: Foreseen) -> None:
    """Says what is known of the cotangents that follow from the gradient of an activation's result."""
    _foreseen.put(gradient, known)


def foreseen(gradient: Array) -> Foreseen:
    """What `foresee` said of a gradient, if of no other after it; asked once."""
    return _foreseen.take(gradient) or Foreseen()


def give_scale(array: Array, spec: QuantSpec, scale: Array, codes: Array | None = None) -> None:
    """Says under which scale an array is to be quantized; codes (M, N), if given, are those."""
    _given.note(array, (spec, scale))
    result = find(array)
    if result is not None and codes is not None:
        result.made[True, False, spec, Same(scale)] = [_pair(spec, codes, None, scale.reshape(1, 1))]


def bounded(recipe: Recipe | Context | str) -> QuantSpec | None:
    """How linear layers quantize what an operation makes, if it is to give them the scale for that; else None."""
    recipe = resolve(recipe)
    if not isinstance(recipe, Recipe) or recipe.context.scales != "bound" or "x" in recipe.linear.states:
        return None
    spec = recipe.linear.spec("x")
    return spec if spec is not None and recipe.linear.saved == SAME and takes(spec) else None


def given_scale(array: Array, *specs: QuantSpec | None) -> Array | None:
    """The scale under which an array is to be quantized in these ways, or None."""
    spec, scale = _given.find(array) or (None, None)
    return scale if all(s == spec for s in specs) else None


def pass_on(source: Array, copy: Array) -> Array:
    """The same array, as a matrix, without gradients, or fp32 as bf16, is computed from the same; returns the copy.

    It is quantized under the same given scale.
    """
    if copy is source or source.ndim == 0 or source.shape[-1] != copy.shape[-1]:
        return copy
    if copy.dtype in (source.dtype, jnp.bfloat16):
        _given.pass_on(source, copy)
    part = _parts.find(source)
    if part is None:
        return copy
    if source.dtype == copy.dtype:
        return _parts.pass_on(source, copy)
    result = part.result.cast(copy.dtype) if _parts.find(copy) is None else None
    if result is not None:
        note(result, copy)
    return copy


def codes(
    x: Array, rows: QuantSpec | None, columns: QuantSpec | None, *, same: bool, scale: Array | None, strategy: Scaling
) -> tuple[QTensor | None, QTensor | None] | None:
    """Codes of a matrix and of its transposed copy from what it is computed from; None where that is no kernel's.

    Args:
        x: (M, N).
        rows, columns: how `x` and `x.T` are quantized, or None where they are not.
        same: whether both have the same codes; else one of them is None.
        scale, strategy: as of `fp8jax.ops.quantize.quantize`.
    """
    part = _parts.find(x) if x.ndim == 2 else None
    spec = rows if columns is None else columns
    if part is None or spec is None or not (same or rows is None or columns is None) or not takes(spec):
        return None
    how = (rows is not None, columns is not None, spec, strategy if scale is None else Same(scale))
    if how in part.result.made:
        return part.result.made[how][part.place]
    if scale is None:
        part.result.made[how] = _make(part.result, how, None)
        return part.result.made[how][part.place]
    if part.result.ahead is not None and rows is None:
        return None, _make_ahead(part.result, spec, scale)
    alone = dataclasses.replace(part.result, kinds=(part.result.kinds[part.place],))
    return _make(alone, how, scale)[0]


def takes(spec: QuantSpec) -> bool:
    """Whether the kernels make such codes."""
    fmt = formats.get(spec.format)
    plain = fmt.is_float and fmt.bits == 8 and spec.granularity == "tensor" and spec.scale_format == "fp32"
    return plain and spec.rounding == "nearest" and not (spec.expand or spec.stacked) and spec.underflow == "zero"


def _make(result: Result, how: Any, scale: Array | None) -> list[tuple[QTensor | None, QTensor | None]]:
    rows, columns, spec, strategy = how
    tell("quantize", Choice("triton", "from what the matrix is computed from, which is not written"))
    # JAX keeps traced functions: this one must not hold the result, and with it arrays of a trace.
    fmt, operation, kinds = formats.get(spec.format), result.operation, result.kinds

    def make(on: Any, operands: Any, scale: Array | None, peaks: tuple[Array, ...]) -> Any:
        if scale is None:
            tops = peaks or on.peaks(operation, kinds, operands)
            scales = tuple(scaling.to_scale(strategy.settle(top), fmt) for top in tops)
        else:
            scales = (scaling.usable(scale.reshape(())),)
        found = on.quantize(operation, kinds, operands, scales, fmt.dtype, rows=rows, columns=columns)
        return [(*pair, s.reshape(1, 1)) for pair, s in zip(found, scales, strict=True)]

    return [_pair(spec, *parts) for parts in run(make, result.operands, scale, result.peaks)]


def _pair(spec: QuantSpec, row: Array | None, column: Array | None, scale: Array) -> Any:
    """Codes of an array and of its transposed copy as tensors."""
    return tuple(None if codes is None else QTensor(codes, scale, None, None, spec) for codes in (row, column))


def _make_ahead(result: Result, spec: QuantSpec, scale: Array) -> QTensor:
    """Transposed codes of an activation's result, made with what the backward pass will ask for next.

    These are the peaks of the cotangents that the result's gradient gives, or their codes where scales are given.
    """
    from pallas_kernels.remake_triton import GATE, UP

    tell("quantize", Choice("triton", "from what the matrix is computed from, which is not written"))
    operation, dtype = result.operation, formats.get(spec.format).dtype
    assert result.ahead is not None
    gradient, known = result.ahead
    to = None if known.spec is None else formats.get(known.spec.format).dtype

    def make(on: Any, operands: Any, scale: Array, given: tuple[Array, ...]) -> Any:
        scale = scaling.usable(scale.reshape(()))
        if not given:
            codes, peaks = on.ahead(operation, operands, scale, dtype)
            return codes, scale.reshape(1, 1), tuple(peaks)
        *pairs, (_, codes) = on.quantize(
            operation, (GATE, UP)[: len(given)], operands, given, to, rows=True, columns=True, again=(scale, dtype)
        )
        parts = [(*pair, s.reshape(1, 1)) for pair, s in zip(pairs, given, strict=True)]
        return codes, scale.reshape(1, 1), parts

    codes, used, found = run(make, result.operands, scale, known.scales)
    if known.spec is None:
        known = known._replace(peaks=found)
    else:
        known = known._replace(codes=tuple(_pair(known.spec, *parts) for parts in found))
    foresee(gradient, known)
    return QTensor(codes, used, None, None, spec)


def run(call: Callable[..., Any], *arrays: Any) -> Any:
    """`call(on, *arrays)`, where `on` holds the kernels if it runs on a CUDA GPU, and elsewhere their references."""
    from fp8jax.ops import fused_kernels

    return by_platform(
        *arrays, cuda=functools.partial(call, fused_kernels), default=functools.partial(call, fused_reference)
    )


def operation(
    x: Array, spec: QuantSpec, dtype: DTypeLike, *, norm: bool = False, forward: bool = False, **fields: Any
) -> Any:
    """The operation, as the kernels describe it, whose operands are alike to `x`, (..., channels); None for XLA.

    Args:
        x: an operand, from whose dtype, shape and place the choice follows.
        spec: what is kept of operands.
        dtype: of the result.
        norm: whether it is a norm, which reads whole rows.
        forward: whether it is computed for the first time, which is told to who listens.
        fields: as of `pallas_kernels.operations_triton.Operation`.
    """
    reason = None if on_cuda() else "it needs a CUDA GPU"
    reason = reason or missing_triton("remake_triton") or unplaced() or _unfit(x, spec)
    if reason is None:
        found = _described(x, spec, dtype, norm, fields)
        reason = found if isinstance(found, str) else None
    choice = Choice("xla", f"not the kernel: {reason}") if reason else Choice("triton", "the kernel takes it")
    if forward:
        tell("norm" if norm else "activation", choice)
    return None if reason else found


def _unfit(x: Array, spec: QuantSpec) -> str | None:
    if 0 in x.shape:
        return f"shape {x.shape} is empty"
    grouped = spec.granularity == "group" and x.ndim > 0 and spec.axis in (-1, x.ndim - 1)
    if not (grouped and formats.get(spec.format).is_float):
        return f"it keeps FP8 codes in groups along the last axis, not {spec}"
    if spec.expand or spec.stacked or spec.underflow != "zero" or spec.rounding != "nearest":
        return f"it keeps plain codes rounded to nearest, not {spec}"
    return None


def _described(x: Array, spec: QuantSpec, dtype: DTypeLike, norm: bool, fields: dict[str, Any]) -> Any:
    """The operation as the kernels describe it, or why they cannot compute it."""
    from pallas_kernels import norm_triton, operations_triton, quantize_triton, remake_triton

    if jnp.dtype(dtype) not in quantize_triton.PLAIN_DTYPES:
        return f"it makes no results in {jnp.dtype(dtype)}"
    kept = coding(spec)
    index = quantize_triton.PLAIN_DTYPES.index(jnp.dtype(dtype))
    found = operations_triton.Operation(group=kept.size, e5m2=kept.dtype == jnp.float8_e5m2, dtype=index, **fields)
    unsupported = norm_triton.unsupported if norm else remake_triton.unsupported
    return unsupported(found, (math.prod(x.shape[:-1]), x.shape[-1]), x.dtype, kept) or found


def coding(spec: QuantSpec | None) -> Any:
    """A spec as the kernels take it."""
    if spec is None:
        return None
    from pallas_kernels.scaling_triton import Coding

    dtype, scale = (jnp.dtype(formats.get(name).dtype) for name in (spec.format, spec.scale_format))
    plain = spec.level1 == "none"
    return Coding(spec.granularity, dtype, spec.group_size or 0, plain, scale, spec.rounding == "stochastic")  # type: ignore[arg-type]


def matrix(x: Array) -> Array:
    """(..., channels) as (rows, channels)."""
    return merge(x, x.ndim - 1, 1)


def kept(codes: Array, scale: Array, shape: tuple[int, ...], spec: QuantSpec) -> QTensor:
    """Codes (M, N) and their scales as those of an array of a shape, in bytes, as `fp8jax.ops.saved.keep` has them."""
    count = (*shape[:-1], scale.shape[-1])
    return to_bytes(QTensor(codes.reshape(shape), scale.reshape(count), None, None, spec))


def stored(q: QTensor) -> tuple[Array, Array]:
    """The codes and scales, as matrices, of what `kept` returned."""
    q = from_bytes(q)
    return matrix(q.codes), matrix(q.scale)
