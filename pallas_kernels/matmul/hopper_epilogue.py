"""The epilogue of every Hopper matrix product: fp32 scales, then stores to device memory."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.hopper_pipeline import WARPGROUPS, Tile, TilePosition, WarpgroupPipeline, pad_axis, round_up
from pallas_kernels.matmul.hopper_stores import store_rows

OUT_DTYPES = (jnp.bfloat16, jnp.float32)
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """Operands of out = acc * scale * row_scale[:, None] * column_scale[None, :], in fp32.

    Attributes:
        scale: fp32 (). row_scale: fp32 (M,). column_scale: fp32 (N,). None omits a factor.
    """

    scale: jax.Array | None = None
    row_scale: jax.Array | None = None
    column_scale: jax.Array | None = None


NO_SCALES = Epilogue()


def check_array(name: str, x: jax.Array | None, shape: tuple[int, ...], dtypes: Sequence[Any]) -> None:
    """Raise TypeError or ValueError unless the optional array `x` has this shape and one of these dtypes."""
    if x is None:
        return
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; expected {' or '.join(str(jnp.dtype(d)) for d in dtypes)}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; expected {shape}")


def check_epilogue(epilogue: Epilogue, m: int, n: int) -> None:
    check_array("scale", epilogue.scale, (), (jnp.float32,))
    check_array("row_scale", epilogue.row_scale, (m,), (jnp.float32,))
    check_array("column_scale", epilogue.column_scale, (n,), (jnp.float32,))


def swizzle_transforms(swizzle: int) -> tuple[Any, ...]:
    """Return the transforms of a matrix one swizzle wide: the layout of `tiling_transforms`, but plain rows for TMA."""
    transforms: Any = plgpu
    return (transforms.SwizzleTransform(swizzle),)


def tiling_transforms(swizzle: int, itemsize: int) -> tuple[Any, ...]:
    """Return the shared-memory transforms of a matrix whose rows have swizzles of this many bytes."""
    transforms: Any = plgpu
    return transforms.TilingTransform((8, swizzle // itemsize)), transforms.SwizzleTransform(swizzle)


class OutputRefs(NamedTuple):
    """References to the arrays that the epilogue of a kernel reads and writes.

    Attributes:
        outputs: references to the results in device memory.
        operands: references to its operands, in the order of `MatrixOutput.prepare`.
        scratch: references to shared memory, by name.
        is_interpreted: whether Pallas's interpreter runs, which has no registers.
    """

    outputs: Sequence[Any]
    operands: Sequence[Any]
    scratch: dict[str, Any]
    is_interpreted: bool


@dataclasses.dataclass(frozen=True)
class MatrixOutput:
    """The (M, N) result of a product in 16 or 32 bits: static facts, without arrays.

    Attributes:
        shape: of the array that the kernel writes; M and N padded for TMA.
        dtype: bfloat16 or float32.
        piece_shape: rows and columns of a store.
        num_slots: number of pieces of a warpgroup that may wait for their store.
        column_stride: columns of a matrix's column scales in a grouped product.
    """

    shape: tuple[int, int]
    dtype: Any
    tile: Tile
    piece_shape: tuple[int, int]
    num_slots: int
    operand_names: tuple[str, ...]
    column_stride: int

    @staticmethod
    def prepare(
        epilogue: Epilogue, shape: tuple[int, int], tile: Tile, dtype: Any, *, rows: int, cols: int
    ) -> "tuple[MatrixOutput, list[jax.Array]]":
        """Return the output of a product (M, N), and its operands, padded to `rows` and `cols`, which tiles cover."""
        (m, n), itemsize = shape, jnp.dtype(dtype).itemsize
        width = _swizzle(tile, itemsize) // itemsize
        piece_shape, num_slots = (64, width), tile.store_slots
        # The output is at least two swizzles wide: Mosaic drops dimensions of one tile, and with them the offset of a
        # store.
        out_shape = round_up(m, 8), max(round_up(n, width), 2 * width)
        operands: dict[str, jax.Array] = {}
        if epilogue.scale is not None:
            operands["scale"] = epilogue.scale.reshape(-1)
        if epilogue.row_scale is not None:
            operands["row_scale"] = pad_axis(epilogue.row_scale, 0, rows)
        if epilogue.column_scale is not None:
            operands["column_scale"] = pad_axis(epilogue.column_scale, epilogue.column_scale.ndim - 1, cols).reshape(-1)
        if tile.rows * tile.cols * itemsize <= num_slots * 64 * 128:
            piece_shape, num_slots = (tile.rows, tile.cols), 1  # one store, after one barrier
        output = MatrixOutput(out_shape, dtype, tile, piece_shape, num_slots, tuple(operands), cols)
        return output, list(operands.values())

    @property
    def types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the kernel's results."""
        return (jax.ShapeDtypeStruct(self.shape, self.dtype),)

    @property
    def scratch(self) -> dict[str, Any]:
        """Shared memory by name."""
        itemsize = jnp.dtype(self.dtype).itemsize
        transforms = tiling_transforms(_swizzle(self.tile, itemsize), itemsize)
        ring = plgpu.SMEM((WARPGROUPS, self.num_slots, *self.piece_shape), self.dtype, transforms=transforms)
        return {"out_ring": ring}

    def writer(
        self, refs: OutputRefs, group: jax.Array, pipeline: WarpgroupPipeline, position: TilePosition
    ) -> "Writer":
        """Return the writer of a warpgroup's part of the tile at a position."""
        return Writer(
            out_ref=refs.outputs[0],
            slot_refs=refs.scratch["out_ring"].at[group],
            scale_refs=dict(zip(self.operand_names, refs.operands, strict=True)),
            row=pipeline.row,
            col=pipeline.col,
            tile=self.tile,
            piece_shape=self.piece_shape,
            out_dtype=self.dtype,
            first_column=position.matrix * self.column_stride,
            matrix=position.matrix,
            row_range=position.row_range,
            is_interpreted=refs.is_interpreted,
        )

    def write_zeros(self, refs: OutputRefs, group: jax.Array, position: TilePosition) -> None:
        """Set one piece to 0, as far as it lies in the rows of the position."""
        height, width = self.piece_shape
        zeros = plgpu.layout_cast(jnp.zeros(self.piece_shape, jnp.float32), plgpu.Layout.WGMMA)
        writer = Writer(
            out_ref=refs.outputs[0],
            slot_refs=refs.scratch["out_ring"].at[group],
            scale_refs={},
            row=position.row,
            col=position.col,
            tile=dataclasses.replace(self.tile, rows=height, cols=width),
            piece_shape=self.piece_shape,
            out_dtype=self.dtype,
            row_range=position.row_range,
            is_interpreted=refs.is_interpreted,
        )
        writer.write((None, None), [(0, 0, zeros)])


def _swizzle(tile: Tile, itemsize: int) -> int:
    """Return the bytes of a swizzle of a tile's rows."""
    return next(width for width in (128, 64) if tile.cols * itemsize % width == 0)


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes the accumulators of one warpgroup: fp32 epilogue, then shared-memory slots in rotation and TMA stores.

    A piece is 64 rows of 128 bytes, or a whole tile. If it has rows outside of `row_range`, the others are stored one
    by one from registers.

    Attributes:
        row, col: position of the warpgroup's part of the tile.
        first_column: index of the matrix's first column in `column_scale`. matrix: index in `scale`.
        row_range: first row that is written, and the row after the last; None for all.
        is_interpreted: whether Pallas's interpreter runs, which has no registers.
    """

    out_ref: Any
    slot_refs: Any
    scale_refs: dict[str, Any]
    row: Any
    col: Any
    tile: Tile
    piece_shape: tuple[int, int]
    out_dtype: Any
    first_column: Any = 0
    matrix: Any = 0
    row_range: tuple[Any, Any] | None = None
    is_interpreted: bool = False

    @property
    def pieces(self) -> list[tuple[int, int]]:
        height, width = self.piece_shape
        return [(i, j) for j in range(0, self.tile.cols, width) for i in range(0, self.tile.rows, height)]

    @property
    def slot_count(self) -> int:
        return min(self.tile.store_slots, len(self.pieces))

    def prefetch(self) -> tuple[Any, Any]:
        """Return the tensor's and the rows' scales. The K loop hides the latency of these loads."""
        scale = self.scale_refs["scale"][self.matrix] if "scale" in self.scale_refs else None
        return scale, self._load_scales("row_scale", self.row, self.tile.rows, ROW_LAYOUT)

    def _load_scales(self, name: str, start: jax.Array, size: int, layout: Any) -> jax.Array | None:
        if name not in self.scale_refs:
            return None
        return plgpu.load(self.scale_refs[name].at[pl.ds(start, size)], layout=layout, optimized=False)

    def write(self, factors: tuple[Any, Any], accumulators: Sequence[tuple[int, int, jax.Array]]) -> None:
        """Write the tile from accumulators (first row, first column, array), ordered from left to right."""
        scale, row = factors
        if row is not None and scale is not None:
            row = row * scale
        for piece, (i, j) in enumerate(self.pieces):
            tops = range(i, i + self.piece_shape[0], 64)
            scaled = functools.partial(self._scaled_piece, accumulators, scale, row, j=j)
            if self.row_range is None:
                self._store_piece(piece, tops, scaled)
            else:
                values = {top: scaled(top).astype(self.out_dtype) for top in tops}
                begin, end = self.row_range
                first, last = self.row + i, self.row + i + self.piece_shape[0]
                lax.cond(
                    (begin <= first) & (last <= end),
                    functools.partial(self._store_piece, piece, tops, values.__getitem__),
                    functools.partial(self._store_rows, piece, values),
                )

    def _store_piece(self, piece: int, tops: range, scaled: Callable[[int], jax.Array]) -> None:
        """Store a piece, whose 64 rows from `top` on are `scaled(top)`, by TMA."""
        slot = self.slot_refs.at[piece % self.slot_count]
        for top in tops:
            value = scaled(top)
            if top == tops[0]:
                plgpu.wait_smem_to_gmem(self._pending_stores(piece), wait_read_only=True)
            slot.at[pl.ds(top - tops[0], 64)][...] = value.astype(self.out_dtype)
        plgpu.commit_smem()
        (i, j), (height, width) = self.pieces[piece], self.piece_shape
        plgpu.copy_smem_to_gmem(slot, self.out_ref.at[pl.ds(self.row + i, height), pl.ds(self.col + j, width)])

    def _store_rows(self, piece: int, values: dict[int, jax.Array]) -> None:
        """Store the rows of a piece that lie in `row_range`."""
        # `_pending_stores` counts the stores of whole pieces; this piece has none.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        begin, end = self.row_range or (0, 0)
        row, col = self.row + self.pieces[piece][0], self.col + self.pieces[piece][1]
        slot, (height, width) = self.slot_refs.at[piece % self.slot_count], self.piece_shape
        if not self.is_interpreted:
            for top, value in values.items():
                store_rows(self.out_ref, value, self.row + top, col, begin, end)
            return
        for i, value in enumerate(values.values()):
            slot.at[pl.ds(64 * i, 64)][...] = value
        plgpu.commit_smem()

        def store_row(i: jax.Array, _: None) -> None:
            plgpu.copy_smem_to_gmem(slot.at[pl.ds(i, 1)], self.out_ref.at[pl.ds(row + i, 1), pl.ds(col, width)])

        lax.fori_loop(jnp.clip(begin - row, 0, height), jnp.clip(end - row, 0, height), store_row, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _scaled_piece(
        self, accumulators: Sequence[Any], scale: jax.Array | None, row: jax.Array | None, i: int, *, j: int
    ) -> jax.Array:
        """Return 64 rows from `i` on, of a piece's columns from `j` on, with scales, in fp32."""
        width = self.piece_shape[1]
        columns = [
            x[i - top : i - top + 64, max(j - first, 0) : j - first + width]
            for top, first, x in accumulators
            if top <= i < top + x.shape[0] and j - x.shape[1] < first < j + width
        ]
        value = (columns[0] if len(columns) == 1 else lax.concatenate(columns, 1)).astype(jnp.float32)
        if row is not None:
            value = value * lax.broadcast_in_dim(row[i : i + 64], value.shape, [0])
        elif scale is not None:
            value = value * scale
        column = self._load_scales("column_scale", self.first_column + self.col + j, width, COLUMN_LAYOUT)
        return value if column is None else value * lax.broadcast_in_dim(column, value.shape, [1])

    def _pending_stores(self, piece: int) -> int:
        """Return the number of stores since the last one from the slot of a piece, in this tile or the previous one."""
        slots = self.slot_count
        return slots - 1 if piece >= slots else piece + (len(self.pieces) - 1 - piece) % slots
