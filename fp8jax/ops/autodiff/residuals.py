"""What operations keep for the backward pass: codes as bytes, and results that are computed again from what is kept.

FP8 arrays may not enter a differentiated function, because a cotangent takes the dtype of its primal: codes travel as
bytes, which have none. An operation here computes its result and what it keeps outside of the differentiated function,
from values alone, so that one function per operation makes both and a fused kernel can take its place.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import derivatives, encoding, formats
from fp8jax.core.qtensor import QTensor, quantize
from fp8jax.core.recipe import Linear
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.autodiff import gradient_facts
from fp8jax.ops.dispatch.choice import match_varying_axes
from fp8jax.ops.dispatch.sharding import DtypeAndSharding

T = TypeVar("T")


def to_bytes(q: QTensor) -> QTensor:
    """A quantized tensor as values without gradients, its codes as bytes."""
    q = jax.tree.map(lax.stop_gradient, q)
    return q.with_codes(_cast_bytes(q.codes, jnp.uint8))


def from_bytes(q: QTensor) -> QTensor:
    """The quantized tensor that `to_bytes` was given."""
    dtype = jnp.uint8 if q.spec.is_packed else formats.get(q.spec.format).dtype
    return q.with_codes(_cast_bytes(q.codes, dtype))


def _cast_bytes(codes: Array, dtype: DTypeLike) -> Array:
    """Codes of one byte as another type of one byte, of whose bits they may have four; wider ones as they are."""
    if codes.dtype.itemsize > 1:
        return codes
    if _bits(codes.dtype) == 4:
        return lax.bitcast_convert_type(codes, jnp.uint4).astype(dtype)
    return lax.bitcast_convert_type(codes.astype(jnp.uint4) if _bits(dtype) == 4 else codes, dtype)


def _bits(dtype: DTypeLike) -> int:
    return int((jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits)


def quantize_residual(x: Array, spec: QuantSpec) -> QTensor:
    """The values of an array as codes in bytes, with scales along its last axis."""
    return to_bytes(quantize(encoding.limit_group_range(lax.stop_gradient(x), spec, 1.0), spec))


def dequantize_residual(residual: QTensor | Array) -> Array:
    """The fp32 values of what `quantize_residual` returned, or of an array that is saved as it is."""
    return residual.astype(jnp.float32) if isinstance(residual, Array) else from_bytes(residual).dequantize()


def derive_key(key: Array | None, spec: QuantSpec, use: str) -> Array | None:
    """The key for codes of one use, "x_residual" or "dy"; None where their spec rounds to nearest.

    Raises:
        ValueError: it rounds stochastically, and there is no key.
    """
    if spec.rounding != "stochastic":
        return None
    if key is None:
        raise ValueError(f"the recipe rounds {use} stochastically ({spec}): pass key=jax.random.key(...)")
    return jax.random.fold_in(key, {"x_residual": 0, "dy": 1}[use])


@jax.jit  # traced once for all arrays of these shapes
def match_vmap_axes(x: Array, y: Array) -> Array:
    """`x`, which `jax.vmap` maps where it maps `y`.

    A differentiated function that returns two results needs both mapped or none: else the cotangent of the one that is
    not comes to its backward pass summed, and is added to that of every element.
    """
    empty = (jnp.sum(jnp.isnan(a[..., :0])) for a in (x, y))
    return lax.select(sum(empty) > 0, x, x)


@dataclasses.dataclass(eq=False)
class CotangentFacts:
    """The gradient of a result that is computed again, as the linear layer that does so knows it.

    Attributes:
        array: (..., channels).
        spec: how that layer quantizes its own gradient.
        row_bounds: computes an upper bound of the magnitudes in each row, fp32 (rows,): by the inequality of Cauchy and
            Schwarz, from the norms of that layer's own gradient and of its weight.
        codes: those of that layer's own gradient, where its input is to take their scales of tokens; else None.
        predicted: what the operation says then of the cotangents that follow from it;
            `fp8jax.ops.quantization.fused_outputs.CotangentPrediction`.
    """

    array: Array
    spec: QuantSpec | None
    row_bounds: Callable[[], Array]
    codes: QTensor | None = None
    predicted: Any = None


class Recomputed(NamedTuple):
    """A result that is computed again.

    Attributes:
        array: the result.
        fused_output: what kernels compute it from; `fp8jax.ops.quantization.fused_outputs.FusedOutput`.
        predicted: what is known of the cotangents that follow from its gradient.
    """

    array: Array
    fused_output: Any = None
    predicted: Any = None


class Recomputable(Protocol):
    """How an operation goes back from what it has saved; hashable, static under `jax.jit`."""

    def recompute(self, saved: Any, gradient: CotangentFacts) -> Recomputed:
        """The operation's result, computed again, whose gradient is that."""
        ...

    def backward(
        self,
        saved: Any,
        dy: Array,
        dtypes: tuple[DTypeLike | None, ...],
        passthrough_cotangent: Array | None,
        predicted: Any,
    ) -> tuple[tuple[Array | None, ...], "tuple[ArrayFacts, ...]"]:
        """Cotangents of the operation's differentiable inputs, in their dtypes, from that of its result.

        `passthrough_cotangent`, from the first input's other readers, is added to that input's; None where the
        operation has none. `predicted` is what was known of the cotangents before, or None. The second result says what
        the first ones are made from, and is empty where that is not known.
        """
        ...


@dataclasses.dataclass(frozen=True)
class AlreadySaved:
    """How to go back to an array that is saved in any case: flash attention saves its output (COAT, section D)."""

    def recompute(self, saved: Array, gradient: CotangentFacts) -> Recomputed:
        return Recomputed(saved)

    def backward(
        self,
        saved: Array,
        dy: Array,
        dtypes: tuple[DTypeLike | None, ...],
        passthrough_cotangent: Array | None,
        predicted: Any,
    ) -> tuple[tuple[Array | None, ...], "tuple[ArrayFacts, ...]"]:
        raise TypeError("an array that is saved is no operation")


ALREADY_SAVED = AlreadySaved()


class ArrayFacts(NamedTuple):
    """What is known of an array besides its values: what it is made from.

    Attributes:
        recompute_rule: the operation that can make it again, and what that has saved; `ALREADY_SAVED` and None where
            the array itself is saved in any case.
        fused_output: what kernels compute it from, so that they quantize it without reading it;
            `fp8jax.ops.quantization.fused_outputs.FusedOutput`.
        scale: under which fp32 scale a layer of this recipe, or any that quantizes it so, is to quantize it.
        predicted: of a gradient, what is known of the cotangents that follow from it;
            `fp8jax.ops.quantization.fused_outputs.CotangentPrediction`.
        codes: how the array was quantized before, as a matrix (tokens, inputs), and its codes, as bytes: layers that
            quantize it so read these.
        amax: of a gradient, its largest finite magnitude, an fp32 scalar.
    """

    recompute_rule: tuple[Recomputable, Any] | None = None
    fused_output: Any = None
    scale: tuple[Linear | QuantSpec, Array] | None = None
    predicted: Any = None
    codes: tuple[QuantSpec, QTensor] | None = None
    amax: Array | None = None

    def scale_for(self, *consumers: Linear | QuantSpec | None) -> Array | None:
        """The scale that is given to consumers, if it is to all of them."""
        if self.scale is None or any(consumer != self.scale[0] for consumer in consumers):
            return None
        return self.scale[1]


NO_FACTS = ArrayFacts()


def compute_uncached(use: Hashable, make: Callable[[], T], *dependencies: Any) -> T:
    """What no other reader has made: `make()`."""
    return make()


class InputFacts(NamedTuple):
    """What a caller knows of an input besides its values.

    Attributes:
        facts: what it is made from.
        get_or_compute: `get_or_compute(use, make, *dependencies)` gives what another reader has made of it in this way,
            with the same other arrays; else `make()`.
    """

    facts: ArrayFacts = NO_FACTS
    get_or_compute: Callable[..., Any] = compute_uncached


NO_INPUT_FACTS = InputFacts()


def with_saved_vjp(
    operation: Recomputable,
    inputs: tuple[Array | None, ...],
    residuals: Any,
    y: Array,
    *,
    returns_input: bool = False,
    name: str = "an operation",
) -> tuple[Array, Array | None]:
    """The result `y` of an operation on `inputs`, whose backward pass reads nothing but `residuals`.

    Args:
        operation: what goes back.
        inputs: what gradients flow to; None where there is none.
        residuals: arrays without gradients.
        y: the result, computed from the values of the inputs.
        returns_input: whether other readers of the first input take it from here.
        name: of the operation, for messages.

    Returns:
        `y`, and the first input for its other readers, or None.
    """
    y, *inputs = match_varying_axes(lax.stop_gradient(y), *inputs)  # type: ignore[assignment]
    name = derivatives.qualified_op_name(name)
    token = derivatives.second_order_guard(name, *inputs)
    config = _VjpConfig(operation, returns_input, gradient_facts.current(), name)
    result: tuple[Array, Array | None] = _saved_vjp(config, tuple(inputs), residuals, y, token)
    return result


class _VjpConfig(NamedTuple):
    """What is static about an operation; see `with_saved_vjp`."""

    operation: Recomputable
    returns_input: bool
    gradient_facts: gradient_facts.GradientFacts
    name: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _saved_vjp(
    config: _VjpConfig, inputs: tuple[Array | None, ...], residuals: Any, y: Array, token: Array
) -> tuple[Array, Array | None]:
    return _forward(config, inputs, residuals, y, token)[0]


def _forward(
    config: _VjpConfig, inputs: tuple[Array | None, ...], residuals: Any, y: Array, token: Array
) -> tuple[Any, Any]:
    kinds = tuple(None if x is None else DtypeAndSharding.from_array(x) for x in inputs)
    y, x = derivatives.differentiable_once(config.name, y, token), inputs[0]
    if config.returns_input and x is not None:
        return (match_vmap_axes(y, x), match_vmap_axes(x, y)), (residuals, kinds, token)
    return (y, None), (residuals, kinds, token)


def _backward(config: _VjpConfig, residuals: Any, cotangents: Any) -> tuple[Any, None, None, None]:
    (operation_residuals, kinds, token), (dy, passthrough_cotangent) = residuals, cotangents
    dtypes = tuple(None if kind is None else kind.dtype for kind in kinds)
    values = lax.stop_gradient((dy, passthrough_cotangent))
    predicted = (config.gradient_facts.pop(dy) or NO_FACTS).predicted
    cotangents_in, facts = config.operation.backward(operation_residuals, values[0], dtypes, values[1], predicted)
    input_cotangents = tuple(
        None if ct is None or kind is None else kind.cast_cotangent(ct)
        for ct, kind in zip(cotangents_in, kinds, strict=True)
    )
    input_cotangents = derivatives.differentiable_once(
        config.name, input_cotangents, (dy, passthrough_cotangent, token)
    )
    for ct, ct_facts in zip(input_cotangents, facts, strict=False):
        config.gradient_facts.attach(ct, ct_facts)
    return input_cotangents, None, None, None


_saved_vjp.defvjp(_forward, _backward)
