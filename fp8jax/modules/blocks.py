"""Activations between linear layers, recognised while a module runs by what it computes; knows nothing of Flax."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state

from fp8jax.core.recipe import Recipe
from fp8jax.modules.expressions import Marks, Terms, marked
from fp8jax.modules.functions import activation, glu
from fp8jax.modules.reading import LAYOUTS, PRODUCTS
from fp8jax.modules.recording import Recording, Section
from fp8jax.ops.activation import ACTIVATIONS
from fp8jax.ops.choice import listening, saving
from fp8jax.rewrite.rules import between

_log = logging.getLogger("fp8jax")
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
        operations: what stands between, by the names of JAX's primitives, or of functions such as "relu()".
    """

    down: str
    read: tuple[str, ...]
    operations: tuple[str, ...]

    def __str__(self) -> str:
        by = [*self._functions, "dropout"] if "random_bits" in self.operations else self.operations
        return f"{self.down} reads {' and '.join(self.read)} through {', '.join(by)}, which is not recognised"

    @property
    def advice(self) -> str:
        """What helps, if anything does."""
        return f"codes are kept of {', '.join(ACTIVATIONS)} alone" if self._functions else HOOK

    @property
    def _functions(self) -> list[str]:
        return [name for name in self.operations if name.endswith("()")]


class BlockForms(NamedTuple):
    """What is known of a module: the activations between its layers, where something else stands between them, and its
    layers that read what attention keeps anyway."""

    forms: tuple[Form, ...] = ()
    gaps: tuple[Gap, ...] = ()
    residuals: frozenset[str] = frozenset()


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


def signature(run: Callable, static: Any, leaves: list[Any]) -> tuple[Any, ...]:
    """What the forms of a module in a call depend on; it may have no hash."""
    kinds = [jax.typeof(x) if isinstance(x, Array) else x for x in leaves]
    # 1 and True are equal, and have one hash.
    return run, static, tuple(kinds), tuple(map(type, kinds))


def recognise(
    run: Callable,
    static: Any,
    leaves: list[Any],
    memory: dict[Any, BlockForms],
    residuals: Callable[[Section, Set[str]], frozenset[str]] | None = None,
) -> BlockForms:
    """The activations between the layers of a module in one call of it: where what a layer reads is term by term a form
    of other layers' outputs, whatever else the module computes.

    The module is traced once more, with marks on the outputs of its layers, which count as unknowns. Layers that are
    called more than once, or inside another trace, as in the body of a loop, are in no form. Modules inside it tell
    theirs in the same trace. Of a module that fails, nothing is known; its error comes again in the call itself.

    Args:
        run: `run(static, leaves, recording, key)` runs a copy of the module, and tells the recording where this and the
            modules inside it begin, and which layers they call.
        static: what the copy and its call depend on besides arrays; best hashable.
        leaves: arrays, of which only shapes and dtypes are used, and all else.
        memory: of what was found, by what it depends on. It should not outlive a call of the model: what else the
            module reads, such as a global variable, may change.
        residuals: as of `forms`.
    """
    key: Any = signature(run, static, leaves)
    kinds = key[2]
    try:
        if key in memory:
            return memory[key]
    except TypeError:  # something in it has no hash
        key = object()
    is_array, recording = [isinstance(x, jax.core.ShapedArray) for x in kinds], Recording()

    def run_with(arrays: list[Array]) -> None:
        rest = iter(arrays)
        run(static, [next(rest) if array else x for x, array in zip(kinds, is_array, strict=True)], recording, key)

    try:
        with listening(), saving():  # what is traced aside is no part of the program
            closed = jax.make_jaxpr(run_with)([x for x, array in zip(kinds, is_array, strict=True) if array])
            told = forms(recording, closed, residuals)
    except Exception as error:
        # A module of which nothing is known may fail in any way.
        tell_failure(error)
        return BlockForms()
    for call, known in told.items():
        memory.setdefault(call, known)
    return told.get(key, BlockForms())


def tell_failure(error: Exception) -> None:
    """Tells the log why a run aside has failed; the model's own errors come again in its call."""
    _log.info("fp8jax traced a module aside, which failed: %s: %s", type(error).__name__, error)


def forms(
    recording: Recording, closed: Any, residuals: Callable[[Section, Set[str]], frozenset[str]] | None = None
) -> dict[Any, BlockForms]:
    """What is known of the modules of a run aside, by the keys of their calls.

    Args:
        recording: of the run.
        closed: its program.
        residuals: tells which layers read what is kept anyway, besides results of those that are in forms.
    """
    told = dict.fromkeys(recording.idle(), BlockForms())
    for section in recording.sections(closed):
        if section.call.key not in told:
            both = tuple(_find(section))
            own, gaps = tuple(x for x in both if isinstance(x, Form)), tuple(x for x in both if isinstance(x, Gap))
            operands = {name for form in own for name in form.layers - {form.down}}
            names = residuals(section, operands) if residuals else frozenset[str]()
            told[section.call.key] = BlockForms(own, gaps, names - {form.down for form in own})
    return told


def _find(section: Section) -> Iterator[Form | Gap]:
    """The forms and gaps of a module."""
    terms, types = Terms(), section.call.types
    numbers, arrays = terms.inputs(section)
    once = {name: y for name, (_, y) in types.items() if section.call.counts[name] == 1}
    for down, number in sorted(numbers.items()):
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
            # An activation has one input, or two; what has more, as the result of a product, is none.
            if between and not data and names.isdisjoint(PRODUCTS):
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
