"""Scaling strategies: where the scale of a per-tensor quantized operand comes from.

A strategy is a part with explicit state: `init() -> state`, `scale(state, x, fmt)`, `update(state, largest) -> state`.
"Current" scaling is the quantizer's own: the largest magnitude of the tensor itself.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8jax.core import blocks
from fp8jax.core.formats import BF16, TINY, Format, round_to, where


def largest_magnitude(x: Array) -> Array:
    """Largest finite |x| of a tensor, fp32 scalar; 0 for an empty one or one without finite values."""
    magnitude = jnp.abs(x.astype(jnp.float32))
    return jnp.max(where(jnp.isfinite(magnitude), magnitude, 0.0), initial=0.0)


def to_scale(largest: Array, fmt: Format) -> Array:
    """The scale that takes a largest magnitude to the largest code; 1 where it is zero."""
    return jnp.where(largest > 0, jnp.maximum(largest * np.float32(1 / fmt.max), TINY), 1.0)


def usable(scale: Array) -> Array:
    """A given scale in fp32; subnormal ones, whose reciprocals are infinite, and 0 count as the smallest normal one."""
    return jnp.maximum(scale, np.float32(TINY))


# A sample is of rows, the first SAMPLE of each EVERY times as many; MARGIN is how far a bound looks beyond it.
SAMPLE, EVERY, MARGIN = 32, 16, 4.0


def largest_of_sample(x: Array, start: Array | int = 0) -> Array:
    """`largest_magnitude` of the rows that count as a sample; `start` is the first one's place in a larger matrix."""
    # Computed, for a constant would be kept for the backward pass under jax.checkpoint.
    sampled = (start + jnp.arange(x.shape[0])) // SAMPLE % EVERY == 0
    return largest_magnitude(where(sampled[:, None], x.astype(jnp.float32), 0.0))


def beyond_sample(sample: Array) -> Array:
    """How large a tensor is taken to be of which a sample's largest magnitude is known."""
    return jnp.minimum(MARGIN * sample, np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class TwoStage:
    """Group scaling (COAT, section 5.2 and figure 4): the maximum of a tensor from the maxima of its groups.

    The first stage belongs to the operation before, which writes one maximum a group along the last axis in bf16; the
    second reads only those. Rounding to bf16 is upwards here, so that no value saturates.

    Attributes:
        group_size: elements along the last axis that a first-stage maximum covers.
    """

    group_size: int = 16

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"TwoStage.group_size must be positive, not {self.group_size}")

    def init(self) -> tuple[()]:
        return ()

    def first(self, x: Array) -> Array:
        """Maxima of the groups, bf16, shape (..., groups)."""
        magnitude = jnp.abs(x.astype(jnp.float32))
        shape = (*[1] * (x.ndim - 1), self.group_size)
        maxima = blocks.reduce(where(jnp.isfinite(magnitude), magnitude, 0.0), shape, jnp.max, 0.0)
        rounded = round_to(maxima, BF16)
        return jnp.where(rounded.astype(jnp.float32) < maxima, _next_up(rounded), rounded)

    def scale(self, state: tuple[()], x: Array, fmt: Format) -> Array:
        """The scale of a tensor of at least one axis, fp32 scalar."""
        return to_scale(jnp.max(self.first(x), initial=0).astype(jnp.float32), fmt)

    def update(self, state: tuple[()], largest: Array) -> tuple[()]:
        return state


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Delayed scaling (Micikevicius et al., FP8 Formats for Deep Learning; Transformer Engine's default).

    The scale is that of the largest magnitude of the last steps, so that a tensor is quantized in one pass; a tensor
    that outgrows it saturates. Before the first update there is no history, and the tensor itself gives the scale.
    State: fp32 array (history,), newest first.

    Attributes:
        history: steps looked back on.
        margin: powers of two left above the largest magnitude.
    """

    history: int = 1024
    margin: int = 0

    def __post_init__(self) -> None:
        if self.history < 1:
            raise ValueError(f"Delayed.history must be positive, not {self.history}")

    def init(self) -> Array:
        return jnp.zeros((self.history,), jnp.float32)

    def scale(self, state: Array, x: Array, fmt: Format) -> Array:
        """The scale for a tensor, fp32 scalar."""
        past = jnp.max(state)
        return to_scale(jnp.where(past > 0, past, largest_magnitude(x)) * 2.0**self.margin, fmt)

    def update(self, state: Array, largest: Array) -> Array:
        """The history after a step in which the largest magnitude was `largest`; one that is not finite counts as 0.

        A maximum over microbatches and replicas is taken before: `largest` is the largest of the whole step.
        """
        largest = jnp.where(jnp.isfinite(largest), largest, 0.0).astype(jnp.float32)
        return jnp.concatenate([largest[None], state[:-1]])


def _next_up(x: Array) -> Array:
    bits = jnp.asarray(x.view(jnp.uint16) + 1, jnp.uint16)
    return bits.view(jnp.bfloat16)
