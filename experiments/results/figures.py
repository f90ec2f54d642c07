"""Fills templates of text with figures from rows of results files.

`tables.toml` has the rows of RESULTS.md, `docs.toml` tables and sentences of README and docs/, `papers.toml` tables of
papers' speeds. A template is text with figures in braces, `{EXPRESSION:FORMAT}`, or `{BENCH EXPRESSION:FORMAT}` if it
uses several files. The expression is arithmetic on rows in brackets:

    coat takes {[value coat > step > > 1b]:.0f} ms, {[value bf16 > step] / [value coat > step]:.2f} times as fast

`[FIELD IMPL > METRIC > BASELINE > CASE]` is the field, "value" or "ratio", of all rows of an implementation (or case)
and metric. BASELINE and CASE are optional. CASE is a prefix of the rows' case; without it, means are left out. IMPL and
CASE may have alternatives, "A or B". IMPL and METRIC may have a `*`. `min`, `max` and `sum` are available. Several
different values are written "LEAST to LARGEST".
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Result = Mapping[str, Any]
MEANS = "geometric mean"
FIGURE = re.compile(r"\{(?:([a-z]\w*) )?((?:\[[^]]*\]|[^{}\[\]])*):([^{}:]*)\}")
_ROWS = re.compile(r"\[(value|ratio) ([^]]*)\]")
_FOLDER = Path(__file__).parent


def rows(result: Result, field: str, selector: str) -> np.ndarray:
    """Returns a field of the rows that a selector matches (module docstring). NaN stands for non-finite values."""
    impl, metric, baseline, case = (part.strip() for part in (*re.split(r" >(?= )", selector), "", "", "")[:4])
    impls, cases = impl.split(" or "), tuple(case.split(" or "))

    def is_meant(row: Mapping[str, Any]) -> bool:
        return (
            any(fnmatchcase(name, each) for name in (row["impl"], row["case"]) for each in impls)
            and fnmatchcase(row["metric"], metric)
            and baseline in ("", row["baseline"])
            and (row["case"].startswith(cases) if case else not row["case"].startswith(MEANS))
            and (field == "value" or row["ratio"] is not None)
        )

    return np.array([np.nan if row[field] is None else row[field] for row in result["rows"] if is_meant(row)])


def evaluate(result: Result, expression: str) -> np.ndarray:
    """Returns the values of an expression; none if one of its rows is missing."""
    values_by_name: dict[str, Any] = {}

    def name_of(match: re.Match[str]) -> str:
        name = f"x{len(values_by_name)}"
        values_by_name[name] = rows(result, *match.groups())
        return name

    code = _ROWS.sub(name_of, expression)
    if not all(map(len, values_by_name.values())):
        return np.array([])
    return np.atleast_1d(eval(code, {"__builtins__": {}, "min": np.min, "max": np.max, "sum": np.sum}, values_by_name))


def written(values: np.ndarray, form: str) -> str:
    """Formats a figure, or the smallest and largest if their text differs."""
    if np.isnan(values).all():
        return "not finite"
    ends = dict.fromkeys(format(x, form) for x in (np.nanmin(values), np.nanmax(values)))
    return " to ".join(ends)


def filled(template: str, result: Result) -> str | None:
    """Fills a template. Parts between semicolons with a missing figure are left out. None if all are left out.

    Args:
        template: see the module docstring.
        result: content of a results file.
    """
    parts = []
    for part in template.split("; "):
        values = [evaluate(result, match[2]) for match in FIGURE.finditer(part)]
        if all(map(len, values)):
            words = [written(each, match[3]) for each, match in zip(values, FIGURE.finditer(part), strict=True)]
            parts.append(FIGURE.sub("{}", part).format(*words))
    return "; ".join(parts) or None


class Row(NamedTuple):
    """A row of RESULTS.md.

    Attributes:
        label: the table of its first occurrence, and its name there.
        what: the measured quantity, in at most eight words; the table's text has the baseline.
        bench: name of the results file.
        ours: template of our figure.
        paper: the paper's figure and its location.
        rival: template of competitors' figures of the same run.
    """

    label: str
    what: str
    bench: str
    ours: str
    paper: str = ""
    rival: str = ""


class Table(NamedTuple):
    """A table of RESULTS.md.

    Attributes:
        section: heading of its section.
        title: title, or "" if it is the only table of its section.
        text: the baselines of its figures.
        rows: rows of the table.
    """

    section: str
    title: str
    text: str
    rows: tuple[Row, ...]


def tables() -> list[Table]:
    """Returns the tables of RESULTS.md, in order.

    Raises:
        ValueError: a row repeats one that no earlier table has.
    """
    result, rows_by_label = list[Table](), dict[str, Row]()
    for content in read("tables.toml")["table"]:
        rows = list[Row]()
        for fields in content["row"]:
            label = f"{content.get('title', content['section'])}: {fields['what']}"
            if "again" not in fields:
                rows_by_label[label] = row = Row(label, **fields)
            elif fields["again"] in rows_by_label:
                row = rows_by_label[fields["again"]]._replace(what=fields["what"])
            else:
                raise ValueError(f"tables.toml: there is no row {fields['again']!r} before {fields['what']!r}")
            rows.append(row)
        result.append(Table(content["section"], content.get("title", ""), content["text"], tuple(rows)))
    return result


def headlines(bench: str, result: Result) -> list[dict[str, str]]:
    """Returns rows of RESULTS.md for a results file: "label", "ours", "paper" and "rival"."""
    of_bench = {row.label: row for table in tables() for row in table.rows if row.bench == bench}
    return [
        {"label": label, "ours": ours, "paper": row.paper, "rival": filled(row.rival, result) or ""}
        for label, row in of_bench.items()
        if (ours := filled(row.ours, result))
    ]


def short_command(command: str) -> str:
    """Returns a command without its options."""
    return re.sub(r" (?!-m )-.*", "", command)


def read(name: str) -> dict[str, Any]:
    """Returns the content of a file of this folder."""
    return tomllib.loads((_FOLDER / name).read_text())


def blocks(results: Mapping[str, Mapping[str, Result]]) -> dict[str, str]:
    """Returns the tables and sentences of docs.toml with figures, by name.

    Args:
        results: content of the files, by name and card.

    Raises:
        ValueError: see `with_figures`.
    """
    return {name: with_figures(text, results) for name, text in read("docs.toml").items()}


def with_figures(text: str, results: Mapping[str, Mapping[str, Result]], missing: str | None = None) -> str:
    """Fills figures, `{BENCH EXPRESSION:FORMAT}`, in lines of Markdown. All figures of a benchmark are of one card.

    `{card}` is the card of the figures in its line. `{sources}` are the commands, cards and commits of all figures.

    Args:
        text: lines of Markdown.
        results: content of the files, by name and card.
        missing: text for a missing figure. Lines without any figure are then left out. None raises an error.

    Raises:
        ValueError: a figure is missing or in several rows, or `{card}` is in a line with figures of several cards.
    """
    expressions, lines, sources = dict[str, list[str]](), [], dict[str, None]()
    for bench, expression, _ in FIGURE.findall(text):
        expressions.setdefault(bench, []).append(expression)
    files_by_bench = {bench: latest(results.get(bench, {}), needed) for bench, needed in expressions.items()}
    for line in text.split("\n"):
        figures, cards = list[str](), set[str]()
        for bench, expression, form in FIGURE.findall(line):
            card, result = files_by_bench[bench]
            values = evaluate(result, expression)
            if len(values) == 0 and missing is not None:
                figures.append(missing)
                continue
            if len(values) != 1:
                raise ValueError(
                    f"{len(values)} figures in results/*/{bench}.json, not one, for {expression} in: {line}"
                )
            figures.append(format(values[0], form))
            name = card.partition("x")[0].upper()
            cards |= {name} - {"CPU"}
            commits = {row["commit"] for row in result["rows"]}
            commit = commits.pop() if len(commits) == 1 else "several commits"
            sources[f"`{short_command(result['command'])}`, {name}, {commit}"] = None
        if figures and set(figures) == {missing}:
            continue
        written_figures = iter(figures)
        line = FIGURE.sub(lambda _: next(written_figures), line)  # noqa: B023
        if "{card}" in line:
            if len(cards) != 1:
                raise ValueError(f"figures of the cards {', '.join(sorted(cards))}, not of a single one, in: {line}")
            line = line.replace("{card}", cards.pop())
        lines.append(line)
    return "\n".join(lines).replace("{sources}", "; ".join(sources))


def latest(of_cards: Mapping[str, Result], expressions: Sequence[str]) -> tuple[str, Result]:
    """Returns the newest card and file that has all figures; the newest of all files if none has.

    Complete files come before incomplete ones. If dates are equal, the last by name is returned.
    """
    order = sorted(of_cards, key=lambda card: (of_cards[card].get("complete", True), of_cards[card]["date"], card))
    if not order:
        return "", {"rows": []}
    complete = [card for card in order if all(len(evaluate(of_cards[card], each)) == 1 for each in expressions)]
    card = (complete or order)[-1]
    return card, of_cards[card]
