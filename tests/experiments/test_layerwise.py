"""FSDP with 8-bit gradients: parameters are gathered one layer at a time, as codes."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

import fp8jax
from experiments import mesh
from experiments.models.llama import LlamaConfig
from experiments.train import config, parallel
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task
from fp8jax.dist.collectives import collectives
from fp8jax.recipes import Comm

LLAMA = LlamaConfig(vocab=64, dim=256, layers=3, heads=4, kv_heads=2, mlp_dim=512)
TOKENS = jax.random.randint(jax.random.key(1), (8, 33), 0, LLAMA.vocab)
RECIPES = ("te_current", "deepseek", "moss", "coat", "bf16", "te_delayed", "int8_fallback", "fp8_lm")
# Recipes whose codes are not sent: their layers read values, or observe the weights.
VALUES = ("bf16", "te_delayed")


@functools.cache
def compiled(name, comm="fp32", microbatches=1, remat=False, llama=LLAMA, compute="bf16"):
    """Returns a step on two devices with sharded parameters, the shapes of its state, and a function for
    its operands."""
    recipe = dataclasses.replace(fp8jax.recipes.get(name), comm=Comm(comm))
    recipe = dataclasses.replace(recipe, weights=dataclasses.replace(recipe.weights, compute=compute))
    devices = mesh.make(1, 2)
    rows = mesh.batches(devices)
    kwargs = {"remat": remat, "seed": 0, "rows": rows, "microbatches": microbatches}
    task = Task(llama, make_optimizer(config.Config(), recipe), recipe, **kwargs)
    shapes = jax.eval_shape(task.init)
    placed = mesh.state(devices, shapes)
    shapes = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, placed)
    tokens = mesh.place(np.asarray(TOKENS), rows)
    step = jax.jit(task.step, out_shardings=(placed, None)).lower(shapes, tokens).compile()
    return step, shapes, lambda: (jax.device_put(jax.jit(task.init)(), placed), tokens)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(mesh, "SMALLEST", 4096)
    monkeypatch.setattr("fp8jax.rewrite.run.key_from_data", lambda x: jax.random.key(x.size))


def gathers(step):
    """Returns bytes of all-gathers of matrices, by dtype."""
    results = {}
    for one in collectives(step.as_text()):
        if one.kind == "all-gather" and one.nbytes >= 1024:
            results[one.dtype] = results.get(one.dtype, 0) + one.times * one.nbytes
    return results


@pytest.mark.parametrize(
    ("name", "microbatches", "remat"),
    [
        ("te_current", 1, False),
        pytest.param("te_current", 2, "products", marks=pytest.mark.slow),
        pytest.param("deepseek", 1, False, marks=pytest.mark.slow),
        *(pytest.param(name, 1, False, marks=pytest.mark.slow) for name in RECIPES[2:]),
        pytest.param("bf16", 2, True, marks=pytest.mark.slow),
    ],
)
def test_a_step_layer_by_layer_is_that_of_parameters_gathered_at_once(name, microbatches, remat, monkeypatch):
    """All in fp32: in bf16, XLA may omit the rounding between two operations that it fuses."""
    kwargs = {"microbatches": microbatches, "remat": remat, "compute": "bf16" if name == "fp8_lm" else "fp32"}
    step, _, begin = compiled(name, **kwargs)
    operands = begin()
    after, metrics = step(*operands)
    monkeypatch.setattr(parallel, "GatheredModel", lambda *_: None)
    step, *_ = compiled.__wrapped__(name, **kwargs)
    want, expected = step(*operands)
    assert metrics["healthy"]
    # Sums have another order: a code at a tie rounds either way.
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-3)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-3)
    paths = jax.tree_util.tree_leaves_with_path((after.params, after.model_state))
    for (path, x), y in zip(paths, jax.tree.leaves((want.params, want.model_state)), strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=1e-3, atol=2e-4, err_msg=str(path))


@pytest.mark.parametrize("name", [RECIPES[0], *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES[1:])])
def test_each_layers_matrices_are_gathered_as_codes_forward_and_backward(name):
    step, state, _ = compiled(name)
    layers = sum(x.size for x in jax.tree.leaves(state.params["layers"]) if x.ndim == 3)
    head = state.params["head"]["kernel"].size
    actual = gathers(step)
    if name not in VALUES:
        assert actual["u8"] == 2 * layers // 2  # of two devices, each of which sends its half, forward and backward
        # XLA on CPUs widens bf16.
        assert sum(n for dtype, n in actual.items() if dtype != "u8") <= 4 * (
            head + state.params["embed"]["embedding"].size
        )
    else:
        assert "u8" not in actual
    one = layers // LLAMA.layers
    largest = max(x.nbytes for x in collectives(step.as_text()) if x.kind == "all-gather")
    assert largest <= max(4 * head, 4 * one)


@pytest.mark.slow
def test_whole_parameters_are_never_there_at_once():
    """Per layer, temporaries grow by less than a tenth of its parameters. Gradients are results."""
    sizes = {}
    for layers in (4, 24):
        llama = dataclasses.replace(LLAMA, layers=layers)
        step, state, _ = compiled("te_current", "e4m3", remat=True, llama=llama)
        param_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params["layers"]))
        sizes[layers] = step.memory_analysis().temp_size_in_bytes, param_bytes
    (few, small), (many, large) = sizes[4], sizes[24]
    assert math.isclose(large / small, 6, rel_tol=0.01)
    assert many - few < 0.1 * (large - small)
