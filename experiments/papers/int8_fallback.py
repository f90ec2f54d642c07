"""INT8 fallback's studies (arXiv 2503.08040) on a small GLU model: `python -m experiments.papers.int8_fallback`.

A Llama is trained on text in bf16 (or taken from OUT where it was trained before); then one batch goes through it in
fp32, with integers of any number of bits in place of chosen tensors: table 1, figures 2(b), 3(b), 3(c), 4(a), 4(b),
5(a), 5(b), 6(a) and 7(a). Quantization here is written once more, for any number of bits; 8-bit blocks and their
residuals are also compared with those of `fp8jax.ops.quantization.fallback`.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from experiments import evaluate
from experiments.errors import UserError
from experiments.models.llama import apply_rope, attend, rope_tables
from experiments.papers import common
from experiments.papers.common import Row
from experiments.text import data
from experiments.train import cli
from fp8jax.core import blocks
from fp8jax.ops.quantization import fallback

RUN, STEPS, LENGTH, BATCH = "tables_glu", 500, 128, 8
FLAGS = (
    f"--recipe bf16 --run {RUN} --layers 4 --dim 256 --heads 4 --mlp-dim 768 --batch {BATCH} --seq-len {LENGTH} "
    f"--steps {STEPS} --lr 3e-3 --eval-every {STEPS} --checkpoint-every {STEPS} --sample-tokens 0 --log-every 50"
)
LINEARS = ("q", "k", "v", "out", "gate", "up", "down")
RATES = (0.0, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
SIZES = (16, 32, 64, 128, 256)
TENSOR = 0  # the block size that stands for one scale of all
EXACT = 1e9  # levels that stand for no quantization
CRITERIA = ("absmax", "l1", "relative_l1")  # what decides whether a block falls back (section 4.4)


class Knobs(NamedTuple):
    """What is quantized, traced: levels are the largest integer, `EXACT` for none.

    Attributes:
        x, w, dy: of linear layers' inputs, weights and output gradients. dy is rounded stochastically.
        saved: of the input that the weight's gradient reads, rounded stochastically.
        rate: share of the input's blocks that fall back in the forward product; saved_rate in the backward one.
        criterion: index into `CRITERIA`.
        other: of the inputs of norms and activations. context: of what these keep for the backward pass.
    """

    x: Any = EXACT
    w: Any = EXACT
    dy: Any = EXACT
    saved: Any = EXACT
    rate: Any = 0.0
    saved_rate: Any = 0.0
    criterion: Any = 0
    other: Any = EXACT
    context: Any = EXACT


def levels(bits: float) -> float:
    return 2.0 ** (bits - 1) - 1


def shape_of(x: jax.Array, size: int) -> tuple[int, ...]:
    return x.shape if size == TENSOR else (size, size)


def rounded(x: jax.Array, top: Any, block: tuple[int, ...], key: jax.Array | None = None) -> jax.Array:
    """Values rounded to integers of this largest one under a scale for each block; stochastically where a key is."""
    scale = blocks.broadcast_blocks(blocks.reduce(jnp.abs(x), block, jnp.max, 0.0) / top, x.shape, block)
    y = x / jnp.where(scale > 0, scale, 1)
    y = jnp.round(y) if key is None else jnp.floor(y + jax.random.uniform(key, x.shape))
    return jnp.where(top >= EXACT, x, y * scale)


def measures(x: jax.Array, base: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """Of each block, what the three criteria measure: (3, rows, columns).

    The largest magnitude; the sum of quantization errors; and that over the sum of magnitudes.
    """
    total = lambda y: blocks.reduce(y, block, lambda y, axis, initial: jnp.sum(y, axis), 0.0)  # noqa: E731
    error, size = total(jnp.abs(x - base)), total(jnp.abs(x))
    return jnp.stack([blocks.reduce(jnp.abs(x), block, jnp.max, 0.0), error, error / jnp.maximum(size, 1e-30)])


def top_share(measure: jax.Array, rate: Any) -> jax.Array:
    """The blocks whose measure is among the largest, a share `rate` of all."""
    rank = jnp.argsort(jnp.argsort(-measure.reshape(-1))).reshape(measure.shape)
    return rank < jnp.round(rate * measure.size)


def with_fallback(
    x: jax.Array, top: Any, block: tuple[int, ...], rate: Any, criterion: Any, key: jax.Array | None = None
) -> jax.Array:
    """`rounded`, with the residual of the blocks whose measure is among the largest, a share `rate` of all."""
    base = rounded(x, top, block, key)
    used = blocks.broadcast_blocks(top_share(measures(x, base, block)[criterion], rate), x.shape, block)
    rest = rounded(x - base, top, block, key)
    return jnp.where(used & (top < EXACT), base + rest, base)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(size: int, x: jax.Array, w: jax.Array, knobs: Knobs, key: jax.Array) -> jax.Array:
    return _product(size, x, w, knobs, key)[0]


def _product(size: int, x: jax.Array, w: jax.Array, knobs: Knobs, key: jax.Array) -> Any:
    left = with_fallback(x, knobs.x, shape_of(x, size), knobs.rate, knobs.criterion)
    right = rounded(w, knobs.w, shape_of(w, size))
    args = shape_of(x, size), knobs.saved_rate, knobs.criterion, jax.random.fold_in(key, 0)
    saved = with_fallback(x, knobs.saved, *args)
    return left @ right, (saved, right, knobs, key)


def _product_backward(size: int, residuals: Any, dy: jax.Array) -> Any:
    saved, right, knobs, key = residuals
    dy = rounded(dy, knobs.dy, shape_of(dy, size), jax.random.fold_in(key, 1))
    return dy @ right.T, saved.T @ dy, jax.tree.map(jnp.zeros_like, knobs), None


product.defvjp(_product, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def operation(function: Callable[..., jax.Array], x: tuple[jax.Array, ...], w: Any, top: Any) -> jax.Array:
    """A norm or activation that keeps its inputs (tokens, channels) in groups of 1x128."""
    return function(x, w)


def _operation(function: Any, x: Any, w: Any, top: Any) -> Any:
    return function(x, w), (tuple(rounded(each, top, (1, 128)) for each in x), w, top)


def _operation_backward(function: Any, residuals: Any, dy: jax.Array) -> Any:
    x, w, top = residuals
    return *jax.vjp(function, x, w)[1](dy), jnp.zeros_like(top)


operation.defvjp(_operation, _operation_backward)


def _norm(x: Any, scale: Any) -> jax.Array:
    (x,) = x
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def _gate(x: Any, _: Any) -> jax.Array:
    return jax.nn.silu(x[0]) * x[1]


def loss(params: Any, tokens_BxT: jax.Array, knobs: Knobs, size: int, seen: dict[str, Any] | None = None) -> jax.Array:
    """Mean cross-entropy of the Llama of `experiments.models`, in fp32; `seen` gets the inputs of linear layers."""
    heads, count = 4, params["layers"]["attention"]["q"]["kernel"].shape[0]
    cos, sin = rope_tables(tokens_BxT.shape[1] - 1, params["embed"]["embedding"].shape[1] // heads, 10_000.0)
    key = jax.random.key(0)

    def call(function: Any, x: tuple[jax.Array, ...], w: Any) -> jax.Array:
        x = tuple(rounded(each, knobs.other, shape_of(each, size)) for each in x)
        return operation(function, x, w, jnp.float32(knobs.context))

    def linear(layer: int, name: str, x: jax.Array, w: jax.Array) -> jax.Array:
        if seen is not None:
            seen[f"{layer} {name}"] = x
        place = jax.random.fold_in(key, 16 * layer + LINEARS.index(name))
        return product(size, x, w, jax.tree.map(jnp.float32, knobs)._replace(criterion=knobs.criterion), place)

    x = params["embed"]["embedding"][tokens_BxT[:, :-1].reshape(-1)]
    for i in range(count):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        normed = call(_norm, (x,), layer["attention_norm"]["scale"])
        q, k, v = (linear(i, name, normed, layer["attention"][name]["kernel"]) for name in "qkv")
        split = (tokens_BxT.shape[0], tokens_BxT.shape[1] - 1, -1, 2 * cos.shape[1])
        q, k, v = (each.reshape(split) for each in (q, k, v))
        mixed = attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, is_causal=True)
        x = x + linear(i, "out", mixed.reshape(x.shape), layer["attention"]["out"]["kernel"])
        normed = call(_norm, (x,), layer["mlp_norm"]["scale"])
        gate, up = (linear(i, name, normed, layer["mlp"][name]["kernel"]) for name in ("gate", "up"))
        x = x + linear(i, "down", call(_gate, (gate, up), None), layer["mlp"]["down"]["kernel"])
    logits = _norm((x,), params["norm"]["scale"]) @ params["head"]["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BxT[:, 1:].reshape(-1)).mean()


def cosine(a: Any, b: Any) -> float:
    """Of the gradients of all linear layers in the blocks, as one vector."""
    flat = [jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(t["layers"]) if x.ndim == 3]) for t in (a, b)]
    return float(flat[0] @ flat[1] / jnp.linalg.norm(flat[0]) / jnp.linalg.norm(flat[1]))


def extremes(x: np.ndarray) -> tuple[float, float, float]:
    """Largest magnitudes in the 5 % of tokens, and of channels, with the largest sums, and outside of both: table 1."""
    size = np.abs(x)
    picked = [np.argsort(-size.sum(1 - axis))[: max(1, round(0.05 * size.shape[axis]))] for axis in (0, 1)]
    rest = np.delete(np.delete(size, picked[0], 0), picked[1], 1)
    return float(size[picked[0]].max()), float(size[:, picked[1]].max()), float(rest.max())


def table(
    params: Any, batches: list[jax.Array], quick: bool = False
) -> tuple[list[Row], dict[str, list[tuple[float, float]]], dict[str, np.ndarray]]:
    """All rows, the curves of the plot, and pictures: the map of blocks and sorted magnitudes."""
    rows: list[Row] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    seen: dict[str, Any] = {}
    tokens = batches[0]
    exact = float(loss(params, tokens, Knobs(), 128, seen))
    inputs = {name: np.asarray(x) for name, x in seen.items()}
    for name in LINEARS:
        layers = [x for key, x in inputs.items() if key.endswith(f" {name}")]
        for level, value in zip(("token", "channel", "other"), np.max([extremes(x) for x in layers], 0), strict=True):
            rows.append(Row(f"input of {name}, {level} outliers", "largest magnitude", float(value), table="Table 1"))
    last = max(key for key in inputs if key.endswith("down"))
    down = jnp.asarray(inputs[last])
    ordered = np.sort(np.abs(np.asarray(down)).reshape(-1))[::-1] / float(jnp.std(down))

    def note(figure: str, arm: str, x: float, metric: str, value: float, **more: Any) -> None:
        rows.append(Row(f"{arm}, {x:g}", metric, value, table=figure, pivot=(arm, f"{x:g}"), **more))
        curves.setdefault(f"{figure}: {arm}", []).append((x, value))

    def rmse(y: jax.Array) -> float:
        return float(jnp.sqrt(jnp.mean((y - down) ** 2)))

    for bits in (8, 10, 12, 14, 16):
        note("Figure 3(b)", "integers of so many bits", bits, "RMSE", rmse(rounded(down, levels(bits), (128, 128))))
        both = with_fallback(down, levels(bits / 2), (128, 128), 1.0, 0)
        note("Figure 3(b)", "fallback, two halves of so many bits", bits, "RMSE", rmse(both))
    pair, _ = fallback.quantize(down, "int8:block128", 0.0)
    rows.append(Row("fp8jax.ops.fallback, all blocks", "RMSE", rmse(pair.dequantize()), table="Figure 3(b)"))
    picked = top_share(measures(down, pair.base.dequantize(), (128, 128))[0], 0.2)

    gradient = jax.jit(jax.grad(loss), static_argnums=3)
    value = jax.jit(lambda *args: loss(*args), static_argnums=3)
    truth = gradient(params, tokens, Knobs(), 128)

    def cos(knobs: Knobs, size: int = 128) -> float:
        return cosine(gradient(params, tokens, knobs, size), truth)

    eight = levels(8)
    whole = Knobs(x=eight, w=eight, dy=eight, saved=eight)
    for i, criterion in enumerate(CRITERIA):
        for rate in RATES[:: 3 if quick else 1]:
            note("Figure 3(c)", criterion, rate, "cosine", cos(whole._replace(rate=rate, criterion=i)))
    for rate in RATES[:: 3 if quick else 1]:
        note("Figure 5(b)", "forward only", rate, "cosine", cos(whole._replace(rate=rate)))
        note("Figure 5(b)", "forward and backward", rate, "cosine", cos(whole._replace(rate=rate, saved_rate=rate)))
    for bits in (4, 6, 8, 10, 12):
        top = levels(bits)
        for name, knobs in (("X", Knobs(x=top, saved=top)), ("W", Knobs(w=top)), ("dY", Knobs(dy=top))):
            note("Figure 5(a)", name, bits, "cosine", cos(knobs, TENSOR))
        note("Figure 7(a)", "contexts of norms and activations", bits, "cosine", cos(Knobs(context=top)))

    def perplexity(knobs: Knobs, size: int) -> float:
        return float(np.exp(np.mean([float(value(params, t, knobs, size)) for t in batches])))

    rows.append(Row("unquantized", "perplexity", perplexity(Knobs(), 128)))
    for bits in (4, 5, 6, 8):
        top = levels(bits)
        note("Figure 6(a)", "inputs of linear layers", bits, "perplexity", perplexity(Knobs(x=top), 128))
        note("Figure 6(a)", "inputs of norms and activations", bits, "perplexity", perplexity(Knobs(other=top), 128))
    for size in SIZES[:: 2 if quick else 1]:
        forward = Knobs(x=eight, w=eight)
        note("Figure 4(b)", "blocks", size, "perplexity", perplexity(forward, size))
        note("Figure 4(b)", "blocks, 20 % fall back", size, "perplexity", perplexity(forward._replace(rate=0.2), size))
        narrow = Knobs(x=levels(6), w=eight)
        note("Figure 4(b)", "6-bit inputs", size, "perplexity", perplexity(narrow, size))
        six = narrow._replace(rate=0.2)
        note("Figure 4(b)", "6-bit inputs, 20 % fall back", size, "perplexity", perplexity(six, size))
    assert np.isfinite(exact)
    return rows, curves, {"blocks": np.asarray(picked), "ordered": ordered}


def draw(curves: dict[str, list[tuple[float, float]]], pictures: dict[str, np.ndarray]) -> Figure:
    """A panel for each figure."""
    names = list(dict.fromkeys(name.partition(":")[0] for name in curves))
    figure = Figure(figsize=(15, 9), layout="constrained")
    panels = figure.subplots(3, 3).flat
    for name, axes in zip(names, panels, strict=False):
        for arm, points in curves.items():
            if arm.startswith(f"{name}: "):
                x, y = zip(*points, strict=True)
                axes.plot(x, np.maximum(1 - np.array(y), 1e-7) if "cos" in name or name in _COSINES else y, "o-",
                          label=arm.partition(": ")[2], markersize=3)  # fmt: skip
        axes.set_title(name, fontsize=9)
        axes.set_ylabel({"Figure 3(b)": "RMSE"}.get(name, "1 - cosine" if name in _COSINES else "perplexity"))
        axes.set_xscale("log" if name == "Figure 4(b)" else "linear")
        axes.set_yscale("linear" if name in ("Figure 4(b)",) else "log")
        axes.legend(fontsize=6)
    axes = figure.axes[len(names)]
    axes.imshow(pictures["blocks"], aspect="auto", cmap="Greys")
    axes.set_title("Figure 4(a): blocks of the last down's input that fall back, 20 %", fontsize=9)
    axes = figure.axes[len(names) + 1]
    axes.loglog(np.arange(1, len(pictures["ordered"]) + 1), pictures["ordered"])
    axes.set_title("Figure 2(b): sorted magnitudes of that input, in standard deviations", fontsize=9)
    return figure


_COSINES = ("Figure 3(c)", "Figure 5(a)", "Figure 5(b)", "Figure 7(a)")


def main() -> int:
    """Trains or restores the model, measures, and writes results/int8_fallback.json and .png."""
    options = common.parse(__doc__)
    try:
        arguments = FLAGS.split()
        code = cli.main([*arguments, "--out", str(options.out)])
        if code:
            raise UserError(f"the training run ended with code {code}")
        trained = evaluate.load(options.out / RUN, "bf16")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    corpus = data.read_corpus(trained.config.data.data, trained.config.data.valid_fraction)
    tokens = trained.tokenizer.encode(corpus.valid)[: 4 * BATCH * (LENGTH + 1)]
    batches = [jnp.asarray(part, jnp.int32) for part in tokens.reshape(4, BATCH, LENGTH + 1)]
    rows, curves, pictures = table(jax.tree.map(jnp.asarray, trained.params), batches)
    notes = [
        f"A Llama of 4 layers, 256 wide, trained for {STEPS} steps on bytes of Python's own sources and docs; "
        f"{4 * BATCH * LENGTH:,} validation tokens. The paper's models are Qwen-2.5 and Llama-3.1, of which our copy "
        "has no figures' values. Cosines are of the gradients of all weights of the blocks, against fp32.",
    ]
    common.write(
        "int8_fallback", "INT8 fallback on a small GLU model", rows, notes, draw(curves, pictures), options.results
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
