"""Runs a method of a Linen module as a transformed program.

Flax lifts the method to a function of the module's variables, random keys and arguments; its program is read and
planned, and run with operations of recipes. What the method writes into collections comes back beside its result.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import lift, unfreeze
from jax import Array
from jax.tree_util import GetAttrKey, keystr

from fp8jax.core.recipe import Linear
from fp8jax.modules import training
from fp8jax.modules.functional import Names
from fp8jax.modules.scaled import nothing_seen
from fp8jax.modules.scaled_linen import SCALING, STATISTICS, absent, variables_path
from fp8jax.ops.scaled import ScalingState, observes
from fp8jax.rewrite.caller import Caller
from fp8jax.rewrite.entries import Entry
from fp8jax.rewrite.graph import Graph
from fp8jax.rewrite.plan import plan
from fp8jax.rewrite.read import read
from fp8jax.rewrite.rules import Ordered
from fp8jax.rewrite.run import Running, schedule
from fp8jax.rewrite.states import (
    Noted,
    ParameterState,
    TrackedScaling,
    Use,
    held_by_use,
    init,
    merged_uses,
    scaling_names,
)

Place = tuple[str, ...]
# Parameters, and all other collections.
_GROUPS = ("params", True)


class Root(NamedTuple):
    """A quantized module.

    Attributes:
        rules: which recipe is whose.
        path: where the model is whose paths these match.
        part: it is a part of this model, called by itself.
    """

    rules: Ordered
    path: Place
    part: bool = False

    def inside(self, scope: Any) -> bool:
        """Whether a scope is one of a run of the model."""
        return self._replace(part=False) in scope.flags.get("fp8jax", ())

    def flags(self, scope: Any) -> Any:
        """The flags of such a scope."""
        return scope.flags.copy({"fp8jax": (*scope.flags.get("fp8jax", ()), self._replace(part=False))})


class PlannedMethod(NamedTuple):
    """The program of a call, planned.

    Attributes:
        graph, entries, uses: as `plan` makes them.
        arrays: its inputs, of which the first are parameters.
        places: the number of the scope, and the path in it, of each parameter, by its path.
        mutable: for each scope, whether it takes variables of scalings.
        rebuild: makes the result, and the collections written, of the program's outputs.
    """

    graph: Graph
    entries: tuple[Entry, ...]
    uses: dict[Use, Linear]
    arrays: list[Any]
    places: dict[str, tuple[int, Place]]
    mutable: Sequence[bool]
    rebuild: Callable[[list[Any]], tuple[Any, Any]]


def transformed(method: Callable, root: Root) -> Callable:
    """A method with the products of recipes, which is called as it."""

    def run(method: PlannedMethod, others: Any) -> Any:
        held = {}
        for use, linear in method.uses.items():
            if linear.states:
                number, place = method.places[use.path]
                held[use.path] = _read(others[number], place, linear, use.stacked)
        running = Running(schedule(method.graph), method.arrays, held_by_use(held, method.uses), forward=True)
        y, (params, written) = method.rebuild(running.outputs())
        written = tuple(unfreeze(collections) for collections in written)
        for path, noted in merged_uses(running.seen or {}, method.uses).items():
            number, place = method.places[path]
            if SCALING in written[number]:
                _note(written[number], place, held[path].linear, noted)
        return y, (params, written)

    return _lifted(method, root, run)


def initialized(method: Callable, root: Root) -> Callable:
    """A method that, called as it, adds the variables of scalings for parameters that are there, and nothing else."""

    def run(method: PlannedMethod, others: Any) -> Any:
        new: tuple[dict[str, Any], ...] = tuple({} for _ in others)
        weights = dict(zip(method.places, method.arrays, strict=False))
        for path, tracked in init(method.uses, weights).items():
            number, place = method.places[path]
            if not method.mutable[number]:
                raise _absent(place, tracked.linear, initializing=True)
            stacked = next(use.stacked for use in method.uses if use.path == path)
            _add(new[number], variables_path(place), tracked, stacked)
        return None, (tuple({} for _ in others), new)

    return _lifted(method, root, run, fresh=True)


def planned(method: Callable, root: Root, tell: Callable[[PlannedMethod], None]) -> Callable:
    """A method that, called as it, computes nothing and tells its plan."""

    def run(method: PlannedMethod, others: Any) -> Any:
        tell(method)
        return None, (tuple({} for _ in others), tuple({} for _ in others))

    return _lifted(method, root, run)


def _lifted(method: Callable, root: Root, run: Callable[[PlannedMethod, Any], Any], fresh: bool = False) -> Callable:
    """A method whose call is one of `run` with its planned program; `fresh`, of the program that initializes it."""

    def transform(core: Callable) -> Callable:
        def inner(scope_fn: Callable, repack: Callable, groups: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            # Where variables are initialized none is there yet but parameters.
            given = (groups[0], tuple({} for _ in groups[1])) if fresh else groups
            told: list[tuple[Place, bool]] = []  # no scope, which would keep what it holds

            def call(groups: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
                scopes = scope_fn(groups, rngs)
                roots = [scope for scope in dict.fromkeys(scopes) if scope.parent is None]
                told[:] = [(scope.path, scope.is_mutable_collection(SCALING)) for scope in roots]
                for scope in scopes:
                    scope.flags = root.flags(scope)
                return core(scopes, *args, **kwargs), repack(scopes)

            return run(_planned(call, root, told, (given, rngs, args, kwargs)), groups[1])

        return lift.pack(inner, _GROUPS, _GROUPS, (True,), enable_kwargs=True)  # type: ignore[no-any-return]

    return nn.transforms.decorator_lift_transform(transform, method)  # type: ignore[no-any-return]


def _planned(call: Callable, root: Root, scopes: Sequence[tuple[Place, bool]], arguments: Any) -> PlannedMethod:
    """Traces, reads and plans a call with these variables, keys and arguments.

    It tells the paths of its scopes, and whether each takes variables of scalings.
    """
    leaves, structure = jax.tree.flatten_with_path(arguments)
    arrays = [(path, x) for path, x in leaves if _is_array(x)]
    fixed: list[Any] = []

    def program(arrays: list[Array]) -> list[Any]:
        rest = iter(arrays)
        y, written = call(*jax.tree.unflatten(structure, [next(rest) if _is_array(x) else x for _, x in leaves]))
        results, of_results = jax.tree.flatten(y)
        more, of_more = jax.tree.flatten(written)
        outputs = [*results, *more]
        fixed[:] = of_results, of_more, len(results), [None if _is_array(x) else (x,) for x in outputs]
        return [x for x in outputs if _is_array(x)]

    closed = jax.make_jaxpr(program)([x for _, x in arrays])
    of_results, of_more, count, kept = fixed
    places = {}
    for path, _ in arrays:
        if path[0].idx == 0 and path[1].idx == 0:
            steps = [step for step in path[4:] if step != GetAttrKey("value")]  # of metadata around a parameter
            place = tuple(keystr((step,), simple=True) for step in steps)
            scope, _ = scopes[path[2].idx]
            whole = scope[len(root.path) :] if scope[: len(root.path)] == root.path else scope
            places["/".join((*whole, *place))] = path[2].idx, place
    given = [i for i, (path, _) in enumerate(arrays) if path[0].idx > 1]
    graph = read(closed, [*places, *[None] * (len(arrays) - len(places))])
    results = sum(x is None for x in kept[:count])
    shapes = [(path, x.shape) for path, (_, x) in zip(places, arrays, strict=False)]
    caller = Caller(results, given, True, Names("", shapes), not root.part, not root.part)
    entries, uses = plan(graph, root.rules, caller)

    def rebuild(outputs: list[Any]) -> tuple[Any, Any]:
        rest = iter(outputs)
        whole = [next(rest) if x is None else x[0] for x in kept]
        return jax.tree.unflatten(of_results, whole[:count]), jax.tree.unflatten(of_more, whole[count:])

    mutable = [takes for _, takes in scopes]
    return PlannedMethod(graph, tuple(entries.values()), uses, [x for _, x in arrays], places, mutable, rebuild)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")


def _read(collections: Mapping[str, Any], place: Place, linear: Linear, stacked: tuple[int, ...]) -> ParameterState:
    """What the variables of a scaling hold for the products with a parameter."""
    path = variables_path(place)
    own, slot = _find(collections, SCALING, path), _find(collections, STATISTICS, path).get("slot")
    names = {operand: part.variable(operand) for operand, part in linear.states.items()}
    if not set(names.values()) <= set(own) or (slot is None and observes(linear, "dy")):
        raise _absent(place, linear, initializing=False)
    return ParameterState(
        linear, stacked, ScalingState(**{operand: own[name] for operand, name in names.items()}), slot
    )


def _absent(place: Place, linear: Linear, initializing: bool) -> ValueError:
    what = absent(linear, initializing)
    return ValueError(f"{'/'.join(place[:-1]) or 'the layer'} has {scaling_names(linear)} scaling: {what}")


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
        value = training.observed(value, "/".join(place[:-1]) or "the layer", scaling_names(linear), "linen")
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
