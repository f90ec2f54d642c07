"""Norms and attention of NNX models: which are recognized, their values and their residuals."""

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from experiments.models.flash import flash
from experiments.models.llama import Llama, LlamaConfig
from fp8jax.recipes import Context
from tests.distance import relative
from tests.modules.residuals import INNER, TOKENS, WIDTH, codes, gradients, inputs
from tests.programs import residuals
from tests.rows import slow

COAT = fp8jax.recipes.coat_activations()
FAITHFUL = dataclasses.replace(COAT, context=Context("e4m3:group16"))
LINEAR_ONLY = dataclasses.replace(COAT, context=Context())
NORMS = {
    "rms": lambda rngs, **kinds: nnx.RMSNorm(WIDTH, rngs=rngs, **kinds),
    "rms, eps": lambda rngs, **kinds: nnx.RMSNorm(WIDTH, epsilon=0.3, rngs=rngs, **kinds),
    "rms, no scale": lambda rngs, **kinds: nnx.RMSNorm(WIDTH, use_scale=False, rngs=rngs, **kinds),
    "layer": lambda rngs, **kinds: nnx.LayerNorm(WIDTH, rngs=rngs, **kinds),
    "layer, eps": lambda rngs, **kinds: nnx.LayerNorm(WIDTH, epsilon=0.3, rngs=rngs, **kinds),
    "layer, no scale": lambda rngs, **kinds: nnx.LayerNorm(WIDTH, use_scale=False, rngs=rngs, **kinds),
    "layer, neither": lambda rngs, **kinds: nnx.LayerNorm(WIDTH, use_scale=False, use_bias=False, rngs=rngs, **kinds),
}


def shaken(module):
    """Returns a module with random parameters instead of zeros and ones."""
    params = nnx.state(module, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    noise = [0.3 * jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)]
    nnx.update(module, jax.tree.unflatten(tree, [x + n.astype(x.dtype) for x, n in zip(leaves, noise, strict=True)]))
    return module


class Normed(nnx.Module):
    """A norm and a layer that reads it."""

    def __init__(self, norm, **kinds) -> None:
        rngs = nnx.Rngs(0)
        self.norm = shaken(NORMS[norm](rngs, **kinds))
        self.linear = nnx.Linear(WIDTH, INNER, rngs=rngs, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.norm(x))


NORMS_OF_KINDS = [(norm, {}) for norm in NORMS] + [
    ("rms", {"dtype": jnp.bfloat16}),
    ("layer", {"param_dtype": jnp.bfloat16}),
]


# A norm without a scale, or with another eps, is in one of the two kinds.
@pytest.mark.parametrize(
    ("norm", "kinds"),
    [slow(*row) if row[0] in ("rms, eps", "rms, no scale", "layer, no scale") else row for row in NORMS_OF_KINDS],
    ids=str,
)
def test_norms_compute_what_they_did_and_keep_one_copy_of_their_input_in_codes(norm, kinds):
    model, x = Normed(norm, **kinds), 2 + inputs(dtype=jnp.bfloat16 if kinds else jnp.float32)
    quantized = fp8jax.nnx.quantize(model, COAT)
    y, expected = quantized.norm(x), model.norm(x)
    assert y.dtype == expected.dtype
    assert isinstance(quantized.norm, type(model.norm))
    # Here the variance is of the centered input, there of squares: a bf16 result may round either way.
    np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(expected, np.float32), rtol=2.0**-8, atol=1e-5)
    assert codes(quantized, x) == {WIDTH: 1}
    assert codes(fp8jax.nnx.quantize(model, FAITHFUL), x) == {WIDTH: 2}
    actual, exact = gradients(quantized, x), gradients(model, x)
    assert relative(actual[1], exact[1]) < 0.12
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(m)) for m in (model, quantized)))


class OwnNorm(nnx.RMSNorm):
    def __call__(self, x, mask=None):
        return jnp.flip(super().__call__(x, mask), -1)


def test_norms_that_compute_something_else_are_left_as_written():
    """Other axes, a mask, or another class: values do not change."""
    several = nnx.LayerNorm(WIDTH, reduction_axes=(-2, -1), feature_axes=-1, rngs=nnx.Rngs(0))
    masked = nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0))
    mask = jnp.arange(WIDTH) < 7

    class Reads(nnx.Module):
        def __init__(self, norm, *more) -> None:
            self.norm, self.more, self.linear = norm, more, nnx.Linear(WIDTH, INNER, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.linear(self.norm(x, mask=mask if self.more else None))

    for model, expected_norms in (
        (Reads(several), []),
        (Reads(masked, 1), []),
        (Reads(OwnNorm(WIDTH, rngs=nnx.Rngs(0))), []),
    ):
        parts = fp8jax.explain(model, COAT, inputs(2, 6, WIDTH)).context_entries
        assert [part.path for part in parts] == expected_norms
        quantized, linear = (fp8jax.nnx.quantize(model, recipe) for recipe in (COAT, LINEAR_ONLY))
        x = inputs(2, 6, WIDTH)
        np.testing.assert_array_equal(np.asarray(quantized(x)), np.asarray(linear(x)))


def test_rules_choose_for_norms_by_their_path_and_for_activations_by_the_layer_that_reads_them():
    class Block(nnx.Module):
        def __init__(self) -> None:
            self.norm, self.mlp = nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0)), Gated()

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.mlp(self.norm(x))

    def saved_arrays(*rules):
        return {part.path: part.context for part in fp8jax.explain(Block(), rules, inputs()).context_entries}

    everything = fp8jax.Rule(".*", COAT)
    assert saved_arrays(everything) == {"norm": COAT.context, "mlp/c": COAT.context}
    assert saved_arrays(fp8jax.Rule("norm", None), everything) == {"norm": None, "mlp/c": COAT.context}
    assert saved_arrays(fp8jax.Rule("mlp/c", None), everything) == {"norm": COAT.context}
    assert saved_arrays(fp8jax.Rule("mlp/[ab]", None), everything) == {"norm": COAT.context, "mlp/c": COAT.context}
    assert saved_arrays(fp8jax.Rule("mlp/.*", LINEAR_ONLY), fp8jax.Rule("norm", FAITHFUL)) == {"norm": FAITHFUL.context}
    assert saved_arrays(fp8jax.Rule(".*", LINEAR_ONLY)) == {}
    with pytest.raises(ValueError, match="no layer is left for 'norms' to match; the layers are mlp/a, mlp/b, mlp/c"):
        fp8jax.nnx.quantize(Block(), [fp8jax.Rule("norms", COAT), everything])
    # A recipe may have only contexts of norms and activations.
    only = fp8jax.nnx.quantize(Block(), fp8jax.Recipe("contexts", context=COAT.context))
    assert codes(only, inputs()) == {WIDTH: 1, INNER: 2}


class Gated(nnx.Module):
    def __init__(self) -> None:
        self.a, self.b, self.c = (
            nnx.Linear(*sizes, rngs=nnx.Rngs(0)) for sizes in ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH))
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c(jax.nn.silu(self.a(x)) * self.b(x))


class Attention(nnx.Module):
    """Projections around attention, with an argument that is not an array."""

    def __init__(self, attend) -> None:
        make = lambda: nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))  # noqa: E731
        self.q, self.k, self.v, self.out, self.attend = make(), make(), make(), make(), attend

    def __call__(self, x: jax.Array, scale: float = 1.0, *, again: bool = False) -> jax.Array:
        q, k, v = (layer(x).reshape(2, 6, 4, 8) for layer in (self.q, self.k, self.v))
        mixed = scale * self.attend(q, k, v) if again else self.attend(q * scale, k, v)
        return self.out(mixed.reshape(x.shape))


def probabilities(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def test_a_projection_keeps_no_copy_of_what_attention_keeps_and_codes_of_all_else():
    x = inputs()
    layouts = lambda q, k, v: flash(q, k, v).transpose(0, 2, 1, 3).transpose(0, 2, 1, 3)  # noqa: E731
    for attend, saved_arrays in ((flash, {WIDTH: 1}), (layouts, {WIDTH: 1}), (probabilities, {WIDTH: 2})):
        model = Attention(attend)
        quantized = fp8jax.nnx.quantize(model, COAT)
        assert codes(quantized, x) == saved_arrays
        linear = fp8jax.nnx.quantize(model, LINEAR_ONLY)
        np.testing.assert_array_equal(np.asarray(quantized(x)), np.asarray(linear(x)))
        # Saved and recomputed values have the same codes.
        for a, b in zip(*(jax.tree.leaves(gradients(m, x)) for m in (quantized, linear)), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-3)
    # If another operation reads attention's result, it is another array, which is saved as codes.
    quantized = fp8jax.nnx.quantize(Attention(flash), COAT)
    graph, params = nnx.split(quantized, nnx.Param)
    saved_arrays = residuals(lambda p, x: nnx.merge(graph, p)(x, 2.0, again=True), params, x)
    assert [shape for dtype, shape in saved_arrays if dtype == "uint8"] == [(TOKENS, WIDTH)] * 2


def test_attention_of_flax_with_a_flash_function_keeps_its_output_once():
    def attend(query, key, value, *args, **kwargs):
        return flash(query, key, value)

    make = lambda f: nnx.MultiHeadAttention(4, WIDTH, decode=False, attention_fn=f, rngs=nnx.Rngs(0))  # noqa: E731
    x = inputs(2, 6, WIDTH)
    assert codes(fp8jax.nnx.quantize(make(attend), COAT), x) == {WIDTH: 1}
    assert codes(fp8jax.nnx.quantize(make(nnx.dot_product_attention), COAT), x) == {WIDTH: 2}
    quantized, linear = (fp8jax.nnx.quantize(make(attend), recipe) for recipe in (COAT, LINEAR_ONLY))
    assert relative(gradients(quantized, x), gradients(linear, x)) < 1e-2


def test_a_cache_of_attention_is_written_as_before():
    def decoded(recipe):
        model = nnx.MultiHeadAttention(4, WIDTH, decode=True, rngs=nnx.Rngs(0))
        model = model if recipe is None else fp8jax.nnx.quantize(model, recipe)
        model.init_cache((2, 5, WIDTH))
        outputs = [model(inputs(2, 1, WIDTH, dtype=jnp.float32)) for _ in range(3)]
        return outputs, int(model.cache_index[...])

    (expected, index), (actual, same_index) = decoded(LINEAR_ONLY), decoded(COAT)
    assert (index, same_index) == (3, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), expected, actual)


LLAMA = LlamaConfig(vocab=64, dim=64, layers=2, heads=4, kv_heads=4, mlp_dim=96)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_a_whole_llama_has_nearly_the_gradients_of_bf16(remat, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **_: flash(q, k, v))
    model = Llama(LLAMA, remat=remat, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 24)))

    def loss_and_gradient(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda p: jnp.mean(nnx.merge(graph, p, rest)(tokens).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    exact, linear, faithful, lean = (
        loss_and_gradient(m) for m in (model, *(fp8jax.nnx.quantize(model, r) for r in (LINEAR_ONLY, FAITHFUL, COAT)))
    )
    # In the forward pass, only operands of products are quantized.
    assert float(linear[0]) == pytest.approx(float(lean[0]), rel=1e-4) == pytest.approx(float(faithful[0]), rel=1e-4)
    errors = [relative(g[1], exact[1]) for g in (linear, faithful, lean)]
    # Contexts add an error of the size of the products' standard deviation.
    assert 0.95 * errors[0] < errors[1] < 1.5 * errors[0]
    assert 0.95 * errors[0] < errors[2] < 1.5 * errors[0]


def test_identical_recomputations_of_one_input_are_one_in_the_compiled_program():
    class Branches(nnx.Module):
        def __init__(self, branches) -> None:
            self.norm = nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0))
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(branches)])

        def __call__(self, x: jax.Array) -> jax.Array:
            h = self.norm(x)
            return sum(layer(h) for layer in self.layers)

    def conversions(branches) -> int:
        graph, params = nnx.split(fp8jax.nnx.quantize(Branches(branches), COAT), nnx.Param)
        grad = jax.grad(lambda p, x: jnp.sum(jnp.sin(nnx.merge(graph, p)(x))))
        text = jax.jit(grad).lower(params, inputs(dtype=jnp.float32)).compile().as_text()
        assert f"f8e4m3fn[{WIDTH},{WIDTH}]" in text
        return len(re.findall(rf"f8e4m3fn\[({TOKENS},{WIDTH}|{WIDTH},{TOKENS})\]\S* convert\(", text))

    # The input of the norm, the forward operand, and the recomputed operand.
    assert conversions(3) == conversions(1) >= 3


def test_explain_says_what_each_part_keeps():
    sample = jnp.zeros((2, 24), jnp.int32)
    report = fp8jax.explain(Llama(LLAMA, rngs=nnx.Rngs(0)), COAT, sample)
    saved = {(entry.path, entry.kind): entry.residual for entry in report.entries}
    context = "e4m3:group16, 1.125 B/element"
    assert saved["layers/mlp/down", "silu(gate) * up"] == saved["layers/mlp_norm", "RMSNorm"] == context
    assert saved["layers/mlp/down", "Linear"] == "nothing: silu(gate) * up recomputes it"
    assert saved["layers/mlp/up", "Linear"] == "nothing: RMSNorm recomputes it"
    before_a_call = str(fp8jax.explain(Llama(LLAMA, rngs=nnx.Rngs(0)), COAT))
    assert (
        "activations and attention between layers are known only in a call; pass sample inputs to explain"
        in before_a_call
    )
    assert fp8jax.explain(Llama(LLAMA, rngs=nnx.Rngs(0)), LINEAR_ONLY).context_entries == ()


@pytest.mark.usefixtures("inspected")
def test_layers_with_delayed_scaling_make_their_input_again_too():
    delayed = fp8jax.recipes.te_delayed()
    model, x = Normed("rms", dtype=jnp.bfloat16), inputs()

    def saved_arrays(recipe) -> Counter:
        graph, params, rest = nnx.split(fp8jax.nnx.quantize(model, recipe), nnx.Param, ...)
        actual = residuals(lambda p, x: nnx.merge(graph, p, rest, copy=True)(x), params, x)
        return Counter((dtype, shape[-1]) for dtype, shape in actual if TOKENS in shape and shape[-1] == WIDTH)

    assert saved_arrays(dataclasses.replace(delayed, context=COAT.context)) == {("uint8", WIDTH): 1}
    assert saved_arrays(dataclasses.replace(delayed, context=FAITHFUL.context)) == {("uint8", WIDTH): 2}
