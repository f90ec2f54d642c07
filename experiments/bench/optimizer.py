"""Optimizer step of half a billion parameters on one GPU: 8-bit moments, optax and other libraries.

The implementations of a case run in turns, in another order in each round: 10 untimed steps, then 10 timed ones.
Figures are medians. "speed" is that of such a burst, in which the GPU's clock is still high. "speed, sustained": 3
rounds of 60 untimed and 60 timed steps. "bytes only" is a kernel that moves the bytes of a step with 8-bit moments (the
fastest of three launches).

The second moment is rounded stochastically, except in arms named "to nearest". FP8-LM has working weights in bf16, and
gradients in bf16 or as e4m3 codes. PyTorch's optimizers, with those of bitsandbytes and torchao, run last, one after
the other, if they are installed.
"""

import dataclasses
import functools
import gc
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to PyTorch's optimizers

import jax
import jax.numpy as jnp
import optax
import triton
import triton.language as tl

import fp8jax
from experiments.bench import driver, timing
from pallas_kernels.dispatch import call_triton

LEAVES, ROWS, WIDTH, GROUP = 8, 16384, 4096, 128
RATE, B1, B2, DECAY = 1e-3, 0.9, 0.999, 0.1
NU_NEAREST = ", second moment to nearest"
BYTES, LAUNCHES = "bytes only", ((2048, 4), (4096, 4), (4096, 8))
ROUNDS, CALLS, SUSTAINED_ROUNDS, SUSTAINED_CALLS = 9, 10, 3, 60
BURST, SUSTAINED = "speed", "speed, sustained"
FP32, BF16 = "fp32 weights, bf16 gradients", "bf16 weights, stochastic rounding"
FUSED, XLA = "fp8lm_adamw step", "fp8lm_adamw step, XLA"
# FP8-LM reads the gradient (twice), master weight, working weight and both moments, and writes all but the gradient.
LM_TRAFFIC = {name: 2 * size + 2 * (2 + 2 + 1 + 2) for name, size in (("fp8 gradients", 1), ("bf16 gradients", 2))}
# XLA reads its results once more for their amax.
REREAD_BYTES = 2 + 1 + 2
# PyTorch optimizers by name: module, class, options, and bytes moved per parameter.
TORCH: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "torch fused": ("torch.optim", "AdamW", {"fused": True}, 28.0),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}, 16.0),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", {}, 16.0),
}


@triton.jit
def _move(
    grad_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    mu_scale_ptr: tl.tensor,
    mu_exponent_ptr: tl.tensor,
    nu_ptr: tl.tensor,
    nu_scale_ptr: tl.tensor,
    nu_exponent_ptr: tl.tensor,
    spare1: tl.tensor,
    spare2: tl.tensor,
    spare3: tl.tensor,
    spare4: tl.tensor,
    spare5: tl.tensor,
    spare6: tl.tensor,
    spare7: tl.tensor,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Moves the bytes of a step, with almost no arithmetic, to measure the speed limit of memory."""
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    g, w = tl.load(grad_ptr + offsets).to(tl.float32), tl.load(weight_ptr + offsets)
    mu, nu = tl.load(mu_ptr + offsets), tl.load(nu_ptr + offsets)
    mu_scale, nu_scale = tl.load(mu_scale_ptr + group), tl.load(nu_scale_ptr + group)
    mu_exponent, nu_exponent = tl.load(mu_exponent_ptr + group), tl.load(nu_exponent_ptr + group)
    tl.store(weight_ptr + offsets, tl.fma(g, 1e-4, w.to(tl.float32)).to(w.dtype))
    tl.store(mu_ptr + offsets, nu)
    tl.store(nu_ptr + offsets, mu)
    tl.store(mu_scale_ptr + group, nu_scale)
    tl.store(nu_scale_ptr + group, mu_scale)
    tl.store(mu_exponent_ptr + group, nu_exponent)
    tl.store(nu_exponent_ptr + group, mu_exponent)


def move(size: int, warps: int, state: Any, grads: Any) -> Any:
    """One step of `_move` on every leaf of (weights, mu, nu), each moment a tuple of arrays."""

    def leaf(g: jax.Array, w: jax.Array, mu: tuple, nu: tuple) -> tuple:
        arrays = [g, w, *mu, *nu]
        copy = call_triton.call(
            *arrays,
            kernel=_move,
            out_shapes=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[1:]],
            num_programs=g.size // size,
            num_warps=warps,
            compute_capability=None,
            aliases={i + 1: i for i in range(7)},
            SIZE=size,
            GROUPS=size // GROUP,
        )
        return copy[0], tuple(copy[1:4]), tuple(copy[4:7])

    return list(zip(*[leaf(g, *row) for g, *row in zip(grads, *state, strict=True)], strict=True))


class State:
    """A state that steps donate and return."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def as_call(self, step: Callable, *args: Any) -> Callable[[], Any]:
        """Returns a function that runs one step."""

        def call() -> Any:
            self.value = step(self.value, *args)
            return self.value

        return call


@dataclasses.dataclass(frozen=True)
class OptimizerArm:
    """One step of an implementation, its moved bytes per parameter, and its bytes of temporaries and state."""

    name: str
    call: Callable[[], Any]
    traffic: float
    memory: tuple[int, int] | None = None


def step_traffic(dtype: Any) -> float:
    """Returns bytes per parameter of a step with weights in `dtype`, bf16 gradients and 8-bit moments with scales."""
    return 2 * jnp.dtype(dtype).itemsize + 2 + 4 + 24 / GROUP


def weights(shape: tuple[int, int], dtype: Any) -> list[jax.Array]:
    make = jax.jit(lambda i: (jax.random.normal(jax.random.key(i), shape) * 0.02).astype(dtype))
    return [make(i) for i in range(LEAVES)]


class Bench:
    """Collects rows; `params` is the number of parameters of a step."""

    def __init__(self, rows: int, rounds: int = ROUNDS) -> None:
        self.shape, self.rounds = (rows, WIDTH), rounds
        self.params = LEAVES * rows * WIDTH
        self.rows: list[timing.Row] = []
        self.speeds: dict[tuple[str, str, str], float] = {}

    def record(
        self, case: str, impl: str, time_: float, traffic: float, baseline: str | None, metric: str = BURST
    ) -> None:
        """Adds the speed of an implementation, relative to `baseline` in the same case."""
        speed = self.params / time_ / 1e9
        self.speeds[case, impl, metric] = speed
        ratio = speed / self.speeds[case, baseline, metric] if baseline else None
        spread = time_.quartiles((self.params / 1e9).__truediv__) if isinstance(time_, timing.Seconds) else None
        self.rows.append(timing.row(case, impl, metric, speed, "Gparam/s", baseline, ratio, spread))
        if metric == BURST:
            self.rows.append(timing.row(case, impl, "bandwidth", traffic * speed / 1e3, "TB/s"))

    def add_ratio(self, case: str, impl: str, baseline: tuple[str, str]) -> None:
        """Adds the speeds of an implementation again, relative to another (case, implementation)."""
        for metric in (BURST, SUSTAINED):
            speed = self.speeds[case, impl, metric]
            ratio = speed / self.speeds[*baseline, metric]
            self.rows.append(timing.row(case, impl, metric, speed, "Gparam/s", baseline[1], ratio))

    def gradients(self, dtype: Any) -> list[jax.Array]:
        return [0.5 * g for g in weights(self.shape, dtype)]

    def measure(self, case: str, arms: Sequence[OptimizerArm], moves: Sequence[OptimizerArm] = ()) -> None:
        """Times all arms of a case in turns, in bursts and in longer runs.

        Args:
            case: case of the rows.
            arms: arms to time.
            moves: launches that only move the bytes of a step. The fastest is the baseline. If empty, the first arm is
                the baseline.
        """
        calls = {arm.name: arm.call for arm in (*moves, *arms)}
        times = timing.in_turns(calls, self.rounds, dict.fromkeys(calls, CALLS))
        if moves:
            best = min(moves, key=lambda arm: times[arm.name])
            times[BYTES], arms = times[best.name], [dataclasses.replace(best, name=BYTES), *arms]
        calls = {arm.name: arm.call for arm in arms}
        sustained = timing.in_turns(calls, SUSTAINED_ROUNDS, dict.fromkeys(calls, SUSTAINED_CALLS))
        base = arms[0].name
        for metric, seconds_by_arm in ((BURST, times), (SUSTAINED, sustained)):
            for arm in arms:
                baseline = None if arm.name == base else base
                self.record(case, arm.name, seconds_by_arm[arm.name], arm.traffic, baseline, metric)
        for arm in arms:
            if arm.memory is not None:
                temporaries, state = arm.memory
                row = timing.row(
                    case, arm.name, "temporaries", temporaries / 2**20, "MiB", "state", temporaries / state
                )
                self.rows.append(row)

    def optax(self, dtype: Any) -> OptimizerArm:
        """Returns `optax.adamw` with all arrays in one dtype, in one jit with donation."""
        tx = optax.adamw(RATE, B1, B2, weight_decay=DECAY)
        p, g = weights(self.shape, dtype), self.gradients(dtype)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(carry: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), state

        call = State((p, tx.init(p))).as_call(step, g)
        return OptimizerArm(f"optax.adamw {jnp.dtype(dtype).name}", call, 7 * jnp.dtype(dtype).itemsize)

    def compiled(self, name: str, run: Any, traffic: float, params: Any, state: Any, grads: Any,
                 keeps_params: bool = False) -> OptimizerArm:  # fmt: skip
        """Returns an arm of `run(params, state, grads)`, which returns new params and state.

        Parameters are not donated if `keeps_params`.
        """
        program = timing.traced(run, params, state, grads, donate_argnums=(1,) if keeps_params else (0, 1))

        def step(carry: Any, grads: Any) -> Any:
            result, state = program(*carry, grads)
            return (carry[0] if keeps_params else result), state

        size = sum(x.nbytes for x in jax.tree.leaves(state))
        call = State((params, state)).as_call(step, grads)
        return OptimizerArm(name, call, traffic, (program.memory_analysis().temp_size_in_bytes, size))

    def ours(self, dtype: Any, form: str, stochastic: bool = False, nu_rounding: str = "auto") -> OptimizerArm:
        """`compressed_adamw` in one jit, with the temporaries of the compiled program.

        Forms: "step" returns new weights; "update" returns only updates; "update + apply" is optax's usual code. The
        second moment is rounded stochastically unless `nu_rounding` is set.
        """
        tx = fp8jax.compressed_adamw(RATE, B1, B2, weight_decay=DECAY, impl="triton", nu_rounding=nu_rounding)
        p, key = weights(self.shape, dtype), {"key": jax.random.key(0)} if stochastic else {}

        def run(params: Any, state: Any, grads: Any) -> Any:
            if form == "step":
                return tx.step(grads, state, params, **key)
            updates, state = tx.update(grads, state, params)
            return (updates if form == "update" else optax.apply_updates(params, updates)), state

        traffic = step_traffic(dtype) + (3 * jnp.dtype(dtype).itemsize if form == "update + apply" else 0)
        name = f"compressed_adamw {form}" + (", to nearest" if dtype == jnp.bfloat16 and not stochastic else "")
        name += NU_NEAREST if nu_rounding == "nearest" else ""
        return self.compiled(name, run, traffic, p, tx.init(p), self.gradients(jnp.bfloat16), form == "update")

    def fp8_lm(self, gradients: str, impl: str) -> OptimizerArm:
        """Returns `fp8lm_adamw` by its kernel ("triton") or by XLA, for a kind of gradients in `LM_TRAFFIC`."""
        tx = fp8jax.fp8lm_adamw(RATE, B1, B2, weight_decay=DECAY, impl=impl, master_rounding="nearest")
        p, g = weights(self.shape, jnp.bfloat16), self.gradients(jnp.bfloat16)
        grads = [fp8jax.quantize(x, "e4m3") for x in g] if gradients == "fp8 gradients" else g
        traffic = LM_TRAFFIC[gradients] + (REREAD_BYTES if impl == "xla" else 0)
        run = lambda params, state, grads: tx.step(grads, state, params)  # noqa: E731
        return self.compiled(XLA if impl == "xla" else FUSED, run, traffic, p, tx.init(p), grads)

    def bytes_only(self, dtype: Any) -> list[OptimizerArm]:
        """Returns `LAUNCHES` of the kernel that only moves the step's bytes, with a shared state."""
        scales = (self.shape[0], WIDTH // GROUP)
        kinds = ((self.shape, jnp.float8_e4m3fn), (scales, jnp.float32), (scales, jnp.bfloat16))
        moments = [tuple(tuple(jnp.ones(*kind) for kind in kinds) for _ in range(LEAVES)) for _ in "mn"]
        g, state = self.gradients(jnp.bfloat16), State([tuple(weights(self.shape, dtype)), *moments])
        programs = [timing.traced(functools.partial(move, *x), state.value, g, donate_argnums=0) for x in LAUNCHES]
        return [
            OptimizerArm(f"{BYTES}, {launch}", state.as_call(program, g), step_traffic(dtype))
            for launch, program in zip(LAUNCHES, programs, strict=True)
        ]

    def torch(self, case: str, baseline: str) -> None:
        """Adds rows of PyTorch's optimizers to a case, relative to one of its implementations."""
        timing.keep_triton_cache()
        for name, (module, class_name, options, traffic) in TORCH.items():
            try:
                torch = importlib.import_module("torch")
                p = [torch.nn.Parameter(torch.randn(self.shape, device="cuda") * 0.02) for _ in range(LEAVES)]
                make = getattr(importlib.import_module(module), class_name)
                adamw = make(p, lr=RATE, betas=(B1, B2), weight_decay=DECAY, **options)
                self.record(case, name, _torch_seconds(torch, p, adamw), traffic, baseline)
            except (ImportError, RuntimeError) as error:
                print(f"{name}: not measured ({type(error).__name__}: {error})", flush=True)
                continue
            del p, adamw
            gc.collect()
            torch.cuda.empty_cache()


def _torch_seconds(torch: Any, parameters: list, adamw: Any) -> float:
    """Returns the median time of a step of a PyTorch optimizer, after untimed steps for compilation."""
    for x in parameters:
        x.grad = torch.randn_like(x) * 0.01
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            adamw.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 3)
    return statistics.median(times[1:])


def main(argv: list[str]) -> None:
    parser = driver.parser("optimizer", __doc__, rounds=ROUNDS)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of each of the 8 parameters with 4096 columns")
    options = parser.parse_args(argv)
    timing.need_gpu()
    bench = Bench(2 if timing.dry() else options.rows, options.rounds)
    forms = ("step", "update", "update + apply")
    # No variable refers to the arms, so that their memory is freed after their case.
    arms = [bench.optax(jnp.float32), *(bench.ours(jnp.float32, form) for form in forms)]
    arms += [bench.ours(jnp.float32, "step", nu_rounding="nearest")]
    bench.measure(FP32, arms, bench.bytes_only(jnp.float32))
    del arms
    for form in forms:
        bench.add_ratio(FP32, f"compressed_adamw {form}", (FP32, "optax.adamw float32"))
    ours = functools.partial(bench.ours, jnp.bfloat16, "step")
    arms = [bench.optax(jnp.bfloat16), ours(stochastic=True), ours(stochastic=True, nu_rounding="nearest")]
    bench.measure(BF16, arms, bench.bytes_only(jnp.bfloat16))
    del arms
    for baseline in ((BF16, "optax.adamw bfloat16"), (FP32, "optax.adamw float32")):
        bench.add_ratio(BF16, "compressed_adamw step", baseline)
    for case in (FP32, BF16):
        bench.add_ratio(case, "compressed_adamw step", (case, f"compressed_adamw step{NU_NEAREST}"))
    for kind in LM_TRAFFIC:
        case = f"FP8-LM, {kind}"
        bench.measure(case, [bench.optax(jnp.bfloat16), *(bench.fp8_lm(kind, impl) for impl in ("triton", "xla"))])
        for baseline in ((FP32, "optax.adamw float32"), (case, XLA)):
            bench.add_ratio(case, FUSED, baseline)
    if not timing.dry():
        bench.torch(FP32, "optax.adamw float32")
    installed = [name for name in ("torch", "torchao", "bitsandbytes") if name in sys.modules]
    versions: dict[str, str] = {name: str(getattr(sys.modules[name], "__version__", "unknown")) for name in installed}
    notes = driver.notes_of(__doc__)
    file = driver.ResultsFile(options, "AdamW step, half a billion parameters", notes, versions=versions)
    file.add(bench.rows)
    file.end()
