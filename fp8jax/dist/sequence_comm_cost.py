"""Collectives of activations at the boundary of tensor and sequence parallelism, computed in advance."""

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

    Scalars, such as the amax of a tensor, are left out.

    Args:
        tokens, width: shape of the whole array.
        devices: number of devices that shard the tokens.
        wire_format: wire format, as for both functions.
        dtype: dtype of the array.
        times: number of calls of each.
        forward_gathers: number of forward gathers: 2 if the backward pass gathers again.

    Raises:
        ValueError: as for both functions.
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
    """The collectives of a gather; `tokens` are those of one device's shard."""
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
    """The collectives of a reduce-scatter; `tokens` are those of the whole array."""
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
