"""Statistics of a tensor and of the errors of its codes, for `fp8jax.telemetry`.

Each statistic is a sum, the logarithm of a sum, or a maximum, so that those of parts of a tensor can be merged.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8jax.core import blocks, encoding, formats
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.dispatch.choice import capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.dispatch.partition import DimSharding, notation, run_partitioned

# In the order of the kernel. To be maxima, some are negated.
NAMES = (
    # Of a tensor: numbers of elements and of NaN and Inf, the amax, and the logarithm of the sum of squares.
    *("size", "nonfinite", "amax", "log_signal"),
    # Of its codes: the logarithm of the sum of squared errors, the numbers of nonzero values and of those among them
    # that decode to zero, and minus the bits of a code.
    *("log_noise", "nonzero", "lost", "minus_bits"),
    # Of their scales: the number of saturated values, the largest ratio of a magnitude to the largest value of its
    # group, log2 of the largest such value, and minus log2 of the smallest.
    *("saturated", "range_ratio", "largest_scale", "smallest_scale"),
    # Of range expansion: the sum and number of exponents, the largest exponent, and minus the smallest.
    *("exponents", "groups", "largest_exponent", "smallest_exponent"),
)
# How the statistics of two tensors are merged. All others are sums. Both have names that only observations add.
MAXIMA = (
    *("amax", "range_ratio", "minus_bits", "fallback_threshold", "factor"),
    *("largest_scale", "smallest_scale", "largest_exponent", "smallest_exponent"),
)
LOG_SUMS = ("log_signal", "log_noise", "log_weight", "log_update")


def merge_by_kind(names: Sequence[str], sums: Array, log_sums: Array, maxima: Array) -> Array:
    """The merged values of statistics, each by its kind."""
    kinds = [np.array([name in kind for name in names]) for kind in (LOG_SUMS, MAXIMA)]
    return jnp.select(kinds, [log_sums, maxima], sums)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Static arguments of `compare`."""

    bits: int
    is_transposed: bool
    min_unit: float


def compare(
    x: Array,
    decoded: Array | None = None,
    codes: QTensor | None = None,
    *,
    bits: int = 32,
    is_transposed: bool = False,
    row_mask: Array | None = None,
    min_unit: float = formats.TINY,
    impl: str = "auto",
) -> tuple[tuple[str, ...], Array]:
    """The names and values of the statistics of a tensor.

    Args:
        x: floating, any shape.
        decoded: the values of the codes, if they are not those of `codes`. With neither, there are no errors.
        codes: not packed; their scales are those of `decoded`, too.
        bits: width of a code.
        is_transposed: whether the codes are those of the transposed matrix.
        row_mask: bool (rows, 1), which rows of a matrix are counted; None counts all. Scales are then per row.
        min_unit: squares are summed in units of the amax, at least of this number. It must be near the largest error
            if the tensor may be zero; squares of errors may overflow.
        impl: "auto", "xla" or "triton", as in `fp8jax.ops.quantization.quantize.quantize`.

    Returns:
        Names, and fp32 values (names,).
    """
    settings = _Settings(bits, is_transposed, min_unit)
    choice = record_choice("telemetry", choose_impl(impl, lambda: _unsupported_reason(settings, x, codes)))
    kernel, reference = (functools.partial(f, settings) for f in (_kernel, _reference))
    values: Array = run(choice, impl, x, decoded, codes, row_mask, kernel=kernel, reference=reference)
    return NAMES[: values.size], values


def _reference(
    settings: _Settings, x: Array, decoded: Array | None, codes: QTensor | None, row_mask: Array | None
) -> Array:
    x = x.T if settings.is_transposed else x

    def counted_magnitude(x: Array) -> Array:
        is_finite = jnp.isfinite(x)
        return jnp.where(is_finite if row_mask is None else is_finite & row_mask, jnp.abs(x), 0).astype(jnp.float32)

    # Squares of values relative to the amax do not overflow.
    unit = lax.reduce(counted_magnitude(x), np.float32(settings.min_unit), lax.max, tuple(range(x.ndim)))
    # Without a barrier, XLA would save decoded arrays of the forward pass for the backward pass, and masks for the
    # second reduction.
    x, decoded, codes, unit = lax.optimization_barrier((x, decoded, codes, unit))
    x = x.astype(jnp.float32)
    magnitude = counted_magnitude(x)
    size = jnp.float32(x.size) if row_mask is None else x.shape[-1] * jnp.sum(row_mask, dtype=jnp.float32)
    summed = {"nonfinite": ~jnp.isfinite(x), "log_signal": jnp.square(magnitude / unit)}
    scalars, maximized = {"size": size}, {"amax": magnitude}
    if codes is not None and decoded is None:
        decoded = codes.dequantize()
    if decoded is not None:
        difference, nonzero = x - decoded, magnitude >= formats.TINY
        summed["log_noise"] = jnp.square(jnp.where(jnp.isfinite(difference), difference, 0) / unit)
        summed |= {"nonzero": nonzero, "lost": nonzero & (decoded == 0)}
        scalars["minus_bits"] = -jnp.float32(settings.bits)
    if codes is not None:
        limit = _largest_values(codes)
        summed["saturated"] = magnitude > limit * (1 + _half_ulp_of_largest(formats.get(codes.spec.format)))
        # XLA on GPUs writes a condition to memory if more arrays depend on it. These depend on another one.
        maximized["range_ratio"] = magnitude / jnp.where(limit > 0, limit, jnp.inf)
        # A scale is NaN if a format without NaN has one in a block.
        maximized["largest_scale"] = jnp.where((magnitude > 0) & (limit > 0), limit, 0)
        maximized["smallest_scale"] = jnp.where((magnitude > 0) & (limit > 0), -limit, -jnp.inf)
    scalars |= _reduce_in_one_pass(summed, maximized, row_mask)
    if codes is not None and codes.expansion is not None:
        exponents = codes.expansion.astype(jnp.float32)
        total = functools.partial(jnp.sum, dtype=jnp.float32, where=row_mask)
        scalars |= {"exponents": total(exponents), "groups": total(jnp.ones_like(exponents))}
        for name, sign in (("largest_exponent", 1), ("smallest_exponent", -1)):
            scalars[name] = jnp.max(sign * exponents, initial=-jnp.inf, where=row_mask)
    # Logarithms of all values at once: operations on single numbers would take long to compile.
    names = NAMES[: len(scalars)]
    values = jnp.stack([scalars[name] for name in names])
    signs = np.array([-1 if name == "smallest_scale" else 1 for name in names], np.float32)
    kinds = [np.array([name in kind for name in names]) for kind in (LOG_SUMS, ("largest_scale", "smallest_scale"))]
    return jnp.select(kinds, [jnp.log(values) + 2 * jnp.log(unit), signs * jnp.log2(signs * values)], values)


def _reduce_in_one_pass(
    summed: Mapping[str, Array], maximized: Mapping[str, Array], row_mask: Array | None
) -> dict[str, Array]:
    """The sums of some arrays and the maxima of others, fp32, by one reduction, so that XLA reads inputs once."""
    if row_mask is not None:
        summed = {name: jnp.where(row_mask, x, 0) for name, x in summed.items()}
    operands = [x.astype(jnp.float32) for x in (*summed.values(), *maximized.values())]
    # An array without elements has the maximum 0 of magnitudes and scales.
    initial = [jnp.float32(0)] * len(summed) + [
        jnp.float32(-jnp.inf if name == "smallest_scale" else 0) for name in maximized
    ]

    def merge(xs: Sequence[Array], ys: Sequence[Array]) -> list[Array]:
        count = len(summed)
        return [*map(jnp.add, xs[:count], ys[:count]), *map(jnp.maximum, xs[count:], ys[count:])]

    results = lax.reduce(operands, initial, merge, tuple(range(operands[0].ndim)))
    return dict(zip((*summed, *maximized), results, strict=True))


def _largest_values(codes: QTensor) -> Array:
    """The largest magnitude that each element's scale can represent."""
    fmt = formats.get(codes.spec.format)
    codes = codes.with_codes(jnp.full_like(codes.codes, fmt.encode(jnp.float32(fmt.max))))
    return dataclasses.replace(codes, expansion=None).dequantize()  # any power of the largest value is itself


def _half_ulp_of_largest(fmt: formats.Format) -> float:
    """Half the distance of the largest code to the next one, relative to the largest: smaller excess is rounded."""
    ulp = 2.0 ** (math.floor(math.log2(fmt.max)) - fmt.mantissa_bits) if fmt.is_float else 1.0
    return ulp / 2 / fmt.max


def _unsupported_reason(settings: _Settings, x: Array, codes: QTensor | None) -> str | None:
    is_fp8 = codes is not None and formats.get(codes.spec.format).is_fp8
    if (reason := missing_triton("quantization.statistics_triton", fp8=is_fp8)) is not None:
        return reason
    from pallas_kernels.quantization import statistics_triton

    shape = x.shape[::-1] if settings.is_transposed else x.shape
    rows, columns = (1, 1) if codes is None else _group_shape(codes, shape)
    reason = statistics_triton.unsupported_reason(shape, x.dtype, columns)
    if reason is None and codes is not None and math.prod(shape[:-2]) > 1 and shape[-2] % min(rows, shape[-2]):
        return f"a group of {rows} rows of {codes.spec} would lie in two matrices of shape {shape[-2:]}"
    return reason


def _block_shape(codes: QTensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The lengths of the blocks of an array of this shape that share a scale, of the inner scale if there are two."""
    lengths = (codes.spec.block_shape if codes.microscale is None else codes.spec.micro_shape)(shape)
    return tuple(map(min, lengths, shape))


def _group_shape(codes: QTensor, shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns that share a scale, of the matrix of all rows of an array of this shape."""
    block = _block_shape(codes, shape)
    return math.prod(shape[:-1]) if block[:-1] == tuple(shape[:-1]) else block[-2], math.prod(block[-1:])


def _group_scales(codes: QTensor, shape: Sequence[int]) -> tuple[Array, Array | None]:
    """The scales and exponents of the groups of `_group_shape`."""
    block = _block_shape(codes, shape)
    counts = blocks.counts(shape, block)
    if math.prod(counts[:-1]) > 1:  # the groups of each matrix of a stack
        counts = (*shape[:-2], *counts[-2:])

    def broadcast_to_groups(x: Array) -> Array:
        return jnp.broadcast_to(blocks.broadcast_blocks(x, counts, (*block[:-2], *[1] * len(block[-2:]))), counts)

    scale = codes.scale.astype(jnp.float32)
    if codes.microscale is not None:
        scale = scale * encoding.decode_microscales(codes.microscale, codes.spec)
    return broadcast_to_groups(scale), None if codes.expansion is None else broadcast_to_groups(codes.expansion)


def dimension_names(ndim: int) -> str:
    """The notation of an array of up to six axes for `run_partitioned`: "m n" is a matrix."""
    return " ".join(("a", "b", "c", "d", "m", "n")[-ndim:])


def _kernel(
    settings: _Settings, x: Array, decoded: Array | None, codes: QTensor | None, row_mask: Array | None
) -> Array:
    dims = dimension_names(x.ndim)
    leaves = None if codes is None else notation(codes.spec, codes.shape, dims)
    values: Array = run_partitioned(
        "telemetry", (settings, codes and codes.spec), functools.partial(_compare_shard, settings),
        (x, decoded, codes, row_mask), ("n m" if settings.is_transposed else dims, dims, leaves, "m -"), "-",
    )  # fmt: skip
    return values


def _compare_shard(
    settings: _Settings,
    sharding: DimSharding,
    x: Array,
    decoded: Array | None,
    codes: QTensor | None,
    row_mask: Array | None,
) -> Array:
    """The statistics of all shards of a tensor."""
    from pallas_kernels.quantization import statistics_triton

    shape = x.shape[::-1] if settings.is_transposed else x.shape
    values, scale, exponents = decoded, None, None
    largest_code, tolerance, group_shape = 1.0, 0.0, (1, 1)
    if codes is not None:
        fmt = formats.get(codes.spec.format)
        largest_code, tolerance, group_shape = fmt.max, _half_ulp_of_largest(fmt), _group_shape(codes, shape)
        values = codes.codes if decoded is None else decoded
        scale, exponents = _group_scales(codes, shape)
    parts = statistics_triton.compare_parts(
        x,
        values,
        scale,
        exponents,
        row_mask,
        largest_code=largest_code,
        tolerance=tolerance,
        bits=settings.bits,
        group_shape=group_shape,
        is_decoded=decoded is not None,
        is_transposed=settings.is_transposed,
        min_unit=settings.min_unit,
        compute_capability=capability(),
    )
    num_statistics = 4 * (1 + sum(array is not None for array in (values, scale, exponents)))
    merged = statistics_triton.merge(parts, num_statistics, compute_capability=capability())
    if not sharding.axes:
        return merged
    dims = " ".join(sharding.axes)
    largest = sharding.pmax(merged, dims)
    unit = jnp.where(jnp.isfinite(largest), largest, 0)
    log_sums = unit + jnp.log(sharding.psum(jnp.exp(merged - unit), dims))
    return merge_by_kind(NAMES[: merged.size], sharding.psum(merged, dims), log_sums, largest)
