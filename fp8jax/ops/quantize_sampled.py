"""Codes under the scale of a sample (`fp8jax.core.scaling.Sampled`) by kernels: one pass, beside two short launches."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import fused
from fp8jax.ops.choice import capability
from fp8jax.ops.cuts import Cut

Specs = tuple[QuantSpec | None, QuantSpec | None]


def samples(strategy: scaling.Scaling, specs: Specs, shape: Sequence[int]) -> bool:
    """Whether codes of a matrix of this shape take their scale from a sample."""
    tensors = any(spec is not None and spec.granularity == "tensor" for spec in specs)
    return tensors and isinstance(strategy, scaling.Sampled) and strategy.samples(shape)


def unsupported(specs: Specs) -> str | None:
    """Why kernels cannot make such codes, or None."""
    for spec in specs:
        if spec is None:
            continue
        plain = spec.granularity == "tensor" and spec.scale_format == "fp32" and formats.get(spec.format).is_fp8
        if not plain or spec.rounding != "nearest":
            return f"scales of a sample are of FP8 tensors rounded to nearest, not of {spec}"
    return None


def quantize(
    x: Array, strategy: scaling.Scaling, specs: Specs, same: bool, sums: bool, cut: Cut
) -> tuple[Any, Array | None]:
    """The QTensors of a device's own part of a matrix and of its transposed copy, and its sums of columns.

    Args:
        x: (M, N), the part. strategy: one that samples. specs: of both; of what is not wanted None.
        same: whether the second are the codes of the first, transposed.
        sums: whether these are wanted, of the columns of the whole.
        cut: how the whole is cut.
    """
    from pallas_kernels import maxima_triton, quantize_sampled_triton

    rows = x.shape[0]
    if cut.axes.get("m") and rows % (scaling.SAMPLE * scaling.EVERY):
        # The rows of the sample are those of the whole matrix, which the kernel counts in its own part.
        sample = scaling.largest_of_sample(x, cut.start("m", rows))
        bounds, zero = scaling.beyond_sample(sample).reshape(1), jnp.zeros(1, jnp.float32)
    else:
        assert maxima_triton.SAMPLE == scaling.SAMPLE
        bounds, zero = maxima_triton.sample(x, scaling.EVERY, scaling.MARGIN, compute_capability=capability())
    first, second, total = quantize_sampled_triton.quantize(
        x,
        fused.coding(specs[0]),
        "same" if same else fused.coding(specs[1]),
        cut.maximum(bounds, "m n"),
        zero,
        up=strategy.settles == "up",
        sums=sums,
        over=lambda largest: cut.maximum(largest, "m n"),
        compute_capability=capability(),
    )
    made: list[QTensor | None] = []
    for part, spec in zip((first, second), specs, strict=True):
        if part is None or spec is None:
            made.append(None)
            continue
        assert part.scale is not None
        made.append(QTensor(part.codes, part.scale.reshape(1, 1), None, None, spec))
    return tuple(made), None if total is None else cut.total(total, "m")
