"""Calls of methods of NNX modules as pure functions of parameters, other variables and arguments."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from fp8jax.core import products
from fp8jax.modules.calls import Call, CallLeaf, Names, Results, contents, is_plain, joined, parted, transformed
from fp8jax.modules.untrained import UntrainedVariable, with_adapters
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import Ordered
from fp8jax.rewrite.states import ParameterState
from fp8jax.rewrite.transform import Transformed

_TAG = "fp8jax"


class ModuleMethod(NamedTuple):
    """What is run as a function.

    Attributes:
        written: the method of the class as it is written.
        name: of it.
        rules: on the paths of layers.
        prefix: the path of the module in its model.
        whole: there is to be a product in it that a recipe could take.
        unwrap: makes the modules of a graph those of the classes as written, and gives a function that undoes it.
    """

    written: Callable
    name: str
    rules: Ordered
    prefix: str
    whole: bool
    unwrap: Callable[[Any], Callable[[], None]]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["structure", "leaves", "results", "changed", "whole"],
)
@dataclasses.dataclass(frozen=True)
class _Results(Results):
    """What a call leaves.

    Attributes:
        structure: of the results; where `whole`, the graph of results, module and arguments.
        changed: which variables have another value.
        whole: more has changed than values of variables, or modules are among the results.
    """

    changed: tuple[tuple[int, CallLeaf], ...] = ()
    whole: bool = False

    def leave(self, call: "SplitCall") -> Any:
        """Does to the module and the arguments of a call what it does, and gives its results."""
        new = iter(self.arrays)
        leaves = joined(self.leaves, new, given=call.raw)
        if self.whole:
            with nnx.merge_context(_TAG, inner=False) as context:
                y, *_ = context.unflatten(self.structure, leaves)
            return y
        places, changed = zip(*self.changed, strict=True) if self.changed else ((), ())
        for i, value in zip(places, joined(changed, new, given=call.raw), strict=True):
            call.variables[i].set_raw_value(value)
        return jax.tree.unflatten(self.structure, leaves)


class SplitCall(NamedTuple):
    """A call, taken apart; its leaves, as values, and as variables or arrays."""

    call: Call
    raw: list[Any]
    variables: Sequence[Any]


def run(
    module: nnx.Module,
    method: ModuleMethod,
    args: Any,
    kwargs: Any,
    held: Callable[[Sequence[Any], Mapping[str, Any]], Mapping[str, ParameterState]],
    notices: Notices | None = None,
) -> Any:
    """The results of a call, and what its products observed, by the paths of parameters.

    Whatever the method does to the module and to modules among its arguments is done to them: new values of variables,
    new variables and modules, other settings.

    Args:
        module: a module. method: one of its methods.
        args, kwargs: of the call: arrays, modules and settings in any structure. Python numbers are settings.
        held: gives what the module holds for its parameters, by paths, of the leaves as variables and of the
            parameters, by paths.
        notices: what the model has warned with; None of a part of one, which does not.
    """
    with nnx.update_context(_TAG):
        call = _take_apart(module, method, args, kwargs)
        planned = call.call.planned()
        if notices is not None:
            planned.warn(notices)
        results, noted = planned.with_held(held(call.variables, call.call.params))
        y = results.leave(call)
    return y, noted


def explain(module: nnx.Module, method: ModuleMethod, args: Any, kwargs: Any) -> CallPlan:
    """The plan of a call."""
    with nnx.update_context(_TAG):
        return _take_apart(module, method, args, kwargs).call.planned().plan


def _take_apart(module: nnx.Module, method: ModuleMethod, args: Any, kwargs: Any) -> SplitCall:
    with nnx.split_context(_TAG) as context:
        graph, state = context.flatten((module, args, kwargs))
    variables = state.leaves
    raw = [_raw(v) for v in variables]
    leaves = tuple(_leaf(method, *each) for each in zip(state.paths, variables, raw, strict=True))
    params, rest = parted(leaves, raw)
    params = with_adapters(state.paths, variables, params)
    shapes = tuple((path, x.shape) for path, x in params.items() if hasattr(x, "shape"))
    inside = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(raw))
    try:
        # In a program a call is traced as often as it stands there; outside of any, once.
        known = None if inside or products.changed() else _contents(graph, leaves)
        make = _transformed.__wrapped__ if known is None else _transformed
        made = make(method, graph, leaves, shapes, known)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        of = f"{type(module).__name__}.{method.name}"
        raise TypeError(f"an argument of {of} that is no array and no module must be hashable: {error}") from None
    return SplitCall(Call(made, params, rest), raw, variables)


def _contents(graph: Any, leaves: Sequence[CallLeaf]) -> Any:
    """As `contents` of the settings of a call; None where that cannot be told."""
    settings = [getattr(value, "value", None) for _, value in graph.attributes]
    try:
        return contents(*settings, *(leaf.value for leaf in leaves if leaf.kind == "setting"))
    except TypeError:
        return None


def _leaf(method: ModuleMethod, path: Any, variable: Any, x: Any) -> CallLeaf:
    parts = jax.tree.leaves(x)
    if not all(map(is_plain, parts)):
        return CallLeaf("setting", x)
    if path[0] > 0:
        return CallLeaf("argument", arrays=len(parts))
    if is_parameter(variable, path[1:], method.rules, method.prefix):
        # What is held in the place of a parameter is one array of the program.
        return CallLeaf("parameter", "/".join(map(str, path[1:])))
    adapter = "/".join(map(str, path[1:])) if isinstance(variable, nnx.LoRAParam) else None
    return CallLeaf("array", adapter, len(parts))


def is_parameter(variable: Any, path: Sequence[Any], rules: Ordered, prefix: str = "") -> bool:
    """Whether products with a variable are a recipe's; with an adapter's, beside a layer, only where a rule asks."""
    if not isinstance(variable, nnx.LoRAParam):
        return isinstance(variable, (nnx.Param, UntrainedVariable))
    steps = [*filter(None, [prefix]), *map(str, path)]
    return rules.asks("/".join(steps), "/".join(steps[:-1]))


@functools.lru_cache(maxsize=128)
def _transformed(
    method: ModuleMethod, graph: Any, leaves: tuple[CallLeaf, ...], shapes: Any, known: Any
) -> Transformed:
    """A method as a function of parameters and other arrays, for one structure of the call.

    Where settings hold other values (`known`) it is another one; where another library has changed JAX's products, one
    for each call.
    """

    def call(raw: list[Any]) -> _Results:
        with nnx.merge_context(_TAG, inner=True) as context:
            module, args, kwargs = context.unflatten(graph, list(raw))
        untrained = _untrained((module, args, kwargs), leaves)
        wrap = method.unwrap(module)
        y = method.written(module, *args, **kwargs)
        wrap()
        return _results(graph, raw, y, (module, args, kwargs), untrained)

    names = Names(method.prefix, shapes)
    return transformed(call, method.written, leaves, method.rules, names=names, whole=method.whole, checks=False)


def _untrained(called: Any, leaves: Sequence[CallLeaf]) -> dict[int, int]:
    """The variables that are not trained, by identity, with their numbers: a loop gives them again, as other arrays."""
    if not any(leaf.kind == "parameter" for leaf in leaves):
        return {}
    _, state = nnx.graphlib.flatten(called, graph=True)
    return {id(v): i for i, v in enumerate(state.leaves) if isinstance(v, UntrainedVariable)}


def _results(graph: Any, raw: Sequence[Any], y: Any, called: Any, untrained: Mapping[int, int]) -> _Results:
    """What a call leaves of the leaves that it was given, in its trace."""
    given = {id(x): i for i, x in enumerate(raw)}
    after, state = nnx.graphlib.flatten(called, graph=True)
    values = [_raw(v) for v in state.leaves]
    plain = jax.tree.leaves(y, is_leaf=_is_graph)
    if after == graph and not any(map(_is_graph, plain)):
        changed = [i for i, x in enumerate(values) if x is not raw[i] and id(state.leaves[i]) not in untrained]
        if all(isinstance(state.leaves[i], nnx.Variable) for i in changed):
            found, structure = jax.tree.flatten(y)
            left = [_after(x, given) for x in found]
            others = [(i, _after(values[i], given)) for i in changed]
            new = [x for x, leaf in zip(found, left, strict=True) if leaf.kind == "array"]
            more = [values[i] for i, leaf in others if leaf.kind == "array"]
            with nnx.split_context(_TAG):
                pass  # ends what the context knows of this trace
            return _Results([*new, *more], structure, tuple(left), len(new), tuple(others))
    with nnx.split_context(_TAG) as context:
        after, state = context.flatten((y, *called))
    found = [_raw(v) for v in state.leaves]
    same = (untrained.get(id(v)) for v in state.leaves)
    left = [_after(x, given) if i is None else CallLeaf("given", i) for i, x in zip(same, found, strict=True)]
    pairs = list(zip(state.paths, left, strict=True))
    new = [x for x, leaf in zip(found, left, strict=True) if leaf.kind == "array"]
    count = sum(leaf.arrays for path, leaf in pairs if path[0] == 0 and leaf.kind == "array")
    return _Results(new, after, tuple(left), count, whole=True)


def _is_graph(x: Any) -> bool:
    return nnx.graphlib.is_graph_node(x) or isinstance(x, nnx.Variable)


def _raw(x: Any) -> Any:
    return x.get_raw_value() if isinstance(x, nnx.Variable) else x


def _after(x: Any, given: Mapping[int, int]) -> CallLeaf:
    if id(x) in given:
        return CallLeaf("given", given[id(x)])
    parts = jax.tree.leaves(x)
    return CallLeaf("array", arrays=len(parts)) if all(map(is_plain, parts)) else CallLeaf("setting", x)


def kernel_axes(layer: Any) -> tuple[int, int]:
    """How many of the last axes of a layer's kernel are inputs and outputs; `nnx.vmap` puts others before them."""
    if isinstance(layer, nnx.Linear):
        return 1, 1
    return len(_tuple(layer.in_features)), len(_tuple(layer.out_features))


def stacked_axes(layer: Any) -> int:
    """How many axes of a layer's kernel `nnx.vmap` has put before its own."""
    own = len(layer.kernel_shape) if isinstance(layer, nnx.Einsum) else sum(kernel_axes(layer))
    return layer.kernel.ndim - own


def _tuple(features: int | tuple[int, ...]) -> tuple[int, ...]:
    return (features,) if isinstance(features, int) else tuple(features)
