"""Writes a Hugging Face checkpoint: `python -m experiments.hub --help`.

    python -m experiments.hub --run runs/NAME --recipe coat --out DIR --eight recipe
    python -m experiments.hub --model DIR --out OTHER --eight block

Exit codes: 0 done; 2 wrong input; 3 a file cannot be written.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import tyro

from experiments import export
from experiments.errors import UserError
from experiments.hub import load, save
from experiments.train.checkpoint import quiet


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a trained model, or a Hugging Face checkpoint, as a Hugging Face checkpoint."""

    out: Path
    """Folder to write; it must not exist."""
    run: Path | None = None
    """Folder of a run of experiments.train, such as runs/NAME."""
    recipe: str | None = None
    """Recipe of the run; its newest checkpoint is written."""
    model: str | None = None
    """Instead of a run: folder of a Hugging Face checkpoint, or its name in the local cache."""
    dtype: Literal["bfloat16", "float32", "float16", "same"] = "bfloat16"
    """Dtype of written weights; same keeps the dtypes."""
    eight: Literal["none", "recipe", "recipe-deepseek", "tensor", "channel", "block", "deepseek"] = "none"
    """8-bit codes of linear layers: those of the recipe's matmuls (in the format compressed-tensors or DeepSeek's), or
    new ones with a scale per tensor, output (channel) or block of 128 x 128."""
    activations: bool = False
    """Let servers also quantize the inputs of these layers."""
    shard_gb: float = 5.0
    """Maximum GB of a file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, writes, and returns the exit code."""
    settings = tyro.cli(Export, args=argv, prog="python -m experiments.hub")
    quiet()
    try:
        unquantized = write(settings)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if unquantized:
        print(
            "not in 8 bits, because it is a router, or 128 does not divide a weight or one fused with it: "
            f"{', '.join(unquantized)}",
            file=sys.stderr,
        )
    return 0


def write(settings: Export) -> list[str]:
    """Writes the checkpoint of a command line. Returns the result of `save.save`.

    Raises:
        UserError: an error that the user can fix.
    """
    if (settings.run is None) == (settings.model is None):
        raise UserError("pass either --run with --recipe, or --model")
    dtype = None if settings.dtype == "same" else jnp.dtype(settings.dtype)
    if not 0 < settings.shard_gb < math.inf:
        raise UserError(f"--shard-gb must be positive and finite, got {settings.shard_gb}")
    limit, activations = int(settings.shard_gb * 1e9), settings.activations
    eight = None if settings.eight == "none" else settings.eight
    if activations and eight in (None, "deepseek", "recipe-deepseek"):
        raise UserError("--activations requires --eight recipe, tensor, channel or block")
    if settings.run is not None:
        if settings.recipe is None:
            raise UserError("--run needs --recipe; pass one of the trained recipes")
        return export.from_run(
            settings.run,
            settings.recipe,
            settings.out,
            dtype=dtype,
            eight=eight,
            activations=activations,
            shard_bytes=limit,
        )
    assert settings.model is not None
    if settings.recipe is not None:
        raise UserError("--recipe requires --run; with --model, use --eight tensor, channel, block or deepseek")
    loaded = load.load(settings.model)
    encoding = None if eight is None else save.eight_bits(eight, activations=activations)
    return save.save(
        settings.out, loaded.config, loaded.params, like=loaded.folder, dtype=dtype, eight=encoding, shard_bytes=limit
    )


if __name__ == "__main__":
    sys.exit(main())
