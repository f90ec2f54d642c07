"""Mosaic kernels are lowered once per process, to the same custom call that Pallas creates each time."""

import dataclasses
import gc
import re
import sys
import weakref

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import call_mosaic, multiprocessors
from pallas_kernels.matmul import matmul_block_mosaic, matmul_int8_mosaic, matmul_mosaic, matmul_mx_mosaic

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="Mosaic's kernels need jax 0.11")

M, N, K = 256, 384, 512


def _shape(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


A, B = _shape(M, K, dtype=jnp.float8_e4m3fn), _shape(N, K, dtype=jnp.float8_e4m3fn)
INTEGERS = _shape(M, K, dtype=jnp.int8), _shape(N, K, dtype=jnp.int8)
BLOCKS = _shape(M // 128, K // 128), _shape(N // 128, K // 128)


def _plain(**kwargs):
    def program(a, b, **vectors):
        return matmul_mosaic.matmul(a, b, **vectors, **kwargs)

    return program


def _fallback(a, b, a_scale, b_scale, codes, scale, used):
    residual = matmul_int8_mosaic.FallbackResidual(codes, scale, used)
    return matmul_int8_mosaic.matmul_int8_block(a, b, a_scale, b_scale, residual=residual)


def _left(count):
    def program(a, b):
        with multiprocessors.reserved_sms(count):
            return matmul_mosaic.matmul(a, b)

    return program


TILE = matmul_mosaic.best_tile(M, N, K)
# name -> program, its arguments and its keyword arguments. Each differs from another in one thing that distinguishes
# kernels.
PROGRAMS = {
    "plain": (_plain(), (A, B), {}),
    "promoted": (_plain(fast=False), (A, B), {}),
    "fp32": (_plain(out_dtype=jnp.float32), (A, B), {}),
    "other tile": (_plain(tile=dataclasses.replace(TILE, band_width=TILE.band_width // 2)), (A, B), {}),
    "e5m2": (_plain(), (A, _shape(N, K, dtype=jnp.float8_e5m2)), {}),
    "fewer rows": (_plain(), (_shape(M - 1, K, dtype=jnp.float8_e4m3fn), B), {}),
    "int8": (_plain(), INTEGERS, {}),
    "row": (_plain(), (A, B), {"row_scale": _shape(M)}),
    "column": (_plain(), (A, B), {"column_scale": _shape(N)}),
    "fewer multiprocessors": (_left(8), (A, B), {}),
    "blocks": (matmul_block_mosaic.matmul_block, (A, B, _shape(M, K // 128), BLOCKS[1]), {}),
    "columns": (matmul_block_mosaic.matmul_block, (A, B, _shape(M, K // 128), _shape(N, K // 128)), {}),
    "microscaled": (matmul_mx_mosaic.matmul_mx, (A, B, _shape(M, K // 32, dtype=jnp.uint8)), {}),
    "int8 blocks": (matmul_int8_mosaic.matmul_int8_block, (*INTEGERS, *BLOCKS), {}),
    "fallback": (_fallback, (*INTEGERS, *BLOCKS, INTEGERS[0], BLOCKS[0], _shape(2, 4, dtype=jnp.bool_)), {}),
}


def _text(name):
    program, operands, vectors = PROGRAMS[name]
    return (
        jax.jit(lambda *x, **y: program(*x, **y))
        .trace(*operands, **vectors)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


def _without_code(text):
    return re.sub(r'(kernel_hash|module) = "[^"]*"', "", text)


@pytest.fixture
def recorded(monkeypatch):
    """Returns a list with an entry for each kernel that Pallas lowers."""
    lowered = []
    custom_call = call_mosaic._extract_custom_call
    monkeypatch.setattr(call_mosaic, "_KERNELS", {})
    monkeypatch.setattr(call_mosaic, "_extract_custom_call", lambda *x: lowered.append(x) or custom_call(*x))
    return lowered


def test_repeated_calls_are_those_that_pallas_makes_and_kernels_that_differ_are_told_apart(recorded, monkeypatch):
    first = {name: _text(name) for name in PROGRAMS}
    count = len(recorded)
    assert count == len(PROGRAMS)
    assert {name: _text(name) for name in PROGRAMS} == first
    assert len(recorded) == count
    # Pallas creates other bytes each time, so XLA would compile each call again.
    monkeypatch.setattr(call_mosaic, "call", lambda name, kernel, operands, *_: kernel(*operands))
    for name in ("row", "blocks", "microscaled", "fallback"):
        assert _without_code(_text(name)) == _without_code(first[name])


def test_alike_products_of_a_program_are_lowered_once(recorded):
    def program(a, b, c):
        return matmul_mosaic.matmul(a, b), matmul_mosaic.matmul(c, b)

    text = jax.jit(program).trace(A, B, A).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 2
    assert len(recorded) == 1


def test_a_printed_program_has_no_code_of_kernels():
    assert len(str(jax.make_jaxpr(lambda a, b: matmul_mosaic.matmul(a, b))(A, B))) < 3000


def test_what_is_no_call_of_its_operands_alone_is_lowered_each_time(recorded):
    """A kernel whose lowering has side effects is lowered by Pallas each time."""
    assert call_mosaic._extract_custom_call(lambda x: x + 1, [_shape(8, 128)]) is None
    assert call_mosaic._extract_custom_call(lambda x, y: matmul_mosaic.matmul(y, x), [B, A]) is None
    assert call_mosaic._extract_custom_call(lambda x, y: matmul_mosaic.matmul(x, y) + 1, [A, B]) is None

    def program(x):
        return call_mosaic.call("sum", lambda x: [x + 3], [x], [_shape(8, 128)], "only here")[0]

    text = jax.jit(program).trace(_shape(8, 128)).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.add" in text


@pytest.mark.usefixtures("young_heap")
def test_no_tracer_outlives_its_trace(recorded):
    """The cache of a kernel keeps none of the arrays that it was called with."""
    calls = []

    def program(a, b, scale):
        calls.append(weakref.ref(scale))
        return matmul_mosaic.matmul(a, b, row_scale=scale)

    text = jax.jit(program).trace(A, B, _shape(M)).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu_v2" in text
    jax.clear_caches()
    gc.collect()
    assert calls[0]() is None


def test_a_batch_is_multiplied_one_by_one():
    batched = jax.ShapeDtypeStruct((3, *A.shape), A.dtype)
    program = jax.jit(jax.vmap(matmul_mosaic.matmul, in_axes=(0, None)))
    text = program.trace(batched, B).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    assert "stablehlo.while" in text
    assert "tensor<3x256x384xbf16>" in text


def test_a_call_outside_of_jit_is_a_program_of_its_own():
    """The call reaches a CPU, which has no such kernel."""
    with pytest.raises(NotImplementedError, match="platform cpu"):
        matmul_mosaic.matmul(jnp.zeros(A.shape, A.dtype), jnp.zeros(B.shape, B.dtype))
