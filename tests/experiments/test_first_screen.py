"""README's first table: the card with most figures, then the newest, and nothing without bf16 or without ours."""

import re

import pytest

from experiments.results import first_screen

CASE = "Llama 1.1B, 8 x 2,048 tokens"


def result(date, commit, case=CASE, **steps):
    rows = [
        {"case": case, "impl": impl, "metric": "step", "value": ms, "baseline": "bf16", "ratio": 1.0, "commit": commit}
        for impl, ms in steps.items()
    ]
    return {"date": date, "command": "python -m experiments.bench models --rounds 3", "rows": rows}


def lines(results):
    """Rows of the table, and the line of sources."""
    *table, _, sources = first_screen.table(results).split("\n")
    return table[2:], sources


def cells(line):
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_newest_card_is_shown_with_its_command_and_commit():
    old = result("2026-11-01", "aaa", bf16=9, coat=8, coat_fast=7)
    new = result("2026-11-02", "bbb", bf16=200.4, coat=160.2, coat_fast=150.6)
    for cards in ({"h100": new, "h9": old}, {"h9": old, "h100": new}):
        (line,), sources = lines({"models": cards})
        assert cells(line) == ["200 ms", "160 ms", "151 ms"]
        assert "Measured by `python -m experiments.bench models`: Llama 1.1B (H100, bbb)." in sources
    new["rows"][1]["commit"] = "ccc"
    assert "several commits" in lines({"models": {"h100": new}})[1]


def test_each_model_is_named_with_its_card_and_commit():
    llama, gpt = result("2026-11-01", "aaa", bf16=9, coat=8), result("2026-11-02", "bbb", "GPT-2 350M", bf16=4, coat=3)
    (_, line), sources = lines({"models": {"h9": llama}, "models_gpt350m": {"h100": gpt}})
    assert cells(line) == ["4 ms", "3 ms"]
    assert sources.endswith("`python -m experiments.bench models`: Llama 1.1B (H9, aaa), GPT-2 350M (H100, bbb).")


def test_torch_stands_beside_ours_under_its_own_head():
    torch = {"torch bf16": 214.6, "torchao tensorwise": 182.4, "torchao rowwise": 190.0}
    found = {"models": {"h100": result("2026-11-02", "bbb", bf16=200.4, coat=160.2, coat_fast=150.6, **torch)}}
    head, (line,) = first_screen.table(found).split("\n")[0], lines(found)[0]
    shown = dict(zip(cells(head), cells(line), strict=True))
    assert shown == {"torch.compile bf16": "215 ms", "torchao float8 tensorwise": "182 ms", "JAX bf16": "200 ms",
                     "torchao float8 rowwise": "190 ms", "`coat`": "160 ms", "`coat_fast`": "151 ms"}  # fmt: skip


def test_all_lines_are_of_the_first_line_s_card_where_it_has_them():
    old = result("2026-11-01", "aaa", **{"bf16": 9, "coat_fast": 7, "torch bf16": 9})
    new = result("2026-11-02", "bbb", bf16=6, coat_fast=5)
    both = {card: result(of["date"], of["rows"][0]["commit"], bf16=ms, coat_fast=ms) for card, of, ms in
            (("h9", old, 3), ("h100", new, 4))}  # fmt: skip
    for of in both.values():
        for row in of["rows"]:
            row["case"] = "GPT-2 350M"
    found = {"models": {"h9": old, "h100": new}, "models_gpt350m": both}
    assert [cells(line)[-1] for line in lines(found)[0]] == ["7 ms", "3 ms"]
    del both["h9"]
    shown, sources = lines(found)
    assert [cells(line)[-1] for line in shown] == ["7 ms", "4 ms"]
    assert "H9, aaa" in sources
    assert "H100, bbb" in sources


def test_a_newer_card_that_measured_less_is_not_shown():
    old = result("2026-11-01", "aaa", bf16=9, coat=8, coat_fast=7)
    for names in (("bf16", "coat"), ("coat", "coat_fast")):
        new = result("2026-11-02", "bbb", **dict.fromkeys(names, 5))
        assert "H9, aaa" in lines({"models": {"h100": new, "h9": old}})[1]


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        (("bf16", "coat_fast"), {"JAX bf16": "1 ms", "`coat_fast`": "1 ms"}),
        (("bf16", "coat"), {"JAX bf16": "1 ms", "`coat`": "1 ms"}),
        (("bf16", "torch bf16"), None),
        (("coat", "coat_fast"), None),
    ],
)
def test_a_line_without_bf16_or_without_ours_is_left_out(measured, shown):
    found = {"models": {"h100": result("2026-11-02", "bbb", **dict.fromkeys(measured, 1.0))}}
    head = cells(first_screen.table(found).split("\n")[0])
    assert [dict(zip(head, cells(line), strict=True)) for line in lines(found)[0]] == ([shown] if shown else [])


def test_a_line_of_another_case_or_metric_is_not_taken():
    planted = result("2026-11-02", "bbb", bf16=1.0, coat=1.0, coat_fast=1.0)
    for row in planted["rows"]:
        row["case"] = "GPT-2 350M"
    assert lines({"models": {"h100": planted}})[0] == []


def test_the_picture_has_a_bar_for_each_implementation_with_its_figures():
    measured = result("2026-11-02", "bbb", **{"bf16": 219.4, "torch bf16": 222.2, "coat": 170.0, "coat_fast": 161.2})
    steps = list(measured["rows"])
    measured["rows"] += [{**row, "metric": "temporaries", "value": 10 + i} for i, row in enumerate(steps)]
    text = first_screen.picture(measured, "H9")
    shown = re.findall(r">([^<>]+)</text>", text)
    names = ["fp8jax coat_fast", "JAX bf16", "torch.compile bf16"]
    assert sorted(set(shown) & {*names, "`coat`", "torchao float8 tensorwise"}) == sorted(names)
    assert {"222", "219", "161", "11.0", "10.0", "13.0"} <= set(shown)
    assert any("one H9" in word for word in shown)
    assert first_screen.picture(measured, "H9") == text
    measured["rows"] = steps  # without memory
    with pytest.raises(ValueError, match="no bar for README's picture"):
        first_screen.picture(measured, "H9")
