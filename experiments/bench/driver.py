"""Shared parts of benchmarks: options, results files, and arms of whole steps, which are compiled and timed in turns.

An arm of a step holds a state, and is timed by `timed`. One of a kernel or a layer is a function of operands, and is
timed by `timing.seconds`.
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

from experiments.bench import timing
from experiments.results import record


class Arm:
    """A compiled step and the state that it updates.

    Attributes:
        begin: makes the first state; jitted, so that `prepare` can compile it.
        build: compiles the step, which takes the state and `inputs` and gives the next state and a value.
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
        """Makes the state."""
        self.state = self.begin()

    def __call__(self) -> Any:
        """One step; its value."""
        if self.state is None:
            self.start()
        self.state, value = self.program(self.state, *self.inputs)
        return value

    def synchronised(self) -> Any:
        """One step, and the host waits for its value."""
        return jax.block_until_ready(self())

    def stop(self) -> None:
        """Frees the state."""
        jax.tree.map(lambda x: x.delete(), self.state)
        self.state = None


def memory(program: Any) -> tuple[float, float]:
    """GB of temporaries, and of everything, while a compiled step runs, on each GPU."""
    stats = program.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.temp_size_in_bytes / 1e9, (stats.argument_size_in_bytes + stats.temp_size_in_bytes + results) / 1e9


def built(names: Sequence[str], make: Callable[[str], Any], limit: float = math.inf) -> dict[str, Any]:
    """The arms that compile and run a step. The others are printed, with those that the time limit leaves out.

    One is compiled while the next one is traced; nothing runs then, for XLA measures which products are fastest.

    Args:
        names: of arms; all are compared with the first.
        make: from a name to an `Arm`.
        limit: seconds after which no further arm is traced.

    Raises:
        RuntimeError: the first arm does not run.
    """
    arms: dict[str, Any] = {}
    waiting: tuple[str, Any, Any] | None = None
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for name in [*names, None]:
            start, arm = time.perf_counter(), None
            late = start - begin > limit
            if late and name is not None:
                print(f"  {name}: left out, the time limit is reached", flush=True)
            try:
                arm = None if name is None or late else make(name)
            except Exception as problem:
                timing.report_failure(str(name), problem)
            if waiting is not None:
                before, ready, compiling = waiting
                try:
                    compiling.result()
                    jax.block_until_ready(ready())
                    ready.stop()
                    arms[before] = ready
                except Exception as problem:
                    timing.report_failure(before, problem)
            waiting = None if name is None or arm is None else (name, arm, pool.submit(arm.prepare))
            if arm is not None:
                print(f"  {name}: traced, and the one before ran, in {time.perf_counter() - start:.0f} s", flush=True)
    if names[0] not in arms:
        raise RuntimeError(f"{names[0]!r}, the baseline of all arms, does not run")
    return arms


def timed(arms: Mapping[str, Any], rounds: int, steps: int) -> dict[str, timing.Seconds]:
    """Seconds of a step of each arm, in turns. A loss is read when the next step has started; one state at a time."""
    calls = {name: timing.late(arm) for name, arm in arms.items()}
    return timing.in_turns(calls, rounds, dict.fromkeys(arms, steps), lambda name: arms[name].stop())


def time_row(case: str, name: str, metric: str, seconds: timing.Seconds, base: str | None = None,
             ratio: float | None = None) -> timing.Row:  # fmt: skip
    """A row of milliseconds, with its quartiles."""
    return timing.row(case, name, metric, 1e3 * seconds, "ms", base, ratio, seconds.quartiles(lambda t: 1e3 * t))


def notes_of(doc: str | None) -> list[str]:
    """The paragraphs of a module's docstring after its first line, each on one line."""
    return [" ".join(part.split()) for part in (doc or "").split("\n\n")[1:]]


def rate_row(case: str, name: str, metric: str, seconds: timing.Seconds, work: float, unit: str,
             base: str | None = None, ratio: float | None = None) -> timing.Row:  # fmt: skip
    """A row of `work` over seconds, with its quartiles."""
    rate = work.__truediv__
    return timing.row(case, name, metric, rate(seconds), unit, base, ratio, seconds.quartiles(rate))


@jax.jit
def relative_error(actual: Any, expected: Any) -> jax.Array:
    """The largest relative error, norm(actual - expected) / norm(expected), over the leaves of two trees of arrays."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(one, actual, expected))))


class ResultsFile:
    """The results file of a benchmark, OUT/CARD/NAME.json, written again after each case.

    Args:
        options: of `parser`.
        title: headline.
        notes: sentences below the table.
        devices: that are used.
        versions: of packages besides the usual.
        last_resort: baseline of cases without a peer, as of `timing.compared`.

    Attributes:
        rows: so far.
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
        """Adds rows, and writes a file that is not complete: it would be measured again."""
        self.rows += rows
        self._write(is_complete=False)

    def end(self, *metrics: str) -> None:
        """Writes the whole file, with geometric means of the ratios of some metrics, and a plot of all ratios next to
        it."""
        self.rows += [row for metric in metrics for row in timing.means(self.rows, metric, self._last_resort)]
        path = self._write(is_complete=True)
        timing.plot(self.rows, self._title, path.with_suffix(".png"), self._last_resort)

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
    """A command line without --out, which does not affect the results."""
    before = ["", *arguments]
    return [a for a, last in zip(arguments, before, strict=False) if last != "--out" and not a.startswith("--out")]


def parser(
    name: str,
    doc: str | None,
    *,
    rounds: int | None = None,
    steps: int | None = None,
    burst: float | None = None,
    file: str | None = None,
) -> argparse.ArgumentParser:
    """The command line that all have: --name, of the results file, and --out; the others, if they have a default."""
    options = argparse.ArgumentParser(
        prog=f"python -m experiments.bench {name}", description=(doc or "").partition("\n\n")[0]
    )
    if rounds is not None:
        options.add_argument("--rounds", type=int, default=rounds)
    if steps is not None:
        options.add_argument("--steps", type=int, default=steps, help="of a round, untimed and then as many timed")
    if burst is not None:
        options.add_argument("--burst", type=float, default=burst, help="seconds of a round of an implementation")
    options.add_argument("--name", default=file or name, help="of the results file")
    options.add_argument("--out", type=Path, default=Path("results"))
    return options
