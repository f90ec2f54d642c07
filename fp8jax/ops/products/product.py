"""The differentiable matrix product under every linear layer.

    y  = x @ w + bias      "forward"
    dx = dy @ w.T          "dgrad"
    dw = x.T @ dy          "wgrad"

A recipe defines the format in which each of the three matmuls reads its operands. The source of an operand
(`fp8jax.ops.products.operands`) makes its codes, and decides what is saved of it for the backward pass.

The input is quantized outside of the `jax.custom_vjp` function, from its value alone. Its codes are an argument of that
function: products of one input share them, and the input itself need not be saved.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.core import derivatives, formats, scaling
from fp8jax.core.blocks import expand_to_rank
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME, Linear
from fp8jax.ops.autodiff.checkpointing import PRODUCT
from fp8jax.ops.autodiff.observations import LayerScope, current_layer_scope, observe_codes
from fp8jax.ops.autodiff.residuals import ArrayFacts, CotangentFacts, attach_facts, pop_facts
from fp8jax.ops.dispatch.choice import cast_varying_over, match_varying_axes, record_residual, varying_axes
from fp8jax.ops.dispatch.sharding import DtypeAndSharding, OutSharding, merge_spec, product_sharding, reshape
from fp8jax.ops.matmul.matmul import Operand, matmul
from fp8jax.ops.products.operands import (
    ForwardOperand,
    Input,
    Residual,
    Source,
    encode,
    gradient_key,
    input_side,
    input_source,
    weight_side,
)
from fp8jax.ops.products.weights import NO_CODES, FrozenSource, FrozenWeight, LayoutPolicy, StepWeight, weight_source
from fp8jax.ops.quantization import fused_outputs, microscaling
from fp8jax.ops.quantization.fused_reference import column_sums
from fp8jax.ops.quantization.quantize import PackedMatrix, concatenate_packed, quantize_and_sum, split_weight


class CotangentOperands(NamedTuple):
    """The operands made from a gradient (tokens, outputs).

    Attributes:
        rows: operand of dgrad, (tokens, outputs).
        columns: operand of wgrad, (outputs, tokens).
        sums: gradient of the bias, the sums over tokens, fp32 (outputs,); None if they are not requested.
    """

    rows: Operand
    columns: Operand
    sums: Array | None


def encode_cotangent(
    dy: PackedMatrix,
    recipe: Linear,
    *,
    key: Array | None,
    scale: Array | None,
    facts: ArrayFacts,
    shares_token_scales: bool,
    x_codes_scale: Array | None,
    with_sums: bool,
) -> CotangentOperands:
    """The operands of dgrad and wgrad, in one pass over the gradient if the formats allow it.

    Args:
        dy: (tokens, outputs), or the matrices that it consists of, side by side.
        scale: given scale of the codes; None computes it from `dy`.
        shares_token_scales: whether its scales go with those of the input's tokens
            (`fp8jax.ops.quantization.microscaling`).
        x_codes_scale: scale of the input's codes, one or one per token; None if it is unknown.
    """
    fused_output = facts.fused_output
    row_spec, column_spec, strategy = recipe.spec("dy"), recipe.spec("dy_wgrad"), recipe.stateless_strategy("dy")
    operands: tuple[Operand, Operand]
    if row_spec is None or column_spec is None or row_spec.is_folded or column_spec.is_folded:
        dy = concatenate_packed(dy)
        if shares_token_scales and row_spec is not None and row_spec.is_folded:
            operands = microscaling.gradient_operands(dy, row_spec, x_codes_scale, fused_output)
            return CotangentOperands(*operands, column_sums(dy) if with_sums else None)
        keys = (None, None) if key is None else jax.random.split(key)
        rows = encode(dy, row_spec, strategy, key=keys[0], scale=scale, fused_output=fused_output)
        if recipe.rotation:
            scale = fused_output = None  # they are of `dy` itself
        columns = encode(
            dy,
            column_spec,
            strategy,
            key=keys[1],
            scale=scale,
            transposed=True,
            fused_output=fused_output,
            rotation=recipe.rotation,
        )
        operands = rows, columns
        return CotangentOperands(*operands, column_sums(dy) if with_sums else None)
    transposed = SAME if recipe.dy_wgrad == SAME and recipe.rotation is None else column_spec
    row_and_column_codes, sums_over_tokens = quantize_and_sum(
        dy,
        row_spec,
        transposed,
        sums=with_sums,
        scale=scale,
        strategy=strategy,
        key=key,
        fused_output=fused_output,
        amax=facts.amax,
        rotation=recipe.rotation,
    )
    return CotangentOperands(*row_and_column_codes, sums_over_tokens)


def row_bounds(a: Operand, b: Operand) -> Array:
    """An upper bound of |a @ b.T| in each row, rounded to 16 bits: fp32 (rows,)."""

    def norms(x: Operand) -> Array:
        if isinstance(x, QTensor) and x.spec.granularity == "tensor":
            return norms(x.codes) * jnp.max(x.scale, initial=0.0)
        values = x.dequantize() if isinstance(x, QTensor) else x.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(values), -1))

    return 1.01 * (norms(a) * jnp.max(norms(b), initial=0.0))


class Scales(NamedTuple):
    """Scales passed by the caller, fp32 scalars. A scale that is None is computed from the tensor.

    Attributes:
        dy_amax: expected amax of the output's gradient; 0 means the amax of the gradient itself.
        amax_slot: any scalar, given with `dy_amax`. Its cotangent is the measured amax of the output's gradient.
    """

    x: Array | None = None
    w: Array | None = None
    dy_amax: Array | None = None
    amax_slot: Array | None = None


class ProductConfig(NamedTuple):
    """The static part of a product.

    Attributes:
        out_spec: sharding of the result on a mesh with Explicit axes, else None.
        split_sizes: widths of the arrays into which the result is split along its last axis; None for one array.
    """

    recipe: Linear
    out_spec: tuple[Any, ...] | None
    name: str
    split_sizes: tuple[int, ...] | None
    layer_scope: LayerScope | None


class Operands(NamedTuple):
    """The arguments of the `jax.custom_vjp` function. Its backward pass returns their cotangents in the same record.

    Attributes:
        x: input (..., inputs).
        w: weight (inputs, outputs); None if it is frozen.
        x_source, w_source: sources of their codes. No gradient.
        key: PRNG key for gradients that are rounded stochastically, or None.
        guard: of `fp8jax.core.derivatives.second_order_guard`: a second derivative raises an error, not a silent zero.
    """

    x: Array | None = None
    w: Array | None = None
    bias: Array | None = None
    x_source: Source | None = None
    w_source: StepWeight | FrozenSource | None = None
    key: Array | None = None
    scales: Scales | None = None
    guard: Array | None = None


class Residuals(NamedTuple):
    """The residuals of a product for its backward pass.

    Attributes:
        x, w: what the sources of input and weight save. The input of a frozen weight is not saved.
        x_kind, w_kind, bias_kind: dtypes and shardings of the gradients; None if there is no such gradient.
        key, scales, guard: as of `Operands`; the guard is None if nothing is in 8 bits.
    """

    x: Residual | None
    w: StepWeight | FrozenSource
    x_kind: DtypeAndSharding
    w_kind: DtypeAndSharding | None
    bias_kind: DtypeAndSharding | None
    key: Array | None
    scales: Scales | None
    guard: Array | None


def recipe_dot(
    x: Input,
    w: Array | FrozenWeight,
    recipe: Linear,
    key: Array | None,
    *,
    x_source: Source | None = None,
    scales: Scales | None = None,
    step_weight: StepWeight = NO_CODES,
    out_spec: tuple[Any, ...] | None = None,
    bias: Array | None = None,
    split_sizes: tuple[int, ...] | None = None,
) -> Any:
    """x @ w + bias, with the three matmuls in the formats of a recipe.

    Args:
        x: (tokens, inputs), and what is known about it.
        w: (inputs, outputs). A frozen weight has no gradient.
        key: PRNG key for recipes that round stochastically.
        x_source: source of the codes of `x`, which several products may share; None makes it.
        scales: given scales; None computes them from the tensors.
        step_weight: the codes of `w`, or what it is made from; by default the product quantizes and saves `w` itself.
        out_spec: sharding of the result on a mesh with Explicit axes; None follows JAX's own rule.
        bias: (outputs,), added in the dtype of the result; or None.
        split_sizes: widths into which the result is split along its last axis (`fp8jax.ops.quantization.quantize`), or
            None.

    Returns:
        (..., outputs) in the dtype of `x`, where `x.value` is (..., inputs). A tuple of these with `split_sizes`.

    Raises:
        ValueError: the key is missing, or as `weight_source`.
    """
    x_source = x_source or input_source(x, recipe, key, scales and scales.x)
    value = x.value
    is_frozen = isinstance(w, FrozenWeight)
    w_source = weight_source(w, recipe, step_weight=step_weight, scale=scales and scales.w)
    out_spec = out_spec or output_spec(value, w, None)
    name = derivatives.qualified_op_name(
        f"a product of {value.shape} and {'a frozen weight' if is_frozen else w.shape}"
    )
    dy_key = gradient_key(recipe, key, ("dy",) if is_frozen else ("dy", "dy_wgrad"))

    trained_w = None if isinstance(w, FrozenWeight) else w
    value, trained_w, bias = match_varying_axes(value, trained_w, bias)  # type: ignore[assignment]
    if isinstance(w_source, StepWeight) and w_source.values is not None:
        axes = frozenset(varying_axes(value))
        w_source = w_source.with_step(lambda w: cast_varying_over(w, axes))
    guard = derivatives.second_order_guard(name, value, trained_w, bias)
    config = ProductConfig(
        recipe=recipe,
        out_spec=out_spec,
        name=name,
        split_sizes=split_sizes,
        layer_scope=current_layer_scope(f"linear {'x'.join(map(str, w.shape))}"),
    )
    operands = Operands(
        x=value,
        w=trained_w,
        bias=bias,
        x_source=x_source,
        w_source=w_source,
        key=dy_key,
        scales=scales,
        guard=guard,
    )
    y = _product(config, operands)
    return jax.tree.map(lambda y: derivatives.check_differentiable_dtypes("a product", y, value, trained_w, bias), y)


def output_spec(x: Array, w: Array | FrozenWeight, out_sharding: OutSharding) -> tuple[Any, ...] | None:
    """The sharding of x @ w; see `fp8jax.ops.dispatch.sharding.product_sharding`."""
    matrix, axis = (w.codes, 0 if w.transposed else 1) if isinstance(w, FrozenWeight) else (w, 0)
    return product_sharding(x, matrix, (((x.ndim - 1,), (axis,)), ((), ())), out_sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(config: ProductConfig, operands: Operands) -> Any:
    """The product of two quantized operands. Its gradients are quantized products, too."""
    return _forward(config, operands)[0]


def _product_fwd(config: ProductConfig, operands: Operands) -> tuple[Any, Residuals]:
    """`_forward`, if a backward pass follows."""
    if operands.w is not None and isinstance(operands.w_source, StepWeight):
        w_source = operands.w_source.quantized_for_gradient(operands.w, config.recipe)
        operands = operands._replace(w_source=w_source)
    results, residuals = _forward(config, operands)
    if operands.w is not None:
        shapes = f"{operands.x.shape} x {operands.w.shape}"  # type: ignore[union-attr]
        record_residual(f"of the input of a linear {shapes}: {residuals.x}")
    return results, residuals


def _forward(config: ProductConfig, operands: Operands) -> tuple[Any, Residuals]:
    recipe, w, guard = config.recipe, operands.w, operands.guard
    x_source, w_source = operands.x_source, operands.w_source
    assert operands.x is not None
    assert x_source is not None
    assert w_source is not None
    x_side, w_side = input_side(recipe), weight_side(recipe)
    if not recipe.is_quantized and recipe.spec("x_residual") is None and w is not None:
        guard = None  # a product in 16 bits may be differentiated twice

    x = fused_outputs.to_matrix(operands.x)
    x_value, w_value = (x, w) if guard is None else lax.stop_gradient((x, w))
    x_operand = x_source.forward(x_value, x_side)
    w_operand = w_source.forward(w_value, w_side)  # type: ignore[arg-type]
    residuals = Residuals(
        x=None if w is None else x_source.residual(x, x_operand, x_side),
        w=w_source.residual(w, w_operand, w_side),  # type: ignore[arg-type]
        x_kind=DtypeAndSharding.from_array(operands.x),
        w_kind=None if w is None else DtypeAndSharding.from_array(w),
        bias_kind=None if operands.bias is None else DtypeAndSharding.from_array(operands.bias),
        key=operands.key,
        scales=operands.scales,
        guard=guard,
    )

    ys = _matmuls(config, operands.x, operands.bias, x_operand, w_operand)
    ys[0] = observe_codes(ys[0], config.layer_scope, "x", x, x_operand)
    if w is not None:
        ys[0] = observe_codes(ys[0], config.layer_scope, "w", w, w_operand, is_transposed=True)
    if guard is not None:
        ys = derivatives.differentiable_once(config.name, ys, guard)
    return ys[0] if config.split_sizes is None else tuple(ys), residuals


def _matmuls(
    config: ProductConfig, x: Array, bias: Array | None, x_operand: ForwardOperand, w_operand: ForwardOperand
) -> list[Array]:
    """The result, or the arrays into which it is split, each by its own matmul."""
    matrix_spec = merge_spec(config.out_spec, (x.ndim - 1, 1))
    fast = "forward" in config.recipe.fast_accumulation
    ys = []
    for w_section, bias_section in split_weight(w_operand, bias, config.split_sizes):  # type: ignore[arg-type]
        y = matmul(x_operand, w_section, dtype=x.dtype, fast=fast, out_spec=matrix_spec)
        if bias_section is not None:
            # On the matrix: cuBLASLt then adds the bias within the product.
            y = y + expand_to_rank(bias_section.astype(y.dtype), 2)
        ys.append(checkpoint_name(reshape(y, (*x.shape[:-1], y.shape[-1]), config.out_spec), PRODUCT))
    return ys


def _product_bwd(config: ProductConfig, residuals: Residuals, dy: PackedMatrix) -> tuple[Operands]:
    dy_facts = pop_facts(dy)
    guard = residuals.guard
    if guard is None:
        operand_cotangents, predicted = _gradients(config, residuals, dy_facts, dy)
    else:
        operand_cotangents, predicted = _gradients(
            config, lax.stop_gradient(residuals), dy_facts, lax.stop_gradient(dy)
        )
        operand_cotangents = derivatives.differentiable_once(config.name, operand_cotangents, (dy, guard))
    if predicted is not None:
        attach_facts(operand_cotangents.x, ArrayFacts(predicted=predicted))
    return (operand_cotangents,)


_product.defvjp(_product_fwd, _product_bwd)


def _gradients(
    config: ProductConfig,
    residuals: Residuals,
    dy_facts: ArrayFacts,
    dy: PackedMatrix,
) -> tuple[Operands, Any]:
    """The cotangents of all operands, and the facts about the cotangents that follow from that of the input."""
    recipe, scales = config.recipe, residuals.scales
    x_kind, w_kind, bias_kind = residuals.x_kind, residuals.w_kind, residuals.bias_kind
    batch_shape = jax.tree.leaves(dy)[0].shape[:-1]
    dy = jax.tree.map(fused_outputs.to_matrix, dy)
    dy, dy_scale, dy_amax = _scale_of_dy(recipe, scales, dy_facts, dy)

    x_side = input_side(recipe)
    dy_columns: Operand | None = None
    if isinstance(residuals.w, FrozenSource):
        dy = concatenate_packed(dy)
        dy_sums = None if bias_kind is None else column_sums(dy)
        dy_rows, w_operand, dy = residuals.w.dgrad_operands(dy, recipe, residuals.key)
    else:
        assert residuals.x is not None
        w_operand = residuals.w.operand(weight_side(recipe), None)
        if 0 in (*batch_shape, *w_operand.shape):
            x_side = x_side._replace(shares_token_scales=False)  # there are no scales to share
        dy_rows, dy_columns, dy_sums = encode_cotangent(
            dy,
            recipe,
            key=residuals.key,
            scale=dy_scale,
            facts=dy_facts,
            shares_token_scales=x_side.shares_token_scales,
            x_codes_scale=residuals.x.codes_scale,
            with_sums=bias_kind is not None,
        )

    dx = matmul(
        dy_rows,
        w_operand,
        dtype=x_kind.dtype,
        fast="dgrad" in recipe.fast_accumulation,
        out_spec=merge_spec(x_kind.spec, (len(batch_shape), 1)),
    )
    dx = reshape(dx, (*batch_shape, dx.shape[-1]), x_kind.spec)
    if isinstance(residuals.w, FrozenSource):
        dx = observe_codes(dx, config.layer_scope, "dy", dy, dy_rows)
    dx_facts = CotangentFacts(
        array=dx,
        spec=recipe.spec("dy") if dy_amax is None else None,
        row_bounds=functools.partial(row_bounds, dy_rows, w_operand),
        codes=dy_rows if x_side.shares_token_scales and isinstance(dy_rows, QTensor) else None,
    )

    dw = None
    if residuals.x is not None and w_kind is not None and dy_columns is not None:
        dw = matmul(
            residuals.x.operand(x_side, dx_facts),
            dy_columns,
            dtype=w_kind.dtype,
            fast="wgrad" in recipe.fast_accumulation,
            out_spec=w_kind.spec,
            transposed=recipe.dy_wgrad == SAME and recipe.rotation is None,
        )
        is_row_operand = isinstance(dy_rows, QTensor)
        dw = observe_codes(
            dw,
            config.layer_scope,
            "dy",
            dy,
            dy_rows if is_row_operand else dy_columns,
            is_transposed=not is_row_operand,
        )
        has_both_layouts = isinstance(residuals.w, StepWeight) and residuals.w.layout_policy is LayoutPolicy.BOTH_ALWAYS
        if has_both_layouts or config.layer_scope is not None:
            # Compute dw now, not when the gradients of all iterations are stacked: XLA would keep its operands.
            dx, dw = lax.optimization_barrier((dx, dw))

    operand_cotangents = Operands(
        x=dx,
        w=dw,
        bias=None if bias_kind is None or dy_sums is None else bias_kind.cast_cotangent(dy_sums),
        scales=scales and Scales(amax_slot=dy_amax),
    )
    return operand_cotangents, dx_facts.predicted


def _scale_of_dy(
    recipe: Linear, scales: Scales | None, dy_facts: ArrayFacts, dy: PackedMatrix
) -> tuple[PackedMatrix, Array | None, Array | None]:
    """The scale of the output's gradient, if it is set before quantization, and its measured amax, if requested.

    Returns:
        `dy`, as one matrix if it had to be measured; the scale or None; the amax or None.

    Raises:
        ValueError: the slot of the amax does not vary over the mesh axes of `dy`.
    """
    expected, slot = (None, None) if scales is None else (scales.dy_amax, scales.amax_slot)
    check_slot_varies(slot, dy)
    if expected is None:
        return dy, dy_facts.scale_for(recipe.spec("dy"), recipe.spec("dy_wgrad")), None
    matrix = concatenate_packed(dy)
    amax = scaling.compute_amax(matrix)
    return matrix, expected_scale(recipe, expected, amax), amax


def check_slot_varies(slot: Array | None, dy: Any) -> None:
    """Raise ValueError if the slot of an amax does not vary over the mesh axes of `dy`."""
    if slot is not None and (axes := varying_axes(dy) - varying_axes(slot)):
        raise ValueError(
            f"the layer's arrays vary over the mesh axes {sorted(axes)}, but the amax_slot of its scaling does not. "
            "JAX would sum its cotangent, an amax, over these axes. Pass check_vma=False to jax.shard_map"
        )


def expected_scale(recipe: Linear, expected: Array, amax: Array) -> Array:
    """Return the scale of the output's gradient from its expected amax, or from its own where that is 0."""
    amax_for_scale = jnp.where(expected > 0, expected, recipe.strategy("dy").reduce_amax(amax))
    return scaling.to_scale(amax_for_scale, formats.get(recipe.quantized_spec("dy").format))
