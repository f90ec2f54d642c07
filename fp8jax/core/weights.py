"""`Weights`: the part of a `Recipe` that says what parameters are stored in."""

import dataclasses

from fp8jax.core import formats

_PLAIN = ("bf16", "fp32")


@dataclasses.dataclass(frozen=True)
class Weights:
    """Storage of the parameters.

    Attributes:
        master: format that the optimizer updates: "fp32", "bf16", or "fp16" with a scale for each tensor, which the
            optimizer keeps in its state (`fp8jax.fp8lm_adamw`); the parameters then are working copies.
        compute: format of the working copy that layers compute with, "fp32" or "bf16".

    Raises:
        ValueError: unknown format, or a working copy wider than its master.
    """

    master: str = "fp32"
    compute: str = "bf16"

    def __post_init__(self) -> None:
        for field, allowed in (("master", (*_PLAIN, "fp16")), ("compute", _PLAIN)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"weights.{field} {getattr(self, field)!r} is not one of {', '.join(allowed)}")
        if formats.get(self.compute).dtype.itemsize > formats.get(self.master).dtype.itemsize:
            raise ValueError(f"weights.compute {self.compute!r} is wider than the master weights, {self.master!r}")

    @property
    def held(self) -> str:
        """Format of the parameters that the caller of the optimizer holds."""
        return self.compute if self.master == "fp16" else self.master
