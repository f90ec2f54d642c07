"""INT8 fallback in NNX and Linen layers: matmuls, thresholds over microbatches and replicas, residuals."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.core import scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.quantization import fallback
from fp8jax.ops.quantization import quantize as op

LINEAR = dataclasses.replace(fp8jax.recipes.int8_fallback().linear, x="int8:block32", w="int8:block32")
LINEAR = dataclasses.replace(LINEAR, dy="int8:block32+stochastic", x_residual="int8:block32+stochastic")


def outliers(tokens=96, inputs=64, large=2):
    """Normal values; `large` of the six blocks have an element of 100."""
    x = np.array(jax.random.normal(jax.random.key(0), (tokens, inputs)))
    for i in range(large):
        x[32 * (i // 2), 32 * (i % 2)] = 100
    return jnp.asarray(x)


WEIGHT = jax.random.normal(jax.random.key(1), (64, 48)) / 8


@jax.jit
def grads(x, w, dy, threshold, key):
    """Returns the output, both gradients, and the observations."""

    def run(x, w):
        return fp8jax.scaled_linear(x, w, fp8jax.init_scaling(LINEAR)._replace(x=threshold), recipe=LINEAR, key=key)

    y, vjp_fn, observed = jax.vjp(run, x, w, has_aux=True)
    return y, *vjp_fn(dy), observed


def test_the_forward_product_is_that_of_the_pair_and_both_gradients_are_unbiased():
    x, dy = outliers(), jax.random.normal(jax.random.key(2), (96, 48))
    y, _, _, observed = grads(x, WEIGHT, dy, jnp.float32(10), jax.random.key(3))
    np.testing.assert_array_equal(observed.x, [2, 6])
    pair, _ = fallback.quantize(x, "int8:block32", 10.0)
    right, _ = op.quantize(WEIGHT.T, "int8:block32")
    expected = np.asarray(pair.dequantize(), np.float64) @ np.asarray(right.dequantize(), np.float64).T
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())
    each = jax.lax.map(
        lambda key: grads(x, WEIGHT, dy, jnp.float32(10), key)[1:3], jax.random.split(jax.random.key(4), 100)
    )
    exact = np.asarray(dy, np.float64) @ np.asarray(right.dequantize(), np.float64), np.asarray(x, np.float64).T @ dy
    for actual, expected in zip(each, exact, strict=True):
        mean, spread = np.mean(actual, 0), np.std(actual, 0)
        assert (spread > 0).mean() > 0.9
        # Of 3,000 means, a few have a deviation of four standard deviations, and none of five and a half.
        assert np.abs((mean - expected) / (spread / 10 + 1e-6)).max() < 5.5


def test_a_linear_saves_int8_codes_of_its_input_and_nothing_wider():
    x = outliers().astype(jnp.bfloat16)

    def run(x, w):
        return fp8jax.scaled_linear(x, w, fp8jax.init_scaling(LINEAR), recipe=LINEAR, key=jax.random.key(0))[0]

    _, vjp_fn = jax.vjp(run, x, WEIGHT.astype(jnp.bfloat16))
    saved = [leaf for leaf in jax.tree.leaves(vjp_fn) if hasattr(leaf, "dtype") and leaf.size == x.size]
    assert [leaf.dtype.itemsize for leaf in saved] == [1]


def test_a_threshold_follows_algorithm_2():
    part = scaling.Threshold()
    state = part.init()
    for used, count, expected in (
        (0, 10, 1 / 1.3),
        (1, 10, 1 / 1.3),
        (3, 10, 1 / 1.3),
        (31, 100, 1.0),
        (0, 0, 1.0),
        (10, 10, 1.3),
    ):
        state = part.update(state, jnp.array([used, count], jnp.float32))
        np.testing.assert_allclose(state, expected, rtol=1e-6)
    for _ in range(400):  # no block falls back, as with zeros: the threshold stays positive and can grow again
        state = part.update(state, jnp.array([0.0, 8.0]))
    assert part.update(state, jnp.array([8.0, 8.0])) > state > 0
    for wrong in ((0.3, 0.1, 1.3), (-0.1, 0.3, 1.3), (0.1, 0.3, 1.0)):
        with pytest.raises(ValueError, match=r"fallback fractions|factor"):
            scaling.Threshold(*wrong)


def variables(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, fp8jax.nnx.ScalingVariable)))["dot_general"]


def test_nnx_counts_all_microbatches_and_evaluation_reads_only():
    layer = fp8jax.nnx.quantize(nnx.Linear(64, 48, rngs=nnx.Rngs(0)), LINEAR)
    run = nnx.jit(nnx.grad(lambda layer, x: jnp.sum(layer(x))))
    for large in (0, 5):  # 5 of 12 blocks: more than 30 %, unlike in each microbatch
        run(layer, outliers(large=large))
    assert variables(layer) == {"threshold_x": 1.0, "seen_x": pytest.approx([12, 12])}
    layer.eval()
    nnx.jit(lambda layer, x: layer(x))(layer, outliers())
    assert variables(layer)["seen_x"][1] == 12
    layer.train()
    fp8jax.nnx.advance_scaling(layer, run(layer, outliers()))
    actual = variables(layer)
    np.testing.assert_allclose(actual["threshold_x"], 1.3)
    np.testing.assert_array_equal(actual["seen_x"], [0, 0])


def test_linen_and_replicas_count_alike():
    model, rules = fp8jax.linen.quantize(nn.Dense(48), LINEAR), LINEAR
    # No block of the first replica falls back and all of the second one do: half of all.
    x = outliers(192, large=0).at[:96].multiply(0.1)
    variables = model.init(jax.random.key(0), x)
    params, state = variables["params"], variables["fp8jax_scaling"]

    def step(x, state, axis=None):
        _, new = model.apply({"params": params, "fp8jax_scaling": state}, x, mutable=["fp8jax_scaling"])
        return fp8jax.linen.advance_scaling(new["fp8jax_scaling"], {}, rules, axis_name=axis)

    unsharded = jax.jit(step)(x, state)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(
        lambda x, s: step(x, s, "data"), mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False
    )
    parts = jax.jit(run)(x, state)
    assert unsharded["threshold_x"] == parts["threshold_x"] == pytest.approx(1.3)


class GPT(nnx.Module):
    """A block of GPT-2: LayerNorm, GELU, biases."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


@pytest.mark.slow
def test_models_without_glu_train_with_coats_optimizer_and_int10_contexts():
    recipe = dataclasses.replace(fp8jax.recipes.int8_fallback(), linear=LINEAR, optimizer=fp8jax.recipes.Optimizer())
    model = fp8jax.nnx.quantize(GPT(nnx.Rngs(0)), recipe)
    tx = nnx.Optimizer(
        model,
        fp8jax.optimizer(recipe, 3e-3),
        wrt=nnx.Param,
    )
    x, goal = outliers(), jax.random.normal(jax.random.key(5), (96, 64))

    @nnx.jit
    def step(model, tx):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x - goal) ** 2))(model)
        tx.update(model, fp8jax.nnx.advance_scaling(model, grads))
        return loss

    losses = [float(step(model, tx)) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    state = nnx.to_pure_dict(nnx.state(model, fp8jax.nnx.ScalingVariable))
    assert float(state["up"]["dot_general"]["threshold_x"]) != 1
    assert any(
        isinstance(leaf, QTensor) for leaf in jax.tree.leaves(tx.opt_state, is_leaf=lambda x: isinstance(x, QTensor))
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"x": "e4m3:block128"}, "mixes integer|int8 blocks"),
        ({"x": "int8:token", "x_residual": "int8:token", "x_wgrad": "int8:token"}, "threshold scaling is per block"),
        ({"fallback_fraction_range": (0.5, 0.2)}, "fallback fractions"),
        ({"w": "int8:block64"}, "same blocks"),
    ],
)
def test_contradictions_are_errors_at_construction(changes, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(fp8jax.recipes.int8_fallback().linear, **changes)
