"""Linear layers, general products and einsum whose three products follow a recipe."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats, scaling
from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.ops.product import Scales, product

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
    y = product(_rows(x, w), w, _stateless(recipe), key, source=x)
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
    part = _stateless(recipe)
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
        y = jax.vmap(functools.partial(product, recipe=part))(x, w, key=keys)
    else:
        # Which axes are contracted is no part of what a shared input is known by; only the usual one is shared.
        last = list(lhs_contract) == [lhs.ndim - 1]
        y = product(x[0], w[0], part, key, source=lhs if last else None)
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


class ScalingState(NamedTuple):
    """Amax histories of one linear under delayed scaling, fp32 (history,) each, newest first; may be stacked."""

    x: Array
    w: Array
    dy: Array


class Observed(NamedTuple):
    """Largest magnitudes that one call of a linear saw, fp32 scalars: merge calls of one step by maximum."""

    x: Array
    w: Array
    dy: Array


def init_scaling(recipe: Recipe | Linear) -> ScalingState:
    """Empty histories for one linear.

    Raises:
        ValueError: the recipe's scaling is not "delayed".
    """
    zeros = _delayed(recipe).init()
    return ScalingState(zeros, jnp.zeros_like(zeros), jnp.zeros_like(zeros))


def delayed_linear(
    x: Array, w: Array, state: ScalingState, slot: Array, *, recipe: Recipe | Linear, bias: Array | None = None
) -> tuple[Array, Observed]:
    """`linear` with delayed scaling.

    Args:
        x: (..., inputs).
        w: (inputs, outputs).
        state: histories, read only; no gradient flows to them.
        slot: fp32 scalar of any value, no two calls the same one. Its cotangent is the largest magnitude of the
            output's gradient; cotangents sum, so a slot that two calls share would get the sum of both.
        recipe: a recipe whose scaling is "delayed".
        bias: (outputs,).

    Returns:
        The output, and what was observed of `x` and `w`; its `dy` is 0, the slot's cotangent takes its place. Pass
        the merged observations of a step to `update_scaling`.

    Raises:
        ValueError: shapes do not match, or the recipe's scaling is not "delayed".
    """
    strategy, part, rows = _delayed(recipe), _part(recipe), _rows(x, w)
    values = {"x": lax.stop_gradient(rows), "w": lax.stop_gradient(w)}
    given = {
        name: strategy.scale(lax.stop_gradient(getattr(state, name)), value, formats.get(part.spec(name).format))  # type: ignore[union-attr]
        for name, value in values.items()
    }
    past = lax.stop_gradient(jnp.max(state.dy)) * 2.0**strategy.margin
    y = product(rows, w, part, None, scales=Scales(given["x"], given["w"], past, slot))
    y = y.reshape(*x.shape[:-1], w.shape[1])
    seen = {name: scaling.largest_magnitude(value) for name, value in values.items()}
    observed = Observed(seen["x"], seen["w"], jnp.zeros([]))
    return (y if bias is None else y + bias.astype(y.dtype)), observed


def update_scaling(state: ScalingState, observed: Observed, recipe: Recipe | Linear) -> ScalingState:
    """The histories after a step, of one linear or, with leading axes on every array, of stacked ones.

    Args:
        state: histories before the step.
        observed: largest magnitudes of the whole step: the maximum over its microbatches and replicas.
        recipe: a recipe whose scaling is "delayed".
    """
    update = _delayed(recipe).update
    for _ in range(state.x.ndim - 1):
        update = jax.vmap(update)
    return ScalingState(*map(update, state, observed))


def _rows(x: Array, w: Array) -> Array:
    """The input (..., inputs) as a matrix (tokens, inputs)."""
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"linear takes (..., inputs) and (inputs, outputs), not {x.shape} and {w.shape}")
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _part(recipe: Recipe | Linear) -> Linear:
    return recipe.linear if isinstance(recipe, Recipe) else recipe


def _stateless(recipe: Recipe | Linear) -> Linear:
    part = _part(recipe)
    if part.scaling == "delayed":
        raise ValueError("delayed scaling has a state: call fp8jax.delayed_linear, or take scaling='current'")
    return part


def _delayed(recipe: Recipe | Linear) -> scaling.Delayed:
    part = _part(recipe)
    if part.scaling != "delayed":
        raise ValueError(f"the recipe's linear.scaling is {part.scaling!r}, not 'delayed'")
    return scaling.Delayed(part.history, part.margin)
