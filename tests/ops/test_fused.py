"""Fused quantization of results under JAX transformations, with the references of the kernels."""

import collections
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.dispatch import choice
from fp8jax.ops.nonlinear import norm
from fp8jax.ops.quantization import fused_outputs

pytest.importorskip("jax_triton")
from tests.kernels.fused_interpreter import CASES, normal, recipe
from tests.rows import few, slow

FEW = ["rms 1 lean", "layer 2 faithful", "norm fp32, three axes", "silu True lean", "silu True faithful"]
WRITTEN = ["layer 2 ten bits", "silu True ten bits"]  # results and cotangents, for layers that read no codes of them


@pytest.fixture
def fused_calls(monkeypatch):
    """Returns a function that switches the kernels (here their references) on or off, and returns their calls."""
    found = []
    monkeypatch.setattr(fused_outputs, "missing_triton", lambda _: None)
    monkeypatch.setattr(
        fused_outputs,
        "_quantize_group",
        lambda *args, make=fused_outputs._quantize_group: found.append(args) or make(*args),
    )

    def switch(on):
        choice.clear_trace_cache()  # earlier traces do not depend on the switch
        monkeypatch.setattr(fused_outputs, "on_cuda", lambda: on)
        found.clear()
        return found

    return switch


def results(f, *args):
    """Returns results and gradients under jit, in float64."""

    def both(*args):
        y, vjp_fn = jax.vjp(f, *args)
        return y, vjp_fn(jax.tree.map(lambda a: normal(a.size, *a.shape, dtype=a.dtype), y))

    return [np.asarray(a, np.float64) for a in jax.tree.leaves(jax.jit(both)(*args))]


def same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        # A code more or less here and there, where values are next to a tie.
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b) + 1e-30


@pytest.mark.parametrize("case", few([*FEW, *WRITTEN], FEW[2], *WRITTEN))
def test_a_jitted_layer_computes_the_same(case, fused_calls):
    f, args = CASES[case]()
    fused_calls(False)
    expected = results(f, *args)
    recorded = fused_calls(True)
    same(results(f, *args), expected)
    assert bool(recorded) == (case not in WRITTEN)


@pytest.mark.parametrize("case", few(["rms 1 lean", "silu True lean", *WRITTEN], "silu True lean"))
def test_a_mapped_layer_computes_what_each_does(case, fused_calls):
    f, (x, *weights) = CASES[case]()
    stack = jnp.stack([x, 2 * x[::-1]])
    fused_calls(False)
    expected = results(lambda *w: [f(each, *w) for each in stack], *weights)
    recorded = fused_calls(True)
    mapped = jax.vmap(f, (0, *[None] * len(weights)))
    actual = results(lambda *w: [jax.tree.map(lambda y, i=i: y[i], mapped(stack, *w)) for i in range(2)], *weights)
    same(actual, expected)
    assert bool(recorded) == (case not in WRITTEN)


@pytest.mark.parametrize("remat", [slow(False), True])
def test_a_loop_over_layers_computes_the_same_and_keeps_the_same(remat, fused_calls):
    part = recipe("lean")
    x = normal(0, 2, 8, 48, dtype=jnp.float32)
    stacks = (
        1 + 0.1 * normal(1, 3, 48),
        0.2 * normal(2, 3, 48, 64),
        0.2 * normal(3, 3, 48, 64),
        0.2 * normal(4, 3, 64, 48),
    )

    def layer(x, weights):
        scale, gate, up, down = weights
        gate, up = fp8jax.norm_linear(x, scale, (gate, up), recipe=part)
        return fp8jax.glu_linear(gate, up, down, x, recipe=part), None

    def model(x, *stacks):
        anew = lambda *args: layer(*args)  # noqa: E731 (JAX remembers the traces of a function)
        return jax.lax.scan(jax.checkpoint(anew) if remat else anew, x, stacks)[0]

    def residual_shapes():
        leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(model, *a)[1], x, *stacks))
        return sorted((str(leaf.dtype), leaf.shape) for leaf in leaves if leaf.size > 1)

    fused_calls(False)
    expected, bytes_kept = results(model, x, *stacks), residual_shapes()
    recorded = fused_calls(True)
    same(results(model, x, *stacks), expected)
    assert len(recorded) >= 5
    assert residual_shapes() == bytes_kept


@pytest.mark.parametrize(("case", "calls"), [
    slow("silu True faithful", {"quantize": 2, "compute_amaxes": 1}),
    # The operand of the weight's gradient is computed with the amax of the cotangents, or with their codes.
    ("silu True lean", {"quantize": 2, "quantize_and_predict": 1}),
    # A sample is read first, of results and of cotangents. All is read again only under a flag: by
    # `requantize_if` forward, by `compute_amaxes` backward.
    ("silu True bound", {"compute_amaxes": 3, "requantize_if": 1, "quantize": 1}),
    slow("gelu False bound", {"compute_amaxes": 3, "requantize_if": 1, "quantize": 1}),
    # If layers need other codes, results and cotangents are written once.
    ("silu True ten bits", {"cotangents": 1}),
    ("gelu_tanh False ten bits", {"cotangents": 1}),
    ("rms 1 ten bits", {"forward": 1, "backward": 1}),
])  # fmt: skip
def test_how_often_a_perceptron_is_read(case, calls, fused_calls, monkeypatch):
    counted = collections.Counter()

    def run(call, *arrays):
        def watched(on, *arrays):
            names = (
                "quantize", "compute_amaxes", "quantize_and_predict", "encode_activation_residuals", "requantize_if",
                "cotangents", "forward", "backward",
            )  # fmt: skip
            count = lambda name: lambda *a, **k: counted.update([name]) or getattr(on, name)(*a, **k)  # noqa: E731
            return call(types.SimpleNamespace(**{name: count(name) for name in names}), *arrays)

        return watched(fused_outputs.fused_reference, *arrays)

    fused_calls(True)
    monkeypatch.setattr(fused_outputs, "run", run)
    f, args = CASES[case]()
    results(f, *args)
    del counted["encode_activation_residuals"]
    assert counted == calls


def test_layers_of_other_recipes_and_plain_readers_see_the_array_itself(fused_calls):
    x, w = normal(0, 16, 48), normal(1, 48, 32)
    rules = [fp8jax.Rule("a", recipe("lean")), fp8jax.Rule("b", fp8jax.recipes.deepseek())]

    def f(p, x):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return h @ p["a"], h @ p["b"], jnp.sum(h * h)

    params = {"a": w, "b": w}
    fused_calls(False)
    expected = results(fp8jax.transform(f, rules), params, x)
    recorded = fused_calls(True)
    same(results(fp8jax.transform(f, rules), params, x), expected)
    assert recorded


def known_of_norm(x, part):
    return norm.normalize(x, None, None, part, 1e-6, None, centered=False)[2]


def test_nothing_is_known_where_kernels_do_not_run(fused_calls):
    fused_calls(False)
    x = normal(0, 16, 48)
    assert known_of_norm(x, recipe("lean")).fused_output is None
    fused_calls(True)
    assert known_of_norm(x, recipe("lean")).fused_output is not None
    # Groups that do not fit, scales in powers of two and integers are XLA's.
    for spec in ("e4m3:group32", "int8:group16"):
        assert known_of_norm(x, recipe("lean", spec)).fused_output is None


@pytest.mark.usefixtures("young_heap")
def test_no_array_of_a_trace_outlives_it(fused_calls):
    part = recipe("lean")
    x, w = normal(0, 16, 48), normal(1, 48, 32)

    def f(x, w):
        gate, up = fp8jax.norm_linear(x, None, (w, 2 * w), recipe=part)
        return jnp.sum(fp8jax.glu_linear(gate, up, w.T, recipe=part).astype(jnp.float32))

    recorded = fused_calls(True)
    jax.make_jaxpr(jax.grad(f, (0, 1)))(x, w)
    assert recorded
    recorded.clear()
    gc.collect()
    assert not any(isinstance(thing, fused_outputs.FusedOutputs) for thing in gc.get_objects())


def test_in_a_shard_map_with_and_without_checks_of_what_varies(fused_calls):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x, scale, part = normal(0, 8, 48), 1 + normal(1, 48), recipe("lean")
    noted = []

    def normed(x, scale):
        h, _, origin = norm.normalize(x, scale, None, part, 1e-6, None, centered=False)
        noted.append(origin.fused_output is not None)
        return h

    def step(x, scale):
        return normed(x, scale), jax.grad(lambda x: jnp.sum(normed(x, None).astype(jnp.float32) ** 3))(x)

    fused_calls(True)
    expected, found = jax.jit(step)(x, scale), {}
    data, whole = jax.P("data"), jax.P()
    for check in (True, False):
        noted.clear()
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(data, whole), out_specs=(data, data), check_vma=check)
        for a, b in zip(jax.jit(mapped)(x, scale), expected, strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0.02, atol=0.02)
        found[check] = set(noted)
    assert found == {True: {True}, False: {True}}


def test_a_layer_that_casts_a_norm_to_bf16_reads_what_the_norm_is_computed_from(fused_calls):
    from flax import nnx

    class Head(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(48, 32, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(48, rngs=rngs)
            # One layer a module: modules with several are traced aside, too.
            self.first, self.second = Head(rngs), Head(rngs)

        def __call__(self, x):
            h = self.norm(x)
            return self.first(h), self.second(h)

    part = fp8jax.recipes.coat_activations()
    x = normal(0, 16, 48, dtype=jnp.float32)
    graph, state = nnx.split(fp8jax.nnx.quantize(Model(nnx.Rngs(0)), part))
    f = lambda x, state: nnx.merge(graph, state)(x)  # noqa: E731
    fused_calls(False)
    expected = results(f, x, state)
    recorded = fused_calls(True)
    same(results(f, x, state), expected)
    # The codes that both layers read, and in each of them their recomputation.
    assert [result.operation.dtype for result, *_ in recorded] == [1, 1, 1]
