"""Measures the rates of a GPU for `fp8jax.recipes.for_shapes`, and writes them to fp8jax's table.

Matmuls of 16,384 x 4,096 x 4,096 in bf16 and with per-tensor e4m3 codes, as in layers; a copy of 134 MB; and a chain of
256 dependent kernels of 16 numbers.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import fp8jax
from experiments.bench import timing
from fp8jax.ops.matmul.matmul import matmul
from fp8jax.rewrite import cost_model

CHAIN = 256


def arms(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Returns functions of (x, w, codes of x, codes of w, a few numbers)."""

    def product(fast: bool) -> Any:
        spec, unit_scale = fp8jax.QuantSpec(), jnp.ones((1, 1))
        return lambda x, w, a, b, few: matmul(
            *(fp8jax.QTensor(codes, unit_scale, None, None, spec) for codes in (a, b)), dtype=jnp.bfloat16, fast=fast
        )

    def chain(x: Any, w: Any, a: Any, b: Any, few: Any) -> Any:
        for _ in range(CHAIN):
            few = lax.optimization_barrier(few + 1)
        return few

    return {
        "sixteen": lambda x, w, a, b, few: lax.dot_general(x, w, (((1,), (1,)), ((), ()))),
        "fast": product(True),
        "promoted": product(False),
        "memory": lambda x, w, a, b, few: jnp.copy(x),
        "launch": chain,
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench rates", description=__doc__)
    parser.add_argument(
        "--device", help='part of the GPU\'s name that is its key in the table (default: such as "H100")'
    )
    parser.add_argument("--table", type=Path, default=cost_model.RATES_PATH)
    options = parser.parse_args(argv)
    timing.need_gpu()
    shape = (128, 64, 64) if timing.dry() else (16384, 4096, 4096)
    m, n, k = shape
    draw = lambda i, *s: jax.random.normal(jax.random.key(i), s, jnp.bfloat16)  # noqa: E731
    x, w = draw(0, m, k), draw(1, n, k)
    sets = [(x, w, x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn), jnp.zeros(16))]
    times = timing.seconds(timing.compiled(arms(shape), sets), 7, 0.02)
    work = dict.fromkeys(("sixteen", "fast", "promoted"), 2.0 * m * n * k) | {"memory": 4.0 * m * k}
    kind = jax.devices()[0].device_kind
    names = [part for part in kind.replace("-", " ").split() if any(c.isdigit() for c in part)]
    entry: dict[str, Any] = {"device": options.device or (names or [kind])[0]}
    entry |= {name: size / float(times[name]) for name, size in work.items()}
    entry |= {"launch": float(times["launch"]) / CHAIN, "kind": kind, "jax": jax.__version__}
    entry |= {"command": "python -m experiments.bench rates", "date": datetime.date.today().isoformat()}
    entries = json.loads(options.table.read_text()) if options.table.exists() else []
    other_entries = [other for other in entries if other["device"] != entry["device"]]
    print(json.dumps(entry, indent=1))
    if not timing.dry():
        options.table.write_text(json.dumps([*other_entries, entry], indent=1) + "\n")
