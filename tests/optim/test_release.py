"""The optimizer inside the backward pass: equal to a separate step, for any order of the gradients."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from tests.rows import few, slow

LAYERS, WIDTH, BATCH = 3, 64, 8
# Magnitudes of gradients in each step, and a limit that clips all but those of the third.
SIZES, MAX_NORM = (2.0, 5.0, 0.1, 1.0), 300.0
OPTIMIZERS = {
    "coat": lambda: fp8jax.optimizer("coat", 3e-3, b2=0.95, weight_decay=0.1, min_size=1024),
    "stochastic second moments": lambda: fp8jax.compressed_adamw(3e-3, b2=0.999, min_size=1024),
    "moments in bf16": lambda: fp8jax.compressed_adamw(3e-3, mu="bf16", nu="bf16", min_size=1024),
    "bf16": lambda: fp8jax.optimizer("bf16", 3e-3, weight_decay=0.1),
    "without expansion": lambda: fp8jax.compressed_adamw(3e-3, expand=False, min_size=1024),
    "a schedule": lambda: fp8jax.compressed_adamw(optax.linear_schedule(1e-2, 0.0, 4), min_size=1024),
}


def block(params, x, shift):
    hidden = jnp.tanh(x @ params["up"] + params["bias"] + shift)
    return x + hidden @ params["down"]


def quantized(params, x, shift):
    hidden = jnp.tanh(fp8jax.linear(x, params["up"], recipe="te_current") + params["bias"] + shift)
    return x + fp8jax.linear(hidden, params["down"], recipe="te_current")


def parameters(layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), 3)
    stack = {
        "up": jax.random.normal(keys[0], (layers, WIDTH, 2 * WIDTH)) / 8,
        "down": jax.random.normal(keys[1], (layers, 2 * WIDTH, WIDTH)) / 8,
        "bias": jax.random.normal(keys[2], (layers, 2 * WIDTH)),
    }
    return stack, {"head": jax.random.normal(keys[0], (WIDTH, 5))}, jnp.float32(0.1)


def data(step):
    x = jax.random.normal(jax.random.key(100 + step), (BATCH, WIDTH))
    return x, jnp.sin(x[:, :5])


def error(x, rest, y):
    return jnp.mean((x @ rest["head"] - y) ** 2)


def layer_of(stack, i):
    return jax.tree.map(lambda leaf: leaf[i], stack)


def written(layer, stack, rest, shift, x, y):
    """The loss with layers called one by one, as users write it."""
    for i in range(jax.tree.leaves(stack)[0].shape[0]):
        x = layer(layer_of(stack, i), x, shift)
    return error(x, rest, y)


def linear(params, x, gradients):
    """A block with given gradients, so that the comparison contains no rounding of matmuls."""
    return x + sum(jnp.sum(p * gradients[name]) for name, p in params.items())


def given_gradients(step):
    stack, *_ = parameters()
    keys = jax.random.split(jax.random.key(step), len(stack))
    sizes = jax.tree.map(lambda leaf: 10.0 ** jax.random.uniform(keys[0], leaf.shape[1:], minval=-4), stack)
    signs = {name: jax.random.normal(key, stack[name].shape[1:]) for name, key in zip(stack, keys, strict=True)}
    return jax.tree.map(jnp.multiply, sizes, signs)


def clipped_by_shares(blocks, norm, max_norm, gradients, layers=LAYERS):
    """The blocks, clipped by the previous norm; the norm of this step; its factor, as it is if all layers are alike."""
    now = float(optax.tree.norm(gradients)) * np.sqrt(layers)
    clip = lambda one: one.with_clipping(max_norm, previous_norm=norm)  # noqa: E731
    blocks = jax.tree.map(clip, blocks, is_leaf=lambda x: isinstance(x, fp8jax.FusedBlockState))
    return blocks, now, float(min(1.0, max_norm / (now if norm else now / np.sqrt(layers))))


def pairs(a, b):
    return zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)


def equal(a, b):
    """Asserts equal bits, also of NaN."""
    for x, y in pairs(a, b):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def near(a, b):
    """Asserts equality of two programs up to the last bits of fp32, because XLA fuses multiply-adds differently.

    A few codes are at a tie, and their weights change with them. With different noise, every second code would differ.
    """
    for x, y in pairs(a, b):
        assert x.dtype == y.dtype
        x, y = (np.asarray(leaf).astype(np.float32) for leaf in (x, y))
        assert np.mean(~np.isclose(x, y, rtol=3e-6, atol=1e-8, equal_nan=True)) < 0.005


@pytest.mark.parametrize(
    ("name", "ways"),
    few(
        [(name, ways) for name in OPTIMIZERS for ways in ("scan", "blocks")],
        ("coat", "blocks"), ("stochastic second moments", "scan"), ("bf16", "blocks"),
    ),
)  # fmt: skip
def test_moments_are_those_of_a_plain_step(name, ways):
    tx, (stack, *_), steps = OPTIMIZERS[name](), parameters(), 4
    released = fp8jax.fused_backward(linear, tx)
    if ways == "scan":
        plain, blocks = stack, released.init(stack, "layers", has_layer_axis=True)
        loss = lambda blocks, gradients: released.scan(blocks, jnp.float32(0), gradients)  # noqa: E731
    else:
        plain = [layer_of(stack, i) for i in range(LAYERS)]
        blocks = [released.init(part, f"layers/{i}") for i, part in enumerate(plain)]
        loss = lambda blocks, gradients: sum(released(one, jnp.float32(0), gradients) for one in blocks)  # noqa: E731
    state = tx.init({"layers": plain})
    step = jax.jit(fp8jax.value_and_step(loss))
    plain_step = jax.jit(lambda grads, state, params, factor: tx.step(grads, state, params, grad_scale=factor))
    norm, factors = 0.0, []
    for i in range(steps):
        gradients = jax.tree.map(lambda g, i=i: SIZES[i] * g, given_gradients(i))
        blocks, norm, factor = clipped_by_shares(blocks, norm, MAX_NORM, gradients)
        factors.append(factor)
        _, blocks = step(blocks, gradients)
        np.testing.assert_allclose(fp8jax.grad_norm_from_states(blocks), norm, rtol=1e-5)
        repeated = (
            jax.tree.map(lambda g: jnp.stack([g] * LAYERS), gradients) if ways == "scan" else [gradients] * LAYERS
        )
        new, state = plain_step({"layers": repeated}, state, {"layers": plain}, factor)
        plain = new["layers"]
    assert [factor < 1 for factor in factors] == [True, True, False, True]
    blocks = [blocks] if ways == "scan" else blocks
    as_list = lambda tree: [tree] if ways == "scan" else tree  # noqa: E731
    near(
        [(h.mu, h.nu) for h in blocks], list(zip(as_list(state.mu["layers"]), as_list(state.nu["layers"]), strict=True))
    )
    near([h.params for h in blocks], as_list(plain))
    assert all(int(h.state.count) == int(state.count) == steps for h in blocks)
    assert (
        float(
            jnp.abs(blocks[0].params["up"] - stack["up"][: blocks[0].num_layers or 0] if ways == "scan" else 1.0).max()
        )
        > 0
    )


def plain_steps(tx, layer, steps):
    """Returns losses, parameters and state of separate steps over the whole tree."""
    stack, rest, shift = parameters()
    state, losses = tx.init({"layers": stack}), []

    @jax.jit
    def step(stack, state, x, y):
        value, grads = jax.value_and_grad(lambda stack: written(layer, stack, rest, shift, x, y))(stack)
        new, state = tx.step({"layers": grads}, state, {"layers": stack})
        return value, new["layers"], state

    for i in range(steps):
        value, stack, state = step(stack, state, *data(i))
        losses.append(float(value))
    return losses, stack, state


def released_steps(tx, layer, steps):
    stack, rest, shift = parameters()
    released = fp8jax.fused_backward(layer, tx)
    blocks, losses = released.init(stack, "layers", has_layer_axis=True), []

    def loss(blocks, rest, shift, x, y):
        return error(released.scan(blocks, x, shift), rest, y)

    step = jax.jit(fp8jax.value_and_step(loss, argnums=(0, 1, 2)), donate_argnums=0)
    for i in range(steps):
        value, (blocks, *_) = step(blocks, rest, shift, *data(i))
        losses.append(float(value))
    return losses, blocks


@pytest.mark.parametrize(
    "layer", [quantized, slow(jax.checkpoint(block)), slow(jax.jit(block))], ids=["8 bits", "remat", "jit"]
)
def test_blocks_of_any_kind(layer):
    losses, stack, _ = plain_steps(OPTIMIZERS["coat"](), layer, 3)
    actual, blocks = released_steps(OPTIMIZERS["coat"](), layer, 3)
    assert actual == pytest.approx(losses, rel=1e-5)  # XLA sums the products of loops in another order
    distance = max(float(jnp.abs(a - b).max()) for a, b in pairs(blocks.params, stack))
    moved = max(float(jnp.abs(a - b).max()) for a, b in pairs(stack, parameters()[0]))
    assert distance < 0.05 * moved


def unrolled(tx):
    """Returns fused blocks called one by one, each with the path of its parameters in the whole tree."""
    stack, rest, shift = parameters()
    released = fp8jax.fused_backward(block, tx)
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(LAYERS)]
    blocks = [released.init(part, f"layers/{i}") for i, part in enumerate(parts)]

    def loss(blocks, rest, shift, x, y):
        for one in blocks:
            x = released(one, x, shift)
        return error(x, rest, y)

    return loss, blocks, parts, rest, shift


@pytest.mark.parametrize("ways", ["scan", "blocks"])
def test_other_gradients_are_those_of_jax(ways):
    stack, rest, shift = parameters()
    x, y = data(0)

    expected = jax.jit(jax.grad(lambda *args: written(block, stack, *args, y), argnums=(0, 1, 2)))(rest, shift, x)
    if ways == "scan":
        released = fp8jax.fused_backward(block, OPTIMIZERS["coat"]())
        blocks = released.init(stack, has_layer_axis=True)
        loss = lambda blocks, rest, shift, x: error(released.scan(blocks, x, shift), rest, y)  # noqa: E731
    else:
        loss_of_blocks, blocks, *_ = unrolled(OPTIMIZERS["coat"]())
        loss = lambda blocks, rest, shift, x: loss_of_blocks(blocks, rest, shift, x, y)  # noqa: E731
    _, (_, *actual) = jax.jit(fp8jax.value_and_step(loss, argnums=(0, 1, 2, 3)))(blocks, rest, shift, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, list(expected))


def norm_of_all(stack, rest, shift, x, y):
    grads = jax.grad(lambda stack, rest: written(block, stack, rest, shift, x, y), argnums=(0, 1))(stack, rest)
    return optax.tree.norm(grads)


def test_clipping_in_two_passes_is_that_of_optax():
    tx, (stack, rest, shift), (x, y) = OPTIMIZERS["coat"](), parameters(), data(0)
    released = fp8jax.fused_backward(block, tx)
    blocks = released.init(stack, "layers", has_layer_axis=True)
    loss = lambda blocks, rest, shift, x, y: error(released.scan(blocks, x, shift), rest, y)  # noqa: E731
    norm = jax.jit(fp8jax.compute_grad_norm(loss, argnums=(0, 1)))(blocks, rest, shift, x, y)
    expected = jax.jit(norm_of_all)(stack, rest, shift, x, y)
    np.testing.assert_allclose(norm, expected, rtol=1e-5)
    limit = float(norm) / 3
    updated = jax.jit(fp8jax.value_and_step(loss, argnums=(0, 1)))
    _, (new, _) = updated(blocks.with_clipping(limit, norm), rest, shift, x, y)
    grads = jax.jit(jax.grad(lambda stack: written(block, stack, rest, shift, x, y)))(stack)
    state = tx.init({"layers": stack})
    step = jax.jit(lambda *args: tx.step(*args, grad_scale=limit / norm))
    plain, state = step({"layers": grads}, state, {"layers": stack})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-4), new.params, plain["layers"])  # of 3e-3
    moments = new.mu["up"].dequantize(), state.mu["layers"]["up"].dequantize()
    # A few codes are at a tie, or one exponent and so a group of 128 of these 24,576.
    assert np.mean(~np.isclose(*moments, rtol=1e-3, atol=1e-9)) < 0.02
    assert float(blocks.with_clipping(2 * float(norm), norm).grad_scale) == 1.0


def test_the_norm_of_a_step_comes_back_with_it():
    _, rest, shift = parameters()
    loss, blocks, *_ = unrolled(OPTIMIZERS["bf16"]())
    expected = norm_of_all(parameters()[0], rest, shift, *data(0))
    halved = [one.with_clipping(float(expected) / 2, expected) for one in blocks]
    _, updates = fp8jax.value_and_step(loss, argnums=(0, 1))(halved, rest, shift, *data(0))
    np.testing.assert_allclose(fp8jax.grad_norm_from_states(updates), expected, rtol=1e-5)
    half = np.linspace(1, 2, 99).astype(jnp.bfloat16)  # squared and summed in fp32
    np.testing.assert_allclose(fp8jax.grad_norm_from_states([half]), np.linalg.norm(half.astype(np.float64)), rtol=1e-6)
    assert [int(one.state.count) for one in updates[0]] == [1] * LAYERS


def test_each_layer_is_clipped_by_its_share_of_the_norm_before():
    """Read from first moments, which sum gradients. Norms of layers differ; one layer has no previous norm."""
    sizes = np.array([[3.0, 0.0, 4.0], [6.0, 1.0, 1.0], [3.0, 2.0, 0.5]])  # of steps, of layers
    norms, limit = np.sqrt((sizes**2).sum(1)), 2.0
    tx = fp8jax.optimizer("bf16", 0.0, b1=0.5)
    weights = {"w": jnp.ones((LAYERS, 4, 4))}

    def layer(params, x, size):
        return x + jnp.sum(params["w"]) * size[params["i"].astype(jnp.int32)] / 4

    stack = weights | {"i": jnp.arange(LAYERS, dtype=jnp.float32)}
    scanned, single = fp8jax.fused_backward(layer, tx), fp8jax.fused_backward(layer, tx)
    blocks = scanned.init(stack, "layers", has_layer_axis=True)
    parts = [single.init(layer_of(stack, i), f"layers/{i}") for i in range(LAYERS)]
    x = jnp.float32(0)
    take = jax.jit(fp8jax.value_and_step(lambda blocks, size: scanned.scan(blocks, x, size)))
    one_by_one = jax.jit(fp8jax.value_and_step(lambda parts, size: sum(single(one, x, size) for one in parts)))
    moments = np.zeros(LAYERS)
    for i, size in enumerate(sizes):
        before = norms[i - 1] if i else 0.0
        _, blocks = take(blocks.with_clipping(limit, previous_norm=before), jnp.asarray(size, jnp.float32))
        parts = [one.with_clipping(limit, previous_norm=before) for one in parts]
        _, parts = one_by_one(parts, jnp.asarray(size, jnp.float32))
        share = [sizes[i - 1][j] / before if i and sizes[i - 1][j] else 1.0 for j in range(LAYERS)]
        clipped = [min(own, limit * part) for own, part in zip(size, share, strict=True)]
        moments = 0.5 * moments + 0.5 * np.array(clipped) / 4
        for actual in (blocks.mu["w"][:, 0, 0], [one.mu["w"][0, 0] for one in parts]):
            np.testing.assert_allclose(np.asarray(actual), moments, rtol=1e-5)
        np.testing.assert_allclose(blocks.squares, size**2, rtol=1e-5)
        assert blocks.max_norms is None, "a step's limits are of it alone"
    wrong = blocks.with_clipping(limit, previous_norm=0.0)
    assert (np.asarray(wrong.max_norms) <= limit).all(), "no layer may have more than all"
    assert blocks.with_clipping(limit, previous_norm=norms[-1]).with_clipping(limit, norm=1.0).max_norms is None
    assert blocks.with_clipping(limit, norm=2 * limit).with_clipping(limit, previous_norm=norms[-1]).grad_scale == 1
    # If the sum of squares overflows, the share is unknown. A layer without a gradient and without a share is not NaN.
    overflowed = dataclasses.replace(blocks, squares=blocks.squares + np.inf)
    for one in (
        blocks.with_clipping(limit, previous_norm=np.inf),
        overflowed.with_clipping(limit, previous_norm=np.inf),
    ):
        np.testing.assert_array_equal(one.max_norms, np.full(LAYERS, limit, np.float32))
    nothing = dataclasses.replace(blocks, max_norms=jnp.zeros(LAYERS))
    assert [float(nothing.get_grad_scale(jnp.float32(square), 0)) for square in (0.0, 4.0)] == [1.0, 0.0]
    exact = take(blocks.with_clipping(limit, norm=2 * limit), jnp.asarray(sizes[0], jnp.float32))[1]
    assert exact.grad_scale == 1, "a step's scale is of it alone"
    for options in ({"norm": 1.0}, {"previous_norm": 1.0}):
        with pytest.raises(ValueError, match=r"max_norm must be positive, not -1\.0"):
            blocks.with_clipping(-1.0, **options)
    for options in ({}, {"norm": 1.0, "previous_norm": 1.0}):
        with pytest.raises(
            TypeError, match="needs either norm=, the gradient norm of the next step, or previous_norm="
        ):
            blocks.with_clipping(limit, **options)


@pytest.mark.parametrize("ways", ["scan", slow("blocks")])
def test_the_norm_alone_takes_no_step(ways):
    """In the compiled program nothing reads a moment."""
    stack, rest, shift = parameters()
    loss, blocks, *_ = unrolled(OPTIMIZERS["coat"]())
    if ways == "scan":
        released = fp8jax.fused_backward(block, OPTIMIZERS["coat"]())
        blocks = released.init(stack, has_layer_axis=True)
        loss = lambda blocks, rest, shift, x, y: error(released.scan(blocks, x, shift), rest, y)  # noqa: E731
    program = jax.jit(fp8jax.compute_grad_norm(loss)).lower(blocks, rest, shift, *data(0)).compile().as_text()
    lines = [line for line in program.splitlines() if "f8e4m3" in line]
    assert all("parameter(" in line or "entry_computation_layout" in line or "ENTRY" in line for line in lines), lines


def test_layers_are_updated_in_place():
    """The program stores gradients of one layer at a time, and no second copy of a stack."""
    layers = 16
    stack, rest, shift = parameters(layers)
    released = fp8jax.fused_backward(jax.checkpoint(block), OPTIMIZERS["coat"]())
    blocks = released.init(stack, has_layer_axis=True)
    loss = lambda blocks, rest, shift, x, y: error(released.scan(blocks, x, shift), rest, y)  # noqa: E731
    step = jax.jit(fp8jax.value_and_step(loss), donate_argnums=0)
    memory = step.lower(blocks, rest, shift, *data(0)).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(blocks))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(stack))
    assert memory.alias_size_in_bytes >= size - 64 - blocks.squares.nbytes
    assert memory.temp_size_in_bytes < weights / 2, "a plain step holds gradients as large as all weights"


def test_parameters_that_are_used_twice_or_never_are_told():
    loss, blocks, _, rest, shift = unrolled(OPTIMIZERS["coat"]())
    x, y = data(0)
    twice = lambda blocks: loss([blocks[0], blocks[0], blocks[2]], rest, shift, x, y)  # noqa: E731
    with pytest.raises(ValueError, match=r"layers/1 are in a FusedBlockState that the function does not use"):
        fp8jax.value_and_step(twice)(blocks)
    later = lambda rest, blocks: loss([blocks[0], blocks[0], blocks[2]], rest, shift, x, y)  # noqa: E731
    with pytest.raises(ValueError, match=r"layers/1 are in a FusedBlockState"):
        fp8jax.value_and_step(later, argnums=(-1, 0))(rest, blocks)
    shared = lambda blocks: loss([*blocks, blocks[0]], rest, shift, x, y)  # noqa: E731
    value, _ = fp8jax.value_and_step(shared)(blocks)
    assert np.isnan(value)
    value, _ = fp8jax.value_and_step(lambda blocks: (shared(blocks), 7.0), has_aux=True)(blocks)
    assert np.isnan(value[0])
    assert value[1] == 7.0
    # Nor has one new parameters that a condition passes by.
    passed = lambda blocks, go: jax.lax.cond(go, lambda: loss(blocks, rest, shift, x, y), lambda: 0.0)  # noqa: E731
    value, _ = fp8jax.value_and_step(passed)(blocks, jnp.array([True, False])[1])
    assert np.isnan(value)
    for given, named in (((blocks, rest, shift), {}), ((rest, rest, shift), {"blocks": blocks})):
        with pytest.raises(
            ValueError, match=r"layers/0 are in a FusedBlockState, so their argument must be in argnums"
        ):
            fp8jax.value_and_step(lambda *args, blocks=blocks: loss(blocks, *args[1:]), argnums=1)(
                *given, x, y, **named
            )


def test_what_release_refuses():
    stack, *_ = parameters()
    with pytest.raises(TypeError, match="fused_backward expects compressed_adamw"):
        fp8jax.fused_backward(block, optax.adamw(1e-3))
    with pytest.raises(TypeError, match="without clip"):
        fp8jax.fused_backward(block, fp8jax.optimizer("coat", 1e-3, clip=1.0))
    with pytest.raises(TypeError, match="with automatic weight scaling, set track_weight_bounds=False"):
        fp8jax.fused_backward(block, fp8jax.optimizer("moss", 1e-3))
    released = fp8jax.fused_backward(block, OPTIMIZERS["coat"]())
    with pytest.raises(ValueError, match="along their first axes"):
        released.init(stack | {"bias": jnp.zeros((2, 8))}, has_layer_axis=True)
    blocks, flat = released.init(stack, "all", has_layer_axis=True), released.init(stack)
    with pytest.raises(ValueError, match="all has 3 stacked layers"):
        released(blocks, data(0)[0], 0.0)
    with pytest.raises(ValueError, match="not stacked"):
        released.scan(flat, data(0)[0], 0.0)
    with pytest.raises(TypeError, match="like x"):
        fp8jax.fused_backward(lambda p, x: x[:1], OPTIMIZERS["coat"]()).scan(blocks, data(0)[0])
    odd = fp8jax.compressed_adamw(1e-3, mu="bf16", nu="bf16", b2=0.999)
    short = fp8jax.fused_backward(lambda p, x: x + p, odd)
    blocks = short.init(jnp.ones((2, 3)), has_layer_axis=True)
    step = fp8jax.value_and_step(lambda blocks: short.scan(blocks, jnp.ones(3)).sum())
    with pytest.raises(ValueError, match="multiple of eight"):
        step(blocks)


def test_a_state_goes_on_outside_of_the_backward_pass_and_back():
    tx = OPTIMIZERS["stochastic second moments"]()
    _, blocks = released_steps(tx, block, 2)
    released = fp8jax.fused_backward(block, tx)
    equal(released.restore(blocks.params, blocks.state, "layers", has_layer_axis=True, squares=blocks.squares), blocks)
    restored = released.restore(blocks.params, blocks.state, "layers", has_layer_axis=True)
    assert not restored.squares.any(), "what the last gradients were is lost"
    equal(dataclasses.replace(restored, squares=blocks.squares), blocks)


def test_a_mesh_changes_no_bit_of_moments():
    """Parameters and batches are sharded over eight devices, as with fsdp."""
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs several devices")
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))  # noqa: E731
    tx, (stack, rest, shift) = OPTIMIZERS["stochastic second moments"](), parameters()
    placed = jax.tree.map(
        lambda leaf: jax.device_put(leaf, sharded(None, "data") if leaf.ndim > 2 else sharded()), stack
    )
    released = fp8jax.fused_backward(block, tx)
    loss = lambda blocks, rest, shift, x, y: error(released.scan(blocks, x, shift), rest, y)  # noqa: E731
    step = jax.jit(fp8jax.value_and_step(loss))
    x, y = data(0)
    _, one = step(released.init(stack, has_layer_axis=True), rest, shift, x, y)
    spread = lambda x: jax.device_put(x, sharded("data"))  # noqa: E731
    _, many = step(
        released.init(placed, has_layer_axis=True), *jax.device_put((rest, shift), sharded()), spread(x), spread(y)
    )
    assert many.params["up"].sharding.spec[1] == "data"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), many.params, one.params)


def test_bf16_weights_move_on_average_as_far_as_fp32_ones():
    """Changes of 1/100 of a step of bf16 are lost with rounding to nearest, and preserved on average with a key."""
    stack = {"w": jnp.ones((LAYERS, WIDTH, 2 * WIDTH), jnp.bfloat16)}
    gradients, moved = {"w": jnp.ones((WIDTH, 2 * WIDTH), jnp.bfloat16)}, {}
    for name, key in (("nearest", None), ("stochastic", jax.random.key(0))):
        released = fp8jax.fused_backward(linear, fp8jax.optimizer("coat", 4e-5, min_size=1024, weight_decay=0), key=key)
        blocks = released.init(stack, "layers", has_layer_axis=True), released.init(layer_of(stack, 0), "other")
        loss = lambda blocks, r=released: r.scan(blocks[0], r(blocks[1], jnp.float32(0), gradients), gradients)  # noqa: E731
        step = jax.jit(fp8jax.value_and_step(loss))
        for _ in range(3):
            _, blocks = step(blocks)
        moved[name] = np.asarray(1 - jnp.concatenate([blocks[0].params["w"], blocks[1].params["w"][None]]), np.float32)
    assert blocks[0].params["w"].dtype == jnp.bfloat16
    assert not moved["nearest"].any()
    steps = moved["stochastic"].ravel()
    np.testing.assert_allclose(steps.mean(), 3 * 4e-5, rtol=6 / np.sqrt(np.count_nonzero(steps)))
    assert np.count_nonzero(steps) > 2 * (4e-5 / 2**-8) * steps.size, "each step moves others"
    layers = moved["stochastic"].reshape(LAYERS + 1, -1)
    pairs_of = itertools.combinations(range(LAYERS + 1), 2)
    assert not any((layers[i] == layers[j]).all() for i, j in pairs_of), "each has noise of its own"
