"""The cross-entropy of a linear head, whose logits are never whole: tokens are taken a chunk at a time.

Of 16,384 tokens and a vocabulary of 128,256, logits in fp32 take 8.4 GB, and their cotangents as much. A loss that is
one number has its gradients computed in the forward pass, chunk by chunk, as in Liger Kernel (arXiv 2410.10989, section
3.2), so that three products are all that the head takes; where each token has a loss, logits are computed again.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import derivatives, scaling
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.ops import targets
from fp8jax.ops.choice import vary_with
from fp8jax.ops.chunks import TokenChunks
from fp8jax.ops.cuts import WHOLE, Cut
from fp8jax.ops.head import CODES_CUTS, Codes, beyond, codes_of, has_codes, head_of, logits_of, shape_of, steepest
from fp8jax.ops.linear import stateless
from fp8jax.ops.logits import LogitCotangents, Logits, cotangent_bound, exponentials, finite, picked_of
from fp8jax.ops.partition import partitioned
from fp8jax.ops.sharding import explicit_mesh, place, spec_of
from fp8jax.recipes import linear_part, resolve


@dataclasses.dataclass(frozen=True)
class _Loss:
    """What a token's loss is of its logits, and what multiplies."""

    softcap: float | None
    label_smoothing: float
    z_loss: float
    vocabulary_axis: int
    tokens_per_chunk: int | None
    part: Linear | None


def linear_cross_entropy(
    x: Array,
    w: Array,
    labels: Array,
    *,
    bias: Array | None = None,
    where: Array | None = None,
    ignore_label: int | None = targets.IGNORED,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    vocabulary_axis: int = -1,
    tokens_per_chunk: int | None = None,
    recipe: Recipe | Linear | str | None = None,
    key: Array | None = None,
) -> Array:
    """The softmax cross-entropy of `x @ w + bias` with integer labels, without the logits of all tokens in memory.

    Logits, their softmax and the loss are fp32. Products take `w` in the dtype of `x`; the gradient of `w` is summed
    over chunks in fp32. A token's loss is

        lse - (1 - label_smoothing) z[label] - label_smoothing mean(z) + z_loss lse^2,    lse = logsumexp(z),

    where z is the logit, or softcap tanh(logit / softcap). Smoothing is optax's, the term in lse^2 PaLM's (arXiv
    2204.02311, section 5), the cap Gemma 2's (arXiv 2408.00118, section 2).

    Args:
        x: (..., channels), what the head reads; at least two axes.
        w: (channels, vocabulary); with `vocabulary_axis=0` (vocabulary, channels), as an embedding's table is. Where a
            mesh cuts the vocabulary, each device computes its own part of the logits; channels are gathered once.
        labels: (...), integers of any dtype in [0, vocabulary), or `ignore_label`. The loss of any other label that
            counts is NaN, whatever the recipe and the mesh: it is not taken for an ignored one, and no entry of the
            vocabulary is put in its place. Under `jax.experimental.checkify`, with `user_checks`, an error names it.
        bias: (vocabulary,).
        where: bool (...), the tokens that count; None counts all. What the others hold, NaN too, has no effect.
        ignore_label: tokens with this label do not count, either; by default -100, as in PyTorch and in Hugging Face's
            data sets. None ignores no label, nor does one that the dtype of `labels` cannot hold.
        softcap: above 0.
        label_smoothing: in [0, 1].
        z_loss: at least 0.
        reduction: "mean" over the tokens that count (0 if none does), "sum", or "none".
        tokens_per_chunk: tokens of a device whose logits are there at once; None takes as many as have 1.5 GiB of
            logits and their cotangents, with a recipe of codes 2 GiB and 8,192 at the most; but no more than 16 chunks.
        recipe: the head's products follow it: a part `Linear`, such as `fp8jax.recipes.HEAD`, or a recipe's part `head`
            if that is quantized, else `linear`; None multiplies in the dtype of `x`. Where operands have one FP8 scale
            each, all chunks have the same, and logits are rounded to the dtype of `x`; else each chunk has its own.
            Heads in 8 bits cost accuracy: errors of logits are 3 % of their spread, of which the loss is a little above
            that of the same model in 16 bits.
        key: PRNG key for recipes that round stochastically.

    Returns:
        fp32, () or, for "none", (...); 0 where a token does not count. Gradients go to `x`, `w` and `bias`.

    Raises:
        ValueError: shapes do not match, or an argument is out of its range.
        TypeError: labels are no integers, or `x` and `w` no floats.
    """
    targets.check(x, w, labels, bias, where, vocabulary_axis)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}; None caps nothing")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"z_loss must be at least 0, got {z_loss}")
    if tokens_per_chunk is not None and tokens_per_chunk < 1:
        raise ValueError(f"tokens_per_chunk must be at least 1, got {tokens_per_chunk}")
    if isinstance(resolved := recipe if recipe is None else resolve(recipe), Recipe) and resolved.head.quantized:
        recipe = resolved.head
    part = None if recipe is None or not linear_part(recipe).quantized else stateless(recipe)
    if part is not None and not has_codes(part) and explicit_mesh(x, w) is not None:
        raise ValueError(
            "on a mesh with Explicit axes the head takes a recipe whose operands have one FP8 scale each, such as "
            "'te_current', or none: give recipe=None, or Auto axes"
        )
    loss = _Loss(softcap, label_smoothing, z_loss, vocabulary_axis % 2, tokens_per_chunk, part)
    counts = jnp.ones(labels.shape, bool) if where is None else where
    if ignore_label is not None:
        counts = counts & ~targets.ignored(labels, ignore_label)
    if where is not None or ignore_label is not None:
        x = jnp.where(counts[..., None], x, 0)  # NaN times a weight of 0 would be NaN in the gradient of `w`.
    if not labels.size:
        return jnp.zeros(labels.shape if reduction == "none" else (), jnp.float32)
    vocabulary = w.shape[loss.vocabulary_axis]
    targets.check_labels(labels, counts, vocabulary)
    labels = targets.entries(labels, vocabulary)
    x, w, bias = vary_with((x, w, bias), x, w, bias, labels, counts)
    token = derivatives.token(derivatives.named(f"linear_cross_entropy of {x.shape} and {w.shape}"), x, w, bias)
    if reduction == "none":
        return _each(loss, x, w, bias, key, labels, counts, token)
    weights = counts.astype(jnp.float32)
    total = jnp.maximum(jnp.sum(weights), 1.0) if reduction == "mean" else jnp.float32(1)
    if x.dtype == jnp.float16:
        # Gradients of a mean over many tokens are below the smallest fp16: they are divided when they are scaled.
        return _sum(loss, x, w, bias, key, labels, weights, token) / total
    return _sum(loss, x, w, bias, key, labels, weights / total, token)


class _Softmax(NamedTuple):
    """Parts of the loss that its gradient needs: capped logits and whether each is the label's, and logsumexp.

    `label` is the label's logit; `own` are labels in the device's part of the vocabulary; `made` says that logits are
    as a product made them.
    """

    z: Array
    hit: Array
    lse: Array
    label: Array
    known: Array
    own: Array
    made: bool


def _values(loss: _Loss, cut: Cut, logits: Logits, labels: Array) -> tuple[Array, _Softmax]:
    """The loss of each token, (...), of logits (..., a device's part of the vocabulary)."""
    if loss.softcap is not None:
        logits = Logits(loss.softcap * jnp.tanh(logits.values / loss.softcap))
    z, (largest, total) = logits.values, exponentials(logits)
    top = finite(cut.maximum(largest, "v"))
    lse = top + jnp.log(cut.total(total * jnp.exp(jnp.minimum(finite(largest) - top, 0.0)), "v"))
    first, vocabulary = cut.start("v", z.shape[-1]), z.shape[-1] * cut.devices("v")
    own = labels - first
    hit = own[..., None] == lax.broadcasted_iota(labels.dtype, z.shape, z.ndim - 1)
    at_label = jnp.sum(jnp.where(hit, z, 0.0), axis=-1) if logits.made is None else picked_of(logits.made, own)
    picked = (1 - loss.label_smoothing) * at_label
    if loss.label_smoothing:
        picked = picked + loss.label_smoothing / vocabulary * jnp.sum(z, axis=-1)
    value = lse - cut.total(picked, "v")
    if loss.z_loss:
        value = value + loss.z_loss * lse**2
    known = (labels >= 0) & (labels < vocabulary)
    label = cut.total(at_label, "v")
    return jnp.where(known, value, jnp.nan), _Softmax(z, hit, lse, label, known, own, logits.made is not None)


def _logit_cotangents(loss: _Loss, cut: Cut, parts: _Softmax, weights: Array) -> Array:
    """The gradient with respect to logits of the sum of `weights` times the losses; 0 where the weight is."""
    z, hit, lse, *_ = parts
    d = jnp.exp(z - lse[..., None])
    if loss.z_loss:
        d = d * (1 + 2 * loss.z_loss * lse)[..., None]
    d = d - jnp.where(hit, 1 - loss.label_smoothing, 0.0)
    if loss.label_smoothing:
        d = d - loss.label_smoothing / (z.shape[-1] * cut.devices("v"))
    if loss.softcap is not None:
        d = d * (1 - (z / loss.softcap) ** 2)
    weights = _weights(parts, weights)[..., None]
    return jnp.where(weights == 0, 0.0, d * weights)


def _weights(parts: _Softmax, weights: Array) -> Array:
    """NaN where a label that counts is none."""
    return jnp.where(parts.known | (weights == 0), weights, jnp.nan)


def _origin(loss: _Loss, cut: Cut, parts: _Softmax, weights: Array) -> LogitCotangents | None:
    """What `_logit_cotangents` are of logits as a product made them."""
    return _described(loss, cut, parts, weights) if parts.made else None


def _described(loss: _Loss, cut: Cut, parts: _Softmax, weights: Array) -> LogitCotangents:
    """What `_logit_cotangents` are, before the cap."""
    rest = loss.label_smoothing / (parts.z.shape[-1] * int(cut.devices("v")))
    lse, labels, weights = (x.reshape(-1) for x in (parts.lse, parts.own, _weights(parts, weights)))
    return LogitCotangents(lse, labels.astype(jnp.int32), weights, 2 * loss.z_loss, 1 - loss.label_smoothing, rest)


def _cut(loss: _Loss, function: Any, outs: Any, x: Array, w: Array, bias: Array | None, *rest: Array | None) -> Any:
    """`function(cut, *operands)` of a device's tokens and vocabulary; operations of linear layers cut themselves."""
    if loss.part is not None and not has_codes(loss.part):
        return function(WHOLE, x, w, bias, *rest)
    weight: Any = _WEIGHT[loss.vocabulary_axis]
    operand: Array | Codes = w
    if loss.part is not None:
        weight, vocabulary = CODES_CUTS, w.shape[loss.vocabulary_axis]
        largest = None
        if len(rest) > 2:
            assert rest[2] is not None
            largest = scaling.largest_magnitude(rest[2]) * steepest(vocabulary, loss.softcap, loss.z_loss)
        operand = codes_of(x, w, loss.vocabulary_axis, loss.part, largest)
    tokens = _tokens(x)
    ins = (f"{tokens} -", weight, "v", *[tokens if a is not None else "" for a in rest])
    operands = (x, operand, bias, *rest)
    name = f"linear_cross_entropy_{function.func.__name__}"
    return vary_with(partitioned(name, loss, function, operands, ins, outs, kernel=False), operands)


_WEIGHT = ("v -", "- v")


def _tokens(x: Array) -> str:
    return " ".join(f"t{i}" for i in range(x.ndim - 1))


def _chunks(loss: _Loss, x: Array, shape: tuple[int, ...]) -> TokenChunks:
    return TokenChunks.of(x, shape[loss.vocabulary_axis], has_codes(loss.part), loss.tokens_per_chunk)


def _losses(
    loss: _Loss, cut: Cut, x: Array, w: Array | Codes, bias: Array | None, key: Array | None, labels: Array
) -> Array:
    """The loss of each token, (...)."""
    head = head_of(w, loss.vocabulary_axis, loss.part, key, x.dtype)
    chunks = _chunks(loss, x, shape_of(w, loss.vocabulary_axis))

    def chunk(operands: tuple[Array, Array]) -> Array:
        return _values(loss, cut, logits_of(head, operands[0], bias)[0], operands[1])[0]

    return chunks.joined(lax.map(chunk, (chunks.cut(x), chunks.cut(labels))))


class _Gradients(NamedTuple):
    """The weighted sum of the losses, and its gradients with respect to what the head reads, its weight, its bias."""

    total: Array
    x: Array
    w: Array
    bias: Array | None


def _gradients(
    loss: _Loss,
    cut: Cut,
    x: Array,
    w: Array | Codes,
    bias: Array | None,
    key: Array | None,
    labels: Array,
    weights: Array,
) -> _Gradients:
    """Three products a chunk."""
    head, shape = head_of(w, loss.vocabulary_axis, loss.part, key, x.dtype), shape_of(w, loss.vocabulary_axis)
    chunks = _chunks(loss, x, shape)
    tokens = _tokens(x)

    def chunk(sums: Any, operands: Any) -> Any:
        x, labels, weights = operands
        logits, pull = logits_of(head, x, bias)
        values, parts = _values(loss, cut, logits, labels)
        d = _logit_cotangents(loss, cut, parts, weights)
        if isinstance(w, Codes):
            assert loss.part is not None
            described = _described(loss, cut, parts, weights)
            bound = cotangent_bound(described, parts.z, parts.label, loss.softcap)
            over = w.chunk_factor(loss.part, bound)
            if loss.z_loss and loss.softcap is None:
                vocabulary = logits.values.shape[-1] * cut.devices("v")
                over = over * beyond(vocabulary, loss.z_loss, jnp.where(weights == 0, 0.0, parts.lse))
            origin = _origin(loss, cut, parts, weights / over)
            dx, dw = (over * part.astype(jnp.float32) for part in pull(d / over, origin))
        else:
            dx, dw = pull(d, _origin(loss, cut, parts, weights))
        total, sum_w, sum_bias = sums
        if sum_bias is not None:
            sum_bias = sum_bias + jnp.sum(d, axis=tuple(range(d.ndim - 1)))
        return (total + _weighted(values, weights), sum_w + dw, sum_bias), dx.astype(x.dtype)

    zeros = (
        jnp.float32(0),
        jnp.zeros(shape, jnp.float32),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    zeros = vary_with(zeros, x, labels, weights)
    (total, dw, db), dx = lax.scan(chunk, zeros, tuple(map(chunks.cut, (x, labels, weights))))
    # Devices sum in the dtype of products, once; tokens that others have the rest of the vocabulary of, likewise.
    total, dx = cut.total(total, tokens), cut.total(chunks.joined(dx), "v")
    return _Gradients(total, dx, cut.total(dw.astype(x.dtype), tokens), None if db is None else cut.total(db, tokens))


def _weighted(values: Array, weights: Array) -> Array:
    return jnp.sum(jnp.where(weights == 0, 0.0, values * weights))


def _all_losses(loss: _Loss, x: Array, w: Array, bias: Array | None, key: Array | None, labels: Array) -> Array:
    return _cut(loss, functools.partial(_losses, loss), _tokens(x), x, w, bias, key, labels)  # type: ignore[no-any-return]


def _all_gradients(loss: _Loss, read: tuple[Array | None, ...], *operands: Any) -> _Gradients:
    """Gradients by operands; those by codes have no derivative by what is read."""
    x, w, bias, *rest = operands if loss.part is None else lax.stop_gradient(operands)
    outs = ("", f"{_tokens(x)} -", _WEIGHT[loss.vocabulary_axis], "v")
    total, *gradients = _cut(loss, functools.partial(_gradients, loss), outs, x, w, bias, *rest)
    placed: list[Any] = [
        g if g is None else place(g, spec_of(a), a) for g, a in zip(gradients, (x, w, bias), strict=True)
    ]
    result, name = _Gradients(total, *placed), f"linear_cross_entropy of {x.shape} and {w.shape}"
    return result if loss.part is None else derivatives.once(name, result, read)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(
    loss: _Loss, x: Array, w: Array, bias: Array | None, key: Array | None, labels: Array, weights: Array, _: Array
) -> Array:
    return _weighted(_all_losses(loss, x, w, bias, key, labels), weights)


def _sum_forward(loss: _Loss, x: Array, w: Array, bias: Array | None, *rest: Array | None) -> tuple[Array, Any]:
    gradients = _all_gradients(loss, rest[-1:], x, w, bias, *rest[:-1])
    return gradients.total, (gradients, _dtypes(x, w, bias))


def _sum_backward(loss: _Loss, residuals: Any, cotangent: Array) -> Any:
    gradients, dtypes = residuals
    return _cotangents(gradients, dtypes, cotangent)


def _dtypes(*arrays: Array | None) -> tuple[Array | None, ...]:
    """Empty arrays that carry the dtypes of cotangents to a backward pass."""
    return tuple(None if a is None else jnp.zeros((0,), a.dtype) for a in arrays)


def _cotangents(gradients: _Gradients, likes: Any, factor: Array | float) -> Any:
    """Of all operands; the gradients times a factor, in the dtypes of what they are gradients of."""
    scaled = [
        None if g is None else (g.astype(jnp.float32) * factor).astype(like.dtype)
        for g, like in zip(gradients[1:], likes, strict=True)
    ]
    return (*scaled, None, None, None, None)


_sum.defvjp(_sum_forward, _sum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(
    loss: _Loss, x: Array, w: Array, bias: Array | None, key: Array | None, labels: Array, counts: Array, _: Array
) -> Array:
    return jnp.where(counts, _all_losses(loss, x, w, bias, key, labels), 0.0)


def _each_forward(loss: _Loss, *operands: Array | None) -> Any:
    return _each(loss, *operands), operands


def _each_backward(loss: _Loss, residuals: Any, cotangents: Array) -> Any:
    x, w, bias, key, labels, counts, token = residuals
    weights = jnp.where(counts, cotangents, 0.0)
    gradients = _all_gradients(loss, (cotangents, token), x, w, bias, key, labels, weights)
    return _cotangents(gradients, _dtypes(x, w, bias), 1.0)


_each.defvjp(_each_forward, _each_backward)
