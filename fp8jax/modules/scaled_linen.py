"""Scalings with a state in Linen models: states and statistics of gradients in their own collections."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.typing import ArrayLike

from fp8jax.core.recipe import OPERANDS, Linear
from fp8jax.core.scaling import Automatic, AxisNames
from fp8jax.modules.scaled import STATE_PREFIX
from fp8jax.ops.products.linear import collects_stats
from fp8jax.rewrite import training
from fp8jax.rewrite.rules import Rules, as_rule_set
from fp8jax.rewrite.states import ParameterState, bound_per_layer, scaling_names, state_names

SCALING, STATISTICS = "fp8jax_scaling", "fp8jax_statistics"


def missing_variables_error(layer: str, linear: Linear, *, is_initializing: bool, has_other_layers: bool) -> ValueError:
    """The error for a layer with missing variables.

    Args:
        layer: its path in messages.
        is_initializing: whether `init` cannot add them.
        has_other_layers: whether other layers have theirs, as in a checkpoint of a model that left this layer alone.
    """
    names = [SCALING, *([STATISTICS] if collects_stats(linear, "dy") else [])]
    axes = ", ".join(f'"{name}": 0' for name in ("params", *names))
    if has_other_layers:
        fix = (
            f"other layers have variables in {SCALING!r} but this one has none, as after a checkpoint of a model that "
            f"did not quantize it. Exclude it with a rule, [fp8jax.Rule({layer!r}, None), recipe], or add the "
            "variables of `init` to the saved ones: {**new, **saved} with flax.traverse_util.flatten_dict(variables)"
        )
    elif is_initializing:
        fix = (
            "it runs in an `nn.scan` or `nn.vmap` that has no axis for the variables of this scaling. Pass "
            f"variable_axes={{{axes}}} to it, or use a recipe with current scaling"
        )
    else:
        fix = (
            f"pass the collections {' and '.join(map(repr, names))} from `init` to `apply`, and "
            f"variable_axes={{{axes}}} to an enclosing `nn.scan` or `nn.vmap`; or use a recipe with current scaling"
        )
    return ValueError(f"{layer} has {scaling_names(linear)} scaling: {fix}")


def get_variables_path(param_path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the variables of a parameter's products in their collections."""
    return param_path[:-1] if param_path[-1] == "kernel" else (*param_path[:-1], f"{STATE_PREFIX}{param_path[-1]}")


def get_layer_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the layer to which variables at a path belong."""
    return path[:-1] if path and path[-1].startswith(STATE_PREFIX) else path


def get_weight_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the parameter that variables at a path belong to."""
    layer = get_layer_path(path)
    return (*layer, path[-1].removeprefix(STATE_PREFIX) if len(layer) < len(path) else "kernel")


def advance_scaling(
    scaling: Mapping[str, Any],
    statistics: Mapping[str, Any],
    rules: Rules | None = None,
    *,
    axis_name: AxisNames = None,
    apply_if: ArrayLike | None = None,
) -> dict[str, Any]:
    """Ends a step of a model with a scaling that observes its operands, such as delayed scaling.

        variables = model.init(key, x)                  # params, fp8jax_scaling, fp8jax_statistics

        def loss_fn(params, statistics, scaling, x):
            variables = {"params": params, "fp8jax_statistics": statistics, "fp8jax_scaling": scaling}
            y, new = model.apply(variables, x, mutable=["fp8jax_scaling"])
            return loss(y), new["fp8jax_scaling"]

        (value, scaling), (grads, seen) = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(...)
        scaling = fp8jax.linen.advance_scaling(scaling, seen)

    Under gradient accumulation call it once a step. Pass the scaling from one microbatch to the next, and merge the
    statistics by maximum (gradients are summed). For data parallelism in `jax.shard_map`, pass `axis_name`.

    Args:
        scaling: the collection "fp8jax_scaling" after the step's last `apply`.
        statistics: cotangents of the collection "fp8jax_statistics".
        rules: those of `fp8jax.linen.quantize`; delayed scaling needs none.
        axis_name: mesh axes of replicas inside `jax.shard_map`; their statistics are merged.
        apply_if: bool scalar; if it is False, as after a step that was skipped, states stay unchanged. None is True.

    Returns:
        The collection "fp8jax_scaling" for the next step. In evaluation do not make the collection mutable.

    Raises:
        ValueError: the two collections are not of the same layers, or the rules are missing.
    """
    training.record_advance(training.ADVANCE)
    flat, slots = flatten_dict(scaling), flatten_dict(statistics)
    variables_by_layer: dict[tuple[str, ...], dict[str, Array]] = {}
    for *layer, name in sorted(flat):
        variables_by_layer.setdefault(tuple(layer), {})[name] = flat[*layer, name]
    layers_with_slots = {path[:-1] for path in slots}
    if not variables_by_layer or not layers_with_slots <= variables_by_layer.keys():
        raise ValueError("scaling and statistics are not collections of the same layers with delayed scaling")
    for layer, variables in variables_by_layer.items():
        linear = _find_linear(layer, variables, rules)
        has_slot = layer in layers_with_slots
        if collects_stats(linear, "dy") and not has_slot:
            name = "/".join(get_layer_path(layer)) or "the layer"
            raise ValueError(
                f"{name} has {scaling_names(linear)} scaling, but there are no statistics for the gradient of its "
                f"output. Pass the collection 'fp8jax_statistics'. {training.LINEN_STEP}"
            )
        if has_slot and not collects_stats(linear, "dy"):
            raise ValueError("scaling and statistics are not collections of the same layers with delayed scaling")
        slot = {"slot": slots[*layer, "slot"]} if has_slot else {}
        stored = ParameterState.from_variables(linear, (), variables | slot).end_step(axis_name, apply_if)
        flat |= {(*layer, name): value for name, value in stored.to_variables().items() if name != "slot"}
    return unflatten_dict(flat)


def check_stats_not_lost(scaling: Mapping[str, Any]) -> None:
    """Checks that the collection of a train state is the one that the calls of a step have written.

    Raises:
        ValueError: the program has collected statistics, but not in this collection, or outside of a program it has
            none.
    """
    stats = [value for path, value in flatten_dict(scaling).items() if path[-1] in ("seen_x", "seen_w")]
    is_traced = any(isinstance(value, jax.core.Tracer) for value in stats)
    if stats and (training.are_stats_lost(None, stats) if is_traced else not any(map(np.any, stats))):
        raise ValueError(
            "apply_gradients without scaling= loses the statistics of this step, and the scales do not change. Pass "
            f"scaling=new[{SCALING!r}], the collection that apply(..., mutable=[{SCALING!r}]) returned"
        )


def update_weight_amax_bounds(scaling: Mapping[str, Any], bounds: Mapping[tuple[str, ...], Array]) -> dict[str, Any]:
    """Gives the layers of a model with automatic weight scaling their bounds: call it after each update.

        updates, opt_state = tx.update(grads, opt_state, params)  # of a chain that ends with fp8jax.track_weight_amax()
        scaling = fp8jax.linen.update_weight_amax_bounds(scaling, fp8jax.get_weight_amax_bounds(opt_state))

    Args:
        scaling: the collection "fp8jax_scaling".
        bounds: what `fp8jax.get_weight_amax_bounds` reads from the state of an optimizer of the collection "params".

    Returns:
        The collection for the next step, and for evaluation.

    Raises:
        ValueError: the model has no layer with automatic weight scaling, or the optimizer does not track a weight.
    """
    return with_bounds(scaling, bounds, only_trained=False)


def with_bounds(
    scaling: Mapping[str, Any], bounds: Mapping[tuple[str, ...], Array], only_trained: bool
) -> dict[str, Any]:
    """The collection with the bounds of an optimizer; `only_trained` skips weights that it does not have.

    Raises:
        ValueError: the model has no layer with automatic weight scaling, or the optimizer does not track its weight.
    """
    training.record_advance(training.BOUNDS)
    flat, name = flatten_dict(scaling), Automatic().variable_name("w")
    weight_paths = {path: get_weight_path(path[:-1]) for path in flat if path[-1] == name}
    if not weight_paths:
        raise ValueError("the model has no layer with automatic weight scaling")
    if only_trained:
        weight_paths = {path: weight for path, weight in weight_paths.items() if weight in bounds} or weight_paths
    for path, weight in weight_paths.items():
        flat[path] = bound_per_layer(bounds.get(weight), "/".join(weight), flat[path].shape)
    return unflatten_dict(flat)


def reset_weight_amax_bounds(scaling: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The collection "fp8jax_scaling" of a model with automatic weight scaling, with measured bounds.

    Call it after loading parameters into a model that has bounds, which would clip them. A model without bounds then
    needs no measurement in each call. If training continues, call `fp8jax.reset_weight_amax_bounds` for the
    optimizer, too.

    Raises:
        ValueError: the model has no layer with automatic weight scaling.
    """
    kernels = flatten_dict(nn.meta.unbox(params))
    bounds = {path: Automatic().measure_amax(kernel) for path, kernel in kernels.items() if jnp.ndim(kernel) >= 2}
    return update_weight_amax_bounds(scaling, bounds)


def _find_linear(layer: tuple[str, ...], variables: Mapping[str, Array], rules: Rules | None) -> Linear:
    """The recipe of the layer with these variables in the collection of states."""
    path = "/".join(get_layer_path(layer))
    name = path or "the layer"
    if rules is not None:
        linear = as_rule_set(rules).choose(path, aliases=["/".join(get_weight_path(layer))]).linear
        if linear is None or not set(state_names(linear).values()) <= set(variables):
            raise ValueError(
                f"{name} has other scaling variables than these rules create; pass the rules that `quantize` had"
            )
        return linear
    if not set(OPERANDS) <= set(variables):
        raise ValueError(
            f"{name} has variables {sorted(variables)}, which are not those of delayed scaling. Pass the rules= of "
            "fp8jax.linen.quantize to TrainState.create, end_step or advance_scaling"
        )
    return Linear("e4m3", "e4m3", "e5m2", scaling="delayed", amax_history_length=variables["x"].shape[-1])
