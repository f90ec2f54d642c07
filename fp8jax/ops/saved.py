"""What operations keep for the backward pass: codes as bytes, and results that are computed again from what is kept.

FP8 arrays may not enter a differentiated function, because a cotangent takes the dtype of its primal: codes travel as
bytes, which have none. An operation here computes its result and what it keeps outside of the differentiated function,
from values alone, so that one function per operation makes both and a fused kernel can take its place.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor, quantize
from fp8jax.core.recipe import Context
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.choice import Choice, by_platform, capability, missing_triton, on_cuda, tell, unplaced, vary_alike
from fp8jax.ops.partition import Cut, partitioned
from fp8jax.ops.recent import Origins
from fp8jax.ops.sharding import Kind, merge, spec_of, split


def to_bytes(q: QTensor) -> QTensor:
    """A quantized tensor as values without gradients, its codes as bytes."""
    q = jax.tree.map(lax.stop_gradient, q)
    return dataclasses.replace(q, codes=_cast_bytes(q.codes, jnp.uint8))


def from_bytes(saved: QTensor) -> QTensor:
    """The quantized tensor that `to_bytes` was given."""
    dtype = jnp.uint8 if saved.spec.packed else formats.get(saved.spec.format).dtype
    return dataclasses.replace(saved, codes=_cast_bytes(saved.codes, dtype))


def _cast_bytes(codes: Array, dtype: DTypeLike) -> Array:
    """Codes of one byte as another type of one byte; wider ones as they are."""
    return lax.bitcast_convert_type(codes, dtype) if codes.dtype.itemsize == 1 else codes


PACKED = QuantSpec("int10", "group", 128, scale_format="bf16")


def keep(x: Array, spec: QuantSpec, impl: str = "auto") -> QTensor:
    """The values of an array as codes in bytes, with scales along its last axis.

    Of ten bits a kernel makes and packs them on CUDA GPUs (`impl` "auto", or "triton", which is it anywhere).
    """
    values = lax.stop_gradient(x)
    if impl == "xla" or spec != PACKED or x.ndim < 2 or 0 in x.shape:
        return to_bytes(quantize(values, spec))
    reason = missing_triton("pack_triton") or unplaced() if on_cuda() or impl == "triton" else "it needs a CUDA GPU"
    choice = Choice("xla", f"not the kernel: {reason}") if reason else Choice("triton", "the kernel packs ten bits")
    tell("context", choice)
    if reason:
        return to_bytes(quantize(values, spec))
    if impl == "triton":
        return _packed(values)
    plain = functools.partial(keep, spec=spec, impl="xla")
    kept: QTensor = by_platform(values, cuda=_packed, default=plain)
    return kept


def _packed(x: Array) -> QTensor:
    def pack(cut: Cut, rows: Array) -> tuple[Array, Array]:
        from pallas_kernels import pack_triton

        return pack_triton.pack(rows, compute_capability=capability())

    rows = merge(x, x.ndim - 1, 1)
    codes, scale = partitioned("pack", None, pack, (rows,), ("m -",), ("m -", "m -"))
    lead = spec_of(rows)[:1] and (*spec_of(x)[:-1], None)
    codes, scale = (split(part, (*x.shape[:-1], part.shape[-1]), lead) for part in (codes, scale))
    return QTensor(codes, scale, None, None, PACKED, x.shape[-1])


def decode(saved: QTensor) -> Array:
    """The fp32 values of what `keep` returned."""
    return from_bytes(saved).dequantize()


def mapped_alike(x: Array, y: Array) -> Array:
    """`x`, which `jax.vmap` maps where it maps `y`.

    A differentiated function that returns two results needs both mapped or none: else the cotangent of the one that is
    not comes to its backward pass summed, and is added to that of every element.
    """
    empty = (jnp.sum(jnp.isnan(a[..., :0])) for a in (x, y))
    return lax.select(sum(empty) > 0, x, x)


class Gradient(NamedTuple):
    """The gradient of a result that is computed again, as the linear layer that does so knows it.

    Attributes:
        array: (..., channels).
        spec: how that layer quantizes its own gradient.
        rows: computes an upper bound of the magnitudes in each row, fp32 (rows,): by the inequality of Cauchy and
            Schwarz, from the norms of that layer's own gradient and of its weight.
        codes: those of that layer's own gradient, where its input is to take their scales of tokens; else None.
    """

    array: Array
    spec: QuantSpec | None
    rows: Callable[[], Array]
    codes: QTensor | None = None


class Remade(Protocol):
    """How an operation goes back from what it kept; hashable, static under `jax.jit`."""

    def again(self, kept: Any, gradient: Gradient) -> Array:
        """The operation's result, computed again, whose gradient is that."""
        ...

    def backward(
        self, kept: Any, dy: Array, dtypes: tuple[DTypeLike | None, ...], others: Array | None
    ) -> tuple[Array | None, ...]:
        """Cotangents of the operation's differentiable inputs, in their dtypes, from that of its result.

        `others`, from the first input's other readers, is added to that input's; None where the operation has none.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Itself:
    """How to go back to an array that is kept in any case: flash attention keeps its output (COAT, section D)."""

    def again(self, kept: Array, gradient: Gradient) -> Array:
        return kept

    def backward(
        self, kept: Array, dy: Array, dtypes: tuple[DTypeLike | None, ...], others: Array | None
    ) -> tuple[Array | None, ...]:
        raise TypeError("an array that is kept is no operation")


ITSELF = Itself()

# An array that is noted as ITSELF is given there as None: an entry must not keep its own array alive.
origins: Origins[tuple[Remade, Any]] = Origins()


def differentiable(
    how: Remade, inputs: tuple[Array | None, ...], kept: Any, y: Array, context: Context, *, residual: bool = False
) -> tuple[Array, Array | None]:
    """The result `y` of an operation on `inputs`, whose backward pass reads nothing but `kept`.

    Under a lean context `y` is known by what was kept: linear layers that read it keep no codes of it.

    Args:
        how: what goes back.
        inputs: what gradients flow to; None where there is none.
        kept: arrays without gradients.
        y: the result, computed from the values of the inputs.
        context: says whether linear layers may compute `y` again.
        residual: whether other readers of the first input take it from here.

    Returns:
        `y`, and the first input for its other readers, or None.
    """
    y, *inputs = vary_alike(lax.stop_gradient(y), *inputs)  # type: ignore[assignment]
    y, x = _differentiable(how, residual, tuple(inputs), kept, y)
    if context.lean:
        origins.note(y, (how, kept))
    return y, x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(
    how: Remade, residual: bool, inputs: tuple[Array | None, ...], kept: Any, y: Array
) -> tuple[Array, Array | None]:
    return _forward(how, residual, inputs, kept, y)[0]


def _forward(how: Remade, residual: bool, inputs: tuple[Array | None, ...], kept: Any, y: Array) -> tuple[Any, Any]:
    kinds = tuple(None if x is None else Kind.of(x) for x in inputs)
    x = inputs[0]
    if residual and x is not None:
        return (mapped_alike(y, x), mapped_alike(x, y)), (kept, kinds)
    return (y, None), (kept, kinds)


def _backward(how: Remade, residual: bool, residuals: Any, cotangents: Any) -> tuple[Any, None, None]:
    (kept, kinds), (dy, others) = residuals, cotangents
    found = how.backward(kept, dy, tuple(None if kind is None else kind.dtype for kind in kinds), others)
    placed = (None if ct is None or kind is None else kind.cast(ct) for ct, kind in zip(found, kinds, strict=True))
    return tuple(placed), None, None


_differentiable.defvjp(_forward, _backward)
