"""Flax's optimizers with the fused step: new weights are written where moments are, and no updates in between."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import optax
from flax import errors, nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from fp8jax.core.recipe import Linear
from fp8jax.modules.scaled import GradientStatistic, LayerScaling, advance_scaling, give_bounds, observed_operands
from fp8jax.optim.fused import FusedTransformation
from fp8jax.optim.weight_bounds import bounds_of


def _fused(tx: Any, whose: str) -> FusedTransformation:
    if isinstance(tx, FusedTransformation):
        return tx
    raise TypeError(
        f"{whose} takes a transformation with `step`, as fp8jax.optimizer, compressed_adamw or fp8lm_adamw return, not "
        f"{type(tx).__name__}: optax.chain keeps no step. To clip, take fp8jax.clipped(1.0, tx) or "
        "fp8jax.optimizer(..., clip=1.0); for other chains take Flax's own class"
    )


class FusedOptimizer(nnx.Optimizer):
    """`flax.nnx.Optimizer` whose `update` is the transformation's `step`.

    State and checkpoints are those of Flax's class, so that one takes the place of the other. There updates are written
    to memory, read again and added: with clipping 20 of the 36 bytes that a step moves for each parameter.

    A step ends for the model's scalings, too. Statistics among the gradients enter its states, as by
    `advance_scaling`, and so does what thresholds of INT8 have seen; weights of automatic scaling get the bounds of a
    tracked `tx`, such as `fp8jax.optimizer("moss", ...)`, as by `set_weight_bounds`, when the optimizer is made, too.
    Calling these besides changes nothing. Each of several optimizers of a model would end the step: call
    `advance_scaling` once before them, whose gradients have no statistics.

    Args:
        model: the module whose variables are trained.
        tx: `fp8jax.optimizer(...)`, `compressed_adamw`, `fp8lm_adamw`, or one of them in `fp8jax.clipped`.
        wrt: filter of the variables that are trained, as of `nnx.grad`.

    Raises:
        TypeError: `tx` has no `step`, as a chain of optax.

    Examples:
        >>> import fp8jax
        >>> from flax import nnx
        >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        >>> optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer("coat", 3e-4, clip=1.0), wrt=nnx.Param)
    """

    def __init__(self, model: Any, tx: optax.GradientTransformation, *, wrt: Any, **how: Any) -> None:
        super().__init__(model, _fused(tx, "fp8jax.nnx.Optimizer"), wrt=wrt, **how)
        # Weights may have been loaded since they were measured. Inside a trace that the model is not part of, as of its
        # optimizer's shapes alone, it cannot be told; the first update does.
        with contextlib.suppress(errors.TraceContextError):
            _give(model, self.opt_state)

    def update(self, model: Any, grads: Any, /, **arguments: Any) -> None:  # type: ignore[override]
        """New weights of `model` and new moments, from gradients as `nnx.grad` gives them.

        Args:
            model: the module that the optimizer was made of.
            grads: gradients of the variables in `wrt`, with or without those of `GradientStatistic`.
            arguments: of the step: `key`, `factor`, `applied`.
        """
        how = {"graph": self.graph} if hasattr(self, "graph") else {}
        layers = [module.linear for _, module in nnx.iter_modules(model) if isinstance(module, LayerScaling)]
        if jax.tree.leaves(nnx.state(grads, GradientStatistic, **how)) or _keep_thresholds(layers):
            grads = advance_scaling(model, grads)
        params, gradients = (nnx.as_pure(nnx.state(tree, self.wrt, **how)) for tree in (model, grads))
        params, state = self.tx.step(gradients, nnx.as_pure(self.opt_state), params, **nnx.as_pure(arguments))
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(state, **how))
        self.step[...] += 1
        _give(model, state)


def _give(model: Any, opt_state: Any) -> None:
    """Gives weights of automatic scaling the bounds that an optimizer follows, if there are both."""
    bounds, modules = bounds_of(nnx.as_pure(opt_state)), (module for _, module in nnx.iter_modules(model))
    if bounds is not None and any(isinstance(module, LayerScaling) and module.linear.tracked for module in modules):
        give_bounds(model, bounds)


def _keep_thresholds(layers: Sequence[Linear]) -> bool:
    """Whether all that layers observe moves thresholds; where nothing was seen since a step's end, none moves."""
    seen = [layer.states[operand] for layer in layers for operand in observed_operands(layer)]
    return bool(seen) and all(state.decides for state in seen)


class FusedTrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` whose `apply_gradients` is the transformation's `step`.

    Fields are those of Flax's class. Its `create` takes what `Optimizer` takes.

    Raises:
        TypeError: `tx` has no `step`, as a chain of optax.
    """

    def apply_gradients(self, *, grads: Any, step_arguments: dict[str, Any] | None = None, **others: Any) -> Any:
        """A state with new parameters and moments, and one step more.

        Args:
            grads: gradients, a tree as `params`.
            step_arguments: of the step: `key`, `factor`, `applied`.
            others: fields that get new values.
        """
        tx, overwritten = _fused(self.tx, "fp8jax.linen.TrainState"), OVERWRITE_WITH_GRADIENT in grads
        own = (grads["params"], self.params["params"]) if overwritten else (grads, self.params)
        params, state = tx.step(own[0], self.opt_state, own[1], **(step_arguments or {}))
        if overwritten:
            params = {"params": params, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        return self.replace(step=self.step + 1, params=params, opt_state=state, **others)

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: optax.GradientTransformation, **others: Any) -> Any:
        """As Flax's, with a transformation that has a step."""
        return super().create(apply_fn=apply_fn, params=params, tx=_fused(tx, "fp8jax.linen.TrainState"), **others)
