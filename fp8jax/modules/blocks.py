"""Activations between linear layers, recognised while a module runs by what it computes; knows nothing of Flax."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state

from fp8jax.core.recipe import Recipe
from fp8jax.modules.expressions import Marks, Terms, marked, result
from fp8jax.modules.functions import activation, glu
from fp8jax.modules.reading import LAYOUTS
from fp8jax.modules.rules import between
from fp8jax.ops.activation import ACTIVATIONS
from fp8jax.ops.choice import listening

_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "pallas_call"}
_AS_WRITTEN = Recipe("as written")
HOOK = "call fp8jax.glu(gate, up) or fp8jax.activation(x) there"


@dataclasses.dataclass(frozen=True)
class Form:
    """What a layer of a module reads: f(gate(x)) * up(x) and its kin, of other layers of that module.

    Attributes:
        activation: a key of `fp8jax.ops.activation.ACTIVATIONS`.
        down: the name of the layer that reads it.
        gate: that of the layer whose output is activated.
        up: that of the factor; None for down(f(gate(x))).
        halves: `gate` gives gate and up side by side ("gate, up"), or the other way round ("up, gate").
        marks: the model's own constraints and names of the outputs of gate and up, and of what `down` reads.
    """

    activation: str
    down: str
    gate: str
    up: str | None = None
    halves: str | None = None
    marks: Mapping[str, Marks] = dataclasses.field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        if self.halves:
            return f"{self.down}({self.activation}(gate) * up), {self.halves} = split({self.gate}(x))"
        times = f" * {self.up}(x)" if self.up else ""
        return f"{self.down}({self.activation}({self.gate}(x)){times})"

    @property
    def layers(self) -> set[str]:
        """The names of its layers."""
        return {self.down, self.gate, self.up or self.gate}

    def between(self, outputs: dict[str, Array], recipe: Recipe) -> Array:
        """The input of the last layer from the outputs of the others, by their names."""
        gate, up = (marked(outputs[n], self.marks.get(n, ())) if n else None for n in (self.gate, self.up))
        assert gate is not None
        if self.halves:
            first, second = jnp.split(gate, 2, axis=-1)
            gate, up = (first, second) if self.halves == "gate, up" else (second, first)
        how: Any = {"recipe": recipe, "activation": self.activation}
        return marked(activation(gate, **how) if up is None else glu(gate, up, **how), self.marks.get(self.down, ()))


class Gap(NamedTuple):
    """A layer that reads nothing but other layers of its module, through what is no known activation.

    Attributes:
        down: the name of the layer.
        read: those of the layers that it reads.
        operations: what stands between, by the names of JAX's primitives.
    """

    down: str
    read: tuple[str, ...]
    operations: tuple[str, ...]

    def __str__(self) -> str:
        by = "dropout" if "random_bits" in self.operations else ", ".join(self.operations)
        return f"{self.down} reads {' and '.join(self.read)} through {by}, which is not recognised"


class BlockForms(NamedTuple):
    """What is known of a module: the activations between its layers, and where something else stands between them."""

    forms: tuple[Form, ...] = ()
    gaps: tuple[Gap, ...] = ()


class Watched:
    """A module while it runs: its forms, and what its layers have returned in its own trace."""

    def __init__(self, forms: tuple[Form, ...]) -> None:
        self._forms = {form.down: form for form in forms}
        self._outputs: dict[str, Array] = {}
        self._trace = get_opaque_trace_state()

    def call(self, name: str, layer: Callable[..., Array], recipe: Recipe, *args: Any, **kwargs: Any) -> Array:
        """Calls a layer of the module; if it ends a form, on what the form makes of the layers' outputs."""
        args, kwargs = positional(args, kwargs)
        if get_opaque_trace_state() != self._trace:
            return layer(*args, **kwargs)
        form = self._forms.get(name)
        # A layer in a trace that was in a cache of JAX returns nothing here.
        known = form is not None and (form.layers - {name}) <= self._outputs.keys()
        if form is not None and known and between(recipe):
            args = (form.between(self._outputs, recipe), *args[1:])
        y = layer(*args, **kwargs)
        self._outputs[name] = y
        return y


def positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call of one of Flax's layers, its input, which it calls `inputs`, as the first of them."""
    if args or "inputs" not in kwargs:
        return args, kwargs
    return (kwargs["inputs"],), {name: value for name, value in kwargs.items() if name != "inputs"}


def recognise(run: Callable, static: Any, leaves: list[Any], memory: dict[Any, BlockForms]) -> BlockForms:
    """The activations between the layers of a module in one call of it: where what a layer reads is term by term a form
    of other layers' outputs, whatever else the module computes.

    The module is traced once more, with marks on the outputs of its layers, which count as unknowns. Layers that are
    called more than once, or inside another trace, as in the body of a loop, are in no form. Of a module that fails,
    nothing is known.

    Args:
        run: `run(static, leaves, layer)` runs a copy of the module, with `layer(name, call, x)` in place of each of its
            layers; `call()` is what the layer returns for `x`.
        static: what the copy and its call depend on besides arrays; best hashable.
        leaves: arrays, of which only shapes and dtypes are used, and all else.
        memory: of what was found, by what it depends on. It should not outlive a call of the model: what else the
            module reads, such as a global variable, may change.
    """
    kinds = [jax.typeof(x) if isinstance(x, Array) else x for x in leaves]
    # 1 and True are equal, and have one hash.
    call: Any = (run, static, tuple(kinds), tuple(map(type, leaves)))
    try:
        if call in memory:
            return memory[call]
    except TypeError:  # something in it has no hash
        call = object()
    is_array = [isinstance(x, jax.core.ShapedArray) for x in kinds]

    def run_with(arrays: list[Array], layer: Callable) -> None:
        rest = iter(arrays)
        run(static, [next(rest) if array else x for x, array in zip(kinds, is_array, strict=True)], layer)

    try:
        with listening():  # what is traced aside is no part of the program
            both = tuple(_find(run_with, [x for x, array in zip(kinds, is_array, strict=True) if array]))
    except Exception:
        # A module of which nothing is known may fail in any way.
        return BlockForms()
    result = BlockForms(tuple(x for x in both if isinstance(x, Form)), tuple(x for x in both if isinstance(x, Gap)))
    memory[call] = result
    return result


def _find(run: Callable, arrays: list[Any]) -> Iterator[Form | Gap]:
    """The forms and gaps of a module that `run(arrays, layer)` runs."""
    types: dict[str, tuple[Any, Any]] = {}
    calls: collections.Counter[str] = collections.Counter()

    def inputs(arrays: list[Array]) -> dict[str, Array]:
        trace, seen = get_opaque_trace_state(), dict[str, Array]()

        def mark(name: str, call: Callable[[], Array], x: Array) -> Array:
            calls[name] += 1
            y = call()
            if get_opaque_trace_state() != trace:
                return y
            seen[name], types[name] = x, (jax.typeof(x), jax.typeof(y))
            return result(name, y)

        run(arrays, mark)
        return seen

    terms = Terms()
    _, numbers = terms.outputs(inputs, (arrays,))
    once = {name: y for name, (_, y) in types.items() if calls[name] == 1}
    for down, number in zip(sorted(types), numbers, strict=True):
        arguments, read, names = terms.reached(number)
        known = down in once and down not in read and len(read) in (1, 2) and read <= once.keys()
        if not known:
            continue
        for form in _candidates(down, sorted(read), types) if not arguments else ():
            _, made_of = terms.outputs(functools.partial(form.between, recipe=_AS_WRITTEN), (once,), sorted(once))
            if made_of == [number]:
                marks = {name: terms.marks(terms.of_result(name)) for name in read}
                yield dataclasses.replace(form, marks=marks | {down: terms.marks(number)})
                break
        else:
            data = [i for i in arguments if jnp.issubdtype(arrays[i].dtype, jnp.floating)]
            between = sorted(names.difference(LAYOUTS))
            # An activation has one input, or two; what has more, as attention, is none.
            if between and not data and not names & _PRODUCTS:
                yield Gap(down, tuple(sorted(read)), tuple(between))


def _candidates(down: str, read: list[str], types: dict[str, Any]) -> Iterator[Form]:
    """The forms of the outputs of one or two layers that have the shape of the input of `down`."""
    wanted, outs = types[down][0].shape, [types[name][1] for name in read]
    candidates: list[tuple[str, str | None, str | None]] = []
    if {out.shape for out in outs} == {wanted} and len({out.dtype for out in outs}) == 1:
        candidates = [(gate, up[0] if up else None, None) for gate, *up in itertools.permutations(read)]
    elif len(read) == 1 and outs[0].shape == (*wanted[:-1], 2 * wanted[-1]):
        candidates = [(read[0], None, order) for order in ("gate, up", "up, gate")]
    for (gate, other, order), f in itertools.product(candidates, ACTIVATIONS):
        yield Form(f, down, gate, other, order)
