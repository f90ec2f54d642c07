"""Compares kernels in Triton's interpreter with float64: gradients of norms, weight decay, and noise of copies.

It needs its own process: `TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python -m tests.kernels.test_gradients_interpreted`
raises if a kernel is wrong.
"""

import dataclasses
import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
def test_kernels_are_right_in_the_interpreter():
    root = pathlib.Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.kernels.test_gradients_interpreted"]
    completed = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert completed.stdout.splitlines()[-1] == "done"


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check_norm(m: int, n: int, wide: bool, dtype: Any, given: tuple[bool, bool, bool], residual: bool) -> None:
    """Checks the backward kernel on arbitrary codes. `given`: whether a norm has a scale, a bias and a mean."""
    from pallas_kernels.nonlinear import norm_triton
    from pallas_kernels.nonlinear.operations_triton import Operation
    from pallas_kernels.quantization import quantize_triton

    scaled, biased, centered = given
    scale_dtype = jnp.float32 if wide else jnp.bfloat16
    index = quantize_triton.PLAIN_DTYPES.index(jnp.dtype(dtype))
    operation = Operation(has_scale=scaled, has_bias=biased, centered=centered, dtype=index)
    codes = jnp.asarray(normal(0, m, n) * 50, jnp.float8_e4m3fn)
    scales = jnp.asarray(np.exp(normal(1, m, n // 16)) / 50, scale_dtype)
    # Each row has its own magnitude, and the added gradient is as large as the norm's.
    inverse = jnp.asarray(np.exp(normal(2, m)))
    weight = jnp.asarray(1 + normal(3, n), dtype) if scaled else None
    dy, others = (
        jnp.asarray(normal(4, m, n), dtype),
        jnp.asarray(normal(5, m, n) * np.exp(normal(2, m))[:, None], dtype),
    )
    run = lambda dy: norm_triton.backward(  # noqa: E731
        operation, codes, scales, inverse, weight, dy, dtype, others if residual else None, compute_capability=90
    )
    *actual, amax = run(dy)
    assert float(amax) == np.abs(np.asarray(actual[0]).astype(np.float32)).max()
    # Rows that are not finite are not compared.
    bad, *_, amax = run(dy.at[m - 1, 3].set(jnp.inf).at[0, 0].set(jnp.nan))
    magnitudes = np.abs(np.asarray(bad).astype(np.float32))
    assert not np.isfinite(magnitudes[[0, m - 1]]).any()
    assert float(amax) == magnitudes[1:-1].max()

    wide_ = lambda x: np.asarray(x).astype(np.float64)  # noqa: E731
    normalized = wide_(codes) * np.repeat(wide_(scales), 16, 1) * wide_(inverse)[:, None]
    t = wide_(dy) * (1 if weight is None else wide_(weight))
    dx = t - normalized * (t * normalized).mean(1, keepdims=True) - (t.mean(1, keepdims=True) if centered else 0)
    dx = wide_(inverse)[:, None] * dx + (wide_(others) if residual else 0)
    expected = (dx, (wide_(dy) * normalized).sum(0) if scaled else None, wide_(dy).sum(0) if biased else None)
    # Sums of n or m terms in fp32, with accumulated rounding errors, and one rounding to the gradient's dtype.
    sizes = [np.abs(dx).max(1, keepdims=True), m * 4.0, m * 4.0]
    for result, exact, size, last in zip(actual, expected, sizes, (float(jnp.finfo(dtype).eps), 0, 0), strict=True):
        assert (result is None) == (exact is None)
        if exact is not None:
            assert result is not None
            excess = np.abs(wide_(result) - exact) - last / 2 * np.abs(exact)
            assert (excess <= 64 * 2.0**-24 * size * 4).all(), excess.max()


def check_norms() -> None:
    """Full and masked tiles, one row and two at a time, with and without prefetch, scales in pairs or alone."""
    from pallas_kernels.nonlinear import norm_triton

    prefetch_bytes = norm_triton.PREFETCH_BYTES
    shapes = [(35, 48, 11), (34, 64, 8), (40, 80, 40)]  # rows, channels, and the minimum of partial sums
    kinds = [(True, False, False), (True, True, True), (False, False, False)]
    for (m, n, sums), given, residual, stages in itertools.product(shapes, kinds, (False, True), (False, True)):
        if not residual and (stages or given[1]):
            continue  # `tests.kernels.fused_interpreter` has these
        norm_triton.MIN_SUMS, norm_triton.PREFETCH_BYTES = sums, prefetch_bytes if stages else 0
        for wide, dtype in ((False, jnp.bfloat16), (True, jnp.float32)):
            if (n == 80) <= wide:
                check_norm(m, n, wide, dtype, given, residual)
    norm_triton.PREFETCH_BYTES = prefetch_bytes


def check_amaxes() -> None:
    """Compares amaxes of results and cotangents with float64, for tiles that are partial in one direction."""
    from pallas_kernels.nonlinear import operations_triton, quantize_recomputed_triton, sampled_amax_triton

    gate_kind, up_kind = quantize_recomputed_triton.GATE, quantize_recomputed_triton.UP
    operation = operations_triton.Operation(reads_arrays=True, dtype=0)
    rows = sampled_amax_triton.SAMPLE_ROWS
    for (m, n), every in itertools.product(((64, 192), (33, 128), (70, 64), (97, 40)), (1, 2)):
        gate, up, dy = (normal(i, m, n) for i in range(3))
        # The largest values are in the last row and column, where a wrong mask reads too much or too little.
        for x in (up, dy):
            x[-1, -1] = 20
        arrays = [jnp.asarray(x) for x in (gate, up, dy)]
        operands = quantize_recomputed_triton.Operands(first=arrays[0], up=arrays[1], gradient=arrays[2])
        g, u, d = (x.astype(np.float64) for x in (gate, up, dy))
        sigmoid = 1 / (1 + np.exp(-g))
        exact = {
            (quantize_recomputed_triton.RESULT,): [g * sigmoid * u],
            (gate_kind, up_kind): [d * u * sigmoid * (1 + g * (1 - sigmoid)), d * g * sigmoid],
            (gate_kind,): [d * u * sigmoid * (1 + g * (1 - sigmoid))],
            (up_kind,): [d * g * sigmoid],
        }
        sampled = np.arange(m) // rows % every == 0
        for kinds, values in exact.items():
            expected = [np.abs(x[sampled]).max() for x in values]
            for condition, factor in ((None, 1), (jnp.array(True), 1), (jnp.array(False), 0)):
                actual = sampled_amax_triton.compute_amaxes(
                    operation, kinds, operands, every=every, compute_if=condition, compute_capability=90
                )
                np.testing.assert_allclose(actual, np.multiply(factor, expected), rtol=1e-4, err_msg=f"{(m, n, every)}")


def check_decay(weight: Any, grad: Any) -> None:
    """Parameters with and without weight decay in one tree, in both forms of the step, quantized or not."""
    from tests.kernels import adamw_cases
    from tests.kernels.adamw_cases import ADAM, decoded, stored

    adam = dataclasses.replace(ADAM, b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4, rate=0.25, weight_decay=0.5)
    draws: dict[str, list[Any]] = {}
    for i, name in enumerate(("decays", "stays")):
        g, m, v, w = (normal(10 * i + k, 5, 256) for k in range(4))  # one tile of eight groups, and two groups
        draws[name] = [
            jnp.asarray(g, grad), stored(m, "e4m3"), stored(v**2, "e4m3", moment="nu"), jnp.asarray(w, weight)
        ]  # fmt: skip
    grads, mus, nus, params = ({name: leaf[k] for name, leaf in draws.items()} for k in range(4))
    for mask, form in itertools.product(({"decays": True, "stays": False}, False, True), ("update", "step")):
        run = getattr(adamw_cases, form)
        result, *_ = run(grads, mus, nus, params, adam, decays=mask, impl="triton")
        for name in draws:
            g, w = (np.asarray(x).astype(np.float64) for x in (grads[name], params[name]))
            m, v = 0.8 * decoded(mus[name]) + 0.2 * g, 0.95 * decoded(nus[name]) + 0.05 * g * g
            direction = m / (1 - 0.8**3) / (np.sqrt(v / (1 - 0.95**3) + 1e-4) + 1e-3)
            decays = mask if isinstance(mask, bool) else mask[name]
            change = -0.25 * (direction + 0.5 * w * decays)
            expected = w + change if form == "step" else change
            actual = np.asarray(result[name]).astype(np.float64)
            # The kernel computes roots and powers with a relative error of 1e-5.
            bound = 1e-4 * (np.abs(w) + np.abs(change) + 1) + float(jnp.finfo(weight).eps) * np.abs(expected)
            assert (np.abs(actual - expected) <= bound).all(), (mask, form, name, np.max(np.abs(actual - expected)))
    result, *_ = adamw_cases.update(grads, mus, nus, None, adam, decays=False, impl="triton")
    plain, *_ = adamw_cases.update(grads, mus, nus, params, adam, decays=False, impl="triton")
    for name in draws:
        a, b = (np.asarray(tree[name]).astype(np.float64) for tree in (result, plain))
        np.testing.assert_allclose(a, b, rtol=2.0**-7)


def check_noise() -> None:
    """A symmetric matrix halfway between codes: the codes of its copy have their own noise, and so does each key."""
    from fp8jax.ops.quantization import quantize

    x = np.random.default_rng(0).integers(-100, 100, (64, 64)) + 0.5
    x = jnp.asarray(np.minimum(x, x.T), jnp.float32).at[0, 0].set(127.0)

    def up(key: int) -> list[np.ndarray]:
        pair = quantize.quantize(x, "int8+stochastic", "int8+stochastic", key=jax.random.key(key), impl="triton")
        results = []
        for q in pair:
            assert q is not None
            values = np.asarray(q.codes).astype(np.float64) - np.asarray(x, np.float64)
            assert (np.abs(values) <= 0.5).all()
            results.append(values[1:, 1:] > 0)
        return results

    rows, columns = up(0)
    for a, b in ((rows, columns), (rows, columns.T), (rows, up(1)[0]), (columns, up(1)[1])):
        assert 0.45 < np.mean(a == b) < 0.55, np.mean(a == b)
    assert 0.47 < rows.mean() < 0.53
    for a, b in zip((rows, columns), up(0), strict=True):
        np.testing.assert_array_equal(a, b)


def main() -> None:
    from tests.kernels import test_adamw_interpreted, triton_interpreter

    triton_interpreter.prepare()
    test_adamw_interpreted.prepare()
    check_norms()
    check_amaxes()
    for weight, grad in ((jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.float32)):
        check_decay(weight, grad)
    check_noise()
    print("done")


if __name__ == "__main__":
    main()
