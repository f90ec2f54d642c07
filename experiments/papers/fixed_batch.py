"""Which part of a recipe makes a large model learn a fixed batch later: paired seeds of 21 steps, part by part.

    python -m experiments.papers.fixed_batch --arms bf16 coat_fast
    python -m experiments.papers.fixed_batch --judge

The first command trains the seeds of some arms that results/parity_fixed_batch/ lacks. Several such processes, each on
a GPU of its own and with arms of its own, fill one folder. The second command writes the page. The model is a Llama of
1.1 B parameters as a user writes it, or a GPT-2 of 350 M (`--model gpt350m`). Each step trains on the same batch, a
noisy walk over tokens, with AdamW at 3e-4 from the first step on. A seed has the same initial weights in all arms of
JAX. Arms that name one operand round that operand alone; their products are in bf16. torchao's float8 is compared with
torch.compile's bf16. Steps, seeds and both measures were stated before the runs.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import fp8jax
from experiments import flags
from experiments.bench import models, step_torch
from experiments.bench.writings import BASE, CLIP, DECAY, RATE, cross_entropy
from experiments.errors import UserError
from experiments.files import write_json
from experiments.models import plain
from experiments.papers import common
from experiments.papers.common import Row
from experiments.papers.recipe_parity import Gap, gap
from experiments.results import record
from experiments.train import lock

STEPS, SEEDS, FOLDER = 21, 10, "parity_fixed_batch"
LAST, MEAN = f"loss of step {STEPS}", f"mean loss of {STEPS} steps"
TORCH_BASE = "torch bf16"
CONFIDENCE = 0.95
TABLE = "Paired with the same seeds of bf16"


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Operands of linear layers that are rounded to 8 bits and decoded, with one scale a tensor; products are in bf16.

    Attributes:
        x, w, dy: a `QuantSpec` as text, or None for an operand that is not rounded.
    """

    x: str | None = None
    w: str | None = None
    dy: str | None = None


def _coat_fast(**linear: Any) -> fp8jax.Recipe:
    recipe = fp8jax.recipes.coat_fast()
    return dataclasses.replace(recipe, linear=dataclasses.replace(recipe.linear, **linear))


PRESETS = ("coat_optimizer", "te_current", "coat", "coat_fast", "fast", "moss", "deepseek", "fp8_lm")
ARMS: dict[str, fp8jax.Recipe | Rounding | str] = {
    BASE: fp8jax.recipes.bf16(),
    **{name: fp8jax.recipes.get(name) for name in PRESETS},
    "x alone in e4m3": Rounding(x="e4m3"),
    "w alone in e4m3": Rounding(w="e4m3"),
    "dy alone in e5m2": Rounding(dy="e5m2"),
    "dy alone in e5m2, stochastic": Rounding(dy="e5m2+stochastic"),
    "contexts alone": dataclasses.replace(fp8jax.recipes.bf16(), context=fp8jax.recipes.coat_fast().context),
    "coat_fast, dy stochastic": _coat_fast(dy="e5m2+stochastic"),
    "coat_fast, all bits in all sums": _coat_fast(fast_accumulation=()),
    TORCH_BASE: TORCH_BASE,
    "torchao tensorwise": "torchao tensorwise",
}


class StudyModel(NamedTuple):
    """A model and its batch: `make` takes `nnx.Rngs`, `inputs` and `labels` are int32 (B, T)."""

    make: Callable[[nnx.Rngs], nnx.Module]
    user: models.UserModel


def _llama(shape: tuple[int, ...], vocab: int, rngs: nnx.Rngs) -> nnx.Module:
    return plain.PlainLlama(vocab, *shape, rngs)  # type: ignore[arg-type, call-arg]


def _gpt(rngs: nnx.Rngs) -> nnx.Module:
    user = models.MODELS["gpt350m"]
    return plain.PlainGPT(user.outputs, 1024, 24, 16, user.length, rngs)


MODELS = {
    "llama1b": StudyModel(functools.partial(_llama, models.LLAMA, 32_000), models.MODELS["llama1b"]),
    "gpt350m": StudyModel(_gpt, models.MODELS["gpt350m"]),
    "tiny": StudyModel(
        functools.partial(_llama, models.SMALL, 64),
        dataclasses.replace(models.MODELS["llama1b"], text="tiny Llama", batch=2, length=32, outputs=64),
    ),
}


def rounded(x: jax.Array, spec: str | None) -> jax.Array:
    """An array quantized by a spec and decoded, in its own dtype; as it is without one."""
    if spec is None:
        return x
    key = jax.random.key(jnp.sum(jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)))
    return fp8jax.quantize(x, spec, key=key if "stochastic" in spec else None).dequantize(x.dtype)


def product_of(rounding: Rounding) -> Callable[..., jax.Array]:
    """A `dot_general` for `nnx.Linear`, in whose three products the operands are rounded as a `Rounding` says."""

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


def runner(arm: fp8jax.Recipe | Rounding, model: StudyModel, steps: int = STEPS) -> Callable[[int], list[float]]:
    """A function from a seed to the losses of all steps; it compiles once for all seeds."""

    def begun(key: jax.Array) -> tuple[nnx.Module, nnx.Optimizer]:
        network = model.make(nnx.Rngs(key))
        if isinstance(arm, Rounding):
            for path, layer in nnx.iter_graph(network):
                if isinstance(layer, nnx.Linear) and "head" not in path:
                    layer.dot_general = product_of(arm)
        elif arm.linear.is_quantized or arm.context.residual is not None:
            network = fp8jax.nnx.quantize(network, arm)
        if isinstance(arm, Rounding) or arm == ARMS[BASE]:
            tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE, weight_decay=DECAY))
            return network, nnx.Optimizer(network, tx, wrt=nnx.Param)
        tx = fp8jax.optimizer(arm, RATE, weight_decay=DECAY, clip=CLIP)
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

    inputs, labels = plain.batch("text", model.user.batch, model.user.length, model.user.outputs)

    def run(seed: int) -> list[float]:
        state, losses = begin(key(seed)), []
        for _ in range(steps):
            state, value = step(state, inputs, labels)
            losses.append(value)
        return [float(value) for value in losses]

    return run


def torch_runner(name: str, model: StudyModel, steps: int = STEPS) -> Callable[[int], list[float]]:
    """The same by torch.compile: Flax's initializers, the same batch and optimizer."""
    llama = model.user.llama
    if llama is None:
        raise UserError(f"torch's arms build a Llama, not {model.user.text}: leave out {name!r}")
    arm = step_torch.TorchArm(name, llama, model.user.batch, model.user.length)
    torch = arm.torch
    inputs, labels = plain.batch("text", model.user.batch, model.user.length, model.user.outputs)
    arm.tokens = torch.tensor(np.concatenate([inputs, labels[:, -1:]], 1).tolist(), device="cuda")
    for group in arm.optimizer.param_groups:
        group.update(lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)

    def run(seed: int) -> list[float]:
        torch.manual_seed(seed)
        arm.optimizer.state.clear()
        with torch.no_grad():
            for weight in arm.parameters:
                if weight.ndim < 2:
                    weight.fill_(1.0)
                else:
                    torch.nn.init.trunc_normal_(weight, std=weight.shape[1] ** -0.5, a=-1.0, b=1.0)
        return [float(arm().loss) for _ in range(steps)]

    return run


def train_arm(name: str, model: StudyModel, path: Path, seeds: int, room: Callable[[float], bool]) -> None:
    """Trains the seeds of an arm that its file lacks, and writes the file after each."""
    content = json.loads(path.read_text()) if path.exists() else {"losses": {}}
    missing = [seed for seed in range(seeds) if str(seed) not in content["losses"]]
    if not missing:
        return
    arm, start = ARMS[name], time.perf_counter()
    if isinstance(arm, str):
        run = torch_runner(arm, model)
        device = step_torch.importlib.import_module("torch").cuda.get_device_name(0)
    else:
        run, device = runner(arm, model), jax.devices()[0].device_kind
    content |= {"arm": name, "model": model.user.text, "device": device, "commit": record.commit(),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat()}  # fmt: skip
    for seed in missing:
        if not room(time.perf_counter() - start):
            return
        start = time.perf_counter()
        content["losses"][str(seed)] = run(seed)
        write_json(path, content)
        print(f"{name}, seed {seed}: {content['losses'][str(seed)][-1]:.3f}, {time.perf_counter() - start:.1f} s",
              flush=True)  # fmt: skip


def measures(losses: Sequence[float]) -> dict[str, float]:
    """Both measures of a seed."""
    return {LAST: losses[-1], MEAN: float(np.mean(losses))}


def base_of(name: str) -> str:
    """The arm that an arm is compared with."""
    return TORCH_BASE if name in step_torch.ARMS else BASE


def judge(files: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Gap]:
    """Relative differences of each arm from its base, by measure, over seeds that both have."""
    found = dict[tuple[str, str], Gap]()
    for name, content in files.items():
        if (base := base_of(name)) == name or base not in files:
            continue
        for measure in (LAST, MEAN):
            arm, beside = ({int(seed): measures(losses)[measure] for seed, losses in of["losses"].items()}
                           for of in (content, files[base]))  # fmt: skip
            if (of := gap(arm, beside, CONFIDENCE)) is not None:
                found[name, measure] = of
    return found


def rows(files: Mapping[str, Mapping[str, Any]], gaps: Mapping[tuple[str, str], Gap]) -> list[Row]:
    """Means of both measures, differences in percent with their intervals, and p; a row an arm."""
    entries = []
    for name, content in files.items():
        put = lambda column, value, unit="1", name=name: entries.append(  # noqa: E731
            Row(name, column, value, unit, table=TABLE, pivot=(name, column))
        )
        put("seeds", len(content["losses"]))
        for measure in (LAST, MEAN):
            values = [measures(losses)[measure] for losses in content["losses"].values()]
            put(measure, float(np.mean(values)), "nats/token")
            if (of := gaps.get((name, measure))) is not None:
                put(f"{measure}: % above", 100 * of.value, "%")
                put(f"± ({measure})", 100 * of.half, "%")
                put(f"p ({measure})", of.p)
    return entries


def draw(files: Mapping[str, Mapping[str, Any]], gaps: Mapping[tuple[str, str], Gap]) -> Figure:
    """Mean losses by step, and each seed's difference with the interval of the mean."""
    figure = Figure(figsize=(12, 5), dpi=110, layout="constrained")
    curves, dots = figure.subplots(1, 2)
    for name, content in files.items():
        mean = np.mean(list(content["losses"].values()), axis=0)
        curves.plot(range(1, len(mean) + 1), mean, label=name, linewidth=2.5 if name == BASE else 1)
    curves.set(xlabel="step", ylabel="loss, nats/token, mean over seeds")
    curves.legend(fontsize=7)
    arms = list(dict.fromkeys(name for name, _ in gaps))
    for y, name in enumerate(arms):
        of = gaps[name, MEAN]
        dots.plot([100 * x for x in of.each], [y] * len(of.each), "o", color="0.6", ms=4)
        dots.errorbar(100 * of.value, y, xerr=100 * of.half, fmt="s", color="tab:red", capsize=4)
    dots.set_yticks(range(len(arms)), arms, fontsize=8)
    dots.invert_yaxis()
    dots.axvline(0, color="gray", linewidth=0.8)
    dots.set(xlabel=f"{MEAN}, % above bf16 with the same seed")
    dots.grid(alpha=0.3)
    return figure


def write(folder: Path, suffix: str, arguments: str, results: Path) -> None:
    """Writes results/CARD/fixed_batch.json and .png of what a folder of runs holds.

    Raises:
        UserError: runs of bf16 are missing, or the files are of several cards.
    """
    paths = [folder / f"{slug(name)}.json" for name in ARMS]
    files = {content["arm"]: content for path in paths if path.exists() for content in [json.loads(path.read_text())]}
    if BASE not in files:
        raise UserError(f"{folder} has no runs of bf16: train them first, with --arms bf16")
    if len(devices := {content["device"] for content in files.values()}) > 1:
        raise UserError(f"{folder} holds runs of {' and '.join(sorted(devices))}: train all arms on one card")
    gaps = judge(files)
    table = rows(files, gaps)
    sources = [(files[row.case]["commit"], files[row.case]["device"]) for row in table]
    notes = [
        f"{files[BASE]['model']}, {STEPS} steps on one batch, AdamW at {RATE:g} without warm-up, clipped at {CLIP}. "
        f"Seeds are paired: the same initial weights in all arms of JAX, and in both of torch. Intervals are of "
        f"{CONFIDENCE:.0%} each (Student's t); {len(gaps) // 2} arms are compared, so that some intervals of so many "
        "exclude zero by chance.",
        "Arms that name one operand round that operand alone in all linear layers but the head, with one scale a "
        "tensor; their products, contexts and moments are those of bf16.",
        *(f"{name}, {measure}: {100 * of.value:+.1f} ± {100 * of.half:.1f} % (p {of.p:.2g})."
          for (name, measure), of in gaps.items()),
    ]  # fmt: skip
    common.write(
        "fixed_batch", "Learning of one fixed batch, part by part", table, notes, draw(files, gaps), results,
        arguments=arguments, suffix=suffix, device=devices.pop(), sources=sources,
        date=max(content["date"] for content in files.values()),
    )  # fmt: skip
    print("\n".join(notes[2:]))


def slug(name: str) -> str:
    """The stem of an arm's file."""
    return name.replace(", ", "_").replace(" ", "_")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is missing of some arms, or judges; 1 where seeds are missing still."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama1b", help="default: %(default)s")
    parser.add_argument("--arms", nargs="*", metavar="ARM", help="which to train (default: all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each arm (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no seed would end")
    parser.add_argument("--judge", action="store_true", help="train nothing, write the page")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.arms or () if name not in ARMS]:
        parser.error(f"--arms: no {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, ARMS))}")
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: an interval takes 2 or more")
    suffix = "" if options.model == "llama1b" else f"_{options.model}"
    folder, begin = options.results / f"{FOLDER}{suffix}", time.perf_counter()

    def room(took: float) -> bool:
        return time.perf_counter() - begin + took < options.limit

    names = options.arms or list(ARMS)
    try:
        if options.judge:
            write(folder, suffix, "" if not suffix else f"--model {options.model}", options.results)
            return 0
        flags.recommend()
        if all(isinstance(ARMS[name], str) for name in names):
            jax.config.update("jax_platforms", "cpu")  # The GPU's memory is torch's.
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = folder / f"{slug(name)}.json"
            with lock.hold(path):
                train_arm(name, MODELS[options.model], path, options.seeds, room)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lacking = [name for name in names if not (path := folder / f"{slug(name)}.json").exists()
               or len(json.loads(path.read_text())["losses"]) < options.seeds]  # fmt: skip
    if lacking:
        print(f"not finished: {', '.join(lacking)}; give the same command again")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
