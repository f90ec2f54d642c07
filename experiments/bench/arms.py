"""Parses the arm names of step benchmarks: "RECIPE[, PART]..."."""

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

import fp8jax
from experiments.models import flash
from experiments.models.llama import products_saveable
from experiments.train.form import fastest

BF16 = "bf16"
FAITHFUL, LEAN, REMATERIALIZED = "COAT, faithful", "COAT, lean", "bf16, recomputed"
_HEAD_FIELDS = [field for field in dataclasses.fields(fp8jax.recipes.HEAD) if field.init]
# Changes to a recipe, by part of the name: the format of gradients between GPUs, and the scaling of weights (MOSS,
# Table 10). "MASTER masters" changes the master weights.
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "8-bit gradients": ("comm", {"gradients": "e4m3"}),
    "one phase": ("comm", {"form": "one_phase"}),
    "weights just in time": ("linear", {"w_scaling": "current"}),
    "weights delayed": ("linear", {"w_scaling": "delayed"}),
    "8-bit head": ("head", {field.name: getattr(fp8jax.recipes.HEAD, field.name) for field in _HEAD_FIELDS}),
}
MASTERS = " masters"
# "recomputed" saves only the outputs of matmuls and attention. "none of our kernels" leaves all kernels to XLA.
RECOMPUTED, PLAIN = "recomputed", "none of our kernels"
# The loss computes the logits of all tokens at once, or in chunks. The default is that of `--logits auto`.
LOGITS = {"whole logits": False, "logits in chunks": True}
STEP_PARTS = (RECOMPUTED, PLAIN, *LOGITS)


def parse(name: str, known_parts: Collection[str] = ()) -> tuple[fp8jax.Recipe, frozenset[str]]:
    """Returns the recipe of an arm, with the changes in its name, and the known parts of the name.

    Raises:
        ValueError: the recipe does not exist, or a part is unknown.
    """
    preset, *parts = name.split(", ")
    recipe, matched = fp8jax.recipes.get(preset), set[str]()
    for part in parts:
        if part in known_parts:
            matched.add(part)
            continue
        master = {"master": part.removesuffix(MASTERS)} if part.endswith(MASTERS) else None
        part_name, settings = ("weights", master) if master else CHANGES.get(part, ("", {}))
        if not part_name:
            listed = ", ".join(map(repr, [*CHANGES, f"bf16+int8{MASTERS}", *known_parts]))
            raise ValueError(f"arm {name!r}: {part!r} is unknown; use one of {listed}")
        recipe = dataclasses.replace(recipe, **{part_name: dataclasses.replace(getattr(recipe, part_name), **settings)})
    return recipe, frozenset(matched)


class Settings(NamedTuple):
    """The settings in the name of an arm of `bench step`.

    Attributes:
        recipe: the recipe of the layers and the optimizer.
        remat: the rematerialization policy.
        kernels: whether fp8jax's kernels run.
        chunked: whether the loss computes logits in chunks; None for the default of training.
    """

    recipe: fp8jax.Recipe
    remat: bool | str
    kernels: bool = True
    chunked: bool | None = None


def settings(name: str) -> Settings:
    """Returns the settings of an arm of `bench step`.

    Raises:
        ValueError: as `parse`.
    """
    recipe, parts = parse(name, STEP_PARTS)
    remat = False if name == BF16 else "products" if RECOMPUTED in parts else fastest(recipe)
    chunked = next((LOGITS[part] for part in LOGITS if part in parts), None)
    return Settings(recipe, remat, PLAIN not in parts, chunked)


def coat_recipes() -> dict[str, fp8jax.Recipe | None]:
    """Returns the recipes of COAT's tables by name; None stands for the unchanged model."""
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


def save_products(primitive: Any, *operands: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint` that saves the outputs of matmuls and attention and recomputes the rest."""
    if primitive.name == "name":
        return params["name"] == flash.NAME
    return products_saveable(primitive, *operands)
