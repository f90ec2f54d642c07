"""Which layers of a model a recipe is used for: ordered rules on their paths, the first match wins."""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from fp8jax.core.recipe import Context, Linear, Recipe

# Embeddings and output heads are left alone unless a rule asks for them: their errors go straight into the loss.
LEFT_ALONE = r"(.*/)?(embed\w*|wte|wpe|head|\w+_head|unembed\w*|logits\w*|output_layer|classifier)(/.*)?"


_NOTHING = Context()


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

    @property
    def context(self) -> Context:
        return self.recipe.context if isinstance(self.recipe, Recipe) else _NOTHING

    @property
    def empty(self) -> bool:
        """Whether the recipe changes nothing in a model."""
        return self.linear is not None and not self.linear.quantized and self.context.saved is None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the rules chose for a layer: the parts of a recipe (None where it is left alone), and the reason."""

    linear: Linear | None
    reason: str
    context: Context = _NOTHING

    @property
    def recipe(self) -> Recipe:
        """Both parts, as operations take them that stand before or between such layers."""
        if self.linear is None:
            return Recipe("left alone")
        return Recipe("chosen", linear=self.linear, context=self.context)


Rules = Recipe | Linear | Rule | Sequence[Rule]


@dataclasses.dataclass(frozen=True)
class Ordered:
    """Rules in order, hashable; `default` says that the first one is ours, for embeddings and heads.

    Raises:
        ValueError: the recipe of a rule quantizes nothing, or there is no rule.
    """

    rules: tuple[Rule, ...]
    default: bool

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("there are no rules; give a recipe, or at least one fp8jax.Rule")
        for rule in self.rules:
            if rule.empty:
                raise ValueError(f"the recipe of rule {rule.path!r} quantizes no product; leave the model as it is")

    @property
    def contexts(self) -> bool:
        """Whether any rule says what non-linear operations keep."""
        return any(rule.context.saved is not None for rule in self.rules)

    def choice(self, path: str) -> Choice:
        """What the first rule that matches a path says."""
        i = self._first(path)
        if i is None:
            return Choice(None, "no rule matches")
        reasons = ("an embedding or head", "the recipe") if self.default else [f"rule {r.path!r}" for r in self.rules]
        return Choice(self.rules[i].linear, reasons[i], self.rules[i].context)

    def check_all_used(self, paths: Iterable[str]) -> None:
        """Raises ValueError where a rule is the first match of none of the paths, or there are none."""
        paths = sorted(paths)
        if not paths:
            raise ValueError("the model has no linear layer that fp8jax knows how to quantize")
        used = {self._first(path) for path in paths}
        unused = [r.path for i, r in enumerate(self.rules) if i not in used and not (self.default and i == 0)]
        if unused:
            names = ", ".join(map(repr, unused))
            raise ValueError(f"no layer is left for {names} to match; the layers are {', '.join(paths)}")

    def _first(self, path: str) -> int | None:
        return next((i for i, rule in enumerate(self.rules) if re.fullmatch(rule.path, path)), None)


def ordered(rules: Rules) -> Ordered:
    """Rules in their one form.

    Args:
        rules: a recipe for all layers but embeddings and output heads, or rules in order, the first match wins; layers
            that none matches are left alone.

    Raises:
        ValueError: the recipe of a rule quantizes nothing, or there is no rule.
        TypeError: the rules are of another type.
    """
    if isinstance(rules, (Recipe, Linear)):
        return Ordered((Rule(LEFT_ALONE, None), Rule(".*", rules)), default=True)
    listed = (rules,) if isinstance(rules, Rule) else tuple(rules)
    for rule in listed:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules are a recipe, or a sequence of fp8jax.Rule, not {rule!r}")
    return Ordered(listed, default=False)


def choose(paths: Iterable[str], rules: Rules) -> dict[str, Choice]:
    """Matches the paths of all layers that can be quantized against rules.

    Raises:
        ValueError, TypeError: as `ordered`; or a rule is the first match of no layer, or there is no layer.
    """
    paths, each = list(paths), ordered(rules)
    each.check_all_used(paths)
    return {path: each.choice(path) for path in paths}
