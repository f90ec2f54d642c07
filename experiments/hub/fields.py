"""Reads a config.json without ignoring any field: each one is used, known to be harmless, or rejected by name."""

import math
from pathlib import Path
from typing import Any

from experiments.errors import UserError
from experiments.models.rope import RopeScaling

# Fields that do not change logits: training, generation, bookkeeping, other tasks, implementation.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _model_name_or_path _name_or_path architectures
    attention_dropout attn_implementation attn_pdrop bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id fp8jax_digests gradient_checkpointing hidden_dropout id2label initializer_range is_decoder
    is_encoder_decoder is_llama_config label2id length_penalty max_length max_position_embeddings
    max_sequence_length min_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token_id
    prefix pretraining_tp problem_type quantization_config remove_invalid_values reorder_and_upcast_attn
    router_aux_loss_coef repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16
    use_cache
    """.split()  # noqa: SIM905
)
_REQUIRED = object()


class Fields:
    """The fields of a config.json, each to be read once. `close` rejects unread fields."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self._left = path, dict(content)

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a field's value, or the default if it is missing or null.

        Raises:
            UserError: the field is missing and has no default.
        """
        value = self._left.pop(name, None)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise UserError(f"{self.path} lacks {name}")
        return default

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """`take` for a finite number.

        Raises:
            UserError: the value is not a finite number.
        """
        value = self.take(name, default)
        if value is not None and not _finite(value):
            raise UserError(f"{self.path}: {name} is {value!r}, not a number")
        return value

    def count(self, name: str, default: Any = _REQUIRED) -> Any:
        """`number` for an integer."""
        value = self.number(name, default)
        if value is not None and not isinstance(value, int):
            raise UserError(f"{self.path}: {name} is {value!r}, not an integer")
        return value

    def only(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """`take` for a field with only some supported values.

        Raises:
            UserError: the value is not supported.
        """
        value = self.take(name, default)
        if value != default and value not in allowed:
            supported = " or ".join(map(repr, allowed)) or "null"
            raise UserError(f"{self.path}: {name} is {value!r}, which changes the model; only {supported} is supported")
        return value

    def layers(self, kind: str) -> None:
        """Rejects layers of any other kind, such as "full_attention"."""
        kinds = self.take("layer_types", [])
        if set(kinds) - {kind}:
            raise UserError(f"{self.path}: layer_types has {sorted(set(kinds))}; only {kind} is supported")

    def rope(self) -> tuple[float, RopeScaling | None]:
        """Returns the base of the rotary frequencies and their scaling, from fields of transformers 5 or older.

        Raises:
            UserError: the scaling type is not "llama3".
        """
        theta, parts = self.number("rope_theta", 10_000.0), dict[str, Any]()
        for name in ("rope_scaling", "rope_parameters"):
            part = self.take(name, {})
            if not isinstance(part, dict):
                raise UserError(f"{self.path}: {name} is {part!r}, not an object")
            parts |= {k: v for k, v in part.items() if v is not None}
        old_type, rope_type = parts.pop("type", "default"), parts.pop("rope_type", None)
        rope_type = old_type if rope_type is None else rope_type
        theta = parts.pop("rope_theta", theta)
        if wrong := {k: v for k, v in {"rope_theta": theta, **parts}.items() if not _finite(v)}:
            raise UserError(f"{self.path}: rope settings {wrong} are not numbers")
        scaling = None
        if rope_type == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            if missing := [name for name in names if name not in parts]:
                raise UserError(f"{self.path}: rope scaling llama3 lacks {', '.join(missing)}")
            scaling = RopeScaling(*(parts.pop(name) for name in names))
        elif rope_type != "default":
            raise UserError(f"{self.path}: rope type {rope_type!r} is not supported; only 'default' and 'llama3' are")
        if parts:
            raise UserError(f"{self.path}: rope {rope_type} with {parts} is not supported")
        return theta, scaling

    def close(self) -> None:
        """Rejects unread fields that are not null and may change the model."""
        unread = {k: v for k, v in self._left.items() if v is not None and k not in HARMLESS}
        if unread:
            listed = ", ".join(f"{k} = {v!r}" for k, v in sorted(unread.items()))
            raise UserError(f"{self.path}: unknown fields, which may change the model: {listed}")


def _finite(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # An integer may exceed the range of floats.
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def rope_fields(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the fields for `Fields.rope`, in a form that all versions of transformers read."""
    if scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    rope = {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original_length,
    }
    return {"rope_theta": theta, "rope_scaling": rope}
