"""Automatic weight scaling beside just-in-time scales in a training run: `python -m experiments.papers.moss_scaling`.

MOSS, Figure 4 and equation 10. A Llama of 0.3 M parameters on the text of Python's standard library, bytes, 1,200 steps
with warm-up and cosine decay; then single weights under gradients made to move them far. Some minutes on two CPU cores.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.figure import Figure

import fp8jax
from experiments.models.llama import LlamaConfig
from experiments.papers import common
from experiments.papers.common import Row
from experiments.text import data
from experiments.text.tokenizer import Bytes
from experiments.train.cli import make_optimizer
from experiments.train.config import Config, Optim
from experiments.train.optimizer import schedule
from experiments.train.task import Task

INTERVAL, INTERVALS = 500, (1, 100, 500, 2000)
OPTIM = Optim(steps=1200, lr=1e-3, warmup=100)
PART = fp8jax.recipes.Linear("e4m3", "e4m3", "e5m2", w_scaling="automatic", weight_amax_interval=INTERVAL)
LLAMA = LlamaConfig(vocab=256, dim=96, layers=2, heads=4, kv_heads=4, mlp_dim=256)
BATCH, LENGTH = 8, 48
SHOWN = "mlp/down"
LIMIT, MEASURED, PAPER = "limit of Adam", "updates measured", "equation 10"
NOTES = [
    f"{LLAMA.layers} layers of width {LLAMA.dim}, {OPTIM.steps:,} steps, learning rate {OPTIM.lr} after {OPTIM.warmup} "
    f"steps, cosine to a tenth, b2 = {OPTIM.b2}, weight decay {OPTIM.weight_decay}; weights of all "
    f"{7 * LLAMA.layers} quantized matrices, measured again every {INTERVAL} steps. Ratios are of the automatic scale "
    "to the just-in-time one, over all matrices and steps: 2 costs e4m3 one of 18 binades.",
    '"limit of Adam" is the bound that the training program follows, without a reduction; "updates measured" the sum '
    'of the largest updates; "equation 10" the paper\'s rule with the peak learning rate in each step.',
    "Below 1 a weight saturates; above it e4m3 loses binades. In the paper's figure scales are said to stay close to "
    "those just in time; a weight of 0.1 that may move by 0.001 a step is bounded by 0.6 after 500.",
    "The lower table has gradients that grow as (b2 / b1)^i after silence; the figure is the largest update over the "
    "learning rate (equation 8: 1).",
    "The interval of figures other than 500 is computed from the same run: its weights and updates do not depend on it "
    "but through rounding.",
]


class Record(NamedTuple):
    """What a run leaves, fp32 (steps + 1, matrices), or (steps, matrices) of `moved`.

    Attributes:
        names: of the matrices.
        largest: magnitude of the weights, before the first step and after each.
        bound: the program's.
        moved: by how much the largest change of a step moved a weight.
    """

    names: list[str]
    largest: np.ndarray
    bound: np.ndarray
    moved: np.ndarray


def train(optim: Optim = OPTIM, llama: LlamaConfig = LLAMA) -> Record:
    """Trains with automatic scaling and keeps, of each step, the bounds and what they are bounds of."""
    recipe = fp8jax.Recipe("automatic", linear=PART)
    task = Task.build(llama, make_optimizer(Config(optim=optim), recipe), recipe, remat=False, seed=0)
    corpus = data.read_corpus((), 0.05)
    tokens = data.encode(corpus, Bytes(), LENGTH)
    batches = data.train_batches(tokens.train, LENGTH, BATCH, seed=0)

    def kernels(params: Any) -> dict[str, Array]:
        flat = {"/".join(k.key for k in path): leaf for path, leaf in jax.tree.leaves_with_path(params["layers"])}
        return {name.removesuffix("/kernel"): leaf for name, leaf in flat.items() if name.endswith("kernel")}

    def largest(tree: dict[str, Array]) -> Array:
        return jnp.concatenate([jnp.max(jnp.abs(leaf), (-2, -1)) for leaf in tree.values()])

    def bounds(state: Any) -> Array:
        bounds_seen = fp8jax.get_weight_amax_bounds(state.opt_state)
        return jnp.concatenate([bounds_seen["layers", *name.split("/"), "kernel"] for name in kernels(state.params)])

    @jax.jit
    def step(state: Any, tokens_BxT: Any) -> Any:
        before = kernels(state.params)
        state, metrics = task.step(state, tokens_BxT)
        after = kernels(state.params)
        moved = largest({name: after[name] - before[name] for name in before})
        return state, (largest(after), bounds(state), moved, metrics["loss"])

    state = jax.jit(task.init)()
    first, rows = (largest(kernels(state.params)), bounds(state)), []
    names = [f"{name}[{i}]" for name in kernels(state.params) for i in range(llama.layers)]
    for i in range(optim.steps):
        state, row = step(state, next(batches))
        rows.append(jax.tree.map(np.asarray, row))
        if i % 100 == 99:
            print(f"step {i + 1}: loss {row[-1]:.3f}", flush=True)
    tops, bounds_seen, moved, _ = (np.stack(column) for column in zip(*rows, strict=True))
    return Record(names, np.stack([first[0], *tops]), np.stack([first[1], *bounds_seen]), moved)


def follow(record: Record, rule: str, interval: int, optim: Optim = OPTIM) -> np.ndarray:
    """The bounds that a rule gives along a run, fp32 as `Record.largest`."""
    limit = fp8jax.max_adam_step(schedule(optim), optim.b1, optim.b2, optim.weight_decay)
    bounds = [record.largest[0]]
    for t, moved in enumerate(record.moved):
        start = record.largest[t] if t % interval == 0 else bounds[-1]
        add = {MEASURED: moved, PAPER: optim.lr}.get(rule)
        bounds.append(start + (np.asarray(limit(jnp.int32(t), jnp.asarray(start))) if add is None else add))
    return np.stack(bounds)


@jax.jit
def _largest_updates(b1: Array, b2: Array, gradients: Array) -> Array:
    """|update| / learning rate of Adam, after each of the gradients of one weight."""

    def step(carry: Any, g: Array) -> Any:
        m, v, t = carry
        m, v, t = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g, t + 1
        return (m, v, t), jnp.abs(m / (1 - b1**t)) / jnp.sqrt(v / (1 - b2**t) + 1e-30)

    return jax.lax.scan(step, (0.0, 0.0, 0.0), gradients)[1]


def adversary(b1: float, b2: float, steps: int = 1700, last: int = 300) -> tuple[float, float]:
    """The largest update over the learning rate that gradients reach, and the limit there."""
    t = np.arange(steps)
    gradients = np.where(t >= steps - last, (b2 / b1) ** np.minimum(t - steps + 1.0, 0), 0.0)
    ratio = float(_largest_updates(jnp.float32(b1), jnp.float32(b2), jnp.asarray(gradients, jnp.float32))[-1])
    return ratio, float(fp8jax.max_adam_step(1.0, b1, b2)(jnp.int32(steps - 1), jnp.zeros([])))


def draw(record: Record) -> Figure:
    """The scales of one matrix over the steps, and all ratios."""
    figure = Figure(figsize=(11, 3.8), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    i, scale = record.names.index(f"{SHOWN}[0]"), 1 / 448
    left.plot(scale * record.largest[:, i], color="k", label="just in time")
    for color, (rule, bounds) in enumerate(_rules(record, INTERVAL).items()):
        left.plot(scale * bounds[:, i], color=f"C{color}", lw=1, label=f"automatic, {rule}")
        right.plot((bounds / record.largest).max(1), color=f"C{color}", lw=1, label=f"{rule}, largest")
        right.plot((bounds / record.largest).min(1), color=f"C{color}", lw=1, ls=":")
    left.set(title=f"scale of layers/{SHOWN}, layer 0", xlabel="step", ylim=(0, None))
    right.set(title="automatic over just in time: largest, smallest (dotted)", xlabel="step", yscale="log")
    right.axhline(1, color="grey", lw=0.7)
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    return figure


def _rules(record: Record, interval: int) -> dict[str, np.ndarray]:
    program = {LIMIT: record.bound} if interval == INTERVAL else {LIMIT: follow(record, LIMIT, interval)}
    return program | {rule: follow(record, rule, interval) for rule in (MEASURED, PAPER)}


def rows(record: Record) -> list[Row]:
    table = []
    for interval in INTERVALS:
        for rule, bounds in _rules(record, interval).items():
            ratio = bounds[1:] / record.largest[1:]
            for metric, value in (
                ("smallest ratio", ratio.min()),
                ("mean ratio", np.exp(np.log(ratio).mean())),
                ("largest ratio", ratio.max()),
            ):
                pivot = (f"{rule}, interval {interval}", metric)
                table.append(Row(pivot[0], metric, float(value), table="automatic over just in time", pivot=pivot))
                print(f"{pivot[0]:34s} {metric}: {value:.5f}", flush=True)
    for b1, b2 in ((0.9, 0.9), (0.9, 0.95), (0.9, 0.98), (0.9, 0.999)):
        reached, limit = adversary(b1, b2)
        for metric, value in (("reached", reached), ("limit", limit), ("equation 8", 1.0)):
            pivot = (f"b1 = {b1}, b2 = {b2}", metric)
            table.append(Row(pivot[0], metric, value, table="largest update, in learning rates", pivot=pivot))
        print(f"b2 {b2}: {reached:.3f} reached, limit {limit:.3f}", flush=True)
    return table


def verdict(table: Sequence[Row]) -> list[str]:
    """Whether the bounds hold, how close they are, and whether equation 10 fails, in the run and on its adversaries."""
    of = {row.pivot: row.value for row in table if row.pivot and row.value is not None}
    least = {rule: min(of[f"{rule}, interval {n}", "smallest ratio"] for n in INTERVALS) for rule in (LIMIT, PAPER)}
    means = {n: of[f"{LIMIT}, interval {n}", "mean ratio"] for n in INTERVALS}
    cost = ", ".join(f"{float(np.log2(mean)):.2f} of a binade at {n}" for n, mean in means.items())
    reached = {case: x for (case, metric), x in of.items() if metric == "reached"}
    beyond, over = (sum(x > 1.001 * of[case, name] for case, x in reached.items()) for name in ("equation 8", "limit"))
    said = {True: "is never below 1", False: "is below 1 at times: weights saturate"}
    return [
        f"The program's bound {said[least[LIMIT] >= 1]} in this run, and costs, by the interval, {cost}. Equation 10 "
        f"{said[least[PAPER] >= 1]} in it.",
        f"On the lower table's gradients equation 8 is exceeded at {beyond} of {len(reached)} decays, the program's "
        f"limit at {over}.",
    ]


def main() -> int:
    """Regenerates results/moss_scaling.json and .png."""
    arguments = common.parse(__doc__)
    record = train()
    title = "MOSS: automatic weight scaling, its bounds, and what they are bounds of"
    table = rows(record)
    common.write("moss_scaling", title, table, [*NOTES, *verdict(table)], draw(record), arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
