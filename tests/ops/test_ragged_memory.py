"""Memory of experts: temporaries of compiled programs against a minimal bf16 version, and residuals."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fp8jax
from tests.programs import residuals
from tests.rows import few

TOKENS, WIDTH, HIDDEN, EXPERTS, TILE = 8192, 512, 256, 64, 64
BF16 = jnp.bfloat16


def shape(*dims, dtype=BF16):
    return jax.ShapeDtypeStruct(dims, dtype)


X, SIZES = shape(TOKENS, WIDTH), shape(EXPERTS, dtype=jnp.int32)
PARAMS = {
    "gate": shape(EXPERTS, WIDTH, HIDDEN),
    "up": shape(EXPERTS, WIDTH, HIDDEN),
    "down": shape(EXPERTS, HIDDEN, WIDTH),
}


def over_tiles(sizes, tokens, body, result):
    """Calls body(group, first row, rows of the group) for each tile of rows in order."""
    ends = jnp.cumsum(sizes)
    counts = -(-sizes // TILE)
    tile_ends = jnp.cumsum(counts)

    def step(i, result):
        group = jnp.sum(tile_ends <= i)
        begin = ends[group] - sizes[group] + (i - tile_ends[group] + counts[group]) * TILE
        at = jnp.minimum(begin, tokens - TILE)
        row = at + jnp.arange(TILE)
        return body(group, at, ((row >= begin) & (row < ends[group]))[:, None], result)

    return lax.fori_loop(0, tile_ends[-1], step, result)


def multiply_rows(x, w, sizes, transposed=False):
    def body(group, at, rows, y):
        product = lax.dynamic_slice_in_dim(x, at, TILE) @ (w[group].T if transposed else w[group])
        return lax.dynamic_update_slice_in_dim(
            y, jnp.where(rows, product, lax.dynamic_slice_in_dim(y, at, TILE)), at, 0
        )

    return over_tiles(sizes, x.shape[0], body, jnp.zeros((x.shape[0], w.shape[1 if transposed else 2]), x.dtype))


@jax.custom_vjp
def lean_dot(x, w, sizes):
    """A grouped matmul in bf16 that copies no operand."""
    return multiply_rows(x, w, sizes)


def lean_bwd(saved, dy):
    x, w, sizes = saved

    def body(group, at, rows, dw):
        a, b = (jnp.where(rows, lax.dynamic_slice_in_dim(m, at, TILE), 0) for m in (x, dy))
        return dw.at[group].add(a.T @ b)

    dw = over_tiles(sizes, x.shape[0], body, jnp.zeros_like(w))
    return multiply_rows(dy, w, sizes, transposed=True), dw, None


lean_dot.defvjp(lambda *operands: (lean_dot(*operands), operands), lean_bwd)


def experts(dot, params, x, sizes):
    h = jax.nn.silu(dot(x, params["gate"], sizes)) * dot(x, params["up"], sizes)
    return jnp.sum(dot(h, params["down"], sizes).astype(jnp.float32) ** 2)


def temporaries(dot):
    program = jax.jit(jax.value_and_grad(functools.partial(experts, dot), (0, 1)))
    return program.lower(PARAMS, X, SIZES).compile().memory_analysis().temp_size_in_bytes


def quantized_dot(recipe):
    key = jax.random.key(0) if recipe == "int8_block" else None
    return functools.partial(fp8jax.ragged_dot, recipe=recipe, key=key)


@functools.cache
def lean_temporaries():
    return temporaries(lean_dot)


@pytest.mark.parametrize("recipe", few(["coat", "deepseek", "int8_block", "bf16"], "coat", "bf16"))
def test_temporaries_are_those_of_a_lean_form_in_bf16(recipe):
    assert temporaries(quantized_dot(recipe)) < 1.2 * lean_temporaries()


@pytest.mark.parametrize("recipe", ["coat", "deepseek"])
def test_codes_of_tokens_are_saved_and_no_copy_of_the_weights(recipe):
    saved = residuals(lambda x, w, sizes: quantized_dot(recipe)(x, w, sizes), X, PARAMS["gate"], SIZES)
    wide = [(dtype, dims) for dtype, dims in saved if len(dims) > 1 and dims[0] in (TOKENS, EXPERTS)]
    of_rows = [(dtype, dims) for dtype, dims in wide if dims == X.shape]
    assert of_rows == [("uint8", X.shape)]
    assert [(dtype, dims) for dtype, dims in wide if len(dims) == 3 and dims[1] > 1] == [
        ("bfloat16", PARAMS["gate"].shape)
    ]
