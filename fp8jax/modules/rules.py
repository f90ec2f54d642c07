"""Which layers of a model a recipe is used for: ordered rules on their paths, the first match wins."""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from fp8jax.core.recipe import Linear, Recipe

# Embeddings and output heads are left alone unless a rule asks for them: their errors go straight into the loss.
LEFT_ALONE = r"(.*/)?(embed\w*|wte|wpe|head|\w+_head|unembed\w*|logits\w*|output_layer|classifier)(/.*)?"


@dataclasses.dataclass(frozen=True)
class Rule:
    """What to do with the layers whose paths match.

    Attributes:
        path: regular expression that must match a whole path, such as `"layers/.*/mlp/.*"`; steps are joined by "/".
        recipe: a `Recipe` or its part `Linear`; None leaves the layers alone.

    Raises:
        ValueError: `path` is no regular expression.
    """

    path: str
    recipe: Recipe | Linear | None

    def __post_init__(self) -> None:
        try:
            re.compile(self.path)
        except re.error as error:
            raise ValueError(f"rule path {self.path!r} is no regular expression: {error}") from None

    @property
    def linear(self) -> Linear | None:
        return self.recipe.linear if isinstance(self.recipe, Recipe) else self.recipe


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the rules chose for a layer: the part `Linear` of a recipe, or None and the reason."""

    linear: Linear | None
    reason: str


Rules = Recipe | Linear | Rule | Sequence[Rule]


def choose(paths: Iterable[str], rules: Rules) -> dict[str, Choice]:
    """Matches the paths of all layers against rules.

    Args:
        paths: the paths of the layers that can be quantized.
        rules: a recipe for all but embeddings and output heads, or rules in order; layers that none matches are left
            alone.

    Returns:
        The choice for each path.

    Raises:
        ValueError: a rule matched no layer, or quantizes nothing although it has a recipe, or there is no layer.
        TypeError: the rules are of another type.
    """
    paths = list(paths)
    listed, default = _normalise(rules)
    if not paths:
        raise ValueError("the model has no linear layer that fp8jax knows how to quantize")
    for rule in listed:
        if rule.linear is not None and not rule.linear.quantized:
            raise ValueError(f"the recipe of rule {rule.path!r} quantizes no product; leave the model as it is")
    used: set[int] = set()
    chosen = {}
    for path in paths:
        chosen[path] = Choice(None, "no rule matches")
        for i, rule in enumerate(listed):
            if re.fullmatch(rule.path, path):
                used.add(i)
                reason = "an embedding or head" if default and i == 0 else f"rule {rule.path!r}"
                chosen[path] = Choice(rule.linear, reason)
                break
    unused = [rule.path for i, rule in enumerate(listed) if i not in used and not (default and i == 0)]
    if unused:
        raise ValueError(f"no layer matches {', '.join(map(repr, unused))}; the layers are {', '.join(sorted(paths))}")
    return chosen


def _normalise(rules: Rules) -> tuple[list[Rule], bool]:
    """A list of rules, and whether the first one is ours."""
    if isinstance(rules, (Recipe, Linear)):
        return [Rule(LEFT_ALONE, None), Rule(".*", rules)], True
    listed = [rules] if isinstance(rules, Rule) else list(rules)
    for rule in listed:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules are a recipe, or a sequence of fp8jax.Rule, not {rule!r}")
    return listed, False
