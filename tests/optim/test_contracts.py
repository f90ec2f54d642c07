"""Contracts of both AdamWs in one table: each property is tested for both.

The change is known in advance where possible. With gradients of zero only the decay remains, -rate * weight_decay *
weight. A first gradient of constant magnitude moves every weight by the learning rate.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
from tests.rows import covering, few

BOTH = {
    "compressed_adamw": functools.partial(fp8jax.compressed_adamw, min_size=512),
    "fp8lm_adamw": functools.partial(fp8jax.fp8lm_adamw, min_size=512),
}
both = pytest.mark.parametrize("make", BOTH.values(), ids=BOTH)
forms = pytest.mark.parametrize("form", ["update", "step"])
# In codes, and too small for them.
PARAMS = {"w": jnp.full((4, 128), 3.0), "b": jnp.full(7, 5.0)}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)


def change(tx, form, grads, state, params, **options):
    """Returns the change of each parameter in a step, in float64, and the new state."""
    result, new = getattr(tx, form)(grads, state, params, **options)
    if form == "step":
        result = jax.tree.map(lambda new, old: np.float64(new) - np.float64(old), result, params)
    return jax.tree.map(np.float64, result), new


@jax.tree_util.register_pytree_node_class
class Model(dict):
    """A callable pytree, like an Equinox model."""

    def tree_flatten(self):
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, keys, values):
        return cls(zip(keys, values, strict=True))

    def __call__(self, x):
        raise AssertionError("the mask was called")


MASKS = {
    "tree": ({"w": True, "b": False}, {"w"}),
    "other tree": ({"w": False, "b": True}, {"b"}),
    "no parameter": ({"w": False, "b": False}, set()),
    "tree that can be called": (Model(w=True, b=False), {"w"}),
    "function": (lambda p: {name: x.ndim == 1 for name, x in p.items()}, {"b"}),
    "none": (None, {"w", "b"}),
}


@pytest.mark.parametrize(("mask", "make", "form"), covering(MASKS, BOTH.values(), ["update", "step"]))
def test_the_mask_says_what_decays(make, form, mask):
    argument, decaying = MASKS[mask]
    params = Model(PARAMS) if isinstance(argument, Model) else PARAMS
    tx = make(2.0**-3, weight_decay=0.5, mask=argument)
    changes, _ = change(tx, form, jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    for name, x in changes.items():
        np.testing.assert_array_equal(x, -(2.0**-3) * 0.5 * np.float64(PARAMS[name]) * (name in decaying), name)


@both
@forms
def test_the_decay_is_multiplied_by_the_rate_of_the_step(make, form):
    tx = make(optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5, 3: 0.25}), weight_decay=0.25)
    params = {**PARAMS, "n": jnp.full((2, 4), 4.0, jnp.bfloat16)}
    for count, rate in enumerate((1.0, 0.5, 0.25, 1 / 16)):
        state = tx.init(params)._replace(count=jnp.int32(count))
        actual, after = change(tx, form, jax.tree.map(jnp.zeros_like, params), state, params)
        for name, x in actual.items():
            np.testing.assert_array_equal(x, -rate * 0.25 * np.float64(params[name]), name)
        assert after.count == count + 1


@both
def test_the_decay_is_by_default_that_of_optax(make):
    actual, _ = change(make(1.0), "update", {"b": ZEROS["b"]}, make(1.0).init({"b": PARAMS["b"]}), {"b": PARAMS["b"]})
    expected, _ = optax.adamw(1.0).update(
        {"b": ZEROS["b"]}, optax.adamw(1.0).init({"b": PARAMS["b"]}), {"b": PARAMS["b"]}
    )
    np.testing.assert_allclose(actual["b"], expected["b"], rtol=1e-3)  # if a master weight is subtracted from its copy
    assert not any(
        x.any()
        for x in change(make(1.0, weight_decay=0.0), "update", ZEROS, make(1.0).init(PARAMS), PARAMS)[0].values()
    )


# Constructs an optimizer from the arguments of optax's AdamW, by another way than its own function.
ROUNDABOUT = {
    "coat": functools.partial(fp8jax.optimizer, "coat", min_size=512),
    "fp8_lm": functools.partial(fp8jax.optimizer, "fp8_lm", min_size=512),
    "stored": lambda *args: fp8jax.compress_state(
        optax.adamw(*args[:5], weight_decay=args[5], mask=args[6]), min_size=512
    ),
}


@pytest.mark.parametrize(
    ("name", "count", "dtypes"),
    covering([*BOTH, *ROUNDABOUT], [0, 4], [("bfloat16", "float32"), ("float32", "float32")]),
    ids=str,
)
def test_a_first_gradient_moves_parameters_as_adam_in_float64(name, count, dtypes):
    """From zero moments after any number of steps. Each hyperparameter has a distinct value."""
    b1, b2, eps, eps_root, rate, decay = 0.8, 0.95, 0.03, 0.002, 0.25, 0.125
    tx = {**BOTH, **ROUNDABOUT}[name](rate, b1, b2, eps, eps_root, decay, {"a": True, "b": False, "c": True})
    draw, shapes = np.random.default_rng(0).normal, {"a": (4, 128), "b": (4, 128), "c": (7,)}
    grads, params = ({k: jnp.asarray(draw(size=s), dtype) for k, s in shapes.items()} for dtype in dtypes)
    state = tx.init(params)
    state = optax.tree.set(state, count=jnp.int32(count))
    results = {"update": jax.jit(tx.update)(grads, state, params)[0]}
    if name != "stored":
        results["step"] = jax.jit(tx.step)(grads, state, params)[0]
    for form, result in results.items():
        for k in shapes:
            g, w, t = np.float64(grads[k]), np.float64(params[k]), count + 1
            m, v = (1 - b1) * g / (1 - b1**t), (1 - b2) * g * g / (1 - b2**t)
            d = -rate * (m / (np.sqrt(v + eps_root) + eps) + decay * w * (k != "b"))
            # Masters in fp16 are rounded, before the step and after it.
            half = (
                2.0**-11 * 2 * np.abs(np.where(np.abs(w + d) > np.abs(w), w + d, w)).max()
                if "lm" in name and k != "c"
                else 0
            )
            np.testing.assert_allclose(
                np.float64(result[k]), w + d if form == "step" else d, rtol=2e-6, atol=2e-6 + half
            )


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_gradient_that_is_not_finite_shows_in_its_own_weight_alone(make, bad):
    tx, params = make(1e-2), {"w": jnp.zeros((4, 128)), "b": jnp.zeros(7)}
    grads = jax.tree.map(lambda x: jnp.linspace(0.5, 1, x.size).reshape(x.shape), params)
    step = jax.jit(tx.update)
    expected, _ = step(grads, tx.init(params), params)
    actual, state = step({"w": grads["w"].at[1, 2].set(bad), "b": grads["b"].at[3].set(bad)}, tx.init(params), params)
    for name, at in (("w", (1, 2)), ("b", (3,))):
        assert np.isnan(actual[name][at])
        np.testing.assert_allclose(actual[name].at[at].set(0), expected[name].at[at].set(0), rtol=2e-3)
    later, _ = step(grads, state, jax.tree.map(jnp.zeros_like, params))
    assert np.isnan(later["b"][3])
    assert np.isfinite(np.delete(later["b"], 3)).all()


@both
def test_hyperparameters_can_be_injected_and_changed(make):
    tx = optax.inject_hyperparams(make.func, static_args=("min_size",))(
        optax.linear_schedule(0.125, 0.25, 1), weight_decay=0.5, mask={"w": True, "b": False}, min_size=512
    )
    state = jax.jit(tx.init)(PARAMS)
    update, params = jax.jit(tx.update), PARAMS
    for rate in (0.125, 0.25):
        updates, state = update(ZEROS, state, params)
        np.testing.assert_allclose(updates["w"], -rate * 0.5 * params["w"], rtol=1e-3)
        np.testing.assert_array_equal(updates["b"], 0)
        assert state.hyperparams["learning_rate"] == rate
        params = optax.apply_updates(params, updates)
    state.hyperparams.update(weight_decay=jnp.float32(0.0), b1=jnp.float32(0.5))
    updates, _ = update(params, state, params)
    direction = (1 - 0.5) / (1 - 0.5**3) / ((1 - 0.999) / (1 - 0.999**3)) ** 0.5
    np.testing.assert_allclose(updates["b"], -0.25 * direction, rtol=1e-4)
    np.testing.assert_allclose(updates["w"], -0.25 * direction, atol=1e-3)  # half a step of an fp16 master


@both
def test_what_is_no_number_is_refused(make):
    for name in ("learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"):
        for argument in ("3e-4", None, [1e-3, "a"]):
            with pytest.raises(TypeError, match=f"{name} must be a number, not"):
                make(**{"learning_rate": 1e-3, name: argument})
    for call in (fp8jax.clip_by_global_norm, lambda x: fp8jax.with_clipping(x, make(1e-3)), fp8jax.max_adam_step):
        with pytest.raises(TypeError, match="must be a number, not '1'"):
            call("1")


@pytest.mark.parametrize("min_size", [0, 4096])
@pytest.mark.parametrize("kind", ["compressed_adamw", "fp8lm_adamw", "compress_state"])
def test_parameters_of_8_bits_and_complex_gradients_are_refused(kind, min_size):
    tx = {
        "compressed_adamw": lambda: fp8jax.compressed_adamw(1e-3, min_size=min_size),
        "fp8lm_adamw": lambda: fp8jax.fp8lm_adamw(1e-3),
        "compress_state": lambda: fp8jax.compress_state(optax.adamw(1e-3), min_size=min_size),
    }[kind]()
    w = jnp.ones((4, 128))
    with pytest.raises(TypeError, match=r"\['w'\] has dtype float8_e4m3fn, which loses most updates"):
        tx.init({"w": w.astype(jnp.float8_e4m3fn)})
    with pytest.raises(TypeError, match=r"\['w'\] is a QTensor"):
        tx.init({"w": fp8jax.quantize(w, "e4m3:group128")})
    if kind != "compress_state":  # that of complex parameters is optax's
        with pytest.raises(TypeError, match=r"\['w'\] has dtype complex64; wrap .* optax.contrib.split_real_and_imag"):
            tx.init({"w": w * 1j})
    error, message = TypeError, r"the gradient of \['w'\] is complex \(complex64\)"
    if kind == "compress_state" and min_size == 0:
        error, message = ValueError, r"mu\['w'\] .* but its gradient is None or not of a floating dtype"
    with pytest.raises(error, match=message):
        tx.update({"w": w * 1j}, tx.init({"w": w}), {"w": w})


@both
@forms
def test_a_missing_gradient_is_named(make, form):
    tx = make(1e-3)
    for name in PARAMS:
        with pytest.raises(ValueError, match=rf"the gradient of \['{name}'\] is None.*optax.masked"):
            getattr(tx, form)({**PARAMS, name: None}, tx.init(PARAMS), PARAMS)
    # If the parameter is None too, there is nothing to update, as in optax.
    params = {**PARAMS, "none": None}
    result, _ = getattr(tx, form)(params, tx.init(params), params)
    assert result["none"] is None


@pytest.mark.parametrize(
    ("name", "form", "kind"),
    few(
        [(n, f, k) for n in BOTH for f in ("update", "step") for k in (AxisType.Auto, AxisType.Explicit)],
        ("compressed_adamw", "step", AxisType.Explicit), ("fp8lm_adamw", "update", AxisType.Auto),
    ),
    ids=str,
)  # fmt: skip
def test_parameters_may_lie_on_two_meshes_of_the_same_devices(name, form, kind):
    row = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    grid = jax.make_mesh((4, 2), ("y", "z"), axis_types=(kind,) * 2)
    params = {name: jax.random.normal(jax.random.key(i), (16, 1024)) for i, name in enumerate("uv")}
    places = {"u": NamedSharding(row, P(None, "x")), "v": NamedSharding(grid, P("y", None))}
    tx = BOTH[name](1e-2)
    step = jax.jit(getattr(tx, form))
    expected, _ = step(params, tx.init(params), params)
    placed = jax.device_put(params, places)
    actual, state = step(placed, tx.init(placed), placed)
    for name in params:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, atol=1e-7)
        assert actual[name].sharding.is_equivalent_to(places[name], 2)
        assert state.mu[name].codes.sharding.is_equivalent_to(places[name], 2)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@both
def test_a_step_that_is_not_applied_leaves_all_bits(make):
    tx, grads = make(1e-2), jax.tree.map(lambda x: x * jnp.linspace(0.1, 1, x.shape[-1]), PARAMS)
    step = jax.jit(tx.step)
    params, state = step(grads, tx.init(PARAMS), PARAMS)
    left = step(grads, state, params, apply_if=jnp.bool_(False))
    assert bits(left) == bits((params, state))
    assert bits(step(grads, state, params, apply_if=jnp.bool_(True))) != bits((params, state))


@both
def test_a_factor_multiplies_gradients(make):
    tx, grads = make(1e-2, eps=1.0, weight_decay=0.0), jax.tree.map(lambda x: x * 4, PARAMS)
    state = tx.init(PARAMS)
    actual, _ = tx.step(grads, state, PARAMS, grad_scale=0.25)
    expected, _ = tx.step(PARAMS, state, PARAMS)
    other, _ = tx.step(grads, state, PARAMS)
    for name in PARAMS:
        np.testing.assert_array_equal(actual[name], expected[name])
        assert np.abs(actual[name] - other[name]).max() > 1e-3


@both
@forms
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")], ids=" ".join)
def test_results_have_the_dtype_of_the_parameters(make, form, dtypes):
    tx = make(1e-2)
    grads, params = (jax.tree.map(lambda x, d=d: x.astype(d), PARAMS) for d in dtypes)
    result, new = getattr(tx, form)(grads, tx.init(params), params)
    assert {str(x.dtype) for x in jax.tree.leaves(result)} == {dtypes[1]}
    # The first moment of a gradient with one magnitude, in fp32 for any dtypes.
    np.testing.assert_allclose(new.mu["b"], 0.1 * 5, rtol=1e-6)


@forms
def test_parameters_in_float64_keep_their_bits(form):
    """Changes are in fp32. In place, they are added to the parameter and not to its fp32 value.

    `fp8lm_adamw` has master weights of its own, in at most fp32.
    """
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.full(x.shape, np.pi, jnp.float64), PARAMS)
        tx = BOTH["compressed_adamw"](2.0**-10, weight_decay=0.0)
        result, _ = getattr(tx, form)(params, tx.init(params), params)
        new = result if form == "step" else optax.apply_updates(params, result)
        for x in new.values():
            np.testing.assert_allclose(np.asarray(x), np.pi - 2.0**-10, rtol=0, atol=1e-9)


@both
@forms
def test_an_impl_that_cannot_run_raises(make, form):
    for tx in (make(1e-2, impl="triton"), fp8jax.optimizer(RECIPES[make.func], 1e-2, min_size=512, impl="triton")):
        with pytest.raises(
            (ValueError, NotImplementedError), match=r"impl 'triton' cannot run|not found for platform cpu"
        ):
            getattr(tx, form)(PARAMS, tx.init(PARAMS), PARAMS)


RECIPES = {fp8jax.compressed_adamw: "coat", fp8jax.fp8lm_adamw: "fp8_lm"}


@both
def test_the_smallest_size_arrives_through_a_recipe(make):
    for smallest, quantized in ((512, True), (513, False)):
        state = fp8jax.optimizer(RECIPES[make.func], 1e-2, min_size=smallest).init(PARAMS)
        assert isinstance(state.mu["w"], fp8jax.QTensor) == quantized


NOISY = {"compressed_adamw": {"nu_rounding": "stochastic"}, "fp8lm_adamw": {"master_rounding": "stochastic"}}


@pytest.mark.parametrize("name", NOISY)
def test_each_parameter_has_noise_of_its_own(name):
    tx = BOTH[name](1e-2, **NOISY[name])
    x = jnp.broadcast_to(jnp.linspace(0.5, 1, 512), (4, 512))
    params = {"u": x, "v": x}
    _, state = tx.step(params, tx.init(params), params)
    stored = state.nu if name == "compressed_adamw" else state.master
    assert (np.asarray(stored["u"].codes) != np.asarray(stored["v"].codes)).mean() > 0.05


@both
def test_the_clip_and_the_schedule_arrive(make):
    tx = fp8jax.with_clipping(1.0, make(lambda count: jnp.where(count == 0, 0.5, 0.25), eps=1.0, weight_decay=0.0))
    chain = optax.chain(optax.clip_by_global_norm(1.0), make(optax.piecewise_constant_schedule(0.5, {1: 0.5}), eps=1.0,
                                                             weight_decay=0.0))  # fmt: skip
    state, other = tx.init(PARAMS), chain.init(PARAMS)
    params = PARAMS
    gradient = 5 / np.sqrt(sum(np.sum(np.square(x)) for x in PARAMS.values()))  # of each bias, clipped
    for rates in (0.5, 0.5 + 0.25):
        updates, other = chain.update(PARAMS, other, params)
        expected = optax.apply_updates(params, updates)
        params, state = tx.step(PARAMS, state, params)
        for name in PARAMS:
            np.testing.assert_allclose(params[name], expected[name], rtol=1e-3)
        np.testing.assert_allclose(PARAMS["b"] - params["b"], rates * gradient / (gradient + 1), rtol=0.1)


@both
@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_a_second_moment_is_not_zero_where_the_gradient_was_not(make, b2):
    tx, g = make(1e-2, b2=b2), jnp.tile(10.0 ** jnp.linspace(-14, 0, 128), (4, 1)).at[0, 0].set(0)
    params = {"w": PARAMS["w"]}
    _, state = jax.jit(tx.step)({"w": g}, tx.init(params), params)
    np.testing.assert_array_equal(np.asarray(state.nu["w"].dequantize()) > 0, np.asarray(g) > 0)


def test_master_weights_decay_and_not_their_working_copy():
    tx = fp8jax.fp8lm_adamw(2.0**-3, weight_decay=0.5, min_size=512)
    own = jax.tree.map(lambda x: x + 2.0**-8, PARAMS)  # numbers of fp16, and of bf16 not
    copy = jax.tree.map(lambda x: x.astype(jnp.bfloat16), own)
    for form in ("update", "step"):
        _, state = getattr(tx, form)(ZEROS, tx.init(own), copy)
        for name, x in fp8jax.master_weights(state, copy).items():
            np.testing.assert_allclose(x, np.float64(own[name]) * (1 - 2.0**-4), rtol=2.0**-11)
            assert (np.float64(copy[name]) != np.float64(own[name])).all()


@both
def test_microbatches_of_multi_steps_are_one_step_of_their_mean(make):
    tx = make(1e-2)
    parts = optax.MultiSteps(tx, 2)
    state = parts.init(PARAMS)
    update = jax.jit(parts.update)
    first, state = update(ZEROS, state, PARAMS)
    assert not any(x.any() for x in jax.tree.leaves(first))
    second, _ = update(jax.tree.map(lambda x: 2 * x, PARAMS), state, PARAMS)
    expected, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    for name in PARAMS:
        np.testing.assert_allclose(second[name], expected[name], rtol=1e-5, atol=1e-6)
