"""`fp8jax.linen.quantize`: a Linen model whose methods are transformed (`fp8jax.modules.methods_linen`)."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax

from fp8jax.core import products
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.modules.calls import wrong_model_message
from fp8jax.modules.methods_linen import Path, QuantizedRoot, init_method, plan_method, transform_method
from fp8jax.ops.products.linear import dot_general, key_from_data
from fp8jax.recipes import linear_part
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import Rules, RuleSet, as_rule_set

Model = TypeVar("Model", bound=nn.Module)
_FLAX_ATTRIBUTES = ("scope", "parent", "name", "_state", "_id", "variables", "path")


class LinenClassConfig(NamedTuple):
    """How the methods of a quantized module's class are transformed.

    Attributes:
        bound_path: for a submodule of a bound model, the path of the model's module; else None.
        field_path: for a submodule of an unbound model, its path in that model.
    """

    rules: RuleSet
    bound_path: Path | None = None
    field_path: Path = ()

    def make_root(self, scope: Any) -> QuantizedRoot:
        path = tuple(scope.path) if self.bound_path is None else self.bound_path
        return QuantizedRoot(self.rules, path, self.field_path, self.bound_path is not None or bool(self.field_path))


def quantize(module: Model, rules: Rules) -> Model:
    """Returns a copy of a model that computes its matmuls with parameters by a recipe.

    `init` and `apply` are called as before. Parameters keep their names, shapes and values: checkpoints load both ways.
    Each method called from outside is lifted to a function of variables, random keys and arguments, and transformed by
    `fp8jax.transform`. This covers layers of Flax and your own, in setup or compact, under `nn.scan`, `nn.remat`,
    `nn.vmap` and `nn.jit`. With a `Context`, norms and activations are replaced too.

    Rules match paths in the tree of parameters, joined by "/", without the last step. If a module has several matrices,
    the last step may be added. The copy can be pickled, and can be a part of a larger model. The same rules apply to
    its submodules: `copy.bind(variables).encoder(x)`, or `copy.encoder.apply(...)` for those in fields.

    A call outside of a compiled function is jitted, once per structure of its arguments, like under `nn.jit`. Methods
    cannot branch on values of arrays. Other arguments are static. A method may return anything but modules.

    Delayed scaling and `int8_fallback` add collections of variables; see `fp8jax.linen.advance_scaling`. A matmul with
    a batch axis of experts and a grouped product have a state for each expert. If an unquantized model scans over a
    quantized module, an error names the `variable_axes` that `nn.scan` needs.

    A recipe, unlike a rule, does not quantize embeddings, heads and routers. They are found by name, or by a result
    that is returned or goes into softmax, top_k, argmax or sort. All layers of a router stay whose results only the
    scores depend on, as in an MLP. A result with the shape of a floating-point argument is not a head. If only heads
    would be left, no matmul is a head.

    `fp8jax.explain(model, rules, *sample)` lists every matmul. A call raises if its rules match nothing.

    Args:
        module: any unbound Linen module; it is not changed.
        rules: a `Recipe` or a preset's name, for all matmuls but those of embeddings, output heads and routers. Or a
            sequence of `fp8jax.Rule` on paths such as `"layers_0/attention/query"`, with an optional recipe at the end;
            the first match is used. A recipe that quantizes no matmul, such as "bf16", changes nothing.

    Returns:
        The copy, an instance of a subclass of the model's class.

    Raises:
        TypeError: the model is not a Linen module, or the rules have another type.
        ValueError: the model is bound or quantized already. From `init` or `apply`: a rule matches nothing or there is
            no matmul of data with a parameter. Or a matmul asks for a precision that no quantized matmul has.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(wrong_model_message("fp8jax.linen.quantize expects a Linen module", module))
    if module.scope is not None:
        raise ValueError("the module is bound to variables; quantize it before it is bound")
    if hasattr(type(module), "_fp8jax_settings"):
        raise ValueError("the model is already quantized; pass the rules with the original model")
    copy = _quantized_copy(module, LinenClassConfig(as_rule_set(rules)))
    type(copy)._fp8jax_notices.texts.clear()  # equal models share a class
    return copy


def unquantize(module: Model) -> Model:
    """The model that `quantize` was called with; parameters and other variables fit.

    Its variables have no scaling collections: `{k: v for k, v in variables.items() if not k.startswith("fp8jax_")}`.

    Raises:
        TypeError: the model is not a Linen module.
        ValueError: it is not quantized.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(wrong_model_message("fp8jax.linen.unquantize expects a Linen module", module))
    original_class = getattr(type(module), "_fp8jax_plain", None)
    if original_class is None:
        raise ValueError(f"{type(module).__name__} is not quantized")
    return _copy_as(original_class, module)


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`fp8jax.dot_general` with a recipe; its keys for stochastic rounding are derived from the data.

    Raises:
        ValueError: another library has patched JAX's matmuls.
    """

    linear: Linear

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        if name := products.find_patched_matmul():
            raise ValueError(
                f"a quantized layer is called while another library replaces {name}. Its addition to the layer's "
                "product, such as a LoRA adapter, would be lost. Merge adapters into the weights before you quantize "
                "the model, use adapters that are modules, such as nnx.LoRA, or do not quantize the model"
            )
        key = key_from_data(lhs) if self.linear.is_stochastic else None
        return dot_general(lhs, rhs, *args, recipe=self.linear, key=key, **kwargs)


@functools.lru_cache(maxsize=256)
def make_dot_general_cls(recipe: Recipe | Linear | str) -> type[DotGeneral]:
    """A recipe's matmul for one layer: `nn.Dense(64, dot_general_cls=make_dot_general_cls(recipe))`.

    Args:
        recipe: a `Recipe`, its part `Linear`, or a preset's name.

    Returns:
        Returns a class with instances that are called like `jax.lax.dot_general`; the same class for the same recipe.
    """
    linear_recipe = linear_part(recipe)

    @dataclasses.dataclass(frozen=True)
    class RecipeDotGeneral(DotGeneral):
        linear: Linear = linear_recipe

    return RecipeDotGeneral


def plan_call(module: nn.Module, variables: Any, args: Any, kwargs: Any) -> CallPlan:
    """The plan of a call of a quantized model; nothing is computed."""
    cls: Any = type(module)
    plans = list[CallPlan]()

    def call(module: Any, *args: Any, **kwargs: Any) -> None:
        plan_method(cls._fp8jax_plain.__call__, _get_root(module), plans.append)(module, *args, **kwargs)

    mutable = [name for name in variables if name != "params"]
    rngs = {"params": jax.random.key(0)}
    nn.Module.apply(module, variables, *args, rngs=rngs, method=call, mutable=mutable, **kwargs)
    (plan,) = plans
    return plan


def collect_modules(fn: Callable, *args: Any) -> dict[str, nn.Module]:
    """The modules that run in an abstract evaluation of `fn(*args)`, by path."""
    found: dict[str, nn.Module] = {}

    def record(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        if context.module.scope is not None:
            found.setdefault("/".join(context.module.path), context.module)
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(fn, *args)
    return found


def _copy_as(cls: Any, module: Any) -> Any:
    """An instance of another class with a module's fields."""
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    return cls(parent=None, **fields)


def _quantized_copy(module: Any, settings: LinenClassConfig) -> Any:
    cls: Any = type(module)
    return _copy_as(_quantized_subclass(cls, settings), module)


@functools.lru_cache(maxsize=256)
def _quantized_subclass(cls: Any, settings: LinenClassConfig) -> Any:
    """A subclass of `cls` whose methods run with the rules of `settings`."""
    names = {name for base in cls.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    names -= {"setup", *(f.name for f in dataclasses.fields(cls)), *(n for n in names if n.startswith("__"))}
    methods = {name: inspect.getattr_static(cls, name) for name in sorted(names | {"__call__"})}
    body: dict[str, Any] = {
        name: _transformed_method(method, settings)
        for name, method in methods.items()
        if inspect.isfunction(method) and not hasattr(method, "nowrap")
    }

    def __reduce__(self: Any) -> Any:
        if self.scope is not None:
            raise TypeError(
                "a module that is bound to variables cannot be pickled; pickle the unbound model and the variables"
            )
        return _quantized_copy, (_copy_as(cls, self), settings)

    def __getattribute__(self: Any, name: str) -> Any:
        return _wrap_submodules(self, name, cls.__getattribute__(self, name))

    def __getattr__(self: Any, name: str) -> Any:  # Flax's, which runs `setup` first
        return _wrap_submodules(self, name, cls.__getattr__(self, name))

    # Flax names a submodule after its class, so the class keeps its names.
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    body |= {"_fp8jax_settings": settings, "_fp8jax_plain": cls, "_fp8jax_notices": Notices()}
    body |= {"__reduce__": __reduce__}
    body |= {"__getattribute__": nn.nowrap(__getattribute__), "__getattr__": nn.nowrap(__getattr__)}
    return type(cls)(cls.__name__, (cls,), body)


def _get_root(module: Any) -> QuantizedRoot:
    return type(module)._fp8jax_settings.make_root(module.scope)


def _wrap_submodules(module: Any, name: str, value: Any) -> Any:
    """An attribute of a quantized module; submodules get its rules unless Flax or the model reads the attribute."""
    if name.startswith("__") or name in _FLAX_ATTRIBUTES or not isinstance(value, (nn.Module, list, tuple, Mapping)):
        return value
    if module.scope is not None and (module._state.in_setup or _get_root(module).contains(module.scope)):
        return value
    if sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] in ("flax", "fp8jax", "dataclasses"):
        return value
    wrap_submodule = functools.partial(_quantized_submodule, module, name)
    return jax.tree_util.tree_map_with_path(wrap_submodule, value, is_leaf=lambda x: isinstance(x, nn.Module))


def _quantized_submodule(module: Any, name: str, path: Any, value: Any) -> Any:
    """A submodule in an attribute of a quantized module, or in a container there, with that module's rules."""
    if not isinstance(value, nn.Module) or hasattr(type(value), "_fp8jax_settings"):
        return value
    settings: LinenClassConfig = type(module)._fp8jax_settings
    if module.scope is None and value.scope is None:
        # The name that Flax will use.
        field_name = "_".join((name, *(jax.tree_util.keystr((step,), simple=True) for step in path)))
        settings = settings._replace(field_path=(*settings.field_path, field_name))
    elif module.scope is None or value.scope is None:
        return value
    else:
        root = _get_root(module)
        settings = settings._replace(bound_path=root.path)
    submodule_class: Any = type(value)
    submodule = object.__new__(_quantized_subclass(submodule_class, settings))
    vars(submodule).update(vars(value))
    return submodule


def _transformed_method(method: Callable, settings: LinenClassConfig) -> Callable:
    """A method that is transformed when called from outside of the model."""

    @nn.nowrap
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = self.scope
        if scope is None or self._state.in_setup:
            return method(self, *args, **kwargs)
        root = settings.make_root(scope)
        if root.contains(scope):
            return method(self, *args, **kwargs)
        if not self.is_initializing():
            return transform_method(method, root, type(self)._fp8jax_notices)(self, *args, **kwargs)
        flags, scope.flags = scope.flags, root.with_flag(scope)
        try:
            y = method(self, *args, **kwargs)
        finally:
            self.scope.flags = flags
        counts = dict(self.scope.rng_counters)
        init_method(method, root)(self, *args, **kwargs)
        self.scope.rng_counters.update(counts)
        return y

    return wrapper
