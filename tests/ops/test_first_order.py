"""Second derivatives of 8-bit operations raise only if they are used (first-order MAML works)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.core import derivatives
from fp8jax.ops.autodiff import residuals
from fp8jax.ops.autodiff.residuals import NO_FACTS
from fp8jax.ops.dispatch import choice
from fp8jax.ops.products import product
from fp8jax.ops.products.linear import linears
from fp8jax.ops.products.operands import CodesResidual
from fp8jax.ops.products.weights import freeze
from fp8jax.ops.quantization.fused_outputs import CotangentPrediction
from tests.rows import covering, few, slow


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X, W = draw(0, 32, 64), {"up": draw(1, 64, 64) / 8, "scale": jnp.ones(64), "experts": draw(2, 2, 64, 32) / 8}
RECIPES = ("te_current", "coat_fast", "moss", "int8_block", "switchback")


def loss(w, x, recipe="coat"):
    recipe = getattr(fp8jax.recipes, recipe)()
    key = jax.random.key(2) if recipe.linear.is_stochastic else None
    y = fp8jax.rms_norm(x, w["scale"], recipe=recipe)
    with jax.named_scope("mlp/up"):
        y = fp8jax.linear(y, w["up"], recipe=recipe, key=key)
    y = fp8jax.glu(y, y, recipe=recipe)
    if "experts" in w:
        y = fp8jax.ragged_dot(y, w["experts"], jnp.array([10, 22]), recipe=recipe, key=key)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def moved(w, g):
    return jax.tree.map(lambda w, g: w - 0.01 * g, w, g)


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("recipe", few(RECIPES, "switchback"))
def test_first_order_maml_is_the_gradient_at_the_moved_weights(recipe):
    """Bitwise equal."""

    def inner(w):
        return jax.grad(loss)(w, X, recipe)

    def outer(w):
        return loss(moved(w, jax.lax.stop_gradient(inner(w))), 2 * X, recipe)

    actual = jax.jit(jax.grad(outer))(W)
    expected = jax.jit(lambda w: jax.grad(loss)(moved(w, inner(w)), 2 * X, recipe))(W)
    same(actual, expected)
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(actual))


STEPS = {
    "eager": lambda f: lambda w, x: f(w, x),
    "checkpoint": lambda f: jax.checkpoint(f),
    "jit within": lambda f: jax.jit(f),
    "vmap": lambda f: lambda w, x: jnp.mean(jax.vmap(f, (None, 0))(w, jnp.stack([x, -x]))),
}


@pytest.mark.parametrize("mode", few(STEPS, "vmap"))
def test_it_is_so_through_transformations_and_inner_loops(mode):
    f = STEPS[mode](loss)
    gradient = jax.jit(jax.grad(f))
    weights = W

    def outer(w):
        def step(w, x):
            return moved(w, jax.lax.stop_gradient(jax.grad(f)(w, x))), None

        w, _ = jax.lax.scan(step, w, jnp.stack([X, X[::-1]]))
        return f(w, 2 * X)

    actual, w = jax.jit(jax.grad(outer))(weights), weights
    for x in (X, X[::-1]):
        w = moved(w, gradient(w, x))
    expected = gradient(w, 2 * X)
    # Separately compiled programs differ by the order of sums, and thus by codes at ties.
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * float(jnp.max(jnp.abs(b))))


OPERATIONS = {
    "a product": lambda x, w: fp8jax.linear(x, w, recipe="coat"),
    "a product passed on": lambda x, w: sum(linears(x, (w, w), recipe="coat", facts=NO_FACTS, quantized=(None, None))),
    "a norm": lambda x, w: fp8jax.rms_norm(x, w[0], recipe="coat"),
    "an activation": lambda x, w: fp8jax.glu(x, w[:32], recipe="coat"),
    "ragged_dot": lambda x, w: fp8jax.ragged_dot(x, jnp.stack([w, w]), jnp.array([10, 22]), recipe="coat"),
}
SECOND = {
    # Through the result alone, the cotangent alone, and what is saved alone.
    "value": lambda f: jax.grad(lambda w: jax.value_and_grad(f, 1)(X, w)[0]),
    "cotangent": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(lambda x: f(x, W["up"], w[0, 0]))(X))),
    "saved, x": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(X, w) ** 2)),
    "saved, w": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f, 1)(X * w[0, 0], W["up"]) ** 2)),
    "jacrev": lambda f: jax.jacrev(lambda w: jnp.sum(jax.grad(f, 1)(X, w * w), -1)),
    "jitted": lambda f: jax.jit(jax.grad(lambda w: jnp.sum(jax.jit(jax.grad(f))(X, w) ** 2))),
    "vmap": lambda f: jax.grad(lambda w: jnp.sum(jax.vmap(jax.grad(f), (None, 0))(X, jnp.stack([w, -w])) ** 2)),
}


@pytest.mark.parametrize(("mode", "name"), covering(SECOND, OPERATIONS))
def test_a_second_derivative_that_is_used_raises(mode, name):
    def f(x, w, factor=1.0):
        return jnp.sum(OPERATIONS[name](x, w)) * factor

    with pytest.raises(ValueError, match=f"{name.removesuffix(' passed on')}.*differentiated twice.*MAML"):
        jax.eval_shape(SECOND[mode](f), W["up"])


FORWARD = {
    "jvp": lambda f: jax.jvp(f, (W,), (W,)),
    "jitted": lambda f: jax.jit(lambda w: jax.jvp(f, (w,), (w,))).lower(W),
    "of a program": lambda f: jax.jvp(jax.jit(f), (W,), (W,)),
    "scan": lambda f: jax.jvp(lambda w: jax.lax.scan(lambda c, _: (c + f(w), None), 0.0, None, 2)[0], (W,), (W,)),
    "linearize": lambda f: jax.linearize(f, W)[1](W),
    "jacfwd": lambda f: jax.jacfwd(lambda factor: f({"up": factor * W["up"]}))(1.0),
    "product with the Hessian": lambda f: jax.jvp(jax.grad(f), (W,), (W,)),
    "hessian": lambda f: jax.jit(jax.hessian(f)).lower(W),
}


@pytest.mark.parametrize("mode", FORWARD)
def test_forward_mode_names_the_operation_and_what_to_take(mode):
    def f(w):
        with jax.named_scope("mlp/up"):
            return jnp.sum(fp8jax.linear(X, w["up"], recipe="coat"))

    message = r"a product of \(32, 64\) and \(64, 64\) in 'mlp/up' .* reverse-mode .*only.*jax.jvp.*Use jax.grad"
    with pytest.raises(ValueError, match=message):
        FORWARD[mode](f)


@pytest.mark.parametrize(("f", "name"), [
    (lambda x: fp8jax.rms_norm(x, recipe="coat"), "a norm"),
    (lambda x: fp8jax.activation(x, activation="gelu", recipe="coat"), "an activation"),
    (lambda x: fp8jax.ragged_dot(x, W["experts"], jnp.array([10, 22]), recipe="moss"), "ragged_dot"),
])  # fmt: skip
def test_so_do_other_operations(f, name):
    with pytest.raises(ValueError, match=f"^{name}.* reverse-mode differentiation only"):
        jax.jvp(f, (X,), (X,))


LABELS = jnp.arange(32)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("a product", "bf16"), ("a product", "te_current"), slow("linear_cross_entropy", "bf16"),
     ("linear_cross_entropy", "te_current"), ("linear_cross_entropy of each", "bf16"),
     slow("linear_cross_entropy of each", "te_current"), ("ragged_dot", "bf16"), slow("ragged_dot", "te_current")],
)  # fmt: skip
def test_so_do_operations_in_16_bits_however_forward_mode_is_asked_for(recipe, name):
    """16-bit matmuls can be differentiated twice in reverse mode; 8-bit matmuls cannot."""
    functions = {
        "a product": lambda x: fp8jax.linear(x, W["up"], recipe=recipe),
        "linear_cross_entropy": lambda x: fp8jax.linear_cross_entropy(x, W["up"], LABELS, recipe=recipe),
        "linear_cross_entropy of each": lambda x: fp8jax.linear_cross_entropy(
            x, W["up"], LABELS, recipe=recipe, reduction="none"
        ),
        "ragged_dot": lambda x: fp8jax.ragged_dot(x, W["experts"], jnp.array([10, 22]), recipe=recipe),
    }

    def f(x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.sin(functions[name](x)))

    ways = {
        "jvp": lambda: jax.jvp(f, (X,), (X,)),
        "jitted": lambda: jax.jit(lambda x: jax.jvp(f, (x,), (x,))).lower(X),
        "jacfwd": lambda: jax.jacfwd(f)(X),
        "jitted jacfwd": lambda: jax.jit(jax.jacfwd(f)).lower(X),
        "Hessian": lambda: jax.jit(jax.hessian(lambda factor: f(factor * X))).lower(1.0),
        "mapped": lambda: jax.vmap(lambda t: jax.jvp(f, (X,), (t,))[1])(X[None]),
    }
    operation = name.removesuffix(" of each")
    for mode, run in ways.items():
        with pytest.raises(
            ValueError, match=rf"^{operation} of \(32, 64\) .*in 'head' supports reverse-mode differentiation only"
        ):
            print(mode, run())
    twice = jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))
    if recipe != "bf16":
        with pytest.raises(ValueError, match="was differentiated twice"):
            twice(X)
        return
    if name.startswith("linear_cross_entropy"):  # on several devices: JAX does not differentiate partitioned programs
        return
    small, direction = 1e-2, draw(5, 32, 64)
    ahead, back = (jnp.sum(jax.grad(f)(X + s * direction) ** 2) for s in (small, -small))
    np.testing.assert_allclose(jnp.sum(twice(X) * direction), (ahead - back) / (2 * small), rtol=2e-2, atol=1e-3)


def test_what_is_known_of_a_gradient_is_said_of_the_array_that_goes_on(monkeypatch):
    lookups, noted, operand = [], [], CodesResidual.operand

    def predicting(self, side, cotangent_facts):
        cotangent_facts.predicted = CotangentPrediction()
        return operand(self, side, cotangent_facts)

    monkeypatch.setattr(CodesResidual, "operand", predicting)
    for module in (residuals, product):
        monkeypatch.setattr(module, "pop_facts", lambda x: lookups.append(x) or NO_FACTS)
        monkeypatch.setattr(module, "attach_facts", lambda x, facts: noted.append(x))

    @jax.jit
    def program(x):
        def f(x):
            return jnp.sum(fp8jax.linear(fp8jax.rms_norm(x, recipe="coat"), W["up"], recipe="coat"))

        y, vjp_fn = jax.vjp(f, x)
        noted.clear()
        return vjp_fn(y)

    program(X)
    assert any(noted[0] is x for x in lookups)


def test_products_with_frozen_weights_are_differentiated_once_by_the_input():
    w = freeze(W["up"])

    def f(x):
        return jnp.sum(fp8jax.linear(x, w, recipe="te_current") ** 2)

    x = X - jax.grad(f)(X)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x - jax.lax.stop_gradient(jax.grad(f)(x))))(X), jax.grad(f)(x))
    with pytest.raises(ValueError, match=r"a frozen weight.*differentiated twice"):
        jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(X)
    with pytest.raises(ValueError, match=r"a frozen weight.* reverse-mode differentiation only"):
        jax.jvp(f, (X,), (X,))


@pytest.mark.slow
def test_a_program_that_differentiates_once_is_the_same_without(monkeypatch):
    def program():
        compiled = jax.jit(jax.value_and_grad(lambda w: loss(w, X))).lower(W).compile().as_text()
        # The names of operations, their numbers, and where they are written, aside.
        lines = re.sub(r", (metadata|stack_frame_id)=(\{[^}]*\}|\d+)", "", compiled)
        lines = re.sub(r"([A-Za-z_]\w*)\.\d+", r"\1", lines).splitlines()
        return [line for line in lines if not re.match(r"\d+ |[A-Z][A-Za-z]+$|$", line)]

    def residual_shapes():
        return sorted((x.shape, str(x.dtype)) for x in jax.tree.leaves(jax.vjp(lambda w: loss(w, X), W)[1]) if x.size)

    own, saved = program(), residual_shapes()
    without = []
    monkeypatch.setattr(derivatives, "second_order_guard", lambda *_: without.append(True))
    choice.clear_trace_cache()
    assert program() == own
    assert residual_shapes() == saved
    assert len(without) >= 8, "four operations, in both"
