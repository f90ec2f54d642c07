"""Triton kernels that are called directly reject unsupported arguments before compilation."""

import functools

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton")

from pallas_kernels.optimizers import adamw_triton, fp8lm_triton
from pallas_kernels.quantization import (
    fallback_triton,
    fold_triton,
    nvfp4_triton,
    quantize_rows_triton,
    quantize_triton,
    transpose_triton,
)
from pallas_kernels.quantization.scaling_triton import Coding

F32, BF16, F8, FP16 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float16
quantize, quantize_rows = quantize_triton.quantize, quantize_rows_triton.quantize_rows
NOISE = jnp.zeros(2, jnp.uint32)
TENSOR, DRAWN = Coding("tensor"), Coding("tensor", is_stochastic=True)


def ones(*shape, dtype=F32):
    return jnp.ones(shape, dtype)


def adamw(weight, grad=F32, mu=F8, dither=None, size=128, **settings):
    """A step of 4 x 256 elements. Moments are codes, or values for "fp32" and "bf16"."""

    def moment(dtype):
        values = ones(4, 256, dtype=dtype)
        return (values, ones(4, 2)) if dtype == F8 else (values,)

    storage = adamw_triton.Storage(448.0, None, None, True)
    scalars = adamw_triton.AdamWScalars(*[jnp.float32(0.5)] * 10, dither=dither)
    return adamw_triton.adamw(
        ones(4, 256, dtype=grad), weight, moment(mu), moment(F8), scalars,
        mu_storage=storage if mu == F8 else None, nu_storage=storage,
        dead_elements=adamw_triton.DeadElementParams(*[0.1] * 5), group_size=size, **settings,
    )  # fmt: skip


def fp8lm(weight, grad=F32, masters=0, **settings):
    codes = (*[ones(4, 256, dtype=FP16)] * masters, ones(4, 256, dtype=F8), ones(4, 256, dtype=FP16))
    scalars = fp8lm_triton.FP8LMScalars(*[jnp.float32(0.5)] * 11)
    scales = ones(1 + 3 * len(codes), 1)
    return fp8lm_triton.fp8lm(ones(4, 256, dtype=grad), weight, codes, scales, scalars, **settings)


W, HIGH = functools.partial(ones, 4, 256), functools.partial(ones, 4, 256, dtype=BF16)
MASTER = r"a master weight is fp32, or for a step bf16 with a seed, or with a remainder"
CALLS = {
    "adamw without the weight": (lambda: adamw(None, in_place=True), "in_place needs the weight"),
    "adamw, remainder of fp32": (
        lambda: adamw((W(), ones(4, 256, dtype=jnp.int8)), in_place=True), "a remainder, .* needs a bf16 weight"
    ),
    "adamw, change of a remainder": (
        lambda: adamw((HIGH(), ones(4, 256, dtype=jnp.int8)), in_place=False), "a remainder, .*, in place"
    ),
    "adamw, wide remainder": (
        lambda: adamw((HIGH(), ones(4, 256, dtype=jnp.int32)), in_place=True), "a remainder, int8 or int16"
    ),
    "adamw, groups": (lambda: adamw(W(), in_place=True, size=48), "AdamW kernel cannot run: group_size 48"),
    "adamw, noise of fp32": (lambda: adamw(W(), in_place=True, seed=NOISE), "stochastic rounding needs bf16 weights"),
    "adamw, noise of a change": (lambda: adamw(HIGH(), in_place=False, seed=NOISE), "needs bf16 weights, in place"),
    "adamw, noise of a moment": (lambda: adamw(W(), in_place=True, nu_seed=NOISE), "nu_seed requires a second moment"),
    "adamw, dither": (lambda: adamw(W(), in_place=True, dither=jnp.float32(0.5)), "`dither` requires a first moment"),
    "fp8lm, gradient": (lambda: fp8lm(W(), grad=jnp.int8, in_place=True), "fp8lm_adamw cannot run: the gradient"),
    "fp8lm, bf16 master": (lambda: fp8lm(HIGH(), in_place=True), MASTER),
    "fp8lm, change of a master": (
        lambda: fp8lm((HIGH(), ones(4, 256, dtype=jnp.int8)), in_place=False), MASTER
    ),
    "quantize, stack of stacks": (lambda: quantize(ones(2, 2, 32, 32), TENSOR, None), "one leading dimension"),
    "quantize, noise of a stack": (
        lambda: quantize(ones(2, 32, 32), DRAWN, None, seed=NOISE), "no seed and no sums"
    ),
    "quantize, sums of a stack": (
        lambda: quantize(ones(2, 32, 32), TENSOR, None, sums=True), "no seed and no sums"
    ),
    "quantize, empty": (lambda: quantize(ones(0, 32), TENSOR, None), r"non-empty matrix, not shape \(0, 32\)"),
    "quantize, integers": (lambda: quantize(ones(4, 32, dtype=jnp.int8), TENSOR, None), "has dtype int8"),
    "quantize, same tokens": (
        lambda: quantize(ones(32, 32), Coding("token"), "same"), "'same' needs rows of kind .*token"
    ),
    "quantize, same without rows": (lambda: quantize(ones(32, 32), None, "same"), "'same' .* not None"),
    "quantize, no seed": (lambda: quantize(ones(32, 32), DRAWN, None), "rounding needs a seed"),
    "quantize, no seed for columns": (
        lambda: quantize(ones(32, 32), TENSOR, DRAWN), "rounding needs a seed"
    ),
    "rows, too long": (
        lambda: quantize_rows(ones(1, 32769), Coding("token")), "32769 elements is longer than 32768"
    ),
    "rows, noise": (
        lambda: quantize_rows(ones(4, 32), Coding("token", is_stochastic=True)), "to nearest"
    ),
    "nvfp4, no seed": (
        lambda: nvfp4_triton.quantize(ones(32, 32), nvfp4_triton.Coding("nv", True), None), "needs a seed"
    ),
    "fallback, blocks": (lambda: fallback_triton.quantize(ones(64, 64), ones(), 64), "fallback kernel cannot run"),
    "transpose, wide": (lambda: transpose_triton.transpose(ones(4, 4)), r"matrix of bytes, got float32\(4, 4\)"),
    "transpose, vector": (lambda: transpose_triton.transpose(ones(4, dtype=F8)), r"float8_e4m3fn\(4,\)"),
    "transpose, empty": (lambda: transpose_triton.transpose(ones(0, 4, dtype=F8)), r"non-empty .*\(0, 4\)"),
    "fold, exponents": (
        lambda: fold_triton.fold_codes(ones(4, 64, dtype=F8), ones(4, 1, dtype=jnp.uint8), ones(1, 1)),
        r"exponents is uint8\[4, 1\], not uint8 of shape \(4, 2\)",
    ),
    "fold, scales": (
        lambda: fold_triton.fold_codes(ones(4, 64, dtype=F8), ones(4, 2, dtype=jnp.uint8), ones(2, 1)),
        r"outer_scale is float32\[2, 1\], not float32 of shape \(4, 1\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_what_a_kernel_cannot_compute_is_refused(call):
    make, message = CALLS[call]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(make)
