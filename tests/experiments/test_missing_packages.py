"""A missing package leads to one line with the command to install it; --help works without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import packages

ROOT = Path(__file__).parents[2]
# A command line, a package that it needs, and the group of pyproject.toml with this package.
PROGRAMS = (
    ("train --run r", "flax", "train"),
    ("plan --model 5m", "tyro", "train"),
    ("generate --model m --prompt p", "safetensors", "hub"),
    ("evaluate --run r --recipe coat", "rich", "train"),
    ("hub --model m --out o", "tyro", "hub"),
    ("bench step --dry", "flax", "train"),
    ("papers.plans", "rich", "train"),
)
PATCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("command", "package", "group"), PROGRAMS)
def test_a_missing_package_is_a_line_with_what_to_type(tmp_path, command, package, group):
    (tmp_path / "sitecustomize.py").write_text(PATCH.format(package=package))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    program, *arguments = f"experiments.{command}".split()
    line = f"error: {program} needs the package {package}, which is not installed: pip install --group {group} -e .\n"
    for options in ([], ["--help"]):
        argv = [sys.executable, "-m", program, *arguments, *options]
        completed = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert (completed.returncode, completed.stderr) == (0 if options else 2, line)
        assert bool(completed.stdout) == bool(options)


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
