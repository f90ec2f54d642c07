"""Contradictory settings of a recipe raise an error at construction, with the value and the fix."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import fp8jax
from fp8jax.core import scaling
from fp8jax.core.recipe import Comm, Context, Linear, Optimizer, Recipe, Weights
from fp8jax.ops.dispatch import choice
from fp8jax.ops.products.linear import ScalingState

BLOCK = "int8:block32"
THRESHOLD = Linear(BLOCK, BLOCK, BLOCK, scaling="threshold")
DELAYED = Linear("e4m3", "e4m3", "e5m2", scaling="delayed")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Comm("e4m3", "three_phase"), "unknown comm.form 'three_phase'; use one of"),
        (lambda: Comm(None, auto_scale=True), "auto_scale=True require 8-bit gradients, but comm.gradients is None"),
        (lambda: Comm("bf16", "one_phase"), "comm.form 'one_phase' and .* 'bf16'. Set comm.gradients='e4m3'"),
        (lambda: Comm("e4m3:token"), "'e4m3:token' is not supported. Use a spec with one scale per tensor"),
        (lambda: Comm("e4m3:group16+expand"), "without expansion, such as 'e4m3'"),
        (lambda: Comm("e4m3+stochastic"), "'e4m3.stochastic' must round to nearest and have fp32 scales"),
        (lambda: dataclasses.replace(DELAYED, weight_amax_interval=0), "weight_amax_interval must be positive, not 0"),
        (lambda: Linear(*["e4m3:block32"] * 3, scaling="threshold"), "requires int8 blocks, got"),
        (lambda: dataclasses.replace(THRESHOLD, w="int8:block16"), "the same blocks for x and w .* w='int8:block16'"),
        (lambda: dataclasses.replace(THRESHOLD, x_residual=None, x_wgrad=None, dy_wgrad=None), "a quantized x_res"),
        (lambda: dataclasses.replace(DELAYED, scaling="threshold"), "use granularity 'block' for x"),
        (lambda: Recipe("mine", optimizer=Optimizer("e4m3", "e4m3", None, expand=False)), "set optimizer.group_size"),
        (lambda: Recipe("mine", weights=Weights("fp16")), "master 'fp16' requires Optimizer.*, not Optimizer"),
        (lambda: Recipe("mine", linear="e4m3"), "linear must be of type Linear, not 'e4m3'"),
        (lambda: Linear("e4m3:group32", "e4m3", "e5m2"), "x_wgrad cannot be the same as 'e4m3:group32'"),
        (lambda: Linear("e4m3", "e4m3:group32", "e5m2"), "w_dgrad cannot be the same as 'e4m3:group32'"),
        (lambda: Linear("e4m3", "e4m3", "e5m2:group32"), "dy_wgrad cannot be the same as 'e5m2:group32'"),
        (lambda: Linear("e4m3", "e4m3", "e5m2", x_residual="e4m3:group32"), "x_wgrad cannot be the same as"),
        (lambda: fp8jax.QuantSpec("e4m3", layer_axes=2).block_shape((4,)), "stacks 2 leading axes, .* shape .4,. has"),
        (lambda: fp8jax.scaled_linear(jnp.ones((2, 4)), jnp.ones((4, 3)), fp8jax.init_scaling(DELAYED), recipe=DELAYED),
         "pass amax_slot="),
        (lambda: fp8jax.weight_scale(jnp.ones((4, 3)), ScalingState(), recipe=DELAYED),
         "the scaling of w keeps a state, but none was passed"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


PARAMS = {"w": jnp.ones((4, 128))}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Comm("e4m3", auto_scale=True), "auto_scale applies only to comm.form 'one_phase'"),
        (lambda: Context("e4m3:channel"), "'e4m3:channel' must have scales along the channels"),
        (lambda: scaling.find_scaling("none"), "'none' is not a known scaling; use one of current, "),
        (lambda: fp8jax.recipes.for_shapes(DELAYED), "for_shapes expects a Recipe .*, got Linear"),
        (lambda: fp8jax.recipes.device(-1), "unknown compute capability; .* got -1"),
        (lambda: fp8jax.rms_norm(jnp.ones((2, 4)), jnp.ones(3), recipe="coat"),
         r"scale \(channels,\), got \(2, 4\) and \(3,\)"),
        (lambda: fp8jax.layer_norm(jnp.ones((2, 4)), jnp.ones(4), jnp.ones(5), recipe="coat"),
         r"bias \(channels,\), got \(2, 4\) and \(5,\)"),
        (lambda: fp8jax.rms_norm(jnp.float32(1), recipe="coat"), r"got \(\) and None"),
        (lambda: fp8jax.with_clipping(1.0, optax.adam(1e-3)), "with `step`, got .* Clip others with optax.chain"),
        (lambda: fp8jax.compressed_adamw(1e-3, mu="fp32", nu="bf16", impl="triton"), "mu is 'fp32' and nu is 'bf16'"),
        (lambda: choice.target(capability=9).__enter__(), "use 80 for an A100 or 90 for an H200, got 9"),
        (lambda: choice.target(free_multiprocessors=65).__enter__(), r"must be in \[0, 64\], got 65"),
        (lambda: choice.missing_triton("quantization.quantise_triton"), "no kernel pallas_kernels.*quantise_triton"),
    ],
)  # fmt: skip
def test_invalid_input_is_refused_with_its_value(make, message):
    with pytest.raises((ValueError, TypeError, ModuleNotFoundError), match=message):
        make()


def test_moments_with_another_expansion_are_refused():
    """Their codes, scales and exponents have the same dtypes."""
    stored, other = (fp8jax.compressed_adamw(1e-3, min_size=0, expand=expand) for expand in (True, "coat"))
    with pytest.raises(ValueError, match=r"mu of \['w'\] is stored with expand=True, .* has 'coat'. Convert the state"):
        jax.eval_shape(lambda: other.update(PARAMS, stored.init(PARAMS), PARAMS))
