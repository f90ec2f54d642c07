"""What the training program says of a run before it begins."""

import dataclasses
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from rich.console import Console

import fp8jax
from experiments.text import data, packing
from experiments.text.tokenizer import Bytes
from experiments.train import hosts, report
from experiments.train.config import Config
from experiments.train.task import Task, TrainState

_PACKAGES = ("fp8jax", "jax", "flax", "optax", "orbax-checkpoint", "grain")


def print_setup(
    console: Console, config: Config, corpus: data.Corpus, tokens: data.Tokens | packing.Packed, told: str, used: int
) -> None:
    """What a run reads and runs on; `told` is of the mesh, `used` how many devices it has."""
    for name, section in (("data", config.data), ("model", config.model), ("optim", config.optim), ("run", config.run)):
        values = {k: v for k, v in dataclasses.asdict(section).items() if v not in (None, "")}
        if name == "model" and config.model.init:
            values = {"init": config.model.init}
        if name == "data":
            if config.model.init:
                del values["tokenizer"], values["vocab"]
            elif config.data.tokenizer == "bytes":
                values["vocab"] = Bytes.vocab
            values["data"] = " ".join(config.data.data) or "the standard library's sources and docs"
        fields = "  ".join(f"{k}={v}" for k, v in values.items())
        report.told(console, f"{name:9}{fields}", 9)
    report.told(console, f"{'recipes':9}{' '.join(config.recipe)}  seed={config.seed}", 9)
    versions = "  ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    report.told(console, f"{'versions':9}python {platform.python_version()}  {versions}", 9)
    devices = jax.devices()
    shared = f"; {told}" if used > 1 else ""
    shared = f" in {jax.process_count()} processes{shared}" if hosts.several() else shared
    kind = f"{devices[0].device_kind} ({devices[0].platform})"
    report.told(console, f"{'device':9}{kind}, {used} of {len(devices)} used{shared}", 9)
    skipped = f", {len(corpus.skipped)} skipped as no UTF-8 text" if corpus.skipped else ""
    if isinstance(tokens, packing.Packed):
        report.told(
            console,
            f"{'records':9}{tokens.documents:,} of {corpus.files} files; {len(tokens.train):,} rows to train on, "
            f"{tokens.filled:.1%} filled, {tokens.answers:,} tokens to learn; {len(tokens.valid):,} rows to validate; "
            f"{tokens.cut:,} longer than a row, {tokens.left_out:,} without an answer in one",
            9,
        )
    else:
        report.told(
            console,
            f"{'text':9}{corpus.files} files{skipped}; {len(tokens.train):,} tokens to train on, "
            f"{len(tokens.valid):,} to validate; {config.data.batch * config.data.seq_len:,} tokens a step",
            9,
        )
    if corpus.skipped:
        more = " ..." if len(corpus.skipped) > 3 else ""
        report.told(console, f"{'':9}skipped: {', '.join(corpus.skipped[:3])}{more}", 9)


def print_plan(console: Console, task: Task, abstract: TrainState, base: Any, compiled: Any) -> None:
    """What the arrays of a step take, by what they are."""
    parameters = count(abstract.params)
    if task.lora is not None:
        held = jax.tree.leaves(base)
        told = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(task.lora).items())
        report.told(
            console,
            f"adapters: {told}; not trained: {nbytes(held) / 2**20:,.1f} MiB of a base that checkpoints do not hold; "
            "blocks run with the recipe's products alone, contexts are left out",
        )
    shape = "  ".join(f"{k}={v}" for k, v in dataclasses.asdict(task.llama).items())
    report.told(console, f"{parameters:,} parameters: {shape}", 4)
    weights = nbytes(jax.tree.leaves(abstract.params))
    moments = fp8jax.state_bytes(abstract.opt_state)
    state = {
        "parameters": weights,
        "gradients": weights,
        "first moment": moments["mu"],
        "second moment": moments["nu"],
        "other optimizer state": moments["other"],
    } | ({"base": nbytes(jax.tree.leaves(base))} if task.lora is not None else {})
    devices = 1 if task.rows is None else task.rows.mesh.size
    console.print(report.memory_table(state, parameters, compiled.memory_analysis(), devices))


def count(params: Any) -> int:
    """Number of parameters."""
    return sum(x.size for x in jax.tree.leaves(params))


def nbytes(arrays: Sequence[Any]) -> int:
    """Bytes of arrays, abstract ones too."""
    return sum(x.size * np.dtype(x.dtype).itemsize for x in arrays)
