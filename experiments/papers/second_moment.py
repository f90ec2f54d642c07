"""How second moments in 8 bits follow gradients, by rounding and b2: `python -m experiments.papers.second_moment`.

A simulation on the path that training takes, `scale_by_compressed_adam`: noise with log-normal magnitudes within each
group, which change places half way. About a minute on two CPU cores.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure

import fp8jax
from experiments.papers import common
from experiments.papers.common import Row

GROUPS, SIZE, STEPS = 64, 128, 3000
DECAYS = (0.95, 0.99, 0.999)
ARMS: dict[str, dict[str, Any]] = {
    "e4m3, nearest": {"nu": "e4m3", "nu_rounding": "nearest"},
    "e4m3, stochastic": {"nu": "e4m3", "nu_rounding": "stochastic"},
    "bf16, nearest": {"nu": "bf16"},
}
BASE = "e4m3, nearest"
NOTES = [
    f"{GROUPS} groups of {SIZE} gradients of normal noise, whose magnitudes are log-normal (sigma 1) and change places "
    f"within each group after half of {STEPS:,} steps. |log v / v32| against the same moment in fp32, over the last "
    "quarter of the steps.",
    'Without rounding errors it would be 0; 0.7 is a factor of two. "auto" rounds stochastically where b2 is 0.98 or '
    "more.",
    "bf16 has no stochastic rounding here: its steps of 0.8 % stall at b2 = 0.999, too.",
]


@functools.partial(jax.jit, static_argnames=("arm", "steps"))
def simulate(b2: float, arm: str, steps: int = STEPS) -> Array:
    """log(v / v in fp32) after each step, fp32 (steps, GROUPS, SIZE)."""
    tx = fp8jax.scale_by_compressed_adam(b2=b2, mu="bf16", min_size=0, **ARMS[arm])
    key = jax.random.key(0)
    before = jnp.exp(jax.random.normal(jax.random.fold_in(key, 1), (GROUPS, SIZE)))
    after = jax.random.permutation(jax.random.fold_in(key, 2), before, axis=1, independent=True)

    def step(carry: tuple[Any, Array], t: Array) -> tuple[tuple[Any, Array], Array]:
        state, exact = carry
        g = jax.random.normal(jax.random.fold_in(key, t + 10), before.shape) * jnp.where(t < steps // 2, before, after)
        _, state = tx.update(g, state)
        exact = b2 * exact + (1 - b2) * g * g
        nu = optax.tree.get(state, "nu")
        stored = nu.dequantize() if isinstance(nu, fp8jax.QTensor) else nu.astype(jnp.float32)
        return (state, exact), jnp.log(stored / exact)

    start = tx.init(before), jnp.zeros_like(before)
    return jax.lax.scan(step, start, jnp.arange(steps))[1]


def draw(errors: dict[tuple[str, float], np.ndarray]) -> Figure:
    """The median and the 99th percentile of |log v / v32| over the steps."""
    figure = Figure(figsize=(13, 3.8), dpi=110, layout="constrained")
    for axes, b2 in zip(figure.subplots(1, len(DECAYS), sharey=True), DECAYS, strict=True):
        for i, arm in enumerate(ARMS):
            size = np.abs(errors[arm, b2]).reshape(STEPS // 50, -1)
            steps = 50 * (np.arange(len(size)) + 0.5)
            axes.semilogy(steps, np.median(size, axis=1), color=f"C{i}", label=arm)
            axes.semilogy(steps, np.quantile(size, 0.99, axis=1), color=f"C{i}", ls=":")
        axes.axvline(STEPS // 2, color="grey", lw=0.7)
        axes.set(title=f"b2 = {b2}", xlabel="step", ylim=(1e-3, 10))
    figure.axes[0].set_ylabel("|log v / v32|: median, 99 % (dotted)")
    figure.axes[0].legend(fontsize=8)
    return figure


def rows(errors: dict[tuple[str, float], np.ndarray]) -> list[Row]:
    table = []
    for metric, measure in (
        ("median |log v / v32|", lambda late: np.median(np.abs(late))),
        ("99th percentile of |log v / v32|", lambda late: np.quantile(np.abs(late), 0.99)),
        ("mean log v / v32", np.mean),
    ):
        for (arm, b2), error in errors.items():
            value, base = (float(measure(e[-STEPS // 4 :])) for e in (error, errors[BASE, b2]))
            table.append(Row(arm, metric, value, table=metric, pivot=(arm, f"b2 = {b2}"), baseline=None, ratio=None))
            print(f"{arm:18s} b2 {b2}: {metric} {value:.3f} ({value / base:.2f} of {BASE})", flush=True)
    return table


def main() -> int:
    """Regenerates results/second_moment.json and .png."""
    arguments = common.parse(__doc__)
    errors = {(arm, b2): np.asarray(simulate(b2, arm)) for b2 in DECAYS for arm in ARMS}
    common.write(
        "second_moment",
        "Second moments in 8 bits: rounding to nearest and stochastically",
        rows(errors),
        NOTES,
        draw(errors),
        arguments.results,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
