"""Recognises gated and plain perceptrons in Flax NNX models, by what they compute, and lets them keep codes."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fp8jax.core.recipe import Context
from fp8jax.modules.expressions import same
from fp8jax.ops.activation import ACTIVATIONS, activation, glu

_SCALARS = (bool, int, float, str)
HOOK = "call fp8jax.glu(gate, up) or fp8jax.activation(x) in it"


@dataclasses.dataclass(frozen=True)
class Form:
    """How a module with linear layers as attributes computes: down(f(gate(x)) * up(x)) and its kin.

    Attributes:
        activation: a key of `fp8jax.ops.activation.ACTIVATIONS`.
        down: the attribute that holds the last layer.
        gate: that whose output is activated.
        up: that of the factor; None for down(f(gate(x))).
        halves: `gate` gives gate and up side by side ("gate, up"), or the other way round ("up, gate").
    """

    activation: str
    down: str
    gate: str
    up: str | None = None
    halves: str | None = None

    def __str__(self) -> str:
        if self.halves:
            return f"{self.down}({self.activation}(gate) * up), {self.halves} = split({self.gate}(x))"
        times = f" * {self.up}(x)" if self.up else ""
        return f"{self.down}({self.activation}({self.gate}(x)){times})"

    def __call__(self, module: Any, x: Array, context: Context) -> Array:
        """What the module computes, keeping what the context says."""
        outputs = {name: getattr(module, name)(x) for name in (self.gate, self.up) if name}
        y: Array = getattr(module, self.down)(self.between(outputs, context))
        return y

    def between(self, outputs: dict[str, Array], context: Context) -> Array:
        """The input of the last layer from the outputs of the others, by their names."""
        gate, up = outputs[self.gate], outputs[self.up] if self.up else None
        if self.halves:
            first, second = jnp.split(gate, 2, axis=-1)
            gate, up = (first, second) if self.halves == "gate, up" else (second, first)
        if up is None:
            return activation(gate, recipe=context, activation=self.activation)
        return glu(gate, up, recipe=context, activation=self.activation)


def linears(module: Any) -> dict[str, nnx.Linear]:
    """The linear layers that a module holds itself, by attribute."""
    return {name: value for name, value in vars(module).items() if isinstance(value, nnx.Linear)}


def recognise(module: Any) -> Form | None:
    """The form that a module of two or three linear layers provably has, or None.

    Its `__call__` of one argument is traced, for arrays of two and three axes in bf16 and fp32, and compared with each
    form operation by operation.
    """
    layers = linears(module)
    if len(layers) not in (2, 3) or type(module).__module__.startswith("flax."):
        return None
    if len(inspect.signature(type(module).__call__).parameters) != 2:
        return None
    graph, state = nnx.split(module)
    stacked = min(layer.kernel.ndim for layer in layers.values()) - 2
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[stacked:], x.dtype), state)
    for form in _forms(layers):
        width = layers[form.gate].in_features
        inputs = itertools.product([(3, width), (2, 3, width)], [jnp.bfloat16, jnp.float32])
        if all(_computes(type(module).__call__, form, graph, state, jax.ShapeDtypeStruct(*x)) for x in inputs):
            return form
    return None


def _forms(layers: dict[str, Any]) -> Iterator[Form]:
    """The forms that fit the widths of the layers."""
    sizes = {name: (layer.in_features, layer.out_features) for name, layer in layers.items()}
    for names, f in itertools.product(itertools.permutations(layers), ACTIVATIONS):
        *first, down = names
        inner = sizes[down][0]
        if len({sizes[name] for name in first}) == 1 and sizes[first[0]][1] == inner:
            yield Form(f, down, *first)
        elif len(first) == 1 and sizes[first[0]][1] == 2 * inner:
            yield from (Form(f, down, first[0], halves=halves) for halves in ("gate, up", "up, gate"))


def _computes(call: Callable, form: Form, graph: Any, state: Any, x: Any) -> bool:
    try:
        return same(
            lambda state, x: call(nnx.merge(graph, state), x),
            lambda state, x: form(nnx.merge(graph, state), x, Context()),
            state,
            x,
        )
    except Exception:
        # A module of which nothing is known may fail in any way; then it has no such form.
        return False


def replace(module: Any, form: Form, context: Context) -> None:
    """Makes a module that `recognise` knows keep codes, in place; where it is set up differently, as it is written."""
    settings = _settings(module)
    module.fp8jax_form, module.fp8jax_context, module.fp8jax_settings = form, context, settings
    cls: Any = type(module)
    object.__setattr__(module, "__class__", _subclass(cls))


def _settings(module: Any, path: str = "") -> tuple[Any, ...]:
    """What the computation of a module may depend on besides arrays, such as `deterministic` of its dropout."""
    found: list[Any] = []
    for name, value in sorted(vars(module).items()):
        if isinstance(value, nnx.Module):
            found += () if isinstance(value, nnx.Linear) else _settings(value, f"{path}{name}/")
        elif isinstance(value, (nnx.Pytree, nnx.Variable)) or name.startswith("fp8jax_"):
            continue
        elif value is None or callable(value) or isinstance(value, _SCALARS):
            found.append((f"{path}{name}", type(value).__name__, value))
    return tuple(found)


@functools.cache
def _subclass(cls: Any) -> type:
    def __call__(self: Any, x: Array) -> Any:
        if _settings(self) != self.fp8jax_settings:
            return cls.__call__(self, x)
        return self.fp8jax_form(self, x, self.fp8jax_context)

    return with_call(cls, __call__)


def with_call(cls: Any, call: Callable) -> type:
    """A subclass that is called differently and is the same in all else, its name included."""
    names = ("__module__", "__qualname__", "__doc__")
    return type(cls)(cls.__name__, (cls,), {"__call__": call} | {name: getattr(cls, name) for name in names})
