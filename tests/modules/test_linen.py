"""Quantized Linen models: the same calls and parameters, under every lifted transformation."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import fp8jax
from fp8jax.modules.linen import DotGeneral
from fp8jax.ops.products import product
from fp8jax.ops.products.linear import key_from_data
from tests.modules import architectures
from tests.modules.architectures import LENGTH, VOCAB, Nanodo, train, within_noise
from tests.programs import dots, residuals
from tests.rows import slow

TE, DEEPSEEK = fp8jax.recipes.te_current(), fp8jax.recipes.deepseek()
KEY = jax.random.key(0)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)))
WIDTH, LAYERS = 16, 3
X = jax.random.normal(KEY, (2, 6, WIDTH))


class Block(nn.Module):
    """Attention, a dense layer and an einsum: six linears and two attention products."""

    dtype: object = None

    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, dtype=self.dtype, name="attention")(nn.LayerNorm()(x))
        y = nn.relu(nn.Dense(2 * WIDTH, dtype=self.dtype, name="up")(x))
        return x + nn.Einsum((2 * WIDTH, WIDTH), "...a,ab->...b", dtype=self.dtype, name="down")(y), None


Jitted = nn.jit(Block)


class Stack(nn.Module):
    """Blocks in a loop or under a transformation of Flax, and a head."""

    how: str = "loop"
    dtype: object = None

    def setup(self):
        block = {"remat": nn.remat(Block), "jit": Jitted}.get(self.how, Block)
        if self.how.startswith("scan"):
            block = nn.remat(Block) if self.how == "scan+remat" else Block
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            self.blocks = nn.scan(block, length=LAYERS, **axes)(self.dtype)
        else:
            self.blocks = [block(self.dtype) for _ in range(LAYERS)]
        self.head = nn.Dense(8)

    def __call__(self, x):
        for block in [self.blocks] if self.how.startswith("scan") else self.blocks:
            x, _ = block(x, None)
        return self.head(x)


def eight_and_wide(fn, *args) -> tuple[int, int]:
    actual = dots(fn, *args)
    eight = sum("8" in a and "8" in b for a, b in actual)
    return eight, len(actual) - eight


@functools.cache
def variables(how="loop"):
    return jax.jit(Stack(how).init)(KEY, X)


# Per block: six linear layers and two attention products, with two gradients each; remat repeats all but the last.
PLAIN, REMAT = (18, 6), (23, 8)


@pytest.mark.parametrize("how", [slow("loop"), slow("scan"), slow("remat"), "scan+remat", "jit"])
def test_all_linears_are_quantized_under_transformations(how):
    plain = Stack(how)
    model = fp8jax.linen.quantize(plain, TE)
    # The plain model first: neither model may reuse the trace of the other.
    before = jax.jit(plain.apply)(variables(how), X)
    eight, wide = REMAT if "remat" in how else PLAIN
    written = 1 if "scan" in how else LAYERS
    actual = eight_and_wide(jax.grad(lambda v: model.apply(v, X).sum()), variables(how))
    assert actual == (eight * written, wide * written + 3)
    after = jax.jit(model.apply)(variables(how), X)
    assert 0 < np.linalg.norm(after - before) < 0.3 * np.linalg.norm(before)
    assert eight_and_wide(plain.apply, variables(how), X)[0] == 0
    np.testing.assert_array_equal(jax.jit(lambda v, x: plain.apply(v, x))(variables(how), X), before)


@pytest.mark.parametrize("how", ["scan", slow("remat"), slow("jit")])
def test_transformations_change_no_value(how):
    loop = variables()["params"]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[loop[f"blocks_{i}"] for i in range(LAYERS)])
    params = {"blocks": stacked, "head": loop["head"]} if how == "scan" else loop

    def gradients(how, params):
        model = fp8jax.linen.quantize(Stack(how), TE)
        return jax.jit(jax.value_and_grad(lambda p: (model.apply({"params": p}, X) ** 2).sum()))(params)

    (value, grads), (same, others) = gradients("loop", loop), gradients(how, params)
    np.testing.assert_allclose(value, same, rtol=1e-4)
    a, b = grads["blocks_1"], jax.tree.map(lambda x: x[1], others["blocks"]) if how == "scan" else others["blocks_1"]
    for actual, expected in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.linalg.norm(actual - expected) <= 0.02 * np.linalg.norm(actual) + 1e-4


@pytest.mark.parametrize("how", [slow("loop"), "scan", slow("jit")])
def test_init_and_parameters_are_those_of_the_plain_model(how):
    model = fp8jax.linen.quantize(Stack(how), TE)
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, variables(how), jax.jit(model.init)(KEY, X))
    assert isinstance(model, Stack)
    assert model == fp8jax.linen.quantize(Stack(how), TE) != Stack(how)
    assert eight_and_wide(model.clone(dtype=jnp.bfloat16).apply, variables(how), X)[0] in (6, 6 * LAYERS)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["input's", "bf16"])
def test_linears_that_read_one_input_save_its_codes_once(dtype):
    model = fp8jax.linen.quantize(Stack("scan", dtype), TE)
    codes = [shape for d, shape in residuals(lambda v: model.apply(v, X), variables("scan")) if d == "uint8"]
    # Query, key and value together; out; up; down.
    assert sorted(codes) == sorted([(LAYERS, 12, WIDTH)] * 3 + [(LAYERS, 12, 2 * WIDTH)])


def test_rules_tell_apart_layers_that_share_a_trace_under_jit():
    model = fp8jax.linen.quantize(Stack("jit"), [fp8jax.Rule("blocks_[02]/up", TE), fp8jax.Rule("blocks_1/.*", TE)])
    for _ in range(2):
        assert eight_and_wide(model.apply, variables("jit"), X)[0] == 2 + 6
    others = fp8jax.linen.quantize(Stack("jit"), fp8jax.Rule("blocks_0/.*", TE))
    assert eight_and_wide(others.apply, variables("jit"), X)[0] == 6


@pytest.mark.parametrize("how", ["loop", "scan", slow("jit")])
def test_a_rule_that_matches_no_layer_raises_in_init_and_in_apply(how):
    for path in ("blocks_7/up", "head/bias", "blocks.*/LayerNorm_0"):
        model = fp8jax.linen.quantize(Stack(how), [fp8jax.Rule(path, TE)])
        for run, first in ((model.init, KEY), (model.apply, variables(how))):
            with pytest.raises(ValueError, match=f"no layer is left for {path!r} to match; the layers are block"):
                jax.eval_shape(run, first, X)


class Parts(nn.Module):
    """A compact model with a method of its own, a shared layer, a convolution and a layer inside nn.vmap."""

    @nn.compact
    def __call__(self, x):
        shared = nn.Dense(WIDTH, name="shared")
        x = shared(jnp.tanh(shared(nn.Conv(WIDTH, (3,))(x))))
        many = nn.vmap(nn.Dense, in_axes=None, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=3)
        return self.ending(many(WIDTH, name="many")(x).sum(0))

    def ending(self, x):
        return nn.Dense(4, name="ending_layer")(x)


def test_shared_layers_vmap_and_methods():
    model, v = fp8jax.linen.quantize(Parts(), TE), Parts().init(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, v, model.init(KEY, X))
    # The model's output stays in 16 bits.
    assert eight_and_wide(model.apply, v, X) == (3, 1)
    y = model.apply(v, X)
    np.testing.assert_array_equal(y, model.bind(v)(X))
    np.testing.assert_array_equal(y, model.apply(v, X, method=lambda m, x: m(x)))
    only = fp8jax.linen.quantize(Parts(), fp8jax.Rule("shared", TE))
    assert eight_and_wide(only.apply, v, X) == (2, 2)
    with pytest.raises(ValueError, match="no layer is left for 'Conv_0'"):
        fp8jax.linen.quantize(Parts(), fp8jax.Rule("Conv_0", TE)).apply(v, X)


def test_a_method_that_needs_some_layers_only_does_not_complain():
    class Two(nn.Module):
        def setup(self):
            self.first, self.second = nn.Dense(8), nn.Dense(8)

        def __call__(self, x):
            return self.second(self.encode(x))

        def encode(self, x):
            return self.first(x)

    model = fp8jax.linen.quantize(Two(), [fp8jax.Rule("first", None), fp8jax.Rule("second", TE)])
    v = model.init(KEY, X)
    assert eight_and_wide(functools.partial(model.apply, method="encode"), v, X) == (0, 1)
    assert eight_and_wide(functools.partial(model.apply, method=Two.encode), v, X) == (0, 1)
    assert eight_and_wide(model.apply, v, X) == (1, 1)


def test_a_quantized_model_may_be_part_of_another():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(self.inner(x))

    part = fp8jax.linen.quantize(Stack(name="left"), fp8jax.Rule("blocks_0/.*", TE))
    assert part.name == "left"
    plain, quantized = Outer(Stack()), Outer(part)
    v = plain.init(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, v, quantized.init(KEY, X))
    assert eight_and_wide(quantized.apply, v, X)[0] == 6
    quantized_twice = fp8jax.linen.quantize(quantized, fp8jax.Rule("Dense_0", DEEPSEEK))
    assert eight_and_wide(quantized_twice.apply, v, X)[0] == 7
    assert eight_and_wide(quantized_twice.inner.apply, {"params": v["params"]["inner"]}, X)[0] == 6


def test_einsum_has_its_bias_where_flax_has_it():
    for subscripts, shape in (
        ("btd,dhc->bhtc", (WIDTH, 2, 4)),
        ("...d,dh->h...", (WIDTH, 8)),
        ("btd,bdh->bth", (2, WIDTH, 8)),
    ):
        plain = nn.Einsum(shape, subscripts, bias_init=nn.initializers.normal(1.0))
        model, v = fp8jax.linen.quantize(plain, TE), plain.init(KEY, X)
        jax.tree.map(np.testing.assert_array_equal, v, model.init(KEY, X))
        expected = plain.apply(v, X)
        assert np.linalg.norm(model.apply(v, X) - expected) < 0.06 * np.linalg.norm(expected)
        zeros = jnp.zeros_like(X)
        np.testing.assert_allclose(model.apply(v, zeros), plain.apply(v, zeros), atol=1e-6)


def test_one_layer_by_its_own_field():
    cls = fp8jax.linen.make_dot_general_cls(TE)
    assert cls is fp8jax.linen.make_dot_general_cls(TE)
    assert issubclass(cls, DotGeneral)
    layer = nn.Dense(8, dot_general_cls=cls)
    v = layer.init(KEY, X)
    assert eight_and_wide(layer.apply, v, X) == (1, 0)
    np.testing.assert_array_equal(layer.apply(v, X), fp8jax.linen.quantize(nn.Dense(8), TE).apply(v, X))
    # Gradients that are rounded stochastically, by a key from the data.
    layer = nn.Dense(8, use_bias=False, dot_general_cls=fp8jax.linen.make_dot_general_cls("jetfire"))
    w, key = v["params"]["kernel"], key_from_data(X)
    calls = [
        lambda w: layer.apply({"params": {"kernel": w}}, X),
        lambda w: fp8jax.linear(X, w, recipe="jetfire", key=key),
    ]
    a, b = (jax.jit(jax.grad(lambda w, call=call: jnp.sum(call(w) ** 3)))(w) for call in calls)
    np.testing.assert_array_equal(a, b)


def test_wrong_models_are_refused():
    with pytest.raises(TypeError, match="expects a Linen module, not function"):
        fp8jax.linen.quantize(lambda x: x, TE)
    with pytest.raises(ValueError, match="before it is bound"):
        fp8jax.linen.quantize(Stack().bind(variables()), TE)
    with pytest.raises(ValueError, match="already quantized"):
        fp8jax.linen.quantize(fp8jax.linen.quantize(Stack(), TE), TE)
    with pytest.raises(ValueError, match="asks for precision"):
        fp8jax.linen.quantize(nn.Dense(4, precision="highest"), TE).init(KEY, X)
    with pytest.raises(ValueError, match="no matmul of data with a parameter"):
        fp8jax.linen.quantize(nn.LayerNorm(), TE).init(KEY, X)


@pytest.mark.slow
def test_train_state():
    model = fp8jax.linen.quantize(Nanodo(), TE)
    params = jax.jit(model.init)(KEY, TOKENS)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    @jax.jit
    def step(state):
        def loss(params):
            logits = state.apply_fn({"params": params}, TOKENS[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(10):
        state, value = step(state)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.5
    assert jax.eval_shape(Nanodo().apply, {"params": state.params}, TOKENS).shape == (*TOKENS.shape, VOCAB)


def arm(recipe):
    """Returns initial parameters by key and logits of Nanodo, quantized by a recipe or not."""
    model = fp8jax.linen.quantize(Nanodo(), recipe) if recipe else Nanodo()
    return lambda key: Nanodo().init(key, TOKENS), model.apply


@pytest.mark.slow  # NNX's stays in the default run
def test_a_model_not_written_here_trains_as_in_bf16_and_a_broken_recipe_does_not(monkeypatch):
    plain = train(*arm(None))
    assert plain[:, -1].max() < plain[:, 0].min() - 1
    assert within_noise(train(*arm(DEEPSEEK)), plain)
    broken = architectures.starve_gradients(product.quantize_and_sum)
    monkeypatch.setattr(product, "quantize_and_sum", broken)
    assert not within_noise(train(*arm(TE)), plain)
