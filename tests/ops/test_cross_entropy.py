"""Cross-entropy of a linear head against full logits, in float64 and by optax; its memory; its sharding."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import P
from jax.experimental import checkify

import fp8jax
from fp8jax.ops.losses import cross_entropy, head
from fp8jax.recipes import Linear
from tests.distance import relative
from tests.programs import count, dots
from tests.rows import covering, few

TOKENS, CHANNELS, VOCABULARY = (3, 7), 16, 40
RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(*TOKENS, CHANNELS)), RNG.normal(size=(CHANNELS, VOCABULARY))
BIAS, WEIGHTS = RNG.normal(size=VOCABULARY), RNG.normal(size=TOKENS)
LABELS, WHERE = RNG.integers(0, VOCABULARY, TOKENS), RNG.random(TOKENS) > 0.3
VARIANTS = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "smoothed": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "all": {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-2},
}


def floats(*arrays, dtype=jnp.float32):
    return tuple(jnp.asarray(a, dtype) for a in arrays)


def in_float64(x, w, b, *, softcap=None, label_smoothing=0.0, z_loss=0.0):
    """Returns losses (...) by the formula, in NumPy."""
    z = x @ w + b
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    root = np.log(np.sum(np.exp(z), axis=-1))
    target = (1 - label_smoothing) * np.eye(VOCABULARY)[LABELS] + label_smoothing / VOCABULARY
    return -np.sum(target * (z - root[..., None]), axis=-1) + z_loss * root**2


def by_optax(x, w, b, *, softcap=None, label_smoothing=0.0, z_loss=0.0):
    """Returns losses (...) of full logits."""
    z = x @ w + b
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    target = optax.smooth_labels(jax.nn.one_hot(LABELS, VOCABULARY), label_smoothing)
    return optax.softmax_cross_entropy(z, target) + z_loss * jax.nn.logsumexp(z, axis=-1) ** 2


def loss(x, w, b=None, **options):
    return fp8jax.linear_cross_entropy(x, w, jnp.asarray(LABELS), bias=b, **options)


@pytest.mark.parametrize(("variant", "tokens_per_chunk"), covering(VARIANTS, [None, 1, 5, 6]))
def test_values_are_those_of_whole_logits(variant, tokens_per_chunk):
    options = VARIANTS[variant]
    expected = in_float64(X, W, BIAS, **options)
    where = {"where": jnp.asarray(WHERE), "tokens_per_chunk": tokens_per_chunk, **options}
    np.testing.assert_allclose(loss(*floats(X, W, BIAS), reduction="none", **where), expected * WHERE, rtol=1e-5)
    np.testing.assert_allclose(loss(*floats(X, W, BIAS), reduction="sum", **where), expected[WHERE].sum(), rtol=1e-5)
    np.testing.assert_allclose(loss(*floats(X, W, BIAS), **where), expected[WHERE].mean(), rtol=1e-5)


@pytest.mark.parametrize(("variant", "reduction"), covering(VARIANTS, ["mean", "sum", "none"]))
def test_gradients_are_those_of_whole_logits(variant, reduction):
    operands, where, options = floats(X, W, BIAS), jnp.asarray(WHERE), VARIANTS[variant]
    weights = {"mean": WHERE / WHERE.sum(), "sum": WHERE, "none": WEIGHTS * WHERE}[reduction]

    def ours(*operands):
        value = loss(*operands, where=where, reduction=reduction, tokens_per_chunk=6, **options)
        return 3 * (jnp.sum(value * WEIGHTS) if reduction == "none" else value)

    expected = jax.grad(lambda *a: 3 * jnp.sum(by_optax(*a, **options) * weights), (0, 1, 2))(*operands)
    for gradient, reference in zip(jax.grad(ours, (0, 1, 2))(*operands), expected, strict=True):
        assert relative(gradient, reference) < 2e-6


def test_a_table_has_its_vocabulary_first():
    x, w = floats(X, W)
    value, gradient = jax.value_and_grad(lambda w: loss(x, w, tokens_per_chunk=8))(w)
    table, of_table = jax.value_and_grad(lambda w: loss(x, w, vocabulary_axis=0, tokens_per_chunk=8))(w.T)
    np.testing.assert_allclose(table, value, rtol=1e-6)
    assert relative(of_table.T, gradient) < 1e-6


def test_dtypes_are_those_of_operands():
    x, w = jnp.asarray(X, jnp.bfloat16), jnp.asarray(W, jnp.float32)
    value, (dx, dw) = jax.value_and_grad(loss, (0, 1))(x, w, None)
    assert (value.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    expected = jax.grad(lambda x, w: by_optax(x, w, 0.0).mean(), (0, 1))(x.astype(jnp.float32), w)
    # Logits' cotangents and the gradient of x are rounded to bf16, half a step of 2^-8 each.
    assert relative(dx, expected[0]) < 2**-8
    assert relative(dw, expected[1]) < 2**-8


INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("dtype", few(INTEGERS, "uint8", "int64"))
def test_labels_of_any_integers(dtype):
    """The vocabulary may exceed the range of the label dtype. Labels with equal last 8, 16 or 32 bits stay distinct."""
    with jax.enable_x64(dtype.endswith("64")):
        x, w = floats(X, np.tile(W, (1, 320 // VOCABULARY)))
        limits, labels = jnp.iinfo(dtype), np.array(LABELS, dtype)
        fits = lambda label: limits.min <= label <= limits.max  # noqa: E731
        ignored = [label for label in (-100, 255) if fits(label)]
        outside = [label for label in (-1, 320, 2**16 - 100, 2**32 - 100, 2**32 + 5, 2**64 - 100) if fits(label)]
        beside = [None, -100, 255, 2**40]
        for i, label in enumerate([*ignored, *outside]):
            labels[1, i] = label
        expected = np.array(optax.softmax_cross_entropy_with_integer_labels(x @ w, LABELS))
        for ignore in beside:
            actual = fp8jax.linear_cross_entropy(x, w, jnp.asarray(labels), reduction="none", ignore_label=ignore)
            for i, label in enumerate([*ignored, *outside]):
                entry = optax.softmax_cross_entropy_with_integer_labels(x[1, i] @ w, max(0, min(label, 319)))
                expected[1, i] = 0 if label == ignore else np.nan if label in (-100, *outside) else entry
            np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_labels_of_numpy_are_not_cut_to_32_bits():
    x, w, labels = *floats(X, W), LABELS.astype(np.int64)
    labels[1, 2], labels[2, 3] = 2**32 - 100, 2**32 + 5
    actual = fp8jax.linear_cross_entropy(x, w, labels, reduction="none")
    assert np.argwhere(np.isnan(actual)).tolist() == [[1, 2], [2, 3]]


def test_gradients_of_a_scaled_loss_survive_in_float16():
    x, w = floats(X, W, dtype=jnp.float16)
    for reduction, scale, of in (("mean", 2.0**15, LABELS.size), ("sum", 2.0**10, 1)):
        gradient = jax.grad(lambda x, r=reduction, scale=scale: loss(x, w, reduction=r) * scale)(x)
        whole = jax.grad(lambda x, factor=scale / of: by_optax(x, w.astype(jnp.float32), 0.0).sum() * factor)
        expected = whole(x.astype(jnp.float32))
        assert gradient.dtype == jnp.float16
        assert relative(gradient, expected) < 2**-9
    many = jnp.asarray(np.repeat(X[:1, :1], 1 << 17, axis=1), jnp.float16)
    labels = jnp.zeros(many.shape[:-1], jnp.int32)
    gradient = jax.grad(lambda x: fp8jax.linear_cross_entropy(x, w, labels) * 2.0**17)(many)[0, 0]
    one = jax.grad(lambda x: fp8jax.linear_cross_entropy(x, w, labels[:, :1]))(many[:, :1])[0, 0]
    assert relative(gradient, one) < 2**-9  # 2^-17 of it would be below the smallest fp16


def test_what_does_not_count_has_no_effect():
    x, w = floats(X, W)
    hidden = jnp.where(jnp.asarray(WHERE)[..., None], x, jnp.nan)
    labels = jnp.where(jnp.asarray(WHERE), LABELS, -100)
    value, (dx, dw) = jax.value_and_grad(
        lambda x, w: fp8jax.linear_cross_entropy(x, w, labels, ignore_label=-100), (0, 1)
    )(hidden, w)
    expected = in_float64(X, W, 0.0)[WHERE].mean()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert not np.any(np.asarray(dx)[~WHERE])
    assert np.all(np.isfinite(dw))
    some = jnp.asarray(np.arange(LABELS.size).reshape(LABELS.shape) % 3 > 0)
    both = fp8jax.linear_cross_entropy(hidden, w, labels, where=some, ignore_label=-100)
    np.testing.assert_allclose(both, loss(x, w, where=some & WHERE), rtol=1e-6)
    each = fp8jax.linear_cross_entropy(hidden, w, labels, where=jnp.asarray(WHERE), reduction="none")
    assert not np.any(np.asarray(each)[~WHERE])
    none = jax.value_and_grad(lambda x: loss(x, w, where=jnp.zeros(TOKENS, bool)))(x)
    assert not any(np.any(part) for part in none)


@pytest.mark.parametrize("recipe", few([None, "te_current", "fast"], "te_current"))
def test_labels_outside_of_the_vocabulary_are_ignored_or_seen(recipe):
    """PyTorch's -100 is ignored by default. Other labels give NaN if they count, and an error under checkify."""
    x, w = floats(X, W)

    @functools.partial(jax.jit, static_argnames=("reduction", "ignore_label"))
    def step(x, w, labels, reduction="mean", **options):
        call = functools.partial(fp8jax.linear_cross_entropy, recipe=recipe, tokens_per_chunk=5, **options)
        loss = lambda x, w: (jnp.sum(y := call(x, w, labels, reduction=reduction)), y)  # noqa: E731
        (_, value), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return value, gradients

    where, ignored = jnp.asarray(WHERE), jnp.where(jnp.asarray(WHERE), LABELS, -100)
    for reduction in ("mean", "none"):
        result = step(jnp.where(where[..., None], x, jnp.nan), w, ignored, reduction)
        jax.tree.map(np.testing.assert_array_equal, result, step(x, w, jnp.asarray(LABELS), reduction, where=where))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result))
    for label, options in ((-1, {}), (VOCABULARY, {}), (-100, {"ignore_label": None})):
        labels = jnp.asarray(LABELS).at[1, 2].set(label)
        each, (dx, dw) = step(x, w, labels, "none", **options)
        assert np.argwhere(np.isnan(each)).tolist() == [[1, 2]]
        assert np.isnan(dw).any()
        assert np.isnan(dx[1, 2]).all()
    assert np.isnan(step(x, w, jnp.asarray(LABELS).at[1, 2].set(-1))[0])
    checked = jax.jit(checkify.checkify(step))
    assert checked(x, w, ignored)[0].get() is None
    message = checked(x, w, jnp.asarray(LABELS).at[1, 2].set(-7))[0].get()
    assert f"labels must be in [0, {VOCABULARY}), got labels from -7 to " in message


def test_logits_are_never_whole():
    x, w, labels = jnp.ones((64, 8)), jnp.ones((8, 512)), jnp.zeros(64, jnp.int32)

    def mean(x, w, **options):
        return fp8jax.linear_cross_entropy(x, w, labels, tokens_per_chunk=8, **options)

    step = jax.value_and_grad(mean, (0, 1))
    assert "64,512" not in str(jax.make_jaxpr(step)(x, w))
    assert len(dots(step, x, w)) == 3
    assert len(dots(mean, x, w)) == 1
    whole = jax.jit(jax.value_and_grad(lambda x, w: by_whole(x, w, labels), (0, 1))).lower(x, w).compile()
    chunked = jax.jit(step).lower(x, w).compile()
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (chunked, whole)]
    assert sizes[0] < sizes[1] / 2
    each = jax.value_and_grad(lambda x, w: jnp.sum(mean(x, w, reduction="none")), (0, 1))
    assert len(dots(each, x, w)) == 4
    assert "64,512" not in str(jax.make_jaxpr(each)(x, w))


def by_whole(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


def test_chunks_have_a_gibibyte_and_a_half_by_default():
    """Logits and cotangents need 6 bytes per element, with codes 4. Chunks are rounded up to whole tiles."""

    def loops(tokens, vocabulary, recipe=None):
        shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((tokens, 4), "float32"), ((4, vocabulary), "float32"))]
        labels = jax.ShapeDtypeStruct((tokens,), "int32")
        call = functools.partial(fp8jax.linear_cross_entropy, recipe=recipe)
        program = str(jax.make_jaxpr(jax.grad(call, (0, 1)))(*shapes, labels))
        return int(re.search(r"length=(\d+)", program)[1])

    assert loops(16384, 128256) == 8
    assert loops(14336, 128256) == 7
    assert loops(13312, 128256) == 8  # 7 would do
    assert loops(16384, 32000) == 2
    assert loops(4096, 32000) == 1
    assert loops(1 << 20, 128256) == 16
    assert loops(16384, 128256, "te_current") == 4
    # More chunks than that only where none has 8,192 tokens.
    assert loops(16384, 4000, "te_current") == 2
    assert loops(1 << 20, 128256, "te_current") == 16


@pytest.mark.parametrize(
    ("shape", "axis", "number"), [((4, 64, 16), 1, 8), ((64, 4, 16), 0, 8), ((8, 8, 16), 1, 2), ((3, 2, 16), 0, 1)]
)
def test_chunks_are_of_the_longest_axis_of_tokens(shape, axis, number):
    """A shorter axis might have fewer tokens than there are chunks."""
    x = np.arange(np.prod(shape)).reshape(shape)
    chunks = cross_entropy.TokenChunks.from_array(x, 40, False, tokens_per_chunk=32)
    assert chunks == (axis, shape[axis], number)
    np.testing.assert_array_equal(chunks.merge(chunks.split(jnp.asarray(x))), x)


MESHES = {
    "data": (P(("data", "model")), P()),
    "fsdp": (P("data"), P("data", None)),
    "vocabulary": (P("data"), P(None, "model")),
    "sequence": (P(None, "data"), P()),
    "sequence and vocabulary": (P(None, "data"), P(None, "model")),
}


def test_a_key_is_the_heads():
    x, w = floats(X, W)
    recipe = Linear("int8:block16", "int8:block16", "int8:block16+stochastic")
    one, again, other = (
        jax.grad(lambda w, i=i: loss(x, w, recipe=recipe, key=jax.random.key(i)))(w) for i in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert 0 < relative(one, other) < 0.1


CUT = [(kind, placed, None) for kind in ("Auto", "Explicit") for placed in MESHES]
CUT_IN_8_BITS = [("Auto", "fsdp"), ("Auto", "vocabulary"), ("Explicit", "sequence and vocabulary")]


@pytest.mark.parametrize(
    ("kind", "placed", "recipe"),
    few(
        [*CUT, *((*case, "te_current") for case in CUT_IN_8_BITS)],
        ("Auto", "data", None), ("Explicit", "vocabulary", None), ("Explicit", "sequence and vocabulary", "te_current"),
    ),
)  # fmt: skip
def test_meshes_cut_it_as_they_lie(kind, placed, recipe):
    rng, (of_x, of_w) = np.random.default_rng(1), MESHES[placed]
    operands = (
        *floats(rng.normal(size=(4, 16, 24)), rng.normal(size=(24, 64)), rng.normal(size=64)),
        jnp.asarray(np.where(rng.random((4, 16)) < 0.2, -100, rng.integers(0, 64, (4, 16)))),
    )

    def step(reduction, x, w, bias, labels):
        call = functools.partial(fp8jax.linear_cross_entropy, softcap=9.0, label_smoothing=0.1, z_loss=1e-3)
        call = functools.partial(call, recipe=recipe)
        mean = lambda *a: jnp.mean(call(*a[:2], labels, bias=a[2], tokens_per_chunk=8, reduction=reduction))  # noqa: E731
        return jax.value_and_grad(mean, (0, 1, 2))(x, w, bias)

    def put(x, spec):
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    specs = (of_x, of_w, P(*of_w[1:]), of_x)
    for reduction in ("mean", "none"):
        one = jax.jit(functools.partial(step, reduction))
        expected = jax.device_get(one(*operands))
        with jax.set_mesh(mesh):
            many = jax.jit(functools.partial(step, reduction)).lower(*map(put, operands, specs)).compile()
            result = many(*map(put, operands, specs))
        # Codes are equal, except if a cotangent is at a tie: one code of 4,096 has a weight of 2^-6.
        assert relative(jax.device_get(result), expected) < (2e-6 if recipe is None else 2**-8)
    # Gradients of the weight are summed once, after the loop over chunks, and no logits are gathered.
    program = many.as_text()
    moved = re.findall(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute)\(", program)
    shapes = [s for line, _ in moved for s in re.findall(r"f32\[([\d,]+)\]", line)]
    assert sum(s in ("24,64", "24,32") for s in shapes) <= 2
    assert not [s for s in shapes if s.endswith((",64", ",32")) and s.count(",") == 2]


@pytest.mark.parametrize("recipe", ["te_current", "fast"])
def test_recipes_multiply_in_8_bits(recipe):
    """One scale per operand, as in linear layers of any other recipe."""
    x, w = jnp.asarray(X, jnp.bfloat16), jnp.asarray(W, jnp.float32)

    def mean(x, w, **options):
        return loss(x, w, recipe=recipe, tokens_per_chunk=8, **options)

    assert {kinds for kinds in dots(jax.grad(mean, (0, 1)), x, w)} <= {
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e5m2"),
    }
    expected = jax.value_and_grad(lambda x, w: by_optax(x, w, 0.0).mean(), (0, 1))(x.astype(jnp.float32), w)
    value, gradients = jax.value_and_grad(mean, (0, 1))(x, w)
    np.testing.assert_allclose(value, expected[0], rtol=0.02)
    # Half a step of e5m2 is 2^-3, that of e4m3 2^-4; rms of a uniform error is below 0.6 of its bound.
    assert relative(gradients, expected[1]) < 0.15
    table = jax.value_and_grad(lambda x, w: mean(x, w, vocabulary_axis=0), (0, 1))(x, w.T)
    assert relative(table, (value, (gradients[0], gradients[1].T))) < 1e-6
    assert count(jax.grad(mean), "dot_general", x, w) == 3


def test_heads_of_codes_have_one_fp8_scale_an_operand():
    parts = {name: fp8jax.recipes.get(name).linear for name in fp8jax.recipes.NAMES}
    coded = {name for name, part in parts.items() if not part.stateful_strategies and head.has_codes(part)}
    assert coded == {"coat", "coat_activations", "coat_fast", "te_current", "fp8_lm", "fp8_lm_two_phase"}
    assert head.has_codes(fp8jax.recipes.HEAD)
    assert not head.has_codes(dataclasses.replace(fp8jax.recipes.HEAD, dy="e5m2+stochastic", dy_wgrad="same"))
    assert not head.has_codes(dataclasses.replace(fp8jax.recipes.HEAD, rotation=16))
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))):
        x = jax.device_put(jnp.ones((4, CHANNELS)), P("data"))
        with pytest.raises(ValueError, match="with one FP8 scale per operand"):
            fp8jax.linear_cross_entropy(x, floats(W)[0], jnp.zeros(4, jnp.int32), recipe="fast")


def in_codes(x, dtype, scale=None):
    """Returns decoded values with one scale, in float64 except for their rounding."""
    largest = float(ml_dtypes.finfo(dtype).max)
    scale = np.abs(x).max() / largest if scale is None else scale / largest
    return np.clip(x / scale, -largest, largest).astype(np.float32).astype(dtype).astype(np.float64) * scale


@pytest.mark.parametrize(("variant", "axis"), [("plain", 0), ("all", 1), ("z_loss", 1), ("steep", 0)])
def test_a_head_has_one_scale_an_operand_whatever_the_chunks(variant, axis):
    """The amax of cotangents is not measured: |softmax - label| is at most 1, times the largest weight.

    A z-loss without a cap makes it larger. Logits of some hundreds do not saturate.
    """
    steep = variant == "steep"
    options, e4m3, e5m2 = VARIANTS["z_loss" if steep else variant], ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    cap, z_loss, smoothing = (options.get(name) for name in ("softcap", "z_loss", "label_smoothing"))
    inputs = X * (40 if steep else 1)
    x, w = in_codes(inputs, e4m3), in_codes(W, e4m3)
    z = x @ w + BIAS
    capped = z if cap is None else cap * np.tanh(z / cap)
    root = np.log(np.sum(np.exp(capped), axis=-1, keepdims=True))
    d = np.exp(capped - root) * (1 + 2 * (z_loss or 0) * root)
    d -= (1 - (smoothing or 0)) * np.eye(VOCABULARY)[LABELS] + (smoothing or 0) / VOCABULARY
    d *= (1 if cap is None else 1 - (capped / cap) ** 2) * WHERE[..., None] / WHERE.sum()
    steepest = 1 + (2 * z_loss * ((cap or 128) + np.log(VOCABULARY)) if z_loss else 0)
    if steep:
        steepest, least = (1 + 2 * z_loss * root[WHERE]).max(), steepest
        assert np.abs(d).max() * WHERE.sum() > 2 * least
    d_rows, d_columns = (in_codes(d, dtype, steepest / WHERE.sum()) for dtype in (e4m3, e5m2))
    expected = d_rows @ w.T, np.einsum("btd,btv->dv", x, d_columns), d.sum((0, 1))

    kwargs = {"where": jnp.asarray(WHERE), "recipe": fp8jax.recipes.HEAD, "vocabulary_axis": axis, **options}
    for tokens in (None,) if steep else (None, 5):
        call = functools.partial(loss, tokens_per_chunk=tokens, **kwargs)
        table = W if axis else W.T
        value, (dx, dw, db) = jax.value_and_grad(call, (0, 1, 2))(*floats(inputs, table, BIAS))
        each = in_float64(x, w, BIAS, **options)[WHERE]
        np.testing.assert_allclose(value, each.mean(), rtol=1e-5)
        # A few of 840 cotangents are near ties, and may round either way in fp32.
        assert relative((dx, dw if axis else dw.T, db), expected) < 2**-8


@pytest.mark.parametrize("variant", ["plain", "all"])
def test_the_gradients_of_a_head_that_is_sure_of_its_labels_are_as_exact_as_others(variant):
    """Cotangents are at most 1e-4 of the bound 1. Operands are exact in e4m3."""
    options, w = {"softcap": 60.0, "z_loss": 1e-6} if variant == "all" else {}, np.eye(CHANNELS)
    x, cap, labels = 12.0 * w, options.get("softcap", 1e9), jnp.arange(CHANNELS)
    z = cap * np.tanh(x @ w / cap)
    lse = np.log(np.sum(np.exp(z), -1, keepdims=True))
    d = (np.exp(z - lse) * (1 + 2 * options.get("z_loss", 0.0) * lse) - w) * (1 - (z / cap) ** 2) / CHANNELS
    call = functools.partial(fp8jax.linear_cross_entropy, labels=labels, recipe=fp8jax.recipes.HEAD, **options)
    dx, dw = jax.grad(call, (0, 1))(*floats(x, w))
    assert relative(dx, d @ w.T) < 2**-4
    assert relative(dw, x.T @ d) < 2**-3
    others = ~np.eye(CHANNELS, dtype=bool)
    assert relative(dx[others], (d @ w.T)[others]) < 2**-4


@pytest.mark.parametrize(("kind", "names"), covering(["Auto", "Explicit"], [("data",), ("data", "model")]), ids=str)
def test_gradients_of_devices_that_jax_checks_are_those_of_all_tokens(kind, names):
    """Weight and bias are equal on all devices. Their gradients differ and are summed."""
    rng = np.random.default_rng(1)
    operands = *floats(rng.normal(size=(4, 8, 24)), rng.normal(size=(24, 64)), rng.normal(size=64)), jnp.arange(32)
    operands = (*operands[:3], operands[3].reshape(4, 8))

    def mean(reduction, x, w, bias, labels):
        options = {"bias": bias, "tokens_per_chunk": 5, "reduction": reduction}
        return jnp.mean(fp8jax.linear_cross_entropy(x, w, labels, **options))

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    for reduction in ("mean", "none"):
        whole = functools.partial(mean, reduction)
        expected = jax.device_get(jax.value_and_grad(whole, (0, 1, 2))(*operands))
        with jax.set_mesh(mesh):
            each = jax.shard_map(
                lambda *operands_: jax.lax.pmean(whole(*operands_), "data"),  # noqa: B023
                in_specs=(P("data"), P(), P(), P("data")),
                out_specs=P(),
                axis_names={*names},
            )
            put = [jax.device_put(x, spec) for x, spec in zip(operands, (P("data"), P(), P(), P("data")), strict=True)]
            result = jax.device_get(jax.jit(jax.value_and_grad(each, (0, 1, 2)))(*put))
        assert relative(result, expected) < 1e-6


def test_it_maps():
    x, w = floats(X, W)
    batch = jax.vmap(lambda x, labels: fp8jax.linear_cross_entropy(x, w, labels, tokens_per_chunk=3))
    expected = in_float64(X, W, 0.0).mean(axis=1)
    np.testing.assert_allclose(batch(x, jnp.asarray(LABELS)), expected, rtol=1e-5)


BAD = {
    "the output head expects x": {"w": jnp.ones((CHANNELS + 1, 8))},
    "labels must have the shape": {"labels": jnp.zeros(3, jnp.int32)},
    "labels must be integers": {"labels": jnp.zeros(TOKENS)},
    "where must have the shape": {"where": jnp.ones(3, bool)},
    "where must be bool": {"where": jnp.ones(TOKENS)},
    "bias must have the shape": {"bias": jnp.ones(3)},
    "bias must be a float": {"bias": jnp.ones(VOCABULARY, jnp.complex64)},
    "the output head is empty: w has the shape .16, 0.": {"w": jnp.ones((CHANNELS, 0))},
    "the output head is empty: w has the shape .0, 8.": {"x": jnp.ones((*TOKENS, 0)), "w": jnp.ones((0, 8))},
    "softcap must be above 0": {"softcap": 0.0},
    "softcap must be finite": {"softcap": np.inf},
    "softcap must be a number": {"softcap": "30"},
    "label_smoothing must be in": {"label_smoothing": 1.5},
    "z_loss must be finite and at least 0, got -1": {"z_loss": -1.0},
    "z_loss must be finite and at least 0, got inf": {"z_loss": np.inf},
    "z_loss must be finite and at least 0, got nan": {"z_loss": np.nan},
    "ignore_label must be None or a static integer": {"ignore_label": 0.5},
    "tokens_per_chunk must be None or a static integer": {"tokens_per_chunk": 2.5},
    "tokens_per_chunk must be at least 1": {"tokens_per_chunk": 0},
    "reduction must be": {"reduction": "average"},
    "vocabulary_axis must be": {"vocabulary_axis": 2},
    "x and w must be floats": {"x": jnp.ones((*TOKENS, CHANNELS), jnp.int8)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused(message):
    arguments = {"x": floats(X)[0], "w": floats(W)[0], "labels": jnp.asarray(LABELS)} | BAD[message]
    with pytest.raises((ValueError, TypeError), match=message):
        fp8jax.linear_cross_entropy(arguments.pop("x"), arguments.pop("w"), arguments.pop("labels"), **arguments)


@pytest.mark.parametrize("name", ["softcap", "label_smoothing", "z_loss", "ignore_label", "tokens_per_chunk"])
def test_options_are_static(name):
    """A traced one is refused by its name. A number of NumPy or JAX counts as a number of Python."""
    x, w = floats(X, W)
    with pytest.raises(TypeError, match=f"{name} must be .*static"):
        jax.jit(lambda option: loss(x, w, **{name: option}))(1)
    expected = loss(x, w, **{name: 1})
    assert loss(x, w, **{name: np.int32(1)}) == loss(x, w, **{name: jnp.int32(1)}) == expected
    assert jax.jit(lambda x: loss(x, w, **{name: np.int32(1)}))(x) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("recipe", [None, "te_current", "fast"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("narrow", ["x", "w"])
def test_gradients_in_8_bits_are_refused(recipe, reduction, narrow):
    """The loss itself may have such operands, except where each chunk has its own scales."""
    dtypes = [jnp.float8_e4m3fn if name == narrow else jnp.float32 for name in ("x", "w")]
    x, w = (a.astype(dtype) for a, dtype in zip(floats(X, W), dtypes, strict=True))

    def total(x, w):
        return loss(x, w, recipe=recipe, reduction=reduction).sum()

    if recipe != "fast":
        wide = total(x.astype(jnp.float32), w.astype(jnp.float32))
        np.testing.assert_allclose(total(x, w), wide, rtol=0.05)
    with pytest.raises(ValueError, match="gradients in 8 bits would be 0 or NaN"):
        jax.grad(total)(x, w)
