"""Norms of Linen models: what they compute, and what they keep."""

import dataclasses
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.recipes import Context
from tests.programs import residuals

COAT = fp8jax.recipes.coat_activations()
LINEAR_ONLY = dataclasses.replace(COAT, context=Context())
TOKENS, WIDTH, INNER = 12, 32, 48
X = jax.random.normal(jax.random.key(7), (TOKENS, WIDTH))


def relative(a, b) -> float:
    a, b = (np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


class LinenBlock(linen.Module):
    """Norms of Linen, each read by a layer."""

    kinds: Any = dataclasses.field(default_factory=dict)

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = linen.Dense(WIDTH, name="first")(linen.LayerNorm(epsilon=0.1, name="norm", **self.kinds)(x))
        return linen.Dense(INNER, name="second")(linen.RMSNorm(use_scale=False, name="root", dtype=jnp.bfloat16)(x + h))


@pytest.mark.parametrize("kinds", [{}, {"use_bias": False}, {"use_scale": False, "dtype": jnp.bfloat16}], ids=str)
def test_norms_of_linen_compute_what_they_did_and_keep_codes(kinds):
    model, x = LinenBlock(kinds), 2 + X
    variables = model.init(jax.random.key(0), x)
    quantized = fp8jax.linen.quantize(model, COAT)
    assert jax.tree.structure(quantized.init(jax.random.key(0), x)) == jax.tree.structure(variables)

    def found(recipe, capture="norm"):
        copy = model if recipe is None else fp8jax.linen.quantize(model, recipe)
        _, state = copy.apply(variables, x, capture_intermediates=True, mutable="intermediates")
        return state["intermediates"][capture]["__call__"][0]

    np.testing.assert_allclose(*(np.asarray(found(r), np.float32) for r in (None, COAT)), rtol=2.0**-7, atol=1e-5)
    assert found(COAT).dtype == found(None).dtype
    kept = {
        name: [s for d, s in residuals(lambda p, x, m=m: m.apply(p, x), variables, x) if d == "uint8"]
        for name, m in (("linear", fp8jax.linen.quantize(model, LINEAR_ONLY)), ("lean", quantized))
    }
    # The inputs of two layers; the inputs of two norms instead.
    assert kept["linear"] == kept["lean"] == [(TOKENS, WIDTH)] * 2
    wide = [s for d, s in residuals(quantized.apply, variables, x) if s == (TOKENS, WIDTH) and d != "uint8"]
    assert not wide
    loss = lambda m: jax.grad(lambda p: jnp.sum(jnp.sin(m.apply(p, x).astype(jnp.float32))))(variables)  # noqa: E731
    assert relative(loss(quantized), loss(model)) < 0.15


def test_rules_and_explain_know_the_norms_of_linen():
    model, x = LinenBlock(), X
    rules = [fp8jax.Rule("norm", None), fp8jax.Rule(".*", COAT)]
    report = fp8jax.explain(model, rules, x)
    assert {part.path: part.context for part in report.parts} == {"norm": None, "root": COAT.context}
    kept = residuals(fp8jax.linen.quantize(model, rules).apply, model.init(jax.random.key(0), x), x)
    assert len([s for d, s in kept if d == "uint8"]) == 2
    with pytest.raises(ValueError, match="no layer is left for 'norms' to match"):
        fp8jax.explain(model, [fp8jax.Rule("norms", COAT), *rules], x)
