"""Rules that choose a recipe for each layer by its path; the first match wins."""

import dataclasses
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fp8jax.core.recipe import Context, Linear, Recipe
from fp8jax.ops.dispatch import choice
from fp8jax.ops.quantization.fused_outputs import emits_codes
from fp8jax.recipes import resolve
from fp8jax.rewrite.heads import LOSS_HEAD_REASON, NARROW_REASON, OUTPUT_HEAD_REASON

# By default, embeddings and output heads are not quantized: their errors change the loss directly. Nor are routers,
# which send whole tokens to other experts if they err.
HEAD_PATTERN = r"(.*/)?(embed\w*|wte|wpe|head|\w+_head|unembed\w*|(\w+_)?logits?\w*|output_layer|classifier)(/.*)?"
ROUTER_PATTERN = r"(.*/)?(\w*[rR]outer\w*|gating|(gating|gate)_network)(/.*)?"
_DEFAULT_EXCLUSIONS = (("an embedding or head", HEAD_PATTERN), ("a router", ROUTER_PATTERN))

_NO_CONTEXT = Context()
_NO_HEADS: Mapping[str, str] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Rule:
    """A recipe for all layers with a matching path.

    Attributes:
        path: regular expression for the whole path, such as `"layers/.*/mlp/.*"`; steps are joined by "/".
        recipe: a `Recipe`, its part `Linear`, or a preset's name; None does not quantize these layers.

    Raises:
        ValueError: `path` is not a regular expression, or no preset has this name.
        TypeError: the recipe is of another type.
    """

    path: str
    recipe: Recipe | Linear | str | None

    def __post_init__(self) -> None:
        if self.recipe is not None:
            object.__setattr__(self, "recipe", resolve(self.recipe))
            if isinstance(self.recipe, Context):
                raise TypeError(f"a rule expects a Recipe or its part Linear, got {self.recipe!r}")
        try:
            re.compile(self.path)
        except re.error as error:
            raise ValueError(f"rule path {self.path!r} is not a regular expression: {error}") from None

    @property
    def linear(self) -> Linear | None:
        assert not isinstance(self.recipe, str)
        return self.recipe.linear if isinstance(self.recipe, Recipe) else self.recipe

    @property
    def context(self) -> Context:
        return self.recipe.context if isinstance(self.recipe, Recipe) else _NO_CONTEXT


@dataclasses.dataclass(frozen=True)
class GroupedProduct:
    """A rule that names a function which computes a grouped product, like `jax.lax.ragged_dot`.

        rules = [fp8jax.GroupedProduct("gmm"), "coat"]

    The function has a custom derivative, is jitted, or is a Pallas kernel. Its arrays are (tokens, inputs), the weights
    of all groups, and the number of tokens of each group, in this order. It returns (tokens, outputs). A recipe
    replaces its forward and its backward pass. Tokens in no group then have results and gradients of 0.

    Attributes:
        function: regular expression for the whole name of the function.
        transposed: whether square matrices are (outputs, inputs). The shapes of other matrices show their order.

    Raises:
        ValueError: `function` is not a regular expression. From a call: no function has this name and these arrays.
    """

    function: str
    transposed: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.function)
        except re.error as error:
            raise ValueError(f"function {self.function!r} is not a regular expression: {error}") from None

    def matches(self, name: str) -> bool:
        """Whether a function has this name."""
        return re.fullmatch(self.function, name) is not None


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """The parts of a recipe that the rules chose for a layer, and the reason; `linear` is None for no quantization.

    `is_unquantized_head` is whether it is an output head and the recipe has no part `head`.
    """

    linear: Linear | None
    reason: str
    context: Context = _NO_CONTEXT
    is_unquantized_head: bool = False

    @property
    def recipe(self) -> Recipe:
        """Both parts as a recipe, for operations before or between these layers."""
        if self.linear is None:
            return Recipe("left alone")
        return Recipe("chosen", linear=self.linear, context=self.context)


def rewrites_nonlinear(recipe: Recipe) -> bool:
    """Whether a recipe replaces norms and activations before and between its layers.

    They save codes, or on a GPU emit the codes that layers read. On a GPU without kernels they are not replaced
    (`fp8jax.ops.dispatch.choice`).
    """
    if choice.keeps_nonlinear_unchanged():
        return False
    return recipe.context.residual is not None or emits_codes(recipe)


@dataclasses.dataclass(frozen=True)
class RuleSet:
    """Ordered rules; hashable.

    Attributes:
        rules: the rules; the first that matches a path wins.
        has_default: whether the last rule is a recipe for all other layers, after the default exclusions.
        head: that recipe's part for output heads; None does not quantize them.
        grouped_products: the functions of the user that compute grouped products.
        unquantized_blocks: as of that recipe.

    Raises:
        ValueError: there is no rule.
    """

    rules: tuple[Rule, ...]
    has_default: bool
    head: Linear | None = None
    grouped_products: tuple[GroupedProduct, ...] = ()
    unquantized_blocks: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("there are no rules; pass a recipe, or at least one fp8jax.Rule")

    @property
    def user_rules(self) -> tuple[Rule, ...]:
        """The user's rules on paths."""
        return self.rules[: self._num_user_rules]

    def has_user_rule(self, *paths: str) -> bool:
        """Whether a user's rule matches one of these paths."""
        return any(re.fullmatch(rule.path, path) for rule in self.user_rules for path in paths)

    @property
    def _num_user_rules(self) -> int:
        """The number of leading rules that are the user's."""
        return len(self.rules) - (len(_DEFAULT_EXCLUSIONS) + 1 if self.has_default else 0)

    @property
    def has_contexts(self) -> bool:
        """Whether a rule's recipe compresses the residuals of non-linear operations."""
        return any(rule.context.residual is not None for rule in self.rules)

    @property
    def rewrites_nonlinear(self) -> bool:
        """Whether any rule's recipe replaces norms and activations."""
        return any(rewrites_nonlinear(LayerChoice(rule.linear, "", rule.context).recipe) for rule in self.rules)

    def choose(self, path: str, heads: Mapping[str, str] = _NO_HEADS, aliases: Sequence[str] = ()) -> LayerChoice:
        """The choice of the first rule that matches a path.

        Args:
            aliases: other paths of the layer.
            heads: the reasons of layers that are heads, routers or narrow. The default recipe does not quantize them,
                or uses its part `head` for those that are output heads or have the name of one.
        """
        i = self._first_match(path, *aliases)
        if i is None:
            return LayerChoice(None, "no rule matches")
        default_reasons = [*(name for name, _ in _DEFAULT_EXCLUSIONS), "the recipe"]
        reason = (
            default_reasons[i - self._num_user_rules] if i >= self._num_user_rules else f"rule {self.rules[i].path!r}"
        )
        head_reason = heads.get(path)
        is_head = i >= self._num_user_rules and (
            head_reason in (OUTPUT_HEAD_REASON, LOSS_HEAD_REASON)
            or (i == self._num_user_rules and head_reason not in (None, NARROW_REASON))
        )
        if is_head and self.head is not None:
            return LayerChoice(self.head, "the recipe's head")
        linear = self.rules[i].linear
        if i >= self._num_user_rules and path in heads and linear is not None:
            return LayerChoice(None, heads[path], is_unquantized_head=is_head)
        if linear is not None and not linear.is_quantized and not linear.skip_unprofitable:
            reason += ", which quantizes no product"
        return LayerChoice(linear, reason, self.rules[i].context, is_head)

    def takes_by_default(self, *paths: str) -> bool:
        """Whether the recipe for all other layers quantizes a layer with these paths, or would if it is not a head."""
        is_default = self.has_default and self._first_match(*paths) == len(self.rules) - 1
        linear = self.rules[-1].linear
        return is_default and linear is not None and linear.is_quantized

    def check_all_used(
        self,
        paths: Iterable[str],
        heads: Mapping[str, str] = _NO_HEADS,
        hint: str = "",
        aliases: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
        source_layers: Sequence[str] = (),
        unsupported_layers: Sequence[str] = (),
    ) -> None:
        """Raise ValueError if there are no paths, or a rule is the first match of none of them.

        Rules for single layers may leave no layer to the rules after them, as those of `fp8jax.suggest` can.

        Args:
            paths: the paths of layers that can be quantized, and of norms.
            heads: as in `choose`.
            source_layers: layers with matmuls that cannot be quantized; a rule with None may match only these.
            unsupported_layers: layers of experts whose products are left as written. Any rule may match only these.
        """
        paths = sorted({*paths, *unsupported_layers})
        if not paths:
            raise ValueError(f"the model has no linear layer that fp8jax knows how to quantize{hint}")
        aliases_of = {path: aliases.get(path, ()) for path in paths}
        choices = {path: self.choose(path, heads, aliases_of[path]) for path in paths}
        skipped = {path for path, choice in choices.items() if choice.reason == heads.get(path)}
        names = {name for path, others in aliases_of.items() for name in (path, *others)}
        single = {i for i, rule in enumerate(self.rules) if rule.path in names | {*map(re.escape, names)}}
        used = set[int]()
        if self.head is not None and any(choice.linear is self.head for choice in choices.values()):
            used.add(len(self.rules) - 1)
        for path in paths:
            for match in () if path in skipped else self._matches(path, *aliases_of[path]):
                used.add(match)
                if match not in single:
                    break
        first_rules = [self._first_match(path) for path in source_layers]
        used |= {i for i in first_rules if i is not None and self.rules[i].recipe is None}
        optional = range(self._num_user_rules, len(self.rules) - 1)
        unused = [i for i in range(len(self.rules)) if i not in used and i not in optional]
        if unused:
            unused_names = ", ".join(
                "the recipe" if i >= self._num_user_rules else repr(self.rules[i].path) for i in unused
            )
            exclusion_note = (
                " (embeddings, heads and routers are not quantized unless a rule matches them)"
                if self.has_default
                else ""
            )
            raise ValueError(
                f"no layer is left for {unused_names} to match; the layers are {', '.join(paths)}{exclusion_note}{hint}"
            )

    def _matches(self, *paths: str) -> Iterator[int]:
        """The rules that match one of these paths, in order."""
        return (i for i, rule in enumerate(self.rules) if any(re.fullmatch(rule.path, path) for path in paths))

    def _first_match(self, *paths: str) -> int | None:
        return next(self._matches(*paths), None)


Rules = Recipe | Linear | str | Rule | Sequence[Rule | GroupedProduct | Recipe | Linear | str] | RuleSet


def as_rule_set(rules: Rules) -> RuleSet:
    """Rules as a `RuleSet`.

    Args:
        rules: a recipe, or a preset's name, for all layers but embeddings, routers and output heads; or ordered rules,
            with an optional recipe at the end. If the recipe's part `head` is quantized, output heads use it. Layers
            that no rule matches are not quantized, nor are those of a recipe such as "bf16" or "coat_optimizer". A
            sequence may hold `GroupedProduct`s in any place.

    Raises:
        ValueError: there is no rule, or no preset has this name.
        TypeError: the rules are of another type.
    """
    if isinstance(rules, RuleSet):
        return rules
    user_rules: list[Any] = [rules]
    if isinstance(rules, Iterable) and not isinstance(rules, (str, Mapping)):
        user_rules = list(rules)
    grouped_products = tuple(rule for rule in user_rules if isinstance(rule, GroupedProduct))
    user_rules = [rule for rule in user_rules if not isinstance(rule, GroupedProduct)]
    default = bool(user_rules) and (
        isinstance(user_rules[-1], (str, Recipe, Linear, Context)) or callable(user_rules[-1])
    )
    default_recipe = resolve(user_rules.pop()) if default else None
    default_rules = (
        [*(Rule(path, None) for _, path in _DEFAULT_EXCLUSIONS), Rule(".*", default_recipe)] if default else []
    )
    head = default_recipe.head if isinstance(default_recipe, Recipe) and default_recipe.head.is_quantized else None
    for rule in user_rules:
        if not isinstance(rule, Rule):
            is_short = isinstance(rule, (str, int, float, type(None), tuple, list, dict))
            kind = repr(rule) if is_short else f"an object of {type(rule).__name__}"
            kind = f"recipe {rule.name!r}" if isinstance(rule, Recipe) else kind
            fix = "; a recipe for all other layers is the last" if isinstance(rule, (str, Recipe)) else ""
            raise TypeError(
                f"rules must be a recipe, or a sequence of fp8jax.Rule that may end with a recipe, got {kind}{fix}"
            )
    unquantized_blocks = default_recipe.unquantized_blocks if isinstance(default_recipe, Recipe) else (0, 0)
    return RuleSet((*user_rules, *default_rules), default, head, grouped_products, unquantized_blocks)
