"""Labels of the cross-entropy: ignored labels, and validation of operands."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import checkify

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
        raise ValueError(f"the head takes x (..., channels) and w {expected}, not {x.shape} and {w.shape}")
    if not (jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(w.dtype, jnp.floating)):
        raise TypeError(f"x and w must be floats, not {x.dtype} and {w.dtype}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, not {labels.dtype}")
    for name, array in (("labels", labels), ("where", where)):
        if array is not None and array.shape != x.shape[:-1]:
            raise ValueError(f"{name} must have the shape {x.shape[:-1]} of x without channels, not {array.shape}")
    if where is not None and where.dtype != jnp.bool_:
        raise TypeError(f"where must be bool, not {where.dtype}")
    if bias is not None and bias.shape != (w.shape[vocabulary_axis % 2],):
        raise ValueError(f"bias must have the shape {(w.shape[vocabulary_axis % 2],)}, not {bias.shape}")


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
        f"labels that count must lie in [0, {vocabulary}), and are from {{lowest}} to {{highest}}: give tokens without "
        "a target the label that linear_cross_entropy ignores, or leave them out by where=",
        lowest=jnp.min(counted_labels),
        highest=jnp.max(counted_labels),
    )
