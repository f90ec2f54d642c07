"""Calls of methods of NNX modules as pure functions of parameters, other variables and arguments."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from fp8jax.core import products
from fp8jax.modules.calls import (
    Call,
    CallLeaf,
    LayerNames,
    Results,
    is_array,
    merge_leaves,
    partition_leaves,
    static_fingerprint,
    transform_call,
)
from fp8jax.modules.scaled import ParameterStateModule
from fp8jax.ops.products.lora import AdaptedWeight, Adapter
from fp8jax.rewrite import telemetry as rewrite_telemetry
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import RuleSet
from fp8jax.rewrite.states import ParameterState
from fp8jax.rewrite.transform import Transformed


class FrozenParam(nnx.Variable):
    """A parameter that is not trained: an array or an `fp8jax.FrozenWeight`. Metadata `written` is its class before."""


def collect_adapters(attributes: Mapping[str, Any]) -> dict[str, Adapter]:
    """The adapters among a module's variables, by the name of the parameter in it."""
    factors: dict[str, dict[str, Any]] = {}
    for variable in attributes.values():
        metadata = variable.get_metadata() if isinstance(variable, nnx.LoRAParam) else {}
        if "of" in metadata and "factor" in metadata:
            factors.setdefault(metadata["of"], {})[metadata["factor"]] = variable
    return {
        name: Adapter(pair["a"].get_raw_value(), pair["b"].get_raw_value(), pair["a"].alpha)
        for name, pair in factors.items()
        if len(pair) == 2
    }


def with_adapters(paths: Any, variables: Any, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a call, by path, each with its adapter."""
    modules: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path, variable in zip(paths, variables, strict=True):
        if isinstance(variable, nnx.LoRAParam) and path[0] == 0:
            modules.setdefault(tuple(path[1:-1]), {})[str(path[-1])] = variable
    adapted_params = dict(params)
    for module_path, lora_params in modules.items():
        for name, adapter in collect_adapters(lora_params).items():
            path = "/".join(map(str, (*module_path, name)))
            adapted_params[path] = AdaptedWeight(params[path], adapter)
    return adapted_params


def restore_param_classes(module: Any) -> Callable[[], None]:
    """Give frozen parameters the classes that they had before, in place. The returned function undoes it."""
    frozen_params = {id(v): v for _, v in nnx.iter_graph(module) if isinstance(v, FrozenParam)}.values()
    for variable in frozen_params:
        object.__setattr__(variable, "__class__", variable.get_metadata()["written"])

    def undo() -> None:
        for variable in frozen_params:
            object.__setattr__(variable, "__class__", FrozenParam)

    return undo


_TAG = "fp8jax"


class ModuleMethod(NamedTuple):
    """A method of a module class, to be run as a function.

    Attributes:
        requires_product: whether a call without a product that can be quantized raises an error.
        restore_classes: restores the user's classes of the modules in a graph, and returns a function that undoes this.
    """

    original: Callable
    name: str
    rules: RuleSet
    prefix: str
    requires_product: bool
    restore_classes: Callable[[Any], Callable[[], None]]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["structure", "leaves", "num_results", "changed", "has_graph_changes"],
)
@dataclasses.dataclass(frozen=True)
class _Results(Results):
    """The results and side effects of a call.

    Attributes:
        structure: of the results; with `has_graph_changes` the graph of results, module and arguments.
        changed: the variables with new values, by their numbers.
        has_graph_changes: whether more than values of variables changed, or results contain modules.
    """

    changed: tuple[tuple[int, CallLeaf], ...] = ()
    has_graph_changes: bool = False

    def apply(self, call: "SplitCall") -> Any:
        """The results of a call, after its side effects on the module and the arguments."""
        new = iter(self.arrays)
        leaves = merge_leaves(self.leaves, new, input_leaves=call.raw_values)
        if self.has_graph_changes:
            with nnx.merge_context(_TAG, inner=False) as context:
                y, *_ = context.unflatten(self.structure, leaves)
            return y
        changed_indices, changed = zip(*self.changed, strict=True) if self.changed else ((), ())
        for i, value in zip(changed_indices, merge_leaves(changed, new, input_leaves=call.raw_values), strict=True):
            call.variables[i].set_raw_value(value)
        return jax.tree.unflatten(self.structure, leaves)


class SplitCall(NamedTuple):
    """A call, and its leaves as values and as variables or arrays."""

    call: Call
    raw_values: list[Any]
    variables: Sequence[Any]


def run(
    module: nnx.Module,
    method: ModuleMethod,
    args: Any,
    kwargs: Any,
    read_states: Callable[[Sequence[Any], Mapping[str, Any]], Mapping[str, ParameterState]],
    notices: Notices | None = None,
) -> Any:
    """The results of a call, and the statistics of its products, by parameter path.

    The module and modules among the arguments change as by the method: values of variables, new variables and modules,
    settings.

    Args:
        args, kwargs: of the call: arrays, modules and settings in any structure. Python numbers are settings.
        read_states: returns what the module stores for its parameters, by path, from the leaves as variables and the
            parameters by path.
        notices: past warnings of the model; None for a part of a model, which does not warn.
    """
    with nnx.update_context(_TAG):
        call = _split_call(module, method, args, kwargs)
        planned_call = call.call.plan_call()
        if notices is not None:
            planned_call.warn(notices)
        results, stats = planned_call.run_with_states(read_states(call.variables, call.call.params))
        y = results.apply(call)
    return y, stats


def telemetry(step: Callable) -> Callable[..., tuple[Any, rewrite_telemetry.Telemetry]]:
    """`fp8jax.telemetry` of a function of NNX objects, such as a training step of a model and an optimizer.

        step_with_telemetry = nnx.jit(fp8jax.nnx.telemetry(train_step))
        loss, statistics = step_with_telemetry(model, optimizer, batch)

    Args:
        step: a function that changes the variables of its arguments, and returns arrays.

    Returns:
        A function with the arguments and side effects of `step`. It returns the results and the statistics.
    """

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> tuple[Any, rewrite_telemetry.Telemetry]:
        graph, state = nnx.split((args, kwargs))

        def run_on_copies(state: Any) -> Any:
            copies: Any = nnx.merge(graph, state)
            copied_args, copied_kwargs = copies
            results = step(*copied_args, **copied_kwargs)
            return results, nnx.state(copies, nnx.Variable)

        (results, changed), statistics = rewrite_telemetry.telemetry(run_on_copies)(state)
        nnx.update((args, kwargs), changed)
        return results, statistics

    return call


def plan_call(module: nnx.Module, method: ModuleMethod, args: Any, kwargs: Any) -> CallPlan:
    """The plan of a call."""
    with nnx.update_context(_TAG):
        return _split_call(module, method, args, kwargs).call.plan_call().plan


def _split_call(module: nnx.Module, method: ModuleMethod, args: Any, kwargs: Any) -> SplitCall:
    with nnx.split_context(_TAG) as context:
        graph, state = context.flatten((module, args, kwargs))
    variables = state.leaves
    raw = [_raw_value(v) for v in variables]
    leaves = tuple(_classify_leaf(method, *each) for each in zip(state.paths, variables, raw, strict=True))
    params, other_arrays = partition_leaves(leaves, raw)
    params = with_adapters(state.paths, variables, params)
    shapes = tuple((path, x.shape) for path, x in params.items() if hasattr(x, "shape"))
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(raw))
    try:
        # Inside a traced program each call is traced again; outside of programs a call is traced once.
        fingerprint = None if is_traced or products.find_patched_matmul() else _settings_fingerprint(graph, leaves)
        make = _transform_method.__wrapped__ if fingerprint is None else _transform_method
        transformed_call = make(method, graph, leaves, shapes, fingerprint, _state_axes(module, variables))
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        method_name = f"{type(module).__name__}.{method.name}"
        raise TypeError(
            f"an argument of {method_name} that is neither an array nor a module must be hashable: {error}"
        ) from None
    return SplitCall(Call(transformed_call, params, other_arrays), raw, variables)


def _settings_fingerprint(graph: Any, leaves: Sequence[CallLeaf]) -> Any:
    """`static_fingerprint` of the settings of a call, or None if they have none."""
    settings = [getattr(value, "value", None) for _, value in graph.attributes]
    try:
        return static_fingerprint(*settings, *(leaf.value for leaf in leaves if leaf.kind == "setting"))
    except TypeError:
        return None


def _classify_leaf(method: ModuleMethod, path: Any, variable: Any, x: Any) -> CallLeaf:
    arrays = jax.tree.leaves(x)
    if not all(map(is_array, arrays)):
        return CallLeaf("setting", x)
    if path[0] > 0:
        return CallLeaf("argument", num_arrays=len(arrays))
    if is_parameter(variable, path[1:], method.rules, method.prefix):
        # A pytree that replaces a parameter is one array of the program.
        return CallLeaf("parameter", "/".join(map(str, path[1:])))
    adapter = "/".join(map(str, path[1:])) if isinstance(variable, nnx.LoRAParam) else None
    return CallLeaf("array", adapter, len(arrays))


def is_parameter(variable: Any, path: Sequence[Any], rules: RuleSet, prefix: str = "") -> bool:
    """Whether a recipe may quantize products with a variable. Products of a variable with an adapter are quantized only
    if a rule matches."""
    if not isinstance(variable, nnx.LoRAParam):
        return isinstance(variable, (nnx.Param, FrozenParam))
    steps = [*filter(None, [prefix]), *map(str, path)]
    return rules.has_user_rule("/".join(steps), "/".join(steps[:-1]))


@functools.lru_cache(maxsize=128)
def _transform_method(
    method: ModuleMethod,
    graph: Any,
    leaves: tuple[CallLeaf, ...],
    shapes: Any,
    fingerprint: Any,
    state_axes: tuple[tuple[str, tuple[int, ...]], ...],
) -> Transformed:
    """A method as a function of parameters and other arrays, for one structure of the call.

    Settings with another `fingerprint` have another function. Each call has its own if another library has changed
    JAX's products.
    """

    def call(raw: list[Any]) -> _Results:
        with nnx.merge_context(_TAG, inner=True) as context:
            module, args, kwargs = context.unflatten(graph, list(raw))
        frozen_indices = _frozen_indices((module, args, kwargs), leaves)
        restore_quantized = method.restore_classes(module)
        y = method.original(module, *args, **kwargs)
        restore_quantized()
        return _collect_results(graph, raw, y, (module, args, kwargs), frozen_indices)

    names = LayerNames(method.prefix, shapes)
    return transform_call(
        call,
        method.original,
        leaves,
        method.rules,
        names=names,
        requires_product=method.requires_product,
        checks_rules=False,
        state_axes=dict(state_axes),  # a module's states are made before its products are known
    )


def find_state_modules(module: nnx.Module, variables: Sequence[Any]) -> dict[str, ParameterStateModule]:
    """The modules that hold the states and codes of a module's parameters, by parameter path."""
    if not any(isinstance(v, ParameterStateModule.VARIABLES) for v in variables):
        return {}
    modules_by_path = [(path, m) for path, m in nnx.iter_modules(module) if isinstance(m, ParameterStateModule)]
    return {"/".join(m.get_weight_path(path)): m for path, m in modules_by_path}


def _state_axes(module: nnx.Module, variables: Sequence[Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The leading axes of the states and codes of a module's parameters."""
    return tuple((path, holder.layer_axes()) for path, holder in find_state_modules(module, variables).items())


def _frozen_indices(call_tree: Any, leaves: Sequence[CallLeaf]) -> dict[int, int]:
    """The numbers of frozen parameters, by identity. A loop returns them as other arrays."""
    if not any(leaf.kind == "parameter" for leaf in leaves):
        return {}
    _, state = nnx.graphlib.flatten(call_tree, graph=True)
    return {id(v): i for i, v in enumerate(state.leaves) if isinstance(v, FrozenParam)}


def _collect_results(
    graph: Any, raw: Sequence[Any], y: Any, call_tree: Any, frozen_indices: Mapping[int, int]
) -> _Results:
    """The results and side effects of a call, within its trace."""
    input_indices = {id(x): i for i, x in enumerate(raw)}
    graph_after, state = nnx.graphlib.flatten(call_tree, graph=True)
    values = [_raw_value(v) for v in state.leaves]
    result_nodes = jax.tree.leaves(y, is_leaf=_is_graph)
    if graph_after == graph and not any(map(_is_graph, result_nodes)):
        changed = [i for i, x in enumerate(values) if x is not raw[i] and id(state.leaves[i]) not in frozen_indices]
        if all(isinstance(state.leaves[i], nnx.Variable) for i in changed):
            result_values, structure = jax.tree.flatten(y)
            result_leaves = [_result_leaf(x, input_indices) for x in result_values]
            changed_leaves = [(i, _result_leaf(values[i], input_indices)) for i in changed]
            result_arrays = [x for x, leaf in zip(result_values, result_leaves, strict=True) if leaf.kind == "array"]
            changed_arrays = [values[i] for i, leaf in changed_leaves if leaf.kind == "array"]
            with nnx.split_context(_TAG):
                pass  # clears this trace from the context
            return _Results(
                [*result_arrays, *changed_arrays],
                structure,
                tuple(result_leaves),
                len(result_arrays),
                tuple(changed_leaves),
            )
    with nnx.split_context(_TAG) as context:
        graph_after, state = context.flatten((y, *call_tree))
    result_values = [_raw_value(v) for v in state.leaves]
    frozen_inputs = (frozen_indices.get(id(v)) for v in state.leaves)
    result_leaves = [
        _result_leaf(x, input_indices) if i is None else CallLeaf("passthrough", i)
        for i, x in zip(frozen_inputs, result_values, strict=True)
    ]
    pairs = list(zip(state.paths, result_leaves, strict=True))
    result_arrays = [x for x, leaf in zip(result_values, result_leaves, strict=True) if leaf.kind == "array"]
    count = sum(leaf.num_arrays for path, leaf in pairs if path[0] == 0 and leaf.kind == "array")
    return _Results(result_arrays, graph_after, tuple(result_leaves), count, has_graph_changes=True)


def _is_graph(x: Any) -> bool:
    return nnx.graphlib.is_graph_node(x) or isinstance(x, nnx.Variable)


def _raw_value(x: Any) -> Any:
    return x.get_raw_value() if isinstance(x, nnx.Variable) else x


def _result_leaf(x: Any, input_indices: Mapping[int, int]) -> CallLeaf:
    if id(x) in input_indices:
        return CallLeaf("passthrough", input_indices[id(x)])
    arrays = jax.tree.leaves(x)
    return CallLeaf("array", num_arrays=len(arrays)) if all(map(is_array, arrays)) else CallLeaf("setting", x)


def count_kernel_axes(layer: Any) -> tuple[int, int]:
    """The numbers of input and output axes of a layer's kernel, its last ones; `nnx.vmap` puts others before them."""
    if isinstance(layer, nnx.Linear):
        return 1, 1
    return len(_as_tuple(layer.in_features)), len(_as_tuple(layer.out_features))


def count_layer_axes(layer: Any) -> int:
    """The number of a kernel's first axes that are those of `nnx.vmap`, or of the experts of an `nnx.Einsum`."""
    if not isinstance(layer, nnx.Einsum):
        return layer.kernel.ndim - sum(count_kernel_axes(layer))
    operands, _, y = (layer.einsum_str or "").replace(" ", "").partition("->")
    x, _, kernel = operands.partition(",")
    has_experts = kernel[:1].isalpha() and kernel[0] in x and kernel[0] in y
    return layer.kernel.ndim - len(layer.kernel_shape) + has_experts


def _as_tuple(features: int | tuple[int, ...]) -> tuple[int, ...]:
    return (features,) if isinstance(features, int) else tuple(features)
