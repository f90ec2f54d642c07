"""A data-parallel step in `jax.shard_map` runs the kernels, whether or not it checks how values vary over devices."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

import fp8jax
from fp8jax.ops import choice

needed = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
FLAG = "--xla_gpu_enable_triton_gemm=false"


@needed
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("name", "products"), [("coat", "stablehlo.dot_general"), ("deepseek", "mosaic_gpu")])
def test_a_step_lowered_for_cuda_has_kernels(name, products, check, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    recipe, tx = fp8jax.recipes.get(name), fp8jax.compressed_adamw(1e-3)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def step(params, state, x):
        def loss(params):
            h = fp8jax.rms_norm(x, params["norm"], recipe=recipe)
            gate, up = (fp8jax.linear(h, params[w], recipe=recipe) for w in ("gate", "up"))
            y = fp8jax.linear(fp8jax.glu(gate, up, recipe=recipe), params["down"], recipe=recipe)
            return jax.lax.pmean(jnp.mean(y.astype(jnp.float32) ** 2), "data")

        grads = jax.grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    whole, data = jax.P(), jax.P("data")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(whole, whole, data), out_specs=(whole, whole), check_vma=check)  # fmt: skip
    shapes = {"norm": (256,), "gate": (256, 512), "up": (256, 512), "down": (512, 256)}
    params = {key: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for key, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    with choice.listening() as told:
        traced = jax.jit(mapped).trace(params, jax.eval_shape(tx.init, params), x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    by = {(operation, how.impl) for operation, how in told}
    expected = {("quantize", "triton"), ("matmul", "mosaic" if name == "deepseek" else "xla"), ("adamw", "triton")}
    expected |= {("adamw", "xla")}  # the norm's scale, whose moments are not compressed
    expected |= {("norm", "triton"), ("activation", "triton")} if name == "coat" else set()
    assert by == expected
    assert "triton_kernel_call" in text
    assert products in text
