"""Cases for the kernel that quantizes groups of rows, which is compared with NumPy and ml_dtypes on a CPU and a GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.ops.quantization.grouped import quantize_groups

FORMATS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0), "int8": (np.int8, 127.0)}


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of groups; each is a row of x (T, N)."""

    sizes: tuple[int, ...]
    num_rows: int
    shape: tuple[int, int]  # of x
    rows: str | None = None
    columns: str | None = None
    has_index: bool = False
    dtype: str = "bfloat16"
    by_row: bool = False  # scales per row and per group, instead of one scale
    is_copy: bool = False
    has_factor: bool = False  # of each row, for columns


CASES = [
    Case((100, 0, 1, 140), 241, (241, 72), "e4m3", "e4m3", by_row=True),
    Case((0, 129, 3), 140, (35, 200), "e4m3", "e5m2", has_index=True, by_row=True),
    Case((60, 70), 133, (133, 33), None, "int8", dtype="float32"),
    Case((5, 0), 7, (4, 130), "int8", None, has_index=True, by_row=True),
    Case((30, 128, 0, 20), 200, (50, 136), None, "e5m2", has_index=True, is_copy=True),
    Case((130, 0, 20), 151, (40, 72), "e4m3", "e4m3", has_index=True, is_copy=True, has_factor=True),
    Case((3, 2), 5, (5, 40), None, "e5m2", is_copy=True, has_factor=True),
    Case((0, 0), 3, (3, 64), "e5m2", "e4m3"),
]


def arguments(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=case.shape) * np.exp2(rng.integers(-9, 9, (case.shape[0], 1)))
    if case.is_copy:
        x = jnp.asarray(x.astype(FORMATS[case.columns or ""][0])).at[1, 2].set(jnp.nan)
    else:
        x = jnp.asarray(x, case.dtype)
        x = x if "int8" in (case.rows, case.columns) else x.at[1, 2].set(jnp.nan).at[2, 3].set(1e30)
    groups = len(case.sizes)
    scales = [np.exp(rng.normal(size=n if case.by_row else ())).astype(np.float32) for n in (case.num_rows, groups)]
    if case.by_row:
        scales[0][sum(case.sizes) :] = np.nan  # scales of no group
    return {
        "x": x,
        "sizes": jnp.asarray(case.sizes, jnp.int32),
        "index": jnp.asarray(rng.integers(0, case.shape[0], case.num_rows), jnp.int32) if case.has_index else None,
        "row_scale": jnp.asarray(scales[0]) if case.rows and not case.is_copy else None,
        "column_scale": jnp.asarray(scales[1]) if case.columns and not case.is_copy else None,
        "row_factor": jnp.asarray(np.exp2(-rng.integers(0, 12, case.num_rows)), jnp.float32)
        if case.has_factor
        else None,
    }


def encode(x: np.ndarray, fmt: str, scale: Any) -> np.ndarray:
    """Returns codes of x (rows, N) with a scale per row, as bytes."""
    dtype, largest = FORMATS[fmt]
    with np.errstate(over="ignore", invalid="ignore"):
        y = x.astype(np.float32) * (np.float32(1) / np.asarray(scale, np.float32))[..., None]
        y = np.clip(y, -largest, largest)
        return (np.rint(y) if fmt == "int8" else y).astype(dtype).view(np.uint8)


def expected(
    case: Case, tokens: int, x: np.ndarray, index: Any, row_scale: Any, column_scale: Any, row_factor: Any
) -> tuple[Any, Any]:
    """Returns codes of the rows of groups, and transposed codes on a token axis of this length, as bytes, group by
    group."""
    n, ordered = case.shape[1], x if index is None else x[np.asarray(index)]
    row_codes, total = None, sum(case.sizes)
    if case.rows and case.is_copy:
        row_codes = ordered[:total].view(np.uint8)
    elif case.rows:
        row_codes = encode(ordered[:total], case.rows, np.broadcast_to(row_scale, case.num_rows)[:total])
    column_codes, token, row = np.zeros((n, tokens), np.uint8), 0, 0
    for group, size in enumerate(case.sizes):
        values = ordered[row : row + size]
        if row_factor is not None:
            values = encode(
                values.astype(np.float32) * np.asarray(row_factor)[row : row + size, None], case.columns, np.ones(size)
            )
            values = values.view(ordered.dtype)
        if case.columns:
            scale = None if case.is_copy else np.broadcast_to(column_scale, len(case.sizes))[group]
            codes = values.view(np.uint8) if case.is_copy else encode(values, case.columns, np.full(size, scale))
            column_codes[:, token : token + size] = codes.T
        token, row = token + -(-size // 128) * 128, row + size
    return row_codes, column_codes if case.columns else None


@functools.partial(jax.jit, static_argnums=1)
def make_tokens(sizes: jax.Array, num_rows: int) -> PaddedTokens:
    return PaddedTokens.from_groups(Groups.from_sizes(sizes, num_rows), num_rows)


def wrong(case: Case, impl: str) -> dict[str, int]:
    """Returns the number of differing elements of each result."""
    kwargs = arguments(case)
    tokens, x = make_tokens(kwargs.pop("sizes"), case.num_rows), kwargs.pop("x")
    codes = expected(case, tokens.length, np.asarray(x), **kwargs)
    results = quantize_groups(x, tokens, rows=case.rows, columns=case.columns, impl=impl, **kwargs)
    differ = {}
    for name, fmt, actual, want in zip(("rows", "columns"), (case.rows, case.columns), results, codes, strict=True):
        if want is None:
            differ[name] = int(actual is not None)
            continue
        assert actual.dtype == FORMATS[fmt][0]
        actual = np.asarray(actual)[: len(want)]
        is_nan = np.isnan(actual.astype(np.float32)) & np.isnan(want.view(FORMATS[fmt][0]).astype(np.float32))
        differ[name] = int(np.sum((actual.view(np.uint8) != want) & ~is_nan)) if actual.shape == want.shape else -1
    return differ
