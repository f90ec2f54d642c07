"""Residual memory of a Llama layer with INT8 fallback: `python -m experiments.papers.int8_memory`.

Bytes are counted from the program that JAX differentiates, as for COAT (`experiments.papers.coat_memory`), in U =
batch x sequence x width x 2 bytes. arXiv 2503.08040, sections 1 and 5.2.
"""

import argparse
import dataclasses
import sys
from unittest import mock

import jax

import fp8jax
from experiments.bench import arms as bench_arms
from experiments.models import flash
from experiments.papers import coat_memory, common
from experiments.papers.common import Row

BASE, REMATERIALIZED, FALLBACK, LEAN = "bf16", bench_arms.REMATERIALIZED, "int8_fallback", "int8_fallback, lean"
# Reduction relative to bf16, section 1. Our copy lacks the numbers of Table 2 (bytes of each model).
PAPER = 38.0
# COAT's count for bf16 in PyTorch (Table 2), in U.
PYTORCH = coat_memory.PAPER["BF16"][-1]


def recipes() -> dict[str, fp8jax.Recipe | None]:
    """Returns the measured recipes; None is the model with Flax's own modules."""
    fallback = fp8jax.recipes.int8_fallback()
    lean = dataclasses.replace(fallback, context=dataclasses.replace(fallback.context, recompute_activations=True))
    return {BASE: None, "int8_block": fp8jax.recipes.int8_block(), FALLBACK: fallback, LEAN: lean}


def rows() -> list[Row]:
    """Returns residuals by operator, totals with scales, and reductions relative to three baselines."""
    table, totals = [], {}
    with mock.patch.object(jax.nn, "dot_product_attention", flash.dot_product_attention):
        for name, recipe in recipes().items():
            measured = coat_memory.operators(recipe)
            for column in coat_memory.OPERATORS:
                value = float(measured[column].sum())
                table.append(Row(name, "kept", value, "U", table="By operator, in U", pivot=(name, column)))
            totals[name] = float(measured["Total"].sum())
        totals[REMATERIALIZED] = float(coat_memory.layer(None, recompute=True).sum())
    table.append(
        Row(
            REMATERIALIZED,
            "kept",
            totals[REMATERIALIZED],
            "U",
            table="By operator, in U",
            pivot=(REMATERIALIZED, "Total"),
        )
    )
    for baseline, size in (
        (BASE, totals[BASE]),
        (REMATERIALIZED, totals[REMATERIALIZED]),
        ("bf16 of PyTorch, counted by COAT", PYTORCH),
    ):
        for name in (FALLBACK, LEAN):
            paper = PAPER if baseline == BASE and name == FALLBACK else None
            less = 100 * (1 - totals[name] / size)
            table.append(Row(name, f"less than {baseline}", less, "%", baseline, totals[name] / size, paper))
    return table


def table(_: argparse.Namespace) -> common.Table:
    """Returns the results file."""
    notes = [
        f"One layer of a Llama of width {coat_memory.WIDTH}, with {coat_memory.HEADS} heads and a SwiGLU of 8/3 of "
        "the width, under `jax.vjp`. Attention saves q, k, v, its output and one number per row. Bytes per token "
        "are counted, with scales of groups and rows. Scales of blocks (0.02 % of the codes) are not.",
        "bf16: Flax's modules, differentiated by JAX. bf16, rematerialized: only the outputs of matmuls and "
        "attention are saved. The paper compares with PyTorch's modules, for which COAT counts 22.66 U.",
        "`int8_fallback` saves inputs of norms, gate, up and the activated gate in ten bits, and inputs of linear "
        "layers in eight, rounded stochastically. 'lean' recomputes the activated gate. Attention saves bf16, as in "
        "the paper: 4 U, including a reshaped copy of the output.",
    ]
    title = "INT8 fallback: residual memory of a layer"
    return common.Table("int8_memory", title, rows(), notes)


if __name__ == "__main__":
    sys.exit(common.run(__doc__, table))
