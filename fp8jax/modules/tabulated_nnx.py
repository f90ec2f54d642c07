"""`flax.nnx.tabulate` for quantized models: the table of the original model, with each layer's recipe.

Flax marks the modules of a copy by an attribute, and patches their classes' methods to record calls. A transformed
program calls no modules, so the modules of the copy get classes with the original methods.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from fp8jax.core.recipe import Recipe
from fp8jax.modules import functional
from fp8jax.modules.functional import ModuleMethod
from fp8jax.modules.untrained import FrozenParam
from fp8jax.rewrite import training
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.frozen_params import as_array
from fp8jax.rewrite.rules import RuleSet

# The attribute with which Flax marks the modules of a copy.
TABULATE_ID = "_nnx_tabulate_id"


def make_tabulate_property(original: Any, method: ModuleMethod | None, restore: Callable[[Any], None]) -> property:
    """The attribute with which Flax marks a module; setting it first changes the module's class to one for tables.

    Args:
        original: the module's original class.
        method: the model's call; None for its submodules.
        restore: removes a module's scaling states and codes.
    """

    def set_id(module: Any, value: int) -> None:
        restore(module)
        body: dict[str, Any] = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        body["_fp8jax_written"] = original
        if method is not None:
            body["__call__"] = _with_recipe_names(method)
        meta: Any = type(original)
        cls = meta(original.__name__, (original,), body, pytree=original._pytree__is_pytree)
        object.__setattr__(module, "__class__", cls)
        setattr(module, TABULATE_ID, value)

    return property(fset=set_id)


def _with_recipe_names(method: ModuleMethod) -> Callable:
    """The original call; it adds the names of recipes to those of the layers' classes."""

    @functools.wraps(method.original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _frozen_as_arrays(self):
            y = method.original(self, *args, **kwargs)  # first: calls are recorded once, in this order
        with training.suppress_training_checks():
            entries = functional.plan_call(self, method, args, kwargs).entries
        modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(self)}
        names: dict[str, list[str]] = {}
        for entry in entries:
            if entry.is_product and entry.is_quantized:
                names.setdefault(_find_owner(modules, entry.path), []).append(_get_recipe_name(method.rules, entry))
        for path, recipe_names in names.items():
            cls: Any = type(modules[path])
            if "_fp8jax_written" in vars(cls):
                cls.__name__ = f"{cls._fp8jax_written.__name__} ({', '.join(dict.fromkeys(recipe_names))})"
        return y

    return call


@contextlib.contextmanager
def _frozen_as_arrays(module: nnx.Module) -> Iterator[None]:
    """A context in which frozen weights are arrays."""
    variables = {id(v): v for _, v in nnx.iter_graph(module) if isinstance(v, FrozenParam)}.values()
    previous_values = [(v, v.get_raw_value()) for v in variables]
    for variable, value in previous_values:
        variable.set_raw_value(as_array(value))
    yield
    for variable, value in previous_values:
        variable.set_raw_value(value)


def _find_owner(modules: Mapping[str, Any], path: str) -> str:
    """The path of the module that is a layer, or that holds the parameter at a path."""
    while path not in modules:
        path = path.rpartition("/")[0]
    return path


def _get_recipe_name(rules: RuleSet, entry: PlanEntry) -> str:
    """The name of a matmul's recipe, or else its formats."""
    assert entry.choice is not None
    linear = entry.choice.linear
    assert linear is not None
    recipes: Sequence[Any] = [rule.recipe for rule in rules.rules if rule.linear == linear]
    return next((r.name for r in recipes if isinstance(r, Recipe)), f"{linear.x} x {linear.w}")
