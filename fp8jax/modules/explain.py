"""`explain`: what the rules make of a model, by the plan of a call, and what its program really multiplies."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict

from fp8jax.core.recipe import Linear, Recipe
from fp8jax.modules import linen as linen_modules
from fp8jax.modules import nnx as nnx_modules
from fp8jax.modules.matrices import is_matrix, not_a_model
from fp8jax.modules.program import Program, abstract, inspect, mean_square, split_abstract
from fp8jax.modules.report import ContextEntry, Layer, Report
from fp8jax.ops import kernels
from fp8jax.rewrite import training
from fp8jax.rewrite.entries import Entry
from fp8jax.rewrite.explanation import gained, kept_bytes
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import Ordered, Rule, Rules, ordered

_EMBED = "the lookup of an embedding, and its use as a head (attend), are left alone"
_ATTENTION = "the products of attention itself, QK and AV, are left alone; its projections are layers of their own"
_CONVOLUTION = "convolutions are left alone"
_REASONS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((nnx.Embed, nn.Embed), _EMBED),
    ((nnx.MultiHeadAttention, nn.MultiHeadDotProductAttention), _ATTENTION),
    ((nnx.Conv, nnx.ConvTranspose, nn.Conv, nn.ConvTranspose, nn.ConvLocal), _CONVOLUTION),
)


def explain(model: Any, rules: Rules | None = None, *sample: Any, **keywords: Any) -> Report:
    """What the rules make of a model: what each layer computes in and saves, and what is left alone and why.

    With sample inputs also the products really in the program of a loss (the mean square of the outputs) and its
    gradient, as JAX traced it and as XLA compiled it for the default device. No training state is changed.

    Args:
        model: an NNX or Linen model, as `fp8jax.nnx.quantize` and `fp8jax.linen.quantize` take it.
        rules: as they take them; not of an NNX model that is quantized, whose own are known.
        sample: arguments of a call of the model, arrays or `jax.ShapeDtypeStruct`. A Linen model needs them, because
            its layers are known only while it runs; so are activations between the layers of an NNX model, and what
            reads their results.
        keywords: keyword arguments of the call, such as `train=False`.

    Returns:
        A `Report`; print it.

    Raises:
        TypeError: the model is of neither kind, a Linen model comes without sample inputs, or rules are missing.
        ValueError: as `quantize`.
    """
    quantized = isinstance(type(model), nnx_modules.QuantizedMeta)
    if rules is None:
        told = "the arguments of a call of a quantized model: explain(model, x)"
        raise TypeError(f"explain takes {told if quantized else 'rules or a recipe: explain(model, rules, x)'}")
    if isinstance(model, nnx.Module):
        if quantized and not isinstance(rules, _RULES):
            return _explain_quantized(model, (rules, *sample), keywords)
        return _explain_nnx(model, ordered(rules), sample, keywords)
    if isinstance(model, nn.Module):
        return _explain_linen(model, ordered(rules), sample, keywords)
    raise TypeError(not_a_model("explain takes an NNX or Linen module", model))


_RULES = (str, Recipe, Linear, Rule, list, tuple, Ordered)


def _explain_nnx(model: nnx.Module, rules: Ordered, sample: Any, keywords: Any) -> Report:
    quantized = nnx_modules.quantize(model, rules)
    modules = nnx_modules.modules(quantized)
    if not sample and not keywords:
        layers, parts = _chosen_nnx(modules, rules)
        heads = "output heads and routers that their names do not tell"
        unknown = [("activations and attention between layers", rules.contexts), (heads, rules.default)]
        hints = tuple(f"{what} are known in a call: give explain sample inputs" for what, asked in unknown if asked)
        return Report(layers, None, parts, hints)
    return _explain_quantized(quantized, sample, keywords)


def _explain_quantized(quantized: nnx.Module, sample: Any, keywords: Any) -> Report:
    settings = nnx_modules.settings_of(quantized)
    assert settings is not None
    modules = nnx_modules.modules(quantized)
    with training.inspected(), _silenced(quantized):
        plan = _plan_nnx(quantized, sample, keywords)
        program = None if plan.refused else _nnx_program(quantized, sample, keywords)
    layers = [layer for entry in plan.entries if entry.product for layer in _layers(modules, entry)]
    return _report(modules, plan, layers, _others(modules, settings.rules, _nnx_kernel), program)


def _silenced(model: Any) -> contextlib.AbstractContextManager[None]:
    """Within it a quantized model says nothing of what stays in 16 bits; a part of a model never does."""
    notices: Notices | None = type(model)._fp8jax_notices
    return contextlib.nullcontext() if notices is None else notices.silenced()


def _report(
    modules: dict[str, Any], plan: CallPlan, layers: list[Layer], others: Iterable[Layer], program: Program | None
) -> Report:
    """Of layers with a product in the plan, others, and what stands before products."""
    entries, known = plan.entries, {layer.path for layer in layers}
    layers = [*layers, *(layer for layer in others if layer.path not in known)]
    first = {(layer.path, layer.kernel): layer for layer in reversed(layers)}
    parts = tuple(_part(modules, entry) for entry in entries if not entry.product or entry.kept)
    planned = set(map(id, entries))
    unplanned = tuple(_unplanned(modules, entry) for entry in plan.listing() if id(entry) not in planned)
    figures = tuple(filter(None, (plan.share.text, kept_bytes(entries), gained(entries), kernels.advice())))
    refused = (f"a call raises ValueError: {plan.refused}",) if plan.refused else ()
    return Report(tuple(first.values())[::-1], program, parts, refused, figures, unplanned)


def _unplanned(modules: dict[str, Any], entry: Entry) -> ContextEntry:
    """A norm, an activation or a product that runs as it is written."""
    kind = type(_holder(modules, entry.path)).__name__ if entry.path else entry.kind
    computes = entry.kind if entry.product or not _is_norm(entry) else "norm"
    return ContextEntry(entry.path, kind, computes, None, f"{entry.reason}, at {entry.line}")


def _is_norm(entry: Entry) -> bool:
    return entry.kind.lower().endswith("norm")


def _plan_nnx(model: nnx.Module, sample: Any, keywords: Any) -> CallPlan:
    """The plan of a call of a quantized model."""
    graph, state = nnx.split(model)
    arrays, rebuild = split_abstract((sample, keywords))
    found: list[CallPlan] = []

    def call(state: Any, arrays: list[Any]) -> None:
        args, kwargs = rebuild(arrays)
        found.append(nnx_modules.plan_of(nnx.merge(graph, state, copy=True), args, kwargs))

    jax.eval_shape(call, jax.tree.map(abstract, state), arrays)
    return found[0]


def _holder(modules: dict[str, Any], path: str) -> Any:
    """The module that a layer is, or that holds the parameter at a path."""
    while path not in modules and path:
        path = path.rpartition("/")[0]
    return modules.get(path)


def _layers(modules: dict[str, Any], entry: Entry) -> list[Layer]:
    """The layer of a product, and those whose parameters are concatenated with its own."""
    layer = _layer(modules, entry)
    others = [(path, type(_holder(modules, path)).__name__) for path in entry.concatenated]
    return [layer, *(dataclasses.replace(layer, path=path, kind=kind) for path, kind in others)]


def _layer(modules: dict[str, Any], entry: Entry) -> Layer:
    module = _holder(modules, entry.path)
    linear = entry.choice.linear if entry.taken and entry.choice is not None else None
    reason = entry.reason if entry.choice is not None else f"{entry.reason}, at {entry.line}"
    if linear is None:
        reason = next((text for kinds, text in _REASONS if isinstance(module, kinds)), reason)
    return Layer(entry.path, type(module).__name__, entry.shape, linear, reason, _dtype(module), entry.held)


def _dtype(module: Any) -> str | None:
    dtype = getattr(module, "dtype", None) or getattr(module, "param_dtype", None)
    return str(jnp.dtype(dtype)) if dtype else None


def _chosen_nnx(modules: dict[str, Any], rules: Ordered) -> tuple[tuple[Layer, ...], tuple[ContextEntry, ...]]:
    """What the rules say of the paths of a model; what its program adds is not known."""
    layers, parts = list[Layer](), list[ContextEntry]()
    matrices, norms = nnx_modules.candidates(modules, rules)
    for path, (holder, name) in matrices.items():
        shown, *also = nnx_modules.names(matrices, path)
        choice = rules.choice(shown, also=also)
        shape = tuple(nnx_modules.params(modules[holder])[name].shape)
        linear = choice.linear if choice.linear is not None and choice.linear.quantized else None
        kind, dtype = type(modules[holder]).__name__, _dtype(modules[holder])
        layers.append(Layer(shown, kind, shape, linear, choice.reason, dtype))
    for path in norms if rules.contexts else ():
        choice = rules.choice(path)
        context = choice.context if choice.context.saved else None
        parts.append(ContextEntry(path, type(modules[path]).__name__, "norm", context, choice.reason))
    known = {layer.path for layer in layers}
    others = _others(modules, rules, _nnx_kernel, "whether a product reads it is known in a call")
    return (*layers, *(x for x in others if x.path not in known)), tuple(parts)


def _others(
    modules: dict[str, Any],
    rules: Ordered,
    kernel: Callable[[str, Any], Any],
    unread: str = "no product of it is in this call",
) -> Iterator[Layer]:
    """What is left alone whatever it computes, and layers without a product in a call."""
    for path, module in modules.items():
        matrix = kernel(path, module)
        reason = next((text for kinds, text in _REASONS if isinstance(module, kinds)), None)
        if reason is None and isinstance(module, nnx_modules.LAYERS):
            reason = f"{rules.choice(path).reason}; {unread}"
        if reason is not None:
            yield Layer(path, type(module).__name__, None if matrix is None else tuple(matrix.shape), None, reason)


def _part(modules: dict[str, Any], entry: Entry) -> ContextEntry:
    module, choice = modules.get(entry.path), entry.choice
    assert choice is not None
    if entry.kept:
        holder, _, name = entry.path.rpartition("/")
        kind = type(_holder(modules, holder)).__name__
        return ContextEntry(holder, kind, None, choice.context, choice.reason, (name,))
    norm = _is_norm(entry)
    kind = entry.kind if module is None or not norm else type(module).__name__
    context = choice.context if choice.context.saved else None
    computes = "norm" if norm else entry.kind
    return ContextEntry(entry.path, kind, computes, context, choice.reason, (), entry.readers, entry.alone)


def _explain_linen(model: nn.Module, rules: Ordered, sample: Any, keywords: Any) -> Report:
    if not sample and not keywords:
        raise TypeError("a Linen model has layers only while it runs: give explain sample inputs too")
    copy = linen_modules.quantize(model, rules)
    arrays, rebuild = split_abstract((sample, keywords))

    def init(module: nn.Module, arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        # A model may have an `init` and an `apply` of its own, which take something else.
        return nn.Module.init(module, jax.random.key(0), *args, **kwargs)

    modules = linen_modules.modules(functools.partial(init, model), arrays)
    plans: list[CallPlan] = []

    def call(variables: Any, arrays: list[Any]) -> None:
        args, kwargs = rebuild(arrays)
        plans.append(linen_modules.plan_of(copy, variables, args, kwargs))

    with training.inspected(), _silenced(copy):
        variables = nn.meta.unbox(jax.eval_shape(functools.partial(init, model), arrays))
        jax.eval_shape(call, variables, arrays)
        (plan,) = plans
        program = None
        if not plan.refused:
            # The copy has variables of its own under delayed scaling.
            whole = nn.meta.unbox(jax.eval_shape(functools.partial(init, copy), arrays))
            program = _linen_program(copy, whole, sample, keywords)
    params = flatten_dict(variables.get("params", {}))

    def kernel(path: str, module: Any) -> Any:
        return _matrix({names[-1]: leaf for names, leaf in params.items() if "/".join(names[:-1]) == path})

    layers = []
    for layer in (layer for entry in plan.entries if entry.product for layer in _layers(modules, entry)):
        matrix = kernel(layer.path, None)
        # In a loop the plan has the parameter of one turn.
        layers.append(layer if matrix is None else dataclasses.replace(layer, kernel=tuple(matrix.shape)))
    return _report(modules, plan, layers, _others(modules, rules, kernel), program)


def _nnx_kernel(path: str, module: Any) -> Any:
    return _matrix({name: v for name, v in vars(module).items() if isinstance(v, nnx.Param)})


def _matrix(params: dict[str, Any]) -> Any:
    """The kernel or embedding among the parameters of a module, or else its largest matrix; None if it has none."""
    named = [params[name] for name in ("kernel", "embedding") if name in params]
    own = sorted((leaf for name, leaf in params.items() if is_matrix(name, leaf.shape)), key=lambda leaf: -leaf.size)
    return next((leaf for leaf in [*named, *own] if leaf.ndim >= 2), None)


def _nnx_program(model: nnx.Module, sample: Any, keywords: Any) -> Program:
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    arrays, rebuild = split_abstract((sample, keywords))

    def loss(params: Any, rest: Any, arrays: list[Any]) -> jax.Array:
        args, kwargs = rebuild(arrays)
        return mean_square(nnx.merge(graph, params, rest, copy=True)(*args, **kwargs))  # type: ignore[operator]

    return inspect(jax.grad(loss), *jax.tree.map(abstract, (params, rest, arrays)))


def _linen_program(model: nn.Module, variables: Any, sample: Any, keywords: Any) -> Program:
    state = {name: values for name, values in variables.items() if name != "params"}
    arrays, rebuild = split_abstract((sample, keywords))

    def loss(params: Any, state: Any, arrays: list[Any]) -> jax.Array:
        args, kwargs = rebuild(arrays)
        rngs = {"params": jax.random.key(0)}
        variables = {"params": params, **state}
        y, _ = nn.Module.apply(model, variables, *args, rngs=rngs, mutable=list(state), **kwargs)
        return mean_square(y)

    return inspect(jax.grad(loss), variables["params"], state, arrays)
