"""Log-probabilities of tokens under a causal model.

Names have shape suffixes: N sequences, T positions, V vocabulary. The model processes one sequence at a time. Scales of
an 8-bit model then do not span sequences, and scores do not depend on other sequences.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Model = Callable[[Any, jax.Array], jax.Array]
Scorer = Callable[[Any, jax.Array], jax.Array]

# Sequences per call of the compiled program.
ROWS = 4


class Windows(NamedTuple):
    """Sequences from a text, and a mask of the targets that count.

    Attributes:
        tokens_NxT: int32 (N, T + 1); position t is the input of target t + 1.
        counts_NxT: bool (N, T): targets that no earlier window has scored.
    """

    tokens_NxT: np.ndarray
    counts_NxT: np.ndarray


class Score(NamedTuple):
    """Negative log-likelihood of a text, in nats, and its number of tokens."""

    nll: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def score_sequences(model: Model) -> Scorer:
    """Compiles a function from parameters and tokens (N, T + 1) to fp32 log-probabilities of the targets (N, T).

    Args:
        model: maps parameters and tokens (1, T) to logits (1, T, V).
    """

    def row(params: Any, tokens_T: jax.Array) -> jax.Array:
        return _pick(model(params, tokens_T[None, :-1])[0], tokens_T[1:])

    return jax.jit(lambda params, tokens_NxT: jax.lax.map(lambda tokens_T: row(params, tokens_T), tokens_NxT))


def _pick(logits: jax.Array, targets: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]


def run(scorer: Scorer, params: Any, tokens_NxT: np.ndarray, rows: int = ROWS) -> np.ndarray:
    """Returns log-probabilities (N, T) of any number of sequences, with `rows` per call."""
    parts = []
    for start in range(0, len(tokens_NxT), rows):
        part = tokens_NxT[start : start + rows]
        full = np.resize(part, (rows, part.shape[1]))
        parts.append(np.asarray(scorer(params, jnp.asarray(full, jnp.int32)))[: len(part)])
    return np.concatenate(parts)


def cut(tokens: np.ndarray, length: int) -> Windows:
    """Returns windows of a text in which each token except the first counts once as a target.

    The last window overlaps the previous one to be full. A text shorter than a window is repeated.

    Args:
        tokens: 1-D, at least two.
        length: T, targets per window.

    Raises:
        ValueError: fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError("a text needs at least two tokens: a first one, and one to score")
    if len(tokens) <= length:
        counts = np.arange(length) < len(tokens) - 1
        return Windows(np.resize(tokens, (1, length + 1)).astype(np.int32), counts[None])
    ends = [*range(length, len(tokens) - 1, length), len(tokens) - 1]
    sequences = np.stack([tokens[end - length : end + 1] for end in ends]).astype(np.int32)
    counts_NxT = np.ones((len(ends), length), bool)
    fresh = len(tokens) - 1 - (ends[-2] if len(ends) > 1 else 0)
    counts_NxT[-1, : length - fresh] = False
    return Windows(sequences, counts_NxT)


def score_text(scorer: Scorer, params: Any, windows: Windows) -> Score:
    """Sums the counted targets in float64."""
    log_NxT = run(scorer, params, windows.tokens_NxT).astype(np.float64)
    return Score(-float(log_NxT[windows.counts_NxT].sum()), int(windows.counts_NxT.sum()))
