"""The optimizer state, sharded over devices with the same parameters: whole tensors of layers, or slices."""

import jax
import numpy as np
import pytest

import fp8jax
from experiments import mesh
from experiments.models.llama import LlamaConfig
from experiments.train import config
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task
from fp8jax.dist.collectives import collectives
from tests.distance import order, relative
from tests.rows import slow

LLAMA = LlamaConfig(vocab=64, dim=64, layers=4, heads=2, kv_heads=2, mlp_dim=128)
TOKENS = np.random.default_rng(0).integers(0, LLAMA.vocab, (8, 33)).astype(np.int32)
DEVICES = 4


@pytest.fixture(scope="module", autouse=True)
def settings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "SMALLEST", 1024)
        yield


def stepped(name, partition):
    """Returns a step's state, its metrics, a device's shard of the state, and the program's communication."""
    recipe, devices = fp8jax.recipes.get(name), mesh.make(DEVICES, 1)
    rows = mesh.batches(devices)
    tx = make_optimizer(config.Config(), recipe)
    task = Task(LLAMA, tx, recipe, remat=False, seed=0, rows=rows, partition=partition)
    placed = mesh.state(devices, jax.eval_shape(task.init), partition)
    state, tokens = jax.jit(task.init, out_shardings=placed)(), mesh.place(TOKENS, rows)
    step = jax.jit(task.step, out_shardings=(placed, None)).lower(state, tokens).compile()
    state, metrics = step(*step(state, tokens)[:1], tokens)  # the first has a rate of 0
    return state, metrics, collectives(step.as_text())


@pytest.mark.parametrize(
    ("name", "partitions"),
    [
        ("coat_optimizer", ["tensors"]),
        slow("coat_optimizer", ["slices"]),
        slow("fp8_lm_two_phase", ["tensors", "slices"]),
    ],
    ids=str,
)
def test_a_step_is_the_same_and_each_device_holds_its_part(name, partitions):
    """Slices are in test_mesh too."""
    plain, metrics, _ = stepped(name, "")
    size = sum(x.nbytes for x in jax.tree.leaves(plain.opt_state))
    for partition in partitions:
        state, actual, sent = stepped(name, partition)
        np.testing.assert_allclose(actual["grad_norm"], metrics["grad_norm"], rtol=2 * order(LLAMA.mlp_dim))
        assert relative(state.params, plain.params) < 2 * order(LLAMA.mlp_dim)
        own = [
            sum(x.addressable_shards[i].data.nbytes for x in jax.tree.leaves(state.opt_state)) for i in range(DEVICES)
        ]
        assert min(own) == max(own) < size / DEVICES * 1.1  # scalars and small arrays are replicated
        # Updated parameters are gathered, moments are not. 8-bit gradients are bytes.
        gathered = sum(x.times * x.nbytes for x in sent if (x.kind, x.dtype) == ("all-gather", "f32"))
        weights = sum(x.size for x in jax.tree.leaves(plain.params) if x.size >= 1024 or partition == "tensors")
        assert gathered <= 4 * weights / DEVICES * 1.1
        mu = state.opt_state[1].mu["layers"]
        shards = {
            x.addressable_shards[0].data.shape for x in jax.tree.leaves(mu["mlp"]["up"]) if x.shape[1:] == (64, 128)
        }
        assert shards == ({(1, 64, 128)} if partition == "tensors" else {(4, 16, 128)})


def test_layers_lie_as_the_papers_algorithm_loads_devices():
    """FP8-LM, Algorithm 1, for tensors of layers: equal bytes per device, if the devices divide the layers."""
    params = jax.eval_shape(lambda: {"layers": {"up": np.zeros((8, 64, 128)), "norm": np.zeros((8, 64))}})
    places = mesh.optimizer_shardings(mesh.make(DEVICES, 1), params, "tensors")
    tensors = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in jax.tree.leaves(params) for _ in range(x.shape[0])]
    own = [
        np.prod(place.shard_shape(x.shape)) * x.dtype.itemsize
        for place, x in zip(*map(jax.tree.leaves, (places, params)), strict=True)
    ]
    assert fp8jax.dist.partition(tensors, DEVICES).loads == (sum(own),) * DEVICES
