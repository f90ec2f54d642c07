"""Whole training steps by recipe and mesh, against bf16 of the same mesh: time, memory, what the devices exchange.

The bf16 baseline is what a good engineer would run: of a block it keeps the products and attention and computes the
rest again, which is faster than keeping all. Recipes with a context keep what this says and compute nothing again.

Run: python -m experiments.bench step --model 1b --batch 8 --recipe bf16 coat --mesh one data fsdp
Writes results/step.json.
"""

import argparse
import collections
import functools
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fp8jax
from experiments import config, mesh, train
from experiments.bench import timing
from experiments.models import sizes
from experiments.task import Task

BF16, VOCAB = "bf16", 32_000
# Dense bf16 products of an H100 or H200, NVIDIA's data sheet: what MFU is given against.
PEAK_FLOPS = 989.5e12
MESHES = ("one", "data", "fsdp")
_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_ARRAY = re.compile(r"([a-z]+\d+\w*)\[([\d,]*)\]")


class Arm:
    """A recipe's step on a mesh, and the state that it updates."""

    def __init__(self, recipe: str, model: str, batch: int, length: int, where: str, remat: bool | str) -> None:
        devices = jax.devices()[:1] if where == "one" else jax.devices()
        count = len(devices)
        self.mesh = mesh.make(1 if where == "fsdp" else count, count if where == "fsdp" else 1, devices)
        self.config, self.count, self.length = sizes.get(model, VOCAB), count, length
        part = fp8jax.recipes.get(recipe)
        optimizer = train.make_optimizer(config.Config(), part)
        rows = mesh.batches(self.mesh)
        self.task = Task.build(self.config, optimizer, part, remat=remat, seed=0, rows=rows if count > 1 else None)
        shapes = jax.eval_shape(self.task.init)
        placed = mesh.state(self.mesh, shapes)
        self.tokens = jax.device_put(
            jax.random.randint(jax.random.key(1), (batch * count, length + 1), 0, VOCAB, jnp.int32), rows
        )
        run = jax.jit(self.task.step, donate_argnums=0, in_shardings=(placed, rows), out_shardings=(placed, None))
        self.program = run.lower(shapes, self.tokens).compile()
        self.state = jax.jit(self.task.init, out_shardings=placed)()

    def __call__(self) -> Any:
        self.state, metrics = self.program(self.state, self.tokens)
        return metrics

    @property
    def tokens_per_step(self) -> int:
        return self.tokens.shape[0] * self.length

    @property
    def flops(self) -> float:
        """Of the products and the causal attention of a step, forward and backward."""
        matrices = sum(
            math.prod(x.shape) for x in jax.tree.leaves(self.state.params) if x.ndim >= 2 and min(x.shape[-2:]) > 1
        )
        matrices -= VOCAB * self.config.dim  # the embedding is looked up
        attention = 6 * self.config.layers * self.config.dim * self.length
        return float(self.tokens_per_step * (6 * matrices + attention))

    def exchanged(self) -> dict[str, float]:
        """MB that a device gives or gets in collectives of a step, by kind and dtype; loops count once."""
        found: collections.Counter[str] = collections.Counter()
        for line in (self.program.as_text() or "").splitlines():
            if match := _COLLECTIVE.search(line):
                # Of an asynchronous collective the result is the last part of a tuple.
                arrays = _ARRAY.findall(match[1])
                arrays = arrays[len(arrays) // 2 :] if match[3] else arrays
                for dtype, shape in arrays:
                    bits = int(re.findall(r"\d+", dtype)[0])
                    found[f"{match[2]} {dtype}"] += math.prod(map(int, filter(None, shape.split(",")))) * bits / 8e6
        return dict(found)

    def products(self) -> dict[str, int]:
        """How often each kind of product stands in the compiled program."""
        found: collections.Counter[str] = collections.Counter()
        for line in (self.program.as_text() or "").splitlines():
            if match := re.search(r'custom_call_target="(__cublas[^"]*|mosaic_gpu[^"]*|__cudnn[^"]*)"', line):
                found[match[1]] += 1
            elif re.search(r" dot\(", line):
                found["dot of XLA"] += 1
        return dict(found)


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


def main(arguments: Sequence[str]) -> None:
    """Times the arms of each mesh in turns and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1b", choices=sizes.NAMES)
    parser.add_argument("--batch", type=int, default=8, help="sequences for each GPU")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--recipe", nargs="+", default=[BF16, "te_current", "coat", "coat_fast"])
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=MESHES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a round, untimed and then timed")
    parser.add_argument("--kernels", action="store_true", help="also list the longest kernels of each step")
    parser.add_argument("--out", type=Path, default=Path("results"))
    asked = parser.parse_args(arguments)
    timing.need_gpu()
    rows: list[timing.Row] = []
    for where in asked.mesh:
        case = f"{asked.model}, {asked.batch} x {asked.length}, {where}"
        arms: dict[str, Arm] = {}
        for recipe in asked.recipe:
            part = fp8jax.recipes.get(recipe)
            remat = False if part.context.saved else "products"
            arms[recipe] = Arm(recipe, asked.model, asked.batch, asked.length, where, remat)
            jax.block_until_ready(arms[recipe]())
        times = timing.in_turns(dict(arms), asked.rounds, dict.fromkeys(arms, asked.steps))
        for recipe, arm in arms.items():
            row = functools.partial(timing.row, case, recipe)
            rows.append(row("step", 1e3 * times[recipe], "ms", BF16, times[BF16] / times[recipe]))
            rate = arm.tokens_per_step / times[recipe]
            rows.append(row("tokens/s", rate, "", None, None))
            rows.append(row("MFU", arm.flops / times[recipe] / (PEAK_FLOPS * arm.count), "", None, None))
            told = arm.program.memory_analysis()
            rows.append(row("state", told.argument_size_in_bytes / 1e9, "GB a GPU", None, None))
            rows.append(row("temporaries", told.temp_size_in_bytes / 1e9, "GB a GPU", None, None))
            rows += [row(f"exchange, {kind}", value, "MB", None, None) for kind, value in arm.exchanged().items()]
            rows += [row(f"products, {kind}", count, "", None, None) for kind, count in arm.products().items()]
            if asked.kernels:
                for name, ms, count in longest(arm):
                    rows.append(row(f"kernel, {name[:80]}", ms, f"ms in {count}", None, None))
        for arm in arms.values():
            jax.tree.map(lambda x: x.delete(), arm.state)
    notes = [
        "bf16 keeps products and attention of each block and computes the rest again (remat='products'), as do recipes "
        "without a context. Optimizer steps are `update` and `apply_updates`, with clipping. Flags: "
        "--xla_gpu_enable_triton_gemm=false.",
        "MFU counts products and causal attention, forward and backward, against 989.5 TFLOP/s of dense bf16.",
        "State: what a step reads and writes, with its batch. Temporaries: XLA's own figure for the compiled step.",
    ]
    timing.write("step", "Whole training steps", rows, notes, {"fp8jax": fp8jax.__version__}, asked.out)
