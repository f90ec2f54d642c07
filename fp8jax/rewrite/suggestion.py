"""`fp8jax.suggest`: rules for the layers with measured errors that a recipe does not explain."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.core.recipe import Linear, Recipe
from fp8jax.rewrite import cost_model, training
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.rules import GroupedProduct, Rule, Rules, as_rule_set
from fp8jax.rewrite.telemetry import Fault, Telemetry, find_faults, telemetry
from fp8jax.rewrite.transform import Transformed, transform

# Presets in the order in which they are tried: scales of the current tensor, scales of groups of 128, 16 bits.
_REMEDIES: tuple[str | None, ...] = ("te_current", "deepseek", None)
# Roles of the tensors that rules can change.
_ROLES = ("x", "w", "dy", "context")


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Rules for a model, with reasons. `print` shows them as code.

    Attributes:
        rules: for `fp8jax.transform`, `fp8jax.nnx.quantize` and `fp8jax.linen.quantize`: new rules, then those given.
        reasons: of the new rules, by path.
        unmended: the faults that no rule fixes, such as NaN in a batch, or errors of optimizer moments.
        unquantized_loss, loss_before, loss_after: of the batch in 16 bits, with the given rules, and with `rules`, from
            new states. NaN if the function does not return a scalar.
    """

    rules: tuple[Rule | GroupedProduct | Recipe | Linear | str, ...]
    reasons: Mapping[str, str]
    unmended: tuple[Fault, ...]
    unquantized_loss: float
    loss_before: float
    loss_after: float

    def __str__(self) -> str:
        lines = ["rules = ["]
        for rule in self.rules:
            if isinstance(rule, Rule) and rule.path in self.reasons:
                recipe = None if rule.recipe is None else getattr(rule.recipe, "name", None)
                lines += [f"    # {self.reasons[rule.path]}", f"    fp8jax.Rule({rule.path!r}, {recipe!r}),"]
            else:
                lines.append(f"    {getattr(rule, 'name', rule)!r},")
        lines += ["]", *(f"# no rule mends {fault}" for fault in self.unmended)]
        if self.loss_before == self.loss_before:
            before, after = f"{self.loss_before:.5g} before", f"{self.loss_after:.5g} with these rules"
            lines.append(f"# loss of this batch: {self.unquantized_loss:.5g} in 16 bits, {before}, {after}")
        return "\n".join(lines)


def suggest(fn: Callable, rules: Rules, params: Any, *args: Any, statistics: Telemetry | None = None) -> Suggestion:
    """Suggests rules for a function, so that no product has a larger error than its format explains.

        suggestion = fp8jax.suggest(loss_fn, "coat", params, batch)
        print(suggestion)
        fast = fp8jax.transform(loss_fn, suggestion.rules)

    Runs the function and its gradient on a batch. For each layer with a fault (`fp8jax.find_faults`), these are tried
    in order: the presets "te_current" and "deepseek", then 16 bits. The first one without a fault becomes a rule. On a
    GPU, layers that are slower in 8 bits by measured rates get a rule for 16 bits.

    Args:
        fn: a function of parameters and data, such as a loss, as of `fp8jax.transform`; for models there is
            `fp8jax.nnx.suggest`.
        rules: a `Recipe`, a preset's name, or a sequence of rules, as of `fp8jax.transform`.
        params: the parameters.
        args: further arguments of `fn`.
        statistics: those of a training step of these layers, from `fp8jax.telemetry`. They include errors that scaling
            states cause. None measures this batch, with new states.

    Raises:
        ValueError: as a call of `fp8jax.transform`.
        TypeError: `fn` is transformed already.
    """
    if isinstance(fn, Transformed):
        raise TypeError(
            "the function is already transformed; pass the original function to suggest, which transforms it with "
            "each rule"
        )
    original_rules = _as_sequence(rules)
    measure = functools.partial(_measure, fn, params, args)
    before, measured = measure(original_rules)
    faults = find_faults(measured if statistics is None else statistics)
    mendable: dict[str, Fault] = {}
    for fault in faults:
        if fault.role in _ROLES and fault.statistic != "nonfinite" and fault.layer in measured:
            mendable.setdefault(fault.layer, fault)
    chosen = _rules_for_shapes(transform(fn, original_rules).plan_call(params, *args).plan.program.entries.values())
    pending = [layer for layer in mendable if layer not in chosen]
    for remedy in _REMEDIES:
        if not pending or original_rules == (remedy,):
            continue
        candidates = {layer: Rule(re.escape(layer), remedy) for layer in pending}
        rules_by_layer = {layer: rule for layer, (rule, _) in chosen.items()} | candidates
        _, errors = measure((*rules_by_layer.values(), *original_rules))
        still_faulty = {fault.layer for fault in find_faults(errors) if fault.statistic != "nonfinite"}
        for layer in pending:
            if layer not in still_faulty:
                chosen[layer] = candidates[layer], _reason(mendable[layer], remedy, errors)
        pending = [layer for layer in pending if layer not in chosen]
    new_rules = *(rule for rule, _ in chosen.values()), *original_rules
    after = measure(new_rules)[0] if chosen else before
    unquantized_loss = float(jax.jit(lambda params, args: _to_scalars(fn(params, *args))[1])(params, args))
    unmended = [fault for fault in faults if fault.layer not in chosen or fault.statistic == "nonfinite"]
    reasons = {rule.path: reason for rule, reason in chosen.values()}
    return Suggestion(new_rules, reasons, tuple(unmended), unquantized_loss, float(before), float(after))


def _as_sequence(rules: Rules) -> tuple[Any, ...]:
    """The original rules as a sequence."""
    as_rule_set(rules)  # raises for other types
    return tuple(rules) if isinstance(rules, (list, tuple)) else (rules,)


def _measure(fn: Callable, params: Any, args: Sequence[Any], rules: Sequence[Any]) -> tuple[Array, Telemetry]:
    """The loss of a batch, NaN if there is none, and the statistics of its products and contexts, with new states."""
    fast = transform(fn, rules)
    states = fast.init(params, *args)

    def gradient(params: Any, args: Sequence[Any], states: Any) -> Any:
        def loss(params: Any, states: Any) -> tuple[Array, Array]:
            return _to_scalars(fast(params, *args, states=states))

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)(params, states)

    with training.suppress_training_checks():
        ((_, loss), _), statistics = jax.jit(telemetry(gradient))(params, args, states)
    return loss, statistics


def _to_scalars(results: Any) -> tuple[Array, Array]:
    """Return a scalar to differentiate, and the loss: the scalar result, or else a random projection and NaN."""
    floats = [x for x in jax.tree.leaves(results) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    if len(floats) == 1 and floats[0].size == 1:
        loss = jnp.sum(floats[0]).astype(jnp.float32)
        return loss, loss
    projections = (jnp.mean(x * jax.random.normal(jax.random.key(i), x.shape, x.dtype)) for i, x in enumerate(floats))
    return sum(projections, start=jnp.zeros([])), jnp.full([], jnp.nan)


def _rules_for_shapes(entries: Iterable[PlanEntry]) -> dict[str, tuple[Rule, str]]:
    """Rules for layers that are slower in 8 bits, with reasons, by layer; none on devices without measured rates."""
    if cost_model.current_rates()[1]:
        return {}
    slower = {entry.path: entry for entry in entries if entry.linear and entry.is_slower}
    return {
        path: (Rule(re.escape(path), None), f"{entry.shape} gains nothing in 8 bits at {entry.tokens:,} tokens")
        for path, entry in slower.items()
    }


def _reason(fault: Fault, remedy: str | None, errors: Telemetry) -> str:
    """The faults that a rule fixes."""
    cause = f"{fault.role}: {fault.reason}"
    after = errors.get(fault.layer, {}).get(fault.role, {}).get("snr_db")
    if after is None:
        return f"{cause}; in 16 bits it has none"
    return f"{cause}; {remedy} has {float(jnp.min(after)):.1f} dB"
