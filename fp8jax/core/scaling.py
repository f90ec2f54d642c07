"""Scaling strategies: the source of a quantized operand's scale. To add one, add a class and a line in `NAMES`.

A `Scaling` without state computes the scale from the tensor. A `Stateful` one keeps an fp32 array per operand in
addition to the parameters. Layers read it in each call, and advance it once a step. Recipes name strategies
(`Linear.scaling`, `Linear.w_scaling`), and `find_scaling` looks the names up.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8jax.core.formats import BF16, TINY, Format, decode_e8m0, encode_e8m0, round_to, where

# Mesh axis names for `jax.lax.psum`; None for none.
AxisNames = Hashable | Sequence[Hashable] | None


def compute_amax(x: Array) -> Array:
    """Largest finite |x|, fp32 scalar; 0 if there is no finite value."""
    magnitude = jnp.abs(x.astype(jnp.float32))
    return jnp.max(where(jnp.isfinite(magnitude), magnitude, 0.0), initial=0.0)


def to_scale(amax: Array, fmt: Format, max_microscale: float = 1.0) -> Array:
    """The scale that maps `amax` to the largest code times the largest microscale; 1 if `amax` is zero."""
    # One product: XLA would multiply two constants first in some programs only.
    return jnp.where(amax > 0, jnp.maximum(amax * np.float32(1 / (fmt.max * max_microscale)), TINY), 1.0)


def convert_scale(scale: Array, source_fmt: Format, fmt: Format) -> Array:
    """The fp32 scale under which `fmt` has the range that `source_fmt` has under `scale`, clipped to normal numbers."""
    if source_fmt.max == fmt.max:
        return scale
    return jnp.clip(scale.astype(jnp.float32) * np.float32(source_fmt.max / fmt.max), TINY, np.finfo(np.float32).max)


def pow2_scale(amax: Array, outer_scale: Array, fmt: Format) -> Array:
    """The smallest power of two times the outer scale, fp32, under which `amax` does not saturate (MOSS, equation 3).

    The result is the smallest normal number if `amax` is 0 or the scale would be subnormal.
    """
    units = amax * (1 / outer_scale) * np.float32(1 / fmt.max)
    # The product overflows if the outer scale is far too small for `amax`, and Inf has no exponent.
    power = decode_e8m0(encode_e8m0(jnp.clip(units, TINY, np.finfo(np.float32).max), "up"))
    return jnp.maximum(outer_scale * power, TINY)


def clamp_scale(scale: Array) -> Array:
    """A given scale in fp32, at least the smallest normal number, so that its reciprocal is finite."""
    return jnp.maximum(scale, np.float32(TINY))


# A sample has the first SAMPLE_ROWS rows of every SAMPLE_ROWS * SAMPLE_EVERY. A bound is SAMPLE_MARGIN times its amax.
SAMPLE_ROWS, SAMPLE_EVERY, SAMPLE_MARGIN = 32, 16, 4.0


def compute_sample_amax(x: Array, row_offset: Array | int = 0) -> Array:
    """`compute_amax` of the sampled rows; `row_offset` is the position of the first row in a larger matrix."""
    # Computed at run time: jax.checkpoint would save a constant for the backward pass.
    sampled = (row_offset + jnp.arange(x.shape[0])) // SAMPLE_ROWS % SAMPLE_EVERY == 0
    return compute_amax(where(sampled[:, None], x.astype(jnp.float32), 0.0))


def amax_from_sample(sample_amax: Array) -> Array:
    """The bound on a tensor's amax from the amax of its sample."""
    return jnp.minimum(SAMPLE_MARGIN * sample_amax, np.finfo(np.float32).max)


def max_slack_binades(fmt: Format) -> int:
    """Number of binades by which a bound may exceed a tensor's amax: 6 in e4m3, 12 in e5m2.

    That is two fifths of the binades of normal numbers. Values down to 1/500 of the amax then keep the full relative
    precision.
    """
    return round(0.4 * math.log2(fmt.max / fmt.smallest_normal))


def is_loose(bound: Array, amax: Array, fmt: Format) -> Array:
    """Whether a bound exceeds a non-zero amax by more than `max_slack_binades`; fp32 arrays."""
    return (amax > 0) & (bound * np.float32(2.0 ** -max_slack_binades(fmt)) > amax)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A strategy without state: the scale of a tensor comes from the tensor.

    Class attributes:
        operands: the operands "x", "w" and "dy" of a linear layer that it serves; the others use `Current`.
        is_default: whether the quantizer computes the same scale without help.
        amax_rounding: what `reduce_amax` does, for kernels: "exact" nothing, "up" rounds up to bf16, None anything
            else.
    """

    operands: ClassVar[tuple[str, ...]] = ("x", "w", "dy")
    is_default: ClassVar[bool] = False
    amax_rounding: ClassVar[str | None] = None

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        """The strategy with the settings of a recipe's `Linear`."""
        del settings
        return cls()

    def reduce_amax(self, amax: Array) -> Array:
        """The magnitude that the scale is for, from the tensor's amax; fp32 arrays of one shape."""
        return amax

    def scale(self, state: Any, x: Array, fmt: Format) -> Array:
        """The scale of a tensor, fp32 scalar; only stateful strategies read `state`."""
        del state
        return to_scale(self.reduce_amax(compute_amax(x)), fmt)


@dataclasses.dataclass(frozen=True)
class Current(Scaling):
    """Current (just-in-time) scaling by the tensor's amax."""

    is_default: ClassVar[bool] = True
    amax_rounding: ClassVar[str | None] = "exact"


@dataclasses.dataclass(frozen=True)
class TwoStage(Scaling):
    """Group scaling (COAT, section 5.2 and figure 4): a tensor's amax from the maxima of its groups.

    In the first stage the previous operation writes one bf16 maximum per group along the last axis. The second stage
    reads only those. Ours rounds up to bf16, so that no value saturates. The largest rounded maximum is then the
    rounded amax, for any groups.
    """

    amax_rounding: ClassVar[str | None] = "up"

    def reduce_amax(self, amax: Array) -> Array:
        exact = jnp.where(jnp.isfinite(amax), amax, 0.0)
        rounded = round_to(exact, BF16)
        up = jnp.asarray(rounded.view(jnp.uint16) + 1, jnp.uint16).view(jnp.bfloat16)
        return jnp.where(rounded.astype(jnp.float32) < exact, up, rounded).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Stateful(Scaling):
    """A strategy with state: one fp32 array per operand, with a constant shape.

    `init` creates it, `expected_amax` reads it, and `update` advances it once a step by the step's statistics. Those of
    calls, microbatches and replicas are merged first. A layer stores each operand's state and its statistics since the
    last update. The statistic of "dy" is always its amax, which leaves the backward pass as a cotangent. In evaluation
    layers only read the state.

    Class attributes:
        granularities: granularities of the specs that its scales are for.
        merge: how statistics are merged, "max" or "sum".
        collects_stats: whether calls collect statistics. If not, the state comes from outside (`Automatic`), and
            functions without one use the operand's own scale.
        stats_shape: shape of a statistic; zeros mean no observation.
        is_threshold: whether the state is not a scale, but the threshold above which blocks of the operand fall back.
    """

    is_threshold: ClassVar[bool] = False
    granularities: ClassVar[tuple[str, ...]] = ("tensor",)
    merge: ClassVar[str] = "max"
    collects_stats: ClassVar[bool] = True
    stats_shape: ClassVar[tuple[int, ...]] = ()

    def variable_name(self, operand: str) -> str:
        """The name of a layer's state variable, different for each strategy."""
        return f"{type(self).__name__.lower()}_{operand}"

    def init(self, x: Array | None = None) -> Array:
        """The state before the first step; `x` is the operand if it is known then, as a weight is."""
        raise NotImplementedError

    def expected_amax(self, state: Array) -> Array:
        """The expected amax of the operand, fp32 scalar; 0 stands for the operand's own."""
        raise NotImplementedError

    def scale(self, state: Array, x: Array, fmt: Format) -> Array:
        amax = self.expected_amax(state)
        return to_scale(jnp.where(amax > 0, amax, self.reduce_amax(compute_amax(x))), fmt)

    def collect_stats(self, state: Array, x: Array) -> Array:
        """The statistic of one call, of shape `stats_shape`."""
        del state
        return compute_amax(x)

    def merge_stats(self, a: Array, b: Array) -> Array:
        """Two statistics of one step merged; either may be of stacked layers."""
        return jnp.maximum(a, b) if self.merge == "max" else a + b

    def reduce_over_replicas(self, stats: Array, axis_name: AxisNames) -> Array:
        """The statistics of all replicas along mesh axes merged, inside `jax.shard_map`."""
        return lax.pmax(stats, axis_name) if self.merge == "max" else lax.psum(stats, axis_name)

    def update(self, state: Array, stats: Array) -> Array:
        """The next state, from the step's merged statistics."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Delayed(Stateful):
    """Delayed scaling (Micikevicius et al., FP8 Formats for Deep Learning; Transformer Engine's default).

    The scale comes from the largest amax of the last steps, so that a tensor is quantized in one pass; larger values
    saturate. Before the first update the tensor's own amax is used. State: fp32 array (history,), newest first.

    Attributes:
        amax_history_length: steps in the history.
        margin: powers of two left above the amax.
    """

    amax_history_length: int = 1024
    margin: int = 0

    def __post_init__(self) -> None:
        if self.amax_history_length < 1:
            raise ValueError(f"Delayed.amax_history_length must be positive, not {self.amax_history_length}")

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        return cls(settings.amax_history_length, settings.margin)

    def variable_name(self, operand: str) -> str:
        return operand

    def init(self, x: Array | None = None) -> Array:
        del x
        return jnp.zeros((self.amax_history_length,), jnp.float32)

    def reduce_amax(self, amax: Array) -> Array:
        return amax * 2.0**self.margin

    def expected_amax(self, state: Array) -> Array:
        return self.reduce_amax(jnp.max(state))

    def update(self, state: Array, stats: Array) -> Array:
        """The next history; unchanged after a step of zeros alone. A non-finite amax counts as 0."""
        amax = jnp.where(jnp.isfinite(stats), stats, 0.0).astype(jnp.float32)
        # An expert without tokens keeps what it has observed before.
        return jnp.where(stats == 0, state, jnp.concatenate([amax[None], state[:-1]]))


@dataclasses.dataclass(frozen=True)
class Threshold(Stateful):
    """The delay threshold of INT8 fallback (arXiv 2503.08040, appendix D and algorithm 2).

    Blocks of the input have their own scales. A block whose amax exceeds the threshold also gets a residual
    (`fp8jax.ops.quantization.fallback`). The threshold starts at 1. After each step it is divided by a factor if the
    fraction of these blocks was below the range, and multiplied by it if the fraction was above. State: fp32 scalar. A
    statistic is two counts: blocks that fell back, and all blocks.

    Attributes:
        min_fraction, max_fraction: target range of the fraction of blocks.
        update_factor: factor of one adjustment.

    Raises:
        ValueError: the range is not within [0, 1], or the factor is not above 1.
    """

    min_fraction: float = 0.1
    max_fraction: float = 0.3
    update_factor: float = 1.3

    operands: ClassVar[tuple[str, ...]] = ("x",)
    granularities: ClassVar[tuple[str, ...]] = ("block",)
    merge: ClassVar[str] = "sum"
    stats_shape: ClassVar[tuple[int, ...]] = (2,)
    is_threshold: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.min_fraction <= self.max_fraction <= 1:
            raise ValueError(
                f"fallback fractions must satisfy 0 <= min <= max <= 1, got min {self.min_fraction} and max "
                f"{self.max_fraction}"
            )
        if not self.update_factor > 1:
            raise ValueError(f"update_factor must be greater than 1, got {self.update_factor}")

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        lowest, highest = settings.fallback_fraction_range
        return cls(lowest, highest, settings.threshold_update_factor)

    def init(self, x: Array | None = None) -> Array:
        del x
        return jnp.ones((), jnp.float32)

    def count_fallbacks(self, is_fallback: Array) -> Array:
        """The statistic of a call, from a bool array of its blocks."""
        return jnp.stack([jnp.sum(is_fallback, dtype=jnp.float32), jnp.float32(is_fallback.size)])

    def update(self, state: Array, stats: Array) -> Array:
        """The next threshold, a normal number; unchanged after a step without blocks."""
        fallback_count, block_count = stats[0], stats[1]
        fraction = fallback_count / jnp.maximum(block_count, 1)
        factor = jnp.where(
            fraction > self.max_fraction,
            self.update_factor,
            jnp.where(fraction < self.min_fraction, 1 / self.update_factor, 1.0),
        )
        return jnp.where(block_count > 0, jnp.clip(state * factor, TINY, 1 / TINY), state)


@dataclasses.dataclass(frozen=True)
class Automatic(Stateful):
    """Automatic weight scaling (MOSS, section 3.2, equation 10): a bound on the weight, without a pass over it.

    State: the bound, an fp32 scalar. `track_weight_amax`, last in the optimizer's chain, increases it by the applied
        updates and measures the weight every `weight_amax_interval` steps. The layer receives it after each update. No
        weight
    exceeds its bound, so none saturates. Until a model gets its bounds it holds 0, and measures its weights in each
    call.

    Attributes:
        weight_amax_interval: steps between measurements.
    """

    operands: ClassVar[tuple[str, ...]] = ("w",)
    collects_stats: ClassVar[bool] = False

    weight_amax_interval: int = 500

    def __post_init__(self) -> None:
        if self.weight_amax_interval < 1:
            raise ValueError(f"Automatic.weight_amax_interval must be positive, not {self.weight_amax_interval}")

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        return cls(settings.weight_amax_interval)

    def init(self, x: Array | None = None) -> Array:
        if x is None:
            raise ValueError("automatic scaling measures the initial weight; pass the weight to init_scaling")
        return self.measure_amax(x)

    def scale(self, state: Array, x: Array, fmt: Format) -> Array:
        """The scale for the bound in `state`; `x` is not read."""
        return to_scale(state, fmt)

    def measure_amax(self, x: Array) -> Array:
        """The largest finite magnitudes of matrices (..., M, N): fp32 (...)."""
        magnitude = jnp.abs(x.astype(jnp.float32))
        return jnp.max(where(jnp.isfinite(magnitude), magnitude, 0.0), axis=(-2, -1), initial=0.0)

    def grow_bound(self, bound: Array, max_step: Array, dtype: Any) -> Array:
        """The bound after up to `max_step` is added to each element of a weight of this dtype, rounded to nearest.

        Rounding is monotonic, so values within the bound stay within the rounded bound. The factor covers the rounding
        of an fp32 sum, and of an update that XLA did not round before the addition.
        """
        total, float_info = (bound + max_step) * np.float32(1 + 2.0**-22), jnp.finfo(dtype)
        return total if float_info.nmant >= 23 else lax.reduce_precision(total, float_info.nexp, float_info.nmant)


NAMES: dict[str, type[Scaling]] = {
    "current": Current,
    "two_stage": TwoStage,
    "delayed": Delayed,
    "threshold": Threshold,
    "automatic": Automatic,
}


def find_scaling(name: str | Scaling, settings: Any = None, operand: str | None = None) -> Scaling:
    """The strategy of this name with a recipe's settings; `Current` for an operand that it does not serve.

    Raises:
        ValueError: no strategy has this name; the message lists all names.
    """
    if isinstance(name, Scaling):
        return name
    if name not in NAMES:
        raise ValueError(f"{name!r} is not a known scaling; use one of {', '.join(NAMES)}")
    kind = NAMES[name]
    if operand is not None and operand not in kind.operands:
        return Current()
    return kind() if settings is None else kind.from_settings(settings)
