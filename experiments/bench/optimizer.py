"""Optimizer step of half a billion parameters on one GPU: fp8 moments against their memory traffic, optax and others.

The implementations of a case run in turns, and each keeps the state that it donates; PyTorch's come after JAX's.

"speed" is that of a burst, in which the GPU's clock is still high; "speed, sustained" that of long runs of steps.
"""

import argparse
import functools
import os
import pathlib
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch's optimizers need room beside JAX.

import jax.numpy as jnp

from experiments.bench import optimizer_lm, optimizer_torch, timing
from experiments.bench.optimizer_arms import GROUP, NOTES, NU_NEAREST, ROWS, Bench


def write(bench: Bench, out: pathlib.Path, complete: bool) -> None:
    installed = [name for name in ("torch", "torchao", "bitsandbytes") if name in sys.modules]
    packages = dict[str, str]()
    for name in installed:
        packages[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    title = "AdamW's step of half a billion parameters"
    timing.write("optimizer", title, bench.rows, NOTES, packages, out, complete=complete)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="optimizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of each of 8 parameters with 4096 columns")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    args = parser.parse_args(argv)
    timing.need_gpu()
    bench = Bench(2 if timing.dry() else args.rows)
    fp32, bf16 = "fp32 weights, bf16 gradients", "bf16 weights, stochastic rounding"
    forms = ("step", "update", "update + apply")
    # No name holds the arms for long, so that what they keep is freed after their case.
    arms = [bench.optax(jnp.float32), *(bench.ours(jnp.float32, form) for form in forms)]
    arms += [bench.ours(jnp.float32, "step", nu_rounding="nearest")]
    bench.measure(fp32, arms, bench.bytes_only(jnp.float32), 14 + 24 / GROUP)
    del arms
    for form in forms:
        bench.add_ratio(fp32, f"compressed_adamw {form}", (fp32, "optax.adamw float32"))
    write(bench, args.out, False)
    ours = functools.partial(bench.ours, jnp.bfloat16, "step")
    arms = [bench.optax(jnp.bfloat16), ours(stochastic=True), ours(stochastic=True, nu_rounding="nearest")]
    bench.measure(bf16, arms, bench.bytes_only(jnp.bfloat16), 10 + 24 / GROUP)
    del arms
    for baseline in ((bf16, "optax.adamw bfloat16"), (fp32, "optax.adamw float32")):
        bench.add_ratio(bf16, "compressed_adamw step", baseline)
    for case in (fp32, bf16):
        bench.add_ratio(case, "compressed_adamw step", (case, f"compressed_adamw step{NU_NEAREST}"))
    for kind in optimizer_lm.TRAFFIC:
        case = f"FP8-LM, {kind}"
        bench.measure(
            case, [bench.optax(jnp.bfloat16), *optimizer_lm.arms(bench, kind)], optimizer_lm.bytes_only(bench), 13
        )
        for baseline in ((case, "optax.adamw bfloat16"), (fp32, "optax.adamw float32"), (case, optimizer_lm.XLA)):
            bench.add_ratio(case, optimizer_lm.FUSED, baseline)
        write(bench, args.out, False)
    optimizer_torch.measure(bench, fp32, "optax.adamw float32")
    write(bench, args.out, True)
