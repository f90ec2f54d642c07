"""The quantize kernel has the codes of the quantizer bit for bit, without a GPU and on one."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.core import formats
from fp8jax.ops.dispatch import choice, partition
from fp8jax.ops.quantization import quantize as op
from tests.kernels import h200, logits_cases
from tests.kernels import quantize_cases as cases
from tests.rows import few, slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
triton = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")


@triton
def test_codes_equal_the_quantizers_in_the_interpreter_and_nothing_is_written_out_of_bounds():
    env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.triton_interpreter"]
    completed = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert json.loads(completed.stdout.splitlines()[-1]) == {}


def check(actual, expected, few=3e-4):
    """Codes are equal, except for a few next to a tie.

    On some machines XLA converts through half precision and rounds twice. Its reciprocals on GPUs have an error of one
    ulp.
    """
    if expected.dtype.itemsize > 1:
        np.testing.assert_array_equal(actual, expected)
    else:
        code_distances = np.abs(actual.view(np.uint8).astype(int) - expected.view(np.uint8).astype(int))
        assert code_distances.max() <= 1
        assert np.mean(code_distances > 0) <= few


# Maximum registers per thread: three programs or more then share a multiprocessor.
REGISTERS = {
    "rows of 4096": 64, "rows of 11008": 64, "maxima": 128, "tensor": 64, "tensor, e5m2": 64, "stochastic": 128,
    "tensor, three matrices": 64,
    "tensor, sums": 64, "tensor, of its amax": 64, "weights, of their amax": 80,
    "tokens both ways": 128, "groups both ways": 255, "blocks": 200, "mx both ways": 168, "int8 blocks": 200,
    "codes folded": 64, "codes shifted": 64, "fallback blocks": 80, "fallback blocks, drawn": 128,
    "exponentials": 64, "cotangents": 128, "groups of rows": 96,
    "nvfp4 weights": 128, "maxima, transformed": 168, "nvfp4, transformed and drawn": 168,
    "nvfp4, transformed and drawn, for a B200": 168,
    "statistics": 128, "statistics of weights": 168, "statistics of moments": 128, "next moment": 64,
}  # fmt: skip


def registers(every: int) -> None:
    """Prints registers and spilled bytes of a sample of kernels for Llama-7B's activations.

    They are compiled for an H200, unless the name has another GPU.
    """
    from pallas_kernels.losses import logits_triton
    from pallas_kernels.optimizers import next_moment_triton
    from pallas_kernels.quantization import (
        amax_triton,
        fallback_triton,
        fold_triton,
        nvfp4_triton,
        quantize_groups_triton,
        quantize_rows_triton,
        quantize_triton,
        statistics_triton,
        transpose_triton,
    )

    coding, e5m2, options = quantize_triton.Coding, jnp.float8_e5m2, {"compute_capability": 90}
    one, words = jnp.float32(1), jnp.zeros(2, jnp.uint32)

    def both(x, rows, columns="same", **scales):
        return quantize_triton.quantize(x, rows, columns, **scales, **options)

    def rows(x):
        return quantize_rows_triton.quantize_rows(x, coding("token"), **options)

    def nvfp4(x, kind, capability=90, **settings):
        coding = nvfp4_triton.Coding(kind, "seed" in settings)
        return nvfp4_triton.quantize(
            x, coding, coding, row_scale=one, column_scale=one, compute_capability=capability, **settings
        )

    def statistics(x, codes, *arrays, **settings):
        return statistics_triton.compare_parts(x, codes.astype(jnp.float8_e4m3fn), *arrays, **settings, **options)

    per_tensor = {"largest_code": 448.0, "tolerance": 0.02, "bits": 8, "group_shape": (16384, 11008)}
    grouped = per_tensor | {"group_shape": (1, 128)}
    scales, exponents = jnp.ones((16384, 86)), jnp.ones((16384, 86), jnp.bfloat16)
    group, mx, wide = coding("group", size=128), coding("mx", size=32), jnp.ones((11008, 1))
    programs = {
        "rows of 4096": lambda x: rows(x[:, :4096]),
        "rows of 11008": rows,
        "maxima": lambda x: amax_triton.compute_amax(x, rows=True, columns=True, **options),
        "tensor": lambda x: both(x, coding("tensor"), row_scale=one),
        "tensor, e5m2": lambda x: both(x, coding("tensor", e5m2), row_scale=one),
        "tensor, sums": lambda x: both(x, coding("tensor", e5m2), row_scale=one, sums=True),
        "tensor, of its amax": lambda x: both(x, coding("tensor", e5m2), amax=one, rounds_amax_up=True),
        "tensor, three matrices": lambda x: both(
            (x[:, :4096], x[:, 4096:6912], x[:, 6912:]), coding("tensor", e5m2), amax=one
        ),
        "weights, of their amax": lambda x: both(x.astype(jnp.float32), coding("tensor"), None, amax=one),
        "stochastic": lambda x: both(x, coding("tensor", e5m2, is_stochastic=True), row_scale=one, seed=words),
        "tokens both ways": lambda x: both(x, coding("token"), coding("token"), row_scale=one, column_scale=wide),
        "groups both ways": lambda x: both(x, group, group),
        "blocks": lambda x: both(x, coding("block", size=128)),
        "mx both ways": lambda x: both(x, mx, mx, row_scale=one, column_scale=one),
        "int8 blocks": lambda x: both(x, coding("block", jnp.int8, 32)),
        "codes folded": lambda x: fold_triton.fold_codes(
            x.astype(jnp.float8_e4m3fn), jnp.zeros((16384, 344), jnp.uint8), jnp.ones((1, 1)), **options
        ),
        "codes shifted": lambda x: transpose_triton.transpose(
            x.astype(jnp.float8_e4m3fn), factor=jnp.ones((16384, 1)), **options
        ),
        "groups of rows": lambda x: quantize_groups_triton.quantize_groups(
            x,
            jnp.zeros((3, 1089), jnp.int32),
            64,
            index=jnp.zeros(131072, jnp.int32),
            rows=coding("token"),
            columns=coding("token", e5m2),
            row_scale=jnp.ones(131072),
            column_scale=jnp.ones(64),
            **options,
        ),
        "exponentials": lambda x: logits_triton.max_and_sum_exp(x, **options),
        "cotangents": lambda x: logits_triton.quantize_cotangents(
            x,
            x[:, 0].astype(jnp.float32),
            jnp.zeros(len(x), jnp.int32),
            jnp.ones(len(x)),
            rows=coding("tensor"),
            columns=coding("tensor", e5m2),
            scales=(one, one),
            **options,
        ),
        "fallback blocks": lambda x: fallback_triton.quantize(x, one, 128, **options),
        "fallback blocks, drawn": lambda x: fallback_triton.quantize(x, one, 128, seed=words, **options),
        "nvfp4 weights": lambda x: nvfp4(x.astype(jnp.float32), "nvblock"),
        "maxima, transformed": lambda x: nvfp4_triton.compute_amax(x, 5, **options),
        "nvfp4, transformed and drawn": lambda x: nvfp4(x, "nv", signs=5, seed=words),
        "nvfp4, transformed and drawn, for a B200": lambda x: nvfp4(x, "nv", 100, signs=5, seed=words),
        "statistics": lambda x: statistics(x, x, one.reshape(1, 1), **per_tensor),
        "statistics of weights": lambda x: statistics(
            x.astype(jnp.float32), x.T, one.reshape(1, 1), is_transposed=True, **per_tensor
        ),
        "statistics of moments": lambda x: statistics(x.astype(jnp.float32), x, scales, exponents, **grouped),
        "next moment": lambda x: next_moment_triton.next_moment(
            x,
            x.astype(jnp.float8_e4m3fn),
            scales,
            exponents,
            jnp.ones(3),
            group_size=128,
            largest_code=448.0,
            is_squared=True,
            **options,
        ),
    }
    x = jax.ShapeDtypeStruct((16384, 11008), jnp.bfloat16)
    results = {}
    for name in list(programs)[::every]:
        results[name] = h200.assembled(programs[name], x, arch="sm_100a" if "B200" in name else "sm_90a")
    print(json.dumps(results))


@triton
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the group compile is not installed")
@pytest.mark.parametrize("every", [6, slow(1)])
def test_kernels_compile_without_spills(every, tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "WORK": str(tmp_path)}
    command = [sys.executable, "-c", f"from tests.kernels import test_quantize; test_quantize.registers({every})"]
    completed = subprocess.run(
        command, env=env | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    actual = json.loads(completed.stdout.splitlines()[-1])
    assert len(actual) == -(-len(REGISTERS) // every)
    assert {name for name, (used, spilled, _) in actual.items() if spilled or used > REGISTERS[name]} == set(), actual


@pytest.mark.gpu
@pytest.mark.parametrize("case", few(cases.CASES, *cases.CASES[1::2]), ids=lambda c: f"{c.rows} {c.columns} {c.shape}")
def test_codes_equal_the_quantizers_on_a_gpu(case):
    # With 255 integers, and multiples of a few numbers, more values are next to a tie.
    for expected, actual in zip(cases.arrays(case, "xla"), cases.arrays(case, "triton"), strict=True):
        check(actual, expected, 1e-3 if "int8" in f"{case.rows}" else 3e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", logits_cases.CASES, ids=str)
def test_losses_and_cotangents_of_logits_are_those_in_float64_on_a_gpu(case):
    assert not any(logits_cases.wrong(case, "triton").values())


@pytest.mark.parametrize("case", logits_cases.CASES, ids=str)
def test_losses_and_cotangents_of_logits_are_those_in_float64(case):
    assert not any(logits_cases.wrong(case, "xla").values())


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.FALLBACKS, ids=lambda c: f"{c.rows} {c.shape}")
def test_blocks_and_their_residuals_equal_the_references_on_a_gpu(case):
    actual = cases.wrong_fallback(case)
    assert actual.pop("base") <= 1e-3 * case.shape[0] * case.shape[1]
    assert not any(actual.values()), actual


BOTH_STOCHASTIC = next(c for c in cases.GIVEN_SCALE_CASES if c.rows == c.columns == "e5m2+stochastic")


@pytest.mark.parametrize("case", cases.GIVEN_SCALE_CASES, ids=lambda c: f"{c.rows} {c.columns} {c.shape}")
def test_under_given_scales_finite_values_saturate_and_others_stay_visible(case):
    assert not any(cases.wrong_under_given_scales(case, "xla"))


def test_no_two_places_are_rounded_up_by_the_same_noise():
    assert not any(cases.wrong_noise("xla").values())


@pytest.mark.gpu
def test_no_two_places_are_rounded_up_by_the_same_noise_on_a_gpu():
    assert not any(cases.wrong_noise("triton").values())


@pytest.mark.gpu
# One of the stochastically rounded cases has both copies.
@pytest.mark.parametrize(
    "case",
    few(cases.GIVEN_SCALE_CASES, *cases.GIVEN_SCALE_CASES[::3], BOTH_STOCHASTIC),
    ids=lambda c: f"{c.rows} {c.columns} {c.shape}",
)
def test_under_given_scales_they_do_on_a_gpu(case):
    assert not any(cases.wrong_under_given_scales(case, "triton"))


@triton
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_under_given_scales_they_do_where_an_activation_is_quantized(name):
    assert not any(cases.wrong_where_computed(name))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [slow(case) for case in cases.STACKS[1::2]] + list(cases.STACKS[::2]), ids=str)
def test_a_stack_has_the_codes_of_its_matrices_on_a_gpu(case):
    for actual, expected in cases.stack_arrays(*case, vmap=True):
        check(actual, expected)


@triton
@pytest.mark.parametrize("one_device", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "is_one_launch"),
    [("e4m3", "same", True), ("e4m3:block128", None, True), ("e4m3:token", "e4m3", False)],
)
def test_matrices_that_vmap_stacks_are_one_launch(rows, columns, is_one_launch, one_device, monkeypatch):
    monkeypatch.setattr(partition, "on_one_device", lambda: one_device)

    def text(function, *shape):
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        with choice.target(capability=90):
            return jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()

    def quantize(x):
        return op.quantize(x, rows, columns)

    many = text(jax.vmap(quantize), 6, 256, 384)
    assert ("stablehlo.while" in many) != is_one_launch
    if one_device:
        calls = "stablehlo.custom_call @__gpu$xla.gpu.ptx"
        assert many.count(calls) == text(quantize, 256, 384).count(calls) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.FOLDS, ids=lambda c: f"{c.rows} {c.shape}")
def test_folded_codes_equal_the_references_on_a_gpu(case):
    for expected, actual in zip(cases.folded(case, "xla"), cases.folded(case, "triton"), strict=True):
        check(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.REFOLDS, ids=lambda c: f"{c.rows} {c.shape}")
def test_codes_folded_afterwards_equal_the_references_on_a_gpu(case):
    for expected, actual in zip(cases.refolded(case, "xla"), cases.refolded(case, "triton"), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shape"), cases.SHIFTS)
def test_shifted_codes_equal_the_references_on_a_gpu(name, shape):
    assert cases.wrong_shifted(name, shape) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [slow((4096, 11008)), slow((1000, 32003)), (4099, 516), (4099, 32003)])
def test_large_and_odd_matrices_on_a_gpu(shape):
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    for rows, columns in (("e4m3", "same"), ("e4m3:group128", "e5m2:group128"), ("e4m3:block128", "same")):
        expected, actual = (op.quantize(x, rows, columns, impl=impl) for impl in ("xla", "triton"))
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
            check(np.asarray(b), np.asarray(a))
    q, _ = op.quantize(x, "e4m3")
    np.testing.assert_array_equal(
        np.asarray(op.transpose(q, impl="triton").codes).view(np.uint8), np.asarray(q.codes.T).view(np.uint8)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_stochastic_rounding_on_a_gpu_is_unbiased_repeats_and_takes_only_neighbours(name):
    fmt = formats.get(name)
    column = jnp.concatenate(
        [jnp.linspace(0, 3 * fmt.smallest_normal, 97), jnp.linspace(1, 40, 160), jnp.array([448.0])]
    )
    x = jnp.tile(column[None], (16384, 1)).at[:, 1].mul(-1.0)
    spec = f"{name}:token+stochastic"
    one = jnp.ones((), jnp.float32)
    draw = [op.quantize(x, spec, scale=one, key=jax.random.key(k), impl="triton")[0] for k in (0, 0, 1)]
    codes = [np.asarray(q.codes).astype(np.float64) for q in draw]
    np.testing.assert_array_equal(codes[0], codes[1])
    assert np.mean(codes[0] != codes[2]) > 0.1
    exact = np.asarray(x[0], np.float64)
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), fmt.smallest_normal))) - fmt.mantissa_bits)
    assert (np.abs(codes[0] - exact) < step).all()
    # The mean of 16384 draws, each with a spread of at most half a step.
    assert (np.abs(codes[0].mean(0) - exact) <= 5 * step / 2 / np.sqrt(len(x)) + step * 2.0**-16).all()
    up = (codes[0] > exact)[:, 97:-1]
    assert abs(np.corrcoef(up[:, 40], up[:, 41])[0, 1]) < 0.05


@pytest.mark.gpu
def test_transformations_on_a_gpu():
    x = jax.random.normal(jax.random.key(0), (3, 256, 384), jnp.bfloat16)

    def both(x, impl):
        return op.quantize(x, "e4m3", "e4m3:group128", impl=impl)

    expected = jax.vmap(lambda x: both(x, "xla"))(x)
    for run in (
        jax.jit(jax.vmap(lambda x: both(x, "auto"))),
        jax.jit(lambda x: jax.lax.scan(lambda _, x: (None, both(x, "triton")), None, x)[1]),
    ):
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(run(x)), strict=True):
            check(np.asarray(b), np.asarray(a))
    text = jax.jit(lambda x: both(x, "auto")).lower(x[0]).compile().as_text()
    assert text.count("triton_kernel_call") >= 2
