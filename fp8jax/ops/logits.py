"""Logits of a head, which on a GPU two passes read as the product wrote them: one for the loss, one for cotangents."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fp8jax.core import encoding, formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import fused
from fp8jax.ops.choice import Choice, capability, missing_triton, run, tell, triton_or_xla
from fp8jax.ops.cuts import Cut
from fp8jax.ops.partition import partitioned
from fp8jax.ops.quantize import quantize


class Logits(NamedTuple):
    """Logits of tokens.

    Attributes:
        values: fp32 (..., vocabulary).
        made: the same as a product has written them, (tokens, vocabulary); None where more was added.
    """

    values: Array
    made: Array | None = None


class LogitCotangents(NamedTuple):
    """What cotangents of logits z are: weights (exp(z - lse) (1 + steeper lse) - hit [label] - rest).

    Attributes:
        lse, weights: fp32 (tokens,). Where the weight is 0, so are cotangents.
        labels: int32 (tokens,), in the device's part of the vocabulary.
        steeper, hit, rest: numbers.
    """

    lse: Array
    labels: Array
    weights: Array
    steeper: float
    hit: float
    rest: float


def cotangent_bound(d: LogitCotangents, z: Array, label: Array, softcap: float | None) -> Array:
    """What no cotangent of the logits of any token exceeds, fp32 scalar.

    The softmax of all entries but the label's is at most 1 less that of the label. Without smoothing, z-loss or a cap
    the bound is the largest cotangent itself, that of a label.

    Args:
        d: what the cotangents are, before those of the cap.
        z: capped logits (..., vocabulary).
        label: the label's (...).
        softcap: the cap, or None.
    """
    label, z = label.reshape(-1), z.reshape(-1, z.shape[-1])
    steep, p = 1 + d.steeper * d.lse, jnp.exp(label - d.lse)
    others = jnp.maximum(jnp.abs(steep) * jnp.maximum(1 - p, 0.0), d.rest)
    of_label = jnp.abs(steep * p - d.hit - d.rest)
    if softcap is not None:
        others = others * (1 - (jnp.min(jnp.abs(z), axis=-1) / softcap) ** 2)
        of_label = of_label * (1 - (label / softcap) ** 2)
    bounds = jnp.maximum(others, of_label) * d.weights
    return scaling.largest_magnitude(jnp.where(d.weights == 0, 0.0, bounds))


def exponentials(logits: Logits, impl: str = "auto") -> tuple[Array, Array]:
    """The largest logit of each token, and the sum of exponentials of what all are below it, fp32 (...).

    Below what is not finite nothing is subtracted.
    """
    if logits.made is None:
        return _sums(logits.values)
    choice = tell("softmax of logits", triton_or_xla(impl, lambda: _unfit(logits.made)))
    lead = logits.values.shape[:-1]

    def kernel(_: Array, made: Array) -> tuple[Array, Array]:
        top, total = partitioned("exponentials", None, _exponentials, (made,), ("m -",), ("m", "m"))
        return top.reshape(lead), total.reshape(lead)

    result: tuple[Array, Array] = run(
        choice, impl, logits.values, logits.made, kernel=kernel, reference=lambda values, _: _sums(values)
    )
    return result


def _sums(z: Array) -> tuple[Array, Array]:
    top = jnp.max(z, axis=-1)
    return top, jnp.sum(jnp.exp(z - finite(top)[..., None]), axis=-1)


def finite(x: Array) -> Array:
    """0 where `x` is not."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def picked_of(made: Array, labels: Array) -> Array:
    """The logit of each token's label, fp32 (...); 0 of one outside of (tokens, vocabulary)."""
    size = made.shape[1]
    columns = jnp.where(labels < 0, size, labels).reshape(-1)
    picked = made.at[jnp.arange(made.shape[0]), columns].get(mode="fill", fill_value=0)
    return picked.astype(jnp.float32).reshape(labels.shape)


def _exponentials(_: Cut, z: Array) -> tuple[Array, Array]:
    from pallas_kernels import logits_triton

    return logits_triton.exponentials(z, compute_capability=capability())


def cotangent_codes(
    z: Array,
    d: Array,
    origin: LogitCotangents | None,
    rows: QuantSpec,
    columns: QuantSpec,
    scale: Array,
    impl: str = "auto",
) -> tuple[QTensor, QTensor]:
    """`quantize(d, rows, columns, scale=scale)` of logits' cotangents, which a kernel makes of logits as it does so.

    Args:
        z: logits (tokens, vocabulary). d: their cotangents, in the dtype of `z`.
        origin: what these are; None where that is not known.
        rows, columns: FP8 with one scale, to nearest; of `d`, and of its transposed copy.
        scale: fp32 scalar, for the format of `rows`.
    """
    specs = rows, columns
    plain = Choice("xla", "more than a product made them")
    choice = plain if origin is None else triton_or_xla(impl, functools.partial(_unfit, z, specs))
    tell("cotangents of logits", choice)
    wide = [scaling.usable(scaling.for_format(scale, *(formats.get(s.format) for s in (rows, spec)))) for spec in specs]
    scales = [encoding.stored(s.reshape(1, 1), spec, given=True) for s, spec in zip(wide, specs, strict=True)]

    def reference(_: Array, d: Array, *__: Any) -> tuple[QTensor, QTensor]:
        first, second = quantize(d, rows, SAME if rows == columns else columns, scale=scale)
        assert first is not None
        assert second is not None
        return first, second

    def kernel(z: Array, _: Array, *operands: Array) -> tuple[QTensor, QTensor]:
        assert origin is not None
        static = tuple(map(fused.coding, specs)), origin[3:]
        ins = ("m -", "m", "m", "m", "- -", "- -")
        make = functools.partial(_cotangents, *static)
        made = partitioned("cotangents", (static, z.shape), make, (z, *operands), ins, ("m -", "- m"))
        first, second = (
            QTensor(codes, own, None, None, spec) for codes, own, spec in zip(made, operands[-2:], specs, strict=True)
        )
        return first, second

    known = () if origin is None else (*origin[:3], *scales)
    result: tuple[QTensor, QTensor] = run(choice, impl, z, d, *known, kernel=kernel, reference=reference)
    return result


def _cotangents(codings: Any, numbers: Any, _: Cut, z: Array, *operands: Array) -> tuple[Array, Array]:
    from pallas_kernels import logits_triton

    lse, labels, weights, *scales = operands
    how: Any = dict(zip(("rows", "columns", "steeper", "hit", "rest"), (*codings, *numbers), strict=True))
    return logits_triton.cotangent_codes(z, lse, labels, weights, scales=scales, **how, compute_capability=capability())


def _unfit(z: Any, specs: tuple[QuantSpec, ...] = ()) -> str | None:
    reason = missing_triton("logits_triton")
    if reason is None:
        from pallas_kernels import quantize_triton

        reason = quantize_triton.unsupported(z.shape, z.dtype, tuple(map(fused.coding, specs)))
    return reason
