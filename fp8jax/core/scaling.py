"""Scaling strategies: where the scale of a quantized operand comes from. To add one, add a class here and its name.

A `Scaling` without a state takes the scale from the tensor. A `Stateful` one keeps an fp32 array for each operand that
it serves, beside the parameters; layers hold it, read it in each call, and advance it once a step. Recipes name
strategies (`Linear.scaling`, `Linear.w_scaling`); `find_scaling` is the only place that looks a name up.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8jax.core.formats import BF16, TINY, Format, decode_e8m0, encode_e8m0, round_to, where

# Mesh axes by name, as `jax.lax.psum` takes them; None for none.
AxisNames = Hashable | Sequence[Hashable] | None


def compute_amax(x: Array) -> Array:
    """Largest finite |x| of a tensor, fp32 scalar; 0 for an empty one or one without finite values."""
    magnitude = jnp.abs(x.astype(jnp.float32))
    return jnp.max(where(jnp.isfinite(magnitude), magnitude, 0.0), initial=0.0)


def to_scale(amax: Array, fmt: Format) -> Array:
    """The scale that takes a largest magnitude to the largest code; 1 where it is zero."""
    return jnp.where(amax > 0, jnp.maximum(amax * np.float32(1 / fmt.max), TINY), 1.0)


def convert_scale(scale: Array, source_fmt: Format, fmt: Format) -> Array:
    """A scale, fp32, under which `fmt` has the range of `source_fmt` under another: itself where both end alike."""
    if source_fmt.max == fmt.max:
        return scale
    return jnp.minimum(scale.astype(jnp.float32) * np.float32(source_fmt.max / fmt.max), np.finfo(np.float32).max)


def pow2_scale(amax: Array, outer_scale: Array, fmt: Format) -> Array:
    """The smallest power of two times a level, fp32, that takes a largest magnitude to no more than the largest code.

    MOSS, equation 3. Of 0, and where it would be subnormal, the smallest normal number.
    """
    units = amax * (1 / outer_scale) * np.float32(1 / fmt.max)
    power = decode_e8m0(encode_e8m0(jnp.maximum(units, TINY), "up"))
    return jnp.maximum(outer_scale * power, TINY)


def clamp_scale(scale: Array) -> Array:
    """A given scale in fp32; subnormal ones, whose reciprocals are infinite, and 0 count as the smallest normal one."""
    return jnp.maximum(scale, np.float32(TINY))


# A sample is of rows, the first SAMPLE of each EVERY times as many; MARGIN is how far a bound looks beyond it.
SAMPLE_ROWS, SAMPLE_EVERY, SAMPLE_MARGIN = 32, 16, 4.0


def compute_sample_amax(x: Array, row_offset: Array | int = 0) -> Array:
    """`compute_amax` of the rows that count as a sample; `row_offset` is the first one's place in a larger matrix."""
    # Computed, for a constant would be kept for the backward pass under jax.checkpoint.
    sampled = (row_offset + jnp.arange(x.shape[0])) // SAMPLE_ROWS % SAMPLE_EVERY == 0
    return compute_amax(where(sampled[:, None], x.astype(jnp.float32), 0.0))


def amax_from_sample(sample_amax: Array) -> Array:
    """How large a tensor is taken to be of which a sample's largest magnitude is known."""
    return jnp.minimum(SAMPLE_MARGIN * sample_amax, np.finfo(np.float32).max)


def max_slack_binades(fmt: Format) -> int:
    """How many binades a bound may lie above a tensor's largest magnitude: 6 in e4m3, 12 in e5m2.

    It is two fifths of the binades of normal numbers. Values of a five-hundredth of the largest then still have the
    relative error of the format.
    """
    return round(0.4 * math.log2(fmt.max / fmt.smallest_normal))


def is_loose(bound: Array, amax: Array, fmt: Format) -> Array:
    """Whether a bound is more than `max_slack_binades` above a tensor's amax, which is not 0; fp32 arrays."""
    return (amax > 0) & (bound * np.float32(2.0 ** -max_slack_binades(fmt)) > amax)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A strategy without a state: the scale of a tensor comes from the tensor.

    Class attributes:
        operands: the operands "x", "w" and "dy" of a linear layer that it serves; the others have `Current` scales.
        is_default: the scale is the one that the quantizer finds by itself.
        amax_rounding: what `reduce_amax` does, for kernels that do it: "exact", nothing; "up", round up to bf16; None,
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
        """The magnitude that the scale is for, of the largest one of the tensor; fp32 arrays of one shape."""
        return amax

    def scale(self, state: Any, x: Array, fmt: Format) -> Array:
        """The scale of a tensor, fp32 scalar; `state` is read by strategies that have one."""
        del state
        return to_scale(self.reduce_amax(compute_amax(x)), fmt)


@dataclasses.dataclass(frozen=True)
class Current(Scaling):
    """Current, or just-in-time, scaling: of the largest magnitude of the tensor."""

    is_default: ClassVar[bool] = True
    amax_rounding: ClassVar[str | None] = "exact"


@dataclasses.dataclass(frozen=True)
class TwoStage(Scaling):
    """Group scaling (COAT, section 5.2 and figure 4): the maximum of a tensor from the maxima of its groups.

    The first stage belongs to the operation before, which writes one maximum a group along the last axis in bf16; the
    second reads only those. Rounding to bf16 is upwards here, so that no value saturates; the largest of the rounded
    maxima then is the largest magnitude, rounded, whatever the groups are.
    """

    amax_rounding: ClassVar[str | None] = "up"

    def reduce_amax(self, amax: Array) -> Array:
        exact = jnp.where(jnp.isfinite(amax), amax, 0.0)
        rounded = round_to(exact, BF16)
        up = jnp.asarray(rounded.view(jnp.uint16) + 1, jnp.uint16).view(jnp.bfloat16)
        return jnp.where(rounded.astype(jnp.float32) < exact, up, rounded).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Stateful(Scaling):
    """A strategy whose scale comes from a state: one fp32 array for each operand, the same shape throughout training.

    `init` makes it, `expected_amax` reads it, and `update` advances it once a step with what was observed in the step.
    Observations of calls, microbatches and replicas merge first. A layer keeps the state of each operand and what it
    has seen of it since the last update. That of "dy" leaves the backward pass as a cotangent and is always its largest
    magnitude. In evaluation layers read the state and write nothing.

    Class attributes:
        granularities: those of operands' specs that its scales are for.
        merge: how observations merge, "max" or "sum".
        collects_stats: whether calls observe the operand; else the state comes from outside (`Automatic`), and
            functions without one take the operand's own scale.
        stats_shape: shape of an observation; zeros are that of nothing.
        is_threshold: whether the state is no scale, but the threshold above which blocks of the operand fall back.
    """

    is_threshold: ClassVar[bool] = False
    granularities: ClassVar[tuple[str, ...]] = ("tensor",)
    merge: ClassVar[str] = "max"
    collects_stats: ClassVar[bool] = True
    stats_shape: ClassVar[tuple[int, ...]] = ()

    def variable_name(self, operand: str) -> str:
        """The name of a layer's variable that holds the state, so that no strategy reads another's checkpoint."""
        return f"{type(self).__name__.lower()}_{operand}"

    def init(self, x: Array | None = None) -> Array:
        """The state before the first step; `x` is the operand, where it is known then: a weight is."""
        raise NotImplementedError

    def expected_amax(self, state: Array) -> Array:
        """The largest magnitude that the operand is expected to have, fp32 scalar; 0 takes the operand's own."""
        raise NotImplementedError

    def scale(self, state: Array, x: Array, fmt: Format) -> Array:
        amax = self.expected_amax(state)
        return to_scale(jnp.where(amax > 0, amax, self.reduce_amax(compute_amax(x))), fmt)

    def collect_stats(self, state: Array, x: Array) -> Array:
        """What one call notes of the operand, of shape `stats_shape`."""
        del state
        return compute_amax(x)

    def merge_stats(self, a: Array, b: Array) -> Array:
        """Two observations of one step as one; either may be of stacked layers."""
        return jnp.maximum(a, b) if self.merge == "max" else a + b

    def reduce_over_replicas(self, stats: Array, axis_name: AxisNames) -> Array:
        """The observations of all replicas along mesh axes as one, inside `jax.shard_map`."""
        return lax.pmax(stats, axis_name) if self.merge == "max" else lax.psum(stats, axis_name)

    def update(self, state: Array, stats: Array) -> Array:
        """The state after a step in which `stats` was, over all its calls, microbatches and replicas."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Delayed(Stateful):
    """Delayed scaling (Micikevicius et al., FP8 Formats for Deep Learning; Transformer Engine's default).

    The scale is that of the largest magnitude of the last steps, so that a tensor is quantized in one pass; a tensor
    that outgrows it saturates. Before the first update there is no history, and the tensor itself gives the scale.
    State: fp32 array (history,), newest first.

    Attributes:
        amax_history_length: steps looked back on.
        margin: powers of two left above the largest magnitude.
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
        """The history after a step; a largest magnitude that is not finite counts as 0."""
        amax = jnp.where(jnp.isfinite(stats), stats, 0.0).astype(jnp.float32)
        return jnp.concatenate([amax[None], state[:-1]])


@dataclasses.dataclass(frozen=True)
class Threshold(Stateful):
    """The delay threshold of INT8 fallback (arXiv 2503.08040, appendix D and algorithm 2).

    Blocks of the input have their own scales; one whose largest magnitude exceeds the threshold gets a residual besides
    (`fp8jax.ops.quantization.fallback`). The threshold starts at 1. After a step in which less than the lowest share of
    all blocks fell back, over all microbatches and replicas, it is divided by a factor, after more than the highest
    share multiplied. State: fp32 scalar. An observation is two counts, of blocks that fell back and of all.

    Attributes:
        min_fraction, max_fraction: the range in which the share of blocks is kept.
        update_factor: of one adjustment.

    Raises:
        ValueError: the range is not within [0, 1], or the factor not above 1.
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
                f"a share of blocks lies in [0, 1], and no range is from {self.min_fraction} to {self.max_fraction}"
            )
        if not self.update_factor > 1:
            raise ValueError(f"the factor of a threshold must be above 1, not {self.update_factor}")

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        lowest, highest = settings.fallback_fraction_range
        return cls(lowest, highest, settings.threshold_update_factor)

    def init(self, x: Array | None = None) -> Array:
        del x
        return jnp.ones((), jnp.float32)

    def count_fallbacks(self, is_fallback: Array) -> Array:
        """The observation of a call in which these blocks, bool, fell back."""
        return jnp.stack([jnp.sum(is_fallback, dtype=jnp.float32), jnp.float32(is_fallback.size)])

    def update(self, state: Array, stats: Array) -> Array:
        """The threshold after a step; the same after one without blocks. It stays a normal number."""
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
    """Automatic weight scaling (MOSS, section 3.2, equation 10): of a bound on the weight, which nothing reads for it.

    The state is the bound, an fp32 scalar. It is the optimizer's: `track_weight_amax`, last in its chain, lets the
    bound grow with what is applied, and measures again every `weight_amax_interval` steps; the layer is given it after
    each update. No weight is beyond its bound, so none saturates. Until then a model holds 0, and measures its weights
    in each call.

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
            raise ValueError("automatic scaling measures the weight at the start: give init_scaling the weight")
        return self.measure_amax(x)

    def scale(self, state: Array, x: Array, fmt: Format) -> Array:
        return to_scale(state, fmt)

    def measure_amax(self, x: Array) -> Array:
        """The largest finite magnitudes of matrices (..., M, N): fp32 (...)."""
        magnitude = jnp.abs(x.astype(jnp.float32))
        return jnp.max(where(jnp.isfinite(magnitude), magnitude, 0.0), axis=(-2, -1), initial=0.0)

    def grow_bound(self, bound: Array, max_step: Array, dtype: Any) -> Array:
        """The bound after at most `max_step` was added to each element of a weight of this dtype, rounded to nearest.

        Rounding is monotonic: what is within the bound stays within the rounded one. The factor covers the rounding of
        a sum in fp32, and that of an update which XLA did not round before it was added.
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
    """The strategy that a recipe names, with its settings; `Current` for an operand that it does not serve.

    Raises:
        ValueError: no strategy has this name; the message lists those there are.
    """
    if isinstance(name, Scaling):
        return name
    if name not in NAMES:
        raise ValueError(f"{name!r} is one of no known scalings: {', '.join(NAMES)}")
    kind = NAMES[name]
    if operand is not None and operand not in kind.operands:
        return Current()
    return kind() if settings is None else kind.from_settings(settings)
