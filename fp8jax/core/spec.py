"""`QuantSpec`: how a tensor is quantized, as a frozen record that also has a plain string form."""

import dataclasses
import math
import re
from collections.abc import Sequence

from fp8jax.core import blocks, expansion, formats, packing

GRANULARITIES = ("tensor", "token", "channel", "group", "block", "mx")
SIZED_GRANULARITIES = ("group", "block", "mx")
# A transposed matrix has the transposed scales; groups and tokens would run across its contraction.
TRANSPOSABLE = ("tensor", "block")
ROUNDINGS = ("nearest", "stochastic")
UNDERFLOWS = ("zero", "smallest")
SCALE_FORMATS = ("fp32", "bf16")
OUTER_SCALES = ("tensor", "token", "none")
EXPANSIONS = (False, True, "coat")
_OPTIONS: dict = {"expand": ("expand", True), "coat": ("expand", "coat"), "stochastic": ("rounding", "stochastic")}
_OPTIONS |= {"token": ("outer_scale", "token"), "ocp": ("outer_scale", "none"), "exact": ("exact", True)}


def check_expand(expand: bool | str) -> None:
    """Refuses what is no kind of range expansion."""
    if expand not in EXPANSIONS:
        raise ValueError(f"unknown expand {expand!r}; it is one of {', '.join(map(repr, EXPANSIONS))}")


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """How a tensor is quantized. Hashable and static under `jax.jit`.

    The string form, accepted wherever a spec is, is `format[:granularity[size]][+option...]` with the options
    `expand`, `coat`, `stochastic`, `token` and `ocp` (these two are the level 1 of "mx") and `exact`, as in `"e4m3"`,
    `"int8:token"`, `"e4m3:group128+expand"`, `"e4m3:mx32+token"`; `str(spec)` gives it back.
    Settings that it cannot say are given to the constructor.

    Attributes:
        format: name of a format in `fp8jax.formats`.
        granularity: what shares a scale. "tensor"; "token": all elements along `axis` (a row, for activations and
            axis -1); "channel": all elements of the same index along `axis`; "group": `group_size` consecutive
            elements along `axis`; "block": a square of `group_size` in the last two axes; "mx": microscaling, a power
            of two (E8M0) for each `group_size` elements along `axis`, under an fp32 scale of level 1.
        group_size: elements along a group or a block's side; None for the first three. Last ones may be short.
        axis: the axis that groups and tokens run along. Negative axes keep their meaning when leading axes are
            stacked.
        layer_axes: number of leading axes that stack separate tensors (layers of a scanned model): none of them shares
            a scale with another.
        scale_format: storage of the scales, "fp32" or "bf16". A bf16 scale cannot follow a decay slower than 0.4 %
            a step, as of a second moment with b2 = 0.999.
        rounding: "nearest" (ties to even), or "stochastic" (unbiased; `quantize` then needs a key).
        expand: dynamic range expansion (COAT, section 4.2): each block is raised to a power that fits its range to
            the format's. True takes our range and keeps exponents under stochastic rounding (`Format.expansion_range`,
            `expansion.exponents_with_hysteresis`); "coat" is the paper's: R = max / smallest code (229,376 for e4m3),
            from the group's largest and smallest at every step, in bf16 and within [1/16, 16]. Both decode alike and
            have one storage key. Relative error of m / sqrt(v), both in e4m3 to nearest, of the moments of a small
            Llama's training (`experiments.tables.coat_expansion`): ours 1.6 % and the paper's 2.8 % at b2 0.95, 1.6 %
            and 1.7 % at 0.999. A tiny member makes a group's exponent small, and all others coarse, down to 1/16; where
            operations save values the exponent is at least 1, in `compress_state` 0.7 and 0.6, and `compressed_adamw`
            leaves out dead members.
        underflow: what a non-zero value under half the smallest code becomes: "zero" as rounding says, or
            "smallest", the smallest code (a second moment must not decode to zero).
        outer_scale: for "mx", the fp32 scale above the powers of two: one a "tensor" (MOSS, section 3.1) or a "token",
            with powers of two rounded up; or "none" (OCP Microscaling Formats 1.0, section 6.3), where they are the
            largest power of two in the group over that of the format, and the largest elements may saturate.
        exact: for "mx" with a level 1, products apply each power of two to the sum of its group, and what is kept are
            two-level codes. Without it linear layers fold the powers of two into codes with one scale a row
            (`is_folded`).

    Raises:
        ValueError: a field has an unknown value, or two contradict each other.
    """

    format: str = "e4m3"
    granularity: str = "tensor"
    group_size: int | None = None
    axis: int = -1
    layer_axes: int = 0
    scale_format: str = "fp32"
    rounding: str = "nearest"
    expand: bool | str = False
    underflow: str = "zero"
    outer_scale: str = "tensor"
    exact: bool = False

    def __post_init__(self) -> None:
        if re.search("[:+]", str(self.format)):
            raise ValueError(f"{self.format!r} is a whole spec, and no format: take QuantSpec.parse({self.format!r})")
        fmt = formats.get(self.format)
        check_expand(self.expand)
        if not fmt.needs_scale:
            raise ValueError(f"format {self.format!r} is stored by a cast, without scales; take a narrower one")
        if self.format == "e8m0":
            raise ValueError("format 'e8m0' holds scales, not tensors: it has no zero and no sign")
        for field, allowed in (
            ("granularity", GRANULARITIES),
            ("scale_format", SCALE_FORMATS),
            ("rounding", ROUNDINGS),
            ("underflow", UNDERFLOWS),
            ("outer_scale", OUTER_SCALES),
        ):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"unknown {field} {value!r}; it is one of {', '.join(allowed)}")
        if self.granularity not in SIZED_GRANULARITIES and self.group_size is not None:
            raise ValueError(f"group_size={self.group_size} contradicts granularity {self.granularity!r}")
        if self.granularity in SIZED_GRANULARITIES and (self.group_size is None or self.group_size < 1):
            example = f"{self.granularity}{32 if self.granularity == 'mx' else 128}"
            need = f"needs a positive group_size, not {self.group_size!r}: write {example}, say"
            raise ValueError(f"granularity {self.granularity!r} {need}")
        if self.layer_axes < 0:
            raise ValueError(f"layer_axes counts leading axes and cannot be {self.layer_axes}")
        if self.granularity != "mx" and self.outer_scale != "tensor":
            raise ValueError(f"outer_scale={self.outer_scale!r} applies to granularity 'mx', not {self.granularity!r}")
        if self.exact and (self.granularity != "mx" or self.outer_scale == "none"):
            raise ValueError(
                "exact=True is for granularity 'mx' with a level 1; codes of other scales are never folded"
            )
        if self.granularity == "mx" and (self.expand or not fmt.is_float):
            what = "range expansion" if self.expand else f"format {self.format!r}"
            raise ValueError(f"granularity 'mx' scales floating-point codes by powers of two; it takes no {what}")

    @classmethod
    def parse(cls, text: "str | QuantSpec") -> "QuantSpec":
        """The spec that a string names; a spec is returned as it is.

        Raises:
            ValueError: the string is not of the form in the class docstring.
        """
        if isinstance(text, cls):
            return text
        match = re.fullmatch(r"([a-z0-9]+)(?::([a-z]+)(\d+)?)?((?:\+[a-z0-9]+)*)", str(text))
        options = match[4].split("+")[1:] if match else []
        fields = dict(_OPTIONS[o] for o in options if o in _OPTIONS)
        if match is None or len(fields) < len(options):
            raise ValueError(
                f"{text!r} is not format[:granularity[size]][+option...], as in 'e4m3:group128+expand'; "
                f"options are {', '.join(_OPTIONS)}"
            )
        size = int(match[3]) if match[3] else None
        return cls(format=match[1], granularity=match[2] or "tensor", group_size=size, **fields)  # type: ignore[arg-type]

    def __str__(self) -> str:
        options = [name for name, (field, value) in _OPTIONS.items() if getattr(self, field) == value]
        return "+".join([f"{self.format}:{self.granularity}{self.group_size or ''}", *options])

    @property
    def bytes_per_element(self) -> float:
        """Bytes of codes and metadata that an element of a long tensor of full blocks takes."""
        size = self.group_size or 0
        side = [1024 * max(size, 1)] * max(2, -self.axis, self.axis + 1)
        return self.nbytes(side) / math.prod(side) if size else formats.get(self.format).bytes_per_element

    def nbytes(self, shape: Sequence[int]) -> float:
        """Bytes of codes and metadata of an array of this shape."""
        codes = math.prod(self.stored_shape(shape)) * formats.get(self.format).dtype.itemsize
        if self.is_packed:
            codes = math.prod(self.stored_shape(shape))
        scale_bytes = formats.get(self.scale_format).bytes_per_element
        scales = math.prod(blocks.counts(shape, self.block_shape(shape)))
        micro = math.prod(blocks.counts(shape, self.micro_shape(shape))) if self.granularity == "mx" else 0
        return codes + scales * (scale_bytes + expansion.DTYPE.itemsize * bool(self.expand)) + micro

    @property
    def is_folded(self) -> bool:
        """Whether linear layers take codes with the powers of two of groups folded into them (see `folded`)."""
        two_levels = self.granularity == "mx" and self.outer_scale != "none"
        return two_levels and self.rounding == "nearest" and not self.exact

    @property
    def folded_spec(self) -> "QuantSpec":
        """What linear layers multiply and keep: of codes that fold, those with one scale a row; else as this says.

        `fp8jax.ops.quantization.microscaling` makes them.
        """
        return QuantSpec(self.format, "token", axis=self.axis) if self.is_folded else self

    @property
    def is_packed(self) -> bool:
        """Whether codes are packed along `axis`, as those of int10 are."""
        return formats.get(self.format).packing is not None

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the codes of an array of this shape: the same, but for packed formats."""
        if not self.is_packed:
            return tuple(shape)
        axis = self._axis(shape)
        return tuple(packing.packed_length(n) if i == axis else n for i, n in enumerate(shape))

    def block_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Block length along each dimension of an array of this shape; for "mx", that of level 1.

        Raises:
            ValueError: the array has too few dimensions for `axis` or `layer_axes`.
        """
        if self.layer_axes > len(shape):
            raise ValueError(
                f"{self} stacks {self.layer_axes} leading axes; an array of shape {tuple(shape)} has fewer"
            )
        full_shape = tuple(1 if i < self.layer_axes else max(n, 1) for i, n in enumerate(shape))
        kind = (
            self.granularity if self.granularity != "mx" else {"none": "tensor"}.get(self.outer_scale, self.outer_scale)
        )
        if kind == "tensor":
            return full_shape
        axis, ndim = self._axis(shape), len(shape)
        if kind == "token":
            return tuple(n if i == axis else 1 for i, n in enumerate(full_shape))
        if kind == "channel":
            return tuple(1 if i == axis else n for i, n in enumerate(full_shape))
        assert self.group_size is not None
        if kind == "group":
            return tuple(self.group_size if i == axis else 1 for i in range(ndim))
        if ndim < self.layer_axes + 2:
            raise ValueError(f"{self} needs two axes that are not stacked; the array has shape {tuple(shape)}")
        return tuple(self.group_size if i >= ndim - 2 else 1 for i in range(ndim))

    def micro_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Length along each dimension of the groups that share a power of two."""
        axis = self._axis(shape)
        return tuple((self.group_size or 1) if i == axis else 1 for i in range(len(shape)))

    def _axis(self, shape: Sequence[int]) -> int:
        if not -len(shape) <= self.axis < len(shape):
            raise ValueError(f"{self} runs along axis {self.axis}, which an array of shape {tuple(shape)} lacks")
        return self.axis % len(shape)
