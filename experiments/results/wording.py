"""Replaces old labels and notes of results files on pages, by `wording.toml`. The files themselves are not edited."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.results import figures

_WORDING = figures.read("wording.toml")
_LABELS = ("case", "impl", "metric", "unit", "baseline", "table")


def plain(text: str) -> str:
    """Returns a label or note with the words of `wording.toml` replaced."""
    for pattern, new in _WORDING["words"].items():
        text = re.sub(pattern, new, text)
    return text


def title(result: Mapping[str, Any]) -> str:
    """Returns the title of a results file as pages print it."""
    old: str = result.get("title", result["bench"])
    new: str = _WORDING["titles"].get(old, old)
    return new


def row(result_row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of a results file with plain labels. Its figures are the same."""
    labels = {name: plain(result_row[name]) for name in _LABELS if isinstance(result_row.get(name), str)}
    pivot = result_row.get("pivot")
    return {**result_row, **labels, "pivot": pivot and [plain(label) for label in pivot]}


def notes(old_notes: Sequence[str]) -> list[str]:
    """Returns the notes of a results file as pages print them, each once."""
    new_notes = list[str]()
    for old in old_notes:
        new = next((note["new"] for note in _WORDING["note"] if _matches(note, old)), None)
        new_notes += [plain(old)] if new is None else new.strip().split("\n")
    return [note for note in dict.fromkeys(new_notes) if note]


def _matches(note: Mapping[str, str], old: str) -> bool:
    return old.startswith(note["old"]) and note.get("has", "") in old
