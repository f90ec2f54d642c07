"""What `explain` prints fits into the terminal's columns, and says the same in few and in many."""

import re

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import fp8jax

X = jnp.ones((32, 64))


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.a_norm_of_the_hidden_states = nnx.RMSNorm(64, rngs=rngs)
        self.projection_to_many_channels = nnx.Linear(64, 128, rngs=rngs)
        self.gate_of_channels = nnx.Linear(64, 128, rngs=rngs)
        self.head = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        y = self.a_norm_of_the_hidden_states(x)
        return self.head(nnx.silu(self.gate_of_channels(y)) * self.projection_to_many_channels(y))


def linen(rules):
    return fp8jax.explain(nn.Sequential([nn.RMSNorm(), nn.Dense(128), nn.gelu, nn.Dense(64)]), rules, X)


def transformed(rules):
    graph, state = nnx.split(Mlp(nnx.Rngs(0)))
    return fp8jax.transform(lambda state, x: nnx.merge(graph, state)(x), rules).explain(state, X)


RULES = [fp8jax.Rule("head", None), fp8jax.Rule(".*", "coat")]
REPORTS = {
    "nnx": lambda: fp8jax.explain(Mlp(nnx.Rngs(0)), RULES, X),
    "nnx without a call": lambda: fp8jax.explain(Mlp(nnx.Rngs(0)), "moss"),
    "linen": lambda: linen("coat"),
    "transform": lambda: transformed(RULES),
}


@pytest.mark.parametrize("name", REPORTS)
def test_it_fits_and_loses_nothing(name, monkeypatch):
    report = REPORTS[name]()
    monkeypatch.setenv("COLUMNS", "400")
    whole = str(report)
    assert max(map(len, whole.splitlines())) > 100
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        folded = str(report)
        assert max(map(len, folded.splitlines())) <= columns
        # What stands in the wide table stands in the narrow one, too: broken after "/", "," or "_", without "-".
        lost = [word for word in whole.split() if word != "-" and word not in folded]
        assert all(piece in folded for word in lost for piece in re.findall(r"[^/,_]*[/,_]|[^/,_]+", word))
