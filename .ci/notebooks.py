"""Writes the install cell of each notebook, runs the notebook and saves its outputs: `make notebooks`.

Edit `notebooks/NAME.py`, then run this. `NAME.ipynb` gets its cells and the outputs of this run. The install cell is
the first code cell. Its text is here. Its address is `project.urls.Repository` of pyproject.toml.
"""

import pathlib
import sys
import tomllib

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
METADATA = {
    "jupytext": {"cell_metadata_filter": "-all", "formats": "ipynb,py:percent", "notebook_metadata_filter": "-all"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
INSTALL = """\
# On Colab only: installs fp8jax, once, with a JAX that is new enough for it and for Colab's driver (CUDA 12).
import importlib.util, os, pathlib, shutil, subprocess, sys

# The source of fp8jax: the https address of its git repository, a folder, a wheel, or its name on a package index.
SOURCE = os.environ.get("FP8JAX_SOURCE", "ADDRESS")

gpu = shutil.which("nvidia-smi")
needed = ("fp8jax", "jax_triton") if gpu else ("fp8jax",)  # the fused kernels need jax-triton
if "google.colab" in sys.modules and None in map(importlib.util.find_spec, needed):
    if not SOURCE:
        raise SystemExit("Write the address of fp8jax's repository, or its folder, into SOURCE above.")
    package = "fp8jax[flax,cuda12]" if gpu else "fp8jax[flax]"
    if "://" in SOURCE:
        package += f" @ git+{SOURCE.removeprefix('git+')}"
    elif os.path.isdir(SOURCE) or SOURCE.endswith(".whl"):
        package += f" @ {pathlib.Path(SOURCE).resolve().as_uri()}"
    elif SOURCE != "fp8jax":
        raise SystemExit(f"SOURCE is {SOURCE!r}, which is no address with ://, no folder, no wheel, and not 'fp8jax'.")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", package], check=True)
    # Colab has loaded its own, older JAX.
    raise SystemExit("Installed. Now restart: Runtime > Restart session, then Runtime > Run all.")"""


def install_cell() -> str:
    """The install cell, with the repository's address of pyproject.toml, or with an empty SOURCE if there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return INSTALL.replace("ADDRESS", project.get("urls", {}).get("Repository", ""))


def execute(script: pathlib.Path) -> None:
    """Writes the notebook of a script, with the install cell and the outputs of a run.

    Raises:
        CellExecutionError: a cell raised an exception.
    """
    notebook = jupytext.read(script)
    next(cell for cell in notebook.cells if cell.cell_type == "code").source = install_cell()
    jupytext.write(notebook, script, fmt="py:percent")
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"  # not random: a diff shows the cells that changed
    folder = {"metadata": {"path": NOTEBOOKS}}
    NotebookClient(
        notebook, timeout=1800, kernel_name="python3", record_timing=False, coalesce_streams=True, resources=folder
    ).execute()
    notebook.metadata = METADATA
    nbformat.write(notebook, script.with_suffix(".ipynb"))


if __name__ == "__main__":
    names = sys.argv[1:] or [""]
    for script in sorted(NOTEBOOKS.glob("*.py")):
        if any(script.name.startswith(name) for name in names):
            print(script.stem, flush=True)
            execute(script)
