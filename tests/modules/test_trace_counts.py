"""A call of a quantized NNX copy traces the model once; in Linen twice, once of them abstractly."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp8jax
from fp8jax.ops.products import linear
from fp8jax.rewrite import operations
from tests.distance import relative
from tests.rows import slow

WIDTH, INNER, LAYERS, VOCAB = 32, 48, 4, 50
COAT = fp8jax.recipes.coat_activations()
RULES = (fp8jax.Rule("embed|out", None), fp8jax.Rule(".*", COAT))
X = jnp.ones((2, 6), jnp.int32)
BF16 = jnp.bfloat16
counts: collections.Counter[str] = collections.Counter()


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        counts["mlp"] += 1
        gate, up = (nn.Dense(INNER, name=name, dtype=BF16)(x) for name in ("gate", "up"))
        return nn.Dense(WIDTH, name="down", dtype=BF16)(nn.silu(gate) * up)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        counts["block"] += 1
        h = nn.RMSNorm(name="norm")(x)
        q, k, v = (nn.Dense(WIDTH, name=name, dtype=BF16)(h) for name in "qkv")
        return LinenMlp(name="mlp")(x + nn.Dense(WIDTH, name="o", dtype=BF16)(q * k + v))


class LinenModel(nn.Module):
    scan: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        counts["model"] += 1
        x = nn.Embed(VOCAB, WIDTH, name="embed", dtype=BF16)(tokens)
        if self.scan:
            over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": LAYERS}
            x, _ = nn.scan(lambda block, x, _: (block(x), None), **over)(LinenBlock(name="blocks"), x, None)
        else:
            for i in range(LAYERS):
                x = LinenBlock(name=f"block{i}")(x)
        return nn.Dense(VOCAB, name="out", dtype=BF16)(x)


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate, self.up = (nnx.Linear(WIDTH, INNER, dtype=BF16, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(INNER, WIDTH, dtype=BF16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        counts["mlp"] += 1
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v, self.o = (nnx.Linear(WIDTH, WIDTH, dtype=BF16, rngs=rngs) for _ in range(4))
        self.norm, self.mlp = nnx.RMSNorm(WIDTH, rngs=rngs), NnxMlp(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        counts["block"] += 1
        h = self.norm(x)
        return self.mlp(x + self.o(self.q(h) * self.k(h) + self.v(h)))


class NnxModel(nnx.Module):
    """Its own layers make it a candidate, too."""

    def __init__(self, rngs: nnx.Rngs, scan: bool) -> None:
        self.embed, self.scan = nnx.Embed(VOCAB, WIDTH, dtype=BF16, rngs=rngs), scan
        self.blocks = (
            nnx.vmap(NnxBlock)(rngs.split(LAYERS)) if scan else nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        )
        self.into = nnx.Linear(WIDTH, WIDTH, dtype=BF16, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCAB, dtype=BF16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        counts["model"] += 1
        x = self.into(self.embed(tokens))
        if self.scan:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return self.out(x)


def executions(call, *args) -> dict[str, int]:
    """Returns how often each body runs while a gradient of a call is traced."""
    counts.clear()
    jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(call(*args).astype(jnp.float32))))(*args)
    return dict(counts)


def twice(written: dict[str, int]) -> dict[str, int]:
    return {name: 2 * count for name, count in written.items()}


@pytest.mark.parametrize(
    ("scan", "rules"),
    [(True, COAT), (False, RULES), slow(False, COAT), slow(True, RULES)],
    ids=["scan, recipe", "unrolled, rules", "unrolled, recipe", "scan, rules"],
)
def test_bodies_of_linen_run_once(scan, rules):
    model = LinenModel(scan)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    written = executions(lambda params: model.apply(params, X), params)
    quantized = fp8jax.linen.quantize(model, rules)
    traced = executions(lambda params: quantized.apply(params, X), params)
    assert traced == written


@pytest.mark.parametrize("scan", [slow(False), True], ids=["unrolled", "scan"])
def test_bodies_of_nnx_run_once(scan):
    model = NnxModel(nnx.Rngs(0), scan)
    both = []
    for m in (model, fp8jax.nnx.quantize(model, COAT)):
        graph, params, rest = nnx.split(m, nnx.Param, ...)
        both.append(executions(lambda p, g=graph, r=rest: nnx.merge(g, p, r, copy=True)(X), params))
        counts.clear()
        m(X)
        both.append(dict(counts))
        counts.clear()
        m(X)
        both.append(dict(counts))
    assert both[0]["mlp"] == (1 if scan else LAYERS)
    assert both[3] == both[0]
    # Outside of programs, it is traced in the first call only.
    assert both[4] == both[0]
    assert both[5] == {}


@pytest.mark.parametrize("recipe", [COAT, fp8jax.recipes.int8_fallback()], ids=["coat", "int8_fallback"])
def test_runs_aside_make_no_codes_of_what_layers_read(monkeypatch, recipe):
    products = []
    multiply = linear.recipe_dot
    for module in (linear, operations):
        monkeypatch.setattr(
            module, "recipe_dot", lambda *args, **options: products.append(1) or multiply(*args, **options)
        )
    model = fp8jax.nnx.quantize(NnxModel(nnx.Rngs(0), False), (fp8jax.Rule("out", None), fp8jax.Rule(".*", recipe)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    executions(lambda params: nnx.merge(graph, params, rest, copy=True)(X), params)
    assert len(products) == 1 + LAYERS * 7


class OwnError(Exception):
    pass


def fail(*_):
    raise OwnError("of the model")


def test_errors_of_a_model_come_out_of_its_quantized_copy():
    class Linen(LinenModel):
        def __call__(self, tokens):
            return fail(super().__call__(tokens))

    class Nnx(NnxModel):
        def __call__(self, tokens):
            return fail(super().__call__(tokens))

    params = LinenModel().init(jax.random.key(0), X)
    for rules in (COAT, RULES):
        with pytest.raises(OwnError, match="of the model"):
            fp8jax.linen.quantize(Linen(), rules).apply(params, X)
    with pytest.raises(OwnError, match="of the model"):
        fp8jax.nnx.quantize(Nnx(nnx.Rngs(0), False), COAT)(X)


def test_a_model_that_looks_at_values_runs_as_written_around_quantized_layers():
    class Looks(NnxMlp):
        def __call__(self, x):
            return super().__call__(x) if x.sum() > 0 else x

    x = jnp.ones((2, WIDTH))
    model, other = Looks(nnx.Rngs(0)), NnxMlp(nnx.Rngs(0))
    actual, expected = (fp8jax.nnx.quantize(m, fp8jax.recipes.te_current())(x) for m in (model, other))
    assert relative(actual, expected) < 0.01
    assert relative(actual, model(x)) > 0.001

    class Multiplies(Looks):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.w = nnx.Param(jnp.ones((WIDTH, WIDTH)))

    # Its own matmul would not be quantized.
    with pytest.raises(jax.errors.TracerBoolConversionError):
        fp8jax.nnx.quantize(Multiplies(nnx.Rngs(0)), COAT)(x)
