"""Functions that are traced once for all equal calls."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import fp8jax
from experiments.models.plain import PlainLlama
from fp8jax.core import formats
from fp8jax.modules.compiled import parse_products
from fp8jax.ops.dispatch import choice
from fp8jax.ops.quantization import quantize
from tests.kernels import h200

SEEN = []


@pytest.fixture(autouse=True)
def fresh():
    choice.clear_trace_cache()
    SEEN.clear()


def noted(name, x, *, factor=2.0):
    SEEN.append(name)
    return x * factor


def closing(name, factor=2):
    return lambda x, more=0: noted(name, x, factor=factor) + more


def count(*functions, x=None):
    """Returns the number of traces for calls of functions in one program, and their results."""
    SEEN.clear()
    x = jnp.arange(3.0) if x is None else x
    actual = jax.jit(lambda x: [choice.call_traced_once(f, x) for f in functions])(x)
    return len(SEEN), actual


@pytest.mark.parametrize(
    "make", [lambda: functools.partial(noted, "a"), lambda: functools.partial(noted, "a", factor=3.0),
             lambda: closing("a"), lambda: functools.partial(closing("a"), more=1),
             lambda: functools.partial(functools.partial(noted, "a"), factor=4.0)],
)  # fmt: skip
def test_functions_that_say_the_same_are_traced_once(make):
    traces, actual = count(make(), make(), make())
    assert traces == 1
    for each in actual:
        np.testing.assert_array_equal(each, make()(jnp.arange(3.0)))


def test_functions_that_say_something_else_are_not():
    bound = [functools.partial(noted, name, factor=factor) for name in "ab" for factor in (2, 2.0, True, 3.0)]
    functions = (*bound, *(closing("a", factor) for factor in (2, 3, 2.0, True)))
    traces, actual = count(*functions)
    assert traces == len(functions)
    for f, each in zip(functions, actual, strict=True):
        np.testing.assert_array_equal(each, f(jnp.arange(3.0)))


def test_other_types_and_another_target_are_traced_anew():
    function = functools.partial(noted, "a")
    assert count(function)[0] == 1
    assert count(function)[0] == 0
    assert count(function, x=jnp.ones(4))[0] == 1
    with choice.target(capability=90):
        assert count(function)[0] == 1
    choice.clear_trace_cache()
    assert count(function)[0] == 1


def test_what_closes_over_arrays_is_never_another_array_s():
    def program(a, b):
        add = lambda y: lambda x: noted("a", x) + y  # noqa: E731
        return (
            choice.call_traced_once(add(a), b),
            choice.call_traced_once(add(b), b),
            choice.call_traced_once(functools.partial(lambda y, x: x - y, a), b),
        )

    a, b = jnp.ones(2), jnp.full(2, 5.0)
    for actual in (program(a, b), jax.jit(program)(a, b), jax.jit(lambda b: program(a, b))(b)):
        np.testing.assert_array_equal(actual, [[11, 11], [15, 15], [4, 4]])


def test_outside_of_a_trace_a_function_sees_arrays():
    assert choice.call_traced_once(lambda x: float(x) + 1, jnp.float32(2)) == 3


def test_under_transformations():
    call = lambda x: choice.call_traced_once(functools.partial(noted, "a"), x).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(call)(jnp.ones(3)), 2)
    np.testing.assert_array_equal(jax.vmap(call)(jnp.ones((2, 3))), [6, 6])
    np.testing.assert_array_equal(jax.jvp(call, (jnp.ones(3),), (jnp.ones(3),))[1], 6)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("recipe", ["coat", "deepseek"])
def test_products_of_a_kind_share_functions_that_are_compiled_once_on_one_device(recipe, devices):
    """The third matmul adds calls but no function. Gradients equal those of inlined calls bitwise."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, *weights = (jax.random.normal(key, (32, 32), jnp.bfloat16) for key in keys)

    def loss(x, *weights):
        for w in weights:
            x = fp8jax.linear(x, w, recipe=recipe)
        return x.astype(jnp.float32).sum()

    programs = [jax.jit(jax.grad(loss, argnums=tuple(range(count + 1)))) for count in (2, 3)]
    with jax.set_mesh(jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])):
        lowered = [program.lower(x, *weights[:count]) for count, program in enumerate(programs, 2)]
        actual = programs[1](x, *weights)
    functions, calls = ([each.as_text().count(name) for each in lowered] for name in ("func.func private", "call @"))
    assert functions[0] == functions[1] > 0
    assert calls[1] > calls[0]
    text = lowered[1].compile().as_text()
    assert (text.count(" call(") > 0) == (devices == 1)
    assert all(product.requested_formats for product in parse_products(text))
    for a, b in zip(actual, programs[1](x, *weights), strict=True):
        np.testing.assert_array_equal(a, b)


def kernels_in(program, recorded):
    """Returns the number of kernel calls in a lowered program. JAX lowers each called function once."""
    count = 0
    for eqn in program.eqns:
        count += eqn.primitive.name == "triton_kernel_call"
        values = [v for value in eqn.params.values() for v in (value if isinstance(value, (tuple, list)) else (value,))]
        called = getattr(eqn.params.get("inline"), "name", eqn.params.get("inline")) in (False, "AUTO")
        for inner in [getattr(value, "jaxpr", value) for value in values]:
            if hasattr(inner, "eqns") and not (called and id(inner) in recorded):
                recorded[id(inner)] = inner
                count += kernels_in(inner, recorded)
    return count


@pytest.mark.skipif(bool(h200.missing()), reason="kernels cannot be traced here")
def test_blocks_of_a_model_share_the_traces_of_kernels(monkeypatch):
    """Four blocks need as many traces as two, once other caches are filled: of kernels, of the optimizer's
    observations, and of decoded codes. They lower as many kernel calls.
    """
    from pallas_kernels.optimizers import adamw_triton

    monkeypatch.setattr(jax, "device_count", lambda: 1)

    for owner, name in ((quantize, "_quantize_shard"), (adamw_triton.AdamWScalars, "to_vector"), (formats, "where")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *x, plain=plain, name=name: SEEN.append(name) or plain(*x))
    optimizers = [fp8jax.optimizer(recipe, 1e-3, clip=1.0) for recipe in ("coat", "fp8_lm")]
    results = []
    for layers in (2, 2, 4):
        for cached in (choice._call_inlined, adamw_triton._scalars_to_vector, formats.decode_fp8):
            cached.clear_cache()
        SEEN.clear()
        model = nnx.eval_shape(lambda layers=layers: PlainLlama(64, 64, layers, 4, 2, 128, nnx.Rngs(0)))
        graph, state = nnx.split(fp8jax.nnx.quantize(model, "coat"))
        loss = lambda state, x, graph=graph: nnx.merge(graph, state)(x).astype(jnp.float32).mean()  # noqa: E731
        with choice.target(capability=90):
            gradient = jax.jit(jax.grad(loss)).trace(state, jax.ShapeDtypeStruct((1, 32), jnp.int32)).jaxpr
            params = nnx.to_pure_dict(state)
            steps = [jax.jit(lambda p, tx=tx: tx.step(p, tx.init(p), p)).trace(params).jaxpr for tx in optimizers]
        results.append((collections.Counter(SEEN), [kernels_in(x.jaxpr, {}) for x in (gradient, *steps)]))
    assert results[1] == results[2]
    assert results[2][0].keys() == {"_quantize_shard", "to_vector", "where"}
    assert all(results[2][1])
