"""`FusedBlockState`: parameters and their optimizer state, as arrays that a backward pass returns as cotangents."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fp8jax.optim import checks, fp8lm_adamw

# Integers are stored as bits of this dtype, which a conversion to a wider float and back preserves.
_BITS = jnp.float8_e4m3fn


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "encoded_state", "count", "grad_scale", "squares", "uses", "max_norms"],
    meta_fields=["dtypes", "name", "num_layers", "norm_only"],
)
@dataclasses.dataclass(frozen=True)
class FusedBlockState:
    """Parameters with their optimizer state, as a block of `fused_backward` takes them.

    All leaves are arrays of floating dtypes, because `value_and_step` gets the new ones as cotangents of the old.

    Attributes:
        params: tree of parameters. For `FusedBackwardBlock.scan`, layers are stacked along the first axes.
        encoded_state: the optimizer's state without its count, integers as bits of e4m3: see `state`.
        count: steps taken, fp32 scalar, exact up to 2^24.
        grad_scale: factor of the gradients in the next step, fp32 scalar: see `with_clipping`.
        squares: sum of squares of the last step's gradients before clipping, fp32; of shape (layers,) if stacked.
        uses: how often the last call used these parameters, fp32 scalar: 1, or the result is NaN.
        max_norms: largest norms of gradients in the next step, shaped like `squares`, or None: see `with_clipping`.
        dtypes: dtypes of the state's arrays, in their order.
        name: path of the parameters in the whole tree, on which the noise of stochastic rounding depends.
        num_layers: number of stacked layers; None without a stack.
        norm_only: whether the backward pass only sums squares, and takes no step.
    """

    params: Any
    encoded_state: Any
    count: Array
    grad_scale: Array
    squares: Array
    uses: Array
    max_norms: Array | None = None
    dtypes: tuple[str, ...] = ()
    name: str = ""
    num_layers: int | None = None
    norm_only: bool = False

    @property
    def state(self) -> Any:
        """The state as the optimizer's own, for checkpoints and for steps outside of the backward pass."""
        return from_float_leaves(self.encoded_state, self.dtypes, self.count)

    @property
    def mu(self) -> Any:
        """First moments, as in the optimizer's state."""
        return self.state.mu

    @property
    def nu(self) -> Any:
        """Second moments, as in the optimizer's state."""
        return self.state.nu

    def with_clipping(
        self, max_norm: ArrayLike, norm: ArrayLike | None = None, *, previous_norm: ArrayLike | None = None
    ) -> "FusedBlockState":
        """The same for the next step, whose gradients are clipped by the global norm.

        Clipping by `norm` is exact. With `previous_norm`, the limit of each block or stacked layer is its share of
        `max_norm`: its own norm over that of all gradients, both of the last step. A block without gradients in the
        last step, as before the first one, may use all of `max_norm`.

        Args:
            max_norm: largest global norm, positive.
            norm: of all gradients of the next step, from `compute_grad_norm`.
            previous_norm: of all gradients of the last step, from `grad_norm_from_states`; 0 before the first.

        Raises:
            TypeError: not exactly one of `norm` and `previous_norm` is given.
            ValueError: `max_norm` is not positive.
        """
        if (norm is None) == (previous_norm is None):
            raise TypeError(
                "with_clipping takes norm=, of the next step's gradients, or previous_norm=, of those of the last step"
            )
        checks.check_positive("max_norm", max_norm)
        if norm is not None:
            return dataclasses.replace(self, grad_scale=clip_factor(max_norm, norm), max_norms=None)
        limit, previous_norm = jnp.asarray(max_norm, jnp.float32), jnp.asarray(previous_norm, jnp.float32)
        # A norm that overflowed gives no share.
        is_known = (self.squares != 0) & jnp.isfinite(self.squares) & jnp.isfinite(previous_norm)
        share = jnp.sqrt(self.squares) / previous_norm
        limits = limit * jnp.where(is_known, jnp.minimum(share, 1.0), 1.0)
        return dataclasses.replace(self, grad_scale=jnp.float32(1.0), max_norms=limits)

    def get_grad_scale(self, square_sum: Array, layer: ArrayLike | None = None) -> Array:
        """The factor of gradients with this sum of squares in a step, fp32 scalar."""
        if self.max_norms is None:
            return self.grad_scale
        return clip_factor(self.max_norms if layer is None else self.max_norms[layer], jnp.sqrt(square_sum))


def clip_factor(max_norm: ArrayLike, norm: ArrayLike) -> Array:
    """The factor that clips gradients of a norm, fp32 scalar."""
    norm = jnp.asarray(norm, jnp.float32)
    return jnp.where(norm <= max_norm, jnp.float32(1.0), max_norm / norm)


def get_dtypes(state: Any) -> tuple[str, ...]:
    """The dtypes of a state's arrays, without the count."""
    return tuple(str(x.dtype) for x in jax.tree.leaves(state._replace(count=None)))


def as_float_leaves(state: Any) -> Any:
    """A state without its count, with integers as bits of a floating dtype and the axes of layers first."""
    state = state._replace(count=None)
    if fp8lm_adamw.is_fp8lm_state(state):  # amax of arrays is stacked along the first axis
        state = state._replace(largest=jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), state.largest))
    # An integer of two bytes becomes two elements, along a new last axis.
    integer = lambda x: jnp.issubdtype(x.dtype, jnp.integer)  # noqa: E731
    return jax.tree.map(lambda x: lax.bitcast_convert_type(x, _BITS) if integer(x) else x, state)


def from_float_leaves(encoded_state: Any, dtypes: tuple[str, ...], count: ArrayLike) -> Any:
    """The state from the result of `as_float_leaves`, with a count."""
    leaves, structure = jax.tree.flatten(encoded_state)
    values = [
        x if str(x.dtype) == kind else lax.bitcast_convert_type(x, kind) for x, kind in zip(leaves, dtypes, strict=True)
    ]
    state = jax.tree.unflatten(structure, values)
    if fp8lm_adamw.is_fp8lm_state(state):
        state = state._replace(largest=jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), state.largest))
    return state._replace(count=jnp.asarray(count).astype(jnp.int32))
