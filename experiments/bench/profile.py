"""The time of a training step by kind of kernel: matmuls, attention, our other kernels and XLA's.

The steps are those of `bench models`. JAX's profiler records the kernels of some calls. Rows are times per call, by
kind of kernel and for the longest kernels. "8-bit matmuls": our kernels and those of cuBLASLt. "our other kernels":
quantization, transposition, norms, activations, parameter updates. "XLA's other kernels": neither matmuls nor
attention. "gaps": no kernel runs. "collectives": only collectives over GPUs run; "collectives, overlapped": other
kernels run, too. "at the peak rate": the time at 1,979 (FP8) or 989.5 TFLOP/s (bf16), or the bytes of the compiled
program at 3.35 (H100) or 4.8 TB/s (H200). On several GPUs, each has a batch as on one; kernels are those of the first.
"""

import collections
import dataclasses
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from experiments.bench import driver, models, peaks, timing, writings
from experiments.bench.peaks import EIGHT, OURS, SIXTEEN, XLA
from experiments.bench.writings import BASE

CALLS, LONGEST = 5, 12
ATTENTION, COLLECTIVES, AT_PEAK_RATE = "attention", "collectives", "at the peak"
OVERLAPPED = f"{COLLECTIVES}, overlapped"
# The first match of a kernel's name. cuBLASLt's names have "q" for 8-bit operands, and "t" or "s" for wider ones.
KINDS = (
    (COLLECTIVES, r"^nccl"),
    (EIGHT, r"(int8|fp8|mx)\w*_matmul|^_multiply$|matmul\w*_mosaic|nvjet_\w+_[qr][qr]|gemm_(e[45]|i8|s8)"),
    (SIXTEEN, r"nvjet|cutlass|gemm"),
    (ATTENTION, r"cudnn|fmha|flash"),
    (OURS, r"^_[a-z]"),
)


class KernelTime(NamedTuple):
    """A kernel launch in a profile.

    Attributes:
        name: name of the function.
        start, end: in ns.
    """

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """Kernels of consecutive calls of one program.

    Attributes:
        kernels: kernels of all calls.
        calls: number of calls.
    """

    kernels: tuple[KernelTime, ...]
    calls: int

    def by_kind(self) -> dict[str, float]:
        """Returns seconds per call of each kind of kernel, and of gaps.

        Collectives count where no other kernel runs.
        """
        spent = dict.fromkeys([name for name, _ in KINDS] + [XLA], 0.0)
        for kernel in self.kernels:
            spent[kind(kernel.name)] += 1e-9 * (kernel.end - kernel.start) / self.calls
        return spent | {COLLECTIVES: self.collectives[0], "gaps": self.gaps}

    def by_name(self) -> list[tuple[str, float, float]]:
        """Returns name, seconds and launches per call of each kernel, the longest first."""
        spent, launches = collections.Counter[str](), collections.Counter[str]()
        for kernel in self.kernels:
            spent[kernel.name] += kernel.end - kernel.start  # type: ignore[assignment]
            launches[kernel.name] += 1
        return [(name, 1e-9 * ns / self.calls, launches[name] / self.calls) for name, ns in spent.most_common()]

    @property
    def gaps(self) -> float:
        """Returns seconds per call without a running kernel, between the first and the last kernel."""
        first, last = (f(x for kernel in self.kernels for x in kernel[1:]) for f in (min, max))
        return 1e-9 * (last - first - busy(self.kernels)) / self.calls

    @property
    def collectives(self) -> tuple[float, float]:
        """Returns seconds per call in which only collectives run, and in which they and other kernels run."""
        collectives = [kernel for kernel in self.kernels if kind(kernel.name) == COLLECTIVES]
        others = [kernel for kernel in self.kernels if kind(kernel.name) != COLLECTIVES]
        alone = busy(self.kernels) - busy(others)
        return 1e-9 * alone / self.calls, 1e-9 * (busy(collectives) - alone) / self.calls


def busy(kernels: Iterable[KernelTime]) -> float:
    """Returns nanoseconds in which at least one of the kernels runs."""
    total, end = 0.0, -float("inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, end))
        end = max(end, kernel.end)
    return total


def kind(name: str) -> str:
    """Returns the kind of a kernel by its name."""
    return next((kind_name for kind_name, pattern in KINDS if re.search(pattern, name)), XLA)


def kernels(planes: Iterable[Any], device: str = "GPU") -> Iterator[KernelTime]:
    """Yields the kernels in the stream lines of a profile's first GPU plane."""
    for plane in sorted((plane for plane in planes if device in plane.name), key=lambda plane: plane.name)[:1]:
        for line in plane.lines:
            if device == "CPU" or "Stream" in line.name:
                for event in line.events:
                    yield KernelTime(event.name, event.start_ns, event.start_ns + event.duration_ns)


def profile(call: Any) -> Profile:
    """Records some calls of a compiled program, after an unrecorded call."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python calls would add gaps between kernels of small programs
    with tempfile.TemporaryDirectory() as folder, timing.left_alone():
        jax.block_until_ready(call())
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(CALLS):
                result = call()
            jax.block_until_ready(result)
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = ProfileData.from_file(str(path)).planes
        return Profile(tuple(kernels(planes, "CPU" if timing.dry() else "GPU")), CALLS)


def rows(case: str, profiles: dict[str, Profile], least: dict[str, dict[str, float]]) -> list[timing.Row]:
    """Returns rows by kind of kernel and arm, relative to bf16, with sums and the `least` seconds at the peak rate.

    Further rows have the longest kernels of each arm.
    """
    table, baseline = list[timing.Row](), profiles[BASE].by_kind()
    has_collectives = any(kind(kernel.name) == COLLECTIVES for each in profiles.values() for kernel in each.kernels)
    for name, arm_profile in profiles.items():
        spent = arm_profile.by_kind()
        for kind_name, base in (baseline | {"all": sum(baseline.values())}).items():
            value = spent.get(kind_name, sum(spent.values()))
            ratio = base / value if value and base else None
            if kind_name != COLLECTIVES or has_collectives:
                table.append(timing.row(case, name, kind_name, 1e3 * value, "ms", BASE if ratio else None, ratio))
        if has_collectives:
            table.append(timing.row(case, name, OVERLAPPED, 1e3 * arm_profile.collectives[1], "ms"))
        for kind_name, value in least.get(name, {}).items():
            if value:
                table.append(timing.row(case, name, f"{kind_name}, {AT_PEAK_RATE}", 1e3 * value, "ms"))
    for name, arm_profile in profiles.items():
        for kernel, spent_by, launches in arm_profile.by_name()[:LONGEST]:
            label = f"{case}, {name}: {kernel[:60]}"
            table.append(timing.row(label, name, f"{launches:.0f} launches", 1e3 * spent_by, "ms"))
    return table


def measure_model(user: models.UserModel, names: list[str], gpus: int = 1) -> list[timing.Row]:
    """Returns the rows of a model's training step."""
    profiles, least = {}, {}
    for name, arm in driver.built(names, lambda name: models.UserArm(user, name, gpus)).items():
        profiles[name] = profile(arm)
        arm.stop()
        least[name] = peaks.least(arm.program.as_text(), peaks.bandwidth(jax.devices()[0].device_kind))
    return rows(models.case_text(user, gpus), profiles, least)


def main(argv: list[str]) -> None:
    parser = driver.parser("profile", __doc__, file="profile_models")
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=["llama1b"], help="(default: llama1b)")
    parser.add_argument(
        "--only", nargs="+", metavar="RECIPE", help="arms in addition to bf16 (default: the arms of the model)"
    )
    parser.add_argument("--gpus", type=int, default=1, help=models.GPUS_HELP)
    options = parser.parse_args(argv)
    for arm in options.only or ():
        writings.get_recipe(arm)
    timing.need_gpu()
    title = "Time per kernel: training steps of user-written models"
    file = driver.ResultsFile(options, title, driver.notes_of(__doc__), devices=options.gpus)
    for name in options.models:
        user = models.MODELS[name]
        file.add(measure_model(user, list(dict.fromkeys([BASE, *(options.only or user.arms)])), options.gpus))
    file.end()
