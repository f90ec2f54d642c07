"""Quantizes the linear layers of Flax Linen models that were not written for it.

A Linen model makes its layers while it runs. So the copy that `quantize` returns is of a subclass of the model's class
whose methods run under `nn.intercept_methods`: a layer that a rule matches takes the recipe's product for the time of
its call. Fields, names and parameters stay as they are.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict

from fp8jax.core.recipe import Linear, Recipe
from fp8jax.modules import blocks_linen, custom, heads_linen, layers_linen, norms
from fp8jax.modules.blocks import BlockForms, Watched
from fp8jax.modules.dots import DotGeneral
from fp8jax.modules.layers_linen import LAYERS
from fp8jax.modules.matrices import Unknown, not_a_model
from fp8jax.modules.provenance import eager
from fp8jax.modules.reading import Reading
from fp8jax.modules.scaled import observed_operands
from fp8jax.recipes import linear_part
from fp8jax.rewrite.rules import Ordered, Rule, Rules, between, ordered

Model = TypeVar("Model", bound=nn.Module)
_APPLIED = "called through its own apply, with parameters of something else: a tied head, say"


def quantize(module: Model, rules: Rules, *, layers: Iterable[type] = ()) -> Model:
    """A copy of a model whose linear layers compute with a recipe.

    `init` and `apply` are called as before and parameters keep their names, shapes and values, so checkpoints fit both
    ways. The layers are `nn.Dense`, `nn.DenseGeneral` (also those inside `nn.MultiHeadDotProductAttention`) and
    `nn.Einsum`, at any depth, in setup or compact, under `nn.scan`, `nn.remat`, `nn.vmap` and `nn.jit`, and the copy
    may be part of a larger model. Their paths are those of the tree of parameters, joined by "/".

    A recipe with a `Context` also changes what `nn.RMSNorm` and `nn.LayerNorm` keep of their inputs, and what
    activations keep: wherever the input of a layer is computed from the outputs of other layers of its module as in
    SwiGLU and its kin, or in a plain perceptron. For this such modules are traced once more, aside, as if they
    stood at the root: what they compute must not depend on `self.path`. Elsewhere write `fp8jax.glu` or
    `fp8jax.activation`.

    A recipe with delayed scaling, or `int8_fallback`, adds collections of variables; `fp8jax.linen.advance_scaling`
    says how to train them, and an error which `variable_axes` your own `nn.scan` needs. No such layer may multiply
    along batch axes.

    A recipe, not a rule, leaves alone what is an embedding, head or router by its name, and by what reads it in each
    call: a layer whose result (up to casts, layouts, a bias, scaling, a soft cap) softmax, top_k or argmax reads, or
    the call returns and no later product is computed from. For this the model is traced once more, aside. Two
    exceptions keep parts of models whole: a result with the shape of a floating input, and a module that has no other
    layers. Left alone are also layers that are called through their own `apply`, with parameters of something else.

    Layers are known only while the model runs: a rule that matches neither a layer that ran, nor a kernel among the
    parameters that may belong to one, raises at the end of that `init` or `apply`. `fp8jax.explain(model, rules,
    *sample)` tells at once. Layers of a bound copy that are called from outside its methods, as in
    `copy.bind(variables).encoder(x)`, are not seen by the copy and compute as the model was written.

    Args:
        module: any Linen module that is not bound; it is not changed.
        rules: a `Recipe` or a preset's name, used for all layers but embeddings, output heads and routers; or a
            sequence of `fp8jax.Rule` on paths such as `"layers_0/attention/query"`, the first match wins, after which
            a recipe may stand for all other layers.
        layers: classes of your own that are layers, too: where `__call__` multiplies data by a parameter of the module,
            spelled with `@`, `jnp.dot`, `jnp.einsum` or `jax.lax.dot_general`, the recipe's product takes its place.
            Without them `init` and `apply` warn where modules that are not known hold matrices, and name these.

    Returns:
        The copy, an instance of a subclass of the model's class.

    Raises:
        TypeError: the model is no Linen module, or the rules are of another type.
        ValueError: the model is bound or quantized already, or a recipe quantizes nothing. From `init` or `apply`: a
            rule matches no layer, the model has none, or a layer has a product or a precision of its own, or batch axes
            under a scaling that observes operands; or another library has changed the model, or JAX's products.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(not_a_model("fp8jax.linen.quantize takes a Linen module", module))
    if module.scope is not None:
        raise ValueError("quantize the module before it is bound to variables")
    if hasattr(type(module), "_fp8jax_rules"):
        raise ValueError("the model is quantized already; give the rules to the model it was made from")
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    cls: Any = type(module)
    copy: Model = _subclass(cls, ordered(rules, layers))(parent=None, **fields)
    return copy


@functools.lru_cache(maxsize=256)
def make_dot_general_cls(recipe: Recipe | Linear | str) -> type[DotGeneral]:
    """The products of a recipe for one layer: `nn.Dense(64, dot_general_cls=make_dot_general_cls(recipe))`.

    Args:
        recipe: a `Recipe`, its part `Linear`, or a preset's name.

    Returns:
        A class whose instances are called as `jax.lax.dot_general`; the same class for the same recipe.
    """
    part = linear_part(recipe)

    @dataclasses.dataclass(frozen=True)
    class RecipeDotGeneral(DotGeneral):
        linear: Linear = part

    return RecipeDotGeneral


def trace(fn: Callable, layers: Any, *args: Any) -> tuple[dict[str, nn.Module], dict[str, BlockForms], Any]:
    """The modules that run in an abstract evaluation of `fn(*args)`, by path (of several in one scope one of `layers`),
    what is known of what stands between the layers of each, and its abstract, unboxed result."""
    submodules: dict[str, nn.Module] = {}
    forms: dict[str, BlockForms] = {}
    mark, aside = _Mark(object()), _Root(ordered(Rule(".*", None)), (), next(_asides))

    def record(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if module.scope is None or aside in _running.roots:
            return call(*args, **kwargs)
        path = "/".join(module.path)
        if not path and type(submodules.setdefault("", module)) is not type(module):
            path = module.name or ""  # called through its own apply
        if path not in submodules or isinstance(module, layers) > isinstance(submodules[path], layers):
            submodules[path] = module
        with layers_linen.attributes(module.scope, flags=module.scope.flags.copy({"fp8jax": mark})):
            y = call(*args, **kwargs)
        if context.method_name == "__call__" and path not in forms:
            # Now that it has run, it has parameters also where it is initialized.
            forms[path] = blocks_linen.recognise(module, args, kwargs, aside.running, {})
        return y

    with nn.intercept_methods(record):
        result = nn.meta.unbox(jax.eval_shape(fn, *args))
    return submodules, {path: of for path, of in forms.items() if any(of)}, result


@functools.lru_cache(maxsize=256)
def _subclass(cls: Any, rules: Ordered) -> Any:
    names = {name for base in cls.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    names -= {"setup", *(f.name for f in dataclasses.fields(cls)), *(n for n in names if n.startswith("__"))}
    methods = {name: inspect.getattr_static(cls, name) for name in sorted(names | {"__call__"})}
    body: dict[str, Any] = {
        name: _under_rules(method, rules)
        for name, method in methods.items()
        if inspect.isfunction(method) and not hasattr(method, "nowrap")
    }
    # The same names, because Flax names a submodule after its class.
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}

    def __post_init__(self: nn.Module) -> None:
        cls.__post_init__(self)
        if self.scope is not None:
            _mark(self.scope, rules, *self.path)

    body |= {"_fp8jax_rules": rules, "__post_init__": __post_init__}
    return type(cls)(cls.__name__, (cls,), body)


def _under_rules(method: Callable, rules: Ordered) -> Callable:
    @nn.nowrap
    @functools.wraps(method, updated=())
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _check_class(self, method.__name__)
        if self.scope is None or any((r.rules, r.path) == (rules, self.path) for r in _running.roots):
            return method(self, *args, **kwargs)
        root = _Root(rules, self.path, layer=isinstance(self, (*LAYERS, *rules.layers)))
        root.read(method, self, args, kwargs)
        with root.running(), nn.intercept_methods(root.intercept):
            y = method(self, *args, **kwargs)
        # Layers in a trace that nn.jit had in its cache are not met again, and a method may need only some of them.
        names = ("kernel", "scale") if rules.contexts else ("kernel",)
        layers = root.layers | (_owners(self, names) - root.others)
        root.unknown.forget(root.layers)
        rules.check_all_used(layers, root.heads, root.unknown.classes, root.unknown.message())
        if _running.told is None:
            root.warn(self)
        else:
            _running.told.append(root)
        return y

    return wrapper


def _check_class(module: nn.Module, method: str) -> None:
    """Raises ValueError where another library's class runs a quantized model's method outside of Flax's own handling.

    Flax handles the methods that a subclass defines; a copy of ours is left out, as ours is.
    """
    for cls in type(module).__mro__:
        if "_fp8jax_rules" in vars(cls):
            return
        if hasattr(vars(cls).get(method), "nowrap"):
            raise ValueError(
                f"another library has changed {method} of the quantized {cls.__name__}, and what it adds, such as a "
                "LoRA adapter, would be lost. Quantize the model alone, or leave it as it is written"
            )


def _owners(module: nn.Module, names: tuple[str, ...]) -> set[str]:
    """Paths of what a module has parameters of these names for."""
    params = flatten_dict(module.variables.get("params", {}))
    return {"/".join(map(str, path[:-1])) for path in params if path[-1] in names}


class _RunningModules(threading.local):
    """The quantized modules whose methods run, outermost first."""

    def __init__(self) -> None:
        self.roots: list[_Root] = []
        self.told: list[_Root] | None = None


_running = _RunningModules()


@contextlib.contextmanager
def listening() -> Iterator[list[Any]]:
    """Within it, a list of the quantized modules whose methods have run, with what became known of them."""
    before, _running.told = _running.told, []
    try:
        yield _running.told
    finally:
        _running.told = before


_asides = itertools.count(1)


class _Mark:
    """A flag of a module's scope, whose hash says under which rules it runs, and where it stands in the model.

    `nn.jit` looks traces up by a module's fields and the flags of its scope, not by its path: without this a plain
    model would run the trace of its quantized copy, and a layer that of another one which a rule treats differently, or
    of itself in a call that reads its result otherwise. What was traced aside has hashes of its own. Scopes that Flax
    makes inside its loops share a mark: it has another hash each time, the same ones in each call of the model.
    """

    def __init__(self, *key: Any) -> None:
        self.key, self.turns = key, itertools.count()

    def __hash__(self) -> int:
        roots = tuple((root.aside, *sorted(root.heads)) for root in _running.roots)
        return hash((self.key, roots, next(self.turns)))


def _mark(scope: Any, rules: Ordered, *path: str) -> None:
    """Marks a scope, and those that will be made in it, each with its own path."""
    push = type(scope).push

    def marked(*args: Any, **kwargs: Any) -> Any:
        child = push(scope, *args, **kwargs)
        _mark(child, rules, *path, child.name)
        return child

    scope.flags, scope.push = scope.flags.copy({"fp8jax": _Mark(rules, *path)}), marked


@dataclasses.dataclass(eq=False)
class _Root:
    """A quantized module while one of its methods runs, and the paths of the layers and other modules it has met.

    With a number of its own in `aside` it is none, and nothing is quantized while it runs.
    """

    rules: Ordered
    path: tuple[str, ...]
    aside: int = 0
    layer: bool = False
    heads: dict[str, str] = dataclasses.field(default_factory=dict)
    reading: Reading = dataclasses.field(default_factory=Reading)
    unknown: Unknown = dataclasses.field(default_factory=Unknown)
    layers: set[str] = dataclasses.field(default_factory=set)
    others: set[str] = dataclasses.field(default_factory=set)
    quantized: set[str] = dataclasses.field(default_factory=set)
    watched: dict[tuple[str, ...], Watched] = dataclasses.field(default_factory=dict)
    known: dict[Any, BlockForms] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        _running.roots.append(self)
        try:
            yield
        finally:
            _running.roots.pop()

    def read(self, method: Callable, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Finds output heads, what `explain` asks for, and activations between layers, in one run aside."""
        asked, between = self.rules.default or _running.told is not None, self.rules.between
        between = between and self.recognises(module)
        if self.layer or not (asked or between):
            return
        aside = _Root(self.rules, (), next(_asides))

        def chosen(inner: nn.Module, path: str) -> bool:
            return isinstance(inner, (*LAYERS, *self.rules.layers)) and self.rules.choice(path).linear is not None

        with aside.running():
            memory = self.known if between else None
            heads = heads_linen.find(method, module, args, kwargs, aside.path_of, chosen, memory)
        if asked:
            self.heads, self.reading = heads

    def recognises(self, module: nn.Module) -> bool:
        """Whether activations between layers make a difference in a call of a module."""
        return not module.is_initializing() and (self.rules.bounded or not eager())

    def path_of(self, module: nn.Module) -> str:
        """The path of a module in the model; of a layer that is called through `apply` its name, if it has one."""
        inside = module.path[: len(self.path)] == self.path
        path = "/".join(module.path[len(self.path) :] if inside else module.path)
        return path if path or self.layer else module.name or ""

    def warn(self, module: nn.Module) -> None:
        """Warns of matrices in modules that are not known."""
        params = flatten_dict(nn.meta.unbox(module.variables).get("params", {}))
        owned = {path: leaf for path, leaf in params.items() if "/".join(path[:-1]) in self.quantized and leaf.ndim > 1}
        self.unknown.warn(self.rules, sum(math.prod(leaf.shape) for leaf in owned.values()))

    def intercept(self, call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a module's method, with the product of the recipe where the module is a layer that a rule matches."""
        module: Any = context.module
        if module.scope is None or _running.roots[-1] is not self:
            return call(*args, **kwargs)
        known: Any = (*LAYERS, *self.rules.layers)
        path = self.path_of(module)
        if "push" not in vars(module.scope):  # inside a loop of Flax
            _mark(module.scope, self.rules, *module.path)
        if context.method_name == "__call__" and isinstance(module, norms.LINEN_LAYERS) and self.rules.between:
            (self.layers if self.rules.contexts else self.others).add(path)
            recipe = self.rules.choice(path).recipe
            if not between(recipe) or len(args) != 1 or kwargs or norms.why_not(module) is not None:
                return call(*args, **kwargs)
            return norms.linen_norm(module, recipe, *args)
        if context.method_name != "__call__" or not isinstance(module, known):
            self.others |= set() if isinstance(module, known) else {path}
            watch = context.method_name == "__call__" and self.rules.between
            y = self._watched(module, call, args, kwargs) if watch else call(*args, **kwargs)
            self.unknown.add(path, module, nn.meta.unbox(module.variables).get("params", {}))
            return y
        self.layers.add(path)
        if not module.path and not self.layer:
            self.heads.setdefault(path, _APPLIED)
        choice = self.rules.choice(path, self.heads)
        linear, watched = choice.linear, self.watched.get(module.path[:-1])
        if watched is not None:
            call = functools.partial(watched.call, str(module.name), call, choice.recipe)
        if linear is None:
            return call(*args, **kwargs)
        self.quantized.add(path)
        if not isinstance(module, LAYERS):
            if module.is_initializing():
                y = call(*args, **kwargs)
                if not observed_operands(linear):
                    return y
            with _Root(self.rules, (), next(_asides)).running():
                return custom.call_linen(module, linear, args, kwargs)
        return layers_linen.call(path, module, linear, call, context, args, kwargs)

    def _watched(self, module: nn.Module, call: Callable, args: Any, kwargs: Any) -> Any:
        """Calls a module whose activations between layers, if it has any, keep what the rules say."""
        if not self.recognises(module):
            return call(*args, **kwargs)
        aside = _Root(self.rules, (), next(_asides))
        forms = blocks_linen.recognise(module, args, kwargs, aside.running, self.known).forms
        if not forms:
            return call(*args, **kwargs)
        before, self.watched = self.watched, self.watched | {module.path: Watched(forms)}
        try:
            return call(*args, **kwargs)
        finally:
            self.watched = before
