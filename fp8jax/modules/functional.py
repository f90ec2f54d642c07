"""Calls of methods of NNX modules as pure functions of parameters, other variables and arguments."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from fp8jax.core import products
from fp8jax.modules.matrices import is_matrix
from fp8jax.rewrite.caller import Caller
from fp8jax.rewrite.rules import Ordered
from fp8jax.rewrite.states import Noted, ParameterState
from fp8jax.rewrite.transform import Transformed

_TAG = "fp8jax"
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


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


class CallLeaf(NamedTuple):
    """What one leaf of a call is: a "parameter", with its path; another "array" of the module, or of an "argument"; a
    "setting", with its value; or of what a call leaves what was "given", with its number."""

    kind: str
    value: Any = None
    arrays: int = 1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["structure", "leaves", "results", "changed", "whole"],
)
@dataclasses.dataclass(frozen=True)
class _Results:
    """What a call leaves.

    Attributes:
        arrays: those of the results, and then new values of variables.
        structure: of the results; where `whole`, the graph of results, module and arguments.
        leaves: of that.
        results: how many arrays are of the results.
        changed: which variables have another value.
        whole: more has changed than values of variables, or modules are among the results.
    """

    arrays: list[Any]
    structure: Any
    leaves: tuple[CallLeaf, ...]
    results: int
    changed: tuple[tuple[int, CallLeaf], ...] = ()
    whole: bool = False

    def leave(self, call: "SplitCall") -> Any:
        """Does to the module and the arguments of a call what it does, and gives its results."""
        new = iter(self.arrays)
        leaves = [_value(leaf, call.raw, new) for leaf in self.leaves]
        if self.whole:
            with nnx.merge_context(_TAG, inner=False) as context:
                y, *_ = context.unflatten(self.structure, leaves)
            return y
        for i, leaf in self.changed:
            call.variables[i].set_raw_value(_value(leaf, call.raw, new))
        return jax.tree.unflatten(self.structure, leaves)


class SplitCall(NamedTuple):
    """A call, taken apart.

    Attributes:
        transformed: the method, as a function of parameters by path and other arrays.
        params, rest: these. variables: the leaves, as variables or arrays, in their order.
        paths: of the leaves.
    """

    transformed: Transformed
    params: dict[str, Any]
    rest: list[Any]
    raw: list[Any]
    variables: Sequence[Any]
    paths: Sequence[Any]


def run(
    module: nnx.Module,
    method: ModuleMethod,
    args: Any,
    kwargs: Any,
    held: Callable[[SplitCall], Mapping[str, ParameterState]],
) -> Any:
    """The results of a call, and what its products observed, by the paths of parameters.

    Whatever the method does to the module and to modules among its arguments is done to them: new values of variables,
    new variables and modules, other settings.

    Args:
        module: a module. method: one of its methods.
        args, kwargs: of the call: arrays, modules and settings in any structure. Python numbers are settings.
        held: gives what the module holds for its parameters, by paths.
    """
    with nnx.update_context(_TAG):
        call = _take_apart(module, method, args, kwargs)
        results, noted = call.transformed.with_held(held(call), call.params, call.rest)
        y = results.leave(call)
    return y, noted


def explain(module: nnx.Module, method: ModuleMethod, args: Any, kwargs: Any) -> Any:
    """The plan of a call, an `Explanation`."""
    with nnx.update_context(_TAG):
        call = _take_apart(module, method, args, kwargs)
        return call.transformed.explain(call.params, call.rest)


def _take_apart(module: nnx.Module, method: ModuleMethod, args: Any, kwargs: Any) -> SplitCall:
    with nnx.split_context(_TAG) as context:
        graph, state = context.flatten((module, args, kwargs))
    paths, variables = state.paths, state.leaves
    raw = [_raw(v) for v in variables]
    leaves = tuple(_leaf(method, *each) for each in zip(paths, variables, raw, strict=True))
    params = {leaf.value: x for leaf, x in zip(leaves, raw, strict=True) if leaf.kind == "parameter"}
    rest = [x for leaf, x in zip(leaves, raw, strict=True) if leaf.kind in ("array", "argument")]
    shapes = tuple((path, x.shape) for path, x in params.items() if hasattr(x, "shape"))
    inside = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(raw))
    try:
        # In a program a call is traced as often as it stands there; outside of any, once.
        known = None if inside or products.changed() else _objects(graph, leaves)
        make = _transformed.__wrapped__ if known is None else _transformed
        transformed = make(method, graph, leaves, shapes, known)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        of = f"{type(module).__name__}.{method.name}"
        raise TypeError(f"an argument of {of} that is no array and no module must be hashable: {error}") from None
    return SplitCall(transformed, params, rest, raw, variables, paths)


def _objects(graph: Any, leaves: Sequence[CallLeaf]) -> Any:
    """What objects hold that are compared by identity, and so may change; None where that cannot be told."""
    settings = [getattr(value, "value", None) for _, value in graph.attributes]
    settings += [leaf.value for leaf in leaves if leaf.kind == "setting"]
    own = [x for x in settings if type(x).__hash__ is object.__hash__ and not callable(x)]
    try:
        held = tuple(tuple(sorted(vars(x).items())) for x in own)
        hash(held)
    except TypeError:
        return None
    return held


def _leaf(method: ModuleMethod, path: Any, variable: Any, x: Any) -> CallLeaf:
    parts = jax.tree.leaves(x)
    if not all(isinstance(part, _ARRAYS) for part in parts):
        return CallLeaf("setting", x)
    if path[0] > 0:
        return CallLeaf("argument", arrays=len(parts))
    if is_parameter(variable, path[1:], method.rules, method.prefix):
        return CallLeaf("parameter", "/".join(map(str, path[1:])), len(parts))
    return CallLeaf("array", arrays=len(parts))


def is_parameter(variable: Any, path: Sequence[Any], rules: Ordered, prefix: str = "") -> bool:
    """Whether products with a variable are a recipe's; with an adapter's, beside a layer, only where a rule asks."""
    if not isinstance(variable, nnx.LoRAParam):
        return isinstance(variable, nnx.Param)
    steps = [*filter(None, [prefix]), *map(str, path)]
    return rules.asks("/".join(steps), "/".join(steps[:-1]))


def _value(leaf: CallLeaf, raw: Sequence[Any], new: Iterator[Any]) -> Any:
    """What a leaf of the results is."""
    if leaf.kind == "given":
        return raw[leaf.value]
    return leaf.value if leaf.kind == "setting" else next(new)


@functools.lru_cache(maxsize=128)
def _transformed(
    method: ModuleMethod, graph: Any, leaves: tuple[CallLeaf, ...], shapes: Any, known: Any
) -> Transformed:
    """A method as a function of parameters and other arrays, for one structure of the call.

    Where settings hold other values (`known`) it is another one; where another library has changed JAX's products, one
    for each call.
    """

    def call(params: dict[str, Any], rest: list[Any]) -> _Results:
        arrays = iter(rest)
        raw = [params[leaf.value] if leaf.kind == "parameter" else _value(leaf, (), arrays) for leaf in leaves]
        with nnx.merge_context(_TAG, inner=True) as context:
            module, args, kwargs = context.unflatten(graph, list(raw))
        wrap = method.unwrap(module)
        y = method.written(module, *args, **kwargs)
        wrap()
        return _results(graph, raw, y, (module, args, kwargs))

    functools.update_wrapper(call, method.written, updated=())
    # The parameters come first, by their paths.
    places = [
        leaf.kind
        for leaf in sorted(leaves, key=lambda leaf: leaf.kind != "parameter")
        for _ in range(leaf.arrays)
        if leaf.kind != "setting"
    ]
    arguments = frozenset(i for i, kind in enumerate(places) if kind == "argument")
    names = Names(method.prefix, shapes)
    caller = lambda results: Caller(results.results, arguments, names=names, whole=method.whole, checks=False)  # noqa: E731
    return Transformed(call, method.rules, (0,), (), caller)


def _results(graph: Any, raw: Sequence[Any], y: Any, called: Any) -> _Results:
    """What a call leaves of the leaves that it was given, in its trace."""
    given = {id(x): i for i, x in enumerate(raw)}
    after, state = nnx.graphlib.flatten(called, graph=True)
    values = [_raw(v) for v in state.leaves]
    plain = jax.tree.leaves(y, is_leaf=_is_graph)
    if after == graph and not any(map(_is_graph, plain)):
        changed = [i for i, x in enumerate(values) if x is not raw[i]]
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
    left = [_after(x, given) for x in found]
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
    plain = all(isinstance(part, _ARRAYS) for part in parts)
    return CallLeaf("array", arrays=len(parts)) if plain else CallLeaf("setting", x)


class Names:
    """The paths that rules match, for the path of a parameter in a module.

    That of a layer is that of the module that holds its matrix; of one of several matrices, first its own.

    Args:
        prefix: the path of the module in its model.
        shapes: the parameters of the module, by path.
    """

    def __init__(self, prefix: str, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        self._prefix = prefix
        holders = [path.rpartition("/")[0] for path, shape in shapes if is_matrix(path.rpartition("/")[2], shape)]
        self._several = {holder for holder in holders if holders.count(holder) > 1}

    def __call__(self, path: str) -> tuple[str, ...]:
        holder = path.rpartition("/")[0]
        layer = "/".join(filter(None, (self._prefix, holder)))
        return ("/".join(filter(None, (self._prefix, path))), layer) if holder in self._several else (layer,)


def noted_by(held: Mapping[str, Any], noted: Mapping[str, Noted]) -> Iterator[tuple[Any, Noted]]:
    """What holds each parameter's state, and what was observed of it."""
    for path, seen in noted.items():
        yield held[path], seen


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
