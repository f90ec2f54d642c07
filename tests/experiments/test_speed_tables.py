"""Tables of the papers' speeds that are made of results files: arithmetic on made-up rates, and the files needed."""

import json

import pytest

from experiments.bench import gemm
from experiments.papers import speeds


def row(impl, metric, value, case="c", ratio=None):
    return {"case": case, "impl": impl, "metric": metric, "value": value, "unit": "1", "baseline": "b",
            "ratio": ratio, "commit": "c1", "device": "NVIDIA H9"}  # fmt: skip


def test_products_of_moss_are_times_of_measured_rates_beside_the_paper_s():
    case = "2048x7168x4096"
    gemm = [row("ours tensor", "rate", 1000.0, case), row("ours mx, codes folded first", "rate", 500.0, case)]
    rows = speeds.moss_products({"rows": gemm})
    assert [row.case for row in rows] == ["2048x7168x4096"] * 2
    # 2 x 2048 x 7168 x 4096 operations at 1,000 tera-operations a second.
    assert [row.value for row in rows] == [pytest.approx(0.12026, rel=1e-4), pytest.approx(0.24052, rel=1e-4)]
    assert [row.ratio for row in rows] == [1, 2]
    assert [(row.paper, row.paper_ratio) for row in rows] == [(0.26, 1), (0.25, pytest.approx(0.25 / 0.26))]


def test_every_product_of_moss_s_table_is_timed():
    assert set(speeds.TABLE_6) <= set(gemm.SHAPES)
    assert len(gemm.SHAPES) == len(set(gemm.SHAPES))


def test_the_trade_of_speed_for_fidelity_takes_each_recipe_s_own_scaling():
    case, speed = f"{speeds.ONE_GPU}, 8 x 2048 tokens", {"moss": 2.0, "coat": 1.0, "bf16": 0.5}
    step = {"rows": [row(impl, "tokens/s", value, case) for impl, value in speed.items()]}
    snr = {"rows": [row("fp8jax", "SNR", value, f"{name}, {when}, {scheme}")
                    for name, less in zip(speeds.ACTIVATIONS, (0, 1, 2), strict=True)
                    for when, later in (("late", 0), ("early", 9))
                    for scheme, value in (("per tensor", 30 - less - later),
                                          ("two-level, row", 33 - less - later))]}  # fmt: skip
    rows = speeds.moss_fidelity(step, snr)
    points = {(row.case, row.metric): row.value for row in rows}
    assert points == {("moss", "tokens/s"): 2, ("moss", "SNR"): 32, ("coat", "tokens/s"): 1, ("coat", "SNR"): 29}


def test_coats_table_11_is_made_of_steps_of_several_gpus(tmp_path):
    def result(*arms):
        rows = [row(arm, metric, value) | {"device": "2 x NVIDIA H9"}
                for arm, *values in arms
                for metric, value in zip(("tokens/s", "memory", "batch"), values, strict=False)]  # fmt: skip
        return {"bench": "step", "versions": {}, "rows": rows, "command": "c", "date": "2026-01-01"}

    step = result(("bf16, recomputed", 20_000.0, 79.0), ("coat", 36_000.0, 70.0, 10))
    rows = {(row.case, row.metric): row for row in speeds.efficiency(2, step)}
    whole = rows["FP8 optimizer and activations", "tokens/s"]
    assert (whole.value, whole.ratio, whole.paper, whole.paper_ratio) == (18_000, 1.8, 11_351, 1.85)
    assert rows["FP8 optimizer and activations", "batch"].value == 10
    assert ("bf16", "batch") not in rows
    assert ("FP8 optimizer", "tokens/s") not in rows
    assert rows["FP8 optimizer and activations", "memory"].paper == 35.6
    assert speeds.efficiency(4, step)[-1].paper == 11_257
    (tmp_path / "h9x2").mkdir()
    (tmp_path / "h9x2" / "step_7b_fit.json").write_text(json.dumps(step))
    assert speeds.main(["--results", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "h9x2" / "coat_efficiency.json").read_text())
    assert {row["device"] for row in content["rows"]} == {"2 x NVIDIA H9"}
    # The paper's own ratios, of its tokens a second.
    for measured in speeds.TABLE_11.values():
        for one in measured:
            assert one.tokens / measured[0].tokens == pytest.approx(one.speedup, abs=0.01)


def test_steps_by_how_weights_are_scaled_stand_beside_the_papers():
    times = {"moss, weights just in time": 200.0, "moss, weights delayed": 196.0, "moss": 190.0}
    step = {"rows": [row(name, "step", value) for name, value in times.items()]}
    rows = {(row.case, row.unit): row for row in speeds.moss_scalings(step)}
    assert rows["moss, automatic", "ms"].ratio == pytest.approx(200 / 190)
    assert rows["moss, automatic", "ms"].paper_ratio == pytest.approx(68.5 / 63.1)  # the paper's 1.087
    assert rows["moss, weights just in time", "%"].value == pytest.approx(100 * 10 / 200)
    assert rows["moss, weights just in time", "%"].paper == pytest.approx(100 * 3.6 / 68.5)
    assert speeds.moss_scalings({"rows": []}) == []


def test_a_layer_stands_beside_the_paper_s_by_time_and_by_what_it_keeps():
    case = "batch 4, length 4096"
    layer = [row(impl, metric, number, case) for impl, time, kept in (("bf16", 30.0, 36.0), ("te_current", 20.0, 12.0))
             for metric, number in (("time", time), ("kept", kept))]  # fmt: skip
    rows = {(r.case, r.metric): r for r in speeds.coat_layer({"rows": layer})}
    assert rows["te_current", "time"].ratio == 1.5
    assert rows["te_current", "time"].paper_ratio == pytest.approx(54.80 / 37.24)
    assert (rows["te_current", "kept"].ratio, rows["te_current", "kept"].paper_ratio) == (3, 5828 / 4840)
    assert {r.table for r in rows.values()} == {"Table 7: hidden size 4096, batch 4, length 4096"}
