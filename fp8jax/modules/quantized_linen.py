"""`fp8jax.linen.quantize`: a Linen model whose methods run as transformed programs (`fp8jax.modules.methods_linen`)."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import flax.linen as nn

from fp8jax.modules.matrices import not_a_model
from fp8jax.modules.methods_linen import Root, initialized, transformed
from fp8jax.rewrite.rules import Ordered, Rules, ordered

Model = TypeVar("Model", bound=nn.Module)


def quantize(module: Model, rules: Rules, *, layers: Iterable[type] = ()) -> Model:
    """A copy of a model whose products with parameters compute with a recipe."""
    if not isinstance(module, nn.Module):
        raise TypeError(not_a_model("fp8jax.linen.quantize takes a Linen module", module))
    if module.scope is not None:
        raise ValueError("quantize the module before it is bound to variables")
    if hasattr(type(module), "_fp8jax_rules"):
        raise ValueError("the model is quantized already; give the rules to the model it was made from")
    return _again(module, ordered(rules, layers))  # type: ignore[no-any-return]


def unquantize(module: Model) -> Model:
    """The model that `quantize` was given."""
    plain = getattr(type(module), "_fp8jax_plain", None)
    if plain is None:
        raise ValueError(f"{type(module).__name__} is not quantized")
    return _as(plain, module)  # type: ignore[no-any-return]


def _as(cls: Any, module: Any) -> Any:
    """An instance of another class with the fields of a module."""
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    return cls(parent=None, **fields)


def _again(module: Any, rules: Ordered) -> Any:
    cls: Any = type(module)
    return _as(_subclass(cls, rules), module)


@functools.lru_cache(maxsize=256)
def _subclass(cls: Any, rules: Ordered) -> Any:
    names = {name for base in cls.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    names -= {"setup", *(f.name for f in dataclasses.fields(cls)), *(n for n in names if n.startswith("__"))}
    methods = {name: inspect.getattr_static(cls, name) for name in sorted(names | {"__call__"})}
    body: dict[str, Any] = {
        name: _method(method, rules)
        for name, method in methods.items()
        if inspect.isfunction(method) and not hasattr(method, "nowrap")
    }

    def __reduce__(self: Any) -> Any:
        if self.scope is not None:
            raise TypeError("a module that is bound to variables is not pickled: pickle the model and the variables")
        return _again, (_as(cls, self), rules)

    # The same names, because Flax names a submodule after its class.
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    body |= {"_fp8jax_rules": rules, "_fp8jax_plain": cls, "__reduce__": __reduce__}
    return type(cls)(cls.__name__, (cls,), body)


def _method(method: Callable, rules: Ordered) -> Callable:
    """A method that is transformed where it is called from outside of the model."""

    @nn.nowrap
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = self.scope
        if scope is None or self._state.in_setup:
            return method(self, *args, **kwargs)
        root = Root(rules, tuple(scope.path))
        if root.around(scope):
            return method(self, *args, **kwargs)
        if not self.is_initializing():
            return transformed(method, root)(self, *args, **kwargs)
        flags, scope.flags = scope.flags, root.flags(scope)
        try:
            y = method(self, *args, **kwargs)
        finally:
            self.scope.flags = flags
        counts = dict(self.scope.rng_counters)
        initialized(method, root)(self, *args, **kwargs)
        self.scope.rng_counters.update(counts)
        return y

    return wrapper
