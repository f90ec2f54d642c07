"""Observations: statistics of the tensors of a step, which `fp8jax.telemetry` takes out of its program.

An operation adds `observe` to an array that it returns. This is an identity primitive whose further operands are
statistics. It exists only in functions that are traced by `fp8jax.telemetry`: elsewhere `current_place` is None, and
programs stay unchanged. The flag is part of the key of JAX's caches.

Each statistic is a sum or a maximum. Those of microbatches, devices and several products of a weight are then merged
exactly. `summarize` computes ratios from the merged ones.
"""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor, from_bytes
from fp8jax.ops.quantization.fallback import FallbackTensor

# Whether functions are traced for telemetry.
is_observing: Any = jax.make_user_context(False)


class Place(NamedTuple):
    """Where an observation is made.

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


@dataclasses.dataclass(frozen=True)
class Observation:
    """The statistics of one tensor, fp32 scalars by name.

    Attributes:
        sums: those that are merged by addition.
        maxima: those that are merged by the maximum.
    """

    sums: Mapping[str, Array]
    maxima: Mapping[str, Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes of stacked layers."""
        return next(x.shape for x in (*self.sums.values(), *self.maxima.values()))

    def merge(self, other: "Observation") -> "Observation":
        """The statistics of both tensors together."""
        sums, maxima = dict(self.sums), dict(self.maxima)
        for name, x in other.sums.items():
            sums[name] = sums[name] + x if name in sums else x
        for name, x in other.maxima.items():
            maxima[name] = jnp.maximum(maxima[name], x) if name in maxima else x
        return Observation(sums, maxima)

    def concatenate(self, other: "Observation") -> "Observation":
        """The statistics of the layers of both, along the first axis of stacked layers."""
        sums = {name: jnp.concatenate([x, other.sums[name]]) for name, x in self.sums.items()}
        maxima = {name: jnp.concatenate([x, other.maxima[name]]) for name, x in self.maxima.items()}
        return Observation(sums, maxima)

    def reduce(self, axes: tuple[int, ...]) -> "Observation":
        """The statistics merged over axes."""
        return Observation(
            {name: jnp.sum(x, axes) for name, x in self.sums.items()},
            {name: jnp.max(x, axes) for name, x in self.maxima.items()},
        )


def compare(x: Array, codes: Any, *, is_relative: bool = False, row_mask: Array | None = None) -> Observation:
    """The statistics of a tensor and of what its codes lose.

    Args:
        codes: of its shape: a `QTensor`, also as bytes, or a `FallbackTensor`. An array, or None, loses nothing.
        is_relative: whether squares are of values relative to the amax, because they would underflow.
        row_mask: bool (rows, 1), which rows of a matrix are counted; None counts all. Scales are then per row.
    """
    x = lax.stop_gradient(x).astype(jnp.float32)
    finite = jnp.isfinite(x)
    size = jnp.float32(x.size) if row_mask is None else x.shape[-1] * jnp.sum(row_mask, dtype=jnp.float32)
    added: dict[str, Array] = {"nonfinite": ~finite}
    x = jnp.where(finite if row_mask is None else finite & row_mask, x, 0)
    magnitude = jnp.abs(x)
    if not isinstance(codes, (QTensor, FallbackTensor)):
        sums, maxima = _reduce_in_one_pass(added, {"amax": magnitude}, row_mask)
        return Observation({"size": size} | sums, maxima)
    codes = lax.stop_gradient(codes)
    codes = from_bytes(codes) if isinstance(codes, QTensor) else codes
    decoded = codes.dequantize()
    difference = jnp.where(finite & jnp.isfinite(decoded), x - decoded, 0)
    unit = jnp.maximum(jnp.max(magnitude, initial=0.0), formats.TINY) if is_relative else 1.0
    nonzero = magnitude >= formats.TINY
    added |= {
        "signal": jnp.square(x / unit),
        "noise": jnp.square(difference / unit),
        "nonzero": nonzero,
        "lost": nonzero & (decoded == 0),
    }
    largest = {"amax": magnitude}
    base: QTensor = codes.base if isinstance(codes, FallbackTensor) else codes
    if not base.spec.is_packed:
        limit, tolerance = _largest_values(base), _half_ulp_of_largest(formats.get(base.spec.format))
        exponent = jnp.log2(limit)
        added["saturated"] = magnitude > limit * (1 + tolerance)
        largest["range_ratio"] = jnp.where(nonzero, magnitude / limit, 0)
        largest["largest_scale"] = jnp.where(nonzero, exponent, -jnp.inf)
        largest["smallest_scale"] = jnp.where(nonzero, -exponent, -jnp.inf)
    sums, maxima = _reduce_in_one_pass(added, largest, row_mask)
    sums["size"] = size
    maxima["minus_bits"] = -jnp.float32(formats.get(base.spec.format).bits)
    total = lambda condition: jnp.sum(condition, dtype=jnp.float32, where=row_mask)  # noqa: E731
    if isinstance(codes, FallbackTensor):
        sums |= {"fallback": total(codes.fallback_mask), "blocks": total(jnp.ones_like(codes.fallback_mask))}
    if base.expansion is not None:
        exponents = base.expansion.astype(jnp.float32)
        sums |= {"exponents": total(exponents), "groups": total(jnp.ones_like(exponents))}
        for name, sign in (("largest_exponent", 1), ("smallest_exponent", -1)):
            maxima[name] = jnp.max(sign * exponents, initial=-jnp.inf, where=row_mask)
    return Observation(sums, maxima)


def _reduce_in_one_pass(
    added: Mapping[str, Array], largest: Mapping[str, Array], row_mask: Array | None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The sums of some arrays and the maxima of others, fp32, by one reduction: XLA reads what they share once."""
    if row_mask is not None:
        added = {name: jnp.where(row_mask, x, 0) for name, x in added.items()}
    operands = [x.astype(jnp.float32) for x in (*added.values(), *largest.values())]
    initial = [jnp.float32(0)] * len(added) + [jnp.float32(-jnp.inf)] * len(largest)

    def merge(xs: Sequence[Array], ys: Sequence[Array]) -> list[Array]:
        pairs = list(zip(xs, ys, strict=True))
        return [x + y for x, y in pairs[: len(added)]] + [jnp.maximum(x, y) for x, y in pairs[len(added) :]]

    results = lax.reduce(operands, initial, merge, tuple(range(operands[0].ndim)))
    totals = dict(zip(added, results[: len(added)], strict=True))
    maxima = dict(zip(largest, results[len(added) :], strict=True))
    for name in ("amax", "range_ratio"):  # An array without elements has none.
        if name in maxima:
            maxima[name] = jnp.maximum(maxima[name], 0)
    return totals, maxima


def _largest_values(codes: QTensor) -> Array:
    """The largest magnitude that each element's scale can represent."""
    fmt = formats.get(codes.spec.format)
    return codes.with_codes(jnp.full_like(codes.codes, fmt.encode(jnp.float32(fmt.max)))).dequantize()


def _half_ulp_of_largest(fmt: formats.Format) -> float:
    """Half the distance of the largest code to the next one, relative to the largest: smaller excess is rounded."""
    ulp = 2.0 ** (math.floor(math.log2(fmt.max)) - fmt.mantissa_bits) if fmt.is_float else 1.0
    return ulp / 2 / fmt.max


def summarize(observation: Observation) -> dict[str, Array]:
    """The statistics of a tensor for a reader, by name; `fp8jax.telemetry` describes them."""
    sums, maxima, found = observation.sums, observation.maxima, dict[str, Array]()
    if "signal" in sums:
        signal, noise = sums["signal"], sums["noise"]
        found["snr_db"] = 10 * (jnp.log10(signal) - jnp.log10(jnp.maximum(noise, 1e-20 * signal)))
    for name, part, whole in (
        ("saturated", "saturated", "size"),
        ("lost", "lost", "nonzero"),
        ("nonfinite", "nonfinite", "size"),
        ("fallback_rate", "fallback", "blocks"),
        ("expansion", "exponents", "groups"),
    ):
        if part in sums:
            found[name] = sums[part] / jnp.maximum(sums[whole], 1)
    if "squared_update" in sums:
        weight = jnp.maximum(sums["squared_weight"], formats.TINY)
        found["update_ratio"] = jnp.sqrt(sums["squared_update"] / weight)
    if "minus_bits" in maxima:
        found["bits"] = -maxima["minus_bits"]
    copied = "amax", "range_ratio", "fallback_threshold", "factor"
    found |= {name: maxima[name] for name in copied if name in maxima}
    for name, kind in (("scale_spread", "scale"), ("expansion_spread", "exponent")):
        if f"largest_{kind}" in maxima:
            found[name] = jnp.maximum(maxima[f"largest_{kind}"] + maxima[f"smallest_{kind}"], 0)
    return found


def observe(y: Array, place: Place | None, role: str, observation: Observation) -> Array:
    """`y`, unchanged; the observation leaves the program with it.

    Args:
        y: an array that the program needs. It has its own tangent.
        place: where it is made; None observes nothing.
    """
    if place is None:
        return y
    arrays = lax.stop_gradient((*observation.sums.values(), *observation.maxima.values()))
    return OBSERVE.bind(
        y, *arrays, place=place, role=role, sums=tuple(observation.sums), maxima=tuple(observation.maxima)
    )


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


def from_values(sums: Sequence[str], maxima: Sequence[str], values: Array) -> Observation:
    """The observation with statistics of these names, from their values (..., statistics)."""
    columns = dict(zip((*sums, *maxima), jnp.moveaxis(values, -1, 0), strict=True))
    return Observation({name: columns[name] for name in sums}, {name: columns[name] for name in maxima})


def _batch(operands: Any, dims: Any, **params: Any) -> tuple[Array, Any]:
    """An observation of a batch is that of all its members together."""
    y, *arrays = operands
    merged = [
        x if dim is None else (jnp.sum if i < len(params["sums"]) else jnp.max)(x, dim)
        for i, (x, dim) in enumerate(zip(arrays, dims[1:], strict=True))
    ]
    return OBSERVE.bind(y, *merged, **params), dims[0]


OBSERVE = Primitive("fp8jax_observe")
OBSERVE.def_impl(lambda y, *_, **__: y)
OBSERVE.def_abstract_eval(lambda y, *_, **__: y)
# The tangent itself, not a copy: facts about cotangents are found by identity.
ad.primitive_jvps[OBSERVE] = lambda primals, tangents, **params: (OBSERVE.bind(*primals, **params), tangents[0])
batching.primitive_batchers[OBSERVE] = _batch
mlir.register_lowering(OBSERVE, lambda context, y, *_, **__: [y])
