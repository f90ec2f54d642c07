"""Operations, layers and optimizers under JAX's strict settings: ranks, dtypes, 64 bits, leaks and NaN."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax

X = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)
ROW, OUT = np.ones(64, np.float32), np.ones(32, np.float32)
LINEAR = ("te_current", "coat", "deepseek", "moss", "moss_mx", "int8_block", "switchback", "fp8_lm")
CONTEXTS = ("bf16", "coat", "coat_fast", "int8_fallback", "fast")
SPECS = ("e4m3", "e5m2:token", "int8:group16", "int10:group16", "e4m3:block16", "de8:group16", "ude8:group16",
         "e4m3:group16+expand", "e4m3:mx32+token", "e5m2:mx32+ocp", "e4m3:group16+stochastic")  # fmt: skip


def key():
    return jax.random.key(0)


def quantized(x):
    specs = [fp8jax.QuantSpec.parse(spec) for spec in SPECS]
    codes = [fp8jax.quantize(abs(x), spec, key=key() if spec.rounding == "stochastic" else None) for spec in specs]
    return [q.dequantize(dtype) for q in codes for dtype in (jnp.float32, jnp.bfloat16)]


def linear(name, x, w):
    def loss(x, w):
        y = fp8jax.linear(x, w, recipe=name, key=key(), bias=jnp.asarray(OUT))
        y = fp8jax.einsum("td,dh->th", y, w.swapaxes(0, 1), recipe=name, key=key())
        return jnp.sum(jnp.sin(y).astype(jnp.float32))

    return [jax.grad(loss, (0, 1))(jnp.asarray(x, dtype), w) for dtype in (jnp.float32, jnp.bfloat16)]


def scaled(name, x, w):
    recipe = fp8jax.recipes.get(name)
    state = fp8jax.init_scaling(recipe)

    def loss(x, w, slot):
        y, observed = fp8jax.scaled_linear(x, w, state, slot, recipe=recipe, key=key(), bias=jnp.asarray(OUT))
        return jnp.sum(jnp.sin(y)), observed

    return jax.grad(loss, (0, 1, 2), has_aux=True)(x, w, jnp.zeros((), jnp.float32))


def context(name, x, row):
    part = fp8jax.recipes.get(name).context

    def loss(x, row):
        y = fp8jax.rms_norm(x, row, recipe=part) + fp8jax.layer_norm(x, row, row, recipe=part)
        return jnp.sum(fp8jax.glu(y, x, recipe=part) + fp8jax.activation(x, recipe=part, activation="gelu"))

    return jax.grad(loss, (0, 1))(x, row)


def block(name, x, w):
    def loss(x, w):
        x = fp8jax.activation(fp8jax.rms_norm(x, None, recipe=name), recipe=name, activation="silu")
        x, gate, up = fp8jax.norm_linear(x, jnp.asarray(ROW), [w, w], recipe=name, residual=True)
        return jnp.sum(fp8jax.glu_linear(gate, up, w.swapaxes(0, 1), x, recipe=name))

    return jax.grad(loss, (0, 1))(x, w)


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm, self.up = nnx.RMSNorm(64, rngs=rngs), nnx.Linear(64, 32, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(64, 32, use_bias=False, rngs=rngs)
        self.down = nnx.Einsum("td,dh->th", (32, 64), rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        return self.down(nnx.silu(self.gate(h)) * self.up(h))


def of_nnx(name, x):
    model = fp8jax.nnx.quantize(Model(), fp8jax.Rule(".*", name))
    wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
    graph, params, rest = nnx.split(model, wrt, ...)

    def loss(params):
        whole = nnx.merge(graph, params, rest, copy=True)
        return jnp.mean(whole(x) ** 2), nnx.split(whole, wrt, ...)[2]

    grads, state = jax.grad(loss, has_aux=True)(params)
    after = nnx.merge(graph, params, state, copy=True)
    grads = fp8jax.nnx.advance_scaling(after, grads) if name in ("te_delayed", "int8_fallback") else grads
    return grads, nnx.state(after)


def head(recipe, x, w):
    labels, counts = jnp.arange(16), jnp.arange(16) > 3

    def loss(x, w, bias):
        options = {"bias": bias, "where": counts, "z_loss": 1e-2, "label_smoothing": 0.1, "recipe": recipe}
        return fp8jax.linear_cross_entropy(x, w, labels, **options)

    return jax.value_and_grad(loss, (0, 1, 2))(x.astype(jnp.bfloat16), w, jnp.asarray(OUT))


def of_linen(name, x):
    layers = [nn.RMSNorm(), nn.Dense(32, use_bias=False), nn.silu, nn.Dense(64, use_bias=False)]
    model = fp8jax.linen.quantize(nn.Sequential(layers), fp8jax.Rule(".*", name))
    variables = model.init(key(), x)
    return jax.grad(lambda v: jnp.mean(model.apply(v, x) ** 2))(variables)


OPTIMIZERS = {
    "compressed_adamw": lambda: fp8jax.compressed_adamw(1e-3, weight_decay=0.1, min_size=0),
    "0.999": lambda: fp8jax.compressed_adamw(optax.linear_schedule(0.0, 1e-3, 10), b2=0.999, min_size=0),
    "de8": lambda: fp8jax.compressed_adamw(1e-3, mu="de8", nu="ude8", expand=False, min_size=0),
    "bf16": lambda: fp8jax.compressed_adamw(1e-3, mu="int8", nu="bf16", min_size=0),
    "lion": lambda: fp8jax.compress_state(optax.lion(1e-3), min_size=0),
    "fp8lm_adamw": lambda: fp8jax.fp8lm_adamw(1e-3, weight_decay=0.1),
    "clipped": lambda: fp8jax.with_clipping(1.0, fp8jax.compressed_adamw(1e-3, min_size=0)),
    "tracked": lambda: optax.chain(fp8jax.compressed_adamw(1e-3, min_size=0), fp8jax.track_weight_amax()),
}


def optimizer(name, grads):
    tx, params = OPTIMIZERS[name](), jax.tree.map(lambda g: jnp.ones(g.shape, jnp.float32), grads)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    stepped = tx.step(grads, state, params) if hasattr(tx, "step") else None
    return optax.apply_updates(params, updates), state, stepped


TREE = {"w": np.tile(W, (1, 4)), "b": OUT}  # rows of a group of moments
TABLE = {
    "quantize": (quantized, X),
    **{f"linear {name}": (functools.partial(linear, name), X, W) for name in LINEAR},
    **{f"scaled {name}": (functools.partial(scaled, name), X, W) for name in ("te_delayed", "int8_fallback")},
    **{f"context {name}": (functools.partial(context, name), X, ROW) for name in CONTEXTS},
    **{
        f"head {recipe and 'in codes'}": (functools.partial(head, recipe), X, W)
        for recipe in (None, fp8jax.recipes.HEAD)
    },
    **{f"block {name}": (functools.partial(block, name), X, W) for name in ("coat_fast", "fast")},
    **{f"nnx {name}": (functools.partial(of_nnx, name), X) for name in ("coat_fast", "te_delayed", "int8_fallback")},
    **{f"linen {name}": (functools.partial(of_linen, name), X) for name in ("te_current", "coat")},
    **{f"optimizer {name}": (functools.partial(optimizer, name), TREE) for name in OPTIMIZERS},
}


@contextlib.contextmanager
def no_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


SETTINGS = {
    "ranks and dtypes": no_promotion,
    "leaks": jax.checking_leaks,
    "64 bits": lambda: jax.enable_x64(True),
}


def kinds(name):
    fn, *args = TABLE[name]
    return [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(lambda *args: fn(*args), *args))]


# Looking for leaks collects garbage after each trace.
FEW = ("linear te_current", "scaled te_delayed", "context coat", "nnx coat_fast", "optimizer fp8lm_adamw")
default = functools.cache(kinds)


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_strict_setting_of_jax_changes_nothing(setting):
    """Programs are traced, not run: no error, and the same dtypes."""
    failed = {}
    for name in FEW if setting == "leaks" else TABLE:
        expected = default(name)
        try:
            with SETTINGS[setting]():
                actual = kinds(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            continue
        if actual != expected:
            failed[name] = [pair for pair in zip(actual, expected, strict=True) if pair[0] != pair[1]][:3]
    assert not failed


@pytest.mark.parametrize("name", ["quantize", "linear coat", "scaled int8_fallback", "optimizer compressed_adamw"])
def test_zeros_make_no_nan_on_the_way(name):
    fn, *args = TABLE[name]
    zeros = jax.tree.map(np.zeros_like, args)
    with jax.debug_nans(True):
        for x in jax.tree.leaves(jax.jit(fn)(*zeros)):
            assert np.isfinite(np.asarray(x, np.float32)).all()
