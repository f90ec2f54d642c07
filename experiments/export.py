"""Writes a run of `experiments.train` as a Hugging Face checkpoint: weights, codes, configuration, tokenizer."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from flax import nnx

import fp8jax
from experiments import evaluate
from experiments.errors import UserError
from experiments.hub import save
from experiments.text.tokenizer import SEPARATOR, BytePair, Bytes, Tokenizer
from experiments.train import start
from fp8jax.modules.weights import WeightVariables


def from_run(
    run: Path,
    recipe: str,
    out: Path,
    *,
    dtype: jax.typing.DTypeLike | None,
    eight: str | None = None,
    activations: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> list[str]:
    """Writes the newest checkpoint of a recipe of a run.

    Args:
        run: folder of the run.
        recipe: one of its recipes.
        out: folder to write.
        dtype: dtype of written weights; None for that of the master weights.
        eight: 8-bit codes for linear layers. "recipe": those of the recipe's matmuls, with the scales in their states.
            "recipe-deepseek": the same in DeepSeek's format. Otherwise a name for `save.eight_bits`. None for 16 bits.
        activations, shard_bytes: arguments of `save.eight_bits` and `save.save`.

    Returns:
        The result of `save.save`.

    Raises:
        UserError: see `evaluate.load` and `save.save`.
    """
    trained = evaluate.load(run, recipe)
    config, encoding = trained.config, None
    if eight in ("recipe", "recipe-deepseek"):
        if config.lora.lora_rank:
            raise UserError(
                f"{run} trained adapters, which cannot be merged into the codes of the base. Export 16 bits, or new "
                "codes with --eight tensor, channel, block or deepseek"
            )
        recipe_encoding = save.from_recipe(trained.recipe, deepseek=eight != "recipe", activations=activations)
        encoding = dataclasses.replace(recipe_encoding, codes=prequantized_codes(trained))
    elif eight is not None:
        encoding = save.eight_bits(eight, activations=activations)
    settings: dict[str, Any] = {"dtype": dtype, "eight": encoding, "shard_bytes": shard_bytes}
    if config.model.init:
        # The run has the tokenizer and settings of its initial checkpoint.
        return save.save(out, trained.task.llama, trained.masters, like=start.resolve(config), **settings)
    length = config.data.seq_len
    fields = {"max_position_embeddings": length, "bos_token_id": SEPARATOR, "eos_token_id": SEPARATOR}
    extra_files = tokenizer_files(trained.tokenizer, length)
    return save.save(out, trained.task.llama, trained.masters, extra_files=extra_files, fields=fields, **settings)


def prequantized_codes(trained: evaluate.Trained) -> Mapping[str, fp8jax.QTensor]:
    """Returns the codes of the layers' matmuls, as bytes (..., outputs, inputs), by path of the weight."""

    def hold(params: Any, model_state: Any) -> dict[str, fp8jax.QTensor]:
        model = trained.task.model(params, model_state)
        prequantized = fp8jax.nnx.quantize_weights(model)
        codes_by_path = {}
        for path, module in nnx.iter_modules(prequantized):
            if isinstance(module, WeightVariables):
                *layer, _, _ = path  # the names of its product and of the codes
                codes_by_path[".".join([*map(str, layer), "kernel"])] = module.unflatten().forward
        return codes_by_path

    return jax.jit(hold)(trained.params, trained.model_state)


def tokenizer_files(tokenizer: Tokenizer, length: int) -> dict[str, str]:
    """Returns files for `tokenizers` and transformers that encode text to the ids of training.

    Raises:
        UserError: the tokenizer is of an unsupported kind.
    """
    if isinstance(tokenizer, BytePair):
        content = tokenizer.to_str()
    elif isinstance(tokenizer, Bytes):
        content = _bytes().to_str()
    else:
        raise UserError(f"tokenizer {type(tokenizer).__name__} has no files to export")
    separator = tokenizers.Tokenizer.from_str(content).id_to_token(SEPARATOR)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": separator,
        "eos_token": separator,
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        # The spelling of the separator inside a text is ordinary text.
        "split_special_tokens": True,
    }
    ids = {"bos_token_id": SEPARATOR, "eos_token_id": SEPARATOR}
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "generation_config.json": json.dumps(ids, indent=2) + "\n",
    }


def _bytes() -> tokenizers.Tokenizer:
    """Returns `Bytes` as a tokenizer of `tokenizers`: byte-pair encoding without pairs, with byte 0 before a text."""
    letters = _letters()
    model = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{letters[SEPARATOR]} $A", special_tokens=[(letters[SEPARATOR], SEPARATOR)]
    )
    return model


def _letters() -> list[str]:
    """Returns the library's letter of each byte: the character itself if printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    byte_offsets = np.cumsum([byte not in printable for byte in range(256)])
    return [chr(byte if byte in printable else 255 + int(byte_offsets[byte])) for byte in range(256)]
