"""Mosaic kernels are lowered once a process, to the custom call that Pallas makes of them each time."""

import dataclasses
import functools
import re
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import call_mosaic, hopper, matmul_block_mosaic, matmul_int8_mosaic, matmul_mosaic, matmul_mx_mosaic

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="Mosaic's kernels need jax 0.11")

M, N, K = 256, 384, 512


def _shape(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


A, B = _shape(M, K, dtype=jnp.float8_e4m3fn), _shape(N, K, dtype=jnp.float8_e4m3fn)
INTEGERS = _shape(M, K, dtype=jnp.int8), _shape(N, K, dtype=jnp.int8)
BLOCKS = _shape(M // 128, K // 128), _shape(N // 128, K // 128)


def _plain(**how):
    def program(a, b, **vectors):
        return matmul_mosaic.matmul(a, b, **vectors, **how)

    return program


def _fallback(a, b, a_scale, b_scale, codes, scale, used):
    residual = matmul_int8_mosaic.FallbackResidual(codes, scale, used)
    return matmul_int8_mosaic.matmul_int8_block(a, b, a_scale, b_scale, residual=residual)


def _left(count):
    def program(a, b):
        with hopper.left(count):
            return matmul_mosaic.matmul(a, b)

    return program


TILE = matmul_mosaic.best_tile(M, N, K)
# By name a program, its arguments and its arguments by name: each differs from another in one thing that tells kernels
# apart.
PROGRAMS = {
    "plain": (_plain(), (A, B), {}),
    "promoted": (_plain(fast=False), (A, B), {}),
    "fp32": (_plain(out_dtype=jnp.float32), (A, B), {}),
    "other tile": (_plain(tile=dataclasses.replace(TILE, raster=TILE.raster // 2)), (A, B), {}),
    "e5m2": (_plain(), (A, _shape(N, K, dtype=jnp.float8_e5m2)), {}),
    "fewer rows": (_plain(), (_shape(M - 1, K, dtype=jnp.float8_e4m3fn), B), {}),
    "int8": (_plain(), INTEGERS, {}),
    "row": (_plain(), (A, B), {"row_scale": _shape(M)}),
    "bias": (_plain(), (A, B), {"bias": _shape(N)}),
    "column": (_plain(), (A, B), {"column_scale": _shape(N)}),
    "residual": (_plain(), (A, B), {"residual": _shape(M, N, dtype=jnp.bfloat16)}),
    "fewer multiprocessors": (_left(8), (A, B), {}),
    "blocks": (matmul_block_mosaic.matmul_block, (A, B, _shape(M, K // 128), BLOCKS[1]), {}),
    "columns": (matmul_block_mosaic.matmul_block, (A, B, _shape(M, K // 128), _shape(N, K // 128)), {}),
    "microscaled": (matmul_mx_mosaic.matmul_mx, (A, B, _shape(M, K // 32, dtype=jnp.uint8)), {}),
    "unrolled": (
        functools.partial(matmul_mx_mosaic.matmul_mx, unroll=1),
        (A, B, _shape(M, K // 32, dtype=jnp.uint8)),
        {},
    ),
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
    """An entry for each kernel that Pallas lowers."""
    lowered = []
    record = call_mosaic._record
    monkeypatch.setattr(call_mosaic, "_RECORDS", {})
    monkeypatch.setattr(call_mosaic, "_record", lambda *x: lowered.append(x) or record(*x))
    return lowered


def test_repeated_calls_are_those_that_pallas_makes_and_kernels_that_differ_are_told_apart(recorded, monkeypatch):
    first = {name: _text(name) for name in PROGRAMS}
    count = len(recorded)
    assert count == len(PROGRAMS)
    assert {name: _text(name) for name in PROGRAMS} == first
    assert len(recorded) == count
    # Pallas gives other bytes each time: XLA would compile each call anew.
    monkeypatch.setattr(call_mosaic, "call", lambda name, kernel, operands, *_: kernel(*operands))
    for name, text in first.items():
        assert _without_code(_text(name)) == _without_code(text)


def test_alike_products_of_a_program_are_lowered_once(recorded):
    def program(a, b, c):
        return matmul_mosaic.matmul(a, b), matmul_mosaic.matmul(c, b)

    text = jax.jit(program).trace(A, B, A).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 2
    assert len(recorded) == 1


def test_a_printed_program_has_no_code_of_kernels():
    assert len(str(jax.make_jaxpr(lambda a, b: matmul_mosaic.matmul(a, b))(A, B))) < 2000


def test_what_is_no_call_of_its_operands_alone_is_not_recorded():
    """A kernel whose lowering does more runs as Pallas lowers it each time."""
    assert call_mosaic._record(lambda x: x + 1, [_shape(8, 128)]) is None
    assert call_mosaic._record(lambda x, y: matmul_mosaic.matmul(y, x), [B, A]) is None
    assert call_mosaic._record(lambda x, y: matmul_mosaic.matmul(x, y) + 1, [A, B]) is None
    called = []
    result = call_mosaic.call("sum", lambda x: called.append(1) or x + 1, [jnp.zeros((3,))], _shape(3), "only here")
    assert called == [1, 1]
    assert result.tolist() == [1, 1, 1]
