"""Runs a method of a Linen module as a transformed program.

Flax lifts the method to a function of the module's variables, random keys and arguments. This function is transformed.
It returns the variables that the method writes with its result.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax.core import lift, unfreeze
from jax.tree_util import GetAttrKey, keystr

from fp8jax.core import products
from fp8jax.core.recipe import Linear
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
from fp8jax.modules.scaled_linen import (
    SCALING,
    STATISTICS,
    get_variables_path,
    missing_variables_error,
)
from fp8jax.rewrite import training
from fp8jax.rewrite.frozen_params import frozen_leaf_predicate, is_frozen
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import RuleSet
from fp8jax.rewrite.states import (
    ParameterState,
    Stats,
    TrackedScaling,
    WeightUse,
    read_in_call,
    state_names,
    stats_names,
    zero_stats,
)
from fp8jax.rewrite.transform import Transformed

Path = tuple[str, ...]
# The groups of collections: parameters, and all others.
_COLLECTION_GROUPS = ("params", True)


class QuantizedRoot(NamedTuple):
    """A quantized module.

    Attributes:
        path: the path of the model that rule paths are relative to.
        field_path: the module's path in its model, if that was never bound.
        is_submodule: whether it is a submodule of this model that is called directly.
    """

    rules: RuleSet
    path: Path
    field_path: Path = ()
    is_submodule: bool = False

    def contains(self, scope: Any) -> bool:
        """Whether a scope is in a transformed run of the model."""
        return self._replace(is_submodule=False) in scope.flags.get("fp8jax", ())

    def with_flag(self, scope: Any) -> Any:
        """The flags of a scope in this run."""
        return scope.flags.copy({"fp8jax": (*scope.flags.get("fp8jax", ()), self._replace(is_submodule=False))})

    def model_path(self, scope_path: Path) -> Path:
        """The path in the model of the scope at `scope_path`."""
        relative_path = scope_path[len(self.path) :] if scope_path[: len(self.path)] == self.path else scope_path
        return (*self.field_path, *relative_path)


class LiftedCall(NamedTuple):
    """A method call as a function.

    Attributes:
        param_locations: for each parameter path the index of its scope and its path in the scope.
        is_mutable: for each scope, whether scaling variables can be written.
    """

    call: Call
    param_locations: dict[str, tuple[int, Path]]
    is_mutable: Sequence[bool]


def transform_method(method: Callable, root: QuantizedRoot, notices: Notices) -> Callable:
    """A method with the matmuls of recipes, called like the original one. `notices` are those of its model."""

    def run(lifted: LiftedCall, other_collections: Any) -> Any:
        planned_call, param_states = lifted.call.plan_call(), {}
        if not root.is_submodule:
            planned_call.warn(notices)
        for use, linear in planned_call.uses.items():
            if linear.stateful_strategies:
                scope_index, param_path = lifted.param_locations[use.path]
                weight, mutable = lifted.call.params.get(use.path), lifted.is_mutable[scope_index]
                param_states[use.path] = _read_state(
                    other_collections[scope_index], param_path, linear, use, weight, mutable
                )
        results, stats_by_path = planned_call.run_with_states(param_states)
        y, (params, written) = jax.tree.unflatten(results.structure, merge_leaves(results.leaves, iter(results.arrays)))
        written = tuple(unfreeze(collections) for collections in written)
        for path, stats in stats_by_path.items():
            scope_index, param_path = lifted.param_locations[path]
            if SCALING in written[scope_index]:
                training.record_observation(None)
                _merge_stats(written[scope_index], param_path, param_states[path].linear, stats)
        return y, (params, written)

    return _lift_method(method, root, run)


def init_method(method: Callable, root: QuantizedRoot) -> Callable:
    """A method that only adds scaling variables for existing parameters, called like the original one."""

    def run(lifted: LiftedCall, other_collections: Any) -> Any:
        new_variables: tuple[dict[str, Any], ...] = tuple({} for _ in other_collections)
        planned_call = lifted.call.plan_call()
        state_axes = {use.path: use.state_axes for use in planned_call.uses}
        for path, tracked_scaling in planned_call.init().items():
            scope_index, param_path = lifted.param_locations[path]
            if not lifted.is_mutable[scope_index]:
                raise missing_variables_error(
                    _get_layer_name(param_path), tracked_scaling.linear, is_initializing=True, has_other_layers=False
                )
            _add_variables(
                new_variables[scope_index], get_variables_path(param_path), tracked_scaling, state_axes[path]
            )
        return None, (tuple({} for _ in other_collections), new_variables)

    return _lift_method(method, root, run, is_init=True)


def plan_method(method: Callable, root: QuantizedRoot, record_plan: Callable[[CallPlan], None]) -> Callable:
    """A method that computes nothing and passes its plan to `record_plan`, called like the original one."""

    def run(lifted: LiftedCall, other_collections: Any) -> Any:
        record_plan(lifted.call.plan_call().plan)
        return None, (tuple({} for _ in other_collections), tuple({} for _ in other_collections))

    return _lift_method(method, root, run)


class _TracedCall(threading.local):
    """Flax's functions for the call that is traced now: the lifted core, variables to scopes, and scopes to variables.

    They hold variables, so the cached function of a call does not contain them.
    """

    current: tuple[Callable, Callable, Callable] | None = None

    @contextlib.contextmanager
    def set_current(self, *lifting: Callable) -> Iterator[None]:
        previous, self.current = self.current, lifting  # type: ignore[assignment]
        try:
            yield
        finally:
            self.current = previous


_traced_call = _TracedCall()


class _TracedFunction(NamedTuple):
    """The function of a call, and its scopes' counters of random keys after tracing."""

    transformed: Transformed
    counters: list[dict[Any, Any]]


def _lift_method(
    method: Callable, root: QuantizedRoot, run: Callable[[LiftedCall, Any], Any], is_init: bool = False
) -> Callable:
    """A method that calls `run` with the lifted call; `is_init` hides all variables but parameters."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        fields = _module_fingerprint(self)

        def transform(core: Callable) -> Callable:
            def inner(scope_fn: Callable, repack: Callable, groups: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                # At initialization only parameters exist.
                input_groups = (groups[0], tuple({} for _ in groups[1])) if is_init else groups
                scopes = _root_scopes(scope_fn(input_groups, rngs))
                call_tree = (input_groups, rngs, args, kwargs)
                leaves, structure = jax.tree.flatten_with_path(
                    call_tree, is_leaf=frozen_leaf_predicate(input_groups[0])
                )
                values = [x for _, x in leaves]
                leaf_kinds, param_locations = _classify_leaves(leaves, root, [scope.path for scope in scopes])
                function = _get_function(method, root, fields, structure, leaf_kinds, values, scopes)
                call = Call(function.transformed, *partition_leaves(leaf_kinds, values))
                mutable = [scope.is_mutable_collection(SCALING) for scope in scopes]
                with _traced_call.set_current(core, scope_fn, repack):
                    results = run(LiftedCall(call, param_locations, mutable), groups[1])
                for scope, counters in zip(scopes, function.counters, strict=True):
                    scope.rng_counters.update(_copy_counters(counters))
                return results

            return lift.pack(inner, _COLLECTION_GROUPS, _COLLECTION_GROUPS, (True,), enable_kwargs=True)

        return nn.transforms.decorator_lift_transform(transform, method)(self, *args, **kwargs)

    return call


def _root_scopes(scopes: Sequence[Any]) -> list[Any]:
    return [scope for scope in dict.fromkeys(scopes) if scope.parent is None]


def _copy_counters(counters: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy of a scope's counters and of those of the scopes in it."""
    return {key: _copy_counters(n) if isinstance(n, Mapping) else n for key, n in counters.items()}


def _classify_leaves(
    leaves: Sequence[tuple[Any, Any]], root: QuantizedRoot, scopes: Sequence[Path]
) -> tuple[tuple[CallLeaf, ...], dict[str, tuple[int, Path]]]:
    """The kinds of the leaves of (variable groups, keys, args, kwargs), and the parameters' locations."""
    kinds, param_locations = list[CallLeaf](), dict[str, tuple[int, Path]]()
    for path, x in leaves:
        if not (is_array(x) or is_frozen(x)):
            kinds.append(CallLeaf("setting", x))
        elif path[0].idx > 1:
            kinds.append(CallLeaf("argument"))
        elif path[0].idx == 0 and path[1].idx == 0:
            steps = [step for step in path[4:] if step != GetAttrKey("value")]  # metadata around a parameter
            param_path, scope_index = tuple(keystr((step,), simple=True) for step in steps), path[2].idx
            kinds.append(CallLeaf("parameter", "/".join((*root.model_path(scopes[scope_index]), *param_path))))
            param_locations[kinds[-1].value] = scope_index, param_path
        else:
            kinds.append(CallLeaf("array"))
    return tuple(kinds), param_locations


def _get_function(
    method: Callable,
    root: QuantizedRoot,
    fields: Hashable,
    structure: Any,
    leaf_kinds: tuple[CallLeaf, ...],
    values: Sequence[Any],
    scopes: Sequence[Any],
) -> _TracedFunction:
    """The traced function of a call of `method`.

    It is cached unless its values are traced, random keys were drawn before, or its modules cannot be compared.

    Args:
        fields: `_module_fingerprint` of the module; None if it cannot be compared.
        structure: tree structure of (variable groups, keys, args, kwargs).
    """
    shapes = tuple((x.shape, x.dtype) for x in values if is_array(x) or is_frozen(x))
    context = tuple((scope.path, repr(scope.mutable), scope.flags) for scope in scopes)
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))
    has_drawn_keys = any(n for scope in scopes for n in scope.rng_counters.values())
    settings = [leaf.value for leaf in leaf_kinds if leaf.kind == "setting"]
    make: Any = _make_function
    if fields is None or is_traced or has_drawn_keys or any(isinstance(x, nn.Module) for x in settings):
        make = _make_function.__wrapped__
    try:
        return make(method, root, (fields, static_fingerprint(*settings)), structure, leaf_kinds, shapes, context)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _make_function.__wrapped__(method, root, None, structure, leaf_kinds, shapes, context)


@functools.lru_cache(maxsize=128)
def _make_function(
    method: Callable,
    root: QuantizedRoot,
    fields: Any,
    structure: Any,
    leaf_kinds: tuple[CallLeaf, ...],
    shapes: Any,
    context: Any,
) -> _TracedFunction:
    counters: list[dict[Any, Any]] = []

    def call(leaves: list[Any]) -> Results:
        assert _traced_call.current is not None
        core, scope_fn, repack = _traced_call.current
        groups, rngs, args, kwargs = jax.tree.unflatten(structure, leaves)
        scopes = scope_fn(groups, rngs)
        roots = _root_scopes(scopes)
        for scope in scopes:
            scope.flags = root.with_flag(scope)
        y = core(scopes, *args, **kwargs)
        result_leaves, result_structure = jax.tree.flatten((y, repack(scopes)))
        counters[:] = [_copy_counters(scope.rng_counters) for scope in roots]
        result_kinds = tuple(CallLeaf("array") if is_array(x) else CallLeaf("setting", x) for x in result_leaves)
        count = sum(map(is_array, jax.tree.leaves(y)))
        return Results([x for x in result_leaves if is_array(x)], result_structure, result_kinds, count)

    arrays = [leaf for leaf in leaf_kinds if leaf.kind != "setting"]
    arrays_with_shapes = zip(arrays, shapes, strict=True)
    names = LayerNames("", [(leaf.value, shape) for leaf, (shape, _) in arrays_with_shapes if leaf.kind == "parameter"])
    is_model = not root.is_submodule
    transformed = transform_call(
        call,
        method,
        leaf_kinds,
        root.rules,
        names=names,
        requires_product=is_model,
        is_module_method=True,
        checks_rules=is_model,
        state_axes=None,
    )
    return _TracedFunction(transformed, counters)


def _module_fingerprint(module: nn.Module) -> Hashable:
    """A hashable key that distinguishes modules with different programs; None if there is none or calls are watched."""
    if products.find_patched_matmul() or _is_intercepted():
        return None
    module_numbers: dict[int, int] = {}

    def field_values(x: Any) -> Hashable:
        if isinstance(x, nn.Module):
            if id(x) in module_numbers:
                return module_numbers[id(x)]
            module_numbers[id(x)] = len(module_numbers)
            names = [f.name for f in dataclasses.fields(x) if f.name != "parent"]
            return type(x), *((name, field_values(getattr(x, name, None))) for name in names)
        if isinstance(x, Mapping):
            return type(x), *((key, field_values(value)) for key, value in x.items())
        if isinstance(x, (list, tuple)):
            return type(x), *map(field_values, x)
        return x, static_fingerprint(x)

    try:
        fingerprint = field_values(module)
        hash(fingerprint)
    except TypeError:
        return None
    return fingerprint


def _is_intercepted() -> bool:
    """Whether calls of modules are captured or intercepted."""
    flax: Any = nn.module
    try:  # no public name; if it changes, each call is traced
        is_captured = any(flax._context.capture_stack) or flax._context.call_info_stack
        return bool(is_captured or len(flax._global_interceptor_stack))
    except (AttributeError, TypeError):
        return True


def _read_state(
    collections: Mapping[str, Any], param_path: Path, linear: Linear, use: WeightUse, weight: Any, is_mutable: bool
) -> ParameterState:
    """The state that the matmuls of a parameter, `weight` in this call, read from its scaling variables."""
    path, layer = get_variables_path(param_path), _get_layer_name(param_path)
    scaling, statistics = (_get_variables(collections, name, path) for name in (SCALING, STATISTICS))
    variables = {**scaling, **statistics}
    missing = set(state_names(linear).values()) - set(scaling)
    if missing or ("dy" in stats_names(linear) and "slot" not in statistics):
        has_other_layers = bool(collections.get(SCALING))
        raise missing_variables_error(layer, linear, is_initializing=False, has_other_layers=has_other_layers)
    stored = ParameterState.from_variables(linear, use.state_axes, variables)
    return read_in_call(stored, weight, layer, training.LINEN, is_mutable=is_mutable)


def _get_layer_name(param_path: Path) -> str:
    return "/".join(param_path[:-1]) or "the layer"


def _get_variables(collections: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    """The variables at a path of a collection; {} if there is no such path."""
    node: Any = collections.get(name, {})
    for step in path:
        node = node.get(step, {}) if isinstance(node, Mapping) else {}
    return node if isinstance(node, Mapping) else {}


def _merge_stats(collections: dict[str, Any], param_path: Path, linear: Linear, stats: Stats) -> None:
    """Merge the statistics of a call into those in the variables."""
    variables: Any = _get_variables(collections, SCALING, get_variables_path(param_path))
    for operand, value in stats.items():
        strategy, name = linear.stateful_strategies[operand], f"seen_{operand}"
        variables[name] = strategy.merge_stats(variables[name], value)


def _add_variables(
    collections: dict[str, Any], path: Path, tracked_scaling: TrackedScaling, layer_axes: tuple[int, ...]
) -> None:
    """Add the variables of one scaling at a path."""
    linear, state = tracked_scaling.linear, tracked_scaling.state
    variables = ParameterState(linear, layer_axes, state, zero_stats(linear, layer_axes)).to_variables()
    slot = {"slot": variables.pop("slot")} if "slot" in variables else {}
    _put_variables(collections.setdefault(SCALING, {}), path, variables)
    if slot:
        _put_variables(collections.setdefault(STATISTICS, {}), path, slot)


def _put_variables(collection: dict[str, Any], path: Path, variables: dict[str, Any]) -> None:
    for step in path:
        collection = collection.setdefault(step, {})
    collection |= variables
