"""Experts in Flax models with stateful scaling: a state per expert, in training and in checkpoints."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import lax

import fp8jax
from tests.distance import relative
from tests.modules.test_experts_of_flax import LinenBlock, NnxBlock, NnxMapped
from tests.rewrite import experts
from tests.rewrite.experts import EXPERTS, INNER, WIDTH, P, X
from tests.rows import few, slow

RECIPES = ["te_delayed", "int8_fallback", "moss"]


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = fp8jax.nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("recipe", few(RECIPES, "te_delayed"))
def test_experts_of_nnx_train_with_a_state_each(recipe, tmp_path):
    """README's loop. A checkpoint of the states continues like the original model."""

    def make():
        model = fp8jax.nnx.quantize(NnxBlock(), recipe)
        return model, fp8jax.nnx.Optimizer(model, fp8jax.optimizer(recipe, 1e-3, clip=1.0), wrt=nnx.Param)

    model, optimizer = make()
    losses = [float(train_step(model, optimizer, X)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    holder = model.experts.fp8jax_gate
    assert holder.layer_axes() == (EXPERTS,)
    if recipe == "te_delayed":
        p = {"router": P["router"]}
        _, chosen = experts.route(p, X)
        rows = [np.asarray(X)[(np.asarray(chosen) == e).any(1)] for e in range(EXPERTS)]
        np.testing.assert_allclose(holder.x[:, 2], [np.abs(m).max() for m in rows], rtol=1e-6)
        np.testing.assert_allclose(holder.w[:, 2], np.abs(P["gate"]).max((1, 2)), rtol=1e-6)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state((model, optimizer)))
        checkpointer.wait_until_finished()
        restored = make()
        nnx.update(restored, checkpointer.restore(tmp_path / "state", nnx.state(restored)))
    assert float(train_step(*restored, X)) == float(train_step(model, optimizer, X))


class EinsumExperts(nnx.Module):
    def __init__(self):
        self.up = nnx.Einsum("ecd, edf -> ecf", (EXPERTS, WIDTH, INNER), rngs=nnx.Rngs(0))
        self.down = nnx.Einsum("ecf,efd->ecd", (EXPERTS, INNER, WIDTH), rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.silu(self.up(x)))


@pytest.mark.parametrize("recipe", few(RECIPES, "te_delayed"))
def test_experts_of_an_nnx_einsum_have_a_state_each(recipe):
    model, x = fp8jax.nnx.quantize(EinsumExperts(), recipe), X * jnp.array([1, 1e-3, 10, 2])[:, None, None]
    assert {layer.path for layer in fp8jax.explain(model, x).quantized_layers} == {"up", "down"}
    assert 0 < relative(model(x)[1], EinsumExperts()(x)[1]) < 0.1
    if recipe != "moss":  # automatic scaling has bounds only for matrices (inputs, outputs); it measures the others
        assert model.up.einsum_op.layer_axes() == (EXPERTS,)
    fp8jax.nnx.grad(lambda model: jnp.sum(jnp.sin(model(x))))(model)
    if recipe == "te_delayed":
        fp8jax.nnx.advance_scaling(model)
        np.testing.assert_allclose(model.up.einsum_op.x[:, 0], np.abs(np.asarray(x)).max((1, 2)), rtol=1e-6)


class ConcatenatedExperts(nnx.Module):
    def __init__(self):
        self.router, self.gate, self.up, self.down = (nnx.Param(P[n]) for n in ("router", "gate", "up", "down"))

    def __call__(self, x):
        gate_up = jnp.concatenate([self.gate[...], self.up[...]], -1)
        p = {"router": self.router[...], "w13": gate_up, "down": self.down[...]}
        return experts.sorted_tokens(lax.ragged_dot)(p, x)


@pytest.mark.parametrize("recipe", few(["te_delayed", "int8_fallback"], "te_delayed"))
def test_concatenated_experts_have_the_states_of_the_first_parameter(recipe):
    """Codes of one parameter are not those of the matrix."""
    model = fp8jax.nnx.quantize(ConcatenatedExperts(), recipe)
    assert {layer.path for layer in fp8jax.explain(model, X).quantized_layers} == {"gate", "up", "down"}
    expected = ConcatenatedExperts()(X)
    assert 0 < relative(model(X), expected) < 0.1
    fp8jax.nnx.grad(lambda model: jnp.sum(jnp.sin(model(X))))(model)
    fp8jax.nnx.advance_scaling(model)
    if recipe == "te_delayed":
        largest = np.maximum(*(np.abs(np.asarray(P[name])).max((1, 2)) for name in ("gate", "up")))
        np.testing.assert_allclose(model.fp8jax_gate.w[:, 0], largest, rtol=1e-6)
    assert 0 < relative(fp8jax.nnx.quantize_weights(model)(X), expected) < 0.1


class ListedExperts(nnx.Module):
    """A list of layers whose kernels the call stacks; one layer is called, too."""

    def __init__(self, dot):
        self.experts = nnx.List([nnx.Linear(WIDTH, INNER, use_bias=False, rngs=nnx.Rngs(i)) for i in range(EXPERTS)])
        self.dot = dot

    def __call__(self, x):
        return self.dot(x, jnp.stack([expert.kernel[...] for expert in self.experts])) + self.experts[0](x)


STACKING = {
    "grouped": lambda x, w: lax.ragged_dot(x, w, jnp.array([8, 0, 16, 8])),
    "batched": lambda x, w: jnp.einsum("ecd,edf->ecf", x.reshape(EXPERTS, -1, WIDTH), w).reshape(-1, INNER),
    "mapped": lambda x, w: jax.vmap(lambda w: x @ w)(w).sum(0),
}


@pytest.mark.parametrize("dot", STACKING)
@pytest.mark.parametrize("recipe", few(RECIPES, "te_delayed"))
def test_a_call_that_stacks_layers_is_listed_and_warned_of(recipe, dot):
    model = ListedExperts(STACKING[dot])
    quantized = fp8jax.nnx.quantize(model, recipe)
    if recipe == "moss":  # its bounds are measured
        assert not fp8jax.explain(quantized, X).skipped_layers
        return
    with pytest.warns(UserWarning, match=r"of the FLOPs .* stay in 16 bits.*stacks (the )?parameters"):
        y = quantized(X)
    assert 0 < relative(y, model(X)) < 0.1
    rows = fp8jax.explain(quantized, X)
    assert {row.path for row in rows.quantized_layers} == {"experts/0"}
    assert {row.path for row in rows.skipped_layers} == {f"experts/{i}" for i in range(EXPERTS)}
    assert all("stacks" in row.reason and "te_current" in row.reason for row in rows.skipped_layers)


def test_an_expert_of_nnx_without_tokens_keeps_its_state():
    """Tokens choose only the first two experts. Maxima over microbatches are merged by maximum."""
    model = fp8jax.nnx.quantize(NnxBlock(), "te_delayed")
    x = jnp.abs(X)
    model.experts.router.set_value(jnp.zeros_like(P["router"]).at[:, 0].set(2).at[:, 1].set(1))

    @nnx.jit
    def step(model, xs):
        for x in xs:
            fp8jax.nnx.grad(lambda model, x: jnp.sum(jnp.sin(model(x))))(model, x)
        fp8jax.nnx.advance_scaling(model)

    step(model, jnp.stack([x, 3 * x, 2 * x]))
    holder = model.experts.fp8jax_up
    np.testing.assert_allclose(holder.x[:, 0], np.array([3, 3, 0, 0]) * np.asarray(x).max(), rtol=1e-6)
    assert (np.asarray(holder.dy[:, 0]) > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("recipe", few(["te_delayed", "int8_fallback"], "int8_fallback"))
@pytest.mark.parametrize("model", [slow(NnxBlock()), NnxMapped()], ids=["arrays", "mapped"])
def test_codes_of_experts_of_a_step_are_those_of_the_states(recipe, model):
    """Results equal those of the model, and other codes give other results."""
    model = fp8jax.nnx.quantize(model, recipe)

    @nnx.jit
    def step(model, factor):
        loss = fp8jax.nnx.value_and_grad(lambda model: jnp.mean((model(X) - X) ** 2))
        prequantized = fp8jax.nnx.quantize_weights(model)
        codes = nnx.state(prequantized, fp8jax.modules.scaled.QuantizedWeightVariable)
        scaled = jax.tree.map(lambda x: x * factor if jnp.issubdtype(x.dtype, jnp.floating) else x, codes)
        nnx.update(prequantized, scaled)
        fp8jax.nnx.advance_scaling(model)
        return loss(prequantized), loss(model)

    (value, grads), (want, expected) = step(model, 1.0)
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    assert relative(nnx.to_pure_dict(grads), nnx.to_pure_dict(expected)) < 1e-5
    assert abs(float(step(model, 2.0)[0][0]) - float(want)) > 0.1 * float(want)


@pytest.mark.parametrize("recipe", few(["coat", "te_delayed"], "te_delayed"))
@pytest.mark.parametrize(
    "compute",
    [lambda w: w[::-1], lambda w: w[:, ::-1], lambda w: 10 * w, lambda w: jnp.concatenate([w, w], -1)],
    ids=["reversed", "reversed inputs", "scaled", "twice"],
)
def test_codes_of_experts_are_none_of_matrices_computed_from_them(recipe, compute):
    """The matmul quantizes these matrices itself."""

    class Computed(nnx.Module):
        def __init__(self):
            self.up = nnx.Param(P["up"])

        def __call__(self, x):
            return lax.ragged_dot(x, compute(self.up[...]), jnp.array([8, 0, 16, 8]))

    model = fp8jax.nnx.quantize(Computed(), recipe)
    y = nnx.jit(lambda model, x: fp8jax.nnx.quantize_weights(model)(x))(model, X)
    np.testing.assert_array_equal(y, nnx.jit(lambda model, x: model(x))(model, X))


def test_a_product_of_all_matrices_has_the_first_state():
    """The parameter contains heads, not experts."""

    class Heads(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(P["gate"].swapaxes(0, 1))  # (inputs, heads, width)
            self.out = nnx.Param(P["down"])

        def __call__(self, x):
            h = jnp.einsum("td,dhc->thc", x, self.w[...])
            return x + jnp.einsum("thc,hcd->td", h, self.out[...])

    model = fp8jax.nnx.quantize(Heads(), [fp8jax.Rule(".*", "te_delayed")])

    @nnx.jit
    def step(model, x):
        fp8jax.nnx.grad(lambda model: jnp.sum(jnp.sin(model(x))))(model)
        fp8jax.nnx.advance_scaling(model)

    step(model, X)
    step(model, 2 * X)
    for holder in (model.fp8jax_w, model.fp8jax_out):
        assert (np.asarray(holder.x)[1:] == 0).all()
        assert (np.asarray(holder.dy[0, :2]) > 0).all()
    np.testing.assert_allclose(model.fp8jax_w.x[0, :2], np.array([2, 1]) * np.abs(X).max(), rtol=1e-6)
    assert 0 < relative(model(X), Heads()(X)) < 0.1


class LinenRagged(nn.Module):
    @nn.compact
    def __call__(self, x):
        p = {name: self.param(name, lambda _, w=w: w) for name, w in P.items() if name != "mixer"}
        return x + experts.sorted_tokens(lax.ragged_dot)(p, x)


@pytest.mark.parametrize("recipe", few(RECIPES, "te_delayed"))
@pytest.mark.parametrize("model", [LinenRagged(), slow(LinenBlock())], ids=["grouped", "einsum"])
def test_experts_of_linen_train_with_a_state_each(model, recipe):
    model = fp8jax.linen.quantize(model, recipe)
    variables = model.init(jax.random.key(0), X)
    others = {name: variables[name] for name in variables if name != "params"}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(others)} == {EXPERTS}
    state = fp8jax.linen.TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=fp8jax.optimizer(recipe, 1e-3, clip=1.0),
        scaling=variables["fp8jax_scaling"],
        rules=recipe,
    )

    @jax.jit
    def step(state, statistics, x):
        def loss(params, statistics):
            arrays = {"params": params, "fp8jax_scaling": state.scaling, "fp8jax_statistics": statistics}
            y, new = model.apply(arrays, x, mutable=["fp8jax_scaling"])
            return jnp.mean((y - x) ** 2), new["fp8jax_scaling"]

        (value, scaling), (grads, recorded) = jax.value_and_grad(loss, (0, 1), has_aux=True)(state.params, statistics)
        return state.apply_gradients(grads=grads, statistics=recorded, scaling=scaling), value

    losses = []
    for _ in range(3):
        state, value = step(state, others.get("fp8jax_statistics", {}), X)
        losses.append(float(value))
    assert losses[2] < losses[1] < losses[0]
    if recipe == "te_delayed":
        (variables,) = [v for path, v in flatten(state.scaling) if path[-2:] == ("fp8jax_gate", "w")]
        np.testing.assert_allclose(variables[:, 2], np.abs(P["gate"]).max((1, 2)), rtol=1e-6)


def flatten(collection):
    return [(tuple(step.key for step in path), leaf) for path, leaf in jax.tree.leaves_with_path(collection)]


SIZES = jnp.array([1, 1e-5, 1, 1e-5])
LAYERS = jax.random.normal(jax.random.key(5), (4, WIDTH, WIDTH)) * SIZES[:, None, None]
INPUT_SIZES = jnp.array([1, 1e4, 1e-4, 1])


def unrolled(w, x):
    return jnp.stack([jax.checkpoint(jnp.matmul)(x * INPUT_SIZES[i], w[i]) for i in range(4)])


def two_loops(w, x):
    y = [
        lax.scan(lambda _, each: (None, (x * each[1]) @ each[0]), None, (w[part], INPUT_SIZES[part]))[1]
        for part in (slice(2), slice(2, 4))
    ]
    return jnp.concatenate(y)


class NnxStack(nnx.Module):
    def __init__(self, fn):
        self.w, self.fn = nnx.Param(LAYERS), fn

    def __call__(self, x):
        return self.fn(self.w[...], x)


class LinenStack(nn.Module):
    fn: object

    @nn.compact
    def __call__(self, x):
        return self.fn(self.param("w", lambda _: LAYERS), x)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fn", [unrolled, slow(two_loops)])
def test_matrices_of_one_parameter_train_with_a_state_each(fn, recipe):
    """Products of matrices whose sizes and inputs differ by 1e4 and more, after three steps."""
    model = fp8jax.nnx.quantize(NnxStack(fn), recipe)
    optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer(recipe, 0.0), wrt=nnx.Param)
    linen = fp8jax.linen.quantize(LinenStack(fn), recipe)
    variables = linen.init(jax.random.key(0), X)
    state = fp8jax.linen.TrainState.create(
        apply_fn=linen.apply,
        params=variables["params"],
        tx=fp8jax.optimizer(recipe, 0.0),
        scaling=variables.get("fp8jax_scaling", {}),
        rules=recipe,
    )

    @nnx.jit
    def nnx_step(model, optimizer, x):
        grads = fp8jax.nnx.grad(lambda model: jnp.sum(model(x)))(model)
        optimizer.update(model, grads)
        return grads["w"][...]

    @jax.jit
    def linen_step(state, statistics, x):
        def loss(params, statistics):
            arrays = {"params": params, "fp8jax_scaling": state.scaling, "fp8jax_statistics": statistics}
            y, new = linen.apply(arrays, x, mutable=["fp8jax_scaling"])
            return jnp.sum(y), (y, new.get("fp8jax_scaling", {}))

        (_, (y, scaling)), (grads, recorded) = jax.value_and_grad(loss, (0, 1), has_aux=True)(state.params, statistics)
        return state.apply_gradients(grads=grads, statistics=recorded, scaling=scaling), y, grads["w"]

    for _ in range(3):
        nnx_grads = nnx_step(model, optimizer, X)
        state, linen_y, linen_grads = linen_step(state, variables.get("fp8jax_statistics", {}), X)
    exact_grads = jax.grad(lambda w: jnp.sum(fn(w, X)))(LAYERS)
    pairs = [(model(X), fn(LAYERS, X)), (linen_y, fn(LAYERS, X)), (nnx_grads, exact_grads), (linen_grads, exact_grads)]
    for ours, exact in pairs:
        assert all(0 < relative(*layer) < 0.1 for layer in zip(ours, exact, strict=True))
