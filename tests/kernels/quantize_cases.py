"""Cases for the quantize kernel, in Triton's interpreter on a CPU and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import quantize
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch import choice
from fp8jax.ops.dispatch.partition import UNSHARDED
from fp8jax.ops.quantization import fallback, fused_outputs, microscaling
from fp8jax.ops.quantization import quantize as op
from tests import given_scales


@dataclasses.dataclass(frozen=True)
class Case:
    rows: str | None
    columns: str | None = None
    shape: tuple[int, int] = (130, 150)
    dtype: str = "float32"
    scale: float | None = None
    strategy: str = "current"
    rotation: int | None = None


CASES = [
    Case("e4m3"),
    Case("e4m3", "same", (256, 128), "bfloat16"),
    Case("e5m2", "same", dtype="bfloat16", scale=1.7),
    Case("e4m3", "e5m2", (17, 301), strategy="two_stage"),
    Case("e5m2", None, (100, 700), "bfloat16", strategy="two_stage"),
    Case(None, "e4m3", (17, 33)),
    Case("e5m2", "e4m3", (17, 33), scale=0.01),
    Case(None, "e4m3", (140, 3), "float16"),
    Case("e4m3:token", "e4m3:token", (100, 270)),
    Case("e4m3:token", None, (3, 4100), "bfloat16"),
    Case("e5m2:token", None, (33, 20), "float16"),
    Case("e5m2:token", None, dtype="bfloat16", scale=0.3),
    Case("e4m3:group128", "e4m3:group128"),
    Case("e5m2:group16", "e4m3:group64", (257, 64), "bfloat16"),
    Case("e4m3:block128", "same", (300, 200)),
    Case("e4m3:block32", "same", (64, 257), "bfloat16"),
    Case("e4m3", "same", (131, 257), "bfloat16"),
    Case(None, "e4m3:block128", (300, 140), "bfloat16"),
    Case("e4m3:group128", "e4m3:block32"),
    Case("e4m3:block64", "e4m3:block64"),
    Case("e4m3:mx32", "e4m3:mx32"),
    Case("e4m3:mx32+token", "e5m2:mx64+token", (131, 96), "bfloat16"),
    Case("e5m2:mx32+ocp", "e4m3:mx16+ocp", (128, 128)),
    Case("e4m3:mx32+ocp+roundup", "e4m3:mx32+ocp+roundup", (33, 128)),
    Case("e4m3:mx32+ocp", "e4m3:mx32+ocp+roundup", (64, 200), "bfloat16"),
    Case("e4m3:group128", "e4m3:mx32", (1, 130)),
    Case("e4m3:block128", "e4m3", (129, 1)),
    Case("int8", "same", (130, 150), "bfloat16"),
    Case("int8:token", "int8:token", (37, 200)),
    Case("int8:token", None, (37, 200), "float16"),
    Case("int8:block32", "same", (70, 257)),
    Case("int8:group64", "int8:group128", (130, 260), "bfloat16"),
    Case("e2m1:nv16", "e2m1:nv16", (64, 200), "bfloat16"),
    Case("e2m1:nv16", "e2m1:nv16", (33, 128), rotation=16),
    Case("e2m1:nvblock16", "e2m1:nvblock16", (70, 37), "float16"),
    Case("e2m1:nv16", "e2m1:nvblock16", (64, 128), "bfloat16", rotation=16),
    Case(None, "e2m1:nv16", (33, 50), "bfloat16", rotation=16),
]
# Folded microscaling.
FOLDS = [
    Case("e4m3:mx32", None, (130, 150), scale=1e-6),
    Case("e4m3:mx32+token", None, (5, 4096), "bfloat16"),
    Case("e5m2:mx32", None, (17, 301), "bfloat16"),
    Case("e5m2:mx32+token", None, (40, 64), "float16"),
]
# With given scales.
GIVEN_SCALE_CASES = [
    Case("e4m3", "same", (64, 64), "bfloat16"),
    Case("e5m2", "same", (64, 64), "bfloat16"),
    Case("e5m2", None, (30, 45)),
    Case(None, "e4m3", (30, 45)),
    Case("e4m3:token", None, (30, 45)),
    Case("e5m2:token", None, (30, 45), "bfloat16"),
    Case(None, "e5m2:token", (30, 45)),
    Case("e4m3+stochastic", "same", (64, 64), "bfloat16"),
    Case("e5m2+stochastic", "e5m2+stochastic", (30, 45)),
    Case("e5m2:token+stochastic", None, (30, 45)),
]

# Two-level codes that are folded later.
REFOLDS = [
    Case("e4m3:mx32", None, (130, 150)),
    Case("e4m3:mx32+token", None, (5, 8192), "bfloat16"),
    Case("e4m3:mx32+token", None, (37, 64)),
    Case("e4m3:mx32", None, (6, 4100)),
    Case("e4m3:mx32+token", None, (5, 9)),
]

# Transposed codes, times a factor per row.
SHIFTS = [("e4m3", (130, 150)), ("e5m2", (128, 256))]

# Int10 codes: a row that is one group and part of one, full tiles, and less than a tile.
TEN_BITS = [((5, 304), "float32"), ((64, 256), "bfloat16"), ((3, 144), "float16")]

# Blocks and their residuals.
FALLBACKS = [
    Case("int8:block128", None, (130, 260), "bfloat16"),
    Case("int8:block32", None, (70, 257)),
    Case("int8:block32", None, (64, 128), "float16"),
]


def special(shape: tuple[int, int], dtype: str, largest: float) -> jax.Array:
    """Returns values of many magnitudes, ties of codes, zeros, NaN, both Inf, a subnormal and the largest value."""
    random = np.random.default_rng(0)
    x = random.standard_normal(shape) * 10.0 ** random.uniform(-3, 3, (shape[0], 1))
    x[::3] = np.round(x[::3] * 4) / 4
    flat = x.reshape(-1)
    flat[::7] = 0
    for i, value in enumerate([np.nan, np.inf, -np.inf, 1e-40, -0.0, largest]):
        flat[(11 + 53 * i) % flat.size] = value
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


def with_tiny_rows(x: jax.Array) -> jax.Array:
    """One row has the smallest scale, one the smallest power of two, one subnormal values and one zeros."""
    rows = np.array(x, np.float32)
    for row, size in ((1, 1e-37), (2, 1e-35), (4, 1e-41), (5, 0)):
        row_values = np.nan_to_num(rows[row : row + 1], nan=1, posinf=1, neginf=1).clip(-1e3, 1e3)
        rows[row : row + 1] = size * row_values / np.abs(row_values).max(initial=1e-9)
    return jnp.asarray(rows).astype(x.dtype)


def folded(case: Case, impl: str) -> list[np.ndarray]:
    """Returns codes and scales of the values times a factor. Every third group of 32 is small; the last row is 0."""
    x = with_tiny_rows(special(case.shape, case.dtype, 6e4)).at[-1].set(0) * jnp.asarray(case.scale or 1, case.dtype)
    x = jnp.where(jnp.arange(case.shape[1]) // 32 % 3 == 1, x * jnp.asarray(2.0**-13, x.dtype), x)
    assert case.rows
    run = functools.partial(microscaling.fold_rows, spec=QuantSpec.parse(case.rows), impl=impl)
    q = (jax.jit(run) if impl == "xla" else run)(x)
    q.validate()
    return [_bytes(q.codes), np.asarray(q.scale)]


def wrong_fallback(case: Case) -> dict[str, int]:
    """Returns the number of values that differ from the reference, by part of the pair.

    Residual codes may differ by one. Values that are not finite make the scale of a block NaN. Such codes, and codes of
    unused residuals, are undefined.
    """
    x = special(case.shape, case.dtype, 6e4)
    assert case.rows
    run = lambda impl: fallback.quantize(x, case.rows, 40.0, key=jax.random.key(3), impl=impl)  # noqa: E731
    (expected, _), (result, samples) = run("xla"), run("triton")
    assert samples is not None
    side = expected.base.spec.group_size or 0
    m, n = case.shape
    spread = lambda x: np.kron(np.asarray(x), np.ones((side, side), bool))[:m, :n]  # noqa: E731
    finite = spread(np.isfinite(np.asarray(expected.base.scale)))
    used = np.asarray(expected.fallback_mask)
    actual = {
        "used": _differ(np.asarray(result.fallback_mask), used),
        "none used": int(not used.any()),
        "all used": int(used.all()),
        "base": _differ(np.asarray(result.base.codes)[finite], np.asarray(expected.base.codes)[finite]),
        "base scale": _differ(np.asarray(result.base.scale), np.asarray(expected.base.scale)),
        "residual scale": int(np.sum(~np.isclose(result.residual.scale, expected.residual.scale, rtol=1e-4))),
    }
    codes = [np.asarray(p.residual.codes)[spread(used)].astype(int) for p in (result, expected)]
    actual["residual"] = int(np.sum(np.abs(codes[0] - codes[1]) > 1)) + int(np.mean(codes[0] != codes[1]) > 1e-2)
    # The noise differs, but the code is one of the two neighbours.
    values = np.asarray(x, np.float64) / np.kron(np.asarray(expected.base.scale, np.float64), np.ones((side, side)))[
        : case.shape[0], : case.shape[1]]  # fmt: skip
    error = (np.asarray(samples.codes) - values)[finite]
    actual["drawn"] = int(np.sum(np.abs(error) > 1.001)) + int(abs(error.mean()) > 4 / error.size**0.5)
    actual["drawn alike"] = int((np.asarray(samples.codes) == np.asarray(result.base.codes)).all())
    return actual


def wrong_maxima(shape: tuple[int, int], down: int) -> dict[str, int]:
    """Returns the number of amaxes that differ from NumPy's, for values with the largest at the edges and special ones.

    Strips have `down` tiles. The matrix is requested in full, in part, and with zeros only.
    """
    from pallas_kernels.quantization import amax_triton, quantize_triton

    x = np.random.default_rng(2).uniform(-1, 1, shape).astype(np.float32)
    x[-1, :], x[:, -1] = np.linspace(-3, -2, shape[1]), np.linspace(4, 3, shape[0])
    odd = x.copy()
    odd[3, 5], odd[-1, 7], odd[4, -1] = np.nan, -np.inf, 1e-42
    launch, wrong = quantize_triton.QuantizeLaunch(16, 128, 4), {}
    for name, values, integers in (
        ("finite", x, False), ("finite integers", x, True), ("odd", odd, False), ("odd integers", odd, True),
        ("zeros", 0 * x, False),
    ):  # fmt: skip
        size = np.abs(np.where(np.isfinite(values), values, np.nan if integers else 0))
        size = np.where(size < np.finfo(np.float32).tiny, 0, size)
        wants = size.max(1), size.max(0)
        for requested in ((True, True), (True, False), (False, True)):
            requested_axes = dict(zip(("rows", "columns"), requested, strict=True))
            actual = amax_triton.compute_amax(
                jnp.asarray(values), **requested_axes, integers=integers, launch=launch, tiles_per_strip=down
            )
            wrong[f"{name} {requested}"] = sum(
                _differ(np.asarray(g), expected) if is_requested else int(g is not None)
                for g, expected, is_requested in zip(actual, wants, requested, strict=True)
            )
    return wrong


def wrong_blocks(shape: tuple[int, int]) -> dict[str, int]:
    """Checks what the fallback kernel guarantees in addition to its reference, for a matrix of several tiles."""
    from pallas_kernels.quantization import fallback_triton

    side, words = 32, jnp.array([1, 2], jnp.uint32)
    x = np.random.default_rng(0).uniform(-3.9, 3.9, shape).astype(np.float32)
    x[::32, ::32] = 4.0  # the largest value of every block
    x[32, 0], x[64, 0], x[-1, -1] = np.nextafter(np.float32(4), np.float32(9)), 8.0, 1e-42
    run = functools.partial(fallback_triton.quantize, threshold=jnp.float32(4.0), side=side)
    actual = run(jnp.asarray(x), seed=words)
    used = np.zeros((-(-shape[0] // side), -(-shape[1] // side)), bool)
    used[1, 0] = used[2, 0] = True  # above the threshold, but not at it
    falls = np.kron(used, np.ones((side, side), bool))[: shape[0], : shape[1]]
    scale = np.kron(actual.base_scale, np.ones((side, side)))[: shape[0], : shape[1]]
    rest = x - np.asarray(actual.base) * scale
    unit = np.kron(actual.residual_scale, np.ones((side, side)))[: shape[0], : shape[1]]
    result = np.asarray(actual.residual)
    wrong = {
        "used": _differ(np.asarray(actual.is_fallback), used),
        "scale where none is used": _differ(np.asarray(actual.residual_scale)[~used], np.ones((~used).sum())),
        "residual": int(np.sum(np.abs(result * unit - rest)[falls] > 0.51 * unit[falls])),
        # The interpreter fills outputs with this byte before a kernel runs.
        "written where none is used": int(np.sum(result.view(np.uint8)[~falls] != 0xA5)),
    }
    # Noise depends on the position in the full matrix: a part has the same noise. Each word of the seed changes it.
    samples = np.asarray(actual.stochastic)
    for name, top, left in (("rows", 32, 0), ("columns", 0, 64)):
        place = jnp.array([shape[1], top // 4 * shape[1] + left], jnp.uint32)
        part = run(jnp.asarray(x[top:, left:]), seed=words, rng_offset=place)
        wrong[f"noise of a part, {name}"] = _differ(np.asarray(part.stochastic), samples[top:, left:])
    wrong["noise of other words"] = sum(
        int((np.asarray(run(jnp.asarray(x), seed=jnp.array(other, jnp.uint32)).stochastic) == samples).all())
        for other in ([1, 3], [2, 2])
    )
    return wrong


def wrong_noise(impl: str) -> dict[str, int]:
    """Returns at how many distances roundings are correlated, or rounding up does not have probability 1/2.

    Every value is halfway between two codes. Four rows share the bits of a draw, so these distances are tested.
    """
    shape, words = (128, 128), jax.random.key(5)
    eighth, half = jnp.full(shape, 1 + 1 / 16, jnp.float32), jnp.full(shape, 40.5, jnp.float32).at[0, 0].set(127.0)
    spec, one = "e4m3:token+stochastic", jnp.ones((), jnp.float32)
    rows, columns = op.quantize(eighth, spec, spec, scale=one, key=words, impl=impl)
    _, samples = fallback.quantize(half, "int8:block128", 1e3, key=words, impl=impl)
    assert rows is not None
    assert columns is not None
    assert samples is not None
    rounded_up = {
        "rows": np.asarray(rows.codes, np.float32) > 1.06,
        "columns": np.asarray(columns.codes, np.float32).T > 1.06,
        "blocks": np.asarray(samples.codes) > 40,
    }
    rounded_up["rows and columns"] = rounded_up["rows"] == rounded_up["columns"]
    # A value that is a code is never rounded, not even by the largest draw of 2^17.
    exact = jnp.full((512, 384), 96.0, jnp.float32).at[::128, ::128].set(127.0)
    _, integer_codes = fallback.quantize(exact, "int8:block128", 1e3, key=words, impl=impl)
    assert integer_codes is not None
    actual = {"integers": int((np.asarray(integer_codes.codes) != np.asarray(exact)).sum())}
    for name, x in rounded_up.items():
        samples_by_distance = [x, *(x[m:, n:] == x[: len(x) - m, : x.shape[1] - n]
                      for m, n in ((1, 0), (2, 0), (3, 0), (4, 0), (0, 1), (0, 2), (1, 1)))]  # fmt: skip
        actual[name] = sum(abs(y.mean() - 0.5) > 5 * 0.5 / y.size**0.5 for y in samples_by_distance)
    return actual


def wrong_nvfp4_noise(impl: str) -> dict[str, int]:
    """Returns the number of e2m1 codes that are not neighbours, and of distances at which errors are correlated.

    Each group of a row or column has a largest value of 6, so that codes equal the values.
    """
    shape, spec = (128, 128), "e2m1:nv16+stochastic"
    x = np.random.default_rng(0).uniform(-5.9, 5.9, shape).astype(np.float32)
    i, j = np.indices(shape)
    x[(i + j) % 16 == 0] = 6.0
    pair = op.quantize(jnp.asarray(x), spec, spec, key=jax.random.key(5), impl=impl)
    rows, columns = (np.asarray(q.dequantize()) for q in pair if q is not None)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = np.minimum(np.abs(x), 5.999)
    upper = np.searchsorted(grid, size, side="right")
    step = grid[upper] - grid[upper - 1]
    errors = {"rows": (rows / np.sign(x) - np.abs(x)) / step, "columns": (columns.T / np.sign(x) - np.abs(x)) / step}
    actual = {f"neighbours of {name}": int(np.sum(np.abs(e) > 1 + 1e-4)) for name, e in errors.items()}
    errors["rows times columns"] = errors["rows"] * errors["columns"]
    for name, e in errors.items():
        products_by_distance = [e]
        for m, n in ((1, 0), (2, 0), (3, 0), (4, 0), (16, 0), (0, 1), (0, 2), (0, 16), (1, 1)):
            products_by_distance.append(e[m:, n:] * e[: len(e) - m, : e.shape[1] - n])
        actual[name] = sum(abs(y.mean()) > 5 * y.std() / y.size**0.5 for y in products_by_distance)
    return actual


def wrong_nvfp4_ties(impl: str) -> int:
    """Returns the number of quarters that are not rounded like in ml_dtypes, with scales of 1."""
    x = np.random.default_rng(0).integers(-24, 25, (64, 64)).astype(np.float32) / 4
    i, j = np.indices(x.shape)
    x[(i + j) % 16 == 0] = 6.0
    x[0, 0] = 6 * 448.0
    rows, columns = op.quantize(jnp.asarray(x), "e2m1:nv16", "e2m1:nv16", impl=impl)
    assert rows is not None
    assert columns is not None
    expected = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return _differ(np.asarray(rows.dequantize())[1:], expected[1:]) + _differ(
        np.asarray(columns.dequantize())[1:], expected.T[1:]
    )


def wrong_part_of_nvfp4() -> int:
    """Returns the number of codes of a submatrix that differ from the full matrix, rounded by the noise of its
    position."""
    from pallas_kernels.quantization import nvfp4_triton

    coding, words, one = nvfp4_triton.Coding("nv", True), jnp.array([1, 2], jnp.uint32), jnp.float32(2.0**-6)
    x = jax.random.normal(jax.random.key(0), (96, 160))
    run = functools.partial(nvfp4_triton.quantize, rows=coding, columns=coding, row_scale=one, column_scale=one)
    full = run(x, seed=words)
    shard = run(x[32:, 64:], seed=words, rng_offset=jnp.array([160, 32 // 4 * 160 + 64], jnp.uint32))
    return _differ(np.asarray(shard[0].codes), np.asarray(full[0].codes)[32:, 32:]) + _differ(
        np.asarray(shard[1].codes), np.asarray(full[1].codes)[64:, 16:]
    )


def wrong_packed(widths: tuple[int, ...], scale: float | None) -> list[int]:
    """Returns the number of codes, scales and sums of packed matrices that differ from the concatenated one."""
    matrix = special((70, sum(widths)), "bfloat16", 3e38)
    packed = tuple(jnp.split(matrix, np.cumsum(widths)[:-1], 1))
    kwargs: dict[str, object] = {"scale": None if scale is None else jnp.float32(scale), "impl": "triton"}
    results = []
    with choice.target(capability=90):
        for x in (matrix, packed):
            (rows, columns), sums = op.quantize_and_sum(x, "e5m2", "same", **kwargs)
            assert rows is not None
            assert columns is not None
            results.append([_bytes(rows.codes), _bytes(columns.codes), np.asarray(rows.scale), np.asarray(sums)])
    return [_differ(actual, expected) for expected, actual in zip(*results, strict=True)]


# Specs of rows and columns, and whether scales are given, for stacks of matrices.
STACKS = (
    ("e4m3", "same", False),
    ("e4m3", "e5m2", False),
    ("e4m3", "same", True),
    (None, "e5m2", True),
    ("int8", "same", False),
    ("e4m3:block32", "same", False),
    ("e4m3:group32", "e5m2:group32", False),
    (None, "e4m3:group128", False),
)


def stack(rows: str | None) -> jax.Array:
    """Returns matrices (3, 130, 150), each with another amax and another NaN, Inf or zero."""
    x = jnp.stack([special((130, 150), "bfloat16", largest) for largest in (3e38, 1e3, 7e-6)])
    x = x.at[1, 5, 7].set(0).at[2].set(jnp.where(jnp.isfinite(x[2]), x[2], 0))
    return jnp.nan_to_num(x, nan=1, posinf=2, neginf=-2) if rows == "int8" else x


def stack_arrays(
    rows: str | None, columns: str, has_scale: bool, vmap: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns codes and scales of a stack, quantized by one launch, and those of each matrix by XLA."""
    x, scales = stack(rows), jnp.float32([1.7, 3e-3, 2.0**-9]) if has_scale else None
    if vmap:
        actual = jax.jit(jax.vmap(lambda x, s: op.quantize(x, rows, columns, scale=s, impl="triton")))(x, scales)
    else:
        config = op._parse(rows, columns, scaling.find_scaling("current"), False)
        actual, _ = op._quantize_shard(config, x.shape[1:], UNSHARDED, x, scales, None, None)
    results = []
    for i in range(len(x)):
        scale = None if scales is None else scales[i]
        expected = op.quantize(x[i], rows, columns, scale=scale, impl="xla")
        for a, b in zip(actual, expected, strict=True):
            if a is not None and b is not None:
                results.append((_bytes(a.codes[i]), _bytes(b.codes)))
                results.append((np.asarray(a.scale[i]), np.asarray(b.scale)))
    return results


def wrong_stack(rows: str | None, columns: str, has_scale: bool) -> list[int]:
    """Returns the number of differing codes and scales of each of `stack_arrays`."""
    return [_differ(actual, expected) for actual, expected in stack_arrays(rows, columns, has_scale)]


def wrong_packing(shape: tuple[int, int], dtype: str) -> dict[str, int]:
    """Returns the number of bytes and scales of int10 residuals, also decoded, that differ from `fp8jax.quantize`."""
    from pallas_kernels.nonlinear import activation_rows_triton, activation_triton, cotangents_triton, norm_triton
    from pallas_kernels.nonlinear.operations_triton import IDENTITY, Operation
    from pallas_kernels.nonlinear.quantize_recomputed_triton import Operands

    x, spec = special(shape, dtype, 6e4), QuantSpec("int10", "group", 128, scale_format="bf16")
    coding, expected, m = fused_outputs.to_coding(spec), quantize(x, spec), shape[0]
    operation = Operation(is_gated=False, activation=IDENTITY, dtype=0, format="int10", group=128)
    ones = jnp.ones(shape, jnp.float32)
    residuals = {
        "norm": norm_triton.forward(Operation(format="int10"), x, None, None, 1e-5, coding)[:2],
        "activation": activation_triton.encode_activation_residuals(operation, x, None, coding)[0][0],
        "activation, rows": activation_rows_triton.encode_activation_residuals(
            operation, x, None, coding, jnp.float8_e4m3fn
        )[0][0],
    }
    wrong = {
        name: _differ(np.asarray(codes), np.asarray(expected.codes))
        + _differ(np.asarray(scale, np.float32), np.asarray(expected.scale, np.float32))
        for name, (codes, scale) in residuals.items()
    }
    # With a gradient of ones, the cotangent of up is the activated gate, here the gate itself.
    pair = Operands(expected.codes, expected.scale, expected.codes, expected.scale, gradient=ones)
    _, dup = cotangents_triton.cotangents(operation._replace(is_gated=True), pair)
    wrong["cotangents"] = _differ(np.asarray(dup), np.asarray(expected.dequantize()))
    # With a gradient that is 1 in one row and else 0, the sum over rows is that row's values times its rstd.
    finite = jnp.where(jnp.isnan(expected.scale), jnp.ones((), expected.scale.dtype), expected.scale)
    values = np.asarray(dataclasses.replace(expected, scale=finite).dequantize())
    row = jnp.zeros(shape).at[m // 2].set(1.0)
    _, dweight, *_ = norm_triton.backward(
        Operation(has_scale=True, format="int10", group=128), expected.codes, finite, jnp.full(m, 0.5),
        jnp.ones(shape[1]), row, jnp.float32,
    )  # fmt: skip
    assert dweight is not None
    wrong["norm, backward"] = _differ(np.asarray(dweight), values[m // 2] / 2)
    return wrong


def wrong_shifted(name: str, shape: tuple[int, int]) -> int:
    """Returns the number of transposed codes, times a power of two per row, that differ from the reference."""
    q, _ = op.quantize(special(shape, "float32", 6e4), f"{name}:token", impl="xla")
    assert q is not None
    factor = jnp.exp2(-(jnp.arange(shape[0], dtype=jnp.float32)[:, None] % 23)).at[1].set(jnp.nan)
    q = dataclasses.replace(q, scale=jnp.ones((1, 1)), spec=QuantSpec(name))
    actual, expected = (op.transpose(q, factor=factor, impl=impl) for impl in ("triton", "xla"))
    return int(np.sum(_bytes(actual.codes) != _bytes(expected.codes)))


def refolded(case: Case, impl: str) -> list[np.ndarray]:
    """Returns codes and scales.

    Every third group of 32 is small; one power is NaN; those of one row are 0 or far apart.
    """
    x = special(case.shape, case.dtype, 6e4)
    x = jnp.where(jnp.arange(case.shape[1]) // 32 % 3 == 1, x * jnp.asarray(2.0**-9, x.dtype), x)
    assert case.rows
    q, _ = op.quantize(x, case.rows, impl="xla")
    assert q is not None
    assert q.microscale is not None
    powers = q.microscale.at[1, 0].set(255).at[2].set(0).at[3].set(jnp.maximum(q.microscale[3], 100) - 100)
    powers = powers.at[4, 0].set(211)
    scale = jnp.broadcast_to(q.scale, (case.shape[0], 1)).at[3].set(1e-20) if q.scale.size > 1 else q.scale
    q = microscaling.fold_microscales(dataclasses.replace(q, microscale=powers, scale=scale), impl=impl)
    q.validate()
    return [_bytes(q.codes), np.asarray(q.scale)]


def arrays(case: Case, impl: str) -> list[np.ndarray]:
    """Returns codes and scales of both results, as bytes or floats. All NaN codes have equal bytes."""
    scale = None if case.scale is None else jnp.float32(case.scale)
    run = (
        jax.jit(op.quantize, static_argnames=("rows", "columns", "strategy", "impl", "rotation"))
        if impl == "xla"
        else op.quantize
    )
    # With one scale for e2m1 codes, a larger value would make all others 0.
    largest = 6e4 if case.dtype == "float16" or "e2m1" in f"{case.rows} {case.columns}" else 3e38
    x = with_tiny_rows(special(case.shape, case.dtype, largest))
    if case.rows == "int8":  # A value that is not finite would make all of it NaN.
        x = jnp.nan_to_num(x, nan=1, posinf=2, neginf=-2)
    results = []
    for q in run(x, case.rows, case.columns, scale=scale, strategy=case.strategy, impl=impl, rotation=case.rotation):
        if q is None:
            continue
        q.validate()
        results += [_bytes(q.codes), np.asarray(q.scale)]
        if q.microscale is not None:
            results.append(np.asarray(q.microscale))
    return results


def wrong_under_given_scales(case: Case, impl: str) -> list[int]:
    """Returns the number of codes and scales that differ from NumPy's, for several given scales."""
    spec = QuantSpec.parse(case.rows or case.columns or "")
    fmt, across = formats.get(spec.format), case.shape if case.rows else case.shape[::-1]
    results = []
    for first in (0, 1, 3, 4) if spec.granularity == "tensor" else [0]:
        x, scale, want = given_scales.matrix(fmt, across, spec.block_shape(across), case.dtype, first=first)
        key = jax.random.key(0) if spec.rounding == "stochastic" else None
        x = jnp.asarray(x if case.rows else x.T)
        rows, columns = op.quantize(x, case.rows, case.columns, scale=jnp.asarray(scale), key=key, impl=impl)
        for q, expected in ((rows, want), (columns, want.T if case.rows else want)):
            if q is not None:
                results.append(_differ(np.asarray(q.codes).astype(np.float64), expected))
                results.append(_differ(np.asarray(q.scale), np.maximum(scale, np.float32(given_scales.TINY))))
    return results


def wrong_where_computed(name: str) -> list[int]:
    """The same for an activation that the kernel computes: far from zero, SiLU is x or 0."""
    from pallas_kernels.nonlinear import quantize_recomputed_triton

    fmt, results = formats.get(name), []
    x = np.resize(np.float32([3e38, 0, 1e30, np.inf, 200, -1e38, np.nan, 0.0]), (32, 64))
    operation = quantize_recomputed_triton.Operation(is_gated=False, reads_arrays=True, dtype=0)
    result = fused_outputs.FusedOutputs(
        operation, (quantize_recomputed_triton.RESULT,), quantize_recomputed_triton.Operands(jnp.asarray(x))
    )
    want = np.where(x > 0, np.where(np.isinf(x), fmt.inf, fmt.max), np.where(np.isnan(x), np.nan, 0.0))
    for scale in (2.0**-126, 2.0**-149, 2.0**127):
        config = (True, True, QuantSpec(name), "current")
        ((rows, columns),) = fused_outputs._quantize_group(result, config, jnp.float32(scale))
        for q, expected in ((rows, want), (columns, want.T)):
            assert q is not None
            codes = np.asarray(q.codes).astype(np.float64)
            if scale > 1:  # its reciprocal is flushed to 0; Inf times that is NaN, or stays Inf
                results.append(int(np.sum(np.isfinite(codes) != np.isfinite(expected))))
            else:
                results.append(_differ(codes, expected))
            results.append(int(float(q.scale[0, 0]) != max(scale, given_scales.TINY)))
    return results


def wrong_sums(case: Case, impl: str) -> list[int]:
    """Returns the number of column sums with an error beyond that of fp32's order, and of changed codes."""
    x = jax.random.normal(jax.random.key(1), case.shape).astype(case.dtype)
    kwargs = {"strategy": case.strategy, "impl": impl, "scale": None if case.scale is None else jnp.float32(case.scale)}
    pair, total = op.quantize_and_sum(x, case.rows, case.columns, **kwargs)
    x_fp64, tolerance = np.asarray(x).astype(np.float64), 2.0**-24 * 4 * case.shape[0]
    wrong = [int(np.sum(np.abs(np.asarray(total) - x_fp64.sum(0)) > tolerance))]
    for a, b in zip(pair, op.quantize(x, case.rows, case.columns, **kwargs), strict=True):
        wrong += [] if a is None else [_differ(_bytes(a.codes), _bytes(b.codes))]
    bad = x.at[0, 0].set(jnp.nan).at[case.shape[0] - 1, case.shape[1] - 1].set(jnp.inf)
    _, total = op.quantize_and_sum(bad, case.rows, case.columns, **kwargs)
    recorded = np.isfinite(np.asarray(total))
    return [*wrong, int(recorded[0]) + int(recorded[-1]), int(np.sum(~recorded[1:-1]))]


def _differ(actual: np.ndarray, expected: np.ndarray) -> int:
    return int(np.sum((actual != expected) & ~(np.isnan(actual) & np.isnan(expected))))


def _bytes(codes: jax.Array) -> np.ndarray:
    nan = np.isnan(np.asarray(codes).astype(np.float32))
    return np.where(nan, 0x7F, np.asarray(codes).view(np.uint8))
