"""Quantizes the linear layers of Flax NNX models that were not written for it."""

from typing import Any, TypeVar

from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from fp8jax.core.recipe import Linear
from fp8jax.modules import contexts
from fp8jax.modules.delayed import DelayedDotGeneral, kernel_axes
from fp8jax.modules.dots import DotGeneral, Einsum, SharedPromotion, check_replaceable
from fp8jax.modules.rules import Rules, choose

Model = TypeVar("Model", bound=nnx.Module)
LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)


def quantize(model: Model, rules: Rules) -> Model:
    """A copy of a model whose linear layers compute with a recipe.

    Parameters keep their names, shapes and values, so checkpoints fit both ways. The layers are `nnx.Linear`,
    `nnx.LinearGeneral` (also those inside `nnx.MultiHeadAttention`) and `nnx.Einsum`, at any depth, stacked by
    `nnx.vmap` or not. Build the `nnx.Optimizer` from the copy.

    A recipe with a `Context` also changes what `nnx.RMSNorm` and `nnx.LayerNorm` keep of their inputs, and what
    activations keep: wherever a layer reads f(gate(x)) * up(x) or f(up(x)) of other layers of its module, f being SiLU
    or GELU, whatever else the module computes. This is found in each call, with its arguments and settings: modules
    that hold several `nnx.Linear` or `nnx.LinearGeneral`, as attributes or in an `nnx.List` or `nnx.Dict`, are traced
    aside, as copies, so a call must have no effects but on the module and its arguments. Layers that a module calls
    more than once, or inside a loop, an `nnx.jit` or an `nnx.remat` of its own, and layers put in after this, are left
    as they are; write `fp8jax.glu(gate, up, recipe=...)` or `fp8jax.activation(x, recipe=...)` there. Such modules and
    their layers have classes of their own, which `pickle` does not find; `nnx.split` their states instead.
    Layers that read the output of flash attention keep no copy of it.

    A recipe with delayed scaling adds variables to its layers; `fp8jax.nnx.advance_scaling` says how to train them.

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
    found, layers = modules(quantized), find(quantized)
    chosen = choose([*layers, *contexts.norm_paths(found, rules)], rules)
    contexts.plan(found, rules, replace=True)
    for path, layer in layers.items():
        linear = chosen[path].linear
        if linear is not None and linear.quantized:
            _replace(path, layer, linear)
    return quantized


def find(model: nnx.Module) -> dict[str, Any]:
    """The layers that can be quantized, by path."""
    return {path: module for path, module in modules(model).items() if isinstance(module, LAYERS)}


def modules(model: nnx.Module) -> dict[str, Any]:
    """All modules of a model, by path; a module that stands in several places, by its first."""
    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


def _replace(path: str, layer: Any, linear: Linear) -> None:
    check_replaceable(path, layer)
    if layer.promote_dtype is promote_dtype:
        layer.promote_dtype = SharedPromotion(promote_dtype, linear)
    if linear.scaling == "delayed":
        if isinstance(layer, nnx.Einsum):
            raise ValueError(f"{path} is an nnx.Einsum, which has no delayed scaling; leave it out with a rule")
        stacked = layer.kernel.shape[: layer.kernel.ndim - sum(kernel_axes(layer))]
        layer.dot_general = nnx.data(DelayedDotGeneral(linear, stacked))
        return
    if isinstance(layer, nnx.Einsum):
        layer.einsum_op = Einsum(linear)
    else:
        layer.dot_general = DotGeneral(linear)
