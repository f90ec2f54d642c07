"""`--telemetry`: which steps are observed, logs and plots, and unchanged training."""

import json

import numpy as np
import pytest
from matplotlib.axes import Axes

from experiments.train import cli, observed, report
from tests.experiments.test_loop import Fake

FOUND = {
    "layers/up": {
        "x": {"snr_db": np.array([31.0, 3.5]), "saturated": np.array([0.0, 0.25])},
        "w": {"snr_db": np.array([31.0, np.nan]), "amax": np.array([2.0, 4.0])},
    },
    "head": {"x": {"snr_db": np.float32(31.25), "saturated": np.float32(0.0)}},
}


def test_rows_have_finite_values_by_layer_role_and_statistic():
    assert observed.to_row(7, FOUND) == {
        "step": 7,
        "telemetry/layers/up[0]/x/snr_db": 31.0,
        "telemetry/layers/up[1]/x/snr_db": 3.5,
        "telemetry/layers/up[0]/x/saturated": 0.0,
        "telemetry/layers/up[1]/x/saturated": 0.25,
        "telemetry/layers/up[0]/w/snr_db": 31.0,
        "telemetry/layers/up[0]/w/amax": 2.0,
        "telemetry/layers/up[1]/w/amax": 4.0,
        "telemetry/head/x/snr_db": 31.25,
        "telemetry/head/x/saturated": 0.0,
    }


def test_the_first_step_and_each_nth_after_it_are_observed(monkeypatch):
    fake, recorded = Fake(telemetry=3, checkpoint_every=2), []
    plain = fake.loop.step

    def observed_step(state, *arguments):
        new, metrics = plain(state, *arguments)
        return new, metrics | {"telemetry": {"at": np.int32(new.step)}}

    fake.loop.observed_step = observed_step
    original = fake.loop.run

    def run(state):
        fake.loop.log.telemetry = lambda step, actual: recorded.append((step, int(actual["at"])))
        return original(state)

    fake.loop.run = run
    fake.run(monkeypatch)
    assert recorded == [(1, 1), (4, 4), (7, 7)]
    assert fake.of("step") == list(range(1, 8))


def test_of_many_faults_five_are_told_and_the_others_counted():
    found = {f"layer{i}": {"x": {"saturated": np.float32(0.5)}} for i in range(7)}
    for count, rest in ((5, []), (7, ["telemetry, step 2: and 2 more"])):
        lines = list(observed.Faults().lines(2, dict(list(found.items())[:count])))
        assert (len(lines), lines[5:]) == (5 + len(rest), rest)


def test_faults_are_told_once_and_rows_survive_a_restart(tmp_path, capsys):
    log = lambda resumed: report.RunLog(tmp_path, report.make_console(), recipe="r", resumed=resumed, steps=9, every=9)  # noqa: E731
    with log(0) as first:
        first.telemetry(1, FOUND)
        first.telemetry(4, FOUND)
    lines = [line for line in capsys.readouterr().out.splitlines() if "telemetry" in line]
    assert lines == ["telemetry, step 1: layers/up[1] x: 25.00% of values saturated"]
    with log(5) as second:
        second.telemetry(7, FOUND)
        second.rewind(3)
    rows = report.read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [observed.to_row(1, FOUND)]


def test_heat_maps_have_a_line_for_each_layer(tmp_path, monkeypatch):
    samples = []
    imshow = Axes.imshow
    monkeypatch.setattr(Axes, "imshow", lambda ax, grid, **rest: samples.append(grid) or imshow(ax, grid, **rest))
    rows = [{"step": 1, "loss": 2.0}, observed.to_row(1, FOUND), observed.to_row(4, {"head": FOUND["head"]})]
    paths = observed.plot(tmp_path, rows)
    assert [path.name for path in paths] == ["telemetry_x.png", "telemetry_w.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    nan = np.nan
    np.testing.assert_array_equal(samples[0], [[31.0, nan], [3.5, nan], [31.25, 31.25]])
    np.testing.assert_array_equal(samples[1], [[0.0, nan], [0.25, nan], [0.0, 0.0]])
    np.testing.assert_array_equal(samples[2], [[31.0, nan]])


@pytest.mark.slow
@pytest.mark.parametrize("extra", [(), ("--microbatches", "2", "--mesh", "data=2")])
def test_training_is_the_same_with_telemetry(argv, out, extra):
    losses = {}
    for name, flags in (("without", ()), ("with", ("--telemetry", "3"))):
        name = f"{name}_telemetry_{len(extra)}"
        assert cli.main([*argv, *extra, *flags, "--recipe", "coat", "--run", name]) == 0
        rows = report.read_metrics(out / name / "coat" / "metrics.jsonl")
        losses[bool(flags)] = [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
    assert losses[True] == losses[False]
    actual = [row for row in rows if any(key.startswith(observed.PREFIX) for key in row)]
    assert [row["step"] for row in actual] == [1, 4, 7]
    for role in ("x", "w", "dy", "context", "update"):
        keys = [key for key in actual[0] if f"/{role}/" in key and "layers" in key]
        assert keys, role
        assert (out / name / "coat" / f"telemetry_{role}.png").exists()
    assert json.dumps(actual)
