"""COAT's Table 10 and Figure 4(a) on a trained model: `python -m experiments.papers.coat_activations`.

Errors of the last layer's output and of the gradient before the first layer, with quantized linear layers and with
quantized inputs of non-linear layers, by group size. Xi et al., COAT, ICLR 2025, sections 5.2 and H.
"""

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fp8jax
from experiments.models.llama import Llama, SwiGLU
from experiments.papers import common
from experiments.papers.common import Row
from experiments.text import data

GROUPS = (4, 8, 16, 32, 64)
SIDES = (2, 4, 8)
SEQUENCES = 8
PER_TENSOR, PER_GROUP = "linear per tensor", "linear 1x128 groups"

# COAT, Table 10; no unit is given.
PAPER = {
    PER_GROUP: (372, 285),
    PER_TENSOR: (438, 286),
    "activations in groups of 4": (464, 319),
    "activations in groups of 8": (480, 334),
    "activations in groups of 16": (492, 363),
    "activations in groups of 32": (512, 361),
    "activations in groups of 64": (520, 371),
}
PAPER_OVERHEAD = {4: 50.0, 8: 25.0, 16: 12.5, 32: 6.5, 64: 3.2}


def quantize_and_decode(x: jax.Array, spec: fp8jax.QuantSpec) -> jax.Array:
    """Quantizes and dequantizes an activation, with a straight-through gradient."""
    value = jax.lax.stop_gradient(x)
    return fp8jax.quantize(value, spec).dequantize(x.dtype) + (x - value)


class QuantizedInput(nnx.Module):
    """A layer with its input stored in 8 bits."""

    def __init__(self, layer: nnx.Module, spec: fp8jax.QuantSpec) -> None:
        self.layer, self.spec = layer, spec

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        return self.layer(quantize_and_decode(x_NxD, self.spec))  # type: ignore[operator]


class QuantizedSwiGLU(nnx.Module):
    """A SwiGLU that stores the inputs of its activation and of its multiplication in 8 bits."""

    def __init__(self, glu: SwiGLU, spec: fp8jax.QuantSpec) -> None:
        self.glu, self.spec = glu, spec

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        gate_NxF, up_NxF = (quantize_and_decode(layer(x_NxD), self.spec) for layer in (self.glu.gate, self.glu.up))
        return self.glu.down(quantize_and_decode(jax.nn.silu(gate_NxF), self.spec) * up_NxF)


def quantize_activations(model: Llama, spec: fp8jax.QuantSpec) -> Llama:
    """Returns a copy with the inputs of norms and SwiGLUs, (tokens, channels), quantized by `spec`."""
    copy: Any = nnx.clone(model)
    block = copy.layers
    block.attention_norm = QuantizedInput(block.attention_norm, spec)
    block.mlp_norm = QuantizedInput(block.mlp_norm, spec)
    block.mlp = QuantizedSwiGLU(block.mlp, spec)
    return copy


class Tap(nnx.Module):
    """A norm that records its input in a variable, because a quantized model returns only values."""

    def __init__(self, norm: nnx.Module, like_NxD: jax.Array) -> None:
        self.norm, self.seen = norm, nnx.Intermediate(like_NxD)

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        self.seen.set_value(x_NxD)
        return self.norm(x_NxD)


def probe(model: Llama, tokens_BxT: jax.Array, *, backward: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the last layer's output and (if `backward`) the loss gradient before the first layer: fp32 (B x T, D)."""
    graphdef, variables = nnx.split(model)
    state = nnx.to_pure_dict(variables)
    embedded_NxD = model.embed(tokens_BxT[:, :-1].reshape(-1))

    def loss(x_NxD: jax.Array, state: Any) -> tuple[jax.Array, jax.Array]:
        merged: Any = nnx.merge(graphdef, state)
        merged.embed, merged.norm = (lambda _: x_NxD), Tap(merged.norm, x_NxD)
        logits_BxTxV = merged(tokens_BxT[:, :-1]).astype(jnp.float32)
        mean = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxT[:, 1:]).mean()
        return mean, merged.norm.seen.get_value()

    if not backward:
        return np.asarray(jax.jit(loss)(embedded_NxD, state)[1], np.float32), None
    gradient_NxD, hidden_NxD = jax.jit(jax.grad(loss, has_aux=True))(embedded_NxD, state)
    return np.asarray(hidden_NxD, np.float32), np.asarray(gradient_NxD, np.float32)


def spec(granularity: str, size: int) -> fp8jax.QuantSpec:
    """Returns e4m3 with bf16 scales, COAT's storage of activations."""
    return fp8jax.QuantSpec("e4m3", granularity, size, scale_format="bf16")


def by_token(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the mean squared error of each token, (N,)."""
    return np.mean((a.astype(np.float64) - b) ** 2, axis=1)


def table_10(model: Llama, tokens_BxT: jax.Array) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns squared errors of each token, forward and backward, relative to the unchanged model."""
    linear = fp8jax.nnx.quantize(model, fp8jax.recipes.te_current())
    arms = {PER_GROUP: fp8jax.nnx.quantize(model, fp8jax.recipes.deepseek()), PER_TENSOR: linear}
    for size in GROUPS:
        arms[f"activations in groups of {size}"] = quantize_activations(linear, spec("group", size))
    hidden, gradient = probe(model, tokens_BxT)
    errors = {}
    for name, arm in arms.items():
        h, g = probe(arm, tokens_BxT)
        assert g is not None
        assert gradient is not None
        errors[name] = by_token(h, hidden), by_token(g, gradient)
    return errors


def figure_4a(model: Llama, tokens_BxT: jax.Array) -> dict[tuple[str, int], float]:
    """Returns the forward MSE with only non-linear layers quantized, in BxB blocks and in 1xB^2 groups."""
    hidden, _ = probe(model, tokens_BxT, backward=False)
    errors = {}
    for side in SIDES:
        for kind, storage in (("block BxB", spec("block", side)), ("group 1xB²", spec("group", side * side))):
            h, _ = probe(quantize_activations(model, storage), tokens_BxT, backward=False)
            errors[kind, side * side] = float(by_token(h, hidden).mean())
    return errors


def rows(errors: dict[str, tuple[np.ndarray, np.ndarray]], blocks: dict[tuple[str, int], float]) -> list[Row]:
    """Returns all rows of the results file."""
    table = []
    for i, what in enumerate(("forward", "backward")):
        for name, values in errors.items():
            value, base = float(values[i].mean()), float(errors[PER_TENSOR][i].mean())
            paper = PAPER[name][i]
            paper_ratio = paper / PAPER[PER_TENSOR][i]
            table.append(Row(name, f"{what} MSE", value, "1", PER_TENSOR, value / base, paper, paper_ratio, "Table 10"))
    for i, what in enumerate(("forward", "backward")):
        for name, values in errors.items():
            value, base = float(np.median(values[i])), float(np.median(errors[PER_TENSOR][i]))
            metric = f"{what} MSE, median token"
            table.append(Row(name, metric, value, "1", PER_TENSOR, value / base, table="Table 10"))
    for size in GROUPS:
        overhead = 100 * (spec("group", size).bytes_per_element - 1)
        name = f"activations in groups of {size}"
        table.append(Row(name, "memory overhead", overhead, "%", paper=PAPER_OVERHEAD[size], table="Table 10"))
    for (kind, count), value in blocks.items():
        base = blocks["group 1xB²", count]
        table.append(
            Row(f"{kind}, {count} elements", "forward MSE", value, "1", f"group 1xB², {count} elements", value / base,
                table="Figure 4(a)")
        )  # fmt: skip
    return table


def table(options: argparse.Namespace) -> common.Table:
    """Returns the results file.

    Raises:
        UserError: see `common.dump`.
    """
    trained = common.dump(options.out).trained
    corpus = data.read_corpus(trained.config.data.data, trained.config.data.valid_fraction)
    length = trained.config.data.seq_len
    tokens = data.encode(corpus, trained.tokenizer, length).valid
    tokens_BxT = jnp.asarray(data.valid_batches(tokens, length, SEQUENCES, 1)[0])
    model = trained.task.model(trained.params, trained.model_state)
    errors, blocks = table_10(model, tokens_BxT), figure_4a(model, tokens_BxT)
    notes = [
        f"The 5M Llama after {common.STEPS} steps, {SEQUENCES} validation sequences of {length} bytes, in bf16. The "
        "errors are those of the last block's output and of the gradient before the first block. Linear layers are "
        "per-tensor e4m3 with e5m2 gradients (`te_current`), or e4m3 in 1x128 groups and 128x128 blocks "
        "(`deepseek`). Inputs of norms, SiLU and the SwiGLU product, and the output of SiLU, are e4m3 with bf16 "
        "scales.",
        "The paper gives neither unit nor model, so ratios to linear layers per tensor are compared.",
        "One token causes most of the mean of the backward error. The median token is shown for this reason.",
        "Our copy of the paper has no values of Figure 4(a). Its claim: at the same number of elements per scale, "
        "blocks that span tokens are worse.",
    ]
    title = "COAT: quantized activations by group size (Table 10, Figure 4(a))"
    return common.Table("coat_activations", title, rows(errors, blocks), notes)


if __name__ == "__main__":
    sys.exit(common.run(__doc__, table))
