"""Models with experts: routing, losses and gradients against NumPy, residuals, meshes, plans, and errors."""

import dataclasses
import functools
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P

import fp8jax
from experiments import evaluate, export, generate, mesh, plan
from experiments.errors import UserError
from experiments.hub import files
from experiments.mesh import flatten
from experiments.models import moe, sizes
from experiments.models.llama import Llama
from experiments.models.shape import LlamaConfig
from experiments.train import cli, parallel, report, speed
from experiments.train.checkpoint import Checkpoints, digest
from experiments.train.config import Config, parse
from experiments.train.experts import ExpertSharing, RecipeProducts
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task
from fp8jax.dist.collectives import collectives
from tests.distance import relative
from tests.rows import slow

TINY = LlamaConfig(vocab=40, dim=16, layers=2, heads=2, kv_heads=1, mlp_dim=24, experts=6, experts_per_token=2)
TOKENS = 20
FP32 = fp8jax.Recipe(
    "fp32",
    fp8jax.recipes.Weights("fp32", "fp32"),
    fp8jax.recipes.Optimizer(mu="fp32", nu="fp32", group_size=None, expand=False),
)


def layer(config=TINY, dtype=jnp.float32, recipe=None, sharing=None):
    """Returns random parameters of a layer of experts, and a function of these and tokens."""
    products = None if recipe is None else RecipeProducts(fp8jax.recipes.get(recipe), sharing)
    moe_layer = moe.MoE(config, dtype=dtype, param_dtype=jnp.float32, rngs=nnx.Rngs(0), products=products)
    graph, params = nnx.split(moe_layer, nnx.Param)
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=x.shape).astype(np.float32) / x.shape[-2] ** 0.5  # noqa: E731
    return jax.tree.map(draw, nnx.to_pure_dict(params)), lambda params, x: nnx.merge(graph, params)(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def oracle(params, x, config=TINY):
    """Returns the layer in float64, token by token and expert by expert, and the choices."""
    gate_up, down = (np.asarray(params["experts"][name]["kernel"], np.float64) for name in ("gate_up", "down"))
    x = np.asarray(x, np.float64)
    probabilities = softmax(x @ np.asarray(params["router"]["kernel"], np.float64))
    y, choices = np.zeros_like(x), []
    for t, row in enumerate(probabilities):
        chosen = sorted(range(config.experts), key=lambda i: -row[i])[: config.experts_per_token]
        total = sum(row[i] for i in chosen) if config.normalize_choices else 1.0
        choices.append(chosen)
        for i in chosen:
            gate, up = np.split(x[t] @ gate_up[i], 2)
            y[t] += row[i] / total * (gate / (1 + np.exp(-gate)) * up) @ down[i]
    return y, np.array(choices)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_layer_is_that_of_numpy_and_so_are_its_gradients(normalized):
    """Some experts have no tokens: the last two are never chosen."""
    config = dataclasses.replace(TINY, normalize_choices=normalized)
    params, run = layer(config)
    params["router"]["kernel"][:, -2:] = -3 * np.abs(params["router"]["kernel"][:, -2:])
    rng = np.random.default_rng(1)
    x = np.abs(rng.normal(size=(TOKENS, config.dim))).astype(np.float32)
    weights = rng.normal(size=x.shape)
    expected, choices = oracle(params, x, config)
    assert choices.max() < config.experts - 2
    y, vjp_fn = jax.vjp(jax.jit(run), params, x)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    grads = vjp_fn(weights.astype(np.float32))
    for at, leaf in enumerate(jax.tree.leaves((params, x))):
        direction = rng.normal(size=leaf.shape)

        def moved(step, at=at, direction=direction):
            leaves, tree = jax.tree.flatten((params, x))
            leaves[at] = leaves[at] + step * direction
            return np.sum(weights * oracle(*jax.tree.unflatten(tree, leaves), config)[0])

        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        np.testing.assert_allclose(np.sum(np.asarray(jax.tree.leaves(grads)[at]) * direction), slope, rtol=1e-4)


def test_losses_of_routers_are_those_of_their_papers():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(TOKENS, 6))
    chosen = np.argsort(-logits, -1)[:, :2]
    routes = moe.Routes.from_choices(jnp.asarray(chosen), 6)
    f = np.array([(chosen == i).sum() for i in range(6)]) / TOKENS
    np.testing.assert_array_equal(routes.sizes_E, f * TOKENS)
    balance = 6 * np.sum(f * softmax(logits).mean(0))
    np.testing.assert_allclose(moe.balance_loss(jnp.asarray(logits, jnp.float32), routes.sizes_E), balance, rtol=1e-5)
    layers = nnx.Dict(layers=nnx.Dict(z_loss=moe.RouterLoss(jnp.array([1.0, 3.0])), kernel=nnx.Param(jnp.ones(2))))
    assert moe.router_losses(nnx.state(layers)) == {"z_loss": 2.0}
    z = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    np.testing.assert_allclose(moe.z_loss(jnp.asarray(logits, jnp.float32)), z, rtol=1e-5)


@pytest.mark.parametrize("recipe", [slow("coat"), "deepseek"])
def test_a_layer_in_8_bits_is_off_by_what_8_bits_round(recipe):
    """Half a step of e4m3, 2^-4, in each of a few roundings. coat rounds gradients to e5m2."""
    params, run = layer(recipe=recipe)
    x = np.random.default_rng(3).normal(size=(TOKENS, TINY.dim)).astype(np.float32)
    exact = layer()[1]
    results = [jax.jit(lambda p, x, f=f: (f(p, x), jax.vjp(f, p, x)[1](x)))(params, x) for f in (run, exact)]
    for (path, actual), expected in zip(
        jax.tree.leaves_with_path(results[0]), jax.tree.leaves(results[1]), strict=True
    ):
        assert 0.002 < relative(actual, expected) < 0.2, path


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [1, 2])
def test_devices_that_share_experts_quantize_as_one_does(chosen):
    """With two experts per token, devices gather tokens, and codes are those of one device.

    But on one device, wgrad of gate and up reads tokens that are decoded from the context. With one expert per token,
    devices exchange rows, and scales of experts are not related by powers of two.
    """
    config = dataclasses.replace(TINY, experts_per_token=chosen, normalize_choices=False)
    params, run = layer(config, recipe="coat")
    local = layer(config, recipe="coat", sharing=ExpertSharing("coat", capacity=1.75))[1]
    x = np.random.default_rng(3).normal(size=(TOKENS, config.dim)).astype(np.float32)
    specs = jax.tree.map_with_path(lambda path, _: P("expert") if mesh.has_experts(path) else P(), params)
    devices = mesh.make(1, 1, jax.devices()[:2], expert=2)
    over_devices = jax.shard_map(local, mesh=devices, in_specs=(specs, P("expert")), out_specs=P("expert"))
    results = [jax.jit(lambda p, x, f=f: (f(p, x), jax.vjp(f, p, x)[1](x)))(params, x) for f in (over_devices, run)]
    for (path, actual), expected in zip(
        jax.tree.leaves_with_path(results[0]), jax.tree.leaves(results[1]), strict=True
    ):
        is_equal = chosen == 2 and "gate_up" not in jax.tree_util.keystr(path)
        assert relative(actual, expected) < (1e-5 if is_equal else 0.2), path


@pytest.mark.parametrize(("recipe", "bytes_of_element"), [("bf16", 2), ("coat", 1 + 2 / 16), ("deepseek", 2)])
def test_tokens_and_gate_and_up_are_all_that_is_kept_but_for_what_the_router_gives(recipe, bytes_of_element):
    """Each once, with tokens in their order before the permutation; without a context in 16 bits."""
    config = dataclasses.replace(TINY, dim=64, mlp_dim=80, experts=8, experts_per_token=4)
    params, run = layer(config, jnp.bfloat16, recipe)
    x = jax.ShapeDtypeStruct((32, config.dim), jnp.bfloat16)
    saved = jax.eval_shape(lambda params, x: jax.tree.leaves(jax.vjp(run, params, x)[1]), params, x)
    weights = {w.shape for w in jax.tree.leaves(params)}
    actual = sum(leaf.size * leaf.dtype.itemsize for leaf in saved if leaf.shape not in weights)
    chosen = config.experts_per_token
    rows = bytes_of_element * (config.dim + chosen * 2 * config.mlp_dim)
    # Logits; for each choice its weight, its expert, its row and the choice of that row; and sizes of experts.
    router = 4 * (config.experts + 4 * chosen)
    # For 8-bit products also the token of each row, groups and scales of experts and, in coat, a scale per token.
    per_row, per_token, per_expert = {"bf16": (0, 0, 4), "coat": (4, 4, 24), "deepseek": (4, 0, 24)}[recipe]
    assert actual == 32 * (rows + router + per_token + chosen * per_row) + per_expert * config.experts


def task_of(recipe, config=TINY, rows=None, **settings):
    return Task(config, make_optimizer(Config(), recipe), recipe, remat=False, seed=0, rows=rows, **settings)


def drawn(task):
    """Returns a state with parameters of three times the size, so that routers prefer some experts."""
    state = jax.jit(task.init)()
    return state._replace(params=jax.tree.map(lambda x: 3 * x, state.params))


BATCH = np.random.default_rng(0).integers(0, TINY.vocab, (4, 17)).astype(np.int32)


def test_losses_of_routers_enter_gradients_by_their_coefficients():
    """The directional derivative is the coefficient times the slope of the logged loss.

    There is one layer, so no other layer's choices change: the z-loss has no jumps.
    """
    config, rng = dataclasses.replace(TINY, layers=1), np.random.default_rng(1)
    task_without_losses, task = (task_of(FP32, config, balance_coefficient=0.0, z_coefficient=z) for z in (0.0, 0.5))
    params, model_state = (state := drawn(task)).params, state.model_state
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * np.abs(x).max(), params)
    with jax.default_matmul_precision("highest"):
        run = jax.jit(task.gradients)
        plain, grads = (
            jax.jit(task_without_losses.gradients)(params, model_state, BATCH)[1],
            run(params, model_state, BATCH)[1],
        )
        moved = [jax.tree.map(lambda x, d, s=s: x + s * d, params, direction) for s in (1e-3, -1e-3)]
        first, second = (float(run(p, model_state, BATCH)[0]["z_loss"]) for p in moved)
    added = jax.tree.map(lambda a, b, d: float(np.sum((a - b) * np.asarray(d))), grads, plain, direction)
    assert sum(jax.tree.leaves(added)) == pytest.approx(0.5 * (first - second) / 2e-3, rel=0.02)


@pytest.mark.parametrize("sizes", [slow({"data": 2, "fsdp": 2}), {"data": 1, "fsdp": 2, "expert": 2}])
def test_devices_that_share_a_batch_and_parameters_compute_what_one_does(sizes, monkeypatch):
    """Except for the balance loss over each device's own tokens, which has no coefficient here."""
    monkeypatch.setattr(mesh, "SMALLEST", 256)
    devices = mesh.make(**sizes, devices=jax.devices()[:4])
    coefficients = {"balance_coefficient": 0.0, "z_coefficient": 0.5}
    one, many = (task_of(FP32, rows=rows, **coefficients) for rows in (None, mesh.batches(devices)))
    params, model_state = (state := drawn(one)).params, state.model_state
    placed = jax.device_put(params, mesh.state(devices, params))
    experts = jax.tree.leaves(placed["layers"]["mlp"]["experts"])
    by_expert = "expert" if "expert" in sizes else None
    assert all(x.sharding.spec == jax.P(None, by_expert, "fsdp") for x in experts)
    part = functools.partial(parallel.gradients, many.gradients, FP32, devices)
    with jax.default_matmul_precision("highest"):
        losses, grads, _ = jax.jit(one.gradients)(params, model_state, BATCH)
        run = jax.jit(lambda params, tokens: part(params, model_state, tokens, ())[:2])
        losses_of_many, grads_of_many = run(placed, mesh.place(BATCH, many.rows))
    assert {"loss", "balance_loss", "z_loss"} == losses.keys()
    for name in ("loss", "z_loss"):
        np.testing.assert_allclose(losses_of_many[name], losses[name], rtol=1e-5)
    for (path, a), b in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(grads_of_many), strict=True):
        assert relative(np.asarray(b), np.asarray(a)) < 1e-4, path


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path):
    task = task_of(fp8jax.recipes.coat(), microbatches=2)
    step = jax.jit(task.step, compiler_options={"xla_llvm_disable_expensive_passes": True})
    batches = np.random.default_rng(0).integers(0, TINY.vocab, (4, 4, 17)).astype(np.int32)
    alone = jax.jit(task.init)()
    for tokens in batches[:2]:
        alone, _ = step(alone, tokens)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(2, alone, loader={}, config={})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        resumed, _ = checkpoints.restore(2, jax.eval_shape(task.init))
    for tokens in batches[2:]:
        alone, _ = step(alone, tokens)
        resumed, metrics = step(resumed, tokens)
    assert bool(metrics["healthy"])
    for (leaf, x), y in zip(flatten(alone).items(), flatten(resumed).values(), strict=True):
        assert digest(np.asarray(x)) == digest(np.asarray(y)), leaf


@pytest.mark.slow
def test_a_run_trains_logs_losses_of_routers_and_is_evaluated_and_exported(argv, out, capsys):
    flags = ["--model", "moe-tiny", "--recipe", "coat", "--steps", "8", "--run", "experts", "--seq-len", "32"]
    assert cli.main([*argv, *flags]) == 0
    assert "balance 2." in capsys.readouterr().out  # near the number of choices: routers start balanced
    rows = report.read_metrics(out / "experts" / "coat" / "metrics.jsonl")
    trained = [row for row in rows if "loss" in row]
    assert all(0 < row["z_loss"] < 20 and 1.9 < row["balance_loss"] < 8 for row in trained)
    assert trained[-1]["loss"] < trained[0]["loss"] - 0.1
    assert evaluate.main(["--run", str(out / "experts"), "--recipe", "coat", "--limit", "64"]) == 0
    export.from_run(out / "experts", "coat", out / "exported", dtype=None)
    assert generate.main(["--model", str(out / "exported"), "--prompt", "w1 w2", "--tokens", "4"]) == 0
    saved_bytes = export.from_run(out / "experts", "coat", out / "codes", dtype=None, eight="recipe")
    assert saved_bytes == [f"model.layers.{i}.mlp.gate" for i in range(2)]  # routers
    stored = files.tensors(out / "codes")
    params = flatten(evaluate.load(out / "experts", "coat").params)
    gate_up = np.asarray(params["layers.mlp.experts.gate_up.kernel"], np.float32)[1, 3]
    scale = np.abs(gate_up).max() / 448
    for name, part in zip(("gate_proj", "up_proj"), np.split(gate_up, 2, -1), strict=True):
        codes, stored_scale = (
            stored[f"model.layers.1.mlp.experts.3.{name}.{x}"].read() for x in ("weight", "weight_scale")
        )
        assert 1 <= stored_scale / scale < 1 + 2**-7  # of both parts, in bf16, rounded up
        np.testing.assert_allclose(codes.astype(np.float32) * scale, part.T, rtol=2**-4, atol=scale * 2**-10)


@pytest.mark.slow
def test_devices_that_share_experts_train_as_one_does_and_go_on_to_the_same_bits(argv, out, capsys):
    """Losses differ by 16- or 8-bit rounding: outside of experts, scales are per device."""
    flags = ["--model", "moe-tiny", "--recipe", "bf16", "coat", "--balance-coefficient", "0", "--log-every", "1"]
    shared = [*argv, *flags, "--run", "shared", "--mesh", "expert=2,fsdp=2"]
    assert cli.main([*argv, *flags, "--run", "alone"]) == 0 == cli.main(shared)
    for recipe, difference in (("bf16", 1e-3), ("coat", 5e-3)):
        one, many = (report.read_metrics(out / run / recipe / "metrics.jsonl") for run in ("alone", "shared"))
        for a, b in zip(one, many, strict=True):
            for name in {"loss", "valid_loss"} & a.keys():
                assert b[name] == pytest.approx(a[name], rel=difference), (recipe, a["step"])
    folder = out / "shared" / "coat" / "checkpoints"
    leaves = lambda: json.loads((folder / "8/_CHECKPOINT_METADATA").read_text())["custom_metadata"]["leaves"]  # noqa: E731
    ended = leaves()
    shutil.rmtree(folder / "8")
    (folder.parent / "result.json").unlink()
    capsys.readouterr()
    assert cli.main(shared) == 0
    assert "resuming from step 4" in capsys.readouterr().out
    assert leaves() == ended
    full = [*argv, *flags, "--recipe", "bf16", "--run", "full", "--mesh", "expert=2", "--expert-capacity", "1"]
    assert cli.main(full) == 1
    assert "as if a device got more than --expert-capacity 1 times its rows" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [1, 2])
def test_a_plan_counts_what_experts_exchange(chosen):
    """A layer sends tokens twice forward and gradients of results once.

    Two devices gather tokens with two experts each. With one expert each, XLA on CPUs pads what a pair exchanges.
    """
    config = dataclasses.replace(TINY, experts_per_token=chosen)
    recipe, devices = fp8jax.recipes.coat(), mesh.make(1, 1, jax.devices()[:2], expert=2)
    task = task_of(recipe, config, rows=mesh.batches(devices))
    state = jax.eval_shape(task.init)
    program = jax.jit(task.step, in_shardings=(mesh.state(devices, state), mesh.batches(devices)))
    actual = collectives(program.lower(state, BATCH).compile().as_text())
    planned = plan.of(config, recipe, dict(devices.shape), BATCH.shape[0] // 2 * 16)
    assert planned.memory["parameters"] < plan.of(config, recipe, {}, 32).memory["parameters"] * 0.7
    saved_bytes = [plan.saved_per_token(config, recipe, False, 1, 2, room) for room in (0.0, 2.0, 1.0)]
    assert saved_bytes[0] == saved_bytes[1]
    # With space for its rows, it saves codes of gate and up, and half as many weights; and the token of each row, if
    # tokens are quantized.
    rows = chosen * (2 * config.mlp_dim * (1 + 2 / 16) + (8 if chosen == 2 else 4))
    assert saved_bytes[0] - saved_bytes[2] == pytest.approx(rows, rel=0.01)

    def count(kind, dtypes, collectives):
        # XLA on CPUs sends bf16 as f32.
        these = [one for one in collectives if one.kind == kind and one.dtype in dtypes]
        return sum(one.times * one.nbytes * (2 if one.dtype == "bf16" else 1) for one in these)

    kinds = ["all-gather", "reduce-scatter"] if chosen == 2 else ["ragged-all-to-all"]
    for kind, dtypes in itertools.product(kinds, (["u8"], ["f32", "bf16"])):
        compiled, factor = ("all-to-all", 2) if chosen == 1 else (kind, 1)
        sent = factor * count(kind, dtypes, planned.collectives)
        assert sent == count(compiled, dtypes, actual)
        assert (sent > 0) == ((kind, dtypes) != ("reduce-scatter", ["u8"]))  # sums are not quantized


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--recipe te_delayed", "te_delayed: delayed scaling keeps a state for each product"),
        ("--lora-rank 4", "--lora-rank 4: adapters for experts are not supported"),
        ("--release previous", "--release previous: router losses are not supported"),
        ("--mesh tensor=2 --batch 4", "2 devices along tensor are not supported for experts"),
        (
            "--mesh expert=3 --batch 6",
            r"3 devices along expert do not divide 8 experts; expert must be one of \[1, 2, 4, 8\]",
        ),
        ("--model 5m --mesh expert=2 --batch 4", "expert=2: the model has no experts; use data=2"),
        ("--recipe fp8_lm --mesh expert=2 --batch 4", "comm.auto_scale has one factor per parameter"),
        ("--mesh expert=2 --expert-capacity 0.5", "--expert-capacity must be at least 1, or 0, got 0.5"),
        ("--experts-per-token 9", "experts_per_token must be from 1 to experts 8, got 9"),
        ("--experts 1", "experts must be 0, for one MLP, or at least 2, got 1"),
        ("--model 5m --z-coefficient 0.1", "--z-coefficient requires a model with experts"),
        ("--balance-coefficient -1", "--balance-coefficient must be finite and not negative, got -1"),
    ],
)
def test_what_experts_cannot_do_is_refused(flags, message, argv):
    def ask():
        config = parse([*argv[8:10], "--model", "moe-tiny", "--recipe", "coat", *flags.split()])
        cli.start.devices(config, [fp8jax.recipes.get(name) for name in config.recipe])

    with pytest.raises(UserError, match=message):
        ask()


def test_published_shapes_have_their_published_counts():
    """Total and active parameters: Mixtral 46.7 and 12.9 B, Qwen3 30.5 and 3.3 B, 235 and 22 B."""
    for name, vocab, total, active in (
        ("moe-mixtral-8x7b", 32_000, 46_702_792_704, 12.88e9),
        ("moe-qwen3-30b-a3b", 151_936, 30_532_122_624, 3.35e9),
        ("moe-qwen3-235b-a22b", 151_936, 235_093_634_560, 22.2e9),
    ):
        config = sizes.get(name, vocab)
        params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda c=config: Llama(c, rngs=nnx.Rngs(0))), nnx.Param))
        assert sum(x.size for x in jax.tree.leaves(params)) == total
        used = speed.operations(config, params, {}, 0) / 6 + vocab * config.dim  # the embedding is looked up
        assert used == pytest.approx(active, rel=0.01)
    config = sizes.get("moe-50m", 0)
    params = jax.eval_shape(
        lambda: nnx.to_pure_dict(nnx.state(Llama(sizes.get("moe-50m", 1), rngs=nnx.Rngs(0)), nnx.Param))
    )
    assert speed.operations(config, params["layers"], {}, 0) / 6 == pytest.approx(44e6, rel=0.02)


def test_a_plan_counts_states_of_experts_and_what_a_layer_keeps():
    config, recipe = sizes.get("moe-50m", 256), fp8jax.recipes.coat()
    state = jax.eval_shape(task_of(recipe, config).init)
    planned = plan.of(config, recipe, {}, 1024).memory
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.params, state.opt_state)))
    stated = sum(size for part, size in planned.items() if part in ("parameters", "first moments", "second moments"))
    assert stated == pytest.approx(state_bytes, rel=0.01)
    dense = dataclasses.replace(config, experts=0, experts_per_token=0)
    rows = (config.experts_per_token - 1) * 2 * config.mlp_dim
    more = plan.saved_per_token(config, recipe, False) - plan.saved_per_token(dense, recipe, False)
    assert more == pytest.approx(rows * (1 + 2 / 16), rel=0.1)
