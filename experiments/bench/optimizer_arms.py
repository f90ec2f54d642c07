"""Sizes, arms of JAX and rows that the benchmarks of an optimizer's step share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import triton
import triton.language as tl

import fp8jax
from experiments.bench import timing
from pallas_kernels.dispatch import call_triton

LEAVES, ROWS, WIDTH, GROUP = 8, 16384, 4096, 128
RATE, B1, B2, DECAY = 1e-3, 0.9, 0.999, 0.1
NU_NEAREST = ", second moment to nearest"
BYTES, LAUNCHES = "bytes only", ((2048, 4), (4096, 4), (4096, 8))
ROUNDS, CALLS, SUSTAINED_ROUNDS, SUSTAINED_CALLS = 9, 10, 3, 60
BURST, SUSTAINED = "speed", "speed, sustained"
NOTES = [
    f"The implementations of a case run in turns, in another order in each of {ROUNDS} rounds: {CALLS} steps untimed, "
    f"then {CALLS} timed; medians. Bytes only is the fastest of three launches. What a ratio compares with in another "
    "case was timed apart.",
    f'"speed, sustained": the same in {SUSTAINED_ROUNDS} rounds of {SUSTAINED_CALLS} steps untimed and as many timed.',
    "The second moment is rounded stochastically, as b2 asks for, except in arms that say to nearest.",
    "PyTorch's optimizers run one after another, after all others.",
    "FP8-LM: working copies in bf16; bytes only is 13 bytes a parameter, reads no copies, and FP8 gradients once.",
]
Row = dict[str, Any]


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
    """Reads and writes what the step does, with next to no arithmetic: the speed that memory allows."""
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
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[1:]]
        out = call_triton.call(
            *arrays,
            kernel=_move,
            out_shapes=outputs,
            num_programs=g.size // size,
            num_warps=warps,
            compute_capability=None,
            aliases={i + 1: i for i in range(7)},
            SIZE=size,
            GROUPS=size // GROUP,
        )
        return out[0], tuple(out[1:4]), tuple(out[4:7])

    return list(zip(*[leaf(g, *row) for g, *row in zip(grads, *state, strict=True)], strict=True))


class State:
    """The state that steps take, donate and return."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def through(self, step: Callable, *args: Any) -> Callable[[], Any]:
        """A call of one step."""

        def call() -> Any:
            self.value = step(self.value, *args)
            return self.value

        return call


@dataclasses.dataclass(frozen=True)
class OptimizerArm:
    """One step of an implementation, the bytes it moves for each parameter, and bytes of temporaries and of state."""

    name: str
    call: Callable[[], Any]
    traffic: float
    memory: tuple[int, int] | None = None


def in_turns(calls: dict[str, Callable], rounds: int, repeats: int) -> dict[str, timing.Seconds]:
    return timing.in_turns(calls, rounds, dict.fromkeys(calls, repeats))


def weights(shape: tuple[int, int], dtype: Any) -> list[jax.Array]:
    make = jax.jit(lambda i: (jax.random.normal(jax.random.key(i), shape) * 0.02).astype(dtype))
    return [make(i) for i in range(LEAVES)]


class Bench:
    """Collects rows; `params` is the number of parameters of a step."""

    def __init__(self, rows: int) -> None:
        self.shape = (rows, WIDTH)
        self.params = LEAVES * rows * WIDTH
        self.rows: list[Row] = []
        self.speeds: dict[tuple[str, str, str], float] = {}

    def record(
        self, case: str, impl: str, time_: float, traffic: float, against: str | None, metric: str = BURST
    ) -> None:
        """Adds the speed of an implementation, relative to that of `against` in the same case."""
        speed = self.params / time_ / 1e9
        self.speeds[case, impl, metric] = speed
        ratio = speed / self.speeds[case, against, metric] if against else None
        spread = time_.quartiles((self.params / 1e9).__truediv__) if isinstance(time_, timing.Seconds) else None
        self.add(case, impl, metric, speed, "Gparam/s", against, ratio, spread)
        if metric == BURST:
            self.add(case, impl, "bandwidth", traffic * speed / 1e3, "TB/s", None, None)

    def add(self, case: str, impl: str, metric: str, value: float, unit: str, against: str | None,
            ratio: float | None, quartiles: list[float] | None = None) -> None:  # fmt: skip
        self.rows.append(timing.row(case, impl, metric, value, unit, against, ratio, quartiles))

    def add_ratio(self, case: str, impl: str, against: tuple[str, str]) -> None:
        """Adds the speeds of an implementation once more, relative to those of another (case, implementation)."""
        for metric in (BURST, SUSTAINED):
            speed = self.speeds[case, impl, metric]
            self.add(case, impl, metric, speed, "Gparam/s", against[1], speed / self.speeds[*against, metric])

    def gradients(self, dtype: Any) -> list[jax.Array]:
        return [0.5 * g for g in weights(self.shape, dtype)]

    def measure(self, case: str, arms: list[OptimizerArm], moves: dict[str, Callable], traffic: float) -> None:
        """Times all arms of a case and what moves bytes alone in turns, in bursts and in longer runs."""
        calls = {arm.name: arm.call for arm in arms}
        times = in_turns(moves | calls, ROUNDS, CALLS)
        best = min(moves, key=times.__getitem__)
        sustained = in_turns({BYTES: moves[best]} | calls, SUSTAINED_ROUNDS, SUSTAINED_CALLS)
        for metric, found in ((BURST, times | {BYTES: times[best]}), (SUSTAINED, sustained)):
            self.record(case, BYTES, found[BYTES], traffic, None, metric)
            for arm in arms:
                self.record(case, arm.name, found[arm.name], arm.traffic, BYTES, metric)
        for arm in arms:
            if arm.memory is not None:
                temporaries, state = arm.memory
                self.add(case, arm.name, "temporaries", temporaries / 2**20, "MiB", "state", temporaries / state)

    def optax(self, dtype: Any) -> OptimizerArm:
        """`optax.adamw` with everything in one dtype, one jit, donated."""
        tx = optax.adamw(RATE, B1, B2, weight_decay=DECAY)
        p, g = weights(self.shape, dtype), self.gradients(dtype)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(carry: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), state

        call = State((p, tx.init(p))).through(step, g)
        return OptimizerArm(f"optax.adamw {jnp.dtype(dtype).name}", call, 7 * jnp.dtype(dtype).itemsize)

    def ours(self, dtype: Any, form: str, stochastic: bool = False, nu_rounding: str = "auto") -> OptimizerArm:
        """`compressed_adamw` in one jit, with the temporaries of the compiled program.

        Forms: "step", the new weights; "update", the changes alone; "update + apply", both as optax users write it.
        The second moment is rounded stochastically unless `nu_rounding` says otherwise.
        """
        tx = fp8jax.compressed_adamw(RATE, B1, B2, weight_decay=DECAY, impl="triton", nu_rounding=nu_rounding)
        p, g, key = weights(self.shape, dtype), self.gradients(jnp.bfloat16), jax.random.key(0)

        def run(params: Any, state: Any, grads: Any, key: jax.Array) -> Any:
            if form == "step":
                return tx.step(grads, state, params, **({"key": key} if stochastic else {}))
            updates, state = tx.update(grads, state, params)
            return (updates if form == "update" else optax.apply_updates(params, updates)), state

        state = tx.init(p)
        donated = (1,) if form == "update" else (0, 1)
        compiled = timing.traced(run, p, state, g, key, donate_argnums=donated)

        def step(carry: Any, grads: Any, key: jax.Array) -> Any:
            result, state = compiled(*carry, grads, key)
            return (carry[0] if form == "update" else result), state

        state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        size = jnp.dtype(dtype).itemsize
        traffic = 2 * size + 2 + 4 + 24 / GROUP + (3 * size if form == "update + apply" else 0)
        name = f"compressed_adamw {form}" + (", to nearest" if dtype == jnp.bfloat16 and not stochastic else "")
        name += NU_NEAREST if nu_rounding == "nearest" else ""
        memory = compiled.memory_analysis()
        assert memory is not None
        return OptimizerArm(
            name, State((p, state)).through(step, g, key), traffic, (memory.temp_size_in_bytes, state_bytes)
        )

    def bytes_only(self, dtype: Any) -> dict[str, Callable]:
        """`LAUNCHES` of the kernel that only moves the step's bytes; they share their state."""
        scales = (self.shape[0], WIDTH // GROUP)
        moment = (jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16)
        shapes = (self.shape, scales, scales)
        arrays: Any = [tuple(weights(self.shape, dtype))]
        arrays += [
            tuple(tuple(jnp.ones(s, d) for s, d in zip(shapes, moment, strict=True)) for _ in range(LEAVES))
            for _ in "mn"
        ]
        g, state = self.gradients(jnp.bfloat16), State(arrays)
        launches = {
            str(x): timing.traced(functools.partial(move, *x), state.value, g, donate_argnums=0) for x in LAUNCHES
        }
        return {name: state.through(run, g) for name, run in launches.items()}
