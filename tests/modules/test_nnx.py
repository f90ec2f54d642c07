"""Quantized NNX models: matmuls of codes, residuals, and unchanged behaviour otherwise."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import fp8jax
from experiments.models.llama import Block, Llama, LlamaConfig, rope_tables
from fp8jax.ops.products import product
from tests.modules import architectures
from tests.modules.architectures import MiniGPT, train, within_noise
from tests.programs import dots, residuals
from tests.rows import covering, few

CONFIG = LlamaConfig(vocab=64, dim=64, layers=3, heads=4, kv_heads=2, mlp_dim=96)
BATCH, LENGTH = 2, 24
TOKENS = BATCH * LENGTH
TEXT = np.random.default_rng(0).integers(0, CONFIG.vocab, (BATCH, LENGTH + 1))
QUANTIZED = [name for name in fp8jax.recipes.NAMES if fp8jax.recipes.get(name).linear.is_quantized]
TE = fp8jax.recipes.te_current()


def llama(**settings):
    config = dataclasses.replace(CONFIG, **{k: v for k, v in settings.items() if k in ("tied", "layers")})
    kinds = {k: v for k, v in settings.items() if k in ("dtype", "remat")}
    return Llama(config, rngs=nnx.Rngs(0), **kinds)


def functional(model):
    """Returns the loss of the text as a function of the parameters, and the parameters."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        own = jax.tree.map(lambda x: x, rest)  # variables of this trace
        logits = nnx.merge(graph, params, own)(jnp.asarray(TEXT[:, :-1])).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(TEXT[:, 1:])).mean()

    return loss, params


def wide(actual) -> int:
    """Returns the number of 16- or 32-bit matmuls in a list of operand dtypes."""
    return sum("8" not in a and "8" not in b for a, b in actual)


@pytest.mark.parametrize(
    "name",
    few(QUANTIZED, "moss", "coat", "te_delayed", "int8_fallback"),
)
@pytest.mark.usefixtures("inspected")
def test_every_linear_of_a_training_step_takes_the_operands_of_the_recipe(name):
    recipe = fp8jax.recipes.get(name)
    loss, params = functional(fp8jax.nnx.quantize(llama(), recipe))
    expected = Counter(
        tuple(str(fp8jax.formats.get(s.format).dtype) if s and not s.is_block_scaled else "bfloat16" for s in pair)
        # Seven linears in the body of the loop over layers.
        for pair in recipe.linear.products().values()
        for _ in range(7)
    )
    if recipe.linear.scaling == "threshold":  # forward each block is multiplied, and its residual
        expected[("int8", "int8")] += 7
    # The lookup of embeddings and its gradient, the three of the head, QK and AV with two gradients each, some in fp32.
    actual = Counter("float32" if "float32" in pair else pair for pair in dots(jax.grad(loss), params))
    left = actual - Counter({pair: n for pair, n in expected.items() if "8" in pair[0]})
    assert sum(expected.values()) in (21, 28)
    assert sum(actual.values()) - sum(expected.values()) == 2 + 3 + 6
    assert set(left) == {("bfloat16", "bfloat16"), "float32"}
    assert all(actual[pair] == n for pair, n in expected.items() if "8" in pair[0])


def test_layers_times_seven_times_three_products_run():
    model = llama()
    program = fp8jax.explain(model, TE, jnp.asarray(TEXT[:, :-1])).program
    run = {p.operands: (p.occurrences, p.executions) for p in program.traced if p.has_codes}
    forward, dgrad, wgrad = (("float8_e4m3fn",) * 2, ("float8_e5m2", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"))
    assert run == {pair: (7, 7 * CONFIG.layers) for pair in (forward, dgrad, wgrad)}


def test_a_tied_head_is_left_alone_and_an_asked_for_one_is_not():
    eight = {}
    for tied in (True, False):
        loss, params = functional(fp8jax.nnx.quantize(llama(tied=tied), TE))
        actual = dots(jax.grad(loss), params)
        eight[tied] = len(actual) - wide(actual)
        assert wide(actual) == 2 + 9
    assert eight == {True: 21, False: 21}
    rules = [fp8jax.Rule("head", TE), fp8jax.Rule("layers/.*", TE)]
    loss, params = functional(fp8jax.nnx.quantize(llama(), rules))
    assert wide(dots(jax.grad(loss), params)) == 2 + 6


def saved_codes(model) -> Counter:
    return Counter(shape for dtype, shape in residuals(*functional(model)) if dtype == "uint8")


@pytest.mark.parametrize(
    ("name", "dtype"), covering(["te_current", "deepseek", "int8_block"], [jnp.bfloat16, jnp.float32])
)
def test_linears_that_read_one_input_save_its_codes_once(name, dtype):
    layers, width = CONFIG.layers, CONFIG.dim
    model = fp8jax.nnx.quantize(llama(dtype=dtype), fp8jax.recipes.get(name))
    # q, k and v together; out; gate and up together; down.
    assert saved_codes(model) == {(layers, TOKENS, width): 3, (layers, TOKENS, CONFIG.mlp_dim): 1}


def test_no_input_of_a_linear_is_saved_beside_its_codes():
    """bf16 residuals shrink by three inputs of width D per layer, and by the input of the down projection."""
    plain, quantized = (residuals(*functional(m)) for m in (llama(), fp8jax.nnx.quantize(llama(), TE)))
    layers, width, mlp = CONFIG.layers, CONFIG.dim, CONFIG.mlp_dim

    def count_saved(actual, shape):
        return sum(dtype == "bfloat16" and s == shape for dtype, s in actual)

    assert count_saved(plain, (layers, TOKENS, width)) - count_saved(quantized, (layers, TOKENS, width)) == 3
    assert count_saved(plain, (layers, TOKENS, mlp)) - count_saved(quantized, (layers, TOKENS, mlp)) == 1


class Branches(nnx.Module):
    """Three layers that cast one fp32 input to bf16, as in models with an fp32 residual stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = {
            "linear": lambda: nnx.Linear(32, 32, dtype=jnp.bfloat16, rngs=rngs),
            "general": lambda: nnx.LinearGeneral(32, (4, 8), dtype=jnp.bfloat16, rngs=rngs),
            "einsum": lambda: nnx.Einsum("td,dh->th", (32, 32), (32,), dtype=jnp.bfloat16, rngs=rngs),
        }
        self.branches = nnx.Dict({name: f() for name, f in make.items()})

    def __call__(self, x: jax.Array) -> jax.Array:
        return sum(layer(x).reshape(-1, 32) for layer in self.branches.values())


def test_layers_that_cast_one_input_share_the_cast_and_its_codes():
    x = jax.random.normal(jax.random.key(0), (10, 32))

    def codes():
        graph, params = nnx.split(fp8jax.nnx.quantize(Branches(nnx.Rngs(0)), TE), nnx.Param)
        saved = residuals(lambda p, x: nnx.merge(graph, p)(jnp.tanh(x)), params, x)
        return [shape for dtype, shape in saved if dtype == "uint8"]

    assert codes() == [(10, 32)]


def test_a_shared_cast_is_not_that_of_another_input_or_trace():
    model = fp8jax.nnx.quantize(Branches(nnx.Rngs(0)), TE)
    xs = jax.random.normal(jax.random.key(0), (3, 10, 32))
    expected = [model(x) for x in xs]
    together = jax.jit(lambda xs: jax.lax.map(lambda x: (model(x), jax.jit(model.__call__)(x)), xs))
    for actual in (*together(xs), *together(xs)):
        # A code may flip where eager and compiled casts round differently.
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=0.05)


def copy_blocks(model):
    """Returns the blocks of a scanned Llama as a list, and the model as a loop over them."""
    graph, stacked = nnx.split(model.layers)
    blocks = [nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(CONFIG.layers)]

    class Looped(nnx.Module):
        def __init__(self) -> None:
            self.embed, self.layers, self.norm, self.head = model.embed, nnx.List(blocks), model.norm, model.head

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens.reshape(-1))
            for layer in self.layers:
                x = layer(x, *rope_tables(tokens.shape[1], CONFIG.head_dim, CONFIG.rope_theta))
            return self.head(self.norm(x)).reshape(*tokens.shape, CONFIG.vocab)

    return Looped()


def test_a_scanned_model_computes_what_the_loop_computes():
    scanned, looped = llama(dtype=jnp.float32), copy_blocks(llama(dtype=jnp.float32))
    values, grads = zip(*(value_and_grad(fp8jax.nnx.quantize(m, TE)) for m in (scanned, looped)), strict=True)
    np.testing.assert_allclose(*values, rtol=1e-5)
    for i in range(CONFIG.layers):
        one = jax.tree.leaves(jax.tree.map(lambda x, i=i: x[i], grads[0]["layers"]))
        for a, b in zip(one, jax.tree.leaves(grads[1]["layers"][i]), strict=True):
            assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)


def value_and_grad(model):
    loss, params = functional(model)
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), nnx.to_pure_dict(grads)


@pytest.mark.slow
def test_remat_changes_no_value_and_saves_no_codes():
    recipe = fp8jax.recipes.int8_block()
    plain, remat = (fp8jax.nnx.quantize(llama(remat=remat), recipe) for remat in (False, True))
    (value, grads), (again, same) = value_and_grad(plain), value_and_grad(remat)
    np.testing.assert_allclose(value, again, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(same), strict=True):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)
    assert saved_codes(plain)
    assert not saved_codes(remat)


@functools.cache
def losses_of_training(name):
    """Returns eight losses of a one-layer Llama with the NNX optimizer, quantized by a preset or not."""
    model = llama(layers=1) if name is None else fp8jax.nnx.quantize(llama(layers=1), fp8jax.recipes.get(name))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = model(jnp.asarray(TEXT[:, :-1])).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(TEXT[:, 1:])).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer)) for _ in range(8)]


# One recipe with all kinds of codes always runs, the others in slow runs.
SOME = ("coat",)
TRAINED = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in QUANTIZED]


@pytest.mark.parametrize("name", TRAINED)
def test_every_preset_trains_with_the_optimizer_of_nnx(name):
    plain, quantized = losses_of_training(None), losses_of_training(name)
    assert quantized[-1] < quantized[0] - 0.3
    assert abs(quantized[-1] - plain[-1]) < 0.1 * (plain[0] - plain[-1])
    assert quantized != plain


def test_parameters_and_checkpoints_fit_both_ways(tmp_path):
    plain = llama()
    quantized = fp8jax.nnx.quantize(plain, TE)
    states = [nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (plain, quantized)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "quantized", states[1])
    checkpointer.wait_until_finished()
    other = Llama(CONFIG, rngs=nnx.Rngs(1))
    nnx.update(other, checkpointer.restore(tmp_path / "quantized", nnx.to_pure_dict(nnx.state(other, nnx.Param))))
    np.testing.assert_array_equal(np.asarray(other(TEXT)), np.asarray(plain(TEXT)))


def test_the_model_given_is_not_changed():
    plain = llama()
    before = np.asarray(plain(TEXT))
    quantized = fp8jax.nnx.quantize(plain, TE)
    assert (np.asarray(quantized(TEXT)) != before).any()
    np.testing.assert_array_equal(np.asarray(plain(TEXT)), before)
    loss, params = functional(plain)
    assert wide(dots(jax.grad(loss), params)) == 2 + 30


def test_jit_grad_and_vmap_give_what_a_loop_gives():
    block = Block(CONFIG, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, params = nnx.split(fp8jax.nnx.quantize(block, TE), nnx.Param)
    xs = jax.random.normal(jax.random.key(0), (3, LENGTH, CONFIG.dim))
    tables = rope_tables(LENGTH, CONFIG.head_dim, CONFIG.rope_theta)
    grad = jax.jit(jax.grad(lambda p, x: (nnx.merge(graph, p)(x, *tables) ** 2).mean()))
    together = jax.jit(jax.vmap(grad, in_axes=(None, 0)))(params, xs)
    alone = jax.tree.map(lambda *g: jnp.stack(g), *[grad(params, x) for x in xs])
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)


class Mixed(nnx.Module):
    """Layers in a list, in a dict, shared, inside attention, and over several axes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.list = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.dict = nnx.Dict(up=nnx.Linear(16, 24, rngs=rngs), down=nnx.Linear(24, 16, rngs=rngs))
        self.shared = self.list[0]
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=rngs)
        self.merge = nnx.LinearGeneral((2, 8), 16, axis=(-2, -1), rngs=rngs)
        self.mix = nnx.Einsum("bt...,tu->bu...", (6, 6), (6,), rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.conv = nnx.Conv(16, 16, (3,), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (*self.list, self.shared):
            x = x + layer(x)
        x = x + self.dict["down"](jax.nn.relu(self.dict["up"](self.norm(x))))
        x = x + self.conv(self.attention(x))
        return self.merge(self.mix(x).reshape(*x.shape[:-1], 2, 8))


PATHS = (
    [f"list/{i}" for i in range(2)]
    + ["dict/up", "dict/down", "merge", "mix"]
    + [f"attention/{name}" for name in ("query", "key", "value", "out")]
)


def test_layers_are_found_wherever_they_are():
    model = Mixed(nnx.Rngs(0))
    # Six outputs are few: without a rule of its own this layer stays in 16 bits.
    quantized = fp8jax.nnx.quantize(model, [fp8jax.Rule("mix", TE), TE])
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    assert {layer.path for layer in fp8jax.explain(quantized, x).quantized_layers} == set(PATHS)
    assert quantized.shared is quantized.list[0]
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    graph, params, rest = nnx.split(quantized, nnx.Param, ...)
    actual = dots(lambda p: nnx.merge(graph, p, rest)(x), params)
    # A shared layer runs once more; QK and AV stay as they are.
    assert (len(actual) - wide(actual), wide(actual)) == (len(PATHS) + 1, 2)
    result, expected = (nnx.jit(lambda m, x: m(x))(m, x) for m in (quantized, model))
    assert 0 < np.linalg.norm(result - expected) < 0.15 * np.linalg.norm(expected)


def test_rules_pick_layers_by_path():
    model = fp8jax.nnx.quantize(Mixed(nnx.Rngs(0)), [fp8jax.Rule("list/1|attention/.*", TE)])
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    actual = dots(lambda p: nnx.merge(graph, p, rest)(jnp.ones((2, 6, 16))), params)
    assert len(actual) - wide(actual) == 5
    with pytest.raises(ValueError, match="no layer is left for 'list/2' to match; the layers are attention/key"):
        fp8jax.nnx.quantize(Mixed(nnx.Rngs(0)), fp8jax.Rule("list/2", TE))
    with pytest.raises(ValueError, match="no linear layer"):
        fp8jax.nnx.quantize(nnx.LayerNorm(4, rngs=nnx.Rngs(0)), TE)


def test_a_product_of_a_layers_own_is_quantized_and_another_precision_refused():
    rngs, x = nnx.Rngs(0), jnp.ones((2, 4))
    own = nnx.Linear(4, 4, dot_general=lambda *a, **k: 2 * jax.lax.dot_general(*a), rngs=rngs)
    assert dots(lambda x: fp8jax.nnx.quantize(own, TE)(x), x) == [("float8_e4m3fn",) * 2]
    with pytest.raises(ValueError, match="no matmul of data with a parameter that a recipe can quantize"):
        fp8jax.nnx.quantize(nnx.Einsum("ab,bc->ac", (4, 4), einsum_op=lambda *a, **k: a[1], rngs=rngs), TE)(x)
    with pytest.raises(ValueError, match=r"asks for precision .*HIGHEST"):
        fp8jax.nnx.quantize(nnx.Linear(4, 4, precision="highest", rngs=rngs), TE)(x)


def arm(recipe):
    """Returns initial parameters by key and logits of MiniGPT, quantized by a recipe or not."""
    model = MiniGPT(rngs=nnx.Rngs(0))
    graph, _, rest = nnx.split(fp8jax.nnx.quantize(model, recipe) if recipe else model, nnx.Param, ...)
    return lambda key: nnx.state(MiniGPT(rngs=nnx.Rngs(key)), nnx.Param), lambda p, t: nnx.merge(graph, p, rest)(t)


@pytest.mark.slow
def test_a_model_not_written_here_trains_as_in_bf16_and_a_broken_recipe_does_not(monkeypatch):
    plain = train(*arm(None))
    assert plain[:, -1].max() < plain[:, 0].min() - 1
    assert within_noise(train(*arm(TE)), plain)
    broken = architectures.starve_gradients(product.quantize_and_sum)
    monkeypatch.setattr(product, "quantize_and_sum", broken)
    assert not within_noise(train(*arm(TE)), plain)
