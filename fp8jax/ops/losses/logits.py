"""Logits of a head. On a GPU, kernels for the loss and for the cotangents read them as the product wrote them."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fp8jax.core import encoding, formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import Choice, capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.dispatch.partition import run_partitioned
from fp8jax.ops.dispatch.shard_notation import DimSharding
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
        softcap: the cap, or None.
    """
    label_logit, z = label_logit.reshape(-1), z.reshape(-1, z.shape[-1])
    lse_factor, label_prob = 1 + facts.two_z_loss * facts.lse, jnp.exp(label_logit - facts.lse)
    other_bound = jnp.maximum(jnp.abs(lse_factor) * jnp.maximum(1 - label_prob, 0.0), facts.other_weight)
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

    result: tuple[Array, Array] = run(
        choice,
        impl,
        logits.values,
        logits.matmul_output,
        kernel=kernel,
        reference=lambda values, _: _max_and_sum_exp(values),
    )
    return result


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
    xla_choice = Choice("xla", "more than a product made them")
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
        first, second = quantize(d, rows, SAME if rows == columns else columns, scale=scale)
        assert first is not None
        assert second is not None
        return first, second

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
    result: tuple[QTensor, QTensor] = run(choice, impl, z, d, *fact_arrays, kernel=kernel, reference=reference)
    return result


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
