"""COAT's Tables 2 and 14, residual memory of a Llama layer: `python -m experiments.papers.coat_memory`.

Bytes are counted from the program that JAX differentiates, in U = batch x sequence x width x 2 bytes. Xi et al., COAT,
ICLR 2025, section 5.1, appendices D and L.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import fp8jax
from experiments.bench.arms import FAITHFUL, REMATERIALIZED, coat_recipes, save_products
from experiments.models import flash
from experiments.models.llama import Llama, LlamaConfig, rope_tables
from experiments.papers import common
from experiments.papers.common import Row

WIDTH, HEADS, LENGTH = 768, 6, 256
INNER = WIDTH * 8 // 3
OPERATORS = ("RMSNorm", "Act Func", "RoPE", "FlashAttn", "Linear", "Total")

# COAT, Tables 2 and 14, in U.
PAPER = {
    "BF16": (4, 8, 2, 3, 5.66, 22.66),
    "TE": (2, 8, 2, 3, 3.33, 18.33),
    "DeepSeek-V3": (2, 4, 2, 3, 3.08, 14.08),
    "COAT": (1, 4, 2, 3, 3.33, 13.33),
}
# The paper's row that each recipe is compared with.
PAPER_ROWS = {"bf16": "BF16", "te_current": "TE", "deepseek": "DeepSeek-V3", FAITHFUL: "COAT"}


def saved_bytes(fn: Callable, *args: Any) -> np.ndarray:
    """Returns residual bytes of `jax.vjp(fn, *args)`: codes and activations, and scales and row statistics.

    Residuals with at most one value per 16 elements of a token are scales. Rotary tables, which layers share, are not
    counted.
    """
    residuals = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args))
    sizes = np.zeros(2)
    for leaf in residuals:
        tokens = next((n for n in leaf.shape if n in (LENGTH, 2 * LENGTH)), None)
        values = 0 if tokens is None else leaf.size // tokens
        if values and values != WIDTH // HEADS // 2:
            sizes[int(values * 16 <= INNER)] += leaf.size * leaf.dtype.itemsize
    return sizes


def in_u(count: Callable[[int], np.ndarray]) -> np.ndarray:
    """Returns the bytes per additional token, in U."""
    return (count(2 * LENGTH) - count(LENGTH)) / (LENGTH * WIDTH * 2)


def layer(recipe: fp8jax.Recipe | None, recompute: bool = False) -> np.ndarray:
    """Returns the residuals of one layer in U: activations or codes, and scales.

    With `recompute`, the layer is under `save_products`.
    """

    def count(length: int) -> np.ndarray:
        config = LlamaConfig(vocab=32, dim=WIDTH, layers=1, heads=HEADS, kv_heads=HEADS, mlp_dim=INNER)
        model: Any = Llama(config, rngs=nnx.Rngs(0))
        model = model if recipe is None else fp8jax.nnx.quantize(model, recipe)
        graph, block = nnx.split(model.layers)
        block = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), block)
        tables = rope_tables(length, WIDTH // HEADS, 10_000.0)
        run = lambda p, x: nnx.merge(graph, p)(x, *tables)  # noqa: E731
        return saved_bytes(jax.checkpoint(run, policy=save_products) if recompute else run, block, activations(length))

    return in_u(count)


def activations(length: int, width: int = WIDTH) -> jax.ShapeDtypeStruct:
    """Returns an abstract bf16 activation of one sequence."""
    return jax.ShapeDtypeStruct((length, width), jnp.bfloat16)


def operators(recipe: fp8jax.Recipe | None) -> dict[str, np.ndarray]:
    """Returns the residuals of each operator of a layer in U. Linear layers have the remainder of the total.

    As in the paper, the output of flash attention is counted for the layer that reads it.
    """
    context = fp8jax.recipes.Context() if recipe is None else recipe.context
    norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        return norm(x) if context.residual is None else fp8jax.rms_norm(x, scale, recipe=context)

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return fp8jax.glu(gate, up, recipe=context)

    def count_norm(n: int) -> np.ndarray:
        return saved_bytes(normed, activations(n), jax.ShapeDtypeStruct((WIDTH,), jnp.bfloat16))

    heads = lambda n: jax.ShapeDtypeStruct((1, n, HEADS, WIDTH // HEADS), jnp.bfloat16)  # noqa: E731
    sizes = {
        "RMSNorm": 2 * in_u(count_norm),
        "Act Func": in_u(lambda n: saved_bytes(gated, activations(n, INNER), activations(n, INNER))),
        "RoPE": np.zeros(2),
        "FlashAttn": in_u(lambda n: saved_bytes(flash.flash, heads(n), heads(n), heads(n))) - np.array([1, 0]),
    }
    total = layer(recipe)
    return sizes | {"Linear": total - sum(sizes.values()), "Total": total}


def rows() -> list[Row]:
    """Returns all rows of the results file."""
    table = "Tables 2 and 14: activations and codes, in U"
    entries = [
        Row(
            f"paper, {name}",
            "kept",
            value,
            "U",
            paper=value,
            table=table,
            pivot=(f"paper, {name}", column),
            impl="paper",
        )
        for name, values in PAPER.items()
        for column, value in zip(OPERATORS, values, strict=True)
    ]
    totals, baseline = [], 0.0
    with mock.patch.object(jax.nn, "dot_product_attention", flash.dot_product_attention):
        rematerialized = layer(None, recompute=True)
        entries.append(
            Row(REMATERIALIZED, "kept", float(rematerialized[0]), "U", table=table, pivot=(REMATERIALIZED, "Total"))
        )
        totals.append(Row(REMATERIALIZED, "total", float(rematerialized.sum()), "U", table="With scales"))
        for name, recipe in coat_recipes().items():
            paper, measured = PAPER_ROWS.get(name), operators(recipe)
            for i, column in enumerate(OPERATORS):
                theirs, value = PAPER[paper][i] if paper else None, float(measured[column][0])
                entries.append(Row(name, "kept", value, "U", paper=theirs, table=table, pivot=(name, column)))
            total, scales = float(measured["Total"].sum()), float(measured["Total"][1])
            baseline = baseline or total
            ratio = PAPER["BF16"][-1] / PAPER[paper][-1] if paper else None
            totals.append(Row(name, "scales and statistics of rows", scales, "U", table="With scales"))
            share = Row(name, "total", total, "U", "bf16", baseline / total, paper_ratio=ratio, table="With scales")
            totals.append(share)
            ratio_to_rematerialized = float(rematerialized.sum()) / total
            totals.append(
                Row(name, "total, recomputed", total, "U", REMATERIALIZED, ratio_to_rematerialized, table="With scales")
            )
    return [*entries, *totals]


def table(_: argparse.Namespace) -> common.Table:
    """Returns the results file."""
    notes = [
        f"One layer of a Llama of width {WIDTH}, with {HEADS} heads and a SwiGLU of 8/3 of the width, under "
        "`jax.vjp`. Attention saves q, k, v, its output and one number per row, as flash attention does. Bytes per "
        "token are counted; weights and rotary tables are not.",
        "bf16: Flax's modules, differentiated by JAX. Norms and SiLU compute in fp32 and save more than the 4U of "
        "the paper; XLA may recompute some of it. A reshape after attention saves its output twice (1U).",
        "JAX saves nothing for RoPE, for which the paper counts 2U: its factors are constants. The norms and "
        "activations of DeepSeek-V3 are not part of the recipe `deepseek`; the last row adds those of COAT.",
        "bf16, rematerialized: the layer under `jax.checkpoint`, which saves only the outputs of matmuls and "
        "attention. It recomputes norms, SiLU and rotary embeddings, as COAT does from codes.",
        "The totals of the paper do not include scales, which are 12.5 % of the codes in groups of 16. Ratios are "
        "to bf16: ours to ours, the paper's to the paper's.",
    ]
    title = "COAT: residual memory of a layer (Tables 2 and 14)"
    return common.Table("coat_memory", title, rows(), notes)


if __name__ == "__main__":
    sys.exit(common.run(__doc__, table))
