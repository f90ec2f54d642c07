"""`explain` lists what runs as written: norms, activations and products without a recipe, each with its line."""

import importlib
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import fp8jax
from fp8jax.core.frames import is_library
from fp8jax.modules import nnx as quantized_nnx

WIDTH, INNER = 32, 48


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5


X, CONDITION = normal(0, 4, 8, WIDTH), normal(1, 4, WIDTH)
P = {"up": normal(2, WIDTH, INNER), "down": normal(3, INNER, WIDTH), "mod": normal(4, WIDTH, 2 * WIDTH)}
P["n"] = jnp.ones(WIDTH)


def rms(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.maximum(0, jnp.mean(x * x, -1, keepdims=True) - mean * mean) + 1e-6)


def by_group(x):
    y = x.reshape(*x.shape[:2], 8, WIDTH // 8)
    return ((y - y.mean((1, 3), keepdims=True)) * lax.rsqrt(y.var((1, 3), keepdims=True) + 1e-5)).reshape(x.shape)


def by_example(x):
    return (x - x.mean()) * lax.rsqrt(x.var() + 1e-5)


def modulated(norm):
    def before(p, x):
        shift, scale = jnp.split((CONDITION @ p["mod"])[:, None], 2, -1)
        return norm(x) * (1 + scale) + shift

    return before


def rows(fn, recipe="coat", *args):
    """Returns kind, path and reason of each operation that runs as written."""
    explained = fp8jax.transform(fn, recipe).explain(P, *(args or (X,)))
    return [(e.kind, e.path, e.reason) for e in explained.rows if not e.is_planned]


@pytest.mark.parametrize(
    ("norm", "kind", "path", "why"),
    [
        (modulated(layer_norm), "LayerNorm", "", "data scale or shift its result, as in adaLN"),
        (modulated(rms), "RMSNorm", "", "data scale or shift its result, as in adaLN"),
        (
            lambda p, x: by_group(x) * p["n"],
            "norm",
            "n",
            "its mean is over the axes (1, 3) of 4, not over the last one",
        ),
        (
            lambda p, x: jax.vmap(by_example)(x) * p["n"],
            "norm",
            "n",
            "its mean is over the axes (1, 2) of 3, not over the last one",
        ),
        (lambda p, x: jnp.abs(rms(x) * p["n"]), "RMSNorm", "n", "no quantized matmul reads its result directly"),
        (
            lambda p, x: x + rms(x @ p["up"] @ p["down"]) * p["n"],
            "RMSNorm",
            "n",
            "no quantized matmul reads its result directly",
        ),
        (lambda p, x: jnp.sin(layer_norm(x)), "LayerNorm", "", "no quantized matmul reads its result directly"),
    ],
    ids=["adaLN", "adaRMS", "groups", "vmap", "abs", "after a residual sum", "no parameter"],
)
def test_norms_that_are_not_taken_are_listed_with_the_reason(norm, kind, path, why):
    fn = lambda p, x: jnp.sum(jnp.sin(norm(p, x) @ p["up"]) @ p["down"])  # noqa: E731
    (row,) = [row for row in rows(fn) if row[0].lower().endswith("norm")]
    assert row == (kind, path, why)


def test_a_norm_that_is_taken_is_listed_once_and_without_a_context_with_that_reason():
    fn = lambda p, x: jnp.sum((rms(x) * p["n"]) @ p["up"])  # noqa: E731
    explanation = fp8jax.transform(fn, "coat").explain(P, X)
    assert [e.kind for e in explanation.rows] == [e.kind for e in explanation.entries] == ["RMSNorm", "dot_general"]
    ((kind, path, why),) = rows(fn, "te_current")
    assert (kind, path, why.split(",")[0]) == (
        "RMSNorm",
        "n",
        "the rules quantize matmuls only: no recipe has a context",
    )


@pytest.mark.parametrize(
    ("act", "label", "why"),
    [
        (jax.nn.relu, "relu", "not a recognized activation (silu, gelu, gelu_tanh)"),
        (jax.nn.softplus, "softplus", "not a recognized activation (silu, gelu, gelu_tanh)"),
        (jax.nn.elu, "elu", "not a recognized activation (silu, gelu, gelu_tanh)"),
        (jnp.tanh, "tanh", "not a recognized activation (silu, gelu, gelu_tanh)"),
        (lambda h: jnp.maximum(h, 0) ** 2, "relu", "not a recognized activation (silu, gelu, gelu_tanh)"),
        (lambda h: jnp.abs(jax.nn.silu(h)), "silu(x)", "no quantized matmul reads its result directly"),
        (lambda h: jnp.abs(h * jax.nn.gelu(h[..., ::-1])), "gelu_tanh(gate) * up", "no quantized matmul reads its"),
    ],
    ids=["relu", "softplus", "elu", "tanh", "relu squared", "silu and more", "a GLU and more"],
)
def test_activations_that_are_not_taken_are_listed(act, label, why):
    ((kind, _, reason),) = rows(lambda p, x: jnp.sum(act(x @ p["up"]) @ p["down"]))
    assert (kind, reason[: len(why)]) == (label, why)


def test_products_of_data_are_listed_and_a_softmax_is_no_activation():
    def fn(p, x):
        h = x @ p["up"]
        return jnp.sum(jax.nn.softmax(h @ h.mT) @ h @ p["down"])

    assert rows(fn) == [("dot_general", "", "both operands are data, as in attention")] * 2
    explained = fp8jax.transform(fn, "coat").explain(P, X)
    assert explained.details.count("dot_general") == 4
    assert explained.details.count("test_unplanned.py") == 4
    assert "test_unplanned.py" in str(explained)  # the products of data have no path


def test_matmuls_of_learned_queries_are_listed_until_they_have_read_data():
    """The first layers of a Perceiver: their FLOPs count, but no warning names them, as they may be regularizers."""

    def fn(p, x):
        queries = jnp.tile(p["mod"], (len(x), 1, 1))[:, :8, :WIDTH] @ p["up"]
        return jnp.sum(jnp.sin(queries @ p["down"] + x) @ p["up"] @ p["down"])

    explained = fp8jax.transform(fn, "te_current").explain(P, X)
    left = [(e.path, e.reason) for e in explained.skipped]
    assert left == [(name, "neither operand depends on data") for name in ("up", "down")]
    assert "2 layers run in 8 bits (50 % of the FLOPs" in str(explained)
    assert not explained.unquantized_note


def test_activations_in_a_gradient_that_the_function_takes_are_listed_as_part_of_it():
    def fn(p, x):
        penalty = jax.grad(lambda x: jnp.sum(jax.nn.silu(x @ p["up"]) @ p["down"]))(x)
        return jnp.sum(penalty**2) + jnp.sum(x @ p["up"])

    reasons = [reason for kind, _, reason in rows(fn) if kind.startswith("silu")]
    assert set(reasons) == {"part of a gradient that the function computes itself"}


def test_summaries_name_the_matrices_of_one_reason_and_a_parameter_without_a_path():
    stacked = lambda p, x: jnp.sum(x @ (p["up"][0] + p["up"][1]) @ p["down"])  # noqa: E731
    text = str(fp8jax.transform(stacked, "coat").explain({"up": [P["up"], P["up"]], "down": P["down"]}, X))
    assert "  data are multiplied by a value computed from up/0 and up/1" in text
    flat = lambda p, x: jnp.sum(x @ p.reshape(WIDTH, INNER))  # noqa: E731
    assert "there. the matrix gains nothing" in str(fp8jax.transform(flat, "coat").explain(P["up"].ravel(), X))


def test_layers_of_learned_queries_are_listed_with_their_names_in_models():
    class Queries(nnx.Module):
        def __init__(self, rngs):
            self.queries = nnx.Param(normal(6, 8, WIDTH))
            self.pre, self.post = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            return self.post(jnp.sin(self.pre(jnp.broadcast_to(self.queries[...], x.shape)) + x))

    class LinenQueries(nn.Module):
        @nn.compact
        def __call__(self, x):
            queries = self.param("queries", nn.initializers.normal(), (8, WIDTH))
            first = nn.Dense(WIDTH, name="pre")(jnp.broadcast_to(queries, x.shape))
            return nn.Dense(WIDTH, name="post")(jnp.sin(first + x))

    for model in (Queries(nnx.Rngs(0)), LinenQueries()):
        explained = fp8jax.explain(model, "coat", X)
        assert [(e.path, e.shape) for e in explained.layers] == [("pre", (WIDTH, WIDTH)), ("post", (WIDTH, WIDTH))]
        assert [e.reason for e in explained.skipped_layers] == ["neither operand depends on data"]


def test_matrices_in_another_argument_are_listed_with_the_option_that_names_it():
    fn = lambda p, x, q: jnp.sum(lax.scan(lambda x, _: (jnp.sin(x @ q["w"]), None), x @ p["mod"], length=2)[0])  # noqa: E731
    q = {"w": normal(7, 2 * WIDTH, 2 * WIDTH)}
    (found,) = [reason for kind, _, reason in rows(fn, "coat", X, q) if kind == "dot_general"]
    assert found == "both operands are data; if one is a parameter, name its argument in fp8jax.transform(..., params=)"
    assert len(fp8jax.transform(fn, "coat", params=(0, 2)).explain(P, X, q).quantized) == 2


def test_lists_are_in_the_order_of_the_program_and_in_loops_too():
    def fn(p, x):
        step = lambda h, _: (jax.nn.relu(modulated(rms)(p, h) @ p["up"]) @ p["down"] + h, None)  # noqa: E731
        return jnp.sum(lax.scan(jax.checkpoint(step), x, None, 2)[0])

    explained = fp8jax.transform(fn, "coat").explain(P, X)
    assert [e.kind for e in explained.rows] == ["dot_general", "RMSNorm", "dot_general", "relu", "dot_general"]


def test_adapters_of_flax_are_listed_in_place_of_their_products():
    base = nnx.Linear(INNER, WIDTH, rngs=nnx.Rngs(1))
    model = nnx.Sequential(
        nnx.LoRALinear(WIDTH, INNER, lora_rank=4, rngs=nnx.Rngs(0)),
        nnx.gelu,
        nnx.LoRA(INNER, 4, WIDTH, base_module=base, rngs=nnx.Rngs(2)),
    )
    report = fp8jax.explain(model, "coat", X[0])
    listed = {row.path: (row.kind, row.reason.split(";")[0]) for row in report.rows if not row.is_planned}
    paths = [f"layers/{layer}/lora_{part}" for layer in ("0/lora", "2") for part in "ab"]
    assert listed == dict.fromkeys(paths, ("dot_general", "an adapter"))
    assert all(path in str(report) for path in paths)
    rules = [fp8jax.Rule(".*lora_[ab]", "te_current"), "coat"]
    plan = quantized_nnx.plan_call(fp8jax.nnx.quantize(model, rules), (X[0],), {})
    assert {e.path for e in plan.program.entries.values() if "lora" in e.path} == set(paths)
    assert not [e.path for e in plan.list_rows() if "lora" in e.path and not e.is_quantized]


LIBRARY = '''
import jax, jax.numpy as jnp

def norm(x, scale):
    """As Levanter's and Haliax's: each operation over a named axis is a jitted function of another library."""
    mean, var = jax.jit(lambda x: jnp.mean(x, axis=(2,)))(x), jax.jit(lambda x: jnp.var(x, axis=(2,)))(x)
    inverse = jax.jit(jax.lax.rsqrt)(var + 1e-5)
    return (x - mean[..., None]) * inverse[..., None] * scale.reshape(1, 1, -1)

def product(w, x):
    return jnp.einsum("ab,...a->...b", w, x)
'''
MODEL = """
import jax, jax.numpy as jnp
import equinox, own_library

class Block(equinox.Module):
    up: jax.Array
    down: jax.Array
    n: jax.Array
    def __call__(self, x):
        h = own_library.norm(x, self.n)
        h = jax.nn.relu(own_library.product(self.up, h))
        return own_library.product(self.down, h)
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A library of models in site-packages, written with another, whose functions are jitted."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    for name, text in (("own_library", LIBRARY), ("own_models", MODEL)):
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setattr("fp8jax.core.frames._LIBRARIES", (*fp8jax.core.frames._LIBRARIES, "own_library"))
    # Its files are those of a folder: a library is a package.
    (folder / "own_library.py").rename((folder / "own_library").mkdir() or folder / "own_library" / "__init__.py")
    is_library.cache_clear()
    yield importlib.import_module("own_models")
    for name in ("own_library", "own_models"):
        sys.modules.pop(name, None)
    is_library.cache_clear()


def test_lines_are_those_of_models_and_not_of_libraries(model):
    eqx = pytest.importorskip("equinox")
    block = model.Block(P["up"], P["down"], P["n"])
    jitted = eqx.filter_jit(lambda m, x: m(x))
    for call in (
        lambda m, x: m(x),
        eqx.filter_jit(lambda m, x: m(x)),
        eqx.filter_checkpoint(lambda m, x: m(x)),
        jitted,
    ):
        fast = fp8jax.filter_transform(lambda m, x, call=call: jnp.sum(call(m, x)), "coat")
        for _ in range(2):
            listing = fast.explain(block, X).rows
            lines = {e.kind: e.line.rpartition("/")[2] for e in listing}
            assert [e.kind for e in listing] == ["LayerNorm", "dot_general", "relu", "dot_general"]
            assert lines == {
                "LayerNorm": "own_models.py:10 (__call__)",
                "relu": "own_models.py:11 (__call__)",
                "dot_general": "own_models.py:12 (__call__)",
            }


def test_lines_in_jitted_functions_of_the_user():
    @jax.jit
    def inner(w, x):
        return jax.nn.silu(x @ w)

    first = inner.__wrapped__.__code__.co_firstlineno
    explained = fp8jax.transform(lambda p, x: jnp.sum(inner(p["up"], x) @ p["down"]), "coat").explain(P, X)
    lines = [(e.kind, int(e.line.rpartition(":")[2].split()[0]) - first) for e in explained.entries]
    assert lines[:2] == [("dot_general", 2), ("silu(x)", 2)]


def test_which_files_are_libraries():
    assert is_library(jax.__file__)
    assert is_library(jnp.__file__)
    assert is_library(nnx.__file__)
    assert is_library(fp8jax.__file__)
    assert is_library(textwrap.__file__)
    assert not is_library(__file__)
    assert not is_library(pytest.__file__)
    assert not is_library("<stdin>")
    assert not is_library("/home/me/flax/train.py")
