"""Grouped block-scaled FP8 products: rows by their group's matrix, 1x128 by 128x128, and over tokens, 1x128 by 1x128.

In: FP8 codes with fp32 scales, and the sizes of the groups. Out: bf16 or fp32. Hardware: Hopper. Reference:
`jax.lax.ragged_dot` of decoded operands.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import hopper, matmul_block_mosaic
from pallas_kernels.matmul.grouped_mosaic import ROW_MULTIPLE, row_schedule, token_schedule
from pallas_kernels.matmul.matmul_block_mosaic import make_compute

BLOCK = 128


def grouped_block_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    *,
    first_row: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    tile: hopper.Tile | None = None,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """Return `dequantize(a)[t] @ dequantize(b)[g].T` for each row t of each group g, with a scale for every 128 of K.

    Accumulation is that of `matmul_block_mosaic.matmul_block`. Groups, copies and errors are those of
    `grouped_mosaic.grouped_matmul`.

    Args:
        a: (T, K) float8_e4m3fn or float8_e5m2. b: (G, N, K), also K-major. The two types may differ.
        a_scale: (T, ceil(K / 128)) float32, one per row and 128 of K (1x128).
        b_scale: (G, ceil(N / 128), ceil(K / 128)) float32, one per block of 128x128.
        group_sizes, first_row, out_dtype, tile, interpret: as in `grouped_mosaic.grouped_matmul`.

    Returns:
        (T, N) in `out_dtype`. Rows of no group are 0.
    """
    hopper.check_operands(a, b, out_dtype, b_ndim=3)
    (num_tokens, k), (num_groups, n, _) = a.shape, b.shape
    steps, blocks = hopper.ceil_div(k, hopper.K_STEP), hopper.ceil_div(n, BLOCK)
    hopper.check_array("a_scale", a_scale, (num_tokens, steps), (jnp.float32,))
    hopper.check_array("b_scale", b_scale, (num_groups, blocks, steps), (jnp.float32,))
    tile = tile or best_tile(num_tokens, num_groups, out_dtype)
    streams = [
        hopper.Stream.from_slices(a_scale, tile.block_rows, lambda position: position.row),
        hopper.Stream.from_blocks(
            b_scale.reshape(-1, steps),
            tile.block_cols,
            lambda position: position.matrix * blocks + lax.div(position.col, BLOCK),
        ),
    ]
    b = hopper.pad_axis(b, 1, hopper.round_up(n, ROW_MULTIPLE))
    return hopper.pipelined_matmul(
        make_compute(tile, False, interpret is not None), a, b.reshape(-1, k), streams, name="fp8_grouped_block",
        tile=tile, out_dtype=out_dtype, use_inline_wgmma=True,
        schedule=row_schedule(a, b, n, group_sizes, tile, first_row), interpret=interpret,
    )  # fmt: skip


def grouped_block_matmul_dw(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    tile: hopper.Tile | None = None,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """Return `dequantize(a)[:, g] @ dequantize(b)[:, g].T` for the tokens of each group g, with scales for every 128.

    Tokens, copies and errors are those of `grouped_mosaic.grouped_matmul_dw`. No scale spans two groups, since each
    group starts at a multiple of 128 tokens.

    Args:
        a: (M, T) float8_e4m3fn or float8_e5m2. b: (N, T), likewise. The two types may differ.
        a_scale: (M, ceil(T / 128)) float32, one per row and 128 tokens. b_scale: (N, ceil(T / 128)) float32.
        starts, lengths: (G,) integers, as in `grouped_mosaic.grouped_matmul_dw`.
        out_dtype, tile, interpret: as in `grouped_mosaic.grouped_matmul`.

    Returns:
        (G, M, N) in `out_dtype`; zeros for groups without tokens.
    """
    hopper.check_operands(a, b, out_dtype)
    (m, num_tokens), n, num_groups = a.shape, b.shape[0], starts.size
    steps = hopper.ceil_div(num_tokens, hopper.K_STEP)
    hopper.check_array("a_scale", a_scale, (m, steps), (jnp.float32,))
    hopper.check_array("b_scale", b_scale, (n, steps), (jnp.float32,))
    tile = tile or matmul_block_mosaic.best_tile(m * num_groups, n)
    padded_m = hopper.round_up(m, ROW_MULTIPLE)
    streams = [
        hopper.Stream.from_slices(a_scale, tile.block_rows, lambda position: position.a_row),
        hopper.Stream.from_slices(b_scale, tile.block_cols, lambda position: position.b_row),
    ]
    out = hopper.pipelined_matmul(
        make_compute(tile, True, interpret is not None, may_be_empty=True), a, b, streams, name="fp8_grouped_block_dw",
        tile=tile, out_dtype=out_dtype, use_inline_wgmma=True,
        schedule=token_schedule(padded_m, n, hopper.K_STEP, starts, lengths, tile), interpret=interpret,
    )  # fmt: skip
    return out.reshape(num_groups, padded_m, n)[:, :m]


def best_tile(num_tokens: int, num_groups: int, out_dtype: Any) -> hopper.Tile:
    """Return the tile of least estimated cost, as `matmul_block_mosaic.best_tile`; a group ends inside of a tile."""
    large = hopper.Tile(128, 128, num_stages=3, store_slots=4, band_width=16)
    small = hopper.Tile(64, 128, num_stages=5)
    if out_dtype == jnp.float32:
        return small  # rows of fp32 need too many registers in the large tile

    def cost(tile: hopper.Tile, relative_cost: float) -> float:
        return relative_cost * (num_tokens / tile.block_rows + num_groups / 2)

    return large if cost(large, 2.0) < cost(small, 1.08) else small
