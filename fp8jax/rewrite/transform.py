"""`fp8jax.transform`: quantization as a transformation of JAX functions."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.core.recipe import Linear
from fp8jax.core.scaling import AxisNames
from fp8jax.ops.dispatch import missing_kernels
from fp8jax.rewrite import training
from fp8jax.rewrite.bounds import with_complete_bounds, with_weight_bounds
from fp8jax.rewrite.call_info import CallInfo
from fp8jax.rewrite.check import Comparison, check
from fp8jax.rewrite.explanation import Explanation, list_rows
from fp8jax.rewrite.frozen_params import as_shape_struct, frozen_info, frozen_leaf_predicate, is_frozen
from fp8jax.rewrite.plan import plan
from fp8jax.rewrite.planned import CallPlan, Notices, PlannedCall
from fp8jax.rewrite.read import read
from fp8jax.rewrite.rules import Rules, RuleSet, as_rule_set
from fp8jax.rewrite.run import Interpreter, schedule
from fp8jax.rewrite.states import (
    States,
    WeightUse,
    advance,
    scaling_names,
    use_inputs_from_states,
)

_MAX_PLANS = 64
# What is traced; other leaves of arguments are settings.
_ARRAY_TYPES, _NUMBER_TYPES = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic), (int, float, complex)


class _Call(NamedTuple):
    """The arrays of a call, its program, the shapes of what it returns, and where the arrays are in the arguments."""

    arrays: list[Any]
    program: Any
    shapes: Any
    places: list[Any]


class Transformed:
    """A function with the products of recipes, as `transform` returns it; called as the function.

    It may be differentiated, compiled, mapped, and called in loops, as the function may. A plan is made once for each
    structure, shape, dtype and sharding of the arguments. Called outside of `jax.jit` it is compiled.
    """

    def __init__(
        self,
        fn: Callable,
        rules: RuleSet,
        params: tuple[int | str, ...],
        static: tuple[int | str, ...],
        make_call_info: Callable[[Any], CallInfo] | None = None,
        traced_types: tuple[type, ...] = (*_ARRAY_TYPES, *_NUMBER_TYPES),
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._traced_types = traced_types
        self._make_call_info = make_call_info or _default_call_info
        self._fn, self._rules, self._params, self._static = fn, rules, params, static
        self._clear_caches()

    def _clear_caches(self) -> None:
        self._calls: dict[Hashable, Callable] = {}
        self._plans: dict[Hashable, tuple[Any, CallPlan]] = {}
        self._notices = Notices()

    def __getstate__(self) -> dict[str, Any]:
        """What makes it; programs that it knows are traced again by a copy."""
        return {name: value for name, value in vars(self).items() if name not in ("_calls", "_plans", "_notices")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._clear_caches()

    def __call__(self, *args: Any, states: States | None = None, **kwargs: Any) -> Any:
        call = self.plan_call(*args, **kwargs)
        call.warn(self._notices)
        _check_states(states, call.uses)
        return call.run(use_inputs_from_states(states or {}, call.weights), collect_stats=False)[0]

    def plan_call(self, *args: Any, **kwargs: Any) -> PlannedCall:
        """A call with its plan; nothing is computed.

        Args:
            args, kwargs: of a call.

        Raises:
            ValueError: as the call, but for a precision that products ask for: there a run raises.
        """
        call = self._trace(args, kwargs)
        frozen_infos = tuple(map(frozen_info, call.arrays))
        key = id(call.program), *(frozen_infos if any(frozen_infos) else ())
        cached = self._plans.get(key)
        if cached is not None:
            return PlannedCall(cached[1], call.arrays)
        call_plan = self._make_plan(call.program, self._param_paths(call.places), call.shapes, frozen_infos)
        # What closes over values of a trace has a plan for one call.
        if not any(isinstance(c, jax.core.Tracer) for c in call.program.consts):
            while len(self._plans) >= _MAX_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = call.program, call_plan
        return PlannedCall(call_plan, call.arrays)

    def check(self, *args: Any, **kwargs: Any) -> Comparison:
        """Compares each operation with what it stands for, on the arrays that the function as written gives it.

        Its result, and the gradients of its operands for a random gradient of its result, are to be as near to those as
        written as the formats of the recipe explain. Of loops the first turn is looked at, of conditions each branch;
        what is in `jax.shard_map` is not. States of scalings are left out: scales are the arrays' own.

        Args:
            args, kwargs: of a call.

        Returns:
            A `Comparison`; its `first_failure` is the first operation that is further off, or None. Print it.

        Raises:
            ValueError: as the call.
        """
        call = self._trace(args, kwargs)
        if any(map(is_frozen, call.arrays)):
            raise ValueError(
                "check compares a function of arrays: give the values of frozen weights, and merge adapters with "
                "fp8jax.lora.merge"
            )
        original, planned = (read(call.program, self._param_paths(call.places)) for _ in range(2))
        entries = plan(planned, self._rules, self._make_call_info(call.shapes)).entries
        return check(original, planned, entries, call.arrays)

    def init(self, *args: Any, **kwargs: Any) -> States:
        """The states of scalings before the first step, by the paths of parameters; {} where no recipe keeps any.

            states = fast.init(params, batch)
            grads, observed = jax.grad(lambda p, s: loss(fast(p, batch, states=s)), argnums=(0, 1))(params, states)
            states = fast.advance(states, observed)

        What a call observes of its operands, such as their largest magnitudes, is the gradient of its states, and so
        comes through scans, checkpoints, conditions and meshes; a call that is not differentiated observes nothing.
        Under `jax.vmap` map the states too (or gradients of the batch's elements are summed).

        Args:
            args, kwargs: of a call. Automatic scaling has no bounds then, and measures the parameters in each call.

        Raises:
            ValueError: as the call; or products of one parameter cannot have one state.
        """
        return self.plan_call(*args, **kwargs).init()

    def advance(self, states: States, observed: States, *, axis_name: AxisNames = None) -> States:
        """The states after a step.

        Args:
            states: before the step.
            observed: the gradient of the step's loss by the states; of microbatches the largest (counts summed).
            axis_name: mesh axes of replicas, where `jax.shard_map` is around the call, whose observations are merged.
        """
        training.record_advance(training.ADVANCE)
        return advance(states, observed, axis_name)

    def update_weight_amax_bounds(self, states: States, bounds: Mapping[tuple[str, ...], Any]) -> States:
        """The states with the bounds of weights under automatic scaling: take it after each update of the optimizer.

        Args:
            states: of `init`.
            bounds: what `fp8jax.get_weight_amax_bounds` reads from the state of an optimizer of the same parameters.

        Raises:
            ValueError: the optimizer follows other parameters.
        """
        return with_weight_bounds(states, bounds)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """A table of each product, norm and activation, quantized or left as written; nothing is computed.

        Args:
            args, kwargs: of a call, arrays or `jax.ShapeDtypeStruct`.

        Returns:
            An `Explanation`; print it. A row's line is in your code, or else in the library of models that you use.

        Raises:
            ValueError: as the call, but for a precision that products ask for: it lists these.
        """
        return self.plan_call(*args, **kwargs).plan.explain()

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """The program of a call."""
        params = [x for place, x in (*enumerate(args), *kwargs.items()) if place in self._params]
        flat, structure = jax.tree.flatten_with_path((args, kwargs), is_leaf=frozen_leaf_predicate(params))
        settings = {i: x for i, (path, x) in enumerate(flat) if self._is_static(path, x)}
        key = structure, tuple((i, type(x), x) for i, x in settings.items())
        try:
            call = self._calls.get(key)
        except TypeError:
            unhashable = next(x for x in settings.values() if type(x).__hash__ is None)
            raise TypeError(f"an argument that is no array must be hashable, not {unhashable!r}") from None
        if call is None:
            call = self._calls[key] = _bind_settings(self._fn, structure, len(flat), settings)
        leaves = [(path, x) for i, (path, x) in enumerate(flat) if i not in settings]
        arrays = [x for _, x in leaves]
        # JAX keeps the program: a call like one before is not traced again.
        try:
            program, shapes = jax.make_jaxpr(call, return_shape=True)([as_shape_struct(x) for x in arrays])
        except Exception as error:
            _hint_static_number(error, leaves, self._params)
            raise
        return _Call(arrays, program, shapes, [path for path, _ in leaves])

    def _param_paths(self, places: Sequence[Any]) -> list[str | None]:
        """For each array its path in the parameters; None for data."""
        arguments = [_argument_of(path) for path in places]
        if unknown := [place for place in self._params if place not in arguments]:
            raise ValueError(f"params={unknown[0]!r} names no argument of this call that holds arrays")
        return [self._param_path(path) for path in places]

    def _make_plan(
        self, program: Any, paths: Sequence[str | None], shapes: Any, frozen_infos: Sequence[Any]
    ) -> CallPlan:
        graph, call_info = read(program, paths, frozen_infos), self._make_call_info(shapes)
        try:
            entries, uses, message, unquantized = plan(graph, self._rules, call_info)
        except ValueError as error:
            _hint_closed_over_arrays(error, program.consts)
            raise
        structure = jax.tree.structure(shapes)
        graph_schedule = schedule(graph)
        if any(entry.is_quantized for entry in entries.values()):
            missing_kernels.warn_if_missing()

        def run(arrays: list[Any], use_inputs: Any, collect_stats: bool) -> tuple[list[Any], Any]:
            weights = {path: x for path, x in zip(paths, arrays, strict=True) if path is not None}
            use_inputs = with_complete_bounds(use_inputs, uses, weights)
            interpreter = Interpreter(graph_schedule, arrays, use_inputs, collect_stats=collect_stats)
            return interpreter.run(), interpreter.stats

        compiled = jax.jit(run, static_argnames="collect_stats")
        rows = functools.partial(list_rows, graph, graph_schedule, self._rules, call_info, entries)
        plan_entries = tuple(entries.values())
        return CallPlan(plan_entries, uses, tuple(paths), structure, run, compiled, rows, message, unquantized)

    def _is_static(self, path: Any, x: Any) -> bool:
        """Whether a leaf is no array but a setting: of other values, the function is another one."""
        argument = _argument_of(path)
        return (
            argument in self._static or isinstance(x, bool) or not (isinstance(x, self._traced_types) or is_frozen(x))
        )

    def _param_path(self, path: Any) -> str | None:
        """The path of a parameter; None for data."""
        argument = _argument_of(path)
        if argument not in self._params:
            return None
        first = (str(argument),) if len(self._params) > 1 else ()
        return "/".join(filter(None, (*first, jax.tree_util.keystr(path[2:], simple=True, separator="/"))))


def _check_states(states: States | None, uses: dict[WeightUse, Linear]) -> None:
    """Raises ValueError where products have no state that their scaling needs."""
    for use, linear in uses.items():
        if not linear.states:
            continue
        tracked = None if states is None else states.get(use.path)
        if tracked is not None and use.number < len(tracked.slots):
            continue
        if states or any(scaling.collects_stats for scaling in linear.states.values()):
            missing = "of which the given states have none" if states else "and no states are given"
            raise ValueError(
                f"{scaling_names(linear)} scaling of {use.path} keeps a state, {missing}: write states = "
                "fast.init(params, ...) for the transformed function fast, and call fast(params, ..., states=states)"
            )


def _hint_static_number(error: Exception, leaves: Sequence[tuple[Any, Any]], params: Sequence[int | str]) -> None:
    """Adds to an error of a traced array which Python number a function got as one: it may branch on that."""
    if "trace" not in str(error).lower():
        return
    for path, x in leaves:
        if not isinstance(x, _NUMBER_TYPES) or isinstance(x, np.generic):
            continue
        location = f"{x!r} at {jax.tree_util.keystr(path[1:])}"
        is_in_params = _argument_of(path) in params
        fix = "fp8jax.filter_transform takes numbers in a model" if is_in_params else "static= takes arguments"
        error.add_note(f"fp8jax.transform traced {location} as an array, as jax.jit does; {fix} for settings")
        return


def _hint_closed_over_arrays(error: ValueError, consts: Sequence[Any]) -> None:
    """Adds to an error of a function without products that it has matrices of its own: maybe its weights."""
    matrix_shapes = [jnp.shape(x) for x in consts if jnp.ndim(x) > 1]
    if matrix_shapes and "no product of data with a parameter" in str(error):
        error.add_note(
            f"the function has {len(matrix_shapes)} matrices that it does not get as arguments, one of shape "
            f"{matrix_shapes[0]}: what a recipe may quantize is in the arguments of params=, by default the first one"
        )


def _default_call_info(results: Any) -> CallInfo:
    """Who calls a function that is no method of a model."""
    return CallInfo()


def _bind_settings(fn: Callable, structure: Any, count: int, settings: dict[int, Any]) -> Callable:
    """A function of the arrays among the leaves of its arguments."""

    def call(arrays: list[Any]) -> Any:
        array_iter = iter(arrays)
        args, kwargs = jax.tree.unflatten(
            structure, [settings[i] if i in settings else next(array_iter) for i in range(count)]
        )
        return fn(*args, **kwargs)

    return call


def _argument_of(path: Any) -> int | str:
    """Which argument a leaf of (args, kwargs) is part of."""
    return path[1].key if path[0].idx == 1 else path[1].idx  # type: ignore[no-any-return]


def transform(
    fn: Callable,
    rules: Rules,
    *,
    params: int | str | Sequence[int | str] = 0,
    static: int | str | Sequence[int | str] = (),
) -> Transformed:
    """A function whose products of data with parameters are those of a recipe, whatever framework it is written in.

        fast = fp8jax.transform(loss_fn, "coat")
        loss, grads = jax.value_and_grad(fast)(params, batch)
        print(fast.explain(params, batch))

    The function is traced, as `jax.jit` does it; its program is read, and operations of the recipe take the place of
    equations: products of data with a parameter, at any depth of scans, checkpoints, conditions and calls; where the
    recipe says what is kept of their inputs, or on a GPU makes codes at once, norms (RMSNorm, LayerNorm) and
    activations (SiLU and GELU, gated or not) before them in any spelling; and what reads flash attention's output
    keeps no copy of it. Norms and activations are known by their values at probes. Everything else is run as it is
    written, under its own scopes and lines: what has a derivative of its own (`jax.custom_vjp`, `jax.custom_jvp`),
    products of data with what is computed from parameters, products of a gradient that the function takes itself,
    convolutions. `explain` tells of each.

    Args:
        fn: any function that `jax.jit` can compile. To differentiate, differentiate what this returns.
        rules: a `Recipe` or a preset's name, for all products but those of embeddings, output heads and routers; or a
            sequence of `fp8jax.Rule`, the first match wins, after which a recipe may stand for all others. Rules match
            the path of a parameter in its tree, steps joined by "/", without a last step such as "kernel" or "w":
            "layers/mlp/up". A head is a product whose result the function returns or takes the softmax of; a router
            one whose result goes into softmax, top_k, argmax or sort. A recipe that quantizes no product, such as
            "bf16", leaves all as written.
        params: the arguments that hold parameters, by place or name. Of several, paths begin with the place or name.
        static: arguments that are settings, as `static_argnums` of `jax.jit`. Leaves that are no arrays and no numbers,
            such as booleans, strings and functions, are so in any case.

    Returns:
        A `Transformed`.

    Raises:
        ValueError: there are no rules; or from a call, a rule matches nothing, there is no product of data with
            a parameter, or one asks for a precision that a quantized product cannot give.
        TypeError: the rules are of another type, or `fn` is no function.
    """
    return _make_transformed(fn, rules, params, static)


def _make_transformed(fn: Callable, rules: Rules, params: Any, static: Any, **keywords: Any) -> Transformed:
    if not callable(fn):
        raise TypeError(f"fp8jax.transform takes a function of parameters and data, not {fn!r}")
    param_arguments, static_arguments = ((x,) if isinstance(x, (int, str)) else tuple(x) for x in (params, static))
    return Transformed(fn, as_rule_set(rules), param_arguments, static_arguments, **keywords)


def filter_transform(fn: Callable, rules: Rules, *, params: int | str | Sequence[int | str] = 0) -> Transformed:
    """`transform` of a function of modules that are pytrees, as Equinox's: arrays are traced, all else is a setting.

        fast = fp8jax.filter_transform(loss_fn, "coat")
        loss, grads = equinox.filter_value_and_grad(fast)(model, batch)

    So a model may hold numbers that it branches on, such as a rate of dropout, as `equinox.filter_jit` has it: for each
    value there is a program of its own. What the function returns are arrays.

    Args:
        fn: a function of a module, or of a tree with modules.
        rules: as of `transform`; paths are those of fields: "layers/0/up".
        params: the arguments that hold modules, as of `transform`.

    Returns, raises: as `transform`. A setting that is not hashable raises TypeError.
    """
    return _make_transformed(fn, rules, params, (), traced_types=_ARRAY_TYPES)
