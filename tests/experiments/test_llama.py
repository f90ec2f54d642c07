"""The model compared with references of its parts, and the table of sizes."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models import llama, sizes
from experiments.models.llama import Block, Llama, LlamaConfig
from experiments.models.rope import RopeScaling
from experiments.train.config import Model

TINY = LlamaConfig(vocab=50, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=48)
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab, (3, 10))


def make(config: LlamaConfig, **kinds) -> Llama:
    return Llama(config, **{"dtype": jnp.float32, "rngs": nnx.Rngs(0), **kinds})


def count(config: LlamaConfig) -> int:
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    ("name", "expected"), [("7b", 6_738_415_616), ("13b", 13_015_864_320), ("30b", 32_528_943_616)]
)
def test_published_sizes_have_their_published_parameter_counts(name, expected):
    assert count(sizes.get(name, 32_000)) == expected


@pytest.mark.parametrize(
    ("name", "tied", "expected"), [("olmo-1b", True, 1_176_764_416), ("olmo-7b", False, 6_888_095_744)]
)
def test_olmo_has_its_published_parameter_counts(name, tied, expected):
    assert count(sizes.get(name, 50_304, tied=tied)) == expected


@pytest.mark.parametrize("name", [name for name in sizes.NAMES if not name.startswith("moe-")])
def test_every_size_is_possible_and_about_as_large_as_its_name(name):
    config = sizes.get(
        name, 256 if name.endswith("-5m") or name in ("1m", "5m", "15m") else 32_000, tied=name == "olmo-1b"
    )
    config.validate()
    stated = float(name.split("-")[-1][:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert 0.85 * stated <= count(config) <= 1.15 * stated


def test_unknown_size_is_an_error_that_lists_the_sizes():
    with pytest.raises(ValueError, match=r"'9b'.*8b"):
        sizes.get("9b", 256)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers", 0, "layers must be at least 1, got 0"),
        ("heads", 5, "dim 32 is not divisible by heads 5"),
        ("kv_heads", 3, "heads 4 is not divisible by kv_heads 3"),
        ("dim", 12, "even head size"),
        ("vocab", -1, "vocab must be at least 1, got -1"),
        ("norm", "none", "norm must be rms or layer or layer_bias, got 'none'"),
        ("channels", 0, "channels must be at least 1 or None, got 0"),
        ("window", 0, "window must be at least 1 or None, got 0"),
        ("learned_positions", -1, "learned_positions must be at least 0, got -1"),
        ("experts", 1, "experts must be 0, for one MLP, or at least 2, got 1"),
        ("experts_per_token", 1, "experts_per_token must be from 0 to experts 0, got 1"),
        (
            "rope_scaling",
            RopeScaling(0.0, 1.0, 4.0, 64),
            r"rope_scaling needs factor > 0, .* got RopeScaling\(factor=0",
        ),
        ("rope_scaling", RopeScaling(8.0, 4.0, 4.0, 64), "0 < low < high"),
        ("rope_scaling", RopeScaling(8.0, 1.0, 4.0, 0), "original_length > 0"),
    ],
)
def test_impossible_shapes_are_errors_that_name_the_value(field, value, message):
    with pytest.raises(ValueError, match=message):
        make(dataclasses.replace(TINY, **{field: value}))


@pytest.mark.parametrize("tied", [False, True])
def test_dtypes_and_shapes(tied):
    model = make(dataclasses.replace(TINY, tied=tied), dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.float32)}
    logits = model(TOKENS)
    assert (logits.shape, logits.dtype) == ((3, 10, TINY.vocab), jnp.bfloat16)
    assert hasattr(model, "head") is not tied


def test_norms_of_olmo_center_and_have_no_parameters():
    config = Model(model="olmo-5m", layers=2, dim=32).shape(TINY.vocab)
    assert config == LlamaConfig(TINY.vocab, 32, 2, 4, 4, 768, norm="layer")
    model = make(config)
    names = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    layers = {
        f"layers/{p}/kernel"
        for p in [*(f"attention/{n}" for n in ("q", "k", "v", "out")), "mlp/gate", "mlp/up", "mlp/down"]
    }
    assert names == {"embed/embedding", "head/kernel"} | layers
    x = np.random.default_rng(4).normal(3, 2, (5, 32)).astype(np.float32)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    for norm in (model.norm, model.layers.mlp_norm, model.layers.attention_norm):
        np.testing.assert_allclose(norm(x), expected, atol=1e-5)


def test_tied_head_is_the_embedding_table():
    tied = make(dataclasses.replace(TINY, tied=True))
    untied = make(TINY)
    nnx.update(untied, nnx.state(tied))
    untied.head.kernel[...] = tied.embed.embedding[...].T
    np.testing.assert_allclose(tied(TOKENS), untied(TOKENS), atol=1e-6)


def test_small_and_large_tables_are_looked_up_alike(monkeypatch):
    model = make(TINY, dtype=jnp.bfloat16)
    expected = np.asarray(model.embed.embedding[...].astype(jnp.bfloat16))[TOKENS]
    for limit in (TINY.vocab, TINY.vocab - 1):
        monkeypatch.setattr(llama, "ONE_HOT", limit)
        np.testing.assert_array_equal(np.asarray(model.embed(TOKENS)), expected)


def test_no_position_sees_a_later_one():
    model, changed = make(TINY), TOKENS.copy()
    changed[:, 6] = (changed[:, 6] + 1) % TINY.vocab
    before, after = np.asarray(model(TOKENS)), np.asarray(model(changed))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.abs(before[:, 6:] - after[:, 6:]).max(axis=-1).min() > 0


def test_rows_of_a_batch_do_not_see_each_other():
    model = make(TINY)
    np.testing.assert_allclose(model(TOKENS)[1:2], model(TOKENS[1:2]), atol=1e-6)


def test_rope_rotates_by_position_times_frequency():
    length, channels, theta = 9, 6, 100.0
    x = np.random.default_rng(1).normal(size=(1, length, 1, channels))
    rotated = llama.apply_rope(jnp.asarray(x, jnp.float32), *llama.rope_tables(length, channels, theta))
    as_complex = x[0, :, 0, :3] + 1j * x[0, :, 0, 3:]
    angle = np.arange(length)[:, None] / theta ** (np.arange(0, channels, 2) / channels)
    expected = as_complex * np.exp(1j * angle)
    actual = np.asarray(rotated)[0, :, 0, :3] + 1j * np.asarray(rotated)[0, :, 0, 3:]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_rope_products_depend_on_the_distance_only():
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(np.broadcast_to(rng.normal(size=8), (1, 12, 1, 8)), jnp.float32) for _ in range(2))
    tables = llama.rope_tables(12, 8, 10_000.0)
    scores = np.einsum("tc,sc->ts", llama.apply_rope(q, *tables)[0, :, 0], llama.apply_rope(k, *tables)[0, :, 0])
    for distance in range(-11, 12):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(scores[0]) > 0.1


def test_grouped_heads_equal_repeated_heads():
    grouped = make(TINY)
    full = make(dataclasses.replace(TINY, kv_heads=TINY.heads))
    state = nnx.to_pure_dict(nnx.state(grouped))
    for name in ("k", "v"):
        kernel = state["layers"]["attention"][name]["kernel"]
        split = kernel.reshape(TINY.layers, TINY.dim, TINY.kv_heads, TINY.head_dim)
        state["layers"]["attention"][name]["kernel"] = jnp.repeat(split, 2, axis=2).reshape(2, TINY.dim, TINY.dim)
    full = nnx.merge(nnx.graphdef(full), state)
    np.testing.assert_allclose(grouped(TOKENS), full(TOKENS), atol=1e-6)


def test_scanned_layers_equal_a_python_loop():
    model = make(TINY)
    x = model.embed(TOKENS.reshape(-1))
    tables = llama.rope_tables(TOKENS.shape[1], TINY.head_dim, TINY.rope_theta)
    stacked = nnx.to_pure_dict(nnx.state(model.layers))
    structure = nnx.graphdef(Block(TINY, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(1)))
    for i in range(TINY.layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
        x = nnx.merge(structure, layer)(x, *tables)
    expected = model.head(model.norm(x)).reshape(*TOKENS.shape, -1)
    np.testing.assert_allclose(model(TOKENS), expected, atol=1e-6)


def test_stacked_layers_start_from_different_parameters():
    kernel = make(TINY).layers.mlp.up.kernel[...]
    assert float(jnp.abs(kernel[0] - kernel[1]).max()) > 0


def test_remat_changes_neither_loss_nor_gradient_and_saves_less():
    config = dataclasses.replace(TINY, layers=8)
    tokens = np.random.default_rng(3).integers(0, TINY.vocab, (8, 64))

    def gradient(remat):
        graphdef, state = nnx.split(make(config, remat=remat))
        state = nnx.to_pure_dict(state)
        program = jax.jit(jax.value_and_grad(lambda s: jnp.square(nnx.merge(graphdef, s)(tokens)).mean()))
        compiled = program.lower(state).compile()
        return compiled(state), compiled.memory_analysis().temp_size_in_bytes

    (plain, plain_bytes), (remat, remat_bytes) = gradient(False), gradient(True)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    assert remat_bytes < 0.6 * plain_bytes


def test_models_know_nothing_of_fp8():
    for path in Path(llama.__file__).parent.glob("*.py"):
        assert not re.search(r"fp8|float8|e4m3|quant", path.read_text(), re.IGNORECASE), path


def test_unrolled_layers_are_the_same_model():
    deep = dataclasses.replace(TINY, layers=3)
    expected, *others = (make(deep, unroll=unroll)(TOKENS) for unroll in (1, 2, 3))
    for logits in others:
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="unroll must be at least 1, got 0"):
        make(deep, unroll=0)
