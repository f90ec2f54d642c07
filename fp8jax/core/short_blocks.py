"""Lengths of the last blocks of a quantized array, which distinguish joined arrays from one quantized as a whole."""

import dataclasses
from typing import Any

import numpy as np

from fp8jax.core.spec import QuantSpec


@dataclasses.dataclass(frozen=True, eq=False)
class ShortBlocks:
    """Lengths of the last blocks along the axes that groups and square blocks divide; 0 for a whole one.

    Static in the tree of a `QTensor`. Two trees differ if both lengths are known and differ.

    Attributes:
        lengths: one per such axis; None if unknown, as for leaves without shapes.
    """

    lengths: tuple[int, ...] | None = None

    @classmethod
    def from_shape(cls, shape: Any, spec: QuantSpec) -> "ShortBlocks":
        """The lengths for codes of this shape."""
        axes = {"group": (spec.axis,), "block": (-2, -1)}.get(spec.granularity)
        if axes is None or not isinstance(shape, tuple) or not all(-len(shape) <= axis < len(shape) for axis in axes):
            return cls()
        sizes = [shape[axis] for axis in axes]
        if not all(isinstance(n, (int, np.integer)) for n in sizes):
            return cls()
        return cls(tuple(int(n) % (spec.group_size or 1) for n in sizes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShortBlocks):
            return NotImplemented
        return self.lengths is None or other.lengths is None or self.lengths == other.lengths

    def __hash__(self) -> int:
        return 0
