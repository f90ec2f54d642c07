"""Figures that README and docs/ quote: each is one of the files', and none stands there that no file gives."""

import re
from pathlib import Path

import pytest

from experiments.results import figures, report
from experiments.results.figures import Quote

ROOT = Path(__file__).parents[2]
# What a measurement looks like: a number and what it is of.
MEASURED = re.compile(r"[+-]?\d[\d.,]*(?=x\b| (?:times|x\b|%|ms\b|s\b|dB\b|GB\b|MB\b|TFLOP|bytes a parameter))")
# Sizes, limits and definitions, which no run gives: the words around them.
STATED = (
    "moments take 2.1 bytes a parameter instead of 8",
    "about 31.5 dB",
    "block of 128 x 128",
    "hold together with 95 %",
    "`saturated` above 1 %",
    "`update_ratio` above 1 %",
    "room for 1.5 times the rows",
    # A mantissa bit, and what the table below the figure shows.
    "one mantissa bit less than e4m3, which costs 6 dB",
    "`nvfp4` is 10 dB and more below e4m3",
    # What programs that were compiled for an H200 count, each beside its command; no card measured them.
    "needs 12 GB by XLA's count",
    # Of a host's memory, by a test's own run.
    "2.72 GB at the peak for 2.21 GB of weights in shards of 0.5 GB",
)


def prose(text: str) -> str:
    """A page without code, formulas and the table that is written, on one line."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", " ", text, flags=re.DOTALL)
    text = re.sub(f"{re.escape(report.START)}.*?{re.escape(report.END)}", " ", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text)


def test_every_figure_in_readme_and_docs_is_looked_up():
    pages = {name: prose(text) for name, text in report.quoting(ROOT / "README.md").items()}
    for quote in figures.quotes():
        counts = 0
        for name, text in pages.items():
            pages[name], count = quote.pattern.subn(" ", text)
            counts += count
        assert counts == 1, quote.text
    unused, found = set(STATED), []
    for name, text in pages.items():
        for stated in STATED:
            text, count = re.subn(re.escape(stated), " ", text, flags=re.IGNORECASE)
            unused -= {stated} if count else set()
        found += [f"{name}: {text[max(0, m.start() - 60) : m.end() + 20]}" for m in MEASURED.finditer(text)]
    assert found == [], "figures that no file gives: quote them in experiments/results/quotes.toml, or leave them out"
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
    return {"case": case, "impl": impl, "metric": metric, "value": value, "ratio": ratio, "baseline": baseline}


QUOTE = Quote("`coat` is {step [ratio coat > step > bf16 > 1b]:.2f} times as fast on one {card}, and takes "
              "{step [value coat > step > > 1b]:.0f} ms")  # fmt: skip
TEXT = "`coat` is 9.99 times as\n  fast on one H7, and takes 1 ms"


@pytest.fixture
def planted():
    rows = [
        row("1b, one", "coat", "step", 158.4, 1.3249, "bf16"),
        row("7b, one", "coat", "step", 999.0, 9.0, "bf16"),
        row("1b, one", "bf16", "step", 210.0, 1.0, "bf16"),
    ]
    return {"step": {"h100": {"date": "2026-01-02", "rows": rows}, "h200": {"date": "2026-01-01", "rows": []}}}


def written(text, results, quote=QUOTE):
    return figures.with_quotes({"a": "other", "b": text}, results, [quote])["b"]


def test_figures_are_written_with_the_card_that_measured_them(planted):
    want = "Before. `coat` is 1.32 times as\n  fast on one H100, and takes 158 ms, after 3."
    assert written(f"Before. {TEXT}, after 3.", planted) == want


def test_a_whole_file_goes_before_a_newer_one_that_was_cut(planted):
    planted["step"]["h200"] |= {"date": "2026-01-03", "complete": False}
    assert "on one H100" in written(TEXT, planted)
    planted["step"]["h200"] |= {"complete": True, "rows": planted["step"]["h100"]["rows"]}
    assert "on one H200" in written(TEXT, planted)
    # The newest file may lack a figure of the sentence.
    planted["step"]["h200"] |= {"rows": planted["step"]["h100"]["rows"][1:]}
    assert "on one H100" in written(TEXT, planted)


def test_a_sentence_names_one_card_alone(planted):
    quote = Quote(QUOTE.text.replace("{step [value", "{more [value"))
    for card, wrong in (("h100", False), ("cpu", False), ("h200", True)):
        files = planted | {"more": {card: planted["step"]["h100"]}}
        if wrong:
            with pytest.raises(ValueError, match="figures of several cards, H100, H200, in one sentence"):
                written(TEXT, files, quote)
        else:
            assert "fast on one H100, and takes 158 ms" in written(TEXT, files, quote)


def test_a_sentence_that_is_not_there_or_a_figure_that_no_file_has_is_named(planted):
    with pytest.raises(ValueError, match=r"hold this 0 times, not once: `coat` is \{step"):
        written("nothing", planted)
    with pytest.raises(ValueError, match="hold this 2 times"):
        written(f"{TEXT} {TEXT}", planted)
    rows = planted["step"]["h100"]["rows"]
    for several in (0, 2):
        planted["step"]["h100"]["rows"] = several * rows
        with pytest.raises(ValueError, match=rf"{several} figures in results/\*/step.json, not one"):
            written(TEXT, planted)
    with pytest.raises(ValueError, match=r"0 figures in results/\*/step.json"):
        written(TEXT, {})


def test_no_difference_is_shown_where_the_pages_say_so():
    """docs/status.md and docs/choose.md say so of these recipes, with all intervals together at 95 %."""
    (result,) = report.read(ROOT / "results")["recipe_parity"].values()
    table = {tuple(r["pivot"]): r["value"] for r in result["rows"]}
    for arm, seeds in (("coat", 5), ("coat_fast", 10), ("fast", 5), ("int8_fallback", 5), ("fp8_lm", 5)):
        assert table[arm, "seeds"] == seeds
        for loss in ("training loss", "validation loss"):
            assert abs(table[arm, f"{loss}: % above"]) <= table[arm, f"± ({loss})"], (arm, loss)
