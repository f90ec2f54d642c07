"""What a step of AdamW needs of one parameter, and its scalars; the change that takes a parameter to its new bits."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fp8jax.core import masters, noise
from fp8jax.core.masters import MasterWeight
from fp8jax.core.qtensor import QTensor

# The largest magnitude that a finite gradient counts with: squares, sums and bias corrections of it stay within fp32.
# Of the kernels' own it is `codec_triton.LARGEST_GRADIENT`.
LARGEST_GRADIENT = np.float32(2.0**62)

Moment = QTensor | Array
Form = Literal["update", "step"]


@dataclasses.dataclass(frozen=True)
class Adam:
    """The scalars of a step; each may be a traced scalar.

    Attributes:
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        eps_root: added to the second moment under the root.
        count: number of this step, from 1, int32.
        rate: the change of a weight is -rate * (direction + weight_decay * weight).
        weight_decay: strength of the decoupled weight decay.
        grad_scale: what gradients are multiplied by, or None.
        apply_if: of a step in place, whether it is taken: where not, parameters and moments stay. None takes it.
        max_direction: magnitude that finite directions beyond it are cut to, or None.
        nesterov: whether directions are those of NAdam, as optax has them; static.
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

    def split_static(self) -> tuple[tuple[tuple[str, Any], ...], dict[str, Array]]:
        """What a program is traced for, and its arguments: `Adam(**dict(static), **scalars)` is the same again.

        Decays that are numbers are of the first kind: what is left of one is exact where it is taken before rounding.
        """
        fields = vars(self)
        numbers = [name for name in ("b1", "b2") if not isinstance(fields[name], Array)]
        static = {name: x for name, x in fields.items() if x is None or name in (*numbers, "nesterov")}
        scalars = {name: jnp.asarray(x) for name, x in fields.items() if name not in static}
        scalars = {
            name: x.astype(jnp.float32) if name not in ("count", "apply_if") else x for name, x in scalars.items()
        }
        return tuple(static.items()), scalars


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["grad", "weight", "mu", "nu", "noise", "nu_noise", "preceding_blocks"],
    meta_fields=["decays", "salt"],
)
@dataclasses.dataclass(frozen=True)
class AdamLeaf:
    """What a step needs of one parameter.

    Attributes:
        grad: gradient.
        weight: the parameter, or None; a `MasterWeight` where it has a remainder.
        mu: first moment as stored.
        nu: second moment as stored.
        decays: whether the parameter decays; static.
        noise: two random words for stochastic rounding of the parameter, or None.
        nu_noise: two words of the step for that of a second moment, or None; the parameter's own are these
            with its salt (`fp8jax.core.noise.fold_in_seed`).
        salt: a number of the parameter's own; static.
        preceding_blocks: of a layer of stacked parameters, how many eights of elements of the stack come before it,
            uint32: noise goes by places in the stack. None of a whole parameter.
    """

    grad: Array
    weight: Array | MasterWeight | None
    mu: Moment
    nu: Moment
    decays: bool
    noise: Array | None
    nu_noise: Array | None = None
    salt: int = 0
    preceding_blocks: Array | None = None

    @property
    def nu_seed(self) -> Array | None:
        """`nu_noise` of the part that the leaf is."""
        if self.nu_noise is None or self.preceding_blocks is None:
            return self.nu_noise
        return noise.advance_counter(self.nu_noise, self.preceding_blocks)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of a change of the parameter."""
        return (self.grad if self.weight is None else self.weight).dtype

    @property
    def exact(self) -> bool:
        """Whether a change of the parameter is of its bits: it has a remainder, or is rounded stochastically."""
        return isinstance(self.weight, MasterWeight) or self.noise is not None

    @property
    def quantized_moments(self) -> list[QTensor]:
        return [moment for moment in (self.mu, self.nu) if isinstance(moment, QTensor)]

    @property
    def padded_row(self) -> int | None:
        """Length of the last axis in whole groups, by which the kernel counts places; None where it never runs."""
        size = self.quantized_moments[0].spec.group_size if self.quantized_moments else None
        return None if size is None else -(-self.grad.shape[-1] // size) * size

    @property
    def group_size(self) -> int:
        size = self.quantized_moments[0].spec.group_size
        assert size is not None
        return size


def scale_and_clip(grad: Array, grad_scale: Any = None, max_magnitude: np.float32 = LARGEST_GRADIENT) -> Array:
    """A gradient in fp32, times `grad_scale`, with finite elements at most `max_magnitude` in magnitude.

    An element that is NaN or Inf stays so, and every element where the factor is.
    """
    g = grad.astype(jnp.float32)
    finite, scaled = jnp.isfinite(g), g
    if grad_scale is not None:
        finite, scaled = finite & jnp.isfinite(grad_scale), g * grad_scale
    return jnp.where(finite, jnp.clip(scaled, -max_magnitude, max_magnitude), scaled)


def apply_change(form: Form, leaf: Any, change: Array) -> Any:
    """A new parameter, or its change, from the change in fp32.

    Args:
        form: "step" or "update".
        leaf: an `AdamLeaf`, or what has its `weight`, `dtype`, `exact` and `noise`.
        change: fp32, of the parameter's shape.
    """
    if form == "update" and not leaf.exact:
        return change.astype(leaf.dtype)
    old = leaf.weight
    new = old.astype(jnp.float32) + change
    if isinstance(old, MasterWeight):
        result: Any = masters.split(new, old.high.dtype, old.remainder.dtype)
    else:
        result = new.astype(leaf.dtype) if leaf.noise is None else noise.round_stochastic(new, leaf.noise)
    return exact_update(result, old) if form == "update" else result


def exact_update(new: Any, old: Any) -> Any:
    """What takes a parameter to its new bits when it is added in fp32; of a `MasterWeight` in its high part's place.

    A parameter that comes 2^17 times nearer to zero at once gets no bits of its own so, but of the sum: to 2^-24 of
    what it was. It has no remainder then.
    """
    high, old_high = ((x.high if isinstance(x, MasterWeight) else x).astype(jnp.float32) for x in (new, old))
    change = high - old_high
    if not isinstance(new, MasterWeight):
        return change
    is_exact = (old_high + change).astype(new.dtype) == new.high
    return MasterWeight(change, jnp.where(is_exact, new.remainder, jnp.zeros_like(new.remainder)))
