"""The largest change of a weight in one step of Adam."""

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fp8jax.optim import checks

ScalarOrSchedule: TypeAlias = float | Array | optax.Schedule

# The relative error of an update by bias correction in fp32: 1 - 0.999 is off by 3e-5.
_ROUNDING_MARGIN = 1.001
# A fused step clips directions at this margin. It is above the error of bias correction, and below the limit of updates
# by more than the rounding of decay, rate and sum.
_CLIP_MARGIN = 1.0005


def max_adam_step(
    learning_rate: ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999, weight_decay: float | Array = 0.0
) -> "MaxAdamStep":
    r"""The largest change of a weight in one step of Adam or AdamW, for any gradients: a limit for `track_weight_amax`.

    With m_t = (1 - b1) sum b1^i g_{t-i}, v_t = (1 - b2) sum b2^i g_{t-i}^2, and r = b1^2 / b2, the Cauchy-Schwarz
    inequality gives m_t^2 <= v_t (1 - b1)^2 / (1 - b2) (1 - r^t) / (1 - r). So a step is at most lr times

        C_t = (1 - b1) / sqrt(1 - b2) sqrt((1 - r^t) / (1 - r)) sqrt(1 - b2^t) / (1 - b1^t).

    Gradients that grow as (b2 / b1)^i reach it: 1 in the first step, and in the limit 1.17 for b2 = 0.95, 7.27 for
    0.999. MOSS assumes |m / sqrt(v)| <= 1 (theorem 2), which holds only for b1 = b2. A positive `eps` and clipped
    gradients make steps smaller. Weight decay adds lr * weight_decay * |w|.

    Args:
        learning_rate: step size, or the schedule of the optimizer.
        b1, b2, weight_decay: the optimizer's. Its mask of parameters without decay is not needed.

    Raises:
        ValueError: b1^2 >= b2, where a step can be of any size; or a decay outside [0, 1).
    """
    checks.check_learning_rate(learning_rate)
    for name, value, high in (("b1", b1, 1), ("b2", b2, 1), ("weight_decay", weight_decay, np.inf)):
        checks.check_number(name, value, 0, high)
    if isinstance(b1, jax.core.Tracer) or isinstance(b2, jax.core.Tracer):
        raise ValueError(
            "the limit of Adam needs b1 and b2 that stay as they are, not traced ones: name both in static_args of "
            "optax.inject_hyperparams"
        )
    if b1 > 0 and b1 * b1 >= b2:
        raise ValueError(
            f"with b1={b1} and b2={b2} one step of Adam can be of any size, for b1^2 >= b2: leave out the limit, and "
            "track_weight_amax measures updates"
        )
    return MaxAdamStep(learning_rate, b1, b2, weight_decay)


@dataclasses.dataclass(frozen=True, eq=False)
class MaxAdamStep:
    """The limit of `max_adam_step`, with its arguments."""

    learning_rate: ScalarOrSchedule
    b1: float
    b2: float
    weight_decay: float | Array

    def max_direction(self, count: Array) -> Array:
        """The longest direction of Adam's step after `count` others, before rate and decay."""
        return _CLIP_MARGIN * self._max_ratio(count)

    def __call__(self, count: Array, bounds: Array) -> Array:
        """The largest magnitude of updates after `count` steps, of weights within bounds."""
        rate = self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate
        decay = self.weight_decay * bounds
        return jnp.abs(rate) * (_ROUNDING_MARGIN * self._max_ratio(count) + _ROUNDING_MARGIN * decay)

    def _max_ratio(self, count: Array) -> Array:
        """C_t of step t = count + 1."""
        shrinks = [0.0 if self.b1 == 0 else self.b1 * self.b1 / self.b2, self.b2, self.b1]
        logs = [np.float32(np.log(x)) if x > 0 else -np.float32(np.inf) for x in shrinks]
        steady = (1 - self.b1) / np.sqrt((1 - self.b2) * (1 - shrinks[0]))
        r, v, m = (-jnp.expm1((count + 1).astype(jnp.float32) * log) for log in logs)
        return np.float32(steady) * jnp.sqrt(r * v) / m
