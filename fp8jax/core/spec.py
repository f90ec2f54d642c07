"""`QuantSpec`: how a tensor is quantized, as a frozen record with a string form."""

import dataclasses
import math
import re
from collections.abc import Collection, Sequence

from fp8jax.core import blocks, expansion, formats, packing

GRANULARITIES = ("tensor", "token", "channel", "group", "block", "mx", "nv", "nvblock")
SIZED_GRANULARITIES = ("group", "block", "mx", "nv", "nvblock")
# Formats of the second level of scales, one byte each, by granularity.
_MICROSCALE_FORMATS = {"mx": "e8m0", "nv": "e4m3", "nvblock": "e4m3"}
# Granularities that survive a transpose. Groups and tokens would run across the contraction of the transposed matrix.
TRANSPOSABLE = ("tensor", "block")
ROUNDINGS = ("nearest", "stochastic")
SCALE_FORMATS = ("fp32", "bf16")
OUTER_SCALES = ("tensor", "token", "none")
EXPONENT_ROUNDINGS = ("down", "up")
EXPANSIONS = (False, True, "coat")
_OPTIONS: dict = {"expand": ("expand", True), "coat": ("expand", "coat"), "stochastic": ("rounding", "stochastic")}
_OPTIONS |= {"token": ("outer_scale", "token"), "ocp": ("outer_scale", "none"), "exact": ("fold_scales", False)}
_OPTIONS |= {"roundup": ("exponent_rounding", "up")}


def check_booleans(record: object, *fields: str, prefix: str = "") -> None:
    """Raises ValueError for a field that is neither True nor False."""
    for field in fields:
        if not isinstance(value := getattr(record, field), bool):
            raise ValueError(f"{prefix}{field} must be True or False, got {value!r}")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raises ValueError for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; use one of {', '.join(choices)}")


def check_expand(expand: bool | str) -> None:
    """Raises ValueError for an unknown kind of range expansion."""
    if expand not in EXPANSIONS:
        raise ValueError(f"unknown expand {expand!r}; use one of {', '.join(map(repr, EXPANSIONS))}")


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """How a tensor is quantized. Hashable and static under `jax.jit`.

    A spec also has a string form, `format[:granularity[size]][+option...]`. The options are `expand`, `coat`,
    `stochastic` and `exact`; for the outer scale of "mx" also `token` and `ocp`; and with `ocp` also `roundup`.
    Examples: `"e4m3"`, `"int8:token"`, `"e4m3:group128+expand"`, `"e4m3:mx32+ocp+roundup"` (mxfp8), `"e2m1:nv16"`
    (nvfp4). `str(spec)` returns it. It does not cover all fields of the constructor.

    Attributes:
        format: name of a format in `fp8jax.formats`.
        granularity: elements that share a scale. "tensor": all. "token": all along `axis` (a row, for activations and
            axis -1). "channel": all with the same index along `axis`. "group": `group_size` consecutive ones along
            `axis`. "block": a square of `group_size` in the last two axes. "mx": microscaling, a power of two (E8M0)
            for each `group_size` elements along `axis`, under an fp32 outer scale. "nv": an e4m3 scale for each
            `group_size` elements along `axis`, under an fp32 scale of the tensor (NVFP4, arXiv 2509.25149, appendix
            B). "nvblock": the same for squares of `group_size` in the last two axes.
        group_size: length of a group or of a block's side; None for the first three. The last one may be short.
        axis: axis of groups and tokens. A negative axis keeps its meaning under stacked leading axes.
        layer_axes: number of leading axes that stack separate tensors (layers of a scanned model). No scale spans them.
        scale_format: storage of the scales, "fp32" or "bf16". A bf16 scale cannot follow a decay slower than 0.4 % per
            step, such as a second moment's with b2 = 0.999.
        rounding: "nearest" (ties to even), or "stochastic" (unbiased; `quantize` then needs a key).
        expand: dynamic range expansion (COAT, section 4.2): each block is raised to a power that fits its range to the
            format's. True uses `Format.expansion_range`, and under stochastic rounding
            `expansion.exponents_with_hysteresis`. "coat" is the paper's: R = max / smallest code (229,376 for e4m3),
            with a new exponent at every step. Both decode alike and have one storage key.
            results/pages/coat_expansion.md compares their errors. A tiny member makes a group's exponent small, and
            its other codes coarse. Operations that save values and `compress_state` therefore limit it
            (`fp8jax.core.encoding.limit_group_range`), and `compressed_adamw` leaves out dead members.
        flush_to_zero: rounding of non-zero values below half the smallest code: to zero, or if False to the smallest
            code (a second moment must not decode to zero).
        outer_scale: for "mx", the fp32 scale above the powers of two. "tensor" (MOSS, section 3.1) and "token" round
            the powers up. "none" (OCP Microscaling Formats 1.0, section 6.3) has no fp32 scale. Its powers are
            the largest in the group over the largest in the format; the largest elements may saturate.
        exponent_rounding: for outer scale "none": "down" is the OCP rule. "up", the option `roundup`, is the smallest
            power of two under which no element saturates (arXiv 2506.08027, section 3). Both decode alike.
        fold_scales: for "mx" with an outer scale: linear layers fold the powers of two into codes with one scale per
            row (`is_folded`). If False, the option `exact`, products apply each power to the sum of its group, and
            residuals are two-level codes.

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
    flush_to_zero: bool = True
    outer_scale: str = "tensor"
    fold_scales: bool = True
    exponent_rounding: str = "down"

    def __post_init__(self) -> None:
        if re.search("[:+]", str(self.format)):
            raise ValueError(f"{self.format!r} is a full spec, not a format; use QuantSpec.parse({self.format!r})")
        fmt = formats.get(self.format)
        check_expand(self.expand)
        if not fmt.needs_scale:
            raise ValueError(f"format {self.format!r} is stored by a cast, without scales; use a narrower format")
        if self.format == "e8m0":
            raise ValueError("format 'e8m0' is for scales only: it has no zero and no sign. Use another format")
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("scale_format", self.scale_format, SCALE_FORMATS)
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_choice("outer_scale", self.outer_scale, OUTER_SCALES)
        check_choice("exponent_rounding", self.exponent_rounding, EXPONENT_ROUNDINGS)
        check_booleans(self, "flush_to_zero", "fold_scales")
        if self.granularity not in SIZED_GRANULARITIES and self.group_size is not None:
            raise ValueError(f"group_size={self.group_size} contradicts granularity {self.granularity!r}")
        if self.granularity in SIZED_GRANULARITIES and (self.group_size is None or self.group_size < 1):
            sizes = {"mx": 32, "nv": 16, "nvblock": 16}
            example = f"{self.granularity}{sizes.get(self.granularity, 128)}"
            need = f"needs a positive group_size, not {self.group_size!r}; use for example {example}"
            raise ValueError(f"granularity {self.granularity!r} {need}")
        if self.layer_axes < 0:
            raise ValueError(f"layer_axes must be a number of leading axes, got {self.layer_axes}")
        if self.granularity != "mx" and self.outer_scale != "tensor":
            raise ValueError(f"outer_scale={self.outer_scale!r} applies to granularity 'mx', not {self.granularity!r}")
        if not self.fold_scales and (self.granularity != "mx" or self.outer_scale == "none"):
            raise ValueError(
                "fold_scales=False, option 'exact', requires granularity 'mx' with an outer scale, got "
                f"{self.granularity!r} with {self.outer_scale!r}. Omit it: codes with other scales are never folded"
            )
        if self.exponent_rounding == "up" and self.outer_scale != "none":
            raise ValueError(
                "exponent_rounding='up', option 'roundup', requires power-of-two scales without an outer scale, such "
                f"as 'e4m3:mx32+ocp+roundup', got granularity {self.granularity!r} with {self.outer_scale!r}; omit it"
            )
        if self.has_microscales and (self.expand or not fmt.is_float):
            part = "range expansion" if self.expand else f"format {self.format!r}"
            raise ValueError(
                f"granularity {self.granularity!r} has two levels of floating-point scales and does not support {part}"
            )
        if self.has_microscales and not self.flush_to_zero:
            raise ValueError(
                f"flush_to_zero=False is not supported with granularity {self.granularity!r}, whose scales can be 0; "
                "omit it"
            )

    @classmethod
    def parse(cls, text: "str | QuantSpec") -> "QuantSpec":
        """Parses the string form; returns a spec unchanged.

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
                f"{text!r} does not match format[:granularity[size]][+option...], such as 'e4m3:group128+expand'; the "
                f"options are {', '.join(_OPTIONS)}"
            )
        size = int(match[3]) if match[3] else None
        return cls(format=match[1], granularity=match[2] or "tensor", group_size=size, **fields)

    def __str__(self) -> str:
        options = [name for name, (field, value) in _OPTIONS.items() if getattr(self, field) == value]
        return "+".join([f"{self.format}:{self.granularity}{self.group_size or ''}", *options])

    @property
    def bytes_per_element(self) -> float:
        """Bytes of codes and metadata per element of a large tensor of full blocks."""
        size = self.group_size or 0
        side = [1024 * max(size, 1)] * max(2, -self.axis, self.axis + 1)
        return self.nbytes(side) / math.prod(side) if size else formats.get(self.format).bytes_per_element

    def nbytes(self, shape: Sequence[int]) -> float:
        """Bytes of codes and metadata for an array of this shape."""
        sizes = {
            "codes": 1 if self.is_packed else formats.get(self.format).dtype.itemsize,
            "scale": formats.get(self.scale_format).bytes_per_element,
            "expansion": expansion.DTYPE.itemsize,
            "microscale": 1,
        }
        return sum(math.prod(leaf) * sizes[name] for name, leaf in self.leaf_shapes(shape).items())

    @property
    def microscale_format(self) -> str | None:
        """Format of the second level of scales, "e8m0" or "e4m3"; None if there is one level."""
        return _MICROSCALE_FORMATS.get(self.granularity)

    @property
    def has_microscales(self) -> bool:
        """Whether there are two levels of scales."""
        return self.granularity in _MICROSCALE_FORMATS

    @property
    def is_block_scaled(self) -> bool:
        """Whether Blackwell's matrix units multiply the codes under these scales: mxfp8 or nvfp4."""
        fmt = formats.get(self.format)
        if self.granularity == "mx":
            return fmt.is_fp8 and self.group_size == 32 and self.outer_scale == "none"
        return fmt.is_fp4 and self.granularity in ("nv", "nvblock") and self.group_size == 16

    @property
    def outer_granularity(self) -> str:
        """Granularity of the fp32 scales: of the outer ones if there are two levels, "none" if all of these are 1."""
        return self.outer_scale if self.has_microscales else self.granularity

    @property
    def is_folded(self) -> bool:
        """Whether linear layers fold the powers of two of groups into the codes (see `folded_spec`)."""
        two_levels = self.granularity == "mx" and self.outer_scale != "none"
        return two_levels and self.rounding == "nearest" and self.fold_scales

    @property
    def folded_spec(self) -> "QuantSpec":
        """The spec that linear layers multiply and save: one scale per row if codes fold, else this one.

        `fp8jax.ops.quantization.microscaling` folds them.
        """
        return QuantSpec(self.format, "token", axis=self.axis) if self.is_folded else self

    @property
    def is_packed(self) -> bool:
        """Whether codes are packed along `axis`, as those of int10 and e2m1 are."""
        return formats.get(self.format).packing is not None

    def leaf_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of a `QTensor` with this shape, by name."""
        block_shape = self.block_shape(shape)
        micro_shape = self.micro_shape(shape) if self.has_microscales else None
        shapes = {"codes": self.stored_shape(shape), "scale": blocks.counts(shape, block_shape)}
        if self.expand:
            shapes["expansion"] = shapes["scale"]
        if micro_shape is not None:
            shapes["microscale"] = blocks.counts(shape, micro_shape)
        return shapes

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the codes for an array of this shape; it differs only for packed formats."""
        if not self.is_packed:
            return tuple(shape)
        axis, bits = self._axis(shape), formats.get(self.format).bits
        return tuple(packing.packed_length(n, bits) if i == axis else n for i, n in enumerate(shape))

    def block_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Block length along each dimension of an array of this shape; of the outer scale if there are two levels.

        Raises:
            ValueError: the array has too few dimensions for `axis` or `layer_axes`.
        """
        if self.layer_axes > len(shape):
            raise ValueError(
                f"{self} stacks {self.layer_axes} leading axes, but an array of shape {tuple(shape)} has fewer"
            )
        full_shape = tuple(1 if i < self.layer_axes else max(n, 1) for i, n in enumerate(shape))
        kind = self.outer_granularity
        if kind in ("tensor", "none"):
            return full_shape
        axis, ndim = self._axis(shape), len(shape)
        if kind == "token":
            return tuple(n if i == axis else 1 for i, n in enumerate(full_shape))
        if kind == "channel":
            return tuple(1 if i == axis else n for i, n in enumerate(full_shape))
        assert self.group_size is not None
        if kind == "group":
            return tuple(self.group_size if i == axis else 1 for i in range(ndim))
        return self._square(shape)

    def micro_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Length along each dimension of the groups that share a scale of the second level."""
        if self.granularity == "nvblock":
            return self._square(shape)
        axis = self._axis(shape)
        return tuple((self.group_size or 1) if i == axis else 1 for i in range(len(shape)))

    def _square(self, shape: Sequence[int]) -> tuple[int, ...]:
        ndim = len(shape)
        if ndim < self.layer_axes + 2:
            raise ValueError(f"{self} needs two axes that are not stacked, but the array has shape {tuple(shape)}")
        return tuple((self.group_size or 1) if i >= ndim - 2 else 1 for i in range(ndim))

    def _axis(self, shape: Sequence[int]) -> int:
        if not -len(shape) <= self.axis < len(shape):
            raise ValueError(
                f"{self} uses axis {self.axis}, which is out of range for an array of shape {tuple(shape)}"
            )
        return self.axis % len(shape)
