"""Bad steps, with a loss or gradients that are not finite or a loss that jumps, and an optimizer that skips them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from fp8jax.core.scaling import AxisNames
from fp8jax.ops.optimizers.leaf import is_quantized, load
from fp8jax.optim import checks, flax_variables, moments
from fp8jax.optim.fused import FusedTransformation

# Losses that a jump is measured against. Fewer than half of them are too few.
LOSS_WINDOW = 128
# The standard deviation of normal values, in median absolute deviations.
_DEVIATIONS = 1.4826
# Smallest spread, as a fraction of the median: half a step of bf16. Losses in bf16 may all be equal.
_MIN_SPREAD = 2.0**-8


class StepMonitor(NamedTuple):
    """Losses and counts of the steps so far, all zeros before the first step.

    Attributes:
        losses: fp32 (LOSS_WINDOW,), the newest losses of good steps, in a ring.
        loss_count: int32 scalar, losses that were ever stored.
        total: int32 scalar, bad steps since the state was initialized.
        consecutive: int32 scalar, bad steps since the last good one.
    """

    losses: Array
    loss_count: Array
    total: Array
    consecutive: Array


def init_monitor() -> StepMonitor:
    """The monitor before the first step."""
    zero = jnp.zeros([], jnp.int32)
    return StepMonitor(jnp.zeros(LOSS_WINDOW, jnp.float32), zero, zero, zero)


def loss_limit(monitor: StepMonitor, max_loss_jump: ArrayLike) -> Array:
    """The largest loss that is not a jump: the median of the window plus `max_loss_jump` times its spread, fp32 scalar.

    The spread is the median absolute deviation, as a standard deviation, as in the Hampel identifier (Davies and
    Gather, The Identification of Multiple Outliers, 1993). OLMo 2 (arXiv 2501.00656) skips steps by mean and standard
    deviation of the same window, which a few outliers move. Infinite while fewer than half of the losses are there.
    Infinite too while the spread is 0, as with losses that are mostly 0: they set no scale for a jump.
    """
    losses = jnp.where(jnp.arange(LOSS_WINDOW) < monitor.loss_count, monitor.losses, jnp.nan)
    median = jnp.nanmedian(losses)
    spread = jnp.maximum(_DEVIATIONS * jnp.nanmedian(jnp.abs(losses - median)), _MIN_SPREAD * jnp.abs(median))
    is_limited = (monitor.loss_count >= LOSS_WINDOW // 2) & (spread > 0)
    return jnp.where(is_limited, median + max_loss_jump * spread, jnp.inf)


def observe_step(
    monitor: StepMonitor, is_finite: Array, loss: ArrayLike | None = None, max_loss_jump: ArrayLike | None = None
) -> tuple[Array, StepMonitor]:
    """Whether a step is good, and the monitor after it.

    Args:
        max_loss_jump: as of `loss_limit`; None looks for no jump and stores no loss.
    """
    is_good = is_finite if loss is None else is_finite & jnp.isfinite(loss)
    if loss is not None and max_loss_jump is not None:
        is_good &= loss <= loss_limit(monitor, max_loss_jump)
        index = monitor.loss_count % LOSS_WINDOW
        newest = jnp.where(is_good, jnp.asarray(loss, jnp.float32), monitor.losses[index])
        monitor = monitor._replace(
            losses=monitor.losses.at[index].set(newest),
            loss_count=jnp.where(is_good, optax.safe_increment(monitor.loss_count), monitor.loss_count),
        )
    bad = 1 - is_good.astype(jnp.int32)
    return is_good, monitor._replace(total=monitor.total + bad, consecutive=bad * (monitor.consecutive + 1))


class SkipBadStepsState(NamedTuple):
    """State of `skip_bad_steps`.

    Attributes:
        monitor: counts of bad steps.
        inner: state of the wrapped transformation.
    """

    monitor: StepMonitor
    inner: optax.OptState


class BadSteps(NamedTuple):
    """Numbers of bad steps.

    Attributes:
        total, consecutive: as of `StepMonitor`.
    """

    total: Array
    consecutive: Array


def skip_bad_steps(
    tx: optax.GradientTransformation, max_loss_jump: float | Array | None = None, *, axis_name: AxisNames = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to skip steps with non-finite gradients, a non-finite loss, or a jump of the loss.

        tx = fp8jax.skip_bad_steps(fp8jax.optimizer("coat", 3e-4, clip=1.0), max_loss_jump=6.0)
        optimizer = fp8jax.nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer.update(model, grads, value=loss)
        if fp8jax.get_bad_steps(optimizer.opt_state).consecutive > 10:
            raise RuntimeError("11 bad steps in a row")

    A skipped step changes no bit of the parameters or of the state of `tx`. `fp8jax.nnx.end_step` and
    `fp8jax.linen.end_step` then do not change scaling states, nor do the optimizers that call them. Other variables
    that a forward pass writes, such as batch statistics, are not restored. A program under `jax.jit` cannot raise: read
    `get_bad_steps` outside.

    Use it as the outermost transformation, also around `optax.MultiSteps`: accumulated gradients would keep a NaN.

    Args:
        tx: any optax transformation. If it has a `step`, as `compressed_adamw` has, so does the result.
        max_loss_jump: spreads above the median of the last 128 good losses up to which a loss is not a jump, such as 6;
            None does not check for jumps. See `fp8jax.optim.bad_steps.loss_limit`.
        axis_name: mesh axes inside `jax.shard_map`. A step is bad if it is so on any device; losses are averaged.

    Returns:
        The transformation. Pass the loss to its `update` or `step` by name, as `value`; without it only gradients are
        checked. The state is `SkipBadStepsState`.

    Raises:
        ValueError: `max_loss_jump` is not positive; or at `update`, `value` is missing, so jumps cannot be detected.
    """
    if max_loss_jump is not None:
        checks.check_positive("max_loss_jump", max_loss_jump)
    inner_update = optax.with_extra_args_support(tx).update

    def init(params: optax.Params) -> SkipBadStepsState:
        return moments.replicate_scalars(SkipBadStepsState(init_monitor(), tx.init(params)), params)

    def observe(grads: Any, monitor: StepMonitor, value: ArrayLike | None) -> tuple[Array, StepMonitor]:
        if value is None and max_loss_jump is not None:
            raise ValueError(f"max_loss_jump={max_loss_jump} needs the loss of each step; pass value=loss to update")
        is_finite = jnp.bool_(True)
        for g in jax.tree.leaves(grads, is_leaf=is_quantized):
            is_finite &= jnp.all(jnp.isfinite(load(g) if is_quantized(g) else g))
        if axis_name is not None:
            is_finite = lax.pmin(is_finite.astype(jnp.int32), axis_name) > 0
            value = None if value is None else lax.pmean(value, axis_name)
        return observe_step(monitor, is_finite, value, max_loss_jump)

    def update(
        grads: optax.Updates,
        state: SkipBadStepsState,
        params: optax.Params | None = None,
        *,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipBadStepsState]:
        is_good, monitor = observe(grads, state.monitor, value)
        extra_args |= {} if value is None else {"value": value}
        updates, inner = inner_update(grads, state.inner, params, **extra_args)
        # Only the negative zero changes no bit of what it is added to.
        updates = jax.tree.map(lambda u: jnp.where(is_good, u, jnp.asarray(-0.0, u.dtype)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), inner, state.inner)
        return updates, SkipBadStepsState(monitor, inner)

    if not isinstance(tx, FusedTransformation):
        return optax.GradientTransformationExtraArgs(*flax_variables.with_unboxed_variables(init, update))

    def step(
        grads: optax.Updates,
        state: SkipBadStepsState,
        params: optax.Params,
        *,
        value: ArrayLike | None = None,
        grad_scale: ArrayLike | None = None,
        apply_if: ArrayLike | None = None,
        **step_options: Any,
    ) -> tuple[optax.Params, SkipBadStepsState]:
        is_good, monitor = observe((grads, grad_scale), state.monitor, value)
        if apply_if is not None:
            # A step that the caller leaves out is not counted.
            is_good &= jnp.asarray(apply_if)
            monitor = jax.tree.map(lambda new, old: jnp.where(apply_if, new, old), monitor, state.monitor)
        params, inner = tx.step(grads, state.inner, params, grad_scale=grad_scale, apply_if=is_good, **step_options)
        return params, SkipBadStepsState(monitor, inner)

    return FusedTransformation(*flax_variables.with_unboxed_variables(init, update, step))


def get_bad_steps(opt_state: optax.OptState) -> BadSteps:
    """The numbers of bad steps in the state of an optimizer that contains `skip_bad_steps`.

    Raises:
        ValueError: the optimizer has no `skip_bad_steps`, or several.
    """
    if (monitor := find_monitor(opt_state)) is None:
        raise ValueError("the optimizer does not skip steps; wrap it in fp8jax.skip_bad_steps(tx)")
    return BadSteps(monitor.total, monitor.consecutive)


def find_monitor(opt_state: optax.OptState) -> StepMonitor | None:
    """The monitor in an optimizer's state, out of its boxes; None without one.

    Raises:
        ValueError: there are several.
    """
    monitors = moments.find_nodes(opt_state, StepMonitor)
    if len(monitors) > 1:
        raise ValueError("the optimizer contains several skip_bad_steps; use one, as the outermost transformation")
    return flax_variables.unbox(monitors[0]) if monitors else None


def was_applied(opt_state: optax.OptState, apply_if: ArrayLike | None = None) -> Array | None:
    """Whether the last step was applied, a bool scalar; None of an optimizer that skips none."""
    monitor = find_monitor(opt_state)
    conditions = [] if monitor is None else [monitor.consecutive == 0]
    conditions += [] if apply_if is None else [jnp.asarray(apply_if, bool)]
    return jnp.stack(conditions).all() if conditions else None
