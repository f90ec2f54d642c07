"""Adapters of our Llamas in the files of `peft`: their names there, and errors of the training program."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fp8jax
from experiments.errors import UserError
from fp8jax.lora import Adapter

# A projection's path here and its name there.
NAMES = {
    "layers/attention/q": "model.layers.{}.self_attn.q_proj",
    "layers/attention/k": "model.layers.{}.self_attn.k_proj",
    "layers/attention/v": "model.layers.{}.self_attn.v_proj",
    "layers/attention/out": "model.layers.{}.self_attn.o_proj",
    "layers/mlp/gate": "model.layers.{}.mlp.gate_proj",
    "layers/mlp/up": "model.layers.{}.mlp.up_proj",
    "layers/mlp/down": "model.layers.{}.mlp.down_proj",
}


def of_params(params: Any, alpha: float) -> dict[str, Adapter]:
    """The adapters of a training state, by the path of their layer."""
    found: dict[str, Adapter] = {}

    def walk(tree: Mapping[str, Any], path: tuple[str, ...]) -> None:
        if "lora_a" in tree:
            found["/".join(path)] = Adapter(tree["lora_a"], tree["lora_b"], alpha)
            return
        for name, inner in tree.items():
            walk(inner, (*path, name))

    walk(params, ())
    return found


def save(folder: Path, adapters: Mapping[str, Adapter], *, base: str = "", dropout: float = 0.0) -> None:
    """As `fp8jax.lora.save`, of adapters by the path of their layer, stacked; UserError for its errors."""
    try:
        fp8jax.lora.save(folder, adapters, NAMES, base=base, dropout=dropout)
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from None


def load(folder: Path) -> dict[str, Adapter]:
    """As `fp8jax.lora.load`, by the path of their layer, stacked; UserError for its errors."""
    try:
        return fp8jax.lora.load(folder, NAMES)
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from None
