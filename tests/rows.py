"""Rows of tables that tests are run for: those that are run each time, and the others, which are marked slow."""

import functools
from collections.abc import Iterable
from typing import Any

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def few(rows: Iterable[Any], *each_time: Any) -> list[Any]:
    """All rows, of which all but `each_time` are slow: what fails there fails in those, too, but for rare mistakes."""
    rows = list(rows)
    if unknown := [row for row in each_time if row not in rows]:
        raise ValueError(f"rows {unknown} are none of {rows}")
    return [row if row in each_time else slow(*(row if isinstance(row, tuple) else (row,))) for row in rows]
