"""Grouped matrix products: kernels against float64 NumPy, rows of other groups and of no group, races,
spills, errors."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.matmul import grouped_block_mosaic, grouped_int8_mosaic, grouped_mosaic
from pallas_kernels.matmul.grouped_block_mosaic import grouped_block_matmul, grouped_block_matmul_dw
from pallas_kernels.matmul.grouped_int8_mosaic import grouped_int8_block_matmul, grouped_int8_block_matmul_dw
from pallas_kernels.matmul.grouped_mosaic import grouped_matmul, grouped_matmul_dw
from pallas_kernels.matmul.hopper import Tile
from pallas_kernels.matmul.matmul_int8_mosaic import FallbackResidual
from tests.rows import few

interpreter = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")
RACES = plgpu.InterpretGPUParams(detect_races=True)
E4M3, E5M2, F32, BF16, I8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16, jnp.int8
ALTERNATING, SHARED = Tile(128, 64, None, num_stages=2), Tile(64, 64, "M", num_stages=3)
LEADING = Tile(64, 64, "M", num_stages=3, lead_slices=2)
ALL_SCALES = ("scale", "row_scale", "column_scale")


def interpreted(function: Callable[..., jax.Array], *args: Any, **kwargs: Any) -> jax.Array:
    """Runs a kernel in the interpreter and asserts that it has no races."""
    interpreter.reset_gpu_interpret_mode_state()
    out = jax.block_until_ready(function(*args, **kwargs, interpret=RACES))
    assert not interpreter.get_races().races_found
    return out


def draw(seed: int, *shape: int, dtype: Any = E4M3) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) * 16
    return jnp.asarray(np.rint(values) if dtype == I8 else values, F32).astype(dtype)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def error(out: Any, expected: np.ndarray) -> float:
    assert out.shape == expected.shape
    return float(np.linalg.norm(wide(out) - expected) / np.linalg.norm(expected))


def tolerance(out_dtype: Any) -> float:
    return (2.0**-9 if out_dtype == BF16 else 0.0) + 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of rows, (T, K) by (G, N, K), or of tokens, (M, T) by (N, T)."""

    sizes: tuple[int, ...]
    shape: tuple[int, int, int]  # T, N, K, or M, N and the tokens in no group
    tile: Tile = ALTERNATING
    left: Any = E4M3
    right: Any = E4M3
    out: Any = F32
    terms: tuple[str, ...] = ()
    fast: bool = True
    is_k_major: bool = True


ROWS = [
    Case((100, 0, 1, 60, 35), (200, 64, 200), terms=ALL_SCALES),
    Case((100, 0, 1, 60, 0), (203, 75, 200), left=E5M2, out=BF16, terms=ALL_SCALES),
    Case((0, 203, 0), (203, 72, 130), Tile(128, 96, None, 3), right=E5M2, terms=("scale",)),
    # A group of the size of a tile that starts in the middle of 8 rows has two tiles.
    Case((7, 128, 128, 1), (264, 40, 128), terms=("column_scale",)),
    Case((60, 1, 0, 67), (130, 140, 1200), LEADING, out=BF16, terms=ALL_SCALES, fast=False),
    Case((5, 1, 1, 2), (9, 24, 1000), SHARED, fast=False),
    Case((33, 0, 100), (140, 75, 136), left=BF16, right=BF16, out=BF16),
    Case((33, 0, 100), (133, 75, 200), Tile(64, 64, "N", 2), left=I8, right=I8),
    Case((3, 0), (3, 8, 16), terms=("row_scale",)),
]
FEW_ROWS = (ROWS[1], *ROWS[3:5], *ROWS[6:8])


def row_arguments(case: Case) -> tuple[dict[str, jax.Array], np.ndarray]:
    """Returns the arguments of `grouped_matmul`, and its result in the rows of all groups."""
    (t, n, k), groups = case.shape, len(case.sizes)
    a, b = draw(0, t, k, dtype=case.left), draw(1, groups, n, k, dtype=case.right)
    shapes = {"scale": (groups,), "row_scale": (t,), "column_scale": (groups, n)}
    scales = {name: jnp.asarray(np.random.default_rng(2).uniform(0.5, 2, shapes[name]), F32) for name in case.terms}
    group = np.repeat(np.arange(groups), case.sizes)
    parts = zip(np.split(wide(a), np.cumsum(case.sizes)), wide(b), strict=False)  # the last part is in no group
    expected = np.concatenate([part @ matrix.T for part, matrix in parts])
    expected = expected * wide(scales.get("scale", np.ones(groups)))[group][:, None]
    expected = expected * wide(scales.get("row_scale", np.ones(t)))[: len(group), None]
    expected = expected * wide(scales.get("column_scale", np.ones((groups, n))))[group]
    return {"a": a, "b": b, "group_sizes": jnp.asarray(case.sizes, jnp.int32), **scales}, expected


@pytest.mark.parametrize("case", few(ROWS, *FEW_ROWS), ids=str)
def test_each_group_is_multiplied_by_its_own_matrix(case: Case) -> None:
    arguments, expected = row_arguments(case)
    settings = {"out_dtype": case.out, "fast": case.fast, "tile": case.tile}
    out = interpreted(grouped_matmul, **arguments, **settings)
    assert out.dtype == case.out
    assert out.shape == case.shape[:2]
    assert not wide(out[sum(case.sizes) :]).any()
    out = out[: sum(case.sizes)]
    if case.left == I8:
        np.testing.assert_array_equal(wide(out), expected)
    assert error(out, expected) < tolerance(case.out)


TOKENS = [
    Case((100, 0, 1, 300), (128, 128, 128), left=E5M2, terms=ALL_SCALES),
    Case((0, 129, 0), (203, 75, 0), out=BF16, terms=ALL_SCALES),
    Case((100, 0, 1, 700), (75, 140, 0), SHARED, terms=("row_scale",), fast=False),
    Case((129, 128, 513), (64, 40, 40), Tile(128, 96, None, 3), left=I8, right=I8),
    Case((100, 0, 65, 1), (140, 75, 60), left=BF16, right=BF16, out=BF16, terms=ALL_SCALES, is_k_major=False),
    Case((200, 3), (40, 130, 0), Tile(64, 64, None, 2), left=BF16, right=BF16, terms=("column_scale",)),
]
FEW_TOKENS = (TOKENS[0], *TOKENS[2:5])


def token_arguments(case: Case) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the arguments of `grouped_matmul_dw`, and its result.

    The right operand is not 0 after the end of a group.
    """
    (m, n, rest), groups = case.shape, len(case.sizes)
    starts, ranges, tokens = token_ranges(case.sizes)
    is_token = np.zeros(tokens + rest, bool)
    for x in ranges:
        is_token[x] = True
    a = jnp.where(is_token, draw(0, m, is_token.size, dtype=case.left), jnp.zeros((), case.left))
    b = draw(1, n, is_token.size, dtype=case.right)
    shapes = {"scale": (groups,), "row_scale": (groups, m), "column_scale": (groups, n)}
    scales = {name: jnp.asarray(np.random.default_rng(2).uniform(0.5, 2, shapes[name]), F32) for name in case.terms}
    expected = np.stack([wide(a[:, x]) @ wide(b[:, x]).T for x in ranges])
    expected = expected * wide(scales.get("scale", np.ones(groups)))[:, None, None]
    expected = expected * wide(scales.get("row_scale", np.ones((groups, m))))[:, :, None]
    expected = expected * wide(scales.get("column_scale", np.ones((groups, n))))[:, None]
    operands = {"a": a, "b": b} if case.is_k_major else {"a": a.T, "b": b.T}
    numbers = {"starts": jnp.asarray(starts, jnp.int32), "lengths": jnp.asarray(case.sizes, jnp.int32)}
    return {**operands, **numbers, "is_k_major": case.is_k_major, **scales}, expected


@pytest.mark.parametrize("case", few(TOKENS, *FEW_TOKENS), ids=str)
def test_each_group_contracts_its_own_tokens(case: Case) -> None:
    arguments, expected = token_arguments(case)
    settings = {"out_dtype": case.out, "fast": case.fast, "tile": case.tile}
    out = interpreted(grouped_matmul_dw, **arguments, **settings)
    assert out.dtype == case.out
    if case.left == I8:
        np.testing.assert_array_equal(wide(out), expected)
    assert error(out, expected) < tolerance(case.out)
    assert not wide(out)[np.array(case.sizes) == 0].any()


BLOCKS = [
    Case((100, 0, 1, 120, 35), (256, 128, 256), Tile(64, 128, "M", 3)),
    Case((100, 0, 1, 130, 0), (233, 140, 200), Tile(128, 128, "M", 2, store_slots=4), left=E5M2, out=BF16),
    Case((60, 7), (67, 140, 130), Tile(64, 96, "M", 3)),
]


def block_arguments(case: Case) -> tuple[list[jax.Array], np.ndarray]:
    (t, n, k), groups = case.shape, len(case.sizes)
    a, b, rng = draw(0, t, k, dtype=case.left), draw(1, groups, n, k), np.random.default_rng(2)
    a_scale = rng.uniform(0.5, 2, (t, -(-k // 128))).astype(np.float32)
    b_scale = rng.uniform(0.5, 2, (groups, -(-n // 128), -(-k // 128))).astype(np.float32)
    left = wide(a) * np.repeat(wide(a_scale), 128, 1)[:, :k]
    right = wide(b) * np.repeat(np.repeat(wide(b_scale), 128, 1), 128, 2)[:, :n, :k]
    expected = np.stack([left[i] @ right[g].T for i, g in enumerate(np.repeat(np.arange(groups), case.sizes))])
    return [a, b, jnp.asarray(a_scale), jnp.asarray(b_scale), jnp.asarray(case.sizes, jnp.int32)], expected


@pytest.mark.parametrize("case", few(BLOCKS, BLOCKS[1]), ids=str)
def test_blocks_of_each_group_have_their_own_scales(case: Case) -> None:
    arguments, expected = block_arguments(case)
    out = interpreted(grouped_block_matmul, *arguments, out_dtype=case.out, tile=case.tile)
    assert error(out[: sum(case.sizes)], expected) < tolerance(case.out)
    assert not wide(out[sum(case.sizes) :]).any()


def token_ranges(sizes: tuple[int, ...]) -> tuple[np.ndarray, list[slice], int]:
    """Returns the first token of each group, its number of tokens, and the length of the axis."""
    spans = [-(-size // 128) * 128 for size in sizes]
    starts = np.cumsum([0, *spans[:-1]])
    return starts, [slice(i, i + size) for i, size in zip(starts, sizes, strict=True)], sum(spans) + 128


def spread(scale: np.ndarray, rows: int, by_block: bool) -> np.ndarray:
    """Broadcasts scales of 128 columns, per row or per block of 128, to a matrix."""
    return np.repeat(np.repeat(wide(scale), 128, 0)[:rows] if by_block else wide(scale), 128, 1)


TOKEN_BLOCKS = [
    Case((100, 0, 1, 700), (75, 140, 0), Tile(64, 64, "M", 3)),
    Case((600, 0, 100), (200, 140, 0), Tile(128, 128, "M", 3, store_slots=4), left=E5M2, out=BF16),
    Case((100, 0, 1, 700), (128, 256, 0), Tile(128, 128, "N", 3, store_slots=4), left=I8, right=I8),
    Case((600, 0, 100), (75, 140, 0), Tile(64, 128, "M", 2), left=I8, right=I8),
]


def token_block_arguments(case: Case) -> tuple[list[jax.Array], np.ndarray]:
    (m, n, _), rng = case.shape, np.random.default_rng(2)
    starts, ranges, tokens = token_ranges(case.sizes)
    is_token = np.zeros(tokens, bool)
    for x in ranges:
        is_token[x] = True
    a = jnp.where(is_token, draw(0, m, tokens, dtype=case.left), jnp.zeros((), case.left))
    b, by_block = draw(1, n, tokens, dtype=case.right), case.left == I8
    scales = [
        rng.uniform(0.5, 2, (-(-rows // 128) if by_block else rows, tokens // 128)).astype(np.float32)
        for rows in (m, n)
    ]
    left, right = (wide(x) * spread(s, x.shape[0], by_block) for x, s in zip((a, b), scales, strict=True))
    numbers = (jnp.asarray(x, jnp.int32) for x in (starts, case.sizes))
    return [a, b, *map(jnp.asarray, scales), *numbers], np.stack([left[:, x] @ right[:, x].T for x in ranges])


@pytest.mark.parametrize("case", few(TOKEN_BLOCKS, TOKEN_BLOCKS[0], TOKEN_BLOCKS[2]), ids=str)
def test_each_group_contracts_its_own_blocks_of_tokens(case: Case) -> None:
    arguments, expected = token_block_arguments(case)
    function = grouped_int8_block_matmul_dw if case.left == I8 else grouped_block_matmul_dw
    out = interpreted(function, *arguments, out_dtype=case.out, tile=case.tile)
    assert error(out, expected) < tolerance(case.out)
    assert not wide(out)[np.array(case.sizes) == 0].any()


# Groups in blocks of 128 rows, N, K, fraction of fallback blocks, and tile. There are three groups, so 3 is none.
INT8_BLOCKS: list[Any] = [
    ((0, 0, 2, 2, 3, 3), 140, 300, 0.4, Tile(128, 128, "N", 3, store_slots=4)),
    ((0, 1, 1, 2), 75, 256, 0.0, Tile(64, 64, "M", 2)),
    ((0, 1, 1, 3, 2), 256, 520, 0.5, Tile(64, 128, "M", 3)),
]


def int8_arguments(groups: tuple[int, ...], n: int, k: int, rate: float) -> tuple[list[Any], Any, np.ndarray]:
    """Returns operands, the residual, and the result in float64, NaN in rows of no group."""
    rng, t, steps = np.random.default_rng(0), 128 * len(groups), -(-k // 128)
    a, r = (rng.integers(-127, 128, (t, k)).astype(np.int8) for _ in range(2))
    b = rng.integers(-127, 128, (3, n, k)).astype(np.int8)
    a_scale = rng.uniform(0.5, 2, (len(groups), steps)).astype(np.float32)
    b_scale = rng.uniform(0.5, 2, (3, -(-n // 128), steps)).astype(np.float32)
    is_fallback = rng.uniform(size=a_scale.shape) < rate
    r_scale = np.where(is_fallback, rng.uniform(0.005, 0.02, a_scale.shape), np.nan).astype(np.float32)
    left = a * spread(a_scale, t, True)[:, :k] + r * spread(np.nan_to_num(r_scale), t, True)[:, :k]
    expected = np.full((t, n), np.nan)
    for i, g in enumerate(groups):
        if g < 3:
            rows = slice(128 * i, 128 * (i + 1))
            expected[rows] = left[rows] @ (b[g] * spread(b_scale[g], n, True)[:, :k]).T
    residual = FallbackResidual(*map(jnp.asarray, (r, r_scale, is_fallback))) if rate else None
    return [*map(jnp.asarray, (a, b, a_scale, b_scale)), jnp.asarray(groups, jnp.int32)], residual, expected


@pytest.mark.parametrize(("groups", "n", "k", "rate", "tile"), few(INT8_BLOCKS, INT8_BLOCKS[0]))
def test_int8_blocks_fall_back_in_each_group(groups: Any, n: int, k: int, rate: float, tile: Tile) -> None:
    arguments, residual, expected = int8_arguments(groups, n, k, rate)
    out = interpreted(grouped_int8_block_matmul, *arguments, residual=residual, out_dtype=F32, tile=tile)
    used = ~np.isnan(expected[:, 0])
    assert error(out[used], expected[used]) < tolerance(F32)


@pytest.mark.parametrize("case", [Case((40, 90), (130, 64, 1024), SHARED), Case((1024, 0), (64, 64, 0), SHARED)])
def test_sums_of_512_are_promoted(case: Case) -> None:
    """Eight slices have sums of 2^24 and 1. One fp32 sum would lose what is added to the first one."""
    a, b = (np.zeros((64 if case.shape[2] == 0 else 130, 1024)), np.zeros((64, 1024)))
    a[:, :128], b[:, :128] = 256, 512
    a[:, 128::128] = b[:, 128::128] = 1
    left, right = jnp.asarray(a, E4M3), jnp.asarray(b, E5M2)
    sizes, settings = jnp.asarray(case.sizes, jnp.int32), {"out_dtype": F32, "fast": False, "tile": case.tile}
    if case.shape[2] == 0:
        starts = jnp.asarray([0, 1024], jnp.int32)
        out = interpreted(grouped_matmul_dw, left, right, starts, sizes, **settings)[0]
    else:
        out = interpreted(grouped_matmul, left, jnp.stack([right, right]), sizes, **settings)
    assert np.all(np.asarray(out) == 2**24 + 4)


def test_rows_of_other_groups_and_of_none_change_nothing() -> None:
    """Not even NaN or Inf, although tiles overlap such rows. Sizes whose sum exceeds T end with its rows."""
    case = Case((60, 3, 40), (140, 72, 136), terms=ALL_SCALES, out=BF16)
    arguments, expected = row_arguments(case)
    rest = jnp.asarray([np.nan, 448, -448, np.nan], F32).astype(E4M3)
    arguments["a"] = arguments["a"].at[103:].set(jnp.tile(rest, 34)).at[61, 5].set(jnp.nan)
    arguments["row_scale"] = arguments["row_scale"].at[103:].set(jnp.inf)
    out = wide(interpreted(grouped_matmul, **arguments, tile=case.tile))
    other = np.arange(103) != 61
    assert error(out[:103][other], expected[other]) < tolerance(BF16)
    assert not out[103:].any()
    assert np.isnan(out[61]).all()
    arguments["scale"] = arguments["scale"].at[1].set(jnp.nan)
    arguments["group_sizes"] = jnp.asarray([60, 3, 1000])
    out = wide(interpreted(grouped_matmul, **arguments, tile=case.tile))
    assert np.isnan(out[60:63]).all()
    assert error(out[:60], expected[:60]) < tolerance(BF16)
    assert error(out[63:103], expected[63:103]) < tolerance(BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize(
    ("sizes", "first_row"),
    [((300, 0, 411), 3), ((1, 0, 700), 1000), ((0, 0, 0), 77), ((2048, 0, 0), 0), ((0, 5, 0), 0)],
)
def test_rows_of_no_group_are_zero_on_a_gpu(sizes: tuple[int, ...], first_row: int, dtype: Any) -> None:
    """For any operands, and any previous content of the output."""
    rows, columns = 2048, 1024
    end = first_row + sum(sizes)
    case = Case(sizes, (sum(sizes), columns, 520), left=dtype, right=dtype, terms=ALL_SCALES, out=BF16)
    arguments, expected = row_arguments(case)
    for name in ("a", "row_scale"):
        x = arguments[name]
        edges = [jnp.full((n, *x.shape[1:]), jnp.nan, x.dtype) for n in (first_row, rows - end)]
        arguments[name] = jnp.concatenate([edges[0], x, edges[1]])
    multiply = jax.jit(grouped_matmul)
    multiply(**arguments, first_row=jnp.int32(first_row)).delete()
    garbage = jax.block_until_ready([jnp.full((rows, columns), jnp.nan, BF16) for _ in range(16)])
    pointers = [x.unsafe_buffer_pointer() for x in garbage]
    for x in garbage:
        x.delete()
    result = multiply(**arguments, first_row=jnp.int32(first_row))
    assert min(pointers) <= result.unsafe_buffer_pointer() <= max(pointers)
    out = wide(result)
    assert not sum(sizes) or error(out[first_row:end], expected) < tolerance(BF16) + 3e-3
    assert not out[:first_row].any()
    assert not out[end:].any()


@pytest.mark.parametrize("tile", few([ALTERNATING, SHARED], SHARED))
def test_rows_before_the_first_group_are_zero(tile: Tile) -> None:
    """Full pieces of 64 rows, and partial ones, with any previous content."""
    case = Case((30, 0, 40), (70, 75, 136), terms=ALL_SCALES, out=BF16)
    arguments, expected = row_arguments(case)
    for name in ("a", "row_scale"):
        x = arguments[name]
        edges = [jnp.full((n, *x.shape[1:]), jnp.nan, x.dtype) for n in (83, 150)]
        arguments[name] = jnp.concatenate([edges[0], x, edges[1]])
    out = wide(interpreted(grouped_matmul, **arguments, first_row=jnp.int32(83), tile=tile))
    assert error(out[83:153], expected) < tolerance(BF16)
    assert not out[:83].any()
    assert not out[153:].any()


@pytest.mark.parametrize("block_rows", [128, 256])
def test_the_table_of_tiles_has_each_row_of_each_group_once(block_rows: int) -> None:
    rng = np.random.default_rng(0)
    shapes = [rng.multinomial(rng.integers(0, 2000), rng.dirichlet(np.full(12, 0.3))) for _ in range(8)]
    # Every group starts at the last of 8 rows, so a group with the rows of one tile has two tiles.
    shapes += [np.array([7] + 11 * [block_rows]), np.zeros(12, int)]
    for sizes in shapes:
        tokens = int(sizes.sum()) + int(rng.integers(0, 3)) + 1
        tables = grouped_mosaic._row_tiles(jnp.asarray(sizes), None, tokens, block_rows)
        table, (count,), bounds = map(np.asarray, tables)
        assert list(bounds) == [0, sizes.sum()]
        assert count <= table.shape[1]
        covered = np.full(tokens, -1)
        for group, row, begin, end in table[:, :count].T:
            rows = np.arange(max(8 * row, begin), min(8 * row + block_rows, end))
            assert len(rows)
            assert (covered[rows] == -1).all()
            covered[rows] = group
        expected = np.repeat(np.arange(12), sizes)
        np.testing.assert_array_equal(covered, np.pad(expected, (0, tokens - len(expected)), constant_values=-1))


def test_transformations() -> None:
    case = Case((50, 20), (70, 40, 130))
    arguments, expected = row_arguments(case)
    a, b, sizes = (jnp.stack([x, x]) for x in arguments.values())

    def one(*operands: jax.Array) -> jax.Array:
        return grouped_matmul(*operands, out_dtype=F32, tile=case.tile, interpret=RACES)

    interpreter.reset_gpu_interpret_mode_state()
    for out in (jax.jit(jax.vmap(one))(a, b, sizes), lax.scan(lambda _, x: (None, one(*x)), None, (a, b, sizes))[1]):
        assert error(out, np.stack([expected, expected])) < tolerance(F32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    sharded = jax.shard_map(one, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    assert error(jax.jit(sharded)(a[0], b[0], sizes[0]), expected) < tolerance(F32)
    assert not interpreter.get_races().races_found


def test_blocks_of_no_group_are_not_multiplied() -> None:
    """Valid blocks are first, those with the most slices before the others."""
    groups, slices, tile = jnp.asarray([0, 3, 1, 3, 2]), jnp.asarray([4, 9, 6, 9, 5]), Tile(64, 128, num_stages=3)
    schedule = grouped_int8_mosaic._block_schedule((640, 300), 304, tile, slices, groups, 3)
    _, order, _, used = schedule.arrays
    assert list(order[:3]) == [2, 4, 0]
    assert schedule.num_tiles(schedule.arrays) == 3 * 3
    assert list(used) == [3]


def test_tiles_have_few_columns_beyond_n() -> None:
    best = grouped_mosaic.best_tile
    assert [best(n, fast=True).cols for n in (1536, 1024, 2560, 2048)] == [192, 128, 160, 160]
    assert [best(n, fast=True, is_k_major=False).cols for n in (1536, 2560)] == [192, 128]
    # The first of two warpgroups cannot lead in a group with fewer slices than the lead.
    assert best(2048, fast=False).lead_slices > 0
    assert best(2048, fast=False, lead_slices=0).lead_slices == 0
    # Groups of 64 rows would fill a quarter of a large tile.
    of_blocks = grouped_block_mosaic.best_tile
    assert [of_blocks(tokens, 64, BF16).block_rows for tokens in (131072, 4096)] == [256, 128]
    assert of_blocks(131072, 64, F32).block_rows == 128


ONES, SIZES = jnp.ones, jnp.asarray([30, 34], jnp.int32)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda a, b: grouped_matmul(a, b[0], SIZES), ValueError, r"b has shape \(32, 128\); expected three"),
        (lambda a, b: grouped_matmul(a, b.mT, SIZES), ValueError, "transpose b"),
        (lambda a, b: grouped_matmul(a.astype(BF16), b, SIZES), TypeError, "b has dtype float8_e4m3fn; .* bfloat16"),
        (lambda a, b: grouped_matmul(a.astype(F32), b, SIZES), TypeError, "a has dtype float32"),
        (lambda a, b: grouped_matmul(a, b, SIZES.astype(F32)), TypeError, "group_sizes has dtype float32"),
        (lambda a, b: grouped_matmul(a, b, SIZES[:1]), ValueError, r"group_sizes has shape \(1,\); expected \(2,\)"),
        (lambda a, b: grouped_matmul(a, b, SIZES, scale=ONES(())), ValueError, r"scale has shape \(\)"),
        (lambda a, b: grouped_matmul(a, b, SIZES, row_scale=ONES(32)), ValueError, r"row_scale .* expected \(64,\)"),
        (lambda a, b: grouped_matmul(a, b, SIZES, column_scale=ONES(32)), ValueError, r"expected \(2, 32\)"),
        (lambda a, b: grouped_matmul(a, b, SIZES, out_dtype=I8), TypeError, "out_dtype int8"),
        (lambda a, b: grouped_matmul(a, b, SIZES, tile=Tile(cluster="M")), ValueError, "schedule does not support"),
        (lambda a, b: grouped_matmul_dw(a, b[0, :, :64], SIZES, SIZES), ValueError, "same K in the last"),
        (lambda a, b: grouped_matmul_dw(a, b[0], SIZES, SIZES[:1]), ValueError, r"lengths has shape \(1,\)"),
        (lambda a, b: grouped_matmul_dw(a, b[0], SIZES, SIZES, row_scale=ONES(64)), ValueError, r"expected \(2, 64\)"),
        (lambda a, b: grouped_block_matmul(a, b, ONES((64, 2)), ONES((2, 1, 1)), SIZES), ValueError, "a_scale"),
        (lambda a, b: grouped_block_matmul(a, b, ONES((64, 1)), ONES((1, 1)), SIZES), ValueError, "b_scale"),
        (lambda a, b: grouped_block_matmul_dw(a, b[0], ONES((64, 2)), ONES((32, 1)), SIZES, SIZES), ValueError, "a_sc"),
        (lambda a, b: grouped_int8_block_matmul(a.astype(I8), b.astype(I8), *[ONES((1, 1))] * 2, SIZES), ValueError,
         "a has 64 rows; expected whole blocks of 128"),
        (lambda a, b: grouped_matmul_dw(a.T, b[0].T, SIZES, SIZES, is_k_major=False), TypeError, "transpose 8-bit"),
    ],
)  # fmt: skip
def test_errors_name_the_value_and_the_fix(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(draw(0, 64, 128), draw(1, 2, 32, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("case", few(ROWS + TOKENS, *FEW_ROWS, *FEW_TOKENS), ids=str)
def test_on_a_gpu(case: Case) -> None:
    """In the chosen tile. Tensor cores add FP8 products with 14 bits."""
    is_rows = any(case is x for x in ROWS)
    function, (arguments, expected) = (
        (grouped_matmul, row_arguments(case)) if is_rows else (grouped_matmul_dw, token_arguments(case))
    )
    out = jax.jit(lambda x: function(**x, out_dtype=case.out, fast=case.fast))(
        {name: x for name, x in arguments.items() if name != "is_k_major"}
    ) if case.is_k_major else function(**arguments, out_dtype=case.out)  # fmt: skip
    assert error(out[: len(expected)], expected) < tolerance(case.out) + (3e-3 if case.left in (E4M3, E5M2) else 0)
    assert not wide(out[len(expected) :]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_blocks_on_a_gpu(case: Case) -> None:
    arguments, expected = block_arguments(case)
    for tile in (None, Tile(64, 128, num_stages=5)):
        out = grouped_block_matmul(*arguments, out_dtype=case.out, tile=tile)
        assert error(out[: len(expected)], expected) < tolerance(case.out) + 1e-3
        assert not wide(out[len(expected) :]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", TOKEN_BLOCKS, ids=str)
def test_blocks_of_tokens_on_a_gpu(case: Case) -> None:
    arguments, expected = token_block_arguments(case)
    function = grouped_int8_block_matmul_dw if case.left == I8 else grouped_block_matmul_dw
    assert error(function(*arguments, out_dtype=case.out), expected) < tolerance(case.out) + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("groups", "n", "k", "rate", "tile"), INT8_BLOCKS)
def test_int8_blocks_on_a_gpu(groups: Any, n: int, k: int, rate: float, tile: Tile) -> None:
    arguments, residual, expected = int8_arguments(groups, n, k, rate)
    used = ~np.isnan(expected[:, 0])
    for chosen in (None, tile if tile.cols == 128 else None):
        out = grouped_int8_block_matmul(*arguments, residual=residual, out_dtype=F32, tile=chosen)
        assert error(out[used], expected[used]) < tolerance(F32)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(E4M3, 3e-3), (BF16, 0.0)])
def test_many_groups_on_a_gpu(dtype: Any, bound: float) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(5000, rng.dirichlet(np.full(64, 0.5)))
    case = Case(tuple(map(int, sizes)), (5003, 1000, 520), left=dtype, right=dtype, out=BF16, terms=ALL_SCALES)
    arguments, expected = row_arguments(case)
    assert error(grouped_matmul(**arguments)[:5000], expected) < tolerance(BF16) + bound
    case = dataclasses.replace(case, shape=(1000, 520, 100), is_k_major=dtype != BF16)
    arguments, expected = token_arguments(case)
    assert error(grouped_matmul_dw(**arguments), expected) < tolerance(BF16) + bound
