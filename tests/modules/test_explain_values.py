"""What `explain` says of each layer, norm and activation: formats and bytes that no two of them share."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import fp8jax
from fp8jax.core.recipe import Context
from fp8jax.modules import explain, program, report
from fp8jax.rewrite.frozen_params import FrozenInfo
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
    """Programs are traced, as models must run to be known, and not compiled."""

    def trace(fn, *args):
        jax.eval_shape(fn, *args)
        return program.Program("none", (), ())

    monkeypatch.setattr(explain, "inspect_program", trace)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("model", MODELS)
def test_each_layer_is_said_to_compute_and_save_what_its_rule_says(model):
    report = fp8jax.explain(MODELS[model](), [fp8jax.Rule("gate", LINEAR), fp8jax.Rule("down", TE)], X)
    found = {layer.path: layer for layer in report.quantized_layers}
    assert set(found) == {"gate", "down"}
    assert found["gate"].products == {
        "forward": "e4m3:token x e4m3:block32",
        "dgrad": "e5m2:group64 x e5m2:block64",
        "wgrad": "e4m3:token x e5m2:group128",
    }
    assert found["gate"].x_residual == ("int10:group128", pytest.approx(1.25 + 4 / 128))
    assert found["gate"].token_spanning_spec is None
    assert (found["down"].x_residual, found["down"].token_spanning_spec) == (("e4m3:tensor", 1.0), "e4m3:tensor")
    assert {layer.path: layer.kernel for layer in report.layers} == {"gate": (16, 24), "up": (16, 24), "down": (24, 16)}
    (row,) = [line for line in str(report).splitlines() if line.startswith("gate")]
    cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
    assert cells[2:] == ["(16,24)", *found["gate"].products.values(), "int10:group128", "1.281", "rule 'gate'"]


@pytest.mark.parametrize(
    ("dtypes", "want"),
    [({"dtype": jnp.bfloat16}, ("bfloat16", 2.0)), ({"param_dtype": jnp.float16}, ("float16", 2.0)),
     ({"dtype": jnp.bfloat16, "param_dtype": jnp.float32}, ("bfloat16", 2.0)), ({}, ("float32", 4.0))],
)  # fmt: skip
def test_what_is_kept_as_it_is_has_the_dtype_that_the_layer_computes_in(dtypes, want):
    report = fp8jax.explain(Block(nnx.Rngs(0), **dtypes), fp8jax.Rule("down", fp8jax.recipes.switchback()))
    (down,) = report.quantized_layers
    assert down.x_residual == want
    assert down.products == {
        "forward": "int8:token x int8:tensor",
        "dgrad": "int8:token x int8:tensor",
        "wgrad": want[0],
    }


CONTEXTS = {
    "e5m2:group8": Context("e5m2:group8"),
    "e4m3:group16; quantized layers that read its result keep nothing of it": Context("e4m3:group16", "lean"),
    "e4m3:group32; scales from bounds": Context("e4m3:group32", "faithful", "bound"),
    "e4m3:token; quantized layers that read its result keep nothing of it; scales from bounds": Context(
        "e4m3:token", "lean", "bound"
    ),
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("model", MODELS)
def test_each_norm_and_activation_is_said_to_keep_what_its_rule_says(model):
    """An activation follows the rule of the layer that reads it, a norm its own."""
    texts = [*CONTEXTS]
    for keeps, other in ((texts[0], texts[1]), (texts[3], texts[2])):
        one, two = (dataclasses.replace(TE, context=CONTEXTS[text]) for text in (keeps, other))
        rules = [fp8jax.Rule("norm", one), fp8jax.Rule("down", two), fp8jax.Rule("gate|up", TE)]
        report = fp8jax.explain(MODELS[model](), rules, X)
        parts = {part.computation: (part.path, part.residuals, part.reason) for part in report.context_entries}
        assert parts == {"norm": ("norm", keeps, "rule 'norm'"), "silu(gate) * up": ("down", other, "rule 'down'")}
        lines = str(report).splitlines()
        assert sum(line.startswith("norm ") and keeps + "  " in line for line in lines) == 1


def test_state_bytes_tell_the_moments_apart():
    params = {"w": jnp.zeros((64, 128)), "b": jnp.zeros(8)}
    state = fp8jax.compressed_adamw(1e-3, mu="bf16", nu="e4m3", group_size=32, min_size=1024).init(params)
    groups = 64 * 128 // 32
    want = {"mu": 2 * (64 * 128 + 8), "nu": 64 * 128 + 6 * groups + 4 * 8, "other": 4}
    assert fp8jax.state_bytes(state) == want
    state = fp8jax.compressed_adamw(1e-3, mu="e5m2", nu="fp32", expand=False, min_size=1024, group_size=64).init(params)
    want = {"mu": 64 * 128 + 4 * 128 + 4 * 8, "nu": 4 * (64 * 128 + 8), "other": 4}
    assert fp8jax.state_bytes(state) == want
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0)).init(params)  # a count and a key of two words
    assert fp8jax.state_bytes((state, noise)) == want | {"other": 4 + 4 + 8}


def test_how_often_products_run_counts_loops():
    """Of three layers in a loop the products run three times as often as they are written."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(16)(x), None

    model = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    report = fp8jax.explain(model, TE, X, None)
    counts = {p.operands: (p.occurrences, p.executions) for p in report.program.traced if p.is_8bit}
    assert counts == dict.fromkeys(counts, (1, 3))
    assert len(counts) == 3


SWITCHBACK = fp8jax.recipes.switchback().linear


def layer(linear=TE.linear, **how):
    return report.Layer("a/b", "Linear", (16, 24), linear, "why", **how)


@pytest.mark.parametrize(
    ("x", "spans"),
    [("e4m3:tensor", True), ("e4m3:token", False), ("e4m3:group32", False), ("e4m3:block32", True), ("e4m3:mx32", True),
     ("e4m3:mx32+token", False), ("e4m3:mx32+ocp", False)],
)  # fmt: skip
def test_scales_of_inputs_that_span_tokens_are_told(x, spans):
    part = dataclasses.replace(TE.linear, x=x, x_wgrad="e4m3:block32", x_residual="e4m3:block32")
    found = layer(part)
    assert found.token_spanning_spec == (x if spans else None)
    said = str(report.Report((found, layer(None))))
    assert ("scales that span tokens: the inputs of 1 layers" in said) == spans
    assert layer(None).token_spanning_spec is None
    assert layer(None).products == {}


@pytest.mark.parametrize(
    ("rank", "linear", "saved", "size"),
    [(0, TE.linear, "nothing", "0"), (2, TE.linear, "bfloat16", "2"), (2, SWITCHBACK, "bfloat16", "2")],
)
def test_a_layer_whose_weight_is_not_trained_multiplies_codes_and_has_no_wgrad(rank, linear, saved, size):
    found = layer(linear, dtype="bfloat16", frozen=FrozenInfo(fp8jax.QuantSpec("int8", "token"), 16, 24, rank))
    x, dy = (linear.spec(side) or "bfloat16" for side in ("x", "dy"))
    assert found.products == {"forward": f"{x} x int8:token", "dgrad": f"{dy} x int8:token", "wgrad": "-"}
    assert found.x_residual == (saved, float(size))
    plain = dataclasses.replace(found, frozen=FrozenInfo(None, 16, 24, 2))
    assert plain.products["forward"] == f"{x} x bfloat16"
    (row,) = [line for line in str(report.Report((found,))).splitlines() if line.startswith("a/b")]
    assert row.split()[-3:] == [saved, size, "why"]
    unknown = dataclasses.replace(found, dtype=None, frozen=FrozenInfo(None, 16, 24, 2))
    (row,) = [line for line in str(report.Report((unknown,))).splitlines() if line.startswith("a/b")]
    assert row.split()[-4:] == ["as", "written", "?", "why"]


def test_what_a_norm_keeps_is_told_with_who_else_keeps_it():
    lean, group = Context("e4m3:group16", "lean"), "e4m3:group16"
    made = lambda context, **how: report.ContextEntry("n", "RMSNorm", "norm", context, "why", **how)  # noqa: E731
    nothing = "; quantized layers that read its result keep nothing of it"
    readers = {"readers": (("down", "bfloat16"), ("a product", "float32"))}
    others = "; down keeps it in bfloat16; a product keeps it in float32"
    for part, said in (
        (made(lean), group + nothing),
        (made(lean, has_only_listed_readers=True), group),
        (made(lean, **readers), group + nothing + others),
        (made(lean, has_only_listed_readers=True, **readers), group + others),
        (made(lean, attention_layers=("q", "k")), "q, k: no copy of what attention keeps"),
        (made(None), "as written"),
        (dataclasses.replace(made(lean), computation=None), "as written"),
    ):
        assert part.residuals == said
    note = "saved inputs: quantized layers that read the result of a lean norm or activation (below) keep none."
    assert note in str(report.Report((layer(),), context_entries=(made(None), made(lean))))
    assert note not in str(report.Report((layer(),), context_entries=(made(None), made(Context(group)))))
