"""`fp8jax.transform`: quantization as a function transformation."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.core.recipe import Linear
from fp8jax.core.scaling import AxisNames
from fp8jax.ops.dispatch import choice
from fp8jax.rewrite import training
from fp8jax.rewrite.call_info import CallInfo
from fp8jax.rewrite.check import Comparison, check
from fp8jax.rewrite.explanation import Explanation, exchange_note, list_rows
from fp8jax.rewrite.frozen_params import as_shape_struct, frozen_info, frozen_leaf_predicate, is_frozen
from fp8jax.rewrite.graph import Graph
from fp8jax.rewrite.plan import plan, split_edge_iterations
from fp8jax.rewrite.planned import CallPlan, Notices, PlannedCall
from fp8jax.rewrite.read import read
from fp8jax.rewrite.rules import Rules, RuleSet, as_rule_set
from fp8jax.rewrite.run import Interpreter, schedule
from fp8jax.rewrite.states import (
    States,
    UseInputs,
    WeightUse,
    advance,
    observed_operands,
    scaling_names,
    use_inputs_from_states,
    with_complete_bounds,
    with_weight_bounds,
)

_MAX_PLANS = 64
# Leaves of these types are traced; all others are static settings.
_ARRAY_TYPES, _NUMBER_TYPES = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic), (int, float, complex)


class _Call(NamedTuple):
    """The arrays of a call, its jaxpr, the shapes of its results, and the path of each array in the arguments."""

    arrays: list[Any]
    program: Any
    shapes: Any
    array_paths: list[Any]


class Transformed:
    """A function with the matmuls of a recipe, returned by `transform` and called like the original function.

    It can be differentiated, jitted, mapped, and called in loops, like the original function. It is planned once per
    structure, shape, dtype and sharding of the arguments. A call outside of `jax.jit` is jitted.
    """

    def __init__(
        self,
        fn: Callable,
        rules: RuleSet,
        params: tuple[int | str, ...] | None,
        static: tuple[int | str, ...],
        make_call_info: Callable[[Any], CallInfo] | None = None,
        traced_types: tuple[type, ...] = (*_ARRAY_TYPES, *_NUMBER_TYPES),
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._traced_types = traced_types
        self._make_call_info = make_call_info or _default_call_info
        self._fn, self._rules, self._static = fn, rules, static
        self._params, self._params_given = (0,) if params is None else params, params is not None
        self._clear_caches()

    def _clear_caches(self) -> None:
        self._calls: dict[Hashable, Callable] = {}
        self._plans: dict[Hashable, tuple[Any, CallPlan]] = {}
        self._notices = Notices()

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without caches: a copy traces its programs again."""
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

        Raises:
            ValueError: as in a call, but not for a precision that matmuls ask for: the plan's run raises that.
        """
        call = self._trace(args, kwargs)
        frozen_infos = tuple(map(frozen_info, call.arrays))
        key = id(call.program), *(frozen_infos if any(frozen_infos) else ())
        cached = self._plans.get(key)
        if cached is not None:
            return PlannedCall(cached[1], call.arrays)
        call_plan = self._make_plan(call.program, self._param_paths(call), call.shapes, frozen_infos)
        # A program that closes over tracers is valid for one call.
        if not any(isinstance(c, jax.core.Tracer) for c in call.program.consts):
            while len(self._plans) >= _MAX_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = call.program, call_plan
        return PlannedCall(call_plan, call.arrays)

    def check(self, *args: Any, states: States | None = None, **kwargs: Any) -> Comparison:
        """Compare each quantized operation with the original equations, on the arrays of the original function.

        Compares the result, and the operands' gradients for a random gradient of the result. Covers the first iteration
        of a loop and each branch of a cond, but nothing in `jax.shard_map`.

        Args:
            args, kwargs: of a call.
            states: of a call; None compares with current scaling in place of scalings that keep a state.

        Returns:
            A `Comparison`; print it. `first_failure` is the first operation with more error than its formats explain,
            or None.

        Raises:
            ValueError: as in a call, or if a parameter is frozen in 8 bits.
        """
        call = self._trace(args, kwargs)
        if any(map(is_frozen, call.arrays)):
            raise ValueError(
                "check compares a function of arrays; pass the values of frozen weights, and merge adapters with "
                "fp8jax.lora.merge"
            )
        paths = self._param_paths(call)
        call_info = self._make_call_info(call.shapes)
        original, planned = (self._read(call.program, paths, (), call_info) for _ in range(2))
        entries, uses, *_ = plan(planned, self._rules, call_info)
        use_inputs: dict[tuple[str, int], UseInputs] = {}
        if states is not None:
            _check_states(states, uses)
            weights = {path: x for path, x in zip(paths, call.arrays, strict=True) if path is not None}
            use_inputs = with_complete_bounds(use_inputs_from_states(states, weights), uses, weights)
        return check(original, planned, entries, call.arrays, use_inputs)

    def init(self, *args: Any, **kwargs: Any) -> States:
        """The scaling states before the first step, by parameter path; {} if no recipe has any.

            states = fast.init(params, batch)
            grads, observed = jax.grad(lambda p, s: loss(fast(p, batch, states=s)), argnums=(0, 1))(params, states)
            states = fast.advance(states, observed)

        The gradient of the states holds the statistics of a call, such as each operand's amax. It passes scans,
        checkpoints, conds and meshes. A call that is not differentiated collects none. Under `jax.vmap`, map the states
        too, or the statistics are summed over the batch.

        Args:
            args, kwargs: of a call. Automatic scaling has no bounds yet: it measures the weights in each call.

        Raises:
            ValueError: as in a call, or if matmuls of one parameter cannot share a state.
        """
        return self.plan_call(*args, **kwargs).init()

    def advance(self, states: States, observed: States, *, axis_name: AxisNames = None) -> States:
        """The states after a step.

        Args:
            states: the states before the step.
            observed: the gradient of the loss with respect to the states; the maximum over microbatches (counts: the
                sum).
            axis_name: mesh axes over which to merge the statistics, if the call is inside of `jax.shard_map`.
        """
        training.record_advance(training.ADVANCE)
        return advance(states, observed, axis_name)

    def update_weight_amax_bounds(self, states: States, bounds: Mapping[tuple[str, ...], Any]) -> States:
        """The states with new weight bounds for automatic scaling; call it after each optimizer update.

        Args:
            states: from `init`.
            bounds: from `fp8jax.get_weight_amax_bounds`, for an optimizer of the same parameters.

        Raises:
            ValueError: the optimizer has other parameters.
        """
        training.record_advance(training.BOUNDS)
        return with_weight_bounds(states, bounds)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What is quantized, what is left as written and why, what is saved and gained; nothing is computed.

        Args:
            args, kwargs: of a call; arrays or `jax.ShapeDtypeStruct`.

        Returns:
            An `Explanation`; print it. A row's line is in your code, or else in the library of models that you use.

        Raises:
            ValueError: as in a call, but not for a precision that matmuls ask for: those are listed.
        """
        return self.plan_call(*args, **kwargs).plan.explain()

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """The traced program of a call."""
        params = [x for argument, x in (*enumerate(args), *kwargs.items()) if argument in self._params]
        flat, structure = jax.tree.flatten_with_path((args, kwargs), is_leaf=frozen_leaf_predicate(params))
        settings = {i: x for i, (path, x) in enumerate(flat) if self._is_static(path, x)}
        key = structure, tuple((i, type(x), x) for i, x in settings.items())
        try:
            call = self._calls.get(key)
        except TypeError:
            unhashable = next(x for x in settings.values() if type(x).__hash__ is None)
            raise TypeError(f"an argument that is not an array must be hashable, got {unhashable!r}") from None
        if call is None:
            call = self._calls[key] = _bind_settings(self._fn, structure, len(flat), settings)
        leaves = [(path, x) for i, (path, x) in enumerate(flat) if i not in settings]
        arrays = [x for _, x in leaves]
        # JAX caches the jaxpr: an equal call is not traced again.
        try:
            program, shapes = jax.make_jaxpr(call, return_shape=True)([as_shape_struct(x) for x in arrays])
        except Exception as error:
            _hint_static_number(error, leaves, self._params)
            raise
        return _Call(arrays, program, shapes, [path for path, _ in leaves])

    def _param_paths(self, call: _Call) -> list[str | None]:
        """For each array its parameter path; None for data."""
        if not self._params_given:
            _raise_if_first_is_data(call)
        arguments = [_argument_of(path) for path in call.array_paths]
        if unknown := [argument for argument in self._params if argument not in arguments]:
            hint = (
                "; for parameters passed by keyword, use their names, such as params='p'"
                if unknown[0] in (0, 1)
                else ""
            )
            raise ValueError(f"params={unknown[0]!r} names no argument of this call that holds arrays{hint}")
        return [self._param_path(path) for path in call.array_paths]

    def _read(
        self, program: Any, paths: Sequence[str | None], frozen_infos: Sequence[Any], call_info: CallInfo
    ) -> Graph:
        params = {path for path in paths if path is not None}
        split_loop = functools.partial(split_edge_iterations, self._rules, call_info, params)
        return read(program, paths, frozen_infos, self._rules.grouped_products, split_loop)

    def _make_plan(
        self, program: Any, paths: Sequence[str | None], shapes: Any, frozen_infos: Sequence[Any]
    ) -> CallPlan:
        call_info = self._make_call_info(shapes)
        graph = self._read(program, paths, frozen_infos, call_info)
        try:
            program_plan = plan(graph, self._rules, call_info)
        except ValueError as error:
            _hint_closed_over_arrays(error, program.consts)
            raise
        entries, uses = program_plan.entries, program_plan.uses
        for node, entry in entries.items():
            node.path = entry.path
        graph_schedule = schedule(graph)
        if any(entry.is_quantized for entry in entries.values()):
            choice.warn_if_kernels_missing()

        def run(arrays: list[Any], use_inputs: Any, collect_stats: bool) -> tuple[list[Any], Any]:
            weights = {path: x for path, x in zip(paths, arrays, strict=True) if path is not None}
            use_inputs = with_complete_bounds(use_inputs, uses, weights)
            interpreter = Interpreter(graph_schedule, arrays, use_inputs, collect_stats=collect_stats)
            return interpreter.run(), interpreter.stats

        compiled = jax.jit(run, static_argnames="collect_stats")
        rows = functools.partial(list_rows, graph, graph_schedule, self._rules, call_info, entries)
        exchange = functools.partial(exchange_note, graph)
        return CallPlan(program_plan, tuple(paths), jax.tree.structure(shapes), run, compiled, rows, exchange)

    def _is_static(self, path: Any, x: Any) -> bool:
        """Whether a leaf is a static setting: each of its values is a program of its own."""
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
    """Raise ValueError if a matmul lacks the state that its scaling needs."""
    for use, linear in uses.items():
        if not linear.stateful_strategies:
            continue
        tracked = None if states is None else states.get(use.path)
        if tracked is not None and use.number < len(tracked.slots):
            continue
        if states or observed_operands(linear):
            missing = "but the passed states have none for it" if states else "but no states were passed"
            raise ValueError(
                f"{scaling_names(linear)} scaling of {use.path or 'the parameter'} keeps a state, {missing}. Use "
                "states = fast.init(params, ...) for the transformed function fast, and call fast(params, ..., "
                "states=states)"
            )


def _raise_if_first_is_data(call: _Call) -> None:
    """Raise ValueError if the first argument is one array and another contains matrices, such as `f(x, params)`."""
    if [len(path) for path in call.array_paths if _argument_of(path) == 0] != [2]:
        return
    for path, x in zip(call.array_paths, call.arrays, strict=True):
        if len(path) > 2 and jnp.ndim(x) > 1 and jnp.issubdtype(x.dtype, jnp.floating):
            other = _argument_of(path)
            raise ValueError(
                "by default the parameters are in the first argument, but this is one array of shape "
                f"{jnp.shape(call.arrays[0])}, while argument {other!r} contains matrices. Pass params={other!r}, or "
                "params=0 if the first argument is the parameter"
            )


def _hint_static_number(error: Exception, leaves: Sequence[tuple[Any, Any]], params: Sequence[int | str]) -> None:
    """Add a note to a tracer error: which Python number was traced. The function may branch on it."""
    if "trace" not in str(error).lower():
        return
    for path, x in leaves:
        if not isinstance(x, _NUMBER_TYPES) or isinstance(x, np.generic):
            continue
        location = f"{x!r} at {jax.tree_util.keystr(path[1:])}"
        is_in_params = _argument_of(path) in params
        fix = "use fp8jax.filter_transform for numbers in a model" if is_in_params else "use static= for arguments"
        error.add_note(f"fp8jax.transform traced {location} as an array, as jax.jit does. To keep it static, {fix}")
        return


def _hint_closed_over_arrays(error: ValueError, consts: Sequence[Any]) -> None:
    """Add a note to an error about missing parameters if the function closes over matrices: maybe its weights."""
    matrix_shapes = [jnp.shape(x) for x in consts if jnp.ndim(x) > 1]
    if matrix_shapes and "no matmul of data with a parameter" in str(error):
        error.add_note(
            f"the function closes over {len(matrix_shapes)} matrices, one of shape {matrix_shapes[0]}. A recipe "
            "quantizes only arguments in params=, by default the first one"
        )


def _default_call_info(results: Any) -> CallInfo:
    """The caller's facts for a plain function."""
    return CallInfo()


def _bind_settings(fn: Callable, structure: Any, count: int, settings: dict[int, Any]) -> Callable:
    """A function of the array leaves, with the static leaves of the arguments bound."""

    def call(arrays: list[Any]) -> Any:
        array_iter = iter(arrays)
        args, kwargs = jax.tree.unflatten(
            structure, [settings[i] if i in settings else next(array_iter) for i in range(count)]
        )
        return fn(*args, **kwargs)

    return call


def _argument_of(path: Any) -> int | str:
    """The position or name of the argument that a leaf of (args, kwargs) belongs to."""
    return path[1].key if path[0].idx == 1 else path[1].idx


def transform(
    fn: Callable,
    rules: Rules,
    *,
    params: int | str | Sequence[int | str] | None = None,
    static: int | str | Sequence[int | str] = (),
) -> Transformed:
    """A function with the matmuls of a recipe in place of those between data and parameters, in any framework.

        fast = fp8jax.transform(loss_fn, "coat")
        loss, grads = jax.value_and_grad(fast)(params, batch)
        print(fast.explain(params, batch))

    The function is traced like under `jax.jit`. The recipe replaces matmuls of data with a parameter, at any depth of
    scans, checkpoints, conds and calls. If it compresses residuals, or emits codes on a GPU, it also replaces RMSNorm,
    LayerNorm, SiLU and GELU (gated or not) before them. These are identified by their values at probe points, in any
    spelling. The input of a matmul after flash attention is not saved twice. All other equations run as written: custom
    derivatives, convolutions, derivatives inside of the function, and matmuls with values computed from parameters.
    `explain` lists them.

    Args:
        fn: any function that `jax.jit` can compile. Differentiate the result, not `fn`.
        rules: a `Recipe` or a preset's name, for all matmuls but those of embeddings, output heads and routers. Or a
            sequence of `fp8jax.Rule`, which such a recipe may follow; the first match wins. A rule matches a
            parameter's path, joined by "/", without a last step such as "kernel" or "w": "layers/mlp/up". The result of
            a head is returned or goes into a softmax; that of a router goes into softmax, top_k, argmax or sort, or
            only such scores depend on it. A recipe that quantizes no matmul, such as "bf16", changes nothing. A
            `fp8jax.GroupedProduct` among the rules names a function with a custom derivative that computes a grouped
            product.
        params: the arguments with parameters, by position or name. The default is the first argument. If there are
            several, paths begin with their positions or names.
        static: arguments that are settings, like `static_argnums` of `jax.jit`. Leaves that are neither arrays nor
            numbers, such as booleans, strings and functions, always are.

    Raises:
        ValueError: there are no rules. From a call: a rule matches nothing, or there is no matmul of data with a
            parameter. Or one asks for a precision that no quantized matmul has. Or `params` is not given, the first
            argument is one array, and another one contains matrices.
        TypeError: the rules are of another type, or `fn` is no function.
    """
    return _make_transformed(fn, rules, params, static, (*_ARRAY_TYPES, *_NUMBER_TYPES))


def _make_transformed(
    fn: Callable, rules: Rules, params: Any, static: Any, traced_types: tuple[type, ...]
) -> Transformed:
    if not callable(fn):
        raise TypeError(f"fp8jax.transform expects a function of parameters and data, got {fn!r}")
    # The leaves of a module are its arrays; a function is one leaf.
    if not isinstance(fn, functools.partial) and any(isinstance(leaf, _ARRAY_TYPES) for leaf in jax.tree.leaves(fn)):
        raise TypeError(
            f"fp8jax.transform expects a function of parameters and data, got {type(fn).__name__}, which contains its "
            "parameters. Use fp8jax.filter_transform(lambda model, x: model(x), rules) and call it with the model "
            "and the data; for Flax NNX, fp8jax.nnx.quantize(model, rules)"
        )
    param_arguments = None if params is None else _as_tuple(params)
    return Transformed(fn, as_rule_set(rules), param_arguments, _as_tuple(static), traced_types=traced_types)


def _as_tuple(arguments: int | str | Sequence[int | str]) -> tuple[int | str, ...]:
    return (arguments,) if isinstance(arguments, (int, str)) else tuple(arguments)


def filter_transform(
    fn: Callable, rules: Rules, *, params: int | str | Sequence[int | str] | None = None
) -> Transformed:
    """`transform` for functions of modules that are pytrees, like Equinox's: arrays are traced, all else is static.

        fast = fp8jax.filter_transform(loss_fn, "coat")
        loss, grads = equinox.filter_value_and_grad(fast)(model, batch)

    A model may hold numbers that it branches on, such as a dropout rate, as with `equinox.filter_jit`. Each value is a
    program of its own. The function must return arrays.

    Args:
        fn: a function of a module, or of a pytree with modules.
        rules: as in `transform`; paths are those of fields: "layers/0/up".
        params: the arguments with modules, as in `transform`.

    Returns, raises: as `transform`. A static leaf that is not hashable raises TypeError.
    """
    return _make_transformed(fn, rules, params, (), _ARRAY_TYPES)
