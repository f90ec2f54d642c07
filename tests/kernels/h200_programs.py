"""Programs that are compiled for an H200. Each function returns one and the shapes of its arguments."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from fp8jax import recipes
from fp8jax.core.qtensor import QTensor
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import target
from fp8jax.ops.matmul import hopper
from fp8jax.ops.products.linear import ScalingState, linear, scaled_linear
from pallas_kernels.matmul.grouped_block_mosaic import grouped_block_matmul, grouped_block_matmul_dw
from pallas_kernels.matmul.grouped_int8_mosaic import grouped_int8_block_matmul, grouped_int8_block_matmul_dw
from pallas_kernels.matmul.grouped_mosaic import grouped_matmul, grouped_matmul_dw
from pallas_kernels.matmul.matmul_block_mosaic import matmul_block
from pallas_kernels.matmul.matmul_int8_mosaic import FallbackResidual, matmul_int8_block
from pallas_kernels.matmul.matmul_mosaic import matmul
from pallas_kernels.matmul.matmul_mx_mosaic import matmul_mx

Program = tuple[Callable[..., jax.Array], tuple[Any, ...]]
M, N, K = 4096, 11008, 4096
E4M3, E5M2, F32, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
I8 = jnp.int8
CODES = (Shape((M, K), E4M3), Shape((N, K), E4M3))


def tensor() -> Program:
    return lambda a, b, s: matmul(a, b, scale=s), (*CODES, Shape((), F32))


def rows_and_columns(m: int = M, n: int = N, k: int = K, fast: bool = True) -> Program:
    def program(a: Any, b: Any, r: Any, c: Any) -> jax.Array:
        return matmul(a, b, row_scale=r, column_scale=c, fast=fast)

    return program, (Shape((m, k), E5M2), Shape((n, k), E4M3), Shape((m,), F32), Shape((n,), F32))


def rows_and_columns_in_a_shared_tile() -> Program:
    """A product for which two warpgroups with a shared tile are faster than two that alternate."""
    return rows_and_columns(4096, 7168, 16384)


def promoted() -> Program:
    return lambda a, b, s: matmul(a, b, scale=s, fast=False), (*CODES, Shape((), F32))


def promoted_rows_and_columns() -> Program:
    return rows_and_columns(fast=False)


def float32_output() -> Program:
    return lambda a, b: matmul(a, b, out_dtype=F32), CODES


def vocabulary() -> Program:
    return matmul, (Shape((4000, 2056), E4M3), Shape((32003, 2056), E4M3))


def tiny() -> Program:
    return matmul, (Shape((5, 24), E4M3), Shape((7, 24), E4M3))


def block(m: int = 4096, n: int = 4096) -> Program:
    """A product in two passes."""
    codes = Shape((m, K), E4M3), Shape((n, K), E4M3)
    return matmul_block, (*codes, Shape((m, K // 128), F32), Shape((n // 128, K // 128), F32))


def block_of_few_rows() -> Program:
    """A product of one wave of tiles."""
    return block(512, 4096)


def quantized_blocks() -> Program:
    """Products of codes from the quantize kernel, for each combination that a linear layer has."""
    from fp8jax.ops.matmul.matmul import matmul as product
    from fp8jax.ops.quantization.quantize import quantize

    def program(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        groups, blocks = "e4m3:group128", "e4m3:block128"
        (a, a_turned), (b, b_turned) = (
            quantize(x, groups, groups, impl="triton"),
            quantize(w, blocks, "same", impl="triton"),
        )
        pairs: Any = (a, b), (a, b_turned), (a_turned, a_turned)
        return [product(*pair, impl="mosaic") for pair in pairs]

    return program, (Shape((4096, 4096), BF16),) * 2


def block_float32(m: int = 4096, n: int = 4096) -> Program:
    return functools.partial(matmul_block, out_dtype=F32), block(m, n)[1]


def block_float32_of_few_rows() -> Program:
    return block_float32(512, 4096)


def wgrad(m: int = M, n: int = N) -> Program:
    codes = Shape((m, K), E4M3), Shape((n, K), E4M3)
    return matmul_block, (*codes, Shape((m, K // 128), F32), Shape((n, K // 128), F32))


def wgrad_float32(m: int = M, n: int = N) -> Program:
    return functools.partial(matmul_block, out_dtype=F32), wgrad(m, n)[1]


def wgrad_of_few_rows() -> Program:
    return wgrad_float32(512, 4096)


def exact() -> Program:
    def program(a: Any, b: Any, e: Any, r: Any) -> jax.Array:
        return matmul_mx(a, b, e, row_scale=r)

    return program, (*CODES, Shape((M, K // 32), jnp.uint8), Shape((M,), F32))


def cublas() -> Program:
    """Products of per-tensor codes: two that share an input, and one with a gradient in e5m2."""

    def program(a: Any, b: Any, c: Any, dy: Any, s: Any) -> tuple[jax.Array, ...]:
        left, right, other, gradient = (
            QTensor(codes, scale[None, None], None, None, QuantSpec(name))
            for codes, scale, name in ((a, s[0], "e4m3"), (b, s[1], "e4m3"), (c, s[2], "e4m3"), (dy, s[3], "e5m2"))
        )
        fast, accurate = (functools.partial(hopper.run, "cublas", False, fast) for fast in (True, False))
        return fast(BF16, left, right), fast(BF16, left, other), accurate(F32, gradient, right)

    return program, (*CODES, CODES[1], Shape((M, K), E5M2), Shape((4,), F32))


ALL = [
    tensor,
    rows_and_columns,
    rows_and_columns_in_a_shared_tile,
    promoted,
    promoted_rows_and_columns,
    float32_output,
    vocabulary,
    tiny,
    block,
    block_of_few_rows,
    block_float32,
    block_float32_of_few_rows,
    wgrad,
    wgrad_float32,
    wgrad_of_few_rows,
    exact,
]


def int8(fallback: bool, m: int = 4096, n: int = 4096) -> Program:
    def program(a: Any, b: Any, sa: Any, sb: Any, *residual: Any) -> jax.Array:
        return matmul_int8_block(a, b, sa, sb, residual=FallbackResidual(*residual) if fallback else None)

    blocks = (m // 128, K // 128)
    shapes = (Shape((m, K), I8), Shape((n, K), I8), Shape(blocks, F32), Shape((n // 128, K // 128), F32))
    residual = (Shape((m, K), I8), Shape(blocks, F32), Shape(blocks, jnp.bool_))
    return program, (*shapes, *residual[: 3 * fallback])


def int8_rows(m: int = M, n: int = N, k: int = K, out: Any = BF16) -> Program:
    """A product of rows with a per-tensor weight, as in SwitchBack."""
    shapes = (Shape((m, k), I8), Shape((n, k), I8), Shape((m,), F32))
    return lambda a, b, r: matmul(a, b, row_scale=r, out_dtype=out), shapes


def int8_rows_and_columns(m: int = M, n: int = N, k: int = K) -> Program:
    function, (_, _, *vectors) = rows_and_columns(m, n, k)
    return function, (Shape((m, k), I8), Shape((n, k), I8), *vectors)


# Blocks, with two passes and with one; and scales per row and column, with every tile width that can be chosen.
INT8 = [
    *(functools.partial(int8, fallback, m) for fallback in (False, True) for m in (4096, 512)),
    *(functools.partial(int8_rows, *shape) for shape in ((), (16384, 4096, 11008), (2048, 7168, 4096))),
    functools.partial(int8_rows, out=F32),
    int8_rows_and_columns,
    functools.partial(int8_rows_and_columns, 16384, 4096, 11008),
]


# Tokens, width, inner width and experts of a layer.
TOKENS, WIDTH, INNER, EXPERTS = 131072, 2560, 1280, 64


def grouped(dtype: Any = E4M3, n: int = 2 * INNER, out: Any = BF16, fast: bool = True) -> Program:
    """A grouped product with scales per matrix, row and column."""

    def program(a: Any, b: Any, sizes: Any, s: Any, r: Any, c: Any) -> jax.Array:
        return grouped_matmul(a, b, sizes, scale=s, row_scale=r, column_scale=c, out_dtype=out, fast=fast)

    operands = Shape((TOKENS, WIDTH), dtype), Shape((EXPERTS, n, WIDTH), dtype), Shape((EXPERTS,), jnp.int32)
    return program, (*operands, Shape((EXPERTS,), F32), Shape((TOKENS,), F32), Shape((EXPERTS, n), F32))


def grouped_dw(
    dtype: Any = E4M3, m: int = WIDTH, n: int = 2 * INNER, fast: bool = True, is_k_major: bool = True
) -> Program:
    """Gradients of all experts' weights, with scales per matrix, row and column."""

    def program(a: Any, b: Any, starts: Any, lengths: Any, s: Any, r: Any, c: Any) -> jax.Array:
        settings: Any = {"scale": s, "row_scale": r, "column_scale": c, "fast": fast, "is_k_major": is_k_major}
        return grouped_matmul_dw(a, b, starts, lengths, **settings)

    tokens = TOKENS + 128 * EXPERTS
    shapes = [(size, tokens) if is_k_major else (tokens, size) for size in (m, n)]
    numbers, scales = Shape((EXPERTS,), jnp.int32), [Shape((EXPERTS, *x), F32) for x in ((), (m,), (n,))]
    return program, (*(Shape(shape, dtype) for shape in shapes), numbers, numbers, *scales)


def grouped_block(tokens: int = TOKENS, n: int = 2 * INNER, out: Any = BF16) -> Program:
    def program(a: Any, b: Any, sa: Any, sb: Any, sizes: Any) -> jax.Array:
        return grouped_block_matmul(a, b, sa, sb, sizes, out_dtype=out)

    operands = Shape((tokens, WIDTH), E4M3), Shape((EXPERTS, n, WIDTH), E4M3)
    scales = Shape((tokens, WIDTH // 128), F32), Shape((EXPERTS, -(-n // 128), WIDTH // 128), F32)
    return program, (*operands, *scales, Shape((EXPERTS,), jnp.int32))


def grouped_block_dw(dtype: Any = E4M3, out: Any = BF16, m: int = WIDTH) -> Program:
    """Gradients of weights with scales per 128 tokens: per row in FP8, per block in int8."""
    function = grouped_int8_block_matmul_dw if dtype == I8 else grouped_block_matmul_dw

    def program(a: Any, b: Any, sa: Any, sb: Any, starts: Any, lengths: Any) -> jax.Array:
        return function(a, b, sa, sb, starts, lengths, out_dtype=out)

    sizes, tokens = (m, 2 * INNER), TOKENS + 128 * EXPERTS
    scales = [Shape((-(-size // 128) if dtype == I8 else size, tokens // 128), F32) for size in sizes]
    numbers = Shape((EXPERTS,), jnp.int32)
    return program, (*(Shape((size, tokens), dtype) for size in sizes), *scales, numbers, numbers)


def grouped_int8(fallback: bool, tokens: int = TOKENS, out: Any = BF16) -> Program:
    def program(a: Any, b: Any, sa: Any, sb: Any, groups: Any, *residual: Any) -> jax.Array:
        residuals = FallbackResidual(*residual) if fallback else None
        return grouped_int8_block_matmul(a, b, sa, sb, groups, residual=residuals, out_dtype=out)

    _, (a, b, *_) = grouped(I8)
    a, blocks = Shape((tokens, WIDTH), I8), (tokens // 128, WIDTH // 128)
    b_scale = Shape((EXPERTS, 2 * INNER // 128, WIDTH // 128), F32)
    residual = a, Shape(blocks, F32), Shape(blocks, jnp.bool_)
    operands = a, b, Shape(blocks, F32), b_scale, Shape((tokens // 128,), jnp.int32)
    return program, (*operands, *residual[: 3 * fallback])


# Tiles of 128, 160 and 192 columns; matrices whose rows do not fill a tile.
GROUPED = [
    *(functools.partial(grouped, n=n) for n in (1024, 2560, 1536)),
    functools.partial(grouped, out=F32),
    functools.partial(grouped, I8, 1536),
    functools.partial(grouped, BF16),
    functools.partial(grouped, fast=False),
    *(functools.partial(grouped_dw, n=n) for n in (1024, 2560, 1536)),
    functools.partial(grouped_dw, m=1000),
    functools.partial(grouped_dw, I8, n=1536),
    functools.partial(grouped_dw, BF16, n=1536, is_k_major=False),
    functools.partial(grouped_dw, fast=False),
    *(functools.partial(grouped_block, tokens) for tokens in (TOKENS, 4096)),
    functools.partial(grouped_block, out=F32),
    *(functools.partial(grouped_block_dw, dtype, out) for dtype in (E4M3, I8) for out in (BF16, F32)),
    *(functools.partial(grouped_block_dw, dtype, F32, 1000) for dtype in (E4M3, I8)),
    *(functools.partial(grouped_int8, fallback) for fallback in (False, True)),
    *(functools.partial(grouped_int8, True, tokens, F32) for tokens in (TOKENS, 1024)),
]


def looped() -> Program:
    """Gradients of a loop over layers that saves the result of each product."""
    one = functools.partial(linear, recipe=recipes.deepseek())
    policy = jax.checkpoint_policies.save_only_these_names("fp8jax_product")

    def program(x: jax.Array, weights: jax.Array) -> Any:
        layer = jax.checkpoint(lambda x, w: (jax.nn.silu(one(x, w)), None), policy=policy)
        with target(capability=90):
            return jax.grad(lambda *a: jnp.sum(jax.lax.scan(layer, *a)[0], dtype=F32), (0, 1))(x, weights)

    return program, (Shape((M, 1024), BF16), Shape((4, 1024, 1024), BF16))


def fallback_linear() -> Program:
    """The forward and backward pass of a linear layer with INT8 fallback."""
    recipe = recipes.int8_fallback().linear

    def program(x: Any, w: Any, dy: Any, threshold: Any) -> Any:
        state, key = ScalingState(x=threshold), jax.random.key(0)
        with target(capability=90):
            y, vjp_fn = jax.vjp(lambda x, w: scaled_linear(x, w, state, recipe=recipe, key=key)[0], x, w)
            return y, *vjp_fn(dy)

    return program, (Shape((M, K), BF16), Shape((K, N), BF16), Shape((M, N), BF16), Shape((), F32))


# One of each kernel, with the largest epilogue, in the tiles that need the most registers.
LARGEST = [
    promoted_rows_and_columns,
    block_float32,
    exact,
    functools.partial(int8, True, 512),
    functools.partial(grouped_dw, m=1000, n=1536),
    functools.partial(grouped_int8, True),
]
