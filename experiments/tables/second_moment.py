"""How second moments in 8 bits follow gradients, by rounding and b2: `python -m experiments.tables.second_moment`.

A simulation on the path that training takes, `scale_by_compressed_adam`: noise with log-normal magnitudes within each
group, which change places half way. About a minute on two CPU cores.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import fp8jax
from experiments.tables import common
from experiments.tables.common import Row

GROUPS, SIZE, STEPS = 64, 128, 3000
DECAYS = (0.95, 0.99, 0.999)
ARMS = {
    "e4m3, nearest": {"nu": "e4m3", "nu_rounding": "nearest"},
    "e4m3, stochastic": {"nu": "e4m3", "nu_rounding": "stochastic"},
    "bf16, nearest": {"nu": "bf16"},
}
FIELD = {  # median and 99th percentile of the simulation in the issue that asked for this, e4m3
    ("e4m3, nearest", 0.95): (0.054, 0.23), ("e4m3, nearest", 0.99): (0.15, 3.7), ("e4m3, nearest", 0.999): (0.86, 1.8),
}  # fmt: skip
