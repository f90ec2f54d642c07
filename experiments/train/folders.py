"""The folder of a run: its configuration, its tokenizer, and its progress."""

from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.errors import DiskError, UserError
from experiments.files import parse_json, read_text
from experiments.text import data
from experiments.text.tokenizer import BytePair, Bytes, Tokenizer
from experiments.train import start
from experiments.train.config import Config, check_same


def has_progress(folder: Path) -> bool:
    """Returns whether a run has a complete checkpoint or a finished recipe to resume from."""
    return any(folder.glob("*/result.json")) or any(p.name.isdigit() for p in folder.glob("*/checkpoints/*"))


def read_config(folder: Path) -> dict[str, Any]:
    try:
        saved = parse_json(read_text(folder / "config.json"))
        if not isinstance(saved, dict):
            raise ValueError("it is not a JSON object")
        return saved
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / 'config.json'} cannot be read ({error}); restart the run with --resume never"
        ) from None


def prepare(config: Config, console: Console) -> None:
    """Creates the run's folder. Rejects a folder with another configuration, or moves an old one aside if requested."""
    folder = config.folder
    if config.run.resume == "never" and folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.old{number}")).exists():
            number += 1
        try:
            folder.rename(aside)
        except OSError as error:
            raise DiskError(
                f"{folder} cannot be moved to {aside} ({error.strerror or error}); make {folder.parent} writable, or "
                "use another --out"
            ) from None
        console.print(f"moved the old run to {aside}")
    if has_progress(folder):
        check_same(read_config(folder), config.mathematics(), folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run {config.run.run}: cannot create {folder}: {error.strerror}") from None


def get_tokenizer(config: Config, corpus: data.Corpus) -> Tokenizer:
    """Returns a tokenizer of bytes, of the checkpoint, or of the run. Trains the latter if the run has no progress."""
    if config.model.init or config.data.tokenizer == "bytes" or has_progress(config.folder):
        return load_tokenizer(config, config.folder)
    tokenizer = BytePair.train(corpus.train, config.data.vocab)
    tokenizer.save(config.folder / "tokenizer.json")
    return tokenizer


def load_tokenizer(config: Config, folder: Path) -> Tokenizer:
    """Returns a tokenizer of bytes, of the checkpoint, or from the folder of a run."""
    if config.model.init:
        return start.tokenizer(config)
    return Bytes() if config.data.tokenizer == "bytes" else BytePair.load(folder / "tokenizer.json")
