"""FP8-LM's comparison of scalings for sums of gradients (Figure 7): `python -m experiments.papers.fp8_lm_gradients`.

The gradients of a small Llama on up to 1,024 sequences stand for those of 1,024 replicas. The result of each reduction
is compared with their float64 mean. Peng et al., FP8-LM, 2023, section 2.1.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from experiments.models.llama import LlamaConfig
from experiments.papers import common
from experiments.papers.common import Row
from experiments.text import data
from experiments.text.tokenizer import Bytes
from experiments.train.task import exact_task
from fp8jax.dist.reduce import MAX_SATURATED_FRACTION

LLAMA = LlamaConfig(vocab=256, dim=64, layers=4, heads=4, kv_heads=4, mlp_dim=192)
SEQ, BATCH, STEPS, RATE = 64, 16, 200, 3e-3
REPLICAS = (2, 8, 32, 128, 512, 1024)
MAX, GROUP = 448.0, 128
E4M3 = ml_dtypes.float8_e4m3fn


class Reduced(NamedTuple):
    """The result of a reduction: the mean, and the share of its elements outside of the range of codes."""

    mean: np.ndarray
    overflow: float


def encode(x: Any) -> np.ndarray:
    """Rounds and saturates values to e4m3; returns float32."""
    codes: np.ndarray = np.clip(x, -MAX, MAX).astype(E4M3).astype(np.float32)
    return codes


def summed(g: np.ndarray, mu: float) -> Reduced:
    """Adds codes replica by replica; rounds each sum to e4m3 and saturates, as NCCL does.

    Args:
        g: (replicas, n) fp32; one scale from their amax.
        mu: the fraction of the code range that a single replica's codes use.
    """
    scale = np.float32(np.abs(g).max() / (MAX * mu))
    total = np.zeros(g.shape[1], np.float32)
    for one in g:
        total = encode(total + encode(one / scale))
    # A saturated sum may later leave the largest code again.
    return Reduced(total.astype(np.float64) * scale / len(g), float(np.mean(np.abs(total) >= MAX)))


def before(g: np.ndarray) -> Reduced:
    """Pre-scaling: divides by the number of replicas before the sum (equation 1)."""
    return summed(g, 1 / len(g))


def after(g: np.ndarray) -> Reduced:
    """Post-scaling: divides after the sum (equation 2)."""
    return summed(g, 1.0)


def automatic(g: np.ndarray) -> Reduced:
    """Auto-scaling with the converged factor of equation 3: the largest power of two with few saturated elements."""
    mu = 1.0
    while (total := summed(g, mu)).overflow > MAX_SATURATED_FRACTION and mu > 1 / len(g):
        mu = max(mu / 2, 1 / len(g))
    return total


def two_phases(g: np.ndarray) -> Reduced:
    """Adds codes exactly. Quantizes their mean with a scale from its amax."""
    scale = np.abs(g).max() / MAX
    mean = sum(encode(one / scale).astype(np.float64) for one in g) * scale / len(g)
    second = np.abs(mean).max() / MAX
    return Reduced(encode(np.float32(mean / second)).astype(np.float64) * second, 0.0)


def in_groups(g: np.ndarray) -> Reduced:
    """Two phases with a scale for each group of 128 elements."""
    padded = np.pad(g, ((0, 0), (0, -g.shape[1] % GROUP))).reshape(len(g), -1, GROUP)
    parts = [two_phases(padded[:, i]).mean if padded[:, i].any() else np.zeros(GROUP) for i in range(padded.shape[1])]
    return Reduced(np.concatenate(parts)[: g.shape[1]], 0.0)


def bf16(g: np.ndarray) -> Reduced:
    """Adds replica by replica in bf16."""
    total = np.zeros(g.shape[1], np.float32)
    for one in g:
        total = (
            (total + one.astype(ml_dtypes.bfloat16).astype(np.float32)).astype(ml_dtypes.bfloat16).astype(np.float32)
        )
    return Reduced(total.astype(np.float64) / len(g), 0.0)


OURS = "ours, two phases, e4m3"
FORMS: dict[str, Callable[[np.ndarray], Reduced]] = {
    "pre-scale (equation 1)": before,
    "post-scale (equation 2)": after,
    "auto-scale (equation 3)": automatic,
    OURS: two_phases,
    "ours, two phases, e4m3:group128": in_groups,
    "bf16": bf16,
}


def errors_of(g: np.ndarray, reduced: Reduced) -> tuple[float, float, float]:
    """Returns the SNR in dB, and the shares of elements that underflow and overflow.

    An element underflows if it is zero in the result but not in the float64 mean.
    """
    exact = g.astype(np.float64).mean(0)
    noise = np.sum((reduced.mean - exact) ** 2)
    snr = 10 * np.log10(np.sum(exact**2) / noise) if noise else np.inf
    return float(snr), float(np.mean((reduced.mean == 0) & (exact != 0))), reduced.overflow


def compare(g: np.ndarray, form: Callable[[np.ndarray], Reduced]) -> tuple[float, float, float]:
    """Returns `errors_of` a form of reduction."""
    return errors_of(g, form(g))


def real_gradients(count: int, steps: int = STEPS) -> Iterator[tuple[str, np.ndarray]]:
    """Yields per-sequence gradients (count, n) of each matrix of a Llama after some training steps."""
    corpus = data.read_corpus((), 0.05)
    tokens = data.encode(corpus, Bytes(), SEQ).train
    task, adam = exact_task(LLAMA, 0), optax.adam(RATE)
    params = jax.jit(task.init)().params
    state = adam.init(params)

    @jax.jit
    def step(params: Any, state: Any, tokens_BxT: jax.Array) -> Any:
        grads = task.gradients(params, {}, tokens_BxT)[1]
        updates, state = adam.update(grads, state)
        return optax.apply_updates(params, updates), state

    for _, batch in zip(range(steps), data.train_batches(tokens, SEQ, BATCH, seed=0), strict=False):
        params, state = step(params, state, jnp.asarray(batch))
    sequences = next(data.train_batches(tokens, SEQ, count, seed=1))
    one = jax.jit(lambda tokens: task.gradients(params, {}, tokens[None])[1])
    gradients: dict[str, list[np.ndarray]] = {}
    for sequence in sequences:
        for path, g in jax.tree_util.tree_leaves_with_path(one(jnp.asarray(sequence))):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if "layers" in name and g.ndim == 3:
                for layer in range(g.shape[0]):
                    gradients.setdefault(f"block {layer}, {name}", []).append(np.asarray(g[layer], np.float32).ravel())
    yield from ((name, np.stack(each)) for name, each in gradients.items())


def measure(
    gradients: Iterator[tuple[str, np.ndarray]], replicas: tuple[int, ...]
) -> dict[tuple[str, int], np.ndarray]:
    """Returns the three figures of each form and number of replicas, means over all matrices."""
    errors: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for _, g in gradients:
        for count in replicas:
            for name, form in FORMS.items():
                errors.setdefault((name, count), []).append(compare(g[:count], form))
    return {key: np.mean(values, axis=0) for key, values in errors.items()}


METRICS = ("SNR", "underflow", "overflow")


Errors = Mapping[tuple[str, int], np.ndarray]
"""`METRICS` by form and number of replicas."""


def rows(errors: Errors) -> list[Row]:
    table = []
    for (name, count), values in errors.items():
        for metric, value in zip(METRICS, values, strict=True):
            unit = "dB" if metric == "SNR" else "%"
            shown = float(value) if metric == "SNR" else 100 * float(value)
            column = f"{metric}, {unit}, {count} replicas"
            table.append(Row(f"{name}, {count} replicas", metric, shown, unit, table="Figure 7", pivot=(name, column)))
    return table


def table(_: argparse.Namespace) -> common.Table:
    """Returns the results file."""
    errors = measure(real_gradients(max(REPLICAS)), REPLICAS)
    notes = [
        f"Gradients of the matrices of a Llama ({LLAMA.layers} blocks, width {LLAMA.dim}) after {STEPS} steps on the "
        f"standard library's sources: one gradient for each of {max(REPLICAS):,} sequences of {SEQ} bytes. Figures "
        "are means over matrices. Codes are e4m3 with one scale per matrix (from the amax over all replicas) or per "
        "128 elements. One-phase sums are rounded to e4m3 and saturated at each addition, as NCCL does on H200s. "
        "Overflow is the share of a sum at the largest code. Underflow is the share of means that become zero.",
        "Our copy of the paper is a summary without Figure 7. It states that auto-scaling has the highest SNR, less "
        "underflow than pre-scaling, and less overflow than post-scaling. Auto-scaling uses the converged factor.",
        "Every addition of the one-phase sums rounds. Sums in fp32 between two roundings do not depend on the number "
        "of replicas.",
    ]
    title = "FP8-LM: error of 8-bit gradient sums over 2 to 1,024 replicas (Figure 7)"
    for (name, count), (snr, under, over) in errors.items():
        print(f"{name:34s} {count:5d}  SNR {snr:6.2f} dB  underflow {under:8.3%}  overflow {over:8.4%}")
    return common.Table("fp8_lm_gradients", title, rows(errors), notes)


if __name__ == "__main__":
    sys.exit(common.run(__doc__, table))
