"""What activations exchange at the boundary of tensor and sequence parallelism, worked out before anything runs."""

import math

from fp8jax.core import blocks, formats
from fp8jax.core.spec import QuantSpec
from fp8jax.dist import travel
from fp8jax.dist.collectives import HLO_NAMES, Collective

NAME = "crossings"


def crossings(
    tokens: int,
    width: int,
    devices: int,
    how: travel.How,
    dtype: str = "bf16",
    *,
    times: int = 1,
    gathered: int = 1,
) -> list[Collective]:
    """The collectives of one `gather_sequence` and one `scatter_sequence`, forward and backward.

    Single numbers, as the largest magnitude of a tensor, are left out.

    Args:
        tokens, width: the shape of the whole array.
        devices: that the tokens are cut over.
        how: what travels, as both functions take it.
        dtype: of the array.
        times: how many of each there are.
        gathered: how often the forward one is gathered: 2 where the backward pass gathers it again.

    Raises:
        ValueError: as both functions.
    """
    there, back = travel.of_operand(NAME, how, "x"), travel.of_operand(NAME, how, "dy")
    total = travel.of_sum(NAME, how)
    found = []
    for operand, count in ((there, gathered * times), (back, times)):
        found += [one._replace(times=count) for one in _gather(tokens // devices, width, devices, operand, dtype)]
    return found + [one._replace(times=2 * times) for one in _sum(tokens, width, devices, total, dtype)]


def _gather(tokens: int, width: int, devices: int, how: travel.Travel, dtype: str) -> list[Collective]:
    """Of a device's part."""
    spec, size = how.spec, tokens * width
    if spec is None:
        plain = how.dtype or dtype
        return [Collective("all-gather", HLO_NAMES[plain], size * _bytes(plain), devices)]
    scales, codes = _scales(spec, tokens, width), size
    if spec.granularity == "mx" and not spec.folds:
        codes += math.prod(blocks.counts((tokens, width), spec.micro_shape((tokens, width))))
    found = [Collective("all-gather", "u8", codes, devices)]
    return found + ([Collective("all-gather", "f32", 4 * scales, devices)] if scales > 1 else [])


def _sum(tokens: int, width: int, devices: int, how: travel.Travel, dtype: str) -> list[Collective]:
    """Of the whole."""
    spec, size = how.spec, tokens * width
    if spec is None:
        plain = how.dtype or dtype
        return [Collective("reduce-scatter", HLO_NAMES[plain], size * _bytes(plain), devices)]
    found = [Collective("all-to-all", "u8", size, devices)]
    scales = _scales(spec, tokens, width)
    return found + ([Collective("all-reduce", "f32", 4 * scales, devices)] if scales > 1 else [])


def _scales(spec: QuantSpec, tokens: int, width: int) -> int:
    if spec.folds:
        return tokens
    return math.prod(blocks.counts((tokens, width), spec.block_shape((tokens, width))))


def _bytes(name: str) -> int:
    return int(formats.get(name).bytes_per_element)
