"""Matrix products: every kernel and its reference against float64 NumPy, races, spills, transformations, errors."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from fp8jax.core.qtensor import quantize
from fp8jax.ops.matmul import matmul as op
from pallas_kernels.matmul import matmul_block_mosaic, matmul_mosaic, matmul_mx_mosaic
from pallas_kernels.matmul.hopper import Tile
from tests import matmul_reference as reference
from tests.kernels import h200
from tests.kernels import h200_programs as programs
from tests.rows import slow

interpreter = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")
RACES = plgpu.InterpretGPUParams(detect_races=True)
E4M3, E5M2, F32, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
SMALL = Tile(64, 64, "M", num_stages=2)
FAST, PROMOTED = 3e-3, 1e-3  # tensor-core sums of a whole row (14 bits), and of at most 128 products

Function = Callable[..., jax.Array]


def tolerance(out_dtype: Any, accumulation: float = 0.0) -> float:
    """Returns the relative (Frobenius) error of half an ulp of the output, the sums, and fp32 sums in the epilogue."""
    return (2.0**-9 if out_dtype == BF16 else 0.0) + accumulation + 1e-6


def error(out: Any, expected: np.ndarray) -> float:
    assert out.shape == expected.shape
    return float(np.linalg.norm(np.asarray(out, np.float64) - expected) / np.linalg.norm(expected))


def interpreted(function: Function, *args: Any, **kwargs: Any) -> jax.Array:
    """Runs a kernel in the interpreter and asserts that it has no races."""
    interpreter.reset_gpu_interpret_mode_state()
    out = jax.block_until_ready(function(*args, **kwargs, interpret=RACES))
    assert not interpreter.get_races().races_found
    return out


def draw(seed: int, *shape: int, dtype: Any = E4M3, spread: float = 16.0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) * spread
    return jnp.asarray(np.clip(values, -448, 448), F32).astype(dtype)


def positive(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).uniform(0.5, 2.0, shape), F32)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


@dataclasses.dataclass(frozen=True)
class Plain:
    m: int
    n: int
    k: int
    tile: Tile = SMALL
    left: Any = E4M3
    right: Any = E4M3
    out: Any = BF16
    terms: tuple[str, ...] = ("scale",)
    fast: bool = True


PLAIN = [
    Plain(128, 128, 256),
    Plain(140, 75, 300, left=E5M2, terms=("row_scale", "column_scale")),
    Plain(33, 17, 40, out=F32, terms=("row_scale",)),
    Plain(1, 8, 130, Tile(64, 64, "N", 3)),
    Plain(70, 140, 600, Tile(64, 64, None, 2), right=E5M2, terms=("scale", "row_scale", "column_scale")),
    Plain(140, 170, 301, Tile(64, 160, None, 3, cluster="M", store_slots=3), terms=()),
    Plain(70, 210, 130, Tile(64, 64, "N", 2, cluster="N"), out=F32, terms=("scale", "column_scale")),
    Plain(140, 140, 300, Tile(128, 64, None, 2, cluster="N"), terms=("row_scale",)),
    Plain(140, 70, 900, Tile(64, 64, "M", 3, lead_slices=2), left=E5M2, fast=False),
    Plain(70, 140, 1100, Tile(64, 64, "M", 3, lead_slices=2), out=F32, fast=False),
    Plain(140, 70, 700, Tile(64, 64, "M", 3, lead_slices=1)),
    Plain(140, 270, 200, Tile(64, 128, "M", 3, store_slots=3), out=F32, terms=()),
    Plain(
        33,
        70,
        200,
        Tile(64, 64, "M", 5, cluster="M", lead_slices=4),
        out=F32,
        terms=("row_scale",),
        fast=False,
    ),
]


def plain_arguments(case: Plain) -> tuple[dict[str, jax.Array], np.ndarray]:
    a, b = draw(0, case.m, case.k, dtype=case.left), draw(1, case.n, case.k, dtype=case.right)
    terms = {
        "scale": jnp.asarray(0.37, F32), "row_scale": positive(2, case.m), "column_scale": positive(3, case.n),
    }  # fmt: skip
    used = {name: terms[name] for name in case.terms}
    expected = wide(a) @ wide(b).T * wide(used.get("scale", 1.0))
    expected = (
        expected
        * wide(used.get("row_scale", np.ones(case.m)))[:, None]
        * wide(used.get("column_scale", np.ones(case.n)))
    )
    return {"a": a, "b": b, **used}, expected


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("implementation", ["reference", "mosaic"])
def test_matmul(case: Plain, implementation: str) -> None:
    arguments, expected = plain_arguments(case)
    if implementation == "reference":
        out = reference.matmul(**arguments, out_dtype=case.out, fast=case.fast)
    else:
        settings = {"out_dtype": case.out, "fast": case.fast, "tile": case.tile}
        out = interpreted(matmul_mosaic.matmul, **arguments, **settings)
    assert out.dtype == case.out
    assert error(out, expected) < tolerance(case.out)


def test_sums_of_512_are_promoted() -> None:
    """Eight slices have sums of 2^24 and 1. One fp32 sum would lose what is added to the first one."""
    a, b = np.zeros((64, 1024)), np.zeros((64, 1024))
    a[:, :128], b[:, :128] = 256, 512
    a[:, 128::128] = b[:, 128::128] = 1
    settings: Any = {"out_dtype": F32, "fast": False, "tile": Tile(64, 64, "M", 3)}
    out = interpreted(matmul_mosaic.matmul, jnp.asarray(a, E4M3), jnp.asarray(b, E5M2), **settings)
    assert np.all(np.asarray(out) == 2**24 + 4)


def block_arguments(m: int, n: int, k: int, by_column: bool) -> tuple[list[jax.Array], np.ndarray]:
    a, b = draw(0, m, k), draw(1, n, k, dtype=E4M3)
    steps = -(-k // 128)
    a_scale, b_scale = positive(2, m, steps), positive(3, n if by_column else -(-n // 128), steps)
    per_row = wide(b_scale) if by_column else np.repeat(wide(b_scale), 128, 0)[:n]
    left = wide(a) * np.repeat(wide(a_scale), 128, 1)[:, :k]
    return [a, b, a_scale, b_scale], left @ (wide(b) * np.repeat(per_row, 128, 1)[:, :k]).T


@pytest.mark.parametrize(
    ("shape", "by_column", "tile", "out"),
    [
        slow((128, 256, 384), False, Tile(64, 128, "M", 2), BF16),
        ((130, 140, 900), False, Tile(64, 128, "M", 3), F32),
        slow((130, 203, 500), False, Tile(64, 192, "M", 2, store_slots=3), BF16),
        ((140, 270, 600), False, Tile(64, 128, "M", 2, cluster="N"), BF16),
        ((300, 140, 640), False, Tile(128, 128, "M", 3, store_slots=4, lead_slices=1), BF16),
        ((260, 300, 300), False, Tile(128, 96, "M", 3, store_slots=4), BF16),
        ((64, 700, 300), False, Tile(64, 128, "N", 2), F32),
        slow((300, 140, 100), False, Tile(128, 128, None, 3, store_slots=4), BF16),
        slow((70, 130, 640), True, Tile(64, 96, "M", 3), F32),
        ((70, 130, 600), True, Tile(64, 64, "M", 2, cluster="M"), BF16),
        slow((270, 140, 300), True, Tile(128, 128, "M", 2), BF16),
    ],
)
@pytest.mark.parametrize("implementation", ["reference", "mosaic"])
def test_matmul_block(shape: Any, by_column: bool, tile: Tile, out: Any, implementation: str) -> None:
    arguments, expected = block_arguments(*shape, by_column)
    if implementation == "reference":
        result = reference.matmul_block(*arguments, out_dtype=out)
    else:
        result = interpreted(matmul_block_mosaic.matmul_block, *arguments, out_dtype=out, tile=tile)
    assert error(result, expected) < tolerance(out)


def test_tiles_of_block_products_keep_the_gpu_busy() -> None:
    best = matmul_block_mosaic.best_tile
    # 128 tiles of 128 rows use more of 132 multiprocessors than 64 tiles of 256.
    assert best(512, 4096).block_rows == 128
    # 192 tiles of 256 rows leave half of the multiprocessors idle in a second wave.
    assert best(1024, 6144).block_rows == 128
    for shape in ((4096, 4096), (2048, 7168), (16384, 22016)):
        assert best(*shape).block_rows == 256


def test_tiles_follow_their_waves() -> None:
    best = matmul_mosaic.best_tile
    assert best(8192, 8192, 8192).cols == 192
    assert best(2048, 7168, 4096).cols == 128  # 7 waves of 128 columns are shorter than 5 of 192
    assert best(4096, 7168, 16384).cols == 256
    assert best(2048, 7168, 4096) == Tile(128, 128, None, 6, cluster="N")
    assert best(2048, 7168 - 128, 4096).cluster == "M"  # 55 columns of tiles, an odd number


@pytest.mark.parametrize(
    ("shape", "tile"), [((128, 130, 384), Tile(64, 128, "M", 2)), ((70, 75, 700), Tile(64, 64, "M", 2, lead_slices=1))]
)
@pytest.mark.parametrize("implementation", ["reference", "mosaic"])
def test_matmul_mx(shape: tuple[int, int, int], tile: Tile, implementation: str) -> None:
    m, n, k = shape
    a, b, row = draw(0, m, k, spread=80.0), draw(1, n, k), positive(2, m)
    exponent = np.random.default_rng(3).integers(127 - 25, 127 + 3, (m, -(-k // 32))).astype(np.uint8)
    power = np.repeat(np.exp2(exponent.astype(np.float64) - 127), 32, 1)[:, :k]
    expected = wide(a) * power @ wide(b).T * wide(row)[:, None]
    exponents = jnp.asarray(exponent)
    if implementation == "reference":
        out = reference.matmul_mx(a, b, exponents, row_scale=row, out_dtype=F32)
    else:
        out = interpreted(matmul_mx_mosaic.matmul_mx, a, b, exponents, row_scale=row, out_dtype=F32, tile=tile)
    assert error(out, expected) < tolerance(F32)


def test_small_groups_keep_their_accuracy() -> None:
    """Weights are non-zero only for groups of activations that are 2^-30 of their row's largest."""
    a, b = draw(0, 64, 128, spread=120.0), jnp.where(jnp.arange(128) < 32, 0, draw(1, 64, 128).astype(F32)).astype(E4M3)
    exponent = jnp.asarray([[127, 97, 97, 97]] * 64, jnp.uint8)
    expected = wide(a) * np.repeat(np.exp2(wide(exponent) - 127), 32, 1) @ wide(b).T
    out = interpreted(matmul_mx_mosaic.matmul_mx, a, b, exponent, out_dtype=F32, tile=SMALL)
    assert error(out, expected) <= 2.0**-8


@pytest.mark.parametrize("byte", [0, 255])
def test_extreme_exponents(byte: int) -> None:
    a, b = draw(0, 64, 64), draw(1, 64, 64)
    exponent = jnp.full((64, 2), 127, jnp.uint8).at[3, 1].set(byte)
    out = interpreted(matmul_mx_mosaic.matmul_mx, a, b, exponent, out_dtype=F32, tile=SMALL)
    expected = wide(a) @ wide(b).T
    expected[3] = wide(a)[3, :32] @ wide(b)[:, :32].T
    good = np.arange(64) != 3
    assert error(out[good], expected[good]) < tolerance(F32)
    assert error(out[3], expected[3]) < tolerance(F32) if byte == 0 else not np.isfinite(np.asarray(out[3])).any()


def test_nan_stays_visible() -> None:
    a, b = draw(0, 64, 128).at[5, 7].set(jnp.nan), draw(1, 64, 128)
    ones = jnp.ones((64, 1), F32)
    for out in (
        interpreted(matmul_mosaic.matmul, a, b, tile=SMALL),
        interpreted(matmul_block_mosaic.matmul_block, a, b, ones, ones.at[9, 0].set(jnp.nan), tile=SMALL),
        interpreted(matmul_mx_mosaic.matmul_mx, a, b, jnp.full((64, 4), 127, jnp.uint8), tile=SMALL),
    ):
        bad = np.isnan(np.asarray(out, np.float32))
        assert bad[5].all()
        assert not bad[np.arange(64) != 5][:, np.arange(64) != 9].any()


def test_transformations() -> None:
    a, b, scale = draw(0, 2, 70, 130), draw(1, 2, 40, 130), jnp.asarray([0.5, 2.0], F32)
    expected = np.einsum("bmk,bnk->bmn", wide(a), wide(b)) * wide(scale)[:, None, None]

    def one(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        return matmul_mosaic.matmul(a, b, scale=scale, out_dtype=F32, tile=SMALL, interpret=RACES)

    assert error(jax.jit(jax.vmap(one))(a, b, scale), expected) < tolerance(F32)
    scanned = jax.jit(lambda *x: lax.scan(lambda _, x: (None, one(*x)), None, x)[1])(a, b, scale)
    assert error(scanned, expected) < tolerance(F32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    sharded = jax.shard_map(one, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    assert error(jax.jit(sharded)(a[0], b[0], scale[0]), expected[0]) < tolerance(F32)
    assert not interpreter.get_races().races_found


@pytest.mark.parametrize(("out", "n", "width"), [(BF16, 24, 128), (BF16, 64, 128), (F32, 32, 64), (F32, 40, 64)])
def test_an_output_narrower_than_a_tile_has_room_for_a_store_beside_it(out: Any, n: int, width: int) -> None:
    """Mosaic drops a dimension of one swizzle, so a store would overwrite the neighbouring array."""
    program = jax.make_jaxpr(lambda a, b: matmul_mosaic.matmul(a, b, out_dtype=out))(draw(0, 33, 80), draw(1, n, 80))
    name = {"bfloat16": "bf16", "float32": "f32"}[jnp.dtype(out).name]
    assert f"{name}[40,{width}]" in str(program)


def test_export_for_cuda_from_this_machine() -> None:
    function, shapes = programs.tensor()
    exported = jax.export.export(jax.jit(function), platforms=["cuda"])(*shapes)
    assert "mosaic_gpu" in str(exported.mlir_module())
    assert exported.out_avals[0].shape == (programs.M, programs.N)


ONES, BYTES = jnp.ones, jnp.ones((64, 4), jnp.uint8)
matmul, block, mx = matmul_mosaic.matmul, matmul_block_mosaic.matmul_block, matmul_mx_mosaic.matmul_mx


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda a, b: matmul(a.astype(BF16), b), TypeError, "a has dtype bfloat16; quantize"),
        (lambda a, b: matmul(a, b.T), ValueError, "transpose b"),
        (lambda a, b: matmul(a[None], b), ValueError, "use vmap"),
        (lambda a, b: matmul(a[:0], b), ValueError, "must be positive"),
        (lambda a, b: matmul(a, b, out_dtype=jnp.float16), TypeError, "out_dtype float16"),
        (lambda a, b: matmul(a, b, scale=ONES((1,))), ValueError, r"scale has shape \(1,\); expected \(\)"),
        (lambda a, b: matmul(a, b, row_scale=ONES(64, BF16)), TypeError, "row_scale has dtype bfloat16"),
        (lambda a, b: matmul(a, b, column_scale=ONES(64)), ValueError, r"shape \(64,\); expected \(32,\)"),
        (lambda a, b: block(a, b, ONES((64, 2)), ONES((1, 1))), ValueError, "a_scale"),
        (lambda a, b: block(a, b, ONES((64, 1)), ONES((3, 1))), ValueError, "b_scale"),
        (lambda a, b: mx(a, b, ONES((64, 4), jnp.int8)), TypeError, "a_exponent"),
        (lambda a, b: mx(a, b, BYTES[:, :3]), ValueError, r"a_exponent has shape \(64, 3\)"),
        (lambda a, b: mx(a, b, BYTES, tile=Tile(128, 64)), ValueError, "has 128 rows; microscaled products need 64"),
        (lambda a, b: block(a, b, ONES((64, 1)), ONES((1, 1)), tile=Tile(64, 256, "N")), ValueError, "most 256 rows"),
        (lambda a, b: Tile(65, 64), ValueError, "65x64"),
        (lambda a, b: Tile(64, 48), ValueError, "64x48"),
        (lambda a, b: Tile(64, 288), ValueError, "64x288"),
        (lambda a, b: Tile(num_stages=3, lead_slices=3), ValueError, "lead is 3"),
        (lambda a, b: Tile(num_stages=1), ValueError, "stages is 1; use at least 2"),
        (lambda a, b: Tile(split=None, lead_slices=1), ValueError, "lead is 1; it requires two warpgroups"),
    ],
)  # fmt: skip
def test_errors_name_the_value_and_the_fix(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(draw(0, 64, 128), draw(1, 32, 128))


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
@pytest.mark.parametrize("which", [slow("LARGEST"), slow("ALL"), slow("GROUPED")])
def test_compiles_for_an_h200_without_spills(which: str) -> None:
    report = h200.report(f"tests.kernels.h200_programs:{which}")
    assert len(report["kernels"]) == len(getattr(programs, which))
    for name, resources in report["kernels"].items():
        assert resources["stores"] == resources["loads"] == 0, f"{name} spills registers: {resources}"
        assert resources["waits"] == 0, f"the assembler makes {name} wait for products: {resources}"
    assert report["calls"].count("mosaic_gpu_v2") == len(getattr(programs, which))


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_per_tensor_products_become_one_cublas_call_each() -> None:
    calls = [c for c in h200.report("tests.kernels.h200_programs:cublas")["calls"] if "cublas" in c]
    assert calls == ["__cublas$lt$matmul$f8"] * 3


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_no_kernel_moves_the_scales_between_quantization_and_product() -> None:
    pytest.importorskip("jax_triton")
    report = h200.report("tests.kernels.h200_programs:quantized_blocks")
    assert report["calls"].count("mosaic_gpu_v2") == 3
    assert report["copies"] == 0


@pytest.mark.slow
@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_a_loop_that_saves_a_product_calls_its_kernel_once() -> None:
    """Without the save, XLA would call the kernel twice. The forward and two backward products are three calls."""
    pytest.importorskip("jax_triton")
    assert h200.report("tests.kernels.h200_programs:looped")["calls"].count("mosaic_gpu_v2") == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1000, 32003, 1024), (4096, 4096, 4096), (257, 513, 2049), (8200, 8200, 300), (33, 48, 80), (7, 24, 200)]
)
def test_on_a_gpu(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    arguments, expected = plain_arguments(Plain(m, n, k, left=E5M2, terms=("row_scale", "column_scale")))
    assert error(matmul_mosaic.matmul(**arguments), expected) < tolerance(BF16, FAST)
    for by_column in (False, True):
        operands, expected = block_arguments(m, n, k, by_column)
        assert error(matmul_block_mosaic.matmul_block(*operands), expected) < tolerance(BF16, PROMOTED)
        assert error(matmul_block_mosaic.matmul_block(*operands, out_dtype=F32), expected) < tolerance(F32, PROMOTED)
    exponent = np.random.default_rng(3).integers(120, 128, (m, -(-k // 32))).astype(np.uint8)
    left = wide(operands[0]) * np.repeat(np.exp2(exponent.astype(np.float64) - 127), 32, 1)[:, :k]
    out = matmul_mx_mosaic.matmul_mx(operands[0], operands[1], jnp.asarray(exponent))
    assert error(out, left @ wide(operands[1]).T) < tolerance(BF16, PROMOTED)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("left", "right", "bound"),
    [("e4m3", "e4m3", FAST), ("e5m2", "e4m3", FAST), ("e5m2", "e5m2", FAST), ("e4m3:token", "e5m2:token", FAST),
     ("e4m3:group128", "e4m3:block128", PROMOTED), ("e5m2:group128", "e4m3:group128", PROMOTED),
     ("e4m3:mx32", "e4m3", 2 * FAST), ("e4m3:token", "e4m3:mx32+token", 2 * FAST),
     ("int8", "int8", 0), ("int8:token", "int8", 0), ("int8", "int8:token", 0), ("int8:token", "int8:token", 0)],
)  # fmt: skip
def test_what_the_op_chooses_on_a_gpu(left: str, right: str, bound: float) -> None:
    values = [np.random.default_rng(i).normal(size=(rows, 1032)) for i, rows in enumerate((520, 264))]
    a, b = (quantize(jnp.asarray(x, F32), spec) for x, spec in zip(values, (left, right), strict=True))
    expected = wide(a.dequantize()) @ wide(b.dequantize()).T
    for dtype in (BF16, F32):
        out = jax.jit(lambda a, b, dtype=dtype: op.matmul(a, b, dtype=dtype))(a, b)
        assert out.dtype == dtype
        assert error(out, expected) < tolerance(dtype, bound)
    if "mx" in f"{left} {right}":
        exact = op.matmul(a, b, exact=True, impl="mosaic")
        assert error(exact, expected) < tolerance(F32, PROMOTED)
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), (a, b))
    mapped = jax.jit(jax.vmap(lambda a, b: op.matmul(a, b, dtype=BF16)))(*batch)
    assert error(mapped[1], expected) < tolerance(BF16, bound)
