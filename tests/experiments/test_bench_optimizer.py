"""The benchmark of the optimizer's step, on CPU with stand-ins for its kernels: what it records, and how it times."""

import functools
import importlib.util
import json
import types

import jax
import pytest

import fp8jax
from experiments.bench import timing

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
FP32, BF16 = "fp32 weights, bf16 gradients", "bf16 weights, stochastic rounding"


@jax.jit
def exchanged(state):
    weights, mu, nu = state
    return [weights, nu, mu]


@pytest.mark.slow
def test_arms_run_in_turns_and_leave_nothing_behind(monkeypatch, tmp_path):
    from experiments.bench import optimizer, optimizer_lm

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
    monkeypatch.setattr(optimizer_lm, "fp8jax", ours)
    monkeypatch.setattr(optimizer_lm, "move", lambda size, warps, state, grads: state)
    left = lambda *_: live.append(sum(x.nbytes for x in jax.live_arrays() if id(x) not in before))  # noqa: E731
    monkeypatch.setattr("experiments.bench.optimizer_torch.measure", left)
    optimizer.main(["--rows", "2", "--out", str(tmp_path / "optimizer.json")])

    assert [(rounds, calls) for _, rounds, calls in timed] == [(9, {10}), (5, {60})] * 4
    assert [len(names) for names, *_ in timed] == [9, 3, 7, 4, 7, 4, 7, 4]
    assert given == [("triton", "nearest"), ("triton", "stochastic"), ("xla", "nearest")] * 2
    assert live[0] < 2**16, "arrays of the cases are still there"
    report = json.loads((tmp_path / "optimizer.json").read_text())
    assert len(report["notes"]) == 5
    assert {"adamw_triton", "fp8lm_triton"} <= report["kernels"].keys()
    found = {(r["case"], r["impl"], r["metric"], r["baseline"]): r for r in report["rows"]}
    assert len(found) == len(report["rows"])
    for case, step, place in ((FP32, "compressed_adamw step", 5), (BF16, "compressed_adamw step, to nearest", 6)):
        moved = found[case, "bytes only", "speed", None]
        assert moved["value"] == pytest.approx(8 * 2 * 4096 / 1e9)
        assert moved["quartiles"] == pytest.approx([moved["value"]] * 2)
        assert found[case, step, "speed", "bytes only"]["ratio"] == pytest.approx(1 / place)
    sustained = [(r["case"], r["impl"], r["ratio"]) for r in report["rows"]
                 if r["metric"] == "speed, sustained" and "FP8-LM" not in r["case"]]  # fmt: skip
    assert sustained == [
        (FP32, "bytes only", None),
        (FP32, "compressed_adamw step", 0.5),
        (FP32, "compressed_adamw step, second moment to nearest", pytest.approx(1 / 3)),
        (BF16, "bytes only", None),
        (BF16, "compressed_adamw step", 0.5),
        (BF16, "compressed_adamw step, to nearest", pytest.approx(1 / 3)),
        (BF16, "compressed_adamw step, second moment to nearest", pytest.approx(1 / 4)),
    ]
    assert found[BF16, "compressed_adamw step", "speed", "optax.adamw float32"]["ratio"] == pytest.approx(4 / 5)
    for kind, traffic in (("fp8 gradients", 13), ("bf16 gradients", 16)):
        case = f"FP8-LM, {kind}"
        moved, step, xla = (found[case, name, "bandwidth", None]["value"] / found[case, name, "speed", against]["value"]
                            for name, against in (("bytes only", None), (optimizer_lm.FUSED, "bytes only"),
                                                  (optimizer_lm.XLA, "bytes only")))  # fmt: skip
        assert [1e3 * x for x in (moved, step, xla)] == pytest.approx([13, traffic, traffic + 5])
        assert found[case, optimizer_lm.FUSED, "speed", optimizer_lm.XLA]["ratio"] == pytest.approx(7 / 5)


def test_a_round_is_timed_after_as_many_calls_untimed(monkeypatch):
    clock, ran = [0.0], []

    def call(name, length):
        # What runs after another takes longer.
        clock[0] += length if ran and ran[-1] == name else 100
        ran.append(name)
        return name

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing.jax, "block_until_ready", lambda x: x)
    ready = {"a": functools.partial(call, "a", 1), "b": functools.partial(call, "b", 2)}
    assert timing.in_turns(ready, 7, {"a": 3, "b": 2}) == {"a": 1, "b": 2}
    assert (ran.count("a"), ran.count("b")) == (7 * 2 * 3, 7 * 2 * 2)
    for i in range(7):
        assert set(ran[10 * i : 10 * (i + 1)]) == {"a", "b"}
