"""Packages: one direction of imports without cycles, small files, docstrings of public names."""

import ast
import doctest
import functools
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import fp8jax

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted(
    p.relative_to(ROOT)
    for get_package in ("fp8jax", "pallas_kernels", "experiments")
    for p in (ROOT / get_package).rglob("*.py")
)
RANKS = {"pallas_kernels": 0, "core": 0, "recipes": 1, "ops": 2, "optim": 3, "dist": 3}
RANKS |= {"rewrite": 3, "modules": 4, "fp8jax": 5, "experiments": 6}
# The folders and files of `experiments`. Each imports only from rows above; `__main__.py` imports any.
EXPERIMENTS = (
    {"errors", "mesh", "packages", "signals"},
    {"files", "startup"},
    {"models", "text", "results"},
    {"hub"},
    {"train"},
    {"evaluate", "generate", "plan"},
    {"export", "bench", "soak"},
    {"papers"},
)


def get_package(parts: tuple[str, ...]) -> str | None:
    """Returns the package of a module path such as ("fp8jax", "core", "spec"); None for other modules."""
    if parts[0] not in ("fp8jax", "pallas_kernels", "experiments"):
        return None
    return parts[1] if parts[0] == "fp8jax" and len(parts) > 1 and parts[1] in RANKS else parts[0]


@functools.cache
def imports(path: pathlib.Path) -> set[str]:
    results = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            results |= {f"{node.module}.{alias.name}" for alias in node.names}
    return results


def test_imports_follow_the_arrows():
    for path in FILES:
        here = get_package(path.with_suffix("").parts)
        for module in imports(path):
            there = get_package(tuple(module.split(".")))
            if there is None or there == here:
                continue
            if here == "pallas_kernels":
                pytest.fail(f"{path} imports {module}; kernels know nothing of fp8jax")
            assert RANKS[there] < RANKS[here], f"{path} imports {module} against the arrow"


def test_folders_of_experiments_import_one_way():
    rank = {name: i for i, names in enumerate(EXPERIMENTS) for name in names}
    root = ROOT / "experiments"
    assert {p.stem for p in root.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} <= {*rank, "__init__"}
    assert len(list(root.glob("*.py"))) <= 12
    for path in FILES:
        if path.parts[0] != "experiments" or path.name in ("__init__.py", "__main__.py"):
            continue
        here = path.with_suffix("").parts[1]
        for module in imports(path):
            parts = module.split(".")
            if parts[0] == "experiments" and parts[1] != here:
                assert rank[parts[1]] < rank[here], f"{path} imports {module}"


def test_kernels_import_nothing_else_than_jax_and_triton():
    allowed = {"jax", "jaxlib", "jax_triton", "triton", "numpy", "pallas_kernels"}
    for path in FILES:
        if path.parts[0] == "pallas_kernels":
            outside = {m.split(".")[0] for m in imports(path)} - allowed - set(sys.stdlib_module_names)
            assert not outside, f"{path} imports {outside}"


def test_arguments_of_kernels_have_names():
    for path in FILES:
        if path.parts[0] == "pallas_kernels":
            matches = re.findall(r"\b[A-Z]{2,}\[\d+\]", (ROOT / path).read_text())
            assert not matches, f"{path} takes {matches[0]} by its place: give the tuple's class a name for it"


def test_models_have_no_word_of_fp8_in_them():
    for path in (ROOT / "experiments" / "models").glob("*.py"):
        assert "fp8" not in path.read_text().lower(), path


def test_public_names_have_docstrings():
    names = [n for n in fp8jax.__all__ if not inspect.ismodule(getattr(fp8jax, n))]
    assert {"quantize", "QuantSpec", "QTensor", "Recipe", "compressed_adamw", "explain"} <= set(names)
    for name in names:
        assert inspect.getdoc(getattr(fp8jax, name)), name


def test_only_the_flax_names_need_flax():
    code = """
import sys
sys.modules["flax"] = None
import fp8jax, jax
fp8jax.compressed_adamw(1e-3).init(jax.numpy.ones((64, 128)))
try:
    fp8jax.nnx
except ModuleNotFoundError as error:
    assert str(error) == "fp8jax.nnx needs Flax: pip install flax", error
else:
    raise AssertionError("flax was imported")
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "module", [fp8jax, fp8jax.nnx, fp8jax.linen, fp8jax.dist, fp8jax.lora, fp8jax.recipes, fp8jax.formats]
)
def test_completion_shows_the_public_names_and_no_inner_module(module):
    names = {name for name in dir(module) if not name.startswith("__")}
    modules = {"checkpoint_policies", "dist", "formats", "linen", "lora", "nnx", "recipes"}
    public = modules if module is fp8jax else set()
    assert {name for name in names if inspect.ismodule(getattr(module, name))} == public
    assert not [name for name in names if name.startswith("_")]
    nodes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ImportFrom)]
    assert {a.name for node in nodes for a in node.names if a.asname == a.name} <= names


def test_a_star_import_takes_the_public_names():
    assert set(fp8jax.__all__) == {name for name in dir(fp8jax) if not name.startswith("__")}


def test_an_import_takes_little_more_than_jax_and_optax_do():
    """Half a second on two idle cores. The bound is loose, because other tests run at the same time."""
    code = """
import time
import jax, optax
start = time.process_time()
import fp8jax
print(time.process_time() - start)
"""
    completed = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True) for _ in range(2)
    ]
    assert min(float(run.stdout) for run in completed) < 1


def test_kernels_that_are_imported_late_cause_no_retrace():
    """JAX retraces every function after a new user context: a first step that imports one would compile twice."""
    modules = [".".join(path.with_suffix("").parts) for path in FILES if path.parts[0] in ("fp8jax", "pallas_kernels")]
    code = f"""
import importlib
import fp8jax, jax

def refuse(default=None):
    raise AssertionError("a user context after the import of fp8jax")

jax.make_user_context = refuse
for name in {modules}:
    importlib.import_module(name.removesuffix(".__init__"))
"""
    assert any(name.startswith("pallas_kernels.matmul") for name in modules)
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_examples_in_docstrings_run():
    attempted = 0
    for path in FILES:
        if path.parts[0] == "fp8jax" and ">>>" in (ROOT / path).read_text():
            result = doctest.testmod(importlib.import_module(".".join(path.with_suffix("").parts)))
            assert result.failed == 0, path
            attempted += result.attempted
    assert attempted >= 10


def test_code_in_the_readme_runs():
    """Every Python block of the README runs unchanged, in one namespace, in order."""
    text = (ROOT / "README.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert blocks
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_defaults_of_dataclasses_can_be_hashed_by_python_3_11():
    """A mapping proxy cannot: Python 3.11 rejects the class, and with it the import of fp8jax."""
    wrong = [
        f"{path}:{field.lineno}"
        for path in FILES
        for owner in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(owner, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in owner.decorator_list)
        for field in owner.body
        if isinstance(field, ast.AnnAssign) and field.value and "MappingProxyType(" in ast.unparse(field.value)
    ]
    assert not wrong
