"""MOSS, Tables 3, 4 and 11, on small models: `python -m experiments.papers.moss_accuracy`.

The paper fine-tunes Llama-2-7B and Qwen-3 of 14 and 32 B parameters and asks benchmarks for accuracy. Neither models
nor benchmarks could be had here: a small Llama learns arithmetic in bf16, is then trained further with each recipe, and
is asked problems that it has not seen. Two sizes (Table 4), three seeds each as in the paper; `moss` with weights
scaled just in time beside automatic scaling (Table 11). Some minutes of a GPU, a quarter of an hour of two CPU cores.
"""

import dataclasses
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8jax
from experiments.models.llama import LlamaConfig
from experiments.papers import common
from experiments.papers.common import Row
from experiments.train.cli import make_optimizer
from experiments.train.config import Config, Optim
from experiments.train.task import Task

# Stated before any accuracy was seen.
SIZES = {
    "small": LlamaConfig(vocab=128, dim=64, layers=2, heads=4, kv_heads=4, mlp_dim=192),
    "larger": LlamaConfig(vocab=128, dim=128, layers=2, heads=4, kv_heads=4, mlp_dim=384),
}
SEEDS, T_95 = (0, 1, 2), 4.303  # of Student's t, two-sided, for three seeds
FIRST, THEN = Optim(steps=600, lr=3e-3, warmup=30), Optim(steps=200, lr=1e-3, warmup=10)
BATCH, LENGTH, ASKED = 128, 16, 512
BF16, AUTOMATIC, JUST_IN_TIME = "bf16", "moss", "moss, weights just in time"
ARMS = (BF16, AUTOMATIC, JUST_IN_TIME)
# MOSS: accuracies of Tables 3 and 11 are of Llama-2-7B, in percent: mathematics, GSM8K, NumGLUE.
PAPER = {BF16: (52.3, 65.2, 58.7), AUTOMATIC: (52.8, 64.7, 59.4), JUST_IN_TIME: (52.6, 64.9, 59.2)}

Problem = Callable[[np.random.Generator], tuple[str, str]]
Accuracies = Mapping[str, Mapping[str, Sequence[float]]]
"""By arm and kind of problem, of each seed, from 0 to 1."""


def _sum(rng: np.random.Generator) -> tuple[str, str]:
    a, b = rng.integers(0, 100, 2)
    return f"{a}+{b}=", f"{a + b}."


def _largest(rng: np.random.Generator) -> tuple[str, str]:
    numbers = rng.integers(0, 100, 3)
    return f"{' '.join(map(str, numbers))}>", f"{numbers.max()}."


def _remainder(rng: np.random.Generator) -> tuple[str, str]:
    a, b = rng.integers(0, 100), rng.integers(2, 10)
    return f"{a}%{b}=", f"{a % b}."


KINDS: dict[str, Problem] = {"sums": _sum, "the largest of three": _largest, "remainders": _remainder}


def held_out(question: str) -> bool:
    """Whether a problem is asked and never trained: one of eight."""
    return zlib.crc32(question.encode()) % 8 == 0


def problems(rng: np.random.Generator, count: int, kinds: Sequence[str], asked: bool) -> np.ndarray:
    """Rows of one problem each, packed as `experiments.text.packing` says: int32 (count, 3, LENGTH + 1)."""
    rows = np.zeros((count, 3, LENGTH + 1), np.int32)
    for row in rows:
        while True:
            question, answer = KINDS[kinds[int(rng.integers(len(kinds)))]](rng)
            if held_out(question) == asked:
                break
        text = np.frombuffer(f"\n{question}{answer}".encode(), np.uint8)
        row[0, : len(text)], row[2, : len(text)] = text, 1
        row[1, len(question) + 1 : len(text)] = 1
    return rows


def recipe_of(arm: str) -> fp8jax.Recipe:
    """The recipe of an arm."""
    recipe = fp8jax.recipes.get(arm.split(",")[0])
    if arm != JUST_IN_TIME:
        return recipe
    return dataclasses.replace(recipe, linear=dataclasses.replace(recipe.linear, w_scaling="current"))


def task_of(llama: LlamaConfig, arm: str, optim: Optim, seed: int) -> Task:
    """The training of an arm."""
    recipe = recipe_of(arm)
    return Task.build(llama, make_optimizer(Config(optim=optim), recipe), recipe, remat=False, seed=seed)


def train(task: Task, optim: Optim, params: Any, seed: int) -> Any:
    """The state after a training from given parameters, or from the seed's, on problems in the order of the seed."""
    rng, kinds = np.random.default_rng(seed), tuple(KINDS)
    batches = problems(rng, optim.steps * BATCH, kinds, asked=False).reshape(optim.steps, BATCH, 3, -1)
    state = jax.jit(task.init)(params)
    state, seen = jax.jit(lambda state, batches: jax.lax.scan(task.step, state, batches))(state, batches)
    if not bool(state.healthy):
        raise FloatingPointError(f"{task.recipe.name}: a loss or a gradient is not finite")
    print(f"{task.recipe.name}: loss {float(seen['loss'][-20:].mean()):.4f}", flush=True)
    return state


def accuracy(task: Task, state: Any, rows: np.ndarray) -> float:
    """The share of problems all of whose answer is what the model would write, token by token."""

    @jax.jit
    def right(state: Any, rows: jax.Array) -> jax.Array:
        tokens, answers, segments = rows[:, 0], rows[:, 1], rows[:, 2]
        logits = task.model(state.params, state.model_state)(tokens[:, :-1], segments[:, :-1])
        # Before the first wrong token a model that writes reads what it would have written.
        same = jnp.argmax(logits, -1) == tokens[:, 1:]
        return jnp.mean(jnp.all(same | (answers[:, 1:] == 0), -1))

    return float(right(state, rows))


def measure(llama: LlamaConfig, first: Optim = FIRST, then: Optim = THEN) -> Accuracies:
    """Accuracies of each arm, trained from the same parameters."""
    before = task_of(llama, BF16, first, 0)
    start = train(before, first, None, 1000).params
    start = jax.tree.map(lambda p: p.astype(jnp.float32), start)
    asked = {kind: problems(np.random.default_rng(2000), ASKED, (kind,), asked=True) for kind in KINDS}
    found: dict[str, dict[str, list[float]]] = {}
    for arm in ARMS:
        task = task_of(llama, arm, then, 0)
        for seed in SEEDS:
            state = train(task, then, start, seed)
            for kind, rows in asked.items():
                found.setdefault(arm, {}).setdefault(kind, []).append(accuracy(task, state, rows))
    return found


def difference(found: Accuracies, arm: str, base: str, kind: str) -> tuple[float, float]:
    """In percent of problems, with the same seeds, and half of its interval of 95 %."""
    gaps = 100 * (np.array(found[arm][kind]) - np.array(found[base][kind]))
    return float(gaps.mean()), float(T_95 * gaps.std(ddof=1) / len(gaps) ** 0.5)


PAIRS = ((AUTOMATIC, BF16, "Tables 3 and 4"), (AUTOMATIC, JUST_IN_TIME, "Table 11"))


def rows(size: str, found: Accuracies) -> list[Row]:
    """Means over seeds, and differences."""
    entries = []
    for arm, kinds in found.items():
        for kind, values in kinds.items():
            table = f"Accuracy on problems not seen, {size} model"
            entries.append(
                Row(f"{arm}, {size}", kind, 100 * float(np.mean(values)), "%", table=table, pivot=(arm, kind))
            )
    for arm, base, name in PAIRS:
        table = f"{name}: {arm} less {base}, {size} model"
        for kind in KINDS:
            mean, half = difference(found, arm, base, kind)
            case = f"{arm} less {base}, {size}"
            entries.append(Row(case, kind, mean, "% of problems", table=table))
            entries.append(Row(case, f"{kind}, interval of 95 %, half", half, "% of problems", table=table))
    return entries


def verdict(size: str, found: Accuracies) -> list[str]:
    """Whether differences are told from none."""
    lines = []
    for arm, base, name in PAIRS:
        gaps = {kind: difference(found, arm, base, kind) for kind in KINDS}
        told = [f"{kind} {mean:+.1f} +- {half:.1f} %" for kind, (mean, half) in gaps.items()]
        apart = [kind for kind, (mean, half) in gaps.items() if abs(mean) > half]
        how = f"told from none: {', '.join(apart)}" if apart else "none is told from 0"
        lines.append(f"{name}, {size} model, {arm} less {base}: {'; '.join(told)}; {how}.")
    return lines


def papers() -> str:
    """The paper's differences, which are of other problems than ours and so stand in no row of them."""
    told = []
    for arm, base, _ in PAIRS:
        gaps = (f"{ours - theirs:+.1f}" for ours, theirs in zip(PAPER[arm], PAPER[base], strict=True))
        told.append(f"{arm} less {base} {', '.join(gaps)} %")
    return (
        "In the paper's Tables 3 and 11, a Llama-2-7B on mathematics, GSM8K and NumGLUE: "
        f"{'; '.join(told)}. Problems and models are others: only that differences are small can be compared. "
        "Throughput, in its Table 3, is `bench step`'s."
    )


def main() -> int:
    """Regenerates results/CARD/moss_accuracy.json."""
    options = common.parse(__doc__)
    # Seeds share programs.
    jax.config.update("jax_compilation_cache_dir", str(options.out / "programs"))
    found = {size: measure(llama) for size, llama in SIZES.items()}
    notes = [
        f"Llamas of {' and '.join(f'{llama.dim} channels' for llama in SIZES.values())}, two layers; "
        f"{FIRST.steps} steps in bf16, then {THEN.steps} with each recipe, of {BATCH} problems each: sums below 200, "
        "the largest of three numbers, remainders. One problem of eight is never trained; "
        f"{ASKED} of these are asked of each kind, and a problem counts where every token of its answer is right. "
        f"{len(SEEDS)} seeds of the order of problems, from the same parameters; intervals are of differences with "
        "the same seed. Sizes, steps and seeds were stated before any accuracy was seen.",
        papers(),
        *(line for size, of in found.items() for line in verdict(size, of)),
    ]
    table = [row for size, of in found.items() for row in rows(size, of)]
    title = "MOSS: accuracy after further training, and by how weights are scaled (Tables 3, 4, 11)"
    common.write("moss_accuracy", title, table, notes, None, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
