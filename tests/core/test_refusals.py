"""Contradictory settings of a recipe raise an error at construction, with the value and the fix."""

import dataclasses

import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax.core.recipe import Comm, Linear, Optimizer, Recipe, Weights
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
