"""Reads documents and conversations from text, JSON lines and parquet, each with its file and line.

A line of JSON, or a row of parquet, has a conversation in "messages" ([{"role": ..., "content": ...}, ...]), or a text
in the field of --field. Any other file is one text.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.errors import UserError
from experiments.files import parse_json, read_bytes
from experiments.text import data

LINES, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
MESSAGES = "messages"
_ROLES = ("system", "developer", "user", "assistant", "tool")


class TextRecord(NamedTuple):
    """A text, or a conversation.

    Attributes:
        where: FILE or FILE:LINE, for error messages.
        text: the text; None for a conversation.
        messages: messages of a conversation, for a chat template.
    """

    where: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()


def among(patterns: Sequence[str]) -> bool:
    """Returns whether any file of the patterns has records.

    Raises:
        UserError: see `data.find_files`.
    """
    return any(path.suffix in (*LINES, *PARQUET) for path, _ in data.find_files(patterns))


def read(patterns: Sequence[str], field: str) -> tuple[list[TextRecord], int, list[str]]:
    """Returns all records, the number of files, and names of files in folders and globs that are not text.

    Raises:
        UserError: a file cannot be read, or a line is empty, not JSON, or without conversation and field. The message
            has the file and the line.
    """
    records, skipped = list[TextRecord](), list[str]()
    files = data.find_files(patterns)
    for path, named in files:
        if path.suffix in LINES:
            records += _lines(path, field)
        elif path.suffix in PARQUET:
            records += _rows(path, field)
        elif (text := data.read_text(path)) is None:
            if named:
                raise UserError(f"--data {path}: the file is binary or not UTF-8; convert it, or exclude it")
            skipped.append(str(path))
        elif text.strip():
            records.append(TextRecord(str(path), text))
    if not records:
        raise UserError(f"--data {' '.join(patterns)}: there is no text or conversation in {len(files)} files")
    return records, len(files), skipped


def _lines(path: Path, field: str) -> Iterator[TextRecord]:
    try:
        text = read_bytes(path).decode()
    except OSError as error:
        raise UserError(f"--data: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line_number = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line_number}: not UTF-8 ({error.reason})") from None
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if not line.strip():
            if number == len(lines):
                return  # no line follows a final line break
            raise UserError(f"{where}: an empty line; each line is one JSON object: remove it")
        try:
            value = parse_json(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        yield record(value, field, where)


def _rows(path: Path, field: str) -> Iterator[TextRecord]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise UserError(f"--data {path}: parquet files need the package pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
        columns = [name for name in (MESSAGES, field) if name in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(columns=columns) if columns else ():
            for row in batch.to_pylist():
                number += 1
                yield record(row, field, f"{path}:{number}")
    except UserError:
        raise
    except Exception as error:  # errors of pyarrow, and OSError
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]})") from None
    if not columns:
        raise UserError(f"{path} has the columns {', '.join(file.schema_arrow.names)}: neither {MESSAGES} nor {field}")


def record(value: Any, field: str, where: str) -> TextRecord:
    """Converts the content of a line or row to a record.

    Raises:
        UserError: it has neither a conversation with an answer nor a text, or its text has a character without token.
    """
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected a JSON object, got {_shown(value, 60)}")
    messages = value.get(MESSAGES)
    if messages is None:
        text = value.get(field)
        if not isinstance(text, str) or not text:
            has = ", ".join(map(str, value)) or "nothing"
            description = "is empty" if text == "" else f"is {_shown(text, 40)}" if field in value else ""
            problem = (
                f"{field} {description}, not a text"
                if description
                else f"neither {MESSAGES} nor {field} (it has {has})"
            )
            raise UserError(f"{where}: {problem}; set --field to the name of the text field")
        _check_characters(text, f"{where}: {field}")
        return TextRecord(where, text)
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: {MESSAGES} is not a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise UserError(f"{where}: message {i} has no text as its content")
        _check_characters(message["content"], f"{where}: message {i}")
        if message.get("role") not in _ROLES:
            raise UserError(f"{where}: message {i} has the role {message.get('role')!r}; roles are {', '.join(_ROLES)}")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where}: no message has the role assistant, so there is no answer to train on")
    return TextRecord(where, None, tuple(messages))


def _shown(value: Any, max_length: int) -> str:
    try:
        return json.dumps(value, default=str)[:max_length]
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deep"


def _check_characters(text: str, where: str) -> None:
    if "\0" in text:
        raise UserError(f"{where} contains the character U+0000, which separates documents; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is not valid Unicode text ({error.reason})") from None
