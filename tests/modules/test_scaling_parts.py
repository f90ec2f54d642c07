"""A user-defined scaling in NNX and Linen layers: state, accumulation, evaluation, replicas."""

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


@dataclasses.dataclass(frozen=True)
class MeanSquare(scaling.Stateful):
    """Scales inputs for `margin` binades above the root mean square of the last step.

    Observations are sums of squares and counts, merged by addition. The state is the mean square.
    """

    operands = ("x",)
    merge = "sum"
    stats_shape = (2,)

    margin: int = 3

    @classmethod
    def from_settings(cls, settings):
        return cls(settings.margin)

    def init(self, x=None):
        return jnp.zeros((1,))

    def expected_amax(self, state):
        return jnp.sqrt(state[0]) * 2.0**self.margin

    def collect_stats(self, state, x):
        return jnp.stack([jnp.sum(jnp.square(x.astype(jnp.float32))), jnp.float32(x.size)])

    def update(self, state, stats):
        return stats[:1] / stats[1]


PARTS = [jax.random.normal(jax.random.key(i), (4, 16)) * scale for i, scale in enumerate((1.0, 5.0, 2.0))]
MEAN = float(np.mean(np.square(np.concatenate(PARTS))))


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.setitem(scaling.NAMES, "mean_square", MeanSquare)
    return fp8jax.recipes.Linear("e4m3", "e4m3", "e5m2", scaling="mean_square", margin=2)


def codes_limit(layer):
    """Returns the largest input below saturation, or None if the scale follows the input."""
    outputs = [float(layer(jnp.full((1, 16), value))[0, 0]) for value in (1e3, 2e3)]
    return None if outputs[0] != outputs[1] else outputs[0]


def test_it_works_through_a_layer_of_nnx(recipe):
    layer = fp8jax.nnx.quantize(nnx.Linear(16, 4, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones), recipe)
    assert codes_limit(layer) is None
    layer = fp8jax.nnx.quantize(nnx.Linear(16, 4, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones), recipe)
    grad = nnx.jit(nnx.grad(lambda layer, x: jnp.sum(layer(x) ** 2)))  # of parameters alone: gradients aren't observed
    for x in PARTS:
        grads = grad(layer, x)
    fp8jax.nnx.advance_scaling(layer, grads)
    saved_state = nnx.to_pure_dict(nnx.state(layer, fp8jax.nnx.ScalingVariable))["dot_general"]
    np.testing.assert_allclose(saved_state.pop("meansquare_x"), [MEAN], rtol=1e-6)
    np.testing.assert_array_equal(saved_state.pop("seen_x"), [0, 0])
    assert not saved_state
    before = jax.tree.map(np.asarray, nnx.state(layer))
    layer.eval()
    np.testing.assert_allclose(codes_limit(layer), 16 * 4 * np.sqrt(MEAN), rtol=0.01)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(layer))


def test_it_works_through_a_layer_of_linen(recipe):
    model = fp8jax.linen.quantize(nn.Dense(4, kernel_init=nn.initializers.ones), recipe)
    variables = model.init(jax.random.key(0), PARTS[0])
    assert set(variables) == {"params", "fp8jax_scaling"}
    assert codes_limit(lambda x: model.apply(variables, x)) is None
    for x in PARTS:
        _, new = model.apply(variables, x, mutable=["fp8jax_scaling"])
        variables = variables | new
    advanced = fp8jax.linen.advance_scaling(variables["fp8jax_scaling"], {}, recipe)
    np.testing.assert_allclose(advanced["meansquare_x"], [MEAN], rtol=1e-6)
    np.testing.assert_array_equal(advanced["seen_x"], [0, 0])
    variables = variables | {"fp8jax_scaling": advanced}
    limit = codes_limit(lambda x: model.apply(variables, x))
    np.testing.assert_allclose(limit, 16 * 4 * np.sqrt(MEAN), rtol=0.01)
    with pytest.raises(ValueError, match=r"Pass the rules= of fp8jax.linen.quantize"):
        fp8jax.linen.advance_scaling(advanced, {})


def test_replicas_merge_as_the_quantity_demands(recipe):
    model = fp8jax.linen.quantize(nn.Dense(4), recipe)
    batch = jnp.concatenate([*PARTS, jnp.zeros((4, 16))])
    variables = model.init(jax.random.key(0), batch)

    def local(scaling, x):
        _, new = model.apply(variables | {"fp8jax_scaling": scaling}, x, mutable=["fp8jax_scaling"])
        return fp8jax.linen.advance_scaling(new["fp8jax_scaling"], {}, recipe, axis_name="data")

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    advance = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    advanced = jax.jit(advance)(variables["fp8jax_scaling"], batch)
    np.testing.assert_allclose(advanced["meansquare_x"], [0.75 * MEAN], rtol=1e-6)


def test_what_a_strategy_does_not_serve_has_scales_of_its_own(recipe):
    assert list(recipe.stateful_strategies) == ["x"]
    assert recipe.strategy("w") == recipe.strategy("dy") == scaling.Current()
    mixed = dataclasses.replace(recipe, scaling="two_stage", w_scaling="delayed", amax_history_length=2)
    assert (mixed.strategy("x"), mixed.strategy("w")) == (scaling.TwoStage(), scaling.Delayed(2, 2))
    with pytest.raises(ValueError, match="mean_square scaling is per tensor; use granularity 'tensor' for x"):
        dataclasses.replace(recipe, x="e4m3:token", w_dgrad=None, x_wgrad=None, dy=None, dy_wgrad=None)
    with pytest.raises(ValueError, match=r"unknown linear\.w_scaling 'mean'; use one of current, two_stage, delayed"):
        dataclasses.replace(recipe, w_scaling="mean")
    with pytest.raises(ValueError, match=r"mean_square scaling keeps a state; use fp8jax.scaled_linear"):
        fp8jax.linear(PARTS[0], jnp.ones((16, 4)), recipe=recipe)
