"""The model that a recipe trains: the form of the Llama, the operations that are recomputed, and the logits of the
loss."""

import dataclasses
from typing import Any

import jax
from flax import nnx

import fp8jax
from experiments.models.llama import Llama, LlamaConfig
from experiments.models.parts import Boundary
from experiments.train import adapters
from experiments.train.experts import ExpertSharing, RecipeProducts
from experiments.train.sections import Lora
from fp8jax.ops.dispatch import choice
from fp8jax.ops.dispatch.choice import missing_triton
from fp8jax.ops.quantization.fused_outputs import emits_codes


@dataclasses.dataclass(frozen=True)
class Form:
    """How a model is written, no arrays.

    Attributes:
        llama: the shape.
        recipe: what everything is stored and computed in.
        remat: what blocks compute again in the backward pass, as `Llama` takes it.
        rows, boundary: how tokens lie on several devices, or how these share sequences, as `Llama` takes them.
        unroll: layers in a turn of the loop over them, as `Llama` takes it.
        lora: adapters, or None where all weights are trained.
        sharing: how devices share experts, as `RecipeProducts` takes it.
    """

    llama: LlamaConfig
    recipe: fp8jax.Recipe
    remat: bool | str
    rows: jax.sharding.NamedSharding | None = None
    boundary: Boundary | None = None
    unroll: int | None = None
    lora: Lora | None = None
    sharing: ExpertSharing | None = None

    def build_plain(self, rngs: nnx.Rngs) -> Llama:
        """The original model, without 8-bit code."""
        weights = self.recipe.weights
        # Masters by parts, and scaled ones, which the optimizer keeps, are made of fp32.
        master = weights.master if weights.master in ("fp32", "bf16") else "fp32"
        dtype, param_dtype = (fp8jax.formats.get(name).dtype for name in (weights.compute, master))
        return Llama(
            self.llama,
            dtype=dtype,
            param_dtype=param_dtype,
            remat=self.remat,
            rows=self.rows,
            boundary=self.boundary,
            unroll=self.unroll,
            expert_products=RecipeProducts(self.recipe, self.sharing) if self.llama.experts else None,
            router_losses=self.llama.experts > 0,
            rngs=rngs,
        )

    def build(self, rngs: nnx.Rngs, params: Any = None) -> Llama:
        """The model for training, with these parameters, a nested dict, or with new ones."""
        model = self.build_plain(rngs)
        if params is not None:
            flat_params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            nnx.update(model, jax.tree.map(lambda new, old: new.astype(old.dtype), params, flat_params))
        if self.lora is not None:
            return adapters.adapt(model, self.lora, self.recipe, rngs)
        methods = ("__call__", "hidden")
        return fp8jax.nnx.quantize(model, self.recipe, methods=methods) if changes_layers(self.recipe) else model

    def structure(self) -> nnx.GraphDef[Llama]:
        """That of the model, of parameters and what it has besides; no array is made."""
        return nnx.split(nnx.eval_shape(lambda: self.build(nnx.Rngs(0))), nnx.Param, ...)[0]


def changes_layers(recipe: fp8jax.Recipe) -> bool:
    """Whether a recipe changes a model's layers: it has quantized products, or defines residuals."""
    return bool(recipe.linear.is_quantized) or recipe.context != type(recipe.context)()


def fastest(recipe: fp8jax.Recipe) -> bool | str:
    """What blocks compute again on a GPU so that a step is fast, as `Llama` takes it.

    All but products and attention; nothing where the recipe's contexts save operations, or where kernels write what
    layers read: norms and activations then keep their inputs alone, of which the backward pass makes the rest. Without
    kernels contexts are as written, and all but products and attention is computed again.
    """
    written = emits_codes(recipe) and missing_triton("nonlinear.quantize_recomputed_triton") is None
    saved = recipe.context.residual is not None and not choice.keeps_nonlinear_unchanged()
    return False if saved or written else "products"


def remat_policy(option: str, recipe: fp8jax.Recipe) -> bool | str:
    """The option `--remat` as `Llama` takes it."""
    if option == "auto":
        return fastest(recipe) if jax.default_backend() == "gpu" else False
    names: dict[str, bool | str] = {"none": False, "products": "products", "blocks": True}
    return names[option]


# Of fp32 logits, beyond which the loss takes a chunk of them at a time.
WHOLE_BYTES = 2**31


def in_chunks(option: str, tokens: int, vocab: int) -> bool:
    """The option `--logits` as `Task` takes it, of so many tokens that a device has logits of at once."""
    return option == "chunked" or (option == "auto" and 4 * tokens * vocab > WHOLE_BYTES)
