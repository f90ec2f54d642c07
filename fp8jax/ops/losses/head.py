"""Products of an output head: logits, and the gradients of its input and weight from the logits' cotangents.

If all operands have one scale (`quantize_head`), the head is quantized once for all chunks of tokens. The cotangents
need no amax pass: a softmax less the label's 1 is at most 1.
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
from fp8jax.ops.autodiff.residuals import from_bytes, to_bytes
from fp8jax.ops.losses.logits import LogitCotangentFacts, Logits, quantize_cotangents
from fp8jax.ops.matmul.matmul import matmul
from fp8jax.ops.products.linear import linear
from fp8jax.ops.products.product import QuantizedWeight
from fp8jax.ops.products.weights import quantize_weight
from fp8jax.ops.quantization.quantize import quantize

# Maps the fp32 cotangents of logits, and facts about them, to the gradients of the input and of the weight.
VjpFn = Callable[[Array, LogitCotangentFacts | None], tuple[Array, Array]]


class Head(Protocol):
    """Protocol of a function from (..., channels) to logits."""

    def logits(self, x: Array) -> tuple[Logits, VjpFn]:
        """Return logits (..., vocabulary) and their vjp, to gradients of `x` and (fp32) of the weight."""
        ...


class PlainHead(NamedTuple):
    """A head in the dtype of its input. `axis` is the weight's vocabulary axis."""

    w: Array
    axis: int

    def logits(self, x: Array) -> tuple[Logits, VjpFn]:
        axes = (x.ndim - 1,), (1 - self.axis,)
        z = lax.dot_general(x, self.w, (axes, ((), ())), preferred_element_type=jnp.float32)

        def vjp_fn(d: Array, facts: LogitCotangentFacts | None) -> tuple[Array, Array]:
            d, tokens = d.astype(x.dtype), tuple(range(x.ndim - 1))
            dx = lax.dot_general(
                d, self.w, (((x.ndim - 1,), (self.axis,)), ((), ())), preferred_element_type=jnp.float32
            )
            sides = (x, d) if self.axis else (d, x)
            return dx, lax.dot_general(*sides, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32)

        return Logits(z), vjp_fn


class LinearHead(NamedTuple):
    """A head that is a linear layer of a recipe. Each chunk of tokens, and its cotangents, have their own scales."""

    w: Array
    axis: int
    linear_recipe: Linear
    quantized: QuantizedWeight | None
    key: Array | None

    @classmethod
    def from_weight(cls, w: Array, axis: int, linear_recipe: Linear, key: Array | None) -> "LinearHead":
        """Return the head. If both products read codes, the weight is quantized once for all chunks."""
        w = w if axis else w.T
        codes = linear_recipe.spec("w") is not None and linear_recipe.spec("w_dgrad") is not None
        return cls(w, axis, linear_recipe, quantize_weight(w, recipe=linear_recipe) if codes else None, key)

    def logits(self, x: Array) -> tuple[Logits, VjpFn]:
        multiply = functools.partial(linear, recipe=self.linear_recipe, quantized=self.quantized, key=self.key)
        y, linear_vjp = jax.vjp(multiply, x, self.w)

        def vjp_fn(d: Array, facts: LogitCotangentFacts | None) -> tuple[Array, Array]:
            dx, dw = linear_vjp(d.astype(x.dtype))
            return dx, (dw if self.axis else dw.T).astype(jnp.float32)

        return Logits(y.astype(jnp.float32)), vjp_fn


class HeadCodes(NamedTuple):
    """Codes of a head's weight, as bytes, and the scales of its other operands.

    Attributes:
        forward: QTensor (vocabulary, channels).
        dgrad: QTensor (channels, vocabulary).
        x_scale, d_scale: fp32 scalars for the input and for the logits' cotangents. `d_scale` is None without
            gradients.
    """

    forward: QTensor
    dgrad: QTensor
    x_scale: Array
    d_scale: Array | None

    def chunk_divisor(self, linear_recipe: Linear, bound: Array) -> Array:
        """Return the divisor of a chunk's cotangents under the common scale, fp32 scalar.

        It is 1, or a power of two if that scale is far too large for the chunk. `bound` is an fp32 upper bound of the
        chunk's cotangents.
        """
        spec = linear_recipe.spec("dy")
        assert spec is not None
        assert self.d_scale is not None
        fmt = formats.get(spec.format)
        max_cotangent = self.d_scale * np.float32(fmt.max)
        share = jnp.maximum(1.01 * (bound / max_cotangent), formats.TINY)
        power = formats.decode_e8m0(formats.encode_e8m0(share, "up"))
        return jnp.where(scaling.is_loose(max_cotangent, bound, fmt), power, 1.0)


# Sharding of the vocabulary, per leaf, in the notation of `fp8jax.ops.dispatch.shard_notation`.
CODES_DIMS = (("v -", "- -"), ("- v", "- -"), "", "")


def has_codes(linear_recipe: Linear | None) -> bool:
    """Return whether a recipe's head is a `QuantizedHead`.

    This needs FP8 with one scale per operand, rounded to nearest, and operands that two products share.
    """
    if linear_recipe is None:
        return False
    specs = [linear_recipe.spec(operand) for operand in ("x", "w", "dy", "dy_wgrad")]
    plain = all(
        s is not None and formats.get(s.format).is_fp8 and s.granularity == "tensor" and s.rounding == "nearest"
        for s in specs
    )
    same = linear_recipe.spec("x") == linear_recipe.spec("x_residual") == linear_recipe.spec(
        "x_wgrad"
    ) and linear_recipe.spec("w") == linear_recipe.spec("w_dgrad")
    return plain and same


def quantize_head(x: Array, w: Array, axis: int, linear_recipe: Linear, max_cotangent: Array | None) -> HeadCodes:
    """Return the codes of a head's weight and the scales for all chunks.

    Args:
        x: input of the head, all tokens.
        w: weight with the vocabulary along `axis`.
        linear_recipe: a `Linear` for which `has_codes` is True.
        max_cotangent: fp32 upper bound of the logits' cotangents, or None without gradients.
    """
    x, w = lax.stop_gradient((x, w))
    spec, x_spec = linear_recipe.spec("w"), linear_recipe.spec("x")
    assert spec is not None
    assert x_spec is not None
    rows, columns = quantize(w, spec, "same", strategy=linear_recipe.stateless_scaling("w"))
    assert rows is not None
    assert columns is not None
    forward, dgrad = (columns, rows) if axis else (rows, columns)
    find_scale = functools.partial(linear_recipe.stateless_scaling("x").scale, fmt=formats.get(x_spec.format))
    (scale,) = blocks.on_logical_array(lambda x: (find_scale((), x),), x, out_shapes=[()])
    dy = linear_recipe.spec("dy")
    assert dy is not None
    d = None if max_cotangent is None else scaling.to_scale(max_cotangent, formats.get(dy.format))
    return HeadCodes(to_bytes(forward), to_bytes(dgrad), scale, d)


class QuantizedHead(NamedTuple):
    """A head of FP8 codes with one scale per operand. `axis` is the weight's vocabulary axis."""

    codes: HeadCodes
    axis: int
    linear_recipe: Linear

    def logits(self, x: Array) -> tuple[Logits, VjpFn]:
        """As `Head.logits`, rounded to the dtype of `x`. In bf16 this is far below the error of the codes."""
        linear_recipe, codes = self.linear_recipe, self.codes
        matrix = x.reshape(-1, x.shape[-1])
        rows, columns = quantize(matrix, linear_recipe.spec("x"), "same", scale=codes.x_scale)
        assert rows is not None
        assert columns is not None
        z = matmul(rows, from_bytes(codes.forward), dtype=x.dtype, fast="forward" in linear_recipe.fast_accumulation)

        def vjp_fn(d: Array, facts: LogitCotangentFacts | None) -> tuple[Array, Array]:
            dy, wgrad = linear_recipe.spec("dy"), linear_recipe.spec("dy_wgrad")
            assert dy is not None
            assert wgrad is not None
            assert codes.d_scale is not None
            d_rows, d_columns = quantize_cotangents(
                z, d.astype(x.dtype).reshape(z.shape), facts, dy, wgrad, codes.d_scale
            )
            dx = matmul(d_rows, from_bytes(codes.dgrad), dtype=x.dtype, fast="dgrad" in linear_recipe.fast_accumulation)
            sides = (columns, d_columns) if self.axis else (d_columns, columns)
            dw = matmul(*sides, dtype=jnp.float32, fast="wgrad" in linear_recipe.fast_accumulation)
            return dx.reshape(x.shape), dw

        return Logits(z.astype(jnp.float32).reshape(*x.shape[:-1], -1), z), vjp_fn


def max_logit_cotangent(vocabulary: int | Array, softcap: float | None, z_loss: float) -> float:
    """Return an upper bound of the cotangents of a token's logits, for weight 1.

    With z-loss, softmax is multiplied by 1 + 2 z_loss lse. The cap bounds lse. Without a cap, lse is assumed at most
    log(vocabulary) + 128, and `bound_excess` measures the excess.
    """
    return 1 + 2 * z_loss * ((128 if softcap is None else softcap) + math.log(vocabulary))


def bound_excess(vocabulary: int | Array, z_loss: float, lse: Array) -> Array:
    """Return by what factor, at least 1, uncapped cotangents may exceed `max_logit_cotangent`, fp32."""
    factors = jnp.where(jnp.isfinite(lse), jnp.abs(1 + 2 * z_loss * lse), 1.0)
    return jnp.maximum(jnp.max(factors, initial=1.0) / max_logit_cotangent(vocabulary, None, z_loss), 1.0)


def make_head(w: Array | HeadCodes, axis: int, linear_recipe: Linear | None, key: Array | None, dtype: Any) -> Head:
    """Return the head of a weight or its codes, for inputs of a dtype, with operands shared by all chunks."""
    if linear_recipe is None:
        assert not isinstance(w, HeadCodes)
        return PlainHead(w.astype(dtype), axis)
    return (
        QuantizedHead(w, axis, linear_recipe)
        if isinstance(w, HeadCodes)
        else LinearHead.from_weight(w, axis, linear_recipe, key)
    )


def compute_logits(head: Head, x: Array, bias: Array | None) -> tuple[Logits, VjpFn]:
    """Return logits with bias, and their vjp."""
    z, vjp_fn = head.logits(x)
    if bias is not None:
        z = Logits(z.values + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(z.values.ndim - 1))))
    return z, vjp_fn


def weight_shape(w: Array | HeadCodes, axis: int) -> tuple[int, ...]:
    """Return the shape of a device's shard of the weight."""
    return w.shape if not isinstance(w, HeadCodes) else (w.dgrad if axis else w.forward).shape
