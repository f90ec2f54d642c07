"""Observations: statistics of the tensors of a step, which `fp8jax.telemetry` returns.

An operation adds `observe` to an array that it returns. This is an identity primitive with statistics as further
operands. It exists only in functions that `fp8jax.telemetry` traces: elsewhere `current_place` is None, and programs do
not change. The flag is part of the key of JAX's caches.

Each statistic is a sum, the logarithm of a sum, or a maximum. The statistics of microbatches, devices and several
products of a weight are then merged exactly. `summarize` computes ratios from the merged ones.
"""

import contextlib
import dataclasses
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
from fp8jax.ops.quantization.fallback import FallbackTensor

# Whether functions are traced for telemetry.
is_observing: Any = jax.make_user_context(False)


class Place(NamedTuple):
    """The place of an observation.

    Attributes:
        layer: the path of the layer or parameter.
        layer_axes: for each of the innermost loops around it, outermost first, the first of the stacked layers that it
            iterates over; None if it iterates over none.
    """

    layer: str = ""
    layer_axes: tuple[int | None, ...] = ()


class _CurrentPlace(threading.local):
    place = Place()


_current = _CurrentPlace()


@contextlib.contextmanager
def at_layer(layer: str, layer_axes: tuple[int | None, ...]) -> Iterator[None]:
    """A context in which observations are made at this place."""
    previous, _current.place = _current.place, Place(layer, layer_axes)
    try:
        yield
    finally:
        _current.place = previous


def current_place(default_layer: str) -> Place | None:
    """The place of observations, or None if there are none; `default_layer` names a layer outside of `at_layer`."""
    if not is_observing.value:
        return None
    return _current.place if _current.place.layer else _current.place._replace(layer=default_layer)


# How the statistics of two tensors are merged. All others are sums.
_MAXIMA = (
    "amax",
    "range_ratio",
    "largest_scale",
    "smallest_scale",
    "minus_bits",
    "largest_exponent",
    "smallest_exponent",
    "fallback_threshold",
    "factor",
)
_LOG_SUMS = ("log_signal", "log_noise")


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
        values = jnp.array([-jnp.inf if name in _MAXIMA + _LOG_SUMS else 0.0 for name in names], jnp.float32)
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
        return Observation(names, _by_kind(names, x + y, jnp.logaddexp(x, y), jnp.maximum(x, y)))

    def reduce(self, axes: Sequence[int] | None = None) -> "Observation":
        """The statistics of the layers along axes, or of all layers, together."""
        x, axes = self.values, tuple(range(len(self.shape)) if axes is None else axes)
        if not axes:
            return self
        values = _by_kind(self.names, jnp.sum(x, axes), jax.nn.logsumexp(x, axes), jnp.max(x, axes))
        return self._replace(values=values)

    def _select(self, names: tuple[str, ...]) -> Array:
        """The values of statistics; those of `neutral` for a missing one."""
        if names == self.names:
            return self.values
        missing = Observation.neutral(tuple(name for name in names if name not in self.names), self.shape)
        present = self.names + missing.names
        return jnp.concatenate([self.values, missing.values], -1)[..., np.array([*map(present.index, names)])]


def _by_kind(names: Sequence[str], sums: Array, log_sums: Array, maxima: Array) -> Array:
    """Merged values of statistics, each by its kind."""
    kinds = [np.array([name in kind for name in names]) for kind in (_LOG_SUMS, _MAXIMA)]
    return jnp.select(kinds, [log_sums, maxima], sums)


def compare(x: Array, codes: Any, *, row_mask: Array | None = None) -> Observation:
    """The statistics of a tensor and of the errors of its codes.

    Args:
        codes: of its shape: a `QTensor`, also as bytes, or a `FallbackTensor`. An array or None has no errors.
        row_mask: bool (rows, 1), which rows of a matrix are counted; None counts all. Scales are then per row.
    """
    is_coded = isinstance(codes, (QTensor, FallbackTensor))
    x, codes = lax.stop_gradient((x, codes if is_coded else None))
    is_counted = jnp.isfinite(x) if row_mask is None else jnp.isfinite(x) & row_mask
    magnitude = jnp.where(is_counted, jnp.abs(x), 0).astype(jnp.float32)
    # Squares of values relative to the amax do not overflow.
    unit = lax.reduce(magnitude, np.float32(formats.TINY), lax.max, tuple(range(x.ndim)))
    # Without a barrier, XLA would save decoded arrays of the forward pass for the backward pass, and masks for the
    # second reduction.
    x, codes, unit = lax.optimization_barrier((x, codes, unit))
    x = x.astype(jnp.float32)
    is_finite = jnp.isfinite(x)
    magnitude = jnp.where(is_finite if row_mask is None else is_finite & row_mask, jnp.abs(x), 0)
    size = jnp.float32(x.size) if row_mask is None else x.shape[-1] * jnp.sum(row_mask, dtype=jnp.float32)
    scalars, summed, maximized = {"size": size}, {"nonfinite": ~is_finite}, {"amax": magnitude}
    if not is_coded:
        return Observation.from_scalars(scalars | _reduce_in_one_pass(summed, maximized, row_mask))
    codes = from_bytes(codes) if isinstance(codes, QTensor) else codes
    decoded = codes.dequantize()
    difference, nonzero = x - decoded, magnitude >= formats.TINY
    summed |= {
        "log_signal": jnp.square(magnitude / unit),
        "log_noise": jnp.square(jnp.where(jnp.isfinite(difference), difference, 0) / unit),
        "nonzero": nonzero,
        "lost": nonzero & (decoded == 0),
    }
    base: QTensor = codes.base if isinstance(codes, FallbackTensor) else codes
    if not base.spec.is_packed:
        limit, tolerance = _largest_values(base), _half_ulp_of_largest(formats.get(base.spec.format))
        summed["saturated"] = magnitude > limit * (1 + tolerance)
        # XLA on GPUs writes a condition to memory if more arrays depend on it. These depend on another one.
        maximized["range_ratio"] = magnitude / jnp.where(limit > 0, limit, jnp.inf)
        maximized["largest_scale"] = jnp.where(magnitude > 0, limit, 0)
        maximized["smallest_scale"] = jnp.where(magnitude > 0, -limit, -jnp.inf)
    scalars |= _reduce_in_one_pass(summed, maximized, row_mask)
    scalars["minus_bits"] = -jnp.float32(formats.get(base.spec.format).bits)
    total = lambda condition: jnp.sum(condition, dtype=jnp.float32, where=row_mask)  # noqa: E731
    if isinstance(codes, FallbackTensor):
        scalars |= {"fallback": total(codes.fallback_mask), "blocks": total(jnp.ones_like(codes.fallback_mask))}
    if base.expansion is not None:
        exponents = base.expansion.astype(jnp.float32)
        scalars |= {"exponents": total(exponents), "groups": total(jnp.ones_like(exponents))}
        for name, sign in (("largest_exponent", 1), ("smallest_exponent", -1)):
            scalars[name] = jnp.max(sign * exponents, initial=-jnp.inf, where=row_mask)
    # Logarithms of all values at once: operations on single numbers would take long to compile.
    names, values = Observation.from_scalars(scalars)
    signs = np.array([-1 if name == "smallest_scale" else 1 for name in names], np.float32)
    kinds = [np.array([name in kind for name in names]) for kind in (_LOG_SUMS, ("largest_scale", "smallest_scale"))]
    logs: list[Any] = [jnp.log(values) + 2 * jnp.log(unit), signs * jnp.log2(signs * values)]
    return Observation(names, jnp.select(kinds, logs, values))


def _reduce_in_one_pass(
    summed: Mapping[str, Array], maximized: Mapping[str, Array], row_mask: Array | None
) -> dict[str, Array]:
    """The sums of some arrays and the maxima of others, fp32, by one reduction, so that XLA reads inputs once."""
    if row_mask is not None:
        summed = {name: jnp.where(row_mask, x, 0) for name, x in summed.items()}
    operands = [x.astype(jnp.float32) for x in (*summed.values(), *maximized.values())]
    # An array without elements has the maximum 0 of magnitudes and scales.
    initial = [jnp.float32(0)] * len(summed) + [
        jnp.float32(-jnp.inf if name == "smallest_scale" else 0) for name in maximized
    ]

    def merge(xs: Sequence[Array], ys: Sequence[Array]) -> list[Array]:
        pairs = list(zip(xs, ys, strict=True))
        return [x + y for x, y in pairs[: len(summed)]] + [jnp.maximum(x, y) for x, y in pairs[len(summed) :]]

    results = lax.reduce(operands, initial, merge, tuple(range(operands[0].ndim)))
    return dict(zip((*summed, *maximized), results, strict=True))


def _largest_values(codes: QTensor) -> Array:
    """The largest magnitude that each element's scale can represent."""
    fmt = formats.get(codes.spec.format)
    codes = codes.with_codes(jnp.full_like(codes.codes, fmt.encode(jnp.float32(fmt.max))))
    return dataclasses.replace(codes, expansion=None).dequantize()  # any power of the largest value is itself


def _half_ulp_of_largest(fmt: formats.Format) -> float:
    """Half the distance of the largest code to the next one, relative to the largest: smaller excess is rounded."""
    ulp = 2.0 ** (math.floor(math.log2(fmt.max)) - fmt.mantissa_bits) if fmt.is_float else 1.0
    return ulp / 2 / fmt.max


def summarize(observation: Observation) -> dict[str, Array]:
    """The statistics that `fp8jax.telemetry` describes, by name, each with the axes of stacked layers."""
    merged = dict(zip(observation.names, jnp.moveaxis(observation.values, -1, 0), strict=True))
    found: dict[str, Array] = {}
    if "log_signal" in merged:
        signal, noise = merged["log_signal"], merged["log_noise"]
        found["snr_db"] = 10 / math.log(10) * (signal - jnp.maximum(noise, signal + math.log(1e-20)))
    for name, part, whole in (
        ("saturated", "saturated", "size"),
        ("lost", "lost", "nonzero"),
        ("nonfinite", "nonfinite", "size"),
        ("fallback_rate", "fallback", "blocks"),
        ("expansion", "exponents", "groups"),
    ):
        if part in merged:
            found[name] = merged[part] / jnp.maximum(merged[whole], 1)
    if "squared_update" in merged:
        weight = jnp.maximum(merged["squared_weight"], formats.TINY)
        found["update_ratio"] = jnp.sqrt(merged["squared_update"] / weight)
    if "minus_bits" in merged:
        found["bits"] = -merged["minus_bits"]
    copied = "amax", "range_ratio", "fallback_threshold", "factor"
    found |= {name: merged[name] for name in copied if name in merged}
    for name, kind in (("scale_spread", "scale"), ("expansion_spread", "exponent")):
        if f"largest_{kind}" in merged:
            found[name] = jnp.maximum(merged[f"largest_{kind}"] + merged[f"smallest_{kind}"], 0)
    return found


def observe(y: Array, place: Place | None, role: str, observation: Observation) -> Array:
    """`y`, unchanged; the observation leaves the program with it.

    Args:
        y: an array that the program needs. It has its own tangent.
        place: where it is made; None observes nothing.
    """
    if place is None:
        return y
    return OBSERVE.bind(y, lax.stop_gradient(observation.values), place=place, role=role, names=observation.names)


def observe_codes(
    y: Array,
    place: Place | None,
    role: str,
    x: Any,
    codes: Any,
    *,
    transposed: bool = False,
    row_mask: Array | None = None,
) -> Array:
    """`observe` of a tensor and its codes.

    Args:
        x: the tensor, or the matrices that it consists of, side by side.
        codes: as of `compare`; of the transposed matrix if `transposed`.
    """
    if place is None:
        return y
    x = jnp.concatenate(jax.tree.leaves(x), -1) if isinstance(x, tuple) else x
    return observe(y, place, role, compare(x.T if transposed else x, codes, row_mask=row_mask))


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
