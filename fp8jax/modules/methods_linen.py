"""Runs a method of a Linen module as a transformed program.

Flax lifts the method to a function of the module's variables, random keys and arguments; its program is read and
planned, and run with operations of recipes. What the method writes into collections comes back beside its result.
"""

from collections.abc import Callable, Mapping
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
from fp8jax.modules.scaled import nothing_seen
from fp8jax.modules.scaled_linen import SCALING, STATISTICS, absent, variables_path
from fp8jax.ops.scaled import Observed, ScalingState, observes
from fp8jax.rewrite.caller import Caller
from fp8jax.rewrite.graph import Graph
from fp8jax.rewrite.plan import Entry, plan
from fp8jax.rewrite.read import read
from fp8jax.rewrite.rules import Ordered
from fp8jax.rewrite.run import Running, schedule
from fp8jax.rewrite.states import Given, TrackedScaling, Use, init, scaling_names

Place = tuple[str, ...]
# Parameters, and all other collections.
_GROUPS = ("params", True)


class Root(NamedTuple):
    """A quantized module: its rules, and where the whole model is whose paths these match."""

    rules: Ordered
    path: Place

    def around(self, scope: Any) -> bool:
        """Whether a scope is part of a run of it."""
        return self in scope.flags.get("fp8jax", ())

    def flags(self, scope: Any) -> Any:
        """The flags of a scope, as part of a run."""
        return scope.flags.copy({"fp8jax": (*scope.flags.get("fp8jax", ()), self)})


class Method(NamedTuple):
    """The program of a call, planned.

    Attributes:
        graph, entries, uses: as `plan` makes them.
        arrays: its inputs, of which the first are parameters.
        places: the number of the scope, and the path in it, of each parameter, by its path.
        rebuild: makes the result, and the collections written, of the program's outputs.
    """

    graph: Graph
    entries: tuple[Entry, ...]
    uses: dict[Use, Linear]
    arrays: list[Any]
    places: dict[str, tuple[int, Place]]
    rebuild: Callable[[list[Any]], tuple[Any, Any]]


def transformed(method: Callable, root: Root) -> Callable:
    """A method with the products of recipes, which is called as it."""

    def run(method: Method, others: Any) -> Any:
        states: dict[Any, Any] = {}
        for use, linear in method.uses.items():
            if not linear.states:
                continue
            number, place = method.places[use.path]
            states[use.key] = _read(others[number], place, use, linear)
        running = Running(schedule(method.graph), method.arrays, states, forward=True)
        y, (params, written) = method.rebuild(running.outputs())
        written = tuple(unfreeze(collections) for collections in written)
        _note(written, method, running.seen or {})
        return y, (params, written)

    return _lifted(method, root, run)


def initialized(method: Callable, root: Root) -> Callable:
    """A method that, called as it, adds the variables of scalings for parameters that are there, and nothing else."""

    def run(method: Method, others: Any) -> Any:
        new: tuple[dict[str, Any], ...] = tuple({} for _ in others)
        weights = dict(zip(method.places, method.arrays, strict=False))
        for path, tracked in init(method.uses, weights).items():
            number, place = method.places[path]
            stacked = next(use.stacked for use in method.uses if use.path == path)
            _add(new[number], variables_path(place), tracked, stacked)
        return None, (tuple({} for _ in others), new)

    return _lifted(method, root, run, fresh=True)


def planned(method: Callable, root: Root, tell: Callable[[Method], None]) -> Callable:
    """A method that, called as it, computes nothing and tells its plan."""

    def run(method: Method, others: Any) -> Any:
        tell(method)
        return None, (tuple({} for _ in others), tuple({} for _ in others))

    return _lifted(method, root, run)


def _lifted(method: Callable, root: Root, run: Callable[[Method, Any], Any], fresh: bool = False) -> Callable:
    """A method whose call is one of `run` with its planned program; `fresh`, of the program that initializes it."""

    def transform(core: Callable) -> Callable:
        def inner(scope_fn: Callable, repack: Callable, groups: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            # Where variables are initialized none is there yet but parameters.
            given = (groups[0], tuple({} for _ in groups[1])) if fresh else groups
            paths: list[Place] = []

            def call(groups: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
                scopes = scope_fn(groups, rngs)
                paths[:] = [scope.path for scope in dict.fromkeys(scopes) if scope.parent is None]
                for scope in scopes:
                    scope.flags = root.flags(scope)
                return core(scopes, *args, **kwargs), repack(scopes)

            return run(_planned(call, root, paths, (given, rngs, args, kwargs)), groups[1])

        return lift.pack(inner, _GROUPS, _GROUPS, (True,), enable_kwargs=True)  # type: ignore[no-any-return]

    return nn.transforms.decorator_lift_transform(transform, method)  # type: ignore[no-any-return]


def _planned(call: Callable, root: Root, paths: list[Place], arguments: Any) -> Method:
    """Traces, reads and plans a call with these variables, keys and arguments; `paths` are those of its scopes."""
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
            scope = paths[path[2].idx]
            whole = scope[len(root.path) :] if scope[: len(root.path)] == root.path else scope
            places["/".join((*whole, *place))] = path[2].idx, place
    given = [i for i, (path, _) in enumerate(arrays) if path[0].idx > 1]
    graph = read(closed, [*places, *[None] * (len(arrays) - len(places))])
    results = sum(x is None for x in kept[:count])
    entries, uses = plan(graph, root.rules, Caller(results, given, modules=True))

    def rebuild(outputs: list[Any]) -> tuple[Any, Any]:
        rest = iter(outputs)
        whole = [next(rest) if x is None else x[0] for x in kept]
        return jax.tree.unflatten(of_results, whole[:count]), jax.tree.unflatten(of_more, whole[count:])

    return Method(graph, tuple(entries.values()), uses, [x for _, x in arrays], places, rebuild)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")


def _read(collections: Mapping[str, Any], place: Place, use: Use, linear: Linear) -> Given:
    """What a product reads of its scaling's variables, and the slots of what it observes."""
    path = variables_path(place)
    own, slot = _find(collections, SCALING, path), None
    names = {operand: part.variable(operand) for operand, part in linear.states.items()}
    known = set(names.values()) <= set(own)
    times = tuple(level.times for level in use.levels)
    if observes(linear, "dy"):
        slot = _find(collections, STATISTICS, path).get("slot")
        known = known and slot is not None
    if not known:
        what = absent(linear, initializing=False)
        raise ValueError(f"{'/'.join(place[:-1]) or 'the layer'} has {scaling_names(linear)} scaling: {what}")
    slots = {o: nothing_seen(linear, o, times) for o in ("x", "w") if observes(linear, o)}
    if slot is not None:
        each = [level.times if level.stacked else 1 for level in use.levels]
        slots["dy"] = jnp.broadcast_to(slot.reshape(each), times)
    return Given(ScalingState(**{operand: own[name] for operand, name in names.items()}), Observed(**slots))


def _find(collections: Mapping[str, Any], name: str, path: Place) -> Mapping[str, Any]:
    """The variables at a path of a collection; none where there is no such path."""
    found: Any = collections.get(name, {})
    for step in path:
        found = found.get(step, {}) if isinstance(found, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def _note(written: tuple[dict[str, Any], ...], method: Method, seen: Mapping[Any, Array]) -> None:
    """Merges what products have observed into the collections that a call has written, where these are mutable."""
    for use, linear in method.uses.items():
        number, place = method.places[use.path]
        if SCALING not in written[number]:
            continue
        variables: Any = _find(written[number], SCALING, variables_path(place))
        for operand in ("x", "w"):
            value = seen.get((use.key, operand))
            if value is None:
                continue
            scaling = linear.states[operand]
            shared = tuple(i for i, level in enumerate(use.levels) if not level.stacked)
            value = jnp.sum(value, shared) if scaling.merge == "sum" else jnp.max(value, shared)
            value = training.observed(value, use.path, scaling_names(linear))
            variables[f"seen_{operand}"] = scaling.merged(variables[f"seen_{operand}"], value)


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
