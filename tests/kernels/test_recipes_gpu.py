"""On a GPU, the kernels of every recipe give the losses, gradients and optimizer steps of XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from experiments.models.llama import LlamaConfig
from experiments.train.task import Task
from fp8jax.core.masters import MasterWeight
from fp8jax.ops.dispatch import choice
from tests.kernels import test_adamw_interpreted as adamw
from tests.kernels import test_fp8lm_interpreted as lm
from tests.rows import few

SHAPE = LlamaConfig(vocab=64, dim=256, layers=1, heads=4, kv_heads=4, mlp_dim=512)
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 129)).astype(np.int32)
RECIPES = [name for name in fp8jax.recipes.NAMES if name not in ("bf16", "coat_optimizer", "auto")]


def distance(a, b):
    """Returns the distance of two trees, relative to the second one."""
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))  # noqa: E731
    a, b = (jax.tree.map(lambda x: np.asarray(x, np.float64), tree) for tree in (a, b))
    return norm(jax.tree.map(np.subtract, a, b)) / norm(b)


def gradients(name, kernels):
    """Returns loss, gradients, and whether a kernel of ours ran."""
    with choice.target(kernels=kernels), choice.record_choices() as choices:
        task = Task(SHAPE, optax.sgd(0.1), fp8jax.recipes.get(name), remat=False, seed=0)
        state = jax.jit(task.init)()
        loss, actual, _ = jax.jit(task.gradients)(state.params, state.model_state, TOKENS)
    return float(loss["loss"]), jax.device_get(actual), any(how.impl != "xla" for _, how in choices)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", few(RECIPES, "coat", "te_current", "deepseek", "int8_block", "moss", "int8_fallback", "fp8_lm")
)
def test_kernels_of_a_recipe_give_what_xla_gives(name):
    loss, actual, ran = gradients(name, True)
    expected, reference, other = gradients(name, False)
    plain = gradients("bf16", False)[1]
    assert (ran, other) == (True, False)
    assert loss == pytest.approx(expected, rel=2e-3)
    # Codes at a tie round either way, so gradients differ by at most the noise of 8 bits.
    noise = distance(reference, plain)
    assert distance(actual, plain) < 1.2 * noise + 0.01
    assert distance(actual, reference) < 1.5 * noise + 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("case", adamw.marked(lm.CASES), ids=str)
def test_the_step_of_fp8lm_is_near_its_reference(case):
    shape, grad, weight, mu, form, factor, master = case
    leaf = lm.with_master(lm.leaf_of(*lm.SHAPES[shape], grad, weight, mu), master)
    adam = dataclasses.replace(lm.ADAM, grad_scale=factor)
    expected, actual = (lm.step(form, leaf, adam, impl) for impl in ("xla", "triton"))
    # Of a split master weight, the high part: the remainder wraps around if the high parts differ.
    high = lambda x: x.high if isinstance(x, MasterWeight) else x  # noqa: E731
    expected, actual = (
        jax.tree.map(high, x, is_leaf=lambda x: isinstance(x, MasterWeight)) for x in (expected, actual)
    )
    for path, a in jax.tree_util.tree_leaves_with_path(expected):
        b = dict(jax.tree_util.tree_leaves_with_path(actual))[path]
        x, y = (np.asarray(z).astype(np.float32) for z in (a, b))
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y), err_msg=str(path))
        finite = np.isfinite(x)
        # Codes differ by at most one (subnormal e4m3 codes by 2^-9, those of e5m2 by less), and only a few differ.
        np.testing.assert_allclose(x[finite], y[finite], rtol=0.26, atol=2.0**-9, err_msg=str(path))
        # Updates and weights in fp32 also differ by the order of a sum or a fused product.
        assert np.mean(~np.isclose(x[finite], y[finite], rtol=2.0**-20, atol=0.0)) < 0.01, path


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["step", "update"])
@pytest.mark.parametrize("weight", ["float32", "bfloat16"])
def test_directions_are_cut_on_a_gpu(form, weight):
    adamw.check_largest(form, weight)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (77, 1000)])
def test_ten_bits_are_packed_and_unpacked_as_in_the_reference(rows, columns):
    x = jax.random.normal(jax.random.key(0), (rows, columns), jnp.bfloat16)
    results = []
    for kernels in (True, False):
        with choice.target(kernels=kernels):
            q = jax.jit(lambda x: fp8jax.quantize(x, "int10:group128"))(x)
            results.append(jax.device_get((q.codes, q.scale, q.dequantize(jnp.float32))))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
