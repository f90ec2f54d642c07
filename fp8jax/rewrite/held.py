"""Parameters that are not trained: `fp8jax.FrozenWeight`s, and what has an adapter beside it, in a model's parameters.

A program is traced with an array in the place of each. A product that multiplies by it as a matrix (inputs, outputs),
or by its transpose where the codes' scales serve that, is done with its codes, whatever the rules say of it; all else
reads its values, decoded.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax import recipes
from fp8jax.core.recipe import Linear
from fp8jax.core.spec import TRANSPOSABLE
from fp8jax.ops.frozen import FrozenWeight, check_kinds
from fp8jax.ops.inputs import Input
from fp8jax.ops.linear import rows
from fp8jax.ops.lora import AdaptedWeight, adapted, merge_adapter
from fp8jax.ops.product import product
from fp8jax.ops.sharding import merge
from fp8jax.rewrite.graph import Node, Value, Weight, in_order
from fp8jax.rewrite.primitives import CASTS, MARKS, PRODUCTS, RESHAPES
from fp8jax.rewrite.states import scaling_names


class StandIn(NamedTuple):
    """What is held in the place of a parameter: how codes are made, or None; the matrix; the adapter's rank, or 0."""

    spec: Any
    inputs: int
    outputs: int
    rank: int

    def __str__(self) -> str:
        adapter = f"an adapter of rank {self.rank}" if self.rank else ""
        return " and ".join(filter(None, (f"frozen as {self.spec}" if self.spec is not None else "", adapter)))


def is_held(x: Any) -> bool:
    """Whether something stands in the place of a parameter."""
    return isinstance(x, (FrozenWeight, AdaptedWeight))


def leaf_in(params: Any) -> Callable[[Any], bool] | None:
    """Says of a part of a tree whether it is held in the place of one of these parameters; None where nothing is."""
    held = {id(x) for x in jax.tree.leaves(params, is_leaf=is_held) if is_held(x)}
    return (lambda x: id(x) in held) if held else None


def stand_in(x: Any) -> Any:
    """What a program is traced with: the array that something stands for."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_held(x) else x


def kind(x: Any) -> StandIn | None:
    """What is held; None of an array."""
    if not is_held(x):
        return None
    adapter = x.adapter if isinstance(x, AdaptedWeight) else None
    weight = x.weight if isinstance(x, AdaptedWeight) else x
    spec = weight.codes.spec if isinstance(weight, FrozenWeight) else None
    shape = adapter.shape if adapter is not None else weight.matrix.shape  # type: ignore[union-attr]
    return StandIn(spec, shape[-2], shape[-1], 0 if adapter is None else adapter.rank)


def as_array(x: Any) -> Any:
    """The values of what is held, with the adapter's part; itself, of an array."""
    if isinstance(x, FrozenWeight):
        return lax.stop_gradient(x.dequantize(x.dtype))
    if isinstance(x, AdaptedWeight):
        return merge_adapter(lax.stop_gradient(x.weight), x.adapter, x.dtype)
    return x


def written(step: Any, node: Node, operands: Sequence[Any]) -> Any:
    """Runs an equation as it is written, on decoded values, which its backward pass decodes again.

    What is held stays so in another dtype, or on another place.
    """
    if not any(map(is_held, operands)):
        return step(operands)
    dtype = node.results[0].dtype
    if node.kind in CASTS and jnp.issubdtype(dtype, jnp.floating):
        return [_cast(operands[0], dtype)]
    if node.kind in MARKS:
        return list(lax.optimization_barrier(operands)) if node.kind == "optimization_barrier" else list(operands)
    run = lambda operands: step([as_array(x) for x in operands])  # noqa: E731
    return (jax.checkpoint(run) if node.kind in PRODUCTS else run)(list(operands))


def _cast(x: Any, dtype: Any) -> Any:
    if isinstance(x, AdaptedWeight):
        return dataclasses.replace(x, weight=_cast(x.weight, dtype))
    return dataclasses.replace(x, dtype=dtype) if isinstance(x, FrozenWeight) else x.astype(dtype)


@dataclasses.dataclass(eq=False)
class HeldOperation:
    """A product of data with what is held.

    Attributes:
        linear: the recipe, of products in 16 bits where rules leave it alone.
        data, weight: the operands, the weight as it is held. side: which operand of the equation that is.
        contract: the axes of the data that are summed over, in the order of the weight's.
        shape: the further axes of the weight, as the product reads it. turned: whether it reads the transposed matrix.
        root: as of `ProductOperation`.
    """

    linear: Linear
    data: Value
    weight: Value
    side: int
    contract: tuple[int, ...]
    shape: tuple[int, ...]
    turned: bool
    root: Value

    def run(self, running: Any, node: Node) -> Sequence[Array]:
        held, x = running.held(self.weight), running.array(self.data)
        free = [i for i in range(x.ndim) if i not in self.contract]
        order = (*free, *self.contract)
        turned = x if order == tuple(range(x.ndim)) else x.transpose(order)
        value = merge(turned, *[1] * len(free), len(self.contract)) if len(self.contract) > 1 else turned
        root, origin = self.root if value is x else None, running.origin(self.root, value)
        known, key = running.reads(value, root, self.linear, origin)
        weight = held.weight if isinstance(held, AdaptedWeight) else held
        w = weight.matrix if isinstance(weight, FrozenWeight) else lax.stop_gradient(weight).reshape(held.adapter.shape)
        w = w.T if self.turned else w
        y = product(Input(rows(value, w), value, known=known), w, self.linear, key)
        if isinstance(held, AdaptedWeight):
            y = y + adapted(value, held.adapter.T if self.turned else held.adapter)
        y = y.reshape(*y.shape[:-1], *self.shape)
        if self.side == 0:
            y = y.transpose(*range(len(free), y.ndim), *range(len(free)))
        return [y.astype(node.results[0].dtype)]


@functools.cache
def _sixteen_bits() -> Linear:
    return recipes.get("bf16").linear


def _turned(layout: Sequence[Node]) -> bool | None:
    """Whether what is read is the transposed matrix; None where it is neither that nor the matrix."""
    turned, kept = False, (*CASTS, *MARKS, *RESHAPES, "stop_gradient")
    for step in layout:
        if step.kind == "transpose" and tuple(step.eqn.params["permutation"]) == (1, 0):
            turned = not turned
        elif step.kind not in kept or not in_order(step):
            return None
    return turned


def replace(node: Node, side: int, weight: Weight, linear: Linear | None, path: str, root: Value) -> bool:
    """Puts the product with what is held in the place of one; False where that is not read as its matrix.

    Raises:
        ValueError: the recipe has a scaling that keeps a state, or codes of another kind than those held.
    """
    held, params = weight.held, node.eqn.params
    assert held is not None
    if linear is not None and linear.quantized:
        if any(scaling.observes for scaling in linear.states.values()):
            raise ValueError(
                f"{path} is {held}, under {scaling_names(linear)} scaling, which keeps a state: take a recipe with "
                "current scaling, such as te_current, fast or int8_block"
            )
        try:
            if held.spec is not None:
                check_kinds(linear, held.spec)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    else:
        linear = _sixteen_bits()
    if node.kind != "dot_general" or any(params["dimension_numbers"][1]):
        return False
    turned = _turned(weight.layout)
    if turned is None:
        return False
    pair, shape = params["dimension_numbers"][0], node.operands[side].shape
    pairs = sorted(zip(pair[side], pair[1 - side], strict=True))
    n = len(pairs)
    of_weight, of_data = zip(*pairs, strict=True) if pairs else ((), ())
    first, free = of_weight == tuple(range(n)), shape[n:]
    if not first:  # the last axes may be: a matrix (outputs, inputs)
        if of_weight != tuple(range(len(shape) - n, len(shape))):
            return False
        turned, free = not turned, shape[: len(shape) - n]
    sizes = math.prod(shape[i] for i in of_weight), math.prod(free)
    if sizes != ((held.outputs, held.inputs) if turned else (held.inputs, held.outputs)):
        return False
    if turned and held.spec is not None and (held.spec.granularity not in TRANSPOSABLE or held.spec.expand):
        return False
    data = node.operands[1 - side]
    node.operation = HeldOperation(linear, data, weight.stored, side, of_data, free, turned, root)
    node.operands = [data, weight.stored]
    return True
