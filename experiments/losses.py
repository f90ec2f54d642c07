"""The loss of a batch, and means of losses and gradients over parts of one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import fp8jax
from experiments import packing
from experiments.models.llama import Llama, reshaped


def accumulate(one: Callable, noted: nnx.State, parts: jax.Array) -> Any:
    """`one` on equal parts of a batch: means of losses and gradients in fp32, maxima of the gradients' statistics."""
    count = len(parts)

    def add(carry: Any, tokens_BxT: jax.Array) -> tuple[Any, None]:
        noted, (loss, grads, seen) = carry
        noted, (one_loss, one_grads, one_seen) = one(noted, tokens_BxT)
        grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32) / count, grads, one_grads)
        return (noted, (loss + one_loss / count, grads, jax.tree.map(jnp.maximum, seen, one_seen))), None

    loss, grads, seen = jax.eval_shape(one, noted, parts[0])[1]
    zeros = loss, jax.tree.map(lambda g: g.update(dtype=jnp.float32), grads), seen
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding), zeros)
    return jax.lax.scan(add, (noted, start), parts)[0]


def cross_entropy(model: Llama, tokens_BxT: jax.Array, chunked: bool) -> jax.Array:
    """The mean over all tokens, of packed ones over answers; `chunked` never has the logits of all tokens."""
    tokens_BxT, answers_BxT, segments_BxT = packing.parts(tokens_BxT)
    segments_BxT = None if segments_BxT is None else segments_BxT[:, :-1]
    labels_BxT = tokens_BxT[:, 1:]
    if model.around is not None:
        # What is done around each layer is done to layers that are quantized each by itself.
        y = Llama.hidden(model, tokens_BxT[:, :-1], segments_BxT)
        y = y if chunked else reshaped(model.logits(y), *labels_BxT.shape, model.config.vocab)
    else:
        y = (model.hidden if chunked else model)(tokens_BxT[:, :-1], segments_BxT)
    if chunked:
        w, axis = model.output
        counts = None if answers_BxT is None else reshaped(answers_BxT[:, 1:] != 0, labels_BxT.size)
        labels = reshaped(labels_BxT, labels_BxT.size)
        return fp8jax.linear_cross_entropy(y, w, labels, where=counts, vocabulary_axis=axis)
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(y.astype(jnp.float32), labels_BxT)
    if answers_BxT is None:
        return losses_BxT.mean()
    weights_BxT = answers_BxT[:, 1:].astype(jnp.float32)
    return jnp.sum(losses_BxT * weights_BxT) / jnp.maximum(jnp.sum(weights_BxT), 1)
