"""Empty operands, such as those of an expert without tokens: empty or zero results, and zero gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.matmul.matmul import matmul
from tests.rows import few

KEY = jax.random.key(0)
# Tokens, inputs and outputs.
SIZES = {"no tokens": (0, 32, 16), "no inputs": (4, 0, 16), "no outputs": (4, 32, 0), "nothing": (0, 0, 0)}


def outputs(recipe, x, w, many, weights, scale):
    """Returns results of operations with some empty operands; only values that must be zero."""
    options = {"recipe": recipe, "key": KEY}
    if recipe.linear.stateful_strategies:
        yield fp8jax.scaled_linear(x, w, fp8jax.init_scaling(recipe, w), jnp.zeros([]), **options)[0]
        return
    yield fp8jax.linear(x, w, **options)
    yield fp8jax.einsum("eti,eio->eto", many, weights, **options)
    if recipe.linear.is_quantized:
        yield fp8jax.linear(x, w, quantized=fp8jax.quantize_weight(w, recipe=recipe), **options)
    if x.size:
        return
    x, y, z = fp8jax.norm_linear(x, scale, (w, w), residual=True, **options)
    yield fp8jax.glu_linear(y, z, w.T, x, **options)
    yield fp8jax.attention_output(jnp.stack([x, x], -2), jnp.stack([w, w]), **options)
    yield fp8jax.layer_norm(many, scale, scale, recipe=recipe)
    yield fp8jax.activation(fp8jax.glu(x, x, recipe=recipe), recipe=recipe, activation="gelu")


@pytest.mark.parametrize(
    "name",
    few(fp8jax.recipes.NAMES, "bf16", "coat_fast", "int8_fallback"),
)
def test_empty_operands_have_empty_or_zero_results_and_zero_gradients(name):
    recipe = fp8jax.recipes.get(name)

    @jax.jit
    def gradients():
        results = []
        for m, k, n in SIZES.values():
            operands = [jnp.ones(shape) for shape in ((m, k), (k, n), (3, m, k), (3, k, n), (k,))]
            values, vjp_fn = jax.vjp(lambda *operands: list(outputs(recipe, *operands)), *operands)
            results.append((values, vjp_fn(jax.tree.map(jnp.ones_like, values))))
        return results

    for case, (m, k, n), (values, grads) in zip(SIZES, SIZES.values(), gradients(), strict=True):
        assert [g.shape for g in grads] == [(m, k), (k, n), (3, m, k), (3, k, n), (k,)], case
        assert [y.shape for y in values[:2]] == [(m, n), (3, m, n)][: len(values)], case
        # The residual of `glu_linear` has no elements here.
        assert not any(np.asarray(array).any() for array in (*values, *grads)), case


@pytest.mark.parametrize("spec", ["e4m3", "int8:token", "e4m3:group128", "int8:block32", "e4m3:mx32", None])
@pytest.mark.parametrize("shape", [(0, 32, 4), (4, 0, 4), (4, 32, 0)])
def test_empty_products_are_zeros(spec, shape):
    m, k, n = shape
    a, b = (jnp.ones(s) if spec is None else fp8jax.quantize(jnp.ones(s), spec) for s in ((m, k), (n, k)))
    y = matmul(a, b, dtype=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y), np.zeros((m, n)))


def test_an_expert_without_tokens_leaves_the_others_as_they_are():
    recipe = fp8jax.recipes.te_current()
    x, w = jax.random.normal(KEY, (2, 6, 32)), jax.random.normal(KEY, (2, 32, 8))
    grad = jax.grad(lambda w, *parts: sum(jnp.sum(fp8jax.linear(x, w[i], recipe=recipe)) for i, x in enumerate(parts)))
    both, one = grad(w, x[0], x[1, :0]), grad(w, x[0])
    np.testing.assert_array_equal(np.asarray(both), np.asarray(one))
    assert not np.asarray(both[1]).any()
