"""States of any kind through `release`: codes in integers, masters by parts, scaled masters under one scale a layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from tests.optim.test_release import LAYERS, clipped_by_shares, equal, given_gradients, layer_of, near, parameters
from tests.rows import few, slow

HELD = {
    "de8 and ude8": (jnp.float32, lambda: fp8jax.compressed_adamw(3e-3, mu="de8", nu="ude8", min_size=1024)),
    "bf16+int8": (jnp.bfloat16, lambda: fp8jax.compressed_adamw(3e-3, b2=0.95, master="bf16+int8", min_size=1024)),
    "bf16+int16": (jnp.bfloat16, lambda: fp8jax.compressed_adamw(3e-3, master="bf16+int16", min_size=1024)),
    "bf16+stochastic": (jnp.bfloat16, lambda: fp8jax.compressed_adamw(3e-3, master="bf16+stochastic", min_size=1024)),
    "fp16, scaled": (jnp.bfloat16, lambda: fp8jax.fp8lm_adamw(3e-3, layer_axes=1, min_size=1024)),
    "fp16, scaled, stochastic": (
        jnp.bfloat16,
        lambda: fp8jax.fp8lm_adamw(3e-3, layer_axes=1, master_rounding="stochastic", min_size=1024),
    ),
    "bf16+int16, scaled moments": (
        jnp.bfloat16,
        lambda: fp8jax.fp8lm_adamw(3e-3, layer_axes=1, master="bf16+int16", min_size=1024),
    ),
    "bf16+stochastic, scaled moments": (
        jnp.bfloat16,
        lambda: fp8jax.fp8lm_adamw(3e-3, layer_axes=1, master="bf16+stochastic", min_size=1024),
    ),
    "fp16, scaled in groups": (jnp.float32, lambda: fp8jax.fp8lm_adamw(3e-3, group_size=128, min_size=1024)),
}


def rounded_gradients(step, dtype):
    """Gradients that the parameters' dtype holds: for a GPU XLA leaves out their rounding to it within a program."""
    return jax.tree.map(lambda g: g.astype(dtype).astype(jnp.float32), given_gradients(step))


def linear(params, x, gradients):
    return x + sum(jnp.sum(p.astype(jnp.float32) * gradients[name]) for name, p in params.items())


@pytest.mark.parametrize(
    "name",
    few(HELD, "de8 and ude8", "bf16+int8", "fp16, scaled, stochastic"),
)
def test_a_scan_gives_the_state_of_a_plain_step(name):
    dtype, make = HELD[name]
    tx, steps = make(), 3
    stack = jax.tree.map(lambda x: x.astype(dtype), parameters()[0])
    released = fp8jax.fused_backward(linear, tx)
    held, plain, state = released.init(stack, "layers", has_layer_axis=True), stack, tx.init({"layers": stack})
    assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(held))
    step = jax.jit(fp8jax.value_and_step(lambda held, g: released.scan(held, jnp.float32(0), g)))
    whole = jax.jit(lambda grads, state, params, factor: tx.step(grads, state, params, grad_scale=factor))
    norm = 0.0
    for i in range(steps):
        gradients = rounded_gradients(i, dtype)
        held, norm, factor = clipped_by_shares(held, norm, (1e4, 300.0, 1e4)[i], gradients)
        assert (factor < 1) == (i == 1)
        _, held = step(held, gradients)
        repeated = jax.tree.map(lambda g: jnp.stack([g] * LAYERS).astype(dtype), gradients)
        new, state = whole({"layers": repeated}, state, {"layers": plain}, factor)
        plain = new["layers"]
    own = held.state
    assert int(own.count) == steps
    for field in {name for name in own._fields if getattr(own, name) is not None} - {"count"}:
        found, expected = getattr(own, field), getattr(state, field)["layers"]
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
        if (
            field == "remainder"
        ):  # its unit is fp32's last bit, and a moment's code that flips at a tie moves it further
            pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
            assert all(np.mean(np.abs(np.int32(a) - np.int32(b)) > 2) < 0.05 for a, b in pairs)
        else:
            near(found, expected)
    near(held.params, plain)
    equal(released.restore(held.params, own, "layers", has_layer_axis=True).encoded_state, held.encoded_state)


@pytest.mark.parametrize("name", [slow("de8 and ude8"), "bf16+int8", slow("bf16+stochastic")])
def test_blocks_one_by_one_give_it_too(name):
    dtype, make = HELD[name]
    tx = make()
    parts = [layer_of(jax.tree.map(lambda x: x.astype(dtype), parameters()[0]), i) for i in range(LAYERS)]
    released = fp8jax.fused_backward(linear, tx)
    held = [released.init(part, f"layers/{i}") for i, part in enumerate(parts)]
    loss = lambda held, g: sum(released(one, jnp.float32(0), g) for one in held)  # noqa: E731
    gradients = rounded_gradients(0, dtype)
    _, held = jax.jit(fp8jax.value_and_step(loss))(held, gradients)
    grads = jax.tree.map(lambda g: g.astype(dtype), gradients)
    new, state = jax.jit(lambda *x: tx.step(*x))(
        {"layers": [grads] * LAYERS}, tx.init({"layers": parts}), {"layers": parts}
    )
    near([one.params for one in held], new["layers"])
    near([one.mu for one in held], state.mu["layers"])


@pytest.mark.parametrize("name", [slow("de8 and ude8"), "bf16+int16", slow("fp16, scaled")])
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_states_lie_on_a_mesh_as_parameters_do(name):
    """fsdp on eight devices: shards of the inputs of matrices, of moments and remainders."""
    dtype, make = HELD[name]
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    stack = jax.tree.map(lambda x: x.astype(dtype), parameters()[0])
    released = fp8jax.fused_backward(linear, make())
    where = lambda x: jax.sharding.NamedSharding(mesh, jax.P(None, "fsdp") if x.ndim > 2 else jax.P())  # noqa: E731
    placed = jax.tree.map(lambda x: jax.device_put(x, where(x)), stack)
    step = jax.jit(fp8jax.value_and_step(functools.partial(_loss, released)))
    _, one = step(released.init(stack, "layers", has_layer_axis=True), given_gradients(0))
    _, many = step(
        released.init(placed, "layers", has_layer_axis=True), jax.device_put(given_gradients(0), where(jnp.ones(())))
    )
    assert many.params["up"].sharding.spec[1] == "fsdp"
    near(many.params, one.params)


def _loss(released, held, gradients):
    return released.scan(held, jnp.float32(0), gradients)
