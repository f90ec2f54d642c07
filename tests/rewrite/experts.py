"""Experts in plain functions of parameters and tokens, as users write them."""

import jax
import jax.numpy as jnp
from jax import lax

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 32, 32, 48, 4, 2


def normal(i, *shape):
    return jax.random.normal(jax.random.key(i), shape) / shape[-2] ** 0.5


P = {
    "mixer": normal(0, WIDTH, WIDTH),
    "router": normal(1, WIDTH, EXPERTS),
    "gate": normal(2, EXPERTS, WIDTH, INNER),
    "up": normal(3, EXPERTS, WIDTH, INNER),
    "down": normal(4, EXPERTS, INNER, WIDTH),
}
X = jax.random.normal(jax.random.key(5), (TOKENS, WIDTH))
TRANSPOSED = P | {name: jnp.swapaxes(P[name], 1, 2) for name in ("gate", "up", "down")}
JOINED = {name: P[name] for name in ("mixer", "router", "down")} | {"w13": jnp.concatenate([P["gate"], P["up"]], -1)}
OUTPUTS_FIRST = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([1], [2]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


@jax.custom_vjp
def own_dot(x, w, group_sizes):
    """A grouped matmul with a custom derivative, as in haliax, tokamax and megablox."""
    return lax.ragged_dot(x, w, group_sizes)


def own_dot_bwd(residuals, dy):
    x, w, group_sizes = residuals
    _, vjp = jax.vjp(lambda x, w: lax.ragged_dot(x, w, group_sizes), x, w)
    return (*vjp(dy), None)


own_dot.defvjp(lambda *operands: (own_dot(*operands), operands), own_dot_bwd)


@jax.jit
def jitted_dot(x, w, group_sizes):
    """One matrix after the other, so that the program has no ragged matmul."""
    ends = jnp.cumsum(group_sizes)
    group = jnp.sum(jnp.arange(x.shape[0])[:, None] >= ends, 1)
    y = sum(jnp.where((group == i)[:, None], x @ w[i].T, 0) for i in range(w.shape[0]))
    return y.astype(x.dtype)


def swapped_dot(x, w, group_sizes):
    return lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), group_sizes)


def general_dot(x, w, group_sizes):
    return lax.ragged_dot_general(x, w, group_sizes, OUTPUTS_FIRST)


def float32_dot(x, w, group_sizes):
    return lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32).astype(x.dtype)


def route(p, x):
    weights, experts = lax.top_k(jax.nn.softmax(x @ p["router"]), CHOSEN)
    return weights / weights.sum(-1, keepdims=True), experts


def block(experts):
    """A block with a matmul before its experts, which is always quantized."""
    return lambda p, x: experts(p, jnp.tanh(x @ p["mixer"]))


def sorted_tokens(dot):
    def experts(p, x):
        weights, chosen = route(p, x)
        order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
        inputs = x[order // CHOSEN]
        if "w13" in p:
            gate, up = jnp.split(dot(inputs, p["w13"], sizes), 2, -1)
        else:
            gate, up = dot(inputs, p["gate"], sizes), dot(inputs, p["up"], sizes)
        y = dot(jax.nn.silu(gate) * up, p["down"], sizes)
        return (y[jnp.argsort(order)].reshape(TOKENS, CHOSEN, WIDTH) * weights[..., None]).sum(1)

    return experts


def share_of_each(p, x):
    weights, chosen = route(p, x)
    return jnp.sum(jax.nn.one_hot(chosen, EXPERTS) * weights[..., None], 1)


def dispatch(p, x, capacity):
    """Returns the expert and position of each choice of a token, and the weights of the choices."""
    weights, chosen = route(p, x)
    mask = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
    place = jnp.cumsum(mask.reshape(-1, EXPERTS), 0).reshape(mask.shape) * mask - 1
    return jax.nn.one_hot(jnp.where(mask > 0, place, -1), capacity), weights


def batched(p, inputs):
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", inputs, p["gate"])) * jnp.einsum("ecd,edf->ecf", inputs, p["up"])
    return jnp.einsum("ecf,efd->ecd", h, p["down"])


def one_hot(p, x):
    """Dispatches tokens to positions of experts, with a capacity."""
    dispatched, weights = dispatch(p, x, 3 * TOKENS // 4)
    return jnp.einsum("ecd,tkec,tk->td", batched(p, jnp.einsum("td,tkec->ecd", x, dispatched)), dispatched, weights)


def dense(p, x):
    h = jax.nn.silu(jnp.einsum("td,edf->tef", x, p["gate"])) * jnp.einsum("td,edf->tef", x, p["up"])
    return jnp.einsum("ted,te->td", jnp.einsum("tef,efd->ted", h, p["down"]), share_of_each(p, x))


def mapped(p, x):
    one = lambda gate, up, down: (jax.nn.silu(x @ gate) * (x @ up)) @ down  # noqa: E731
    return jnp.einsum("etd,te->td", jax.vmap(one)(p["gate"], p["up"], p["down"]), share_of_each(p, x))


def scanned(p, x):
    def one(total, expert):
        (gate, up, down), share = expert
        return total + share[:, None] * ((jax.nn.silu(x @ gate) * (x @ up)) @ down), None

    return lax.scan(one, jnp.zeros_like(x), ((p["gate"], p["up"], p["down"]), share_of_each(p, x).T))[0]


def looped(p, x):
    shares = share_of_each(p, x)
    one = lambda i: (jax.nn.silu(x @ p["gate"][i]) * (x @ p["up"][i])) @ p["down"][i]  # noqa: E731
    return sum(shares[:, i : i + 1] * one(i) for i in range(EXPERTS))


def gathered(p, x):
    weights, chosen = route(p, x)
    h = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x, p["gate"][chosen])) * jnp.einsum("td,tkdf->tkf", x, p["up"][chosen])
    return jnp.einsum("tkd,tk->td", jnp.einsum("tkf,tkfd->tkd", h, p["down"][chosen]), weights)


def indexed(p, x):
    """Selects the expert of each token by an index that is data."""
    weights, chosen = route(p, x)
    one = lambda x, i: (jax.nn.silu(x @ p["gate"][i]) * (x @ p["up"][i])) @ p["down"][i]  # noqa: E731
    token = lambda x, w, experts: sum(w[k] * one(x, experts[k]) for k in range(CHOSEN))  # noqa: E731
    return jax.vmap(token)(x, weights, chosen)


def switched(p, x):
    """All tokens go to the expert that most of them choose."""
    _, chosen = route(p, x)
    largest_expert = jnp.argmax(jnp.bincount(chosen.reshape(-1), length=EXPERTS))
    branch = lambda i: lambda x: (jax.nn.silu(x @ p["gate"][i]) * (x @ p["up"][i])) @ p["down"][i]  # noqa: E731
    return share_of_each(p, x)[:, largest_expert][:, None] * lax.switch(
        largest_expert, [branch(i) for i in range(EXPERTS)], x
    )


def switch_tokens(p, x):
    """A branch for each expert, which the index of the token selects."""
    weights, chosen = route(p, x)
    branches = [
        lambda x, i=i: (jax.nn.silu(x @ p["gate"][i]) * (x @ p["up"][i])) @ p["down"][i] for i in range(EXPERTS)
    ]
    token = lambda x, w, experts: sum(w[k] * lax.switch(experts[k], branches, x) for k in range(CHOSEN))  # noqa: E731
    return jax.vmap(token)(x, weights, chosen)
