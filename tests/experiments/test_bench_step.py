"""The benchmark of a whole step, with a small model: its arms train alike, and rematerialized bf16
needs less memory."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.bench import arms, driver, step, step_torch, timing
from experiments.models.llama import Llama, LlamaConfig
from fp8jax import recipes
from fp8jax.ops.dispatch import choice
from tests.rows import slow

LLAMA = LlamaConfig(vocab=16, dim=32, layers=2, heads=2, kv_heads=2, mlp_dim=64)
TOKENS = 32
BF16 = 2.0**-8


def options(out, **given):
    usual = {"model": "tiny", "arm": ["coat"], "mesh": ["one"], "batch": 2, "length": TOKENS, "rounds": 2, "steps": 4,
             "out": out, "fit": None, "name": "step", "limit": 1e9}  # fmt: skip
    return argparse.Namespace(**({"vocab": step.VOCAB} | usual | given))


@pytest.mark.slow
def test_all_arms_are_timed_and_compared(monkeypatch, tmp_path):
    clock = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    recorded = {}
    monkeypatch.setattr(
        step.driver, "memory", lambda program: recorded.setdefault(id(program), (len(recorded) + 1, len(recorded) + 2))
    )
    late, synchronised = (timing.Seconds([time, time]) for time in (0.25, 0.5))
    torch = {"torch bf16": step_torch.TorchTimes(late, synchronised, (1.0, 4.0))}
    step.measure(LLAMA, options(tmp_path), torch)
    content = json.loads((tmp_path / "cpu" / "step.json").read_text())
    assert content["complete"]
    actual = {(r["impl"], r["metric"]): r for r in content["rows"]}
    assert actual["torch bf16", "step"]["value"] == 250
    assert (actual["torch bf16", "memory"]["value"], actual["torch bf16", "memory"]["ratio"]) == (4, 0.5)
    # A clock that advances by one second per call: four steps in one.
    assert actual["coat", "step"]["value"] == 250
    assert actual["coat", "step"]["quartiles"] == [250, 250]
    assert actual["coat", "tokens/s"]["value"] == 2 * TOKENS / 0.25
    assert (actual["coat", "memory"]["value"], actual["coat", "memory"]["ratio"]) == (3, pytest.approx(2 / 3))
    assert {r["baseline"] for r in content["rows"] if r["ratio"]} == {step.REMATERIALIZED}
    assert {r["case"] for r in content["rows"]} == {f"tiny, one GPU, 2 x {TOKENS} tokens"}


class PlantedArm:
    """An arm whose step advances the clock."""

    clock, live, order = 0.0, 0, []

    def __init__(self, name, *_):
        self.name, self.took, self.program = name, {"coat": 2.0, step.REMATERIALIZED: 5.0, "bf16": 4.0}[name], None
        self.batch = self.count = self.tokens_per_step = 1
        self.flops, self.running = 1.0, False

    def __call__(self):
        if not self.running:
            PlantedArm.live += 1
            self.running = True
        assert PlantedArm.live == 1, "two arms hold their states at a time"
        PlantedArm.order.append(self.name)
        PlantedArm.clock += self.took
        return self.name

    def prepare(self):
        pass

    def stop(self):
        PlantedArm.live -= 1
        self.running = False

    def exchanged(self):
        return {}


def test_one_state_at_a_time_and_ratios_are_of_the_recomputed_baseline(monkeypatch, tmp_path):
    """The baseline is neither the slowest nor the fastest arm: bf16 without rematerialization is between them."""
    PlantedArm.clock, PlantedArm.live, PlantedArm.order = 0.0, 0, []
    monkeypatch.setattr(step, "StepArm", PlantedArm)
    monkeypatch.setattr(step.driver, "memory", lambda program: (1.0, 2.0))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: PlantedArm.clock)
    monkeypatch.setattr(timing.jax, "block_until_ready", lambda x: x)
    step.measure(LLAMA, options(tmp_path, arm=["bf16", "coat"], rounds=3, steps=2, name="other"))
    content = json.loads((tmp_path / "cpu" / "other.json").read_text())
    ratios = {r["impl"]: (r["value"], r["ratio"]) for r in content["rows"] if r["metric"] == "step"}
    assert ratios == {step.REMATERIALIZED: (5000, 1), "bf16": (4000, 1.25), "coat": (2000, 2.5)}
    assert {name: PlantedArm.order.count(name) for name in ratios} == dict.fromkeys(ratios, 1 + 3 * 2 * 2)


def test_an_arm_that_does_not_fit_is_left_out_and_the_rest_measured(monkeypatch, tmp_path, capsys):
    class FullArm(PlantedArm):
        def __call__(self):
            if self.name == "coat":
                raise MemoryError("RESOURCE_EXHAUSTED")
            return super().__call__()

    PlantedArm.live = 0
    monkeypatch.setattr(step, "StepArm", FullArm)
    monkeypatch.setattr(step.driver, "memory", lambda program: (1.0, 2.0))
    monkeypatch.setattr(timing.jax, "block_until_ready", lambda x: x)
    step.measure(LLAMA, options(tmp_path, arm=["coat", "bf16"]))
    rows = json.loads((tmp_path / "cpu" / "step.json").read_text())["rows"]
    assert [(r["impl"], r["value"]) for r in rows if r["metric"] == "failed"] == [("coat", None)]
    assert "bf16" in {r["impl"] for r in rows if r["metric"] == "step"}
    assert "coat failed: MemoryError RESOURCE_EXHAUSTED" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="the baseline of all arms, does not run"):
        step.driver.built(["coat", "bf16"], FullArm)
    assert list(step.driver.built([step.REMATERIALIZED, "bf16"], PlantedArm, limit=1e9)) == [
        step.REMATERIALIZED,
        "bf16",
    ]
    clock = itertools.count(0, 10)
    monkeypatch.setattr(driver.time, "perf_counter", lambda: float(next(clock)))
    assert list(step.driver.built([step.REMATERIALIZED, "bf16"], PlantedArm, limit=15)) == [step.REMATERIALIZED]
    assert "bf16: left out, the time limit is reached" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("where", [slow("data"), slow("fsdp"), "tensor"])
def test_devices_of_a_mesh_share_the_batch_and_the_state(where):
    """Two devices compute the step of one with the whole batch. With FSDP, each has half of the state."""
    losses, states = [], []
    for mesh, batch in (("one", 16), (where, 2)):
        arm = step.StepArm(arms.BF16, LlamaConfig(256, 512, 1, 8, 8, 512), batch, TOKENS, mesh)
        losses.append(float(arm()["loss"]))
        states.append(sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(arm.state.params)))
        exchanged = arm.exchanged()
    np.testing.assert_allclose(*losses, rtol=2e-3)
    assert states[1] == states[0] if where == "data" else states[1] < states[0] / 7
    assert any(kind.startswith("all-reduce") for kind in exchanged)
    assert any(kind.startswith("all-gather") for kind in exchanged) == (where != "data")


def test_an_arm_is_a_recipe_with_how_its_gradients_travel_or_what_it_recomputes(monkeypatch):
    assert arms.settings("moss")[1] == arms.settings(step.REMATERIALIZED)[1] == "products"
    assert arms.settings("coat, recomputed")[1] == "products"
    assert arms.settings("coat")[1] is arms.settings("bf16")[1] is False
    assert arms.settings("coat, 8-bit gradients")[0].comm.gradients == "e4m3"
    assert arms.settings("coat, 8-bit head").recipe.head == recipes.HEAD
    scaled = [arms.settings(f"moss, weights {how}").recipe.linear for how in ("just in time", "delayed")]
    assert [linear.w_scaling for linear in scaled] == ["current", "delayed"]
    assert all(
        dataclasses.replace(linear, w_scaling="automatic") == arms.settings("moss").recipe.linear for linear in scaled
    )
    assert [arms.settings(name).kernels for name in ("coat", f"coat, {arms.PLAIN}")] == [True, False]
    for name in ("coat, 8 bit gradients", "bf16, again"):
        with pytest.raises(ValueError, match="is unknown; use one of '8-bit gradients', 'one phase'"):
            arms.settings(name)
    monkeypatch.setattr(arms, "fastest", lambda recipe: False)
    assert arms.settings("moss")[1] is False
    assert arms.settings("moss, recomputed")[1] == arms.settings(step.REMATERIALIZED)[1] == "products"
    with pytest.raises(ValueError, match="coats"):
        arms.settings("coats")


def test_an_arm_without_kernels_is_traced_without_them(monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "lowered", lambda *_, **__: calls.append(choice.current_target().kernels))
    for name in ("te_current", f"te_current, {arms.PLAIN}"):
        step.StepArm(name, LLAMA, 1, TOKENS, "one")
    assert calls == [True, False]


@pytest.mark.slow
def test_recomputed_arms_give_the_same_step_and_need_fewer_temporaries():
    results, needs = [], []
    for name in (arms.BF16, step.REMATERIALIZED):
        arm = step.StepArm(name, LLAMA, 2, TOKENS, "one")
        metrics = arm()
        results.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        needs.append(driver.memory(arm.program))
    np.testing.assert_allclose(*results, rtol=1e-3)
    assert needs[1][0] < needs[0][0]
    assert needs[0][1] > needs[0][0]


@pytest.mark.slow
def test_steps_with_blocks_that_fall_back_begin_with_thresholds_that_have_settled():
    """At first all blocks fall back and are multiplied twice, which a few steps would measure."""
    arm = step.StepArm("int8_fallback", LLAMA, 2, TOKENS, "one")
    first = jax.tree.leaves(jax.tree.map(np.array, jax.device_get(arm.begin().model_state)))
    program, runs = arm.program, []
    arm.program = lambda *operands: (runs.append(True), program(*operands))[1]
    arm.start()
    assert len(runs) == step.SETTLING
    adapted = jax.tree.leaves(jax.tree.map(np.array, jax.device_get(arm.state.model_state)))
    assert int(arm.state.step) == 0
    assert any((a != b).any() for a, b in zip(first, adapted, strict=True))
    arm()
    arm.stop()
    arm.start()
    for a, b in zip(jax.tree.leaves(jax.device_get(arm.state.model_state)), adapted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(runs) == step.SETTLING + 1
    arm.decides, arm.settled = False, None
    arm.stop()
    arm.start()
    assert len(runs) == step.SETTLING + 1
    assert not step.StepArm("moss", LLAMA, 2, TOKENS, "one").decides


def test_flops_are_those_of_products_and_attention():
    arm = step.StepArm(arms.BF16, LLAMA, 2, TOKENS, "one")
    layer = 4 * 32 * 32 + 3 * 32 * 64
    attention = 2 * 2 * TOKENS * 32 / 2  # QK and AV, half of them masked
    assert arm.flops == 3 * 2 * TOKENS * (2 * (2 * layer + attention) + 2 * 32 * 16)


def test_seconds_remember_their_rounds():
    actual = timing.Seconds([4.0, 1.0, 2.0, 3.0, 5.0])
    assert actual == 3
    assert actual.quartiles() == [2, 4]
    assert actual.quartiles(lambda t: 12 / t) == [3, 6]


def test_torch_runs_in_a_process_before_this_one(monkeypatch, capsys):
    """Its times and memory are returned. If it fails, its rows are omitted, with a message."""
    requests = []

    def run(command, env, **_):
        requests.append((json.loads(command[-1]), env["JAX_PLATFORMS"]))
        times = {"late": [3.0, 1.0, 2.0], "synchronised": [4.0, 4.0, 5.0]}
        lines = [json.dumps({"arm": "torch bf16", **times, "memory": [1.0, 4.0]})]
        out = "noise\n" + "".join(f"torch: {line}\n" for line in lines[len(requests) - 1 :])
        return contextlib.nullcontext(types.SimpleNamespace(returncode=len(requests) - 1, stdout=out.splitlines(True)))

    monkeypatch.setattr(step_torch, "missing", lambda arm: None if arm == "torch bf16" else "no torchao")
    monkeypatch.setattr(step_torch.subprocess, "Popen", run)
    actual = step_torch.measured(["torch bf16", "torchao rowwise"], LLAMA, 2, TOKENS, 3, 4)
    assert actual == {"torch bf16": (2.0, 4.0, (1.0, 4.0))}
    assert actual["torch bf16"].late.rounds == (3.0, 1.0, 2.0)
    settings, platform = requests[0]
    assert (settings["arms"], settings["batch"], settings["length"], platform) == (["torch bf16"], 2, TOKENS, "cpu")
    assert LlamaConfig(**settings["llama"]) == LLAMA
    assert step_torch.measured(["torch bf16"], LLAMA, 2, TOKENS, 3, 4) == {}
    printed = capsys.readouterr().out
    assert "torch bf16: 2000.0 ms a step" in printed  # printed at once, so that an interrupted run has it in its log
    assert "torch's arms ended with code 1: rows left out" in printed


@pytest.mark.slow
def test_torch_arm_is_the_same_model():
    """With our weights it has our loss and gradients, except for bf16 rounding."""
    torch = pytest.importorskip("torch")
    ours = Llama(LLAMA, dtype=jnp.float32, rngs=nnx.Rngs(0))
    theirs = step_torch.build(torch, LLAMA, TOKENS)
    tokens = np.random.default_rng(0).integers(0, LLAMA.vocab, (2, TOKENS + 1))
    graph, params = nnx.split(ours)
    names = {
        "embed.weight": lambda p: p["embed"]["embedding"],
        "norm.weight": lambda p: p["norm"]["scale"],
        "head.weight": lambda p: p["head"]["kernel"].T,
    }
    for i, part in itertools.product(range(LLAMA.layers), ("attention", "mlp")):
        prefix = f"layers.{i}."
        names[f"{prefix}{part}_norm.weight"] = lambda p, i=i, part=part: p["layers"][f"{part}_norm"]["scale"][i]
        for name in ("q", "k", "v", "out") if part == "attention" else ("gate", "up", "down"):
            names[f"{prefix}{name}.weight"] = lambda p, i=i, k=name, part=part: p["layers"][part][k]["kernel"][i].T
    own = dict(theirs.named_parameters())
    assert own.keys() == names.keys()
    values = nnx.to_pure_dict(params)
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(torch.tensor(np.asarray(names[name](values)).tolist()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = theirs(torch.tensor(tokens.tolist()))
    loss.backward()

    def mean(params):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    expected, grads = jax.value_and_grad(mean)(params)
    np.testing.assert_allclose(loss.item(), expected, rtol=BF16)
    grads = nnx.to_pure_dict(grads)
    for name, weight in own.items():
        close = np.linalg.norm(weight.grad.numpy() - names[name](grads)) / np.linalg.norm(names[name](grads))
        assert close < 8 * BF16, name


def test_without_torch_its_rows_are_left_out_and_that_is_said(monkeypatch, capsys):
    monkeypatch.setattr(step_torch.importlib.util, "find_spec", lambda name: None)
    assert list(step_torch.available()) == []
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "  torch bf16: torch not importable: rows left out"
    assert printed[1] == "  torchao tensorwise: torch and torchao not importable: rows left out"


@pytest.mark.slow
def test_arms_that_fit_in_so_many_gigabytes_are_compared_by_tokens():
    """`coat` fits more sequences than bf16. Each batch is the largest whose plan is within the limit."""
    limit = 0.603  # the runtime needs 0.6
    batches = {name: step.largest_batch(name, LLAMA, TOKENS, "one", limit) for name in (step.REMATERIALIZED, "coat")}
    assert 1 < batches[step.REMATERIALIZED] < batches["coat"]
    for name, batch in batches.items():
        recipe, remat, *_ = arms.settings(name)
        fits = [step.plan.of(LLAMA, recipe, {}, n * TOKENS, recompute=bool(remat)).total for n in (batch, batch + 1)]
        assert fits[0] <= 1e9 * limit < fits[1]
    with pytest.raises(ValueError, match=r"one sequence of 32 tokens needs more than --fit 0\.6 GB"):
        step.largest_batch("coat", LLAMA, TOKENS, "one", 0.6)
    coat, again = (types.SimpleNamespace(batch=n, tokens_per_step=n * TOKENS, flops=1.0, count=1) for n in (6, 4))
    median, base = timing.Seconds([0.25]), timing.Seconds([0.5])
    for arm, metric, ratio in ((coat, "tokens/s", 3), (again, "step", 2)):
        by_metric = {r["metric"]: r for r in step.common("fits", "coat", median, base, arm, again, (1, 2), (2, 2))}
        assert [m for m in ("step", "tokens/s") if by_metric[m]["ratio"]] == [metric]
        assert (by_metric[metric]["ratio"], by_metric[metric]["baseline"]) == (ratio, step.REMATERIALIZED)


@pytest.mark.parametrize(
    ("arm", "vocab", "chunked"),
    [("bf16", 32, False), ("bf16", 2**24, True), ("bf16, whole logits", 2**24, False),
     ("te_current, logits in chunks", 32, True)],
)  # fmt: skip
def test_arms_have_logits_as_training_or_as_their_name_says(arm, vocab, chunked, monkeypatch):
    """With 2^6 tokens and 2^24 entries, fp32 logits would need 4 GiB."""
    monkeypatch.setenv("FP8JAX_DRY", "1")
    calls = []
    monkeypatch.setattr(step, "Task", lambda *_, chunked, **__: calls.append(chunked) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step.StepArm(arm, dataclasses.replace(step.DRY, vocab=vocab), 1, 64, "one")
    assert calls == [chunked]
    with pytest.raises(ValueError, match="'logits in chunks'"):
        arms.settings("bf16, half of the logits")
