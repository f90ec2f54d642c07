"""Codes of groups of rows, compared with NumPy; `test_quantize.py` interprets the kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.ops.quantization.grouped import quantize_groups
from tests.kernels import group_cases as cases

NONE_WRONG = {"rows": 0, "columns": 0}


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_codes_are_those_of_each_group(case: cases.Case) -> None:
    assert cases.wrong(case, "xla") == NONE_WRONG


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_codes_are_those_of_each_group_on_a_gpu(case: cases.Case) -> None:
    assert cases.wrong(case, "triton") == NONE_WRONG


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rows": None}, "rows and columns are both None"),
        ({"rows": "e4m3", "row_scale": None}, "rows is 'e4m3' and row_scale is None"),
        ({"row_scale": jnp.ones(5)}, r"row_scale has shape \(5,\); expected \(\) or \(8,\)"),
        ({"rows": "bf16"}, "rows is 'bf16'; expected 'e4m3', 'e5m2' or 'int8'"),
        ({"x": jnp.ones((7, 4))}, "tokens has 8 rows and alignment 128; expected 200 and 128"),
        ({"x": jnp.ones((8, 4, 1))}, r"x has shape \(8, 4, 1\)"),
        ({"x": jnp.ones((8, 4), jnp.float8_e4m3fn)}, "x has codes of float8_e4m3fn, which are only copied"),
        ({"row_factor": jnp.ones(8)}, "row_factor needs 8-bit codes, but x is float32"),
    ],
)
def test_errors_name_the_value_and_the_fix(changes: dict[str, Any], text: str) -> None:
    arguments = {"x": jnp.ones((8, 4)), "rows": "e4m3", "row_scale": jnp.ones(()), **changes}
    index = jnp.zeros(200, jnp.int32) if arguments["x"].shape[0] == 7 else None
    with pytest.raises(ValueError, match=text):
        quantize_groups(tokens=cases.make_tokens(jnp.asarray([3, 5]), 8), index=index, **arguments)


def test_codes_under_jit_and_vmap() -> None:
    case = cases.CASES[1]
    arguments = cases.arguments(case)
    sizes = arguments.pop("sizes")

    def run(x: jax.Array, sizes: jax.Array) -> Any:
        settings = {key: value for key, value in arguments.items() if key != "x"}
        tokens = cases.make_tokens(sizes, case.num_rows)
        return quantize_groups(x, tokens, rows=case.rows, columns=case.columns, **settings)

    once = run(arguments["x"], sizes)
    twice = jax.jit(jax.vmap(run))(jnp.stack([arguments["x"]] * 2), jnp.stack([sizes] * 2))
    for expected, actual in zip(once, twice, strict=True):
        # By values: a NaN of e5m2 may have other bits under jit.
        np.testing.assert_array_equal(np.asarray(actual[1], np.float32), np.asarray(expected, np.float32))
