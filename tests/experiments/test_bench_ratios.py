"""Ratios and baselines of benchmarks, from planted times: a faster arm has a higher ratio, relative to
the best rival."""

import json
import math
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from experiments.bench import gemm, gemm_int8, linear, lora, models, plots, quantize, reduce, release
from experiments.bench.timing import Seconds


def planted(**times):
    return {name.replace("_", " "): Seconds([t]) for name, t in times.items()}


def test_a_product_is_compared_with_the_fastest_of_others_that_compute_the_same():
    arms = [gemm.GemmArm(*of) for of in (
        ("ours tensor", "tensor", None, ()), ("xla fp8 tensor", "tensor", None, ()),
        ("torch tensor", "tensor", None, ()), ("ours wgrad", "wgrad", None, ()), ("xla bf16", "bf16", None, ()),
        ("torch row", "row", None, ()),
    )]  # fmt: skip
    times = planted(ours_tensor=2.0, xla_fp8_tensor=4.0, torch_tensor=3.0, ours_wgrad=5.0, xla_bf16=10.0, torch_row=0.5)
    actual = {r["impl"]: r for r in gemm.rate_rows("c", 2e12, arms, times)}
    assert actual["ours tensor"]["baseline"] == "torch tensor"  # the faster of two with the same formats
    assert actual["ours tensor"]["ratio"] == 1.5
    assert actual["ours tensor"]["value"] == pytest.approx(1.0)  # 2e12 operations in 2 s
    assert (actual["ours wgrad"]["baseline"], actual["ours wgrad"]["ratio"]) == ("xla bf16", 2)
    assert actual["xla fp8 tensor"]["ratio"] == 0.75


def test_int8_products_against_bf16_and_fallback_against_its_ideal():
    half = f"{gemm_int8.FALLBACK} 0.5 random"
    times = {gemm_int8.BF16: 6.0, gemm_int8.XLA: 2.0, gemm_int8.OURS: 3.0, half: 5.0, gemm_int8.ROWS: 2.5}
    rows = gemm_int8.rate_rows("c", 6e12, {name: Seconds([t]) for name, t in times.items()})
    actual = {(r["impl"], r["metric"]): (r["value"], r["baseline"], r["ratio"]) for r in rows}
    assert actual[gemm_int8.OURS, "rate"] == (2, gemm_int8.BF16, 2)
    assert actual[gemm_int8.OURS, "of XLA's int8"][2] == pytest.approx(2 / 3)
    assert actual[half, "of ideal"][2] == pytest.approx(3 * 1.5 / 5)


def test_bandwidth_is_a_share_of_the_copy_s():
    times = {quantize.COPY: Seconds([2.0]), "fast": Seconds([1.0]), "slow": Seconds([4.0])}
    moved = {quantize.COPY: 4e12, "fast": 1.5e12, "slow": 4e12}
    actual = {r["impl"]: (r["value"], r["ratio"], r["baseline"]) for r in quantize.bandwidths("c", times, moved)}
    assert actual == {quantize.COPY: (2, 1, quantize.COPY), "fast": (1.5, 0.75, quantize.COPY),
                     "slow": (1, 0.5, quantize.COPY)}  # fmt: skip


def test_bytes_that_are_moved_are_all_reads_of_the_matrix_and_what_is_written():
    x, codes = jnp.zeros((128, 256), jnp.bfloat16), jnp.zeros((128, 256), jnp.uint8)
    actual = {name: moved(x, [codes]) for name, (_, moved) in quantize.arms().items()}
    assert actual[quantize.COPY] == 65536 + 32768
    for name, reads in {
        "fold e4m3:mx32+token": 1, "fold e4m3:mx32": 2, "transposed codes": 0.5, "e4m3, given scale": 1, "e4m3": 2,
        "e5m2 + same of x.T": 2, "e4m3:token": 1, "e4m3:token + e4m3:token of x.T": 2, "e4m3:group128": 1,
        "e4m3:block128 + same of x.T": 1, "e4m3:mx32 + e4m3:mx32 of x.T": 2,
    }.items():  # fmt: skip
        assert actual[f"{name} (xla)"] == actual[f"{name} (triton)"] == reads * 65536 + 32768, name


def test_adapters_are_compared_with_those_of_16_bits(monkeypatch):
    class Arm:
        def __init__(self, name, *_):
            self.program = name

        def __call__(self):
            return 1.0

        def prepare(self): ...

        def stop(self): ...

    monkeypatch.setattr(lora, "LoraArm", Arm)
    monkeypatch.setattr(lora.driver, "memory", lambda name: (0.0, {lora.BASELINE: 40.0}.get(name, 25.0)))
    times = {lora.BASELINE: 3.0, lora.ARMS[1]: 2.0}
    monkeypatch.setattr(lora.timing, "in_turns", lambda arms, *_: {name: Seconds([times[name]]) for name in arms})
    options = SimpleNamespace(arm=[lora.ARMS[1]], batch=1, length=8, rank=2, unroll=1, rounds=1, steps=1)
    actual = {(r["impl"], r["metric"]): (r["value"], r["ratio"]) for r in lora.measure(options)}
    assert actual == {
        (lora.BASELINE, "step"): (3000, 1), (lora.BASELINE, "needs"): (40, 1),
        (lora.ARMS[1], "step"): (2000, 1.5), (lora.ARMS[1], "needs"): (25, 1.6),
    }  # fmt: skip


def test_a_linear_layer_is_compared_with_xla_s_bf16():
    actual = {r["impl"]: (r["value"], r["ratio"])
             for r in linear.rate_rows("c", {linear.BF16: Seconds([3.0]), "fast": Seconds([2.0])}, 6e12)}  # fmt: skip
    assert actual == {linear.BF16: (2, 1), "fast": (3, 1.5)}


def test_sums_are_compared_with_bf16_s():
    times, sent = {reduce.BASE: Seconds([4.0]), "e4m3": Seconds([2.0])}, {reduce.BASE: 8e6, "e4m3": 4e6}
    actual = {(r["impl"], r["metric"]): (r["baseline"], r["ratio"]) for r in reduce.form_rows("c", times, sent)}
    assert actual["e4m3", "time"] == (reduce.BASE, 2)
    assert actual["e4m3", "sent"] == (reduce.BASE, 0.5)


def test_a_user_s_model_is_compared_with_bf16_of_the_same_kind_of_run():
    arms = {"bf16": (3.0, 4.0), "coat": (2.0, 5.0), "torch bf16": (6.0, 8.0)}
    times = {
        f"{arm}{end}": Seconds([t]) for arm, both in arms.items() for end, t in zip(models.KINDS, both, strict=True)
    }
    needs = {"bf16": 8.0, "coat": 4.0, "torch bf16": 16.0}
    actual = {(r["impl"], r["metric"]): (r["value"], r["ratio"])
             for r in models.rows("c", times, needs, {"bf16": 7, "coat": 9})}  # fmt: skip
    assert actual["torch bf16", "step"] == (6000, 0.5)
    assert actual["torch bf16", "step, synchronised"] == (8000, 0.5)
    assert actual["torch bf16", "temporaries"] == (16, 0.5)
    assert ("torch bf16", "arrays") not in actual
    assert actual["coat", "step"] == (2000, 1.5)
    assert actual["coat", "step, synchronised"] == (5000, 0.8)
    assert actual["coat", "temporaries"] == (4, 2)
    assert (actual["bf16", "arrays"], actual["coat", "arrays"]) == ((7, None), (9, None))
    assert all(math.isclose(actual["bf16", m][1], 1) for m in ("step", "step, synchronised", "temporaries"))
    alone = models.rows("c", times, {"coat": 4.0}, {"coat": 9})  # bf16 failed
    assert [(r["value"], r["baseline"], r["ratio"]) for r in alone] == [
        (value, None, None) for value in (2000, 5000, 4, 9)
    ]


def test_an_optimizer_is_compared_with_the_fastest_way_to_move_its_bytes(monkeypatch):
    pytest.importorskip("jax_triton")
    from experiments.bench import optimizer

    times = {"four warps": (3.0, None), "eight warps": (2.0, 2.5), "bytes only": (None, 2.5), "ours": (4.0, 5.0),
             "optax": (8.0, 4.0)}  # fmt: skip

    def in_turns(calls, rounds, repeats):
        kind = (optimizer.ROUNDS, optimizer.SUSTAINED_ROUNDS).index(rounds)
        assert repeats == dict.fromkeys(calls, (optimizer.CALLS, optimizer.SUSTAINED_CALLS)[kind])
        return {name: Seconds([times[name][kind]]) for name in calls}

    monkeypatch.setattr(optimizer.timing, "in_turns", in_turns)
    bench = optimizer.Bench(2)
    bench.params = 4e9
    arms = [optimizer.OptimizerArm("ours", None, 14.0, (2**21, 2**22)), optimizer.OptimizerArm("optax", None, 28.0)]
    moves = [optimizer.OptimizerArm(name, None, 16.0) for name in ("four warps", "eight warps")]
    bench.measure("c", arms, moves)
    bench.add_ratio("c", "ours", ("c", "optax"))
    actual = {(r["impl"], r["metric"], r["baseline"]): (r["value"], r["ratio"]) for r in bench.rows}
    assert actual == {
        ("bytes only", "speed", None): (2, None), ("bytes only", "bandwidth", None): (0.032, None),
        ("ours", "speed", "bytes only"): (1, 0.5), ("ours", "bandwidth", None): (0.014, None),
        ("optax", "speed", "bytes only"): (0.5, 0.25), ("optax", "bandwidth", None): (0.014, None),
        ("bytes only", "speed, sustained", None): (1.6, None),
        ("ours", "speed, sustained", "bytes only"): (0.8, 0.5),
        ("optax", "speed, sustained", "bytes only"): (1, 0.625),
        ("ours", "temporaries", "state"): (2, 0.5),
        ("ours", "speed", "optax"): (1, 2), ("ours", "speed, sustained", "optax"): (0.8, 0.8),
    }  # fmt: skip


def test_what_a_whole_model_needs_is_compared_with_the_first_and_what_does_not_fit_does_not_run(monkeypatch, tmp_path):
    needs = {"base": 40.0, "small": 20.0, "big": 60.0}

    def arm(name, model, batch, length, gpus):
        return SimpleNamespace(needs=needs[name], stop=lambda: None, batch=batch, count=batch * length, gpus=gpus,
                               operations=1e12)  # fmt: skip

    class Arm:
        def __init__(self, *how):
            self.__dict__ |= vars(arm(*how))

        def __call__(self):
            return 1.0

    monkeypatch.setattr(release, "CardArm", Arm)
    monkeypatch.setattr(release.timing, "need_gpu", lambda: None)
    monkeypatch.setattr(release.timing, "in_turns", lambda arms, *_: {name: Seconds([2.0]) for name in arms})
    monkeypatch.setattr(plots, "draw", lambda *_: None)
    release.main(["--arm", "base", "small", "big", "--fit", "50", "--batch", "3", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*/release.json")
    actual = {(r["impl"], r["metric"]): (r["value"], r["ratio"]) for r in json.loads(path.read_text())["rows"]}
    assert {key: actual[key] for key in actual if key[1] in ("memory", "step")} == {
        ("base", "memory"): (40, 1), ("base", "step"): (2000, 1), ("small", "memory"): (20, 2),
        ("small", "step"): (2000, 1), ("big", "memory"): (60, 40 / 60),
    }  # fmt: skip


def test_a_whole_model_by_tokens_a_second_and_by_steps_of_one_batch():
    sizes = {"base": 2, "ours": 6, "same": 2}
    arms = {
        name: SimpleNamespace(batch=batch, count=batch * 2 * 100, gpus=2, operations=batch * 1e12)
        for name, batch in sizes.items()
    }
    times = planted(base=4.0, ours=6.0, same=5.0)
    actual = {
        (name, r["metric"]): (r["value"], r["baseline"], r["ratio"])
        for name in sizes
        for r in release.rates("c", name, arms, times, "base", 1e12)
    }
    assert actual["ours", "tokens"] == (
        100,
        "base",
        2,
    )  # 600 tokens on each of two GPUs in 6 s, compared with 200 in 4 s
    assert actual["ours", "step"] == (6000, "base", None)
    assert actual["same", "step"] == (5000, "base", 0.8)
    assert actual["ours", "MFU"] == (0.5, None, None)
    assert actual["ours", "batch"][0] == 6
    assert {r["metric"]: r["ratio"] for r in release.rates("c", "ours", arms, times, "not run", None)} == {
        "step": None, "tokens": None, "batch": None}  # fmt: skip
