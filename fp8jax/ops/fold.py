"""Two-level microscaling folded into codes with one scale a row, which multiply at the speed of FP8 without it."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8jax.core import blocks, formats, scaling
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.choice import Choice, capability, missing_triton, on_cuda, run, tell, triton_or_xla
from fp8jax.ops.cuts import Cut
from fp8jax.ops.partition import partitioned
from fp8jax.ops.quantize import chosen

# Codes below this power of two under their row's scale lose bits (e4m3 has three, and subnormals down to 2^-9).
FOLDABLE = 10
# Elements under one power of two, as the kernels take them.
GROUP = 32


class Folded(NamedTuple):
    """A matrix quantized by `fold`.

    Attributes:
        q: codes and one scale a row, of granularity "token".
        lost: number of groups that it cannot represent well, int32 scalar.
    """

    q: QTensor
    lost: Array


def fold(x: Array, spec: QuantSpec | str, *, impl: str = "auto") -> Folded:
    """Two-level microscaling (MOSS, section 3) in one level: the power of two of each group goes into its codes.

    The scale of a row takes up the largest power of two of its groups, exactly; what is left of the others, 2^-e, is
    applied before rounding. The product then is one of rows, at the speed of FP8 without microscaling. It is exact
    where the two-level one is until a code goes subnormal: for e up to about 10 a group keeps bits.

    Args:
        x: (M, N), floating.
        spec: of granularity "mx" with a level 1 ("tensor" or "token"), in a floating format.
        impl: "auto", "xla" or "triton": a kernel that reads `x` once, twice where level 1 is the tensor's, and takes
            rows of up to 32768 elements in groups of 32.

    Returns:
        The codes, and how many groups lie more than 2^10 below their row; where it is not small, use the
        two-level codes of `quantize` and their product.

    Raises:
        ValueError: the spec is another; or as `quantize`.
    """
    spec = QuantSpec.parse(spec)
    fits = spec.granularity == "mx" and spec.level1 != "none" and formats.get(spec.format).is_float
    if not fits or spec.rounding != "nearest" or spec.axis not in (-1, 1):
        raise ValueError(f"fold takes microscaling of rows under a level 1 scale in a floating format, not {spec}")
    choice = chosen(x, _token(spec), impl=impl, platform="cuda" if impl == "triton" else None)
    reason = None if choice.impl == "xla" else _unsupported(x, spec)
    if reason and impl == "triton":
        raise ValueError(f"impl 'triton' cannot run: {reason}")
    reference, kernel = (functools.partial(f, spec) for f in (_reference, _kernel))
    choice = tell("fold", Choice("xla", f"not the kernel: {reason}") if reason else choice)
    folded: Folded = run(choice, impl, x, kernel=kernel, reference=reference)
    return folded


def foldable(q: QTensor) -> bool:
    """Whether `refold` takes a matrix: e4m3 codes microscaled by 32 of a row under a level 1 scale."""
    spec = q.spec
    rows = spec.axis in (-1, 1) and spec.group_size == GROUP
    return spec.granularity == "mx" and spec.level1 != "none" and spec.format == "e4m3" and rows


def refold(q: QTensor, *, impl: str = "auto") -> QTensor:
    """The powers of two of two-level codes folded into them, for the product of rows.

    As in `fold`, the scale of a row takes up the largest of its powers, exactly, unless that would make it subnormal. A
    code that goes subnormal under what is left of its own power is rounded a second time.

    Args:
        q: (M, N), such that `foldable`.
        impl: "auto", "xla" or "triton", as of `fold`.

    Returns:
        (M, N), of granularity "token".

    Raises:
        ValueError: `q` is another, `impl` is unknown, or it is "triton" and no kernel can run.
    """
    if not foldable(q):
        raise ValueError(f"refold takes e4m3 codes microscaled by 32 of a row under a level 1 scale, not {q.spec}")
    empty = f"shape {q.shape} is empty" if 0 in q.shape else None
    choice = triton_or_xla(impl, impl == "triton" or on_cuda(), lambda: empty or missing_triton("fold_triton"))
    tell("refold", choice)
    assert q.microscale is not None
    operands = q.codes, q.microscale, q.scale.astype(jnp.float32)
    codes, scale = run(choice, impl, *operands, kernel=_refold_kernel, reference=_refold_reference)
    return QTensor(codes, scale, None, None, _token(q.spec))


def _refold_reference(codes: Array, powers: Array, level: Array) -> tuple[Array, Array]:
    largest = jnp.max(jnp.where(powers == 255, 0, powers), axis=-1, keepdims=True, initial=0)
    scale = level * formats.decode_e8m0(largest)
    fits = (scale >= formats.TINY) & (largest > 0)
    shift = jnp.where(fits, 127 - largest.astype(jnp.int32), 0)
    shifted = jnp.where(powers == 255, 255, jnp.clip(powers + shift, 0, 254)).astype(jnp.uint8)
    power = blocks.spread(formats.decode_e8m0(shifted), codes.shape, (1, GROUP))
    folded = formats.fp8_values(codes) * power
    return folded.astype(codes.dtype), jnp.where(fits, scale, level)


def _refold_kernel(codes: Array, powers: Array, level: Array) -> tuple[Array, Array]:
    from pallas_kernels.fold_triton import fold_codes

    def refold(cut: Cut, *operands: Array) -> tuple[Array, Array]:
        return fold_codes(*operands, compute_capability=capability())

    scale = "m -" if level.shape[0] > 1 else "- -"
    folded: tuple[Array, Array] = partitioned(
        "refold", None, refold, (codes, powers, level), ("m -", "m -", scale), ("m -", "m -"))  # fmt: skip
    return folded


def _token(spec: QuantSpec) -> QuantSpec:
    return QuantSpec(spec.format, "token", axis=spec.axis)


def _unsupported(x: Array, spec: QuantSpec) -> str | None:
    from pallas_kernels import quantize_rows_triton
    from pallas_kernels.quantize_triton import Coding

    if spec.group_size != GROUP:
        return f"groups of {spec.group_size} are not {GROUP}"
    return quantize_rows_triton.unsupported(x.shape, x.dtype, Coding("token", formats.get(spec.format).dtype))


def _reference(spec: QuantSpec, x: Array) -> Folded:
    fmt = formats.get(spec.format)
    magnitude = jnp.abs(x.astype(jnp.float32))
    magnitude = jnp.where((magnitude >= formats.TINY) & jnp.isfinite(magnitude), magnitude, 0.0)
    groups = blocks.reduce(magnitude, spec.micro_shape(x.shape), jnp.max, 0.0)
    largest = jnp.max(groups, axis=-1, keepdims=True, initial=0.0)
    if spec.level1 == "token":
        scale = scaling.to_scale(largest, fmt)
    else:
        level1 = scaling.to_scale(jnp.max(largest, initial=0.0), fmt)
        units = largest * (1 / level1)
        ratio = jnp.where(units >= formats.TINY, units, 0.0) * np.float32(1 / fmt.max)
        power = formats.decode_e8m0(formats.encode_e8m0(jnp.maximum(ratio, formats.TINY), "up"))
        scale = jnp.maximum(level1 * power, formats.TINY)
    lost = jnp.sum((groups > 0) & (groups * (1 / scale) <= _lost_up_to(fmt)), dtype=jnp.int32)
    return Folded(quantize_with_scale(x, _token(spec), scale), lost)


def _kernel(spec: QuantSpec, x: Array) -> Folded:
    from pallas_kernels import maxima_triton, quantize_rows_triton
    from pallas_kernels.quantize_triton import Coding

    fmt = formats.get(spec.format)

    def fold_rows(cut: Cut, x: Array) -> tuple[Array, Array, Array]:
        level = None
        if spec.level1 == "tensor":
            largest = maxima_triton.maxima(x, tensor=True, compute_capability=capability())[0]
            assert largest is not None
            level = scaling.to_scale(cut.maximum(largest, "m"), fmt)
        coding, limit = Coding("token", fmt.dtype), _lost_up_to(fmt)
        codes, scale, lost = quantize_rows_triton.quantize_rows(
            x, coding, level=level, limit=limit, compute_capability=capability())  # fmt: skip
        return codes, scale, cut.total(lost, "m")

    codes, scale, lost = partitioned("fold", spec, fold_rows, (x,), ("m -",), ("m -", "m -", ""))
    return Folded(QTensor(codes, scale, None, None, _token(spec)), lost)


def _lost_up_to(fmt: formats.Format) -> float:
    """The magnitude in units of codes up to which all values of a group lie more than 2^FOLDABLE below their row."""
    return fmt.max * 2.0 ** -(FOLDABLE + 1)
