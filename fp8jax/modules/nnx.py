"""`fp8jax.nnx.quantize`: an NNX model whose calls are transformed with `fp8jax.rewrite`.

`flax.nnx.tabulate` shows the table of the original model, with each layer's recipe. Flax marks the modules of a copy by
an attribute, and patches their classes' methods to record calls. A transformed program calls no modules, so the modules
of the copy get classes with the original methods.
"""

import contextlib
import copyreg
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp8jax.core.recipe import Linear, Recipe
from fp8jax.modules import functional
from fp8jax.modules.calls import LayerNames, count_stacked_axes, is_matrix, wrong_model_message
from fp8jax.modules.functional import FrozenParam, ModuleMethod, count_layer_axes, restore_param_classes
from fp8jax.modules.scaled import STATE_PREFIX, LayerScaling, ParameterStateModule
from fp8jax.rewrite import suggestion, training
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.frozen_params import as_array
from fp8jax.rewrite.heads import OUTPUT_HEAD_REASON
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import HEAD_PATTERN, Rules, RuleSet, as_rule_set
from fp8jax.rewrite.states import ParameterState, observed_operands
from fp8jax.rewrite.suggestion import Suggestion
from fp8jax.rewrite.telemetry import Telemetry

# The attribute with which Flax marks the modules of a copy.
TABULATE_ID = "_nnx_tabulate_id"


def make_tabulate_property(original: Any, method: ModuleMethod | None, restore: Callable[[Any], None]) -> property:
    """The attribute with which Flax marks a module; setting it first changes the module's class to one for tables.

    Args:
        method: the model's call; None for its submodules.
        restore: removes a module's scaling states and codes.
    """

    def set_tabulate_id(module: Any, value: int) -> None:
        restore(module)
        body: dict[str, Any] = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        body["_fp8jax_original_class"] = original
        if method is not None:
            body["__call__"] = _with_recipe_names(method)
        meta: Any = type(original)
        cls = meta(original.__name__, (original,), body, pytree=original._pytree__is_pytree)
        object.__setattr__(module, "__class__", cls)
        setattr(module, TABULATE_ID, value)

    return property(fset=set_tabulate_id)


def _with_recipe_names(method: ModuleMethod) -> Callable:
    """The original call; it adds the names of recipes to those of the layers' classes."""

    @functools.wraps(method.original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _frozen_as_arrays(self):
            y = method.original(self, *args, **kwargs)  # first: calls are recorded once, in this order
        with training.suppress_training_checks():
            entries = functional.plan_call(self, method, args, kwargs).program.entries.values()
        modules = get_modules(self)
        names: dict[str, list[str]] = {}
        for entry in entries:
            if entry.is_product and entry.is_quantized:
                names.setdefault(find_owner(modules, entry.path), []).append(_get_recipe_name(method.rules, entry))
        for path, recipe_names in names.items():
            cls: Any = type(modules[path])
            if "_fp8jax_original_class" in vars(cls):
                cls.__name__ = f"{cls._fp8jax_original_class.__name__} ({', '.join(dict.fromkeys(recipe_names))})"
        return y

    return call


@contextlib.contextmanager
def _frozen_as_arrays(module: nnx.Module) -> Iterator[None]:
    """A context in which frozen weights are arrays."""
    variables = {id(v): v for _, v in nnx.iter_graph(module) if isinstance(v, FrozenParam)}.values()
    previous_values = [(v, v.get_raw_value()) for v in variables]
    try:
        for variable, value in previous_values:
            variable.set_raw_value(as_array(value))
        yield
    finally:
        for variable, value in previous_values:
            variable.set_raw_value(value)


def find_owner(modules: Mapping[str, Any], path: str) -> str:
    """The path of the module that is a layer, or that holds the parameter at a path; "" if there is none."""
    while path and path not in modules:
        path = path.rpartition("/")[0]
    return path


def _get_recipe_name(rules: RuleSet, entry: PlanEntry) -> str:
    """The name of a matmul's recipe, or else its formats."""
    assert entry.choice is not None
    linear = entry.choice.linear
    assert linear is not None
    recipes: Sequence[Any] = [rule.recipe for rule in rules.rules if rule.linear == linear]
    return next((r.name for r in recipes if isinstance(r, Recipe)), f"{linear.x} x {linear.w}")


Model = TypeVar("Model", bound=nnx.Module)
LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
# Layers with matrices that are never quantized.
_UNQUANTIZED_LAYERS = (nnx.Embed, nnx.Conv, nnx.ConvTranspose)


@dataclasses.dataclass(frozen=True)
class QuantizedClassConfig:
    """How the methods of a quantized module's class are transformed.

    Attributes:
        prefix: the module's path in its model; "" if there are no user rules.
        is_model: whether it is the model itself, which must have something to quantize.
    """

    rules: RuleSet
    prefix: str
    methods: tuple[str, ...]
    is_model: bool


class QuantizedMeta(type(nnx.Module)):  # type: ignore[misc]
    """The metaclass of quantized modules, which pickles a class as the original class and its config."""


def _reduce(cls: Any) -> Any:
    if "_fp8jax_settings" not in vars(cls):
        return cls.__qualname__
    return make_quantized_class, (cls._fp8jax_original_class, cls._fp8jax_settings)


copyreg.pickle(QuantizedMeta, _reduce)


@functools.cache
def make_quantized_class(original: Any, settings: QuantizedClassConfig) -> type:
    """The subclass of a module's class with transformed methods."""
    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(original, name) for name in names}
    body |= {"_fp8jax_original_class": original, "_fp8jax_settings": settings}
    body["_fp8jax_notices"] = Notices() if settings.is_model else None
    body |= {
        name: _quantized_method(original, name, settings)
        for name in settings.methods
        if callable(getattr(original, name, 0))
    }
    method = _original_method(original, "__call__", settings) if settings.is_model and "__call__" in body else None
    body[TABULATE_ID] = make_tabulate_property(original, method, _remove_state_modules)
    meta: Any = _make_metaclass(type(original))  # type: ignore[arg-type]
    return meta(original.__name__, (original,), body, pytree=original._pytree__is_pytree)


@functools.cache
def _make_metaclass(meta: type) -> Any:
    if issubclass(QuantizedMeta, meta):
        return QuantizedMeta
    quantized_metaclass = type(meta.__name__, (QuantizedMeta, meta), {})
    copyreg.pickle(quantized_metaclass, _reduce)
    return quantized_metaclass


def _original_method(original: Any, name: str, settings: QuantizedClassConfig) -> ModuleMethod:
    """A method of the original class."""
    requires_product = settings.is_model and name == "__call__"
    return ModuleMethod(
        getattr(original, name), name, settings.rules, settings.prefix, requires_product, _restore_original_classes
    )


def _quantized_method(original: Any, name: str, settings: QuantizedClassConfig) -> Callable:
    method = _original_method(original, name, settings)
    function = method.original

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state_modules: dict[str, ParameterStateModule] = {}

        def read_states(variables: Sequence[Any], weights: Mapping[str, Any]) -> dict[str, ParameterState]:
            state_modules.update(functional.find_state_modules(self, variables))
            return {path: holder.read_state(weights.get(path)) for path, holder in state_modules.items()}

        try:
            y, stats_by_path = functional.run(self, method, args, kwargs, read_states, type(self)._fp8jax_notices)
        except jax.errors.ConcretizationTypeError:
            # The call branches on values. It runs as written, with transformed submodules.
            if any(is_matrix(name, param.shape) for name, param in get_params(self).items()):
                raise
            return function(self, *args, **kwargs)
        for path, stats in stats_by_path.items():
            state_modules[path].merge_stats(stats)
        return y

    return call


def _restore_original_classes(module: nnx.Module) -> Callable[[], None]:
    """Give a module and its submodules their original classes; return a function that undoes this."""
    restore_variables = restore_param_classes(module)
    changed = [m for _, m in nnx.iter_modules(module) if "_fp8jax_settings" in vars(type(m))]
    classes = [type(m) for m in changed]
    for m, cls in zip(changed, classes, strict=True):
        object.__setattr__(m, "__class__", cls._fp8jax_original_class)  # type: ignore[attr-defined]

    def restore() -> None:
        for m, cls in zip(changed, classes, strict=True):
            object.__setattr__(m, "__class__", cls)
        restore_variables()

    return restore


def quantize(model: Model, rules: Rules, *, methods: Sequence[str] = ("__call__",)) -> Model:
    """Returns a copy of a model that computes its matmuls with parameters by a recipe.

    Parameters keep their names, shapes and values, so checkpoints of one load into the other. Calls of the copy are
    transformed as by `fp8jax.transform`. This covers layers of Flax and your own layers, in `nnx.jit`, `nnx.scan`,
    `nnx.remat`, loops and stacks of `nnx.vmap`. With a `Context`, norms and activations before these matmuls are
    replaced too. A call changes variables, modules and random keys as before. Build the `nnx.Optimizer` from the copy.
    The copy is an instance of the model's class and can be pickled; `unquantize` returns the original.

    Submodules are transformed too if they are called from outside, as in `model.layers[0](x)`. A method that is not in
    `methods`, or a call that branches on values of arrays, runs as written, with transformed submodules. A call outside
    of a compiled function is jitted, once per structure of its arguments, like under `nnx.jit`. Python numbers among
    them are static.

    Delayed scaling and `int8_fallback` add variables, which `fp8jax.nnx.value_and_grad` and `Optimizer` train. They are
    in `dot_general` or `einsum_op` of a Flax layer. In other classes they are in `fp8jax_NAME` for each parameter NAME
    of two axes or more. Each matrix in its last two axes, such as that of an expert, has a state. A product of the
    whole parameter uses the first state. Matmuls with other batch axes run as written.

    A recipe, unlike a rule, does not quantize embeddings, output heads and routers. These are found by name, or by
    their result: it is returned (heads), or goes into softmax, top_k or argmax (routers). All layers of a router stay
    whose results only the scores depend on, as in an MLP.

    Args:
        model: any NNX module; it is not changed.
        rules: a `Recipe` or a preset's name, for all layers but embeddings, output heads and routers. Or a sequence of
            `fp8jax.Rule` on paths such as `"layers/attention/q"`, with an optional recipe at its end; the first match
            is used. If a module has several matrices, a rule may name one, as `"mlp/w1"`. A recipe that quantizes no
            matmul, such as "bf16", changes nothing.
        methods: the names of methods that are transformed, of the model and its submodules.

    Returns:
        The copy. `fp8jax.explain(copy, *sample)` lists each part of a call.

    Raises:
        TypeError: the model is not an NNX module, or the rules have another type.
        ValueError: a rule matches no layer, the model has none or is quantized already, or no module has one of
            `methods`. From a call: nothing can be quantized. Or a matmul asks for a precision that no quantized matmul
            has.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(wrong_model_message("fp8jax.nnx.quantize expects an NNX module", model))
    ordered_rules = as_rule_set(rules)
    submodules = get_modules(model)
    _check_kernel_variables(submodules)
    quantized_paths = [path for path, m in submodules.items() if isinstance(type(m), QuantizedMeta)]
    if quantized_paths:
        quantized_part = min(quantized_paths, key=len) or "the model"  # submodules come first
        raise ValueError(f"{quantized_part} is already quantized; pass the rules with the original model")
    for name in methods:
        if not any(callable(getattr(m, name, None)) for m in submodules.values()):
            raise ValueError(f"no module of the model has a method {name!r}; correct methods=")
    quantized = nnx.clone(model)
    submodules = get_modules(quantized)
    products, record = select_params(submodules, ordered_rules), training.TrainingRecord()
    for module_path, name, linear in products.values():
        module = submodules[module_path]
        # Automatic scaling, which collects no statistics, has bounds for layers whose matrices are (inputs, outputs).
        has_matrices = isinstance(module, LAYERS[:2]) or _may_stack_matrices(module, name)
        if observed_operands(linear) or (linear.stateful_strategies and has_matrices):
            _add_scaling(submodules, module_path, name, linear, record)
    selected_modules = {holder for holder, _, _ in products.values()} | set(
        _find_context_paths(submodules, ordered_rules)
    )
    for path, module in submodules.items():
        has_selected = any(not path or holder == path or holder.startswith(f"{path}/") for holder in selected_modules)
        if has_selected and any(callable(getattr(type(module), name, None)) for name in methods):
            # Without user rules, equal layers share their programs.
            prefix, cls = path if ordered_rules.user_rules else "", type(module)
            settings = QuantizedClassConfig(ordered_rules, prefix, tuple(methods), module is quantized)
            object.__setattr__(module, "__class__", make_quantized_class(cls, settings))  # type: ignore[arg-type]
    if (notices := getattr(type(quantized), "_fp8jax_notices", None)) is not None:
        notices.texts.clear()  # equal models share a class
    return quantized


def _may_stack_matrices(module: Any, name: str) -> bool:
    """Whether a parameter of a user's class may have a matrix for each expert."""
    return not isinstance(module, LAYERS) and count_stacked_axes(get_params(module)[name].shape) > 0


def _check_kernel_variables(submodules: dict[str, Any]) -> None:
    """Raise ValueError if another library has replaced the kernel of a layer."""
    for path, module in submodules.items():
        if isinstance(module, LAYERS) and not isinstance(module.kernel, nnx.Variable):
            raise ValueError(
                f"the kernel of {path or 'the model'} is a {type(module.kernel).__name__}, not an nnx.Variable: "
                "another library has changed the model. Quantize the unchanged model"
            )


def _find_context_paths(submodules: dict[str, Any], rules: RuleSet) -> Iterator[str]:
    """The paths of layers and norms with a recipe that compresses residuals."""
    for path, module in submodules.items():
        if get_params(module) and rules.choose(path).context.residual is not None:
            yield path


def find_candidates(submodules: dict[str, Any], rules: RuleSet) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The parameters that may be quantized (path: module path, name there), and the paths of modules with a scale."""
    matrices, norms = dict[str, tuple[str, str]](), list[str]()
    for module_path, module in submodules.items():
        if isinstance(module, (*_UNQUANTIZED_LAYERS, ParameterStateModule)):
            continue
        for name, param in get_params(module).items():
            path = "/".join(filter(None, (module_path, name)))
            if not functional.is_parameter(param, path.split("/"), rules):
                continue
            if name == "scale":
                norms.append(module_path)
            elif is_matrix(name.rpartition("/")[2], param.shape) and jnp.issubdtype(param.dtype, jnp.floating):
                matrices[path] = module_path, name
    return matrices, norms


def get_layer_names(matrices: Iterable[str], path: str) -> tuple[str, ...]:
    """The path of a parameter's layer, and its aliases; see `LayerNames`."""
    return LayerNames("", [(matrix_path, (2, 2)) for matrix_path in matrices])(path)


def select_params(submodules: dict[str, Any], rules: RuleSet) -> dict[str, tuple[str, str, Linear]]:
    """The parameters that the rules quantize: by path, the module's path, the name in it, and the recipe.

    Raises:
        ValueError: a rule matches nothing, or there is no such parameter.
    """
    matrices, norms = find_candidates(submodules, rules)
    get_names = LayerNames("", [(path, (2, 2)) for path in matrices])
    paths = {path: get_names(path) for path in matrices}
    rules.check_all_used(
        [*(first for first, *_ in paths.values()), *(norms if matrices else [])],
        aliases={first: alternative_paths for first, *alternative_paths in paths.values()},
    )
    # Calls find heads by their results. One that is named as such has its state from the start.
    has_states = rules.head is not None and rules.head.stateful_strategies
    heads = {
        first: OUTPUT_HEAD_REASON for first, *_ in paths.values() if has_states and re.fullmatch(HEAD_PATTERN, first)
    }
    choices = {path: rules.choose(first, heads, also).linear for path, (first, *also) in paths.items()}
    return {p: (*matrices[p], linear) for p, linear in choices.items() if linear is not None}


def get_params(module: Any) -> dict[str, Any]:
    """The parameters in a module and its Python containers, by their paths in it, without those of submodules."""
    return dict(_iter_params(vars(module), ""))


def _iter_params(attributes: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items() if isinstance(attributes, dict) else enumerate(attributes):
        if isinstance(value, (nnx.Param, FrozenParam)):
            yield f"{path}{name}", value
        elif isinstance(value, (dict, list, tuple)) and not str(name).startswith("_"):
            yield from _iter_params(value, f"{path}{name}/")


def get_modules(model: nnx.Module) -> dict[str, Any]:
    """All modules of a model by path; a shared module by its first."""
    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


def get_owner(modules_by_path: dict[str, Any], module_path: str, name: str) -> tuple[Any, str]:
    """The module that stores a parameter's companions, and the parameter's path in it. Containers are skipped."""
    while isinstance(modules_by_path[module_path], (nnx.List, nnx.Dict, nnx.Sequential)) and module_path:
        module_path, _, last = module_path.rpartition("/")
        name = f"{last}/{name}"
    return modules_by_path[module_path], name


def _add_scaling(
    modules_by_path: dict[str, Any], module_path: str, name: str, linear: Linear, record: training.TrainingRecord
) -> None:
    """Add the scaling state of a parameter's matmuls to its module."""
    value = get_params(modules_by_path[module_path])[name].get_value()
    layer, name = get_owner(modules_by_path, module_path, name)
    cls = _original_class(layer).__name__
    if isinstance(layer, LAYERS) and name == "kernel":
        einsum = isinstance(layer, nnx.Einsum)
        attr = "einsum_op" if einsum else "dot_general"
        jax_function = jnp.einsum if einsum else lax.dot_general
        scaling = LayerScaling(
            linear, value, name, count_layer_axes(layer), f"an nnx.{cls}", getattr(layer, attr), jax_function, record
        )
    else:
        attr = f"{STATE_PREFIX}{name.replace('/', '_')}"
        scaling = LayerScaling(
            linear, value, name, count_stacked_axes(value.shape), f"a layer of class {cls}", record=record
        )
    setattr(layer, attr, nnx.data(scaling))


def _original_class(module: Any) -> type:
    """The class of a module before `quantize`."""
    classes: Any = type(module).__mro__
    return next((c._fp8jax_original_class for c in classes if "_fp8jax_original_class" in vars(c)), type(module))


def get_settings(module: Any) -> QuantizedClassConfig | None:
    """The config of a quantized module's class; None for other modules."""
    return getattr(type(module), "_fp8jax_settings", None)


def unquantize(model: Model) -> Model:
    """Returns the original model with the parameters of a quantized one.

    Args:
        model: a model that `quantize` returned; it is not changed.

    Raises:
        TypeError: the model is no NNX module.
        ValueError: it is not quantized, or has adapters.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(wrong_model_message("fp8jax.nnx.unquantize expects an NNX module", model))
    if not any(get_settings(m) for m in get_modules(model).values()):
        raise ValueError("the model is not quantized")
    if any(isinstance(v, FrozenParam) for m in get_modules(model).values() for v in get_params(m).values()):
        raise ValueError("the model has adapters; use fp8jax.nnx.unquantize(fp8jax.nnx.merge_lora(model))")
    unquantized = nnx.clone(model)
    for module in get_modules(unquantized).values():
        _remove_state_modules(module)
        if get_settings(module):
            object.__setattr__(module, "__class__", _original_class(module))
    return unquantized


def suggest(
    loss_fn: Callable, rules: Rules, model: nnx.Module, *args: Any, statistics: Telemetry | None = None
) -> Suggestion:
    """`fp8jax.suggest` of a function of an NNX model, such as its loss.

        suggestion = fp8jax.nnx.suggest(loss_fn, "coat", model, batch)
        quantized = fp8jax.nnx.quantize(model, suggestion.rules)

    Args:
        loss_fn: a function of the model and further arguments.
        rules, statistics: as of `fp8jax.suggest`.
        model: the model before `fp8jax.nnx.quantize`; it is not changed.
        args: further arguments of `loss_fn`.

    Raises:
        ValueError: as `fp8jax.suggest`; or the model is quantized already.
    """
    if any(get_settings(m) for m in get_modules(model).values()):
        raise ValueError("the model is already quantized; pass fp8jax.nnx.unquantize(model) to suggest")
    parts: Any = nnx.split(model, nnx.Param, ...)
    graph, params, others = parts
    call = lambda params, others, *args: loss_fn(nnx.merge(graph, params, others), *args)  # noqa: E731
    return suggestion.suggest(call, rules, nnx.to_pure_dict(params), others, *args, statistics=statistics)


def _remove_state_modules(module: nnx.Module) -> None:
    """Remove a module's scaling states and codes, in place."""
    for name, value in list(vars(module).items()):
        if isinstance(value, ParameterStateModule):
            if value.jax_function is None:
                delattr(module, name)
            else:
                setattr(module, name, nnx.static(value.original))


def plan_call(model: Any, args: Any, kwargs: Any) -> CallPlan:
    """The plan of a call of a quantized model."""
    settings = get_settings(model)
    assert settings is not None
    return functional.plan_call(model, _original_method(_original_class(model), "__call__", settings), args, kwargs)
