"""Tiny checkpoints of each family: configurations for transformers, and weights by their names and shapes.

Weights are drawn from NumPy's frozen legacy stream. Files contain the outputs of another library, and no weights.
`make_hub_golden.py` writes the files of tests/data/hub.
"""

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent.parent / "data" / "hub"
VOCAB, LENGTH = 40, 20
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "default", "rope_theta": 500.0}
_LLAMA31 = {"rope_type": "llama3", "rope_theta": 500.0, **_SCALING}
_QWEN3_MOE = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}

# case -> class of the configuration, and its settings
CASES = {
    "llama2": ("LlamaConfig", {**_SHAPE, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}),
    "llama3": ("LlamaConfig", {**_SHAPE, "rms_norm_eps": 1e-5, "rope_parameters": _LLAMA3}),
    "llama31": ("LlamaConfig", {**_SHAPE, "rope_parameters": _LLAMA31}),
    "llama32": ("LlamaConfig", {**_SHAPE, "tie_word_embeddings": True, "head_dim": 16, "rope_parameters": _LLAMA31}),
    "mistral": ("MistralConfig", {**_SHAPE, "sliding_window": None}),
    "mistral_window": ("MistralConfig", {**_SHAPE, "sliding_window": 6}),
    "mistral_nemo": ("MistralConfig", {**_SHAPE, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {**_SHAPE, "use_sliding_window": False, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2_tied": ("Qwen2Config", {**_SHAPE, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen3": ("Qwen3Config", {**_SHAPE, "head_dim": 16}),
    "qwen3_tied": ("Qwen3Config", {**_SHAPE, "head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {**_SHAPE, "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_SHAPE, **_QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe_plain": ("Qwen3MoeConfig", {**_SHAPE, **_QWEN3_MOE, "norm_topk_prob": False, "num_experts_per_tok": 3}),
    "olmo": ("OlmoConfig", {**_SHAPE, "clip_qkv": None}),
    "olmo2": ("Olmo2Config", {**_SHAPE, "rms_norm_eps": 1e-6}),
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
                            "bos_token_id": 1, "eos_token_id": 2}),
}  # fmt: skip


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a float32 weight by its name and shape, large enough for sharp attention and to show each feature."""
    stream = np.random.RandomState(zlib.crc32(name.encode()))
    values = stream.randint(-(2**15), 2**15, shape) / 2.0**15 * 3**0.5
    if "norm" in name or "ln_" in name:
        return (0.3 * values + (not name.endswith("bias"))).astype(np.float32)
    wide = max(shape) if "embed" in name or name.endswith(("wte.weight", "wpe.weight")) else shape[-1]
    return ((0.5 if len(shape) == 1 else 1.3 / 32**0.5 if wide < VOCAB else 0.2) * values).astype(np.float32)


def golden(case: str) -> dict:
    """Returns another library's results for a case: its config.json, names and shapes, and logits of tokens."""
    return json.loads((GOLDEN / f"{case}.json").read_text())


def write(folder: Path, config: dict, shapes: dict[str, list[int]], dtype=np.float32, shards: int = 1) -> Path:
    """Writes a checkpoint of drawn weights like the Hub's, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: draw(name, tuple(shape)).astype(dtype) for name, shape in shapes.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({n: weights[n] for n in weights if places[n] == file}, folder / file, metadata={"format": "pt"})
    total = sum(x.nbytes for x in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
