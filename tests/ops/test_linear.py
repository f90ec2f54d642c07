"""The quantized linear: three matmuls of the recipe, gradients, residuals, and its general forms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.core.recipe import Linear
from tests.distance import relative
from tests.programs import dots, residuals
from tests.rows import few, slow

LINEAR = {name: fp8jax.recipes.get(name).linear for name in fp8jax.recipes.NAMES}
QUANTIZED = [name for name, part in LINEAR.items() if part.is_quantized and not part.stateful_strategies]
TOKENS, INPUTS, OUTPUTS = 70, 256, 192
KEY = jax.random.key(5)


@functools.cache
def problem():
    with jax.ensure_compile_time_eval():
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (2, TOKENS // 2, INPUTS))
        w = 0.05 * jax.random.normal(keys[1], (INPUTS, OUTPUTS))
        return x, w, jax.random.normal(keys[2], (2, TOKENS // 2, OUTPUTS))


def gradients(linear):
    x, w, target = problem()
    y, vjp_fn = jax.vjp(linear, x, w)
    return y, *vjp_fn(target)


def expected_error(*specs) -> float:
    """Returns the relative error of a product of independently rounded normal operands."""
    x = jax.random.normal(jax.random.key(1), (256, 256))
    total = 0.0
    for spec in specs:
        if spec is not None:
            key = KEY if spec.rounding == "stochastic" else None
            total += relative(fp8jax.quantize(x, spec, key=key).dequantize(), x) ** 2
    return total**0.5


@pytest.mark.parametrize("name", few(QUANTIZED, "moss_mx", "coat", "deepseek", "switchback", "jetfire", "int8_block"))
def test_products_are_as_near_as_their_formats_allow(name):
    recipe = fp8jax.recipes.get(name)
    actual = jax.jit(lambda: gradients(functools.partial(fp8jax.linear, recipe=recipe, key=KEY)))()
    exact = gradients(lambda x, w: x @ w)
    for a, b, (left, right) in zip(actual, exact, recipe.linear.products().values(), strict=True):
        saved = [recipe.linear.spec("x_residual")] if left and recipe.linear.x_residual != "same" else []
        bound = expected_error(left, right, *saved)
        assert relative(a, b) <= 1.3 * bound + 4e-3
        if left is not None:
            assert relative(a, b) >= 0.3 * bound


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_three_products_take_the_operands_of_the_recipe(name):
    recipe = fp8jax.recipes.get(name)
    actual = dots(lambda: gradients(functools.partial(fp8jax.linear, recipe=recipe, key=KEY)))
    expected = [
        tuple(str(fp8jax.formats.get(s.format).dtype) if s and not s.is_block_scaled else "float32" for s in pair)
        for pair in recipe.linear.products().values()
    ]
    assert [f if f[0] != "bfloat16" else ("float32",) * 2 for f in actual] == expected


@pytest.mark.parametrize("name", ["te_current", "deepseek", "int8_block"])
def test_only_codes_of_the_input_are_saved(name):
    recipe = fp8jax.recipes.get(name)
    x, w, _ = problem()
    saved_arrays = residuals(lambda x, w: fp8jax.linear(x, w, recipe=recipe, key=KEY), x, w)
    tokens = [(dtype, shape) for dtype, shape in saved_arrays if TOKENS in shape or TOKENS // 2 in shape]
    assert ("uint8", (TOKENS, INPUTS)) in tokens
    assert all(dtype == "uint8" or np.prod(shape) <= TOKENS * INPUTS / 32 for dtype, shape in tokens)


def test_a_weight_in_any_order_of_its_axes_is_kept_as_it_is():
    x, w, _ = problem()
    for subscripts, weight in (("btd,od->bto", w.T), ("btd,dhk->bthk", w.reshape(INPUTS, 3, 64))):
        saved_arrays = residuals(functools.partial(fp8jax.einsum, subscripts, recipe="te_current"), x, weight)
        assert [shape for d, shape in saved_arrays if d == "float32" and len(shape) > 1 and INPUTS in shape] == [
            weight.shape
        ]


def test_the_bias_is_added_and_differentiated():
    x, w, target = problem()
    b = jnp.arange(OUTPUTS, dtype=jnp.float32)
    recipe = fp8jax.recipes.te_current()
    y, vjp_fn = jax.vjp(lambda b: fp8jax.linear(x, w, recipe=recipe, bias=b), b)
    np.testing.assert_allclose(np.asarray(y), np.asarray(fp8jax.linear(x, w, recipe=recipe) + b), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(vjp_fn(target)[0]), np.asarray(target.sum((0, 1))), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", few(QUANTIZED, "deepseek", "jetfire"))
def test_a_biass_gradient_is_the_sum_of_all_gradients_in_fp32(name):
    """The sum of bf16 gradients, not of their codes, without rounding on the way. Other gradients are unchanged."""
    x, w, target = (a.astype(jnp.bfloat16) for a in problem())
    b, key = jnp.arange(OUTPUTS, dtype=jnp.float32), KEY if LINEAR[name].is_stochastic else None
    linear = lambda x, w, b: fp8jax.linear(x, w, recipe=name, bias=b, key=key)  # noqa: E731

    @jax.jit
    def both(x, w, b):
        y, vjp_fn = jax.vjp(linear, x, w, b)
        return y, vjp_fn(target)

    (y, (*others, db)), (z, (*plain, _)) = both(x, w, b), both(x, w, None)
    assert db.dtype == jnp.float32
    exact = np.asarray(target, np.float64).sum((0, 1))
    assert np.all(np.abs(np.asarray(db) - exact) <= 2.0**-24 * TOKENS * np.abs(np.asarray(target)).max())
    assert all(np.array_equal(np.asarray(one), np.asarray(two)) for one, two in zip(others, plain, strict=True))
    assert np.array_equal(np.asarray(y), np.asarray(z + b.astype(z.dtype)))


def test_a_bias_of_heads_is_that_of_the_flat_product():
    x, w, target = problem()
    b = jnp.arange(OUTPUTS, dtype=jnp.float32)
    heads, numbers = w.reshape(INPUTS, 4, -1), (((2,), (0,)), ((), ()))
    y, vjp_fn = jax.vjp(lambda b: fp8jax.dot_general(x, heads, numbers, recipe="te_current", bias=b), b)
    expected = fp8jax.linear(x, w, recipe="te_current", bias=b)
    assert np.array_equal(np.asarray(y.reshape(expected.shape)), np.asarray(expected))
    (db,) = vjp_fn(target.reshape(y.shape))
    np.testing.assert_allclose(np.asarray(db), np.asarray(target, np.float64).sum((0, 1)), rtol=1e-5, atol=1e-5)
    plain = fp8jax.dot_general(x, heads, numbers, recipe="bf16", bias=b)
    np.testing.assert_allclose(np.asarray(plain.reshape(expected.shape)), np.asarray(x @ w + b), rtol=2e-2, atol=2e-1)
    batched = (((2,), (1,)), ((0,), (0,)))
    with pytest.raises(ValueError, match="a bias is not supported with batch axes"):
        fp8jax.dot_general(x, jnp.stack([w, w]), batched, recipe="te_current", bias=b)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
def test_results_and_gradients_keep_the_dtypes(dtype):
    x, w, _ = problem()
    recipe = fp8jax.recipes.deepseek()
    y, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=recipe), x.astype(dtype), w)
    dx, dw = vjp_fn(y)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("btd,dhc->bthc", [(2, 6, 32), (32, 4, 8)]),
        ("bthc,hcd->btd", [(2, 6, 4, 8), (4, 8, 16)]),
        ("...d,dh->...h", [(2, 3, 32), (32, 8)]),
        ("ebd,edh->ebh", [(3, 6, 32), (3, 32, 8)]),
        ("dt,dh->ht", [(32, 6), (32, 8)]),
    ],
)
def test_einsum_and_dot_general_have_the_axes_of_jax(subscripts, shapes):
    recipe = fp8jax.recipes.te_current()
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes))
    actual = functools.partial(fp8jax.einsum, subscripts, recipe=recipe)
    expected = functools.partial(jnp.einsum, subscripts)
    assert actual(x, w).shape == expected(x, w).shape
    assert relative(actual(x, w), expected(x, w)) < 0.06
    loss = lambda f, x, w: (f(x, w) ** 2).sum()  # noqa: E731
    grads = [jax.jit(jax.grad(functools.partial(loss, f), (0, 1)))(x, w) for f in (actual, expected)]
    for a, b in zip(*grads, strict=True):
        assert a.shape == b.shape
        assert relative(a, b) < 0.15
    plain = fp8jax.einsum(subscripts, x, w, recipe=fp8jax.recipes.bf16())
    np.testing.assert_allclose(np.asarray(plain), np.asarray(expected(x, w)), rtol=1e-5, atol=1e-5)


def test_results_have_the_dtype_that_is_preferred():
    recipe, numbers = fp8jax.recipes.te_current(), (((1,), (0,)), ((), ()))
    x, w = jnp.ones((4, 32), jnp.bfloat16), jnp.ones((32, 8), jnp.bfloat16)
    for dtype in (None, jnp.float32, jnp.float16):
        expected = dtype or jnp.bfloat16
        assert fp8jax.dot_general(x, w, numbers, None, dtype, recipe=recipe).dtype == expected
        assert fp8jax.einsum("td,dh->th", x, w, None, dtype, recipe=recipe).dtype == expected


def test_batched_products_have_scales_of_their_own():
    recipe = fp8jax.recipes.te_current()
    x = jnp.stack([jnp.ones((4, 32)), 1e-6 * jax.random.normal(KEY, (4, 32))])
    w = jax.random.normal(KEY, (2, 32, 8))
    assert relative(fp8jax.einsum("btd,bdh->bth", x, w, recipe=recipe)[1], (x @ w)[1]) < 0.06


@pytest.mark.parametrize("name", ["te_current", "int8_block"])
def test_vmap_gives_what_a_loop_gives(name):
    recipe = fp8jax.recipes.get(name)
    x, w = jax.random.normal(KEY, (3, 6, 32)), jax.random.normal(KEY, (3, 32, 8))
    f = lambda x, w: fp8jax.linear(x, w, recipe=recipe, key=KEY)  # noqa: E731
    grad = jax.grad(lambda x, w: f(x, w).sum(), (0, 1))
    for together, one in ((jax.vmap(f)(x, w), f), (jax.vmap(grad)(x, w), grad)):
        alone = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[one(a, b) for a, b in zip(x, w, strict=True)])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), together, alone)


def test_stochastic_recipes_ask_for_a_key_and_repeat_with_it():
    x, w, _ = problem()
    recipe = fp8jax.recipes.int8_block()
    with pytest.raises(ValueError, match=r"rounds x_residual stochastically.*pass key"):
        fp8jax.linear(x, w, recipe=recipe)
    grad = jax.jit(jax.grad(lambda w, key: (fp8jax.linear(x, w, recipe=recipe, key=key) ** 2).sum()))
    a, b, c = grad(w, KEY), grad(w, KEY), grad(w, jax.random.key(6))
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert (np.asarray(a) != np.asarray(c)).any()


def test_stochastically_rounded_gradients_are_unbiased():
    x, w, target = problem()
    recipe = dataclasses.replace(fp8jax.recipes.int8_block().linear, x_residual="same")
    fixed = dataclasses.replace(recipe, dy="int8:block128")
    dx = jax.jit(jax.vmap(lambda key: jax.vjp(lambda x: fp8jax.linear(x, w, recipe=recipe, key=key), x)[1](target)[0]))
    draws = dx(jax.random.split(KEY, 64))
    b = fp8jax.quantize(w, "int8:block128").dequantize()
    exact = target @ b.T
    one, mean = relative(draws[0], exact), relative(draws.mean(0), exact)
    assert mean < 1.5 * one / 8
    rounded = jax.vjp(lambda x: fp8jax.linear(x, w, recipe=fixed), x)[1](target)[0]
    assert mean < relative(rounded, exact) / 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"x": "e4m3"}, "forward product has one quantized operand"),
        ({"x": "e4m3", "w": "int8", "dy": "int8"}, "mixes integer and floating-point operands"),
        ({"x": "int10:group128", "w": "e4m3", "dy": "e4m3"}, "is not supported as a matmul operand"),
        ({"x": "e4m3+expand", "w": "e4m3", "dy": "e4m3"}, "is not supported as a matmul operand"),
        ({"x": "e4m3:channel", "w": "e4m3", "dy": "e4m3"}, "must have scales along the contraction"),
        ({"x": "e4m3:group128", "w": "e4m3", "dy": "e4m3"}, "linear.x_wgrad cannot be the same"),
        ({"x": "e4m3", "w": "e4m3:token", "dy": "e4m3"}, "linear.w_dgrad cannot be the same"),
        ({"x": "e4m3", "w": "e4m3", "dy": "e5m2:token"}, "linear.dy_wgrad cannot be the same"),
        ({"x": "fp8", "w": "e4m3", "dy": "e4m3"}, "unknown number format 'fp8'"),
        ({"scaling": "auto"}, "unknown linear.scaling 'auto'"),
        ({"scaling": "delayed"}, "delayed scaling needs x, w and dy quantized"),
        ({"x": "e4m3:block32", "w": "e4m3", "dy": "e4m3", "scaling": "delayed"}, "delayed scaling is per tensor"),
        ({"amax_history_length": 0}, "linear.amax_history_length must be positive"),
    ],
)
def test_contradictory_recipes_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Linear(**settings)


def test_wrong_arguments_are_refused():
    x, w, _ = problem()
    recipe = fp8jax.recipes.te_current()
    with pytest.raises(ValueError, match=r"linear expects \(..., inputs\) and \(inputs, outputs\)"):
        fp8jax.linear(x, w.T, recipe=recipe)
    with pytest.raises(ValueError, match="does not support precision='highest'"):
        fp8jax.dot_general(x, w, (((2,), (0,)), ((), ())), precision="highest", recipe=recipe)
    for subscripts in ("td,dh", "tt,th->h", "tdk,dh->th", "td,dh,hk->tk"):
        with pytest.raises(ValueError, match="einsum"):
            fp8jax.einsum(subscripts, x[0], w, recipe=recipe)


def test_a_numpy_input_that_changes_is_quantized_again():
    recipe = fp8jax.recipes.te_current()
    x, w = np.ones((4, 32), np.float32), jnp.ones((32, 8))
    first = fp8jax.linear(x, w, recipe=recipe)
    x[:] = 2
    np.testing.assert_allclose(np.asarray(fp8jax.linear(x, w, recipe=recipe)), 2 * np.asarray(first), rtol=1e-6)


@pytest.mark.parametrize("name", ["te_current", "deepseek", slow("jetfire")])
def test_weights_quantized_ahead_give_the_same_bits(name):
    recipe = fp8jax.recipes.get(name)
    x, w = jax.random.normal(jax.random.key(0), (24, 40)), jax.random.normal(jax.random.key(1), (40, 56))
    key = jax.random.key(2)

    def loss(x, w, quantized):
        return jnp.sum(jnp.sin(fp8jax.linear(x, w, recipe=recipe, key=key, quantized=quantized)))

    quantized = fp8jax.quantize_weight(w, recipe=recipe)
    assert all(leaf.dtype in (jnp.uint8, jnp.float32) for leaf in jax.tree.leaves(quantized))
    each, ahead = (jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w, q) for q in (None, quantized))
    jax.tree.map(np.testing.assert_array_equal, each, ahead)
    # Its statistics are also computed in advance: the program does not read the weight again.
    assert ("float32", w.shape) not in residuals(lambda x, w: loss(x, w, quantized), x, w)


def test_a_weight_quantized_ahead_must_fit():
    recipe = fp8jax.recipes.te_current()
    x, w = jnp.ones((4, 8)), jnp.ones((8, 6))
    quantized = fp8jax.quantize_weight(w.T, recipe=recipe)
    with pytest.raises(ValueError, match=r"with a quantized weight of \(6, 8\)"):
        fp8jax.linear(x, w, recipe=recipe, quantized=quantized)
    with pytest.raises(ValueError, match="both must be quantized"):
        fp8jax.quantize_weight(w, recipe=fp8jax.recipes.bf16())
    batched = (((2,), (1,)), ((0,), (0,)))
    with pytest.raises(ValueError, match="batch axes"):
        fp8jax.dot_general(x[None], w[None], batched, recipe=recipe, quantized=fp8jax.quantize_weight(w, recipe=recipe))


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_no_tokens_give_no_outputs(shape):
    y = fp8jax.linear(jnp.zeros(shape), jnp.ones((32, 16)), recipe=fp8jax.recipes.te_current())
    assert y.shape == (*shape[:-1], 16)


@pytest.mark.parametrize("name", [slow("te_current"), slow("deepseek"), "coat", "jetfire"])
def test_gradients_of_replicated_parameters_are_summed_where_shard_map_checks_what_varies(name):
    recipe = fp8jax.recipes.get(name)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x, w, s = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(16, 192), (192, 16), (192,)]))
    key = jax.random.key(3)

    def gradients(x, w, s):
        layer = lambda x, w, s: fp8jax.linear(fp8jax.rms_norm(x, s, recipe=recipe), w, recipe=recipe, key=key)  # noqa: E731
        loss = lambda x, w, s: jnp.sum(layer(x, w, s) ** 2)  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(x, w, s)

    data, whole = jax.P("data"), jax.P()
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=(data, whole, whole), out_specs=(data, whole, whole))
    actual = jax.jit(mapped)(x, w, s)
    # Each device has scales of its own for its part.
    alone = jax.jit(gradients)
    parts = [alone(half, w, s) for half in (x[:8], x[8:])]
    expected = [jnp.concatenate([p[0] for p in parts]), parts[0][1] + parts[1][1], parts[0][2] + parts[1][2]]
    for a, b in zip(actual, expected, strict=True):
        assert float(jnp.linalg.norm(a - b)) <= 1e-2 * float(jnp.linalg.norm(b))
