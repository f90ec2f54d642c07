"""Builds what is released and checks it as a user gets it: `make release`, and the same in CI.

Into dist/ go the sdist, the wheel and notes.md, which is the section of CHANGELOG.md for this version. The wheel is
installed in an environment of its own, without the clone on its path: there fp8jax is imported with Flax and without,
README's code runs, and a user's script passes mypy and pyright, both strict. Any step that fails ends it.
"""

import argparse
import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PACKAGES = {"fp8jax", "pallas_kernels"}
WITHOUT_FLAX = """
import jax, fp8jax
assert fp8jax.__version__ == {version!r}, fp8jax.__version__
assert "site-packages" in fp8jax.__file__, fp8jax.__file__
fp8jax.compressed_adamw(1e-3).init(jax.numpy.ones((64, 128)))
try:
    fp8jax.nnx
except ModuleNotFoundError as error:
    print(error)
"""
README = """
import pathlib, sys
blocks = [part.split("```")[0] for part in pathlib.Path(sys.argv[1]).read_text().split("```python\\n")[1:]]
assert blocks
names = {}
for block in blocks:
    exec(compile(block, "README.md", "exec"), names)
print(f"{len(blocks)} blocks of README.md ran")
"""


def version() -> str:
    """The version, read where it stands: `__version__` of fp8jax/__init__.py."""
    for node in ast.parse((ROOT / "fp8jax" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit("fp8jax/__init__.py has no __version__")


def notes(changelog: str, of: str) -> str:
    """The section of a changelog under `## VERSION`, in words of its own in the heading or none.

    Raises:
        SystemExit: there is none, or it is empty.
    """
    found = re.search(rf"^## {re.escape(of)}(?![\w.])[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section '## {of}', or nothing in it: write what this version brings")
    return found[1].strip() + "\n"


def run(*command: str | pathlib.Path, cwd: pathlib.Path = ROOT) -> None:
    """Runs a command, said before, without the clone on Python's path."""
    print("+", *(str(part) if len(str(part)) < 200 else "..." for part in command), flush=True)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if subprocess.run([str(part) for part in command], cwd=cwd, env=env | {"JAX_PLATFORMS": "cpu"}).returncode:
        raise SystemExit(f"failed: {command[0]} {command[1]} ...")


def check_contents(wheel: pathlib.Path, sdist: pathlib.Path) -> None:
    """Raises SystemExit where a file is in them that is not the library's, or one lacks that should be there."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    foreign = sorted(name for name in inside if name.split("/")[0] not in PACKAGES)
    lacking = sorted({f"{package}/py.typed" for package in PACKAGES} - inside)
    if foreign or lacking:
        raise SystemExit(f"{wheel.name} holds {foreign[:5]} and lacks {lacking}")
    with tarfile.open(sdist) as packed:
        files = {name.partition("/")[2] for name in packed.getnames()}
    tests = sorted(name for name in files if re.search(r"(^|/)(tests?/|test_|conftest)", name))
    if tests or not inside <= files:
        raise SystemExit(f"{sdist.name} holds {tests[:5]} and lacks {sorted(inside - files)[:5]}")
    print(f"{wheel.name}: {len(inside)} files of {' and '.join(sorted(PACKAGES))}, no tests")


def check_installed(wheel: pathlib.Path, of: str) -> None:
    """Installs the wheel in an environment of its own, and does there what a user does."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        python = folder / "venv" / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        install += ["--constraint", ROOT / "constraints.txt"]
        run(sys.executable, "-m", "venv", folder / "venv")
        run(*install, wheel)
        run(python, "-c", WITHOUT_FLAX.format(version=of), cwd=folder)
        run(*install, f"fp8jax[flax] @ {wheel.as_uri()}")
        run(python, "-c", README, ROOT / "README.md", cwd=folder)
        script = shutil.copy(ROOT / "tests" / "typed_script.py", folder / "script.py")
        run(python, script, cwd=folder)
        tools = pathlib.Path(sys.executable).parent
        run(tools / "mypy", "--strict", "--python-executable", python, script, cwd=folder)
        (folder / "pyrightconfig.json").write_text('{"include": ["script.py"], "typeCheckingMode": "strict"}')
        run(tools / "pyright", "--pythonpath", python, cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tag", default="", help="the tag that is released: v and the version, or it is refused")
    tag = parser.parse_args().tag
    of = version()
    if tag and tag != f"v{of}":
        raise SystemExit(f"--tag {tag}: fp8jax/__init__.py says {of}, whose tag is v{of}")
    told = notes((ROOT / "CHANGELOG.md").read_text(), of)
    for old in (DIST, ROOT / "build"):
        shutil.rmtree(old, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    check_contents(wheel, sdist)
    check_installed(wheel, of)
    (DIST / "notes.md").write_text(told)
    print(f"fp8jax {of} is in {DIST}: {wheel.name}, {sdist.name}, notes.md")


if __name__ == "__main__":
    main()
