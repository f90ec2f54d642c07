"""Recognises activations between the layers of Flax NNX models, while these run, and lets them keep codes.

The modules that hold linear layers, and these layers, become instances of subclasses that differ in `__call__` alone:
a module tells its layers for the time of a call where their calls go. Nothing is added to what they hold, so that
states, checkpoints and graph definitions stay what they were.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array
from jax.extend.core import get_opaque_trace_state

from fp8jax.core.recipe import Recipe
from fp8jax.modules import attention, blocks
from fp8jax.modules.attention import layers
from fp8jax.modules.blocks import BlockForms, Form, Watched
from fp8jax.modules.provenance import eager, program_of
from fp8jax.modules.recording import ASIDE, Recording


class Told(NamedTuple):
    """What calls have told, by the paths of modules.

    Attributes:
        blocks: what stands between their layers.
        residuals: their layers that read what attention keeps anyway.
    """

    blocks: dict[str, BlockForms]
    residuals: dict[str, set[str]]


class _RunningCalls(threading.local):
    """What runs in a thread: where calls of layers go, by their identity; what is told; what is known, for the time
    of the outermost call of a module; and what was known last in a traced program."""

    def __init__(self) -> None:
        self.calls: dict[int, Callable] = {}
        self.told: Told = Told({}, {})
        self.known: dict[Any, BlockForms] | None = None
        self.recording: Recording | None = None
        self.last: tuple[Any, dict[Any, BlockForms]] = None, {}


_running = _RunningCalls()


def candidate(module: Any) -> bool:
    """Whether there may be activations between layers of a module: it can be called, and holds several itself."""
    return isinstance(module, nnx.Module) and callable(module) and len(layers(module)) > 1


def replace(module: Any, recipes: dict[str, Recipe]) -> None:
    """Makes a module keep codes where an activation stands between its layers, in place.

    Args:
        module: one that `candidate` knows.
        recipes: for each of its layers; they say what is kept of an activation that it reads.
    """
    for name, layer in layers(module).items():
        _become(layer, functools.partial(_layer_class, recipe=recipes[name]))
    keeps = any(recipe.context.saved is not None for recipe in recipes.values())
    bounded = any(recipe.context.scales == "bound" for recipe in recipes.values())
    _become(module, functools.partial(_module_class, keeps=keeps, bounded=bounded))


def _become(module: Any, subclass: Callable[[type], type]) -> None:
    """Gives a module the subclass of its class as written."""
    cls = type(module)
    object.__setattr__(module, "__class__", subclass(getattr(cls, "_fp8jax_written", cls)))


def with_call(cls: Any, call: Callable) -> type:
    """A subclass that is called differently and is the same in all else, its name included."""
    names = ("__module__", "__qualname__", "__doc__")
    body = {"__call__": call, "_fp8jax_written": cls} | {name: getattr(cls, name) for name in names}
    return type(cls)(cls.__name__, (cls,), body, pytree=cls._pytree__is_pytree)


@functools.cache
def _layer_class(cls: Any, recipe: Recipe) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Array:
        call = functools.partial(cls.__call__, self)
        watch = _running.calls.get(id(self))
        y: Array = watch(call, recipe, *args, **kwargs) if watch else call(*args, **kwargs)
        return y

    return with_call(cls, __call__)


@functools.cache
def _module_class(cls: Any, keeps: bool, bounded: bool) -> type:
    """The subclass that shares activations between its layers; with `keeps`, also what attention saves anyway.

    Outside of traces nothing is saved; with `bounded`, activations have scales for layers also there.
    """

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ASIDE.value:
            return _recorded(cls.__call__, self, args, kwargs, keeps)
        if eager() and not bounded:
            return cls.__call__(self, *args, **kwargs)
        with _remembering() as known:
            told = recognise(cls.__call__, self, args, kwargs, known, keeps)
            forms = told.forms
            call = functools.partial(_call, cls.__call__, forms) if forms else cls.__call__
            if not keeps or layers(self).keys() <= {name for form in forms for name in form.layers}:
                return call(self, *args, **kwargs)
            _tell_residuals(self, told.residuals)
            return attention.call(call, self, args, kwargs, told.residuals)

    return with_call(cls, __call__)


@contextlib.contextmanager
def _remembering() -> Iterator[dict[Any, BlockForms]]:
    """Keeps what is known until the outermost call ends, or the traced program that it is in: between calls outside of
    one, globals and other objects may change."""
    before = known = _running.known
    if known is None:
        program, known = program_of(get_opaque_trace_state()), {}
        if isinstance(program, weakref.ref) and program == _running.last[0]:
            known = _running.last[1]
        _running.last = program, known
    _running.known = known
    try:
        yield known
    finally:
        _running.known = before


def _call(call: Callable, forms: tuple[Form, ...], module: Any, *args: Any, **kwargs: Any) -> Any:
    with _sent_to(module, Watched(forms).call):
        return call(module, *args, **kwargs)


@contextlib.contextmanager
def _sent_to(module: Any, watch: Callable) -> Iterator[None]:
    """Sends calls of a module's layers to `watch(name, call, recipe, *args, **kwargs)`."""
    before = _running.calls
    _running.calls = before | {id(layer): functools.partial(watch, name) for name, layer in layers(module).items()}
    try:
        yield
    finally:
        _running.calls = before


def recognise(
    call: Callable, module: Any, args: Any, kwargs: Any, memory: dict[Any, BlockForms], keeps: bool
) -> BlockForms:
    """The activations between the layers that a module holds itself, in a call with these arguments.

    Args:
        call: its `__call__` as written.
        module: one that `replace` has changed; nothing of it is changed.
        args: of the call.
        kwargs: likewise.
        memory: as of `blocks.recognise`.
        keeps: whether to look for layers that read what attention keeps anyway.
    """
    known = _key(call, module, args, kwargs, keeps)
    if known is None:
        return BlockForms()
    with ASIDE(True):
        result = blocks.recognise(_run, *known, memory, attention.layers_of_residuals)
    if _of_flax(module):
        result = BlockForms(residuals=result.residuals)
    path = getattr(module, "_fp8jax_path", None)
    if path is not None:
        told = _running.told.blocks.get(path, BlockForms())
        forms, gaps = (*told.forms, *result.forms), (*told.gaps, *result.gaps)
        _running.told.blocks[path] = BlockForms(tuple(dict.fromkeys(forms)), tuple(dict.fromkeys(gaps)))
    return result


def _tell_residuals(module: Any, names: Set[str]) -> None:
    path = getattr(module, "_fp8jax_path", None)
    if path is not None:
        _running.told.residuals.setdefault(path, set()).update(names)


def _of_flax(module: Any) -> bool:
    """Whether a module has no activations between its layers, because Flax has written it."""
    return type(module).__module__.startswith("flax.") and not isinstance(module, nnx.Sequential)


def _key(call: Callable, module: Any, args: Any, kwargs: Any, keeps: bool) -> tuple[Any, list[Any]] | None:
    """What a call of a module depends on, without and with arrays; None where nothing can be known of it."""
    if _of_flax(module) and not keeps:
        return None
    try:
        graph, state = nnx.split((module, args, kwargs))
    except Exception:
        # Arguments may be what NNX knows no way to copy.
        return None
    leaves, structure = jax.tree.flatten(state)
    # 1 and True are equal, and have one hash.
    kinds = tuple(type(getattr(attribute, "value", None)) for _, attribute in graph.attributes)
    return (call, graph, structure, kinds, keeps), leaves


def _run(static: Any, leaves: list[Any], recording: Recording, key: Any) -> None:
    call, graph, structure, _, keeps = static
    module, args, kwargs = nnx.merge(graph, jax.tree.unflatten(structure, leaves), copy=True)
    before, _running.recording = _running.recording, recording
    try:
        _record(recording, key, leaves, keeps, call, module, args, kwargs)
    finally:
        _running.recording = before


def _recorded(call: Callable, module: Any, args: Any, kwargs: Any, keeps: bool) -> Any:
    """Calls a module inside one that is run aside."""
    recording, known = _running.recording, _key(call, module, args, kwargs, keeps)
    if recording is None or known is None:
        return call(module, *args, **kwargs)
    return _record(recording, blocks.signature(_run, *known), known[1], keeps, call, module, args, kwargs)


def _record(
    recording: Recording, key: Any, leaves: list[Any], keeps: bool, call: Callable, module: Any, args: Any, kwargs: Any
) -> Any:
    """Calls a module, and tells a recording what its layers read and return."""
    around = _running.calls
    with recording.module(key, leaves) as running:

        def watch(name: str, call: Callable[..., Array], recipe: Recipe, *args: Any, **kwargs: Any) -> Array:
            args, kwargs = blocks.positional(args, kwargs)
            layer = functools.partial(call, *args, **kwargs)
            # A layer may be one of a module around this, too.
            outer = around.get(id(layers(module)[name]))
            if outer is not None:
                layer = functools.partial(outer, call, recipe, *args, **kwargs)
            return running.layer(name, layer, args[0])

        def promotion(name: str, written: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            promoted = written(*args, **kwargs)
            running.mark("promoted", name, promoted[0])
            return promoted

        with _sent_to(module, watch), contextlib.ExitStack() as stack:
            if keeps:
                change = lambda name, cast: functools.partial(promotion, name, cast.promote)  # noqa: E731
                stack.enter_context(attention.promotions(module, change))
            outputs = call(module, *args, **kwargs)
        for i, y in enumerate(jax.tree.leaves(outputs) if keeps else ()):
            if isinstance(y, jax.core.Tracer):
                running.mark("output", str(i), y)
        return outputs


@contextlib.contextmanager
def listening(modules: dict[str, Any]) -> Iterator[Told]:
    """What is found meanwhile, by the paths of modules, which are marked with these."""
    for path, module in modules.items():
        if hasattr(type(module), "_fp8jax_written") and candidate(module):
            module._fp8jax_path = path
    before, _running.told = _running.told, Told({}, {})
    try:
        yield _running.told
    finally:
        _running.told = before
