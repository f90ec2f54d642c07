"""The output of `explain` fits the terminal: a summary of one screen, and complete details."""

import re

import jax
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
    details = report.details
    assert max(map(len, details.splitlines())) > 100
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, str(report).splitlines())) <= columns
        folded = report.details
        assert max(map(len, folded.splitlines())) <= columns
        # The narrow table has the content of the wide one, wrapped after "/", "," or "_" without "-".
        missing = [word for word in details.split() if word != "-" and word not in folded]
        assert all(piece in folded for word in missing for piece in re.findall(r"[^/,_]*[/,_]|[^/,_]+", word))


LAYERS = 24


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.mlp = nnx.RMSNorm(64, rngs=rngs), Mlp(rngs)
        self.query, self.key = (nnx.Linear(64, 64, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        h = self.norm(x)
        scores = jax.nn.softmax(self.query(h) @ self.key(h).T)
        return self.mlp(scores @ x) + x


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_many_equal_blocks_are_one_screen(monkeypatch):
    """The summary has each row of the plan, folded with equal ones. Two blocks that a rule excludes are visible."""
    monkeypatch.setenv("COLUMNS", "100")
    left = fp8jax.Rule("blocks/(0|23)/query", None)
    report = fp8jax.explain(nnx.eval_shape(lambda: Deep(nnx.Rngs(0))), [left, "coat"], X)
    assert len(report.rows) > 200
    assert len(str(report).splitlines()) <= 40
    monkeypatch.setenv("COLUMNS", "300")
    text = str(report)
    for folded in (
        "blocks/{1..22}/query",
        "blocks/{0,23}/query",
        "blocks/{0..23}/key",
        "blocks/{0..23}/mlp/{gate_of_channels,projection_to_many_channels}",
        "blocks/{0..23}/mlp/head",
    ):
        assert folded in text
    # Products of data have no path, but a line.
    assert re.search(rf"\({LAYERS} times\) +dot_general", text)
    assert "rule 'blocks/(0|23)/query'" in text


def test_layers_of_one_reason_are_one_row_whatever_their_shapes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    convs = [nnx.Conv(i, o, (3,), rngs=nnx.Rngs(0)) for i, o in ((64, 32), (32, 96), (96, 64))]
    model = nnx.Sequential(*convs, nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    (line,) = re.findall(r"(?m)^.*Conv .*$", str(fp8jax.explain(model, "coat", X)))
    assert line.split()[:2] == ["layers/{0..2}", "Conv"]
    monkeypatch.setenv("COLUMNS", "200")
    assert "(3,32,96)" in fp8jax.explain(model, "coat", X).details
