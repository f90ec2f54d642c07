"""Range expansion, ours and the paper's, on the moments of a training: `python -m experiments.papers.coat_expansion`.

The relative error of Adam's direction m / sqrt(v) where both moments are stored once in e4m3, to nearest, without
expansion, with ours and with the paper's ("coat"). The moments are those that fp32 AdamW has of one training's
gradients, at several steps. Xi et al., COAT, section 4.2, ICLR 2025.
"""

import sys
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

import fp8jax
from experiments.bench import peers
from experiments.papers import common
from experiments.papers.common import Row

STEPS, EVERY, FIRST = 200, 20, 120
DECAYS = (0.95, 0.999)
ARMS: dict[str, bool | str] = {"no expansion": False, "ours": True, "the paper's": "coat"}
METRIC = "relative error of m / sqrt(v)"
B1, EPS = 0.9, 1e-8


def moments(gradients: Mapping[str, np.ndarray], b2: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both moments of every leaf, bias-corrected, float64, at each of the steps that are looked at.

    Args:
        gradients: of each leaf, steps first.
        b2: decay of the second moment.
    """
    for of_leaf in gradients.values():
        m, v = np.zeros(of_leaf.shape[1:]), np.zeros(of_leaf.shape[1:])
        for step, g in enumerate(of_leaf, 1):
            m, v = B1 * m + (1 - B1) * g, b2 * v + (1 - b2) * np.square(g, dtype=np.float64)
            if step >= FIRST and step % EVERY == 0:
                yield m / (1 - B1**step), v / (1 - b2**step)


def stored(x: np.ndarray, moment: str, expand: bool | str) -> np.ndarray:
    """What `compressed_adamw` would decode of a moment, without its rule for dead members."""
    spec = fp8jax.QuantSpec("e4m3", "group", 128, expand=expand, flush_to_zero=moment == "mu")
    return np.asarray(fp8jax.quantize(jnp.asarray(x, jnp.float32), spec).dequantize(), np.float64)


def error(gradients: Mapping[str, np.ndarray], b2: float, expand: bool | str) -> float:
    """The norm of the error over the norm of the exact direction, of all leaves and steps together."""
    square = np.zeros(2)
    for m, v in moments(gradients, b2):
        exact = m / (np.sqrt(v) + EPS)
        got = stored(m, "mu", expand) / (np.sqrt(stored(v, "nu", expand)) + EPS)
        square += np.sum((got - exact) ** 2), np.sum(exact**2)
    return float(np.sqrt(square[0] / square[1]))


def rows(gradients: Mapping[str, np.ndarray]) -> list[Row]:
    """The errors, and each over that without expansion."""
    table = []
    for b2 in DECAYS:
        errors = {arm: error(gradients, b2, expand) for arm, expand in ARMS.items()}
        base = f"no expansion, b2 {b2:g}"
        table += [
            Row(f"{arm}, b2 {b2:g}", METRIC, e, "1", base, e / errors["no expansion"], table=METRIC)
            for arm, e in errors.items()
        ]
    return table


def notes(table: list[Row]) -> list[str]:
    """What was measured, and what follows for the default."""
    of = {row.case: row.value or 0.0 for row in table}
    gains = [of[f"the paper's, b2 {b2:g}"] / of[f"ours, b2 {b2:g}"] for b2 in DECAYS]
    worst = [max(of[f"{arm}, b2 {b2:g}"] for b2 in DECAYS) for arm in ("ours", "the paper's")]
    why = "the worst of both is smaller," if worst[0] < worst[1] else "not for these errors, but"
    return [
        "Moments that AdamW in fp32 has of the gradients of a small Llama's training (`experiments.bench.peers`, "
        f'stream "training"), every {EVERY} steps from {FIRST} to {STEPS}; groups of 128, stored once.',
        f"The paper's expansion leaves {gains[0]:.2f} times our error at b2 {DECAYS[0]:g} and {gains[1]:.2f} times at "
        f"{DECAYS[1]:g}; the worst of both is {worst[0]:.3g} with ours, {worst[1]:.3g} with the paper's. Ours is the "
        f"default: {why} it keeps exponents under stochastic rounding, and dead members do not take the codes of "
        "others.",
    ]


def main() -> int:
    """Regenerates results/coat_expansion.json."""
    arguments = common.parse(__doc__)
    table = rows(peers.recorded(STEPS))
    title = "COAT: our range expansion and the paper's on real moments"
    common.write("coat_expansion", title, table, notes(table), None, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
