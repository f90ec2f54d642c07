"""FP8-LM's master weights over a longer run (Table 6, Figure 8): `python -m experiments.papers.fp8_lm_masters`.

The small model of `experiments.papers.fp8_lm_precision`, trained for many steps with the master weights in fp16 and
e4m3 with a scale a tensor, and in bf16 without, five seeds each. What a coarse master weight loses are small updates,
which a run of 400 steps hardly shows. Half an hour of two CPU cores.
"""

import sys
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.papers import common, fp8_lm_precision
from experiments.papers.common import Row
from experiments.papers.fp8_lm_precision import ARMS, BASE, BATCH, LLAMA, RATE, SAID, SEQ, STORAGES, final
from experiments.text import data
from experiments.text.tokenizer import Bytes
from experiments.train.task import exact_task

# Stated before any loss was seen.
STEPS, SEEDS, TAIL = 3000, (0, 1, 2, 3, 4), 200
T_95 = 2.776  # of Student's t, two-sided, for that many seeds
MASTERS = (BASE, "master fp16, scaled", "master bf16", "master e4m3")

Losses = Mapping[str, Sequence[np.ndarray]]
"""By storage, of each seed (steps,)."""


def train(steps: int = STEPS, seeds: Sequence[int] = SEEDS) -> Losses:
    """The losses of each storage, from the parameters and the batches of each seed."""
    names, train = list(STORAGES), data.encode(data.read_corpus([], 0.05), Bytes(), SEQ).train
    run = fp8_lm_precision.make_run(exact_task(LLAMA, 0), steps, RATE)
    found: dict[str, list[np.ndarray]] = {name: [] for name in MASTERS}
    for seed in seeds:
        batches = data.train_batches(train, SEQ, BATCH, seed=seed)
        tokens = np.stack([next(batches) for _ in range(steps)])
        start = jax.jit(exact_task(LLAMA, seed).init)().params
        for name, losses in found.items():
            losses.append(np.asarray(run(jnp.array([names.index(s) for s in ARMS[name]]), start, tokens)))
            print(f"{name}, seed {seed}: {final(losses[-1], TAIL):.4f}", flush=True)
    return found


def gap(losses: Losses, name: str) -> tuple[float, float]:
    """How far a storage ends above fp32 with the same seeds, in nats, and half of its interval of 95 %; infinite where
    a loss is."""
    ends = [final(x, TAIL) - final(base, TAIL) for x, base in zip(losses[name], losses[BASE], strict=True)]
    if not np.isfinite(ends).all():
        return float("inf"), float("inf")
    return float(np.mean(ends)), T_95 * float(np.std(ends, ddof=1)) / float(np.sqrt(len(ends)))


def rows(losses: Losses) -> list[Row]:
    """The final loss of each storage, how far that is above fp32's, and how sure that is."""
    table, entries = "Master weights", []
    for name, runs in losses.items():
        values = [("final loss", float(np.mean([final(x, TAIL) for x in runs])), "nats/token")]
        if name != BASE:
            mean, half = gap(losses, name)
            values += [("above fp32", mean, "nats"), ("interval of 95 %, half", half, "nats")]
        for metric, value, unit in values:
            finite = value if np.isfinite(value) else None
            entries.append(Row(name, metric, finite, unit, table=table, pivot=(name, metric)))
    return entries


def verdict(losses: Losses) -> list[str]:
    """Whether each storage ends above fp32, beside what the paper says."""
    lines = []
    for name, runs in losses.items():
        if name == BASE:
            continue
        mean, half = gap(losses, name)
        if all(np.array_equal(x, base) for x, base in zip(runs, losses[BASE], strict=True)):
            text = "not measured, nothing was rounded: every loss is that of fp32"
        elif not np.isfinite(mean):
            text = "diverged"
        else:
            how = "worse than fp32" if mean > half else "better than fp32" if mean < -half else "not told from fp32"
            text = f"{mean:+.4f} +- {half:.4f} nats, {how}"
        lines.append(f"{name}: {text}; the paper: {SAID[name]}.")
    return lines


def main() -> int:
    """Regenerates results/CARD/fp8_lm_masters.json and .png."""
    options = common.parse(__doc__)
    losses = train()
    notes = [
        f"The small model of `experiments.papers.fp8_lm_precision`, {STEPS:,} steps of {BATCH * SEQ:,} bytes of the "
        f"standard library's sources; {len(SEEDS)} seeds, each of parameters and of batches, the same for all "
        f"storages. Final is the mean of the last {TAIL} steps; intervals are of differences with the same seed. Steps "
        "and seeds were stated before any loss was seen.",
        "Our copy of the paper is a summary without the figures of Table 6 and without Figure 8: only what it says in "
        "words is set beside ours.",
        *verdict(losses),
    ]
    title = "FP8-LM: master weights over a longer run (Table 6, Figure 8)"
    common.write("fp8_lm_masters", title, rows(losses), notes, _picture(losses), options.results)
    return 0


def _picture(losses: Losses) -> Figure:
    """The means over seeds, as differences from fp32."""
    return fp8_lm_precision.draw({name: np.mean(runs, axis=0) for name, runs in losses.items()})


if __name__ == "__main__":
    sys.exit(main())
