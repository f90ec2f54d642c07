"""`QuantSpec`: how a tensor is quantized, as a frozen record that also has a plain string form."""

import dataclasses
import math
import re
from collections.abc import Sequence

from fp8jax.core import blocks, expansion, formats

GRANULARITIES = ("tensor", "group")
ROUNDINGS = ("nearest", "stochastic")
UNDERFLOWS = ("zero", "smallest")
SCALE_FORMATS = ("fp32", "bf16")


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """How a tensor is quantized. Hashable and static under `jax.jit`.

    The string form, accepted wherever a spec is, is `format[:granularity[size]][+expand][+stochastic]`, as in
    `"e4m3"`, `"e5m2:tensor"` and `"e4m3:group128+expand"`; `str(spec)` gives it back. Settings that it cannot say
    are given to the constructor.

    Attributes:
        format: name of a format in `fp8jax.formats`.
        granularity: what shares a scale: "tensor", or "group" (`group_size` consecutive elements along `axis`).
        group_size: elements of a group; None for per-tensor scales. The last group of an axis may be short.
        axis: the axis that groups run along. Negative axes keep their meaning when leading axes are stacked.
        stacked: number of leading axes that stack separate tensors (layers of a scanned model): a per-tensor scale
            is then one for each.
        scale_format: storage of the scales, "fp32" or "bf16". A bf16 scale cannot follow a decay slower than 0.4 %
            a step, as of a second moment with b2 = 0.999.
        rounding: "nearest" (ties to even), or "stochastic" (unbiased; `quantize` then needs a key).
        expand: dynamic range expansion (COAT, section 4.2): each block is raised to a power that fits its range to
            the format's.
        underflow: what a non-zero value under half the smallest code becomes: "zero" as rounding says, or
            "smallest", the smallest code (a second moment must not decode to zero).

    Raises:
        ValueError: a field has an unknown value, or two contradict each other.
    """

    format: str = "e4m3"
    granularity: str = "tensor"
    group_size: int | None = None
    axis: int = -1
    stacked: int = 0
    scale_format: str = "fp32"
    rounding: str = "nearest"
    expand: bool = False
    underflow: str = "zero"

    def __post_init__(self) -> None:
        if not formats.get(self.format).scaled:
            raise ValueError(
                f"format {self.format!r} is stored by a cast, without scales; a QuantSpec takes an 8-bit format"
            )
        for field, allowed in (
            ("granularity", GRANULARITIES),
            ("scale_format", SCALE_FORMATS),
            ("rounding", ROUNDINGS),
            ("underflow", UNDERFLOWS),
        ):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"unknown {field} {value!r}; it is one of {', '.join(allowed)}")
        if self.granularity == "tensor" and self.group_size is not None:
            raise ValueError(f"group_size={self.group_size} contradicts granularity 'tensor'; take granularity 'group'")
        if self.granularity == "group" and (self.group_size is None or self.group_size < 1):
            raise ValueError(f"granularity 'group' needs a positive group_size, not {self.group_size!r}")
        if self.stacked < 0:
            raise ValueError(f"stacked counts leading axes and cannot be {self.stacked}")

    @classmethod
    def parse(cls, text: "str | QuantSpec") -> "QuantSpec":
        """The spec that a string names; a spec is returned as it is.

        Raises:
            ValueError: the string is not of the form in the class docstring.
        """
        if isinstance(text, cls):
            return text
        match = re.fullmatch(r"([a-z0-9]+)(?::([a-z]+)(\d+)?)?((?:\+[a-z]+)*)", str(text))
        options = match[4].split("+")[1:] if match else []
        if match is None or len(set(options)) < len(options) or set(options) - {"expand", "stochastic"}:
            raise ValueError(
                f"{text!r} is not format[:granularity[size]][+expand][+stochastic], as in 'e4m3:group128+expand'"
            )
        return cls(
            format=match[1],
            granularity=match[2] or "tensor",
            group_size=int(match[3]) if match[3] else None,
            rounding="stochastic" if "stochastic" in options else "nearest",
            expand="expand" in options,
        )

    def __str__(self) -> str:
        text = f"{self.format}:{self.granularity}{self.group_size or ''}"
        return text + "+expand" * self.expand + "+stochastic" * (self.rounding == "stochastic")

    @property
    def bytes_per_element(self) -> float:
        """Bytes of codes and metadata that an element of a long tensor of full blocks takes."""
        if self.group_size is None:
            return formats.get(self.format).bytes_per_element
        group = [1] * max(-self.axis, self.axis + 1)
        group[self.axis] = self.group_size
        return self.nbytes(group) / self.group_size

    def nbytes(self, shape: Sequence[int]) -> float:
        """Bytes of codes and metadata of an array of this shape."""
        metadata = formats.get(self.scale_format).bytes_per_element + expansion.DTYPE.itemsize * self.expand
        scales = math.prod(blocks.counts(shape, self.block_shape(shape)))
        return math.prod(shape) * formats.get(self.format).bytes_per_element + scales * metadata

    def block_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Block length along each dimension of an array of this shape.

        Raises:
            ValueError: the array has too few dimensions for `axis` or `stacked`.
        """
        if self.stacked > len(shape):
            raise ValueError(f"{self} stacks {self.stacked} leading axes; an array of shape {tuple(shape)} has fewer")
        if self.granularity == "tensor":
            return tuple(1 if i < self.stacked else max(n, 1) for i, n in enumerate(shape))
        if not -len(shape) <= self.axis < len(shape):
            raise ValueError(
                f"{self} groups along axis {self.axis}, which an array of shape {tuple(shape)} does not have"
            )
        assert self.group_size is not None
        axis = self.axis % len(shape)
        return tuple(self.group_size if i == axis else 1 for i in range(len(shape)))
