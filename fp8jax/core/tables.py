"""Text tables and sentences that fit the terminal's width."""

import re
import shutil
from collections.abc import Sequence

_GAP = 2


def terminal_width() -> int:
    """Columns of the terminal: `COLUMNS` if set, else the terminal's own, else 80; at least 20."""
    return max(20, shutil.get_terminal_size().columns)


def table(rows: Sequence[Sequence[str]], names: int, width: int | None = None) -> str:
    """Rows as a text table. If it is much too wide, cells that rows share are written once below them, except "-".

    Args:
        rows: rows of equally many cells; the first is the head.
        names: number of leading columns that identify a row. In a table that is too wide, rows that are equal in the
            other columns form a group.
        width: maximal width in columns; None uses the terminal's.

    Returns:
        Lines of at most `width` characters, if it is 40 or more.
    """
    width = terminal_width() if width is None else width
    head, *body = [tuple(row) for row in rows]
    full_widths = _widths([head, *body])
    if _total_width(full_widths) <= 1.125 * width or not body:
        return "\n".join(_format_rows([head, *body], _fit_widths(full_widths, width)))
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in body:
        groups.setdefault(row[names:], []).append(row[:names])
    widths = _fit_widths(_widths([head[:names], *(row[:names] for row in body)]), width)
    label = max(map(len, head[names:]))
    sections: list[str] = []
    for shared, names_of_group in groups.items():
        lines = _format_rows(names_of_group if sections else [head[:names], *names_of_group], widths)
        for title, cell in zip(head[names:], shared, strict=True):
            lines += _wrap(f"  {title:{label}}  {cell}", width, label + 4) if cell != "-" else []
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def sentence(text: str, width: int | None = None, indent: int = 0) -> str:
    """A text in lines of at most `width` characters (None: the terminal's); later lines are indented."""
    return "\n".join(_wrap(text, terminal_width() if width is None else width, indent))


def _wrap(text: str, width: int, indent: int = 0) -> list[str]:
    """Lines of a text, broken at spaces; a word that is too long is broken after "/", "," or "_"."""
    indent = min(indent, width // 2)
    lines = [" " * (len(text) - len(text.lstrip()))]
    for piece in re.findall(r"\S+\s*", text):
        if len(lines[-1] + piece.rstrip()) > width and lines[-1].strip():
            lines.append(" " * indent)
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            break_at = max(lines[-1].rfind(mark, indent + 1, width) for mark in "/,_") + 1 or width
            lines[-1:] = [lines[-1][:break_at], " " * indent + lines[-1][break_at:]]
    return [line.rstrip() for line in lines]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _fit_widths(widths: Sequence[int], width: int) -> list[int]:
    """Column widths, with the widest shrunk until all fit."""
    widths = list(widths)
    while _total_width(widths) > width and max(widths) > 4:
        widths[widths.index(max(widths))] -= 1
    return widths


def _format_rows(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    lines = []
    for row in rows:
        cells = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for i in range(max(map(len, cells))):
            line = (" " * _GAP).join(
                (cell[i] if i < len(cell) else "").ljust(width) for cell, width in zip(cells, widths, strict=True)
            )
            lines.append(line.rstrip())
    return lines
