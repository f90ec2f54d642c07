"""Norms and activations that save their inputs unquantized: on a GPU they compute the codes that layers read.

Here the references of the kernels replace them.
"""

import collections
import dataclasses
import types

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from experiments.models.llama import Block, LlamaConfig, products_saveable, rope_tables
from fp8jax.ops.dispatch import choice
from fp8jax.ops.quantization import fused_outputs
from tests.rows import slow

LLAMA = LlamaConfig(vocab=8, dim=64, layers=1, heads=2, kv_heads=1, mlp_dim=96)
TOKENS = 40
MOSS = dataclasses.replace(fp8jax.recipes.fast(), context=fp8jax.recipes.Context())
RECIPES = {"moss": fp8jax.recipes.moss(), "te_current": fp8jax.recipes.te_current()}
# Of a block: codes of both norms' results and of the activation's; then those that the weights' gradients read, of q,
# k, v, gate and up; with those of `down` the largest magnitudes of the cotangents of gate and up, and last their codes.
CALLS = {
    "moss": {"forward": 2, "encode_activation_residuals": 1, "quantize": 6, "quantize_and_predict": 1, "backward": 2},
    "te_current": {"forward": 2, "compute_amaxes": 1, "quantize": 3 + 6, "quantize_and_predict": 1, "backward": 2},
}


@pytest.fixture
def kernels(monkeypatch):
    """Switches the kernels on or off; returns how often each has run."""
    monkeypatch.setattr(fused_outputs, "missing_triton", lambda _: None)
    counted = collections.Counter()
    names = ("quantize", "compute_amaxes", "quantize_and_predict", "encode_activation_residuals", "forward", "backward")

    def counting(name):
        return lambda *a, **k: counted.update([name]) or getattr(fused_outputs.fused_reference, name)(*a, **k)

    on = types.SimpleNamespace(**{name: counting(name) for name in names})
    monkeypatch.setattr(fused_outputs, "run", lambda call, *arrays: call(on, *arrays))

    def switch(use):
        choice.clear_trace_cache()
        monkeypatch.setattr(fused_outputs, "on_cuda", lambda: use)
        counted.clear()
        return counted

    return switch


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def plain():
    return Block(LLAMA, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))


def block(recipe=None):
    """Returns a block as a function of parameters and input, and these; unquantized without a recipe."""
    model = plain() if recipe is None else fp8jax.nnx.quantize(plain(), recipe)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tables = rope_tables(TOKENS // 2, LLAMA.head_dim, 1e4)
    return lambda params, x: nnx.merge(graph, params, rest)(x, *tables), params, normal(0, TOKENS, LLAMA.dim)


def three(layer, params, x):
    def run(params, x):
        y, vjp_fn = jax.vjp(layer, params, x)
        return y, vjp_fn(normal(1, *y.shape).astype(y.dtype))

    return [np.asarray(a, np.float64) for a in jax.tree.leaves(jax.jit(run)(params, x))]


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def residual_memory(layer, params, x):
    """Returns residual bytes of a block without its parameters, and the bytes of codes among them."""
    weights = {leaf.shape for leaf in jax.tree.leaves(params)}
    weights |= {shape[::-1] for shape in weights}
    leaves = jax.tree.leaves(jax.eval_shape(lambda params, x: jax.vjp(layer, params, x)[1], params, x))
    sizes = [(leaf.size * leaf.dtype.itemsize, leaf.dtype) for leaf in leaves if leaf.shape not in weights]
    return sum(size for size, _ in sizes), sum(size for size, dtype in sizes if dtype == jnp.uint8)


@pytest.mark.parametrize("name", [pytest.param("te_current", marks=pytest.mark.slow), "moss"])
def test_a_block_computes_what_it_did_from_codes_made_once_and_keeps_none_of_them(name, kernels):
    kernels(False)
    exact = three(*block())
    layer, *args = block(RECIPES[name])
    without, before, again = (
        three(layer, *args),
        residual_memory(layer, *args),
        residual_memory(checkpointed(layer), *args),
    )
    counted = kernels(True)
    layer, *args = block(RECIPES[name])
    actual = three(layer, *args)
    assert counted == CALLS[name]
    for a, b, c in zip(exact, without, actual, strict=True):
        assert 0 < distance(c, a) < 1.05 * distance(b, a) + 0.003
    after = residual_memory(layer, *args)
    # Codes of the attention's output are all that is left of them.
    assert after[1] == TOKENS * LLAMA.dim < before[1]
    assert after[0] < 0.6 * before[0]
    # Where products alone are kept: scales of rows, and 1 / root of both norms.
    assert residual_memory(checkpointed(layer), *args)[0] <= again[0] + 5 * 4 * TOKENS


def checkpointed(layer):
    return jax.checkpoint(layer, policy=products_saveable)


class LinenBlock(linen.Module):
    """A norm and an MLP in Linen."""

    @linen.compact
    def __call__(self, x):
        h = linen.LayerNorm(name="norm")(x)
        h = linen.silu(linen.Dense(96, name="gate")(h)) * linen.Dense(96, name="up")(h)
        return x + linen.Dense(64, name="down")(h)


def test_in_linen_likewise(kernels):
    x, model = normal(0, TOKENS, 64).astype(jnp.float32), LinenBlock()
    params = model.init(jax.random.key(0), x)
    rule = fp8jax.Rule(".*", MOSS)
    layer = fp8jax.linen.quantize(model, rule).apply
    kernels(False)
    exact, without = three(model.apply, params, x), three(layer, params, x)
    counted = kernels(True)
    actual = three(layer, params, x)
    assert counted == {
        "forward": 1,
        "encode_activation_residuals": 1,
        "quantize": 3,
        "quantize_and_predict": 1,
        "backward": 1,
    }
    for a, b, c in zip(exact, without, actual, strict=True):
        assert distance(c, a) < 1.05 * distance(b, a) + 0.003


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow("deepseek"), "jetfire", "switchback"])
def test_norms_before_layers_of_other_codes_stay_as_written(name, kernels):
    kernels(True)
    tables = rope_tables(TOKENS // 2, LLAMA.head_dim, 1e4)
    sample = normal(0, TOKENS, LLAMA.dim)
    assert fp8jax.explain(plain(), name, sample, *tables).context_entries == ()
    assert [part.path for part in fp8jax.explain(plain(), MOSS, sample, *tables).context_entries] != []
