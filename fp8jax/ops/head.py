"""The products of an output head: logits, and from their cotangents the gradients of what it reads and of its weight.

A head whose operands have one scale each (`codes_of`) is quantized once for all tokens, whatever they are cut into, and
the cotangents of its logits need no pass for their largest magnitude: softmax less the label's 1 is at most 1.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8jax.core import blocks, formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Linear
from fp8jax.ops.linear import linear
from fp8jax.ops.logits import LogitCotangents, Logits, cotangent_codes
from fp8jax.ops.matmul import matmul
from fp8jax.ops.product import QuantizedWeight
from fp8jax.ops.quantize import quantize
from fp8jax.ops.saved import from_bytes, to_bytes
from fp8jax.ops.weight import quantize_weight

# The gradients of what the head reads and of its weight, of logits' cotangents in fp32 and what is known of these.
Pull = Callable[[Array, LogitCotangents | None], tuple[Array, Array]]


class Head(Protocol):
    """What turns (..., channels) into logits."""

    def logits(self, x: Array) -> tuple[Logits, Pull]:
        """Logits (..., vocabulary), and what gives gradients of theirs: of `x`, and of the weight in fp32."""
        ...


class PlainHead(NamedTuple):
    """A head in the dtype of what it reads; `axis` of the weight is the vocabulary's."""

    w: Array
    axis: int

    def logits(self, x: Array) -> tuple[Logits, Pull]:
        axes = (x.ndim - 1,), (1 - self.axis,)
        z = lax.dot_general(x, self.w, (axes, ((), ())), preferred_element_type=jnp.float32)

        def pull(d: Array, origin: LogitCotangents | None) -> tuple[Array, Array]:
            d, tokens = d.astype(x.dtype), tuple(range(x.ndim - 1))
            dx = lax.dot_general(
                d, self.w, (((x.ndim - 1,), (self.axis,)), ((), ())), preferred_element_type=jnp.float32
            )
            sides = (x, d) if self.axis else (d, x)
            return dx, lax.dot_general(*sides, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32)

        return Logits(z), pull


class LinearHead(NamedTuple):
    """A head as any linear layer of a recipe: each chunk of tokens, and its cotangents, have scales of their own."""

    w: Array
    axis: int
    part: Linear
    quantized: QuantizedWeight | None
    key: Array | None

    @classmethod
    def of(cls, w: Array, axis: int, part: Linear, key: Array | None) -> "LinearHead":
        """With the weight's codes, made once for all chunks where both products read codes."""
        w = w if axis else w.T
        codes = part.spec("w") is not None and part.spec("w_dgrad") is not None
        return cls(w, axis, part, quantize_weight(w, recipe=part) if codes else None, key)

    def logits(self, x: Array) -> tuple[Logits, Pull]:
        multiply = functools.partial(linear, recipe=self.part, quantized=self.quantized, key=self.key)
        y, of_operands = jax.vjp(multiply, x, self.w)

        def pull(d: Array, origin: LogitCotangents | None) -> tuple[Array, Array]:
            dx, dw = of_operands(d.astype(x.dtype))
            return dx, (dw if self.axis else dw.T).astype(jnp.float32)

        return Logits(y.astype(jnp.float32)), pull


class Codes(NamedTuple):
    """A head's weight as codes, in bytes, and the scales of what else its products read.

    Attributes:
        forward: (vocabulary, channels). dgrad: (channels, vocabulary).
        x, d: fp32 scalars, of what the head reads and of the cotangents of its logits; `d` is None where none are.
    """

    forward: QTensor
    dgrad: QTensor
    x: Array
    d: Array | None

    def chunk_factor(self, part: Linear, bound: Array) -> Array:
        """What the cotangents of a chunk of tokens are divided by, under the scale of all tokens; fp32 scalar.

        It is 1, unless that scale is far too large for them: then a power of two.

        Args:
            part: the head's.
            bound: what the cotangents of the chunk do not exceed, an fp32 scalar.
        """
        spec = part.spec("dy")
        assert spec is not None
        assert self.d is not None
        fmt = formats.get(spec.format)
        largest = self.d * np.float32(fmt.max)
        share = jnp.maximum(1.01 * (bound / largest), formats.TINY)
        power = formats.decode_e8m0(formats.encode_e8m0(share, "up"))
        return jnp.where(scaling.is_loose(largest, bound, fmt), power, 1.0)


# How the vocabulary may be cut over devices, by leaf, in the notation of `fp8jax.ops.cuts`.
CODES_CUTS = (("v -", "- -"), ("- v", "- -"), "", "")


def has_codes(part: Linear | None) -> bool:
    """Whether a recipe's head is a `CodedHead`: FP8 with one scale an operand, rounded to nearest, the same codes in
    both products of what the head reads and of its weight."""
    if part is None:
        return False
    specs = [part.spec(operand) for operand in ("x", "w", "dy", "dy_wgrad")]
    plain = all(
        s is not None and formats.get(s.format).is_fp8 and s.granularity == "tensor" and s.rounding == "nearest"
        for s in specs
    )
    same = part.spec("x") == part.spec("saved") == part.spec("x_wgrad") and part.spec("w") == part.spec("w_dgrad")
    return plain and same


def codes_of(x: Array, w: Array, axis: int, part: Linear, largest: Array | None) -> Codes:
    """The codes of a head's weight, made once for all tokens, and scales.

    Args:
        x: what the head reads, all of it. w: its weight, of which `axis` is the vocabulary's.
        part: a recipe's, of which `has_codes` holds.
        largest: what the cotangents of logits do not exceed, fp32; None where there are none.
    """
    x, w = lax.stop_gradient((x, w))
    spec, of_x = part.spec("w"), part.spec("x")
    assert spec is not None
    assert of_x is not None
    rows, columns = quantize(w, spec, "same", strategy=part.own_strategy("w"))
    assert rows is not None
    assert columns is not None
    forward, dgrad = (columns, rows) if axis else (rows, columns)
    find = functools.partial(part.own_strategy("x").scale, fmt=formats.get(of_x.format))
    (scale,) = blocks.on_logical_array(lambda x: (find((), x),), x, like=[()])
    dy = part.spec("dy")
    assert dy is not None
    d = None if largest is None else scaling.to_scale(largest, formats.get(dy.format))
    return Codes(to_bytes(forward), to_bytes(dgrad), scale, d)


class CodedHead(NamedTuple):
    """A head of FP8 codes with one scale each; `axis` of the weight is the vocabulary's."""

    codes: Codes
    axis: int
    part: Linear

    def logits(self, x: Array) -> tuple[Logits, Pull]:
        """Logits are rounded to the dtype of `x`: in 16 bits by 2^-9, where codes have errors of 2^-5 an element."""
        part, codes = self.part, self.codes
        matrix = x.reshape(-1, x.shape[-1])
        rows, columns = quantize(matrix, part.spec("x"), "same", scale=codes.x)
        assert rows is not None
        assert columns is not None
        z = matmul(rows, from_bytes(codes.forward), dtype=x.dtype, fast="forward" in part.fast_accumulation)

        def pull(d: Array, origin: LogitCotangents | None) -> tuple[Array, Array]:
            dy, wgrad = part.spec("dy"), part.spec("dy_wgrad")
            assert dy is not None
            assert wgrad is not None
            assert codes.d is not None
            d_rows, d_columns = cotangent_codes(z, d.astype(x.dtype).reshape(z.shape), origin, dy, wgrad, codes.d)
            dx = matmul(d_rows, from_bytes(codes.dgrad), dtype=x.dtype, fast="dgrad" in part.fast_accumulation)
            sides = (columns, d_columns) if self.axis else (d_columns, columns)
            dw = matmul(*sides, dtype=jnp.float32, fast="wgrad" in part.fast_accumulation)
            return dx.reshape(x.shape), dw

        return Logits(z.astype(jnp.float32).reshape(*x.shape[:-1], -1), z), pull


def steepest(vocabulary: int | Array, softcap: float | None, z_loss: float) -> float:
    """What the cotangents of a token's logits, of a weight of 1, do not exceed.

    With z-loss, softmax is multiplied by 1 + 2 z_loss lse. A cap bounds lse; without one it is taken to be at most 128
    above that of equal logits of 0, and `beyond` says by how much it is more.
    """
    return 1 + 2 * z_loss * ((128 if softcap is None else softcap) + math.log(vocabulary))


def beyond(vocabulary: int | Array, z_loss: float, lse: Array) -> Array:
    """How many times as large as `steepest` cotangents may be, of tokens of these lse, not capped; fp32, at least 1."""
    factors = jnp.where(jnp.isfinite(lse), jnp.abs(1 + 2 * z_loss * lse), 1.0)
    return jnp.maximum(jnp.max(factors, initial=1.0) / steepest(vocabulary, None, z_loss), 1.0)


def head_of(w: Array | Codes, axis: int, part: Linear | None, key: Array | None, dtype: Any) -> Head:
    """The head of a weight or its codes for inputs of a dtype; its operands are made once for all chunks of tokens."""
    if part is None:
        assert not isinstance(w, Codes)
        return PlainHead(w.astype(dtype), axis)
    return CodedHead(w, axis, part) if isinstance(w, Codes) else LinearHead.of(w, axis, part, key)


def logits_of(head: Head, x: Array, bias: Array | None) -> tuple[Logits, Pull]:
    """Logits with a bias, and what gives the gradients of `x` and of the weight, of theirs."""
    z, pull = head.logits(x)
    if bias is not None:
        z = Logits(z.values + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(z.values.ndim - 1))))
    return z, pull


def shape_of(w: Array | Codes, axis: int) -> tuple[int, ...]:
    """Of a device's part of the weight."""
    return w.shape if not isinstance(w, Codes) else (w.dgrad if axis else w.forward).shape
