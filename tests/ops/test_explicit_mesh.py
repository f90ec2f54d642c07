"""Meshes with Explicit axes, JAX's default: quantized operations accept and return the shardings of plain ones."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import fp8jax
from fp8jax.ops.dispatch import choice, sharding
from fp8jax.ops.matmul.matmul import _dot_decoded
from fp8jax.ops.products.linear import key_from_data
from fp8jax.ops.quantization import quantize as ops
from tests.distance import relative
from tests.rows import covering, few

NAMES = fp8jax.recipes.NAMES
STATELESS = [name for name in NAMES if not fp8jax.recipes.get(name).linear.stateful_strategies]
KEY = jax.random.key(3)
PLAIN = fp8jax.recipes.bf16()
TOKENS = ("data", "fsdp")


@functools.cache
def mesh():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))


def normal(*shape, scale=1.0, seed=0):
    with jax.ensure_compile_time_eval():
        return scale * jax.random.normal(jax.random.key(seed + math.prod(shape)), shape)


def put(tree, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh(), spec)), tree, specs)


# A perceptron under data parallelism, fully sharded weights and tensor parallelism at once.
PARAMS = {"scale": (32,), "gate": (32, 64), "up": (32, 64), "down": (64, 32)}
SPECS = {"scale": P(), "gate": P("fsdp", "tensor"), "up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}


def perceptron(params, x, recipe, mesh_is_explicit):
    if recipe.linear.stateful_strategies:

        def linear(x, w, slot, **options):
            key = key_from_data(x) if recipe.linear.is_stochastic else None
            state = fp8jax.init_scaling(recipe, w)
            return fp8jax.scaled_linear(x, w, state, slot, recipe=recipe, key=key, **options)[0]

        h = fp8jax.rms_norm(x, params["scale"], recipe=recipe)
        gate, up = (linear(h, params[name], params["slots"][i]) for i, name in enumerate(("gate", "up")))
        h = fp8jax.glu(gate, up, recipe=recipe)
        return x + linear(h, params["down"], params["slots"][2], out_sharding=whole(mesh_is_explicit))
    options = {"recipe": recipe, "key": key_from_data(x) if recipe.linear.is_stochastic else None}
    weights = params["gate"], params["up"]
    x, gate, up = fp8jax.norm_linear(x, params["scale"], weights, residual=True, **options)
    return fp8jax.glu_linear(gate, up, params["down"], x, out_sharding=whole(mesh_is_explicit), **options)


def whole(explicit):
    """Adds the sharding that JAX requires if both sides of the contraction are sharded."""
    return P("data") if explicit else None


# The two that are left out compute as bf16 and as coat do; optimizers play no part here.
@pytest.mark.parametrize(
    "name",
    few(
        [name for name in NAMES if name not in ("coat_optimizer", "coat_activations")],
        "coat",
        "int8_fallback",
    ),
)
def test_a_mesh_changes_no_code_and_no_sharding(name):
    recipe = fp8jax.recipes.get(name)
    params = {key: normal(*shape, scale=0.3) for key, shape in PARAMS.items()}
    specs = dict(SPECS)
    if recipe.linear.stateful_strategies:
        params["slots"], specs["slots"] = jnp.zeros((3,)), P()
    x, target = normal(4, 16, 32), normal(4, 16, 32, seed=1)

    @functools.partial(jax.jit, static_argnums=3)
    def run(params, x, target, explicit):
        y, vjp_fn = jax.vjp(lambda params, x: perceptron(params, x, recipe, explicit), params, x)
        codes = [leaf for leaf in jax.tree.leaves(vjp_fn) if leaf.dtype == jnp.uint8]
        return (y, vjp_fn(target)), codes

    expected, want_codes = run(params, x, target, False)
    with jax.set_mesh(mesh()):
        operands = put(params, specs), *put((x, target), (P("data"), P("data")))
        actual, codes = run(*operands, True)
    assert relative(actual, expected) < 2e-6
    assert len(codes) == len(want_codes)
    for a, b in zip(codes, want_codes, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert jax.typeof(a).sharding.spec[0] == "data"
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves((operands[1], operands[:2])), strict=True):
        assert jax.typeof(a).sharding == jax.typeof(b).sharding


@pytest.mark.parametrize(
    ("name", "context"), covering(["coat", "int8_block"], ["in jax.set_mesh", "by the arrays alone"])
)
def test_data_parallelism_on_the_default_mesh_needs_nothing(name, context):
    recipe, mesh = fp8jax.recipes.get(name), jax.make_mesh((8,), ("data",))
    x, w = normal(8, 4, 32), normal(32, 16, scale=0.2)

    def loss(w, x):
        key = key_from_data(x) if recipe.linear.is_stochastic else None
        return jnp.mean(fp8jax.linear(x, w, recipe=recipe, key=key, bias=jnp.ones(16)) ** 2)

    expected = jax.jit(jax.value_and_grad(loss))(w, x)
    with jax.set_mesh(mesh) if context == "in jax.set_mesh" else contextlib.nullcontext():
        # The weight is not on the mesh: it is where `init` left it.
        actual = jax.jit(jax.value_and_grad(loss))(w, jax.device_put(x, jax.NamedSharding(mesh, P("data"))))
    assert relative(actual, expected) < 2e-6
    assert actual[1].sharding.is_fully_replicated


def linear(x, w, recipe, out=None):
    if recipe is PLAIN:
        return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), out_sharding=out)
    return fp8jax.linear(x, w, recipe=recipe, key=KEY, out_sharding=out)


def contraction(subscripts):
    def run(x, w, recipe, out=None):
        einsum = jnp.einsum if recipe is PLAIN else functools.partial(fp8jax.einsum, recipe=recipe, key=KEY)
        return einsum(subscripts, x, w, precision=None, preferred_element_type=jnp.bfloat16, out_sharding=out)

    return run


def rms_norm(x, w, recipe, out=None):
    return fp8jax.rms_norm(x, w, recipe=recipe)


def layer_norm(x, w, recipe, out=None):
    return fp8jax.layer_norm(x, w, w, recipe=recipe)


def glu(x, w, recipe, out=None):
    return fp8jax.glu(x, w, recipe=recipe)


def activation(x, w, recipe, out=None):
    return fp8jax.activation(x, recipe=recipe, activation="gelu") + w


def projection(x, w, recipe, out=None):
    if recipe is PLAIN:
        return jnp.einsum("bthc,hcd->btd", x, w, out_sharding=out)
    return fp8jax.attention_output(x, w, recipe=recipe, key=KEY, out_sharding=out)


def mapped(x, w, recipe, out=None):
    return jax.vmap(lambda x, w: fp8jax.linear(x, w, recipe=recipe, key=KEY))(x, w)


def scanned(x, w, recipe, out=None):
    layer = jax.checkpoint(lambda x, w: (fp8jax.linear(x, w, recipe=recipe, key=KEY), None))
    return lax.scan(layer, x, w)[0]


def prequantized_linear(x, w, recipe, out=None):
    if not recipe.linear.is_quantized:
        return fp8jax.linear(x, w, recipe=recipe)
    return fp8jax.linear(x, w, recipe=recipe, key=KEY, quantized=fp8jax.quantize_weight(w, recipe=recipe))


X, W = (4, 8, 32), (32, 16)
LAYOUTS = {
    "data": (linear, X, P("data"), W, P(), None),
    "data over two axes": (linear, X, P(TOKENS), W, P(), None),
    "sequences": (linear, X, P("data", "tensor"), W, P(), None),
    "inputs gathered": (linear, X, P("data"), W, P("data"), None),
    "outputs gathered": (linear, X, P("data"), W, P(None, "data"), P("data")),
    "columns": (linear, X, P("data"), W, P("fsdp", "tensor"), None),
    "rows": (linear, X, P("data", None, "tensor"), W, P("tensor", "fsdp"), P("data")),
    "rows, scattered": (linear, X, P("data", None, "tensor"), W, P("tensor"), P("data", "tensor")),
    "rows of x alone": (linear, X, P("data", None, "tensor"), W, P(), None),
    "ambiguous": (linear, X, P("data", None, "tensor"), W, P("tensor"), None),
    "conflicting": (linear, X, P("data"), W, P(None, "data"), None),
    "heads": (contraction("btd,dhc->bthc"), X, P("data"), (32, 4, 8), P(None, "tensor"), None),
    "turned": (contraction("btd,dhc->bhtc"), X, P("data"), (32, 4, 8), P("fsdp", "tensor"), P("data", "tensor")),
    "experts": (contraction("ebd,edh->ebh"), X, P("data", "tensor"), (4, *W), P("data"), None),
    "experts that differ": (contraction("ebd,edh->ebh"), X, P("data"), (4, *W), P(), None),
    "projection": (projection, (4, 8, 4, 8), P("data", None, "tensor"), (4, 8, 16), P("tensor"), P("data")),
    "vmap": (mapped, X, P("data", "fsdp"), (4, *W), P("data", None, "tensor"), None),
    "scan": (scanned, X, P("data"), (3, 32, 32), P(None, "fsdp"), None),
    "held": (prequantized_linear, X, P("data"), W, P("data"), None),
    "norm of sharded channels": (rms_norm, X, P("data", None, "tensor"), (32,), P("tensor"), None),
    "norm, replicated scale": (layer_norm, X, P("data", None, "tensor"), (32,), P(), None),
    "glu": (glu, X, P("data", None, "tensor"), X, P("data", None, "tensor"), None),
    "activation": (activation, X, P("data", "fsdp", "tensor"), X, P("data", "fsdp", "tensor"), None),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_gradients_lie_where_plain_ones_do(layout):
    f, x_shape, x_spec, w_shape, w_spec, out = LAYOUTS[layout]
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh(), spec))
        for shape, spec in ((x_shape, x_spec), (w_shape, w_spec))
    )

    def types(recipe):
        def run(x, w):
            y, vjp_fn = jax.vjp(lambda x, w: f(x, w, recipe, out), x, w)
            return y, *vjp_fn(y)

        try:
            return [(t.shape, t.sharding.spec) for t in jax.eval_shape(run, x, w)]
        except Exception as error:  # JAX's class has no public name
            return type(error).__name__

    with jax.set_mesh(mesh()):
        expected = types(PLAIN)
        assert (expected == "ShardingTypeError") == (layout in ("ambiguous", "conflicting", "experts that differ"))
        for name in ("coat_fast", "deepseek", "int8_block", "switchback"):
            assert types(fp8jax.recipes.get(name)) == expected, name


@pytest.mark.parametrize("layout", ["sequences", "rows, scattered", "experts", "turned"])
def test_values_are_those_of_one_device(layout):
    f, x_shape, x_spec, w_shape, w_spec, out = LAYOUTS[layout]
    x, w, recipe = normal(*x_shape), normal(*w_shape, scale=0.2), fp8jax.recipes.int8_block()

    @functools.partial(jax.jit, static_argnums=2)
    def run(x, w, out):
        y, vjp_fn = jax.vjp(lambda x, w: f(x, w, recipe, out), x, w)
        return y, *vjp_fn(y)

    expected = run(x, w, None)
    with jax.set_mesh(mesh()):
        assert relative(run(*put((x, w), (x_spec, w_spec)), out), expected) < 2e-6


@pytest.mark.parametrize("spec", [P("data", "tensor"), P(TOKENS)], ids=str)
def test_codes_and_scales_of_matrices_are_those_of_one_device(spec):
    x = normal(16, 256)
    kinds = [
        ("e4m3", "same", {"strategy": "two_stage"}),
        ("e4m3:group128", "e4m3:group128", {}),
        ("int8:block32+stochastic", "same", {"key": KEY}),
        ("e4m3:mx32+token", None, {}),
    ]
    run = jax.jit(lambda x: [ops.quantize(x, rows, columns, **options) for rows, columns, options in kinds])
    expected = run(x)
    with jax.set_mesh(mesh()):
        actual = run(put(x, spec))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for (rows, columns), (_, same, _) in zip(actual, kinds, strict=True):
        assert jax.typeof(rows.codes).sharding == jax.typeof(put(x, spec)).sharding
        assert same is None or jax.typeof(columns.codes).sharding == jax.typeof(put(x, spec).T).sharding


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")], ids=str)
def test_codes_of_weights_travel_and_their_gradients_are_summed_once(spec):
    mesh, recipe = jax.make_mesh((8,), ("data",)), fp8jax.recipes.switchback()
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in (((64, 8, 256), P("data")), ((256, 512), spec))
    )
    loss = lambda x, w: jnp.sum(fp8jax.linear(x, w, recipe=recipe, out_sharding=P("data")) ** 2)  # noqa: E731
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
    calls = re.findall(r"= \(?(\w+)\[([\d,]*)\].*? (all-\w+|reduce-scatter|collective-permute)\(", text)
    moved = sorted((kind, dtype) for dtype, shape, kind in calls if math.prod(map(int, shape.split(","))) >= 256 * 64)
    gathered = [] if spec == P() else [("all-gather", "s8")] * 2
    assert moved in (sorted([*gathered, ("all-reduce", "f32")]), sorted([*gathered, ("reduce-scatter", "f32")]))


@pytest.mark.parametrize(("rows", "inputs"), [("data", None), (None, "data")])
def test_codes_travel_where_a_product_decodes_them(rows, inputs):
    mesh = jax.make_mesh((8,), ("data",))
    a, b = (
        fp8jax.quantize(jax.device_put(normal(*shape), jax.NamedSharding(mesh, spec)), "int8:group32")
        for shape, spec in (((64, 512), P("data")), ((128, 512), P(rows, inputs)))
    )
    multiply = functools.partial(
        sharding.matmul_sharded, functools.partial(_dot_decoded, jnp.bfloat16), spec=("data", None)
    )
    with jax.set_mesh(mesh):
        text = jax.jit(multiply).lower(a, b).compile().as_text()
    gathered = re.findall(r"= \(?(\w+)\[([\d,]*)\].*? all-gather\(", text)
    assert {dtype for dtype, shape in gathered if math.prod(map(int, shape.split(","))) == 128 * 512} == {"s8"}


def test_an_einsum_refuses_another_precision():
    with pytest.raises(ValueError, match="does not support precision='highest'"):
        fp8jax.einsum("td,dh->th", jnp.ones((2, 4)), jnp.ones((4, 2)), "highest", recipe=fp8jax.recipes.te_current())


@pytest.mark.parametrize("name", ["coat", pytest.param("fast", marks=pytest.mark.slow)])
def test_operations_of_kernels_take_channels_that_a_mesh_cuts(name, monkeypatch):
    """A program for a CUDA GPU with sharded channels; here it runs the references of the kernels."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    recipe = fp8jax.recipes.get(name)
    shapes = {"scale": (128,), "gate": (128, 256), "up": (128, 256), "down": (256, 128)}
    params = {key: normal(*shape, scale=0.2).astype(jnp.bfloat16) for key, shape in shapes.items()}
    x = normal(4, 32, 128).astype(jnp.bfloat16)

    def loss(params, x, explicit):
        return jnp.mean(jnp.square(perceptron(params, x, recipe, explicit).astype(jnp.float32)))

    with choice.target(capability=90), choice.record_choices() as choices:
        expected = jax.jit(jax.grad(loss), static_argnums=2)(params, x, False)
        with jax.set_mesh(mesh()):
            actual = jax.jit(jax.grad(loss), static_argnums=2)(put(params, SPECS), put(x, P("data")), True)
    assert {selected.impl for operation, selected in choices if operation == "activation"} == {"triton"}
    assert relative(actual, expected) < 1e-2
    assert {key: jax.typeof(g).sharding.spec for key, g in actual.items()} == {
        key: jax.typeof(w).sharding.spec for key, w in put(params, SPECS).items()
    }
