"""A layer of experts forward and backward by recipe, against bf16: time, bytes kept between, and temporary bytes.

The layer is `experiments.models.moe.MoE` with bf16 parameters: router, products of all experts, and what sorts tokens
and adds their results. It keeps encodings of the tokens and of gate and up, and makes the rest again. "bf16" is this
layer with `fp8jax.ragged_dot` in 16 bits. "bf16, JAX's ragged_dot" has `jax.lax.ragged_dot` as XLA compiles it; it does
not run where it needs more memory than the device has.

Kept are the bytes that a layer saves for its backward pass, without parameters. Temporaries are those of the compiled
program of both passes, kept bytes included. Weights are quantized in the time of a layer. Tokens are normal and choose
experts by a random router. "deepseek" has the context of coat.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax
from experiments.bench import timing
from experiments.models.llama import LlamaConfig
from experiments.models.moe import ExpertProducts, MoE
from experiments.train.experts import RecipeProducts

BF16, XLA = "bf16", "bf16, JAX's ragged_dot"
TOKENS = 16_384


def shape(dim: int, mlp_dim: int, experts: int, chosen: int) -> LlamaConfig:
    """A layer of experts; the rest of the model is of no matter."""
    return LlamaConfig(1, dim, 1, dim // 128, 1, mlp_dim, experts=experts, experts_per_token=chosen)


SHAPES = {
    "marin": shape(2560, 1280, 64, 8),
    "mixtral": shape(4096, 14336, 8, 2),
    "qwen3-30b-a3b": shape(2048, 768, 128, 8),
}
DRY = {"small": shape(256, 128, 4, 2)}


def arms() -> dict[str, ExpertProducts]:
    """How experts multiply, by name; the first is the baseline."""
    coat = fp8jax.recipes.coat()
    recipes = {
        BF16: fp8jax.recipes.bf16(),
        "coat_fast": fp8jax.recipes.coat_fast(),
        "coat": coat,
        "deepseek": dataclasses.replace(fp8jax.recipes.deepseek(), context=coat.context),
    }
    return {name: RecipeProducts(recipe) for name, recipe in recipes.items()} | {XLA: ExpertProducts()}


class Arm:
    """A layer by one way to multiply.

    Args:
        config: the shape.
        products: how experts multiply.
        tokens: rows of the input.
    """

    def __init__(self, config: LlamaConfig, products: ExpertProducts, tokens: int) -> None:
        kinds: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        make = lambda: MoE(config, products=products, rngs=nnx.Rngs(0), **kinds)  # noqa: E731
        self.graph, params = nnx.split(nnx.eval_shape(make), nnx.Param)
        x = jax.ShapeDtypeStruct((tokens, config.dim), jnp.bfloat16)
        self.operands = (nnx.to_pure_dict(params), x, x)

    def three(self, params: Any, x_NxD: jax.Array, dy_NxD: jax.Array) -> Any:
        """The output and the gradients of parameters and inputs."""
        y_NxD, back = self._vjp(params, x_NxD)
        # The gradient follows the output, as in training. XLA would compute the output at the end otherwise.
        y_NxD, dy_NxD = jax.lax.optimization_barrier((y_NxD, dy_NxD))
        return y_NxD, back(dy_NxD)

    @property
    def kept(self) -> int:
        """Bytes that are saved for the backward pass, without parameters."""
        params, x, _ = self.operands
        saved = jax.eval_shape(lambda params, x: jax.tree.leaves(self._vjp(params, x)[1]), params, x)
        shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
        return sum(leaf.size * leaf.dtype.itemsize for leaf in saved if leaf.shape not in shapes)

    def _vjp(self, params: Any, x_NxD: jax.Array) -> Any:
        return jax.vjp(lambda params, x_NxD: nnx.merge(self.graph, params)(x_NxD), params, x_NxD)


def draw(layer: Arm) -> tuple[Any, jax.Array, jax.Array]:
    """Normal operands; matrices keep the size of what they multiply, and gradients of the output are small."""
    params, x, dy = layer.operands
    scales = (jax.tree.map(lambda leaf: leaf.shape[-2] ** -0.5, params), 1.0, 1e-3)

    @jax.jit
    def make(key: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten((params, x, dy))
        keys = jax.tree.unflatten(tree, list(jax.random.split(key, len(leaves))))
        values = jax.tree.map(lambda key, leaf: jax.random.normal(key, leaf.shape), keys, (params, x, dy))
        return jax.tree.map(
            lambda value, scale, leaf: (scale * value).astype(leaf.dtype), values, scales, (params, x, dy)
        )

    operands: tuple[Any, jax.Array, jax.Array] = make(jax.random.key(0, impl="rbg"))
    return operands


@jax.jit
def error(got: Any, want: Any) -> jax.Array:
    """The largest distance of a result from another one, relative to that one."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.maximum(jnp.sum(b**2), 1e-30))

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(one, got, want))))


def fits(program: Any) -> bool:
    """Whether a program's arrays fit on the device, where that tells its memory."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    memory = program.memory_analysis()
    parts = ("argument", "output", "temp")
    return bool(sum(getattr(memory, f"{part}_size_in_bytes") for part in parts) < 0.9 * limit)


def measure(
    case: str, layers: dict[str, Arm], programs: dict[str, concurrent.futures.Future], options: argparse.Namespace
) -> list[timing.Row]:
    """Rows of one shape. An arm that fails, or does not fit, is told of and left out."""
    rows, kept = [], {name: layer.kept for name, layer in layers.items()}
    for name, size in kept.items():
        rows.append(timing.row(case, name, "kept", size / 1e6, "MB", BF16, kept[BF16] / size))
    ready: dict[str, Callable[[], Any]] = {}
    temporary: dict[str, int] = {}
    operands, want = draw(layers[BF16]), None
    for name, future in programs.items():
        try:
            program = future.result(options.patience)
            temporary[name] = program.memory_analysis().temp_size_in_bytes
            if not fits(program):
                print(f"  {case} {name}: {temporary[name] / 1e9:.1f} GB of temporaries do not fit", flush=True)
                continue
            found = jax.block_until_ready(program(*operands))
        except Exception as problem:
            if timing.dry():
                raise
            told = f"{type(problem).__name__} {str(problem)[:300]}".replace("\n", " ")
            print(f"  {case} {name} failed: {told}", flush=True)
            continue
        if name == BF16:
            want = found
        elif want is not None:
            rows.append(timing.row(case, name, "error", float(error(found, want)), f"of {BF16}"))
        ready[name] = functools.partial(program, *operands)
    del want
    for name, size in temporary.items():
        ratio = temporary[BF16] / size if BF16 in temporary else None
        rows.append(timing.row(case, name, "temporaries", size / 1e6, "MB", BF16, ratio))
    times = timing.seconds(ready, options.rounds, options.burst)
    for name, t in times.items():
        ratio, spread = (times[BF16] / t if BF16 in times else None), t.quartiles(lambda t: 1e3 * t)
        rows.append(timing.row(case, name, "time", 1e3 * t, "ms", BF16, ratio, spread))
    return rows


def main(argv: list[str]) -> None:
    names = list(arms())
    parser = argparse.ArgumentParser(prog="moe", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small shapes, traced and not run: no GPU is needed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.1, help="seconds of one round of one implementation")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--only", nargs="+", choices=names[1:], default=names[1:], help=f"beside {BF16}")
    parser.add_argument("--patience", type=float, default=120, help="seconds until a program counts as failed")
    parser.add_argument("--workers", type=int, default=12, help="programs that compile at the same time")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    if options.dry:
        os.environ["FP8JAX_DRY"] = "1"
    timing.need_gpu()
    notes = [
        *(" ".join(part.split()) for part in (__doc__ or "").split("\n\n")[1:]),
        "Ratios are the baseline's time or bytes over the recipe's.",
    ]
    title = f"A layer of experts, {options.tokens} tokens, forward and backward"
    save = functools.partial(timing.write, "moe", title, notes=notes, versions={}, out=options.out)
    shapes = DRY if timing.dry() else {name: SHAPES[name] for name in options.shapes}
    ways = {name: products for name, products in arms().items() if name == BF16 or name in options.only}
    tokens = 256 if timing.dry() else options.tokens
    rows: list[timing.Row] = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        layers = {case: {name: Arm(shape, way, tokens) for name, way in ways.items()} for case, shape in shapes.items()}
        programs = {
            case: {name: pool.submit(timing.traced, arm.three, *arm.operands) for name, arm in these.items()}
            for case, these in layers.items()
        }
        for case, these in layers.items():
            rows += measure(case, these, programs.pop(case), options)
            save(rows, complete=False)
    save(rows + [mean for metric in ("time", "kept", "temporaries") for mean in timing.means(rows, metric)])
