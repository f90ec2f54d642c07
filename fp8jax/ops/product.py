"""The differentiable product under every linear: the three products of a recipe over two operand sources.

The input is quantized outside of the differentiated function, from its value alone: its codes then are an argument of
that function, several products that read one input share them, and the input itself is not saved. What is saved of each
matrix its source says (`fp8jax.ops.operand`); `_forward` puts that together with what else the backward pass needs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.core import derivatives, formats, scaling
from fp8jax.core.blocks import as_row
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.core.spec import TRANSPOSABLE
from fp8jax.ops import beside, cotangent, fused, gradients
from fp8jax.ops.choice import tell_saved, vary_alike, vary_over, varying
from fp8jax.ops.frozen import FrozenCodes, FrozenWeight, check_kinds
from fp8jax.ops.fused_reference import column_sums
from fp8jax.ops.gradients import Gradients
from fp8jax.ops.inputs import Input, gradient_key, input_source
from fp8jax.ops.matmul import Operand, matmul
from fp8jax.ops.operand import HeldWeight, Plain, Residual, Source, given, input_side, make_codes, weight_side
from fp8jax.ops.operand import QuantizedWeight as QuantizedWeight
from fp8jax.ops.quantize import quantize
from fp8jax.ops.saveable import PRODUCT
from fp8jax.ops.saved import NOTHING, Gradient, LaidOut, Origin, mapped_alike, to_bytes
from fp8jax.ops.sharding import Kind, OutSharding, merged, product_sharding, split
from fp8jax.recipes import linear_part


class Scales(NamedTuple):
    """Scales that a product is given: fp32 scalars, each None where the tensor itself has the scale.

    Attributes:
        x: scale of the input.
        w: scale of the weight.
        dy: largest magnitude expected of the output's gradient; 0 takes that of the gradient itself.
        slot: its cotangent becomes the largest magnitude of the output's gradient; given with `dy`.
    """

    x: Array | None = None
    w: Array | None = None
    dy: Array | None = None
    slot: Array | None = None


class How(NamedTuple):
    """What is static about a product.

    Attributes:
        recipe: what it computes with.
        through: whether its input came through another product.
        passes: whether it passes its input on.
        spec: the sharding of its result on a mesh with Explicit axes, else None.
        of_run: what is known of gradients.
        name: for messages.
        widths: of the arrays that the result is, side by side; None for one.
    """

    recipe: Linear
    through: bool
    passes: bool
    spec: tuple[Any, ...] | None
    of_run: Gradients
    name: str
    widths: tuple[int, ...] | None = None


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
    w: Residual | FrozenCodes
    kinds: tuple[Kind, Kind | None, Kind | None]
    key: Array | None
    scales: Scales | None
    token: Array | None


def product(
    x: Input,
    w: Array | FrozenWeight,
    recipe: Linear,
    key: Array | None,
    *,
    scales: Scales | None = None,
    quantized: QuantizedWeight | None = None,
    spec: tuple[Any, ...] | None = None,
    bias: Array | None = None,
    pass_on: Callable[[Array], None] | None = None,
    laid: LaidOut | None = None,
    widths: tuple[int, ...] | None = None,
) -> Any:
    """x @ w + bias with the products of a recipe.

    Args:
        x: (tokens, inputs), with what is known of it.
        w: (inputs, outputs); what is frozen has no gradient.
        recipe: what the products compute with.
        key: PRNG key for recipes that round stochastically.
        scales: given scales; None takes them from the tensors.
        quantized: what `quantize_weight` made of `w`; None quantizes `w` in each product.
        spec: on a mesh with Explicit axes, the sharding of the result's axes; None follows JAX's own rule.
        bias: (outputs,), added in the dtype of the result; or None.
        pass_on: is given `x.source` for what else reads it, whose gradients then are added in this backward pass.
        laid: what `w` is made of, to be saved in its place; or None.
        widths: of the arrays that the result is to be, side by side (`fp8jax.ops.beside`); None for one.

    Returns:
        (..., outputs), as `x.value` is (..., inputs), in the dtype of `x`; with widths several of them.

    Raises:
        ValueError: a key is missing, or as `of_weight`.
    """
    of_x = input_source(x, recipe, key, scales and scales.x)
    passes = pass_on is not None and x.value is x.source
    how: Any = {"passes": passes, "bias": bias, "laid": laid, "widths": widths}
    y, passed = multiply(x.value, of_x, w, recipe, key, scales, quantized, spec, **how)
    if pass_on is not None and passed is not None:
        pass_on(passed)
    return y


def multiply(
    value: Array,
    of_x: Source,
    w: Array | FrozenWeight,
    recipe: Linear,
    key: Array | None,
    scales: Scales | None,
    quantized: QuantizedWeight | None,
    spec: tuple[Any, ...] | None = None,
    through: Array | None = None,
    passes: bool = False,
    bias: Array | None = None,
    laid: LaidOut | None = None,
    widths: tuple[int, ...] | None = None,
) -> tuple[Any, Array | None]:
    """`product` of a source, as one of several of one input, whose gradients are summed in their backward passes.

    Args:
        value: the array that gradients flow to. of_x: where its codes come from, as `input_source` says.
        through: the input as the product before passed it on; gradients flow to it.
        passes: whether to pass it on.
        bias, laid, widths: as of `product`.

    Returns:
        The product, and the input for the next one; or None.
    """
    of_run, plain = gradients.current(), quantized is None and not isinstance(w, FrozenWeight)
    if plain and scales is None and of_run.unrolled:
        quantized = _in_one_pass(w, recipe)  # type: ignore[arg-type]
    of_w = of_weight(w, recipe, scale=scales and scales.w, quantized=quantized)
    if through is not None and jax.typeof(through) != jax.typeof(value):  # it may vary over more mesh axes
        through = None
    frozen, spec = isinstance(w, FrozenWeight), spec or output_spec(value, w, None)
    name = derivatives.named(f"a product of {value.shape} and {'a frozen weight' if frozen else w.shape}")
    noise = gradient_key(recipe, key, ("dy",) if frozen else ("dy", "dy_wgrad"))
    value, through, *others = vary_alike(value, through, None if isinstance(w, FrozenWeight) else w, bias)  # type: ignore[assignment]
    if laid is not None and isinstance(of_w, Plain):
        axes = frozenset(varying(value))
        of_w = Plain(of_w.scale, *laid.then(lambda w: vary_over(w, axes)))
    token = derivatives.token(name, value, through, *others)
    how = How(recipe, through is not None, passes, spec, of_run, name, widths)
    y, passed = _product(how, value, through, *others, of_x, of_w, noise, scales, token)
    return jax.tree.map(lambda y: derivatives.passed("a product", y, value, through, *others), y), passed


def of_weight(
    w: Array | FrozenWeight, recipe: Linear, *, scale: Array | None = None, quantized: QuantizedWeight | None = None
) -> Source | FrozenCodes:
    """The source of a weight (inputs, outputs), and with it what the product saves of it.

    Raises:
        ValueError: `quantized` is of a weight of another shape or recipe, or of one that is frozen; or the recipe's
            codes are integers and a frozen weight's are not, or the reverse.
    """
    if isinstance(w, FrozenWeight):
        if quantized is not None:
            raise ValueError("a frozen weight is quantized already: leave out quantized=")
        check_kinds(recipe, w.codes.spec)
        return FrozenCodes(w.codes, w.turned)
    if quantized is None:
        return Plain(scale)
    shape, *specs = quantized.dgrad.shape, quantized.forward.spec, quantized.dgrad.spec
    if shape != w.shape or specs != [recipe.spec("w"), recipe.spec("w_dgrad")]:
        wanted = f"{w.shape} of specs {recipe.w} and {recipe.w_dgrad}"
        raise ValueError(f"a weight {wanted} was given quantized as {shape}, {specs[0]} and {specs[1]}")
    return HeldWeight(quantized)


def output_spec(x: Array, w: Array | FrozenWeight, out_sharding: OutSharding) -> tuple[Any, ...] | None:
    """The sharding of x @ w: see `fp8jax.ops.sharding.product_sharding`."""
    matrix, axis = (w.codes, 0 if w.turned else 1) if isinstance(w, FrozenWeight) else (w, 0)
    return product_sharding(x, matrix, (((x.ndim - 1,), (axis,)), ((), ())), out_sharding)  # type: ignore[no-any-return]


def quantize_weight(w: Array, *, recipe: Recipe | Linear | str, scale: Array | None = None) -> QuantizedWeight:
    """A weight as the products of a recipe read it, for `fp8jax.linear` to use in every call of a step.

    Under gradient accumulation the microbatches of a step then share its scales and codes, of the weight and of its
    transposed copy, one byte a parameter each:

        quantized = fp8jax.quantize_weight(w, recipe=recipe)
        y = fp8jax.linear(x, w, recipe=recipe, quantized=quantized)

    Args:
        w: (inputs, outputs), any floating dtype. Gradients flow to the `w` that `linear` is given, not to this one.
        recipe: a `Recipe`, its part `Linear`, or a preset's name; it quantizes the weight in both products.
        scale: fp32 scalar, for granularity "tensor" and the forward product's format; None takes it from `w`.

    Returns:
        Codes with their scales, rounded to nearest; use it only while `w` stays the same.

    Raises:
        ValueError: the recipe has a product that reads the weight itself.
    """
    part = linear_part(recipe)
    forward, dgrad = part.spec("w"), part.spec("w_dgrad")
    if forward is None or dgrad is None:
        raise ValueError(f"the recipe computes with w={part.w!r}, w_dgrad={part.w_dgrad!r}: not quantized in both")
    if forward == dgrad and forward.granularity in TRANSPOSABLE:
        rows, transposed = quantize(lax.stop_gradient(w), dgrad, SAME, scale=scale, strategy=part.own_strategy("w"))
        assert rows is not None
        assert transposed is not None
        return QuantizedWeight(to_bytes(transposed), to_bytes(rows))
    make = functools.partial(make_codes, w, strategy=part.own_strategy("w"))
    return QuantizedWeight(make(forward, transposed=True, scale=scale), make(dgrad, scale=given(scale, forward, dgrad)))


def _in_one_pass(w: Array, recipe: Linear) -> QuantizedWeight | None:
    """What `quantize_weight` makes of a matrix (inputs, outputs), if one pass over it makes both copies; else None."""
    spec = recipe.spec("w")
    if spec is None or spec != recipe.spec("w_dgrad") or spec.rounding != "nearest":
        return None
    return quantize_weight(w, recipe=recipe) if spec.granularity in TRANSPOSABLE else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: How, *operands: Any) -> tuple[Any, Array | None]:
    return _forward(how, *operands)[0]


def _forward(
    how: How,
    value: Array,
    through: Array | None,
    w: Array | None,
    bias: Array | None,
    of_x: Source,
    of_w: Source | FrozenCodes,
    key: Array | None,
    scales: Scales | None,
    token: Array | None,
) -> tuple[tuple[Any, Array | None], Residuals]:
    recipe, x = how.recipe, fused.matrix(value)
    sides = input_side(recipe), weight_side(recipe)
    if not recipe.quantized and recipe.spec("saved") is None and w is not None:
        token = None  # forward mode has met it; a product in 16 bits may be differentiated twice
    values = (x, w) if token is None else lax.stop_gradient((x, w))
    rows, columns = of_x.forward(values[0], sides[0]), of_w.forward(values[1], sides[1])  # type: ignore[arg-type]
    saved = Residuals(
        None if w is None else of_x.residual(x, rows, sides[0]),
        of_w.residual(w, columns, sides[1]),  # type: ignore[arg-type]
        (Kind.of(value), w if w is None else Kind.of(w), None if bias is None else Kind.of(bias)),
        key,
        scales,
        token,
    )
    spec, ys = merged(how.spec, (value.ndim - 1, 1)), list[Array]()
    for of_columns, of_bias in beside.parts(columns, bias, how.widths):  # type: ignore[arg-type]
        y = matmul(rows, of_columns, dtype=x.dtype, fast="forward" in recipe.fast_accumulation, spec=spec)
        # On the matrix, so that it is part of the product: cuBLASLt adds a row.
        y = y if of_bias is None else y + as_row(of_bias.astype(y.dtype), 2)
        ys.append(checkpoint_name(split(y, (*value.shape[:-1], y.shape[-1]), how.spec), PRODUCT))
    if token is not None:
        ys = derivatives.once(how.name, ys, token)
    held, passed = value if through is None else through, None
    if how.passes:
        passed = mapped_alike(held, ys[0])
    if how.through or how.passes:
        ys = [mapped_alike(y, held) for y in ys]
    return (ys[0] if how.widths is None else tuple(ys), passed), saved


def _backward(how: How, saved: Residuals, cotangents: tuple[Any, Array | None]) -> tuple[Any, ...]:
    origin, token = how.of_run.find(cotangents[0]) or NOTHING, saved.token
    if token is None:
        results, foreseen = _gradients(how, saved, origin, *cotangents)
    else:
        saved, values = lax.stop_gradient((saved, cotangents))
        results, foreseen = _gradients(how, saved, origin, *values)
        results = derivatives.once(how.name, results, (cotangents, token))
    if foreseen is not None:
        how.of_run.note(results[1 if how.through else 0], Origin(foreseen=foreseen))
    return results


def _gradients(
    how: How, saved: Residuals, origin: Origin, dy: beside.Matrix, others: Array | None
) -> tuple[tuple[Any, ...], Any]:
    """The cotangents of all operands, and what is known of those that follow from that of the input."""
    recipe, (x, w, bias), key = how.recipe, saved.kinds, saved.key
    scales: Any = saved.scales
    lead = jax.tree.leaves(dy)[0].shape[:-1]
    gradient = recipe.spec("dy")
    expected, slot = (None, None) if scales is None else (scales.dy, scales.slot)
    dy_scale = None if expected is not None else origin.scale_for(gradient, recipe.spec("dy_wgrad"))
    dy = jax.tree.map(fused.matrix, dy)
    if slot is not None and (axes := varying(dy) - varying(slot)):
        raise ValueError(
            f"the layer's arrays vary over the mesh axes {sorted(axes)} and the slot of its scaling does not: JAX "
            f"would sum its cotangent, a largest magnitude, over them; give jax.shard_map check_vma=False"
        )
    seen = None
    if expected is not None:
        dy = beside.joined(dy)
        seen = scaling.largest_magnitude(dy)
        assert gradient is not None
        largest = jnp.where(expected > 0, expected, recipe.strategy("dy").settle(seen))
        dy_scale = scaling.to_scale(largest, formats.get(gradient.format))
    side = input_side(recipe)
    dy_columns: Operand | None = None
    if isinstance(saved.w, FrozenCodes):
        dy = beside.joined(dy)
        dy_rows, weight = saved.w.with_gradient(dy, recipe, key)
        total = None if bias is None else column_sums(dy)
    else:
        assert saved.x is not None
        weight = saved.w.operand(weight_side(recipe), None)
        if 0 in (*lead, *weight.shape):
            side = side._replace(shared=False)  # there are no scales to share
        dy_rows, dy_columns, total = cotangent.quantized(
            dy,
            recipe,
            key=key,
            scale=dy_scale,
            origin=origin,
            shared=side.shared,
            tokens=saved.x.token_scale,
            sums=bias is not None,
        )
    rows_and_inputs = merged(x.spec, (len(lead), 1))
    dx = matmul(dy_rows, weight, dtype=x.dtype, fast="dgrad" in recipe.fast_accumulation, spec=rows_and_inputs)
    dx = split(dx, (*lead, dx.shape[-1]), x.spec)
    dx = dx if others is None else dx + others
    bounds = functools.partial(cotangent.row_bounds, dy_rows, weight, others)
    of_dx = Gradient(
        dx,
        gradient if expected is None else None,
        bounds,
        dy_rows if side.shared and isinstance(dy_rows, QTensor) else None,
    )
    dw = None
    if saved.x is not None and w is not None and dy_columns is not None:
        columns = saved.x.operand(side, of_dx)
        how_wgrad: Any = {"fast": "wgrad" in recipe.fast_accumulation, "transposed": recipe.dy_wgrad == SAME}
        dw = matmul(columns, dy_columns, dtype=w.dtype, spec=w.spec, **how_wgrad)
    if dw is not None and how.of_run.unrolled:
        # Now, not when the gradients of all turns are stacked: until then XLA would keep what this product reads.
        dx, dw = lax.optimization_barrier((dx, dw))
    inputs = (None, dx) if how.through else (dx, None)
    db = None if bias is None or total is None else bias.cast(total)
    slots = scales and Scales(slot=seen)  # type: ignore[call-arg]
    return (*inputs, dw, db, None, None, None, slots, None), of_dx.foreseen


def _differentiated(how: How, *operands: Any) -> tuple[tuple[Array, Array | None], Residuals]:
    """`_forward`, where its backward pass follows."""
    results, saved = _forward(how, *operands)
    value, _, w, *_ = operands
    if w is not None:
        tell_saved(f"of the input of a linear {value.shape} x {w.shape}: {saved.x}")
    return results, saved


_product.defvjp(_differentiated, _backward)
