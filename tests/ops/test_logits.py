"""Arguments of a quantized head's kernels, on one device and on a shard of the vocabulary."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import fp8jax
from fp8jax.ops.dispatch import choice
from fp8jax.ops.losses import head
from tests.distance import relative
from tests.rows import covering

QUANTIZE_COTANGENTS = head.quantize_cotangents
CHANNELS, VOCABULARY = 16, 48
RNG = np.random.default_rng(0)
X, W = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((3, 8, CHANNELS), (CHANNELS, VOCABULARY)))
LABELS, WHERE = jnp.asarray(RNG.integers(0, VOCABULARY, (3, 8))), jnp.asarray(RNG.random((3, 8)) > 0.3)
# With logits of some hundreds, the last row has cotangents beyond the bound for a z-loss.
VARIANTS = {"plain": {}, "smoothed": {"label_smoothing": 0.5}, "z_loss": {"z_loss": 1e-2}, "steep": {"z_loss": 1e-2}}


def gradients(x, w, **options):
    kwargs = {"recipe": fp8jax.recipes.HEAD, "where": WHERE, "tokens_per_chunk": 10, **options}
    return jax.value_and_grad(lambda x, w: fp8jax.linear_cross_entropy(x, w, LABELS, **kwargs), (0, 1))(x, w)


def from_facts(recorded, z, _, facts, *args):
    """Returns codes of the cotangents that the kernel computes from logits."""
    recorded.append(facts)
    root, weights = facts.lse[:, None], facts.weights[:, None]
    hit = facts.labels[:, None] == jnp.arange(z.shape[1])
    d = jnp.exp(z - root) * (1 + facts.two_z_loss * root) - facts.label_weight * hit - facts.other_weight
    return QUANTIZE_COTANGENTS(z, jnp.where(weights == 0, 0.0, weights * d), None, *args)


@pytest.mark.parametrize(("variant", "cut"), covering(VARIANTS, [False, True]), ids=str)
def test_cotangents_are_what_their_facts_say(variant, cut, monkeypatch):
    step, calls = functools.partial(gradients, **VARIANTS[variant]), []
    x = X * (40 if variant == "steep" else 1)
    expected = step(x, W)
    monkeypatch.setattr(head, "quantize_cotangents", functools.partial(from_facts, calls))
    if not cut:
        facts = step(x, W)
    else:
        mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        put = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in ((x, P()), (W, P(None, "model")))]
        with jax.set_mesh(mesh):
            facts = jax.device_get(jax.jit(step)(*put))
    assert calls
    # A cotangent at a tie may round either way.
    assert relative(facts, expected) < 2**-8


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
def test_kernels_read_logits_as_a_product_made_them():
    """Logits with an added bias or a cap are not read by the kernel."""
    bias = jnp.zeros(VOCABULARY)
    for options, kernel in (({}, True), ({"bias": bias}, False), ({"softcap": 5.0}, False)):
        with choice.target(capability=90), choice.record_choices() as choices:
            jax.eval_shape(lambda x, w, options=options: gradients(x, w, **options), X, W)
        actual = {name: how.impl for name, how in choices if "of logits" in name}
        assert actual.pop("cotangents of logits") == ("triton" if kernel else "xla")
        assert actual == ({"softmax of logits": "triton"} if kernel else {})


@pytest.mark.parametrize("size", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_no_cotangent_exceeds_its_bound(size, smoothing, z_loss, softcap):
    """In float64, of each token alone: labels that are likely, unlikely and in between, and of all tokens together."""
    rng = np.random.default_rng(1)
    raw, labels = size * rng.normal(size=(24, 12)), np.arange(24) % 12
    raw[::3] -= 2 * size  # the logarithm of the sum may be negative
    raw[np.arange(24), labels] += np.linspace(-4, 8, 24)
    weights = np.where(np.arange(24) % 5, 0.5, 0.0)
    z = raw if softcap is None else softcap * np.tanh(raw / softcap)
    lse = np.log(np.sum(np.exp(z), 1))
    d = np.exp(z - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None] - smoothing / 12
    d[np.arange(24), labels] -= 1 - smoothing
    d = d * (1 if softcap is None else 1 - (z / softcap) ** 2) * weights[:, None]
    largest = np.abs(d).max(1)
    bounds = np.empty(24)
    for rows in (np.s_[:], *(np.s_[i : i + 1] for i in range(24))):
        arrays = jnp.asarray(lse[rows], jnp.float32), jnp.asarray(labels[rows]), jnp.asarray(weights[rows], jnp.float32)
        facts = head.LogitCotangentFacts(*arrays, 2 * z_loss, 1 - smoothing, smoothing / 12)
        logits = jnp.asarray(z[rows], jnp.float32)
        bounds[rows] = head.cotangent_bound(facts, logits, logits[jnp.arange(len(logits)), arrays[1]], softcap)
    assert (bounds >= largest * (1 - 1e-5) - 1e-6).all()
    assert (bounds[weights == 0] == 0).all()
    if (smoothing, z_loss, softcap) == (0.0, 0.0, None):
        np.testing.assert_allclose(bounds, largest, rtol=1e-4, atol=1e-6)
