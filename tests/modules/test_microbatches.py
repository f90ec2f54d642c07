"""Delayed scaling over microbatches: histories get the amax of all microbatches."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax.ops.products.linear import ScalingStats

PART = dataclasses.replace(fp8jax.recipes.te_delayed().linear, amax_history_length=3)
# Of each microbatch how large its input, the weight and its gradient are; the largest stands in another place each
# time, and its neighbours are neither equal nor a half of it.
FACTORS = np.array(list(itertools.permutations([1.0, 8.0, 3.0])))
X, DY = jax.random.normal(jax.random.key(0), (6, 8)), jax.random.normal(jax.random.key(1), (6, 5))
BIAS = jnp.arange(5.0)


def largest(x) -> float:
    return float(jnp.max(jnp.abs(x)))


@nnx.jit
def _gradients(layer, x, dy):
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic))
    return nnx.grad(lambda layer: jnp.sum(layer(x * X) * (dy * DY)), argnums=wrt)(layer)


class Nnx:
    """A linear NNX layer over the microbatches of steps."""

    def __init__(self) -> None:
        self.layer = fp8jax.nnx.quantize(nnx.Linear(8, 5, rngs=nnx.Rngs(0)), PART)
        self.kernel = self.layer.kernel[...]
        self.seen = []

    def microbatch(self, x, w, dy):
        self.layer.kernel[...] = w * self.kernel
        self.seen.append(_gradients(self.layer, x, dy))

    def advance(self):
        grads = jax.tree.map(lambda *leaves: jnp.max(jnp.stack(leaves), 0), *self.seen)
        self.seen = []
        rest = fp8jax.nnx.advance_scaling(self.layer, grads)
        assert not jax.tree.leaves(nnx.split_state(rest, fp8jax.nnx.GradientStatistic, ...)[0])
        d = self.layer.dot_general
        return {name: getattr(d, name)[...] for name in ("x", "w", "dy", "seen_x", "seen_w")}

    def evaluate(self, x):
        self.layer.eval()
        y = self.layer(x * X)
        self.layer.train()
        return y


class Linen:
    """The same in Linen."""

    def __init__(self) -> None:
        self.model = fp8jax.linen.quantize(nn.Dense(5), PART)
        self.variables = self.model.init(jax.random.key(0), X)
        self.kernel = self.variables["params"]["kernel"]
        # Initialization of parameters is no step.
        assert not any(leaf.any() for leaf in jax.tree.leaves(self.variables["fp8jax_scaling"]))
        self.seen = []

    def microbatch(self, x, w, dy):
        self.variables["params"]["kernel"] = w * self.kernel

        def loss(statistics):
            variables = self.variables | {"fp8jax_statistics": statistics}
            y, new = self.model.apply(variables, x * X, mutable=["fp8jax_scaling"])
            return jnp.sum(y * (dy * DY)), new["fp8jax_scaling"]

        recorded, scaling = jax.grad(loss, has_aux=True)(self.variables["fp8jax_statistics"])
        self.variables = self.variables | {"fp8jax_scaling": scaling}
        self.seen.append(recorded)

    def advance(self):
        recorded = jax.tree.map(lambda *leaves: jnp.max(jnp.stack(leaves), 0), *self.seen)
        self.seen = []
        scaling = fp8jax.linen.advance_scaling(self.variables["fp8jax_scaling"], recorded)
        self.variables = self.variables | {"fp8jax_scaling": scaling}
        return scaling

    def evaluate(self, x):
        return self.model.apply(self.variables, x * X)


@pytest.mark.parametrize("make", [Nnx, Linen])
def test_the_largest_magnitude_of_all_microbatches_enters_the_history(make):
    layer = make()
    kernel = layer.kernel
    histories = {"x": [], "w": [], "dy": []}
    for order in range(0, 6, 2):
        for i in range(3):
            # The largest input, weight and gradient come in different microbatches, and none of them last each time.
            x, w, dy = (FACTORS[(order + shift) % 6][i] * 2.0**order for shift in (0, 1, 3))
            layer.microbatch(x, w, dy)
        actual = layer.advance()
        for name, array in (("x", X), ("w", kernel), ("dy", DY)):
            histories[name] = [largest(8.0 * 2.0**order * array), *histories[name]]
            expected = np.resize([*histories[name], 0, 0, 0], 3)
            np.testing.assert_allclose(actual[name], expected, rtol=1e-6)
        assert (actual["seen_x"], actual["seen_w"]) == (0, 0)
    # Evaluation records nothing. A step without a larger amax keeps the history's largest as its scale.
    before = layer.evaluate(1000.0)
    layer.microbatch(1.0, 1.0, 1.0)
    actual = layer.advance()
    np.testing.assert_allclose(actual["x"], [largest(X), *np.array(histories["x"])[:2]], rtol=1e-6)
    top = histories["x"][0]
    clipped = jnp.clip(1000 * X, -top, top)
    params = layer.layer if make is Nnx else layer.variables["params"]
    bias = params.bias[...] if make is Nnx else params["bias"]
    last = FACTORS[(4 + 1) % 6][2] * 2.0**4
    expected = clipped @ (last * kernel) + bias
    assert float(jnp.linalg.norm(before - expected) / jnp.linalg.norm(expected)) < 0.06


def test_a_linen_layer_asks_for_its_histories_in_evaluation():
    model = fp8jax.linen.quantize(nn.Dense(5), PART)
    params = {"params": model.init(jax.random.key(0), X)["params"]}
    with pytest.raises(ValueError, match="pass the collections 'fp8jax_scaling' and 'fp8jax_statistics'"):
        model.apply(params, X)


def test_scales_of_the_weight_follow_its_history_also_where_it_is_quantized_for_all_microbatches():
    layer = Nnx()
    layer.microbatch(1.0, 64.0, 1.0)
    layer.advance()
    layer.layer.kernel[...] = layer.kernel
    prequantized = fp8jax.nnx.quantize_weights(layer.layer)
    expected = largest(64 * layer.kernel) / 448
    for weight in prequantized.dot_general.prequantized.unflatten():
        np.testing.assert_allclose(float(weight.scale.reshape(())), expected, rtol=1e-6)
    recorded = layer.layer.dot_general.seen_x
    assert recorded[...] == 0
    result = nnx.jit(lambda prequantized, x: prequantized(x))(prequantized, X)
    np.testing.assert_allclose(
        recorded[...], largest(X), rtol=1e-6
    )  # the model advances by the statistics of its copies
    np.testing.assert_array_equal(result, layer.layer(X))


def test_a_margin_widens_every_scale_that_a_history_gives():
    part = dataclasses.replace(PART, margin=2)
    w = jax.random.normal(jax.random.key(2), (8, 5))
    state = fp8jax.update_scaling(
        fp8jax.init_scaling(part), ScalingStats(*(jnp.float32(largest(a)) for a in (X, w, DY))), part
    )

    def gradients(part, factors=(1.0, 1.0, 1.0)):
        a, b, c = factors
        f = lambda x, w: fp8jax.scaled_linear(a * x, b * w, state, jnp.zeros([]), recipe=part)[0]  # noqa: E731
        y, vjp_fn = jax.vjp(f, X, w)
        return [np.asarray(v) for v in (y, *vjp_fn(c * DY))]

    # Two powers of two above: four times larger values do not saturate yet, and without the margin they do.
    for i in range(3):
        factors = tuple(4.0 if i == j else 1.0 for j in range(3))
        exact = [np.asarray(v) for v in _exact(w, factors)]
        for a, b in zip(gradients(part, factors), exact, strict=True):
            assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)
        errors = [
            np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(gradients(PART, factors), exact, strict=True)
        ]
        assert max(errors) > 0.3


def _exact(w, factors):
    a, b, c = factors
    y, vjp_fn = jax.vjp(lambda x, w: (a * x) @ (b * w), X, w)
    return y, *vjp_fn(c * DY)


def test_the_bias_of_a_layer_with_delayed_scaling_is_added_and_has_its_gradient():
    w = jax.random.normal(jax.random.key(2), (8, 5))
    layer = functools.partial(fp8jax.scaled_linear, recipe=PART)
    for dtype in (jnp.float32, jnp.bfloat16):
        operands = X.astype(dtype), w.astype(dtype), fp8jax.init_scaling(PART), jnp.zeros([])
        y, vjp_fn = jax.vjp(lambda b, operands=operands: layer(*operands, bias=b)[0], BIAS)
        plain = layer(*operands)[0]
        assert y.dtype == dtype
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(plain + BIAS.astype(dtype), np.float32))
        (db,) = vjp_fn(DY.astype(dtype))
        expected = np.asarray(DY.astype(dtype), np.float64).sum(0)
        assert db.dtype == jnp.float32
        np.testing.assert_allclose(
            np.asarray(db, np.float64), expected, rtol=0, atol=2e-6 if dtype == jnp.float32 else 0.06
        )


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = (nnx.Linear(32, 32, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.down(self.up(x))


def test_calls_of_a_copy_with_quantized_weights_are_observed_in_the_model():
    model = fp8jax.nnx.quantize(TwoLayers(nnx.Rngs(0)), "te_delayed")
    copy = fp8jax.nnx.quantize_weights(model)
    x = jnp.ones((4, 32)).at[1, 2].set(7)
    fp8jax.nnx.grad(lambda model, x: jnp.sum(model(x)))(copy, x)
    fp8jax.nnx.advance_scaling(model)
    states = jax.tree.leaves(nnx.state(model.up, fp8jax.nnx.ScalingVariable))
    assert any(float(jnp.max(state)) == 7 for state in states)
