"""How calls of Triton kernels are written into programs."""

import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton")


def lowered(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_calls_are_such_that_xla_records_into_command_buffers():
    from pallas_kernels import call_triton, quantize_triton

    if call_triton.OLD and not call_triton.RECORDED:
        pytest.skip("such calls need jax >= 0.11")
    x = jax.ShapeDtypeStruct((128, 256), jnp.uint8)
    text = lowered(lambda x: quantize_triton.transpose(x, compute_capability=90), x)
    (call,) = re.findall(r"custom_call @(triton_kernel_call\w*)\(.*", text)
    assert call == "triton_kernel_call_ffi"
    assert re.search(r'backend_config = \{opaque = "', text)


def test_calls_of_others_stay_as_jax_triton_makes_them():
    import jax_triton

    from pallas_kernels import call_triton, quantize_triton

    def other(x):
        static = {"M": 128, "N": 128, "HIGH": 64, "WIDE": 128}
        shape = jax.ShapeDtypeStruct((128, 128), jnp.uint8)
        given = {"out_shape" if call_triton.OLD else "out_type": shape}
        kernel = quantize_triton._transpose
        return jax_triton.triton_call(x, kernel=kernel, grid=(2,), compute_capability=90, **static, **given)

    text = lowered(other, jax.ShapeDtypeStruct((128, 128), jnp.uint8))
    assert ("@triton_kernel_call(" in text) == call_triton.OLD
    assert text.count("custom_call") == 1
