"""A tiny training run, and settings for meshes, that the tests of this folder share."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from experiments import mesh
from experiments.bench import timing
from experiments.train import cli

TINY = (  # noqa: SIM905 (a command line reads best as one)
    "--layers 2 --dim 32 --heads 4 --kv-heads 2 --mlp-dim 64 --seq-len 16 --batch 4 --steps 8 --warmup 2 --lr 2e-3 "
    "--log-every 2 --checkpoint-every 4 --eval-every 4 --eval-batches 2 --sample-tokens 0 --mesh data=1"
).split()


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing collects no garbage before it starts: that takes seconds in the test process."""
    monkeypatch.setattr(timing, "left_alone", contextlib.nullcontext)


@pytest.fixture(scope="module")
def small_on_meshes() -> Iterator[None]:
    """Small parameters are sharded too, and noise does not depend on the order of sums."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "SMALLEST", 1024)
        patch.setattr("fp8jax.rewrite.run.key_from_data", lambda x: jax.random.key(x.size))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of five text files, 1,000 to 3,000 characters each."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(5):
        words = " ".join(f"w{(i * 37 + j * j) % 101}" for j in range(300 + 150 * i))
        (folder / f"{i}.txt").write_text(f"document {i}\n{words}\n")
    return folder


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of the session."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def argv(corpus: Path, out: Path) -> list[str]:
    """The tiny run's command line; append flags to override."""
    return [*TINY, "--data", str(corpus), "--out", str(out), "--recipe", "bf16", "coat_optimizer"]


@pytest.fixture(scope="session")
def finished(argv: list[str], out: Path) -> Path:
    """The folder of a finished run of both recipes. Copy it before changing it."""
    assert cli.main([*argv, "--run", "finished"]) == 0
    return out / "finished"
