"""The fused AdamW kernel on a GPU, compared with its reference."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.optimizers.leaf import Adam
from tests.kernels import adamw_cases
from tests.kernels.adamw_cases import ADAM, decoded, special, stored, tree
from tests.kernels.test_adamw_interpreted import NOISY, compare_noise, marked
from tests.rows import covering

# On GPUs, XLA otherwise computes codes with fp32 exponents but stores them in bf16.
EXACT = {"xla_allow_excess_precision": False}

SHAPES = {
    "whole": (96, 1024),
    "short groups": (16, 9, 200),
    "unaligned": (67, 1001),
    "one row": (1, 4096 + 16),
    "partial tile": (33, 128),
}


def both(form, leaf, key=None):
    options = {"key": key} if key is not None else {}
    run = [functools.partial(getattr(adamw_cases, form), adam=ADAM, impl=impl, **options) for impl in ("xla", "triton")]
    return jax.jit(run[0], compiler_options=EXACT)(*leaf), jax.jit(run[1])(*leaf)


def check_equal(expected, actual, leaf, adam=ADAM):
    """Results agree within two ulp and 2e-5 of their change, codes except for a few; NaN, Inf and zeros agree exactly.

    Bias corrections, 1 - b^t, differ by the rounding of b^t if only one side computes it. The kernel also flushes
    subnormal gradients and moments to zero.
    """
    grad, mu, nu, _ = leaf
    tiny = float(np.finfo(np.float32).tiny)
    x, y = (np.asarray(r[0]).astype(np.float64) for r in (expected, actual))
    np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
    with np.errstate(all="ignore"):
        g, b1, b2, t = np.asarray(grad).astype(np.float64), float(adam.b1), float(adam.b2), int(adam.count)
        g = g * (1.0 if adam.grad_scale is None else float(adam.grad_scale))
        m = b1 * np.abs(decoded(mu)) + (1 - b1) * np.abs(g)
        v = b2 * decoded(nu) + (1 - b2) * g**2
        root = np.sqrt(v / (1 - b2**t) + float(adam.eps_root)) + float(adam.eps)
        exact = 2e-5 + float(np.finfo(np.float32).eps) * (1 / (1 - b1**t) + 0.5 / (1 - b2**t))
        change = float(adam.rate) * (exact * m + tiny) / (1 - b1**t) / root
        bound = 2 * float(jnp.finfo(expected[0].dtype).eps) * np.abs(x) + np.nan_to_num(change, posinf=1e30)
        assert np.all((np.abs(x - y) <= bound) | (x == y) | np.isnan(x)), np.nanmax(np.abs(x - y) / bound)
    for q, p, size in zip(expected[1:], actual[1:], (m, v), strict=True):
        if not isinstance(q, QTensor):
            a, b = (np.asarray(t).astype(np.float64) for t in (q, p))
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            with np.errstate(all="ignore"):
                is_close = np.abs(a - b) <= (2e-5 * size + tiny) + float(jnp.finfo(q.dtype).eps) * np.abs(a)
            assert np.all(is_close | (a == b) | np.isnan(a))
            continue
        p.validate()
        a, b = (np.asarray(t.codes).astype(np.float32) for t in (q, p))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))
        # A first moment at the threshold of dead elements may be 0 on one side only.
        is_dead_on_one_side = (a == 0) != (b == 0)
        assert np.sum(is_dead_on_one_side) <= (2 if q is expected[1] else 0)
        np.testing.assert_allclose(p.scale, q.scale, rtol=2e-5)
        has_same_exponent = np.ones(q.scale.shape, bool)
        if q.expansion is not None:
            k, l = (np.asarray(t.expansion).astype(np.float32) for t in (q, p))
            has_same_exponent = k == l
            # A smallest value from cancellation differs by more than an ulp.
            np.testing.assert_allclose(l, k, rtol=2**-4)
            assert np.sum(~has_same_exponent) <= 2 + 5e-3 * has_same_exponent.size
        is_compared = np.repeat(has_same_exponent, q.spec.group_size, -1)[..., : a.shape[-1]]
        differ = (a != b) & ~np.isnan(a) & ~is_dead_on_one_side
        assert differ[is_compared].sum() <= 2 + 2e-4 * is_compared.sum()
        ulps = np.abs(np.asarray(q.codes).view(np.int8).astype(int) - np.asarray(p.codes).view(np.int8).astype(int))
        assert ulps[differ & is_compared].max(initial=0) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "stored_as"),
    covering(
        SHAPES,
        [
            ("e4m3", "e4m3", True),
            ("e5m2", "e5m2", True),
            ("e4m3", "e4m3", False),
            ("e4m3", "bf16", True),
            ("fp32", "e4m3", True),
        ],
    ),
    ids=str,
)
def test_kernel_equals_the_reference_on_special_groups(shape, stored_as):
    mu, nu, expand = stored_as
    shape = SHAPES[shape]
    rows = (max(12, int(np.prod(shape[:-1]))), shape[-1])
    for form, grad, weight in (("step", jnp.bfloat16, jnp.float32), ("update", jnp.float32, jnp.bfloat16)):
        values = [special(rows, seed)[: int(np.prod(shape[:-1]))].reshape(shape) for seed in range(3)]
        leaf = (
            jnp.asarray(values[0] * 0.1).astype(grad),
            stored(values[1], mu, 128, expand),
            stored(values[2] ** 2, nu, 128, expand, "nu"),
            jnp.asarray(np.nan_to_num(values[1] * 0.1)).astype(weight),
        )
        check_equal(*both(form, leaf), leaf)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_code_is_decoded_by_the_table(name):
    from tests.kernels.adamw_codes import check_every_code

    check_every_code(name)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "n"), covering([16, 32, 64, 256, 512, 1024], [2048, 1999, 1992]))
def test_group_sizes(size, n):
    leaf = (
        jnp.asarray(special((24, n), 0)),
        stored(special((24, n), 1), "e4m3", size),
        stored(special((24, n), 2) ** 2, "e4m3", size, moment="nu"),
        jnp.ones((24, n)),
    )
    check_equal(*both("step", leaf), leaf)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_stochastic_rounding_has_the_bits_of_the_reference(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    weight = x.astype(jnp.bfloat16).at[..., 3].set(jnp.nan).at[..., 70].set(jnp.inf)
    for w in (x.astype(jnp.bfloat16), weight):
        leaf = (x.astype(jnp.bfloat16), stored(x, "e4m3"), stored(x**2, "e4m3", moment="nu"), w)
        expected, actual = both("step", leaf, jax.random.key(7))
        nearest, _ = both("step", leaf)
        a, b, c = (np.asarray(r[0]).view(np.uint16) for r in (expected, actual, nearest))
        assert np.mean(a != b) < 1e-3
        assert np.mean(a != c) > 0.1
        np.testing.assert_array_equal(*(np.isfinite(np.asarray(r[0]).astype(np.float32)) for r in (expected, actual)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", marked(NOISY), ids=str)
def test_second_moments_are_rounded_stochastically_as_in_the_reference(case):
    compare_noise(*case)


@pytest.mark.gpu
@pytest.mark.parametrize("rate", [np.nan, np.inf, 0.0, 100.0])
def test_stochastic_rounding_of_what_the_rate_makes(rate):
    leaf = tree((64, 1024), grad=jnp.bfloat16, weight=jnp.bfloat16)
    adam = dataclasses.replace(ADAM, rate=rate)
    step = functools.partial(adamw_cases.step, adam=adam, key=jax.random.key(7))
    expected, actual = (jax.jit(functools.partial(step, impl=impl))(*leaf)[0] for impl in ("xla", "triton"))
    np.testing.assert_allclose(expected.astype(jnp.float32), actual.astype(jnp.float32), rtol=2**-7)


@pytest.mark.gpu
def test_traced_scalars_and_absent_decay():
    leaf = tree((64, 1024), grad=jnp.bfloat16)
    for decays, form in itertools.product((True, False), ("step", "update")):

        def run(impl, rate, b2, decays=decays, form=form):
            adam = Adam(0.9, b2, 1e-6, 1e-9, jnp.int32(5), rate, 0.3)
            return getattr(adamw_cases, form)(*leaf, adam, decays=decays, impl=impl)

        scalars = jnp.float32(1e-3), jnp.float32(0.95)
        expected = jax.jit(functools.partial(run, "xla"), compiler_options=EXACT)(*scalars)
        actual = jax.jit(functools.partial(run, "triton"))(*scalars)
        check_equal(expected, actual, leaf, Adam(0.9, 0.95, 1e-6, 1e-9, jnp.int32(5), 1e-3))


def train(impl, steps, **storage):
    """Returns weights before and after some steps of a loss whose gradient is noise and a pull to zero."""
    start = {"w": jax.random.normal(jax.random.key(0), (128, 1024)) * 0.02, "b": jnp.ones(1024)}
    tx = fp8jax.compressed_adamw(1e-3, b2=0.999, weight_decay=0.1, impl=impl, **storage)
    step = jax.jit(tx.step, donate_argnums=(1, 2), compiler_options=EXACT if impl == "xla" else None)

    @jax.jit
    def gradient(params, i):
        def noisy(x):
            return (jax.random.normal(jax.random.key(i), x.shape) * 0.01 + 0.01 * x).astype(jnp.bfloat16)

        return jax.tree.map(noisy, params)

    params, state = jax.tree.map(jnp.copy, start), tx.init(start)
    for i in range(steps):
        params, state = step(gradient(params, i), state, params)
    return jax.tree.map(np.asarray, start), jax.tree.map(np.asarray, params)


@pytest.mark.gpu
def test_200_steps_stay_as_close_to_fp32_moments_as_the_reference():
    _, exact = train("xla", 200, mu="fp32", nu="fp32")
    start, reference = train("xla", 200)
    _, fused = train("triton", 200)
    error = np.linalg.norm(reference["w"] - exact["w"])
    assert error < 0.1 * np.linalg.norm(exact["w"] - start["w"])
    assert np.linalg.norm(fused["w"] - exact["w"]) < 1.05 * error
    # Codes near ties differ at once. After many steps, the rounding errors of both runs are unrelated.
    assert np.linalg.norm(fused["w"] - reference["w"]) < 1.5 * error
    np.testing.assert_allclose(fused["b"], reference["b"], rtol=1e-6)


@pytest.mark.gpu
def test_mapped_kernel():
    leaf = jax.tree.map(
        lambda x: (
            jnp.stack([x, 2 * x.astype(jnp.float32).astype(x.dtype)]) if x.dtype == jnp.float32 else jnp.stack([x, x])
        ),
        tree((16, 512)),
    )
    actual = jax.jit(jax.vmap(functools.partial(adamw_cases.step, adam=ADAM, impl="triton")))(*leaf)
    for i in range(2):
        expected = jax.jit(functools.partial(adamw_cases.step, adam=ADAM, impl="triton"))(
            *jax.tree.map(lambda x, i=i: x[i], leaf)
        )
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_array_equal(
                np.asarray(a[i]).view(np.uint8), np.asarray(b).view(np.uint8)
            ),
            actual,
            expected,
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("eps", "size"), covering([(1e-8, 0.0), (1e-3, 0.0), (1e-12, 0.0), (1e-8, 1e-9)], [16, 128, 1024]), ids=str
)
def test_ordinary_tiles_between_special_ones(eps, size):
    """Tiles without special values need fewer instructions. They are mixed with special tiles, and with a large eps."""
    adam = Adam(0.9, 0.999, *eps, jnp.int32(3), 1e-3, 0.1)
    values = [special((75, 2048), seed) for seed in range(3)]
    for values_ in values:
        values_[40:] = np.random.default_rng(7).standard_normal(values_[40:].shape) * 1e-2
    for form, grad, weight, code in (
        ("step", jnp.bfloat16, jnp.bfloat16, "e4m3"),
        ("update", jnp.float32, jnp.bfloat16, "e5m2"),
        ("step", jnp.bfloat16, jnp.float32, "e4m3"),
    ):
        leaf = (
            jnp.asarray(values[0] * 0.1).astype(grad),
            stored(values[1], code, size),
            stored(values[2] ** 2, "e4m3", size, moment="nu"),
            jnp.asarray(np.nan_to_num(values[1] * 0.1)).astype(weight),
        )
        run = [functools.partial(getattr(adamw_cases, form), adam=adam, impl=impl) for impl in ("xla", "triton")]
        expected, actual = jax.jit(run[0], compiler_options=EXACT)(*leaf), jax.jit(run[1])(*leaf)
        check_equal(expected, actual, leaf, adam)


@pytest.mark.gpu
@pytest.mark.parametrize("weight", [jnp.float32, jnp.bfloat16], ids=str)
def test_a_step_takes_a_factor_or_is_not_taken(weight):
    leaf = tree((64, 512), weight=weight)
    run = jax.jit(
        lambda leaf, ok: adamw_cases.step(*leaf, dataclasses.replace(ADAM, grad_scale=0.25, apply_if=ok), impl="triton")
    )
    scaled = dataclasses.replace(ADAM, grad_scale=0.25)
    expected = jax.jit(functools.partial(adamw_cases.step, adam=scaled, impl="xla"), compiler_options=EXACT)(*leaf)
    check_equal(expected, run(leaf, True), leaf, scaled)
    skipped = run(leaf, False)
    for x, y in zip(jax.tree.leaves((leaf[3], *leaf[1:3])), jax.tree.leaves(skipped), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
