"""Projections of what attention keeps anyway: they keep no copy of it, also not of a reshaped one (COAT, section D).

Flash attention keeps its output for its own backward pass. The layer that reads this output needs no codes of it, as
long as both refer to one array: a reshape between them makes another one, which loops over layers would keep beside it.
So a call of such a module is a checkpoint that keeps all but layouts, which are computed again.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.extend import core

from fp8jax.modules.dots import SharedPromotion
from fp8jax.modules.program import split
from fp8jax.modules.provenance import JITS, REGISTRY, carried
from fp8jax.ops.choice import listening

LAYOUTS = ("reshape", "transpose", "squeeze", "expand_dims")


def layers(module: Any) -> dict[str, Any]:
    """The linear layers that a module holds itself, or in lists and dicts, by their paths in it."""
    result: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, (nnx.Linear, nnx.LinearGeneral)):
            result[name] = value
        elif isinstance(value, (nnx.List, nnx.Dict)):
            result |= {f"{name}/{inner}": layer for inner, layer in layers(value).items()}
    return result


def call(written: Callable, module: Any, args: Any, kwargs: Any, tell: Callable[[set[str]], None]) -> Any:
    """Calls a module, whose layers look for inputs that are kept anyway.

    Args:
        written: its `__call__`.
        module: the module; a copy of it may be called.
        args: of the call.
        kwargs: likewise.
        tell: is told which layers read what is kept anyway.
    """
    arrays, rebuild = split((args, kwargs))
    names = _layers_of_residuals(written, module, arrays, rebuild)
    tell(names)
    if not names:
        return written(module, *args, **kwargs)
    origins = [carried(REGISTRY.find(x)) for x in arrays]

    def run(module: Any, arrays: list[Any], known: list[Any]) -> Any:
        for x, of, (_, rebuild_origin) in zip(arrays, known, origins, strict=True):
            REGISTRY.note(x, rebuild_origin(of))
        args, kwargs = rebuild(arrays)
        with _promotions(module, lambda name, cast: dataclasses.replace(cast, residual=name in names)):
            return written(module, *args, **kwargs)

    checkpointed = nnx.remat(run, prevent_cse=False, policy=lambda prim, *_, **__: prim.name not in LAYOUTS)
    return checkpointed(module, arrays, [of for of, _ in origins])


def _layers_of_residuals(call: Callable, module: Any, arrays: list[Any], rebuild: Callable) -> set[str]:
    """The layers whose input, but for its layout, is a result inside the module that its backward pass keeps anyway."""
    graph, state = nnx.split(module)

    def residuals(state: Any, arrays: list[Any]) -> Any:
        def run(state: Any, arrays: list[Any]) -> Any:
            copy: Any = nnx.merge(graph, state, copy=True)
            seen: dict[str, Any] = {}
            with _promotions(copy, lambda name, cast: functools.partial(_watch, cast.promote, name, seen)):
                args, kwargs = rebuild(arrays)
                return call(copy, *args, **kwargs), seen

        _, back, seen = jax.vjp(run, state, arrays, has_aux=True)
        return seen, back

    try:
        with listening():  # what is traced aside is no part of the program
            closed, (seen, _) = jax.make_jaxpr(residuals, return_shape=True)(state, arrays)
    except Exception:
        # A module of which nothing is known may fail in any way; then nothing is known of its layers.
        return set()
    program = Dataflow(closed.jaxpr)
    roots = [program.root(v) for v in closed.jaxpr.outvars]
    residuals_read = {root for root in roots[len(seen) :] if root is not None}
    return {name for name, root in zip(sorted(seen), roots, strict=False) if root in residuals_read}


def _watch(promote: Callable, name: str, seen: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    promoted = promote(*args, **kwargs)
    seen[name] = promoted[0]
    return promoted


@contextlib.contextmanager
def _promotions(module: Any, change: Callable[[str, SharedPromotion], Callable]) -> Iterator[None]:
    """Changes how the quantized layers of a module cast their inputs, for a while."""
    quantized = {
        name: layer for name, layer in layers(module).items() if isinstance(layer.promote_dtype, SharedPromotion)
    }
    before = {name: layer.promote_dtype for name, layer in quantized.items()}
    try:
        for name, layer in quantized.items():
            object.__setattr__(layer, "promote_dtype", change(name, before[name]))
        yield
    finally:
        for name, layer in quantized.items():
            object.__setattr__(layer, "promote_dtype", before[name])


class Dataflow:
    """Which operation made each value of a jaxpr."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self.makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def root(self, value: Any) -> Any:
        """What a value is a layout of, hashable; None where it is an argument or a constant."""
        inside = self._climb(value)
        return None if inside is None or inside in self.jaxpr.invars else inside

    def _climb(self, value: Any) -> Any:
        while not isinstance(value, core.Literal) and value in self.makers:
            eqn = self.makers[value]
            if eqn.primitive.name in LAYOUTS:
                value = eqn.invars[0]
            elif eqn.primitive.name in JITS:
                inner = Dataflow((eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]).jaxpr)
                origin = inner._climb(inner.jaxpr.outvars[eqn.outvars.index(value)])
                if origin not in inner.jaxpr.invars:
                    # A function that is called twice is one program.
                    return origin if origin is None else (id(eqn), origin)
                value = eqn.invars[inner.jaxpr.invars.index(origin)]
            else:
                return value
        return None if isinstance(value, core.Literal) or value not in self.jaxpr.invars else value
