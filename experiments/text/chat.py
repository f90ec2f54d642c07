"""Formats conversations by the chat template of a checkpoint, and finds the answers in the text."""

import datetime
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.errors import UserError
from experiments.files import parse_json, read_text


class Template:
    """The chat template of a checkpoint.

    Args:
        folder: folder of the checkpoint, with the template in chat_template.jinja or tokenizer_config.json.

    Raises:
        UserError: the template is missing or invalid, or the package jinja2 is missing.
    """

    def __init__(self, folder: Path) -> None:
        settings = read_settings(folder)
        source, text = folder / "chat_template.jinja", settings.get("chat_template")
        if source.exists():
            try:
                text = read_text(source)
            except (OSError, ValueError) as error:
                raise UserError(f"{source} cannot be read ({error})") from None
        if isinstance(text, list):  # several named templates
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
        """Returns the text of a conversation; with `ask`, up to the start of the assistant's next message.

        Raises:
            UserError: the template rejects it. The message has the place of the conversation.
        """
        try:
            text: str = self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=ask, tools=None, **self._tokens
            )
        except Exception as error:  # errors of jinja2, and errors that templates raise
            raise UserError(f"{place}: the chat template rejects it ({error})") from None
        return text

    def spans(self, messages: Sequence[Mapping[str, Any]], place: str) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and the spans of the assistant's messages, including their end tokens.

        Raises:
            UserError: see `render`; or the start of an answer is unknown, because the template formats earlier messages
                differently if a further message follows.
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
    """Reads tokenizer_config.json; empty if it does not exist.

    Raises:
        UserError: the file cannot be read.
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
    """Returns the spelling of a token in tokenizer_config.json, such as "bos_token"."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _answers(jinja2: Any) -> Any:
    """Returns an extension for the tag {% generation %}, which marks answers. Its content is unchanged."""

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
