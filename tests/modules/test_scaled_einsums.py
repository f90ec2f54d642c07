"""Stateful scalings in einsum layers: Flax's and those of Gemma and Qwen3, in NNX and Linen."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import fp8jax
from tests.distance import relative
from tests.modules.architectures import Einsum as LinenEinsum
from tests.rows import covering, slow

DELAYED = dataclasses.replace(fp8jax.recipes.te_delayed().linear, amax_history_length=3)
BLOCKS = {
    "x": "int8:block16",
    "w": "int8:block16",
    "dy": "int8:block16+stochastic",
    "x_residual": "int8:block16+stochastic",
}
FALLBACK = dataclasses.replace(fp8jax.recipes.int8_fallback().linear, **BLOCKS)
RECIPES = pytest.mark.parametrize("recipe", [DELAYED, FALLBACK], ids=["delayed", "fallback"])
HEADS, CHANNELS, WIDTH = 2, 16, 32
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (2, 8, WIDTH)).at[..., 16:].multiply(0.1).at[0, 0, 0].set(9)  # one block of two falls back
Y = jax.random.normal(jax.random.key(1), (2, 8, HEADS, CHANNELS))
# Subscripts, the input, axes of the kernel as inputs first, how many of them are inputs.
CASES = {
    "query": ("btd,dnh->btnh", X, (0, 1, 2), 1),
    "query of Gemma": ("btd,ndh->btnh", X, (1, 0, 2), 1),
    "output": ("btnh,nhd->btd", Y, (0, 1, 2), 2),
    "any tokens": ("...nh,nhd->...d", Y, (0, 1, 2), 2),
}
CASES_AND_RECIPES = pytest.mark.parametrize(("case", "recipe"), covering(CASES, [DELAYED, FALLBACK]), indirect=["case"])
ANY = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)


@pytest.fixture(params=CASES)
def case(request):
    subscripts, x, axes, inputs = CASES[request.param]
    sizes = {"d": WIDTH, "n": HEADS, "h": CHANNELS}
    shape = tuple(sizes[c] for c in subscripts.partition(",")[2].partition("->")[0])
    return subscripts, x, axes, shape, tuple(shape[i] for i in axes[:inputs]), tuple(shape[i] for i in axes[inputs:])


def one_step(layer, x):
    """Returns the output of an NNX layer, gradients of kernel and input, and the states after the step."""

    def loss(layer, x):
        y = layer(x)
        return jnp.sum(y * jnp.sin(jnp.arange(y.size).reshape(y.shape))), y

    (_, y), (grads, dx) = nnx.value_and_grad(loss, argnums=(nnx.DiffState(0, ANY), 1), has_aux=True)(layer, x)
    grads = fp8jax.nnx.advance_scaling(layer, grads)
    states = [v[...] for _, v in nnx.to_flat_state(nnx.state(layer, fp8jax.nnx.ScalingVariable))]
    return y, grads["kernel"][...], dx, states


@CASES_AND_RECIPES
def test_an_einsum_of_nnx_is_the_linear_layer_of_the_same_contraction(case, recipe):
    subscripts, x, axes, shape, inputs, outputs = case
    einsum = nnx.Einsum(subscripts, shape, rngs=nnx.Rngs(0))
    plain = nnx.LinearGeneral(inputs, outputs, axis=range(-len(inputs), 0), use_bias=False, rngs=nnx.Rngs(0))
    plain.kernel[...] = jnp.transpose(einsum.kernel[...], axes)
    step = nnx.jit(one_step)
    actual, expected = (step(fp8jax.nnx.quantize(layer, recipe), x) for layer in (einsum, plain))
    actual = (actual[0], jnp.transpose(actual[1], axes), *actual[2:])
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    start = nnx.state(fp8jax.nnx.quantize(einsum, recipe), fp8jax.nnx.ScalingVariable)
    moved = [np.any(a != b[...]) for a, (_, b) in zip(actual[3], nnx.to_flat_state(start), strict=True)]
    assert sum(moved) == (3 if recipe is DELAYED else 1)
    assert 0 < relative(actual[0], jnp.einsum(subscripts, x, einsum.kernel[...])) < 0.1


@CASES_AND_RECIPES
def test_an_einsum_of_linen_is_the_dense_layer_of_the_same_contraction(case, recipe):
    subscripts, x, axes, shape, inputs, outputs = case
    plain = nn.DenseGeneral(outputs, axis=tuple(range(-len(inputs), 0)), use_bias=False)
    einsum = nn.Einsum(shape, subscripts, use_bias=False)
    kernel = jax.random.normal(KEY, shape) / 6

    @jax.jit(static_argnums=0)
    def step(layer, kernel):
        model = fp8jax.linen.quantize(layer, recipe)
        variables = model.init(KEY, x)
        assert variables["params"]["kernel"].shape == kernel.shape

        def loss(params, statistics):
            y, new = model.apply(
                variables | {"params": params, "fp8jax_statistics": statistics}, x, mutable=["fp8jax_scaling"]
            )
            return jnp.sum(y * jnp.sin(jnp.arange(y.size).reshape(y.shape))), (y, new["fp8jax_scaling"])

        grad_fn = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (grads, recorded), (y, scaling) = grad_fn({"kernel": kernel}, variables.get("fp8jax_statistics", {}))
        return y, grads["kernel"], fp8jax.linen.advance_scaling(scaling, recorded, recipe)

    actual, expected = step(einsum, kernel), step(plain, jnp.transpose(kernel, axes))
    jax.tree.map(np.testing.assert_array_equal, (actual[0], jnp.transpose(actual[1], axes), actual[2]), expected)


def test_stacked_einsums_have_states_of_their_own():
    make = nnx.vmap(lambda rngs: nnx.Einsum("btd,de->bte", (WIDTH, WIDTH), rngs=rngs), in_axes=0)
    layers = fp8jax.nnx.quantize(make(nnx.Rngs(0).split(3)), DELAYED)

    @nnx.jit
    def grad(layers, x):
        scan = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        grads = nnx.grad(lambda layers: jnp.sum(scan(x, layers) ** 2), argnums=nnx.DiffState(0, ANY))(layers)
        return fp8jax.nnx.advance_scaling(layers, grads)

    grad(layers, X)
    for operand in ("x", "w", "dy"):
        newest = np.asarray(getattr(layers.einsum_op, operand)[...])[:, 0]
        assert len({*newest.tolist()}) == 3
        assert (newest > 0).all()
    np.testing.assert_allclose(layers.einsum_op.w[:, 0], jnp.abs(layers.kernel[...]).max((1, 2)), rtol=1e-6)


class NnxEinsum(nnx.Module):
    """As in bonsai's Qwen3: a class around one matrix."""

    def __init__(self, subscripts, shape, rngs):
        self.subscripts, self.w = subscripts, nnx.Param(jax.random.normal(rngs.params(), shape) / 6)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.einsum(self.subscripts, x, self.w[...])


class Attention(nnx.Module):
    """Attention as in Gemma: q, k, v and the output are einsums of a Flax class or a custom class."""

    def __init__(self, make, rngs):
        self.q = make("btd,dnh->btnh", (WIDTH, HEADS, CHANNELS), rngs=rngs)
        self.kv = make("bsd,ckdh->cbskh", (2, 1, WIDTH, CHANNELS), rngs=rngs)
        self.o = make("btnh,nhd->btd", (HEADS, CHANNELS, WIDTH), rngs=rngs)

    def __call__(self, x):
        q, (k, v) = self.q(x), self.kv(x)
        weights = jax.nn.softmax(jnp.einsum("btnh,bskh->bnts", q, k) / CHANNELS**0.5)
        return x + self.o(jnp.einsum("bnts,bskh->btnh", weights, v))


GOAL = jax.random.normal(jax.random.key(2), X.shape)


def loss_of(model, x):
    return jnp.mean((model(x) - GOAL) ** 2)


@nnx.jit
def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, ANY))(model, x)
    optimizer.update(model, fp8jax.nnx.advance_scaling(model, grads))
    return loss


@pytest.mark.parametrize(
    ("make", "recipe"),
    [(nnx.Einsum, FALLBACK), (NnxEinsum, DELAYED), slow(nnx.Einsum, DELAYED), slow(NnxEinsum, FALLBACK)],
)
def test_attention_of_einsums_trains_in_nnx(make, recipe):
    plain = Attention(make, nnx.Rngs(0))
    model = fp8jax.nnx.quantize(plain, recipe)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    weights, states = (nnx.to_flat_state(nnx.state(model, kind)) for kind in (nnx.Param, fp8jax.nnx.ScalingVariable))
    names = {"".join(map(str, path[-2:-1])) for path, _ in states}
    assert names == {"einsum_op" if make is nnx.Einsum else "fp8jax_w"}
    assert [path for path, _ in weights] == [path for path, _ in nnx.to_flat_state(nnx.state(plain, nnx.Param))]
    assert 0 < relative(nnx.jit(lambda m: m(X))(model), plain(X)) < 0.1
    assert make is nnx.Einsum or model.q.calls[...] == 1
    nnx.update(model, nnx.state(fp8jax.nnx.quantize(plain, recipe)))
    losses = [float(train(model, optimizer, X)) for _ in range(2)]
    assert losses[1] < losses[0]
    product = model.kv.einsum_op if make is nnx.Einsum else model.kv.fp8jax_w
    # A product of all matrices of an own class has the state of the first one.
    state = lambda name: getattr(product, name)[() if make is nnx.Einsum else (0, 0)]  # noqa: E731
    if recipe is DELAYED:
        for operand in ("x", "w", "dy"):
            np.testing.assert_array_equal(np.asarray(state(operand)) > 0, [True, True, False])
        np.testing.assert_allclose(state("x")[:2], 9)  # exact in a history of fp32
    else:
        np.testing.assert_allclose(state("threshold_x"), 1.3**2, rtol=1e-6)
    # All of it is state: a restored checkpoint continues exactly.
    graph, state = nnx.split((model, optimizer))
    other, again = nnx.merge(graph, jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, state)))
    assert float(train(other, again, X)) == float(train(model, optimizer, X))


def test_evaluation_reads_the_states_of_einsums_and_writes_none():
    model = fp8jax.nnx.quantize(Attention(NnxEinsum, nnx.Rngs(0)), DELAYED)
    model.eval()
    before = jax.tree.map(np.asarray, nnx.state(model, fp8jax.nnx.ScalingVariable))
    model(X)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model, fp8jax.nnx.ScalingVariable))
    model.train()
    model(X)
    np.testing.assert_allclose(model.q.fp8jax_w.seen_x[0], 9)


class LinenAttention(nn.Module):
    """`Attention` in Linen, with layers as in DeepMind's Gemma or with Flax's."""

    own: bool

    @nn.compact
    def __call__(self, x):
        def run(name, subscripts, shape, x):
            if self.own:
                return LinenEinsum(shape, name=name)(subscripts, x)
            return nn.Einsum(shape, subscripts, use_bias=False, name=name)(x)

        q = run("q", "btd,ndh->btnh", (HEADS, WIDTH, CHANNELS), x)
        k, v = run("kv", "bsd,ckdh->cbskh", (2, 1, WIDTH, CHANNELS), x)
        weights = jax.nn.softmax(jnp.einsum("btnh,bskh->bnts", q, k) / CHANNELS**0.5)
        x = x + run("o", "btnh,nhd->btd", (HEADS, CHANNELS, WIDTH), jnp.einsum("bnts,bskh->btnh", weights, v))
        return x + Gated(name="mlp")(x) if self.own else x


class Gated(nn.Module):
    """Two layers in the scope of the module around them, with named weights."""

    @nn.compact
    def __call__(self, x):
        up, down = Weighted("up", (WIDTH, 48)), Weighted("down", (48, WIDTH))
        nn.share_scope(self, up)
        nn.share_scope(self, down)
        return down("btf,fd->btd", nn.gelu(up("btd,df->btf", x)))


class Weighted(nn.Module):
    weight: str
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, subscripts, x):
        return jnp.einsum(subscripts, x, self.param(self.weight, nn.initializers.normal(0.1), self.shape))


class State(TrainState):
    scaling: dict
    statistics: dict


@pytest.mark.parametrize(
    ("own", "recipe"), [slow(True, FALLBACK), (False, DELAYED), slow(True, DELAYED), slow(False, FALLBACK)]
)
def test_attention_of_einsums_trains_in_linen(own, recipe):
    plain, rules = LinenAttention(own), [recipe]
    model = fp8jax.linen.quantize(plain, rules)
    variables = jax.jit(model.init)(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], jax.jit(plain.init)(KEY, X)["params"])
    scaling, statistics = variables["fp8jax_scaling"], variables.get("fp8jax_statistics", {})
    of_params = {"params": variables["params"], "tx": optax.adam(1e-2), "apply_fn": model.apply}
    state = State.create(**of_params, scaling=scaling, statistics=statistics)
    assert 0 < relative(model.apply(variables, X), plain.apply({"params": variables["params"]}, X)) < 0.1

    @jax.jit
    def step(state):
        def loss(params, statistics):
            collections = {"params": params, "fp8jax_scaling": state.scaling, "fp8jax_statistics": statistics}
            y, new = state.apply_fn(collections, X, mutable=["fp8jax_scaling"])
            return jnp.mean((y - GOAL) ** 2), new["fp8jax_scaling"]

        grad_fn = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, scaling), (grads, recorded) = grad_fn(state.params, state.statistics)
        advanced = fp8jax.linen.advance_scaling(scaling, recorded, rules)
        return state.apply_gradients(grads=grads, scaling=advanced), value

    losses = []
    for _ in range(2):
        state, loss = step(state)
        losses.append(loss)
    assert losses[1] < losses[0]
    products = {"kv": state.scaling["kv"]["fp8jax_w"]} if own else {"kv": state.scaling["kv"]}
    if own:
        assert set(state.scaling["mlp"]) == {"fp8jax_up", "fp8jax_down"}
        products |= state.scaling["mlp"]
    for name, product in products.items():
        if recipe is DELAYED:
            for operand in ("x", "w", "dy"):
                np.testing.assert_array_equal(np.asarray(product[operand]) > 0, [True, True, False], err_msg=name)
        assert not np.any(product["seen_x"])
    name, value = ("x", [9, 9, 0]) if recipe is DELAYED else ("threshold_x", 1.3**2)
    np.testing.assert_allclose(products["kv"][name], value, rtol=1e-6)


@RECIPES
def test_products_with_batch_axes_of_nnx_have_a_state_for_each(recipe):
    """In Flax's einsums of experts, its general layers, and custom einsums."""
    experts = nnx.Einsum("ebd,edf->ebf", (2, WIDTH, WIDTH), rngs=nnx.Rngs(0))
    general = nnx.LinearGeneral(WIDTH, WIDTH, batch_axis={0: 2}, rngs=nnx.Rngs(0))
    own = NnxEinsum("ebd,edf->ebf", (2, WIDTH, WIDTH), nnx.Rngs(0))
    model, x = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), experts, general, own), X[:, :4]
    quantized = fp8jax.nnx.quantize(model, recipe)
    assert 0 < relative(quantized(x), model(x)) < 0.1
    explained = fp8jax.explain(quantized, x)
    assert [layer.path for layer in explained.quantized_layers] == [f"layers/{i}" for i in range(4)]
    assert not explained.skipped_layers
    states = [quantized.layers[1].einsum_op, quantized.layers[2].dot_general, quantized.layers[3].fp8jax_w]
    assert [state.layer_axes() for state in states] == [(2,)] * 3
    fp8jax.nnx.advance_scaling(quantized)


@RECIPES
def test_batch_axes_of_linen_are_axes_of_the_states(recipe):
    """Each expert has its own state. One of them has no tokens."""

    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Einsum((2, WIDTH, WIDTH), "ebd,edf->ebf", use_bias=False, name="experts")(x)

    plain, x = Experts(), X.at[1].set(0)
    model = fp8jax.linen.quantize(plain, recipe)
    variables = model.init(KEY, x)
    name = "x" if recipe is DELAYED else "threshold_x"
    assert variables["fp8jax_scaling"]["experts"][name].shape[0] == 2

    def loss(params, statistics):
        collections = variables | {"params": params, "fp8jax_statistics": statistics}
        y, new = model.apply(collections, x, mutable=["fp8jax_scaling"])
        return jnp.sum(jnp.sin(y)), (y, new["fp8jax_scaling"])

    (grads, recorded), (y, scaling) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
        variables["params"], variables.get("fp8jax_statistics", {})
    )
    state = fp8jax.linen.advance_scaling(scaling, recorded, recipe)["experts"]
    if recipe is DELAYED:
        np.testing.assert_allclose(state["x"], [[9, 0, 0], [0, 0, 0]], rtol=1e-6)
        kernel = np.abs(np.asarray(variables["params"]["experts"]["kernel"]))
        np.testing.assert_allclose(state["w"][:, 0], kernel.max((1, 2)), rtol=1e-6)
        np.testing.assert_array_equal(state["dy"][:, 0] > 0, [True, True])
    else:
        np.testing.assert_allclose(state["threshold_x"], [1.3, 1], rtol=1e-6)
    expected, vjp = jax.vjp(lambda p: plain.apply({"params": p}, x), variables["params"])
    assert 0 < relative(y, expected) < 0.1
    assert 0 < relative(grads, vjp(jnp.cos(expected))[0]) < 0.1


MIXED = dataclasses.replace(DELAYED, w_scaling="automatic")


@pytest.mark.parametrize("make", [nnx.Einsum, NnxEinsum], ids=["nnx.Einsum", "own class"])
def test_bounds_of_an_optimizer_reach_the_weights_of_einsums(make):
    model = fp8jax.nnx.quantize(Attention(make, nnx.Rngs(0)), MIXED)
    weight, product = ("kernel", "einsum_op") if make is nnx.Einsum else ("w", "fp8jax_w")
    tx = optax.chain(optax.sgd(0.0), fp8jax.track_weight_amax())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    # The matrices of an own class have bounds of their own.
    largest = jnp.abs(getattr(model.kv, weight)[...]).max(None if make is nnx.Einsum else (2, 3))
    bound = getattr(model.kv, product).automatic_w
    np.testing.assert_array_equal(bound[...], 0)
    getattr(model.kv, weight)[...] *= 3
    fp8jax.nnx.reset_weight_amax_bounds(model)
    np.testing.assert_allclose(bound[...], 3 * largest, rtol=1e-6)
    fp8jax.nnx.update_weight_amax_bounds(model, fp8jax.get_weight_amax_bounds(optimizer.opt_state))
    np.testing.assert_array_equal(bound[...], largest)


@pytest.mark.parametrize("own", [False, True], ids=["nn.Einsum", "own class"])
def test_bounds_reach_the_weights_of_einsums_in_linen(own):
    model = fp8jax.linen.quantize(LinenAttention(own), MIXED)
    variables = jax.jit(model.init)(KEY, X)
    larger = jax.tree.map(lambda w: 3 * w, variables["params"])
    scaling = fp8jax.linen.reset_weight_amax_bounds(variables["fp8jax_scaling"], larger)
    layer = lambda scaling: scaling["kv"]["fp8jax_w"] if own else scaling["kv"]  # noqa: E731
    weight = larger["kv"]["w" if own else "kernel"]
    assert layer(variables["fp8jax_scaling"])["automatic_w"] == 0
    np.testing.assert_allclose(layer(scaling)["automatic_w"], jnp.abs(weight).max(), rtol=1e-6)


@pytest.mark.parametrize("make", [nnx.Einsum, NnxEinsum], ids=["nnx.Einsum", "own class"])
def test_einsums_of_shapes_alone_get_the_states_of_arrays(make):
    make_model = lambda: Attention(make, nnx.Rngs(0))  # noqa: E731
    quantize = lambda model: nnx.state(fp8jax.nnx.quantize(model, MIXED))  # noqa: E731
    abstract, whole = quantize(nnx.eval_shape(make_model)), nnx.eval_shape(lambda: quantize(make_model()))
    assert len(jax.tree.leaves(nnx.filter_state(abstract, fp8jax.nnx.ScalingVariable))) == 3 * 4
    assert nnx.to_pure_dict(abstract) == nnx.to_pure_dict(whole)


class Stack(nn.Module):
    """Layers of a custom class under scan and remat."""

    @nn.compact
    def __call__(self, x):
        axes = dict.fromkeys(("params", "fp8jax_scaling", "fp8jax_statistics"), 0)
        scan = nn.scan(nn.remat(Body), variable_axes=axes, split_rngs={"params": True}, length=2)
        return scan(name="layers")(x, None)[0]


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + Gated(name="mlp")(x), None


def test_own_classes_under_scan_have_a_state_for_each_layer_and_weight():
    rules = [fp8jax.Rule("layers/mlp", DELAYED)]
    model = fp8jax.linen.quantize(Stack(), rules)
    variables = jax.jit(model.init)(KEY, X)

    @jax.jit
    def step(variables):
        def loss(statistics):
            y, new = model.apply(variables | {"fp8jax_statistics": statistics}, X, mutable=["fp8jax_scaling"])
            return jnp.sum(y**2), new["fp8jax_scaling"]

        recorded, scaling = jax.grad(loss, has_aux=True)(variables["fp8jax_statistics"])
        return fp8jax.linen.advance_scaling(scaling, recorded, rules)

    products = step(variables)["layers"]["mlp"]
    for weight in ("up", "down"):
        newest = {operand: np.asarray(products[f"fp8jax_{weight}"][operand])[:, 0] for operand in ("x", "w", "dy")}
        expected = np.abs(variables["params"]["layers"]["mlp"][weight]).max((1, 2))
        np.testing.assert_allclose(newest["w"], expected, rtol=1e-6)
        assert all(len({*values.tolist()}) == 2 and (values > 0).all() for values in newest.values())


def test_explain_tells_of_einsums_with_states():
    for model, products in ((Attention(NnxEinsum, nnx.Rngs(0)), 3), (LinenAttention(True), 5)):
        report = fp8jax.explain(model, DELAYED, X)
        assert sum(p.executions for p in report.program.traced if p.has_codes) == 3 * products
        assert len(report.quantized_layers) == products


class Perceptron(nnx.Module):
    """A custom class with two matrices, which it casts and transposes before the matmul."""

    def __init__(self, rngs):
        self.down = nnx.Param(jax.random.normal(rngs.params(), (48, WIDTH)) / 6)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (48, WIDTH)) / 3)

    def __call__(self, x):
        x = x.astype(jnp.bfloat16)
        up, down = (w[...].astype(jnp.bfloat16) for w in (self.up, self.down))
        return jnp.moveaxis(jnp.tensordot(down, nnx.silu(x @ up.T), ((0,), (2,))), 0, -1)  # the weight first


def test_each_weight_of_an_own_class_has_a_state_whatever_is_done_to_it_before():
    model = fp8jax.nnx.quantize(Perceptron(nnx.Rngs(0)), DELAYED)
    layer = lambda *sizes: nnx.Linear(*sizes, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))  # noqa: E731
    linears = fp8jax.nnx.quantize(nnx.Dict(up=layer(WIDTH, 48), down=layer(48, WIDTH)), DELAYED)
    linears.up.kernel[...] = model.up[...].T.astype(jnp.bfloat16)
    linears.down.kernel[...] = model.down[...].astype(jnp.bfloat16)
    run = lambda m, x: m.down(nnx.silu(m.up(x.astype(jnp.bfloat16))))  # noqa: E731

    @nnx.jit(static_argnums=1)
    def step(model, run, x):
        grads = nnx.grad(lambda m: jnp.sum(run(m, x).astype(jnp.float32) ** 2), argnums=nnx.DiffState(0, ANY))(model)
        fp8jax.nnx.advance_scaling(model, grads)

    step(model, lambda m, x: m(x), X)
    step(linears, run, X)
    for actual, expected in ((model.fp8jax_up, linears.up.dot_general), (model.fp8jax_down, linears.down.dot_general)):
        for operand in ("x", "w", "dy"):
            assert getattr(expected, operand)[0] > 0
            # All bits of a parameter are read, unlike those of the linear layers.
            np.testing.assert_allclose(getattr(actual, operand)[...], getattr(expected, operand)[...], rtol=2.0**-5)


@pytest.mark.parametrize("make", [nnx.Einsum, NnxEinsum], ids=["nnx.Einsum", "own class"])
def test_einsums_of_recipes_that_observe_nothing_have_no_state(make):
    """Automatic scaling uses no bound for Flax's einsums; the weight's current scale is as good."""
    einsum = make("ebd,edf->ebf", (2, WIDTH, WIDTH), rngs=nnx.Rngs(0))
    model, x = fp8jax.nnx.quantize(einsum, "moss"), jnp.ones((2, 8, WIDTH))
    states = [state.shape for state in jax.tree.leaves(nnx.state(model, fp8jax.nnx.ScalingVariable))]
    assert states == ([] if make is nnx.Einsum else [(2,)])  # a bound of each matrix
    assert 0 < relative(model(x), einsum(x)) < 0.1
