"""LoRA in a user's Linen model: `fp8jax.lora` on the variables of its quantized copy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, serialization

import fp8jax
from tests.distance import relative
from tests.programs import dots, outputs

T = jnp.arange(48).reshape(2, 24) % 30
WIDTH, INNER = 64, 96


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        q = nn.DenseGeneral((4, 16), name="q")(nn.RMSNorm()(x))
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), name="o")(jnp.tanh(q))
        return x + nn.Dense(WIDTH, name="down")(nn.silu(nn.Dense(INNER, name="up")(x))), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, t):
        scanned = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = scanned(name="layers")(nn.Embed(30, WIDTH)(t), None)
        return nn.Dense(30, name="head")(x)


QUANTIZED = fp8jax.linen.quantize(Model(), "te_current")
PARAMS = QUANTIZED.init(jax.random.key(0), T)["params"]


def base_and_adapters():
    base = fp8jax.lora.freeze(PARAMS, targets="layers/(up|down)/kernel")
    base = fp8jax.lora.freeze(base, targets="layers/q/kernel", axes=(1, 2))
    base = fp8jax.lora.freeze(base, targets="layers/o/kernel", axes=(2, 1))
    options = {"rank": 4, "alpha": 8.0, "targets": "layers/.*kernel", "dtype": jnp.bfloat16}
    return base, fp8jax.lora.init(jax.random.key(1), base, **options)


def logits(base, adapters):
    return QUANTIZED.apply({"params": fp8jax.lora.adapt(base, adapters)}, T)


def loss(adapters, base):
    y = logits(base, adapters)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(y, T[:, 1:]).mean()


@pytest.fixture(scope="module")
def trained():
    (base, adapters), tx = base_and_adapters(), optax.adamw(1e-2)
    state, losses = tx.init(adapters), []

    @jax.jit
    def step(adapters, state):
        value, grads = jax.value_and_grad(loss)(adapters, base)
        updates, state = tx.update(grads, state, adapters)
        return value, optax.apply_updates(adapters, updates), state

    for _ in range(4):
        value, adapters, state = step(adapters, state)
        losses.append(float(value))
    return base, adapters, losses


def test_a_base_of_codes_gives_what_the_weights_give():
    """Per-tensor codes equal those that the recipe computes from the weights."""
    base, adapters = base_and_adapters()
    np.testing.assert_allclose(logits(base, adapters), QUANTIZED.apply({"params": PARAMS}, T), rtol=1e-5, atol=1e-5)


def test_adapters_alone_are_trained(trained):
    base, adapters, losses = trained
    assert losses[-1] < losses[0] - 1
    assert set(adapters) == {f"layers/{name}/kernel" for name in ("q", "o", "up", "down")}
    assert adapters["layers/o/kernel"].shape == (2, 64, WIDTH)
    grad = jax.grad(loss)
    for wide in (jnp.float32, jnp.bfloat16):
        assert not {s[-2:] for s in outputs(grad, wide, adapters, base)} & {(WIDTH, INNER), (INNER, WIDTH)}
    assert sum("float8_e4m3fn" in pair for pair in dots(grad, adapters, base)) == 4 + 3 + 4


def test_merged_and_restored(trained):
    base, adapters, _ = trained
    merged = fp8jax.lora.merge(base, adapters)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), merged, PARAMS)
    assert relative(QUANTIZED.apply({"params": merged}, T), logits(base, adapters)) < 0.15
    leaves, structure = jax.tree.flatten((base, adapters))
    restored = serialization.msgpack_restore(serialization.msgpack_serialize({str(i): x for i, x in enumerate(leaves)}))
    restored_tree = jax.tree.unflatten(structure, [jnp.asarray(restored[str(i)]) for i in range(len(leaves))])
    np.testing.assert_array_equal(logits(*restored_tree), logits(base, adapters))


def test_the_plan_tells_of_codes_and_the_plain_model_refuses_them(trained):
    base, adapters, _ = trained
    with pytest.raises(errors.ScopeParamShapeError, match="expected to generate shape"):
        Model().apply({"params": base}, T)
    delayed = fp8jax.linen.quantize(Model(), "te_delayed")
    variables = delayed.init(jax.random.key(0), T)
    with pytest.raises(ValueError, match="keeps a state; use a recipe with current scaling"):
        delayed.apply({**variables, "params": fp8jax.lora.adapt(base, adapters)}, T)
