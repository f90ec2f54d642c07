"""The comparison of 8-bit AdamWs: its reference against optax, its errors against planted updates, and
omitted cases."""

import json
import types

import numpy as np
import optax
import pytest

from experiments.bench import peers, plots

GRADIENTS = {"w": np.random.default_rng(0).normal(size=(12, 64, 64)).astype(np.float32)}


@pytest.mark.parametrize("b2", peers.B2S)
def test_the_truth_is_adamw_s(b2):
    tx = optax.adamw(1.0, peers.B1, b2, peers.EPS, weight_decay=0.0)
    params = {"w": np.zeros((64, 64), np.float32)}
    state, truth = tx.init(params), peers.exact(GRADIENTS, b2)
    for t in range(12):
        updates, state = tx.update({"w": GRADIENTS["w"][t]}, state, params)
        np.testing.assert_allclose(truth["w"][t], updates["w"], rtol=2e-4, atol=2e-5)
    exact, _ = peers.by_jax(peers.ours(b2)["optax.adamw, fp32"], GRADIENTS)
    assert peers.errors(exact, truth) == (pytest.approx(0, abs=1e-5), 0)


def test_errors_are_the_worst_of_the_checked_steps_over_leaves_that_all_compress():
    truth = {"w": np.ones((120, 64, 64)), "bias": np.ones((120, 8))}
    updates = {k: x.copy() for k, x in truth.items()}
    updates["w"][49] *= 1.25  # step 50 is checked, 51 is not; a bias is not compressed
    updates["w"][50] *= 9
    updates["bias"][49] = 7
    assert peers.errors(updates, truth) == (pytest.approx(0.25), 0)
    updates["w"][109] *= 1.5
    assert peers.errors(updates, truth)[0] == pytest.approx(0.5)
    updates["w"][7, 0, 0] = np.nan
    assert peers.errors(updates, truth) == (pytest.approx(0.5), 1)
    updates["w"][99, 0, 0] = np.nan
    assert peers.errors(updates, truth) == (np.inf, 2)


class PlantedTensor:
    def __init__(self, count, size):
        self.numel, self.element_size = (lambda: count), (lambda: size)


class PlantedParts(PlantedTensor):
    """Tensors in parts, one of which is a shared table."""

    codes, scale, qmap = PlantedTensor(10, 1), PlantedTensor(2, 4), PlantedTensor(256, 4)

    def __tensor_flatten__(self):
        return ["codes", "scale", "qmap"], None


def test_bytes_of_a_state_are_those_of_its_tensors():
    torch = types.SimpleNamespace(Tensor=PlantedTensor)
    quantized = types.SimpleNamespace(codes=PlantedTensor(7, 1), scale=PlantedTensor(3, 2), data=None, signed=True)
    for state, size in ((PlantedTensor(6, 4), 24), (PlantedParts(0, 0), 18), (quantized, 13), (3, 0), (None, 0)):
        assert peers._bytes(torch, state) == size


def test_streams_are_what_they_say():
    small = {name: peers.stream(name, 210) for name in peers.STREAMS if name != "training"}
    dead = small["16 dead"]["w"]
    assert (dead[60, :, 40:56] == 0).all()
    assert (dead[60, :, 56:] != 0).all()
    assert (dead[49] != 0).all()
    assert (small["1 dead"]["rows"][60] == 0).sum() == 2
    assert small["outlier"]["w"][100].max() == 1e4
    assert small["outlier"]["w"][101].max() < 1
    for name, by in (("larger", 100), ("smaller", 0.01)):
        g = small[f"sigma 1, {name}"]["w"]
        assert np.std(g[200:]) / np.std(g[:200]) == pytest.approx(by, rel=0.1)
    assert np.std(small["tiny"]["w"]) == pytest.approx(1e-8, rel=0.1)
    rare = small["rare rows"]["embedding"][3]
    assert np.flatnonzero(rare.any(1)).tolist() == list(range(3, 1000, 50))
    spread = np.std(np.log(np.abs(small["sigma 3"]["w"]).mean(0)))
    assert spread == pytest.approx(3, rel=0.1)


def test_what_is_not_there_or_does_not_run_is_left_out_and_told(monkeypatch, capsys):
    monkeypatch.setattr(
        peers, "PEERS", {"none": ("absent", "absent_package", "A", {}), "broken": ("json", "json", "nope", {})}
    )
    assert peers.available("cpu") == {}
    printed = capsys.readouterr().out
    assert "none: left out (absent: ModuleNotFoundError" in printed
    assert "broken: left out (json: AttributeError" in printed


def test_rows_name_stream_and_optimizer_and_lose_no_explosion(capsys):
    truth = {"w": np.ones((3, 64, 64))}
    broken = {"w": np.full((3, 64, 64), np.nan)}
    runs = {"exact": lambda: (truth, 8.0), "half": lambda: ({"w": truth["w"] * 0.5}, 2.0), "nan": lambda: (broken, 1.0)}
    rows = peers.compare(peers.STREAMS[0], 0.95, truth, runs)
    actual = {(r["impl"], r["metric"]): r["value"] for r in rows}
    assert (actual["exact", peers.ERROR], actual["half", peers.ERROR], actual["nan", peers.ERROR]) == (0, 0.5, None)
    assert actual["nan", "steps that are not finite"] == 3
    assert actual["half", "bytes a parameter"] == 2
    assert {r["pivot"] for r in rows if r["metric"] == peers.ERROR} == {(name, peers.STREAMS[0]) for name in runs}


def test_a_torch_optimizer_sees_the_same_gradients():
    torch = pytest.importorskip("torch")
    updates, size = peers.by_torch(torch.optim.AdamW, GRADIENTS, 0.95, "cpu")
    assert peers.errors(updates, peers.exact(GRADIENTS, 0.95)) == (pytest.approx(0, abs=1e-5), 0)
    assert size == pytest.approx(8, abs=0.01)


@pytest.mark.slow
def test_recorded_gradients_are_those_of_a_training(monkeypatch):
    """The loss differs in each step, and every compressed leaf is recorded."""
    peers.recorded.cache_clear()
    actual = peers.recorded(3)
    peers.recorded.cache_clear()
    assert all(g.shape[0] == 3 and g[0].size >= peers.SMALLEST for g in actual.values())
    assert len(actual) >= 5
    for g in actual.values():
        assert np.isfinite(g).all()
        assert not np.array_equal(g[0], g[1])


def test_a_dry_run_takes_one_short_stream(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8JAX_DRY", "1")
    monkeypatch.setattr(peers, "available", lambda device: {})
    monkeypatch.setattr(peers, "ours", lambda b2: {peers.OURS: optax.with_extra_args_support(optax.adamw(peers.RATE))})
    monkeypatch.setattr(plots, "draw", lambda *_: None)
    peers.main(["--out", str(tmp_path)])
    (path,) = tmp_path.glob("*/peers.json")
    recorded = json.loads(path.read_text())
    assert {r["impl"] for r in recorded["rows"]} == {peers.OURS}
    assert any("does not run here: torch.optim.AdamW, fp32, torchao" in note for note in recorded["notes"])
