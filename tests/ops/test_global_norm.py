"""The norm of many arrays together, beside float64; its kernel is tested in Triton's interpreter (tests/kernels)."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.ops.dispatch import choice
from fp8jax.ops.optimizers.global_norm import global_norm
from tests.programs import chosen

ARRAYS = [jax.random.normal(jax.random.key(i), s).astype(d) for i, (s, d) in enumerate(
    [((3, 5, 7), "float32"), ((400,), "bfloat16"), ((), "float32"), ((0, 4), "float16")])]  # fmt: skip


def test_it_is_the_root_of_all_squares():
    want = np.sqrt(sum(np.sum(np.square(np.asarray(x).astype(np.float64))) for x in ARRAYS))
    np.testing.assert_allclose(jax.jit(global_norm)(ARRAYS), want, rtol=1e-6)
    assert jax.jit(global_norm)(ARRAYS).dtype == jnp.float32
    assert float(global_norm([])) == 0
    assert np.isnan(global_norm([*ARRAYS, jnp.array([jnp.nan])]))


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
def test_the_kernel_takes_what_lies_on_one_gpu(monkeypatch):
    from fp8jax.ops.optimizers import global_norm as module

    with choice.target(capability=90):
        monkeypatch.setattr(module, "on_one_device", lambda: True)
        assert chosen(global_norm, ARRAYS).impl == "triton"
        monkeypatch.setattr(module, "on_one_device", lambda: False)
        assert "on several devices XLA" in chosen(global_norm, ARRAYS).reason
        monkeypatch.setattr(module, "on_one_device", lambda: True)
        assert "takes no int32" in chosen(global_norm, [*ARRAYS, jnp.arange(3)]).reason
    with choice.target(kernels=False), pytest.raises(ValueError, match="kernels are switched off"):
        global_norm(ARRAYS, impl="triton")
