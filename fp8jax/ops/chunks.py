"""How the tokens that a head reads are cut in chunks, of one of which at a time there are logits."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

# Of logits and their cotangents, in fp32 and 16 bits, and, of a head of codes, both in 16: fewer and larger chunks, as
# its products take less of the time that each chunk's addition to the weight's gradient takes.
CHUNK_BYTES, QUANTIZED_CHUNK_BYTES = 3 * 2**29, 2**31
MAX_CHUNKS = 16  # each adds to the weight's gradient, a pass over it
QUANTIZED_CHUNK_TOKENS = 8192  # tokens of a head of codes: with more, measured, it is no faster
TILE = 128  # tokens of which a product computes no part


def num_chunks(tokens: int, vocabulary: int, is_quantized: bool) -> int:
    """How many chunks the tokens of a device are taken in; `coded` heads have logits in 16 bits.

    A quarter more than would do, where chunks then are of whole tiles.
    """
    bytes_per_logit, chunk_bytes = (4, QUANTIZED_CHUNK_BYTES) if is_quantized else (6, CHUNK_BYTES)
    number = -(-bytes_per_logit * tokens * vocabulary // chunk_bytes)
    number = min(max(number, -(-tokens // QUANTIZED_CHUNK_TOKENS) if is_quantized else 1), MAX_CHUNKS)
    candidates = range(number, min(number * 5 // 4, MAX_CHUNKS) + 1)
    return next((n for n in candidates if tokens % (TILE * n) == 0), number)


class TokenChunks(NamedTuple):
    """How an axis of tokens is cut in so many chunks."""

    axis: int
    size: int
    number: int

    @staticmethod
    def from_array(x: Array, vocabulary: int, is_quantized: bool, tokens_per_chunk: int | None) -> "TokenChunks":
        """Of (..., channels) along its longest axis of tokens, by a given number of them or as `chunks_of` says."""
        tokens = x.size // x.shape[-1]
        axis = max(range(x.ndim - 1), key=lambda i: (x.shape[i], i))
        number = (
            num_chunks(tokens, vocabulary, is_quantized) if tokens_per_chunk is None else -(-tokens // tokens_per_chunk)
        )
        return TokenChunks(axis, x.shape[axis], min(number, x.shape[axis]))

    def split(self, x: Array) -> Array:
        """(chunks, ...) of (...); what fills the last rows up is 0. Every `number`-th token is in one chunk."""
        padding = -self.size % self.number
        if padding:
            x = jnp.pad(x, [(0, padding if i == self.axis else 0) for i in range(x.ndim)])
        shape = (*x.shape[: self.axis], (self.size + padding) // self.number, self.number, *x.shape[self.axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), self.axis + 1, 0)

    def merge(self, x: Array) -> Array:
        """The inverse of `cut`."""
        x = jnp.moveaxis(x, 0, self.axis + 1)
        x = x.reshape(*x.shape[: self.axis], -1, *x.shape[self.axis + 2 :])
        return lax.slice_in_dim(x, 0, self.size, axis=self.axis)
