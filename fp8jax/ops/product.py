"""The differentiable product under every linear: three products of a recipe, and what is saved between them.

The input is quantized outside of the differentiated function, from its value alone: its codes then are an argument of
that function, several products that read one input share them, and the input itself is not saved. Where the input is
the result of an operation that can make it again from what that keeps, the codes are not saved either.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops import fused, microscaled
from fp8jax.ops.choice import vary_alike, varying
from fp8jax.ops.matmul import Operand, matmul
from fp8jax.ops.quantize import quantize, transpose
from fp8jax.ops.recent import Recent, Same
from fp8jax.ops.saved import ITSELF, Gradient, Remade, from_bytes, mapped_alike, origins, to_bytes
from fp8jax.ops.sharding import Kind, merged, product_sharding, rows_of, split
from fp8jax.recipes import linear_part


class QuantizedWeight(NamedTuple):
    """A weight as the products read it, made once for all calls of a step by `quantize_weight`.

    Codes are kept as bytes, which unlike FP8 arrays may enter a differentiated function.

    Attributes:
        forward: (outputs, inputs).
        dgrad: (inputs, outputs).
    """

    forward: QTensor
    dgrad: QTensor


class Scales(NamedTuple):
    """What delayed scaling gives to a product: fp32 scalars.

    Attributes:
        x: scale of the input.
        w: scale of the weight.
        dy: largest magnitude expected of the output's gradient; 0 takes that of the gradient itself.
        slot: its cotangent becomes the largest magnitude of the output's gradient.
    """

    x: Array
    w: Array
    dy: Array
    slot: Array


class How(NamedTuple):
    """What is static about a product.

    Attributes:
        recipe: what it computes with.
        remade: how to make its input again, or None.
        through: whether its input came through another product.
        passes: whether it passes its input on.
        spec: the sharding of its result on a mesh with Explicit axes, else None.
    """

    recipe: Linear
    remade: Remade | None
    through: bool
    passes: bool
    spec: tuple[Any, ...] | None


def product(
    x: Array,
    w: Array,
    recipe: Linear,
    key: Array | None,
    source: Array | None = None,
    scales: Scales | None = None,
    quantized: QuantizedWeight | None = None,
    spec: tuple[Any, ...] | None = None,
    view: bool = True,
) -> Array:
    """x @ w with the products of a recipe.

    Args:
        x: (tokens, inputs).
        w: (inputs, outputs).
        recipe: what the products compute with.
        key: PRNG key for recipes that round stochastically.
        source: the user's array that `x` is made of, by which products that share an input are known.
        scales: given scales; None takes them from the tensors.
        quantized: what `quantize_weight` made of `w`; None quantizes `w` in each product.
        spec: on a mesh with Explicit axes, the sharding of the result's axes; None follows JAX's own rule.
        view: whether `source` is (..., inputs); it may have other axes.

    Returns:
        (..., outputs), as `source` is (..., inputs), else (tokens, outputs), in the dtype of `x`.

    Raises:
        ValueError: a key is missing, or `quantized` is of a weight of another shape or recipe.
    """
    return threaded(x, w, recipe, key, source, scales, quantized, spec, view)[0]


def threaded(
    x: Array,
    w: Array,
    recipe: Linear,
    key: Array | None,
    source: Array | None,
    scales: Scales | None,
    quantized: QuantizedWeight | None,
    spec: tuple[Any, ...] | None = None,
    view: bool = True,
    through: Array | None = None,
    passes: bool = False,
) -> tuple[Array, Array | None]:
    """`product` as one of several of one input, whose gradients are summed in their backward passes.

    Args:
        through: the input as the product before passed it on; gradients flow to it.
        passes: whether to pass it on.

    Returns:
        The product, and the input for the next one; or None.
    """
    kept, gradient = recipe.spec("saved"), recipe.spec("dy")
    if quantized is not None:
        _check_weight(quantized, w, recipe)
    value = x
    if source is not None and view:
        x, value = fused.pass_on(source, x), source
    saved = None
    if kept is not None:
        subkey = _subkey(key, kept, "saved")
        if scales is None:
            named = x if source is None else source
            given = fused.given_scale(named, kept)
            make = functools.partial(_save, x, kept, recipe.scaling, subkey, given)
            use = (kept, recipe.scaling, x.shape, None if subkey is None else Same(key))
            saved = _inputs.get(named, use, make)
        else:
            saved = _save(x, kept, recipe.scaling, subkey, None if scales is None else scales.x)
    # Codes rounded stochastically can be made again only with their key.
    origin = None if source is None or (kept and kept.rounding == "stochastic") else origins.find(source)
    remade, made_of = (None, None) if origin is None else origin
    if remade == ITSELF:
        made_of = source
    if through is not None and jax.typeof(through) != jax.typeof(value):  # it may vary over more mesh axes
        through = None
    value, through, w = vary_alike(value, through, w)  # type: ignore[assignment]
    noisy = [s for s in (gradient, recipe.spec("dy_wgrad")) if s is not None and s.rounding == "stochastic"]
    noise = _subkey(key, noisy[0], "dy") if noisy else None
    spec = spec or product_sharding(value, w, (((value.ndim - 1,), (0,)), ((), ())))
    how = How(recipe, remade, through is not None, passes, spec)
    return _product(how, value, through, w, saved, noise, scales, quantized, made_of)


def quantize_weight(w: Array, *, recipe: Recipe | Linear | str, scale: Array | None = None) -> QuantizedWeight:
    """A weight as the products of a recipe read it, for `fp8jax.linear` to use in every call of a step.

    Under gradient accumulation the microbatches of a step then share its scales and codes, of the weight and of its
    transposed copy, one byte a parameter each:

        quantized = fp8jax.quantize_weight(w, recipe=recipe)
        y = fp8jax.linear(x, w, recipe=recipe, quantized=quantized)

    Args:
        w: (inputs, outputs), any floating dtype. Gradients flow to the `w` that `linear` is given, not to this one.
        recipe: a `Recipe`, its part `Linear`, or a preset's name; it quantizes the weight in both products.
        scale: fp32 scalar, for granularity "tensor"; None takes it from `w`.

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
        rows, turned = quantize(lax.stop_gradient(w), dgrad, SAME, scale=scale, strategy=_strategy(part.scaling))
        assert rows is not None
        assert turned is not None
        return QuantizedWeight(to_bytes(turned), to_bytes(rows))
    save = functools.partial(_save, w, how=part.scaling, scale=scale)
    return QuantizedWeight(save(forward, turned=True), save(dgrad))


def _check_weight(quantized: QuantizedWeight, w: Array, recipe: Linear) -> None:
    found = (quantized.dgrad.shape, quantized.forward.spec, quantized.dgrad.spec)
    if found != (w.shape, recipe.spec("w"), recipe.spec("w_dgrad")):
        specs = f"specs {recipe.w} and {recipe.w_dgrad}"
        raise ValueError(f"a weight {w.shape} of {specs} was given quantized as {found[0]}, {found[1]} and {found[2]}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: How, *operands: Any) -> tuple[Array, Array | None]:
    return _forward(how, *operands)[0]


def _forward(
    how: How,
    value: Array,
    through: Array | None,
    w: Array,
    saved: QTensor | None,
    key: Array | None,
    scales: Scales | None,
    quantized: QuantizedWeight | None,
    made_of: Any,
) -> tuple[tuple[Array, Array | None], Any]:
    recipe = how.recipe
    x = fused.pass_on(value, fused.matrix(value))
    quantizer = functools.partial(_operand, how=recipe.scaling)
    if saved is not None and recipe.saved == SAME:
        rows: Operand = from_bytes(saved)
    else:
        rows = quantizer(x, recipe.spec("x"), scale=scales and scales.x)
    if quantized is None:
        columns: Operand = quantizer(w, recipe.spec("w"), scale=scales and scales.w, turned=True)
    else:
        columns = from_bytes(quantized.forward)
    if how.remade is None:
        kept: Any = x if saved is None else saved
    else:
        # One scale is cheaper to keep than to find again (COAT, section D).
        kept = made_of, saved.scale if saved is not None and saved.spec.granularity in ("tensor", "token") else None
    # Of a weight that is given as codes no more is needed, as of the input.
    kinds = Kind.of(value), Kind.of(w)
    weight = w if quantized is None else None
    w_scale = scales and scales.w
    if quantized is None and isinstance(columns, QTensor) and _shares_scale(recipe):
        w_scale = columns.scale
    spec = merged(how.spec, (value.ndim - 1, 1))
    y = matmul(rows, columns, dtype=x.dtype, fast="forward" in recipe.fast_accumulation, spec=spec)
    turned = quantized and quantized.dgrad
    y = split(y, (*value.shape[:-1], y.shape[-1]), how.spec)
    given, passed = value if through is None else through, None
    if how.passes:
        passed = mapped_alike(given, y)
    if how.through or how.passes:
        y = mapped_alike(y, given)
    return (y, passed), (kept, kinds, weight, w_scale, key, scales, turned)


def _backward(how: How, residuals: Any, cotangents: tuple[Array, Array | None]) -> tuple[Any, ...]:
    recipe, (kept, (x, w), weight, w_scale, key, scales, turned) = how.recipe, residuals
    dy, others = cotangents
    lead = dy.shape[:-1]
    gradient = recipe.spec("dy")
    dy_scale = fused.given_scale(dy, gradient, recipe.spec("dy_wgrad")) if scales is None else None
    dy = fused.pass_on(dy, fused.matrix(dy))
    if scales is not None and (axes := varying(dy) - varying(scales.slot)):
        raise ValueError(
            f"the layer's arrays vary over the mesh axes {sorted(axes)} and the slot of its scaling does not: JAX "
            f"would sum its cotangent, a largest magnitude, over them; give jax.shard_map check_vma=False"
        )
    quantizer = functools.partial(_operand, how=recipe.scaling)
    keys = (None, None) if key is None else jax.random.split(key)
    seen = None
    if scales is not None:
        seen = scaling.largest_magnitude(dy)
        assert gradient is not None
        dy_scale = scaling.to_scale(jnp.where(scales.dy > 0, scales.dy, seen), formats.get(gradient.format))
    rows_spec, columns_spec = recipe.spec("dy"), recipe.spec("dy_wgrad")
    shares = microscaled.shares_tokens(recipe)
    if shares and rows_spec is not None and rows_spec.folds:
        dy_rows = microscaled.gradient_rows(dy, rows_spec, from_bytes(kept) if how.remade is None else None)
        dy_columns = microscaled.one_scale(dy_rows)
    elif rows_spec is None or columns_spec is None or rows_spec.folds or columns_spec.folds:
        dy_rows = quantizer(dy, rows_spec, key=keys[0], scale=dy_scale)
        dy_columns = quantizer(dy, columns_spec, key=keys[1], turned=True)
    else:
        same = recipe.dy_wgrad == SAME
        specs, subkey = (rows_spec, SAME if same else columns_spec), keys[0] if same else key
        pair = quantize(dy, *specs, scale=dy_scale, strategy=_strategy(recipe.scaling), key=subkey)
        dy_rows, dy_columns = pair  # type: ignore[assignment]
    weight = quantizer(weight, recipe.spec("w_dgrad"), scale=w_scale) if turned is None else from_bytes(turned)
    rows_and_inputs = merged(x.spec, (len(lead), 1))
    dx = matmul(dy_rows, weight, dtype=x.dtype, fast="dgrad" in recipe.fast_accumulation, spec=rows_and_inputs)
    dx = split(dx, (*lead, dx.shape[-1]), x.spec)
    dx = dx if others is None else dx + others
    spec = recipe.spec("x_wgrad")
    if how.remade is None and shares:
        columns = microscaled.shifted(from_bytes(kept), dy_rows)
    elif how.remade is None:
        columns = _turned(from_bytes(kept) if isinstance(kept, QTensor) else kept, spec, recipe.scaling)
    else:
        made_of, scale = kept
        rows = functools.partial(_row_bounds, dy_rows, weight, others)
        made = how.remade.again(made_of, Gradient(dx, gradient if scales is None else None, rows))
        again = fused.pass_on(made, rows_of(made.astype(x.dtype), dy.shape[0], weight.shape[0]))
        if shares:
            columns = microscaled.remade(again, scale, dy_rows, spec)
        else:
            scale = scale if spec == recipe.spec("saved") and spec.granularity == "tensor" else None
            columns = quantizer(again, spec, scale=scale, turned=True)
    dw = matmul(columns, dy_columns, dtype=w.dtype, fast="wgrad" in recipe.fast_accumulation, spec=w.spec)
    inputs = (None, dx) if how.through else (dx, None)
    return *inputs, dw, None, None, scales and Scales(None, None, None, seen), None, None  # type: ignore[arg-type]


_product.defvjp(_forward, _backward)


def _row_bounds(a: Operand, b: Operand, others: Array | None) -> Array:
    """An upper bound of the magnitudes in each row of a @ b.T + others, rounded to 16 bits: fp32 (rows,)."""

    def norms(x: Operand) -> Array:
        if isinstance(x, QTensor) and x.spec.granularity == "tensor":
            return norms(x.codes) * jnp.max(x.scale, initial=0.0)
        values = x.dequantize() if isinstance(x, QTensor) else x.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(values), -1))

    bound = norms(a) * jnp.max(norms(b), initial=0.0)
    if others is not None:
        bound = bound + jnp.max(jnp.abs(fused.matrix(others)), -1, initial=0.0).astype(jnp.float32)
    return 1.01 * bound


def _shares_scale(recipe: Linear) -> bool:
    """Whether both products that read the weight have one scale for all of it: cheaper to keep than to find again."""
    spec = recipe.spec("w")
    return spec is not None and spec == recipe.spec("w_dgrad") and spec.granularity == "tensor"


def _turned(kept: Operand, spec: QuantSpec | None, how: str) -> Operand:
    """What was kept of the input (tokens, inputs), as the operand (inputs, tokens) of the weight's gradient."""
    if not isinstance(kept, QTensor):
        return _operand(kept, spec, how=how, turned=True)
    if spec is None:
        return kept.dequantize(jnp.bfloat16).T
    reuse = kept.spec.granularity in TRANSPOSABLE and kept.spec == spec
    return transpose(kept) if reuse else _operand(kept.dequantize(), spec, how=how, turned=True)


def _operand(
    x: Array,
    spec: QuantSpec | None,
    *,
    how: str,
    key: Array | None = None,
    scale: Array | None = None,
    turned: bool = False,
) -> Operand:
    """A matrix as an operand; `turned`, its transposed copy."""
    if spec is None:
        return x.T if turned else x
    if spec.folds:
        return microscaled.fold_rows(x.T if turned else x, spec)
    specs = (None, spec) if turned else (spec, None)
    key = key if spec.rounding == "stochastic" else None
    q = quantize(x, *specs, scale=scale, strategy=_strategy(how), key=key)[int(turned)]
    assert q is not None
    return q


def _strategy(how: str) -> str:
    return how if how == "two_stage" else "current"


def _subkey(key: Array | None, spec: QuantSpec, use: str) -> Array | None:
    if spec.rounding != "stochastic":
        return None
    if key is None:
        raise ValueError(f"the recipe rounds {use} stochastically ({spec}): pass key=jax.random.key(...)")
    return jax.random.fold_in(key, {"saved": 0, "dy": 1}[use])


_inputs: Recent[QTensor] = Recent()


def _save(
    x: Array, spec: QuantSpec, how: str, key: Array | None = None, scale: Array | None = None, turned: bool = False
) -> QTensor:
    q = _operand(fused.pass_on(x, lax.stop_gradient(x)), spec, how=how, key=key, scale=scale, turned=turned)
    assert isinstance(q, QTensor)
    return to_bytes(q)
