"""Training steps of a large Llama on one GPU or a few: memory and speed, with and without `fused_backward`.

All parameters are trained. Layers run in a loop and save only their inputs. The name of an arm begins with its recipe.
"released": `fp8jax.fused_backward` updates each layer inside the backward pass. The other arms keep all gradients in
memory. "offloaded": inputs of layers are in host memory until the backward pass.

Master weights are fp32. "bf16+int8 masters": bf16 weights, and 8 further bits in the optimizer state. "bf16 weights":
bf16 weights, rounded stochastically, without master weights. "coat_optimizer" has bf16 matmuls and 8-bit moments.
"bf16" has fp32 moments. "memory" is that of the compiled program with its arguments, per GPU. Arms that do not fit in
memory are not run.
"""

import math
import os
from collections.abc import Callable, Mapping

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.96")

import jax

from experiments.bench import driver, timing
from experiments.bench.card import CardArm
from experiments.models import sizes
from experiments.models.shape import LlamaConfig
from experiments.train import speed

VOCAB = {"8b": 128_256}
BASE = "coat_optimizer, released"
ARMS = (
    BASE,
    "coat, released, bf16+int8 masters",
    "coat, bf16+int8 masters",
    "coat, bf16+stochastic masters",
    "coat, released",
    "coat_fast, released, bf16 weights",
    "coat",
    "bf16",
)
# Search of the largest batch: sequences of the second program, largest growth per program, programs after the first.
SECOND, GROWTH, MOST_TRIES = 4, 8, 5
DRY = LlamaConfig(vocab=64, dim=64, layers=2, heads=2, kv_heads=2, mlp_dim=128)


def largest(make: Callable[[int], CardArm], gigabytes: float) -> CardArm:
    """Returns the arm with the most sequences per GPU whose compiled program fits into `gigabytes`.

    The first two programs give the memory per sequence, each further one the remaining or missing memory.

    Raises:
        ValueError: not even one sequence fits, or there is no limit.
    """
    if math.isinf(gigabytes):
        raise ValueError("the device does not report its memory; set --fit, in GB")
    largest_arm = previous_arm = make(1)
    if largest_arm.needs > gigabytes:
        raise ValueError(f"one sequence needs {largest_arm.needs:.1f} GB, but only {gigabytes:.1f} GB are available")
    batch, too_many, per_sequence = SECOND, math.inf, 0.0
    for _ in range(MOST_TRIES):
        arm = make(batch)
        if arm.needs <= gigabytes:
            largest_arm = max(largest_arm, arm, key=lambda arm: arm.batch)
        else:
            too_many = min(too_many, batch)
        per_sequence = max((arm.needs - previous_arm.needs) / (arm.batch - previous_arm.batch), per_sequence / 2, 1e-3)
        previous_arm = arm
        next_batch = batch + math.floor((gigabytes - arm.needs) / per_sequence)
        if next_batch <= largest_arm.batch or largest_arm.batch + 1 >= too_many:
            break
        batch = int(min(max(next_batch, largest_arm.batch + 1), too_many - 1, GROWTH * batch))
    return largest_arm


def rates(case: str, name: str, arms: Mapping[str, CardArm], times: Mapping[str, timing.Seconds], base: str,
          peak: float | None) -> list[timing.Row]:  # fmt: skip
    """Returns the rows of an arm: step time, tokens per second, batch and (if the peak is known) MFU.

    Tokens per second are relative to the base; step times only if the batches are equal.
    """
    seconds, arm, baseline_seconds = times[name], arms[name], times.get(base)
    faster = baseline_seconds and (arm.count / seconds) / (arms[base].count / baseline_seconds)
    same_batch_ratio = faster if base in arms and arms[base].batch == arm.batch else None
    rows = [
        driver.time_row(case, name, "step", seconds, base, same_batch_ratio),
        timing.row(case, name, "tokens", arm.count / seconds / arm.gpus, "tokens/s a GPU", base, faster),
        timing.row(case, name, "batch", arm.batch, "sequences a GPU"),
    ]
    if peak is not None:
        rows.append(timing.row(case, name, "MFU", arm.operations / seconds / (peak * arm.gpus), ""))
    return rows


def main(argv: list[str]) -> None:
    parser = driver.parser("release", __doc__, rounds=3, steps=3)
    parser.add_argument(
        "--model", choices=sizes.NAMES, default="7b", metavar="SIZE", help="default: 7b; 8b has a vocabulary of 128,256"
    )
    parser.add_argument("--arm", nargs="+", default=list(ARMS))
    parser.add_argument("--batch", type=int, default=1, help="sequences on each GPU; 0: as many as fit")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument(
        "--gpus", type=int, default=1, help="number of GPUs over which state and batches are sharded (FSDP)"
    )
    parser.add_argument("--fit", type=float, default=float("inf"), help="memory limit in GB, as of a smaller card")
    options = parser.parse_args(argv)
    timing.need_gpu()
    model, length = sizes.get(options.model, VOCAB.get(options.model, 32_000)), options.length
    if timing.dry():
        model, length, options.gpus = DRY, 32, 1
    case = f"{options.model}, {options.batch or 'most'} x {length} tokens"
    case += f", {options.gpus} GPUs" if options.gpus > 1 else ""
    case += f" in {options.fit:g} GB" if options.fit < float("inf") else ""
    gigabytes = min(options.fit, (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf")) / 1e9)
    arms, base, needs = dict[str, CardArm](), options.arm[0], dict[str, float]()
    title = "Training steps of large Llamas, with and without fused_backward"
    file = driver.ResultsFile(options, title, driver.notes_of(__doc__), devices=options.gpus)
    for name in options.arm:
        make = lambda batch, name=name: CardArm(name, model, batch, length, options.gpus)  # noqa: E731
        try:
            arm = make(options.batch) if options.batch else largest(make, gigabytes)
        except ValueError as error:
            if not options.batch:
                print(f"  {name}: {error}", flush=True)
                continue
            raise
        needs[name] = arm.needs
        first, fits = needs.get(base), needs[name] < gigabytes
        row = timing.row(case, name, "memory", needs[name], "GB", base, first and first / needs[name])
        print(f"  {name}: {needs[name]:.1f} GB{'' if fits else ', does not fit'}", flush=True)
        if fits:
            arms[name] = arm
            print(f"    loss {float(arm()):.4f}", flush=True)
            arm.stop()
        file.add([row])
    times = driver.timed(arms, options.rounds, options.steps)
    one = speed.peak(jax.devices()[0].device_kind)
    for name in times:
        file.add(rates(case, name, arms, times, base, one))
    file.end()
