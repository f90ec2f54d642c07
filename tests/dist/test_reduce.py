"""8-bit reductions of gradients on eight devices, or the available GPUs, compared with means in float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.dist import Factors, all_reduce_gradients, init_factors, reduce_scatter_gradients
from fp8jax.dist.chunks import buckets
from fp8jax.dist.reduce import next_factor, resolve
from fp8jax.dist.shared_scales import sum_codes
from fp8jax.ops.dispatch import choice
from fp8jax.recipes import Comm
from tests.dist import programs

AXES, DEVICES = ("data", "fsdp"), min(8, jax.device_count())
SHAPES = {"matrix": (40, 96), "odd": (7, 13, 5), "layers": (3, 15, 33), "one": (1,), "scalar": (), "none": (0, 4)}
HALF_STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
TENSOR = ("e4m3", "e5m2", "int8")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((DEVICES // 2, 2), AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:DEVICES])


@pytest.fixture(scope="module")
def gradients():
    """Gradients of eight devices, stacked along the first axis; magnitudes vary by decades, as in training."""
    rng = np.random.default_rng(0)

    def one(shape):
        sizes = np.exp(2 * rng.standard_normal((1, *shape)))
        return (1e-3 * sizes * rng.standard_normal((DEVICES, *shape))).astype(np.float32)

    return {name: one(shape) for name, shape in SHAPES.items()}


REPLICATED = P()


def on_each(mesh, function, out=REPLICATED, check=False):
    """Maps a function of one device's gradients over arrays whose first axis is the devices."""

    def body(grads, *rest):
        return function(jax.tree.map(lambda g: g[0], grads), *rest)

    return jax.shard_map(body, mesh=mesh, in_specs=(P(AXES),), out_specs=out, check_vma=check)


def exact(gradients):
    return {name: g.astype(np.float64).mean(0) for name, g in gradients.items()}


def bound(g, comm, scales):
    """Returns the largest error of a mean of codes that is quantized twice: half a step each time."""
    if comm.startswith("int8"):
        return 2 * scales * 127 / 254 * 1.001
    fmt = fp8jax.formats.get(comm.partition(":")[0])
    step = HALF_STEP[fmt.name]
    first = np.maximum(np.abs(g) * step, scales * fmt.smallest / 2).mean(0)
    return 1.001 * (first + np.maximum((np.abs(g.mean(0)) + first) * step, scales * fmt.smallest / 2))


def scale_of(g, comm):
    """Returns the shared scale of every element, in float64."""
    fmt = fp8jax.formats.get(comm.partition(":")[0])
    largest = np.abs(g.astype(np.float64)).max(0)
    if "group" not in comm or not largest.ndim:
        return np.full(largest.shape, largest.max(initial=0) / fmt.max)
    size, out = int(comm.partition("group")[2]), np.empty_like(largest)
    for start in range(0, largest.shape[-1], size):
        block = largest[..., start : start + size]
        out[..., start : start + size] = block.max(-1, keepdims=True, initial=0) / fmt.max
    return out


@pytest.mark.parametrize("comm", [*TENSOR, "e4m3:group16"])
def test_two_phases_err_by_two_roundings_whatever_the_shape(comm, mesh, gradients):
    run = jax.jit(on_each(mesh, functools.partial(all_reduce_gradients, axes=AXES, comm=comm, min_size=0)))
    means = run(gradients)
    for name, mean in exact(gradients).items():
        assert (means[name].shape, means[name].dtype) == (SHAPES[name], jnp.float32)
        error = np.abs(np.asarray(means[name], np.float64) - mean)
        assert (error <= bound(gradients[name], comm, scale_of(gradients[name], comm))).all(), name
    error = np.asarray(means["matrix"], np.float64) - exact(gradients)["matrix"]
    assert np.abs(error).max() > 0
    order = np.random.default_rng(1).permutation(DEVICES)
    permuted_means = run({name: g[order] for name, g in gradients.items()})
    if not comm.startswith("e5m2"):
        jax.tree.map(np.testing.assert_array_equal, permuted_means, means)


def test_codes_are_the_means_of_the_devices_codes(mesh, gradients):
    """The codes equal the definition in NumPy bit for bit, and need one byte per element."""
    run = jax.jit(on_each(mesh, functools.partial(all_reduce_gradients, axes=AXES, dequantize=False, min_size=0)))
    for name in ("matrix", "odd"):
        q = run({name: gradients[name]})[name]
        g = gradients[name]
        scale = np.abs(g).max() * np.float32(1 / 448)
        codes = (g * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        mean = (codes.sum(0).astype(np.float32)) * (scale * np.float32(1 / DEVICES))
        second = np.abs(mean).max() * np.float32(1 / 448)
        expected = (mean * (np.float32(1) / second)).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(np.asarray(q.codes), expected)
        np.testing.assert_allclose(np.asarray(q.scale).item(), second, rtol=3e-7)
        q.validate()


@pytest.mark.parametrize("count", [8, 8192])
def test_sums_of_codes_are_exact_in_any_order(count):
    """Sums of thousands of e4m3 codes exceed the precision of fp32: they are integer sums."""
    rng = np.random.default_rng(0)
    codes = rng.integers(1, 126, (count, 64)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    expected = codes.astype(np.float64).sum(0).astype(np.float32)
    fmt = fp8jax.formats.get("e4m3")
    for order in (np.arange(count), rng.permutation(count)):
        np.testing.assert_array_equal(sum_codes(jnp.asarray(codes[order]), fmt), expected)
    whole = rng.integers(-127, 128, (count, 64), dtype=np.int8)
    actual = sum_codes(jnp.asarray(whole), fp8jax.formats.get("int8"))
    np.testing.assert_array_equal(actual, whole.sum(0, dtype=np.int64))
    codes[3, 7] = np.nan
    actual = np.asarray(sum_codes(jnp.asarray(codes), fmt))
    np.testing.assert_array_equal(np.isnan(actual), np.arange(64) == 7)


def test_layers_that_are_stacked_have_scales_of_their_own(mesh, gradients):
    g = gradients["layers"] * np.float32([1, 1e-6, 1e6])[:, None, None]
    reduce = functools.partial(all_reduce_gradients, axes=AXES, layer_axes=1, min_size=0, dequantize=False)
    q = jax.jit(on_each(mesh, reduce))(g)
    q.validate()
    assert q.scale.shape == (3, 1, 1)
    for layer in range(3):
        scales = scale_of(g[:, layer], "e4m3")
        error = np.abs(np.asarray(q.dequantize())[layer] - g[:, layer].astype(np.float64).mean(0))
        assert (error <= bound(g[:, layer], "e4m3", scales)).all()
    means = []
    for x, spec in ((g[..., :16], P(None, None, AXES)), (g[:, 1, :, :16], P(None, AXES))):
        scatter = functools.partial(reduce_scatter_gradients, axes=AXES, min_size=0, specs=spec, layer_axes=x.ndim - 3)
        means.append(np.asarray(jax.jit(on_each(mesh, scatter, spec))(x)))
    np.testing.assert_array_equal(means[0][1], means[1])


@pytest.mark.parametrize("comm", [Comm("e4m3", "one_phase"), Comm("e4m3:group16", "one_phase"), "bf16", "fp32"])
def test_one_phase_and_plain_sums(comm, mesh, gradients):
    """Without CUDA, codes are summed in fp32 and rounded once. Without factors, no sum saturates."""
    means = jax.jit(on_each(mesh, functools.partial(all_reduce_gradients, axes=AXES, comm=comm, min_size=0)))(gradients)
    for name, mean in exact(gradients).items():
        g = gradients[name]
        tolerance = {"bf16": 2.0**-7, "fp32": 1e-6}.get(comm if isinstance(comm, str) else "", 0) * np.abs(g).mean(0)
        if isinstance(comm, Comm):
            tolerance = bound(g, comm.gradients, DEVICES * scale_of(g, comm.gradients))
        assert (np.abs(np.asarray(means[name], np.float64) - mean) <= tolerance).all(), name


def test_means_have_the_gradients_dtypes_and_are_rounded_to_them_once():
    """Six devices, a number that does not divide the sums: 256 and five ones, whose sum bf16 cannot represent."""
    six = jax.make_mesh((6,), AXES[:1], axis_types=(AxisType.Auto,), devices=jax.devices()[:6])
    g = np.ones((6, 12, 2), np.float32)
    g[0] = 256
    grads, spec = {"wide": g, "half": g.astype(ml_dtypes.bfloat16)}, P("data")
    comms = ("fp32", "bf16", "e4m3", Comm("e4m3", "one_phase"))

    def both(grads):
        local_grads = jax.tree.map(lambda g: g[0], grads)
        options = [{"axes": "data", "comm": comm, "min_size": 0} for comm in comms]
        reduced = [all_reduce_gradients(local_grads, **kwargs) for kwargs in options]
        return reduced, [reduce_scatter_gradients(local_grads, specs=spec, **kwargs) for kwargs in options]

    run = jax.shard_map(both, mesh=six, in_specs=spec, out_specs=(P(), spec), check_vma=False)
    for means in jax.jit(run)(grads):
        assert all(m[name].dtype == grads[name].dtype for m in means for name in grads)
        np.testing.assert_array_equal(means[0]["half"], np.full((12, 2), 43.5))  # 261 / 6
        np.testing.assert_array_equal(means[0]["wide"], np.full((12, 2), 43.5))
        total = np.asarray(means[1]["wide"]) * 6  # a sum in bf16, in any order; bf16 cannot represent its sixth
        np.testing.assert_allclose(total, np.round(total), rtol=1e-6)
        for mean in means[2:]:
            np.testing.assert_allclose(mean["wide"], 43.5, rtol=2.0**-3)


def test_arrays_travel_together_up_to_a_limit():
    assert buckets([3, 3, 4, 9, 1, 1, 30, 1], limit=10) == [[0, 1, 2], [3, 4], [5], [6], [7]]
    assert buckets([]) == []


@pytest.mark.parametrize(
    "comm", ["e4m3", "e4m3:group8", Comm("e4m3", "one_phase"), Comm("e4m3:group8", "one_phase"), "bf16"]
)
def test_a_scattered_gradient_is_each_devices_part_of_the_mean(comm, mesh):
    rng = np.random.default_rng(2)
    grads = {"w": rng.standard_normal((DEVICES, 16, 128)), "b": rng.standard_normal((DEVICES, 5))}
    grads["none"] = np.zeros((DEVICES, 16, 0))
    grads = jax.tree.map(lambda g: g.astype(np.float32), grads)
    text = comm.gradients if isinstance(comm, Comm) else comm
    for spec in (P(AXES), P(None, AXES)):
        specs = {"w": spec, "b": P(), "none": spec}
        reduce = functools.partial(reduce_scatter_gradients, axes=AXES, comm=comm, specs=specs, min_size=0)
        means = jax.jit(on_each(mesh, reduce, specs))(grads)
        assert means.pop("none").shape == (16, 0)
        for name, mean in exact({name: grads[name] for name in "wb"}).items():
            g = grads[name]
            scales = scale_of(g, text) * (DEVICES if isinstance(comm, Comm) else 1) if text != "bf16" else None
            tolerance = 2.0**-7 * np.abs(g).mean(0) if text == "bf16" else bound(g, text, scales)
            assert (np.abs(np.asarray(means[name], np.float64) - mean) <= tolerance).all(), (name, spec)


def test_what_travels_is_eight_bits(mesh, gradients):
    """Dtype and bytes of every collective: only codes have as many elements as the gradients."""
    g = {"w": np.zeros((DEVICES, 32, 128), np.float32), "v": np.zeros((DEVICES, 100, 128), np.float32)}
    n = 32 * 128 + 100 * 128

    def requests(comm, function=all_reduce_gradients, out=REPLICATED, **rest):
        return on_each(mesh, functools.partial(function, axes=AXES, comm=comm, **rest), out)

    scales = ("all_reduce", "f32", 8)
    tensor = [scales, ("all_to_all", "ui8", n), scales, ("all_gather", "ui8", n // 8)]
    assert programs.asked_for(requests("e4m3"), g) == tensor
    groups = 8 * (4 + 13)  # 32 and 100 groups are 4 and 13 per device
    assert programs.asked_for(requests("int8:group128"), g) == [
        ("all_reduce", "f32", 4 * (32 + 100)), ("all_to_all", "ui8", groups * 128),
        ("all_gather", "ui8", groups * (128 + 4) // 8)]  # fmt: skip
    with choice.target(capability=90):
        one_phase = programs.asked_for(requests(Comm("e5m2", "one_phase")), g)
    assert one_phase == [
        ("all_reduce", "f32", 8),
        ("all_reduce", "f8E5M2", 100 * 128),
        ("all_reduce", "f8E5M2", 32 * 128),
    ]
    assert [x[:2] for x in programs.asked_for(requests("bf16"), g)] == [("all_reduce", "bf16")] * 2
    assert ("all_reduce", "f32", 4 * 32 * 128) in programs.asked_for(requests("e4m3", min_size=32 * 128 + 1), g)
    scattered = requests("e4m3", reduce_scatter_gradients, {"w": P(AXES), "v": P(None, AXES)},
                      specs={"w": P(AXES), "v": P(None, AXES)})  # fmt: skip
    assert programs.asked_for(scattered, g) == [
        ("all_reduce", "f32", 8), ("all_to_all", "ui8", 100 * 128), ("all_to_all", "ui8", 32 * 128)]  # fmt: skip
    assert {x[:2] for x in programs.compiled(requests("e4m3"), g)} == {
        ("f32", "all-reduce"), ("u8", "all-to-all"), ("u8", "all-gather")}  # fmt: skip


def test_factors_follow_saturation_and_come_back_slowly(mesh):
    """FP8-LM, equation 3: halved by a step that saturates, and multiplied by 2^(1/1000) by any other step."""
    comm = Comm("e4m3", "one_phase", auto_scale=True)

    def step(grads, factors):
        return all_reduce_gradients(grads, AXES, comm, factors=factors, min_size=0)

    def body(grads, factors):
        return step(jax.tree.map(lambda g: g[0], grads), factors)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(AXES), P()), out_specs=P(), check_vma=False))
    rng = np.random.default_rng(3)
    equal = np.broadcast_to(rng.standard_normal((1, 64, 64)), (DEVICES, 64, 64)).astype(np.float32)
    different = rng.standard_normal((DEVICES, 64, 64)).astype(np.float32)
    grads = {"equal": equal, "different": different}
    factors = init_factors(jax.tree.map(lambda g: g[0], grads), DEVICES)
    start = np.float32(DEVICES**-0.5)
    assert (factors.mu["equal"], factors.saturated["equal"]) == (start, 0)
    means, factors = run(grads, factors)
    # Equal on all devices: the sum is sqrt(devices) times the range, and the excess saturates.
    assert factors.saturated["equal"] > 1e-3
    assert factors.mu["equal"] == max(start / 2, 1 / DEVICES)  # with this factor no sum saturates
    unit = (np.abs(equal).max() / np.float32(448)) / start
    codes = (equal / unit).astype(ml_dtypes.float8_e4m3fn).astype(np.float64).sum(0)
    assert (np.abs(codes) > 448).mean() > 0.1
    expected = np.clip(codes, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * unit / DEVICES
    np.testing.assert_allclose(means["equal"], expected, rtol=1e-6)
    assert factors.saturated["different"] == 0
    np.testing.assert_allclose(factors.mu["different"], start * 2 ** (1 / 1000), rtol=1e-6)
    for _ in range(3):
        means, factors = run(grads, factors)
    assert 1 <= factors.mu["equal"] * DEVICES <= 1.01
    error = np.abs(means["equal"] - equal[0])
    assert (error <= bound(equal, "e4m3", DEVICES * scale_of(equal, "e4m3"))).all()
    previous_factor = factors.mu["different"]
    means, factors = run({"equal": equal, "different": np.where(np.arange(64) == 5, np.nan, different)}, factors)
    assert np.isnan(means["different"]).all()
    assert np.isfinite(means["equal"]).all()
    assert factors.mu["different"] == previous_factor  # a gradient with NaN does not change the factor
    assert factors.saturated["different"] == 1
    assert next_factor(jnp.float32(1), jnp.float32(0), jnp.array(True), 8) == 1  # the largest factor
    next_factors = [
        float(next_factor(jnp.float32(0.5), jnp.float32(part), jnp.array(True), 8)) for part in (1e-5, 1.1e-5)
    ]
    assert next_factors == [pytest.approx(0.5 * 2 ** (1 / 1000)), 0.25]
    with pytest.raises(ValueError, match="replicas must be at least 1, not 0"):
        init_factors(grads, 0)


def test_the_saturated_part_of_a_scattered_sum_is_that_of_the_whole_on_every_device(mesh):
    """All saturated elements, twelve, are in the first device's shard."""
    g = np.zeros((DEVICES, 16, 6), np.float32)
    g[:, 0], g[:, 1] = 1, -1
    comm, spec = Comm("e4m3", "one_phase", auto_scale=True), P(AXES)
    factors = init_factors(g[0], DEVICES)._replace(mu=jnp.float32(1))

    def body(g, factors):
        _, new = reduce_scatter_gradients(g[0], AXES, comm, specs=spec, min_size=0, factors=factors)
        return jax.tree.map(lambda x: x[None], new)

    run = jax.shard_map(body, mesh=mesh, in_specs=(P(AXES), P()), out_specs=P(AXES), check_vma=False)
    new = jax.jit(run)(g, factors)
    np.testing.assert_allclose(new.saturated, 12 / 96, rtol=1e-6)
    np.testing.assert_array_equal(new.mu, 0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_one_device_is_nan_on_all(bad, mesh):
    g = np.ones((DEVICES, 4, 32), np.float32)
    g[-1, 2, 17] = bad
    for comm in ("e4m3", "int8:group16", Comm("e5m2", "one_phase")):
        mean = np.asarray(jax.jit(on_each(mesh, functools.partial(
            all_reduce_gradients, axes=AXES, comm=comm, min_size=0), P(AXES)))(g)).reshape(DEVICES, 4, 32)  # fmt: skip
        group = np.zeros((4, 32), bool)
        group[2, 16:] = True
        nan = group if comm == "int8:group16" else np.ones_like(group)
        for device in range(DEVICES):
            np.testing.assert_array_equal(np.isnan(mean[device]), nan)
    if bad is not np.inf:
        return
    comm, factors = Comm("e4m3:group16", "one_phase", auto_scale=True), Factors(jnp.float32(0.5), jnp.float32(0))
    reduce = functools.partial(all_reduce_gradients, axes=AXES, comm=comm, factors=factors, min_size=0)
    assert jax.jit(on_each(mesh, reduce))(g)[1].mu == 0.5  # one group of eight does not change the factor


def test_accumulated_gradients_unused_parameters_and_a_checked_shard_map(mesh):
    """A user's step: microbatches, then one reduction; gradients of unused parameters are zeros."""
    rng = np.random.default_rng(4)
    params = {"w": jnp.asarray(rng.standard_normal((24, 48)), jnp.float32), "unused": jnp.ones((16, 16))}
    x = jnp.asarray(rng.standard_normal((32, 24)), jnp.float32)

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

    def step(check, params, x):
        local_params = jax.lax.pcast(params, AXES, to="varying") if check else params

        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(local_params, x)), None

        zeros = jax.tree.map(jnp.zeros_like, local_params)
        total, _ = jax.lax.scan(add, zeros, x.reshape(2, -1, 24))
        return all_reduce_gradients(jax.tree.map(lambda g: g / 2, total), AXES, min_size=0)

    def reduced(check):
        specs = {"in_specs": (P(), P(AXES)), "out_specs": P()}
        return jax.jit(jax.shard_map(functools.partial(step, check), mesh=mesh, check_vma=check, **specs))(params, x)

    expected, unchecked, checked = jax.grad(loss)(params, x), reduced(False), reduced(True)
    assert not np.asarray(checked["unused"]).any()
    np.testing.assert_array_equal(checked["w"], unchecked["w"])
    error = np.linalg.norm(checked["w"] - expected["w"]) / np.linalg.norm(expected["w"])
    assert 1e-4 < error < 2**-4


def test_elsewhere_it_raises_and_says_what_to_do(mesh):
    g = jnp.ones((64, 64))
    with pytest.raises(ValueError, match=r"must be called inside jax.shard_map.*'data'.*axis_names=\{'data'\}"):
        all_reduce_gradients(g, "data")
    with pytest.raises(ValueError, match=r"over \(\) must be called inside jax.shard_map.*; not manual: none"):
        jax.eval_shape(on_each(mesh, functools.partial(all_reduce_gradients, axes=())), {"w": jnp.ones((8, 4))})
    with pytest.raises(ValueError, match="not manual: 'model'"):
        jax.eval_shape(on_each(mesh, functools.partial(all_reduce_gradients, axes="model")), {"w": jnp.ones((8, 4))})
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="must be called inside"):
        jax.jit(lambda g: all_reduce_gradients(g, "data"))(g)

    def summed(w, x):
        return all_reduce_gradients(jax.grad(lambda w: jnp.sum(x @ w))(w), AXES)

    with pytest.raises(ValueError, match=r"has already summed it.*pcast\(params, \('data', 'fsdp'\)"):
        jax.eval_shape(jax.shard_map(summed, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P()), g, jnp.ones((8, 64)))
    in_part = jax.shard_map(
        functools.partial(all_reduce_gradients, axes=AXES), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"the gradient does not vary over \['fsdp'\]"):
        jax.eval_shape(in_part, g)
    eight = {"w": jnp.ones((8, 64, 64))}
    for comm, fix in ((Comm(), "leaves the reduction to XLA"), ("e4m3:block128", "as 'e4m3' or"), ("de8", "'int8'")):
        with pytest.raises(ValueError, match=fix):
            jax.eval_shape(on_each(mesh, lambda g, c=comm: all_reduce_gradients(g, AXES, c)), eight)
    for grads, path in ((eight, r"\['w'\]"), (eight["w"], "the gradient")):
        grads = jax.tree.map(lambda g: g.astype(jnp.int32), grads)
        with pytest.raises(TypeError, match=f"all_reduce_gradients: {path} has dtype int32"):
            jax.eval_shape(on_each(mesh, lambda g: all_reduce_gradients(g, AXES)), grads)
    assert resolve(fp8jax.recipes.fp8_lm()) == Comm("e4m3", "one_phase", auto_scale=True)
    with pytest.raises(TypeError, match="a recipe or a string such as 'e4m3', got 8"):
        resolve(8)
    factors = init_factors(jnp.ones((64, 64)), DEVICES)
    with pytest.raises(ValueError, match="not to 'two_phase'; omit them"):
        jax.eval_shape(on_each(mesh, lambda g: all_reduce_gradients(g, AXES, factors=factors)), jnp.ones((8, 64, 64)))
    last, shape = P(None, None, AXES), (4, 64, 13)
    refused = [(spec, "e4m3", shape, "alone, and then over the other axes") for spec in (P("data"), P(AXES[::-1]))]
    refused.append((last, "e4m3", shape, r"8 devices do not divide dimension 2 of \['w'\], \(4, 64, 13\); shard"))
    refused.append((last, "e4m3:group16", (4, 16, 64), r"dimension 2 of .* in groups of 16; shard another"))
    for spec, comm, shape, fix in refused:
        with pytest.raises(ValueError, match=fix):
            jax.eval_shape(on_each(mesh, functools.partial(reduce_scatter_gradients, axes=AXES, comm=comm, specs=spec,
                                                           min_size=0)), {"w": jnp.ones((8, *shape))})  # fmt: skip
    with pytest.raises(ValueError, match="wrap around"):
        Comm("int8", "one_phase")
    with pytest.raises(ValueError, match="whose sums can saturate"):
        Comm("e4m3", auto_scale=True)


def test_axes_that_are_left_to_xla_are_told(mesh, recwarn):
    def reduced(kinds, names):
        auto_mesh = jax.make_mesh((2, 2), AXES, axis_types=kinds, devices=jax.devices()[:4])
        step = lambda g: all_reduce_gradients(g, "data")  # noqa: E731
        with jax.set_mesh(auto_mesh):
            specs = {"in_specs": P(), "out_specs": P(), "axis_names": names, "check_vma": False}
            jax.eval_shape(jax.shard_map(step, **specs), jnp.ones((64, 64)))

    auto, explicit = AxisType.Auto, AxisType.Explicit
    reduced((auto, auto), set(AXES))
    reduced((auto, explicit), {"data"})
    assert not recwarn.list
    with pytest.warns(UserWarning, match="Auto mesh axes 'fsdp'.*Make these axes Explicit") as caught:
        reduced((auto, auto), {"data"})
    assert caught[0].filename == __file__


def test_one_phase_is_refused_where_nccl_cannot_sum(mesh):
    with choice.target(capability=89), pytest.raises(ValueError, match=r"this GPU has 8\.9; use 'two_phase'"):
        jax.eval_shape(on_each(mesh, functools.partial(
            all_reduce_gradients, axes=AXES, comm=Comm("e4m3", "one_phase"))), {"w": jnp.ones((8, 64))})  # fmt: skip


def test_gradients_left_as_codes_are_clipped_by_what_they_stand_for():
    rng = np.random.default_rng(5)
    x = {"w": jnp.asarray(rng.standard_normal((8, 64)), jnp.float32), "b": jnp.asarray([3.0, 4.0])}
    q = dict(x, w=fp8jax.quantize(x["w"], "e4m3"))
    tx = fp8jax.clip_by_global_norm(1.0)
    clipped, _ = tx.update(q, tx.init(q))
    flat = np.concatenate([np.asarray(clipped["w"].dequantize()).ravel(), np.asarray(clipped["b"])])
    assert np.linalg.norm(flat) == pytest.approx(1, rel=1e-6)
    np.testing.assert_array_equal(clipped["w"].codes, q["w"].codes)
    tx = fp8jax.clip_by_global_norm(1e3)
    jax.tree.map(np.testing.assert_array_equal, tx.update(q, tx.init(q))[0], q)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_sums_that_leave_the_range_are_the_largest_code_in_either_reduction(name, mesh):
    """Half of the elements saturate with a factor of 1: fp32 sums of codes, clipped and encoded by ml_dtypes."""
    g = np.abs(np.random.default_rng(7).standard_normal((DEVICES, 16, 32))).astype(np.float32)
    factors = Factors(jnp.float32(1), jnp.float32(0))
    settings = {"axes": AXES, "comm": Comm(name, "one_phase", auto_scale=True), "factors": factors, "min_size": 0}
    fmt = fp8jax.formats.get(name)
    unit = np.abs(g).max() * np.float32(1 / fmt.max)
    total = (g * (1 / unit)).astype(fmt.dtype).astype(np.float64).sum(0)
    assert (total > fmt.max).mean() > 0.2
    expected = np.clip(total, -fmt.max, fmt.max).astype(fmt.dtype).astype(np.float64) * unit / DEVICES
    all_reduced = on_each(mesh, functools.partial(all_reduce_gradients, **settings))
    reduce_scattered = on_each(
        mesh, functools.partial(reduce_scatter_gradients, specs=P(AXES), **settings), (P(AXES), REPLICATED)
    )
    for reduce in (all_reduced, reduce_scattered):
        mean, new = jax.jit(reduce)(g)
        np.testing.assert_allclose(np.asarray(mean), expected, rtol=1e-6)
        assert float(new.saturated) == pytest.approx((total >= fmt.max).mean(), abs=0.02)


def test_gradients_close_to_the_largest_number_survive_one_phase(mesh):
    """As with 256 devices: a scale with a subnormal reciprocal would make all codes 0."""
    g = np.full((DEVICES, 8, 16), 3e38, np.float32)
    factors = Factors(jnp.float32(2.0**-8), jnp.float32(0))
    comm = Comm("e4m3", "one_phase", auto_scale=True)
    reduce = functools.partial(all_reduce_gradients, axes=AXES, comm=comm, factors=factors, min_size=0)
    np.testing.assert_allclose(jax.jit(on_each(mesh, reduce))(g)[0], 3e38, rtol=2.0**-4)


@pytest.mark.parametrize("count", [8, 512])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_a_nan_code_shows_in_a_sum_of_any_length(name, count):
    """A few codes are summed in fp32, many e4m3 codes as integers."""
    fmt = fp8jax.formats.get(name)
    values = np.ones((count, 5), np.float32)
    values[count - 1, 2] = np.nan
    actual = np.asarray(sum_codes(jnp.asarray(values.astype(fmt.dtype)), fmt))
    np.testing.assert_array_equal(np.isnan(actual), np.arange(5) == 2)
    np.testing.assert_array_equal(actual[[0, 1, 3, 4]], count)
