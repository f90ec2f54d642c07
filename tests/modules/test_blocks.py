"""Activations between layers of NNX models: which are recognized, their values and their residuals."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp8jax
from experiments.models.flash import flash
from fp8jax.recipes import Context
from tests.distance import relative
from tests.modules.residuals import (
    COAT,
    INNER,
    WIDTH,
    Short,
    X,
    assert_same,
    both,
    codes,
    found_activations,
    gradients,
    inputs,
    linear,
    wide,
)

FAITHFUL = dataclasses.replace(COAT, context=Context("e4m3:group16"))


class Perceptron(nnx.Module):
    """Three layers, and a function of them and the input."""

    def __init__(self, compute, doubled=False, bias=False) -> None:
        self.a, self.c = linear(outer=2 * INNER if doubled else INNER, use_bias=bias), linear(INNER, WIDTH)
        if not doubled:
            self.b = linear(use_bias=bias)
        self.compute = compute

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.compute(self, x)


def halves(m, x):
    up, gate = jnp.split(m.a(x), 2, axis=-1)
    return m.c(up * nnx.gelu(gate))


def twice(y, m):
    return (m.c(jax.nn.silu(m.a(y)) * m.b(y)).astype(y.dtype), None)


def by_hand(m, x):
    h = m.up(x)
    return m.down(0.5 * h * (1 + jax.scipy.special.erf(h / 2**0.5)))


def by_tanh(m, x):
    h = m.up(x)
    return m.down(0.5 * h * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (h + 0.044715 * h**3))))


SILU, GELU, TANH = "silu", "gelu", "gelu_tanh"
KNOWN = {
    "silu": (f"{SILU}(gate) * up", Perceptron(lambda m, x: m.c(jax.nn.silu(m.a(x)) * m.b(x)))),
    "swapped": (f"{SILU}(gate) * up", Perceptron(lambda m, x: x + m.c(m.a(x) * nnx.swish(m.b(x))), bias=True)),
    "two inputs": (f"{TANH}(gate) * up", Perceptron(lambda m, x: m.c(nnx.gelu(m.a(x * x)) * m.b(jnp.sin(x))))),
    "gelu": (f"{GELU}(gate) * up", Perceptron(lambda m, x: m.c(jax.nn.gelu(m.a(x), approximate=False) * m.b(x)))),
    "halves": (f"{TANH}(gate) * up", Perceptron(halves, doubled=True)),
    "short": (f"{TANH}(x)", Short(lambda m, x: m.down(nnx.gelu(m.up(x))))),
    "sigmoid": (f"{SILU}(x)", Short(lambda m, x: m.down((h := m.up(x)) * jax.nn.sigmoid(h)))),
    "sequential": (f"{SILU}(x)", nnx.Sequential(linear(), jax.nn.silu, linear(INNER, WIDTH, 1))),
    "by hand": (f"{GELU}(x)", Short(by_hand)),
    "by tanh": (f"{TANH}(x)", Short(by_tanh)),
}
SLOW = ("swapped", "two inputs", "short", "sigmoid", "gelu", "halves", "by tanh", "sequential")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in KNOWN])
def test_perceptrons_are_known_by_what_they_compute(name):
    (form, model), x = KNOWN[name], inputs(2, 6, WIDTH)
    assert found_activations(model, x) == [form]
    quantized, written = both(model)
    assert isinstance(quantized, type(model))
    # Forward it is the same function, of which an order of sums may differ.
    assert relative(quantized(x), written(x)) < 1e-3
    inputs_of_layers = 2 if name == "two inputs" else 1
    assert codes(written, x) == {WIDTH: inputs_of_layers, INNER: 1}
    gated = 2 if "*" in form else 1
    assert codes(quantized, x) == {WIDTH: inputs_of_layers, INNER: gated}
    assert codes(fp8jax.nnx.quantize(model, FAITHFUL), x)[INNER] == 2 * gated
    errors = [relative(gradients(m, x)[1], gradients(model, x)[1]) for m in (quantized, written)]
    assert errors[0] < 1.2 * errors[1] < 0.25
    assert_same(*(nnx.to_pure_dict(nnx.state(m)) for m in (quantized, model)))


def test_a_loop_and_a_layer_that_is_called_twice_keep_codes():
    loop = Perceptron(lambda m, x: jax.lax.scan(lambda y, _: twice(y, m), x, length=2)[0])
    called_twice = Perceptron(lambda m, x: m.c(jax.nn.silu(m.a(x)) * m.a(x)))
    rounded = lambda h: h.astype(jnp.float8_e5m2).astype(h.dtype)  # noqa: E731
    cast = Perceptron(lambda m, x: m.c(jax.nn.silu(rounded(m.a(x))) * m.b(x)))
    for model in (loop, called_twice, cast):
        assert found_activations(model, inputs()) == [f"{SILU}(gate) * up"]
        quantized, written = both(model)
        assert codes(quantized, inputs())[INNER] > codes(written, inputs())[INNER]
        assert relative(quantized(inputs()), written(inputs())) < 1e-3


UNKNOWN = {
    "another activation": Perceptron(lambda m, x: m.c(jax.nn.relu(m.a(x)) * m.b(x))),
    "a factor": Perceptron(lambda m, x: m.c(jax.nn.silu(m.a(x)) * m.b(x) * 0.5)),
    "a sum": Perceptron(lambda m, x: m.c(jax.nn.silu(m.a(x)) * m.b(x) + x[..., :1])),
    "a value": Perceptron(lambda m, x: m.c(jax.nn.silu(m.a(x)) * m.b(x)) if x.ravel()[0] > 9 else m.c(m.a(x))),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_computes_anything_else_is_left_as_it_is(name):
    model, x = UNKNOWN[name], inputs()
    quantized, written = both(model)
    assert_same(quantized(x), written(x))
    if name == "a value":
        return
    assert found_activations(model, x) == []
    assert codes(quantized, x) == codes(written, x)


class Dropping(Short):
    def __init__(self, compute) -> None:
        super().__init__(compute)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


class NormFirst(nnx.Module):
    def __init__(self) -> None:
        self.scale, self.rest = nnx.Param(jnp.ones(WIDTH)), Short(by_tanh)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rest(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * self.scale[...])


def test_a_norm_and_an_activation_by_hand_are_known_and_dropout_hides_one():
    parts = [part.kind for part in fp8jax.explain(NormFirst(), COAT, inputs()).context_entries]
    assert parts == ["RMSNorm", f"{TANH}(x)"]
    assert found_activations(Dropping(lambda m, x: m.down(m.dropout(nnx.gelu(m.up(x))))), inputs()) == []


def test_a_block_that_is_not_known_keeps_codes_by_the_hook():
    x = inputs()
    written = Perceptron(lambda m, x: m.c(jnp.abs(jax.nn.silu(m.a(x)) * m.b(x))))
    hooked = Perceptron(lambda m, x: m.c(jnp.abs(fp8jax.glu(m.a(x), m.b(x), recipe=COAT))))
    assert relative(*(fp8jax.nnx.quantize(m, COAT)(x) for m in (written, hooked))) < 0.01
    assert [codes(fp8jax.nnx.quantize(m, COAT), x)[INNER] for m in (written, hooked)] == [1, 3]


class Decoder(nnx.Module):
    """A block in one call: attention, a gated MLP and dropout."""

    def __init__(self, rngs: nnx.Rngs, attend=flash) -> None:
        make = lambda inner, outer: nnx.Linear(inner, outer, dtype=jnp.bfloat16, use_bias=False, rngs=rngs)  # noqa: E731
        self.q, self.k, self.v, self.o = (make(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = make(WIDTH, INNER), make(WIDTH, INNER), make(INNER, WIDTH)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2)])
        self.dropout, self.seen = nnx.Dropout(0.5, rngs=rngs), nnx.BatchStat(jnp.zeros(()))
        self.attend = attend

    def __call__(self, x: jax.Array, mask: jax.Array | None = None, *, deterministic: bool = True) -> jax.Array:
        self.seen[...] += 1
        h = self.norms[0](x)
        q, k, v = (layer(h).reshape(*x.shape[:2], 4, -1) for layer in (self.q, self.k, self.v))
        mixed = self.attend(q, k, v).reshape(x.shape)
        mixed = mixed if mask is None else jnp.where(mask[..., None], mixed, 0)
        x = x + self.dropout(self.o(mixed), deterministic=deterministic)
        h = self.norms[1](x)
        return x + self.dropout(self.down(nnx.silu(self.gate(h)) * self.up(h)), deterministic=deterministic)


MASK = jnp.arange(12).reshape(2, 6) % 5 > 0
# The input of both norms, from which the inputs of q, k and v, and of gate and up, are recomputed; gate and up.
LEAN = {WIDTH: 2, INNER: 2}


@pytest.mark.parametrize("deterministic", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_perceptron_in_a_block_with_attention_masks_and_dropout_keeps_gate_and_up_in_codes(deterministic):
    model = Decoder(nnx.Rngs(0))
    quantized, written = both(model)
    # Attention's residual is saved once, unless an operation separates it from the layer that reads it.
    assert codes(quantized, X, deterministic=deterministic) == LEAN
    assert codes(quantized, X, MASK, deterministic=deterministic) == {WIDTH: 3, INNER: 2}
    assert codes(written, X, MASK, deterministic=deterministic) == {WIDTH: 3, INNER: 1}
    assert wide(quantized, X, MASK, deterministic=deterministic) == 0
    assert (
        relative(quantized(X, MASK, deterministic=deterministic), written(X, MASK, deterministic=deterministic)) < 0.01
    )
    report = fp8jax.explain(model, COAT, X, MASK, deterministic=deterministic)
    # The separate trace that recognizes them is not in the program.
    counted = Counter(name for name, _ in report.program.choices)
    assert (counted["norm"], counted["activation"]) == (2, 1)
    (part,) = [part for part in report.context_entries if not part.kind.endswith("Norm")]
    assert (part.path, part.kind, part.context) == ("down", f"{SILU}(gate) * up", COAT.context)
    (projection,) = [layer for layer in fp8jax.explain(model, COAT, X).layers if layer.has_saved_input]
    assert (projection.path, projection.residual) == ("o", "nothing: its producer saves it")


def test_no_state_is_changed_but_by_the_call_itself():
    for deterministic in (True, False):
        quantized, written = both(Decoder(nnx.Rngs(0), lambda q, k, v: v))
        for model in (quantized, written):
            for _ in range(2):
                model(X, MASK, deterministic=deterministic)
        assert_same(*(nnx.to_pure_dict(nnx.state(m, nnx.Not(nnx.Param))) for m in (quantized, written)))
        assert quantized.seen[...] == 2
    plain, one, other = Decoder(nnx.Rngs(0)), *(fp8jax.nnx.quantize(Decoder(nnx.Rngs(i)), COAT) for i in (0, 1))
    assert jax.tree.structure(nnx.state(one)) == jax.tree.structure(nnx.state(plain))
    assert nnx.graphdef(one) == nnx.graphdef(other)
    one(X, deterministic=False)
    assert nnx.graphdef(one) == nnx.graphdef(nnx.clone(one)) == nnx.graphdef(other)
    assert vars(one).keys() == vars(plain).keys()


class Stack(nnx.Module):
    """Decoders under nnx.scan, checkpoints or not."""

    def __init__(self, remat: bool, layers: int = 2) -> None:
        self.remat = remat
        self.layers = nnx.vmap(Decoder, in_axes=0)(nnx.Rngs(0).split(layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        block = lambda layer, x: layer(x, MASK)  # noqa: E731
        block = nnx.remat(block) if self.remat else block
        return nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


def test_loops_checkpoints_and_jit_keep_what_one_call_keeps():
    saved_codes = {}
    for remat in (False, True):
        quantized = fp8jax.nnx.quantize(Stack(remat), COAT)
        assert found_activations(Stack(remat), X) == [f"{SILU}(gate) * up"]
        saved_codes[remat] = codes(quantized, X)
    assert saved_codes == {False: {WIDTH: 3, INNER: 2}, True: {}}
    quantized, written = both(Decoder(nnx.Rngs(0)))
    loss = lambda model, x: jnp.sum(jnp.sin(model(x, MASK, deterministic=True).astype(jnp.float32)))  # noqa: E731
    (value, grads), (again, same) = (
        nnx.jit(nnx.value_and_grad(f))(quantized, X) for f in (loss, nnx.remat(loss, prevent_cse=False))
    )
    expected, by_linear = nnx.jit(nnx.value_and_grad(loss))(written, X)
    assert abs(value - expected) < 1e-2 * abs(expected)
    assert abs(again - expected) < 1e-2 * abs(expected)
    assert relative(grads, by_linear) < 0.15
    assert relative(same, by_linear) < 0.15
    assert relative(grads, by_linear) > 0


def test_a_model_that_is_quantized_already_is_refused():
    quantized = fp8jax.nnx.quantize(KNOWN["short"][1], FAITHFUL)
    for again in (fp8jax.nnx.quantize, fp8jax.explain):
        with pytest.raises(ValueError, match="already quantized"):
            again(quantized, COAT)
