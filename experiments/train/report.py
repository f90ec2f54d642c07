"""The output for the user: terminal output, metrics.jsonl, TensorBoard events, the table and the loss curves."""

import contextlib
import io
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich import progress
from rich.console import Console
from rich.table import Table
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from experiments.errors import UserError
from experiments.files import open_to_append, parse_json, read_bytes, write_bytes, write_text, writing
from experiments.train import observed
from experiments.train.result import RECENT, Result
from fp8jax.core.tables import sentence

_ROW = {"step", "loss", "grad_norm", "lr", "tokens_per_s"}


def make_console(quiet: bool = False) -> Console:
    """Returns a console that wraps at the terminal's width, or at 120 columns. A quiet console prints nothing."""
    console = Console(highlight=False, soft_wrap=True, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=120, quiet=quiet)


def print_text(console: Console, text: str, indent: int = 0, style: str | None = None) -> None:
    """Prints a line, wrapped at words in a terminal, and unwrapped in a file."""
    console.print(sentence(text, console.width, indent) if console.is_terminal else text, style=style, markup=False)


class Details:
    """Details for few users: they are in a run's log.txt, and with --verbose also in the terminal.

    Args:
        console: console of the terminal.
        is_verbose: whether the terminal shows the details.
    """

    def __init__(self, console: Console, is_verbose: bool = False) -> None:
        self._console, self._is_verbose = console, is_verbose
        self._path: Path | None = None

    def keep(self, path: Path) -> None:
        """Also appends subsequent output to a file.

        Raises:
            DiskError: the file cannot be written. `show` raises it, too.
        """
        self._path = path
        with writing(path):
            open_to_append(path).close()

    def show(self, content: Any, indent: int = 0) -> None:
        """Shows a line or a rich table."""
        if self._is_verbose:
            if isinstance(content, str):
                print_text(self._console, content, indent, "dim")
            else:
                self._console.print(content)
        if self._path is None:
            return
        if not isinstance(content, str):
            buffer = Console(file=io.StringIO(), width=120, record=True)
            buffer.print(content)
            content = buffer.export_text().rstrip()
        with writing(self._path), open_to_append(self._path) as file:
            file.write(f"{content}\n")


def waiting(console: Console, text: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which a terminal shows a spinner with text."""
    return console.status(text) if console.is_terminal and not console.quiet else contextlib.nullcontext()


def clock(seconds: float) -> str:
    """Formats seconds as minutes and seconds, with hours if there are any."""
    minutes, remaining = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{remaining:02}" if minutes >= 60 else f"{minutes}:{remaining:02}"


def size(count: float) -> str:
    """Formats a number of bytes: 1,536 is 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"


class RunLog:
    """Metrics of one recipe: metrics.jsonl (a line per step and per validation), TensorBoard, and the terminal.

    Opening the log deletes rows of an earlier process after step `resumed`, so no step occurs twice. Lines are flushed
    at once: a kill loses none. The result depends on the rows in the checkpoint and on later ones, not on the file.

    Args:
        folder: folder of the recipe.
        resumed: step from which training continues; 0 for a fresh start.
        recent: the rows in the checkpoint, a result of `recent`.
        steps: the last step.
        every: steps between progress lines if the output is not a terminal.
        writes: False in a process that does not write the files. It only reads their initial content.
        share: share of the devices' peak per token per second (for MFU), or None.
        also: additional function to call with each row.
        label: label of the progress bar; by default the recipe.

    Raises:
        DiskError: a file cannot be written. All methods that write raise it, too.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        *,
        recipe: str,
        resumed: int,
        steps: int,
        every: int,
        recent: Sequence[dict[str, Any]] = (),
        writes: bool = True,
        share: float | None = None,
        also: Callable[[dict[str, Any]], None] | None = None,
        label: str = "",
    ) -> None:
        self._share, self._also = share, also
        self._console, self._recipe, self._steps, self._every, self._writes = console, recipe, steps, every, writes
        self._path = folder / "metrics.jsonl"
        rows = [row for row in read_metrics(self._path) if row["step"] <= resumed]
        self.train = {row["step"]: row for row in [*rows, *recent] if "loss" in row}
        self._valid = {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}
        self._faults = observed.Faults()
        if gaps := missing(self.train, resumed):
            console.print(f"{self._path} lacks steps {gaps}: loss.png has a gap there; training goes on exactly")
        self._bar: progress.Progress | None = None
        self._started, self._resumed = time.monotonic(), resumed
        if not writes:
            return
        self._open_file(resumed)
        board = folder / "tensorboard"
        with writing(board):
            board.mkdir(exist_ok=True)
            # tensorboardX's SummaryWriter hangs on a full disk; this one writes in the calling thread.
            self._board = EventsWriter(str(board / "events"), filename_suffix=f".{os.getpid()}")
            if resumed:
                self._purge(resumed)
        if console.is_terminal:
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=None),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[note]}"),
                progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task(label or recipe, total=steps, completed=resumed, note="")

    def _open_file(self, step: int) -> None:
        """Rewrites metrics.jsonl with the rows up to a step, and opens it for further rows."""
        entries = [*self.train.values(), *({"step": s, "valid_loss": loss} for s, loss in self._valid.items())]
        entries += [row for row in read_metrics(self._path) if _is_observed(row) and row["step"] <= step]
        entries.sort(key=lambda row: row["step"])
        write_text(self._path, "".join(json.dumps(row) + "\n" for row in entries))
        with writing(self._path):
            self._file = open_to_append(self._path)

    def _purge(self, step: int) -> None:
        """Deletes events after a step in TensorBoard."""
        start = SessionLog(status=SessionLog.START)
        self._board.write_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def __enter__(self) -> "RunLog":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        if not self._writes:
            return
        with writing(self._path):
            self._file.close()
        with writing(self._path.with_name("tensorboard")):
            self._board.close()

    def step(
        self,
        step: int,
        loss: float,
        *,
        grad_norm: float,
        lr: float,
        tokens_per_s: float,
        saturated: float | None = None,
        balance_loss: float | None = None,
        z_loss: float | None = None,
        bad_steps: int | None = None,
    ) -> None:
        """Records a finished step.

        Args:
            step, loss, grad_norm, lr, tokens_per_s: metrics of the step.
            saturated: number of saturated gradient elements, if 8-bit sums can saturate.
            balance_loss, z_loss: router losses, if there are experts.
            bad_steps: bad steps of the run so far, if they do not stop it.
        """
        row = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens_per_s": tokens_per_s}
        extra = {"saturated": saturated, "balance_loss": balance_loss, "z_loss": z_loss, "bad_steps": bad_steps}
        row |= {name: value for name, value in extra.items() if value is not None}
        row |= {} if self._share is None else {"mfu": tokens_per_s * self._share}
        self.train[step] = row
        self._write(row)
        shown = self._last(self._every, step)
        mean = statistics.fmean(r["loss"] for r in shown)
        speed = statistics.median(r["tokens_per_s"] for r in shown)
        used = "" if self._share is None else f" mfu {speed * self._share:.1%}"
        routers = "" if balance_loss is None else f" balance {balance_loss:.3f} z {z_loss:.3f}"
        saturation = "" if saturated is None else f" saturated {sum(r.get('saturated', 0) for r in shown):.0f}"
        if self._bar:
            note = f"mean loss {mean:.3f}{saturation}  {speed:,.0f} tokens/s{used}"
            self._bar.update(self._task, completed=step, note=note)
        elif step % self._every == 0 or step == self._steps:
            seconds = (time.monotonic() - self._started) / (step - self._resumed) * (self._steps - step)
            self._console.print(
                f"step {step}/{self._steps} mean_loss {mean:.3f} tokens/s {speed:.0f}{used} lr {lr:.2e} "
                f"grad_norm {grad_norm:.2f}{routers}{saturation} left {clock(seconds)} recipe {self._recipe}"
            )

    def rewind(self, step: int) -> None:
        """Deletes records after a step, to which training returns."""
        self.train = {s: row for s, row in self.train.items() if s <= step}
        self._valid = {s: loss for s, loss in self._valid.items() if s <= step}
        if self._writes:
            self._file.close()
            self._open_file(step)
            with writing(self._path.with_name("tensorboard")):
                self._purge(step)

    def say(self, text: str) -> None:
        """Prints a line between progress lines."""
        self._console.print(text, markup=False)

    def valid(self, step: int, loss: float) -> None:
        """Records a validation after `step`."""
        self._valid[step] = loss
        self._write({"step": step, "valid_loss": loss})
        if not self._bar:
            self._console.print(f"valid {step}/{self._steps} loss {loss:.4f} recipe {self._recipe}")
        elif step == self._steps:
            self._bar.update(self._task, note=f"validation loss {loss:.4f}")

    def telemetry(self, step: int, telemetry_values: Mapping[str, Any]) -> None:
        """Records the statistics of a step's tensors, and prints new faults."""
        self._write(observed.to_row(step, telemetry_values))
        for line in self._faults.lines(step, telemetry_values):
            self.say(line)

    def has_valid(self, step: int) -> bool:
        """Returns whether a validation after `step` is recorded."""
        return step in self._valid

    def recent(self, step: int) -> list[dict[str, Any]]:
        """Returns the newest `RECENT` rows up to `step`, for the checkpoint."""
        return self._last(RECENT, step)

    def result(self, parameters: int, state_bytes: Mapping[str, int], text: str) -> Result:
        """Returns the recipe's result. The last step and its validation must be recorded."""
        tail = self._last(max(1, min(RECENT, self._steps // 10)), self._steps)
        return Result(
            recipe=self._recipe,
            steps=self._steps,
            parameters=parameters,
            train_loss=statistics.fmean(row["loss"] for row in tail),
            valid_loss=self._valid[self._steps],
            state_bytes=dict(state_bytes),
            tokens_per_s=statistics.median(row["tokens_per_s"] for row in self.recent(self._steps)),
            text=text,
        )

    def _last(self, count: int, step: int) -> list[dict[str, Any]]:
        return [self.train[s] for s in range(max(1, step - count + 1), step + 1) if s in self.train]

    def _write(self, row: dict[str, Any]) -> None:
        if not self._writes:
            return
        if self._also is not None:
            self._also(row)
        step = row["step"]
        with writing(self._path):
            self._file.write(json.dumps(row) + "\n")
        with writing(self._path.with_name("tensorboard")):
            for name, value in row.items():
                if name != "step":
                    self._board.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            if step % self._every == 0:
                self._board.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the readable rows of a metrics.jsonl; none if the file is missing. `missing` lists the lost steps.

    Raises:
        UserError: the file cannot be read, or is not a regular file.
    """
    rows = []
    try:
        content = read_bytes(path) if path.exists() else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); move it away") from None
    for line in content.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            row = parse_json(line)
            numbers = isinstance(row, dict) and all(type(value) in (int, float) for value in row.values())
            is_known = numbers and ("valid_loss" in row or set(row) >= _ROW or _is_observed(row))
            if is_known and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def _is_observed(row: Mapping[str, Any]) -> bool:
    """Returns whether a row has statistics of a step's tensors."""
    return any(name.startswith(observed.PREFIX) for name in row)


def missing(steps: Iterable[int], last: int) -> str:
    """Returns the missing steps from 1 to `last`, such as "3 to 7, 9"; empty if there are none."""
    ranges: list[list[int]] = []
    for step in sorted(set(range(1, last + 1)) - set(steps)):
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in ranges)


def memory_table(state: Mapping[str, int], parameters: int, xla: Any, devices: int = 1) -> Table:
    """Returns a table of bytes: the state by part, and XLA's memory analysis of the compiled step.

    Args:
        state: bytes by part, from the abstract state.
        parameters: number of parameters.
        xla: `compiled.memory_analysis()`, or None if the backend has none.
        devices: number of devices of the program; XLA's analysis is per device.
    """
    per_device = f", XLA's account of each of {devices} devices" if devices > 1 else ""
    table = Table(title=f"memory estimate{per_device}", title_justify="left")
    for name, justify in (("part", "left"), ("bytes", "right"), ("bytes/param", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, count in [*state.items(), ("together", sum(state.values()))]:
        table.add_row(name, size(count), f"{count / parameters:.3f}")
    if xla is not None:
        argument_bytes, temporary = xla.argument_size_in_bytes, xla.temp_size_in_bytes
        fresh = xla.output_size_in_bytes - xla.alias_size_in_bytes
        table.add_section()
        for name, count in (
            ("XLA: arguments (state and batch)", argument_bytes),
            ("XLA: temporaries (activations, gradients, working copies)", temporary),
            ("XLA: peak of a step", argument_bytes + temporary + fresh),
        ):
            table.add_row(name, size(count), f"{count / parameters:.3f}")
    return table


def plot_losses(path: Path, metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draws training and validation losses of all recipes, and below their differences from the first.

    Args:
        path: path of the PNG.
        metrics: rows of metrics.jsonl by recipe.
    """
    from matplotlib.figure import Figure  # a slow import

    figure = Figure(figsize=(9, 6.5 if len(metrics) > 1 else 4.5), dpi=120, layout="constrained")
    if len(metrics) > 1:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    else:
        top, bottom = figure.subplots(), None
    baseline: dict[int, float] | None = None
    width = max(1, *(sum("loss" in row for row in rows) // 25 for rows in metrics.values()))
    for i, (recipe, rows) in enumerate(metrics.items()):
        steps = np.array([row["step"] for row in rows if "loss" in row])
        losses = np.array([row["loss"] for row in rows if "loss" in row])
        smooth = _smooth(losses, width)
        label = f"{recipe}, training" + (f" (mean of {width} steps)" if width > 1 else "")
        top.plot(steps, losses, color=f"C{i}", alpha=0.2, linewidth=0.8)
        top.plot(steps, smooth, color=f"C{i}", label=label, linestyle="-" if i == 0 else "--")
        valid = [(row["step"], row["valid_loss"]) for row in rows if "valid_loss" in row]
        if valid:
            marker = "os^vD"[i % 5]
            top.plot(*zip(*valid, strict=True), marker, color=f"C{i}", mfc="none", label=f"{recipe}, validation")
        smoothed = dict(zip(steps.tolist(), smooth.tolist(), strict=True))
        if baseline is None:
            baseline = smoothed
        elif bottom is not None:
            shared = [step for step in smoothed if step in baseline]
            bottom.plot(shared, [100 * (smoothed[s] / baseline[s] - 1) for s in shared], color=f"C{i}", label=recipe)
    top.set_ylabel("loss (nats per token)")
    top.grid(alpha=0.3)
    top.legend()
    if bottom is not None:
        bottom.axhline(0, color="C0", linewidth=1)
        bottom.set_ylabel(f"relative to {next(iter(metrics))} (%)")
        bottom.grid(alpha=0.3)
    (top if bottom is None else bottom).set_xlabel("step")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_bytes(path, image.getvalue())


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of each value and up to width - 1 values before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
