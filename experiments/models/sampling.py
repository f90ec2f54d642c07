"""Autoregressive sampling, with or without a cache of keys and values."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.models.llama import Cache, Llama


@dataclasses.dataclass(frozen=True)
class TokenChoice:
    """Sampling of a token from logits.

    Attributes:
        temperature: divisor of logits; 0 selects the largest logit.
        top_k: number of largest logits to sample from, plus ties with the last; 0 for all.
        top_p: total probability of the most probable tokens to sample from.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def validate(self) -> None:
        """Raises ValueError with the first invalid value."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 1, or 0 for all tokens, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def __call__(self, logits_BxV: jax.Array, key: jax.Array) -> jax.Array:
        """Returns a token for each row, int32 (B,)."""
        if self.temperature == 0:
            return jnp.argmax(logits_BxV, -1).astype(jnp.int32)
        logits_BxV = logits_BxV.astype(jnp.float32) / self.temperature
        vocab = logits_BxV.shape[-1]
        if 0 < self.top_k < vocab:
            least_Bx1 = jax.lax.top_k(logits_BxV, self.top_k)[0][:, -1:]
            logits_BxV = jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)
        if self.top_p < 1:
            sorted_BxV = -jnp.sort(-logits_BxV)
            share_BxV = jax.nn.softmax(sorted_BxV)
            # A token remains if the more probable ones have less than top_p.
            stays_BxV = jnp.cumsum(share_BxV, -1) - share_BxV < self.top_p
            least_Bx1 = jnp.min(jnp.where(stays_BxV, sorted_BxV, jnp.inf), -1, keepdims=True)
            logits_BxV = jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)
        return jax.random.categorical(key, logits_BxV).astype(jnp.int32)


def extend(
    model: Llama,
    prompt_BxT: np.ndarray,
    length: int,
    choice: TokenChoice | None = None,
    *,
    seed: int = 0,
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """Continues prompts of equal length with a cache of keys and values.

    Args:
        model: computes the logits.
        prompt_BxT: token ids, int; at least one per row.
        length: maximum number of tokens of prompt and continuation together.
        choice: sampling of tokens; None selects the most probable one.
        seed: the same seed gives the same text.
        stop: ids that end a text.

    Returns:
        Token ids of each row, with the prompt, up to and including the first id of `stop`.

    Raises:
        ValueError: a prompt is empty, too long or has invalid ids; the model has fewer positions than `length`; or
            `choice` is invalid.
    """
    choice, config = choice or TokenChoice(), model.config
    choice.validate()
    batch, start = prompt_BxT.shape
    if not 0 < start < length:
        raise ValueError(f"a prompt needs 1 to {length - 1} tokens (length - 1), got {start}")
    if 0 < config.learned_positions < length:
        raise ValueError(f"the model has {config.learned_positions} positions, not {length}; request fewer tokens")
    if prompt_BxT.min() < 0 or prompt_BxT.max() >= config.vocab:
        ids = f"{prompt_BxT.min()} to {prompt_BxT.max()}"
        raise ValueError(f"a prompt has ids from {ids}, but the model has ids from 0 to {config.vocab - 1}")
    graphdef, variables = nnx.split(model)
    # Only arrays: variables can only be set in the trace that created them, and the loop has another trace.
    arrays = nnx.to_pure_dict(variables)
    stops = jnp.asarray(list(stop) or [-1], jnp.int32)

    @jax.jit
    def run(arrays: Any, prompt_BxT: jax.Array, key: jax.Array) -> jax.Array:
        def step(tokens_BxT: jax.Array, cache: Cache, i: jax.Array) -> tuple[jax.Array, Cache]:
            logits_BxV, cache = nnx.merge(graphdef, arrays).extend(tokens_BxT, cache)
            return choice(logits_BxV, jax.random.fold_in(key, i)), cache

        def should_continue(carry: tuple[jax.Array, jax.Array, Cache]) -> jax.Array:
            texts_BxT, i, _ = carry
            written = (jnp.arange(length) >= start) & (jnp.arange(length) < i)
            ended_B = jnp.any(jnp.isin(texts_BxT, stops) & written, -1)
            return (i < length) & ~jnp.all(ended_B)

        def body(carry: tuple[jax.Array, jax.Array, Cache]) -> tuple[jax.Array, jax.Array, Cache]:
            texts_BxT, i, cache = carry
            last_Bx1 = jax.lax.dynamic_slice_in_dim(texts_BxT, i - 1, 1, 1)
            token_B, cache = step(last_Bx1, cache, i)
            return texts_BxT.at[:, i].set(token_B), i + 1, cache

        first_B, cache = step(prompt_BxT, nnx.merge(graphdef, arrays).cache(batch, length), jnp.int32(start))
        texts_BxT = jnp.zeros((batch, length), jnp.int32).at[:, :start].set(prompt_BxT).at[:, start].set(first_B)
        texts_BxT, i, _ = jax.lax.while_loop(should_continue, body, (texts_BxT, jnp.int32(start + 1), cache))
        return jnp.where(jnp.arange(length) < i, texts_BxT, -1)

    texts = np.asarray(run(arrays, jnp.asarray(prompt_BxT, jnp.int32), jax.random.key(seed)))
    return [_until(row[row >= 0].tolist(), start, frozenset(stop)) for row in texts]


def _until(ids: list[int], start: int, stop: frozenset[int]) -> list[int]:
    """Returns the ids up to and including the first one of `stop` from `start` on."""
    ends = [i for i, token in enumerate(ids) if i >= start and token in stop]
    return ids[: ends[0] + 1] if ends else ids


def sample(
    logits: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: Sequence[int],
    length: int,
    key: jax.Array,
    temperature: float = 0.8,
    where: jax.sharding.Sharding | None = None,
) -> list[int]:
    """Continues a prompt without a cache of keys and values.

    Each token runs the model over the whole buffer, which is fast enough for a short sample. Positions after the
    current one are zeros; causal attention ignores them.

    Args:
        logits: (params, tokens (1, length)) to logits (1, length, V).
        params: argument of `logits`.
        prompt: token ids; at least one.
        length: tokens of prompt and continuation together.
        key: a JAX key; the same key gives the same text.
        temperature: temperature of the softmax.
        where: sharding of the tokens that makes them readable in this process; None leaves it to XLA.

    Returns:
        `length` token ids, starting with the prompt.

    Raises:
        ValueError: the prompt is empty or too long.
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
