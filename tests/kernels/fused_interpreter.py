"""Compares the kernels of norms, activations and the layers that read them, in Triton's interpreter, with XLA.

It needs its own process: `TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python -m tests.kernels.fused_interpreter all` (or
`few`). It prints one line of JSON. Each case has the number of matrices that a kernel quantized from the operands of
their computation, the largest fraction of codes that differ from those of the matrix, by how many codes they differ,
and the largest relative error of results and gradients.
"""

import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8jax
from fp8jax.core import scaling
from fp8jax.core.recipe import Linear
from fp8jax.ops.autodiff.residuals import InputFacts
from fp8jax.ops.nonlinear import activation
from fp8jax.ops.products import operands, product
from fp8jax.ops.quantization import fused_outputs, quantize
from pallas_kernels.nonlinear import norm_triton, requantize_triton
from tests.kernels.triton_interpreter import prepare

ROWS, CHANNELS, INNER = 33, 48, 80
LINEAR = fp8jax.recipes.coat().linear


def recipe(mode: str, spec: str = "e4m3:group16", **linear: Any) -> fp8jax.Recipe:
    # "bound" recomputes activations.
    amax = linear.pop("amax", "bound" if mode == "bound" else "exact")
    context = fp8jax.recipes.Context(spec, recompute_activations=mode != "faithful", amax=amax)
    part = dataclasses.replace(LINEAR, **linear)
    return dataclasses.replace(fp8jax.recipes.coat(), context=context, linear=part)


def as_it_is(**linear: Any) -> fp8jax.Recipe:
    """A recipe whose norms and activations save their inputs unquantized."""
    return dataclasses.replace(recipe("lean", **linear), context=fp8jax.recipes.Context())


def ten_bits(spec: str = "int10:group32") -> fp8jax.Recipe:
    """A recipe whose norms and activations save int10 codes, and whose layers multiply int8 blocks."""
    blocks = Linear("int8:block32", "int8:block32", "int8:block32")
    return dataclasses.replace(recipe("faithful", spec), linear=blocks)


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def norm_case(
    kind: str, num_params: int, part: fp8jax.Recipe, dtype: Any, lead: tuple[int, ...], size: float = 1.0
) -> Any:
    """Returns a norm that two linear layers read, and its arguments. `size` multiplies its input."""
    x, w, v = 2 + 3 * normal(0, *lead, CHANNELS, dtype=dtype), normal(1, CHANNELS, INNER), normal(2, CHANNELS, 32)
    x = size * x
    parameters = [1 + 0.2 * normal(3, CHANNELS, dtype=dtype), normal(4, CHANNELS, dtype=dtype)][:num_params]

    def f(x: Any, w: Any, v: Any, *parameters: Any) -> Any:
        scale, bias = (*parameters, None, None)[:2]
        weights = w.astype(x.dtype), v.astype(x.dtype)
        return fp8jax.norm_linear(x, scale, weights, recipe=part, norm=kind, norm_bias=bias, eps=1e-3)

    return f, (x, w, v, *parameters)


def activation_case(
    name: str, gated: bool, part: fp8jax.Recipe, dtype: Any, lead: tuple[int, ...], last: float = 1.0, gate: float = 0.0
) -> Any:
    """Returns an MLP and its arguments.

    `size` multiplies the last row of its input. If the gate is not 0, all of its values are near that number.
    """
    x, w = normal(0, *lead, CHANNELS, dtype=dtype).at[-1].multiply(last), normal(1, CHANNELS, INNER)
    u, d = normal(2, CHANNELS, INNER), normal(3, INNER, CHANNELS)
    if gate:
        x, w = 1 + 0.1 * x, gate / 0.3 / CHANNELS * (1 + 0.1 * w)

    def f(x: Any, w: Any, u: Any, d: Any) -> Any:
        gate, up = (fp8jax.linear(x, a.astype(x.dtype), recipe=part) for a in (0.3 * w, 0.3 * u))
        return fp8jax.glu_linear(gate, up if gated else None, d.astype(x.dtype), recipe=part, activation=name)

    return f, (x, w, u, d)


def biased_case(name: str, gated: bool, part: fp8jax.Recipe, dtype: Any) -> Any:
    """Returns an MLP with biases, and its arguments."""
    x, w, u, d = (
        normal(0, ROWS, CHANNELS, dtype=dtype),
        *(normal(i, CHANNELS, INNER) for i in (1, 2)),
        normal(3, INNER, 32),
    )
    biases = normal(4, INNER), normal(5, INNER), normal(6, 32)

    def f(x: Any, w: Any, u: Any, d: Any, *biases: Any) -> Any:
        layer = lambda x, w, b: fp8jax.linear(x, w.astype(x.dtype), recipe=part, bias=b)  # noqa: E731
        branches = [layer(x, 0.3 * w, biases[0]), *([layer(x, 0.3 * u, biases[1])] if gated else [None])]
        y, origin = activation.activate(name, *branches, part, has_bias=True)
        read = operands.Input(y, input_facts=InputFacts(origin))
        return product.recipe_dot(read, d.astype(x.dtype), part.linear, None, bias=biases[2])

    return f, (x, w, u, d, *biases)


def attention_case(part: fp8jax.Recipe) -> Any:
    """Returns a layer whose input is saved anyway, and its arguments."""
    y, w = normal(0, 18, 3, 16), normal(1, 48, INNER)
    return lambda y, w: fp8jax.attention_output(y, w, recipe=part), (y, w)


MICRO = {"x": "e4m3:mx32+token", "dy": "e4m3:mx32+token"}
_NORMS = ("rms 0 faithful", "rms 1 lean", "layer 0 lean", "layer 2 faithful", "rms 1 bound", "layer 2 bound")
_ACTIVATIONS = ("silu True faithful", "silu True lean", "silu False lean", "gelu True lean", "gelu False faithful",
                "gelu_tanh True faithful", "gelu_tanh False lean", "silu True bound", "gelu False bound")  # fmt: skip
_NORM, _ACTIVATION = (functools.partial(functools.partial, make) for make in (norm_case, activation_case))
CASES = {
    **{
        case: _NORM(kind, int(given), recipe(mode), jnp.bfloat16, (ROWS,))
        for case, (kind, given, mode) in ((case, case.split()) for case in _NORMS)
    },
    "norm fp32, three axes": _NORM("layer", 2, recipe("lean", "e5m2:group16"), jnp.float32, (3, 11)),
    "norm, tokens": _NORM("rms", 1, recipe("lean", x="e4m3:token", x_wgrad="e4m3:token"), jnp.bfloat16, (ROWS,)),
    **{
        case: _ACTIVATION(name, gated == "True", recipe(mode), jnp.float32, (ROWS,))
        for case, (name, gated, mode) in ((case, case.split()) for case in _ACTIVATIONS)
    },
    "norm, rows": _NORM("layer", 2, recipe("lean", **MICRO), jnp.bfloat16, (3, 11)),
    "norm, rows, faithful": _NORM("rms", 1, recipe("faithful", **MICRO), jnp.bfloat16, (ROWS,)),
    "silu, rows": _ACTIVATION("silu", True, recipe("lean", **MICRO), jnp.float32, (ROWS,)),
    "gelu False rows": _ACTIVATION("gelu", False, recipe("lean", **MICRO), jnp.float32, (3, 11)),
    "norm, faithful, bound": _NORM("rms", 0, recipe("faithful", amax="bound"), jnp.bfloat16, (3, 11)),
    "silu, faithful, bound": _ACTIVATION("silu", True, recipe("faithful", amax="bound"), jnp.float32, (ROWS,)),
    # The root of eps, 1e-3, is 1,000 times the input.
    "rms 1 bound, mended": _NORM("rms", 1, recipe("bound"), jnp.bfloat16, (ROWS,), 1e-5),
    "layer 0 bound, mended": _NORM("layer", 0, recipe("bound"), jnp.float32, (3, 11), 1e-5),
    # The sample has two ranges of rows. The last row is outside of it, and has the largest magnitude.
    "silu, bound, mended": _ACTIVATION("silu", True, recipe("bound"), jnp.float32, (545,), 100.0),
    # If the slope of an activation is near 0, its cotangents are far below their bounds.
    "silu, flat, mended": _ACTIVATION("silu", True, recipe("bound"), jnp.float32, (ROWS,), 1.0, -24.0),
    "gelu False, flat, mended": _ACTIVATION("gelu_tanh", False, recipe("bound"), jnp.float32, (ROWS,), 1.0, -3.5),
    "silu bf16": _ACTIVATION("silu", True, recipe("lean"), jnp.bfloat16, (ROWS,)),
    "rms 1 as it is": _NORM("rms", 1, as_it_is(), jnp.bfloat16, (ROWS,)),
    "layer 2 as it is": _NORM("layer", 2, as_it_is(**MICRO), jnp.bfloat16, (3, 11)),
    "silu True as it is": _ACTIVATION("silu", True, as_it_is(), jnp.float32, (ROWS,)),
    "silu, rows, as it is": _ACTIVATION("silu", True, as_it_is(**MICRO), jnp.float32, (2, 18)),
    "gelu False rows, as it is": _ACTIVATION("gelu", False, as_it_is(**MICRO), jnp.float32, (ROWS,)),
    "gelu_tanh False lean, biased": functools.partial(biased_case, "gelu_tanh", False, recipe("lean"), jnp.float32),
    "silu True bound, biased": functools.partial(biased_case, "silu", True, recipe("bound"), jnp.float32),
    "gelu False bound, biased": functools.partial(biased_case, "gelu", False, recipe("bound"), jnp.float32),
    "kept anyway": functools.partial(attention_case, recipe("lean", **MICRO)),
    # Layers of int8 blocks read the written result; other layers read its codes.
    "rms 1 ten bits": _NORM("rms", 1, ten_bits(), jnp.bfloat16, (ROWS,)),
    "layer 2 ten bits": _NORM("layer", 2, ten_bits(), jnp.float32, (3, 11)),
    "silu True ten bits": _ACTIVATION("silu", True, ten_bits(), jnp.float32, (2, 18)),
    "gelu_tanh False ten bits": _ACTIVATION("gelu_tanh", False, ten_bits("int10:group16"), jnp.float32, (ROWS,)),
    "rms 1 ten bits, lean": _NORM("rms", 1, recipe("lean", "int10:group16"), jnp.bfloat16, (ROWS,)),
    "silu True ten bits, lean": _ACTIVATION("silu", True, recipe("lean", "int10:group32"), jnp.float32, (ROWS,)),
    "silu, rows, ten bits": _ACTIVATION("silu", True, recipe("lean", "int10:group16", **MICRO), jnp.float32, (ROWS,)),
    "silu, three axes": _ACTIVATION("silu", True, recipe("lean"), jnp.float32, (2, 18)),
}


# One case for each branch of the kernels.
FEW = ("layer 2 faithful", "layer 2 bound", "norm fp32, three axes", "silu True lean",
       "gelu False faithful", "gelu_tanh False lean", "norm, rows", "silu, rows",
       "rms 1 ten bits", "silu True ten bits", "silu True ten bits, lean", "rms 1 bound, mended",
       "silu, bound, mended", "silu, flat, mended", "silu True bound, biased", "layer 2 as it is",
       "silu, rows, as it is", "kept anyway")  # fmt: skip


def run(f: Any, args: Any) -> list[jax.Array]:
    """Returns results and gradients."""
    y, vjp_fn = jax.vjp(f, *args)
    dy = jax.tree.map(lambda a: normal(a.size, *a.shape, dtype=a.dtype), y)
    return jax.tree.leaves((y, vjp_fn(dy)))


def differing_codes(actual_pair: Any, x: Any, rows: Any, columns: Any, scale: Any, strategy: str) -> tuple[Any, Any]:
    """Returns the largest fraction of codes, from operands, that differ from those of the matrix, and by how many
    codes."""
    config = quantize._parse(rows, columns, scaling.find_scaling(strategy), False)
    share, max_difference = jnp.float32(0), jnp.int32(0)
    for actual, expected in zip(actual_pair, quantize._codes(config, x, scale, None), strict=True):
        if actual is not None:
            a, b = (jax.lax.bitcast_convert_type(q.codes, jnp.uint8).astype(jnp.int32) for q in (actual, expected))
            # Codes in the order of their values. Values below 2^-12 of the largest come from cancellation: for large
            # negative x,
            # XLA computes 1 + tanh(x), the kernel 1 + erf(x).
            top = float(jnp.finfo(expected.codes.dtype).max) * 2.0**-12
            small = jnp.maximum(*(jnp.abs(q.codes.astype(jnp.float32)) for q in (actual, expected))) < top
            a, b = (jnp.where(small, 0, jnp.where(c < 128, c, 128 - c)) for c in (a, b))
            share, max_difference = (
                jnp.maximum(share, jnp.mean(a != b)),
                jnp.maximum(max_difference, jnp.max(jnp.abs(a - b))),
            )
    return share, max_difference


def compare(
    f: Any, args: Any, in_one_program: bool = False, with_references: bool = False
) -> tuple[int, float, int, float]:
    """Runs a case with and without its kernels, and returns its entry of the JSON line.

    `in_one_program` compiles one program, with rounding as written. Without kernels, operations that save their inputs
    unquantized share codes of their results. With `with_references` they do not, and the kernels' references run.
    """
    codes, on_cuda = fused_outputs.quantize_fused, fused_outputs.on_cuda
    plain, summed = quantize.quantize, quantize.quantize_and_sum
    calls: list[tuple[Any, Any]] = []
    quantized: list[Any] = []

    def kernels(*args: Any, **kwargs: Any) -> Any:
        quantized.append(codes(*args, **kwargs))
        return quantized[-1]

    def watched(x: Any, rows: Any, columns: Any = None, *, scale: Any, strategy: Any, **rest: Any) -> Any:
        quantized.clear()
        pair, total = summed(x, rows, columns, scale=scale, strategy=strategy, **rest)
        if any(actual is not None for actual in quantized):
            calls.append(differing_codes(pair, x, rows, columns, scale, strategy))
        return pair, total

    def counted(make: Any) -> Any:
        def watched(*args: Any) -> Any:
            result = make(*args)
            if result is not None:
                calls.append((jnp.float32(0), jnp.int32(0)))
            return result

        return watched

    by_rows = {
        name: getattr(fused_outputs, name) for name in ("cached_row_codes", "quantize_columns", "quantize_cotangent")
    }
    for name, make in by_rows.items():
        setattr(fused_outputs, name, counted(make))

    by_platform = jax.lax.platform_dependent

    def both(*args: Any) -> Any:
        fused_outputs.on_cuda = lambda: with_references
        jax.lax.platform_dependent = lambda *args, cuda, default: default(*args)
        expected = run(f, args)
        calls.clear()
        jax.lax.platform_dependent = by_platform
        fused_outputs.on_cuda = lambda: True
        return run(f, args), expected, calls

    fused_outputs.quantize_fused, product.quantize_and_sum = kernels, watched
    operands.quantize = lambda *args, **kwargs: watched(*args, sums=False, **kwargs)[0]
    try:
        actual = (jax.jit(both, compiler_options={"xla_allow_excess_precision": False}) if in_one_program else both)(
            *args
        )
    finally:
        fused_outputs.quantize_fused, fused_outputs.on_cuda = codes, on_cuda
        operands.quantize = plain
        product.quantize_and_sum = summed
        for name, make in by_rows.items():
            setattr(fused_outputs, name, make)
    got, expected = ([np.asarray(a, np.float64) for a in arrays] for arrays in actual[:2])
    distances = [
        float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in zip(got, expected, strict=True)
    ]
    shares, differences = zip(*actual[2], strict=True) if calls else ((0.0,), (0,))
    return len(calls), float(max(shares)), int(max(differences)), max(distances)


def main() -> None:
    prepare()
    fused_outputs.missing_triton = lambda _: None
    requantize_triton.NUM_PROGRAMS = 8
    results = {}
    for case in FEW if sys.argv[1] == "few" else CASES:
        make = CASES[case]
        norm_triton.MIN_SUMS = 8 if case.startswith("rms") else 11  # four rows per sum, two at a time; or three
        results[case] = compare(*make(), with_references="as it is" in case)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
