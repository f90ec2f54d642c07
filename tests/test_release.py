"""Releases: notes of a version, its name in one place, and workflows that run the developer's commands."""

import importlib.util
import pathlib
import re
import tomllib

import pytest

import fp8jax

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notes_are_the_section_of_the_version(release):
    changelog = "# Changelog\n\n## 0.10.0 (today)\n\n- new\n  words\n\n## 0.1.0\n\n- old\n"
    assert release.notes(changelog, "0.10.0") == "- new\n  words\n"
    assert release.notes(changelog, "0.1.0") == "- old\n"
    for lacking in ("0.1", "1.0", "0.1.00"):
        with pytest.raises(SystemExit, match=f"no section '## {lacking}'"):
            release.notes(changelog, lacking)
    with pytest.raises(SystemExit, match="nothing in it"):
        release.notes("## 0.3.0\n\n## 0.2.0\n\n- old\n", "0.3.0")


def test_the_version_stands_in_one_place_and_in_the_changelog(release):
    assert release.version() == fp8jax.__version__
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in written["project"]
    assert written["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "fp8jax.__version__"}}
    assert release.notes((ROOT / "CHANGELOG.md").read_text(), fp8jax.__version__)


def test_a_tag_of_another_version_is_refused(release, monkeypatch):
    monkeypatch.setattr("sys.argv", ["release.py", "--tag", "v9.9.9"])
    with pytest.raises(SystemExit, match=f"whose tag is v{fp8jax.__version__}"):
        release.main()


def test_the_wheel_s_extras_are_for_its_user_and_groups_for_a_clone():
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(written["project"]["optional-dependencies"]) == {"cuda12", "cuda13", "flax"}
    groups = written["dependency-groups"]
    for group in re.findall(r"\.venv/(\w+)\.stamp", (ROOT / "Makefile").read_text()):
        assert group in groups, group


def test_workflows_call_what_a_developer_calls():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = {}
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        commands[path.stem] = re.findall(r"- run: (.*)", path.read_text())
    assert set(commands) == {"ci", "docs", "release"}
    for name, lines in commands.items():
        assert lines, name
        for line in lines:
            if line.startswith("make "):
                assert line.split()[1] in targets, line
            elif line.split()[0].startswith((".ci/", "tests/")):
                assert (ROOT / line.split()[0]).stat().st_mode & 0o111, line
    assert ".ci/run" in commands["ci"]
    assert "make docs" in commands["docs"]
    assert commands["release"][0] == "make slow"
    assert commands["release"][1].startswith("make release")
