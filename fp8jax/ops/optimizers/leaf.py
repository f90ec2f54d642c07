"""The record of one parameter in an optimizer's step, the scalars of the step, and how parts of a leaf are stored.

Dead elements must not cost the others of their group precision. The expansion exponent of a group comes from its
smallest magnitude. The moments of an element without gradients (a dead unit, a pruned column) decay without end, and
would widen the range of the group. Such elements are found by their update, |m| / (sqrt(v) + eps), which decays faster
than either moment.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from fp8jax.core import blocks, formats, masters, noise
from fp8jax.core.masters import MasterWeight
from fp8jax.core.qtensor import QTensor, quantize_stochastic, quantize_with_scale

# Finite gradients are clipped to this magnitude. Squares, sums and bias corrections of it stay within fp32.
# `codec_triton.LARGEST_GRADIENT` is the kernels' copy.
LARGEST_GRADIENT = np.float32(2.0**62)

Moment = QTensor | Array


@dataclasses.dataclass(frozen=True)
class Adam:
    """The scalars of a step; each may be a traced scalar.

    Attributes:
        eps: added to the root of the second moment.
        eps_root: added to the second moment under the root.
        count: number of this step, from 1, int32.
        rate: the change of a weight is -rate * (direction + weight_decay * weight).
        grad_scale: factor of the gradients, or None.
        apply_if: whether the step is taken; if not, parameters and moments stay. None takes it.
        max_direction: finite directions are clipped to this magnitude; None does not clip.
        nesterov: whether directions are those of NAdam, as in optax; static.
        seed: two uint32 words, the noise of this step; None if nothing is rounded stochastically.
    """

    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    eps_root: ArrayLike
    count: Array
    rate: Any = -1.0
    weight_decay: Any = 0.0
    grad_scale: Any = None
    apply_if: Any = None
    max_direction: Any = None
    nesterov: bool = False
    seed: Any = None

    def split_static(self) -> tuple[tuple[tuple[str, Any], ...], dict[str, Array]]:
        """Static fields, hashable, and the others as arrays: `Adam(**dict(static), **scalars)` is the same again.

        `b1` and `b2` are static if they are numbers: 1 - b1 is exact if it is computed before it is rounded to fp32.
        """
        fields = vars(self)
        numbers = [name for name in ("b1", "b2") if not isinstance(fields[name], Array)]
        static = {name: x for name, x in fields.items() if x is None or name in (*numbers, "nesterov")}
        scalars = {name: jnp.asarray(x) for name, x in fields.items() if name not in static}
        integers = ("count", "apply_if", "seed")
        scalars = {name: x if name in integers else x.astype(jnp.float32) for name, x in scalars.items()}
        return tuple(static.items()), scalars


class TreeSlice(NamedTuple):
    """The part of the parameters that a step updates, so that its noise equals that of a step of all parameters.

    Attributes:
        name: path of the parameters in the whole tree, keys joined by "/".
        layer: index of the layer if the parameters are stacked, int32; None if not.
    """

    name: str = ""
    layer: Array | None = None

    def path(self, key_path: Any) -> str:
        """The path of a parameter in the whole tree."""
        return "/".join(filter(None, (self.name, jax.tree_util.keystr(key_path, simple=True, separator="/"))))

    def preceding_blocks(self, size: int, shape: tuple[int, ...], quantity: str, fix: str) -> Array | None:
        """How many blocks of eight elements come before this layer in its stack, uint32; None without a stack.

        Raises:
            ValueError: `size`, the elements of a layer, is not a multiple of eight. Noise is made for eight at a time.
        """
        if self.layer is None:
            return None
        if size % 8:
            raise ValueError(
                f"a stacked parameter with layers of shape {shape} has {quantity} that are rounded stochastically, "
                f"with noise for eight elements at a time. Use layers with a multiple of eight elements, or {fix}"
            )
        return self.layer.astype(jnp.uint32) * np.uint32(size // 8)


WHOLE_TREE = TreeSlice()


class StepResult(NamedTuple):
    """The result of a step for one parameter, or trees of results.

    Attributes:
        weight: the new parameter, or its change.
        master, mu, nu, amax: as of `Leaf`.
    """

    weight: Any
    master: Any
    mu: Any
    nu: Any
    amax: Any = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["grad", "weight", "master", "mu", "nu", "amax", "weight_seed", "preceding_blocks"],
    meta_fields=["decays", "in_place", "salt"],
)
@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter with its gradient and its optimizer state.

    Attributes:
        grad: gradient, an array or a `QTensor`.
        weight: the parameter; a `MasterWeight` if it has a remainder.
        master: master weight as stored, of which `weight` is a working copy; None if `weight` is the master.
        amax: amax of each scale of `master`, `mu` and `nu`, stacked along a new first axis; None if the optimizer
            has no use for it.
        weight_seed: two uint32 words for stochastic rounding of the master weight, or None.
        preceding_blocks: as of `TreeSlice.preceding_blocks`, for the noise of the second moment.
        decays: whether the parameter decays; static.
        in_place: whether the step returns the new parameter, or else its change; static.
        salt: number of the parameter by which its second moment's noise differs; None rounds to nearest; static.
    """

    grad: Any
    weight: Any
    mu: Any
    nu: Any
    master: Any = None
    amax: Any = None
    weight_seed: Array | None = None
    preceding_blocks: Array | None = None
    decays: bool = True
    in_place: bool = True
    salt: Any = None

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the parameter and of its change."""
        return self.weight.dtype

    @property
    def is_exact(self) -> bool:
        """Whether a change must reproduce the bits of the new parameter: it has a remainder, or stochastic rounding."""
        return self.master is None and (isinstance(self.weight, MasterWeight) or self.weight_seed is not None)

    def in_place_if_exact(self) -> "Leaf":
        """The leaf for a step that makes a change from the new parameter if that must be exact."""
        return dataclasses.replace(self, in_place=self.in_place or self.is_exact)

    @property
    def quantized_arrays(self) -> tuple[QTensor, ...]:
        """The quantized ones of master weight and moments."""
        return tuple(x for x in (self.master, self.mu, self.nu) if isinstance(x, QTensor))

    @property
    def unchanged(self) -> StepResult:
        """The result of a step that is not taken."""
        return StepResult(self.weight, self.master, self.mu, self.nu, self.amax)

    @property
    def value(self) -> Array:
        """The master weight in fp32."""
        if self.master is None:
            return self.weight.astype(jnp.float32)
        return reconcile_master(load(self.master), self.weight)

    @property
    def group_size(self) -> int:
        """Group size of the moments, which are quantized in groups."""
        size = self.quantized_arrays[0].spec.group_size
        assert size is not None
        return size

    @property
    def padded_row(self) -> int | None:
        """Length of the last axis in whole groups, by which kernels number elements; None without quantized arrays."""
        return -(-self.grad.shape[-1] // self.group_size) * self.group_size if self.quantized_arrays else None

    def advance_seed(self, seed: Array) -> Array:
        """The noise of a second moment's layer, from that of the stack."""
        return seed if self.preceding_blocks is None else noise.advance_counter(seed, self.preceding_blocks)


def is_quantized(node: Any) -> bool:
    """Whether a node of a tree is a `QTensor`."""
    return isinstance(node, QTensor)


def load(moment: Moment) -> Array:
    """The fp32 values of a stored moment."""
    return moment.dequantize() if isinstance(moment, QTensor) else moment.astype(jnp.float32)


def store(
    values: Array, like: Moment, seed: Array | None = None, dither: Array | None = None, row_length: int | None = None
) -> Moment:
    """Stores fp32 values in the way that `like` is stored.

    Args:
        seed: two words of noise, by which codes and bf16 are rounded stochastically; None rounds to nearest.
        dither: noise for codes of a first moment (`fp8jax.core.noise.decay_dither`), so that decay reaches zero.
        row_length: padded length of the rows, by which the noise of bf16 numbers elements; None is their own.
    """
    if not isinstance(like, QTensor):
        if seed is None or like.dtype != jnp.bfloat16:
            return values.astype(like.dtype)
        return noise.round_stochastic(values, seed, row_length)
    if seed is not None:
        return quantize_stochastic(values, like, seed)
    return quantize_with_scale(values, like.spec, None, dither=dither)


def scale_and_clip(grad: Array, grad_scale: Any = None, max_magnitude: np.float32 = LARGEST_GRADIENT) -> Array:
    """A gradient in fp32, times `grad_scale`, with finite elements clipped to `max_magnitude`.

    NaN and Inf stay. If `grad_scale` is NaN or Inf, so are all elements.
    """
    g = grad.astype(jnp.float32)
    finite, scaled = jnp.isfinite(g), g
    if grad_scale is not None:
        finite, scaled = finite & jnp.isfinite(grad_scale), g * grad_scale
    return jnp.where(finite, jnp.clip(scaled, -max_magnitude, max_magnitude), scaled)


def apply_change(leaf: Leaf, change: Array) -> Any:
    """The new parameter of a leaf without `master`, or its change in the parameter's dtype, from the change in fp32."""
    if not leaf.in_place:
        return change.astype(leaf.dtype)
    if leaf.dtype == jnp.float64:
        return leaf.weight + change.astype(jnp.float64)  # `leaf.value` is rounded to fp32
    new = leaf.value + change
    if isinstance(leaf.weight, MasterWeight):
        return masters.split(new, leaf.weight.high.dtype, leaf.weight.remainder.dtype)
    return new.astype(leaf.dtype) if leaf.weight_seed is None else noise.round_stochastic(new, leaf.weight_seed)


def exact_update(new: Any, old: Any) -> Any:
    """The fp32 difference that takes a parameter to its new bits; in a `MasterWeight`, in the high part's place.

    A parameter that comes 2^17 times nearer to zero in one step gets the bits of the sum, without a remainder.
    """
    high, old_high = ((x.high if isinstance(x, MasterWeight) else x).astype(jnp.float32) for x in (new, old))
    change = high - old_high
    if not isinstance(new, MasterWeight):
        return change
    is_exact = (old_high + change).astype(new.dtype) == new.high
    return MasterWeight(change, jnp.where(is_exact, new.remainder, jnp.zeros_like(new.remainder)))


def reconcile_master(master: Array, working_copy: Array) -> Array:
    """Master weights, or working copies that are not their rounded values: the caller has changed these."""
    half, normal = half_step(working_copy.dtype)
    working_copy = working_copy.astype(jnp.float32)
    binade = jnp.maximum(formats.binade(master), normal)
    return jnp.where(jnp.abs(working_copy - master) <= binade * np.float32(half), master, working_copy)


def half_step(dtype: DTypeLike) -> tuple[float, float]:
    """The largest rounding error of a dtype, relative to the power of two below a number, and the least such power.

    It is enlarged by a sixteenth, because a change that is added in that dtype is rounded itself.
    """
    float_info = jnp.finfo(dtype)
    normal = float(float_info.smallest_normal)
    return float(float_info.eps) / 2 * (1 + 2**-4), normal if normal > np.finfo(np.float32).tiny else 0.0


def master_seed(seed: Array, path: str) -> Array:
    """The words of noise for the master weight of the parameter at a path, from those of the step."""
    return noise.fold_in_seed(seed, noise.param_seed(f"master/{path}"))


def make_weight_seed(seed: Array, path: str, shape: tuple[int, ...], tree_slice: TreeSlice) -> Array:
    """`master_seed` for a parameter, which may be one layer of a stack."""
    seed = master_seed(seed, path)
    blocks = tree_slice.preceding_blocks(math.prod(shape), shape, "weights", "another master")
    return seed if blocks is None else noise.advance_counter(seed, blocks)


# Shares of a group's largest direction, and of its largest second moment.
DEAD_M_RATIO, DEAD_V_RATIO = 1 / 40, 2.0**-24
DEAD_V_HIGH, DEAD_V_MID, DEAD_V_LOW = 1 / 2, 1 / 8, 1 / 128
_SCALARS_READ = ("count", "b1", "b2", "eps", "eps_root")


def suppress_dead_elements(
    grad: Array, direction: Array, m: Array, v: Array, mu: Moment, nu: Moment, adam: Adam
) -> tuple[Array, Array]:
    """The moments to be stored, if `mu` and `nu` are stored as codes with range expansion; others stay.

    Let D = max|m| / (sqrt(max v) + eps), over the bias-corrected moments of a group. D is a lower bound of the group's
    largest direction.

    - If the direction of an element is below D / 40, its first moment becomes 0. That changes no later update by more
      than this share of the group's largest. Rounding to nearest could keep this moment at the smallest code.
    - If also its gradient is 0 and its direction below D / 2^24, its second moment decays no further. It keeps its
      bias-corrected value, but at least 1/128 of the group's largest; between 1/8 and 1/2 it becomes 1/2, and
      larger ones decay. A first moment in codes gets there some 45 steps after its last gradient.

    Elements with small gradients are not affected, because directions do not depend on the gradient's scale. An element
    with a gradient every N > 45 steps has the second moment of one with a gradient every 45.

    Moments with the paper's expansion ("coat") stay: their exponents are of all elements.

    Args:
        direction: bias-corrected direction m / (sqrt(v) + eps), fp32, before it is clipped.
        m, v: new moments, fp32.

    Returns:
        Both moments, fp32. Elements that are not finite stay.
    """
    expanded = [isinstance(moment, QTensor) and moment.spec.expand not in (False, "coat") for moment in (mu, nu)]
    if not any(expanded):
        return m, v
    expanded_moment = mu if expanded[0] else nu
    assert isinstance(expanded_moment, QTensor)
    shape = expanded_moment.spec.block_shape(m.shape)

    # Arrays that `suppress` closed over would have another mesh on Explicit axes: they are arguments.
    scalars = {name: x for name, x in vars(adam).items() if name in _SCALARS_READ and isinstance(x, Array)}

    def suppress(g: Array, d: Array, m: Array, v: Array, *values: Array) -> tuple[Array, Array]:
        scalar_values: dict[str, Any] = dict(zip(scalars, values, strict=True))
        traced_adam = dataclasses.replace(adam, **scalar_values)
        count = jnp.asarray(traced_adam.count, jnp.float32)

        def group_amax(x: Array) -> Array:
            return blocks.reduce(formats.where(jnp.isfinite(x), jnp.abs(x), 0), shape, jnp.max, 0.0)

        correction, previous_correction = (1 - traced_adam.b2**n for n in (count, jnp.maximum(count - 1, 1)))
        m_amax, v_amax = group_amax(m), group_amax(v)
        direction_bound = (
            m_amax
            / (1 - traced_adam.b1**count)
            / (jnp.sqrt(v_amax / correction + traced_adam.eps_root) + traced_adam.eps)
        )
        direction_bound, v_amax = (blocks.broadcast_blocks(x, m.shape, shape) for x in (direction_bound, v_amax))
        magnitude = jnp.abs(d)
        is_silent = (jnp.abs(g) < formats.TINY) & (magnitude < DEAD_V_RATIO * direction_bound) & (v > 0)
        before_decay = v * (correction / previous_correction / jnp.maximum(traced_adam.b2, np.float32(formats.TINY)))
        floored = jnp.maximum(before_decay, DEAD_V_LOW * v_amax)
        dead_v = jnp.where(before_decay < DEAD_V_MID * v_amax, floored, DEAD_V_HIGH * v_amax)
        dead_v = jnp.where(before_decay < DEAD_V_HIGH * v_amax, dead_v, v)
        return jnp.where(magnitude < DEAD_M_RATIO * direction_bound, 0, m), jnp.where(is_silent, dead_v, v)

    g = grad.astype(jnp.float32) if adam.grad_scale is None else grad.astype(jnp.float32) * adam.grad_scale
    new_m, new_v = blocks.on_logical_array(
        suppress, g, direction, m, v, *scalars.values(), out_shapes=[m.shape, m.shape]
    )
    return (new_m if expanded[0] else m), (new_v if expanded[1] else v)
