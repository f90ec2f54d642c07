"""The families of checkpoints: to add one, add a record to `ALL`, and a case to tests/experiments/hub_cases.py.

A record converts config.json to a `LlamaConfig` and back, and maps the names of tensors. Matrices are (outputs, inputs)
in checkpoints, and (inputs, outputs) in `LlamaConfig`'s models, with stacked layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.errors import UserError
from experiments.hub.fields import Fields, rope_fields
from experiments.models.shape import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        name: name in the checkpoint; the first "{}" is the layer's number, the second the expert's.
        paths: the model's leaves in the tensor, concatenated along its outputs.
        part: index of the tensor's part of the leaf's outputs, and number of equal parts.
        is_transposed: whether it is (outputs, inputs).
        linear: whether it is the weight of a linear layer other than the head, which 8-bit formats quantize.
        router: whether it belongs to a router, which readers of 8-bit formats must not quantize.
    """

    name: str
    paths: tuple[str, ...]
    is_transposed: bool = False
    linear: bool = False
    router: bool = False
    part: tuple[int, int] = (0, 1)

    @property
    def depth(self) -> int:
        """Number of leading axes of its leaves that stack layers or experts."""
        return self.name.count("{}")

    def shapes(self, flat: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Returns the shape of its part of each leaf, for one layer and expert."""
        suffixes = [flat[path].shape[self.depth :] for path in self.paths]
        return [(*shape[:-1], shape[-1] // self.part[1]) for shape in suffixes]

    def shape(self, flat: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the stored shape of the tensor, for one layer and expert."""
        shapes = self.shapes(flat)
        stored = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
        return stored[::-1] if self.is_transposed else stored

    def indices(self, config: LlamaConfig) -> Iterator[tuple[int, ...]]:
        """Yields the numbers in its names, which are indices of its leaves."""
        return np.ndindex(*(config.layers, config.experts)[: self.depth])


@dataclasses.dataclass(frozen=True)
class Family:
    """The common properties of checkpoints of a `model_type`.

    Attributes:
        name: `model_type`.
        architecture: class name in transformers.
        read: converts fields of config.json to a shape.
        write: converts a shape to fields of config.json. `read` returns another shape if they cannot represent it.
        tensors: returns the tensors of a shape.
        unused: suffixes of names of tensors (buffers) in older files that are ignored.
        prefix: prefix of names, which some files omit.
    """

    name: str
    architecture: str
    read: Callable[[Fields], LlamaConfig]
    write: Callable[[LlamaConfig], dict[str, Any]]
    tensors: Callable[[LlamaConfig], Iterator[Tensor]]
    unused: tuple[str, ...] = (".rotary_emb.inv_freq",)
    prefix: str = "model."


def _llama(fields: Fields, bias: str = "", **settings: Any) -> LlamaConfig:
    """Reads the fields that all families except GPT-2 share."""
    theta, scaling = fields.rope()
    fields.only("hidden_act", "silu", default="silu")
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    # Fields of other kinds of rotary positions. Some families' files state that they are off.
    fields.only("rope_interleaved", False)
    fields.only("use_mrope", False)
    heads, dim = fields.count("num_attention_heads"), fields.count("hidden_size")
    channels = fields.count("head_dim", None)
    return LlamaConfig(
        vocab=fields.count("vocab_size"),
        dim=dim,
        layers=fields.count("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        mlp_dim=settings.pop("mlp_dim", None) or fields.count("intermediate_size"),
        tied=fields.only("tie_word_embeddings", True, default=False),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=settings.pop("norm_eps", None) or fields.number("rms_norm_eps"),
        channels=None if channels is None or channels * heads == dim else channels,
        bias=bias,
        **settings,
    )


def _llama_fields(config: LlamaConfig, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        **rope_fields(config.rope_theta, config.rope_scaling),
        **more,
    }


def _linear(name: str, *paths: str, bias: bool = False, is_transposed: bool = True) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", tuple(f"{path}.kernel" for path in paths), is_transposed, linear=True)
    if bias:
        yield Tensor(f"{name}.bias", tuple(f"{path}.bias" for path in paths))


def _expert_tensors(module: str, gate: str, up: str, down: str) -> Iterator[Tensor]:
    """A router, called gate, and the layers of experts in a module of a layer."""
    ours, layer = "layers.mlp.experts.", f"model.layers.{{}}.{module}."
    yield Tensor(f"{layer}gate.weight", ("layers.mlp.router.kernel",), is_transposed=True, router=True)
    for name, path, part in ((gate, "gate_up", (0, 2)), (up, "gate_up", (1, 2)), (down, "down", (0, 1))):
        yield Tensor(f"{layer}experts.{{}}.{name}.weight", (f"{ours}{path}.kernel",), True, linear=True, part=part)


def _llama_tensors(
    config: LlamaConfig, experts: Sequence[str] = ("mlp", "gate_proj", "up_proj", "down_proj")
) -> Iterator[Tensor]:
    yield Tensor("model.embed_tokens.weight", ("embed.embedding",))
    layer, ours = "model.layers.{}.", "layers."
    for name in ("q", "k", "v"):
        yield from _linear(f"{layer}self_attn.{name}_proj", f"{ours}attention.{name}", bias=config.bias == "qkv")
    yield from _linear(f"{layer}self_attn.o_proj", f"{ours}attention.out")
    if config.experts:
        yield from _expert_tensors(*experts)
    for name in () if config.experts else ("gate", "up", "down"):
        yield from _linear(f"{layer}mlp.{name}_proj", f"{ours}mlp.{name}")
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Tensor(f"{layer}self_attn.{name}.weight", (f"{ours}attention.{name}.scale",))
    if config.norm == "rms":
        norms_after = ("post_attention_layernorm", "post_feedforward_layernorm")
        first, second = norms_after if config.norm_after else ("input_layernorm", "post_attention_layernorm")
        yield Tensor(f"{layer}{first}.weight", (f"{ours}attention_norm.scale",))
        yield Tensor(f"{layer}{second}.weight", (f"{ours}mlp_norm.scale",))
        yield Tensor("model.norm.weight", ("norm.scale",))
    if not config.tied:
        yield Tensor("lm_head.weight", ("head.kernel",), is_transposed=True)


def _qwen(fields: Fields, **settings: Any) -> LlamaConfig:
    # Without use_sliding_window, the window has no effect.
    fields.only("use_sliding_window", False)
    fields.take("sliding_window", None)
    fields.take("max_window_layers", None)
    fields.layers("full_attention")
    return _llama(fields, **settings)


def _mixtral(fields: Fields) -> LlamaConfig:
    fields.only("router_jitter_noise", 0.0)
    experts, chosen = fields.count("num_local_experts"), fields.count("num_experts_per_tok")
    window = fields.count("sliding_window", None)
    return _llama(fields, window=window, experts=experts, experts_per_token=chosen)


def _mixtral_fields(config: LlamaConfig) -> dict[str, Any]:
    chosen = {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
    return _llama_fields(config, sliding_window=config.window, **chosen)


def _qwen3_moe(fields: Fields) -> LlamaConfig:
    # All layers have experts, so no MLP has the width intermediate_size.
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [])
    fields.take("intermediate_size", None)
    return _qwen(
        fields,
        qk_norm="head",
        mlp_dim=fields.count("moe_intermediate_size"),
        # transformers 5 writes the second name.
        experts=fields.count("num_local_experts", fields.count("num_experts", 0)),
        experts_per_token=fields.count("num_experts_per_tok"),
        normalize_choices=fields.only("norm_topk_prob", True, default=False),
    )


def _qwen3_moe_fields(config: LlamaConfig) -> dict[str, Any]:
    return _llama_fields(
        config,
        use_sliding_window=False,
        moe_intermediate_size=config.mlp_dim,
        num_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        norm_topk_prob=config.normalize_choices,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _olmo(fields: Fields) -> LlamaConfig:
    fields.only("clip_qkv")
    return _llama(fields, norm="layer", norm_eps=1e-5)


def _olmo_fields(config: LlamaConfig) -> dict[str, Any]:
    return {k: v for k, v in _llama_fields(config).items() if k not in ("rms_norm_eps", "head_dim")}


def _gpt2(fields: Fields) -> LlamaConfig:
    fields.only("activation_function", "gelu_new", default="gelu_new")
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    heads, dim = fields.count("n_head"), fields.count("n_embd")
    return LlamaConfig(
        vocab=fields.count("vocab_size"),
        dim=dim,
        layers=fields.count("n_layer"),
        heads=heads,
        kv_heads=heads,
        mlp_dim=fields.count("n_inner", 4 * dim),
        tied=fields.only("tie_word_embeddings", False, default=True),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        norm="layer_bias",
        bias="all",
        mlp="gelu",
        learned_positions=fields.count("n_positions"),
    )


def _gpt2_fields(config: LlamaConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab,
        "n_embd": config.dim,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp_dim,
        "n_positions": config.learned_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": config.tied,
    }


def _gpt2_tensors(config: LlamaConfig) -> Iterator[Tensor]:
    yield Tensor("transformer.wte.weight", ("embed.embedding",))
    yield Tensor("transformer.wpe.weight", ("embed_position.embedding",))
    layer, ours, options = "transformer.h.{}.", "layers.", {"bias": True, "is_transposed": False}
    qkv = [f"{ours}attention.{name}" for name in "qkv"]
    yield from _linear(f"{layer}attn.c_attn", *qkv, **options)
    yield from _linear(f"{layer}attn.c_proj", f"{ours}attention.out", **options)
    yield from _linear(f"{layer}mlp.c_fc", f"{ours}mlp.up", **options)
    yield from _linear(f"{layer}mlp.c_proj", f"{ours}mlp.down", **options)
    norms = {f"{layer}ln_1": f"{ours}attention_norm", f"{layer}ln_2": f"{ours}mlp_norm", "transformer.ln_f": "norm"}
    for theirs, path in norms.items():
        yield Tensor(f"{theirs}.weight", (f"{path}.scale",))
        yield Tensor(f"{theirs}.bias", (f"{path}.bias",))
    if not config.tied:
        yield Tensor("lm_head.weight", ("head.kernel",), is_transposed=True)


ALL = (
    Family("llama", "LlamaForCausalLM", _llama, _llama_fields, _llama_tensors),
    Family(
        "mistral",
        "MistralForCausalLM",
        lambda fields: _llama(fields, window=fields.count("sliding_window", None)),
        lambda config: _llama_fields(config, sliding_window=config.window),
        _llama_tensors,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        lambda fields: _qwen(fields, bias="qkv"),
        lambda config: _llama_fields(config, use_sliding_window=False),
        _llama_tensors,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        lambda fields: _qwen(fields, qk_norm="head"),
        lambda config: _llama_fields(config, use_sliding_window=False),
        _llama_tensors,
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        _mixtral,
        _mixtral_fields,
        functools.partial(_llama_tensors, experts=("block_sparse_moe", "w1", "w3", "w2")),
    ),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, _qwen3_moe_fields, _llama_tensors),
    Family("olmo", "OlmoForCausalLM", _olmo, _olmo_fields, _llama_tensors),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        lambda fields: _llama(fields, norm_after=True, qk_norm="width"),
        _llama_fields,
        _llama_tensors,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        _gpt2,
        _gpt2_fields,
        _gpt2_tensors,
        unused=(".attn.bias", ".attn.masked_bias"),
        prefix="transformer.",
    ),
)


def read(path: Path, content: dict[str, Any]) -> tuple[Family, LlamaConfig]:
    """Returns the family of a config.json, and its shape.

    Raises:
        UserError: the architecture or a field is unknown, or the shape is invalid.
    """
    names = content.get("architectures") or [None]
    if not isinstance(names, list):
        raise UserError(f"{path}: architectures is {names!r}, not a list of names")
    family = next((x for x in ALL if x.name == content.get("model_type")), None)
    if family is None or names[0] not in (None, family.architecture):
        supported = ", ".join(x.architecture for x in ALL)
        raise UserError(
            f"{path}: model_type {content.get('model_type')!r} with architecture {names[0]!r} is not supported; "
            f"supported are {supported}"
        )
    fields = Fields(path, content)
    try:
        config = family.read(fields)
        fields.close()
        config.validate()
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None
    return family, config


def of(config: LlamaConfig) -> Family:
    """Returns the family for a shape: the first one whose config.json can represent it.

    Raises:
        UserError: there is none.
    """
    for family in ALL:
        content = {"model_type": family.name, **family.write(config)}
        try:
            if read(Path("config.json"), content)[1] == config:
                return family
        except UserError:
            continue
    raise UserError(f"no known family of checkpoints has a model of this shape: {config}")
