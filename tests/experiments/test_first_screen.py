"""README's first table: newest card, one line a label and file, and nothing without bf16 or without ours."""

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
    torch = {"torch bf16": 214.6, "torchao tensorwise": 182.4}
    new = result("2026-11-02", "bbb", bf16=200.4, coat=160.2, coat_fast=150.6, **torch)
    told = [
        "200 ms, as written",
        "160 ms",
        "151 ms",
        "215 ms",
        "182 ms",
        "-",
        "`python -m experiments.bench models`, H100, bbb",
    ]
    for cards in ({"h100": new, "h9": old}, {"h9": old, "h100": new}):
        (line,) = lines({"models": cards})
        assert [cell.strip() for cell in line.split("|")[2:-1]] == told
    new["rows"][1]["commit"] = "ccc"
    assert "several commits" in lines({"models": {"h100": new}})[0]


def test_a_newer_card_that_measured_less_is_not_shown():
    old = result("2026-11-01", "aaa", bf16=9, coat=8, coat_fast=7)
    for names in (("bf16", "coat"), ("coat", "coat_fast")):
        new = result("2026-11-02", "bbb", **dict.fromkeys(names, 5))
        assert "H9, aaa" in lines({"models": {"h100": new, "h9": old}})[0]


@pytest.mark.parametrize(
    ("measured", "cells"),
    [
        (("bf16", "coat_fast"), ["1 ms, as written", "-", "1 ms"]),
        (("bf16", "coat"), ["1 ms, as written", "1 ms", "-"]),
        (("bf16",), None),
        (("coat", "coat_fast"), None),
    ],
)
def test_a_line_without_bf16_or_without_ours_is_left_out(measured, cells):
    found = lines({"models": {"h100": result("2026-11-02", "bbb", **dict.fromkeys(measured, 1.0))}})
    assert [[cell.strip() for cell in line.split("|")[2:5]] for line in found] == ([cells] if cells else [])


def test_a_line_of_another_case_or_metric_is_not_taken():
    planted = result("2026-11-02", "bbb", bf16=1.0, coat=1.0, coat_fast=1.0)
    for row in planted["rows"]:
        row["case"] = "GPT-2 350M"
    assert lines({"models": {"h100": planted}}) == []
