"""Products of one input that a recipe joins: they are those of one packed projection, bit by bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.rewrite import operations
from tests.distance import relative
from tests.programs import dots

WIDTH, WIDTHS = 128, {"q": 128, "k": 256, "v": 384}
X = jax.random.normal(jax.random.key(1), (2, 24, WIDTH), jnp.bfloat16)
P = {n: 0.2 * (i + 1) * jax.random.normal(jax.random.key(i), (WIDTH, w)) for i, (n, w) in enumerate(WIDTHS.items())}
B = {f"{n}_bias": jax.random.normal(jax.random.key(9 + i), (w,)) for i, (n, w) in enumerate(WIDTHS.items())}


def joining(name="te_current"):
    recipe = fp8jax.recipes.get(name)
    return dataclasses.replace(recipe, linear=dataclasses.replace(recipe.linear, fuse_parallel_matmuls=True))


def mixed(q, k, v, x):
    """The input is read again, as by a residual connection."""
    return q * jnp.max(k, -1, keepdims=True) + v[..., :WIDTH] * v[..., WIDTH : 2 * WIDTH] + x


def apart(p, x):
    return mixed(*(x @ p[n].astype(x.dtype) for n in WIDTHS), x)


def biased(p, x):
    return mixed(*(x @ p[n].astype(x.dtype) + p[f"{n}_bias"].astype(x.dtype) for n in WIDTHS), x)


def loss(fn):
    return lambda p, x: jnp.sum(jnp.sin(fn(p, x).astype(jnp.float32)))


@pytest.mark.parametrize("on_a_gpu", [False, True])
@pytest.mark.parametrize("fn", [apart, biased])
def test_they_are_one_packed_projection(fn, on_a_gpu, monkeypatch):
    monkeypatch.setattr(operations, "should_split_output", lambda *_: on_a_gpu)
    params = P | (B if fn is biased else {})
    by_hand = lambda p, x: fp8jax.transform(whole, "te_current")(pack(p), x)  # noqa: E731
    whole = lambda p, x: mixed(*jnp.split(_dense(p, x), (128, 384), -1), x)  # noqa: E731
    runs = [jax.value_and_grad(loss(f), (0, 1)) for f in (fp8jax.transform(fn, joining()), by_hand)]
    assert len(dots(runs[0], params, X)) == (5 if on_a_gpu else 3)
    got, want = (jax.jit(run)(params, X) for run in runs)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (got, want))))


def pack(p):
    return {"w": jnp.concatenate([p[n] for n in WIDTHS], 1)} | (
        {"b": jnp.concatenate([p[f"{n}_bias"] for n in WIDTHS])} if "q_bias" in p else {}
    )


def _dense(p, x):
    y = x @ p["w"].astype(x.dtype)
    return y + p["b"].astype(x.dtype) if "b" in p else y


def test_gradients_are_as_near_as_under_a_scale_each():
    """To those in float64, of weights and gradients that differ by a factor of three in size."""
    small = lambda q, k, v, x: jnp.sum(jnp.sin(q), -1) + jnp.sum(k, -1) / 10 + jnp.sum(jnp.square(v), -1) / 30  # noqa: E731
    fn = lambda p, x: small(*(x @ p[n].astype(x.dtype) for n in WIDTHS), x)  # noqa: E731
    total = lambda f: lambda p, x: jnp.sum(jnp.square(f(p, x)).astype(jnp.float32))  # noqa: E731
    with jax.enable_x64(True):
        exact = jax.grad(lambda p, x: jnp.sum(jnp.square(fn(p, x))), (0, 1))
        want = exact(*jax.tree.map(lambda a: a.astype("float64"), (P, X)))
        want = jax.tree.map(np.asarray, want)
    each, joined = (jax.jit(jax.grad(total(fp8jax.transform(fn, r)), (0, 1)))(P, X) for r in ("te_current", joining()))
    for name in WIDTHS:
        assert relative(joined[0][name], want[0][name]) < 1.1 * relative(each[0][name], want[0][name])
    assert relative(joined[1], want[1]) < 1.1 * relative(each[1], want[1])


def report(fn, params=P, recipe=None):
    return {e.path: e.reason for e in fp8jax.transform(fn, recipe or joining()).explain(params, X).quantized}


def test_explain_says_what_is_joined():
    assert report(apart) == {n: f"the recipe; joined with {', '.join(m for m in WIDTHS if m != n)}" for n in WIDTHS}


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x: jax.nn.silu(x @ p["q"].astype(x.dtype)) * (x @ p["k"].astype(x.dtype)) @ p["d"].astype(x.dtype),
        lambda p, x: x @ p["q"].astype(x.dtype) + (2 * x) @ p["k"].astype(x.dtype),  # of another input
        lambda p, x: x @ p["q"].astype(x.dtype) + x @ p["k"].T.astype(x.dtype),
        lambda p, x: sum(jnp.einsum("...i,oi->...o", x, p[n].astype(x.dtype)) for n in "qk"),
        lambda p, x: x @ p["q"].astype(x.dtype) + (x @ p["k"].astype(x.dtype) + p["d"][0].astype(x.dtype)),
        lambda p, x: sum(x @ p[n].astype(x.dtype) + p["d"][i].astype(x.dtype) for i, n in enumerate("qk")),
    ],
    ids=["activation", "another input", "transposed", "of outputs and inputs", "one bias", "rows of biases"],
)
def test_what_stays_apart(fn):
    params = {"q": P["q"], "k": P["q"] / 3, "d": P["q"] / 2}
    fast, same = (fp8jax.transform(fn, r) for r in (joining("coat"), "coat"))
    assert "joined" not in str(fast.explain(params, X))
    np.testing.assert_array_equal(fast(params, X), same(params, X))


def test_on_explicit_axes_they_stay_apart_and_explain_says_so():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    params, x = (jax.device_put(a, jax.NamedSharding(mesh, jax.P())) for a in (P, X))
    with jax.set_mesh(mesh):
        reasons = {e.path: e.reason for e in fp8jax.transform(apart, joining()).explain(params, x).quantized}
    assert reasons == dict.fromkeys(WIDTHS, "the recipe; not joined, for its parameter lies on Explicit axes")


@pytest.mark.parametrize("name", ["fast", "deepseek", "te_delayed", "int8_block", "bf16"])
def test_recipes_without_one_scale_a_tensor_are_refused(name):
    with pytest.raises(ValueError, match=r"linear\.fuse_parallel_matmuls needs current scaling and one scale a tensor"):
        joining(name)
