"""Finite gradients whose squares overflow fp32: no NaN in any optimizer, and correct moments of other elements."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax.ops.optimizers.leaf import LARGEST_GRADIENT, scale_and_clip
from tests.rows import few

SMALL = {"min_size": 1}
MADE = {
    "compressed_adamw": lambda: fp8jax.compressed_adamw(1e-3, **SMALL),
    "compressed_adamw e5m2 to nearest": lambda: fp8jax.compressed_adamw(1e-3, b2=0.95, mu="e5m2", nu="e5m2", **SMALL),
    "compressed_adamw without expansion": lambda: fp8jax.compressed_adamw(1e-3, expand=False, **SMALL),
    "compressed_adamw in bf16": lambda: fp8jax.compressed_adamw(1e-3, mu="bf16", nu="bf16", **SMALL),
    "compressed_adamw in fp32": lambda: fp8jax.compressed_adamw(1e-3, mu="fp32", nu="fp32"),
    "compressed_adamw slow": lambda: fp8jax.compressed_adamw(1e-3, b1=0.99, **SMALL),
    "scale_by_compressed_adam": lambda: fp8jax.scale_by_compressed_adam(**SMALL),
    "fp8lm_adamw": lambda: fp8jax.fp8lm_adamw(1e-3, min_size=1),
    "fp8lm_adamw in groups": lambda: fp8jax.fp8lm_adamw(1e-3, min_size=1, group_size=32),
    "fp8lm_adamw in fp32": lambda: fp8jax.fp8lm_adamw(1e-3),
    "clipped": lambda: fp8jax.with_clipping(1.0, fp8jax.compressed_adamw(1e-3, **SMALL)),
    **{
        f"compress_state of {tx.__name__}": lambda tx=tx: fp8jax.compress_state(tx(1e-3), **SMALL)
        for tx in (optax.adam, optax.rmsprop, optax.adabelief, optax.yogi, optax.lamb, optax.adafactor, optax.lion)
    },
    "compress_state of sgd": lambda: fp8jax.compress_state(optax.sgd(1e-3, momentum=0.9), **SMALL),
}


@pytest.mark.parametrize(
    "kind",
    few(MADE, "compressed_adamw", "compressed_adamw in fp32", "fp8lm_adamw", "compress_state of adam"),
)
def test_no_finite_gradient_makes_nan(kind):
    """One element, then all of a tensor; in that step and in later ones."""
    tx = MADE[kind]()
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(4, 128)), jnp.float32) for name in ("one", "all", "none")}
    normal = {name: jnp.asarray(rng.normal(size=(4, 128)), jnp.float32) for name in params}

    @jax.jit
    def run(huge):
        negated = jax.tree.map(jnp.negative, huge)
        steps = jax.tree.map(lambda *gs: jnp.stack(gs), normal, huge, normal, negated, normal)

        def step(carry, grads):
            weights, state, _ = carry
            updates, state = tx.update(grads, state, weights)
            return (optax.apply_updates(weights, updates), state, updates), None

        return jax.lax.scan(step, (params, tx.init(params), params), steps)[0]

    alone = run(normal)[0]
    for size in (3e19, -1e30, float(np.finfo(np.float32).max)):
        weights, state, updates = run(
            normal | {"one": normal["one"].at[1, 5].set(size), "all": jnp.full((4, 128), size)}
        )
        quantized = lambda x: isinstance(x, fp8jax.QTensor)  # noqa: E731
        values = [x.dequantize() if quantized(x) else x for x in jax.tree.leaves(state, is_leaf=quantized)]
        for x in (*jax.tree.leaves((weights, updates)), *values):
            assert not np.isnan(np.asarray(x, np.float32)).any()
        # A second moment of fp8lm_adamw may be Inf, as in optax, if it has no codes in common with others.
        for x in (*jax.tree.leaves((weights, updates)), *([] if kind.startswith("fp8lm") else values)):
            assert np.isfinite(np.asarray(x, np.float32)).all()
        if kind.startswith("compressed_adamw"):  # a weight moves by a step's length, not by the size of the gradient
            assert max(float(jnp.abs(weights[name] - params[name]).max()) for name in params) < 0.03
        if kind != "clipped":
            np.testing.assert_array_equal(weights["none"], alone["none"])


def test_gradients_are_bounded_after_their_factor_and_only_where_both_are_finite():
    limit = float(LARGEST_GRADIENT)
    g = np.float32([0.0, -1.5, 1e18, 3e19, -3.4e38, np.inf, -np.inf, np.nan])
    for factor in (None, 1e-30, -1e30, 0.0, np.inf, np.nan):
        with np.errstate(all="ignore"):
            scaled = g.astype(np.float64) * (1.0 if factor is None else float(np.float32(factor)))
        finite = np.isfinite(g) & np.isfinite(1.0 if factor is None else factor)
        expected = np.where(finite, np.clip(scaled, -limit, limit), scaled)
        actual = scale_and_clip(jnp.asarray(g), None if factor is None else jnp.float32(factor))
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=1e-6)
