"""Projections of what attention keeps anyway: they keep no copy of it, also not of a reshaped one (COAT, section D).

Flash attention keeps its output for its own backward pass. The layer that reads this output needs no codes of it, as
long as both refer to one array: a reshape between them makes another one, which loops over layers would keep beside it.
So a call of such a module is a checkpoint that keeps all but layouts, which are computed again.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
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
    promoted, outputs, ends = marks["promoted"], marks["output"].values(), set(_variables(marks["argument"].values()))
    written = Dataflow(section.jaxpr, ends)
    outside = {written.root(marks["result"][name]) for name in operands}
    wanted = {name: written.root(v) for name, v in promoted.items() if not isinstance(v, core.Literal)}
    wanted = {name: root for name, root in wanted.items() if root is not None and root not in outside}
    eqns = section.operations([*promoted.values(), *outputs], ends)
    near = [eqn for eqn in eqns if not {*wanted.values()}.isdisjoint(map(written.root, _all(eqn)))]
    if not near:
        return frozenset()
    here = {id(eqn) for eqn in near}
    read = {v for eqn in eqns if id(eqn) not in here for v in _variables(eqn.invars)}.union(_variables(outputs))
    values = {name: promoted[name] for name in wanted}
    # Few operations tell what may be kept, as if all were differentiated; where that is something, all tell what is.
    names = _residuals(near, values, read, {v for eqn in near for v in _all(eqn)}, section.jaxpr)
    values = {name: promoted[name] for name in names}
    return _residuals(eqns, values, set(_variables(outputs)), ends, section.jaxpr) if names else names


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, core.Literal)]


def _all(eqn: Any) -> list[Any]:
    return _variables((*eqn.invars, *eqn.outvars))


def _residuals(
    eqns: Sequence[Any], values: Mapping[str, Any], outputs: Set[Any], moving: Set[Any], jaxpr: Any
) -> frozenset[str]:
    """The values that the backward pass of operations keeps, but for their layout.

    Args:
        eqns: the operations, in the order of their program.
        values: results of some of them, by name.
        outputs: what is read of their results elsewhere.
        moving: what is differentiated.
        jaxpr: the program.
    """
    inside = {v for eqn in eqns for v in eqn.outvars}
    free = list(dict.fromkeys(v for eqn in eqns for v in _variables(eqn.invars) if v not in inside))
    results = [v for eqn in eqns for v in eqn.outvars if v in outputs]
    program = core.Jaxpr([], free, [*results, *values.values()], eqns, jaxpr.effects, jaxpr.debug_info)
    ends, fixed = [v for v in free if v in moving], [v for v in free if v not in moving]

    def residuals(arrays: list[Any], others: list[Any]) -> Any:
        def run(arrays: list[Any]) -> Any:
            known = dict(zip(fixed, others, strict=True)) | dict(zip(ends, arrays, strict=True))
            both = jax.core.eval_jaxpr(program, [], *(known[v] for v in free))
            return both[: len(results)], both[len(results) :]

        _, back, seen = jax.vjp(run, arrays, has_aux=True)
        return seen, back

    kinds = [[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in each] for each in (ends, fixed)]
    try:
        closed = jax.make_jaxpr(residuals)(*kinds)
    except Exception as error:
        # What is not differentiated keeps nothing.
        log.info("fp8jax does not know what a module keeps: %s: %s", type(error).__name__, error)
        return frozenset()
    flow = Dataflow(closed.jaxpr)
    roots = [flow.root(v) for v in closed.jaxpr.outvars]
    kept = set(roots[len(values) :]) - {None}
    return frozenset(name for name, root in zip(values, roots, strict=False) if root in kept)


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
    """Which operation made each value of a jaxpr; `ends` count as its arguments."""

    def __init__(self, jaxpr: Any, ends: Set[Any] = frozenset()) -> None:
        self.jaxpr = jaxpr
        self.makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars if v not in ends}
        self._inner: dict[int, Dataflow] = {}

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
                inner = self._inner.get(id(eqn))
                if inner is None:
                    inner = self._inner[id(eqn)] = Dataflow((eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]).jaxpr)
                origin = inner._climb(inner.jaxpr.outvars[eqn.outvars.index(value)])
                if origin not in inner.jaxpr.invars:
                    # A function that is called twice is one program.
                    return origin if origin is None else (id(eqn), origin)
                value = eqn.invars[inner.jaxpr.invars.index(origin)]
            else:
                return value
        return None if isinstance(value, core.Literal) or value not in self.jaxpr.invars else value
