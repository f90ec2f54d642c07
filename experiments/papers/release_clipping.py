"""Clipping where layers are updated in the backward pass: `python -m experiments.papers.release_clipping`.

By shares of the global norm of the step before, or by the step's own, for which it takes another backward pass; beside
the plain step. A Llama of 0.2 M parameters on the text of Python's standard library; then the same with a batch of
random bytes now and then, whose gradients are large at once. Some ten minutes on two CPU cores.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

import fp8jax
from experiments.models.llama import LlamaConfig
from experiments.papers import common
from experiments.papers.common import Row
from experiments.text import data
from experiments.text.tokenizer import Bytes
from experiments.train.cli import make_optimizer
from experiments.train.config import Config, Optim
from experiments.train.task import Task

OPTIM = Optim(steps=400, lr=2e-3, warmup=20, clip=1.5)
LLAMA = LlamaConfig(vocab=256, dim=64, layers=3, heads=4, kv_heads=4, mlp_dim=128)
RECIPE = "coat_optimizer"
BATCH, LENGTH, SEEDS, VALID = 8, 48, 6, 16
# One batch of so many is of random bytes.
NOISE = 40
PLAIN, SHARES, TWICE = "plain step", "shares of the norm before", "two backward passes"
ARMS: dict[str, Literal["", "previous", "twice"]] = {PLAIN: "", SHARES: "previous", TWICE: "twice"}
TEXT, NOISY = "text", f"text, each {NOISE}th batch random bytes"
SMOOTHED = 10
NOTES = [
    f"{LLAMA.layers} layers of width {LLAMA.dim}, {OPTIM.steps} steps of {BATCH} x {LENGTH} bytes, moments in 8 bits, "
    f"at a learning rate of {OPTIM.lr} and b2 = {OPTIM.b2}, clipped at a norm of {OPTIM.clip}; {SEEDS} orders of the "
    "text, from the same weights. Losses of random bytes are left out. Differences are from the plain step with the "
    "same order, ± their standard deviation: two passes differ from it by rounding alone, which shows what that makes.",
    "By shares, each layer may have the share of the largest norm that it had of the norm of the step before: where "
    "its own norm doubles, that of all is taken to double. What is outside of layers, whose step is the last, is "
    "clipped by the step's own norm; in the first step each layer by its own. Two passes cost a forward and a backward "
    "pass more.",
]


class ClippedRun(NamedTuple):
    """What a training leaves.

    Attributes:
        losses: of each step, fp32 (steps,).
        norms: global norms of the gradients before they were clipped, likewise.
        valid: validation loss at the end.
    """

    losses: np.ndarray
    norms: np.ndarray
    valid: float


def noisy(batches: np.ndarray, seed: int) -> np.ndarray:
    """Batches (steps, rows, tokens), each `NOISE`th of which is one of random bytes."""
    changed, at = batches.copy(), np.arange(NOISE, len(batches), NOISE)
    changed[at] = np.random.default_rng(seed).integers(0, LLAMA.vocab, changed[at].shape)
    return changed


def train(arm: str, orders: Sequence[np.ndarray], valid: np.ndarray, optim: Optim = OPTIM) -> list[ClippedRun]:
    """A run of an arm for each order of batches, int32 (steps, rows, tokens)."""
    recipe = fp8jax.recipes.get(RECIPE)
    tx = make_optimizer(Config(optim=dataclasses.replace(optim, release=ARMS[arm])), recipe)
    task = Task.build(LLAMA, tx, recipe, remat=False, seed=0)

    @jax.jit
    def run(batches: jax.Array) -> Any:
        def step(state: Any, batch: jax.Array) -> Any:
            state, metrics = task.step(state, batch)
            return state, (metrics["loss"], metrics["grad_norm"])

        state, (losses, norms) = jax.lax.scan(step, task.init(), batches)
        return losses, norms, jax.lax.map(lambda x: task.loss(state.params, state.model_state, x), valid).mean()

    return [ClippedRun(np.asarray(a), np.asarray(b), float(c)) for a, b, c in (jax.device_get(run(x)) for x in orders)]


def texts(optim: Optim = OPTIM) -> tuple[dict[str, list[np.ndarray]], np.ndarray]:
    """Orders of training batches by the text's name, and validation batches."""
    tokens = data.encode(data.read_corpus((), 0.05), Bytes(), LENGTH)
    orders = []
    for seed in range(SEEDS):
        batches = data.train_batches(tokens.train, LENGTH, BATCH, seed)
        orders.append(np.stack([next(batches) for _ in range(optim.steps)]))
    valid = data.valid_batches(tokens.valid, LENGTH, BATCH, VALID)
    return {TEXT: orders, NOISY: [noisy(x, seed) for seed, x in enumerate(orders)]}, valid


def rows(logs: Mapping[tuple[str, str], Sequence[ClippedRun]], clip: float = OPTIM.clip) -> list[Row]:
    """Of each text and arm the losses at the end, their differences from the plain step's, and what was clipped."""
    listed = []
    for (text, arm), runs in logs.items():
        plain = logs[text, PLAIN]

        def note(column: str, value: float, unit: str = "1", arm: str = arm, text: str = text) -> None:
            listed.append(Row(f"{arm}, {text}", column, float(value), unit, table=text, pivot=(arm, column)))

        note("validation loss", np.mean([run.valid for run in runs]), "nats/token")
        for column, losses in (("validation", [run.valid for run in runs]), ("last tenth", _ends(runs))):
            base = [run.valid for run in plain] if column == "validation" else _ends(plain)
            each = 100 * (np.array(losses) / np.array(base) - 1)
            note(f"{column}: % above", each.mean(), "%")
            note(f"± ({column})", each.std(ddof=1) if len(each) > 1 else 0.0, "%")
        note("steps clipped", 100 * np.mean([run.norms > clip for run in runs]), "%")
        note("largest norm", max(run.norms.max() for run in runs))
    return listed


def _ends(runs: Sequence[ClippedRun]) -> list[float]:
    """Mean training losses of the last tenth of the steps, of text alone."""
    return [float(run.losses[_of_text(len(run.losses))][-len(run.losses) // 10 :].mean()) for run in runs]


def _of_text(steps: int) -> np.ndarray:
    at = np.arange(steps)
    return at[(at % NOISE != 0) | (at == 0)]


def draw(logs: Mapping[tuple[str, str], Sequence[ClippedRun]]) -> Figure:
    """Losses of each arm, all orders, and norms of one of them."""
    figure = Figure(figsize=(11, 6.6), dpi=110, layout="constrained")
    for column, text in zip(figure.subplots(2, 2).T, (TEXT, NOISY), strict=True):
        losses, norms = column
        for color, arm in enumerate(ARMS):
            for i, run in enumerate(logs[text, arm]):
                at = _of_text(len(run.losses))
                at = at[: len(at) // SMOOTHED * SMOOTHED]
                curve = run.losses[at].reshape(-1, SMOOTHED).mean(1)
                label = arm if i == 0 else None
                losses.plot(at[SMOOTHED - 1 :: SMOOTHED], curve, color=f"C{color}", lw=1, label=label)
            norms.plot(logs[text, arm][0].norms, color=f"C{color}", lw=0.8)
        norms.axhline(OPTIM.clip, color="k", ls=":", lw=0.8)
        losses.set(title=text, ylabel="training loss, text alone")
        norms.set(xlabel="step", ylabel="norm before clipping, first order", yscale="log")
        losses.legend(fontsize=8)
    return figure


def main() -> int:
    """Writes results/release_clipping.json and .png."""
    options = common.parse(__doc__)
    orders, valid = texts()
    logs = {}
    for arm in ARMS:
        both = train(arm, [x for each in orders.values() for x in each], valid)
        for i, text in enumerate(orders):
            logs[text, arm] = both[i * SEEDS : (i + 1) * SEEDS]
            print(f"{arm}, {text}: validation {np.mean([run.valid for run in logs[text, arm]]):.4f}", flush=True)
    listed = rows({(text, arm): logs[text, arm] for text in orders for arm in ARMS})
    title = "Clipping where layers are updated in the backward pass"
    common.write("release_clipping", title, listed, NOTES, draw(logs), options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
