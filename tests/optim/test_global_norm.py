"""The global norm of gradients, against float64."""

import jax
import jax.numpy as jnp
import numpy as np

import fp8jax
from fp8jax.optim.clipping import global_norm

ARRAYS = [jax.random.normal(jax.random.key(i), s).astype(d) for i, (s, d) in enumerate(
    [((3, 5, 7), "float32"), ((400,), "bfloat16"), ((), "float32"), ((0, 4), "float16")])]  # fmt: skip


def test_it_is_the_root_of_all_squares():
    codes = fp8jax.quantize(ARRAYS[0][0], "e4m3")
    values = [*ARRAYS, codes.dequantize()]
    expected = np.sqrt(sum(np.sum(np.square(np.asarray(x).astype(np.float64))) for x in values))
    recorded = jax.jit(global_norm)([*ARRAYS, codes])
    np.testing.assert_allclose(recorded, expected, rtol=1e-6)
    assert recorded.dtype == jnp.float32
    assert float(global_norm([])) == 0
    assert np.isnan(global_norm([*ARRAYS, jnp.array([jnp.nan])]))
