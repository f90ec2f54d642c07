"""`Recipe.plan`: the format of each role, with bytes counted from arrays."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax.core.recipe import Comm, Context, Linear, Optimizer, Recipe, Weights

# Nothing here is stored as another thing is.
LINEAR = Linear(
    x="e4m3:token",
    w="e4m3:block32",
    dy="e5m2:group64",
    w_dgrad="e5m2:block64",
    x_wgrad="e4m3:mx32",
    dy_wgrad="e5m2:group128",
    x_residual="int10:group128",
)
RECIPE = Recipe(
    "mine",
    weights=Weights("fp32", "bf16"),
    optimizer=Optimizer("e4m3", "e5m2", 32),
    linear=LINEAR,
    context=Context("e5m2:group8", recompute_activations=True),
    comm=Comm("e5m2:group16"),
)
PLAN = [
    ("master weight", "fp32", "fp32", 4),
    ("working weight", "bf16", "bf16", 2),
    ("gradient", "fp32", "bf16", 4),
    # Scales of four bytes and exponents of two.
    ("first moment", "e4m3:group32+expand", "fp32", 1 + 6 / 32),
    ("second moment", "e5m2:group32+expand", "fp32", 1 + 6 / 32),
    ("forward x", "e4m3:token", "e4m3", 1),
    ("forward w", "e4m3:block32", "e4m3", 1 + 4 / 32**2),
    ("dgrad dy", "e5m2:group64", "e5m2", 1 + 4 / 64),
    ("dgrad w", "e5m2:block64", "e5m2", 1 + 4 / 64**2),
    ("wgrad x", "e4m3:token", "e4m3", 1),  # folded, from e4m3:mx32
    ("wgrad dy", "e5m2:group128", "e5m2", 1 + 4 / 128),
    ("saved linear input", "int10:group128", "-", 1.25 + 4 / 128),
    ("saved non-linear input", "e5m2:group8", "bf16", 1 + 2 / 8),
    ("gradient between devices", "e5m2:group16", "fp32", 1 + 4 / 16),
    ("linear input from a norm or activation", "recomputed", "bf16", 0),
]


def test_a_plan_names_every_role_with_what_it_is_stored_and_computed_in():
    actual = RECIPE.plan()
    assert [row[:3] for row in actual] == [row[:3] for row in PLAN]
    assert [row[3] for row in actual] == pytest.approx([row[3] for row in PLAN], rel=1e-6)
    lines = [line.split("  ") for line in RECIPE.explain().splitlines()]
    assert lines[0] == ["recipe mine, current scaling"]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines[1:]]
    assert cells[0] == ["role", "stored in", "computed in", "bytes/element"]
    assert cells[1:-1] == [[*row[:3], f"{row[3]:.4g}"] for row in PLAN]
    assert cells[-1][0].startswith(
        "microscales are folded into row scales: operands with spec e4m3:mx32 are multiplied"
    )


def test_a_faithful_plan_computes_nothing_again_and_what_is_not_quantized_has_the_working_copys_format():
    faithful = Recipe("mine", weights=Weights("bf16", "bf16"), context=Context("e4m3:mx32"), linear=Linear())
    plan = {role: rest for role, *rest in faithful.plan()}
    assert "linear input from a norm or activation" not in plan
    assert plan["saved non-linear input"] == ["e4m3:mx32", "bf16", pytest.approx(1 + 1 / 32, rel=1e-5)]
    for role in ("forward x", "dgrad w", "wgrad dy"):
        assert plan[role] == ["bf16", "bf16", 2]
    assert plan["saved linear input"] == ["bf16", "-", 2]
    assert plan["master weight"] == ["bf16", "fp32", 2]
    wide = {role: rest for role, *rest in Recipe("wide", weights=Weights("fp32", "fp32")).plan()}
    assert (wide["working weight"], wide["gradient"], wide["forward x"]) == (["fp32", "fp32", 4],) * 3
    assert "scaling" not in faithful.explain()
    for name in ("two_stage", "delayed"):
        assert f", {name} scaling" in Recipe("mine", linear=Linear("e4m3", "e4m3", "e5m2", scaling=name)).explain()


def test_blocks_that_fall_back_count_twice_forward_alone():
    part = fp8jax.recipes.int8_fallback().linear
    plan = {role: (storage, size) for role, storage, _, size in Recipe("mine", linear=part).plan()}
    one = 1 + 4 / 128**2
    assert plan["forward x"] == ("int8:block128, 10 to 30 % twice", pytest.approx(1.3 * one))
    for role in ("forward w", "wgrad x", "saved linear input"):
        assert plan[role][1] == pytest.approx(one)


@pytest.mark.parametrize(
    "text",
    ["e4m3", "int8:token", "e5m2:group16", "e4m3:group128+expand", "int8:block32", "int10:group128", "int10:token",
     "e4m3:mx32", "e4m3:mx16+token", "e4m3:mx32+ocp", "e2m1:nv16", "e2m1:nvblock16", "de8:group64+expand"],
)  # fmt: skip
@pytest.mark.parametrize("scale_format", ["fp32", "bf16"])
def test_bytes_an_element_are_those_of_a_large_array(text, scale_format):
    spec = fp8jax.QuantSpec.parse(text)
    fields = {name: getattr(spec, name) for name in ("format", "granularity", "group_size", "expand", "outer_scale")}
    spec = fp8jax.QuantSpec(**fields, scale_format=scale_format)
    # So long that scales of rows and of the tensor are negligible.
    size = 2**15
    codes = {"int10": 1.25, "e2m1": 0.5}.get(spec.format, 1)
    length = spec.group_size or size
    scales = {"group": 1 / length, "block": 1 / length**2}.get(spec.granularity, 0.0)
    each = {"fp32": 4, "bf16": 2}[scale_format] + 2 * spec.expand
    micro = {"mx": 1 / length, "nv": 1 / length, "nvblock": 1 / length**2}.get(spec.granularity, 0)
    expected = codes + scales * each + micro
    assert spec.bytes_per_element == pytest.approx(expected, rel=5e-4)
    # `quantize` returns as many bytes.
    q = jax.eval_shape(lambda x: fp8jax.quantize(x, spec), jnp.ones((64, 256)))
    assert q.nbytes == spec.nbytes((64, 256))
    assert q.nbytes >= expected * 64 * 256 * (1 - 5e-4)


def test_every_operand_of_a_product_is_the_field_of_its_name():
    fields = ("x", "w", "dy", "w_dgrad", "x_wgrad", "dy_wgrad")
    specs = {name: fp8jax.QuantSpec.parse(getattr(LINEAR, name)) for name in fields}
    assert LINEAR.products() == {
        "forward": (specs["x"], specs["w"]),
        "dgrad": (specs["dy"], specs["w_dgrad"]),
        "wgrad": (specs["x_wgrad"], specs["dy_wgrad"]),
    }
    same = Linear("e4m3:block16", "e4m3:block32", "e5m2")
    for name, source in (("w_dgrad", "w"), ("dy_wgrad", "dy"), ("x_wgrad", "x"), ("x_residual", "x")):
        assert same.spec(name) == fp8jax.QuantSpec.parse(getattr(same, source))
    other = Linear("e4m3:token", "e4m3", "e5m2", x_residual="e4m3:block16")
    assert other.spec("x_wgrad") == other.spec("x_residual") == fp8jax.QuantSpec.parse("e4m3:block16")
    for name, noisy in itertools.product(("dy", "dy_wgrad", "x_residual"), (False, True)):
        settings = {"dy": "e5m2", "dy_wgrad": "e5m2", "x_residual": "e4m3"}
        settings[name] += "+stochastic" * noisy
        assert Linear("e4m3", "e4m3", **settings, x_wgrad="e4m3").is_stochastic == noisy


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (120, "coat"),
        (100, "mxfp8"),
        (90, "fast"),
        (89, "coat"),
        (86, "int8_fallback"),
        (80, "coat_optimizer"),
        (75, "coat_optimizer"),
    ],
)
def test_auto_goes_by_the_device_and_says_what_runs_in_8_bits(capability, name):
    assert fp8jax.recipes.for_device(capability) == fp8jax.recipes.get(name)
    linear = fp8jax.recipes.for_device(capability).linear
    assert ("FP8" in fp8jax.recipes.device(capability).description) == (capability >= 80)
    assert linear.is_quantized == (capability >= 86)
    assert fp8jax.recipes.resolve("auto") == fp8jax.recipes.for_shapes(fp8jax.recipes.for_device(0))
    with pytest.raises(ValueError, match="-1"):
        fp8jax.recipes.for_device(-1)
