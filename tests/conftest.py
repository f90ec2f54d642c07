"""Eight CPU devices for the sharding tests, and tests marked `gpu` only where a GPU is.

Most of the time here goes into compiling small programs that run once. So LLVM optimizes nothing, gets each program in
one piece, and gets loops at once, not through MLIR (what XLA's passes do to a program stays the same); Python looks for
garbage less often; and compiled programs are kept in .cache for the other worker and the next run, all of them: the
smallest takes five times as long to compile as to read, and to keep the cache below a size, JAX would look through it
at each program. Where JAX_COMPILATION_CACHE_DIR is empty, none are.
Where Python is told to write no bytecode, the processes that tests start write theirs in .cache too.
"""

import collections
import gc
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

GPU = os.environ.get("FP8JAX_TEST_GPU") == "1"
if not GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for flag in (
        "xla_force_host_platform_device_count=8",
        "xla_backend_optimization_level=0",
        "xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        "xla_cpu_parallel_codegen_split_count=1",
    ):
        if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}"
    programs = pathlib.Path(__file__).parents[1] / ".cache" / "xla"
    if "PYTEST_XDIST_WORKER" not in os.environ and sum(x.stat().st_size for x in programs.glob("*")) > 1 << 30:
        shutil.rmtree(programs)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # Of the calls that lead to an equation its location keeps the innermost, which takes a twentieth of the time less.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "1")
# Kernels are compiled where a test looks at what they become, not taken from the user's folder.
os.environ.setdefault("FP8JAX_KERNEL_CACHE", "")
# Tables and sentences fold at the terminal's width, whatever it is here: where tests read them they are whole.
os.environ["COLUMNS"] = "300"
if sys.dont_write_bytecode and os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(pathlib.Path(__file__).parents[1] / ".cache" / "bytecode"))

gc.set_threshold(50_000, 20, 50)

import jax
import pytest

from fp8jax.ops.dispatch import choice
from fp8jax.rewrite import training
from tests.kernels import h200

# The kernels for Hopper and their interpreter are of jax 0.11.
collect_ignore = ["kernels/test_matmul.py"] if jax.__version_info__ < (0, 11) else []


@pytest.fixture
def inspected() -> Iterator[None]:
    """Gradients are looked at, and no model is trained: statistics of scalings may be lost."""
    with training.suppress_training_checks():
        yield


@pytest.fixture
def young_heap() -> Iterator[None]:
    """Python's garbage collector looks at no object older than the test: the suite's heap takes seconds each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def own_traces() -> Iterator[None]:
    """What a test puts in place of a part of a kernel's call is in no trace of an earlier test, nor of a later one."""
    choice.clear_trace_cache()
    yield
    choice.clear_trace_cache()


def pytest_configure() -> None:
    """With FP8JAX_TEST_COMPILE=1, as `make test` sets it, no test of a kernel is skipped where its packages exist."""
    if os.environ.get("FP8JAX_TEST_COMPILE") == "1" and h200.wheels() and (reason := h200.missing()):
        raise pytest.UsageError(reason)


# CPU seconds of this process and of its children that have ended, at the end of the last phase of a test.
_cpu_seconds = 0.0


def _read_cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    global _cpu_seconds
    _cpu_seconds = _read_cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Adds the phase's CPU seconds to its report, which also a worker of pytest-xdist sends."""
    global _cpu_seconds
    report = yield
    now = _read_cpu_seconds()
    report.cpu_seconds, _cpu_seconds = now - _cpu_seconds, now
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if reason := h200.missing():
        terminalreporter.write_line(f"No kernel was compiled for a GPU or interpreted: {reason}", yellow=True)
    reports = [x for kind in terminalreporter.stats.values() for x in kind if hasattr(x, "cpu_seconds")]
    if len({report.nodeid for report in reports}) > 1:
        _write_durations(terminalreporter, reports, files=config.option.verbose >= 0)


def _write_durations(terminalreporter: pytest.TerminalReporter, reports: list, files: bool) -> None:
    """Writes tests and CPU seconds of each folder of `tests`, and with -v of each file."""
    tests, seconds = collections.defaultdict(set), collections.Counter[str]()
    for report in reports:
        file = pathlib.PurePath(report.nodeid.partition("::")[0])
        names = ["all", file.parent.as_posix(), *([file.as_posix()] if files else [])]
        for name in names:
            tests[name].add(report.nodeid)
            seconds[name] += report.cpu_seconds
    terminalreporter.write_sep("=", "CPU seconds by folder")
    for name, cpu in seconds.most_common():
        terminalreporter.write_line(f"{cpu:8.1f} s {len(tests[name]):6} tests  {name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # Keywords hold names of folders, too.
            item.add_marker(pytest.mark.skip(reason="no GPU; set FP8JAX_TEST_GPU=1 on a machine with one"))
