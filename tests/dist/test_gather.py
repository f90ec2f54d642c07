"""Weights that are gathered as codes, and the assignment of whole tensors to devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.dist import gather_weights, partition, slices
from tests.dist import programs

SPECS = ["e4m3", "int8:block32", "e4m3:mx32+token", "e5m2:mx32+ocp", "e4m3:token", "e5m2:group32"]
W = jax.random.normal(jax.random.key(0), (256, 64)) * jnp.exp(jax.random.normal(jax.random.key(1), (256, 1)))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


def mapped(mesh, function, in_specs, out_specs):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@pytest.mark.parametrize("spec", SPECS)
def test_a_gathered_weight_is_what_the_whole_one_quantizes_to(spec, mesh):
    """The bits are equal on every mesh, for every granularity of products, sharded along groups and across them."""
    for spec_of_w, axis in ((P("fsdp"), -1), (P("fsdp"), -2)):
        wire_format = fp8jax.QuantSpec(**{**vars(fp8jax.QuantSpec.parse(spec)), "axis": axis})
        gather = functools.partial(gather_weights, axes="fsdp", wire_format=wire_format, specs=spec_of_w)
        run = mapped(mesh, gather, spec_of_w, P())
        quantize_unsharded = jax.jit(lambda w, wire_format=wire_format: fp8jax.quantize(w, wire_format).dequantize())
        np.testing.assert_array_equal(jax.jit(run)(W), quantize_unsharded(W))
        requests = [x for x in programs.asked_for(run, W) if x[2] > 64]
        assert ("all_gather", "ui8", W.size // 8) in requests
        assert all(kind == "all_gather" for kind, *_ in requests) or "token" in spec


@pytest.mark.parametrize("name", ["te_current", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_a_layer_gathers_its_codes_again_in_the_backward_pass(name, mesh):
    w, recipe = jnp.concatenate([W] * 4), fp8jax.recipes.get(name)
    x = jax.random.normal(jax.random.key(2), (32, 1024), jnp.bfloat16)

    def layer(w, x):
        gathered = gather_weights(w, "fsdp", name, specs=P("fsdp"), gradients="fp32", dtype=jnp.bfloat16)
        return fp8jax.linear(x, gathered, recipe=recipe)

    def loss(layer, w, x):
        return jnp.mean(layer(w, x).astype(jnp.float32) ** 2) / 8

    def grads(layer):
        both = (P("fsdp"),) * 2
        return mapped(mesh, jax.grad(functools.partial(loss, layer), argnums=(0, 1)), both, both)

    rematerialized = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
    gathers = {}
    for label, f in (("kept", layer), ("again", rematerialized)):
        gathers[label] = programs.asked_for(grads(f), w, x).count(("all_gather", "ui8", w.size // 8))
    assert gathers == {"kept": 1, "again": 2}
    dw, dx = jax.jit(grads(rematerialized))(w, x)
    assert (dw.shape, dw.dtype) == (w.shape, w.dtype)

    def unsharded_loss(w, x):
        return jnp.mean(fp8jax.linear(x, w.astype(jnp.bfloat16), recipe=recipe).astype(jnp.float32) ** 2)

    want_w, want_x = jax.jit(jax.grad(unsharded_loss, argnums=(0, 1)))(w, x)
    for actual, expected in ((dw, want_w), (dx, want_x)):
        error = np.linalg.norm(np.float32(actual) - np.float32(expected)) / np.linalg.norm(np.float32(expected))
        assert error < 0.1  # scales of gradients are per device


def test_what_is_not_cut_over_all_axes_or_has_one_axis_comes_back_as_it_is(mesh):
    weights = {"whole": W, "bias": W[:, 0], "cut": W.astype(jnp.bfloat16)}
    specs = {"whole": P(), "bias": P("fsdp"), "cut": P("fsdp")}
    run = mapped(mesh, functools.partial(gather_weights, axes="fsdp", specs=specs), (specs,), specs | {"cut": P()})
    actual = jax.jit(run)(weights)
    for name in ("whole", "bias"):
        np.testing.assert_array_equal(actual[name], weights[name])
    assert actual["cut"].dtype == jnp.bfloat16
    gather_fp32 = functools.partial(gather_weights, axes="fsdp", specs=P("fsdp"), dtype=jnp.float32)
    assert jax.eval_shape(mapped(mesh, gather_fp32, P("fsdp"), P()), weights["cut"]).dtype == jnp.float32
    assert (actual["cut"] != weights["cut"]).any()
    both = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    for spec, rows in ((P("data"), 64), (P(("data", "fsdp")), 256)):
        gather = functools.partial(gather_weights, axes=("data", "fsdp"), specs=spec)
        shape = jax.eval_shape(mapped(both, lambda w, gather=gather: gather(w)[None], spec, P(("data", "fsdp"))), W)
        assert shape.shape == (8, rows, 64)


def test_a_recipes_weights_are_quantized_along_inputs_layer_by_layer(mesh):
    linear = fp8jax.recipes.Linear("e4m3", "e4m3:group32", "e4m3", w_dgrad="e4m3:group32")
    layers = jnp.stack([W, 1e-6 * W])
    for wire_format, spec in (
        (linear, fp8jax.QuantSpec("e4m3", "group", 32, axis=-2)),
        ("te_current", fp8jax.QuantSpec("e4m3")),
    ):
        gather = functools.partial(gather_weights, axes="fsdp", wire_format=wire_format, specs=P(None, None, "fsdp"))
        actual = jax.jit(mapped(mesh, gather, P(None, None, "fsdp"), P()))(layers)
        np.testing.assert_array_equal(actual, jnp.stack([fp8jax.quantize(w, spec).dequantize() for w in layers]))


def test_gradients_of_gathered_weights_travel_as_asked(mesh):
    w = W[:32]  # includes small values

    def sent(gradients):
        def gradient(w, x):
            loss = lambda w: jnp.sum(x @ gather_weights(w, "fsdp", specs=P("fsdp"), gradients=gradients))  # noqa: E731
            return jax.grad(loss)(w)

        requests = programs.asked_for(mapped(mesh, gradient, (P("fsdp"), P("fsdp")), P("fsdp")), w, jnp.ones((16, 32)))
        return [x for x in requests if x[0] in ("all_to_all", "reduce_scatter")]

    assert sent("bf16") == [("reduce_scatter", "bf16", 2 * w.size)]
    assert sent("e4m3") == [("all_to_all", "ui8", w.size)]
    with pytest.raises(ValueError, match=r"shards of the weight .* not a multiple of the block of e4m3:block128"):
        jax.eval_shape(mapped(mesh, functools.partial(
            gather_weights, axes="fsdp", wire_format="e4m3:block128", specs=P("fsdp")), P("fsdp"), P()), W)  # fmt: skip
    mx_spec = fp8jax.QuantSpec("e4m3", "mx", 64, axis=-2)
    with pytest.raises(ValueError, match=r"shards of \['w'\] are 32 long along dimension 0, .* block of e4m3:mx64"):
        jax.eval_shape(mapped(mesh, functools.partial(
            gather_weights, axes="fsdp", wire_format=mx_spec, specs=P("fsdp")), P("fsdp"), P()), {"w": W})  # fmt: skip
    with pytest.raises(ValueError, match="does not quantize weights"):
        jax.eval_shape(mapped(mesh, functools.partial(
            gather_weights, axes="fsdp", wire_format="bf16", specs=P("fsdp")), P("fsdp"), P()), W)  # fmt: skip
    with pytest.raises(ValueError, match=r"must be called inside jax\.shard_map"):
        gather_weights(W, "fsdp", specs=P("fsdp"))


def test_whole_tensors_go_to_the_device_that_has_least():
    rng = np.random.default_rng(0)
    tree = {i: jax.ShapeDtypeStruct((int(n),), jnp.float16) for i, n in enumerate(rng.integers(1, 1000, 60))}
    actual = partition(tree, 8)
    loads = np.zeros(8, int)
    for i, owner in actual.owner.items():
        loads[owner] += 2 * tree[i].shape[0]
    assert tuple(loads) == actual.loads
    assert max(loads) - min(loads) <= max(2 * x.shape[0] for x in tree.values())
    assert 1 <= actual.imbalance < 1.05
    # Graham's bound for largest-first scheduling: 4/3 - 1/(3 m) of the optimum, here for three tensors on two devices.
    assert partition({"a": 3, "b": 3, "c": 2, "d": 2, "e": 2}, 2, nbytes=int).loads == (7, 5)
    assert partition({"one": 8}, 4, nbytes=int).loads == (8, 0, 0, 0)
    cut = slices({"w": jnp.ones((16, 3)), "odd": jnp.ones((3, 5))}, 8)
    assert cut.loads == (6 * 4 + 15 * 4,) * 8
    assert partition({}, 2).imbalance == 1
    with pytest.raises(ValueError, match="at least one device"):
        partition(tree, 0)
