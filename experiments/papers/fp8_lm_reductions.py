"""FP8-LM's Figure 7 with `fp8jax.dist`: `python -m experiments.papers.fp8_lm_reductions`.

Each device has the gradients of a small Llama on one sequence. `all_reduce_gradients` reduces them over 2, 4, ... all
devices of this host (GPUs, or virtual devices of its CPU). The result is compared with their float64 mean, and with the
NumPy model that `fp8_lm_gradients` uses for up to 1,024 replicas. In form "one_phase", NCCL adds codes on GPUs. A CPU
adds them in fp32 and rounds once, so its figures do not apply to NCCL.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import timing
from experiments.errors import UserError
from experiments.papers import common, fp8_lm_gradients
from experiments.papers.common import Row
from experiments.papers.fp8_lm_gradients import Reduced
from fp8jax.core.recipe import Comm
from fp8jax.dist.reduce import MAX_SATURATED_FRACTION, Factors, all_reduce_gradients

VIRTUAL = 8
ONE = Comm("e4m3", "one_phase")
# Format that is sent and initial factor of auto-scaling (or None), by name in `fp8_lm_gradients.FORMS`.
FORMS: dict[str, tuple[Comm, float | None]] = {
    "pre-scale (equation 1)": (ONE, None),
    "post-scale (equation 2)": (ONE, 1.0),
    "auto-scale (equation 3)": (Comm("e4m3", "one_phase", auto_scale=True), 1.0),
    fp8_lm_gradients.OURS: (Comm("e4m3"), None),
    "ours, two phases, e4m3:group128": (Comm("e4m3:group128"), None),
    "bf16": (Comm("bf16"), None),
}
SETTLING = 12  # halvings of a factor at most


def reduced(gradients: Mapping[str, np.ndarray], form: str) -> dict[str, Reduced]:
    """Returns the reduced gradients (devices, n) of the first device.

    Auto-scaling is repeated on the same gradients until no factor decreases.
    """
    comm, start = FORMS[form]
    count = len(next(iter(gradients.values())))
    mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count], axis_types=(jax.sharding.AxisType.Auto,))

    def run(tree: Any, factors: Factors | None) -> Any:
        local_tree = jax.tree.map(lambda g: g[0], tree)
        return all_reduce_gradients(local_tree, "data", comm, factors=factors, min_size=1)

    rows, replicated = jax.P("data"), jax.P()
    step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(rows, replicated), out_specs=replicated, check_vma=False))
    tree = {name: jnp.asarray(g) for name, g in gradients.items()}
    if start is None:
        return {name: Reduced(np.asarray(x, np.float64), 0.0) for name, x in step(tree, None).items()}
    factors = Factors(*({name: jnp.float32(x) for name in tree} for x in (start, 0.0)))
    for _ in range(SETTLING if comm.auto_scale else 1):
        results, factors = step(tree, factors)
        if max(float(x) for x in factors.saturated.values()) <= MAX_SATURATED_FRACTION:
            break
    return {name: Reduced(np.asarray(x, np.float64), float(factors.saturated[name])) for name, x in results.items()}


def measure(gradients: Mapping[str, np.ndarray], counts: Sequence[int]) -> list[Row]:
    """Returns three figures of each form and number of devices, means over matrices, also of the NumPy model."""
    rows = []
    for count in counts:
        parts = {name: g[:count] for name, g in gradients.items()}
        for form, model in fp8_lm_gradients.FORMS.items():
            results, modelled = reduced(parts, form), {name: model(g) for name, g in parts.items()}
            for impl, means in (("fp8jax.dist", results), ("NumPy", modelled)):
                each = [fp8_lm_gradients.errors_of(g, means[name]) for name, g in parts.items()]
                for metric, value in zip(fp8_lm_gradients.METRICS, np.mean(each, 0), strict=True):
                    unit, factor = ("dB", 1) if metric == "SNR" else ("%", 100)
                    column = f"{metric}, {unit}, {impl}"
                    rows.append(Row(f"{form}, {count} devices", metric, factor * float(value), unit,
                                    table=f"{count} devices", pivot=(form, column), impl=impl))  # fmt: skip
    return rows


def table(_: argparse.Namespace) -> common.Table:
    """Returns the results file, fp8_lm_reductions.json, or fp8_lm_reductions_gpus.json on GPUs.

    Raises:
        UserError: there is only one device.
    """
    if "host_platform_device_count" not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={VIRTUAL}".strip()
    have = jax.device_count()
    counts = [n for n in (2, 4, 8, 16) if n <= (2 if timing.dry() else have)]
    if not counts:
        raise UserError("the reduction needs at least two devices, but there is one")
    steps = 2 if timing.dry() else fp8_lm_gradients.STEPS
    gradients = dict(fp8_lm_gradients.real_gradients(counts[-1], steps))
    rows = measure(gradients, counts)
    gpu = jax.devices()[0].platform == "gpu"
    notes = [
        f"`fp8jax.dist.all_reduce_gradients` over {', '.join(map(str, counts))} "
        + ("GPUs" if gpu else "virtual devices of a CPU")
        + f"; gradients and figures as in `fp8_lm_gradients`, means over {len(gradients)} matrices.",
        "Codes of one phase are added by NCCL, rounded to e4m3 and saturated at each addition."
        if gpu
        else "Codes of one phase are added in fp32 here and rounded once: on GPUs NCCL rounds each addition, as the "
        "model in NumPy does.",
        "Our copy of the paper is a summary without Figure 7.",
    ]
    title = "FP8-LM: error of 8-bit gradient sums of fp8jax.dist (Figure 7)"
    device = jax.devices()[0].device_kind
    if not gpu:
        return common.Table("fp8_lm_reductions", title, rows, notes)
    return common.Table(
        "fp8_lm_reductions_gpus", title, rows, notes, module="fp8_lm_reductions", device=f"{have} x {device}"
    )


if __name__ == "__main__":
    sys.exit(common.run(__doc__, table))
