"""Digests of checkpoints that we write are compared on reading; files next to the weights stay in the folder."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from experiments.errors import UserError
from experiments.export import tokenizer_files
from experiments.files import read_bytes
from experiments.hub import __main__ as command
from experiments.hub import files, tokenizer
from experiments.hub.load import abstract_params, load, settings
from experiments.hub.save import SIDECAR_FILES, eight_bits, save
from experiments.models.llama import LlamaConfig
from experiments.text import chat
from experiments.text.tokenizer import Bytes
from tests.experiments import hub_cases as cases

SMALL = LlamaConfig(vocab=256, dim=16, layers=2, heads=2, kv_heads=1, mlp_dim=32)
NAME = "model.layers.1.mlp.up_proj.weight"


def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), abstract_params(SMALL))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint in two files with 8-bit codes and a tokenizer. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("written") / "out"
    fields = {"eos_token_id": 0}
    save(folder, SMALL, params(), eight=eight_bits("block"), shard_bytes=20_000, fields=fields,
         extra_files=tokenizer_files(Bytes(), 64))  # fmt: skip
    assert len(list(folder.glob("model-*.safetensors"))) == 2
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "in")


def content(folder):
    """Returns everything that is read from a checkpoint."""
    loaded = load(folder)
    return loaded.config, [np.asarray(x).tobytes() for x in jax.tree.leaves(loaded.params)], *spelling(folder)


def spelling(folder):
    """Returns everything that is read from a checkpoint except its weights and their settings."""
    spelled = tokenizer.read(folder, SMALL.vocab)
    begins = chat.token_of(chat.read_settings(folder), "bos_token")
    return spelled.to_str(), tokenizer.ends(folder), begins


@pytest.mark.slow
def test_a_bit_that_changes_in_any_file_is_found_or_changes_nothing(folder):
    whole, results = content(folder), dict[str, int]()
    for path in sorted(folder.iterdir()):
        raw, results[path.name] = path.read_bytes(), 0
        model = path.suffix == ".safetensors" or path.name in ("config.json", files.INDEX)
        read, before = (content, whole) if model else (spelling, whole[2:])
        # Digits of numbers, which remain valid JSON, and other positions everywhere.
        digits = [i for i, byte in enumerate(raw) if path.suffix == ".json" and chr(byte).isdigit()][:40:4]
        for at in sorted({*range(3, len(raw), len(raw) // 9 + 1), *digits}):
            changed = bytearray(raw)
            changed[at] ^= 1 << at % 3
            path.write_bytes(changed)
            try:
                assert read(folder) == before, (path.name, at)
            except UserError:
                results[path.name] += 1
        path.write_bytes(raw)
    assert content(folder) == whole
    assert set(results) == {files.INDEX, "config.json", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)),
                          "tokenizer.json", "tokenizer_config.json", "generation_config.json"}  # fmt: skip
    assert min(results.values()) >= 5


def flip(path, text):
    raw = path.read_bytes()
    at = raw.index(text) + len(text)
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


def test_damage_is_named_with_its_file_and_tensor(folder):
    stored = files.tensors(folder)[NAME]
    raw = bytearray(stored.file.read_bytes())
    raw[stored.start + 5] ^= 1
    stored.file.write_bytes(raw)
    message = rf"{stored.file.name} is damaged: the values of {NAME} do not match their digest"
    with pytest.raises(UserError, match=message):
        load(folder)
    with pytest.raises(UserError, match=message):
        load(folder, codes=True)


CHANGES = {
    "config.json": (b'"rms_norm_eps": 1e-0', "norm_eps 1e-05 and is 0.0001"),
    "tokenizer.json": (b'"a":9', None),
    "tokenizer_config.json": (b'"model_max_length": ', None),
    "generation_config.json": (b'"eos_token_id": ', None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_named_and_an_intended_change_is_read(folder, name):
    at, what = CHANGES[name]
    flip(folder / name, at)
    with pytest.raises(
        UserError, match=rf"{name} is damaged, or was changed .*{what or ''}.*\"fp8jax_digests\": false"
    ):
        content(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"fp8jax_digests": False}))
    changed = content(folder)
    save(folder.with_name("again"), changed[0], load(folder).params, like=folder, eight=eight_bits("block"))
    assert "fp8jax_digests" not in json.loads((folder.with_name("again") / "config.json").read_text())
    assert content(folder.with_name("again"))[0] == changed[0]


def test_blocks_of_another_size_are_found_though_their_number_is_the_same(folder):
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"]["config_groups"]["group_0"]["weights"]["block_structure"] = [128, 120]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"config\.json is damaged, or was changed .*weights "):
        load(folder)


def test_files_of_other_programs_and_changes_that_change_nothing_are_read(folder):
    before = content(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"torch_dtype": "float32", "use_cache": False}, indent=7))
    assert content(folder) == before
    for path in folder.glob("*.safetensors"):
        own = {name: x.read() for name, x in files.tensors(folder).items() if x.file == path}
        save_file(own, path, metadata={"format": "pt"})
    flip(folder / "generation_config.json", CHANGES["generation_config.json"][0])
    assert content(folder)[:3] == before[:3]


def test_readers_elsewhere_see_what_they_saw(written):
    import safetensors

    path = written / "model-00002-of-00002.safetensors"
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata()["format"] == "pt"
        assert all(isinstance(x, str) for x in file.metadata().values())
        assert {NAME, f"{NAME}_scale"} <= set(file.keys())


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt", "chat_template.jinja", "generation_config.json"])
def test_what_lies_outside_of_a_folder_is_not_copied(folder, tmp_path, capsys, name):
    assert name in SIDECAR_FILES
    (tmp_path / "secret").write_text("PRIVATE")
    (tmp_path / "other").mkdir()
    for i, target in enumerate((tmp_path / "secret", "../secret", "chain", "down/secret", tmp_path)):
        whole = shutil.copytree(folder, tmp_path / str(i))
        (whole / "chain").symlink_to("second")
        (whole / "second").symlink_to(tmp_path / "secret")
        (whole / "down").symlink_to(tmp_path)
        (whole / name).unlink(missing_ok=True)
        (whole / name).symlink_to(target)
        assert command.main(["--model", str(whole), "--out", str(tmp_path / "out"), "--eight", "block"]) == 2
        assert f"{whole / name} is a link to {tmp_path}" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_loop_a_folder_or_a_pipe_is_not_copied(folder, tmp_path, capsys):
    path = folder / "merges.txt"
    for make in (lambda x: x.symlink_to("merges.txt"), os.mkdir, os.mkfifo):
        make(path)
        assert command.main(["--model", str(folder), "--out", str(tmp_path / "out"), "--eight", "block"]) == 2
        assert "merges.txt cannot be read (" in capsys.readouterr().err
        path.rmdir() if path.is_dir() else path.unlink()


def test_links_within_a_folder_and_to_blobs_of_the_cache_are_followed(folder, tmp_path):
    before = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").rename(folder / "real.json")
    (folder / "tokenizer.json").symlink_to("real.json")
    (tmp_path / "link").symlink_to(folder)
    assert files.read_sidecar(tmp_path / "link", "tokenizer.json") == before
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    shutil.copytree(folder, snapshot, symlinks=True)
    (snapshot / "tokenizer.json").unlink()
    blob = snapshot.parent.parent / "blobs" / "4f"
    blob.parent.mkdir()
    (snapshot / "real.json").rename(blob)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/4f")
    loaded = load(snapshot)
    save(tmp_path / "out", loaded.config, loaded.params, like=snapshot)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before
    blob.unlink()
    blob.symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("PRIVATE")
    with pytest.raises(UserError, match=r"tokenizer\.json is a link to .*secret, outside of the folder"):
        files.read_sidecar(snapshot, "tokenizer.json")


def test_a_pipe_in_place_of_a_file_of_a_checkpoint_is_named(folder, tmp_path):
    # Also without digests.
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read"):
        tokenizer.ends(tmp_path)
    for name in ("config.json", files.INDEX, "tokenizer_config.json", "generation_config.json"):
        raw = read_bytes(folder / name)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match=f"{name}|has neither"):
            content(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**400),
        ("rms_norm_eps", 10**400),
        ("rope_theta", 10**400),
        ("num_attention_heads", True),
        ("hidden_size", 16.5),
        ("hidden_size", "16"),
        ("vocab_size", 0),
        ("quantization_config", [1]),
        ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": {"a": [1]}}),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [True, True]}),
        ("eos_token_id", "2"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused_with_the_file(folder, field, value):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {field: value}))
    with pytest.raises(UserError, match=r"config\.json"):
        content(folder)


def test_a_tokenizer_that_is_missing_or_damaged_is_named(folder):
    (folder / "spiece.model").write_bytes(b"x")
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()  # and digests of the other files
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read \("):
        tokenizer.read(folder, SMALL.vocab)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing; spiece\.model is not read: save it again"):
        tokenizer.read(folder, SMALL.vocab)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "pass either --run with --recipe, or --model"),
        (["--run", "x", "--model", "x"], "pass either --run with --recipe, or --model"),
        (["--run", "x"], "--run needs --recipe"),
        (["--model", "x", "--recipe", "moss"], "--recipe requires --run"),
        (["--model", "x", "--activations"], "--activations requires --eight"),
        (["--model", "x", "--activations", "--eight", "deepseek"], "--activations requires --eight"),
        *(
            (["--model", "x", "--shard-gb", x], f"--shard-gb must be positive and finite, got {x}")
            for x in ("nan", "inf")
        ),
        (["--model", "nobody/nothing"], "nor a model in the local cache"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line_and_a_code(tmp_path, capsys, flags, message):
    assert command.main(["--out", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_folders_from_before_there_were_experts_are_what_they_were():
    """The digested settings of a model without experts have no new fields."""
    for case, has_experts in (("llama3", False), ("mixtral", True)):
        actual = settings(Path("config.json"), cases.golden(case)["config"])
        assert ("experts" in actual, "experts_per_token" in actual, "normalize_choices" in actual) == (has_experts,) * 3
