"""The table of model sizes. To add a size, add a row.

1m to 15m are for machines without an accelerator. 60m to 350m have the shapes of papers on low-memory optimizers. 1b
and 3b are similar to recent small Llamas. 7b and 13b are from Llama 2, 8b from Llama 3, 30b from the first Llama. 175b
has the width and depth of GPT-3. Sizes olmo- have OLMo's norms. olmo-1b and olmo-7b are from OLMo (Groeneveld et al.,
2024, Table 1); the first has a tied head.

Sizes moe- have experts. moe-mixtral-8x7b and moe-mixtral-8x22b are from Mixtral (Jiang et al., 2024, and its
config.json), moe-qwen3-30b-a3b and moe-qwen3-235b-a22b from Qwen3 (Yang et al., 2025, Table 2, and its config.json).
moe-tiny is for tests. moe-50m has 44 M active parameters in its layers.
"""

import dataclasses

from experiments.models.shape import LlamaConfig

#                dim  layers heads kv_heads mlp_dim
_TABLE = {
    "1m": (128, 4, 4, 2, 384),
    "5m": (256, 6, 4, 2, 768),
    "15m": (384, 8, 6, 3, 1024),
    "60m": (512, 8, 8, 8, 1376),
    "125m": (768, 12, 12, 12, 2048),
    "350m": (1024, 24, 16, 16, 2736),
    "1b": (2048, 16, 32, 8, 8192),
    "3b": (3072, 28, 24, 8, 8192),
    "7b": (4096, 32, 32, 32, 11008),
    "8b": (4096, 32, 32, 8, 14336),
    "13b": (5120, 40, 40, 40, 13824),
    "30b": (6656, 60, 52, 52, 17920),
    "175b": (12288, 96, 96, 96, 32768),
    "olmo-5m": (256, 6, 4, 4, 768),
    "olmo-1b": (2048, 16, 16, 16, 8192),
    "olmo-7b": (4096, 32, 32, 32, 11008),
}

_MIXTRAL = LlamaConfig(
    0, 4096, 32, 32, 8, 14336, rope_theta=1e6, norm_eps=1e-5, experts=8, experts_per_token=2
)  # fmt: skip
_QWEN3 = LlamaConfig(
    0, 2048, 48, 32, 4, 768, rope_theta=1e6, norm_eps=1e-6, qk_norm="head", channels=128,
    experts=128, experts_per_token=8,
)  # fmt: skip
_WITH_EXPERTS = {
    "moe-tiny": dataclasses.replace(_QWEN3, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=32, channels=None,
                                    experts=8, experts_per_token=2),
    "moe-50m": dataclasses.replace(_QWEN3, dim=512, layers=8, heads=8, kv_heads=4, mlp_dim=384, channels=None,
                                   experts=64, experts_per_token=8),
    "moe-mixtral-8x7b": _MIXTRAL,
    "moe-mixtral-8x22b": dataclasses.replace(_MIXTRAL, dim=6144, layers=56, heads=48, mlp_dim=16384),
    "moe-qwen3-30b-a3b": _QWEN3,
    "moe-qwen3-235b-a22b": dataclasses.replace(_QWEN3, dim=4096, layers=94, heads=64, mlp_dim=1536),
}  # fmt: skip

NAMES = (*_TABLE, *_WITH_EXPERTS)


def get(name: str, vocab: int, *, tied: bool = False) -> LlamaConfig:
    """Returns the shape of that name with a vocabulary of `vocab`.

    Raises:
        ValueError: no such size; the message lists those that exist.
    """
    if name not in NAMES:
        raise ValueError(f"unknown model size {name!r}; use one of {', '.join(NAMES)}")
    if name in _WITH_EXPERTS:
        return dataclasses.replace(_WITH_EXPERTS[name], vocab=vocab, tied=tied)
    dim, layers, heads, kv_heads, mlp_dim = _TABLE[name]
    norm = "layer" if name.startswith("olmo-") else "rms"
    return LlamaConfig(vocab, dim, layers, heads, kv_heads, mlp_dim, tied=tied, norm=norm)
