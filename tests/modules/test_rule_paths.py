"""A rule matches whole paths, not their prefixes or suffixes, in any model."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp8jax
from fp8jax.rewrite.rules import Rule
from tests.modules.chosen import choose
from tests.programs import dots

TE, INT8 = fp8jax.recipes.te_current(), fp8jax.recipes.int8_block()
NAMES = ("up", "upper", "group", "up_2")


@pytest.mark.parametrize(
    ("pattern", "paths", "matched"),
    [
        ("up", ["up", "upper", "group", "mlp/up", "up/a"], {"up"}),
        ("layers/1", ["layers/1", "layers/10", "layers/11/up", "a/layers/1"], {"layers/1"}),
        ("layers/1/.*", ["layers/1/up", "layers/10/up", "layers/1"], {"layers/1/up"}),
        (".*/up", ["mlp/up", "mlp/upper", "up", "mlp/up/a"], {"mlp/up"}),
        ("up|down", ["up", "down", "updown", "down_2", "upper"], {"up", "down"}),
        (".*up$", ["group_up", "up", "up/a"], {"group_up", "up"}),
    ],
)
def test_a_pattern_matches_from_the_first_to_the_last_letter(pattern, paths, matched):
    chosen = choose(paths, Rule(pattern, TE))
    assert {path for path, choice in chosen.items() if choice.linear} == matched
    # And where another rule comes after it, that one has the rest.
    chosen = choose(paths, [Rule(pattern, None), Rule(".*", INT8)])
    assert {path for path, choice in chosen.items() if choice.linear == INT8.linear} == {*paths} - matched


@pytest.mark.parametrize("path", ["header", "heads_mixer", "layers/headless/up", "wter", "classifiers/up"])
def test_a_recipe_leaves_alone_whole_names_of_heads_and_embeddings_only(path):
    assert choose([path, "lm_head"], TE)[path].linear == TE.linear


class Model(nnx.Module):
    def __init__(self, rngs):
        for name in NAMES:
            setattr(self, name, nnx.Linear(8, 8, rngs=rngs))

    def __call__(self, x):
        return sum(getattr(self, name)(x) for name in NAMES)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return sum(nn.Dense(8, name=name)(x) for name in NAMES)


def test_of_models_only_the_layer_that_is_named_is_quantized():
    x, rule = jnp.ones((2, 8)), Rule("up", TE)
    model = LinenModel()
    runs = {
        "nnx": (fp8jax.nnx.quantize(Model(nnx.Rngs(0)), rule), x),
        "linen": (fp8jax.linen.quantize(model, rule).apply, model.init(jax.random.key(0), x), x),
    }
    for f, *args in runs.values():
        assert sorted(dots(f, *args)) == [("float32",) * 2] * 3 + [("float8_e4m3fn",) * 2]


def test_norms_follow_their_own_rule():
    class Norms(nnx.Module):
        def __init__(self, rngs):
            for name in ("norm", "norm_2"):
                setattr(self, name, nnx.RMSNorm(8, rngs=rngs))
            self.up = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.up(self.norm_2(self.norm(x)))

    contexts = [fp8jax.recipes.Context(f"e4m3:group{n}") for n in (4, 8)]
    recipes = [dataclasses.replace(TE, context=context) for context in contexts]
    rules = [Rule("norm", recipes[0]), Rule(".*", recipes[1])]
    parts = {part.path: part.context for part in fp8jax.explain(Norms(nnx.Rngs(0)), rules).context_entries}
    assert parts == {"norm": contexts[0], "norm_2": contexts[1]}
