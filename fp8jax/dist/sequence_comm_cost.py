"""What activations exchange at the boundary of tensor and sequence parallelism, worked out before anything runs."""

import math

from fp8jax.core import blocks, formats
from fp8jax.core.spec import QuantSpec
from fp8jax.dist.collectives import HLO_NAMES, Collective
from fp8jax.dist.wire_format import WireFormat, WireFormatLike, operand_wire_format, sum_wire_format

CALLER = "sequence_collectives"


def sequence_collectives(
    tokens: int,
    width: int,
    devices: int,
    wire_format: WireFormatLike,
    dtype: str = "bf16",
    *,
    times: int = 1,
    forward_gathers: int = 1,
) -> list[Collective]:
    """The collectives of one `gather_sequence` and one `scatter_sequence`, forward and backward.

    Single numbers, as the largest magnitude of a tensor, are left out.

    Args:
        tokens, width: the shape of the whole array.
        devices: that the tokens are cut over.
        wire_format: what travels, as both functions take it.
        dtype: of the array.
        times: how many of each there are.
        forward_gathers: how often the forward one is gathered: 2 where the backward pass gathers it again.

    Raises:
        ValueError: as both functions.
    """
    forward_format, backward_format = (
        operand_wire_format(CALLER, wire_format, "x"),
        operand_wire_format(CALLER, wire_format, "dy"),
    )
    sum_format = sum_wire_format(CALLER, wire_format)
    result = []
    for operand, count in ((forward_format, forward_gathers * times), (backward_format, times)):
        result += [
            one._replace(times=count) for one in _gather_collectives(tokens // devices, width, devices, operand, dtype)
        ]
    return result + [
        one._replace(times=2 * times) for one in _sum_collectives(tokens, width, devices, sum_format, dtype)
    ]


def _gather_collectives(tokens: int, width: int, devices: int, wire_format: WireFormat, dtype: str) -> list[Collective]:
    """Of a device's part."""
    spec, size = wire_format.spec, tokens * width
    if spec is None:
        dtype_name = wire_format.dtype or dtype
        return [Collective("all-gather", HLO_NAMES[dtype_name], size * _itemsize(dtype_name), devices)]
    scales, codes = _scale_count(spec, tokens, width), size
    if spec.granularity == "mx" and not spec.is_folded:
        codes += math.prod(blocks.counts((tokens, width), spec.micro_shape((tokens, width))))
    result = [Collective("all-gather", "u8", codes, devices)]
    return result + ([Collective("all-gather", "f32", 4 * scales, devices)] if scales > 1 else [])


def _sum_collectives(tokens: int, width: int, devices: int, wire_format: WireFormat, dtype: str) -> list[Collective]:
    """Of the whole."""
    spec, size = wire_format.spec, tokens * width
    if spec is None:
        dtype_name = wire_format.dtype or dtype
        return [Collective("reduce-scatter", HLO_NAMES[dtype_name], size * _itemsize(dtype_name), devices)]
    result = [Collective("all-to-all", "u8", size, devices)]
    scales = _scale_count(spec, tokens, width)
    return result + ([Collective("all-reduce", "f32", 4 * scales, devices)] if scales > 1 else [])


def _scale_count(spec: QuantSpec, tokens: int, width: int) -> int:
    if spec.is_folded:
        return tokens
    return math.prod(blocks.counts((tokens, width), spec.block_shape((tokens, width))))


def _itemsize(name: str) -> int:
    return int(formats.get(name).bytes_per_element)
