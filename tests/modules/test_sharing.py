"""Layers that share codes, memory after failed traces, and no leaked tracers."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

import fp8jax
from fp8jax.ops.autodiff.residuals import _gradient_facts
from tests.programs import dots, residuals
from tests.rows import few

COAT, TE = fp8jax.recipes.coat(), fp8jax.recipes.te_current()
BATCH, LENGTH, WIDTH, INNER = 2, 8, 32, 48


def draw(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


X, SCALE = draw(0, BATCH, LENGTH, WIDTH), 1 + draw(1, WIDTH)
GATE, UP, DOWN = 0.1 * draw(2, WIDTH, INNER), 0.1 * draw(3, WIDTH, INNER), 0.1 * draw(4, INNER, WIDTH)
WEIGHTS = SCALE, GATE, UP, DOWN


def layer(via, x, scale, gate, up, down, recipe=COAT):
    x, a, b = fp8jax.norm_linear(x, scale, (gate, up), recipe=recipe, residual=True)
    return fp8jax.glu_linear(via(a), via(b), down, x, recipe=recipe)


def constrained(a):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    return jax.lax.with_sharding_constraint(a, jax.sharding.NamedSharding(mesh, jax.P("data")))


WRITINGS = {
    "plain": lambda a: a,
    "a constraint": constrained,
    "a name": functools.partial(checkpoint_name, name="hidden"),
    "a barrier": jax.lax.optimization_barrier,
    "casts": lambda a: a.astype(jnp.float32).astype(a.dtype),
    "reshapes": lambda a: a.reshape(BATCH * LENGTH, -1).reshape(a.shape),
    "a squeeze": lambda a: jnp.squeeze(a[None], 0),
    "a jit": jax.jit(constrained),
    "a jit in a jit": jax.jit(lambda a: jax.jit(lambda b: b.reshape(BATCH * LENGTH, -1))(a).reshape(a.shape)),
    "several": lambda a: jax.lax.optimization_barrier(checkpoint_name(constrained(a), "hidden")),
}


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize(
    "recipe",
    [
        "coat",
        pytest.param("moss", marks=pytest.mark.slow),
        pytest.param("coat_fast", marks=pytest.mark.slow),
        pytest.param("te_current", marks=pytest.mark.slow),
    ],
)
def test_under_the_leak_checker_the_same_program_is_compiled(recipe):
    plain = functools.partial(layer, WRITINGS["a jit"], recipe=recipe)
    model = fp8jax.nnx.quantize(Failing(nnx.Rngs(0)), recipe)
    graph, state = nnx.split(model)
    unbound = fp8jax.linen.quantize(Two(), recipe)
    variables = unbound.init(jax.random.key(0), X)

    def gradient(f):
        return lambda *args: jax.grad(lambda *args: jnp.sum(f(*args).astype(jnp.float32)))(*args)

    def programs():
        yield jax.jit(gradient(plain)).lower(X, *WEIGHTS).as_text()
        yield jax.jit(gradient(lambda state, x: nnx.merge(graph, state)(x, False))).lower(state, X).as_text()
        yield jax.jit(gradient(lambda *args: unbound.apply(*args))).lower(variables, X).as_text()

    expected = list(programs())
    assert all(len(program) > 1000 for program in expected)
    with jax.checking_leaks():
        assert list(programs()) == expected


@pytest.mark.usefixtures("young_heap")
def test_nothing_is_held_of_a_trace_that_is_over():
    before = len(_gradient_facts)
    jax.make_jaxpr(jax.grad(lambda *a: jnp.sum(layer(WRITINGS["plain"], *a).astype(jnp.float32)), range(5)))(
        X, SCALE, GATE, UP, DOWN
    )
    gc.collect()
    assert len(_gradient_facts) <= before


class Failing(nnx.Module):
    """A norm and a layer, and an error while `fails` is set."""

    def __init__(self, rngs):
        self.norm, self.dense = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, INNER, use_bias=False, rngs=rngs)

    def __call__(self, x, fails):
        y = self.dense(self.norm(x))
        if fails:
            raise RuntimeError("an error of the model")
        return y


def failing(kind):
    """Returns a function of whether it fails; each call traces again."""
    if kind == "nnx":
        model = fp8jax.nnx.quantize(Failing(nnx.Rngs(0)), COAT)
        return lambda fails: nnx.jit(lambda model, x: model(x, fails))(model, X)

    def f(fails, *args):
        y = layer(WRITINGS["a jit"], *args)
        if fails:
            raise RuntimeError("an error of the model")
        return jnp.sum(y.astype(jnp.float32))

    if kind == "its gradient":
        return lambda fails: jax.jit(jax.grad(functools.partial(f, fails)))(X, *WEIGHTS)
    return lambda fails: jax.jit(functools.partial(f, fails))(X, *WEIGHTS)


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("kind", ["a function", "its gradient", "nnx"])
def test_of_traces_that_fail_at_most_one_is_held_and_that_until_the_next_operation(kind):
    def alive():
        gc.collect()
        return sum(isinstance(thing, jax.core.Tracer) for thing in gc.get_objects())

    run = failing(kind)
    run(False)
    before, alive_after = alive(), []
    for _ in range(4):
        with pytest.raises(RuntimeError, match="an error of the model"):
            run(True)
        alive_after.append(alive())
    assert alive_after[0] == alive_after[1] == alive_after[2] == alive_after[3]
    jax.grad(lambda x: jnp.sum(fp8jax.rms_norm(x, recipe=COAT)))(X)
    assert alive() <= before
    with pytest.raises(RuntimeError, match="an error of the model"):
        run(True)
    run(False)
    assert alive() <= before


def codes(f, *args):
    return sorted(shape[-1] for dtype, shape in residuals(f, *args) if dtype == "uint8")


class Parallel(nnx.Module):
    """Parallel attention and MLP: q, k, v, gate and up read one norm."""

    def __init__(self, rngs):
        def dense(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        self.norm, self.out = nnx.RMSNorm(WIDTH, rngs=rngs), dense(WIDTH, WIDTH)
        self.q, self.k, self.v = (dense(WIDTH, WIDTH) for _ in range(3))
        self.gate, self.up, self.down = dense(WIDTH, INNER), dense(WIDTH, INNER), dense(INNER, WIDTH)

    def __call__(self, x):
        h = self.norm(x)
        q, k, v = (f(h).reshape(BATCH, LENGTH, 4, -1) for f in (self.q, self.k, self.v))
        attended = jax.nn.dot_product_attention(q, k, v).reshape(h.shape)
        return x + self.out(attended) + self.down(nnx.silu(self.gate(h)) * self.up(h))


class ParallelLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        h = linen.RMSNorm()(x)
        gate, up = (linen.Dense(INNER, use_bias=False)(h) for _ in range(2))
        attended = linen.MultiHeadDotProductAttention(4, use_bias=False)(h)
        return x + attended + linen.Dense(WIDTH, use_bias=False)(linen.silu(gate) * up)


@pytest.mark.parametrize("recipe", few(["coat", "te_current", "te_delayed", "moss", "deepseek"], "coat", "te_delayed"))
@pytest.mark.usefixtures("inspected")
def test_attention_and_mlp_side_by_side_share_their_input(recipe):
    graph, state = nnx.split(fp8jax.nnx.quantize(Parallel(nnx.Rngs(0)), recipe))
    model = fp8jax.linen.quantize(ParallelLinen(), recipe)
    variables = model.init(jax.random.key(0), X)
    # With COAT, residuals of the norm, of gate and up, and of attention.
    expected = [WIDTH, WIDTH, INNER, INNER] if recipe == "coat" else [WIDTH, WIDTH, INNER]
    assert codes(lambda state, x: nnx.merge(graph, state)(x), state, X) == expected
    assert codes(lambda p, x: model.apply({**variables, "params": p}, x), variables["params"], X) == expected


@pytest.mark.parametrize("f", [
    lambda x: fp8jax.rms_norm(x, recipe=COAT),
    lambda x: fp8jax.layer_norm(x, recipe=COAT),
    lambda x: fp8jax.glu(x, x, recipe=COAT),
    lambda x: fp8jax.activation(x, recipe=COAT, activation="gelu"),
])  # fmt: skip
@pytest.mark.parametrize("outer", [lambda f: jax.grad(f), lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]])
def test_a_gradient_of_a_gradient_raises(f, outer):
    x = draw(0, 4, WIDTH, dtype=jnp.float32)
    inner = jax.grad(lambda x: jnp.sum(f(x) ** 3))
    with pytest.raises(ValueError, match=r"differentiated twice|reverse-mode differentiation only"):
        jax.jit(outer(lambda x: jnp.sum(inner(x) ** 2)))(x)
    assert np.all(np.isfinite(inner(x)))


Shared = linen.jit(linen.Dense)


class Two(linen.Module):
    def setup(self):
        self.a, self.b = Shared(WIDTH, use_bias=False), Shared(WIDTH, use_bias=False)

    def __call__(self, x):
        return self.b(linen.tanh(self.a(x)))

    def encode(self, x):
        return self.a(x)

    def score(self, x):
        return self.b(x)


@pytest.mark.parametrize("order", [("encode", "score"), ("score", "encode")])
def test_jitted_layers_of_linen_are_told_apart_in_any_order_of_calls(order):
    model = fp8jax.linen.quantize(Two(), [fp8jax.Rule("b", None), fp8jax.Rule(".*", TE)])
    x = draw(0, 4, WIDTH, dtype=jnp.float32)
    variables = model.init(jax.random.key(0), x)
    expected = {"encode": "float8_e4m3fn", "score": "float32"}
    for method in (*order, *order):
        model.apply(variables, x, method=method)
        apply = functools.partial(model.apply, method=method)
        assert dots(apply, variables, x) == [(expected[method], expected[method])]
