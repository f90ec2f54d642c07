"""The operations of a plan, which replace equations: products of a recipe, norms and activations."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core.groups import Groups
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.ops.autodiff.residuals import ALREADY_SAVED, NO_FACTS, ArrayFacts, InputFacts
from fp8jax.ops.dispatch.sharding import explicit_mesh, merge, merge_spec, named_sharding, product_sharding, reshape
from fp8jax.ops.losses.cross_entropy import weighted_cross_entropy
from fp8jax.ops.nonlinear.activation import activate
from fp8jax.ops.nonlinear.grouped_glu import grouped_glu
from fp8jax.ops.nonlinear.norm import normalize
from fp8jax.ops.products.linear import (
    ScalingState,
    ScalingStats,
    dot_general,
    flatten_tokens,
    scaled_linear,
    to_matmul_order,
    weight_to_matmul_order,
)
from fp8jax.ops.products.operands import Input
from fp8jax.ops.products.product import recipe_dot
from fp8jax.ops.products.ragged import ragged_dot, scaled_ragged_dot
from fp8jax.ops.products.weights import QuantizedWeight, StepWeight, one_pass_spec
from fp8jax.ops.quantization import fused_outputs
from fp8jax.ops.quantization.quantize import should_split_output
from fp8jax.rewrite.entries import WeightMatmul
from fp8jax.rewrite.graph import Node, Value, canonical_value, stored_weight_axes, strip_layout
from fp8jax.rewrite.losses import LossForm
from fp8jax.rewrite.primitives import CASTS, GROUPED_CALL, IDENTITY_PRIMITIVES, Equation
from fp8jax.rewrite.states import UseInputs, WeightUse, stats_as_cotangents

if TYPE_CHECKING:
    from fp8jax.rewrite.run import Interpreter


class LayoutStep(NamedTuple):
    """An equation that changes the layout of an array or slices it, and the index of the result that is read."""

    node: Node
    result_index: int


def _apply_layout(layout: Sequence[LayoutStep], arrays: Sequence[Array]) -> Array:
    x, *operands = arrays
    operand_iter = iter(operands)
    for node, result_index in layout:
        x = Equation(node.eqn, node.scope)([x, *(next(operand_iter) for _ in node.operands[1:])])[result_index]
    return x


@dataclasses.dataclass(eq=False)
class ProductOperation:
    """A product of data with a parameter.

    Attributes:
        recipe: of the product, and of the operation before it.
        weight: the stored parameter, with all of its bits. No 16-bit copy of it is saved.
        layout: the equations between the parameter and the product.
        side: which operand of the equation the parameter is.
        canonical_data: the value whose elements the data are. Products of the same value share its codes.
        saved_data: a value with the elements of the data that another operation saves, or None. Then the product saves
            nothing of the data.
        use: identifies this product among those of the parameter; None if the parameter is part of the matrix only.
        bias: a parameter with one element per output, which is added; or None.
        is_transposed: whether the result has the outputs last although the parameter is the left operand.
        split_sizes: widths into which the result is split along its outputs, as q, k and v; or None.
        is_stacked: whether the matrices of experts are side by side, along the parameter's first axis.
    """

    recipe: Recipe
    data: Value
    weight: Value
    layout: tuple[LayoutStep, ...]
    side: int
    canonical_data: Value
    saved_data: Value | None = None
    use: WeightUse | None = None
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bias: Value | None = None
    is_transposed: bool = False
    split_sizes: tuple[int, ...] | None = None
    is_stacked: bool = False

    @property
    def linear(self) -> Linear:
        return self.recipe.linear

    @property
    def num_inputs(self) -> int:
        """Size of the contracted axes."""
        return math.prod(self.data.shape[i] for i in self.params["dimension_numbers"][0][1 - self.side])

    def with_current_scaling(self) -> "ProductOperation":
        """This operation without a state."""
        recipe = dataclasses.replace(self.recipe, linear=_current_scaling(self.linear))
        return dataclasses.replace(self, recipe=recipe, use=None)

    def run(self, interpreter: "Interpreter", node: Node) -> Sequence[Array]:
        use_inputs = _get_use_inputs(interpreter, self.use)
        result, split_sizes = node.results[0], self.split_sizes
        if split_sizes is None:
            return [self._run_product(interpreter, use_inputs, result)]
        if (
            use_inputs.state is None
            and self.saved_data is None
            and should_split_output(self.recipe.linear, split_sizes)
        ):
            pieces = self._run_product(interpreter, use_inputs, result, split_sizes)
            return [
                _reshape_if_needed(y, piece.shape).astype(piece.dtype)
                for y, piece in zip(pieces, node.results, strict=True)
            ]
        last = len(result.shape) - 1
        concatenated = jax.ShapeDtypeStruct((*result.shape[:last], sum(split_sizes)), result.dtype)
        return lax.split(self._run_product(interpreter, use_inputs, concatenated), split_sizes, axis=last)

    def _run_product(
        self, interpreter: "Interpreter", use_inputs: UseInputs, result: Any, split_sizes: tuple[int, ...] | None = None
    ) -> Any:
        """The product in the shape and dtype of `result`. With `split_sizes` a tuple of arrays, as computed."""
        if use_inputs.state is not None:
            has_experts = self.is_stacked or any(self.params["dimension_numbers"][1])
            run = self._run_scaled_experts if has_experts else self._run_scaled
            return run(interpreter, result.dtype, use_inputs)
        linear = self.recipe.linear
        x = interpreter.array(self.data if self.saved_data is None else self.saved_data)
        facts = interpreter.get_facts(self.canonical_data, x)
        if self.saved_data is not None:
            facts = facts._replace(recompute_rule=(ALREADY_SAVED, x))
        input_facts, key = interpreter.input_facts(x, self.canonical_data, linear, facts)
        stored = self._stored_arrays(interpreter)
        w, step_weight = _apply_layout(self.layout, stored), self._step_weight(interpreter, use_inputs, stored)
        if self.is_stacked and explicit_mesh(x, w) is None:
            y = self._run_stacked(interpreter, x, w, input_facts, key, use_inputs)
            return _reshape_if_needed(y, result.shape).astype(result.dtype)
        if self.saved_data is None:
            contract, batch = self._contracting_axes(), self.params["dimension_numbers"][1]
            y = dot_general(
                x,
                w,
                (contract, batch if self.side == 1 else batch[::-1]),
                preferred_element_type=self.params["preferred_element_type"] or x.dtype,
                recipe=linear,
                key=key,
                # If the parameter is on the left, JAX's own rule places Explicit axes.
                out_sharding=self.params.get("out_sharding") if self.side == 1 else None,
                input_facts=input_facts,
                bias=self._bias(interpreter),
                step_weight=step_weight,
                split_sizes=split_sizes,
            )
            if split_sizes is None:
                y = self._restore_order(y, len(batch[0]), x.ndim - len(contract[0]) - len(batch[0]))
        else:
            if w.ndim == 2 and x.shape[-1] == w.shape[0]:
                matrix, product_input = w, Input(flatten_tokens(x, w), x, input_facts=input_facts)
            else:
                tokens, matrix = merge(x, *[1] * (x.ndim - 2), 2), merge(w, w.ndim - 1, 1)
                product_input = Input(tokens, x, False, input_facts)
                step_weight = step_weight.with_step(lambda w: merge(w, w.ndim - 1, 1), values=w)
            y = recipe_dot(
                product_input,
                matrix,
                linear,
                key,
                step_weight=step_weight,
                bias=self._bias(interpreter),
                split_sizes=split_sizes,
            )
        return y if split_sizes is not None else _reshape_if_needed(y, result.shape).astype(result.dtype)

    def _run_stacked(
        self,
        interpreter: "Interpreter",
        x: Array,
        w: Array,
        input_facts: InputFacts,
        key: Array | None,
        use_inputs: UseInputs,
    ) -> Array:
        """The product with the matrix of each expert, which has its own scales. The codes of `x` are made once."""
        data_axes, weight_axes = self._contracting_axes()
        numbers = (data_axes, tuple(axis - 1 for axis in weight_axes)), ((), ())
        keys = None if key is None else jax.random.split(key, w.shape[0])

        def multiply(w: Array, bias: Array | None, key: Array | None, codes: QuantizedWeight | None) -> Array:
            return dot_general(
                x,
                w,
                numbers,
                preferred_element_type=self.params["preferred_element_type"] or x.dtype,
                recipe=self.recipe.linear,
                key=key,
                input_facts=input_facts,
                bias=bias,
                step_weight=StepWeight.from_codes(codes, interpreter.layout_policy),
            )

        num_tokens = x.ndim - len(data_axes)
        run = jax.vmap(multiply, out_axes=num_tokens)
        y = run(w, self._bias(interpreter, w.shape[0]), keys, self._given_codes(use_inputs))
        return self._restore_order(y, 0, num_tokens)

    def _bias(self, interpreter: "Interpreter", *experts: int) -> Array | None:
        return None if self.bias is None else interpreter.array(self.bias).reshape(*experts, -1)

    def _restore_order(self, y: Array, num_batch: int, num_tokens: int) -> Array:
        """`y` of axes (batch, tokens, outputs) with the outputs first, if those of the product's result are."""
        if self.side == 1 or self.is_transposed:
            return y
        return jnp.moveaxis(y, range(num_batch, num_batch + num_tokens), range(y.ndim - num_tokens, y.ndim))

    def _run_scaled(self, interpreter: "Interpreter", dtype: Any, use_inputs: UseInputs) -> Array:
        """The product with a stateful scaling."""
        linear, contract = self.recipe.linear, self._contracting_axes()
        n, numbers = len(contract[0]), (contract, ((), ()))
        stored = self._stored_arrays(interpreter)
        parameter, step_weight = _apply_layout(self.layout, stored), self._step_weight(interpreter, use_inputs, stored)
        data = interpreter.array(self.data if self.saved_data is None else self.saved_data).reshape(self.data.shape)
        left, right = to_matmul_order(data, parameter, numbers)
        num_leading, outputs = left.ndim - n, right.ndim - n
        spec = product_sharding(data, parameter, numbers, self.params.get("out_sharding") if self.side == 1 else None)
        x, w = merge(left, *[1] * num_leading, n), merge(right, n, outputs)
        facts = interpreter.get_facts(self.canonical_data, x)
        facts = facts if self.saved_data is None else facts._replace(recompute_rule=(ALREADY_SAVED, x))
        input_facts, key = interpreter.input_facts(x, self.canonical_data, linear, facts)
        if w is not stored[0]:
            step_weight = step_weight.with_step(
                lambda w: merge(weight_to_matmul_order(w, numbers), n, outputs), values=stored[0]
            )
        slots = use_inputs.slots or ScalingStats()
        assert use_inputs.state is not None
        y, stats = scaled_linear(
            x,
            w,
            use_inputs.state,
            slots.dy,
            recipe=linear,
            bias=self._bias(interpreter),
            key=key,
            out_sharding=named_sharding(merge_spec(spec, (*[1] * num_leading, outputs)), data, parameter),
            input_facts=input_facts,
            step_weight=step_weight,
        )
        y = record_stats(interpreter, self.use, y, slots, stats)
        y = reshape(y, (*left.shape[:num_leading], *right.shape[n:]), spec)
        return self._restore_order(y, 0, num_leading).astype(dtype)

    def _run_scaled_experts(self, interpreter: "Interpreter", dtype: Any, use_inputs: UseInputs) -> Array:
        """The products of experts with a stateful scaling, which has a state for each expert.

        The experts are a batch axis of both operands, or side by side in a parameter that multiplies all data.
        """
        linear, contract = self.recipe.linear, self._contracting_axes()
        batch = self.params["dimension_numbers"][1]
        batch = ((), (0,)) if self.is_stacked else batch if self.side == 1 else batch[::-1]
        n, num_batch, data = len(contract[0]), len(batch[0]), interpreter.array(self.data)
        weight = _apply_layout(self.layout, self._stored_arrays(interpreter))
        left, right = to_matmul_order(data, weight, (contract, batch))
        num_tokens, num_outputs = left.ndim - num_batch - n, right.ndim - 1 - n
        x, w = merge(left, *[1] * (num_batch + num_tokens), n), merge(right, 1, n, num_outputs)
        _, key = interpreter.input_facts(x, self.canonical_data if self.is_stacked else None, linear, NO_FACTS)
        keys = None if key is None else jax.random.split(key, w.shape[0])
        slots = use_inputs.slots or ScalingStats()

        def multiply(
            x: Array,
            w: Array,
            state: ScalingState,
            slot: Array | None,
            key: Array | None,
            bias: Array | None,
            codes: QuantizedWeight | None,
        ) -> tuple[Array, ScalingStats]:
            step_weight = StepWeight.from_codes(codes, interpreter.layout_policy)
            y, stats = scaled_linear(x, w, state, slot, recipe=linear, bias=bias, key=key, step_weight=step_weight)
            # An expert without tokens observes nothing.
            has_tokens = jnp.any(x != 0)
            return y, stats._replace(x=None if stats.x is None else jnp.where(has_tokens, stats.x, 0))

        assert use_inputs.state is not None
        # The experts of one matrix are among the axes of its outputs.
        axes = ((None, *[0] * 6), (num_tokens, 0)) if self.is_stacked else (0, 0)
        run = jax.vmap(multiply, *axes)
        bias, codes = self._bias(interpreter, w.shape[0]), self._given_codes(use_inputs)
        y, stats = run(x, w, use_inputs.state, slots.dy, keys, bias, codes)
        y = record_stats(interpreter, self.use, y, slots, stats)
        y = y.reshape(*y.shape[:-1], *right.shape[1 + n :])
        return self._restore_order(y, num_batch, num_tokens).astype(dtype)

    def _contracting_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The contracted axes of the data and of the parameter, in the order of the parameter."""
        pair = self.params["dimension_numbers"][0]
        pairs = sorted(zip(pair[1 - self.side], pair[self.side], strict=True), key=lambda axes: axes[1])
        data, weight = zip(*pairs, strict=True) if pairs else ((), ())
        return data, weight

    def _stored_arrays(self, interpreter: "Interpreter") -> list[Array]:
        """The parameter, and the other operands of the equations that transpose, reshape or cast it."""
        operands = [self.weight, *(operand for step in self.layout for operand in step.node.operands[1:])]
        return [interpreter.array(value) for value in operands]

    def _step_weight(self, interpreter: "Interpreter", use_inputs: UseInputs, stored: list[Array]) -> StepWeight:
        """The weight of the product: given codes of the parameter, or the arrays to compute the matrix from."""
        if self.layout:
            last = self.layout[-1].node
            return StepWeight(
                values=stored,
                to_weight=functools.partial(_apply_layout, self.layout),
                transposed=last.kind == "transpose" and last.results[0].aval.ndim == 2,
                layout_policy=interpreter.layout_policy,
            )
        return StepWeight.from_codes(
            None if self.is_stacked else self._given_codes(use_inputs), interpreter.layout_policy
        )

    def _given_codes(self, use_inputs: UseInputs) -> QuantizedWeight | None:
        """The given codes of a parameter (inputs, outputs), or such for each expert; None if its axes are others."""
        (_, contract), batch = self._contracting_axes(), self.params["dimension_numbers"][1][0]
        num_experts = 1 if self.is_stacked else len(batch)
        is_matrix = tuple(contract) == tuple(range(num_experts, num_experts + len(contract)))
        return use_inputs.weight if is_matrix else None


def _current_scaling(linear: Linear) -> Linear:
    return dataclasses.replace(linear, scaling="current", w_scaling=None)


def _get_use_inputs(interpreter: "Interpreter", use: WeightUse | None) -> UseInputs:
    """The inputs of a product that are not arrays."""
    return UseInputs() if use is None else interpreter.use_inputs.get(use.key, UseInputs())


class GatheredRows(NamedTuple):
    """Rows that are gathered from tokens.

    Attributes:
        tokens: (tokens, inputs).
        indices: int32 (rows, 1), the token of each row.
        fills: whether a row of a token out of bounds is NaN; if not, the index is clipped.
    """

    tokens: Value
    indices: Value
    fills: bool

    @property
    def operands(self) -> tuple[Value, Value]:
        return self.tokens, self.indices

    def row_index(self, index: Array) -> Array:
        """The index of each row, (rows,)."""
        index = index.reshape(-1).astype(jnp.int32)
        return index if self.fills else jnp.clip(index, 0, self.tokens.shape[0] - 1)


def find_gathered_rows(value: Value) -> GatheredRows | None:
    """The tokens that a matrix's rows are gathered from, before casts; None if they are not."""
    value = strip_layout(value, (*CASTS, *IDENTITY_PRIMITIVES))
    if value.kind != "gather" or value.node is None or value.node.operation is not None:
        return None
    (tokens, index), params = value.node.operands, value.node.eqn.params
    numbers, modes = params["dimension_numbers"], lax.GatherScatterMode
    takes_rows = (
        numbers.offset_dims == (1,)
        and numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and tokens.aval.ndim == index.aval.ndim == 2
        and tuple(params["slice_sizes"]) == (1, tokens.shape[1])
    )
    fills, fill_value = params["mode"] == modes.FILL_OR_DROP, params["fill_value"]
    has_other_fill = fills and fill_value is not None and fill_value == fill_value
    return None if not takes_rows or has_other_fill else GatheredRows(tokens, index, fills)


@dataclasses.dataclass(eq=False)
class RaggedOperation:
    """A product of groups of tokens, each with its own matrix.

    Attributes:
        weight_axes: the axes of the weight that are groups, inputs and outputs.
        gathered: the tokens of which the data are rows, and their indices; None if the data are not gathered.
    """

    linear: Linear
    data: Value
    weight: Value
    groups: Value
    weight_axes: tuple[int, int, int]
    canonical_data: Value
    use: WeightUse | None = None
    gathered: GatheredRows | None = None

    @classmethod
    def supports(cls, node: Node, side: int) -> bool:
        """Whether it can replace a grouped product whose operand `side` is a parameter."""
        return side == 1 and node.weight_axes is not None

    @classmethod
    def replace_product(cls, p: WeightMatmul) -> None:
        """Replaces a product of a plan."""
        assert p.choice.linear is not None
        (data, _, groups), (w, axes) = p.node.operands, stored_experts(p)
        gathered = find_gathered_rows(data)
        operation = cls(p.choice.linear, data, w, groups, axes, canonical_value(data), gathered=gathered)
        operands = () if gathered is None else gathered.operands
        p.node.operands, p.node.operation = [data, w, groups, *operands], operation

    @property
    def num_inputs(self) -> int:
        return self.data.shape[-1]

    def with_current_scaling(self) -> "RaggedOperation":
        """As of `ProductOperation`."""
        return dataclasses.replace(self, linear=_current_scaling(self.linear), use=None)

    @property
    def saved_tokens(self) -> Value:
        """The value whose codes are saved."""
        spec = self.linear.spec("x_residual")
        is_saved = self.gathered is not None and spec is not None and fused_outputs.supports(spec)
        return self.gathered.tokens if self.gathered is not None and is_saved else self.data

    def run(self, interpreter: "Interpreter", node: Node) -> Sequence[Array]:
        x, w, groups = (interpreter.array(value) for value in (self.data, self.weight, self.groups))
        has_outputs_first = self.weight_axes == (0, 2, 1)
        if not has_outputs_first and self.weight_axes != (0, 1, 2):
            w = w.transpose(self.weight_axes)
        facts = interpreter.get_facts(self.canonical_data, x)
        if self.gathered is not None:
            tokens, index = (lax.stop_gradient(interpreter.array(value)) for value in self.gathered.operands)
            facts = interpreter.get_facts(canonical_value(self.gathered.tokens), tokens)
            facts = ArrayFacts(facts.recompute_rule, row_source=(tokens, self.gathered.row_index(index)))
        input_facts, key = interpreter.input_facts(x, self.canonical_data, self.linear, facts)
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((1,), (2 if has_outputs_first else 1,)), ((), ())),
            lhs_ragged_dimensions=(0,),
            rhs_group_dimensions=(0,),
        )
        use_inputs = _get_use_inputs(interpreter, self.use)
        quantized = use_inputs.weight
        if has_outputs_first and quantized is not None:
            # They are codes of the stored matrices, which are (outputs, inputs).
            is_symmetric = quantized.forward.spec == quantized.dgrad.spec and one_pass_spec(self.linear) is not None
            quantized = QuantizedWeight(quantized.dgrad, quantized.forward) if is_symmetric else None
        multiply: Callable[..., Any] = functools.partial(
            ragged_dot if use_inputs.state is None else scaled_ragged_dot,
            recipe=self.linear,
            key=key,
            dimension_numbers=numbers,
            preferred_element_type=node.results[0].dtype,
            step_weight=StepWeight.from_codes(quantized, interpreter.layout_policy),
            input_facts=input_facts,
        )
        if use_inputs.state is None:
            return [multiply(x, w, groups)]
        slots = use_inputs.slots or ScalingStats()
        y, stats = multiply(x, w, groups, use_inputs.state, slots.dy)
        return [record_stats(interpreter, self.use, y, slots, stats)]


def record_stats(
    interpreter: "Interpreter", use: WeightUse | None, y: Array, slots: ScalingStats, stats: ScalingStats
) -> Array:
    """Record statistics in the interpreter; otherwise the cotangent of the returned `y` passes them to the slots."""
    if interpreter.stats is None:
        return stats_as_cotangents(y, slots, stats)
    assert use is not None
    interpreter.stats |= {(use.key, o): v for o, v in stats._asdict().items() if o != "dy" and v is not None}
    return y


def stored_experts(p: WeightMatmul) -> tuple[Value, tuple[int, int, int]]:
    """The weight that a grouped product quantizes, and its axes of groups, inputs and outputs.

    It is the parameter as it is stored if only casts and transpositions are between it and the product. No transposed
    or 16-bit copy is then saved.
    """
    operand, axes, linear = p.node.operands[1], p.node.weight_axes, p.choice.linear
    assert axes is not None
    assert linear is not None
    stored, stored_axes = p.weight.stored, stored_weight_axes(p.node, p.weight.stored)
    is_quantized = linear.spec("w") is not None and linear.spec("w_dgrad") is not None
    is_float = jnp.issubdtype(stored.dtype, jnp.floating) and stored.dtype.itemsize > 1
    return (stored, stored_axes) if stored_axes is not None and is_quantized and is_float else (operand, axes)


# Operations for products other than `dot_general`, by primitive.
NON_DOT_OPERATIONS: Mapping[str, type[RaggedOperation]] = {
    "ragged_dot_general": RaggedOperation,
    GROUPED_CALL: RaggedOperation,
}


@dataclasses.dataclass(eq=False)
class LossOperation:
    """An output head and the sum of its softmax cross-entropy over all tokens. No array has all logits.

    Attributes:
        data: the input, whose last axis has the channels.
        vocabulary_axis: of the parameter.
        loss: with `total`.
    """

    linear: Linear
    data: Value
    weight: Value
    vocabulary_axis: int
    loss: LossForm
    canonical_data: Value

    @property
    def num_inputs(self) -> int:
        return self.data.shape[-1]

    def run(self, interpreter: "Interpreter", node: Node) -> Sequence[Array]:
        x, w, loss = interpreter.array(self.data), interpreter.array(self.weight), self.loss
        if loss.span is not None:
            (start, end), channels = loss.span, x.shape[-1]
            x = lax.slice(x, (*start, 0), (*end, channels))
        shape, vocabulary = x.shape[:-1], w.shape[self.vocabulary_axis]
        labels = interpreter.array(loss.labels).reshape(shape)
        weights = jnp.full(shape, loss.scale, jnp.float32)
        for value, losses_shape in loss.weights:
            weights *= jnp.broadcast_to(interpreter.array(value), losses_shape).reshape(shape).astype(jnp.float32)
        for value, losses_shape, case in loss.masks:
            is_counted = jnp.broadcast_to(interpreter.array(value), losses_shape).reshape(shape) == case
            weights = jnp.where(is_counted, weights, 0)
        if loss.out_of_range == "zero":
            weights = jnp.where((labels >= 0) & (labels < vocabulary), weights, 0)
        if loss.out_of_range == "clip":
            labels = jnp.clip(labels, 0, vocabulary - 1)
        total = weighted_cross_entropy(
            x,
            w,
            labels,
            weights,
            bias=None if loss.bias is None else interpreter.array(loss.bias).reshape(-1),
            label_smoothing=loss.label_smoothing,
            z_loss=loss.z_loss,
            vocabulary_axis=self.vocabulary_axis,
            recipe=self.linear,
        )
        return [total.astype(node.results[0].dtype)]


@dataclasses.dataclass(eq=False)
class NormOperation:
    """A norm that saves its input by a recipe, and returns it for its later readers.

    Attributes:
        x, scales, bias, eps, centered: as of `fp8jax.rewrite.norms.NormForm`.
    """

    recipe: Recipe
    x: Value
    scales: tuple[Value, ...]
    bias: Value | None
    eps: float
    centered: bool

    def run(self, interpreter: "Interpreter", node: Node) -> Sequence[Array]:
        result = node.results[0]
        x = _reshape_if_needed(interpreter.array(self.x), result.shape)
        scales = [_channel_vector(interpreter.array(v), x.shape[-1]) for v in self.scales]
        scale = math.prod(scales[1:], start=scales[0]) if scales else None
        bias = None if self.bias is None else _channel_vector(interpreter.array(self.bias), x.shape[-1])
        y, passthrough, interpreter.facts[result] = normalize(
            x,
            scale,
            bias,
            self.recipe,
            self.eps,
            result.dtype,
            centered=self.centered,
            returns_input=interpreter.is_live_after(self.x),
        )
        if passthrough is not None:
            # The backward pass of the norm adds the gradients of the other readers, such as a residual sum.
            interpreter.set_passthrough(self.x, _reshape_if_needed(passthrough, self.x.shape))
        return [y]


@dataclasses.dataclass(eq=False)
class ActivationOperation:
    """An activation that saves its inputs by a recipe.

    Attributes:
        has_bias: whether a product of this plan with a bias computes an operand.
    """

    recipe: Recipe
    name: str
    gate: Value
    up: Value | None
    has_bias: bool = False

    def run(self, interpreter: "Interpreter", node: Node) -> Sequence[Array]:
        result = node.results[0]
        gate, up = interpreter.array(self.gate), None if self.up is None else interpreter.array(self.up)
        # Compute in the widest dtype that the model uses.
        dtype = jnp.promote_types(gate.dtype, gate.dtype if up is None else up.dtype)
        dtype = result.dtype if result.dtype.itemsize > dtype.itemsize else dtype
        inputs = gate.astype(dtype), up if up is None else up.astype(dtype)
        y, facts = activate(self.name, *inputs, self.recipe, has_bias=self.has_bias)
        interpreter.facts[result] = facts if y.dtype == result.dtype else convert_facts(facts, y, result)
        return [y.astype(result.dtype)]


@dataclasses.dataclass(eq=False, kw_only=True)
class GroupedGluOperation(ActivationOperation):
    """A GLU between two grouped products. Gate and up are the halves of one matrix.

    Attributes:
        gate_up: that matrix, the result of the product before it.
    """

    gate_up: Value
    groups: Value

    def run(self, interpreter: "Interpreter", node: Node) -> Sequence[Array]:
        result, gate_up = node.results[0], interpreter.array(self.gate_up)
        groups = Groups.from_sizes(interpreter.array(self.groups), gate_up.shape[0])
        y, facts = grouped_glu(gate_up, groups, self.recipe, activation=self.name)
        interpreter.facts[result] = facts if y.dtype == result.dtype else convert_facts(facts, y, result)
        return [y.astype(result.dtype)]


def convert_facts(facts: ArrayFacts, source: Any, x: Any) -> ArrayFacts:
    """Facts about `x`, which is `source` in another shape or dtype."""
    fused_output = facts.fused_output if source.shape[-1:] == x.shape[-1:] else None
    if fused_output is not None and source.dtype != x.dtype:
        fused_output = fused_output.cast(x.dtype)
    scale = facts.scale if x.dtype in (source.dtype, jnp.bfloat16) else None
    is_same = (source.shape, source.dtype) == (x.shape, x.dtype)
    return ArrayFacts(facts.recompute_rule, fused_output, scale, codes=facts.codes if is_same else None)


def _reshape_if_needed(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` in a shape. On a mesh JAX adds an equation even if the shape is the same."""
    return x if x.shape == shape else x.reshape(shape)


def _channel_vector(x: Array, channels: int) -> Array:
    return jnp.broadcast_to(x.reshape(x.size), (channels,)) if x.size == 1 else x.reshape(channels)
