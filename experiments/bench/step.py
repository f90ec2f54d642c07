"""Whole training steps by recipe and mesh, against bf16 of the same mesh: time, memory, what the devices exchange.

The step is that of `experiments.train`: loss, gradients, clipping and AdamW, weights in fp32. "bf16" keeps for the
backward pass what Flax's modules keep; the baseline is "bf16, recomputed", which keeps of a block what its products and
attention give and computes the rest again, as a good engineer would have it. Recipes recompute what `--remat auto` of
`experiments.train` does. "temporaries" are what the compiled program needs beside its arguments, "memory" all of it, on
each GPU. Where torch and torchao are importable, the same model by torch.compile stands beside it
(`experiments.bench.step_torch`).
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# torch's arms need room beside JAX; a pool that grows piece by piece can't hold the largest steps in one piece.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false" if find_spec("torch") else "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import jax
import jax.numpy as jnp

import fp8jax
from experiments import config, mesh, plan, train
from experiments.bench import step_torch, timing
from experiments.models import sizes
from experiments.models.llama import LlamaConfig
from experiments.tables.coat_memory import AGAIN
from experiments.task import Task, fastest
from fp8jax.ops import choice
from fp8jax.recipes import Comm

BF16, VOCAB = "bf16", 32_000
ARMS = (AGAIN, BF16, "te_current", "coat", "coat_fast", "moss", "fast")
# Dense bf16 products of an H100 or H200, NVIDIA's data sheet: what MFU is given against.
PEAK_FLOPS = 989.5e12
# Arms such as "coat, 8-bit gradients" are recipes whose gradients travel so over several GPUs.
GRADIENTS = {"8-bit gradients": Comm("e4m3"), "8-bit gradients, one phase": Comm("e4m3", "one_phase")}
# Or they keep what another choice than training's own keeps.
KEEPING: dict[str, bool | str] = {"as written": False, "recomputed": "products"}
MESHES = {"one": "one GPU", "data": "data parallel over {}", "fsdp": "FSDP over {}"}
_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_ARRAY = re.compile(r"([a-z]+\d+\w*)\[([\d,]*)\]")


def settings(name: str) -> tuple[fp8jax.Recipe, bool | str]:
    """The recipe of an arm, and what it recomputes.

    Raises:
        ValueError: there is no such recipe, or what follows its name is unknown.
    """
    preset, _, how = name.partition(", ")
    recipe = fp8jax.recipes.get(preset)
    if how in GRADIENTS:
        recipe = dataclasses.replace(recipe, comm=GRADIENTS[how])
    elif how and how not in KEEPING:
        raise ValueError(f"arm {name!r}: after the recipe stands nothing, or one of {[*KEEPING, *GRADIENTS]}")
    return recipe, False if name == BF16 else KEEPING.get(how, fastest(recipe))


def largest_batch(name: str, llama: LlamaConfig, length: int, where: str, gigabytes: float) -> int:
    """Sequences for each GPU of an arm with which a plan stays within so many GB a GPU.

    Raises:
        ValueError: not even one fits.
    """
    recipe, remat = settings(name)
    count = 1 if where == "one" else jax.device_count()
    sizes_of_axes = {"data": 1 if where == "fsdp" else count, "fsdp": count if where == "fsdp" else 1}

    def fits(batch: int) -> bool:
        planned = plan.of(llama, recipe, sizes_of_axes, batch * length, recompute=bool(remat))
        return planned.total <= 1e9 * gigabytes

    batch = next(n for n in range(1, 1025) if not fits(n)) - 1
    if batch == 0:
        raise ValueError(f"arm {name!r}: one sequence of {length} tokens needs more than --fit {gigabytes:g} GB a GPU")
    return batch


class StepArm:
    """A recipe's step on a mesh, and the state that it updates."""

    def __init__(
        self, name: str, model: LlamaConfig, batch: int, length: int, where: str, unroll: int | None = None
    ) -> None:
        devices = jax.devices()[:1] if where == "one" else jax.devices()
        count = len(devices)
        self.mesh = mesh.make(1 if where == "fsdp" else count, count if where == "fsdp" else 1, devices)
        self.config, self.count, self.batch, self.length = model, count, batch, length
        recipe, remat = settings(name)
        optimizer = train.make_optimizer(config.Config(), recipe)
        rows = mesh.batches(self.mesh)
        how: dict[str, Any] = {"remat": remat, "rows": rows if count > 1 else None, "unroll": unroll}
        self.task = Task.build(self.config, optimizer, recipe, seed=0, **how)
        shapes = jax.eval_shape(self.task.init)
        placed = mesh.state(self.mesh, shapes)
        self.tokens = jax.device_put(
            jax.random.randint(jax.random.key(1), (batch * count, length + 1), 0, model.vocab, jnp.int32), rows
        )
        run = jax.jit(self.task.step, donate_argnums=0, in_shardings=(placed, rows), out_shardings=(placed, None))
        self.program = run.lower(shapes, self.tokens).compile()
        self.placed, self.shapes = placed, shapes
        self.state: Any = None

    def start(self) -> None:
        """Makes the state."""
        self.state = jax.jit(self.task.init, out_shardings=self.placed)()

    def stop(self) -> None:
        """Frees the state."""
        jax.tree.map(lambda x: x.delete(), self.state)
        self.state = None

    def __call__(self) -> Any:
        if self.state is None:
            self.start()
        self.state, metrics = self.program(self.state, self.tokens)
        return metrics

    @property
    def tokens_per_step(self) -> int:
        return self.tokens.shape[0] * self.length

    @property
    def flops(self) -> float:
        """Of the products and the causal attention of a step, forward and backward."""
        paths = jax.tree_util.tree_leaves_with_path(self.shapes.params)
        named = [(jax.tree_util.keystr(path), x) for path, x in paths]
        # The embedding is looked up; norms of all layers have two axes.
        matrices = sum(x.size for name, x in named if x.ndim >= 2 and "norm" not in name and "embed" not in name)
        attention = 6 * self.config.layers * self.config.dim * self.length
        return float(self.tokens_per_step * (6 * matrices + attention))

    def exchanged(self) -> dict[str, float]:
        """MB that a device gives or gets in collectives of a step, by kind and dtype; loops count once."""
        totals: dict[str, float] = collections.defaultdict(float)
        for line in (self.program.as_text() or "").splitlines():
            if match := _COLLECTIVE.search(line):
                # Of an asynchronous collective the result is the last part of a tuple.
                arrays = _ARRAY.findall(match[1])
                arrays = arrays[len(arrays) // 2 :] if match[3] else arrays
                for dtype, shape in arrays:
                    bits = int(re.findall(r"\d+", dtype)[0])
                    totals[f"{match[2]} {dtype}"] += math.prod(map(int, filter(None, shape.split(",")))) * bits / 8e6
        return dict(totals)

    def products(self) -> dict[str, int]:
        """How often each kind of product stands in the compiled program."""
        counts: collections.Counter[str] = collections.Counter()
        for line in (self.program.as_text() or "").splitlines():
            if match := re.search(r'custom_call_target="(__cublas[^"]*|mosaic_gpu[^"]*|__cudnn[^"]*)"', line):
                counts[match[1]] += 1
            elif re.search(r" dot\(", line):
                counts["dot of XLA"] += 1
        return dict(counts)


def longest(call: Callable[[], Any], count: int = 10) -> list[tuple[str, float, int]]:
    """The kernels of one call that take longest on the first GPU: name, ms in all, and how often they ran."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    times: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for plane in data.planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    times[event.name] += event.duration_ns
                    calls[event.name] += 1
    return [(name, ns / 1e6, calls[name]) for name, ns in times.most_common(count)]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="step", description=__doc__)
    parser.add_argument("--model", default="1b", choices=sizes.NAMES)
    parser.add_argument("--batch", type=int, default=8, help="sequences for each GPU")
    parser.add_argument(
        "--fit", type=float, metavar="GB", help="as many sequences for each GPU as `experiments.plan` says fit, by arm"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument(
        "--arm",
        nargs="+",
        default=list(ARMS),
        help="recipes; 'bf16, recomputed' is always there; with ', 8-bit gradients' or ', 8-bit gradients, one phase' "
        "gradients travel so; with ', as written' nothing is recomputed, with ', recomputed' all but products and "
        "attention",
    )
    parser.add_argument("--mesh", nargs="+", choices=list(MESHES), help="(default: all that this host has GPUs for)")
    parser.add_argument("--impl", default="auto", choices=("auto", "xla"), help="xla: none of fp8jax's kernels")
    parser.add_argument("--unroll", type=int, help="layers in a turn of the loop over them (default: all)")
    parser.add_argument("--free", type=int, nargs="+", default=[0], help="multiprocessors that products leave to NCCL")
    parser.add_argument("--apart", action="store_true", help="one arm after another: states that do not fit together")
    parser.add_argument("--visible", action="store_true", help="first one GPU in a process that sees no other")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a round, untimed and then as many timed")
    parser.add_argument("--kernels", action="store_true", help="also list the longest kernels of each step")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    try:
        for arm in options.arm:
            settings(arm)
    except ValueError as error:
        parser.error(str(error))
    # The process that sees one GPU runs before this one takes memory there; so do torch's arms.
    table = alone(argv) if options.visible else []
    timing.need_gpu()
    llama = sizes.get(options.model, VOCAB)
    with choice.target(kernels=options.impl == "auto"):
        measure(llama, options, table)


def alone(argv: Sequence[str]) -> list[timing.Row]:
    """What this program measures on the first GPU where it sees no other."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        flags = [flag for flag in argv if flag != "--visible"]
        command = [sys.executable, "-m", "experiments.bench", "step", *flags, "--mesh", "one", "--out", folder]
        subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": first}, check=True)
        rows = json.loads((Path(folder) / "step.json").read_text())["rows"]
    return [row | {"case": row["case"].replace("one GPU", "the only visible GPU")} for row in rows]


def torch_rows(llama: LlamaConfig, options: argparse.Namespace) -> list[tuple[str, timing.Seconds, Any]]:
    """Name, times and memory of the arms of torch that can run here, one after the other."""
    table = []
    for name in step_torch.available():
        arm = step_torch.TorchArm(name, llama, options.batch, options.length)
        times = timing.in_turns({name: arm}, options.rounds, {name: options.steps})
        table.append((name, times[name], arm.memory))
        arm.close()
    return table


def measure(llama: LlamaConfig, options: argparse.Namespace, table: Sequence[timing.Row] = ()) -> None:
    """Times the arms of each mesh and writes OUT/step.json, with the rows that were found before."""
    table = list(table)
    how = "one after another" if options.apart else "in turns, in another order in each round"
    notes = [
        " ".join((__doc__ or "").split("\n\n")[1].split()),
        "The optimizer is `step` of `fp8jax.clipped`: one pass, none for the clipped gradients. "
        f"Arms run {how}; medians. MFU counts products and causal attention, forward and backward, against "
        "989.5 TFLOP/s of dense bf16. What is exchanged is of the compiled program, each loop over layers once.",
        "torch's arms, where there are any, come first and alone; their memory is what torch's allocator counted.",
    ]
    for where in options.mesh or [where for where in MESHES if where == "one" or jax.device_count() > 1]:
        place = MESHES[where].format(jax.device_count())
        batches = f"{options.batch}" if options.fit is None else f"what fits in {options.fit:g} GB"
        case = f"{options.model}, {place}, {batches} x {options.length} tokens"
        torch = torch_rows(llama, options) if where == "one" else []
        freed = {f"{name}, {n} free" if n else name: (name, n) for name in options.arm for n in options.free}
        wanted = {AGAIN: (AGAIN, 0)} | freed
        arms: dict[str, StepArm] = {}
        times: dict[str, timing.Seconds] = {}
        for group in [[name] for name in wanted] if options.apart else [list(wanted)]:
            for name in group:
                start = time.perf_counter()
                recipe, free = wanted[name]
                batch = options.batch
                if options.fit is not None:
                    batch = largest_batch(recipe, llama, options.length, where, options.fit)
                with choice.target(free_multiprocessors=free):
                    arms[name] = StepArm(recipe, llama, batch, options.length, where, options.unroll)
                if not options.apart:
                    jax.block_until_ready(arms[name]())
                print(f"  {name}: ready in {time.perf_counter() - start:.0f} s", flush=True)
            times |= timing.in_turns(
                {name: arms[name] for name in group}, options.rounds, dict.fromkeys(group, options.steps)
            )
            memories = {name: memory(arms[name].program) for name in {AGAIN: None} | dict.fromkeys(group)}
            for name in group:
                table += rows(case, name, arms[name], arms[AGAIN], times, memories)
                table += [
                    timing.row(case, name, f"kernel, {kernel[:80]}", ms, f"ms in {count}")
                    for kernel, ms, count in (longest(arms[name]) if options.kernels else [])
                ]
            for name in group:
                arms[name].stop()
            # After each, so that what stops a later arm takes nothing with it.
            timing.write("step", "Whole training steps", table, notes, {}, options.out)
        again = arms[AGAIN]
        for name, seconds, needs in torch:
            table += common(case, name, seconds, times[AGAIN], again, again, needs, memory(again.program))
        timing.write("step", "Whole training steps", table, notes, {}, options.out)


def memory(program: Any) -> tuple[float, float]:
    """GB of temporaries, and of everything, while a compiled step runs, on each GPU."""
    told = program.memory_analysis()
    results = told.output_size_in_bytes - told.alias_size_in_bytes
    return told.temp_size_in_bytes / 1e9, (told.argument_size_in_bytes + told.temp_size_in_bytes + results) / 1e9


def rows(
    case: str,
    name: str,
    arm: StepArm,
    again: StepArm,
    times: Mapping[str, timing.Seconds],
    sizes: Mapping[str, tuple[float, float]],
) -> list[timing.Row]:
    """What is said of an arm, against `again`, bf16 recomputed."""
    row = functools.partial(timing.row, case, name)
    table = common(case, name, times[name], times[AGAIN], arm, again, sizes[name], sizes[AGAIN])
    if arm.batch != again.batch:
        table.append(row("batch", arm.batch, "sequences a GPU"))
    table += [row(f"exchanged, {kind}", value, "MB") for kind, value in arm.exchanged().items()]
    return table + [row(f"products, {kind}", count, "") for kind, count in arm.products().items()]


def common(
    case: str,
    name: str,
    median: timing.Seconds,
    base: timing.Seconds,
    arm: StepArm,
    again: StepArm,
    needs: tuple[float, float],
    base_needs: tuple[float, float],
) -> list[timing.Row]:
    """Time, speed and memory of an arm that computes what `arm` does, against `again`, bf16 recomputed."""
    row = functools.partial(timing.row, case, name)
    spread = median.quartiles(lambda t: 1e3 * t)
    speed, base_speed = arm.tokens_per_step / median, again.tokens_per_step / base
    same = arm.batch == again.batch  # Else only tokens/s compare.
    table = [row("step", 1e3 * median, "ms", AGAIN if same else None, base / median if same else None, spread)]
    table.append(row("tokens/s", speed, "", None if same else AGAIN, None if same else speed / base_speed))
    table.append(row("MFU", arm.flops / median / (PEAK_FLOPS * arm.count), ""))
    for i, metric in enumerate(("temporaries", "memory")):
        table.append(row(metric, needs[i], "GB a GPU", AGAIN, base_needs[i] / needs[i]))
    return table
