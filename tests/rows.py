"""Rows of parametrized tests: those that always run, and others that are marked slow."""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def few(rows: Iterable[Any], *each_time: Any) -> list[Any]:
    """Returns all rows, and marks all but `each_time` slow. A failure of those usually also fails these."""
    rows = list(rows)
    if unknown := [row for row in each_time if row not in rows]:
        raise ValueError(f"rows {unknown} are none of {rows}")
    return [row if row in each_time else slow(*(row if isinstance(row, tuple) else (row,))) for row in rows]


def covering(*axes: Iterable[Any]) -> list[Any]:
    """Returns all combinations of some axes. A few, with every value of every axis, are not marked slow."""
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    # Each round of an axis begins one place further on than the axis before, so that pairs of short axes vary, too.
    each_time = {tuple((i + j * (i // len(axis))) % len(axis) for j, axis in enumerate(values)) for i in range(longest)}
    rows = itertools.product(*(range(len(axis)) for axis in values))
    picked = [(row, tuple(axis[i] for axis, i in zip(values, row, strict=True))) for row in rows]
    return [pytest.param(*row) if indices in each_time else slow(*row) for indices, row in picked]
