"""Delayed scaling in Linen models: histories and statistics of gradients in collections of their own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.errors import ModifyScopeVariableError, ScopeCollectionNotFound, ScopeVariableNotFoundError
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from fp8jax.core.recipe import Linear
from fp8jax.modules.delayed import delayed_dot_general
from fp8jax.ops.delayed import Observed, ScalingState, advance, init_scaling

SCALING, STATISTICS = "fp8jax_scaling", "fp8jax_statistics"


@dataclasses.dataclass(frozen=True)
class DelayedDotGeneral:
    """`dot_general` of one layer while it runs, with delayed scaling; its variables are the layer's.

    In the collection "fp8jax_scaling": histories `x`, `w`, `dy`, fp32 (history,), and `seen_x`, `seen_w`, fp32 scalars,
    the largest magnitudes since the last `advance_scaling`. In "fp8jax_statistics": `slot`, fp32 scalar, whose
    cotangent is the largest magnitude of the output's gradient.
    """

    linear: Linear
    layer: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        try:
            histories = {
                name: self.layer.variable(SCALING, name, jnp.zeros_like, zeros)
                for name, zeros in init_scaling(self.linear)._asdict().items()
            }
            seen = {name: self.layer.variable(SCALING, f"seen_{name}", jnp.zeros, ()) for name in ("x", "w")}
            slot = self.layer.variable(STATISTICS, "slot", jnp.zeros, ())
        except (ModifyScopeVariableError, ScopeCollectionNotFound, ScopeVariableNotFoundError) as error:
            name = "/".join(self.layer.path) or "the layer"
            raise ValueError(
                f"{name} has delayed scaling: give `apply` the collections {SCALING!r} and "
                f"{STATISTICS!r} that `init` makes, and name them in variable_axes of `nn.scan` and `nn.vmap`; or take "
                "a recipe with current scaling"
            ) from error
        y, observed = delayed_dot_general(
            *args,
            linear=self.linear,
            state=ScalingState(*(variable.value for variable in histories.values())),
            slot=slot.value,
            **kwargs,
        )
        if self.layer.is_mutable_collection(SCALING) and not self.layer.is_initializing():
            for name, variable in seen.items():
                variable.value = jnp.maximum(variable.value, getattr(observed, name))
        return y


def advance_scaling(scaling: Mapping[str, Any], statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Ends a step of a model with delayed scaling: its histories for the next one.

        variables = model.init(key, x)                  # params, fp8jax_scaling, fp8jax_statistics

        def loss_fn(params, statistics, scaling, x):
            variables = {"params": params, "fp8jax_statistics": statistics, "fp8jax_scaling": scaling}
            y, new = model.apply(variables, x, mutable=["fp8jax_scaling"])
            return loss(y), new["fp8jax_scaling"]

        (value, scaling), (grads, seen) = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(...)
        scaling = fp8jax.linen.advance_scaling(scaling, seen)

    Under gradient accumulation call it once a step: hand the scaling from one microbatch to the next, and merge the
    statistics by maximum (gradients are summed); under data parallelism in `jax.shard_map`, take the maximum over
    replicas of both. A layer that is called twice in one step sees the sum of its calls' gradients' maxima.

    Args:
        scaling: the collection "fp8jax_scaling" after the step's last `apply`.
        statistics: cotangents of the collection "fp8jax_statistics".

    Returns:
        The collection "fp8jax_scaling" for the next step. In evaluation nothing is advanced: do not make the collection
        mutable.

    Raises:
        ValueError: the two collections are not of the same layers.
    """
    flat, slots = flatten_dict(scaling), flatten_dict(statistics)
    layers = {path[:-1] for path in flat}
    if not layers or layers != {path[:-1] for path in slots}:
        raise ValueError("scaling and statistics are not collections of the same layers with delayed scaling")
    for layer in layers:
        state = ScalingState(*(flat[*layer, name] for name in ScalingState._fields))
        observed = Observed(flat[*layer, "seen_x"], flat[*layer, "seen_w"], slots[*layer, "slot"])
        for name, history in advance(state, observed)._asdict().items():
            flat[*layer, name] = history
        for name in ("seen_x", "seen_w"):
            flat[*layer, name] = jnp.zeros_like(flat[*layer, name])
    return unflatten_dict(flat)
