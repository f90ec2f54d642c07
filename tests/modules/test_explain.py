"""The output of `explain` for models, against their known properties."""

import collections
import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax.modules import compiled
from fp8jax.ops.dispatch import choice
from fp8jax.ops.dispatch.choice import Choice
from fp8jax.ops.matmul import grouped_hopper
from fp8jax.ops.quantization import quantize
from tests.modules.architectures import LAYERS, LENGTH, WIDTH, MiniGPT, Nanodo
from tests.rows import covering, slow

TE, DEEPSEEK = fp8jax.recipes.te_current(), fp8jax.recipes.deepseek()
TOKENS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)


def test_a_report_on_an_nnx_model():
    model = MiniGPT(rngs=nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    report = fp8jax.explain(model, TE)
    heads = "output heads and routers whose names are not recognized are known only in a call; pass sample inputs"
    assert report.notes == (f"{heads} to explain",)
    assert fp8jax.explain(model, fp8jax.Rule(".*", TE)).notes == ()
    narrow = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 1, rngs=nnx.Rngs(1)))
    (last,) = fp8jax.explain(narrow, TE).skipped_layers
    assert last.reason == "the recipe; pass sample inputs to explain, to know whether a matmul reads it"
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))
    assert report.program is None
    assert len(report.quantized_layers) == 6 * LAYERS
    layers = {layer.path: layer for layer in report.layers}
    query = layers["transformer_blocks/0/mha/query"]
    assert (query.kind, query.shape, query.reason) == ("LinearGeneral", (WIDTH, 2, WIDTH // 2), "the recipe")
    assert query.products == {
        "forward": "e4m3:tensor x e4m3:tensor",
        "dgrad": "e5m2:tensor x e4m3:tensor",
        "wgrad": "e4m3:tensor x e5m2:tensor",
    }
    assert query.residual == "e4m3:tensor, 1 B/element"
    reasons = {layer.path: layer.reason for layer in report.skipped_layers}
    assert reasons.pop("output_layer") == "an embedding or head"
    assert {path: reason.split()[0] for path, reason in reasons.items()} == {
        "token_emb": "an",
        "pos_emb": "an",
        "transformer_blocks/0/mha": "the",
        "transformer_blocks/1/mha": "the",
    }
    assert "QK and AV" in reasons["transformer_blocks/0/mha"]
    assert "attend" in reasons["token_emb"]


@pytest.mark.parametrize(
    ("recipe", "products"),
    [(TE, 3 * 6 * LAYERS), slow(DEEPSEEK, 3 * 6 * LAYERS), slow(fp8jax.recipes.switchback(), 2 * 6 * LAYERS)],
    ids=lambda r: getattr(r, "name", None),
)
def test_the_program_of_a_linen_model(recipe, products):
    report = fp8jax.explain(Nanodo(), recipe, TOKENS)
    eight = [p for p in report.program.traced if p.has_codes]
    assert sum(p.occurrences for p in eight) == products
    # Beside them QK, AV and their gradients, and the three products of the tied head.
    rest = sum(p.occurrences for p in report.program.traced) - products
    assert rest == 6 * LAYERS + 3 + (6 * LAYERS if recipe.name == "switchback" else 0)
    assert report.program.backend == jax.default_backend()
    assert sum(p.occurrences for p in report.program.compiled) >= products
    saved = f"{recipe.linear.spec('x_residual')}" if recipe.linear.x_residual else "the input itself"
    assert len(report.program.residuals) >= 4  # a line for each shape
    assert all(saved in line for line in report.program.residuals)
    assert f"  saved {report.program.residuals[0]}" in str(report.program)
    assert len(report.quantized_layers) == 6 * LAYERS
    assert {layer.shape for layer in report.quantized_layers} >= {(WIDTH, 2, WIDTH // 2), (2, WIDTH // 2, WIDTH)}


class ScannedNnx(nnx.Module):
    """Four stacked blocks and a head."""

    def __init__(self):
        block = lambda rngs: nnx.Linear(32, 32, rngs=rngs)  # noqa: E731
        self.blocks, self.head = nnx.vmap(block)(nnx.Rngs(0).split(4)), nnx.Linear(32, 64, rngs=nnx.Rngs(1))

    def __call__(self, x):
        run = nnx.scan(lambda x, block: jnp.tanh(block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(x, self.blocks))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(32, name="up")(x)), None


class ScannedLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(64, name="head")(scan(name="blocks")(x, None)[0])


@pytest.mark.parametrize("model", [ScannedNnx, ScannedLinen])
def test_a_report_names_the_bits_of_each_section_and_the_edges_of_a_loop(model):
    recipe = dataclasses.replace(fp8jax.recipes.nvfp4(), head=fp8jax.recipes.HEAD)
    report = fp8jax.explain(model(), recipe, jnp.ones((32, 32)))
    assert [row.reason for row in report.entries if row.path.startswith("blocks")] == [
        "in the first 1 of 4 blocks",
        "the recipe",
        "in the last 1 of 4 blocks",
    ]
    text = " ".join(str(report).split())
    assert "2 layers run in 4 or 8 bits" in text
    assert "In 4 bits by the recipe: forward e2m1:nv16 x e2m1:nvblock16" in text
    assert "In 8 bits by the recipe's head: forward e4m3:tensor x e4m3:tensor" in text


def test_what_cpu_makes_of_the_products():
    for recipe, names in ((TE, {"f8e4m3fn", "f8e5m2"}), (fp8jax.recipes.jetfire(), {"s8"})):
        report = fp8jax.explain(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), recipe, jnp.ones((8, 64)))
        dtypes = {name for p in report.program.compiled for name in p.operands}
        if jax.default_backend() == "cpu" and recipe is TE:
            # No instruction on a CPU multiplies fp8, and the program says so. (The input's gradient is unused.)
            assert not dtypes & names
            assert "fp8jax asked for 2 products, 0 of them multiply codes of 8 or 4 bits" in str(report.program)
            assert "WARNING: 1 products of e4m3 x e5m2 run in fp32: XLA has no such product for cpu" in str(
                report.program
            )
        else:
            assert dtypes & names
            assert re.search(r"fp8jax asked for \d+ products, [1-9]\d* of them multiply codes", str(report.program))


def test_the_program_says_what_computes_each_operation(monkeypatch):
    x, model = jnp.ones((8, 64)), nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    monkeypatch.setattr(choice, "on_cuda", lambda: False)
    report = fp8jax.explain(model, TE, x)
    counts = collections.Counter((name, c.impl, c.reason) for name, c in report.program.choices if name == "quantize")
    # The input, the weight for both products, and the gradient with its transposed copy at once; x transposed is read.
    assert counts == {("quantize", "xla", "not the kernel: it needs a CUDA GPU"): 4}
    assert sum(name == "matmul" for name, _ in report.program.choices) == 3
    # Once, however often JAX traces what is in it.
    assert str(report.program).splitlines().count("  quantize by xla: not the kernel: it needs a CUDA GPU") == 1
    monkeypatch.setattr(choice, "on_cuda", lambda: True)
    monkeypatch.setattr(quantize, "missing_triton", lambda kernel, fp8=True: "there is none")
    report = fp8jax.explain(model, TE, x)
    assert {c.reason for name, c in report.program.choices if name == "quantize"} == {"not the kernel: there is none"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            '  %c = (f32[8,8]{1,0}, s8[0]{0}) custom-call(%x, %y, %s), custom_call_target="__cublas$lt$matmul$f8"',
            ("__cublas$lt$matmul$f8", ("f8e4m3fn", "f8e5m2")),
        ),
        ("  ROOT %d.1 = f32[8,8]{1,0} dot(%x, %y), lhs_contracting_dims={1}", ("dot", ("f8e4m3fn", "f8e5m2"))),
        ("  %d = s32[8,8]{1,0} dot(s8[8,4]{1,0} %p, s8[8,4]{1,0} %q), metadata={}", ("dot", ("s8", "s8"))),
    ],
)
def test_products_are_read_from_programs_of_xla(line, expected):
    text = (
        f"ENTRY %main {{\n  %x = f8e4m3fn[8,4]{{1,0}} parameter(0)\n  %y = f8e5m2[8,4]{{1,0}} parameter(1)\n{line}\n}}"
    )
    (actual,) = compiled.parse_products(text)
    assert actual == compiled.Product(*expected, 1, 1)
    assert actual.has_codes


PROGRAM = """HloModule jit_step
%multiply (p: bf16[8,4], q: f8e4m3fn[8,4]) -> f32[8,8] {
  %p = bf16[8,4]{1,0} parameter(0)
  %q = f8e4m3fn[8,4]{1,0} parameter(1)
  %r = bf16[8,4]{1,0} convert(%q)
  ROOT %d = f32[8,8]{1,0} dot(%p, %r), metadata={op_name="jit(step)/jvp(fp8jax:e4m3*e5m2)/dot_general"}
}

%body (t: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %t = (s32[], bf16[8,4]{1,0}) parameter(0)
  %x = bf16[8,4]{1,0} get-tuple-element(%t), index=1
  %f = f32[8,8]{1,0} fusion(%x, %y), kind=kCustom, calls=%multiply
  %a = f8e4m3fn[8,4]{1,0} copy(%y)
  %m = f32[8,8] custom-call(%a, %a), custom_call_target="mosaic_gpu", metadata={op_name="fp8jax:e4m3*e4m3/fp8_matmul/c"}
}

ENTRY %main (x: bf16[8,4]) -> f32[8,8] {
  %x = bf16[8,4]{1,0} parameter(0)
  %w = (s32[], bf16[8,4]{1,0}) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %d = f32[8,8]{1,0} dot(%x, %x), metadata={op_name="jit(step)/fp8jax:bf16*e4m3/dot_general"}
}
"""


def test_what_became_of_products_is_told_with_its_reason_and_a_remedy():
    actual = {p.requested_formats: p for p in compiled.parse_products(PROGRAM)}
    assert {(p.operation, p.kernel, p.occurrences, p.executions, p.widened_dtype) for p in actual.values()} == {
        ("dot", "", 1, 7, "bf16"),
        ("mosaic_gpu", "fp8_matmul", 1, 7, None),
        ("dot", "", 1, 1, None),  # one operand was not to be quantized
    }
    widened = [actual["e4m3 x e5m2"]]
    (line,) = compiled.describe_widened(
        widened, [("matmul", Choice("xla", "cuBLASLt's product, scales applied in it"))]
    )
    assert line == (
        "7 products of e4m3 x e5m2 run in bf16: XLA did not match the pattern of cuBLASLt's FP8 matmul; "
        "set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false before JAX starts"
    )
    (line,) = compiled.describe_widened(widened, [("matmul", Choice("xla", "no kernel for scales; codes are decoded"))])
    assert "no kernel for scales" in line
    assert "blocks of 128x128 have kernels" in line
    wide = dataclasses.replace(widened[0], operands=("f32", "f32"))
    assert "run in fp32, slower than bf16" in compiled.describe_widened([wide])[0]


@pytest.mark.parametrize(
    ("x", "leaks"),
    [
        ("e4m3", True),
        ("e4m3:token", False),
        ("e4m3:group32", False),
        ("e4m3:block32", True),
        ("e4m3:block1", False),
        ("e4m3:mx32", True),
        ("e4m3:mx32+token", False),
        ("e4m3:mx32+ocp", False),
    ],
)
def test_scales_that_span_tokens_are_those_that_let_the_future_in(x, leaks):
    """Marks agree with the model: a change of the last token changes a layer's result for the first one."""
    linear = fp8jax.recipes.Linear(x, "e4m3", "e5m2", x_residual="e4m3")
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    report = fp8jax.explain(model, linear)
    assert [layer.token_spanning_spec for layer in report.leaking_layers] == (
        [str(fp8jax.QuantSpec.parse(x))] if leaks else []
    )
    assert ("scales that span tokens" in str(report)) == leaks
    quantized = fp8jax.nnx.quantize(model, linear)
    text = jax.random.normal(jax.random.key(0), (8, 64))
    changed = quantized(text.at[-1].mul(100.3))[0] != quantized(text)[0]
    assert bool(changed.any()) == leaks


class Odd(nnx.Module):
    """A convolution, and a custom matrix."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.up = nnx.Linear(8, 8, dtype=jnp.bfloat16, rngs=rngs)
        self.own = Own()

    def __call__(self, x: jax.Array, *, double: bool) -> jax.Array:
        return self.own(self.up(self.conv(x))) * (2 if double else 1)


class Own(nnx.Module):
    def __init__(self) -> None:
        self.matrix = nnx.Param(jnp.eye(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.matrix[...]


def test_what_is_left_alone_has_a_reason():
    report = fp8jax.explain(Odd(nnx.Rngs(0)), fp8jax.recipes.switchback(), jnp.ones((2, 5, 8)), double=True)
    skipped = {layer.path: (layer.shape, layer.reason.split(":")[0]) for layer in report.skipped_layers}
    assert skipped == {"conv": ((3, 8, 8), "convolutions are not quantized")}
    up, own_layer = report.quantized_layers
    assert (own_layer.path, own_layer.kind, own_layer.shape) == ("own", "Own", (8, 8))
    assert up.residual == "bfloat16, 2 B/element"
    assert up.products["wgrad"] == "bfloat16"
    assert any(p.operation == "conv_general_dilated" for p in report.program.traced)
    for word in ("int8:token x int8:tensor", "convolutions are not quantized"):
        assert word in str(report)
    assert "bfloat16, 2 B/element" in report.details


def test_flax_that_is_jitted_or_scanned_is_found():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return nn.Dense(8)(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x, _ = Jitted()(x)
            return nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)[0]

    Jitted = nn.jit(Block)
    x = jnp.ones((4, 8))
    Model().init(jax.random.key(0), x)
    report = fp8jax.explain(Model(), TE, x)
    kernels = {layer.path.rpartition("/")[0]: layer.shape for layer in report.quantized_layers}
    assert kernels == {"JitBlock_0": (8, 8), "JitBlock_1": (8, 8), "ScanBlock_0": (3, 8, 8)}
    run = [p.executions for p in report.program.traced if p.operands == ("float8_e4m3fn", "float8_e4m3fn")]
    assert run == [2 + 3]


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="pass sample inputs to explain"):
        fp8jax.explain(Nanodo(), TE)
    with pytest.raises(TypeError, match="expects an NNX or Linen module, not dict"):
        fp8jax.explain({}, TE)
    with pytest.raises(ValueError, match="no layer is left for 'nothing'"):
        fp8jax.explain(MiniGPT(rngs=nnx.Rngs(0)), fp8jax.Rule("nothing", TE))
    plain = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="rules or a recipe: explain"):
        fp8jax.explain(plain)
    with pytest.raises(TypeError, match=r"arguments of a call of a quantized model: explain\(model, x\)"):
        fp8jax.explain(fp8jax.nnx.quantize(plain, "te_current"))
    for model in (plain, nn.Dense(4)):
        with pytest.raises(
            TypeError, match=r"(Linear|Dense) has no recipe, .* array of shape \(2, 4\) .*explain\(model, r"
        ):
            fp8jax.explain(model, jnp.ones((2, 4)))
    with pytest.raises(TypeError, match=r"call the method explain\(\*args\) of a transformed function"):
        fp8jax.explain(fp8jax.transform(lambda p, x: x @ p, "coat"), jnp.ones((4, 4)), jnp.ones((2, 4)))


class Encoder(nn.Module):
    encoder: nn.Module

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.encoder(x)


def test_a_quantized_linen_model_needs_no_rules():
    model, x = Encoder(nn.Dense(8)), jnp.ones((2, 8))
    rules = [fp8jax.Rule("encoder", "te_delayed"), "coat"]
    quantized = fp8jax.linen.quantize(model, rules)
    assert fp8jax.explain(quantized, x).details == fp8jax.explain(model, rules, x).details
    with pytest.raises(TypeError, match="whole quantized Linen model, not a submodule"):
        fp8jax.explain(quantized.encoder, x)


@pytest.mark.parametrize("make", [lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)), lambda: nn.Dense(4)])
def test_layers_with_a_state_are_explained(make):
    report = fp8jax.explain(make(), fp8jax.recipes.te_delayed(), jnp.ones((2, 8)))
    assert "float8_e5m2 x float8_e4m3fn" in str(report.program)


class Precise(nnx.Module):
    """As umT5: two of three layers ask for the highest precision."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wi = nnx.Linear(16, 24, precision="highest", rngs=rngs)
        self.mid = nnx.Linear(24, 24, rngs=rngs)
        self.wo = nnx.Linear(24, 16, precision="highest", rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wo(nnx.relu(self.mid(nnx.relu(self.wi(x)))))


class PreciseLinen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(24, name="mid")(nn.relu(nn.Dense(24, precision="highest", name="wi")(x))))
        return nn.Dense(16, precision="highest", name="wo")(x)


@pytest.mark.parametrize(
    ("model", "recipe"), covering([lambda: Precise(nnx.Rngs(0)), PreciseLinen], ["coat", "te_delayed"])
)
def test_layers_that_ask_for_a_precision_are_marked(model, recipe):
    report = fp8jax.explain(model(), recipe, jnp.ones((8, 16)))
    assert [layer.path for layer in report.quantized_layers] == ["mid"]
    assert report.program is None
    reasons = {layer.path: layer.reason for layer in report.skipped_layers}
    assert set(reasons) == {"wi", "wo"}
    assert all("asks for precision" in reason for reason in reasons.values())
    (note,) = report.notes
    assert note.startswith("a call raises ValueError: 2 matmuls ask for a precision")
    assert re.search(r"wi.* for precision .*test_explain.py:\d+ ", note)
    assert "fp8jax.Rule('wi|wo', None)" in note


@pytest.mark.parametrize("spec", ["e4m3:mx32+ocp+roundup", "e2m1:nv16"])
def test_experts_on_blackwell_are_said_to_decode_their_codes(spec):
    rows = fp8jax.quantize(jnp.ones((32, 64)), spec)
    matrices = jax.vmap(lambda w: fp8jax.quantize(w, spec))(jnp.ones((2, 16, 64)))
    with choice.target(capability=100):
        actual, kernel = grouped_hopper.choose_kernel(rows, matrices, 64, False)
    assert kernel is None
    product = compiled.Product("dot", ("bf16", "bf16"), 1, 1, "e2m1 x e2m1")
    (line,) = compiled.describe_widened([product], [("grouped matmul", actual)])
    assert line == (
        "1 products of e2m1 x e2m1 run in bf16: a loop over tiles, codes are decoded, not the kernel: it needs a "
        "Hopper GPU and jax >= 0.11; on this GPU codes save memory, no time"
    )
