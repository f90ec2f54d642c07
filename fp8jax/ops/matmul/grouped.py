"""Products of groups of rows with one matrix per group, as of the tokens of each expert with its weight.

Rows in no group may hold anything. Neither product reads them, and their results are 0.

The form by XLA loops over tiles of rows. A tile belongs to one group, so that a matrix is read for its own rows alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats
from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.core.products import dot_general
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.dispatch.choice import (
    Choice,
    cast_varying_like,
    check_impl,
    current_target,
    on_cuda,
    product_name_scope,
    record_choice,
    run,
)
from fp8jax.ops.dispatch.partition import DimSharding, notation, run_partitioned
from fp8jax.ops.matmul import grouped_hopper
from fp8jax.ops.matmul.grouped_hopper import DeferredMatrices, UnpaddedRows, find_spec
from fp8jax.ops.matmul.hopper import strip_residual
from fp8jax.ops.matmul.matmul import Operand, dot_in_16_bits, reference_matmul
from fp8jax.ops.quantization.fallback import FallbackTensor

IMPLS = ("auto", "xla", "mosaic")


def grouped_matmul(
    x: Operand | FallbackTensor,
    w: Operand | DeferredMatrices,
    groups: Groups,
    *,
    transposed: bool = False,
    scales_are_shared: bool = False,
    dtype: DTypeLike = jnp.float32,
    fast: bool = True,
    impl: str = "auto",
) -> Array:
    """Return the product of each group's rows with the transpose of its matrix: x[rows of g] @ w[g].T.

    Codes are multiplied as by `fp8jax.ops.matmul.matmul.matmul`. It has no derivative.

    Args:
        x: (T, K), the rows of each group consecutive; an array, or a QTensor with scales per row or group of a row, or
            a `FallbackTensor` of such.
        w: (G, N, K); an array, or a QTensor of a matrix mapped by `jax.vmap`, with its own scales for each matrix; or
            `DeferredMatrices`.
        transposed: whether w is (G, K, N), an array. No transposed copy is made.
        scales_are_shared: whether rows of a group, in blocks of 128 from its first row, have the same scales.
        fast: whether to use fast accumulation, if the GPU has it.
        impl: "xla" is a loop over tiles of rows that each belong to one group. On Hopper "auto" is a kernel for FP8 or
            int8 codes with scales per matrix and row or per block of 128, and for bf16, to which other codes are
            decoded first. Elsewhere it is the loop. "mosaic" is the kernel.

    Returns:
        (T, N); zeros in rows of no group.

    Raises:
        ValueError: shapes do not match, `impl` is unknown, or it is "mosaic" and no kernel can run.
    """
    check_impl(impl, IMPLS)
    axis = 1 if transposed else 2
    if len(x.shape) != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[axis] or groups.ends.shape != w.shape[:1]:
        layout, shapes = "(G, K, N)" if transposed else "(G, N, K)", f"{x.shape}, {w.shape} and {groups.ends.shape[0]}"
        raise ValueError(f"grouped_matmul expects (T, K), {layout} and G groups, got {shapes} groups")
    choice, kernel_name = _choose("grouped matmul", x, w, x.shape[1], impl, scales_are_shared)
    static = transposed, fast, current_target().free_multiprocessors
    # Blocks of 128 rows may belong to two shards.
    shard_kernel_name: Any = "bf16" if kernel_name == "int8 block" else kernel_name

    def multiply(multiply_whole: Callable[..., Array], multiply_shard: Any, is_kernel: bool, *operands: Any) -> Array:
        x, w, *_ = operands
        function = functools.partial(_multiply_shard, multiply_whole, multiply_shard, jnp.dtype(dtype))
        # Deferred matrices are whole on each device: their scales may span a matrix.
        k, n = "--" if isinstance(w, DeferredMatrices) else "kn"
        ins = _notation(x, f"t {k}"), _notation(w, f"{k} {n}" if transposed else f"{n} {k}", "- "), "-", "-"
        key = kernel_name if is_kernel else None, *static, str(jnp.dtype(dtype)), *map(_spec, (x, w))
        return run_partitioned(
            "grouped_product", key, function, operands, ins, f"t {n}", sum_dim="k", is_kernel=is_kernel
        )

    loop_over_tiles = functools.partial(_loop_over_tiles, transposed, fast)
    loop = functools.partial(multiply, loop_over_tiles, loop_over_tiles, False)
    multiply_whole = functools.partial(grouped_hopper.multiply_rows, kernel_name, *static)
    multiply_shard = functools.partial(grouped_hopper.multiply_rows, shard_kernel_name, *static)
    kernel = functools.partial(multiply, multiply_whole, multiply_shard, True)
    with product_name_scope(strip_residual(x), w):
        return run(choice, impl, x, w, *groups, kernel=kernel, reference=loop)


def grouped_matmul_dw(
    a: Operand | UnpaddedRows,
    b: Operand | UnpaddedRows,
    tokens: PaddedTokens,
    *,
    scale: Array | None = None,
    row_scale: Array | None = None,
    column_scale: Array | None = None,
    dtype: DTypeLike = jnp.float32,
    fast: bool = True,
    impl: str = "auto",
) -> Array:
    """Return each group's product over its tokens: a[:, tokens of g] @ b[:, tokens of g].T. It has no derivative.

    Args:
        a: (M, tokens.length), an array or a QTensor with one scale or one per block of tokens; or rows of such.
        b: (N, tokens.length), likewise.
        scale: fp32 (G,), multiplied to the result; or None.
        row_scale: fp32 (G, M), multiplied to its rows; or None.
        column_scale: fp32 (G, N), multiplied to its columns; or None.
        dtype, fast, impl: as in `grouped_matmul`.

    Returns:
        (G, M, N); zeros for groups without tokens.

    Raises:
        ValueError: shapes do not match, `impl` is unknown, or it is "mosaic" and no kernel can run.
    """
    check_impl(impl, IMPLS)
    for x in (a, b):
        shape, length = x.values.shape[::-1] if isinstance(x, UnpaddedRows) else x.shape, tokens.length
        length = tokens.num_rows if isinstance(x, UnpaddedRows) else length
        if len(shape) != 2 or shape[1] != length:
            raise ValueError(f"grouped_matmul_dw expects (n, {length}), not {shape}")
    choice, kernel_name = _choose("grouped matmul of tokens", a, b, tokens.num_rows, impl, True)
    operands = a, b, tokens.rows, tokens.starts, tokens.lengths, scale, row_scale, column_scale
    static = fast, current_target().free_multiprocessors

    def multiply(multiply_shard: Callable[..., Array], is_kernel: bool, *operands: Any) -> Array:
        a, b, *_ = operands
        function = functools.partial(_multiply_shard_dw, multiply_shard, jnp.dtype(dtype))
        m, n = (
            "-" if isinstance(x, UnpaddedRows) and x.encoder is not None else name for x, name in ((a, "m"), (b, "n"))
        )
        # The scales of an encoder may span channels.
        ins = _token_notation(a, m), _token_notation(b, n), "t", "-", "-", "-", f"- {m}", f"- {n}"
        key = kernel_name if is_kernel else None, *static, str(jnp.dtype(dtype)), *map(_spec, (a, b))
        return run_partitioned(
            "grouped_product_dw", key, function, operands, ins, f"- {m} {n}",
            units={"t": tokens.alignment}, sum_dim="t", is_kernel=is_kernel,
        )  # fmt: skip

    loop = functools.partial(multiply, functools.partial(_loop_over_blocks, tokens.alignment, fast), False)
    kernel = functools.partial(multiply, functools.partial(grouped_hopper.multiply_tokens, kernel_name, *static), True)
    with product_name_scope(*(x.values if isinstance(x, UnpaddedRows) else x for x in (a, b))):
        return run(choice, impl, *operands, kernel=kernel, reference=loop)


def _choose(operation: str, a: Any, b: Any, length: int, impl: str, scales_are_shared: bool) -> tuple[Choice, Any]:
    """Return and record the implementation for `run`, and the kernel's name.

    Raises:
        ValueError: `impl` is "mosaic", and no kernel can run.
    """
    choice, kernel_name = Choice("xla", "asked for"), None
    if impl != "xla" and (impl == "mosaic" or on_cuda()):
        choice, kernel_name = grouped_hopper.choose_kernel(a, b, length, scales_are_shared)
        if impl == "mosaic" and kernel_name is None:
            raise ValueError(f"impl 'mosaic' cannot run: {choice.reason}")
    elif impl == "auto":
        choice = Choice("xla", "a loop over tiles, not a kernel: it needs a CUDA GPU")
    return record_choice(operation, choice), kernel_name


def _spec(x: Any) -> str:
    """Return a key of an operand's static parts."""
    if isinstance(x, DeferredMatrices | UnpaddedRows):
        return f"{type(x).__name__} {_spec(x.values)} {x.encoder!r}"
    if isinstance(x, FallbackTensor):
        return f"{x.base.spec} with residuals"
    return str(x.spec) if isinstance(x, QTensor) else str(x.dtype)


def _token_notation(x: Operand | UnpaddedRows, name: str) -> Any:
    if not isinstance(x, UnpaddedRows):
        return _notation(x, f"{name} t")
    values = _notation(x.values, f"- {name}")
    return (values,) if isinstance(values, str) else values


def _notation(x: Operand | DeferredMatrices | FallbackTensor, names: str, prefix: str = "") -> Any:
    """Return the notation of an operand with leading axes `prefix`."""
    if isinstance(x, DeferredMatrices):
        return tuple(" ".join("-" * leaf.ndim) for leaf in jax.tree.leaves(x))
    if isinstance(x, FallbackTensor):
        base = _notation(x.base, names, prefix)
        return base, base, base[-1]
    if not isinstance(x, QTensor):
        return prefix + names
    return tuple(prefix + text for text in notation(x.spec, x.shape[-2:], names))


def _multiply_shard(
    multiply_whole: Callable[..., Array],
    multiply_shard: Callable[..., Array],
    dtype: Any,
    sharding: DimSharding,
    x: Any,
    w: Any,
    *bounds: Array,
) -> Array:
    """Return the product of a device's rows, all or a shard, with its part of the matrices."""
    rows, multiply = x.shape[0], multiply_shard if "t" in sharding.axes else multiply_whole
    groups = Groups(*bounds).shift(sharding.shard_offset("t", rows), rows)
    sum_dtype = dtype
    if "k" in sharding.axes:
        sum_dtype, x, w = _sum_dtype(x, w, dtype), _with_local_length(x), _with_local_length(w)
    y = multiply(sum_dtype, x, w, *groups)
    return sharding.psum(y, "k", "t n").astype(dtype)


def _multiply_shard_dw(
    multiply: Callable[..., Array],
    dtype: Any,
    sharding: DimSharding,
    a: Any,
    b: Any,
    rows: Array,
    starts: Array,
    lengths: Array,
    *scales: Array | None,
) -> Array:
    """Return the products over a device's part of the padded axis, summed over devices."""
    length = rows.shape[0]
    groups = Groups(starts, starts + lengths).shift(sharding.shard_offset("t", length), length)
    sum_dtype = dtype
    if "t" in sharding.axes:
        sum_dtype, a, b = _sum_dtype(a, b, dtype), _with_local_length(a), _with_local_length(b)
    dw = multiply(sum_dtype, a, b, rows, *groups, *scales)
    return sharding.psum(dw, "t", "- m n").astype(dtype)


def _with_local_length(x: Any) -> Any:
    """Return an operand with the packed codes of a device's part of its contraction."""
    is_packed = isinstance(x, QTensor) and x.length is not None
    return dataclasses.replace(x, length=2 * x.codes.shape[x.spec.axis]) if is_packed else x


def _sum_dtype(a: Any, b: Any, dtype: Any) -> Any:
    """Return the dtype in which partial sums are sent between devices: 16 bits for those of codes."""
    return jnp.dtype(jnp.bfloat16) if all(find_spec(x) is not None for x in (a, b)) else dtype


def _multiply_tile(fast: bool, dtype: DTypeLike, a: Any, b: Any) -> Array:
    """Return a @ b.T by XLA, for matrices of one group. The product of arrays is computed in the dtype of `a`."""
    if isinstance(a, FallbackTensor) and not on_cuda():
        products = (_multiply_tile(fast, jnp.float32, part, b) for part in (a.base, a.masked_residual()))
        return sum(products, jnp.zeros((), jnp.float32)).astype(dtype)
    if isinstance(a, Array) and isinstance(b, Array):
        numbers = (((1,), (1,)), ((), ()))
        return dot_general(a, b.astype(a.dtype), numbers, preferred_element_type=jnp.float32).astype(dtype)
    if on_cuda():
        return dot_in_16_bits()(dtype, a, b)
    return reference_matmul(fast, dtype, a, b)


def _tile_size(length: int, groups: int, unit: int) -> int:
    """Return the length of a tile: `unit` times a power of two, about half of a group, and at most 512 if possible."""
    units = max(length // (2 * groups * unit), 1)
    return unit * min(1 << (units.bit_length() - 1), max(512 // unit, 1))


def _loop_over_tiles(transposed: bool, fast: bool, dtype: Any, x: Any, w: Any, starts: Array, ends: Array) -> Array:
    """Return `grouped_matmul` for groups that are rows [starts, ends) of x."""
    rows, groups, columns = x.shape[0], w.shape[0], w.shape[2 if transposed else 1]
    if 0 in (*x.shape, *w.shape):
        return cast_varying_like(jnp.zeros((rows, columns), dtype), x, w, starts, ends)
    result = cast_varying_like(_zeros_after(x, (rows, columns), dtype), x, w, starts, ends)
    size = min(_tile_size(rows, groups, 16), rows)
    tiles = -(-(ends - starts) // size)
    tile_ends = jnp.cumsum(tiles)
    restore_x, restore_w = _restorer(x), _restorer(w)
    x, w = _to_bits(x), _to_bits(w)

    def multiply(i: Array, y: Array) -> Array:
        group = jnp.sum(tile_ends <= i)
        begin = starts[group] + (i - (tile_ends - tiles)[group]) * size
        at = jnp.minimum(begin, rows - size)  # the last tile starts earlier, among rows that are complete
        matrix = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, group, keepdims=False), w)
        matrix = restore_w(matrix)
        if isinstance(matrix, DeferredMatrices):
            matrix = matrix.encoder(matrix.values, matrix.scale)
        product = _multiply_tile(fast, dtype, restore_x(_slice(x, 0, at, size)), matrix.T if transposed else matrix)
        index = at + jnp.arange(size, dtype=jnp.int32)
        is_own = ((index >= begin) & (index < ends[group]))[:, None]
        product = jnp.where(is_own, product, lax.dynamic_slice_in_dim(y, at, size))
        return lax.dynamic_update_slice_in_dim(y, product, at, 0)

    return lax.fori_loop(0, tile_ends[-1], multiply, result)


def _loop_over_blocks(
    alignment: int,
    fast: bool,
    dtype: Any,
    a: Any,
    b: Any,
    rows: Array,
    starts: Array,
    ends: Array,
    scale: Array | None,
    row_scale: Array | None,
    column_scale: Array | None,
) -> Array:
    """Return `grouped_matmul_dw` for groups at the positions [starts, ends) of the axis, in whole aligned blocks."""
    m, n = (x.values.shape[1] if isinstance(x, UnpaddedRows) else x.shape[0] for x in (a, b))
    length, groups = rows.shape[0], starts.shape[0]
    if 0 in (m, n, length, groups):
        return cast_varying_like(jnp.zeros((groups, m, n), dtype), a, b, rows, starts, ends)
    size = min(_tile_size(length, groups, alignment), length)
    restore_a, restore_b = _restorer(a), _restorer(b)
    a, b = _to_bits(a), _to_bits(b)

    def write_group(group: Array, dw: Array) -> Array:
        start, end = starts[group], ends[group]

        def add_block(i: Array, sums: Array) -> Array:
            begin = start + i * size
            at = jnp.minimum(begin, length - size)
            index = at + jnp.arange(size, dtype=jnp.int32)
            is_own = (index >= begin) & (index < end)
            # A row beyond the last one reads as zeros.
            own_rows = jnp.where(is_own, lax.dynamic_slice_in_dim(rows, at, size), jnp.iinfo(jnp.int32).max)

            def slice_tokens(x: Any, restore: Callable[[Any], Any]) -> Any:
                if not isinstance(x, UnpaddedRows):
                    return restore(_mask_columns(_slice(x, 1, at, size), is_own))
                return x.to_columns(restore(_take_rows(x, own_rows)).values)

            return sums + _multiply_tile(fast, jnp.float32, slice_tokens(a, restore_a), slice_tokens(b, restore_b))

        zeros = cast_varying_like(jnp.zeros((m, n), jnp.float32), a, b, rows, starts, ends)
        sums = lax.fori_loop(0, -(-(end - start) // size), add_block, zeros)
        if scale is not None:
            sums = sums * scale[group]
        if row_scale is not None:
            sums = sums * row_scale[group][:, None]
        if column_scale is not None:
            sums = sums * column_scale[group][None]
        return lax.dynamic_update_index_in_dim(dw, sums.astype(dtype), group, 0)

    result = cast_varying_like(_zeros_after(b, (groups, m, n), dtype), a, b, rows, starts, ends)
    return lax.fori_loop(0, groups, write_group, result)


def _zeros_after(x: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros that depend on an operand. XLA would write the zeros of all loops at the start of a program."""
    bits = jax.tree.leaves(x)[0].reshape(-1)[:1]
    bits = formats.bitcast(bits, f"uint{8 * bits.dtype.itemsize}")
    return jnp.broadcast_to(
        jnp.minimum((bits >> 1).astype(jnp.int32), 0).astype(dtype).reshape([1] * len(shape)), shape
    )


def _to_bits(x: Any) -> Any:
    """Return an operand with FP8 codes as bytes: off GPUs, XLA widens a whole FP8 array before it slices it."""

    def to_bits(leaf: Array) -> Array:
        is_fp8 = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 1
        return formats.bitcast(leaf, jnp.uint8) if is_fp8 else leaf

    return jax.tree.map(to_bits, x)


def _restorer(x: Any) -> Callable[[Any], Any]:
    """Return the inverse of `_to_bits`, for a part of `x`."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(x)]

    def restore(part: Any) -> Any:
        leaves, structure = jax.tree.flatten(part)
        pairs = zip(leaves, dtypes, strict=True)
        return jax.tree.unflatten(structure, [y if y.dtype == d else formats.bitcast(y, d) for y, d in pairs])

    return restore


def _take_rows(x: UnpaddedRows, rows: Array) -> UnpaddedRows:
    """Return some rows of a matrix, and zeros for rows beyond the last one."""

    def take(leaf: Array) -> Array:
        return jnp.take(leaf, rows, axis=0, mode="fill", fill_value=0)

    values = x.values
    if isinstance(values, QTensor) and values.spec.granularity == "tensor":
        return dataclasses.replace(x, values=values.with_codes(take(values.codes)))
    return dataclasses.replace(x, values=jax.tree.map(take, values))


def _slice(x: Any, axis: int, start: Array, size: int) -> Any:
    """Return `size` rows or columns of an array or a QTensor, in whole blocks of it."""
    length = x.shape[axis]

    def slice_leaf(leaf: Array) -> Array:
        block = length // leaf.shape[axis]
        return lax.dynamic_slice_in_dim(leaf, start // block, size // block, axis) if block < length else leaf

    part = jax.tree.map(slice_leaf, x)
    is_packed_axis = isinstance(x, QTensor) and x.length is not None and axis == x.spec.axis % 2
    return dataclasses.replace(part, length=size) if is_packed_axis else part


def _mask_columns(x: Any, is_own: Array) -> Any:
    """Return an array or a QTensor with zeros in other columns, codes and scales: a scale of them may be NaN."""

    def mask_leaf(leaf: Array) -> Array:
        count = leaf.shape[1]  # one scale is of this group, since groups have whole blocks
        return leaf if count == 1 else jnp.where(is_own[:: is_own.shape[0] // count][None], leaf, jnp.zeros_like(leaf))

    return jax.tree.map(mask_leaf, x)
