"""Residual bytes of `explain`, against the residuals of JAX."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp8jax
from fp8jax.rewrite import explanation
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.rules import LayerChoice
from tests.programs import residuals

WIDTH, INNER, HEADS = 64, 96, 4
X = jax.random.normal(jax.random.key(0), (2, 16, WIDTH)).astype(jnp.bfloat16)


def draw(i, *shape):
    return 0.2 * jax.random.normal(jax.random.key(i), shape)


GATES = {"gate": draw(1, WIDTH, INNER), "up": draw(2, WIDTH, INNER)}
P = {"norm": 1 + draw(0, WIDTH), **GATES, "down": draw(3, INNER, WIDTH)}


def norm(x, scale):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def mlp(p, x):
    h = norm(x, p["norm"])
    return x + (jax.nn.silu(h @ p["gate"].astype(h.dtype)) * (h @ p["up"].astype(h.dtype))) @ p["down"].astype(h.dtype)


def stacked(p, x):
    return jax.lax.scan(lambda x, p: (mlp(p, x), None), x, p)[0]


FAITHFUL = dataclasses.replace(fp8jax.recipes.coat().context, recompute_activations=False)


def kept_codes(fn, p):
    """Returns the bytes of residuals that are codes with scales, and of a norm's fp32 inverse roots."""
    actual, total = residuals(fn, p, X), 0
    for i, (dtype, shape) in enumerate(actual):
        if dtype != "uint8":
            continue
        (scale, blocks), after = actual[i + 1], actual[i + 2]
        total += math.prod(shape) + jnp.dtype(scale).itemsize * math.prod(blocks)
        total += 4 * math.prod(after[1]) if after == ("float32", (*shape[:-1], 1)) and scale == "bfloat16" else 0
    return total


RECIPES = "coat", "te_current", "moss", "deepseek", "jetfire"
# The norm recomputes by its own rule, and products with another rule save none of its result.
MIXED = [fp8jax.Rule("norm", "coat"), "te_current"]


@pytest.mark.parametrize("recipe", [*RECIPES, dataclasses.replace(fp8jax.recipes.coat(), context=FAITHFUL), MIXED])
def test_bytes_are_those_of_what_is_kept(recipe):
    fast = fp8jax.transform(mlp, recipe)
    explained = fast.explain(P, X)
    total = sum(entry.residual_bytes for entry in explained.quantized)
    assert total == kept_codes(fast, P) > 0
    # An input of two products counts for the first one.
    assert [e.residual_bytes for e in explained.quantized if e.path == "up"] == [0]
    assert f"the backward pass needs {total / 1024:.4g} KiB of saved inputs;" in str(explained)


@jax.custom_vjp
def attended(x):
    return jnp.tanh(x)


attended.defvjp(lambda x: (jnp.tanh(x),) * 2, lambda y, dy: (dy * (1 - y * y),))


@pytest.mark.parametrize("fn", [
    lambda p, x: attended(x) @ p["gate"].astype(x.dtype),  # saves its result, like attention
    lambda p, x: jax.nn.gelu(norm(x, p["norm"]) @ p["gate"].astype(x.dtype)) @ p["down"].astype(x.dtype),
])  # fmt: skip
@pytest.mark.parametrize("context", [fp8jax.recipes.coat().context, FAITHFUL])
def test_what_is_kept_in_any_case_or_made_again_has_no_bytes(fn, context):
    fast = fp8jax.transform(fn, dataclasses.replace(fp8jax.recipes.coat(), context=context))
    assert sum(entry.residual_bytes for entry in fast.explain(P, X).quantized) == kept_codes(fast, P)


def test_bytes_in_loops_count_each_turn_and_none_is_told_under_a_checkpoint():
    layers = jax.tree.map(lambda w: jnp.stack([w] * 3), P)
    one, all_of = (fp8jax.transform(fn, "coat") for fn in (mlp, stacked))
    bytes_of = lambda fast, p: [e.residual_bytes for e in fast.explain(p, X).quantized]  # noqa: E731
    assert bytes_of(all_of, layers) == [3 * n for n in bytes_of(one, P)]
    assert sum(bytes_of(all_of, layers)) == kept_codes(all_of, layers)
    twice = jax.tree.map(lambda w: jnp.stack([w] * 2), layers)
    nested = fp8jax.transform(lambda p, x: jax.lax.scan(lambda x, p: (stacked(p, x), None), x, p)[0], "coat")
    assert bytes_of(nested, twice) == [6 * n for n in bytes_of(one, P)]
    checkpointed = fp8jax.transform(jax.checkpoint(mlp), "coat").explain(P, X)
    assert {e.residual_bytes for e in checkpointed.quantized} == {None}
    assert "memory:" not in str(checkpointed)


def test_bytes_of_a_model_are_in_its_report():
    model = nnx.Sequential(nnx.Linear(WIDTH, INNER, rngs=nnx.Rngs(0)), nnx.Linear(INNER, WIDTH, rngs=nnx.Rngs(0)))
    sample = jax.ShapeDtypeStruct((32, WIDTH), jnp.bfloat16)
    count = 32 * WIDTH + 32 * INNER
    unquantized = 4 * count  # the layers compute in fp32
    note = (
        f"needs {(count + 8) / 1024:.4g} KiB of saved inputs; without the recipe at least {unquantized / 1024:.4g} KiB"
    )
    assert note in str(fp8jax.explain(model, "te_current", sample))
    adapted = fp8jax.nnx.lora(fp8jax.nnx.quantize(model, "te_current"), rank=4, alpha=8.0, rngs=nnx.Rngs(1))
    # Adapters need their inputs unquantized.
    sample = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)
    explained = " ".join(str(fp8jax.explain(adapted, sample)).split())
    assert f"needs {unquantized / 1024:.4g} KiB of saved inputs, as much" in explained


@pytest.mark.parametrize("recipe", ["coat", "te_current"])
def test_a_program_without_the_recipe_saves_at_least_what_is_said(recipe):
    explained = fp8jax.transform(mlp, recipe).explain(P, X)
    (x, h, product), itemsize = (X.size, X.size, X.size // WIDTH * INNER), X.dtype.itemsize
    arrays = [x, h, *[product] * 4] if recipe == "coat" else [h, product]
    estimate = sum(entry.unquantized_residual_bytes or 0 for entry in explained.entries)
    assert estimate == itemsize * sum(arrays)
    saved = [(dtype, shape) for dtype, shape in residuals(mlp, P, X) if shape[:-1] == X.shape[:-1]]
    assert estimate <= sum(jnp.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in saved)


def test_sentences_add_up_what_a_plan_says_of_its_parts():
    """Artificial entries: bytes, gains by number of runs, and slower layers with folded names."""
    make_entry = functools.partial(
        PlanEntry, kind="dot_general", shape=(64, 96), reason="", line="", is_product=True, rates_device="an H100"
    )
    quantized_choice = LayerChoice(fp8jax.recipes.te_current().linear, "")
    parts = [
        make_entry(
            "a", choice=quantized_choice, residual_bytes=1536, gain=1e-3, runs_per_step=3, is_rematerialized=True
        ),
        make_entry("b", choice=quantized_choice, residual_bytes=1023, gain=-2e-4, is_slower=True, tokens=512),
        make_entry("norm", choice=None, residual_bytes=1, is_product=False, rates_device=""),
        make_entry("head", choice=None, is_rematerialized=True),
    ]
    assert explanation.residual_bytes_note(parts).startswith(
        "memory: outside of jax.checkpoint, the backward pass needs"
    )
    assert explanation.residual_bytes_note(parts[1:3]).startswith("memory: the backward pass needs")
    assert explanation.residual_bytes_note(parts).endswith("needs 2.5 KiB of saved inputs")
    parts[0] = parts[0]._replace(unquantized_residual_bytes=6 * 1024)
    text = explanation.residual_bytes_note(parts)
    assert text.endswith("needs 2.5 KiB of saved inputs; without the recipe at least 6 KiB (2.4 times as much)")
    equal = parts[0]._replace(unquantized_residual_bytes=1536)
    assert explanation.residual_bytes_note([equal]).endswith(
        "needs 1.5 KiB of saved inputs, as much as without the recipe"
    )
    assert (
        explanation.residual_bytes_note([parts[0]._replace(residual_bytes=3 << 30)] * 2)
        .split("; ")[0]
        .endswith("6 GiB of saved inputs")
    )
    gained = "speed, estimated for an H100: 8 bits save about 2.8 ms per step in 2 matmuls"
    text = explanation.gains_note(parts)
    assert text.startswith(gained)
    assert text.endswith(" b gains nothing at 512 tokens: fp8jax.recipes.for_shapes(recipe) keeps them in 16 bits")
    assert explanation.gains_note(parts[:1]).startswith(gained.replace("2.8", "3").replace("2 matmuls", "1 matmul"))
    assert explanation.gains_note(parts[2:3]) == explanation.residual_bytes_note(parts[3:]) == ""
    many = [parts[1]._replace(path=f"p{name}{i}", tokens=1024) for name in "abcde" for i in range(4)] + parts[:2]
    named = " there. pa{0..3}, pb{0..3}, pc{0..3}, pd{0..3} and 2 more gain nothing at 512 or 1,024 tokens"
    assert named in explanation.gains_note(many)
    assert " there. pa0 gains nothing at 1,024 tokens" in explanation.gains_note(many[:1] * 2)
    explained = explanation.Explanation(tuple(parts))
    assert "1 of 2 matmuls are recomputed in the backward pass" in str(explained)
    names = [line.split()[0] for line in explained.details.splitlines()]
    assert names == ["path", "a", "b", "norm", "head"]
    assert "recomputed in the backward pass" not in str(explanation.Explanation(tuple(parts[1:])))
