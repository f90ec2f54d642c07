"""What a Llama layer in 8 bits takes at least, if its operations run one after another, each at a copy's speed.

A bound is measured: the products and attention run, then an array as large as the other passes' bytes is copied. It is
no law: a pass may find in the cache what is counted here as read, and products that write codes write less than these.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import fp8jax
from experiments.bench import traffic
from experiments.models.llama import LlamaConfig
from fp8jax.ops.matmul import matmul

# Bytes of an element: in 16 bits, as a code, and as a code that shares a 16-bit scale with 15 others of its row.
WIDE, CODE, KEPT = 2, 1, 1.125


def alone(tokens: int, length: int, config: LlamaConfig) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """All 8-bit products of a layer, of codes that are there, and its attention: a function and its arguments."""
    dim, inner = config.dim, config.mlp_dim
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

    heads = (config.heads, config.kv_heads, config.kv_heads, config.heads)
    shapes = [(tokens // length, length, h, config.head_dim) for h in heads]
    *qkv, dy = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
    return run, ([operands(i, *side) for i, side in enumerate(sides)], qkv, dy)


def others(function: Callable[..., Any], *operands: Any) -> int:
    """Bytes that all operations of a program but products and attention read and write.

    Those of an activation's bound do not count: its sample is 1 / 16 of what it reads, and usually nothing is mended.
    """
    program = jax.jit(function).lower(*operands)
    text = program.compile(compiler_options={"xla_gpu_enable_command_buffer": ""}).as_text()
    return traffic.moved(text or "", without=("cublas", "cudnn", "sample", "mend"))


def least(tokens: int, config: LlamaConfig) -> dict[str, float]:
    """Bytes, by pass, that a layer with COAT's lean contexts moves at least beside products and attention.

    A tensor's one scale is that of its own largest magnitude, so all of it is read before its first code is written.
    Else everything is fused that could be: products write codes and maxima in their epilogues, add residuals and
    rotate; gate and up meet in one epilogue; maxima of cotangents are found where these are made, but not in
    attention, which is cuDNN's; weights' codes are there.
    """
    stream, inner = tokens * config.dim, tokens * config.mlp_dim
    attended = tokens * (config.dim + 2 * config.kv_heads * config.head_dim)
    return {
        "two norms: input, codes kept": 2 * stream * (WIDE + KEPT),
        "two norms: codes kept, codes of the result": 2 * stream * (KEPT + CODE),
        "attention's output: maximum": stream * WIDE,
        "attention's output: codes": stream * (WIDE + CODE),
        "activation: codes kept, codes of the result": inner * (2 * KEPT + CODE),
        "output's cotangent: codes both ways": stream * (WIDE + 2 * CODE),
        "activation: codes kept, for the maxima of its cotangents": inner * 2 * KEPT,
        "activation: its cotangents' codes both ways, its result's": inner * (WIDE + 2 * KEPT + 5 * CODE),
        "two norms: codes of the result, transposed": 2 * stream * (KEPT + CODE),
        "two norms: cotangents, with the residual's": 2 * stream * (3 * WIDE + KEPT),
        "first sum's cotangent: codes both ways": stream * (WIDE + 2 * CODE),
        "attention's output: codes, transposed": stream * (WIDE + CODE),
        "cotangents of q, k and v: maxima": attended * WIDE,
        "cotangents of q, k and v: codes both ways": attended * (WIDE + 2 * CODE),
    }


def bound(function: Callable[..., Any], moved: float) -> tuple[Callable[..., Any], jax.Array]:
    """A function that also copies an array, its last argument: together they read and write `moved` bytes."""
    array = jnp.zeros((max(int(moved) // 2**22, 1), 2**20), jnp.bfloat16)
    return lambda *operands: (function(*operands[:-1]), jnp.copy(operands[-1])), array
