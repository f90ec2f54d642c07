"""`explain`: the effect of rules on a Flax model, and the products of its compiled program."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from fp8jax.core.recipe import Linear, Recipe
from fp8jax.modules import linen as linen_modules
from fp8jax.modules import nnx as nnx_modules
from fp8jax.modules.calls import is_matrix, wrong_model_message
from fp8jax.modules.compiled import Program, inspect_program
from fp8jax.rewrite import training
from fp8jax.rewrite.entries import CONVOLUTION_REASON, PlanEntry
from fp8jax.rewrite.explanation import Explanation
from fp8jax.rewrite.planned import CallPlan, Notices
from fp8jax.rewrite.rules import LayerChoice, Rule, Rules, RuleSet, as_rule_set
from fp8jax.rewrite.transform import Transformed

_RULES_TYPES = (str, Recipe, Linear, Rule, list, tuple, RuleSet)
_REASONS: tuple[tuple[tuple[type, ...], str], ...] = (
    (
        (nnx.Embed, nn.Embed),
        "an embedding lookup, and its use as an output head (attend), are not quantized",
    ),
    (
        (nnx.MultiHeadAttention, nn.MultiHeadDotProductAttention),
        "the attention products QK and AV are not quantized; the projections are separate layers",
    ),
    (
        (nnx.Conv, nnx.ConvTranspose, nn.Conv, nn.ConvTranspose, nn.ConvLocal),
        CONVOLUTION_REASON,
    ),
)
_RECOMPUTE_NOTE = "layers that read the result of a norm or an activation save nothing of it if it is recomputed"
# Returns the shape of the main matrix of the module at a path; () if it has none.
_FindShape = Callable[[str, Any], tuple[int, ...]]


def explain(model: Any, rules: Rules | None = None, *sample: Any, **keywords: Any) -> Explanation:
    """Explains the effect of rules on a model: what is quantized, what is not and why, what is saved and gained.

    With sample inputs, a loss (the mean square of the outputs) and its gradient are compiled for the default device.
    `.program` of the result lists their products. No training state is changed.

    Args:
        model: an NNX or Linen model, as for `fp8jax.nnx.quantize` and `fp8jax.linen.quantize`.
        rules: as for these functions. Omit them for a quantized model.
        sample: arguments of a call of the model, arrays or `jax.ShapeDtypeStruct`. A Linen model needs them, because
            its layers exist only while it runs. An NNX model needs them for the activations between its layers, and
            for output heads and routers.
        keywords: keyword arguments of the call, such as `train=False`.

    Returns:
        An `Explanation`; print it.

    Raises:
        TypeError: the model is neither an NNX nor a Linen model, a Linen model is passed without sample inputs, or
            rules are missing.
        ValueError: as `quantize`.
    """
    linen_settings = getattr(type(model), "_fp8jax_settings", None) if isinstance(model, nn.Module) else None
    is_quantized = isinstance(type(model), nnx_modules.QuantizedMeta) or linen_settings is not None
    if rules is None:
        usage = "the arguments of a call of a quantized model: explain(model, x)"
        raise TypeError(f"explain needs {usage if is_quantized else 'rules or a recipe: explain(model, rules, x)'}")
    if is_quantized and not isinstance(rules, _RULES_TYPES):
        sample = rules, *sample
        if linen_settings is None:
            return _explain_nnx(model, sample, keywords)
        if linen_settings.bound_path is not None or linen_settings.field_path:
            raise TypeError("explain expects the whole quantized Linen model, not a submodule of it")
        return _explain_linen(linen_modules.unquantize(model), linen_settings.rules, sample, keywords)
    if isinstance(model, nnx.Module | nn.Module) and isinstance(rules, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(
            f"{type(model).__name__} has no recipe, and explain got an array of shape {rules.shape} instead of rules; "
            'call explain(model, rules, x), such as explain(model, "coat", x)'
        )
    if isinstance(model, nnx.Module):
        rule_set = as_rule_set(rules)
        model = nnx_modules.quantize(model, rule_set)
        return _explain_nnx(model, sample, keywords) if sample or keywords else _explain_rules(model, rule_set)
    if isinstance(model, nn.Module):
        return _explain_linen(model, as_rule_set(rules), sample, keywords)
    if isinstance(model, Transformed):
        raise TypeError(
            "explain expects an NNX or Linen module; call the method explain(*args) of a transformed function"
        )
    raise TypeError(wrong_model_message("explain expects an NNX or Linen module", model))


def _explain_nnx(model: Any, sample: Any, keywords: Any) -> Explanation:
    """The explanation of a call of a quantized model."""
    graph, params, state = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    arrays, rebuild = _split_arrays((sample, keywords))
    shapes = *jax.tree.map(_as_struct, (params, state)), arrays

    def plan_call(params: Any, state: Any, arrays: list[Any]) -> CallPlan:
        return nnx_modules.plan_call(nnx.merge(graph, params, state, copy=True), *rebuild(arrays))

    def loss(params: Any, state: Any, arrays: list[Any]) -> jax.Array:
        args, kwargs = rebuild(arrays)
        return _mean_square(nnx.merge(graph, params, state, copy=True)(*args, **kwargs))

    def inspect() -> Program:
        with training.suppress_training_checks(), _silenced_notices(model):
            return inspect_program(jax.grad(loss), *shapes)

    with training.suppress_training_checks(), _silenced_notices(model):
        plan = _trace_plan(plan_call, *shapes)
    modules, settings = nnx_modules.get_modules(model), nnx_modules.get_settings(model)
    assert settings is not None
    return plan.explain(_list_rows(modules, settings.rules, plan, _nnx_shape), None if plan.program.error else inspect)


def _explain_linen(model: nn.Module, rules: RuleSet, sample: Any, keywords: Any) -> Explanation:
    if not sample and not keywords:
        raise TypeError("a Linen model creates its layers when it runs; pass sample inputs to explain, too")
    quantized: Any = linen_modules.quantize(model, rules)
    arrays, rebuild = _split_arrays((sample, keywords))

    def init(module: nn.Module, arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        # A model may have an `init` and an `apply` of its own, which take something else.
        return nn.Module.init(module, jax.random.key(0), *args, **kwargs)

    def init_shapes(module: nn.Module) -> Any:
        return nn.meta.unbox(jax.eval_shape(functools.partial(init, module), arrays))

    def plan_call(variables: Any, arrays: list[Any]) -> CallPlan:
        return linen_modules.plan_call(quantized, variables, *rebuild(arrays))

    def loss(params: Any, state: Any, arrays: list[Any]) -> jax.Array:
        args, kwargs = rebuild(arrays)
        rngs, variables = {"params": jax.random.key(0)}, {"params": params, **state}
        return _mean_square(nn.Module.apply(quantized, variables, *args, rngs=rngs, mutable=list(state), **kwargs)[0])

    def inspect() -> Program:
        with training.suppress_training_checks(), _silenced_notices(quantized):
            # The quantized model may have its own variables, such as those of delayed scaling.
            state = dict(init_shapes(quantized))
            return inspect_program(jax.grad(loss), state.pop("params"), state, arrays)

    modules = linen_modules.collect_modules(functools.partial(init, model), arrays)
    with training.suppress_training_checks(), _silenced_notices(quantized):
        variables = init_shapes(model)
        plan = _trace_plan(plan_call, variables, arrays)
    params = flatten_dict(variables.get("params", {}))

    def find_shape(path: str, module: Any) -> tuple[int, ...]:
        return _main_shape({names[-1]: leaf for names, leaf in params.items() if "/".join(names[:-1]) == path})

    return plan.explain(_list_rows(modules, rules, plan, find_shape), None if plan.program.error else inspect)


def _explain_rules(model: nnx.Module, rules: RuleSet) -> Explanation:
    """The explanation of the paths of a model. Its program is not known."""
    modules, rows = nnx_modules.get_modules(model), list[PlanEntry]()
    matrices, norms = nnx_modules.find_candidates(modules, rules)
    for path, (owner, name) in matrices.items():
        rule_path, *aliases = nnx_modules.get_layer_names(matrices, path)
        shape = tuple(nnx_modules.get_params(modules[owner])[name].shape)
        rows.append(_layer(rule_path, modules[owner], shape, rules.choose(rule_path, aliases=aliases)))
    for path in norms if rules.has_contexts else ():
        choice = rules.choose(path)
        rows.append(PlanEntry(path, type(modules[path]).__name__, (), choice, choice.reason, ""))
    no_product_reason = "pass sample inputs to explain, to know whether a matmul reads it"
    rows += _layers_without_product(modules, rules, _nnx_shape, no_product_reason, {row.path for row in rows})
    is_recomputed = any(row.context is not None and row.context.recompute_activations for row in rows)
    notes = [_RECOMPUTE_NOTE] if is_recomputed else []
    unknown = {
        "activations and attention between layers": rules.has_contexts,
        "output heads and routers whose names are not recognized": rules.has_default,
    }
    notes += [
        f"{subjects} are known only in a call; pass sample inputs to explain"
        for subjects, is_open in unknown.items()
        if is_open
    ]
    return Explanation(tuple(rows), notes=tuple(notes))


def _list_rows(modules: dict[str, Any], rules: RuleSet, plan: CallPlan, find_shape: _FindShape) -> list[PlanEntry]:
    """The rows of a plan, with the classes of layers, then layers without a product."""
    rows = list[PlanEntry]()
    for entry in plan.list_rows():
        if not entry.is_product or not entry.is_planned:
            rows.append(entry)
            continue
        module = modules.get(nnx_modules.find_owner(modules, entry.path))
        reason = entry.reason if entry.is_quantized else _class_reason(module) or entry.reason
        row = entry._replace(kind=type(module).__name__, reason=reason, dtype=_dtype(module))
        # In a loop the plan has the parameter of one iteration.
        shape = find_shape(entry.path, module) if entry.path in modules else ()
        if shape[-len(entry.shape) :] == entry.shape:
            row = row._replace(shape=shape)
        rows.append(row)
        for path in entry.concatenated:
            kind = type(modules.get(nnx_modules.find_owner(modules, path))).__name__
            rows.append(row._replace(path=path, kind=kind, residual_bytes=None, gain=None, rates_device="", flops=0))
    paths = {row.path for row in rows if row.is_product and row.is_planned}
    return rows + _layers_without_product(modules, rules, find_shape, "no matmul of it runs in this call", paths)


def _layers_without_product(
    modules: dict[str, Any], rules: RuleSet, find_shape: _FindShape, reason: str, known_paths: set[str]
) -> list[PlanEntry]:
    """Rows of layers, embeddings, convolutions and attentions at other paths than these."""
    rows = list[PlanEntry]()
    for path, module in modules.items():
        is_layer = isinstance(module, nnx_modules.LAYERS)
        why = _class_reason(module) or (f"{rules.choose(path).reason}; {reason}" if is_layer else "")
        if why and path not in known_paths:
            rows.append(_layer(path, module, find_shape(path, module), LayerChoice(None, why)))
    return rows


def _layer(path: str, module: Any, shape: tuple[int, ...], choice: LayerChoice) -> PlanEntry:
    kind = type(module).__name__
    return PlanEntry(path, kind, shape, choice, choice.reason, "", is_product=True, dtype=_dtype(module))


def _class_reason(module: Any) -> str:
    """Why the products of a class are left as written; "" if they are not."""
    return next((reason for kinds, reason in _REASONS if isinstance(module, kinds)), "")


def _dtype(module: Any) -> str | None:
    dtype = getattr(module, "dtype", None) or getattr(module, "param_dtype", None)
    return str(jnp.dtype(dtype)) if dtype else None


def _nnx_shape(path: str, module: Any) -> tuple[int, ...]:
    return _main_shape({name: v for name, v in vars(module).items() if isinstance(v, nnx.Param)})


def _main_shape(params: dict[str, Any]) -> tuple[int, ...]:
    """The shape of a module's kernel or embedding, or else of its largest matrix; () if it has none."""
    named = [params[name] for name in ("kernel", "embedding") if name in params]
    matrices = sorted(
        (leaf for name, leaf in params.items() if is_matrix(name, leaf.shape)), key=lambda leaf: -leaf.size
    )
    return next((tuple(leaf.shape) for leaf in [*named, *matrices] if leaf.ndim >= 2), ())


def _silenced_notices(model: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which a quantized model does not warn. A part of a model never does."""
    notices: Notices | None = type(model)._fp8jax_notices
    return contextlib.nullcontext() if notices is None else notices.silenced()


def _trace_plan(plan_call: Callable[..., CallPlan], *shapes: Any) -> CallPlan:
    """The plan that a function of traced arrays returns."""
    plans: list[CallPlan] = []
    jax.eval_shape(lambda *arrays: plans.append(plan_call(*arrays)), *shapes)
    return plans[0]


def _split_arrays(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The shapes of a tree's arrays, and a function that returns the tree with other arrays."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def rebuild(arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        all_leaves = [next(remaining) if a else leaf for leaf, a in zip(leaves, is_array, strict=True)]
        return jax.tree.unflatten(structure, all_leaves)

    return [_as_struct(leaf) for leaf, a in zip(leaves, is_array, strict=True) if a], rebuild


def _as_struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _mean_square(outputs: Any) -> jax.Array:
    floats = [y.astype(jnp.float32) for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum((jnp.mean(y * y) for y in floats), jnp.float32(0))
