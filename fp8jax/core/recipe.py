"""`Recipe`: what every tensor of a training run is stored and computed in, as independent frozen parts."""

import dataclasses

from fp8jax.core import formats
from fp8jax.core.spec import QuantSpec

_PLAIN = ("bf16", "fp32")


@dataclasses.dataclass(frozen=True)
class Weights:
    """Storage of the parameters.

    Attributes:
        master: format that the optimizer updates, "fp32" or "bf16".
        compute: format of the working copy that layers compute with, "fp32" or "bf16".

    Raises:
        ValueError: unknown format, or a working copy wider than its master.
    """

    master: str = "fp32"
    compute: str = "bf16"

    def __post_init__(self) -> None:
        for field in ("master", "compute"):
            if getattr(self, field) not in _PLAIN:
                raise ValueError(f"weights.{field} {getattr(self, field)!r} is not one of {', '.join(_PLAIN)}")
        if formats.get(self.compute).dtype.itemsize > formats.get(self.master).dtype.itemsize:
            raise ValueError(f"weights.compute {self.compute!r} is wider than the master weights, {self.master!r}")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Storage of Adam's moments: the arguments of the same names of `fp8jax.compressed_adamw`.

    Attributes:
        mu: format of the first moment, an 8-bit float format or "bf16" or "fp32".
        nu: format of the second moment, likewise.
        group_size: elements along the last axis that share a scale; None where no moment has 8 bits.
        expand: dynamic range expansion of the 8-bit moments.

    Raises:
        ValueError: unknown format, a group size that is not positive, or settings that contradict each other.
    """

    mu: str = "e4m3"
    nu: str = "e4m3"
    group_size: int | None = 128
    expand: bool = True

    def __post_init__(self) -> None:
        compressed = [m for m in (self.mu, self.nu) if formats.get(m).scaled]
        for moment in compressed:
            if formats.get(moment).bits % 8:
                raise ValueError(f"{moment!r} codes are packed, which suits activations; give moments 8 or 16 bits")
        if compressed and (self.group_size is None or self.group_size < 1):
            raise ValueError(f"optimizer.group_size must be positive, not {self.group_size!r}")
        if not compressed and (self.expand or self.group_size is not None):
            raise ValueError(
                f"group_size={self.group_size}, expand={self.expand} apply to 8-bit moments, but mu is {self.mu!r} and "
                f"nu is {self.nu!r}; give group_size=None, expand=False"
            )

    def spec(self, moment: str) -> QuantSpec | None:
        """How "mu" or "nu" is quantized; None for a moment that is stored by a cast."""
        name = getattr(self, moment)
        if not formats.get(name).scaled:
            return None
        return QuantSpec(
            name, "group", self.group_size, expand=self.expand, underflow="smallest" if moment == "nu" else "zero"
        )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to train, as independent parts; mix them with `dataclasses.replace`.

    Attributes:
        name: shown in logs and tables.
        weights: storage of the parameters.
        optimizer: storage of the optimizer's moments.
    """

    name: str
    weights: Weights = Weights()
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            if not isinstance(getattr(self, field.name), field.type):  # type: ignore[arg-type]
                raise TypeError(f"{field.name} must be a {field.type.__name__}, not {getattr(self, field.name)!r}")  # type: ignore[union-attr]

    def plan(self) -> list[tuple[str, str, str, float]]:
        """The storage plan: (role, stored in, computed in, bytes a parameter), metadata of full groups included."""
        rows = [
            ("master weight", self.weights.master, "fp32", formats.get(self.weights.master).bytes_per_element),
            (
                "working weight",
                self.weights.compute,
                self.weights.compute,
                formats.get(self.weights.compute).bytes_per_element,
            ),
            ("gradient", self.weights.master, self.weights.compute, formats.get(self.weights.master).bytes_per_element),
        ]
        for role, moment in (("first moment", "mu"), ("second moment", "nu")):
            spec = self.optimizer.spec(moment)
            stored = getattr(self.optimizer, moment) if spec is None else str(spec)
            size = formats.get(stored).bytes_per_element if spec is None else spec.bytes_per_element
            rows.append((role, stored, "fp32", size))
        return rows

    def explain(self) -> str:
        """The storage plan as a table in text."""
        rows = [(role, stored, computed, f"{size:.4g}") for role, stored, computed, size in self.plan()]
        rows.insert(0, ("role", "stored in", "computed in", "bytes/param"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"recipe {self.name}", *lines])
