"""Results files: the stored figures, the commit and card of each row, and later changes, from git.

A file RESULTS/CARD/NAME.json has the results of one command on one card at one commit. If there is no git history (a
copy of the files on another machine), the environment variable `FP8JAX_COMMIT` has the commit.
"""

import dataclasses
import datetime
import functools
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.files import parse_json, read_text, write_json
from experiments.results import figures

ROOT = Path(__file__).parents[2]
UNKNOWN = "unknown"
# Code that affects figures, in addition to the benchmark itself.
MEASURED = ("pallas_kernels", "fp8jax")


@dataclasses.dataclass(frozen=True)
class Remark:
    """A remark on figures of certain commits. The figures do not change, except for `former` and `left_out`.

    Attributes:
        note: a sentence below the table.
        commits: prefixes of hashes of commits.
        bench: the benchmark, or "" for all.
        fields: values of fields of the affected rows.
        former: a recipe whose settings were different; its rows are renamed to "former ...".
        left_out: whether to omit the rows, because the figure was wrong.
    """

    note: str
    commits: tuple[str, ...]
    bench: str = ""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    former: str = ""
    left_out: bool = False

    def holds(self, bench: str, row: Mapping[str, Any]) -> bool:
        """Returns whether the remark applies to a row of a benchmark's file."""
        return (
            self.bench in ("", bench)
            and row["commit"].startswith(self.commits)
            and all(row[name] == value for name, value in self.fields.items())
            and self.former in row["case"] + row["impl"]
        )


_DRIFT = ("in this run, stochastic rounding raised a value that fp16 can represent once in 16,384 draws. This has been "
          "fixed since.")  # fmt: skip
_SCALED = {"case": "master fp16, scaled"}
REMARKS = (
    Remark("The former `coat_fast` used fast accumulation in all three matmuls.",
           ("a5c7820", "1fa4ef1", "183e7e5"), former="coat_fast"),
    Remark("The state of FlashOptim was not counted correctly. Its bytes are left out until they are measured again.",
           ("03031b26dc",), "peers", {"impl": "FlashOptim FlashAdamW", "metric": "bytes a parameter"}, left_out=True),
    Remark(f"master fp16, scaled: {_DRIFT}", ("3d8217e745",), "fp8_lm_masters", _SCALED),
    Remark(f"master fp16: {_DRIFT}", ("14dcf52c3f",), "fp8_lm_precision_125m", _SCALED),
    Remark("Since this run, the step of fp8lm_adamw moves 16 bytes per parameter, not 13. It also reads the weights.",
           ("3e699e2590", "a5c7820aed"), "optimizer", {"impl": "fp8lm_adamw step"}),
)  # fmt: skip
_REQUIRED = {"bench", "versions", "command", "date", "rows"}
_FIELDS = {"case", "impl", "metric", "value", "unit", "baseline", "ratio", "commit", "device"}
_PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "optax", "flax", "ml-dtypes", "numpy")


def commit() -> str:
    """Returns the hash of the current commit, with a + if files have local changes; `UNKNOWN` without history.

    Raises:
        ValueError: `FP8JAX_COMMIT` is not a hash.
    """
    if hash_text := os.environ.get("FP8JAX_COMMIT"):
        if not re.fullmatch(r"[0-9a-f]{7,40}\+?", hash_text):
            raise ValueError(
                f"FP8JAX_COMMIT={hash_text!r} is not a commit hash; use the output of `git rev-parse HEAD`"
            )
        return hash_text[:10] + ("+" if hash_text.endswith("+") else "")
    return _head(ROOT)


@functools.cache
def _head(root: Path) -> str:
    if (name := _git(root, "rev-parse", "--short=10", "HEAD")) is None:
        return UNKNOWN
    # Results files are output, so changes to them do not count.
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *MEASURED, "experiments")
    return name + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def since(of: str, root: Path = ROOT) -> str:
    """Returns changes of the measured code since a commit, by git; "" if there are none.

    Args:
        of: a row's "commit".
        root: root of the repository.
    """
    name = of.rstrip("+")
    if name == UNKNOWN:
        return "commit unknown"
    if _git(root, "rev-parse", "--git-dir") is None:
        return "no history here"
    if _git(root, "cat-file", "-e", f"{name}^{{commit}}") is None:
        return f"commit {name} is not in this history"
    counts = {part: _git(root, "rev-list", "--count", f"{name}..HEAD", "--", part) for part in MEASURED}
    changes = [f"{count} of {part}" for part, count in counts.items() if count not in (None, "0")]
    return f"commits since: {', '.join(changes)}" if changes else ""


def card(device: str) -> str:
    """Returns the folder of a device: "h100" for "NVIDIA H100 80GB HBM3", "h200x2" for two H200s."""
    count, _, name = device.rpartition(" x ")
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in ("nvidia", "tesla", "geforce")]
    last = next((i for i, word in enumerate(words) if re.search(r"\d", word)), len(words) - 1)
    return ("".join(words[: last + 1]) or "unnamed") + (f"x{count}" if count else "")


def write(
    results: Path,
    bench: str,
    *,
    title: str,
    command: str,
    device: str,
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    versions: Mapping[str, str] | None = None,
    complete: bool = True,
    date: str | None = None,
) -> Path:
    """Writes RESULTS/CARD/BENCH.json atomically, and returns its path.

    Args:
        results: folder, created if missing.
        bench: name of the file.
        title: headline.
        command: the command that made the file.
        device: name of the device; several are "2 x NAME".
        rows: figures. By default, a row gets this process's commit and the device.
        notes: the measurement, its device, and reasons for differences from a paper.
        versions: versions of additional packages.
        complete: whether the file has all rows of the command.
        date: date of the measurement; None for today.
    """
    installed = {name: version for name in _PACKAGES if (version := _version(name))}
    content: dict[str, Any] = {
        "bench": bench,
        "title": title,
        "command": command,
        "date": date or datetime.datetime.now(datetime.UTC).date().isoformat(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {"python": platform.python_version()} | installed | dict(versions or {}),
        "complete": complete,
        "notes": list(notes),
        "rows": [{**row, "commit": row.get("commit") or commit(), "device": row.get("device") or device}
                 for row in rows],
    }  # fmt: skip
    content["headlines"] = figures.headlines(bench, content)
    for headline in content["headlines"]:
        print(f"{headline['label']}: {headline['ours']}")
    path = results / card(device) / f"{bench}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    return path


def check(result: Mapping[str, Any]) -> None:
    """Raises ValueError if a content does not match the schema; the message names the missing parts."""
    missing = _REQUIRED - set(result)
    for row in result.get("rows", []):
        missing |= _FIELDS - set(row)
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))} missing")


def remarked(result: dict[str, Any]) -> dict[str, Any]:
    """Applies `REMARKS` to a result: renames, adds notes, and removes wrong figures."""
    rows, notes = list(result["rows"]), list(result.get("notes", []))
    for remark in REMARKS:
        of = [remark.holds(result["bench"], row) for row in rows]
        if not any(of):
            continue
        notes.append(remark.note)
        if remark.left_out:
            rows = [row for row, changes in zip(rows, of, strict=True) if not changes]
        if name := remark.former:
            new = lambda row, name=name: {key: row[key].replace(name, f"former {name}") for key in ("case", "impl")}  # noqa: E731
            rows = [row | new(row) if changes else row for row, changes in zip(rows, of, strict=True)]
    return result | {"rows": rows, "notes": notes}


def without_unknown(result: dict[str, Any]) -> dict[str, Any]:
    """Removes rows of unknown code: without a commit, or with local changes."""
    rows_of_known_commits = [row for row in result["rows"] if all(name != UNKNOWN and not name.endswith("+")
                                                  for name in row["commit"].split(", "))]  # fmt: skip
    if not (count := len(result["rows"]) - len(rows_of_known_commits)):
        return result
    note = f"{count} rows of this file are left out: their commit is unknown, or they ran with local changes."
    return result | {"rows": rows_of_known_commits, "notes": [*result.get("notes", []), note]}


def load(path: Path) -> dict[str, Any]:
    """Returns the content of a results file after `remarked`.

    Rows of an unknown commit, or with local changes, are left out.

    Raises:
        ValueError: the file is not JSON or does not match the schema; the message has its name.
    """
    try:
        content = parse_json(read_text(path))
        check(content)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return remarked(without_unknown(content))


def sources(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the distinct pairs of commit and device of a file's rows."""
    return list(dict.fromkeys((row["commit"], row["device"]) for row in result["rows"]))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
