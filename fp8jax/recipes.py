"""Presets: each published system as a combination of the parts of a `Recipe`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fp8jax.core.recipe import Comm as Comm
from fp8jax.core.recipe import Context as Context
from fp8jax.core.recipe import Linear as Linear
from fp8jax.core.recipe import Optimizer as Optimizer
from fp8jax.core.recipe import Recipe as Recipe
from fp8jax.core.recipe import Weights as Weights

_FP32_MOMENTS = Optimizer(mu="fp32", nu="fp32", group_size=None, expand=False)
_COAT_LINEAR = Linear("e4m3", "e4m3", "e5m2", scaling="two_stage")
_COAT_CONTEXT = Context("e4m3:group16", recompute_activations=True)
_HEAD_16 = Linear()
_MOSS_LINEAR = Linear(
    "e4m3:mx32+token", "e4m3", "e4m3:mx32+token", fast_accumulation=("forward", "dgrad")
)  # fmt: skip

# Output head (`Recipe.head`). Cotangents of a softmax loss are at most 1. Those of rare tokens are all small, so wgrad
# uses the range of e5m2. With dy in e4m3 the gradient of the head's input has 1.5 % error, not 2.6 % as in e5m2.
# Quantized x and w move logits and raise it to 4.2 % (1,024 tokens, 32,000 entries). Hopper's fast accumulation adds
# 0.3 % error to each logit and is no faster.
HEAD = Linear("e4m3", "e4m3", "e4m3", dy_wgrad="e5m2", fast_accumulation=())


def bf16() -> Recipe:
    """bf16 computation with fp32 master weights and moments: the baseline."""
    return Recipe("bf16", optimizer=_FP32_MOMENTS)


def coat_optimizer() -> Recipe:
    """COAT's optimizer states alone (its Table 13): e4m3 moments, groups of 128, dynamic range expansion."""
    return Recipe("coat_optimizer", optimizer=Optimizer())


def coat(head: Linear = _HEAD_16) -> Recipe:
    """COAT: 8-bit optimizer states and activations. Only activations that are expensive to recompute are saved.

    `Context("e4m3:group16")` saves what the paper saves. Gradients in products are e5m2, as in COAT's code.
    `Linear(dy=None, w_dgrad=None, x_wgrad=None, dy_wgrad=None, ...)` leaves them in bf16, as in its section G.5.

    Args:
        head: as in `coat_fast`.
    """
    return Recipe("coat", optimizer=Optimizer(), linear=_COAT_LINEAR, context=_COAT_CONTEXT, head=head)


def coat_fast(head: Linear = _HEAD_16) -> Recipe:
    """COAT with fewer passes over memory: scales of norms' and activations' results come from bounds.

    Nothing finite exceeds a bound (`Context.amax`). Gradients accumulate with all bits, as in `coat`, because fast
    accumulation of wgrad over all tokens costs accuracy (docs/recipes/coat_fast.md).

    Args:
        head: operands of the products of output heads, which stay in 16 bits by default. `HEAD` is faster and less
            exact.
    """
    context = dataclasses.replace(_COAT_CONTEXT, amax="bound")
    return Recipe("coat_fast", optimizer=Optimizer(), linear=_COAT_LINEAR, context=context, head=head)


def moss() -> Recipe:
    """MOSS's scales (Zhang et al., 2025), folded into rows; per-tensor weights with automatic scaling.

    No microscaled product runs. If level 1 is a row (k1 in section 3.1), the largest power of two of a row is 1. The
    others are folded into its codes, so operands are e4m3 with one fp32 scale per row, bit for bit. They run as fast as
    other FP8 products and save no exponents; `moss_mx` multiplies two-level codes. Scales of rows need no pass over the
    tensor and do not span tokens. The paper does not specify gradients; ours have the same kind of scales
    (results/pages/moss_snr.md).

    Automatic scaling needs an optimizer that bounds the weights: `fp8jax.optimizer` of this recipe, or
    `fp8jax.track_weight_amax` last in a chain. The model needs the bounds after each update: use
    `fp8jax.nnx.Optimizer`, `fp8jax.nnx.end_step` or `fp8jax.linen.end_step`. A model without bounds measures its
    weights in each call.
    """
    return Recipe("moss", optimizer=_FP32_MOMENTS, linear=dataclasses.replace(_MOSS_LINEAR, w_scaling="automatic"))


def moss_mx() -> Recipe:
    """MOSS's two-level microscaled products (Zhang et al., 2025, section 3.1), without folding.

    Each group of 32 along a contraction has a power of two under its row's fp32 scale. The kernel applies it to the
    group's partial sum in registers (`pallas_kernels/matmul/matmul_mx_mosaic.py`). These products are slower than
    per-tensor ones (results/pages/gemm.md), and residuals also have exponents. `moss` is as exact if the values of each
    row lie within 2^14 of each other; use this preset for rows that do not, and for comparison. wgrad, which sums over
    tokens, reads inputs quantized again with a scale per channel, and gradients in groups of 32 tokens. Weights have
    current per-tensor scales.
    """
    micro = "e4m3:mx32+token+exact"
    linear = Linear(micro, "e4m3", micro, x_wgrad="e4m3:token", dy_wgrad=micro)
    return Recipe("moss_mx", optimizer=_FP32_MOMENTS, linear=linear)


def fast() -> Recipe:
    """The recommended preset: MOSS's scales, folded into rows, with COAT's contexts and optimizer states.

    Operands have one fp32 scale per row (see `moss`). Only wgrad, which sums over all tokens, accumulates with all
    bits. Weights have current scales, so layers have no state and any optimizer works. For the scales of `moss`, set
    `linear.w_scaling="automatic"`.
    """
    return Recipe("fast", optimizer=Optimizer(), linear=_MOSS_LINEAR, context=_COAT_CONTEXT)


def coat_activations() -> Recipe:
    """COAT's activations alone (its Table 13): group scaling per tensor in linear layers, 1x16 groups elsewhere."""
    return Recipe("coat_activations", optimizer=_FP32_MOMENTS, linear=_COAT_LINEAR, context=_COAT_CONTEXT)


def te_current() -> Recipe:
    """Transformer Engine's current scaling: e4m3 forward, e5m2 gradients, per-tensor scales from the amax."""
    return Recipe("te_current", optimizer=_FP32_MOMENTS, linear=Linear("e4m3", "e4m3", "e5m2"))


def te_delayed() -> Recipe:
    """Transformer Engine's delayed scaling: scales from the amax of the last 1,024 steps.

    Layers have state: see `fp8jax.nnx.value_and_grad` and `fp8jax.linen.end_step`.
    """
    return Recipe("te_delayed", optimizer=_FP32_MOMENTS, linear=Linear("e4m3", "e4m3", "e5m2", scaling="delayed"))


def deepseek() -> Recipe:
    """DeepSeek-V3, section 3.3: e4m3 in 1x128 groups for inputs and gradients, 128x128 blocks for weights.

    wgrad multiplies groups by groups, which is the slowest product. Two faster forms are `dataclasses.replace(linear,
    dy_wgrad="e4m3:block128")`, and rows for both operands, `x_wgrad="e4m3:token", dy_wgrad="e4m3:token"`. Both raise
    the error of wgrad if gradients differ in size between tokens, or with outlier channels. This preset uses the
    published groups.
    """
    group = "e4m3:group128"
    linear = Linear(group, "e4m3:block128", group, x_wgrad=group, dy_wgrad=group)
    return Recipe("deepseek", optimizer=_FP32_MOMENTS, linear=linear)


def mxfp8() -> Recipe:
    """MXFP8 (Mishra et al., 2025, arXiv 2506.08027): e4m3 everywhere, a power of two for 32 along each contraction.

    Powers are rounded up, so that no value saturates. Each product reads codes that were made from 16-bit values along
    its own contraction, so inputs are saved in 16 bits. Blackwell multiplies such operands (`jax.nn.scaled_matmul`).
    Other GPUs decode them to bf16. Nobody has run this preset on a Blackwell GPU yet (docs/howto/blackwell.md).
    """
    micro = "e4m3:mx32+ocp+roundup"
    linear = Linear(micro, micro, micro, w_dgrad=micro, x_wgrad=micro, dy_wgrad=micro, x_residual=None)
    return Recipe("mxfp8", optimizer=_FP32_MOMENTS, linear=linear)


def nvfp4() -> Recipe:
    """NVFP4 (NVIDIA, 2025, arXiv 2509.25149): e2m1 with an e4m3 scale for 16 and an fp32 scale per tensor.

    Weights have scales of 16x16, inputs and gradients of 1x16. Gradients are rounded stochastically. Both operands of
    the weight's gradient are transformed by a random Hadamard matrix of 16 along the tokens. Output heads stay in
    16 bits, as do the first and the last block (`Recipe.unquantized_blocks`); the paper leaves 10 of 62 blocks. Inputs
    are saved in 16 bits. Blackwell multiplies such operands (`jax.nn.scaled_matmul`). Other GPUs decode them to bf16.
    Nobody has run this preset on a Blackwell GPU yet (docs/howto/blackwell.md).
    """
    group, block = "e2m1:nv16", "e2m1:nvblock16"
    dy = f"{group}+stochastic"
    linear = Linear(group, block, dy, w_dgrad=block, x_wgrad=group, dy_wgrad=dy, x_residual=None, rotation=16)
    return Recipe("nvfp4", optimizer=_FP32_MOMENTS, linear=linear, unquantized_blocks=(1, 1))


def switchback() -> Recipe:
    """SwitchBack (Wortsman et al., 2023): int8 with row-wise inputs and gradients, wgrad in 16 bits."""
    linear = Linear("int8:token", "int8", "int8:token", x_wgrad=None, dy_wgrad=None, x_residual=None)
    return Recipe("switchback", optimizer=_FP32_MOMENTS, linear=linear)


def jetfire() -> Recipe:
    """Jetfire (Xi et al., 2024): int8 in blocks of 32x32, gradients rounded stochastically."""
    return Recipe(
        "jetfire", optimizer=_FP32_MOMENTS, linear=Linear("int8:block32", "int8:block32", "int8:block32+stochastic")
    )


def int8_block() -> Recipe:
    """The block quantization of INT8 fallback alone: 128x128, gradients and saved inputs rounded stochastically."""
    block = "int8:block128"
    linear = Linear(block, block, f"{block}+stochastic", x_residual=f"{block}+stochastic")
    return Recipe("int8_block", optimizer=_FP32_MOMENTS, linear=linear)


def int8_fallback() -> Recipe:
    """INT8 training with dynamic block-level fallback (arXiv 2503.08040), section 5.

    Blocks of an input with outliers, 10 to 30 % of all, have 16 bits in the forward product. The threshold that selects
    them is a state of each layer: see `fp8jax.nnx.advance_scaling` and `fp8jax.linen.advance_scaling`. Norms and
    activations save 10 bits.
    """
    linear = dataclasses.replace(int8_block().linear, scaling="threshold")
    return Recipe("int8_fallback", optimizer=_FP32_MOMENTS, linear=linear, context=Context("int10:group128"))


def fp8_lm() -> Recipe:
    """FP8-LM (Peng et al., 2023): 5 bytes of optimizer state per parameter, FP8 products and gradient all-reduce.

    Scales are per-tensor everywhere. Forward and gradients on the wire are e4m3, backward is e5m2, and master weights
    are fp16. Gradients are reduced as in the paper (section 2.1): NCCL adds codes under one scale shared by all
    devices, in one phase. A factor mu per parameter follows the saturated fraction (equations 3 to 6).

    One-phase sums need GPUs of compute capability 9.0; off CUDA they are computed in fp32 and rounded once. They need a
    mesh with one axis, and with fsdp whole parameters before each step. Each addition loses accuracy;
    `fp8_lm_two_phase` does not (results/pages/fp8_lm_gradients.md).
    """
    return Recipe(
        "fp8_lm",
        weights=Weights("fp16"),
        optimizer=Optimizer("e4m3", "fp16", None, expand=False),
        linear=Linear("e4m3", "e4m3", "e5m2"),
        comm=Comm("e4m3", "one_phase", auto_scale=True),
    )


def fp8_lm_two_phase() -> Recipe:
    """`fp8_lm` with a two-phase reduction of gradients: each device receives codes and sums them in fp32.

    Sums cannot saturate, so there is no factor and no state. Meshes may have both axes. With fsdp, a layer's parameters
    are gathered as codes when it runs. It runs on any GPU.
    """
    return dataclasses.replace(fp8_lm(), name="fp8_lm_two_phase", comm=Comm("e4m3"))


_PRESETS: dict[str, Callable[..., Recipe]] = {
    f.__name__: f
    for f in (
        *(bf16, fast, moss, moss_mx, coat, coat_fast, coat_optimizer, coat_activations),
        *(te_current, te_delayed, deepseek, mxfp8, nvfp4),
        *(switchback, jetfire, int8_block, int8_fallback, fp8_lm, fp8_lm_two_phase),
    )
}
NAMES: tuple[str, ...] = tuple(_PRESETS)


class Device(NamedTuple):
    """The preset of `for_device` for GPUs of at least one compute capability.

    Attributes:
        min_capability: the capability, such as 90 for an H200; 0 for anything other than a CUDA GPU.
        recipe: name of a preset.
        description: what runs in 8 bits there, what does not, and why.
    """

    min_capability: int
    recipe: str
    description: str


DEVICES = (
    Device(
        120,
        "coat",
        "matmuls of linear layers in FP8 with one scale per tensor, by cuBLASLt (with "
        "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false), contexts and optimizer states in 8 bits; attention, embedding "
        "and head in bf16. Compiled for this GPU, but not tested on one",
    ),
    Device(
        100,
        "mxfp8",
        "products of linear layers in MXFP8, by cuDNN's block-scaled matmul; all else as the model has it, optimizer "
        "states in fp32. Compiled for a B200, but not run by us on one",
    ),
    Device(
        90,
        "fast",
        "products of linear layers in FP8, contexts of norms and activations and optimizer states in 8 bits; attention,"
        " embedding and head in bf16",
    ),
    Device(
        89,
        "coat",
        "matmuls of linear layers in FP8 with one scale per tensor, by cuBLASLt (with XLA_FLAGS="
        "--xla_gpu_enable_triton_gemm=false; not measured by us), contexts and optimizer states in 8 bits; attention, "
        " embedding and head in bf16",
    ),
    Device(
        86,
        "int8_fallback",
        "no FP8 products: those of linear layers in INT8 blocks, outliers in 16 bits (arXiv 2503.08040 has 2.47 of "
        "bf16 for the product on an RTX 3090; not measured by us); contexts in 10 bits, optimizer states in fp32",
    ),
    Device(
        80,
        "coat_optimizer",
        "only optimizer states in 8 bits: there are no FP8 matmuls, and INT8 blocks gain little on an A100, whose "
        "CUDA cores are too slow for their scales (arXiv 2503.08040, appendix B); everything else in bf16",
    ),
    Device(
        0, "coat_optimizer", "only optimizer states in 8 bits: there are no kernels for 8-bit matmuls on this device"
    ),
)


def for_device(capability: int | None = None) -> Recipe:
    """The preset for a GPU. `device(capability).description` lists what runs in 8 bits.

    Recipe "auto" is this preset with `for_shapes`: layers that do not get faster stay in 16 bits.

    Args:
        capability: compute capability, such as 80 for an A100, or 0 without CUDA; None uses JAX's default device.

    Raises:
        ValueError: the capability is negative.
    """
    return get(device(capability).recipe)


def for_shapes(recipe: Recipe | str | None = None) -> Recipe:
    """A recipe that leaves products in 16 bits if 8 bits are slower for their shapes.

    `fp8jax.transform`, and `quantize` for Flax models, decide when they first see the shapes, for all layers that read
    one array together. They use rates of the GPU (fp8jax/core/rates.json, measured by `python -m experiments.bench
    rates`); `explain` lists each layer's gain. Devices without rates, such as CPUs, use those of an H100, so that a
    model is the same everywhere. Tokens are counted per device if the mesh is known (Explicit axes, `jax.set_mesh`,
    `jax.shard_map`), else for the whole program. Functions such as `fp8jax.linear` always follow their recipe.

    Args:
        recipe: a `Recipe` or a preset's name; None uses the device's (`for_device`), as "auto" does.

    Raises:
        TypeError: it is a part of a recipe.
        ValueError: no preset has this name.
    """
    base = for_device() if recipe is None else resolve(recipe)
    if not isinstance(base, Recipe):
        raise TypeError(f"for_shapes expects a Recipe or the name of a preset, got {recipe!r}")
    return dataclasses.replace(base, linear=dataclasses.replace(base.linear, skip_unprofitable=True))


def device(capability: int | None = None) -> Device:
    """The entry of `DEVICES` for a compute capability; None uses JAX's default device."""
    if capability is None:
        gpu = jax.devices()[0]
        digits = str(getattr(gpu, "compute_capability", "0")).replace(".", "")
        capability = int(digits) if gpu.platform == "gpu" and digits.isdigit() else 0
    if capability < 0:
        raise ValueError(f"unknown compute capability; use 80 for an A100 or 90 for an H200, got {capability}")
    return next(entry for entry in DEVICES if capability >= entry.min_capability)


AUTO = "auto"


def get(name: str) -> Recipe:
    """The preset called `name`; for "auto", the default device's with `for_shapes`.

    Raises:
        ValueError: no preset has this name; the message lists all names.
    """
    if name == AUTO:
        return for_shapes()
    if name not in _PRESETS:
        raise ValueError(f"unknown recipe {name!r}; use one of {', '.join(NAMES)}, or {AUTO}")
    return _PRESETS[name]()


def resolve(recipe: Any) -> Any:
    """A recipe or one of its parts unchanged, or the preset of a name.

    All functions with a recipe argument call this: `recipe="te_current"` and `recipe=te_current()` are the same.

    Raises:
        ValueError: no preset has this name; the message lists all names.
        TypeError: it is neither, such as a preset that was not called.
    """
    if isinstance(recipe, str):
        return get(recipe)
    if isinstance(recipe, (Recipe, Linear, Context)):
        return recipe
    name = getattr(recipe, "__name__", None)
    if name in _PRESETS and recipe is _PRESETS[name]:
        call = f"fp8jax.recipes.{name}"
        raise TypeError(f"{call} is a function that returns a recipe; call it, {call}(), or pass its name, {name!r}")
    raise TypeError(
        f"a recipe must be a fp8jax.Recipe, its part Linear or Context, or the name of a preset, got {recipe!r}"
    )


def linear_part(recipe: Recipe | Linear | str) -> Linear:
    """The `Linear` of a recipe or preset, which products follow.

    Raises:
        ValueError, TypeError: as for `resolve`; or it is a `Context`, which does not define products.
    """
    preset = resolve(recipe)
    if isinstance(preset, Context):
        raise TypeError(f"products need a Recipe or its part Linear, got {preset!r}")
    return preset.linear if isinstance(preset, Recipe) else preset


def context_part(recipe: Recipe | Context | str) -> Context:
    """The `Context` of a recipe or preset, which non-linear operations follow.

    Raises:
        ValueError, TypeError: as for `resolve`; or it is a `Linear`, which does not define them.
    """
    preset = resolve(recipe)
    if isinstance(preset, Linear):
        raise TypeError(f"norms and activations need a Recipe or its part Context, got {preset!r}")
    return preset.context if isinstance(preset, Recipe) else preset


def __dir__() -> list[str]:
    """The presets, the parts of a recipe, and the functions that find one."""
    parts = ["HEAD", "Comm", "Context", "Linear", "Optimizer", "Recipe", "Weights"]
    return [*NAMES, *parts, "DEVICES", "Device", "NAMES", "device", "for_device", "for_shapes", "get"]
