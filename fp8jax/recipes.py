"""Presets: each published system is a combination of the parts of a `Recipe`."""

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
_COAT_CONTEXT = Context("e4m3:group16", "lean")
_MOSS_LINEAR = Linear(
    "e4m3:mx32+token", "e4m3", "e4m3:mx32+token", fast_accumulation=("forward", "dgrad")
)  # fmt: skip

# Of output heads (`Recipe.head`), at most as steep as softmax less 1: gradients of rare tokens' weights, whose
# cotangents are all small, have the range of e5m2. Of 1,024 tokens and 32,000 entries the gradient of what the head
# reads is off by 1.5 % for it, not 2.6 as in e5m2, and by 4.2 % with the codes of input and weight, which move logits.
# All sums keep all bits: those that Hopper's fast accumulation cuts off take 0.3 % of each logit, and it is no faster.
HEAD = Linear("e4m3", "e4m3", "e4m3", dy_wgrad="e5m2", fast_accumulation=())


def bf16() -> Recipe:
    """bf16 computation with fp32 master weights and moments: the baseline."""
    return Recipe("bf16", optimizer=_FP32_MOMENTS)


def coat_optimizer() -> Recipe:
    """COAT's optimizer states alone (its Table 13): e4m3 moments, groups of 128, dynamic range expansion."""
    return Recipe("coat_optimizer", optimizer=Optimizer())


def coat() -> Recipe:
    """COAT whole: 8-bit optimizer states and activations, of which only what is dear to compute again is kept.

    `Context("e4m3:group16", "faithful")` keeps what the paper keeps. Gradients that enter a product are in e5m2, as in
    its code; `Linear(dy=None, w_dgrad=None, x_wgrad=None, dy_wgrad=None, ...)` leaves them in bf16, as its section G.5.
    """
    return Recipe("coat", optimizer=Optimizer(), linear=_COAT_LINEAR, context=_COAT_CONTEXT)


def coat_fast() -> Recipe:
    """COAT with fewer passes over memory than scales of the tensors' own largest magnitudes need.

    Scales of what norms and activations make come from bounds, which nothing finite exceeds (`Context.scales`).
    Gradients are summed with all bits, as in `coat`: fast accumulation of the weight's, over all tokens, costs 2.8 % of
    the loss at 65 M parameters (docs/recipes/coat_fast.md).
    """
    context = dataclasses.replace(_COAT_CONTEXT, scales="bound")
    return Recipe("coat_fast", optimizer=Optimizer(), linear=_COAT_LINEAR, context=context)


def moss() -> Recipe:
    """MOSS's scales (Zhang et al., 2025), folded into rows; weights per tensor by automatic scaling.

    No microscaled product runs: with a level 1 of rows (k1 in section 3.1) the largest power of two of a row is 1, and
    the others are folded into its codes, so that what is multiplied and kept is e4m3 with one fp32 scale a row, bit for
    bit. It runs as fast as FP8 does and keeps no exponents; `moss_mx` multiplies two-level codes. Level 1 of a row
    needs no pass over the tensor and no scale that spans tokens. Of gradients the paper says nothing; they are scaled
    likewise, with 4 dB less noise than in e5m2 per tensor (results/pages/moss_snr.md). Automatic scaling needs
    an optimizer that follows weights, as `fp8jax.optimizer` of this recipe is (or `fp8jax.track_weight_amax` last in a
    chain), and its bounds in the model after each update: `fp8jax.nnx.Optimizer` does so, elsewhere
    `fp8jax.nnx.end_step` and `fp8jax.linen.end_step`. A model that never gets them measures its weights in each call.
    """
    return Recipe("moss", optimizer=_FP32_MOMENTS, linear=dataclasses.replace(_MOSS_LINEAR, w_scaling="automatic"))


def moss_mx() -> Recipe:
    """MOSS's two-level microscaled products (Zhang et al., 2025, section 3.1), as they are: codes are not folded.

    Each group of 32 along a contraction has a power of two under its row's fp32 scale, and the kernel applies it to the
    group's partial sum in registers (`pallas_kernels/matmul/matmul_mx_mosaic.py`). On an H200 such a product takes 1.8
    times as long as one with a scale a tensor (results/pages/gemm.md), and layers keep 1.03 bytes an element. Where the
    values of a row lie within 2^14 of each other `moss` is as exact: this is for rows that do not, and for the
    comparison. The weight's gradient, whose sums are over tokens, reads inputs that are quantized again, with a scale a
    channel, and gradients in groups of 32 tokens. Weights have their own scales, one a tensor.
    """
    micro = "e4m3:mx32+token+exact"
    linear = Linear(micro, "e4m3", micro, x_wgrad="e4m3:token", dy_wgrad=micro)
    return Recipe("moss_mx", optimizer=_FP32_MOMENTS, linear=linear)


def fast() -> Recipe:
    """The preset we recommend: MOSS's scales, folded into rows, with COAT's contexts and optimizer states.

    What is multiplied are codes with one fp32 scale a row (see `moss`). As there, only the weight's gradient,
    whose sums are over all tokens, is summed with all bits. Weights have their own scales, so that layers keep no state
    and any optimizer will do; `linear.w_scaling="automatic"` makes them as in `moss`.
    """
    return Recipe("fast", optimizer=Optimizer(), linear=_MOSS_LINEAR, context=_COAT_CONTEXT)


def coat_activations() -> Recipe:
    """COAT's activations alone (its Table 13): group scaling per tensor in linear layers, 1x16 groups elsewhere."""
    return Recipe("coat_activations", optimizer=_FP32_MOMENTS, linear=_COAT_LINEAR, context=_COAT_CONTEXT)


def te_current() -> Recipe:
    """Transformer Engine's current scaling: e4m3 forward, e5m2 gradients, scales of the tensors themselves."""
    return Recipe("te_current", optimizer=_FP32_MOMENTS, linear=Linear("e4m3", "e4m3", "e5m2"))


def te_delayed() -> Recipe:
    """Transformer Engine's delayed scaling: scales from the largest magnitudes of the last 1,024 steps.

    Layers have a state: see `fp8jax.nnx.value_and_grad` and `fp8jax.linen.end_step`.
    """
    return Recipe("te_delayed", optimizer=_FP32_MOMENTS, linear=Linear("e4m3", "e4m3", "e5m2", scaling="delayed"))


def deepseek() -> Recipe:
    """DeepSeek-V3, section 3.3: e4m3 in groups of 1x128 for inputs and gradients, blocks of 128x128 for weights.

    The weight's gradient multiplies groups by groups, the slowest of the products. Blocks for the gradient of the
    output, `dataclasses.replace(linear, dy_wgrad="e4m3:block128")`, take the three products of a layer 1.10 times as
    fast on an H200; rows for both operands, `x_wgrad` and `dy_wgrad="e4m3:token"`, 1.07 times. But where tokens have
    gradients of different sizes the error of the weight's gradient grows by 1.17 and 1.14, with outlying channels, too,
    by 1.20 and 1.33 (`experiments.tables.deepseek_wgrad`), so the published groups are what this takes.
    """
    group = "e4m3:group128"
    linear = Linear(group, "e4m3:block128", group, x_wgrad=group, dy_wgrad=group)
    return Recipe("deepseek", optimizer=_FP32_MOMENTS, linear=linear)


def switchback() -> Recipe:
    """SwitchBack (Wortsman et al., 2023): int8 with row-wise inputs and gradients, the weight's gradient in 16 bits."""
    linear = Linear("int8:token", "int8", "int8:token", x_wgrad=None, dy_wgrad=None, x_residual=None)
    return Recipe("switchback", optimizer=_FP32_MOMENTS, linear=linear)


def jetfire() -> Recipe:
    """Jetfire (Xi et al., 2024): int8 in blocks of 32x32, gradients rounded stochastically."""
    return Recipe(
        "jetfire", optimizer=_FP32_MOMENTS, linear=Linear("int8:block32", "int8:block32", "int8:block32+stochastic")
    )


def int8_block() -> Recipe:
    """The block quantization under INT8 fallback: 128x128, gradients and saved inputs rounded stochastically."""
    block = "int8:block128"
    linear = Linear(block, block, f"{block}+stochastic", x_residual=f"{block}+stochastic")
    return Recipe("int8_block", optimizer=_FP32_MOMENTS, linear=linear)


def int8_fallback() -> Recipe:
    """INT8 training with dynamic block-level fallback (arXiv 2503.08040), section 5.

    Blocks of an input with outliers have 16 bits in the forward product, 10 to 30 % of all; the threshold that decides
    which is a state of each layer: see `fp8jax.nnx.advance_scaling` and `fp8jax.linen.advance_scaling`. Norms and
    activations keep 10 bits.
    """
    linear = dataclasses.replace(int8_block().linear, scaling="threshold")
    return Recipe("int8_fallback", optimizer=_FP32_MOMENTS, linear=linear, context=Context("int10:group128"))


def fp8_lm() -> Recipe:
    """FP8-LM (Peng et al., 2023): 6 bytes of optimizer a parameter, products and gradients between devices in FP8.

    Per-tensor scales everywhere: e4m3 forward and for weight gradients that travel, e5m2 backward, fp16 master weights.
    Gradients are summed as the paper does (section 2.1): codes under one scale of all devices, by NCCL itself, in one
    phase, with a factor mu a parameter that follows what saturates (equations 3 to 6). That needs GPUs of compute
    capability 9.0 (elsewhere than on CUDA sums are in fp32 and are rounded once), a mesh with one axis, and with fsdp
    whole parameters before each step; and it loses with every addition: of a mean over 1,024 replicas 3 dB are left,
    where `fp8_lm_two_phase` has 31 (results/pages/fp8_lm_gradients.md).
    """
    return Recipe(
        "fp8_lm",
        weights=Weights("fp16"),
        optimizer=Optimizer("e4m3", "fp16", None, expand=False),
        linear=Linear("e4m3", "e4m3", "e5m2"),
        comm=Comm("e4m3", "one_phase", auto_scale=True),
    )


def fp8_lm_two_phase() -> Recipe:
    """`fp8_lm` with another reduction of gradients: codes are sent to the device that sums them in fp32.

    Nothing saturates, so there is no factor and no state; meshes may have both axes, and with fsdp layers' parameters
    are gathered as codes when they run. Any GPU will do.
    """
    return dataclasses.replace(fp8_lm(), name="fp8_lm_two_phase", comm=Comm("e4m3"))


_PRESETS: dict[str, Callable[[], Recipe]] = {
    f.__name__: f
    for f in (
        *(bf16, fast, moss, moss_mx, coat, coat_fast, coat_optimizer, coat_activations),
        *(te_current, te_delayed, deepseek, switchback, jetfire, int8_block, int8_fallback, fp8_lm, fp8_lm_two_phase),
    )
}
NAMES: tuple[str, ...] = tuple(_PRESETS)


class Device(NamedTuple):
    """What `for_device` takes for GPUs from a compute capability on.

    Attributes:
        min_capability: the capability, as 90 for an H200; 0 for whatever is no CUDA GPU.
        recipe: a preset's name.
        description: what runs in 8 bits there, and what does not, and why.
    """

    min_capability: int
    recipe: str
    description: str


DEVICES = (
    Device(
        90,
        "fast",
        "products of linear layers in FP8, contexts of norms and activations and optimizer states in 8 bits; attention,"
        " embedding and head in bf16",
    ),
    Device(
        89,
        "coat",
        "products of linear layers in FP8 with one scale a tensor, by cuBLASLt (with XLA_FLAGS="
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
        "optimizer states in 8 bits alone: no FP8 products, and INT8 blocks gain little on an A100, whose cores are "
        "too slow for their scales (arXiv 2503.08040, appendix B); everything else in bf16",
    ),
    Device(0, "coat_optimizer", "optimizer states in 8 bits alone: there are no kernels for 8-bit products here"),
)


def for_device(capability: int | None = None) -> Recipe:
    """The preset for a GPU. `device(capability).computed` says what runs in 8 bits.

    `recipe="auto"` is this one, by `for_shapes`: layers that it makes no faster are left in 16 bits.

    Args:
        capability: compute capability, as 80 for an A100; None asks JAX's default device, 0 is none of CUDA.

    Raises:
        ValueError: the capability is negative.
    """
    return get(device(capability).recipe)


def for_shapes(recipe: Recipe | str | None = None) -> Recipe:
    """A recipe that leaves products in 16 bits where 8 bits lose time, as the projection after attention in a small
    model.

    `fp8jax.transform`, and `quantize` for Flax models, decide for each layer when they first see its shapes, by rates
    of the GPU that `python -m experiments.bench rates` measures (fp8jax/core/rates.json), and `explain` says what each
    gains. Of a device without rates, a CPU among them, those of an H100 are assumed, so that a model is the same
    wherever it runs. Tokens are those of a device where the mesh is known (Explicit axes, `jax.set_mesh`,
    `jax.shard_map`), else those of the program. Functions such as `fp8jax.linear` decide nothing: they do what they are
    called for.

    Args:
        recipe: a `Recipe` or a preset's name; None takes that of the device (`for_device`), as "auto" does.

    Raises:
        TypeError: it is a part of a recipe.
        ValueError: no preset has this name.
    """
    whole = for_device() if recipe is None else resolve(recipe)
    if not isinstance(whole, Recipe):
        raise TypeError(f"for_shapes takes a whole recipe or a preset's name, not {recipe!r}")
    return dataclasses.replace(whole, linear=dataclasses.replace(whole.linear, select="gains"))


def device(capability: int | None = None) -> Device:
    """What `for_device` takes, and what runs in 8 bits with it."""
    if capability is None:
        gpu = jax.devices()[0]
        digits = str(getattr(gpu, "compute_capability", "0")).replace(".", "")
        capability = int(digits) if gpu.platform == "gpu" and digits.isdigit() else 0
    if capability < 0:
        raise ValueError(f"a compute capability is 80 for an A100 and 90 for an H200, not {capability}")
    return next(entry for entry in DEVICES if capability >= entry.min_capability)


AUTO = "auto"


def get(name: str) -> Recipe:
    """The preset called `name`; of "auto", that for the default device, in layers that gain (`for_shapes`).

    Raises:
        ValueError: no preset has this name; the message lists those there are.
    """
    if name == AUTO:
        return for_shapes()
    if name not in _PRESETS:
        raise ValueError(f"unknown recipe {name!r}; recipes are {', '.join(NAMES)}, and {AUTO}")
    return _PRESETS[name]()


def resolve(recipe: Any) -> Any:
    """A recipe or one of its parts as it is, and the preset that a name stands for.

    All that takes a recipe asks here: `recipe="te_current"` and `recipe=te_current()` are the same everywhere.

    Raises:
        ValueError: no preset has this name; the message lists those there are.
        TypeError: it is neither, such as a preset that was not called.
    """
    if isinstance(recipe, str):
        return get(recipe)
    if isinstance(recipe, (Recipe, Linear, Context)):
        return recipe
    name = getattr(recipe, "__name__", None)
    if name in _PRESETS and recipe is _PRESETS[name]:
        call = f"fp8jax.recipes.{name}"
        raise TypeError(f"{call} is a function that makes a recipe: call it, {call}(), or give its name, {name!r}")
    raise TypeError(f"a recipe is a fp8jax.Recipe, its part Linear or Context, or a preset's name, not {recipe!r}")


def linear_part(recipe: Recipe | Linear | str) -> Linear:
    """The part of a recipe, or of the preset of this name, that products follow.

    Raises:
        ValueError, TypeError: as `resolve`; or it is a `Context`, which says nothing of products.
    """
    preset = resolve(recipe)
    if isinstance(preset, Context):
        raise TypeError(f"products follow a Recipe or its part Linear, not {preset!r}")
    return preset.linear if isinstance(preset, Recipe) else preset


def context_part(recipe: Recipe | Context | str) -> Context:
    """The part of a recipe, or of the preset of this name, that non-linear operations follow.

    Raises:
        ValueError, TypeError: as `resolve`; or it is a `Linear`, which says nothing of them.
    """
    preset = resolve(recipe)
    if isinstance(preset, Linear):
        raise TypeError(f"norms and activations follow a Recipe or its part Context, not {preset!r}")
    return preset.context if isinstance(preset, Recipe) else preset


def __dir__() -> list[str]:
    """The presets, the parts of a recipe, and how one is found."""
    parts = ["HEAD", "Comm", "Context", "Linear", "Optimizer", "Recipe", "Weights"]
    return [*NAMES, *parts, "DEVICES", "Device", "NAMES", "device", "for_device", "for_shapes", "get"]
