"""Formats of activations between devices: codes of a product's operand, terms of a sum, or 16 bits."""

from typing import NamedTuple

from jax import Array

from fp8jax import recipes
from fp8jax.core import formats
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.core.scaling import Current, Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.products.linear import require_stateless

WireFormatLike = QuantSpec | Recipe | Linear | str

PLAIN = ("bf16", "fp16", "fp32")


class WireFormat(NamedTuple):
    """The format of an array on the wire.

    Attributes:
        spec: `QuantSpec` of its codes; None for a plain dtype.
        dtype: name of the plain dtype; None for the array's own.
        strategy: scaling of granularity "tensor".
    """

    spec: QuantSpec | None
    dtype: str | None = None
    strategy: Scaling = Current()

    def cast(self, x: Array) -> Array:
        """The array in the plain dtype."""
        return x if self.dtype is None else x.astype(formats.get(self.dtype).dtype)


def operand_wire_format(caller: str, wire_format: WireFormatLike, operand: str) -> WireFormat:
    """The wire format of a product's operand, "x" or "dy": as the product quantizes it."""
    resolved = _resolve(wire_format)
    if isinstance(resolved, Linear):
        spec = resolved.spec(operand)
        # The product itself rounds stochastically: rounding twice would be biased or noisier.
        if spec is None or spec.rounding == "stochastic":
            return WireFormat(None)
        return WireFormat(spec, strategy=resolved.stateless_scaling(operand))
    if isinstance(resolved, QuantSpec):
        _check_wire_spec(caller, resolved)
        return WireFormat(resolved)
    return WireFormat(None, resolved)


def sum_wire_format(caller: str, wire_format: WireFormatLike) -> WireFormat:
    """The wire format of the terms of a sum: with scales that devices share."""
    resolved = _resolve(wire_format)
    if isinstance(resolved, Linear):
        spec = resolved.spec("x")
        return WireFormat(None if spec is None else QuantSpec(spec.format, "token"))
    if isinstance(resolved, QuantSpec):
        _check_wire_spec(caller, resolved)
        is_summable = resolved.granularity in ("tensor", "token", "group") and resolved.scale_format == "fp32"
        return WireFormat(resolved if is_summable else QuantSpec(resolved.format, "token"))
    return WireFormat(None, resolved)


def _resolve(wire_format: WireFormatLike) -> QuantSpec | Linear | str:
    if isinstance(wire_format, str) and wire_format in PLAIN:
        return wire_format
    if isinstance(wire_format, QuantSpec) or (
        isinstance(wire_format, str) and wire_format not in (*recipes.NAMES, recipes.AUTO)
    ):
        return QuantSpec.parse(wire_format)
    return require_stateless(wire_format)


def _check_wire_spec(caller: str, spec: QuantSpec) -> None:
    """Raises ValueError for a spec that cannot be a wire format."""
    has_default_layout = (spec.expand, spec.layer_axes, spec.rounding, spec.axis) == (False, 0, "nearest", -1)
    if not formats.get(spec.format).is_matmul_format or spec.granularity == "channel" or not has_default_layout:
        raise ValueError(
            f"{caller}: codes of {spec} do not travel; take an operand of products that rounds to nearest, with scales "
            "of the tensor, tokens, groups or blocks along the channels, as 'e4m3' or 'e4m3:group128'; or 'bf16'"
        )
