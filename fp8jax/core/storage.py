"""`Optimizer`: the part of a `Recipe` that defines the storage of the optimizer's moments."""

import dataclasses

from fp8jax.core import formats
from fp8jax.core.spec import QuantSpec, check_expand

NU_ROUNDINGS = ("auto", "nearest", "stochastic")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Storage of Adam's moments; the fields are arguments of `fp8jax.compressed_adamw`.

    Attributes:
        mu: format of the first moment: an 8-bit float format, "bf16" or "fp32".
        nu: format of the second moment: the same, or "fp16" with a scale.
        group_size: elements along the last axis that share a scale. None is one scale per tensor (with fp16 master
            weights), or no moment with a scale.
        expand: dynamic range expansion of the 8-bit moments: True, False, or "coat" (`QuantSpec.expand`).
        nu_rounding: rounding of an 8-bit or bf16 second moment: "nearest", "stochastic", or "auto", which depends on
            b2.

    Raises:
        ValueError: an unknown format, an unsigned first moment, an invalid group size, or contradictory settings.
    """

    mu: str = "e4m3"
    nu: str = "e4m3"
    group_size: int | None = 128
    expand: bool | str = True
    nu_rounding: str = "auto"

    def __post_init__(self) -> None:
        check_expand(self.expand)
        if not formats.get(self.mu).signed:
            raise ValueError(f"mu {self.mu!r} has no signs, but first moments do; take 'de8' or 'e4m3'")
        if self.nu_rounding not in NU_ROUNDINGS:
            raise ValueError(f"unknown nu_rounding {self.nu_rounding!r}; it is one of {', '.join(NU_ROUNDINGS)}")
        if self.nu_rounding == "stochastic" and self.nu == "fp32":
            raise ValueError("nu_rounding 'stochastic' is for codes and bf16, but nu is 'fp32'; leave it 'auto'")
        compressed = [m for m in (self.mu, self.nu) if formats.get(m).needs_scale]
        for moment in compressed:
            if formats.get(moment).bits not in (8, 16):
                raise ValueError(f"{moment!r} codes have {formats.get(moment).bits} bits; give moments 8 or 16 bits")
        size = self.group_size
        if compressed and size is None and self.expand:
            raise ValueError("optimizer.expand raises groups to powers; give a group_size, or expand=False")
        if compressed and size is not None and (not size >= 1 or size // 1 != size):
            raise ValueError(f"optimizer.group_size must be a positive integer, not {size!r}")
        if not compressed and (self.expand or self.group_size is not None):
            raise ValueError(
                f"group_size={self.group_size}, expand={self.expand} apply to 8-bit moments, but mu is {self.mu!r} and "
                f"nu is {self.nu!r}; give group_size=None, expand=False"
            )

    def spec(self, moment: str) -> QuantSpec | None:
        """The `QuantSpec` of "mu" or "nu"; None if the moment is stored by a cast."""
        name = getattr(self, moment)
        if not formats.get(name).needs_scale:
            return None
        granularity = "tensor" if self.group_size is None else "group"
        return QuantSpec(name, granularity, self.group_size, expand=self.expand, flush_to_zero=moment != "nu")
