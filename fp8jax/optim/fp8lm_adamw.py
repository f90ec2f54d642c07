"""FP8-LM's AdamW (Peng et al., 2023, section 2.2): fp16 master weights and 8-bit first moments, 6 bytes a parameter."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from fp8jax.core import blocks, formats, noise, scaling
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import adamw
from fp8jax.optim import moments, variables
from fp8jax.optim.compressed_adamw import (
    MIN_SIZE,
    FusedTransformation,
    ScalarOrSchedule,
    check_floating,
    check_range,
    check_shape,
)

ROUNDINGS = ("nearest", "stochastic")
# An argument that is a Python integer, optax.inject_hyperparams would turn into a traced array.
NONE_STACKED = np.int32(0)
# Of sums of a few fp32 terms.
_ROUNDED_UP = np.float32(1 + 2**-20)


class FP8LMState(NamedTuple):
    """State of `fp8lm_adamw`.

    Attributes:
        count: steps taken, int32 scalar.
        master: master weights: the tree of the parameters with an fp16 `QTensor` or an fp32 array for each.
        mu: first moments, an e4m3 `QTensor` or an fp32 array each.
        nu: second moments, an fp16 `QTensor` or an fp32 array each.
    """

    count: Array  # type: ignore[assignment]  # optax calls it so; tuple.count is shadowed
    master: optax.Params
    mu: optax.Updates
    nu: optax.Updates


def fp8lm_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    mu: str = "e4m3",
    master_rounding: str = "nearest",
    stacked: Any = NONE_STACKED,
    min_size: int | np.integer = MIN_SIZE,
) -> FusedTransformation:
    r"""AdamW with its master weights in the state: 5 bytes a parameter, and 6 with a gradient in FP8.

    ============= ======================== =====
    fp16, scaled  master weight            2
    e4m3, scaled  first moment             1
    fp16, scaled  second moment            2
    e4m3, scaled  gradient                 1
    ============= ======================== =====

    Every one has one scale for each tensor or stacked layer, a power of two in the state, so that what does not change
    keeps its value when a scale does. All arithmetic is in fp32.

    Master weights are made of the parameters at `init`. What the caller holds is a working copy in whatever dtype the
    model computes with: in bf16 two bytes more. `update` gives its distance from the new master weights, and so puts
    right what rounding does to it; after `step` it is their value in its dtype, bit for bit. Who keeps no copy between
    steps makes it of the state, `working_copy(state)`. While gradients are computed they exist in the dtype of the
    copy; accumulated over microbatches, in fp32.

    Gradients may be arrays, or a `QTensor` each, as `fp8jax.dist.all_reduce_gradients(..., decode=False)` leaves them.
    `optax.clip_by_global_norm` would take such codes for gradients: take `fp8jax.clipped` or
    `fp8jax.clip_by_global_norm`.

    A second moment that is not zero never becomes zero. One fp16 step of a weight is 0.05 to 0.1 %: to nearest, changes
    under half of that are lost, which the paper accepts; stochastically they are kept on average.

    Scales come from bounds, which nothing exceeds: what is stored is looked through for its largest magnitudes first,
    and those after the step follow from them, the gradient's and the learning rate; they are one to two binades above
    the largest magnitudes themselves. So no pass waits for results of another, and XLA needs no kernel of ours:
    compiled for an H200 a step reads and writes 18 bytes a parameter with gradients in FP8 and working copies in bf16,
    where scales of the results' own largest magnitudes took 27.

    Args:
        learning_rate: step size, or a schedule of the number of steps taken.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment; not negative.
        eps_root: added to the second moment under the root; not negative.
        weight_decay: strength of the decoupled weight decay, multiplied by the learning rate.
        mask: tree of booleans with the structure of the parameters, or a function of the parameters that gives one:
            which parameters decay. None decays all.
        mu: format of the first moment, "e4m3" or "e5m2".
        master_rounding: how master weights are rounded, "nearest" or "stochastic", with noise from the step's number,
            the parameter's path and the element's position.
        stacked: how many leading axes of a parameter stack layers, each of which has scales of its own: an integer, a
            tree of them that is a prefix of the parameters, or a function of the parameters that gives one.
        min_size: parameters of fewer elements keep all three in fp32.

    Returns:
        A transformation with state `FP8LMState`, and `step(grads, state, params) -> (params, state)`, which replaces
        the parameters. Updates have the dtype of the parameters.

    Raises:
        ValueError: an argument is out of range or unknown; or at `update`, a gradient does not have the shape of its
            parameter, or no parameters are given.
        TypeError: at `init`, a parameter is not of a floating dtype.

    Examples:
        >>> import fp8jax, jax.numpy as jnp
        >>> tx = fp8jax.fp8lm_adamw(3e-4, weight_decay=0.1)
        >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> grads = {"w": fp8jax.quantize(jnp.ones((64, 128)), "e4m3")}
        >>> params, state = tx.step(grads, state, params)
        >>> round(sum(fp8jax.state_bytes((state, grads)).values()) / params["w"].size, 2)
        6.0
    """
    for name, value, low, high in (
        ("b1", b1, 0, 1),
        ("b2", b2, 0, 1),
        ("eps", eps, 0, np.inf),
        ("eps_root", eps_root, 0, np.inf),
        ("weight_decay", weight_decay, 0, np.inf),
    ):
        check_range(name, value, low, high)
    if not callable(learning_rate):
        check_range("learning_rate", learning_rate, -np.inf, np.inf)
    if mu not in ("e4m3", "e5m2"):
        raise ValueError(f"mu {mu!r} is not 'e4m3' or 'e5m2'; fp8jax.compressed_adamw stores others")
    if master_rounding not in ROUNDINGS:
        raise ValueError(f"unknown master_rounding {master_rounding!r}; it is one of {', '.join(ROUNDINGS)}")
    smallest = moments.static_integer("min_size", min_size)

    def init(params: optax.Params) -> FP8LMState:
        if smallest is None:
            raise ValueError("min_size is static: name it in optax.inject_hyperparams, static_args=('min_size',)")
        jax.tree_util.tree_map_with_path(check_floating, params)
        depths = jax.tree.broadcast(stacked(params) if callable(stacked) else stacked, params)

        def stored(param: Any, depth: Any, fmt: str, underflow: str = "zero") -> QuantSpec | None:
            spec = QuantSpec(fmt, "tensor", stacked=int(depth), underflow=underflow)
            return spec if moments.is_compressed(param.shape, spec, smallest) else None

        def master(param: Any, depth: Any) -> adamw.Moment:
            spec = stored(param, depth, "fp16")
            return jnp.array(param, jnp.float32, copy=True) if spec is None else _master(param, spec)

        def zeros(fmt: str, underflow: str) -> optax.Updates:
            def one(param: Any, depth: Any) -> adamw.Moment:
                spec = stored(param, depth, fmt, underflow)
                if spec is None:
                    return jnp.zeros_like(param, dtype=jnp.float32)
                return moments.zeros(param, spec, smallest)

            return jax.tree.map(one, params, depths)

        state = FP8LMState(
            jnp.zeros([], jnp.int32),
            jax.tree.map(master, params, depths),
            zeros(mu, "zero"),
            zeros("fp16", "smallest"),
        )
        return moments.beside(params, state)

    def advance(grads: Any, state: FP8LMState, params: Any, factor: ArrayLike | None = None) -> tuple[Any, FP8LMState]:
        """New parameters in fp32, of the stored master weights, and the state."""
        if params is None:
            raise ValueError("fp8lm_adamw needs the parameters: call update(grads, state, params)")
        structure: Any = jax.tree.structure(params)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        parts = grads, state.master, state.mu, state.nu
        columns = [structure.flatten_up_to(tree) for tree in parts]
        for path, grad, old in zip(paths, *columns[:2], strict=True):
            check_shape(path, grad, old)
        count = optax.safe_increment(state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        decays = mask(params) if callable(mask) else mask
        decays = structure.flatten_up_to(jax.tree.broadcast(True if decays is None else decays, params))
        adam = adamw.Adam(b1, b2, eps, eps_root, count, rate, weight_decay, factor)
        g = structure.unflatten([adamw.load(x) for x in columns[0]])
        moved = adamw.advanced(g, state.mu, state.nu, adam)
        words = noise.of_step(count) if master_rounding == "stochastic" else None
        rows = []
        for path, grad, *old, d, m, v, decay in zip(
            paths, *columns, *map(structure.flatten_up_to, moved), decays, strict=True
        ):
            weight = adamw.load(old[0])
            new = weight - jnp.asarray(rate, jnp.float32) * (d + weight_decay * weight if decay else d)
            bounds = _bounds(grad, old, adam) if isinstance(old[0], QTensor) else (None, None, None)
            salt = noise.salt(f"master/{jax.tree_util.keystr(path, simple=True, separator='/')}")
            own = None if words is None else noise.salted(words, salt)
            rows.append([_store(*x) for x in zip((new, m, v), old, bounds, (own, None, None), strict=True)])
        masters, mus, nus = ([row[i] for row in rows] for i in range(3))
        found = FP8LMState(count, *map(structure.unflatten, (masters, mus, nus)))
        return structure.unflatten([adamw.load(x) for x in masters]), found

    def update(
        updates: optax.Updates, state: FP8LMState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, FP8LMState]:
        del extra_args
        new, state = advance(updates, state, params)
        return jax.tree.map(lambda x, p: (x - p.astype(jnp.float32)).astype(p.dtype), new, params), state

    def step(
        grads: optax.Updates,
        state: FP8LMState,
        params: optax.Params,
        *,
        key: None = None,
        factor: ArrayLike | None = None,
        applied: ArrayLike | None = None,
    ) -> tuple[optax.Params, FP8LMState]:
        if key is not None:
            raise ValueError("fp8lm_adamw keeps master weights and takes no key; give master_rounding='stochastic'")
        new, found = advance(grads, state, params, factor)
        result = jax.tree.map(lambda x, p: x.astype(p.dtype), new, params), found
        if applied is None:
            return result
        return jax.tree.map(lambda new, old: jnp.where(applied, new, old), result, (params, state))

    return FusedTransformation(*variables.looking_through(init, update, step))


def working_copy(state: FP8LMState, dtype: DTypeLike = jnp.bfloat16) -> optax.Params:
    """The parameters of the master weights of `fp8lm_adamw`, for who keeps none between steps."""
    return jax.tree.map(lambda x: adamw.load(x).astype(dtype), state.master, is_leaf=_is_quantized)


# Adam's largest direction is 7.3 for the default decays and 22 for b2 = 0.9999, by the inequality of Cauchy and
# Schwarz; rounding of moments adds to that.
_LARGEST_DIRECTION = 64.0


def _bounds(grad: Any, stored: Sequence[QTensor], adam: adamw.Adam) -> tuple[Array, Array, Array]:
    """What the magnitudes of the new weight and moments do not exceed, one for each scale."""
    weight, mu, nu = stored
    block = weight.spec.block_shape(weight.shape)
    if isinstance(grad, QTensor) and grad.scale.shape == weight.scale.shape:
        of_grad = jnp.abs(grad.scale) * formats.get(grad.spec.format).max
    else:
        of_grad = _largest(grad, block)
    if adam.factor is not None:
        of_grad = of_grad * jnp.abs(adam.factor)
    of_weight, of_mu, of_nu = (_largest(x, block) for x in (weight, mu, nu))
    rate = jnp.abs(jnp.asarray(adam.rate, jnp.float32))
    moved = rate * (_LARGEST_DIRECTION + adam.weight_decay * of_weight)
    b1, b2 = (jnp.asarray(b, jnp.float32) for b in (adam.b1, adam.b2))
    first, second = b1 * of_mu + (1 - b1) * of_grad, b2 * of_nu + (1 - b2) * jnp.square(of_grad)
    return of_weight + moved, first, second


def _largest(x: Any, block: tuple[int, ...]) -> Array:
    """Largest finite magnitude of each block of an array, or of what codes stand for, whose blocks may be others."""
    values = jnp.abs(adamw.load(x))
    return blocks.reduce(jnp.where(jnp.isfinite(values), values, 0.0), block, jnp.max, 0.0)


def _master(param: Array, spec: QuantSpec) -> QTensor:
    return _quantize(param, spec, _largest(param, spec.block_shape(param.shape)))


def _store(values: Array, like: adamw.Moment, bound: Array | None, words: Array | None) -> adamw.Moment:
    """Stores fp32 values as `like` is stored, with scales that fit the bound."""
    return values if not isinstance(like, QTensor) or bound is None else _quantize(values, like.spec, bound, words)


def _quantize(values: Array, spec: QuantSpec, bound: Array, words: Array | None = None) -> QTensor:
    """Quantizes with powers of two as scales, so that what did not change is not rounded anew when a scale does."""
    scale = formats.decode_e8m0(
        formats.encode_e8m0(scaling.to_scale(bound * _ROUNDED_UP, formats.get(spec.format)), "up")
    )
    rounded = spec if words is None else dataclasses.replace(spec, rounding="stochastic")
    scale = jnp.where(jnp.isfinite(bound), scale, jnp.nan)
    return dataclasses.replace(quantize_with_scale(values, rounded, scale, words=words), spec=spec)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QTensor)
