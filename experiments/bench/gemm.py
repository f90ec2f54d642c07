"""FP8 matmuls on one GPU: XLA, jax.nn.scaled_matmul, torch (if importable), our kernels.

Only the matmul is timed; operands are already quantized. All implementations of a shape are compiled first, then timed
in turns. A figure is the median round. Each round starts with an untimed run of the same length. The GPU is then at its
power limit, as in training. In the first 20 ms, matmuls are up to 15 % faster.

Operands rotate among sets that exceed the L2 cache. JAX runs 3 ms of matmuls in one program. torch queues its kernels
ahead. Results are compared with float64 on a sample of rows and columns. An implementation that fails is reported.

Predicted before the first run (ratios): ours per tensor and per row 0.97 to 1.03 of the better of cuBLASLt and torch;
1x128 by 128x128 1.15 to 1.25 of torch's; exact per 32 0.42 of per tensor, and 0.49 as a bf16 matmul of decoded codes.
Predicted later, before its first run: microscaled codes that are folded first 0.92.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench import driver, timing
from experiments.bench.step_torch import Waiting
from pallas_kernels.matmul.matmul_block_mosaic import matmul_block
from pallas_kernels.matmul.matmul_mosaic import matmul
from pallas_kernels.matmul.matmul_mx_mosaic import matmul_mx
from pallas_kernels.quantization.fold_triton import fold_codes

torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None

Gemm = tuple[int, int, int]
# (M, N, K): shapes in both MOSS's Table 6 and DeepGEMM's table, Llama-7B with 16 k tokens, the rest of MOSS's table.
SHAPES: list[Gemm] = [
    (8192, 8192, 8192),
    (2048, 7168, 4096),
    (16384, 4096, 4096),
    (4096, 7168, 16384),
    (4096, 4096, 8192),
    (4096, 2048, 7168),
    (4096, 24576, 1536),
    (4096, 4096, 12288),
    (16384, 22016, 4096),
    (16384, 4096, 11008),
    (2048, 7168, 11008),
    (5120, 5120, 10240),
]
# Minimum duration of a program in seconds, and the expected rate in FLOP/s.
PROGRAM, EXPECTED = 3e-3, 1.2e15
BASE = "xla bf16"
E4M3, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
NT = (((1,), (1,)), ((), ()))

Operands = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class GemmArm:
    """One implementation: a function of some arrays of an operand set, and the kind of matmul that it computes."""

    name: str
    kind: str
    function: Callable[..., Any]
    takes: tuple[str, ...]
    is_torch: bool = False


def operands(m: int, n: int, k: int, seed: int) -> Operands:
    """Returns normal data with unequal fp32 scales of every granularity; `_turned` has the quantize kernel's layout."""
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
    """Returns the same values in bf16. A separate program: in that of the codes, XLA would omit their rounding."""
    return codes.astype(BF16)


def oracle(kind: str, x: Operands, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Returns the matmul of `kind` at some rows and columns, in float64."""

    def decode(name: str, index: np.ndarray) -> np.ndarray:
        return np.asarray(x[name][index].astype(F32), np.float64)

    a, b = decode("a", rows), decode("b", cols)
    if kind in ("block", "wgrad"):
        a = a * np.repeat(decode("a_group", rows), 128, 1)
        b = b * np.repeat(decode("b_group", cols) if kind == "wgrad" else decode("b_block", cols // 128), 128, 1)
    if kind == "mx":
        a = a * np.repeat(2.0 ** (decode("exponent", rows) - 127), 32, 1)
    expected = a @ b.T
    if kind in ("tensor", "promoted"):
        expected = expected * 0.5
    if kind in ("row", "mx"):
        expected = expected * decode("row", rows)[:, None]
    return expected * decode("column", cols) if kind == "row" else expected


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
    yield GemmArm("torch tensor", "tensor", fast, ("a", "b", "t_s", "t_one"), is_torch=True)
    promoted = functools.partial(scaled, fast=False)
    yield GemmArm("torch tensor promoted", "promoted", promoted, ("a", "b", "t_s", "t_one"), is_torch=True)
    yield GemmArm("torch row", "row", fast, ("a", "b", "t_row", "t_column"), is_torch=True)
    yield GemmArm("torch 1x128/128x128", "block", promoted, ("a", "b", "t_group", "t_block"), is_torch=True)


def our_arms() -> Iterator[GemmArm]:
    def folded_first(a: Any, b: Any, exponent: Any, row: Any) -> Any:
        codes, scale = fold_codes(a, exponent, row[:, None])
        return matmul(codes, b, row_scale=scale[:, 0])

    tensor = ("a", "b", "s")
    yield GemmArm("ours tensor", "tensor", lambda a, b, s: matmul(a, b, scale=s), tensor)
    yield GemmArm("ours tensor promoted", "promoted", lambda a, b, s: matmul(a, b, scale=s, fast=False), tensor)
    yield GemmArm("ours row", "row", lambda a, b, r, c: matmul(a, b, row_scale=r, column_scale=c),
                  ("a", "b", "row", "column"))  # fmt: skip
    yield GemmArm("ours block", "block", lambda a, b, sa, sb: matmul_block(a, b, sa.T, sb),
                  ("a", "b", "a_turned", "b_block"))  # fmt: skip
    yield GemmArm("ours wgrad", "wgrad", lambda a, b, sa, sb: matmul_block(a, b, sa.T, sb.T),
                  ("a", "b", "a_turned", "b_turned"))  # fmt: skip
    yield GemmArm("ours mx, codes folded first", "mx", folded_first, ("a", "b", "exponent", "row"))
    yield GemmArm("ours mx exact", "mx", lambda a, b, e, r: matmul_mx(a, b, e, row_scale=r),
                  ("a", "b", "exponent", "row"))  # fmt: skip


def torch_operands(x: Operands) -> Operands:
    """Returns the same arrays for torch, with scales in the layouts of its block-wise matmul."""

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


class Measured(NamedTuple):
    """The measurements of a shape.

    Attributes:
        case: case of the rows.
        rows: errors and failures.
        work: operations per program.
        seconds: seconds per program, by implementation.
    """

    case: str
    rows: list[timing.Row]
    work: float
    seconds: dict[str, timing.Seconds]


def measure(shape: Gemm, arms: Sequence[GemmArm], operands: Any, oracle: Any, options: argparse.Namespace) -> Measured:
    """Compiles, checks and times the implementations of a shape.

    Args:
        shape: (M, N, K).
        arms: the implementations. Implementations with the same function share a program.
        operands: maps (M, N, K, seed) to a set of arrays by name.
        oracle: maps a kind of matmul, a set, rows and columns to the entries of the matmul there, in float64.
        options: parsed options with `rounds` and `burst`.
    """
    m, n, k = shape
    past_cache, long_enough = 3 * timing.L2_BYTES / (m * k + n * k), PROGRAM * EXPECTED / (2 * m * n * k)
    count = min(24, max(3, math.ceil(past_cache), math.ceil(long_enough)))
    make = jax.jit(operands, static_argnums=(0, 1, 2))
    sets = [make(m, n, k, seed) for seed in range(count)]
    sets = [x | {"a16": widened(x["a"]), "b16": widened(x["b"])} for x in sets]
    moved = [torch_operands(x) for x in sets[:6]] if any(arm.is_torch for arm in arms) else []
    rows, cols = np.arange(0, m, max(m // 48, 1)), np.arange(0, n, max(n // 48, 1))
    arguments = {}
    for arm in arms:
        source = [moved[i % len(moved)] for i in range(count)] if arm.is_torch else sets
        arguments[arm.name] = [[x[name] for name in arm.takes] for x in source]
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        arms_by_signature = {(arm.function, len(arm.takes)): arm for arm in arms}
        programs = {
            signature: pool.submit(_program, arm, arguments[arm.name]) for signature, arm in arms_by_signature.items()
        }
    print(f"{shape}: compiled in {time.perf_counter() - start:.0f} s", flush=True)
    case, table, ready = "x".join(map(str, shape)), list[timing.Row](), dict[str, Callable[[], Any]]()
    for arm in arms:
        try:
            call = functools.partial(programs[arm.function, len(arm.takes)].result(), arguments[arm.name])
            first = (call().value if arm.is_torch else call())[0][rows][:, cols]
            sample = first.float().cpu().numpy() if arm.is_torch else np.asarray(first.astype(F32))
            expected = oracle(arm.kind, sets[0], rows, cols)
            error = float(np.linalg.norm(sample - expected) / np.linalg.norm(expected))
            table.append(timing.row(case, arm.name, "error", error, "of float64"))
            ready[arm.name] = call
        except Exception as problem:
            timing.report_failure(arm.name, problem)
            table.append(timing.row(case, arm.name, "failed", None, type(problem).__name__))
    seconds = timing.seconds(ready, options.rounds, options.burst)
    return Measured(case, table, 2.0 * m * n * k * count, seconds)


def _program(arm: GemmArm, arguments: Any) -> Callable[..., Any]:
    """Returns a function that multiplies all sets: a compiled program, or torch calls with one wait at the end."""
    call = lambda sets: [arm.function(*args) for args in sets]  # noqa: E731
    if arm.is_torch:
        return lambda sets: Waiting(torch, call(sets))
    return timing.traced(call, arguments)  # type: ignore[no-any-return]


def rate_rows(case: str, work: float, arms: Sequence[GemmArm], seconds: dict[str, timing.Seconds]) -> list[timing.Row]:
    """Returns rates relative to the fastest peer with the same kind of matmul, or to XLA's bf16 if there is none."""
    rows = []
    for arm in arms:
        if arm.name not in seconds:
            continue
        rivals = [x.name for x in arms if x.kind == arm.kind and not x.name.startswith("ours")]
        baseline = min(rivals or [BASE], key=lambda name: seconds.get(name, math.inf))
        time, base = seconds[arm.name], seconds.get(baseline)
        ratio = None if base is None else base / time
        rows.append(driver.rate_row(case, arm.name, "rate", time, 1e-12 * work, "TFLOP/s", baseline, ratio))
    return rows


def add_shapes(
    file: driver.ResultsFile, shapes: Sequence[Gemm], measure_rows: Callable[[Gemm], Any], limit: float
) -> None:
    """Adds the rows of each shape to a results file, up to a time limit in seconds."""
    start = time.perf_counter()
    for shape in [(256, 256, 512)] if timing.dry() else shapes:
        if time.perf_counter() - start > limit:
            print(f"{shape}: not measured, the time limit is reached")
        else:
            file.add(measure_rows(shape))
    file.end("rate")


def main(argv: list[str]) -> None:
    parser = driver.parser("gemm", __doc__, rounds=3, burst=0.1)
    parser.add_argument("--limit", type=float, default=480, help="seconds after which no further shape is started")
    options = parser.parse_args(argv)
    timing.need_gpu()
    arms = [*xla_arms(), *(torch_arms() if torch is not None else []), *our_arms()]
    versions = {"torch": torch.__version__} if torch else {}
    notes = driver.notes_of(__doc__)
    file = driver.ResultsFile(options, "FP8 matmuls", notes, versions=versions, last_resort=BASE)

    def measure_rows(shape: Gemm) -> list[timing.Row]:
        rows_of_shape = measure(shape, arms, operands, oracle, options)
        return rows_of_shape.rows + rate_rows(rows_of_shape.case, rows_of_shape.work, arms, rows_of_shape.seconds)

    add_shapes(file, SHAPES, measure_rows, options.limit)
