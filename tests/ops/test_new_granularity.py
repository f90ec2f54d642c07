"""Granularities added as CONTRIBUTING describes: quantize, matmuls of a linear layer, explain."""

import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax.core import spec as specs
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch import choice
from fp8jax.ops.matmul import matmul
from fp8jax.ops.quantization import quantize as ops
from fp8jax.recipes import Linear

KINDS = ("tile", "half")
X = jax.random.normal(jax.random.key(0), (10, 64)) * jnp.exp2(jnp.arange(10.0))[:, None]
W = jax.random.normal(jax.random.key(1), (64, 48))
as_written = QuantSpec.block_shape


def block_shape(self: QuantSpec, shape) -> tuple[int, ...]:
    """ "tile": four rows by `group_size` along the last axis; "half": half of the last axis of a row."""
    if self.granularity == "tile":
        return (*[1] * (len(shape) - 2), 4, self.group_size)
    return (*[1] * (len(shape) - 1), -(-shape[-1] // 2)) if self.granularity == "half" else as_written(self, shape)


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setattr(specs, "GRANULARITIES", (*specs.GRANULARITIES, *KINDS))
    monkeypatch.setattr(specs, "SIZED_GRANULARITIES", (*specs.SIZED_GRANULARITIES, "tile"))
    monkeypatch.setattr(QuantSpec, "block_shape", block_shape)


def recipe(kind: str) -> Linear:
    e4m3, e5m2 = f"e4m3:{kind}", f"e5m2:{kind}"
    return Linear(e4m3, e4m3, e5m2, w_dgrad=e4m3, dy_wgrad=e5m2, x_wgrad=e4m3)


def decoded(x, text: str) -> np.ndarray:
    """Returns decoded values with a scale for each block, in float64."""
    x = np.asarray(x, np.float64)
    high, wide = block_shape(QuantSpec.parse(text), x.shape)
    fmt = fp8jax.formats.get(text.partition(":")[0])
    out = np.zeros_like(x)
    for i in range(0, x.shape[0], high):
        for j in range(0, x.shape[1], wide):
            part = x[i : i + high, j : j + wide]
            scale = np.float64(np.float32(np.abs(part).max()) * np.float32(1 / fmt.max))
            out[i : i + high, j : j + wide] = (part / scale).astype(np.float32).astype(fmt.dtype).astype(float) * scale
    return out


@pytest.mark.parametrize(("kind", "scales"), [("tile16", (3, 4)), ("half", (10, 2))])
def test_codes_and_all_three_products_have_its_scales(kind, scales):
    q = fp8jax.quantize(X, f"e4m3:{kind}")
    q.validate()
    assert q.scale.shape == scales
    np.testing.assert_allclose(q.dequantize(), decoded(X, f"e4m3:{kind}"), rtol=1e-6)
    dy = jax.random.normal(jax.random.key(2), (10, 48))
    y, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=recipe(kind)), X, W)
    dx, dw = vjp_fn(dy)
    e4m3, e5m2 = (lambda x, name=name: decoded(x, f"{name}:{kind}") for name in ("e4m3", "e5m2"))
    np.testing.assert_allclose(y, e4m3(X) @ e4m3(W.T).T, rtol=1e-4, atol=1e-4 * np.abs(y).max())
    np.testing.assert_allclose(dx, e5m2(dy) @ e4m3(W).T, rtol=1e-4, atol=1e-4 * np.abs(dx).max())
    np.testing.assert_allclose(dw, e4m3(e4m3(X).T) @ e5m2(dy.T).T, rtol=1e-4, atol=1e-4 * np.abs(dw).max())


@pytest.mark.parametrize(("kind", "spans"), [("tile16", True), ("half", False)])
@pytest.mark.parametrize("make", [lambda: nnx.Linear(64, 48, rngs=nnx.Rngs(0)), lambda: nn.Dense(48)])
def test_explain_knows_whether_tokens_share_its_scales(kind, spans, make):
    report = fp8jax.explain(make(), recipe(kind), X)
    assert [layer.token_spanning_spec for layer in report.layers] == [f"e4m3:{kind}" if spans else None]
    assert f"e4m3:{kind} x e4m3:{kind}" in str(report)


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
@pytest.mark.parametrize("kind", ["tile128", "half"])
def test_no_kernel_takes_what_it_does_not_know(kind):
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    with choice.target(capability=90), choice.record_choices() as choices:
        q, _ = jax.eval_shape(lambda x: ops.quantize(x, f"e4m3:{kind}"), x)
        jax.eval_shape(matmul.matmul, q, q)
    (_, how), (_, product) = choices
    assert (how.impl, "not e4m3" in how.reason) == ("xla", True), how
    # The product reads rows in parts of 128 of the contraction, for any block of scales.
    assert product.impl == ("mosaic" if jax.__version_info__ >= (0, 11) else "xla"), product
