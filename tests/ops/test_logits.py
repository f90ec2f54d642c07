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
# Of logits of some hundreds the last one has cotangents beyond what is expected of a z-loss.
VARIANTS = {"plain": {}, "smoothed": {"label_smoothing": 0.5}, "z_loss": {"z_loss": 1e-2}, "steep": {"z_loss": 1e-2}}


def gradients(x, w, **options):
    how = {"recipe": fp8jax.recipes.HEAD, "where": WHERE, "tokens_per_chunk": 10, **options}
    return jax.value_and_grad(lambda x, w: fp8jax.linear_cross_entropy(x, w, LABELS, **how), (0, 1))(x, w)


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
    # A cotangent that lies between two codes may go either way.
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
