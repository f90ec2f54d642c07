"""The tables: their arithmetic against direct computation, the papers' figures as transcribed, and the report."""

import json
import os
import re
from pathlib import Path

import pytest

from experiments import startup
from experiments.bench import arms as bench_arms
from experiments.errors import UserError
from experiments.papers import coat_memory, common
from experiments.papers.common import Row
from experiments.results import figures, jobs, picture, record, report, runner, wording

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_operators_of_the_memory_table_add_up_and_coats_are_the_papers_less_rope():
    for values in coat_memory.PAPER.values():
        assert sum(values[:-1]) == pytest.approx(values[-1], abs=0.011)
    rows = coat_memory.rows()
    by_pivot = {row.pivot: row.value for row in rows if row.pivot}
    for operator, paper in zip(coat_memory.OPERATORS, coat_memory.PAPER["COAT"], strict=True):
        less = 2 if operator in ("RoPE", "Total") else 0
        assert by_pivot[bench_arms.FAITHFUL, operator] == pytest.approx(paper - less, abs=0.005)
    # Norm inputs, q, k, v and the output of attention, gate and up.
    assert by_pivot[bench_arms.LEAN, "Total"] == pytest.approx(1 + 4 + 8 / 3, abs=1e-6)
    totals = {row.case: row.value for row in rows if row.metric == "total"}
    scales = {row.case: row.value for row in rows if row.metric.startswith("scales")}
    # bf16 scales of groups of 16, the fp32 rstd of two norms and of each head of attention.
    statistics = (2 * 4 + 4 * coat_memory.HEADS) / (2 * coat_memory.WIDTH)
    assert scales[bench_arms.LEAN] == pytest.approx((2 + 16 / 3) / 16 + statistics, abs=1e-6)
    assert totals["bf16"] > 3.5 * totals[bench_arms.LEAN]
    # Results of products and attention: the input, q, k, v, attention and its projection, gate and up.
    assert by_pivot[bench_arms.REMATERIALIZED, "Total"] == pytest.approx(1 + 3 + 2 + 16 / 3, abs=1e-6)
    (ratio,) = (r.ratio for r in rows if (r.case, r.metric) == (bench_arms.LEAN, "total, recomputed"))
    assert ratio == pytest.approx(totals[bench_arms.REMATERIALIZED] / totals[bench_arms.LEAN])


ROW = {"case": "a | b", "impl": "xla", "metric": "time", "value": 1.5, "unit": "ms", "baseline": None, "ratio": None,
       "commit": "abc", "device": "d"}  # fmt: skip
RESULT = {"bench": "x", "versions": {"jax": "1"}, "command": "c", "date": "2026-01-01", "rows": [ROW]}


def test_a_results_file_becomes_a_page(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8JAX_COMMIT", "abcdef0")  # a file of a modified checkout is left out
    results = tmp_path / "results"
    row = Row("big", "error", 2.0, "1", "small", 2.0, 7.5, 3.0, "Table 1", ("big", "column"))
    base = Row("small", "error", 1.0, "1", "small", 1.0, 2.5, 1.0, "Table 1", ("small", "column"))
    common.write("mine", "Mine", [row, base], ["A note."], None, results)
    spread = ROW | {"quartiles": [1.25, 1.75]}
    (results / "h9").mkdir()
    (results / "h9" / "x.json").write_text(json.dumps(RESULT | {"rows": [spread], "flags": "--on"}))
    (results / "h9" / "x.png").write_bytes(b"")
    for folder in ("parity", "parity_65m_short"):
        (results / folder).mkdir()
        (results / folder / "bf16.json").write_text("runs, no results")
    (results / "pages").mkdir()
    (results / "pages" / "gone.md").write_text("of a file that is no longer there")
    assert report.main(["--results", str(results), "--readme", str(tmp_path / "none")]) == 0
    assert sorted(p.name for p in (results / "pages").iterdir()) == ["mine.md", "x.md"]
    mine, x = ((results / "pages" / name).read_text() for name in ("mine.md", "x.md"))
    assert mine.startswith("# Mine\n\n[all results](../../RESULTS.md)\n\n`python -m experiments.papers.mine` · 20")
    assert "error, relative to small (1); in brackets: the paper:" in mine
    assert "| big | 2 (3) |" in mine
    assert "- A note." in mine
    assert "| a \\| b | xla | time | 1.5 | 1.25 to 1.75 | ms |" in x
    assert "2026-01-01 · d · commit abc · jax 1 · XLA_FLAGS=`--on`" in x
    assert "![x](../h9/x.png)" in x
    front = (tmp_path / "RESULTS.md").read_text()
    assert "- [Mine](results/pages/mine.md): " in front
    assert front.count("not measured yet") == sum(len(table.rows) for table in figures.tables())


def test_a_table_is_written_by_its_command_or_says_what_is_wrong(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["x", "--results", str(tmp_path), "--size", "3"])

    def make(options):
        if options.size == 4:
            raise UserError("no text")
        return common.Table("mine", "Mine", [Row("case", "error", float(options.size))], ["A note."], device="H9")

    add_options = lambda parser: parser.add_argument("--size", type=int)  # noqa: E731
    assert common.run("Makes it.", make, add_options) == 0
    content = json.loads((tmp_path / "h9" / "mine.json").read_text())
    assert (content["title"], content["notes"], content["rows"][0]["value"]) == ("Mine", ["A note."], 3)
    monkeypatch.setattr("sys.argv", ["x", "--size", "4"])
    assert common.run("Makes it.", make, add_options) == 2
    assert capsys.readouterr().err == "error: no text\n"


def test_a_papers_table_is_filled_by_other_files_for_each_kind_of_gpu():
    text = (
        "| {x [value xla > time]:.1f} ms | {y sum([value xla > time]) / 2:.2f} | 2.5 |\n\n"
        "### None\n\n| head |\n|---|\n| {x [value no > time]:.1f} |\n\nBy {sources}."
    )
    content = {"title": "Title", "text": text, "notes": ["A note."]}
    cards = {"h100": RESULT, "h200x2": RESULT | {"rows": [ROW | {"value": 3.0, "commit": "def"}]}}
    page = report.view(content, {"x": cards, "y": {"cpu": RESULT}, "other": {"h9": RESULT}})
    first, second = page.split("\n## ")[1:]
    assert first == "H100\n\n| 1.5 ms | 0.75 | 2.5 |\n\nBy `c`, H100, abc; `c`, CPU, abc.\n"
    assert second == "H200\n\n| 3.0 ms | 0.75 | 2.5 |\n\nBy `c`, H200, def; `c`, CPU, abc.\n\n- A note.\n"
    assert "| 1.5 ms | - | 2.5 |" in report.view(content, {"x": cards})


def test_each_table_of_papers_toml_has_figures_in_each_section():
    results = report.read(ROOT / "results")
    for name, content in figures.read("papers.toml").items():
        for bench, expression, _ in figures.FIGURE.findall(content["text"]):
            counts = [len(figures.evaluate(result, expression)) for result in results.get(bench, {}).values()]
            assert max(counts, default=0) <= 1, (name, expression)
        headings, filled = content["text"].count("### "), report.view(content, results)
        assert filled.count("|\n| ") >= headings, name


def test_rows_of_several_commits_and_cards_show_it(tmp_path):
    """In a column of a page; next to the figure in RESULTS.md. A truncated file is marked too."""
    other = ROW | {"commit": "def+", "device": "e", "case": "second"}
    result = RESULT | {"rows": [ROW, other], "complete": False}
    text = report.page({"h9": result}, {})
    assert "| a \\| b | xla | time | 1.5 | ms | abc | d |" in text
    assert "| second | xla | time | 1.5 | ms | def+ | e |" in text
    assert "2026-01-01 · d, e · 2 commits (abc, def with changes)" in text
    assert "**Not complete**" in text
    # Means over runs have the commits of each.
    several = RESULT | {"rows": [ROW, ROW | {"commit": "abc, 123", "case": "mean"}]}
    assert " · 2 commits (abc, 123)" in report.page({"h9": several}, {})
    pivoted = [row | {"pivot": (row["case"], "loss"), "table": "T"} for row in result["rows"]]
    assert "| second | 1.5 | def+ | e |" in report.page({"h9": result | {"rows": pivoted}}, {})
    # If a row has no ratio, all cells are values.
    pivoted[0] |= {"ratio": 7.5, "baseline": "second"}
    assert "| a \\| b | 1.5 | abc | d |" in report.page({"h9": result | {"rows": pivoted}}, {})
    two = report.page({"h9": RESULT, "h10": RESULT | {"rows": [ROW | {"device": "f"}]}}, {})
    assert two.index("## H9") < two.index("· d ·") < two.index("## H10") < two.index("· f ·")
    assert "| abc |" not in two  # nothing differs within a file


def test_a_figure_stands_with_its_card_and_commit(monkeypatch):
    time = "{[value xla > time]:.1f} ms"
    rows = [
        {"what": "What", "bench": "x", "ours": time, "paper": "2 (paper)"},
        {"what": "That", "bench": "y", "ours": time},
        {"what": "It", "bench": "x", "ours": time},
    ]
    second = {"section": "Is it?", "text": "", "row": [{"what": "Once more", "again": "First: It"}]}
    content = [{"section": "Is it?", "title": "First", "text": "Over bf16.", "row": rows}, second]
    monkeypatch.setattr(figures, "read", lambda name: {"table": content} if name == "tables.toml" else {})
    cards = {"h100": RESULT, "h200x2": RESULT | {"rows": [ROW | {"value": 3.0, "commit": "def", "device": "e"}]}}
    text = report.front({"x": cards}, "pages")
    lines = text.splitlines()
    # If no rival has a figure, there is no column for it.
    assert lines.index("| case | ours | paper | device |") > lines.index("### First") > lines.index("## Is it?")
    assert "| What | 1.5 ms<br>3.0 ms | 2 (paper) | H100<br>2 x H200 |" in lines
    assert "| That | not measured yet |  |  |" in lines
    assert "| Once more | 1.5 ms<br>3.0 ms | H100<br>2 x H200 |" in lines
    # The command is printed once per table; a table without a title has no heading.
    of_x = "[x](pages/x.md) (H100: 2026-01-01, commit abc; 2 x H200: 2026-01-01, commit def)"
    assert [line for line in lines if line.startswith("- `")] == [f"- `{RESULT['command']}`: {of_x}"] * 2
    assert (text.count("## Is it?"), text.count("### ")) == (1, 1)
    # A row that occurs twice is one headline of its file.
    assert [each["label"] for each in figures.headlines("x", RESULT)] == ["First: What", "First: It"]
    second["row"][0]["again"] = "First: Nothing"
    with pytest.raises(ValueError, match="no row 'First: Nothing' before 'Once more'"):
        figures.tables()


def test_rows_are_short_and_stand_by_question_and_by_paper():
    tables = figures.tables()
    assert [row.what for table in tables for row in table.rows if len(row.what.split()) > 8] == []
    sections = list(dict.fromkeys(table.section for table in tables))
    assert sections[:3] == ["Is it faster?", "Does it save memory?", "Does it train as well?"]
    papers = {"COAT": "COAT", "MOSS": "MOSS", "INT8 with fallback": "INT8 fallback", "FP8-LM": "FP8-LM"}
    assert sections[3:7] == [*papers]
    # A paper's tables are in its order.
    for table in tables:
        if table.section in papers:
            pattern = rf"{papers[table.section]}, Table (\d+)"
            numbers = [int(actual[1]) for row in table.rows if (actual := re.search(pattern, row.paper))]
            assert numbers, table.section
            assert numbers == sorted(numbers), table.section


def test_rows_in_which_a_rival_errs_less_are_in_the_section_of_losses():
    tables = figures.tables()
    rows_lost = {row.ours for row in tables[-1].rows}
    results, worse = report.read(ROOT / "results")["peers"], dict[str, str]()
    for row in next(table for table in tables if table.title.startswith("Update error of 8-bit")).rows:
        for result in results.values():
            rivals = re.findall(r"(\S+)(?:;|$)", figures.filled(row.rival, result))
            if any(float(rival) < float(figures.filled(row.ours, result)) for rival in rivals):
                worse[row.ours] = row.what
    assert worse
    assert [what for ours, what in worse.items() if ours not in rows_lost] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "x.json: Expecting property name"),
        (json.dumps({k: v for k, v in RESULT.items() if k != "date"}), "x.json: date missing"),
        (
            json.dumps({**RESULT, "rows": [{"case": "a"}]}),
            "x.json: baseline, commit, device, impl, metric, ratio, unit, value missing",
        ),
        ("[]", "x.json: "),
    ],
)
def test_a_file_of_another_schema_is_named(tmp_path, capsys, content, message):
    (tmp_path / "h9").mkdir()
    (tmp_path / "h9" / "x.json").write_text(content)
    assert report.main(["--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_a_missing_or_empty_folder_is_named_and_nothing_is_written(tmp_path, capsys):
    for folder, message in ((tmp_path / "missing", "no such folder"), (tmp_path, "no results there")):
        assert report.main(["--results", str(folder), "--readme", str(tmp_path / "none")]) == 2
        assert capsys.readouterr().err.startswith(f"error: --results {folder}: {message}")
    assert list(tmp_path.iterdir()) == []


def test_pages_and_figures_in_the_readme_are_what_the_files_give():
    message = "run python -m experiments.results.report"
    files = report.written(ROOT / "results", ROOT / "README.md")
    assert set((ROOT / "results" / "pages").glob("*")) <= set(files), message
    assert {ROOT / name for name in ("README.md", "docs/status.md", report.PICTURE)} <= set(files)
    for path, text in files.items():
        assert path.read_text() == text, message


def test_the_picture_has_a_bar_for_each_implementation_with_its_figures():
    steps = {"bf16": 219.4, "torch bf16": 222.2, "coat": 170.0, "coat_fast": 161.2}
    rows = [{**ROW, "impl": impl, "metric": "step", "value": ms} for impl, ms in steps.items()]
    rows += [{**row, "metric": "temporaries", "value": 10 + i} for i, row in enumerate(rows)]
    cards = {"h9": RESULT | {"rows": rows}, "h8": RESULT | {"rows": rows, "date": "2025-01-01"}}
    text = picture.draw(cards)
    shown = re.findall(r">([^<>]+)</text>", text)
    names = {"fp8jax coat_fast", "JAX bf16", "torch.compile bf16"}
    assert set(shown) & {*names, "coat", "torchao float8 tensorwise"} == names
    assert {"222", "219", "161", "11.0", "10.0", "13.0"} <= set(shown)
    assert any("one H9" in word for word in shown)
    assert picture.draw(cards) == text
    with pytest.raises(ValueError, match="no bar for the picture in README"):
        picture.draw({"h9": RESULT | {"rows": rows[:4]}})  # without memory


def test_figures_are_looked_up_in_the_rows_they_name():
    rows = [
        {**ROW, "case": case, "impl": impl, "metric": metric, "value": value, "baseline": base, "ratio": ratio}
        for case, impl, metric, value, base, ratio in (
            ("one", "ours", "time", 2.0, "bf16", 1.5),
            ("two", "ours", "time", 4.0, "bf16", 1.75),
            ("two", "ours", "time", 4.0, "peer", 0.5),
            ("two", "theirs", "time", 8.0, "bf16", 0.875),
            ("geometric mean", "ours", "time", None, "bf16", 1.62),
        )
    ]
    for template, expected in (
        ("{[ratio ours > time > bf16]:.2f} x", "1.50 to 1.75 x"),
        ("{[ratio ours > time > > geometric mean]:.2f} x", "1.62 x"),
        ("{[value ours > time > > one]:.1f} ms", "2.0 ms"),
        ("{[value ours or theirs > ti* > > two or three] / 2:.0f}", "2 to 4"),
        ("{sum([value *s > time]) - 1:.0f}", "17"),
        ("{[ratio ours > rate]:.2f} x", None),
        ("{[ratio no > time]:.2f}; them {[ratio theirs > time]:.2f} x", "them 0.88 x"),
        ("{[value ours > time > > geometric mean]:.2f}", "not finite"),
    ):
        assert figures.filled(template, {"rows": rows}) == expected, template
    assert figures.short_command("python -m experiments.bench gemm --limit 215") == "python -m experiments.bench gemm"


def test_figures_that_were_counted_wrong_are_left_out_with_a_note(tmp_path):
    (wrong,) = (remark for remark in record.REMARKS if remark.left_out)
    bench, why = wrong.bench, wrong.note
    row = ROW | {"commit": wrong.commits[0]} | wrong.fields
    sound = [row | change for change in ({"commit": "a"}, {"impl": "ours"}, {"metric": "error"})]
    path = tmp_path / "x.json"
    for name, rows, expected_notes in ((bench, [row, *sound], [why]), (bench, sound, []), ("other", [row], [])):
        path.write_text(json.dumps(RESULT | {"bench": name, "rows": rows, "notes": []}))
        actual = record.load(path)
        assert actual["rows"] == (sound if name == bench else [row])
        assert actual["notes"] == expected_notes


def test_figures_of_arithmetic_that_was_mended_stand_with_a_note(tmp_path):
    path = tmp_path / "x.json"
    mended = [remark for remark in record.REMARKS if not remark.left_out and not remark.former]
    assert len(mended) == 3
    for remark in mended:
        bench, why, row = remark.bench, remark.note, ROW | {"commit": remark.commits[0]} | remark.fields
        others = [row | {"commit": "a"}, row | dict.fromkeys(remark.fields, "one")]
        for name, rows, expected_notes in ((bench, [*others, row], [why]), (bench, others, []), ("other", [row], [])):
            path.write_text(json.dumps(RESULT | {"bench": name, "rows": rows, "notes": []}))
            actual = record.load(path)
            assert (actual["rows"], actual["notes"]) == (rows, expected_notes)
        page = (ROOT / "results" / "pages" / f"{bench}.md").read_text()
        assert why in page


def test_rows_of_a_recipe_that_has_changed_since_have_its_former_name():
    row = {"case": "1b, coat_fast", "impl": "coat_fast, 8-bit head", "metric": "step"}
    rows = [row | {"commit": commit} for commit in ("a5c7820aed", "1fa4ef1", "3d8217e745", "0a5c7820")]
    result = record.remarked({"bench": "any", "rows": rows, "notes": ["one"]})
    actual = result["rows"]
    assert result["notes"] == ["one", "The former `coat_fast` used fast accumulation in all three matmuls."]
    assert record.remarked({"bench": "any", "rows": rows[2:]})["notes"] == []
    others = [rows[0] | {"case": "1b, coat", "impl": "coat"}]
    assert record.remarked({"bench": "any", "rows": others}) == {"bench": "any", "rows": others, "notes": []}
    former = ("1b, former coat_fast", "former coat_fast, 8-bit head")
    assert [(r["case"], r["impl"]) for r in actual] == [former] * 2 + [(row["case"], row["impl"])] * 2
    h200 = report.read(ROOT / "results")["step"]["h200"]["rows"]
    assert {r["impl"] for r in h200 if "coat_fast" in r["impl"]} == {"former coat_fast"}


def test_every_headline_names_rows_of_its_file_and_every_file_has_a_command():
    results = report.read(ROOT / "results")
    rows = [row for table in figures.tables() for row in table.rows]
    for row in rows:
        of_cards = results[row.bench].values()
        for template in filter(None, (row.ours, row.rival)):
            assert any(figures.filled(template, result) for result in of_cards), row
    job_names = {job.name for each in (*runner.JOBS.values(), runner.DERIVED, runner.TRAINED) for job in each} | {
        *jobs.SETTLED
    }
    assert {*results} <= job_names, "a file that no command makes"
    assert job_names >= {row.bench for row in rows}
    assert job_names >= {
        bench for text in figures.read("docs.toml").values() for bench, _, _ in figures.FIGURE.findall(text)
    }


def test_flags_are_added_once_and_a_given_one_stays(monkeypatch):
    for given, expected in (
        ("", startup.RECOMMENDED_FLAGS),
        ("--xla_dump_to=d", f"--xla_dump_to=d {startup.RECOMMENDED_FLAGS}"),
        ("--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=true"),
    ):
        monkeypatch.setenv("XLA_FLAGS", given)
        assert startup.recommend_flags() == expected
        assert startup.recommend_flags() == os.environ["XLA_FLAGS"] == expected


def test_older_files_are_shown_in_plain_words():
    old = next(result for results in report.read(ROOT / "results").values() for result in results.values()
               if any("temporaries" in row["metric"] for row in result["rows"]))  # fmt: skip
    row = next(row for row in old["rows"] if row["metric"] == "temporaries")
    shown = wording.row(row)
    assert shown["metric"] == "temporary memory"
    assert {name for name, value in shown.items() if value != row.get(name)} <= {"metric", "impl", "baseline", "unit"}
    assert wording.notes(["Twice.", "8-bit products a GPU", "Twice."]) == ["Twice.", "8-bit matmuls per GPU"]


def test_every_replaced_title_and_note_is_in_a_file():
    files = [result for results in report.read(ROOT / "results").values() for result in results.values()]
    content = figures.read("wording.toml")
    assert set(content["titles"]) <= {result["title"] for result in files}
    notes = [note for result in files for note in result.get("notes", [])]
    for entry in content["note"]:
        actual = any(wording._matches(entry, note) for note in notes)
        assert actual, f"delete it from wording.toml, no file needs it: {entry['old']}"
