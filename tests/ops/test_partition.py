"""Kernel calls on sharded arrays equal those on one device; references replace the kernels."""

import contextlib
import functools
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, monitoring
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8jax.core import formats as core_formats
from fp8jax.core import scaling
from fp8jax.core.qtensor import quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch import partition
from fp8jax.ops.dispatch.partition import DimSharding, notation, run_partitioned
from fp8jax.ops.matmul.hopper import sharded_matmul
from fp8jax.ops.matmul.matmul import dot_in_16_bits
from fp8jax.ops.quantization import fallback, fused_reference
from fp8jax.ops.quantization import quantize as ops
from tests.rows import covering, slow

LAYOUTS = [("rows", "columns"), ("rows",), (None, "rows"), (("rows", "columns"),), ()]
both = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(kind,) * 2)


def place(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, tree) for tree in (actual, expected)))


def statistics(x):
    def local(cut: DimSharding, x):
        first = cut.shard_offset("m", x.shape[0])
        return (
            x.T,
            cut.pmax(jnp.max(x), "m n"),
            cut.psum(jnp.sum(x.astype(jnp.int32), 0), "m"),
            jnp.max(x.reshape(x.shape[0], -1, 4), -1),
            first + jnp.arange(x.shape[0]),
        )

    return run_partitioned("statistics", None, local, (x,), ("m n",), ("n m", "", "n", "m n/4", "m"))


@both
@pytest.mark.parametrize(("layout", "within"), covering(LAYOUTS, [True, False]), ids=str)
def test_parts_are_put_together(kind, layout, within):
    x, mesh = jnp.round(100 * draw(0, 16, 32)), mesh_of(kind)
    with jax.set_mesh(mesh) if within else contextlib.nullcontext():
        actual = jax.jit(statistics)(place(mesh, x, *layout))
    rows = np.asarray(x)
    same(actual, (rows.T, rows.max(), rows.astype(np.int32).sum(0), rows.reshape(16, 8, 4).max(-1), np.arange(16)))


def test_what_is_cut_stays_cut():
    mesh = mesh_of(AxisType.Auto)
    transposed, _, sums, maxima, _ = jax.jit(statistics)(place(mesh, draw(0, 16, 32), "rows", "columns"))
    specs = [tuple(x.sharding.spec) for x in (transposed, sums, maxima)]
    assert specs == [("columns", "rows"), ("columns",), ("rows", "columns")]


@both
def test_blocks_are_cut_between(kind):
    """8 columns in two blocks of 4 over eight devices: no device has a whole block, so they are gathered."""
    mesh = mesh_of(kind)
    for width, spec in ((64, (None, "columns")), (8, (None, ("rows", "columns")))):
        x = draw(0, 16, width)
        actual = jax.jit(statistics)(place(mesh, x, *spec))[3]
        same(actual, np.asarray(x).reshape(16, -1, 4).max(-1))
        assert actual.sharding.is_fully_replicated == (width == 8)


@both
def test_under_vmap(kind):
    mesh, x = mesh_of(kind), jnp.round(100 * draw(0, 3, 8, 16))
    actual = jax.jit(jax.vmap(statistics))(place(mesh, x, None, "rows", "columns"))
    same(actual, jax.vmap(lambda x: statistics(x))(x))
    assert not actual[0].sharding.is_fully_replicated
    twice = jax.jit(jax.vmap(jax.vmap(statistics)))(place(mesh, jnp.stack([x, 2 * x]), None, None, "rows", "columns"))
    same(jax.tree.map(lambda y: y[0], twice), actual)


def test_programs_are_told_apart_by_their_code(monkeypatch):
    before, read = partition._code_digest.__wrapped__(), pathlib.Path.read_bytes
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "microscaling.py"))
    assert partition._code_digest.__wrapped__() != before


@both
def test_a_contraction_that_is_cut_is_summed_once(kind):
    def product(a, b):
        def local(cut: DimSharding, a, b):
            return cut.psum(lax.dot_general(a, b, (((1,), (1,)), ((), ()))), "k")

        return run_partitioned("product", None, local, (a, b), ("m k", "n k"), "m n")

    mesh, a, b = mesh_of(kind), jnp.round(8 * draw(0, 16, 32)), jnp.round(8 * draw(1, 24, 32))
    for left, right in (((None, "rows"), (None, "rows")), (("rows",), ("rows",)), (("rows", "columns"), ("columns",))):
        actual = jax.jit(product)(place(mesh, a, *left), place(mesh, b, *right))
        same(actual, np.asarray(a) @ np.asarray(b).T)


@both
@pytest.mark.parametrize(
    ("operand", "expected", "is_sharded"),
    [
        ("rows", ("rows", None), ("rows", None)),
        ("rows", (None, "rows"), (None, "rows")),
        (("rows", "columns"), (None, "rows"), (None, "rows")),
        (("rows", "columns"), (("columns", "rows"), None), (("columns", "rows"), None)),
        ("rows", ("columns", None), (None, None)),
    ],
    ids=str,
)
def test_each_device_keeps_its_part_of_a_sum(kind, operand, expected, is_sharded):
    """As gradients of weights in FSDP: half of the traffic of an all-reduce."""

    def summed_over_k(a, b):
        def local(cut: DimSharding, a, b):
            return cut.psum(lax.dot_general(a, b, (((1,), (1,)), ((), ()))), "k", "m n")

        return run_partitioned("product", None, local, (a, b), ("m k", "n k"), "m n", sum_dim="k", out_spec=expected)

    def product(a, b, sharding):
        y = summed_over_k(a, b)
        results.append(jax.typeof(y).sharding.spec)
        explicit = kind == AxisType.Explicit
        return jax.sharding.reshard(y, sharding) if explicit else lax.with_sharding_constraint(y, sharding)

    results, mesh, a, b = [], mesh_of(kind), jnp.round(8 * draw(0, 16, 64)), jnp.round(8 * draw(1, 24, 64))
    placed = place(mesh, a, None, operand), place(mesh, b, None, operand)
    run = jax.jit(lambda a, b: product(a, b, NamedSharding(mesh, PartitionSpec(*expected)))).lower(*placed).compile()
    same(run(*placed), np.asarray(a) @ np.asarray(b).T)
    if kind == AxisType.Explicit:
        assert tuple(results[0]) == is_sharded
        several = [place(mesh, jnp.stack([x, x]), None, None, operand) for x in (a, b)]
        assert tuple(jax.eval_shape(jax.vmap(summed_over_k), *several).sharding.spec) == (None, *is_sharded)
    text, summed = run.as_text(), is_sharded != (None, None)
    assert ("reduce-scatter(" in text) == summed
    assert ("all-reduce(" in text) == (not summed or (operand, is_sharded) == (("rows", "columns"), (None, "rows")))


def test_of_a_sum_that_the_devices_do_not_divide_each_has_all():
    notation_ = partition.ShardingRule(
        *([partition.dimensions(t) for t in s] for s in (("m k", "n k"), ("m n",))), sum_dim="k"
    )
    lengths, specs = {"m": 6, "n": 8, "k": 64}, (PartitionSpec(None, "rows"),) * 2
    assert notation_.assign(lengths, specs, {"rows": 4}, PartitionSpec("rows")).scatter_axes == {}
    assert notation_.assign(lengths, specs, {"rows": 4}, PartitionSpec(None, "rows")).scatter_axes == {"n": ("rows",)}


def test_what_a_notation_says_of_cuts():
    rule = lambda *sides: partition.ShardingRule(*([partition.dimensions(t) for t in side] for side in sides))  # noqa: E731
    two = rule(("m n/4", "m n"), ("m n/6",))
    assert (two.unit("n"), two.unit("m")) == (12, 1)
    for shapes in (((8, 6), (9, 24)), ((9, 6), (8, 24))):
        with pytest.raises(ValueError, match=r"dimension m has lengths [89] and [89]"):
            two.lengths(shapes)
    # Shardy gets dimensions that all devices divide. Other dimensions, and empty ones, are separate.
    assert rule(("m n",), ("m n",)).shardy_rule({"m": 8, "n": 6}, 4) == ("m_ free0 -> m_ free1", {})
    assert rule(("m n",), ("m",)).shardy_rule({"m": 0, "n": 8}, 4) == ("free0 n_ -> free1", {})
    assert two.shardy_rule({"m": 8, "n": 48}, 4)[1] == {"n_in4": 3, "n_": 4, "n_in1": 12, "n_in6": 2}
    # The first operand determines the axes that shard a dimension.
    rows = (PartitionSpec("a"), PartitionSpec("b"))
    assert rule(("m k", "m n"), ("m",)).assign({"m": 8, "k": 8, "n": 8}, rows, {"a": 2, "b": 2}).axes == {"m": ("a",)}


def test_nan_is_a_maximum():
    mesh, x = mesh_of(AxisType.Auto), draw(0, 16, 32).at[13, 25].set(jnp.nan)  # not the first device's
    assert jnp.isnan(jax.jit(statistics)(place(mesh, x, "rows", "columns"))[1])


def test_a_dimension_may_be_cut_by_two_axes():
    mesh, axes = mesh_of(AxisType.Auto), ("rows", "columns")
    cut = DimSharding({"m": axes})

    def run(x):
        places = cut.shard_offset("m", 5), cut.num_shards("m"), *cut.rng_offset((40, 3), (4, 3))
        return jnp.stack([*places, cut.shard_offset("n", 5)])

    actual = jax.shard_map(
        lambda x: run(x)[None], mesh=mesh, in_specs=PartitionSpec(axes), out_specs=PartitionSpec(axes)
    )
    assert jax.jit(actual)(jnp.zeros(8)).tolist() == [[5 * i, 8, 3, 3 * i, 0] for i in range(8)]


def test_inside_shard_map_arrays_are_a_devices_own():
    mesh, x = mesh_of(AxisType.Auto), draw(0, 16, 32)
    spec = PartitionSpec("rows", "columns")
    actual = jax.jit(jax.shard_map(lambda x: statistics(x)[1][None, None], mesh=mesh, in_specs=spec, out_specs=spec))(
        place(mesh, x, "rows", "columns")
    )
    same(actual, np.asarray(x).reshape(4, 4, 2, 16).max((1, 3)))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("e4m3", ("m n", "- -")),
        ("e4m3:token", ("m n", "m -")),
        ("e4m3:group16", ("m n", "m n/16")),
        ("int8:block32", ("m n", "m/32 n/32")),
        ("e4m3:group128+expand", ("m n", "m n/128", "m n/128")),
        ("e4m3:mx32", ("m n", "m n/32", "- -")),
    ],
)
def test_notation_of_a_spec(spec, expected):
    assert notation(QuantSpec.parse(spec), (64, 256), "m n") == expected


def test_a_notation_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="do not describe"):
        run_partitioned("wrong", None, lambda _, x: x, (draw(0, 4, 4),), ("m",), "m")
    with pytest.raises(ValueError, match="lengths 4 and 8"):
        run_partitioned("wrong", None, lambda _, x, y: x, (draw(0, 4, 4), draw(0, 8, 4)), ("m n", "m n"), "m n")


# ---- the operations' own calls, with references for kernels


@pytest.fixture
def stand_ins(monkeypatch):
    """Replaces the kernels of norms, activations and quantization by references."""
    pytest.importorskip("jax_triton")
    from fp8jax.ops.quantization import fused_kernels
    from pallas_kernels.quantization import amax_triton, quantize_rows_triton, quantize_triton

    class Reference(types.SimpleNamespace):
        SAMPLE_ROWS = 32

        def __getattr__(self, name):
            return lambda *args, compute_capability, **options: getattr(fused_reference, name)(*args, **options)

    for name in ("norm_triton", "activation_triton", "requantize_triton", "sampled_amax_triton"):
        monkeypatch.setattr(fused_kernels, name, Reference())
    real = fused_kernels.quantize_recomputed_triton
    monkeypatch.setattr(fused_kernels, "quantize_recomputed_triton", Reference(Operands=real.Operands))

    def maxima(x, *, rows=False, columns=False, integers=False, compute_capability):
        y = jnp.where(jnp.isfinite(x), jnp.abs(x), 0).astype(jnp.float32)
        return jnp.max(y, 1) if rows else None, jnp.max(y, 0) if columns else None

    def quantize(
        x,
        rows,
        columns,
        *,
        row_scale,
        column_scale,
        amax,
        rounds_amax_up,
        seed,
        rng_offset,
        sums,
        compute_capability,
    ):
        total = jnp.sum(x.astype(jnp.float32), 0) if sums else None
        assert amax is None or amax.shape == ()
        settle = scaling.find_scaling("two_stage" if rounds_amax_up else "current").reduce_amax

        def one(y, coding, scale):
            if coding is None:
                return None
            formats = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "int8": jnp.int8}
            name = {jnp.dtype(f): n for n, f in formats.items()}[coding.dtype]
            if seed is not None:
                i, j = (lax.broadcasted_iota(jnp.uint32, y.shape, axis) for axis in (0, 1))
                number = (i // 4) * rng_offset[0] + j + rng_offset[1] + seed[0]
                codes = (number % 251).astype(jnp.uint8).view(jnp.int8)
                return types.SimpleNamespace(codes=codes, scale=None, microscale=None)
            sized = coding.kind in ("group", "block")
            if coding.kind == "tensor" and scale is None:
                scale = scaling.to_scale(settle(amax), core_formats.get(name)).reshape(1, 1)
            q = quantize_with_scale(y, QuantSpec(name, coding.kind, coding.size if sized else None), scale)
            return types.SimpleNamespace(codes=q.codes, scale=q.scale, microscale=None)

        if columns == "same":
            first = one(x, rows, row_scale)
            transposed = types.SimpleNamespace(codes=first.codes.T, scale=first.scale.T, microscale=None)
            return first, transposed, total
        return one(x, rows, row_scale), one(x.T, columns, column_scale), total

    monkeypatch.setattr(amax_triton, "compute_amax", maxima)
    monkeypatch.setattr(quantize_triton, "quantize", quantize)
    monkeypatch.setattr(quantize_rows_triton, "unsupported_reason", lambda *_: "a reference stands in")
    return fused_kernels


# For each, half of the kinds of meshes.
QUANTIZED = [
    ("e4m3", "same", "current"), ("e5m2", "e4m3", "two_stage"), ("e4m3:token", "e4m3:token", "current"),
    ("e4m3:group16", None, "current"), (None, "e4m3:group16", "current"), ("e4m3:block16", "same", "current"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "strategy"),
    [
        (kind, *specs) if i % 2 == (kind == AxisType.Auto) else slow(kind, *specs)
        for i, specs in enumerate(QUANTIZED)
        for kind in (AxisType.Auto, AxisType.Explicit)
    ],
)
def test_codes_and_scales_do_not_depend_on_the_mesh(stand_ins, kind, rows, columns, strategy):
    mesh, x = mesh_of(kind), draw(0, 128, 64)
    specs = ops._parse(rows, columns, scaling.find_scaling(strategy), True)
    amax_ = scaling.compute_amax(x) if rows == "e4m3" else None
    run = jax.jit(lambda x: ops._kernel(specs, x, None, None, amax_))
    expected, sums = ops._reference(specs, x, None, None, amax_)
    for layout in LAYOUTS[:3]:
        actual, total = run(place(mesh, x, *layout))
        same(jax.tree.leaves(actual), jax.tree.leaves(expected))
        np.testing.assert_allclose(np.asarray(total), np.asarray(sums), rtol=1e-5, atol=1e-4)


@both
def test_noise_goes_by_the_place_in_the_whole_matrix(stand_ins, kind):
    mesh, x, key = mesh_of(kind), draw(0, 64, 32), jax.random.key(0)
    specs = ops._parse("int8:token+stochastic", None, scaling.find_scaling("current"), False)
    actual = [
        jax.jit(lambda x: ops._kernel(specs, x, None, key, None)[0][0].codes)(place(mesh, x, *layout))
        for layout in LAYOUTS
    ]
    for other in actual[:-1]:
        same(other, actual[-1])
    first = np.asarray(jax.random.bits(key, (2,), jnp.uint32))[0]
    i, j = np.indices((64, 32)).astype(np.uint32)
    same(actual[0].view(jnp.uint8), ((i // 4 * np.uint32(32) + j + first) % 251).astype(np.uint8))


@both
def test_norms_and_activations_do_not_depend_on_the_mesh(stand_ins, kind):
    from fp8jax.ops.quantization import fused_outputs

    mesh, x, up, dy = mesh_of(kind), *(draw(i, 1024, 64) for i in range(3))
    weight = draw(3, 64)
    spec = QuantSpec("e4m3", "group", 16)
    norm = fused_outputs._describe(x, spec, jnp.float32, True, {"centered": True, "has_scale": True, "has_bias": True})
    gated = fused_outputs._describe(
        x, spec, jnp.float32, False, {"activation": "silu", "is_gated": True, "saves_activated": False}
    )
    coding = fused_outputs.to_coding(spec)
    from pallas_kernels.nonlinear.quantize_recomputed_triton import GATE, NORM, RESULT, UP, Operands

    def everything(on, x, up, dy, weight):
        codes, scales, inverse, mean, amax, output = on.forward(
            norm, x, weight, weight, 1e-6, coding, result=(jnp.float32(0.01), jnp.float8_e4m3fn)
        )
        back = on.backward(norm, codes, scales, inverse, weight, dy, jnp.float32, x)
        parts, top, _ = on.encode_activation_residuals(gated, x, up, coding)
        exact, plain = gated._replace(reads_arrays=True), Operands(x, up=up)
        sample = on.compute_amaxes(exact, (RESULT,), plain, every=scaling.SAMPLE_EVERY)
        (g, gs), (u, us) = parts[:2]
        operands = Operands(g, gs, up=u, up_scale=us, gradient=dy)
        ahead = on.quantize_and_predict(gated, operands, jnp.float32(0.01), jnp.float8_e4m3fn)
        cotangents, totals = on.quantize(
            gated, (GATE, UP), operands, (jnp.float32(0.01),) * 2, jnp.float8_e5m2, rows=True, columns=True, sums=True
        )
        mended = on.requantize_if(exact, (RESULT,), plain, output, jnp.float32(0.02), top > 0)
        of_norm = Operands(x, rstd=inverse, mean=mean, weight=weight, bias=weight)
        again = on.requantize_if(
            norm._replace(reads_arrays=True), (NORM,), of_norm, output, jnp.float32(0.02), amax > 0
        )
        exact_parts = (
            codes,
            scales,
            inverse,
            amax,
            output,
            parts,
            top,
            sample,
            ahead,
            cotangents,
            mended,
            again,
            back[0],
        )
        amaxes = [on.compute_amaxes(gated, (GATE, UP), operands, compute_if=flag) for flag in (top > 0, top < 0)]
        return (*exact_parts, amaxes), [*back[1:], *totals]

    expected, sums = jax.jit(lambda *a: everything(fused_reference, *a))(x, up, dy, weight)
    for layout in LAYOUTS[:3]:
        arrays = (place(mesh, a, *layout) for a in (x, up, dy))
        actual, totals = jax.jit(lambda *a: everything(stand_ins, *a))(*arrays, weight)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            # Rows of a norm that are split over devices are gathered. Elementary functions may differ in bits.
            close = np.isclose(*(np.asarray(t, np.float32) for t in (a, b)), rtol=1e-5, atol=1e-5)
            assert close.mean() > 0.999, (layout, a.shape)
        for a, b in zip(totals, sums, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("paired", [False, True])
def test_products_without_kernels_are_mapped_in_one_and_gather_codes(paired):
    """Blocks in a batch; one mesh axis shards the rows of both sides."""
    mesh, spec = mesh_of(AxisType.Auto), QuantSpec.parse("int8:block16")
    a, b = (quantize_with_scale(draw(i, 64, 128), spec, None) for i in range(2))
    b = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), b)
    if paired:
        a = fallback.make_fallback_tensor(draw(0, 64, 128), a, draw(2, *a.scale.shape) > 0)
    product = functools.partial(sharded_matmul, dot_in_16_bits(), None, jnp.float32, out_spec=None)
    run = jax.jit(jax.vmap(product, (None, 0)))
    expected = run(a, b)
    placed = jax.tree.map(lambda x: place(mesh, x, "rows"), a), jax.tree.map(lambda x: place(mesh, x, None, "rows"), b)
    program = run.lower(*placed).compile()
    np.testing.assert_allclose(program(*placed), expected, rtol=1e-5, atol=1e-4)
    text = program.as_text()
    assert " while(" not in text
    assert set(re.findall(r"= (\w+)\[(?:\d+,)*\d+,128\].* all-gather\(", text)) == {"s8"}


@pytest.mark.parametrize(
    ("stochastic", "kind"),
    [(False, AxisType.Auto), (True, AxisType.Explicit), slow(True, AxisType.Auto), slow(False, AxisType.Explicit)],
    ids=str,
)
def test_a_part_of_a_parameter_is_rounded_as_in_the_whole(kind, stochastic, monkeypatch):
    """A replacement of AdamW's kernel returns the positions of its groups, and small changes of weights."""
    pytest.importorskip("jax_triton")
    from fp8jax.core import noise
    from fp8jax.core.noise import round_stochastic
    from fp8jax.ops.optimizers import adamw
    from fp8jax.ops.optimizers.leaf import Adam, Leaf
    from pallas_kernels.optimizers import adamw_triton

    def stand_in(grad, weight, mu, nu, scalars, *, nu_seed, run, in_place, dtype, seed, group_size, **_):
        assert (seed is None) == (not in_place or not stochastic)
        codes, scale, exponent = nu
        inner, stride = run or (codes.size, 1)
        n = jnp.arange(scale.size, dtype=jnp.uint32).reshape(scale.shape)
        number = n // inner * stride + n % inner
        index = nu_seed[0] + number * np.uint32(group_size // 8) * np.uint32(noise.STRIDE)
        change = grad / 1024
        if in_place:
            change = weight.astype(jnp.float32) + change
        if seed is not None:  # over all devices, like the kernel on one device
            change = round_stochastic(change, seed)
        return change, mu, (codes, lax.bitcast_convert_type(index, jnp.float32), exponent)

    monkeypatch.setattr(adamw_triton, "adamw", stand_in)
    shape, size = (4, 8, 256), 32
    spec = QuantSpec("e4m3", "group", size, expand=True)
    dtype = jnp.bfloat16 if stochastic else jnp.float32
    seed = noise.step_seed(jnp.int32(3))
    weight = draw(1, *shape).astype(dtype)
    leaf = Leaf(
        draw(0, *shape), weight, quantize_with_scale(draw(2, *shape), spec, None),
        quantize_with_scale(jnp.abs(draw(3, *shape)), spec, None),
        weight_seed=seed if stochastic else None, salt=7,
    )  # fmt: skip
    adam = Adam(0.9, 0.999, 1e-8, 0.0, jnp.int32(3), 1e-3, 0.1, seed=seed)

    def run(leaf):
        new, _, mu, nu, _ = adamw.step_leaves(adam, [leaf])[0]
        return new, mu.codes, lax.bitcast_convert_type(nu.scale, jnp.uint32)

    mesh = mesh_of(kind)
    numbers = np.arange(4 * 8 * 8, dtype=np.uint32).reshape(4, 8, 8) * np.uint32(size // 8 * noise.STRIDE % 2**32)
    layouts = [(), ("rows",), (None, "columns"), (None, "columns", "rows"), ("rows", "columns"), (None, None, "rows")]
    for layout in layouts:
        placed = jax.tree.map(lambda x: place(mesh, x, *(layout if x.ndim == 3 else ())), leaf)  # noqa: B023
        new, codes, actual = jax.jit(run)(placed)
        same(actual, np.asarray(seed)[0] + numbers)
        same(codes, leaf.mu.codes)
        moved = weight.astype(jnp.float32) + leaf.grad / 1024
        same(new, round_stochastic(moved, seed) if stochastic else moved)


def test_a_program_is_found_in_the_persistent_cache_and_no_other_in_its_place(monkeypatch, tmp_path):
    """Without the address of the partitioner's callback in the cache key, only names distinguish kernels."""
    hits = []
    note = lambda event, **_: hits.append(event) if event == "/jax/compilation_cache/cache_hits" else None  # noqa: E731
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = place(mesh, jnp.arange(16.0), "x")

    def run(factor):
        hits.clear()
        program = jax.jit(
            lambda x: partition.run_partitioned("times", factor, lambda _, x: x * factor, [x], ["m"], "m")
        )
        np.testing.assert_array_equal(program(x), np.arange(16.0) * factor)
        return bool(hits)

    settings = {
        "jax_remove_custom_partitioning_ptr_from_cache_key": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    monitoring.register_event_listener(note)
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        assert [run(2.0), run(2.0), run(3.0), run(3.0)] == [False, True, False, True]
        monkeypatch.setattr(partition, "_code_digest", lambda: "other code")
        assert [run(2.0), run(2.0)] == [False, True]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        monitoring.unregister_event_listener(note)
