"""Residual bytes of a layer, counted from the program and compared with the recipe's plan.

U = batch x sequence x width x 2 bytes. The SwiGLU is 8/3 times as wide, as in Table 2 of COAT.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from experiments.models.flash import dot_product_attention
from experiments.models.llama import Llama, LlamaConfig, rope_tables
from fp8jax.ops.quantization import fused_outputs
from fp8jax.recipes import Context
from tests.experiments.vlm import VLM, ViTConfig
from tests.programs import residuals
from tests.rows import few, slow

SHAPES = [(2, 32, 96), (1, 64, 192), (4, 16, 48)]
LEAN = fp8jax.recipes.coat()
FAITHFUL = dataclasses.replace(LEAN, context=Context("e4m3:group16"))
RECIPES = {"bf16": None, "te_current": fp8jax.recipes.te_current(), "faithful": FAITHFUL, "lean": LEAN}
INT8 = fp8jax.recipes.int8_fallback()
INT8_RECIPES = {
    "int8_fallback": INT8,
    "int8_fallback, lean": dataclasses.replace(
        INT8, context=dataclasses.replace(INT8.context, recompute_activations=True)
    ),
}
HEADS = 4


@pytest.fixture(autouse=True)
def flash_attention(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)


class Unrolled(nnx.Module):
    """The blocks of a Llama, unrolled."""

    def __init__(self, model: Llama) -> None:
        graph, stacked = nnx.split(model.layers)
        layers = range(model.config.layers)
        self.blocks = nnx.List([nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], stacked)) for i in layers])
        self.config, self.embed, self.remat = model.config, model.embed, model.remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tables = rope_tables(tokens.shape[1], self.config.head_dim, self.config.rope_theta)
        run = nnx.remat(lambda block, x: block(x, *tables)) if self.remat else lambda block, x: block(x, *tables)
        x = self.embed(tokens.reshape(-1))
        for block in self.blocks:
            x = run(block, x)
        return x


@functools.cache
def model(recipe, width, layers, remat, scan):
    config = LlamaConfig(vocab=64, dim=width, layers=layers, heads=HEADS, kv_heads=HEADS, mlp_dim=width * 8 // 3)
    plain = Llama(config, remat=remat, rngs=nnx.Rngs(0))
    plain = plain if scan else Unrolled(plain)
    actual = (RECIPES | INT8_RECIPES)[recipe]
    return plain if actual is None else fp8jax.nnx.quantize(plain, actual)


@functools.cache
def residual_bytes(recipe, batch, length, width, layers, remat, scan) -> int:
    """Returns residual bytes, without keys and the rotary tables, which all layers share."""
    graph, params, rest = nnx.split(model(recipe, width, layers, remat, scan), nnx.Param, ...)
    tokens = jnp.zeros((batch, length), jnp.int32)
    actual = residuals(lambda p: jnp.sum(nnx.merge(graph, p, rest, copy=True)(tokens).astype(jnp.float32)), params)
    table = (length, width // HEADS // 2)
    of_tokens = [(d, s) for d, s in actual if tuple(n for n in s if n != 1) != table and not d.startswith("key<")]
    return int(sum(np.prod(shape) * jnp.dtype(dtype).itemsize for dtype, shape in of_tokens))


def per_layer(recipe, batch, length, width, remat=False, scan=True) -> float:
    """Returns residuals of a layer per token, in U: the difference between more and fewer tokens and layers."""
    count = lambda length, layers: residual_bytes(recipe, batch, length, width, layers, remat, scan)  # noqa: E731
    more = count(2 * length, 3) - count(length, 3) - count(2 * length, 2) + count(length, 2)
    return more / (batch * length * width * 2)


def planned(context: Context, width: int, plain: int = 0) -> tuple[float, float]:
    """Returns values and scales that a layer saves per token, in U, by the recipe: Table 2 of COAT without RoPE.

    The MLP is a SwiGLU. With `plain` it has that width, and only the activation as a factor.
    """
    inner = plain or width * 8 // 3
    gate_up_activated = [inner] * (1 if plain else 2 if context.recompute_activations else 3)
    inputs = [width, width, *gate_up_activated]
    linear = [] if context.recompute_activations else [width, width, inner]
    attention = 4 * width * 2
    values = sum(inputs) + sum(linear) + attention
    metadata = sum(context.spec.nbytes((1, n)) - n for n in inputs) + 2 * 4 + HEADS * 4
    return values / (2 * width), metadata / (2 * width)


ONE_FAST = few([(shape, scan) for scan in (True, False) for shape in SHAPES], (SHAPES[0], True))


@pytest.mark.parametrize(
    ("recipe", "bound", "shape", "scan"),
    few(
        [(*mode, shape, scan) for mode in (("faithful", 11.4), ("lean", 7.7)) for shape in SHAPES
         for scan in (True, False)],
        ("faithful", 11.4, SHAPES[0], True), ("lean", 7.7, SHAPES[0], False),
    ),
    ids=str,
)  # fmt: skip
def test_a_layer_keeps_what_its_recipe_plans(recipe, bound, shape, scan):
    values, scales = planned(RECIPES[recipe].context, shape[2])
    assert values <= bound
    assert per_layer(recipe, *shape, scan=scan) == pytest.approx(values + scales, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param("faithful", marks=pytest.mark.slow), "lean"])
def test_layers_of_other_models_keep_what_the_recipe_plans(recipe):
    vision, text, batch, length = (
        ViTConfig(8, 2, 32, 1, HEADS, 64),
        LlamaConfig(64, 48, 1, HEADS, HEADS, 128, norm="layer"),
        2,
        8,
    )

    def residual_bytes(batch, layers) -> int:
        shapes = (dataclasses.replace(config, layers=layers) for config in (vision, text))
        model = fp8jax.nnx.quantize(VLM(*shapes, rngs=nnx.Rngs(0)), RECIPES[recipe])
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        images, tokens = jnp.zeros((batch, 8, 8, 3)), jnp.zeros((batch, length), jnp.int32)
        actual = residuals(lambda p: jnp.sum(nnx.merge(graph, p, rest)(images, tokens).astype(jnp.float32)), params)
        return sum(int(np.prod(shape)) * jnp.dtype(dtype).itemsize for dtype, shape in actual)

    context = RECIPES[recipe].context
    of_vision = sum(planned(context, 32, 64)) * batch * vision.patches * 32 * 2
    of_text = sum(planned(context, 48)) * batch * (vision.patches + length) * 48 * 2
    more = (
        residual_bytes(2 * batch, 3)
        - residual_bytes(batch, 3)
        - residual_bytes(2 * batch, 2)
        + residual_bytes(batch, 2)
    )
    assert more == pytest.approx(of_vision + of_text, abs=1e-6)


@pytest.mark.parametrize(("shape", "scan"), ONE_FAST)
@pytest.mark.parametrize("recipe", [slow("faithful"), "lean"])
def test_a_checkpointed_layer_keeps_its_input(recipe, shape, scan):
    assert per_layer(recipe, *shape, remat=True, scan=scan) == pytest.approx(1, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [slow("faithful"), "lean"])
def test_kernels_that_quantize_what_they_compute_keep_the_same(recipe, monkeypatch):
    pytest.importorskip("jax_triton")
    plain = per_layer(recipe, *SHAPES[0])
    programs = []
    monkeypatch.setitem(globals(), "residual_bytes", residual_bytes.__wrapped__)  # counted independently
    monkeypatch.setattr(fused_outputs, "on_cuda", lambda: True)
    monkeypatch.setattr(fused_outputs, "missing_triton", lambda _: None)
    monkeypatch.setattr(
        fused_outputs,
        "_quantize_group",
        lambda *args, make=fused_outputs._quantize_group: programs.append(args) or make(*args),
    )
    assert per_layer(recipe, *SHAPES[0]) == pytest.approx(plain, abs=1e-9)
    assert programs


@pytest.mark.parametrize(("recipe", "copies"), [("bf16", 7), ("te_current", 0), ("lean", 0)])
def test_no_copy_of_a_quantized_weight_is_kept_beside_the_parameter(recipe, copies):
    width, layers = SHAPES[0][2], 2
    graph, params, rest = nnx.split(model(recipe, width, layers, False, True), nnx.Param, ...)
    tokens = jnp.zeros(SHAPES[0][:2], jnp.int32)
    actual = residuals(lambda p: jnp.sum(nnx.merge(graph, p, rest)(tokens).astype(jnp.float32)), params)
    inner = width * 8 // 3
    weights = {(layers, *shape) for shape in ((width, width), (width, inner), (inner, width))}
    assert sum(dtype == "bfloat16" and shape in weights for dtype, shape in actual) == copies


def test_bf16_keeps_at_least_three_and_a_half_times_as_much():
    plain, te, faithful, lean = (per_layer(recipe, *SHAPES[0]) for recipe in RECIPES)
    # Codes of four inputs instead of the inputs: of q, k and v together, of the projection, of gate and up, of down.
    assert plain - te == pytest.approx(0.5 * (1 + 1 + 1 + 8 / 3), abs=0.01)
    assert plain / lean >= 3.5
    assert plain / faithful >= 1.69


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "below", "kernels"),
    [
        ("int8_fallback", 0.6, False),
        ("int8_fallback", 0.6, True),
        ("int8_fallback, lean", 0.65, False),
    ],
)
def test_int8_fallback_keeps_ten_bits_of_operations_and_eight_of_linear_layers(recipe, below, kernels, monkeypatch):
    ran = []
    if kernels:
        pytest.importorskip("jax_triton")
        monkeypatch.setattr(fused_outputs, "run", lambda *args, run=fused_outputs.run: ran.append(args) or run(*args))
        monkeypatch.setitem(globals(), "residual_bytes", residual_bytes.__wrapped__)  # counted independently
        monkeypatch.setattr(fused_outputs, "on_cuda", lambda: True)
        monkeypatch.setattr(fused_outputs, "missing_triton", lambda _: None)
    batch, length, width = 1, 128, 384  # full blocks of 128
    inner, lean = width * 8 // 3, "lean" in recipe
    context = INT8.context.spec
    operations = [width, width, inner, inner, *([] if lean else [inner])]
    linear = [width, width, width, inner]  # of q, k and v; the projection; gate and up; down
    scales = sum(4 * n // 128 / 128 for n in linear) + 2 * 4 + HEADS * 4
    planned = sum(context.nbytes((1, n)) for n in operations) + sum(linear) + 4 * width * 2 + scales
    assert context.nbytes((1, width)) == 1.25 * width + 2 * width / 128
    actual = per_layer(recipe, batch, length, width)
    assert actual == pytest.approx(planned / (2 * width), abs=1e-9)
    assert bool(ran) == kernels
    assert actual < (1 - below) * per_layer("bf16", batch, length, width)
