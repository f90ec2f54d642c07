"""Learning of one fixed batch: which operand is rounded, which seeds are paired, and what is written."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy import stats

from experiments.papers import fixed_batch
from experiments.papers.fixed_batch import LAST, MEAN, Rounding


def coded(x, dtype):
    """Values that codes of one scale a tensor stand for, in float64."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max() / float(ml_dtypes.finfo(dtype).max)
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


@pytest.mark.parametrize("operand", ["x", "w", "dy"])
def test_one_operand_alone_is_rounded(operand):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(6, 32)), "w": rng.normal(size=(32, 8)), "dy": rng.normal(size=(6, 8))}
    arrays = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}
    name, dtype = ("e5m2", ml_dtypes.float8_e5m2) if operand == "dy" else ("e4m3", ml_dtypes.float8_e4m3fn)
    multiply = fixed_batch.product_of(Rounding(**{operand: name}))
    y, back = jax.vjp(multiply, arrays["x"], arrays["w"])
    exact = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    exact[operand] = coded(exact[operand], dtype)
    want = exact["x"] @ exact["w"], exact["dy"] @ exact["w"].T, exact["x"].T @ exact["dy"]
    for got, right in zip((y, *back(arrays["dy"])), want, strict=True):
        assert np.linalg.norm(np.asarray(got) - right) < 1e-3 * np.linalg.norm(right)


def planted(folder, name, losses):
    content = {"arm": name, "model": "tiny", "device": "cpu", "commit": "abc", "date": "2026-11-28", "losses": losses}
    folder.mkdir(exist_ok=True)
    (folder / f"{fixed_batch.slug(name)}.json").write_text(json.dumps(content))


def test_seeds_are_paired_and_torchao_is_compared_with_torch(tmp_path):
    folder = tmp_path / "parity_fixed_batch_tiny"
    base = {"0": [4.0, 2.0], "1": [4.0, 3.0], "2": [4.0, 2.5]}
    planted(folder, "bf16", base)
    planted(folder, "coat", {"0": [4.0, 2.2], "1": [4.0, 3.2], "2": [4.0, 2.8], "3": [9.0, 9.0]})
    planted(folder, "torch bf16", {seed: [8.0, 4.0 + int(seed)] for seed in base})
    planted(folder, "torchao tensorwise", {seed: [8.0, 4.4 + 1.2 * int(seed)] for seed in base})
    assert fixed_batch.main(["--model", "tiny", "--judge", "--results", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "cpu" / "fixed_batch_tiny.json").read_text())["rows"]
    found = {(row["case"], row["metric"]): row["value"] for row in rows}
    each = np.array([2.2 / 2.0, 3.2 / 3.0, 2.8 / 2.5]) - 1  # the seed that bf16 lacks is left out
    assert found["coat", f"{LAST}: % above"] == pytest.approx(100 * each.mean())
    interval = stats.t.interval(0.95, 2, each.mean(), stats.sem(each))
    assert found["coat", f"± ({LAST})"] == pytest.approx(100 * (interval[1] - each.mean()))
    assert found["coat", f"p ({LAST})"] == pytest.approx(stats.ttest_1samp(each, 0).pvalue)
    assert found["bf16", MEAN] == pytest.approx(np.mean([3.0, 3.5, 3.25]))
    torch = np.array([4.4 / 4, 5.6 / 5, 6.8 / 6]) - 1
    assert found["torchao tensorwise", f"{LAST}: % above"] == pytest.approx(100 * torch.mean())
    assert ("torch bf16", f"{LAST}: % above") not in found


def test_only_missing_seeds_are_trained_and_the_limit_leaves_the_rest(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(fixed_batch, "runner", lambda arm, model: lambda seed: seen.append(seed) or [3.0, 1.0])
    planted(tmp_path / "parity_fixed_batch_tiny", "coat", {"0": [4.0, 2.0]})
    how = ["--model", "tiny", "--arms", "coat", "--results", str(tmp_path), "--seeds", "3"]
    assert fixed_batch.main([*how, "--limit", "0"]) == 1
    assert "not finished: coat" in capsys.readouterr().out
    assert seen == []
    assert fixed_batch.main(how) == 0
    assert seen == [1, 2]


def test_runs_of_two_cards_are_not_compared(tmp_path, capsys):
    folder = tmp_path / "parity_fixed_batch_tiny"
    planted(folder, "bf16", {"0": [1.0], "1": [1.0]})
    planted(folder, "coat", {"0": [1.0], "1": [1.0]})
    path = folder / "coat.json"
    path.write_text(path.read_text().replace('"cpu"', '"H9"'))
    assert fixed_batch.main(["--model", "tiny", "--judge", "--results", str(tmp_path)]) == 2
    assert "H9 and cpu" in capsys.readouterr().err


def test_a_seed_has_one_start_in_all_arms_and_learns():
    model = fixed_batch.MODELS["tiny"]
    losses = {}
    for name in ("bf16", "dy alone in e5m2"):
        run = fixed_batch.runner(fixed_batch.ARMS[name], model, steps=6)
        losses[name] = [run(seed) for seed in (0, 1)]
    first = [[run[0] for run in runs] for runs in losses.values()]
    assert first[0] == first[1]  # the forward pass of this arm rounds nothing
    assert first[0][0] != first[0][1]
    assert all(run[-1] < run[0] - 0.5 for runs in losses.values() for run in runs)
    assert losses["bf16"][0][-1] != losses["dy alone in e5m2"][0][-1]
