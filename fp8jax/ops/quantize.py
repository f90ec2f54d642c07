"""Quantization of a matrix and of its transposed copy, as the products of a linear read them: one pass on a GPU."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import blocks, derivatives, encoding, formats, noise, scaling
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops import beside, fused, fused_codes
from fp8jax.ops.choice import Choice, capability, missing_triton, on_cuda, run, tell, triton_or_xla
from fp8jax.ops.cuts import Cut, notation
from fp8jax.ops.fused_reference import column_sums
from fp8jax.ops.partition import partitioned

_COLUMNS = noise.salt("columns")
_KINDS = ("tensor", "token", "group", "block", "mx")  # of the kernel
Columns = QuantSpec | Literal["same"] | None
Pair = tuple[QTensor | None, QTensor | None]
Summed = tuple[Pair, Array | None]


def quantize(
    x: Array,
    rows: QuantSpec | str | None,
    columns: QuantSpec | str | None = None,
    *,
    scale: Array | None = None,
    used: bool = False,
    strategy: Scaling | str = "current",
    key: Array | None = None,
    impl: str = "auto",
    part: fused.Output | None = None,
) -> Pair:
    """Codes of a matrix and of its transposed copy.

    The codes are those of `fp8jax.quantize`, but stochastic rounding draws other noise, in the kernel as well as in XLA
    (`fp8jax.core.noise`); both are unbiased, and each repeats exactly.

    Args:
        x: (M, N), floating.
        rows: how `x` is quantized, or None where its codes are not wanted.
        columns: how `x.T`, (N, M), is: a spec of its own, "same" for the codes of `rows` transposed, which needs
            granularity "tensor" or "block", or None.
        scale: positive fp32 scales of whatever here is of granularity "tensor" or "token", broadcastable against its
            block counts; None takes them from `x`. Finite values beyond their range saturate. They are for the format
            of `rows`, if rows are asked for; columns of another format have the same range.
        used: whether codes were made under this scale before, which then is one that `fp8jax.core.scaling.usable` gave.
        strategy: where scales of granularity "tensor" come from otherwise, as `fp8jax.core.scaling.find` takes it:
            "current", the tensor, or "two_stage", the tensor through bf16 maxima of its groups (COAT, section 5.2).
        key: PRNG key for specs that round stochastically.
        impl: "xla" is the reference. "auto" is the kernel on a CUDA GPU where jax-triton is installed and the kernel
            makes such codes, on however many devices: FP8 and int8 without expansion, groups and blocks of 16 to 128.
            "triton" is the same, but raises where "auto" would fall back. `fp8jax.ops.choice.listening` tells which.
        part: what `x` is computed from, where that is known: kernels read this then, under "auto".

    Returns:
        What was asked for, `x` and `x.T`; None for the others.

    Raises:
        ValueError: a spec is malformed or does not suit a matrix; a key is missing or not needed; `impl` is unknown,
            or it is "triton" and the kernel cannot run: the message says why.
    """
    how: Any = {"scale": scale, "used": used, "strategy": strategy, "key": key, "impl": impl, "part": part}
    return quantize_and_sum(x, rows, columns, sums=False, **how)[0]


def quantize_and_sum(
    x: beside.Matrix,
    rows: QuantSpec | str | None,
    columns: QuantSpec | str | None = None,
    *,
    sums: bool = True,
    scale: Array | None = None,
    used: bool = False,
    strategy: Scaling | str = "current",
    key: Array | None = None,
    impl: str = "auto",
    part: fused.Output | None = None,
    largest: Array | None = None,
) -> Summed:
    """`quantize`, and the sums of columns, fp32 (N,), from the same pass; None without `sums`.

    `largest` is the largest finite magnitude of `x`, if that is known: kernels need not look for it. `x` may be the
    matrices, of M rows, that it is side by side: on one GPU the kernel reads these where each lies.
    """
    strategy = scaling.find(strategy)
    how = dataclasses.replace(_parse(rows, columns, strategy, sums), used=used)
    if isinstance(x, tuple) and not beside.quantized_apart(x, how.specs):
        x = beside.joined(x)
    x = derivatives.refuse(derivatives.CODES, x, scale)
    if (key is not None) != how.stochastic:
        need = "round stochastically: pass a key" if key is None else "round to nearest and take no key"
        raise ValueError(f"rows {rows} and columns {columns} {need}")
    if 0 in beside.shape_of(x):
        scale = None  # there is nothing to have one
    if impl == "auto" and part is not None and not isinstance(x, tuple):
        own: Any = {"same": how.same, "scale": scale, "strategy": strategy, "sums": sums}
        pair = fused_codes.codes(part, how.rows, how.transposed, **own)
        if pair is not None:
            made = part.result.sums.get(part.place)
            return pair, column_sums(x) if sums and made is None else made
    choice = tell("quantize", _choose(x, how, scale, impl))
    ways: Any = {"kernel": functools.partial(_kernel, how), "reference": functools.partial(_reference, how)}
    result: Summed = run(choice, impl, x, scale, key, largest, **ways)
    return result


def transpose(q: QTensor, *, factor: Array | None = None, impl: str = "auto") -> QTensor:
    """The same codes and scales with both axes of a matrix exchanged.

    Args:
        q: (M, N), of granularity "tensor" or "block", where a transposed matrix has transposed scales. (Groups and
            tokens of a transposed matrix run across its contraction: quantize again along the other axis.)
        factor: fp32 (M, 1), by which FP8 codes of each row are multiplied, rounded to nearest; None leaves them alone.
        impl: "auto", "xla" or "triton": XLA's own transposition of bytes reaches a fraction of a GPU's bandwidth.

    Raises:
        ValueError: the granularity is another; or as `quantize`.
    """
    if q.spec.granularity not in TRANSPOSABLE:
        raise ValueError(f"the scales of {q.spec} do not serve the transposed matrix; quantize it along its other axis")
    fits = len(q.shape) == 2 and q.codes.dtype.itemsize == 1 and 0 not in q.shape
    other = None if fits else f"the codes are {q.codes.dtype}{list(q.codes.shape)}, no matrix of bytes"
    choice = triton_or_xla(impl, lambda: other or missing_triton("transpose_triton", fp8=factor is not None))
    codes = run(choice, impl, q.codes, factor, kernel=_transposed, reference=_times_transposed)
    return dataclasses.replace(q, codes=codes, scale=q.scale.T)


@dataclasses.dataclass(frozen=True)
class _How:
    rows: QuantSpec | None
    columns: Columns
    strategy: Scaling
    sums: bool
    used: bool = False

    @property
    def same(self) -> bool:
        return self.columns == "same"

    @property
    def transposed(self) -> QuantSpec | None:
        """The spec of the transposed copy."""
        return self.rows if self.columns == "same" else self.columns

    @property
    def specs(self) -> tuple[QuantSpec | None, QuantSpec | None]:
        return self.rows, self.transposed

    @property
    def integers(self) -> bool:
        return any(spec is not None and not formats.get(spec.format).is_float for spec in self.specs)

    @property
    def stochastic(self) -> bool:
        return any(spec is not None and spec.rounding == "stochastic" for spec in self.specs)

    def scale_for(self, spec: QuantSpec, scale: Array) -> Array:
        """The given scale, which is for the first format asked for, for that of `spec`."""
        first = self.rows or self.transposed
        assert first is not None
        return scaling.for_format(scale, formats.get(first.format), formats.get(spec.format))


def _parse(rows: QuantSpec | str | None, columns: QuantSpec | str | None, strategy: Scaling, sums: bool) -> _How:
    first = None if rows is None else QuantSpec.parse(rows)
    second: Any = columns if columns is None or columns == "same" else QuantSpec.parse(columns)
    how = _How(first, second, strategy, sums)
    if how.same and (first is None or first.granularity not in TRANSPOSABLE):
        raise ValueError(f"columns 'same' needs rows with scales that transpose, not {rows}")
    if how.same and first is not None and first.granularity == "block" and first.axis not in (-1, 1):
        raise ValueError(f"columns 'same' needs blocks along the last axis, not {first}")
    return how


def _choose(x: Any, how: _How, scale: Array | None, impl: str) -> Choice:
    x = jax.ShapeDtypeStruct(beside.shape_of(x), x[0].dtype) if isinstance(x, tuple) else x
    if len(x.shape) != 2:
        raise ValueError(f"quantize takes matrices, not shape {x.shape}; use jax.vmap for stacks of them")
    fp8 = any(spec and formats.get(spec.format).is_fp8 for spec in how.specs)
    return triton_or_xla(impl, lambda: missing_triton("quantize_triton", fp8=fp8) or _unsupported(x, how, scale))


def _unsupported(x: Any, how: _How, scale: Array | None) -> str | None:
    from pallas_kernels import quantize_triton

    if len({formats.get(spec.format).is_float for spec in how.specs if spec}) > 1:
        return f"{how.rows} and {how.transposed} are floating and integer codes"
    for spec in how.specs:
        if spec is None:
            continue
        fmt = formats.get(spec.format)
        if not fmt.multiplies or fmt.name == "e8m0" or spec.expand or spec.underflow != "zero":
            return f"it makes plain FP8 and int8 codes, not {spec}"
        if spec.granularity not in _KINDS or spec.axis not in (-1, 1) or spec.stacked:
            return f"it makes scales of {', '.join(_KINDS)} along the last axis of a matrix, not {spec}"
        if scale is not None and spec.granularity not in ("tensor", "token"):
            return f"given scales of {spec} are XLA's"
        if scale is not None and not fmt.is_float:
            return f"given scales of {spec}, which NaN and Inf change, are XLA's"
    return quantize_triton.unsupported(x.shape, x.dtype, tuple(map(fused.coding, how.specs)))


def _reference(how: _How, x: beside.Matrix, scale: Array | None, key: Array | None, largest: Array | None) -> Summed:
    x = beside.joined(x)
    return _codes(how, x, scale, key), column_sums(x) if how.sums else None


def _codes(how: _How, x: Array, scale: Array | None, key: Array | None) -> Pair:
    if on_cuda() and how.rows is not None and how.transposed is not None and not how.same:
        # XLA would compute what makes the matrix where it reduces its columns, which takes three times as long.
        (x,) = lax.optimization_barrier((x,))
    # Two words for all elements: XLA would compute each one's bits by `jax.random` anew in every pass that reads them.
    own = None if key is None else noise.of_key(key)
    words = own, None if own is None else noise.salted(own, _COLUMNS)

    def one(y: Array, spec: QuantSpec | None, words: Array | None) -> QTensor | None:
        if spec is None:
            return None
        y = encoding.bounded(y, spec, 1.0)
        given = scale is not None and spec.granularity in ("tensor", "token")
        s = how.scale_for(spec, scale) if given else None  # type: ignore[arg-type]
        if s is None and spec.granularity == "tensor" and not how.strategy.own:
            find = functools.partial(how.strategy.scale, fmt=formats.get(spec.format))
            (s,) = blocks.on_logical_array(lambda y: (find((), y),), y, like=[()])
        return quantize_with_scale(y, spec, s, words=words if spec.rounding == "stochastic" else None)

    def transposed(spec: QuantSpec, words: Array | None) -> QTensor | None:
        if spec.granularity not in TRANSPOSABLE or spec.axis not in (-1, 1) or spec.packed:
            return one(x.T, spec, words)
        # XLA would transpose the matrix for the maxima of its blocks.
        rows = one(x, spec, words)
        assert rows is not None
        return transpose(rows, impl="xla")

    rows = one(x, how.rows, words[0])
    if how.same:
        assert rows is not None
        return rows, transpose(rows, impl="xla")
    return rows, None if how.transposed is None else transposed(how.transposed, words[1])


def _kernel(how: _How, x: beside.Matrix, scale: Array | None, key: Array | None, largest: Array | None) -> Summed:
    if how.integers:
        largest = None  # those are of what is finite
    words = None if key is None else jax.random.bits(key, (2,), jnp.uint32)
    sides = ("m n", "n m")
    scale_axes = None
    if scale is not None:
        axes = sides[how.rows is None].split()[2 - scale.ndim :]
        scale_axes = " ".join(name if k > 1 else "-" for name, k in zip(axes, scale.shape, strict=True))
    shape = beside.shape_of(x)
    outs = [s and notation(s, shape[::step], names) for s, step, names in zip(how.specs, (1, -1), sides, strict=True)]
    make = functools.partial(_one, how, shape)
    result: Summed = partitioned(
        "quantize", (how, shape), make, (x, scale, words, largest),
        ("m n", scale_axes, "-", None if largest is None else ""), (outs, "n" if how.sums else None),
        units={"m": 4} if how.stochastic else {},
    )  # fmt: skip
    return result


def _one(
    how: _How,
    whole: tuple[int, ...],
    cut: Cut,
    x: beside.Matrix,
    scale: Array | None,
    words: Array | None,
    known: Array | None,
) -> Summed:
    """The QTensors of a device's own part of a matrix, whose whole shape is given."""
    from pallas_kernels import maxima_triton, quantize_rows_triton, quantize_triton

    alone = how.rows if how.columns is None and "n" not in cut.axes else None
    if (
        not how.sums
        and not isinstance(x, tuple)
        and alone
        and _measured(alone, scale) == alone.granularity == "token"
        and alone.scale_format == "fp32"
    ):
        coding = fused.coding(alone)
        if quantize_rows_triton.unsupported(x.shape, x.dtype, coding) is None:
            codes, rows = quantize_rows_triton.quantize_rows(x, coding, compute_capability=capability())
            return (QTensor(codes, rows, None, None, alone), None), None
    shape = beside.shape_of(x)
    shapes = (shape, shape[::-1])
    levels = [s and _measured(s, scale) for s in (how.rows, None if how.same else how.transposed)]
    asked: Any = {
        "tensor": "tensor" in levels and known is None,
        "rows": levels[0] == "token",
        "columns": levels[1] == "token",
    }
    computed = [s is not None and scale is None and _by_kernel(s, how) for s in how.specs]
    parts: Array | None = None if known is None else known.reshape(1)
    largest: tuple[Array | None, ...] = (known, None, None)
    if any(asked.values()):
        matrices = x if isinstance(x, tuple) else (x,)
        most = maxima_triton.PARTS // len(matrices) if any(computed) else 0
        kind: Any = {"parts": most, "integers": how.integers, "compute_capability": capability()}
        of_each = [maxima_triton.maxima(y, **asked, **kind) for y in matrices]
        own = of_each[0]
        if len(matrices) > 1:  # of all together, and of no rows and columns
            own = jnp.concatenate([top.reshape(-1) for top, *_ in of_each if top is not None]), None, None
        largest = tuple(
            None if top is None else cut.maximum(top, over) for top, over in zip(own, ("m n", "n", "m"), strict=True)
        )
        largest = (known if known is not None else largest[0], *largest[1:])
        parts = largest[0] if parts is None else parts
    scales: list[Array | None] = []
    for i, spec in enumerate(how.specs):
        if spec is None or spec.granularity in ("group", "block") or computed[i]:
            scales.append(None)
            continue
        count = blocks.counts(shapes[i], spec.block_shape(shapes[i]))
        if scale is not None and spec.granularity != "mx":
            given = how.scale_for(spec, scale)
            value = jnp.broadcast_to(given if how.used else scaling.usable(given), count)
        elif spec.granularity == "mx" and spec.level1 == "none":
            value = jnp.ones(count, jnp.float32)
        else:
            top = largest[0] if _level(spec) == "tensor" else largest[1 + i]
            assert top is not None
            top = jnp.max(top) if _level(spec) == "tensor" else top
            if spec.granularity == "tensor":
                top = how.strategy.settle(top)
            value = jnp.where(jnp.isnan(top), jnp.nan, scaling.to_scale(top, formats.get(spec.format))).reshape(count)
        scales.append(encoding.stored(value, spec, given=scale is not None))
    *made, total = quantize_triton.quantize(
        x,
        fused.coding(how.rows),
        "same" if how.same else fused.coding(how.transposed),
        row_scale=scales[0],
        column_scale=scales[1],
        maxima=parts if any(computed) else None,
        up=how.strategy.settles == "up",
        words=words,
        place=None if words is None else cut.fours(whole, shape),
        sums=how.sums,
        compute_capability=capability(),
    )
    tensors: list[QTensor | None] = []
    for part, own_scale, spec in zip(made, scales, how.specs, strict=True):
        if part is None or spec is None:
            tensors.append(None)
            continue
        used = part.scale if own_scale is None else own_scale
        assert used is not None
        tensors.append(QTensor(part.codes, used, None, part.microscale, spec))
    return (tensors[0], tensors[1]), None if total is None else cut.total(total, "m")


def _by_kernel(spec: QuantSpec, how: _How) -> bool:
    """Whether the kernel makes a tensor's scale from largest magnitudes, so that no reduction is launched for it."""
    plain = spec.granularity == "tensor" and spec.scale_format == "fp32" and not how.integers
    return plain and how.strategy.settles is not None


def _level(spec: QuantSpec) -> str:
    """What shares a scale of level 1."""
    return spec.level1 if spec.granularity == "mx" else spec.granularity


def _measured(spec: QuantSpec, scale: Array | None) -> str | None:
    """Over what a pass of its own has to find the maximum, "tensor" or "token"; None if it has not."""
    level = _level(spec)
    return level if level in ("tensor", "token") and (scale is None or spec.granularity == "mx") else None


def _times_transposed(codes: Array, factor: Array | None) -> Array:
    return codes.T if factor is None else (formats.fp8_values(codes) * factor).astype(codes.dtype).T


def _transposed(codes: Array, factor: Array | None) -> Array:
    from pallas_kernels import transpose_triton

    def turn(cut: Cut, codes: Array, factor: Array | None) -> Array:
        return transpose_triton.transpose(codes, factor=factor, compute_capability=capability())

    ins = ("m n", None if factor is None else "m -")
    transposed: Array = partitioned("transpose", factor is None, turn, (codes, factor), ins, "n m")
    return transposed
