"""Predicts memory and communication of a training step, as in "python -m experiments.plan --model 13b".

It needs the packages of the extra cuda13 or cuda12, but no GPU, and creates no arrays. Residuals are counted in the
program that JAX differentiates for a Hopper GPU with flash attention.
"""

import argparse
import functools
import math
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax
from experiments import mesh
from experiments.models import flash, sizes
from experiments.models.llama import Llama, LlamaConfig, products_saveable, rope_tables
from experiments.train import experts, parallel, tensor
from experiments.train.form import changes_layers, in_chunks
from fp8jax.core.tables import sentence
from fp8jax.dist import Plan, plan
from fp8jax.dist.collectives import Collective
from fp8jax.ops.dispatch import choice
from fp8jax.ops.losses.cross_entropy import num_chunks

# Bytes for each entry of the logits where most of them live at once: their gradient in fp32, and its cast to bf16. Read
# from the program of a bf16 model of two layers, compiled for an H200; no measured memory was used.
LOGITS = 4 + 2
# Gaps between arrays in XLA's memory, as a fraction of activations and logits: with a context, and with rematerialized
# bf16. Measured for `1b` on one H200 (8 x 2048 tokens: 1.21 of 12.14 GB, 5.08 of 16.87 GB). Other recipes have none.
CONTEXT_GAPS, BF16_GAPS = 0.10, 0.30


@jax.custom_vjp
def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A placeholder of attention for counting bytes. It never runs."""
    return jnp.zeros_like(q)


def _attention_residuals(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    output, root = jnp.zeros_like(q), jnp.zeros(q.shape[:-1], jnp.float32)
    output, root = (jax.ad_checkpoint.checkpoint_name(x, flash.NAME) for x in (output, root))
    return output, (q, k, v, output, root)


_attention.defvjp(_attention_residuals, lambda residuals, dy: (jnp.zeros_like(residuals[0]), *residuals[1:]))


def _policy(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Whether the model's own policy saves a result on a GPU.

    There, matmuls of codes are kernels, which are identified only by name.
    """
    if primitive.name == "name" and params["name"] == flash.NAME:
        return True
    return products_saveable(primitive, *operands, **params) and all(x.dtype == jnp.bfloat16 for x in operands)


def _residuals(run: Any, axis: str, devices: int, *args: Any) -> list[Any]:
    """Returns the residuals of a function, on each device along a mesh axis."""
    residuals = lambda *args: jax.tree.leaves(jax.vjp(run, *args)[1])  # noqa: E731
    if devices == 1:
        return jax.eval_shape(residuals, *args)  # type: ignore[no-any-return]
    where = jax.sharding.AbstractMesh((devices,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
    one_device = jax.shard_map(
        lambda *args: [x[None] for x in residuals(*args)],
        mesh=where, in_specs=jax.P(), out_specs=jax.P(axis), check_vma=False,
    )  # fmt: skip
    return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in jax.eval_shape(one_device, *args)]


@functools.cache
def saved_per_token(
    llama: LlamaConfig,
    recipe: fp8jax.Recipe,
    recompute: bool,
    shared: int = 1,
    expert: int = 1,
    expert_capacity: float = 0.0,
) -> float:
    """Returns residual bytes per token of one layer, with the kernels for Hopper GPUs.

    Args:
        llama: the shape.
        recipe: the recipe.
        recompute: whether only outputs of matmuls and attention are saved.
        shared: devices that share sequences; the result is per device.
        expert: devices that share experts.
        expert_capacity: the option of experiments.train.

    Raises:
        ValueError: the recipe changes layers, and the packages of its kernels are missing.
    """
    device_llama, boundary = llama, None
    if shared > 1:
        device_llama, boundary = (
            tensor.of_heads(llama, shared),
            tensor.TokenBoundary(shared, tensor.wire_format(recipe)),
        )

    def attend(query: Any, key: Any, value: Any, **settings: Any) -> jax.Array:
        return _attention(query, key, value)

    length = 256 * shared
    axis, devices = (experts.AXIS, expert) if expert > 1 else (tensor.AXIS, shared)
    products = None
    if llama.experts:
        sharing = experts.ExpertSharing(tensor.wire_format(recipe), expert_capacity) if expert > 1 else None
        products = experts.RecipeProducts(recipe, sharing)

    def device_shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        shape = x.shape[1:]
        return jax.ShapeDtypeStruct((shape[0] // expert, *shape[1:]) if mesh.has_experts(path) else shape, x.dtype)

    def count(sequences: int) -> int:
        def make() -> Any:
            model: Any = Llama(
                device_llama, dtype=jnp.bfloat16, boundary=boundary, expert_products=products, rngs=nnx.Rngs(0)
            )
            return (fp8jax.nnx.quantize(model, recipe) if changes_layers(recipe) else model).layers

        graph, block = nnx.split(nnx.eval_shape(make))
        block = jax.tree_util.tree_map_with_path(device_shape, block)
        tables = rope_tables(length, llama.head_dim, llama.rope_theta)
        run = lambda p, x: nnx.merge(graph, p)(x, *tables)  # noqa: E731
        run = jax.checkpoint(run, policy=_policy) if recompute else run
        x = jax.ShapeDtypeStruct((sequences * length // shared, llama.dim), jnp.bfloat16)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in _residuals(run, axis, devices, block, x))

    # Weights, rotary tables and other constants are in both counts.
    with choice.target(capability=90), mock.patch.object(jax.nn, "dot_product_attention", attend):
        if changes_layers(recipe) and (reason := choice.missing_kernels_reason()):
            raise ValueError(
                f"the plan of {recipe.name} counts the residuals of GPU kernels, which cannot be traced here: "
                f"{reason.partition(' (')[0]}. Install JAX for GPUs and jax-triton, also on a CPU: pip install "
                "'.[cuda13]' or '.[cuda12]'"
            )
        return (count(2) - count(1)) / length


def _is_read_twice(part: fp8jax.recipes.Linear) -> bool:
    """Returns whether a backward pass that recomputes all except matmuls reads their unquantized inputs.

    Inputs are the seed of stochastic rounding.
    """
    return not part.is_quantized or part.spec("x_residual") is None or part.is_stochastic


def of(
    llama: LlamaConfig,
    recipe: fp8jax.Recipe,
    where: dict[str, int],
    tokens: int,
    *,
    microbatches: int = 1,
    recompute: bool = False,
    partition: str = "",
    expert_capacity: float = 0.0,
) -> Plan:
    """Returns the plan of a model's step, with logits as by `--logits auto`.

    Args:
        llama: the shape.
        recipe: the recipe.
        where: sizes of the mesh axes.
        tokens: tokens of a microbatch per device; devices along "tensor" share theirs.
        microbatches: microbatches per batch.
        recompute: see `saved_per_token`.
        partition: see `fp8jax.dist.plan`.
        expert_capacity: the option of experiments.train.
    """
    params = nnx.to_pure_dict(nnx.eval_shape(lambda: nnx.state(Llama(llama, rngs=nnx.Rngs(0)), nnx.Param)))
    shared, expert = where.get(tensor.AXIS, 1), where.get(experts.AXIS, 1)
    layer = sum(
        x.size / (expert if mesh.has_experts(path) else 1)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if mesh.stacked(path)
    )
    if expert > 1:
        experts.check_devices(llama, expert)
    saved = saved_per_token(llama, recipe, recompute, shared, expert, expert_capacity)
    activations = tokens * shared * llama.layers * saved
    dims: Any = -1
    crossings: list[Collective] = []
    if shared > 1:
        tensor.check(llama, shared)
        dims = tensor.dimensions(params, shared)
        crossings = fp8jax.dist.sequence_collectives(
            tokens * shared, llama.dim, shared, tensor.wire_format(recipe), recipe.weights.compute,
            times=2 * llama.layers * microbatches,
            forward_gathers=2 if recompute and _is_read_twice(recipe.linear) else 1,
        )  # fmt: skip
    expert_dims: Any = -1
    if expert > 1:
        expert_dims = jax.tree_util.tree_map_with_path(
            lambda path, x: mesh.stacked(path) - 1 if mesh.has_experts(path) else -1, params
        )
        rows, times = int(tokens) * llama.experts_per_token, llama.layers * microbatches
        wire_format = tensor.wire_format(recipe)
        crossings = experts.exchanged(llama, expert, wire_format, int(tokens), recipe.weights.compute, times)
        # Router weights and their gradients are sent in fp32.
        if experts.gathers_tokens(expert, llama.experts_per_token):
            crossings.append(Collective("all-gather", "f32", 4 * rows, expert, times))
            crossings.append(Collective("reduce-scatter", "f32", 4 * rows * expert, expert, times))
        else:
            crossings.append(Collective("ragged-all-to-all", "f32", 4 * rows, expert, 2 * times))
    # The last hidden state before and after its norm, and the head's matrix, in bf16; in chunks, its gradient in fp32.
    chunked = recipe.head.is_quantized or in_chunks("auto", tokens, llama.vocab)
    # With an 8-bit head, logits, their gradient and its codes need as many bytes in all.
    at_once = tokens / num_chunks(int(tokens), llama.vocab, recipe.head.is_quantized) if chunked else tokens
    loss_bytes = at_once * LOGITS * llama.vocab + tokens * 2 * 2 * llama.dim
    loss_bytes += 4 * llama.vocab * llama.dim if chunked else 0
    loss_bytes += 0 if recipe.weights.param_format == recipe.weights.compute else 2 * llama.vocab * llama.dim
    step = plan(
        params,
        recipe,
        where,
        layer_axes=parallel.stacked(params),
        tensor_dims=dims,
        expert_dims=expert_dims,
        activation_collectives=crossings,
        microbatches=microbatches,
        activations=activations,
        logits=float(loss_bytes),
        unsharded=2 * layer / llama.layers / shared,
        partition=partition,
    )
    share = CONTEXT_GAPS if recipe.context.residual else 0.0
    if recompute and not recipe.linear.is_quantized:
        share = BF16_GAPS
    if share and step.peak == "loss":
        step = step._replace(memory=step.memory | {"gaps": share * (activations + loss_bytes)})
    return step


def main(argv: list[str] | None = None) -> int:
    """Prints the plan."""
    program = "python -m experiments.plan"
    parser = argparse.ArgumentParser(prog=program, usage=f"{program} [options]", description=__doc__)

    def add(name: str, default: Any, metavar: str, text: str) -> None:
        default_text = f" (default: {default})" if default else ""
        parser.add_argument(name, type=type(default), default=default, metavar=metavar, help=text + default_text)

    add("--model", "7b", "SIZE", ", ".join(sizes.NAMES))
    add("--recipe", "coat", "NAME", ", ".join(fp8jax.recipes.NAMES))
    add("--mesh", "data=1", "AXES", "devices by axis, such as data=2,fsdp=4 or data=2,tensor=4")
    add("--batch", 1, "N", "sequences of a microbatch on each device; devices along tensor share theirs")
    add("--length", 2048, "N", "tokens of a sequence")
    add("--microbatches", 1, "N", "microbatches of a step")
    add("--vocab", 32_000, "N", "entries of the vocabulary")
    parser.add_argument(
        "--partition", choices=("tensors", "slices"), default="", help="shard the optimizer state along data"
    )
    add(
        "--expert-capacity",
        0.0,
        "X",
        "room for X times the rows that a device sends to experts (default: for all rows)",
    )
    parser.add_argument("--recompute", action="store_true", help="save only results of matmuls and attention")
    options = parser.parse_args(argv)
    try:
        for name in ("batch", "length", "microbatches"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
        llama = sizes.get(options.model.removeprefix("llama-"), options.vocab)
        where, recipe = mesh.parse(options.mesh), fp8jax.recipes.get(options.recipe)
        mesh.check_partition(options.partition, where, llama.layers)
        plan = of(
            llama, recipe, where, options.batch * options.length, microbatches=options.microbatches,
            recompute=options.recompute, partition=options.partition, expert_capacity=options.expert_capacity,
        )  # fmt: skip
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    devices = math.prod(where.values())
    parts = f" in {options.microbatches} microbatches" if options.microbatches > 1 else ""
    per_device = f"each of {devices} devices" if devices > 1 else "one device"
    tokens = f"{options.batch} x {options.length} tokens{parts}"
    shared = f", --partition {options.partition}" if options.partition else ""
    print(sentence(f"{options.model}, recipe {recipe.name}, {options.mesh}{shared}: {per_device}, {tokens}"))
    print(plan.table())
    if "gaps" in plan.memory:
        print(
            "\n" + sentence("gaps are what XLA leaves empty between arrays, as measured on a model of 1.1 B parameters")
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
