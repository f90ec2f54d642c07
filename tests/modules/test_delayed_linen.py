"""Delayed scaling in Linen models: collections, training, evaluation, layers under scan."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from tests.modules.architectures import LENGTH, VOCAB, Nanodo

HISTORY = 3
DELAYED = dataclasses.replace(fp8jax.recipes.te_delayed().linear, amax_history_length=HISTORY)
KEY = jax.random.key(0)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)))
X = jax.random.normal(jax.random.key(1), (6, 16))


def make_step(model, tx, loss_of):
    def loss(params, statistics, scaling, batch):
        variables = {"params": params, "fp8jax_statistics": statistics, "fp8jax_scaling": scaling}
        y, new = model.apply(variables, batch, mutable=["fp8jax_scaling"])
        return loss_of(y), new["fp8jax_scaling"]

    @jax.jit
    def step(variables, state, batch):
        values = (variables["params"], variables["fp8jax_statistics"], variables["fp8jax_scaling"])
        (value, scaling), (grads, recorded) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*values, batch)
        updates, state = tx.update(grads, state, variables["params"])
        advanced = fp8jax.linen.advance_scaling(scaling, recorded)
        params = optax.apply_updates(variables["params"], updates)
        return variables | {"params": params, "fp8jax_scaling": advanced}, state, value

    return step


@pytest.mark.slow
def test_a_model_not_written_here_trains():
    model = fp8jax.linen.quantize(Nanodo(), DELAYED)
    variables = jax.jit(model.init)(KEY, TOKENS[:, :-1])
    plain = jax.jit(Nanodo().init)(KEY, TOKENS[:, :-1])
    jax.tree.map(np.testing.assert_array_equal, variables["params"], plain["params"])

    def loss_of(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

    tx = optax.adam(1e-2)
    step, state, losses = make_step(model, tx, loss_of), tx.init(variables["params"]), []
    for _ in range(8):
        variables, state, value = step(variables, state, TOKENS[:, :-1])
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.5
    for path, leaf in jax.tree.leaves_with_path(variables["fp8jax_scaling"]):
        name = path[-1].key
        assert (np.asarray(leaf) == 0).all() if name.startswith("seen") else (np.asarray(leaf) > 0).all(), path
    # Evaluation reads the histories, and needs them.
    assert model.apply(variables, TOKENS[:, :-1]).shape == (2, LENGTH - 1, VOCAB)
    with pytest.raises(ValueError, match="pass the collections 'fp8jax_scaling' and 'fp8jax_statistics'"):
        model.apply({"params": variables["params"]}, TOKENS[:, :-1])


def test_histories_are_the_largest_magnitudes_and_the_first_step_is_current_scaling():
    model = fp8jax.linen.quantize(nn.Dense(8, use_bias=False), DELAYED)
    variables = model.init(KEY, X)
    current = fp8jax.linen.quantize(nn.Dense(8, use_bias=False), fp8jax.recipes.te_current())
    y = model.apply(variables, X)
    np.testing.assert_allclose(y, current.apply({"params": variables["params"]}, X), rtol=1e-5, atol=1e-5)
    kernel, target = variables["params"]["kernel"], jax.random.normal(KEY, y.shape)
    tx = optax.sgd(0.0)
    step = make_step(model, tx, lambda y: jnp.sum(y * target))
    after, _, _ = step(variables, tx.init(variables["params"]), X)
    for name, value in {"x": X, "w": kernel, "dy": target}.items():
        np.testing.assert_allclose(after["fp8jax_scaling"][name], [np.abs(value).max(), 0, 0], rtol=1e-6)
    # Ten times larger inputs saturate at the old scale.
    y = model.apply(after, 10 * X)
    clipped = jnp.clip(10 * X, -jnp.abs(X).max(), jnp.abs(X).max()) @ kernel
    assert float(jnp.linalg.norm(y - clipped) / jnp.linalg.norm(clipped)) < 0.06


class Stack(nn.Module):
    axes: tuple[str, ...] = ("params",)

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Body, variable_axes=dict.fromkeys(self.axes, 0), split_rngs={"params": True}, length=3)
        return scan()(x, None)[0]


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.relu(nn.Dense(16)(x)), None


def test_stacked_layers_have_histories_of_their_own_where_scan_lifts_them():
    names = ("params", "fp8jax_scaling", "fp8jax_statistics")
    model = fp8jax.linen.quantize(Stack(names), DELAYED)
    variables = model.init(KEY, X)
    tx = optax.sgd(0.1)
    after, _, _ = make_step(model, tx, lambda y: jnp.mean(y**2))(variables, tx.init(variables["params"]), X)
    scaling = jax.tree.leaves(after["fp8jax_scaling"], is_leaf=lambda n: isinstance(n, dict) and "dy" in n)[0]
    for name in ("x", "w", "dy"):
        newest = np.asarray(scaling[name])
        assert newest.shape == (3, HISTORY)
        assert len(set(newest[:, 0].tolist())) == 3


class Around(nn.Module):
    """A loop around a quantized module."""

    inner: nn.Module
    axes: tuple[str, ...] = ("params",)

    @nn.compact
    def __call__(self, x):
        lifted = {"variable_axes": dict.fromkeys(self.axes, 0), "split_rngs": {"params": True}}
        return nn.scan(lambda part, x, _: (jnp.tanh(part(x)), None), length=3, **lifted)(self.inner, x, None)[0]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [(DELAYED, '"fp8jax_scaling": 0, "fp8jax_statistics": 0'), ("int8_fallback", '"fp8jax_scaling": 0')],
)
def test_a_loop_around_a_part_is_told_which_axes_to_write(recipe, names):
    part = fp8jax.linen.quantize(nn.Dense(16), fp8jax.Rule("", recipe))
    message = "the layer has .* in an `nn.scan` or `nn.vmap` that has no axis for the variables of this scaling. "
    axes = re.escape(f'Pass variable_axes={{"params": 0, {names}}} to it')
    with pytest.raises(ValueError, match=message + axes):
        Around(part).init(KEY, X)
    # The fix in the message works.
    model = Around(part, ("params", *re.findall(r"fp8jax_\w+", names)))
    variables = model.init(KEY, X)
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(variables))
    _, new = model.apply(variables, X, mutable=["fp8jax_scaling"])
    recorded = np.asarray(new["fp8jax_scaling"]["inner"]["seen_x"])
    assert len(recorded) == 3
    assert (np.max(recorded.reshape(3, -1), 1) > 0).all()


def test_collections_of_other_layers_are_refused():
    model = fp8jax.linen.quantize(nn.Dense(8), DELAYED)
    variables = model.init(KEY, X)
    with pytest.raises(ValueError, match="not collections of the same layers"):
        fp8jax.linen.advance_scaling(variables["fp8jax_scaling"], {"other": variables["fp8jax_statistics"]})


def test_the_program_of_an_end_of_a_step_has_one_order_of_layers():
    def end(names):
        def advance(amax):
            histories = {n: dict.fromkeys(("x", "w", "dy"), np.zeros(int(n), np.float32)) for n in names}
            scaling = {n: histories[n] | {"seen_x": amax, "seen_w": amax} for n in names}
            return fp8jax.linen.advance_scaling(scaling, {n: {"slot": amax} for n in names})

        return str(jax.make_jaxpr(advance)(1.0))

    assert end(("2", "3", "4")) == end(("4", "2", "3"))


@pytest.mark.parametrize("names", [("seen_x",), ("seen_x", "seen_w")])
def test_a_step_without_observations_is_refused(names):
    variables = fp8jax.linen.quantize(nn.Dense(8), DELAYED).init(KEY, X)
    scaling = {name: value for name, value in variables["fp8jax_scaling"].items() if name not in names}
    with pytest.raises(ValueError, match="delayed scaling has no stats of x"):
        fp8jax.linen.end_step(scaling, variables["fp8jax_statistics"])
