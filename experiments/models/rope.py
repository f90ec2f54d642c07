"""Rotary positions: tables of angles, Llama 3.1's scaling of frequencies, the rotation. Names as in llama.py."""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies for long contexts.

    A frequency with fewer than `low` periods in `original_length` positions is divided by `factor`. One with more than
    `high` periods is unchanged. Frequencies between are interpolated by their number of periods.

    Attributes:
        factor: divisor of low frequencies.
        low: number of periods up to which a frequency is divided.
        high: number of periods from which a frequency is unchanged.
        original_length: context length of pretraining.
    """

    factor: float
    low: float
    high: float
    original_length: int

    def validate(self) -> None:
        """Raises ValueError with the first invalid value."""
        if not self.factor > 0 or not 0 < self.low < self.high or self.original_length < 1:
            raise ValueError(f"rope_scaling needs factor > 0, 0 < low < high and original_length > 0, got {self}")

    def __call__(self, frequency_c: jax.Array) -> jax.Array:
        """Scales frequencies in radians per position."""
        num_periods = self.original_length * frequency_c / (2 * math.pi)
        stays = jnp.clip((num_periods - self.low) / (self.high - self.low), 0, 1)
        return frequency_c * (stays + (1 - stays) / self.factor)


def rope_tables(
    length: int, head_dim: int, theta: float, scaling: RopeScaling | None = None, start: jax.typing.ArrayLike = 0
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of rotary angles from position `start` on: two float32 arrays (length, head_dim / 2)."""
    frequency_c = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        frequency_c = scaling(frequency_c)
    angle_TxC = (start + jnp.arange(length)).astype(jnp.float32)[:, None] * frequency_c[None, :]
    return jnp.cos(angle_TxC), jnp.sin(angle_TxC)


def apply_rope(x_BxTxHxC: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array) -> jax.Array:
    """Rotates channel c against channel c + C/2 by the position's angle, in float32; returns the input's dtype."""
    first, second = jnp.split(x_BxTxHxC.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_TxC[None, :, None, :], sin_TxC[None, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxTxHxC.dtype)
