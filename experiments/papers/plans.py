"""Computed memory and communication of the papers' tables: `python -m experiments.papers.plans`.

FP8-LM, Tables 5, 7 and 8; COAT, Table 11; MOSS, Table 5. `experiments.plan` computes the figures for their models and
meshes. Nothing is measured.
"""

import argparse
import dataclasses
import sys
from typing import Any

import jax
from flax import nnx

import fp8jax
from experiments import plan
from experiments.models import sizes
from experiments.models.llama import Llama
from experiments.papers import common
from experiments.papers.common import Row
from experiments.train import tensor
from fp8jax.recipes import Comm, Weights

VOCAB = 32_000
FAITHFUL = dataclasses.replace(fp8jax.recipes.coat(), context=fp8jax.recipes.Context("e4m3:group16"))
# COAT, Table 11, Llama-2-7B: GB of the optimizer in bf16 and FP8, by GPUs; activations in bf16 and FP8.
COAT_OPTIMIZER = {2: (26.2, 6.4), 4: (13.1, 3.2), 8: (6.5, 1.6)}
COAT_ACTIVATIONS = (25.8, 16.9)
# MOSS, Table 5, Llama-2-7B, 4 sequences of 4,096 tokens per GPU, 8 GPUs: GB of activations, GB sent per step.
MOSS = {"bf16": (42.3, 3.84), "coat": (28.6, 3.12), "moss": (23.5, 2.74)}
# FP8-LM, Table 5: reduction of the communication of weights, and GB before and after for GPT-175B.
# FP8-LM, Table 7, GPT-175B: GB of activations between devices, in bf16 and FP8. Our copy lacks the other models.
FP8_LM_ACTIVATIONS = {"175b": (5.9, 3.9)}
FP8_LM_VOLUME = {"7b": 0.64, "13b": 0.63, "175b": 0.65}


def coat() -> list[Row]:
    """Returns sharded moments of a 7B model, and the ratio of activations."""
    llama, table = sizes.get("7b", VOCAB), "COAT, Table 11: Llama-2-7B"
    rows = []
    for devices, papers in COAT_OPTIMIZER.items():
        for name, paper in zip(("bf16", "coat"), papers, strict=True):
            memory = plan.of(llama, fp8jax.recipes.get(name), {"data": 1, "fsdp": devices}, 0).memory
            size = (memory["first moments"] + memory["second moments"]) / 1e9
            ratio = papers[0] / papers[1] if name == "coat" else None
            case = f"{name}, {devices} GPUs"
            rows.append(Row(case, "moments", size, "GB", paper=paper, paper_ratio=ratio, table=table))
    saved = [
        plan.saved_per_token(llama, recipe, False)
        for recipe in (fp8jax.recipes.bf16(), FAITHFUL, fp8jax.recipes.coat())
    ]
    paper = COAT_ACTIVATIONS[0] / COAT_ACTIVATIONS[1]
    for name, size in zip(("coat, faithful", "coat"), saved[1:], strict=True):
        rows.append(Row(name, "activations, times fewer than bf16", saved[0] / size, "x", paper=paper, table=table))
    return rows


def moss() -> list[Row]:
    """Returns activations of a 7B model (16,384 tokens per GPU), and bytes of weights and gradients sent per step."""
    llama, tokens = sizes.get("7b", VOCAB), 4 * 4096
    arms = {
        "bf16": (fp8jax.recipes.bf16(), False, "bf16"),
        "bf16, recomputed": (fp8jax.recipes.bf16(), True, None),
        "coat, faithful": (FAITHFUL, False, "coat"),
        "coat": (fp8jax.recipes.coat(), False, None),
        "moss": (fp8jax.recipes.moss(), False, "moss"),
        "moss, recomputed": (fp8jax.recipes.moss(), True, None),
        "fast": (fp8jax.recipes.fast(), False, None),
    }
    table = "MOSS, Table 5: activations of Llama-2-7B, 4 x 4,096 tokens a GPU"
    rows = []
    for name, (recipe, recompute, paper) in arms.items():
        size = tokens * llama.layers * plan.saved_per_token(llama, recipe, recompute) / 1e9
        theirs = MOSS[paper][0] if paper else None
        rows.append(Row(name, "activations", size, "GB", paper=theirs, table=table))
    table = "MOSS, Table 5: sent a step for weights and gradients, FSDP over 8"
    for name in MOSS:
        for suffix, comm in (("", Comm()), (", 8-bit gradients", Comm("e4m3"))):
            recipe = dataclasses.replace(fp8jax.recipes.get(name), comm=comm)
            sent = plan.of(llama, recipe, {"data": 1, "fsdp": 8}, 0).sent_bytes / 1e9
            theirs = MOSS[name][1] if not suffix else None
            rows.append(Row(f"{name}{suffix}", "sent", sent, "GB", paper=theirs, table=table))
    return rows


def volume() -> list[Row]:
    """Returns bytes that a device sends for weights and gradients: in bf16 and fp32, and in FP8."""
    base = fp8jax.Recipe("base", Weights("bf16", "bf16"), fp8jax.recipes.bf16().optimizer, comm=Comm("fp32"))
    rows = []
    for name, paper in FP8_LM_VOLUME.items():
        llama, sizes_of_axes = sizes.get(name, VOCAB), {"data": 1, "fsdp": 8}
        before = plan.of(llama, base, sizes_of_axes, 0).sent_bytes
        after = plan.of(llama, fp8jax.recipes.fp8_lm(), sizes_of_axes, 0).sent_bytes
        table = "FP8-LM, Table 5: volume related to weights, FSDP over 8"
        rows.append(Row(name, "less than bf16 weights and fp32 gradients", 100 * (1 - after / before), "%",
                         paper=100 * paper, table=table))  # fmt: skip
        rows.append(Row(name, "sent", after / 1e9, "GB a step", table=table))
    return rows


def activations(devices: int = 8, tokens: int = 2048) -> list[Row]:
    """Returns bytes of activations that a device sends if `devices` share a sequence: in bf16, and as codes."""
    rows = []
    for name in FP8_LM_VOLUME:
        llama, sent = sizes.get(name, VOCAB), {}
        for recipe in ("bf16", "fp8_lm", "fast"):
            sent_as = tensor.wire_format(fp8jax.recipes.get(recipe))
            collectives = fp8jax.dist.sequence_collectives(tokens, llama.dim, devices, sent_as, times=2 * llama.layers)
            sent[recipe] = sum(one.sent_bytes for one in collectives)
        table = f"FP8-LM, Table 7: activations between {devices} devices that share a sequence of {tokens:,} tokens"
        before, after = FP8_LM_ACTIVATIONS.get(name, (None, None))
        rows.append(Row(f"{name}, bf16", "sent", sent["bf16"] / 1e9, "GB a step", paper=before, table=table))
        for recipe in ("fp8_lm", "fast"):
            paper = after if recipe == "fp8_lm" else None
            rows.append(Row(f"{name}, {recipe}", "sent", sent[recipe] / 1e9, "GB a step", paper=paper, table=table))
            less = 100 * (1 - paper / before) if paper and before else None
            share = 100 * (1 - sent[recipe] / sent["bf16"])
            rows.append(Row(f"{name}, {recipe}", "less than bf16", share, "%", paper=less, table=table))
    return rows


def whole_tensors(devices: int = 32) -> list[Row]:
    """Returns the largest and smallest bytes of FP8-LM's states per device: whole tensors of layers, and slices."""
    rows = []
    for name in FP8_LM_VOLUME:
        llama = sizes.get(name, VOCAB)
        tensors = _tensors(llama)
        of_state: Any = lambda x: 5 * x.size  # noqa: E731
        table = f"FP8-LM, Table 8: master weights and moments on {devices} devices"
        for parts, split in (("whole tensors", fp8jax.dist.partition), ("slices", fp8jax.dist.slices)):
            loads = split(tensors, devices, of_state).loads
            for label, load in (("most", max(loads)), ("least", min(loads))):
                rows.append(Row(f"{name}, {parts}, {label}", "states", load / 1e9, "GB", table=table))
    return rows


def _tensors(llama: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns the parameters of a model, separately for each layer."""
    params = nnx.to_pure_dict(nnx.eval_shape(lambda: nnx.state(Llama(llama, rngs=nnx.Rngs(0)), nnx.Param)))
    tensors = []
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        count, shape = (x.shape[0], x.shape[1:]) if "layers" in jax.tree_util.keystr(path) else (1, x.shape)
        tensors += [jax.ShapeDtypeStruct(shape, x.dtype)] * count
    return tensors


def table(_: argparse.Namespace) -> common.Table:
    """Returns the results file."""
    notes = [
        "Computed by `experiments.plan` for Llamas of these sizes with a vocabulary of 32,000: moments as stored, "
        "activations that JAX saves of a layer with flash attention, and bytes that a device sends in ring "
        "collectives. GB are 1e9 bytes. The figures of the papers were measured.",
        "bf16 saves more here than in the papers, because norms and SiLU of Flax save fp32. Our copies do not state "
        "the sequence length of COAT's activations, so only ratios are compared. They have neither figures of "
        "FP8-LM's Table 8 nor the configuration of its Tables 5 and 7.",
        "FP8-LM's Table 7 has 5.9 and 3.9 GB for one model, without the method of counting: compare ratios. Here, "
        "weights and activations are sent as codes with their scales, forward and backward. A test compares "
        "`experiments.plan` with the collectives of a compiled step.",
        "MOSS's Table 5 has 3.84 GB per step for a model with 13.5 GB of bf16 gradients, without the method of "
        "counting: compare ratios. `moss` saves bf16 for norms and activations; `fast` has COAT's contexts.",
        "Whole tensors are assigned to the device with the smallest load, the largest tensors first. With few "
        "tensors per device (7b: nine per layer on 32 devices), loads differ by less than the largest tensor. "
        "Slices are equal.",
    ]
    rows = [*volume(), *activations(), *whole_tensors(), *coat(), *moss()]
    for row in rows:
        print(f"{row.table[:45]:46}{row.case:32}{row.metric:44}{row.value:9.2f} {row.unit:9} paper {row.paper}")
    return common.Table("plans", "Computed memory and communication (FP8-LM, COAT, MOSS)", rows, notes)


if __name__ == "__main__":
    sys.exit(common.run(__doc__, table))
