"""Grouped matmuls of mixture-of-experts layers on one GPU: FP8 and bf16 kernels, compared with JAX's in bf16.

Each layer has 16,384 tokens. Each token goes to `top_k` experts with different loads. One expert has no tokens. "w13"
is the gate and up projection, "w2" the down projection. A case is the three matmuls of one projection (forward, dx,
dw), with the quantization, permutation and transposition of activations and gradients under given scales. Weights are
quantized before. The baseline is the same in bf16 with JAX's Pallas kernels.

The arms of a case are compiled first, then timed in turns. An arm that fails is reported. The error is the largest of
the three results, relative to float32 matmuls of the same operands (Frobenius norm), on samples of the largest group.
"""

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import driver, timing
from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.ops.quantization.grouped import quantize_groups
from pallas_kernels.matmul.grouped_mosaic import grouped_matmul, grouped_matmul_dw

E4M3, BF16, F32, I32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.int32
JAX, OURS, PLAIN = "JAX Pallas bf16", "ours FP8", "ours bf16"
TOKENS = 16384
SAMPLE = 128  # rows of a result that are checked


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
        """Returns the rows of each expert for a router that is nearly balanced."""
        rng = np.random.default_rng(0)
        load = rng.lognormal(0, 0.35, self.experts)
        sizes = rng.multinomial(self.rows, load / load.sum())
        sizes[2] += sizes[1]
        sizes[1] = 0
        return sizes.astype(np.int32)

    def token_index(self) -> jax.Array:
        """Returns the token of each row, in ascending order within each expert, as after a stable sort by expert."""
        rng, sizes = np.random.default_rng(1), self.group_sizes()
        index = rng.permutation(np.repeat(np.arange(self.tokens), self.top_k))
        ends = np.cumsum(sizes)
        return jnp.asarray(np.concatenate([np.sort(index[e - s : e]) for e, s in zip(ends, sizes, strict=True)]), I32)


LAYERS = {
    "marin": Layer(2560, 1280, 64, 8),
    "mixtral": Layer(4096, 14336, 8, 2),
    "qwen3": Layer(2048, 768, 128, 8),
}
DRY_LAYERS = {"small": Layer(256, 128, 4, 2, 64)}


def jax_rows(a: Any, b: Any, sizes: Any) -> Any:
    """JAX's grouped matmul in bf16: (T, K) by (G, N, K)."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    block_n, steps = (192, 4) if b.shape[1] % 192 == 0 else (128, 6)
    return ragged_dot_mgpu.ragged_dot(
        a, b, group_sizes=sizes, block_m=128, block_n=block_n, block_k=64, max_concurrent_steps=steps, grid_block_n=8,
        transpose_rhs=True,
    )  # fmt: skip


def jax_dw(a: Any, b: Any, sizes: Any) -> Any:
    """JAX's matmul over the rows of each group in bf16: (T, M) and (T, N) to (G, M, N)."""
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    return transposed_ragged_dot_mgpu.transposed_ragged_dot(
        a, b, group_sizes=sizes, block_m=128, block_n=128, block_k=64, max_concurrent_steps=6, grid_block_n=1
    )


class Case:
    """The three matmuls of a projection, (rows, K) by (experts, N, K), including the preparation of activations.

    Args:
        layer: sizes of the layer.
        n, k: outputs and inputs of the projection.
        is_permuted: whether it reads tokens and permutes them; otherwise it reads rows.

    Attributes:
        arms: functions from all operands to (y, dx, dw), by name.
    """

    def __init__(self, layer: Layer, n: int, k: int, is_permuted: bool) -> None:
        self.layer, self.n, self.k, self.is_permuted = layer, n, k, is_permuted
        self.work = 6.0 * layer.rows * n * k
        self.arms: dict[str, Callable[..., Any]] = {OURS: self._fp8, PLAIN: self._bf16}
        if not timing.dry():
            self.arms[JAX] = self._jax

    def operands(self) -> dict[str, Any]:
        """Returns arrays by name."""
        layer, (n, k), groups = self.layer, (self.n, self.k), self.layer.experts
        keys = iter(jax.random.split(jax.random.key(0), 3))
        draw = lambda shape, dtype: jax.random.normal(next(keys), shape, BF16).astype(dtype)  # noqa: E731
        rows, w = layer.rows, draw((groups, n, k), E4M3)
        wt = jnp.swapaxes(w, 1, 2)
        return {
            "x": draw((layer.tokens if self.is_permuted else rows, k), BF16), "dy": draw((rows, n), BF16),
            "index": layer.token_index() if self.is_permuted else jnp.arange(rows, dtype=I32),
            "sizes": jnp.asarray(layer.group_sizes()), "scale": jnp.ones(groups, F32),
            "w": w, "wt": wt, "w16": w.astype(BF16), "wt16": wt.astype(BF16),
        }  # fmt: skip

    def _tokens(self, sizes: Any) -> PaddedTokens:
        return PaddedTokens.from_groups(Groups.from_sizes(sizes, self.layer.rows), self.layer.rows)

    def _fp8(self, x: Any, dy: Any, index: Any, sizes: Any, scale: Any, w: Any, wt: Any, **_: Any) -> Any:
        tokens, index, one = self._tokens(sizes), index if self.is_permuted else None, jnp.ones((), F32)
        quantize: Any = functools.partial(quantize_groups, tokens=tokens)
        x_codes, _ = quantize(x, index=index, rows="e4m3", row_scale=one)
        y = grouped_matmul(x_codes, w, sizes, scale=scale)
        dy_codes, dy_columns = quantize(dy, rows="e5m2", columns="e5m2", row_scale=one, column_scale=one)
        dx = grouped_matmul(dy_codes, wt, sizes, scale=scale)
        _, x_columns = quantize(x, index=index, columns="e4m3", column_scale=one)
        return y, dx, grouped_matmul_dw(dy_columns, x_columns, tokens.starts, tokens.lengths, scale=scale)

    def _bf16(self, x: Any, dy: Any, index: Any, sizes: Any, w16: Any, wt16: Any, **_: Any) -> Any:
        tokens, ordered = self._tokens(sizes), x[index] if self.is_permuted else x
        padded = tokens.pad(dy), tokens.pad(ordered)
        dw = grouped_matmul_dw(*padded, tokens.starts, tokens.lengths, is_k_major=False)
        return grouped_matmul(ordered, w16, sizes), grouped_matmul(dy, wt16, sizes), dw

    def _jax(self, x: Any, dy: Any, index: Any, sizes: Any, w16: Any, wt16: Any, **_: Any) -> Any:
        ordered = x[index] if self.is_permuted else x
        return jax_rows(ordered, w16, sizes), jax_rows(dy, wt16, sizes), jax_dw(dy, ordered, sizes)

    def error(self, out: Any, x: dict[str, Any]) -> float:
        """Returns the largest error of the three results of the largest group, including quantization errors."""
        sizes = self.layer.group_sizes()
        g = int(np.argmax(sizes))
        begin, size = int((np.cumsum(sizes) - sizes)[g]), int(sizes[g])
        sample, group_rows = slice(begin, begin + min(SAMPLE, size)), slice(begin, begin + size)
        ordered = x["x"][x["index"]] if self.is_permuted else x["x"]
        a, dy, w = ordered[sample].astype(F32), x["dy"][sample].astype(F32), x["w16"][g].astype(F32)
        dot = functools.partial(jnp.dot, precision="highest")
        dw = dot(x["dy"][group_rows, :SAMPLE].astype(F32).T, ordered[group_rows].astype(F32))
        actual = out[0][sample], out[1][sample], out[2][g][:SAMPLE]
        return float(driver.relative_error(actual, (dot(a, w.T), dot(dy, w), dw)))


def cases(layers: dict[str, Layer]) -> dict[str, Case]:
    cases_by_name = {}
    for name, layer in layers.items():
        cases_by_name[f"{name} w13 quantized"] = Case(layer, 2 * layer.inner, layer.width, True)
        cases_by_name[f"{name} w2 quantized"] = Case(layer, layer.width, layer.inner, False)
    return cases_by_name


def measure(name: str, case: Case, options: argparse.Namespace) -> list[timing.Row]:
    """Returns the rows of a case: milliseconds relative to JAX's kernels, rates and errors."""
    rows, operands = list[timing.Row](), case.operands()
    functions = {arm: functools.partial(_call, function) for arm, function in case.arms.items()}
    ready = timing.compiled(functions, [(operands,)])
    for arm, call in ready.items():
        rows.append(timing.row(name, arm, "error", case.error(call()[0], operands), "of float32"))
    for arm, spent in (times := timing.seconds(ready, options.rounds, options.burst)).items():
        ratio = times[JAX] / spent if JAX in times else None
        rows.append(driver.time_row(name, arm, "time", spent, JAX, ratio))
        rows.append(driver.rate_row(name, arm, "rate", spent, 1e-12 * case.work, "TFLOP/s"))
    return rows


def _call(function: Callable[..., Any], operands: dict[str, Any]) -> Any:
    return function(**operands)


def main(argv: list[str]) -> None:
    options = driver.parser("grouped", __doc__, rounds=3, burst=0.02).parse_args(argv)
    timing.need_gpu()
    file = driver.ResultsFile(options, "Grouped matmuls of experts", driver.notes_of(__doc__))
    for name, case in cases(DRY_LAYERS if timing.dry() else LAYERS).items():
        file.add(measure(name, case, options))
    file.end("time")
