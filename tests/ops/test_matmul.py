"""Products of quantized matrices against products of their decoded values, in float64."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.dispatch import choice
from fp8jax.ops.matmul import hopper
from fp8jax.ops.matmul.matmul import _dot_decoded as matmul_of_16_bits
from fp8jax.ops.matmul.matmul import _dot_fp16 as matmul_of_fp16
from fp8jax.ops.matmul.matmul import matmul
from fp8jax.ops.quantization.microscaling import fold_microscales
from fp8jax.ops.quantization.quantize import transpose
from tests import matmul_reference
from tests.programs import chosen, dots
from tests.rows import few

FP8 = ["e4m3", "e5m2:token", "e4m3:group32", "e4m3:block32", "e4m3:mx32", "e4m3:mx32+token"]
INT8 = ["int8", "int8:token", "int8:group16", "int8:block32"]
mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic kernels need jax >= 0.11")
OTHER = ["int10:group32", "de8:group32", "e4m3:group32+expand"]


def operands(m=37, n=45, k=100):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(m, k)) * 10.0 ** rng.integers(-2, 3, (m, 1))
    return jnp.asarray(a, jnp.float32), jnp.asarray(rng.normal(size=(n, k)), jnp.float32)


PAIRS = [*itertools.product(FP8, FP8[::2]), *itertools.product(INT8, INT8[1::2])]
# Each on each side, with most others.
DIAGONALS = (FP8, 2 * FP8[::2]), (FP8, 2 * FP8[4::-2]), (INT8, 2 * INT8[1::2])


@pytest.mark.parametrize(
    ("left", "right"), few(PAIRS, *(pair for sides in DIAGONALS for pair in zip(*sides, strict=True)))
)
def test_codes_are_multiplied_exactly_and_scaled(left, right):
    a, b = operands()
    qa, qb = fp8jax.quantize(a, left), fp8jax.quantize(b, right)
    expected = np.asarray(qa.dequantize(), np.float64) @ np.asarray(qb.dequantize(), np.float64).T
    size = np.abs(np.asarray(qa.dequantize(), np.float64)) @ np.abs(np.asarray(qb.dequantize(), np.float64)).T
    actual = np.asarray(jax.jit(matmul)(qa, qb), np.float64)
    # Products of codes are exact in fp32; sums of 100 of them round at most that often.
    assert (np.abs(actual - expected) <= 100 * 2.0**-24 * size).all()


@pytest.mark.parametrize("spec", OTHER)
def test_other_codes_are_multiplied_as_bf16(spec):
    a, b = operands()
    qa, qb = fp8jax.quantize(a, spec), fp8jax.quantize(b, "e4m3")
    expected = (
        np.asarray(qa.dequantize(jnp.bfloat16), np.float64) @ np.asarray(qb.dequantize(jnp.bfloat16), np.float64).T
    )
    np.testing.assert_allclose(np.asarray(matmul(qa, qb)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("spec", ["e4m3", "e4m3:group32", "int8:block32"])
def test_operands_of_the_product_have_eight_bits(spec):
    a, b = operands()
    qa, qb = fp8jax.quantize(a, spec), fp8jax.quantize(b, spec)
    name = "int8" if spec.startswith("int8") else "float8_e4m3fn"
    assert set(dots(matmul, qa, qb)) == {(name, name)}


def test_transposed_codes_are_the_transposed_matrix():
    a, _ = operands()
    for spec in ("e4m3", "int8:block32"):
        q = fp8jax.quantize(a, spec)
        np.testing.assert_array_equal(np.asarray(transpose(q).dequantize()), np.asarray(q.dequantize()).T)
    with pytest.raises(ValueError, match="cannot be used for the transposed matrix"):
        transpose(fp8jax.quantize(a, "e4m3:group32"))


def test_wrong_operands_are_refused():
    a, b = operands()
    with pytest.raises(ValueError, match=r"matmul expects \(M, K\) and \(N, K\)"):
        matmul(a, b.T)
    with pytest.raises(ValueError, match="a scale for each contracted index"):
        matmul(fp8jax.quantize(a, "e4m3:channel"), fp8jax.quantize(b, "e4m3"))
    for granularity, size in (("token", None), ("group", 8), ("mx", 8)):
        with pytest.raises(ValueError, match="a scale for each contracted index"):
            matmul(fp8jax.quantize(a, "e4m3"), fp8jax.quantize(b, fp8jax.QuantSpec("e4m3", granularity, size, axis=-2)))


def test_scales_of_the_indices_of_the_first_axis_are_those_of_rows():
    a, b = operands()
    spec = fp8jax.QuantSpec("e4m3", "channel", axis=0)
    actual, expected = (matmul(fp8jax.quantize(a, s), fp8jax.quantize(b, "e4m3")) for s in (spec, "e4m3:token"))
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_a_nan_in_an_operand_shows_in_its_row():
    a, b = operands()
    for spec in ("e4m3:token", "int8:token"):
        y = np.asarray(matmul(fp8jax.quantize(a.at[3, 5].set(jnp.nan), spec), fp8jax.quantize(b, spec)))
        assert np.isnan(y[3]).all()
        assert np.isfinite(np.delete(y, 3, 0)).all()


CHOICES = [
    ("e4m3", "e4m3", "mosaic", "tensors"),
    ("e5m2", "e4m3", "mosaic", "tensors"),
    ("e5m2", "e5m2", "mosaic", "rows"),
    ("e4m3:token", "e4m3", "mosaic", "rows"),
    ("e4m3:group128", "e4m3:block128", "mosaic", "groups"),
    ("e4m3:block128", "e4m3:token", "mosaic", "groups"),
    ("e4m3:mx32", "e4m3", "mosaic", "microscaled"),
    ("e4m3:token", "e4m3:mx32+token", "mosaic", "microscaled"),
    ("e4m3:mx32", "e4m3:mx32", "xla", "no kernel"),
    ("e4m3:mx16", "e4m3", "xla", "no kernel"),
    ("e4m3:group32", "e4m3:block32", "xla", "no kernel"),
    ("int8", "int8", "mosaic", "tensors"),
    ("int8:token", "int8", "mosaic", "rows"),
    ("int8:token", "int8:token", "mosaic", "rows"),
    ("int8:token", "int8:group128", "xla", "int8 kernels support"),
    ("int8:block32", "int8:block32", "xla", "int8 kernels support"),
    ("int8", "e4m3", "xla", "or int8 operands"),
    ("e4m3:group128+expand", "e4m3", "xla", "not in a matmul format"),
]


@mosaic
@pytest.mark.parametrize(("left", "right", "impl", "reason"), CHOICES)
def test_what_is_chosen_on_hopper(left, right, impl, reason):
    a, b = (fp8jax.quantize(x, spec) for x, spec in zip(operands(k=300), (left, right), strict=True))
    actual = chosen(matmul, a, b, capability=90)
    assert actual.impl == impl
    assert reason in actual.reason
    assert "CUDA" in chosen(matmul, a, b).reason
    if reason in ("no kernel", "not in a matmul format", "int8 kernels support"):
        with pytest.raises(ValueError, match=reason), choice.target(capability=90):
            matmul(a, b, impl="mosaic")


@mosaic
def test_long_contractions_and_other_gpus(monkeypatch):
    a, b = (fp8jax.quantize(x, "e4m3") for x in operands(8, 8, 8192))
    short = [fp8jax.quantize(x, "e4m3") for x in operands(8, 8, 4096)]
    for flags, impl in (("--xla_gpu_enable_triton_gemm=false", "xla"), ("", "mosaic")):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert chosen(matmul, *short, capability=90).impl == impl
        assert chosen(matmul, *[fp8jax.quantize(x, "int8") for x in operands(8, 8, 64)], capability=90).impl == "mosaic"
    rows = [fp8jax.quantize(x, "int8:token") for x in operands(8, 8, 64)]
    with choice.target(capability=75):
        block = fp8jax.quantize(jnp.ones((8, 256)), "int8:block128")
        assert "needs an Ampere, Ada or Hopper GPU" in chosen(matmul, block, block).reason
    long = jax.eval_shape(lambda x: fp8jax.quantize(x, "int8:token"), jax.ShapeDtypeStruct((8, 2**17), jnp.float32))
    assert "int32 holds sums of 131071 products, not 131072" in chosen(matmul, long, long, capability=90).reason
    for capability, impl in ((90, "mosaic"), (89, "xla"), (80, "xla"), (100, "xla")):
        assert chosen(matmul, a, b, capability=capability).impl == impl
        assert chosen(matmul, *rows, capability=capability).impl == impl
    x, _ = operands(8, 8, 8192)
    assert "scaled_matmul" in chosen(matmul, fp8jax.quantize(x, "e4m3:mx32"), b, capability=100).reason
    with pytest.raises(ValueError, match="Hopper"), choice.target(capability=100):
        matmul(a, b, impl="mosaic")
    with pytest.raises(ValueError, match="unknown impl 'triton'"):
        matmul(a, b, impl="triton")


BLOCK_SCALED = [("e4m3:mx32+ocp+roundup", "e4m3:mx32+ocp+roundup"), ("e2m1:nv16", "e2m1:nvblock16"),
                ("e2m1:nv16", "e2m1:nv16")]  # fmt: skip
MORE = [("e4m3", "e4m3:token"), ("e5m2:block128", "e4m3:group128"), ("e4m3:group128", "e4m3"),
        ("e4m3:group128", "e4m3:block128"), ("e4m3:block512", "e4m3:group128"),
        ("e4m3:mx32+ocp", "e4m3:token"), ("e4m3", "e4m3:mx32+token"),
        ("int8:token", "int8"), ("int8", "int8:token"), ("int8:token", "int8:token"), ("int8", "int8")]  # fmt: skip


@mosaic
@pytest.mark.parametrize(("left", "right"), MORE)
def test_kernels_get_the_scales_that_they_need(left, right, monkeypatch):
    """With the references in place of the kernels."""
    monkeypatch.setattr(hopper, "capability", lambda: 90)
    for module, name in (("matmul_mosaic", "matmul"), ("matmul_block_mosaic", "matmul_block"),
                         ("matmul_mx_mosaic", "matmul_mx")):  # fmt: skip
        monkeypatch.setattr(f"pallas_kernels.matmul.{module}.{name}", getattr(matmul_reference, name))
    a, b = (fp8jax.quantize(x, spec) for x, spec in zip(operands(k=300), (left, right), strict=True))
    actual = hopper.run(hopper.find_kernel(a, b), True, True, jnp.float32, a, b)
    expected = np.asarray(a.dequantize(), np.float64) @ np.asarray(b.dequantize(), np.float64).T
    size = np.abs(np.asarray(a.dequantize(), np.float64)) @ np.abs(np.asarray(b.dequantize(), np.float64)).T
    assert (np.abs(np.asarray(actual) - expected) <= 300 * 2.0**-24 * size).all()


@mosaic
@pytest.mark.parametrize(("left", "right"), [("e4m3:mx32", "e5m2"), ("e4m3:token", "e4m3:mx32+token")])
@pytest.mark.parametrize("fast", [False, True])
def test_unless_exact_the_kernel_for_rows_gets_folded_codes(left, right, fast, monkeypatch):
    monkeypatch.setattr(hopper, "capability", lambda: 90)
    called = []

    def product(*args, fast, **terms):
        called.append(fast)
        return matmul_reference.matmul(*args, **terms)

    monkeypatch.setattr("pallas_kernels.matmul.matmul_mosaic.matmul", product)
    a, b = (fp8jax.quantize(x, spec) for x, spec in zip(operands(k=300), (left, right), strict=True))
    actual = hopper.run(hopper.find_kernel(a, b), False, fast, jnp.float32, a, b)
    folded = [fold_microscales(q) if q.spec.granularity == "mx" else q for q in (a, b)]
    expected = np.asarray(folded[0].dequantize(), np.float64) @ np.asarray(folded[1].dequantize(), np.float64).T
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert called == [fast]


@mosaic
@pytest.mark.parametrize(("left", "right"), [("e4m3:mx32", "e4m3"), ("e4m3:token", "e4m3:mx32+token"),
                                             ("e4m3:mx32+ocp", "e5m2:mx32+ocp"), *BLOCK_SCALED])  # fmt: skip
def test_the_block_scaled_product(left, right):
    a, b = (fp8jax.quantize(x, spec) for x, spec in zip(operands(k=320), (left, right), strict=True))
    assert chosen(matmul, a, b, capability=100).impl == "xla"
    run = jax.jit(lambda a, b: hopper.run("block_scaled", False, True, jnp.float32, a, b))
    expected = np.asarray(a.dequantize(), np.float64) @ np.asarray(b.dequantize(), np.float64).T
    np.testing.assert_allclose(np.asarray(run(a, b)), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    # On GPUs with such tensor cores this is one operation, and no product of decoded codes.
    lowered = run.trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("block_scaled_dot") == 1
    assert "dot_general" not in lowered


@pytest.mark.parametrize(("left", "right"), BLOCK_SCALED)
def test_block_scaled_codes_are_decoded_without_error_on_other_devices(left, right):
    """In bf16 with outer scales on the sum, only fp32 sums are rounded. In a T4's fp16, values are rounded too."""
    a, b = (fp8jax.quantize(x, spec) for x, spec in zip(operands(k=330), (left, right), strict=True))
    left, right = (np.asarray(q.dequantize(), np.float64) for q in (a, b))
    bound = 330 * 2.0**-24 * (np.abs(left) @ np.abs(right).T)
    for capability in (None, 90, 100):  # 330 is no multiple of a group: no GPU has such a product
        with choice.target(capability=capability):
            actual = matmul(a, b)
            assert "block scaling" not in chosen(matmul, a, b).reason
        assert (np.abs(np.asarray(actual, np.float64) - left @ right.T) <= bound).all()
    with choice.target(capability=75):
        np.testing.assert_allclose(matmul(a, b), left @ right.T, atol=2.0**-9 * np.abs(left @ right.T).max())


@mosaic
def test_equal_products_of_a_program_are_lowered_once():
    """Lowering a Mosaic kernel takes most of a second, and all layers of a model have the same matmuls."""
    a, b = (fp8jax.quantize(jnp.ones((128, 256)), "e4m3") for _ in range(2))

    def three(a, b):
        return [matmul(a, b, impl="mosaic", dtype=dtype) for dtype in (jnp.bfloat16, jnp.bfloat16, jnp.float32)]

    with choice.target(capability=90):
        text = jax.jit(three).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 2


def test_scales_of_the_kernels_own_groups_are_taken_as_they_are():
    q = fp8jax.quantize(jnp.ones((130, 300)), "e4m3:group128")
    assert not jax.make_jaxpr(lambda q: hopper.group_scales(q, 128))(q).eqns


@pytest.mark.parametrize(
    ("spec", "operands_of_the_product"),
    [
        *((spec, "bf16") for spec in ("e4m3", "e5m2:token", "e4m3:group32", "e4m3:mx32", "int8:block32")),
        *((spec, "i8") for spec in ("int8", "int8:token")),
    ],
)
def test_on_a_gpu_without_a_kernel_codes_are_multiplied_in_one_product_of_16_or_of_integer_bits(
    spec, operands_of_the_product
):
    a, b = operands()
    qa, qb = fp8jax.quantize(a, spec), fp8jax.quantize(b, spec)
    multiply = functools.partial(matmul, impl="xla", dtype=jnp.bfloat16)
    with choice.target(capability=90):
        text = jax.jit(multiply).trace(qa, qb).lower(lowering_platforms=("cuda",)).as_text()
        reason = chosen(multiply, qa, qb).reason
    products = re.findall(r"stablehlo\.dot_general.*: \(tensor<\d+x\d+x(\w+)>, tensor<\d+x\d+x(\w+)>\)", text)
    assert products == [(operands_of_the_product,) * 2]
    assert "stablehlo.while" not in text
    assert ("multiplied in bf16" in reason) == (operands_of_the_product == "bf16")
    expected = np.asarray(qa.dequantize(), np.float64) @ np.asarray(qb.dequantize(), np.float64).T
    size = np.abs(np.asarray(qa.dequantize(), np.float64)) @ np.abs(np.asarray(qb.dequantize(), np.float64)).T
    actual = np.asarray(matmul_of_16_bits(jnp.bfloat16, qa, qb), np.float64)
    # Both operands and the result are rounded to 8 bits, half a step each; fp32 sums add almost nothing.
    assert (np.abs(actual - expected) <= 3.1 * 2.0**-9 * size).all()


@pytest.mark.parametrize(
    "spec", ["e4m3", "e5m2:token", "e4m3:group32", "int8:block32", "e4m3:mx32+token", "int10:group32"]
)
def test_on_a_gpu_without_bf16_products_have_operands_of_fp16_which_do_not_overflow(spec):
    """Codes of rows 1e12 apart; fp16 represents neither 1e9 nor 1e-9."""
    a, b = operands()
    a = a * jnp.float32(10) ** jnp.linspace(-9, 9, len(a))[:, None]
    qa, qb = fp8jax.quantize(a, spec), fp8jax.quantize(b, spec)
    with choice.target(capability=75):
        text = jax.jit(matmul).trace(qa, qb).lower(lowering_platforms=("cuda",)).as_text()
        mixed = jax.jit(matmul).trace(qa, b).lower(lowering_platforms=("cuda",)).as_text()
        assert "multiplied in fp16" in chosen(matmul, qa, qb).reason
    for actual in (text, mixed):
        products = re.findall(r"stablehlo\.dot_general.*: \(tensor<\d+x\d+x(\w+)>, tensor<\d+x\d+x(\w+)>\)", actual)
        assert products == [("f16", "f16")]
    for right in (qb, b, b.astype(jnp.float16)):
        left, other = (
            np.asarray(x.dequantize() if isinstance(x, fp8jax.QTensor) else x, np.float64) for x in (qa, right)
        )
        expected, size = left @ other.T, np.abs(left) @ np.abs(other).T
        # 11 bits of each operand, and 2^-24 of the largest in a row.
        unit = 100 * 2.0**-24 * np.abs(left).max(1)[:, None] * np.abs(other).max(1)
        result = np.asarray(matmul_of_fp16(jnp.float32, qa, right), np.float64)
        assert (np.abs(result - expected) <= 2.1 * 2.0**-11 * size + 2 * unit).all()


def test_codes_that_two_products_read_are_decoded_once():
    a, b = operands(64, 48, 96)
    q, left, right = (fp8jax.quantize(x, "int8:block32") for x in (a, b, jnp.ones((32, 64))))
    texts, results = [], []
    for turned in (False, True):

        def both(q, left, right, turned=turned):
            copy = transpose(q, impl="xla")
            return matmul_of_16_bits(jnp.float32, q, left), matmul_of_16_bits(jnp.float32, right, copy, turned)

        program = jax.jit(both).lower(q, left, right).compile()
        texts.append(len(re.findall(r"= f32\[(?:64,96|96,64)\]\S* multiply\(", program.as_text())))
        results.append(program(q, left, right))
    assert texts == [2, 1]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
