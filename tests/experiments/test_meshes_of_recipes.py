"""The training step of each recipe on many devices, with Auto and with Explicit mesh axes, against that of one device.

All is computed in fp32, and keys are given: products of other shapes then differ in their last bits alone, where bf16
would round some of them to other neighbours, and keys that are made of inputs would be others. A code that differed
would change what it is multiplied with by parts in a hundred, not in a million.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import fp8jax
from experiments import config, mesh, train
from experiments.models.llama import LlamaConfig
from experiments.task import Task
from fp8jax.modules import dots
from fp8jax.recipes import Comm
from tests.distance import relative

LLAMA = LlamaConfig(vocab=64, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=128)
TOKENS = jax.random.randint(jax.random.key(1), (16, 33), 0, 64)
MESHES = {"data": (8, 1), "fsdp": (1, 8), "both": (2, 4)}
KINDS = (AxisType.Auto, AxisType.Explicit)
# A sum in another order differs by its length's square root in units in the last place; the second moment is a square.
ORDER = 2 * TOKENS.size**0.5 * 2.0**-24
# Recipes that differ in most that they do, each on another mesh: the rest takes minutes.
FAST = {
    ("te_delayed", "data", AxisType.Auto),
    ("jetfire", "fsdp", AxisType.Auto),
    ("deepseek", "both", AxisType.Auto),
    ("moss", "data", AxisType.Explicit),
    ("coat", "fsdp", AxisType.Explicit),
    ("int8_fallback", "both", AxisType.Explicit),
}
ALL = [(name, where, kind) for name in fp8jax.recipes.NAMES for where in MESHES for kind in KINDS]


@pytest.fixture(scope="module", autouse=True)
def settings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "SMALLEST", 1024)
        patch.setattr(dots, "content_key", lambda x: jax.random.key(x.size))
        yield


@functools.cache
def build(name, devices=None):
    # Gradients that travel in 8 bits are not those of one device: see test_parallel.
    recipe = dataclasses.replace(fp8jax.recipes.get(name), comm=Comm())
    recipe = dataclasses.replace(recipe, weights=dataclasses.replace(recipe.weights, compute="fp32"))
    rows = None if devices is None else mesh.batches(devices)
    return Task.build(LLAMA, train.make_optimizer(config.Config(), recipe), recipe, remat=False, seed=0, rows=rows)


def step(task, state, tokens):
    """A step, and the codes and scales that its forward pass saves."""

    def saved(params):
        return jax.tree.leaves(jax.vjp(lambda p: task.loss(p, state.model_state, tokens), params)[1])

    return task.step(state, tokens), [x for x in saved(state.params) if x.dtype in (jnp.uint8, jnp.int8)]


@functools.cache
def one(name):
    """The state before a step on one device, and what it gives."""
    task = build(name)
    state = jax.jit(task.init)()
    return state, jax.device_get(jax.jit(functools.partial(step, task))(state, TOKENS))


@pytest.mark.parametrize(
    ("name", "where", "kind"), [pytest.param(*x, marks=() if x in FAST else pytest.mark.slow) for x in ALL]
)
def test_a_step_on_many_devices_is_that_of_one(name, where, kind):
    state, ((want, want_metrics), want_codes) = one(name)
    devices = mesh.make(*MESHES[where], kind=kind)
    with jax.set_mesh(devices) if kind == AxisType.Explicit else contextlib.nullcontext():
        task = build(name, devices)
        placed = mesh.state(devices, jax.eval_shape(task.init))
        run = jax.jit(functools.partial(step, task), out_shardings=((placed, None), None))
        found = run(jax.device_put(state, placed), mesh.place(TOKENS, task.rows))
    up = found[0][0].params["layers"]["mlp"]["up"]["kernel"]
    assert up.sharding.spec == (jax.P() if where == "data" else jax.P(None, "fsdp"))
    (got, metrics), codes = jax.device_get(found)
    assert metrics["healthy"]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[key], want_metrics[key], rtol=ORDER)
    assert len(codes) == len(want_codes)
    print(name, where, kind, len(codes), max([float(np.mean(a != b)) for a, b in zip(codes, want_codes)], default=0))
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(paths, jax.tree.leaves(want), strict=True):
        text = jax.tree_util.keystr(path)
        if a.dtype.itemsize == 1 and a.dtype != bool:
            print("   ", text, np.mean(np.asarray(a != b))) if (a != b).any() else None
        elif jnp.issubdtype(a.dtype, jnp.floating):
            if relative([a], [b]) > ORDER: print("   ", text, relative([a], [b]) / ORDER)
        else: np.testing.assert_array_equal(a, b, err_msg=text)
