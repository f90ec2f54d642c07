"""Trains the arms of `parity` in one process: many seeds of a model, each arm compiled once.

A seed determines the initial parameters and the batches of all arms. Two arms with one seed differ only by the recipe
and the chaos of training.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fp8jax
from experiments import mesh
from experiments.bench.writings import CLIP, DECAY, RATE, cross_entropy
from experiments.errors import UserError
from experiments.files import write_json
from experiments.models import plain
from experiments.models.llama import LlamaConfig
from experiments.models.moe import MoE, router_losses
from experiments.papers import common
from experiments.results import record
from experiments.text import data
from experiments.text.tokenizer import BytePair, Bytes
from experiments.train import config
from experiments.train.form import changes_layers
from experiments.train.introduction import count
from experiments.train.optimizer import make_optimizer, with_master
from experiments.train.task import Task, TrainState
from fp8jax.core import formats
from fp8jax.ops.products import product

STRIDE = 10


@dataclasses.dataclass(frozen=True)
class Setting:
    """The model and schedule of all arms. Other optimizer settings are the defaults of `experiments.train`.

    Attributes:
        vocab: 256 if tokens are bytes.
    """

    vocab: ClassVar[int] = Bytes.vocab
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
        """The model."""
        return LlamaConfig(self.vocab, self.dim, self.layers, self.heads, self.heads, self.mlp_dim)


@dataclasses.dataclass(frozen=True)
class PlainSetting(Setting):
    """A user-written Flax NNX model. Its layers have names, so a recipe can have rules for some.

    Attributes:
        experts, experts_per_token: mixture of experts in each layer; 0 for none. `mlp_dim` is the width of an expert.
    """

    experts: int = 0
    experts_per_token: int = 0

    @property
    def llama(self) -> LlamaConfig:
        """The shape with experts."""
        return dataclasses.replace(super().llama, experts=self.experts, experts_per_token=self.experts_per_token)

    def model(self, recipe: fp8jax.Recipe, rngs: nnx.Rngs) -> plain.PlainLlama:
        """Returns the model of a recipe with new parameters."""
        llama = self.llama
        # XLA expands its 16-bit grouped matmul into one dense matmul per expert.
        dot = (
            jax.lax.ragged_dot if changes_layers(recipe) else functools.partial(fp8jax.ragged_dot, recipe=recipe.linear)
        )

        def experts(rngs: nnx.Rngs) -> MoE:
            options = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32, "rngs": rngs}
            return MoE(llama, products=plain.PlainExperts(dot), has_losses=True, **options)

        network = plain.PlainLlama(
            llama.vocab, llama.dim, llama.layers, llama.heads, llama.kv_heads, llama.mlp_dim, rngs,
            experts=experts if self.experts else None,
        )  # fmt: skip
        return fp8jax.nnx.quantize(network, recipe) if changes_layers(recipe) else network


@dataclasses.dataclass(frozen=True)
class BytePairSetting(Setting):
    """A model with byte-pair encoding. Each process trains the encoding on the training text."""

    vocab: int = 8192  # type: ignore[misc]


# Operand formats of the three matmuls of `coat`, which identify them.
PRODUCTS = {("e4m3", "e4m3"): "forward", ("e5m2", "e4m3"): "dgrad", ("e4m3", "e5m2"): "wgrad"}


@dataclasses.dataclass(frozen=True)
class ParityArm:
    """A recipe with changes of its training.

    Attributes:
        recipe: the recipe.
        product: "forward", "dgrad" or "wgrad": a matmul to damage, in a recipe with `coat`'s formats.
        lost_bits: mantissa bits to remove from the operands of this matmul.
        master, release: settings of `experiments.train` with these names.
        rounding: operands to round in a bf16 model on the fixed batch.
    """

    recipe: fp8jax.Recipe
    product: str | None = None
    lost_bits: int = 0
    master: str = ""
    release: Literal["", "previous", "twice"] = ""
    rounding: "Rounding | None" = None


@contextlib.contextmanager
def damaged(arm: ParityArm) -> Iterator[None]:
    """A context in which the arm's matmul is traced with codes of fewer mantissa bits, rounded to nearest.

    Raises:
        RuntimeError: no such matmul was traced, so there was no damage.
    """
    if arm.product is None:
        yield
        return
    matmul, met = product.matmul, list[bool]()

    def replaced(a: Any, b: Any, **how: Any) -> jax.Array:
        if PRODUCTS.get((a.spec.format, b.spec.format)) == arm.product:
            met.append(True)
            a, b = drop_low_bits(a, arm.lost_bits), drop_low_bits(b, arm.lost_bits)
        return matmul(a, b, **how)

    with mock.patch.object(product, "matmul", replaced):
        yield
    if not met:
        raise RuntimeError(
            f"the recipe {arm.recipe.name!r} has no {arm.product} product of codes, so no operand was changed"
        )


def drop_low_bits(q: fp8jax.QTensor, lost_bits: int) -> fp8jax.QTensor:
    """Returns codes rounded to fewer mantissa bits, in the same dtype."""
    fmt = formats.get(q.spec.format)
    bits = fmt.mantissa_bits - lost_bits
    if bits < 0:
        raise ValueError(f"{fmt.name} has no {lost_bits} mantissa bits to lose")
    largest = 2.0 ** np.floor(np.log2(fmt.max)) * (2 - 2.0**-bits)
    values = jax.lax.reduce_precision(q.codes.astype(jnp.float32), 8, bits)
    return dataclasses.replace(q, codes=jnp.clip(values, -largest, largest).astype(q.codes.dtype))


def replicas(arm: ParityArm) -> int:
    """Returns the number of devices for a batch: all if a recipe has a format for gradient communication, else one."""
    return jax.device_count() if arm.recipe.comm.gradients is not None else 1


class PlainState(NamedTuple):
    """A trained model of a `PlainSetting`: all variables, and the optimizer state."""

    network: nnx.State
    opt_state: Any


def plain_programs(
    recipe: fp8jax.Recipe, setting: PlainSetting, *, is_observed: bool = False, generator: str | None = None
) -> tuple[Any, Any, int]:
    """Returns `programs` of a `PlainSetting`.

    Args:
        recipe: the recipe of the model and its optimizer.
        setting: the model and its schedule.
        is_observed: whether `train` also returns `fp8jax.telemetry` of each step, with a leading axis of steps.
        generator: `impl` of `jax.random.key` for the parameters. "rbg" compiles faster.
    """
    optim = config.Optim(steps=setting.steps, warmup=setting.warmup, lr=setting.lr)
    tx = make_optimizer(config.Config(optim=optim), recipe)

    def begin(seed: jax.typing.ArrayLike) -> tuple[nnx.Module, nnx.Optimizer]:
        network = setting.model(recipe, nnx.Rngs(jax.random.key(seed, impl=generator)))
        return network, fp8jax.nnx.Optimizer(network, tx, wrt=nnx.Param)

    abstract = nnx.eval_shape(lambda: begin(0))
    graph, network_graph = nnx.graphdef(abstract), nnx.graphdef(abstract[0])
    parameters = count(nnx.state(abstract[0], nnx.Param))

    def run(seed: jax.Array, text: jax.Array, starts: jax.Array) -> tuple[Any, ...]:
        def step(state: nnx.State, starts: jax.Array) -> tuple[nnx.State, jax.Array]:
            tokens = text[starts[:, None] + jnp.arange(setting.length + 1)].astype(jnp.int32)
            network, optimizer = nnx.merge(graph, state)

            def loss_fn(network: Any) -> tuple[jax.Array, jax.Array]:
                loss = cross_entropy(network(tokens[:, :-1]), tokens[:, 1:])
                routers, total = router_losses(nnx.state(network)), loss
                if routers:
                    total += optim.balance_coefficient * routers["balance_loss"]
                    total += optim.z_coefficient * routers["z_loss"]
                return total, loss

            (_, loss), grads = fp8jax.nnx.value_and_grad(loss_fn, has_aux=True)(network)
            optimizer.update(network, grads)
            return nnx.state((network, optimizer)), loss

        def observed(state: nnx.State, starts: jax.Array) -> tuple[nnx.State, Any]:
            (state, loss), found = fp8jax.telemetry(step)(state, starts)
            return state, (loss, found)

        state = nnx.state(begin(seed))
        if is_observed:
            state, (losses, found) = jax.lax.scan(observed, state, starts)
            return final(state), losses, found
        state, losses = jax.lax.scan(step, state, starts)
        return final(state), losses

    def final(state: nnx.State) -> PlainState:
        network, optimizer = nnx.merge(graph, state)
        return PlainState(nnx.state(network), nnx.as_pure(optimizer.opt_state))

    def validate(state: PlainState, sequences: jax.Array) -> jax.Array:
        def loss(tokens: jax.Array) -> jax.Array:
            # Variables can only be set in the trace that created them; these come from an outer trace.
            network: Any = nnx.merge(network_graph, jax.tree.map(lambda x: x, state.network))
            network.eval()
            return cross_entropy(network(tokens[:, :-1]), tokens[:, 1:])

        return jax.lax.map(loss, sequences)

    return jax.jit(run), jax.jit(validate), parameters


def programs(arm: ParityArm, setting: Setting) -> tuple[Any, Any, int]:
    """Returns a training run, its validation, and the number of parameters.

    Returns:
        `train(seed, text, starts)`: from tokens (N,) and int32 starts (steps, batch) of sequences to a state and fp32
            losses (steps,). Losses are NaN from the first step with a non-finite loss or gradient.
        `validate(state, sequences)`: from int32 (count, batch, length + 1) to fp32 losses (count,).
        Number of parameters.
    """
    if isinstance(setting, PlainSetting):
        return plain_programs(arm.recipe, setting)
    of = {"master": arm.master, "release": arm.release}
    optim = config.Optim(steps=setting.steps, warmup=setting.warmup, lr=setting.lr, **of)  # type: ignore[arg-type]
    recipe = with_master(arm.recipe, arm.master)
    tx = make_optimizer(config.Config(optim=optim), recipe)
    rows = mesh.batches(mesh.make(replicas(arm), 1)) if replicas(arm) > 1 else None
    task = Task(setting.llama, tx, recipe, remat=False, seed=0, rows=rows)

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
        """Returns start positions of the sequences of a seed, int32 (steps, batch), the same for all arms."""
        max_start = len(self.train) - setting.length - 1
        return np.random.default_rng(seed).integers(0, max_start, (setting.steps, setting.batch), dtype=np.int32)


def read_text(patterns: Sequence[str], setting: Setting) -> Text:
    """Returns files as tokens, split as in `experiments.train`. Without patterns: the standard library.

    Raises:
        UserError: a file is missing or there is too little text.
    """
    corpus = data.read_corpus(patterns, setting.valid_fraction)
    tokenizer = Bytes() if setting.vocab == Bytes.vocab else BytePair.train(corpus.train, setting.vocab)
    tokens = data.encode(corpus, tokenizer, setting.length)
    valid = data.valid_batches(tokens.valid, setting.length, setting.batch, setting.valid // setting.batch)
    return Text(tokens.train, valid, tokens.fingerprint)


def settings(recipe: fp8jax.Recipe) -> dict[str, str]:
    """Returns the non-default settings of a recipe, by "part.field". They change if the recipe changes."""
    return {
        f"{part.name}.{field.name}": str(value)
        for part in dataclasses.fields(recipe)
        if dataclasses.is_dataclass(of := getattr(recipe, part.name))
        for field in dataclasses.fields(of)
        if (value := getattr(of, field.name)) != field.default
    }


def read_settings(stored: Mapping[str, str]) -> dict[str, str]:
    """Converts settings of a file, possibly with older names and values, to the form of `settings`."""
    return {name: str(value) for name, value in config.with_new_names(stored).items()}


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Operands of linear layers to quantize per tensor and decode; matmuls are in bf16.

    Attributes:
        x, w, dy: a `QuantSpec` as text, or None for an unrounded operand.
    """

    x: str | None = None
    w: str | None = None
    dy: str | None = None


class FixedBatch(NamedTuple):
    """A user-written Llama that overfits one batch."""

    vocab: int = 32_000
    dim: int = 2048
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4
    mlp_dim: int = 5632
    batch: int = 8
    length: int = 2048
    steps: int = 21


def rounded(x: jax.Array, spec: str | None) -> jax.Array:
    """Quantizes and decodes an array, in its dtype. Without a spec, returns it unchanged."""
    if spec is None:
        return x
    key = jax.random.key(jnp.sum(jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)))
    return fp8jax.quantize(x, spec, key=key if "stochastic" in spec else None).dequantize(x.dtype)


def product_of(rounding: Rounding) -> Callable[..., jax.Array]:
    """Returns a `dot_general` for `nnx.Linear` that rounds the operands of its three matmuls."""

    @jax.custom_vjp
    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return rounded(x, rounding.x) @ rounded(w, rounding.w)

    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x, w = rounded(x, rounding.x), rounded(w, rounding.w)
        return x @ w, (x, w)

    def backward(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        (x, w), dy = residuals, rounded(dy, rounding.dy)
        return dy @ w.T, jnp.einsum("...i,...o->io", x, dy)

    multiply.defvjp(forward, backward)

    def dot_general(x: jax.Array, w: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return multiply(x, w)

    return dot_general


def fixed_batch_run(arm: ParityArm, setting: FixedBatch) -> Callable[[int], list[float]]:
    """Returns a function from a seed to the losses of all steps. It compiles once for all seeds."""
    recipe, rounding = arm.recipe, arm.rounding

    def begun(key: jax.Array) -> tuple[nnx.Module, nnx.Optimizer]:
        network: Any = plain.PlainLlama(*setting[:6], nnx.Rngs(key))
        if rounding is not None:
            for path, layer in nnx.iter_graph(network):
                if isinstance(layer, nnx.Linear) and "head" not in path:
                    layer.dot_general = product_of(rounding)
        elif recipe.linear.is_quantized or recipe.context.residual is not None:
            network = fp8jax.nnx.quantize(network, recipe)
        if rounding is not None or recipe == fp8jax.recipes.bf16():
            tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE, weight_decay=DECAY))
            return network, nnx.Optimizer(network, tx, wrt=nnx.Param)
        tx = fp8jax.optimizer(recipe, RATE, weight_decay=DECAY, clip=CLIP)
        return network, fp8jax.nnx.Optimizer(network, tx, wrt=nnx.Param)

    key = functools.partial(jax.random.key, impl="rbg")
    graph, _ = nnx.split(nnx.eval_shape(begun, key(0)))
    begin = jax.jit(lambda key: nnx.state(begun(key)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, inputs: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        network, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda network: cross_entropy(network(inputs), labels))(network)
        optimizer.update(network, grads)
        return nnx.state((network, optimizer)), value

    inputs, labels = plain.batch("text", setting.batch, setting.length, setting.vocab)

    def run(seed: int) -> list[float]:
        state, losses = begin(key(seed)), []
        for _ in range(setting.steps):
            state, value = step(state, inputs, labels)
            losses.append(value)
        return [float(value) for value in losses]

    return run


def gpu_turn(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Locks the GPU against other processes that train into the folder, so that runs do not slow each other down."""
    return common.hold(folder / f".gpu{os.environ.get('CUDA_VISIBLE_DEVICES', '')}")


def text_run(
    arm: ParityArm, setting: Setting, text: Text, folder: Path
) -> tuple[Callable[[int], dict[str, Any]], dict[str, Any]]:
    """Returns a function from a seed to losses (means of `STRIDE` steps) and validation loss, and facts on the run.

    Programs are compiled first. A call of the function waits for other processes that train into `folder`.
    """
    run, validate, parameters = programs(arm, setting)
    train_N = jax.device_put(text.train)
    run = run.lower(jnp.int32(0), train_N, text.starts(0, setting)).compile()
    validate = validate.lower(run.out_info[0], text.valid).compile()
    facts: dict[str, Any] = {"parameters": parameters, "replicas": replicas(arm)}

    def of_seed(seed: int) -> dict[str, Any]:
        with gpu_turn(folder):
            state, losses = run(jnp.int32(seed), train_N, text.starts(seed, setting))
            valid = float(np.mean(validate(state, text.valid)))
        sizes = fp8jax.state_bytes(state.opt_state)
        facts["moments"] = (sizes["mu"] + sizes["nu"]) / parameters
        curve = np.asarray(losses, np.float64).reshape(-1, STRIDE).mean(1)
        return {"valid_loss": round(valid, 6), "losses": [round(x, 5) for x in curve.tolist()]}

    return of_seed, facts


def train_arm(
    name: str,
    arm: ParityArm,
    seeds: Sequence[int],
    setting: Setting | FixedBatch,
    path: Path,
    *,
    text: Text | None = None,
    has_time: Callable[[float], bool] = lambda _: True,
) -> None:
    """Trains the seeds of an arm that are not in a file, and writes the file after each.

    Args:
        name: name of the arm.
        arm: the arm.
        seeds: the seeds.
        setting: the model and its schedule.
        path: JSON file.
        text: the training text; None with a `FixedBatch`.
        has_time: called with the seconds of the last run (0 before the first). Training ends if it returns False.

    Raises:
        UserError: the file has another recipe, setting, text or device.
    """
    header = {"arm": name, "recipe": settings(arm.recipe), "text": "" if text is None else text.fingerprint,
              "setting": setting._asdict() if isinstance(setting, FixedBatch) else dataclasses.asdict(setting),
              "device": jax.devices()[0].device_kind}  # fmt: skip
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else header | {"runs": {}}
    # Older files lack some of these.
    if "recipe" in content:
        content["recipe"] = read_settings(content["recipe"])
    changed = [key for key, value in header.items() if content.get(key, value) != value]
    if changed:
        raise UserError(f"{path} was written with another {', '.join(changed)}; delete it, or use other --results")
    content["runs"] = runs_of(content)
    missing = [seed for seed in seeds if str(seed) not in content["runs"]]
    if not missing or not has_time(0):
        return
    facts: dict[str, Any] = {}
    if isinstance(setting, FixedBatch):
        losses_of = fixed_batch_run(arm, setting)
        run: Callable[[int], dict[str, Any]] = lambda seed: {"losses": losses_of(seed)}  # noqa: E731
    else:
        assert text is not None
        run, facts = text_run(arm, setting, text, path.parent)
    seconds = 0.0
    for seed in missing:
        if not has_time(seconds):
            return
        start = time.perf_counter()
        result = run(seed)
        seconds = time.perf_counter() - start
        content |= facts | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
        content["runs"][str(seed)] = {"commit": record.commit(), **result, "seconds": round(seconds, 2)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
        print(f"{name}, seed {seed}: loss {result['losses'][-1]:.4f}, {seconds:.1f} s", flush=True)


def runs_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the runs of a file by seed. Older files of the fixed batch have only losses, all of one commit."""
    if "runs" in content:
        return dict(content["runs"])
    return {seed: {"losses": losses, "commit": content["commit"]} for seed, losses in content["losses"].items()}
