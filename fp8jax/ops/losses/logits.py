"""Logits of a head, which on a GPU two passes read as the product wrote them: one for the loss, one for cotangents."""

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
        matmul_output: the same as a product has written them, (tokens, vocabulary); None where more was added.
    """

    values: Array
    matmul_output: Array | None = None


class LogitCotangentFacts(NamedTuple):
    """What cotangents of logits z are.

    weights (exp(z - lse) (1 + two_z_loss lse) - label_weight [label] - other_weight)

    Attributes:
        lse, weights: fp32 (tokens,). Where the weight is 0, so are cotangents.
        labels: int32 (tokens,), in the device's part of the vocabulary.
        two_z_loss, label_weight, other_weight: numbers.
    """

    lse: Array
    labels: Array
    weights: Array
    two_z_loss: float
    label_weight: float
    other_weight: float


def cotangent_bound(facts: LogitCotangentFacts, z: Array, label_logit: Array, softcap: float | None) -> Array:
    """What no cotangent of the logits of any token exceeds, fp32 scalar.

    The softmax of all entries but the label's is at most 1 less that of the label. Without smoothing, z-loss or a cap
    the bound is the largest cotangent itself, that of a label.

    Args:
        facts: what the cotangents are, before those of the cap.
        z: capped logits (..., vocabulary).
        label_logit: the label's (...).
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
    """The largest logit of each token, and the sum of exponentials of what all are below it, fp32 (...).

    Below what is not finite nothing is subtracted.
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
    """0 where `x` is not."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def label_logits(logits: Array, labels: Array) -> Array:
    """The logit of each token's label, fp32 (...); 0 of one outside of (tokens, vocabulary)."""
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
    """`quantize(d, rows, columns, scale=scale)` of logits' cotangents, which a kernel makes of logits as it does so.

    Args:
        z: logits (tokens, vocabulary). d: their cotangents, in the dtype of `z`.
        facts: what these are; None where that is not known.
        rows, columns: FP8 with one scale, to nearest; of `d`, and of its transposed copy.
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
