"""int10 residuals of norms and activations: kernels compiled for GPUs, and compared with their references on one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.core.qtensor import quantize
from fp8jax.core.spec import QuantSpec
from tests.distance import relative
from tests.kernels import h200
from tests.kernels.test_fused import SHARED, python
from tests.rows import slow

pytest.importorskip("jax_triton")

ROWS = 16384
# Maximum registers per thread for an H200, and an eighth more for older GPUs. For norms of 2,048 channels, Triton 3.9
# needs 88 and Triton 3.6 needs 64, without spills.
REGISTERS = {
    "rms norm of 2048": 96, "layer norm of 4096": 96, "rms norm of 8192": 80, "rms norm of 2048, backward": 128,
    "layer norm of 2048, backward": 168, "rms norm of 8192, backward": 128, "kept of silu": 64, "kept of gelu": 48,
    "cotangents of silu": 40, "cotangents of gelu": 40, "silu again, peaks": 128, "cotangents' codes": 80,
}  # fmt: skip


def registers(arch: str, every: int) -> None:
    """Prints `h200.assembled` of a sample of kernels for a 1b model: norms of 2,048 channels, MLPs of 5,632."""
    from pallas_kernels.nonlinear import activation_triton, cotangents_triton, norm_triton, quantize_recomputed_triton
    from pallas_kernels.nonlinear.operations_triton import Operation
    from pallas_kernels.nonlinear.quantize_recomputed_triton import GATE, UP, Operands
    from pallas_kernels.quantization.scaling_triton import Coding

    bf16, e4m3, one = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32(1)
    options, itself = {"compute_capability": int(arch[3:5])}, (None, bf16)
    coding = Coding("group", jnp.int16, 128, scale_dtype=bf16)
    norm = Operation(has_scale=True, format="int10", group=128)
    layer, gelu = (
        norm._replace(centered=True, has_bias=True),
        norm._replace(has_scale=False, is_gated=False, activation=2),
    )
    silu = norm._replace(has_scale=False, saves_activated=True)

    def array(n, dtype=bf16):
        return jax.ShapeDtypeStruct((ROWS, n), dtype)

    def stored(n):
        return array(n // 4 * 5, jnp.uint8), array(n // 128)

    def operands(*arrays, count):
        """Returns operands from `count` pairs of codes and scales and a gradient."""
        return Operands(*arrays[: 2 * count], gradient=arrays[-1])

    def forward(operation, biased=False):
        return lambda x, w: norm_triton.forward(
            operation, x, w, w if biased else None, 1e-5, coding, result=itself, **options
        )

    def backward(operation):
        return lambda codes, scale, rows, w, dy, others: norm_triton.backward(
            operation, codes, scale, rows, w, dy, bf16, others, **options
        )

    rows, wide, codes = jax.ShapeDtypeStruct((ROWS,), jnp.float32), array(5632), stored(5632)
    weight = {n: jax.ShapeDtypeStruct((n,), bf16) for n in (2048, 4096, 8192)}
    lean = silu._replace(saves_activated=False)
    programs = {
        "rms norm of 2048": (forward(norm), array(2048), weight[2048]),
        "layer norm of 4096": (forward(layer, True), array(4096), weight[4096]),
        "rms norm of 8192": (forward(norm), array(8192), weight[8192]),
        **{
            f"{name} norm of {n}, backward": (
                backward(operation), *stored(n), rows, weight[n], array(n), array(n))
            for name, operation, n in (("rms", norm, 2048), ("layer", layer, 2048), ("rms", norm, 8192))
        },
        "kept of silu": (
            lambda g, u: activation_triton.encode_activation_residuals(silu, g, u, coding, result=itself, **options),
            wide, wide),
        "kept of gelu": (
            lambda g: activation_triton.encode_activation_residuals(gelu, g, None, coding, result=itself, **options),
            wide),
        "cotangents of silu": (
            lambda *a: cotangents_triton.cotangents(silu, operands(*a, count=3), **options),
            *codes, *codes, *codes, wide),
        "cotangents of gelu": (
            lambda *a: cotangents_triton.cotangents(gelu, operands(*a, count=1), **options), *codes, wide),
    }  # fmt: skip
    if arch != "sm_80":
        programs |= {
            "silu again, peaks": (
                lambda *a: quantize_recomputed_triton.quantize_and_predict(lean, operands(*a, count=2), one, e4m3,
                    **options), *codes, *codes, wide),
            "cotangents' codes": (
                lambda *a: quantize_recomputed_triton.quantize(
                    lean, (GATE, UP), operands(*a, count=2), (one, one), e4m3, rows=True, columns=True, **options),
                *codes, *codes, wide),
        }  # fmt: skip
    chosen = list(programs.items())[::every]
    print(json.dumps({name: h200.assembled(program, *shapes, arch=arch) for name, (program, *shapes) in chosen}))


@pytest.mark.skipif(h200.missing() is not None, reason="the group compile is not installed")
@pytest.mark.parametrize(("arch", "every"), [("sm_90a", 6), slow("sm_90a", 1), slow("sm_80", 1), slow("sm_89", 1)])
def test_kernels_compile_without_spills(arch, every):
    command = f"from tests.kernels import test_ten_bits; test_ten_bits.registers({arch!r}, {every})"
    actual = python("-c", command, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    most = {name: REGISTERS[name] * (1 if arch == "sm_90a" else 1.125) for name in actual}
    assert {name for name, (used, spilled, _) in actual.items() if spilled or used > most[name]} == set(), actual
    assert max(shared for _, _, shared in actual.values()) <= SHARED, actual


def accesses():
    """Prints the number of eight-byte accesses of the kernels of SiLU's context, by channels."""
    from pallas_kernels.nonlinear import activation_triton, cotangents_triton
    from pallas_kernels.nonlinear.operations_triton import Operation
    from pallas_kernels.nonlinear.quantize_recomputed_triton import Operands
    from pallas_kernels.quantization.scaling_triton import Coding

    ten_bits = Coding("group", jnp.int16, 128, scale_dtype=jnp.bfloat16)
    silu, options = Operation(format="int10", group=128, saves_activated=True), {"compute_capability": 90}
    counts = {}
    for n in (1632, 1648):
        wide = jax.ShapeDtypeStruct((ROWS, n), jnp.bfloat16)
        codes = (
            jax.ShapeDtypeStruct((ROWS, n // 4 * 5), jnp.uint8),
            jax.ShapeDtypeStruct((ROWS, -(-n // 128)), jnp.bfloat16),
        )
        written = h200.ptx(
            lambda g, u: activation_triton.encode_activation_residuals(
                silu, g, u, ten_bits, result=(None, jnp.bfloat16), **options
            ),
            wide, wide,
        )  # fmt: skip
        read = h200.ptx(
            lambda *a: cotangents_triton.cotangents(silu, Operands(*a[:6], gradient=a[6]), **options),
            *codes, *codes, *codes, wide,
        )  # fmt: skip
        counts[n] = written.binary.count("st.global.v2.b32"), read.binary.count("ld.global.v2.b32")
    print(json.dumps(counts))


@pytest.mark.skipif(h200.missing() is not None, reason="the group compile is not installed")
def test_rows_of_codes_that_begin_at_multiples_of_four_are_accessed_four_bytes_at_a_time():
    """Packed rows of 1,648 channels have 2,060 bytes: eight-byte stores were misaligned on an H200."""
    command = "from tests.kernels import test_ten_bits; test_ten_bits.accesses()"
    counts = python("-c", command, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    assert min(counts["1632"]) > 0
    assert counts["1648"] == [0, 0]


def values(seed, *shape):
    """bf16 values; one in a hundred is thirty times as large."""
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], shape)
    return jnp.where(jax.random.uniform(keys[1], shape) < 0.01, 30 * x, x).astype(jnp.bfloat16)


def assert_close(actual, expected, share=0.0):
    """Arrays in bf16. Sums and approximate functions may round to the next value, and a fraction of them further."""
    a, b = (np.asarray(x, np.float32) for x in (actual, expected))
    assert np.isfinite(b).all()
    # If terms cancel, the step is that of the terms.
    step = 2.0**-7 * (np.abs(b) + 1e-3 * np.abs(b).max())
    assert np.mean(np.abs(a - b) > step) <= share
    assert np.mean(a != b) < 1e-2
    assert relative(a, b) < 1e-3


def assert_codes_close(part, x, share=3e-4):
    """Codes and scales are equal, except for a fraction: XLA on GPUs may not round reciprocals correctly."""
    q = quantize(x, QuantSpec("int10", "group", 128, scale_format="bf16"))
    for actual, expected in zip(part, (q.codes, q.scale), strict=True):
        assert actual.shape == expected.shape
        assert np.mean(np.asarray(actual) != np.asarray(expected)) <= share


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [2048, 1600])
@pytest.mark.parametrize("centered", [False, True])
def test_a_norm_keeps_and_reads_ten_bits_on_a_gpu_as_the_reference_does(centered, channels):
    from fp8jax.ops.quantization import fused_kernels, fused_reference
    from pallas_kernels.nonlinear.operations_triton import Operation
    from pallas_kernels.quantization.scaling_triton import Coding

    coding = Coding("group", jnp.int16, 128, scale_dtype=jnp.bfloat16)
    operation = Operation(has_scale=True, centered=centered, has_bias=centered, format="int10", group=128)
    x, dy, others = (values(i, ROWS, channels) for i in range(3))
    weight, bias = (1 + 0.1 * values(3 + i, channels) for i in range(2))

    def forward(on):
        bias_of = bias if centered else None
        return jax.jit(lambda x: on.forward(operation, x, weight, bias_of, 1e-6, coding, result=(None, x.dtype)))(x)

    actual, expected = forward(fused_kernels), forward(fused_reference)
    if centered:
        # The code of a difference from the mean may be the next one, because the order of the sum is different.
        assert (
            max(np.mean(np.asarray(a) != np.asarray(b)) for a, b in zip(actual[:2], expected[:2], strict=True)) < 1e-3
        )
    else:
        assert_codes_close(actual[:2], x)
    np.testing.assert_allclose(np.asarray(actual[2]), np.asarray(expected[2]), rtol=1e-5)
    assert_close(actual[-1], expected[-1])

    def backward(on):
        run = jax.jit(lambda *a: on.backward(operation, *a[:3], weight, a[3], jnp.bfloat16, a[4]))
        return run(*expected[:3], dy, others)

    (dx, *sums, amax), (want_dx, *want_sums, _) = backward(fused_kernels), backward(fused_reference)
    assert_close(dx, want_dx)
    assert float(amax) == np.abs(np.asarray(dx).astype(np.float32)).max()
    for a, b in zip(sums, want_sums, strict=True):
        assert (a is None) == (b is None)
        assert a is None or relative(a, b) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [5632, 1648])
@pytest.mark.parametrize(("gated", "activation"), [(True, "silu"), (False, "gelu_tanh")])
def test_an_activation_keeps_and_reads_ten_bits_on_a_gpu_as_the_reference_does(gated, activation, channels):
    from fp8jax.ops.quantization import fused_kernels, fused_reference
    from pallas_kernels.nonlinear.operations_triton import ACTIVATIONS, Operation
    from pallas_kernels.nonlinear.quantize_recomputed_triton import Operands
    from pallas_kernels.quantization.scaling_triton import Coding

    coding = Coding("group", jnp.int16, 128, scale_dtype=jnp.bfloat16)
    operation = Operation(ACTIVATIONS.index(activation), gated, saves_activated=gated, format="int10", group=128)
    gate, up, dy = (values(i, ROWS, channels) for i in range(3))
    keep = jax.jit(
        lambda g, u: fused_kernels.encode_activation_residuals(operation, g, u, coding, result=(None, g.dtype))
    )
    parts, _, y = keep(gate, up if gated else None)
    # One operation at a time: within a program, XLA may or may not round intermediate values.
    activated = fused_reference.ACTIVATIONS[activation](gate.astype(jnp.float32))
    assert_codes_close(parts[0], gate)
    if gated:
        assert_codes_close(parts[1], up)
        assert_codes_close(parts[2], activated.astype(jnp.bfloat16), 2e-3)
    else:
        assert parts[1:] == [None, None]
    assert_close(y, (activated * up.astype(jnp.float32) if gated else activated).astype(jnp.bfloat16))
    arrays = [a for part in parts for a in (part or (None, None))]

    def back(on):
        return jax.jit(lambda *a: on.cotangents(operation, Operands(*a[:-1], gradient=a[-1])))(*arrays, dy)

    for a, b in zip(back(fused_kernels), back(fused_reference), strict=True):
        assert_close(a, b)
