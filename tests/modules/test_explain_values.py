"""The formats and bytes that `explain` prints for each layer, norm and activation; all values differ."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import fp8jax
from fp8jax.core.recipe import Context
from fp8jax.modules import compiled, explain
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.explanation import Explanation
from fp8jax.rewrite.frozen_params import FrozenInfo
from fp8jax.rewrite.rules import LayerChoice
from tests.core.test_plan import LINEAR

TE = fp8jax.recipes.te_current()
X = jax.ShapeDtypeStruct((4, 16), jnp.float32)


class Block(nnx.Module):
    def __init__(self, rngs, **dtypes):
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.gate, self.up = (nnx.Linear(16, 24, rngs=rngs, **dtypes) for _ in range(2))
        self.down = nnx.Linear(24, 16, rngs=rngs, **dtypes)

    def __call__(self, x):
        h = self.norm(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.RMSNorm(name="norm")(x)
        gate, up = (nn.Dense(24, name=name)(h) for name in ("gate", "up"))
        return x + nn.Dense(16, name="down")(nn.silu(gate) * up)


MODELS = {"nnx": lambda: Block(nnx.Rngs(0)), "linen": LinenBlock}


@pytest.fixture
def traced(monkeypatch):
    """Traces programs to plan models, without compiling them."""

    def trace(fn, *args):
        jax.eval_shape(fn, *args)
        return compiled.Program("none", (), ())

    monkeypatch.setattr(explain, "inspect_program", trace)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("model", MODELS)
def test_each_layer_is_said_to_compute_and_save_what_its_rule_says(model, monkeypatch):
    report = fp8jax.explain(MODELS[model](), [fp8jax.Rule("gate", LINEAR), fp8jax.Rule("down", TE)], X)
    actual = {layer.path: layer for layer in report.quantized_layers}
    assert set(actual) == {"gate", "down"}
    assert actual["gate"].products == {
        "forward": "e4m3:token x e4m3:block32",
        "dgrad": "e5m2:group64 x e5m2:block64",
        "wgrad": "e4m3:token x e5m2:group128",
    }
    assert actual["gate"].residual == f"int10:group128, {1.25 + 4 / 128:.4g} B/element"
    assert actual["gate"].token_spanning_spec is None
    assert (actual["down"].residual, actual["down"].token_spanning_spec) == ("e4m3:tensor, 1 B/element", "e4m3:tensor")
    assert {layer.path: layer.shape for layer in report.layers} == {"gate": (16, 24), "up": (16, 24), "down": (24, 16)}
    monkeypatch.setenv("COLUMNS", "400")
    (row,) = [line for line in report.details.splitlines() if line.startswith("gate")]
    cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
    expected = ["(16,24)", *actual["gate"].products.values(), "int10:group128, 1.281 B/element", "rule 'gate'"]
    assert [cell for cell in cells[1:] if cell in expected] == expected


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [({"dtype": jnp.bfloat16}, ("bfloat16", 2)), ({"param_dtype": jnp.float16}, ("float16", 2)),
     ({"dtype": jnp.bfloat16, "param_dtype": jnp.float32}, ("bfloat16", 2)), ({}, ("float32", 4))],
)  # fmt: skip
def test_what_is_kept_as_it_is_has_the_dtype_that_the_layer_computes_in(dtypes, expected):
    report = fp8jax.explain(Block(nnx.Rngs(0), **dtypes), fp8jax.Rule("down", fp8jax.recipes.switchback()))
    (down,) = report.quantized_layers
    assert down.residual == "{}, {} B/element".format(*expected)
    assert down.products == {
        "forward": "int8:token x int8:tensor",
        "dgrad": "int8:token x int8:tensor",
        "wgrad": expected[0],
    }


CONTEXTS = {
    "e5m2:group8, 1.25 B/element": Context("e5m2:group8"),
    "e4m3:group16, 1.125 B/element": Context("e4m3:group16", recompute_activations=True),
    "e4m3:group32, 1.062 B/element; scales from bounds": Context("e4m3:group32", amax="bound"),
    "e4m3:token, 1 B/element; scales from bounds": Context("e4m3:token", recompute_activations=True, amax="bound"),
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("model", MODELS)
def test_each_norm_and_activation_is_said_to_save_what_its_rule_says(model, monkeypatch):
    """An activation has the rule of the layer that reads it, a norm its own. If it is recomputed, its readers save
    nothing.
    """
    monkeypatch.setenv("COLUMNS", "400")
    texts = [*CONTEXTS]
    for saved, other in ((texts[0], texts[1]), (texts[3], texts[2])):
        one, two = (dataclasses.replace(TE, context=CONTEXTS[text]) for text in (saved, other))
        rules = [fp8jax.Rule("norm", one), fp8jax.Rule("down", two), fp8jax.Rule("gate|up", TE)]
        report = fp8jax.explain(MODELS[model](), rules, X)
        entries = {entry.kind: (entry.path, entry.residual, entry.reason) for entry in report.context_entries}
        assert entries == {"RMSNorm": ("norm", saved, "rule 'norm'"), "silu(gate) * up": ("down", other, "rule 'down'")}
        lines = report.details.splitlines()
        assert sum(line.startswith("norm ") and saved + "  " in line for line in lines) == 1
        residuals = {layer.path: layer.residual for layer in report.layers}
        codes = "e4m3:tensor, 1 B/element"
        norm = "nothing: RMSNorm recomputes it" if one.context.recompute_activations else codes
        activation = "nothing: silu(gate) * up recomputes it" if two.context.recompute_activations else codes
        assert residuals == {"gate": norm, "up": norm, "down": activation}


def test_state_bytes_tell_the_moments_apart():
    params = {"w": jnp.zeros((64, 128)), "b": jnp.zeros(8)}
    state = fp8jax.compressed_adamw(1e-3, mu="bf16", nu="e4m3", group_size=32, min_size=1024).init(params)
    groups = 64 * 128 // 32
    expected = {"mu": 2 * (64 * 128 + 8), "nu": 64 * 128 + 6 * groups + 4 * 8, "other": 4}
    assert fp8jax.state_bytes(state) == expected
    state = fp8jax.compressed_adamw(1e-3, mu="e5m2", nu="fp32", expand=False, min_size=1024, group_size=64).init(params)
    expected = {"mu": 64 * 128 + 4 * 128 + 4 * 8, "nu": 4 * (64 * 128 + 8), "other": 4}
    assert fp8jax.state_bytes(state) == expected
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0)).init(params)  # a count and a key of two words
    assert fp8jax.state_bytes((state, noise)) == expected | {"other": 4 + 4 + 8}


def test_how_often_products_run_counts_loops():
    """Matmuls in a loop over three layers run three times."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(16)(x), None

    model = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    report = fp8jax.explain(model, TE, X, None)
    counts = {p.operands: (p.occurrences, p.executions) for p in report.program.traced if p.has_codes}
    assert counts == dict.fromkeys(counts, (1, 3))
    assert len(counts) == 3


def test_products_that_lose_their_8_bits_are_told_on_a_gpu(monkeypatch):
    """On a CPU nothing is compiled unless the user requests it."""
    compilations = []

    def inspect():
        compilations.append(True)
        lost = compiled.Product("dot", ("bf16", "bf16"), 1, 7, "e4m3 x e4m3")
        return compiled.Program("gpu", (), (lost,))

    report = Explanation((layer(),), inspect=inspect)
    assert "WARNING" not in str(report)
    assert not compilations
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "WARNING: 7 products of e4m3 x e4m3 run in bf16" in str(report)
    assert str(report).count("WARNING") == len(compilations) == 1


SWITCHBACK = fp8jax.recipes.switchback().linear


def layer(linear=TE.linear, **fields):
    return PlanEntry("a/b", "Linear", (16, 24), LayerChoice(linear, "why"), "why", "", is_product=True, **fields)


@pytest.mark.parametrize(
    ("x", "spans"),
    [("e4m3:tensor", True), ("e4m3:token", False), ("e4m3:group32", False), ("e4m3:block32", True), ("e4m3:mx32", True),
     ("e4m3:mx32+token", False), ("e4m3:mx32+ocp", False)],
)  # fmt: skip
def test_scales_of_inputs_that_span_tokens_are_told(x, spans):
    part = dataclasses.replace(TE.linear, x=x, x_wgrad="e4m3:block32", x_residual="e4m3:block32")
    actual = layer(part)
    assert actual.token_spanning_spec == (x if spans else None)
    text = str(Explanation((actual, layer(None))))
    assert ("scales that span tokens: the inputs of 1 layer " in text) == spans
    assert layer(None).token_spanning_spec is None
    assert layer(None).products == {}


@pytest.mark.parametrize(
    ("rank", "linear", "saved"),
    [
        (0, TE.linear, "nothing"),
        (2, TE.linear, "bfloat16, 2 B/element"),
        (2, SWITCHBACK, "bfloat16, 2 B/element"),
    ],
)
def test_a_layer_whose_weight_is_not_trained_multiplies_codes_and_has_no_wgrad(rank, linear, saved, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    actual = layer(linear, dtype="bfloat16", frozen=FrozenInfo(fp8jax.QuantSpec("int8", "token"), 16, 24, rank))
    x, dy = (linear.spec(side) or "bfloat16" for side in ("x", "dy"))
    assert actual.products == {"forward": f"{x} x int8:token", "dgrad": f"{dy} x int8:token", "wgrad": "-"}
    assert actual.residual == saved
    with_adapter = actual._replace(frozen=FrozenInfo(None, 16, 24, 2))
    assert with_adapter.products["forward"] == f"{x} x bfloat16"
    (row,) = [line for line in Explanation((actual,)).details.splitlines() if line.startswith("a/b")]
    assert " ".join(row.split()).endswith(f"int8:token {saved} why")
    unknown = actual._replace(dtype=None, frozen=FrozenInfo(None, 16, 24, 2))
    assert unknown.residual == "as written"


def test_what_a_norm_saves_is_told_with_who_else_saves_it():
    lean, text = Context("e4m3:group16", recompute_activations=True), "e4m3:group16, 1.125 B/element"
    choice = LayerChoice(TE.linear, "why", lean)
    norm = PlanEntry("n", "RMSNorm", (16,), choice, "why", "")
    assert norm.residual == text
    readers = (("down", "bfloat16"), ("a product", "float32"))
    others = "; down saves the result in bfloat16; a product saves the result in float32"
    assert norm._replace(readers=readers).residual == text + others
    assert norm._replace(choice=LayerChoice(None, "why")).residual == "as written"
    reader = layer()._replace(input_producer="RMSNorm", recomputes_input=True)
    assert reader.residual == "nothing: RMSNorm recomputes it"
    assert reader._replace(choice=LayerChoice(None, "why")).residual == "as written"
    assert layer()._replace(has_saved_input=True).residual == "nothing: its producer saves it"
