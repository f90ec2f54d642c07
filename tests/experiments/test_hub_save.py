"""Our models as Hugging Face checkpoints, and their linear layers as 8-bit codes."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import fp8jax
from experiments import mesh
from experiments.errors import DiskError, UserError
from experiments.hub import families, files, quantized
from experiments.hub.load import abstract_params, load
from experiments.hub.save import Written, _common, _shards, eight_bits, from_recipe, save
from experiments.models.llama import LlamaConfig
from experiments.models.rope import RopeScaling
from fp8jax.ops.products.weights import FrozenWeight
from tests.experiments import hub_cases as cases
from tests.rows import few, slow

# 128 does not divide all sizes: partial blocks, and full ones.
WIDE = LlamaConfig(vocab=40, dim=256, layers=2, heads=4, kv_heads=2, mlp_dim=320)


def checkpoint(folder, case, **kwargs):
    golden = cases.golden(case)
    return cases.write(folder, golden["config"], golden["shapes"], **kwargs)


def stored(folder):
    return {name: (x.kind, x.shape, x.read().tobytes()) for name, x in files.tensors(folder).items()}


def params(config, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), dtype), abstract_params(config))


ROUND = [*((case, ml_dtypes.bfloat16) for case in cases.CASES), ("qwen2", np.float32), ("gpt2", np.float16)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [row if row[0] in ("mistral_window", "qwen3_moe") else slow(*row) for row in ROUND],
)
def test_a_round_trip_keeps_every_bit(case, dtype, tmp_path):
    folder = checkpoint(tmp_path / "in", case, dtype=dtype, shards=2)
    first = load(folder)
    save(tmp_path / "out", first.config, first.params, like=folder, shard_bytes=10_000)
    assert stored(tmp_path / "out") == stored(folder)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    fields, old = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", folder))
    assert fields.pop("torch_dtype") == np.dtype(dtype).name
    assert {k: fields[k] for k in old} == old
    # Without the old config.json, the shape determines the family.
    save(tmp_path / "alone", first.config, first.params)
    again = load(tmp_path / "alone")
    assert again.config == first.config
    assert stored(tmp_path / "alone") == stored(folder)
    assert again.family.architecture == {
        "mistral": "LlamaForCausalLM",
        "mistral_nemo": "LlamaForCausalLM",
    }.get(case, first.family.architecture)


def test_shapes_that_no_family_has_are_refused():
    assert families.of(dataclasses.replace(WIDE, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16))).name == "llama"
    for change in ({"norm_after": True}, {"bias": "all"}, {"norm": "layer", "norm_eps": 1e-6}, {"mlp": "gelu"}):
        with pytest.raises(UserError, match="no known family"):
            families.of(dataclasses.replace(WIDE, **change))


def test_beside_the_weights_what_the_old_folder_has_is_kept(tmp_path):
    folder = checkpoint(tmp_path / "in", "llama3")
    (folder / "tokenizer.json").write_text("tok")
    (folder / "generation_config.json").write_text("gen")
    (folder / "training_args.bin").write_text("no")
    first = load(folder)
    save(
        tmp_path / "out",
        first.config,
        first.params,
        like=folder,
        extra_files={"more.txt": "more"},
        fields={"eos_token_id": 7},
    )
    actual = {p.name: p.read_text() for p in (tmp_path / "out").iterdir() if p.suffix != ".safetensors"}
    config = json.loads(actual.pop("config.json"))
    assert actual == {"tokenizer.json": "tok", "generation_config.json": "gen", "more.txt": "more"}
    assert (config["eos_token_id"], config["bos_token_id"]) == (7, 1)


def test_files_are_as_large_as_asked_and_hold_what_the_index_says(tmp_path):
    save(tmp_path / "out", WIDE, params(WIDE), dtype=ml_dtypes.bfloat16, shard_bytes=300_000)
    index = json.loads((tmp_path / "out" / files.INDEX).read_text())
    for path in (tmp_path / "out").glob("*.safetensors"):
        stored = load_file(path)
        assert sum(x.nbytes for x in stored.values()) <= 300_000
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(stored)
    stored = sorted({*index["weight_map"].values()})
    assert stored == [f"model-{i:05d}-of-{len(stored):05d}.safetensors" for i in range(1, len(stored) + 1)]
    total = sum(x.size for x in jax.tree.leaves(params(WIDE)))
    assert index["metadata"]["total_size"] == 2 * total


def written(**sizes):
    """Returns tensors with this many elements, by name and dtype."""
    dtypes = {"weight": ml_dtypes.bfloat16, "weight_scale": np.float32, "codes": quantized.CODES, "norm": np.float32}
    return Written({f"a.{name}": ((n,), np.dtype(dtypes[name])) for name, n in sizes.items()}, list)


def test_a_tensor_larger_than_a_file_has_one_of_its_own():
    parts = [written(codes=n) for n in (20, 4, 6, 1)]
    assert [[x.nbytes for x in shard] for shard in _shards(parts, 10)] == [[20], [4, 6], [1]]
    with pytest.raises(UserError, match="shards need at least 1 byte, got 0"):
        _shards(parts, 0)


def test_the_dtype_that_config_names_is_that_of_most_values_which_are_no_codes():
    parts = [written(codes=100, weight_scale=50), written(weight=4), written(norm=3)]
    assert _common(parts) == "bfloat16"
    assert _common([*parts, written(norm=2)]) == "float32"


def test_what_config_said_of_the_old_weights_is_not_kept(eight_folder, tmp_path):
    """Neither codes nor dtype of the old weights, in its newer name. Infinities are written unchanged."""
    folder = shutil.copytree(eight_folder, tmp_path / "in")
    content = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(content))
    weights = load(folder).params
    weights["norm"]["scale"] = weights["norm"]["scale"].at[0].set(np.inf)
    save(tmp_path / "out", WIDE, weights, like=folder, dtype=np.float16)
    actual = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization_config", "dtype"} & set(actual)
    assert actual["torch_dtype"] == "float16"
    assert np.isinf(load(tmp_path / "out").params["norm"]["scale"][0])


def test_a_matrix_of_which_some_layers_are_codes_is_read_as_values(eight_folder, tmp_path):
    folder = shutil.copytree(eight_folder, tmp_path / "in")
    weights = load_file_of_codes(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = (weights[name].astype(np.float32) * weights.pop(f"{name}_scale")).astype(ml_dtypes.bfloat16)
    save_file(weights, folder / "model.safetensors")
    quantized_params, values = (
        load(folder, codes=True).params["layers"]["mlp"],
        load(eight_folder).params["layers"]["mlp"],
    )
    np.testing.assert_array_equal(quantized_params["up"]["kernel"], values["up"]["kernel"])
    assert isinstance(quantized_params["down"]["kernel"], FrozenWeight)


def test_what_cannot_be_written_is_an_error_and_leaves_no_folder(tmp_path, monkeypatch):
    out, weights = tmp_path / "out", params(WIDE)
    broken = {**weights, "norm": {"scale": weights["norm"]["scale"].at[0].set(1e6)}}
    with pytest.raises(UserError, match=r"norm\.weight has values outside the range of float16"):
        save(out, WIDE, broken, dtype=np.float16)
    with pytest.raises(UserError, match=r"the parameters lack norm\.scale"):
        save(out, WIDE, {k: v for k, v in weights.items() if k != "norm"})
    with pytest.raises(UserError, match="has another shape"):
        save(out, WIDE, weights, like=checkpoint(tmp_path / "in", "llama3"))

    def full(*_, **__):
        raise OSError(28, "No space left")

    monkeypatch.setattr("experiments.hub.save.save_file", full)
    with pytest.raises(DiskError, match=r"out cannot be written .*No space left"):
        save(out, WIDE, weights)
    monkeypatch.undo()
    assert not out.exists()
    save(out, WIDE, weights)
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(UserError, match="out exists; use another folder"):
        save(out, WIDE, weights)


FORMATS = ("tensor", "channel", "block", "deepseek")


def codes_of(w, name):
    """Returns e4m3 codes and scales of a matrix (outputs, inputs) by ml_dtypes: scale = amax / 448, fp32."""
    w = np.asarray(w, np.float32)
    if name == "tensor":
        largest = np.abs(w).max().reshape(1)
    elif name == "channel":
        largest = np.abs(w).max(1, keepdims=True)
    else:
        grid = [-(-n // 128) for n in w.shape]
        padded = np.zeros([128 * n for n in grid], np.float32)
        padded[: w.shape[0], : w.shape[1]] = w
        largest = np.abs(padded).reshape(grid[0], 128, grid[1], 128).max((1, 3))
    scale = (largest / np.float32(448)).astype(np.float32)
    wide = scale
    if name in ("block", "deepseek"):
        wide = np.kron(scale, np.ones((128, 128), np.float32))[: w.shape[0], : w.shape[1]]
    return w / wide, scale, wide


@pytest.mark.parametrize("name", few(FORMATS, "deepseek"))
def test_codes_in_files_are_those_of_the_weights(name, tmp_path):
    weights = params(WIDE)
    unquantized = save(tmp_path / "out", WIDE, weights, eight=eight_bits(name), dtype=ml_dtypes.bfloat16)
    actual = files.tensors(tmp_path / "out")
    # 128 does not divide 320: transformers would use other blocks of the format "fp8".
    ragged = [f"model.layers.{i}.mlp.{n}_proj" for n in ("gate", "up", "down") for i in range(2)]
    assert unquantized == (ragged if name == "deepseek" else [])
    suffix = "weight_scale_inv" if name == "deepseek" else "weight_scale"
    w = np.asarray(weights["layers"]["attention"]["k"]["kernel"][1]).T
    codes, scale = (actual[f"model.layers.1.self_attn.k_proj.{x}"] for x in ("weight", suffix))
    assert (codes.kind, codes.shape, scale.kind) == ("F8_E4M3", (128, 256), "F32")
    ratio, expected, wide = codes_of(w, name)
    np.testing.assert_allclose(scale.read(), expected, rtol=2e-7)
    assert scale.shape == expected.shape
    # Nearest codes, unless the last bit of a scale matters.
    different = codes.read() != ratio.astype(ml_dtypes.float8_e4m3fn)
    assert different.mean() < 1e-3
    values = codes.read().astype(np.float32) * wide
    assert (np.abs(values - w.astype(np.float32)) <= np.maximum(np.abs(w) / 16, wide * 2**-10) * 1.0001).all()
    assert actual["lm_head.weight"].kind == actual["model.norm.weight"].kind == "BF16"
    assert actual["model.layers.1.mlp.up_proj.weight"].kind == ("BF16" if name == "deepseek" else "F8_E4M3")


@pytest.mark.parametrize("name", few(FORMATS, "deepseek"))
def test_codes_come_back_bit_for_bit(name, tmp_path):
    save(tmp_path / "out", WIDE, params(WIDE), eight=eight_bits(name), dtype=ml_dtypes.bfloat16)
    frozen_params, values = load(tmp_path / "out", codes=True).params, load(tmp_path / "out", dtype=jnp.float32).params
    frozen = frozen_params["layers"]["attention"]["q"]["kernel"]
    assert frozen.codes.spec == fp8jax.QuantSpec.parse(quantized.SPECS["block" if name == "deepseek" else name])
    theirs = files.tensors(tmp_path / "out")
    for i in range(2):
        raw = theirs[f"model.layers.{i}.self_attn.q_proj.weight"].read()
        assert np.asarray(frozen.codes.codes[i]).tobytes() == raw.tobytes()
    np.testing.assert_array_equal(frozen.dequantize(), values["layers"]["attention"]["q"]["kernel"])
    x = jax.random.normal(jax.random.key(0), (8, 256))
    one = jax.tree.map(lambda leaf: leaf[0], frozen)
    actual = fp8jax.linear(x, one, recipe="te_current")
    exact = np.asarray(x, np.float64) @ np.asarray(values["layers"]["attention"]["q"]["kernel"][0], np.float64)
    assert np.linalg.norm(actual - exact) < 0.05 * np.linalg.norm(exact)
    assert load(tmp_path / "out").params["layers"]["attention"]["q"]["kernel"].dtype == jnp.bfloat16
    # Encoding the decoded values in the same format gives the same codes.
    if name != "channel":
        return
    save(tmp_path / "again", WIDE, values, eight=eight_bits(name))
    again = files.tensors(tmp_path / "again")
    for key, x in theirs.items():
        if x.kind == "F8_E4M3":
            assert (again[key].read().view(np.uint8) != x.read().view(np.uint8)).mean() < 1e-3, key


def test_codes_lie_on_a_mesh(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh, "SMALLEST", 256)
    save(tmp_path / "out", WIDE, params(WIDE), eight=eight_bits("block"))
    whole = load(tmp_path / "out", codes=True).params["layers"]["attention"]["q"]["kernel"]
    placed = load(tmp_path / "out", codes=True, mesh=mesh.make(1, 2, jax.devices()[:2])).params
    cut = placed["layers"]["attention"]["q"]["kernel"]
    assert cut.codes.codes.sharding.spec == jax.P(None, None, "fsdp")
    assert cut.codes.scale.sharding.spec == jax.P(None, None, "fsdp")
    np.testing.assert_array_equal(cut.dequantize(), whole.dequantize())


@pytest.mark.parametrize("name", ["te_current", slow("coat"), slow("deepseek"), slow("fast"), slow("fp8_lm")])
def test_codes_are_those_of_the_forward_product_of_a_recipe(name, tmp_path):
    """A layer's product with the identity returns its decoded weights."""
    recipe = fp8jax.recipes.get(name)
    eight = from_recipe(recipe)
    w = 0.1 * np.random.default_rng(1).normal(size=(256, 128)).astype(np.float32)
    layer = nnx.Linear(256, 128, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(w)
    product = fp8jax.nnx.quantize(nnx.Sequential(layer), recipe)(jnp.eye(256, dtype=jnp.bfloat16))
    q = quantized.encode(jnp.asarray(w), eight.encoding)
    values = q.dequantize().T
    np.testing.assert_array_equal(np.asarray(product), np.asarray(values.astype(jnp.bfloat16)))
    assert len(np.unique(np.asarray(values))) > 100


def test_the_deepseek_recipe_is_written_in_both_formats(tmp_path):
    recipe, weights = fp8jax.recipes.deepseek(), params(WIDE)
    save(tmp_path / "a", WIDE, weights, eight=from_recipe(recipe))
    save(tmp_path / "b", WIDE, weights, eight=from_recipe(recipe, deepseek=True))
    a, b = stored(tmp_path / "a"), stored(tmp_path / "b")
    for name in ("q", "k", "v", "o"):
        name = f"model.layers.0.self_attn.{name}_proj."
        assert a[f"{name}weight"] == b[f"{name}weight"]
        assert a[f"{name}weight_scale"] == b[f"{name}weight_scale_inv"]


def test_config_says_what_readers_of_a_format_need(tmp_path):
    save(tmp_path / "a", WIDE, params(WIDE), eight=eight_bits("block", activations=True), dtype=ml_dtypes.bfloat16)
    fields = json.loads((tmp_path / "a" / "config.json").read_text())
    assert fields["torch_dtype"] == "bfloat16"
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    assert fields["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**args, "strategy": "block", "block_structure": [128, 128], "dynamic": False},
                "input_activations": {**args, "strategy": "group", "group_size": 128, "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    assert load(tmp_path / "a").config == WIDE


def test_layers_that_servers_fuse_are_stored_alike(tmp_path):
    """vLLM fuses q, k and v, and rejects a layer that is partly in 8 bits: 128 divides q, but not k and v."""
    few = dataclasses.replace(WIDE, kv_heads=1, mlp_dim=256, layers=1)
    unquantized = save(tmp_path / "a", few, params(few), eight=eight_bits("deepseek"))
    assert unquantized == [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    actual = {name: tensor.kind for name, tensor in files.tensors(tmp_path / "a").items()}
    assert actual["model.layers.0.self_attn.q_proj.weight"] == "F32"
    assert actual["model.layers.0.self_attn.o_proj.weight"] == "F8_E4M3"
    assert save(tmp_path / "b", few, params(few), eight=eight_bits("block")) == []


@pytest.mark.parametrize(("name", "field"), [("channel", "ignore"), ("deepseek", "modules_to_not_convert")])
def test_a_tied_head_is_not_counted_as_quantized(name, field, tmp_path):
    """It has no tensor, and readers count every linear layer that is not listed."""
    tied = dataclasses.replace(WIDE, mlp_dim=384, kv_heads=4, tied=True)
    save(tmp_path / "a", tied, params(tied), eight=eight_bits(name))
    fields = json.loads((tmp_path / "a" / "config.json").read_text())
    assert fields["quantization_config"][field] == ["lm_head"]
    assert load(tmp_path / "a").config == tied


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("bf16", "in the format of computation, which no export format supports"),
        ("int8_fallback", "int8:block128, which no"),
    ],
)
def test_recipes_without_such_codes_are_refused(recipe, message):
    with pytest.raises(UserError, match=message):
        from_recipe(fp8jax.recipes.get(recipe))
    with pytest.raises(UserError, match="unknown 8-bit format 'int4'; use one of tensor, channel, block,"):
        eight_bits("int4")
    recipe = fp8jax.recipes.te_current()
    for spec, name in (("e4m3:tensor", "tensor"), ("e4m3:token", "channel")):
        linear = dataclasses.replace(recipe.linear, w=spec, dy=None, w_dgrad=None, x_wgrad=None)
        with pytest.raises(UserError, match=f"has one scale per {name}, but the deepseek format needs one per block"):
            from_recipe(dataclasses.replace(recipe, linear=linear), deepseek=True)


def test_gpt2_has_no_layers_that_the_formats_know(tmp_path):
    gpt2 = load(checkpoint(tmp_path / "in", "gpt2"))
    with pytest.raises(UserError, match="GPT2LMHeadModel has no linear layers that an 8-bit format supports"):
        save(tmp_path / "out", gpt2.config, gpt2.params, eight=eight_bits("tensor"))


@pytest.fixture(scope="module")
def eight_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight") / "out"
    save(folder, WIDE, params(WIDE), eight=eight_bits("tensor"))
    return folder


def _without(field):
    def change(content):
        content["quantization_config"].pop(field)

    return change


def _with(path, value):
    def change(content):
        *outer, last = path.split(".")
        at = content["quantization_config"]
        for key in outer:
            at = at[key]
        at[last] = value

    return change


def _fp8(**fields):
    return lambda content: content.update(quantization_config={"quant_method": "fp8", **fields})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c.pop("quantization_config"),
            "is stored in 8 bits, but config.json has no quantiz",
        ),
        (_with("quant_method", "gptq"), "quant_method 'gptq' is not supported; compressed-tensors and fp8 are"),
        (_with("quant_method", "fp8"), r"lacks .*q_proj\.weight_scale_inv, the scales of"),
        (_with("config_groups.group_0.weights.num_bits", 4), r"weights\.num_bits is 4; supported are \[8\]"),
        (_with("config_groups.group_0.weights.type", "int"), r"weights\.type is 'int'"),
        (_with("config_groups.group_0.weights.dynamic", True), r"weights\.dynamic is True"),
        (_with("config_groups.group_0.weights.strategy", "group"), r"weights\.strategy is 'group'"),
        (_with("config_groups.group_0.weights.strategy", "block"), r"has blocks of None, not \[rows, columns\]"),
        (
            _with("config_groups.group_0.weights.strategy", "channel"),
            r"weight_scale is \[1\], but its scales must be \[128, 1\]",
        ),
        (_with("config_groups.group_0.weights.symmetric", False), r"weights\.symmetric is False"),
        (_with("config_groups.group_1", {}), "config_groups must be one group, of linear layers; got"),
        (_with("format", "pack-quantized"), "format is 'pack-quantized'"),
        (_fp8(scale_fmt="ue8m0"), r"scale_fmt is 'ue8m0'; supported are \[None, 'float'\]"),
        (_fp8(activation_scheme="static"), "activation_scheme is 'static'"),
        (_fp8(fmt="e5m2"), "fmt is 'e5m2'"),
        (_fp8(weight_block_size=[0, 128]), r"has blocks of \[0, 128\], not \[rows, columns\]"),
        (_with("config_groups.group_0.targets", ["re:.*q_proj"]), r"targets is \['re:"),
        (_with("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme is"),
        (_without("config_groups"), "config_groups must be one group"),
    ],
)
def test_formats_that_are_not_understood_are_refused_by_name(eight_folder, tmp_path, change, message):
    folder = shutil.copytree(eight_folder, tmp_path / "in")
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_scales_that_are_none_are_refused(eight_folder, tmp_path, bad):
    folder = shutil.copytree(eight_folder, tmp_path / "in")
    weights = load_file_of_codes(folder)
    weights["model.layers.1.mlp.up_proj.weight_scale"][0] = bad
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors: .*up_proj\.weight_scale has scales that are not"):
        load(folder)


def test_scales_of_16_bits_are_read_in_32(eight_folder, tmp_path):
    folder = shutil.copytree(eight_folder, tmp_path / "in")
    weights = load_file_of_codes(folder)
    weights = {n: x.astype(ml_dtypes.bfloat16) if n.endswith("weight_scale") else x for n, x in weights.items()}
    save_file(weights, folder / "model.safetensors")
    scale = load(folder, codes=True).params["layers"]["mlp"]["up"]["kernel"].codes.scale
    expected = [weights[f"model.layers.{i}.mlp.up_proj.weight_scale"].astype(np.float32) for i in range(2)]
    assert scale.dtype == np.float32
    np.testing.assert_array_equal(np.ravel(scale), np.ravel(expected))


def test_blocks_of_any_shape_are_decoded(tmp_path):
    blocks = quantized.EightBits("compressed-tensors", "block", (2, 3))
    codes, scale = np.arange(1, 36).reshape(5, 7).astype(quantized.CODES), np.exp2(np.arange(9.0)).reshape(3, 3)
    assert blocks.shape(*codes.shape) == scale.shape
    expected = [[float(codes[i, j]) * scale[i // 2, j // 3] for j in range(7)] for i in range(5)]
    np.testing.assert_array_equal(quantized.decode(blocks, codes, scale), expected)
    assert quantized.read(tmp_path, {"quant_method": "fp8", "weight_block_size": None}).strategy == "tensor"
    assert quantized.read(tmp_path, {"quant_method": "fp8", "weight_block_size": [2, 3]}).block == (2, 3)
    assert quantized.read(tmp_path, {"quant_method": "fp8"}) == quantized.EightBits("fp8", "block", (128, 128))
    with pytest.raises(
        UserError, match=r"blocks of \(2, 3\) can be read as values, but not as codes; codes need blocks of 128 x 128"
    ):
        quantized.frozen(blocks, codes, scale, jnp.asarray)
    for storage in (dataclasses.replace(blocks, activations=True), quantized.EightBits("compressed-tensors", "channel"),
                    quantized.EightBits("fp8", "block", (2, 3))):  # fmt: skip
        assert quantized.read(tmp_path, storage.fields([])) == storage
    group = dataclasses.replace(blocks, activations=True).fields([])["config_groups"]["group_0"]
    assert group["input_activations"]["group_size"] == 3
    fp8 = quantized.EightBits("fp8", "block")
    assert [fp8.fits(*n) for n in ((256, 128), (130, 128), (128, 130))] == [True, False, False]


def test_codes_of_what_is_no_linear_layer_are_refused(eight_folder, tmp_path):
    content = json.loads((eight_folder / "config.json").read_text())["quantization_config"]
    for case, name in (("llama3", "model.norm.weight"), ("llama3", "lm_head.weight"), ("gpt2", "h.0.mlp.c_fc.weight")):
        folder = checkpoint(tmp_path / name, case)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": content}))
        weights = load_file_of_codes(folder)
        (name,) = (full for full in weights if full.endswith(name))
        weights[name] = weights[name].astype(quantized.CODES)
        weights[f"{name.removesuffix('weight')}weight_scale"] = np.ones(1, np.float32)
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(UserError, match=rf"{name} is stored in 8 bits, but only linear layers can be"):
            load(folder)


def load_file_of_codes(folder):
    return {name: x.read() for name, x in files.tensors(folder).items()}
