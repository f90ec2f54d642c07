"""The operands that a recipe describes are those that are multiplied and saved; folded and exact MOSS scales."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.dispatch import choice
from fp8jax.ops.products import product
from fp8jax.recipes import NAMES

X, W = jax.random.normal(jax.random.key(0), (64, 96)), jax.random.normal(jax.random.key(1), (96, 160))
KEY, EXACT = jax.random.key(2), "e4m3:mx32+token+exact"
LINEAR = {name: fp8jax.recipes.get(name).linear for name in NAMES}
# Under a scaling that observes operands these are the same codes; blocks that fall back have no spec of their own.
STATELESS = [
    n
    for n, part in LINEAR.items()
    if part.is_quantized and not any(p.collects_stats for p in part.stateful_strategies.values())
]


def multiplied(part, monkeypatch):
    """Returns the specs of the operands of the three matmuls, and the spec of the saved codes."""
    results, whole = [], product.matmul

    def spec(x):
        return x.spec if isinstance(x, QTensor) else None

    def matmul(a, b, **kwargs):
        results.append((spec(a), spec(b)))
        return whole(a, b, **kwargs)

    monkeypatch.setattr(product, "matmul", matmul)
    with choice.record_residuals() as saved:
        jax.make_jaxpr(jax.grad(lambda *a: jnp.sum(fp8jax.linear(*a, recipe=part, key=KEY)), (0, 1)))(X, W)
    saved_specs = [text.rpartition("codes, ")[2] if "codes, " in text else None for text in saved]
    return dict(zip(("forward", "dgrad", "wgrad"), results, strict=True)), saved_specs


@pytest.mark.parametrize("name", STATELESS)
def test_what_a_recipe_says_of_its_products_is_what_they_multiply_and_keep(name, monkeypatch):
    """Regression: the plans of moss and fast listed microscaled codes, which no matmul reads."""
    part = LINEAR[name]
    actual, saved_specs = multiplied(part, monkeypatch)
    plan = {role: stored for role, stored, *_ in fp8jax.recipes.get(name).plan()}
    assert saved_specs == [part.residual_spec() and str(part.residual_spec())]
    assert plan["saved linear input"] == (saved_specs[0] or "bf16")
    for role, operands in actual.items():
        names = {"forward": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}[role]
        for operand, spec in zip(names, operands, strict=True):
            assert plan[f"{role} {operand}"] == (str(spec) if spec else "bf16"), (role, operand)


@pytest.mark.parametrize("name", ["moss", "fast"])
def test_what_is_folded_is_said(name):
    text = fp8jax.recipes.get(name).explain()
    assert "microscales are folded into row scales: operands with spec e4m3:mx32+token are multiplied and saved" in text
    assert "mx32" not in text.partition("microscales are folded")[0]
    assert "folded" not in fp8jax.recipes.moss_mx().explain()


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_explain_of_a_model_says_what_is_folded(framework):
    layer = nnx.Linear(96, 160, rngs=nnx.Rngs(0)) if framework == "nnx" else nn.Dense(160)
    report = fp8jax.explain(layer, fp8jax.Rule("", "fast"), X)
    (actual,) = report.quantized_layers
    assert actual.products == {
        "forward": "e4m3:token x e4m3:tensor",
        "dgrad": "e4m3:token x e4m3:tensor",
        "wgrad": "e4m3:tensor x e4m3:tensor",
    }
    assert actual.residual.startswith("e4m3:token, 1")
    assert str(report).count("microscales are folded into row scales") == 1
    assert "folded" not in str(fp8jax.explain(layer, fp8jax.Rule("", "moss_mx"), X))


def test_exact_products_apply_each_power_of_two():
    """Two groups of a row; one is 2^-22 of the other. Folded, its codes are zeros."""
    x = jnp.concatenate([X[:, :32], 2.0**-22 * X[:, 32:64]], axis=1)
    w = W[:64].at[:32].set(0)  # the product reads only the small group
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)

    def error(recipe):
        y = np.asarray(fp8jax.linear(x, w, recipe=recipe), np.float64)
        return np.linalg.norm(y - expected) / np.linalg.norm(expected)

    # Two operands of three mantissa bits: 2^-4 / sqrt(3) each at most.
    assert error("moss_mx") < 2**0.5 * 2**-4 / 3**0.5 * 1.2
    assert error("fast") == 1


def test_the_gradients_of_moss_mx_are_near():
    dy = jax.random.normal(KEY, (64, 160))
    y, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe="moss_mx"), X, W)
    x, w, g = (np.asarray(a, np.float64) for a in (X, W, dy))
    # The input of the weight's gradient is rounded twice.
    for actual, expected, roundings in zip((y, *vjp_fn(dy)), (x @ w, g @ w.T, x.T @ g), (2, 2, 3), strict=True):
        error = np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)
        assert 0.02 < error < roundings**0.5 * 2**-4 / 3**0.5 * 1.2


def test_the_products_of_moss_mx_take_the_kernel_that_folds_nothing():
    with choice.target(capability=90), choice.record_choices() as choices:
        jax.make_jaxpr(jax.grad(lambda *a: jnp.sum(fp8jax.linear(*a, recipe="moss_mx")), (0, 1)))(X, W)
    actual = [(name, c.impl) for name, c in choices if name in ("matmul", "fold_microscales", "fold")]
    assert actual == [("matmul", "mosaic")] * 3
    assert all("microscaled groups of 32" in c.reason for name, c in choices if name == "matmul")


def test_exact_is_of_microscaled_codes_with_a_level_1():
    assert str(fp8jax.QuantSpec.parse(EXACT)) == EXACT
    assert not fp8jax.QuantSpec.parse(EXACT).is_folded
    for wrong in ("e4m3:group128+exact", "e4m3+exact", "e4m3:mx32+ocp+exact"):
        with pytest.raises(
            ValueError, match="fold_scales=False, option 'exact', requires granularity 'mx' with an outer scale"
        ):
            fp8jax.QuantSpec.parse(wrong)
