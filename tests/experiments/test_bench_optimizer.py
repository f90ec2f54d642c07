"""The benchmark of the optimizer's step, on a CPU with fake kernels: rows and timing."""

import functools
import importlib.util
import json
import types

import jax
import pytest

import fp8jax
from experiments.bench import timing

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
LEFT_ALONE = timing.left_alone
FP32, BF16 = "fp32 weights, bf16 gradients", "bf16 weights, stochastic rounding"


@jax.jit
def exchanged(state):
    weights, mu, nu = state
    return [weights, nu, mu]


@pytest.mark.slow
def test_arms_run_in_turns_and_leave_nothing_behind(monkeypatch, tmp_path):
    from experiments.bench import optimizer

    timed, live = [], []

    def in_turns(ready, rounds, calls):
        timed.append((list(ready), rounds, set(calls.values())))
        for call in [*ready.values()] * 2:
            jax.block_until_ready(call())
        return {name: timing.Seconds([1.0 + i]) for i, name in enumerate(ready)}

    before = {id(x) for x in jax.live_arrays()}
    monkeypatch.setattr(timing, "in_turns", in_turns)
    monkeypatch.setattr(optimizer, "move", lambda size, warps, state, grads: exchanged(state))
    ours = types.SimpleNamespace(
        compressed_adamw=lambda *args, impl, **settings: fp8jax.compressed_adamw(*args, impl="xla", **settings)
    )
    monkeypatch.setattr(optimizer, "fp8jax", ours)
    ours.quantize, given = fp8jax.quantize, []

    def fp8lm_adamw(*args, impl, **settings):
        given.append((impl, settings["master_rounding"]))
        return fp8jax.fp8lm_adamw(*args, impl="xla", **settings)

    ours.fp8lm_adamw = fp8lm_adamw
    record_live_bytes = lambda *_: live.append(sum(x.nbytes for x in jax.live_arrays() if id(x) not in before))  # noqa: E731
    monkeypatch.setattr(optimizer.Bench, "torch", record_live_bytes)
    monkeypatch.setattr(timing, "need_gpu", lambda: None)
    optimizer.main(["--rows", "2", "--out", str(tmp_path)])

    assert [(rounds, calls) for _, rounds, calls in timed] == [(9, {10}), (3, {60})] * 4
    assert [len(names) for names, *_ in timed] == [8, 6, 6, 4, 3, 3, 3, 3]
    assert given == [("triton", "nearest"), ("xla", "nearest")] * 2
    assert live[0] < 2**16, "arrays of the cases are still there"
    report = json.loads((tmp_path / "cpu" / "optimizer.json").read_text())
    assert report["complete"]
    assert len(report["notes"]) == 2
    actual = {(r["case"], r["impl"], r["metric"], r["baseline"]): r for r in report["rows"]}
    assert len(actual) == len(report["rows"])
    for case, step, place in ((FP32, "compressed_adamw step", 5), (BF16, "compressed_adamw step", 5)):
        moved = actual[case, "bytes only", "speed", None]
        assert moved["value"] == pytest.approx(8 * 2 * 4096 / 1e9)
        assert moved["quartiles"] == pytest.approx([moved["value"]] * 2)
        assert actual[case, step, "speed", "bytes only"]["ratio"] == pytest.approx(1 / place)
    sustained = {(r["case"], r["impl"], r["baseline"]): r["ratio"] for r in report["rows"]
                 if r["metric"] == "speed, sustained" and "FP8-LM" not in r["case"]}  # fmt: skip
    # In the order bytes, optax, step, update, both, nearest.
    assert sustained[FP32, "compressed_adamw step", "bytes only"] == pytest.approx(1 / 3)
    assert sustained[FP32, "compressed_adamw step", "optax.adamw float32"] == pytest.approx(2 / 3)
    assert sustained[FP32, "compressed_adamw update + apply", "optax.adamw float32"] == pytest.approx(2 / 5)
    assert sustained[BF16, "compressed_adamw step", "bytes only"] == pytest.approx(1 / 3)
    # The same for another case: 2 of fp32's optax to 3 of bf16's step.
    assert sustained[BF16, "compressed_adamw step", "optax.adamw float32"] == pytest.approx(2 / 3)
    assert actual[BF16, "compressed_adamw step", "speed", "optax.adamw float32"]["ratio"] == pytest.approx(4 / 5)
    for kind, traffic in (("fp8 gradients", 16), ("bf16 gradients", 18)):
        case = f"FP8-LM, {kind}"
        speeds = {
            name: actual[case, name, "speed", "optax.adamw bfloat16"] for name in (optimizer.FUSED, optimizer.XLA)
        }
        moved = [1e3 * actual[case, name, "bandwidth", None]["value"] / of["value"] for name, of in speeds.items()]
        assert moved == pytest.approx([traffic, traffic + 5])
        assert speeds[optimizer.FUSED]["ratio"] == pytest.approx(1 / 2)  # the second of three
        assert actual[case, optimizer.FUSED, "speed", optimizer.XLA]["ratio"] == pytest.approx(3 / 2)


def test_a_round_is_timed_after_as_many_calls_untimed(monkeypatch):
    clock, ran, garbage = [0.0], [], []

    def call(name, length):
        assert garbage == ["collect", "freeze"]
        # An arm that runs after another takes longer.
        clock[0] += length if ran and ran[-1] == name else 100
        ran.append(name)
        return name

    kinds = ("collect", "freeze", "unfreeze")
    collector = {kind: functools.partial(garbage.append, kind) for kind in kinds}
    monkeypatch.setattr(timing, "gc", types.SimpleNamespace(**collector))
    monkeypatch.setattr(timing, "left_alone", LEFT_ALONE)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing.jax, "block_until_ready", lambda x: x)
    ready = {"a": functools.partial(call, "a", 1), "b": functools.partial(call, "b", 2)}
    assert timing.in_turns(ready, 7, {"a": 3, "b": 2}) == {"a": 1, "b": 2}
    assert (ran.count("a"), ran.count("b")) == (7 * 2 * 3, 7 * 2 * 2)
    for i in range(7):
        assert set(ran[10 * i : 10 * (i + 1)]) == {"a", "b"}
    # The garbage collector does not scan objects of tracing during a round, and is restored afterwards.
    assert garbage == [*kinds]
