"""What the scales of weights cost: just in time, delayed and automatic (MOSS, Tables 1 and 10).

"scale" is the time of finding the scale of one weight; "codes" that of the scale and of the codes in both layouts, from
fp32 masters, in a step of training. Delayed scaling observes the weight for its history. "update" is the pass of the
optimizer that adds updates to all weights of eight layers, alone and with `track_weight_amax`: with a limit, measuring
the updates, and in the one step of 500 that measures the weights. Predicted before the first run: a scale just in time
at 0.9 of the memory's bandwidth, so 0.17 ms for 11008 x 16384, automatic ones under 0.02 ms; codes with an automatic
scale 0.75 of the time just in time; the update 1.00 with a limit, 1.0 to 1.3 measured, 1.3 where weights are.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import fp8jax
from experiments.bench import cases, timing
from fp8jax.core import formats
from fp8jax.core.scaling import Automatic, Current, Delayed, to_scale
from fp8jax.ops.quantization.quantize import quantize
from fp8jax.optim.weight_bounds import WeightBounds

JIT, DELAYED, AUTOMATIC = "just in time", "delayed", "automatic"
LAYERS, RATE = 32, 3e-4
LIMIT = fp8jax.max_adam_step(RATE, 0.9, 0.95, 0.1)
ALONE = "updates added"
TRACKERS = {
    "with a limit": (fp8jax.track_weight_amax(limit=LIMIT), 1),
    "updates measured": (fp8jax.track_weight_amax(), 1),
    "weights measured (one step of 500)": (fp8jax.track_weight_amax(limit=LIMIT), 500),
}


def grow(bound: Array, count: Array) -> Array:
    """The bound after a step, as `track_weight_amax` finds it for a limit."""
    return Automatic().grow_bound(bound, LIMIT(count, bound), jnp.float32)


def scales() -> dict[str, Any]:
    """Functions of (weight, history, bound, count): the scale, and the state after the step."""
    current, delayed, automatic = Current(), Delayed(), Automatic()
    return {
        JIT: lambda w, history, bound, count: current.scale((), w, formats.E4M3),
        # The largest magnitude of the step is found where codes are made.
        DELAYED: lambda w, history, bound, count: (
            to_scale(delayed.expected_amax(history), formats.E4M3),
            delayed.update(history, bound),
        ),
        AUTOMATIC: lambda w, history, bound, count: (
            automatic.scale(bound, w, formats.E4M3),
            grow(bound, count),
        ),
    }


def codes() -> dict[str, Any]:
    """The same with the codes of the weight and of its transposed copy."""
    delayed, automatic, current = Delayed(), Automatic(), Current()

    def make(w: Array, scale: Array | None, *state: Array) -> Any:
        return quantize(w, "e4m3", "same", scale=scale, strategy=current), state

    def delay(w: Array, history: Array, bound: Array, count: Array) -> Any:
        scale = delayed.scale(history, w, formats.E4M3)
        return make(w, scale, delayed.update(history, delayed.collect_stats(history, w)))

    return {
        JIT: lambda w, history, bound, count: make(w, None),
        DELAYED: delay,
        AUTOMATIC: lambda w, history, bound, count: make(
            w, automatic.scale(bound, w, formats.E4M3), grow(bound, count)
        ),
    }


def of_layers(function: Any, *stacked: Any) -> Any:
    """One arm of `codes` for all layers, one after the other; each argument a list of stacked arrays of 7 weights."""
    *arrays, count = stacked
    return jax.lax.map(lambda layer: [function(*of_one, count) for of_one in zip(*layer, strict=True)], tuple(arrays))


def updates() -> dict[str, Any]:
    """Functions of (parameters, updates, bounds, count): the parameters after a step, and the tracker's state."""

    def run(tx: Any, params: Any, moved: Any, bounds: Any, count: Array) -> Any:
        moved, state = tx.update(moved, WeightBounds(count, bounds), params)
        return optax.apply_updates(params, moved), state

    functions: dict[str, Any] = {ALONE: lambda params, moved, bounds, count: optax.apply_updates(params, moved)}
    for name, (tx, _) in TRACKERS.items():
        functions[name] = functools.partial(run, tx)
    return functions


def weights(layers: int, scale: float = 0.02) -> list[Array]:
    """The seven weights of Llama-7B's layers, stacked, fp32."""
    shapes = [*[cases.LINEARS_7B[0]] * 4, cases.LINEARS_7B[1], cases.LINEARS_7B[1], cases.LINEARS_7B[2]]
    shapes = [(128, 256)] * 7 if timing.dry() else shapes
    make = jax.jit(lambda key, shape: scale * jax.random.normal(key, shape), static_argnums=1)
    return [make(jax.random.key(i), (layers, *shape)) for i, shape in enumerate(shapes)]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scaling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.01, help="seconds of one round of one implementation")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    timing.need_gpu()
    notes = [" ".join((__doc__ or "").split("\n\n")[1].split())]
    rows: list[timing.Row] = []

    def measure(case: str, metric: str, arms: dict[str, Any], sets: list[Any], base: str) -> None:
        times = timing.seconds(timing.compiled(arms, sets), options.rounds, options.burst)
        rows.extend(shares(case, metric, times, len(sets), base))

    history, bound, count = jnp.full(1024, 0.1), jnp.float32(0.1), jnp.int32(7)
    for shape in [(128, 256)] if timing.dry() else cases.SCALED:
        many = 1 if timing.dry() else timing.copies(shape[0] * shape[1] * 4)
        sets = [(0.02 * jax.random.normal(jax.random.key(i), shape), history, bound, count) for i in range(many)]
        case = "x".join(map(str, shape))
        measure(case, "scale", scales(), sets, JIT)
        measure(case, "codes", codes(), sets, JIT)
        del sets
    layers, some = (2, 2) if timing.dry() else (LAYERS, 8)
    every = weights(layers)
    state = [jnp.full((layers, 1024), 0.1)] * 7, [jnp.full(layers, 0.1)] * 7
    arms = {name: functools.partial(of_layers, f) for name, f in codes().items()}
    measure("all weights of Llama-7B", "codes", arms, [(every, *state, count)], JIT)
    del every
    params, moved, bounds = weights(some), weights(some, RATE), [jnp.full(some, 0.1)] * 7
    counts = {ALONE: 1} | {name: at for name, (_, at) in TRACKERS.items()}
    each: dict[str, Any] = {
        name: lambda p, m, b, count, f=f, at=counts[name]: f(p, m, b, count + at) for name, f in updates().items()
    }
    measure("weights of 8 layers of Llama-7B", "update", each, [(params, moved, bounds, jnp.int32(0))], ALONE)
    timing.write("scaling", "Scales of weights", rows, notes, {}, options.out)


def shares(case: str, metric: str, times: dict[str, timing.Seconds], calls: int, base: str) -> list[timing.Row]:
    """Milliseconds of each call, and as a share of the baseline's: less is better."""

    def each(t: float) -> float:
        return 1e3 * t / calls

    return [
        timing.row(case, name, metric, each(time), "ms", base, time / times[base], time.quartiles(each))
        for name, time in times.items()
    ]
