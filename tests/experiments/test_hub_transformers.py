"""Checkpoints exchanged with transformers and compressed-tensors, if they are installed (`--group hub-test`)."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from experiments import generate  # noqa: E402
from experiments.export import tokenizer_files  # noqa: E402
from experiments.hub import files  # noqa: E402
from experiments.hub.load import load  # noqa: E402
from experiments.hub.save import eight_bits, save  # noqa: E402
from experiments.models.llama import LlamaConfig  # noqa: E402
from experiments.text.tokenizer import BytePair, Bytes  # noqa: E402
from tests.experiments import hub_cases as cases  # noqa: E402
from tests.experiments.make_hub_golden import make  # noqa: E402
from tests.experiments.test_hub_save import params  # noqa: E402

pytestmark = pytest.mark.slow

# 128 divides all sizes, so the "fp8" format supports every layer.
WIDE = LlamaConfig(vocab=40, dim=256, layers=2, heads=4, kv_heads=2, mlp_dim=384)
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 20))


def read(folder, **kwargs):
    model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager", **kwargs
    )
    assert not any(loading_info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading_info
    return model.eval()


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens))).logits.numpy()


def relative(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))


@pytest.mark.parametrize("case", cases.CASES)
def test_there_and_back(case, tmp_path):
    theirs = make(case)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="30KB")
    ours = load(tmp_path / "in")
    expected = logits(theirs)
    with jax.default_matmul_precision("highest"):
        assert relative(ours.model(jnp.float32)(jnp.asarray(TOKENS)), expected) < 1e-5
    save(tmp_path / "like", ours.config, ours.params, like=tmp_path / "in", shard_bytes=30_000)
    save(tmp_path / "alone", ours.config, ours.params)
    for name in ("like", "alone"):
        back = read(tmp_path / name)
        np.testing.assert_array_equal(logits(back), expected)
        for key, weight in theirs.state_dict().items():
            assert torch.equal(back.state_dict()[key], weight), key


@pytest.mark.parametrize("case", ["llama31", "olmo2", "gpt2"])
def test_gradients_are_those_of_transformers(case, tmp_path):
    theirs = make(case)
    theirs.save_pretrained(tmp_path / "in")
    ours = load(tmp_path / "in")
    tokens = torch.from_numpy(TOKENS)
    theirs(tokens, labels=tokens).loss.backward()

    def loss(params):
        logits = ours.__class__(ours.folder, ours.family, ours.config, params).model(jnp.float32)(jnp.asarray(TOKENS))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(TOKENS)[:, 1:, None], -1)
        return -picked.mean()

    with jax.default_matmul_precision("highest"):
        grads = jax.grad(loss)(ours.params)
    save(tmp_path / "grads", ours.config, grads)
    for name, x in files.tensors(tmp_path / "grads").items():
        expected = dict(theirs.named_parameters())[name].grad.numpy()
        assert relative(x.read(), expected) < 1e-4, name


@pytest.mark.parametrize("name", ["tensor", "channel", "block", "deepseek", "channel, tied", "deepseek, tied"])
def test_8_bit_folders_are_decoded_to_our_values(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    name, _, tied = name.partition(", ")
    wide = dataclasses.replace(WIDE, tied=bool(tied))
    save(tmp_path / "8", wide, params(wide), eight=eight_bits(name), dtype=jnp.float32)
    values = load(tmp_path / "8", dtype=jnp.float32)
    save(tmp_path / "32", wide, values.params)
    plain = read(tmp_path / "32")
    eight = read(tmp_path / "8")
    np.testing.assert_array_equal(logits(eight), logits(plain))
    exact = load_exact(tmp_path, wide)
    assert 0.005 < relative(logits(eight), exact) < 0.3


def load_exact(folder, wide):
    save(folder / "exact", wide, params(wide))
    return logits(read(folder / "exact"))


@pytest.mark.parametrize("name", ["tensor", "channel", "block"])
def test_compressed_tensors_makes_our_codes_with_our_scales(name, tmp_path):
    """Its own quantizer, with the weights and our scales: a tie may round either way."""
    ct = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    weights = params(WIDE)
    save(tmp_path / "8", WIDE, weights, eight=eight_bits(name), dtype=jnp.float32)
    stored = files.tensors(tmp_path / "8")
    config = json.loads((tmp_path / "8" / "config.json").read_text())["quantization_config"]
    scheme = ct.QuantizationConfig.model_validate(config).config_groups["group_0"]
    args = scheme.weights
    kernels = {"self_attn.q_proj": ("attention", "q"), "mlp.down_proj": ("mlp", "down")}
    for key, (part, ours) in kernels.items():
        codes, scale = (stored[f"model.layers.1.{key}.{x}"].read() for x in ("weight", "weight_scale"))
        w = np.array(weights["layers"][part][ours]["kernel"][1]).T.copy()
        theirs = forward.quantize(torch.from_numpy(w), torch.from_numpy(scale), None, args, dtype=torch.float8_e4m3fn)
        different = theirs.view(torch.uint8).numpy() != codes.view(np.uint8)
        assert different.mean() < 1e-3
        decoded = forward.dequantize(
            torch.from_numpy(codes.view(np.uint8).copy()).view(torch.float8_e4m3fn), torch.from_numpy(scale), args=args
        )
        kernel = load(tmp_path / "8", dtype=jnp.float32).params["layers"][part][ours]["kernel"][1]
        np.testing.assert_array_equal(decoded.float().numpy(), np.asarray(kernel).T)


def test_folders_of_their_own_quantizer_are_read(tmp_path):
    """Weights that compressed-tensors compressed, as llm-compressor saves them."""
    pytest.importorskip("compressed_tensors")
    ct = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    save(tmp_path / "exact", WIDE, params(WIDE))
    model = read(tmp_path / "exact")
    config = ct.QuantizationConfig.model_validate(eight_bits("channel", activations=True).storage.fields(["lm_head"]))
    ct.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 448
            module.weight_scale.data.copy_(scale)
    compressors.ModelCompressor.from_pretrained_model(model).compress_model(model)
    weights = {k: v for k, v in model.state_dict().items()}
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in weights.items()}, tmp_path / "exact" / "model.safetensors")
    content = json.loads((tmp_path / "exact" / "config.json").read_text())
    content["quantization_config"] = json.loads(config.model_dump_json())
    (tmp_path / "exact" / "config.json").write_text(json.dumps(content))
    ours = load(tmp_path / "exact", dtype=jnp.float32).params["layers"]["mlp"]["up"]["kernel"][0]
    module = model.model.layers[0].mlp.up_proj
    expected = module.weight.detach().float() * module.weight_scale.detach().float()
    np.testing.assert_array_equal(np.asarray(ours).T, expected.numpy())


def test_tokenizers_of_runs_give_the_ids_of_training(tmp_path):
    texts = ["the <|document|> w5 w7", "añ\n\t 漢", "<|document|>", "Ā"]
    pairs = BytePair.train(["the cat and the hat <|document|> " * 20], 300)
    for i, tokenizer in enumerate((pairs, Bytes())):
        folder = tmp_path / str(i)
        save(folder, WIDE, params(WIDE), extra_files=tokenizer_files(tokenizer, 128))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ids = [theirs(text)["input_ids"] for text in texts]
        np.testing.assert_array_equal(np.concatenate(ids), tokenizer.encode(texts))
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.model_max_length) == (0, 0, 128)
        assert [theirs.decode(x, skip_special_tokens=True) for x in ids] == texts


def test_the_command_line_writes_what_transformers_writes(tmp_path, capsys):
    save(tmp_path / "out", WIDE, params(WIDE), extra_files=tokenizer_files(Bytes(), 128))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    vocab = LlamaConfig(vocab=256, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=96)
    save(tmp_path / "bytes", vocab, params(vocab), extra_files=tokenizer_files(Bytes(), 128))
    model = read(tmp_path / "bytes")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bytes")
    inputs = tokenizer("some words", return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
    flags = ["--model", str(tmp_path / "bytes"), "--prompt", "some words", "--tokens", "20", "--dtype", "float32"]
    assert generate.main(flags) == 0
    assert capsys.readouterr().out == tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    assert config["model_type"] == "llama"
