"""Grouped products of mixture-of-experts layers on one GPU: FP8 and bf16 kernels against JAX's, cuBLASLt and XLA.

    python -m experiments.bench grouped
    python -m experiments.bench grouped --shapes marin --only 'w13'
    python -m experiments.bench grouped --dry                             # on a CPU: traced, not measured

Each layer has 16,384 tokens. Every token goes to `top_k` experts, whose loads differ. One expert has no tokens. "w13"
is the gate and up projection, "w2" the down projection. A case is one product: forward, dx or dw. The case "w13
quantized" is all three products, with the passes that quantize, permute and transpose activations and gradients under
given scales. Weights are quantized before. Its baseline is the same in bf16 by JAX's Pallas kernels.

All programs are compiled first, the most wanted ones earlier. Then the arms of each case are timed in turns. An arm
that fails, or is not compiled in time, is reported and does not stop the others. Errors are relative (Frobenius), to
float32 products of the same operands, on samples of the largest, the smallest and the last group.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Shape

from experiments.bench import timing
from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.ops.quantization.grouped import quantize_groups
from pallas_kernels.matmul.grouped_block_mosaic import grouped_block_matmul, grouped_block_matmul_dw
from pallas_kernels.matmul.grouped_mosaic import grouped_matmul, grouped_matmul_dw

E4M3, E5M2, I8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
JAX, DENSE, OURS, COPY = "JAX Pallas bf16", "cuBLASLt FP8, dense", "ours FP8", "copy of (rows, D) bf16"
SECONDS_TO_MEASURE = 75  # of the limit, after compilation
TOKENS = 16384
SAMPLE = 128  # rows of a gradient that are checked


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a mixture-of-experts layer."""

    width: int
    inner: int
    experts: int
    top_k: int
    tokens: int = TOKENS

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    def group_sizes(self) -> np.ndarray:
        """Rows of each expert, as a router sends them that is not quite balanced."""
        rng = np.random.default_rng(0)
        load = rng.lognormal(0, 0.35, self.experts)
        sizes = rng.multinomial(self.rows, load / load.sum())
        sizes[2] += sizes[1]
        sizes[1] = 0
        return sizes.astype(np.int32)


LAYERS = {
    "marin": Layer(2560, 1280, 64, 8),
    "mixtral": Layer(4096, 14336, 8, 2),
    "qwen3": Layer(2048, 768, 128, 8),
}
DRY_LAYERS = {"small": Layer(256, 128, 4, 2, 64)}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One implementation: a function of some operands of its case. Arms of lower `priority` are compiled earlier."""

    name: str
    priority: int
    function: Callable[..., Any]
    takes: tuple[str, ...]
    baseline: str | None = JAX


@dataclasses.dataclass(frozen=True)
class Case:
    """Implementations of one computation.

    Attributes:
        operations: number of floating-point operations, or 0.
        operands: shape of each operand.
        make: returns arrays of these names.
        error: function of an arm's name, its result and the operands; None without a reference.
    """

    name: str
    operations: int
    operands: dict[str, Any]
    arms: list[Arm]
    make: Callable[[], dict[str, Any]]
    error: Callable[[str, Any, dict[str, Any]], float] | None = None

    def key(self, arm: Arm) -> tuple[Any, ...]:
        """A key that is equal for equal programs."""
        shapes = [self.operands[name] for name in arm.takes]
        return arm.name, str(shapes), self.name.rpartition(" ")[2] if self.error is None else ""


def jax_rows(a: Any, b: Any, sizes: Any) -> Any:
    """JAX's grouped product in bf16: (T, K) by (G, N, K)."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    block_n, steps = (192, 4) if b.shape[1] % 192 == 0 else (128, 6)
    return ragged_dot_mgpu.ragged_dot(
        a, b, group_sizes=sizes, block_m=128, block_n=block_n, block_k=64, max_concurrent_steps=steps, grid_block_n=8,
        transpose_rhs=True,
    )  # fmt: skip


def jax_dw(a: Any, b: Any, sizes: Any) -> Any:
    """JAX's product over the rows of each group in bf16: (T, M) and (T, N) to (G, M, N)."""
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    return transposed_ragged_dot_mgpu.transposed_ragged_dot(
        a, b, group_sizes=sizes, block_m=128, block_n=128, block_k=64, max_concurrent_steps=6, grid_block_n=1
    )


def dense(a: Any, b: Any) -> Any:
    """A dense product of as many operations, (M, K) by (N, K), which XLA gives to cuBLASLt."""
    one = jnp.ones((), BF16)
    contracting = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a.astype(BF16) * one, b.astype(BF16) * one, contracting, preferred_element_type=BF16)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, BF16).astype(dtype)


def uniform(seed: int, shape: tuple[int, ...]) -> Any:
    return jax.random.uniform(jax.random.key(seed), shape, F32, 0.5, 2.0)


@functools.partial(jax.jit, static_argnums=1)
def padded_tokens(sizes: Any, rows: int) -> PaddedTokens:
    return PaddedTokens.from_groups(Groups.from_sizes(sizes, rows), rows)


@jax.jit
def relative_error(out: Any, want: Any) -> Any:
    return jnp.linalg.norm(out.astype(F32) - want) / jnp.maximum(jnp.linalg.norm(want), 1e-30)


def checked_groups(sizes: np.ndarray) -> list[int]:
    """The largest and the smallest group that has rows, and the last one that has."""
    used = np.flatnonzero(sizes)
    return sorted({int(np.argmax(sizes)), int(used[np.argmin(sizes[used])]), int(used[-1])})


@functools.partial(jax.jit, static_argnums=4)
def group_product(a: Any, b: Any, begin: Any, size: Any, largest: int) -> Any:
    """The first rows of the float32 product of a group's rows, of at most `largest`: a (T, M) and b (T, N)."""
    row = jnp.arange(largest)
    index = jnp.minimum(begin + row, a.shape[0] - 1)
    sample = jnp.where((row < size)[:, None], a[index, :SAMPLE].astype(F32), 0)
    return jnp.dot(sample.T, b[index].astype(F32), precision="highest")


def rows_case(name: str, layer: Layer, n: int, k: int, is_forward: bool) -> Case:
    """A product of rows by the matrices of their experts, (rows, K) by (experts, N, K): forward or dx."""
    groups, rows, sizes = layer.experts, layer.rows, layer.group_sizes()
    operands = {
        "a": Shape((rows, k), E4M3 if is_forward else E5M2), "b": Shape((groups, n, k), E4M3),
        "sizes": Shape((groups,), I32), "scale": Shape((groups,), F32), "row": Shape((rows,), F32),
        "column": Shape((groups, n), F32), "a16": Shape((rows, k), BF16), "b16": Shape((groups, n, k), BF16),
        "dense": Shape((n, k), E4M3), "a_group": Shape((rows, -(-k // 128)), F32),
        "b_block": Shape((groups, -(-n // 128), -(-k // 128)), F32), "a8": Shape((rows, k), I8),
        "b8": Shape((groups, n, k), I8),
    }  # fmt: skip
    arms = [
        Arm(OURS, 0, lambda a, b, z, s: grouped_matmul(a, b, z, scale=s), ("a", "b", "sizes", "scale")),
        Arm("ours bf16", 1, grouped_matmul, ("a16", "b16", "sizes")),
        Arm(DENSE, 0, dense, ("a", "dense")),
    ]  # fmt: skip
    if is_forward:
        arms += [
            Arm("ours FP8, scales of rows", 2,
                lambda a, b, z, r, c: grouped_matmul(a, b, z, row_scale=r, column_scale=c),
                ("a", "b", "sizes", "row", "column")),
            Arm("ours FP8, promoted", 3, lambda a, b, z, s: grouped_matmul(a, b, z, scale=s, fast=False),
                ("a", "b", "sizes", "scale")),
            Arm("ours FP8, 1x128 by 128x128", 2, lambda a, b, z, x, y: grouped_block_matmul(a, b, x, y, z),
                ("a", "b", "sizes", "a_group", "b_block")),
            Arm("ours int8", 4, lambda a, b, z, s: grouped_matmul(a, b, z, scale=s), ("a8", "b8", "sizes", "scale")),
        ]  # fmt: skip
    if not timing.dry():
        arms.append(Arm(JAX, 1, jax_rows, ("a16", "b16", "sizes")))

    def make() -> dict[str, Any]:
        x: dict[str, Any] = {"a": normal(1, *_of(operands["a"])), "b": normal(2, *_of(operands["b"]))}
        x |= {"a16": x["a"].astype(BF16), "b16": x["b"].astype(BF16), "dense": normal(3, *_of(operands["dense"]))}
        x |= {key: uniform(4, operands[key].shape) for key in ("scale", "row", "column", "a_group", "b_block")}
        x |= {f"{key}8": jnp.rint(normal(5, operands[key].shape, BF16) * 40).astype(I8) for key in ("a", "b")}
        return x | {"sizes": jnp.asarray(sizes)}

    def error(arm: str, out: Any, x: dict[str, Any]) -> float:
        ends, worst = np.cumsum(sizes), 0.0
        for g in checked_groups(sizes):
            first, last = int(ends[g] - sizes[g]), int(ends[g])
            picked = np.clip(np.r_[first : first + 4, last - 4 : last], first, last - 1)
            key = "8" if "int8" in arm else ""
            a, b = x[f"a{key}"][picked].astype(F32), x[f"b{key}"][g].astype(F32)
            if "1x128" in arm:
                a = a * jnp.repeat(x["a_group"][picked], 128, 1)[:, :k]
                b = b * jnp.repeat(jnp.repeat(x["b_block"][g], 128, 0)[:n], 128, 1)[:, :k]
            want = jnp.dot(a, b.T, precision="highest")
            if "scales of rows" in arm:
                want = want * x["row"][picked][:, None] * x["column"][g]
            elif arm in (OURS, "ours FP8, promoted", "ours int8"):
                want = want * x["scale"][g]
            worst = max(worst, float(relative_error(out[picked], want)))
        return worst

    return Case(name, 2 * rows * n * k, operands, arms, make, error)


def _of(shape: Any) -> tuple[tuple[int, ...], Any]:
    return shape.shape, shape.dtype


def dw_case(name: str, layer: Layer, m: int, n: int) -> Case:
    """The gradients of the experts' matrices, (M, tokens) by (N, tokens) to (experts, M, N)."""
    groups, rows, sizes = layer.experts, layer.rows, layer.group_sizes()
    tokens = jax.eval_shape(lambda z: padded_tokens(z, rows), Shape((groups,), I32)).length
    numbers = Shape((groups,), I32)
    operands = {
        "a": Shape((m, tokens), E4M3), "b": Shape((n, tokens), E5M2), "starts": numbers, "lengths": numbers,
        "scale": Shape((groups,), F32), "a_pad": Shape((tokens, m), BF16), "b_pad": Shape((tokens, n), BF16),
        "a16": Shape((rows, m), BF16), "b16": Shape((rows, n), BF16), "sizes": numbers,
        "a_group": Shape((m, tokens // 128), F32), "b_group": Shape((n, tokens // 128), F32),
    }  # fmt: skip
    codes = ("a", "b", "starts", "lengths", "scale")
    arms = [
        Arm(OURS, 0, lambda a, b, t, c, s: grouped_matmul_dw(a, b, t, c, scale=s), codes),
        Arm("ours bf16", 1, functools.partial(grouped_matmul_dw, is_k_major=False),
            ("a_pad", "b_pad", "starts", "lengths")),
        Arm("ours FP8, 1x128 by 1x128", 3, grouped_block_matmul_dw,
            ("a", "b", "a_group", "b_group", "starts", "lengths")),
        Arm(DENSE, 0, dense, ("a", "b")),
    ]  # fmt: skip
    if not timing.dry():
        arms.append(Arm(JAX, 1, jax_dw, ("a16", "b16", "sizes")))

    def make() -> dict[str, Any]:
        x: dict[str, Any] = {"sizes": jnp.asarray(sizes), "scale": uniform(4, (groups,))}
        axis = padded_tokens(x["sizes"], rows)
        for i, key in enumerate("ab"):
            codes = normal(i, operands[f"{key}16"].shape, operands[key].dtype)
            x[f"{key}16"] = codes.astype(BF16)
            x[f"{key}_pad"] = jax.jit(lambda v, axis: axis.pad(v))(x[f"{key}16"], axis)
            x[key] = jax.jit(lambda v: v.T)(x[f"{key}_pad"].astype(operands[key].dtype))
        x |= {key: jnp.ones(operands[key].shape, F32) for key in ("a_group", "b_group")}
        return x | {"starts": axis.starts, "lengths": axis.lengths}

    def error(arm: str, out: Any, x: dict[str, Any]) -> float:
        begins, worst = np.cumsum(sizes) - sizes, 0.0
        for g in checked_groups(sizes):
            want = group_product(x["a16"], x["b16"], int(begins[g]), int(sizes[g]), int(sizes.max()))
            want = want * x["scale"][g] if arm == OURS else want
            worst = max(worst, float(relative_error(out[g, :SAMPLE], want)))
        return max(worst, *(float(jnp.abs(out[g].astype(F32)).max()) for g in np.flatnonzero(sizes == 0)))

    return Case(name, 2 * rows * m * n, operands, arms, make, None if timing.dry() else error)


def passes_case(name: str, layer: Layer) -> Case:
    """The passes around the products: codes of rows, permuted, transposed on the padded token axis."""
    rows, width, sizes = layer.rows, layer.width, layer.group_sizes()
    operands = {
        "x": Shape((layer.tokens, width), BF16), "y": Shape((rows, width), BF16),
        "x8": Shape((layer.tokens, width), E4M3), "index": Shape((rows,), I32),
        "sizes": Shape((layer.experts,), I32), "scale": Shape((), F32),
    }  # fmt: skip

    def quantized(impl: str, row_format: str | None, column_format: str | None) -> Callable[..., Any]:
        def run(x: Any, index: Any, sizes: Any, scale: Any) -> Any:
            return quantize_groups(
                x, padded_tokens(sizes, rows), index=index, rows=row_format, columns=column_format,
                row_scale=scale if row_format else None, column_scale=scale if column_format else None, impl=impl,
            )  # fmt: skip

        return run

    def moved(impl: str) -> Callable[..., Any]:
        return lambda x8, index, sizes: quantize_groups(
            x8, padded_tokens(sizes, rows), index=index, columns="e4m3", impl=impl
        )

    permuted, ordered = ("x", "index", "sizes", "scale"), ("y", "sizes", "scale")
    arms = [
        Arm(COPY, 0, lambda y: y + jnp.ones((), BF16), ("y",), None),
        Arm("codes of rows, permuted (triton)", 1, quantized("triton", "e4m3", None), permuted, COPY),
        Arm("codes of rows, permuted (xla)", 2, quantized("xla", "e4m3", None), permuted, COPY),
        Arm("transposed codes, permuted (triton)", 1, quantized("triton", None, "e4m3"), permuted, COPY),
        Arm("both, permuted (triton)", 1, quantized("triton", "e4m3", "e4m3"), permuted, COPY),
        Arm("both, in order (triton)", 1, lambda y, z, s: quantized("triton", "e5m2", "e5m2")(y, None, z, s), ordered,
            COPY),
        Arm("both, in order (xla)", 3, lambda y, z, s: quantized("xla", "e5m2", "e5m2")(y, None, z, s), ordered, COPY),
        Arm("codes permuted and transposed (triton)", 1, moved("triton"), ("x8", "index", "sizes"), COPY),
        Arm("codes permuted and transposed (xla)", 3, moved("xla"), ("x8", "index", "sizes"), COPY),
        Arm("rows permuted, bf16 (xla)", 2, lambda x, i: x[i], ("x", "index"), COPY),
        Arm("rows permuted and padded, bf16 (xla)", 2, lambda x, i, z: padded_tokens(z, rows).pad(x[i]),
            ("x", "index", "sizes"), COPY),
    ]  # fmt: skip

    def make() -> dict[str, Any]:
        x: dict[str, Any] = {"x": normal(1, *_of(operands["x"])), "y": normal(2, *_of(operands["y"]))}
        x |= {"x8": x["x"].astype(E4M3), "index": token_index(layer), "sizes": jnp.asarray(sizes)}
        return x | {"scale": jnp.full((), 0.01, F32)}

    return Case(name, 0, operands, arms, make)


def token_index(layer: Layer) -> Any:
    """The token of each row: those of an expert in rising order, as a sort by expert leaves them."""
    rng, sizes = np.random.default_rng(1), layer.group_sizes()
    index = rng.permutation(np.repeat(np.arange(layer.tokens), layer.top_k))
    ends = np.cumsum(sizes)
    return jnp.asarray(np.concatenate([np.sort(index[e - s : e]) for e, s in zip(ends, sizes, strict=True)]), I32)


def quantized_case(name: str, layer: Layer, n: int, k: int, is_permuted: bool) -> Case:
    """All three products of one projection (rows, K) by (experts, N, K), with what prepares their activations."""
    groups, rows, sizes = layer.experts, layer.rows, layer.group_sizes()
    operands = {
        "x": Shape((layer.tokens if is_permuted else rows, k), BF16), "dy": Shape((rows, n), BF16),
        "index": Shape((rows,), I32), "sizes": Shape((groups,), I32), "scale": Shape((groups,), F32),
        "w": Shape((groups, n, k), E4M3), "wt": Shape((groups, k, n), E4M3), "w16": Shape((groups, n, k), BF16),
        "wt16": Shape((groups, k, n), BF16), "one": Shape((), F32),
    }  # fmt: skip

    def fp8(x: Any, dy: Any, index: Any, sizes: Any, scale: Any, one: Any, w: Any, wt: Any) -> Any:
        tokens, index = padded_tokens(sizes, rows), index if is_permuted else None
        quantize: Any = functools.partial(quantize_groups, tokens=tokens)
        x_codes, _ = quantize(x, index=index, rows="e4m3", row_scale=one)
        y = grouped_matmul(x_codes, w, sizes, scale=scale)
        dy_codes, dy_columns = quantize(dy, rows="e5m2", columns="e5m2", row_scale=one, column_scale=one)
        dx = grouped_matmul(dy_codes, wt, sizes, scale=scale)
        _, x_columns = quantize(x, index=index, columns="e4m3", column_scale=one)
        return y, dx, grouped_matmul_dw(dy_columns, x_columns, tokens.starts, tokens.lengths, scale=scale)

    def ours_bf16(x: Any, dy: Any, index: Any, sizes: Any, w: Any, wt: Any) -> Any:
        tokens, ordered = padded_tokens(sizes, rows), x[index] if is_permuted else x
        y = grouped_matmul(ordered, w, sizes)
        dx = grouped_matmul(dy, wt, sizes)
        padded = tokens.pad(dy), tokens.pad(ordered)
        return y, dx, grouped_matmul_dw(*padded, tokens.starts, tokens.lengths, is_k_major=False)

    def jax_bf16(x: Any, dy: Any, index: Any, sizes: Any, w: Any, wt: Any) -> Any:
        ordered = x[index] if is_permuted else x
        return jax_rows(ordered, w, sizes), jax_rows(dy, wt, sizes), jax_dw(dy, ordered, sizes)

    plain = ("x", "dy", "index", "sizes", "w16", "wt16")
    arms = [
        Arm(OURS, 0, fp8, ("x", "dy", "index", "sizes", "scale", "one", "w", "wt")),
        Arm("ours bf16", 1, ours_bf16, plain),
    ]
    if not timing.dry():
        arms.append(Arm(JAX, 0, jax_bf16, plain))

    def make() -> dict[str, Any]:
        x: dict[str, Any] = {key: normal(i, *_of(operands[key])) for i, key in enumerate(("x", "dy", "w"))}
        x |= {"index": token_index(layer) if is_permuted else jnp.arange(rows, dtype=I32)}
        x |= {"wt": jnp.swapaxes(x["w"], 1, 2), "w16": x["w"].astype(BF16), "sizes": jnp.asarray(sizes)}
        return x | {"wt16": x["wt"].astype(BF16), "scale": jnp.ones(groups, F32), "one": jnp.ones((), F32)}

    def error(arm: str, out: Any, x: dict[str, Any]) -> float:
        """The largest error of the three results, to products of bf16: what quantization changes is in it."""
        g = int(np.argmax(sizes))
        begin = int((np.cumsum(sizes) - sizes)[g])
        some = slice(begin, begin + SAMPLE)
        ordered = x["x"][x["index"]] if is_permuted else x["x"]
        dot = functools.partial(jnp.dot, precision="highest")
        a, dy, w = (v.astype(F32) for v in (ordered[some], x["dy"][some], x["w16"][g]))
        wanted = dot(a, w.T), dot(dy, w), group_product(x["dy"], ordered, begin, int(sizes[g]), int(sizes[g]))
        got = out[0][some], out[1][some], out[2][g][:SAMPLE]
        return max(float(relative_error(o, v)) for o, v in zip(got, wanted, strict=True))

    return Case(name, 6 * rows * n * k, operands, arms, make, None if timing.dry() else error)


def cases(layers: dict[str, Layer]) -> Iterator[Case]:
    for name, layer in layers.items():
        width, inner = layer.width, layer.inner
        yield quantized_case(f"{name} w13 quantized", layer, 2 * inner, width, True)
        yield quantized_case(f"{name} w2 quantized", layer, width, inner, False)
        yield rows_case(f"{name} w13 forward", layer, 2 * inner, width, True)
        yield rows_case(f"{name} w13 dx", layer, width, 2 * inner, False)
        yield dw_case(f"{name} w13 dw", layer, 2 * inner, width)
        yield rows_case(f"{name} w2 forward", layer, width, inner, True)
        yield rows_case(f"{name} w2 dx", layer, inner, width, False)
        yield dw_case(f"{name} w2 dw", layer, width, inner)
        yield passes_case(f"{name} passes", layer)


def describe_failure(case: Case, arm: Arm, text: str) -> str:
    """A note of an arm that has no rows; it is also printed."""
    note = f"Not measured: {case.name}, {arm.name}: {text[:200]}".replace("\n", " ")
    print(f"  {note}", flush=True)
    return note


def measure(case: Case, programs: dict[Any, Any], options: argparse.Namespace) -> tuple[list[timing.Row], list[str]]:
    """Rows of a case: milliseconds against the baseline, rates and errors; and a note of each arm that failed."""
    rows: list[timing.Row] = []
    notes: list[str] = []
    ready: dict[str, Callable[..., Any]] = {}
    out: Any = None
    operands = case.make()
    for arm in case.arms:
        if (future := programs.get(case.key(arm))) is None:
            continue
        try:
            if future.cancelled() or not future.done():
                raise TimeoutError("it was not compiled in time")
            program, args = future.result(), tuple(operands[name] for name in arm.takes)
            out = jax.block_until_ready(program(*args))
            if case.error is not None and arm.name != DENSE:
                error = case.error(arm.name, out, operands)
                rows.append(timing.row(case.name, arm.name, "error", error, "of float32"))
            ready[arm.name] = functools.partial(program, *args)
        except Exception as problem:  # one arm does not stop the others
            if timing.dry():
                raise
            notes.append(describe_failure(case, arm, f"{type(problem).__name__}: {problem}"))
        out = None  # its memory is free for the next arm
    times = timing.seconds(ready, options.rounds, options.burst)
    for arm in case.arms:
        if arm.name not in times:
            continue
        spent = times[arm.name]
        ratio = times[arm.baseline] / spent if arm.baseline in times else None
        milliseconds = spent.quartiles(lambda t: 1e3 * t)
        rows.append(timing.row(case.name, arm.name, "time", 1e3 * spent, "ms", arm.baseline, ratio, milliseconds))
        if case.operations:
            rate = case.operations / spent / 1e12
            of_dense = times[DENSE] / spent if DENSE in times else None
            rows.append(timing.row(case.name, arm.name, "rate", rate, "TFLOP/s", DENSE, of_dense))
    return rows, notes


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="grouped", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=LAYERS, default=[*LAYERS])
    parser.add_argument("--only", default="", help="substring of the cases to run, alternatives with |")
    parser.add_argument("--arm", default="", help="substring of the implementations to run, alternatives with |")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", type=float, default=0.02, help="seconds of one round of one implementation")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which no further case is measured")
    parser.add_argument("--workers", type=int, default=8, help="programs that are compiled at the same time")
    parser.add_argument("--dry", action="store_true", help="trace small shapes on a CPU, and measure nothing")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    start = time.time()
    if options.dry:
        os.environ["FP8JAX_DRY"] = "1"
    timing.need_gpu()
    wanted = [*cases(DRY_LAYERS if timing.dry() else {name: LAYERS[name] for name in options.shapes})]
    wanted = [case for case in wanted if any(word in case.name for word in options.only.split("|"))]
    selected = [(case, arm) for case in wanted for arm in case.arms
                if any(word in arm.name for word in options.arm.split("|"))]  # fmt: skip
    notes = [" ".join((__doc__ or "").split("\n\n")[i].split()) for i in (2, 3)]
    save = functools.partial(timing.write, "grouped", "Grouped products of experts", versions={}, out=options.out)
    programs: dict[Any, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(1 if timing.dry() else options.workers) as pool:
        for case, arm in sorted(selected, key=lambda entry: entry[1].priority):
            shapes = [case.operands[name] for name in arm.takes]
            if case.key(arm) not in programs:
                programs[case.key(arm)] = pool.submit(timing.traced, arm.function, *shapes)
        # Nothing is compiled while arms are timed: the host must stay ahead of the GPU.
        concurrent.futures.wait(programs.values(), max(options.limit - SECONDS_TO_MEASURE - (time.time() - start), 1))
        late = sum(future.cancel() for future in programs.values())
    print(f"compiled {len(programs) - late} of {len(programs)} programs in {time.time() - start:.0f} s", flush=True)
    rows: list[timing.Row] = []
    missing: list[str] = []
    for case in wanted:
        if time.time() - start > options.limit:
            missing += [describe_failure(case, arm, "the time limit is reached") for arm in case.arms]
            continue
        print(f"{case.name}, after {time.time() - start:.0f} s", flush=True)
        try:
            case_rows, failed = measure(case, programs, options)
            rows, missing = rows + case_rows, missing + failed
        except Exception as problem:  # such as of operands that do not fit
            if timing.dry():
                raise
            missing.append(describe_failure(case, case.arms[0], f"{type(problem).__name__}: {problem}"))
        save(rows, notes=notes + missing, complete=False)
    headline = [row for row in rows if row["case"].endswith("quantized")]
    is_complete = not (missing or options.only or options.arm or len(options.shapes) < len(LAYERS))
    save(rows + timing.means(headline, "time"), notes=notes + missing, complete=is_complete)
    print(f"done in {time.time() - start:.0f} s", flush=True)
