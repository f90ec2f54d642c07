"""INT8 fallback's Table 3 and Figures 1(b) and 6(b) on one GPU: `python -m experiments.papers.int8_speed`.

A GPT-2 layer forward and backward by recipe and width, products of int8 by the side of their blocks, and the share of
linear layers in a forward pass of Qwen2.5's sizes (arXiv 2503.08040). Its copy here has no numbers of these.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax
from experiments import flags
from experiments.bench import timing
from experiments.models.llama import Block, LlamaConfig, rope_tables
from experiments.models.plain import PlainGPTBlock
from experiments.papers import common
from experiments.papers.common import Row
from fp8jax.ops.dispatch import choice
from fp8jax.ops.matmul.matmul import matmul

HIDDEN, BATCH, LENGTH = (1024, 2048, 4096, 8192), 16, 1024
BF16, RECIPES = "bf16", ("jetfire", "int8_block", "int8_fallback", "fast")
SETTLING = 30  # steps, of a factor of 1.3 each
SIDES, SIZES = (32, 64, 128), (2048, 4096, 8192)
# Width, inner width, heads and those of keys, of a layer of Qwen2.5.
QWEN = {
    "0.5B": LlamaConfig(256, 896, 1, 14, 2, 4864),
    "1.5B": LlamaConfig(256, 1536, 1, 12, 2, 8960),
    "3B": LlamaConfig(256, 2048, 1, 16, 2, 11008),
    "7B": LlamaConfig(256, 3584, 1, 28, 4, 18944),
}


def gpt_layer(hidden: int, recipe: str) -> tuple[Any, Any, Any]:
    """A function of parameters, states and inputs, and these two, thresholds settled where there are any."""
    plain = PlainGPTBlock(hidden, max(1, hidden // 64), nnx.Rngs(0))
    block = plain if recipe == BF16 else fp8jax.nnx.quantize(plain, [fp8jax.Rule(".*", recipe)])
    graph, *both = nnx.split(block, nnx.Param, ...)  # type: ignore[misc]
    params, states = map(nnx.to_pure_dict, both)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def layer(params: Any, states: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, states)(x)

    if jax.tree.leaves(states) and not timing.dry():
        x = inputs(hidden)[0]

        @jax.jit
        def advanced(states: Any) -> Any:
            block = nnx.merge(graph, params, states)
            block(x)
            fp8jax.nnx.advance_scaling(block, nnx.State({}))
            return nnx.to_pure_dict(nnx.split(block, nnx.Param, ...)[2])  # type: ignore[misc]

        for _ in range(SETTLING):
            states = advanced(states)
    return layer, params, states


def inputs(hidden: int) -> tuple[jax.Array, jax.Array]:
    """Inputs of a layer, and its output's gradient, both random."""
    length = 128 if timing.dry() else LENGTH
    shape = (BATCH, length, hidden)
    return (jax.random.normal(jax.random.key(0), shape, jnp.bfloat16),
            1e-3 * jax.random.normal(jax.random.key(1), shape, jnp.bfloat16))  # fmt: skip


def layers(hidden: int, rounds: int, burst: float) -> list[Row]:
    """Rows of Table 3 for one width."""
    hidden = 128 if timing.dry() else hidden
    x, dy = inputs(hidden)
    ready: dict[str, Any] = {}
    for name in (BF16, *RECIPES):
        layer, params, states = gpt_layer(hidden, name)

        def forward(params: Any, states: Any, x: jax.Array, dy: jax.Array, layer: Any = layer) -> Any:
            y, back = jax.vjp(lambda params, x: layer(params, states, x), params, x)
            return y, jax.tree.leaves(back)

        def whole(params: Any, states: Any, x: jax.Array, dy: jax.Array, layer: Any = layer) -> Any:
            y, back = jax.vjp(lambda params, x: layer(params, states, x), params, x)
            return y, back(dy)

        ready |= timing.compiled({f"{name}, forward": forward, name: whole}, [(params, states, x, dy)])
    times = timing.seconds(ready, rounds, burst)
    rows, base = [], dict[str, float]()
    for name in (BF16, *RECIPES):
        if not {name, f"{name}, forward"} <= times.keys():
            continue
        forward_ms, total = 1e3 * times[f"{name}, forward"], 1e3 * times[name]
        for part, value in (("forward", forward_ms), ("backward", total - forward_ms), ("both", total)):
            base.setdefault(part, value)
            rows.append(Row(f"{name}, {hidden} wide, {part}", "time", value, "ms", f"{BF16}, {hidden} wide, {part}",
                            base[part] / value if value > 0 else None, table=f"Table 3: a GPT-2 layer, {part}",
                            pivot=(name, f"{hidden}")))  # fmt: skip
    return rows


def block_product(a: Any, b: Any) -> jax.Array:
    """a @ b.T of codes."""
    return matmul(a, b, dtype=jnp.bfloat16)


def products(size: int, rounds: int, burst: float) -> list[Row]:
    """Figure 1(b): int8 products of square matrices, by the side of blocks; quantized before."""
    n = 256 if timing.dry() else size
    x, w = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    ready = timing.compiled({BF16: lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))}, [(x, w)])
    chosen = {BF16: ""}
    for side in SIDES:
        name, spec = f"blocks of {side}", f"int8:block{side}"
        pair = fp8jax.quantize(x, spec), fp8jax.quantize(w, spec)
        with choice.record_choices() as told:
            jax.eval_shape(block_product, *pair)
        ready |= timing.compiled({name: block_product}, [pair])
        chosen[name] = told[-1][1].impl if told else "xla"
    times = timing.seconds(ready, rounds, burst)
    table = "Figure 1(b): products of int8 by the side of their blocks"
    return [
        Row(f"{name}, {n}", "rate", 2e-12 * n**3 / t, "TOP/s", f"{BF16}, {n}", times[BF16] / t, table=table,
            pivot=(name + (f" ({chosen[name]})" if chosen.get(name) else ""), f"{n}"))
        for name, t in times.items()
    ]  # fmt: skip


def shares(rounds: int, burst: float) -> list[Row]:
    """Figure 6(b): the time of linear layers' products, of a layer's forward pass in bf16."""
    rows, length = [], 128 if timing.dry() else 4096
    for name, config in QWEN.items():
        block = Block(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        graph, params = nnx.split(block)
        tables = rope_tables(length, config.head_dim, config.rope_theta)
        x = jax.random.normal(jax.random.key(0), (4 * length, config.dim), jnp.bfloat16)
        inner = jax.random.normal(jax.random.key(1), (4 * length, config.mlp_dim), jnp.bfloat16)
        kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]

        def forward(params: Any, kernels: Any, x: jax.Array, inner: jax.Array, graph: Any = graph,
                    tables: Any = tables) -> jax.Array:  # fmt: skip
            return nnx.merge(graph, params)(x, *tables)

        def linear(params: Any, kernels: Any, x: jax.Array, inner: jax.Array) -> Any:
            return [(x if w.shape[0] == x.shape[1] else inner) @ w for w in kernels]

        ready = timing.compiled({"forward": forward, "linear": linear}, [(params, kernels, x, inner)])
        times = timing.seconds(ready, rounds, burst)
        share = 100 * times["linear"] / times["forward"]
        rows.append(Row(f"Qwen2.5 {name}", "linear layers' share", share, "%", table="Figure 6(b): share of linear "
                        "layers in a layer's forward pass, 4 x 4,096 tokens, bf16"))  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Regenerates results/CARD/int8_speed.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.04, help="seconds of one round of one implementation")
    parser.add_argument("--hidden", type=int, nargs="+", default=list(HIDDEN), help="widths of Table 3's layer")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    options = parser.parse_args(argv)
    flags.recommend()
    timing.need_gpu()
    hidden, sizes = (options.hidden[:1], SIZES[:1]) if timing.dry() else (options.hidden, SIZES)
    rows = [row for size in sizes for row in products(size, options.rounds, options.burst)]
    rows += shares(options.rounds, options.burst)
    rows += [row for width in hidden for row in layers(width, options.rounds, options.burst)]
    notes = [
        f"Table 3: a GPT-2 layer as a Flax user writes it, {BATCH} x {LENGTH:,} tokens of noise, heads of 64; backward "
        "is the whole less the forward pass with what it keeps. Weights are quantized in each pass. jetfire has no "
        "kernel on Hopper: its codes are decoded and multiplied in bf16.",
        "Figure 1(b): bf16 in, quantized before; in brackets what multiplies. Blocks of 128 have a kernel; others are "
        "decoded, and multiplied in bf16. On the paper's RTX 4090 int8 has four times bf16's peak, on Hopper twice.",
        "Figure 6(b): products alone over the whole layer, each timed by itself.",
        "Our copy of the paper has neither the numbers of Table 3 nor those of the figures.",
    ]
    title = "INT8 fallback: a GPT-2 layer, products by block, and linear layers' share (Table 3, Figures 1(b), 6(b))"
    arguments = f"--rounds {options.rounds} --burst {options.burst:g} --hidden {' '.join(map(str, options.hidden))}"
    device = jax.devices()[0].device_kind
    common.write("int8_speed", title, rows, notes, None, options.results, arguments=arguments, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
