"""`Weights`: the part of a `Recipe` that defines the storage of the parameters."""

import dataclasses

from fp8jax.core import formats, masters
from fp8jax.core.masters import Master

SCALED_MASTER = "fp16"


@dataclasses.dataclass(frozen=True)
class Weights:
    """Storage of the parameters.

    Attributes:
        master: what the optimizer updates, one of `fp8jax.core.masters.NAMES` or "fp16". "fp32", "bf16" (rounded to
            nearest) and "bf16+stochastic" are the parameters. "bf16+int8" (24 bits), "bf16+int16" (32 bits, fp32) and
            the like are a high part and a remainder; the high part is the parameter and the working copy. "fp16" has a
            scale per tensor and lies in the optimizer's state (`fp8jax.fp8lm_adamw`); the parameters are working
            copies.
        compute: format of the working copy that layers compute with: "fp32", "bf16", or the high part's.

    Raises:
        ValueError: an unknown format, or a working copy wider than the master.
    """

    master: str = "fp32"
    compute: str = "bf16"

    def __post_init__(self) -> None:
        allowed = (
            "fp32",
            "bf16",
            *(["fp16"] if self.split_master and self.split_master.param_format.name == "fp16" else []),
        )
        for field, names in (("master", (*masters.NAMES, SCALED_MASTER)), ("compute", allowed)):
            if getattr(self, field) not in names:
                raise ValueError(f"weights.{field} {getattr(self, field)!r} is not one of {', '.join(names)}")
        if formats.get(self.compute).dtype.itemsize > formats.get(self.master.partition("+")[0]).dtype.itemsize:
            raise ValueError(f"weights.compute {self.compute!r} is wider than the master weights, {self.master!r}")
        if self.split_master and self.split_master.param_format.name == "fp16" and self.compute == "bf16":
            raise ValueError(f"weights.compute 'bf16' is not the high part of {self.master!r}; give 'fp16'")

    @property
    def split_master(self) -> Master | None:
        """The master with a remainder; None if there is none."""
        master = Master(self.master) if self.master in masters.NAMES else None
        return master if master and master.remainder else None

    @property
    def param_format(self) -> str:
        """Format of the parameters that the caller of the optimizer stores."""
        return self.compute if self.master == SCALED_MASTER else self.master.partition("+")[0]

    @property
    def bytes_per_element(self) -> float:
        """Bytes of a master weight, remainder included."""
        return 2.0 if self.master == SCALED_MASTER else Master(self.master).bytes_per_element
