"""How far results lie from others, and may.

Sums in fp32 depend on their order, which depends on the CPU, its caches and its threads. So no limit lies nearer than
`order`; and where a sum is rounded to 8 bits a code may flip at a tie, which the test's own limit allows for.
"""

from typing import Any

import jax
import numpy as np


def relative(a: Any, b: Any) -> float:
    """The norm of the difference over that of `b`, of all arrays of two trees together, in float64."""
    a, b = (np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def order(length: int) -> float:
    """The relative error of fp32 sums in another order: twice the square root of their length in half last places."""
    return 2 * length**0.5 * 2.0**-24
