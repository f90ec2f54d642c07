"""Logs the rows of a run to Weights & Biases."""

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.errors import UserError


def check(project: str) -> None:
    """Raises UserError if there is a project but the package wandb is not installed."""
    if project:
        try:
            importlib.import_module("wandb")
        except ModuleNotFoundError:
            raise UserError(f"--wandb {project} needs the package wandb: pip install wandb; or omit it") from None


@contextlib.contextmanager
def rows(project: str, folder: Path, settings: Mapping[str, Any]) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """Yields a function that logs a row of a recipe's run, or None without a project. Resumed runs continue.

    Args:
        project: name of the project, or "".
        folder: folder of the recipe, which identifies the run.
        settings: settings of the run.

    Raises:
        UserError: the service rejects the run.
    """
    if not project:
        yield None
        return
    wandb = importlib.import_module("wandb")
    name = f"{folder.parent.name}/{folder.name}"
    run_id = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    try:
        run = wandb.init(project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=dict(settings))
    except Exception as error:  # the package raises many types of errors
        raise UserError(f"--wandb {project}: {error}") from None
    try:
        yield lambda row: run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])
    finally:
        run.finish()
