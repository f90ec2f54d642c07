"""Codes of groups of rows against NumPy, and the padded token axis; the kernel is interpreted in `test_quantize.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.ops.quantization.grouped import group_layout, quantize_groups
from tests.kernels import group_cases as cases

NONE_WRONG = {"starts": 0, "lengths": 0, "rows": 0, "columns": 0}


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_codes_are_those_of_each_group(case: cases.Case) -> None:
    assert cases.wrong(case, "xla") == NONE_WRONG


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_codes_are_those_of_each_group_on_a_gpu(case: cases.Case) -> None:
    assert cases.wrong(case, "triton") == NONE_WRONG


def test_padded_rows_are_those_of_each_group() -> None:
    sizes, x = np.array([0, 127, 3, 0, 127]), np.arange(300, dtype=np.float32)[:, None] + 1
    layout = group_layout(jnp.asarray(sizes, jnp.int8), 300)  # whose sum int8 does not hold
    want = np.zeros((layout.num_tokens, 1))
    for start, first, size in zip([0, 0, 128, 256, 256], [0, 0, 127, 130, 130], sizes, strict=True):
        want[start : start + size] = x[first : first + size]
    np.testing.assert_array_equal(layout.pad(jnp.asarray(x)), want)
    index = np.random.default_rng(0).permutation(300)
    np.testing.assert_array_equal(layout.pad(jnp.asarray(x)[np.argsort(index)], jnp.asarray(index)), want)
    assert (np.asarray(layout.lengths) == sizes).all()
    clipped = group_layout(jnp.asarray([100, 500]), 300)
    assert list(clipped.lengths) == [100, 200]
    assert clipped.num_tokens >= 128 + 256


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rows": None}, "rows and columns are None"),
        ({"rows": "e4m3", "row_scale": None}, "rows is 'e4m3' and row_scale is None"),
        ({"row_scale": jnp.ones(5)}, r"row_scale has shape \(5,\); expected \(\) or \(8,\)"),
        ({"rows": "bf16"}, "rows is 'bf16'; expected 'e4m3', 'e5m2' or 'int8'"),
        ({"x": jnp.ones((7, 4))}, r"the layout has 3 blocks; make it by group_layout\(sizes, 200\)"),
        ({"x": jnp.ones((8, 4, 1))}, r"x has shape \(8, 4, 1\)"),
        ({"x": jnp.ones((8, 4), jnp.float8_e4m3fn)}, "x has codes of float8_e4m3fn, which are only transposed"),
    ],
)
def test_errors_name_the_value_and_the_fix(changes: dict[str, Any], text: str) -> None:
    arguments = {"x": jnp.ones((8, 4)), "rows": "e4m3", "row_scale": jnp.ones(()), **changes}
    index = jnp.zeros(200, jnp.int32) if arguments["x"].shape[0] == 7 else None
    with pytest.raises(ValueError, match=text):
        quantize_groups(layout=group_layout(jnp.asarray([3, 5]), 8), index=index, **arguments)


def test_codes_under_jit_and_vmap() -> None:
    case = cases.CASES[1]
    given = cases.arguments(case)
    sizes = given.pop("sizes")

    def run(x: jax.Array, sizes: jax.Array) -> Any:
        settings = {key: value for key, value in given.items() if key != "x"}
        layout = group_layout(sizes, case.num_rows)
        return quantize_groups(x, layout, rows=case.rows, columns=case.columns, **settings)

    once = run(given["x"], sizes)
    twice = jax.jit(jax.vmap(run))(jnp.stack([given["x"]] * 2), jnp.stack([sizes] * 2))
    for want, got in zip(once, twice, strict=True):
        np.testing.assert_array_equal(np.asarray(got[1]).view(np.uint8), np.asarray(want).view(np.uint8))
