"""Values that a checkpoint saves as codes, in plain and in quantized models."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.autodiff.residuals import dequantize_residual, quantize_residual
from fp8jax.ops.quantization.quantize import quantize
from tests.distance import relative
from tests.programs import residuals

save_names = jax.checkpoint_policies.save_only_these_names


def draw(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


X, W, V = draw(0, 24, 32), draw(1, 32, 48), draw(2, 48, 32)


def hidden(x):
    return fp8jax.save_quantized(x, "hidden")


def block(x, w, v, save=hidden):
    return jnp.tanh(save(x @ w)) @ v


def checkpointed(f, *names):
    return jax.checkpoint(f, policy=save_names(*names))


def activations(f, *args):
    """Returns the residuals, without the arguments themselves."""
    return sorted(set(residuals(f, *args)) - {(str(a.dtype), a.shape) for a in args})


@pytest.mark.parametrize(
    ("spec", "saved"),
    [
        ("e4m3:group16", [("bfloat16", (24, 3)), ("uint8", (24, 48))]),
        ("int10:group16", [("bfloat16", (24, 3)), ("uint8", (24, 60))]),
        (fp8jax.QuantSpec("e5m2", "token"), [("float32", (24, 1)), ("uint8", (24, 48))]),
    ],
    ids=str,
)
@pytest.mark.parametrize("loop", [False, True])
def test_codes_and_scales_are_saved_and_no_16_bit_copy(spec, saved, loop):
    save = functools.partial(fp8jax.save_quantized, name="hidden", spec=spec)
    one = checkpointed(functools.partial(block, save=save), "hidden")
    if not loop:
        assert activations(one, X, W, V) == saved
        return
    f = lambda x, w, v: jax.lax.scan(lambda x, _: (one(x, w, v), None), x, None, length=3)[0]  # noqa: E731
    assert activations(f, X, W, V) == sorted([(d, (3, *s)) for d, s in saved] + [("bfloat16", (3, 24, 32))])


def test_values_are_those_of_the_codes_and_gradients_pass_unchanged():
    h, dy = draw(3, 24, 48, dtype=jnp.float32), draw(4, 24, 48, dtype=jnp.float32)
    y, vjp_fn = jax.vjp(lambda h: fp8jax.save_quantized(h, "h"), h)
    spec = dataclasses.replace(fp8jax.QuantSpec.parse("e4m3:group16"), scale_format="bf16")
    np.testing.assert_array_equal(y, fp8jax.quantize(h, spec).dequantize())
    np.testing.assert_array_equal(vjp_fn(dy)[0], dy)
    # Any order, forward and reverse, as of the value itself.
    cube = lambda h: jnp.sum(fp8jax.save_quantized(h, "h") ** 3)  # noqa: E731
    np.testing.assert_array_equal(jax.grad(lambda h: jnp.sum(jax.grad(cube)(h)))(h), 6 * y)
    np.testing.assert_array_equal(jax.jvp(lambda h: fp8jax.save_quantized(h, "h"), (h,), (dy,))[1], dy)
    assert np.isnan(np.asarray(fp8jax.save_quantized(h.at[3, 5].set(jnp.inf), "h"))[3]).any()


def test_a_checkpoint_changes_no_gradient():
    loss = lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(f(*a).astype(jnp.float32) ** 2), (0, 1, 2)))  # noqa: E731
    for a, b in zip(loss(block)(X, W, V), loss(checkpointed(block, "hidden"))(X, W, V), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_what_our_operations_save_has_names():
    recipe = fp8jax.recipes.coat()
    faithful = dataclasses.replace(recipe, context=dataclasses.replace(recipe.context, recompute_activations=False))

    def layer(recipe, x, w, v):
        g, u = fp8jax.norm_linear(x, None, (w, w), recipe=recipe)
        return fp8jax.glu_linear(g, u, v, recipe=recipe)

    def widths(recipe, *names):
        saved = residuals(checkpointed(functools.partial(layer, recipe), *names), X, W, V)
        return sorted(shape[-1] for dtype, shape in saved if dtype == "uint8")

    norm, activation, inputs = fp8jax.CHECKPOINT_NAMES
    assert widths(recipe, norm) == [32]
    assert widths(recipe, activation) == [48, 48]
    assert widths(recipe, inputs) == [32]  # the last layer recomputes its input
    assert widths(faithful, *fp8jax.CHECKPOINT_NAMES) == [32, 32, 48, 48, 48, 48]
    assert widths(recipe) == []


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="rounds to nearest and takes no key, got spec 'int8:block32\\+stochastic'"):
        fp8jax.save_quantized(X, "h", "int8:block32+stochastic")
    for x, description in ((jnp.arange(4), "int32[4]"), (jnp.float32(1), "float32[]")):
        with pytest.raises(
            ValueError, match=re.escape(f"(..., channels) with a floating-point dtype, got {description}")
        ):
            fp8jax.save_quantized(x, "h")


def test_a_group_has_as_many_octaves_as_the_format():
    """From 1/57,344 of its largest value on; smaller values become 0."""
    x = jnp.array([[1.0, 1 / 57000, -1 / 58000, 0.5] * 4])
    assert np.sign(fp8jax.save_quantized(x, "h", "e4m3:group16+expand"))[0].tolist() == [1, 1, 0, 1] * 4


@pytest.mark.parametrize("make", [
    lambda x: fp8jax.save_quantized(x, "x", "e4m3:group128+expand"),
    lambda x: dequantize_residual(quantize_residual(x, fp8jax.QuantSpec.parse("e4m3:group128+expand"))),
    lambda x: quantize(x, "e4m3:group128+expand")[0].dequantize(),
])  # fmt: skip
def test_a_tiny_member_takes_no_codes_from_the_others_of_its_group(make):
    x = jax.random.normal(jax.random.key(0), (64, 128))
    tiny = x.at[:, 7].set(1e-20)
    others = np.arange(128) != 7
    plain, beside = (relative(make(y)[:, others], x[:, others]) for y in (x, tiny))
    # Half a step of 3 bits, evenly spread: 1.8 % of a value. Expansion leaves less, compression several times more.
    assert beside < max(1.3 * plain, 0.02)
    assert np.all(np.asarray(make(tiny))[:, 7] == 0)
