"""XLA's compilation of a linear layer for an H200."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from tests.kernels import h200


def layer() -> tuple[Any, tuple[Any, ...]]:
    """The forward and backward pass of a layer with per-tensor scales, in a process that compiles for a GPU."""
    jax.default_backend = lambda: "gpu"
    recipe = fp8jax.recipes.te_current()

    def program(x: Any, w: Any, dy: Any) -> Any:
        y, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=recipe), x, w)
        return y, vjp_fn(dy)

    return program, tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 2048), (2048, 1024), (4096, 1024)))


def transposed_layer() -> tuple[Any, tuple[Any, ...]]:
    """A layer with a weight (outputs, inputs) on the left of mapped vectors, as in Equinox."""
    jax.default_backend = lambda: "gpu"

    def program(w: Any, x: Any, dy: Any) -> Any:
        layer = fp8jax.transform(lambda w, x: jax.vmap(lambda x: w.astype(jnp.bfloat16) @ x)(x), "te_current")
        y, vjp_fn = jax.vjp(layer, w, x)
        return y, vjp_fn(dy)

    shapes = ((1024, 2048), jnp.float32), ((4096, 2048), jnp.bfloat16), ((4096, 1024), jnp.bfloat16)
    return program, tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


LAYERS = [layer, transposed_layer]


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_products_of_one_scale_a_tensor_get_it_in_fp32() -> None:
    actual = h200.report("tests.kernels.test_linear:LAYERS")
    assert sum("cublas$lt$matmul$f8" in call for call in actual["calls"]) == 6
    assert actual["narrow"] == 0
    assert actual["copies"] == 0  # no transposed fp32 values
    # XLA reduces parts of a tensor and then their maxima. The quantizing kernel computes the scale.
    assert actual["numbers"] <= 2 * 6


def block() -> tuple[Any, tuple[Any, ...]]:
    """The forward and backward pass of an MLP that is written with fp8jax's functions."""
    jax.default_backend = lambda: "gpu"
    recipe = fp8jax.recipes.coat()

    def program(x: Any, w: Any, v: Any, narrow: Any, dy: Any) -> Any:
        def f(x: Any, w: Any, v: Any, narrow: Any) -> Any:
            x, gate, up = fp8jax.norm_linear(2 * x, None, (w, v), recipe=recipe, residual=True)
            return fp8jax.glu_linear(gate, up, narrow, x, recipe=recipe)

        y, vjp_fn = jax.vjp(f, x, w, v, narrow)
        return y, vjp_fn(dy)

    shapes = ((4096, 1024), (1024, 2048), (1024, 2048), (2048, 1024), (4096, 1024))
    return program, tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)


def gelu(dtype: Any = jnp.float32) -> tuple[Any, tuple[Any, ...]]:
    """The forward and backward pass of a layer before GELU whose codes no kernel computes."""
    from fp8jax.ops.quantization import fused_outputs

    jax.default_backend = lambda: "gpu"
    fused_outputs.missing_triton = lambda _: "as if it were not installed"  # type: ignore[assignment]
    recipe = fp8jax.recipes.coat()

    def program(x: Any, w: Any, dy: Any) -> Any:
        def f(x: Any, w: Any) -> Any:
            return fp8jax.activation(fp8jax.linear(x, w, recipe=recipe), recipe=recipe, activation="gelu_tanh")

        y, vjp_fn = jax.vjp(f, x, w)
        return y, vjp_fn(dy)

    return program, tuple(jax.ShapeDtypeStruct(s, dtype) for s in ((64, 128), (128, 256), (64, 256)))


def gelu_bf16() -> tuple[Any, tuple[Any, ...]]:
    return gelu(jnp.bfloat16)


def gelu_read() -> tuple[Any, tuple[Any, ...]]:
    """A layer before GELU whose codes the kernels compute, and whose result has another reader."""
    jax.default_backend = lambda: "gpu"
    recipe = fp8jax.recipes.coat()

    def program(x: Any, w: Any, v: Any, dy: Any) -> Any:
        def f(x: Any, w: Any, v: Any) -> Any:
            h = jax.nn.gelu(x @ w)
            return h @ v, h

        rules = [fp8jax.Rule(".*", recipe)]
        y, vjp_fn = jax.vjp(fp8jax.transform(f, rules, params=(1, 2)), x, w, v)
        return y, vjp_fn((dy, y[1]))

    return program, tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((33, 48), (48, 80), (80, 48), (33, 48)))


GELU = [gelu_read, gelu, gelu_bf16]  # the last two disable kernels


@pytest.mark.slow
@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_a_perceptron_is_added_to_its_residual_in_place() -> None:
    actual = h200.report("tests.kernels.test_linear:block")
    assert sum("cublas$lt$matmul$f8" in call for call in actual["calls"]) == 9
    assert actual["in place"] == 2  # and the gate's gradient is added to up's
    assert actual["copied"] == 0


@pytest.mark.slow
@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_gelu_stays_out_of_the_product_which_cannot_have_it() -> None:
    actual = h200.report("tests.kernels.test_linear:GELU")
    assert sum("cublas$lt$matmul$f8" in call for call in actual["calls"]) == 12


@pytest.mark.gpu
def test_the_scale_of_a_product_on_a_gpu_is_that_of_its_codes() -> None:
    """With XLA_FLAGS=--xla_gpu_enable_triton_gemm=false the product is cuBLASLt's, otherwise the kernel's."""
    recipe = fp8jax.recipes.te_current()
    # Scales are nearly halfway between bf16 numbers: if rounded, the product would have an error of 0.77 %. Values have
    # both signs, because fast accumulation rounds towards zero (0.5 % for sums of one sign here).
    x, w = (jnp.clip(jax.random.normal(jax.random.key(i), (512, 512)), -1.7, 1.7) for i in range(2))
    x, w = (a.at[0, 0].set(448 / 256 * (1 + 0.99 * 2**-8)) for a in (x, w))
    y = np.asarray(jax.jit(lambda x, w: fp8jax.linear(x, w, recipe=recipe))(x, w), np.float64)
    a, b = (np.asarray(fp8jax.quantize(z, "e4m3").dequantize(), np.float64) for z in (x, w))
    expected = a @ b
    assert abs(np.sum(y * expected) / np.sum(expected * expected) - 1) < 2e-3
