"""Contracts of both AdamWs, one table over them: what is promised of one is promised of its sibling.

Where a change can be told in advance it is: gradients of zero leave the decay alone, -rate * weight_decay * weight, and
a first gradient of one magnitude moves every weight by the learning rate.
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
    """What a step adds to each parameter, in float64, and the state after."""
    result, new = getattr(tx, form)(grads, state, params, **options)
    if form == "step":
        result = jax.tree.map(lambda new, old: np.float64(new) - np.float64(old), result, params)
    return jax.tree.map(np.float64, result), new


@jax.tree_util.register_pytree_node_class
class Model(dict):
    """A tree that can be called, as models of Equinox are."""

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
    "tree that can be called": (Model(w=True, b=False), {"w"}),
    "function": (lambda p: {name: x.ndim == 1 for name, x in p.items()}, {"b"}),
    "none": (None, {"w", "b"}),
}


@both
@forms
@pytest.mark.parametrize("mask", MASKS)
def test_the_mask_says_what_decays(make, form, mask):
    given, decaying = MASKS[mask]
    params = Model(PARAMS) if isinstance(given, Model) else PARAMS
    tx = make(2.0**-3, weight_decay=0.5, mask=given)
    changes, _ = change(tx, form, jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    for name, x in changes.items():
        np.testing.assert_array_equal(x, -(2.0**-3) * 0.5 * np.float64(PARAMS[name]) * (name in decaying), name)


@both
def test_what_is_no_number_is_refused(make):
    for name in ("learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"):
        for given in ("3e-4", None, [1e-3, "a"]):
            with pytest.raises(TypeError, match=f"{name} must be a number, not"):
                make(**{"learning_rate": 1e-3, name: given})
    for call in (fp8jax.clip_by_global_norm, lambda x: fp8jax.clipped(x, make(1e-3)), fp8jax.adam_limit):
        with pytest.raises(TypeError, match="must be a number, not '1'"):
            call("1")


@both
@forms
def test_a_missing_gradient_is_named(make, form):
    tx = make(1e-3)
    for name in PARAMS:
        with pytest.raises(ValueError, match=rf"the gradient of \['{name}'\] is None.*optax.masked"):
            getattr(tx, form)({**PARAMS, name: None}, tx.init(PARAMS), PARAMS)
    # Where the parameter is None, too, there is nothing to update, as in optax.
    params = {**PARAMS, "none": None}
    result, _ = getattr(tx, form)(params, tx.init(params), params)
    assert result["none"] is None


@both
@forms
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_parameters_may_lie_on_two_meshes_of_the_same_devices(make, form, kind):
    row = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    grid = jax.make_mesh((4, 2), ("y", "z"), axis_types=(kind,) * 2)
    params = {name: jax.random.normal(jax.random.key(i), (16, 1024)) for i, name in enumerate("uv")}
    places = {"u": NamedSharding(row, P(None, "x")), "v": NamedSharding(grid, P("y", None))}
    tx = make(1e-2)
    step = jax.jit(getattr(tx, form))
    want, _ = step(params, tx.init(params), params)
    placed = jax.device_put(params, places)
    got, state = step(placed, tx.init(placed), placed)
    for name in params:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-7)
        assert got[name].sharding.is_equivalent_to(places[name], 2)
        assert state.mu[name].codes.sharding.is_equivalent_to(places[name], 2)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@both
def test_a_step_that_is_not_applied_leaves_all_bits(make):
    tx, grads = make(1e-2), jax.tree.map(lambda x: x * jnp.linspace(0.1, 1, x.shape[-1]), PARAMS)
    step = jax.jit(tx.step)
    params, state = step(grads, tx.init(PARAMS), PARAMS)
    left = step(grads, state, params, applied=jnp.bool_(False))
    assert bits(left) == bits((params, state))
    assert bits(step(grads, state, params, applied=jnp.bool_(True))) != bits((params, state))


@both
def test_a_factor_multiplies_gradients(make):
    tx, grads = make(1e-2, eps=1.0, weight_decay=0.0), jax.tree.map(lambda x: x * 4, PARAMS)
    state = tx.init(PARAMS)
    got, _ = tx.step(grads, state, PARAMS, factor=0.25)
    want, _ = tx.step(PARAMS, state, PARAMS)
    other, _ = tx.step(grads, state, PARAMS)
    for name in PARAMS:
        np.testing.assert_array_equal(got[name], want[name])
        assert np.abs(got[name] - other[name]).max() > 1e-3


@both
@forms
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")], ids=" ".join)
def test_results_have_the_dtype_of_the_parameters(make, form, dtypes):
    tx = make(1e-2)
    grads, params = (jax.tree.map(lambda x, d=d: x.astype(d), PARAMS) for d in dtypes)
    result, new = getattr(tx, form)(grads, tx.init(params), params)
    assert {str(x.dtype) for x in jax.tree.leaves(result)} == {dtypes[1]}
    # The first moment of a gradient of one magnitude, in fp32 whatever the dtypes.
    np.testing.assert_allclose(new.mu["b"], 0.1 * 5, rtol=1e-6)


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
    tx = fp8jax.clipped(1.0, make(lambda count: jnp.where(count == 0, 0.5, 0.25), eps=1.0, weight_decay=0.0))
    chain = optax.chain(optax.clip_by_global_norm(1.0), make(optax.piecewise_constant_schedule(0.5, {1: 0.5}), eps=1.0,
                                                             weight_decay=0.0))  # fmt: skip
    state, other = tx.init(PARAMS), chain.init(PARAMS)
    params = PARAMS
    for _ in range(2):
        updates, other = chain.update(PARAMS, other, params)
        want = optax.apply_updates(params, updates)
        params, state = tx.step(PARAMS, state, params)
        for name in PARAMS:
            np.testing.assert_allclose(params[name], want[name], rtol=1e-3)
        assert 0 < np.abs(params["b"] - PARAMS["b"]).max() < 0.2


@both
@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_a_second_moment_is_not_zero_where_the_gradient_was_not(make, b2):
    tx, g = make(1e-2, b2=b2), jnp.tile(10.0 ** jnp.linspace(-14, 0, 128), (4, 1)).at[0, 0].set(0)
    params = {"w": PARAMS["w"]}
    _, state = jax.jit(tx.step)({"w": g}, tx.init(params), params)
    np.testing.assert_array_equal(np.asarray(state.nu["w"].dequantize()) > 0, np.asarray(g) > 0)


def test_master_weights_decay_and_not_their_working_copy():
    tx = fp8jax.fp8lm_adamw(2.0**-3, weight_decay=0.5, min_size=512)
    copy = jax.tree.map(lambda x: x + 1, PARAMS)
    for form in ("update", "step"):
        found, _ = change(tx, form, ZEROS, tx.init(PARAMS), copy)
        for name, x in found.items():
            np.testing.assert_array_equal(x, np.float64(PARAMS[name]) * (1 - 2.0**-4) - np.float64(copy[name]), name)


@both
def test_microbatches_of_multi_steps_are_one_step_of_their_mean(make):
    tx = make(1e-2)
    parts = optax.MultiSteps(tx, 2)
    state = parts.init(PARAMS)
    update = jax.jit(parts.update)
    first, state = update(ZEROS, state, PARAMS)
    assert not any(x.any() for x in jax.tree.leaves(first))
    second, _ = update(jax.tree.map(lambda x: 2 * x, PARAMS), state, PARAMS)
    want, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    for name in PARAMS:
        np.testing.assert_allclose(second[name], want[name], rtol=1e-5, atol=1e-6)
