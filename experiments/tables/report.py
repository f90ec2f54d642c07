"""Writes RESULTS.md from results/*.json: `python -m experiments.tables.report`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEAD = """# Results

Generated from the files in `results/` by `python -m experiments.tables.report`; do not edit. Every section names the
command that regenerates it. Where a paper's figure is missing, our copy of the paper does not hold it.
"""
_REQUIRED = {"bench", "device", "versions", "command", "date", "rows"}
_FIELDS = {"case", "impl", "metric", "value", "unit", "baseline", "ratio"}


def number(value: Any) -> str:
    """Four significant digits; "-" for what there is not."""
    if value is None:
        return "-"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def list_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Rows one below the other, without the columns that all of them leave empty."""
    columns = {
        "case": lambda r: r["case"],
        "implementation": lambda r: r["impl"] if any(x["impl"] != "fp8jax" for x in rows) else None,
        "metric": lambda r: r["metric"],
        "value": lambda r: number(r["value"]),
        "unit": lambda r: None if r["unit"] == "1" else r["unit"],
        "baseline": lambda r: r["baseline"],
        "ratio": lambda r: None if r["ratio"] is None else number(r["ratio"]),
        "paper": lambda r: None if r.get("paper") is None else number(r["paper"]),
        "paper's ratio": lambda r: None if r.get("paper_ratio") is None else number(r["paper_ratio"]),
    }
    cells = {name: [get(row) for row in rows] for name, get in columns.items()}
    kept = {name: column for name, column in cells.items() if any(cell is not None for cell in column)}
    lines = [[cell if cell is not None else "-" for cell in line] for line in zip(*kept.values(), strict=True)]
    return table(list(kept), lines)


def pivot_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with pivot labels as a table in two dimensions; cells hold the ratio (and the paper's), else the value."""
    across = list(dict.fromkeys(row["pivot"][1] for row in rows))
    down = list(dict.fromkeys(row["pivot"][0] for row in rows))
    cells = {tuple(row["pivot"]): row for row in rows}
    relative = all(row["ratio"] is not None for row in rows)
    paper = any(row.get("paper_ratio") is not None for row in rows)

    def show(row: dict[str, Any] | None) -> str:
        if row is None:
            return ""
        if not relative:
            return number(row["value"])
        return number(row["ratio"]) + (f" ({number(row.get('paper_ratio'))})" if paper else "")

    body = [[name, *(show(cells.get((name, column))) for column in across)] for name in down]
    what = rows[0]["metric"]
    if not relative:
        return table(["", *across], body)
    base = next((row for row in rows if row["case"] == row["baseline"]), None)
    legend = f"{what}, over that of {rows[0]['baseline']}" + (f" ({number(base['value'])})" if base else "")
    if paper:
        legend += "; in brackets the paper's ratio"
    return f"{legend}:\n\n{table(['', *across], body)}"


def section(result: dict[str, Any], picture: str | None) -> str:
    """One results file as a section.

    Args:
        result: content of the file.
        picture: path of its figure, relative to RESULTS.md.

    Raises:
        ValueError: the content is not of the schema; the message names what is missing.
    """
    missing = _REQUIRED - set(result)
    for row in result.get("rows", []):
        missing |= _FIELDS - set(row)
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [
        f"## {result.get('title', result['bench'])}",
        f"`{result['command']}` · {result['date']} · {result['device']} · {versions}",
    ]
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row.get("table") or "", row.get("pivot") is not None), []).append(row)
    for (name, pivoted), rows in groups.items():
        if name:
            parts.append(f"### {name}")
        parts.append(pivot_rows(rows) if pivoted else list_rows(rows))
    if picture:
        parts.append(f"![{result['bench']}]({picture})")
    parts += ["\n".join(f"- {note}" for note in result.get("notes", []))]
    return "\n\n".join(part for part in parts if part)


def write(results: Path, target: Path) -> int:
    """Writes the report of all results; returns the number of sections.

    Raises:
        ValueError: there are no results, or a file is no JSON or not of the schema; the message names it.
    """
    paths = sorted(results.glob("*.json"))
    if not paths:
        raise ValueError(
            f"--results {results}: {'no results (*.json) in it' if results.is_dir() else 'no such folder'}"
        )
    sections = []
    for path in paths:
        picture = path.with_suffix(".png")
        try:
            shown = f"{results.name}/{picture.name}" if picture.exists() else None
            sections.append(section(json.loads(path.read_text()), shown))
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from None
    target.write_text("\n\n".join([HEAD.strip(), *sections]) + "\n")
    return len(sections)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes RESULTS.md; exit code 2 and one line where there are no results, or one is not of the schema."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of JSON files (default: results)")
    parser.add_argument("--target", type=Path, default=Path("RESULTS.md"), help="(default: RESULTS.md)")
    arguments = parser.parse_args(argv)
    try:
        count = write(arguments.results, arguments.target)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.target}: {count} sections")
    return 0


if __name__ == "__main__":
    sys.exit(main())
