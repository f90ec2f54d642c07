"""Biases in users' matmuls: recognized at the addition, and part of the matmul's custom derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax.rewrite.operations import ActivationOperation, ProductOperation
from fp8jax.rewrite.plan import plan
from fp8jax.rewrite.read import read
from fp8jax.rewrite.rules import as_rule_set
from tests.distance import relative
from tests.programs import count

WIDTH, OUT, TOKENS = 32, 48, 24
X = jax.random.normal(jax.random.key(1), (2, TOKENS // 2, WIDTH), jnp.bfloat16)
P = {
    "w": 0.2 * jax.random.normal(jax.random.key(2), (WIDTH, OUT)),
    "b": jax.random.normal(jax.random.key(3), (OUT,)),
    "v": 0.2 * jax.random.normal(jax.random.key(4), (OUT, WIDTH)),
}


def operations(fn, rules="te_current", params=P, x=X):
    """Returns the operations of a plan, in program order."""
    closed = jax.make_jaxpr(fn)(params, x)
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree.flatten_with_path(params)[0]]
    graph = read(closed, [*paths, None])
    plan(graph, as_rule_set(rules))
    return [node.operation for node in graph.walk_nested() if node.operation is not None]


def biases(fn, **kwargs):
    return [o.bias is not None for o in operations(fn, **kwargs) if isinstance(o, ProductOperation)]


def sine(fn):
    return lambda p, x: jnp.sum(jnp.sin(fn(p, x).astype(jnp.float32)))


def test_it_is_the_layer_with_a_bias_bit_by_bit():
    """Results and all gradients equal those of `fp8jax.linear`; the bias gradient is summed in fp32."""

    def written(p, x):
        return x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)

    def by_hand(p, x):
        return fp8jax.linear(x, p["w"], recipe="te_current", bias=p["b"])

    fast = fp8jax.transform(written, "te_current")
    actual, expected = (jax.jit(jax.value_and_grad(sine(f), (0, 1)))(P, X) for f in (fast, by_hand))
    assert all(map(np.array_equal, jax.tree.leaves(actual), jax.tree.leaves(expected)))
    assert relative(actual[1][0]["b"], jax.grad(sine(written))(P, X)["b"]) < 0.1
    check = fast.check(P, X)
    assert check.first_failure is None, check


def test_how_libraries_write_it_is_found():
    linear = nnx.Linear(WIDTH, OUT, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    heads = nnx.MultiHeadAttention(4, WIDTH, dtype=jnp.bfloat16, decode=False, rngs=nnx.Rngs(0))
    for module, expected in ((linear, [True]), (heads, [True] * 4)):
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        run = lambda p, x, graph=graph, rest=rest: nnx.merge(graph, p, rest)(x)  # noqa: E731
        assert biases(run, params=nnx.to_pure_dict(params)) == expected
    spread = lambda p, x: x @ p["w"] + jnp.broadcast_to(p["b"], (2, TOKENS // 2, OUT))  # noqa: E731
    einsum = lambda p, x: jnp.einsum("btd,df->btf", x, p["w"]) + p["b"]  # noqa: E731
    for fn in (spread, einsum):
        assert biases(fn, x=X.astype(jnp.float32)) == [True]
    one = lambda p, x: jnp.einsum("btd,dhf->bthf", x, p["w"]) + p["b"]  # noqa: E731
    assert biases(one, params={"w": P["w"][:, None], "b": P["b"][None]}, x=X.astype(jnp.float32)) == [True]
    loop = lambda p, x: jax.lax.scan(lambda x, _: ((x @ p["w"] + p["b"]) @ p["v"], None), x, length=2)[0]  # noqa: E731
    assert biases(loop, x=X.astype(jnp.float32)) == [True, False]


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x: (lambda y: y * (y + p["b"]))(x @ p["w"]),
        lambda p, x: (lambda y: (y, y + p["b"]))(x @ p["w"])[0],
        lambda p, x: x @ p["w"] + 3 * x[:, :1, :1],
        lambda p, x: x @ p["w"] + jnp.tanh(p["b"] * x[0, 0, 0]),
        lambda p, x: x @ p["w"] + p["b"][:12, None],
        lambda p, x: x @ p["w"] + jax.lax.dynamic_slice_in_dim(p["w"], (x[0, 0, 0] > 0).astype(jnp.int32), 1)[0],
        lambda p, x: (x @ p["w"]).astype(jnp.bfloat16) + p["b"].astype(jnp.bfloat16),
        lambda p, x: jnp.swapaxes(x @ p["w"], 1, 2) + p["b"][:, None],
        lambda p, x: x @ p["w"] - p["b"],
        lambda p, x: x @ p["w"] + p["b"][0],
        lambda p, x: x @ p["w"] * p["b"],
        lambda p, x: x @ p["w"] + jnp.linspace(0.0, 3.0, OUT),
    ],
)
def test_what_is_no_bias_is_left_as_written(fn):
    """A matmul with other readers, a value that depends on data, another axis or dtype, another sum, a number, a
    constant.
    """
    x = X.astype(jnp.float32)
    assert biases(fn, x=x) == [False]
    fast = fp8jax.transform(fn, "te_current")
    assert relative(fast(P, x), fn(P, x)) < 0.1


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "int8", "float8_e4m3fn"])
def test_a_bias_is_taken_as_it_is_stored_if_it_has_a_gradient(dtype):
    fn = lambda p, x: x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)  # noqa: E731
    (actual,) = operations(fn, params={**P, "b": P["b"].astype(dtype)})
    assert actual.bias.dtype == (dtype if dtype in ("float16", "float32") else X.dtype)


def test_numbers_and_sums_on_explicit_axes_are_left_as_written():
    fn = lambda p, x: x @ p["w"] + p["b"]  # noqa: E731
    x = X.astype(jnp.float32)
    assert biases(fn, params={"w": P["w"][:, :1], "b": P["b"][0]}, x=x) == [False]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        assert biases(fn, params=jax.device_put(P, jax.P()), x=jax.device_put(x, jax.P("x"))) == [False]
    assert biases(fn, x=x) == [True]


def test_an_activation_knows_that_a_bias_asks_for_sums_of_its_cotangents():
    def plain(p, x):
        return jax.nn.gelu(x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)) @ p["v"].astype(x.dtype)

    def without(p, x):
        return jax.nn.gelu(x @ p["w"].astype(x.dtype)) @ p["v"].astype(x.dtype)

    for fn, expected in ((plain, [True]), (without, [False])):
        actual = operations(fn, rules="coat_fast")
        assert [o.has_bias for o in actual if isinstance(o, ActivationOperation)] == expected


@pytest.mark.parametrize("recipe", ["te_delayed", "moss"])
@pytest.mark.usefixtures("inspected")
def test_layers_whose_scaling_keeps_a_state_take_it_too(recipe):
    fn = lambda p, x: x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)  # noqa: E731
    fast = fp8jax.transform(fn, recipe)
    states = fast.init(P, X)
    run = lambda p, x: fast(p, x, states=states)  # noqa: E731
    actual, expected = (jax.grad(sine(f))(P, X)["b"] for f in (run, fn))
    assert relative(actual, expected) < 0.1
    assert count(jax.grad(sine(run)), "add_any", P, X) == 0


@pytest.mark.parametrize("recipe", ["coat", "te_delayed", "moss"])
def test_an_input_that_several_products_read_has_the_sum_of_their_gradients(recipe):
    fn = lambda p, x: x @ p["w"].astype(x.dtype) + x @ p["u"].astype(x.dtype) + x @ p["t"].astype(x.dtype)  # noqa: E731
    params = {"w": P["w"], "u": P["w"][::-1] / 2, "t": -P["w"] / 3}
    fast = fp8jax.transform(fn, recipe)
    kwargs = {"states": fast.init(params, X)} if recipe != "coat" else {}
    run = lambda x, p: fast(p, x, **kwargs)  # noqa: E731
    actual, expected = (jax.grad(sine(f))(X, params) for f in (run, lambda x, p: fn(p, x)))
    assert relative(actual, expected) < 0.15
