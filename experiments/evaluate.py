"""Evaluates a model that `experiments.train` trained: `python -m experiments.evaluate --help`.

    python -m experiments.evaluate --run runs/NAME --recipe te_current --data 'texts/*.txt'

Without --data the text is the run's own validation split. Exit codes: 0 done; 2 wrong input.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from experiments.errors import UserError
from experiments.models import scoring
from experiments.text import data, records
from experiments.train import report
from experiments.train.checkpoint import quiet
from experiments.train.trained import Trained as Trained
from experiments.train.trained import load as load


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluate a trained model: loss and perplexity of text."""

    run: Path
    """Folder of a run of experiments.train, such as runs/NAME."""
    recipe: str
    """Recipe of the run; its newest checkpoint is evaluated."""
    data: tuple[str, ...] = ()
    """Files, folders and globs of UTF-8 text, scored file by file."""
    limit: int = 65_536
    """Maximum number of scored tokens per text; 0 for all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, evaluates, and returns the exit code."""
    settings = tyro.cli(Evaluation, args=argv, prog="python -m experiments.evaluate")
    quiet()
    console = report.make_console()
    try:
        evaluate(settings, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def evaluate(settings: Evaluation, console: Console) -> dict[str, scoring.Score]:
    """Evaluates the texts of a command line and prints their scores.

    Returns:
        Scores by name of a text.

    Raises:
        UserError: an error that the user can fix.
    """
    if settings.limit < 0:
        raise UserError(f"--limit must be at least 0, got {settings.limit}")
    trained = load(settings.run, settings.recipe)
    linear = trained.recipe.linear
    console.print(
        f"{settings.run} {settings.recipe}, step {trained.step}; linear layers "
        f"{f'as {settings.recipe}' if linear.is_quantized else 'unquantized'}; "
        f"contexts of {trained.config.data.seq_len}"
    )
    return _print_texts(console, trained, read_texts(settings, trained), settings.limit)


def read_texts(settings: Evaluation, trained: Trained) -> dict[str, tuple[str, ...]]:
    """Returns the texts to score by name, as documents: every file of --data, or the run's validation split.

    Files in folders and globs that are not text are skipped.

    Raises:
        UserError: see `data.read_corpus`.
    """
    if not settings.data:
        if trained.config.model.init or records.among(trained.config.data.data):
            raise UserError("the run was trained on packed records; pass texts to score with --data")
        corpus = data.read_corpus(trained.config.data.data, trained.config.data.valid_fraction)
        return {"validation split": corpus.valid}
    texts: dict[str, tuple[str, ...]] = {}
    for path, is_named in data.find_files(settings.data):
        try:
            corpus = data.read_corpus((str(path),), 0.5)
        except UserError:
            if is_named:
                raise
            continue
        texts[str(path)] = ("".join(corpus.train + corpus.valid),)
    if not texts:
        raise UserError(f"--data {' '.join(settings.data)}: no text in it")
    return texts


def _print_texts(
    console: Console, trained: Trained, texts: dict[str, tuple[str, ...]], limit: int
) -> dict[str, scoring.Score]:
    table = Table(title="perplexity", title_justify="left")
    table.add_column("text")
    for name in ("tokens", "scored", "loss", "perplexity", "bits/byte"):
        table.add_column(name, justify="right")
    scores, sizes, scorer = {}, {}, scoring.score_sequences(trained.model)
    for name, documents in texts.items():
        tokens = trained.tokenizer.encode(documents)
        shown = tokens[: limit + 1] if limit else tokens
        scores[name] = scoring.score_text(scorer, trained.params, scoring.cut(shown, trained.config.data.seq_len))
        sizes[name] = len(trained.tokenizer.decode(shown[1:].tolist()).encode())
        _add(table, name, len(tokens) - 1, scores[name], sizes[name])
    if len(texts) > 1:
        together = scoring.Score(sum(s.nll for s in scores.values()), sum(s.tokens for s in scores.values()))
        table.add_section()
        _add(table, "together", together.tokens, together, sum(sizes.values()))
        scores["together"] = together
    console.print(table)
    return scores


def _add(table: Table, name: str, tokens: int, score: scoring.Score, size: int) -> None:
    bits = score.nll / math.log(2) / size
    table.add_row(
        name, f"{tokens:,}", f"{score.tokens:,}", f"{score.loss:.4f}", f"{score.perplexity:.4f}", f"{bits:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
