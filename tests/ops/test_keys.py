"""Noise of stochastic rounding: distinct for each operand, matmul, layer, call and parameter, and repeatable.

With one token and an identity weight, gradients show how each operand was rounded. The input's gradient is dy as
rounded; a row of the weight's gradient is the saved input times dy as rounded for wgrad.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax.core.noise import round_stochastic
from fp8jax.core.recipe import Linear
from fp8jax.ops.products import operands
from fp8jax.ops.products.linear import key_from_data
from fp8jax.ops.quantization import quantize
from tests.kernels import adamw_cases
from tests.kernels.adamw_cases import ADAM

KEY = jax.random.key(5)
NOISY = "int8+stochastic"
ALL = Linear("int8", "int8", NOISY, x_residual=NOISY, x_wgrad="int8", dy_wgrad=NOISY)
N = 192
# Every value but the first, which determines the scale, is halfway between two codes, where noise decides the code.
HALVES = jnp.asarray(np.random.default_rng(0).integers(-100, 100, N) + 0.5, jnp.float32).at[0].set(127.0)


def alike(a, b) -> float:
    """Returns the share of elements rounded in the same direction; one half if the noise is independent."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return float(np.mean(np.abs(a - b) < 0.25))


def independent(*arrays) -> bool:
    """Returns whether every two arrays were rounded by independent noise."""
    # A share of half, with a standard deviation of 0.036 for 192 draws.
    shares = [alike(a, b) for i, a in enumerate(arrays) for b in arrays[:i]]
    return all(0.3 < share < 0.7 for share in shares)


def rounded(recipe, key, x=HALVES, dy=HALVES):
    """Returns the saved input and dy as rounded for dgrad and wgrad, in units of int8 codes."""
    x, dy = x[None], dy[None]
    _, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=recipe, key=key), x, jnp.eye(N))
    dx, dw = (np.asarray(a, np.float64) for a in vjp_fn(dy))
    # The first value of dy and of x is 127, a code.
    return dw[:, 0] / 127, dx[0], dw[0] / 127


def test_the_input_and_the_gradient_of_the_output_are_rounded_by_noise_of_their_own():
    saved, dgrad, wgrad = rounded(ALL, KEY)
    for values in (saved, dgrad, wgrad):
        assert alike(values, HALVES + 0.5) + alike(values, HALVES - 0.5) > 0.99
    assert independent(saved, dgrad, wgrad)
    # The same key gives the same noise, another key different noise.
    for first, again, other in zip(
        (saved, dgrad, wgrad), rounded(ALL, KEY), rounded(ALL, jax.random.key(6)), strict=True
    ):
        np.testing.assert_array_equal(first, again)
        assert independent(first, other)


def test_a_key_is_used_neither_twice_nor_as_it_is(monkeypatch):
    spec = fp8jax.QuantSpec.parse(NOISY)
    keys = [KEY, *(operands.derive_key(KEY, spec, use) for use in ("x_residual", "dy"))]
    assert len({tuple(np.asarray(jax.random.key_data(key))) for key in keys}) == 3
    assert operands.derive_key(KEY, fp8jax.QuantSpec.parse("int8"), "dy") is None
    uses, actual = [], operands.derive_key
    monkeypatch.setattr(operands, "derive_key", lambda key, spec, use: uses.append(use) or actual(key, spec, use))
    fp8jax.linear(HALVES[None], jnp.eye(N), recipe=ALL, key=KEY)
    assert sorted(uses) == ["dy", "x_residual"]


def test_one_gradient_of_two_products_is_rounded_twice_unless_it_is_the_same():
    for settings, same in (({}, False), ({"dy_wgrad": "same"}, True), ({"dy": NOISY, "dy_wgrad": "int8"}, False)):
        part = dataclasses.replace(ALL, **settings)
        _, dgrad, wgrad = rounded(part, KEY)
        assert (alike(dgrad, wgrad) > 0.99) == same
    # Only one of the two products is quantized.
    part = dataclasses.replace(ALL, dy=None, w_dgrad=None)
    assert independent(rounded(part, KEY)[0], rounded(part, KEY)[2])


def test_products_of_one_batch_have_noise_of_their_own():
    x, w = (jnp.broadcast_to(a, (3, *a.shape)) for a in (HALVES[None], jnp.eye(N)))
    f = functools.partial(fp8jax.einsum, "btd,bdh->bth", recipe=ALL, key=KEY)
    dx, dw = jax.vjp(f, x, w)[1](x)
    assert independent(*dx[:, 0])
    assert independent(*dw[:, :, 0] / 127)


def test_layers_that_share_an_input_share_its_codes_and_not_the_noise_of_another_input():
    w, part = jnp.eye(N), dataclasses.replace(ALL, dy="int8", dy_wgrad="int8")

    def saved(x, key):
        _, vjp_fn = jax.vjp(lambda a, b: [fp8jax.linear(x, m, recipe=part, key=key) for m in (a, b)], w, w)
        return [np.asarray(dw[:, 0]) / 127 for dw in vjp_fn([HALVES[None]] * 2)]

    first, second = saved(HALVES[None], KEY)
    np.testing.assert_array_equal(first, second)
    x = HALVES[None]

    def both(a, b):
        return [fp8jax.linear(x, m, recipe=part, key=key) for m, key in ((a, KEY), (b, jax.random.key(6)))]

    one, other = (np.asarray(dw[:, 0]) / 127 for dw in jax.vjp(both, w, w)[1]([HALVES[None]] * 2))
    assert independent(one, other)


def linear(x):
    layer = fp8jax.nnx.quantize(nnx.Linear(N, N, use_bias=False, rngs=nnx.Rngs(0)), ALL)
    layer.kernel[...] = jnp.eye(N)
    return layer(x)


def einsum(x):
    layer = fp8jax.nnx.quantize(nnx.Einsum("td,dh->th", (N, N), rngs=nnx.Rngs(0)), ALL)
    layer.kernel[...] = jnp.eye(N)
    return layer(x)


def dense(x):
    return fp8jax.linen.quantize(nn.Dense(N, use_bias=False), ALL).apply({"params": {"kernel": jnp.eye(N)}}, x)


def linen_einsum(x):
    model = fp8jax.linen.quantize(nn.Einsum((N, N), "td,dh->th", use_bias=False), ALL)
    return model.apply({"params": {"kernel": jnp.eye(N)}}, x)


@pytest.mark.parametrize("layer", [linear, einsum, dense, linen_einsum], ids=lambda f: f.__name__)
def test_layers_of_flax_round_the_same_gradient_otherwise_for_other_inputs(layer):
    """The key derives from the data, so layers, steps and devices have different noise."""

    def dx(x):
        return np.asarray(jax.vjp(layer, x[None])[1](HALVES[None])[0])[0]

    inputs = [HALVES, HALVES.at[7].add(1.0), 2 * HALVES, HALVES[::-1]]
    actual = [dx(x) for x in inputs[:3]]
    assert independent(*actual)
    np.testing.assert_array_equal(actual[0], dx(HALVES + 0))


def test_a_key_of_contents_follows_each_value_in_every_dtype():
    x = jax.random.normal(KEY, (4, 8))
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        data = lambda x: int(jax.random.key_data(key_from_data(x))[-1])  # noqa: E731
        base = data(x.astype(dtype))
        assert base == data(x.astype(dtype))
        others = {data(x.at[i, j].mul(1.5).astype(dtype)) for i in range(4) for j in range(8)}
        assert len(others | {base}) == 33
        assert data(-x.astype(dtype)) != base
        # All bits of a key differ, also where values have 16.
        samples = jax.vmap(lambda x: jax.random.key_data(key_from_data(x))[-1])(
            jax.random.normal(KEY, (64, 3)).astype(dtype)
        )
        assert all(0.2 < np.mean(np.asarray(samples) >> bit & 1) < 0.8 for bit in range(32))
    # For wide arrays, the key depends on the first channels of all rows.
    wide = jnp.tile(x, (1, 16))
    keys = [int(jax.random.key_data(key_from_data(wide.at[3, i].add(1)))[-1]) for i in (0, 63, 64, 127)]
    assert len(set(keys)) == 3
    assert keys[2] == keys[3]
    # Nothing is differentiated through it.
    assert not jnp.any(jax.grad(lambda x: jax.random.uniform(key_from_data(x)) + 0 * x.sum())(x))


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_a_matrix_and_its_transposed_copy_are_rounded_by_noise_of_their_own(name):
    x = jnp.tile(HALVES if name == "int8" else jnp.full(N, 17.0).at[0].set(448.0), (N, 1))
    x = jnp.minimum(x, x.T)  # symmetric
    one = jnp.ones([])
    rows, columns = quantize.quantize(x, f"{name}+stochastic", f"{name}+stochastic", scale=one, key=KEY)
    a, b = (np.asarray(q.codes, np.float64) for q in (rows, columns))
    noisy = np.asarray(x) != a
    assert noisy.mean() > 0.4
    assert 0.3 < np.mean(np.sign(a - x)[noisy] == np.sign(b - x)[noisy]) < 0.7
    other, _ = quantize.quantize(x, f"{name}+stochastic", scale=one, key=jax.random.key(6))
    assert 0.3 < np.mean(np.sign(a - x)[noisy] == np.sign(np.asarray(other.codes, np.float64) - x)[noisy]) < 0.7


def test_noise_of_new_weights_depends_on_both_words():
    x = jnp.full((4, 64), 1 + 2.0**-8)
    draws = [round_stochastic(x, jnp.array(words, jnp.uint32)) for words in ((1, 2), (1, 3), (4, 2), (2, 1))]
    assert independent(*(np.asarray(draw, np.float64) * 2.0**7 for draw in draws))


def test_parameters_and_steps_are_rounded_by_noise_of_their_own():
    """bf16 weights halfway between two values, with steps that change nothing else."""
    w = {name: jnp.full((4, 64), 1.0, jnp.bfloat16) for name in "abc"}
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), w)
    # The decay is half a bf16 step below one, 2^-9: the result is between 1 - 2^-8 and 1.
    adam = dataclasses.replace(ADAM, rate=2.0**-9, weight_decay=1.0)

    def step(key):
        new, _, _ = adamw_cases.step(zeros, zeros, zeros, w, adam, key=key, impl="xla")
        return [np.asarray(new[name], np.float64) * 2.0**8 for name in "abc"]

    first = step(KEY)
    assert {*np.unique(first)} == {2.0**8 - 1, 2.0**8}
    assert independent(*first)
    for a, again, other in zip(first, step(KEY), step(jax.random.key(6)), strict=True):
        np.testing.assert_array_equal(a, again)
        assert independent(a, other)


def test_layers_of_a_transformer_hand_their_key_on():
    """Another key gives other noise, and the same key the same noise."""
    recipe = dataclasses.replace(fp8jax.recipes.bf16(), linear=ALL)
    x, w = HALVES[None], jnp.eye(N)
    functions = {
        "norm_linear": lambda x, key: fp8jax.norm_linear(x, None, [w], recipe=recipe, key=key)[0],
        "attention_output": lambda x, key: fp8jax.attention_output(x.reshape(1, 2, -1), w, recipe=recipe, key=key),
        "glu_linear": lambda x, key: fp8jax.glu_linear(x, None, w, recipe=recipe, key=key),
        "linear": lambda x, key: fp8jax.linear(x, w, recipe=recipe, key=key),
        "einsum": lambda x, key: fp8jax.einsum("td,dh->th", x, w, recipe=recipe, key=key),
    }
    for name, f in functions.items():
        # The test sees only the linear map of its gradient before the product, which is the same each time.
        keys = KEY, KEY, jax.random.key(6)
        vjp_fn = [jax.vjp(lambda x, f=f, key=key: f(x, key), x)[1] for key in keys]
        first, again, other = (np.asarray(pull(HALVES[None])[0]) for pull in vjp_fn)
        np.testing.assert_array_equal(first, again)
        assert (first != other).mean() > 0.3, name
