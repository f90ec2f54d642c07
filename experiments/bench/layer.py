"""A Llama layer forward and backward by recipe, against bf16 with cuDNN's attention: time, and bytes kept between.

The layer is `experiments.models.llama.Block` with bf16 parameters, as `fp8jax.nnx.quantize` leaves it: nothing in it
was written for 8 bits. COAT (Xi et al., ICLR 2025), Table 7, reports 1.57 times the speed and 1.65 times fewer bytes.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax
from experiments.bench import timing
from experiments.models.llama import Block, LlamaConfig, rope_tables
from experiments.tables import coat_memory

CONFIG = LlamaConfig(vocab=256, dim=4096, layers=1, heads=32, kv_heads=32, mlp_dim=11008)
BF16, BATCH = "bf16", 4


def arms(length: int, config: LlamaConfig = CONFIG) -> dict[str, Callable[..., Any]]:
    """Functions of (parameters, inputs (N, D), gradient (N, D)) that return outputs and gradients, by recipe."""
    plain = _block(config)
    found = {BF16: _three(plain, length, config)}
    for name, (recipe, _) in coat_memory.recipes().items():
        if recipe is not None:
            found[name] = _three(fp8jax.nnx.quantize(plain, recipe), length, config)
    two_stage = dataclasses.replace(fp8jax.recipes.coat().linear, scaling="current")
    exact = dataclasses.replace(fp8jax.recipes.coat(), linear=two_stage)
    return found | {"COAT, lean, current scaling": _three(fp8jax.nnx.quantize(plain, exact), length, config)}


def _block(config: LlamaConfig) -> Block:
    return nnx.eval_shape(lambda: Block(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def _three(block: Block, length: int, config: LlamaConfig) -> Callable[..., Any]:
    graph = nnx.split(block, nnx.Param)[0]
    tables = rope_tables(length, config.head_dim, config.rope_theta)

    def layer(params: Any, x_NxD: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x_NxD, *tables)

    def three(params: Any, x_NxD: jax.Array, dy_NxD: jax.Array) -> Any:
        y_NxD, back = jax.vjp(layer, params, x_NxD)
        return y_NxD, back(dy_NxD)

    three.layer = layer  # type: ignore[attr-defined]
    return three


def kept(layer: Callable[..., Any], params: Any, x_NxD: jax.Array) -> float:
    """What the layer keeps for its backward pass besides parameters and their codes, in U."""
    weights = {(*leaf.shape[-2:],) for leaf in jax.tree.leaves(params)}
    weights |= {shape[::-1] for shape in weights}
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(layer, *args)[1], params, x_NxD))
    return sum(x.size * x.dtype.itemsize for x in leaves if x.shape not in weights) / (x_NxD.size * 2)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="layer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.05, help="seconds of one round of one implementation")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    timing.need_gpu()
    rows: list[timing.Row] = []
    for length in options.lengths:
        params = jax.tree.map(_draw, nnx.to_pure_dict(nnx.state(_block(CONFIG), nnx.Param)))
        x_NxD, dy_NxD = (_draw(jax.ShapeDtypeStruct((BATCH * length, CONFIG.dim), jnp.bfloat16)) for _ in range(2))
        wanted, case = arms(length), f"batch {BATCH}, length {length}"
        bytes_kept = {name: kept(three.layer, params, x_NxD) for name, three in wanted.items()}  # type: ignore[attr-defined]
        times = timing.seconds(timing.compiled(wanted, [(params, x_NxD, 1e-3 * dy_NxD)]), options.rounds, options.burst)
        for name, time in times.items():
            rows.append(timing.row(case, name, "time", time * 1e3, "ms", BF16, times[BF16] / time))
            rows.append(
                timing.row(case, name, "kept", bytes_kept[name], "U", BF16, bytes_kept[BF16] / bytes_kept[name])
            )
    rows += timing.means(rows, "time")
    notes = [" ".join((__doc__ or "").split("\n\n")[1].split()), "Ratios are bf16's time or bytes over the recipe's."]
    timing.write("layer", "A Llama layer, forward and backward", rows, notes, {}, options.out)


def _draw(like: Any) -> jax.Array:
    x = jax.random.normal(jax.random.key(like.size), like.shape, like.dtype)
    return x if len(like.shape) < 2 or like.shape[0] > 3 * CONFIG.dim else x * 0.02
