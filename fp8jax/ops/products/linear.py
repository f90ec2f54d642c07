"""Linear layers, general products and einsum whose three products follow a recipe."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import blocks, derivatives
from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.ops.autodiff.residuals import NO_INPUT_FACTS, ArrayFacts, InputFacts, StoredWeight
from fp8jax.ops.dispatch.sharding import (
    OutSharding,
    merge,
    merge_spec,
    product_sharding,
    reshape,
    reshard,
    spec_of,
    transpose_sharding,
)
from fp8jax.ops.products.frozen_weights import FrozenWeight
from fp8jax.ops.products.operands import Input, input_source
from fp8jax.ops.products.product import output_spec, recipe_dot, recipe_dot_from_source
from fp8jax.ops.products.weights import BothLayouts, QuantizedWeight
from fp8jax.recipes import linear_part

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def linear(
    x: Array,
    w: Array | FrozenWeight,
    *,
    recipe: Recipe | Linear | str,
    bias: Array | None = None,
    key: Array | None = None,
    quantized: QuantizedWeight | None = None,
    out_sharding: OutSharding = None,
) -> Array:
    """x @ w + bias with the products of a recipe, differentiable in x, w and bias.

    Args:
        x: (..., inputs), any floating dtype.
        w: (inputs, outputs); or what `fp8jax.freeze` made of it, which has no gradient.
        recipe: a `Recipe`, its part `Linear`, or a preset's name.
        bias: (outputs,), added in the dtype of the result.
        key: PRNG key for recipes that round stochastically. Inside `jax.shard_map` fold the index of the replica
            into it (`jax.lax.axis_index`): with one key, errors of rounding do not average out over replicas.
        quantized: what `quantize_weight` made of `w`; None quantizes it in this call.
        out_sharding: on a mesh with Explicit axes, the sharding of the result, as `jax.lax.dot_general` takes it, which
            says where JAX requires it; None follows JAX's own rule.

    Returns:
        (..., outputs) in the dtype of `x`. Gradients have the dtypes of what they are gradients of.

    Raises:
        ValueError: shapes do not match, a key is missing, or `quantized` is of another weight's shape or recipe; or
            codes of a frozen weight and of the recipe do not go together.
    """
    out_spec = output_spec(x, w, out_sharding)
    return recipe_dot(
        Input(flatten_tokens(x, w), x),
        w,
        require_stateless(recipe),
        key,
        quantized=quantized,
        out_spec=out_spec,
        bias=bias,
    )


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe | Linear | str,
    key: Array | None = None,
    quantized: QuantizedWeight | None = None,
    out_sharding: OutSharding = None,
    input_facts: InputFacts = NO_INPUT_FACTS,
    bias: Array | None = None,
    on_passthrough: Callable[[Array], None] | None = None,
    stored_weight: StoredWeight | None = None,
    both_layouts: BothLayouts = BothLayouts.NEVER,
    split_sizes: tuple[int, ...] | None = None,
) -> Any:
    """`jax.lax.dot_general` with the products of a recipe: `lhs` is the input, `rhs` the weight.

    Args:
        lhs: input, any rank; its free axes are tokens.
        rhs: weight, any rank; its free axes are outputs.
        dimension_numbers: as in `jax.lax.dot_general`. Batch axes have products, and scales, of their own.
        precision: must be JAX's default, None or in another spelling: quantized products have one precision.
        preferred_element_type: dtype of the result; that of `lhs` if None.
        recipe, key, out_sharding: as of `linear`.
        input_facts: what the caller knows of `lhs`, as `fp8jax.transform` does: what it is made from, and what other
            layers have made of it. Of layers called by themselves nothing is known: `norm_linear` is a norm with its
            layers.
        quantized: what `quantize_weight` made of `rhs` as a matrix (inputs, outputs); there must be no batch axes.
        bias: (outputs,) for the free axes of `rhs` in one, added in the dtype of `lhs`; there must be no batch axes.
        on_passthrough: may be given `lhs` for what else reads it, whose gradients then are added in this backward pass.
        stored_weight: what `rhs` is made of, to be saved in its place; `rhs` itself if None.
        both_layouts: as of `fp8jax.ops.products.product.recipe_dot`.
        split_sizes: as of `recipe_dot`; `rhs` then has one free axis and no batch axes.

    Returns:
        The axes of `jax.lax.dot_general`: batch, free axes of `lhs`, free axes of `rhs`; with `split_sizes` several of
        these.

    Raises:
        ValueError: `precision` asks for what a quantized product cannot give, or `quantized` does not fit.
        ShardingTypeError, JAX's own: as `jax.lax.dot_general`.
    """
    linear_recipe = require_stateless(recipe)
    if not linear_recipe.is_quantized and linear_recipe.x_residual in (SAME, None):
        y = lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding)
        n_outputs = rhs.ndim - len(dimension_numbers[0][1]) - len(dimension_numbers[1][1])
        return y if bias is None else y + bias.astype(y.dtype).reshape(y.shape[y.ndim - n_outputs :])
    check_precision(precision)
    out_spec = product_sharding(lhs, rhs, dimension_numbers, out_sharding)
    (lhs_contract, _), (lhs_batch, _) = dimension_numbers
    left, right = to_matmul_order(lhs, rhs, dimension_numbers)
    n, c = len(lhs_batch), len(lhs_contract)
    batch, tokens, outputs = left.shape[:n], left.shape[n : left.ndim - c], right.shape[n + c :]
    dtype = preferred_element_type or lhs.dtype
    first = [n] if batch else []
    x, w = merge(left, *first, len(tokens), c), merge(right, *first, c, len(outputs))
    if batch:
        if bias is not None:
            raise ValueError(f"a bias serves one product, not one for each of the batch axes {lhs_batch}")
        if quantized is not None:
            raise ValueError(f"a quantized weight serves one product, not one for each of the batch axes {lhs_batch}")
        keys = None if key is None else reshard(jax.random.split(key, x.shape[0]), spec_of(x)[:1], x)
        batched_spec = (merge_spec(out_spec, (len(batch), len(tokens), len(outputs))) or (None,))[1:] or None
        y = jax.vmap(lambda x, w, key: recipe_dot(Input(x), w, linear_recipe, key, out_spec=batched_spec))(x, w, keys)
    else:
        # Which axes are contracted is no part of what a shared input is known by; only the usual ones are shared.
        is_shareable = list(lhs_contract) == list(range(len(tokens), lhs.ndim))
        is_view = is_shareable and c == 1
        matrix_spec = merge_spec(out_spec, (*([1] * len(tokens) if is_view else [len(tokens)]), len(outputs)))
        if w is not rhs:
            stored_weight = stored_weight or StoredWeight(rhs)
            transposed = rhs.ndim == 2 and not stored_weight.transposed
            stored_weight = stored_weight.with_step(
                lambda w: merge(weight_to_matmul_order(w, dimension_numbers), c, len(outputs))
            )
            stored_weight = stored_weight._replace(transposed=transposed)
        y = recipe_dot(
            Input(x, lhs, is_view, input_facts) if is_shareable else Input(x, None, is_view),
            w,
            linear_recipe,
            key,
            quantized=quantized,
            out_spec=matrix_spec,
            bias=bias,
            on_passthrough=on_passthrough,
            stored_weight=stored_weight,
            both_layouts=both_layouts,
            split_sizes=split_sizes,
        )

    def restore_axes(y: Array, outputs: Sequence[int] = outputs) -> Array:
        y = reshape(y, (*batch, *tokens, *outputs), out_spec).astype(dtype)
        return derivatives.check_differentiable_dtypes("dot_general", y, lhs, rhs)

    return restore_axes(y) if split_sizes is None else tuple(restore_axes(part, part.shape[-1:]) for part in y)


def to_matmul_order(lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers) -> tuple[Array, Array]:
    """The operands of a product with their axes as those of matrices: batch, free and contracted axes of the input;
    batch, contracted and free axes of the weight."""
    (contract, _), (batch, _) = dimension_numbers
    free = [i for i in range(lhs.ndim) if i not in (*contract, *batch)]
    return lhs.transpose(*batch, *free, *contract), weight_to_matmul_order(rhs, dimension_numbers)


def weight_to_matmul_order(rhs: Array, dimension_numbers: DimensionNumbers) -> Array:
    """The weight of a product with its axes as `to_matmul_order` has them."""
    (_, contract), (_, batch) = dimension_numbers
    free = [i for i in range(rhs.ndim) if i not in (*contract, *batch)]
    return rhs.transpose(*batch, *contract, *free)


def einsum(
    subscripts: str,
    lhs: Array,
    rhs: Array,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe | Linear | str,
    key: Array | None = None,
    out_sharding: OutSharding = None,
) -> Array:
    """`jnp.einsum` of two operands with the products of a recipe: `lhs` is the input, `rhs` the weight.

    Args:
        subscripts: as in `jnp.einsum`, such as "btd,dhc->bthc" or "...d,dh->...h", with an explicit output.
        lhs: input.
        rhs: weight.
        precision, preferred_element_type: as of `dot_general`.
        recipe, key, out_sharding: as of `linear`.

    Raises:
        ValueError: the subscripts are of another form, repeat an index in an operand, or sum one operand alone; or as
            `dot_general`.
        ShardingTypeError, JAX's own: as `jax.lax.dot_general`.
    """
    dot_general_fn = functools.partial(dot_general, recipe=recipe, key=key)
    return einsum_with(
        dot_general_fn, subscripts, lhs, rhs, precision, preferred_element_type, out_sharding=out_sharding
    )


def einsum_with(
    dot_general_fn: Callable[..., Array],
    subscripts: str,
    lhs: Array,
    rhs: Array,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: OutSharding = None,
) -> Array:
    """`einsum` by a product that is called as `jax.lax.dot_general`."""
    a, b, out = _parse_subscripts(subscripts, lhs.ndim, rhs.ndim)
    batch = [i for i in a if i in b and i in out]
    contract = [i for i in a if i in b and i not in out]
    numbers: Any = tuple(tuple([t.index(i) for i in axes] for t in (a, b)) for axes in (contract, batch))
    order = [*batch, *(i for i in a if i not in b), *(i for i in b if i not in a)]
    lhs_rhs_sharding = transpose_sharding(out_sharding, [out.index(i) for i in order])
    y = dot_general_fn(lhs, rhs, numbers, precision, preferred_element_type, out_sharding=lhs_rhs_sharding)
    return y.transpose([order.index(i) for i in out])


def _parse_subscripts(subscripts: str, *ndims: int) -> tuple[str, str, str]:
    """The indices of both operands and of the output, with an ellipsis spelled out."""
    inputs, arrow, out = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) == 2 and "..." in inputs:
        longest = max(n - len(t) + 3 for n, t in zip(ndims, terms, strict=True) if "..." in t)
        names = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in subscripts][: max(longest, 0)]
        ellipses = ["".join(names[longest - (n - len(t) + 3) :]) for n, t in zip(ndims, terms, strict=True)]
        terms = [t.replace("...", dots) for t, dots in zip(terms, ellipses, strict=True)]
        out = out.replace("...", "".join(names))
    if not arrow or len(terms) != 2 or any(len(set(t)) != len(t) or "." in t for t in (*terms, out)):
        raise ValueError(f"einsum takes two operands, each index once in each, and an output, not {subscripts!r}")
    a, b = terms
    lone_indices = [i for i in (*a, *b) if i not in out and not (i in a and i in b)]
    if lone_indices or set(out) - {*a, *b} or (len(a), len(b)) != ndims:
        raise ValueError(f"einsum {subscripts!r} of operands with {ndims} axes is no batched matrix product")
    return a, b, out


def linears(
    x: Array,
    weights: Sequence[Array],
    *,
    recipe: Recipe | Linear | str,
    facts: ArrayFacts,
    key: Array | None = None,
    quantized: Sequence[QuantizedWeight | None],
    out_sharding: OutSharding = None,
) -> tuple[Array, ...]:
    """`linear` of one input with several weights, which share its codes and sum its gradients in their backward passes.

    There XLA makes each sum part of a product. Of sums that JAX makes of three gradients it leaves one a pass of its
    own: of q, k and v, 0.4 of 11 GB that a Llama-7B layer of 16,384 tokens moves beside its products and attention.

    Args:
        facts: what `x` is made from.
    """
    linear_recipe, passthrough, results = require_stateless(recipe), None, []
    if not weights:
        return ()
    shared_input = Input(flatten_tokens(x, weights[0]), x, input_facts=InputFacts(facts))
    x_source = input_source(shared_input, linear_recipe, key)
    for i, (w, prequantized) in enumerate(zip(weights, quantized, strict=True)):
        flatten_tokens(x, w)
        out_spec, is_last = output_spec(x, w, out_sharding), i == len(weights) - 1
        y, passthrough = recipe_dot_from_source(
            shared_input.value,
            x_source,
            w,
            linear_recipe,
            key,
            quantized=prequantized,
            out_spec=out_spec,
            passthrough=passthrough,
            returns_input=not is_last,
        )
        results.append(y)
    return tuple(results)


_SAMPLE = 64  # channels: of all tokens, since the first of each sequence are alike


def key_from_data(x: Array) -> Array:
    """A PRNG key derived from the first channels of an array, for stochastic rounding where no key can be passed.

    The noise then depends on nothing but the data: it needs no state, repeats exactly, and differs between steps and
    layers because their data do. Inside `jax.shard_map` the data are a device's own, and so is the key: errors of
    rounding average out over replicas, unless these have the same rows. A pass over all channels would take as long as
    one that quantizes them.
    """

    def hash_bits(x: Array) -> tuple[Array]:
        bits = lax.bitcast_convert_type(x[..., :_SAMPLE].astype(jnp.float32), jnp.uint32)
        # Mixed before they are summed: of the bits themselves bf16 values would leave 2^16 keys, and -x that of x.
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
        return (jnp.sum(bits ^ (bits >> 15), dtype=jnp.uint32),)

    return jax.random.key(blocks.on_logical_array(hash_bits, lax.stop_gradient(x), out_shapes=[()])[0])


def flatten_tokens(x: Array, w: Array | FrozenWeight) -> Array:
    """The input (..., inputs) as a matrix (tokens, inputs); raises ValueError where it does not fit the weight."""
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"linear takes (..., inputs) and (inputs, outputs), not {x.shape} and {w.shape}")
    return merge(x, x.ndim - 1, 1)


def check_precision(precision: lax.PrecisionLike) -> None:
    """Raises ValueError for what a quantized product cannot give: any precision that is not JAX's default one."""
    if not is_default_precision(precision):
        raise ValueError(
            f"a quantized product takes no precision={precision!r}: give None, or leave the product as it is written"
        )


def is_default_precision(precision: Any) -> bool:
    """Whether a precision is JAX's default in one of its spellings.

    They are None, `lax.Precision.DEFAULT`, its names ("default", "fastest", "bfloat16"), a pair of these, one an
    operand, and `lax.DotAlgorithmPreset.DEFAULT`.
    """
    if isinstance(precision, (tuple, list)):
        return len(precision) == 2 and all(map(is_default_precision, precision))
    if isinstance(precision, str):
        return precision in ("default", "fastest", "bfloat16")
    return precision in (None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


def require_stateless(recipe: Recipe | Linear | str) -> Linear:
    """The part of a recipe that products follow, where these need no state; else ValueError."""
    linear_recipe = linear_part(recipe)
    for operand, strategy in linear_recipe.states.items():
        if strategy.collects_stats:
            kind = linear_recipe.scaling_name(operand)
            raise ValueError(f"{kind} scaling has a state: call fp8jax.scaled_linear, or take scaling='current'")
    return linear_recipe
