"""Compiles programs for several GPU models in one process without a GPU.

Run `python targets.py FUNCTION,... KIND...`. Each function of this file returns programs by name, with the shapes of
their arguments. The output lists their compiled products and collectives.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
# Compute capability by GPU model. A file in this folder describes each model to XLA.
CAPABILITIES = {"t4": 75, "a100": 80, "l4": 89, "h200": 90, "b200": 100, "rtx_pro_6000": 120}
MARK = "found: "
_ARRAY = re.compile(r"(\w+)\[([\d,]+)\]")
# Functions whose programs use several GPUs.
MESHES = {
    "sharded": {"fsdp": 2},
    "few_sharded": {"fsdp": 2},
    "block_scaled_sharded": {"fsdp": 2},
    "switchback": {"fsdp": 2},
    "by_hand": {"data": 2, "fsdp": 2},
}
WITHOUT_KERNELS = " without kernels"
FP8 = "--xla_gpu_enable_triton_gemm=false"
Programs = dict[str, tuple[Any, ...]]  # name -> function, the shapes of its arguments and, if sharded, their shardings


def report(functions: str, gpus: list[str], flags: str = "") -> dict[str, Any]:
    """Returns, by GPU model and program, `fp8jax.modules.compiled.Product`s as lists, warnings, and collectives.

    Args:
        functions: names of functions of this file, separated by commas, with the same mesh.
        kinds: GPU models.
        flags: XLA_FLAGS.
    """
    env = os.environ | {
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.kernels.targets", functions, *gpus]
    completed = subprocess.run(command, env=env, capture_output=True, text=True, cwd=FOLDER.parents[1])
    if completed.returncode:
        raise RuntimeError(f"{functions} does not compile for {gpus}:\n{completed.stderr[-3000:]}")
    (printed,) = (line.removeprefix(MARK) for line in completed.stdout.splitlines() if line.startswith(MARK))
    actual: dict[str, Any] = json.loads(printed)
    return actual


def linears() -> Programs:
    """The forward and backward pass of a linear layer for each way to quantize it, in fp32, the widest dtype.

    Odd sizes make XLA pad 8-bit operands.
    """
    import jax
    import jax.numpy as jnp

    import fp8jax

    results: Programs = {}
    parts = {name: fp8jax.recipes.get(name).linear for name in fp8jax.recipes.NAMES}
    plain = parts["bf16"]
    parts = {name: part for name, part in parts.items() if part != plain}
    for name, recipe in {part: name for name, part in reversed(parts.items())}.items():
        results[recipe] = (
            _linear(name),
            tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((132, 260), (260, 388), (132, 388))),
        )
    return results


def _linear(part: Any) -> Callable[..., Any]:
    import jax

    import fp8jax

    specs = [part.spec(role) for role in ("x", "w", "x_residual", "dy", "dy_wgrad")]
    stochastic = any(spec is not None and spec.rounding == "stochastic" for spec in specs)
    observes = any(strategy.collects_stats for strategy in part.stateful_strategies.values())
    scaling = dataclasses.replace(part, scaling="current") if observes else part

    def program(x: Any, w: Any, dy: Any) -> Any:
        key = jax.random.key(0) if stochastic else None
        y, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=scaling, key=key), x, w)
        return y, vjp_fn(dy)

    return program


def few() -> Programs:
    """One program of each kind, with none of our kernels, and with XLA_FLAGS that are set after XLA has read them."""
    os.environ["XLA_FLAGS"] = FP8
    all_ = linears()
    return {
        name: (_without_kernels(all_[name][0]), all_[name][1]) for name in ("te_current", "switchback", "int8_block")
    }


def _without_kernels(program: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a program without our kernels."""
    from fp8jax.ops.dispatch import choice

    def run(*args: Any) -> Any:
        with choice.target(kernels=False):
            return program(*args)

    return run


def decoded() -> Programs:
    """Linear layers in bf16 whose codes are decoded. No other array has the size of the gradient or of the input.

    For matrices that fit into the cache, XLA would rather write an fp32 copy than compute it twice.
    """
    import jax
    import jax.numpy as jnp

    import fp8jax

    shapes = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16384, 2048), (2048, 4096), (16384, 4096)))
    return {
        name: (_without_kernels(_linear(fp8jax.recipes.get(name).linear)), shapes)
        for name in ("int8_block", "deepseek")
    }


def block_scaled() -> Programs:
    """The forward and backward pass of a linear layer in mxfp8 and in nvfp4, in sizes that block scales divide."""
    import jax
    import jax.numpy as jnp

    import fp8jax

    shapes = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 512), (512, 768), (1024, 768)))
    return {name: (_linear(fp8jax.recipes.get(name).linear), shapes) for name in ("mxfp8", "nvfp4")}


def block_scaled_sharded() -> Programs:
    """The same with two GPUs that shard the weight, its gradient and the input."""
    return {name: _shard_rows(program, shapes) for name, (program, shapes) in block_scaled().items()}


def _shard_rows(program: Callable[..., Any], shapes: Any) -> Any:
    """Returns a linear layer and its arguments, sharded along the rows of all arrays and of dw over two GPUs."""
    import jax

    rows = jax.P("fsdp", None)

    def run(*args: Any) -> Any:
        y, (dx, dw) = program(*args)
        return y, dx, jax.lax.with_sharding_constraint(dw, rows)

    return run, shapes, (rows, rows, rows)


def block_scaled_models() -> Programs:
    """Loss and gradients in mxfp8 and nvfp4 of four blocks: a Llama in NNX, in a loop, and a Linen model."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import fp8jax
    from experiments.models.llama import Llama, LlamaConfig

    class Blocks(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for i in range(4):
                h = nn.silu(nn.Dense(256, name=f"up_{i}", dtype=jnp.bfloat16)(nn.RMSNorm(dtype=jnp.bfloat16)(x)))
                x = x + nn.Dense(128, name=f"down_{i}", dtype=jnp.bfloat16)(h)
            return nn.Dense(64, name="head", dtype=jnp.bfloat16)(x)

    llama = nnx.eval_shape(lambda: Llama(LlamaConfig(256, 128, 4, 4, 2, 384), rngs=nnx.Rngs(0)))
    graphdef, weights = nnx.split(llama)
    tokens, rows = jax.ShapeDtypeStruct((8, 64), jnp.int32), jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)
    variables = jax.eval_shape(Blocks().init, jax.random.key(0), rows)

    def program(model: Callable[..., Any], recipe: str) -> Callable[..., Any]:
        fast = fp8jax.transform(model, recipe)
        return jax.value_and_grad(lambda w, x: jnp.sum(fast(w, x).astype(jnp.float32) ** 2))

    models = {
        "llama": (lambda w, tokens: nnx.merge(graphdef, w)(tokens), (weights, tokens)),
        "linen": (Blocks().apply, (variables, rows)),
    }
    return {
        f"{recipe} {name}": (program(model, recipe), shapes)
        for recipe in ("mxfp8", "nvfp4")
        for name, (model, shapes) in models.items()
    }


def round_trips() -> Programs:
    """Values that are quantized and decoded in one program."""
    import jax
    import jax.numpy as jnp

    import fp8jax

    def program(spec: str) -> Callable[..., Any]:
        return lambda x: fp8jax.quantize(x, spec).dequantize(jnp.float32)

    shapes = (jax.ShapeDtypeStruct((64, 256), jnp.float32),)
    return {spec: (program(spec), shapes) for spec in ("e4m3", "e5m2:group128", "e4m3:mx32", "fp16")}


def sharded() -> Programs:
    """A linear layer whose weight, its gradient and the input are sharded over two GPUs (FSDP), with each matmul
    kernel.

    One program has none of our kernels. The weight is in fp32, as in layers.
    """
    import jax
    import jax.numpy as jnp

    import fp8jax

    dtypes = jnp.bfloat16, jnp.float32, jnp.bfloat16
    sizes = (1024, 512), (512, 256), (1024, 256)
    shapes = tuple(jax.ShapeDtypeStruct(*how) for how in zip(sizes, dtypes, strict=True))
    parts = {name: fp8jax.recipes.get(name).linear for name in ("te_current", "deepseek", "fast", "int8_block")}
    actual = {name: _shard_rows(_linear(part), shapes) for name, part in parts.items()}
    selected = {name: actual[name] for name in ("deepseek", "int8_block")}
    plain = {
        f"{name}{WITHOUT_KERNELS}": (_without_kernels(program), *rest) for name, (program, *rest) in selected.items()
    }
    return actual | plain


def few_sharded() -> Programs:
    """One program each: cuBLASLt, a kernel of ours, and none."""
    all_ = sharded()
    return {name: all_[name] for name in ("te_current", "deepseek", f"int8_block{WITHOUT_KERNELS}")}


def switchback() -> Programs:
    """A linear layer of int8 rows with a per-tensor weight, sharded over two GPUs along tokens or along inputs."""
    import jax

    import fp8jax

    program, (shapes, _) = _linear(fp8jax.recipes.switchback().linear), sharded()["fast"][1:]
    return {
        "tokens": (program, shapes, (jax.P("fsdp"), jax.P("fsdp"), jax.P("fsdp"))),
        "inputs": (program, shapes, (jax.P(None, "fsdp"), jax.P("fsdp"), jax.P())),
    }


def by_hand() -> Programs:
    """The same inside a `jax.shard_map` over "data" only. JAX sums the gradients if it checks varying axes."""
    import jax

    tokens, rows = jax.P(("data", "fsdp"), None), jax.P("fsdp", None)
    results: Programs = {}
    programs = sharded()
    for name, check in (("fast", True), ("int8_block", False)):
        program, shapes, _ = programs[name]

        def step(x: Any, w: Any, dy: Any, program: Any = program, check: bool = check) -> Any:
            y, dx, dw = program(x, w, dy)
            return y, dx, dw if check else jax.lax.psum(dw, "data")

        specs = (jax.P("data"), jax.P(), jax.P("data")), (jax.P("data"), jax.P("data"), jax.P())
        mapped = jax.shard_map(step, in_specs=specs[0], out_specs=specs[1], axis_names={"data"}, check_vma=check)
        x, w, dy = shapes
        x, dy = (jax.ShapeDtypeStruct((2 * part.shape[0], part.shape[1]), part.dtype) for part in (x, dy))
        results[name] = mapped, (x, w, dy), (tokens, rows, tokens)
    return results


def experts() -> Programs:
    """The forward and backward pass of a grouped product with block scales: with and without a kernel."""
    import jax
    import jax.numpy as jnp

    import fp8jax

    def int8_fallback(x: Any, w: Any, dy: Any, sizes: Any) -> Any:
        recipe, state = fp8jax.recipes.int8_fallback().linear, fp8jax.init_scaling("int8_fallback")
        states = jax.tree.map(lambda s: jnp.broadcast_to(s, (w.shape[0], *s.shape)), state)
        run = lambda x, w: fp8jax.scaled_ragged_dot(x, w, sizes, states, recipe=recipe, key=jax.random.key(0))[0]  # noqa: E731
        y, vjp_fn = jax.vjp(run, x, w)
        return y, vjp_fn(dy)

    def jetfire(x: Any, w: Any, dy: Any, sizes: Any) -> Any:
        run = lambda x, w: fp8jax.ragged_dot(x, w, sizes, recipe="jetfire", key=jax.random.key(0))  # noqa: E731
        y, vjp_fn = jax.vjp(run, x, w)
        return y, vjp_fn(dy)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (4, 256, 384), (512, 384))]
    arguments = (*shapes, jax.ShapeDtypeStruct((4,), jnp.int32))
    return {"int8_fallback": (int8_fallback, arguments), "jetfire": (jetfire, arguments)}


def ten_bits() -> Programs:
    """The forward and backward pass of a norm and linear layers, and of a gated activation and a layer
    (`int8_fallback`)."""
    import jax
    import jax.numpy as jnp

    import fp8jax
    from fp8jax.ops.products.linear import ScalingState

    recipe = fp8jax.recipes.int8_fallback()

    def block(x: Any, scale: Any, gate: Any, up: Any, down: Any) -> Any:
        def linear(x: Any, w: Any, i: int) -> Any:
            state = ScalingState(x=jnp.ones((), jnp.float32))
            return fp8jax.scaled_linear(x, w, state, recipe=recipe, key=jax.random.key(i))[0]

        h = fp8jax.rms_norm(x, scale, recipe=recipe)
        h = fp8jax.glu(linear(h, gate, 0), linear(h, up, 1), recipe=recipe)
        return x + linear(h, down, 2)

    def program(x: Any, scale: Any, gate: Any, up: Any, down: Any, dy: Any) -> Any:
        y, vjp_fn = jax.vjp(block, x, scale, gate, up, down)
        return y, vjp_fn(dy)

    m, n, inner = 1024, 512, 1280
    shapes = (m, n), (n,), (n, inner), (n, inner), (inner, n), (m, n)
    return {"block": (program, tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))}


def observed() -> Programs:
    """Gradients of four gated blocks, without and with telemetry."""
    import jax
    import jax.numpy as jnp

    import fp8jax

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
            x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
        return jnp.mean(jnp.square(x))

    width, inner = 512, 1536
    shapes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    params = [{name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()} for _ in range(4)]
    program = jax.grad(fp8jax.transform(loss, "coat"))
    arguments = (params, jax.ShapeDtypeStruct((8192, width), jnp.bfloat16))
    return {"plain": (program, arguments), "observed": (fp8jax.telemetry(program), arguments)}


def _kernels(text: str) -> dict[str, int]:
    """Returns the number of calls of each Triton kernel."""
    calls = re.findall(r" custom-call\(.*triton_kernel_call.*", text)
    names = (re.search(r'op_name="[^"]*?(\w+)/triton_kernel_call', call) for call in calls)
    return dict(collections.Counter(name[1] if name else "" for name in names))


def _bytes(text: str) -> list[str]:
    """Returns the shapes of byte arrays that instructions other than kernels read or write."""
    shapes: dict[str, str] = {}
    results = set()
    for name, result, op, operands in re.findall(
        r"^ +(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*?)\)", text.split("ENTRY", 1)[1], re.MULTILINE
    ):
        arrays = [shape for dtype, shape in _ARRAY.findall(result) if dtype == "u8"]
        if arrays:
            shapes[name] = arrays[0]
        if op not in ("custom-call", "get-tuple-element", "tuple", "parameter"):
            results |= {*arrays, *(shapes[n] for n in re.findall(r"%([\w.-]+)", operands) if n in shapes)}
    return sorted(results)


def _gathers(text: str) -> list[tuple[str, list[int]]]:
    """Returns dtype and shape of gathered arrays; for several arrays at once, of the gathered ones, which come last."""
    found = []
    for results, start in re.findall(r"= (.*?) all-gather(-start)?\(", text):
        arrays = _ARRAY.findall(results)
        arrays = arrays[len(arrays) // 2 :] if start else arrays
        found += [(dtype, [int(n) for n in shape.split(",")]) for dtype, shape in arrays]
    return found


def _written(text: str, *dtypes: str) -> dict[str, int]:
    """Returns how many matrices of each shape fusions and copies write to memory."""
    entry = text.split("ENTRY", 1)[1]
    results = re.findall(r"^ +(?:ROOT )?%\S+ = (.*?) (?:fusion|copy|transpose)\(", entry, re.MULTILINE)
    arrays = [array for result in results for array in _ARRAY.findall(result)]
    return dict(collections.Counter(shape for dtype, shape in arrays if dtype in dtypes and "," in shape))


def _placed(sharding: Any, shape: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def main() -> None:
    import jax
    import numpy as np
    from jax.experimental import topologies

    from fp8jax.dist.collectives import collectives
    from fp8jax.modules import compiled
    from fp8jax.ops.dispatch import choice

    results: dict[str, Any] = {}
    functions, *gpu_names = sys.argv[1:]
    for gpu in gpu_names:
        config = (FOLDER / f"{gpu}.txtpb").read_text()
        sizes = MESHES.get(functions, {"fsdp": 1})
        gpus = math.prod(sizes.values())
        topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{gpus}")
        mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(*sizes.values()), tuple(sizes))
        results[gpu] = {}
        # XLA reads its flags when it compiles the first program.
        one = jax.ShapeDtypeStruct((), float, sharding=jax.sharding.NamedSharding(mesh, jax.P()))
        jax.jit(lambda x: x).lower(one).compile()
        with choice.target(capability=CAPABILITIES[gpu]), jax.set_mesh(mesh) if gpus > 1 else contextlib.nullcontext():
            programs = {name: programs_of for x in functions.split(",") for name, programs_of in globals()[x]().items()}
            for name, (program, shapes, *specs) in programs.items():
                where = specs[0] if specs else [jax.P()] * len(shapes)
                placed = [
                    jax.tree.map(functools.partial(_placed, jax.sharding.NamedSharding(mesh, spec)), s)
                    for s, spec in zip(shapes, where, strict=True)
                ]
                with choice.record_choices() as choices:
                    executable: Any = jax.jit(program).lower(*placed).compile()
                text = executable.as_text()
                products = compiled.parse_products(text)
                results[gpu][name] = {
                    "products": [dataclasses.astuple(p) for p in products],
                    "warnings": compiled.describe_widened(products, choices),
                    "dtypes": sorted({dtype for dtype, _ in _ARRAY.findall(text)}),
                    "loops": len(re.findall(r" while\(", text)),
                    "gathers": _gathers(text),
                    "kernels": _kernels(text),
                    "bytes": _bytes(text),
                    "written": _written(text, "bf16", "f16"),
                    "wide": _written(text, "f32", "s32"),
                    "temporaries": executable.memory_analysis().temp_size_in_bytes,
                    "sums": [tuple(c) for c in collectives(text) if c.kind in ("all-reduce", "reduce-scatter")],
                }
    print(MARK + json.dumps(results))


if __name__ == "__main__":
    main()
