"""How far results lie from others."""

from typing import Any

import jax
import numpy as np


def relative(a: Any, b: Any) -> float:
    """The norm of the difference over that of `b`, of all arrays of two trees together, in float64."""
    a, b = (np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
