"""Adam's direction for parameters whose moments may be stored in 8 bits: decode, update in fp32, encode."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from fp8jax.core.qtensor import QTensor, quantize

Moment = QTensor | Array


@dataclasses.dataclass(frozen=True)
class Adam:
    """The scalars of a step; each may be a traced scalar.

    Attributes:
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        eps_root: added to the second moment under the root.
        count: number of this step, from 1, int32.
    """

    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    eps_root: ArrayLike
    count: Array


def direction(grads: Any, mu: Any, nu: Any, adam: Adam) -> tuple[Any, Any, Any]:
    """Adam's bias-corrected direction (Kingma and Ba, Algorithm 1), from moments before they are stored again.

    Computed by optax's own functions over the whole tree, so moments kept in fp32 give the bits of
    `optax.scale_by_adam`: XLA divides by a bias correction differently when leaves do not share it.

    Args:
        grads: tree of gradients of any floating dtype.
        mu: the tree with the first moment, as stored, in each leaf's place.
        nu: the tree with the second moments, likewise.
        adam: the scalars of the step.

    Returns:
        The tree of directions m / (sqrt(v) + eps) in fp32, to be followed downhill, and both trees of moments, stored
        as they were given.
    """
    g = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
    m = optax.tree.update_moment(g, jax.tree.map(load, mu, is_leaf=_is_quantized), adam.b1, 1)
    v = optax.tree.update_moment_per_elem_norm(g, jax.tree.map(load, nu, is_leaf=_is_quantized), adam.b2, 2)
    m_hat = optax.tree.bias_correction(m, adam.b1, adam.count)
    v_hat = optax.tree.bias_correction(v, adam.b2, adam.count)
    d = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + adam.eps_root) + adam.eps), m_hat, v_hat)
    return d, jax.tree.map(store, m, mu), jax.tree.map(store, v, nu)


def load(moment: Moment) -> Array:
    """The fp32 values of a stored moment."""
    return moment.dequantize() if isinstance(moment, QTensor) else moment.astype(jnp.float32)


def store(values: Array, like: Moment) -> Moment:
    """Stores fp32 values in the way that `like` is stored."""
    return quantize(values, like.spec) if isinstance(like, QTensor) else values.astype(like.dtype)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QTensor)
