"""Frozen weights and adapters as parameters of a transformed function, against explicit calls."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.ops.products.linear import key_from_data
from tests.distance import relative
from tests.programs import dots, outputs
from tests.rows import covering, slow

KEYS = jax.random.split(jax.random.key(0), 6)
LAYERS, TOKENS, WIDTH, INNER, RANK = 3, 24, 64, 96, 4
X = jax.random.normal(KEYS[0], (2, TOKENS // 2, WIDTH))
PARAMS = {
    "layers": {
        "up": {"kernel": jax.random.normal(KEYS[1], (LAYERS, WIDTH, INNER)) / 8},
        "down": {"kernel": jax.random.normal(KEYS[2], (LAYERS, INNER, WIDTH)) / 10},
        "norm": {"scale": jnp.linspace(0.5, 2, LAYERS * WIDTH).reshape(LAYERS, WIDTH)},
    },
    "head": {"kernel": jax.random.normal(KEYS[3], (WIDTH, 40)) / 8},
}
TARGETS = "layers/.*/kernel"


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def model(params, x, cast=lambda p: p):
    def layer(x, p):
        h = norm(x, p["norm"]["scale"])
        return x + jax.nn.silu(h @ p["up"]["kernel"]) @ p["down"]["kernel"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, cast(params["layers"]))
    return x @ params["head"]["kernel"]


def by_hand(base, adapters, x, recipe):
    def layer(x, parts):
        p, up, down = parts
        h = norm(x, p["norm"]["scale"])
        h = fp8jax.lora.linear(h, p["up"]["kernel"], up, recipe=recipe, key=key_from_data(h))
        h = jax.nn.silu(h)
        return x + fp8jax.lora.linear(h, p["down"]["kernel"], down, recipe=recipe, key=key_from_data(h)), None

    each = base["layers"], adapters["layers/up/kernel"], adapters["layers/down/kernel"]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, each)
    return x @ base["head"]["kernel"]


def frozen_with_adapters(spec="e4m3", dtype=jnp.float32):
    base = fp8jax.lora.freeze(PARAMS, spec, targets=TARGETS) if spec else PARAMS
    adapters = fp8jax.lora.init(KEYS[4], base, rank=RANK, alpha=8.0, targets=TARGETS, dtype=dtype)
    return base, jax.tree.map(lambda v: v + 0.1 * jax.random.normal(KEYS[5], v.shape, v.dtype), adapters)


def gradients(fn, adapters, x):
    return jax.jit(jax.value_and_grad(lambda a, x: jnp.sum(jnp.sin(fn(a, x))), (0, 1)))(adapters, x)


@pytest.mark.parametrize(
    ("recipe", "spec", "dtype"),
    [
        slow("te_current", "e4m3", jnp.bfloat16),
        ("deepseek", "e4m3:block128", jnp.float32),
        ("int8_block", "int8:block128", jnp.float32),
        ("te_current", None, jnp.float32),
        ("moss", "e4m3:token", jnp.float32),
    ],
)
def test_a_function_is_what_one_writes_by_hand_bit_for_bit(recipe, spec, dtype):
    base, adapters = frozen_with_adapters(spec, dtype)
    fast, part = fp8jax.transform(model, recipe), fp8jax.recipes.get(recipe).linear
    if part.w_scaling is not None:
        part = dataclasses.replace(part, w_scaling=None)
    ours = gradients(lambda a, x: fast(fp8jax.lora.adapt(base, a), x), adapters, X)
    theirs = gradients(lambda a, x: by_hand(base, a, x, part), adapters, X)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert set(ours[1][0]) == set(adapters)
    assert all(np.any(np.asarray(g.b)) for g in ours[1][0].values())


def test_the_base_is_one_byte_a_parameter_and_nothing_wider():
    base, adapters = frozen_with_adapters()
    fast = fp8jax.transform(model, "te_current")
    loss = lambda a: fast(fp8jax.lora.adapt(base, a), X).sum()  # noqa: E731
    for wide in (jnp.float32, jnp.bfloat16):
        shapes = {s[-2:] for s in outputs(jax.grad(loss), wide, adapters)}
        assert not shapes & {(WIDTH, INNER), (INNER, WIDTH)}
    pairs = [pair for pair in dots(jax.grad(loss), adapters) if "float8_e4m3fn" in pair]
    assert len(pairs) == 5, "two of the forward pass, one of them again under the checkpoint, two of the backward pass"
    assert base["layers"]["up"]["kernel"].nbytes <= LAYERS * (WIDTH * INNER + 4)


def test_codes_stay_codes_where_a_model_casts_its_parameters_first():
    base, adapters = frozen_with_adapters(dtype=jnp.bfloat16)
    cast = lambda fn: lambda p, x: fn(p, x, lambda tree: jax.tree.map(lambda v: v.astype(jnp.bfloat16), tree))  # noqa: E731
    fast = fp8jax.transform(cast(model), "te_current")
    x = X.astype(jnp.bfloat16)
    loss = lambda a: fast(fp8jax.lora.adapt(base, a), x).astype(jnp.float32).sum()  # noqa: E731
    shapes = {s[-2:] for s in outputs(jax.grad(loss), jnp.bfloat16, adapters)}
    assert not shapes & {(WIDTH, INNER), (INNER, WIDTH)}
    assert len([pair for pair in dots(jax.grad(loss), adapters) if "float8_e4m3fn" in pair]) == 5


W = PARAMS["layers"]["up"]["kernel"][0]
HELD = fp8jax.freeze(W)
ADAPTER = fp8jax.lora.Adapter(0.1 * jax.random.normal(KEYS[4], (WIDTH, 3)), jax.random.normal(KEYS[5], (3, INNER)), 6.0)
SPELLINGS = {
    "einsum": lambda p, x: jnp.einsum("btd,dh->bth", x, p["w"]),
    "accumulated": lambda p, x: jnp.matmul(x, p["w"].astype(x.dtype), preferred_element_type=jnp.float32),
    "weight first": lambda p, x: jnp.moveaxis(jax.lax.dot_general(p["w"], x, (((0,), (2,)), ((), ()))), 0, 2),
    "heads": lambda p, x: jnp.einsum("btd,dhc->bthc", x, p["w"].reshape(WIDTH, 4, INNER // 4)).reshape(2, -1, INNER),
    "a vector of tokens": lambda p, x: jax.vmap(jax.vmap(lambda row: row @ p["w"]))(x),
    "choice": lambda p, x: jax.lax.cond(x.sum() > 0, lambda x: x @ p["w"], lambda x: 0 * x @ p["w"], jnp.abs(x)),
    "loop": lambda p, x: jax.lax.fori_loop(0, 1, lambda i, y: x @ p["w"], jnp.zeros((*x.shape[:2], INNER))),
    "compiled": lambda p, x: jax.jit(lambda w, x: x @ w)(p["w"], x),
    "barrier": lambda p, x: x @ jax.lax.optimization_barrier(p["w"]),
    "stopped": lambda p, x: x @ jax.lax.stop_gradient(p["w"]),
    "transposed twice": lambda p, x: x @ p["w"].T.T,
    "transposed and read so": lambda p, x: jax.lax.dot_general(x, p["w"].T, (((2,), (1,)), ((), ()))),
}


@pytest.mark.parametrize("how", SPELLINGS)
def test_spellings_of_a_product_read_the_codes(how):
    fast = fp8jax.transform(SPELLINGS[how], "te_current")
    p, x = {"w": fp8jax.lora.AdaptedWeight(HELD, ADAPTER)}, jnp.abs(X) if how == "choice" else X
    expected = fp8jax.lora.linear(x, HELD, ADAPTER, recipe="te_current")
    np.testing.assert_allclose(fast(p, x), expected, rtol=2e-5, atol=2e-5)
    assert ("float8_e4m3fn",) * 2 in dots(fast, p, x)
    assert "frozen as e4m3:tensor and an adapter of rank 3" in str(fast.explain(p, x))
    narrow = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    assert jax.eval_shape(fast, p, narrow).dtype == jax.eval_shape(SPELLINGS[how], {"w": W}, narrow).dtype
    # The same function of arrays has a plan of its own.
    assert relative(fast({"w": W}, x), np.asarray(x @ W)) < 0.08


VALUES = {
    "tiled": (lambda p, x: x @ jnp.tile(p["w"], (1, 2)), 2 * INNER),
    "a part": (lambda p, x: x @ p["w"][:, :16], 16),
    "looked up": (lambda p, x: p["w"][jnp.arange(5)] + x[0, 0, 0], INNER),
    "scaled": (lambda p, x: x @ (2 * p["w"]), INNER),
}


@pytest.mark.parametrize("how", VALUES)
def test_what_reads_no_matrix_reads_the_values(how):
    fn, _ = VALUES[how]
    fast = fp8jax.transform(lambda p, x: (fn(p, x), x @ p["other"]), "te_current")
    p = {"w": fp8jax.lora.AdaptedWeight(HELD, ADAPTER), "other": W}
    merged = fp8jax.lora.merge_adapter(HELD, ADAPTER)

    def loss(fn, adapter):
        return jnp.sum(jnp.sin(fn({"w": fp8jax.lora.AdaptedWeight(HELD, adapter), "other": W}, X)[0]))

    exact = fn({"w": merged}, X)
    assert relative(fast(p, X)[0], exact) < 0.08
    assert np.isfinite(jax.grad(lambda a: loss(fast, a))(ADAPTER).b).all()
    if how == "tiled":
        assert relative(fast(p, X)[0], exact) < 1e-5
    cast = lambda p, x: (fn({"w": p["w"].astype(x.dtype)}, x), x @ p["other"].astype(x.dtype))  # noqa: E731
    narrow = X.astype(jnp.bfloat16)
    actual = jax.jit(fp8jax.transform(cast, "te_current"))(p, narrow)[0]
    assert actual.dtype == jnp.bfloat16
    assert relative(actual, exact) < 0.08


TURNED = {
    "transposed": lambda p, x: x @ p["w"].T,
    "einsum": lambda p, x: jnp.einsum("bth,dh->btd", x, p["w"]),
    "weight first": lambda p, x: jax.vmap(jax.vmap(lambda row: p["w"] @ row))(x),
    "heads": lambda p, x: jnp.einsum(
        "bthc,dhc->btd", x.reshape(2, -1, 4, x.shape[-1] // 4), p["w"].reshape(WIDTH, 4, -1)
    ),
    "heads last": lambda p, x: jnp.einsum(
        "btch,dhc->btd", jnp.swapaxes(x.reshape(2, -1, 4, x.shape[-1] // 4), 2, 3), p["w"].reshape(WIDTH, 4, -1)
    ),
    "twice": lambda p, x: jnp.einsum("bth,hd->btd", x, p["w"].T),
}


@pytest.mark.parametrize(("how", "columns"), covering(TURNED, [INNER, WIDTH]))
def test_a_matrix_that_is_read_transposed_is_multiplied_by_its_codes(how, columns):
    """(outputs, inputs), as in Equinox: values, and gradients of inputs and adapter, against decoded weights."""
    x = jnp.tile(X, 2)[..., :columns]
    frozen = fp8jax.freeze(W[:, :columns])
    adapter = dataclasses.replace(ADAPTER, b=ADAPTER.b[:, :columns])
    fast = fp8jax.transform(lambda p, x: (TURNED[how](p, x), x @ p["other"]), "te_current")
    p = lambda adapter: {"w": fp8jax.lora.AdaptedWeight(frozen, adapter), "other": jnp.ones((columns, 8))}  # noqa: E731
    pairs = dots(lambda p, x: fast(p, x)[0], p(adapter), x)
    assert ("float8_e4m3fn",) * 2 in pairs
    assert "not read as" not in str(fast.explain(p(adapter), x))

    def exact(adapter, x):
        return x @ frozen.dequantize().T + adapter.scale * (x @ adapter.b.T) @ adapter.a.T

    slope = jax.random.normal(KEYS[3], (*X.shape[:2], WIDTH))
    loss = lambda fn: jax.grad(lambda a, x: jnp.sum(slope * fn(a, x)), (0, 1))(adapter, x)  # noqa: E731
    y, adapter_result = fast(p(adapter), x)
    assert relative(y, exact(adapter, x)) < 0.08
    assert relative(adapter_result, x @ jnp.ones((columns, 8))) < 0.08
    ours, theirs = loss(lambda a, x: fast(p(a), x)[0]), loss(exact)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert relative(a, b) < 0.08
    slope = jax.random.normal(KEYS[3], (*X.shape[:2], columns))
    plain = jax.grad(lambda x: jnp.sum(slope * fp8jax.linear(x, frozen, recipe="te_current")))(X)
    assert relative(plain, slope @ frozen.dequantize().T) < 0.08


@pytest.mark.parametrize("spec", ["e4m3:token", "e4m3:block128+expand"])
def test_scales_that_serve_one_side_alone_leave_the_transposed_matrix_in_16_bits(spec):
    square = fp8jax.freeze(W[:, :WIDTH], spec)
    fast = fp8jax.transform(lambda p, x: (x @ p["w"].T, x @ p["other"]), "te_current")
    p = {"w": square, "other": W}
    np.testing.assert_allclose(fast(p, X)[0], X @ square.dequantize().T, rtol=1e-5, atol=1e-5)
    assert "not read as (inputs, outputs)" in str(fast.explain(p, X))
    with pytest.raises(ValueError, match=re.escape(f"codes of {spec} cannot be used transposed")):
        _ = square.T
    transposed = fp8jax.freeze(W).T
    assert transposed.shape == (INNER, WIDTH)
    np.testing.assert_array_equal(transposed.dequantize(), fp8jax.freeze(W).dequantize().T)
    assert transposed.T.shape == W.shape


@pytest.mark.parametrize("how", ["tiled", "looked up", "multiplied"])
def test_what_is_held_has_no_gradient(how):
    fn = VALUES[how][0] if how in VALUES else lambda p, x: x @ p["w"]
    fast = fp8jax.transform(lambda p, x: (fn(p, x), x @ p["other"]), "te_current")
    loss = lambda w: fast({"w": w, "other": W}, X)[0].sum()  # noqa: E731
    assert not np.any(jax.grad(loss, allow_int=True)(HELD).codes.scale)
    base, adapter = jax.grad(lambda w, a: loss(fp8jax.lora.AdaptedWeight(w, a)), (0, 1))(W, ADAPTER)
    assert not np.any(base)
    assert all(np.any(part) for part in jax.tree.leaves(adapter))


def test_a_head_that_rules_leave_alone_is_multiplied_by_its_codes_in_16_bits():
    params = {"up": {"kernel": W}, "head": {"kernel": fp8jax.freeze(PARAMS["head"]["kernel"])}}
    fast = fp8jax.transform(lambda p, x: (x @ p["up"]["kernel"])[..., :WIDTH] @ p["head"]["kernel"], "te_current")
    text = str(fast.explain(params, X))
    assert "an embedding or head; frozen as e4m3:tensor" in text
    dequantized = params | {"head": {"kernel": params["head"]["kernel"].dequantize()}}
    np.testing.assert_allclose(fast(params, X), fast(dequantized, X), rtol=1e-5, atol=1e-5)


def test_codes_that_are_whole_on_devices_of_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over = jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    fast = fp8jax.transform(lambda p, x: over(p["w"], x), "deepseek")
    frozen = fp8jax.freeze(W, "e4m3:block128")
    expected = fp8jax.linear(X, frozen, recipe="deepseek")
    np.testing.assert_allclose(jax.jit(fast)({"w": frozen}, X), expected, rtol=1e-5, atol=1e-5)
    sharded = jax.shard_map(
        lambda w, x: x @ w, mesh=mesh, in_specs=(P(None, "data"), P()), out_specs=P(None, None, "data")
    )
    by_values = fp8jax.transform(lambda p, x: (sharded(p["w"], x), x @ p["w"]), "deepseek")
    np.testing.assert_allclose(
        jax.jit(by_values)({"w": frozen}, X)[0],
        X @ frozen.dequantize(),
        rtol=1e-5,
        atol=1e-5,
    )
    assert "not read as (inputs, outputs)" in str(by_values.explain({"w": frozen}, X))


def test_what_is_refused_says_how():
    base, adapters = frozen_with_adapters()
    params = fp8jax.lora.adapt(base, adapters)
    with pytest.raises(ValueError, match=r"layers/up is frozen as e4m3:tensor and .*keeps a state; use a recipe with"):
        fp8jax.transform(model, "te_delayed")(params, X)
    with pytest.raises(ValueError, match=r"layers/up: linear.x=int8.* floating-point and integer codes"):
        fp8jax.transform(model, "int8_block")(params, X)
    with pytest.raises(ValueError, match="merge adapters"):
        fp8jax.transform(model, "te_current").check(params, X)
    with pytest.raises(ValueError, match="there is no weight 'other' for an adapter"):
        fp8jax.lora.adapt(base, {"other": ADAPTER})
    with pytest.raises(ValueError, match="does not fit layers/up/kernel"):
        fp8jax.lora.adapt(base, {"layers/up/kernel": ADAPTER})
    with pytest.raises(TypeError, match=r"[Cc]all the model through fp8jax\.transform"):
        model(params, X)
    with pytest.raises(TypeError, match=r"call dequantize\(\) for its values"):
        jnp.sin(HELD)


@pytest.mark.parametrize(("shape", "axes"), [((2, 8, 4, 6), (1, 2)), ((2, 4, 6, 8), (2, 1)), ((4, 6, 8), (2, 1))])
def test_a_parameter_of_several_axes_is_frozen_as_its_matrix(shape, axes):
    w = jax.random.normal(KEYS[1], shape)
    frozen = fp8jax.freeze(w, "e4m3:token", axes)
    lead = len(shape) - sum(axes)
    matrix = w.reshape(
        *shape[:lead], *[int(np.prod(s)) for s in (shape[lead : lead + axes[0]], shape[lead + axes[0] :])]
    )
    assert frozen.shape == shape
    assert frozen.matrix.shape == matrix.shape
    assert frozen.dtype == jnp.float32
    np.testing.assert_array_equal(frozen.dequantize(), fp8jax.freeze(matrix, "e4m3:token").dequantize().reshape(shape))
    with pytest.raises(ValueError, match="axes="):
        fp8jax.freeze(w, axes=(3, 3))


@pytest.mark.parametrize("spec", ["e4m3", "e4m3:token"])
def test_codes_lie_in_shards_as_the_weights_do(spec):
    """As with fsdp: each device has a part of the codes, and the step is the same."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    unsharded, adapters = frozen_with_adapters(spec)
    sharded = jax.device_put(PARAMS["layers"], jax.NamedSharding(mesh, P(None, "fsdp")))
    params = {"layers": sharded, "head": jax.device_put(PARAMS["head"], jax.NamedSharding(mesh, P()))}
    base = fp8jax.lora.freeze(params, spec, targets=TARGETS)
    for name in ("up", "down"):
        codes = base["layers"][name]["kernel"].codes.codes
        np.testing.assert_array_equal(codes, unsharded["layers"][name]["kernel"].codes.codes)
        assert {shard.data.size * 4 for shard in codes.addressable_shards} == {codes.size}
        assert codes.addressable_shards[0].data.shape[-1] * 4 == codes.shape[-1], "the inputs are cut, as they were"
    fast = fp8jax.transform(model, "te_current")
    x = jax.device_put(jnp.concatenate([X, X]), jax.NamedSharding(mesh, P("fsdp")))
    expected = gradients(lambda a, x: fast(fp8jax.lora.adapt(unsharded, a), x), adapters, jnp.concatenate([X, X]))
    actual = gradients(lambda a, x: fast(fp8jax.lora.adapt(base, a), x), adapters, x)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative(one, np.asarray(other)) < 2e-2  # a rounding may fall otherwise where a sum has another order
