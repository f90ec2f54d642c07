"""The choices of rules for layers by their paths alone."""

from collections.abc import Iterable, Mapping

from fp8jax.rewrite.rules import LayerChoice, Rules, as_rule_set


def choose(paths: Iterable[str], rules: Rules, heads: Mapping[str, str] | None = None) -> dict[str, LayerChoice]:
    paths, each = list(paths), as_rule_set(rules)
    each.check_all_used(paths, heads or {})
    return {path: each.choose(path, heads or {}) for path in paths}
