"""Cross-entropy of a linear head, computed in chunks of tokens so that the logits are never in memory as a whole.

A scalar loss computes its gradients in the forward pass, chunk by chunk, as in Liger Kernel (arXiv 2410.10989, section
3.2): three products in total. A loss per token recomputes the logits in the backward pass.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import checkify

from fp8jax.core import derivatives, scaling
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.ops.dispatch.choice import cast_varying_like
from fp8jax.ops.dispatch.partition import UNSHARDED, DimSharding, run_partitioned
from fp8jax.ops.dispatch.sharding import explicit_mesh, reshard, spec_of
from fp8jax.ops.losses.head import (
    CODES_DIMS,
    HeadCodes,
    LogitCotangentFacts,
    Logits,
    bound_excess,
    compute_logits,
    cotangent_bound,
    has_codes,
    label_logits,
    make_head,
    max_and_sum_exp,
    max_logit_cotangent,
    quantize_head,
    weight_shape,
    zero_nonfinite,
)
from fp8jax.ops.products.linear import require_stateless
from fp8jax.recipes import linear_part, resolve

# PyTorch's default, which tokenized data sets use for prompts and padding.
IGNORE_LABEL = -100


def check_operands(
    x: Array, w: Array, labels: Array, bias: Array | None, where: Array | None, vocabulary_axis: int
) -> None:
    """Raise ValueError or TypeError if the operands of `fp8jax.linear_cross_entropy` do not match."""
    if vocabulary_axis not in (-2, -1, 0, 1):
        raise ValueError(f"vocabulary_axis must be 0 or 1, got {vocabulary_axis}")
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[1 - vocabulary_axis % 2]:
        expected = "(vocabulary, channels)" if vocabulary_axis % 2 == 0 else "(channels, vocabulary)"
        raise ValueError(f"the output head expects x (..., channels) and w {expected}, not {x.shape} and {w.shape}")
    if not (jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(w.dtype, jnp.floating)):
        raise TypeError(f"x and w must be floats, not {x.dtype} and {w.dtype}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, not {labels.dtype}")
    for name, array in (("labels", labels), ("where", where)):
        if array is not None and array.shape != x.shape[:-1]:
            raise ValueError(f"{name} must have the shape of x without channels, {x.shape[:-1]}, got {array.shape}")
    if where is not None and where.dtype != jnp.bool_:
        raise TypeError(f"where must be bool, not {where.dtype}")
    vocabulary = w.shape[vocabulary_axis % 2]
    if w.size == 0:
        raise ValueError(f"the output head is empty: w has the shape {w.shape}, without channels or a vocabulary")
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"bias must have the shape {(vocabulary,)}, not {bias.shape}")
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias must be a float, not {bias.dtype}")


def _require_number(name: str, value: Any, low: float, high: float = np.inf) -> float:
    """Return an argument of `fp8jax.linear_cross_entropy` that is a number, as a float.

    Raises:
        TypeError: it is no number, or traced.
        ValueError: it is outside of [low, high], or not finite.
    """
    is_number = isinstance(value, (int, float, np.number, np.ndarray, Array)) and np.size(value) == 1
    if isinstance(value, jax.core.Tracer) or not is_number:
        raise TypeError(
            f"{name} must be a number, got {value!r}. It is static: pass a Python float, and name it in "
            "static_argnames if it is an argument of jax.jit"
        )
    number = float(value)
    if not (low <= number <= high and np.isfinite(number)):
        expected = f"finite and at least {low:g}" if high == np.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be {expected}, got {value}")
    return number


def _require_integer(name: str, value: Any) -> int:
    """Return an argument of `fp8jax.linear_cross_entropy` that is an integer; TypeError if it is none, or traced."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be None or a static integer, got {value!r}") from None


def is_ignored(labels: Array, ignore_label: int) -> Array:
    """Return which labels are `ignore_label`, bool (...); none if their dtype cannot represent it."""
    limits = jnp.iinfo(labels.dtype)
    if not limits.min <= ignore_label <= limits.max:
        return jnp.zeros(labels.shape, bool)
    return jnp.asarray(labels == np.asarray(ignore_label, labels.dtype))


def to_int32_labels(labels: Array, vocabulary: int) -> Array:
    """Return labels as int32; -1 for any label outside of the vocabulary."""
    return jnp.where(_is_in_vocabulary(labels, vocabulary), labels, -1).astype(jnp.int32)


def _is_in_vocabulary(labels: Array, vocabulary: int) -> Array:
    is_in_vocabulary = jnp.asarray(labels >= 0)
    if vocabulary > jnp.iinfo(labels.dtype).max:
        return is_in_vocabulary
    return is_in_vocabulary & (labels < np.asarray(vocabulary, labels.dtype))


def check_labels(labels: Array, is_counted: Array, vocabulary: int) -> None:
    """Raise an error under checkify if a counted label is outside of the vocabulary. Without checkify, do nothing."""
    counted_labels = jnp.where(is_counted, labels, 0)
    checkify.debug_check(
        jnp.all(_is_in_vocabulary(labels, vocabulary) | ~is_counted),
        f"labels must be in [0, {vocabulary}), got labels from {{lowest}} to {{highest}}. For tokens without a "
        "target, use the label that linear_cross_entropy ignores, or exclude them with where=",
        lowest=jnp.min(counted_labels),
        highest=jnp.max(counted_labels),
    )


# Bytes of a chunk's logits and their cotangents: fp32 and 16 bits, or both 16 bits for a quantized head. Quantized
# products are faster, so that the cost of adding to dw favours larger chunks.
CHUNK_BYTES, QUANTIZED_CHUNK_BYTES = 3 * 2**29, 2**31
MAX_CHUNKS = 16  # each makes a pass over the weight's gradient
QUANTIZED_CHUNK_TOKENS = 8192  # per chunk; more is not faster
TILE = 128  # tokens of a tile of the product


def num_chunks(tokens: int, vocabulary: int, is_quantized: bool) -> int:
    """Return the number of chunks of a device's tokens, or up to a quarter more if chunks are then whole tiles."""
    bytes_per_logit, chunk_bytes = (4, QUANTIZED_CHUNK_BYTES) if is_quantized else (6, CHUNK_BYTES)
    number = -(-bytes_per_logit * tokens * vocabulary // chunk_bytes)
    number = min(max(number, -(-tokens // QUANTIZED_CHUNK_TOKENS) if is_quantized else 1), MAX_CHUNKS)
    candidates = range(number, min(number * 5 // 4, MAX_CHUNKS) + 1)
    return next((n for n in candidates if tokens % (TILE * n) == 0), number)


class TokenChunks(NamedTuple):
    """Split of an axis of tokens into `number` chunks of `size`."""

    axis: int
    size: int
    number: int

    @staticmethod
    def from_array(x: Array, vocabulary: int, is_quantized: bool, tokens_per_chunk: int | None) -> "TokenChunks":
        """Split (..., channels) along its longest token axis, by `tokens_per_chunk` or by `num_chunks`."""
        tokens = x.size // x.shape[-1]
        axis = max(range(x.ndim - 1), key=lambda i: (x.shape[i], i))
        number = (
            num_chunks(tokens, vocabulary, is_quantized) if tokens_per_chunk is None else -(-tokens // tokens_per_chunk)
        )
        return TokenChunks(axis, x.shape[axis], min(number, x.shape[axis]))

    def split(self, x: Array) -> Array:
        """Split (...) to (chunks, ...), padded with 0. A chunk holds every `number`-th token."""
        padding = -self.size % self.number
        if padding:
            x = jnp.pad(x, [(0, padding if i == self.axis else 0) for i in range(x.ndim)])
        shape = (*x.shape[: self.axis], (self.size + padding) // self.number, self.number, *x.shape[self.axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), self.axis + 1, 0)

    def merge(self, x: Array) -> Array:
        """The inverse of `split`."""
        x = jnp.moveaxis(x, 0, self.axis + 1)
        x = x.reshape(*x.shape[: self.axis], -1, *x.shape[self.axis + 2 :])
        return lax.slice_in_dim(x, 0, self.size, axis=self.axis)


@dataclasses.dataclass(frozen=True)
class _LossConfig:
    """Static arguments of the loss and the recipe of the head's products."""

    softcap: float | None
    label_smoothing: float
    z_loss: float
    vocabulary_axis: int
    tokens_per_chunk: int | None
    linear_recipe: Linear | None


def linear_cross_entropy(
    x: Array,
    w: Array,
    labels: Array,
    *,
    bias: Array | None = None,
    where: Array | None = None,
    ignore_label: int | None = IGNORE_LABEL,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    vocabulary_axis: int = -1,
    tokens_per_chunk: int | None = None,
    recipe: Recipe | Linear | str | None = None,
    key: Array | None = None,
) -> Array:
    """Return the softmax cross-entropy of `x @ w + bias` with integer labels, without storing all logits.

    A differentiated "mean" or "sum" computes its gradients in the forward pass. "none" recomputes the logits in the
    backward pass.

    Logits, softmax and loss are fp32. Products read `w` in the dtype of `x`. The gradient of `w` is summed over chunks
    in fp32. A token's loss is

        lse - (1 - label_smoothing) z[label] - label_smoothing mean(z) + z_loss lse^2,    lse = logsumexp(z),

    where z is the logit, or softcap tanh(logit / softcap). Smoothing is optax's. The z-loss is PaLM's (arXiv
    2204.02311, section 5), the cap Gemma 2's (arXiv 2408.00118, section 2).

    Args:
        x: (..., channels), the input of the head; at least two axes.
        w: (channels, vocabulary), or (vocabulary, channels) with `vocabulary_axis=0`, as in an embedding table. If a
            mesh shards the vocabulary, each device computes its shard of the logits. Channels are gathered once.
        labels: (...), integers in [0, vocabulary), or `ignore_label`. Any other label of a counted token makes the loss
            NaN. With `user_checks` of `jax.experimental.checkify` it raises an error.
        bias: (vocabulary,).
        where: bool (...), the tokens that count; None counts all. Values of other tokens, NaN too, have no effect.
        ignore_label: tokens with this label do not count, by default -100 as in PyTorch and Hugging Face. None, or a
            value that the dtype of `labels` cannot represent, ignores no label.
        softcap: above 0, finite. This and the other numbers are static.
        label_smoothing: in [0, 1].
        z_loss: at least 0, finite.
        reduction: "mean" over the counted tokens (0 if there are none), "sum", or "none".
        tokens_per_chunk: tokens per chunk and device. None limits logits and cotangents to 1.5 GiB (quantized: 2 GiB
            and 8,192 tokens), with at most 16 chunks.
        recipe: recipe of the head's products: a `Linear`, such as `fp8jax.recipes.HEAD`, or a `Recipe`, with its `head`
            if that is quantized, else its `linear`. None multiplies in the dtype of `x`. With one FP8 scale per
            operand, all chunks share the scales and logits are rounded to the dtype of `x`. Else each chunk has its own
            scales. An 8-bit head costs accuracy.
        key: PRNG key for recipes that round stochastically.

    Returns:
        fp32, () or, for "none", (...); 0 for tokens that do not count. It has gradients for `x`, `w` and `bias`.

    Raises:
        ValueError: shapes do not match, or an argument is out of range; or an 8-bit array is differentiated.
        TypeError: labels are not integers, or `x`, `w` and `bias` not floating; or an option is no number, or traced.
    """
    check_operands(x, w, labels, bias, where, vocabulary_axis)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    softcap = None if softcap is None else _require_number("softcap", softcap, 0)
    if softcap == 0:
        raise ValueError("softcap must be above 0, got 0; use None for no softcap")
    label_smoothing = _require_number("label_smoothing", label_smoothing, 0, 1)
    z_loss = _require_number("z_loss", z_loss, 0)
    ignore_label = None if ignore_label is None else _require_integer("ignore_label", ignore_label)
    tokens_per_chunk = None if tokens_per_chunk is None else _require_integer("tokens_per_chunk", tokens_per_chunk)
    if tokens_per_chunk is not None and tokens_per_chunk < 1:
        raise ValueError(f"tokens_per_chunk must be at least 1, got {tokens_per_chunk}")
    if isinstance(resolved := recipe if recipe is None else resolve(recipe), Recipe) and resolved.head.is_quantized:
        recipe = resolved.head
    linear_recipe = None if recipe is None or not linear_part(recipe).is_quantized else require_stateless(recipe)
    if linear_recipe is not None and not has_codes(linear_recipe) and explicit_mesh(x, w) is not None:
        raise ValueError(
            "on a mesh with Explicit axes, the output head needs a recipe with one FP8 scale per operand, such as "
            "'te_current', or none. Pass recipe=None, or use Auto axes"
        )
    config = _LossConfig(softcap, label_smoothing, z_loss, vocabulary_axis % 2, tokens_per_chunk, linear_recipe)
    is_counted = jnp.ones(labels.shape, bool) if where is None else where
    if ignore_label is not None:
        is_counted = is_counted & ~is_ignored(labels, ignore_label)
    if where is not None or ignore_label is not None:
        x = jnp.where(is_counted[..., None], x, 0)  # NaN times weight 0 would be NaN in dw
    if not labels.size:
        return jnp.zeros(labels.shape if reduction == "none" else (), jnp.float32)
    if reduction == "none":
        x, w, bias, labels, guard = _check_and_guard(config, x, w, bias, labels, is_counted)
        losses = _per_token(config, x, w, bias, key, labels, is_counted, guard)
        return derivatives.check_differentiable_dtypes("linear_cross_entropy", losses, x, w, bias)
    weights = is_counted.astype(jnp.float32)
    total = jnp.maximum(jnp.sum(weights), 1.0) if reduction == "mean" else jnp.float32(1)
    if x.dtype == jnp.float16:
        # Gradients of a mean would underflow in fp16. Divide the sum, whose gradients are scaled in fp32.
        return _weighted_sum_of_losses(config, x, w, bias, key, labels, weights) / total
    return _weighted_sum_of_losses(config, x, w, bias, key, labels, weights / total)


def weighted_cross_entropy(
    x: Array,
    w: Array,
    labels: Array,
    weights: Array,
    *,
    bias: Array | None,
    label_smoothing: float,
    z_loss: float,
    vocabulary_axis: int,
    recipe: Linear,
) -> Array:
    """Return the sum of weights, fp32 (...), times the losses of `linear_cross_entropy`, fp32 ().

    `recipe` is a `Linear` for which `has_codes` is True. The other arguments are those of `linear_cross_entropy`.

    Raises:
        ValueError: the weights are differentiated.
    """
    config = _LossConfig(None, label_smoothing, z_loss, vocabulary_axis, None, recipe)
    weights = derivatives.error_if_differentiated(
        "token weights have no gradient if the 8-bit output head is fused with its softmax cross-entropy. Apply "
        "jax.lax.stop_gradient to them, or keep the head in 16 bits",
        weights,
    )
    return _weighted_sum_of_losses(config, x, w, bias, None, labels, weights)


def _weighted_sum_of_losses(
    config: _LossConfig, x: Array, w: Array, bias: Array | None, key: Array | None, labels: Array, weights: Array
) -> Array:
    x, w, bias, labels, guard = _check_and_guard(config, x, w, bias, labels, weights != 0)
    total = _sum(config, x, w, bias, key, labels, weights, guard)
    return derivatives.check_differentiable_dtypes("linear_cross_entropy", total, x, w, bias)


def _check_and_guard(
    config: _LossConfig, x: Array, w: Array, bias: Array | None, labels: Array, is_counted: Array
) -> tuple[Array, Array, Array | None, Array, Array]:
    """Return the operands, labels as int32, and an empty operand through which a second derivative fails."""
    vocabulary = w.shape[config.vocabulary_axis]
    check_labels(labels, is_counted, vocabulary)
    labels = to_int32_labels(labels, vocabulary)
    x, w, bias = cast_varying_like((x, w, bias), x, w, bias, labels, is_counted)
    guard = derivatives.second_order_guard(
        derivatives.qualified_op_name(f"linear_cross_entropy of {x.shape} and {w.shape}"), x, w, bias
    )
    return x, w, bias, labels, guard


class _Softmax(NamedTuple):
    """Intermediate values of the loss for its gradient. `z` are capped logits.

    `local_labels` are relative to the device's shard. `has_matmul_output` is whether a product wrote `z` unchanged.
    """

    z: Array
    is_label: Array
    lse: Array
    label_logit: Array
    is_valid_label: Array
    local_labels: Array
    has_matmul_output: bool


def _values(config: _LossConfig, sharding: DimSharding, logits: Logits, labels: Array) -> tuple[Array, _Softmax]:
    """Return the loss of each token (...), from logits (..., shard of the vocabulary)."""
    if config.softcap is not None:
        logits = Logits(config.softcap * jnp.tanh(logits.values / config.softcap))
    z, (local_max_logit, total) = logits.values, max_and_sum_exp(logits)
    max_logit = zero_nonfinite(sharding.pmax(local_max_logit, "v"))
    lse = max_logit + jnp.log(
        sharding.psum(total * jnp.exp(jnp.minimum(zero_nonfinite(local_max_logit) - max_logit, 0.0)), "v")
    )
    first, vocabulary = sharding.shard_offset("v", z.shape[-1]), z.shape[-1] * sharding.num_shards("v")
    local_labels = labels - first
    is_label = local_labels[..., None] == lax.broadcasted_iota(labels.dtype, z.shape, z.ndim - 1)
    local_label_logit = (
        jnp.sum(jnp.where(is_label, z, 0.0), axis=-1)
        if logits.matmul_output is None
        else label_logits(logits.matmul_output, local_labels)
    )
    label_term = (1 - config.label_smoothing) * local_label_logit
    if config.label_smoothing:
        label_term = label_term + config.label_smoothing / vocabulary * jnp.sum(z, axis=-1)
    value = lse - sharding.psum(label_term, "v")
    if config.z_loss:
        value = value + config.z_loss * lse**2
    is_valid_label = (labels >= 0) & (labels < vocabulary)
    label_logit = sharding.psum(local_label_logit, "v")
    return jnp.where(is_valid_label, value, jnp.nan), _Softmax(
        z, is_label, lse, label_logit, is_valid_label, local_labels, logits.matmul_output is not None
    )


def _logit_cotangents(config: _LossConfig, sharding: DimSharding, softmax: _Softmax, weights: Array) -> Array:
    """Return the gradient of sum(weights * losses) with respect to the logits; 0 for tokens of weight 0."""
    z, is_label, lse, *_ = softmax
    d = jnp.exp(z - lse[..., None])
    if config.z_loss:
        d = d * (1 + 2 * config.z_loss * lse)[..., None]
    d = d - jnp.where(is_label, 1 - config.label_smoothing, 0.0)
    if config.label_smoothing:
        d = d - config.label_smoothing / (z.shape[-1] * sharding.num_shards("v"))
    if config.softcap is not None:
        d = d * (1 - (z / config.softcap) ** 2)
    weights = _mark_invalid_labels(softmax, weights)[..., None]
    return jnp.where(weights == 0, 0.0, d * weights)


def _mark_invalid_labels(softmax: _Softmax, weights: Array) -> Array:
    """Return the weights, with NaN for counted tokens with an invalid label."""
    return jnp.where(softmax.is_valid_label | (weights == 0), weights, jnp.nan)


def _describe_cotangents(
    config: _LossConfig, sharding: DimSharding, softmax: _Softmax, weights: Array
) -> LogitCotangentFacts:
    """Return the formula of `_logit_cotangents`, before the cap."""
    other_weight = config.label_smoothing / (softmax.z.shape[-1] * int(sharding.num_shards("v")))
    lse, labels, weights = (
        x.reshape(-1) for x in (softmax.lse, softmax.local_labels, _mark_invalid_labels(softmax, weights))
    )
    return LogitCotangentFacts(
        lse, labels.astype(jnp.int32), weights, 2 * config.z_loss, 1 - config.label_smoothing, other_weight
    )


def _run_sharded(
    config: _LossConfig, function: Any, outs: Any, x: Array, w: Array, bias: Array | None, *other_operands: Array | None
) -> Any:
    """Run `function(sharding, *operands)` on shards of tokens and vocabulary. `LinearHead` shards its own products."""
    if config.linear_recipe is not None and not has_codes(config.linear_recipe):
        return function(UNSHARDED, x, w, bias, *other_operands)
    weight: Any = _WEIGHT_DIMS[config.vocabulary_axis]
    operand: Array | HeadCodes = w
    if config.linear_recipe is not None:
        weight, vocabulary = CODES_DIMS, w.shape[config.vocabulary_axis]
        max_cotangent = None
        if len(other_operands) > 2:
            assert other_operands[2] is not None
            max_cotangent = scaling.compute_amax(other_operands[2]) * max_logit_cotangent(
                vocabulary, config.softcap, config.z_loss
            )
        operand = quantize_head(x, w, config.vocabulary_axis, config.linear_recipe, max_cotangent)
    tokens = _token_dims(x)
    ins = (f"{tokens} -", weight, "v", *[tokens if a is not None else "" for a in other_operands])
    operands = (x, operand, bias, *other_operands)
    name = f"linear_cross_entropy_{function.func.__name__}"
    return cast_varying_like(run_partitioned(name, config, function, operands, ins, outs, is_kernel=False), operands)


_WEIGHT_DIMS = ("v -", "- v")


def _token_dims(x: Array) -> str:
    return " ".join(f"t{i}" for i in range(x.ndim - 1))


def _chunks(config: _LossConfig, x: Array, shape: tuple[int, ...]) -> TokenChunks:
    return TokenChunks.from_array(
        x, shape[config.vocabulary_axis], has_codes(config.linear_recipe), config.tokens_per_chunk
    )


def _compute_losses(
    config: _LossConfig,
    sharding: DimSharding,
    x: Array,
    w: Array | HeadCodes,
    bias: Array | None,
    key: Array | None,
    labels: Array,
) -> Array:
    """Return the loss of each token of a device's shard, (...).

    Chunks of tokens run one after the other, so that only the logits of one chunk are in memory. `w` and `bias` may be
    of a shard of the vocabulary. `labels` are of the whole one.
    """
    head = make_head(w, config.vocabulary_axis, config.linear_recipe, key, x.dtype)
    chunks = _chunks(config, x, weight_shape(w, config.vocabulary_axis))

    def chunk(operands: tuple[Array, Array]) -> Array:
        return _values(config, sharding, compute_logits(head, operands[0], bias)[0], operands[1])[0]

    return chunks.merge(lax.map(chunk, (chunks.split(x), chunks.split(labels))))


class _Gradients(NamedTuple):
    """The weighted sum of the losses, and its gradients with respect to the head's input, weight and bias."""

    total: Array
    x: Array
    w: Array
    bias: Array | None


def _compute_gradients(
    config: _LossConfig,
    sharding: DimSharding,
    x: Array,
    w: Array | HeadCodes,
    bias: Array | None,
    key: Array | None,
    labels: Array,
    weights: Array,
) -> _Gradients:
    """Compute loss and gradients with three products per chunk."""
    head = make_head(w, config.vocabulary_axis, config.linear_recipe, key, x.dtype)
    shape, tokens = weight_shape(w, config.vocabulary_axis), _token_dims(x)
    chunks = _chunks(config, x, shape)

    def chunk(sums: Any, operands: Any) -> Any:
        x, labels, weights = operands
        logits, vjp_fn = compute_logits(head, x, bias)
        values, softmax = _values(config, sharding, logits, labels)
        d = _logit_cotangents(config, sharding, softmax, weights)

        def describe(weights: Array) -> LogitCotangentFacts | None:
            """The formula of the cotangents, if the logits are as the product wrote them."""
            return _describe_cotangents(config, sharding, softmax, weights) if softmax.has_matmul_output else None

        if isinstance(w, HeadCodes):
            assert config.linear_recipe is not None
            facts_before_cap = _describe_cotangents(config, sharding, softmax, weights)
            bound = cotangent_bound(facts_before_cap, softmax.z, softmax.label_logit, config.softcap)
            divisor = w.chunk_divisor(config.linear_recipe, bound)
            if config.z_loss and config.softcap is None:
                vocabulary = logits.values.shape[-1] * sharding.num_shards("v")
                divisor = divisor * bound_excess(vocabulary, config.z_loss, jnp.where(weights == 0, 0.0, softmax.lse))
            facts = describe(weights / divisor)
            dx, dw = (divisor * gradient.astype(jnp.float32) for gradient in vjp_fn(d / divisor, facts))
        else:
            dx, dw = vjp_fn(d, describe(weights))
        total, sum_w, sum_bias = sums
        if sum_bias is not None:
            sum_bias = sum_bias + jnp.sum(d, axis=tuple(range(d.ndim - 1)))
        return (total + _weighted_sum(values, weights), sum_w + dw, sum_bias), dx.astype(x.dtype)

    zeros = (
        jnp.float32(0),
        jnp.zeros(shape, jnp.float32),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    zeros = cast_varying_like(zeros, x, labels, weights)
    (total, dw, db), dx = lax.scan(chunk, zeros, tuple(map(chunks.split, (x, labels, weights))))
    # Reduce dw and the loss over shards of tokens, and dx over shards of the vocabulary, once, in the products' dtype.
    total, dx = sharding.psum(total, tokens), sharding.psum(chunks.merge(dx), "v")
    return _Gradients(
        total, dx, sharding.psum(dw.astype(x.dtype), tokens), None if db is None else sharding.psum(db, tokens)
    )


def _weighted_sum(values: Array, weights: Array) -> Array:
    return jnp.sum(jnp.where(weights == 0, 0.0, values * weights))


def _sharded_losses(config: _LossConfig, x: Array, *operands: Any) -> Array:
    return _run_sharded(config, functools.partial(_compute_losses, config), _token_dims(x), x, *operands)


def _sharded_gradients(
    config: _LossConfig, differentiable_inputs: tuple[Array | None, ...], *operands: Any
) -> _Gradients:
    """Return the gradients. With a recipe they cannot be differentiated again."""
    if config.linear_recipe is not None:
        operands = lax.stop_gradient(operands)
    x, w, bias, *_ = operands
    outs = ("", f"{_token_dims(x)} -", _WEIGHT_DIMS[config.vocabulary_axis], "v")
    total, *gradients = _run_sharded(config, functools.partial(_compute_gradients, config), outs, *operands)
    resharded: list[Any] = [
        g if g is None else reshard(g, spec_of(a), a) for g, a in zip(gradients, (x, w, bias), strict=True)
    ]
    result, name = _Gradients(total, *resharded), f"linear_cross_entropy of {x.shape} and {w.shape}"
    return (
        result if config.linear_recipe is None else derivatives.differentiable_once(name, result, differentiable_inputs)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(config: _LossConfig, *operands: Any) -> Array:
    """Return the weighted sum of the losses of x, w, bias, key and labels, from these, the weights and a guard."""
    *loss_operands, weights, _ = operands
    return _weighted_sum(_sharded_losses(config, *loss_operands), weights)


def _sum_forward(config: _LossConfig, *operands: Any) -> tuple[Array, Any]:
    gradients = _sharded_gradients(config, operands[-1:], *operands[:-1])
    return gradients.total, (gradients, _dtype_carriers(*operands[:3]))


def _sum_backward(config: _LossConfig, residuals: Any, cotangent: Array) -> Any:
    gradients, dtypes = residuals
    return _scale_gradients(gradients, dtypes, cotangent)


def _dtype_carriers(*arrays: Array | None) -> tuple[Array | None, ...]:
    """Return empty arrays that carry the cotangents' dtypes to a backward pass."""
    return tuple(None if a is None else jnp.zeros((0,), a.dtype) for a in arrays)


def _scale_gradients(gradients: _Gradients, dtype_carriers: Any, factor: Array | float) -> Any:
    """Return the cotangents of all operands: gradients times a factor, in the operands' dtypes."""
    scaled = [
        None if g is None else (g.astype(jnp.float32) * factor).astype(like.dtype)
        for g, like in zip(gradients[1:], dtype_carriers, strict=True)
    ]
    return (*scaled, None, None, None, None)


_sum.defvjp(_sum_forward, _sum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_token(config: _LossConfig, *operands: Any) -> Array:
    """Return the losses of x, w, bias, key and labels, from these, the mask of counted tokens and a guard."""
    *loss_operands, is_counted, _ = operands
    return jnp.where(is_counted, _sharded_losses(config, *loss_operands), 0.0)


def _per_token_forward(config: _LossConfig, *operands: Any) -> Any:
    return _per_token(config, *operands), operands


def _per_token_backward(config: _LossConfig, residuals: Any, cotangents: Array) -> Any:
    *loss_operands, is_counted, guard = residuals
    weights = jnp.where(is_counted, cotangents, 0.0)
    gradients = _sharded_gradients(config, (cotangents, guard), *loss_operands, weights)
    return _scale_gradients(gradients, _dtype_carriers(*loss_operands[:3]), 1.0)


_per_token.defvjp(_per_token_forward, _per_token_backward)
