"""Quantizes the linear layers of Flax NNX models that were not written for it."""

from typing import TypeVar

from flax import nnx
from jax import lax

from fp8jax.modules.dots import DotGeneral, Einsum
from fp8jax.modules.rules import Choice, Rules, choose

Model = TypeVar("Model", bound=nnx.Module)
_LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)


def quantize(model: Model, rules: Rules) -> Model:
    """A copy of a model whose linear layers compute with a recipe.

    Parameters keep their names, shapes and values, so checkpoints fit both ways. The layers are `nnx.Linear`,
    `nnx.LinearGeneral` (also those inside `nnx.MultiHeadAttention`) and `nnx.Einsum`, at any depth, stacked by
    `nnx.vmap` or not. Build the `nnx.Optimizer` from the copy.

    Args:
        model: any NNX module; it is not changed.
        rules: a `Recipe`, used for all layers but embeddings and output heads (by their usual names), or a sequence
            of `fp8jax.Rule` on paths such as `"layers/attention/q"`.

    Returns:
        The copy. `fp8jax.explain(model, rules, *sample)` says what became of each layer.

    Raises:
        ValueError: a rule matches no layer, the model has none, or a layer has a product of its own already.
    """
    quantized = nnx.clone(model)
    layers = find(quantized)
    for path, choice in choose(layers, rules).items():
        if choice.linear is not None:
            _replace(path, layers[path], choice)
    return quantized


def find(model: nnx.Module) -> dict[str, nnx.Module]:
    """The layers that can be quantized, by path."""
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    return {path: module for path, module in modules.items() if isinstance(module, _LAYERS)}


def _replace(path: str, layer: nnx.Module, choice: Choice) -> None:
    assert choice.linear is not None
    if layer.precision not in (None, lax.Precision.DEFAULT, "default"):
        raise ValueError(f"{path} asks for precision {layer.precision!r}, which a quantized product cannot give")
    if isinstance(layer, nnx.Einsum):
        layer.einsum_op = Einsum(choice.linear)
        return
    present = getattr(layer, "dot_general_cls", None) or layer.dot_general
    if present not in (None, lax.dot_general) and not isinstance(present, DotGeneral):
        raise ValueError(f"{path} has a dot_general of its own, {present!r}; leave it out with a rule")
    layer.dot_general = DotGeneral(choice.linear)
