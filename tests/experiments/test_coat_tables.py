"""COAT's tables of optimizer states, activations and the time of a norm, each number compared with
another computation."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx

import fp8jax
from experiments.models.llama import Llama, LlamaConfig
from experiments.papers import coat_activations, coat_optimizer, coat_speed

TINY = LlamaConfig(vocab=32, dim=32, layers=2, heads=2, kv_heads=1, mlp_dim=48)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 9)).astype(np.int32)


def moments() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    v = np.exp(rng.normal(size=(32, 256)))
    return (rng.normal(size=v.shape) * np.sqrt(v)).astype(np.float32), v.astype(np.float32)


def test_error_of_plain_e4m3_is_that_of_ml_dtypes():
    m, v = moments()
    errors = coat_optimizer.error_table([(m, v)])

    def stored(x):
        groups = x.reshape(32, 2, 128)
        scale = np.abs(groups).max(-1, keepdims=True) / np.float32(448)
        return ((groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape)

    expected = np.mean((stored(m) / np.sqrt(stored(v)) - m / np.sqrt(v)) ** 2)
    # Values halfway between two codes may round either way with the scale's reciprocal.
    np.testing.assert_allclose(errors["E4M3 | E4M3"], expected, rtol=1e-3)
    assert len(errors) == 36
    assert errors["E4M3 + Expand | E4M3 + Expand"] < 0.8 * errors["E4M3 | E4M3"]
    assert errors["E5M2 | E4M3"] > errors["E4M3 | E4M3"]


def test_the_papers_figures_agree_with_its_text():
    paper = coat_optimizer.PAPER
    assert set(paper) < set(coat_optimizer.error_table([moments()]))
    assert round(paper["E4M3 | E4M3"] / paper["E4M3 + Expand | E4M3 + Expand"], 2) == 1.63
    assert round(paper["DE8 | DE8"] / paper["DE8 + Expand | E4M3 + Expand"], 2) == 1.41
    assert min(paper, key=lambda case: paper[case]) == "DE8 + Expand | E4M3 + Expand"


def test_norms_that_keep_codes_give_the_same_result_and_codes_of_it():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64)), jnp.bfloat16)
    arms = coat_speed.norm_arms()
    y, saved = arms[coat_speed.NORM](x), arms[coat_speed.NORM_CODES](x)
    np.testing.assert_array_equal(saved[0], y)
    assert any(leaf.dtype == jnp.uint8 and leaf.shape == x.shape for leaf in saved[1])
    q, _ = arms[coat_speed.GROUP](x)
    error = np.asarray(q.dequantize(), np.float64) - np.asarray(y, np.float64)
    assert np.abs(error).max() <= float(q.scale[0, 0]) * 16
    assert q.spec == fp8jax.QuantSpec("e4m3")


def test_dynamic_range_is_that_of_nonzero_magnitudes_and_expansion_fills_the_format():
    x = np.ones((2, 256), np.float32)
    x[0, :128], x[0, 5], x[0, 6] = 0.5, 8.0, 0.0
    x[1, :128], x[1, 0] = 0.0, -3.0
    x[1, 128], x[1, 129] = -1e6, 1e-3
    actual = coat_optimizer.dynamic_ranges([x], "mu")
    np.testing.assert_allclose(sorted(actual["before"]), [1, 1, 16, 1e9], rtol=1e-5)
    after = dict(zip(actual["before"].round(), actual["after"], strict=True))
    # The exponent is stored in bf16.
    np.testing.assert_allclose(np.log(after[16.0]), np.log(57344), rtol=2**-8)
    np.testing.assert_allclose(np.log(after[max(after)]), np.log(57344), rtol=2**-8)


def test_expansion_spreads_values_over_codes():
    x = np.random.default_rng(0).uniform(0.5, 1, (4, 128)).astype(np.float32)
    x[:, 0], x[:, 1] = 1, 0
    shares = coat_optimizer.code_shares([x], "mu")
    # Without it, values are in one binade, with eight codes from half of the largest on; zeros do not count.
    codes = np.asarray(x * 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_allclose(shares["before"], np.bincount(codes[x != 0], minlength=127) / np.sum(x != 0))
    assert coat_optimizer.entropy(shares["before"]) <= np.log2(9)
    assert coat_optimizer.entropy(shares["after"]) > 6
    assert coat_optimizer.entropy(np.full(8, 1 / 8)) == 3


def test_smaller_groups_cost_bytes_and_lower_the_error():
    table = coat_optimizer.group_size_table([moments()])
    errors, sizes = zip(*table.values(), strict=True)
    assert list(errors) == sorted(errors)
    np.testing.assert_allclose(sizes, [2 * (1 + 6 / group) for group in table])


def test_activations_are_stored_and_their_gradients_pass():
    spec = coat_activations.spec("group", 16)
    x = jax.random.normal(jax.random.key(0), (4, 32))
    value, gradient = jax.value_and_grad(lambda x: jnp.vdot(x, coat_activations.quantize_and_decode(x, spec)))(x)
    stored = fp8jax.quantize(x, spec).dequantize()
    np.testing.assert_array_equal(coat_activations.quantize_and_decode(x, spec), stored)
    np.testing.assert_allclose(value, jnp.vdot(x, stored), rtol=1e-6)
    np.testing.assert_allclose(gradient, stored + x, rtol=1e-6)


def test_probe_sees_the_last_block_and_the_gradient_before_the_first():
    model = Llama(TINY, dtype=jnp.float32, rngs=nnx.Rngs(0))
    hidden, gradient = coat_activations.probe(model, jnp.asarray(TOKENS))
    logits = model.head(model.norm(jnp.asarray(hidden)))
    np.testing.assert_allclose(logits.reshape(2, 8, 32), model(jnp.asarray(TOKENS[:, :-1])), atol=1e-5)
    table = model.embed.embedding

    def loss(values):
        table.set_value(values)
        logits = model(TOKENS[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

    start = jnp.array(table.get_value())
    rows = jnp.zeros_like(start).at[TOKENS[:, :-1].reshape(-1)].add(gradient)
    direction = jax.random.normal(jax.random.key(1), start.shape)
    difference = (loss(start + 1e-3 * direction) - loss(start - 1e-3 * direction)) / 2e-3
    table.set_value(start)
    np.testing.assert_allclose(jnp.vdot(rows, direction), difference, rtol=0.03, atol=1e-3)
    quantized = coat_activations.quantize_activations(model, coat_activations.spec("group", 16))
    moved, _ = coat_activations.probe(quantized, jnp.asarray(TOKENS), backward=False)
    assert 0 < coat_activations.by_token(moved, hidden).mean() < 0.01 * np.mean(hidden**2)
    again, _ = coat_activations.probe(model, jnp.asarray(TOKENS), backward=False)
    np.testing.assert_array_equal(again, hidden)
