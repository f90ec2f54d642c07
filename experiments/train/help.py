"""The output of `--help` of the training program: the options that most runs need, on one screen."""

from typing import Any

import fp8jax
from experiments.models import sizes
from experiments.train.sections import flag
from fp8jax.core.tables import sentence

HELP_ALL = "--help-all"
_PROGRAM = "python -m experiments.train"
# Field of the configuration, placeholder of its value, description.
ESSENTIAL = (
    ("recipe", "NAME ...", "recipes to train, one after the other; the first is the baseline"),
    ("data", "PATH ...", "text files, folders or globs, .jsonl or .parquet (sources of Python's standard library)"),
    ("model", "SIZE", "size of the Llama"),
    ("init", "DIR", "Hugging Face checkpoint to start from, in place of --model"),
    ("lora_rank", "N", "train adapters of this rank on an 8-bit base"),
    ("steps", "N", "updates of each recipe"),
    ("batch", "N", "sequences of a step"),
    ("seq_len", "N", "tokens of a sequence"),
    ("lr", "X", "peak learning rate"),
    ("mesh", "AXES", "devices by axis, such as data=2,fsdp=4; by default data parallel over all"),
    ("run", "NAME", "name of the run; its files are OUT/RUN"),
    ("out", "DIR", "folder of all runs"),
    ("resume", "auto|never", "never: move an old run of this name aside and start a new one"),
    ("verbose", "", "also print settings, memory and kernels, as in OUT/RUN/log.txt"),
)


def short_help(defaults: Any, description: str) -> str:
    """The essential options with their defaults.

    Args:
        defaults: a default `Config`.
        description: paragraphs; the first describes the program, the last has the exit codes.
    """
    first, *paragraphs = (" ".join(paragraph.split()) for paragraph in description.split("\n\n"))
    options = []
    for name, value, text in ESSENTIAL:
        default = _default(defaults, name)
        options.append((f"{flag(name)} {value}".rstrip(), text + (f" ({default})" if default else "")))
    options += [("--help-all", "all options")]
    width = max(len(option) for option, _ in options)
    lines = [
        f"usage: {_PROGRAM} [options]",
        sentence(first),
        "\n".join(sentence(f"  {option:{width}}  {text}", indent=width + 4) for option, text in options),
        sentence(f"Recipes: {', '.join(fp8jax.recipes.NAMES)}; auto picks one for the device.", indent=2),
        sentence(f"Sizes: {', '.join(sizes.NAMES)}.", indent=2),
        sentence(f"Example: {_PROGRAM} --recipe bf16 coat_optimizer --data 'corpus/*.txt' --run books", indent=2),
        *(sentence(paragraph, indent=2) for paragraph in paragraphs if paragraph.startswith("Exit codes")),
    ]
    return "\n\n".join(lines[:3]) + "\n\n" + "\n".join(lines[3:])


def _default(defaults: Any, name: str) -> str:
    """Returns the default of a field of any section, as on a command line, or "" if there is none."""
    # Sections first: some sections share a name with one of their fields.
    sections = (defaults.data, defaults.model, defaults.optim, defaults.lora, defaults.run, defaults)
    value = next(getattr(section, name) for section in sections if hasattr(section, name))
    if value is False or value in ("", (), 0, None):
        return ""
    return " ".join(value) if isinstance(value, tuple) else str(value)
