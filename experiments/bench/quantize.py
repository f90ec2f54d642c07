"""Bandwidth of quantization with and without a transposed copy, relative to a copy: XLA and the kernel.

Bandwidth counts the bytes that must move: codes and scales once, and the matrix once. The matrix counts twice if its
scale needs a separate pass (per tile, or for whole rows). Predicted before the first run, relative to a copy: the
kernel 0.85 with a given scale, 0.8 in groups, 0.6 with stochastic rounding, 0.9 for amax; XLA 0.8 without a transposed
copy, 0.2 with it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import fp8jax
from experiments.bench import driver, timing
from fp8jax.ops.quantization import quantize as op
from fp8jax.ops.quantization.microscaling import fold_rows

COPY = "device copy"
# (rows, columns) of quantized matrices: activations and weights of Llama-7B.
SHAPES = [(16384, 4096), (16384, 11008), (4096, 11008)]


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A quantization of a matrix. With `has_given_scale`, the scale is an input."""

    rows: str | None
    columns: str | None
    has_given_scale: bool = False

    def __str__(self) -> str:
        text = " + ".join([self.rows or "", *([f"{self.columns} of x.T"] if self.columns else [])]).strip(" +")
        return text + (", given scale" if self.has_given_scale else "")

    @property
    def reads(self) -> int:
        """Number of passes over the matrix."""
        specs = [s for s in (self.rows, self.columns) if s and s != "same"]
        is_single_pass_kernel = self.columns is None and "token" in f"{self.rows}"  # this kernel reads each row once
        return (
            1
            if self.has_given_scale or is_single_pass_kernel or all("group" in s or "block" in s for s in specs)
            else 2
        )


QUANTIZATIONS = [
    Quantization("e4m3", None, True),
    Quantization("e4m3", None),
    Quantization(None, "e4m3"),
    Quantization("e5m2", "same", True),
    Quantization("e5m2", "same"),
    Quantization("e5m2+stochastic", "same", True),
    Quantization("e4m3:token", None),
    Quantization("e4m3:token", "e4m3:token"),
    Quantization("e4m3:group128", None),
    Quantization("e4m3:group128", "e4m3:group128"),
    Quantization("e4m3:block128", "same"),
    Quantization("e4m3:mx32", "e4m3:mx32"),
    Quantization("int8:token", None),
    Quantization("int8:block128", "same"),
    Quantization("int8:block32+stochastic", "same"),
]
# Folded microscaling, and passes over the matrix.
FOLDS = {"e4m3:mx32+token": 1, "e4m3:mx32": 2}


def arms() -> dict[str, tuple[Any, Any]]:
    """Returns functions of (matrix, codes), and the bytes that they move."""

    def run(quantization: Quantization, impl: str, x: Any, _: Any) -> Any:
        scale = jnp.float32(0.01) if quantization.has_given_scale else None
        key = jax.random.key(0) if "stochastic" in f"{quantization.rows}" else None
        return op.quantize(x, quantization.rows, quantization.columns, scale=scale, key=key, impl=impl)

    def size(tree: Any) -> int:
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))

    def moved(quantization: Quantization, x: Any, out: Any) -> int:
        return quantization.reads * size(x) + size(out)

    programs: dict[str, tuple[Any, Any]] = {COPY: (lambda x, _: jnp.copy(x), lambda x, out: size(x) + size(out))}
    for case in QUANTIZATIONS:
        for impl in ("xla", "triton"):
            programs[f"{case} ({impl})"] = functools.partial(run, case, impl), functools.partial(moved, case)
    for spec, reads in FOLDS.items():
        for impl in ("xla", "triton"):
            programs[f"fold {spec} ({impl})"] = (
                lambda x, _, spec=spec, impl=impl: fold_rows(x, fp8jax.QuantSpec.parse(spec), impl=impl),
                lambda x, out, reads=reads: reads * size(x) + size(out),
            )
    for impl in ("xla", "triton"):
        programs[f"transposed codes ({impl})"] = functools.partial(_transposed, impl), lambda x, out: 2 * size(out)
    return programs


def _transposed(impl: str, _: Any, codes: Any) -> Any:
    return op.transpose(fp8jax.QTensor(codes, jnp.ones((1, 1)), None, None, fp8jax.QuantSpec()), impl=impl).codes


def main(argv: list[str]) -> None:
    options = driver.parser("quantize", __doc__, rounds=7, burst=0.01).parse_args(argv)
    timing.need_gpu()
    file = driver.ResultsFile(options, "Quantization and transposed copies", driver.notes_of(__doc__))
    for shape in [(128, 256)] if timing.dry() else SHAPES:
        count = timing.copies(shape[0] * shape[1] * 2) if not timing.dry() else 1
        draw = lambda i, shape=shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)  # noqa: E731
        sets = [(draw(i), draw(i).astype(jnp.float8_e4m3fn)) for i in range(count)]
        programs = arms()
        ready = timing.compiled({name: function for name, (function, _) in programs.items()}, sets)
        times = timing.seconds(ready, options.rounds, options.burst)
        moved = {name: count * programs[name][1](sets[0][0], call()[0]) for name, call in ready.items()}
        file.add(bandwidths("x".join(map(str, shape)) + " bf16", times, moved))
    file.end("bandwidth")


def bandwidths(case: str, times: dict[str, timing.Seconds], moved: dict[str, float]) -> list[timing.Row]:
    """Returns bandwidths in TB/s, and relative to a copy."""
    copied = moved[COPY] / times[COPY]
    return [
        driver.rate_row(case, name, "bandwidth", time, 1e-12 * moved[name], "TB/s", COPY, moved[name] / time / copied)
        for name, time in times.items()
    ]
