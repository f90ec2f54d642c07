"""Tables of quantized NNX models by `flax.nnx.tabulate`: those of the models as written, with the recipe of each layer.

Flax makes a copy of the model, marks each module in it by an attribute, and replaces methods of the modules' classes by
ones that record calls. The products of a quantized model are computed by a transformed program, in which no module is
called. Modules of the copy therefore get classes of their own, with the methods as written.
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

# The attribute by which Flax marks the modules of a copy.
TABULATE_ID = "_nnx_tabulate_id"


def make_tabulate_property(original: Any, method: ModuleMethod | None, restore: Callable[[Any], None]) -> property:
    """The property by which Flax marks a module of a copy; setting it first gives the module a class of a table.

    Args:
        original: the class of the module as written.
        method: of the model itself, its call; None for its parts.
        restore: takes what a module holds for its products out of it.
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
    """The call as written, which adds the names of recipes to those of the classes of layers."""

    @functools.wraps(method.original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _frozen_as_arrays(self):
            y = method.original(self, *args, **kwargs)  # first, because calls are recorded once, in this order
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
    """Within it weights that are held otherwise are arrays."""
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
    """The name of the recipe of a product, or else its formats."""
    assert entry.choice is not None
    linear = entry.choice.linear
    assert linear is not None
    recipes: Sequence[Any] = [rule.recipe for rule in rules.rules if rule.linear == linear]
    return next((r.name for r in recipes if isinstance(r, Recipe)), f"{linear.x} x {linear.w}")
