"""Tables and plots, compared with figures computed by hand."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from experiments.errors import DiskError
from experiments.files import write_json
from experiments.train import comparison, report
from experiments.train.result import Result

ROOT = Path(__file__).parents[2]


def cells(table):
    """Returns the rows of a table as text, by their first cell."""
    columns = [list(column.cells) for column in table.columns]
    return {row[0]: list(row[1:]) for row in zip(*columns, strict=True)}


def result(name, train, valid, mu, nu, speed):
    return Result(name, 10, 1000, train, valid, {"mu": mu, "nu": nu, "other": 9}, speed, "")


def test_recipes_are_compared_with_the_first():
    results = [result("a", 2.5, 2.0, 4096, 4096, 1234.4), result("b", 2.25, 2.5, 1024, 2048, 99.6)]
    table = comparison.comparison_table(results, has_speed=True)
    shown = cells(table)
    assert shown["a"] == ["2.5000", "2.0000", "", "8.0 KiB", "", "1,234", ""]
    assert shown["b"] == ["2.2500", "2.5000", "+25.00 %", "3.0 KiB", "2.7x less", "100", "0.1x"]
    # Each comparison names its baseline.
    assert [str(column.header) for column in table.columns].count("vs a") == 3
    assert cells(comparison.comparison_table(results, has_speed=False))["b"] == shown["b"][:-2]


def test_the_comparison_fits_into_80_columns_with_whole_names():
    rows = [result(name, 12.3456, 10.25, 4096, 4096, 1234567.4) for name in ("bf16", "fp8_lm_two_phase")]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison.comparison_table(rows, has_speed=True))
    text = console.export_text()
    assert all(word in text for word in ("fp8_lm_two_phase", "12.3456", "1,234,567"))
    assert "…" not in text


RESULTS = [
    result("bf16", 2.5, 2.0, 4 << 20, 4 << 20, 1000.0),
    result("coat_optimizer", 2.5, 2.01, 1 << 20, 1 << 20, 900.0),
    result("te_current", 2.5, 1.99, 4 << 20, 4 << 20, 1300.0),
]


def test_a_run_ends_with_what_was_gained(monkeypatch, tmp_path):
    steady = dict.fromkeys(("bf16", "coat_optimizer", "te_current"), 0.02)
    memory, products = comparison.sentences(RESULTS, {"te_current": "FP8"}, steady, "cpu")
    change = "at +0.50 % validation loss (coat_optimizer, one seed)."
    assert memory == f"Moments need 2.0 MiB instead of 8.0 MiB (4.0 times less), {change}"
    measured = json.loads((ROOT / "results/h100/step.json").read_text())["rows"]
    of_h100 = {row["impl"]: row["value"] for row in measured if row["metric"] == "step"}
    assert products.startswith("FP8 matmuls (te_current) are not faster on a CPU. On an H100, ")
    assert f"{of_h100['bf16'] / of_h100['te_current']:.1f} times as fast with te_current as in bf16" in products
    # Without the file, an H100 is not mentioned.
    monkeypatch.setattr(comparison, "_RESULTS_PATH", tmp_path)
    assert "H100" not in " ".join(comparison.sentences(RESULTS, {"te_current": "FP8"}, steady, "cpu"))
    assert comparison.sentences(RESULTS[:2], {}, steady, "cpu") == [memory]
    (alone,) = comparison.sentences(RESULTS[1:2], {}, steady, "cpu")
    assert "--recipe bf16 coat_optimizer" in alone
    (alone,) = comparison.sentences(RESULTS[:1], {}, steady, "cpu")
    assert alone.endswith("--recipe bf16 coat")


def test_speeds_are_compared_on_a_gpu_that_does_nothing_else():
    steady = dict.fromkeys(("bf16", "coat_optimizer", "te_current"), 0.02)
    _, *lines = comparison.sentences(RESULTS, {"te_current": "FP8"}, steady, "gpu")
    assert lines == [
        "coat_optimizer trains on 0.9 times as many tokens per second as bf16.",
        "te_current trains on 1.3 times as many tokens per second as bf16.",
    ]
    _, refused = comparison.sentences(RESULTS, {"te_current": "FP8"}, steady | {"bf16": 0.4}, "gpu")
    assert refused.startswith("Speeds are not compared: the steps differ too much (bf16 by 40 %)")
    assert comparison.has_comparable_speeds(steady, "gpu")
    assert not comparison.has_comparable_speeds(steady | {"bf16": 0.4}, "gpu")
    assert not comparison.has_comparable_speeds(steady, "cpu")


def test_the_spread_of_speeds_is_of_the_newest_steps():
    speeds = [1.0] * 50 + [100.0 + step for step in range(50)]
    low, middle, high = np.quantile(speeds[50:], [0.25, 0.5, 0.75], method="weibull")
    actual = comparison.spread([{"step": i, "tokens_per_s": speed} for i, speed in enumerate(speeds)])
    assert actual == pytest.approx((high - low) / middle)
    assert comparison.spread([{"step": 1, "tokens_per_s": 1.0}, {"step": 1, "valid_loss": 2.0}]) == 0


@pytest.mark.parametrize("is_verbose", [False, True])
def test_details_are_in_the_log_and_seen_where_that_is_asked_for(tmp_path, is_verbose):
    stream = io.StringIO()
    details = report.Details(Console(file=stream, width=60), is_verbose)
    details.show("before there is a file")
    details.keep(tmp_path / "log.txt")
    details.show("a line of [brackets]")
    details.show(report.memory_table({"parameters": 4000}, 1000, None))
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("a line of [brackets]\n")
    assert "3.9 KiB" in log
    shown = stream.getvalue()
    assert (
        shown.count("before there is a file")
        == shown.count("[brackets]")
        == shown.count("memory estimate")
        == is_verbose
    )


def test_a_terminal_gets_a_bar_that_ends_with_the_validation(tmp_path):
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system=None)
    with report.RunLog(tmp_path, console, recipe="r", resumed=0, steps=4, every=2, label="name") as log:
        for step in range(1, 5):
            log.step(step, 2.0, grad_norm=1.0, lr=0.1, tokens_per_s=10.0)
        log.valid(4, 1.25)
    last = stream.getvalue().rpartition("name ")[2]
    assert re.match(r" *\S+ 4/4 +validation loss 1\.2500 00:00", last)
    assert "step 4/4" not in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3601, "1:00:01")])
def test_times_are_read_at_a_glance(seconds, text):
    assert report.clock(seconds) == text


def test_memory_is_listed_by_part_and_as_xla_counts_it():
    xla = SimpleNamespace(
        argument_size_in_bytes=6000, temp_size_in_bytes=500, output_size_in_bytes=5000, alias_size_in_bytes=4900
    )
    shown = cells(report.memory_table({"parameters": 4000, "first moment": 1000}, 1000, xla))
    assert shown["parameters"] == ["3.9 KiB", "4.000"]
    assert shown["first moment"] == ["1,000 B", "1.000"]
    assert shown["together"] == ["4.9 KiB", "5.000"]
    assert shown["XLA: arguments (state and batch)"] == ["5.9 KiB", "6.000"]
    assert shown["XLA: temporaries (activations, gradients, working copies)"] == ["500 B", "0.500"]
    # Arguments that the step updates in place count once.
    assert shown["XLA: peak of a step"] == ["6.4 KiB", "6.600"]
    assert len(cells(report.memory_table({"parameters": 4000}, 1000, None))) == 2


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def rows(losses, valid=()):
    return [{"step": s, "loss": x} for s, x in losses.items()] + [{"step": s, "valid_loss": x} for s, x in valid]


def test_curves_are_means_and_differences_are_of_the_same_step(tmp_path, drawn):
    one = {step: 4.0 + step % 3 for step in range(1, 76)}
    # The second lacks step 40, and is 10 % worse.
    two = {step: 1.1 * loss for step, loss in one.items() if step <= 39}
    report.plot_losses(tmp_path / "x.png", {"a": rows(one, [(75, 4.5)]), "b": rows(two)})
    top, bottom = drawn[0].axes
    _, smooth, valid, _, _ = top.get_lines()
    assert smooth.get_label() == "a, training (mean of 3 steps)"
    means = [np.mean([one[s] for s in range(max(1, step - 2), step + 1)]) for step in one]
    np.testing.assert_allclose(smooth.get_ydata(), means)
    assert (list(valid.get_xdata()), list(valid.get_ydata())) == ([75], [4.5])
    difference = bottom.get_lines()[0]
    assert list(difference.get_xdata()) == list(range(1, 40))
    np.testing.assert_allclose(difference.get_ydata(), 10)

    report.plot_losses(tmp_path / "x.png", {"a": rows({1: 4.0, 2: 2.0, 4: 8.0}), "b": rows({2: 3.0, 4: 10.0})})
    difference = drawn[1].axes[1].get_lines()[0]
    assert dict(zip(difference.get_xdata(), difference.get_ydata(), strict=True)) == {2: 50.0, 4: 25.0}


def test_a_recipe_without_metrics_is_an_empty_curve(tmp_path, drawn):
    report.plot_losses(tmp_path / "x.png", {"a": [], "b": rows({1: 2.0})})
    report.plot_losses(tmp_path / "x.png", {"a": rows({1: 2.0})})
    assert [len(figure.axes) for figure in drawn] == [2, 1]


def test_text_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    assert path.read_text() == '{\n "a": 1\n}\n'

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "replace", fail)
    with pytest.raises(DiskError, match=r"a\.json cannot be written \(No space left on device\)"):
        write_json(path, {"a": 2})
    assert path.read_text() == '{\n "a": 1\n}\n'


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_lines_folded_and_a_file_gets_them_whole(terminal):
    stream = io.StringIO()
    console = Console(
        file=stream, width=60, force_terminal=terminal, highlight=False, soft_wrap=True, color_system=None
    )
    fields = "  ".join(f"a_setting_of_name_{i}=[{i}]" for i in range(9))
    report.print_text(console, f"{'model':9}{fields}", 9)
    lines = stream.getvalue().splitlines()
    assert " ".join(stream.getvalue().split()) == " ".join(f"model {fields}".split())
    if not terminal:
        assert len(lines) == 1
        return
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(" " * 9 + "a_setting") for line in lines[1:])
