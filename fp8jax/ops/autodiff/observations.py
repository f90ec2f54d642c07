"""Observations: statistics of the tensors of a step, which `fp8jax.telemetry` returns.

An operation adds `observe` to an array that it returns. This is an identity primitive with statistics as further
operands. It exists only in functions that `fp8jax.telemetry` traces. Elsewhere `current_layer_scope` is None, and
programs do not change. The flag is part of the key of JAX's caches.

Each statistic is a sum, the logarithm of a sum, or a maximum. The statistics of microbatches, devices and several
products of a weight are then merged exactly. `summarize` computes ratios from the merged ones.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor, from_bytes
from fp8jax.ops.quantization import statistics
from fp8jax.ops.quantization.fallback import FallbackTensor

# Whether functions are traced for telemetry.
is_observing: Any = jax.make_user_context(False)


class LayerScope(NamedTuple):
    """The layer that observations belong to, and its loops.

    Attributes:
        layer: the path of the layer or parameter.
        layer_axes: for each of the innermost loops around it, outermost first, the first of the stacked layers that it
            iterates over; None if it iterates over none.
    """

    layer: str = ""
    layer_axes: tuple[int | None, ...] = ()


class _CurrentScope(threading.local):
    scope = LayerScope()


_current = _CurrentScope()


@contextlib.contextmanager
def at_layer(layer: str, layer_axes: tuple[int | None, ...]) -> Iterator[None]:
    """Return a context whose observations belong to this layer."""
    previous, _current.scope = _current.scope, LayerScope(layer, layer_axes)
    try:
        yield
    finally:
        _current.scope = previous


def current_layer_scope(default_layer: str) -> LayerScope | None:
    """The scope of observations, or None if there are none; `default_layer` names a layer outside of `at_layer`."""
    if not is_observing.value:
        return None
    return _current.scope if _current.scope.layer else _current.scope._replace(layer=default_layer)


class Observation(NamedTuple):
    """The statistics of one tensor, or merged ones of several.

    Attributes:
        values: fp32 (*stacked layers, statistics).
    """

    names: tuple[str, ...]
    values: Array

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, Array]) -> "Observation":
        """The statistics of one tensor, by name."""
        return cls(tuple(scalars), lax.stop_gradient(jnp.stack(list(scalars.values()))))

    @classmethod
    def neutral(cls, names: tuple[str, ...], shape: tuple[int, ...] = ()) -> "Observation":
        """The statistics of no tensor, which change none that they are merged with; `shape` is that of layers."""
        values = jnp.array(
            [-jnp.inf if name in statistics.MAXIMA + statistics.LOG_SUMS else 0.0 for name in names], jnp.float32
        )
        return cls(names, jnp.broadcast_to(values, (*shape, len(names))))

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes of stacked layers."""
        return self.values.shape[:-1]

    def merge(self, other: "Observation") -> "Observation":
        """The statistics of two tensors together. If they are in loops of different lengths, all layers are merged."""
        if self.shape != other.shape:
            return self.reduce().merge(other.reduce())
        names = tuple(dict.fromkeys(self.names + other.names))
        x, y = self._select(names), other._select(names)
        return Observation(names, statistics.merge_by_kind(names, x + y, jnp.logaddexp(x, y), jnp.maximum(x, y)))

    def reduce(self, axes: Sequence[int] | None = None) -> "Observation":
        """The statistics of the layers along axes, or of all layers, together."""
        x, axes = self.values, tuple(range(len(self.shape)) if axes is None else axes)
        if not axes:
            return self
        values = statistics.merge_by_kind(self.names, jnp.sum(x, axes), jax.nn.logsumexp(x, axes), jnp.max(x, axes))
        return self._replace(values=values)

    def _select(self, names: tuple[str, ...]) -> Array:
        """The values of statistics; those of `neutral` for a missing one."""
        if names == self.names:
            return self.values
        missing = Observation.neutral(tuple(name for name in names if name not in self.names), self.shape)
        present = self.names + missing.names
        return jnp.concatenate([self.values, missing.values], -1)[..., np.array([*map(present.index, names)])]


def compare(x: Array, codes: Any, *, is_transposed: bool = False, row_mask: Array | None = None) -> Observation:
    """The statistics of a tensor and of the errors of its codes.

    Args:
        x: floating, any shape.
        codes: of its shape: a `QTensor`, also as bytes, or a `FallbackTensor`. An array or None has no errors.
        is_transposed: whether the codes are those of the transposed matrix.
        row_mask: bool (rows, 1), which rows of a matrix are counted; None counts all. Scales are then per row.
    """
    x = lax.stop_gradient(x)
    if not isinstance(codes, (QTensor, FallbackTensor)):
        return _compare(x)
    codes = lax.stop_gradient(codes)
    base = codes.base if isinstance(codes, FallbackTensor) else from_bytes(codes)
    fmt, decoded = formats.get(base.spec.format), None
    if isinstance(codes, FallbackTensor) or fmt.packing is not None or fmt.codebook is not None:
        # Without a barrier, XLA would save decoded arrays of the forward pass for the backward pass.
        x, codes = lax.optimization_barrier((x, codes))
        decoded = codes.dequantize()
    found = _compare(
        x, decoded, None if fmt.packing else base, bits=fmt.bits, is_transposed=is_transposed, row_mask=row_mask
    )
    if not isinstance(codes, FallbackTensor):
        return found
    mask = codes.fallback_mask
    total = functools.partial(jnp.sum, dtype=jnp.float32, where=row_mask)
    return found.merge(Observation.from_scalars({"fallback": total(mask), "blocks": total(jnp.ones_like(mask))}))


def compare_update(before: Array, after: Array, *, is_change: bool) -> Observation:
    """The logarithms of the squared norms of a parameter before a step and of its change.

    Args:
        before: floating, any shape.
        after: the parameter after the step, or its change if `is_change`; of the same shape.
    """
    signal, noise = map(statistics.NAMES.index, ("log_signal", "log_noise"))
    if is_change:
        weight, update = (_compare(x).values[signal] for x in (before, after))
    else:
        # The parameter may be zero.
        values = _compare(before, after, min_unit=2.0**-40).values
        weight, update = values[signal], values[noise]
    return Observation.from_scalars({"log_weight": weight, "log_update": update})


def _compare(x: Array, *args: Any, **settings: Any) -> Observation:
    return Observation(*statistics.compare(x, *args, **settings))


def summarize(observation: Observation) -> dict[str, Array]:
    """The statistics that `fp8jax.telemetry` describes, by name, each with the axes of stacked layers."""
    merged = dict(zip(observation.names, jnp.moveaxis(observation.values, -1, 0), strict=True))
    found: dict[str, Array] = {}
    if "log_noise" in merged:
        signal, noise = merged["log_signal"], merged["log_noise"]
        found["snr_db"] = 10 / math.log(10) * (signal - jnp.maximum(noise, signal + math.log(1e-20)))
    for name, numerator, denominator in (
        ("saturated", "saturated", "size"),
        ("lost", "lost", "nonzero"),
        ("nonfinite", "nonfinite", "size"),
        ("fallback_rate", "fallback", "blocks"),
        ("expansion", "exponents", "groups"),
    ):
        if numerator in merged:
            found[name] = merged[numerator] / jnp.maximum(merged[denominator], 1)
    if "log_update" in merged:
        # A parameter of zeros counts as one of the smallest norm.
        weight = jnp.maximum(merged["log_weight"], math.log(formats.TINY))
        found["update_ratio"] = jnp.exp((merged["log_update"] - weight) / 2)
    if "minus_bits" in merged:
        found["bits"] = -merged["minus_bits"]
    copied = "amax", "range_ratio", "fallback_threshold", "factor"
    found |= {name: merged[name] for name in copied if name in merged}
    for name, kind in (("scale_spread", "scale"), ("expansion_spread", "exponent")):
        if f"largest_{kind}" in merged:
            found[name] = jnp.maximum(merged[f"largest_{kind}"] + merged[f"smallest_{kind}"], 0)
    return found


def observe(y: Array, layer_scope: LayerScope | None, role: str, observation: Observation) -> Array:
    """`y`, unchanged; the observation leaves the program with it.

    Args:
        y: an array that the program needs. It has its own tangent.
        layer_scope: the layer of the observation; None observes nothing.
    """
    if layer_scope is None:
        return y
    return OBSERVE.bind(
        y, lax.stop_gradient(observation.values), layer_scope=layer_scope, role=role, names=observation.names
    )


def observe_codes(
    y: Array,
    layer_scope: LayerScope | None,
    role: str,
    x: Any,
    codes: Any,
    *,
    is_transposed: bool = False,
    row_mask: Array | None = None,
) -> Array:
    """`observe` of a tensor and its codes.

    Args:
        x: the tensor, or a tuple of the matrices that it consists of, side by side.
        codes, is_transposed, row_mask: as of `compare`.
    """
    if layer_scope is None:
        return y
    x = jnp.concatenate(jax.tree.leaves(x), -1) if isinstance(x, tuple) else x
    return observe(y, layer_scope, role, compare(x, codes, is_transposed=is_transposed, row_mask=row_mask))


def _batch(operands: Any, dims: Any, **params: Any) -> tuple[Array, Any]:
    """An observation of a batch is that of all its members together."""
    y, values = operands
    if dims[1] is not None:
        values = Observation(params["names"], jnp.moveaxis(values, dims[1], 0)).reduce().values
    return OBSERVE.bind(y, values, **params), dims[0]


OBSERVE = Primitive("fp8jax_observe")
OBSERVE.def_impl(lambda y, _, **__: y)
OBSERVE.def_abstract_eval(lambda y, _, **__: y)
# The tangent itself, not a copy: facts about cotangents are found by identity.
ad.primitive_jvps[OBSERVE] = lambda primals, tangents, **params: (OBSERVE.bind(*primals, **params), tangents[0])
batching.primitive_batchers[OBSERVE] = _batch
mlir.register_lowering(OBSERVE, lambda context, y, _, **__: [y])
