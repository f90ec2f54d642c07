"""Inputs and storage for the tests of the fused AdamW step."""

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor, quantize
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.optimizers.adamw import ADAMW
from fp8jax.ops.optimizers.leaf import Adam
from fp8jax.ops.optimizers.step import step_tree

ADAM = Adam(0.9, 0.999, 1e-8, 0.0, jnp.int32(3), 1e-3, 0.1)


def step(grads, mu, nu, params, adam, **options):
    """Returns the new parameters and both moments of a step."""
    new = step_tree(ADAMW, adam, grads, grads if params is None else params, mu, nu, **options)
    return new.weight, new.mu, new.nu


def update(grads, mu, nu, params, adam, **options):
    """Like `step`, with changes of parameters; without parameters, changes have the dtype of the gradients."""
    return step(grads, mu, nu, params, adam, in_place=False, **options)


def spec(name, size=128, expand=True, moment="mu"):
    if not formats.get(name).needs_scale:
        return None
    return QuantSpec(name, "group", size, expand=expand, flush_to_zero=moment != "nu")


def stored(values, name, size=128, expand=True, moment="mu"):
    how = spec(name, size, expand, moment)
    return quantize(jnp.asarray(values), how) if how else jnp.asarray(values).astype(formats.get(name).dtype)


def special(shape, seed):
    """Returns random values with special rows.

    These are zeros, one non-zero value, a constant, half zeros, an outlier, NaN, Inf, values near fp32's smallest, both
    signs of one value, values wider than the format, and values near fp32's largest.
    """
    random = np.random.default_rng(seed)
    rows, n = int(np.prod(shape[:-1])), shape[-1]
    x = random.standard_normal((rows, n)) * 10.0 ** random.uniform(-6, -1, (rows, 1))
    x[0] = 0
    x[1] = np.where(np.arange(n) == 5, 3e-4, 0)
    x[2] = 1e-3
    x[3, ::2] = 0
    x[4, 7] *= 3000
    x[5, 3] = np.nan
    x[6, 2], x[6, 9] = np.inf, -np.inf
    x[7] *= 1e-30
    x[8] = random.choice([1e-3, -1e-3], n)
    x[9] *= 10.0 ** random.uniform(-12, 0, n)
    x[10, 0] = 1e17
    return x.astype(np.float32).reshape(shape)


def decoded(q):
    """Returns a moment in float64, by the formula in QTensor's docstring."""
    if not isinstance(q, QTensor):
        return np.asarray(q).astype(np.float64)
    size, n = q.spec.group_size, q.shape[-1]
    top = formats.get(q.spec.format).max
    codes = np.asarray(q.codes).astype(np.float64)
    scale = np.repeat(np.asarray(q.scale, np.float64), size, -1)[..., :n]
    k = (
        np.ones_like(scale)
        if q.expansion is None
        else np.repeat(np.asarray(q.expansion, np.float64), size, -1)[..., :n]
    )
    return np.sign(codes) * scale * top * (np.abs(codes) / top) ** (1 / k)


def settled(g, m, v, adam=ADAM, size=128):
    """Returns the moments to store, in float64, with dead elements suppressed in each group."""
    b1, b2, t, eps = (float(x) for x in (adam.b1, adam.b2, adam.count, adam.eps))
    m, v = m.copy(), v.copy()
    for i in range(0, g.shape[-1], size):
        for row in range(g.shape[0]):
            part = np.s_[row, i : i + size]
            a, b = m[part], v[part]
            d = np.abs(a) / (1 - b1**t) / (np.sqrt(b / (1 - b2**t)) + eps)
            top, best = b.max(), np.abs(a).max() / (1 - b1**t) / (np.sqrt(b.max() / (1 - b2**t)) + eps)
            for j in np.flatnonzero((g[part] == 0) & (d < 2.0**-24 * best) & (b > 0)):
                before = b[j] / b2 * (1 - b2**t) / (1 - b2 ** (t - 1))
                if before < top / 8:
                    b[j] = max(before, top / 128)
                elif before < top / 2:
                    b[j] = top / 2
            a[d < best / 40] = 0
    return m, v


def codes_that_differ(a, b):
    x, y = (np.asarray(q.codes).astype(np.float32) for q in (a, b))
    return np.mean((x != y) & ~(np.isnan(x) & np.isnan(y)))


def tree(shape=(64, 256), size=128, mu="e4m3", nu="e4m3", grad=jnp.float32, weight=jnp.float32):
    x = jax.random.normal(jax.random.key(0), shape)
    return x.astype(grad), stored(x, mu, size), stored(x**2, nu, size, moment="nu"), x.astype(weight)
