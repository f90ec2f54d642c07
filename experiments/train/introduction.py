"""The output of the training program before a run starts."""

import dataclasses
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console

import fp8jax
from experiments import mesh
from experiments.models.llama import Llama
from experiments.models.shape import LlamaConfig
from experiments.text import data, packing
from experiments.text.tokenizer import Bytes
from experiments.train import hosts, report
from experiments.train.config import Config
from experiments.train.report import Details
from experiments.train.task import Task, TrainState

_PACKAGES = ("fp8jax", "jax", "flax", "optax", "orbax-checkpoint", "grain")
_LIBRARY = "Python's standard library"


def print_header(
    console: Console,
    config: Config,
    corpus: data.Corpus,
    tokens: data.Tokens | packing.Packed,
    llama: LlamaConfig,
    num_devices: int,
) -> None:
    """Prints the model, the data and the files of a run, in five lines."""
    device_name = jax.devices()[0].device_kind
    device_name = "CPU" if device_name == "cpu" else device_name
    same_batches = " on the same batches" if len(config.recipe) > 1 else ""
    devices_text = f"one {device_name}" if num_devices == 1 else f"{num_devices} devices ({device_name})"
    devices_text += f" in {jax.process_count()} processes" if hosts.several() else ""
    report.print_text(console, f"Training {', '.join(config.recipe)}{same_batches}, on {devices_text}")
    source = " ".join(config.data.data) or _LIBRARY
    skipped = f", {len(corpus.skipped)} skipped, not UTF-8" if corpus.skipped else ""
    files = "1 file" if corpus.files == 1 else f"{corpus.files:,} files"
    unit = "rows of records" if isinstance(tokens, packing.Packed) else "tokens"
    counts = f"{_abbreviate(len(tokens.train))} {unit}, {_abbreviate(len(tokens.valid))} for validation"
    report.print_text(console, f"  text   {source} ({files}{skipped}): {counts}", 9)
    parameters = count(nnx.eval_shape(lambda: nnx.state(Llama(llama, rngs=nnx.Rngs(0)), nnx.Param)))
    name = config.model.init or config.model.model
    report.print_text(
        console, f"  model  {name}: {parameters:,} parameters, {llama.layers} layers of width {llama.dim}", 9
    )
    per_step = config.data.batch * config.data.seq_len
    report.print_text(
        console, f"  steps  {config.optim.steps:,} of {per_step:,} tokens, learning rate {config.optim.lr:g}", 9
    )
    report.print_text(console, f"  files  {config.folder}; details: {config.folder / 'log.txt'}", 9)
    console.print()


def show_setup(
    details: Details,
    config: Config,
    corpus: data.Corpus,
    tokens: data.Tokens | packing.Packed,
    devices: jax.sharding.Mesh,
    recipes: Iterable[fp8jax.Recipe],
) -> None:
    """Shows all settings of a run, its data and its devices."""
    for name, section in (("data", config.data), ("model", config.model), ("optim", config.optim), ("run", config.run)):
        values = {k: v for k, v in dataclasses.asdict(section).items() if v not in (None, "")}
        if name == "model" and config.model.init:
            values = {"init": config.model.init}
        if name == "data":
            if config.model.init:
                del values["tokenizer"], values["vocab"]
            elif config.data.tokenizer == "bytes":
                values["vocab"] = Bytes.vocab
            values["data"] = " ".join(config.data.data) or _LIBRARY
        fields = "  ".join(f"{k}={v}" for k, v in values.items())
        details.show(f"{name:9}{fields}", 9)
    details.show(f"{'recipes':9}{' '.join(config.recipe)}  seed={config.seed}", 9)
    versions = "  ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    details.show(f"{'versions':9}python {platform.python_version()}  {versions}", 9)
    devices_found = jax.devices()
    shared = f"; {mesh.describe(devices, recipes)}" if devices.size > 1 else ""
    shared = f" in {jax.process_count()} processes{shared}" if hosts.several() else shared
    device_text = f"{devices_found[0].device_kind} ({devices_found[0].platform})"
    details.show(f"{'device':9}{device_text}, {devices.size} of {len(devices_found)} used{shared}", 9)
    if isinstance(tokens, packing.Packed):
        details.show(
            f"{'records':9}{tokens.documents:,} of {corpus.files} files; {len(tokens.train):,} training rows, "
            f"{tokens.filled:.1%} filled, {tokens.answers:,} tokens in the loss; {len(tokens.valid):,} to validate; "
            f"{tokens.cut:,} truncated, {tokens.left_out:,} left out (no answer in their row)",
            9,
        )
    if corpus.skipped:
        details.show(f"{'skipped':9}{', '.join(corpus.skipped)}", 9)


def show_plan(details: Details, task: Task, abstract: TrainState, base: Any, compiled: Any) -> None:
    """Shows the memory of the arrays of a step, by kind."""
    parameters = count(abstract.params)
    if task.lora is not None:
        base_leaves = jax.tree.leaves(base)
        settings = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(task.lora).items())
        details.show(
            f"adapters: {settings}; frozen base: {nbytes(base_leaves) / 2**20:,.1f} MiB, not in checkpoints; "
            "blocks use only the recipe's products, not its contexts"
        )
    shape = "  ".join(f"{k}={v}" for k, v in dataclasses.asdict(task.llama).items())
    details.show(f"{parameters:,} parameters: {shape}", 4)
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
    details.show(report.memory_table(state, parameters, compiled.memory_analysis(), devices))


def _abbreviate(number: int) -> str:
    """Returns a short number: 10,595,441 is "10.6 M"."""
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}"


def count(params: Any) -> int:
    """Returns the number of parameters."""
    return sum(x.size for x in jax.tree.leaves(params))


def nbytes(arrays: Sequence[Any]) -> int:
    """Returns the bytes of arrays, which may be abstract."""
    return sum(x.size * np.dtype(x.dtype).itemsize for x in arrays)
