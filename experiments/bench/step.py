"""Training steps by recipe and mesh, compared with bf16 on the same mesh: time, memory, bytes exchanged.

The step is that of `experiments.train`: loss, gradients, clipping and AdamW, with fp32 weights. "bf16" saves what
Flax's modules save. The baseline, "bf16, rematerialized", saves only the outputs of matmuls and attention. The recipes
rematerialize what `--remat auto` of `experiments.train` does. The host reads the result of a step after it has started
the next one.

"temporary memory" is the memory of the compiled program without its arguments. "memory" is the total. Both are per GPU.
Arms of torch are the same model with torch.compile (`experiments.bench.step_torch`), in a process of their own. Their
memory is that of torch's allocator.
"""

import argparse
import collections
import functools
import math
import os
import re
from collections.abc import Mapping
from typing import Any

# A memory pool that grows in pieces is too fragmented for the largest steps.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import jax
import jax.numpy as jnp
import numpy as np

from experiments import mesh, plan
from experiments.bench import driver, step_torch, timing
from experiments.bench.arms import BF16, CHANGES, REMATERIALIZED, STEP_PARTS, parse, settings
from experiments.models import sizes
from experiments.models.llama import LlamaConfig
from experiments.train import config, speed
from experiments.train.form import in_chunks
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task
from fp8jax.ops.dispatch import choice

VOCAB = 32_000
# Steps in which fallback thresholds adapt, each by at most a factor of 1.3. At first all blocks fall back.
SETTLING = 30
DRY = LlamaConfig(vocab=64, dim=64, layers=2, heads=2, kv_heads=2, mlp_dim=128)
ARMS = (REMATERIALIZED, BF16, "te_current", "coat", "coat_fast", "moss", "fast")
MESHES = {
    "one": "one GPU",
    "data": "data parallel over {}",
    "fsdp": "FSDP over {}",
    "tensor": "tensor parallel over {}",
}
_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_ARRAY = re.compile(r"([a-z]+\d+\w*)\[([\d,]*)\]")


def largest_batch(name: str, llama: LlamaConfig, length: int, mesh_name: str, gigabytes: float) -> int:
    """Returns the largest batch per GPU of an arm whose planned memory is at most `gigabytes` per GPU.

    Raises:
        ValueError: not even one sequence fits.
    """
    recipe, remat, *_ = settings(name)
    sizes_of_axes = axes(mesh_name, 1 if mesh_name == "one" else jax.device_count())

    def fits(batch: int) -> bool:
        planned = plan.of(llama, recipe, sizes_of_axes, batch * length, recompute=bool(remat))
        return planned.total <= 1e9 * gigabytes

    batch = next(n for n in range(1, 1025) if not fits(n)) - 1
    if batch == 0:
        raise ValueError(f"arm {name!r}: one sequence of {length} tokens needs more than --fit {gigabytes:g} GB a GPU")
    return batch


def axes(mesh_name: str, count: int) -> dict[str, int]:
    """Returns the sizes of mesh axes: those in the name, such as "fsdp=2,tensor=2", or all devices on one axis."""
    return (
        mesh.parse(mesh_name) if "=" in mesh_name else {name: count if name == mesh_name else 1 for name in mesh.AXES}
    )


def describe_mesh(mesh_name: str) -> str:
    """Returns a description of a mesh."""
    return MESHES[mesh_name].format(jax.device_count()) if mesh_name in MESHES else f"mesh {mesh_name}"


class StepArm(driver.Arm):
    """A recipe's step on a mesh, with its state."""

    def __init__(self, name: str, model: LlamaConfig, batch: int, length: int, mesh_name: str) -> None:
        devices = jax.devices()[:1] if mesh_name == "one" else jax.devices()
        sizes_of_axes = axes(mesh_name, len(devices))
        count = math.prod(sizes_of_axes.values())
        data, fsdp, tensor, expert = (sizes_of_axes[name] for name in mesh.AXES)
        self.mesh = mesh.make(data, fsdp, devices, tensor=tensor, expert=expert)
        self.config, self.count, self.batch, self.length = model, count, batch, length
        recipe, remat, kernels, chunked = settings(name)
        chunked = in_chunks("auto", batch * length, model.vocab) if chunked is None else chunked
        optimizer = make_optimizer(config.Config(), recipe)
        rows = mesh.batches(self.mesh)
        self.task = Task(
            self.config, optimizer, recipe, remat=remat, seed=0, rows=rows if count > 1 else None, chunked=chunked
        )
        self.shapes = jax.eval_shape(self.task.init)
        self.placed = placed = mesh.state(self.mesh, self.shapes)
        self.decides = any(part.is_threshold for part in recipe.linear.stateful_strategies.values())
        self.settled: Any = None
        self.tokens = jax.device_put(
            jax.random.randint(jax.random.key(1), (batch * count, length + 1), 0, model.vocab, jnp.int32), rows
        )
        self.inputs = (self.tokens,)
        self.begin = jax.jit(self.task.init, out_shardings=placed)
        shardings = {"in_shardings": (placed, rows), "out_shardings": (placed, None)}
        with choice.target(kernels=kernels):
            self.build = timing.lowered(self.task.step, self.shapes, self.tokens, donate_argnums=0, **shardings)

    def start(self) -> None:
        """Creates the state. Fallback thresholds are those after adaptation."""
        super().start()
        if not self.decides or timing.dry():
            return
        if self.settled is None:
            for _ in range(SETTLING):
                self.state, _ = self.program(self.state, self.tokens)
            self.settled = jax.tree.map(np.array, jax.device_get(self.state.model_state))
            self.stop()
            self.state = self.begin()
        states = jax.device_put(self.settled, self.placed.model_state)
        self.state = self.state._replace(model_state=states)

    @property
    def tokens_per_step(self) -> int:
        return self.tokens.shape[0] * self.length

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls and the causal attention of a step, forward and backward."""
        return self.tokens_per_step * speed.operations(self.config, self.shapes.params, {}, self.length)

    def exchanged(self) -> dict[str, float]:
        """Returns MB that a device sends or receives in collectives of a step, by kind and dtype. Loops count once."""
        if self.count == 1:
            return {}
        totals: dict[str, float] = collections.defaultdict(float)
        for line in (self.program.as_text() or "").splitlines():
            if match := _COLLECTIVE.search(line):
                # The result of an asynchronous collective is the last element of a tuple.
                arrays = _ARRAY.findall(match[1])
                arrays = arrays[len(arrays) // 2 :] if match[3] else arrays
                for dtype, shape in arrays:
                    bits = int(re.findall(r"\d+", dtype)[0])
                    totals[f"{match[2]} {dtype}"] += math.prod(map(int, filter(None, shape.split(",")))) * bits / 8e6
        return dict(totals)


def main(argv: list[str]) -> None:
    parser = driver.parser("step", __doc__, rounds=5, steps=5)
    parser.add_argument("--model", default="1b", choices=sizes.NAMES, metavar="SIZE", help="default: 1b")
    parser.add_argument("--vocab", type=int, default=VOCAB, help="entries of the vocabulary")
    parser.add_argument("--batch", type=int, default=8, help="sequences per GPU")
    parser.add_argument(
        "--fit",
        type=float,
        metavar="GB",
        help="use the largest batch that fits according to `experiments.plan`, by arm",
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument(
        "--arm",
        nargs="+",
        default=list(ARMS),
        help=f"recipes, with one of {', '.join((*CHANGES, *STEP_PARTS))} after a comma, or several; "
        f"{REMATERIALIZED!r} is always included",
    )
    parser.add_argument(
        "--torch", nargs="*", choices=step_torch.ARMS, default=list(step_torch.ARMS), help="arms of torch.compile"
    )
    parser.add_argument(
        "--mesh",
        nargs="+",
        help=f"{', '.join(MESHES)} (default: those that fit the GPUs of this host), or sizes of several axes, such as "
        "fsdp=2,tensor=2; GPUs along tensor share sequences",
    )
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further arm is compiled")
    options = parser.parse_args(argv)
    try:
        for arm in options.arm:
            parse(arm, STEP_PARTS)
        for mesh_name in options.mesh or ():
            if mesh_name not in MESHES:
                mesh.parse(mesh_name)
    except ValueError as error:
        parser.error(str(error))
    if timing.dry():
        options.batch, options.length = 1, 64
    llama = DRY if timing.dry() else sizes.get(options.model, options.vocab)
    # Before JAX allocates the GPU's memory.
    torch = step_torch.measured(options.torch, llama, options.batch, options.length, options.rounds, options.steps)
    timing.need_gpu()
    measure(llama, options, torch)


def measure(
    llama: LlamaConfig, options: argparse.Namespace, torch: Mapping[str, step_torch.TorchTimes] | None = None
) -> None:
    """Times the arms of each mesh in turns and writes OUT/CARD/NAME.json, including the results of torch."""
    notes = [
        *driver.notes_of(__doc__),
        "The optimizer clips and updates in one pass. The arms run in turns, in another order in each round, each from "
        f"a new state. Thresholds of fallback blocks first adapt in {SETTLING} steps. Steps follow each other without "
        "waiting. Figures are medians.",
        "MFU counts matmuls and causal attention, forward and backward, relative to the dense bf16 peak of the GPU's "
        "data sheet. The bytes exchanged are those of the compiled program. A loop over layers counts once.",
    ]
    mesh_names = options.mesh or [mesh_name for mesh_name in MESHES if mesh_name == "one" or jax.device_count() > 1]
    count = 1 if mesh_names == ["one"] else jax.device_count()
    size = f"{options.model} on {count} GPUs" if count > 1 else options.model
    file = driver.ResultsFile(options, f"Whole training steps, {size}", notes, devices=count)
    for mesh_name in mesh_names:
        batches = f"{options.batch}" if options.fit is None else f"what fits in {options.fit:g} GB"
        entries = "" if options.vocab == VOCAB else f", {options.vocab:,} entries"
        case = f"{options.model}, {describe_mesh(mesh_name)}, {batches} x {options.length} tokens{entries}"
        names = list(dict.fromkeys([REMATERIALIZED, *options.arm]))
        arms = driver.built(names, functools.partial(_arm, llama, mesh_name, options), options.limit)
        file.add([timing.row(case, name, "failed", None, "") for name in names if name not in arms])
        memories = {name: driver.memory(arm.program) for name, arm in arms.items()}
        times = driver.timed(arms, options.rounds, options.steps)
        for name, arm in arms.items():
            file.add(rows(case, name, arm, arms[REMATERIALIZED], times, memories))
        for name, torch_times in (torch or {}).items() if mesh_name == "one" else ():
            baseline = arms[REMATERIALIZED]
            file.add(
                common(
                    case,
                    name,
                    torch_times.late,
                    times[REMATERIALIZED],
                    baseline,
                    baseline,
                    torch_times.memory,
                    memories[REMATERIALIZED],
                )
            )
    file.end()


def _arm(llama: LlamaConfig, mesh_name: str, options: argparse.Namespace, name: str) -> StepArm:
    batch = options.batch
    if options.fit is not None:
        batch = largest_batch(name, llama, options.length, mesh_name, options.fit)
    return StepArm(name, llama, batch, options.length, mesh_name)


def rows(
    case: str,
    name: str,
    arm: StepArm,
    baseline: StepArm,
    times: Mapping[str, timing.Seconds],
    sizes: Mapping[str, tuple[float, float]],
) -> list[timing.Row]:
    """Returns the rows of an arm, relative to `baseline` (rematerialized bf16)."""
    row = functools.partial(timing.row, case, name)
    table = common(case, name, times[name], times[REMATERIALIZED], arm, baseline, sizes[name], sizes[REMATERIALIZED])
    if arm.batch != baseline.batch:
        table.append(row("batch", arm.batch, "sequences a GPU"))
    return table + [row(f"exchanged, {kind}", value, "MB") for kind, value in arm.exchanged().items()]


def common(
    case: str,
    name: str,
    median: timing.Seconds,
    base: timing.Seconds,
    arm: StepArm,
    baseline: StepArm,
    needs: tuple[float, float],
    base_needs: tuple[float, float],
) -> list[timing.Row]:
    """Returns time, speed and memory of an arm like `arm`, relative to `baseline` (rematerialized bf16)."""
    row = functools.partial(timing.row, case, name)
    rate, base_rate = arm.tokens_per_step / median, baseline.tokens_per_step / base
    same_batch = arm.batch == baseline.batch  # otherwise only tokens/s are comparable
    compared = (REMATERIALIZED, base / median) if same_batch else (None, None)
    table = [driver.time_row(case, name, "step", median, *compared)]
    table.append(
        row("tokens/s", rate, "", None if same_batch else REMATERIALIZED, None if same_batch else rate / base_rate)
    )
    if (peak := speed.peak(jax.devices()[0].device_kind)) is not None:
        table.append(row("MFU", arm.flops / median / (peak * arm.count), ""))
    for i, metric in enumerate(("temporaries", "memory")):
        table.append(row(metric, needs[i], "GB a GPU", REMATERIALIZED, base_needs[i] / needs[i]))
    return table
