"""Linear layers whose three products, and what is saved for the backward pass, follow a recipe.

`linear` quantizes its input outside of the differentiated function, from the value alone: its codes then are an
argument of that function, several linears that read one input share them, and the input itself is not saved.
"""

import functools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor, quantize
from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.matmul import Operand, matmul, transpose

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def linear(
    x: Array, w: Array, *, recipe: Recipe | Linear, bias: Array | None = None, key: Array | None = None
) -> Array:
    """x @ w + bias with the products of a recipe, differentiable in x, w and bias.

    Args:
        x: (..., inputs), any floating dtype.
        w: (inputs, outputs).
        recipe: a `Recipe`, or its part `Linear`.
        bias: (outputs,), added in the dtype of the result.
        key: PRNG key for recipes that round stochastically.

    Returns:
        (..., outputs) in the dtype of `x`. Gradients have the dtypes of what they are gradients of.

    Raises:
        ValueError: shapes do not match, or a key is missing.
    """
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"linear takes (..., inputs) and (inputs, outputs), not {x.shape} and {w.shape}")
    recipe = recipe.linear if isinstance(recipe, Recipe) else recipe
    y = _linear(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w, recipe, key, source=x)
    y = y.reshape(*x.shape[:-1], w.shape[1])
    return y if bias is None else y + bias.astype(y.dtype)


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe | Linear,
    key: Array | None = None,
    out_sharding: Any = None,
) -> Array:
    """`jax.lax.dot_general` with the products of a recipe: `lhs` is the input, `rhs` the weight.

    Args:
        lhs: input, any rank; its free axes are tokens.
        rhs: weight, any rank; its free axes are outputs.
        dimension_numbers: as in `jax.lax.dot_general`. Batch axes have products, and scales, of their own.
        precision: must be None or default: quantized products have one precision.
        preferred_element_type: dtype of the result; that of `lhs` if None.
        recipe: a `Recipe`, or its part `Linear`.
        key: PRNG key for recipes that round stochastically.
        out_sharding: passed to `jax.lax.dot_general` where nothing is quantized; else it must be None.

    Returns:
        The axes of `jax.lax.dot_general`: batch, free axes of `lhs`, free axes of `rhs`.

    Raises:
        ValueError: `precision` or `out_sharding` ask for what a quantized product cannot give.
    """
    part = recipe.linear if isinstance(recipe, Recipe) else recipe
    if not part.quantized and part.saved in (SAME, None):
        return lax.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )
    if precision not in (None, lax.Precision.DEFAULT, "default") or out_sharding is not None:
        raise ValueError(f"a quantized product takes no precision={precision!r} and no out_sharding={out_sharding!r}")
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = [i for i in range(lhs.ndim) if i not in (*lhs_contract, *lhs_batch)]
    rhs_free = [i for i in range(rhs.ndim) if i not in (*rhs_contract, *rhs_batch)]
    batch, tokens, outputs = (
        tuple(array.shape[i] for i in axes) for array, axes in ((lhs, lhs_batch), (lhs, lhs_free), (rhs, rhs_free))
    )
    dtype = preferred_element_type or lhs.dtype
    x = lhs.transpose(*lhs_batch, *lhs_free, *lhs_contract).reshape(math.prod(batch), math.prod(tokens), -1)
    w = rhs.transpose(*rhs_batch, *rhs_contract, *rhs_free).reshape(math.prod(batch), x.shape[-1], -1)
    if batch:
        keys = None if key is None else jax.random.split(key, x.shape[0])
        y = jax.vmap(functools.partial(_linear, recipe=part))(x, w, key=keys)
    else:
        # Which axes are contracted is no part of what a shared input is known by; only the usual one is shared.
        last = list(lhs_contract) == [lhs.ndim - 1]
        y = _linear(x[0], w[0], part, key, source=lhs if last else None)
    return y.reshape(*batch, *tokens, *outputs).astype(dtype)


def einsum(subscripts: str, lhs: Array, rhs: Array, *, recipe: Recipe | Linear, key: Array | None = None) -> Array:
    """`jnp.einsum` of two operands with the products of a recipe: `lhs` is the input, `rhs` the weight.

    Args:
        subscripts: as in `jnp.einsum`, such as "btd,dhc->bthc" or "...d,dh->...h", with an explicit output.
        lhs: input.
        rhs: weight.
        recipe: a `Recipe`, or its part `Linear`.
        key: PRNG key for recipes that round stochastically.

    Raises:
        ValueError: the subscripts are of another form, repeat an index in an operand, or sum one operand alone.
    """
    a, b, out = _terms(subscripts, lhs.ndim, rhs.ndim)
    batch = [i for i in a if i in b and i in out]
    contract = [i for i in a if i in b and i not in out]
    numbers = (
        tuple([t.index(i) for i in contract] for t in (a, b)),
        tuple([t.index(i) for i in batch] for t in (a, b)),
    )
    y = dot_general(lhs, rhs, numbers, recipe=recipe, key=key)  # type: ignore[arg-type]
    order = [*batch, *(i for i in a if i not in b), *(i for i in b if i not in a)]
    return y.transpose([order.index(i) for i in out])


def _terms(subscripts: str, *ndims: int) -> tuple[str, str, str]:
    """The indices of both operands and of the output, with an ellipsis spelled out."""
    inputs, arrow, out = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) == 2 and "..." in inputs:
        longest = max(n - len(t) + 3 for n, t in zip(ndims, terms, strict=True) if "..." in t)
        names = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in subscripts][: max(longest, 0)]
        spelled = ["".join(names[longest - (n - len(t) + 3) :]) for n, t in zip(ndims, terms, strict=True)]
        terms = [t.replace("...", dots) for t, dots in zip(terms, spelled, strict=True)]
        out = out.replace("...", "".join(names))
    if not arrow or len(terms) != 2 or any(len(set(t)) != len(t) or "." in t for t in (*terms, out)):
        raise ValueError(f"einsum takes two operands, each index once in each, and an output, not {subscripts!r}")
    a, b = terms
    alone = [i for i in (*a, *b) if i not in out and not (i in a and i in b)]
    if alone or set(out) - {*a, *b} or (len(a), len(b)) != ndims:
        raise ValueError(f"einsum {subscripts!r} of operands with {ndims} axes is no batched matrix product")
    return a, b, out


def content_key(x: Array) -> Array:
    """A PRNG key derived from the values of an array, for stochastic rounding where no key can be passed.

    The noise then depends on nothing but the data: it needs no state, repeats exactly, and differs between steps and
    layers because their data do.
    """
    bits = lax.bitcast_convert_type(lax.stop_gradient(x).astype(jnp.float32), jnp.uint32)
    return jax.random.key(jnp.sum(bits * (jnp.uint32(2654435761) | 1), dtype=jnp.uint32))


def _linear(x: Array, w: Array, recipe: Linear, key: Array | None, source: Array | None = None) -> Array:
    """x @ w of matrices; `source` is the user's array that `x` is a view of, by which shared inputs are known."""
    kept, gradient = recipe.spec("saved"), recipe.spec("dy")
    saved, dtypes = None, ()
    if kept is not None:
        saved, dtypes = _shared(x, kept, _subkey(key, kept, "saved"), x if source is None else source)
    return _product(recipe, dtypes, x, w, saved, gradient and _subkey(key, gradient, "dy"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(recipe: Linear, dtypes: Any, x: Array, w: Array, saved: QTensor | None, key: Array | None) -> Array:
    return _forward(recipe, dtypes, x, w, saved, key)[0]


def _forward(
    recipe: Linear, dtypes: Any, x: Array, w: Array, saved: QTensor | None, key: Array | None
) -> tuple[Array, Any]:
    shared = saved is not None and recipe.saved == SAME
    rows: Operand = _restore(saved, dtypes) if shared else _operand(x, recipe.spec("x"))  # type: ignore[arg-type]
    y = matmul(rows, _operand(w.T, recipe.spec("w")), dtype=x.dtype)
    # Of an input that is saved as codes only the dtype is needed.
    return y, (x if saved is None else jnp.zeros((0,), x.dtype), w, saved, key)


def _backward(recipe: Linear, dtypes: Any, residuals: Any, dy: Array) -> tuple[Any, ...]:
    x, w, saved, key = residuals
    keys = (None, None) if key is None else jax.random.split(key)
    dy_rows = _operand(dy, recipe.spec("dy"), keys[0])
    dx = matmul(dy_rows, _operand(w, recipe.spec("w_dgrad")), dtype=x.dtype)
    kept: Operand = x if saved is None else _restore(saved, dtypes)
    if isinstance(dy_rows, QTensor) and recipe.dy_wgrad == SAME:
        dy_columns: Operand = transpose(dy_rows)
    else:
        dy_columns = _operand(dy.T, recipe.spec("dy_wgrad"), keys[1])
    dw = matmul(_turned(kept, recipe.spec("x_wgrad")), dy_columns, dtype=w.dtype)
    return dx, dw, jax.tree.map(_zero_cotangent, saved), jax.tree.map(_zero_cotangent, key)


_product.defvjp(_forward, _backward)


def _turned(kept: Operand, spec: QuantSpec | None) -> Operand:
    """What was kept of the input (tokens, inputs), as the operand (inputs, tokens) of the weight's gradient."""
    if not isinstance(kept, QTensor):
        return _operand(kept.T, spec)
    if spec is None:
        return kept.dequantize(jnp.bfloat16).T
    reuse = kept.spec.granularity in TRANSPOSABLE and kept.spec == spec
    return transpose(kept) if reuse else quantize(kept.dequantize().T, spec)


def _operand(x: Array, spec: QuantSpec | None, key: Array | None = None) -> Operand:
    if spec is None:
        return x
    return quantize(x, spec, key=key if spec.rounding == "stochastic" else None)


def _subkey(key: Array | None, spec: QuantSpec, use: str) -> Array | None:
    if spec.rounding != "stochastic":
        return None
    if key is None:
        raise ValueError(f"the recipe rounds {use} stochastically ({spec}): pass key=jax.random.key(...)")
    return jax.random.fold_in(key, {"saved": 0, "dy": 1}[use])


class _Last(threading.local):
    """The input that was quantized last: linears that read one input one after another share its codes."""

    entry: tuple[Any, Any, "_Saved"] | None = None


_last = _Last()


def _shared(x: Array, spec: QuantSpec, key: Array | None, source: Array) -> "_Saved":
    # To the leak checker the entry that waits for a next linear is a leak.
    if key is not None or jax.config.jax_check_tracer_leaks:  # type: ignore[attr-defined]
        return _save(x, spec, key)
    # The codes belong to the trace that made them: a scan's body must not see those of the function around it.
    how = (spec, x.shape, get_opaque_trace_state())
    if _last.entry is not None and _last.entry[0]() is source and _last.entry[1] == how:
        return _last.entry[2]
    saved = _save(x, spec, None)
    _last.entry = (weakref.ref(source, _forget), how, saved)
    return saved


def _forget(reference: Any) -> None:
    if _last.entry is not None and _last.entry[0] is reference:
        _last.entry = None


# A quantized input with its codes as bytes, which unlike FP8 arrays may enter a differentiated function: they have no
# cotangent; and the dtypes of its leaves.
_Saved = tuple[QTensor, tuple[Any, ...]]


def _save(x: Array, spec: QuantSpec, key: Array | None) -> _Saved:
    leaves, tree = jax.tree.flatten(quantize(lax.stop_gradient(x), spec, key=key))
    flat = [lax.bitcast_convert_type(a, jnp.uint8) if a.dtype.itemsize == 1 else lax.stop_gradient(a) for a in leaves]
    return jax.tree.unflatten(tree, flat), tuple(a.dtype for a in leaves)


def _restore(saved: QTensor, dtypes: Any) -> QTensor:
    leaves, tree = jax.tree.flatten(saved)
    restored = [lax.bitcast_convert_type(x, d) if x.dtype != d else x for x, d in zip(leaves, dtypes, strict=True)]
    return jax.tree.unflatten(tree, restored)


def _zero_cotangent(x: Array) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)
