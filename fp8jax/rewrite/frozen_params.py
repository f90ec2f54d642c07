"""Parameters that are not trained: frozen weights, and weights with an adapter.

A program is traced with an array in place of each. A product with its matrix (inputs, outputs), or with the transpose
if the scales allow it, reads its codes, independent of the rules. Other equations read its dequantized values.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax import recipes
from fp8jax.core.recipe import Linear
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.dispatch.sharding import merge
from fp8jax.ops.products.linear import flatten_tokens
from fp8jax.ops.products.lora import AdaptedWeight, apply_adapter, merge_adapter
from fp8jax.ops.products.operands import Input
from fp8jax.ops.products.product import recipe_dot
from fp8jax.ops.products.ragged import ragged_dot
from fp8jax.ops.products.weights import FrozenWeight, StepWeight, check_same_kind
from fp8jax.rewrite.graph import Node, Value, Weight, is_order_preserving, stored_weight_axes
from fp8jax.rewrite.primitives import CASTS, GROUPED_KINDS, IDENTITY_PRIMITIVES, PRODUCTS, RESHAPES
from fp8jax.rewrite.states import observed_operands, scaling_names

if TYPE_CHECKING:
    from fp8jax.rewrite.run import Interpreter


class FrozenInfo(NamedTuple):
    """A parameter that is not trained.

    Attributes:
        spec: of its codes; None if it is an array with an adapter.
        rank: of its adapter, or 0.
    """

    spec: Any
    inputs: int
    outputs: int
    rank: int

    def __str__(self) -> str:
        adapter = f"an adapter of rank {self.rank}" if self.rank else ""
        return " and ".join(filter(None, (f"frozen as {self.spec}" if self.spec is not None else "", adapter)))


def is_frozen(x: Any) -> bool:
    """Whether `x` is a frozen weight, or a weight with an adapter."""
    return isinstance(x, (FrozenWeight, AdaptedWeight))


def frozen_leaf_predicate(params: Any) -> Callable[[Any], bool] | None:
    """A function that is true for the frozen leaves of `params`; None if there are none."""
    frozen_ids = {id(x) for x in jax.tree.leaves(params, is_leaf=is_frozen) if is_frozen(x)}
    return (lambda x: id(x) in frozen_ids) if frozen_ids else None


def as_shape_struct(x: Any) -> Any:
    """The shape and dtype of a frozen parameter; any other value unchanged."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_frozen(x) else x


def frozen_info(x: Any) -> FrozenInfo | None:
    """The `FrozenInfo` of a parameter; None for an array."""
    if not is_frozen(x):
        return None
    adapter = x.adapter if isinstance(x, AdaptedWeight) else None
    weight = x.weight if isinstance(x, AdaptedWeight) else x
    spec = weight.codes.spec if isinstance(weight, FrozenWeight) else None
    shape = adapter.shape if adapter is not None else weight.matrix.shape  # type: ignore[union-attr]
    return FrozenInfo(spec, shape[-2], shape[-1], 0 if adapter is None else adapter.rank)


def as_array(x: Any) -> Any:
    """The values of a parameter, with its adapter; an array unchanged."""
    if isinstance(x, FrozenWeight):
        return lax.stop_gradient(x.dequantize(x.dtype))
    if isinstance(x, AdaptedWeight):
        return merge_adapter(lax.stop_gradient(x.weight), x.adapter, x.dtype)
    return x


def run_unchanged(run_equation: Any, node: Node, operands: Sequence[Any]) -> Any:
    """Runs an equation on dequantized values. A product dequantizes them again in its backward pass.

    Casts and identities return a frozen weight as a frozen weight.
    """
    if not any(map(is_frozen, operands)):
        return run_equation(operands)
    dtype = node.results[0].dtype
    if node.kind in CASTS and jnp.issubdtype(dtype, jnp.floating):
        return [_cast(operands[0], dtype)]
    if node.kind in IDENTITY_PRIMITIVES:
        return list(lax.optimization_barrier(operands)) if node.kind == "optimization_barrier" else list(operands)
    run = lambda operands: run_equation([as_array(x) for x in operands])  # noqa: E731
    return (jax.checkpoint(run) if node.kind in PRODUCTS else run)(list(operands))


def _cast(x: Any, dtype: Any) -> Any:
    if isinstance(x, AdaptedWeight):
        return dataclasses.replace(x, weight=_cast(x.weight, dtype))
    return dataclasses.replace(x, dtype=dtype) if isinstance(x, FrozenWeight) else x.astype(dtype)


@dataclasses.dataclass(eq=False)
class FrozenMatmulOperation:
    """A product of data with a frozen weight.

    Attributes:
        linear: the recipe; that of "bf16" if no rule takes the product.
        side: which operand of the equation the weight is.
        contract: contracted axes of the data, in the order of the weight's.
        shape: the free axes of the weight.
        is_transposed: whether the product reads the transposed matrix.
    """

    linear: Linear
    data: Value
    weight: Value
    side: int
    contract: tuple[int, ...]
    shape: tuple[int, ...]
    is_transposed: bool
    canonical_data: Value

    def run(self, interpreter: "Interpreter", node: Node) -> Sequence[Array]:
        frozen, x = interpreter.raw_value(self.weight), interpreter.array(self.data)
        free = [i for i in range(x.ndim) if i not in self.contract]
        order = (*free, *self.contract)
        transposed = x if order == tuple(range(x.ndim)) else x.transpose(order)
        value = merge(transposed, *[1] * len(free), len(self.contract)) if len(self.contract) > 1 else transposed
        facts = interpreter.get_facts(self.canonical_data, value)
        input_facts, key = interpreter.input_facts(
            value, self.canonical_data if value is x else None, self.linear, facts
        )
        w = frozen.weight if isinstance(frozen, AdaptedWeight) else frozen
        w = w.matrix if isinstance(w, FrozenWeight) else lax.stop_gradient(w).reshape(frozen.adapter.shape)
        w = w.T if self.is_transposed else w
        y = recipe_dot(
            Input(flatten_tokens(value, w), value, input_facts=input_facts),
            w,
            self.linear,
            key,
            step_weight=StepWeight(layout_policy=interpreter.layout_policy),
        )
        if isinstance(frozen, AdaptedWeight):
            y = y + apply_adapter(value, frozen.adapter.T if self.is_transposed else frozen.adapter)
        y = y.reshape(*y.shape[:-1], *self.shape)
        if self.side == 0:
            y = y.transpose(*range(len(free), y.ndim), *range(len(free)))
        return [y.astype(node.results[0].dtype)]


@dataclasses.dataclass(eq=False)
class FrozenGroupedOperation:
    """A grouped product with frozen weights, one for each group.

    Attributes:
        linear: the recipe; that of "bf16" if no rule takes the product.
        is_transposed: whether the weight is (groups, outputs, inputs).
    """

    linear: Linear
    data: Value
    weight: Value
    groups: Value
    is_transposed: bool
    canonical_data: Value

    def run(self, interpreter: "Interpreter", node: Node) -> Sequence[Array]:
        frozen, x = interpreter.raw_value(self.weight), interpreter.array(self.data)
        input_facts, key = interpreter.input_facts(
            x, self.canonical_data, self.linear, interpreter.get_facts(self.canonical_data, x)
        )
        y = ragged_dot(
            x,
            frozen.T if self.is_transposed else frozen,
            interpreter.array(self.groups),
            recipe=self.linear,
            key=key,
            preferred_element_type=node.results[0].dtype,
            input_facts=input_facts,
        )
        return [y]


def _is_transposable(spec: QuantSpec | None) -> bool:
    return spec is None or (spec.granularity in TRANSPOSABLE and not spec.expand)


@functools.cache
def _bf16_linear() -> Linear:
    return recipes.get("bf16").linear


def _is_transposed(layout: Sequence[Node]) -> bool | None:
    """Whether a layout gives the transposed matrix; None if it gives neither that nor the matrix."""
    transposed, transparent = False, (*CASTS, *IDENTITY_PRIMITIVES, *RESHAPES, "stop_gradient")
    for step in layout:
        if step.kind == "transpose" and tuple(step.eqn.params["permutation"]) == (1, 0):
            transposed = not transposed
        elif step.kind not in transparent or not is_order_preserving(step):
            return None
    return transposed


def replace_product(
    node: Node, side: int, weight: Weight, linear: Linear | None, path: str, canonical_data: Value
) -> bool:
    """Replaces a product with a frozen weight. False if the product does not read the weight's matrix.

    Raises:
        ValueError: the recipe has a stateful scaling, or integer codes for a floating weight, or the reverse.
    """
    frozen, params = weight.frozen, node.eqn.params
    assert frozen is not None
    if linear is not None and linear.is_quantized:
        if observed_operands(linear):
            raise ValueError(
                f"{path} is {frozen}, under {scaling_names(linear)} scaling, which keeps a state; use a recipe with "
                "current scaling, such as te_current, fast or int8_block"
            )
        try:
            if frozen.spec is not None:
                check_same_kind(linear, frozen.spec)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    else:
        linear = _bf16_linear()
    if node.kind in GROUPED_KINDS:
        axes = stored_weight_axes(node, weight.stored)
        if frozen.rank or axes not in ((0, 1, 2), (0, 2, 1)):
            return False
        (data, _, groups), is_transposed = node.operands, axes == (0, 2, 1)
        if is_transposed and not _is_transposable(frozen.spec):
            return False
        node.operation = FrozenGroupedOperation(linear, data, weight.stored, groups, is_transposed, canonical_data)
        node.operands = [data, weight.stored, groups]
        return True
    if node.kind != "dot_general" or any(params["dimension_numbers"][1]):
        return False
    transposed = _is_transposed(weight.layout)
    if transposed is None:
        return False
    pair, shape = params["dimension_numbers"][0], node.operands[side].shape
    pairs = sorted(zip(pair[side], pair[1 - side], strict=True))
    n = len(pairs)
    weight_axes, data_axes = zip(*pairs, strict=True) if pairs else ((), ())
    is_leading, free = weight_axes == tuple(range(n)), shape[n:]
    if not is_leading:  # the last axes may be: a matrix (outputs, inputs)
        if weight_axes != tuple(range(len(shape) - n, len(shape))):
            return False
        transposed, free = not transposed, shape[: len(shape) - n]
    sizes = math.prod(shape[i] for i in weight_axes), math.prod(free)
    if sizes != ((frozen.outputs, frozen.inputs) if transposed else (frozen.inputs, frozen.outputs)):
        return False
    if transposed and not _is_transposable(frozen.spec):
        return False
    data = node.operands[1 - side]
    node.operation = FrozenMatmulOperation(
        linear, data, weight.stored, side, data_axes, free, transposed, canonical_data
    )
    node.operands = [data, weight.stored]
    return True
