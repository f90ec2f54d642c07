"""A package that is not installed is one line with what to type, and help needs no more than its parser does."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import packages

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# By program: a command line that would do something, and packages that it needs besides the parser's.
PROGRAMS = {
    "train": (["--run", "r"], ("flax", "filelock")),
    "plan": (["--model", "5m"], ("flax", "tyro")),
    "generate": (["--model", "m", "--prompt", "p"], ("safetensors",)),
    "evaluate": (["--run", "r", "--recipe", "coat"], ("rich",)),
    "hub": (["--model", "m", "--out", "o"], ("safetensors",)),
    "bench": (["step", "--dry"], ("flax",)),
}
MODULES = {"train": "experiments.train.cli"}
PARSED_BY_TYRO = ("train", "generate", "evaluate", "hub")


def run_without(package, program, argv):
    """The exit code of a program in this process without a package, and what it prints."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "experiments"]:
        del sys.modules[name]
    # Some packages cannot be imported twice.
    aside = {name: x for name, x in sys.modules.items() if name.partition(".")[0] == package}
    sys.modules.update(dict.fromkeys([package, *aside]))
    out, err = io.StringIO(), io.StringIO()
    name = (
        f"experiments.{program}.__main__"
        if program in ("hub", "bench")
        else MODULES.get(program, f"experiments.{program}")
    )
    sys.argv = [name, *argv]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main = __import__(name, fromlist=["main"]).main
            code = main() if program == "bench" else main(argv)
        except SystemExit as stop:
            code = stop.code
    del sys.modules[package]
    sys.modules.update(aside)
    return [code, out.getvalue(), err.getvalue()]


def run_all():
    """All programs without each of their packages, in a process of its own: modules are imported many times."""
    found = {}
    for program, (argv, absent) in PROGRAMS.items():
        for package in absent:
            asked = run_without(package, program, [*argv[:1], "--help"] if program == "bench" else ["--help"])
            found[f"{program} {package}"] = [asked, run_without(package, program, argv)]
    for program in PARSED_BY_TYRO:
        found[f"{program} tyro"] = [None, run_without("tyro", program, ["--help"])]
    print(json.dumps(found))


def process(*argv, **environment):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run([sys.executable, *argv], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def found():
    done = process("-c", "from tests.experiments.test_missing_packages import run_all; run_all()")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_missing_package_is_a_line_with_what_to_type_and_help_is_shown_all_the_same(found, program):
    argv, absent = PROGRAMS[program]
    name = f"experiments.{program}" + (f".{argv[0]}" if program == "bench" else "")
    for package in (*absent, *(["tyro"] if program in PARSED_BY_TYRO else [])):
        asked, (code, out, err) = found[f"{program} {package}"]
        group = "hub" if program in ("generate", "hub") or package == "safetensors" else "train"
        assert (code, out) == (2, ""), (package, out, err)
        assert err == (
            f"error: {name} needs the package {package}, which is not installed: pip install --group {group} -e .\n"
        )
        if program == "bench":
            # Its parser comes after its imports: what it is for is said.
            assert (asked[0], asked[2]) == (0, err)
            assert asked[1].startswith("Whole training steps by recipe and mesh")
        elif asked is not None:
            assert (asked[0], asked[2]) == (0, ""), package
            assert asked[1].startswith("usage: ")


PATCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_a_table_whose_parser_comes_after_its_imports_says_what_is_missing_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PATCH)
    done = process("-m", "experiments.papers.plans", PYTHONPATH=f"{tmp_path}:{ROOT}")
    line = "error: experiments.papers.plans needs the package rich, which is not installed: "
    line += "pip install --group train -e .\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_names_of_packages_lead_to_their_group():
    assert packages.install("jax") == "pip install -e ."
    assert packages.install("huggingface_hub") == "pip install --group hub -e ."
    assert packages.install("orbax") == packages.install("tyro") == "pip install --group train -e ."
    assert packages.install("tyro", "experiments.generate") == "pip install --group hub -e ."
    assert packages.install("torch") == "pip install --group hub-test -e ."
    assert packages.install("wandb") == "pip install wandb"


@pytest.mark.parametrize("name", ["experiments.nothing", "fp8jax.ops.nothing", "json.nothing", None])
def test_a_module_of_ours_that_is_missing_is_an_error_in_the_code(name):
    error = ModuleNotFoundError("x", name=name)
    assert packages.explain(error, "experiments.train") is None
    with pytest.raises(ModuleNotFoundError), packages.needed():
        raise error
