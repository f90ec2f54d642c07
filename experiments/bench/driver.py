"""Shared parts of benchmarks: options, results files, and arms of whole steps.

Arms are compiled first, then timed in turns. An arm of a step has a state; `timed` measures it. An arm of a kernel or a
layer is a function of operands; `timing.seconds` measures it.
"""

import argparse
import concurrent.futures
import functools
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import plots, timing
from experiments.results import record


class Arm:
    """A compiled step and the state that it updates.

    Attributes:
        begin: returns the initial state; jitted, so that `prepare` can compile it.
        build: compiles the step, which maps the state and `inputs` to the next state and a value.
        inputs: the arguments of the step other than the state.
        state: None before the first step and after `stop`.
    """

    begin: Any
    build: Callable[[], Any]
    inputs: tuple[Any, ...] = ()
    state: Any = None

    @functools.cached_property
    def program(self) -> Any:
        """The compiled step."""
        return self.build()

    def prepare(self) -> None:
        """Compiles the step and the function that creates its state."""
        self.program  # noqa: B018
        if not timing.dry():
            self.begin = self.begin.lower().compile()

    def start(self) -> None:
        """Creates the state."""
        self.state = self.begin()

    def __call__(self) -> Any:
        """Runs one step and returns its value."""
        if self.state is None:
            self.start()
        self.state, value = self.program(self.state, *self.inputs)
        return value

    def synchronised(self) -> Any:
        """Runs one step and waits for its value."""
        return jax.block_until_ready(self())

    def stop(self) -> None:
        """Frees the state."""
        jax.tree.map(lambda x: x.delete(), self.state)
        self.state = None


def memory(program: Any) -> tuple[float, float]:
    """Returns GB of temporaries and total GB of a compiled step, per GPU."""
    stats = program.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.temp_size_in_bytes / 1e9, (stats.argument_size_in_bytes + stats.temp_size_in_bytes + results) / 1e9


def built(names: Sequence[str], make: Callable[[str], Any], limit: float = math.inf) -> dict[str, Any]:
    """Returns the arms that compile and run a step. Prints the others, and those that the time limit leaves out.

    An arm compiles while the next one is traced. No step runs meanwhile: it would disturb XLA's autotuning of matmuls.

    Args:
        names: names of arms; all are compared with the first.
        make: maps a name to an `Arm`.
        limit: seconds after which no further arm is traced.

    Raises:
        RuntimeError: the first arm does not run, so there is no baseline.
    """
    arms: dict[str, Any] = {}
    waiting: tuple[str, Any, Any] | None = None
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for name in [*names, None]:
            start, arm = time.perf_counter(), None
            is_too_late = start - begin > limit
            if is_too_late and name is not None:
                print(f"  {name}: left out, the time limit is reached", flush=True)
            try:
                arm = None if name is None or is_too_late else make(name)
            except Exception as problem:
                timing.report_failure(str(name), problem)
            if waiting is not None:
                previous_name, previous_arm, compiling = waiting
                try:
                    compiling.result()
                    jax.block_until_ready(previous_arm())
                    previous_arm.stop()
                    arms[previous_name] = previous_arm
                except Exception as problem:
                    timing.report_failure(previous_name, problem)
            waiting = None if name is None or arm is None else (name, arm, pool.submit(arm.prepare))
            if arm is not None:
                print(
                    f"  {name}: traced while the previous arm compiled, in {time.perf_counter() - start:.0f} s",
                    flush=True,
                )
    if names[0] not in arms:
        raise RuntimeError(f"{names[0]!r}, the baseline of all arms, does not run")
    return arms


def timed(arms: Mapping[str, Any], rounds: int, steps: int) -> dict[str, timing.Seconds]:
    """Returns seconds per step of each arm, timed in turns. A loss is read after the next step has started.

    Only one arm has a state at a time.
    """
    calls = {name: timing.late(arm) for name, arm in arms.items()}
    return timing.in_turns(calls, rounds, dict.fromkeys(arms, steps), lambda name: arms[name].stop())


def time_row(case: str, name: str, metric: str, seconds: timing.Seconds, base: str | None = None,
             ratio: float | None = None) -> timing.Row:  # fmt: skip
    """Returns a row of milliseconds with quartiles."""
    return timing.row(case, name, metric, 1e3 * seconds, "ms", base, ratio, seconds.quartiles(lambda t: 1e3 * t))


def notes_of(doc: str | None) -> list[str]:
    """Returns the paragraphs of a module's docstring after its first line, each on one line."""
    return [" ".join(part.split()) for part in (doc or "").split("\n\n")[1:]]


def rate_row(case: str, name: str, metric: str, seconds: timing.Seconds, work: float, unit: str,
             base: str | None = None, ratio: float | None = None) -> timing.Row:  # fmt: skip
    """Returns a row of `work` divided by seconds, with quartiles."""
    rate = work.__truediv__
    return timing.row(case, name, metric, rate(seconds), unit, base, ratio, seconds.quartiles(rate))


@jax.jit
def relative_error(actual: Any, expected: Any) -> jax.Array:
    """Returns the largest norm(actual - expected) / norm(expected) over the leaves of two trees of arrays."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(one, actual, expected))))


class ResultsFile:
    """The results file of a benchmark, OUT/CARD/NAME.json, rewritten after each case.

    Args:
        options: parsed options of `parser`.
        title: headline.
        notes: sentences below the table.
        devices: number of devices used.
        versions: versions of additional packages.
        last_resort: baseline of cases without a peer; see `timing.compared`.

    Attributes:
        rows: rows added so far.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        title: str,
        notes: Sequence[str],
        *,
        devices: int = 1,
        versions: Mapping[str, str] | None = None,
        last_resort: str | None = None,
    ) -> None:
        self.rows: list[timing.Row] = []
        self._options, self._title, self._notes, self._versions = options, title, notes, versions
        self._last_resort = last_resort
        kind = jax.devices()[0].device_kind
        self._device = kind if devices == 1 else f"{devices} x {kind}"

    def add(self, rows: Sequence[timing.Row]) -> None:
        """Adds rows and writes an incomplete file. An incomplete file is measured again."""
        self.rows += rows
        self._write(is_complete=False)

    def end(self, *metrics: str) -> None:
        """Writes the complete file, with geometric means of the ratios of `metrics`, and a plot of all ratios."""
        self.rows += [row for metric in metrics for row in timing.means(self.rows, metric, self._last_resort)]
        path = self._write(is_complete=True)
        plots.draw(self.rows, self._title, path.with_suffix(".png"), self._last_resort)

    def _write(self, is_complete: bool) -> Path:
        return record.write(
            self._options.out,
            self._options.name,
            title=self._title,
            command=f"python -m experiments.bench {shlex.join(without_out(sys.argv[1:]))}",
            device=self._device,
            rows=self.rows,
            notes=self._notes,
            versions=self._versions,
            complete=is_complete and not timing.dry(),
        )


def without_out(arguments: Sequence[str]) -> list[str]:
    """Returns a command line without --out, which does not affect the results."""
    previous_arguments = ["", *arguments]
    return [
        a
        for a, previous in zip(arguments, previous_arguments, strict=False)
        if previous != "--out" and not a.startswith("--out")
    ]


def parser(
    name: str,
    doc: str | None,
    *,
    rounds: int | None = None,
    steps: int | None = None,
    burst: float | None = None,
    file: str | None = None,
) -> argparse.ArgumentParser:
    """Returns a parser with --name (results file) and --out, and each further option that has a default."""
    options = argparse.ArgumentParser(
        prog=f"python -m experiments.bench {name}", description=(doc or "").partition("\n\n")[0]
    )
    if rounds is not None:
        options.add_argument("--rounds", type=int, default=rounds)
    if steps is not None:
        options.add_argument("--steps", type=int, default=steps, help="untimed steps, and timed steps, per round")
    if burst is not None:
        options.add_argument("--burst", type=float, default=burst, help="seconds per round of an implementation")
    options.add_argument("--name", default=file or name, help="name of the results file")
    options.add_argument("--out", type=Path, default=Path("results"))
    return options
