"""Each figure in README and docs/ comes from a results file, and the text has no other figures."""

import re
from pathlib import Path

import pytest

from experiments.results import figures, report

ROOT = Path(__file__).parents[2]
# A measurement: a number and its unit or subject.
MEASURED = re.compile(r"[+-]?\d[\d.,]*(?=x\b| (?:times|x\b|%|ms\b|s\b|dB\b|GB\b|MB\b|TFLOP|bytes a parameter))")
# Sizes, limits and definitions that come from no run: the words around them.
STATED = (
    "moments need 2.1 bytes per parameter instead of 8",
    "about 31.5 dB",
    "block of 128 x 128",
    "simultaneous at 95 %",
    "`saturated` above 1 %",
    "`update_ratio` above 1 %",
    "space for 1.5 times the rows",
    # A mantissa bit, and what the table below the figure shows.
    "one mantissa bit less than e4m3, which costs 6 dB",
    "`nvfp4` is at least 10 dB below e4m3",
    # Counts of programs compiled for an H200, each next to its command; no GPU measured them.
    "needs 12 GB (XLA's count",
    # A host's memory, from a test's own run.
    "2.72 GB at the peak for 2.21 GB of weights in shards of 0.5 GB",
)


def prose(text: str) -> str:
    """Returns a page without code, formulas and generated figures, on one line."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", " ", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", report.BLOCK.sub(" ", text))


def test_every_figure_in_readme_and_docs_is_looked_up():
    unused, results = set(STATED), []
    for path in report.quoting(ROOT / "README.md"):
        text = prose(path.read_text())
        for stated in STATED:
            text, count = re.subn(re.escape(stated), " ", text, flags=re.IGNORECASE)
            unused -= {stated} if count else set()
        results += [f"{path.name}: {text[max(0, m.start() - 60) : m.end() + 20]}" for m in MEASURED.finditer(text)]
    assert results == [], "figures that no file gives: write them in experiments/results/docs.toml, or leave them out"
    assert unused == set(), "stated nowhere"


def test_readme_is_read_in_three_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_search_for_figures_finds_what_is_not_quoted():
    assert MEASURED.findall("it is 1.32 times as fast, takes 158 ms and 35.2 GB, and is +0.5 % off: 31 dB") == [
        "1.32", "158", "35.2", "+0.5", "31",
    ]  # fmt: skip
    assert MEASURED.findall("1.32x bf16, in groups of 1x128") == ["1.32"]
    assert not MEASURED.search("groups of 128, H200, three seeds, bf16")


def row(case, impl, metric, value, ratio=None, baseline=None):
    return {"case": case, "impl": impl, "metric": metric, "value": value, "ratio": ratio, "baseline": baseline,
            "commit": "abc"}  # fmt: skip


LINE = (
    "`coat` is {step [ratio coat > step > bf16 > 1b]:.2f} times as fast on one {card}, and takes "
    "{step [value coat > step > > 1b]:.0f} ms"
)


@pytest.fixture
def planted():
    rows = [
        row("1b, one", "coat", "step", 158.4, 1.3249, "bf16"),
        row("7b, one", "coat", "step", 999.0, 9.0, "bf16"),
        row("1b, one", "bf16", "step", 210.0, 1.0, "bf16"),
    ]
    h100 = {"date": "2026-01-02", "command": "c bench --rounds 3", "rows": rows}
    return {"step": {"h100": h100, "h200": h100 | {"date": "2026-01-01", "rows": []}}}


def test_figures_are_written_with_the_card_that_measured_them(planted):
    expected = "Before.\n`coat` is 1.32 times as fast on one H100, and takes 158 ms\nBy `c bench`, H100, abc."
    assert figures.with_figures(f"Before.\n{LINE}\nBy {{sources}}.", planted) == expected
    planted["step"]["h100"]["rows"][0]["commit"] = "def"
    assert figures.with_figures(f"{LINE}\n{{sources}}", planted).endswith("`c bench`, H100, several commits")


def test_a_whole_file_goes_before_a_newer_one_that_was_cut(planted):
    planted["step"]["h200"] |= {"date": "2026-01-03", "complete": False}
    assert "on one H100" in figures.with_figures(LINE, planted)
    planted["step"]["h200"] |= {"complete": True, "rows": planted["step"]["h100"]["rows"]}
    assert "on one H200" in figures.with_figures(LINE, planted)
    # The newest file may lack a figure of the block.
    rows = planted["step"]["h200"]["rows"]
    planted["step"]["h200"] |= {"rows": rows[1:]}
    assert "on one H100" in figures.with_figures(LINE, planted)
    planted["step"]["h200"] |= {"rows": rows[:2]}
    other = "{step [value bf16 > step]:.0f} ms on one {card}"
    assert figures.with_figures(f"{LINE}\n{other}", planted).count("on one H100") == 2


def test_a_line_names_one_card_alone(planted):
    line = LINE.replace("{step [value", "{more [value")
    for card, wrong in (("h100", False), ("cpu", False), ("h200", True)):
        files = planted | {"more": {card: planted["step"]["h100"]}}
        if wrong:
            with pytest.raises(ValueError, match="figures of the cards H100, H200, not of a single one"):
                figures.with_figures(line, files)
        else:
            assert "fast on one H100, and takes 158 ms" in figures.with_figures(line, files)


def test_a_figure_that_no_file_has_is_named(planted):
    rows = planted["step"]["h100"]["rows"]
    for several in (0, 2):
        planted["step"]["h100"]["rows"] = several * rows
        with pytest.raises(ValueError, match=rf"{several} figures in results/\*/step.json, not one"):
            figures.with_figures(LINE, planted)
    with pytest.raises(ValueError, match=r"0 figures in results/\*/step.json"):
        figures.with_figures(LINE, {})


def test_a_block_is_written_where_a_page_names_it():
    page = "Text.\n<!-- figures: one, written -->\nold\n<!-- end -->\nMore.\n<!-- end -->"
    blocks = {"one": "new", "two": "figures"}
    with pytest.raises(ValueError, match="no page has <!-- figures: two -->"):
        report.with_blocks({ROOT: page}, blocks)
    (new,) = report.with_blocks({ROOT: page}, {"one": "new"}).values()
    assert new == page.replace("old", "new")
    assert report.with_blocks({ROOT: new}, {"one": "new"}) == {ROOT: new}
    with pytest.raises(ValueError, match=r"a page has figures 'one', which are not in docs\.toml; use one of two"):
        report.with_blocks({ROOT: page}, {"two": "figures"})


def test_no_difference_is_shown_where_the_pages_say_so():
    """docs/status.md and docs/choose.md say so about these recipes, with all intervals together at 95 %."""
    (result,) = report.read(ROOT / "results")["recipe_parity"].values()
    table = {tuple(r["pivot"]): r["value"] for r in result["rows"]}
    for arm, seeds in (("coat", 5), ("coat_fast", 10), ("fast", 5), ("int8_fallback", 5), ("fp8_lm", 5)):
        assert table[arm, "seeds"] == seeds
        for loss in ("training loss", "validation loss"):
            assert abs(table[arm, f"{loss}: % above"]) <= table[arm, f"± ({loss})"], (arm, loss)
