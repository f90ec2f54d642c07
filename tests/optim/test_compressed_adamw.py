"""`compressed_adamw`: exact AdamW in fp32, bounded updates and errors in 8 bits."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax.optim.compress_state import CountedState
from tests.rows import covering, few

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20)


SETTINGS = {
    "defaults": {},
    "all numbers": {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "eps_root": 1e-9, "weight_decay": 0.1},
    "mask": {"weight_decay": 0.1, "mask": {"w": True, "b": False, "s": True}},
    "mask function": {"weight_decay": 0.1, "mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p)},
}


@pytest.mark.parametrize(("jit", "settings"), covering([False, True], SETTINGS))
def test_fp32_moments_give_the_bits_of_optax_adamw(jit, settings):
    settings = SETTINGS[settings]
    p = {"w": jax.random.normal(jax.random.key(0), (40, 300)), "b": jnp.ones(7), "s": jnp.float32(2)}
    compile = jax.jit if jit else lambda f: f
    ours, theirs = (
        fp8jax.compressed_adamw(SCHEDULE, mu="fp32", nu="fp32", **settings),
        optax.adamw(SCHEDULE, **settings),
    )
    a, b = p, p
    state, reference = ours.init(a), theirs.init(b)
    update, reference_update = compile(ours.update), compile(theirs.update)
    for step in range(12 if jit else 3):
        g = jax.tree.map(lambda x, step=step: jax.random.normal(jax.random.key(step), x.shape), p)
        u, state = update(g, state, a)
        v, reference = reference_update(g, reference, b)
        a, b = optax.apply_updates(a, u), optax.apply_updates(b, v)
        chex.assert_trees_all_equal(u, v)
    chex.assert_trees_all_equal((a, state.mu, state.nu), (b, reference[0].mu, reference[0].nu))


def test_scale_by_compressed_adam_in_fp32_gives_the_bits_of_optax():
    p = {"w": jax.random.normal(jax.random.key(0), (40, 300)), "b": jnp.ones(7)}
    ours, theirs = fp8jax.scale_by_compressed_adam(mu="fp32", nu="fp32"), optax.scale_by_adam()
    state, reference = ours.init(p), theirs.init(p)
    for _ in range(5):
        u, state = jax.jit(ours.update)(p, state)
        v, reference = jax.jit(theirs.update)(p, reference)
        chex.assert_trees_all_equal(u, v)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_step_is_update_followed_by_apply_updates(dtype):
    p = {"w": jax.random.normal(jax.random.key(0), (40, 300)).astype(dtype), "b": jnp.ones(7, dtype)}
    g = jax.tree.map(lambda x: 0.1 * x, p)
    tx = fp8jax.compressed_adamw(1e-2, weight_decay=0.1)
    state = tx.init(p)
    updates, expected = jax.jit(tx.update)(g, state, p)
    stepped, actual = jax.jit(tx.step)(g, state, p)
    chex.assert_trees_all_equal(actual, expected)
    applied = optax.apply_updates(p, updates)
    # bf16: `step` rounds once, `update` and `apply_updates` twice.
    tolerance = {"rtol": 1e-6, "atol": 1e-8} if dtype == jnp.float32 else {"rtol": 2.0**-7}
    chex.assert_trees_all_close(stepped, applied, **tolerance)


def test_moments_take_at_most_2_10_bytes_a_parameter():
    p = {"w": jnp.zeros((256, 688)), "v": jnp.zeros((1024, 1024)), "b": jnp.zeros(256)}
    size = sum(x.size for x in jax.tree.leaves(p))
    state = optax.chain(optax.clip(1.0), fp8jax.compressed_adamw(1e-3)).init(p)
    measured = fp8jax.state_bytes(state)
    assert (measured["mu"] + measured["nu"]) / size <= 2.10
    assert measured == {**measured, "mu": measured["nu"], "other": 4}
    assert fp8jax.state_bytes(optax.adamw(1e-3).init(p))["nu"] == 4 * size


@pytest.mark.parametrize(
    ("tx", "mu", "nu"),
    [
        (optax.lion(1e-3), 1, 0),
        (optax.sgd(1e-3, momentum=0.9), 1, 0),
        (optax.rmsprop(1e-3, momentum=0.9), 1, 1),
        (optax.adafactor(1e-3, momentum=0.9, factored=False), 1, 1),
        (optax.MultiSteps(optax.lion(1e-3), 2).gradient_transformation(), 1, 0),
        (optax.inject_hyperparams(optax.adamw)(1e-3), 1, 1),
    ],
    ids=["lion", "sgd", "rmsprop", "adafactor", "MultiSteps", "injected"],
)
def test_bytes_are_counted_by_role_for_every_optimizer(tx, mu, nu):
    p = {"v": jnp.zeros((64, 128))}
    exact = fp8jax.state_bytes(jax.eval_shape(tx.init, p))
    assert exact["mu"] == mu * 4 * 64 * 128
    assert 0 <= exact["nu"] - nu * 4 * 64 * 128 <= 8
    gradients = isinstance(jax.eval_shape(tx.init, p), optax.MultiStepsState) * 4 * 64 * 128
    assert 0 <= exact["other"] - gradients <= 64
    ours = fp8jax.compress_state(tx, {"acc_grads": "fp32"} if gradients else {})
    state = jax.eval_shape(ours.init, p)
    ours = fp8jax.state_bytes(state)
    assert ours["mu"] == mu * (1 + 6 / 128) * 64 * 128
    assert ours["other"] == exact["other"] + 4 * isinstance(state, CountedState)


def test_factored_rows_and_columns_are_second_moments():
    sizes = fp8jax.state_bytes(optax.adafactor(1e-3).init({"w": jnp.zeros((256, 512))}))
    assert 4 * (256 + 512) <= sizes["nu"] <= 4 * (256 + 512) + 4


class Named(NamedTuple):
    w: jax.Array
    v: jax.Array


def test_names_of_parameters_do_not_count_as_those_of_moments():
    sizes = fp8jax.state_bytes(optax.lion(1e-3).init(Named(jnp.zeros(100), jnp.zeros(50))))
    assert sizes == {"mu": 600, "nu": 0, "other": 4}


N = 128
GROUPS = {
    "all zero": lambda rng: np.zeros(N),
    "one non-zero": lambda rng: np.where(np.arange(N) == 5, rng.normal(), 0),
    "one magnitude": lambda rng: np.where(rng.random(N) < 0.5, -0.3, 0.3),
    "one value": lambda rng: np.full(N, 0.01),
    "half zeros": lambda rng: rng.normal(size=N) * (np.arange(N) < N // 2),
    "one 3000 times its neighbours": lambda rng: (
        np.where(rng.random(N) < 0.5, -1, 1) * np.where(np.arange(N) == 7, 0.3, 1e-4)
    ),
    "normal": lambda rng: rng.normal(size=N),
    "denormal": lambda rng: rng.normal(size=N) * 1e-41,
}


@functools.cache
def updates_of(tx) -> np.ndarray:
    """Returns updates of 250 steps on every group: (steps, groups, N)."""
    rngs = {name: np.random.default_rng(i) for i, name in enumerate(GROUPS)}
    gradients = np.stack([[make(rngs[name]) for name, make in GROUPS.items()] for _ in range(250)]).astype(np.float32)

    @jax.jit
    def run(gradients):
        return jax.lax.scan(lambda state, g: tx.update(g, state)[::-1], tx.init(gradients[0]), gradients)[1]

    return np.asarray(run(gradients))


@pytest.mark.parametrize(
    ("moments", "b2", "rounding"),
    few(
        [(moments, *settings) for moments in ({}, {"expand": False}, {"nu": "e5m2"}, {"mu": "bf16"})
         for settings in ((0.95, "nearest"), (0.999, "nearest"), (0.999, "stochastic"))],
        ({}, 0.95, "nearest"), ({"expand": False}, 0.999, "nearest"), ({}, 0.999, "stochastic"),
        ({"nu": "e5m2"}, 0.95, "nearest"),
    ),
    ids=str,
)  # fmt: skip
def test_no_group_of_gradients_makes_updates_larger_than_exact_adamw(moments, b2, rounding):
    """By at most a tenth with rounding to nearest; with stochastic rounding, by the worst noise of a second moment."""
    exact = np.abs(updates_of(optax.scale_by_adam(b2=b2))).max(axis=(0, 2))
    ours = updates_of(fp8jax.scale_by_compressed_adam(b2=b2, min_size=0, nu_rounding=rounding, **moments))
    assert not np.isnan(ours).any()
    largest = np.abs(ours).max(axis=(0, 2))
    assert (largest <= (1.1 if rounding == "nearest" else 2.0) * exact).all(), dict(
        zip(GROUPS, zip(largest, exact, strict=True), strict=True)
    )


@pytest.mark.parametrize(
    ("gradient", "finite"),
    [
        (0.0, True),
        (0.5, True),
        (1e-42, True),
        (1e18, True),
        (3e19, True),
        (-1e30, True),
        (3.4e38, True),
        (np.nan, False),
        (np.inf, False),
        (-np.inf, False),
    ],
    ids=str,
)
def test_extreme_gradients_do_as_documented(gradient, finite):
    """NaN and Inf appear only in their own updates. A finite gradient of any size causes neither."""
    tx = fp8jax.scale_by_compressed_adam(min_size=0)
    normal = jax.random.normal(jax.random.key(0), (2, 128))
    g = normal.at[0, 3].set(gradient)
    state = tx.init(g)
    calls = []
    for _ in range(3):
        update, state = jax.jit(tx.update)(g, state)
        calls.append(np.asarray(update))
    others = np.ones((2, 128), bool)
    others[0, 3] = False
    assert np.isfinite(np.stack(calls)[:, others]).all()
    assert np.isfinite(np.stack(calls)[:, 0, 3]).all() == finite


def test_apply_if_finite_skips_a_nan_and_keeps_the_state():
    tx = optax.apply_if_finite(fp8jax.compressed_adamw(1e-2), 3)
    p = {"w": jnp.ones((64, 128))}
    state = tx.init(p)
    _, state = tx.update(p, state, p)
    updates, after = jax.jit(tx.update)({"w": p["w"].at[0, 0].set(jnp.nan)}, state, p)
    assert float(jnp.abs(updates["w"]).max()) == 0
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"b1": 1.0}, r"b1 must lie in \[0, 1\), not 1.0"),
        ({"b2": 1.0}, r"b2 must lie in \[0, 1\), not 1.0"),
        ({"b2": -0.1}, "b2 must lie in"),
        ({"b1": float("nan")}, "b1 must lie in"),
        ({"eps": -1e-8}, "eps must lie in"),
        ({"eps_root": -1.0}, "eps_root must lie in"),
        ({"group_size": 0}, "group_size must be a positive integer, not 0"),
        ({"group_size": -3}, "group_size must be a positive integer, not -3"),
        ({"group_size": 2.5}, "group_size must be a positive integer, not 2.5"),
        ({"min_size": -1}, "min_size must be"),
        ({"mu": "fp8"}, "unknown number format 'fp8'"),
        ({"nu": "int3"}, "unknown number format 'int3'"),
        ({"mu": "ude8"}, "mu 'ude8' is unsigned, but first moments are signed"),
        ({"mu": "e8m0"}, "is unsigned"),
        ({"nu": "e8m0"}, "'e8m0' is for scales only"),
        ({"nu": "int10"}, "codes have 10 bits; use a format with 8 or 16"),
        ({"group_size": 3.5}, "group_size must be a positive integer, not 3.5"),
        ({"group_size": float("nan")}, "group_size must be a positive integer, not nan"),
        ({"b2": float("nan")}, "b2 must lie in"),
        ({"b2": np.float32("nan")}, "b2 must lie in"),
        ({"eps": float("nan")}, "eps must lie in"),
        ({"eps": float("inf")}, "eps must lie in"),
        ({"eps_root": float("nan")}, "eps_root must lie in"),
        ({"nu_rounding": "up"}, "unknown nu_rounding 'up'; use one of auto, nearest, stochastic"),
        (
            {"nu_rounding": "stochastic", "nu": "fp32"},
            "nu_rounding 'stochastic' requires an 8-bit or bf16 nu, but nu is 'fp32'",
        ),
    ],
    ids=lambda x: str(x)[:30],
)
@pytest.mark.parametrize("make", [functools.partial(fp8jax.compressed_adamw, 1e-3), fp8jax.scale_by_compressed_adam])
def test_wrong_arguments_are_refused_at_construction(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": float("nan")}, "learning_rate must be finite, not nan"),
        ({"learning_rate": jnp.float32("inf")}, "learning_rate must be finite"),
        ({"weight_decay": -0.1}, r"weight_decay must lie in \[0, inf\), not -0.1"),
        ({"weight_decay": float("nan")}, r"weight_decay must lie in \[0, inf\), not nan"),
        ({"weight_decay": float("inf")}, "weight_decay must lie in"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_rates_that_are_no_numbers_are_refused_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        fp8jax.compressed_adamw(**{"learning_rate": 1e-3, **settings})


def test_traced_hyperparameters_pass():
    p = jnp.ones((4, 128))

    def first_update(rate, decay, b2):
        tx = fp8jax.compressed_adamw(rate, b2=b2, weight_decay=decay, min_size=0)
        return tx.update(p, tx.init(p), p)[0]

    actual = jax.jit(first_update)(1e-3, -0.1, 0.9)
    np.testing.assert_allclose(actual, -1e-3 * (1 - 0.1), rtol=1e-4)


def test_wrong_trees_are_refused_with_the_place():
    tx = fp8jax.compressed_adamw(1e-3, min_size=0)
    with pytest.raises(TypeError, match=r"\['ids'\] has dtype int32; exclude it with optax.masked"):
        tx.init({"ids": jnp.arange(3)})
    with pytest.raises(
        TypeError, match=r"\['temperature'\] is 0.07, of type float, not an array; convert it with jnp.asarray"
    ):
        tx.init({"temperature": 0.07})
    with pytest.raises(TypeError, match=r"\['act'\] is .* not an array; leave it out; for an Equinox"):
        tx.init({"act": jnp.tanh})
    p = {"w": jnp.ones((4, 128))}
    state = tx.init(p)
    with pytest.raises(ValueError, match=r"\['w'\] has shape \(128, 4\), but its moments have shape \(4, 128\)"):
        tx.update({"w": jnp.ones((128, 4))}, state, p)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(p, state)
