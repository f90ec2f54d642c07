"""A Llama layer forward and backward by recipe, against bf16 with cuDNN's attention: time, and bytes kept between.

The layer is `experiments.models.llama.Block` with bf16 parameters, as `fp8jax.nnx.quantize` leaves it: nothing in it
was written for 8 bits. COAT (Xi et al., ICLR 2025), Table 7, reports 1.57 times the speed and 1.65 times fewer bytes.

"products and attention alone" are its FP8 products with fast accumulation, of codes that are there, and its attention:
what is left of the time when everything else costs nothing. "bound of" a recipe adds to these one copy that moves as
many bytes as all other operations of its compiled program read and write: what is left of the time when every pass
besides products and attention runs as fast as a copy.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax
from experiments.bench import timing, traffic
from experiments.models.llama import Block, LlamaConfig, rope_tables
from experiments.tables import coat_memory
from fp8jax.ops.matmul import matmul

CONFIG = LlamaConfig(vocab=256, dim=4096, layers=1, heads=32, kv_heads=32, mlp_dim=11008)
BF16, BATCH = "bf16", 4
ALONE = "products and attention alone"
BOUND = "bound of {}"
HELD, FAST, PRODUCTS = "weights held", "fast accumulation", ("forward", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class Arm:
    """A layer by a recipe.

    Attributes:
        layer: function of parameters, codes of weights and inputs (N, D).
        operands: these three, and the output's gradient (N, D).
    """

    layer: Callable[..., jax.Array]
    operands: tuple[Any, Any, jax.Array, jax.Array]

    def three(self, params: Any, codes: Any, x_NxD: jax.Array, dy_NxD: jax.Array) -> Any:
        """Forward and backward: the output and the gradients of parameters and inputs."""
        y_NxD, back = self._vjp(params, codes, x_NxD)
        return y_NxD, back(dy_NxD)

    def forward(self, params: Any, codes: Any, x_NxD: jax.Array, _: jax.Array) -> Any:
        """The output, and what is kept for the backward pass besides parameters and their codes."""
        y_NxD, back = self._vjp(params, codes, x_NxD)
        weights = {leaf.shape[-2:] for leaf in jax.tree.leaves(params)}
        weights |= {shape[::-1] for shape in weights}
        return y_NxD, [leaf for leaf in jax.tree.leaves(back) if leaf.shape not in weights]

    @property
    def kept(self) -> int:
        """Bytes of what `forward` keeps."""
        leaves = jax.eval_shape(self.forward, *self.operands)[1]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def _vjp(self, params: Any, codes: Any, x_NxD: jax.Array) -> Any:
        return jax.vjp(lambda params, x_NxD: self.layer(params, codes, x_NxD), params, x_NxD)


def recipes() -> dict[str, fp8jax.Recipe]:
    """What is compared with bf16."""
    found = {name: recipe for name, (recipe, _) in coat_memory.recipes().items() if recipe is not None}
    lean = found[coat_memory.LEAN]
    for name, change in (("current scaling", {"scaling": "current"}), (FAST, {"fast_accumulation": PRODUCTS})):
        linear = dataclasses.replace(lean.linear, **change)  # type: ignore[arg-type]
        found[f"{coat_memory.LEAN}, {name}"] = dataclasses.replace(lean, linear=linear)
    return found


def arms(length: int, config: LlamaConfig = CONFIG, names: Sequence[str] | None = None) -> dict[str, Arm]:
    """Layers by recipe, all or those named; with `HELD`, their weights' codes are made before, as for microbatches."""
    plain = nnx.eval_shape(lambda: Block(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(0), 64))
    draw = lambda shape: jax.random.normal(next(keys), shape, jnp.bfloat16)  # noqa: E731
    shapes = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    params = jax.tree.map(lambda s: 0.02 * draw(s.shape) if s.ndim > 1 else jnp.ones(s.shape, s.dtype), shapes)
    x_NxD, dy_NxD = draw((BATCH * length, config.dim)), 1e-3 * draw((BATCH * length, config.dim))
    tables = rope_tables(length, config.head_dim, config.rope_theta)

    def arm(block: Block) -> Arm:
        graph, _, codes = nnx.split(block, nnx.Param, ...)  # type: ignore[misc]
        layer = lambda params, codes, x_NxD: nnx.merge(graph, params, codes)(x_NxD, *tables)  # noqa: E731
        return Arm(layer, (params, nnx.to_pure_dict(codes), x_NxD, dy_NxD))

    found = {BF16: arm(plain)}
    for name, recipe in recipes().items():
        if names is None or name in names:
            found[name] = arm(fp8jax.nnx.quantize(plain, recipe))
        held = f"{name}, {HELD}"
        if held in names if names is not None else name.startswith(coat_memory.LEAN):
            graph, _ = nnx.split(fp8jax.nnx.quantize(plain, recipe), nnx.Param)
            found[held] = arm(fp8jax.nnx.quantize_weights(nnx.merge(graph, params)))
    return found


def alone(length: int, config: LlamaConfig = CONFIG) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """All 8-bit products of a layer, of codes that are there, and its attention: a function and its arguments."""
    tokens, dim, inner = BATCH * length, config.dim, config.mlp_dim
    kv_dim = config.kv_heads * config.head_dim
    sides = [(dim, dim), (dim, kv_dim), (dim, kv_dim), (dim, dim), (dim, inner), (dim, inner), (inner, dim)]

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def codes(seed: int, shape: tuple[int, int], dtype: Any) -> fp8jax.QTensor:
        draw = (16 * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)
        spec = fp8jax.QuantSpec("e4m3" if dtype == jnp.float8_e4m3fn else "e5m2")
        return fp8jax.QTensor(draw, jnp.full((1, 1), 1 / 16), None, None, spec)

    def operands(seed: int, inputs: int, outputs: int) -> tuple[Any, ...]:
        """Weights, inputs and cotangents, each as two products want them."""
        e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
        shapes = [((outputs, inputs), e4m3), ((tokens, inputs), e4m3), ((tokens, outputs), e5m2)]
        return tuple((codes(3 * seed + i, s, d), codes(3 * seed + i, s[::-1], d)) for i, (s, d) in enumerate(shapes))

    def run(linears: Any, qkv: Any, dy: jax.Array) -> Any:
        product = functools.partial(matmul, dtype=jnp.bfloat16)
        three = [
            (product(x, w), product(g, turned_w), product(turned_g, turned_x))
            for (w, turned_w), (x, turned_x), (g, turned_g) in linears
        ]
        attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        y, back = jax.vjp(attention, *qkv)
        return three, y, back(dy)

    shapes = [(BATCH, length, h, config.head_dim) for h in (config.heads, *[config.kv_heads] * 2, config.heads)]
    *qkv, dy = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
    return run, ([operands(i, *side) for i, side in enumerate(sides)], qkv, dy)


def others(arm: Arm) -> int:
    """Bytes that all operations of a layer but products and attention read and write."""
    program = jax.jit(arm.three).lower(*arm.operands)
    text = program.compile(compiler_options={"xla_gpu_enable_command_buffer": ""}).as_text()
    return traffic.moved(text or "", without=("cublas", "cudnn"))


def bound(function: Callable[..., Any], moved: int) -> tuple[Callable[..., Any], jax.Array]:
    """A function that also copies an array, its last argument: together they read and write `moved` bytes."""
    array = jnp.zeros((max(moved // 2**22, 1), 2**20), jnp.bfloat16)
    return lambda *operands: (function(*operands[:-1]), jnp.copy(operands[-1])), array


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="layer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.05, help="seconds of one round of one implementation")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    names = [f"{name}{held}" for name in recipes() for held in ("", f", {HELD}")]
    parser.add_argument("--only", nargs="+", choices=names, help="recipes; all if left out")
    parser.add_argument("--bounds", nargs="+", default=[], choices=names, help="recipes, of --only, to bound")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    if missing := set(options.bounds) - set(options.only or ()):
        parser.error(f"--bounds {sorted(missing)}: name them with --only, too")
    timing.need_gpu()
    notes = [
        *(" ".join(part.split()) for part in (__doc__ or "").split("\n\n")[1:]),
        "Ratios are bf16's time or bytes over the recipe's.",
        "Clock and power are medians of the last third of 1.5 s of a layer: at the power limit the clock falls.",
    ]
    save = functools.partial(
        timing.write, "layer", "A Llama layer, forward and backward", notes=notes, versions={}, out=options.out
    )
    rows: list[timing.Row] = []
    for length in options.lengths:
        wanted, case = arms(length, names=options.only), f"batch {BATCH}, length {length}"
        ready: dict[str, Callable[..., Any]] = {}
        for name, arm in wanted.items():
            ready |= timing.compiled({name: arm.three}, [arm.operands])
        function, operands = alone(length)
        ready |= timing.compiled({ALONE: function}, [operands])
        for name in options.bounds:
            moved = others(wanted[name])
            rows.append(timing.row(case, name, "other bytes", moved / 1e9, "GB"))
            both, array = bound(function, moved)
            ready |= timing.compiled({BOUND.format(name): both}, [(*operands, array)])
        times, unit = timing.seconds(ready, options.rounds, options.burst), wanted[BF16].operands[2].nbytes
        for name, time in times.items():
            rows.append(timing.row(case, name, "time", time * 1e3, "ms", BF16, times[BF16] / time))
            if name in wanted:
                kept, most = wanted[name].kept, wanted[BF16].kept
                rows.append(timing.row(case, name, "kept", kept / unit, "U", BF16, most / kept))
        for name, call in ready.items():
            state = timing.clock_and_power(call)
            for metric, value, what in zip(("clock", "power"), state or (), ("MHz", "W"), strict=False):
                rows.append(timing.row(case, name, metric, value, what))
        save(rows)
    save(rows + timing.means(rows, "time"))
