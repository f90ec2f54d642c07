"""The optimizer of a recipe."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import fp8jax

PARAMS = {"w": jnp.linspace(-1, 1, 64 * 128).reshape(64, 128), "b": jnp.ones(7)}


@pytest.mark.parametrize("name", fp8jax.recipes.NAMES)
def test_moments_are_stored_as_the_recipe_says(name):
    recipe = fp8jax.recipes.get(name)
    for argument in (name, recipe):
        state = jax.eval_shape(fp8jax.optimizer(argument, 1e-3).init, PARAMS)
        if recipe.linear.needs_weight_bounds:
            state, bounds = state
            assert bounds.bounds["w"].shape == ()
        for moment in ("mu", "nu"):
            stored = getattr(state, moment)["w"]
            assert (stored.spec if isinstance(stored, fp8jax.QTensor) else None) == recipe.optimizer.spec(moment)


@pytest.mark.parametrize("recipe", ["auto", fp8jax.recipes.for_shapes("coat_fast"), fp8jax.recipes.for_shapes("fast")])
def test_where_layers_are_chosen_by_what_they_gain_moments_of_small_parameters_are_those_of_optax(recipe):
    """A small model's state has as many arrays as optax's. The number of arrays determines the host time of a step."""
    small, large = jax.ShapeDtypeStruct((1024, 2047), jnp.float32), jax.ShapeDtypeStruct((1024, 2048), jnp.float32)
    params = {"a": small, "b": large, "c": {"bias": jax.ShapeDtypeStruct((4096,), jnp.float32)}}
    mu = jax.eval_shape(fp8jax.optimizer(recipe, 1e-3).init, params).mu
    assert (mu["a"], mu["c"]) == (small, params["c"])
    assert mu["b"].spec == fp8jax.recipes.coat().optimizer.spec("mu")
    ours, theirs = (jax.eval_shape(tx.init, {"a": small}) for tx in (fp8jax.optimizer(recipe, 1e-3), optax.adam(1e-3)))
    assert len(jax.tree.leaves(ours)) == len(jax.tree.leaves(theirs))
    for optimizer in (fp8jax.optimizer(recipe, 1e-3, min_size=4096), fp8jax.optimizer("coat", 1e-3)):
        assert isinstance(jax.eval_shape(optimizer.init, params).mu["a"], fp8jax.QTensor)


def test_every_setting_arrives():
    """Parameters move as with the same arguments of `compressed_adamw`; those of the plain recipe as with optax."""
    settings = {"b1": 0.8, "b2": 0.9, "eps": 1e-3, "eps_root": 1e-4, "weight_decay": 0.3}
    mask = {"w": True, "b": False}
    custom = dataclasses.replace(
        fp8jax.recipes.coat(), optimizer=fp8jax.recipes.Optimizer("e5m2", "ude8", 32, False, "stochastic")
    )
    ours = fp8jax.optimizer(custom, 1e-2, mask=mask, min_size=0, impl="xla", **settings)
    same = fp8jax.compressed_adamw(
        1e-2, mask=mask, min_size=0, impl="xla", mu="e5m2", nu="ude8", group_size=32, expand=False,
        nu_rounding="stochastic", **settings,
    )  # fmt: skip
    plain, theirs = fp8jax.optimizer("bf16", 1e-2, mask=mask, **settings), optax.adamw(1e-2, mask=mask, **settings)
    for a, b in ((ours, same), (plain, theirs), (fp8jax.optimizer("bf16", 1e-2), optax.adamw(1e-2))):
        state, reference = a.init(PARAMS), b.init(PARAMS)
        for _ in range(2):
            u, state = jax.jit(a.update)(PARAMS, state, PARAMS)
            v, reference = jax.jit(b.update)(PARAMS, reference, PARAMS)
            chex.assert_trees_all_equal(u, v)


def test_stacked_layers_have_scales_of_their_own_where_a_recipe_has_one_a_tensor():
    state = fp8jax.optimizer("fp8_lm", 1e-2, layer_axes=1, min_size=0).init({"w": jnp.ones((3, 8, 16))})
    assert state.mu["w"].scale.shape == (3, 1, 1)


def test_formats_of_masters_and_moments_arrive():
    lm, weights = fp8jax.recipes.fp8_lm(), fp8jax.recipes.Weights("bf16")
    wide = dataclasses.replace(lm, optimizer=dataclasses.replace(lm.optimizer, mu="e5m2"))
    assert fp8jax.optimizer(wide, 1e-2, min_size=0).init(PARAMS).mu["w"].spec.format == "e5m2"
    without = dataclasses.replace(fp8jax.recipes.coat(), weights=weights)
    states = [fp8jax.optimizer(recipe, 1e-2).init(PARAMS) for recipe in (without, "coat")]
    chex.assert_trees_all_equal_structs(*states)
    with pytest.raises(ValueError, match="impl"):
        fp8jax.optimizer("coat", 1e-2, impl="none")


def test_weights_of_a_recipe_with_automatic_scaling_are_followed():
    """Like `with_weight_bounds`, with the limit of the same settings and the recipe's interval; or not at all."""
    moss = fp8jax.recipes.moss()
    recipe = dataclasses.replace(moss, linear=dataclasses.replace(moss.linear, weight_amax_interval=2))
    settings = {"b1": 0.8, "b2": 0.9, "weight_decay": 0.3}
    plain = fp8jax.optimizer(recipe, 1e-2, track_weight_bounds=False, **settings)
    by_hand = fp8jax.with_weight_bounds(plain, fp8jax.max_adam_step(1e-2, 0.8, 0.9, 0.3), 2)
    results = []
    for tx in (fp8jax.optimizer(recipe, 1e-2, clip=0.5, **settings), fp8jax.with_clipping(0.5, by_hand)):
        params, state = PARAMS, tx.init(PARAMS)
        for _ in range(4):
            params, state = jax.jit(tx.step)(PARAMS, state, params)
        results.append((params, fp8jax.get_weight_amax_bounds(state)))
    chex.assert_trees_all_equal(*results)
    with pytest.raises(ValueError, match="does not track weights"):
        fp8jax.get_weight_amax_bounds(plain.init(PARAMS))
    advice = "set track_weight_bounds=False, and chain fp8jax.track_weight_amax"
    with pytest.raises(ValueError, match=rf"b1=0\.95 and b2=0\.9 .*{advice}"):
        fp8jax.optimizer("moss", 1e-2, b1=0.95, b2=0.9)
    assert fp8jax.optimizer("moss", 1e-2, b1=0.95, b2=0.9, track_weight_bounds=False)
    scaled = dataclasses.replace(
        moss, optimizer=fp8jax.recipes.fp8_lm().optimizer, weights=fp8jax.recipes.fp8_lm().weights
    )
    noisy = dataclasses.replace(moss, weights=dataclasses.replace(moss.weights, master="bf16+stochastic"))
    for refused, what in ((scaled, "moments with one scale a tensor"), (noisy, "weights rounded stochastically")):
        with pytest.raises(ValueError, match=f"{what}.*{advice}"):
            fp8jax.optimizer(refused, 1e-2)


def test_what_is_no_recipe_is_refused():
    with pytest.raises(ValueError, match=r"unknown recipe 'adam'; use one of bf16, .*coat"):
        fp8jax.optimizer("adam", 1e-3)
    with pytest.raises(TypeError, match=r"expects a recipe or the name of a preset.*call it: coat\(\)"):
        fp8jax.optimizer(fp8jax.recipes.coat, 1e-3)
    with pytest.raises(TypeError, match=r"expects a recipe or the name of a preset, got 0\.001; use for example"):
        fp8jax.optimizer(1e-3, "coat")
    with pytest.raises(ValueError, match=r"group_size must be a positive integer, not 3\.5"):
        fp8jax.recipes.Optimizer(group_size=3.5)
    with pytest.raises(ValueError, match="'ude8' is unsigned"):
        fp8jax.recipes.Optimizer(mu="ude8")
