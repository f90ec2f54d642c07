"""Delayed scaling in NNX models: histories as variables of their own, statistics of gradients as cotangents."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core.recipe import Linear
from fp8jax.modules.functions import delayed_linear
from fp8jax.ops.delayed import Observed, ScalingState, init_scaling, update_scaling
from fp8jax.ops.linear import DimensionNumbers, check_precision
from fp8jax.ops.product import QuantizedWeight
from fp8jax.ops.sharding import merge, merged, named, product_sharding, split


def delayed_dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
    linear: Linear,
    state: ScalingState,
    slot: Array,
    held: QuantizedWeight | None = None,
) -> tuple[Array, Observed]:
    """`delayed_linear` called as `jax.lax.dot_general` is by layers: last axes of an input by the first of a kernel."""
    (lhs_contract, rhs_contract), batch = dimension_numbers
    n = len(lhs_contract)
    ends = tuple(range(lhs.ndim - n, lhs.ndim)), tuple(range(n))
    if (tuple(lhs_contract), tuple(rhs_contract)) != ends or any(batch):
        raise ValueError(f"delayed scaling takes an input's last axes by a kernel's first, not {dimension_numbers}")
    check_precision(precision)
    lead, outputs = lhs.ndim - n, rhs.ndim - n
    spec = product_sharding(lhs, rhs, dimension_numbers, out_sharding)
    x, w = merge(lhs, *[1] * lead, n), merge(rhs, n, outputs)
    y, observed = delayed_linear(
        x,
        w,
        state,
        slot,
        recipe=linear,
        quantized=held,
        out_sharding=named(merged(spec, (*[1] * lead, outputs)), lhs, rhs),
    )
    y = split(y, (*lhs.shape[:lead], *rhs.shape[n:]), spec)
    return y.astype(preferred_element_type or lhs.dtype), observed


class ScalingVariable(nnx.Variable):
    """Amax histories, and what calls of the current step have seen: module state, never differentiated."""


class GradientStatistic(nnx.Variable):
    """A slot whose cotangent is the largest magnitude of a gradient; never an argument of an optimizer."""


class DelayedDotGeneral(nnx.Module):
    """`dot_general` of one layer with delayed scaling.

    Attributes:
        x, w, dy: histories, fp32 (..., history), with the leading axes of stacked layers.
        seen_x, seen_w: largest magnitudes of the calls since the last update, fp32 (...).
        slot: fp32 (...), zeros.
        held: the weight quantized for all microbatches of a step, or None; `fp8jax.nnx.quantize_weights` sets it.
        use_running_average: read the histories and note nothing, as `model.eval()` sets it.
    """

    x: nnx.Variable
    w: nnx.Variable
    dy: nnx.Variable

    def __init__(self, linear: Linear, stacked: tuple[int, ...] = ()) -> None:
        self.linear = linear
        self.use_running_average = False
        for name, history in zip(("x", "w", "dy"), init_scaling(linear), strict=True):
            setattr(self, name, ScalingVariable(jnp.tile(history, (*stacked, 1))))
        self.seen_x, self.seen_w = (ScalingVariable(jnp.zeros(stacked)) for _ in range(2))
        self.slot = GradientStatistic(jnp.zeros(stacked))
        self.held: Any = nnx.data(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        y, observed = delayed_dot_general(
            *args,
            linear=self.linear,
            state=self.state(),
            slot=self.slot[...],
            held=None if self.held is None else self.held.weight(),
            **kwargs,
        )
        if not self.use_running_average:
            self.seen_x[...] = jnp.maximum(self.seen_x[...], observed.x)
            self.seen_w[...] = jnp.maximum(self.seen_w[...], observed.w)
        return y

    def state(self) -> ScalingState:
        return ScalingState(self.x[...], self.w[...], self.dy[...])

    def advance(self, dy: Array) -> None:
        """Ends a step: its largest magnitudes enter the histories, and nothing is seen of the next one yet."""
        new = update_scaling(self.state(), Observed(self.seen_x[...], self.seen_w[...], dy), self.linear)
        self.x[...], self.w[...], self.dy[...] = new
        self.seen_x[...], self.seen_w[...] = jnp.zeros_like(self.seen_x[...]), jnp.zeros_like(self.seen_w[...])


def advance_scaling(model: nnx.Module, grads: nnx.State) -> nnx.State:
    """Ends a step of a model with delayed scaling: updates its histories in place.

    Differentiate with respect to parameters and statistics, and give the optimizer what this returns:

        wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, batch)
        optimizer.update(model, fp8jax.nnx.advance_scaling(model, grads))

    Under gradient accumulation call it once a step, with the statistics of the microbatches merged by maximum
    (gradients are summed); under data parallelism in `jax.shard_map`, with the maximum over replicas.

    Args:
        model: a model that `fp8jax.nnx.quantize` gave a recipe with delayed scaling.
        grads: gradients of `nnx.Any(nnx.Param, GradientStatistic)`.

    Returns:
        The gradients without the statistics.

    Raises:
        ValueError: the model has no delayed scaling, or `grads` lacks its statistics.
    """
    found = [(path, m) for path, m in nnx.iter_modules(model) if isinstance(m, DelayedDotGeneral)]
    if not found:
        raise ValueError("the model has no layer with delayed scaling")
    statistics, rest = nnx.split_state(grads, GradientStatistic, ...)
    seen = dict(nnx.to_flat_state(statistics))
    for path, module in found:
        if (*path, "slot") not in seen:
            raise ValueError("differentiate with respect to nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)")
        leaf = seen[(*path, "slot")]
        module.advance(leaf[...] if isinstance(leaf, nnx.Variable) else jnp.asarray(leaf))
    return rest


def kernel_axes(layer: Any) -> tuple[int, int]:
    """How many of the last axes of a layer's kernel are inputs and outputs; `nnx.vmap` puts others before them."""
    if isinstance(layer, nnx.Linear):
        return 1, 1
    return len(_tuple(layer.in_features)), len(_tuple(layer.out_features))


def _tuple(features: int | tuple[int, ...]) -> tuple[int, ...]:
    return (features,) if isinstance(features, int) else tuple(features)
