"""FP8 products of one GPU in one process: XLA, jax.nn.scaled_matmul, torch (where importable), our kernels.

    python -m experiments.bench gemm
    python -m experiments.bench gemm --shapes moss --only 'ours|xla bf16'

Every implementation of a shape is compiled first (in parallel); then all are timed, several rounds in a random order,
another one for each shape, so that clocks and temperature favour none. Each round starts with an untimed run of the
same length, after which the GPU is at its power limit and has lowered its clock, as in training: in a first 20 ms
products are up to 15 % faster, by what energy they take. A figure is the median round. Operands rotate among sets that
are together larger than the L2 cache; JAX multiplies sets for 3 ms in one program, as in a training step, where
products follow each other without a launch from Python; torch queues them ahead. Each result is compared with float64
on a sample of rows and columns; an implementation that fails is reported as such.

Predicted before the first run (ratios): ours per tensor and row-wise 0.97 to 1.03 of the better of cuBLASLt and torch;
1x128 by 128x128 1.15 to 1.25 of torch's own; exact per 32 0.42 of per tensor, and as a bf16 product of decoded codes
0.49. Before its own first run, later: microscaled codes that are folded first 0.92.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench import cases, timing
from pallas_kernels.matmul.matmul_block_mosaic import matmul_block
from pallas_kernels.matmul.matmul_mosaic import matmul
from pallas_kernels.matmul.matmul_mx_mosaic import matmul_mx
from pallas_kernels.quantization.fold_triton import fold_codes

torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None

SETS = {"all": cases.GEMMS, "moss": cases.MOSS}
# A program of one implementation takes so many seconds at least, by the rate that is expected, in FLOP/s.
PROGRAM, EXPECTED = 3e-3, 1.2e15
BASE = "xla bf16"
E4M3, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
NT = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class GemmArm:
    """One implementation: a function of some arrays of an operand set, and the kind of product it computes."""

    name: str
    kind: str
    function: Callable[..., Any]
    takes: tuple[str, ...]
    framework: str = "jax"


def operands(m: int, n: int, k: int, seed: int) -> dict[str, jax.Array]:
    """Normal data with fp32 scales of every granularity, never all equal; `_turned` as the quantize kernel writes."""
    keys = jax.random.split(jax.random.key(seed), 7)
    uniform = functools.partial(jax.random.uniform, minval=0.5, maxval=2.0)
    a = (jax.random.normal(keys[0], (m, k)) * 32).astype(E4M3)
    b = (jax.random.normal(keys[1], (n, k)) * 32).astype(E4M3)
    a_group, b_group = uniform(keys[4], (m, k // 128)), uniform(keys[5], (n, k // 128))
    return {
        "a": a, "b": b, "s": jnp.asarray(0.5, F32),
        "row": uniform(keys[2], (m,)), "column": uniform(keys[3], (n,)),
        "a_group": a_group, "b_group": b_group, "a_turned": a_group.T, "b_turned": b_group.T,
        "b_block": uniform(keys[5], (n // 128, k // 128)),
        "exponent": 127 - jax.random.randint(keys[6], (m, k // 32), 0, 4).astype(jnp.uint8),
    }  # fmt: skip


@jax.jit
def widened(codes: jax.Array) -> jax.Array:
    """The same values in bf16. In the program that makes the codes XLA would leave their rounding out."""
    return codes.astype(BF16)


def oracle(kind: str, x: dict[str, Any], rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """The product of `kind` at these rows and columns, in float64."""

    def wide(name: str, index: np.ndarray) -> np.ndarray:
        return np.asarray(x[name][index].astype(F32), np.float64)

    a, b = wide("a", rows), wide("b", cols)
    if kind in ("block", "wgrad"):
        a = a * np.repeat(wide("a_group", rows), 128, 1)
        b = b * np.repeat(wide("b_group", cols) if kind == "wgrad" else wide("b_block", cols // 128), 128, 1)
    if kind == "mx":
        a = a * np.repeat(2.0 ** (wide("exponent", rows) - 127), 32, 1)
    out = a @ b.T
    if kind in ("tensor", "promoted"):
        out = out * 0.5
    if kind in ("row", "mx"):
        out = out * wide("row", rows)[:, None]
    return out * wide("column", cols) if kind == "row" else out


def xla_arms() -> Iterator[GemmArm]:
    dot = functools.partial(lax.dot_general, dimension_numbers=NT)

    def tensor(a: Any, b: Any, s: Any, precision: Any = None) -> Any:
        left, right = a.astype(BF16) * s.astype(BF16), b.astype(BF16) * jnp.ones((), BF16)
        return dot(left, right, precision=precision, preferred_element_type=BF16)

    def row(a: Any, b: Any, r: Any, c: Any) -> Any:
        return (dot(a, b, preferred_element_type=F32) * r[:, None] * c).astype(BF16)

    def microscaled(a: Any, b: Any, e: Any, r: Any) -> Any:
        powers = lax.bitcast_convert_type(e, jnp.float8_e8m0fnu)[None]
        ones = jnp.ones((1, b.shape[0], e.shape[1]), jnp.float8_e8m0fnu)
        out = jax.nn.scaled_matmul(a[None], b[None], powers, ones, preferred_element_type=F32)[0]
        return (out * r[:, None]).astype(BF16)

    yield GemmArm("jax.nn.scaled_matmul", "mx", microscaled, ("a", "b", "exponent", "row"))
    yield GemmArm(BASE, "bf16", functools.partial(dot, preferred_element_type=BF16), ("a16", "b16"))
    yield GemmArm("xla fp8 tensor", "tensor", tensor, ("a", "b", "s"))
    promoted = functools.partial(tensor, precision=lax.Precision.HIGHEST)
    yield GemmArm("xla fp8 tensor promoted", "promoted", promoted, ("a", "b", "s"))
    yield GemmArm("xla fp8 row", "row", row, ("a", "b", "row", "column"))


def torch_arms() -> Iterator[GemmArm]:
    def scaled(a: Any, b: Any, sa: Any, sb: Any, fast: bool) -> Any:
        return torch._scaled_mm(a, b.t(), scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=fast)

    fast = functools.partial(scaled, fast=True)
    yield GemmArm("torch tensor", "tensor", fast, ("a", "b", "t_s", "t_one"), "torch")
    promoted = functools.partial(scaled, fast=False)
    yield GemmArm("torch tensor promoted", "promoted", promoted, ("a", "b", "t_s", "t_one"), "torch")
    yield GemmArm("torch row", "row", fast, ("a", "b", "t_row", "t_column"), "torch")
    yield GemmArm("torch 1x128/128x128", "block", promoted, ("a", "b", "t_group", "t_block"), "torch")


def our_arms() -> Iterator[GemmArm]:
    yield GemmArm("ours tensor", "tensor", lambda a, b, s: matmul(a, b, scale=s), ("a", "b", "s"))
    yield GemmArm(
        "ours tensor promoted", "promoted", lambda a, b, s: matmul(a, b, scale=s, fast=False), ("a", "b", "s")
    )
    yield GemmArm("ours row", "row", lambda a, b, r, c: matmul(a, b, row_scale=r, column_scale=c),
                  ("a", "b", "row", "column"))  # fmt: skip
    yield GemmArm("ours block", "block", lambda a, b, sa, sb: matmul_block(a, b, sa.T, sb),
                  ("a", "b", "a_turned", "b_block"))  # fmt: skip
    yield GemmArm("ours wgrad", "wgrad", lambda a, b, sa, sb: matmul_block(a, b, sa.T, sb.T),
                  ("a", "b", "a_turned", "b_turned"))  # fmt: skip
    yield GemmArm("ours mx, codes folded first", "mx", folded_first, ("a", "b", "exponent", "row"))
    yield GemmArm("ours mx exact", "mx", lambda a, b, e, r: matmul_mx(a, b, e, row_scale=r),
                  ("a", "b", "exponent", "row"))  # fmt: skip


def folded_first(a: Any, b: Any, exponent: Any, row: Any) -> Any:
    codes, scale = fold_codes(a, exponent, row[:, None])
    return matmul(codes, b, row_scale=scale[:, 0])


def torch_operands(x: dict[str, jax.Array]) -> dict[str, Any]:
    """The same arrays for torch, with scales in the layouts that its block-wise product asks for."""

    def move(v: jax.Array) -> Any:
        if v.dtype == E4M3:
            return torch.from_numpy(np.asarray(v).view(np.uint8)).cuda().view(torch.float8_e4m3fn)
        return torch.from_numpy(np.array(v)).cuda()

    steps = x["b_block"].shape[1]
    padded = torch.zeros(x["b_block"].shape[0], -(-steps // 4) * 4, device="cuda")
    padded[:, :steps] = move(x["b_block"])
    return {
        "a": move(x["a"]), "b": move(x["b"]), "t_s": move(x["s"]), "t_one": torch.ones((), device="cuda"),
        "t_row": move(x["row"])[:, None], "t_column": move(x["column"])[None],
        "t_group": move(x["a_group"]).t().contiguous().t(), "t_block": padded[:, :steps].t(),
    }  # fmt: skip


def measure(shape: tuple[int, int, int], arms: list[GemmArm], rounds: int, burst: float) -> list[dict[str, Any]]:
    m, n, k = shape
    past_cache = math.ceil(3 * timing.L2_BYTES / (m * k + n * k))
    copies = min(24, max(3, past_cache, math.ceil(PROGRAM * EXPECTED / (2 * m * n * k))))
    make = jax.jit(operands, static_argnums=(0, 1, 2))
    sets = [make(m, n, k, seed) for seed in range(copies)]
    sets = [x | {"a16": widened(x["a"]), "b16": widened(x["b"])} for x in sets]
    torch_sets = [torch_operands(x) for x in sets[:6]] if any(a.framework == "torch" for a in arms) else []
    torch_sets = [torch_sets[i % len(torch_sets)] for i in range(copies)] if torch_sets else []
    rows, cols = np.arange(0, m, max(m // 48, 1)), np.arange(0, n, max(n // 48, 1))
    results: list[dict[str, Any]] = []
    ready: list[Any] = []

    def build(arm: GemmArm) -> Callable[..., Any]:
        call = lambda sets: [arm.function(*args) for args in sets]  # noqa: E731
        if arm.framework == "torch":
            return call
        args = [[x[t] for t in arm.takes] for x in sets]
        program = timing.traced(call, args)
        jax.block_until_ready(program(args))
        return program

    start = time.time()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        futures = [pool.submit(build, arm) for arm in arms]
    print(f"{shape}: compiled in {time.time() - start:.0f} s", flush=True)
    wanted = {kind: oracle(kind, sets[0], rows, cols) for kind in {a.kind for a in arms}}
    for arm, future in zip(arms, futures, strict=True):
        source = torch_sets if arm.framework == "torch" else sets
        try:
            call, args = future.result(), [[x[t] for t in arm.takes] for x in source]
            out = call(args)[0]
            sample = out[rows][:, cols]
            sample = sample.float().cpu().numpy() if arm.framework == "torch" else np.asarray(sample.astype(F32))
            error = float(np.linalg.norm(sample - wanted[arm.kind]) / np.linalg.norm(wanted[arm.kind]))
            finish = (lambda _: torch.cuda.synchronize()) if arm.framework == "torch" else jax.block_until_ready
            ready.append((arm, call, args, error, finish))
        except Exception as problem:
            if timing.dry():
                raise
            print(f"  {arm.name}: {type(problem).__name__} {str(problem)[:300]}".replace("\n", " "), flush=True)
            results.append({"case": "x".join(map(str, shape)), "impl": arm.name, "metric": "failed", "value": None,
                            "unit": f"{type(problem).__name__}", "baseline": None, "ratio": None})  # fmt: skip

    def run(entry: Any, repeats: int) -> float:
        _, call, args, _, finish = entry
        for _ in range(2):  # the first part only settles the clock
            begin = time.perf_counter()
            for _ in range(repeats):
                out = call(args)
            finish(out)
        return (time.perf_counter() - begin) / repeats / copies

    rounds, burst = (1, 0.0) if timing.dry() else (rounds, burst)
    repeats = [max(4, int(burst / copies / max(run(e, 3), 1e-6))) for e in ready]
    times: list[list[float]] = [[] for _ in ready]
    for turn in range(rounds):  # what ran just before decides how far the power limit has pulled the clock down
        for i in np.random.default_rng([turn, *shape]).permutation(len(ready)):
            times[i].append(run(ready[i], repeats[i]))
    seconds = {e[0].name: timing.Seconds(t) for e, t in zip(ready, times, strict=True)}
    return results + rate_rows(shape, [e[0] for e in ready], seconds, {e[0].name: e[3] for e in ready})


def rate_rows(
    shape: tuple[int, int, int],
    arms: list[GemmArm],
    seconds: dict[str, timing.Seconds],
    errors: dict[str, float],
) -> list[timing.Row]:
    """Rates against the fastest of others that computes the same kind of product; without one, against XLA's bf16."""
    m, n, k = shape
    case, rows = "x".join(map(str, shape)), []
    for arm in arms:
        rivals = [x.name for x in arms if x.kind == arm.kind and not x.name.startswith("ours")]
        baseline = min(rivals or [BASE], key=lambda name: seconds.get(name, math.inf))
        time, base = seconds[arm.name], seconds.get(baseline)

        def rate(t: float) -> float:
            return 2e-12 * m * n * k / t

        ratio = None if base is None else base / time
        rows.append(timing.row(case, arm.name, "rate", rate(time), "TFLOP/s", baseline, ratio, time.quartiles(rate)))
        rows.append(timing.row(case, arm.name, "error", errors[arm.name], "of float64"))
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="gemm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", choices=SETS, default="all")
    parser.add_argument("--only", default="", help="substring of the implementations to run, alternatives with |")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", type=float, default=0.1, help="seconds of one round of one implementation")
    parser.add_argument("--limit", type=float, default=480, help="seconds after which no further shape is started")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    timing.need_gpu()
    arms = [*xla_arms(), *(torch_arms() if torch is not None else []), *our_arms()]
    arms = [a for a in arms if not options.only or any(word in a.name for word in options.only.split("|"))]
    versions = {"torch": torch.__version__} if torch else {}
    notes = ["Product alone, operands already quantized. " + " ".join((__doc__ or "").split("\n\n")[2].split())]
    save = functools.partial(
        timing.write, "gemm", "FP8 products", notes=notes, versions=versions, out=options.out, last_resort=BASE
    )
    start, rows = time.time(), []
    for shape in [(256, 256, 512)] if timing.dry() else SETS[options.shapes]:
        if time.time() - start > options.limit:
            print(f"{shape}: not measured, the time limit is reached")
            continue
        rows += measure(shape, arms, options.rounds, options.burst)
        save(rows, complete=False)
    save(rows + timing.means(rows, "rate", BASE))
