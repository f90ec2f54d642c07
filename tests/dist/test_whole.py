"""Sharded weights that are gathered for one layer at a time: their codes, gradients, and rematerialized gathers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.dist import fsdp_gather_weight, gather_quantized, regather_policy
from fp8jax.recipes import Linear
from tests.dist import programs
from tests.rows import slow

W = jax.random.normal(jax.random.key(0), (512, 256)) * jnp.exp(jax.random.normal(jax.random.key(1), (512, 1)))
X = jax.random.normal(jax.random.key(2), (32, 512), jnp.bfloat16)


def mapped(function, ins, out, count=4):
    mesh = jax.make_mesh((count,), ("fsdp",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False)


@pytest.mark.parametrize(
    "name", [slow("te_current"), "coat", "deepseek", slow("switchback"), slow("jetfire"), "int8_block", "moss"]
)
def test_gathered_codes_are_those_of_the_whole_weight(name):
    scale = jnp.float32(0.01) if name == "moss" else None
    actual = jax.jit(
        mapped(functools.partial(gather_quantized, axes="fsdp", recipe=name, scale=scale), P("fsdp"), P())
    )(W)
    expected = fp8jax.quantize_weight(W, recipe=name, scale=scale)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_what_does_not_travel_as_codes_is_none():
    def sends_codes(recipe, count=4):
        results = []
        run = mapped(lambda w: results.append(gather_quantized(w, "fsdp", recipe)), P("fsdp"), None, count)
        jax.eval_shape(run, W)
        return results[0] is not None

    assert sends_codes("te_current", 8)
    assert sends_codes("deepseek")
    assert not sends_codes("deepseek", 8)  # shards of 64 rows end within blocks of 128
    assert not sends_codes("bf16")
    assert not sends_codes("te_delayed")  # observes the weight itself
    own = functools.partial(Linear, "e4m3", dy="e4m3")
    assert sends_codes(own(w="e4m3"))
    assert not sends_codes(own(w="e4m3", w_dgrad="e5m2"))  # quantized separately
    assert not sends_codes(own(w="e4m3:group32", w_dgrad="e4m3:group32"))
    with pytest.raises(ValueError, match=r"must be called inside jax\.shard_map"):
        gather_quantized(W, "fsdp", "te_current")
    with pytest.raises(ValueError, match=r"must be called inside jax\.shard_map"):
        fsdp_gather_weight(W, "fsdp", "e4m3")


def layer(w, x, recipe="te_current"):
    codes = gather_quantized(w, "fsdp", recipe)
    whole = fsdp_gather_weight(w, "fsdp", "fp32", needs_values=codes is None)
    return fp8jax.linear(x, whole, recipe=recipe, quantized=codes)


def loss(run, w, x):
    return jnp.mean(run(w, x).astype(jnp.float32) ** 2)


def test_gradients_are_means_of_those_of_the_whole_weight_and_codes_are_gathered_again():
    """All devices have the same rows, so scales are those of one device."""
    again = jax.checkpoint(layer, policy=regather_policy)
    kinds = {}
    for name, run in (("kept", layer), ("again", again)):
        step = mapped(jax.grad(functools.partial(loss, run), argnums=(0, 1)), (P("fsdp"), P()), (P("fsdp"), P()))
        kinds[name] = programs.asked_for(step, W, X)
    assert [kinds[name].count(("all_gather", "ui8", W.size // 4)) for name in ("kept", "again")] == [1, 2]
    assert [x for x in kinds["again"] if x[0] == "all_gather" and x[1] != "ui8"] == []
    assert ("reduce_scatter", "f32", 4 * W.size) in kinds["again"]
    dw, dx = jax.jit(step)(W, X)
    expected = jax.jit(
        jax.grad(lambda w, x: loss(functools.partial(fp8jax.linear, recipe="te_current"), x, w), (0, 1))
    )(W, X)
    np.testing.assert_allclose(dw, expected[0], rtol=1e-6)
    np.testing.assert_array_equal(dx, expected[1])


def test_values_travel_in_the_dtype_asked_for_and_gradients_in_8_bits():
    def one(w, x):
        whole = fsdp_gather_weight(w, "fsdp", "e4m3", dim=1, dtype=jnp.bfloat16)
        assert whole.shape == W.shape
        return jnp.sum((x @ whole).astype(jnp.float32) ** 2)

    step = mapped(jax.grad(one), (P(None, "fsdp"), P()), P(None, "fsdp"))
    kinds = [x for x in programs.asked_for(step, W, X) if x[2] > 64]
    assert kinds == [("all_gather", "bf16", 2 * W.size // 4), ("all_to_all", "ui8", W.size)]
    actual = jax.jit(step)(W, X)
    expected = jax.grad(lambda w: jnp.sum((X @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2))(W)
    # Half a step of e4m3 at the most, of the largest magnitude.
    assert np.abs(actual - expected).max() <= np.abs(expected).max() * 2.0**-4
    assert actual.dtype == jnp.float32
    for read in (True, False):
        same = mapped(
            lambda w, read=read: fsdp_gather_weight(w, "fsdp", "e4m3", dim=1, needs_values=read), P(None, "fsdp"), P()
        )
        assert jax.eval_shape(same, W.astype(jnp.bfloat16)) == jax.ShapeDtypeStruct(W.shape, jnp.bfloat16)


def test_what_is_computed_in_fp32_of_16_bits_is_not_held():
    """A norm in fp32 of bf16 tokens holds these; its products and its matrix product's input stay bf16."""

    def block(x_NxD, scale_D, w_DxF):
        x32_NxD = x_NxD.astype(jnp.float32)
        root_Nx1 = lax.rsqrt(jnp.mean(jnp.square(x32_NxD), axis=1, keepdims=True) + 1e-6)
        return (x32_NxD * root_Nx1 * scale_D).astype(jnp.bfloat16) @ w_DxF

    inputs = jnp.ones((64, 32), jnp.bfloat16), jnp.ones(32), jnp.ones((32, 8), jnp.bfloat16)
    residuals = jax.vjp(jax.checkpoint(block, policy=regather_policy), *inputs)[1]
    shapes = {(str(x.dtype), x.shape) for x in jax.tree.leaves(residuals)}
    assert ("bfloat16", (64, 32)) in shapes
    assert ("float32", (64, 32)) not in shapes
    assert ("float32", (64, 32)) in {(str(x.dtype), x.shape) for x in jax.tree.leaves(jax.vjp(block, *inputs)[1])}
    assert ("float32", (64, 1)) in shapes
    assert regather_policy(lax.mul_p, inputs[0].astype(jnp.float16))
    # What jax.shard_map says to be the same on all devices has a primitive of its own.
    run = jax.shard_map(
        lambda x: lax.all_gather(x, "fsdp", to="invarying"),
        mesh=jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,)), in_specs=P("fsdp"), out_specs=P(),
    )  # fmt: skip
    (inner,) = (eqn.params["jaxpr"] for eqn in jax.make_jaxpr(run)(jnp.ones(8)).eqns)
    gathers = [eqn.primitive for eqn in inner.eqns if "gather" in eqn.primitive.name]
    assert len(gathers) == 1
    assert not any(map(regather_policy, gathers))


def test_sums_in_fp32_are_held_rather_than_what_is_added():
    """Of x + x @ a + x @ b in fp32, the next layer's input, one array is held and not both products."""

    def block(x_NxD, a_DxD, b_DxD):
        for _ in range(4):
            x_NxD = x_NxD + x_NxD @ a_DxD + x_NxD @ b_DxD
        return x_NxD

    inputs = jnp.ones((8, 64)), jnp.ones((64, 64)), jnp.ones((64, 64))
    count = lambda run: sum(x.shape == (8, 64) for x in jax.tree.leaves(jax.vjp(run, *inputs)[1]))  # noqa: E731
    assert count(jax.checkpoint(block, policy=regather_policy)) <= count(block)
