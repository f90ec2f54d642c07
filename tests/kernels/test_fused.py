"""Kernels that quantize norms and activations while computing them, compared with XLA."""

import json
import os
import pathlib
import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import h200

pytest.importorskip("jax_triton")

from tests.kernels.fused_interpreter import CASES, FEW, compare
from tests.rows import few, slow

# Bytes of shared memory of a program on the smallest GPU with FP8.
SHARED = 99 << 10
ROOT = pathlib.Path(__file__).resolve().parents[2]
# Maximum registers per thread: three programs or more then share a multiprocessor.
REGISTERS = {
    "kept of silu": 64, "peaks": 64, "cotangents": 80, "silu again": 64, "silu": 48, "norm": 64,
    "silu again, peaks": 80, "silu again, cotangents": 80, "cotangents, sums": 112,
    "kept of silu, codes": 64, "rms norm, codes": 64, "mended": 64, "mended norm": 64,
    "kept of silu, rows": 80, "rms norm, rows": 96, "silu again, peaks of rows": 128, "cotangents of rows": 80,
    "rms norm, rows alone": 96, "silu, rows alone": 80, "exact, peaks of rows": 128, "exact, cotangents of rows": 80,
    "exact, peaks": 80, "exact norm, columns": 64, "itself, columns": 64, "rms norm, backward, exact": 128,
    "norm again": 64, "rms norm": 64, "rms norm, backward": 128, "rms norm, backward, residual": 128,
    "layer norm of 8192, backward": 128,
}  # fmt: skip


def python(*command, **env):
    """Returns the last line that a process prints, as JSON."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | env
    completed = subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.splitlines()[-1])


def test_kernels_take_the_references_sample():
    from fp8jax.core import scaling
    from pallas_kernels.nonlinear import sampled_amax_triton

    assert sampled_amax_triton.SAMPLE_ROWS == scaling.SAMPLE_ROWS


def test_an_activation_without_a_branch_in_the_kernels_does_not_compile():
    from pallas_kernels.nonlinear.operations_triton import ACTIVATIONS, Operation
    from pallas_kernels.nonlinear.quantize_recomputed_triton import RESULT, Operands
    from pallas_kernels.nonlinear.sampled_amax_triton import compute_amaxes

    def lower(activation):
        operation = Operation(activation, is_gated=False, reads_arrays=True)
        x = jax.ShapeDtypeStruct((32, 64), "bfloat16")
        program = jax.jit(lambda x: compute_amaxes(operation, (RESULT,), Operands(x), compute_capability=90))
        program.trace(x).lower(lowering_platforms=("cuda",))

    lower(len(ACTIVATIONS) - 1)
    with pytest.raises(Exception, match="compute_result") as error:
        lower(len(ACTIVATIONS))
    assert "needs a branch here" in "".join(traceback.format_exception(error.value))


def check(case, num_kernels, share, max_difference, distance, bound=2e-3):
    """The forward pass quantizes one matrix; with recomputed activations, one per product, and both cotangents."""
    norm = case.startswith(("rms", "layer", "norm"))
    lean = "faithful" not in case
    gated = "False" not in case
    expected = {"norm, tokens": 0, "kept anyway": 1}.get(case)
    if case.endswith("ten bits") and "rows" not in case:
        expected = 0  # the layers read no codes of these kernels
    expected = expected if expected is not None else 1 + (2 if norm else 1) * lean + (0 if norm else 1 + gated)
    assert num_kernels == expected, case
    is_bf16 = "bf16" in case  # XLA rounds a 16-bit activation after each of its operations
    assert share <= (0.04 if is_bf16 else 2e-3), (case, share)
    assert max_difference <= 1, (case, max_difference)
    assert distance <= (0.05 if is_bf16 else bound), (case, distance)


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_quantize_what_xla_computes_in_the_interpreter_and_write_nothing_out_of_bounds(which):
    actual = python("-m", "tests.kernels.fused_interpreter", which, TRITON_INTERPRET="1")
    assert list(actual) == list(FEW if which == "few" else CASES)
    for case, values in actual.items():
        check(case, *values)


def count_wrong_of_odd_values(*which: str) -> dict[str, list[int]]:
    """Returns, by case, how many results of kernels differ from the reference for Inf, NaN, zeros and extremes."""
    from fp8jax.ops.quantization import fused_reference
    from pallas_kernels.nonlinear import (
        activation_rows_triton,
        activation_triton,
        norm_triton,
        quantize_recomputed_triton,
        requantize_triton,
    )
    from pallas_kernels.nonlinear.operations_triton import Operation
    from pallas_kernels.quantization.scaling_triton import Coding
    from tests.kernels.triton_interpreter import prepare

    def by_rows(*args):
        parts, _, result = fused_reference.encode_activation_residuals(*args[:4], result=(None, args[4]))
        return parts, *result

    prepare()
    coding, x = Coding("group", size=16, scale_dtype=jnp.bfloat16), odd_values()
    norm, silu, ones = Operation(has_scale=True), Operation(dtype=0), jnp.ones(80, jnp.bfloat16)
    differ, by_row = {}, jnp.exp2(jnp.arange(20.0) % 7 - 5)
    normal = jax.random.normal(jax.random.key(1), x.shape)
    # All have one shape, which is compiled once.
    cases = {"odd": (x, normal), "finite": (x.at[:3].set(x[-3:]), normal)}
    # Codes that are not finite, and a result that is not finite while its cotangents are.
    cases |= {
        "codes": (normal.astype(x.dtype), x.astype(jnp.float32)),
        "result": (jnp.zeros_like(x), jnp.full(normal.shape, 1e30)),
    }
    for name in which:
        rows, inner = cases[name]
        gate, up = rows.astype(jnp.float32), rows[::-1].astype(jnp.float32)
        (first, second, _), *_ = fused_reference.encode_activation_residuals(silu, inner, 2 * inner, coding)
        operands, scale = quantize_recomputed_triton.Operands(*first, *second, gradient=rows), jnp.float32(0.1)
        result_coding, exact = (scale, jnp.float8_e4m3fn), Operation(reads_arrays=True)
        # The largest values times a gradient overflow in XLA's order of factors.
        least = jnp.where(jnp.isfinite(rows), jnp.clip(rows, -1e30, 1e30), rows)
        itself = quantize_recomputed_triton.Operands(
            least, up=least[::-1], gradient=jnp.tanh(normal).astype(rows.dtype)
        )
        twice = (jnp.float32(0.02), jnp.float8_e4m3fn)
        both = quantize_recomputed_triton.Operands(gate, up=up)
        to_mend = (
            silu._replace(reads_arrays=True),
            (quantize_recomputed_triton.RESULT,),
            both,
            jnp.zeros(gate.shape, twice[1]),
        )
        scales_of_rows = by_row[: len(rows)], 4 * by_row[: len(rows)]
        cotangents = (
            Operation(),
            (quantize_recomputed_triton.GATE, quantize_recomputed_triton.UP),
            operands,
            (scale, 2 * scale),
            jnp.float8_e5m2,
        )
        actual = [
            (
                on_norm.forward(norm, rows, ones, None, 1e-5, coding, result=twice),
                on_activation.encode_activation_residuals(silu, gate, up, coding, result=twice),
                [unsigned(on_mend.requantize_if(*to_mend, twice[0], jnp.bool_(wrong))) for wrong in (False, True)],
                on.quantize_and_predict(Operation(), operands, scale, jnp.float8_e4m3fn)[1],
                [
                    unsigned(a)
                    for a in jax.tree.leaves(
                        on.quantize(*cotangents, rows=True, columns=True, result_coding=result_coding)
                    )
                ],
                on_norm.forward(norm, rows, ones, None, 1e-5, coding, result=(None, jnp.float8_e4m3fn)),
                rows_of(silu, gate, up, coding, jnp.float8_e4m3fn),
                on.quantize_and_predict(Operation(), operands, by_row[: len(rows)], jnp.float8_e4m3fn)[1],
                on_norm.forward(norm, rows, ones, None, 1e-5, None, result=(None, jnp.float8_e4m3fn)),
                rows_of(silu, gate, up, None, jnp.float8_e4m3fn),
                on.quantize_and_predict(exact, itself, by_row[: len(rows)], jnp.float8_e4m3fn)[1],
                [
                    unsigned(a)
                    for a in jax.tree.leaves(
                        on.quantize(
                            exact,
                            *cotangents[1:2],
                            itself,
                            scales_of_rows,
                            jnp.float8_e4m3fn,
                            rows=True,
                            columns=True,
                        )
                    )
                ],
                [
                    unsigned(a)
                    for a in jax.tree.leaves(
                        on.quantize(*cotangents[:3], scales_of_rows, jnp.float8_e4m3fn, rows=True, columns=True)
                    )
                ],
            )
            for on_norm, on_activation, on_mend, on, rows_of in (
                (
                    norm_triton,
                    activation_triton,
                    requantize_triton,
                    quantize_recomputed_triton,
                    activation_rows_triton.encode_activation_residuals,
                ),
                (fused_reference, fused_reference, fused_reference, fused_reference, by_rows),
            )
        ]
        differ[name] = count_differing(*actual)
    return differ


def odd_values() -> jax.Array:
    """One row each of Inf, NaN, zeros and extremes, alone and as a full group, and eleven ordinary rows."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 80)), jnp.bfloat16)
    values = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3.3e38, -3.3e38, 1e-30, -2e-38]
    for row, value in enumerate(values):
        x = x.at[row, 3 * row].set(value).at[row, 32:48].set(value)
    return x


def unsigned(a: jax.Array) -> jax.Array:
    """Inf or NaN, and the sign of a zero, depend on the order of factors, which XLA chooses."""
    return jnp.where(jnp.isfinite(a), a, jnp.nan).astype(jnp.float32) + 0.0


def count_differing(*actual, least: float = 0.0) -> list[int]:
    """Returns, for each array, how many of its elements differ by more than `least`."""
    result, expected = ([np.asarray(a, np.float32) for a in jax.tree.leaves(each)] for each in actual)
    close = [np.isclose(a, b, rtol=2e-5, atol=least, equal_nan=True) & (np.isnan(a) | (np.signbit(a) == np.signbit(b)))
             for a, b in zip(result, expected, strict=True)]  # fmt: skip
    return [int(np.sum(~c)) for c in close]


def count_wrong_in_ten_bits() -> dict[str, list[int]]:
    """The same for int10 residuals, written results, and cotangents from such codes.

    The last of three groups of a row is half a group.
    """
    from fp8jax.ops.quantization import fused_reference
    from pallas_kernels.nonlinear import activation_triton, cotangents_triton, norm_triton
    from pallas_kernels.nonlinear.operations_triton import Operation
    from pallas_kernels.nonlinear.quantize_recomputed_triton import Operands
    from pallas_kernels.quantization.scaling_triton import Coding
    from tests.kernels.triton_interpreter import prepare

    prepare()
    coding, x = Coding("group", jnp.int16, 32, scale_dtype=jnp.bfloat16), odd_values()
    silu = Operation(dtype=0, saves_activated=True, format="int10", group=32)
    norm = Operation(dtype=0, has_scale=True, format="int10", group=32)
    ones, inverse, differ = jnp.ones(80), jnp.full(20, 0.7), {}
    for name, rows in (("ten bits, odd", x), ("ten bits, finite", x.at[:3].set(x[-3:]))):
        gate, up = rows.astype(jnp.float32), rows[::-1].astype(jnp.float32)
        # The largest values times a gradient overflow in XLA's order of factors.
        least = jnp.where(jnp.isfinite(gate), jnp.clip(gate, -1e30, 1e30), gate)
        parts, _, _ = fused_reference.encode_activation_residuals(silu, least, least[::-1], coding)
        dy = jnp.tanh(up[:, ::-1])
        operands = Operands(*parts[0], *parts[1], *parts[2], gradient=dy)
        actual = [
            (
                unsigned_last(on_norm.forward(norm, rows, 2 * ones, None, 1e-5, coding, result=(None, jnp.float32))),
                unsigned_last(
                    on_activation.encode_activation_residuals(silu, gate, up, coding, result=(None, jnp.float32))
                ),
                [unsigned(a) for a in on.cotangents(silu, operands)],
                [unsigned(a) for a in on_norm.backward(norm, *parts[0], inverse, ones, dy, jnp.float32, least)[:2]],
            )
            for on_norm, on_activation, on in (
                (norm_triton, activation_triton, cotangents_triton),
                (fused_reference, fused_reference, fused_reference),
            )
        ]
        # SiLU's derivative, a difference of numbers near 1, is 0 at -1.28.
        differ[name] = count_differing(*actual, least=1e-8)
    return differ


def unsigned_last(results: tuple) -> tuple:
    """XLA on CPUs flushes products of the smallest numbers to zero."""
    y = unsigned(results[-1])
    return *results[:-1], jnp.where(jnp.abs(y) < 1e-36, 0, y)


@pytest.mark.parametrize(
    "which", [("odd", "codes"), pytest.param(("finite", "result"), marks=pytest.mark.slow)], ids=" ".join
)
def test_what_is_made_of_values_that_are_not_finite_is_the_references_in_the_interpreter(which):
    """8-bit codes, and int10 codes with the first cases."""
    expression, ten_bits = f"test_fused.count_wrong_of_odd_values{which}", "odd" in which
    expression += " | test_fused.count_wrong_in_ten_bits()" * ten_bits
    code = f"import json; from tests.kernels import test_fused; print(json.dumps({expression}))"
    actual = python("-c", code, TRITON_INTERPRET="1")
    assert list(actual) == [*which, *["ten bits, odd", "ten bits, finite"] * ten_bits]
    assert not any(any(counts) for counts in actual.values()), actual


@pytest.mark.gpu
@pytest.mark.parametrize("case", few(CASES, *FEW))
def test_kernels_quantize_what_xla_computes_on_a_gpu(case):
    # Two in a thousand codes differ; the steps of e5m2 are a quarter.
    check(case, *compare(*CASES[case](), in_one_program=True, with_references="as it is" in case), bound=1.2e-2)


def registers(every: int) -> None:
    """Prints `h200.assembled` of a sample of kernels for Llama-7B's activations, and of norms of longer rows."""
    from pallas_kernels.nonlinear import (
        activation_rows_triton,
        activation_triton,
        norm_triton,
        quantize_recomputed_triton,
    )
    from pallas_kernels.nonlinear.operations_triton import IDENTITY, Operation
    from pallas_kernels.nonlinear.quantize_recomputed_triton import GATE, NORM, RESULT, UP, Operands
    from pallas_kernels.nonlinear.requantize_triton import requantize_if
    from pallas_kernels.nonlinear.sampled_amax_triton import compute_amaxes
    from pallas_kernels.quantization.scaling_triton import Coding

    options, one, rows = {"compute_capability": 90}, jnp.float32(1), 16384
    coding, e4m3, e5m2 = Coding("group", size=16, scale_dtype=jnp.bfloat16), jnp.float8_e4m3fn, jnp.float8_e5m2
    wide, narrow, inverse, weight = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((rows, 11008), jnp.bfloat16), ((rows, 4096), jnp.bfloat16), ((rows,), jnp.float32),
                             ((4096,), jnp.bfloat16))
    )  # fmt: skip
    codes, scales = (jax.ShapeDtypeStruct((rows, n), d) for n, d in ((11008, e4m3), (11008 // 16, jnp.bfloat16)))
    few, few_scales = (jax.ShapeDtypeStruct((rows, n), d) for n, d in ((4096, e4m3), (4096 // 16, jnp.bfloat16)))
    silu, exact, norm = Operation(), Operation(reads_arrays=True), Operation(has_scale=True)

    def quantized(operation, kinds, dtype, names, rows, columns, again=None):
        def run(*arrays):
            operands = Operands(**dict(zip(names, arrays, strict=True)))
            scales = (one,) * len(kinds)
            return quantize_recomputed_triton.quantize(
                operation, kinds, operands, scales, dtype, rows=rows, columns=columns, result_coding=again, **options
            )

        return run

    activation = ("first", "first_scale", "up", "up_scale", "gradient")
    pair = lambda *arrays: compute_amaxes(  # noqa: E731
        silu, (GATE, UP), Operands(**dict(zip(activation, arrays, strict=True))), **options
    )
    quantize_and_predict = lambda *arrays: quantize_recomputed_triton.quantize_and_predict(  # noqa: E731
        silu, Operands(**dict(zip(activation, arrays, strict=True))), one, e4m3, **options
    )
    back = lambda *arrays: norm_triton.backward(norm, *arrays, jnp.bfloat16, **options)  # noqa: E731
    added = lambda *arrays: norm_triton.backward(norm, *arrays[:5], jnp.bfloat16, arrays[5], **options)  # noqa: E731
    centered = Operation(has_scale=True, has_bias=True, centered=True)
    wide_back = lambda *arrays: norm_triton.backward(centered, *arrays, jnp.bfloat16, **options)  # noqa: E731
    wider = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((rows, 8192), e4m3), ((rows, 512), jnp.bfloat16), ((rows,), jnp.float32),
                             ((8192,), jnp.bfloat16), ((rows, 8192), jnp.bfloat16))
    ]  # fmt: skip
    longest = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((rows, 16384), e4m3), ((rows, 1024), jnp.bfloat16), ((rows,), jnp.float32),
                             ((16384,), jnp.float32), ((rows, 16384), jnp.float32), ((rows, 16384), jnp.float32))
    ]  # fmt: skip
    kept_of = (codes, scales, codes, scales)
    of_norm = ("first", "first_scale", "rstd", "weight")
    programs = {
        "kept of silu": (
            lambda g, u: activation_triton.encode_activation_residuals(silu, g, u, coding, **options), wide, wide),
        "kept of silu, codes": (
            lambda g, u: activation_triton.encode_activation_residuals(
                silu, g, u, coding, result=(one, e4m3), **options), wide, wide),
        "mended": (lambda g, u, y: requantize_if(exact, (RESULT,), Operands(g, up=u), y, one, one > 0, **options),
                   wide, wide, codes),
        "mended norm": (lambda x, i, w, y: requantize_if(norm._replace(reads_arrays=True), (NORM,), Operands(x, rstd=i,
                                                weight=w), y, one, one > 0, **options), narrow, inverse, weight, few),
        "peaks": (pair, *kept_of, wide),
        "cotangents": (quantized(silu, (GATE, UP), e5m2, activation, True, True), *kept_of, wide),
        "silu again, peaks": (quantize_and_predict, *kept_of, wide),
        "silu again, cotangents": (
            quantized(silu, (GATE, UP), e5m2, activation, True, True, (one, e4m3)), *kept_of, wide),
        "silu again": (quantized(silu, (RESULT,), e4m3, activation[:4], False, True), *kept_of),
        "silu": (quantized(exact, (RESULT,), e4m3, ("first", "up"), True, False), wide, wide),
        "norm": (quantized(norm._replace(reads_arrays=True), (NORM,), e4m3, ("first", *of_norm[2:]), True, False),
                 narrow, inverse, weight),
        "norm again": (quantized(norm, (NORM,), e4m3, of_norm, False, True), few, few_scales, inverse, weight),
        "rms norm": (lambda x, w: norm_triton.forward(norm, x, w, None, 1e-5, coding, **options), narrow, weight),
        "rms norm, codes": (
            lambda x, w: norm_triton.forward(norm, x, w, None, 1e-5, coding, result=(one, e4m3), **options),
            narrow, weight),
        "rms norm, rows": (
            lambda x, w: norm_triton.forward(norm, x, w, None, 1e-5, coding, result=(None, e4m3), **options),
            narrow, weight),
        "kept of silu, rows": (
            lambda g, u: activation_rows_triton.encode_activation_residuals(silu, g, u, coding, e4m3, **options), wide,
            wide),
        "silu again, peaks of rows": (
            lambda *a: quantize_recomputed_triton.quantize_and_predict(
                silu, Operands(**dict(zip(activation, a[:5], strict=True))), a[5], e4m3, **options),
            *kept_of, wide, inverse),
        "cotangents of rows": (
            lambda *a: quantize_recomputed_triton.quantize(
                silu, (GATE, UP), Operands(**dict(zip(activation, a[:5], strict=True))), a[5:] * 2, e4m3, rows=True,
                columns=True, **options),
            *kept_of, wide, inverse),
        "rms norm, rows alone": (
            lambda x, w: norm_triton.forward(norm, x, w, None, 1e-5, None, result=(None, e4m3), **options),
            narrow, weight),
        "silu, rows alone": (
            lambda g, u: activation_rows_triton.encode_activation_residuals(silu, g, u, None, e4m3, **options), wide,
            wide),
        "exact, peaks of rows": (
            lambda g, u, dy, s: quantize_recomputed_triton.quantize_and_predict(exact, Operands(g, up=u, gradient=dy),
                s, e4m3, **options),
            wide, wide, wide, inverse),
        "exact, peaks": (
            lambda g, u, dy: quantize_recomputed_triton.quantize_and_predict(exact, Operands(g, up=u, gradient=dy),
                one, e4m3, **options),
            wide, wide, wide),
        "cotangents, sums": (
            lambda *a: quantize_recomputed_triton.quantize(
                silu, (GATE, UP), Operands(**dict(zip(activation, a, strict=True))), (one, one), e4m3, rows=True,
                columns=True, sums=True, **options),
            *kept_of, wide),
        "exact, cotangents of rows": (
            lambda g, u, dy, s: quantize_recomputed_triton.quantize(
                exact, (GATE, UP), Operands(g, up=u, gradient=dy), (s, s), e4m3, rows=True, columns=True, **options),
            wide, wide, wide, inverse),
        "exact norm, columns": (
            lambda x, s, i, w: quantize_recomputed_triton.quantize(
                norm._replace(reads_arrays=True), (NORM,), Operands(x, rstd=i, weight=w), (s,), e4m3, rows=False,
                columns=True, **options),
            narrow, inverse, inverse, weight),
        "itself, columns": (
            lambda x, s: quantize_recomputed_triton.quantize(
                exact._replace(activation=IDENTITY, is_gated=False), (RESULT,), Operands(x), (s,), e4m3, rows=False,
                columns=True, **options),
            narrow, inverse),
        "rms norm, backward, exact": (
            lambda x, i, w, dy, r: norm_triton.backward(
                norm._replace(reads_arrays=True), x, None, i, w, dy, jnp.bfloat16, r, **options),
            narrow, inverse, weight, narrow, narrow),
        "rms norm, backward": (back, few, few_scales, inverse, weight, narrow),
        "rms norm, backward, residual": (added, few, few_scales, inverse, weight, narrow, narrow),
        "layer norm of 8192, backward": (wide_back, *wider),
        "rms norm of 16384, fp32, backward, residual": (added, *longest),
    }  # fmt: skip
    chosen = list(programs.items())[::every]
    print(json.dumps({name: h200.assembled(program, *shapes) for name, (program, *shapes) in chosen}))


@pytest.mark.skipif(h200.missing() is not None, reason="the group compile is not installed")
@pytest.mark.parametrize("every", [6, slow(1)])
def test_kernels_compile_for_an_h200_without_spills(every):
    command = f"from tests.kernels import test_fused; test_fused.registers({every})"
    actual = python("-c", command, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    # Rows of 16,384 fp32 values spill some registers; each of 1,024 threads has 64.
    limited = {name: actual[name] for name in actual if name in REGISTERS}
    assert len(limited) >= len(REGISTERS) // every
    assert {name for name, (used, spilled, _) in limited.items() if spilled or used > REGISTERS[name]} == set(), actual
    assert max(shared for _, _, shared in actual.values()) <= SHARED, actual
