"""Norms and activations are recognized in any spelling; similar functions stay unchanged.

Recognized functions have the same values, and gradients of the codes of their inputs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fp8jax
from fp8jax.ops.quantization import fused_reference
from fp8jax.recipes import Context
from tests.distance import relative
from tests.programs import chosen

WIDTH, INNER = 32, 48
# Products are unquantized, so that only residuals make a difference.
KEEPS = dataclasses.replace(
    fp8jax.recipes.bf16(), name="keeps", context=Context("e4m3:group16", recompute_activations=True)
)
SHAPES = {"up": (WIDTH, INNER), "gate": (WIDTH, INNER), "down": (INNER, WIDTH), "square": (WIDTH, WIDTH)}
SHAPES |= {"n": (WIDTH,), "m": (WIDTH,), "tokens": (6, 1), "one": (1,)}
P = {name: 0.3 * jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(SHAPES.items())}
X = jax.random.normal(jax.random.key(9), (2, 6, WIDTH)) + 0.2
BF16 = jnp.bfloat16
silu, sigmoid, tanh = jax.nn.silu, jax.nn.sigmoid, jnp.tanh


def mean(x, axis=-1):
    return jnp.mean(x, axis, keepdims=True)


def rms(x, scale, of=None, eps=1e-6):
    return x * lax.rsqrt(mean(jnp.square(x if of is None else of)) + eps) * scale


def between(f):
    return lambda p, x: f(x @ p["gate"], x @ p["up"], p) @ p["down"]


def before(f):
    return lambda p, x: f(x, p) @ p["square"]


def rounded(x):
    return x.astype(BF16).astype(jnp.float32)


@jax.custom_jvp
def own_silu(x):
    return silu(x)


own_silu.defjvp(lambda x, t: (silu(*x), t[0]))
ACTIVATIONS = {
    "silu(g) * u": between(lambda g, u, p: silu(g) * u),
    "u * g / (1 + exp(-g))": between(lambda g, u, p: u * g / (1 + jnp.exp(-g))),
    "g * (1 + tanh(g / 2)) / 2": between(lambda g, u, p: g * (1 + tanh(g / 2)) / 2),
    "silu(g) / 8 * 8": between(lambda g, u, p: 2 * (2 * (2 * (0.5 * (0.5 * (0.5 * silu(g)))))) * u),
    "gelu": between(lambda g, u, p: jax.nn.gelu(g, approximate=False) * u),
    "gelu of tanh": between(lambda g, u, p: jax.nn.gelu(g)),
    "gelu by erf": between(lambda g, u, p: u * (0.5 * g * (1 + lax.erf(g * 0.70710678)))),
    "gelu by hand": between(lambda g, u, p: 0.5 * g * (1 + tanh(0.79788456 * (g + 0.044715 * g**3)))),
    "silu(2g) * u, of 2g": between(lambda g, u, p: silu(2 * g) * u),
    "silu(clip(g)) * u, of clip(g)": between(lambda g, u, p: silu(jnp.clip(g, -3, 3)) * u),
    "silu(stop_gradient(g)) * u, of that": between(lambda g, u, p: silu(lax.stop_gradient(g)) * u),
    "silu(g + bias) * (u * 2)": between(lambda g, u, p: silu(g + p["down"][:, 0]) * (u * 2)),
    "silu(g) * u, cast": between(lambda g, u, p: (silu(g.astype(BF16)) * u.astype(BF16)).astype(g.dtype)),
    "times that of other tokens": between(lambda g, u, p: silu(g) * jnp.roll(silu(g), 1, 1)),
    "halves": lambda p, x: (lambda a, b: silu(a) * b)(*jnp.split(x @ p["gate"], 2, -1)) @ p["down"][: INNER // 2],
}  # fmt: skip
NO_ACTIVATIONS = {
    "quick gelu": between(lambda g, u, p: g * sigmoid(1.702 * g) * u),
    "twice": between(lambda g, u, p: silu(g) * u * 2),
    "u squared": between(lambda g, u, p: silu(g) * u * u),
    "sum": between(lambda g, u, p: silu(g) + u),
    "sigmoid": between(lambda g, u, p: sigmoid(g) * u),
    "mish": between(lambda g, u, p: jax.nn.mish(g)),
    "softplus": between(lambda g, u, p: jax.nn.softplus(g)),
    "silu(g) * g": between(lambda g, u, p: silu(g) * g),
    "relu": between(lambda g, u, p: jax.nn.relu(g) * u),
    "leaky": between(lambda g, u, p: silu(g) * u + 0.01 * g),
    "softly capped far out": between(lambda g, u, p: 500 * tanh(silu(g) / 500) * u),
    "a corner far out": between(lambda g, u, p: jnp.minimum(silu(g), 500.0) * u),
    "a choice": between(lambda g, u, p: jnp.where(g > 0, silu(g), silu(g)) * u),
    "a derivative of its own": between(lambda g, u, p: own_silu(g) * u),
    "stopped in the middle": between(lambda g, u, p: g * lax.stop_gradient(sigmoid(g)) * u),
    "stopped at the end": between(lambda g, u, p: lax.stop_gradient(silu(g)) * u + 0 * u),
    "times a parameter": between(lambda g, u, p: silu(g) * p["down"][:, 0]),
    "silu(1.01 g)": between(lambda g, u, p: g * sigmoid(1.01 * g) * u),
    "three factors": between(lambda g, u, p: silu(g) * u * tanh(u)),
    "a power": between(lambda g, u, p: silu(g) ** 2 * u),
}
NORMS = {
    "rms": before(lambda x, p: rms(x, p["n"])),
    "x / sqrt": before(lambda x, p: x / jnp.sqrt(mean(x * x) + 1e-5) * p["n"]),
    "power": before(lambda x, p: p["n"] * (x * (mean(x**2) + 1e-5) ** -0.5)),
    "1 + scale": before(lambda x, p: rms(x, 1 + p["n"])),
    "no scale": before(lambda x, p: rms(x, 1.0)),
    "one scale": before(lambda x, p: rms(x, p["one"])),
    "two scales": before(lambda x, p: rms(x, p["n"]) * p["m"]),
    "sum of squares by hand": before(lambda x, p: x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) / WIDTH + 1e-6)),
    "in fp32": before(lambda x, p: rms(x.astype(jnp.bfloat16).astype(jnp.float32), p["n"])),
    "layer norm": before(
        lambda x, p: (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * p["n"] + p["m"]
    ),
    "layer norm of squares": before(lambda x, p: (x - mean(x)) * lax.rsqrt(mean(x * x) - mean(x) ** 2 + 1e-5) * p["n"]),
    "layer norm, rounded first": before(
        lambda x, p: (lambda z: (z - mean(z)) * lax.rsqrt(mean(z * z) - mean(z) ** 2 + 1e-5))(rounded(x)) * p["n"]
    ),
    "layer norm, mean far below": before(
        lambda x, p: (lambda z: z * lax.rsqrt(mean(z * z) + 1e-5) * p["n"])(x - 2 * (2 * (mean(x) / 4)))
    ),
    "layer norm, clipped": before(
        lambda x, p: (x - mean(x)) * lax.rsqrt(jnp.maximum(mean(x * x) - mean(x) ** 2, 0) + 1e-5) * p["n"]
    ),
    "of heads": before(lambda x, p: rms(x.reshape(2, 6, 4, 8), 1.0).reshape(x.shape)),
    "of a sum": before(lambda x, p: rms(x + tanh(x), p["n"])),
    "scale by einsum": before(lambda x, p: jnp.einsum("...k,k->...k", rms(x, 1.0), p["n"])),
    "scale by einsum, first": before(lambda x, p: jnp.einsum("k,btk->btk", p["n"], rms(x, 1.0))),
    "scale by einsum of rows": lambda p, x: jnp.einsum("tk,k->tk", rms(x[0], 1.0), p["n"]) @ p["square"],
}
NO_NORMS = {
    "of another": before(lambda x, p: rms(x, p["n"], x + 1)),
    "stopped": before(lambda x, p: x * lax.stop_gradient(lax.rsqrt(mean(x * x) + 1e-6)) * p["n"]),
    "adaptive": before(lambda x, p: rms(x, tanh(x))),
    "adaptive by rows": before(lambda x, p: rms(x, tanh(x[..., :1]))),
    "first axis": before(lambda x, p: x * lax.rsqrt(mean(x * x, 1) + 1e-6)),
    "no mean": before(lambda x, p: x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)),
    "sum of means": before(lambda x, p: x * lax.rsqrt(jnp.sum(mean(x * x) + 0 * x, -1, keepdims=True) + 1e-6)),
    "sum of spread means": before(
        lambda x, p: x * lax.rsqrt(jnp.sum(jnp.broadcast_to(mean(x * x), x.shape), -1, keepdims=True) + 1e-6)
    ),
    "eps outside": before(lambda x, p: x / (jnp.sqrt(mean(x * x)) + 1e-3)),
    "no eps": before(lambda x, p: x * lax.rsqrt(mean(x * x))),
    "scale of tokens": before(lambda x, p: rms(x, p["tokens"])),
    "scale of tokens, as many as channels": lambda p, x: rms(x[..., :6], p["tokens"]) @ p["square"][:6],
    "the same, spread": lambda p, x: (
        rms(x[..., :6], lax.broadcast_in_dim(p["tokens"][:, 0], (6, 6), (0,))) @ p["square"][:6]
    ),
    "sharper": before(lambda x, p: x * (mean(x * x) + 1e-6) ** -0.6),
    "mean not taken away": before(lambda x, p: x * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * p["n"]),
    "half the mean": before(lambda x, p: (x - 0.5 * mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)),
    "unbiased": before(lambda x, p: (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True, ddof=1) + 1e-5)),
    "absolute": before(lambda x, p: x / (mean(jnp.abs(x)) + 1e-6)),
    "clipped mean square": before(lambda x, p: x * lax.rsqrt(jnp.maximum(mean(x * x), 1e-2))),
    "of a part": before(lambda x, p: x * lax.rsqrt(mean(x[..., :8] ** 2) + 1e-6)),
    "scale of tokens by einsum": before(lambda x, p: jnp.einsum("btk,t->btk", rms(x, 1.0), p["tokens"][:, 0])),
    "scale of tokens, turned by einsum": lambda p, x: (
        jnp.einsum("btk,t->bkt", rms(x[..., :6], 1.0), p["tokens"][:, 0]) @ p["square"][:6]
    ),
    "rows in another order by einsum": before(lambda x, p: jnp.einsum("btk,k->tbk", rms(x, 1.0), p["n"])),
    "scale of data by einsum": before(lambda x, p: jnp.einsum("btk,btk->btk", rms(x, 1.0), x)),
    "a little besides": before(lambda x, p: rms(x, 1.0) + 1e-3 * tanh(x)),
    "bias of data": before(lambda x, p: rms(x, p["n"]) + x),
}


def replaced_kinds(fn):
    """Returns the kinds of replaced operations besides matmuls."""
    return [entry.kind for entry in fp8jax.transform(fn, KEEPS).explain(P, X).entries if not entry.is_product]


@pytest.mark.parametrize("name", [*ACTIVATIONS, *NORMS])
def test_found_by_what_it_computes(name):
    fn = {**ACTIVATIONS, **NORMS}[name]
    (kind,) = replaced_kinds(fn)
    assert kind.startswith(("silu", "gelu") if name in ACTIVATIONS else ("RMSNorm", "LayerNorm"))
    assert ("LayerNorm" in kind) == ("layer norm" in name)
    assert ("gelu(" in kind) == (name in ("gelu", "gelu by erf"))

    def run(f):
        loss = lambda p, x: (jnp.sum(jnp.sin(y := f(p, x))), y)  # noqa: E731
        (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(P, X)
        return y, gradients

    (want, expected), (actual, gradients) = run(fn), run(fp8jax.transform(fn, KEEPS))
    # Forward the same, but for the rounding of sums, or of three operations in bf16.
    assert relative(actual, want) < (1e-2 if "cast" in name else 1e-6)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        # e4m3 has steps of 1/8 of the saved value.
        assert relative(a, b) < 0.06 if b.any() else not a.any()


@pytest.mark.parametrize("name", [*NO_ACTIVATIONS, *NO_NORMS])
def test_left_as_written(name):
    assert replaced_kinds({**NO_ACTIVATIONS, **NO_NORMS}[name]) == []


def test_an_activation_that_cannot_be_probed_is_named(monkeypatch):
    monkeypatch.setitem(fused_reference.ACTIVATIONS, "sine", lambda x: x * jnp.sin(x))
    message = r"(?s)the activation .* sin .*fp8jax.rewrite.probes does not evaluate"
    with pytest.raises(NotImplementedError, match=message):
        replaced_kinds(ACTIVATIONS["silu(g) * u"])


def test_an_activation_of_someone_elses(monkeypatch):
    """Added as CONTRIBUTING describes: recognized, saves codes, and uses no kernel."""
    quick = lambda x: x * sigmoid(1.702 * x)  # noqa: E731
    monkeypatch.setitem(fused_reference.ACTIVATIONS, "quick_gelu", quick)
    fn = NO_ACTIVATIONS["quick gelu"]
    assert replaced_kinds(fn) == ["quick_gelu(gate) * up"]
    fast = fp8jax.transform(fn, KEEPS)
    expected, actual = (jax.grad(lambda p, f=f: jnp.sum(jnp.sin(f(p, X))))(P) for f in (fn, fast))
    assert all(relative(actual[name], expected[name]) < 0.06 for name in ("gate", "up", "down"))
    run = lambda x: fp8jax.glu(x, x, recipe=KEEPS, activation="quick_gelu")  # noqa: E731
    assert chosen(run, jnp.ones((8, 512)), capability=90).reason == "not the kernel: it has no quick_gelu"


def test_a_scale_by_einsum_is_part_of_its_norm_and_no_product():
    """As in MaxText: an einsum that contracts nothing, which must not be quantized."""
    fast = fp8jax.transform(NORMS["scale by einsum"], "coat")
    text = fast.explain(P, X)
    assert [(e.path, e.kind) for e in text.entries if e.is_product] == [("square", "dot_general")]
    assert text.skipped == ()
    shifted = fp8jax.transform(before(lambda x, p: jnp.einsum("...k,k->...k", tanh(x), 1 + p["n"])), "coat")
    assert [e.path for e in shifted.explain(P, X).entries] == ["square"]
    outer = fp8jax.transform(lambda p, x: jnp.einsum("btk,kn->btkn", x, p["square"]).sum(2) @ p["square"], "coat")
    text = outer.explain(P, X)
    assert [e.reason for e in text.skipped] == ["contracts nothing"]
    assert len(text.quantized) == 1
