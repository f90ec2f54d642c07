"""A layer of experts, forward and backward, by recipe: time, saved bytes and temporary memory, compared with bf16.

The layer (`experiments.models.moe.MoE`) has a router, experts, and the sorting and combining of tokens, with bf16
parameters. It saves tokens, gate and up (as codes in 8 bits), and recomputes the rest. "bf16" is this layer with
`fp8jax.ragged_dot` in 16 bits. "bf16, JAX's ragged_dot" uses `jax.lax.ragged_dot` as XLA compiles it, if it fits in
memory.

"saved": bytes saved for the backward pass, without parameters. "temporary memory": that of the compiled program of both
passes, including saved bytes. The time includes the quantization of weights. Tokens are normal noise, and a random
router chooses experts. "deepseek" has the context of `coat`. A ratio is the baseline's time or bytes divided by that of
the recipe.

With `--gpus`, experts are sharded over the GPUs. Each GPU has its own tokens. "sent" is the bytes that a GPU sends in
both passes. If there are at most as many GPUs as experts per token, each GPU gathers the tokens of all GPUs, in bf16
too. Otherwise it receives rows, with space for 1.25 times the rows that it sends.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax
from experiments import mesh
from experiments.bench import driver, timing
from experiments.bench.layer import LayerArm
from experiments.models.llama import LlamaConfig
from experiments.models.moe import ExpertProducts, MoE
from experiments.train import tensor
from experiments.train.experts import AXIS, ExpertSharing, RecipeProducts, exchanged

BF16, XLA = "bf16", "bf16, JAX's ragged_dot"
TOKENS = 16_384
CAPACITY = 1.25


def shape(dim: int, mlp_dim: int, experts: int, chosen: int) -> LlamaConfig:
    """Returns the shape of a layer of experts. Other fields of the model are unused."""
    return LlamaConfig(1, dim, 1, dim // 128, 1, mlp_dim, experts=experts, experts_per_token=chosen)


SHAPES = {
    "marin": shape(2560, 1280, 64, 8),
    "mixtral": shape(4096, 14336, 8, 2),
    "qwen3-30b-a3b": shape(2048, 768, 128, 8),
}
DRY = {"small": shape(256, 128, 4, 2)}


@dataclasses.dataclass(frozen=True)
class SharedLayerArm(LayerArm):
    """A layer whose experts are sharded over devices.

    Attributes:
        sharing: the mesh, and whether each parameter is sharded over it.
    """

    sharing: tuple[jax.sharding.Mesh, Any]

    def in_order(self, params: Any, codes: Any, x_NxD: jax.Array, dy_NxD: jax.Array) -> Any:
        devices, is_sharded = self.sharing

        def local(params: Any, x_NxD: jax.Array, dy_NxD: jax.Array) -> Any:
            y_NxD, (dparams, dx_NxD) = LayerArm.in_order(self, params, codes, x_NxD, dy_NxD)
            dparams = jax.tree.map(
                lambda sharded_leaf, g: g if sharded_leaf else jax.lax.psum(g, AXIS), is_sharded, dparams
            )
            return y_NxD, (dparams, dx_NxD)

        sharded = jax.P(AXIS)
        parts = jax.tree.map(lambda sharded_leaf: sharded if sharded_leaf else jax.P(), is_sharded)
        run = jax.shard_map(
            local,
            mesh=devices,
            in_specs=(parts, sharded, sharded),
            out_specs=(sharded, (parts, sharded)),
            check_vma=False,
        )
        return run(params, x_NxD, dy_NxD)


def arms(gpus: int = 1) -> dict[str, ExpertProducts]:
    """Returns the matmuls of experts by name of arm; the first is the baseline."""
    coat = fp8jax.recipes.coat()
    recipes = {
        BF16: fp8jax.recipes.bf16(),
        "coat_fast": fp8jax.recipes.coat_fast(),
        "coat": coat,
        "deepseek": dataclasses.replace(fp8jax.recipes.deepseek(), context=coat.context),
    }
    if gpus > 1:
        sharings = {name: ExpertSharing(tensor.wire_format(recipe), CAPACITY) for name, recipe in recipes.items()}
        return {name: RecipeProducts(recipe, sharings[name]) for name, recipe in recipes.items()}
    return {name: RecipeProducts(recipe) for name, recipe in recipes.items()} | {XLA: ExpertProducts()}


def make_layer(config: LlamaConfig, products: ExpertProducts, tokens: int, gpus: int = 1) -> LayerArm:
    """Returns a layer with abstract parameters and inputs, (tokens, width) per GPU."""
    dtypes: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    make = lambda: MoE(config, products=products, rngs=nnx.Rngs(0), **dtypes)  # noqa: E731
    graph, state = nnx.split(nnx.eval_shape(make), nnx.Param)
    params = nnx.to_pure_dict(state)
    x: Any = jax.ShapeDtypeStruct((gpus * tokens, config.dim), jnp.bfloat16)
    apply = lambda params, _, x_NxD: nnx.merge(graph, params)(x_NxD)  # noqa: E731
    if gpus == 1:
        return LayerArm(apply, (params, None, x, x))
    devices = mesh.make(1, 1, expert=gpus)
    is_sharded = jax.tree_util.tree_map_with_path(lambda path, _: "experts" in jax.tree_util.keystr(path), params)

    def place(leaf: Any, sharded_leaf: bool) -> Any:
        sharding = jax.sharding.NamedSharding(devices, jax.P(AXIS) if sharded_leaf else jax.P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    x = place(x, True)
    return SharedLayerArm(apply, (jax.tree.map(place, params, is_sharded), None, x, x), (devices, is_sharded))


def sent_megabytes(config: LlamaConfig, products: ExpertProducts, tokens: int, gpus: int) -> float:
    """Returns the megabytes of tokens or rows that a GPU sends in forward and backward."""
    assert isinstance(products, RecipeProducts)
    assert products.sharing is not None
    sent = exchanged(config, gpus, products.sharing.wire_format, tokens)
    return sum(collective.sent_bytes for collective in sent) / 1e6


def draw(layer: LayerArm) -> Any:
    """Returns normal operands. Matrices preserve the scale of their input; gradients of the output are small."""
    params, _, x, dy = layer.operands

    @jax.jit
    def make(key: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten((params, x, dy))
        scales = jax.tree.leaves((jax.tree.map(lambda leaf: leaf.shape[-2] ** -0.5, params), 1.0, 1e-3))
        drawn = zip(jax.random.split(key, len(leaves)), scales, leaves, strict=True)
        return jax.tree.unflatten(tree, [(s * jax.random.normal(k, z.shape)).astype(z.dtype) for k, s, z in drawn])

    drawn = make(jax.random.key(0, impl="rbg"))
    params, x, dy = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), drawn, (params, x, dy))
    return params, None, x, dy


def fits(program: Any) -> bool:
    """Returns whether a program's arrays fit on the device; true if the device does not report its memory."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    memory = program.memory_analysis()
    parts = ("argument", "output", "temp")
    return bool(sum(getattr(memory, f"{part}_size_in_bytes") for part in parts) < 0.9 * limit)


def measure(
    case: str,
    layers: dict[str, LayerArm],
    programs: dict[str, concurrent.futures.Future],
    rounds: int,
    burst: float,
    patience: float,
) -> list[timing.Row]:
    """Returns the rows of one shape. An arm that fails or does not fit is reported and left out.

    Args:
        case: case of the rows.
        layers: layers by arm.
        programs: functions that compile both passes of each layer.
        rounds, burst: arguments of `timing.seconds`.
        patience: seconds until a program counts as failed.
    """
    saved = {name: layer.saved for name, layer in layers.items() if not isinstance(layer, SharedLayerArm)}
    rows = [timing.row(case, name, "kept", size / 1e6, "MB", BF16, saved[BF16] / size) for name, size in saved.items()]
    ready, temporary = dict[str, Callable[[], Any]](), dict[str, int]()
    operands, expected = draw(layers[BF16]), None
    for name, future in programs.items():
        try:
            program = future.result(patience)
            temporary[name] = program.memory_analysis().temp_size_in_bytes
            if not fits(program):
                print(f"  {case} {name}: {temporary[name] / 1e9:.1f} GB of temporaries do not fit", flush=True)
                continue
            results = jax.block_until_ready(program(*operands))
        except Exception as problem:
            timing.report_failure(f"{case} {name}", problem)
            continue
        if name == BF16:
            expected = results
        elif expected is not None:
            rows.append(timing.row(case, name, "error", float(driver.relative_error(results, expected)), f"of {BF16}"))
        ready[name] = functools.partial(program, *operands)
    del expected
    for name, size in temporary.items():
        ratio = temporary[BF16] / size if BF16 in temporary else None
        rows.append(timing.row(case, name, "temporaries", size / 1e6, "MB", BF16, ratio))
    times = timing.seconds(ready, rounds, burst)
    return rows + [
        driver.time_row(case, name, "time", t, BF16, times[BF16] / t if BF16 in times else None)
        for name, t in times.items()
    ]


def main(argv: list[str]) -> None:
    names = list(arms())
    parser = driver.parser("moe", __doc__, rounds=5, burst=0.1)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--only", nargs="+", choices=names[1:], default=names[1:], help=f"beside {BF16}")
    parser.add_argument("--patience", type=float, default=120, help="seconds until a program counts as failed")
    parser.add_argument("--workers", type=int, default=12, help="programs that compile simultaneously")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that share experts; each has its own tokens")
    options = parser.parse_args(argv)
    timing.need_gpu()
    title = f"A layer of experts, {options.tokens} tokens, forward and backward"
    if options.gpus > 1:
        title = f"A layer of experts over {options.gpus} GPUs, {options.tokens} tokens on each, forward and backward"
    file = driver.ResultsFile(options, title, driver.notes_of(__doc__), devices=options.gpus)
    shapes = DRY if timing.dry() else {name: SHAPES[name] for name in options.shapes}
    ways = {name: products for name, products in arms(options.gpus).items() if name in (BF16, *options.only)}
    tokens = 256 if timing.dry() else options.tokens
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        layers = {
            case: {name: make_layer(shape, way, tokens, options.gpus) for name, way in ways.items()}
            for case, shape in shapes.items()
        }
        programs = {
            case: {name: pool.submit(timing.traced, arm.in_order, *arm.operands) for name, arm in these.items()}
            for case, these in layers.items()
        }
        for case, these in layers.items():
            if options.gpus > 1:
                sent = {name: sent_megabytes(shapes[case], way, tokens, options.gpus) for name, way in ways.items()}
                file.add([timing.row(case, name, "sent", mb, "MB", BF16, sent[BF16] / mb) for name, mb in sent.items()])
            file.add(measure(case, these, programs.pop(case), options.rounds, options.burst, options.patience))
    file.end("time", "kept", "temporaries")
