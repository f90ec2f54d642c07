"""What a step of `experiments.bench.card` needs on each GPU, counted before anything is compiled.

A step has two moments at which most is alive: at the loss, whose logits are taken a part of the tokens at a time, and
in the backward pass of a layer, which computes again what the layer keeps. How much lives there is read from programs
compiled for an H200 (7B, 8B and 13B, `bf16`, `te_current`, `coat`); no measured memory was used.
"""

import dataclasses
from typing import Any

import jax

import fp8jax
from experiments import plan
from experiments.models.shape import LlamaConfig
from fp8jax.ops.losses.cross_entropy import num_chunks

# Arrays of a token in bf16 that live where the most of a layer's backward pass do. With contexts in 8 bits, those as
# wide as the MLP beside what the layer keeps: gradients of its three and codes of two, along rows and columns. Without,
# that wide, as wide as the model, and as wide as keys.
WITH_CODES, WIDE, NARROW, KEYS = 4, 6, 7, 2
# At the loss: what the head reads, before and after its norm, and its gradient.
AT_LOSS = 3


@dataclasses.dataclass(frozen=True)
class CardPlan:
    """A step on paper.

    Attributes:
        model: the shape.
        recipe: what everything is stored and computed in.
        weights: shapes of the parameters, layers stacked under "layers", and "head".
        itemsize: bytes of a parameter of a layer, and of its gradient.
        length: tokens of a sequence.
        gpus: devices over which batches and state are cut.
        released: whether gradients are of one layer at a time.
        offloaded: whether inputs of layers wait in the host's memory.
    """

    model: LlamaConfig
    recipe: fp8jax.Recipe
    weights: Any
    itemsize: int
    length: int
    gpus: int
    released: bool
    offloaded: bool

    def memory(self, batch: int) -> dict[str, float]:
        """Bytes on each GPU, by what they are of, at the moment at which most are alive.

        Args:
            batch: sequences on each GPU.
        """
        held = self._held()
        inputs = 0.0 if self.offloaded else 2.0 * self.model.layers * batch * self.length * self.model.dim
        moments = self._at_loss(batch * self.length), self._in_backward(batch * self.length)
        return held | {"inputs of layers": inputs} | max(moments, key=lambda parts: sum(parts.values()))

    def most(self, room: float) -> int:
        """The largest batch that needs no more than so many bytes; 0 where not even one sequence fits."""
        fits = lambda batch: sum(self.memory(batch).values()) <= room  # noqa: E731
        if not fits(1):
            return 0
        low, high = 1, 2
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _held(self) -> dict[str, float]:
        """What the state is, as `fp8jax.dist.plan` counts it."""
        stacked = {name: int(name == "layers") for name in self.weights}
        memory = dict(fp8jax.dist.plan(self.weights, self.recipe, {"fsdp": self.gpus}, layer_axes=stacked).memory)
        parts = ("parameters", "remainders of weights", "master weights", "first moments", "second moments")
        held = {name: memory[name] for name in parts if name in memory}
        size = {name: sum(x.size for x in jax.tree.leaves(tree)) for name, tree in self.weights.items()}
        rest = fp8jax.formats.get(self.recipe.weights.param_format).dtype.itemsize
        layers = size.pop("layers")
        return held | {"parameters": (layers * self.itemsize + sum(size.values()) * rest) / self.gpus}

    def _at_loss(self, tokens: int) -> dict[str, float]:
        vocab, dim = self.model.vocab, self.model.dim
        chunks = num_chunks(tokens, vocab, False)
        logits = (4 + 2) * vocab * (tokens / chunks) + AT_LOSS * 2 * tokens * dim
        # The head's gradient is summed over chunks in fp32.
        return {"loss": logits + (2 if chunks == 1 else 4 + 2) * vocab * dim}

    def _in_backward(self, tokens: int) -> dict[str, float]:
        model, recipe = self.model, self.recipe
        if recipe.context.residual:
            kept = plan.saved_per_token(model, recipe, False) + 2 * WITH_CODES * model.mlp_dim
        else:
            keys = model.head_dim * model.kv_heads
            kept = 2 * (WIDE * model.mlp_dim + NARROW * model.dim + KEYS * keys)
        layers = self.itemsize * sum(x.size for x in jax.tree.leaves(self.weights["layers"]))
        head = self.weights["head"].size * fp8jax.formats.get(recipe.weights.param_format).dtype.itemsize
        gradients = (layers / model.layers if self.released else layers) + head
        return {"gradients": gradients / self.gpus, "one layer's backward pass": tokens * kept}
