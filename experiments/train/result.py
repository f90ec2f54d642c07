"""The result of a finished recipe, and a reader that validates its file."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.files import parse_json, read_text

# Number of newest rows of the log in a checkpoint; a result does not depend on older rows.
RECENT = 50


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a finished recipe, which is stored in result.json.

    Attributes:
        recipe: name of the recipe.
        steps: updates applied.
        parameters: number of parameters.
        train_loss: mean of the last tenth of the steps (at most `RECENT`), nats per token.
        valid_loss: validation loss after the last step, nats per token.
        state_bytes: `fp8jax.state_bytes` of the optimizer.
        tokens_per_s: median over the last `RECENT` steps; compilation, validation and checkpoints excluded.
        text: sample of the trained model.
    """

    recipe: str
    steps: int
    parameters: int
    train_loss: float
    valid_loss: float
    state_bytes: Mapping[str, int]
    tokens_per_s: float
    text: str


def read_result(path: Path) -> tuple[Result, dict[str, Any]]:
    """Returns the content of result.json: the result and its configuration.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the content is not a valid result; the message has the reason.
    """
    saved = parse_json(read_text(path))
    if not isinstance(saved, dict) or not isinstance(saved.get("config"), dict):
        raise ValueError("it contains no configuration")
    fields = saved.get("result")
    if not isinstance(fields, dict) or set(fields) != {field.name for field in dataclasses.fields(Result)}:
        raise ValueError("it does not have the fields of a result")
    state_bytes = fields["state_bytes"]
    counts: dict[str, Any] = state_bytes if isinstance(state_bytes, dict) else {"state_bytes": state_bytes}
    counts = {name: fields[name] for name in ("steps", "parameters")} | {"mu": None, "nu": None} | counts
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}, not a count")
    for name in ("train_loss", "valid_loss", "tokens_per_s"):
        if type(fields[name]) not in (int, float) or not math.isfinite(fields[name]):
            raise ValueError(f"{name} is {fields[name]!r}, not a finite number")
    for name in ("recipe", "text"):
        if not isinstance(fields[name], str):
            raise ValueError(f"{name} is {fields[name]!r}, not a text")
    return Result(**fields), saved["config"]
