"""Evaluates a model that `experiments.train` trained: `python -m experiments.evaluate --help`.

    python -m experiments.evaluate --run runs/NAME --recipe te_current --data 'texts/*.txt'

Without --data the text is the run's own validation split. Exit codes: 0 done; 2 wrong input.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.errors import UserError
from experiments.files import parse_json, read_text
from experiments.packages import needed

with needed() as no_parser:
    import tyro

with needed() as missing:
    from rich.console import Console
    from rich.table import Table

    from experiments.models import scoring
    from experiments.text import data, records
    from experiments.train import report
    from experiments.train.checkpoint import quiet
    from experiments.train.trained import Trained as Trained
    from experiments.train.trained import load as load

_PROGRAM = "experiments.evaluate"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluate a trained model: perplexity of text, and multiple-choice accuracy."""

    run: Path
    """Folder of a run of experiments.train, such as runs/NAME."""
    recipe: str
    """Which of its recipes; the newest checkpoint is taken."""
    data: tuple[str, ...] = ()
    """Files, folders and globs of UTF-8 text, scored file by file."""
    choices: Path | None = None
    """Multiple-choice questions, a line each: {"context": TEXT, "choices": [TEXT, ...], "answer": INDEX}."""
    limit: int = 65_536
    """Most tokens that are scored of one text; 0 for all."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A context, its possible continuations, and the index of the right one."""

    context: str
    choices: tuple[str, ...]
    answer: int


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, evaluates, and returns the exit code."""
    if no_parser:
        return no_parser.report(_PROGRAM)
    settings = tyro.cli(Evaluation, args=argv, prog=f"python -m {_PROGRAM}")
    if missing:
        return missing.report(_PROGRAM)
    quiet()
    console = report.make_console()
    try:
        evaluate(settings, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def evaluate(settings: Evaluation, console: Console) -> dict[str, Any]:
    """Does what the command line asks for and prints it.

    Returns:
        What was printed: {"text": {name: Score}, "choices": {...}}, as far as asked for.

    Raises:
        UserError: something the user can put right.
    """
    if settings.limit < 0:
        raise UserError(f"--limit must be at least 0, got {settings.limit}")
    questions = None if settings.choices is None else read_questions(settings.choices)
    trained = load(settings.run, settings.recipe)
    linear = trained.recipe.linear
    console.print(
        f"{settings.run} {settings.recipe}, step {trained.step}; linear layers "
        f"{f'as {settings.recipe}' if linear.is_quantized else 'unquantized'}; "
        f"contexts of {trained.config.data.seq_len}"
    )
    figures: dict[str, Any] = {}
    scorer = scoring.score_sequences(trained.model)
    if settings.data or questions is None:
        figures["text"] = _print_texts(console, trained, scorer, read_texts(settings, trained), settings.limit)
    if questions is not None:
        figures["choices"] = _print_choices(console, trained, scorer, questions)
    return figures


def read_texts(settings: Evaluation, trained: Trained) -> dict[str, tuple[str, ...]]:
    """The texts to score by name, as documents: every file of --data, or the run's validation split.

    Raises:
        UserError: as `data.read_corpus`; files in folders and globs that are no text are passed over.
    """
    if not settings.data:
        if trained.config.model.init or records.among(trained.config.data.data):
            raise UserError("the run was trained on packed records; name texts to score with --data")
        corpus = data.read_corpus(trained.config.data.data, trained.config.data.valid_fraction)
        return {"validation split": corpus.valid}
    texts: dict[str, tuple[str, ...]] = {}
    for path, named in data.find_files(settings.data):
        try:
            corpus = data.read_corpus((str(path),), 0.5)
        except UserError:
            if named:
                raise
            continue
        texts[str(path)] = ("".join(corpus.train + corpus.valid),)
    if not texts:
        raise UserError(f"--data {' '.join(settings.data)}: no text in it")
    return texts


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSONL file.

    Raises:
        UserError: the file cannot be read, or a line is not as `Evaluation.choices` says; names file and line.
    """
    try:
        lines = read_text(path).split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"--choices {path} cannot be read ({error})") from None
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--choices {path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UserError(f"{where}: no JSON ({error})") from None
        if not isinstance(row, dict) or not {"context", "choices", "answer"} <= set(row):
            raise UserError(f'{where}: give an object with "context", "choices" and "answer"')
        context, choices, answer = row["context"], row["choices"], row["answer"]
        if not isinstance(context, str) or not isinstance(choices, list) or len(choices) < 2:
            raise UserError(f"{where}: context must be a text and choices a list of at least two")
        if not all(isinstance(choice, str) and choice for choice in choices):
            raise UserError(f"{where}: every choice must be a text that is not empty")
        if any("\0" in text for text in (context, *choices)):
            raise UserError(f"{where}: a text holds the character U+0000, which separates documents; remove it")
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
            raise UserError(f"{where}: answer must be the index of a choice, 0 to {len(choices) - 1}, got {answer!r}")
        questions.append(Question(context, tuple(choices), answer))
    if not questions:
        raise UserError(f"--choices {path}: no questions in it")
    return questions


def answer(trained: Trained, scorer: scoring.Scorer, questions: Sequence[Question]) -> list[tuple[int, int]]:
    """For each question the likeliest choice, by log-likelihood and by log-likelihood per byte.

    Raises:
        UserError: a choice is longer than a sequence of the model.
    """
    length = trained.config.data.seq_len
    pairs = []
    for question in questions:
        context = trained.tokenizer.encode([question.context])
        for choice in question.choices:
            continuation = trained.tokenizer.encode([choice])[1:]
            if len(continuation) > length:
                raise UserError(f"--choices: {choice[:40]!r} has {len(continuation)} tokens; the model takes {length}")
            pairs.append((context, continuation))
    scores = iter(scoring.score_continuations(scorer, trained.params, pairs, length))
    picked = []
    for question in questions:
        raw = np.array([next(scores) for _ in question.choices])
        per_byte = raw / [len(choice.encode()) for choice in question.choices]
        picked.append((int(raw.argmax()), int(per_byte.argmax())))
    return picked


def _print_texts(
    console: Console, trained: Trained, scorer: scoring.Scorer, texts: dict[str, tuple[str, ...]], limit: int
) -> dict[str, scoring.Score]:
    table = Table(title="perplexity", title_justify="left")
    table.add_column("text")
    for name in ("tokens", "scored", "loss", "perplexity", "bits/byte"):
        table.add_column(name, justify="right")
    scores, sizes = {}, {}
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


def _print_choices(
    console: Console, trained: Trained, scorer: scoring.Scorer, questions: Sequence[Question]
) -> dict[str, float]:
    picked = answer(trained, scorer, questions)
    count = len(questions)
    shares = {
        name: sum(pick[i] == q.answer for pick, q in zip(picked, questions, strict=True)) / count
        for i, name in enumerate(("accuracy", "accuracy, per byte"))
    }
    shares["chance"] = sum(1 / len(q.choices) for q in questions) / count
    table = Table(title=f"multiple choice, {count} questions", title_justify="left")
    table.add_column("measure")
    table.add_column("share", justify="right")
    table.add_column("standard error", justify="right")
    for name, share in shares.items():
        error = "" if name == "chance" else f"{math.sqrt(share * (1 - share) / count):.4f}"
        table.add_row(name, f"{share:.4f}", error)
    console.print(table)
    return shares


if __name__ == "__main__":
    sys.exit(main())
