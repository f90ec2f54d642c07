"""The scripts of examples/ are short and train."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def test_scripts_are_short_and_say_how_they_are_run():
    assert {"nanogpt_nnx", "nanogpt_linen", "vit", "moe", "equinox_mlp", "tunix_sft", "maxtext_llama"} <= {
        path.stem for path in SCRIPTS
    }
    for path in SCRIPTS:
        text = path.read_text()
        assert len(text.splitlines()) <= 80, path
        assert f"python examples/{path.name}" in text, path


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_trains(path, capsys):
    # CI has the first; the others were run where they could be installed.
    for package in ("equinox", "tunix", "maxtext"):
        if path.stem.startswith(package):
            pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses = module.main(steps=30)
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert f"loss {losses[0]:.3f} to " in capsys.readouterr().out
