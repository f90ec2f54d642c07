"""JAX's default precision, in all spellings, is accepted by every quantized matmul; other precisions are refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import fp8jax

TE, X, KEY = fp8jax.recipes.te_current(), jnp.ones((2, 16)), jax.random.key(0)
DEFAULT, HIGHEST = lax.Precision.DEFAULT, lax.Precision.HIGHEST
# MaxText's DenseGeneral passes the second one, which is a parameter of the jaxpr's equation.
SPELLINGS = (
    *(None, (DEFAULT, DEFAULT), DEFAULT, "default", "fastest", "bfloat16"),
    *((None, DEFAULT), ("default", "fastest"), lax.DotAlgorithmPreset.DEFAULT),
)  # fmt: skip
OTHERS = (
    *(HIGHEST, "high", "tensorfloat32", "float32", (DEFAULT, HIGHEST), (HIGHEST, DEFAULT)),
    *(lax.DotAlgorithmPreset.F32_F32_F32, (DEFAULT,), 1),
)  # fmt: skip


def dot_general(precision):
    return fp8jax.dot_general(X, jnp.ones((16, 8)), (((1,), (0,)), ((), ())), precision, recipe=TE)


def einsum(precision):
    return fp8jax.einsum("td,dh->th", X, jnp.ones((16, 8)), precision, recipe=TE)


def of_nnx(layer, recipe=TE, **kwargs):
    return fp8jax.nnx.quantize(layer, fp8jax.Rule("", recipe), **kwargs)(X)


def linear(precision):
    return of_nnx(nnx.Linear(16, 8, precision=precision, rngs=nnx.Rngs(0)))


def general(precision):
    return of_nnx(nnx.LinearGeneral(16, (2, 4), precision=precision, rngs=nnx.Rngs(0)))


def delayed(precision):
    return of_nnx(nnx.Linear(16, 8, precision=precision, rngs=nnx.Rngs(0)), fp8jax.recipes.te_delayed())


def nnx_einsum(precision):
    return of_nnx(nnx.Einsum("td,dh->th", (16, 8), precision=precision, rngs=nnx.Rngs(0)))


def own_class(precision):
    class Own(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((16, 8)))

        def __call__(self, x):
            return lax.dot_general(x, self.w[...], (((1,), (0,)), ((), ())), precision=precision)

    return of_nnx(Own())


def of_linen(layer, recipe=TE):
    model = fp8jax.linen.quantize(layer, fp8jax.Rule("", recipe))
    return model.apply(model.clone(precision=None).init(KEY, X), X)


def dense(precision):
    return of_linen(nn.Dense(8, precision=precision))


def linen_delayed(precision):
    return of_linen(nn.DenseGeneral(8, precision=precision), fp8jax.recipes.te_delayed())


def linen_einsum(precision):
    return of_linen(nn.Einsum((16, 8), "td,dh->th", precision=precision))


LAYERS = (linear, general, delayed, nnx_einsum, own_class, dense, linen_delayed, linen_einsum)


def program(call, precision):
    return str(jax.make_jaxpr(lambda: call(precision))())


@pytest.mark.parametrize("call", [dot_general, einsum, *LAYERS])
def test_the_default_precision_is_one_in_all_spellings(call):
    expected = program(call, None)
    assert "float8_e4m3fn" in expected or "f8_e4m3fn" in expected
    for precision in SPELLINGS if call is dot_general else SPELLINGS[1:2]:
        assert program(call, precision) == expected, precision


@pytest.mark.parametrize("call", [dot_general, einsum, *LAYERS])
def test_another_precision_is_refused_with_its_name(call):
    for precision in OTHERS if call is dot_general else OTHERS[4:5]:
        with pytest.raises(ValueError, match=r"does not support precision=|asks for precision") as refused:
            program(call, precision)
        assert call is own_class or repr(precision) in str(refused.value)
        assert "set it to None" in str(refused.value) or "set its precision to None" in str(refused.value)


def test_where_a_setting_asks_for_it_the_setting_is_named():
    with (
        jax.default_matmul_precision("highest"),
        pytest.raises(ValueError, match="jax_default_matmul_precision, which"),
    ):
        program(linear, None)
