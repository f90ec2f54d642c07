"""Clipping inside the fused step, and skipped steps (`apply_if`)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax


def tree(seed, scale=1.0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {"w": scale * jax.random.normal(keys[0], (32, 256)), "b": scale * jax.random.normal(keys[1], (7,))}


PARAMS, GRADS = tree(0), tree(1)
NORM = float(optax.tree.norm(GRADS))


@pytest.fixture(scope="module", params=["bf16", "coat"])
def tx(request):
    return fp8jax.with_clipping(NORM / 4, fp8jax.optimizer(request.param, 1e-2, weight_decay=0.1))


@pytest.fixture(scope="module")
def step(tx):
    return jax.jit(tx.step)


def updated(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("scale", [0.1, 1.0, 1e6])
def test_a_step_is_that_of_the_chain(tx, step, scale):
    """Bitwise equal below the maximum norm; above it, equal up to the rounding of one more multiplication."""
    grads = jax.tree.map(lambda g: scale * g, GRADS)
    start = tx.init(PARAMS)
    assert jax.tree.structure(start) == jax.tree.structure(optax.chain(optax.identity(), tx).init(PARAMS)[1])
    expected, state = jax.jit(updated, static_argnums=0)(tx, grads, start, PARAMS)
    actual, after = step(grads, start, PARAMS)
    for a, b in zip(jax.tree.leaves((expected, state)), jax.tree.leaves((actual, after)), strict=True):
        a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
        if scale < 0.25:
            np.testing.assert_allclose(a, b, rtol=1e-6)
        else:
            assert np.mean(~np.isclose(a, b, rtol=1e-5, atol=1e-9)) < 1e-3  # codes at a tie
    moment = after[1].mu["w"]
    moment = moment.dequantize() if isinstance(moment, fp8jax.QTensor) else moment
    clipped = scale * min(1.0, 0.25 / scale) * GRADS["w"]
    np.testing.assert_allclose(moment, 0.1 * clipped, rtol=0.07, atol=1e-3 * scale * min(1.0, 0.25 / scale))


def test_a_factor_comes_before_clipping(tx, step):
    start = tx.init(PARAMS)
    for factor in (0.5, -0.5):
        expected = step(jax.tree.map(lambda g, factor=factor: factor * g, GRADS), start, PARAMS)
        actual = step(GRADS, start, PARAMS, grad_scale=factor)
        jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, x) for x in (expected, actual)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_taken_changes_no_bit(tx, step, bad):
    params, state = step(GRADS, tx.init(PARAMS), PARAMS)
    grads = {"w": GRADS["w"].at[3, 4].set(bad), "b": GRADS["b"]}
    after = step(grads, state, params, apply_if=jnp.array(False))
    for x, y in zip(jax.tree.leaves((params, state)), jax.tree.leaves(after), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    applied = step(GRADS, state, params, apply_if=jnp.array(True))
    expected = step(GRADS, state, params)
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, x) for x in (expected, applied)))
    visible, _ = step(grads, state, params, apply_if=jnp.array(True))
    assert np.isnan(np.asarray(visible["w"])).any()


def test_stochastic_rounding_is_told_through(tx):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    state = tx.init(params)
    one, other = (tx.step(GRADS, state, params, key=jax.random.key(i))[0]["w"] for i in range(2))
    assert np.mean(np.asarray(one) != np.asarray(other)) > 0.1


def test_what_cannot_be_clipped_is_refused():
    with pytest.raises(TypeError, match="with `step`"):
        fp8jax.with_clipping(1.0, optax.adam(1e-3))
    for norm in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="max_norm must be positive"):
            fp8jax.with_clipping(norm, fp8jax.compressed_adamw(1e-3))


@pytest.mark.parametrize(
    "copy",
    [lambda tx: tx._replace(init=tx.init), lambda tx: jax.tree.map(lambda x: x, tx), lambda tx: type(tx)(*tx)],
    ids=["_replace", "tree.map", "from its fields"],
)
def test_a_copy_of_a_fused_transformation_has_its_step(copy):
    tx = fp8jax.optimizer("bf16", 1e-2)
    again = copy(fp8jax.with_clipping(1.0, tx))
    params, _ = again.step(GRADS, again.init(PARAMS), PARAMS)
    expected = fp8jax.with_clipping(1.0, tx).step(GRADS, again.init(PARAMS), PARAMS)[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    with pytest.raises(TypeError, match=r"not the update of a fused transformation.*pass all three"):
        tx._replace(update=optax.sgd(1.0).update)


@pytest.mark.parametrize("most", [0.5, 1e3])
def test_gradients_in_codes_are_clipped_by_what_they_stand_for(most):
    plain = {
        "w": jax.random.normal(jax.random.key(0), (16, 128)),
        "b": jnp.arange(4.0),
        "half": jnp.ones(3, "bfloat16"),
    }
    codes = plain | {"w": fp8jax.quantize(plain["w"], fp8jax.QuantSpec("e4m3", "tensor"))}
    decoded = codes | {"w": codes["w"].dequantize()}
    tx = fp8jax.clip_by_global_norm(most)
    actual, _ = tx.update(codes, tx.init(codes))
    expected, _ = optax.clip_by_global_norm(most).update(decoded, optax.EmptyState())
    np.testing.assert_array_equal(np.asarray(actual["w"].codes, np.float32), np.asarray(codes["w"].codes, np.float32))
    np.testing.assert_allclose(actual["w"].dequantize(), expected["w"], rtol=1e-6)
    np.testing.assert_allclose(actual["b"], expected["b"], rtol=1e-6)
    assert actual["half"].dtype == jnp.bfloat16
    same, _ = tx.update(decoded, tx.init(decoded))
    np.testing.assert_array_equal(same["w"], expected["w"])
