"""Text from a trained model."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def sample(
    logits: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: Sequence[int],
    length: int,
    key: jax.Array,
    temperature: float = 0.8,
    where: jax.sharding.Sharding | None = None,
) -> list[int]:
    """Continues a prompt, one token after the other.

    Every token runs the model over the whole buffer: no cache of keys and values, which a sample of a few lines does
    not need. Positions after the current one hold zeros, which causal attention does not see.

    Args:
        logits: (params, tokens (1, length)) to logits (1, length, V).
        params: what `logits` takes.
        prompt: token ids; at least one.
        length: tokens of prompt and continuation together.
        key: a JAX key; the same key gives the same text.
        temperature: of the softmax.
        where: the tokens lie, so that this process can read them; None leaves it to XLA.

    Returns:
        `length` token ids, the prompt first.

    Raises:
        ValueError: the prompt is empty or leaves no room.
    """
    if not 0 < len(prompt) < length:
        raise ValueError(f"a prompt needs 1 to {length - 1} tokens (length - 1), got {len(prompt)}")
    start = jnp.zeros((1, length), jnp.int32).at[0, : len(prompt)].set(jnp.asarray(prompt, jnp.int32))

    @functools.partial(jax.jit, out_shardings=where)
    def run(params: Any, tokens_1xT: jax.Array, key: jax.Array) -> jax.Array:
        def body(i: jax.Array, tokens_1xT: jax.Array) -> jax.Array:
            logits_V = logits(params, tokens_1xT)[0, i - 1].astype(jnp.float32)
            token = jax.random.categorical(jax.random.fold_in(key, i), logits_V / temperature)
            return tokens_1xT.at[0, i].set(token.astype(jnp.int32))

        return jax.lax.fori_loop(len(prompt), length, body, tokens_1xT)

    return np.asarray(run(params, start, key))[0].tolist()
