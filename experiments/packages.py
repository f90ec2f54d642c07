"""Messages on missing packages. Imports only the standard library."""

import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OURS = ("experiments", "fp8jax", "pallas_kernels", "tests")
# Groups of pyproject.toml in search order; these programs need the second one.
_GROUPS, _HUB = ("train", "hub", "test", "hub-test"), ("generate", "hub")


def explain(error: ModuleNotFoundError, program: str) -> str | None:
    """Returns a message for the user, or None for a module of this project, which is a bug.

    Args:
        error: error of an import.
        program: name of the module that runs, such as "experiments.generate".
    """
    name = (error.name or "").partition(".")[0]
    if not name or name in _OURS or name in sys.stdlib_module_names:
        return None
    return f"{program} needs the package {name}, which is not installed: {install(name, program)}"


def install(name: str, program: str = "") -> str:
    """Returns the command that installs a package and its group in pyproject.toml."""
    groups = _requirements()
    if _has(groups.get("", ()), name):
        return "pip install -e ."
    first = 1 if program.rpartition(".")[2] in _HUB else 0
    for group in _GROUPS[first:]:
        if _has(groups.get(group, ()), name):
            return f"pip install --group {group} -e ."
    return f"pip install {name}"


def _has(requirements: Any, name: str) -> bool:
    # A module has the name of its package or of its first part, such as orbax of orbax-checkpoint.
    normalized_name = name.lower().replace("_", "-")
    return any(
        requirement == normalized_name or (normalized_name, requirement) == ("orbax", "orbax-checkpoint")
        for requirement in requirements
    )


@functools.cache
def _requirements() -> dict[str, tuple[str, ...]]:
    """Returns names of packages by group, "" for the library itself; empty outside of a clone."""
    try:
        content = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    except OSError:
        return {}
    groups = content["dependency-groups"]

    def names(entries: Any) -> Iterator[str]:
        for entry in entries:
            if isinstance(entry, dict):
                yield from names(groups[entry["include-group"]])
            else:
                yield re.split(r"[^A-Za-z0-9._-]", entry)[0].lower().replace("_", "-")

    return {"": tuple(names(content["project"]["dependencies"]))} | {k: tuple(names(v)) for k, v in groups.items()}
