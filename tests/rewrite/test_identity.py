"""An empty plan changes nothing: bits, names, lines, shardings and effects of programs."""

import functools
import re
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.modules import architectures as known
from tests.programs import residuals
from tests.rewrite.identity import again, text

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
X = jax.random.normal(jax.random.key(0), (4, 8))
TOKENS = jnp.arange(2 * known.LENGTH).reshape(2, known.LENGTH) % known.VOCAB


def of_nnx(model, *inputs):
    graph, state = nnx.split(model)
    return lambda state, *inputs: nnx.merge(graph, state)(*inputs), state, *inputs


def of_linen(model, *inputs):
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), *inputs), *inputs


def abstract(model, *inputs):
    return of_nnx(nnx.eval_shape(lambda: model(rngs=nnx.Rngs(0))), *inputs)


HIDDEN, IMAGES = jnp.ones((2, 4, known.WIDTH)), jnp.ones((2, 8, 8, 1))
MODELS = {
    "MiniGPT": lambda: abstract(known.MiniGPT, TOKENS),
    "Nanodo": lambda: of_linen(known.Nanodo(), TOKENS),
    "Nanodo, remat": lambda: of_linen(known.Nanodo(remat=True), TOKENS),
    "Lm1b": lambda: of_linen(known.Lm1b(), TOKENS),
    "Experts": lambda: of_linen(known.Experts(), HIDDEN),
    "ResNet": lambda: of_linen(known.ResNet(), jnp.ones((2, 8, 8, 3))),
    "Gpt2": lambda: of_linen(known.Gpt2(), TOKENS),
    "Gemma": lambda: of_linen(known.Gemma(), HIDDEN),
    "NnxExperts": lambda: abstract(known.NnxExperts, HIDDEN),
    "NnxCnn": lambda: abstract(known.NnxCnn, IMAGES),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_the_same_programs(name):
    """Equations, parameters, scopes and lines are equal, and thus bits and residuals."""
    fn, *args = MODELS[name]()
    assert text(again(fn), *args) == text(fn, *args)


def loops(x):
    """One of each kind of sub-jaxpr."""
    x, rows = lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c)), x, jnp.stack([jnp.eye(8)] * 3), reverse=True)
    x = jax.checkpoint(lambda x: jnp.sin(x) * x, policy=jax.checkpoint_policies.nothing_saveable)(x)
    x = lax.cond(rows[0] > 0, jnp.sin, jnp.cos, x)
    x = lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, jnp.tanh], x)
    return jax.nn.gelu(jax.nn.relu(x)) + jax.jit(jnp.exp, keep_unused=True)(x), rows


def manual(x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AUTO,))
    split = jax.P("d")
    return jax.shard_map(lambda x: lax.psum(jnp.sin(x), "d"), mesh=mesh, in_specs=split, out_specs=jax.P())(x)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("fn", [loops, manual])
def test_nested_programs_have_the_same_bits(fn, apart):
    loss = lambda f: lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(x)))  # noqa: E731
    expected, actual = (jax.jit(jax.value_and_grad(loss(f)))(X) for f in (fn, again(fn, apart=apart)))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    if not apart:
        assert text(again(fn), X) == text(fn, X)


def test_loops_without_a_length_have_the_same_bits():
    def fn(x):
        n = x[0, 0] * 0 + 5
        return lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.sin(c[0]) + n, c[1] + 1), (x, 0.0))

    expected, actual = jax.jit(fn)(X), jax.jit(again(fn, apart=True))(X)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_jit_keeps_its_borders():
    """Shardings, donation, name and options of an inner jit, unchanged or rebuilt."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AUTO,))
    to = jax.NamedSharding(mesh, jax.P("d"))

    def layer(x, y):
        return x * 2 + y, y

    def fn(x):
        return jax.jit(layer, donate_argnums=0, out_shardings=to, keep_unused=True)(x + 1, x)

    (as_written,) = [e for e in jax.make_jaxpr(fn)(X).eqns if e.primitive.name == "jit"]
    for apart in (False, True):
        f = again(fn, apart=apart)
        (eqn,) = [e for e in jax.make_jaxpr(f)(X).eqns if e.primitive.name == "jit"]
        for name in ("name", "donated_invars", "in_shardings", "out_shardings", "keep_unused", "inline"):
            assert eqn.params[name] == as_written.params[name], name
        y, _ = jax.jit(f)(X)
        assert y.sharding.spec == jax.P("d")
        np.testing.assert_array_equal(y, jax.jit(fn)(X)[0])


def test_scopes_stay_where_calls_are_taken_apart():
    """Names of equations in the compiled program, which profiles show."""

    def fn(x):
        with jax.named_scope("block"):
            return jax.nn.silu(jax.checkpoint(jnp.sin)(x))

    def names(f):
        other = time.time()  # names are not part of the keys of JAX's compilation cache
        compiled = jax.jit(lambda x: f(x) * other).lower(X).compile()
        matches = re.findall(r'op_name="jit\(<lambda>\)/([^"]+)"', compiled.as_text())
        return {name for name in matches if not name.endswith(")")}  # inlined calls do not remain calls

    assert any("block" in name for name in names(fn))
    assert names(fn) == names(again(fn)) == names(again(fn, apart=True))


@pytest.mark.parametrize("apart", [False, True])
def test_effects_stay_in_their_order(apart, capfd):
    def fn(x):
        jax.debug.print("first {}", x[0, 0], ordered=True)
        x, _ = lax.scan(lambda c, i: (jax.debug.print("turn {}", i, ordered=True), (c, None))[1], x, jnp.arange(2))
        jax.debug.print("last", ordered=True)
        return jnp.zeros(())  # nothing reads the printed value

    jax.block_until_ready(jax.jit(again(fn, apart=apart))(X * 0))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["first", "0.0", "turn", "0", "turn", "1", "last"]


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("apart", [False, True])
def test_nothing_leaks(apart):
    with jax.checking_leaks():
        jax.make_jaxpr(jax.grad(lambda x: jnp.sum(again(loops, apart=apart)(x)[0])))(X)


def test_names_of_checkpoints_stay():
    """A policy saves named values."""

    def fn(x):
        return jnp.sin(checkpoint_name(jnp.sin(jax.nn.silu(x)), "kept"))

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    for f in (
        jax.checkpoint(again(fn, apart=True), policy=policy),
        again(jax.checkpoint(fn, policy=policy), apart=True),
    ):
        # JAX wraps rematerialized operations in a jit.
        assert residuals(f, X) == residuals(jax.checkpoint(fn, policy=policy), X)
    assert len(residuals(fn, X)) > len(residuals(jax.checkpoint(fn, policy=policy), X))


def test_constraints_and_explicit_axes_stay():
    auto, explicit = (jax.make_mesh((2,), ("d",), axis_types=(kind,)) for kind in (AUTO, EXPLICIT))

    def constrained(x):
        return lax.with_sharding_constraint(jax.nn.silu(x), jax.NamedSharding(auto, jax.P("d")))

    assert text(again(constrained), X) == text(constrained, X)
    assert "sharding_constraint" in str(jax.make_jaxpr(again(constrained, apart=True))(X))
    with jax.set_mesh(explicit):
        x = jax.device_put(X, jax.NamedSharding(explicit, jax.P("d")))
        fn = lambda x: jax.nn.silu(jax.sharding.reshard(x * 2, jax.P(None, "d")))  # noqa: E731
        y = jax.jit(again(fn, apart=True))(x)
        assert y.sharding.spec == jax.jit(fn)(x).sharding.spec == jax.P(None, "d")
        np.testing.assert_array_equal(y, jax.jit(fn)(x))


def test_mutable_state_goes_in_and_out():
    """Statistics of BatchNorm, counters of Dropout, and values that Linen sows."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.bn, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.bn(x))

    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def fn(state, x):
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model)

    assert text(again(fn), state, X) == text(fn, state, X)

    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "h", x)
            return nn.BatchNorm(use_running_average=False)(x)

    model = Sowing()
    run = functools.partial(model.apply, mutable=["batch_stats", "intermediates"])
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert text(again(run), variables, X) == text(run, variables, X)


def test_random_keys_and_refs_pass():
    def fn(x):
        key = jax.random.key(3)
        total = jax.new_ref(jnp.zeros(x.shape))
        total[...] += jax.random.normal(key, x.shape)
        return total[...] + x

    for apart in (False, True):
        np.testing.assert_array_equal(jax.jit(again(fn, apart=apart))(X), jax.jit(fn)(X))
