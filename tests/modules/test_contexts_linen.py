"""Norms of Linen models: their values and their residuals."""

import dataclasses
import functools
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.recipes import Context
from tests.distance import relative
from tests.programs import residuals
from tests.rows import slow

COAT = fp8jax.recipes.coat_activations()
LINEAR_ONLY = dataclasses.replace(COAT, context=Context())
TOKENS, WIDTH, INNER = 12, 32, 48
X = jax.random.normal(jax.random.key(7), (TOKENS, WIDTH))


def _loss(model, variables, x):
    return jnp.sum(jnp.sin(model.apply(variables, x).astype(jnp.float32)))


def _gradients(model, variables, x):
    return jax.jit(jax.grad(functools.partial(_loss, model)))(variables, x)


class LinenBlock(linen.Module):
    """Norms of Linen, each read by a layer."""

    kinds: Any = dataclasses.field(default_factory=dict)

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = linen.Dense(WIDTH, name="first")(linen.LayerNorm(epsilon=0.1, name="norm", **self.kinds)(x))
        return linen.Dense(INNER, name="second")(linen.RMSNorm(use_scale=False, name="root", dtype=jnp.bfloat16)(x + h))


def whole(recipe):
    """Returns rules for all layers, including heads, because the model returns a layer's result."""
    return fp8jax.Rule(".*", recipe)


@pytest.mark.parametrize("kinds", [{}, slow({"use_bias": False}), {"use_scale": False, "dtype": jnp.bfloat16}], ids=str)
def test_norms_of_linen_compute_what_they_did_and_keep_codes(kinds):
    model, x = LinenBlock(kinds), 2 + X
    variables = model.init(jax.random.key(0), x)
    quantized = fp8jax.linen.quantize(model, whole(COAT))
    assert jax.tree.structure(quantized.init(jax.random.key(0), x)) == jax.tree.structure(variables)

    def intermediate(recipe, capture="norm"):
        copy = model if recipe is None else fp8jax.linen.quantize(model, whole(recipe))
        _, state = copy.apply(variables, x, capture_intermediates=True, mutable="intermediates")
        return state["intermediates"][capture]["__call__"][0]

    np.testing.assert_allclose(
        *(np.asarray(intermediate(r), np.float32) for r in (None, COAT)), rtol=2.0**-7, atol=1e-5
    )
    assert intermediate(COAT).dtype == intermediate(None).dtype
    saved = {
        name: [s for d, s in residuals(lambda p, x, m=m: m.apply(p, x), variables, x) if d == "uint8"]
        for name, m in (("linear", fp8jax.linen.quantize(model, whole(LINEAR_ONLY))), ("lean", quantized))
    }
    # The inputs of two layers; the inputs of two norms instead.
    assert saved["linear"] == saved["lean"] == [(TOKENS, WIDTH)] * 2
    wide = [s for d, s in residuals(quantized.apply, variables, x) if s == (TOKENS, WIDTH) and d != "uint8"]
    assert not wide
    assert relative(_gradients(quantized, variables, x), _gradients(model, variables, x)) < 0.15


def test_rules_and_explain_know_the_norms_of_linen():
    model, x = LinenBlock(), X
    rules = [fp8jax.Rule("norm", None), fp8jax.Rule(".*", COAT)]
    report = fp8jax.explain(model, rules, x)
    # A norm without a parameter has the path of the layer that reads it.
    assert {part.path: part.context for part in report.context_entries} == {"norm": None, "second": COAT.context}
    saved = residuals(fp8jax.linen.quantize(model, rules).apply, model.init(jax.random.key(0), x), x)
    assert len([s for d, s in saved if d == "uint8"]) == 2
    with pytest.raises(ValueError, match="no layer is left for 'norms' to match"):
        fp8jax.explain(model, [fp8jax.Rule("norms", COAT), *rules], x)


class Swiglu(linen.Module):
    """As in most models, with layers in setup and dropout; or one compact layer for gate and up."""

    split: bool = False
    rate: float = 0.0

    @linen.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        dense = functools.partial(linen.Dense, use_bias=False, dtype=jnp.bfloat16)
        if self.split:
            up, gate = jnp.split(dense(2 * INNER, name="both")(x), 2, axis=-1)
        else:
            gate, up = dense(INNER, name="gate")(x), dense(INNER, name="up")(x)
        h = linen.Dropout(self.rate, deterministic=deterministic)(up * linen.silu(gate))
        return x + linen.Dropout(self.rate, deterministic=deterministic)(dense(WIDTH, name="down")(h))


class Plain(linen.Module):
    """An MLP with layers in setup."""

    scale: float | None = None

    def setup(self) -> None:
        self.fc1, self.fc2 = linen.Dense(INNER, dtype=jnp.bfloat16), linen.Dense(WIDTH, dtype=jnp.bfloat16)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = linen.gelu(self.fc1(x))
        return self.fc2(h if self.scale is None else self.scale * h)


class Layers(linen.Module):
    """A stack under nn.scan; each layer is a checkpoint that saves named values."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = linen.remat(Swiglu, policy=jax.checkpoint_policies.everything_saveable, prevent_cse=False)
        scanned = linen.scan(
            lambda layer, x, _: (layer(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return scanned(layer(name="mlp"), x, None)[0]


FAITHFUL = dataclasses.replace(COAT, context=Context("e4m3:group16"))
HALF = X.astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("model", "text", "stacked"),
    [
        (Swiglu(), "silu(gate) * up", ()),
        slow(Swiglu(split=True, rate=0.5), "silu(gate) * up", ()),
        slow(Plain(), "gelu_tanh(x)", ()),
        (Layers(), "silu(gate) * up", (2,)),
    ],
    ids=["gated", "split", "plain", "scan"],
)
def test_activations_between_layers_of_linen_keep_codes(model, text, stacked):
    variables = model.init(jax.random.key(0), HALF)
    quantized = fp8jax.linen.quantize(model, COAT)
    assert jax.tree.structure(quantized.init(jax.random.key(0), HALF)) == jax.tree.structure(variables)
    (part,) = [p for p in fp8jax.explain(model, COAT, HALF).context_entries if not p.kind.endswith("Norm")]
    assert (part.kind, part.context) == (text, COAT.context)
    saved = residuals(quantized.apply, variables, HALF)
    codes = [s for d, s in saved if d == "uint8"]
    gates = 1 if isinstance(model, Plain) else 2
    # The layers' input; gate and up; the last layer recomputes its input.
    assert sorted(codes) == sorted([(*stacked, TOKENS, WIDTH)] + [(*stacked, TOKENS, INNER)] * gates), saved
    assert not [s for d, s in saved if d == "bfloat16" and s == (*stacked, TOKENS, INNER)], saved
    linear = fp8jax.linen.quantize(model, LINEAR_ONLY)
    assert relative(_loss(quantized, variables, HALF), _loss(linear, variables, HALF)) < 1e-6
    grads = {m: _gradients(m, variables, HALF) for m in (model, linear, quantized)}
    errors = [relative(grads[m], grads[model]) for m in (quantized, linear)]
    assert errors[0] < 1.2 * errors[1] < 0.4


def test_what_is_no_activation_between_layers_of_linen_is_left_alone():
    model = Plain(scale=0.5)
    variables = model.init(jax.random.key(0), HALF)
    assert fp8jax.explain(model, COAT, HALF).context_entries == ()
    codes = [s for d, s in residuals(fp8jax.linen.quantize(model, COAT).apply, variables, HALF) if d == "uint8"]
    assert codes == [(TOKENS, WIDTH), (TOKENS, INNER)]
    # Dropout between them: the input of the layer is saved.
    dropped = Swiglu(rate=0.5)
    variables = dropped.init(jax.random.key(0), HALF)
    copy = fp8jax.linen.quantize(dropped, COAT)
    with_noise = lambda m: m.apply(variables, HALF, False, rngs={"dropout": jax.random.key(1)})  # noqa: E731
    assert relative(with_noise(copy), with_noise(fp8jax.linen.quantize(dropped, LINEAR_ONLY))) < 1e-6
    assert relative(with_noise(copy), with_noise(dropped)) < 0.15


def test_rules_choose_the_activations_of_linen_by_the_layer_that_reads_them():
    rules = [fp8jax.Rule("down", LINEAR_ONLY), fp8jax.Rule(".*", COAT)]
    assert fp8jax.explain(Swiglu(), rules, HALF).context_entries == ()
    model = fp8jax.linen.quantize(Swiglu(), rules)
    variables = Swiglu().init(jax.random.key(0), HALF)
    codes = [s for d, s in residuals(model.apply, variables, HALF) if d == "uint8"]
    assert codes == [(TOKENS, WIDTH), (TOKENS, INNER)]
    faithful = residuals(fp8jax.linen.quantize(Swiglu(), FAITHFUL).apply, variables, HALF)
    # Besides gate and up the activated gate, and the codes that the last layer reads.
    assert sorted(s for d, s in faithful if d == "uint8") == sorted([(TOKENS, WIDTH)] + [(TOKENS, INNER)] * 4)


JITTED = linen.jit(Swiglu)


class Shared(linen.Module):
    """An MLP that is called twice, jitted, and one with layers inside another block."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mlp = JITTED(name="mlp")
        x = mlp(mlp(x))
        h = linen.LayerNorm(dtype=jnp.bfloat16, name="norm")(x)
        h = linen.gelu(linen.Dense(INNER, dtype=jnp.bfloat16, name="wide")(h), approximate=False)
        return x + linen.Dense(WIDTH, dtype=jnp.bfloat16, name="narrow")(h)


@pytest.mark.slow
def test_perceptrons_that_are_shared_jitted_or_written_into_a_block_are_recognised():
    model = Shared()
    variables = model.init(jax.random.key(0), HALF)
    parts = {part.path: part.kind for part in fp8jax.explain(model, COAT, HALF).context_entries}
    assert parts == {"narrow": "gelu(x)", "mlp/down": "silu(gate) * up", "norm": "LayerNorm"}
    quantized, linear = (fp8jax.linen.quantize(model, recipe) for recipe in (COAT, LINEAR_ONLY))
    for _ in range(2):  # the second time nn.jit may have the trace
        codes = [s for d, s in residuals(quantized.apply, variables, HALF) if d == "uint8"]
        # For the MLP twice input, gate and up; the input of the norm, whose reader recomputes its own; of "wide".
        assert sorted(codes) == sorted([(TOKENS, WIDTH)] * 3 + [(TOKENS, INNER)] * 5)
    assert relative(quantized.apply(variables, HALF), linear.apply(variables, HALF)) < 1e-6
    grads = {m: _gradients(m, variables, HALF) for m in (model, linear, quantized)}
    errors = [relative(grads[m], grads[model]) for m in (quantized, linear)]
    assert errors[0] < 1.2 * errors[1] < 0.6


class Remade(linen.Module):
    """An MLP next to a layer under a checkpoint, and one whose first layer is under a checkpoint."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(linen.Dense, dtype=jnp.bfloat16)
        again = functools.partial(linen.remat(linen.Dense), dtype=jnp.bfloat16)
        x = dense(WIDTH, name="down")(linen.silu(dense(INNER, name="gate")(again(WIDTH, name="first")(x))))
        return dense(WIDTH, name="narrow")(linen.gelu(again(INNER, name="wide")(x)))


def test_activations_of_what_a_checkpoint_gives_are_found():
    assert [part.kind for part in fp8jax.explain(Remade(), COAT, HALF).context_entries] == [
        "silu(x)",
        "gelu_tanh(x)",
    ]
    variables = Remade().init(jax.random.key(0), HALF)
    quantized, linear = (fp8jax.linen.quantize(Remade(), recipe) for recipe in (COAT, LINEAR_ONLY))
    assert relative(quantized.apply(variables, HALF), linear.apply(variables, HALF)) < 1e-6


class Chooses(linen.Module):
    """An MLP that selects its activation by an argument, or by its name."""

    @linen.compact
    def __call__(self, x: jax.Array, how: object = None) -> jax.Array:
        f = linen.silu if how is True or self.name == "first" else linen.gelu
        return linen.Dense(WIDTH, name="down")(f(linen.Dense(INNER, name="gate")(x)))


class Pair(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Chooses(name="second")(Chooses(name="first")(x))


def test_each_call_is_recognised_by_itself():
    forms = {part.path: part.kind for part in fp8jax.explain(Pair(), COAT, HALF).context_entries}
    assert forms == {"first/down": "silu(x)", "second/down": "gelu_tanh(x)"}
    variables = Chooses().init(jax.random.key(0), X)
    quantized, linear = (fp8jax.linen.quantize(Chooses(), recipe) for recipe in (COAT, LINEAR_ONLY))
    for how in (True, 1):  # equal, and of one hash
        assert relative(quantized.apply(variables, X, how), linear.apply(variables, X, how)) < 1e-6
