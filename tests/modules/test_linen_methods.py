"""Quantized Linen models as Flax users use models: collections, keys, bindings, copies, other libraries."""

import copy
import dataclasses
import functools
import pickle
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax import export, lax

import fp8jax
from fp8jax.modules import linen
from fp8jax.rewrite import transform as transforms
from tests.distance import relative
from tests.modules import patches
from tests.programs import dots
from tests.rows import slow

TE, KEY, WIDTH = fp8jax.recipes.te_current(), jax.random.key(0), 16
X = jax.random.normal(KEY, (4, 6, WIDTH))


def eight(fn, *args) -> int:
    return sum("8" in a and "8" in b for a, b in dots(fn, *args))


class Everything(nn.Module):
    """Dropout, running statistics, sown values, a cache, and results that are not arrays."""

    @nn.compact
    def __call__(self, x, train: bool = False, power: int = 1):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(2 * WIDTH, name="up")(x))
        calls = self.variable("cache", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        x = nn.Dropout(0.5, deterministic=not train)(nn.silu(x) ** power)
        self.sow("intermediates", "inner", x)
        return {"y": nn.Dense(WIDTH, name="down")(x), "power": power, "name": "everything", "none": None}

    def halves(self, x):
        return jnp.split(self(x)["y"], 2, axis=-1)


def test_collections_keys_and_results_of_any_kind_come_out_as_they_do():
    plain, model = Everything(), fp8jax.linen.quantize(Everything(), TE)
    variables = plain.init(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, variables, model.init(KEY, X))
    kwargs = {"rngs": {"dropout": jax.random.key(5)}, "mutable": ["batch_stats", "cache", "intermediates"]}
    (actual, after), (expected, written) = (m.apply(variables, X, True, power=2, **kwargs) for m in (model, plain))
    assert eight(lambda v: model.apply(v, X, True, **kwargs)[0]["y"], variables) == 2
    assert {name: actual[name] for name in ("power", "name", "none")} == {
        "power": 2,
        "name": "everything",
        "none": None,
    }
    assert 0 < relative(actual["y"], expected["y"]) < 0.1
    assert jax.tree.structure(after) == jax.tree.structure(written)
    assert after["cache"]["calls"] == 1
    dropped = [np.asarray(w["intermediates"]["inner"][0]) == 0 for w in (after, written)]
    np.testing.assert_array_equal(*dropped)  # by the same key
    assert relative(after["batch_stats"], written["batch_stats"]) < 0.05
    left, right = model.apply(variables, X, method="halves", mutable=["cache"])[0]
    assert left.shape == right.shape == (4, 6, WIDTH // 2)


class Nested(nn.Module):
    def setup(self):
        self.inner, self.listed, self.norm = Everything(), self.make(2), nn.LayerNorm()

    def make(self, count):
        return [nn.Dense(WIDTH) for _ in range(count)]

    def __call__(self, x):
        x = self.inner(self.norm(x))["y"]
        return self.listed[1](nn.relu(self.listed[0](x)))


def test_parts_that_are_called_from_outside_are_quantized_by_the_same_rules():
    model = fp8jax.linen.quantize(Nested(), [fp8jax.Rule("inner/up", None), fp8jax.Rule("listed_1", None), TE])
    variables = Nested().init(KEY, X)
    bound, mutable = model.bind(variables, mutable=["cache"]), {"mutable": ["cache"]}
    assert eight(lambda x: model.bind(variables, **mutable)(x), X) == 2
    assert eight(lambda x: model.bind(variables, **mutable).inner(x)["y"], X) == 1  # "down" by the rule for all
    assert eight(lambda x: model.bind(variables).listed[0](x), X) == 1
    assert eight(lambda x: model.bind(variables).listed[1](x), X) == 0
    np.testing.assert_array_equal(bound.norm(X), Nested().bind(variables).norm(X))  # has no product, is no mistake
    inner = functools.partial(model.apply, variables, method=lambda m, x: m.inner(x)["y"], **mutable)
    assert eight(inner, X) == 1
    np.testing.assert_array_equal(inner(X)[0], bound.inner(X)["y"])
    assert type(bound.inner) is not Everything
    assert isinstance(bound.inner, Everything)


class Outer(nn.Module):
    """Modules in fields: a single one, a list, a dictionary. One of them has another module in its own field."""

    inner: nn.Module
    listed: list[nn.Module]
    named: dict[str, nn.Module]

    def __call__(self, x):
        return self.named["last"](self.listed[1](self.listed[0](nn.silu(self.inner(x)))))


class Holding(nn.Module):
    dense: nn.Module

    def __call__(self, x):
        return self.dense(x)


def test_parts_in_fields_of_a_model_that_is_not_bound_are_quantized_by_the_same_rules():
    parts = Holding(nn.Dense(WIDTH)), [nn.Dense(WIDTH), nn.Dense(WIDTH)], {"last": nn.Dense(WIDTH)}
    plain = Outer(*parts)
    model = fp8jax.linen.quantize(plain, [fp8jax.Rule("listed_1", None), fp8jax.Rule(".*", TE)])
    variables, params_of_model = plain.init(KEY, X), plain.init(KEY, X)["params"]
    bound = model.bind(variables)
    own, whole = ((m.inner, m.inner.dense, *m.listed, m.named["last"]) for m in (model, bound))
    places = (
        params_of_model["inner"],
        params_of_model["inner"]["dense"],
        params_of_model["listed_0"],
        params_of_model["listed_1"],
        params_of_model["named_last"],
    )
    for part, other, params, count in zip(own, whole, places, (1, 1, 1, 0, 1), strict=True):
        assert eight(part.apply, {"params": params}, X) == eight(other, X) == count
        np.testing.assert_array_equal(part.apply({"params": params}, X), other(X))
    assert eight(bound, X) == 3
    assert (model.inner, hash(model.inner), isinstance(model.inner, Holding)) == (model.inner, hash(model.inner), True)
    assert (model.inner.dense.features, copy.deepcopy(model.inner)) == (WIDTH, model.inner)
    assert fp8jax.linen.unquantize(model) == plain
    assert fp8jax.linen.unquantize(model.inner) == parts[0]
    fresh = model.inner.init(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, fresh, parts[0].init(KEY, X))
    # A part may be a part of another model.
    other = Outer(model.inner, [nn.Dense(WIDTH), nn.Dense(WIDTH)], {"last": nn.Dense(WIDTH)})
    assert eight(lambda x: other.apply(variables, x), X) == 1
    # Fields outside of the parameter tree stay unchanged.
    assert isinstance(model.clone(inner=nn.Dense(WIDTH)).inner, nn.Dense)


class Reader(nn.Module):
    """Calls its own layer, then a layer that is passed to it."""

    @nn.compact
    def __call__(self, x, other):
        return other(nn.silu(nn.Dense(WIDTH, name="own")(x)))


class Sharing(nn.Module):
    reader: nn.Module

    def setup(self):
        self.shared = nn.Dense(WIDTH)

    def __call__(self, x):
        return self.reader(x, self.shared)


def test_a_layer_among_the_arguments_has_its_parameters_and_states_where_it_is():
    model = Sharing(fp8jax.linen.quantize(Reader(), "te_delayed"))
    variables = model.init(KEY, X)
    params = variables["params"]
    assert jax.tree.structure(params) == jax.tree.structure(Sharing(Reader()).init(KEY, X)["params"])
    y, written = model.apply(variables, X, mutable=["fp8jax_scaling"])
    assert 0 < relative(y, Sharing(Reader()).apply({"params": params}, X)) < 0.1
    hidden = nn.silu(nn.Dense(WIDTH).apply({"params": params["reader"]["own"]}, X))
    layers = ((written["fp8jax_scaling"]["reader"]["own"], params["reader"]["own"], X),
              (written["fp8jax_scaling"]["shared"], params["shared"], hidden))  # fmt: skip
    for states, own, x in layers:
        np.testing.assert_allclose(states["seen_w"], jnp.abs(own["kernel"]).max(), rtol=1e-6)
        np.testing.assert_allclose(states["seen_x"], jnp.abs(x).max(), rtol=0.1)
    for rule in ("own", "shared"):
        ruled = Sharing(fp8jax.linen.quantize(Reader(), [fp8jax.Rule(rule, None), TE]))
        assert eight(lambda x, of=ruled: of.apply({"params": params}, x), X) == 1


@dataclasses.dataclass(eq=False)
class Config:
    """Compared by identity."""

    scale: float


class Configured(nn.Module):
    config: Config
    how: object = 1

    @nn.compact
    def __call__(self, x, train=False, power=1):
        x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(WIDTH)(self.config.scale * x))
        self.sow("results", "x", x)
        return x, type(self.how).__name__, type(power).__name__


def test_outside_of_programs_a_call_is_planned_once(monkeypatch):
    plans, plan = [], transforms.plan
    monkeypatch.setattr(transforms, "plan", lambda *args: plans.append(1) or plan(*args))
    config = Config(1.0)
    model = fp8jax.linen.quantize(Configured(config), TE)
    variables = {"params": model.init(KEY, X)["params"]}

    def call(*args, of=model, x=X, **options):
        before = len(plans)
        y = of.apply(variables, x, *args, **options)
        return y, len(plans) - before

    (y, *names), count = call()
    assert (names, count) == (["int", "int"], 1)
    program = jax.jit(lambda x: model.apply(variables, x)[0])
    np.testing.assert_array_equal(y, program(X))
    (second_result, *_), count = call(x=-X)
    assert count == 0
    np.testing.assert_array_equal(second_result, program(-X))
    # Other settings, fields and shapes have other programs, and those that compare as equal, too.
    assert [call(power=power)[0][2] for power in (1, True, 1.0)] == ["int", "bool", "float"]
    assert call(power=True)[1] == 0
    assert call(of=fp8jax.linen.quantize(Configured(config, True), TE))[0][1] == "bool"
    assert call(x=X[:1])[1] == 1
    half, count = call(x=X.astype(jnp.bfloat16))
    assert (half[0].dtype, count) == (Configured(config).apply(variables, X.astype(jnp.bfloat16))[0].dtype, 1)
    tables = [fp8jax.linen.quantize(Configured(config, {key: 1}), TE) for key in "ab"]
    assert [call(of=of)[1] for of in (*tables, *tables)] == [1, 1, 0, 0]
    config.scale = 2.0
    changed, count = call()
    assert count == 1
    np.testing.assert_array_equal(changed[0], program(2 * X))
    # So do functions that may write to other collections.
    result, written = model.apply(variables, X, mutable=["results"])
    np.testing.assert_array_equal(written["results"]["x"][0], result[0])
    # Keys are drawn as they are by the model as written.
    keys = [{"rngs": {"dropout": jax.random.key(i)}} for i in (1, 1, 2)]
    dropped = [np.asarray(call(True, **key)[0][0]) == 0 for key in keys]
    expected = [np.asarray(Configured(config).apply(variables, X, True, **key)[0]) == 0 for key in keys]
    np.testing.assert_array_equal(dropped, expected)
    bound, plain = (m.bind(variables, rngs=keys[0]["rngs"]) for m in (model, Configured(config)))
    for _ in range(2):
        np.testing.assert_array_equal(bound(X, True)[0] == 0, plain(X, True)[0] == 0)
    # A function that inspects a call sees it each time.
    for _ in range(2):
        _, recorded = model.apply(variables, X, capture_intermediates=True, mutable=["intermediates"])
        assert "Dense_0" in recorded["intermediates"]
    with nn.intercept_methods(lambda call, args, kwargs, context: (plans.append("call"), call(*args, **kwargs))[1]):
        assert all(call()[1] > 1 for _ in range(2))
    assert "Dense_0" not in model.apply(variables, X, mutable=["intermediates"])[1].get("intermediates", {})


def test_a_checkpoint_without_the_states_of_a_layer_is_told_what_to_do():
    model = fp8jax.linen.quantize(nn.Sequential([nn.Dense(WIDTH), nn.Dense(WIDTH)]), "te_delayed")
    variables = model.init(KEY, X)
    flat = traverse_util.flatten_dict(variables)
    saved = {path: leaf for path, leaf in flat.items() if "layers_1" not in path or path[0] == "params"}
    saved[("fp8jax_scaling", "layers_0", "x")] += 1
    with pytest.raises(ValueError, match=r"layers_1 has delayed scaling: other layers have.*Rule\('layers_1', None\)"):
        model.apply(traverse_util.unflatten_dict(saved), X)
    part = {path: leaf for path, leaf in flat.items() if path[:3] != ("fp8jax_scaling", "layers_1", "dy")}
    with pytest.raises(ValueError, match="layers_1 has delayed scaling: other layers have"):
        model.apply(traverse_util.unflatten_dict(part), X)
    whole = traverse_util.unflatten_dict({**flat, **saved})
    assert np.all(np.isfinite(model.apply(whole, X)))
    left = fp8jax.linen.quantize(nn.Sequential([nn.Dense(WIDTH)] * 2), [fp8jax.Rule("layers_1", None), "te_delayed"])
    assert np.all(np.isfinite(left.apply(traverse_util.unflatten_dict(saved), X)))
    with pytest.raises(ValueError, match="pass the collections"):
        model.apply({"params": variables["params"]}, X)


@pytest.mark.parametrize("dumps", ["pickle", "cloudpickle", "deepcopy"])
def test_copies_of_models_are_equal_and_quantized(dumps):
    model = fp8jax.linen.quantize(Nested(), [fp8jax.Rule("inner/.*", TE)])
    if dumps == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        module = pytest.importorskip(dumps)
        copied = pickle.loads(module.dumps(model))
    assert copied == model != Nested()
    variables = Nested().init(KEY, X)
    assert eight(functools.partial(copied.apply, mutable=["cache"]), variables, X) == 2
    if dumps == "pickle":
        assert type(model).__doc__ == Nested.__doc__
        with pytest.raises(TypeError, match="bound to variables cannot be pickled"):
            module.dumps(model.bind(variables))


def test_the_way_back():
    model = fp8jax.linen.quantize(Nested(), "te_delayed")
    plain = fp8jax.linen.unquantize(model)
    assert plain == Nested()
    variables = model.init(KEY, X)
    rest = {name: values for name, values in variables.items() if not name.startswith("fp8jax_")}
    jax.tree.map(np.testing.assert_array_equal, rest, plain.init(KEY, X))
    with pytest.raises(ValueError, match="Nested is not quantized"):
        fp8jax.linen.unquantize(plain)


def test_a_table_of_a_model_is_that_of_the_model():
    tables = [nn.tabulate(m, KEY)(X) for m in (Nested(), fp8jax.linen.quantize(Nested(), TE))]
    assert tables[0] == tables[1]


class MaxTextLike(nn.Module):
    """A layer as in MaxText: its own class, a kernel with more axes, both operands cast, a pair of precisions."""

    features: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], *self.features)
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "heads", "kv")[: len(shape)])
        kernel = jnp.asarray(self.param("kernel", init, shape), jnp.bfloat16)
        precision = lax.Precision.DEFAULT
        contract = ((x.ndim - 1,), (0,))
        return lax.dot_general(x.astype(jnp.bfloat16), kernel, (contract, ((), ())), precision=(precision, precision))


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = MaxTextLike((2, 12), name="q")(x)
        return x + MaxTextLike((WIDTH,), name="out")(jnp.tanh(h.reshape(*x.shape[:-1], 24)))


@pytest.mark.parametrize("name", ["te_current", "te_delayed"])
def test_layers_as_in_maxtext_with_partitioned_parameters(name):
    model = fp8jax.linen.quantize(Layers(), name)
    variables, plain = model.init(KEY, X), Layers().init(KEY, X)
    assert jax.tree.structure(variables["params"]) == jax.tree.structure(plain["params"])
    assert isinstance(variables["params"]["q"]["kernel"], nn.LogicallyPartitioned)
    assert eight(model.apply, variables, X) == 2
    assert 0 < relative(model.apply(variables, X), Layers().apply(plain, X)) < 0.1
    if name == "te_delayed":
        assert set(variables["fp8jax_scaling"]) == {"q", "out"}
        _, new = model.apply(variables, X, mutable=["fp8jax_scaling"])
        np.testing.assert_allclose(new["fp8jax_scaling"]["q"]["seen_x"], jnp.abs(X).max(), rtol=1e-2)


class Scanned(nn.Module):
    """Layers in a Flax loop without axes for scaling collections."""

    @nn.compact
    def __call__(self, x):
        body = nn.remat(Body, prevent_cse=False)
        return nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(name="layers")(
            x, None
        )[0]


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH, name="a")(nn.silu(nn.Dense(WIDTH, name="b")(x))), None


def test_a_loop_needs_no_axes_for_the_collections_of_scalings():
    model = fp8jax.linen.quantize(Scanned(), "te_delayed")
    variables = jax.jit(model.init)(KEY, X)
    kernel = variables["params"]["layers"]["a"]["kernel"]

    @jax.jit
    def step(variables):
        def loss(params, statistics):
            collections = variables | {"params": params, "fp8jax_statistics": statistics}
            y, new = model.apply(collections, X, mutable=["fp8jax_scaling"])
            return jnp.mean(y**2), new["fp8jax_scaling"]

        take = jax.grad(loss, (0, 1), has_aux=True)
        (grads, recorded), scaling = take(variables["params"], variables["fp8jax_statistics"])
        return grads, fp8jax.linen.advance_scaling(scaling, recorded)

    grads, scaling = step(variables)
    newest = {name: np.asarray(scaling["layers"]["a"][name])[:, 0] for name in ("x", "w", "dy")}
    np.testing.assert_allclose(newest["w"], jnp.abs(kernel).max((1, 2)), rtol=1e-6)
    assert all(len({*values.tolist()}) == 3 and (values > 0).all() for values in newest.values())
    exact = jax.grad(lambda p: jnp.mean(Scanned().apply({"params": p}, X) ** 2))(variables["params"])
    assert 0 < relative(grads, exact) < 0.2


def test_adapters_that_another_library_adds_to_products_keep_their_part():
    """Regression: the adapter's term was lost, and later refused."""
    a, b = jax.random.normal(KEY, (WIDTH, 2)), jax.random.normal(KEY, (2, WIDTH))

    def adapted(original, lhs, rhs, *args, **kwargs):
        y = original(lhs, rhs, *args, **kwargs)
        numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
        return y + original(original(lhs, a, numbers), b, numbers) if rhs.shape == (WIDTH, WIDTH) else y

    plain, model = nn.Dense(WIDTH, use_bias=False), fp8jax.linen.quantize(nn.Dense(WIDTH, use_bias=False), TE)
    variables = plain.init(KEY, X)
    alone = model.apply(variables, X)
    with patches.code_changed(adapted):
        y = model.apply(variables, X)
        assert eight(model.apply, variables, X) == 1
    np.testing.assert_allclose(y - alone, X @ a @ b, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(model.apply(variables, X), alone)


def test_a_gradient_inside_of_a_loss_is_that_of_first_order():
    """First-order MAML: an inner gradient step without its derivative."""
    model = fp8jax.linen.quantize(nn.Sequential([nn.Dense(WIDTH), nn.silu, nn.Dense(WIDTH)]), fp8jax.Rule(".*", TE))
    plain = fp8jax.linen.unquantize(model)
    params = plain.init(KEY, X)

    def outer(apply, params):
        inner = lambda p: jnp.mean(apply(p, X[:2]) ** 2)  # noqa: E731
        step = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(inner)(lax.stop_gradient(params)))
        return jnp.mean(jnp.sin(apply(step, X[2:])))

    actual, expected = (jax.jit(jax.value_and_grad(functools.partial(outer, m.apply)))(params) for m in (model, plain))
    assert relative(actual[0], expected[0]) < 0.1
    assert 0 < relative(actual[1], expected[1]) < 0.2


class Residual(nn.Module):
    """A value added to a matmul may be a bias: its axes decide, also those of heads."""

    @nn.compact
    def __call__(self, x):
        heads = nn.Dense(WIDTH)(nn.RMSNorm()(x)).reshape(*x.shape[:-1], 2, WIDTH // 2)
        return x + nn.Dense(WIDTH, use_bias=False)(nn.silu(heads.reshape(x.shape)))


@pytest.mark.parametrize(
    ("model", "recipe"), [(nn.Sequential([nn.Dense(WIDTH), nn.silu, nn.Dense(WIDTH)]), TE), (Residual(), "coat")]
)
def test_a_model_is_exported_for_batches_of_any_size(model, recipe):
    model = fp8jax.linen.quantize(model, [fp8jax.Rule(".*", recipe)])
    variables = model.init(KEY, X[0])
    (batch,) = export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
    exported = export.export(jax.jit(model.apply))(variables, shape)
    for n in (2, 6):
        np.testing.assert_allclose(
            exported.call(variables, X[0, :n]), model.apply(variables, X[0, :n]), rtol=1e-5, atol=1e-5
        )


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(num_heads=2, decode=True, name="attention")(x, mask=None)


def test_a_cache_for_decoding_is_made_at_full_length_and_read_token_by_token():
    model, plain = fp8jax.linen.quantize(Decoder(), fp8jax.Rule(".*", "te_delayed")), Decoder()
    variables = model.init(KEY, X)
    cache = variables["cache"]
    assert jax.tree.structure(cache) == jax.tree.structure(plain.init(KEY, X)["cache"])
    assert len(variables["fp8jax_scaling"]["attention"]) == 4
    for i in range(2):
        y, new = model.apply(variables | {"cache": cache}, X[:, i : i + 1], mutable=["cache"])
        expected, written = plain.apply(
            {"params": variables["params"], "cache": cache}, X[:, i : i + 1], mutable=["cache"]
        )
        assert relative(y, expected) < 0.1
        assert relative(new["cache"], written["cache"]) < 0.1
        cache = new["cache"]
    assert cache["attention"]["cache_index"] == 2


def test_what_looks_at_values_is_told_so_by_jax():
    class Looks(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(x) if x.sum() != 0 else x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        fp8jax.linen.quantize(Looks(), TE).apply(Looks().init(KEY, X), X)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, name="a")(x + jax.random.normal(self.make_rng("noise"), x.shape))


class Around(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(self.inner(self.inner(x)) + jax.random.normal(self.make_rng("noise"), x.shape))


def test_what_a_model_around_a_part_initializes_is_that_of_the_plain_model():
    keys = {"params": KEY, "noise": jax.random.key(9)}
    plain = Around(Noisy()).init_with_output(keys, X)
    quantized = Around(fp8jax.linen.quantize(Noisy(), fp8jax.Rule("a", TE)))
    jax.tree.map(np.testing.assert_array_equal, plain, quantized.init_with_output(keys, X))
    assert eight(lambda v: quantized.apply(v, X, rngs={"noise": KEY}), plain[1]) == 2


@pytest.mark.parametrize("name", [slow("coat"), "te_delayed"])
def test_explicit_meshes(name):
    model = fp8jax.linen.quantize(Scanned(), name)
    variables = model.init(KEY, X)

    @jax.jit
    def loss(trained, x):
        y, _ = model.apply(variables | trained, x, mutable=["fp8jax_scaling"])
        return jnp.mean(jnp.sin(y) ** 2)

    trained = {name: v for name, v in variables.items() if name != "fp8jax_scaling"}
    expected = jax.value_and_grad(loss)(trained, X)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
        trained = jax.device_put(trained, jax.NamedSharding(mesh, jax.P()))
        variables = jax.device_put(variables, jax.NamedSharding(mesh, jax.P()))
        actual = jax.value_and_grad(loss)(trained, x)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_a_trainer_that_never_advances_states_is_told_how():
    model = fp8jax.linen.quantize(nn.Dense(WIDTH), fp8jax.Rule("", "te_delayed"))
    variables = model.init(KEY, X)

    def loss(statistics, scaling):
        collections = {"params": variables["params"], "fp8jax_statistics": statistics, "fp8jax_scaling": scaling}
        y, new = model.apply(collections, X, mutable=["fp8jax_scaling"])
        return jnp.mean(y**2), new["fp8jax_scaling"]

    given = variables["fp8jax_statistics"], variables["fp8jax_scaling"]
    with pytest.warns(UserWarning, match=r"never calls fp8jax\.linen\.advance_scaling: .*Call scaling = fp8jax\.linen"):
        jax.jit(jax.grad(loss, has_aux=True))(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @jax.jit
        def step(statistics, scaling):
            recorded, scaling = jax.grad(loss, has_aux=True)(statistics, scaling)
            return fp8jax.linen.advance_scaling(scaling, recorded)

        step(*given)


def test_a_plan_names_lines_of_the_model():
    plan = linen.plan_call(fp8jax.linen.quantize(Layers(), TE), Layers().init(KEY, X), (X,), {})
    (entry, *_) = plan.program.entries.values()
    assert entry.line.split(":")[0] == __file__
    assert entry.path == "q"


class Named(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("value", "scale", "w"):
            x = x + nn.Dense(WIDTH, name=name)(jnp.tanh(x))
        return x


def test_layers_with_the_names_of_parameters_have_their_paths():
    model = fp8jax.linen.quantize(Named(), [fp8jax.Rule("value", TE), fp8jax.Rule("scale", None), fp8jax.Rule("w", TE)])
    assert eight(model.apply, Named().init(KEY, X), X) == 2
