"""What enters and leaves the linear layers of a Llama in one training step: inputs, and gradients of outputs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.models.llama import Llama, rope_tables

LINEARS = ("q", "k", "v", "out", "gate", "up", "down")
NORMS = ("attention_norm", "mlp_norm")


class Products(NamedTuple):
    """Of one linear layer: input (tokens, inputs), weight (inputs, outputs), gradient (tokens, outputs), in fp32."""

    x: np.ndarray
    w: np.ndarray
    dy: np.ndarray


class Captured(NamedTuple):
    """Of each layer of a model, by name: its linear layers, and the inputs of its norms (tokens, channels) in fp32."""

    linears: dict[str, list[Products]]
    norms: dict[str, list[np.ndarray]]


class _Tap:
    """A layer whose input is noted; a probe, whose gradient is that of its output, is added if there is one."""

    def __init__(self, layer: Any, seen: dict[str, jax.Array], name: str, probe: jax.Array | None) -> None:
        self.layer, self.seen, self.name, self.probe = layer, seen, name, probe

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen[self.name] = x
        y = self.layer(x)
        return y if self.probe is None else y + self.probe.astype(y.dtype)


def capture(model: Llama, tokens_BxT: jax.Array) -> Captured:
    """One forward and backward pass of the mean cross-entropy over tokens (B, T + 1), layer by layer."""
    config, (sequences, length) = model.config, tokens_BxT[:, :-1].shape
    graph, stacked = nnx.split(model.layers)
    layers = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.layers)]
    tables = rope_tables(length, config.head_dim, config.rope_theta)

    def loss(probes: list[dict[str, jax.Array]]) -> tuple[jax.Array, list[dict[str, jax.Array]]]:
        x_NxD, noted = model.embed(tokens_BxT[:, :-1].reshape(-1)), []
        for state, own in zip(layers, probes, strict=True):
            block: Any = nnx.merge(graph, state)
            seen: dict[str, jax.Array] = {}
            for name in (*LINEARS, *NORMS):
                holder = next(part for part in (block, block.attention, block.mlp) if hasattr(part, name))
                holder.__dict__[name] = _Tap(getattr(holder, name), seen, name, own.get(name))
            x_NxD = block(x_NxD, *tables)
            noted.append(seen)
        logits_NxV = model.logits(model.norm(x_NxD)).astype(jnp.float32)
        labels_N = tokens_BxT[:, 1:].reshape(-1)
        return optax.softmax_cross_entropy_with_integer_labels(logits_NxV, labels_N).mean(), noted

    kernels = [{name: _kernel(state, name) for name in LINEARS} for state in layers]
    probes = [{name: jnp.zeros((sequences * length, w.shape[1])) for name, w in own.items()} for own in kernels]
    gradients, noted = jax.jit(jax.grad(loss, has_aux=True))(probes)
    plain = lambda x: np.asarray(x, np.float32)  # noqa: E731
    linears = {
        name: [
            Products(plain(seen[name]), plain(w[name]), plain(dy[name]))
            for seen, w, dy in zip(noted, kernels, gradients, strict=True)
        ]
        for name in LINEARS
    }
    return Captured(linears, {name: [plain(seen[name]) for seen in noted] for name in NORMS})


def _kernel(state: Any, name: str) -> jax.Array:
    part = state["attention" if name in ("q", "k", "v", "out") else "mlp"]
    return part[name]["kernel"][...]
