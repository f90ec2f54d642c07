"""A Llama layer, forward and backward, by recipe: time and saved bytes, compared with bf16 with cuDNN attention.

The layer is a plain Flax module (`experiments.models.llama.Block`) with bf16 parameters, quantized by
`fp8jax.nnx.quantize`. "as functions": the same layer, written with functions of fp8jax. "bf16, rematerialized" saves
the outputs of matmuls and attention, and recomputes norms, SiLU and rotary embeddings. COAT (Xi et al., ICLR 2025),
Table 7, reports 1.57 times the speed and 1.65 times fewer bytes.

"prequantized weights": the time does not include the quantization of weights, which is done once per step. Its time is
"codes of the weights". "time, N microbatches" includes the share of one microbatch. Saved bytes are compared with bf16
Flax modules (norms and SiLU in fp32), with rematerialized bf16, and with the 22.66 U that the paper counts for bf16.
A ratio is the baseline's time or bytes divided by that of the recipe.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax
from experiments.bench import driver, timing
from experiments.bench.arms import FAITHFUL, LEAN, REMATERIALIZED, coat_recipes, save_products
from experiments.models.llama import Block, LlamaConfig, apply_rope, attend, rope_tables

CONFIG = LlamaConfig(vocab=256, dim=4096, layers=1, heads=32, kv_heads=32, mlp_dim=11008)
BF16, BATCH = "bf16", 4
PREQUANTIZED, BOUNDED, FUNCTIONS = "weights held", "bounded scales", "as functions"
BF16_FUNCTIONS, BF16_REMATERIALIZED = f"{BF16}, {FUNCTIONS}", REMATERIALIZED
WEIGHTS, MICROBATCHES = "codes of the weights", (1, 4, 16)
PAPER, PAPER_BF16 = "the paper's bf16", 22.66
SETTLING = 30  # steps; each changes a threshold by at most a factor of 1.3
# Recipes that RESULTS.md and README.md quote.
QUICK = f"{LEAN}, {BOUNDED}, {PREQUANTIZED}"
ARMS = ("te_current", FAITHFUL, LEAN, QUICK, f"{QUICK}, {FUNCTIONS}", "moss", "fast",
        "int8_fallback")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LayerArm:
    """A layer by a recipe.

    Attributes:
        layer: a function of parameters, codes of weights and inputs (N, D).
        operands: the arguments of `layer`, and the output's gradient (N, D).
    """

    layer: Callable[..., jax.Array]
    operands: tuple[Any, Any, jax.Array, jax.Array]

    def three(self, params: Any, codes: Any, x_NxD: jax.Array, dy_NxD: jax.Array) -> Any:
        """Forward and backward: returns the output and the gradients of parameters and inputs."""
        y_NxD, vjp = self._vjp(params, codes, x_NxD)
        return y_NxD, vjp(dy_NxD)

    def in_order(self, params: Any, codes: Any, x_NxD: jax.Array, dy_NxD: jax.Array) -> Any:
        """`three`, with a backward pass that starts after the output, as in training. XLA could reorder them."""
        y_NxD, vjp = self._vjp(params, codes, x_NxD)
        y_NxD, dy_NxD = jax.lax.optimization_barrier((y_NxD, dy_NxD))
        return y_NxD, vjp(dy_NxD)

    def forward(self, params: Any, codes: Any, x_NxD: jax.Array, _: jax.Array) -> Any:
        """Returns the output, and the residuals without parameters and their codes."""
        y_NxD, vjp = self._vjp(params, codes, x_NxD)
        weights = {leaf.shape[-2:] for leaf in jax.tree.leaves(params)}
        weights |= {shape[::-1] for shape in weights} | {leaf.shape for leaf in jax.tree.leaves(params)}
        return y_NxD, [leaf for leaf in jax.tree.leaves(vjp) if leaf.shape not in weights]

    @property
    def saved(self) -> int:
        """Bytes of the residuals of `forward`."""
        leaves = jax.eval_shape(self.forward, *self.operands)[1]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def _vjp(self, params: Any, codes: Any, x_NxD: jax.Array) -> Any:
        return jax.vjp(lambda params, x_NxD: self.layer(params, codes, x_NxD), params, x_NxD)


def functions(
    params: Any, codes: Any, x_NxD: jax.Array, *, tables: Any, recipe: fp8jax.Recipe, eps: float
) -> jax.Array:
    """Returns the layer written with fp8jax's functions. They add the residual's gradient in the norm's backward."""
    kernels, (length, half) = _kernels(params), tables[0].shape

    def normed(x_NxD: jax.Array, norm: str, *names: str) -> tuple[jax.Array, ...]:
        scale, weights, weight_codes = (
            params[norm]["scale"],
            [kernels[name] for name in names],
            [codes[name] for name in names],
        )
        return fp8jax.norm_linear(x_NxD, scale, weights, recipe=recipe, eps=eps, residual=True, quantized=weight_codes)

    x_NxD, *qkv = normed(x_NxD, "attention_norm", "q", "k", "v")
    q, k, v = (y.reshape(-1, length, y.shape[-1] // (2 * half), 2 * half) for y in qkv)
    y = attend(apply_rope(q, *tables), apply_rope(k, *tables), v, is_causal=True)
    out = fp8jax.attention_output(y, kernels["out"], recipe=recipe, quantized=codes["out"])
    x_NxD, gate, up = normed(x_NxD + out.reshape(x_NxD.shape), "mlp_norm", "gate", "up")
    return fp8jax.glu_linear(gate, up, kernels["down"], x_NxD, recipe=recipe, quantized=codes["down"])


def _kernels(params: Any) -> dict[str, jax.Array]:
    return {name: w["kernel"] for part in ("attention", "mlp") for name, w in params[part].items()}


def recipes() -> dict[str, fp8jax.Recipe]:
    """Returns the recipes that are compared with bf16."""
    presets = {name: recipe for name, recipe in coat_recipes().items() if recipe is not None}
    context = dataclasses.replace(presets[LEAN].context, amax="bound")
    presets[f"{LEAN}, {BOUNDED}"] = dataclasses.replace(fp8jax.recipes.coat_fast(), context=context)
    for name in ("moss", "fast"):
        recipe = fp8jax.recipes.get(name)
        # A single layer has no optimizer whose updates automatic scaling could follow.
        presets[name] = dataclasses.replace(recipe, linear=dataclasses.replace(recipe.linear, w_scaling=None))
    return presets | {name: fp8jax.recipes.get(name) for name in ("int8_block", "int8_fallback")}


def arms(length: int, config: LlamaConfig = CONFIG, names: Sequence[str] | None = None) -> dict[str, LayerArm]:
    """Returns layers by recipe, all or those in `names`. The three bf16 layers are always included.

    With `PREQUANTIZED`, weights are quantized before, as for microbatches.
    """
    bf16_block = nnx.eval_shape(lambda: Block(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(0), 64))
    draw = lambda shape: jax.random.normal(next(keys), shape, jnp.bfloat16)  # noqa: E731
    shapes = nnx.to_pure_dict(nnx.state(bf16_block, nnx.Param))
    params = jax.tree.map(lambda s: 0.02 * draw(s.shape) if s.ndim > 1 else jnp.ones(s.shape, s.dtype), shapes)
    x_NxD, dy_NxD = draw((BATCH * length, config.dim)), 1e-3 * draw((BATCH * length, config.dim))
    tables = rope_tables(length, config.head_dim, config.rope_theta)

    def arm(block: Block) -> LayerArm:
        graph, _, codes = nnx.split(block, nnx.Param, ...)  # type: ignore[misc]
        layer = lambda params, codes, x_NxD: nnx.merge(graph, params, codes)(x_NxD, *tables)  # noqa: E731
        return LayerArm(layer, (params, nnx.to_pure_dict(codes), x_NxD, dy_NxD))

    def with_adapted_thresholds(block: Block) -> Block:
        """Returns the states with adapted thresholds, which follow the share of fallback blocks as in training."""
        graph, _, states = nnx.split(block, nnx.Param, ...)  # type: ignore[misc]

        @jax.jit
        def advanced(states: Any) -> Any:
            block = nnx.merge(graph, params, states)
            block(x_NxD, *tables)
            fp8jax.nnx.advance_scaling(block, nnx.State({}))
            return nnx.split(block, nnx.Param, ...)[2]  # type: ignore[misc]

        states = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), states)
        for _ in range(SETTLING):
            states = advanced(states)
        return nnx.merge(graph, params, states)

    programs = {BF16: arm(bf16_block)}
    layer, operands = programs[BF16].layer, programs[BF16].operands
    programs[BF16_REMATERIALIZED] = LayerArm(jax.checkpoint(layer, policy=save_products), operands)
    call = functools.partial(functions, tables=tables, eps=config.norm_eps)
    no_codes = dict.fromkeys(_kernels(params))
    programs[BF16_FUNCTIONS] = LayerArm(
        functools.partial(call, recipe=fp8jax.recipes.bf16()), (params, no_codes, x_NxD, dy_NxD)
    )
    for name, recipe in recipes().items():
        if names is None or name in names:
            block = fp8jax.nnx.quantize(bf16_block, recipe)
            programs[name] = arm(with_adapted_thresholds(block) if recipe.linear.stateful_strategies else block)
        if f"{name}, {PREQUANTIZED}, {FUNCTIONS}" in (names or ()):
            make = jax.jit(functools.partial(fp8jax.quantize_weight, recipe=recipe))
            codes = {n: make(w) for n, w in _kernels(params).items()}
            with_recipe = functools.partial(call, recipe=recipe)
            programs[f"{name}, {PREQUANTIZED}, {FUNCTIONS}"] = LayerArm(with_recipe, (params, codes, x_NxD, dy_NxD))
        prequantized = f"{name}, {PREQUANTIZED}"
        if prequantized in names if names is not None else name.startswith("COAT"):
            graph, _ = nnx.split(fp8jax.nnx.quantize(bf16_block, recipe), nnx.Param)
            programs[prequantized] = arm(fp8jax.nnx.quantize_weights(nnx.merge(graph, params)))
    return programs


def weights(arm: LayerArm) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function that quantizes all weights of a layer once, and its operands. All recipes share it."""
    make = functools.partial(fp8jax.quantize_weight, recipe=fp8jax.recipes.coat())
    return lambda kernels: [make(w) for w in kernels], (list(_kernels(arm.operands[0]).values()),)


def main(argv: list[str]) -> None:
    parser = driver.parser("layer", __doc__, rounds=5, burst=0.05)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    forms = "", f", {PREQUANTIZED}", f", {PREQUANTIZED}, {FUNCTIONS}"
    names = [
        f"{name}{form}"
        for name, r in recipes().items()
        for form in (forms[:1] if r.linear.stateful_strategies else forms)
    ]
    listed = (
        f"one of {', '.join(map(repr, recipes()))}; any with ', {PREQUANTIZED}', or ', {PREQUANTIZED}, {FUNCTIONS}'"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="RECIPE", default=list(ARMS), help=listed)
    options = parser.parse_args(argv)
    timing.need_gpu()
    file = driver.ResultsFile(options, "A layer of Llama-7B, forward and backward", driver.notes_of(__doc__))
    for length in [16] if timing.dry() else options.lengths:
        file.add(measure(length, options))
    file.end("time")


def measure(length: int, options: argparse.Namespace) -> list[timing.Row]:
    """Returns the rows of one length."""
    config = dataclasses.replace(CONFIG, dim=256, heads=2, kv_heads=2, mlp_dim=512) if timing.dry() else CONFIG
    layers, case = arms(length, config, options.only), f"batch {BATCH}, length {length}"
    ready: dict[str, Callable[..., Any]] = {}
    for name, arm in layers.items():
        ready |= timing.compiled({name: arm.three}, [arm.operands])
    make, kernels = weights(layers[BF16])
    ready |= timing.compiled({WEIGHTS: make}, [kernels])
    times = timing.seconds(ready, options.rounds, options.burst)
    return time_rows(case, times) + saved_rows(case, layers)


def time_rows(case: str, times: dict[str, timing.Seconds]) -> list[timing.Row]:
    """Returns times in ms relative to the three bf16 layers, and with the share of quantizing the weights."""
    rows = []
    for name, time in times.items():
        if name == WEIGHTS:
            rows.append(driver.time_row(case, name, "time once a step", time))
            continue
        rows.append(driver.time_row(case, name, "time", time, BF16, times[BF16] / time))
        for label, base in ((FUNCTIONS, BF16_FUNCTIONS), ("", BF16_REMATERIALIZED)):
            if label in name and name != base:
                rows.append(driver.time_row(case, name, f"time, {base}", time, base, times[base] / time))
        for count in MICROBATCHES if PREQUANTIZED in name else ():
            total = time + times[WEIGHTS] / count
            metric = f"time, {count} microbatch{'es' if count > 1 else ''}"
            rows.append(timing.row(case, name, metric, 1e3 * total, "ms", BF16, times[BF16] / total))
    return rows


def saved_rows(case: str, layers: dict[str, LayerArm]) -> list[timing.Row]:
    """Returns saved bytes in U, relative to bf16 Flax modules, rematerialized bf16, and the paper's count for bf16."""
    rows, unit = [], layers[BF16].operands[2].nbytes
    baselines = {
        BF16: layers[BF16].saved / unit,
        BF16_REMATERIALIZED: layers[BF16_REMATERIALIZED].saved / unit,
        PAPER: PAPER_BF16,
    }
    for name, arm in layers.items():
        saved = arm.saved / unit
        for base, baseline_size in baselines.items():
            metric = "kept" if base == BF16 else f"kept, {base}"
            rows.append(timing.row(case, name, metric, saved, "U", base, baseline_size / saved))
    return rows
