"""Blocks that constrain, name, cast or reshape values between layers save the same residuals as others."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from tests.distance import relative
from tests.modules.test_sharing import COAT, INNER, WIDTH, WRITINGS, X
from tests.programs import count, residuals
from tests.rows import few

MLP = "silu(gate) * up"


class NnxBlock(nnx.Module):
    """A norm and a gated MLP, with an operation on all values between its layers."""

    def __init__(self, via) -> None:
        def dense(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        rngs, self.via = nnx.Rngs(0), via
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.gate, self.up, self.down = dense(WIDTH, INNER), dense(WIDTH, INNER), dense(INNER, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.via(self.norm(x))
        gate, up = self.via(self.gate(h)), self.via(self.up(h))
        return x + self.via(self.down(self.via(nnx.silu(gate) * up)))


class LinenBlock(nn.Module):
    """The same in Linen."""

    via: object

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        h = self.via(nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x))
        gate, up = self.via(dense(INNER, name="gate")(h)), self.via(dense(INNER, name="up")(h))
        return x + self.via(dense(WIDTH, name="down")(self.via(nn.silu(gate) * up)))


def program(kind: str, via):
    """Returns a function of parameters and input, and the parameters, of a quantized block."""
    rules = fp8jax.Rule(".*", COAT)
    if kind == "nnx":
        graph, state = nnx.split(fp8jax.nnx.quantize(NnxBlock(via), rules))
        return lambda state, x: nnx.merge(graph, state)(x), state
    model = fp8jax.linen.quantize(LinenBlock(via), rules)
    return model.apply, LinenBlock(via).init(jax.random.key(0), X)


@functools.cache
def as_written_plainly(kind: str) -> np.ndarray:
    plain, params = program(kind, WRITINGS["plain"])
    return np.asarray(jax.jit(plain)(params, X), np.float32)


# Both have the same operations; each way to write a model is in one of them.
@pytest.mark.parametrize(
    ("writing", "kind"),
    few(
        [(writing, kind) for writing in WRITINGS for kind in ("nnx", "linen")],
        *((writing, ("nnx", "linen")[i % 2]) for i, writing in enumerate(WRITINGS)),
    ),
)
def test_what_a_block_saves_does_not_depend_on_how_it_is_written(writing, kind):
    f, params = program(kind, WRITINGS[writing])
    saved = [shape[-1] for dtype, shape in residuals(f, params, X) if dtype == "uint8"]
    # The norm's input, gate and up.
    assert sorted(saved) == [WIDTH, INNER, INNER]
    actual, expected = np.asarray(jax.jit(f)(params, X), np.float32), as_written_plainly(kind)
    if writing == "casts" and kind == "nnx":  # XLA leaves out what rounds and widens, and so rounds less often
        assert relative(actual, expected) < 2.0**-7
    else:
        np.testing.assert_array_equal(actual, expected)
    block = (NnxBlock if kind == "nnx" else LinenBlock)(WRITINGS[writing])
    parts = fp8jax.explain(block, fp8jax.Rule(".*", COAT), X).context_entries
    assert {part.kind for part in parts} == {"RMSNorm", MLP}


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize(("writing", "primitive"), [("a constraint", "sharding_constraint"), ("a name", "name")])
def test_constraints_and_names_of_the_model_stay_in_its_program(kind, writing, primitive):
    """For the results of the norm, gate, up, the activation and the last layer."""
    f, params = program(kind, WRITINGS[writing])
    plain, same = program(kind, WRITINGS["plain"])
    extra = count(jax.jit(f), primitive, params, X) - count(jax.jit(plain), primitive, same, X)
    assert extra == 5
