"""The public names, each of which has a page and an example: what `dir` shows of the public modules."""

import inspect
import pathlib
import re
from typing import Any, NamedTuple

import fp8jax

SPACES = {"fp8jax": fp8jax} | {
    f"fp8jax.{name}": getattr(fp8jax, name) for name in dir(fp8jax) if inspect.ismodule(getattr(fp8jax, name))
}
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
_IMPORTS = (
    (r"\bdataclasses\.", "import dataclasses"),
    (r"\bfunctools\.", "import functools"),
    (r"\bjax\.(?!numpy)", "import jax"),
    (r"\bjnp\.", "import jax.numpy as jnp"),
    (r"\bnp\.", "import numpy as np"),
    (r"\boptax\.", "import optax"),
    (r"\bnn\.", "from flax import linen as nn"),
    (r"\bnnx\.", "from flax import nnx"),
)


class Name(NamedTuple):
    """A public name.

    Attributes:
        space: the module that users take it from.
        name: its name there.
        value: what it is.
    """

    space: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        return f"{self.space}.{self.name}"


def public() -> list[Name]:
    """All public names, by module and alphabet; the modules themselves have pages that list theirs."""
    found = []
    for space, module in SPACES.items():
        for name in sorted(name for name in dir(module) if not name.startswith("_")):
            value = getattr(module, name)
            if not inspect.ismodule(value):
                found.append(Name(space, name, value))
    return found


class Example(NamedTuple):
    """What is said of a name in `docs/examples`: words, which may be empty, and code that runs as it stands."""

    words: str
    code: str


def examples() -> dict[str, Example]:
    """The examples by path of the name; a heading of a file may give several names, with commas between them.

    Raises:
        ValueError: a name has two examples, or a section has no code.
    """
    found: dict[str, Example] = {}
    for file in sorted(EXAMPLES.glob("*.md")):
        for section in re.split(r"^## ", file.read_text(), flags=re.MULTILINE)[1:]:
            heading, _, body = section.partition("\n")
            words, fence, rest = body.partition("```python\n")
            if not fence:
                raise ValueError(f"{file.name}: no code under {heading!r}")
            code = rest.split("```")[0]
            imports = [line for pattern, line in _IMPORTS if re.search(pattern, code) and line not in code]
            whole = "\n".join([*imports, *([""] if imports else []), "import fp8jax", "", code.strip()]) + "\n"
            for path in re.split(r",\s*", heading.strip()):
                if path in found:
                    raise ValueError(f"{file.name}: two examples of {path}")
                found[path] = Example(words.strip(), whole.replace("PRESET", path.rpartition(".")[2]))
    return found
