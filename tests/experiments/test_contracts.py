"""The training step of each kind of recipe, on several devices and in microbatches, equals a combination of its parts.

Each device and microbatch of a step has a part of the batch. A program without a mesh computes each part alone. NumPy
combines them: losses and gradients by their mean, statistics of scalings by their merge. Four recipes cover each kind
of state, context and sum, with and without fsdp.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from experiments import mesh
from experiments.models.llama import LlamaConfig
from experiments.train.task import Task
from fp8jax.core.scaling import Threshold
from fp8jax.recipes import Comm, Context, Linear, Weights
from tests.distance import relative
from tests.rows import few, slow

pytestmark = pytest.mark.usefixtures("small_on_meshes")

LLAMA = LlamaConfig(vocab=32, dim=64, layers=2, heads=2, kv_heads=1, mlp_dim=128)
TOKENS = np.random.default_rng(0).integers(0, LLAMA.vocab, (16, 17)).astype(np.int32)
MICROBATCHES = 2
RATE = 0.02
# Typical amaxes of inputs, weights and gradients, and a threshold below which a third falls back.
SIZES = {"x": 3.0, "w": 0.3, "dy": 0.02, "threshold_x": 2.0}


FP32 = Weights("fp32", "fp32")
PLAIN = dataclasses.replace(fp8jax.recipes.bf16(), weights=FP32)
GROUPS = Linear("e4m3:group16", "e4m3:block16", "e4m3:group16", x_wgrad="e4m3:group16", dy_wgrad="e4m3:group16")
BLOCKS = dataclasses.replace(
    fp8jax.recipes.int8_fallback().linear, x="int8:block16", w="int8:block16", dy="int8:block16+stochastic",
    x_residual="int8:block16+stochastic", fallback_fraction_range=(0.28, 0.33),
)  # fmt: skip
# Limits of the difference of gradients from the mean: another order of sums; rounding to e4m3, with a mean square of at
# most that of half a step; and in addition that of NCCL's sum.
ORDER, STEP = 1e-5, 2.0**-4 / 3**0.5
# By recipe: the mesh, sizes of "data" and "fsdp", and the limit.
RECIPES = {
    "delayed": (
        dataclasses.replace(PLAIN, linear=Linear("e4m3", "e4m3", "e5m2", scaling="delayed", amax_history_length=3),
                            context=Context("e4m3:group16")),
        (2, 2), ORDER,
    ),
    "fallback": (
        dataclasses.replace(PLAIN, linear=BLOCKS, context=Context("int10:group32", recompute_activations=True),
                            comm=Comm("fp32")),
        (2, 2), ORDER,
    ),
    "groups": (dataclasses.replace(PLAIN, linear=GROUPS, comm=Comm("e4m3")), (1, 4), STEP),
    "fp8_lm": (
        dataclasses.replace(fp8jax.recipes.fp8_lm(), linear=fp8jax.recipes.moss().linear,
                            context=Context("e4m3:group16", recompute_activations=True),
                            comm=Comm("e4m3", "one_phase", auto_scale=True)),
        (1, 4), 2**0.5 * STEP,
    ),
}  # fmt: skip


def spy():
    """A small step against the gradient, which is saved as it is: clipping or moments would hide its size."""
    record_gradient = optax.GradientTransformationExtraArgs(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params=None, **_: (grads, grads)
    )
    return optax.chain(record_gradient, optax.scale(-RATE))


def build(name, devices=None):
    recipe, *_ = RECIPES[name]
    tx = spy() if not recipe.linear.needs_weight_bounds else optax.chain(spy(), fp8jax.track_weight_amax(1))
    rows, parts = (None, 1) if devices is None else (mesh.batches(devices), MICROBATCHES)
    return Task(LLAMA, tx, recipe, remat=False, seed=0, microbatches=parts, rows=rows)


def parts_of(name):
    """Returns the parts of the batch, in any order.

    With a mesh that XLA partitions, a part is a microbatch, else a device's.
    """
    count = MICROBATCHES * (np.prod(RECIPES[name][1]) if RECIPES[name][0].comm.gradients else 1)
    return TOKENS.reshape(count, -1, TOKENS.shape[1])


@functools.cache
def start(name):
    """Returns a state after one step, so that scalings have observed tensors."""
    state = jax.jit(build(name).init)()
    rng = np.random.default_rng(1)

    def observed_statistic(path, x):
        label = jax.tree_util.keystr(path)
        name = getattr(path[-1], "key", None)
        if name in SIZES:
            return jnp.asarray(SIZES[name] * rng.uniform(0.9, 1, x.shape), x.dtype)
        # Weights for which products and gradients have the magnitude of their inputs.
        return 4 * x if name in ("kernel", "embedding", "automatic_w") or "bounds" in label else x

    state = jax.tree_util.tree_map_with_path(observed_statistic, state)
    return jax.device_get(state)


@functools.cache
def alone(name):
    """Returns loss, gradients and model state of each part; instead of thresholds, the counts of used and
    all blocks."""
    task, state = build(name), start(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Threshold, "update", lambda self, old, counts: counts[0] / 1024 + counts[1])
        run = jax.jit(task.gradients)
        return [jax.device_get(run(state.params, state.model_state, part)) for part in parts_of(name)]


@functools.cache
def together(name):
    devices = mesh.make(*RECIPES[name][1])
    task = build(name, devices)
    state = start(name)
    # One device has no factors. With a quarter, sums of four devices stay in the range.
    factors = jax.eval_shape(task.init).factors
    state = state._replace(factors=jax.tree.map(lambda x: np.full(x.shape, 0.25, x.dtype), factors))
    placed = mesh.state(devices, state)
    step = jax.jit(task.step, out_shardings=(placed, None))
    return state, *step(jax.device_put(state, placed), mesh.place(TOKENS, task.rows))


def gradients(state):
    saved_gradient = state.opt_state[0]
    return saved_gradient if isinstance(saved_gradient, dict) else saved_gradient[0]


@pytest.mark.parametrize("name", few(RECIPES, "delayed"))
def test_loss_and_gradients_are_the_means_of_those_of_the_parts(name):
    losses, grads, _ = zip(*alone(name), strict=True)
    _, after, metrics = together(name)
    mean = jax.tree.map(lambda *parts: np.mean(np.float64(parts), 0), *grads)
    limit = RECIPES[name][2]
    assert metrics["healthy"]
    np.testing.assert_allclose(metrics["loss"], np.mean([each["loss"] for each in losses]), rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(mean), rtol=limit)
    for (path, actual), expected in zip(
        jax.tree_util.tree_leaves_with_path(gradients(after)), jax.tree.leaves(mean), strict=True
    ):
        assert relative(actual, expected) <= limit, jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", ["delayed", "fallback", slow("fp8_lm")])
def test_what_scalings_observe_is_of_all_parts(name):
    *_, states = zip(*alone(name), strict=True)
    before, after, _ = together(name)
    rates, factor = BLOCKS.fallback_fraction_range, BLOCKS.threshold_update_factor
    checked, crossed = set(), False
    for (path, x), old, *parts in zip(
        jax.tree_util.tree_leaves_with_path(after.model_state), jax.tree.leaves(before.model_state),
        *map(jax.tree.leaves, states), strict=True,
    ):  # fmt: skip
        label, kind = jax.tree_util.keystr(path), path[-1].key
        checked.add(kind)
        if kind in ("x", "w", "dy"):
            newest = np.max([part[:, 0] for part in parts], 0)
            np.testing.assert_allclose(x, np.column_stack([newest, old[:, :-1]]), rtol=1e-5, err_msg=label)
            assert np.ptp([part[:, 0] for part in parts], 0).any() or kind == "w"
        elif kind == "threshold_x":
            used, blocks = np.array(parts) % 1 * 1024, np.floor(parts)
            shares, share = used / blocks, used.sum(0) / blocks.sum(0)
            each = shares.reshape(-1, MICROBATCHES, *share.shape).mean(1)
            is_in_range = (share >= rates[0]) & (share <= rates[1])
            crossed |= bool(np.any(is_in_range & (each[0] < rates[0]) & (np.max(each, 0) > rates[1])))
            expected = np.where(share > rates[1], factor, np.where(share < rates[0], 1 / factor, 1))
            np.testing.assert_allclose(x, old * expected, rtol=1e-6, err_msg=label)
        elif kind == "automatic_w":
            layer = functools.reduce(dict.get, [p.key for p in path[:-2]], after.params)
            np.testing.assert_allclose(x, np.abs(layer["kernel"]).max((1, 2)), rtol=1e-2, err_msg=label)
            assert (x >= np.abs(layer["kernel"]).max((1, 2))).all()
        else:
            assert kind.startswith(("seen", "slot"))
            assert not np.asarray(x).any()
    assert checked & {"x", "threshold_x", "automatic_w"}
    assert crossed == (
        name == "fallback"
    )  # single devices would change a threshold, in either direction, that all together keep


@pytest.mark.parametrize("name", few(RECIPES, "fp8_lm"))
def test_an_evaluation_is_the_same_on_a_mesh_and_reads_the_state(name):
    state = start(name)
    devices = mesh.make(*RECIPES[name][1])
    one, many = build(name), build(name, devices)
    expected = jax.jit(one.loss)(state.params, state.model_state, TOKENS)
    run = jax.jit(many.loss)
    params, model_state = (jax.device_put(x, mesh.state(devices, x)) for x in (state.params, state.model_state))
    tokens = mesh.place(TOKENS, many.rows)
    limit = ORDER if RECIPES[name][0].weights.compute == "fp32" else 2.0**-9
    np.testing.assert_allclose(run(params, model_state, tokens), expected, rtol=limit)
    if RECIPES[name][0].linear.stateful_strategies:
        other = jax.tree.map(lambda x: x / 64, model_state)
        assert abs(run(params, other, tokens) / expected - 1) > 2 * limit
