"""Text tables and sentences that fit the terminal's width."""

import functools
import re
import shutil
from collections.abc import Sequence

_GAP = 2
_MIN_COLUMN_WIDTH = 12  # columns


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
    if _total_width(_widths([head, *body])) <= 1.125 * width or not body:
        return "\n".join(_format_rows([head, *body], _fit_widths([head, *body], width)))
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in body:
        groups.setdefault(row[names:], []).append(row[:names])
    widths = _fit_widths([head[:names], *(row[:names] for row in body)], width)
    label = max(map(len, head[names:]))
    sections: list[str] = []
    for shared, names_of_group in groups.items():
        lines = _format_rows(names_of_group if sections else [head[:names], *names_of_group], widths)
        for title, cell in zip(head[names:], shared, strict=True):
            lines += _wrap(f"  {title:{label}}  {cell}", width, label + 4) if cell != "-" else []
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def sectioned_table(
    head: Sequence[str], sections: Sequence[tuple[str, Sequence[Sequence[str]]]], width: int | None = None
) -> str:
    """Rows below titles, in common columns. A cell that is too wide is wrapped.

    Args:
        sections: the title and the rows of each section, rows of as many cells as the head.
        width: maximal width in columns; None uses the terminal's.
    """
    width = terminal_width() if width is None else width
    indented = [[(f"  {row[0]}", *row[1:]) for row in rows] for _, rows in sections]
    rows = [tuple(head), *(row for section in indented for row in section)]
    widths = _fit_widths(rows, width)
    blocks = ["\n".join(_format_rows([tuple(head)], widths))]
    for (title, _), section in zip(sections, indented, strict=True):
        blocks.append("\n".join([*_wrap(title, width), *_format_rows(section, widths)]))
    return "\n".join(blocks)


def fold_paths(paths: Sequence[str]) -> list[str]:
    """Paths in the brace notation of a shell, such as `blocks/{0..23}/{q,k}`, in the order of their first members.

    The result stands for exactly these paths, each once.
    """
    # For the texts between the numbers of a path: the paths that have them, as sets of numbers for each position.
    patterns: dict[tuple[str, ...], list[list[tuple[str, ...]]]] = {}
    for path in dict.fromkeys(paths):
        pieces = re.split(r"(\d+)", path)
        patterns.setdefault(tuple(pieces[::2]), []).append([(number,) for number in pieces[1::2]])
    names_by_parent: dict[str, list[str]] = {}
    for pattern, number_sets in patterns.items():
        for i in range(len(pattern) - 1):
            number_sets = _merge_at_position(number_sets, i)
        for sets in number_sets:
            numbers = [*map(_braces, sets), ""]
            path = "".join(text + number for text, number in zip(pattern, numbers, strict=True))
            parent, separator, name = path.rpartition("/")
            # Braces are not nested.
            names_by_parent.setdefault(path if "{" in name else parent + separator, []).append(name)
    return [
        key if "{" in names[0] else key + (names[0] if len(names) == 1 else f"{{{','.join(names)}}}")
        for key, names in names_by_parent.items()
    ]


def _merge_at_position(number_sets: list[list[tuple[str, ...]]], position: int) -> list[list[tuple[str, ...]]]:
    """The entries of `number_sets`, with those joined that have the same numbers at all other positions."""
    merged: dict[tuple[tuple[str, ...], ...], tuple[str, ...]] = {}
    for sets in number_sets:
        rest = (*sets[:position], *sets[position + 1 :])
        merged[rest] = merged.get(rest, ()) + sets[position]
    return [[*rest[:position], numbers, *rest[position:]] for rest, numbers in merged.items()]


def _braces(numbers: Sequence[str]) -> str:
    """Numbers in braces, as ranges; a single number unchanged."""
    if len(numbers) == 1:
        return numbers[0]
    ordered = sorted(numbers, key=int)
    runs = [[ordered[0]]]
    for number in ordered[1:]:
        if number == str(int(runs[-1][-1]) + 1):
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(runs) == 1:
        return f"{{{ordered[0]}..{ordered[-1]}}}"
    return f"{{{','.join(run[0] if len(run) == 1 else f'{run[0]}..{run[-1]}' for run in runs)}}}"


def sentence(text: str, width: int | None = None, indent: int = 0) -> str:
    """A text in lines of at most `width` characters (None: the terminal's); later lines are indented."""
    return "\n".join(_wrap(text, terminal_width() if width is None else width, indent))


def _wrap(text: str, width: int, indent: int = 0) -> list[str]:
    """Lines of a text, broken at spaces; a longer word is broken after "/", "," or "_", or before a capital."""
    indent = min(indent, width // 2)
    lines = [" " * (len(text) - len(text.lstrip()))]
    for piece in re.findall(r"\S+\s*", text):
        if len(lines[-1] + piece.rstrip()) > width and lines[-1].strip():
            lines.append(" " * indent)
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            marks = [match.end() for match in re.finditer(r"[/,_]|[a-z](?=[A-Z])", lines[-1])]
            break_at = max((end for end in marks if indent + 1 < end <= width), default=width)
            lines[-1:] = [lines[-1][:break_at], " " * indent + lines[-1][break_at:]]
    return [line.rstrip() for line in lines]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _fit_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Column widths that fit, at which the table has few lines."""
    # Small steps share the missing columns out; one large step takes them all from one column.
    return min((_narrow(rows, width, step) for step in (1, width)), key=functools.partial(_num_lines, rows))


def _narrow(rows: Sequence[Sequence[str]], width: int, step: int) -> list[int]:
    """Column widths that fit. Each time the column whose narrowing adds the fewest lines is narrowed."""
    widths = _widths(rows)
    while _total_width(widths) > width and max(widths) > 4:
        # Short cells, such as a number with its unit, are broken last.
        is_short = max(widths) <= _MIN_COLUMN_WIDTH
        candidates = []
        for i, old in enumerate(widths):
            if is_short or old > _MIN_COLUMN_WIDTH:
                new = old - 1 if is_short else max(_MIN_COLUMN_WIDTH, old - min(step, _total_width(widths) - width))
                candidates.append([*widths[:i], new, *widths[i + 1 :]])
        widths = min(candidates, key=lambda item: (_num_lines(rows, item), max(item)))
    return widths


def _num_lines(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> int:
    return sum(max(map(len, _wrap_row(row, widths))) for row in rows)


def _wrap_row(row: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
    """The lines of each cell. The last cell with a text extends over the empty ones after it."""
    last = max((i for i, cell in enumerate(row) if cell), default=0)
    widths = [*widths[:last], _total_width(widths[last:]), *widths[last + 1 :]]
    # Later lines of a cell are indented as its first one.
    return [_wrap(cell, width, len(cell) - len(cell.lstrip())) for cell, width in zip(row, widths, strict=True)]


def _format_rows(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    lines = []
    for row in rows:
        cells = _wrap_row(row, widths)
        for i in range(max(map(len, cells))):
            line = (" " * _GAP).join(
                (cell[i] if i < len(cell) else "").ljust(width) for cell, width in zip(cells, widths, strict=True)
            )
            lines.append(line.rstrip())
    return lines
