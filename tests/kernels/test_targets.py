"""XLA's compilation of quantized products for several GPU models, and its report."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax.modules.compiled import Product
from fp8jax.ops.dispatch import choice
from fp8jax.ops.matmul.matmul import matmul
from fp8jax.ops.quantization.quantize import quantize
from pallas_kernels.dispatch import call_mosaic
from tests.kernels import h200, targets
from tests.programs import chosen, triton_calls
from tests.rows import slow

pytestmark = pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
HALF = {"t4": ("f16", "f16")}


def products(actual: dict[str, Any]) -> list[Product]:
    """The products of quantized operands."""
    listed = [Product(p[0], tuple(p[1]), *p[2:]) for p in actual["products"]]
    return [p for p in listed if p.requested_formats]


def check(actual: dict[str, Any]) -> None:
    """Every product of codes has 8 or 16 bits, and none is a loop."""
    for kind, programs in actual.items():
        for name, program in programs.items():
            listed, by_kernel = products(program), program["kernels"].get("multiply", 0)
            ran = sum(p.executions for p in listed) + by_kernel
            assert ran == (2 if name == "switchback" else 3), (kind, name, listed)
            assert not by_kernel or name in ("int8_block", "int8_fallback")
            assert not program["loops"], (kind, name)
            for p in listed:
                half = HALF.get(kind, ("bf16", "bf16"))
                assert p.has_codes or p.operands == half, (kind, name, p)
                assert p.has_codes or program["warnings"], (kind, name)
            if name == "switchback":
                assert all(p.operands == ("s8", "s8") for p in listed), (kind, listed)


# Dtypes of codes.
NARROW = {"e4m3": "f8e4m3fn", "e5m2:group128": "f8e5m2", "e4m3:mx32": "f8e4m3fn", "fp16": "f16"}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Programs without our kernels."""
    return targets.report("round_trips,few", ["t4", "h200"])


@pytest.fixture
def few(plain: dict[str, Any]) -> dict[str, Any]:
    return {kind: {k: v for k, v in programs.items() if k not in NARROW} for kind, programs in plain.items()}


def test_codes_are_decoded_to_16_bits_where_nothing_multiplies_them(few: dict[str, Any]) -> None:
    check(few)
    for kind in few:
        assert {p.operands for p in products(few[kind]["int8_block"])} == {HALF.get(kind, ("bf16", "bf16"))}


def test_a_gradient_that_two_products_read_is_decoded_once_and_no_codes_to_fp32() -> None:
    actual = targets.report("decoded", ["h200"], targets.FP8)["h200"]
    for name, program in actual.items():
        assert not {"16384,2048", "2048,16384", "16384,4096", "4096,16384"} & set(program["wide"]), name
    written = actual["int8_block"]["written"]
    assert sum(written.get(shape, 0) for shape in ("16384,4096", "4096,16384")) == 1, written


def test_codes_that_are_read_where_they_are_made_are_rounded_all_the_same(plain: dict[str, Any]) -> None:
    """XLA treats a cast to fewer bits and back as excess precision, and uses the unrounded value."""
    for kind, programs in plain.items():
        for spec, dtype in NARROW.items():
            assert dtype in programs[spec]["dtypes"], (kind, spec, programs[spec]["dtypes"])


def test_an_fp8_path_that_is_broken_is_reported(few: dict[str, Any]) -> None:
    """A program was written for cuBLASLt, but XLA_FLAGS were changed too late."""
    report = few["h200"]["te_current"]
    assert len(report["warnings"]) == 3
    for line in report["warnings"]:
        assert "run in bf16: XLA did not match the pattern of cuBLASLt's FP8 matmul" in line
        assert "before JAX starts" in line
    assert all("kernels are switched off" in line for line in few["t4"]["te_current"]["warnings"])


@pytest.mark.parametrize("function", ["few_sharded", slow("sharded"), slow("by_hand")])
def test_weights_in_shards_are_gathered_as_codes_and_each_gpu_gets_its_part_of_their_gradients(function: str) -> None:
    actual = targets.report(function, ["h200"], targets.FP8)["h200"]
    own = [("all-reduce", "f32", 4 * 512 * 256 // 2)] if function == "by_hand" else []  # the program's over "data"
    for name, program in actual.items():
        sums = [tuple(c[:3]) for c in program["sums"] if c[2] > 4096]
        assert sums == [("reduce-scatter", "bf16", 2 * 512 * 256), *own], name
        if not name.endswith(targets.WITHOUT_KERNELS):
            kernels = {product[0] for product in program["products"]}
            assert kernels & {"__gpu$xla.gpu.ptx", "triton_kernel_call_ffi"}, name
            assert any("mosaic" in kernel or "matmul$f8" in kernel for kernel in kernels), name
            assert not program["warnings"], name
        gathered = [(dtype, shape) for dtype, shape in program["gathers"] if 512 in shape and 256 in shape]
        assert gathered, (name, program["gathers"])
        assert all(dtype in ("u8", "s8", "f8e4m3fn") for dtype, _ in gathered), (name, gathered)


# Calls of kernels that compute the operands of a linear layer.
QUANTIZERS = {"mxfp8": {"quantize": 5}, "nvfp4": {"nvfp4": 5, "transformed_amax": 2}}
# Products of the plan: three per linear layer. There are seven (Llama) or two (Linen) in each of four blocks. nvfp4
# leaves out the first and last block.
BLOCK_SCALED = {"mxfp8": 3, "nvfp4": 3} | {
    f"{recipe} {model}": 3 * linears * blocks
    for recipe, blocks in (("mxfp8", 4), ("nvfp4", 2))
    for model, linears in (("llama", 7), ("linen", 2))
}


@pytest.mark.parametrize("function", ["block_scaled", slow("block_scaled_sharded"), slow("block_scaled_models")])
def test_block_scaled_products_are_one_call_of_cudnn_on_a_b200(function: str) -> None:
    """No decoded copy of an operand is written, and no other product reads codes."""
    for name, program in targets.report(function, ["b200"])["b200"].items():
        dtype = "f4e2m1fn" if name.startswith("nvfp4") else "f8e4m3fn"
        listed = products(program)
        assert {(p.operation, p.operands) for p in listed} == {("__cudnn$blockScaledDot", (dtype, dtype))}, (
            name,
            listed,
        )
        assert sum(p.executions for p in listed) == BLOCK_SCALED[name], name
        assert not program["warnings"], name
        if name in QUANTIZERS:
            assert not program["wide"], name  # nor the transformed matrix
            assert sum(program["kernels"].values()) == sum(QUANTIZERS[name].values()), (name, program["kernels"])
        if name == "mxfp8":
            assert not program["written"], name
        if name.endswith("linen"):  # bf16 weights, only in the edge blocks
            edges = 4 - BLOCK_SCALED[name] // 6
            assert [program["written"].get(shape, 0) for shape in ("128,256", "256,128")] == [edges] * 2, name
        if function == "block_scaled_sharded":
            gathered = {dtype for dtype, shape in program["gathers"] if math.prod(shape) > 1024}
            assert gathered <= {"u8", "f8e4m3fn"}, (name, program["gathers"])
            assert [c[0] for c in program["sums"] if c[2] > 1024] == ["reduce-scatter"], (name, program["sums"])
        if function == "block_scaled":
            assert program["kernels"] == QUANTIZERS[name], name


@pytest.mark.parametrize(
    ("columns", "rotation", "capability", "impl", "reason"),
    [("e2m1:nvblock16", 16, 100, "triton", "the nvfp4 kernel supports it"),
     ("e2m1:nvblock16", 16, 80, "xla", "fp8 conversions need 89"),
     ("e4m3", None, 100, "xla", "plain FP8 and int8 codes, not e2m1:nv16")],
)  # fmt: skip
def test_the_nvfp4_kernel_makes_its_codes_alone(
    columns: str, rotation: int | None, capability: int, impl: str, reason: str
) -> None:
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    actual = chosen(
        functools.partial(quantize, rows="e2m1:nv16", columns=columns, rotation=rotation), x, capability=capability
    )
    assert actual.impl == impl
    assert reason in actual.reason


@pytest.mark.slow
def test_rows_of_int8_are_multiplied_by_the_kernel_on_hopper_alone() -> None:
    """Also with sharding: codes are sent. If the contraction is sharded, its sums are sent in 16 bits."""
    actual = targets.report("switchback", ["a100", "h200"], targets.FP8)
    for kind, operation in (("a100", "__cublas$lt$matmul"), ("h200", "mosaic_gpu_v2")):
        gathers, sums = {"tokens": [["s8", [512, 256]]] * 2, "inputs": []}, {"tokens": "f32", "inputs": "bf16"}
        for name, program in actual[kind].items():
            listed = products(program)
            assert {(p.operation, p.operands) for p in listed} == {(operation, ("s8", "s8"))}, (kind, name, listed)
            assert sum(p.executions for p in listed) == 2, (kind, name)
            assert program["gathers"] == gathers[name], (kind, name)
            large = [(c[0], c[1]) for c in program["sums"] if c[2] >= 2 * 512 * 256]
            assert large == [("all-reduce", sums[name])], (kind, name)
        assert len(actual[kind]) == 2
    # Sums in int32 stay in the kernel. XLA prepares only vectors of scales for it.
    assert {shape for program in actual["h200"].values() for shape in program["wide"]} <= {"512,1", "1024,1"}


@pytest.mark.slow
def test_kernels_of_int8_codes_run_where_gpus_convert_no_fp8() -> None:
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    for kind, capability in targets.CAPABILITIES.items():
        with choice.target(capability=capability):
            noisy = {"rows": "int8:block128+stochastic", "columns": "int8:token", "key": jax.random.key(0)}
            assert chosen(functools.partial(quantize, **noisy), x).impl == "triton", kind
            for spec in ("e4m3", "e5m2"):
                actual = chosen(functools.partial(quantize, rows=spec), x)
                assert (actual.impl == "triton") == (capability >= 89), kind
                assert (
                    actual.impl == "triton" or f"capability {capability}, and fp8 conversions need 89" in actual.reason
                )
    text = ""
    with choice.target(capability=80):
        text = jax.jit(lambda x: quantize(x, "int8:block128", "same")).trace(x).lower(
            lowering_platforms=("cuda",)).as_text()  # fmt: skip
    assert triton_calls(text)


def test_products_leave_multiprocessors_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_mosaic, "call", lambda name, kernel, operands, *_: kernel(*operands))
    a, b = (
        jax.eval_shape(lambda x: fp8jax.quantize(x, "e4m3:token"), jax.ShapeDtypeStruct((rows, 1024), jnp.float32))
        for rows in (4096, 2048)
    )
    product = jax.jit(lambda a, b: matmul(a, b, impl="mosaic"))
    grids = {}
    for free in (0, 8, 7, 0):
        with choice.target(capability=90, free_multiprocessors=free):
            grids[free] = re.findall(r"grid=\((\d+),\)", str(product.trace(a, b).jaxpr))
    assert grids == {0: ["66"], 8: ["62"], 7: ["62"]}  # clusters of two on 132, 124 and 125
    with (
        pytest.raises(ValueError, match=r"free_multiprocessors must be in \[0, 64\], got 100"),
        choice.target(free_multiprocessors=100),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"capability; use 80 for an A100 or 90 for an H200, got 8"),
        choice.target(capability=8),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", targets.FP8])
def test_every_recipe_on_every_gpu(flags: str) -> None:
    actual = targets.report("linears", list(targets.CAPABILITIES), flags)
    check(actual)
    for kind, capability in targets.CAPABILITIES.items():
        ran = {p.operation for p in products(actual[kind]["te_current"])}
        assert (ran == {"__cublas$lt$matmul$f8"}) == (bool(flags) and capability >= 89), (kind, ran)


@pytest.mark.slow
def test_experts_in_int8_blocks_are_multiplied_by_their_kernels_and_others_are_reported() -> None:
    actual = targets.report("experts", ["h200"])
    check(actual)
    ran = {name: {(p.kernel, p.operands, p.executions) for p in products(f)} for name, f in actual["h200"].items()}
    int8, bf16 = ("s8", "s8"), ("bf16", "bf16")
    assert ran["int8_fallback"] == {("int8_grouped_block", int8, 2), ("int8_grouped_block_dw", int8, 1)}
    assert ran["jetfire"] == {("bf16_grouped", bf16, 2), ("bf16_grouped_dw", bf16, 1)}
    (warning,) = actual["h200"]["jetfire"]["warnings"]
    assert "codes are decoded: its scales are of tensors and rows, not of int8:group32" in warning


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h200", "a100"])
def test_codes_of_ten_bits_are_packed_and_unpacked_where_norms_and_activations_are_computed(kind: str) -> None:
    actual = {name: programs["block"] for name, programs in targets.report("ten_bits", [kind, "t4"]).items()}
    # Packed rows of 512 and of 1,280 codes, and only their high bits, which XLA computes first.
    packed = {f"1024,{n // 4 * part}" for n in (512, 1280) for part in (5, 1)}
    once = {"forward": 1, "backward": 1, "encode_residuals": 1, "cotangents": 1}
    others = {"fallback", "quantize", "transpose", "multiply"}
    assert {k: n for k, n in actual[kind]["kernels"].items() if k not in others} == once
    assert not packed & {*actual[kind]["bytes"]}
    assert packed & {*actual["t4"]["bytes"]}  # without such a kernel


@pytest.mark.slow
def test_telemetry_needs_little_more_memory() -> None:
    """Four blocks with saved codes.

    Tensors that are kept for statistics would be several times as large as the codes.
    """
    (actual,) = targets.report("observed", ["h200"]).values()
    sizes = {name: program["temporaries"] for name, program in actual.items()}
    assert sizes["observed"] < 1.3 * sizes["plain"], sizes
