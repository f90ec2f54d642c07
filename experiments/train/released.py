"""Training steps that update layers inside the backward pass: `--release` of `experiments.train`.

Layers run one after the other in a loop, as of `fp8jax.fused_backward`; the embedding, the last norm and the head have
their gradients and one step, as ever. The state is that of the plain step. Quantized are the layers' products, by the
recipe; what follows the last layer is as written.
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
        inner: the optimizer's, of all parameters.
        norm: global norm of the last step's gradients, fp32 scalar; 0 before the first.
        squares: sums of squares of the gradients of each layer in it, fp32 (layers,).
    """

    inner: Any
    norm: jax.Array
    squares: jax.Array


@dataclasses.dataclass(frozen=True)
class ReleasedOptimizer:
    """The steps of layers and of all else, and how both are clipped.

    Attributes:
        layers: of stacked layers.
        rest: of all parameters, and so of those that are not in layers.
        clip: largest global norm.
        twice: whether that norm is of the step's own gradients, by another backward pass; else each layer has its share
            of that of the step before (`fp8jax.FusedBlockState.with_clipping`), and all else is clipped by the step's
            own.
    """

    layers: FusedTransformation
    rest: FusedTransformation
    clip: float
    twice: bool

    def init(self, params: Any) -> ReleasedState:
        """The state before the first step."""
        layers = len(jax.tree.leaves(params[LAYERS])[0])
        return ReleasedState(self.rest.init(params), jnp.zeros([], jnp.float32), jnp.zeros(layers, jnp.float32))

    def step(
        self, block: Callable[..., jax.Array], loss: Callable[..., jax.Array], params: Any, state: ReleasedState
    ) -> tuple[jax.Array, Any, ReleasedState]:
        """The loss before the step, new parameters and the new state.

        Args:
            block: a layer, `block(its parameters, x, *tables)`.
            loss: `loss(run, rest)`, of `run(x, *tables)`, which is all layers, and the parameters outside of them.
            params: nested dict with the stacked layers under "layers".
            state: of `init` or of the step before.
        """
        released = fp8jax.fused_backward(block, self.layers)
        own, others = _of(state.inner, lambda tree: tree[LAYERS]), _of(state.inner, _without_layers)
        held = released.restore(params[LAYERS], own, LAYERS, has_layer_axis=True, squares=state.squares)
        rest = _without_layers(params)

        def whole(held: fp8jax.FusedBlockState, rest: Any) -> jax.Array:
            return loss(lambda x, *tables: released.scan(held, x, *tables), rest)

        if self.twice:
            held = held.with_clipping(self.clip, fp8jax.compute_grad_norm(whole, argnums=(0, 1))(held, rest))
        else:
            held = held.with_clipping(self.clip, previous_norm=state.norm)
        value, updates = fp8jax.value_and_step(whole, argnums=(0, 1))(held, rest)
        (new, grads), norm = updates, fp8jax.grad_norm_from_states(updates)
        rest, others = self.rest.step(grads, others, rest, grad_scale=clip_factor(self.clip, norm))
        inner = others._replace(
            **{
                name: {**tree, LAYERS: getattr(new.state, name)}
                for name, tree in others._asdict().items()
                if isinstance(tree, dict)
            }
        )
        return value, {**rest, LAYERS: new.params}, ReleasedState(inner, norm, new.squares)


def _of(state: Any, part: Callable[[Any], Any]) -> Any:
    """A state with a part of each tree of parameters in it."""
    return state._replace(**{name: part(x) for name, x in state._asdict().items() if isinstance(x, dict)})


def _without_layers(tree: Any) -> Any:
    return {name: x for name, x in tree.items() if name != LAYERS}


def layer_of(
    llama: LlamaConfig, recipe: fp8jax.Recipe, remat: bool | str, rows: jax.sharding.NamedSharding | None
) -> Callable[..., jax.Array]:
    """A layer of a Llama as a function of its parameters, a nested dict, whose products are the recipe's."""
    dtype = fp8jax.formats.get(recipe.weights.compute).dtype
    held = fp8jax.formats.get(recipe.weights.param_format).dtype
    kinds: dict[str, Any] = {"dtype": dtype, "param_dtype": held, "rows": rows}
    graph = nnx.split(nnx.eval_shape(lambda: Block(llama, rngs=nnx.Rngs(0), **kinds)))[0]

    def layer(params: Any, x: jax.Array, *tables: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x, *tables)

    changed = recipe.linear.is_quantized or recipe.context != type(recipe.context)()
    block = fp8jax.transform(layer, recipe) if changed else layer
    return jax.checkpoint(block, policy=products_saveable if remat == "products" else None) if remat else block
