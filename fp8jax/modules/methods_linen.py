"""Runs a method of a Linen module as a transformed program.

Flax lifts the method to a function of the module's variables, random keys and arguments; its program is read and
planned, and run with operations of recipes. What the method writes into collections comes back beside its result.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import lift, unfreeze
from jax.tree_util import GetAttrKey, keystr

from fp8jax.core import products
from fp8jax.core.recipe import Linear
from fp8jax.modules.calls import Call, CallLeaf, Names, Results, contents, is_plain, joined, parted
from fp8jax.modules.calls import transformed as as_function
from fp8jax.modules.scaled import nothing_seen, observed_operands
from fp8jax.modules.scaled_linen import (
    NOT_MUTABLE,
    SCALING,
    STATISTICS,
    STATISTICS_LOST,
    absent,
    absent_beside_others,
    variables_path,
)
from fp8jax.ops.scaled import ScalingState, observes
from fp8jax.rewrite import training
from fp8jax.rewrite.held import is_held, leaf_in
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import Ordered
from fp8jax.rewrite.states import Noted, ParameterState, TrackedScaling, Use, scaling_names
from fp8jax.rewrite.transform import Transformed

Place = tuple[str, ...]
# Parameters, and all other collections.
_GROUPS = ("params", True)


class Root(NamedTuple):
    """A quantized module.

    Attributes:
        rules: which recipe is whose.
        path: where the model is whose paths these match.
        steps: where the module is in its model, if that was never bound.
        part: it is a part of this model, called by itself.
    """

    rules: Ordered
    path: Place
    steps: Place = ()
    part: bool = False

    def inside(self, scope: Any) -> bool:
        """Whether a scope is one of a run of the model."""
        return self._replace(part=False) in scope.flags.get("fp8jax", ())

    def flags(self, scope: Any) -> Any:
        """The flags of such a scope."""
        return scope.flags.copy({"fp8jax": (*scope.flags.get("fp8jax", ()), self._replace(part=False))})

    def place(self, scope: Place) -> Place:
        """Where in the model the scope at a path is."""
        whole = scope[len(self.path) :] if scope[: len(self.path)] == self.path else scope
        return (*self.steps, *whole)


class LiftedCall(NamedTuple):
    """A call of a method as a function.

    Attributes:
        call: with its arrays.
        places: the number of the scope, and the path in it, of each parameter, by its path.
        mutable: for each scope, whether it takes variables of scalings.
    """

    call: Call
    places: dict[str, tuple[int, Place]]
    mutable: Sequence[bool]


def transformed(method: Callable, root: Root, notices: Notices) -> Callable:
    """A method with the products of recipes, which is called as it; `notices` are those of its model."""

    def run(lifted: LiftedCall, others: Any) -> Any:
        planned, held = lifted.call.planned(), {}
        if not root.part:
            planned.warn(notices)
        for use, linear in planned.uses.items():
            if linear.states:
                number, place = lifted.places[use.path]
                weight, mutable = lifted.call.params.get(use.path), lifted.mutable[number]
                held[use.path] = _read(others[number], place, linear, use, weight, mutable)
        results, observed = planned.with_held(held)
        y, (params, written) = jax.tree.unflatten(results.structure, joined(results.leaves, iter(results.arrays)))
        written = tuple(unfreeze(collections) for collections in written)
        for path, noted in observed.items():
            number, place = lifted.places[path]
            if SCALING in written[number]:
                _note(written[number], place, held[path].linear, noted)
        return y, (params, written)

    return _lifted(method, root, run)


def initialized(method: Callable, root: Root) -> Callable:
    """A method that, called as it, adds the variables of scalings for parameters that are there, and nothing else."""

    def run(lifted: LiftedCall, others: Any) -> Any:
        new: tuple[dict[str, Any], ...] = tuple({} for _ in others)
        planned = lifted.call.planned()
        stacked = {use.path: use.stacked for use in planned.uses}
        for path, tracked in planned.init().items():
            number, place = lifted.places[path]
            if not lifted.mutable[number]:
                raise _absent(place, tracked.linear, initializing=True)
            _add(new[number], variables_path(place), tracked, stacked[path])
        return None, (tuple({} for _ in others), new)

    return _lifted(method, root, run, fresh=True)


def planned(method: Callable, root: Root, tell: Callable[[CallPlan], None]) -> Callable:
    """A method that, called as it, computes nothing and tells its plan."""

    def run(lifted: LiftedCall, others: Any) -> Any:
        tell(lifted.call.planned().plan)
        return None, (tuple({} for _ in others), tuple({} for _ in others))

    return _lifted(method, root, run)


class _Tracing(threading.local):
    """What Flax gives the call that is traced now: its core, and what makes scopes of variables, and the reverse.

    The function of a call is kept, and these, which hold variables, are not.
    """

    now: tuple[Callable, Callable, Callable] | None = None

    @contextlib.contextmanager
    def of(self, *now: Callable) -> Iterator[None]:
        before, self.now = self.now, now  # type: ignore[assignment]
        try:
            yield
        finally:
            self.now = before


_tracing = _Tracing()


class _Function(NamedTuple):
    """The function of a call, and the counters of random keys in its scopes after a run, once it has been traced."""

    transformed: Transformed
    counters: list[dict[Any, Any]]


def _lifted(method: Callable, root: Root, run: Callable[[LiftedCall, Any], Any], fresh: bool = False) -> Callable:
    """A method whose call is one of `run` with its function; `fresh`, of the function that initializes it."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        fields = _fields(self)

        def transform(core: Callable) -> Callable:
            def inner(scope_fn: Callable, repack: Callable, groups: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                # Where variables are initialized none is there yet but parameters.
                given = (groups[0], tuple({} for _ in groups[1])) if fresh else groups
                scopes = _roots(scope_fn(given, rngs))
                everything = (given, rngs, args, kwargs)
                leaves, structure = jax.tree.flatten_with_path(everything, is_leaf=leaf_in(given[0]))
                values = [x for _, x in leaves]
                kinds, places = _kinds(leaves, root, [scope.path for scope in scopes])
                function = _function_of(method, root, fields, structure, kinds, values, scopes)
                call = Call(function.transformed, *parted(kinds, values))
                mutable = [scope.is_mutable_collection(SCALING) for scope in scopes]
                with _tracing.of(core, scope_fn, repack):
                    results = run(LiftedCall(call, places, mutable), groups[1])
                for scope, counters in zip(scopes, function.counters, strict=True):
                    scope.rng_counters.update(_copied(counters))
                return results

            return lift.pack(inner, _GROUPS, _GROUPS, (True,), enable_kwargs=True)  # type: ignore[no-any-return]

        return nn.transforms.decorator_lift_transform(transform, method)(self, *args, **kwargs)

    return call


def _roots(scopes: Sequence[Any]) -> list[Any]:
    return [scope for scope in dict.fromkeys(scopes) if scope.parent is None]


def _copied(counters: Mapping[Any, Any]) -> dict[Any, Any]:
    """Counters of a scope, in which are those of scopes in it."""
    return {key: _copied(n) if isinstance(n, Mapping) else n for key, n in counters.items()}


def _kinds(
    leaves: Sequence[tuple[Any, Any]], root: Root, scopes: Sequence[Place]
) -> tuple[tuple[CallLeaf, ...], dict[str, tuple[int, Place]]]:
    """What the leaves of (groups of variables, keys, arguments, keywords) are, and where its parameters are."""
    kinds, places = list[CallLeaf](), dict[str, tuple[int, Place]]()
    for path, x in leaves:
        if not (is_plain(x) or is_held(x)):
            kinds.append(CallLeaf("setting", x))
        elif path[0].idx > 1:
            kinds.append(CallLeaf("argument"))
        elif path[0].idx == 0 and path[1].idx == 0:
            steps = [step for step in path[4:] if step != GetAttrKey("value")]  # of metadata around a parameter
            place, number = tuple(keystr((step,), simple=True) for step in steps), path[2].idx
            kinds.append(CallLeaf("parameter", "/".join((*root.place(scopes[number]), *place))))
            places[kinds[-1].value] = number, place
        else:
            kinds.append(CallLeaf("array"))
    return tuple(kinds), places


def _function_of(
    method: Callable,
    root: Root,
    fields: Hashable,
    structure: Any,
    kinds: tuple[CallLeaf, ...],
    values: Sequence[Any],
    scopes: Sequence[Any],
) -> _Function:
    """The function of a call. In a program one is made as often as the call stands there; outside of any, once."""
    shapes = tuple((x.shape, x.dtype) for x in values if is_plain(x) or is_held(x))
    context = tuple((scope.path, repr(scope.mutable), scope.flags) for scope in scopes)
    inside = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))
    drawn = any(n for scope in scopes for n in scope.rng_counters.values())
    settings = [leaf.value for leaf in kinds if leaf.kind == "setting"]
    make: Any = _function
    if fields is None or inside or drawn or any(isinstance(x, nn.Module) for x in settings):
        make = _function.__wrapped__
    try:
        return make(method, root, (fields, contents(*settings)), structure, kinds, shapes, context)  # type: ignore[no-any-return]
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _function.__wrapped__(method, root, None, structure, kinds, shapes, context)


@functools.lru_cache(maxsize=128)
def _function(
    method: Callable, root: Root, fields: Any, structure: Any, kinds: tuple[CallLeaf, ...], shapes: Any, context: Any
) -> _Function:
    counters: list[dict[Any, Any]] = []

    def call(leaves: list[Any]) -> Results:
        assert _tracing.now is not None
        core, scope_fn, repack = _tracing.now
        groups, rngs, args, kwargs = jax.tree.unflatten(structure, leaves)
        scopes = scope_fn(groups, rngs)
        roots = _roots(scopes)
        for scope in scopes:
            scope.flags = root.flags(scope)
        y = core(scopes, *args, **kwargs)
        left, of_left = jax.tree.flatten((y, repack(scopes)))
        counters[:] = [_copied(scope.rng_counters) for scope in roots]
        after = tuple(CallLeaf("array") if is_plain(x) else CallLeaf("setting", x) for x in left)
        count = sum(map(is_plain, jax.tree.leaves(y)))
        return Results([x for x in left if is_plain(x)], of_left, after, count)

    arrays = [leaf for leaf in kinds if leaf.kind != "setting"]
    each = zip(arrays, shapes, strict=True)
    names = Names("", [(leaf.value, shape) for leaf, (shape, _) in each if leaf.kind == "parameter"])
    how: Any = {"modules": True, "names": names, "whole": not root.part, "checks": not root.part}
    return _Function(as_function(call, method, kinds, root.rules, **how), counters)


def _fields(module: nn.Module) -> Hashable:
    """What tells the programs of modules apart; None where nothing does, or someone watches their calls."""
    if products.changed() or _watched():
        return None
    seen: dict[int, int] = {}

    def fields(x: Any) -> Hashable:
        if isinstance(x, nn.Module):
            if id(x) in seen:
                return seen[id(x)]
            seen[id(x)] = len(seen)
            names = [f.name for f in dataclasses.fields(x) if f.name != "parent"]
            return type(x), *((name, fields(getattr(x, name, None))) for name in names)
        if isinstance(x, Mapping):
            return type(x), *((key, fields(value)) for key, value in x.items())
        if isinstance(x, (list, tuple)):
            return type(x), *map(fields, x)
        return x, contents(x)

    try:
        found = fields(module)
        hash(found)
    except TypeError:
        return None
    return found


def _watched() -> bool:
    """Whether someone looks into calls of modules, or intercepts them."""
    flax: Any = nn.module
    try:  # Flax's record of this has no public name: where it is another one, each call is traced.
        looks = any(flax._context.capture_stack) or flax._context.call_info_stack
        return bool(looks or len(flax._global_interceptor_stack))
    except (AttributeError, TypeError):
        return True


def _read(
    collections: Mapping[str, Any], place: Place, linear: Linear, use: Use, weight: Any, mutable: bool
) -> ParameterState:
    """What the variables of a scaling hold for the products with a parameter, which is `weight` in this call."""
    path = variables_path(place)
    own, slot = _find(collections, SCALING, path), _find(collections, STATISTICS, path).get("slot")
    names = {operand: part.variable(operand) for operand, part in linear.states.items()}
    if not set(names.values()) <= set(own) or (slot is None and observes(linear, "dy")):
        raise _absent(place, linear, initializing=False, others=bool(collections.get(SCALING)))
    state = ScalingState(**{operand: own[name] for operand, name in names.items()})
    layer, names_of = "/".join(place[:-1]) or "the layer", scaling_names(linear)
    if slot is not None:
        slot = training.require_statistics(slot, weight, STATISTICS_LOST.format(layer=layer, names=names_of))
    if observing := observed_operands(linear):
        read = getattr(state, observing[0])
        if not mutable:
            read = training.forbid_training(read, weight, NOT_MUTABLE.format(layer=layer, names=names_of))
        read = training.read_state(read, (weight, slot), layer, names_of, "linen")
        state = state._replace(**{observing[0]: read})
    if linear.tracked and state.w is not None:
        state = state._replace(w=training.read_state(state.w, weight, layer, names_of, "linen", training.BOUNDS))
    return ParameterState(linear, use.stacked, state, slot)


def _absent(place: Place, linear: Linear, initializing: bool, others: bool = False) -> ValueError:
    layer = "/".join(place[:-1]) or "the layer"
    what = absent(linear, initializing) if not others else absent_beside_others(layer)
    return ValueError(f"{layer} has {scaling_names(linear)} scaling: {what}")


def _find(collections: Mapping[str, Any], name: str, path: Place) -> Mapping[str, Any]:
    """The variables at a path of a collection; none where there is no such path."""
    found: Any = collections.get(name, {})
    for step in path:
        found = found.get(step, {}) if isinstance(found, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def _note(collections: dict[str, Any], place: Place, linear: Linear, noted: Noted) -> None:
    """Merges what products have observed into what was seen before."""
    variables: Any = _find(collections, SCALING, variables_path(place))
    for operand, value in noted.items():
        variables[f"seen_{operand}"] = linear.states[operand].merged(variables[f"seen_{operand}"], value)


def _add(collections: dict[str, Any], path: Place, tracked: TrackedScaling, stacked: tuple[int, ...]) -> None:
    """Adds the variables of one scaling at a path."""
    linear = tracked.linear
    new = {part.variable(o): getattr(tracked.state, o) for o, part in linear.states.items()}
    new |= {f"seen_{o}": nothing_seen(linear, o, stacked) for o in ("x", "w") if observes(linear, o)}
    _put(collections.setdefault(SCALING, {}), path, new)
    if observes(linear, "dy"):
        _put(collections.setdefault(STATISTICS, {}), path, {"slot": jnp.zeros(stacked, jnp.float32)})


def _put(collection: dict[str, Any], path: Place, variables: dict[str, Any]) -> None:
    for step in path:
        collection = collection.setdefault(step, {})
    collection |= variables
