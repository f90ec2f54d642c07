"""`Held`: parameters with their optimizer state, in arrays that a backward pass can hand out as cotangents."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fp8jax.optim import fp8lm_adamw

# Integers travel as its bits: whatever converts these to a wider dtype and back leaves them as they are.
_BITS = jnp.float8_e4m3fn


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "stored", "count", "factor", "squares", "uses"],
    meta_fields=["dtypes", "name", "layers", "measured"],
)
@dataclasses.dataclass(frozen=True)
class Held:
    """Parameters with their optimizer state, as a released block takes them.

    All leaves are arrays of floating dtypes, because `value_and_updates` gets the new ones as cotangents of the old.

    Attributes:
        params: tree of parameters; of `Released.scan`, layers stacked along the first axes.
        stored: the optimizer's state without its count, integers as bits of e4m3: see `state`.
        count: steps taken, fp32 scalar, exact up to 2^24.
        factor: what the next step multiplies gradients by, fp32 scalar: see `clipped`.
        squares: sum of squares of the last step's gradients, fp32 scalar, before `factor`.
        uses: how often the last call used these parameters, fp32 scalar: 1, or the result is NaN.
        dtypes: of the arrays of the state, in their order.
        name: path of the parameters in a whole tree, on which noise of stochastic rounding depends.
        layers: how many layers are stacked; None where none are.
        measured: whether the backward pass takes squares alone, and no step.
    """

    params: Any
    stored: Any
    count: Array
    factor: Array
    squares: Array
    uses: Array
    dtypes: tuple[str, ...] = ()
    name: str = ""
    layers: int | None = None
    measured: bool = False

    @property
    def state(self) -> Any:
        """The state as that of the optimizer itself, for checkpoints and for steps outside of the backward pass."""
        return natural(self.stored, self.dtypes, self.count)

    @property
    def mu(self) -> Any:
        """First moments, as the optimizer has them."""
        return self.state.mu

    @property
    def nu(self) -> Any:
        """Second moments, likewise."""
        return self.state.nu

    def clipped(self, max_norm: ArrayLike, norm: ArrayLike) -> "Held":
        """These with the factor that clips gradients of this global norm.

        Args:
            max_norm: largest global norm, positive.
            norm: of all gradients: of this step, from `gradient_norm`, or as it was in the step before.
        """
        norm = jnp.asarray(norm, jnp.float32)
        return dataclasses.replace(self, factor=jnp.where(norm < max_norm, jnp.float32(1.0), max_norm / norm))


def dtypes_of(state: Any) -> tuple[str, ...]:
    """The dtypes of a state's arrays but the count."""
    return tuple(str(x.dtype) for x in jax.tree.leaves(state._replace(count=None)))


def carried(state: Any) -> Any:
    """A state without its count, integers as bits of a floating dtype; axes of layers first."""
    state = state._replace(count=None)
    if fp8lm_adamw.is_state(state):  # maxima of arrays are stacked along their first axis
        state = state._replace(largest=jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), state.largest))
    # Two bytes are two of them, along one more axis.
    integer = lambda x: jnp.issubdtype(x.dtype, jnp.integer)  # noqa: E731
    return jax.tree.map(lambda x: lax.bitcast_convert_type(x, _BITS) if integer(x) else x, state)


def natural(stored: Any, dtypes: tuple[str, ...], count: ArrayLike) -> Any:
    """The state that `carried` was given, with a count."""
    leaves, structure = jax.tree.flatten(stored)
    values = [
        x if str(x.dtype) == kind else lax.bitcast_convert_type(x, kind) for x, kind in zip(leaves, dtypes, strict=True)
    ]
    state = jax.tree.unflatten(structure, values)
    if fp8lm_adamw.is_state(state):
        state = state._replace(largest=jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), state.largest))
    return state._replace(count=jnp.asarray(count).astype(jnp.int32))
