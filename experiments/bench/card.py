"""Training steps of a Llama with reduced state, on one or several GPUs. The arm's name selects the reductions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import fp8jax
from experiments import mesh
from experiments.bench import arms, driver, timing
from experiments.models.llama import Block
from experiments.models.parts import rows_on
from experiments.models.rope import rope_tables
from experiments.models.shape import LlamaConfig
from experiments.train import speed

# "released": layers are updated inside the backward pass. "bf16 weights": no master weights, stochastic rounding.
# "offloaded": inputs of layers are in host memory until the backward pass.
RELEASED, NARROW, OFFLOADED = PARTS = "released", "bf16 weights", "offloaded"
RATE = 1e-4


def _checkpointed(layer: Callable[..., jax.Array], offloaded: bool) -> Callable[..., jax.Array]:
    """Returns a layer that saves only its input, on the device or (JAX's offload policy) in host memory."""
    if not offloaded:
        return jax.checkpoint(layer)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[OFFLOADED],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    layer_with_names = lambda params, x, *tables: layer(params, checkpoint_name(x, OFFLOADED), *tables)  # noqa: E731
    return jax.checkpoint(layer_with_names, policy=policy)


class CardArm(driver.Arm):
    """A training step of a whole model, with its state.

    Args:
        name: an argument of `arms.parse`, with some of `PARTS`.
        model: the shape of the model.
        batch: sequences per GPU.
        length: tokens per sequence.
        gpus: number of devices over which batches and state are sharded (FSDP).
    """

    def __init__(self, name: str, model: LlamaConfig, batch: int, length: int, gpus: int = 1) -> None:
        self.recipe, self.parts = arms.parse(name, PARTS)
        param_format = fp8jax.formats.get(self.recipe.weights.param_format)
        self.dtype: Any = jnp.bfloat16 if NARROW in self.parts else param_format.dtype
        self.config, self.length, self.gpus, self.batch = model, length, gpus, batch
        self.count = batch * gpus * length
        self.mesh = mesh.make(1, gpus, jax.devices()[:gpus]) if gpus > 1 else None
        self.rows = None if self.mesh is None else mesh.batches(self.mesh)
        self.tx = fp8jax.optimizer(self.recipe, RATE, b2=0.95, weight_decay=0.1)
        layer = _checkpointed(self._layer(self.recipe), OFFLOADED in self.parts)
        key = jax.random.key(2) if NARROW in self.parts else None
        self.block = fp8jax.fused_backward(layer, self.tx, key=key) if RELEASED in self.parts else None
        self.tables = rope_tables(length, model.head_dim, model.rope_theta, model.rope_scaling)
        self._plain = layer
        shapes = jax.eval_shape(self._begun)
        placed, shardings = None, dict[str, Any]()
        if self.mesh is not None:
            placed = mesh.state(self.mesh, shapes)
            shardings = {"in_shardings": (placed, self.rows), "out_shardings": (placed, None)}
        ids = jax.random.randint(jax.random.key(1), (batch * gpus, length + 1), 0, model.vocab, jnp.int32)
        self.tokens = ids if self.rows is None else jax.device_put(ids, self.rows)
        self.inputs, self.begin = (self.tokens,), jax.jit(self._begun, out_shardings=placed)
        self._shapes, self._shardings = shapes, shardings

    def _layer(self, recipe: fp8jax.Recipe) -> Callable[..., jax.Array]:
        """Returns a layer as a function of its parameters, with the recipe's matmuls."""
        dtypes: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": self.dtype, "rows": self.rows}
        graph, self.shapes = nnx.split(nnx.eval_shape(lambda: Block(self.config, rngs=nnx.Rngs(0), **dtypes)))

        def layer(params: Any, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
            leaves = jax.tree.unflatten(jax.tree.structure(self.shapes), jax.tree.leaves(params))
            return rows_on(nnx.merge(graph, leaves)(rows_on(x, self.rows), cos, sin), self.rows)

        return fp8jax.transform(layer, recipe) if recipe.linear.is_quantized else layer

    def _begun(self) -> Any:
        """Returns the initial state. Its random generator compiles fast."""
        config, key = self.config, jax.random.key(0, impl="rbg")
        param_dtype = jnp.float32 if NARROW in self.parts else self.dtype

        def drawn(i: int, *shape: int, dtype: Any = param_dtype) -> jax.Array:
            normal = 0.02 * jax.random.normal(jax.random.fold_in(key, i), shape, dtype)
            return normal if len(shape) > 1 else jnp.ones(shape, dtype)

        flat, structure = jax.tree.flatten(nnx.to_pure_dict(self.shapes))
        stack = [
            jnp.ones((config.layers, *x.shape), x.dtype)
            if x.ndim < 2
            else drawn(i, config.layers, *x.shape, dtype=x.dtype)
            for i, x in enumerate(flat)
        ]
        layers, size = jax.tree.unflatten(structure, stack), config.dim
        other_params = {
            "embed": drawn(101, config.vocab, size),
            "norm": drawn(102, size),
            "head": drawn(103, size, config.vocab),
        }
        if self.block is not None:
            fused_layers = self.block.init(layers, "layers", has_layer_axis=True)
            return {"layers": fused_layers, "rest": other_params, "moments": self.tx.init(other_params)}
        params = {"layers": layers, **other_params}
        return {"params": params, "moments": self.tx.init(params)}

    def _loss(self, decode: Callable[[jax.Array], jax.Array], other_params: Any, tokens: jax.Array) -> jax.Array:
        table, head = (other_params[name].astype(jnp.bfloat16) for name in ("embed", "head"))
        x = decode(rows_on(table[tokens[:, :-1].reshape(-1)], self.rows))
        x = fp8jax.rms_norm(x, other_params["norm"], recipe="bf16")
        return fp8jax.linear_cross_entropy(x, head, tokens[:, 1:].reshape(-1))

    def _released_step(self, state: Any, tokens: jax.Array) -> Any:
        block = self.block
        assert block is not None

        def loss(layers: Any, other_params: Any) -> jax.Array:
            return self._loss(lambda x: block.scan(layers, x, *self.tables), other_params, tokens)

        value, (layers, grads) = fp8jax.value_and_step(loss, argnums=(0, 1))(state["layers"], state["rest"])
        other_params, moments = self.tx.step(grads, state["moments"], state["rest"])
        return {"layers": layers, "rest": other_params, "moments": moments}, value

    def _plain_step(self, state: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            scan_body = lambda x, layer: (self._plain(layer, x, *self.tables), None)  # noqa: E731
            return self._loss(lambda x: lax.scan(scan_body, x, params["layers"])[0], params, tokens)

        value, grads = jax.value_and_grad(loss)(state["params"])
        params, moments = self.tx.step(grads, state["moments"], state["params"])
        return {"params": params, "moments": moments}, value

    @property
    def operations(self) -> float:
        """FLOPs of the matmuls and the causal attention of a step, without recomputation."""
        shapes = self._shapes
        released = None if self.block is None else {"layers": shapes["layers"].params, **shapes["rest"]}
        return self.count * speed.operations(self.config, released or shapes["params"], {}, self.length)

    def build(self) -> Any:
        """Compiles the step."""
        step = self._released_step if RELEASED in self.parts else self._plain_step
        return timing.traced(step, self._shapes, self.tokens, donate_argnums=0, **self._shardings)

    @property
    def needs(self) -> float:
        """GB per GPU of the program and its arguments."""
        return driver.memory(self.program)[1]
