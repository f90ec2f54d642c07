"""A trainer that never updates scaling states gets an error or a warning, once per model; other trainers do not."""

import pickle
import warnings

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fp8jax
from fp8jax.rewrite import training
from tests.rows import covering

SGD = optax.sgd(1e-2)  # the same function each time, so that programs may be shared
X = jax.random.normal(jax.random.key(0), (8, 16))
MESSAGE = "scaling is trained in a program that never calls "
LOST = "delayed scaling, whose state needs the amax of the output's gradient"


class Layers(nnx.Module):
    """Two layers in a loop that differentiates its own program."""

    def __init__(self):
        make = lambda key: nnx.Linear(16, 16, rngs=nnx.Rngs(key))  # noqa: E731
        self.layers = nnx.vmap(make)(jax.random.split(jax.random.key(1), 2))

    def __call__(self, x):
        return nnx.scan(nnx.remat(lambda x, layer: layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


MODELS = {"layer": lambda: nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0))), "loop": Layers}


@pytest.fixture
def few_microbatches(monkeypatch):
    """No step has more than three."""
    monkeypatch.setattr(training, "_MAX_MICROBATCHES", 3)


def quantized(name, model="layer"):
    return fp8jax.nnx.quantize(MODELS[model](), fp8jax.Rule(".*", name))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@nnx.jit
def never(model, optimizer, x):
    optimizer.update(model, fp8jax.nnx.grad(loss)(model, x))


@nnx.jit
def each_step(model, optimizer, x):
    grads = fp8jax.nnx.grad(loss)(model, x)
    fp8jax.nnx.advance_scaling(model)
    optimizer.update(model, grads)


def collect_warnings(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    actual = [one for one in caught if MESSAGE in str(one.message)]
    assert all(one.filename == __file__ for one in actual)  # the user's line
    return [str(one.message) for one in actual]


def train(step, name, model="layer", steps=3):
    model = quantized(name, model)
    optimizer = nnx.Optimizer(model, SGD, wrt=nnx.Param)
    for _ in range(steps):
        step(model, optimizer, X)


@pytest.mark.parametrize(
    ("names", "model"),
    covering(
        [
            ("te_delayed", "delayed", "advance_scaling"),
            ("int8_fallback", "threshold", "advance_scaling"),
            ("moss", "automatic", "update_weight_amax_bounds"),
        ],
        MODELS,
    ),
)
def test_a_trainer_that_never_advances_states_is_told_for_each_model(names, model):
    """Regression: the second model was trained silently by the program of the first."""
    name, kind, call = names
    for _ in range(2):
        (message,) = collect_warnings(lambda: train(never, name, model))
        assert message.startswith(f"an nnx.Linear with {kind} {MESSAGE}fp8jax.nnx.{call}: ")


@pytest.mark.parametrize("name", ["te_delayed", "int8_fallback"])
def test_who_advances_states_is_told_nothing_and_others_after_that_are(name):
    assert collect_warnings(lambda: train(each_step, name)) == []
    assert len(collect_warnings(lambda: train(never, name))) == 1


def test_each_of_the_two_calls_is_asked_for_by_itself():
    assert collect_warnings(lambda: train(each_step, "te_delayed")) == []
    assert len(collect_warnings(lambda: train(never, "moss"))) == 1


def test_who_gives_bounds_in_the_step_is_told_nothing():
    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss)(model, x))
        fp8jax.nnx.update_weight_amax_bounds(model, fp8jax.get_weight_amax_bounds(optimizer.opt_state))

    model = quantized("moss")
    tracked = optax.chain(optax.sgd(1e-2), fp8jax.track_weight_amax())
    assert collect_warnings(lambda: step(model, nnx.Optimizer(model, tracked, wrt=nnx.Param), X)) == []


@pytest.mark.parametrize("name", ["te_delayed", "int8_fallback", "moss"])
def test_gradients_in_a_program_of_their_own_are_no_mistake_beside_our_optimizer(name):
    model = quantized(name)
    optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer(name, 1e-2, b2=0.95), wrt=nnx.Param)
    gradients = nnx.jit(fp8jax.nnx.grad(loss))
    assert collect_warnings(lambda: optimizer.update(model, gradients(model, X))) == []


@pytest.mark.parametrize(
    ("wraps", "model", "program"), covering([lambda loss: loss, nnx.jit, nnx.remat], MODELS, [lambda f: f, nnx.jit])
)
def test_a_gradient_that_loses_statistics_is_refused(wraps, model, program):
    """Regression: in README's loop, histories of all three operands stayed 0."""
    for _ in range(2):
        # An inspection that fails is over, too.
        with pytest.raises(RuntimeError), training.suppress_training_checks():
            raise RuntimeError
        delayed = quantized("te_delayed", model)
        with pytest.raises(ValueError, match=LOST):
            program(nnx.grad(wraps(loss)))(delayed, X)
    program(nnx.grad(wraps(loss), argnums=1))(delayed, X)  # the model is not trained
    program(fp8jax.nnx.grad(wraps(loss)))(delayed, X)
    delayed.eval()
    program(nnx.grad(wraps(loss)))(delayed, X)


@pytest.mark.parametrize(("wraps", "model"), covering([lambda loss: loss, nnx.jit, nnx.remat], MODELS))
def test_bounds_of_weights_that_are_not_trained_are_not_asked_for(model, wraps):
    """They do not change, and the optimizer tracks none of them; the call raised an error before."""
    frozen = quantized("moss", model)
    of_input, of_both = (nnx.jit(nnx.grad(wraps(loss), argnums=which)) for which in (1, (0, 1)))
    assert collect_warnings(lambda: of_input(frozen, X)) == []
    assert len(collect_warnings(lambda: of_both(frozen, X))) == 1


def test_outside_of_programs_they_are_not_asked_for_either(few_microbatches):
    for _ in range(2):
        frozen = quantized("moss")
        assert collect_warnings(lambda frozen=frozen: [nnx.grad(loss, argnums=1)(frozen, X) for _ in range(4)]) == []
        assert len(collect_warnings(lambda frozen=frozen: [nnx.grad(loss)(frozen, X) for _ in range(4)])) == 1


def test_linen_is_told_its_own_call():
    model = fp8jax.linen.quantize(nn.Dense(16), fp8jax.Rule(".*", "moss"))
    variables = model.init(jax.random.key(0), X)
    for _ in range(2):
        step = jax.jit(jax.grad(lambda p: jnp.mean(model.apply({**variables, "params": p}, X) ** 2)))
        (message,) = collect_warnings(lambda step=step: step(variables["params"]))
        assert f"with automatic {MESSAGE}fp8jax.linen.update_weight_amax_bounds: " in message


def test_linen_is_told_nothing_of_weights_that_are_not_trained():
    model = fp8jax.linen.quantize(nn.Dense(16), fp8jax.Rule(".*", "moss"))
    variables = model.init(jax.random.key(0), X)
    step = jax.jit(lambda v, x: jax.grad(lambda x: jnp.mean(model.apply(v, x) ** 2))(x))
    assert collect_warnings(lambda: step(variables, X)) == []


@pytest.mark.parametrize(("name", "program"), covering(["te_delayed", "int8_fallback"], [lambda f: f, jax.jit]))
def test_linen_refuses_what_loses_statistics(name, program):
    """Regression: both were trained silently with their first state."""
    model = fp8jax.linen.quantize(nn.Dense(16), fp8jax.Rule(".*", name))
    variables = model.init(jax.random.key(0), X)

    def loss_fn(params, statistics, mutable=True):
        collections = variables | {"params": params, "fp8jax_statistics": statistics}
        y = model.apply(collections, X, mutable=["fp8jax_scaling"] if mutable else False)
        return jnp.mean((y[0] if mutable else y) ** 2)

    given = variables["params"], variables.get("fp8jax_statistics", {})
    with pytest.raises(ValueError, match=r"'fp8jax_scaling' is not mutable. Use .*argnums=\(0, 1\), has_aux=True"):
        program(jax.grad(lambda *given: loss_fn(*given, mutable=False), argnums=(0, 1)))(*given)
    with pytest.raises(ValueError, match="is not mutable"):  # also where states are differentiated, too
        program(jax.grad(lambda variables: jnp.mean(model.apply(variables, X) ** 2)))(variables)
    if name == "te_delayed":
        with pytest.raises(ValueError, match=LOST):
            program(jax.grad(loss_fn))(*given)
    program(jax.grad(loss_fn, argnums=(0, 1)))(*given)
    program(lambda *given: loss_fn(*given, mutable=False))(*given)  # evaluation


def test_a_train_state_without_statistics_says_where_they_come_from():
    model = fp8jax.linen.quantize(nn.Dense(16), fp8jax.Rule(".*", "te_delayed"))
    variables = model.init(jax.random.key(0), X)
    params, scaling = variables["params"], variables["fp8jax_scaling"]
    tx = fp8jax.optimizer("te_delayed", 1e-2)
    state = fp8jax.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, scaling=scaling)
    with pytest.raises(ValueError, match=r"no statistics for the gradient .*fp8jax_statistics"):
        state.apply_gradients(grads=params, scaling=scaling)


def scan_of_one(step):
    """`step` in a loop of one iteration."""
    return jax.jit(lambda state: jax.lax.scan(lambda state, _: (step(state), None), state, length=1)[0])


@pytest.mark.parametrize("name", ["te_delayed", "int8_fallback"])
@pytest.mark.parametrize("program", [lambda step: step, jax.jit, scan_of_one])
def test_a_train_state_that_is_not_given_its_collection_says_so(name, program):
    """Without `scaling=` the states stayed at their first values, and nothing was said."""
    rules = fp8jax.Rule(".*", name)
    model = fp8jax.linen.quantize(nn.Dense(16), rules)
    variables = model.init(jax.random.key(0), X)
    statistics = variables.get("fp8jax_statistics", {})
    state = fp8jax.linen.TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=SGD, scaling=variables["fp8jax_scaling"], rules=rules
    )

    def step(state, how):
        @jax.checkpoint
        def loss(params, statistics):
            collections = {"params": params, "fp8jax_statistics": statistics, "fp8jax_scaling": state.scaling}
            y, new = model.apply(collections, X, mutable=["fp8jax_scaling"])
            return jnp.mean(y**2), new["fp8jax_scaling"]

        (grads, seen), scaling = jax.grad(loss, argnums=(0, 1), has_aux=True)(state.params, statistics)
        if how == "replaced":
            state = state.replace(scaling=scaling)
        return state.apply_gradients(grads=grads, statistics=seen, **({"scaling": scaling} if how == "given" else {}))

    with pytest.raises(ValueError, match=r"without scaling= loses .* Pass scaling=new\['fp8jax_scaling'\]"):
        program(lambda state: step(state, "lost"))(state)
    for how in ("given", "replaced"):
        new = program(lambda state, how=how: step(state, how))(state).scaling
        changes = jax.tree.map(lambda a, b: bool((a != b).any()), state.scaling, new)
        assert any(jax.tree.leaves(changes))


@pytest.mark.parametrize(("name", "program"), covering(["te_delayed", "int8_fallback"], [lambda f: f, jax.jit]))
def test_a_transformed_function_is_trained_with_its_states(name, program):
    fast = fp8jax.transform(lambda p, x: jnp.mean((x @ p["w"]) ** 2) + jnp.sum(p["b"]), fp8jax.Rule(".*", name))
    p = {"w": jnp.ones((16, 16)), "b": jnp.ones(16)}
    states = fast.init(p, X)
    with pytest.raises(ValueError, match=r"Use states = fast\.init\(params, ...\)"):
        program(jax.grad(fast))(p, X)
    with pytest.raises(ValueError, match=r"which is not computed here. Use grads, observed"):
        program(jax.grad(lambda p: fast(p, X, states=states)))(p)
    both = lambda p, states: jax.grad(lambda *p: fast(p[0], X, states=p[1]), argnums=(0, 1))(p, states)  # noqa: E731
    advanced = lambda p, states: fast.advance(states, both(p, states)[1])  # noqa: E731
    assert collect_warnings(lambda: program(advanced)(p, states)) == []
    messages = collect_warnings(lambda: jax.jit(both)(p, states))
    assert [MESSAGE + "advance of the transformed function" in message for message in messages] == [True]


def test_a_transformed_function_gets_the_bounds_of_its_weights():
    fast = fp8jax.transform(lambda p, x: jnp.mean((x @ p["w"]) ** 2), "moss")
    p, tx = {"w": jnp.ones((16, 16))}, fp8jax.optimizer("moss", 1e-2)

    def step(p, opt_state, states, has_bounds):
        grads, observed = jax.grad(lambda *p: fast(p[0], X, states=p[1]), argnums=(0, 1))(p, states)
        p, opt_state = tx.step(grads, opt_state, p)
        states = fast.advance(states, observed)
        if has_bounds:
            states = fast.update_weight_amax_bounds(states, fp8jax.get_weight_amax_bounds(opt_state))
        return p, states

    for has_bounds in (True, False):
        program = jax.jit(lambda *args, has_bounds=has_bounds: step(*args, has_bounds))
        messages = collect_warnings(lambda program=program: program(p, tx.init(p), fast.init(p, X)))
        expected = MESSAGE + "update_weight_amax_bounds of the transformed function"
        assert [expected in message for message in messages] == [True] * (not has_bounds)


def readme_step(tx, accumulated=1):
    """README's step; with several microbatches, gradients are summed."""

    @nnx.jit
    def step(model, optimizer, x):
        grads = []
        for part in jnp.split(x, accumulated):
            _, each = fp8jax.nnx.value_and_grad(lambda model, part=part: jnp.mean(model(part) ** 2))(model)
            grads.append(each)
        optimizer.update(model, jax.tree.map(lambda *g: sum(g) / len(g), *grads))
        return optax.tree.norm(grads[0])

    def run(name, steps=2):
        model = quantized(name)
        optimizer = fp8jax.nnx.Optimizer(model, tx(name), wrt=nnx.Param)
        norms = [step(model, optimizer, X * 0.5**i) for i in range(steps)]
        return model.layers[0].dot_general, norms

    return run


@pytest.mark.parametrize("accumulated", [1, 2])
def test_statistics_arrive_in_the_loop_of_the_readme(accumulated):
    """Against float64: the maximum over microbatches, not the sum or the mean."""
    state, (norm, _) = readme_step(lambda name: fp8jax.optimizer(name, 0.0), accumulated)("te_delayed")
    kernel = np.asarray(MODELS["layer"]().layers[0].kernel[...], np.float64)
    x = np.asarray(X, np.float64)
    parts = np.split(x, accumulated)
    dys = [2 * (part @ kernel) / (part.size) for part in parts]
    want = {"x": np.abs(x).max(), "w": np.abs(kernel).max(), "dy": max(np.abs(dy).max() for dy in dys)}
    for operand, largest in want.items():
        factors = [1, 1] if operand == "w" else [0.5, 1]  # the newest first; the second batch is half as large
        history = np.asarray(getattr(state, operand)[...])
        np.testing.assert_allclose(history[:2], largest * np.array(factors), rtol=0.08 if operand == "dy" else 1e-6)
        assert not history[2:].any()
    assert not any(np.asarray(v[...]).any() for v in (state.seen_x, state.seen_w, state.slot))
    # Gradients contain no statistics: their norm is that of parameters.
    expected = np.sqrt(sum((g**2).sum() for g in (parts[0].T @ dys[0], dys[0].sum(0))))
    np.testing.assert_allclose(norm, expected, rtol=0.05)


def test_thresholds_and_bounds_arrive_in_the_loop_of_the_readme():
    run = readme_step(lambda name: fp8jax.optimizer(name, 0.0, b2=0.95))
    state, _ = run("int8_fallback")
    assert float(state.threshold_x[...]) != 1
    assert not np.asarray(state.seen_x[...]).any()
    state, _ = run("moss")
    np.testing.assert_allclose(
        state.automatic_w[...], jnp.abs(MODELS["layer"]().layers[0].kernel[...]).max(), rtol=1e-5
    )


def test_gradients_are_those_of_flax_for_models_without_statistics_and_arrays():
    model = quantized("te_current")
    jax.tree.map(np.testing.assert_array_equal, fp8jax.nnx.grad(loss)(model, X), nnx.grad(loss)(model, X))
    both = lambda model, x: (loss(model, x), x)  # noqa: E731
    delayed = quantized("te_delayed")
    (value, aux), (of_model, of_x) = fp8jax.nnx.value_and_grad(both, argnums=(0, 1), has_aux=True)(delayed, X)
    assert aux is not None
    assert value.shape == ()
    assert of_x.shape == X.shape
    grads, aux = fp8jax.nnx.grad(both, has_aux=True)(delayed, X)
    np.testing.assert_array_equal(aux, X)
    assert jax.tree.structure(grads) == jax.tree.structure(of_model) == jax.tree.structure(nnx.state(model, nnx.Param))
    assert float(delayed.layers[0].dot_general.slot[...]) > 0


@pytest.mark.parametrize("name", ["te_delayed", "int8_fallback"])
def test_loops_that_drop_observations_are_told(name):
    """`nnx.scan` drops changes of broadcast variables."""

    def run(axes):
        model = quantized(name)
        optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer(name, 0.0), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, parts):
            @nnx.scan(in_axes=(nnx.Carry, axes, 0), out_axes=nnx.Carry)
            def accumulate(total, model, x):
                return jax.tree.map(jnp.add, total, fp8jax.nnx.grad(loss)(model, x))

            zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
            optimizer.update(model, accumulate(zeros, model, parts))

        before = jax.tree.map(np.asarray, nnx.state(model, fp8jax.nnx.ScalingVariable))
        step(model, optimizer, jnp.stack([X, 2 * X]))
        after = jax.tree.map(np.asarray, nnx.state(model, fp8jax.nnx.ScalingVariable))
        return any(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), before, after)))

    with pytest.warns(UserWarning, match="statistics of this model's calls are lost"):
        assert not run(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(nnx.StateAxes({nnx.Param: None, ...: nnx.Carry}))


@pytest.mark.parametrize("name", ["te_delayed", "int8_fallback"])
def test_trainers_of_copies_and_of_models_in_evaluation_are_told(name):
    """The scales stay, also in a loop over steps."""

    def run(gradient):
        model = quantized(name)
        optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer(name, 0.0), wrt=nnx.Param)

        @nnx.jit
        def steps(model, optimizer):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def step(carry, x):
                model, optimizer = carry
                optimizer.update(model, gradient(model, x))
                return carry

            step((model, optimizer), jnp.stack([X, 2 * X]))

        before = jax.tree.map(np.asarray, nnx.state(model, fp8jax.nnx.ScalingVariable))
        steps(model, optimizer)
        after = jax.tree.map(np.asarray, nnx.state(model, fp8jax.nnx.ScalingVariable))
        return any(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), before, after)))

    def in_evaluation(model, x):
        model.eval()
        return fp8jax.nnx.grad(loss)(model, x)

    with pytest.warns(UserWarning, match=r"statistics of this model's calls are lost.* nnx.clone .* train the model"):
        assert not run(lambda model, x: fp8jax.nnx.grad(loss)(nnx.clone(model), x))
    with pytest.warns(UserWarning, match=r"trained in evaluation mode, so its scales do not change: call model.train"):
        assert not run(in_evaluation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(lambda model, x: fp8jax.nnx.grad(loss)(model, x))


def test_models_that_a_differentiated_function_closes_over_are_to_be_arguments():
    model, other = quantized("te_delayed"), quantized("te_delayed")
    with pytest.raises(flax.errors.TraceContextError, match=r"^an nnx.Linear has delayed .* as an argument, or call"):
        fp8jax.nnx.grad(lambda model: loss(model, other(X)))(model)
    fp8jax.nnx.grad(lambda model, other: loss(model, other(X)))(model, other)
    assert all(float(m.layers[0].dot_general.seen_x[...]) > 0 for m in (model, other))
    other.eval()
    fp8jax.nnx.grad(lambda model: loss(model, other(X)))(model)


def test_statistics_arrive_where_models_stand_in_a_tuple_or_a_dictionary():
    both = quantized("te_delayed"), quantized("te_delayed"), jnp.float32(2)
    grads = fp8jax.nnx.grad(lambda args: jnp.sum(args[0](X) + args[2] * args[1](X)))(both)
    assert [float(model.layers[0].dot_general.slot[...]) for model in both[:2]] == [1, 2]
    expected = nnx.state(both[0], nnx.Param)
    assert jax.tree.structure(grads) == jax.tree.structure((expected, expected, 0.0))
    parts = {"actor": quantized("te_delayed"), "critic": quantized("te_current")}
    fp8jax.nnx.value_and_grad(lambda parts: loss(parts["actor"], X) + loss(parts["critic"], X))(parts)
    assert float(parts["actor"].layers[0].dot_general.slot[...]) > 0


@pytest.mark.parametrize("mode", ["graph", "graph_updates"])
def test_statistics_arrive_where_flax_takes_models_as_trees(mode):
    model = quantized("te_delayed")
    optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer("te_delayed", 0.0), wrt=nnx.Param)
    with getattr(nnx, f"set_{mode}_mode" if mode == "graph" else f"set_{mode}")(False):
        optimizer.update(model, fp8jax.nnx.grad(loss)(model, X))
    state = model.layers[0].dot_general
    assert all(float(getattr(state, operand)[0]) > 0 for operand in ("x", "w", "dy"))


def test_a_step_that_is_ended_twice_is_ended_once():
    model = quantized("te_delayed")
    fp8jax.nnx.grad(loss)(model, X)
    fp8jax.nnx.advance_scaling(model)
    once = jax.tree.map(np.asarray, nnx.state(model))
    fp8jax.nnx.end_step(model, nnx.State({}))
    jax.tree.map(np.testing.assert_array_equal, once, nnx.state(model))
    model = fp8jax.linen.quantize(nn.Dense(16), fp8jax.Rule(".*", "te_delayed"))
    scaling = model.init(jax.random.key(0), X)["fp8jax_scaling"] | {"seen_x": jnp.ones([])}
    once = fp8jax.linen.advance_scaling(scaling, {"slot": jnp.ones([])})
    assert float(once["x"].sum()) == 1
    twice = fp8jax.linen.advance_scaling(once, {"slot": jnp.zeros([])})
    jax.tree.map(np.testing.assert_array_equal, once, twice)


@pytest.mark.parametrize("name", ["te_delayed", "int8_fallback"])
def test_outside_of_programs_microbatches_are_told_nothing(name, few_microbatches):
    for _ in range(2):
        model = quantized(name)
        take = lambda model=model: fp8jax.nnx.grad(loss)(model, X)  # noqa: E731
        assert collect_warnings(lambda take=take: [take() for _ in range(3)]) == []
        assert len(collect_warnings(take)) == 1
        assert collect_warnings(take) == []
        fp8jax.nnx.advance_scaling(model)
        assert collect_warnings(lambda take=take: [take() for _ in range(3)]) == []


def test_nothing_is_told_of_a_gradient_that_is_no_training():
    model = quantized("te_delayed")
    gradient = nnx.jit(fp8jax.nnx.grad(loss))
    assert collect_warnings(lambda: nnx.jit(loss)(model, X)) == []  # a call
    assert collect_warnings(lambda: fp8jax.explain(MODELS["layer"](), fp8jax.Rule(".*", "te_delayed"), X)) == []
    model.eval()
    assert collect_warnings(lambda: gradient(model, X)) == []
    model.train()
    assert len(collect_warnings(lambda: gradient(pickle.loads(pickle.dumps(model)), X))) == 1


def test_linen_states_without_the_rules_of_thresholds_say_where_to_give_them():
    module = fp8jax.linen.quantize(nn.Dense(16), fp8jax.Rule(".*", "int8_fallback"))
    variables = module.init(jax.random.key(0), X)
    state = fp8jax.linen.TrainState.create(
        apply_fn=module.apply, params=variables["params"], tx=SGD, scaling=variables["fp8jax_scaling"]
    )
    with pytest.raises(ValueError, match=r"^the layer has variables .*Pass the rules= .* TrainState.create"):
        state.apply_gradients(grads=variables["params"], scaling=variables["fp8jax_scaling"])
