"""INT8 fallback, appendix E: the next token that scales of blocks give away: `python -m experiments.papers.int8_leak`.

Llamas that INT8 recipes trained are evaluated as `python -m experiments.evaluate --leak` does: unquantized, quantized,
and quantized token by token, where no scale sees a later token. A model that lives by what scales tell is worse without
them. Options that are not here go to `experiments.train`, such as --model 60m --seq-len 1024 --data 'books/*.txt'.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]

import fp8jax
from experiments import evaluate, flags
from experiments.errors import UserError
from experiments.evaluate import Evaluation
from experiments.models.scoring import Score
from experiments.papers import common
from experiments.papers.common import Row
from experiments.train import cli, report
from fp8jax.ops.products import product

RUN, STEPS, SEEDS, TOKENS = "tables_leak", 500, 3, 2048
FLAGS = (
    f"--layers 2 --dim 128 --heads 4 --mlp-dim 384 --batch 8 --seq-len 128 --steps {STEPS} --lr 3e-3 "
    f"--eval-every {STEPS} --checkpoint-every {STEPS} --sample-tokens 0 --log-every 100"
)
RECIPES = ("jetfire", "int8_block", "int8_fallback")
CONTROL, BITS = "control: jetfire, inputs of 3 bits", 3
# Arm to the recipe that trained it and the one that it is evaluated with, as the paper does of its own.
ARMS = {name: (name, name) for name in RECIPES} | {
    "int8_fallback, evaluated without fallback": ("int8_fallback", "int8_block"),
    CONTROL: ("jetfire", "jetfire"),
}
WAYS = ("unquantized", "quantized", "quantized, token by token")
HIDDEN = "hidden: the last less the one before"
CONFIDENCE = 0.95

Scores = Mapping[str, Sequence[Mapping[str, Score]]]
"""Arm, seed, way."""


@contextlib.contextmanager
def coarse_inputs(bits: int) -> Iterator[None]:
    """While a program is traced in it, forward products of int8 blocks read inputs rounded to fewer bits.

    Raises:
        RuntimeError: no such product was traced: nothing was damaged.
    """
    matmul, met = product.matmul, list[bool]()

    def replaced(a: Any, b: Any, **how: Any) -> jax.Array:
        specs = [getattr(x, "spec", None) for x in (a, b)]
        if all(spec is not None and (spec.format, spec.rounding) == ("int8", "nearest") for spec in specs):
            met.append(True)
            a = coarse(a, bits)
        return matmul(a, b, **how)

    with mock.patch.object(product, "matmul", replaced):
        yield
    if not met:
        raise RuntimeError("no forward product of int8 blocks was traced: nothing was damaged")


def coarse(q: fp8jax.QTensor, bits: int) -> fp8jax.QTensor:
    """int8 codes rounded to the integers that so many bits have, spread over the same range."""
    top = 2 ** (bits - 1) - 1
    values = jnp.round(jnp.round(q.codes.astype(jnp.float32) * (top / 127)) * (127 / top))
    return dataclasses.replace(q, codes=values.astype(q.codes.dtype))


def train_seed(seed: int, out: Path, flags: Sequence[str], control: bool) -> Path:
    """Trains all recipes, or the control alone, where that was not done before; returns the run's folder.

    Raises:
        UserError: the training program's own.
    """
    name = f"{RUN}_control_{seed}" if control else f"{RUN}_{seed}"
    recipes = (ARMS[CONTROL][0],) if control else RECIPES
    code = cli.main(
        [*FLAGS.split(), *flags, "--recipe", *recipes, "--run", name, "--seed", f"{seed}", "--out", f"{out}"]
    )
    if code:
        raise UserError(f"the training run ended with code {code}")
    return out / name


def measure(seed: int, out: Path, flags: Sequence[str], tokens: int) -> dict[str, Mapping[str, Score]]:
    """What `evaluate --leak` finds of each arm's model of a seed."""
    losses = {}
    plain = train_seed(seed, out, flags, control=False)
    for arm, (trained, computed) in ARMS.items():
        with contextlib.ExitStack() as stack:
            folder = plain
            if arm == CONTROL:
                stack.enter_context(coarse_inputs(BITS))
                folder = train_seed(seed, out, flags, control=True)
            settings = Evaluation(folder, trained, computed, leak=True, leak_tokens=tokens)
            losses[arm] = evaluate.evaluate(settings, report.make_console())["leak"]
    return losses


def hidden(scores: Sequence[Mapping[str, Score]]) -> tuple[float, float]:
    """Mean over seeds of the loss that scales hide, and half of its interval; infinite of one seed."""
    losses = [of[WAYS[2]].loss - of[WAYS[1]].loss for of in scores]
    if len(losses) < 2:
        return float(np.mean(losses)), float("inf")
    error = np.std(losses, ddof=1) / np.sqrt(len(losses))
    return float(np.mean(losses)), float(stats.t.ppf((1 + CONFIDENCE) / 2, len(losses) - 1) * error)


def rows(scores: Scores) -> list[Row]:
    """Perplexities of mean losses, as the paper's Table 4, and what scales hide, in nats a token."""
    entries = []
    for arm, runs in scores.items():
        for way in WAYS:
            perplexity = float(np.exp(np.mean([of[way].loss for of in runs])))
            entries.append(Row(arm, way, perplexity, table="Table 4: perplexities", pivot=(arm, way)))
        mean, half = hidden(runs)
        table = "Loss that scales hide, nats a token"
        entries.append(Row(arm, HIDDEN, mean, "nats", table=table, pivot=(arm, HIDDEN)))
        interval = half if np.isfinite(half) else None
        entries.append(Row(arm, "±", interval, "nats", table=table, pivot=(arm, "±")))
    return entries


def draw(scores: Scores) -> Figure:
    """What scales hide, of each arm: all seeds, and the mean with its interval."""
    figure = Figure(figsize=(9, 3.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    for i, runs in enumerate(scores.values()):
        each = [of[WAYS[2]].loss - of[WAYS[1]].loss for of in runs]
        axes.plot(each, np.full(len(each), i), "o", mfc="none", color="C0", markersize=4)
        mean, half = hidden(runs)
        axes.errorbar(mean, i + 0.15, xerr=half if np.isfinite(half) else None, fmt="s", color="C1", capsize=3)
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.set_yticks(range(len(scores)), list(scores))
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=1e-3)
    axes.set_xlabel("loss token by token, less that of whole sequences (nats a token)")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what OUT lacks, evaluates, and writes results/int8_leak.json and .png."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of training runs (default: runs)")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"models of each arm (default: {SEEDS})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of validation, a pass each (default: {TOKENS})")
    options, rest = parser.parse_known_args(argv)
    flags.recommend()
    scores: dict[str, list[Mapping[str, Score]]] = {arm: [] for arm in ARMS}
    try:
        if options.seeds < 1:
            raise UserError(f"--seeds must be at least 1, got {options.seeds}")
        for seed in range(options.seeds):
            for arm, of in measure(seed, options.out, rest, options.tokens).items():
                scores[arm].append(of)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    notes = [
        f"{options.seeds} models an arm, trained by `experiments.train {' '.join([FLAGS, *rest])}`, on bytes of "
        f"Python's own sources and docs where no --data is given; {options.tokens:,} validation tokens. Intervals are "
        f"of {CONFIDENCE:.0%}, from the seeds. The paper's models have 1.5 B parameters and read 30 B tokens; our copy "
        "has no numbers of its Table 4.",
        f"The control reads inputs of {BITS} bits in its forward products, in training and evaluation, so that a "
        "block's scale says more of what is in it: if any model learns to read scales, this one.",
    ]
    title = "INT8 fallback: what scales of blocks tell of the next token (appendix E)"
    arguments = " ".join(rest)
    common.write("int8_leak", title, rows(scores), notes, draw(scores), options.results, arguments=arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
