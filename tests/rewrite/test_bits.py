"""Bits and residuals equal those of `fp8jax.nnx.quantize`, `fp8jax.linen.quantize` and explicit functions."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from tests.distance import relative
from tests.programs import dots, residuals
from tests.rows import slow

WIDTH, INNER, HEADS, TOKENS = 32, 64, 2, 12
X = jax.random.normal(jax.random.key(1), (2, TOKENS, WIDTH), jnp.bfloat16)


@jax.custom_vjp
def flash(q, k, v):
    """Attention whose backward pass saves its result, like flash attention."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _backward(saved, dy):
    return jax.vjp(functools.partial(jax.nn.dot_product_attention, is_causal=True), *saved[:3])[1](dy)


flash.defvjp(lambda q, k, v: (lambda y: (y, (q, k, v, y)))(flash(q, k, v)), _backward)


class Block(nnx.Module):
    """A Llama block, as users write it."""

    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.n1, self.n2 = (nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = linear(WIDTH, INNER), linear(WIDTH, INNER), linear(INNER, WIDTH)

    def __call__(self, x):
        y, heads = self.n1(x), (*x.shape[:2], HEADS, WIDTH // HEADS)
        x = x + self.o(flash(*(f(y).reshape(heads) for f in (self.q, self.k, self.v))).reshape(x.shape))
        y = self.n2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


GRAPH, STATE = nnx.split(Block(nnx.Rngs(0)))
PARAMS = nnx.to_pure_dict(STATE)


def as_written(params, x):
    return nnx.merge(GRAPH, params)(x)


def by_hand(params, x, recipe):
    """The block from explicit functions, whose norms and matmuls add the gradients of other readers."""

    def layers(x, norm, names):
        scale, weights = params[norm]["scale"].astype(x.dtype), [params[name]["kernel"] for name in names]
        return fp8jax.norm_linear(x, scale, weights, recipe=recipe, residual=True)

    (x, *y), heads = layers(x, "n1", "qkv"), (*x.shape[:2], HEADS, WIDTH // HEADS)
    attended = flash(*(a.reshape(heads) for a in y))
    x = x + fp8jax.attention_output(attended, params["o"]["kernel"], recipe=recipe)
    x, gate, up = layers(x, "n2", ("gate", "up"))
    return fp8jax.glu_linear(gate, up, params["down"]["kernel"], x, recipe=recipe)


def gradients(fn, params, x):
    loss = lambda p, x: jnp.mean(jnp.square(fn(p, x).astype(jnp.float32)))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, (0, 1) if jnp.issubdtype(x.dtype, jnp.floating) else 0))(params, x)


def saved_arrays(fn, params, x):
    """Returns the residuals of a call besides parameters, in order."""
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
    return sorted((d, s) for d, s in residuals(jax.jit(fn), params, x) if s not in shapes and s[::-1] not in shapes)


def size(arrays):
    """Returns bytes."""
    return sum(int(np.prod(shape)) * jnp.dtype(dtype).itemsize for dtype, shape in arrays)


def assert_equal(actual, expected):
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("name", ["te_current", slow("coat"), "coat_fast"])
def test_a_block_of_nnx_and_one_by_hand(name):
    recipe = getattr(fp8jax.recipes, name)()
    graph, state = nnx.split(fp8jax.nnx.quantize(nnx.merge(GRAPH, STATE), recipe))
    fast, swapped = fp8jax.transform(as_written, recipe), lambda p, x: nnx.merge(graph, p)(x)
    assert size(saved_arrays(fast, PARAMS, X)) == size(saved_arrays(swapped, nnx.to_pure_dict(state), X))
    actual = gradients(fast, PARAMS, X)
    if name != "te_current":
        hand = functools.partial(by_hand, recipe=recipe)
        assert saved_arrays(fast, PARAMS, X) == saved_arrays(hand, PARAMS, X)
        assert_equal(actual, gradients(hand, PARAMS, X))
    else:
        assert_equal(actual, gradients(swapped, nnx.to_pure_dict(state), X))
    for leaf in (0, 1):
        assert 0 < relative(actual[leaf], gradients(as_written, PARAMS, X)[leaf]) < 0.2


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        y, heads = nn.LayerNorm(dtype=jnp.bfloat16)(x), (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (dense(WIDTH, name=name)(y).reshape(heads) for name in "qkv")
        x = x + dense(WIDTH, name="o")(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))
        y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return x + dense(WIDTH, name="down")(nn.gelu(dense(INNER, name="up")(y))), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(17, WIDTH, dtype=jnp.bfloat16)(tokens)
        remat = nn.remat(LinenBlock, prevent_cse=False)
        scan = nn.scan(remat, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = scan(name="layers")(x, None)
        return nn.Dense(17, use_bias=False, dtype=jnp.bfloat16, name="out")(nn.RMSNorm(dtype=jnp.bfloat16)(x))


def test_scanned_and_checkpointed_layers_of_linen():
    name, model, tokens = "coat", Decoder(), jnp.arange(32).reshape(2, 16) % 17
    variables = model.init(jax.random.key(0), tokens)
    fast = fp8jax.transform(lambda params, tokens: model.apply({"params": params}, tokens), name)
    quantized = fp8jax.linen.quantize(model, name)
    swapped = lambda params, tokens: quantized.apply({"params": params}, tokens)  # noqa: E731
    params = variables["params"]
    # The head is recognized by the readers of its result: no rule matches its name in the whole model.
    (head,) = [e for e in fast.explain(params, tokens).skipped if e.is_product]
    assert (head.path, "output head" in head.reason) == ("out", True)
    assert saved_arrays(fast, params, tokens) == saved_arrays(swapped, params, tokens)
    (loss, grads), (expected, others) = gradients(fast, params, tokens), gradients(swapped, params, tokens)
    assert loss == expected
    assert relative(grads, others) < 0.05  # gradients of residuals are added before they are rounded


def test_stochastic_rounding_draws_the_same():
    """Keys derive from the data: one for all matmuls of an array."""
    recipe, params = fp8jax.recipes.jetfire(), {"q": PARAMS["q"]["kernel"], "k": PARAMS["k"]["kernel"]}
    written = lambda p, x: jnp.sin(x @ p["q"].astype(x.dtype)) + x @ p["k"].astype(x.dtype)  # noqa: E731

    class Two(nnx.Module):
        def __init__(self):
            linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            self.q, self.k = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

        def __call__(self, x):
            return jnp.sin(self.q(x)) + self.k(x)

    graph, _ = nnx.split(fp8jax.nnx.quantize(Two(), recipe))
    swapped = lambda p, x: nnx.merge(graph, {n: {"kernel": w} for n, w in p.items()})(x)  # noqa: E731
    assert_equal(gradients(fp8jax.transform(written, recipe), params, X), gradients(swapped, params, X))


def test_products_are_of_eight_bits():
    fast = fp8jax.transform(as_written, "coat")
    assert [e.path for e in fast.explain(PARAMS, X).quantized if not e.is_product] == ["n1", "n2", "down"]
    actual = dots(jax.grad(lambda p, x: jnp.sum(fast(p, x).astype(jnp.float32))), PARAMS, X)
    assert actual.count(("float8_e4m3fn", "float8_e4m3fn")) == 7  # forward
    assert actual.count(("float8_e5m2", "float8_e4m3fn")) == actual.count(("float8_e4m3fn", "float8_e5m2")) == 7


@pytest.mark.parametrize("around", [jax.checkpoint, lambda f: lambda x: jax.lax.cond(x[0, 0, 0] < 99, f, jnp.sin, x)])
def test_a_norm_outside_and_its_products_inside_are_one(around):
    """Facts about an array enter programs that read it: the same bits as in one program."""
    p = {"n": PARAMS["n1"]["scale"], **{name: PARAMS[name]["kernel"] for name in ("q", "k")}}

    def layers(p, x, around):
        h = x.astype(jnp.float32)
        y = (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)).astype(x.dtype) * p["n"].astype(x.dtype)
        return jnp.tanh(y @ p["q"].astype(x.dtype)) + around(lambda y: jnp.tanh(y @ p["k"].astype(x.dtype)))(y)

    here, there = (functools.partial(layers, around=f) for f in (lambda f: f, around))
    fast = fp8jax.transform(there, "coat")
    assert [e.input_producer for e in fast.explain(p, X).quantized if e.is_product] == ["RMSNorm", "RMSNorm"]
    assert_equal(gradients(fast, p, X), gradients(fp8jax.transform(here, "coat"), p, X))


def test_a_norm_in_sixteen_bits_that_is_read_in_more_is_made_again():
    """The cast at the end of the norm belongs to it; the cast of its reader does not."""
    w = PARAMS["q"]["kernel"]

    def layer(w, x):
        y = (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
        return y.astype(jnp.float32) @ w

    fast = fp8jax.transform(layer, "coat")
    codes = [s for d, s in residuals(fast, w, X.astype(jnp.float32)) if d == "uint8"]
    assert len(codes) == 1  # of the norm's input
