"""Training steps of a model in Flax NNX, Flax Linen or Equinox, as a user writes them.

Each function takes the name of an arm: a recipe, or "bf16" for a step without fp8jax. It returns a function that
creates the state, and the step. Gradients are clipped by their global norm. bf16 uses optax's AdamW in a chain, the
other arms `fp8jax.optimizer(..., clip=)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

import fp8jax
from experiments.bench import arms
from experiments.models.plain_linen import LinenLlama

BASE, PREQUANTIZED, OBSERVED = "bf16", "prequantized:", "observed:"
RATE, CLIP, DECAY = 3e-4, 1.0, 0.1


class Training(NamedTuple):
    """A function that creates a state, and a step from a state, inputs and labels to the next state and the loss.

    An observed step returns the loss and its statistics in place of the loss.
    """

    begin: Callable[[], Any]
    step: Callable[[Any, jax.Array, jax.Array], tuple[Any, Any]]


def get_recipe(arm: str) -> fp8jax.Recipe:
    """Returns the recipe of an arm: an argument of `arms.parse`, or "auto:" and a preset for layers that become faster.

    "prequantized:" or "observed:" may precede it.

    Raises:
        ValueError: no preset has this name.
    """
    arm = arm.removeprefix(PREQUANTIZED).removeprefix(OBSERVED)
    start, _, name = arm.rpartition(f"{fp8jax.recipes.AUTO}:")
    return arms.parse(arm)[0] if start or name == arm else fp8jax.recipes.for_shapes(name)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean over a batch, in fp32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), labels).mean()


def _optimizer(arm: str) -> Any:
    if arm == BASE:
        return optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE, weight_decay=DECAY))
    return fp8jax.optimizer(get_recipe(arm), RATE, weight_decay=DECAY, clip=CLIP)


def _key() -> jax.Array:
    """Creates a key of a generator that compiles fast."""
    return jax.random.key(0, impl="rbg")


def _training(arm: str, begin: Callable[[], Any], step: Callable[..., tuple[Any, Any]]) -> Training:
    """Returns the training functions, with telemetry for "observed:" arms."""

    def observed(*args: Any) -> tuple[Any, Any]:
        (state, value), statistics = fp8jax.telemetry(step)(*args)
        return state, (value, statistics)

    return Training(begin, observed if arm.startswith(OBSERVED) else step)


def nnx_training(make: Callable[[nnx.Rngs], nnx.Module], arm: str) -> Training:
    """Returns training in Flax NNX: `nnx.Optimizer` for bf16, `fp8jax.nnx.Optimizer` for other arms."""

    def begun() -> Any:
        model = make(nnx.Rngs(_key()))
        if arm == BASE:
            return model, nnx.Optimizer(model, _optimizer(arm), wrt=nnx.Param)
        model = fp8jax.nnx.quantize(model, get_recipe(arm))
        return model, fp8jax.nnx.Optimizer(model, _optimizer(arm), wrt=nnx.Param)

    graph, _ = nnx.split(nnx.eval_shape(begun))

    def step(state: Any, inputs: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        read = fp8jax.nnx.quantize_weights(model, gradient_dtype="bfloat16") if arm.startswith(PREQUANTIZED) else model
        value, grads = nnx.value_and_grad(lambda read: cross_entropy(read(inputs), labels))(read)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    return _training(arm, lambda: nnx.state(begun()), step)


def linen_training(shape: tuple[int, ...], arm: str) -> Training:
    """Returns training in Flax Linen: Flax's `TrainState` for bf16, `fp8jax.linen.TrainState` for other arms."""
    model: linen.Module = LinenLlama(*shape)
    trainer_class: Any = TrainState
    if arm != BASE:
        model, trainer_class = fp8jax.linen.quantize(model, get_recipe(arm)), fp8jax.linen.TrainState
    tx = _optimizer(arm)

    def begin() -> Any:
        params = model.init(_key(), jax.numpy.zeros((1, 8), "int32"))["params"]
        return trainer_class.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state: Any, inputs: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return cross_entropy(state.apply_fn({"params": params}, inputs), labels)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return _training(arm, begin, step)


def equinox_training(shape: tuple[int, ...], arm: str) -> Training:
    """Returns training in Equinox, with `fp8jax.filter_transform` for arms other than bf16."""
    import equinox as eqx

    from experiments.models.plain_equinox import EquinoxLlama, in_bf16

    def loss(model: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(jax.vmap(in_bf16(model))(inputs), labels)

    kind: Any = EquinoxLlama
    tx, loss_fn = _optimizer(arm), loss if arm == BASE else fp8jax.filter_transform(loss, get_recipe(arm))
    shapes = eqx.filter_eval_shape(lambda: kind(*shape, key=_key()))
    _, static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def begin() -> Any:
        arrays = eqx.filter(kind(*shape, key=_key()), eqx.is_array)
        return arrays, tx.init(arrays)

    def step(state: Any, inputs: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        arrays, opt_state = state
        value, grads = eqx.filter_value_and_grad(loss_fn)(eqx.combine(arrays, static), inputs, labels)
        grads = eqx.filter(grads, eqx.is_array)
        if arm != BASE:
            arrays, opt_state = tx.step(grads, opt_state, arrays)
        else:
            updates, opt_state = tx.update(grads, opt_state, arrays)
            arrays = eqx.apply_updates(arrays, updates)
        return (arrays, opt_state), value

    return _training(arm, begin, step)
