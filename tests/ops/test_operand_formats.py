"""The three matmuls of a linear, with every pair of operand formats, against NumPy."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8jax
from fp8jax.core.recipe import SAME, Linear
from tests.distance import relative

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
MAX = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
FIELDS = ("x", "w", "dy", "w_dgrad", "x_wgrad", "dy_wgrad", "x_residual")
# Columns of an orthogonal array of strength two: of any two each pair of the numbers 0, 1, 2 stands in three rows.
COLUMNS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1))
# The first forms are those of x, w and dy; the others have the same codes.
FORMS = {field: ("e4m3", "e5m2", "e4m3" if field in ("x", "w", "dy") else SAME) for field in FIELDS}
PAIRS = [
    {field: FORMS[field][np.dot(row, column) % 3] for field, column in zip(FIELDS, COLUMNS, strict=True)}
    for row in itertools.product(range(3), repeat=3)
]
BLOCKS = [
    dict(x="e4m3:group16", w="e5m2:block32", dy="e5m2:group32", x_wgrad="e5m2:group32", dy_wgrad="e4m3:group16"),
    dict(x="e5m2:token", w="e4m3:token", dy="e4m3:token", w_dgrad="e5m2:token", x_wgrad="e4m3:token", dy_wgrad="e5m2"),
    dict(x="e4m3:token", w="e4m3:group16", dy="e5m2:block16", w_dgrad="e4m3:group8", x_residual="e5m2:block16",
         x_wgrad="e4m3:token"),
    dict(x="e5m2", w="e4m3", dy="e5m2", x_residual=None, x_wgrad="e4m3", dy_wgrad="e4m3"),
    dict(x="e4m3", w="e5m2", dy="e4m3", x_residual=None, x_wgrad="e5m2", dy_wgrad="e5m2", w_dgrad="e4m3"),
    dict(x="int8", w="int8", dy="e4m3", w_dgrad="e5m2", x_wgrad="e4m3"),
    dict(x="int8:token", w="int8:group16", dy="int8:block16", w_dgrad="int8:token", x_residual="int8:block32"),
    dict(x="e4m3", w="e5m2", dy="int8", w_dgrad="int8", x_wgrad="int8", dy_wgrad="int8:token"),
    dict(x="e4m3:mx32", w="e4m3:mx32", dy="e5m2:mx32", w_dgrad="e5m2:mx32", x_wgrad="e5m2:token",
         dy_wgrad="e4m3:token"),
]  # fmt: skip


def problem():
    """Operands with rows and columns of different magnitudes, so that wrong scale axes show."""
    rng = np.random.default_rng(0)

    def one(rows, columns):
        sizes = np.exp(rng.normal(size=(rows, 1)) + 0.5 * rng.normal(size=(1, columns)))
        return (rng.normal(size=(rows, columns)) * sizes).astype(np.float32)

    return one(40, 48), 0.1 * one(48, 32), 1e-3 * one(40, 32)


def rounded(x, text, largest=None):
    """Returns decoded codes of x in float64: one rounding to nearest with the scales of a spec.

    Scales, reciprocals and quotients are in fp32, as in the library. If codes are quantized again, many values are
    ties.
    """
    if text is None:
        return x
    x, one = x.astype(np.float32), np.float32(1)
    name, _, option = text.partition(":")
    kind = option.rstrip("0123456789")
    size = int(option[len(kind) :] or 0)
    rows, columns = x.shape
    tile = {"": (rows, columns), "token": (1, columns), "group": (1, size), "block": (size, size), "mx": (1, columns)}
    top = np.zeros_like(x)
    for i, j in itertools.product(range(0, rows, tile[kind][0]), range(0, columns, tile[kind][1])):
        part = slice(i, i + tile[kind][0]), slice(j, j + tile[kind][1])
        top[part] = np.abs(x[part]).max()
    if kind == "mx":  # rows' scales are powers of two times that of the tensor
        top = top.max() * 2 ** np.ceil(np.log2(top / top.max()))
    if largest is not None and kind in ("", "token"):
        top = np.full_like(x, largest)
    scale = top * (one / np.float32(MAX[name]))
    codes = np.clip(x * (one / scale), -MAX[name], MAX[name])
    codes = np.rint(codes) if name == "int8" else codes.astype(DTYPES[name])
    return (codes.astype(np.float32) * scale).astype(np.float64)


def reference(part, x, w, dy, largest):
    """Returns y, dx and dw in float64. `largest`: given amax by operand, or empty."""
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    own = {name: getattr(part, name) for name in FIELDS}
    second = {name: own[of] if own[name] == SAME else own[name] for name, of in (("w_dgrad", "w"), ("dy_wgrad", "dy"))}
    saved = own["x"] if own["x_residual"] == SAME else own["x_residual"]
    x_wgrad = saved if own["x_wgrad"] == SAME else own["x_wgrad"]
    y = rounded(x, own["x"], largest.get("x")) @ rounded(w.T, own["w"], largest.get("w")).T
    dx = rounded(dy, own["dy"], largest.get("dy")) @ rounded(w, second["w_dgrad"], largest.get("w")).T
    stored = rounded(x, saved, largest.get("x"))
    again = stored.T if x_wgrad == saved else rounded(stored.T, x_wgrad, largest.get("x") if saved is None else None)
    return y, dx, again @ rounded(dy.T, second["dy_wgrad"], largest.get("dy")).T


def computed(part, x, w, dy, largest, prequantized):
    x, w, dy = map(jnp.asarray, (x, w, dy))
    if not part.stateful_strategies:
        quantized = fp8jax.quantize_weight(w, recipe=part) if prequantized else None
        y, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=part, quantized=quantized), x, w)
        return y, *vjp_fn(dy)
    state = fp8jax.init_scaling(part, w)
    histories = {name: jnp.array([value, 0], jnp.float32) for name, value in largest.items()}
    state = state._replace(**histories | ({"w": jnp.float32(largest["w"])} if part.needs_weight_bounds else {}))
    scale = fp8jax.weight_scale(w, state, recipe=part)
    quantized = fp8jax.quantize_weight(w, recipe=part, scale=scale) if prequantized else None
    run = lambda x, w: fp8jax.scaled_linear(x, w, state, jnp.zeros([]), recipe=part, quantized=quantized)[0]  # noqa: E731
    y, vjp_fn = jax.vjp(run, x, w)
    return y, *vjp_fn(dy)


def check(part, largest, prequantized):
    arrays = problem()
    results, exact_results = computed(part, *arrays, largest, prequantized), reference(part, *arrays, largest)
    for name, actual, exact in zip(("y", "dx", "dw"), results, exact_results, strict=True):
        # Products of codes differ by the order of fp32 sums; a code at a tie may round either way.
        assert relative(actual, exact) < 1e-6, (name, part)


def test_the_table_has_every_pair_of_forms():
    for a, b in itertools.combinations(FIELDS, 2):
        assert {(p[a], p[b]) for p in PAIRS} == set(itertools.product(FORMS[a], FORMS[b]))


@pytest.mark.parametrize("prequantized", [False, True], ids=["", "weights before"])
def test_every_pair_of_formats_multiplies_as_in_float64(prequantized):
    for forms in PAIRS if not prequantized else PAIRS[::3]:
        check(Linear(**forms), {}, prequantized)


@pytest.mark.parametrize("prequantized", [False, True], ids=["", "weights before"])
def test_every_pair_of_formats_has_the_range_that_histories_give_the_operand(prequantized):
    """0.7 of the amax: larger values saturate to it, in each format and in both matmuls."""
    largest = {name: 0.7 * np.abs(a).max() for name, a in zip(("x", "w", "dy"), problem(), strict=True)}
    for forms in PAIRS if not prequantized else PAIRS[::3]:
        check(Linear(**forms, scaling="delayed", amax_history_length=2), largest, prequantized)
    for forms in PAIRS[:9:4]:
        check(Linear(**forms, scaling="delayed", w_scaling="automatic", amax_history_length=2), largest, prequantized)


@pytest.mark.parametrize("forms", BLOCKS, ids=lambda forms: " ".join(f"{k}={v}" for k, v in forms.items()))
def test_scales_of_any_granularity_run_along_the_contraction_of_their_product(forms):
    part = Linear(**forms)
    check(part, {}, False)
    if part.spec("w_dgrad") != part.spec("w") and not part.spec("w").is_folded:
        check(part, {}, True)


@pytest.mark.parametrize("form", ["x and dy", "w"])
@pytest.mark.parametrize(
    "forms", [PAIRS[4], BLOCKS[0], {"x": None, "w": None, "dy": None}], ids=["tensor", "blocks", "16 bits"]
)
def test_of_mixed_dtypes_each_result_is_rounded_to_its_own_alone(forms, form):
    """An fp32 gradient with a bf16 input has the bits of fp32, and is not a cast of a rounded one."""
    low = {"x and dy": (True, False, True), "w": (False, True, False)}[form]
    arrays = [a.astype(ml_dtypes.bfloat16) if cast else a for a, cast in zip(problem(), low, strict=True)]
    part = Linear(**forms)
    y, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=part), *map(jnp.asarray, arrays[:2]))
    actual = y, *vjp_fn(jnp.asarray(arrays[2]))
    if not part.is_quantized:  # one bf16 operand makes it a bf16 product
        arrays = [a.astype(ml_dtypes.bfloat16) for a in arrays]
    wide = [a.astype(np.float32) for a in arrays]
    for name, result, exact, cast in zip(
        ("y", "dx", "dw"), actual, reference(part, *wide, {}), (*low[:1], *low[:2]), strict=True
    ):
        assert result.dtype == (jnp.bfloat16 if cast else jnp.float32), name
        assert relative(result, exact) < (2.0**-8 if cast else 1e-6), name
        if not cast:
            assert (np.asarray(result) != np.asarray(result).astype(ml_dtypes.bfloat16).astype(np.float32)).any(), name
