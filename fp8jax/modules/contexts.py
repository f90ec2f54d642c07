"""What becomes of the non-linear parts of a Flax model: its norms and, in NNX, activations and attentions."""

import dataclasses
from typing import Any

from flax import nnx

from fp8jax.core.recipe import Context
from fp8jax.modules import attention, blocks, norms
from fp8jax.modules.blocks import Form
from fp8jax.modules.rules import Rules, ordered


@dataclasses.dataclass(frozen=True)
class Part:
    """What becomes of a norm, of a module with several linear layers, or of another module with an activation.

    Attributes:
        path: its place in the model, joined by "/".
        kind: name of its class.
        computes: "norm", or the expression that it was recognised by; None where nothing is known of it.
        context: what it keeps; None where it is left alone.
        reason: the rule that matched, or why it is left alone.
    """

    path: str
    kind: str
    computes: str | None
    context: Context | None
    reason: str

    @property
    def keeps(self) -> str:
        """What is kept for the backward pass, and what the layers keep that read the result."""
        if self.context is None:
            return "as written"
        if self.computes is None:
            return "no copy of what attention keeps"
        lean = "; layers that read its result keep nothing of it" if self.context.lean else ""
        return f"{self.context.spec}{lean}"


def norm_paths(modules: dict[str, Any], rules: Rules) -> list[str]:
    """The norms that rules choose for."""
    known = (*norms.LAYERS, *norms.LINEN_LAYERS)
    return [path for path, m in modules.items() if isinstance(m, known)] if ordered(rules).contexts else []


def plan(
    modules: dict[str, Any], rules: Rules, forms: dict[str, tuple[Form, ...]] | None = None, *, replace: bool = False
) -> tuple[Part, ...]:
    """What the rules make of the non-linear parts of a model.

    A norm follows the rule of its own path, an activation that of the layer that reads its result.

    Args:
        modules: all modules of the model, by path.
        rules: as `fp8jax.nnx.quantize` takes them.
        forms: of the modules of a Linen model, by path.
        replace: whether to do so, in place, before linear layers are replaced.
    """
    each, parts = ordered(rules), []
    for path, module in modules.items() if each.contexts else ():
        kind = type(module).__name__
        if isinstance(module, (*norms.LAYERS, *norms.LINEN_LAYERS)):
            choice, why = each.choice(path), norms.why_not(module)
            context = choice.context if choice.context.saved and why is None else None
            parts.append(Part(path, kind, "norm", context, why or choice.reason))
            if replace and context is not None:
                norms.replace(module, context)
        elif isinstance(module, nnx.Module) and attention.candidate(module):
            part = _activation(path, module, rules, replace)
            if part is not None:
                parts.append(part)
        for form in (forms or {}).get(path, ()):
            choice = each.choice("/".join(filter(None, (path, form.down))))
            context = choice.context if choice.linear is not None and choice.context.saved else None
            parts.append(Part(path, kind, str(form), context, choice.reason))
    return tuple(parts)


def _activation(path: str, module: Any, rules: Rules, replace: bool) -> Part | None:
    each, kind = ordered(rules), type(module).__name__
    form = blocks.recognise(module)
    names = [form.down] if form else list(attention.layers(module))
    choices = [each.choice("/".join(filter(None, (path, name)))) for name in names]
    choice = next((c for c in choices if c.linear is not None and c.context.saved), None)
    if choice is None:
        return Part(path, kind, str(form) if form else None, None, choices[0].reason)
    if replace and form is not None:
        blocks.replace(module, form, choice.context)
    elif replace:
        attention.replace(module)
    if form is not None:
        return Part(path, kind, str(form), choice.context, choice.reason)
    known = isinstance(module, nnx.MultiHeadAttention)
    hint = "" if known else f"; if it is an activation between layers, {blocks.HOOK}"
    return Part(path, kind, None, choice.context, f"{choice.reason}{hint}")
