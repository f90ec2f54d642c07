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
from fp8jax.modules.calls import Names
from fp8jax.modules.functional import ModuleMethod, stacked_axes
from fp8jax.modules.matrices import is_matrix, not_a_model
from fp8jax.modules.scaled import (
    Holder,
    LayerScaling,
    observed_operands,
    state_name,
)
from fp8jax.modules.tabulated_nnx import MARK, marked
from fp8jax.modules.untrained import UntrainedVariable, as_written
from fp8jax.rewrite import training
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import Ordered, Rules, ordered
from fp8jax.rewrite.states import ParameterState

Model = TypeVar("Model", bound=nnx.Module)
LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
# What holds matrices that no product of a recipe takes.
_OTHERS = (nnx.Embed, nnx.Conv, nnx.ConvTranspose)


@dataclasses.dataclass(frozen=True)
class QuantizedAs:
    """How the calls of a quantized module are transformed.

    Attributes:
        rules: on the paths of layers.
        prefix: the module's path in its model; "" where no rule of the user's asks for it.
        methods: the names of the methods that are transformed.
        whole: it is the model itself, and so something in it is to be quantized.
    """

    rules: Ordered
    prefix: str
    methods: tuple[str, ...]
    whole: bool


class QuantizedMeta(type(nnx.Module)):  # type: ignore[misc]
    """Classes of quantized modules, which pickle makes again from the class as written."""


def _reduce(cls: Any) -> Any:
    if "_fp8jax_settings" not in vars(cls):
        return cls.__qualname__
    return quantized_class, (cls._fp8jax_written, cls._fp8jax_settings)


copyreg.pickle(QuantizedMeta, _reduce)  # type: ignore[arg-type]


@functools.cache
def quantized_class(written: Any, settings: QuantizedAs) -> type:
    """The subclass of a module's class whose methods are transformed; in all else it is that class."""
    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(written, name) for name in names}
    body |= {"_fp8jax_written": written, "_fp8jax_settings": settings}
    body["_fp8jax_notices"] = Notices() if settings.whole else None
    body |= {name: _method(written, name, settings) for name in settings.methods if callable(getattr(written, name, 0))}
    method = _as_written(written, "__call__", settings) if settings.whole and "__call__" in body else None
    body[MARK] = marked(written, method, _remove_holders)
    meta: Any = _metaclass(type(written))  # type: ignore[arg-type]
    return meta(written.__name__, (written,), body, pytree=written._pytree__is_pytree)  # type: ignore[no-any-return]


@functools.cache
def _metaclass(meta: type) -> Any:
    if issubclass(QuantizedMeta, meta):
        return QuantizedMeta
    made = type(meta.__name__, (QuantizedMeta, meta), {})
    copyreg.pickle(made, _reduce)  # type: ignore[arg-type]
    return made


def _as_written(written: Any, name: str, settings: QuantizedAs) -> ModuleMethod:
    """A method of a class as it is written."""
    whole = settings.whole and name == "__call__"
    return ModuleMethod(getattr(written, name), name, settings.rules, settings.prefix, whole, _unwrap)


def _method(written: Any, name: str, settings: QuantizedAs) -> Callable:
    method = _as_written(written, name, settings)
    function = method.written

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        holders: dict[str, Holder] = {}

        def held(variables: Sequence[Any], weights: Mapping[str, Any]) -> dict[str, ParameterState]:
            holders.update(_holders(self, variables))
            return {path: holder.given(weights.get(path)) for path, holder in holders.items()}

        try:
            y, noted = functional.run(self, method, args, kwargs, held, type(self)._fp8jax_notices)
        except jax.errors.ConcretizationTypeError:
            # It looks at values: it runs as it is written, and the modules that it calls are transformed.
            if any(is_matrix(name, param.shape) for name, param in params(self).items()):
                raise
            return function(self, *args, **kwargs)
        for path, seen in noted.items():
            holders[path].note(seen)
        return y

    return call


def _holders(module: nnx.Module, variables: Sequence[Any]) -> dict[str, Holder]:
    """What holds the states and the codes of a module's parameters, by the paths of these."""
    if not any(isinstance(v, Holder.VARIABLES) for v in variables):
        return {}
    found = [(path, m) for path, m in nnx.iter_modules(module) if isinstance(m, Holder)]
    return {"/".join(m.weight_path(path)): m for path, m in found}


def _unwrap(module: nnx.Module) -> Callable[[], None]:
    """Gives all modules in one the classes as they are written, until what it returns is called."""
    variables_back = as_written(module)
    changed = [m for _, m in nnx.iter_modules(module) if "_fp8jax_settings" in vars(type(m))]
    classes = [type(m) for m in changed]
    for m, cls in zip(changed, classes, strict=True):
        object.__setattr__(m, "__class__", cls._fp8jax_written)  # type: ignore[attr-defined]

    def wrap() -> None:
        for m, cls in zip(changed, classes, strict=True):
            object.__setattr__(m, "__class__", cls)
        variables_back()

    return wrap


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
        raise TypeError(not_a_model("fp8jax.nnx.quantize takes an NNX module", model))
    each = ordered(rules)
    submodules = modules(model)
    _check_kernels(submodules)
    changed = [path for path, m in submodules.items() if isinstance(type(m), QuantizedMeta)]
    if changed:
        what = min(changed, key=len) or "the model"  # parts come before what they are parts of
        raise ValueError(f"{what} is quantized already; give the rules to the model it was made from")
    for name in methods:
        if not any(callable(getattr(m, name, None)) for m in submodules.values()):
            raise ValueError(f"no module of the model has the method {name!r} that methods= names")
    quantized = nnx.clone(model)
    submodules = modules(quantized)
    products, record = chosen(submodules, each), training.TrainingRecord()
    for holder, name, linear in products.values():
        # Automatic scaling, which observes nothing, has bounds of layers whose matrices are (inputs, outputs).
        if observed_operands(linear) or (linear.states and isinstance(submodules[holder], LAYERS[:2])):
            _hold(submodules, holder, name, linear, record)
    taken = {holder for holder, _, _ in products.values()} | set(_contexts(submodules, each))
    for path, module in submodules.items():
        inside = any(not path or holder == path or holder.startswith(f"{path}/") for holder in taken)
        if inside and any(callable(getattr(type(module), name, None)) for name in methods):
            # Without rules on paths layers that differ in these alone share their programs.
            prefix, cls = path if each.own else "", type(module)
            settings = QuantizedAs(each, prefix, tuple(methods), module is quantized)
            object.__setattr__(module, "__class__", quantized_class(cls, settings))  # type: ignore[arg-type]
    if (notices := getattr(type(quantized), "_fp8jax_notices", None)) is not None:
        notices.texts.clear()  # a class is that of all models that are alike
    return quantized


def _check_kernels(submodules: dict[str, Any]) -> None:
    """Raises ValueError where another library has put something else in the place of a layer's kernel."""
    for path, module in submodules.items():
        if isinstance(module, LAYERS) and not isinstance(module.kernel, nnx.Variable):
            raise ValueError(
                f"the kernel of {path or 'the model'} is a {type(module.kernel).__name__}, not an nnx.Variable: another"
                " library has changed the model. Quantize the model as it was written"
            )


def _contexts(submodules: dict[str, Any], rules: Ordered) -> Iterator[str]:
    """The paths of layers and norms of which rules say what is kept of what they read."""
    for path, module in submodules.items():
        if params(module) and rules.choice(path).context.saved is not None:
            yield path


def candidates(submodules: dict[str, Any], rules: Ordered) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The parameters whose products a recipe may take, by path: the module that holds each, and its name in it; and the
    paths of modules with a vector that scales."""
    matrices, norms = dict[str, tuple[str, str]](), list[str]()
    for holder, module in submodules.items():
        if isinstance(module, (*_OTHERS, Holder)):
            continue
        for name, param in params(module).items():
            path = "/".join(filter(None, (holder, name)))
            if not functional.is_parameter(param, path.split("/"), rules):
                continue
            if name == "scale":
                norms.append(holder)
            elif is_matrix(name.rpartition("/")[2], param.shape) and jnp.issubdtype(param.dtype, jnp.floating):
                matrices[path] = holder, name
    return matrices, norms


def names(matrices: Iterable[str], path: str) -> tuple[str, ...]:
    """The path of a parameter's layer, and others that rules may match; see `Names`."""
    return Names("", [(each, (2, 2)) for each in matrices])(path)


def chosen(submodules: dict[str, Any], rules: Ordered) -> dict[str, tuple[str, str, Linear]]:
    """The parameters whose products rules give a recipe: by path, the module that holds it, its name in it, the recipe.

    Raises:
        ValueError: a rule matches nothing, or there is no such parameter.
    """
    matrices, norms = candidates(submodules, rules)
    find = Names("", [(path, (2, 2)) for path in matrices])
    paths = {path: find(path) for path in matrices}
    rules.check_all_used(
        [*(first for first, *_ in paths.values()), *(norms if matrices else [])],
        also={first: also for first, *also in paths.values()},
    )
    choices = {path: rules.choice(first, also=also).linear for path, (first, *also) in paths.items()}
    return {p: (*matrices[p], linear) for p, linear in choices.items() if linear is not None}


def params(module: Any) -> dict[str, Any]:
    """The parameters that a module holds itself, in containers of Python or not, by their paths in it."""
    return dict(_params(vars(module), ""))


def _params(held: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in held.items() if isinstance(held, dict) else enumerate(held):
        if isinstance(value, (nnx.Param, UntrainedVariable)):
            yield f"{path}{name}", value
        elif isinstance(value, (dict, list, tuple)) and not str(name).startswith("_"):
            yield from _params(value, f"{path}{name}/")


def modules(model: nnx.Module) -> dict[str, Any]:
    """All modules of a model, by path; a module that stands in several places, by its first."""
    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


def beside(found: dict[str, Any], holder: str, name: str) -> tuple[Any, str]:
    """The module in which what belongs to a parameter stands, and its path in it: beside a container, not in it."""
    while isinstance(found[holder], (nnx.List, nnx.Dict, nnx.Sequential)) and holder:
        holder, _, last = holder.rpartition("/")
        name = f"{last}/{name}"
    return found[holder], name


def _hold(found: dict[str, Any], holder: str, name: str, linear: Linear, record: training.TrainingRecord) -> None:
    """Puts the state of a parameter's products beside it."""
    value = params(found[holder])[name].get_value()
    layer, name = beside(found, holder, name)
    cls = _written(layer).__name__
    if isinstance(layer, LAYERS) and name == "kernel":
        einsum = isinstance(layer, nnx.Einsum)
        place = "einsum_op" if einsum else "dot_general"
        how: Any = {"written": getattr(layer, place), "product": jnp.einsum if einsum else lax.dot_general}
        scaling = LayerScaling(linear, value, name, stacked_axes(layer), f"an nnx.{cls}", record=record, **how)
    else:
        place = state_name(name.replace("/", "_"))
        scaling = LayerScaling(linear, value, name, 0, f"a layer of class {cls}", record=record)
    setattr(layer, place, nnx.data(scaling))


def _written(module: Any) -> type:
    """The class of a module as it is written."""
    classes: Any = type(module).__mro__
    return next((c._fp8jax_written for c in classes if "_fp8jax_written" in vars(c)), type(module))


def settings_of(module: Any) -> QuantizedAs | None:
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
        raise TypeError(not_a_model("fp8jax.nnx.unquantize takes an NNX module", model))
    if not any(settings_of(m) for m in modules(model).values()):
        raise ValueError("the model is not quantized")
    if any(isinstance(v, UntrainedVariable) for m in modules(model).values() for v in params(m).values()):
        raise ValueError("the model has adapters: take fp8jax.nnx.unquantize(fp8jax.nnx.merge_lora(model))")
    plain = nnx.clone(model)
    for module in modules(plain).values():
        _remove_holders(module)
        if settings_of(module):
            object.__setattr__(module, "__class__", _written(module))
    return plain


def _remove_holders(module: nnx.Module) -> None:
    """Takes what a module holds for its products out of it, in place."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Holder):
            if value.product is None:
                delattr(module, name)
            else:
                setattr(module, name, nnx.static(value.written))


def plan_of(model: Any, args: Any, kwargs: Any) -> CallPlan:
    """The plan of a call of a quantized model."""
    settings = settings_of(model)
    assert settings is not None
    return functional.explain(model, _as_written(_written(model), "__call__", settings), args, kwargs)
