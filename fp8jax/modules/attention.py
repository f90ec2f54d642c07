"""Projections of what attention keeps anyway: they keep no copy of it, also not of a reshaped one (COAT, section D).

Flash attention keeps its output for its own backward pass. The layer that reads this output needs no codes of it, as
long as both refer to one array: a reshape between them makes another one, which loops over layers would keep beside it.
So a call of such a module is a checkpoint that keeps all but layouts, which are computed again.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Set
from typing import Any

import jax
from flax import nnx
from jax.extend import core

from fp8jax.modules.dots import SharedPromotion
from fp8jax.modules.program import split
from fp8jax.modules.provenance import JITS, REGISTRY, carried
from fp8jax.modules.recording import Section

log = logging.getLogger("fp8jax")
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


def call(written: Callable, module: Any, args: Any, kwargs: Any, names: Set[str]) -> Any:
    """Calls a module, some of whose layers read what is kept anyway.

    Args:
        written: its `__call__`.
        module: the module; a copy of it may be called.
        args: of the call.
        kwargs: likewise.
        names: of these layers.
    """
    arrays, rebuild = split((args, kwargs))
    if not names:
        return written(module, *args, **kwargs)
    origins = [carried(REGISTRY.find(x)) for x in arrays]

    def run(module: Any, arrays: list[Any], known: list[Any]) -> Any:
        for x, of, (_, rebuild_origin) in zip(arrays, known, origins, strict=True):
            REGISTRY.note(x, rebuild_origin(of))
        args, kwargs = rebuild(arrays)
        with promotions(module, lambda name, cast: dataclasses.replace(cast, residual=name in names)):
            return written(module, *args, **kwargs)

    checkpointed = nnx.remat(run, prevent_cse=False, policy=lambda prim, *_, **__: prim.name not in LAYOUTS)
    return checkpointed(module, arrays, [of for of, _ in origins])


def layers_of_residuals(section: Section, operands: Set[str]) -> frozenset[str]:
    """The layers whose input, but for its layout, is a result inside the module that its backward pass keeps anyway.

    Args:
        section: where the module runs, with marks on its outputs and on what its layers read in their dtype.
        operands: layers whose results activations read, which keep codes of them.
    """
    marks = section.marks
    if not marks["promoted"] or "promoted" in section.call.elsewhere:
        return frozenset()
    ends = {v: None for v in marks["argument"].values() if not isinstance(v, core.Literal)}
    names, values = list(marks["promoted"]), [*marks["promoted"].values(), *marks["output"].values()]
    eqns = section.operations(values, ends)
    inside = {v for eqn in eqns for v in eqn.outvars}
    read = [v for v in (*(v for eqn in eqns for v in eqn.invars), *values) if not isinstance(v, core.Literal)]
    free = [v for v in dict.fromkeys(read) if v in ends or v not in inside]
    program = core.Jaxpr([], free, values, eqns, section.jaxpr.effects, section.jaxpr.debug_info)
    fixed = [v for v in free if v not in ends]

    def residuals(arrays: list[Any], others: list[Any]) -> Any:
        def run(arrays: list[Any]) -> Any:
            known = dict(zip(fixed, others, strict=True)) | dict(zip(ends, arrays, strict=True))
            results = jax.core.eval_jaxpr(program, [], *(known[v] for v in free))
            return results[len(names) :], results[: len(names)]

        _, back, seen = jax.vjp(run, arrays, has_aux=True)
        return seen, back

    try:
        kinds = [[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in each] for each in (ends, fixed)]
        closed = jax.make_jaxpr(residuals)(*kinds)
    except Exception as error:
        # What is not differentiated keeps nothing.
        log.info("fp8jax does not know what a module keeps: %s: %s", type(error).__name__, error)
        return frozenset()
    roots = [Dataflow(closed.jaxpr).root(v) for v in closed.jaxpr.outvars]
    residuals_of = {root for root in roots[len(names) :] if root is not None}
    written = Dataflow(section.jaxpr)
    outside = {written.root(marks["result"][name]) for name in operands}
    return frozenset(
        name
        for name, root in zip(names, roots, strict=False)
        if root in residuals_of and written.root(marks["promoted"][name]) not in outside
    )


@contextlib.contextmanager
def promotions(module: Any, change: Callable[[str, SharedPromotion], Callable]) -> Iterator[None]:
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
