"""Generates text with a Hugging Face checkpoint: `python -m experiments.generate --help`.

    python -m experiments.generate --model DIR --prompt 'Once upon a time' --temperature 0.8 --top-p 0.95

Text goes to standard output, the time to standard error. Exit codes: 0 done; 2 wrong input.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
import tyro

from experiments.errors import UserError
from experiments.hub import load, tokenizer
from experiments.models import sampling


@dataclasses.dataclass(frozen=True)
class Generation:
    """Continue a text with a Hugging Face model."""

    model: str
    """Folder of the checkpoint, or its name in the local cache."""
    prompt: str
    """Text to continue. The checkpoint's tokenizer adds its start token, if any."""
    tokens: int = 128
    """Maximum number of tokens to generate."""
    temperature: float = 0.0
    """Divisor of logits; 0 always selects the most probable token."""
    top_k: int = 0
    """Sample from this number of most probable tokens; 0 for all."""
    top_p: float = 1.0
    """Sample from the most probable tokens with this total probability."""
    seed: int = 0
    """Random seed; equal seeds give equal texts."""
    samples: int = 1
    """Number of texts, generated as one batch."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Dtype of parameters and computation."""
    ignore_end: bool = False
    """Continue after an end-of-text token."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, writes, and returns the exit code."""
    settings = tyro.cli(Generation, args=argv, prog="python -m experiments.generate")
    try:
        for text in generate(settings):
            print(text)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def generate(settings: Generation) -> list[str]:
    """Generates the texts of the command line, including the prompt.

    Raises:
        UserError: an error that the user can fix.
    """
    if settings.tokens < 1 or settings.samples < 1:
        raise UserError(f"--tokens and --samples must be at least 1, got {settings.tokens} and {settings.samples}")
    if not -(2**63) <= settings.seed < 2**63:
        raise UserError(f"--seed must fit in 64 bits, got {settings.seed}")
    choice = sampling.TokenChoice(settings.temperature, settings.top_k, settings.top_p)
    try:
        choice.validate()
    except ValueError as error:
        raise UserError(str(error)) from None
    try:
        settings.prompt.encode()
    except UnicodeEncodeError:
        raise UserError("--prompt cannot be encoded; pass it in UTF-8") from None
    loaded = load.load(settings.model, dtype=jnp.dtype(settings.dtype))
    spelled = tokenizer.read(loaded.folder, loaded.config.vocab)
    ids = spelled.encode(settings.prompt).ids
    if not ids:
        raise UserError("--prompt is empty, and the tokenizer adds no token before a text; pass at least one character")
    stop = () if settings.ignore_end else tokenizer.ends(loaded.folder)
    start = time.perf_counter()
    try:
        texts = sampling.extend(
            loaded.model(settings.dtype),
            np.tile(np.asarray(ids, np.int32), (settings.samples, 1)),
            len(ids) + settings.tokens,
            choice,
            seed=settings.seed,
            stop=stop,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    count = sum(len(text) - len(ids) for text in texts)
    print(f"{count} tokens in {time.perf_counter() - start:.1f} s, compilation included", file=sys.stderr)
    # Omits start and end tokens. The rest is decoded together, because spaces depend on previous tokens.
    plain = spelled.encode(settings.prompt, add_special_tokens=False).ids
    first = len(ids) - len(plain) if ids[len(ids) - len(plain) :] == plain else 0
    return [spelled.decode(text[first : -1 if text[-1] in stop else None]) for text in texts]


if __name__ == "__main__":
    sys.exit(main())
