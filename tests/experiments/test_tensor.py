"""The training step with tensor parallelism: loss and gradients, compared with one device."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from experiments import mesh, plan
from experiments.models.llama import LlamaConfig
from experiments.train import config, parallel, tensor
from experiments.train.adapters import joined
from experiments.train.form import Form
from experiments.train.optimizer import make_optimizer
from experiments.train.sections import Lora
from experiments.train.task import Task
from fp8jax.dist.collectives import collectives
from fp8jax.recipes import Comm, Linear, Weights
from fp8jax.rewrite import cost_model
from tests.distance import order, relative
from tests.rows import slow

pytestmark = pytest.mark.usefixtures("small_on_meshes")

LLAMA = LlamaConfig(vocab=64, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=128)
TOKENS = np.random.default_rng(0).integers(0, LLAMA.vocab, (8, 65)).astype(np.int32)
GPT = dataclasses.replace(
    LLAMA, kv_heads=4, norm="layer_bias", bias="all", mlp="gelu", learned_positions=64, tied=True, layers=1
)
OLMO = dataclasses.replace(LLAMA, norm_after=True, qk_norm="head", bias="qkv", layers=1)
MESHES = {"tensor": (1, 1, 2), "data": (2, 1, 2), "fsdp": (1, 2, 2), "four": (1, 1, 4)}
# Recipes whose inputs have stateful scalings: they are not sent as codes.
STATES = ("te_delayed", "int8_fallback")
# Standard deviation of the rounding error of e4m3: uniform within half a step.
ROUNDING = 2.0**-4 / 3**0.5


def recipe_of(name):
    recipe = fp8jax.recipes.for_shapes("coat") if name == "auto" else fp8jax.recipes.get(name)
    plain = fp8jax.recipes.bf16().optimizer
    return dataclasses.replace(recipe, weights=Weights("fp32", "fp32"), optimizer=plain, comm=Comm())


def packed():
    """Tokens, some of which are answers, in documents with various ends."""
    answers = np.random.default_rng(1).integers(0, 2, TOKENS.shape)
    segments = np.where(np.arange(TOKENS.shape[1]) < 40, 1, 2) * np.ones_like(TOKENS)
    return np.stack([TOKENS, answers.astype(np.int32), segments.astype(np.int32)], 1)


def drawn(params):
    """Returns matrices that keep the magnitude of their inputs, norms near 1, and biases with an effect."""
    rng = np.random.default_rng(2)

    def one(path, x):
        name, noise = path[-1].key, rng.normal(size=x.shape).astype(np.float32)
        if name == "kernel":
            return noise / x.shape[-2] ** 0.5
        return noise if name == "embedding" else noise / 8 + (name == "scale")

    return jax.tree_util.tree_map_with_path(one, params)


def first(found):
    """Returns the loss and the gradients from a step."""
    losses, grads, *_ = found
    return losses["loss"], grads


def program(name, where=None, llama=LLAMA, tokens=TOKENS, **how):
    """Returns the compiled loss and gradients of a recipe, and their arguments."""
    recipe, rows = recipe_of(name), None
    if where is not None:
        data, fsdp, shared = MESHES[where]
        rows = mesh.batches(mesh.make(data, fsdp, tensor=shared))
    tx = make_optimizer(config.Config(), recipe)
    task = Task(llama, tx, recipe, seed=0, rows=rows, **{"remat": False} | how)
    state = jax.eval_shape(task.init)
    params = drawn(state.params)
    model_state = jax.jit(lambda: task.init().model_state)() if jax.tree.leaves(state.model_state) else {}
    if recipe.linear.needs_weight_bounds:  # scales of weights are from bounds
        model = nnx.merge(task.graphdef, params, model_state)
        fp8jax.nnx.reset_weight_amax_bounds(model)
        model_state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
    base = {}
    if task.lora is not None:
        plain = Task(llama, tx, recipe, seed=0, remat=False)
        base = jax.jit(task.base)(drawn(jax.eval_shape(plain.init).params))
    if rows is None:
        run = jax.jit(lambda params, base, tokens: first(task.gradients(params, joined(model_state, base), tokens)))
    else:
        params, base = (jax.device_put(tree, mesh.state(rows.mesh, tree)) for tree in (params, base))
        part = functools.partial(parallel.gradients, task.gradients, recipe, rows.mesh)
        run = jax.jit(lambda params, base, tokens: first(part(params, model_state, tokens, (), base)))
    arguments = params, base, mesh.place(tokens, rows)
    return run.lower(*arguments).compile(), arguments


def totals(run):
    """Returns the communication of a program, by collective, dtype and number of devices."""
    sums = collections.Counter()
    for x in collectives(run.as_text()):
        sums[x.kind, x.dtype, x.devices] += x.times * x.nbytes
    return sums


def found(*args, **kwargs):
    run, arguments = program(*args, **kwargs)
    return run(*arguments)


one = functools.cache(found)


@pytest.mark.parametrize(
    ("where", "llama", "tokens", "how"),
    [
        ("tensor", LLAMA, TOKENS, {"microbatches": 2}),
        ("fsdp", OLMO, packed(), {"chunked": True}),
        slow("data", GPT, TOKENS, {"remat": "products"}),
        pytest.param("data", OLMO, packed(), {}, marks=pytest.mark.slow),
        pytest.param("four", dataclasses.replace(LLAMA, kv_heads=4), TOKENS, {"remat": True}, marks=pytest.mark.slow),
    ],
)
def test_without_codes_it_is_that_of_one_device(where, llama, tokens, how):
    """Equal up to the order of sums, with norms after sublayers and per head, biases that are added once, and packed
    answers."""
    (loss, grads), (want, expected) = found("bf16", where, llama, tokens, **how), found("bf16", None, llama, tokens)
    np.testing.assert_allclose(loss, want, rtol=order(64))
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        label = jax.tree_util.keystr(path)
        if llama is GPT and "['k']['bias']" in label:  # softmax is invariant to it
            assert max(np.abs(g).max(), np.abs(w).max()) < 1e-7
        else:
            assert relative(g, w) < 4 * order(TOKENS.size), label


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "llama", "base"),
    [
        ("fsdp", GPT, "e4m3:token"),
        slow("data", OLMO, "bf16"),
        pytest.param("tensor", LLAMA, "int8:block16", marks=pytest.mark.slow),
        pytest.param("fsdp", LLAMA, "e4m3:mx32", marks=pytest.mark.slow),
        pytest.param("four", dataclasses.replace(LLAMA, kv_heads=4), "e4m3:group16", marks=pytest.mark.slow),
    ],
)
def test_adapters_are_those_of_one_device_beside_parts_of_the_base(where, llama, base):
    """Gradients of both factors are equal up to the order of sums. Each device has its shard of the base."""
    run, arguments = program("bf16", where, llama, lora=Lora(4, base=base))
    (loss, grads), (want, expected) = run(*arguments), found("bf16", None, llama, lora=Lora(4, base=base))
    np.testing.assert_allclose(loss, want, rtol=order(64))
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        assert relative(g, w) < 4 * order(TOKENS.size), jax.tree_util.keystr(path)
    base_matrices = [
        x for x in jax.tree.leaves(arguments[1]["layers"]) if x.ndim == 3 and x.shape[1] * x.shape[2] >= 64 * 32
    ]
    parts = MESHES[where][1] * MESHES[where][2]
    assert len(base_matrices) == (6 if llama is GPT else 7)
    assert all(x.addressable_shards[0].data.size * parts == x.size for x in base_matrices)


def test_parameters_outside_of_layers_travel_in_the_dtype_of_computation():
    """Partial gradients are summed over devices in fp32."""
    x = np.float32(1 + np.arange(8) / 1024)  # not representable in bf16
    places = {"embed": {"embedding": jax.P("tensor")}, "norm": {"scale": jax.P()}}
    whole = mesh.make(1, 1, tensor=4)
    params = jax.tree.map(lambda place: jax.device_put(x, jax.NamedSharding(whole, place)), places)

    def run(fn, out):
        return jax.jit(jax.shard_map(fn, mesh=whole, in_specs=(places,), out_specs=out, check_vma=False))(params)

    gathered = run(lambda params: tensor.gathered(params, places, "bf16"), jax.P())
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(gathered["embed"]["embedding"], rounded)
    np.testing.assert_array_equal(gathered["norm"]["scale"], x)
    summed = run(lambda params: tensor.summed({**params, "embed": {"embedding": x}}, places, "bf16"), places)
    np.testing.assert_array_equal(summed["embed"]["embedding"], 4 * rounded)
    np.testing.assert_array_equal(summed["norm"]["scale"], 4 * x)
    assert {a.dtype for a in jax.tree.leaves((gathered, summed))} == {jnp.dtype("float32")}

    narrow = {"scale": jnp.asarray(x, jnp.bfloat16)}, {"scale": jax.P()}
    sums = jax.shard_map(
        lambda g: tensor.summed(g, narrow[1], "bf16"),
        mesh=whole,
        in_specs=narrow[1:],
        out_specs=jax.P(),
        check_vma=False,
    )
    program = str(jax.make_jaxpr(sums)(narrow[0]))
    assert re.findall(r"(\w+)\[8\] = psum", program) == ["f32"]


def test_what_recomputes_layers_does_not_send_its_sums_again():
    llama = dataclasses.replace(LLAMA, layers=1)
    sent = [totals(program("bf16", "tensor", llama, remat=remat)[0]) for remat in (False, "products", True)]
    sums = [counted["reduce-scatter", "f32", 2] for counted in sent]
    assert sums[0] == sums[1] < sums[2]


def test_a_part_of_a_base_does_not_end_within_a_group_of_its_codes():
    with pytest.raises(ValueError, match=r"4 devices along tensor have 32 of 128 MLP channels each.* group of 64"):
        tensor.check_base(dataclasses.replace(LLAMA, heads=16, kv_heads=4, dim=256), "e4m3:group64", 4)
    with pytest.raises(ValueError, match="channels of key heads"):
        tensor.check_base(dataclasses.replace(LLAMA, mlp_dim=64), "e4m3:block16", 4)
    tensor.check_base(dataclasses.replace(LLAMA, mlp_dim=64), "e4m3:group32", 2)
    tensor.check_base(LLAMA, "e4m3:group16", 4)  # half a group of key heads' outputs, along which no group runs
    tensor.check_base(LLAMA, "e4m3:block128", 4)  # one block each: all shards have its scale


def test_what_devices_cannot_share_is_told_with_what_they_can():
    for llama, devices, message in (
        (LLAMA, 3, r"3 devices along tensor do not divide 4 query heads; tensor must be one of \[1, 2, 4\]"),
        (dataclasses.replace(LLAMA, qk_norm="width"), 2, "qk_norm 'width'. cannot be sharded; use tensor=1"),
    ):
        with pytest.raises(ValueError, match=message):
            tensor.of_device(Form(llama, recipe_of("bf16"), False), devices)
    llama, lora = dataclasses.replace(LLAMA, kv_heads=4), Lora(4, base="e4m3:group32")
    with pytest.raises(ValueError, match=r"16 of 64 channels of all heads each.* group of 32"):
        tensor.of_device(Form(llama, recipe_of("bf16"), False, lora=lora), 4)


@pytest.mark.parametrize(
    ("linear", "unit"),
    [
        (Linear(), 1),
        (Linear(*["e4m3:tensor"] * 3), 1),
        (Linear("int8:block32", "int8:block32", "int8:block16"), 32),
        (Linear("int8:block16", "int8:block16", "int8:block32"), 32),
        (Linear("int8:block16", "int8:block16", "int8:block32+stochastic"), 16),  # sent as values
        (fp8jax.recipes.deepseek().linear, 1),  # groups along channels
    ],
    ids=str,
)
def test_tokens_of_devices_are_whole_blocks_of_the_codes_that_travel(linear, unit):
    recipe = dataclasses.replace(recipe_of("bf16"), linear=linear)
    tensor.check_tokens(recipe, 2, 6 * unit)
    for tokens in {6 * unit + 1, 5 * unit}:
        with pytest.raises(ValueError, match=f"a multiple of {2 * unit} tokens$"):
            tensor.check_tokens(recipe, 2, tokens)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("coat", "tensor"),
        slow("auto", "fsdp"),  # whose products gain nothing here, and so read values
        slow("moss", "fsdp"),
        slow("te_delayed", "data"),
        slow("int8_fallback", "tensor"),
        slow("deepseek", "tensor"),
        slow("jetfire", "tensor"),
        slow("switchback", "fsdp"),
    ],
)
def test_in_8_bits_it_is_as_far_from_fp32_as_on_one_device(name, where):
    """Errors add in squares: sums at four boundaries of each layer, with half a step of e4m3 each, uniform within it.

    Codes are sent, as many as a plan counts.
    """
    run, arguments = program(name, where)
    shared, alone, exact = run(*arguments), one(name), one("bf16")
    from_exact, of_one = (relative(grads, exact[1]) ** 2 for _, grads in (shared, alone))
    added = LLAMA.layers * (2 * ROUNDING) ** 2
    assert from_exact < of_one + added
    assert relative(shared[1], alone[1]) ** 2 < of_one + from_exact + added
    assert abs(float(shared[0] / alone[0]) - 1) < of_one + added
    data, fsdp, devices = MESHES[where]
    tokens = TOKENS[:, 1:].size // (data * fsdp * devices)
    where = {"data": data, "fsdp": fsdp, "tensor": devices}
    planned = plan.of(LLAMA, recipe_of(name), where, tokens).collectives
    codes = [
        sum(x.times * x.nbytes for x in side if (x.kind, x.dtype) == ("all-to-all", "u8"))
        for side in (planned, collectives(run.as_text()))
    ]
    assert codes[0] == codes[1]
    assert codes[0] == (0 if name in STATES else 4 * LLAMA.layers * devices * tokens * LLAMA.dim)


@pytest.mark.slow
def test_products_that_gain_gather_codes_alone(monkeypatch):
    """`auto` decides when shapes are known, after weights are gathered: XLA removes the form that nothing reads."""
    monkeypatch.setattr(cost_model, "estimate_gain", lambda *_, **__: 1.0)
    sent = [totals(program(name, "fsdp")[0]) for name in ("auto", "coat")]
    assert sent[0] == sent[1]
