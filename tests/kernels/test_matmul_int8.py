"""INT8 block products: kernels and references against float64 NumPy, races, spills, and how evenly tiles are dealt."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.ops import choice, fallback, matmul, matmul_int8
from fp8jax.ops import quantize as op
from pallas_kernels.hopper import Tile
from pallas_kernels.matmul_int8_mosaic import FallbackResidual, matmul_int8_block
from tests.kernels import h200
from tests.kernels import h200_programs as programs
from tests.kernels.int8_cases import error, operands

interpreter = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")
RACES = plgpu.InterpretGPUParams(detect_races=True)
WIDE, NARROW = Tile(128, 128, "N", stages=3, slots=4, raster=16), Tile(64, 64, "M", stages=2)


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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "rate"), [((4096, 4096, 4096), 0.3), ((1000, 3203, 1160), 0.5), ((257, 513, 2049), 0.0)]
)
def test_int8_blocks_with_residuals_equal_float64_on_a_gpu(shape: Any, rate: float) -> None:
    assert error(matmul_int8_block, shape, rate) < 3e-7
    assert error(pytest.importorskip("pallas_kernels.matmul_int8_triton").matmul_int8_block, shape, rate) < 3e-7


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_compiles_for_an_h200_without_spills() -> None:
    report = h200.report("tests.kernels.h200_programs:INT8")
    kernels = report["kernels"]
    assert len([name for name in kernels if "int8" in name]) == len(programs.INT8)
    for name, resources in kernels.items():
        assert resources["stores"] == resources["loads"] == resources["waits"] == 0, f"{name}: {resources}"
    assert report["copies"] == 0


def makespan(counts: np.ndarray, columns: int, raster: int, blocks: int = 132) -> int:
    """The most slices that a thread block multiplies, of rows of tiles with these counts, dealt as the kernel does."""
    order, load = np.argsort(-counts), np.zeros(blocks, int)
    for tile in range(len(counts) * columns):
        turn, seat = divmod(tile, blocks)
        band, within = divmod(tile, raster * len(counts))
        width = min(raster, columns - band * raster)
        row = within // width
        row = row if band % 2 == 0 else len(counts) - 1 - row
        load[seat if turn % 2 == 0 else blocks - 1 - seat] += counts[order[row]]
    return int(load.max())


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_tiles_of_unequal_length_are_dealt_evenly(rate: float) -> None:
    rows, steps, columns = 64, 64, 32
    used = np.random.default_rng(0).uniform(size=(rows, steps)) < rate
    whole = (np.arange(rows * steps) < rate * rows * steps).reshape(rows, steps)
    even = makespan(np.full(rows, steps), columns, 16)
    for blocks, least in ((used, 0.98), (whole, 0.94)):
        ideal = even * (1 + blocks.mean())
        assert ideal / makespan(steps + blocks.sum(1), columns, 16) > least


@pytest.mark.parametrize(("capability", "impl", "calls"), [(80, "triton", 3), (75, "xla", 1)])
def test_other_gpus_get_the_kernel_in_triton_or_16_bits(capability: int, impl: str, calls: int) -> None:
    pytest.importorskip("jax_triton")
    codes, blocks = jax.ShapeDtypeStruct((256, 384), jnp.bfloat16), functools.partial(op.quantize, rows="int8:block128")

    def program(x: Any, w: Any) -> Any:
        pair, _ = fallback.quantize(x, "int8:block128", 3.0)
        right, left = blocks(w, impl="xla")[0], blocks(x, impl="xla")[0]
        return matmul_int8.matmul_pair(pair, right), matmul.matmul(left, right)

    with choice.target(capability=capability), choice.listening() as told:
        text = jax.jit(program).trace(codes, codes).lower(lowering_platforms=("cuda",)).as_text()
    assert [c.impl for name, c in told if name == "fallback matmul"] == [impl]
    assert [c.impl for name, c in told if name == "matmul"][-1] == impl
    assert text.count("@triton_kernel_call_ffi") == calls
    assert "mosaic" not in text


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_the_kernel_in_triton_compiles_for_an_a100_without_spills() -> None:
    from pallas_kernels import matmul_int8_triton

    def program(a: Any, b: Any, sa: Any, sb: Any, *residual: Any) -> Any:
        kernel = functools.partial(matmul_int8_triton.matmul_int8_block, compute_capability=80)
        return kernel(a, b, sa, sb, residual=FallbackResidual(*residual))

    _, shapes = programs.int8(fallback=True)
    registers, spilled, shared = h200.assembled(program, *shapes, arch="sm_80")
    assert spilled == 0
    assert registers <= 255
    assert shared <= 160 * 1024
