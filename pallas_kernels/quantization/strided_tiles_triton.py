"""Device code for tiles in slices of every fourth row: loads, and stores as words of a transposed copy."""

import triton
import triton.language as tl

from pallas_kernels.quantization import scaling_triton as scaling


@triton.jit
def load_slices(
    pointer: tl.tensor, offsets: tl.tensor, stride: tl.tensor, m: tl.tensor, n: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return four slices of a tile of (M, N), each of every fourth row, `stride` apart; `m` are rows of the first."""
    # All loads come before the first store, which may alias the source.
    x0 = scaling.load_raw(pointer, offsets, scaling.tile_mask(m, n, M, N), MASKED)
    x1 = scaling.load_raw(pointer, offsets + stride, scaling.tile_mask(m + 1, n, M, N), MASKED)
    x2 = scaling.load_raw(pointer, offsets + 2 * stride, scaling.tile_mask(m + 2, n, M, N), MASKED)
    x3 = scaling.load_raw(pointer, offsets + 3 * stride, scaling.tile_mask(m + 3, n, M, N), MASKED)
    return x0, x1, x2, x3


@triton.jit
def insert_byte(words: tl.tensor, codes: tl.tensor, j: tl.tensor, FOUR_AT_ONCE: tl.constexpr) -> tl.tensor:
    """Return words with codes inserted as byte j.

    In assembly, because ptxas 12.8 and 12.9 crash on LLVM's shifts. FOUR_AT_ONCE leaves codes in their registers; ptxas
    13.0 crashes with it if the same codes are stored one by one.
    """
    selector = 0x3210 + ((4 - j) << (4 * j))
    if FOUR_AT_ONCE:
        words = tl.inline_asm_elementwise(
            """{.reg .b32 second, third, fourth;
            add.s32 second, $9, $13;
            add.s32 third, second, $13;
            add.s32 fourth, third, $13;
            prmt.b32 $0, $4, $8, $9;
            prmt.b32 $1, $5, $8, second;
            prmt.b32 $2, $6, $8, third;
            prmt.b32 $3, $7, $8, fourth;}""",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r", [words, codes, selector, 1 << (4 * j)], tl.uint32,
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [words, codes.to(tl.uint32), selector], tl.uint32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def store_transposed(
    transposed_ptr: tl.tensor, top: tl.tensor, left: tl.tensor, i: tl.tensor, n: tl.tensor, words: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    """Store the words of a tile into the transposed copy; byte by byte if its rows are not whole words."""
    tile_ptr, transposed = transposed_ptr + (left.to(tl.int64) * M + top), tl.trans(words)
    column = tl.arange(0, words.shape[1])[:, None]
    if M % 4 == 0:
        offsets = column * (M // 4) + i[None, :]
        scaling.store(
            tile_ptr.to(tl.pointer_type(tl.uint32), bitcast=True),
            offsets,
            transposed,
            scaling.tile_mask(n, top + 4 * i, N, M),
            MASKED,
        )
    else:
        for j in tl.static_range(4):
            offsets, mask = column * M + (4 * i + j)[None, :], scaling.tile_mask(n, top + 4 * i + j, N, M)
            scaling.store(tile_ptr + offsets, 0, (transposed >> (8 * j)).to(tl.uint8), mask, MASKED)
