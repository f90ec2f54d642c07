"""Split master weights: the values of fp32 masters, and equal bits for every way to apply updates."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.core import masters
from tests.rows import few, slow

PARTS = ("bf16+int8", "bf16+int16", "fp16+int8", "fp16+int16")
ALL = (*PARTS, "bf16+stochastic")
RATE, STEPS = 1e-3, 4
# With XLA: kernels approximate bf16 and fp32 weights differently, which tests/kernels compares.
OPTIMIZERS = {
    "compressed_adamw": lambda **kwargs: fp8jax.compressed_adamw(
        RATE, b2=0.95, weight_decay=0.1, min_size=1024, impl="xla", **kwargs
    ),
    "lion": lambda **kwargs: fp8jax.compress_state(optax.lion(RATE, weight_decay=0.1), min_size=1024, **kwargs),
    "fp8lm_adamw": lambda **kwargs: fp8jax.fp8lm_adamw(
        RATE, b2=0.95, weight_decay=0.1, min_size=1024, impl="xla", **kwargs
    ),
}
WITH_STEP = ("compressed_adamw", "fp8lm_adamw")


# One transformation of each kind, and so one program.
@functools.cache
def make_optimizer(name, master=None):
    return OPTIMIZERS[name](master=master) if master else OPTIMIZERS[name]()


def parameters():
    random = np.random.default_rng(0)
    return {
        "w": jnp.asarray(random.standard_normal((32, 256)) * 10.0 ** np.linspace(-6, 1, 32)[:, None], jnp.float32),
        "layers": {"w": jnp.asarray(random.standard_normal((3, 8, 128)) / 8, jnp.float32), "b": jnp.zeros(24)},
        "z": jnp.ones(8),
    }


@functools.cache
def gradients(step):
    random = np.random.default_rng(100 + step)
    return jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape), jnp.float32), parameters())


@functools.cache
def jitted(fn, **kwargs):
    return jax.jit(functools.partial(fn, **kwargs))


@functools.partial(jax.jit, static_argnums=(0, 1))
def begin(tx, master, params=None):
    """Returns the high parts of parameters, and a state with the remainders."""
    params = parameters() if params is None else params
    if master not in PARTS:
        high = jax.tree.map(lambda x: x.astype(masters.Master(master).param_format.dtype), params)
        return high, tx.init(high)
    high, remainder = fp8jax.split_master_weights(params, master)
    return high, optax.tree.set(tx.init(high), remainder=remainder)


def updated(tx, params, state, steps=STEPS):
    update, apply = jitted(tx.update), jitted(optax.apply_updates)
    for i in range(steps):
        changes, state = update(gradients(i), state, params)
        params = apply(params, changes)
    return params, state


def stepped(tx, params, state, steps=STEPS, **kwargs):
    step = jitted(tx.step, **kwargs)
    for i in range(steps):
        params, state = step(gradients(i), state, params)
    return params, state


@functools.cache
def after(way, name, master):
    """Returns master weights after some steps."""
    tx = make_optimizer(name, master)
    return way(tx, *begin(tx, master))


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@functools.cache
def in_fp32(name):
    """Returns the result of the same optimizer with fp32 master weights."""
    tx, params = make_optimizer(name), parameters()
    if name == "fp8lm_adamw":  # which has its own fp16 masters; only split parameters differ
        tx, params = make_optimizer(name, "bf16+int16"), params | {"z": jnp.ones(8, jnp.bfloat16)}
    params, state = updated(tx, params, jax.jit(tx.init)(params))
    return fp8jax.master_weights(state, params)


values = jax.jit(fp8jax.master_weights)
split = jax.jit(fp8jax.split_master_weights, static_argnums=1)


def held_in(master):
    return masters.Master(master).param_format.dtype


@pytest.mark.parametrize("name", few(OPTIMIZERS, "compressed_adamw", "fp8lm_adamw"))
def test_32_bits_are_fp32_masters(name):
    """Bitwise equal in the program of `update`, where both variants only add the change."""
    params, state = after(updated, name, "bf16+int16")
    actual = values(state, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), actual, in_fp32(name))
    high, _ = split(actual, "bf16+int16")
    equal(high, params)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
    assert {int(x) for _, x in optax.tree.get_all_with_path(state, "count")} == {STEPS}


# Each optimizer and each kind of masters, in most parts of its table with others.
PAIRS = (("compressed_adamw", "bf16+int8"), ("compressed_adamw", "fp16+int16"), ("lion", "fp16+int8"),
         ("fp8lm_adamw", "bf16+int16"))  # fmt: skip


@pytest.mark.parametrize(("name", "master"), few([(name, master) for name in OPTIMIZERS for master in PARTS], *PAIRS))
def test_masters_are_fp32s_to_their_last_bits(name, master):
    """The error is at most half a unit in the last place per step, and its effect through weight decay."""
    params, state = after(updated, name, master)
    mantissa = {"bf16": 7, "fp16": 10}[master[:4]] + 8 * np.dtype(masters.Master(master).remainder).itemsize
    lowest = {"bf16": -126, "fp16": -14}[master[:4]]
    for a, b, start in zip(*map(jax.tree.leaves, (values(state, params), in_fp32(name), parameters())), strict=True):
        largest = np.maximum(np.abs(start), np.abs(b)) + STEPS * RATE
        last = 2.0 ** (np.maximum(np.frexp(largest)[1] - 1, lowest) - min(mantissa, 23))
        assert (np.abs(np.asarray(a, np.float64) - b) <= (STEPS + 1) * last).all()


@pytest.mark.parametrize(
    ("name", "master"),
    few(
        [(name, master) for name in WITH_STEP for master in ALL],
        ("compressed_adamw", "bf16+int8"), ("fp8lm_adamw", "bf16+int16"), ("compressed_adamw", "bf16+stochastic"),
    ),
)  # fmt: skip
def test_step_and_update_give_the_same_bits(name, master):
    ours, start = after(stepped, name, master), begin(make_optimizer(name, master), master)
    equal(ours, after(updated, name, master))
    assert jax.tree.map(lambda x: x.dtype, ours[1]) == jax.tree.map(lambda x: x.dtype, start[1])
    assert {x.dtype for x in jax.tree.leaves(ours[0])} == {held_in(master)}


@pytest.mark.parametrize(("make", "off"), [(fp8jax.compressed_adamw, 2e-3), slow(fp8jax.fp8lm_adamw, 2.0**-4)])
def test_small_changes_are_kept(make, off):
    """A weight of one moves by 1e-5 per step, 1/1,000 of half a step of bf16."""
    moved, params = {}, {"w": jnp.ones((32, 256), jnp.bfloat16)}
    for master in (None, *ALL):
        tx = make(1e-5, weight_decay=0.0, master=master)
        own = jax.tree.map(lambda x: x.astype(held_in(master or "bf16")), params)  # noqa: B023
        state, step = jax.jit(tx.init)(own), jax.jit(tx.step)
        for _ in range(20):
            own, state = step(own | {"w": jnp.ones_like(own["w"])}, state, own)
        moved[master] = 1 - np.asarray(values(state, own)["w"], np.float64)
    assert not moved[None].any()
    for master in PARTS:
        mantissa = {"bf16+int8": 15, "fp16+int8": 18}.get(master, 23)
        np.testing.assert_allclose(moved[master], 2e-4, rtol=off, atol=20 * 2.0 ** -(mantissa + 2))
    steps = moved["bf16+stochastic"]
    np.testing.assert_allclose(steps.mean(), 2e-4, rtol=off + 6 / np.sqrt(np.count_nonzero(steps)))
    assert np.count_nonzero(steps) == pytest.approx(MOVED * steps.size, rel=0.3)


# The fraction of weights of one, whose bf16 step is 2^-8 below, that moved in 20 steps of 1e-5, each with its own
# noise.
MOVED = 1 - (1 - 1e-5 * 2**8) ** 20


def test_each_step_and_parameter_of_any_optimizer_has_its_own_noise():
    tx = fp8jax.compress_state(optax.lion(1e-5, weight_decay=0.0), min_size=1024, master="bf16+stochastic")
    own = {"w": jnp.ones((32, 256), jnp.bfloat16), "v": jnp.ones((32, 256), jnp.bfloat16), "wide": jnp.ones((32, 256))}
    state, update = jax.jit(tx.init)(own), jax.jit(tx.update)
    for _ in range(20):
        changes, state = update(jax.tree.map(jnp.ones_like, own), state, own)
        own = optax.apply_updates(own, changes)
    np.testing.assert_allclose(1 - own["wide"], 2e-4, rtol=1e-2)  # rounded by no bf16
    assert np.mean(np.asarray(own["w"]) != np.asarray(own["v"])) > 0.5 * 2 * MOVED * (1 - MOVED)
    moved = 1 - np.asarray(own["w"], np.float64)
    np.testing.assert_allclose(moved.mean(), 2e-4, rtol=6 / np.sqrt(np.count_nonzero(moved)))
    assert np.count_nonzero(moved) == pytest.approx(MOVED * moved.size, rel=0.3)


@pytest.mark.parametrize(
    ("name", "master"),
    few(
        [(name, master) for name in OPTIMIZERS for master in ("bf16+int8", "bf16+stochastic")],
        ("compressed_adamw", "bf16+int8"), ("fp8lm_adamw", "bf16+stochastic"),
    ),
)  # fmt: skip
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_a_mesh_changes_no_bit(name, master):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    tx = make_optimizer(name, master)
    params, state = begin(tx, master)
    where = jax.tree.map(lambda x: NamedSharding(mesh, P(*[None] * (x.ndim - 2), "fsdp")), params)
    placed = jax.device_put(params, where)
    fresh = tx.init(placed)
    remainder = optax.tree.get(state, "remainder")
    if remainder is not None:
        assert optax.tree.get(fresh, "remainder")["w"].sharding.spec == P("fsdp")
        fresh = optax.tree.set(fresh, remainder=jax.device_put(remainder, where))
    one, many = after(updated, name, master), updated(tx, placed, fresh)
    assert many[0]["w"].sharding.spec == P("fsdp")
    for a, b in zip(*map(jax.tree.leaves, (one[0], many[0])), strict=True):
        # XLA divides otherwise in another program: last bits of fp32, and the few roundings that hang on them.
        assert np.mean(np.asarray(a) != np.asarray(b)) < 0.01


def test_what_is_refused():
    params = parameters()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    for make in OPTIMIZERS.values():
        with pytest.raises(ValueError, match="unknown master 'bf16\\+int4'"):
            make(master="bf16+int4")
        with pytest.raises(ValueError, match="master 'bf16' has no effect: parameters of this dtype"):
            make(master="bf16")
        with pytest.raises(ValueError, match="all are in float32; use the first result of"):
            make(master="bf16+int8").init(params)
        with pytest.raises(TypeError, match="dtype bfloat16, but master 'fp16\\+int8' supports float16"):
            make(master="fp16+int8").init(half)
        state = jax.jit(make(master="bf16+int8").init)(half)
        with pytest.raises(ValueError, match="remainders in int8"):
            make(master="bf16+int16").update(gradients(0), state, half)
        with pytest.raises(
            (ValueError, TypeError), match=r"has remainders in int8|a CompressedAdamState, got a MasterAdamS"
        ):
            make(master="bf16+stochastic").update(gradients(0), state, half)
        with pytest.raises((ValueError, TypeError), match=r"no remainders, but|a MasterAdamState, got a Compressed"):
            make(master="bf16+int8").update(gradients(0), jax.jit(make(master="bf16+stochastic").init)(half), half)
        with pytest.raises(ValueError, match="needs the parameters"):
            make(master="bf16+int8").update(gradients(0), state)
    for name, kinds in (("compressed_adamw", ("Compressed", "Master")), ("fp8lm_adamw", ("FP8LM", "FP8LMRemainder"))):
        tx = OPTIMIZERS[name](master="bf16+int8")
        with pytest.raises(ValueError, match="does not use a key"):
            tx.step(gradients(0), (state := jax.jit(tx.init)(half)), half, key=jax.random.key(0))
        with pytest.raises(TypeError, match="a {}(Adam)?State, got a {}(Adam)?State".format(*kinds)):
            OPTIMIZERS[name]().update(gradients(0), state, half)
    with pytest.raises(
        ValueError,
        match="master_rounding requires master weights in fp16; omit it, because master 'bf16\\+int8' determines",
    ):
        OPTIMIZERS["fp8lm_adamw"](master="bf16+int8", master_rounding="stochastic")
    with pytest.raises(TypeError, match="a FP8LMRemainderState has no master weights"):
        fp8jax.params_from_master(state)
    with pytest.raises(ValueError, match="has no remainder"):
        fp8jax.split_master_weights(params, "bf16+stochastic")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_recast_after_init_are_refused_with_both_dtypes(name):
    """A checkpoint of master weights or a casting policy: in `update`, `step`, a fused block and `master_weights`."""
    params = {"w": jnp.ones((16, 128), jnp.bfloat16), "norm": jnp.ones(8)}
    wide, narrow = ({"w": params["w"].astype(w), "norm": params["norm"].astype(n)} for w, n in RECAST)
    tx = OPTIMIZERS[name](master="bf16+int8")
    state = tx.init(params)
    for form in ("update", "step") if name in WITH_STEP else ("update",):
        apply = jax.jit(getattr(tx, form))
        with pytest.raises(
            ValueError, match=r"'w'\] has dtype float32.*bfloat16.*split_master_weights\(params, 'bf16\+int8'"
        ):
            apply(wide, state, wide)
        with pytest.raises(
            ValueError, match=r"'norm'\] has dtype bfloat16.*no remainder.*float32.*split_master_weights"
        ):
            apply(params, state, narrow)
    with pytest.raises(ValueError, match=r"'w'\] has dtype float32.*bfloat16 or float16.*split_master_weights"):
        fp8jax.master_weights(state, wide)
    rounded = OPTIMIZERS[name](master="bf16+stochastic")
    with pytest.raises(
        ValueError, match=r"keeps parameters in bfloat16, but all are in float32; cast them with astype"
    ):
        rounded.update(wide, rounded.init(params), wide)
    if name in WITH_STEP:
        block = fp8jax.fused_backward(lambda p, x: jnp.sum(p["w"] * x) + jnp.sum(p["norm"]), tx)
        recast = dataclasses.replace(block.init(params), params=wide)
        with pytest.raises(ValueError, match=r"'w'\] has dtype float32.*split_master_weights"):
            fp8jax.value_and_step(block)(recast, jnp.float32(1.0))


RECAST = ((jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16))


def test_parameters_in_fp32_beside_parts_are_their_own_masters():
    params = {"w": jnp.ones((8, 256), jnp.bfloat16), "norm": jnp.ones(8)}
    grads = jax.tree.map(jnp.ones_like, params)
    for make in OPTIMIZERS.values():
        tx = make(master="bf16+int16")
        changes, state = jax.jit(lambda tx=tx: tx.update(grads, tx.init(params), params))()
        new = optax.apply_updates(params, changes)
        assert new["norm"].dtype == jnp.float32
        assert jax.tree.leaves(state.remainder)[0].shape == (8, 256)
        exact = make()
        changes, _ = jax.jit(lambda tx=exact: tx.update(grads, tx.init(params), params))()
        np.testing.assert_array_equal(new["norm"], optax.apply_updates(params, changes)["norm"])
        assert fp8jax.master_weights(state, new)["norm"] is new["norm"]


@pytest.mark.parametrize("name", WITH_STEP)
def test_a_step_that_is_not_applied_changes_nothing(name):
    before = after(stepped, name, "bf16+int8")
    equal(
        jax.jit(make_optimizer(name, "bf16+int8").step)(gradients(0), before[1], before[0], apply_if=jnp.bool_(False)),
        before,
    )


def test_inside_optaxs_wrappers():
    tx = optax.chain(optax.clip_by_global_norm(1e9), make_optimizer("compressed_adamw", "bf16+int16"))
    wrapped = optax.apply_if_finite(optax.MultiSteps(tx, 1), 3)
    params, state = updated(wrapped, *begin(wrapped, "bf16+int16"))
    other, own = after(updated, "compressed_adamw", "bf16+int16")
    for a, b in zip(*map(jax.tree.leaves, (values(state, params), values(own, other))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["compressed_adamw", "fp8lm_adamw"])
def test_masters_of_parts_of_the_parameters_are_read_together(name):
    """`optax.partition` stores one state per label, with masked nodes for other parameters."""
    w = {"a": {"w": jnp.full((8, 128), 1.1)}, "c": jnp.full((8, 128), 0.7), "d": jnp.ones(4)}
    high, rest = split(w, "bf16+int16")
    high["d"] = w["d"]
    labels = {"a": "x", "c": "y", "d": "plain"}
    tx = optax.partition({k: make_optimizer(name, "bf16+int16") for k in "xy"} | {"plain": optax.set_to_zero()}, labels)
    state = tx.init(high)
    out = optax.MaskedNode()
    parts = {"x": rest | {"c": out, "d": out}, "y": rest | {"a": out, "d": out}}
    inner = {k: optax.tree.set(state.inner_states[k], remainder=part) for k, part in parts.items()}
    actual = fp8jax.master_weights(state._replace(inner_states=state.inner_states | inner), high)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, w)
    flat = optax.flatten(make_optimizer(name, "bf16+int16"))
    with pytest.raises(ValueError, match="master weights for other parameters"):
        fp8jax.master_weights(flat.init({"w": high["c"]}), {"w": high["c"]})


def test_a_scaled_master_of_a_part_is_read_beside_others():
    params = {"a": jnp.full((8, 128), 1.1), "c": jnp.full((8, 128), 0.7)}
    tx = optax.masked(fp8jax.fp8lm_adamw(1e-3), {"a": True, "c": False})
    actual = fp8jax.master_weights(tx.init(params), params)
    np.testing.assert_allclose(actual["a"], 1.1, rtol=1e-3)  # fp16 has 11 bits
    assert actual["c"] is params["c"]


def test_gradients_in_fp32_go_through_apply_if_finite():
    tx = optax.apply_if_finite(make_optimizer("compressed_adamw", "bf16+int16"), 3)
    params = {"w": jnp.ones((8, 128), jnp.bfloat16)}
    changes, state = jax.jit(tx.update)({"w": jnp.ones((8, 128))}, tx.init(params), params)
    assert changes["w"].dtype == jnp.float32
    assert jnp.all(state.inner_state.remainder["w"] != 0)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(128, param_dtype=jnp.bfloat16)(x)


@pytest.mark.parametrize(
    ("name", "master"),
    [slow("compressed_adamw", "bf16+int8"), ("compressed_adamw", "bf16+stochastic"), ("fp8lm_adamw", "bf16+int16")],
)
def test_flax_holds_them(name, master):
    """Classes of NNX and Linen with `update`, and ours with `step`: equal bits."""
    make, x = functools.partial(OPTIMIZERS[name], master=master), jnp.ones((4, 64), jnp.bfloat16)
    loss = lambda y: jnp.mean(jnp.square(y.astype(jnp.float32) - 1))  # noqa: E731
    results = []
    for kind in (nnx.Optimizer, fp8jax.nnx.Optimizer):
        model = nnx.Linear(64, 128, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        optimizer = kind(model, make(), wrt=nnx.Param)
        for _ in range(3):
            optimizer.update(model, nnx.grad(lambda m: loss(m(x)))(model))
        results.append((nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(optimizer.opt_state))))
        assert model.kernel[...].dtype == jnp.bfloat16
        values = fp8jax.master_weights(nnx.as_pure(optimizer.opt_state), nnx.as_pure(nnx.state(model, nnx.Param)))
        assert values["kernel"].dtype == (jnp.float32 if "int" in master else jnp.bfloat16)
    equal(*results)
    results = []
    for kind in (train_state.TrainState, fp8jax.linen.TrainState):
        model = Model()
        params = model.init(jax.random.key(0), x)
        state = kind.create(apply_fn=model.apply, params=params, tx=make())
        for _ in range(3):
            grads = jax.grad(lambda p: loss(model.apply(p, x)))(state.params)  # noqa: B023
            state = state.apply_gradients(grads=grads)
        results.append((state.params, state.opt_state))
    equal(*results)


@pytest.mark.parametrize("name", WITH_STEP)
def test_orbax_keeps_them(name, tmp_path):
    before = after(stepped, name, "bf16+int16")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", before)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: before))
    equal(before, restored)


@pytest.mark.parametrize("name", WITH_STEP)
def test_converted_from_fp32_masters_and_back(name):
    plain, tx = make_optimizer("compressed_adamw"), make_optimizer(name, "bf16+int16")
    params, state = updated(plain, parameters(), jax.jit(plain.init)(parameters()))
    high, remainder = split(params, "bf16+int16")
    own = optax.tree.set(fp8jax.convert_state(state, tx, high), remainder=remainder)
    equal(values(own, high), params)
    if name == "compressed_adamw":
        equal(fp8jax.convert_state(own, plain, params), state)
    converted_back = fp8jax.convert_state(own, tx, high)
    equal(converted_back, own)
    narrow = fp8jax.convert_state(own, OPTIMIZERS[name](master="bf16+int8"), high)
    for a, b in zip(*map(jax.tree.leaves, (values(narrow, high), params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2.0**-15)  # a last place of 24 bits, at the highest remainder
    wide = fp8jax.convert_state(narrow, tx, high)
    equal(values(wide, high), values(narrow, high))


@pytest.mark.parametrize("name", ["coat", "fp8_lm"])
def test_recipes_say_it(name):
    recipe = fp8jax.recipes.get(name)
    for master in ALL:
        compute = "fp16" if master.startswith("fp16") else "bf16"
        own = dataclasses.replace(recipe, weights=dataclasses.replace(recipe.weights, master=master, compute=compute))
        tx = fp8jax.optimizer(own, RATE, clip=1.0)
        _, state = begin(tx, master)
        actual = jax.tree.leaves(optax.tree.get(state, "remainder"))
        assert {str(x.dtype) for x in actual} == ({master.partition("+")[2]} if master in PARTS else set())
        size = {"fp16+int16": 4, "bf16+int16": 4, "bf16+stochastic": 2}.get(master, 3)
        assert ("master weight", master, "fp32", size) in own.plan()
        assert optax.tree.get(state, "mu")["w"].spec.granularity == {"coat": "group", "fp8_lm": "tensor"}[name]
