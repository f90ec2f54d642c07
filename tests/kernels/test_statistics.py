"""The kernel of telemetry's statistics; `triton_interpreter` runs its cases on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.ops.quantization import statistics

pytest.importorskip("jax_triton")

from tests.kernels import statistics_cases as cases


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_statistics_are_the_references_on_a_gpu(case):
    assert cases.wrong(case) == {}


@pytest.mark.gpu
def test_statistics_of_parts_are_merged_on_a_gpu():
    assert cases.wrong_merge() == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.MOMENTS, ids=str)
def test_moments_are_those_in_float64_on_a_gpu(case):
    assert cases.wrong_moment(case) == 0


@pytest.mark.parametrize("spec", ["e4m3:token", "e4m3:group16+expand"])
def test_rows_that_are_masked_out_are_in_no_statistic(spec):
    """The other rows alone have the same statistics. The masked rows are the largest, and contain NaN."""
    x = jax.random.normal(jax.random.key(0), (16, 64)) * 10.0 ** jnp.linspace(-3, 0, 64)
    mask = jnp.arange(16)[:, None] % 3 > 0
    x = jnp.where(mask, x, 1e6 * x).at[0, 0].set(jnp.nan).at[1, 5].set(jnp.inf).at[2, :7].set(1e-9)
    x = x.at[3].set(jnp.linspace(1, 1.01, 64))  # exponents are largest if the range is small
    selected = x[mask[:, 0]]
    names, expected = statistics.compare(selected, None, fp8jax.quantize(selected, spec), bits=8, impl="xla")
    found, actual = statistics.compare(x, None, fp8jax.quantize(x, spec), bits=8, row_mask=mask, impl="xla")
    assert found == names
    for name, a, b in zip(names, np.asarray(expected), np.asarray(actual), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("spec", "axis_type"), [("e4m3", "Explicit"), ("e4m3:group16+expand", "Auto")])
def test_shards_have_the_statistics_of_the_whole(spec, axis_type, monkeypatch):
    """The kernel, here its reference, sees shards of different magnitudes."""
    from pallas_kernels.quantization import statistics_triton

    x = jax.random.normal(jax.random.key(0), (16, 64)) * 10.0 ** jnp.arange(-8.0, 8)[:, None]
    codes = fp8jax.quantize(x, spec)
    shapes = []

    def compare_parts(x, values, scale, exponents, row_mask, **_):
        shapes.append(x.shape)
        shard = statistics.QTensor(values, scale, exponents, None, codes.spec)
        return statistics.compare(x, None, shard, bits=8, impl="xla")[1]

    monkeypatch.setattr(statistics_triton, "compare_parts", compare_parts)
    monkeypatch.setattr(statistics_triton, "merge", lambda parts, *_, **__: parts)
    names, expected = statistics.compare(x, None, codes, bits=8, impl="xla")
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType[axis_type],) * 2)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data", "fsdp")))
        run = jax.jit(lambda x, codes: statistics.compare(x, None, codes, bits=8, impl="triton")[1])
        actual = run(sharded, codes)
    assert (8, 32) in shapes
    for name, a, b in zip(names, np.asarray(expected), np.asarray(actual), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, err_msg=name)
