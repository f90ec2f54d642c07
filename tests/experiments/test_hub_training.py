"""Models of Hugging Face families in the training program: quantized layers, and a loss that falls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from experiments.hub.load import load
from experiments.train.task import Task
from tests.experiments import hub_cases as cases
from tests.programs import dots

pytestmark = pytest.mark.slow


def started(folder, case, recipe):
    """Returns the program of a recipe, its state with a checkpoint's parameters, and tokens."""
    golden = cases.golden(case)
    loaded = load(cases.write(folder, golden["config"], golden["shapes"]), dtype=jnp.float32)
    recipe = fp8jax.recipes.get(recipe)
    task = Task(loaded.config, fp8jax.optimizer(recipe, 1e-3), recipe, remat=False, seed=0)
    state = jax.eval_shape(task.init)
    assert jax.tree.map(lambda x: x.shape, state.params) == jax.tree.map(lambda x: x.shape, loaded.params)
    return task, loaded.params, jnp.asarray(golden["tokens"])


@pytest.mark.parametrize("case", ["llama31", "mistral_window", "qwen2", "qwen3", "olmo2", "gpt2"])
def test_every_linear_layer_but_the_head_has_8_bit_products(case, tmp_path):
    task, params, tokens = started(tmp_path, case, "te_current")
    state = jax.eval_shape(task.init).model_state
    eight = [pair for pair in dots(task.loss, params, state, tokens) if any("float8" in kind for kind in pair)]
    assert len(eight) == (6 if case == "gpt2" else 7)


@pytest.mark.parametrize(
    ("case", "recipe"),
    [
        ("qwen3", "te_current"),
        pytest.param("gpt2", "coat", marks=pytest.mark.slow),
        pytest.param("olmo2", "coat", marks=pytest.mark.slow),
        pytest.param("mistral_window", "deepseek", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_trains_on(case, recipe, tmp_path):
    """The initial loss is that of the family's own implementation, and falls as fast as in bf16."""
    made = np.asarray(cases.golden(case)["logits"])[:, :-1]
    results = {}
    for name in ("bf16", recipe):
        task, params, tokens = started(tmp_path, case, name)
        state = jax.jit(task.init)()
        state = state._replace(params=params, opt_state=jax.jit(task.tx.init)(params))
        step, losses = jax.jit(task.step), []
        for _ in range(12):
            state, metrics = step(state, tokens)
            losses.append(float(metrics["loss"]))
        results[name] = losses[0], losses[0] - losses[-1]
    logits = made - np.log(np.exp(made).sum(-1, keepdims=True))
    exact = -np.take_along_axis(logits, np.asarray(tokens)[:, 1:, None], -1).mean()
    (start, fall), (quantized, fallen) = results["bf16"], results[recipe]
    assert abs(start - exact) < 2.0**-8 * exact
    # 8-bit products of sharp attention have an error of a third of the logits; the loss has a much smaller one.
    assert abs(quantized - exact) < 0.1 * exact
    assert fall > 0.25 * start
    assert abs(fallen - fall) < 0.1 * fall
