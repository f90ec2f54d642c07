"""Conversations as text, by the template of a checkpoint, and where its answers are in it."""

import datetime
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.errors import UserError
from experiments.files import parse_json, read_text


class Template:
    """The template of conversations of a checkpoint.

    Args:
        folder: of the checkpoint; its template is chat_template.jinja, or stands in tokenizer_config.json.

    Raises:
        UserError: there is none, or it is no template; or the package jinja2 is missing.
    """

    def __init__(self, folder: Path) -> None:
        settings = read_settings(folder)
        source, text = folder / "chat_template.jinja", settings.get("chat_template")
        if source.exists():
            try:
                text = read_text(source)
            except (OSError, ValueError) as error:
                raise UserError(f"{source} cannot be read ({error})") from None
        if isinstance(text, list):  # several, by name
            several = [x for x in text if isinstance(x, dict)]
            text = next((x.get("template") for x in several if x.get("name") == "default"), None)
        if not isinstance(text, str):
            raise UserError(f"{folder} has no chat template; use texts, or a checkpoint with a chat template")
        try:
            jinja2 = importlib.import_module("jinja2")
            sandbox = importlib.import_module("jinja2.sandbox")
            importlib.import_module("jinja2.ext")
        except ModuleNotFoundError:
            raise UserError("conversations need the package jinja2: pip install jinja2") from None
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _answers(jinja2)]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise UserError(f"{folder}: its chat template is not valid ({error})") from None
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        self._tokens = {name: token for name in names if (token := token_of(settings, name)) is not None}

    def render(self, messages: Sequence[Mapping[str, Any]], place: str, *, ask: bool = False) -> str:
        """The text of a conversation; with `ask`, up to where the assistant's next message begins.

        Raises:
            UserError: the template refuses it, with the place that it is from.
        """
        try:
            text: str = self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=ask, tools=None, **self._tokens
            )
        except Exception as error:  # of jinja2, and what templates raise
            raise UserError(f"{place}: the chat template rejects it ({error})") from None
        return text

    def spans(self, messages: Sequence[Mapping[str, Any]], place: str) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the spans of the assistant's messages, including their end tokens.

        Raises:
            UserError: as `render`; or the template writes the beginning of a conversation otherwise when it goes on, so
                that no one can say where an answer begins.
        """
        text, answer_spans = self.render(messages, place), []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = self.render(messages[:i], place, ask=True)
            end = text if i == len(messages) - 1 else self.render(messages[: i + 1], place)
            if not (end.startswith(start) and text.startswith(end)):
                raise UserError(
                    f"{place}: the chat template formats the messages before message {i} differently if message {i} "
                    "follows, so its start is unknown. End the conversation after one answer, or use texts"
                )
            answer_spans.append((len(start), len(end)))
        return text, answer_spans


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty where there is none.

    Raises:
        UserError: it cannot be read.
    """
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        settings = parse_json(read_text(path))
        if not isinstance(settings, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    return settings


def token_of(settings: Mapping[str, Any], name: str) -> str | None:
    """The spelling of a token that tokenizer_config.json names, as "bos_token"."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _answers(jinja2: Any) -> Any:
    """The tag {% generation %}, with which some templates mark answers: what is in it stays as it is."""

    class Answers(jinja2.ext.Extension):  # type: ignore[misc, name-defined]
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Answers


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **settings: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **settings)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
