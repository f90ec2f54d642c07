"""INT8 block products: kernels and references against float64 NumPy, races, spills, and how evenly tiles are dealt."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import Tile
from pallas_kernels.matmul_int8_mosaic import Residual, matmul_int8_block

interpreter = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")
RACES = plgpu.InterpretGPUParams(detect_races=True)
WIDE, NARROW = Tile(128, 128, "N", stages=3, slots=4, raster=16), Tile(64, 64, "M", stages=2)


def operands(m: int, n: int, k: int, rate: float) -> tuple[Any, np.ndarray]:
    """Arguments of a product, and its result in float64. Residual blocks that are not used hold garbage."""
    rng = np.random.default_rng(m + n + k)
    a, b, r = (rng.integers(-127, 128, shape).astype(np.int8) for shape in ((m, k), (n, k), (m, k)))
    counts = -(-m // 128), -(-n // 128), -(-k // 128)
    a_scale, b_scale = (rng.uniform(0.5, 2, (rows, counts[2])).astype(np.float32) for rows in counts[:2])
    r_scale = rng.uniform(0.005, 0.02, a_scale.shape).astype(np.float32)
    used = rng.uniform(size=a_scale.shape) < rate
    r_scale[~used] = np.nan

    def spread(blocks: np.ndarray, rows: int) -> np.ndarray:
        return np.kron(blocks.astype(np.float64), np.ones((128, 128)))[:rows, :k]

    left = a * spread(a_scale, m) + r * spread(np.where(used, r_scale, 0), m)
    wanted = left @ (b * spread(b_scale, n)).T
    residual = Residual(jnp.asarray(r), jnp.asarray(r_scale), jnp.asarray(used)) if rate else None
    return (*map(jnp.asarray, (a, b, a_scale, b_scale)), residual), wanted


@pytest.mark.parametrize(
    ("shape", "rate", "tile"),
    [((200, 300, 640), 0.4, WIDE), ((384, 130, 300), 0.5, NARROW), ((256, 256, 256), 0.0, WIDE), ((5, 7, 24), 1, WIDE)],
)
def test_int8_blocks_with_residuals_equal_float64(shape: Any, rate: float, tile: Tile) -> None:
    (*args, residual), wanted = operands(*shape, rate)
    interpreter.reset_gpu_interpret_mode_state()
    out = matmul_int8_block(*args, residual=residual, out_dtype=jnp.float32, tile=tile, interpret=RACES)
    out = np.asarray(jax.block_until_ready(out), np.float64)
    assert not interpreter.get_races().races_found
    assert np.linalg.norm(out - wanted) < 3e-7 * np.linalg.norm(wanted)
