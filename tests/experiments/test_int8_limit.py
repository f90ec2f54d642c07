"""The limit of INT8 with fallback: its arithmetic on made-up rates, and the files that it needs."""

import json

import pytest

from experiments.models.llama import LlamaConfig
from experiments.papers import int8_limit
from experiments.papers.common import Row
from experiments.papers.int8_limit import CardRates, Shape

SMALL = LlamaConfig(vocab=8, dim=4, layers=1, heads=2, kv_heads=1, mlp_dim=6)
RATES = CardRates({(3, 5): 1e3, (9, 9): 2e3}, {"int8": {(11, 5, 3): 2e3, (5, 3, 11): 3e3, (9, 9, 9): 8e3},
                                              "fp8": {(9, 9, 9): 4e3}}, 1e3)  # fmt: skip


def test_layers_of_a_block_are_those_of_the_model():
    shapes = int8_limit.linears(SMALL)
    assert [(shape.k, n) for shape in shapes for n in shape.widths] == [
        (4, 4), (4, 2), (4, 2), (4, 4), (4, 6), (4, 6), (6, 4)
    ]  # fmt: skip


def test_products_have_the_rates_of_their_shapes_and_others_the_highest():
    shapes, tokens = (Shape(3, (5, 7)),), 11
    first, second = (2e3 * tokens * 3 * n for n in (5, 7))
    assert int8_limit.plain_products(shapes, tokens, RATES) == pytest.approx(3 * (first / 1e3 + second / 1e3))
    # Forward (11, 5, 3) as it is; of the weight's gradient (3, 5, 11) the transpose; the gradient of the input is none.
    of_first = first * (1.2 / 2e3 + 1 / 8e3 + 1 / 3e3)
    assert int8_limit.products(shapes, tokens, "int8", RATES) == pytest.approx(of_first + 3.2 * second / 8e3)
    assert int8_limit.products(shapes, tokens, "fp8", RATES) == pytest.approx(3 * (first + second) / 4e3)


def test_bytes_of_quantizers_are_counted_by_hand():
    shapes, tokens = (Shape(3, (5, 7)),), 11
    # The input is read once for both layers: bf16 in, codes and what is kept, a fifth with a residual.
    inputs, gradients, weights = 11 * 3 * (2 + 1 + 1), 4 * 11 * (5 + 7), 4 * 3 * (5 + 7)
    assert int8_limit.quantized(shapes, tokens, "fp8") == inputs + gradients + weights
    assert int8_limit.quantized(shapes, tokens, "int8") == pytest.approx(inputs + 0.2 * 33 + gradients + weights)
    found = int8_limit.limit(shapes, tokens, "int8", RATES)
    assert found[0] == int8_limit.products(shapes, tokens, "int8", RATES)
    assert found[1] == pytest.approx(inputs + 0.2 * 33 + gradients + weights)
    assert list(int8_limit.beyond(shapes, tokens).values()) == pytest.approx([3.2 * 33, 66, 66, 2 * 3 * 12])


@pytest.mark.parametrize(
    ("fast", "above", "told"),
    [(1.4, 2.0, ["is slower than FP8", "That is why `auto` takes FP8"]),
     (1.1, 2.0, ["is not slower than FP8", "do not wholly bear out"]),
     (1.4, -2.0, ["slower", "2.00 ms below what stands here as its limit"])],
)  # fmt: skip
def test_what_is_said_follows_the_rows(fast, above, told):
    def rows(arm, most, measured):
        case = f"a layer of 7B, {arm}"
        figures = {"bf16": 40.0, "limit over bf16": most, "measured over bf16": measured, "above the limit": above}
        return [Row(case, name, x, pivot=(case, name)) for name, x in figures.items()]

    listed = [*rows("int8_fallback", 1.25, 1.0), *rows("fast", 1.5, fast)]
    listed.append(Row("a layer of 7B", "cause", 0.8, pivot=("a layer of 7B", "cause")))
    text = " ".join(int8_limit.verdict(listed))
    assert [part for part in told if part not in text] == []
    assert ("below what stands" in text) == (above < 0)
    assert "takes 0.8 ms of them at a copy's speed (2.0 % of bf16's time)" in text


def test_a_ratio_is_bf16_over_products_quantizers_and_all_else():
    rows = int8_limit._compared("t", "c", 10.0, (4.0, 1.0), 3.0, 1.1)
    values = {row.metric: row.value for row in rows}
    assert values["limit over bf16"] == pytest.approx(10 / 8)
    assert values["above the limit"] == pytest.approx(10 / 1.1 - 8)


def row(impl, metric, value, case="c", ratio=None):
    return {"case": case, "impl": impl, "metric": metric, "value": value, "unit": "1", "baseline": "b",
            "ratio": ratio, "commit": "c1", "device": "NVIDIA H9"}  # fmt: skip


def test_a_page_is_made_of_a_cards_files_and_none_without_them(tmp_path):
    step = "1b, one GPU, 8 x 2048 tokens"
    rows = {
        "gemm": [row("ours tensor", "rate", 1200.0, "1x1x1")],
        "gemm_int8": [row("ours int8 block", "rate", x, f"{n}x1x1") for n, x in enumerate((900.0, 1200.0))],
        "linear": [row("xla bf16", "rate", 600.0, "16384 x 4096 -> 11008"),
                   row("int8_fallback, 20 %", "rate", 700.0, "16384 x 4096 -> 11008", 700 / 600)],
        "quantize": [row("device copy", "bandwidth", 2.5)],
        "layer": [row("bf16", "time", 40.0), row("int8_fallback", "time", 38.0), row("fast", "time", 28.0)],
        "step": [row("bf16, recomputed", "step", 220.0, step), row("fast", "step", 160.0, step)],
        "step_more": [row("bf16, recomputed", "step", 220.0, step), row("fast", "step", 1.0, step),
                      row("int8_fallback", "step", 215.0, step)],
    }  # fmt: skip
    (tmp_path / "h9").mkdir()
    for name, listed in rows.items():
        assert int8_limit.main(["--results", str(tmp_path)]) == 0
        assert not (tmp_path / "h9" / "int8_limit.json").exists()
        content = {"bench": name, "versions": {}, "rows": listed, "date": "2026-01-01", "command": "c"}
        (tmp_path / "h9" / f"{name}.json").write_text(json.dumps(content))
    assert int8_limit.main(["--results", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "h9" / "int8_limit.json").read_text())
    values = {tuple(r["pivot"]): r["value"] for r in content["rows"]}
    case = "16384 x 4096 -> 11008"
    operations = 2 * 16384 * 4096 * 11008
    assert values[case, "bf16"] == pytest.approx(3 * operations / 600e9)
    assert values[case, "products at the limit"] == pytest.approx(3.2 * operations / 1200e9)
    assert values[case, "measured over bf16"] == pytest.approx(700 / 600)
    assert values["a layer of 7B, int8_fallback", "measured over bf16"] == pytest.approx(40 / 38)
    assert values["a step of 1b, fast", "measured over bf16"] == pytest.approx(220 / 160)
    # 1b has 16 layers of four widths; what its products take of bf16's step is not all of it.
    shapes = int8_limit.linears(int8_limit.sizes.get("1b", 32000)) * 16
    rest = 220 - 6e3 * 16384 * sum(shape.k * sum(shape.widths) for shape in shapes) / 600e12
    assert values["a step of 1b, int8_fallback", "all else, as bf16"] == pytest.approx(rest)
    assert values["a step of 1b, int8_fallback", "measured over bf16"] == pytest.approx(220 / 215)
    assert "int8 900 to 1,200 TOP/s" in content["notes"][0]
    assert content["rows"][0]["device"] == "NVIDIA H9"
