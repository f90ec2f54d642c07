"""How long the last blocks of a quantized array are: what tells joined arrays from one that was quantized whole."""

import dataclasses
from typing import Any

import numpy as np

from fp8jax.core.spec import QuantSpec


@dataclasses.dataclass(frozen=True, eq=False)
class ShortBlocks:
    """Lengths of the last blocks along the axes that groups and square blocks cut; 0 for a whole one.

    Static in the tree of a `QTensor`. Two trees differ where both lengths are known and differ.

    Attributes:
        lengths: one for each of these axes; None if they are not known, as of leaves without shapes.
    """

    lengths: tuple[int, ...] | None = None

    @classmethod
    def from_shape(cls, shape: Any, spec: QuantSpec) -> "ShortBlocks":
        """Those of codes of this shape."""
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
