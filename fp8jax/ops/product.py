"""The differentiable product under every linear: three products of a recipe, and what is saved between them.

The input is quantized outside of the differentiated function, from its value alone: its codes then are an argument of
that function, several products that read one input share them, and the input itself is not saved.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.recipe import SAME, Linear
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.matmul import Operand, matmul, transpose
from fp8jax.ops.recent import Recent


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


def product(
    x: Array, w: Array, recipe: Linear, key: Array | None, source: Array | None = None, scales: Scales | None = None
) -> Array:
    """x @ w with the products of a recipe.

    Args:
        x: (tokens, inputs).
        w: (inputs, outputs).
        recipe: what the products compute with.
        key: PRNG key for recipes that round stochastically.
        source: the user's array that `x` is a view of, by which products that share an input are known.
        scales: given scales; None takes them from the tensors.

    Returns:
        (tokens, outputs) in the dtype of `x`.

    Raises:
        ValueError: a key is missing.
    """
    kept, gradient = recipe.spec("saved"), recipe.spec("dy")
    saved, dtypes = None, ()
    if kept is not None:
        subkey = _subkey(key, kept, "saved")
        if subkey is None and scales is None:
            how = (kept, recipe.scaling, x.shape)
            make = functools.partial(_save, x, kept, recipe.scaling)
            saved, dtypes = _inputs.get(x if source is None else source, how, make)
        else:
            saved, dtypes = _save(x, kept, recipe.scaling, subkey, None if scales is None else scales.x)
    return _product(recipe, dtypes, x, w, saved, gradient and _subkey(key, gradient, "dy"), scales)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    recipe: Linear, dtypes: Any, x: Array, w: Array, saved: QTensor | None, key: Array | None, scales: Scales | None
) -> Array:
    return _forward(recipe, dtypes, x, w, saved, key, scales)[0]


def _forward(
    recipe: Linear, dtypes: Any, x: Array, w: Array, saved: QTensor | None, key: Array | None, scales: Scales | None
) -> tuple[Array, Any]:
    quantizer = functools.partial(_operand, how=recipe.scaling)
    if saved is not None and recipe.saved == SAME:
        rows: Operand = _restore(saved, dtypes)
    else:
        rows = quantizer(x, recipe.spec("x"), scale=scales and scales.x)
    y = matmul(rows, quantizer(w.T, recipe.spec("w"), scale=scales and scales.w), dtype=x.dtype)
    # Of an input that is saved as codes only the dtype is needed.
    return y, (x if saved is None else jnp.zeros((0,), x.dtype), w, saved, key, scales)


def _backward(recipe: Linear, dtypes: Any, residuals: Any, dy: Array) -> tuple[Any, ...]:
    x, w, saved, key, scales = residuals
    quantizer = functools.partial(_operand, how=recipe.scaling)
    keys = (None, None) if key is None else jax.random.split(key)
    seen = dy_scale = None
    if scales is not None:
        seen = scaling.largest_magnitude(dy)
        spec = recipe.spec("dy")
        assert spec is not None
        dy_scale = scaling.to_scale(jnp.where(scales.dy > 0, scales.dy, seen), formats.get(spec.format))
    dy_rows = quantizer(dy, recipe.spec("dy"), key=keys[0], scale=dy_scale)
    dx = matmul(dy_rows, quantizer(w, recipe.spec("w_dgrad"), scale=scales and scales.w), dtype=x.dtype)
    if isinstance(dy_rows, QTensor) and recipe.dy_wgrad == SAME:
        dy_columns: Operand = transpose(dy_rows)
    else:
        dy_columns = quantizer(dy.T, recipe.spec("dy_wgrad"), key=keys[1])
    kept: Operand = x if saved is None else _restore(saved, dtypes)
    dw = matmul(_turned(kept, recipe.spec("x_wgrad"), recipe.scaling), dy_columns, dtype=w.dtype)
    none = jax.tree.map(_zero_cotangent, (saved, key, scales))
    return dx, dw, *none[:2], scales and none[2]._replace(slot=seen)


_product.defvjp(_forward, _backward)


def _turned(kept: Operand, spec: QuantSpec | None, how: str) -> Operand:
    """What was kept of the input (tokens, inputs), as the operand (inputs, tokens) of the weight's gradient."""
    if not isinstance(kept, QTensor):
        return _operand(kept.T, spec, how=how)
    if spec is None:
        return kept.dequantize(jnp.bfloat16).T
    reuse = kept.spec.granularity in TRANSPOSABLE and kept.spec == spec
    return transpose(kept) if reuse else _operand(kept.dequantize().T, spec, how=how)


def _operand(
    x: Array, spec: QuantSpec | None, *, how: str, key: Array | None = None, scale: Array | None = None
) -> Operand:
    if spec is None:
        return x
    if how == "two_stage" and scale is None and spec.granularity == "tensor":
        scale = scaling.TwoStage().scale((), x, formats.get(spec.format))
    return quantize_with_scale(x, spec, scale, key=key if spec.rounding == "stochastic" else None)


def _subkey(key: Array | None, spec: QuantSpec, use: str) -> Array | None:
    if spec.rounding != "stochastic":
        return None
    if key is None:
        raise ValueError(f"the recipe rounds {use} stochastically ({spec}): pass key=jax.random.key(...)")
    return jax.random.fold_in(key, {"saved": 0, "dy": 1}[use])


# A quantized input with its codes as bytes, which unlike FP8 arrays may enter a differentiated function: they have no
# cotangent; and the dtypes of its leaves.
_Saved = tuple[QTensor, tuple[Any, ...]]


_inputs: Recent[_Saved] = Recent()


def _save(x: Array, spec: QuantSpec, how: str, key: Array | None = None, scale: Array | None = None) -> _Saved:
    codes = _operand(lax.stop_gradient(x), spec, how=how, key=key, scale=scale)
    leaves, tree = jax.tree.flatten(codes)
    flat = [lax.bitcast_convert_type(a, jnp.uint8) if a.dtype.itemsize == 1 else lax.stop_gradient(a) for a in leaves]
    return jax.tree.unflatten(tree, flat), tuple(a.dtype for a in leaves)


def _restore(saved: QTensor, dtypes: Any) -> QTensor:
    leaves, tree = jax.tree.flatten(saved)
    restored = [lax.bitcast_convert_type(x, d) if x.dtype != d else x for x, d in zip(leaves, dtypes, strict=True)]
    return jax.tree.unflatten(tree, restored)


def _zero_cotangent(x: Array) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)
