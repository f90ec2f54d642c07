"""The operations that a plan puts in place of equations: products of a recipe, norms and activations."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core.recipe import Linear, Recipe
from fp8jax.ops.activation import activate
from fp8jax.ops.beside import comes_apart
from fp8jax.ops.inputs import Input
from fp8jax.ops.linear import dot_general, in_order, output_spec, rows, weight_in_order
from fp8jax.ops.norm import normalize
from fp8jax.ops.product import product
from fp8jax.ops.ragged import ragged_dot
from fp8jax.ops.saved import ITSELF, LaidOut, Origin
from fp8jax.ops.scaled import Observed, scaled_linear
from fp8jax.ops.sharding import merge, merged, named, product_sharding, split
from fp8jax.rewrite.entries import ReadWeight
from fp8jax.rewrite.graph import Node, Value, origin_of
from fp8jax.rewrite.primitives import Equation, ragged_by_rows
from fp8jax.rewrite.states import Given, Use, observed_beside


class LayoutStep(NamedTuple):
    """An equation that gives an array another layout, or takes a part of it; and which of its results that is."""

    node: Node
    place: int


def _lay_out(layout: Sequence[LayoutStep], parts: Sequence[Array]) -> Array:
    x, *others = parts
    rest = iter(others)
    for node, place in layout:
        x = Equation(node.eqn, node.scope)([x, *(next(rest) for _ in node.operands[1:])])[place]
    return x


@dataclasses.dataclass(eq=False)
class ProductOperation:
    """A product of data with a parameter, as its equation had it.

    Attributes:
        recipe: of the product, and of what stands before it.
        data, weight: the operands; the parameter as it is stored, where no product reads it itself: it is quantized
            from all of its bits, and no 16-bit copy of it is kept.
        layout: the equations between the parameter and the product, each with the result that goes on.
        side: which operand of the equation the parameter is.
        root: the value that the data are, up to what keeps their elements: products of one share its codes.
        kept: a value that is kept in any case and has the elements of the data: nothing else is kept of them.
        use: which product with the parameter it is, if that has one matrix.
        params: of the product's equation.
        bias: a parameter with an element for each output, which is added; or None.
        turned: whether the result has outputs last where the equation, of a parameter on the left, has them first.
        widths: of the arrays that the result is cut into along its outputs, as q, k and v of one product; or None.
    """

    recipe: Recipe
    data: Value
    weight: Value
    layout: tuple[LayoutStep, ...]
    side: int
    root: Value
    kept: Value | None = None
    use: Use | None = None
    params: Mapping[str, Any] = MappingProxyType({})
    bias: Value | None = None
    turned: bool = False
    widths: tuple[int, ...] | None = None

    @property
    def linear(self) -> Linear:
        return self.recipe.linear

    @property
    def laid_out(self) -> bool:
        """Whether the product's matrix is made of what is stored."""
        return bool(self.layout)

    @property
    def inputs(self) -> int:
        """How many inputs it sums over."""
        return math.prod(self.data.shape[i] for i in self.params["dimension_numbers"][0][1 - self.side])

    def run(self, running: Any, node: Node) -> Sequence[Array]:
        given = Given() if self.use is None else running.states.get(self.use.key, Given())
        result, widths = node.results[0], self.widths
        if widths is None:
            return [self._computed(running, given, result)]
        if given.state is None and self.kept is None and comes_apart(self.recipe.linear, widths):
            parts = self._computed(running, given, result, widths)
            return [_shaped(y, of.shape).astype(of.dtype) for y, of in zip(parts, node.results, strict=True)]
        last = len(result.shape) - 1
        whole = jax.ShapeDtypeStruct((*result.shape[:last], sum(widths)), result.dtype)
        return lax.split(self._computed(running, given, whole), widths, axis=last)

    def _computed(self, running: Any, given: Given, result: Any, widths: tuple[int, ...] | None = None) -> Any:
        """The product in the shape and dtype of `result`; or the arrays of these widths that it is, as they come."""
        if given.state is not None:
            return self._scaled(running, result.dtype, given)
        linear = self.recipe.linear
        x = running.array(self.data if self.kept is None else self.kept)
        origin = running.origin(self.root, x)
        if self.kept is not None:
            origin = origin._replace(again=(ITSELF, x))
        known, key = running.reads(x, self.root, linear, origin)
        how: Any = {"key": key, "bias": self._bias(running), "quantized": self._held(given)}
        if widths is not None:
            how["widths"] = widths
        if self.kept is None and running.read_later(self.data):
            # As XLA would make a sum of gradients part of one product, but of three leaves one a pass of its own.
            how["pass_on"] = functools.partial(running.pass_on, self.data)
        laid = self._laid_out(running)
        w = laid.layout(laid.parts)
        how["laid"] = laid if self.laid_out else None
        if self.kept is None:
            y = self._product(x, w, {**how, "known": known})
        elif w.ndim == 2 and x.shape[-1] == w.shape[0]:
            y = product(Input(rows(x, w), x, known=known), w, linear, spec=output_spec(x, w, None), **how)
        else:
            tokens, matrix = merge(x, *[1] * (x.ndim - 2), 2), merge(w, w.ndim - 1, 1)
            how["laid"] = laid.then(lambda w: merge(w, w.ndim - 1, 1))
            spec = output_spec(tokens, matrix, None)
            y = product(Input(tokens, x, False, known), matrix, linear, spec=spec, **how)
        return y if widths is not None else _shaped(y, result.shape).astype(result.dtype)

    def _bias(self, running: Any) -> Array | None:
        return None if self.bias is None else running.array(self.bias).reshape(-1)

    def _scaled(self, running: Any, dtype: Any, given: Given) -> Array:
        """The product under a scaling that keeps a state."""
        linear, contract = self.recipe.linear, self._contracted()
        n, numbers = len(contract[0]), (contract, ((), ()))
        laid = self._laid_out(running)
        weight = laid.layout(laid.parts)
        data = running.array(self.data if self.kept is None else self.kept).reshape(self.data.shape)
        left, right = in_order(data, weight, numbers)
        lead, outputs = left.ndim - n, right.ndim - n
        spec = product_sharding(data, weight, numbers, self.params.get("out_sharding") if self.side == 1 else None)
        x, w = merge(left, *[1] * lead, n), merge(right, n, outputs)
        origin = running.origin(self.root, x)
        origin = origin if self.kept is None else origin._replace(again=(ITSELF, x))
        known, key = running.reads(x, self.root, linear, origin)
        how: Any = {"key": key, "known": known, "quantized": self._held(given), "bias": self._bias(running)}
        if w is not laid.parts[0]:
            how["laid"] = laid.then(lambda w: merge(weight_in_order(w, numbers), n, outputs))
        how["out_sharding"] = named(merged(spec, (*[1] * lead, outputs)), data, weight)
        if self.kept is None and contract[0] == (data.ndim - 1,) and running.read_later(self.data):
            how["pass_on"] = lambda again: running.pass_on(self.data, _shaped(again, self.data.shape))
        slots = given.slots or Observed()
        assert given.state is not None
        y, seen = scaled_linear(x, w, given.state, slots.dy, recipe=linear, **how)
        if running.seen is None:
            y = observed_beside(y, slots, seen)
        else:
            of = self.use.key  # type: ignore[union-attr]
            running.seen |= {(of, o): v for o, v in seen._asdict().items() if o != "dy" and v is not None}
        y = split(y, (*left.shape[:lead], *right.shape[n:]), spec)
        if self.side == 0 and not self.turned:
            y = jnp.moveaxis(y, range(lead), range(y.ndim - lead, y.ndim))
        return y.astype(dtype)

    def _contracted(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the data and of the parameter that are summed over, in the parameter's order."""
        pair = self.params["dimension_numbers"][0]
        pairs = sorted(zip(pair[1 - self.side], pair[self.side], strict=True), key=lambda axes: axes[1])
        data, weight = zip(*pairs, strict=True) if pairs else ((), ())
        return data, weight

    def _held(self, given: Given) -> Any:
        """The weight in codes, if the product reads the matrix (inputs, outputs) that these are of."""
        _, contract = self._contracted()
        return None if self.laid_out or tuple(contract) != tuple(range(len(contract))) else given.weight

    def _laid_out(self, running: Any) -> LaidOut:
        """What the product's matrix is made of: the parameter, and whatever else its layouts read."""
        parts = [self.weight, *(operand for step in self.layout for operand in step.node.operands[1:])]
        last = self.layout[-1].node if self.layout else None
        turned = last is not None and last.kind == "transpose" and last.results[0].aval.ndim == 2
        return LaidOut([running.array(value) for value in parts], functools.partial(_lay_out, self.layout), turned)

    def _product(self, x: Array, w: Array, how: dict[str, Any]) -> Array:
        contract, batch = self._contracted(), self.params["dimension_numbers"][1]
        dtype, sharding = self.params["preferred_element_type"] or x.dtype, self.params.get("out_sharding")
        if self.side == 1:
            numbers = contract, batch
            return dot_general(x, w, numbers, None, dtype, recipe=self.recipe.linear, out_sharding=sharding, **how)
        # The parameter on the left: its free axes come first. Where axes are Explicit, JAX's own rule places them.
        n = len(batch[0])
        own = x.ndim - len(contract[0]) - n
        y = dot_general(x, w, (contract, batch[::-1]), None, dtype, recipe=self.recipe.linear, **how)
        return y if self.turned else jnp.moveaxis(y, range(n, n + own), range(y.ndim - own, y.ndim))


@dataclasses.dataclass(eq=False)
class RaggedOperation:
    """A product of groups of tokens with a matrix each.

    Attributes:
        linear: the recipe. data, weight, groups: the operands. root: as of `ProductOperation`.
    """

    linear: Linear
    data: Value
    weight: Value
    groups: Value
    root: Value

    @classmethod
    def takes(cls, node: Node, side: int) -> bool:
        """Whether it can stand in place of an equation of its kind, whose operand `side` is a parameter."""
        return side == 1 and ragged_by_rows(node.eqn)

    @classmethod
    def put(cls, p: ReadWeight) -> None:
        """Puts it in place of a product."""
        data, w, groups = p.node.operands
        w = p.weight.stored if p.read_as_stored and not p.weight.layout else w
        assert p.choice.linear is not None
        operation = cls(p.choice.linear, data, w, groups, origin_of(data))
        p.node.operands, p.node.operation = [data, w, groups], operation

    @property
    def told(self) -> str:
        """What `explain` says of it besides the rule."""
        return f"multiplies the values of the codes in {self.data.dtype}"

    @property
    def inputs(self) -> int:
        return self.data.shape[-1]

    def run(self, running: Any, node: Node) -> Sequence[Array]:
        x, w, groups = (running.array(value) for value in (self.data, self.weight, self.groups))
        known, key = running.reads(x, self.root, self.linear, running.origin(self.root, x))
        return [ragged_dot(x, w, groups, recipe=self.linear, key=key, known=known).astype(node.results[0].dtype)]


# Products that are no `dot_general`, by their primitives: classes as `RaggedOperation`; `told` may be left out.
OTHERS: Mapping[str, Any] = {"ragged_dot_general": RaggedOperation}


@dataclasses.dataclass(eq=False)
class NormOperation:
    """A norm that keeps its input as a recipe says, and passes it on to what reads it after the norm.

    Attributes:
        recipe: the recipe.
        x, scales, bias, eps, centered: as of `fp8jax.rewrite.norms.NormForm`.
    """

    recipe: Recipe
    x: Value
    scales: tuple[Value, ...]
    bias: Value | None
    eps: float
    centered: bool

    def run(self, running: Any, node: Node) -> Sequence[Array]:
        result = node.results[0]
        x = _shaped(running.array(self.x), result.shape)
        scales = [_vector(running.array(v), x.shape[-1]) for v in self.scales]
        scale = math.prod(scales[1:], start=scales[0]) if scales else None
        bias = None if self.bias is None else _vector(running.array(self.bias), x.shape[-1])
        how: Any = {"centered": self.centered, "residual": running.read_later(self.x)}
        y, again, running.origins[result] = normalize(x, scale, bias, self.recipe, self.eps, result.dtype, **how)
        if again is not None:
            # The backward pass adds the gradients of its other readers, such as a residual stream's sum, to the norm's.
            running.pass_on(self.x, _shaped(again, self.x.shape))
        return [y]


@dataclasses.dataclass(eq=False)
class ActivationOperation:
    """An activation that keeps its inputs as a recipe says.

    Attributes:
        recipe: the recipe. name: of the function. gate, up: its operands.
        biased: whether products with a bias of this plan have made one.
    """

    recipe: Recipe
    name: str
    gate: Value
    up: Value | None
    biased: bool = False

    def run(self, running: Any, node: Node) -> Sequence[Array]:
        result = node.results[0]
        gate, up = running.array(self.gate), None if self.up is None else running.array(self.up)
        # In the widest of the dtypes that the model computes it in.
        dtype = jnp.promote_types(gate.dtype, gate.dtype if up is None else up.dtype)
        dtype = result.dtype if result.dtype.itemsize > dtype.itemsize else dtype
        inputs = gate.astype(dtype), up if up is None else up.astype(dtype)
        y, origin = activate(self.name, *inputs, self.recipe, biased=self.biased)
        running.origins[result] = origin if y.dtype == result.dtype else as_read(origin, y, result)
        return [y.astype(result.dtype)]


def as_read(origin: Origin, source: Any, x: Any) -> Origin:
    """What is known of an array that is another one in another shape or dtype."""
    part = origin.part if source.shape[-1:] == x.shape[-1:] else None
    if part is not None and source.dtype != x.dtype:
        part = part.cast(x.dtype)
    scale = origin.scale if x.dtype in (source.dtype, jnp.bfloat16) else None
    return Origin(origin.again, part, scale)


def _shaped(x: Array, shape: tuple[int, ...]) -> Array:
    """An array in a shape; itself if it has that: on a mesh JAX makes an equation of that, too."""
    return x if x.shape == shape else x.reshape(shape)


def _vector(x: Array, channels: int) -> Array:
    return jnp.broadcast_to(x.reshape(x.size), (channels,)) if x.size == 1 else x.reshape(channels)
