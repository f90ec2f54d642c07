"""Bandwidth of quantization, with and without the transposed copy, as a ratio to a copy: XLA and the kernel.

Bytes are those that must move: the matrix once, twice where a scale is found first because it spans more than a program
holds (a tile, or whole rows), codes and scales once. Predicted before the first run: the kernel 0.85 of a copy with a
given scale, 0.8 in groups, 0.6 with stochastic rounding, 0.9 for maxima; XLA 0.8 without a transposed copy and 0.2 with
it.
"""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fp8jax
from experiments.bench import cases, timing
from fp8jax.ops import quantize as op
from fp8jax.ops.microscaled import fold_rows
from pallas_kernels import quantize_triton as kernel
from pallas_kernels.maxima_triton import maxima

COPY = "device copy"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What is made of a matrix; `given` scales are not measured."""

    rows: str | None
    columns: str | None
    given: bool = False

    def __str__(self) -> str:
        text = " + ".join([self.rows or "", *([f"{self.columns} of x.T"] if self.columns else [])]).strip(" +")
        return text + (", given scale" if self.given else "")

    @property
    def reads(self) -> int:
        """Passes over the matrix."""
        specs = [s for s in (self.rows, self.columns) if s and s != "same"]
        near = self.columns is None and "token" in f"{self.rows}"  # The kernel for rows holds whole ones.
        return 1 if self.given or near or all("group" in s or "block" in s for s in specs) else 2


KINDS = [
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
LAUNCHES = [
    kernel.QuantizeLaunch(high, wide, warps)
    for high, wide, warps in (
        (128, 128, 8),
        (128, 128, 4),
        (128, 128, 16),
        (128, 256, 8),
        (256, 128, 8),
        (256, 128, 16),
    )
]


def arms(sweep: bool) -> dict[str, tuple[Any, Any]]:
    """Functions of (matrix, codes), and the bytes they move."""

    def run(kind: Quantization, impl: str, x: Any, _: Any) -> Any:
        scale = jnp.float32(0.01) if kind.given else None
        key = jax.random.key(0) if "stochastic" in f"{kind.rows}" else None
        return op.quantize(x, kind.rows, kind.columns, scale=scale, key=key, impl=impl)

    def size(tree: Any) -> int:
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))

    def moved(kind: Quantization, x: Any, out: Any) -> int:
        return kind.reads * size(x) + size(out)

    programs: dict[str, tuple[Any, Any]] = {COPY: (lambda x, _: jnp.copy(x), lambda x, out: size(x) + size(out))}
    if sweep:
        one = {"row_scale": jnp.float32(0.01)}
        codings = {
            "tensor": (kernel.Coding("tensor", jnp.float8_e5m2), "same", one),
            "rows": (kernel.Coding("tensor"), None, one),
            "group": (kernel.Coding("group", size=128), kernel.Coding("group", size=128), {}),
            "mx": (kernel.Coding("mx", size=32), kernel.Coding("mx", size=32), one | {"column_scale": jnp.float32(1)}),
            "block": (kernel.Coding("block", size=128), "same", {}),
        }
        for launch in LAUNCHES:
            for name, (rows, columns, scales) in codings.items():
                function = functools.partial(_raw, rows, columns, scales, launch)
                programs[f"{name} {launch}"] = function, functools.partial(moved, Quantization("group", None))
            programs[f"transpose {launch}"] = (
                lambda _, c, launch=launch: kernel.transpose(c, launch=launch),
                lambda x, out: 2 * size(out),
            )
        for high, wide, warps in ((64, 256, 8), (32, 256, 4), (32, 512, 8), (16, 1024, 8), (64, 128, 4)):
            launch = kernel.QuantizeLaunch(high, wide, warps)
            programs[f"maxima {launch}"] = (
                lambda x, _, launch=launch: maxima(x, tensor=True, launch=launch)[0],
                lambda x, out: size(x),
            )
        return programs
    for kind in KINDS:
        for impl in ("xla", "triton"):
            programs[f"{kind} ({impl})"] = functools.partial(run, kind, impl), functools.partial(moved, kind)
    for spec, reads in FOLDS.items():
        for impl in ("xla", "triton"):
            programs[f"fold {spec} ({impl})"] = (
                lambda x, _, spec=spec, impl=impl: fold_rows(x, fp8jax.QuantSpec.parse(spec), impl=impl),
                lambda x, out, reads=reads: reads * size(x) + size(out),
            )
    for impl in ("xla", "triton"):
        programs[f"transposed codes ({impl})"] = functools.partial(_turned, impl), lambda x, out: 2 * size(out)
    return programs


def _raw(rows: Any, columns: Any, scales: dict[str, Any], launch: Any, x: Any, _: Any) -> Any:
    return kernel.quantize(x, rows, columns, **scales, launch=launch)


def _turned(impl: str, _: Any, codes: Any) -> Any:
    return op.transpose(fp8jax.QTensor(codes, jnp.ones((1, 1)), None, None, fp8jax.QuantSpec()), impl=impl).codes


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="quantize", description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="every launch of the kernel; prints, writes nothing")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--burst", type=float, default=0.01, help="seconds of one round of one implementation")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    timing.need_gpu()
    import jax_triton
    import triton

    versions = {"triton": triton.__version__, "jax-triton": jax_triton.__version__}
    notes = [" ".join((__doc__ or "").split("\n\n")[1].split())]
    title = "Quantization and transposed copies"
    save = functools.partial(timing.write, "quantize", title, notes=notes, versions=versions, out=options.out)
    rows: list[timing.Row] = []
    for shape in cases.MATRICES[:1] if options.sweep else cases.MATRICES:
        count = timing.copies(shape[0] * shape[1] * 2)
        sets = [
            (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16),
             jax.random.normal(jax.random.key(i), shape, jnp.bfloat16).astype(jnp.float8_e4m3fn))
            for i in range(count)
        ]  # fmt: skip
        wanted = arms(options.sweep)
        ready = timing.compiled({name: function for name, (function, _) in wanted.items()}, sets)
        times = timing.seconds(ready, options.rounds, options.burst)
        moved = {name: count * of(sets[0][0], jax.eval_shape(f, *sets[0])) for name, (f, of) in wanted.items()}
        speed = {name: moved[name] / time / 1e12 for name, time in times.items()}
        case = "x".join(map(str, shape)) + " bf16"
        for name, value in speed.items():
            spread = times[name].quartiles((moved[name] / 1e12).__truediv__)
            rows.append(timing.row(case, name, "bandwidth", value, "TB/s", COPY, value / speed[COPY], spread))
        if not options.sweep:
            save(rows)
    if not options.sweep:
        save(rows + timing.means(rows, "bandwidth"))
