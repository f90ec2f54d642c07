"""Activations of NNX models are recognized in each call: with its arguments and settings, in its trace, once."""

import itertools
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import fp8jax
from tests.distance import relative
from tests.modules.residuals import (
    COAT,
    INNER,
    WIDTH,
    Short,
    X,
    assert_same,
    both,
    found_activations,
    kept_by,
    linear,
    wide,
)
from tests.programs import residuals


def plain(m, x):
    return m.down(nnx.gelu(m.up(x)))


class Dropping(nnx.Module):
    """An MLP with dropout, and an activation as an attribute."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = linear(), linear(INNER, WIDTH, 1)
        self.dropout, self.act = nnx.Dropout(0.5, rngs=rngs), nnx.gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(self.act(self.up(x))))


def test_settings_may_change_after_quantization():
    quantized, written = both(Dropping(nnx.Rngs(0)))
    for _ in range(2):
        for model in (quantized, written):
            model.train()
        assert_same([quantized(X), quantized(X)], [first := written(X), second := written(X)])
        assert (np.asarray(first) != np.asarray(second)).any()
        assert wide(quantized, X) == wide(written, X) > 0
        for model in (quantized, written):
            model.eval()
        assert_same(quantized(X), written(X))
        assert 0 == wide(quantized, X) < wide(written, X)
    quantized.act = written.act = nnx.relu
    assert_same(quantized(X), written(X))


class Changeable:
    """Compared by identity, as most objects."""

    scale = 1.0


class Chooses(nnx.Module):
    """Two MLPs in one module, in a list; arguments select which run, and how."""

    def __init__(self) -> None:
        self.ups, self.downs = (nnx.List([linear(*s, i) for i in range(2)]) for s in ((WIDTH, INNER), (INNER, WIDTH)))
        self.config = Changeable()

    def __call__(self, x: jax.Array, how: object = None, *, which: tuple[int, ...] = (0, 1)) -> jax.Array:
        f = jax.nn.silu if how is True else nnx.gelu
        for i in which:
            h = f(self.ups[i](x))
            x = x + self.downs[i](h if self.config.scale == 1 else self.config.scale * h)
        return x


def test_each_call_is_recognised_by_itself():
    model = Chooses()
    tanh, silu = ([f"{f}(x)"] * 2 for f in ("gelu_tanh", "silu"))
    assert [found_activations(model, X, how) for how in (None, True, 1)] == [tanh, silu, tanh]
    assert found_activations(model, X, which=(1,)) == tanh[1:]
    assert found_activations(model, X, which=(1, 1)) == tanh
    quantized, written = both(model)
    for how, which in itertools.product((True, 1), ((0, 1), (0, 0))):
        assert_same(quantized(X, how, which=which), written(X, how, which=which))
    assert wide(quantized, X, how=True) == wide(quantized, X, how=True, which=(0, 0)) == 0
    for scale in (2.0, 1.0, 3.0):
        quantized.config.scale = written.config.scale = scale
        assert_same(quantized(X), written(X))


def test_layers_that_modules_share_keep_codes_in_both():
    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.inner = Short(plain)
            self.up, self.down = linear(seed=2), self.inner.down

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.inner(x) + self.down(jax.nn.silu(self.up(x)))

    model = Outer()
    assert found_activations(model, X) == ["gelu_tanh(x)", "silu(x)"]
    quantized, written = both(model)
    assert relative(quantized(X), written(X)) < 1e-3
    assert 0 == wide(quantized, X) < wide(written, X)


def test_mapped_models_keep_what_one_call_keeps():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    saved = []
    for model in both(Short(plain)):
        graph, params = nnx.split(model, nnx.Param)
        call = lambda p, x, graph=graph: nnx.merge(graph, p)(x)  # noqa: E731
        mapped = jax.vmap(call, (None, 0))
        shared = jax.shard_map(call, mesh=mesh, in_specs=(None, spec), out_specs=spec)
        one = np.asarray(jax.lax.map(model, X))
        np.testing.assert_allclose(np.asarray(mapped(params, X)), one, rtol=2.0**-7, atol=1e-2)
        for f in (mapped, shared):
            saved.append(sum(d != "uint8" and s[-1:] == (INNER,) and len(s) > 2 for d, s in residuals(f, params, X)))
    assert saved[:2] == [0, 0]
    assert min(saved[2:]) > 0


class Jitted(Short):
    def __init__(self) -> None:
        super().__init__(nnx.gelu)

    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.compute(self.up(x)))


class Checkpointed(Jitted):
    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.compute(self.up(x)))


def test_layers_inside_other_programs_are_known():
    def mixed(m, x):
        inside = jax.jit(lambda x: m.down(nnx.gelu(m.up(x))))(x)
        outside = jax.checkpoint(lambda x: m.b(x))(x)
        return inside + m.c(jax.nn.silu(m.a(x)) * m.d(x)) + m.f(jax.nn.silu(m.e(x)) * outside)

    class Several(nnx.Module):
        def __init__(self) -> None:
            for i, name in enumerate(("up", "a", "b", "d", "e")):
                setattr(self, name, linear(seed=i))
            for i, name in enumerate(("down", "c", "f")):
                setattr(self, name, linear(INNER, WIDTH, seed=i))

        def __call__(self, x: jax.Array) -> jax.Array:
            return mixed(self, x)

    def half_inside(m, x):
        return m.down(nnx.gelu(jax.jit(lambda x: m.up(x))(x)))

    assert found_activations(Several(), X) == ["gelu_tanh(x)", "silu(gate) * up", "silu(gate) * up"]
    assert [found_activations(m, X) for m in (Short(half_inside), Jitted(), Checkpointed())] == [["gelu_tanh(x)"]] * 3
    for model in (Several(), Short(half_inside), Jitted(), Checkpointed()):
        quantized, written = both(model)
        for _ in range(2):
            assert relative(quantized(X), written(X)) < 1e-3


class Nested(nnx.Module):
    """Two layers, and a number of modules, in a list or nested."""

    runs = 0

    def __init__(self, inner: list) -> None:
        self.up, self.down, self.inner = linear(), linear(INNER, WIDTH, 1), nnx.List(inner)

    def __call__(self, x: jax.Array) -> jax.Array:
        Nested.runs += 1
        for inner in self.inner:
            x = inner(x)
        return x + self.down(nnx.gelu(self.up(x)))


def runs(model) -> list[int]:
    """Returns how often bodies of `Nested` run in a first and in a second call."""
    counts = []
    for _ in range(2):
        Nested.runs = 0
        model(X.astype(jnp.float32))
        counts.append(Nested.runs)
    return counts


def test_a_call_is_traced_once_and_outside_of_programs_never_again():
    model = fp8jax.nnx.quantize(Nested([Nested([])]), COAT)
    assert runs(model) == [2, 0]
    assert runs(jax.grad(lambda x: jnp.sum(model(x)))) == [2, 2]
    compiled = jax.jit(lambda x: model(x))
    assert runs(compiled) == [2, 0]
    np.testing.assert_allclose(model(X), compiled(X), rtol=1e-5)


jitted = nnx.jit(lambda inner, x: inner(x))
scanned = nnx.scan(lambda x, inner: inner(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)


class Above(nnx.Module):
    """Two layers, and a module between them that a transformed function runs and that outlives the call."""

    def __init__(self, run, inner) -> None:
        self.first, self.last, self.run, self.inner = linear(outer=WIDTH), linear(outer=WIDTH, seed=1), run, inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.run(self, self.first(x)))


class Stacked(Short):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, INNER, rngs=rngs), nnx.Linear(INNER, WIDTH, rngs=rngs)
        self.compute = plain


def test_functions_that_jax_has_traced_aside_keep_codes_in_the_call():
    stacked = nnx.vmap(Stacked)(nnx.Rngs(0).split(2))
    for run, inner in ((lambda m, x: jitted(m.inner, x), Short(plain)), (lambda m, x: scanned(x, m.inner), stacked)):
        model = Above(run, inner)
        assert found_activations(model, X) == ["gelu_tanh(x)"]
        quantized, written = both(model)
        few, many = (
            sum(d != "uint8" and s[-1:] == (INNER,) and len(s) > 2 for d, s in kept_by(m, X))
            for m in (quantized, written)
        )
        assert few < many
        assert few <= 1  # the stacked kernel
        assert relative(quantized(X), written(X)) < 1e-3


FACTOR = 1.0


def test_a_new_program_reads_globals_anew(monkeypatch):
    quantized, _ = both(Short(lambda m, x: FACTOR * m.down(nnx.gelu(m.up(x)))))
    first = np.asarray(jax.jit(lambda x: quantized(x))(X), np.float32)
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: quantized(x))(X), np.float32), 4 * first)


def test_layers_may_be_called_by_keyword_and_modules_need_not_be_pytrees():
    class Plain(Short, pytree=False):
        pass

    for model in (Short(lambda m, x: m.down(inputs=nnx.gelu(m.up(inputs=x)))), Plain(plain)):
        quantized, written = both(model)
        assert 0 == wide(quantized, X) < wide(written, X)
        assert_same(quantized(X), written(X))
        gradients = nnx.grad(lambda m: jnp.sum(m(X).astype(jnp.float32)))(quantized)
        assert len(jax.tree.leaves(gradients)) == 4


def test_threads_do_not_see_each_other():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        quantized, written = both(Short(plain))
        inputs = [X * (i + 1) for i in range(4)]
        want = [written(x) for x in inputs]
        for _ in range(3):
            actual, start = [None] * len(inputs), threading.Barrier(len(inputs))

            def run(i: int, actual=actual, start=start) -> None:
                start.wait()
                actual[i] = quantized(inputs[i])

            threads = [threading.Thread(target=run, args=(i,)) for i in range(len(actual))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for y, expected in zip(actual, want, strict=True):
                assert_same(y, expected)
    finally:
        sys.setswitchinterval(before)


class Beside(nnx.Module):
    """Three layers, and a function of them."""

    def __init__(self, compute) -> None:
        self.a, self.b, self.c = (nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(i)) for i in range(3))
        self.compute = compute

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.compute(self, x)


def padded(m, x):
    """Matmuls save no factor of a mask that is not differentiated: two layers save codes of their inputs."""
    h = jnp.sin(m.a(x))
    real = (jnp.abs(x).sum(-1, keepdims=True) > 0).astype(jnp.bfloat16)
    return m.b(h) + m.c(h * real)


def weighed(m, x):
    g, other = jax.jit(lambda g, x: (nnx.silu(g), x @ x.mT))(m.a(x), x)
    return m.b(g) * other.sum() + m.c(x)


def test_what_no_gradient_needs_is_not_kept_anyway():
    saved = kept_by(fp8jax.nnx.quantize(Beside(padded), COAT), X)
    assert sum(dtype == "uint8" for dtype, _ in saved) == 3


def test_a_product_beside_an_activation_hides_it_not():
    assert found_activations(Beside(weighed), X) == ["silu(x)"]
