"""Bounds on weights from the updates of an optimizer, for automatic scaling (MOSS, section 3.2, equation 10)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from fp8jax.core.scaling import Automatic, AxisNames
from fp8jax.ops.optimizers.adamw import clip_finite
from fp8jax.optim import checks, flax_variables, moments
from fp8jax.optim.compressed_adamw import ScalarOrSchedule
from fp8jax.optim.fused import FusedTransformation
from fp8jax.optim.master_weights import MasterRoundingMargin

# The relative error of an update by bias correction in fp32: 1 - 0.999 is off by 3e-5.
_ROUNDING_MARGIN = 1.001
# A fused step clips directions at this margin. It is above the error of bias correction, and below the limit of updates
# by more than the rounding of decay, rate and sum.
_CLIP_MARGIN = 1.0005


def max_adam_step(
    learning_rate: ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999, weight_decay: float | Array = 0.0
) -> "MaxAdamStep":
    r"""An upper bound on the change of a weight in one step of Adam or AdamW, for any gradients; a limit for
    `track_weight_amax`.

    With m_t = (1 - b1) sum b1^i g_{t-i}, v_t = (1 - b2) sum b2^i g_{t-i}^2, and r = b1^2 / b2, the Cauchy-Schwarz
    inequality gives m_t^2 <= v_t (1 - b1)^2 / (1 - b2) (1 - r^t) / (1 - r). Therefore a step is at most lr times

        C_t = (1 - b1) / sqrt(1 - b2) sqrt((1 - r^t) / (1 - r)) sqrt(1 - b2^t) / (1 - b1^t).

    Gradients that grow as (b2 / b1)^i reach it: 1 in the first step, and in the limit 1.17 for b2 = 0.95, 7.27 for
    0.999. MOSS assumes |m / sqrt(v)| <= 1 (theorem 2), which holds only for b1 = b2. A positive `eps` and clipped
    gradients make steps smaller. Weight decay adds lr * weight_decay * |w|.

    Args:
        learning_rate: step size, or the schedule of the optimizer.
        b1, b2, weight_decay: the optimizer's. Its mask of parameters without decay is not needed.

    Raises:
        ValueError: b1^2 >= b2, so that a step is not bounded; or a decay outside [0, 1).
    """
    checks.check_learning_rate(learning_rate)
    for name, value, high in (("b1", b1, 1), ("b2", b2, 1), ("weight_decay", weight_decay, np.inf)):
        checks.check_number(name, value, 0, high)
    if isinstance(b1, jax.core.Tracer) or isinstance(b2, jax.core.Tracer):
        raise ValueError(
            "the limit of Adam needs constant b1 and b2, but they are traced; add both to static_args of "
            "optax.inject_hyperparams"
        )
    if b1 > 0 and b1 * b1 >= b2:
        raise ValueError(
            f"with b1={b1} and b2={b2} one step of Adam is not bounded, because b1^2 >= b2; omit the limit, so that "
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
        """An upper bound on |m / sqrt(v)| in the Adam step after `count` earlier ones, before rate and decay."""
        return _CLIP_MARGIN * self._max_ratio(count)

    def __call__(self, count: Array, bounds: Array) -> Array:
        """The largest magnitude of updates after `count` steps, of weights within bounds."""
        rate = self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate
        decay = self.weight_decay * bounds
        return jnp.abs(rate) * (_ROUNDING_MARGIN * self._max_ratio(count) + _ROUNDING_MARGIN * decay)

    def _max_ratio(self, count: Array) -> Array:
        """The largest |m / sqrt(v)| of step t = count + 1, for any gradients."""
        shrinks = [0.0 if self.b1 == 0 else self.b1 * self.b1 / self.b2, self.b2, self.b1]
        logs = [np.float32(np.log(x)) if x > 0 else -np.float32(np.inf) for x in shrinks]
        steady = (1 - self.b1) / np.sqrt((1 - self.b2) * (1 - shrinks[0]))
        r, v, m = (-jnp.expm1((count + 1).astype(jnp.float32) * log) for log in logs)
        return np.float32(steady) * jnp.sqrt(r * v) / m


Limit: TypeAlias = Callable[[Array, Array], Array]


class WeightBounds(NamedTuple):
    """State of `track_weight_amax`.

    Attributes:
        count: steps taken, int32 scalar.
        bounds: the tree of the parameters. Each of two or more axes has an fp32 array: an upper bound of the amax for
            each index of all axes but the last two. The others have `optax.MaskedNode()`.
    """

    count: Array  # type: ignore[assignment]  # optax calls it so; tuple.count is shadowed
    bounds: Any


def track_weight_amax(
    interval: int | np.integer = Automatic.weight_amax_interval,
    limit: Limit | None = None,
    *,
    axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Tracks an upper bound of each weight's amax, for recipes with automatic weight scaling. Put it last in a chain.

        limit = fp8jax.max_adam_step(lr, b2=0.95, weight_decay=0.1)
        tx = optax.chain(fp8jax.compressed_adamw(lr, b2=0.95, weight_decay=0.1), fp8jax.track_weight_amax(limit=limit))
        bounds = fp8jax.get_weight_amax_bounds(optimizer.opt_state)
        fp8jax.nnx.update_weight_amax_bounds(model, bounds)  # after each update

    If the magnitude of a weight is at most B, and that of the update at most M, the new magnitude is at most B + M.
    Every `interval` steps B is measured, in a branch of one `jax.lax.cond`, the only reduction over weights. Sums are
    rounded as in `optax.apply_updates`, or up, so the bound is exact for any gradients.

    Without a limit, M is the amax of the updates. This works with any optimizer and costs a reduction over the updates.
    With a limit, M is the limit, and updates beyond it are clipped to it in the pass that adds them. Adam with fp32
    moments never exceeds `max_adam_step`; with 8-bit moments, rounding may. Updates with more bits than their weight,
    as with remainders, are measured, because a limit of the step does not hold for differences of rounded weights.
    Inside `optax.multi_transform`, each group may have a tracker with its own limit.

    Parameters must change by these updates only. If other parameters are loaded, call `reset_weight_amax_bounds`, and
    the function of the same name for the model, such as `fp8jax.nnx.reset_weight_amax_bounds`. A checkpoint of
    parameters and state needs neither. For `compressed_adamw(...).step`, use `with_weight_bounds`.

    Args:
        interval: steps between measurements.
        limit: `limit(count, bounds) -> magnitudes` of the updates after `count` steps, of weights within `bounds`; both
            fp32 arrays of one shape. None measures updates.
        axis_name: mesh axes inside `jax.shard_map` over which parameters are sharded; amax is that of all shards.

    Returns:
        A transformation with state `WeightBounds`.

    Raises:
        ValueError: the interval is not positive, or at `update`, no parameters are given.
    """
    init, update, _ = _make_tracker(interval, limit, axis_name)
    return optax.GradientTransformationExtraArgs(init, update)


def with_weight_bounds(
    tx: FusedTransformation,
    limit: MaxAdamStep,
    interval: int | np.integer = Automatic.weight_amax_interval,
    *,
    axis_name: AxisNames = None,
) -> FusedTransformation:
    """A fused AdamW that tracks an upper bound of each weight's amax, as `track_weight_amax` in a chain.

        limit = fp8jax.max_adam_step(lr, b2=0.95, weight_decay=0.1)
        tx = fp8jax.with_weight_bounds(fp8jax.compressed_adamw(lr, b2=0.95, weight_decay=0.1), limit)
        tx = fp8jax.with_clipping(1.0, tx)

    `init` and the state are those of `optax.chain(tx, track_weight_amax(interval, limit))`, which has no `step`. Here
    `step` and `update` clip Adam's directions to the limit's, in the pass that updates parameters and moments. The only
    reduction is the one every `interval` steps.

    Args:
        tx: `compressed_adamw`, also with remainders. Bounds are then those of the masters, with a margin for rounding
            them to the parameters.
        limit: `max_adam_step` with the same learning rate, decays and weight decay.
        interval, axis_name: as of `track_weight_amax`.

    Returns:
        The transformation. Its `step` has the arguments `grad_scale` and `apply_if`, as that of `tx`.

    Raises:
        TypeError: `tx` has no `step`, or `limit` is not of `max_adam_step`.
        ValueError: the interval is not positive; or at `step`, there is a `key`: weights that are rounded
            stochastically may exceed their bound.
    """
    if not isinstance(tx, FusedTransformation):
        raise TypeError(
            f"with_weight_bounds expects a transformation with `step`, got {tx!r}; for others, use track_weight_amax "
            "as the last of a chain"
        )
    if not isinstance(limit, MaxAdamStep):
        raise TypeError(
            f"with_weight_bounds expects a limit from fp8jax.max_adam_step, got {limit!r}; use track_weight_amax for "
            "other limits"
        )
    init, update, advance_bounds = _make_tracker(interval, limit, axis_name)

    def init_with_bounds(params: optax.Params) -> tuple[optax.OptState, WeightBounds]:
        inner, bounds = tx.init(params), init(params)
        margins = _find_rounding_margins(inner, params)
        return inner, _map_bounds(bounds, lambda name, bound: _with_rounding_margin(bound, margins.get(name)))

    def get_max_direction(state: tuple[optax.OptState, WeightBounds]) -> Array:
        return limit.max_direction(flax_variables.unbox(state[1].count))

    def update_within_limit(
        updates: optax.Updates,
        state: tuple[optax.OptState, WeightBounds],
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, tuple[optax.OptState, WeightBounds]]:
        if params is None:
            raise ValueError("with_weight_bounds needs the parameters: call update(grads, state, params)")
        updates, inner = tx.update(updates, state[0], params, max_direction=get_max_direction(state), **extra_args)
        updates, bounds = update(updates, state[1], params, margins=_find_rounding_margins(state[0], params))
        return updates, (inner, bounds)

    def step(
        grads: optax.Updates,
        state: tuple[optax.OptState, WeightBounds],
        params: optax.Params,
        *,
        key: Array | None = None,
        grad_scale: ArrayLike | None = None,
        apply_if: ArrayLike | None = None,
    ) -> tuple[optax.Params, tuple[optax.OptState, WeightBounds]]:
        if key is not None:
            raise ValueError(
                "with_weight_bounds requires weights that are rounded to nearest; omit key, or use fp32 parameters"
            )
        new_params, inner = tx.step(
            grads, state[0], params,
            grad_scale=grad_scale, apply_if=apply_if, max_direction=get_max_direction(state),
        )  # fmt: skip
        _, bounds = advance_bounds(
            params, state[1], params, margins=_find_rounding_margins(state[0], params), apply_if=apply_if
        )
        return new_params, (inner, bounds)

    return FusedTransformation(init_with_bounds, update_within_limit, step)


def _make_tracker(interval: int | np.integer, limit: Limit | None, axis_name: AxisNames) -> tuple[Callable, ...]:
    """`init` and `update` of `track_weight_amax`, and `advance_bounds`, for a step within the limit."""
    if not interval >= 1 or interval // 1 != interval:
        raise ValueError(f"interval must be a positive number of steps, not {interval}")
    automatic = Automatic(int(interval))

    def measure(x: Array) -> Array:
        return max_over_shards(automatic.measure_amax(x))

    def max_over_shards(x: Array) -> Array:
        return x if axis_name is None else lax.pmax(x, axis_name)

    def init(params: optax.Params) -> WeightBounds:
        params = flax_variables.unbox(params)
        bounds = jax.tree.map(lambda p: measure(p) if _is_tracked(p) else optax.MaskedNode(), params)
        return moments.replicate_scalars(WeightBounds(jnp.zeros([], jnp.int32), bounds), params)

    def advance_state(
        state: WeightBounds,
        tree: Any,
        weights: list[Array],
        max_change: Callable[[int, Array], Array],
        margins: Sequence[MasterRoundingMargin | None] | None = None,
    ) -> WeightBounds:
        """The state after a step that moved elements of weight i, or its master's, by up to `max_change(i, bound)`."""
        all_bounds = tree.flatten_up_to(state.bounds)
        tracked_indices = [i for i, p in enumerate(weights) if _is_tracked(p)]
        bounds, margin_list = [all_bounds[i] for i in tracked_indices], margins or [None] * len(weights)
        is_due = (state.count > 0) & (state.count % automatic.weight_amax_interval == 0)
        measure_all = lambda: [_with_rounding_margin(measure(weights[i]), margin_list[i]) for i in tracked_indices]  # noqa: E731
        bounds = lax.cond(is_due, measure_all, lambda: bounds)
        for i, bound in zip(tracked_indices, bounds, strict=True):
            master, change = margin_list[i], max_change(i, bound)
            all_bounds[i] = (
                automatic.grow_bound(bound, change, weights[i].dtype) if master is None else master.grow(bound, change)
            )
        return WeightBounds(optax.safe_increment(state.count), jax.tree.unflatten(tree, all_bounds))

    def update(
        updates: optax.Updates,
        state: WeightBounds,
        params: optax.Params | None = None,
        *,
        margins: Mapping[tuple[str, ...], MasterRoundingMargin] = MappingProxyType({}),
        **extra_args: Any,
    ) -> tuple[optax.Updates, WeightBounds]:
        """`margins`: those of weights that are high parts of masters."""
        del extra_args
        if params is None:
            raise ValueError("track_weight_amax needs the parameters: call update(grads, state, params)")
        tree: Any = jax.tree.structure(updates)
        flat, weights = jax.tree.leaves(updates), tree.flatten_up_to(params)
        margin_list = [margins.get(name) for name in _flatten_by_path(updates)] if margins else None

        def max_change(i: int, bound: Array) -> Array:
            if limit is not None and margin_list and margin_list[i] is not None:
                return limit(state.count, bound)
            # An update with more bits than its weight is the difference of two rounded weights.
            if limit is None or flat[i].dtype.itemsize > weights[i].dtype.itemsize:
                return max_over_shards(automatic.measure_amax(flat[i]))
            max_abs = limit(state.count, bound).astype(flat[i].dtype)
            flat[i] = clip_finite(flat[i], max_abs[..., None, None])
            return max_abs.astype(jnp.float32)

        new_state = advance_state(state, tree, weights, max_change, margin_list)
        return jax.tree.unflatten(tree, flat), new_state

    def advance_bounds(
        _: Any,
        state: WeightBounds,
        params: optax.Params,
        *,
        margins: Mapping[tuple[str, ...], MasterRoundingMargin],
        apply_if: ArrayLike | None = None,
    ) -> tuple[optax.Params, WeightBounds]:
        assert limit is not None
        tree, weights_by_path = jax.tree.structure(params), _flatten_by_path(params)
        new_state = advance_state(
            state,
            tree,
            [*weights_by_path.values()],
            lambda i, b: limit(state.count, b),
            [*map(margins.get, weights_by_path)],
        )
        if apply_if is not None:
            new_state = jax.tree.map(lambda new, old: jnp.where(apply_if, new, old), new_state, state)
        return params, new_state

    return flax_variables.with_unboxed_variables(init, update, advance_bounds)


def get_weight_amax_bounds(opt_state: optax.OptState) -> dict[tuple[str, ...], Array]:
    """The bounds in an optimizer's state, by the paths of the parameters; see `WeightBounds.bounds`.

    Raises:
        ValueError: there is no `track_weight_amax` in the optimizer, or two that track the same parameter.
    """
    if not (bounds := find_weight_amax_bounds(opt_state)):
        raise ValueError("the optimizer does not track weights; add fp8jax.track_weight_amax() at the end of its chain")
    return bounds


def find_weight_amax_bounds(opt_state: optax.OptState) -> dict[tuple[str, ...], Array] | None:
    """`get_weight_amax_bounds` of any optimizer: empty if it trains no matrices, and None if it has no tracker."""
    trackers, bounds = moments.find_nodes(opt_state, WeightBounds), dict[tuple[str, ...], Array]()
    for state in trackers:
        new_bounds = _flatten_by_path(state.bounds)
        if shared_paths := set(bounds) & set(new_bounds):
            raise ValueError(
                f"two trackers have the parameter {'/'.join(shared_paths.pop())}; use track_weight_amax once"
            )
        bounds |= new_bounds
    return bounds if trackers else None


def reset_weight_amax_bounds(
    opt_state: optax.OptState, params: optax.Params, *, axis_name: AxisNames = None
) -> optax.OptState:
    """Returns an optimizer state with bounds measured from the parameters, for example after they are loaded.

    Args:
        opt_state: of an optimizer with `track_weight_amax`.
        params: the parameters that it continues with.
        axis_name: as of `track_weight_amax`.

    Raises:
        ValueError: as `get_weight_amax_bounds`, or a tracked parameter is missing.
    """
    get_weight_amax_bounds(opt_state)
    weights = _flatten_by_path(params)
    margins = _find_rounding_margins(opt_state, params)

    def measure(name: tuple[str, ...], _: Array) -> Array:
        if name not in weights:
            raise ValueError(f"{'/'.join(name)} is tracked by track_weight_amax but missing from the parameters")
        maximum = _with_rounding_margin(Automatic().measure_amax(weights[name]), margins.get(name))
        return maximum if axis_name is None else lax.pmax(maximum, axis_name)

    def reset_bounds(node: Any) -> Any:
        return _map_bounds(node, measure) if isinstance(node, WeightBounds) else node

    return jax.tree.map(reset_bounds, opt_state, is_leaf=lambda node: isinstance(node, WeightBounds))


def _find_rounding_margins(state: Any, params: optax.Params) -> dict[tuple[str, ...], MasterRoundingMargin]:
    """Margins of the parameters that have a remainder in the optimizer's state, by path."""
    remainders: dict[tuple[str, ...], Array] = {}
    for node in moments.iter_namedtuples(state):
        remainders |= _flatten_by_path(getattr(node, "remainder", None))
    return {
        name: MasterRoundingMargin.from_dtypes(high.dtype, remainders[name].dtype)
        for name, high in _flatten_by_path(params).items()
        if name in remainders
    }


def _with_rounding_margin(bound: Array, master: MasterRoundingMargin | None) -> Array:
    return bound if master is None else master.add_margin(bound)


def _map_bounds(state: WeightBounds, make_bound: Callable[[tuple[str, ...], Array], Array]) -> WeightBounds:
    """A state with `make_bound(name, bound)` in place of each bound, also inside boxes."""

    def replace_bound(path: Any, bound: Any) -> Any:
        return jax.tree.map(lambda bound: make_bound(_path_names(path), bound), bound)

    return state._replace(bounds=jax.tree.map_with_path(replace_bound, state.bounds, is_leaf=flax_variables.is_box))


def _is_tracked(x: Any) -> bool:
    """Whether a parameter is one that linear layers may quantize."""
    return jnp.ndim(x) >= 2 and jnp.issubdtype(x.dtype, jnp.floating)


def _flatten_by_path(tree: Any) -> dict[tuple[str, ...], Array]:
    """The arrays of a tree, out of their boxes, by the names on their paths."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=flax_variables.is_box)
    return {_path_names(path): flax_variables.unbox(leaf) for path, leaf in leaves}


def _path_names(path: Any) -> tuple[str, ...]:
    """The keys, attributes and indices of a tree path, as strings."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
