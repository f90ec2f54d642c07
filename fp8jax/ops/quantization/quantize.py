"""Quantization of a matrix and of its transposed copy, in one pass on a GPU.

A packed matrix is one operand of a product as several arrays, such as q, k and v. Slicing and concatenating them would
each cost a pass over memory.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import blocks, derivatives, encoding, formats, noise, scaling
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.recipe import Linear
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.dispatch.choice import Choice, capability, choose_impl, missing_triton, on_cuda, record_choice, run
from fp8jax.ops.dispatch.partition import DimSharding, notation, on_one_device, run_partitioned
from fp8jax.ops.quantization import fused_outputs
from fp8jax.ops.quantization.fused_reference import column_sums
from fp8jax.ops.quantization.rotation import rotate_rows, signs

_COLUMNS_SEED = noise.param_seed("columns")
_KERNEL_GRANULARITIES = ("tensor", "token", "group", "block", "mx")  # of the kernel
_NVFP4_ROTATION = 16  # rows that the nvfp4 kernel transforms
Columns = QuantSpec | Literal["same"] | None
Pair = tuple[Any, Any]  # `QTensor`s of a matrix and of its transpose; None where no codes are requested
PairAndSums = tuple[Pair, Array | None]


PackedMatrix = Array | tuple[Array, ...]


def concatenate_packed(x: PackedMatrix) -> Array:
    """Return the matrix as one array."""
    return jnp.concatenate(x, 1) if isinstance(x, tuple) else x


def packed_shape(x: PackedMatrix) -> tuple[int, ...]:
    """Return the shape of the concatenated matrix."""
    return (x[0].shape[0], sum(y.shape[1] for y in x)) if isinstance(x, tuple) else x.shape


def can_quantize_unpacked(x: tuple[Array, ...], specs: Sequence[QuantSpec | None]) -> bool:
    """Return whether the kernel can quantize the matrices in place: on one GPU, under one scale."""
    if not on_cuda() or not on_one_device() or missing_triton("quantization.quantize_triton") is not None:
        return False
    from pallas_kernels.quantization import quantize_triton

    is_per_tensor = all(spec is None or spec.granularity == "tensor" for spec in specs)
    return is_per_tensor and quantize_triton.unsupported_packed_reason(x) is None


def should_split_output(recipe: Linear, split_sizes: Sequence[int]) -> bool:
    """Return whether to compute a product's result as several arrays of these widths.

    This needs gradients that can be quantized without concatenation. Narrow arrays would be inefficient products.
    """
    specs = [recipe.spec(operand) for operand in ("w", "dy", "dy_wgrad")]
    section_shapes: Any = tuple(jax.ShapeDtypeStruct((1, n), jnp.bfloat16) for n in split_sizes)
    return None not in specs and not recipe.stateful_strategies and can_quantize_unpacked(section_shapes, specs)


def split_weight(
    w_operand: QTensor | Array, bias: Array | None, split_sizes: Sequence[int] | None
) -> Iterator[tuple[QTensor | Array, Array | None]]:
    """Yield the weight (outputs, inputs) and bias of each section, or the inputs unchanged without `split_sizes`."""
    if split_sizes is None:
        yield w_operand, bias
    start = 0
    for n in split_sizes or ():
        section = slice(start, start + n)
        start += n
        w_section = (
            dataclasses.replace(w_operand, codes=w_operand.codes[section])
            if isinstance(w_operand, QTensor)
            else w_operand[section]
        )
        yield w_section, None if bias is None else bias[section]


def quantize(
    x: Array,
    rows: QuantSpec | str | None,
    columns: QuantSpec | str | None = None,
    *,
    scale: Array | None = None,
    is_scale_clamped: bool = False,
    strategy: Scaling | str = "current",
    key: Array | None = None,
    impl: str = "auto",
    fused_output: fused_outputs.FusedOutput | None = None,
    rotation: int | None = None,
) -> Pair:
    """Quantize a matrix and its transposed copy.

    The codes equal those of `fp8jax.quantize`, except for the noise of stochastic rounding. The noise differs between
    XLA and the kernel (`fp8jax.core.noise`). Both are unbiased and repeatable.

    Args:
        x: floating array (M, N).
        rows: spec of `x`, or None for no codes.
        columns: spec of `x.T`, "same" to transpose the codes of `rows` (granularity "tensor" or "block"), or None.
        scale: positive fp32 scales for granularity "tensor" or "token", broadcastable against the block counts. None
            computes them from `x`. Values out of range saturate. They are for the format of `rows`, else of `columns`;
            columns of another format cover the same range.
        is_scale_clamped: whether `scale` is a result of `fp8jax.core.scaling.clamp_scale`.
        strategy: how to compute scales of granularity "tensor", as in `fp8jax.core.scaling.find_scaling`. "current"
            reads the tensor. "two_stage" reduces bf16 maxima of its groups (COAT, section 5.2).
        key: PRNG key for specs that round stochastically.
        impl: "xla" is the reference. "auto" runs the kernel on CUDA GPUs with jax-triton for FP8 and int8 without
            expansion, groups and blocks of 16 to 128, and a kernel for nvfp4. "triton" is the same, but raises if it
            cannot run. `fp8jax.ops.dispatch.choice.record_choices` records the choice.
        fused_output: describes how `x` is computed, if known. With "auto", kernels read its operands instead of `x`.
        rotation: length of the Hadamard transformation of the rows of `x` before `columns`
            (`fp8jax.ops.quantization.rotation`), or None. The nvfp4 kernel transforms 16 rows in the same pass.

    Returns:
        QTensors of `x` (M, N) and of `x.T` (N, M), each None if its spec is None.

    Raises:
        ValueError: a spec does not suit a matrix, a key is missing or unused, `impl` is unknown, or `impl` is "triton"
            and the kernel cannot run.
    """
    return quantize_and_sum(
        x,
        rows,
        columns,
        sums=False,
        scale=scale,
        is_scale_clamped=is_scale_clamped,
        strategy=strategy,
        key=key,
        impl=impl,
        fused_output=fused_output,
        rotation=rotation,
    )[0]


def quantize_and_sum(
    x: PackedMatrix,
    rows: QuantSpec | str | None,
    columns: QuantSpec | str | None = None,
    *,
    sums: bool = True,
    scale: Array | None = None,
    is_scale_clamped: bool = False,
    strategy: Scaling | str = "current",
    key: Array | None = None,
    impl: str = "auto",
    fused_output: fused_outputs.FusedOutput | None = None,
    amax: Array | None = None,
    rotation: int | None = None,
) -> PairAndSums:
    """Quantize as `quantize`, and return the column sums, fp32 (N,), from the same pass (None without `sums`).

    `x` may be a tuple of matrices of M rows, which a kernel reads in place on one GPU. `amax` is the largest finite
    magnitude of `x`, if known; it saves a pass.
    """
    strategy = scaling.find_scaling(strategy)
    config = dataclasses.replace(
        _parse(rows, columns, strategy, sums), is_scale_clamped=is_scale_clamped, rotation=rotation
    )
    if isinstance(x, tuple) and not can_quantize_unpacked(x, config.specs):
        x = concatenate_packed(x)
    x = derivatives.error_if_differentiated(derivatives.CAST_TO_CODES_ERROR, x, scale)
    if (key is not None) != config.is_stochastic:
        need = "round stochastically: pass a key" if key is None else "round to nearest and take no key"
        raise ValueError(f"rows {rows} and columns {columns} {need}")
    if rotation is not None and not (config.is_nvfp4 and rotation == _NVFP4_ROTATION):
        x = concatenate_packed(x)
        row_key, column_key = (None, None) if key is None else jax.random.split(key)
        (row_codes, _), totals = quantize_and_sum(
            x,
            config.rows,
            sums=sums,
            scale=scale,
            is_scale_clamped=is_scale_clamped,
            strategy=strategy,
            key=row_key if config.rows is not None and config.rows.rounding == "stochastic" else None,
            impl=impl,
            fused_output=fused_output,
            amax=amax,
        )
        spec = config.transposed_spec
        _, column_codes = quantize(
            rotate_rows(x, rotation),
            None,
            spec,
            strategy=strategy,
            key=column_key if spec is not None and spec.rounding == "stochastic" else None,
            impl=impl,
        )
        return (row_codes, column_codes), totals
    if 0 in packed_shape(x):
        scale = None  # no elements, no scales
    if impl == "auto" and fused_output is not None and rotation is None and not isinstance(x, tuple):
        pair = fused_outputs.quantize_fused(
            fused_output,
            config.rows,
            config.transposed_spec,
            shares_codes=config.shares_codes,
            scale=scale,
            strategy=strategy,
            sums=sums,
        )
        if pair is not None:
            known_sums = fused_output.group.sums.get(fused_output.position)
            return pair, column_sums(x) if sums and known_sums is None else known_sums
    choice = record_choice("quantize", _choose(x, config, scale, impl))
    kernel, reference = (functools.partial(f, config) for f in (_kernel, _reference))
    return run(choice, impl, x, scale, key, amax, kernel=kernel, reference=reference)


def transpose(q: QTensor, *, factor: Array | None = None, impl: str = "auto") -> QTensor:
    """Transpose a quantized matrix. Groups and tokens cannot be transposed: quantize again along the other axis.

    Args:
        q: QTensor (M, N) of granularity "tensor" or "block".
        factor: fp32 (M, 1), which multiplies FP8 codes of each row, rounded to nearest. None leaves codes unchanged.
        impl: "auto", "xla" or "triton". XLA transposes bytes at a fraction of a GPU's bandwidth.

    Raises:
        ValueError: the granularity is unsupported, or as in `quantize`.
    """
    if q.spec.granularity not in TRANSPOSABLE:
        raise ValueError(
            f"the scales of {q.spec} cannot be used for the transposed matrix; quantize it along the other axis"
        )
    fits = len(q.shape) == 2 and q.codes.dtype.itemsize == 1 and 0 not in q.shape
    shape_reason = None if fits else f"the codes are {q.codes.dtype}{list(q.codes.shape)}, no matrix of bytes"
    choice = choose_impl(
        impl, lambda: shape_reason or missing_triton("quantization.transpose_triton", fp8=factor is not None)
    )
    codes = run(choice, impl, q.codes, factor, kernel=_transpose_kernel, reference=_multiply_and_transpose)
    return dataclasses.replace(q, codes=codes, scale=q.scale.T)


@dataclasses.dataclass(frozen=True)
class _QuantizeConfig:
    rows: QuantSpec | None
    columns: Columns
    strategy: Scaling
    sums: bool
    is_scale_clamped: bool = False
    rotation: int | None = None

    @property
    def is_nvfp4(self) -> bool:
        """Whether all codes are e2m1 in the groups of the nvfp4 kernel."""
        specs = [spec for spec in self.specs if spec is not None]
        return bool(specs) and all(spec.is_block_scaled and formats.get(spec.format).is_fp4 for spec in specs)

    @property
    def shares_codes(self) -> bool:
        return self.columns == "same"

    @property
    def transposed_spec(self) -> QuantSpec | None:
        """The spec of the transposed copy."""
        return self.rows if self.columns == "same" else self.columns

    @property
    def specs(self) -> tuple[QuantSpec | None, QuantSpec | None]:
        return self.rows, self.transposed_spec

    @property
    def has_integers(self) -> bool:
        return any(spec is not None and not formats.get(spec.format).is_float for spec in self.specs)

    @property
    def is_stochastic(self) -> bool:
        return any(spec is not None and spec.rounding == "stochastic" for spec in self.specs)

    def scale_for(self, spec: QuantSpec, scale: Array) -> Array:
        """Convert a scale from the first requested format to that of `spec`."""
        first_spec = self.rows or self.transposed_spec
        assert first_spec is not None
        return scaling.convert_scale(scale, formats.get(first_spec.format), formats.get(spec.format))


def _parse(
    rows: QuantSpec | str | None, columns: QuantSpec | str | None, strategy: Scaling, sums: bool
) -> _QuantizeConfig:
    first = None if rows is None else QuantSpec.parse(rows)
    second: Any = columns if columns is None or columns == "same" else QuantSpec.parse(columns)
    config = _QuantizeConfig(first, second, strategy, sums)
    if config.shares_codes and (first is None or first.granularity not in TRANSPOSABLE):
        raise ValueError(f"columns='same' needs a rows spec with scales that can be transposed, got {rows}")
    if config.shares_codes and first is not None and first.granularity == "block" and first.axis not in (-1, 1):
        raise ValueError(f"columns='same' needs blocks along the last axis, got {first}")
    return config


def _choose(x: Any, config: _QuantizeConfig, scale: Array | None, impl: str) -> Choice:
    x = jax.ShapeDtypeStruct(packed_shape(x), x[0].dtype) if isinstance(x, tuple) else x
    if len(x.shape) != 2:
        raise ValueError(f"quantize expects a matrix, got shape {x.shape}; use jax.vmap for stacks of them")
    if config.is_nvfp4:
        return choose_impl(
            impl,
            lambda: missing_triton("quantization.nvfp4_triton") or _unsupported_nvfp4_reason(x, config),
            "the nvfp4 kernel",
        )
    fp8 = any(spec and formats.get(spec.format).is_fp8 for spec in config.specs)
    return choose_impl(
        impl, lambda: missing_triton("quantization.quantize_triton", fp8=fp8) or _unsupported_reason(x, config, scale)
    )


def _unsupported_nvfp4_reason(x: Any, config: _QuantizeConfig) -> str | None:
    from pallas_kernels.quantization import nvfp4_triton

    for spec in config.specs:
        if spec is None:
            continue
        if spec.axis not in (-1, 1) or spec.layer_axes or spec.scale_format != "fp32" or not spec.flush_to_zero:
            return f"it makes codes with fp32 scales along the last axis of a matrix, not {spec}"
    return nvfp4_triton.unsupported_reason(x.shape, x.dtype)


def _unsupported_reason(x: Any, config: _QuantizeConfig, scale: Array | None) -> str | None:
    from pallas_kernels.quantization import quantize_triton

    if len({formats.get(spec.format).is_float for spec in config.specs if spec}) > 1:
        return f"{config.rows} and {config.transposed_spec} are floating and integer codes"
    for spec in config.specs:
        if spec is None:
            continue
        fmt = formats.get(spec.format)
        if not fmt.is_matmul_format or fmt.name == "e8m0" or spec.expand or not spec.flush_to_zero:
            return f"it makes plain FP8 and int8 codes, not {spec}"
        if spec.granularity not in _KERNEL_GRANULARITIES or spec.axis not in (-1, 1) or spec.layer_axes:
            return f"it makes scales of {', '.join(_KERNEL_GRANULARITIES)} along the last axis of a matrix, not {spec}"
        if scale is not None and spec.granularity not in ("tensor", "token"):
            return f"given scales of {spec} are XLA's"
        if scale is not None and not fmt.is_float:
            return f"given scales of {spec}, which NaN and Inf change, are XLA's"
    return quantize_triton.unsupported_reason(x.shape, x.dtype, tuple(map(fused_outputs.to_coding, config.specs)))


def _reference(
    config: _QuantizeConfig, x: PackedMatrix, scale: Array | None, key: Array | None, amax: Array | None
) -> PairAndSums:
    x = concatenate_packed(x)
    return _codes(config, x, scale, key), column_sums(x) if config.sums else None


def _codes(config: _QuantizeConfig, x: Array, scale: Array | None, key: Array | None) -> Pair:
    if on_cuda() and config.rows is not None and config.transposed_spec is not None and not config.shares_codes:
        # Without the barrier, XLA fuses the producer of `x` into the column reduction, which is slow.
        (x,) = lax.optimization_barrier((x,))
    # One seed for all elements. XLA would recompute the bits of `jax.random` in every pass that reads them.
    seed = None if key is None else noise.key_to_seed(key)
    seeds = seed, None if seed is None else noise.fold_in_seed(seed, _COLUMNS_SEED)

    def quantize_one(y: Array, spec: QuantSpec | None, seed: Array | None) -> Any:
        if spec is None:
            return None
        y = encoding.limit_group_range(y, spec, 1.0)
        has_scale = scale is not None and spec.granularity in ("tensor", "token")
        s = config.scale_for(spec, scale) if has_scale else None  # type: ignore[arg-type]
        if s is None and spec.granularity == "tensor" and not config.strategy.is_default:
            find_scale = functools.partial(config.strategy.scale, fmt=formats.get(spec.format))
            (s,) = blocks.on_logical_array(lambda y: (find_scale((), y),), y, out_shapes=[()])
        return quantize_with_scale(y, spec, s, seed=seed if spec.rounding == "stochastic" else None)

    def quantize_transposed(spec: QuantSpec, seed: Array | None) -> QTensor | None:
        if spec.granularity not in TRANSPOSABLE or spec.axis not in (-1, 1) or spec.is_packed:
            return quantize_one(rotate_rows(x, config.rotation).T, spec, seed)
        # Transpose codes, not the matrix: XLA would transpose it before it reduces blocks.
        return transpose(quantize_one(x, spec, seed), impl="xla")

    rows = quantize_one(x, config.rows, seeds[0])
    if config.shares_codes:
        return rows, transpose(rows, impl="xla")
    return rows, None if config.transposed_spec is None else quantize_transposed(config.transposed_spec, seeds[1])


def _kernel(
    config: _QuantizeConfig, x: PackedMatrix, scale: Array | None, key: Array | None, amax: Array | None
) -> PairAndSums:
    if config.has_integers:
        amax = None  # it ignores NaN and Inf, which integer scales must show
    seed = None if key is None else jax.random.bits(key, (2,), jnp.uint32)
    dim_names = ("m n", "n m")
    scale_axes = None
    if scale is not None:
        axes = dim_names[config.rows is None].split()[2 - scale.ndim :]
        scale_axes = " ".join(name if k > 1 else "-" for name, k in zip(axes, scale.shape, strict=True))
    shape = packed_shape(x)
    outs = [
        s and notation(s, shape[::step], names) for s, step, names in zip(config.specs, (1, -1), dim_names, strict=True)
    ]
    quantize_shard = functools.partial(_quantize_nvfp4_shard if config.is_nvfp4 else _quantize_shard, config, shape)
    return run_partitioned(
        "quantize", (config, shape), quantize_shard, (x, scale, seed, amax),
        ("m n", scale_axes, "-", None if amax is None else ""), (outs, "n" if config.sums else None),
        units={"m": 4} if config.is_stochastic else {}, takes_stacks=_takes_stacks(config, x, scale, amax),
    )  # fmt: skip


def _takes_stacks(config: _QuantizeConfig, x: PackedMatrix, scale: Array | None, amax: Array | None) -> bool:
    """Return whether one launch quantizes a stack of these matrices, such as those of experts."""
    kinds = {spec.granularity for spec in config.specs if spec is not None}
    is_supported = not (config.sums or config.is_stochastic or isinstance(x, tuple)) and amax is None
    return is_supported and kinds <= {"tensor", "group", "block"} and (scale is None or scale.size == 1)


def _quantize_shard(
    config: _QuantizeConfig,
    global_shape: tuple[int, ...],
    sharding: DimSharding,
    x: PackedMatrix,
    scale: Array | None,
    seed: Array | None,
    amax: Array | None,
) -> PairAndSums:
    """Quantize a device's shard of a matrix of shape `global_shape`, or of a stack of them (see `_takes_stacks`)."""
    from pallas_kernels.quantization import amax_triton, quantize_rows_triton, quantize_triton

    rows_only_spec = config.rows if config.columns is None and "n" not in sharding.axes else None
    if (
        not config.sums
        and not isinstance(x, tuple)
        and rows_only_spec
        and _amax_granularity(rows_only_spec, scale) == rows_only_spec.granularity == "token"
        and rows_only_spec.scale_format == "fp32"
    ):
        coding = fused_outputs.to_coding(rows_only_spec)
        if quantize_rows_triton.unsupported_reason(x.shape, x.dtype, coding) is None:
            codes, rows = quantize_rows_triton.quantize_rows(x, coding, compute_capability=capability())
            return (QTensor(codes, rows, None, None, rows_only_spec), None), None
    stack = () if isinstance(x, tuple) else x.shape[:-2]
    shape = packed_shape(x)[len(stack) :]
    shapes = (shape, shape[::-1])
    levels = [
        s and _amax_granularity(s, scale)
        for s in (config.rows, None if config.shares_codes else config.transposed_spec)
    ]
    needs_row_amax, needs_column_amax = levels[0] == "token", levels[1] == "token"
    if "tensor" in levels and amax is None:
        matrices = x if isinstance(x, tuple) else (x,)
        tensor_amax = functools.partial(_tensor_amax, integers=config.has_integers)
        local_amax = functools.reduce(jnp.maximum, map(jax.vmap(tensor_amax) if stack else tensor_amax, matrices))
        amax = sharding.pmax(local_amax, "m n")
    row_amax = column_amax = None
    if needs_row_amax or needs_column_amax:
        assert not isinstance(x, tuple)
        row_amax, column_amax = amax_triton.compute_amax(
            x,
            rows=needs_row_amax,
            columns=needs_column_amax,
            integers=config.has_integers,
            compute_capability=capability(),
        )
        row_amax = None if row_amax is None else sharding.pmax(row_amax, "n")
        column_amax = None if column_amax is None else sharding.pmax(column_amax, "m")
    is_scale_in_kernel = [s is not None and scale is None and _is_scale_in_kernel(s, config) for s in config.specs]
    scales: list[Array | None] = []
    for i, spec in enumerate(config.specs):
        if spec is None or spec.granularity in ("group", "block") or is_scale_in_kernel[i]:
            scales.append(None)
            continue
        count = (*stack, *blocks.counts(shapes[i], spec.block_shape(shapes[i])))
        if scale is not None and spec.granularity != "mx":
            given_scale = config.scale_for(spec, scale.reshape(count) if stack else scale)
            value = jnp.broadcast_to(
                given_scale if config.is_scale_clamped else scaling.clamp_scale(given_scale), count
            )
        elif spec.granularity == "mx" and spec.outer_scale == "none":
            value = jnp.ones(count, jnp.float32)
        else:
            top = amax if _outer_granularity(spec) == "tensor" else (row_amax, column_amax)[i]
            assert top is not None
            if spec.granularity == "tensor":
                top = config.strategy.reduce_amax(top)
            value = jnp.where(jnp.isnan(top), jnp.nan, scaling.to_scale(top, formats.get(spec.format))).reshape(count)
        scales.append(encoding.cast_scale(value, spec, is_given=scale is not None))
    *outputs, column_totals = quantize_triton.quantize(
        x,
        fused_outputs.to_coding(config.rows),
        "same" if config.shares_codes else fused_outputs.to_coding(config.transposed_spec),
        row_scale=scales[0],
        column_scale=scales[1],
        amax=amax if any(is_scale_in_kernel) else None,
        rounds_amax_up=config.strategy.amax_rounding == "up",
        seed=seed,
        rng_offset=None if seed is None else sharding.rng_offset(global_shape, shape),
        sums=config.sums,
        compute_capability=capability(),
    )
    tensors: list[QTensor | None] = []
    for output, precomputed_scale, spec in zip(outputs, scales, config.specs, strict=True):
        if output is None or spec is None:
            tensors.append(None)
            continue
        used_scale = output.scale if precomputed_scale is None else precomputed_scale
        assert used_scale is not None
        tensors.append(QTensor(output.codes, used_scale, None, output.microscale, spec))
    return (tensors[0], tensors[1]), None if column_totals is None else sharding.psum(column_totals, "m")


def _quantize_nvfp4_shard(
    config: _QuantizeConfig,
    global_shape: tuple[int, ...],
    sharding: DimSharding,
    x: PackedMatrix,
    scale: Array | None,
    seed: Array | None,
    amax: Array | None,
) -> PairAndSums:
    """Quantize a device's shard of a matrix of shape `global_shape` to nvfp4."""
    from pallas_kernels.quantization import nvfp4_triton

    x = concatenate_packed(x)
    is_rotated = config.rotation is not None and config.transposed_spec is not None
    sign_bits = sum(1 << i for i, sign in enumerate(signs(_NVFP4_ROTATION)) if sign < 0) if is_rotated else None
    if sign_bits is not None:
        amaxes = nvfp4_triton.compute_amax(x, sign_bits, compute_capability=capability())
    else:
        amaxes = (scaling.compute_amax(x) if amax is None else amax,) * 2
    scales = []
    for shard_amax in amaxes:
        tensor_amax = sharding.pmax(shard_amax, "m n")
        tensor_amax = jnp.where(tensor_amax >= formats.TINY, tensor_amax, 0)
        scales.append(scaling.to_scale(tensor_amax, formats.E2M1, formats.E4M3.max))
    row_coding, column_coding = (
        None if spec is None else nvfp4_triton.Coding(spec.granularity, spec.rounding == "stochastic")  # type: ignore[arg-type]
        for spec in config.specs
    )
    outputs = nvfp4_triton.quantize(
        x,
        row_coding,
        column_coding,
        row_scale=scales[0],
        column_scale=scales[1],
        signs=sign_bits,
        seed=seed,
        rng_offset=None if seed is None else sharding.rng_offset(global_shape, x.shape),
        compute_capability=capability(),
    )
    rows, columns = (
        None
        if output is None or spec is None
        else QTensor(output.codes, scale.reshape(1, 1), None, output.microscale, spec, length)
        for output, scale, spec, length in zip(outputs, scales, config.specs, x.shape[::-1], strict=True)
    )
    return (rows, columns), sharding.psum(column_sums(x), "m") if config.sums else None


def _tensor_amax(x: Array, integers: bool) -> Array:
    """Return the largest finite magnitude of a matrix; for integer codes, which have no NaN and Inf, NaN for these."""
    amax = scaling.compute_amax(x)
    return jnp.where(jnp.all(jnp.isfinite(x)), amax, jnp.nan) if integers else amax


def _is_scale_in_kernel(spec: QuantSpec, config: _QuantizeConfig) -> bool:
    """Return whether the kernel computes the tensor's scale from its amax, which saves a launch."""
    is_fp32_per_tensor = spec.granularity == "tensor" and spec.scale_format == "fp32" and not config.has_integers
    return is_fp32_per_tensor and config.strategy.amax_rounding is not None


def _outer_granularity(spec: QuantSpec) -> str:
    """Return the granularity of the scale, or of the outer scale under microscaling."""
    return spec.outer_scale if spec.granularity == "mx" else spec.granularity


def _amax_granularity(spec: QuantSpec, scale: Array | None) -> str | None:
    """Return the granularity of the amax that needs its own pass, "tensor" or "token", or None."""
    granularity = _outer_granularity(spec)
    return granularity if granularity in ("tensor", "token") and (scale is None or spec.granularity == "mx") else None


def _multiply_and_transpose(codes: Array, factor: Array | None) -> Array:
    return codes.T if factor is None else (formats.decode_fp8(codes) * factor).astype(codes.dtype).T


def _transpose_kernel(codes: Array, factor: Array | None) -> Array:
    from pallas_kernels.quantization import transpose_triton

    def transpose_shard(sharding: DimSharding, codes: Array, factor: Array | None) -> Array:
        return transpose_triton.transpose(codes, factor=factor, compute_capability=capability())

    ins = ("m n", None if factor is None else "m -")
    return run_partitioned("transpose", factor is None, transpose_shard, (codes, factor), ins, "n m")
