"""All layers of a router stay in 16 bits, and none that something else reads.

Results and gradients equal those with a rule that excludes the router's layers.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fp8jax
from tests.rewrite.experts import normal
from tests.rows import covering

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN, HIDDEN = 40, 32, 48, 24, 2, 16
ROUTER = {
    "a": normal(1, WIDTH, HIDDEN),
    "b": normal(2, HIDDEN, EXPERTS),
    "centroids": normal(3, EXPERTS, HIDDEN),
    "clean": normal(4, WIDTH, EXPERTS),
    "noise": normal(5, WIDTH, EXPERTS),
}
P = ROUTER | {
    "mixer": normal(0, WIDTH, WIDTH),
    "up": normal(6, EXPERTS, WIDTH, INNER),
    "down": normal(7, EXPERTS, INNER, WIDTH),
    "out": normal(8, WIDTH, WIDTH),
}
X = jax.random.normal(jax.random.key(9), (TOKENS, WIDTH))
LAYERS = {"mixer", "up", "down", "out"}
RULES = [fp8jax.Rule("|".join(ROUTER), None), "coat"]


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def mlp(p, x):
    return jax.nn.softmax(jax.nn.gelu(x @ p["a"]) @ p["b"])


def mlp_with_norm(p, x):
    h = jnp.tanh(x @ p["a"])
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return jax.nn.softmax(h @ p["b"] + jnp.arange(EXPERTS) / 10)


def cosine(p, x):
    return jax.nn.softmax(unit(x @ p["a"]) @ unit(p["centroids"]).T / 0.1)


def cosine_divided(p, x):
    """The scores are divided by the norms."""
    h = x @ p["a"]
    norms = jnp.linalg.norm(h, axis=-1, keepdims=True) * jnp.linalg.norm(p["centroids"], axis=-1)
    return jax.nn.softmax(h @ p["centroids"].T / norms)


def noisy(p, x):
    noise = jax.random.normal(jax.random.key(0), (len(x), EXPERTS))
    return jax.nn.softmax(x @ p["clean"] + noise * jax.nn.softplus(x @ p["noise"]))


def sigmoid(p, x):
    return jax.nn.sigmoid(jax.nn.relu(x @ p["a"]) @ p["b"])


def run_experts(p, inputs):
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", inputs, p["up"]))
    return jnp.einsum("ecf,efd->ecd", h, p["down"])


def sort_tokens(p, x, scores, bias=0.0):
    """The experts of largest score and bias, as in DeepSeek-V3."""
    chosen = lax.top_k(scores + bias, CHOSEN)[1]
    weights = jnp.take_along_axis(scores, chosen, -1)
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    y = lax.ragged_dot(jax.nn.silu(lax.ragged_dot(x[order // CHOSEN], p["up"], sizes)), p["down"], sizes)
    return (y[jnp.argsort(order)].reshape(*weights.shape, WIDTH) * weights[..., None]).sum(1)


def choose_tokens(p, x, scores):
    """Each expert chooses tokens."""
    weights, chosen = lax.top_k(scores.T, 8)
    y = run_experts(p, x[chosen]) * weights[..., None]
    return jnp.zeros_like(x).at[chosen.reshape(-1)].add(y.reshape(-1, WIDTH))


def mix_all(p, x, scores):
    y = run_experts(p, jnp.broadcast_to(x, (EXPERTS, *x.shape)))
    return jnp.einsum("etd,te->td", y, scores)


def mix_slots(p, x, scores):
    """Soft MoE, with a slot an expert."""
    y = run_experts(p, jnp.einsum("td,te->ed", x, jax.nn.softmax(scores, 0))[:, None])
    return jax.nn.softmax(scores, 1) @ y[:, 0]


def add_all(p, x, scores):
    weights = scores / scores.sum(-1, keepdims=True)
    return (
        jnp.einsum("tef,efd->ted", jax.nn.silu(jnp.einsum("td,edf->tef", x, p["up"])), p["down"]) * weights[..., None]
    ).sum(1)


def loop_over_experts(p, x, scores):
    def add(total, expert):
        up, down, score = expert
        return total + score[:, None] * (jax.nn.silu(x @ up) @ down), None

    return lax.scan(add, jnp.zeros_like(x), (p["up"], p["down"], scores.T))[0]


def gather_experts(p, x, scores):
    weights, chosen = lax.top_k(scores, CHOSEN)
    h = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x, p["up"][chosen]))
    return jnp.einsum("tkd,tk->td", jnp.einsum("tkf,tkfd->tkd", h, p["down"][chosen]), weights)


ROUTERS = {
    "MLP": mlp,
    "MLP with a norm": mlp_with_norm,
    "cosine": cosine,
    "cosine, divided": cosine_divided,
    "noisy": noisy,
    "sigmoid": sigmoid,
}
READERS = {
    "top_k": sort_tokens,
    "top_k with a bias": lambda p, x, s: sort_tokens(p, x, s, jnp.arange(EXPERTS) / 100),
    "expert choice": choose_tokens,
    "all experts": mix_all,
    "a sum": add_all,
    "slots": mix_slots,
    "a loop": loop_over_experts,
    "gathered experts": gather_experts,
}


def layer(router, read, around=lambda fn: fn):
    """A layer whose tokens go to the router and to the experts; `around` wraps both."""

    def fn(p, x):
        h = jnp.tanh(x @ p["mixer"])
        h = around(lambda p, h: h + read(p, h, router(p, h)))(p, h)
        return x + h @ p["out"]

    return fn


def check_router_stays(fn, p=P, layers=LAYERS, x=X):
    """Router products are listed with a reason, and the program is that of rules that exclude them."""
    fast, excluded = fp8jax.transform(fn, "coat"), fp8jax.transform(fn, RULES)
    rows = fast.explain(p, x)
    quantized = {row.path for row in rows.quantized if row.is_product}
    assert not quantized & ROUTER.keys()
    assert {"mixer", "out"} <= quantized <= layers
    reasons = {row.path: row.reason for row in rows.skipped if row.path in ROUTER}
    assert reasons
    assert all("router" in reason or "computed from" in reason for reason in reasons.values())
    assert not rows.unquantized_note or "centroids" not in rows.unquantized_note
    programs = [str(jax.make_jaxpr(jax.grad(lambda p, fn=f: jnp.sum(jnp.sin(fn(p, x)))))(p)) for f in (fast, excluded)]
    assert programs[0] == programs[1]


@pytest.mark.parametrize(("router", "read"), covering(ROUTERS, READERS))
def test_all_layers_of_a_router_stay_in_16_bits(router, read):
    check_router_stays(layer(ROUTERS[router], READERS[read]))


def chunked(fn):
    """A scan over chunks of tokens."""

    def call(p, h):
        return lax.scan(lambda _, chunk: (None, fn(p, chunk)), None, h.reshape(2, -1, WIDTH))[1].reshape(h.shape)

    return call


def mapped(fn):
    return lambda p, h: jax.vmap(lambda part: fn(p, part))(h.reshape(2, -1, WIDTH)).reshape(h.shape)


@pytest.mark.parametrize(("router", "around"), covering(ROUTERS, [jax.checkpoint, jax.jit, chunked, mapped]))
def test_routers_stay_in_loops_and_calls(router, around):
    check_router_stays(layer(ROUTERS[router], gather_experts if around is mapped else sort_tokens, around))


def test_routers_stay_in_a_scan_over_layers():
    one = layer(mlp, sort_tokens)
    stacked = jax.tree.map(lambda w: jnp.stack([w, 1.5 * w]), P)
    check_router_stays(lambda p, x: lax.scan(lambda x, p: (jax.checkpoint(one)(p, x), None), x, p)[0], stacked)


def test_a_router_over_layers_stays():
    """The scores of a layer depend on those before, as in a recurrent router."""

    def fn(p, x):
        def one(carry, _):
            x, state = carry
            h = jnp.tanh(x @ p["mixer"])
            state = jnp.tanh(h @ p["a"] + state)
            return (x + sort_tokens(p, h, jax.nn.softmax(state @ p["b"])) @ p["out"], state), None

        return lax.scan(one, (x, jnp.zeros((TOKENS, HIDDEN))), length=2)[0][0]

    check_router_stays(fn)


def test_routers_of_any_number_of_tokens_stay():
    (tokens,) = jax.export.symbolic_shape("tokens")
    x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32)
    for router, read in ((mlp, mix_all), (sigmoid, add_all), (cosine, mix_slots)):
        rows = fp8jax.transform(layer(router, read), "coat").explain(P, x)
        assert {row.path for row in rows.quantized if row.is_product} == LAYERS


class NnxLayer(nnx.Module):
    def __init__(self, router, read):
        self.read, self.route = READERS[read], ROUTERS[router]
        for name, w in P.items():
            setattr(self, name, nnx.Param(w))

    def __call__(self, x):
        return layer(self.route, self.read)({name: getattr(self, name)[...] for name in P}, x)


class LinenLayer(nn.Module):
    router: str
    read: str

    @nn.compact
    def __call__(self, x):
        p = {name: self.param(name, lambda _, w=w: w) for name, w in P.items()}
        return layer(ROUTERS[self.router], READERS[self.read])(p, x)


FLAX = [("MLP", "top_k"), ("cosine", "top_k"), ("noisy", "all experts"), ("sigmoid", "top_k with a bias")]
FLAX += [("MLP", "expert choice")]


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize(("router", "read"), FLAX)
def test_routers_of_flax_stay_in_16_bits(kind, router, read):
    if kind == "nnx":
        model = NnxLayer(router, read)
        ours, excluded = (fp8jax.nnx.quantize(model, rules) for rules in ("coat", RULES))
        grads = [nnx.to_pure_dict(nnx.grad(lambda m: jnp.sum(jnp.sin(m(X))))(m)) for m in (ours, excluded)]
    else:
        model = LinenLayer(router, read)
        v = model.init(jax.random.key(0), X)
        models = [fp8jax.linen.quantize(model, rules) for rules in ("coat", RULES)]
        grads = [jax.grad(lambda v, m=m: jnp.sum(jnp.sin(m.apply(v, X))))(v)["params"] for m in models]
    explained = fp8jax.explain(model, "coat", X)
    assert {row.path for row in explained.quantized_layers} == LAYERS
    reasons = {row.path: row.reason for row in explained.skipped_layers}
    assert all("router" in reasons[path] for path in reasons.keys() & {"a", "b", "clean", "noise"})
    assert reasons.keys() & {"a", "noise"}
    for name in P:
        np.testing.assert_array_equal(grads[0][name], grads[1][name])


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_linear_layers_of_a_router_stay(kind):
    """No name says that they are of a router."""

    class NnxModel(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.first, self.second = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, EXPERTS, rngs=rngs)
            self.mixer, self.up, self.down = (
                nnx.Linear(WIDTH, WIDTH, rngs=rngs),
                nnx.Param(P["up"]),
                nnx.Param(P["down"]),
            )

        def __call__(self, x):
            scores = nnx.softmax(self.second(nnx.silu(self.first(x))))
            return x + self.mixer(sort_tokens({"up": self.up[...], "down": self.down[...]}, x, scores))

    class LinenModel(nn.Module):
        @nn.compact
        def __call__(self, x):
            p = {name: self.param(name, lambda _, w=P[name]: w) for name in ("up", "down")}
            scores = nn.softmax(nn.Dense(EXPERTS, name="second")(nn.silu(nn.Dense(HIDDEN, name="first")(x))))
            return x + nn.Dense(WIDTH, name="mixer")(sort_tokens(p, x, scores))

    explained = fp8jax.explain(NnxModel() if kind == "nnx" else LinenModel(), "te_delayed", X)
    assert {row.path for row in explained.quantized_layers} == {"mixer", "up", "down"}
    reasons = {row.path: row.reason for row in explained.skipped_layers}
    assert reasons["first"] == "a layer of a router: only routing scores depend on its result"
    assert reasons["second"].startswith("a router, gate or head")


NAMES = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "c": (WIDTH, WIDTH), "d": (WIDTH, WIDTH), "head": (WIDTH, 48)}
LABELS = jnp.arange(TOKENS) % 48


def two_layers(p, x, first, second):
    return jax.nn.gelu(jax.nn.gelu(x @ p[first]) @ p[second])


def classify(p, x):
    logits = two_layers(p, two_layers(p, x, "a", "b"), "c", "d") @ p["head"]
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(TOKENS), LABELS])


def act_and_criticize(p, x):
    """A policy, whose loss the value weights, and the value."""
    h = jnp.tanh(x @ p["a"])
    policy = jax.nn.log_softmax(jnp.tanh(h @ p["b"]) @ p["head"])[jnp.arange(TOKENS), LABELS]
    value = jnp.mean(jnp.tanh(h @ p["c"]) @ p["d"], -1)
    return jnp.mean(-policy * lax.stop_gradient(1 - value) + (1 - value) ** 2)


def distill(p, x):
    teacher = jax.nn.softmax(two_layers(p, x, "a", "b") @ p["head"])
    student = jax.nn.log_softmax(two_layers(p, x, "c", "d") @ p["head"])
    return -jnp.mean(jnp.sum(teacher * student, -1)) - jnp.mean(jnp.einsum("tv,tv->t", teacher, student))


def distill_labels(p, x):
    labels = jnp.argmax(two_layers(p, x, "a", "b") @ p["head"], -1)
    student = jax.nn.log_softmax(two_layers(p, x, "c", "d") @ p["head"])
    return -jnp.mean(jnp.take_along_axis(student, labels[:, None], -1))


def generate(p, x):
    def step(h, _):
        token = jnp.argmax(two_layers(p, h, "a", "b") @ p["head"], -1)
        return p["head"].T[token] @ p["c"] @ p["d"], token

    return lax.scan(step, x, length=2)[1]


def pool(p, x):
    """Additive attention: the softmax is over tokens."""
    weights = jax.nn.softmax(jnp.tanh(x @ p["a"]) @ p["head"], 0)
    return jnp.sum(jnp.einsum("th,td->hd", weights, x @ p["b"]) @ p["c"] @ p["d"])


def excite(p, x):
    """Squeeze and excitation: sigmoids scale channels."""
    images = (x @ p["a"]).reshape(4, -1, WIDTH)
    gates = jax.nn.sigmoid(jax.nn.relu(images.mean(1) @ p["b"]) @ p["c"])
    return (images * gates[:, None]).sum(1) @ p["d"] @ p["head"]


def gate_heads(p, x):
    gates = jax.nn.sigmoid(jax.nn.silu(x @ p["a"]) @ p["b"])
    heads = (x @ p["c"]).reshape(TOKENS, 4, 8)
    return x + (heads * gates[:, :4, None]).reshape(x.shape) @ p["d"]


def attend_with_sigmoids(p, x):
    """Linear attention."""
    q, k = (jax.nn.sigmoid(jax.nn.gelu(x @ p[name])) for name in ("a", "b"))
    return jnp.sin(q @ (k.T @ (x @ p["c"]))) @ p["d"] @ p["head"]


def attend(p, x):
    """The scores are a matmul of data with data."""
    weights = jax.nn.softmax((x @ p["a"]) @ (x @ p["b"]).T)
    return jnp.sin(weights @ (x @ p["c"])) @ p["d"] @ p["head"]


def attend_with_learned_queries(p, x):
    """A Perceiver: as many queries as tokens, and the softmax is over tokens, the last axis."""
    images = (x @ p["a"]).reshape(4, 10, WIDTH)
    queries = jnp.concatenate([p["head"].T, p["head"].T])[:40]
    scores = jnp.einsum("ld,btd->blt", queries, images @ p["b"]) / 4
    weights = jax.nn.softmax(jnp.where(jnp.arange(10) < 9, scores, -1e9))
    return jnp.sin((weights @ (images @ p["c"])).sum(1)) @ p["d"] @ p["head"]


def read_otherwise(p, x):
    """A layer before the scores that experts read, too."""
    h = jax.nn.gelu(x @ p["a"])
    weights, chosen = lax.top_k(jax.nn.softmax(h @ p["head"]), 2)
    return x + ((h @ p["b"])[chosen] * weights[..., None]).sum(1) @ p["c"] @ p["d"]


@pytest.mark.parametrize(
    "fn",
    [
        *(classify, act_and_criticize, distill, distill_labels, generate, pool, attend, read_otherwise),
        *(excite, gate_heads, attend_with_sigmoids, attend_with_learned_queries),
    ],
)
def test_layers_that_are_of_no_router_are_quantized(fn):
    p = {name: normal(i, *shape) for i, (name, shape) in enumerate(NAMES.items())}
    rows = fp8jax.transform(fn, "coat").explain(p, X)
    assert {row.path for row in rows.quantized if row.is_product} == {"a", "b", "c", "d"}
