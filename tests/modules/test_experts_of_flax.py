"""Experts in NNX, Linen and Equinox modules: as arrays of a module, and as mapped or listed modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import fp8jax
from tests.distance import relative
from tests.rewrite import experts
from tests.rewrite.experts import EXPERTS, INNER, WIDTH, P, X
from tests.rows import slow

OWN = [fp8jax.GroupedProduct("own_dot"), "coat"]
PRODUCTS = {"experts/gate", "experts/up", "experts/down"}


class NnxExperts(nnx.Module):
    """Experts as arrays, in a grouped matmul."""

    def __init__(self, dot):
        self.dot, self.router = dot, nnx.Param(P["router"])
        self.gate, self.up, self.down = (nnx.Param(P[name]) for name in ("gate", "up", "down"))

    def __call__(self, x):
        p = {name: getattr(self, name)[...] for name in ("router", "gate", "up", "down")}
        return experts.sorted_tokens(self.dot)(p, x)


class NnxBlock(nnx.Module):
    def __init__(self, dot=lax.ragged_dot):
        self.experts = NnxExperts(dot)

    def __call__(self, x):
        return x + self.experts(x)


class NnxExpert(nnx.Module):
    def __init__(self, rngs):
        self.gate, self.up = (nnx.Linear(WIDTH, INNER, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(INNER, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class NnxMapped(nnx.Module):
    """One module for all experts, with an expert axis in its parameters."""

    def __init__(self):
        self.router = nnx.Param(P["router"])
        keys = nnx.Rngs(0).split(EXPERTS) if hasattr(nnx.Rngs, "split") else nnx.Rngs(0).fork(split=EXPERTS)
        self.experts = nnx.vmap(NnxExpert, in_axes=0)(keys)

    def __call__(self, x):
        y = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))(self.experts, x)
        return jnp.einsum("etd,te->td", y, experts.share_of_each({"router": self.router[...]}, x))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + LinenExperts(name="experts")(x)


class LinenExperts(nn.Module):
    """Experts as arrays, in batched matmuls."""

    @nn.compact
    def __call__(self, x):
        return experts.one_hot(
            {name: self.param(name, lambda _, w=w: w) for name, w in P.items() if name != "mixer"}, x
        )


class LinenExpert(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(INNER, name=name)(x) for name in ("gate", "up"))
        return nn.Dense(WIDTH, name="down")(nn.silu(gate) * up)


class LinenMapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        mapped = nn.vmap(
            LinenExpert, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=EXPERTS
        )
        router = self.param("router", lambda _: P["router"])
        return jnp.einsum("etd,te->td", mapped(name="experts")(x), experts.share_of_each({"router": router}, x))


@pytest.mark.parametrize(
    ("model", "rules"),
    [slow(NnxBlock(), "coat"), slow(NnxBlock(experts.own_dot), OWN), (NnxMapped(), "coat")],
    ids=["arrays", "a named function", "mapped"],
)
def test_experts_of_nnx(model, rules):
    quantized = fp8jax.nnx.quantize(model, rules)
    explained = fp8jax.explain(quantized, X)
    assert {layer.path for layer in explained.quantized_layers} == PRODUCTS
    assert not explained.unquantized_note
    grads = [nnx.jit(nnx.grad(lambda model: jnp.sum(jnp.sin(model(X)))))(each) for each in (quantized, model)]
    assert 0 < relative(quantized(X), model(X)) < 0.1
    assert 0 < relative(*(nnx.to_pure_dict(each) for each in grads)) < 0.25


def test_a_name_that_no_grouped_product_of_an_nnx_model_has_is_refused():
    with pytest.raises(ValueError, match="no function named 'gmm' "):
        fp8jax.nnx.quantize(NnxBlock(experts.own_dot), [fp8jax.GroupedProduct("gmm"), "coat"])(X)


@pytest.mark.parametrize("model", [slow(LinenBlock()), LinenMapped()], ids=["arrays", "mapped"])
def test_experts_of_linen(model):
    variables = model.init(jax.random.key(0), X)
    quantized = fp8jax.linen.quantize(model, "coat")
    explained = fp8jax.explain(model, "coat", X)
    assert {layer.path for layer in explained.quantized_layers} == PRODUCTS
    assert not explained.unquantized_note
    grads = [
        jax.jit(jax.grad(lambda v, each=each: jnp.sum(jnp.sin(each.apply(v, X)))))(variables)
        for each in (quantized, model)
    ]
    assert 0 < relative(quantized.apply(variables, X), model.apply(variables, X)) < 0.1
    assert 0 < relative(*grads) < 0.25


def test_experts_of_equinox():
    eqx = pytest.importorskip("equinox")

    class Expert(eqx.Module):
        gate: eqx.nn.Linear
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key):
            gate, up, down = jax.random.split(key, 3)
            self.gate, self.up = (eqx.nn.Linear(WIDTH, INNER, key=each) for each in (gate, up))
            self.down = eqx.nn.Linear(INNER, WIDTH, key=down)

        def __call__(self, x):
            return self.down(jax.nn.silu(self.gate(x)) * self.up(x))

    def fn(model, x):
        all_experts, router = model
        one = lambda expert, x: jax.vmap(expert)(x)  # noqa: E731
        y = eqx.filter_vmap(one, in_axes=(eqx.if_array(0), None))(all_experts, x)
        return jnp.einsum("etd,te->td", y, experts.share_of_each({"router": router}, x))

    model = eqx.filter_vmap(Expert)(jax.random.split(jax.random.key(0), EXPERTS)), P["router"]
    fast = fp8jax.filter_transform(fn, "coat")
    assert {e.path for e in fast.explain(model, X).quantized if e.is_product} == {"0/gate", "0/up", "0/down"}
    grads = [
        eqx.filter_jit(eqx.filter_grad(lambda model, each=each: jnp.sum(jnp.sin(each(model, X)))))(model)
        for each in (fast, fn)
    ]
    assert 0 < relative(fast(model, X), fn(model, X)) < 0.1
    assert 0 < relative(*grads) < 0.25
