"""Adapters in peft's files: written and read, beside what peft itself wrote and computed, and what is refused."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from experiments import peft_files
from experiments.config import UserError
from fp8jax.lora import Adapter, merge_adapter

safetensors = pytest.importorskip("safetensors.numpy")
# Written by peft 0.21.2 (`save_pretrained`) of a Llama of 2 layers, rank-stabilised; what its `merge_and_unload` added
# to the weights of q in the second layer and of down in the first, (outputs, inputs), in merged.npz.
GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "peft"


def adapters(*paths, layers=3, rank=4):
    key = jax.random.key(0)
    return {
        path: Adapter(
            jax.random.normal(jax.random.fold_in(key, i), (layers, 16, rank)),
            jax.random.normal(jax.random.fold_in(key, 100 + i), (layers, rank, 8)),
            alpha=6.0,
        )
        for i, path in enumerate(paths or peft_files.NAMES)
    }


def test_what_is_written_is_read_again_bit_for_bit(tmp_path):
    before = adapters()
    peft_files.save(tmp_path, before, base="owner/model", dropout=0.1)
    after = peft_files.load(tmp_path)
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
    peft_files.save(tmp_path, {"layers/mlp/down": adapter})
    tensors = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_{}.weight"
    assert len(tensors) == 6
    np.testing.assert_array_equal(tensors[name.format("A")], np.asarray(adapter.a[2]).T)
    np.testing.assert_array_equal(tensors[name.format("B")], np.asarray(adapter.b[2]).T)


def test_an_adapter_of_peft_adds_what_it_adds_there():
    found = peft_files.load(GOLDEN)
    assert sorted(found) == ["layers/attention/q", "layers/mlp/down"]
    added = np.load(GOLDEN / "merged.npz")
    for path, layer, name in (("layers/attention/q", 1, "q"), ("layers/mlp/down", 0, "down")):
        adapter = jax.tree.map(lambda x, layer=layer: x[layer], found[path])
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
        ({"init_lora_weights": "pissa"}, "'pissa' changes the base"),
        ({"r": 3}, r"has r=3; model\.layers\.\{\}\.(self_attn.q_proj|mlp.down_proj) has 2"),
        ({"r": "many"}, "cannot be read"),
    ],
)
def test_settings_that_change_the_numbers_are_refused(tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        peft_files.load(changed(tmp_path, **fields))


def test_files_that_are_damaged_or_of_another_model_are_named(tmp_path):
    with pytest.raises(UserError, match=r"adapter_config.json cannot be read"):
        peft_files.load(tmp_path)
    folder = changed(tmp_path)
    path = folder / "adapter_model.safetensors"
    tensors = safetensors.load_file(path)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"

    def refused(message, **others):
        safetensors.save_file(others, path)
        with pytest.raises(UserError, match=message):
            peft_files.load(folder)

    refused(r"lacks lora_A of model\.layers\.1\.self_attn\.q_proj", **{k: x for k, x in tensors.items() if k != name})
    refused("several shapes", **tensors | {name: np.zeros((2, 3), np.float32)})
    refused("is the name of no adapter", **tensors | {"transformer.h.0.attn.c_attn.lora_A.weight": tensors[name]})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"adapter_model.safetensors cannot be read"):
        peft_files.load(folder)
    with pytest.raises(UserError, match="no name for the adapter of head"):
        peft_files.save(tmp_path, adapters("head"))
    mixed = adapters("layers/mlp/up") | adapters("layers/mlp/gate", rank=2)
    with pytest.raises(UserError, match="several ranks"):
        peft_files.save(tmp_path, mixed)


def test_adapters_of_a_training_state_are_found_by_their_layers():
    one = adapters("layers/mlp/up")["layers/mlp/up"]
    found = peft_files.of_params({"layers": {"mlp": {"up": {"lora_a": one.a, "lora_b": one.b}}}}, 3.0)
    assert list(found) == ["layers/mlp/up"]
    assert found["layers/mlp/up"].scale == 3 / 4
