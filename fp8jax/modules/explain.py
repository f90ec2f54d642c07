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
from fp8jax.modules.matrices import is_matrix, wrong_model_message
from fp8jax.modules.program import Program, abstract, inspect_program, mean_square, split_abstract
from fp8jax.modules.report import ContextEntry, Layer, Report
from fp8jax.ops.dispatch import missing_kernels
from fp8jax.rewrite import training
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.explanation import gains_note, residual_bytes_note
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import Rule, Rules, RuleSet, as_rule_set

_EMBED_REASON = "the lookup of an embedding, and its use as a head (attend), are left alone"
_ATTENTION_REASON = (
    "the products of attention itself, QK and AV, are left alone; its projections are layers of their own"
)
_CONVOLUTION_REASON = "convolutions are left alone"
_REASONS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((nnx.Embed, nn.Embed), _EMBED_REASON),
    ((nnx.MultiHeadAttention, nn.MultiHeadDotProductAttention), _ATTENTION_REASON),
    ((nnx.Conv, nnx.ConvTranspose, nn.Conv, nn.ConvTranspose, nn.ConvLocal), _CONVOLUTION_REASON),
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
        usage = "the arguments of a call of a quantized model: explain(model, x)"
        raise TypeError(f"explain takes {usage if quantized else 'rules or a recipe: explain(model, rules, x)'}")
    if isinstance(model, nnx.Module):
        if quantized and not isinstance(rules, _RULES_TYPES):
            return _explain_quantized(model, (rules, *sample), keywords)
        return _explain_nnx(model, as_rule_set(rules), sample, keywords)
    if isinstance(model, nn.Module):
        return _explain_linen(model, as_rule_set(rules), sample, keywords)
    raise TypeError(wrong_model_message("explain takes an NNX or Linen module", model))


_RULES_TYPES = (str, Recipe, Linear, Rule, list, tuple, RuleSet)


def _explain_nnx(model: nnx.Module, rules: RuleSet, sample: Any, keywords: Any) -> Report:
    quantized = nnx_modules.quantize(model, rules)
    modules = nnx_modules.get_modules(quantized)
    if not sample and not keywords:
        layers, context_entries = _layers_from_rules(modules, rules)
        heads = "output heads and routers that their names do not tell"
        unknown_parts = [("activations and attention between layers", rules.has_contexts), (heads, rules.has_default)]
        hints = tuple(
            f"{what} are known in a call: give explain sample inputs"
            for what, is_affected in unknown_parts
            if is_affected
        )
        return Report(layers, None, context_entries, hints)
    return _explain_quantized(quantized, sample, keywords)


def _explain_quantized(quantized: nnx.Module, sample: Any, keywords: Any) -> Report:
    settings = nnx_modules.get_settings(quantized)
    assert settings is not None
    modules = nnx_modules.get_modules(quantized)
    with training.suppress_training_checks(), _without_notices(quantized):
        plan = _plan_nnx(quantized, sample, keywords)
        program = None if plan.error else _nnx_program(quantized, sample, keywords)
    layers = [layer for entry in plan.entries if entry.is_product for layer in _layers_of_product(modules, entry)]
    return _make_report(modules, plan, layers, _unquantized_layers(modules, settings.rules, _nnx_kernel), program)


def _without_notices(model: Any) -> contextlib.AbstractContextManager[None]:
    """Within it a quantized model says nothing of what stays in 16 bits; a part of a model never does."""
    notices: Notices | None = type(model)._fp8jax_notices
    return contextlib.nullcontext() if notices is None else notices.silenced()


def _make_report(
    modules: dict[str, Any],
    plan: CallPlan,
    layers: list[Layer],
    unquantized_layers: Iterable[Layer],
    program: Program | None,
) -> Report:
    """Of layers with a product in the plan, others, and what stands before products."""
    entries, product_paths = plan.entries, {layer.path for layer in layers}
    layers = [*layers, *(layer for layer in unquantized_layers if layer.path not in product_paths)]
    unique_layers = {(layer.path, layer.kernel): layer for layer in reversed(layers)}
    context_entries = tuple(
        _context_entry(modules, entry) for entry in entries if not entry.is_product or entry.has_saved_input
    )
    planned_ids = set(map(id, entries))
    unplanned = tuple(_unplanned_entry(modules, entry) for entry in plan.list_entries() if id(entry) not in planned_ids)
    figures = tuple(
        filter(None, (plan.share.text, residual_bytes_note(entries), gains_note(entries), missing_kernels.advice()))
    )
    refusal_notes = (f"a call raises ValueError: {plan.error}",) if plan.error else ()
    return Report(tuple(unique_layers.values())[::-1], program, context_entries, refusal_notes, figures, unplanned)


def _unplanned_entry(modules: dict[str, Any], entry: PlanEntry) -> ContextEntry:
    """A norm, an activation or a product that runs as it is written."""
    kind = type(_owning_module(modules, entry.path)).__name__ if entry.path else entry.kind
    computes = entry.kind if entry.is_product or not _is_norm(entry) else "norm"
    return ContextEntry(entry.path, kind, computes, None, f"{entry.reason}, at {entry.line}")


def _is_norm(entry: PlanEntry) -> bool:
    return entry.kind.lower().endswith("norm")


def _plan_nnx(model: nnx.Module, sample: Any, keywords: Any) -> CallPlan:
    """The plan of a call of a quantized model."""
    graph, state = nnx.split(model)
    arrays, rebuild = split_abstract((sample, keywords))
    plans: list[CallPlan] = []

    def call(state: Any, arrays: list[Any]) -> None:
        args, kwargs = rebuild(arrays)
        plans.append(nnx_modules.plan_call(nnx.merge(graph, state, copy=True), args, kwargs))

    jax.eval_shape(call, jax.tree.map(abstract, state), arrays)
    return plans[0]


def _owning_module(modules: dict[str, Any], path: str) -> Any:
    """The module that a layer is, or that holds the parameter at a path."""
    while path not in modules and path:
        path = path.rpartition("/")[0]
    return modules.get(path)


def _layers_of_product(modules: dict[str, Any], entry: PlanEntry) -> list[Layer]:
    """The layer of a product, and those whose parameters are concatenated with its own."""
    layer = _layer_of_product(modules, entry)
    concatenated = [(path, type(_owning_module(modules, path)).__name__) for path in entry.concatenated]
    return [layer, *(dataclasses.replace(layer, path=path, kind=kind) for path, kind in concatenated)]


def _layer_of_product(modules: dict[str, Any], entry: PlanEntry) -> Layer:
    module = _owning_module(modules, entry.path)
    linear = entry.choice.linear if entry.is_quantized and entry.choice is not None else None
    reason = entry.reason if entry.choice is not None else f"{entry.reason}, at {entry.line}"
    if linear is None:
        reason = next((text for kinds, text in _REASONS if isinstance(module, kinds)), reason)
    return Layer(entry.path, type(module).__name__, entry.shape, linear, reason, _dtype(module), entry.frozen)


def _dtype(module: Any) -> str | None:
    dtype = getattr(module, "dtype", None) or getattr(module, "param_dtype", None)
    return str(jnp.dtype(dtype)) if dtype else None


def _layers_from_rules(modules: dict[str, Any], rules: RuleSet) -> tuple[tuple[Layer, ...], tuple[ContextEntry, ...]]:
    """What the rules say of the paths of a model; what its program adds is not known."""
    layers, context_entries = list[Layer](), list[ContextEntry]()
    matrices, norms = nnx_modules.find_candidates(modules, rules)
    for path, (holder, name) in matrices.items():
        rule_path, *alternative_paths = nnx_modules.get_layer_names(matrices, path)
        choice = rules.choose(rule_path, aliases=alternative_paths)
        shape = tuple(nnx_modules.get_params(modules[holder])[name].shape)
        linear = choice.linear if choice.linear is not None and choice.linear.is_quantized else None
        kind, dtype = type(modules[holder]).__name__, _dtype(modules[holder])
        layers.append(Layer(rule_path, kind, shape, linear, choice.reason, dtype))
    for path in norms if rules.has_contexts else ():
        choice = rules.choose(path)
        context = choice.context if choice.context.residual else None
        context_entries.append(ContextEntry(path, type(modules[path]).__name__, "norm", context, choice.reason))
    layer_paths = {layer.path for layer in layers}
    unquantized_layers = _unquantized_layers(
        modules, rules, _nnx_kernel, "whether a product reads it is known in a call"
    )
    return (*layers, *(x for x in unquantized_layers if x.path not in layer_paths)), tuple(context_entries)


def _unquantized_layers(
    modules: dict[str, Any],
    rules: RuleSet,
    kernel: Callable[[str, Any], Any],
    no_product_reason: str = "no product of it is in this call",
) -> Iterator[Layer]:
    """What is left alone whatever it computes, and layers without a product in a call."""
    for path, module in modules.items():
        matrix = kernel(path, module)
        reason = next((text for kinds, text in _REASONS if isinstance(module, kinds)), None)
        if reason is None and isinstance(module, nnx_modules.LAYERS):
            reason = f"{rules.choose(path).reason}; {no_product_reason}"
        if reason is not None:
            yield Layer(path, type(module).__name__, None if matrix is None else tuple(matrix.shape), None, reason)


def _context_entry(modules: dict[str, Any], entry: PlanEntry) -> ContextEntry:
    module, choice = modules.get(entry.path), entry.choice
    assert choice is not None
    if entry.has_saved_input:
        owner_path, _, name = entry.path.rpartition("/")
        kind = type(_owning_module(modules, owner_path)).__name__
        return ContextEntry(owner_path, kind, None, choice.context, choice.reason, (name,))
    norm = _is_norm(entry)
    kind = entry.kind if module is None or not norm else type(module).__name__
    context = choice.context if choice.context.residual else None
    computes = "norm" if norm else entry.kind
    return ContextEntry(
        entry.path, kind, computes, context, choice.reason, (), entry.readers, entry.has_only_listed_readers
    )


def _explain_linen(model: nn.Module, rules: RuleSet, sample: Any, keywords: Any) -> Report:
    if not sample and not keywords:
        raise TypeError("a Linen model has layers only while it runs: give explain sample inputs too")
    quantized = linen_modules.quantize(model, rules)
    arrays, rebuild = split_abstract((sample, keywords))

    def init(module: nn.Module, arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        # A model may have an `init` and an `apply` of its own, which take something else.
        return nn.Module.init(module, jax.random.key(0), *args, **kwargs)

    modules = linen_modules.collect_modules(functools.partial(init, model), arrays)
    plans: list[CallPlan] = []

    def call(variables: Any, arrays: list[Any]) -> None:
        args, kwargs = rebuild(arrays)
        plans.append(linen_modules.plan_call(quantized, variables, args, kwargs))

    with training.suppress_training_checks(), _without_notices(quantized):
        variables = nn.meta.unbox(jax.eval_shape(functools.partial(init, model), arrays))
        jax.eval_shape(call, variables, arrays)
        (plan,) = plans
        program = None
        if not plan.error:
            # The copy has variables of its own under delayed scaling.
            copy_variables = nn.meta.unbox(jax.eval_shape(functools.partial(init, quantized), arrays))
            program = _linen_program(quantized, copy_variables, sample, keywords)
    params = flatten_dict(variables.get("params", {}))

    def kernel(path: str, module: Any) -> Any:
        return _main_matrix({names[-1]: leaf for names, leaf in params.items() if "/".join(names[:-1]) == path})

    layers = []
    for layer in (layer for entry in plan.entries if entry.is_product for layer in _layers_of_product(modules, entry)):
        matrix = kernel(layer.path, None)
        # In a loop the plan has the parameter of one turn.
        layers.append(layer if matrix is None else dataclasses.replace(layer, kernel=tuple(matrix.shape)))
    return _make_report(modules, plan, layers, _unquantized_layers(modules, rules, kernel), program)


def _nnx_kernel(path: str, module: Any) -> Any:
    return _main_matrix({name: v for name, v in vars(module).items() if isinstance(v, nnx.Param)})


def _main_matrix(params: dict[str, Any]) -> Any:
    """The kernel or embedding among the parameters of a module, or else its largest matrix; None if it has none."""
    named = [params[name] for name in ("kernel", "embedding") if name in params]
    matrices = sorted(
        (leaf for name, leaf in params.items() if is_matrix(name, leaf.shape)), key=lambda leaf: -leaf.size
    )
    return next((leaf for leaf in [*named, *matrices] if leaf.ndim >= 2), None)


def _nnx_program(model: nnx.Module, sample: Any, keywords: Any) -> Program:
    graph, params, other_state = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    arrays, rebuild = split_abstract((sample, keywords))

    def loss(params: Any, other_state: Any, arrays: list[Any]) -> jax.Array:
        args, kwargs = rebuild(arrays)
        return mean_square(nnx.merge(graph, params, other_state, copy=True)(*args, **kwargs))  # type: ignore[operator]

    return inspect_program(jax.grad(loss), *jax.tree.map(abstract, (params, other_state, arrays)))


def _linen_program(model: nn.Module, variables: Any, sample: Any, keywords: Any) -> Program:
    state = {name: values for name, values in variables.items() if name != "params"}
    arrays, rebuild = split_abstract((sample, keywords))

    def loss(params: Any, state: Any, arrays: list[Any]) -> jax.Array:
        args, kwargs = rebuild(arrays)
        rngs = {"params": jax.random.key(0)}
        variables = {"params": params, **state}
        y, _ = nn.Module.apply(model, variables, *args, rngs=rngs, mutable=list(state), **kwargs)
        return mean_square(y)

    return inspect_program(jax.grad(loss), variables["params"], state, arrays)
