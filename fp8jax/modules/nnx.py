"""Quantizes Flax NNX models that were not written for it: their calls are transformed, with `fp8jax.rewrite`."""

import copyreg
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp8jax.core.recipe import Linear
from fp8jax.modules import functional
from fp8jax.modules.calls import LayerNames
from fp8jax.modules.functional import ModuleMethod, count_layer_axes
from fp8jax.modules.matrices import is_matrix, wrong_model_message
from fp8jax.modules.scaled import STATE_PREFIX, LayerScaling, ParameterStateModule
from fp8jax.modules.tabulated_nnx import TABULATE_ID, make_tabulate_property
from fp8jax.modules.untrained import FrozenParam, restore_param_classes
from fp8jax.rewrite import training
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import Rules, RuleSet, as_rule_set
from fp8jax.rewrite.states import ParameterState, observed_operands

Model = TypeVar("Model", bound=nnx.Module)
LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
# What holds matrices that no product of a recipe takes.
_UNQUANTIZED_LAYERS = (nnx.Embed, nnx.Conv, nnx.ConvTranspose)


@dataclasses.dataclass(frozen=True)
class QuantizedClassConfig:
    """How the calls of a quantized module are transformed.

    Attributes:
        rules: on the paths of layers.
        prefix: the module's path in its model; "" where no rule of the user's asks for it.
        methods: the names of the methods that are transformed.
        is_model: it is the model itself, and so something in it is to be quantized.
    """

    rules: RuleSet
    prefix: str
    methods: tuple[str, ...]
    is_model: bool


class QuantizedMeta(type(nnx.Module)):  # type: ignore[misc]
    """Classes of quantized modules, which pickle makes again from the class as written."""


def _reduce(cls: Any) -> Any:
    if "_fp8jax_settings" not in vars(cls):
        return cls.__qualname__
    return make_quantized_class, (cls._fp8jax_written, cls._fp8jax_settings)


copyreg.pickle(QuantizedMeta, _reduce)  # type: ignore[arg-type]


@functools.cache
def make_quantized_class(original: Any, settings: QuantizedClassConfig) -> type:
    """The subclass of a module's class whose methods are transformed; in all else it is that class."""
    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(original, name) for name in names}
    body |= {"_fp8jax_written": original, "_fp8jax_settings": settings}
    body["_fp8jax_notices"] = Notices() if settings.is_model else None
    body |= {
        name: _quantized_method(original, name, settings)
        for name in settings.methods
        if callable(getattr(original, name, 0))
    }
    method = _original_method(original, "__call__", settings) if settings.is_model and "__call__" in body else None
    body[TABULATE_ID] = make_tabulate_property(original, method, _remove_state_modules)
    meta: Any = _make_metaclass(type(original))  # type: ignore[arg-type]
    return meta(original.__name__, (original,), body, pytree=original._pytree__is_pytree)  # type: ignore[no-any-return]


@functools.cache
def _make_metaclass(meta: type) -> Any:
    if issubclass(QuantizedMeta, meta):
        return QuantizedMeta
    quantized_metaclass = type(meta.__name__, (QuantizedMeta, meta), {})
    copyreg.pickle(quantized_metaclass, _reduce)  # type: ignore[arg-type]
    return quantized_metaclass


def _original_method(original: Any, name: str, settings: QuantizedClassConfig) -> ModuleMethod:
    """A method of a class as it is written."""
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
            state_modules.update(_find_state_modules(self, variables))
            return {path: holder.read_state(weights.get(path)) for path, holder in state_modules.items()}

        try:
            y, stats_by_path = functional.run(self, method, args, kwargs, read_states, type(self)._fp8jax_notices)
        except jax.errors.ConcretizationTypeError:
            # It looks at values: it runs as it is written, and the modules that it calls are transformed.
            if any(is_matrix(name, param.shape) for name, param in get_params(self).items()):
                raise
            return function(self, *args, **kwargs)
        for path, stats in stats_by_path.items():
            state_modules[path].merge_stats(stats)
        return y

    return call


def _find_state_modules(module: nnx.Module, variables: Sequence[Any]) -> dict[str, ParameterStateModule]:
    """What holds the states and the codes of a module's parameters, by the paths of these."""
    if not any(isinstance(v, ParameterStateModule.VARIABLES) for v in variables):
        return {}
    modules_by_path = [(path, m) for path, m in nnx.iter_modules(module) if isinstance(m, ParameterStateModule)]
    return {"/".join(m.get_weight_path(path)): m for path, m in modules_by_path}


def _restore_original_classes(module: nnx.Module) -> Callable[[], None]:
    """Gives all modules in one the classes as they are written, until what it returns is called."""
    restore_variables = restore_param_classes(module)
    changed = [m for _, m in nnx.iter_modules(module) if "_fp8jax_settings" in vars(type(m))]
    classes = [type(m) for m in changed]
    for m, cls in zip(changed, classes, strict=True):
        object.__setattr__(m, "__class__", cls._fp8jax_written)  # type: ignore[attr-defined]

    def restore() -> None:
        for m, cls in zip(changed, classes, strict=True):
            object.__setattr__(m, "__class__", cls)
        restore_variables()

    return restore


def quantize(model: Model, rules: Rules, *, methods: Sequence[str] = ("__call__",)) -> Model:
    """A copy of a model whose products with parameters are computed with a recipe.

    Parameters keep their names, shapes and values, so checkpoints fit both ways. A call of the copy is traced, read and
    run again with operations of the recipe, as `fp8jax.transform` does it with a function: products of data with a
    parameter in any spelling, of Flax's layers and of classes of a model's own, in `nnx.jit`, `nnx.scan`, `nnx.remat`
    and loops, in stacks of `nnx.vmap`; where the recipe says what is kept of them, norms and activations of any
    spelling before such products; and what reads flash attention's output keeps no copy of it. All else is run as it
    is written, and what a call does to variables, modules and random keys is done. Build the `nnx.Optimizer` from the
    copy. It is an instance of the model's class, and can be pickled; `unquantize` is the way back.

    Every module in it is transformed by itself, too: where a part is called from outside, as `model.layers[0](x)`, its
    products are those of the recipe. A method that `methods` does not name runs as it is written, and the modules that
    it calls are transformed; so does a call that looks at values of arrays, which cannot be traced.

    Outside of a compiled function a call is compiled, once for each structure of its arguments, as `nnx.jit` does it:
    Python numbers among them are settings. A recipe with delayed scaling, or `int8_fallback`, adds variables to its
    layers, which `fp8jax.nnx.value_and_grad` and `Optimizer` train. They stand in `dot_general` or `einsum_op` of the
    layer; of classes of a model's own for each parameter NAME of two axes or more in `fp8jax_NAME`, and these must not
    be stacked by `nnx.vmap` then. No product may have batch axes under such a recipe.

    A recipe, not a rule, leaves embeddings, output heads and routers alone: by their usual names, and by what becomes
    of their results in the call: the model returns a head's, and softmax, top_k or argmax reads a router's.

    Args:
        model: any NNX module; it is not changed.
        rules: a `Recipe` or a preset's name, used for all layers but embeddings, output heads and routers; or a
            sequence of `fp8jax.Rule` on paths such as `"layers/attention/q"`, the first match wins, after which a
            recipe may stand for all other layers. Of a module with several matrices a rule may also name one of them,
            as `"mlp/w1"`. A recipe that quantizes no product, such as "bf16", leaves the model as written.
        methods: the methods that are transformed as a whole, of the model and of the modules in it that have them.

    Returns:
        The copy. `fp8jax.explain(copy, *sample)` says what becomes of each part of a call.

    Raises:
        TypeError: the model is no NNX module, or the rules are of another type.
        ValueError: a rule matches no layer; the model has none, or is quantized already; `methods` names what is not
            there. From a call: there is no product that a recipe could take, one asks for a precision that
            a quantized product cannot give, or has batch axes under a scaling that observes operands.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(wrong_model_message("fp8jax.nnx.quantize takes an NNX module", model))
    ordered_rules = as_rule_set(rules)
    submodules = get_modules(model)
    _check_kernel_variables(submodules)
    quantized_paths = [path for path, m in submodules.items() if isinstance(type(m), QuantizedMeta)]
    if quantized_paths:
        what = min(quantized_paths, key=len) or "the model"  # parts come before what they are parts of
        raise ValueError(f"{what} is quantized already; give the rules to the model it was made from")
    for name in methods:
        if not any(callable(getattr(m, name, None)) for m in submodules.values()):
            raise ValueError(f"no module of the model has the method {name!r} that methods= names")
    quantized = nnx.clone(model)
    submodules = get_modules(quantized)
    products, record = select_params(submodules, ordered_rules), training.TrainingRecord()
    for module_path, name, linear in products.values():
        # Automatic scaling, which observes nothing, has bounds of layers whose matrices are (inputs, outputs).
        if observed_operands(linear) or (linear.states and isinstance(submodules[module_path], LAYERS[:2])):
            _add_scaling(submodules, module_path, name, linear, record)
    selected_modules = {holder for holder, _, _ in products.values()} | set(
        _find_context_paths(submodules, ordered_rules)
    )
    for path, module in submodules.items():
        has_selected = any(not path or holder == path or holder.startswith(f"{path}/") for holder in selected_modules)
        if has_selected and any(callable(getattr(type(module), name, None)) for name in methods):
            # Without rules on paths layers that differ in these alone share their programs.
            prefix, cls = path if ordered_rules.user_rules else "", type(module)
            settings = QuantizedClassConfig(ordered_rules, prefix, tuple(methods), module is quantized)
            object.__setattr__(module, "__class__", make_quantized_class(cls, settings))  # type: ignore[arg-type]
    if (notices := getattr(type(quantized), "_fp8jax_notices", None)) is not None:
        notices.texts.clear()  # a class is that of all models that are alike
    return quantized


def _check_kernel_variables(submodules: dict[str, Any]) -> None:
    """Raises ValueError where another library has put something else in the place of a layer's kernel."""
    for path, module in submodules.items():
        if isinstance(module, LAYERS) and not isinstance(module.kernel, nnx.Variable):
            raise ValueError(
                f"the kernel of {path or 'the model'} is a {type(module.kernel).__name__}, not an nnx.Variable: another"
                " library has changed the model. Quantize the model as it was written"
            )


def _find_context_paths(submodules: dict[str, Any], rules: RuleSet) -> Iterator[str]:
    """The paths of layers and norms of which rules say what is kept of what they read."""
    for path, module in submodules.items():
        if get_params(module) and rules.choose(path).context.residual is not None:
            yield path


def find_candidates(submodules: dict[str, Any], rules: RuleSet) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The parameters whose products a recipe may take, by path: the module that holds each, and its name in it; and the
    paths of modules with a vector that scales."""
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
    """The path of a parameter's layer, and others that rules may match; see `LayerNames`."""
    return LayerNames("", [(matrix_path, (2, 2)) for matrix_path in matrices])(path)


def select_params(submodules: dict[str, Any], rules: RuleSet) -> dict[str, tuple[str, str, Linear]]:
    """The parameters whose products rules give a recipe: by path, the module that holds it, its name in it, the recipe.

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
    choices = {path: rules.choose(first, aliases=also).linear for path, (first, *also) in paths.items()}
    return {p: (*matrices[p], linear) for p, linear in choices.items() if linear is not None}


def get_params(module: Any) -> dict[str, Any]:
    """The parameters that a module holds itself, in containers of Python or not, by their paths in it."""
    return dict(_iter_params(vars(module), ""))


def _iter_params(attributes: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items() if isinstance(attributes, dict) else enumerate(attributes):
        if isinstance(value, (nnx.Param, FrozenParam)):
            yield f"{path}{name}", value
        elif isinstance(value, (dict, list, tuple)) and not str(name).startswith("_"):
            yield from _iter_params(value, f"{path}{name}/")


def get_modules(model: nnx.Module) -> dict[str, Any]:
    """All modules of a model, by path; a module that stands in several places, by its first."""
    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


def get_owner(modules_by_path: dict[str, Any], module_path: str, name: str) -> tuple[Any, str]:
    """The module in which what belongs to a parameter stands, and its path in it: beside a container, not in it."""
    while isinstance(modules_by_path[module_path], (nnx.List, nnx.Dict, nnx.Sequential)) and module_path:
        module_path, _, last = module_path.rpartition("/")
        name = f"{last}/{name}"
    return modules_by_path[module_path], name


def _add_scaling(
    modules_by_path: dict[str, Any], module_path: str, name: str, linear: Linear, record: training.TrainingRecord
) -> None:
    """Puts the state of a parameter's products beside it."""
    value = get_params(modules_by_path[module_path])[name].get_value()
    layer, name = get_owner(modules_by_path, module_path, name)
    cls = _original_class(layer).__name__
    if isinstance(layer, LAYERS) and name == "kernel":
        einsum = isinstance(layer, nnx.Einsum)
        place = "einsum_op" if einsum else "dot_general"
        jax_function = jnp.einsum if einsum else lax.dot_general
        scaling = LayerScaling(
            linear, value, name, count_layer_axes(layer), f"an nnx.{cls}", getattr(layer, place), jax_function, record
        )
    else:
        place = f"{STATE_PREFIX}{name.replace('/', '_')}"
        scaling = LayerScaling(linear, value, name, 0, f"a layer of class {cls}", record=record)
    setattr(layer, place, nnx.data(scaling))


def _original_class(module: Any) -> type:
    """The class of a module as it is written."""
    classes: Any = type(module).__mro__
    return next((c._fp8jax_written for c in classes if "_fp8jax_written" in vars(c)), type(module))


def get_settings(module: Any) -> QuantizedClassConfig | None:
    """How the calls of a module are transformed; None where they are not."""
    return getattr(type(module), "_fp8jax_settings", None)


def unquantize(model: Model) -> Model:
    """The model as it was written, with the parameters of a quantized one.

    Args:
        model: what `quantize` returned; it is not changed.

    Raises:
        TypeError: the model is no NNX module.
        ValueError: it is not quantized.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(wrong_model_message("fp8jax.nnx.unquantize takes an NNX module", model))
    if not any(get_settings(m) for m in get_modules(model).values()):
        raise ValueError("the model is not quantized")
    if any(isinstance(v, FrozenParam) for m in get_modules(model).values() for v in get_params(m).values()):
        raise ValueError("the model has adapters: take fp8jax.nnx.unquantize(fp8jax.nnx.merge_lora(model))")
    unquantized = nnx.clone(model)
    for module in get_modules(unquantized).values():
        _remove_state_modules(module)
        if get_settings(module):
            object.__setattr__(module, "__class__", _original_class(module))
    return unquantized


def _remove_state_modules(module: nnx.Module) -> None:
    """Takes what a module holds for its products out of it, in place."""
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
