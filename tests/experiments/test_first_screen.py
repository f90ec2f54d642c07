"""README's first table: newest card, one line a label and file, and nothing where an end is not measured."""

import pytest

from experiments.tables import first_screen

CASE = "Llama 1.1B, 8 x 2,048 tokens"


def result(date, commit, **steps):
    rows = [
        {"case": CASE, "impl": impl, "metric": "step", "value": ms, "baseline": "bf16", "ratio": 1.0, "commit": commit}
        for impl, ms in steps.items()
    ]
    return {"date": date, "command": "python -m experiments.bench models --rounds 3", "rows": rows}


def lines(results):
    return first_screen.table(results).split("\n")[2:]


def test_the_newest_card_is_shown_with_its_command_and_commit():
    old = result("2026-11-01", "aaa", bf16=9, coat=8, coat_fast=7)
    new = result("2026-11-02", "bbb", bf16=200.4, coat=160.2, coat_fast=150.6)
    told = ["200 ms, as written", "160 ms", "151 ms", "`python -m experiments.bench models`, H100, bbb"]
    for cards in ({"h100": new, "h9": old}, {"h9": old, "h100": new}):
        (line,) = lines({"models": cards})
        assert [cell.strip() for cell in line.split("|")[2:-1]] == told
    new["rows"][1]["commit"] = "ccc"
    assert "several commits" in lines({"models": {"h100": new}})[0]


@pytest.mark.parametrize(("missing", "shown"), [("coat", 1), ("bf16", 0), ("coat_fast", 0)])
def test_an_end_that_is_not_measured_leaves_the_line_out(missing, shown):
    steps = {name: 1.0 for name in ("bf16", "coat", "coat_fast") if name != missing}
    found = lines({"models": {"h100": result("2026-11-02", "bbb", **steps)}})
    assert len(found) == shown
    assert not shown or found[0].split("|")[3].strip() == "-"


def test_a_line_of_another_case_or_metric_is_not_taken():
    planted = result("2026-11-02", "bbb", bf16=1.0, coat=1.0, coat_fast=1.0)
    for row in planted["rows"]:
        row["case"] = "GPT-2 350M"
    assert lines({"models": {"h100": planted}}) == []
