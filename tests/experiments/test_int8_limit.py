"""The limit of INT8 with fallback: its arithmetic on made-up rates, and the files that it needs."""

import json

import pytest

from experiments.models.llama import LlamaConfig
from experiments.tables import int8_limit
from experiments.tables.int8_limit import CardRates, Shape

SMALL = LlamaConfig(vocab=8, dim=4, layers=1, heads=2, kv_heads=1, mlp_dim=6)
RATES = CardRates({"bf16": 1e3, "int8": 2e3, "fp8": 4e3}, 1e3)


def test_layers_of_a_block_are_those_of_the_model():
    shapes = int8_limit.linears(SMALL)
    assert [(shape.k, n) for shape in shapes for n in shape.widths] == [
        (4, 4), (4, 2), (4, 2), (4, 4), (4, 6), (4, 6), (6, 4)
    ]  # fmt: skip


def test_operations_and_bytes_are_counted_by_hand():
    shapes, tokens = (Shape(3, (5, 7)),), 11
    products = 2 * 11 * 3 * (5 + 7)
    assert int8_limit.operations(shapes, tokens, "bf16") == 3 * products
    assert int8_limit.operations(shapes, tokens, "int8") == pytest.approx(3.2 * products)
    # The input is read once for both layers: bf16 in, codes and what is kept, a fifth with a residual.
    inputs, gradients, weights = 11 * 3 * (2 + 1 + 1), 4 * 11 * (5 + 7), 4 * 3 * (5 + 7)
    assert int8_limit.quantized(shapes, tokens, "fp8") == inputs + gradients + weights
    assert int8_limit.quantized(shapes, tokens, "int8") == pytest.approx(inputs + 0.2 * 33 + gradients + weights)
    found = int8_limit.limit(shapes, tokens, "int8", RATES)
    assert found == pytest.approx((3.2 * products / 2, inputs + 0.2 * 33 + gradients + weights))
    assert list(int8_limit.beyond(shapes, tokens).values()) == pytest.approx([3.2 * 33, 66, 66, 2 * 3 * 12])


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
        "gemm": [row("ours tensor", "rate", 1200.0)],
        "gemm_int8": [row("ours int8 block", "rate", x) for x in (900.0, 1600.0)],
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
        content = {"rows": listed, "date": "2026-01-01", "command": "c"}
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
    rest = 220 - 1e3 * int8_limit.operations(shapes, 16384, "bf16") / 600e12
    assert values["a step of 1b, int8_fallback", "all else, as bf16"] == pytest.approx(rest)
    assert values["a step of 1b, int8_fallback", "measured over bf16"] == pytest.approx(220 / 215)
    assert "int8 1,200 TOP/s" in content["notes"][0]
    assert content["rows"][0]["device"] == "NVIDIA H9"
