"""`Held`: parameters with their optimizer state, in arrays that a backward pass can hand out as cotangents."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fp8jax.optim import checks, fp8lm_adamw

# Integers travel as its bits: whatever converts these to a wider dtype and back leaves them as they are.
_BITS = jnp.float8_e4m3fn


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "stored", "count", "factor", "squares", "uses", "limits"],
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
        squares: sum of squares of the last step's gradients before they were clipped, fp32; of each layer, (layers,),
            where they are stacked.
        uses: how often the last call used these parameters, fp32 scalar: 1, or the result is NaN.
        limits: largest norms of gradients in the next step, like `squares`, or None: see `clipped`.
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
    limits: Array | None = None
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

    def clipped(self, max_norm: ArrayLike, norm: ArrayLike | None = None, *, before: ArrayLike | None = None) -> "Held":
        """These as the next step takes them, its gradients clipped by the global norm.

        By `norm` that is exact. By `before` each block, or each stacked layer, may have the share of `max_norm` that it
        had of the norm of the step before: where its norm doubles, that of all is taken to have doubled. One that had
        no gradients then, as none has before the first step, may have all of `max_norm`.

        Args:
            max_norm: largest global norm, positive.
            norm: of all gradients of the next step, from `gradient_norm`.
            before: of all gradients of the step before, from `updates_norm`, not of other steps; 0 before the first.

        Raises:
            TypeError: not one of `norm` and `before` is given.
            ValueError: `max_norm` is not positive.
        """
        if (norm is None) == (before is None):
            raise TypeError("clipped takes norm=, of the next step's gradients, or before=, of those of the last step")
        checks.positive("max_norm", max_norm)
        if norm is not None:
            return dataclasses.replace(self, factor=clip_factor(max_norm, norm), limits=None)
        limit, before = jnp.asarray(max_norm, jnp.float32), jnp.asarray(before, jnp.float32)
        # Of a norm that overflowed no share is known.
        known = (self.squares != 0) & jnp.isfinite(self.squares) & jnp.isfinite(before)
        share = jnp.sqrt(self.squares) / before
        limits = limit * jnp.where(known, jnp.minimum(share, 1.0), 1.0)
        return dataclasses.replace(self, factor=jnp.float32(1.0), limits=limits)

    def factor_of(self, squares: Array, layer: ArrayLike | None = None) -> Array:
        """What a step multiplies gradients by of which this is the sum of squares, fp32 scalar."""
        if self.limits is None:
            return self.factor
        return clip_factor(self.limits if layer is None else self.limits[layer], jnp.sqrt(squares))


def clip_factor(max_norm: ArrayLike, norm: ArrayLike) -> Array:
    """What gradients of a norm are multiplied by to be clipped, fp32 scalar."""
    norm = jnp.asarray(norm, jnp.float32)
    return jnp.where(norm <= max_norm, jnp.float32(1.0), max_norm / norm)


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
