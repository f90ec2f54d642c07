"""Output heads and routers stay in 16 bits: found by names, shapes, and the readers of results."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from tests.modules.architectures import LENGTH, VOCAB, WIDTH, Experts, Lm1b, MiniGPT, NnxCnn, NnxExperts, ResNet
from tests.programs import dots, residuals
from tests.rows import few

TE = fp8jax.recipes.te_current()
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (2, 6, WIDTH))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)))
IMAGES = jax.random.normal(KEY, (2, 8, 8, 1))
WIDTHS = {"hidden": (8, 8), "a": (8, 4), "b": (8, 4), "same": (8, 8), "v": (8, 6), "out": (6, 4)}


def classify_outputs(function) -> dict[str, str]:
    """Returns the reasons by layer for `function(layer, x, bias)`, a model whose layers are `layer(name, x)`."""

    def model(params, x, tokens):
        layer = lambda name, x: x @ params[name]  # noqa: E731
        return function(layer, jnp.tanh(layer("hidden", x + tokens[:, None])), params["bias"])

    params = {name: jnp.ones(shape) for name, shape in WIDTHS.items()} | {"bias": jnp.ones(4)}
    plan = fp8jax.transform(model, TE).explain(params, jnp.ones((3, 8)), jnp.arange(3))
    assert "hidden" in {entry.path for entry in plan.quantized}
    return {e.path: e.reason.split(":")[0].split(",")[0] for e in plan.skipped if e.is_product and e.choice is not None}


def looped(layer, x, bias):
    body = lambda y, _: (y + layer("same", y), layer("a", y))  # noqa: E731
    return jax.lax.scan(body, x, length=2)


def chosen_in_a_loop(layer, x, bias):
    def body(y, _):
        best, _ = jax.lax.top_k(layer("a", y), 2)
        return y * best.sum(-1, keepdims=True), None

    return jax.lax.scan(jax.checkpoint(body), x, length=2)[0]


def swapped_in_a_loop(layer, x, bias):
    """The returned value is a layer's result in one iteration, and something else in the next."""
    pair = layer("a", x), jnp.sin(x[:, :4])
    return jax.lax.scan(lambda pair, _: (pair[::-1], None), pair, length=2)[0][1]


HEAD, ROUTER = "an output head", "a router"
READ = {
    "returned": (lambda f, x, b: f("a", x), {"a": HEAD}),
    "bias, cast, layout": (lambda f, x, b: (f("a", x) + b).astype(jnp.bfloat16).T.reshape(-1), {"a": HEAD}),
    "soft cap, scaled": (lambda f, x, b: 30 * jnp.tanh(f("a", x) / 30) * b, {"a": HEAD}),
    "masked": (lambda f, x, b: jnp.where(x[:, :1] > 0, f("a", x), -1e9)[-1], {"a": HEAD}),
    "one token": (lambda f, x, b: f("a", x)[(x.sum(-1) > 0).astype(int)[:1]], {"a": HEAD}),
    "two": (lambda f, x, b: {"value": f("a", x)[:, 0], "policy": f("b", x)}, {"a": HEAD, "b": HEAD}),
    "side by side": (lambda f, x, b: jnp.concatenate([f("a", x), f("b", x)[:, 1:]], -1), {"a": HEAD, "b": HEAD}),
    "a probability": (lambda f, x, b: jax.nn.sigmoid(f("a", x)), {"a": HEAD}),
    "jitted": (lambda f, x, b: jax.jit(lambda x: f("a", x))(x), {"a": HEAD}),
    "one of two": (
        lambda f, x, b: jax.lax.cond(x[0, 0] > 0, lambda: f("a", x), lambda: f("b", x)),
        {"a": HEAD, "b": HEAD},
    ),
    "from a loop": (looped, {"a": HEAD}),
    "softmax": (lambda f, x, b: jax.nn.softmax(f("a", x)) @ jnp.ones((4, 4)), {"a": ROUTER}),
    "log_softmax": (lambda f, x, b: jax.nn.log_softmax(f("a", x) + b)[0].sum(), {"a": ROUTER}),
    "logsumexp": (lambda f, x, b: jax.nn.logsumexp(f("a", x), axis=-1), {"a": ROUTER}),
    "softmax by hand": (lambda f, x, b: (e := jnp.exp(f("a", x) + b)) / e.sum(-1, keepdims=True) * b, {"a": ROUTER}),
    "a kernel's features": (lambda f, x, b: (e := jnp.exp(f("a", x))) / e.sum(0), {}),
    "top_k of sigmoid": (lambda f, x, b: jax.lax.top_k(jax.nn.sigmoid(f("a", x)) + b, 2)[1], {"a": ROUTER}),
    "argmax": (lambda f, x, b: jnp.argmax(f("a", x), -1), {"a": ROUTER}),
    "argsort": (lambda f, x, b: jnp.argsort(f("a", x), -1), {"a": ROUTER}),
    "a choice in a checkpoint in a loop": (chosen_in_a_loop, {"a": ROUTER}),
    "an activation": (lambda f, x, b: jax.nn.silu(f("a", x)), {}),
    "relu": (lambda f, x, b: jax.nn.relu(f("a", x)), {}),
    "gelu": (lambda f, x, b: jax.nn.gelu(f("a", x)), {}),
    "a gate": (lambda f, x, b: jax.nn.sigmoid(f("a", x)) * f("b", x), {}),
    "a residual sum": (lambda f, x, b: x + f("same", x), {}),
    "the shape of the input": (lambda f, x, b: f("same", x) * 2, {}),
    "returned, and read on": (lambda f, x, b: ((y := f("v", x)), f("out", jnp.sin(y))), {"out": HEAD}),
    "beside another": (lambda f, x, b: jax.lax.optimization_barrier((f("a", x), x))[0], {"a": HEAD}),
    "a logarithm": (lambda f, x, b: (s := f("a", x)) - jnp.log(jnp.exp(s).sum(-1, keepdims=True)), {"a": ROUTER}),
    "an exponential of a difference": (lambda f, x, b: jnp.exp(f("a", x) - jnp.sin(x[:, :4])), {}),
    "read on, and returned": (lambda f, x, b: (f("v", x), jnp.sin(f("out", jnp.sin(f("v", x))))), {}),
    "a sum of exponentials": (lambda f, x, b: (s := f("a", x)) * jnp.exp(s).sum(-1, keepdims=True), {}),
    "attention": (lambda f, x, b: jax.nn.softmax(f("a", x) @ f("b", x).T) @ x, {}),
    "the largest": (lambda f, x, b: jnp.max(f("a", x), axis=0), {}),
    "a choice among largest": (lambda f, x, b: jnp.argmax(jnp.max(f("a", x), -1)), {}),
    "swapped in a loop": (swapped_in_a_loop, {"a": HEAD}),  # as in the first iteration
    "normalized": (lambda f, x, b: (y := f("a", x)) / jnp.linalg.norm(y), {}),
    "exp": (lambda f, x, b: jnp.exp(f("a", x)), {}),
}


@pytest.mark.parametrize("name", READ)
def test_what_reads_a_result_says_what_it_is(name):
    function, expected = READ[name]
    assert classify_outputs(function) == expected


def test_a_function_of_outputs_alone_is_a_part_of_a_model_but_choices_stay_choices():
    def model(w, x):
        return x @ w["a"], jax.lax.top_k(x @ w["b"], 1)

    plan = fp8jax.transform(model, TE).explain({name: jnp.ones((8, 4)) for name in "ab"}, jnp.ones((3, 8)))
    assert ([e.path for e in plan.quantized], [e.path for e in plan.skipped]) == (["a"], ["b"])


def test_output_heads_follow_the_recipes_own():
    """Returned results and layers named as heads; neither routers nor embeddings."""
    recipe = dataclasses.replace(fp8jax.recipes.te_current(), head=fp8jax.recipes.HEAD)

    def model(w, x):
        x = jnp.sin(x @ w["embed"]["a"]) @ w["b"]
        _, choice = jax.lax.top_k(x @ w["router"], 1)
        _, other = jax.lax.top_k(x @ w["choose"], 1)
        return x @ w["out"], jax.nn.softmax(x @ w["lm_head"]), choice, other

    weights = {name: jnp.ones((8, 8)) for name in ("b", "router", "choose")}
    weights |= {"embed": {"a": jnp.ones((8, 8))}, "out": jnp.ones((8, 5)), "lm_head": jnp.ones((8, 6))}
    plan = fp8jax.transform(model, recipe).explain(weights, jnp.ones((3, 8)))
    chosen = {e.path: (e.reason, e.choice.linear.dy_wgrad) for e in plan.quantized}
    own = ("the recipe's head", "e5m2")
    assert chosen == {"b": ("the recipe", "same"), "out": own, "lm_head": own}
    assert {e.path for e in plan.skipped} == {"embed/a", "router", "choose"}
    rules = [fp8jax.Rule("out", None), recipe]
    assert "out" in {e.path for e in fp8jax.transform(model, rules).explain(weights, jnp.ones((3, 8))).skipped}


def eight(fn, *args) -> int:
    return sum("8" in a and "8" in b for a, b in dots(fn, *args))


LINEN = {
    "lm1b's logitdense": (Lm1b(), TOKENS, 6, "logitdense", "an embedding or head"),
    "logits of another name": (Lm1b("final"), TOKENS, 6, "final", "an output head: the function returns its result"),
    "a router": (Experts(), X, 8, "router", "a router"),
    "a router of another name": (Experts("choose"), X, 8, "choose", "a router, gate or head: softmax reads its result"),
    "a classifier without a name": (ResNet(), IMAGES, 1, "Dense_0", "an output head: the function returns its result"),
}


@pytest.mark.parametrize(
    "name", few(LINEN, "lm1b's logitdense", "a router of another name", "a classifier without a name")
)
def test_heads_and_routers_of_linen_stay_in_16_bits(name):
    model, x, products, path, why = LINEN[name]
    variables = jax.eval_shape(model.init, KEY, x)
    quantized = fp8jax.linen.quantize(model, TE)
    assert eight(quantized.apply, variables, x) == products
    report = fp8jax.explain(model, TE, x)
    assert {layer.path: layer.reason for layer in report.skipped_layers}[path] == why
    assert len(report.quantized_layers) == products
    # A rule selects all layers.
    assert eight(fp8jax.linen.quantize(model, fp8jax.Rule(".*", TE)).apply, variables, x) == products + 1
    assert path in {layer.path for layer in fp8jax.explain(model, fp8jax.Rule(".*", TE), x).quantized_layers}


def test_a_head_without_a_name_has_no_state_under_delayed_scaling():
    model = fp8jax.linen.quantize(ResNet(), "te_delayed")
    variables = jax.eval_shape(model.init, KEY, IMAGES)
    assert set(variables["fp8jax_scaling"]) == {"neck"}
    assert eight(model.apply, variables, IMAGES) == 1


class Tied(nn.Module):
    """A tied head called through `apply` without a name, and a layer."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH)
        x = nn.gelu(nn.Dense(WIDTH, name="layer")(embed(tokens)))
        return jnp.tanh(nn.Dense(VOCAB, use_bias=False).apply({"params": {"kernel": embed.embedding.T}}, x))


def test_a_tied_head_that_is_called_through_apply_stays_in_16_bits():
    variables = jax.eval_shape(Tied().init, KEY, TOKENS)
    assert eight(fp8jax.linen.quantize(Tied(), TE).apply, variables, TOKENS) == 1
    report = fp8jax.explain(Tied(), TE, TOKENS)
    reasons = {(layer.path, layer.kind): layer.reason for layer in report.skipped_layers}
    assert set(reasons) == {("Embed_0", "Embed")}
    assert [layer.path for layer in report.quantized_layers] == ["layer"]


def line(inner, outer):
    return nnx.Linear(inner, outer, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("model", "x", "products", "path", "why"),
    [
        (lambda: NnxExperts(nnx.Rngs(0), experts=5), X, 1, "choose", "a router, gate or head: "),
        (lambda: NnxCnn(nnx.Rngs(0)), IMAGES, 1, "linear2", "an output head: the function returns its result"),
    ],
    ids=["a router", "a classifier"],
)
def test_heads_and_routers_of_nnx_stay_in_16_bits(model, x, products, path, why):
    rules = [fp8jax.Rule("w.*", None), TE] if path == "choose" else TE
    assert eight(fp8jax.nnx.quantize(model(), TE), x) >= products
    reasons = {layer.path: layer.reason for layer in fp8jax.explain(model(), TE, x).skipped_layers}
    assert reasons[path].startswith(why), rules


def test_what_only_a_call_gives_away_is_left_alone():
    class Scorer(nnx.Module):
        """A router whose shape and name do not identify it."""

        def __init__(self) -> None:
            self.body, self.pick = line(8, 8), line(8, 8)

        def __call__(self, x):
            return self.body(x) * jax.nn.softmax(self.pick(x))

    x = jnp.ones((3, 8))
    report = fp8jax.explain(Scorer(), TE, x)
    assert {layer.path for layer in report.quantized_layers} == {"body"}
    assert {layer.path: layer.reason for layer in report.skipped_layers} == {
        "pick": "a router, gate or head: softmax reads its result"
    }
    assert eight(fp8jax.nnx.quantize(Scorer(), TE), x) == 1
    assert eight(fp8jax.nnx.quantize(Scorer(), fp8jax.Rule(".*", TE)), x) == 2


def test_what_a_model_notes_is_no_output():
    class Notes(nnx.Module):
        def __init__(self) -> None:
            self.body, self.wide, self.seen = line(8, 8), line(8, 6), nnx.Variable(jnp.zeros((3, 6)))

        def __call__(self, x):
            self.seen[...] = self.wide(x)
            return self.body(x) * self.seen[...].sum()

    assert {layer.path for layer in fp8jax.explain(Notes(), TE, jnp.ones((3, 8))).quantized_layers} == {"body", "wide"}


@functools.cache
def mini_report():
    return fp8jax.explain(MiniGPT(rngs=nnx.Rngs(0)), TE, TOKENS)


def test_a_whole_model_of_nnx_needs_no_note():
    assert mini_report().notes == ()
    assert [layer.path for layer in mini_report().skipped_layers if layer.kind == "Linear"] == ["output_layer"]


NARROW = "fewer than 16 outputs"


def critic(p, x):
    """The loss of a policy and a value; the function itself reads both heads."""
    h = jnp.tanh(x @ p["trunk"])
    return jnp.mean(-jax.nn.log_softmax(h @ p["policy"])[:, 0]) + jnp.mean((h @ p["value"] + 0.5) ** 2)


def matrices(**widths):
    return {name: jax.random.normal(jax.random.key(i), (32, n)) for i, (name, n) in enumerate(widths.items())}


def stacked(p, x):
    body = lambda x, w: (jnp.tanh(x @ w["trunk"]), jnp.sum((x @ w["value"]) ** 2))  # noqa: E731
    return jnp.sum(jax.lax.scan(body, x, p)[1])


def mapped(p, x):
    return jnp.sum(jax.vmap(lambda w: (jnp.tanh(x @ w["trunk"]) @ w["value"]) ** 2)(p))


def transposed(p, x):
    return jnp.sum((p["value"].T @ jnp.tanh(x @ p["trunk"]).T) ** 2)


def twice(w):
    return jax.tree.map(lambda a: jnp.stack([a, a]), w)


PAIR = matrices(trunk=32, value=3)
CRITICS = {
    "a critic": (critic, matrices(trunk=32, policy=4, value=1)),
    "scanned weights": (stacked, twice(PAIR)),
    "mapped weights": (mapped, twice(PAIR)),
    "the weight on the left": (transposed, PAIR),
    "15 outputs": (critic, matrices(trunk=32, policy=4, value=15)),
}


@pytest.mark.parametrize("name", CRITICS)
def test_products_with_few_outputs_stay_in_16_bits(name):
    function, p = CRITICS[name]
    x = jnp.ones((3, 32))
    plan = fp8jax.transform(function, TE).explain(p, x)
    assert {e.path for e in plan.quantized} == {"trunk"}
    assert {e.path: e.reason for e in plan.skipped}["value"] == NARROW
    # A rule of the user's forces it.
    for rules in ([fp8jax.Rule("value", TE), TE], fp8jax.Rule(".*", TE)):
        assert "value" in {e.path for e in fp8jax.transform(function, rules).explain(p, x).quantized}


def test_16_outputs_are_enough_and_a_model_of_narrow_products_alone_is_quantized():
    x = jnp.ones((3, 32))
    plan = fp8jax.transform(critic, TE).explain(matrices(trunk=32, policy=4, value=16), x)
    assert {e.path for e in plan.quantized} == {"trunk", "value"}
    plan = fp8jax.transform(lambda p, x: jnp.sum((x @ p["value"]) ** 2), TE).explain(PAIR, x)
    assert {e.path for e in plan.quantized} == {"value"}


class NnxLoss(nnx.Module):
    """A head, tied or not, and a method that returns its loss."""

    def __init__(self, tied: bool) -> None:
        self.embed, self.up, self.tied = nnx.Embed(VOCAB, WIDTH, rngs=nnx.Rngs(0)), line(WIDTH, WIDTH), tied
        self.out = None if tied else nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        x = nnx.silu(self.up(self.embed(tokens)))
        return self.embed.attend(x) if self.tied else self.out(x)

    def loss(self, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(self(tokens)[:, :-1], tokens[:, 1:]).mean()


class LinenLoss(nn.Module):
    """The same in Linen."""

    tied: bool

    def setup(self) -> None:
        self.embed, self.up = nn.Embed(VOCAB, WIDTH), nn.Dense(WIDTH)
        self.out = nn.Dense(VOCAB, use_bias=False)

    __call__, loss = NnxLoss.__call__, NnxLoss.loss


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_loss_in_a_method_runs_with_the_head(kind, tied):
    """No array of logits is saved."""
    recipe = fp8jax.recipes.coat_fast(head=fp8jax.recipes.HEAD)
    if kind == "nnx":
        model = NnxLoss(tied)
        quantized = fp8jax.nnx.quantize(model, recipe, methods=("__call__", "loss"))
        graph, state = nnx.split(quantized)
        run = lambda state: nnx.merge(graph, state).loss(TOKENS)  # noqa: E731
        logits, expected = model(TOKENS), model.loss(TOKENS)
    else:
        model = LinenLoss(tied)
        state = model.init(KEY, TOKENS)
        run = lambda state: fp8jax.linen.quantize(model, recipe).apply(state, TOKENS, method="loss")  # noqa: E731
        logits, expected = model.apply(state, TOKENS), model.apply(state, TOKENS, method="loss")
    log_probs = jax.nn.log_softmax(np.asarray(logits, np.float64)[:, :-1])
    np.testing.assert_allclose(expected, -np.mean(np.take_along_axis(log_probs, TOKENS[:, 1:, None], -1)), rtol=1e-4)
    np.testing.assert_allclose(run(state), expected, rtol=3e-2)
    assert eight(jax.grad(run), state) == len(dots(jax.grad(run), state)) == 6
    assert not any(shape[:1] + shape[-1:] == (len(TOKENS), VOCAB) for _, shape in residuals(run, state))


@pytest.mark.parametrize("tied", [False, True])
def test_explain_says_that_a_head_stays_in_16_bits_and_how_to_choose_8(tied):
    note = f"output heads in 16 bits: {'embed' if tied else 'out'}. A recipe with head=fp8jax.recipes.HEAD"
    texts = {recipe: str(fp8jax.explain(NnxLoss(tied), recipe, TOKENS)) for recipe in ("coat_fast", "coat_optimizer")}
    assert {recipe: note in " ".join(text.split()) for recipe, text in texts.items()} == {
        "coat_fast": True,
        "coat_optimizer": False,
    }
    chosen = fp8jax.explain(NnxLoss(tied), fp8jax.recipes.coat_fast(head=fp8jax.recipes.HEAD), TOKENS)
    assert "output head:" not in str(chosen)
    assert [e.choice.reason for e in chosen.quantized if e.path in ("embed", "out")] == ["the recipe's head"]


def test_narrow_products_do_not_follow_the_recipes_head():
    recipe = dataclasses.replace(TE, head=fp8jax.recipes.HEAD)
    plan = fp8jax.transform(critic, recipe).explain(matrices(trunk=32, policy=4, value=1), jnp.ones((3, 32)))
    assert "value" in {e.path for e in plan.skipped}


class NnxCritic(nnx.Module):
    def __init__(self) -> None:
        self.trunk, self.v = line(32, 32), line(32, 3)

    def __call__(self, x):
        return jnp.mean((self.v(jnp.tanh(self.trunk(x))) - 1) ** 2)


class LinenCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(nn.Dense(32, name="trunk")(x))
        return jnp.mean((nn.Dense(3, name="v")(h) - 1) ** 2)


@pytest.mark.parametrize("model", [NnxCritic, LinenCritic])
def test_narrow_layers_of_flax_models_stay_in_16_bits(model):
    x = jnp.ones((3, 32))
    report = fp8jax.explain(model(), TE, x)
    assert {layer.path for layer in report.quantized_layers} == {"trunk"}
    assert {layer.path: layer.reason for layer in report.skipped_layers} == {"v": NARROW}
    forced = fp8jax.explain(model(), [fp8jax.Rule("v", TE), TE], x)
    assert {layer.path for layer in forced.quantized_layers} == {"trunk", "v"}
    if model is NnxCritic:
        assert eight(fp8jax.nnx.quantize(model(), TE), x) == 1
    else:
        assert eight(fp8jax.linen.quantize(model(), TE).apply, jax.eval_shape(model().init, KEY, x), x) == 1


class NnxHead(nnx.Module):
    def __init__(self, name):
        self.up = line(WIDTH, 2 * WIDTH)
        setattr(self, name, line(2 * WIDTH, VOCAB))
        self.name = name

    def __call__(self, x):
        return getattr(self, self.name)(nnx.silu(self.up(x)))


class LinenHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(VOCAB, name="head")(nn.silu(nn.Dense(2 * WIDTH)(x)))


@pytest.mark.parametrize("name", few(["te_delayed", "int8_fallback"], "te_delayed"))
def test_a_head_has_a_state_of_its_own_recipe(name):
    part = fp8jax.recipes.get(name).linear
    rules = fp8jax.recipes.coat_fast(head=part)
    model = fp8jax.nnx.quantize(NnxHead("head"), rules)
    optimizer = fp8jax.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state(model.head.dot_general))

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = fp8jax.nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    assert step(model, optimizer, X) > step(model, optimizer, X)
    after = nnx.state(model.head.dot_general)
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), before, after)))
    variables = jax.eval_shape(fp8jax.linen.quantize(LinenHead(), rules).init, KEY, X)
    assert set(variables["fp8jax_scaling"]) == {"head"}
    # A head that is recognized only by its result has a state if a rule selects it. Another recipe's state is not read.
    others = dataclasses.replace(part, amax_history_length=7, threshold_update_factor=1.1)
    for base in (fp8jax.recipes.coat_fast(head=part), fp8jax.Recipe("base", linear=others, head=part)):
        with pytest.raises(ValueError, match=r"has no state for .* scaling of last/kernel: the recipe was chosen by"):
            fp8jax.nnx.quantize(NnxHead("last"), base)(X)
        assert fp8jax.nnx.quantize(NnxHead("last"), [fp8jax.Rule("last", part), base])(X).shape == (2, 6, VOCAB)
