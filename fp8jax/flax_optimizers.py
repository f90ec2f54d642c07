"""Flax's optimizers with the fused step, and the end of a step for them and for hand-written steps."""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import optax
from flax import errors, linen, nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.struct import field
from flax.training import train_state
from flax.traverse_util import flatten_dict
from jax.typing import ArrayLike

from fp8jax.core.scaling import Automatic, AxisNames
from fp8jax.modules import scaled_linen
from fp8jax.modules.calls import wrong_model_message
from fp8jax.modules.scaled import advance_scaling, get_scalings, set_bounds
from fp8jax.optim.bad_steps import was_applied
from fp8jax.optim.flax_variables import is_box, merge_boxes
from fp8jax.optim.fused import FusedTransformation
from fp8jax.optim.weight_bounds import find_weight_amax_bounds
from fp8jax.rewrite.rules import Rules
from fp8jax.rewrite.states import observed_operands
from fp8jax.rewrite.training import ADVANCE, BOUNDS, TrainingRecord


def end_nnx_step(
    model: Any,
    grads: Any,
    opt_state: optax.OptState = (),
    *,
    axis_name: AxisNames = None,
    apply_if: ArrayLike | None = None,
) -> None:
    """Ends a step, in place, of a model with a stateful recipe. Call it after the optimizer's update.

        loss, grads = fp8jax.nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        fp8jax.nnx.end_step(model, grads, optimizer.opt_state)

    Histories and thresholds are updated from the statistics of the step (`advance_scaling`). Weights with automatic
    scaling receive the bounds of an optimizer that tracks them (`update_weight_amax_bounds`). Without bounds each call
    measures the weights, or `fp8jax.nnx.reset_weight_amax_bounds` measures them once. After a step that
    `fp8jax.skip_bad_steps` skipped, no state changes.

    `fp8jax.nnx.Optimizer` calls this function in its `update`. Layers that were not called since the last step keep
    their state, and models of recipes without a state do not change.

    Args:
        model: a model that `fp8jax.nnx.quantize` returned.
        grads: gradients of the step, as `fp8jax.nnx.value_and_grad` returns them, or with those of `GradientStatistic`.
        opt_state: of the optimizer of the model's parameters, after the update.
        axis_name, apply_if: as of `advance_scaling`.

    Raises:
        ValueError: the optimizer's state belongs to another model.
    """
    if any(observed_operands(scaling.linear) for _, scaling in get_scalings(model)):
        advance_scaling(model, grads, axis_name=axis_name, apply_if=was_applied(nnx.as_pure(opt_state), apply_if))
    _update_bounds(model, opt_state)


def end_linen_step(
    scaling: Mapping[str, Any],
    statistics: Mapping[str, Any] | None = None,
    opt_state: optax.OptState = (),
    rules: Rules | None = None,
    *,
    axis_name: AxisNames = None,
    apply_if: ArrayLike | None = None,
) -> dict[str, Any]:
    """Ends a step of a model with a stateful recipe: `fp8jax.nnx.end_step` for collections of Linen.

    `fp8jax.linen.TrainState` calls this function if it stores the collection.

    Args:
        scaling: the collection "fp8jax_scaling", as `apply` has written it.
        statistics: the gradients of the collection "fp8jax_statistics", or None without one.
        opt_state: of the optimizer of the parameters, after the update.
        rules: those of `fp8jax.linen.quantize`; needed if anything but delayed scaling observes.
        axis_name, apply_if: as of `advance_scaling`.

    Returns:
        The collection for the next step.

    Raises:
        ValueError: as `advance_scaling`, or the optimizer does not track a weight with automatic scaling.
    """
    names, bound_name = {path[-1] for path in flatten_dict(scaling)}, Automatic().variable_name("w")
    if statistics or names - {bound_name}:
        is_applied = was_applied(opt_state, apply_if)
        scaling = scaled_linen.advance_scaling(
            scaling, statistics or {}, rules, axis_name=axis_name, apply_if=is_applied
        )
    bounds = find_weight_amax_bounds(opt_state)
    if bounds and bound_name in names:
        # The paths in an optimizer of all variables begin with the collection.
        has_params_collection = all(path[0] == "params" for path in bounds)
        bounds = {path[has_params_collection:]: bound for path, bound in bounds.items()}
        scaling = scaled_linen.with_bounds(scaling, bounds, only_trained=True)
    return dict(scaling)


_STEP_ARGUMENTS = ("key", "grad_scale", "apply_if", "max_direction")


def _apply_step(tx: Any, grads: Any, state: Any, params: Any, step_arguments: dict[str, Any]) -> tuple[Any, Any]:
    """New parameters and the new state of an optimizer.

    A fused transformation applies its own update. `optax.apply_updates` adds the updates of another one, such as a
    chain of optax, as in Flax's own classes.

    Raises:
        TypeError: an argument belongs to the fused step, but `tx` has none. Most transformations would ignore it.
    """
    if isinstance(tx, FusedTransformation):
        return tx.step(grads, state, params, **step_arguments)
    if fused_only := [name for name in _STEP_ARGUMENTS if name in step_arguments]:
        raise TypeError(
            f"{', '.join(fused_only)} requires a transformation with `step`, which optax.chain removes. Use "
            "fp8jax.optimizer(...), compressed_adamw or fp8lm_adamw; to clip, use fp8jax.with_clipping(1.0, tx)"
        )
    updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **step_arguments)
    return optax.apply_updates(params, updates), state


class Optimizer(nnx.Optimizer):
    """A `flax.nnx.Optimizer` that updates with the transformation's `step`.

    The fused step writes no updates to memory. A quantized moment is one variable that contains a `QTensor`, because
    each variable of a call costs Flax several microseconds. Flax's class has one variable for each array of the moment,
    so a checkpoint of one class does not load into the other. Moments with names of sharded axes are as in Flax's
    class. A transformation without a step, such as `optax.chain(...)`, updates parameters as in Flax's class.

    `update` also ends the step of the model's scalings, as `fp8jax.nnx.end_step` does. A further call of `end_step`
    changes nothing. If a model has several optimizers, the first update ends the step. Weights with automatic scaling
    receive the bounds of a `tx` that tracks them, such as `fp8jax.optimizer("moss", ...)`, here and when the optimizer
    is created. Compute gradients with `fp8jax.nnx.value_and_grad`: Flax's own function raises an error with delayed
    scaling.

    Args:
        model: the module with the variables to train.
        tx: any optax transformation. `fp8jax.optimizer(...)`, `compressed_adamw`, `fp8lm_adamw`, and one of them in
            `fp8jax.with_clipping`, have a step.
        wrt: filter of the variables that are trained, as of `nnx.grad`.

    Raises:
        TypeError: `model` is a Linen module.

    Examples:
        >>> import fp8jax
        >>> from flax import nnx
        >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        >>> optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer("coat", 3e-4, clip=1.0), wrt=nnx.Param)
    """

    def __init__(self, model: Any, tx: optax.GradientTransformation, *, wrt: Any, **options: Any) -> None:
        if isinstance(model, linen.Module):
            raise TypeError(wrong_model_message("fp8jax.nnx.Optimizer expects an NNX module", model))
        super().__init__(model, tx, wrt=wrt, **options)
        self.opt_state = nnx.data(merge_boxes(self.opt_state))
        # Weights may have been loaded since they were measured. In a trace without the model, such as one for the
        # optimizer's shapes, variables of the model cannot change; the first update sets the bounds then.
        with contextlib.suppress(errors.TraceContextError):
            _update_bounds(model, self.opt_state)
            _mark_step_ends(model, self.opt_state)

    def update(self, model: Any, grads: Any, /, **step_arguments: Any) -> None:
        """Updates the weights of `model` and the moments, in place.

        Inside `jax.shard_map` each device has its own observations. There, call `tx.step` and then
        `fp8jax.nnx.end_step(..., axis_name=)` instead of this method.

        Args:
            model: the module that the optimizer was created with.
            grads: gradients of the variables in `wrt`, and possibly of others, such as `GradientStatistic`.
            step_arguments: of the step: `key`, `grad_scale`, `apply_if`; or of the `update` of a transformation
                without a step. `value`, the loss, is for `fp8jax.skip_bad_steps`.

        Raises:
            TypeError: an argument belongs to the step, but `tx` has none.
        """
        graph_options = {"graph": self.graph} if hasattr(self, "graph") else {}
        params, gradients = (nnx.as_pure(nnx.state(tree, self.wrt, **graph_options)) for tree in (model, grads))
        params, state = _apply_step(
            self.tx, gradients, nnx.as_pure(self.opt_state), params, nnx.as_pure(step_arguments)
        )
        nnx.update(model, params)
        structure: Any = jax.tree.structure(self.opt_state, is_leaf=is_box)
        boxes = jax.tree.leaves(self.opt_state, is_leaf=is_box)
        for box, value in zip(boxes, structure.flatten_up_to(state), strict=True):
            box.set_value(value)
        apply_if = step_arguments.get("apply_if")
        is_applied = was_applied(state, apply_if)
        self.step[...] += 1 if is_applied is None else is_applied.astype(self.step.dtype)
        end_nnx_step(model, nnx.state(grads, **graph_options), state, apply_if=apply_if)


def _mark_step_ends(model: Any, opt_state: Any) -> None:
    """Record that each update of the model's optimizer ends a step."""
    bounds = [BOUNDS] if find_weight_amax_bounds(nnx.as_pure(opt_state)) is not None else []
    record = TrainingRecord(frozenset([ADVANCE, *bounds]))
    for _, scaling in get_scalings(model):
        scaling.record = record


def _update_bounds(model: Any, opt_state: Any) -> None:
    """Give weights of automatic scaling the bounds of an optimizer, if there are both."""
    bounds = find_weight_amax_bounds(nnx.as_pure(opt_state))
    if bounds is not None and any(scaling.linear.needs_weight_bounds for _, scaling in get_scalings(model)):
        set_bounds(model, bounds, only_trained=True)


class TrainState(train_state.TrainState):
    """A `flax.training.train_state.TrainState` that updates with the transformation's `step`.

    Any optax transformation is supported. One without a step updates parameters as in Flax's class. If the recipe has a
    state, `scaling` stores its collection, and `apply_gradients` ends its step, as `fp8jax.linen.end_step` does.

    Attributes:
        scaling: the collection "fp8jax_scaling" that `init` returns, or None.
        rules: those of `fp8jax.linen.quantize`, if `end_step` needs them.
    """

    # Keyword-only, so that a user's subclass may add fields without a default.
    scaling: Any = field(default=None, kw_only=True)
    rules: Any = field(pytree_node=False, default=None, kw_only=True)

    def apply_gradients(
        self, *, grads: Any, step_arguments: dict[str, Any] | None = None, statistics: Any = None, **field_updates: Any
    ) -> Any:
        """The state after a step.

        Inside `jax.shard_map` each device has its own observations. There, call `tx.step` and then
        `fp8jax.linen.end_step(..., axis_name=)` instead of this method.

        Args:
            grads: gradients, a tree like `params`.
            step_arguments: of the step: `key`, `grad_scale`, `apply_if`; or of the `update` of a transformation
                without a step. `value`, the loss, is for `fp8jax.skip_bad_steps`.
            statistics: gradients of the collection "fp8jax_statistics", if the recipe observes gradients.
            field_updates: new values of fields, such as `scaling` as `apply` has written it.

        Raises:
            TypeError: an argument belongs to the step, but `tx` has none.
            ValueError: there are statistics, but no `scaling`; or what `apply` has written to it is lost.
        """
        has_overwritten = OVERWRITE_WITH_GRADIENT in grads
        grads_and_params = (grads["params"], self.params["params"]) if has_overwritten else (grads, self.params)
        step_arguments = step_arguments or {}
        params, state = _apply_step(self.tx, grads_and_params[0], self.opt_state, grads_and_params[1], step_arguments)
        apply_if = step_arguments.get("apply_if")
        is_applied = was_applied(state, apply_if)
        if has_overwritten:
            params = {"params": params, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        if "scaling" not in field_updates and self.scaling is not None:
            scaled_linen.check_stats_not_lost(self.scaling)
        scaling = field_updates.pop("scaling", self.scaling)
        if scaling is not None:
            scaling = end_linen_step(scaling, statistics, state, self.rules, apply_if=apply_if)
        elif statistics is not None:
            raise ValueError(
                "the statistics update a scaling state, but this TrainState has none. Pass "
                "scaling=variables['fp8jax_scaling'] to TrainState.create"
            )
        step = self.step + (1 if is_applied is None else is_applied)
        return self.replace(step=step, params=params, opt_state=state, scaling=scaling, **field_updates)
