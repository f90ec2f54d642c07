"""The model that a recipe trains: the structure of the Llama, rematerialization, and the logits of the loss."""

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
    """The structure of a model, without arrays.

    Attributes:
        llama: the shape.
        recipe: the recipe.
        remat: rematerialization of blocks, an argument of `Llama`.
        rows, boundary: sharding of tokens over devices, or tensor parallelism, arguments of `Llama`.
        unroll: layers per iteration of the loop over layers, an argument of `Llama`.
        lora: settings of adapters, or None if all weights are trained.
        sharing: sharding of experts, an argument of `RecipeProducts`.
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
        """Returns the model without quantization."""
        weights = self.recipe.weights
        # Split and scaled master weights in the optimizer are created from fp32 parameters.
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
        """Returns the model for training, with given parameters (a nested dict) or new ones."""
        model = self.build_plain(rngs)
        if params is not None:
            flat_params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            nnx.update(model, jax.tree.map(lambda new, old: new.astype(old.dtype), params, flat_params))
        if self.lora is not None:
            return adapters.adapt(model, self.lora, self.recipe, rngs)
        methods = ("__call__", "hidden")
        return fp8jax.nnx.quantize(model, self.recipe, methods=methods) if changes_layers(self.recipe) else model

    def structure(self) -> nnx.GraphDef[Llama]:
        """Returns the graph definition of the model, without creating arrays."""
        return nnx.split(nnx.eval_shape(lambda: self.build(nnx.Rngs(0))), nnx.Param, ...)[0]


def changes_layers(recipe: fp8jax.Recipe) -> bool:
    """Returns whether a recipe changes layers: it has quantized matmuls, or defines residuals."""
    return bool(recipe.linear.is_quantized) or recipe.context != type(recipe.context)()


def fastest(recipe: fp8jax.Recipe) -> bool | str:
    """Returns the fastest rematerialization of blocks on a GPU, an argument of `Llama`.

    Nothing, if the recipe's contexts save operations, or if kernels write the inputs of layers: norms and activations
    then save only their inputs. Otherwise everything except matmuls and attention.
    """
    written = emits_codes(recipe) and missing_triton("nonlinear.quantize_recomputed_triton") is None
    saved = recipe.context.residual is not None and not choice.keeps_nonlinear_unchanged()
    return False if saved or written else "products"


def remat_policy(option: str, recipe: fp8jax.Recipe) -> bool | str:
    """Converts the option `--remat` to the argument of `Llama`."""
    if option == "auto":
        return fastest(recipe) if jax.default_backend() == "gpu" else False
    names: dict[str, bool | str] = {"none": False, "products": "products", "blocks": True}
    return names[option]


# Bytes of fp32 logits above which the loss computes logits in chunks.
WHOLE_BYTES = 2**31


def in_chunks(option: str, tokens: int, vocab: int) -> bool:
    """Returns whether the loss computes logits in chunks, by `--logits` and the number of tokens of a device."""
    return option == "chunked" or (option == "auto" and 4 * tokens * vocab > WHOLE_BYTES)
