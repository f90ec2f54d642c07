"""Attention that keeps for its backward pass what flash attention keeps: its inputs, its output and a root of each row.

XLA on CPU has no such attention: it keeps the probabilities.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of (B, T, H, C) arrays."""
    return _forward(q, k, v)[0]


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    scores = jnp.einsum("bthc,bshc->bhts", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    return jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)


def _forward(q, k, v):
    scores = _scores(q, k)
    root = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bhts,bshc->bthc", jnp.exp(scores - root[..., None]).astype(v.dtype), v)
    return out, (q, k, v, out, root)


def _backward(kept, dout):
    q, k, v, out, root = kept
    p = jnp.exp(_scores(q, k) - root[..., None])
    dout, out, v32 = (a.astype(jnp.float32) for a in (dout, out, v))
    dv = jnp.einsum("bhts,bthc->bshc", p, dout)
    dp = jnp.einsum("bthc,bshc->bhts", dout, v32) - jnp.sum(dout * out, -1).transpose(0, 2, 1)[..., None]
    ds = p * dp / q.shape[-1] ** 0.5
    dq = jnp.einsum("bhts,bshc->bthc", ds, k.astype(jnp.float32))
    dk = jnp.einsum("bhts,bthc->bshc", ds, q.astype(jnp.float32))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


flash.defvjp(_forward, _backward)


def dot_product_attention(query, key, value, *, is_causal, implementation=None):
    """In the place of `jax.nn.dot_product_attention`."""
    assert is_causal
    return flash(query, key, value)
