"""LoRA in a user's NNX model: adapters on quantized weights, trained, saved and merged, against a manual version."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import fp8jax
from tests.distance import relative
from tests.programs import dots

T = jnp.arange(48).reshape(2, 24) % 30
WIDTH, INNER, HEADS, RANK = 64, 96, 4, 4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q = nnx.LinearGeneral(WIDTH, (HEADS, WIDTH // HEADS), rngs=rngs)
        self.o = nnx.LinearGeneral((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1), rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, INNER, rngs=rngs), nnx.Linear(INNER, WIDTH, use_bias=False, rngs=rngs)
        self.ws = nnx.List([nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 8)])

    def __call__(self, x):
        x = x + self.o(jnp.tanh(self.q(self.norm(x))))
        x = x + self.down(nnx.silu(self.up(x)))
        return x + x @ self.ws[0]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(30, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 30, rngs=rngs)
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(Block))(rngs)

    def __call__(self, t):
        @nnx.scan(in_axes=(nnx.Carry, nnx.StateAxes({nnx.Param: 0, ...: 0})), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        return self.head(run(self.embed(t), self.layers))


def adapted(**settings):
    quantized = fp8jax.nnx.quantize(Model(nnx.Rngs(0)), settings.pop("recipe", "te_current"))
    return fp8jax.nnx.lora(quantized, **{"rank": RANK, "alpha": 8.0, "rngs": nnx.Rngs(1)} | settings)


def loss_of(model):
    return optax.softmax_cross_entropy_with_integer_labels(model(T)[:, :-1], T[:, 1:]).mean()


@nnx.jit
def step(model, optimizer):
    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@pytest.fixture(scope="module")
def trained():
    model = adapted()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    losses = [float(step(model, optimizer)) for _ in range(4)]
    return model, optimizer, losses


def shapes(state):
    return {"/".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}


def test_adapters_alone_are_parameters(trained):
    model, optimizer, losses = trained
    names = {"q/kernel", "o/kernel", "up/kernel", "down/kernel", "ws_0"}
    expected = {f"layers/{name}_adapter_{factor}" for name in names for factor in "ab"}
    assert set(shapes(nnx.state(model, nnx.Param))) == set(shapes(nnx.state(model, nnx.LoRAParam))) == expected
    assert shapes(nnx.state(model, nnx.Param))["layers/q/kernel_adapter_b"] == (2, RANK, WIDTH)
    grads = nnx.grad(loss_of)(model)
    assert set(shapes(grads)) == expected
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    moments = jax.tree.leaves(optimizer.opt_state)
    assert sum(m.size for m in moments) == 2 * sum(np.prod(s) for s in shapes(grads).values()) + len([*moments]) % 2
    assert losses[-1] < losses[0] - 1


def test_adapters_of_one_shape_start_differently():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.q, self.v = (nnx.Linear(32, 32, rngs=rngs) for _ in range(2))

    quantized = fp8jax.nnx.quantize(Two(nnx.Rngs(0)), "te_current")
    models = [fp8jax.nnx.lora(quantized, rank=4, alpha=8, rngs=rngs) for rngs in (jax.random.key(1), jax.random.key(2))]
    factors = [np.asarray(a.a) for model in models for a in fp8jax.nnx.adapters(model).values()]
    assert len({factor.tobytes() for factor in factors}) == 4


def test_weights_are_codes_of_a_byte_and_stay_so(trained):
    model, *_ = trained
    for layer in (model.layers.q, model.layers.o, model.layers.up, model.layers.down):
        held = layer.kernel.get_value()
        assert isinstance(held, fp8jax.FrozenWeight)
        assert isinstance(layer.kernel, fp8jax.nnx.FrozenParam)
        assert held.codes.codes.dtype == jnp.uint8
    assert isinstance(model.layers.ws[0].get_value(), fp8jax.FrozenWeight)
    assert isinstance(model.head.kernel.get_value(), jax.Array)
    frozen = [layer for layer in fp8jax.explain(model, T).layers if "an adapter of rank 4" in layer.reason]
    assert len(frozen) == 5
    assert {layer.products["wgrad"] for layer in frozen} == {"-"}  # no product for a gradient of the weight


def by_hand(model, adapters, x):
    """The layers of a model, written out."""
    options = {"recipe": "te_current"}

    def layer(x, parts):
        b, a = parts
        h = x * (jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * b["norm"]["scale"])
        q = fp8jax.lora.linear(h, b["q"]["kernel"].matrix, a["layers/q/kernel"], **options)
        q = jnp.tanh(q.reshape(*q.shape[:-1], HEADS, -1) + b["q"]["bias"])
        o = fp8jax.lora.linear(q.reshape(x.shape), b["o"]["kernel"].matrix, a["layers/o/kernel"], **options)
        x = x + (o + b["o"]["bias"])
        u = fp8jax.lora.linear(x, b["up"]["kernel"], a["layers/up/kernel"], **options) + b["up"]["bias"]
        x = x + fp8jax.lora.linear(nnx.silu(u), b["down"]["kernel"], a["layers/down/kernel"], **options)
        return x + fp8jax.lora.linear(x, b["ws"][0], a["layers/ws/0"], **options), None

    base = nnx.to_pure_dict(nnx.state(model.layers, fp8jax.nnx.FrozenParam))
    y, _ = jax.lax.scan(jax.checkpoint(layer), x, (base, adapters))
    return y @ model.head.kernel[...] + model.head.bias[...]


def test_a_model_is_what_one_writes_by_hand(trained):
    model, *_ = trained
    adapters = fp8jax.nnx.adapters(model)

    def hand(adapters):
        logits = by_hand(model, adapters, model.embed.embedding[...][T])
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], T[:, 1:]).mean()

    expected, theirs = jax.jit(jax.value_and_grad(hand))(adapters)
    result, grads = nnx.jit(nnx.value_and_grad(loss_of))(model)
    ours = {k.replace("ws_0", "ws/0"): v for k, v in flat(grads).items()}
    np.testing.assert_array_equal(result, expected)
    for path, adapter in theirs.items():
        for actual, exact in ((ours[f"{path}_adapter_a"], adapter.a), (ours[f"{path}_adapter_b"], adapter.b)):
            actual, exact = np.asarray(actual, np.float32), np.asarray(exact, np.float32)
            # XLA orders a sum of Flax's norm otherwise: a gradient may be the next number of bf16.
            np.testing.assert_allclose(actual, exact, rtol=2.0**-7)
            assert (actual != exact).mean() < 0.01


def flat(state):
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def test_a_saved_state_restores_bit_for_bit(trained, tmp_path):
    model, *_ = trained
    graph, state = nnx.split(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        template = nnx.state(nnx.eval_shape(lambda: adapted()))
        restored = checkpointer.restore(tmp_path / "state", template)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(restored), jax.tree.leaves(state))
    np.testing.assert_array_equal(nnx.merge(graph, restored)(T), model(T))
    other = adapted(rngs=nnx.Rngs(7))
    nnx.update(other, nnx.state(model, nnx.LoRAParam))  # adapters alone
    np.testing.assert_array_equal(other(T), model(T))


def test_merged_models_have_parameters_again(trained):
    model, *_ = trained
    merged = fp8jax.nnx.merge_lora(model)
    plain = fp8jax.nnx.unquantize(merged)
    assert shapes(nnx.state(plain, nnx.Param)) == shapes(nnx.state(Model(nnx.Rngs(0)), nnx.Param))
    for path, adapter in fp8jax.nnx.adapters(model).items():
        actual = flat(nnx.state(plain, nnx.Param))[path]
        frozen_param = flat(nnx.state(model, fp8jax.nnx.FrozenParam))[path]
        np.testing.assert_array_equal(actual, fp8jax.lora.merge_adapter(frozen_param, adapter))
    assert relative(merged(T), model(T)) < 0.1
    with pytest.raises(ValueError, match="the model has no adapters"):
        fp8jax.nnx.merge_lora(merged)


def test_adapters_of_a_model_that_is_an_argument_stay_with_it():
    class Inner(nnx.Module):
        def __init__(self, rngs):
            self.q = nnx.Linear(32, 32, rngs=rngs)

        def __call__(self, x):
            return self.q(x)

    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.q = nnx.Linear(32, 32, rngs=rngs)

        def __call__(self, x, inner):
            return inner(self.q(x))

    quantized = fp8jax.nnx.quantize(Inner(nnx.Rngs(0)), "te_current")
    inner, outer = fp8jax.nnx.lora(quantized, rank=4, alpha=8, rngs=nnx.Rngs(1)), Outer(nnx.Rngs(2))
    x = jax.random.normal(jax.random.key(0), (8, 32))
    (adapter,) = fp8jax.nnx.adapters(inner).values()
    inner.q.kernel_adapter_b[...] = jnp.ones_like(adapter.b)
    both = fp8jax.nnx.quantize(outer, "te_current")
    np.testing.assert_allclose(both(x, inner), inner(both.q(x)), rtol=0.05, atol=0.05)


def test_sharding_and_parameters_of_ones_own_survive_adapting_and_merging():
    """Codes lie transposed, so only their annotation waits for the merge; Flax's own LoRA is a parameter like any."""
    zeros, normal = nnx.initializers.zeros_init(), nnx.initializers.lecun_normal()
    inits = {
        "kernel_init": nnx.with_partitioning(normal, (None, "x")),
        "bias_init": nnx.with_partitioning(zeros, ("x",)),
    }

    class Annotated(nnx.Module):
        def __init__(self, rngs):
            self.q, self.own = nnx.Linear(32, 48, **inits, rngs=rngs), nnx.LoRA(32, 4, 48, rngs=rngs)

    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        quantized = fp8jax.nnx.quantize(Annotated(nnx.Rngs(0)), "te_current")
        adapted = fp8jax.nnx.lora(quantized, rank=4, alpha=8, rngs=nnx.Rngs(1))
        merged = fp8jax.nnx.merge_lora(adapted)
    assert list(fp8jax.nnx.adapters(adapted)) == ["q/kernel"]
    assert "out_sharding" not in adapted.q.kernel.get_metadata()
    assert adapted.q.bias.get_metadata()["out_sharding"] == ("x",)
    for name in ("kernel", "bias"):
        assert getattr(merged.q, name).get_metadata() == getattr(quantized.q, name).get_metadata()
    assert set(shapes(nnx.state(merged, nnx.LoRAParam))) == {"own/lora_a", "own/lora_b"}


def test_adapters_in_peft_s_files(trained, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    model, *_ = trained
    adapters = fp8jax.nnx.adapters(model)
    names = {path: f"model.layers.{{}}.{path.removeprefix('layers/').replace('/', '_')}" for path in adapters}
    fp8jax.lora.save(tmp_path, adapters, names)
    tensors = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    written = tensors["base_model.model.model.layers.1.up_kernel.lora_B.weight"]
    np.testing.assert_array_equal(written, np.asarray(adapters["layers/up/kernel"].b[1], np.float32).T)
    read = fp8jax.lora.load(tmp_path, names)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b, np.float32)), read, dict(adapters))
    one = {"up/kernel": jax.tree.map(lambda x: x[0], adapters["layers/up/kernel"])}
    fp8jax.lora.save(tmp_path / "one", one, {"up/kernel": "up"})
    np.testing.assert_array_equal(
        fp8jax.lora.load(tmp_path / "one", {"up/kernel": "up"})["up/kernel"].a, one["up/kernel"].a
    )
    with pytest.raises(ValueError, match="is stacked 0 times"):
        fp8jax.lora.save(tmp_path / "one", one, {"up/kernel": "layers.{}.up"})


def test_rules_targets_and_a_base_of_its_own_dtype():
    rules = [fp8jax.Rule(".*up", None), "te_current"]
    quantized = fp8jax.nnx.quantize(Model(nnx.Rngs(0)), rules)
    model = fp8jax.nnx.lora(quantized, rank=2, alpha=1, targets=".*/(q|ws)", base=None, rngs=jax.random.key(0))
    assert set(fp8jax.nnx.adapters(model)) == {"layers/q/kernel", "layers/ws/0"}
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, fp8jax.nnx.FrozenParam))} == {
        jnp.dtype(jnp.float32)
    }
    np.testing.assert_allclose(model(T), quantized(T), rtol=1e-5, atol=1e-5)
    actual = dots(lambda s: nnx.merge(nnx.graphdef(model), s)(T), nnx.state(model))
    assert ("float8_e4m3fn", "float8_e4m3fn") in actual


def test_a_part_called_from_outside_and_other_methods():
    class Two(nnx.Module):
        def __init__(self):
            self.one, self.two = nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 32, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.two(self.one(x))

        def half(self, x):
            return self.one(x)

        def by_itself(self, x):
            return x @ self.one.kernel

    model = fp8jax.nnx.lora(fp8jax.nnx.quantize(Two(), "te_current"), rank=2, alpha=1, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (8, 32))
    expected = fp8jax.linear(x, model.one.kernel.get_value(), recipe="te_current")
    np.testing.assert_array_equal(model.one(x), expected)
    np.testing.assert_array_equal(model.half(x), expected)
    with pytest.raises(TypeError, match=r"a frozen weight .* is not an array"):
        model.by_itself(x)


def test_what_is_refused_says_how(trained):
    model, *_ = trained
    plain, quantized = Model(nnx.Rngs(0)), fp8jax.nnx.quantize(Model(nnx.Rngs(0)), "te_current")
    options = {"rank": RANK, "alpha": 8.0, "rngs": nnx.Rngs(1)}
    with pytest.raises(TypeError, match="expects an NNX module, not dict"):
        fp8jax.nnx.lora({}, **options)
    with pytest.raises(ValueError, match=r"call fp8jax\.nnx\.quantize first"):
        fp8jax.nnx.lora(plain, **options)
    with pytest.raises(ValueError, match=r"already has adapters; merge them with fp8jax\.nnx\.merge_lora"):
        fp8jax.nnx.lora(model, **options)
    with pytest.raises(ValueError, match="delayed scaling, which keeps a state"):
        fp8jax.nnx.lora(fp8jax.nnx.quantize(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), "te_delayed"), **options)
    with pytest.raises(ValueError, match=r"targets 'x' match none of the layers layers/down, "):
        fp8jax.nnx.lora(quantized, targets="x", **options)
    with pytest.raises(ValueError, match=r"fp8jax\.nnx\.unquantize\(fp8jax\.nnx\.merge_lora\(model\)\)"):
        fp8jax.nnx.unquantize(model)
    with pytest.raises(ValueError, match="the model has no layer with a quantized weight"):
        fp8jax.nnx.quantize_weights(model)
    with pytest.raises(ValueError, match="the rank of an adapter"):
        fp8jax.nnx.lora(quantized, rank=999, alpha=1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="floating-point and integer codes"):
        fp8jax.nnx.lora(quantized, base="int8", **options)(T)
