"""Training steps compiled for several H200s in a process without a GPU: `python -m tests.experiments.compiled_steps`.

Each argument is RECIPE:DATA:FSDP:TENSOR:GRADIENTS:FORM:PARTITION. The output has the communication of the compiled step
and of its plan, as bytes by collective, dtype and number of devices. Amax reductions of kernels are left out; other
scalars are not.
"""

import contextlib
import dataclasses
import json
import math
import re
import sys
from collections import Counter
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

import fp8jax
from experiments import mesh, plan
from experiments.models.llama import LlamaConfig
from experiments.train import config
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task
from fp8jax.core.program_text import computations_of
from fp8jax.dist.collectives import collectives
from fp8jax.ops.dispatch import choice
from fp8jax.recipes import Comm
from tests.kernels import h200

# With this many tokens, XLA gathers the embedding table, not the results of the lookup.
LLAMA = LlamaConfig(vocab=2048, dim=256, layers=2, heads=4, kv_heads=4, mlp_dim=512)
BATCH, LENGTH = 8, 1024


def compiled(name: str, devices: jax.sharding.Mesh, comm: Comm, partition: str) -> tuple[Any, fp8jax.Recipe]:
    """Returns the compiled step of a recipe, and the recipe."""
    recipe = dataclasses.replace(fp8jax.recipes.get(name), comm=comm)
    rows = mesh.batches(devices)
    remat = False if recipe.context.residual else "products"
    tx = make_optimizer(config.Config(), recipe)
    task = Task(LLAMA, tx, recipe, remat=remat, seed=0, rows=rows, partition=partition)
    shapes = jax.eval_shape(task.init)
    placed = mesh.state(devices, shapes, partition)
    state = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, placed)
    tokens = jax.ShapeDtypeStruct((BATCH * devices.size, LENGTH + 1), jnp.int32, sharding=rows)
    step = jax.jit(task.step, donate_argnums=0, out_shardings=(placed, None)).lower(state, tokens).compile()
    return step, recipe


def without_maxima(program: str) -> str:
    """Returns the text of a program without the all-reduces of amaxes of kernels on several devices."""
    computations, _ = computations_of(program)
    largest = {name for name, lines in computations.items() if any(line.op == "maximum" for line in lines)}
    compared = re.compile(r"all-reduce(?:-start)?\(.*to_apply=%?([\w.$-]+).*custom_partitioning")
    is_kept = lambda line: (match := compared.search(line)) is None or match[1] not in largest  # noqa: E731
    return "\n".join(line for line in program.splitlines() if is_kept(line))


def totals(actual: Any) -> list[tuple[str, str, int, int]]:
    sums: Counter[tuple[str, str, int]] = Counter()
    for one in actual:
        sums[one.kind, one.dtype, one.devices] += one.times * one.nbytes
    return [(*key, size) for key, size in sorted(sums.items())]


def main() -> None:
    results = {}
    plain = jax.nn.dot_product_attention

    def attend(*qkv: Any, is_causal: bool, implementation: str) -> jax.Array:
        return plain(*qkv, is_causal=is_causal, implementation="xla")  # this machine has no cuDNN

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(jax, "default_backend", return_value="gpu"))
        patches.enter_context(mock.patch.object(jax.nn, "dot_product_attention", attend))
        patches.enter_context(mock.patch.object(mesh, "SMALLEST", 1024))
        patches.enter_context(choice.target(capability=90))
        target = (h200.FOLDER / "h200.txtpb").read_text()
        for argument in sys.argv[1:]:
            name, data, fsdp, tensor, gradients, form, *rest = argument.split(":")
            comm, sizes = [part for part in (gradients, form) if part], (int(data), int(fsdp), int(tensor))
            partition = rest[0] if rest else ""
            topology = topologies.get_topology_desc(
                platform="cuda", target_config=target, topology=f"1x1x{math.prod(sizes)}"
            )
            devices = jax.sharding.Mesh(np.array(topology.devices).reshape(*sizes, 1), mesh.AXES)
            with jax.set_mesh(devices):  # kernels are partitioned on several devices
                step, recipe = compiled(name, devices, Comm(*comm), partition)
            tokens = BATCH * LENGTH
            with mock.patch.object(plan, "saved_per_token", return_value=0.0):
                planned = plan.of(
                    LLAMA,
                    recipe,
                    dict(devices.shape),
                    tokens,
                    recompute=not recipe.context.residual,
                    partition=partition,
                )
            actual = collectives(without_maxima(step.as_text()))
            results[argument] = totals(actual), totals(planned.collectives)
    print(h200.MARK + json.dumps(results))


if __name__ == "__main__":
    main()
