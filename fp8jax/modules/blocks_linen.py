"""Recognises activations between the layers of Flax Linen models, while these run, by what they compute."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict
from jax import Array

from fp8jax.core.recipe import Context
from fp8jax.modules.blocks import Form
from fp8jax.modules.expressions import outputs, reached
from fp8jax.ops.activation import ACTIVATIONS

LAYERS = (nn.Dense, nn.DenseGeneral)


class Watched:
    """A module while it runs: its forms, and what its layers have returned."""

    def __init__(self, forms: tuple[Form, ...]) -> None:
        self._forms = {form.down: form for form in forms}
        self._outputs: dict[str, Array] = {}

    def call(self, name: str, layer: Callable[..., Array], context: Context, *args: Any, **kwargs: Any) -> Array:
        """Calls a layer of the module; if it ends a form, on what the form makes of the layers' outputs."""
        form = self._forms.get(name)
        # A layer in a trace that nn.jit had in its cache returns nothing here.
        known = form is not None and {form.gate, form.up} - {None} <= self._outputs.keys()
        if form is not None and known and context.saved is not None:
            args, kwargs = (form.between(self._outputs, context),), {}
        y = layer(*args, **kwargs)
        self._outputs[name] = y
        return y


def recognise(module: nn.Module, args: Any, kwargs: Any, quiet: Callable[[], Any]) -> tuple[Form, ...]:
    """The activations between the linear layers that a module holds itself, in a call with these arguments.

    A copy of the module is traced for their shapes and dtypes, with the outputs of its layers as unknowns: where the
    input of a layer is term by term a form of such outputs, it reads that form, whatever else the module computes.

    Args:
        module: bound, with parameters.
        args: of its `__call__`.
        kwargs: likewise.
        quiet: makes a context in which nothing is quantized.
    """
    params = flatten_dict(module.variables.get("params", {}))
    kernels = [path for path in params if len(path) == 2 and path[1] == "kernel"]
    if len(kernels) < 2 or type(module).__module__.startswith("flax."):
        return ()
    assert module.scope is not None
    leaves, structure = jax.tree.flatten((nn.meta.unbox(module.variables), args, kwargs))
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Array) else x for x in leaves)
    copy, scope = module.clone(parent=None), module.scope
    # 1 and True are equal, and have one hash.
    fields = tuple(type(getattr(copy, field.name)) for field in dataclasses.fields(copy))
    types = (fields, tuple(map(type, leaves)))
    call: Any = (copy, structure, shapes, tuple(scope.rngs), scope.mutable, types)
    known: Callable[..., tuple[Form, ...]] = _recognise
    try:
        hash(call)
    except TypeError:
        known = _recognise.__wrapped__
    with quiet():
        return known(*call)


@functools.lru_cache(maxsize=256)
def _recognise(copy: nn.Module, structure: Any, shapes: Any, rngs: Any, mutable: Any, _: Any) -> tuple[Form, ...]:
    is_array = [isinstance(x, jax.ShapeDtypeStruct) for x in shapes]

    def run(arrays: list[Array], layer: Callable[[str, Callable[[], Array], Array], Array]) -> None:
        rest = iter(arrays)
        mixed = [next(rest) if array else x for x, array in zip(shapes, is_array, strict=True)]
        variables, args, kwargs = jax.tree.unflatten(structure, mixed)

        def intercept(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            if context.method_name != "__call__" or not isinstance(module, LAYERS) or len(module.path) != 1:
                return call(*args, **kwargs)
            (x,) = args
            return layer(str(module.name), functools.partial(call, x), x)

        with nn.intercept_methods(intercept):
            copy.apply(variables, *args, rngs={name: jax.random.key(0) for name in rngs}, mutable=mutable, **kwargs)

    try:
        return tuple(_forms(run, [x for x, array in zip(shapes, is_array, strict=True) if array]))
    except Exception:
        # A module of which nothing is known may fail in any way; then nothing is known of its layers.
        return ()


def _forms(run: Callable, shapes: list[Any]) -> Iterator[Form]:
    """The forms of a module whose `run` calls `layer` in place of each of its layers."""
    made: dict[str, tuple[Any, ...]] = {}
    twice: set[str] = set()

    def record(name: str, call: Callable[[], Array], x: Array) -> Array:
        y = call()
        twice.update({name} & made.keys())
        made[name] = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, y))
        return y

    jax.eval_shape(lambda arrays: run(arrays, record), shapes)
    unknown = {name: y for name, (_, y) in made.items()}
    terms: dict[Any, int] = {}

    def inputs(arrays: list[Array], unknown: dict[str, Array]) -> dict[str, Array]:
        seen: dict[str, Array] = {}

        def stand_in(name: str, call: Callable[[], Array], x: Array) -> Array:
            seen[name] = x
            return unknown[name]

        run(arrays, stand_in)
        return seen

    _, numbers = outputs(inputs, (shapes, unknown), terms)
    found = dict(zip(sorted(made), numbers, strict=True))
    places = dict(enumerate(sorted(made), len(shapes)))
    for down in made:
        read = [places.get(i, "") for i in sorted(reached(found[down], terms))]
        known = len(read) in (1, 2) and all(read) and not twice & {down, *read}
        for form in _candidates(down, read, made) if known else ():
            _, made_of = outputs(lambda _, unknown, f=form: f.between(unknown, Context()), (shapes, unknown), terms)
            if made_of == [found[down]]:
                yield form
                break


def _candidates(down: str, read: list[str], made: dict[str, Any]) -> Iterator[Form]:
    """The forms of the outputs of one or two layers that have the shape of the input of `down`."""
    wanted, outs = made[down][0].shape, [made[name][1] for name in read]
    candidates: list[tuple[str, str | None, str | None]] = []
    if {out.shape for out in outs} == {wanted} and len({out.dtype for out in outs}) == 1:
        candidates = [(gate, up[0] if up else None, None) for gate, *up in itertools.permutations(read)]
    elif len(read) == 1 and outs[0].shape == (*wanted[:-1], 2 * wanted[-1]):
        candidates = [(read[0], None, order) for order in ("gate, up", "up, gate")]
    for (gate, other, order), activation in itertools.product(candidates, ACTIVATIONS):
        yield Form(activation, down, gate, other, order)
