"""A data-parallel step in `jax.shard_map` runs the kernels, with and without the check of varying axes."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

import fp8jax
from fp8jax.ops.dispatch import choice
from fp8jax.ops.matmul.matmul import matmul
from fp8jax.ops.quantization import quantize as ops
from fp8jax.ops.quantization.microscaling import fold_microscales, fold_rows
from tests.programs import triton_calls
from tests.rows import slow

needed = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
DATA, REPLICATED = jax.P("data"), jax.P()


@pytest.fixture
def mesh():
    """Two devices of a program that is lowered for GPUs."""
    with choice.target(capability=90):
        yield jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])


@needed
@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("coat", "cuBLASLt's product, scales applied in it"),
        slow("deepseek", "the kernel for scales of groups of 128"),
    ],
)
def test_a_step_lowered_for_cuda_has_kernels(name, reason, check, mesh, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    recipe, tx = fp8jax.recipes.get(name), fp8jax.compressed_adamw(1e-3)

    def step(params, state, x):
        def loss(params):
            gate, up = fp8jax.norm_linear(x, params["norm"], (params["gate"], params["up"]), recipe=recipe)
            y = fp8jax.glu_linear(gate, up, params["down"], recipe=recipe)
            return jax.lax.pmean(jnp.mean(y.astype(jnp.float32) ** 2), "data")

        grads = jax.grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    in_specs, out_specs = (REPLICATED, REPLICATED, DATA), (REPLICATED, REPLICATED)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)
    shapes = {"norm": (256,), "gate": (256, 512), "up": (256, 512), "down": (512, 256)}
    params = {key: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for key, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    with choice.record_choices() as choices:
        traced = jax.jit(mapped).trace(params, jax.eval_shape(tx.init, params), x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    expected = {("quantize", "triton"), ("matmul", "mosaic" if name == "deepseek" else "xla"), ("adamw", "triton")}
    expected |= {("adamw", "xla")}  # the norm's scale, whose moments are not compressed
    expected |= {("norm", "triton"), ("activation", "triton")} if name == "coat" else set()
    assert {(operation, how.impl) for operation, how in choices} == expected
    assert {how.reason for operation, how in choices if operation == "matmul"} == {reason}
    assert triton_calls(text)
    assert ("mosaic_gpu" in text) == (name == "deepseek")


@needed
def test_results_of_kernels_vary_where_their_arguments_do(mesh):
    tensor, micro = "e4m3", "e4m3:mx32"

    def everything(x, w):
        (a, transposed), (b, _) = ops.quantize(x, tensor, "same", impl="triton"), ops.quantize(w, tensor, impl="triton")
        (rows, _), (columns, _) = (ops.quantize(z, "e4m3:token", impl="triton") for z in (x, w))
        return {
            "quantize": (a, transposed),
            "transpose": ops.transpose(a, impl="triton"),
            "matmul": matmul(rows, columns, impl="mosaic"),
            "auto": matmul(a, b),
            "fold": fold_rows(x, fp8jax.QuantSpec.parse(micro), impl="triton"),
            "refold": fold_microscales(fp8jax.quantize(x, micro), impl="triton"),
        }

    found = {}

    def local(x, w):
        for name, results in everything(x, w).items():
            found[name] = {choice.varying_axes(leaf) for leaf in jax.tree.leaves(results)}
        return x

    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(DATA, REPLICATED), out_specs=DATA)).trace(
        *(jax.ShapeDtypeStruct((256, 256), jnp.bfloat16) for _ in range(2))
    )
    assert len(found) == 6
    assert all(axes == {frozenset(["data"])} for axes in found.values()), found
