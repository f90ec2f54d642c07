"""The notebooks run from top to bottom, draw, and have saved outputs of such a run."""

import contextlib
import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

import nbformat
import pytest
from nbclient import NotebookClient
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 8


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_and_its_script_are_one(path):
    """Edit the script, then `make notebooks`."""
    jupytext = pytest.importorskip("jupytext")
    notebook, script = (jupytext.read(path.with_suffix(kind)) for kind in (".ipynb", ".py"))
    cells = [[(cell.cell_type, cell.source.strip()) for cell in pair.cells] for pair in (notebook, script)]
    assert cells[0] == cells[1]
    assert notebook.metadata["jupytext"]["formats"] == "ipynb,py:percent"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_outputs_of_one_run(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "make notebooks"
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    places = [str(ROOT), str(pathlib.Path.home()), tempfile.gettempdir()]
    assert not any(place in output.get("text", "") for place in places for output in outputs), "a path of this machine"


def test_the_install_cell_has_the_address_of_the_project():
    """The address is in one place, `project.urls.Repository` of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = project.get("urls", {}).get("Repository", "")
    cells = {
        next(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
        for path in NOTEBOOKS
    }
    (cell,) = cells
    assert f'SOURCE = os.environ.get("FP8JAX_SOURCE", "{address}")' in cell


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # Fewer steps and blocks than a reader takes.
    for cell in cells:
        cell.source = re.sub(r"\bsteps=\d+", "steps=12", cell.source).replace("range(2)", "range(1)")
    assert sum("steps=12" in cell.source for cell in cells) == 1
    # Raises CellExecutionError, with the traceback of the cell, where one fails.
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    warned = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not any("Warning" in text for text in warned), warned


ADDRESS = "https://example.org/some/fp8jax.git"
WHEEL = ("fp8jax-1-py3-none-any.whl", (ROOT / "notebooks" / "fp8jax-1-py3-none-any.whl").as_uri())


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("source", "where"),
    [
        (ADDRESS, f"git+{ADDRESS}"),
        (f"git+{ADDRESS}@v1", f"git+{ADDRESS}@v1"),
        ("..", ROOT.as_uri()),
        ("fp8jax", None),
        WHEEL,
    ],
)
@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "cpu"])
def test_the_install_cell_upgrades_colab_and_asks_for_a_restart(path, source, where, gpu, monkeypatch):
    cell = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append((command, check)))
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi" if gpu and name == "nvidia-smi" else None)
    monkeypatch.chdir(path.parent)
    exec(cell.source, {})
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    exec(cell.source, {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else object())
    with pytest.raises(SystemExit, match="Write the address") if gpu else contextlib.nullcontext():
        exec(cell.source, {})  # without jax-triton no kernel runs
    assert calls == [], "fp8jax is there already"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for unknown, message in (("", "Write the address"), ("../nowhere", "SOURCE is '../nowhere'")):
        monkeypatch.setenv("FP8JAX_SOURCE", unknown)
        with pytest.raises(SystemExit, match=message):
            exec(cell.source, {})
    assert calls == []
    monkeypatch.setenv("FP8JAX_SOURCE", source)
    with pytest.raises(SystemExit, match="restart"):
        exec(cell.source, {})
    ((command, check),) = calls
    assert check
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert "--upgrade" in command
    package = Requirement(command[-1])
    assert (package.name, package.extras) == ("fp8jax", {"flax", "cuda12"} if gpu else {"flax"})
    assert package.url == where


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "clone"),
    [
        (ADDRESS, [ADDRESS]),
        (f"git+{ADDRESS}", [ADDRESS]),
        (f"git+{ADDRESS}@v1", ["--branch", "v1", ADDRESS.removesuffix(".git")]),
    ],
)
def test_a_notebook_that_needs_the_training_program_clones_it_on_colab(source, clone, monkeypatch, tmp_path):
    notebook = nbformat.read(ROOT / "notebooks" / "08_fine_tuning.ipynb", as_version=4)
    setup, cloning = [cell.source for cell in notebook.cells if cell.cell_type == "code"][:2]
    calls = []

    def run(command, check):
        calls.append(command)
        if command[0] == "git":
            (tmp_path / command[-1] / "experiments").mkdir(parents=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    for unknown in ("", "fp8jax"):
        monkeypatch.setenv("FP8JAX_SOURCE", unknown)
        names = {}
        exec(setup, names)
        with pytest.raises(SystemExit, match="training program"):
            exec(cloning, names)
    assert calls == []
    monkeypatch.setenv("FP8JAX_SOURCE", source)
    names = {}
    exec(setup, names)
    exec(cloning, names)
    (git, install), _ = calls, names["ROOT"].samefile(tmp_path / "fp8jax")
    assert git == ["git", "clone", "--quiet", "--depth=1", *clone, "fp8jax"]
    assert names["ROOT"] == (tmp_path / "fp8jax").resolve()
    # What is installed is what the group of the training program and of checkpoints asks for, but for what is there.
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    required = {Requirement(x).name for x in [*groups["train"], *groups["hub"]] if isinstance(x, str)}
    assert set(install[5:]) == required - {"flax", "matplotlib"}
    exec(cloning, names)
    assert len(calls) == 2, "it is there already"
