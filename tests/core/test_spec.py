"""Specs and recipes: string forms, and every wrong or contradictory setting an error at construction."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax.core.recipe import Context, Linear, Optimizer, Recipe, Weights


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("e4m3", fp8jax.QuantSpec()),
        ("e5m2:tensor", fp8jax.QuantSpec("e5m2")),
        ("e4m3:group128+expand", fp8jax.QuantSpec("e4m3", "group", 128, expand=True)),
        ("e4m3:group16+stochastic", fp8jax.QuantSpec("e4m3", "group", 16, rounding="stochastic")),
        ("e4m3:group16+stochastic+expand", fp8jax.QuantSpec("e4m3", "group", 16, rounding="stochastic", expand=True)),
    ],
)
def test_string_forms_name_specs_and_specs_name_themselves(text, spec):
    assert fp8jax.QuantSpec.parse(text) == spec
    assert fp8jax.QuantSpec.parse(str(spec)) == spec
    assert fp8jax.QuantSpec.parse(spec) is spec


@pytest.mark.parametrize(
    "text", ["", "e4m3:", "e4m3:group128:expand", "e4m3+shrink", "e4m3+expand+expand", "e4m3 group128", "E4M3"]
)
def test_malformed_strings_are_refused_with_the_form(text):
    with pytest.raises(ValueError, match="format\\[:granularity"):
        fp8jax.QuantSpec.parse(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "e3m4"}, "unknown number format 'e3m4'; use one of e4m3"),
        ({"format": "fp32"}, "'fp32' is stored by a cast"),
        ({"granularity": "groups"}, "unknown granularity 'groups'"),
        ({"format": "e4m3:group128"}, r"is a full spec, not a format; use QuantSpec.parse\('e4m3:group128'\)"),
        ({"granularity": "group"}, "positive group_size, not None"),
        ({"granularity": "group", "group_size": 0}, "positive group_size, not 0"),
        ({"granularity": "group", "group_size": -128}, "positive group_size, not -128"),
        ({"group_size": 128}, "group_size=128 contradicts granularity 'tensor'"),
        ({"scale_format": "e4m3"}, "unknown scale_format 'e4m3'"),
        ({"rounding": "up"}, "unknown rounding 'up'"),
        ({"flush_to_zero": "smallest"}, "flush_to_zero must be True or False, got 'smallest'"),
        ({"fold_scales": None}, "fold_scales must be True or False, got None"),
        ({"layer_axes": -1}, "layer_axes must be a number of leading axes, got -1"),
    ],
)
def test_wrong_spec_fields_name_value_and_fix(settings, message):
    with pytest.raises(ValueError, match=message):
        fp8jax.QuantSpec(**settings)


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="grain"):
        fp8jax.QuantSpec(grain="tensor")
    with pytest.raises(TypeError, match="linaer"):
        dataclasses.replace(fp8jax.recipes.bf16(), linaer=None)


def test_specs_and_recipes_are_hashable_frozen_and_pickle():
    spec, recipe = fp8jax.QuantSpec.parse("e4m3:group128+expand"), fp8jax.recipes.coat_optimizer()
    assert len({spec, pickle.loads(pickle.dumps(spec))}) == 1
    assert len({recipe, pickle.loads(pickle.dumps(recipe))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.format = "e5m2"


@pytest.mark.parametrize("shape", [(4, 300), (2, 3, 128), (5, 7)], ids=str)
@pytest.mark.parametrize(
    "text",
    [
        "e4m3",
        "e4m3:group128",
        "e5m2:group32+expand",
        "int10:group32",
        "int8:block32",
        "e4m3:mx32",
        "e2m1:nv16",
        "e2m1:nvblock16",
    ],
)
def test_bytes_are_those_of_the_arrays(shape, text):
    q = fp8jax.quantize(jnp.ones(shape), text)
    assert q.spec.nbytes(shape) == q.nbytes == sum(x.nbytes for x in jax.tree.leaves(q))


def test_moments_of_the_coat_recipe_take_at_most_2_10_bytes():
    plan = {role: size for role, _, _, size in fp8jax.recipes.coat_optimizer().plan()}
    assert plan["first moment"] + plan["second moment"] == 2 * (1 + 6 / 128) <= 2.10
    plan = {role: size for role, _, _, size in fp8jax.recipes.bf16().plan()}
    assert plan["first moment"] + plan["second moment"] == 8


def test_explain_says_what_every_role_is_stored_in():
    text = fp8jax.recipes.coat_optimizer().explain()
    assert "recipe coat_optimizer" in text
    for role in ("master weight", "working weight", "gradient", "first moment", "second moment"):
        assert any(line.startswith(role) for line in text.splitlines())
    assert "e4m3:group128+expand" in text


@pytest.mark.parametrize("name", fp8jax.recipes.NAMES)
def test_presets_are_known_by_their_names(name):
    assert fp8jax.recipes.get(name).name == name
    assert getattr(fp8jax.recipes, name)() == fp8jax.recipes.get(name)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: fp8jax.recipes.get("coats"),
            "unknown recipe 'coats'; use one of bf16, fast, moss, moss_mx, coat, coat_fast, coat_optimizer, ",
        ),
        (lambda: Weights(master="fp8"), "weights.master 'fp8' is not one of fp32, bf16, "),
        (lambda: Weights(master="bf16", compute="fp32"), "weights.compute 'fp32' is wider than the master"),
        (lambda: Optimizer(mu="e3m4"), "unknown number format 'e3m4'"),
        (lambda: Optimizer(group_size=0), "optimizer.group_size must be a positive integer, not 0"),
        (lambda: Optimizer(group_size=None), "set optimizer.group_size, or expand=False"),
        (lambda: Optimizer(mu="fp32", nu="fp32"), "group_size=128, expand=True require 8-bit moments"),
        (lambda: Optimizer(mu="fp32", nu="bf16", group_size=None), "expand=True require 8-bit moments"),
        (
            lambda: Linear("e4m3", "e4m3+stochastic", "e5m2"),
            "stochastic rounding is supported only for gradients and residuals",
        ),
        (
            lambda: Linear(fast_accumulation=("backward",)),
            r"fast_accumulation contains unknown products: \['backward'\]",
        ),
        (lambda: Context("e4m3:group16", "lean"), "context.recompute_activations must be True or False, got 'lean'"),
        (
            lambda: Context(recompute_activations=True),
            "context.recompute_activations=True needs a format; set context.residual",
        ),
        (lambda: Context("fp8:group16"), "unknown number format 'fp8'"),
        (lambda: Context("e4m3:channel"), "context.residual 'e4m3:channel' must have scales along the channels"),
        (lambda: Context("e4m3:group16+stochastic"), "would need a PRNG key in every layer"),
    ],
)
def test_recipes_that_are_wrong_or_contradict_themselves_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_part_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match="optimizer must be of type Optimizer, not 'coat'"):
        Recipe("mine", optimizer="coat")


def test_parts_mix():
    mixed = dataclasses.replace(fp8jax.recipes.bf16(), name="mixed", optimizer=Optimizer(mu="e4m3", nu="bf16"))
    assert mixed.optimizer.spec("mu") == fp8jax.QuantSpec.parse("e4m3:group128+expand")
    assert mixed.optimizer.spec("nu") is None


def test_the_plan_of_coat_names_what_contexts_keep_and_what_is_computed_again():
    plan = {role: (stored, size) for role, stored, _, size in fp8jax.recipes.coat().plan()}
    # Table 10 of the paper: scales of 16 bits add 12.5 % to groups of 16.
    assert plan["saved non-linear input"] == ("e4m3:group16", 1.125)
    assert plan["linear input from a norm or activation"] == ("recomputed", 0)
    faithful = dataclasses.replace(fp8jax.recipes.coat(), context=Context("e4m3:group16"))
    assert "recomputed" not in faithful.explain()
    assert {role: size for role, *_, size in fp8jax.recipes.bf16().plan()}["saved non-linear input"] == 2
