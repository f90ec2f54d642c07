"""FP8-LM's AdamW: bytes of the state, one step in float64, bounds of its scales, contracts of optax and Flax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from fp8jax import QTensor
from fp8jax.ops.optimizers import fp8lm, leaf

RATE, B1, B2, EPS, DECAY = 0.01, 0.9, 0.95, 1e-8, 0.1
TX = functools.partial(fp8jax.fp8lm_adamw, RATE, B1, B2, EPS, weight_decay=DECAY, min_size=0)


def values(q):
    """Dequantized values in float64."""
    return np.asarray(q.codes).astype(np.float64) * np.asarray(q.scale, np.float64)


def problem(dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"layers": jax.random.normal(keys[0], (3, 24, 40)).astype(dtype), "w": jnp.ones((40, 16), dtype)}
    grads = [
        {name: 10.0**-i * jax.random.normal(jax.random.fold_in(key, i), p.shape) for name, p in params.items()}
        for i, key in enumerate(jax.random.split(keys[1], 6))
    ]
    return params, grads


def masters_of(state, params):
    return {name: np.asarray(x, np.float64) for name, x in fp8jax.master_weights(state, params).items()}


@functools.cache
def run(master):
    """Returns all states of six steps. Gradients shrink by decades; they are in FP8, with one scale per layer."""
    tx = TX(layer_axes={"layers": 1, "w": 0}, master=master)
    params, grads = problem()
    specs = {"layers": fp8jax.QuantSpec("e4m3", layer_axes=1), "w": fp8jax.QuantSpec("e4m3")}
    grads = [{name: fp8jax.quantize(g, specs[name]) for name, g in each.items()} for each in grads]
    states, step = [(params, tx.init(params))], jax.jit(tx.step)
    for g in grads:
        states.append(step(g, states[-1][1], states[-1][0]))
    return grads, states


def test_six_bytes_a_parameter_at_rest():
    grads, states = run(None)
    params, state = states[-1]
    elements = sum(p.size for p in params.values())
    scales = 4 * 4  # an fp32 scale for each of four tensors
    at_rest = fp8jax.state_bytes((state.master, state.mu, state.nu, grads[0]))
    assert sum(at_rest.values()) == 6 * elements + 4 * scales
    assert {x.codes.dtype for x in state.master.values()} == {jnp.dtype("float16")}
    for name, p in params.items():
        for part, dtype in ((state.master, "float16"), (state.mu, "float8_e4m3fn"), (state.nu, "float16")):
            part[name].validate()
            assert part[name].codes.dtype == jnp.dtype(dtype)
            assert part[name].scale.size == (3 if p.ndim == 3 else 1)


@pytest.mark.parametrize(("master", "digit"), [(None, 2.0**-11), ("bf16+int8", 2.0**-16)])
def test_a_step_is_adamws_up_to_the_rounding_of_what_it_stores(master, digit):
    grads, states = run(master)
    for i, (g, (before, old), (params, new)) in enumerate(zip(grads, states, states[1:], strict=False), start=1):
        weights = masters_of(new, params)
        for name in params:
            m = B1 * values(old.mu[name]) + (1 - B1) * values(g[name])
            v = B2 * values(old.nu[name]) + (1 - B2) * values(g[name]) ** 2
            w = masters_of(old, before)[name]
            d = m / (1 - B1**i) / (np.sqrt(v / (1 - B2**i)) + EPS)
            w = w - RATE * (d + DECAY * w)
            least = np.asarray(new.master[name].scale) * 2.0**-24 if master is None else 0
            allowed = np.maximum(1.001 * digit * np.abs(w), least) + 1e-6 * np.abs(w)
            assert (np.abs(weights[name] - w) <= allowed).all(), (name, i)
            for q, expected, half in ((new.mu[name], m, 2.0**-4), (new.nu[name], v, 2.0**-11)):
                fmt = fp8jax.formats.get(q.spec.format)
                least = np.asarray(q.scale, np.float64) * fmt.smallest
                allowed = np.maximum(1.001 * half * np.abs(expected), least) + 1e-6 * np.abs(expected)
                assert (np.abs(values(q) - expected) <= allowed).all(), (name, i)
                # The bound leaves at most three binades of the codes' range empty.
                largest = np.abs(values(q) / np.asarray(q.scale, np.float64)).reshape(q.scale.size, -1).max(1)
                assert (largest > fmt.max / 8).all()
            assert ((values(new.nu[name]) > 0) == (v > 0)).all()
        actual = fp8jax.master_weights(new, params)
        held = fp8jax.params_from_master(new) if master is None else fp8jax.split_master_weights(actual, master)[0]
        jax.tree.map(np.testing.assert_array_equal, params, held)


@pytest.mark.parametrize(
    ("size", "rate", "decay", "grad_scale"),
    [(0.01, -1e6, 0.0, 1.0), (1e3, 1.0, 4.0, 1.0), (1.0, 0.01, 0.1, -1e4)],
    ids=["negative rate", "large decay", "negative factor"],
)
def test_scales_fit_weights_and_moments_for_any_sign_and_decay(size, rate, decay, grad_scale):
    """Scales that are too small would saturate what is stored. The gradient is in codes, of known amax, and exact."""
    w, g = (jax.random.normal(jax.random.key(i), (16, 40)) for i in range(2))
    tx = fp8jax.fp8lm_adamw(rate, B1, B2, EPS, weight_decay=decay, min_size=0)
    params, codes = {"w": (size * w).astype(jnp.bfloat16)}, fp8jax.quantize(g, "e4m3")
    new, state = jax.jit(tx.step)({"w": codes}, tx.init(params), params, grad_scale=jnp.float32(grad_scale))
    before, g = np.asarray(params["w"], np.float64), grad_scale * values(codes)
    expected = before - rate * (g / (np.abs(g) + EPS) + decay * before)
    np.testing.assert_allclose(values(state.master["w"]), expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
    np.testing.assert_allclose(
        np.asarray(new["w"], np.float64), expected, rtol=6e-3, atol=6e-3 * np.abs(expected).max()
    )
    np.testing.assert_allclose(values(state.mu["w"]), (1 - B1) * g, rtol=0.07, atol=1e-3 * np.abs(g).max())
    np.testing.assert_allclose(values(state.nu["w"]), (1 - B2) * g**2, rtol=2e-3, atol=1e-6 * (g**2).max())


@pytest.mark.parametrize("fmt", [fp8jax.formats.E4M3, fp8jax.formats.FP16], ids=str)
def test_scales_are_finite_powers_of_two_with_room_for_rounding(fmt):
    """A sum in fp32 may exceed its bound by some roundings. A bound that is not finite must not spoil the others."""
    bounds = jnp.float32([0, 1e-45, 1e-30, 1, fmt.max, fmt.max * (1 - 2.0**-22), 2 * fmt.max, 3.4e38, jnp.inf, jnp.nan])
    scale = np.asarray(fp8lm.pow2_scale_from_bound(bounds, fmt), np.float64)
    assert np.isfinite(scale).all()
    assert (np.frexp(scale)[0] == 0.5).all()
    exact = np.asarray(bounds, np.float64)[1:8]
    assert (scale[1:8] * fmt.max >= np.minimum(exact * (1 + 2.0**-21), 2.0**128 * (1 - 2.0**-24))).all()
    assert (scale[2:7] * fmt.max <= 2 * exact[1:6] * (1 + 2.0**-19)).all()
    assert (scale[8:] * fmt.max >= np.finfo(np.float32).max / (1 + 2.0**-10)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_a_copy_within_the_rounding_of_its_master_is_not_a_change(dtype):
    master = jnp.float32([1, -1.5, 2.0**-20, 1000])
    half = np.float32(jnp.finfo(dtype).eps / 2) * 2.0 ** np.floor(np.log2(np.abs(master)))
    half = np.maximum(half, np.float32(2.0**-25) if dtype == jnp.float16 else 0)
    # fp32 copies represent those of `dtype`, with steps at most as fine; adding a change rounds again.
    for share, is_kept in ((1.03, True), (-1.03, True), (1.1, False), (-1.1, False)):
        copy = master + np.float32(share) * half
        found = leaf.reconcile_master(master, _Copy(copy, dtype))
        np.testing.assert_array_equal(found, master if is_kept else copy)


class _Copy:
    def __init__(self, values, dtype):
        self.values, self.dtype = values, dtype

    def astype(self, dtype):
        assert dtype == jnp.float32
        return self.values


def test_a_change_that_is_not_finite_is_visible():
    """The copy that the caller has is kept only if a weight exceeds its bound by a finite value."""
    tx = fp8jax.fp8lm_adamw(3e38, weight_decay=10.0, min_size=0)
    params = {"w": jnp.ones((16, 40), jnp.bfloat16)}
    new, _ = jax.jit(tx.step)({"w": jnp.ones((16, 40))}, tx.init(params), params)
    assert not np.isfinite(np.asarray(new["w"], np.float32)).any()


def test_update_goes_where_step_does():
    tx = TX()
    params, grads = problem()
    state = tx.init(params)
    stepped, after = tx.step(grads[0], state, params)
    updates, actual = tx.update(grads[0], state, params)
    assert {u.dtype for u in updates.values()} == {jnp.dtype("bfloat16")}
    moved = optax.apply_updates(params, updates)
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(stepped), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2.0**-7, atol=2.0**-8 * 2 * RATE)
    jax.tree.map(np.testing.assert_array_equal, actual, after)
    jax.tree.map(np.testing.assert_array_equal, fp8jax.params_from_master(after), stepped)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("form", ["step", "update"])
def test_copies_that_somebody_has_changed_are_the_master_weights(form, dtype):
    """Each parameter independently, also far beyond the scales of codes and below their smallest value."""
    tx = fp8jax.fp8lm_adamw(RATE, B1, B2, EPS, weight_decay=DECAY, min_size=128)
    begin, rng = {"w": jnp.full((16, 40), 0.01, dtype), "b": jnp.full(40, 0.01, dtype)}, np.random.default_rng(0)
    grads = {name: jnp.asarray(rng.standard_normal(p.shape), jnp.float32) for name, p in begin.items()}

    @jax.jit
    def step(grads, state, params):
        if form == "step":
            return tx.step(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = step(grads, tx.init(begin), begin)
    other = lambda low, high: {  # noqa: E731
        name: p.at[..., ::3].set(jnp.linspace(low, high, 14, dtype=dtype)) for name, p in params.items()
    }
    left, _ = step(grads, state, params)
    actual, after = step(grads, state, changed := other(0.1, 0.5))
    half = float(jnp.finfo(dtype).eps) / 2
    for name in params:
        expected = np.asarray(changed[name], np.float64)[..., ::3]
        expected = expected - RATE * (np.sign(np.asarray(grads[name]))[..., ::3] + DECAY * expected)
        result = np.asarray(actual[name], np.float64)
        np.testing.assert_allclose(result[..., ::3], expected, rtol=2 * half + 2.0**-10, atol=2.0**-4 * RATE)
        for k in (1, 2):
            np.testing.assert_allclose(result[..., k::3], np.asarray(left[name], np.float64)[..., k::3], rtol=2 * half)
    # Much larger values are reached in the next step, which has their scale.
    actual, after = step(grads, after, changed := other(3, 5000))
    for _ in range(2):
        for name in params:
            np.testing.assert_allclose(*map(np.float64, (actual[name], changed[name])), rtol=5 * RATE, atol=5 * RATE)
        actual, after = step(jax.tree.map(jnp.zeros_like, grads), after, actual)
    masters = fp8jax.master_weights(after, actual)
    for name in params:
        np.testing.assert_allclose(masters[name], np.float64(actual[name]), rtol=1.1 * half + 2.0**-11, atol=5e-4)


def test_what_follows_in_a_chain_changes_updates_as_behind_optax():
    """The master weights follow the parameters: half the distance, and not below zero."""
    params, results = {"w": jnp.full((16, 40), 0.5)}, []
    for tx in (TX(), optax.adamw(RATE, B1, B2, EPS, weight_decay=DECAY)):
        own, tx = params, optax.chain(tx, optax.scale(0.5), optax.keep_params_nonnegative())
        state, update = tx.init(own), jax.jit(tx.update)
        for i in range(40):
            grad = 0.3 + jax.random.normal(jax.random.key(i), (16, 40))
            changes, state = update({"w": grad.at[3:].multiply(-3)}, state, own)
            own = optax.apply_updates(own, changes)
        results.append(np.asarray(own["w"]))
    np.testing.assert_allclose(*results, atol=0.1 * 40 * RATE / 2)
    assert np.linalg.norm(results[0] - results[1]) < 0.06 * np.linalg.norm(results[1] - 0.5)


def test_a_gradient_of_zeros_leaves_the_bound_of_the_second_moment():
    """The scale is one, as for a gradient with amax 448."""
    grads = {"w": jnp.full((16, 40), 1e-4).at[0].set(1e-6)}
    tx = TX()
    params = {"w": jnp.full((16, 40), 0.5)}
    codes = {"w": fp8jax.quantize(grads["w"], "e4m3")}
    _, larger = tx.step(codes, tx.init(params), params, grad_scale=jnp.float32(256))
    params, state = tx.step(codes, tx.init(params), params)
    before = values(state.nu["w"])
    np.testing.assert_allclose(values(larger.nu["w"])[1:], before[1:] * 256**2, rtol=2.0**-10)
    for zero in (fp8jax.quantize(jnp.zeros((16, 40)), "e4m3"), jnp.zeros((16, 40))):
        _, after = jax.jit(tx.step)({"w": zero}, state, params)
        np.testing.assert_allclose(values(after.nu["w"]), B2 * before, rtol=2.0**-10)
    one = fp8jax.quantize(grads["w"].at[5, 5].set(448), "e4m3")
    assert float(one.scale.max()) == 1
    _, after = jax.jit(tx.step)({"w": one}, state, params)
    np.testing.assert_allclose(values(after.nu["w"])[5, 5], (1 - B2) * 448**2, rtol=2.0**-10)


def test_master_weights_keep_small_changes_on_average_when_they_are_rounded_stochastically():
    """Each change is 1/100 of a step of fp16. Rounding to nearest loses it, which the paper accepts."""
    moved = {}
    params = {"w": jnp.ones((64, 64))}
    for rounding in ("nearest", "stochastic"):
        tx = fp8jax.fp8lm_adamw(1e-5, B1, B2, weight_decay=0.0, master_rounding=rounding)
        state, step = tx.init(params), jax.jit(tx.step)
        own = params
        for _ in range(40):
            own, state = step({"w": jnp.ones((64, 64))}, state, own)
        moved[rounding] = float(jnp.mean(1 - fp8jax.params_from_master(state, jnp.float32)["w"]))
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(40e-5, rel=0.15)  # e4m3 keeps the first moment of ones at 15/16


def test_it_works_in_nnx_optimizer():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    start = np.asarray(model.kernel[...])
    optimizer = nnx.Optimizer(model, fp8jax.fp8lm_adamw(1e-2, min_size=64), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.mean((m(jnp.ones((4, 64))) - 1) ** 2))(model))

    for _ in range(3):
        step(model, optimizer)
    moved = np.abs(np.asarray(model.kernel[...]) - start)
    assert 0.02 < moved.mean() < 0.04
    assert any(x.dtype == jnp.float16 for x in jax.tree.leaves(nnx.state(optimizer)))


def test_what_is_not_finite_is_visible_and_bad_arguments_are_named():
    tx = TX()
    params, grads = problem()
    bad = dict(grads[0], w=grads[0]["w"].at[3, 4].set(jnp.nan))
    new, state = tx.step(bad, tx.init(params), params)
    nan = np.isnan(np.asarray(new["w"], np.float32))
    assert (nan[3, 4], nan.sum()) == (True, 1)
    assert np.isfinite(np.asarray(new["layers"], np.float32)).all()
    whole = dict(bad, w=QTensor(jnp.zeros((40, 16), jnp.float8_e4m3fn), jnp.full((1, 1), jnp.nan), None, None,
                                fp8jax.QuantSpec()))  # fmt: skip
    assert np.isnan(np.asarray(tx.step(whole, tx.init(params), params)[0]["w"], np.float32)).all()
    for make, message in (
        (lambda: fp8jax.fp8lm_adamw(1e-3, mu="fp32"), "mu 'fp32' is not"),
        (lambda: fp8jax.fp8lm_adamw(1e-3, b2=1.0), "b2 must lie in"),
        (lambda: fp8jax.fp8lm_adamw(1e-3, master_rounding="up"), "master_rounding 'up'"),
        (lambda: tx.update(grads[0], state), "needs the parameters"),
        (lambda: tx.update({"layers": grads[0]["layers"], "w": jnp.ones(3)}, state, params), r"\['w'\] has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="int32"):
        tx.init({"w": jnp.ones(4, jnp.int32)})


def test_weights_leave_zero_without_saturating_and_small_second_moments_stay_above_it():
    """The first step equals the learning rate, however small the weights were. 1e-16 of the largest square is below
    fp16.
    """
    tx = fp8jax.fp8lm_adamw(0.5, B1, B2, weight_decay=0.0, min_size=0)
    params = {"w": jnp.full((16, 16), 1e-6)}
    grads = {"w": jnp.ones((16, 16)).at[0].set(1e-8)}
    params, state = tx.step(grads, tx.init(params), params)
    np.testing.assert_allclose(params["w"][1:], -0.5, rtol=0.07)  # the first moment has been rounded to e4m3
    assert (np.asarray(state.nu["w"].dequantize()) > 0).all()


def test_second_moments_below_fp32_are_its_smallest_number():
    """Against the float64 rule. Moments decay to values that fp32 flushes to zero, and none becomes zero."""
    b2 = 0.5
    tx = fp8jax.fp8lm_adamw(RATE, 0.5, b2, weight_decay=0.0, min_size=0)
    params, tiny = {"w": jnp.zeros((16, 16))}, float(np.finfo(np.float32).tiny)
    sizes = np.geomspace(3e-19, 1e-17, 256).reshape(16, 16)
    state, step, v = tx.init(params), jax.jit(tx.step), np.zeros((16, 16))
    for i in range(12):
        g = sizes * (i < 4)
        params, state = step({"w": jnp.asarray(g, jnp.float32)}, state, params)
        v = b2 * v + (1 - b2) * g**2
        # Each step rounds to fp16's 11 bits, under a scale that fp32 has.
        np.testing.assert_allclose(values(state.nu["w"]), np.maximum(v, tiny), rtol=12 * 2.0**-11)


@pytest.mark.parametrize("outlier", [2e19, 3e38])
@pytest.mark.parametrize("size", [None, 128])
def test_a_gradient_whose_square_overflows_spoils_its_own_second_moment_alone(outlier, size):
    """As in optax, that weight then stops moving. Other weights may lose their common scale, but not with scales per
    group.
    """
    tx, exact = (
        fp8jax.fp8lm_adamw(RATE, B1, B2, weight_decay=0.0, min_size=0, group_size=size),
        optax.adam(RATE, B1, B2),
    )
    params = {"w": jnp.zeros((4, 256))}
    state, theirs = tx.init(params), exact.init(params)
    step, reference, w, z = jax.jit(tx.update), jax.jit(exact.update), params, params
    for i in range(12):
        g = {"w": jax.random.normal(jax.random.key(i), (4, 256))}
        if i == 3:
            g = {"w": g["w"].at[1, 2].set(outlier)}
        u, state = step(g, state, w)
        w = optax.apply_updates(w, u)
        u, theirs = reference(g, theirs, z)
        z = optax.apply_updates(z, u)
    actual, expected = np.asarray(w["w"], np.float64), np.asarray(z["w"], np.float64)
    assert np.isfinite(actual).all()
    assert np.isfinite(expected).all()
    assert np.isinf(np.asarray(state.nu["w"].dequantize())).sum() == 1
    assert abs(actual[1, 2] - expected[1, 2]) <= 0.1 * RATE
    others = np.ones((4, 256), bool)
    others[1, : size or 256] = False
    others = others if size else np.zeros_like(others)
    np.testing.assert_allclose(actual[others], expected[others], atol=0.6 * RATE)
    # The second moments of all others are what they would be.
    v, v32 = np.asarray(state.nu["w"].dequantize()), np.asarray(theirs[0].nu["w"])
    np.testing.assert_allclose(v[np.isfinite(v)], v32[np.isfinite(v32)], rtol=12 * 2.0**-11)


def test_groups_keep_their_scales_beside_an_outlier():
    """One gradient of 1e4 flushes the first moments under the same scale: the next updates are off by half."""
    off = {}
    params = {"w": jnp.zeros((8, 512))}
    exact = optax.adam(RATE, B1, B2)
    reference = jax.jit(exact.update)
    for size in (None, 128):
        tx = fp8jax.fp8lm_adamw(RATE, B1, B2, weight_decay=0.0, min_size=0, group_size=size)
        state, theirs, w, step = tx.init(params), exact.init(params), params, jax.jit(tx.update)
        for i in range(12):
            g = {"w": jax.random.normal(jax.random.key(i), (8, 512))}
            g = {"w": g["w"].at[3, 5].set(1e6)} if i == 8 else g
            u, state = step(g, state, w)
            w = optax.apply_updates(w, u)
            expected, theirs = reference(g, theirs, params)
        others = np.delete(np.arange(8 * 512).reshape(8, 4, 128), 3, axis=0).ravel()
        a, b = np.asarray(u["w"], np.float64).ravel()[others], np.asarray(expected["w"], np.float64).ravel()[others]
        off[size] = np.linalg.norm(a - b) / np.linalg.norm(b)
    assert off[None] > 0.5
    assert off[128] < 0.1
    assert state.master["w"].scale.shape == state.mu["w"].scale.shape == state.nu["w"].scale.shape == (8, 4)
    metadata = 6 * 4 / 128  # three scales and three largest magnitudes
    assert sum(fp8jax.state_bytes(state).values()) == pytest.approx((5 + metadata) * 8 * 512, abs=8)


def test_groups_are_refused_or_left_out_where_they_cannot_be():
    with pytest.raises(ValueError, match="impl 'triton' supports only one scale per layer"):
        fp8jax.fp8lm_adamw(1e-3, group_size=128, impl="triton")
    with pytest.raises(ValueError, match="group_size must be a positive integer, not 0"):
        fp8jax.fp8lm_adamw(1e-3, group_size=0)
    tx = fp8jax.fp8lm_adamw(1e-3, group_size=128, min_size=0)
    state = jax.eval_shape(tx.init, {"short": jnp.zeros((256, 20)), "w": jnp.zeros((20, 200))})
    assert {x.dtype for x in (state.master["short"], state.mu["short"], state.nu["short"])} == {jnp.dtype("float32")}
    assert state.nu["w"].scale.shape == (20, 2)
    # A gradient with codes under other scales than the groups' is decoded, for any shape.
    params = {"w": jnp.ones((1, 128))}
    grads = {"w": fp8jax.quantize(params["w"], "e4m3")}
    changed, state = tx.step(grads, tx.init(params), params)
    np.testing.assert_allclose(changed["w"], 1 - 1e-3, rtol=1e-3)
