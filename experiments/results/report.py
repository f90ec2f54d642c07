"""Writes RESULTS.md, a page for each topic, and the figures of README and docs/ from results/CARD/NAME.json.

    python -m experiments.results.report

RESULTS.md has a section for each question and paper. results/pages/NAME.md has all rows of NAME.json. Every figure
has the card and the commit that measured it. `python -m experiments.results --list` says what changed since.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.results import figures, picture, record, wording
from experiments.results.jobs import SETTLED

HEAD = """# Results

`python -m experiments.results.report` writes this page from the files in `results/`; do not edit it. `make results`
measures them. Each file comes from one command on one card at one commit. These are listed below each table, with a
link to all rows. A speed ratio is the baseline's time divided by ours: above 1, fp8jax is faster. Each benchmark runs
its baseline in the same process, with `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false` (experiments/startup.py). The
figures of a competitor are from the same run. A blank cell means that we do not have the figure. The pages show older
files in today's words (`experiments/results/wording.toml`).
"""
# Prefixes of folders of training runs, which are sources of tables.
RUNS = "parity"
# A table without rows, and its heading.
EMPTY = re.compile(r"### .*\n\n\|.*\|\n\|[-:|]+\|\n\n")
PICTURE = "docs/_static/llama_step.svg"
# A block of docs.toml in a page.
BLOCK = re.compile(r"(<!-- figures: (\w+).*?-->\n).*?(<!-- end -->)", re.DOTALL)

Result = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Result]]
"""Content of results files, by name and card."""


def number(value: Any) -> str:
    """Formats a value with four significant digits; "-" for a missing value."""
    if value is None:
        return "-"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table. All columns except the first are right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def list_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table with one line per row, without empty columns."""
    columns = {
        "case": lambda r: r["case"],
        "implementation": lambda r: r["impl"] if any(x["impl"] != "fp8jax" for x in rows) else None,
        "metric": lambda r: r["metric"],
        "value": lambda r: number(r["value"]),
        "quartiles": lambda r: " to ".join(map(number, r["quartiles"])) if r.get("quartiles") else None,
        "unit": lambda r: None if r["unit"] == "1" else r["unit"],
        "baseline": lambda r: r["baseline"],
        "ratio": lambda r: None if r["ratio"] is None else number(r["ratio"]),
        "paper": lambda r: None if r.get("paper") is None else number(r["paper"]),
        "paper's ratio": lambda r: None if r.get("paper_ratio") is None else number(r["paper_ratio"]),
        "commit": lambda r: r["commit"] if _differ(rows, "commit") else None,
        "card": lambda r: r["device"] if _differ(rows, "device") else None,
    }
    cells = {name: [get(row) for row in rows] for name, get in columns.items()}
    shown = {name: column for name, column in cells.items() if any(cell is not None for cell in column)}
    lines = [[cell if cell is not None else "-" for cell in line] for line in zip(*shown.values(), strict=True)]
    return table(list(shown), lines)


def _differ(rows: Sequence[Mapping[str, Any]], field: str) -> bool:
    return len({row[field] for row in rows}) > 1


def pivot_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a two-dimensional table of rows with pivot labels. Cells are ratios (and the paper's), or values."""
    columns = list(dict.fromkeys(row["pivot"][1] for row in rows))
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

    body = [[name, *(show(cells.get((name, column))) for column in columns)] for name in down]
    for field in ("commit", "device"):
        if _differ(rows, field):
            columns = [*columns, field]
            of = {name: ", ".join(dict.fromkeys(r[field] for r in rows if r["pivot"][0] == name)) for name in down}
            body = [[*line, of[line[0]]] for line in body]
    what = rows[0]["metric"]
    if not relative:
        return table(["", *columns], body)
    base = next((row for row in rows if row["case"] == row["baseline"]), None)
    legend = f"{what}, relative to {rows[0]['baseline']}" + (f" ({number(base['value'])})" if base else "")
    if paper:
        legend += "; in brackets: the paper"
    return f"{legend}:\n\n{table(['', *columns], body)}"


def page(of_cards: Mapping[str, Result], pictures: Mapping[str, str]) -> str:
    """Returns the page of the results files of one name, with a section per card.

    Args:
        of_cards: contents by card.
        pictures: paths of their figures, relative to the page, by card.

    Raises:
        ValueError: a content does not match the schema; the message names the missing parts.
    """
    parts = [f"# {wording.title(next(iter(of_cards.values())))}", "[all results](../../RESULTS.md)"]
    for card, result in of_cards.items():
        record.check(result)
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        flags = f" · XLA_FLAGS=`{result['flags']}`" if result.get("flags") else ""
        if len(of_cards) > 1:
            parts.append(f"## {card_name(card)}")
        parts.append(f"`{result['command']}` · {measured(result)} · {versions}{flags}")
        if result["bench"] in SETTLED:
            parts.append("This study is finished. Its command exists only at that commit.")
        if not result.get("complete", True):
            parts.append("**Not complete**: the command was cut short.")
        groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        for row in map(wording.row, result["rows"]):
            groups.setdefault((row.get("table") or "", row.get("pivot") is not None), []).append(row)
        for (name, pivoted), rows in groups.items():
            if name:
                parts.append(f"{'##' if len(of_cards) == 1 else '###'} {name}")
            parts.append(pivot_rows(rows) if pivoted else list_rows(rows))
        if card in pictures:
            parts.append(f"![{result['bench']}]({pictures[card]})")
        parts += ["\n".join(f"- {note}" for note in wording.notes(result.get("notes", [])))]
    return "\n\n".join(part for part in parts if part) + "\n"


def view(content: Mapping[str, Any], results: Results) -> str | None:
    """Returns a page of a paper's tables with figures of other results files, by kind of GPU.

    None if none of these files exists.

    Args:
        content: "title", "text" and "notes", as in papers.toml.
        results: content of the files, by name and card.
    """
    benches = {bench for bench, _, _ in figures.FIGURE.findall(content["text"])}
    kind_of = lambda card: card.partition("x")[0]  # noqa: E731
    kinds = {kind_of(card) for bench in benches for card in results.get(bench, {})} - {"cpu"}
    if not kinds:
        return None
    parts = [f"# {content['title']}", "[all results](../../RESULTS.md)"]
    for kind in sorted(kinds):
        results_of_kind = {
            bench: {card: result for card, result in results.get(bench, {}).items() if kind_of(card) in (kind, "cpu")}
            for bench in benches
        }
        text = figures.with_figures(content["text"], results_of_kind, missing="-")
        parts += [f"## {card_name(kind)}", EMPTY.sub("", text)]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in content["notes"])]) + "\n"


def measured(result: Result) -> str:
    """Returns the date, devices and commits of a measurement."""
    devices = dict.fromkeys(device for _, device in record.sources(result))
    return f"{result['date']} · {', '.join(devices)} · {commits_of(_commits(result))}"


def _commits(result: Result) -> list[str]:
    """Returns the commits of a file's rows."""
    return list(dict.fromkeys(each for of, _ in record.sources(result) for each in of.split(", ")))


def commits_of(commits: Sequence[str]) -> str:
    """Formats commits. A + marks local changes."""
    commit_texts = [commit.rstrip("+") + (" with changes" if commit.endswith("+") else "") for commit in commits]
    if commit_texts == [record.UNKNOWN]:
        return "commit unknown"
    return (
        f"commit {commit_texts[0]}"
        if len(commit_texts) == 1
        else f"{len(commit_texts)} commits ({', '.join(commit_texts)})"
    )


def front(results: Results, pages: str) -> str:
    """Returns RESULTS.md: a section for each question and each paper, then a list of pages.

    Args:
        results: content of the files, by name and card.
        pages: folder of pages, relative to RESULTS.md.
    """
    parts, section = [HEAD.strip()], ""
    for each in figures.tables():
        parts += [] if each.section == section else [f"## {each.section}"]
        section = each.section
        parts += [f"### {each.title}"] if each.title else []
        parts += [each.text, _figures_table(each.rows, results), _sources(each.rows, results, pages)]
    listed = [
        f"- [{wording.title(next(iter(of.values())))}]({pages}/{name}.md): "
        + "; ".join(measured(result) for result in of.values())
        for name, of in results.items()
    ]
    listed += [
        f"- [{content['title']}]({pages}/{name}.md)"
        for name, content in figures.read("papers.toml").items()
        if view(content, results)
    ]
    return "\n\n".join([*filter(None, parts), "## Pages", "\n".join(listed)]) + "\n"


def _figures_table(rows: Sequence[figures.Row], results: Results) -> str:
    """Returns a table of rows with figures, one line per card, without empty columns."""
    lines = []
    for row in rows:
        figures_by_card = {
            card: (ours, figures.filled(row.rival, result) or "")
            for card, result in results.get(row.bench, {}).items()
            if (ours := figures.filled(row.ours, result))
        }
        rivals = [rival for _, rival in figures_by_card.values()]
        ours = "<br>".join(figure for figure, _ in figures_by_card.values()) or "not measured yet"
        cards = "<br>".join(map(card_name, figures_by_card))
        lines.append([row.what, ours, row.paper, "<br>".join(rivals) if any(rivals) else "", cards])
    head = ["case", "ours", "paper", "competitor", "device"]
    used = [i for i in range(len(head)) if any(line[i] for line in lines)]
    return table([head[i] for i in used], [[line[i] for i in used] for line in lines])


def _sources(rows: Sequence[figures.Row], results: Results, pages: str) -> str:
    """Returns the files of a table by command, each with a link to its page, cards, dates and commits."""
    by_command: dict[str, list[str]] = {}
    for bench in dict.fromkeys(row.bench for row in rows if row.bench in results):
        of_cards = results[bench]
        when = "; ".join(
            f"{card_name(card)}: {result['date']}, {commits_of(_commits(result))}" for card, result in of_cards.items()
        )
        command = figures.short_command(next(iter(of_cards.values()))["command"])
        by_command.setdefault(command, []).append(f"[{bench}]({pages}/{bench}.md) ({when})")
    return "\n".join(f"- `{command}`: {', '.join(files)}" for command, files in by_command.items())


def card_name(card: str) -> str:
    """Formats a folder's card: `h100x2` is "2 x H100"."""
    name, _, count = card.partition("x")
    return f"{count} x {name.upper()}" if count.isdigit() else card.upper()


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads FOLDER/CARD/NAME.json, by name and card. Files without rows of known commits are left out.

    Raises:
        ValueError: the folder is missing or empty, or a file is not JSON or does not match the schema. The message has
            its name.
    """
    if not folder.is_dir():
        raise ValueError(f"--results {folder}: no such folder")
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/*.json"), key=lambda path: (path.stem, path.parent.name)):
        if path.parent.name.startswith(RUNS):
            continue
        if (result := record.load(path))["rows"]:
            results.setdefault(path.stem, {})[path.parent.name] = result
    if not results:
        raise ValueError(f"--results {folder}: no results there (CARD/NAME.json)")
    return results


def written(folder: Path, readme: Path | None = None) -> dict[Path, str]:
    """Returns the text of all pages made from a folder, by path.

    These are RESULTS.md next to the folder and the pages in it. If there is a README, they include the picture, README
    and the hand-written pages of docs/ with updated figures.

    Raises:
        ValueError: see `read`, `figures.blocks`, `with_blocks` and `picture.draw`.
    """
    results = read(folder)
    files = {folder.parent / "RESULTS.md": front(results, f"{folder.name}/pages")}
    for name, of_cards in results.items():
        pictures = {card: f"../{card}/{name}.png" for card in of_cards if (folder / card / f"{name}.png").exists()}
        files[folder / "pages" / f"{name}.md"] = page(of_cards, pictures)
    for name, content in figures.read("papers.toml").items():
        if text := view(content, results):
            files[folder / "pages" / f"{name}.md"] = text
    if readme is not None:
        pages = {path: path.read_text() for path in quoting(readme)}
        files |= with_blocks(pages, figures.blocks(results))
        files[readme.parent / PICTURE] = picture.draw(results["models"])
    return files


def quoting(readme: Path) -> list[Path]:
    """Returns README and the hand-written pages of docs/ next to it."""
    generated = ("_build", "api", "results", "examples")
    pages = [path for path in sorted((readme.parent / "docs").rglob("*.md")) if not set(generated) & set(path.parts)]
    return [path for path in [readme, *pages] if path.name != "changelog.md"]


def with_blocks(pages: Mapping[Path, str], blocks: Mapping[str, str]) -> dict[Path, str]:
    """Returns pages with updated text between `<!-- figures: NAME ... -->` and `<!-- end -->`.

    Raises:
        ValueError: a page has an unknown block, or a block is in no page.
    """
    unused = dict.fromkeys(blocks)

    def filled(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in blocks:
            raise ValueError(f"a page has figures {name!r}, which are not in docs.toml; use one of {', '.join(blocks)}")
        unused.pop(name, None)
        return f"{start}{blocks[name]}\n{end}"

    new = {path: BLOCK.sub(filled, text) for path, text in pages.items()}
    if unused:
        raise ValueError(f"no page has <!-- figures: {next(iter(unused))} -->")
    return new


def main(argv: Sequence[str] | None = None) -> int:
    """Writes all pages. Returns 2 after a one-line error if a folder or file is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of JSON files (default: results)")
    parser.add_argument(
        "--readme", type=Path, default=Path("README.md"), help="page whose figures are updated, if it exists"
    )
    options = parser.parse_args(argv)
    try:
        files = written(options.results, options.readme if options.readme.exists() else None)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (options.results / "pages").mkdir(exist_ok=True)
    for path in (options.results / "pages").glob("*.md"):
        if path not in files:
            path.unlink()
    for path, text in files.items():
        path.write_text(text)
    print(f"wrote {options.results.parent / 'RESULTS.md'} and {len(files) - 1} other files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
