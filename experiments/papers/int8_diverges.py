"""INT8 fallback, Figure 8(a, b): outliers that int8 blocks cannot bear: `python -m experiments.papers.int8_diverges`.

A Llama is trained in bf16, and given outliers as pretrained GLU models have them (table 1) by a change that leaves its
function as it was; then it is trained on with each recipe. Options that are not here go to the first training, as
--model 60m --seq-len 1024 --batch 16 --steps 2000; give --block 128 there, which takes models at least 512 wide.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]

import fp8jax
from experiments import evaluate, flags
from experiments.errors import UserError
from experiments.files import write_json
from experiments.models.llama import Llama, SwiGLU, rope_tables
from experiments.papers import common
from experiments.papers.common import Row
from experiments.papers.int8_fallback import extremes
from experiments.text import data
from experiments.train import cli, config
from experiments.train.task import Task

RUN, SEEDS, STEPS, RATE, WARMUP, BLOCK, FACTOR = "tables_diverges", 3, 60, 3e-4, 10, 32, 256
SHAPE = "--layers 2 --dim 128 --heads 4 --kv-heads 4 --mlp-dim 1024"
FIRST = (
    "--batch 4 --seq-len 128 --steps 600 --lr 3e-3 --eval-every 600 --checkpoint-every 600 --sample-tokens 0 "
    "--log-every 100"
)
# One of so many blocks of channels has outliers: a quarter, less than what falls back at most.
SHARE, WITHIN = 4, 7
BASE, CONFIDENCE, TAIL, STRIDE = "bf16", 0.95, 0.2, 5
TRAINING, VALIDATION = "training loss", "validation loss"
# Of figure 8(b): the largest share of blocks that may fall back; one seed each.
RATES = {"int8_fallback, at most 2.5 %": 0.025, "int8_fallback, at most 10 %": 0.1}


@dataclasses.dataclass(frozen=True)
class SecondTraining:
    """How the model is trained on.

    Attributes:
        steps, lr: of the second training; its warm-up has `WARMUP` steps.
        block: side of the int8 blocks.
        factor: by which a norm's outlying channels are larger; those of a GLU are by its root.
    """

    steps: int = STEPS
    lr: float = RATE
    block: int = BLOCK
    factor: float = FACTOR


def arms(block: int) -> dict[str, fp8jax.Recipe]:
    """The recipes, with blocks of this side."""
    spec = f"int8:block{block}"
    stochastic = f"{spec}+stochastic"

    def of(recipe: fp8jax.Recipe, **how: Any) -> fp8jax.Recipe:
        linear = dataclasses.replace(recipe.linear, x=spec, w=spec, dy=stochastic, x_residual=stochastic, **how)
        return dataclasses.replace(recipe, linear=linear)

    whole = fp8jax.recipes.int8_fallback()
    recipes = {BASE: fp8jax.recipes.bf16(), "int8_block": of(fp8jax.recipes.int8_block()), "int8_fallback": of(whole)}
    return recipes | {name: of(whole, fallback_fraction_range=(0.0, most)) for name, most in RATES.items()}


def amplified(params: Any, block: int, factor: float) -> Any:
    """The same function with outliers: parameters of a Llama of `experiments.models`.

    In one of `SHARE` blocks of channels a channel of each norm's result is larger by the factor, and so is one of each
    GLU's result, by its root; the weights that read them are smaller by as much.

    Raises:
        UserError: the model is too narrow, or its norms have no scales.
    """
    layers = params["layers"]
    attention, mlp = layers["attention"], layers["mlp"]
    inner, width = mlp["down"]["kernel"].shape[1:]
    if min(inner, width) < SHARE * block:
        raise UserError(f"--block {block} needs a model at least {SHARE * block} wide, not {min(inner, width)}")
    if "scale" not in layers.get("attention_norm", {}):
        raise UserError("--model: outliers are given to norms that have scales; take a size that is no OLMo")
    normed, gated = (np.arange(WITHIN, size, SHARE * block) for size in (width, inner))
    root = float(np.sqrt(factor))

    def reading(linear: Any, channels: np.ndarray, factor: float) -> Any:
        return linear | {"kernel": linear["kernel"].at[:, channels, :].divide(factor)}

    norms = {
        name: {"scale": layers[name]["scale"].at[:, normed].multiply(factor)} for name in ("attention_norm", "mlp_norm")
    }
    up = reading(mlp["up"], normed, factor)
    mlp = mlp | {
        "gate": reading(mlp["gate"], normed, factor),
        "up": up | {"kernel": up["kernel"].at[:, :, gated].multiply(root)},
        "down": reading(mlp["down"], gated, root),
    }
    attention = attention | {name: reading(attention[name], normed, factor) for name in "qkv"}
    return params | {"layers": layers | norms | {"attention": attention, "mlp": mlp}}


def inputs(model: Llama, tokens_BxT: jax.Array) -> dict[str, np.ndarray]:
    """What linear layers of a model read, largest first among layers: of q, k and v; of gate and up; of down."""
    graph, stacked = nnx.split(model.layers)
    tables = rope_tables(tokens_BxT.shape[1], model.config.head_dim, model.config.rope_theta)
    x_NxD = model.embed(tokens_BxT.reshape(-1))
    activations: dict[str, list[jax.Array]] = {"q, k and v": [], "gate and up": [], "down": []}
    for i in range(model.config.layers):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
        assert isinstance(layer.mlp, SwiGLU)
        activations["q, k and v"].append(layer.attention_norm(x_NxD))
        x_NxD = x_NxD + layer.attention(activations["q, k and v"][-1], *tables)
        activations["gate and up"].append(layer.mlp_norm(x_NxD))
        gate, up = (linear(activations["gate and up"][-1]) for linear in (layer.mlp.gate, layer.mlp.up))
        activations["down"].append(jax.nn.silu(gate) * up)
        x_NxD = x_NxD + layer.mlp.down(activations["down"][-1])
    return {k: np.asarray(max(of, key=lambda x: jnp.max(jnp.abs(x))), np.float32) for k, of in activations.items()}


class Study:
    """The model after its first training, and what trains it on: a program for each recipe, compiled once."""

    def __init__(self, trained: evaluate.Trained, setting: SecondTraining) -> None:
        self.trained, self.setting, self.sizes = trained, setting, trained.config.data
        corpus = data.read_corpus(self.sizes.data, self.sizes.valid_fraction)
        self.tokens = data.encode(corpus, trained.tokenizer, self.sizes.seq_len)
        params = jax.tree.map(jnp.asarray, trained.params)
        self.params = amplified(params, setting.block, setting.factor)
        self.valid = data.valid_batches(self.tokens.valid, self.sizes.seq_len, self.sizes.batch, 16)

    def header(self) -> dict[str, Any]:
        """What a file of runs was made with, as JSON has it."""
        settings = dataclasses.asdict(self.setting) | {"first": self.trained.config.mathematics()}
        header: dict[str, Any] = json.loads(json.dumps(settings | {"text": self.tokens.fingerprint}, default=str))
        return header

    def train(self, name: str, recipe: fp8jax.Recipe, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Losses of each seed's order of the text; None from the first step on that is not finite."""
        optim = config.Optim(steps=self.setting.steps, warmup=WARMUP, lr=self.setting.lr)
        tx = cli.make_optimizer(config.Config(optim=optim), recipe)
        # A few steps: programs that compile fast.
        task = Task.build(self.trained.task.llama, tx, recipe, remat=False, seed=0, unroll=1)

        def run(params: Any, model_state: Any, batches: jax.Array) -> Any:
            state = task.init()._replace(params=params, model_state=model_state, opt_state=tx.init(params))

            def step(state: Any, batch: jax.Array) -> Any:
                state, metrics = task.step(state, batch)
                return state, jnp.where(metrics["healthy"], metrics["loss"], jnp.nan)

            state, losses = jax.lax.scan(step, state, batches)
            valid = jax.lax.map(lambda batch: task.loss(state.params, state.model_state, batch), self.valid)
            return losses, jnp.where(state.healthy, valid.mean(), jnp.nan)

        compiled, history = jax.jit(run), []
        fresh = jax.jit(task.init)().model_state
        if any(part.is_threshold for part in recipe.linear.states.values()):
            settle = jax.jit(task.observed)
            for i in range(evaluate.SETTLING):
                fresh = settle(self.params, fresh, self.valid[i % len(self.valid)])
        for seed in seeds:
            order = data.train_batches(self.tokens.train, self.sizes.seq_len, self.sizes.batch, 1000 + seed)
            batches = np.stack([next(order) for _ in range(self.setting.steps)])
            losses, valid = jax.device_get(compiled(self.params, fresh, batches))
            finite = lambda x: round(float(x), 5) if np.isfinite(x) else None  # noqa: E731
            history.append({TRAINING: [finite(x) for x in losses], VALIDATION: finite(valid)})
            print(f"{name}, seed {seed}: validation {history[-1][VALIDATION]}", flush=True)
        return history


def runs(study: Study, folder: Path, seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Losses of all arms and seeds; an arm's file is read where it was made before.

    Raises:
        UserError: a file is of another setting.
    """
    logs = {}
    for name, recipe in arms(study.setting.block).items():
        path = folder / f"{name}.json"
        wanted = 1 if name in RATES else seeds
        content: dict[str, Any] = (
            json.loads(path.read_text()) if path.exists() else {"header": study.header(), "runs": []}
        )
        if content["header"] != study.header():
            raise UserError(f"{path} was made with other settings: delete it, or give another --out")
        have = len(content["runs"])
        if have < wanted:
            content["runs"] += study.train(name, recipe, range(have, wanted))
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
        logs[name] = content["runs"][:wanted]
    return logs


def final(run: Mapping[str, Any]) -> dict[str, float]:
    """The training loss at the end, a mean of steps, and the validation loss; infinite where training diverged."""
    tail = run[TRAINING][-max(1, round(TAIL * len(run[TRAINING]))) :]
    ends = float("inf") if None in tail else float(np.mean(tail))
    return {TRAINING: ends, VALIDATION: float("inf") if run[VALIDATION] is None else run[VALIDATION]}


def difference(of: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """From bf16's with the same seeds, in percent, and half of its interval, infinite of one seed."""
    each = 100 * (np.array(of) / np.array(base[: len(of)]) - 1)
    if len(each) < 2 or not np.isfinite(each).all():
        return float(each.mean()), float("inf")
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(each) - 1) * np.std(each, ddof=1) / np.sqrt(len(each))
    return float(each.mean()), float(half)


def rows(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Final losses of all arms, and differences from bf16; no value where training diverged."""
    ends = {name: [final(run) for run in each] for name, each in logs.items()}
    listed = []

    def note(name: str, column: str, value: float, unit: str = "1") -> None:
        table = "Figure 8(b)" if name in RATES else "Figure 8(a)"
        shown = value if np.isfinite(value) else None
        listed.append(Row(name, column, shown, unit, table=table, pivot=(name, column)))

    for name, each in ends.items():
        note(name, "seeds", len(each))
        note(name, "diverged", sum(not np.isfinite(list(run.values())).all() for run in each))
        for metric in (TRAINING, VALIDATION):
            note(name, metric, float(np.mean([run[metric] for run in each])), "nats/token")
            if name != BASE:
                value, half = difference([run[metric] for run in each], [run[metric] for run in ends[BASE]])
                note(name, f"{metric}: % above bf16", value, "%")
                note(name, f"± ({metric})", half, "%")
    return listed


def magnitudes(study: Study) -> list[Row]:
    """Largest inputs of linear layers before and after the outliers came, as the paper's Table 1."""
    listed, tokens = [], jnp.asarray(study.valid[0][:, :-1])
    for when, params in (("before", study.trained.params), ("after", study.params)):
        model = study.trained.task.model(jax.tree.map(jnp.asarray, params), study.trained.model_state)
        for name, x in inputs(model, tokens).items():
            for level, value in zip(("token", "channel", "other"), extremes(x), strict=True):
                case = f"input of {name}, {when}"
                listed.append(Row(case, level, value, table="Table 1: largest outliers", pivot=(case, level)))
    return listed


def draw(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Training losses above bf16's with the same seed: all seeds of the main arms, and the rates of figure 8(b)."""
    figure = Figure(figsize=(11, 3.8), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for i, (name, each) in enumerate(logs.items()):
        for seed, run in enumerate(each if name != BASE else ()):
            axes = right if name in RATES else left
            losses, base = (np.array(r[TRAINING], float) for r in (run, logs[BASE][seed]))
            count = len(losses) // STRIDE * STRIDE
            curve = (100 * (losses / base - 1))[:count].reshape(-1, STRIDE).mean(1)
            label = name if seed == 0 else None
            axes.plot(STRIDE * np.arange(1, len(curve) + 1), curve, color=f"C{i}", label=label, linewidth=1)
    for axes, title in ((left, "all seeds"), (right, "fewer blocks may fall back")):
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.set(xlabel="step", title=title)
        axes.legend(fontsize=8)
    left.set_ylabel("training loss, % above bf16's")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what OUT lacks and writes results/int8_diverges.json and .png."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of training runs (default: runs)")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"orders of the text (default: {SEEDS})")
    for field in dataclasses.fields(SecondTraining):
        name = "--on-" + field.name if field.name in ("steps", "lr") else "--" + field.name
        parser.add_argument(name, type=type(field.default), default=field.default, dest=field.name)
    options, rest = parser.parse_known_args(argv)
    flags.recommend()
    setting = SecondTraining(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(SecondTraining)}
    )
    shape = [] if "--model" in rest else SHAPE.split()
    first = [*shape, *FIRST.split(), *rest]
    try:
        if options.seeds < 1:
            raise UserError(f"--seeds must be at least 1, got {options.seeds}")
        if setting.steps <= WARMUP:
            raise UserError(f"--on-steps must be above {WARMUP}, the warm-up's, got {setting.steps}")
        with common.alone(options.out / RUN):
            code = cli.main([*first, "--recipe", BASE, "--run", RUN, "--out", str(options.out)])
        if code:
            raise UserError(f"the first training ended with code {code}")
        study = Study(evaluate.load(options.out / RUN, BASE), setting)
        logs = runs(study, options.out / RUN / "on", options.seeds)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    notes = [
        f"First `experiments.train {' '.join(first)}` in bf16, on bytes of Python's own sources and docs where no "
        f"--data is given; then {setting.steps} steps of each recipe at a learning rate of {setting.lr:g}, in int8 "
        f"blocks of {setting.block}. Differences are from bf16 with the same seed, intervals of {CONFIDENCE:.0%}.",
        f"Outliers: in every {SHARE}th block of channels one of each norm's result is {setting.factor:g} times as "
        f"large, one of each GLU's {setting.factor**0.5:g} times; the weights that read them are smaller by as much, "
        "so that the function is the same. The paper fine-tunes Qwen2.5-1.5B, which has its own. Our copy has no "
        "numbers of its Figure 8.",
        f"Thresholds first follow {evaluate.SETTLING} passes of text, as in evaluation. A training loss is the mean of "
        f"the last {TAIL:.0%} of the steps. Where blocks of 32 are used, a model 128 wide has as many as one 512 wide "
        "has of 128.",
    ]
    title = "INT8 fallback: a GLU model with outliers (Figure 8(a, b))"
    settings = dataclasses.asdict(setting).items()
    defaults = dataclasses.asdict(SecondTraining())
    changed = [f"--{'on-' if k in ('steps', 'lr') else ''}{k} {v}" for k, v in settings if defaults[k] != v]
    arguments = " ".join([*changed, *rest])
    listed = [*magnitudes(study), *rows(logs)]
    common.write("int8_diverges", title, listed, notes, draw(logs), options.results, arguments=arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
