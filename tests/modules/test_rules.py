"""Rules on paths: order, default exclusions, and errors."""

import re

import pytest

import fp8jax
from fp8jax.rewrite.rules import HEAD_PATTERN, Rule, as_rule_set
from tests.modules.chosen import choose

TE, INT8 = fp8jax.recipes.te_current(), fp8jax.recipes.int8_block()
PATHS = ["embed", "layers/0/attention/q", "layers/0/mlp/up", "layers/1/attention/q", "layers/1/mlp/up", "lm_head"]


def test_a_recipe_takes_all_layers_but_embeddings_and_heads():
    chosen = choose(PATHS, TE)
    assert [path for path, choice in chosen.items() if choice.linear is None] == ["embed", "lm_head"]
    assert {choice.linear for choice in chosen.values()} == {None, TE.linear}
    assert chosen["embed"].reason == "an embedding or head"
    assert chosen["layers/0/mlp/up"].reason == "the recipe"


@pytest.mark.parametrize(
    ("path", "left_alone"),
    [
        ("head", True),
        ("decoder/lm_head", True),
        ("embedder/projection", True),
        ("wte", True),
        ("logits_dense", True),
        ("output_layer", True),
        ("layers/heads_mixer", False),
        ("attention/out", False),
        ("overhead", False),
        ("layers/headless/up", False),
    ],
)
def test_usual_names_of_embeddings_and_heads(path, left_alone):
    assert (re.fullmatch(HEAD_PATTERN, path) is not None) == left_alone


def test_the_first_rule_that_matches_wins():
    rules = [Rule("layers/0/.*", None), Rule(".*/mlp/.*", INT8), Rule(".*", TE.linear)]
    chosen = choose(PATHS, rules)
    assert chosen["layers/0/mlp/up"].linear is None
    assert chosen["layers/0/mlp/up"].reason == "rule 'layers/0/.*'"
    assert chosen["layers/1/mlp/up"].linear == INT8.linear
    assert chosen["layers/1/attention/q"].linear == TE.linear
    assert chosen["lm_head"].linear == TE.linear


def test_a_recipe_after_rules_takes_what_is_left_but_embeddings_heads_and_routers():
    heads = {"layers/1/mlp/up": "an output head: as read", "layers/0/mlp/up": "an output head: as read"}
    rules = [Rule("layers/0/mlp/.*", INT8), Rule("layers/0/.*", None), "te_current"]
    chosen = choose([*PATHS, "layers/1/router"], rules, heads)
    assert {path: choice.linear for path, choice in chosen.items() if choice.linear} == {
        "layers/0/mlp/up": INT8.linear, "layers/1/attention/q": TE.linear,
    }  # fmt: skip
    assert {path: choice.reason for path, choice in chosen.items()} == {
        "embed": "an embedding or head", "lm_head": "an embedding or head", "layers/1/router": "a router",
        "layers/0/attention/q": "rule 'layers/0/.*'", "layers/0/mlp/up": "rule 'layers/0/mlp/.*'",
        "layers/1/attention/q": "the recipe", "layers/1/mlp/up": "an output head: as read",
    }  # fmt: skip
    selected = choose(PATHS, [Rule("lm_head", INT8), TE.linear])
    assert selected["lm_head"].linear == INT8.linear
    assert selected["embed"].linear is None
    with pytest.raises(ValueError, match="no layer is left for 'block' to match"):
        choose(PATHS, [Rule("block", None), TE])
    with pytest.raises(ValueError, match="no layer is left for the recipe to match"):
        choose(PATHS, [Rule(".*", INT8), TE])
    with pytest.raises(
        TypeError, match="that may end with a recipe, got 'te_current'; a recipe for all other layers is the last"
    ):
        choose(PATHS, ["te_current", Rule(".*", TE)])


def test_layers_without_a_rule_are_left_alone():
    chosen = choose(PATHS, Rule("layers/.*/q", TE))
    assert [path for path, choice in chosen.items() if choice.linear] == [p for p in PATHS if p.endswith("/q")]
    assert chosen["lm_head"].reason == "no rule matches"


def test_a_rule_must_match_the_whole_path():
    with pytest.raises(ValueError, match=r"no layer is left for 'mlp' to match; the layers are embed, layers/0"):
        choose(PATHS, [Rule("mlp", TE), Rule(".*", TE)])


def test_a_rule_behind_others_that_take_all_its_layers_is_refused():
    with pytest.raises(ValueError, match=r"no layer is left for 'layers/0/mlp/up'"):
        choose(PATHS, [Rule("layers/.*", TE), Rule("layers/0/mlp/up", None)])


def test_rules_for_single_layers_may_take_all_layers_of_a_later_one():
    layers = [path for path in PATHS if path.startswith("layers")]
    chosen = choose(PATHS, [*(Rule(path, INT8) for path in layers), Rule("layers/0/.*", TE), TE])
    assert {path for path, choice in chosen.items() if choice.linear == INT8.linear} == set(layers)
    with pytest.raises(ValueError, match="no layer is left for the recipe to match"):
        choose(PATHS, [*(Rule(path, INT8) for path in layers), Rule("layers/.*", TE), TE])


def test_a_model_of_heads_only_is_refused():
    with pytest.raises(ValueError, match="no layer is left for the recipe to match"):
        choose(["lm_head"], TE)


def test_wrong_rules_are_refused():
    with pytest.raises(ValueError, match="not a regular expression"):
        Rule("layers/(", TE)
    with pytest.raises(ValueError, match="no rules"):
        as_rule_set([])
    with pytest.raises(TypeError, match="rules must be a recipe, or a sequence"):
        as_rule_set({"mlp": TE})
    with pytest.raises(ValueError, match="no linear layer"):
        choose([], TE)
