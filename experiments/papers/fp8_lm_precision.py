"""FP8-LM's precision ablation (Table 6, Figure 8) at small scale: `python -m experiments.papers.fp8_lm_precision`.

A small Llama is trained in fp32. Between steps, the master weight, the gradient, the first or the second moment is
rounded to a storage format. Peng et al., FP8-LM, 2023, section 2.2. On a GPU, `--model 125m --data books.txt --seq-len
512 --lr 1e-3` (85M parameters) takes minutes and writes results/fp8_lm_precision_125m.json.
"""

import argparse
import concurrent.futures
import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import fp8jax
from experiments.models import sizes
from experiments.models.llama import LlamaConfig
from experiments.papers import common
from experiments.papers.common import Row
from experiments.text import data
from experiments.text.tokenizer import Bytes
from experiments.train.optimizer import decay_mask
from experiments.train.task import Task, exact_task
from fp8jax.core import formats

LLAMA = LlamaConfig(vocab=256, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=192)
SEQ, BATCH, STEPS, RATE = 64, 16, 400, 3e-3
B1, B2, EPS, CLIP, DECAY, WARMUP = 0.9, 0.95, 1e-8, 1.0, 0.1, 20
SEEDS = (0, 1, 2)
TAIL = 40

# One scale per tensor (per layer if layers are stacked), as in FP8-LM; and COAT's storage as a remedy.
_TENSOR = functools.partial(fp8jax.QuantSpec, granularity="tensor")
_COAT = functools.partial(fp8jax.QuantSpec, "e4m3", "group", 128, expand=True)
STORAGES: dict[str, fp8jax.QuantSpec | str] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16, scaled": _TENSOR("fp16"),
    "e4m3, scaled": _TENSOR("e4m3"),
    "e5m2, scaled": _TENSOR("e5m2"),
    "e4m3, no zeros": _TENSOR("e4m3", flush_to_zero=False),
    "COAT, first": _COAT(),
    "COAT, second": _COAT(flush_to_zero=False),
}


class PrecisionArm(NamedTuple):
    """Storage of master weight, gradient and moments, by name in `STORAGES`."""

    master: str = "fp32"
    gradient: str = "fp32"
    first: str = "fp32"
    second: str = "fp32"


BASE = "all fp32"
ARMS = {
    BASE: PrecisionArm(),
    "master fp16, scaled": PrecisionArm(master="fp16, scaled"),
    "master bf16": PrecisionArm(master="bf16"),
    "master e4m3": PrecisionArm(master="e4m3, scaled"),
    "gradient e4m3": PrecisionArm(gradient="e4m3, scaled"),
    "gradient e5m2": PrecisionArm(gradient="e5m2, scaled"),
    "m e4m3": PrecisionArm(first="e4m3, scaled"),
    "m e5m2": PrecisionArm(first="e5m2, scaled"),
    "v fp16, scaled": PrecisionArm(second="fp16, scaled"),
    "v e4m3": PrecisionArm(second="e4m3, scaled"),
    "v e5m2": PrecisionArm(second="e5m2, scaled"),
    "v e4m3, never to zero": PrecisionArm(second="e4m3, no zeros"),
    "v e4m3, COAT": PrecisionArm(second="COAT, second"),
    "FP8-LM: master fp16, gradient and m e4m3, v fp16": PrecisionArm(
        "fp16, scaled", "e4m3, scaled", "e4m3, scaled", "fp16, scaled"
    ),
    "the same with v e4m3": PrecisionArm("fp16, scaled", "e4m3, scaled", "e4m3, scaled", "e4m3, scaled"),
    "the same with m and v as COAT": PrecisionArm("fp16, scaled", "e4m3, scaled", "COAT, first", "COAT, second"),
}


def store(storage: fp8jax.QuantSpec | str, tree: Any) -> Any:
    """Returns a stored and decoded tree in fp32."""

    def leaf(path: Any, x: jax.Array) -> jax.Array:
        if isinstance(storage, str):
            # On a GPU, XLA removes a cast to bf16 and back; it keeps this operation.
            kind = jnp.finfo(formats.get(storage).dtype)
            return jax.lax.reduce_precision(x, kind.nexp, kind.nmant)
        stacked = int("layers" in jax.tree_util.keystr(path)) if storage.granularity == "tensor" else 0
        return fp8jax.quantize(x, fp8jax.QuantSpec(**{**vars(storage), "layer_axes": stacked})).dequantize()

    return jax.tree_util.tree_map_with_path(leaf, tree)


def store_as(index: jax.Array, tree: Any) -> Any:
    """Returns a tree after storage number `index` of `STORAGES`. The index is traced, so all arms share a program."""
    return jax.lax.switch(index, [functools.partial(store, storage) for storage in STORAGES.values()], tree)


def make_run(task: Task, steps: int, rate: float) -> Any:
    """Returns the compiled training, from storages (4,), parameters, tokens (steps, B, T + 1) to losses (steps,)."""
    adam = optax.scale_by_adam(B1, B2, EPS)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(WARMUP, steps - 1), steps, rate / 10)

    def run(storages: jax.Array, params: Any, tokens_SxBxT: jax.Array) -> jax.Array:
        master, gradient, first, second = storages

        def step(carry: tuple[Any, Any], tokens_BxT: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
            params, state = carry
            losses, grads, _ = task.gradients(params, {}, tokens_BxT)
            grads, _ = optax.clip_by_global_norm(CLIP).update(grads, optax.EmptyState())
            rate_now = schedule(state.count)
            updates, state = adam.update(store_as(gradient, grads), state)
            updates = jax.tree.map(
                lambda u, p, decays: u + DECAY * p if decays else u, updates, params, decay_mask(params)
            )
            params = store_as(master, jax.tree.map(lambda p, u: p - rate_now * u, params, updates))
            state = state._replace(mu=store_as(first, state.mu), nu=store_as(second, state.nu))
            return (params, state), losses["loss"]

        params = store_as(master, params)
        return jax.lax.scan(step, (params, adam.init(params)), tokens_SxBxT)[1]

    return jax.jit(run)


def train_arms(
    llama: LlamaConfig,
    tokens_SxBxT: np.ndarray,
    arms: dict[str, PrecisionArm],
    seeds: Sequence[int],
    rate: float = RATE,
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Returns losses (steps,) of all arms with the first seed, and of fp32 with all seeds, on the same batches.

    Runs are distributed over the devices.

    Args:
        llama: the model.
        tokens_SxBxT: one batch per step, (steps, B, T + 1).
        arms: storages by name; `BASE` is fp32.
        seeds: seeds of the initial parameters.
        rate: peak learning rate.
    """
    run = make_run(exact_task(llama, seeds[0]), len(tokens_SxBxT), rate)
    names, devices = list(STORAGES), jax.devices()
    runs = [(BASE, PrecisionArm(), seed) for seed in seeds]
    runs += [(name, arm, seeds[0]) for name, arm in arms.items() if name != BASE]

    def run_on_device(i: int) -> list[np.ndarray]:
        # The host takes part in every step, so each device needs a thread.
        with jax.default_device(devices[i]):
            starts = {seed: jax.jit(exact_task(llama, seed).init)().params for _, _, seed in runs[i :: len(devices)]}
            results = []
            for name, arm, seed in runs[i :: len(devices)]:
                storages = jnp.array([names.index(s) for s in arm])
                results.append(np.asarray(run(storages, starts[seed], tokens_SxBxT)))
                print(f"{name}, seed {seed}: {final(results[-1]):.4f}", flush=True)
        return results

    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        parts = list(pool.map(run_on_device, range(len(devices))))
    losses_by_run = [parts[k % len(devices)][k // len(devices)] for k in range(len(runs))]
    losses = {name: of for (name, _, seed), of in zip(runs, losses_by_run, strict=True) if seed == seeds[0]}
    return {name: losses[name] for name in arms}, losses_by_run[: len(seeds)]


def final(losses: np.ndarray, tail: int = TAIL) -> float:
    """Returns the mean loss of the last steps, or infinity if a loss is not finite."""
    return float(losses[-tail:].mean()) if np.isfinite(losses).all() else float("inf")


def rows(losses: dict[str, np.ndarray], baseline: list[np.ndarray]) -> list[Row]:
    """Returns final losses, relative to fp32."""
    base = final(losses[BASE])
    metric, unit = f"loss, last {TAIL} steps", "nats/token"
    table = []
    for name, curve in losses.items():
        value = final(curve)
        finite = np.isfinite(value)
        table.append(
            Row(name, metric, value if finite else None, unit, BASE, value / base if finite else None, table="Table 6")
        )
    noise = np.ptp([final(x) for x in baseline])
    table.append(Row("all fp32, largest less smallest of three seeds", metric, float(noise), unit, table="Table 6"))
    return table


def draw(losses: dict[str, np.ndarray]) -> Figure:
    """Draws smoothed loss curves minus that of fp32, by the part that is stored in fewer bits."""
    panels = {
        "master weight": "master",
        "gradient": "gradient",
        "first moment": "m ",
        "second moment": "v ",
        "together": "FP8-LM",
    }
    panels = {title: prefix for title, prefix in panels.items() if any(name.startswith(prefix) for name in losses)}
    figure = Figure(figsize=(2 + 3 * len(panels), 3.8), dpi=110, layout="constrained")
    width = max(1, min(20, len(losses[BASE]) // 4))
    kernel = np.ones(width) / width
    base = np.convolve(losses[BASE], kernel, "valid")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, prefix) in zip(all_axes, panels.items(), strict=True):
        shown = {n: x for n, x in losses.items() if n.startswith(prefix) or (prefix == "FP8-LM" and "same" in n)}
        for name, curve in shown.items():
            axes.plot(np.convolve(curve, kernel, "valid") - base, label=name.split(":")[0], lw=1)
        axes.axhline(0, color="black", lw=0.7)
        axes.set_yscale("symlog", linthresh=0.02)
        axes.set(title=title, xlabel="step")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("loss minus fp32's (nats per token)")
    return figure


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the model and its training."""
    parser.add_argument("--model", choices=sizes.NAMES, help="a larger model (default: one of 131,392 parameters)")
    parser.add_argument("--data", nargs="+", default=[], help="text to train on (default: the standard library)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--seq-len", type=int, default=SEQ)
    parser.add_argument("--lr", type=float, default=RATE, help="peak learning rate")


def table(arguments: argparse.Namespace) -> common.Table:
    """Returns the results file with its figure, for the default or a larger model.

    Raises:
        UserError: see `data.read_corpus`.
    """
    corpus = data.read_corpus(arguments.data, 0.05)
    llama = sizes.get(arguments.model, LLAMA.vocab) if arguments.model else LLAMA
    batch, length, rate = arguments.batch, arguments.seq_len, arguments.lr
    batches = data.train_batches(data.encode(corpus, Bytes(), length).train, length, batch, seed=0)
    tokens_SxBxT = np.stack([next(batches) for _ in range(arguments.steps)])
    losses, baseline = train_arms(llama, tokens_SxBxT, ARMS, SEEDS, rate)
    parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(exact_task(llama, 0).init).params))
    text = "the text that --data names" if arguments.data else "the standard library's sources"
    arithmetic = "fp32" if jax.default_backend() == "cpu" else "fp32 (products in TF32, as JAX has them on a GPU)"
    notes = [
        f"A Llama of {parameters:,} parameters, {arguments.steps} steps of {batch * length:,} bytes of {text}, AdamW "
        f"({rate:g}, b1 {B1}, b2 {B2}, decay {DECAY}), arithmetic in {arithmetic}, the same batches in every arm. "
        "After every step, the named part is rounded to the format, to nearest, with a scale per tensor and layer. "
        "The noise is the range over three seeds of initial parameters.",
        "Our copy of the paper is a summary without Figure 8 and the values of Table 6. Its statements: scaled fp16 "
        "master weights are accurate, bf16 is slightly worse, e4m3 degrades, and second moments in e4m3 diverged. "
        "The paper trains 125M parameters and more for far longer. So short a run shows less of the effect of "
        "coarse master weights.",
    ]
    title = "FP8-LM: loss by storage format of optimizer state (Table 6, Figure 8)"
    options, suffix = "", ""
    if arguments.model:
        options = f"--model {arguments.model} --data TEXT --steps {arguments.steps} --batch {batch} --seq-len {length}"
        options, suffix = f"{options} --lr {rate:g}", f"_{arguments.model}"
        title = f"{title}: {parameters / 1e6:.0f}M parameters"
    return common.Table(
        f"fp8_lm_precision{suffix}", title, rows(losses, baseline), notes, draw(losses), options, "fp8_lm_precision"
    )


if __name__ == "__main__":
    sys.exit(common.run(__doc__, table, add_options))
