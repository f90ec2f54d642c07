"""Shared parts of the tables: writing of results, and the training run that provides real moments."""

import argparse
import contextlib
import dataclasses
import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from matplotlib.figure import Figure

from experiments import evaluate
from experiments.errors import UserError
from experiments.results import record
from experiments.train import cli
from experiments.train.checkpoint import Checkpoints
from experiments.train.task import TrainState

RESULTS = Path("results")
RUN = "tables_moments"
# The smallest model of experiments.models.sizes, with enough steps for the moments to forget their initial values. The
# run takes some minutes on two CPU cores.
STEPS = 300
FLAGS = (
    f"--recipe bf16 --run {RUN} --model 5m --batch 4 --seq-len 128 --steps {STEPS} --eval-every {STEPS} "
    f"--checkpoint-every {STEPS} --eval-batches 4 --sample-tokens 0 --log-every 20"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure: one row of a results file.

    Attributes:
        case: what was measured.
        metric: name of the figure.
        value: our figure.
        unit: "1" for plain numbers.
        baseline: the case that `ratio` is relative to, or None.
        ratio: value over the baseline's.
        paper: the paper's figure, or None if our copy of the paper has none.
        paper_ratio: the paper's figure over the paper's baseline.
        table: the table or figure of the paper.
        pivot: row and column labels of a two-dimensional table.
        impl: the implementation.
    """

    case: str
    metric: str
    value: float | None
    unit: str = "1"
    baseline: str | None = None
    ratio: float | None = None
    paper: float | None = None
    paper_ratio: float | None = None
    table: str = ""
    pivot: tuple[str, str] | None = None
    impl: str = "fp8jax"


def write(
    bench: str,
    title: str,
    rows: Sequence[Row],
    notes: Sequence[str],
    figure: Figure | None,
    results: Path = RESULTS,
    *,
    arguments: str = "",
    module: str = "",
    device: str | None = None,
    sources: Sequence[tuple[str, str]] | None = None,
    date: str | None = None,
) -> Path:
    """Writes RESULTS/CARD/BENCH.json, and BENCH.png if there is a figure.

    Args:
        bench: name of the file, and of the module in `experiments.papers`.
        title: headline in RESULTS.md.
        rows: the figures.
        notes: the measurement, its device, and reasons for differences from the paper.
        figure: figure to save next to the file, or None.
        results: folder, created if missing.
        arguments: arguments of the command that regenerates the file.
        module: name of the module in `experiments.papers`, if it is not `bench`.
        device: the measured device; None for this process's first device.
        sources: commit and device of each row if figures come from other files; None for those of this process.
        date: date of the measurement; None for today.
    """
    listed = [dataclasses.asdict(row) for row in rows]
    if sources is not None:
        listed = [row | {"commit": of, "device": on} for row, (of, on) in zip(listed, sources, strict=True)]
    path = record.write(
        results,
        bench,
        title=title,
        command=f"python -m experiments.papers.{module or bench} {arguments}".strip(),
        device=device or jax.devices()[0].device_kind,
        rows=listed,
        notes=notes,
        complete=not os.environ.get("FP8JAX_DRY"),
        date=date,
    )
    if figure is None:
        path.with_suffix(".png").unlink(missing_ok=True)  # an older command may have drawn a figure
    else:
        figure.savefig(path.with_suffix(".png"))
    print(f"wrote {path}")
    return path


class Table(NamedTuple):
    """The arguments of `write` for a table."""

    bench: str
    title: str
    rows: Sequence[Row]
    notes: Sequence[str]
    figure: Figure | None = None
    arguments: str = ""
    module: str = ""
    device: str | None = None


def run(
    doc: str | None,
    make: Callable[[argparse.Namespace], Table],
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Makes a table from a command line and writes it. Returns the exit code, 2 after a UserError.

    Args:
        doc: docstring of the module; its first line describes the command.
        make: maps parsed options to a table; the option "out" is the folder of training runs.
        add_options: adds further options to --out and --results.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of training runs (default: runs)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write (default: results)")
    if add_options is not None:
        add_options(parser)
    options = parser.parse_args()
    try:
        table = make(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write(
        *(table.bench, table.title, table.rows, table.notes, table.figure, options.results),
        arguments=table.arguments,
        module=table.module,
        device=table.device,
    )
    return 0


@dataclasses.dataclass(frozen=True)
class Dump:
    """A trained model with the fp32 moments of its last step, restored from the run's checkpoint."""

    trained: evaluate.Trained
    state: TrainState

    @property
    def moments(self) -> tuple[Any, Any]:
        """Returns first and second moments in fp32, as trees like that of the parameters."""
        adam = next(s for s in jax.tree.leaves(self.state.opt_state, is_leaf=_is_adam) if _is_adam(s))
        return adam.mu, adam.nu


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Locks a path with a lock file next to it. Other processes wait for the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def dump(out: Path, flags: str = FLAGS, step: int | None = None) -> Dump:
    """Returns the training run with fp32 moments. Trains it unless it is in OUT.

    Concurrent tables train it once: the others wait for the first. `step` selects a checkpoint; None is the last.

    Raises:
        UserError: the training program failed.
    """
    arguments = flags.split()
    run = out / arguments[arguments.index("--run") + 1]
    with hold(run):
        code = cli.main([*arguments, "--out", str(out)])
    if code:
        raise UserError(f"the training run exited with code {code}")
    trained = evaluate.load(run, "bf16")
    with Checkpoints(run / "bf16" / "checkpoints", trained.config.run.keep) as checkpoints:
        state, _ = checkpoints.restore(step or trained.step, jax.eval_shape(trained.task.init))
    return Dump(trained, state)


def _is_adam(node: Any) -> bool:
    return isinstance(node, tuple) and {"mu", "nu"} <= set(getattr(node, "_fields", ()))
