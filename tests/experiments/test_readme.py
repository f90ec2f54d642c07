"""Figures that README and docs/ quote: each is one of the files', and none stands there that no file gives."""

import re
from pathlib import Path

import pytest

from experiments.results import quotes, report
from experiments.results.quotes import Figure, Quote

ROOT = Path(__file__).parents[2]
# What a measurement looks like: a number and what it is of.
MEASURED = re.compile(r"[+-]?\d[\d.,]*(?= (?:times|x\b|%|ms\b|s\b|dB\b|GB\b|MB\b|TFLOP|bytes a parameter))")
# Sizes, limits and definitions, which no run gives: the words around them.
STATED = (
    "moments take 2.1 bytes a parameter instead of 8",
    "about 31.5 dB",
    "block of 128 x 128",
    "hold together with 95 %",
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
    for quote in quotes.QUOTES:
        counts = 0
        for name, text in pages.items():
            pages[name], count = quotes.pattern(quote).subn(" ", text)
            counts += count
        assert counts == 1, quote.text
    unused, found = set(STATED), []
    for name, text in pages.items():
        for stated in STATED:
            text, count = re.subn(re.escape(stated), " ", text, flags=re.IGNORECASE)
            unused -= {stated} if count else set()
        found += [f"{name}: {text[max(0, m.start() - 60) : m.end() + 20]}" for m in MEASURED.finditer(text)]
    assert found == [], "figures that no file gives: quote them in experiments/results/quotes.py, or leave them out"
    assert unused == set(), "stated nowhere"


def test_readme_is_read_in_three_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_search_for_figures_finds_what_is_not_quoted():
    assert MEASURED.findall("it is 1.32 times as fast, takes 158 ms and 35.2 GB, and is +0.5 % off: 31 dB") == [
        "1.32", "158", "35.2", "+0.5", "31",
    ]  # fmt: skip
    assert not MEASURED.search("groups of 128, H200, three seeds, bf16")


def row(case, impl, metric, value, ratio=None, baseline=None):
    return {"case": case, "impl": impl, "metric": metric, "value": value, "ratio": ratio, "baseline": baseline}


@pytest.fixture
def planted(monkeypatch):
    speed, time = quotes.ratio("step", "coat", "step", "bf16", "1b"), quotes.value("step", "coat", "step", ".0f", "1b")
    quote = Quote("`coat` is {} times as fast on one {card}, and takes {} ms", (speed, time))
    monkeypatch.setattr(quotes, "QUOTES", (quote,))
    rows = [
        row("1b, one", "coat", "step", 158.4, 1.3249, "bf16"),
        row("7b, one", "coat", "step", 999.0, 9.0, "bf16"),
        row("1b, one", "bf16", "step", 210.0, 1.0, "bf16"),
    ]
    return {"step": {"h100": {"date": "2026-01-02", "rows": rows}, "h200": {"date": "2026-01-01", "rows": []}}}


def test_figures_are_written_with_the_card_that_measured_them(planted):
    text = "Before. `coat` is 9.99 times as\n  fast on one H7, and takes 1 ms, after 3."
    assert quotes.written({"a": "other", "b": text}, planted) == {
        "a": "other",
        "b": "Before. `coat` is 1.32 times as\n  fast on one H100, and takes 158 ms, after 3.",
    }


def test_a_whole_file_goes_before_a_newer_one_that_was_cut(planted):
    text = "`coat` is 9.99 times as fast on one H7, and takes 1 ms"
    planted["step"]["h200"] |= {"date": "2026-01-03", "complete": False}
    assert "on one H100" in quotes.written({"a": text}, planted)["a"]
    planted["step"]["h200"] |= {"complete": True, "rows": planted["step"]["h100"]["rows"]}
    assert "on one H200" in quotes.written({"a": text}, planted)["a"]
    # The newest file may lack a figure of the sentence.
    planted["step"]["h200"] |= {"rows": planted["step"]["h100"]["rows"][1:]}
    assert "on one H100" in quotes.written({"a": text}, planted)["a"]


def test_a_sentence_names_one_card_alone(planted, monkeypatch):
    text = "`coat` is 9.99 times as fast on one H7, and takes 1 ms"
    speed, time = quotes.QUOTES[0].figures
    monkeypatch.setattr(quotes, "QUOTES", (quotes.QUOTES[0]._replace(figures=(speed, time._replace(bench="more"))),))
    for card, wrong in (("h100", False), ("cpu", False), ("h200", True)):
        files = planted | {"more": {card: planted["step"]["h100"]}}
        if wrong:
            with pytest.raises(ValueError, match="figures of several cards, H100, H200, in one sentence"):
                quotes.written({"a": text}, files)
        else:
            assert "1.32 times as fast on one H100, and takes 158 ms" in quotes.written({"a": text}, files)["a"]


def test_a_sentence_that_is_not_there_or_a_figure_that_no_file_has_is_named(planted):
    text = "`coat` is 9.99 times as fast on one H7, and takes 1 ms"
    with pytest.raises(ValueError, match=r"hold this 0 times, not once: `coat` is \{\} times"):
        quotes.written({"a": "nothing"}, planted)
    with pytest.raises(ValueError, match="hold this 2 times"):
        quotes.written({"a": text, "b": text}, planted)
    planted["step"]["h100"]["rows"].pop(0)
    with pytest.raises(ValueError, match=r"no figure in results/\*/step.json"):
        quotes.written({"a": text}, planted)
    with pytest.raises(ValueError, match=r"no figure in results/\*/step.json"):
        quotes.written({"a": text}, {})


def test_of_several_rows_none_is_taken():
    look = quotes.one("coat", "step", "value")
    assert look({"rows": [row("a", "coat", "step", 1.0)]}) == 1
    assert look({"rows": [row("a", "coat", "step", 1.0), row("b", "coat", "step", 2.0)]}) is None


def test_one_over_another_is_not_upside_down():
    rows = [row("a", "torch", "step", 200.0), row("a", "coat", "step", 100.0)]
    figure = Figure("step", quotes.over(quotes.one("torch", "step", "value"), quotes.one("coat", "step", "value")))
    assert figure.look({"rows": rows}) == 2
    cost = quotes._nearest("fp32")
    name = "compressed_adamw step"
    assert cost({"rows": [row("fp32", name, "speed", 1.0, 0.8, f"{name}, second moment to nearest")]}) == (
        pytest.approx(25)
    )
    sizes = [row(f"{size} MiB, fp32", "8 bits", "time", 1.0, ratio, "bf16") for size, ratio in ((1, 0.5), (64, 1.5))]
    for pick, want in ((min, 0.5), (max, 1.5)):
        assert quotes._extreme("8 bits", ("1", "64"), pick).look({"rows": sizes}) == want
    took = (
        ("bf16", "all", 200.0),
        ("coat_fast", "all", 150.0),
        ("coat_fast", "our passes", 50.0),
        ("least", "all", 20.0),
    )
    kernels = {"rows": [row("a", impl, metric, ms) for impl, metric, ms in took]}
    whole, part, least = (quotes.one(impl, metric, "value") for impl, metric, _ in took[1:])
    assert quotes.less(whole, part)(kernels) == 100
    assert quotes.less(whole, quotes.one("nobody", "all", "value"))(kernels) is None
    assert quotes._bound(None).look(kernels) == 2
    assert quotes._bound(least).look(kernels) == pytest.approx(200 / 120)
    waited = [row("a", "coat_fast", f"step{how}", ms) for how, ms in (("", 70.0), (", synchronised", 79.0))]
    assert quotes._waits("coat_fast").look({"rows": waited}) == 9


def test_no_difference_is_shown_where_the_pages_say_so():
    """docs/status.md and docs/choose.md say so of these recipes, with all intervals together at 95 %."""
    (result,) = report.read(ROOT / "results")["recipe_parity"].values()
    table = {tuple(r["pivot"]): r["value"] for r in result["rows"]}
    for arm, seeds in (("coat", 5), ("coat_fast", 10), ("fast", 5), ("int8_fallback", 5), ("fp8_lm", 5)):
        assert table[arm, "seeds"] == seeds
        for loss in ("training loss", "validation loss"):
            assert abs(table[arm, f"{loss}: % above"]) <= table[arm, f"± ({loss})"], (arm, loss)
