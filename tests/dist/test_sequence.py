"""Activations of tensor and sequence parallelism, gathered and scattered as codes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import fp8jax
from fp8jax.core.qtensor import from_bytes
from fp8jax.core.scaling import find_scaling
from fp8jax.dist import gather_linear, gather_sequence, scatter_sequence, sequence, sequence_collectives
from fp8jax.dist.collectives import Collective, collectives
from fp8jax.ops.products import operands
from tests.dist import blocks, programs
from tests.distance import order, relative
from tests.programs import outputs
from tests.rows import covering, few, slow

SHARDED, REPLICATED, COLUMNS = P(None, "tensor"), P(), P(None, None, "tensor")
SPECS = ["e4m3", "int8", "e5m2:token", "e4m3:group32", "int8:block8", "e4m3:mx32", "e4m3:mx32+token", "e4m3:mx32+ocp"]
STATELESS = [
    n
    for n in fp8jax.recipes.NAMES
    if not any(p.collects_stats for p in fp8jax.recipes.get(n).linear.stateful_strategies.values())
]
QUANTIZED = [name for name in STATELESS if fp8jax.recipes.get(name).linear.is_quantized]
# Standard deviation of the rounding error of e4m3: uniform within half a step.
ROUNDING = 2.0**-4 / 3**0.5
# Groups and blocks that the devices of the tests do not split: no scale depends on the number of devices.
FINE = dataclasses.replace(
    fp8jax.recipes.deepseek(),
    linear=fp8jax.recipes.Linear(
        "e4m3:group16", "e4m3:block16", "e4m3:group16", x_wgrad="e4m3:group16", dy_wgrad="e4m3:group16"),
)  # fmt: skip
X = jax.random.normal(jax.random.key(0), (2, 64, 64)) * jnp.exp(2 * jax.random.normal(jax.random.key(1), (2, 64, 1)))


@functools.cache
def mesh(devices=8):
    return jax.make_mesh((devices,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def mapped(function, in_specs=SHARDED, out_specs=REPLICATED, devices=8, check=False):
    return jax.shard_map(function, mesh=mesh(devices), in_specs=in_specs, out_specs=out_specs, check_vma=check)


def operand_of(x, spec, strategy="current"):
    """Returns the decoded operand of a product, quantized on one device."""
    q = operands.make_codes(x.reshape(-1, x.shape[-1]), spec, find_scaling(strategy))
    return from_bytes(q).dequantize(x.dtype).reshape(x.shape)


@pytest.mark.parametrize(
    ("devices", "spec"),
    few([(n, spec) for n in (2, 8) for spec in SPECS], *((8 if i % 3 else 2, spec) for i, spec in enumerate(SPECS))),
)
def test_a_gathered_sequence_is_what_a_product_of_the_whole_reads(spec, devices):
    """The bits are equal on every mesh, also if a scale spans tokens or microscales are folded."""
    run = mapped(functools.partial(gather_sequence, axes="tensor", wire_format=spec), devices=devices)
    quantize_unsharded = jax.jit(functools.partial(operand_of, spec=fp8jax.QuantSpec.parse(spec)))
    for x in (X, X.astype(jnp.bfloat16)):
        np.testing.assert_array_equal(np.asarray(jax.jit(run)(x)), np.asarray(quantize_unsharded(x)))
    actual = [request for request in programs.asked_for(run, X) if request[0] == "all_gather"]
    assert ("all_gather", "ui8", X.size // devices) in actual
    assert sum(size for *_, size in actual) <= X.size // devices * (1 + 4 / 32)


def test_a_recipes_codes_are_gathered_under_its_own_scales():
    """COAT's scales are rounded up to bf16."""
    linear_recipe = fp8jax.recipes.coat().linear
    expected = operand_of(X, linear_recipe.spec("x"), "two_stage")
    assert (expected != operand_of(X, linear_recipe.spec("x"))).any()
    run = mapped(functools.partial(gather_sequence, axes="tensor", wire_format=linear_recipe))
    np.testing.assert_array_equal(np.asarray(jax.jit(run)(X)), np.asarray(expected))


def test_a_sequence_is_cut_over_several_axes():
    """Gathering equals that over one axis of as many devices. Its gradient is a reduce-scatter in bf16."""
    axes = ("outer", "inner")
    two = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    spec = P(None, axes)

    def both(x):
        gathered = gather_sequence(x, axes, wire_format="e4m3", gradients="bf16")
        codes = scatter_sequence(gathered * 4.0 ** jax.lax.axis_index(axes), axes, wire_format="e4m3")
        return gathered, scatter_sequence(gathered, axes, wire_format="bf16", gradients="bf16"), codes

    run = jax.shard_map(both, mesh=two, in_specs=spec, out_specs=(REPLICATED, spec, spec), check_vma=False)
    whole, scattered, codes = jax.jit(run)(X)
    expected = jax.jit(functools.partial(operand_of, spec=fp8jax.QuantSpec.parse("e4m3")))(X)
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(expected))
    np.testing.assert_allclose(np.asarray(scattered), 8 * np.asarray(expected), rtol=2.0**-7)
    assert relative(np.asarray(codes), sum(4.0**i for i in range(8)) * np.asarray(expected)) < ROUNDING
    grads = jax.jit(jax.grad(lambda x: jnp.sum(run(x)[0] * X)))(X)
    np.testing.assert_allclose(np.asarray(grads), np.asarray(X), rtol=2.0**-7)


@pytest.mark.parametrize("name", few(QUANTIZED, "coat", "te_current", "deepseek", "int8_block", "moss"))
def test_products_round_what_was_gathered_to_the_same_codes_again(name):
    """Inputs and gradients that are decoded to bf16 quantize to the same codes again."""
    linear_recipe, x = fp8jax.recipes.get(name).linear, X.astype(jnp.bfloat16).reshape(-1, 64)
    for side in ("x", "dy"):
        spec = linear_recipe.spec(side)
        if spec is None or spec.rounding == "stochastic":
            continue
        codes = operands.make_codes(x, spec, linear_recipe.stateless_strategy(side))
        codes_of_decoded = operands.make_codes(
            from_bytes(codes).dequantize(jnp.bfloat16), spec, linear_recipe.stateless_strategy(side)
        )
        if codes.microscale is None:
            np.testing.assert_array_equal(np.asarray(codes.codes), np.asarray(codes_of_decoded.codes))
        else:  # rounding a group's amax up to bf16 can change the power of two above it
            values = (np.asarray(from_bytes(q).dequantize()) for q in (codes, codes_of_decoded))
            np.testing.assert_allclose(*values, rtol=2.0**-8, atol=2.0**-9 * float(jnp.max(codes.scale)))
        np.testing.assert_allclose(codes.scale, codes_of_decoded.scale, rtol=2.0**-8)


@pytest.mark.parametrize("name", few(QUANTIZED, "moss", "moss_mx", "coat", "deepseek", "switchback", "int8_block"))
def test_a_layer_reads_the_gathered_codes_themselves(name):
    recipe, x = fp8jax.recipes.get(name), jnp.concatenate([X.astype(jnp.bfloat16)] * 4, 1)
    w = (jax.random.normal(jax.random.key(2), (64, 256)) / 8).astype(jnp.bfloat16)
    ins, key = (SHARDED, SHARDED), jax.random.key(3) if recipe.linear.is_stochastic else None

    def layer(x, w):
        return gather_linear(x, [w], "tensor", recipe=recipe, key=key)[0]

    def gather_then_multiply(x, w):
        return fp8jax.linear(gather_sequence(x, "tensor", recipe), w, recipe=recipe, key=key)

    actual, expected = (jax.jit(mapped(f, ins, COLUMNS, 2))(x, w) for f in (layer, gather_then_multiply))
    assert relative(actual, expected) < 2.0**-7  # scales of decoded bf16 values
    if recipe.linear.x_residual == "same":
        dtype = fp8jax.formats.get(recipe.linear.spec("x").format).dtype
        shapes = outputs(mapped(layer, ins, COLUMNS, 2), dtype, x, w)
        assert (512, 64) not in shapes
        assert (512, 64) in outputs(mapped(gather_then_multiply, ins, COLUMNS, 2), dtype, x, w)


@pytest.mark.parametrize(("spec", "devices"), covering(["e4m3:token", "int8", "e5m2:group32"], [8, 2]))
def test_parts_of_a_sum_are_rounded_once_under_scales_that_all_share(spec, devices):
    spec = fp8jax.QuantSpec.parse(spec)
    terms = jax.random.normal(jax.random.key(4), (devices, 2, 64, 64)) * X
    run = mapped(lambda x: scatter_sequence(x[0], "tensor", spec), P("tensor"), SHARDED, devices)
    actual = jax.jit(run)(terms)
    fmt, values = spec.format, np.asarray(terms, np.float32)
    groups = {"token": 64, "tensor": 0}.get(spec.granularity, spec.group_size)
    split = values.reshape(devices, 2, 64, -1, groups) if groups else values.reshape(devices, 1, 1, 1, -1)
    largest = np.abs(split).max((0, -1), keepdims=True)
    scale = largest * np.float32(1 / fp8jax.formats.get(fmt).max)
    units = split * (np.float32(1) / scale)
    dtype = fp8jax.formats.get(fmt).dtype
    codes = np.rint(units) if fmt == "int8" else units.astype(dtype).astype(np.float64)
    expected = (codes.astype(np.float64) * scale).sum(0).reshape(2, 64, 64)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * float(largest.max()))


def pair(f, x, t):
    """Returns a compiled function of parameters and x that returns a function's result and its gradients."""
    return jax.jit(lambda p, x: (lambda y, back: (y, back(t)))(*jax.vjp(f, p, x)))


@functools.cache
def on_one_device(recipe):
    x, t = jax.random.normal(jax.random.key(9), (2, 1, 64, blocks.WIDTH))
    return pair(functools.partial(blocks.layer, recipe=recipe), x, t)(blocks.params(), x)


def trees(recipe, sums, devices, check=True):
    """Returns result and gradients of input and weights: on devices, on one device, and on one device in bf16."""
    p, (x, t) = blocks.params(), jax.random.normal(jax.random.key(9), (2, 1, 64, blocks.WIDTH))
    layer = functools.partial(blocks.parallel_layer, recipe=recipe, sums=sums)
    actual = pair(mapped(layer, (blocks.SPECS, SHARDED), SHARDED, devices, check), x, t)(p, x)
    assert actual[0].sharding.spec == SHARDED
    names = sorted(p)
    results = (actual, on_one_device(recipe), on_one_device(fp8jax.recipes.bf16()))
    return [(tree[0], tree[1][1], *(tree[1][0][name] for name in names)) for tree in results]


@pytest.mark.parametrize("devices", [slow(2), slow(4), 8])
def test_a_layer_in_bf16s_form_is_that_of_one_device(devices):
    """Equal up to the order of sums: all in fp32, including gradients of the norms' scales."""
    actual, on_one_device_, _ = trees(fp8jax.recipes.bf16(), None, devices)
    assert max(relative(a, b) for a, b in zip(actual, on_one_device_, strict=True)) < order(blocks.INNER)


@pytest.mark.parametrize("devices", [slow(2), slow(4), 8])
def test_codes_of_a_layer_do_not_depend_on_the_mesh(devices):
    """If devices split no scale and sums are unquantized, results and input gradients equal those of one device.

    Exceptions are the order of sums, and a code that flips at a tie, about once here: all later codes of that token may
    then differ. In the forward pass most tokens are not affected; gradients sum over tokens. Weight gradients that read
    a gathered gradient quantize it along tokens. It was already rounded along channels, unlike on one device.
    """
    (result, of_x, *actual), (expected, want_x, *expected_gradients), _ = trees(FINE, "fp32", devices)
    tokens = [relative(a, b) for a, b in zip(result[0], expected[0], strict=True)]
    assert np.median(tokens) < order(blocks.INNER)
    # Four tokens differ by two roundings.
    flipped = 2**0.5 * ROUNDING * (4 / len(tokens)) ** 0.5
    assert max(relative(result, expected), relative(of_x, want_x)) < flipped
    # Two roundings compared with one: three errors.
    for name, a, b in zip(sorted(blocks.SPECS), actual, expected_gradients, strict=True):
        assert relative(a, b) < (3**0.5 * ROUNDING if name in ("out", "down") else flipped), name


@pytest.mark.parametrize(
    ("name", "devices"),
    [("te_current", 8), pytest.param("te_current", 2, marks=pytest.mark.slow),
     pytest.param("fast", 8, marks=pytest.mark.slow), pytest.param("coat", 4, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_layer_in_8_bits_is_as_far_from_fp32_as_on_one_device(name, devices):
    """Errors add in squares: four boundaries with sums, each with half a step of e4m3, uniform within it.

    Both errors are single samples. The mean square of n errors deviates by sqrt(2 / n), an eighth for the 128 gradients
    of a norm. The tolerance has three such deviations.
    """
    added = (2 * ROUNDING) ** 2
    trio = trees(fp8jax.recipes.get(name), None, devices, check=False)
    for result, single_device, exact in zip(*trio, strict=True):
        actual, from_exact, of_one = (
            relative(a, b) ** 2 for a, b in ((result, single_device), (result, exact), (single_device, exact))
        )
        chance = 3 * (2 / exact.size) ** 0.5
        assert from_exact < (of_one + added) * (1 + chance) + chance * of_one
        assert actual < (of_one + from_exact + added) * (1 + chance)


def perceptron(x, up, down, recipe, sums=None):
    (h,) = gather_linear(x, [up], "tensor", recipe=recipe, gradients=sums)
    y = fp8jax.linear(jax.nn.silu(h), down, recipe=recipe)
    return scatter_sequence(y, "tensor", sums or recipe, gradients=recipe)


PERCEPTRON = (SHARDED, SHARDED, P("tensor"))


def moved(recipe, sums, devices=8):
    """Returns the collectives of the forward and backward pass of an MLP, compiled."""
    run = mapped(functools.partial(perceptron, recipe=recipe, sums=sums), PERCEPTRON, SHARDED, devices)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 64, 128), (128, 256), (256, 128))]
    loss = lambda *args: jnp.sum(run(*args) ** 2)  # noqa: E731
    return collectives(jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile().as_text())


@pytest.mark.parametrize("devices", [2, slow(8)])
def test_a_compiled_program_moves_codes_and_little_else(devices):
    """One gather and one scatter in each direction: a byte per element, and fp32 scales."""
    size, tokens = 2 * 64 * 128, 2 * 64
    actual = sorted(moved(fp8jax.recipes.deepseek(), None, devices))
    gather, scatter = (
        [Collective("all-gather", "f32", 4 * tokens // devices, devices),
         Collective("all-gather", "u8", size // devices, devices)],
        [Collective("all-reduce", "f32", 4 * tokens, devices), Collective("all-to-all", "u8", size, devices)],
    )  # fmt: skip
    scales = [collective for collective in actual if collective.kind == "all-reduce"]
    assert sum(collective.nbytes for collective in scales) == 2 * 4 * tokens  # XLA may combine them
    assert [collective for collective in actual if collective not in scales] == sorted(gather * 2 + scatter[1:] * 2)
    bf16_collectives = moved(fp8jax.recipes.bf16(), None, devices)
    for recipe, recorded in ((fp8jax.recipes.deepseek(), actual), (fp8jax.recipes.bf16(), bf16_collectives)):
        planned = sequence_collectives(tokens, 128, devices, recipe, "fp32")
        planned = [collective._replace(times=1) for collective in planned for _ in range(collective.times)]
        sums, not_sums = (
            [collective for collective in planned if (collective.kind == "all-reduce") == is_sum]
            for is_sum in (True, False)
        )
        assert sorted(not_sums) == sorted(collective for collective in recorded if collective.kind != "all-reduce")
        assert sum(collective.nbytes for collective in sums) == (0 if recorded is bf16_collectives else 2 * 4 * tokens)
    assert {(collective.kind, collective.dtype) for collective in bf16_collectives} == {
        ("all-gather", "f32"),
        ("reduce-scatter", "f32"),
    }
    ratio = sum(collective.sent_bytes for collective in bf16_collectives) / sum(
        collective.sent_bytes for collective in actual
    )
    assert 3.5 < ratio < 4


def test_planned_crossings_count_what_is_gathered_again_and_powers_of_two():
    """16 tokens of 128 channels per device: codes, a byte per 32 elements, and 4 bytes per token's scale."""
    actual = sequence_collectives(
        128, 128, 8, fp8jax.QuantSpec.parse("e4m3:mx32+token+exact"), times=3, forward_gathers=2
    )
    codes, scales = ("all-gather", "u8", 16 * (128 + 4), 8), ("all-gather", "f32", 4 * 16, 8)
    terms = [("all-to-all", "u8", 128 * 128, 8), ("all-reduce", "f32", 4 * 128, 8)]
    assert actual == [Collective(*per_tensor, times) for times in (6, 3) for per_tensor in (codes, scales)] + [
        Collective(*per_tensor, 6) for per_tensor in terms]  # fmt: skip
    per_tensor = sequence_collectives(128, 128, 8, "e4m3")  # a scale per tensor is one number, and not counted
    assert [x[:3] for x in per_tensor] == [("all-gather", "u8", 2048)] * 2 + [("all-to-all", "u8", 16384)]
    assert {x.dtype for x in sequence_collectives(128, 128, 8, "fp16")} == {"f16"}
    for folded in ("e4m3:mx32+token", "e4m3:mx32"):
        assert [x[:3] for x in sequence_collectives(128, 128, 8, folded)[:2]] == [
            ("all-gather", "u8", 2048),
            scales[:3],
        ]
    gathers = [
        x for x in sequence_collectives(128, 128, 8, "jetfire") if x.kind == "all-gather"
    ]  # its dy is not quantized yet
    assert [x[1:3] for x in gathers] == [("u8", 16 * 128), ("f32", 4 * 4), ("bf16", 2 * 16 * 128)]


def test_what_travels_of_each_setting():
    operand, total = (
        functools.partial(sequence.operand_wire_format, "f"),
        functools.partial(sequence.sum_wire_format, "f"),
    )
    assert [operand(name, "x") for name in sequence.UNQUANTIZED_DTYPES] == [
        sequence.WireFormat(None, name) for name in sequence.UNQUANTIZED_DTYPES
    ]
    assert operand("jetfire", "dy") == sequence.WireFormat(None)  # rounded stochastically in the product
    assert [operand("nvfp4", "x"), total("nvfp4")] == [sequence.WireFormat(None)] * 2
    assert operand("auto", "x").dtype is None
    delayed = dataclasses.replace(fp8jax.recipes.te_current().linear, x="e4m3", dy="e5m2", margin=1)
    assert [operand(delayed, side).spec.format for side in ("x", "dy")] == ["e4m3", "e5m2"]
    token = fp8jax.QuantSpec("e4m3", "token")
    for wire_format in (
        "deepseek",
        delayed,
        "e4m3:block128",
        fp8jax.QuantSpec("e4m3", "group", 128, scale_format="bf16"),
    ):
        assert total(wire_format).spec == token
    for wire_format in ("e4m3", "e4m3:token", "e4m3:group32"):
        assert total(wire_format).spec == fp8jax.QuantSpec.parse(wire_format)
    for wire_format in (fp8jax.QuantSpec("e4m3", layer_axes=1), fp8jax.QuantSpec("e4m3", "token", axis=0)):
        with pytest.raises(ValueError, match=r"f: .* is not a supported wire format"):
            operand(wire_format, "x")


def test_codes_are_gathered_again_under_a_checkpoint():
    w, recipe = jnp.ones((64, 256)), fp8jax.recipes.deepseek()

    def layer(x, w):
        return gather_linear(x, [w], "tensor", recipe=recipe)[0]

    rematerialized = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    counts = []
    for f in (layer, rematerialized):
        grad = jax.grad(lambda *a, f=f: jnp.sum(mapped(f, (SHARDED, SHARDED), COLUMNS)(*a) ** 2), (0, 1))
        counts.append(programs.asked_for(grad, X, w).count(("all_gather", "ui8", X.size // 8)))
    assert counts == [1, 2]


def test_nan_is_seen_wherever_its_scale_reaches():
    x = X.at[1, 40, 3].set(jnp.nan)
    for spec, reached in (("e4m3:token", 64), ("e4m3", 1), ("int8", X.size)):
        actual = jax.jit(mapped(functools.partial(gather_sequence, axes="tensor", wire_format=spec)))(x)
        expected = operand_of(x, fp8jax.QuantSpec.parse(spec))
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        assert 1 <= np.isnan(actual).sum() <= reached
    shards = jnp.stack([x, *[X] * 7])
    run = mapped(lambda x: scatter_sequence(x[0], "tensor"), P("tensor"), SHARDED)
    assert np.isnan(jax.jit(run)(shards)).sum() == 64


@pytest.mark.parametrize(
    ("function", "shape", "options", "message"),
    [
        (
            gather_sequence,
            (2, 64, 64),
            {"wire_format": "int8:block32"},
            "shards of length 8 along dimension 1 are not a multiple",
        ),
        (
            gather_sequence,
            (32, 64, 64),
            {"wire_format": "int8:block32", "dim": 0},
            "shards of length 32 along dimension 0 are not a multiple",
        ),
        (
            gather_sequence,
            (2, 64, 64),
            {"wire_format": "e4m3:channel"},
            "e4m3:channel is not a supported wire format",
        ),
        (gather_sequence, (2, 64, 64), {"wire_format": "int10:group64"}, "is not a supported wire format"),
        (gather_sequence, (2, 64, 64), {"wire_format": "int8+stochastic"}, "rounds to nearest"),
        (gather_sequence, (2, 64, 64), {"wire_format": "te_delayed"}, "delayed scaling keeps a state"),
        (gather_sequence, (2, 64, 64), {"dim": -1}, "before the last one"),
        (gather_sequence, (64,), {}, "before the last one"),
        (scatter_sequence, (2, 60, 64), {}, "8 devices do not divide dimension 1"),
        (
            scatter_sequence,
            (2, 64, 64),
            {"gradients": "int8:block32"},
            "shards of length 8 along dimension 1 are not a multiple",
        ),
        (scatter_sequence, (2, 64, 64), {"wire_format": "e4m3:group128+expand"}, "is not a supported wire format"),
        (scatter_sequence, (2, 64, 64), {"wire_format": "fp7"}, "unknown number format"),
    ],
)
def test_what_cannot_travel_is_refused(function, shape, options, message):
    in_spec = SHARDED if function is gather_sequence and len(shape) == 3 else P("tensor") if len(shape) == 1 else P()
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            mapped(functools.partial(function, axes="tensor", **options), in_spec, P("tensor")), jnp.ones(shape)
        )


def test_outside_of_a_shard_map_the_message_says_what_to_do():
    for function in (gather_sequence, scatter_sequence):
        with pytest.raises(ValueError, match=r"must be called inside jax\.shard_map.*Map the block over the mesh"):
            function(X, "tensor")


def test_weights_and_their_codes_are_as_many():
    def multiply(x):
        return gather_linear(x, [X[0], X[0]], "tensor", recipe="coat", quantized=[None])[0]

    with pytest.raises(ValueError, match="2 weights were passed with 1 quantized"):
        jax.eval_shape(mapped(multiply), X)


@pytest.mark.parametrize("spec", ["int8:token", "int8:group32"])
def test_under_plain_jit_codes_travel_where_they_are_constrained_themselves(spec):
    """Codes are constrained to the shard, then replicated. Constraints on the array send its own dtype."""
    sharded, replicated = (jax.NamedSharding(mesh(), place) for place in (SHARDED, REPLICATED))
    constrain = jax.lax.with_sharding_constraint
    place = jax.NamedSharding(mesh(), P(None, "tensor"))
    x = jax.ShapeDtypeStruct((2, 64, 128), jnp.float32, sharding=sharded)
    w = jax.ShapeDtypeStruct((128, 256), jnp.float32, sharding=place)

    def codes(x, w):
        q = constrain(constrain(fp8jax.quantize(x, spec), sharded), replicated)
        return q.dequantize() @ w

    def array(x, w):
        return constrain(fp8jax.quantize(constrain(x, sharded), spec).dequantize(), replicated) @ w

    sent = []
    for f in (codes, array):
        actual = collectives(jax.jit(f).lower(x, w).compile().as_text())
        sent.append({collective.dtype for collective in actual if collective.nbytes >= x.size // 8})
    assert sent == [{"s8"}, {"f32"}]
