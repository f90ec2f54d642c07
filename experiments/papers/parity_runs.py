"""Trains the arms of `training_parity` in one process: many seeds of a small Llama, each compiled once.

Every seed has its own initial parameters and its own batches, and every arm sees those of each seed: what two arms
differ by in a seed is the recipe, and the chaos of training, but not the text.
"""

import contextlib
import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import fp8jax
from experiments import mesh
from experiments.errors import UserError
from experiments.files import write_json
from experiments.models.llama import LlamaConfig
from experiments.results import record
from experiments.text import data
from experiments.text.tokenizer import Bytes
from experiments.train import config
from experiments.train.introduction import count
from experiments.train.optimizer import make_optimizer, with_master
from experiments.train.task import Task, TrainState
from fp8jax.core import formats
from fp8jax.ops.products import product

STRIDE = 10


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all arms share. Optimizer settings that are not here are those of `experiments.train`."""

    dim: int = 512
    layers: int = 4
    heads: int = 4
    mlp_dim: int = 1408
    length: int = 512
    batch: int = 64
    steps: int = 1000
    warmup: int = 100
    lr: float = 1e-3
    valid: int = 2048
    valid_fraction: float = 0.0275

    @property
    def llama(self) -> LlamaConfig:
        """The model, of bytes."""
        return LlamaConfig(256, self.dim, self.layers, self.heads, self.heads, self.mlp_dim)

    @property
    def tokens(self) -> int:
        """Tokens of a run."""
        return self.steps * self.batch * self.length


# Formats of the operands of each product of `coat`, by which they are told apart.
PRODUCTS = {("e4m3", "e4m3"): "forward", ("e5m2", "e4m3"): "dgrad", ("e4m3", "e5m2"): "wgrad"}


@dataclasses.dataclass(frozen=True)
class ParityArm:
    """What is trained.

    Attributes:
        recipe: what it computes and stores in.
        product: "forward", "dgrad" or "wgrad": one that is damaged on purpose, of a recipe with `coat`'s formats.
        lost_bits: mantissa bits that the codes lose that this product reads.
        master, release: as the settings of `experiments.train` of these names.
    """

    recipe: fp8jax.Recipe
    product: str | None = None
    lost_bits: int = 0
    master: str = ""
    release: Literal["", "previous", "twice"] = ""


@contextlib.contextmanager
def damaged(arm: ParityArm) -> Iterator[None]:
    """While a program is traced in it, the arm's product reads codes of fewer mantissa bits, rounded to nearest.

    Raises:
        RuntimeError: no such product was traced: the damage would have done nothing.
    """
    if arm.product is None:
        yield
        return
    matmul, met = product.matmul, list[bool]()

    def replaced(a: Any, b: Any, **how: Any) -> jax.Array:
        if PRODUCTS.get((a.spec.format, b.spec.format)) == arm.product:
            met.append(True)
            a, b = coarse(a, arm.lost_bits), coarse(b, arm.lost_bits)
        return matmul(a, b, **how)

    with mock.patch.object(product, "matmul", replaced):
        yield
    if not met:
        raise RuntimeError(f"the recipe {arm.recipe.name!r} has no {arm.product} product of codes: nothing was damaged")


def coarse(q: fp8jax.QTensor, lost_bits: int) -> fp8jax.QTensor:
    """Codes rounded to fewer mantissa bits, in the same dtype."""
    fmt = formats.get(q.spec.format)
    bits = fmt.mantissa_bits - lost_bits
    if bits < 0:
        raise ValueError(f"{fmt.name} has no {lost_bits} mantissa bits to lose")
    largest = 2.0 ** np.floor(np.log2(fmt.max)) * (2 - 2.0**-bits)
    values = jax.lax.reduce_precision(q.codes.astype(jnp.float32), 8, bits)
    return dataclasses.replace(q, codes=jnp.clip(values, -largest, largest).astype(q.codes.dtype))


def replicas(arm: ParityArm) -> int:
    """Devices that share a batch: all, where a recipe says in what gradients travel between them, else one."""
    return jax.device_count() if arm.recipe.comm.gradients is not None else 1


def programs(arm: ParityArm, setting: Setting) -> tuple[Callable[..., Any], Callable[..., Any], int]:
    """A training run and its validation, and the number of parameters.

    Returns:
        `train(seed, text, starts)`: uint8 text (N,) and int32 starts (steps, batch) of sequences in it, to a state and
            fp32 losses (steps,); NaN from the first step on whose loss or gradient is not finite.
        `validate(state, sequences)`: int32 (count, batch, length + 1) to fp32 losses (count,).
        Number of parameters.
    """
    of = {"master": arm.master, "release": arm.release}
    optim = config.Optim(steps=setting.steps, warmup=setting.warmup, lr=setting.lr, **of)  # type: ignore[arg-type]
    recipe = with_master(arm.recipe, arm.master)
    tx = make_optimizer(config.Config(optim=optim), recipe)
    rows = mesh.batches(mesh.make(replicas(arm), 1)) if replicas(arm) > 1 else None
    task = Task.build(setting.llama, tx, recipe, remat=False, seed=0, rows=rows)

    def run(seed: jax.Array, text: jax.Array, starts: jax.Array) -> tuple[TrainState, jax.Array]:
        def step(state: TrainState, starts: jax.Array) -> tuple[TrainState, jax.Array]:
            tokens = text[starts[:, None] + jnp.arange(setting.length + 1)].astype(jnp.int32)
            with damaged(arm):
                state, metrics = task.step(state, tokens)
            return state, jnp.where(metrics["healthy"], metrics["loss"], jnp.nan)

        start = dataclasses.replace(task, seed=seed)  # type: ignore[arg-type]
        return jax.lax.scan(step, start.init(), starts)

    def validate(state: TrainState, sequences: jax.Array) -> jax.Array:
        def loss(tokens: jax.Array) -> jax.Array:
            with damaged(arm) if arm.product == "forward" else contextlib.nullcontext():
                return task.loss(state.params, state.model_state, tokens)

        return jax.lax.map(loss, sequences)

    return jax.jit(run), jax.jit(validate), count(jax.eval_shape(task.init).params)


@dataclasses.dataclass(frozen=True)
class Text:
    """Training text (N,) and validation sequences (count, batch, length + 1), with a fingerprint of both."""

    train: np.ndarray
    valid: np.ndarray
    fingerprint: str

    def starts(self, seed: int, setting: Setting) -> np.ndarray:
        """Where the sequences of a seed begin, int32 (steps, batch): the same for every arm."""
        most = len(self.train) - setting.length - 1
        return np.random.default_rng(seed).integers(0, most, (setting.steps, setting.batch), dtype=np.int32)


def read_text(patterns: Sequence[str], setting: Setting) -> Text:
    """Files as bytes, split as `experiments.train` splits them; none means the standard library.

    Raises:
        UserError: a file is missing or there is too little text.
    """
    corpus = data.read_corpus(patterns, setting.valid_fraction)
    tokens = data.encode(corpus, Bytes(), setting.length)
    valid = data.valid_batches(tokens.valid, setting.length, setting.batch, setting.valid // setting.batch)
    return Text(tokens.train.astype(np.uint8), valid, tokens.fingerprint)


def settings(recipe: fp8jax.Recipe) -> dict[str, str]:
    """What a recipe sets, by "part.field", where that is no default: those of a recipe that changed differ."""
    return {
        f"{part.name}.{field.name}": str(value)
        for part in dataclasses.fields(recipe)
        if dataclasses.is_dataclass(of := getattr(recipe, part.name))
        for field in dataclasses.fields(of)
        if (value := getattr(of, field.name)) != field.default
    }


def read_settings(stored: Mapping[str, str]) -> dict[str, str]:
    """Settings of a file, which may have older names and values, as `settings` returns them."""
    return {name: str(value) for name, value in config.with_new_names(stored).items()}


def train_arm(
    name: str,
    arm: ParityArm,
    seeds: Sequence[int],
    text: Text,
    setting: Setting,
    path: Path,
    room: Callable[[float], bool] = lambda _: True,
) -> None:
    """Trains the seeds of an arm that a file lacks, and writes the file after each.

    Args:
        name: of the arm.
        arm: what is trained.
        seeds: one run each.
        text: what is read.
        setting: the model and its schedule.
        path: JSON file.
        room: told how many seconds the last run took (0 before the first); False ends the work.

    Raises:
        UserError: the file is of another recipe, setting, text or device.
    """
    header = {"arm": name, "recipe": settings(arm.recipe), "setting": dataclasses.asdict(setting),
              "text": text.fingerprint, "device": jax.devices()[0].device_kind}  # fmt: skip
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else header | {"runs": {}}
    # Files of before recipes were written have none.
    if "recipe" in content:
        content["recipe"] = read_settings(content["recipe"])
    changed = [key for key, value in header.items() if content.get(key, value if key == "recipe" else None) != value]
    if changed:
        raise UserError(f"{path} was made with another {', '.join(changed)}: delete it, or give other --results")
    missing = [seed for seed in seeds if str(seed) not in content["runs"]]
    if not missing or not room(0):
        return
    begin = time.perf_counter()
    run, validate, parameters = programs(arm, setting)
    held = jax.device_put(text.train)
    took = 0.0
    for seed in missing:
        if not room(took):
            return
        start = time.perf_counter()
        state, losses = run(jnp.int32(seed), held, text.starts(seed, setting))
        valid = float(np.mean(validate(state, text.valid)))
        curve = np.asarray(losses, np.float64).reshape(-1, STRIDE).mean(1)
        if not took:
            print(f"{name}: compiled and ran in {time.perf_counter() - begin:.0f} s", flush=True)
        took = time.perf_counter() - start
        sizes = fp8jax.state_bytes(state.opt_state)
        content |= {"parameters": parameters, "moments": (sizes["mu"] + sizes["nu"]) / parameters,
                    "date": datetime.datetime.now(datetime.UTC).date().isoformat()}  # fmt: skip
        content["replicas"] = replicas(arm)
        content["runs"][str(seed)] = {"commit": record.commit(), "valid_loss": round(valid, 6),
                                      "losses": [round(x, 5) for x in curve.tolist()],
                                      "seconds": round(took, 2)}  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
        print(f"{name}, seed {seed}: training {curve[-1]:.4f}, validation {valid:.4f}, {took:.1f} s", flush=True)
