"""What the arms of the benchmark of training steps are called, and what their names say."""

import dataclasses
from typing import Any, NamedTuple

import fp8jax
from experiments.models import flash
from experiments.models.llama import products_saveable
from experiments.train.form import fastest
from fp8jax.recipes import Comm

BF16 = "bf16"
FAITHFUL, LEAN, AGAIN = "COAT, faithful", "COAT, lean", "bf16, recomputed"
# Arms such as "coat, 8-bit gradients" are recipes whose gradients travel so over several GPUs.
GRADIENTS = {"8-bit gradients": Comm("e4m3"), "8-bit gradients, one phase": Comm("e4m3", "one_phase")}
# Or the scales of their weights are another strategy's than the recipe's (MOSS, Table 10).
WEIGHTS = {"weights just in time": "current", "weights delayed": "delayed"}
# Or they keep what another choice than training's own keeps, run in a loop over the layers, or by XLA alone.
KEEPING: dict[str, bool | str] = {"as written": False, "recomputed": "products"}
PLAIN, LOOP = "none of our kernels", "in a loop"
HEAD = "8-bit head"
# Or the loss has logits of all tokens, or of a chunk at a time; else as `--logits auto` of training has it.
LOGITS = {"whole logits": False, "logits in chunks": True}


class Settings(NamedTuple):
    """What an arm's name says.

    Attributes:
        recipe: of its layers and optimizer.
        remat: what it recomputes.
        kernels: whether ours run.
        unroll: layers in a turn of the loop over them; None for all.
        chunked: whether the loss takes logits in chunks; None as training does.
    """

    recipe: fp8jax.Recipe
    remat: bool | str
    kernels: bool = True
    unroll: int | None = None
    chunked: bool | None = None


def parsed(name: str) -> tuple[fp8jax.Recipe, str, bool]:
    """The recipe of an arm, what follows its name, and whether layers run in a loop; asks for no device.

    Raises:
        ValueError: there is no such recipe, or what follows its name is unknown.
    """
    preset, _, how = name.partition(", ")
    recipe = fp8jax.recipes.get(preset)
    how, loop = how.removesuffix(LOOP).removesuffix(", "), how.endswith(LOOP)
    if how in GRADIENTS:
        recipe = dataclasses.replace(recipe, comm=GRADIENTS[how])
    elif how in WEIGHTS:
        recipe = dataclasses.replace(recipe, linear=dataclasses.replace(recipe.linear, w_scaling=WEIGHTS[how]))
    elif how == HEAD:
        recipe = dataclasses.replace(recipe, head=fp8jax.recipes.HEAD)
    elif how and how not in (*KEEPING, *LOGITS, PLAIN):
        listed = [*KEEPING, *GRADIENTS, *WEIGHTS, HEAD, *LOGITS, PLAIN, LOOP]
        raise ValueError(f"arm {name!r}: after the recipe stands nothing, or one of {listed}")
    return recipe, how, loop


def settings(name: str) -> Settings:
    """The recipe of an arm, what it recomputes, and how it runs.

    Raises:
        ValueError: as `parsed`.
    """
    recipe, how, loop = parsed(name)
    remat = False if name == BF16 else KEEPING.get(how, fastest(recipe))
    return Settings(recipe, remat, how != PLAIN, 1 if loop else None, LOGITS.get(how))


def coat_recipes() -> dict[str, fp8jax.Recipe | None]:
    """The recipes of COAT's tables by name; None for the model as it is."""
    coat = fp8jax.recipes.coat()
    faithful = dataclasses.replace(coat, context=fp8jax.recipes.Context("e4m3:group16"))
    deepseek = dataclasses.replace(fp8jax.recipes.deepseek(), context=coat.context)
    return {
        BF16: None,
        "te_current": fp8jax.recipes.te_current(),
        "deepseek": fp8jax.recipes.deepseek(),
        FAITHFUL: faithful,
        LEAN: coat,
        "deepseek with COAT's lean contexts": deepseek,
    }


def save_products(primitive: Any, *operands: Any, **how: Any) -> bool:
    """A policy of `jax.checkpoint`: what products of matrices and attention give is kept, the rest computed again."""
    if primitive.name == "name":
        return how["name"] == flash.NAME
    return products_saveable(primitive, *operands)
