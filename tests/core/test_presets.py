"""Presets against the papers that they are named after: formats, granularities, rounding, scalings and rates.

Each row is a statement of a paper, copied from its text and not from our code. If a preset differs from its paper, the
row says "ours" and why. The preset's docstring or RESULTS says the same.
"""

import dataclasses

import pytest

import fp8jax
from fp8jax.core.recipe import Recipe

COAT, MOSS = "arXiv 2410.19313", "MOSS (Zhang et al., 2025)"
INT8, FP8LM = "arXiv 2503.08040", "arXiv 2310.18313"
OURS = "ours"
OPERANDS = ("x", "w", "dy", "w_dgrad", "x_wgrad", "dy_wgrad", "x_residual")
SIXTEEN_BITS = None


def e4m3(kind="tensor", size=None, rounding="nearest"):
    return "e4m3", kind, size, rounding


def e5m2(kind="tensor"):
    return "e5m2", kind, None, "nearest"


def int8(kind, size=None, rounding="nearest"):
    return "int8", kind, size, rounding


def all_of(forward, backward):
    """The operands of a layer that quantizes input, weight and gradient once each."""
    return dict.fromkeys(("x", "w", "w_dgrad", "x_wgrad", "x_residual"), forward) | dict.fromkeys(
        ("dy", "dy_wgrad"), backward
    )


_COAT_LINEAR = all_of(e4m3(), e5m2())
_COAT_SAYS = f"{COAT}, section 5.2: one scale a tensor; gradients {OURS}: bf16 in its G.5, e5m2 in its code"
_MX = e4m3("mx", 32)
_MOSS_LINEAR = all_of(_MX, _MX) | {"w": e4m3(), "w_dgrad": e4m3()}
_MOSS_SAYS = f"{MOSS}, section 3.1, k2 = 32, weights one scale a tensor; gradients {OURS}: it says nothing"
_GROUP, _BLOCK = e4m3("group", 128), e4m3("block", 128)
_INT8, _INT8_SR = int8("block", 128), int8("block", 128, "stochastic")
_INT8_LINEAR = all_of(_INT8, _INT8_SR) | {"x_residual": _INT8_SR, "x_wgrad": _INT8_SR}
_TE = all_of(e4m3(), e5m2())
_ROW = int8("token")
_MXFP8 = e4m3("mx", 32)
_NV, _NV_SR, _NV_BLOCK = (
    ("e2m1", kind, 16, rounding) for kind, rounding in (("nv", "nearest"), ("nv", "stochastic"), ("nvblock", "nearest"))
)
_MXFP8_PAPER, _NVFP4_PAPER = "arXiv 2506.08027", "arXiv 2509.25149"
# Formats of products and residuals, one entry per operand.
LINEAR = {
    "bf16": (all_of(SIXTEEN_BITS, SIXTEEN_BITS), "the baseline"),
    "coat_optimizer": (all_of(SIXTEEN_BITS, SIXTEEN_BITS), f"{COAT}, Table 13"),
    "coat": (_COAT_LINEAR, _COAT_SAYS),
    "coat_fast": (_COAT_LINEAR, f"{OURS}: coat with scales from bounds"),
    "coat_activations": (_COAT_LINEAR, f"{COAT}, Table 13"),
    "moss": (_MOSS_LINEAR, _MOSS_SAYS),
    "moss_mx": (_MOSS_LINEAR | {"x_wgrad": e4m3("token")}, f"{_MOSS_SAYS}; x_wgrad {OURS}: scales do not transpose"),
    "fast": (_MOSS_LINEAR, f"{OURS}: MOSS's layers with COAT's contexts and optimizer"),
    "te_current": (_TE, "Transformer Engine: HYBRID, e4m3 forward and e5m2 backward, one scale a tensor"),
    "te_delayed": (_TE, "Transformer Engine: HYBRID, e4m3 forward and e5m2 backward, one scale a tensor"),
    "deepseek": (
        all_of(_GROUP, _GROUP) | {"w": _BLOCK, "w_dgrad": _BLOCK},
        "arXiv 2412.19437, section 3.3.2: 1x128 for activations and gradients, 128x128 for weights, e4m3 everywhere",
    ),
    "mxfp8": (
        all_of(_MXFP8, _MXFP8) | {"x_residual": None},
        f"{_MXFP8_PAPER}, section 3.2: e4m3 for all tensors; 16-bit inputs are kept, {OURS}",
    ),
    "nvfp4": (
        {"x": _NV, "w": _NV_BLOCK, "dy": _NV_SR, "w_dgrad": _NV_BLOCK, "x_wgrad": _NV, "dy_wgrad": _NV_SR,
         "x_residual": None},
        f"{_NVFP4_PAPER}, section 4: 16x16 for weights, 1x16 else, gradients stochastic; keeps 16-bit inputs, {OURS}",
    ),
    "switchback": (
        {"x": _ROW, "w": int8("tensor"), "w_dgrad": int8("tensor"), "dy": _ROW, "x_wgrad": None, "dy_wgrad": None,
         "x_residual": None},
        "arXiv 2304.13013, algorithm 1: rows for inputs and gradients, a tensor for weights, 16 bits for the third",
    ),
    "jetfire": (
        all_of(int8("block", 32), int8("block", 32, "stochastic")),
        f"arXiv 2403.12422, and {INT8}, section 3: blocks of 32x32, gradients stochastic",
    ),
    "int8_block": (_INT8_LINEAR, f"{INT8}, sections 4.2 and 5.1: 128x128, dY and what is kept of X stochastic"),
    "int8_fallback": (_INT8_LINEAR, f"{INT8}, sections 4.2 and 5.1: 128x128, dY and what is kept of X stochastic"),
    "fp8_lm": (_TE, f"{FP8LM}, section 2.3 and appendix A: one scale a tensor, e4m3 forward, e5m2 backward"),
    "fp8_lm_two_phase": (_TE, f"{FP8LM}, as fp8_lm"),
}  # fmt: skip
# Other settings by their path in the recipe, with their source.
SETTINGS = {
    "coat_optimizer": {
        ("optimizer.mu", "e4m3"): f"{COAT}, Table 1", ("optimizer.nu", "e4m3"): f"{COAT}, Table 1",
        ("optimizer.group_size", 128): f"{COAT}, section 6.1", ("optimizer.expand", True): f"{COAT}, 4.2; range {OURS}",
    },
    "coat": {
        ("optimizer.mu", "e4m3"): f"{COAT}, Table 1", ("optimizer.nu", "e4m3"): f"{COAT}, Table 1",
        ("optimizer.group_size", 128): f"{COAT}, section 6.1", ("optimizer.expand", True): f"{COAT}, 4.2; range {OURS}",
        ("linear.scaling", "two_stage"): f"{COAT}, 5.2, Group Scaling",
        ("context.residual", "e4m3:group16"): f"{COAT}, 6.1 and appendix H",
        ("context.recompute_activations", True): f"{OURS}: the paper keeps more",
    },
    "coat_fast": {
        ("optimizer.mu", "e4m3"): f"{COAT}, Table 1", ("optimizer.nu", "e4m3"): f"{COAT}, Table 1",
        ("optimizer.group_size", 128): f"{COAT}, section 6.1", ("optimizer.expand", True): f"{COAT}, 4.2; range {OURS}",
        ("linear.scaling", "two_stage"): f"{COAT}, 5.2, Group Scaling",
        ("context.residual", "e4m3:group16"): f"{COAT}, 6.1 and appendix H",
        ("context.recompute_activations", True): OURS, ("context.amax", "bound"): OURS,
    },
    "coat_activations": {
        ("linear.scaling", "two_stage"): f"{COAT}, 5.2, Group Scaling",
        ("context.residual", "e4m3:group16"): f"{COAT}, 6.1 and appendix H",
        ("context.recompute_activations", True): OURS,
    },
    "moss": {
        ("linear.w_scaling", "automatic"): f"{MOSS}, section 3.2",
        ("linear.fast_accumulation", ("forward", "dgrad")): OURS,
    },
    "moss_mx": {},
    "fast": {
        ("optimizer.mu", "e4m3"): f"{COAT}, Table 1", ("optimizer.nu", "e4m3"): f"{COAT}, Table 1",
        ("optimizer.group_size", 128): f"{COAT}, section 6.1", ("optimizer.expand", True): f"{COAT}, 4.2; range {OURS}",
        ("linear.fast_accumulation", ("forward", "dgrad")): OURS,
        ("context.residual", "e4m3:group16"): f"{COAT}, 6.1 and appendix H",
        ("context.recompute_activations", True): OURS,
    },
    "te_delayed": {("linear.scaling", "delayed"): "Transformer Engine, DelayedScaling"},
    "nvfp4": {("linear.rotation", 16): f"{_NVFP4_PAPER}, section 4.2: 16x16 in the weight's gradient"},
    "int8_fallback": {
        ("linear.scaling", "threshold"): f"{INT8}, section 4.4 and appendix D",
        ("context.residual", "int10:group128"): f"{INT8}, section 5.2",
    },
    "fp8_lm": {
        ("weights.master", "fp16"): f"{FP8LM}, section 2.2, equation 8",
        ("optimizer.mu", "e4m3"): f"{FP8LM}, section 2.2", ("optimizer.nu", "fp16"): f"{FP8LM}, section 2.2",
        ("comm.gradients", "e4m3"): f"{FP8LM}, section 2.1", ("comm.form", "one_phase"): f"{FP8LM}, equations 4 to 6",
        ("comm.auto_scale", True): f"{FP8LM}, equation 3",
    },
    "fp8_lm_two_phase": {
        ("weights.master", "fp16"): f"{FP8LM}, section 2.2, equation 8",
        ("optimizer.mu", "e4m3"): f"{FP8LM}, section 2.2", ("optimizer.nu", "fp16"): f"{FP8LM}, section 2.2",
        ("comm.gradients", "e4m3"): f"{FP8LM}, section 2.1",
    },
}  # fmt: skip
# No other part of the recipe has 8 bits.
UNSAID = {
    "weights.master": "fp32", "weights.compute": "bf16",
    "optimizer.mu": "fp32", "optimizer.nu": "fp32", "optimizer.group_size": None, "optimizer.expand": False,
    "optimizer.nu_rounding": "auto", "linear.scaling": "current", "linear.w_scaling": None,
    "linear.rotation": None, "linear.skip_unprofitable": False, "linear.fast_accumulation": ("forward",),
    "context.residual": None,
    "context.recompute_activations": False, "context.amax": "exact",
    "comm.gradients": None, "comm.form": "two_phase", "comm.auto_scale": False,
}  # fmt: skip
# Rates that scalings read, the same in all presets.
RATES = {
    ("amax_history_length", 1024): "Transformer Engine, DelayedScaling's amax_history_len",
    ("margin", 0): "Transformer Engine, DelayedScaling's margin",
    ("weight_amax_interval", 500): f"{MOSS}, Table 9 and appendix D: the default of 500 steps",
    ("fallback_fraction_range", (0.1, 0.3)): f"{INT8}, section 6",
    ("threshold_update_factor", 1.3): f"{INT8}, section 6: alpha",
}


def settings(recipe: Recipe) -> dict:
    """Returns all fields of a recipe by path, except operands and rates of its linear layers."""
    results = {}
    for part in ("weights", "optimizer", "linear", "context", "comm"):
        for field in dataclasses.fields(getattr(recipe, part)):
            if part != "linear" or field.name not in (*OPERANDS, *(name for name, _ in RATES)):
                results[f"{part}.{field.name}"] = getattr(getattr(recipe, part), field.name)
    return results


def test_every_preset_has_its_paper():
    assert set(LINEAR) == set(fp8jax.recipes.NAMES)
    assert set(SETTINGS) <= set(fp8jax.recipes.NAMES)


@pytest.mark.parametrize("name", LINEAR)
def test_operands_are_those_of_the_paper(name):
    expected, source = LINEAR[name]
    linear = fp8jax.recipes.get(name).linear
    for operand in OPERANDS:
        spec = linear.spec(operand)
        actual = spec and (spec.format, spec.granularity, spec.group_size, spec.rounding)
        assert actual == expected[operand], f"{operand} of {name}: {source}"
        assert spec is None or (not spec.expand and spec.scale_format == "fp32" and spec.axis == -1)
        if spec is not None and spec.granularity == "mx":
            assert spec.fold_scales == (name != "moss_mx"), "folded into rows, but in moss_mx"
            outer, rounding = ("none", "up") if name == "mxfp8" else ("token", "down")
            assert spec.outer_scale == outer, f"{MOSS}, Figure 2: k1 of about 10,000 elements, here a row; MX has none"
            assert spec.exponent_rounding == rounding, f"{_MXFP8_PAPER}, section 3.1: rounded up"


def test_blocks_in_16_bits_are_the_first_and_the_last_of_nvfp4():
    counts = {name: fp8jax.recipes.get(name).unquantized_blocks for name in LINEAR}
    # arXiv 2509.25149, section 4.1: the first two and the last eight of 62 blocks; ours one of each.
    assert {name for name, blocks in counts.items() if blocks != (0, 0)} == {"nvfp4"}
    assert counts["nvfp4"] == (1, 1)


def test_gradients_of_heads_that_reach_weights_have_the_wider_range_and_sums_all_bits():
    head = fp8jax.recipes.HEAD
    assert [operand for operand in OPERANDS if head.spec(operand).format == "e5m2"] == ["dy_wgrad"]
    assert head.fast_accumulation == ()


@pytest.mark.parametrize("name", LINEAR)
def test_settings_are_those_of_the_paper(name):
    actual = settings(fp8jax.recipes.get(name))
    expected = {path: (value, source) for (path, value), source in SETTINGS.get(name, {}).items()}
    assert expected.keys() <= actual.keys()
    assert actual.keys() == UNSAID.keys(), "a new field needs a row"
    for path, value in actual.items():
        reference, source = expected.get(path, (UNSAID[path], "no paper asks for it"))
        assert value == reference, f"{path} of {name}: {source}"


@pytest.mark.parametrize("name", LINEAR)
def test_rates_are_those_of_the_papers(name):
    linear = fp8jax.recipes.get(name).linear
    for (field, value), source in RATES.items():
        assert getattr(linear, field) == value, source
