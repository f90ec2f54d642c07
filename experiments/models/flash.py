"""Attention with the residuals of flash attention: its inputs, its output and the log-sum-exp of each row.

XLA on CPUs has no flash attention. It saves probabilities, so residual bytes on a CPU differ from those on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

# Names of its output and log-sum-exp for policies of `jax.checkpoint`.
NAME = "attention"


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def flash(q_BxTxHxC: Array, k_BxTxHxC: Array, v_BxTxHxC: Array, is_causal: bool = True) -> Array:
    """Softmax attention; arrays (B, T, H, C) in any floating dtype."""
    return _forward(q_BxTxHxC, k_BxTxHxC, v_BxTxHxC, is_causal)[0]


def _scores(q_BxTxHxC: Array, k_BxSxHxC: Array, is_causal: bool) -> Array:
    s_BxHxTxS = jnp.einsum("bthc,bshc->bhts", q_BxTxHxC, k_BxSxHxC, preferred_element_type=jnp.float32)
    seen_TxS = jnp.tril(jnp.ones(s_BxHxTxS.shape[-2:], bool)) if is_causal else True
    return jnp.where(seen_TxS, s_BxHxTxS / q_BxTxHxC.shape[-1] ** 0.5, -jnp.inf)


def _forward(q: Array, k: Array, v: Array, is_causal: bool) -> tuple[Array, tuple[Array, ...]]:
    s_BxHxTxS = _scores(q, k, is_causal)
    root_BxHxT = jax.nn.logsumexp(s_BxHxTxS, axis=-1)
    p_BxHxTxS = jnp.exp(s_BxHxTxS - root_BxHxT[..., None]).astype(v.dtype)
    out_BxTxHxC = jnp.einsum("bhts,bshc->bthc", p_BxHxTxS, v)
    out_BxTxHxC, root_BxHxT = (checkpoint_name(x, NAME) for x in (out_BxTxHxC, root_BxHxT))
    return out_BxTxHxC, (q, k, v, out_BxTxHxC, root_BxHxT)


def _backward(is_causal: bool, residuals: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array]:
    q, k, v, out, d = (x.astype(jnp.float32) for x in (*residuals[:4], gradient))
    p_BxHxTxS = jnp.exp(_scores(q, k, is_causal) - residuals[4][..., None])
    dp_BxHxTxS = jnp.einsum("bthc,bshc->bhts", d, v) - jnp.sum(d * out, -1).transpose(0, 2, 1)[..., None]
    ds_BxHxTxS = p_BxHxTxS * dp_BxHxTxS / q.shape[-1] ** 0.5
    dq, dk = jnp.einsum("bhts,bshc->bthc", ds_BxHxTxS, k), jnp.einsum("bhts,bthc->bshc", ds_BxHxTxS, q)
    dv = jnp.einsum("bhts,bthc->bshc", p_BxHxTxS, d)
    return dq.astype(residuals[0].dtype), dk.astype(residuals[1].dtype), dv.astype(residuals[2].dtype)


flash.defvjp(_forward, _backward)


def dot_product_attention(
    query: Array, key: Array, value: Array, *, is_causal: bool, implementation: str | None = None
) -> Array:
    """A replacement of `jax.nn.dot_product_attention` for equal numbers of heads."""
    return flash(query, key, value, is_causal)
