"""Quantizes the linear layers of Flax NNX models that were not written for it."""

import math
from collections.abc import Iterable
from typing import Any, TypeVar

from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from fp8jax.core.recipe import Linear
from fp8jax.modules import blocks_nnx, contexts, custom, heads_nnx, norms
from fp8jax.modules.dots import DotGeneral, Einsum, SharedPromotion, check_replaceable
from fp8jax.modules.matrices import Unknown, is_bridge, not_a_model
from fp8jax.modules.scaled import (
    DotGeneralScaling,
    EinsumScaling,
    LayerScaling,
    no_batches,
    observed_operands,
    stacked_axes,
)
from fp8jax.rewrite.rules import LayerChoice, Ordered, Rules, choose, ordered

Model = TypeVar("Model", bound=nnx.Module)
LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)


def quantize(model: Model, rules: Rules, *, layers: Iterable[type] = ()) -> Model:
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
    Layers that read the output of flash attention keep no copy of it. Of a recipe without one, norms and activations
    before layers with FP8 inputs of one scale a tensor or a row make, on a GPU, the codes that these read.

    A recipe with delayed scaling, or `int8_fallback`, adds variables to its layers; `fp8jax.nnx.advance_scaling` says
    how to train them. A class of your own gets a state for each parameter NAME of two axes or more, in `fp8jax_NAME`;
    layers of it must not be stacked by `nnx.vmap` then, and no such layer may multiply along batch axes.

    A recipe, not a rule, leaves alone what is an embedding, head or router: by its usual names, and by shapes, because
    the model is not run here. A head is an `nnx.Linear` that the outermost module holds itself and whose outputs
    nothing in the model takes; a router one with as many outputs as there are experts beside it, or a `gate` that is no
    half of a gated activation. `fp8jax.explain(model, rules, *sample)` names those that only their readers give away.

    Args:
        model: any NNX module; it is not changed.
        rules: a `Recipe` or a preset's name, used for all layers but embeddings, output heads and routers; or a
            sequence of `fp8jax.Rule` on paths such as `"layers/attention/q"`, the first match wins, after which a
            recipe may stand for all other layers.
        layers: classes of your own that are layers, too: where `__call__` multiplies data by a parameter of the module,
            spelled with `@`, `jnp.dot`, `jnp.einsum` or `jax.lax.dot_general`, the recipe's product takes its place.
            Without them a warning names the modules that hold matrices and are not known.

    Returns:
        The copy. `fp8jax.explain(model, rules, *sample)` says what became of each layer.

    Raises:
        TypeError: the model is no NNX module, or the rules are of another type.
        ValueError: a rule matches no layer, the model has none, a layer has a product of its own already, or batch axes
            under a scaling that observes operands; from a call, if only this tells. Likewise where another library has
            changed a layer, as one that adds LoRA adapters, or in a call changes JAX's products.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(not_a_model("fp8jax.nnx.quantize takes an NNX module", model))
    quantized, unknown, size = substitute(model, ordered(rules, layers))
    unknown.warn(ordered(rules, layers), size)
    return quantized


def substitute(model: Model, rules: Ordered) -> tuple[Model, Unknown, int]:
    """What `quantize` returns, the modules that are not known, and the size of the kernels that are quantized."""
    changed = [path for path, module in modules(model).items() if _is_quantized(module)]
    if changed:
        raise ValueError(f"{changed[0]} is quantized already; give the rules to the model it was made from")
    _check_kernels(modules(model))
    quantized = nnx.clone(model)
    submodules, heads, unknown = modules(quantized), *leave(modules(quantized), rules)
    linears = {path: module for path, module in submodules.items() if isinstance(module, (*LAYERS, *rules.layers))}
    chosen = choose(
        [*linears, *contexts.norm_paths(submodules, rules)], rules, heads, unknown.classes, unknown.message()
    )
    _check_batches(linears, chosen)
    contexts.plan(submodules, rules, heads=heads, replace=True)
    size = 0
    for path, layer in linears.items():
        linear = chosen[path].linear
        if linear is None or not linear.quantized:
            continue
        size += sum(math.prod(p.shape) for p in params(layer).values() if len(p.shape) > 1)
        if isinstance(layer, LAYERS):
            _replace(path, layer, linear)
        else:
            custom.replace_nnx(path, layer, linear, blocks_nnx.with_call)
    return quantized, unknown, size


def _is_quantized(module: Any) -> bool:
    """Whether a module computes with a recipe, or keeps what one says, because of `quantize`."""
    ours = (DotGeneral, Einsum, LayerScaling, SharedPromotion, norms.RMSNorm, norms.LayerNorm)
    parts = (getattr(module, name, None) for name in ("dot_general", "einsum_op", "promote_dtype"))
    return hasattr(type(module), "_fp8jax_written") or any(isinstance(x, ours) for x in (module, *parts))


def leave(submodules: dict[str, Any], rules: Ordered) -> tuple[dict[str, str], Unknown]:
    """The heads and routers of a model that a recipe leaves alone, with the reason, and modules that are not known.

    Args:
        submodules: all modules of the model, by path.
        rules: as `ordered` gives them.
    """
    unknown = Unknown()
    for path, module in submodules.items():
        if not isinstance(module, (*LAYERS, *rules.layers)):
            unknown.add(path, module, held(module) if is_bridge(module) else params(module))
    return heads_nnx.by_shape(submodules) if rules.default else {}, unknown


def params(module: Any) -> dict[str, Any]:
    """The parameters that a module holds itself."""
    return {name: v for name, v in vars(module).items() if isinstance(v, nnx.Param)}


def held(bridge: Any) -> dict[str, Any]:
    """The parameters of a bridge and of all that it holds, in dicts as Linen's."""
    return {name: v for name, v in vars(bridge).items() if isinstance(v, (nnx.Param, dict)) and name[0] != "_"}


def modules(model: nnx.Module) -> dict[str, Any]:
    """All modules of a model, by path; a module that stands in several places, by its first."""
    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


def _replace(path: str, layer: Any, linear: Linear) -> None:
    check_replaceable(path, layer)
    _check_adapters(path, layer)
    if layer.promote_dtype is promote_dtype:
        layer.promote_dtype = SharedPromotion(promote_dtype, linear)
    operands: Any = (linear, layer.kernel.get_value(), stacked_axes(layer), f"an nnx.{type(layer).__name__}")
    if isinstance(layer, nnx.Einsum):
        layer.einsum_op = nnx.data(EinsumScaling(*operands)) if observed_operands(linear) else Einsum(linear)
    else:
        layer.dot_general = nnx.data(DotGeneralScaling(*operands)) if linear.states else DotGeneral(linear)


def _check_kernels(submodules: dict[str, Any]) -> None:
    """Raises ValueError where another library has put something else in the place of a layer's kernel."""
    for path, module in submodules.items():
        if isinstance(module, LAYERS) and not isinstance(module.kernel, nnx.Variable):
            raise ValueError(
                f"the kernel of {path or 'the model'} is a {type(module.kernel).__name__}, not an nnx.Variable: another"
                " library has changed the model. Quantize the model as it was written"
            )


def _check_adapters(path: str, layer: Any) -> None:
    """Raises ValueError for a layer of Flax that holds adapters, which it does not read itself."""
    adapters = [name for name, param in params(layer).items() if isinstance(param, nnx.LoRAParam)]
    if adapters:
        raise ValueError(
            f"{path or 'the model'} has adapters of another library, {', '.join(adapters)}, which a quantized product "
            "would lose. Merge them into the weights, or take adapters that are modules, as nnx.LoRA"
        )


def _check_batches(layers: dict[str, Any], chosen: dict[str, LayerChoice]) -> None:
    """Raises ValueError where layers have batch axes, and rules that give them a scaling which observes operands."""
    parts = {path: chosen[path].linear for path, layer in layers.items() if _has_batches(layer)}
    batched = {path: part for path, part in parts.items() if part is not None and observed_operands(part)}
    if batched:
        part = next(iter(batched.values()))
        first, *others = [path for path, of in batched.items() if of == part]
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        told = f" (as have {', '.join(others[:3])}{more})" if others else ""
        raise no_batches(f"{first}{told}", part)


def _has_batches(layer: Any) -> bool:
    """Whether a layer multiplies along batch axes, as far as can be known before it runs."""
    if isinstance(layer, nnx.Einsum):
        terms, _, out = (layer.einsum_str or "").replace("...", "").partition("->")
        a, _, b = terms.partition(",")
        return bool(set(a) & set(b) & set(out))
    return bool(getattr(layer, "batch_axis", None)) and isinstance(layer, nnx.LinearGeneral)
