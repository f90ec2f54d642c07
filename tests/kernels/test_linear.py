"""What XLA makes of a linear layer for an H200."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fp8jax
from tests.kernels import h200


def layer() -> tuple[Any, tuple[Any, ...]]:
    """Forward and backward of a layer with one scale a tensor, in a process that compiles for a GPU."""
    jax.default_backend = lambda: "gpu"
    recipe = fp8jax.recipes.te_current()

    def program(x: Any, w: Any, dy: Any) -> Any:
        y, back = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=recipe), x, w)
        return y, back(dy)

    return program, tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 2048), (2048, 1024), (4096, 1024)))


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_products_of_one_scale_a_tensor_get_it_in_fp32() -> None:
    found = h200.report("tests.kernels.test_linear:layer")
    assert sum("cublas$lt$matmul$f8" in call for call in found["calls"]) == 3
    assert found["narrow"] == 0
