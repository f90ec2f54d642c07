"""The differentiable product under every linear: the three products of a recipe over two operand sources.

The input is quantized outside of the differentiated function, from its value alone: its codes then are an argument of
that function, several products that read one input share them, and the input itself is not saved. What is saved of each
matrix its source says (`fp8jax.ops.products.operands`); `_forward` puts that together with what else the backward pass
needs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.core import derivatives, formats, scaling
from fp8jax.core.blocks import expand_to_rank
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME, Linear
from fp8jax.ops.autodiff import gradient_facts
from fp8jax.ops.autodiff.checkpointing import PRODUCT
from fp8jax.ops.autodiff.gradient_facts import GradientFacts
from fp8jax.ops.autodiff.residuals import NO_FACTS, ArrayFacts, CotangentFacts, StoredWeight, match_vmap_axes
from fp8jax.ops.dispatch.choice import cast_varying_over, match_varying_axes, record_residual, varying_axes
from fp8jax.ops.dispatch.sharding import DtypeAndSharding, OutSharding, merge_spec, product_sharding, reshape
from fp8jax.ops.matmul.matmul import Operand, matmul
from fp8jax.ops.products import cotangent
from fp8jax.ops.products.frozen_weights import FrozenSource, FrozenWeight
from fp8jax.ops.products.operands import (
    Input,
    QuantizeHere,
    Residual,
    Source,
    gradient_key,
    input_side,
    input_source,
    weight_side,
)
from fp8jax.ops.products.operands import QuantizedWeight as QuantizedWeight
from fp8jax.ops.products.weights import choose_weight_source, quantize_both_for_grad, quantize_both_layouts
from fp8jax.ops.quantization import fused_outputs, packed
from fp8jax.ops.quantization.fused_reference import column_sums


class Scales(NamedTuple):
    """Scales that a product is given: fp32 scalars, each None where the tensor itself has the scale.

    Attributes:
        x: scale of the input.
        w: scale of the weight.
        dy_amax: largest magnitude expected of the output's gradient; 0 takes that of the gradient itself.
        amax_slot: its cotangent becomes the largest magnitude of the output's gradient; given with `dy_amax`.
    """

    x: Array | None = None
    w: Array | None = None
    dy_amax: Array | None = None
    amax_slot: Array | None = None


class ProductConfig(NamedTuple):
    """What is static about a product.

    Attributes:
        recipe: what it computes with.
        has_passthrough: whether its input came through another product.
        returns_input: whether it passes its input on.
        out_spec: the sharding of its result on a mesh with Explicit axes, else None.
        gradient_facts: what is known of gradients.
        name: for messages.
        split_sizes: of the arrays that the result is, side by side; None for one.
    """

    recipe: Linear
    has_passthrough: bool
    returns_input: bool
    out_spec: tuple[Any, ...] | None
    gradient_facts: GradientFacts
    name: str
    split_sizes: tuple[int, ...] | None = None


class Residuals(NamedTuple):
    """What a product saves for its backward pass.

    Attributes:
        x, w: of its input and its weight, what their sources say; of the input of a frozen weight nothing.
        kinds: dtype and sharding of both, but of a frozen weight; and of the bias, if there is one.
        key: for gradients rounded stochastically.
        scales: given ones.
        token: of the arrays that gradients flow to; None where nothing is in 8 bits.
    """

    x: Residual | None
    w: Residual | FrozenSource
    kinds: tuple[DtypeAndSharding, DtypeAndSharding | None, DtypeAndSharding | None]
    key: Array | None
    scales: Scales | None
    token: Array | None


def recipe_dot(
    x: Input,
    w: Array | FrozenWeight,
    recipe: Linear,
    key: Array | None,
    *,
    scales: Scales | None = None,
    quantized: QuantizedWeight | None = None,
    out_spec: tuple[Any, ...] | None = None,
    bias: Array | None = None,
    on_passthrough: Callable[[Array], None] | None = None,
    stored_weight: StoredWeight | None = None,
    split_sizes: tuple[int, ...] | None = None,
) -> Any:
    """x @ w + bias with the products of a recipe.

    Args:
        x: (tokens, inputs), with what is known of it.
        w: (inputs, outputs); what is frozen has no gradient.
        recipe: what the products compute with.
        key: PRNG key for recipes that round stochastically.
        scales: given scales; None takes them from the tensors.
        quantized: what `quantize_weight` made of `w`; None quantizes `w` in each product.
        out_spec: on a mesh with Explicit axes, the sharding of the result's axes; None follows JAX's own rule.
        bias: (outputs,), added in the dtype of the result; or None.
        on_passthrough: is given `x.source` for what else reads it, whose gradients then are added in this backward
            pass.
        stored_weight: what `w` is made of, to be saved in its place; or None.
        split_sizes: of the arrays that the result is to be, side by side (`fp8jax.ops.quantization.packed`); None for
            one.

    Returns:
        (..., outputs), as `x.value` is (..., inputs), in the dtype of `x`; with `split_sizes` several of them.

    Raises:
        ValueError: a key is missing, or as `choose_weight_source`.
    """
    x_source = input_source(x, recipe, key, scales and scales.x)
    returns_input = on_passthrough is not None and x.value is x.source
    y, passthrough = recipe_dot_from_source(
        x.value,
        x_source,
        w,
        recipe,
        key,
        scales,
        quantized,
        out_spec,
        returns_input=returns_input,
        bias=bias,
        stored_weight=stored_weight,
        split_sizes=split_sizes,
    )
    if on_passthrough is not None and passthrough is not None:
        on_passthrough(passthrough)
    return y


def recipe_dot_from_source(
    x: Array,
    x_source: Source,
    w: Array | FrozenWeight,
    recipe: Linear,
    key: Array | None,
    scales: Scales | None,
    quantized: QuantizedWeight | None,
    out_spec: tuple[Any, ...] | None = None,
    passthrough: Array | None = None,
    returns_input: bool = False,
    bias: Array | None = None,
    stored_weight: StoredWeight | None = None,
    split_sizes: tuple[int, ...] | None = None,
) -> tuple[Any, Array | None]:
    """`recipe_dot` of a source, as one of several of one input, whose gradients are summed in their backward passes.

    Args:
        x: the array that gradients flow to. x_source: where its codes come from, as `input_source` says.
        passthrough: the input as the product before passed it on; gradients flow to it.
        returns_input: whether to pass it on.
        bias, stored_weight, split_sizes: as of `recipe_dot`.

    Returns:
        The product, and the input for the next one; or None.
    """
    run_facts, quantizes_here = gradient_facts.current(), quantized is None and not isinstance(w, FrozenWeight)
    if quantizes_here and scales is None and run_facts.is_unrolled:
        quantized = quantize_both_layouts(w, recipe)  # type: ignore[arg-type]
    w_source = choose_weight_source(w, recipe, scale=scales and scales.w, quantized=quantized)
    if passthrough is not None and jax.typeof(passthrough) != jax.typeof(x):  # it may vary over more mesh axes
        passthrough = None
    is_frozen, out_spec = isinstance(w, FrozenWeight), out_spec or output_spec(x, w, None)
    name = derivatives.qualified_op_name(f"a product of {x.shape} and {'a frozen weight' if is_frozen else w.shape}")
    dy_key = gradient_key(recipe, key, ("dy",) if is_frozen else ("dy", "dy_wgrad"))
    trained_w = None if isinstance(w, FrozenWeight) else w
    x, passthrough, *weight_and_bias = match_varying_axes(x, passthrough, trained_w, bias)  # type: ignore[assignment]
    if stored_weight is not None and isinstance(w_source, QuantizeHere):
        axes = frozenset(varying_axes(x))
        w_source = QuantizeHere(w_source.scale, *stored_weight.with_step(lambda w: cast_varying_over(w, axes)))
    token = derivatives.second_order_guard(name, x, passthrough, *weight_and_bias)
    config = ProductConfig(recipe, passthrough is not None, returns_input, out_spec, run_facts, name, split_sizes)
    y, next_passthrough = _product(config, x, passthrough, *weight_and_bias, x_source, w_source, dy_key, scales, token)
    return jax.tree.map(
        lambda y: derivatives.check_differentiable_dtypes("a product", y, x, passthrough, *weight_and_bias), y
    ), next_passthrough


def output_spec(x: Array, w: Array | FrozenWeight, out_sharding: OutSharding) -> tuple[Any, ...] | None:
    """The sharding of x @ w: see `fp8jax.ops.dispatch.sharding.product_sharding`."""
    matrix, axis = (w.codes, 0 if w.transposed else 1) if isinstance(w, FrozenWeight) else (w, 0)
    return product_sharding(x, matrix, (((x.ndim - 1,), (axis,)), ((), ())), out_sharding)  # type: ignore[no-any-return]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(config: ProductConfig, *operands: Any) -> tuple[Any, Array | None]:
    return _forward(config, *operands)[0]


def _forward(
    config: ProductConfig,
    value: Array,
    passthrough: Array | None,
    w: Array | None,
    bias: Array | None,
    x_source: Source,
    w_source: Source | FrozenSource,
    key: Array | None,
    scales: Scales | None,
    token: Array | None,
) -> tuple[tuple[Any, Array | None], Residuals]:
    recipe, x = config.recipe, fused_outputs.to_matrix(value)
    sides = input_side(recipe), weight_side(recipe)
    if not recipe.is_quantized and recipe.spec("x_residual") is None and w is not None:
        token = None  # forward mode has met it; a product in 16 bits may be differentiated twice
    values = (x, w) if token is None else lax.stop_gradient((x, w))
    x_operand, w_operand = x_source.forward(values[0], sides[0]), w_source.forward(values[1], sides[1])  # type: ignore[arg-type]
    residuals = Residuals(
        None if w is None else x_source.residual(x, x_operand, sides[0]),
        w_source.residual(w, w_operand, sides[1]),  # type: ignore[arg-type]
        (
            DtypeAndSharding.from_array(value),
            w if w is None else DtypeAndSharding.from_array(w),
            None if bias is None else DtypeAndSharding.from_array(bias),
        ),
        key,
        scales,
        token,
    )
    matrix_spec, ys = merge_spec(config.out_spec, (value.ndim - 1, 1)), list[Array]()
    for w_section, bias_section in packed.split_weight(w_operand, bias, config.split_sizes):  # type: ignore[arg-type]
        y = matmul(
            x_operand, w_section, dtype=x.dtype, fast="forward" in recipe.fast_accumulation, out_spec=matrix_spec
        )
        # On the matrix, so that it is part of the product: cuBLASLt adds a row.
        y = y if bias_section is None else y + expand_to_rank(bias_section.astype(y.dtype), 2)
        ys.append(checkpoint_name(reshape(y, (*value.shape[:-1], y.shape[-1]), config.out_spec), PRODUCT))
    if token is not None:
        ys = derivatives.differentiable_once(config.name, ys, token)
    passthrough_in, passthrough_out = value if passthrough is None else passthrough, None
    if config.returns_input:
        passthrough_out = match_vmap_axes(passthrough_in, ys[0])
    if config.has_passthrough or config.returns_input:
        ys = [match_vmap_axes(y, passthrough_in) for y in ys]
    return (ys[0] if config.split_sizes is None else tuple(ys), passthrough_out), residuals


def _product_bwd(config: ProductConfig, residuals: Residuals, cotangents: tuple[Any, Array | None]) -> tuple[Any, ...]:
    dy_facts, token = config.gradient_facts.pop(cotangents[0]) or NO_FACTS, residuals.token
    if token is None:
        results, predicted = _gradients(config, residuals, dy_facts, *cotangents)
    else:
        residuals, values = lax.stop_gradient((residuals, cotangents))
        results, predicted = _gradients(config, residuals, dy_facts, *values)
        results = derivatives.differentiable_once(config.name, results, (cotangents, token))
    if predicted is not None:
        config.gradient_facts.attach(results[1 if config.has_passthrough else 0], ArrayFacts(predicted=predicted))
    return results


def _gradients(
    config: ProductConfig,
    residuals: Residuals,
    dy_facts: ArrayFacts,
    dy: packed.PackedMatrix,
    passthrough_cotangent: Array | None,
) -> tuple[tuple[Any, ...], Any]:
    """The cotangents of all operands, and what is known of those that follow from that of the input."""
    recipe, (x, w, bias), key = config.recipe, residuals.kinds, residuals.key
    scales = residuals.scales
    batch_shape = jax.tree.leaves(dy)[0].shape[:-1]
    dy_spec = recipe.spec("dy")
    expected_amax, amax_slot = (None, None) if scales is None else (scales.dy_amax, scales.amax_slot)
    dy_scale = None if expected_amax is not None else dy_facts.scale_for(dy_spec, recipe.spec("dy_wgrad"))
    dy = jax.tree.map(fused_outputs.to_matrix, dy)
    if amax_slot is not None and (axes := varying_axes(dy) - varying_axes(amax_slot)):
        raise ValueError(
            f"the layer's arrays vary over the mesh axes {sorted(axes)} and the amax_slot of its scaling does not: JAX "
            f"would sum its cotangent, a largest magnitude, over them; give jax.shard_map check_vma=False"
        )
    amax = None
    if expected_amax is not None:
        dy = packed.concatenated(dy)
        amax = scaling.compute_amax(dy)
        assert dy_spec is not None
        amax_for_scale = jnp.where(expected_amax > 0, expected_amax, recipe.strategy("dy").reduce_amax(amax))
        dy_scale = scaling.to_scale(amax_for_scale, formats.get(dy_spec.format))
    x_side = input_side(recipe)
    dy_columns: Operand | None = None
    if isinstance(residuals.w, FrozenSource):
        dy = packed.concatenated(dy)
        dy_rows, w_operand = residuals.w.dgrad_operands(dy, recipe, key)
        dy_sums = None if bias is None else column_sums(dy)
    else:
        assert residuals.x is not None
        w_operand = residuals.w.operand(weight_side(recipe), None)
        if 0 in (*batch_shape, *w_operand.shape):
            x_side = x_side._replace(shares_token_scales=False)  # there are no scales to share
        dy_rows, dy_columns, dy_sums = cotangent.encode_cotangent(
            dy,
            recipe,
            key=key,
            scale=dy_scale,
            facts=dy_facts,
            shares_token_scales=x_side.shares_token_scales,
            x_token_scale=residuals.x.token_scale,
            with_sums=bias is not None,
        )
    dx_matrix_spec = merge_spec(x.spec, (len(batch_shape), 1))
    dx = matmul(dy_rows, w_operand, dtype=x.dtype, fast="dgrad" in recipe.fast_accumulation, out_spec=dx_matrix_spec)
    dx = reshape(dx, (*batch_shape, dx.shape[-1]), x.spec)
    dx = dx if passthrough_cotangent is None else dx + passthrough_cotangent
    row_bounds_fn = functools.partial(cotangent.row_bounds, dy_rows, w_operand, passthrough_cotangent)
    dx_facts = CotangentFacts(
        dx,
        dy_spec if expected_amax is None else None,
        row_bounds_fn,
        dy_rows if x_side.shares_token_scales and isinstance(dy_rows, QTensor) else None,
    )
    dw = None
    if residuals.x is not None and w is not None and dy_columns is not None:
        x_operand = residuals.x.operand(x_side, dx_facts)
        dw = matmul(
            x_operand,
            dy_columns,
            dtype=w.dtype,
            fast="wgrad" in recipe.fast_accumulation,
            out_spec=w.spec,
            transposed=recipe.dy_wgrad == SAME,
        )
    if dw is not None and config.gradient_facts.is_unrolled:
        # Now, not when the gradients of all turns are stacked: until then XLA would keep what this product reads.
        dx, dw = lax.optimization_barrier((dx, dw))
    input_cotangents = (None, dx) if config.has_passthrough else (dx, None)
    db = None if bias is None or dy_sums is None else bias.cast_cotangent(dy_sums)
    scales_cotangent = scales and Scales(amax_slot=amax)  # type: ignore[call-arg]
    return (*input_cotangents, dw, db, None, None, None, scales_cotangent, None), dx_facts.predicted


def _product_fwd(config: ProductConfig, *operands: Any) -> tuple[tuple[Array, Array | None], Residuals]:
    """`_forward`, where its backward pass follows."""
    value, passthrough, w, bias, x_source, w_source, *remaining = operands
    if w is not None and config.gradient_facts.outside_loops:
        w_source = quantize_both_for_grad(w_source, w, config.recipe)
    results, residuals = _forward(config, value, passthrough, w, bias, x_source, w_source, *remaining)
    if w is not None:
        record_residual(f"of the input of a linear {value.shape} x {w.shape}: {residuals.x}")
    return results, residuals


_product.defvjp(_product_fwd, _product_bwd)
