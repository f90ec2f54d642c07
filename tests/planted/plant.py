"""Plants bugs one at a time in a copy of the project and runs the test that must catch each.

A bug is a table in one of the `.toml` files here, one file per package. It has a `file`, the `old` text, which occurs
there once, the `new` text, a `kind`, and a `test` in pytest's notation. A bug is caught if that test fails, slow rows
left out.
"""

import argparse
import collections
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
CAUGHT, PASSED, UNDECIDED = "caught", "passed", "undecided"
STATUS = 100  # is added to pytest's exit status


@dataclasses.dataclass(frozen=True)
class Bug:
    """A change that breaks the project.

    Attributes:
        package: stem of the file that lists the bug.
        file: path of the changed file, relative to the project.
        old, new: text that occurs once in the file, and its replacement.
        kind: what goes wrong, in a few words.
        test: argument of pytest for the test that must fail.
    """

    package: str
    file: str
    old: str
    new: str
    kind: str
    test: str

    def __str__(self) -> str:
        return f"{self.file}: {self.kind} ({self.test})"


def read(names: list[str]) -> list[Bug]:
    """The bugs of the named packages, or of all packages.

    Raises:
        SystemExit: there is no such package.
    """
    files = {path.stem: path for path in sorted(HERE.glob("*.toml"))}
    if unknown := set(names) - set(files):
        raise SystemExit(f"unknown packages {', '.join(sorted(unknown))}; there are {', '.join(files)}")
    return [
        Bug(stem, **{name: text.strip("\n") for name, text in bug.items()})
        for stem in names or files
        for bug in tomllib.loads(files[stem].read_text())["bug"]
    ]


def find_errors(bugs: list[Bug], root: pathlib.Path) -> list[str]:
    """Messages about bugs that do not fit the project's files."""
    errors = []
    for bug in bugs:
        path, test = root / bug.file, bug.test.split("::")
        if not path.exists() or (count := path.read_text().count(bug.old)) != 1:
            found = f"occurs {count} times" if path.exists() else "is not there: no such file"
            errors.append(f"{bug.package}.toml: {bug.file}: the old text of {bug.kind!r} {found}:\n{bug.old}")
        elif bug.old == bug.new:
            errors.append(f"{bug.package}.toml: {bug.file}: {bug.kind!r} changes nothing")
        name = test[1].partition("[")[0] if len(test) > 1 else ""
        if not (root / test[0]).exists() or f"def {name}" not in (root / test[0]).read_text():
            errors.append(f"{bug.package}.toml: there is no test {bug.test}")
    return errors


def copy_project(to: pathlib.Path) -> None:
    """Copies the files that git lists, new ones included."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)


def run_test(root: pathlib.Path, test: str, log: pathlib.Path) -> None:
    """Runs one test of the copy in this process, which exits with `STATUS` plus pytest's exit status."""
    import pytest

    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path[:] = [str(root), *(entry for entry in sys.path if pathlib.Path(entry or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        status = pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", "--tb=short", test])
    # A process that fails otherwise exits with 1, too.
    os._exit(STATUS + int(status))


def judge(bug: Bug, root: pathlib.Path, seconds: float) -> tuple[str, str]:
    """Plants one bug in the copy and runs its test: the verdict and the end of pytest's output."""
    path, log = root / bug.file, root / "planted.log"
    text = path.read_text()
    path.write_text(text.replace(bug.old, bug.new))
    # A fork of a server that has imported JAX starts in a tenth of a second.
    process = multiprocessing.get_context("forkserver").Process(target=run_test, args=(root, bug.test, log))
    try:
        process.start()
        process.join(seconds)
        status = process.exitcode
        if status is None:
            process.kill()
            process.join()
    finally:
        path.write_text(text)
    verdict = {STATUS: PASSED, STATUS + 1: CAUGHT}.get(0 if status is None else status, UNDECIDED)
    output = log.read_text() if log.exists() else ""
    return verdict, "\n".join([*output.splitlines()[-15:], f"status {status}" if status is not None else "timeout"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="PACKAGE", help="packages whose bugs are planted")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="plant every N-th bug of the packages")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="begin with bug I, counted from 0")
    parser.add_argument("--seconds", type=float, default=600, help="longest run of one test")
    parser.add_argument("--list", action="store_true", help="list the bugs and check that they fit, but run nothing")
    args = parser.parse_args()
    bugs = read(args.only)
    if errors := find_errors(bugs, ROOT):
        raise SystemExit("\n".join(errors))
    bugs = bugs[args.first :: args.every]
    if args.list:
        print(*bugs, f"{len(bugs)} bugs", sep="\n")
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # Python compares the times of files to seconds, and a planted file can have the length and second of the last.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["jax", "jax.numpy", "jax.experimental.pallas", "optax", "flax.nnx", "flax.linen", "pytest", "hypothesis"]
    )
    verdicts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        copy_project(root)
        for bug in bugs:
            verdict, output = judge(bug, root, args.seconds)
            verdicts[bug.package][verdict] += 1
            print(f"{verdict}: {bug}", flush=True)
            if verdict == UNDECIDED:
                print(output, flush=True)
    total = sum(verdicts.values(), collections.Counter())
    for package, counts in {**verdicts, "all": total}.items():
        print(f"{package:12}", *(f"{counts[verdict]:4} {verdict}" for verdict in (CAUGHT, PASSED, UNDECIDED)))
    sys.exit(total[CAUGHT] != len(bugs))
