"""Quantized NNX models as objects: pickled, tabulated, unquantized, called in parts, with adapters and states."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx.nn.lora import LoRAParam

import fp8jax
from tests.distance import relative
from tests.modules import patches
from tests.programs import dots
from tests.rows import covering, few

WIDTH, INNER, HEADS = 32, 64, 2
X = jax.random.normal(jax.random.key(0), (2, 6, WIDTH))
TE, COAT = fp8jax.recipes.te_current(), fp8jax.recipes.coat()
EIGHT = ("float8_e4m3fn",) * 2


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate, self.up = (nnx.Linear(WIDTH, INNER, rngs=rngs) for _ in range(2))
        self.down, self.dropout = nnx.Linear(INNER, WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        return x + self.dropout(self.down(nnx.silu(self.gate(h)) * self.up(h)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Mlp(rngs) for _ in range(2)])
        self.steps = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def encode(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def __call__(self, x, *, deep: bool = True):
        self.steps[...] += 1
        return self.encode(x) if deep else self.layers[0](x)


def model(rngs=0):
    return Model(nnx.Rngs(rngs))


def eight(m, call=lambda m, x: m(x)):
    """Returns the number of 8-bit forward matmuls in a call of a model."""
    graph, state = nnx.split(m)
    return dots(lambda state, x: call(nnx.merge(graph, state, copy=True), x), state, X).count(EIGHT)


def settled(m):
    m.eval()
    return m


@pytest.mark.parametrize(("library", "name"), covering(["pickle", "cloudpickle"], ["te_current", "te_delayed"]))
def test_a_quantized_model_is_pickled_with_its_state(library, name):
    pickler = pickle if library == "pickle" else pytest.importorskip("cloudpickle")
    one = settled(fp8jax.nnx.quantize(model(), name))
    one.layers[0].down.kernel[...] *= 2
    other = pickle.loads(pickler.dumps(one))
    assert isinstance(other, Model)
    assert type(other) is type(one) or library == "cloudpickle"
    np.testing.assert_array_equal(other(X), one(X))
    assert eight(other) == 6
    graph, state = pickle.loads(pickler.dumps(nnx.split(one)))
    np.testing.assert_array_equal(nnx.merge(graph, state)(X), one(X))


def test_a_class_made_of_a_quantized_one_is_itself():
    base = type(fp8jax.nnx.quantize(model(), TE))
    Mine = type(base)("Mine", (base,), {"__call__": lambda self, x: 2 * base.__call__(self, x)})
    one, mine = (settled(fp8jax.nnx.quantize(model(), TE)) for _ in range(2))
    mine.__class__ = Mine
    np.testing.assert_array_equal(mine(X), 2 * one(X))


def table(m):
    """Returns the cells of a model's table by row, without separators."""
    text = nnx.tabulate(m, X, console_kwargs={"width": 240, "force_terminal": False})
    return [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]


@functools.cache
def plain_table():
    return table(model())


@pytest.mark.parametrize("name", few(["coat", "te_delayed", "int8_fallback", "moss"], "coat", "int8_fallback"))
def test_its_table_is_that_of_the_model_with_the_recipe_beside_each_layer(name):
    """Regression: the table had only the root, and failed with a state."""
    quantized = fp8jax.nnx.quantize(model(), [fp8jax.Rule("layers/0/up", None), name])
    expected, actual = plain_table(), table(quantized)
    layers = {row[1]: row[2] for row in expected if row[2] == "Linear"}
    assert len(layers) == 6
    assert {row[1]: row[2] for row in actual if row[1] in layers} == {
        path: "Linear" if path == "layers/0/up" else f"Linear ({name})" for path in layers
    }
    assert [[*row[:2], row[2].split(" (")[0], *row[3:]] for row in actual] == expected
    assert type(quantized.layers[0].up).__name__ == "Linear"
    assert eight(settled(quantized)) == (0 if name == "int8_fallback" else 5)


def test_the_table_of_a_model_with_adapters_has_its_layers():
    adapted = fp8jax.nnx.lora(fp8jax.nnx.quantize(model(), COAT), rank=4, alpha=1.0, rngs=nnx.Rngs(1))
    actual = {row[1]: row[2] for row in table(adapted) if row[2].startswith("Linear")}
    assert actual == {f"layers/{i}/{name}": "Linear (coat)" for i in (0, 1) for name in ("gate", "up", "down")}


@pytest.mark.parametrize("name", ["te_current", "int8_fallback"])
def test_the_way_back_gives_the_model_as_written_with_trained_parameters(name):
    plain = settled(model())
    quantized = settled(fp8jax.nnx.quantize(plain, name))
    quantized.layers[1].up.kernel[...] *= 3
    back = fp8jax.nnx.unquantize(quantized)
    assert type(back) is Model
    assert jax.tree.structure(nnx.state(back)) == jax.tree.structure(nnx.state(plain))
    plain.layers[1].up.kernel[...] *= 3
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(back, X), nnx.jit(lambda m, x: m(x))(plain, X))
    assert eight(back) == 0
    assert nnx.graphdef(back) == nnx.graphdef(plain)
    assert type(quantized) is not Model  # it is not changed
    with pytest.raises(ValueError, match="not quantized"):
        fp8jax.nnx.unquantize(plain)
    with pytest.raises(TypeError, match="expects an NNX module"):
        fp8jax.nnx.unquantize({})


def test_models_that_are_changed_already_are_named():
    quantized, odd = fp8jax.nnx.quantize(model(), TE), model()
    with pytest.raises(ValueError, match=r"^the model is already quantized; pass the rules with the original model"):
        fp8jax.nnx.quantize(quantized, TE)
    odd.layers[1] = quantized.layers[0]
    with pytest.raises(ValueError, match=r"^layers/1 is already quantized"):
        fp8jax.nnx.quantize(odd, TE)
    odd = model()
    odd.layers[0].up.kernel = "an adapter"
    with pytest.raises(ValueError, match=r"the kernel of layers/0/up is a str, not an nnx.Variable: another library"):
        fp8jax.nnx.quantize(odd, TE)
    adapted = fp8jax.nnx.lora(quantized, rank=2, alpha=1.0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"use fp8jax.nnx.unquantize\(fp8jax.nnx.merge_lora\(model\)\)"):
        fp8jax.nnx.unquantize(adapted)


def test_a_part_called_from_outside_is_quantized():
    quantized = settled(fp8jax.nnx.quantize(model(), COAT))
    for call, products in (
        (lambda m, x: m.layers[0](x), 3),
        (lambda m, x: m.layers[1].up(x), 1),
        (lambda m, x: m.encode(x), 6),
        (lambda m, x: m(x, deep=False), 3),
        (lambda m, x: m(x), 6),
    ):
        assert eight(quantized, call) == products
    np.testing.assert_allclose(quantized.encode(X), quantized(X), rtol=1e-5, atol=1e-5)
    # Its layers have the paths in the full model.
    rules = [fp8jax.Rule("layers/0/.*", None), TE]
    quantized = settled(fp8jax.nnx.quantize(model(), rules))
    assert [eight(quantized, lambda m, x, i=i: m.layers[i](x)) for i in range(2)] == [0, 3]


def test_methods_that_are_named_are_transformed_whole():
    """A matmul with a parameter in the method itself, and those of modules that it calls."""

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.w, self.mlp = nnx.Param(jnp.eye(WIDTH)), Mlp(rngs)

        def score(self, x):
            return x + self.mlp(x) @ self.w[...]

        def __call__(self, x):
            return self.score(x)

    written = settled(Tied(nnx.Rngs(0)))
    whole, parts = (fp8jax.nnx.quantize(written, TE, methods=m) for m in (("__call__", "score"), ("__call__",)))
    assert [eight(m) for m in (whole, parts)] == [4, 4]
    assert [eight(m, lambda m, x: m.score(x)) for m in (whole, parts)] == [4, 3]
    with pytest.raises(ValueError, match="no module of the model has a method 'embed'"):
        fp8jax.nnx.quantize(written, TE, methods=("embed",))


def test_what_a_call_does_to_the_model_and_its_arguments_is_done():
    """Counts, dropout keys, sown values, caches in arguments, settings, new modules."""

    class Does(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.up, self.count = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Variable(jnp.zeros(()))
            self.drop = nnx.data(None)
            self.called = 0

        def __call__(self, x, cache, rngs, names):
            self.count[...] += 1
            self.called += 1
            if self.drop is None:
                self.drop = nnx.Dropout(0.5)
            y = self.up(x)
            cache["seen"][...] += jnp.sum(x)
            self.last = nnx.Cache(y)
            return self.drop(y, rngs=rngs), {"names": names, "cache": cache, "three": 3, "none": None}

    def run(m):
        cache, rngs = nnx.Dict(seen=nnx.Cache(jnp.zeros(()))), nnx.Rngs(dropout=1)
        ys = []
        for _ in range(2):
            y, more = m(X, cache, rngs, ["a", "b"])
            assert more["cache"] is cache
            assert (more["names"], more["three"], more["none"]) == (["a", "b"], 3, None)
            ys.append(y)
        return ys, m, cache, rngs

    written, quantized = run(Does()), run(fp8jax.nnx.quantize(Does(), TE))
    for actual in (written, quantized):
        ys, m, cache, rngs = actual
        assert (float(m.count[...]), m.called, int(rngs.dropout.count[...])) == (2, 2, 2)
        np.testing.assert_allclose(cache.seen[...], 2 * jnp.sum(X), rtol=1e-5)
        assert (np.asarray(ys[0]) != np.asarray(ys[1])).any()
    # The same elements are dropped, and the rest is near.
    for result, expected in zip(quantized[0], written[0], strict=True):
        np.testing.assert_array_equal(np.asarray(result) == 0, np.asarray(expected) == 0)
        assert 0 < relative(result, expected) < 0.1
    np.testing.assert_array_equal(quantized[1].last[...] != 0, True)


def test_explain_takes_a_quantized_model():
    quantized = fp8jax.nnx.quantize(settled(model()), TE)
    report = fp8jax.explain(quantized, X)
    assert [layer.path for layer in report.quantized_layers] == [
        f"layers/{i}/{name}" for i in range(2) for name in ("gate", "up", "down")
    ]
    assert sum(p.occurrences for p in report.program.traced if p.has_codes) == 3 * 6


@pytest.mark.slow
def test_adapters_of_a_library_that_changes_products_keep_their_part():
    """As in Qwix's LoRA: the term added to a layer's matmul is computed, in either order."""
    written = patches.with_adapters(settled(model()), X)
    for _, layer in nnx.iter_modules(written):
        if isinstance(layer, nnx.Linear):
            layer.kernel_lora_b[...] = 0.1 * jnp.ones_like(layer.kernel_lora_b[...])
    want = written(X)
    before = fp8jax.nnx.quantize(written, [fp8jax.Rule(".*lora.*", None), TE])
    after = patches.with_adapters(settled(fp8jax.nnx.quantize(settled(model()), TE)), X)
    assert isinstance(after.layers[0].up.kernel_lora_a, LoRAParam)
    state = nnx.to_flat_state(nnx.state(written, LoRAParam))
    nnx.update(after, nnx.from_flat_state(state))
    for quantized in (before, after):
        assert 0 < relative(quantized(X), want) < 0.1
        assert relative(quantized(X), model()(X)) > 0.2
        grads = nnx.grad(lambda m: jnp.sum(m(X) ** 2), argnums=nnx.DiffState(0, LoRAParam))(quantized)
        expected = nnx.grad(lambda m: jnp.sum(m(X) ** 2), argnums=nnx.DiffState(0, LoRAParam))(written)
        assert relative(jax.tree.leaves(grads), jax.tree.leaves(expected)) < 0.15


class DenseGeneral(nnx.Module):
    """As in MaxText: any axes, a precision that is a pair of defaults, an fp32 kernel."""

    def __init__(self, inputs, outputs, axis, rngs):
        self.axis, self.dtype = axis, jnp.bfloat16
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (*inputs, *outputs)) / 6)

    def __call__(self, x):
        axis = tuple(a % x.ndim for a in self.axis)
        default = jax.lax.Precision.DEFAULT
        numbers = ((axis, tuple(range(len(axis)))), ((), ()))
        kernel = jnp.asarray(self.kernel[...], self.dtype)
        return jax.lax.dot_general(x.astype(self.dtype), kernel, numbers, precision=(default, default))


class GemmaEinsum(nnx.Module):
    """As in bonsai's and DeepMind's Gemma: subscripts are an argument of the call."""

    def __init__(self, shape, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape) / 6)

    def __call__(self, subscripts, x):
        return jnp.einsum(subscripts, x, self.w[...].astype(x.dtype))


class Attention(nnx.Module):
    def __init__(self, style, rngs):
        self.style, channels = style, WIDTH // HEADS
        if style == "gemma":
            self.qkv = GemmaEinsum((3, HEADS, WIDTH, channels), rngs)
            self.out = GemmaEinsum((HEADS, channels, WIDTH), rngs)
        else:
            self.q, self.k, self.v = (DenseGeneral((WIDTH,), (HEADS, channels), (-1,), rngs) for _ in range(3))
            self.out = DenseGeneral((HEADS, channels), (WIDTH,), (-2, -1), rngs)

    def __call__(self, x):
        if self.style == "gemma":
            q, k, v = self.qkv("btd,sndh->sbtnh", x)
            return x + self.out("btnh,nhd->btd", jax.nn.dot_product_attention(q, k, v))
        return x + self.out(jax.nn.dot_product_attention(self.q(x), self.k(x), self.v(x)))


@pytest.mark.parametrize(("style", "products"), [("gemma", 2), ("maxtext", 4)])
def test_layers_of_other_libraries_are_found_and_train(style, products):
    written = Attention(style, nnx.Rngs(0))
    quantized = fp8jax.nnx.quantize(written, COAT)
    assert eight(quantized) == products
    assert 0 < relative(quantized(X), written(X)) < 0.1
    optimizer = nnx.Optimizer(quantized, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(m, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - 1) ** 2))(m)
        optimizer.update(m, grads)
        return loss

    losses = [float(step(quantized, optimizer)) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_static_arguments_modes_and_meshes():
    """A default Explicit mesh; train and eval; nnx.remat and nnx.vmap around a quantized module."""
    plain = model()
    quantized = fp8jax.nnx.quantize(plain, TE)
    outputs = [quantized(X), quantized(X)]
    assert (np.asarray(outputs[0]) != np.asarray(outputs[1])).any()  # dropout
    quantized.eval()
    expected = quantized(X)
    np.testing.assert_array_equal(expected, quantized(X))
    np.testing.assert_allclose(nnx.remat(lambda m, x: m(x))(quantized, X), expected, rtol=1e-5, atol=1e-5)
    mapped = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(quantized, jnp.stack([X, X]))
    np.testing.assert_allclose(mapped[1], expected, rtol=1e-5, atol=1e-5)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
        y = nnx.jit(lambda m, x: m(x))(quantized, x)
        np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-5)


def test_a_gradient_statistic_is_the_largest_of_two_uses():
    """Cotangents are summed; the statistic of a layer that is called twice is the maximum."""
    delayed = dataclasses.replace(fp8jax.recipes.te_delayed().linear, amax_history_length=3)

    class Twice(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return 3.0 * self.up(x) + 5.0 * self.up(2 * x)

    quantized = fp8jax.nnx.quantize(Twice(), fp8jax.Rule("up", delayed))
    wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
    grads = nnx.grad(lambda m: jnp.sum(m(X)), argnums=nnx.DiffState(0, wrt))(quantized)
    fp8jax.nnx.advance_scaling(quantized, grads)
    np.testing.assert_allclose(quantized.up.dot_general.dy[0], 5.0)
    np.testing.assert_allclose(quantized.up.dot_general.x[0], 2 * jnp.abs(X).max(), rtol=1e-6)


def test_arguments_that_have_no_hash_are_refused_with_the_method():
    class Takes(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x, config):
            return self.up(x)

    quantized = fp8jax.nnx.quantize(Takes(), fp8jax.Rule("up", TE))
    with pytest.raises(TypeError, match=r"an argument of Takes.__call__ .* must be hashable"):
        quantized(X, {"a"})


def test_held_weights_are_those_of_each_call():
    quantized = settled(fp8jax.nnx.quantize(model(), TE))
    prequantized = fp8jax.nnx.quantize_weights(quantized)
    expected = np.asarray(quantized(X))
    np.testing.assert_allclose(prequantized(X), expected, rtol=1e-5, atol=1e-6)
    # The codes are read, and not the kernels.
    for layer in prequantized.layers:
        layer.up.kernel[...] *= 2
    np.testing.assert_allclose(prequantized(X), expected, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(nnx.state(prequantized, nnx.Param)) == jax.tree.structure(nnx.state(quantized, nnx.Param))


def test_gradients_of_held_weights_come_in_16_bits_and_train_the_model_itself():
    quantized = fp8jax.nnx.quantize(model(), "coat")
    quantized.tied = kernel = quantized.layers[0].up.kernel
    prequantized = [fp8jax.nnx.quantize_weights(quantized, gradient_dtype=dtype) for dtype in (None, "bfloat16")]
    assert prequantized[1].tied is prequantized[1].layers[0].up.kernel
    wide, narrow = (nnx.grad(lambda m: jnp.mean(m(X) ** 2))(m) for m in prequantized)
    for (path, a), (_, b) in zip(nnx.to_flat_state(wide), nnx.to_flat_state(narrow), strict=True):
        assert b[...].dtype == (jnp.bfloat16 if path[-1] in ("kernel", "tied") else jnp.float32), path
        np.testing.assert_array_equal(a[...].astype(b[...].dtype), b[...], str(path))
    assert kernel.dtype == jnp.float32
    before = np.asarray(kernel[...])
    optimizer = fp8jax.nnx.Optimizer(quantized, fp8jax.optimizer("coat", 1e-2, clip=1.0), wrt=nnx.Param)
    optimizer.update(quantized, narrow)
    assert kernel.dtype == jnp.float32
    assert 0 < np.abs(np.asarray(kernel[...]) - before).max() <= 1.1e-2


def test_held_weights_in_16_bits_leave_the_results_dtype():
    """A layer without a dtype computes in the promoted dtype of inputs and parameters: fp32 for bf16 inputs."""
    plain = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
    quantized = fp8jax.nnx.quantize(nnx.Sequential(plain), "coat")
    x = X.astype(jnp.bfloat16)
    narrow = fp8jax.nnx.quantize_weights(quantized, gradient_dtype="bfloat16")
    assert narrow(x).dtype == quantized(x).dtype == jnp.float32
    np.testing.assert_array_equal(narrow(x), fp8jax.nnx.quantize_weights(quantized)(x))
    assert quantized.layers[0].dtype is None
    for other in ("int8", "float8_e4m3fn", "complex64"):
        with pytest.raises(
            ValueError, match=f"gradient_dtype must be one of bfloat16, float16, float32, or None, not '{other}'"
        ):
            fp8jax.nnx.quantize_weights(quantized, gradient_dtype=other)


class Layers(nnx.Module):
    """Layers of each kind; those in `HOLD` have weights that can be prequantized."""

    HOLD = ("linear", "bf16", "heads", "merged", "stack")

    def __init__(self, rngs):
        self.linear, self.bf16, self.half = (
            nnx.Linear(WIDTH, WIDTH, dtype=dtype, rngs=rngs) for dtype in (None, jnp.bfloat16, None)
        )
        self.heads = nnx.LinearGeneral(WIDTH, (HEADS, WIDTH), rngs=rngs)
        self.merged = nnx.LinearGeneral((HEADS, WIDTH), WIDTH, axis=(-2, -1), rngs=rngs)
        self.batched = nnx.LinearGeneral(WIDTH, WIDTH, batch_axis={0: len(X)}, rngs=rngs)
        make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        self.stack = nnx.split_rngs(splits=2)(make)(rngs)

    def __call__(self, x):
        results = {name: getattr(self, name)(x) for name in ("linear", "bf16", "half", "heads", "batched")}
        scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return {**results, "merged": self.merged(results["heads"]), "stack": scan(x, self.stack)}


def test_layers_of_each_kind_hold_their_weights_where_both_products_read_codes():
    half = dataclasses.replace(TE.linear, dy=None, w_dgrad=None, x_wgrad=None)
    rules = [fp8jax.Rule("half", half), fp8jax.Rule("batched|linear|bf16|heads|merged|stack", TE)]
    quantized = fp8jax.nnx.quantize(Layers(nnx.Rngs(0)), rules)
    expected = quantized(X)

    def differ(copy):
        """Returns the layers whose results no longer follow the weights of the copy."""
        actual = copy(X)
        assert {name: y.dtype for name, y in actual.items()} == {name: y.dtype for name, y in expected.items()}
        assert max(relative(actual[name], expected[name]) for name in expected) < 1e-6
        for name in expected:
            kernel = getattr(copy, name).kernel
            kernel[...] = 0 * kernel[...]
        return {name for name, y in copy(X).items() if name == "merged" or relative(y, expected[name]) < 1e-6}

    assert differ(fp8jax.nnx.quantize_weights(quantized)) == set(Layers.HOLD)
    assert differ(fp8jax.nnx.quantize_weights(quantized, gradient_dtype="bfloat16")) == set(Layers.HOLD)
    recorded = {}

    def quantize_heads(path, w, linear, scale):
        recorded[path] = w.shape
        return fp8jax.quantize_weight(w, recipe=linear, scale=scale) if path == "heads" else None

    assert differ(fp8jax.nnx.quantize_weights(quantized, quantize_heads)) == {"heads", "merged"}
    wide = HEADS * WIDTH
    shapes = {name: (WIDTH, WIDTH) for name in ("linear", "bf16", "stack")}
    assert recorded == shapes | {"heads": (WIDTH, wide), "merged": (wide, WIDTH)}
    fp8jax.nnx.quantize_weights(quantized, lambda *_: None)  # nothing is prequantized, as requested
    with pytest.raises(ValueError, match="no layer with a quantized weight"):
        fp8jax.nnx.quantize_weights(Layers(nnx.Rngs(0)))


class Kind(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.kind = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Variable(1)

    def __call__(self, x, power):
        return self.dense(x), type(power).__name__, type(self.kind.get_raw_value()).__name__


def test_settings_that_compare_as_equal_are_told_apart():
    model = fp8jax.nnx.quantize(Kind(nnx.Rngs(0)), TE)
    names = ["int", "bool", "float", "int"]
    assert [model(X, power)[1] for power in (1, True, 1.0, 1)] == names
    results = []
    for kind in (1, True, 1.0, 1):
        model.kind.set_raw_value(kind)
        results.append(model(X, 1)[2])
    assert results == names


class Gives(nnx.Module):
    """Returns results and given values unchanged, among others."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.first, self.second, self.count = (nnx.BatchStat(jnp.full(3, n)) for n in (1.0, 2.0, 0.0))

    def __call__(self, x, more):
        first, second = self.first.get_value(), self.second.get_value()
        self.first.set_value(second)
        self.second.set_value(first)
        self.count[...] += 1
        return {"x": x, "more": more, "y": self.dense(x), "first": first, "none": None, "count": self.count[...]}


@pytest.mark.parametrize("run", [lambda m, *a: m(*a), nnx.jit(lambda m, *a: m(*a))], ids=["eager", "jit"])
def test_what_was_given_comes_back_as_it_was(run):
    plain = Gives(nnx.Rngs(0))
    model, more = fp8jax.nnx.quantize(plain, TE), {"a": jnp.ones(2), "b": jnp.zeros(())}
    actual, expected = run(model, X, more), run(plain, X, more)
    assert 0 < relative(actual.pop("y"), expected.pop("y")) < 0.1
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(actual))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert (actual["x"] is X) == (expected["x"] is X)  # not as another array, outside of a program
    states = (nnx.to_pure_dict(nnx.state(m, nnx.BatchStat)) for m in (model, plain))
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert model.first[0] == 2


def test_a_state_that_lacks_a_layers_scaling_is_taken_and_that_layer_starts_anew():
    trained, fresh = (fp8jax.nnx.quantize(Model(nnx.Rngs(seed)), "te_delayed") for seed in (0, 1))
    trained.layers[0].up.dot_general.x[...] += 2
    saved = nnx.to_flat_state(nnx.state(trained))
    saved = nnx.from_flat_state([(path, v) for path, v in saved if "gate" not in path or path[-1] == "kernel"])
    nnx.update(fresh, saved)
    assert jnp.all(fresh.layers[0].up.dot_general.x[...] == trained.layers[0].up.dot_general.x[...])
    assert jnp.all(fresh.layers[0].gate.dot_general.x[...] == 0)
    assert jnp.all(jnp.isfinite(fresh(X)))
