"""Distances between results, and their limits.

fp32 sums depend on their order, and thus on the CPU, its caches and its threads. No limit is below `order`. If a sum is
rounded to 8 bits, a code may flip at a tie, which the test's own limit allows.
"""

from typing import Any

import jax
import numpy as np


def relative(a: Any, b: Any) -> float:
    """Returns the norm of the difference over that of `b`, for all arrays of two trees together, in float64."""
    a, b = (np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def order(length: int) -> float:
    """Returns the relative error of fp32 sums in another order: 2 sqrt(length) half units in the last place."""
    return 2 * length**0.5 * 2.0**-24
