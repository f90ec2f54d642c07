"""Runs the Python blocks of Markdown pages, and checks the printed output that they state."""

import ast
import contextlib
import io
import re
from typing import Any

# A page's code that runs: blocks of python, and cells of a page that is a notebook.
BLOCK = re.compile(r"^```(?:python|\{code-cell\}[^\n]*)\n(?::[^\n]*\n)*(.*?)^```", re.MULTILINE | re.DOTALL)
TOLD = re.compile(r"^print\(.*\)  # (?!type:|noqa)(.+)$")


def blocks(text: str) -> list[str]:
    """Returns the code blocks of a page, in order."""
    return BLOCK.findall(text)


def run(code: str, name: str, namespace: dict[str, Any]) -> None:
    """Executes code; a line `print(...)  # text` at its left edge must print that text.

    Raises:
        AssertionError: it prints another; or whatever the code raises.
    """
    lines = code.split("\n")
    for node in ast.parse(code).body:
        source = "\n" * (node.lineno - 1) + "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if getattr(node, "decorator_list", None):
            first = node.decorator_list[0].lineno - 1
            source = "\n" * first + "\n".join(lines[first : node.end_lineno])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, name, "exec"), namespace)
        if match := TOLD.match(lines[node.end_lineno - 1]):
            assert printed.getvalue().strip() == match[1].strip(), f"{name}: {lines[node.end_lineno - 1]}"
