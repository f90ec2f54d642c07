"""Adapters in peft's files: written and read, compared with peft's own files and results, and errors."""

import dataclasses
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

import fp8jax
from experiments.train.adapters import PEFT_NAMES, by_path
from fp8jax.lora import Adapter, merge_adapter
from fp8jax.ops.products.peft_files import CONFIG, WEIGHTS

safetensors = pytest.importorskip("safetensors.numpy")
# Written by peft 0.21.2 (`save_pretrained`) for a Llama of 2 layers, rank-stabilised. merged.npz has what its
# `merge_and_unload` added to the weights of q in the second layer and of down in the first, (outputs, inputs).
GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "peft"


def save(folder, adapters, **settings):
    fp8jax.lora.save(folder, adapters, PEFT_NAMES, **settings)


def load(folder):
    return fp8jax.lora.load(folder, PEFT_NAMES)


def adapters(*paths, layers=3, rank=4):
    key = jax.random.key(0)
    return {
        path: Adapter(
            jax.random.normal(jax.random.fold_in(key, i), (layers, 16, rank)),
            jax.random.normal(jax.random.fold_in(key, 100 + i), (layers, rank, 8)),
            alpha=6.0,
        )
        for i, path in enumerate(paths or PEFT_NAMES)
    }


def test_what_is_written_is_read_again_bit_for_bit(tmp_path):
    before = adapters()
    save(tmp_path, before, base="owner/model", dropout=0.1)
    after = load(tmp_path)
    assert set(after) == set(before)
    for path, adapter in before.items():
        assert after[path].alpha == adapter.alpha
        np.testing.assert_array_equal(after[path].a, np.asarray(adapter.a))
        np.testing.assert_array_equal(after[path].b, np.asarray(adapter.b))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 6.0, 0.1)
    assert config["target_modules"] == sorted(f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down"))


def test_tensors_have_peft_s_names_and_layout(tmp_path):
    (adapter,) = adapters("layers/mlp/down").values()
    save(tmp_path, {"layers/mlp/down": adapter})
    tensors = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_{}.weight"
    assert len(tensors) == 6
    np.testing.assert_array_equal(tensors[name.format("A")], np.asarray(adapter.a[2]).T)
    np.testing.assert_array_equal(tensors[name.format("B")], np.asarray(adapter.b[2]).T)


def test_an_adapter_of_peft_adds_what_it_adds_there():
    actual = load(GOLDEN)
    assert sorted(actual) == ["layers/attention/q", "layers/mlp/down"]
    added = np.load(GOLDEN / "merged.npz")
    for path, layer, name in (("layers/attention/q", 1, "q"), ("layers/mlp/down", 0, "down")):
        adapter = jax.tree.map(lambda x, layer=layer: x[layer], actual[path])
        ours = merge_adapter(np.zeros(adapter.shape, np.float32), adapter)
        np.testing.assert_allclose(np.asarray(ours).T, added[name], rtol=1e-5, atol=1e-6)
        assert np.abs(added[name]).max() > 0.1


def changed(folder, **fields):
    shutil.copytree(GOLDEN, folder, dirs_exist_ok=True)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora = true"),
        ({"bias": "all"}, 'bias = "all"'),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = "),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = "),
        ({"layers_to_transform": [1]}, "layers_to_transform = "),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow = 1"),
        ({"init_lora_weights": "pissa"}, "'pissa' also changes the base"),
        ({"r": 3}, r"has r=3; model\.layers\.\{\}\.(self_attn.q_proj|mlp.down_proj) has 2"),
        ({"r": "many"}, "cannot be read"),
    ],
)
def test_settings_that_change_the_numbers_are_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        load(changed(tmp_path, **fields))


def test_files_that_are_damaged_or_of_another_model_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read"):
        load(tmp_path)
    folder = changed(tmp_path)
    path = folder / "adapter_model.safetensors"
    tensors = safetensors.load_file(path)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"

    def refused(message, **others):
        safetensors.save_file(others, path)
        with pytest.raises(ValueError, match=message):
            load(folder)

    refused(r"lacks lora_A of model\.layers\.1\.self_attn\.q_proj", **{k: x for k, x in tensors.items() if k != name})
    later = {k.replace("layers.1.", "layers.2."): x for k, x in tensors.items()}
    refused(r"adapters for the layers \[0, 2\], not for every layer from 0 on", **later)
    refused("several shapes", **tensors | {name: np.zeros((2, 3), np.float32)})
    refused(
        "is not the name of a known adapter", **tensors | {"transformer.h.0.attn.c_attn.lora_A.weight": tensors[name]}
    )
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read"):
        load(folder)
    with pytest.raises(ValueError, match="no PEFT name for the adapter of head"):
        save(tmp_path, adapters("head"))
    mixed = adapters("layers/mlp/up") | adapters("layers/mlp/gate", rank=2)
    with pytest.raises(ValueError, match="different ranks"):
        save(tmp_path, mixed)
    with pytest.raises(ValueError, match="there are no adapters"):
        save(tmp_path, {})
    flat = dataclasses.replace(mixed["layers/mlp/up"], a=np.zeros((16, 4)), b=np.zeros((4, 8)))
    with pytest.raises(ValueError, match=r"adapter of layers/mlp/up is stacked 0 times, but its name is .*\{\}"):
        save(tmp_path, {"layers/mlp/up": flat})


def test_adapters_of_a_training_state_are_found_by_their_layers():
    one = adapters("layers/mlp/up")["layers/mlp/up"]
    actual = by_path({"layers": {"mlp": {"up": {"lora_a": one.a, "lora_b": one.b}}}}, 3.0)
    assert list(actual) == ["layers/mlp/up"]
    assert actual["layers/mlp/up"].scale == 3 / 4


NO_RANKS = [0, -1, 4.9, 2.0, True, "2", None, [2], 2**31, 10**400, float("nan")]
NO_ALPHAS = [0, -8, float("nan"), float("inf"), 1e39, 1e-60, 10**400, True, "8", None, [8]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("r", value) for value in NO_RANKS),
        *(("lora_alpha", value) for value in NO_ALPHAS),
        *(("use_rslora", value) for value in ("false", 1, [])),
        *(("rank_pattern", value) for value in ({"q_proj": 2}, 0, 0.0, "q_proj", [1])),
        *(("alpha_pattern", value) for value in ({"q_proj": 2.0}, 0, True)),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused_with_the_file(tmp_path, name, value):
    folder = changed(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=rf"adapter_config\.json.*{name} (is|=) "):
        load(folder)


@pytest.mark.parametrize("text", ["[]", "1", "null", "[" * 100_000, '{"r": ' + "9" * 5000 + "}", "", "\ud800"])
def test_a_configuration_that_is_none_is_named(tmp_path, text):
    folder = changed(tmp_path)
    (folder / "adapter_config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=r"adapter_config\.json cannot be read"):
        load(folder)
    deep = {"a": 1}
    for _ in range(300):
        deep = {"a": deep}
    with pytest.raises(ValueError, match=r"adapter_config\.json: tomorrow = "):
        load(changed(tmp_path, tomorrow=deep))


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_named(tmp_path, file):
    for make in (os.mkfifo, os.mkdir):
        folder = changed(tmp_path / make.__name__)
        (folder / file).unlink()
        make(folder / file)
        with pytest.raises(ValueError, match=rf"{file} cannot be read \(.*it is not a regular file"):
            load(folder)


def test_an_alpha_that_cannot_be_is_not_written(tmp_path):
    (adapter,) = adapters("layers/mlp/up").values()
    for alpha in (float("nan"), float("inf"), 0.0, -1.0):
        with pytest.raises(ValueError, match="alpha of an adapter must be positive and finite, got"):
            save(tmp_path, {"layers/mlp/up": dataclasses.replace(adapter, alpha=alpha)})


def test_a_bit_that_changes_in_the_files_is_found_or_changes_nothing(tmp_path):
    """One bit in each part: numbers of adapter_config.json, and names, digests and values of the weights."""
    before = adapters("layers/mlp/up", "layers/attention/q", layers=2, rank=2)
    save(tmp_path / "whole", before)
    assert set(load(tmp_path / "whole")) == set(before)
    config, weights = ((tmp_path / "whole" / name).read_bytes() for name in (CONFIG, WEIGHTS))
    results = {}
    for name, raw, step in ((CONFIG, config, 1), (WEIGHTS, weights, 7)):
        results[name], folder = [], shutil.copytree(tmp_path / "whole", tmp_path / name)
        for at in range(0, len(raw), step):
            changed = bytearray(raw)
            changed[at] ^= 1 << at % 7
            (folder / name).write_bytes(changed)
            try:
                after = load(folder)
            except ValueError as error:
                results[name].append(at)
                assert CONFIG in str(error) or WEIGHTS in str(error)  # noqa: PT017
                continue
            assert jax.tree.all(jax.tree.map(np.array_equal, after, before)), (name, at)
            assert {x.alpha for x in after.values()} == {6.0}
    header = 8 + int.from_bytes(weights[:8], "little")
    assert set(range(0, len(weights), 7)) - set(results[WEIGHTS]) <= set(range(header))
    assert len(results[CONFIG]) > 100


def test_a_save_that_is_killed_leaves_no_weights_or_the_old_ones(tmp_path, monkeypatch):
    before = adapters("layers/mlp/up", layers=2)
    save(tmp_path / "old", before)

    def kill(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", kill)
    for folder in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / folder, adapters("layers/mlp/down", layers=2))
    assert set(load(tmp_path / "old")) == set(before)
    assert not (tmp_path / "new" / WEIGHTS).exists()


def test_damage_names_the_tensor_and_an_intended_change_is_read(tmp_path):
    before = adapters("layers/mlp/up", layers=2)
    save(tmp_path, before)
    raw = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged: the values of base.*up_proj\.lora_"):
        load(tmp_path)
    assert fp8jax.lora.load(tmp_path, PEFT_NAMES, verify=False)["layers/mlp/up"].alpha == 6.0
    (tmp_path / WEIGHTS).write_bytes(raw)
    config = json.loads((tmp_path / CONFIG).read_text()) | {"lora_alpha": 12}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"adapter_config\.json has .*12.* was written with .*6\.0.*verify=False"):
        load(tmp_path)
    assert fp8jax.lora.load(tmp_path, PEFT_NAMES, verify=False)["layers/mlp/up"].alpha == 12.0
    # Files of other programs have no digests.
    tensors = safetensors.load_file(tmp_path / WEIGHTS)
    safetensors.save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert load(tmp_path)["layers/mlp/up"].alpha == 12.0
