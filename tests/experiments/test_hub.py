"""Hugging Face checkpoints, compared with results of transformers (tests/data/hub), and damaged or foreign files."""

import json
import re
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import mesh
from experiments.errors import UserError
from experiments.hub import families, files
from experiments.hub.load import load
from tests.experiments import hub_cases as cases
from tests.rows import few


def checkpoint(folder, case, **kwargs):
    golden = cases.golden(case)
    return cases.write(folder, golden["config"], golden["shapes"], **kwargs), golden


@pytest.mark.parametrize("case", few(cases.CASES, "llama31"))
def test_logits_are_those_of_transformers(case, tmp_path):
    folder, golden = checkpoint(tmp_path, case, shards=3)
    model = load(folder).model(jnp.float32)
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(model(jnp.asarray(golden["tokens"])))
    expected = np.asarray(golden["logits"])
    assert np.linalg.norm(logits - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("case", "dtype"), [("llama31", np.float16), ("qwen2", ml_dtypes.bfloat16), ("gpt2", np.float16)]
)
def test_parameters_keep_the_bits_of_the_files_or_are_cast(case, dtype, tmp_path):
    folder, _ = checkpoint(tmp_path, case, dtype=dtype)
    loaded, cast = load(folder).params, load(folder, dtype=jnp.float32).params
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {np.dtype(dtype)}
    assert {x.dtype for x in jax.tree.leaves(cast)} == {np.dtype(np.float32)}
    name = "transformer.wte.weight" if case == "gpt2" else "model.embed_tokens.weight"
    expected = cases.draw(name, (cases.VOCAB, 32)).astype(dtype)
    assert np.asarray(loaded["embed"]["embedding"]).tobytes() == expected.tobytes()
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(cast), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), b)


def test_values_beyond_float16_are_no_infinities(tmp_path):
    folder, golden = checkpoint(tmp_path, "llama3")
    weights = {n: cases.draw(n, tuple(s)) for n, s in golden["shapes"].items()}
    weights["model.norm.weight"][3] = 7e4
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        UserError, match=r"model\.safetensors: model\.norm\.weight has values outside the range of float16"
    ):
        load(folder, dtype=jnp.float16)
    # If the file itself has one, it is kept.
    with np.errstate(over="ignore"):
        save_file({n: x.astype(np.float16) for n, x in weights.items()}, folder / "model.safetensors")
    assert np.isinf(load(folder).params["norm"]["scale"][3])


def test_parameters_lie_on_a_mesh_as_in_training(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh, "SMALLEST", 256)
    folder, _ = checkpoint(tmp_path, "qwen3", shards=2)
    devices = mesh.make(2, 2, jax.devices()[:4])
    placed, whole = load(folder, mesh=devices), load(folder)
    kernel = placed.params["layers"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.spec == jax.P(None, "fsdp")
    assert kernel.addressable_shards[0].data.shape == (2, 16, 48)
    for a, b in zip(jax.tree.leaves(placed.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_tensors_are_read_one_at_a_time(tmp_path):
    golden = cases.golden("llama3")
    config = golden["config"] | {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "head_dim": None,
    }
    sizes = {32: 256, 48: 1024, 16: 128}
    shapes = {
        name.replace(".0.", f".{i}."): [sizes.get(n, n) for n in shape]
        for name, shape in golden["shapes"].items()
        for i in range(4)
        if ".1." not in name
    }
    folder = cases.write(tmp_path, config, shapes, shards=3)
    tracemalloc.start()
    params = jax.tree.leaves(load(folder).params)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size, largest = sum(x.nbytes for x in params), max(x.nbytes for x in params)
    assert size > 15 * 2**20
    assert peak < size + 1.5 * largest + 2 * 2**20


BROKEN = {
    "unknown architecture": ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*supported are Llama"),
    "unknown model": ({"model_type": "gemma"}, "model_type 'gemma'"),
    "unknown field": ({"logit_softcapping": 30.0}, r"unknown fields.*logit_softcapping = 30\.0"),
    "rope type": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
    "rope type of old": ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope type 'linear' is not"),
    "rope fields": ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "llama3 lacks low_freq_factor"),
    "rope rest": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "rope text": ({"rope_parameters": "llama3"}, "rope_parameters is 'llama3', not an object"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "bias": ({"attention_bias": True}, "attention_bias is True"),
    "bias of the MLP": ({"mlp_bias": True}, "mlp_bias is True"),
    "clip": ({"clip_qkv": 8.0}, r"clip_qkv = 8\.0"),
    "window": ({"sliding_window": 16}, "sliding_window = 16"),
    "text": ({"hidden_size": "wide"}, "hidden_size is 'wide', not a number"),
    "half a layer": ({"num_hidden_layers": 1.5}, r"num_hidden_layers is 1\.5, not an integer"),
    "no number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a number"),
    "no number but a truth": ({"num_key_value_heads": True}, "num_key_value_heads is True, not a number"),
    "rope number": ({"rope_parameters": {"rope_theta": "big"}}, "rope settings .*'big'.* are not numbers"),
    "tied text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
    "architectures": ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', not a list"),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved is True"),
    "three axes": ({"use_mrope": True}, "use_mrope is True"),
    "missing": ({"hidden_size": None}, "lacks hidden_size"),
    "shape": ({"num_attention_heads": 5}, "heads 5"),
    "sizes": ({"intermediate_size": 64}, r"mlp\.gate_proj\.weight is \[48, 32\], but config\.json requires \[64, 32\]"),
    "more layers": ({"num_hidden_layers": 3}, r"lacks model\.layers\.2\.self_attn\.q_proj\.weight"),
    "fewer layers": ({"num_hidden_layers": 1}, r"9 tensors that do not belong .* config\.json: model\.layers\.1"),
    "tied": ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight, but"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_understood_is_refused_by_name(name, tmp_path):
    change, message = BROKEN[name]
    folder, golden = checkpoint(tmp_path, "llama3")
    (folder / "config.json").write_text(json.dumps(golden["config"] | change))
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has .*sliding_attention"),
        ("olmo", {"clip_qkv": 8.0}, r"clip_qkv is 8\.0, which changes the model; only null"),
        ("gpt2", {"activation_function": "gelu"}, "activation_function is 'gelu'"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ],
)
def test_settings_of_a_family_that_change_its_mathematics_are_refused(case, change, message, tmp_path):
    folder, golden = checkpoint(tmp_path, case)
    (folder / "config.json").write_text(json.dumps(golden["config"] | change))
    with pytest.raises(UserError, match=message):
        load(folder)


def test_fields_that_published_files_have_besides_are_of_no_matter(tmp_path):
    folder, golden = checkpoint(tmp_path, "llama3")
    plain = load(folder).config
    besides = {"rope_interleaved": False, "use_mrope": False, "is_llama_config": True, "max_sequence_length": 64}
    besides |= {
        "pretraining_tp": 1,
        "torch_dtype": "bfloat16",
        "_name_or_path": "x",
        "unk_token_id": 0,
        "transformers.js_config": {},
        "unknown": None,  # has no effect
    }
    (folder / "config.json").write_text(json.dumps(golden["config"] | besides))
    assert load(folder).config == plain


def test_sizes_that_config_leaves_out_follow_from_others(tmp_path):
    for case, name, ours, other in (
        ("llama3", "num_key_value_heads", "kv_heads", lambda config: config.heads),
        ("gpt2", "n_inner", "mlp_dim", lambda config: 4 * config.dim),
    ):
        content = {k: v for k, v in cases.golden(case)["config"].items() if k != name}
        config = families.read(tmp_path, content)[1]
        assert getattr(config, ours) == other(config)


def test_a_file_that_shrank_since_it_was_opened_is_named(tmp_path):
    folder, _ = checkpoint(tmp_path, "llama3")
    actual = files.tensors(folder)
    last = max(actual.values(), key=lambda x: x.start)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match=rf"model\.safetensors ends within {re.escape(last.name)}: .* load it again"):
        last.read()


def test_both_spellings_of_rotary_settings_are_read(tmp_path):
    folder, golden = checkpoint(tmp_path, "llama31")
    new = load(folder).config
    rope = dict(golden["config"].pop("rope_parameters"))
    for key in ("rope_type", "type"):
        old = {"rope_theta": rope["rope_theta"], "rope_scaling": {key: "llama3", **cases._SCALING}}
        (folder / "config.json").write_text(json.dumps(golden["config"] | old))
        assert load(folder).config == new


def test_buffers_of_old_files_and_a_tied_head_are_no_leftovers(tmp_path):
    folder, golden = checkpoint(tmp_path, "llama32")
    weights = {n: cases.draw(n, tuple(s)) for n, s in golden["shapes"].items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(weights, folder / "model.safetensors")
    assert load(folder).config.tied
    folder, golden = checkpoint(tmp_path / "gpt2", "gpt2")
    weights = {n.removeprefix("transformer."): cases.draw(n, tuple(s)) for n, s in golden["shapes"].items()}
    weights |= {"h.1.attn.bias": np.ones((1, 1, 64, 64), np.float32)}
    expected = load(folder).params
    save_file(weights, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(folder).params, expected)


def test_files_of_the_bare_model_with_a_head_and_of_two_dtypes_are_read(tmp_path):
    folder, golden = checkpoint(tmp_path, "llama3")
    expected = load(folder).params
    weights = {n.removeprefix("model."): cases.draw(n, tuple(s)) for n, s in golden["shapes"].items()}
    assert "lm_head.weight" in weights
    for dtype, wide in ((np.float32, 0), (np.float16, 0), (np.float16, 1)):
        # One layer's matrix is in fp32, the other's in the dtype of all other tensors: no value is rounded.
        name = f"layers.{wide}.self_attn.q_proj.weight"
        save_file({n: x.astype(np.float32 if n == name else dtype) for n, x in weights.items()},
                  folder / "model.safetensors")  # fmt: skip
        params = load(folder).params
        q = params["layers"]["attention"]["q"]["kernel"]
        assert (q.dtype, params["head"]["kernel"].dtype) == (np.float32, dtype)
        np.testing.assert_array_equal(q[wide], expected["layers"]["attention"]["q"]["kernel"][wide])
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=2.0**-11, atol=2.0**-14)


def _truncated(folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _header_of_a_gigabyte(folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes((1 << 30).to_bytes(8, "little") + path.read_bytes()[8:])


def _outside(folder, name="../model.safetensors", tensor="model.norm.weight"):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][tensor] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _integers(folder):
    path = folder / "model-00002-of-00002.safetensors"
    save_file({k: v.astype(np.int32) for k, v in load_file(path).items()}, path)


FILES = {
    "truncated": (_truncated, r"model-00002-of-00002\.safetensors is damaged"),
    "header": (_header_of_a_gigabyte, r"model-00002-of-00002\.safetensors is damaged.*[Hh]eader"),
    "outside": (_outside, r"index\.json names '\.\./model\.safetensors', which is not a file of this folder"),
    "absolute": (lambda f: _outside(f, "/etc/passwd"), "names '/etc/passwd'"),
    "elsewhere": (lambda f: _outside(f, "model-00001-of-00002.safetensors"), "model.norm.weight"),
    "in none": (lambda f: _outside(f, "model-00001-of-00002.safetensors", "more"), "safetensors lacks more, which"),
    "nowhere": (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "is missing; .*names it"),
    "integers": (_integers, r"model-00002-of-00002\.safetensors: .* is stored as I32; weights are F32, F16, BF16"),
    "index": (lambda f: (f / "model.safetensors.index.json").write_text("[1]"), "contains list, not a JSON object"),
    "map": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "weight_map is not an object"),
    "config": (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], "has neither model.safetensors nor"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_damaged_or_foreign_are_named(name, tmp_path):
    damage, message = FILES[name]
    folder, _ = checkpoint(tmp_path, "llama3", shards=2)
    damage(folder)
    with pytest.raises(UserError, match=message):
        load(folder)


def test_a_name_that_is_not_cached_says_how_to_get_it(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"nor a model in the local cache .*hf download"):
        load("nobody/nothing")
