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

from fp8jax.core import blocks, encoding, formats, scaling
from fp8jax.core.qtensor import QTensor, from_bytes, to_bytes
from fp8jax.core.recipe import SAME, Linear
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import Choice, capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.dispatch.partition import DimSharding, run_partitioned
from fp8jax.ops.matmul.matmul import matmul
from fp8jax.ops.products.linear import linear
from fp8jax.ops.products.weights import QuantizedWeight, quantize_weight
from fp8jax.ops.quantization import fused_outputs
from fp8jax.ops.quantization.quantize import quantize


class Logits(NamedTuple):
    """Logits of tokens.

    Attributes:
        values: fp32 (..., vocabulary).
        matmul_output: the same as the product wrote them, (tokens, vocabulary); None after a bias or a cap.
    """

    values: Array
    matmul_output: Array | None = None


class LogitCotangentFacts(NamedTuple):
    """Formula of the cotangents of logits z:

        weights (exp(z - lse) (1 + two_z_loss lse) - label_weight [label] - other_weight)

    Attributes:
        lse, weights: fp32 (tokens,). Cotangents are 0 for weight 0.
        labels: int32 (tokens,), relative to the device's shard of the vocabulary.
        two_z_loss, label_weight, other_weight: numbers.
    """

    lse: Array
    labels: Array
    weights: Array
    two_z_loss: float
    label_weight: float
    other_weight: float


def cotangent_bound(facts: LogitCotangentFacts, z: Array, label_logit: Array, softcap: float | None) -> Array:
    """Return an upper bound of the logits' cotangents over all tokens, fp32 scalar.

    Apart from the label, softmax entries are at most 1 less that of the label. Without smoothing, z-loss or a cap the
    bound is tight: the largest cotangent of a label.

    Args:
        facts: the cotangents before the cap.
        z: capped logits (..., vocabulary).
        label_logit: logits of the labels (...).
    """
    label_logit, z = label_logit.reshape(-1), z.reshape(-1, z.shape[-1])
    lse_factor, label_prob = 1 + facts.two_z_loss * facts.lse, jnp.exp(label_logit - facts.lse)
    other_prob = jnp.maximum(1 - label_prob, 0.0)
    # With a negative factor, which a z-loss has for a very negative lse, both terms have one sign.
    other_bound = jnp.maximum(lse_factor * other_prob, facts.other_weight - jnp.minimum(lse_factor, 0.0) * other_prob)
    label_bound = jnp.abs(lse_factor * label_prob - facts.label_weight - facts.other_weight)
    if softcap is not None:
        other_bound = other_bound * (1 - (jnp.min(jnp.abs(z), axis=-1) / softcap) ** 2)
        label_bound = label_bound * (1 - (label_logit / softcap) ** 2)
    bounds = jnp.maximum(other_bound, label_bound) * facts.weights
    return scaling.compute_amax(jnp.where(facts.weights == 0, 0.0, bounds))


def max_and_sum_exp(logits: Logits, impl: str = "auto") -> tuple[Array, Array]:
    """Return each token's largest logit m and the sum of exp(logit - m), fp32 (...).

    A non-finite m is not subtracted.
    """
    if logits.matmul_output is None:
        return _max_and_sum_exp(logits.values)
    choice = record_choice("softmax of logits", choose_impl(impl, lambda: _unsupported_reason(logits.matmul_output)))
    lead = logits.values.shape[:-1]

    def kernel(_: Array, matmul_output: Array) -> tuple[Array, Array]:
        max_logit, total = run_partitioned(
            "exponentials", None, _max_and_sum_exp_kernel, (matmul_output,), ("m -",), ("m", "m")
        )
        return max_logit.reshape(lead), total.reshape(lead)

    return run(
        choice,
        impl,
        logits.values,
        logits.matmul_output,
        kernel=kernel,
        reference=lambda values, _: _max_and_sum_exp(values),
    )


def _max_and_sum_exp(z: Array) -> tuple[Array, Array]:
    max_logit = jnp.max(z, axis=-1)
    return max_logit, jnp.sum(jnp.exp(z - zero_nonfinite(max_logit)[..., None]), axis=-1)


def zero_nonfinite(x: Array) -> Array:
    """Return x with 0 in place of non-finite values."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def label_logits(logits: Array, labels: Array) -> Array:
    """Return the logit of each token's label, fp32 (...), from (tokens, vocabulary); 0 for labels out of range."""
    size = logits.shape[1]
    columns = jnp.where(labels < 0, size, labels).reshape(-1)
    label_logit = logits.at[jnp.arange(logits.shape[0]), columns].get(mode="fill", fill_value=0)
    return label_logit.astype(jnp.float32).reshape(labels.shape)


def _max_and_sum_exp_kernel(_: DimSharding, z: Array) -> tuple[Array, Array]:
    from pallas_kernels.losses import logits_triton

    return logits_triton.max_and_sum_exp(z, compute_capability=capability())


def quantize_cotangents(
    z: Array,
    d: Array,
    facts: LogitCotangentFacts | None,
    rows: QuantSpec,
    columns: QuantSpec,
    scale: Array,
    impl: str = "auto",
) -> tuple[QTensor, QTensor]:
    """Return `quantize(d, rows, columns, scale=scale)` of logits' cotangents. A kernel computes `d` from the logits.

    Args:
        z: logits (tokens, vocabulary).
        d: their cotangents, in the dtype of `z`.
        facts: the formula of `d`, or None if unknown.
        rows, columns: specs of `d` and its transposed copy: FP8 with one scale, rounded to nearest.
        scale: fp32 scalar, for the format of `rows`.
    """
    specs = rows, columns
    xla_choice = Choice("xla", "the logits are not the result of a product alone")
    choice = xla_choice if facts is None else choose_impl(impl, functools.partial(_unsupported_reason, z, specs))
    record_choice("cotangents of logits", choice)
    fp32_scales = [
        scaling.clamp_scale(scaling.convert_scale(scale, *(formats.get(s.format) for s in (rows, spec))))
        for spec in specs
    ]
    scales = [
        encoding.cast_scale(s.reshape(1, 1), spec, is_given=True) for s, spec in zip(fp32_scales, specs, strict=True)
    ]

    def reference(_: Array, d: Array, *__: Any) -> tuple[QTensor, QTensor]:
        return quantize(d, rows, SAME if rows == columns else columns, scale=scale)

    def kernel(z: Array, _: Array, *operands: Array) -> tuple[QTensor, QTensor]:
        assert facts is not None
        static = tuple(map(fused_outputs.to_coding, specs)), facts[3:]
        ins = ("m -", "m", "m", "m", "- -", "- -")
        make = functools.partial(_cotangents_kernel, *static)
        outputs = run_partitioned("cotangents", (static, z.shape), make, (z, *operands), ins, ("m -", "- m"))
        first, second = (
            QTensor(codes, stored_scale, None, None, spec)
            for codes, stored_scale, spec in zip(outputs, operands[-2:], specs, strict=True)
        )
        return first, second

    fact_arrays = () if facts is None else (*facts[:3], *scales)
    return run(choice, impl, z, d, *fact_arrays, kernel=kernel, reference=reference)


def _cotangents_kernel(codings: Any, numbers: Any, _: DimSharding, z: Array, *operands: Array) -> tuple[Array, Array]:
    from pallas_kernels.losses import logits_triton

    lse, labels, weights, *scales = operands
    (rows, columns), (two_z_loss, label_weight, other_weight) = codings, numbers
    return logits_triton.quantize_cotangents(
        z, lse, labels, weights, scales=scales, rows=rows, columns=columns,
        two_z_loss=two_z_loss, label_weight=label_weight, other_weight=other_weight, compute_capability=capability(),
    )  # fmt: skip


def _unsupported_reason(z: Any, specs: tuple[QuantSpec, ...] = ()) -> str | None:
    reason = missing_triton("losses.logits_triton")
    if reason is None:
        from pallas_kernels.quantization import quantize_triton

        reason = quantize_triton.unsupported_reason(z.shape, z.dtype, tuple(map(fused_outputs.to_coding, specs)))
    return reason


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
        assert self.d_scale is not None
        fmt = formats.get(linear_recipe.quantized_spec("dy").format)
        max_cotangent = self.d_scale * np.float32(fmt.max)
        share = jnp.maximum(1.01 * (bound / max_cotangent), formats.TINY)
        power = formats.decode_e8m0(formats.encode_e8m0(share, "up"))
        return jnp.where(scaling.is_loose(max_cotangent, bound, fmt), power, 1.0)


# Sharding of the vocabulary, per leaf, in the notation of `fp8jax.ops.dispatch.partition`.
CODES_DIMS = (("v -", "- -"), ("- v", "- -"), "", "")


def has_codes(linear_recipe: Linear | None) -> bool:
    """Return whether a recipe's head is a `QuantizedHead`.

    This needs FP8 with one scale per operand, rounded to nearest, no rotation, and operands that two products share.
    """
    if linear_recipe is None:
        return False
    specs = [linear_recipe.spec(operand) for operand in ("x", "w", "dy", "dy_wgrad")]
    is_per_tensor_fp8 = all(
        s is not None and formats.get(s.format).is_fp8 and s.granularity == "tensor" and s.rounding == "nearest"
        for s in specs
    )
    shares_operands = linear_recipe.spec("x") == linear_recipe.spec("x_residual") == linear_recipe.spec(
        "x_wgrad"
    ) and linear_recipe.spec("w") == linear_recipe.spec("w_dgrad")
    return is_per_tensor_fp8 and shares_operands and linear_recipe.rotation is None


def quantize_head(x: Array, w: Array, axis: int, linear_recipe: Linear, max_cotangent: Array | None) -> HeadCodes:
    """Return the codes of a head's weight and the scales for all chunks.

    Args:
        max_cotangent: fp32 upper bound of the logits' cotangents, or None without gradients.
    """
    x, w = lax.stop_gradient((x, w))
    x_fmt, dy_fmt = (formats.get(linear_recipe.quantized_spec(operand).format) for operand in ("x", "dy"))
    rows, columns = quantize(w, linear_recipe.spec("w"), SAME, strategy=linear_recipe.stateless_strategy("w"))
    forward, dgrad = (columns, rows) if axis else (rows, columns)
    find_scale = functools.partial(linear_recipe.stateless_strategy("x").scale, fmt=x_fmt)
    (scale,) = blocks.on_logical_array(lambda x: (find_scale((), x),), x, out_shapes=[()])
    d_scale = None if max_cotangent is None else scaling.to_scale(max_cotangent, dy_fmt)
    return HeadCodes(to_bytes(forward), to_bytes(dgrad), scale, d_scale)


class QuantizedHead(NamedTuple):
    """A head of FP8 codes with one scale per operand. `axis` is the weight's vocabulary axis."""

    codes: HeadCodes
    axis: int
    linear_recipe: Linear

    def logits(self, x: Array) -> tuple[Logits, VjpFn]:
        """As `Head.logits`, rounded to the dtype of `x`. In bf16 this is far below the error of the codes."""
        linear_recipe, codes = self.linear_recipe, self.codes
        matrix = x.reshape(-1, x.shape[-1])
        rows, columns = quantize(matrix, linear_recipe.spec("x"), SAME, scale=codes.x_scale)
        z = matmul(rows, from_bytes(codes.forward), dtype=x.dtype, fast="forward" in linear_recipe.fast_accumulation)

        def vjp_fn(d: Array, facts: LogitCotangentFacts | None) -> tuple[Array, Array]:
            dy, wgrad = linear_recipe.quantized_spec("dy"), linear_recipe.quantized_spec("dy_wgrad")
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
    """Return the factor, at least 1, by which uncapped cotangents may exceed `max_logit_cotangent`, fp32."""
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
