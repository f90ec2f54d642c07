"""Calls of Triton kernels in lowered programs."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from fp8jax.ops.dispatch import choice
from fp8jax.ops.quantization import quantize as op
from tests.kernels import h200
from tests.programs import chosen

pytest.importorskip("jax_triton")


def lowered(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_calls_of_jax_triton_are_such_that_xla_records_into_command_buffers(monkeypatch):
    from pallas_kernels.dispatch import call_triton, launch_triton
    from pallas_kernels.quantization import transpose_triton

    monkeypatch.setenv(launch_triton.VARIABLE, "triton")
    if call_triton.IS_BEFORE_04 and not call_triton.USES_FFI_CALLS:
        pytest.skip("such calls need jax >= 0.11")
    x = jax.ShapeDtypeStruct((128, 256), jnp.uint8)
    text = lowered(lambda x: transpose_triton.transpose(x, compute_capability=90), x)
    (call,) = re.findall(r"custom_call @(triton_kernel_call\w*)\(.*", text)
    assert call == "triton_kernel_call_ffi"
    assert re.search(r'backend_config = \{opaque = "', text)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8])
def test_kernels_read_the_codes_of_a_transposed_constant(monkeypatch, dtype):
    from pallas_kernels.quantization import quantize_triton, transpose_triton

    monkeypatch.setattr(quantize_triton, "call", lambda kernel, inputs, *_, **__: (inputs[0].T,))
    codes = jax.random.normal(jax.random.key(0), (6, 10)).astype(dtype)
    transposed = jax.jit(lambda: jax.jit(lambda x: jax.jit(transpose_triton.transpose)(x.T))(codes))()
    assert (transposed == codes).all()


def test_calls_of_others_stay_as_jax_triton_makes_them():
    import jax_triton

    from pallas_kernels.dispatch import call_triton
    from pallas_kernels.quantization import scaling_triton, transpose_triton

    def other(x):
        static = {"M": 128, "N": 128, "BLOCK_M": 64, "BLOCK_N": 128, "CODING": scaling_triton.NO_CODING}
        shape = jax.ShapeDtypeStruct((128, 128), jnp.uint8)
        shape_argument = {"out_shape" if call_triton.IS_BEFORE_04 else "out_type": shape}
        kernel = transpose_triton._transpose
        factor = jnp.ones((1, 1))
        return jax_triton.triton_call(
            x, factor, kernel=kernel, grid=(2,), compute_capability=90, **static, **shape_argument
        )

    text = lowered(other, jax.ShapeDtypeStruct((128, 128), jnp.uint8))
    assert ("@triton_kernel_call(" in text) == call_triton.IS_BEFORE_04
    assert text.count("custom_call") == 1


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_calls_are_compiled_as_xla_and_not_as_triton_likes_them():
    """An assembler of CUDA 13.0 accepts the program, multiply-adds are fused, and unread calls are removed."""
    from pallas_kernels.dispatch import call_triton
    from pallas_kernels.quantization import transpose_triton

    compiled, original = [], call_triton.triton_lib.compile_ttir_to_ptx_inplace
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # the default from Triton 3.10 on
        record = lambda *args: compiled.append((args[2], original(*args))) or compiled[-1][1]  # noqa: E731
        patch.setattr(call_triton.triton_lib, "compile_ttir_to_ptx_inplace", record)
        call_triton.check(86)  # which no other test has compiled
        call_triton.check(103)
    (options, kernel_asm), (_, newer) = compiled
    assert options.enable_fp_fusion
    major, minor = map(int, re.search(r"\.version (\d+)\.(\d+)", kernel_asm.binary).groups())
    assert (major, minor) < (9, 1)
    assert call_triton.IS_BEFORE_04 or ".version 8.8" in newer.binary

    def unread(x):
        return transpose_triton.transpose(x, compute_capability=90), x + 1

    jaxpr = jax.make_jaxpr(unread)(jnp.ones((128, 256), jnp.uint8))
    pruned, used = call_triton.partial_eval.dce_jaxpr(jaxpr.jaxpr, [False, True])
    assert "triton" in str(jaxpr)
    assert "triton" not in str(pruned)
    assert used == [True]


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_packages_that_do_not_work_together_are_told_and_xla_takes_over(monkeypatch):
    import jax_triton

    assert choice.missing_triton("quantization.quantize_triton") is None
    assert choice._broken_triton(90) is None

    def broken(*args, **kwargs):
        raise TypeError("rule() takes 2 positional arguments but 3 were given\nand more")

    monkeypatch.setattr(jax_triton, "triton_call", broken)
    choice._broken_triton.cache_clear()
    choice._missing_triton.cache_clear()
    try:
        reason = choice.missing_triton("quantization.quantize_triton")
        assert re.fullmatch(
            r"jax-triton [\d.]+, triton [\d.]+, jax [\d.]+ do not work together \(TypeError: rule\(\) takes 2 "
            r"positional arguments but 3 were given\)",
            reason,
        )
        x = jnp.ones((128, 256))
        quantize = functools.partial(op.quantize, rows="e4m3")
        assert chosen(quantize, x, capability=90) == choice.Choice("xla", f"not the kernel: {reason}")
        with pytest.raises(ValueError, match=r"impl 'triton' cannot run: jax-triton .* do not work together"):
            quantize(x, impl="triton")
        monkeypatch.undo()
        monkeypatch.setenv("FP8JAX_KERNEL_CALLS", "cuda")
        choice._broken_triton.cache_clear()
        choice._missing_triton.cache_clear()
        with pytest.raises(ValueError, match="FP8JAX_KERNEL_CALLS='cuda'; use 'xla' or 'triton'"):
            choice.missing_triton("quantization.quantize_triton")
    finally:
        choice._broken_triton.cache_clear()
        choice._missing_triton.cache_clear()
