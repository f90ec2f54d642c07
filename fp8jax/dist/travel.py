"""What activations are when they travel between devices: codes of a product's operand, parts of a sum, or 16 bits."""

from typing import NamedTuple

from jax import Array

from fp8jax import recipes
from fp8jax.core import formats
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.core.scaling import Current, Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.linear import stateless

How = QuantSpec | Recipe | Linear | str

PLAIN = ("bf16", "fp16", "fp32")


class Travel(NamedTuple):
    """What an array is while it travels.

    Attributes:
        spec: of its codes; None for a plain dtype.
        dtype: the name of that; None for the array's own.
        strategy: where a scale of granularity "tensor" comes from.
    """

    spec: QuantSpec | None
    dtype: str | None = None
    strategy: Scaling = Current()

    def cast(self, x: Array) -> Array:
        """An array in the plain dtype."""
        return x if self.dtype is None else x.astype(formats.get(self.dtype).dtype)


def of_operand(caller: str, how: How, operand: str) -> Travel:
    """How an operand of a product, "x" or "dy", travels: as the product quantizes it."""
    form = _resolved(how)
    if isinstance(form, Linear):
        spec = form.spec(operand)
        # What is rounded stochastically the product rounds itself: twice would be biased or noisier.
        if spec is None or spec.rounding == "stochastic":
            return Travel(None)
        return Travel(spec, strategy=form.own_strategy(operand))
    if isinstance(form, QuantSpec):
        _check(caller, form)
        return Travel(form)
    return Travel(None, form)


def of_sum(caller: str, how: How) -> Travel:
    """How parts of a sum travel: under scales that devices share."""
    form = _resolved(how)
    if isinstance(form, Linear):
        spec = form.spec("x")
        return Travel(None if spec is None else QuantSpec(spec.format, "token"))
    if isinstance(form, QuantSpec):
        _check(caller, form)
        summed = form.granularity in ("tensor", "token", "group") and form.scale_format == "fp32"
        return Travel(form if summed else QuantSpec(form.format, "token"))
    return Travel(None, form)


def _resolved(how: How) -> QuantSpec | Linear | str:
    if isinstance(how, str) and how in PLAIN:
        return how
    if isinstance(how, QuantSpec) or (isinstance(how, str) and how not in (*recipes.NAMES, recipes.AUTO)):
        return QuantSpec.parse(how)
    return stateless(how)


def _check(caller: str, spec: QuantSpec) -> None:
    """Raises ValueError for codes that do not travel."""
    usual = (spec.expand, spec.stacked, spec.rounding, spec.axis) == (False, 0, "nearest", -1)
    if not formats.get(spec.format).multiplies or spec.granularity == "channel" or not usual:
        raise ValueError(
            f"{caller}: codes of {spec} do not travel; take an operand of products that rounds to nearest, with scales "
            "of the tensor, tokens, groups or blocks along the channels, as 'e4m3' or 'e4m3:group128'; or 'bf16'"
        )
