"""Training steps that update layers inside the backward pass: `--release` of `experiments.train`.

`fp8jax.fused_backward` runs the layers in a loop. The embedding, the last norm and the head have ordinary gradients and
one ordinary step. The state is that of the plain step. The recipe quantizes the matmuls of layers, not the head.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax
from experiments.models.llama import Block, LlamaConfig, products_saveable
from fp8jax.optim.fused import FusedTransformation
from fp8jax.optim.fused_backward import clip_factor

LAYERS = "layers"


class ReleasedState(NamedTuple):
    """State of an optimizer of released layers.

    Attributes:
        inner: state of the optimizer, for all parameters.
        norm: global norm of the last step's gradients, fp32 scalar; 0 before the first.
        squares: sums of squares of each layer's gradients in the last step, fp32 (layers,).
    """

    inner: Any
    norm: jax.Array
    squares: jax.Array


@dataclasses.dataclass(frozen=True)
class ReleasedOptimizer:
    """The optimizers of layers and of other parameters, and their clipping.

    Attributes:
        layers: optimizer of stacked layers.
        outer: optimizer of all parameters, used for those outside of layers.
        clip: largest global norm.
        twice: whether an additional backward pass computes the global norm. Otherwise each layer is clipped to its
            share of the previous step's norm (`fp8jax.FusedBlockState.with_clipping`), and other parameters by their
            own norm.
    """

    layers: FusedTransformation
    outer: FusedTransformation
    clip: float
    twice: bool

    def init(self, params: Any) -> ReleasedState:
        """Returns the state before the first step."""
        layers = len(jax.tree.leaves(params[LAYERS])[0])
        return ReleasedState(self.outer.init(params), jnp.zeros([], jnp.float32), jnp.zeros(layers, jnp.float32))

    def step(
        self, block: Callable[..., jax.Array], loss: Callable[..., jax.Array], params: Any, state: ReleasedState
    ) -> tuple[jax.Array, Any, ReleasedState]:
        """Returns the loss before the step, the new parameters and the new state.

        Args:
            block: a layer, `block(its parameters, x, *tables)`.
            loss: `loss(run, outer)`: `run(x, *tables)` runs all layers, `outer` are the parameters outside of them.
            params: nested dict with the stacked layers under "layers".
            state: result of `init` or of the previous step.
        """
        released = fp8jax.fused_backward(block, self.layers)
        layer_moments, outer_moments = (
            _map_state(state.inner, lambda tree: tree[LAYERS]),
            _map_state(state.inner, _without_layers),
        )
        block_state = released.restore(
            params[LAYERS], layer_moments, LAYERS, has_layer_axis=True, squares=state.squares
        )
        outer = _without_layers(params)

        def loss_fn(block_state: fp8jax.FusedBlockState, outer: Any) -> jax.Array:
            return loss(lambda x, *tables: released.scan(block_state, x, *tables), outer)

        if self.twice:
            block_state = block_state.with_clipping(
                self.clip, fp8jax.compute_grad_norm(loss_fn, argnums=(0, 1))(block_state, outer)
            )
        else:
            block_state = block_state.with_clipping(self.clip, previous_norm=state.norm)
        value, updates = fp8jax.value_and_step(loss_fn, argnums=(0, 1))(block_state, outer)
        (new, grads), norm = updates, fp8jax.grad_norm_from_states(updates)
        outer, outer_moments = self.outer.step(grads, outer_moments, outer, grad_scale=clip_factor(self.clip, norm))
        inner = outer_moments._replace(
            **{
                name: {**tree, LAYERS: getattr(new.state, name)}
                for name, tree in outer_moments._asdict().items()
                if isinstance(tree, dict)
            }
        )
        return value, {**outer, LAYERS: new.params}, ReleasedState(inner, norm, new.squares)


def _map_state(state: Any, transform: Callable[[Any], Any]) -> Any:
    """Applies `transform` to each tree of parameters in a state."""
    return state._replace(**{name: transform(x) for name, x in state._asdict().items() if isinstance(x, dict)})


def _without_layers(tree: Any) -> Any:
    return {name: x for name, x in tree.items() if name != LAYERS}


def make_layer(
    llama: LlamaConfig, recipe: fp8jax.Recipe, remat: bool | str, rows: jax.sharding.NamedSharding | None
) -> Callable[..., jax.Array]:
    """Returns a Llama layer with the recipe's matmuls, as a function of its parameters (a nested dict)."""
    dtype = fp8jax.formats.get(recipe.weights.compute).dtype
    block_state = fp8jax.formats.get(recipe.weights.param_format).dtype
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": block_state, "rows": rows}
    graph = nnx.split(nnx.eval_shape(lambda: Block(llama, rngs=nnx.Rngs(0), **options)))[0]

    def layer(params: Any, x: jax.Array, *tables: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x, *tables)

    changed = recipe.linear.is_quantized or recipe.context != type(recipe.context)()
    block = fp8jax.transform(layer, recipe) if changed else layer
    return jax.checkpoint(block, policy=products_saveable if remat == "products" else None) if remat else block
