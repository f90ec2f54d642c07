"""Any state in `fused_backward`: integer codes, split masters, scaled masters with one scale per layer."""

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
    """Gradients that the parameters' dtype represents exactly: on a GPU, XLA skips rounding to it within a program."""
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
    blocks, plain, state = released.init(stack, "layers", has_layer_axis=True), stack, tx.init({"layers": stack})
    assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(blocks))
    step = jax.jit(fp8jax.value_and_step(lambda blocks, g: released.scan(blocks, jnp.float32(0), g)))
    plain_step = jax.jit(lambda grads, state, params, factor: tx.step(grads, state, params, grad_scale=factor))
    norm = 0.0
    for i in range(steps):
        gradients = rounded_gradients(i, dtype)
        blocks, norm, factor = clipped_by_shares(blocks, norm, (1e4, 300.0, 1e4)[i], gradients)
        assert (factor < 1) == (i == 1)
        _, blocks = step(blocks, gradients)
        repeated = jax.tree.map(lambda g: jnp.stack([g] * LAYERS).astype(dtype), gradients)
        new, state = plain_step({"layers": repeated}, state, {"layers": plain}, factor)
        plain = new["layers"]
    fused_state = blocks.state
    assert int(fused_state.count) == steps
    for field in {name for name in fused_state._fields if getattr(fused_state, name) is not None} - {"count"}:
        actual, expected = getattr(fused_state, field), getattr(state, field)["layers"]
        assert jax.tree.map(lambda x: (x.shape, x.dtype), actual) == jax.tree.map(
            lambda x: (x.shape, x.dtype), expected
        )
        if (
            field == "remainder"
        ):  # its unit is fp32's last bit, and a moment's code that flips at a tie moves it further
            pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
            assert all(np.mean(np.abs(np.int32(a) - np.int32(b)) > 2) < 0.05 for a, b in pairs)
        else:
            near(actual, expected)
    near(blocks.params, plain)
    equal(
        released.restore(blocks.params, fused_state, "layers", has_layer_axis=True).encoded_state, blocks.encoded_state
    )


@pytest.mark.parametrize("name", [slow("de8 and ude8"), "bf16+int8", slow("bf16+stochastic")])
def test_blocks_one_by_one_give_it_too(name):
    dtype, make = HELD[name]
    tx = make()
    parts = [layer_of(jax.tree.map(lambda x: x.astype(dtype), parameters()[0]), i) for i in range(LAYERS)]
    released = fp8jax.fused_backward(linear, tx)
    blocks = [released.init(part, f"layers/{i}") for i, part in enumerate(parts)]
    loss = lambda blocks, g: sum(released(one, jnp.float32(0), g) for one in blocks)  # noqa: E731
    gradients = rounded_gradients(0, dtype)
    _, blocks = jax.jit(fp8jax.value_and_step(loss))(blocks, gradients)
    grads = jax.tree.map(lambda g: g.astype(dtype), gradients)
    new, state = jax.jit(lambda *x: tx.step(*x))(
        {"layers": [grads] * LAYERS}, tx.init({"layers": parts}), {"layers": parts}
    )
    near([one.params for one in blocks], new["layers"])
    near([one.mu for one in blocks], state.mu["layers"])


@pytest.mark.parametrize("name", [slow("de8 and ude8"), "bf16+int16", slow("fp16, scaled")])
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_states_lie_on_a_mesh_as_parameters_do(name):
    """fsdp on eight devices: matrices, moments and remainders are sharded along the inputs."""
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


def _loss(released, blocks, gradients):
    return released.scan(blocks, jnp.float32(0), gradients)
