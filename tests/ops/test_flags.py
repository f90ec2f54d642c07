"""Fast accumulation: every matmul uses its own flag, and each implementation receives it."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.core.recipe import Context, Linear
from fp8jax.ops.dispatch import partition
from fp8jax.ops.matmul import hopper, matmul
from tests import matmul_reference
from tests.distance import relative
from tests.programs import precisions
from tests.rows import slow

PRODUCTS = ("forward", "dgrad", "wgrad")
SUBSETS = [flags for n in range(4) for flags in itertools.combinations(PRODUCTS, n)]
# The dtypes of operands identify products.
OPERANDS = {
    ("float8_e4m3fn", "float8_e4m3fn"): "forward",
    ("float8_e5m2", "float8_e4m3fn"): "dgrad",
    ("float8_e4m3fn", "float8_e5m2"): "wgrad",
}
X, W = jax.random.normal(jax.random.key(0), (6, 32)), jax.random.normal(jax.random.key(1), (32, 8))


def plain(part, x, w):
    return fp8jax.linear(x, w, recipe=part)


def prequantized_linear(part, x, w):
    return fp8jax.linear(x, w, recipe=part, quantized=fp8jax.quantize_weight(w, recipe=part))


def batched(part, x, w):
    return fp8jax.einsum("btd,bdh->bth", x[None], w[None], recipe=part)


def several(part, x, w):
    context = Context("e4m3:group16", recompute_activations=True)
    recipe = dataclasses.replace(fp8jax.recipes.coat(), linear=part, context=context)
    return sum(fp8jax.norm_linear(x, None, [w, 2 * w], recipe=recipe))


def delayed(part, x, w):
    part = dataclasses.replace(part, scaling="delayed", amax_history_length=2)
    return fp8jax.scaled_linear(x, w, fp8jax.init_scaling(part), jnp.zeros([]), recipe=part)[0]


@pytest.mark.parametrize(
    "flags", [flags if len(flags) < 2 else slow(flags) for flags in SUBSETS], ids=lambda f: "+".join(f) or "none"
)
def test_each_product_sums_as_its_own_flag_says(flags):
    part = Linear("e4m3", "e4m3", "e5m2", fast_accumulation=flags)
    for layer in (plain, prequantized_linear, batched, several, delayed):
        f = functools.partial(layer, part)
        actual = precisions(lambda x, w, f=f: jax.vjp(f, x, w)[1](jnp.ones_like(f(x, w))), X, W)
        assert {OPERANDS[operands] for operands, _ in actual} == set(PRODUCTS)
        for operands, precision in actual:
            assert (precision == jax.lax.Precision.DEFAULT) == (OPERANDS[operands] in flags), layer.__name__


def test_presets_sum_weights_gradients_in_full():
    flags = {name: fp8jax.recipes.get(name).linear.fast_accumulation for name in fp8jax.recipes.NAMES}
    assert flags.pop("fast") == flags.pop("moss") == ("forward", "dgrad")
    assert set(flags.values()) == {("forward",)}


def operands(left, right, rows=12):
    """A matrix (rows, 64), one of (7, 64), and their product in float64."""
    a, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(rows, 64), (7, 64)]))
    # Rows have different magnitudes, so that a scale of the wrong row or operand shows.
    a, b = a * 2.0 ** jnp.arange(rows)[:, None], b * 4.0 ** -jnp.arange(7)[:, None]
    a, b = fp8jax.quantize(a, left), fp8jax.quantize(b, right)
    return a, b, np.asarray(a.dequantize(), np.float64) @ np.asarray(b.dequantize(), np.float64).T


@pytest.fixture
def kernels(monkeypatch):
    """Runs matmuls by Hopper's kernels, replaced by their references. Returns the arguments of each call."""
    mosaic = pytest.importorskip("pallas_kernels.matmul.matmul_mosaic")
    from pallas_kernels.matmul import matmul_block_mosaic, matmul_mx_mosaic

    argument = []

    def watched(name):
        def call(*args, **named):
            argument.append((name, named))
            return getattr(matmul_reference, name)(*args, **named)

        return call

    monkeypatch.setattr(hopper, "capability", lambda: 90)
    monkeypatch.setattr(partition, "on_one_device", lambda: True)  # else kernels are traced more than once
    for module, name in ((mosaic, "matmul"), (matmul_block_mosaic, "matmul_block"), (matmul_mx_mosaic, "matmul_mx")):
        monkeypatch.setattr(module, name, watched(name))
    monkeypatch.setattr(hopper, "_call_kernel", hopper._call_kernel.__wrapped__)  # traced again each time
    return argument


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("left", "right"), list(itertools.product(["e4m3", "e4m3:token"], ["e5m2", "e4m3:token"])), ids=str
)
def test_the_kernel_of_rows_is_given_the_flag_and_the_scales(left, right, fast, kernels):
    a, b, expected = operands(left, right)
    for dtype in (jnp.float32, jnp.bfloat16):
        y = matmul.matmul(a, b, dtype=dtype, impl="mosaic", fast=fast)
        assert y.dtype == dtype
        assert relative(y, expected) < (1e-6 if dtype == jnp.float32 else 2.0**-8)
        np.testing.assert_allclose(
            np.asarray(y, np.float64), expected, rtol=2.0**-7, atol=1e-5 * np.abs(expected).min()
        )
    assert [(name, named["fast"]) for name, named in kernels] == [("matmul", fast)] * 2
    # Also without a kernel: no sum has less than fp32.
    assert relative(matmul.matmul(a, b, impl="xla", fast=fast), expected) < 1e-6


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_kernel_of_microscaled_operands_is_taken_where_it_is_to_be_exact(exact, is_transposed, kernels):
    a, b, expected = operands("e4m3:mx32+token", "e4m3:token")
    if is_transposed:
        a, b, expected = b, a, expected.T
    for fast in (False, True):
        assert relative(matmul.matmul(a, b, impl="mosaic", fast=fast, exact=exact), expected) < 1e-3
    recorded = [(name, named.get("fast")) for name, named in kernels]
    assert recorded == ([("matmul_mx", None)] * 2 if exact else [("matmul", False), ("matmul", True)])


@pytest.mark.parametrize(
    ("left", "right", "length"), [("e4m3:group128", "e4m3:block128", 300), ("e4m3", "e4m3:group128", 129)]
)
def test_the_kernel_of_groups_is_given_the_scales(left, right, length, kernels):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((n, length)) * 8.0 ** (np.arange(length) // 128) for n in (5, 140))
    a, b = (fp8jax.quantize(jnp.asarray(x, jnp.float32), spec) for x, spec in ((a, left), (b, right)))
    expected = np.asarray(a.dequantize(), np.float64) @ np.asarray(b.dequantize(), np.float64).T
    for impl in ("mosaic", "xla"):
        assert relative(matmul.matmul(a, b, impl=impl), expected) < 1e-6
    assert [name for name, _ in kernels] == ["matmul_block"]


@pytest.mark.parametrize("fast", [False, True])
def test_the_product_of_cublas_has_the_flag_and_the_scales(fast):
    a, b, _ = operands("e4m3", "e5m2")
    # Powers of two, for where XLA does not fold it away the cast of a scale to bf16 rounds it.
    a, b = (dataclasses.replace(q, scale=jnp.exp2(jnp.round(jnp.log2(q.scale)))) for q in (a, b))
    expected = np.asarray(a.dequantize(), np.float64) @ np.asarray(b.dequantize(), np.float64).T
    run = functools.partial(hopper.run, "cublas", False, fast, jnp.float32)
    ((_, precision),) = precisions(run, a, b)
    assert (precision == jax.lax.Precision.DEFAULT) == fast
    assert relative(run(a, b), expected) < 1e-6
