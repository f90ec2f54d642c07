"""The loss of a batch, and means of losses and gradients over microbatches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import fp8jax
from experiments.models.llama import Llama, reshaped
from experiments.text import packing


def accumulate(one: Callable, model_state: nnx.State, parts: jax.Array) -> Any:
    """Applies `one` to equal microbatches. Returns fp32 means of losses and gradients, and maxima of statistics.

    Losses are a tree of scalars.
    """
    count = len(parts)

    def add(carry: Any, tokens_BxT: jax.Array) -> tuple[Any, None]:
        model_state, (losses, grads, statistics) = carry
        model_state, (one_losses, one_grads, one_statistics) = one(model_state, tokens_BxT)
        losses = jax.tree.map(lambda total, loss: total + loss / count, losses, one_losses)
        grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32) / count, grads, one_grads)
        return (model_state, (losses, grads, jax.tree.map(jnp.maximum, statistics, one_statistics))), None

    losses, grads, statistics = jax.eval_shape(one, model_state, parts[0])[1]
    zeros = losses, jax.tree.map(lambda g: g.update(dtype=jnp.float32), grads), statistics
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding), zeros)
    return jax.lax.scan(add, (model_state, start), parts)[0]


def cross_entropy(
    model: Llama,
    tokens_BxT: jax.Array,
    chunked: bool,
    axes: tuple[str, ...] | None = None,
    head: fp8jax.recipes.Linear | None = None,
) -> jax.Array:
    """Returns the mean cross-entropy over all tokens, or over the answers of packed rows.

    If `chunked`, logits are computed in chunks of tokens, by `head`. Inside `jax.shard_map`, the result is a device's
    part: its mean over `axes` is the loss of all, after a sum over the devices that share sequences.
    """
    tokens_BxT, answers_BxT, segments_BxT = packing.parts(tokens_BxT)
    segments_BxT = None if segments_BxT is None else segments_BxT[:, :-1]
    labels, boundary = tokens_BxT[:, 1:], model.boundary
    if model.around is not None or boundary is not None:
        # Wrappers of layers apply only to layers that are quantized individually.
        hidden = model.hidden if model.around is None else functools.partial(Llama.hidden, model)
        y = hidden(tokens_BxT[:, :-1], segments_BxT)
        y = y if chunked else model.logits(y)
        if boundary is None and not chunked:
            y = reshaped(y, *labels.shape, model.config.vocab)
    else:
        y = (model.hidden if chunked else model)(tokens_BxT[:, :-1], segments_BxT)
    labels = reshaped(labels, labels.size) if y.ndim == 2 else labels
    answers = None if answers_BxT is None else reshaped(answers_BxT[:, 1:] != 0, *labels.shape)
    alone = boundary is None and (answers is None or axes is None)
    count = total = labels.size if answers is None else jnp.sum(answers, dtype=jnp.float32)
    if answers is not None and axes is not None:
        total = jax.lax.pmean(count, axes)
    if boundary is not None:
        labels, answers = boundary.shard(labels), None if answers is None else boundary.shard(answers)
        count = labels.size if answers is None else jnp.sum(answers, dtype=jnp.float32)
    if chunked:
        w, axis = model.output
        mean = fp8jax.linear_cross_entropy(
            y, w, labels, where=answers, ignore_label=None, vocabulary_axis=axis, recipe=head
        )
        return mean if alone else mean * (count / jnp.maximum(total, 1))
    losses = optax.softmax_cross_entropy_with_integer_labels(y.astype(jnp.float32), labels)
    if answers is None:
        return losses.mean() if alone else losses.sum() / total
    return jnp.sum(losses * answers.astype(jnp.float32)) / jnp.maximum(total, 1)
