"""Fills the places of written pages: a line `<!-- made: NAME ARGUMENT -->` stands for what `figures.MADE` gives."""

import pathlib
import re

from . import api, figures, packages

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLACE = re.compile(r"^<!-- made: (\w+) ?([\w.]*) -->$", re.MULTILINE)


def filled(text: str) -> str:
    """A page with its places filled.

    Raises:
        KeyError: nothing is made under a name; the message lists what is.
    """

    def made(found: re.Match[str]) -> str:
        name, argument = found.groups()
        if name not in figures.MADE:
            raise KeyError(f"nothing is made under {name!r}; there are {', '.join(figures.MADE)}")
        return figures.MADE[name](*([argument] if argument else []))

    return PLACE.sub(made, text)


def results() -> dict[str, str]:
    """RESULTS.md and its pages, with links and pictures as they are in docs/results."""
    front = (ROOT / "RESULTS.md").read_text()
    names = sorted(path.stem for path in (ROOT / "results" / "pages").glob("*.md"))
    tree = "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])
    pages = {"results/index.md": f"{front.replace('(results/pages/', '(')}\n{tree}\n"}
    for name in names:
        text = (ROOT / "results" / "pages" / f"{name}.md").read_text()
        text = text.replace("(../../RESULTS.md)", "(index.md)")
        pages[f"results/{name}.md"] = re.sub(r"\(\.\./(\w+/[\w-]+\.png)\)", r"(../../results/\1)", text)
    return pages


def changelog() -> dict[str, str]:
    return {"changelog.md": (ROOT / "CHANGELOG.md").read_text()}


def write() -> list[str]:
    """Writes all made pages into docs/, those alone that changed; returns their paths, relative to docs/."""
    made = api.written() | results() | changelog() | {"packages.svg": packages.picture()}
    for folder in ("api", "results"):
        for path in (DOCS / folder).glob("*.md"):
            if f"{folder}/{path.name}" not in made:
                path.unlink()
    for name, text in made.items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return sorted(made)
