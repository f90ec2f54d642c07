"""MOSS's Table 7, Theorem 1 and the operands of its linear layer, measured: `python -m experiments.papers.moss_snr`.

Signal to noise of what quantization leaves of activations and gradients of a training run, early and late, and of the
products that read them. Zhang et al., MOSS, sections 3.1 and 4.5.2.
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8jax
from experiments.bench import arms as bench_arms
from experiments.errors import UserError
from experiments.models import flash
from experiments.papers import coat_memory, common
from experiments.papers.common import Row
from experiments.papers.moss_capture import Captured, capture
from experiments.text import data
from fp8jax.ops.quantization.microscaling import fold_rows
from fp8jax.recipes import Linear

RUN, STEPS, EARLY, SEQUENCES = "tables_moss", 300, 60, 8
FLAGS = (
    f"--recipe bf16 --run {RUN} --model 5m --batch 4 --seq-len 128 --steps {STEPS} --eval-every {STEPS} "
    f"--checkpoint-every {EARLY} --keep {STEPS // EARLY} --eval-batches 4 --sample-tokens 0 --log-every 20"
)
TENSOR, TOKEN, GROUP, OCP = "per tensor", "per token", "groups of 128", "OCP MX"
TWO_TENSOR, TWO_ROW, FOLDED = "two-level, tensor", "two-level, row", "two-level, row, folded"
CEILING = "rounding alone"
SPECS = {
    TENSOR: "e4m3", TOKEN: "e4m3:token", GROUP: "e4m3:group128", OCP: "e4m3:mx32+ocp", TWO_TENSOR: "e4m3:mx32",
    TWO_ROW: "e4m3:mx32+token",
}  # fmt: skip
# MOSS, Table 7: per tensor, groups of 128, two-level; early and late.
PAPER = {
    "attention output": ((28.4, 26.7), (34.8, 33.2), (37.6, 36.1)),
    "FFN intermediate": ((25.9, 24.1), (32.3, 30.7), (35.9, 35.3)),
    "LayerNorm input": ((31.2, 29.5), (36.7, 35.1), (39.4, 38.0)),
}
WHEN = ("early", "late")
MICRO = "e4m3:mx32+token"
E5M2, SHIFTED = "all per tensor, gradients e5m2 (te_current)", "both two-level, x shifted (moss)"
AGAIN = ("both two-level, both quantized again per tensor", "both two-level, both quantized again along tokens")
# What the three products may take beside a microscaled input, and what enters the weight's gradient then.
OPERANDS = {
    E5M2: Linear("e4m3", "e4m3", "e5m2"),
    "all per tensor, gradients e4m3": Linear("e4m3", "e4m3", "e4m3"),
    "x two-level, gradients e5m2, x quantized again": Linear(MICRO, "e4m3", "e5m2", x_wgrad="e4m3"),
    "x two-level of a tensor, gradients e5m2, x shifted": Linear("e4m3:mx32", "e4m3", "e5m2"),
    AGAIN[0]: Linear(MICRO, "e4m3", MICRO, x_wgrad="e4m3", dy_wgrad="e4m3"),
    AGAIN[1]: Linear(MICRO, "e4m3", MICRO, x_wgrad=MICRO, dy_wgrad=MICRO),
    "both two-level of tensors, x shifted": Linear("e4m3:mx32", "e4m3", "e4m3:mx32"),
    SHIFTED: fp8jax.recipes.moss().linear,
}


def snr(exact: np.ndarray, approximate: np.ndarray) -> float:
    """Equation 4 in dB, in float64; infinite where nothing differs."""
    exact, approximate = (np.asarray(a, np.float64) for a in (exact, approximate))
    noise = np.sum((exact - approximate) ** 2)
    return float(10 * np.log10(np.sum(exact**2) / noise)) if noise else float("inf")


def rounded(x: np.ndarray) -> np.ndarray:
    """Values to the four significant bits of e4m3, of any magnitude: what no choice of scales betters on average."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.round(mantissa * 16) / 16, exponent)


def schemes(x: np.ndarray) -> dict[str, float]:
    """SNR of each way to quantize a matrix."""
    array = jnp.asarray(x)
    ratios = {name: snr(x, np.asarray(fp8jax.quantize(array, spec).dequantize())) for name, spec in SPECS.items()}
    folded = fold_rows(array, fp8jax.QuantSpec.parse(MICRO))
    return ratios | {FOLDED: snr(x, np.asarray(folded.dequantize())), CEILING: snr(x, rounded(x))}


def integers(x: np.ndarray) -> dict[str, float]:
    """SNR of int8 codes up to 127 under the paper's three scales, for which Theorem 1's noise is meant."""

    def coded(groups: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return (np.round(groups / scale) * scale).reshape(x.shape)

    by_128, by_32 = x.reshape(-1, 128), x.reshape(-1, 32)
    own = np.abs(by_32).max(-1, keepdims=True) / 127
    level = own.max()
    return {
        TENSOR: snr(x, coded(x, np.abs(x).max() / 127)),
        GROUP: snr(x, coded(by_128, np.abs(by_128).max(-1, keepdims=True) / 127)),
        TWO_TENSOR: snr(x, coded(by_32, level * np.exp2(np.ceil(np.log2(own / level))))),
    }


def mean_schemes(matrices: list[np.ndarray]) -> dict[str, float]:
    """Mean over layers, in dB."""
    each = [schemes(x) for x in matrices]
    return {name: float(np.mean([one[name] for one in each])) for name in each[0]}


def tensors(captured: Captured) -> dict[str, list[np.ndarray]]:
    """The paper's three activations, and what else products read."""
    linears = captured.linears
    return {
        "attention output": [p.x for p in linears["out"]],
        "FFN intermediate": [p.x for p in linears["down"]],
        "LayerNorm input": [x for of_layers in captured.norms.values() for x in of_layers],
        "norm's output": [p.x for name in ("q", "gate") for p in linears[name]],
        "gradients of outputs": [p.dy for of_layers in linears.values() for p in of_layers],
    }


def products(captured: Captured) -> dict[str, np.ndarray]:
    """SNR of y, dx and dw of each choice of operands: mean over all linear layers, (3,), in dB."""

    def three(part: Linear, x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(functools.partial(fp8jax.linear, recipe=part), x, w)
        return y, *back(dy)

    ratios = {}
    for name, part in OPERANDS.items():
        run, each = jax.jit(functools.partial(three, part)), []
        for p in (p for of_layers in captured.linears.values() for p in of_layers):
            x, w, dy = (a.astype(np.float64) for a in p)
            exact = (x @ w, dy @ w.T, x.T @ dy)
            each.append([snr(a, np.asarray(b)) for a, b in zip(exact, run(*p), strict=True)])
        ratios[name] = np.mean(each, axis=0)
    return ratios


def distributions() -> dict[str, np.ndarray]:
    """Matrices (256, 1024) on which Theorem 1's order holds, and on which it does not."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(256, 1024))
    outliers = np.where(np.arange(1024) % 128 == 5, 100.0, 1.0)
    groups = np.exp2(rng.uniform(-12, 12, (256, 32))).repeat(32, 1)
    codes = fp8jax.quantize(jnp.asarray(normal, jnp.float32), "e4m3")
    return {
        "normal": normal,
        "uniform": rng.uniform(-1, 1, normal.shape),
        "normal, 1 channel of 128 a hundred times larger": normal * outliers,
        "normal, groups of 32 by up to 2^24 apart": normal * groups,
        "log-normal, sigma 4": np.sign(normal) * np.exp(4 * rng.normal(size=normal.shape)),
        "a value of each group of 32 a hundred times the others": normal * np.where(np.arange(1024) % 32 == 5, 100, 1),
        "codes of a tensor, 2^-12 off": np.asarray(codes.dequantize(), np.float64) * (1 + 2.0**-12 * normal),
    }


def rows(
    ratios: Mapping[str, Mapping[str, Any]], late: Mapping[str, np.ndarray], early: Mapping[str, Any]
) -> list[Row]:
    """All figures, as rows of the results file."""
    figures, table = [], "Table 7: SNR of activations and gradients, dB"
    places = {TENSOR: 0, GROUP: 1, TWO_ROW: 2}
    for when, of_tensors in ratios.items():
        for name, values in of_tensors.items():
            for scheme, value in values.items():
                at = places.get(scheme)
                paper = PAPER[name][at][WHEN.index(when)] if name in PAPER and at is not None else None
                figures.append(Row(f"{name}, {when}, {scheme}", "SNR", value, "dB", paper=paper, table=table))
    table = "Operands of the products, SNR in dB: mean of all linear layers"
    for when, of_choices in (("early", early), ("late", late)):
        for name, three in of_choices.items():
            for what, value in zip(("y", "dx", "dw"), three, strict=True):
                pivot = (name, f"{what}, {when}")
                figures.append(Row(name, f"{what}, {when}", float(value), "dB", table=table, pivot=pivot))
    table = "Theorem 1: SNR in dB on made-up data"
    for name, x in distributions().items():
        for scheme, value in schemes(x.astype(np.float32)).items():
            figures.append(Row(name, f"SNR, {scheme}", value, "dB", table=table, pivot=(name, scheme)))
        for scheme, value in integers(x).items():
            figures.append(Row(name, f"SNR, int8, {scheme}", value, "dB", table=table, pivot=(name, f"int8, {scheme}")))
    return figures + memory()


def memory() -> list[Row]:
    """What a layer keeps for the backward pass, in U, by recipe; the paper's ratios are of peak memory."""
    paper = {"coat": 42.3 / 28.6, "moss": 42.3 / 23.5, "fast": None}
    table, figures = "Table 5: what a layer keeps for the backward pass", []
    with coat_memory.mock.patch.object(jax.nn, "dot_product_attention", flash.dot_product_attention):
        base = float(coat_memory.layer(None).sum())
        again = float(coat_memory.layer(None, recompute=True).sum())
        figures.append(Row("bf16", "kept", base, "U", table=table))
        figures.append(Row(bench_arms.AGAIN, "kept", again, "U", "bf16", base / again, table=table))
        for name, ratio in paper.items():
            saved = float(coat_memory.layer(fp8jax.recipes.get(name)).sum())
            figures.append(Row(name, "kept", saved, "U", "bf16", base / saved, paper_ratio=ratio, table=table))
    return figures


NOTES = [
    f"The 5m Llama in bf16, {SEQUENCES} validation sequences of 128 bytes: activations and gradients of the mean "
    f"cross-entropy after {EARLY} and {STEPS} steps, means over layers of each layer's SNR (equation 4).",
    "e4m3 keeps four significant bits whatever the scale is, so its SNR is that of rounding alone, about 31.5 dB, as "
    "long as values lie within 2^-14.8 of the largest. In the paper two-level scales reach 35 to 39 dB and one scale a "
    "tensor 24 to 31.",
    "The largest value of each row or group, which an fp32 scale takes to 448, is exact: it counts where few values "
    "carry the energy, as in the FFN. Powers of two do not do that, and OCP's, which are rounded down, saturate the "
    "largest values.",
    "Theorem 1 takes the noise to be uniform with the scale as its step, as int8's is; rounding powers of two up, "
    "which equation 7 leaves out, costs what smaller groups gain.",
    "Bytes kept are of a layer of width 768, counted as in coat_memory. `moss` keeps what Flax's norms and activations "
    "keep; `fast` keeps codes of COAT's contexts, and no input of a linear layer that can be made again. The paper's "
    "ratios are of peak memory of a 7B model and say nothing of what is kept.",
]


def main() -> int:
    """Regenerates results/moss_snr.json."""
    arguments = common.parse(__doc__)
    ratios, operands = {}, {}
    try:
        for when, step in zip(WHEN, (EARLY, STEPS), strict=True):
            dump = common.dump(arguments.out, FLAGS, step)
            trained = dump.trained
            length = trained.config.data.seq_len
            corpus = data.read_corpus(trained.config.data.data, trained.config.data.valid_fraction)
            tokens = data.encode(corpus, trained.tokenizer, length).valid
            tokens_BxT = jnp.asarray(data.valid_batches(tokens, length, SEQUENCES, 1)[0])
            captured = capture(trained.task.model(dump.state.params, dump.state.model_state), tokens_BxT)
            ratios[when] = {name: mean_schemes(matrices) for name, matrices in tensors(captured).items()}
            operands[when] = products(captured)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = rows(ratios, operands["late"], operands["early"])
    title = "MOSS: signal to noise of its operands (Tables 5, 7, Theorem 1)"
    common.write("moss_snr", title, table, NOTES, None, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
