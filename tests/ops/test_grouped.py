"""Grouped matmuls against float64: groups of any size, and rows in no group with arbitrary content."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import record_choices, target
from fp8jax.ops.matmul import grouped_hopper
from fp8jax.ops.matmul.grouped import grouped_matmul, grouped_matmul_dw
from fp8jax.ops.matmul.grouped_hopper import UnpaddedRows
from fp8jax.ops.quantization.group_scales import quantize_fallback_rows
from fp8jax.ops.quantization.quantize import quantize
from pallas_kernels.matmul import grouped_block_mosaic, grouped_int8_mosaic, grouped_mosaic
from tests.distance import relative
from tests.rows import covering, slow

ROWS, INPUTS, OUTPUTS, GROUPS = 300, 256, 192, 4
SIZES = {
    "even": [75, 75, 75, 75],
    "uneven": [3, 160, 0, 137],
    "one row": [0, 1, 0, 0],
    "all in one": [0, 0, 300, 0],
    "not full": [20, 0, 37, 11],
    "none": [0, 0, 0, 0],
}
RNG = np.random.default_rng(0)
X, W, DY = (RNG.normal(size=s).astype(np.float32) for s in ((ROWS, INPUTS), (GROUPS, OUTPUTS, INPUTS), (ROWS, OUTPUTS)))
SPECS = {
    "arrays": (None, None, None),
    "tensors": ("e4m3:token", "e4m3", "e4m3:group128"),
    "blocks": ("e4m3:group128", "e4m3:block128", "e4m3:block128"),
    "integers": ("int8:group128", "int8:block128", "int8:group32"),
}


def values(q):
    return np.asarray(q.dequantize() if hasattr(q, "dequantize") else q, np.float64)


def encode_groups(w, spec):
    return w if spec is None else jax.vmap(lambda w: quantize(w, spec)[0])(w)


@functools.cache
def forward(name):
    """Returns the codes, and the grouped product of these sizes."""
    x_spec, w_spec, _ = SPECS[name]
    w = encode_groups(jnp.asarray(W), w_spec)
    w_values = np.stack([values(jax.tree.map(lambda leaf, g=g: leaf[g], w)) for g in range(GROUPS)])
    run = jax.jit(lambda x, sizes: grouped_matmul(x, w, Groups.from_sizes(sizes, ROWS)))
    return lambda x: x if x_spec is None else quantize(x, x_spec)[0], w_values, run


@pytest.mark.parametrize(("name", "sizes"), covering(SPECS, SIZES))
def test_rows_by_the_matrix_of_their_group(name, sizes):
    encode, w, run = forward(name)
    counts = np.array(SIZES[sizes])
    group = np.repeat(np.arange(GROUPS), counts)
    x = encode(jnp.asarray(X))
    expected = np.einsum("tk,tnk->tn", values(x)[: len(group)], w[group])
    for bad in (1e7, 1e30, np.nan, np.inf):
        y = np.asarray(run(encode(jnp.asarray(X).at[len(group) :].set(bad)), counts))
        np.testing.assert_allclose(y[: len(group)], expected, rtol=1e-5, atol=1e-4)
        assert not y[len(group) :].any()


@pytest.mark.parametrize(("name", "sizes"), covering(SPECS, SIZES))
def test_tokens_of_each_group(name, sizes):
    x = jnp.asarray(X).at[sum(SIZES[sizes]) :].set(jnp.nan)
    a, b, dw, places = of_tokens(name)(x, np.array(SIZES[sizes]))
    assert not np.diff([*places.starts % 128, *places.lengths % 128]).any()
    starts = np.concatenate([[0], np.cumsum(SIZES[sizes])])
    for g in range(GROUPS):
        rows_ = slice(int(places.starts[g]), int(places.starts[g] + places.lengths[g]))
        np.testing.assert_allclose(dw[g], values(a)[:, rows_] @ values(b)[:, rows_].T, rtol=1e-5, atol=1e-4)
        rows = slice(starts[g], starts[g + 1])
        expected = X[rows].astype(np.float64).T @ DY[rows]
        assert np.linalg.norm(dw[g] - expected) <= (0.06 if SPECS[name][2] else 1e-6) * np.linalg.norm(expected)


@functools.cache
def of_tokens(name):
    spec = SPECS[name][2]

    @jax.jit
    def run(x, sizes):
        places = PaddedTokens.from_groups(Groups.from_sizes(sizes, ROWS), ROWS)
        a, b = (places.pad(m) for m in (x, jnp.asarray(DY)))
        a, b = (m.T if spec is None else quantize(m, None, spec)[1] for m in (a, b))
        return a, b, grouped_matmul_dw(a, b, places), places

    return run


def test_positions_of_rows_are_those_of_their_group_and_others_have_none():
    """Groups 1 and 2 of sizes 1, 5 and 3 in 11 rows: row 0 is before them, rows 9 and 10 are after them."""
    groups = Groups.from_sizes(jnp.array([1, 5, 3]), 11, jnp.int32(1), 2)
    places = PaddedTokens.from_groups(groups, 11, alignment=4)
    assert places.row_positions[1:9].tolist() == [0, 1, 2, 3, 4, 8, 9, 10]
    assert places.is_in_group.tolist() == [False, *[True] * 8, False, False]
    assert places.rows[:12].tolist() == [1, 2, 3, 4, 5, 11, 11, 11, 6, 7, 8, 11]


@pytest.mark.parametrize("spec", ["e4m3:group128", "int8:block32", None])
def test_tiles_of_several_blocks_end_with_their_group(spec):
    """Groups end inside a tile of 256 rows; the scales of the next group are NaN."""
    sizes = np.array([300, 380])
    places = PaddedTokens.from_groups(Groups.from_sizes(jnp.asarray(sizes), 700), 700)
    x, dy = (jnp.asarray(RNG.normal(size=(700, 32)), jnp.float32).at[300:].mul(bad) for bad in (1, jnp.nan))
    a, b = (UnpaddedRows(m) if spec is None else quantize(places.pad(m), None, spec)[1] for m in (x, dy))
    dw = grouped_matmul_dw(a, b, places)
    assert relative(dw[0], np.asarray(x, np.float64)[:300].T @ np.asarray(dy)[:300]) < (0.06 if spec else 1e-6)
    assert np.isnan(dw[1]).all()


def padded(sizes, rows):
    return PaddedTokens.from_groups(Groups.from_sizes(jnp.array(SIZES[sizes]), rows), rows)


def test_scales_of_each_group_are_multiplied_to_the_result():
    places = padded("uneven", ROWS)
    a, b = (places.pad(jnp.asarray(m)).T for m in (X, DY))
    scale, rows, columns = (
        jnp.asarray(RNG.uniform(1, 2, s).astype(np.float32)) for s in ((GROUPS,), (GROUPS, INPUTS), (GROUPS, OUTPUTS))
    )
    actual = grouped_matmul_dw(a, b, places, scale=scale, row_scale=rows, column_scale=columns)
    expected = grouped_matmul_dw(a, b, places) * scale[:, None, None] * rows[:, :, None] * columns[:, None]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(("cut", "kind"), covering(["t", "n", "k"], [AxisType.Auto, AxisType.Explicit]))
def test_operands_on_several_devices(cut, kind):
    """Devices multiply their shards. No device decodes another device's operand."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
    spec = lambda names: P(*("d" if name == cut else None for name in names.split()))  # noqa: E731
    groups = Groups.from_sizes(jnp.array(SIZES["not full"]), ROWS)
    x, w = quantize(jnp.asarray(X), "e4m3:group128")[0], encode_groups(jnp.asarray(W), "e4m3:block32")
    expected = grouped_matmul(x, w, groups)
    with jax.set_mesh(mesh):
        put = lambda leaf, names: jax.device_put(leaf, NamedSharding(mesh, spec(names)))  # noqa: E731
        x, w = jax.tree.map(lambda a: put(a, "t k"), x), jax.tree.map(lambda a: put(a, "- n k"), w)
        actual = jax.jit(grouped_matmul)(x, w, Groups(*(put(at, "-") for at in groups)))
    tolerance = 2e-2 if cut == "k" else 1e-6  # sums of codes are sent in 16 bits
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("cut", ["t", "n", "m"])
def test_tokens_on_several_devices(cut):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = lambda names: NamedSharding(mesh, P(*("d" if name == cut else None for name in names.split())))  # noqa: E731
    places = padded("uneven", ROWS + 128)
    assert places.length % 256 == 0
    x, dy = (np.pad(m, ((0, 128), (0, 0))) for m in (X, DY))
    a, b = (quantize(places.pad(jnp.asarray(m)), None, "e4m3:group128")[1] for m in (x, dy))
    run = lambda a, b: grouped_matmul_dw(a, b, places)  # noqa: E731
    expected = run(a, b)
    with jax.set_mesh(mesh):
        a, b = (jax.tree.map(lambda x, n=n: jax.device_put(x, sharding(n)), m) for m, n in ((a, "m t"), (b, "n t")))
        actual = jax.jit(run)(a, b)
    assert np.linalg.norm(actual - expected) <= (2e-2 if cut == "t" else 1e-6) * np.linalg.norm(expected)


@pytest.mark.parametrize("shape", [(0, 3, 8, 4), (8, 0, 8, 4), (8, 3, 8, 0), (8, 3, 0, 4), (2, 9, 8, 4)])
def test_empty_operands_and_more_groups_than_rows(shape):
    rows, groups, inputs, outputs = shape
    sizes = jnp.zeros(groups, jnp.int32).at[-1:].set(min(rows, 2))
    x, w, dy = jnp.ones((rows, inputs)), jnp.ones((groups, outputs, inputs)), jnp.ones((rows, outputs))
    of = Groups.from_sizes(sizes, rows)
    y, places = grouped_matmul(x, w, of), PaddedTokens.from_groups(of, rows)
    dw = grouped_matmul_dw(places.pad(x).T, places.pad(dy).T, places)
    assert y.shape == (rows, outputs)
    assert dw.shape == (groups, inputs, outputs)
    np.testing.assert_array_equal(y[:2], jnp.full_like(y[:2], inputs if groups else 0))
    np.testing.assert_array_equal(dw[-1:], jnp.full_like(dw[-1:], min(rows, 2)))


def test_bad_input():
    x, w, groups = jnp.asarray(X), jnp.asarray(W), Groups.from_sizes(jnp.array(SIZES["even"]), ROWS)
    with pytest.raises(ValueError, match=r"got \(300, 192\), \(4, 192, 256\) and 4 groups"):
        grouped_matmul(jnp.asarray(DY), w, groups)
    with pytest.raises(ValueError, match="unknown impl 'fast'"):
        grouped_matmul(x, w, groups, impl="fast")
    with target(capability=80), pytest.raises(ValueError, match=r"'mosaic' cannot run: .* needs a Hopper GPU"):
        grouped_matmul(x, w, groups, impl="mosaic")
    with record_choices() as choices, target(capability=90, kernels=False):
        jax.eval_shape(grouped_matmul, x, w, groups)
    assert "kernels are switched off" in choices[0][1].reason
    with pytest.raises(ValueError, match=r"expects \(n, 896\), not \(256, 300\)"):
        grouped_matmul_dw(x.T, jnp.asarray(DY).T, padded("even", ROWS))


def test_no_operation_has_the_size_of_all_experts():
    """The program multiplies tiles: no matmul of all rows with all matrices, and no 16-bit copy of codes."""
    shapes = jax.eval_shape(
        lambda x, w: (quantize(x, "e4m3:token")[0], encode_groups(w, "e4m3")), jnp.asarray(X), jnp.asarray(W)
    )
    text = jax.jit(grouped_matmul).lower(*shapes, Groups.from_sizes(jnp.array(SIZES["even"]), ROWS)).compile().as_text()
    shape = f"[{GROUPS},{OUTPUTS},{INPUTS}]"
    assert f"u8{shape}" in text
    assert not [dtype for dtype in ("f32", "bf16", "f16") if f"{dtype}{shape}" in text]


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels that run in the interpreter."""
    for module, names in (
        (grouped_mosaic, ("grouped_matmul", "grouped_matmul_dw")),
        (grouped_block_mosaic, ("grouped_block_matmul", "grouped_block_matmul_dw")),
        (grouped_int8_mosaic, ("grouped_int8_block_matmul", "grouped_int8_block_matmul_dw")),
    ):
        for name in names:
            kernel = functools.partial(getattr(module, name), interpret=plgpu.InterpretGPUParams())
            monkeypatch.setattr(module, name, kernel)


@pytest.mark.parametrize(("x_spec", "w_spec", "name"), [
    slow("e4m3:token", "e4m3", "codes"),
    ("e4m3", "e4m3:token", "codes"),
    ("e4m3:group128", "e4m3:block128", "block"),
    slow("e4m3:group32", "e4m3", "bf16"),
])  # fmt: skip
def test_kernel_of_rows_is_given_the_scales_of_codes(interpreted, x_spec, w_spec, name):
    """Groups start after the first row. Unsupported codes are decoded."""
    groups = Groups.from_sizes(jnp.array([9, 13, 0, 16]), 40, jnp.int32(1), 3)
    x, w = quantize(jnp.asarray(X[:40, :128]), x_spec)[0], encode_groups(jnp.asarray(W[:3, :64, :128]), w_spec)
    choice, kernel = grouped_hopper.choose_kernel(x, w, 128, False)
    assert (choice.impl, kernel) == ("mosaic", name)
    actual = grouped_hopper.multiply_rows(kernel, False, True, 0, jnp.float32, x, w, *groups)
    assert relative(actual, grouped_matmul(x, w, groups, impl="xla")) < (1e-2 if kernel == "bf16" else 1e-6)
    assert not actual[:9].any()
    assert not actual[38:].any()


@pytest.mark.parametrize("has_fallback", [slow(False), True])
def test_kernel_of_int8_blocks_is_given_each_groups_blocks(interpreted, has_fallback):
    """Blocks of rows start at each group's first row. NaN affects its block, which does not fall back."""
    groups = Groups.from_sizes(jnp.array([9, 130, 0, 61]), 210, jnp.int32(1), 3)
    tokens, spec = PaddedTokens.from_groups(groups, 210), QuantSpec.parse("int8:block128")
    x = jnp.asarray(RNG.normal(size=(210, 256)), jnp.float32).at[20, 200].set(50).at[150, 3].set(jnp.nan)
    w = encode_groups(jnp.asarray(W[:3, :64]), spec)
    x, counts = quantize_fallback_rows(x, spec, jnp.array([10.0, 10.0, 1.0]), tokens)
    np.testing.assert_array_equal(counts, [[1, 4], [0, 0], [1, 2]])
    x = x if has_fallback else x.base
    _, kernel = grouped_hopper.choose_kernel(x, w, 256, True)
    assert kernel == "int8 block"
    assert grouped_hopper.choose_kernel(x, w, 256, False)[1] == "bf16"
    actual = grouped_hopper.multiply_rows(kernel, False, True, 0, jnp.float32, x, w, *groups)
    expected = grouped_matmul(x, w, groups, impl="xla")
    assert np.isnan(expected[150]).all()
    assert np.isnan(actual[139:200]).all()
    assert relative(actual[9:139], expected[9:139]) < 1e-6
    assert not actual[np.r_[:9, 200:210]].any()


@pytest.mark.parametrize("spec", ["rows of codes", slow("e4m3:group128"), slow("e4m3:group32"), "int8:block128", None])
def test_kernel_of_tokens_is_given_the_scales_of_codes(interpreted, spec):
    places = PaddedTokens.from_groups(Groups.from_sizes(jnp.array([9, 0, 13]), 40), 40)
    x, dy = (jnp.asarray(m[:40, :64], jnp.bfloat16).at[30:].set(jnp.nan) for m in (X, DY))
    if spec == "rows of codes":
        a, b = (UnpaddedRows(quantize(m, "e4m3")[0]) for m in (x, dy))
    elif spec is None:
        a, b = UnpaddedRows(x), UnpaddedRows(dy)
    else:
        a, b = (quantize(places.pad(m), None, spec)[1] for m in (x, dy))
    scales = {"scale": jnp.array([1.0, 2, 3]), "row_scale": jnp.asarray(RNG.uniform(1, 2, (3, 64)), jnp.float32)}
    _, kernel = grouped_hopper.choose_kernel(a, b, 40, True)
    bounds, arguments = (places.starts, places.starts + places.lengths), (*scales.values(), None)
    with target(kernels=False):  # codes are transposed by XLA
        actual = grouped_hopper.multiply_tokens(kernel, True, 0, jnp.float32, a, b, places.rows, *bounds, *arguments)
    expected = grouped_matmul_dw(a, b, places, **scales, impl="xla")
    assert relative(actual, expected) < (1e-2 if kernel == "bf16" else 1e-6)
    assert not actual[1].any()
