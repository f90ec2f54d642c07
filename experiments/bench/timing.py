"""Times the arms of a case in turns, in one process, and records medians, quartiles and ratios."""

import concurrent.futures
import contextlib
import gc
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.ops.dispatch import choice

Row = dict[str, Any]
L2_BYTES = 50 << 20


def copies(bytes_of_one: int) -> int:
    """Returns the number of operand sets of a program, to exceed the L2 cache and to hide the start of the program."""
    return int(max(8, -(-3 * L2_BYTES // bytes_of_one)))


class DryProgram:
    """Replaces a compiled program in a dry run. It is traced for a Hopper GPU, and its results are zeros."""

    def __init__(self, function: Callable[..., Any], *operands: Any) -> None:
        with choice.target(capability=90):
            self.shapes = jax.eval_shape(function, *operands)

    def __call__(self, *_: Any) -> Any:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.shapes)

    def as_text(self) -> str:
        return ""

    def memory_analysis(self) -> Any:
        parts = ("temp", "argument", "output", "alias")
        return types.SimpleNamespace(**{f"{part}_size_in_bytes": 1 for part in parts})


def traced(function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """Compiles a function for operands, with options of `jax.jit`. In a dry run, returns a `DryProgram`."""
    return lowered(function, *operands, **options)()


def lowered(function: Callable[..., Any], *operands: Any, **options: Any) -> Callable[[], Any]:
    """Lowers a function now, and returns a function that compiles it, in any thread."""
    if dry():
        program = DryProgram(function, *operands)
        return lambda: program
    return jax.jit(function, **options).lower(*operands).compile


def compiled(
    functions: Mapping[str, Callable[..., Any]], sets: Sequence[tuple[Any, ...]], workers: int = 12
) -> dict[str, Callable]:
    """Compiles each function over all sets of operands, and runs it once. Functions that fail are reported and skipped.

    `workers` limits simultaneous compilations. They disturb each other if XLA measures the algorithms of cuBLASLt.
    """

    def build(function: Callable[..., Any]) -> Callable[[], Any]:
        program = traced(lambda sets: [function(*x) for x in sets], sets)
        jax.block_until_ready(program(sets))
        return lambda: program(sets)

    start, ready = time.perf_counter(), {}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = {name: pool.submit(build, function) for name, function in functions.items()}
    for name, future in futures.items():
        try:
            ready[name] = future.result()
        except Exception as problem:
            report_failure(name, problem)
    print(f"  compiled in {time.perf_counter() - start:.0f} s", flush=True)
    return ready


def report_failure(name: str, problem: Exception) -> None:
    """Prints why an implementation has no rows. A dry run raises the error."""
    if dry():
        raise problem
    print(f"  {name} failed: {type(problem).__name__} {str(problem)[:300]}".replace("\n", " "), flush=True)


def keep_triton_cache() -> None:
    """Unsets TRITON_CACHE_DIR if jax-triton has set it to "": kernels of torch and peers need a folder."""
    if not os.environ.get("TRITON_CACHE_DIR"):
        os.environ.pop("TRITON_CACHE_DIR", None)


class Seconds(float):
    """A median time, with the times of all rounds."""

    rounds: Sequence[float]

    def __new__(cls, rounds: Sequence[float]) -> "Seconds":
        self = super().__new__(cls, statistics.median(rounds))
        self.rounds = tuple(rounds)
        return self

    def quartiles(self, convert: Callable[[float], float] = float) -> list[float]:
        """Returns the lower and upper quartile of the rounds, after a conversion, such as to a rate."""
        low, high = np.percentile([convert(t) for t in self.rounds], [25, 75])
        return [float(low), float(high)]


def seconds(ready: dict[str, Callable], rounds: int, burst: float) -> dict[str, Seconds]:
    """Returns the median time per call of each function, `in_turns`, with rounds of about `burst` seconds."""
    burst = 0.0 if dry() else burst
    calls = {name: max(2, int(burst / max(_run(call, 2), 1e-6))) for name, call in ready.items()}
    return in_turns(ready, rounds, calls)


def in_turns(
    ready: dict[str, Callable],
    rounds: int,
    calls: dict[str, int],
    after: Callable[[str], None] = lambda name: None,
) -> dict[str, Seconds]:
    """Returns the median time per call of each function, over rounds of untimed and timed calls.

    The order differs in each round: the previous arm affects the GPU's clock for longer than the untimed calls. `after`
    is called with the name of an arm after its turn. Existing objects are frozen for Python's garbage collector: a
    collection of all objects from tracing would interrupt rounds (docs/faq.md).
    """
    rounds, calls = (1, dict.fromkeys(ready, 1)) if dry() else (rounds, calls)
    names = list(ready)
    times: dict[str, list[float]] = {name: [] for name in names}
    order = np.random.default_rng()
    with left_alone():
        for _ in range(rounds):
            for i in order.permutation(len(names)):
                times[names[i]].append(_run(ready[names[i]], calls[names[i]]))
                after(names[i])
    return {name: Seconds(t) for name, t in times.items()}


def late(step: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a step function that reads the result of the previous step after starting the next.

    The GPU always has a pending step, so it never waits for the host.
    """
    latest: Any = None

    def call() -> Any:
        nonlocal latest
        previous, latest = latest, step()
        return jax.block_until_ready(latest if previous is None else previous)

    return call


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """A context in which Python's garbage collector ignores existing objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run(call: Callable, calls: int) -> float:
    begin = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
    return (time.perf_counter() - begin) / calls


def row(case: str, impl: str, metric: str, value: float | None, unit: str, baseline: str | None = None,
        ratio: float | None = None, quartiles: Sequence[float] | None = None) -> Row:  # fmt: skip
    """Returns a row of a results file, and prints it. `quartiles` are those of the value."""
    ratio_text = f"   {ratio:.3f} of {baseline}" if ratio is not None else ""
    shown = "-" if value is None else f"{value:.4g}"
    spread = f" ({quartiles[0]:.4g} to {quartiles[1]:.4g})" if quartiles else ""
    print(f"  {case:26s} {impl:38s} {metric:10s} {shown:>9s} {unit}{spread}{ratio_text}", flush=True)
    fields = {"case": case, "impl": impl, "metric": metric, "value": value, "unit": unit, "baseline": baseline,
             "ratio": ratio}  # fmt: skip
    return fields | ({"quartiles": list(quartiles)} if quartiles else {})


MEAN = "geometric mean"


def compared(rows: Sequence[Row], metric: str, last_resort: str | None = None) -> dict[str, list[Row]]:
    """Returns the rows of each implementation that have a ratio.

    Rows relative to `last_resort` are left out if other cases have a peer as baseline.
    """
    groups: dict[str, list[Row]] = {}
    for r in rows:
        if r["metric"] == metric and r["ratio"] and not r["case"].startswith(MEAN):
            groups.setdefault(r["impl"], []).append(r)
    for impl, mine in groups.items():
        if {r["baseline"] for r in mine} != {last_resort}:
            groups[impl] = [r for r in mine if r["baseline"] != last_resort]
    return groups


def means(rows: Sequence[Row], metric: str, last_resort: str | None = None) -> list[Row]:
    """Returns geometric means of the ratios of each implementation over its `compared` cases. Prints their number."""
    cases = {r["case"] for r in rows}
    means = []
    for impl, mine in compared(rows, metric, last_resort).items():
        baselines = {r["baseline"] for r in mine}
        against = baselines.pop() if len(baselines) == 1 else "best peer"
        label = MEAN + (f" of {len(mine)}" if len(mine) < len(cases) else "")
        means.append(row(label, impl, metric, None, "", against, mean_ratio(mine)))
    return means


def mean_ratio(rows: Sequence[Row]) -> float:
    """Returns the geometric mean of the ratios."""
    return float(np.exp(np.mean([np.log(r["ratio"]) for r in rows])))


def dry() -> bool:
    """Returns whether this is a dry run: small operands, programs that are traced but not run, results of zeros."""
    return bool(os.environ.get("FP8JAX_DRY"))


def need_gpu() -> None:
    """Exits if there is no GPU: benchmarks have no fallback. Prints the device and XLA's flags."""
    device = jax.devices()[0]
    if device.platform != "gpu" and not dry():
        sys.exit(f"this benchmark needs a GPU, found {device.device_kind}; it never falls back")
    print(f"{device.device_kind}, XLA_FLAGS={os.environ.get('XLA_FLAGS', '')}", flush=True)
