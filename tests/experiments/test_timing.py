"""Rows of benchmarks: means and plots compare equal cases."""

import argparse
import functools
import json

import pytest
from matplotlib.figure import Figure

from experiments.bench import driver, plots, timing


def rows():
    """Rows of two cases and two metrics. In the second case, "ours" has no peer, only the last resort."""
    return [
        timing.row("a", "peer", "rate", 4.0, "TFLOP/s", "peer", 1.0),
        timing.row("a", "ours", "rate", 2.0, "TFLOP/s", "peer", 0.5),
        timing.row("b", "ours", "rate", 6.0, "TFLOP/s", "bf16", 3.0),
        timing.row("b", "bf16", "rate", 2.0, "TFLOP/s", "bf16", 1.0),
        timing.row("a", "ours", "kept", 1.0, "U", "bf16", 4.0),
        timing.row("b", "ours", "kept", 1.0, "U", "bf16", 9.0),
    ]


def results_file(folder, name, **settings):
    return driver.ResultsFile(argparse.Namespace(out=folder, name=name), "Title", [], **settings)


def test_means_leave_out_cases_without_a_peer_and_tell_how_many_are_left():
    actual = {r["impl"]: r for r in timing.means(rows(), "rate", "bf16")}
    assert actual["ours"]["ratio"] == pytest.approx(0.5)
    assert (actual["ours"]["case"], actual["ours"]["baseline"]) == ("geometric mean of 1", "peer")
    assert actual["bf16"]["ratio"] == 1
    (mean_row,) = timing.means(rows(), "kept")
    assert (mean_row["ratio"], mean_row["case"], mean_row["baseline"]) == (pytest.approx(6), "geometric mean", "bf16")
    # Each of several baselines is a peer; means are not cases of later means.
    mixed = [*rows(), timing.row("c", "ours", "rate", 1.0, "TFLOP/s", "other", 8.0)]
    for table in (mixed, mixed + timing.means(mixed, "rate", "bf16")):
        actual = {r["impl"]: r for r in timing.means(table, "rate", "bf16")}
        assert (actual["ours"]["ratio"], actual["ours"]["baseline"]) == (pytest.approx(2), "best peer")


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved in a test."""
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    return saved


def test_metrics_and_means_are_plotted_apart(figures, tmp_path):
    every = rows()
    file = results_file(tmp_path, "x", last_resort="bf16")
    file.add(every)
    assert figures == []
    file.end("rate")
    assert len(json.loads((tmp_path / "cpu" / "x.json").read_text())["rows"]) == len(every) + 3
    (figure,) = figures
    lines = {
        axes.get_xlabel().split(":")[0]: [list(line.get_xdata()) for line in axes.get_lines()] for axes in figure.axes
    }
    assert lines["rate"] == [[0.5], [pytest.approx(0.5)] * 2, [1, 1]]  # what is its own baseline is not drawn
    assert lines["saved"] == [[4, 9], [pytest.approx(6)] * 2, [1, 1]]  # the word of the pages for "kept"


def test_a_profile_is_drawn_as_bars_of_its_parts(figures, tmp_path):
    parts = {"8-bit products": 3.0, "our passes": 2.0, "gaps": 0.5, "collectives, overlapped": 9.0, "all": 5.5}
    table = [timing.row("a", impl, metric, scale * ms, "ms")
             for impl, scale in (("bf16", 2), ("coat", 1)) for metric, ms in parts.items()]  # fmt: skip
    table.append(timing.row("a, coat: _quantize", "coat", "3 launches", 2.0, "ms"))
    plots.draw(table, "Title", tmp_path / "x.png")
    (figure,) = figures
    (axes,) = figure.axes
    bars = {group.get_label(): [(bar.get_x(), bar.get_width()) for bar in group] for group in axes.containers}
    assert bars == {
        "8-bit matmuls": [(0, 6), (0, 3)],
        "our other kernels": [(6, 4), (3, 2)],
        "gaps": [(10, 1), (5, 0.5)],
    }
    assert [text.get_text() for text in axes.texts] == [" 11", " 6"]


def test_plots_of_a_folder_are_drawn_again(figures, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FP8JAX_COMMIT", "0123456789")
    monkeypatch.setattr(driver.sys, "argv", ["bench", "gemm"])
    results_file(tmp_path, "gemm").add(rows())
    monkeypatch.setattr(driver.sys, "argv", ["plots", "--results", str(tmp_path)])
    plots.main()
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "cpu" / "gemm.png")
    (figure,) = figures
    assert figure.get_suptitle() == "Title"


def test_a_file_says_how_it_was_measured(monkeypatch, tmp_path):
    """Command, flags, commit and GPU, on each row. A truncated file is marked, as is a dry run's."""
    monkeypatch.setenv("XLA_FLAGS", "--some=flag")
    monkeypatch.setenv("FP8JAX_COMMIT", "0123456789abcdef")
    monkeypatch.setattr(plots, "draw", lambda *_: None)
    monkeypatch.setattr(driver.sys, "argv", ["bench", "gemm", "--out", "x", "--rounds", "3"])
    read = lambda card: json.loads((tmp_path / card / "gemm.json").read_text())  # noqa: E731
    file = results_file(tmp_path, "gemm", devices=2)
    file.add(rows())
    assert not read("cpux2")["complete"]
    file.end()
    content = read("cpux2")
    assert content["complete"]
    assert content["flags"] == "--some=flag"
    assert content["command"] == "python -m experiments.bench gemm --rounds 3"
    assert {(r["commit"], r["device"]) for r in content["rows"]} == {("0123456789", "2 x cpu")}
    monkeypatch.setenv("FP8JAX_DRY", "1")
    results_file(tmp_path, "gemm").end()
    assert not read("cpu")["complete"]


def test_operands_are_several_and_exceed_the_cache_together():
    assert timing.copies(1 << 20) == 150  # three times 50 MiB
    assert timing.copies((1 << 20) + 1) == 150
    assert timing.copies(1 << 40) == 8


def test_a_round_calls_as_often_as_fits_the_burst_and_begins_with_any(monkeypatch):
    clock, ran, turns = [0.0], [], []
    lengths = {"a": 0.5, "b": 0.25, "slow": 100.0}

    def call(name):
        clock[0] += lengths[name]
        ran.append(name)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    ready = {name: functools.partial(call, name) for name in lengths}
    actual = timing.seconds(ready, 1, 4.0)
    # Two untimed and two timed calls to estimate the time of one; then as many in a burst, at least two, untimed and
    # timed.
    assert {name: ran.count(name) for name in lengths} == {"a": 4 + 2 * 8, "b": 4 + 2 * 16, "slow": 4 + 2 * 2}
    assert actual == lengths
    ran.clear()
    timing.in_turns(ready, 40, dict.fromkeys(ready, 1), turns.append)
    assert turns == ran[::2] == ran[1::2]
    assert {name for name in turns[::3]} == set(lengths)


@pytest.mark.parametrize(("host", "gpu", "at_once"), [(0.01, 1.0, 1.301), (1.0, 0.01, 1.001)])
def test_steps_read_late_take_what_the_slower_of_host_and_gpu_takes(monkeypatch, host, gpu, at_once):
    """The GPU waits 3 s for the first call of an empty queue."""
    clock, free, ran, read = [0.0], [0.0], [], []

    def call():
        clock[0] += host
        start = free[0] if free[0] > clock[0] else clock[0] + (3.0 if gpu > host else 0.0)
        free[0] = start + gpu
        ran.append(free[0])
        return free[0]

    def wait(end):
        clock[0] = max(clock[0], end)
        read.append(end)
        return end

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing.jax, "block_until_ready", wait)
    assert timing.in_turns({"a": call}, 1, {"a": 10})["a"] == pytest.approx(at_once)
    ran.clear()
    read.clear()
    assert timing.in_turns({"a": timing.late(call)}, 1, {"a": 10})["a"] == pytest.approx(max(host, gpu), rel=1e-3)
    # The first step has no predecessor; a round ends with the result of its last call.
    assert [end for end in read if end != ran[0]] == [*ran[1:9], ran[8], *ran[9:19], ran[18]]


@pytest.mark.parametrize("arguments", ["gemm --out x --rounds 3", "gemm --rounds 3 --out x", "gemm --out=x --rounds 3"])
def test_a_command_is_told_without_where_its_results_went(arguments):
    assert driver.without_out(arguments.split()) == ["gemm", "--rounds", "3"]


def test_rows_have_quartiles_where_these_are_given(capsys):
    actual = timing.row("a", "b", "time", 2.0, "ms", quartiles=[1.5, 2.5])
    assert actual["quartiles"] == [1.5, 2.5]
    assert "2 ms (1.5 to 2.5)" in capsys.readouterr().out
    assert "quartiles" not in timing.row("a", "b", "time", 2.0, "ms")
