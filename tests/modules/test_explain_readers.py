"""The output of `explain` for norms with unquantized readers, for returned norms, and for biases."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp8jax
from tests.modules.residuals import COAT, kept_by

WIDTH, X = 32, jnp.ones((12, 32), jnp.bfloat16)
BF16 = {"dtype": jnp.bfloat16}
SAVED = "e4m3:group16, 1.125 B/element"


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm, self.last = nnx.RMSNorm(WIDTH, rngs=rngs, **BF16), nnx.RMSNorm(WIDTH, rngs=rngs, **BF16)
        self.up, self.gate = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **BF16), nnx.Linear(WIDTH, 4, rngs=rngs, **BF16)
        self.head = nnx.Linear(WIDTH, 50, rngs=rngs, **BF16)

    def __call__(self, x):
        h = self.norm(x)
        return self.head(self.last((x + self.up(h)) * jax.nn.softmax(self.gate(h))[..., :1]).reshape(2, 6, WIDTH))


class LinenModel(nn.Module):
    tied: bool = False

    @nn.compact
    def __call__(self, x):
        h = nn.RMSNorm(name="norm", **BF16)(x)
        y = (x + nn.Dense(WIDTH, name="up", **BF16)(h)) * nn.softmax(nn.Dense(4, name="gate", **BF16)(h))[..., :1]
        y = nn.RMSNorm(name="last", **BF16)(y).reshape(2, 6, WIDTH)
        return (
            nn.Embed(50, WIDTH, name="table", **BF16).attend(y) if self.tied else nn.Dense(50, name="head", **BF16)(y)
        )


def keeps(model, rules):
    return {
        part.path: part.residual
        for part in fp8jax.explain(model, rules, X).context_entries
        if part.kind.endswith("Norm")
    }


@pytest.mark.parametrize("make", [Model, LinenModel])
def test_a_norm_whose_reader_stays_as_it_is_keeps_what_this_reads(make):
    """Regression: the row listed only codes."""
    expected = {
        "norm": f"{SAVED}; gate saves the result in bfloat16",
        "last": f"{SAVED}; head saves the result in bfloat16",
    }
    rules = [fp8jax.Rule("gate|head", None), COAT]
    assert keeps(make(), rules) == expected
    faithful = fp8jax.recipes.Context("e4m3:group16")
    plain = fp8jax.recipes.Recipe("plain", context=faithful, linear=fp8jax.recipes.switchback().linear)
    actual = keeps(make(), [fp8jax.Rule("gate|head", None), plain])
    assert actual["last"] == f"{SAVED}; head saves the result in bfloat16"
    assert set(actual["norm"].split("; ")[1:]) == {
        "gate saves the result in bfloat16",
        "up saves the result in bfloat16",
    }
    everything = fp8jax.Rule(".*", COAT)
    assert keeps(make(), everything) == {"norm": SAVED, "last": SAVED}


def test_what_is_said_to_be_kept_is_kept():
    for rules, copies in (([fp8jax.Rule("gate|head", None), COAT], 2), (fp8jax.Rule(".*", COAT), 0)):
        reasons = "".join(keeps(Model(), rules).values())
        saved = kept_by(fp8jax.nnx.quantize(Model(), rules), X)
        assert reasons.count("saves the result in bfloat16") == copies
        # One more is the sum that the gate multiplies.
        assert sum(dtype == "bfloat16" and math.prod(shape) == X.size for dtype, shape in saved) == copies + 1


def test_a_tied_head_keeps_what_a_norm_gives_it():
    actual = keeps(LinenModel(tied=True), [fp8jax.Rule("gate", None), COAT])
    assert actual["last"] == f"{SAVED}; table saves the result in bfloat16"


def test_a_model_that_returns_a_norm_written_by_hand_is_no_norm():
    class Ends(nnx.Module):
        def __init__(self):
            self.up, self.outnorm = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(WIDTH))

        def __call__(self, x):
            h = self.up(x)
            return h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * self.outnorm[...]

    # No product reads it, so it has no residual.
    assert fp8jax.explain(Ends(), COAT, X).context_entries == ()


class Heads(nnx.Module):
    def __init__(self):
        self.b, self.w = nnx.Param(jnp.ones((4, 16))), nnx.Param(jnp.ones((WIDTH, 4, 16)))

    def __call__(self, x):
        return jnp.einsum("td,dhk->thk", x, self.w[...]) + self.b[...]


class LinenHeads(nn.Module):
    @nn.compact
    def __call__(self, x):
        b = self.param("b", nn.initializers.ones, (4, 16))
        return jnp.einsum("td,dhk->thk", x, self.param("w", nn.initializers.ones, (WIDTH, 4, 16))) + b


@pytest.mark.parametrize("model", [Heads, LinenHeads])
def test_the_kernel_of_a_class_of_a_users_own_is_its_largest_matrix(model):
    (layer,) = fp8jax.explain(model(), fp8jax.Rule("", "te_current"), X).quantized_layers
    assert layer.shape == (WIDTH, 4, 16)
