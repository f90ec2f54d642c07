"""What the user sees and keeps: terminal output, metrics.jsonl, TensorBoard events, the table and the loss curves."""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tensorboardX
from matplotlib.figure import Figure
from rich import progress
from rich.console import Console
from rich.table import Table


def make_console() -> Console:
    """A console that wraps to the terminal, and to 120 columns where there is none."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=120)


def write_json(path: Path, content: Any) -> None:
    """Writes a file in one step, so that a kill leaves the old one or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, default=str) + "\n")
    os.replace(partial, path)


def size(count: float) -> str:
    """Bytes for people: 1,536 is 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What is known of a finished recipe; result.json holds it.

    Attributes:
        recipe: its name.
        steps: updates applied.
        parameters: their number.
        train_loss: mean of the last tenth of the steps (at most 50), nats per token.
        valid_loss: after the last step, nats per token.
        state_bytes: of the optimizer, as `fp8jax.state_bytes`.
        tokens_per_s: median over the steps; compilation, validation and checkpoints excluded.
        text: what the model wrote.
    """

    recipe: str
    steps: int
    parameters: int
    train_loss: float
    valid_loss: float
    state_bytes: Mapping[str, int]
    tokens_per_s: float
    text: str

    @property
    def moment_bytes(self) -> float:
        """Bytes of both moments per parameter."""
        return (self.state_bytes["mu"] + self.state_bytes["nu"]) / self.parameters


class RunLog:
    """Metrics of one recipe: metrics.jsonl (a line a step, and one a validation), TensorBoard, and the terminal.

    Opening the log drops what an earlier process wrote after step `resumed`, so that no step stands in it twice. Lines
    reach the file system at once: a kill loses none.

    Args:
        folder: of the recipe.
        resumed: step that training goes on from; 0 for a fresh start.
        steps: the last step.
        every: steps between progress lines where the output is no terminal.
    """

    def __init__(self, folder: Path, console: Console, *, recipe: str, resumed: int, steps: int, every: int) -> None:
        self._console, self._recipe, self._steps, self._every = console, recipe, steps, every
        path = folder / "metrics.jsonl"
        rows = [row for row in read_metrics(path) if row["step"] <= resumed]
        self.train = {row["step"]: row for row in rows if "loss" in row}
        self._valid = {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(partial, path)
        self._file = path.open("a", buffering=1)
        purge = {"purge_step": resumed + 1} if resumed else {}
        self._board = tensorboardX.SummaryWriter(str(folder / "tensorboard"), **purge)
        self._bar: progress.Progress | None = None
        if console.is_terminal:
            self._bar = progress.Progress(
                progress.TextColumn(recipe),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
                progress.TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(recipe, total=steps, completed=resumed, loss="-", speed="-")

    def __enter__(self) -> "RunLog":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        self._file.close()
        self._board.close()

    def step(self, step: int, loss: float, *, grad_norm: float, lr: float, tokens_per_s: float) -> None:
        """Records a finished step."""
        row = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens_per_s": tokens_per_s}
        self.train[step] = row
        self._write(row)
        recent = [self.train[s] for s in range(max(1, step - self._every + 1), step + 1) if s in self.train]
        mean = statistics.fmean(r["loss"] for r in recent)
        speed = statistics.median(r["tokens_per_s"] for r in recent)
        if self._bar:
            self._bar.update(self._task, completed=step, loss=f"{mean:.3f}", speed=f"{speed:,.0f}")
        elif step % self._every == 0 or step == self._steps:
            self._console.print(
                f"step {step}/{self._steps} loss {mean:.3f} tokens/s {speed:.0f} lr {lr:.2e} "
                f"grad_norm {grad_norm:.2f} recipe {self._recipe}"
            )

    def valid(self, step: int, loss: float) -> None:
        """Records a validation after `step`."""
        self._valid[step] = loss
        self._write({"step": step, "valid_loss": loss})
        self._console.print(f"valid {step}/{self._steps} loss {loss:.4f} recipe {self._recipe}")

    def has_valid(self, step: int) -> bool:
        """Whether a validation after `step` is recorded."""
        return step in self._valid

    def result(self, parameters: int, state_bytes: Mapping[str, int], text: str) -> Result:
        """The recipe's row of the comparison; the last step and its validation must be recorded."""
        tail = max(1, min(50, self._steps // 10))
        return Result(
            recipe=self._recipe,
            steps=self._steps,
            parameters=parameters,
            train_loss=statistics.fmean(row["loss"] for s, row in self.train.items() if s > self._steps - tail),
            valid_loss=self._valid[self._steps],
            state_bytes=dict(state_bytes),
            tokens_per_s=statistics.median(row["tokens_per_s"] for row in self.train.values()),
            text=text,
        )

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, row["step"])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is dropped, a missing file is empty."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def memory_table(state: Mapping[str, int], parameters: int, xla: Any) -> Table:
    """Bytes before the first step: the state by part, and XLA's account of the compiled step.

    Args:
        state: part to bytes, from the abstract state.
        parameters: their number.
        xla: `compiled.memory_analysis()`, or None where the backend has none.
    """
    table = Table(title="memory estimate", title_justify="left")
    for name, justify in (("part", "left"), ("bytes", "right"), ("bytes/param", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, count in [*state.items(), ("together", sum(state.values()))]:
        table.add_row(name, size(count), f"{count / parameters:.3f}")
    if xla is not None:
        held, temporary = xla.argument_size_in_bytes, xla.temp_size_in_bytes
        fresh = xla.output_size_in_bytes - xla.alias_size_in_bytes
        table.add_section()
        for name, count in (
            ("XLA: arguments (state and batch)", held),
            ("XLA: temporaries (activations, gradients, working copies)", temporary),
            ("XLA: peak of a step", held + temporary + fresh),
        ):
            table.add_row(name, size(count), f"{count / parameters:.3f}")
    return table


def comparison_table(results: Sequence[Result]) -> Table:
    """One row a recipe; the first is the baseline of the ratio."""
    table = Table(title="comparison", title_justify="left")
    table.add_column("recipe")
    for name in ("train loss", "valid loss", "ratio", "perplexity", "moments", "bytes/param", "tokens/s"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            r.recipe, f"{r.train_loss:.4f}", f"{r.valid_loss:.4f}", f"{r.valid_loss / results[0].valid_loss:.4f}",
            f"{math.exp(min(r.valid_loss, 700)):.3f}", size(r.state_bytes["mu"] + r.state_bytes["nu"]),
            f"{r.moment_bytes:.3f}", f"{r.tokens_per_s:,.0f}",
        )  # fmt: skip
    return table


def plot_losses(path: Path, metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draws training and validation loss of every recipe, and below it how far each is from the first.

    Args:
        path: of the PNG.
        metrics: recipe to the rows of its metrics.jsonl.
    """
    figure = Figure(figsize=(9, 6.5 if len(metrics) > 1 else 4.5), dpi=120, layout="constrained")
    if len(metrics) > 1:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    else:
        top, bottom = figure.subplots(), None
    baseline: np.ndarray | None = None
    for i, (recipe, rows) in enumerate(metrics.items()):
        steps = np.array([row["step"] for row in rows if "loss" in row])
        losses = np.array([row["loss"] for row in rows if "loss" in row])
        smooth = _smooth(losses, max(1, len(losses) // 25))
        top.plot(steps, losses, color=f"C{i}", alpha=0.2, linewidth=0.8)
        top.plot(steps, smooth, color=f"C{i}", label=f"{recipe}, training", linestyle="-" if i == 0 else "--")
        valid = [(row["step"], row["valid_loss"]) for row in rows if "valid_loss" in row]
        if valid:
            marker = "os^vD"[i % 5]
            top.plot(*zip(*valid, strict=True), marker, color=f"C{i}", mfc="none", label=f"{recipe}, validation")
        if baseline is None:
            baseline = smooth
        elif bottom is not None:
            shared = min(len(baseline), len(smooth))
            bottom.plot(steps[:shared], 100 * (smooth[:shared] / baseline[:shared] - 1), color=f"C{i}", label=recipe)
    top.set_ylabel("loss (nats per token)")
    top.grid(alpha=0.3)
    top.legend()
    if bottom is not None:
        bottom.axhline(0, color="C0", linewidth=1)
        bottom.set_ylabel(f"% above {next(iter(metrics))}")
        bottom.grid(alpha=0.3)
    (top if bottom is None else bottom).set_xlabel("step")
    figure.savefig(path)


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of each value and up to width - 1 before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
