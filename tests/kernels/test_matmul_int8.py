"""INT8 products: kernels and references against NumPy's exact ones, races, spills, and the balance of tiles."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.ops.dispatch import choice
from fp8jax.ops.matmul import matmul
from fp8jax.ops.quantization import fallback
from fp8jax.ops.quantization import quantize as op
from pallas_kernels.matmul.hopper import Tile
from pallas_kernels.matmul.matmul_int8_mosaic import FallbackResidual, matmul_int8_block
from pallas_kernels.matmul.matmul_mosaic import MAX_INT8_K
from pallas_kernels.matmul.matmul_mosaic import matmul as matmul_scaled
from tests.kernels import h200
from tests.kernels import h200_programs as programs
from tests.kernels.int8_cases import error, operands
from tests.programs import triton_calls
from tests.rows import covering, slow

interpreter = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")
RACES = plgpu.InterpretGPUParams(detect_races=True)
WIDE, NARROW = Tile(128, 128, "N", num_stages=3, store_slots=4, band_width=16), Tile(64, 64, "M", num_stages=2)


@pytest.mark.parametrize(
    ("shape", "rate", "tile"),
    [
        slow((200, 300, 640), 0.4, WIDE),
        ((384, 130, 300), 0.5, NARROW),
        ((256, 256, 256), 0.0, WIDE),
        ((5, 7, 24), 1, WIDE),
    ],
)
def test_int8_blocks_with_residuals_equal_float64(shape: Any, rate: float, tile: Tile) -> None:
    (*args, residual), expected = operands(*shape, rate)
    interpreter.reset_gpu_interpret_mode_state()
    out = matmul_int8_block(*args, residual=residual, out_dtype=jnp.float32, tile=tile, interpret=RACES)
    out = np.asarray(jax.block_until_ready(out), np.float64)
    assert not interpreter.get_races().races_found
    assert np.linalg.norm(out - expected) < 3e-7 * np.linalg.norm(expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "rate"), [((4096, 4096, 4096), 0.3), ((1000, 3203, 1160), 0.5), ((257, 513, 2049), 0.0)]
)
def test_int8_blocks_with_residuals_equal_float64_on_a_gpu(shape: Any, rate: float) -> None:
    assert error(matmul_int8_block, shape, rate) < 3e-7
    assert error(pytest.importorskip("pallas_kernels.matmul.matmul_int8_triton").matmul_int8_block, shape, rate) < 3e-7


def drawn(m: int, n: int, k: int, terms: tuple[str, ...]) -> tuple[dict[str, jax.Array], np.ndarray]:
    """Returns codes whose sums exceed fp32's precision, other operands, and the result from exact integers.

    Terms have few bits, so the fp32 epilogue equals float64 except for one rounding.
    """
    rng = np.random.default_rng(m + n + k)
    a, b = (rng.integers(112, 128, (rows, k)) * rng.choice([1, 1, 1, -1], (rows, 1)) for rows in (m, n))
    a[0], b[0] = -128, -128  # the largest sum, at one element
    sizes = {"scale": (), "row_scale": (m,), "column_scale": (n,)}
    values = {name: np.exp2(rng.integers(-2, 3, sizes[name])).astype(np.float32) for name in terms}
    sums = a.astype(np.float64) @ b.astype(np.float64).T  # integers that float64 represents exactly
    out = sums.astype(np.float32).astype(np.float64)  # are rounded once
    values_fp64 = {name: value.astype(np.float64) for name, value in values.items()}
    out = (
        out
        * values_fp64.get("scale", 1)
        * values_fp64.get("row_scale", np.ones(m))[:, None]
        * values_fp64.get("column_scale", np.ones(n))
    )
    out = out.astype(np.float32).astype(np.float64)
    codes = {"a": jnp.asarray(a, jnp.int8), "b": jnp.asarray(b, jnp.int8)}
    return codes | {name: jnp.asarray(value) for name, value in values.items()}, out


SCALED = [
    ((140, 75, 2100), ("row_scale",), Tile(64, 64, "M", num_stages=2)),
    ((33, 140, 2001), ("row_scale", "column_scale"), Tile(64, 64, None, 2, cluster="N")),
    ((70, 170, 2048), ("scale",), Tile(64, 160, None, 3, store_slots=3)),
    ((130, 48, 1900), (), Tile(64, 64, "N", 3)),
]


@pytest.mark.parametrize(
    ("shape", "terms", "tile", "fast"),
    [(*case, i % 2 == 1) for i, case in enumerate(SCALED)] + [slow(*case, i % 2 == 0) for i, case in enumerate(SCALED)],
)
def test_scaled_int8_products_are_exact(shape: Any, terms: Any, tile: Tile, fast: bool) -> None:
    arguments, expected = drawn(*shape, terms)
    interpreter.reset_gpu_interpret_mode_state()
    settings = {"out_dtype": jnp.float32, "fast": fast, "tile": tile, "interpret": RACES}
    out = np.asarray(jax.block_until_ready(matmul_scaled(**arguments, **settings)), np.float64)
    assert not interpreter.get_races().races_found
    np.testing.assert_array_equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "terms"),
    covering(
        [(4096, 4096, 4096), (1000, 3203, 1160), (257, 513, 2049), (7, 24, MAX_INT8_K)],
        [(), ("scale",), ("row_scale",), ("row_scale", "column_scale")],
    ),
)
def test_scaled_int8_products_are_exact_on_a_gpu(shape: Any, terms: Any) -> None:
    arguments, expected = drawn(*shape, terms)
    np.testing.assert_array_equal(np.asarray(matmul_scaled(**arguments, out_dtype=jnp.float32), np.float64), expected)
    half = np.asarray(matmul_scaled(**arguments).astype(jnp.float32), np.float64)
    assert np.linalg.norm(half - expected) <= 2.0**-8 * np.linalg.norm(expected)


def test_scaled_int8_products_refuse_what_int32_does_not_hold() -> None:
    codes = jnp.ones((8, MAX_INT8_K + 1), jnp.int8)
    with pytest.raises(ValueError, match=r"K is 131072: int32 holds sums of 131071 products"):
        matmul_scaled(codes, codes)
    with pytest.raises(TypeError, match="b has dtype float8_e4m3fn; quantize it to int8"):
        matmul_scaled(codes[:, :128], codes[:, :128].astype(jnp.float8_e4m3fn))


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (Tile(64, 64, None), "the tile must have 128 rows"),
        (Tile(64, 96), "columns of each warpgroup must divide 128"),
        (Tile(128, 128, None), "a second operand requires a schedule, and tiles that warpgroups share"),
        (Tile(64, 64, cluster="N"), "a schedule does not support clusters"),
        (Tile(64, 64, lead_slices=1), "that warpgroups share without a lead"),
    ],
)
def test_tiles_that_blocks_do_not_take_are_refused(tile: Tile, message: str) -> None:
    (*args, residual), _ = operands(128, 128, 128, 1)
    with pytest.raises(ValueError, match=message):
        matmul_int8_block(*args, residual=residual, tile=tile)


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
@pytest.mark.slow
def test_compiles_for_an_h200_without_spills() -> None:
    report = h200.report("tests.kernels.h200_programs:INT8")
    kernels = report["kernels"]
    assert len([name for name in kernels if "int8" in name]) == len(programs.INT8)
    for name, resources in kernels.items():
        assert resources["stores"] == resources["loads"] == resources["waits"] == 0, f"{name}: {resources}"
    assert report["copies"] == 0


def makespan(counts: np.ndarray, columns: int, raster: int, blocks: int = 132) -> int:
    """Returns the most slices that a thread block multiplies, for rows of tiles with these counts in the kernel's
    order."""
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
        return matmul.matmul(pair, right), matmul.matmul(left, right)

    with choice.target(capability=capability), choice.record_choices() as choices:
        text = jax.jit(program).trace(codes, codes).lower(lowering_platforms=("cuda",)).as_text()
    assert [c.impl for name, c in choices if name == "fallback matmul"] == [impl]
    assert [c.impl for name, c in choices if name == "matmul"][-1] == impl
    assert triton_calls(text) == calls
    assert "mosaic" not in text


def test_the_kernel_in_triton_names_what_it_does_not_take() -> None:
    kernel = pytest.importorskip("pallas_kernels.matmul.matmul_int8_triton").matmul_int8_block
    (*args, _), _ = operands(130, 140, 300, 0.0)
    for i, other, message in (
        (1, args[1][:, 1:], r"b is int8\(140, 299\), not int8\(140, 300\)"),
        (2, args[2][1:], r"a_scale is float32\(1, 3\), not float32\(2, 3\)"),
        (3, args[3].astype(jnp.bfloat16), r"b_scale is bfloat16\(2, 3\), not float32"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel(*args[:i], other, *args[i + 1 :])


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_the_kernel_in_triton_compiles_for_an_a100_without_spills() -> None:
    from pallas_kernels.matmul import matmul_int8_triton

    def program(a: Any, b: Any, sa: Any, sb: Any, *residual: Any) -> Any:
        kernel = functools.partial(matmul_int8_triton.matmul_int8_block, compute_capability=80)
        return kernel(a, b, sa, sb, residual=FallbackResidual(*residual))

    _, shapes = programs.int8(fallback=True)
    registers, spilled, shared = h200.assembled(program, *shapes, arch="sm_80")
    assert spilled == 0
    assert registers <= 255
    assert shared <= 160 * 1024
