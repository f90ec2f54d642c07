"""Residuals of operations, and facts about arrays and their gradients.

FP8 arrays may not enter a differentiated function, because a cotangent has the dtype of its primal. Codes are passed as
bytes, which have no gradient. An operation computes its result and its residuals outside of the differentiated
function, from values alone: one function makes both, and a fused kernel can replace it.

An operation attaches facts to a gradient that it returns, for the operation before. A fact belongs to one array in one
trace. An array that is computed from it, such as a sum, has no facts, and the operation that reads such an array
measures it: one more pass over the array, and the same result.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state
from jax.typing import DTypeLike

from fp8jax.core import derivatives, encoding
from fp8jax.core.qtensor import QTensor, from_bytes, quantize, to_bytes
from fp8jax.core.recipe import Linear
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import call_traced_once, match_varying_axes
from fp8jax.ops.dispatch.sharding import DtypeAndSharding

# The facts of gradients by identity, each with a weak reference to its array and the trace that it belongs to.
_gradient_facts: dict[int, tuple[Any, Any, "ArrayFacts"]] = {}


def attach_facts(gradient: Array | None, facts: "ArrayFacts") -> None:
    """Attaches facts to a gradient, for the operation that reads it; does nothing if it is not an array.

    Facts computed from `gradient` itself would keep it alive: compute them from what it is computed from.
    """
    if isinstance(gradient, Array):
        # By identity. A primitive with facts as operands would add equations to users' programs. Its reader would need
        # the equation of a tracer, which JAX keeps private, and which arrays outside of `jax.jit` do not have. Across
        # `jax.vmap` and nested jits, where JAX hands on another array, neither finds the facts.
        key, facts_by_id = id(gradient), _gradient_facts
        reference = weakref.ref(gradient, lambda _: facts_by_id.pop(key, None))
        facts_by_id[key] = reference, get_opaque_trace_state(), facts


def pop_facts(gradient: Any) -> "ArrayFacts":
    """Removes and returns the facts of a gradient; no facts if it has none in this trace, or is several arrays."""
    reference, trace, facts = _gradient_facts.pop(id(gradient), (lambda: None, None, NO_FACTS))
    return facts if reference() is gradient and trace == get_opaque_trace_state() else NO_FACTS


T = TypeVar("T")


def quantize_residual(x: Array, spec: QuantSpec) -> QTensor:
    """The values of an array as codes in bytes, with scales along the last axis."""
    return call_traced_once(functools.partial(_quantize_residual, spec), lax.stop_gradient(x))  # type: ignore[no-any-return]


def _quantize_residual(spec: QuantSpec, x: Array) -> QTensor:
    return to_bytes(quantize(encoding.limit_group_range(x, spec, 1.0), spec))


def dequantize_residual(residual: QTensor | Array) -> Array:
    """The fp32 values of a result of `quantize_residual`, or of an array that is saved as it is."""
    return call_traced_once(_dequantize_residual, residual)  # type: ignore[no-any-return]


def _dequantize_residual(residual: QTensor | Array) -> Array:
    return residual.astype(jnp.float32) if isinstance(residual, Array) else from_bytes(residual).dequantize()


def derive_key(key: Array | None, spec: QuantSpec, use: str) -> Array | None:
    """The key for codes of one use, "x_residual" or "dy"; None where their spec rounds to nearest.

    Raises:
        ValueError: it rounds stochastically, but there is no key.
    """
    if spec.rounding != "stochastic":
        return None
    if key is None:
        raise ValueError(f"the recipe rounds {use} stochastically ({spec}): pass key=jax.random.key(...)")
    return jax.random.fold_in(key, {"x_residual": 0, "dy": 1}[use])


@jax.jit  # traced once for all arrays of these shapes
def match_vmap_axes(x: Array, y: Array) -> Array:
    """`x`, mapped by `jax.vmap` if `y` is mapped.

    A differentiated function with two results needs both mapped or none. Otherwise the cotangent of the unmapped result
    reaches the backward pass summed over the batch, and is added to that of every element.
    """
    empty = (jnp.sum(jnp.isnan(a[..., :0])) for a in (x, y))
    return lax.select(sum(empty) > 0, x, x)


@dataclasses.dataclass(eq=False)
class CotangentFacts:
    """The gradient of the input of a linear layer, and facts about it, for the operation that recomputes the input.

    Attributes:
        array: (..., channels).
        spec: how the layer quantizes the gradient of its output.
        row_bounds: returns an upper bound of the magnitudes in each row, fp32 (rows,), by the Cauchy-Schwarz inequality
            from the norms of the output's gradient and of the weight.
        codes: codes of the output's gradient, if the input is to share their scales per token; else None.
        predicted: set by the operation: facts about the cotangents that follow from this gradient
            (`fp8jax.ops.quantization.fused_outputs.CotangentPrediction`), or None.
    """

    array: Array
    spec: QuantSpec | None
    row_bounds: Callable[[], Array]
    codes: QTensor | None = None
    predicted: Any = None


class Recomputed(NamedTuple):
    """A recomputed result.

    Attributes:
        fused_output: what kernels compute it from; `fp8jax.ops.quantization.fused_outputs.FusedOutput`.
        predicted: facts about the cotangents that follow from its gradient, or None.
    """

    array: Array
    fused_output: Any = None
    predicted: Any = None


class Recomputable(Protocol):
    """An operation that computes its result again from its residuals. It is hashable, and static under `jax.jit`."""

    def recompute(self, saved: Any, gradient: CotangentFacts) -> Recomputed:
        """The result of the operation, given the facts about its gradient."""
        ...


class Differentiable(Recomputable, Protocol):
    """A `Recomputable` with a backward pass that reads only its residuals."""

    def backward(
        self,
        saved: Any,
        dy: Array,
        dtypes: tuple[DTypeLike | None, ...],
        passthrough_cotangent: Array | None,
        predicted: Any,
    ) -> tuple[tuple[Array | None, ...], "tuple[ArrayFacts, ...]"]:
        """The cotangents of the differentiable inputs, and facts about them, if any.

        Args:
            saved: residuals of the operation.
            dy: cotangent of its result.
            dtypes: of the inputs; None for an input without a cotangent.
            passthrough_cotangent: from other readers of the first input, added to its cotangent; or None.
            predicted: facts about the cotangents that were predicted when the result was recomputed, or None.
        """
        ...


@dataclasses.dataclass(frozen=True)
class AlreadySaved:
    """The recomputation of an array that is saved anyway, such as the output of flash attention (COAT, section D)."""

    def recompute(self, saved: Array, gradient: CotangentFacts) -> Recomputed:
        return Recomputed(saved)


ALREADY_SAVED = AlreadySaved()


class ArrayFacts(NamedTuple):
    """Facts about an array in addition to its values.

    Attributes:
        recompute_rule: the operation that recomputes it, and its residuals; `ALREADY_SAVED` and None if the array is
            saved anyway.
        fused_output: what kernels compute it from, to quantize it without reading it
            (`fp8jax.ops.quantization.fused_outputs.FusedOutput`).
        scale: a recipe or spec, and the fp32 scale under which its layers quantize the array.
        predicted: of a gradient, facts about the cotangents that follow from it
            (`fp8jax.ops.quantization.fused_outputs.CotangentPrediction`).
        codes: a spec, and the codes of the array as a matrix (tokens, inputs) under that spec, as bytes. For rows of a
            grouped product also `fp8jax.ops.quantization.token_codes.TokenCodes`, and for its gradient
            `RowsAndColumns` of that module.
        amax: of a gradient, its largest finite magnitude, an fp32 scalar.
        row_source: an array of tokens, and the int32 index (rows,) of the token that each row is.
    """

    recompute_rule: tuple[Recomputable, Any] | None = None
    fused_output: Any = None
    scale: tuple[Linear | QuantSpec, Array] | None = None
    predicted: Any = None
    codes: tuple[QuantSpec, Any] | None = None
    amax: Array | None = None
    row_source: tuple[Array, Array] | None = None

    def scale_for(self, *consumers: Linear | QuantSpec | None) -> Array | None:
        """The scale, if it is given for all of these consumers; else None."""
        if self.scale is None or any(consumer != self.scale[0] for consumer in consumers):
            return None
        return self.scale[1]


NO_FACTS = ArrayFacts()


def compute_uncached(use: Hashable, make: Callable[[], T], *dependencies: Any) -> T:
    """`make()`: nothing is shared with other readers."""
    return make()


class InputFacts(NamedTuple):
    """Facts about an input, and values that its readers share.

    Attributes:
        get_or_compute: `get_or_compute(use, make, *dependencies)` returns what another reader made for the same `use`
            and the same other arrays; else `make()`.
    """

    facts: ArrayFacts = NO_FACTS
    get_or_compute: Callable[..., Any] = compute_uncached


NO_INPUT_FACTS = InputFacts()


def with_saved_vjp(
    operation: Differentiable,
    inputs: tuple[Array | None, ...],
    residuals: Any,
    y: Array,
    *,
    returns_input: bool = False,
    name: str = "an operation",
) -> tuple[Array, Array | None]:
    """The result `y` of an operation, whose backward pass reads only `residuals`.

    Args:
        inputs: arrays that gradients flow to, or None.
        y: the result, computed from the values of the inputs.
        returns_input: whether to return the first input for its other readers.

    Returns:
        `y`, and the first input or None.
    """
    y, *inputs = match_varying_axes(lax.stop_gradient(y), *inputs)  # type: ignore[assignment]
    name = derivatives.qualified_op_name(name)
    guard = derivatives.second_order_guard(name, *inputs)
    config = _VjpConfig(operation, returns_input, name)
    return _saved_vjp(config, tuple(inputs), residuals, y, guard)


class _VjpConfig(NamedTuple):
    """The static part of an operation; see `with_saved_vjp`."""

    operation: Differentiable
    returns_input: bool
    name: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _saved_vjp(
    config: _VjpConfig, inputs: tuple[Array | None, ...], residuals: Any, y: Array, guard: Array
) -> tuple[Array, Array | None]:
    """`with_saved_vjp` for arrays: its results, whose gradients `config.operation` computes from the residuals."""
    return _forward(config, inputs, residuals, y, guard)[0]


def _forward(
    config: _VjpConfig, inputs: tuple[Array | None, ...], residuals: Any, y: Array, guard: Array
) -> tuple[Any, Any]:
    kinds = tuple(None if x is None else DtypeAndSharding.from_array(x) for x in inputs)
    y, x = derivatives.differentiable_once(config.name, y, guard), inputs[0]
    if config.returns_input and x is not None:
        return (match_vmap_axes(y, x), match_vmap_axes(x, y)), (residuals, kinds, guard)
    return (y, None), (residuals, kinds, guard)


def _backward(config: _VjpConfig, residuals: Any, cotangents: Any) -> tuple[Any, None, None, None]:
    (operation_residuals, kinds, guard), (dy, passthrough_cotangent) = residuals, cotangents
    dtypes = tuple(None if kind is None else kind.dtype for kind in kinds)
    values = lax.stop_gradient((dy, passthrough_cotangent))
    predicted = pop_facts(dy).predicted
    cotangents_in, facts = config.operation.backward(operation_residuals, values[0], dtypes, values[1], predicted)
    input_cotangents = tuple(
        None if ct is None or kind is None else kind.cast_cotangent(ct)
        for ct, kind in zip(cotangents_in, kinds, strict=True)
    )
    input_cotangents = derivatives.differentiable_once(
        config.name, input_cotangents, (dy, passthrough_cotangent, guard)
    )
    for ct, ct_facts in zip(input_cotangents, facts, strict=False):
        attach_facts(ct, ct_facts)
    return input_cotangents, None, None, None


_saved_vjp.defvjp(_forward, _backward)
