"""Defaults that results and files depend on. A changed one breaks users: it belongs in the CHANGELOG, then here."""

import dataclasses
import inspect
import pathlib

import numpy as np
import optax
import pytest

import fp8jax
from experiments.train.config import Config
from fp8jax import recipes

ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0, "impl": "auto"}
STORAGE = {"group_size": 128, "expand": True, "min_size": 4096}
ADAMW = ADAM | {"weight_decay": 1e-4}
GRADIENTS = {"comm": "e4m3", "layer_axes": 0, "min_size": 4096}
LIBRARY = {
    "FrozenWeight": {"transposed": False},
    "FusedBlockState": {"name": "", "is_norm_only": False},
    "GroupedProduct": {"transposed": False},
    "QuantSpec": {
        "format": "e4m3", "granularity": "tensor", "axis": -1, "layer_axes": 0, "scale_format": "fp32",
        "rounding": "nearest", "expand": False, "flush_to_zero": True, "outer_scale": "tensor", "fold_scales": True,
        "exponent_rounding": "down",
    },
    "compress_state": STORAGE | {"nu_rounding": "stochastic"},
    "compressed_adamw": ADAMW | STORAGE | {"mu": "e4m3", "nu": "e4m3", "nu_rounding": "auto", "nesterov": False},
    "compute_grad_norm": {"argnums": 0, "has_aux": False},
    "fp8lm_adamw": ADAMW | {"mu": "e4m3", "master_rounding": "nearest", "layer_axes": 0, "min_size": 4096},
    "freeze": {"spec": "e4m3"},
    "glu": {"activation": "silu"},
    "glu_linear": {"activation": "silu"},
    "layer_norm": {"eps": 1e-6},
    "linear_cross_entropy": {
        "ignore_label": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "mean", "vocabulary_axis": -1,
    },
    "max_adam_step": {"b1": 0.9, "b2": 0.999, "weight_decay": 0.0},
    "norm_linear": {"norm": "rms", "eps": 1e-6, "residual": False},
    "optimizer": ADAMW | {"layer_axes": 0, "track_weight_bounds": True},
    "rms_norm": {"eps": 1e-6},
    "save_quantized": {"spec": "e4m3:group16"},
    "scale_by_compressed_adam": ADAM
    | STORAGE
    | {"mu": "e4m3", "nu": "e4m3", "nu_rounding": "auto", "nesterov": False},
    "track_weight_amax": {"interval": 500},
    "value_and_step": {"argnums": 0, "has_aux": False},
    "with_weight_bounds": {"interval": 500},
    "nnx.grad": {"argnums": 0, "has_aux": False},
    "nnx.lora": {"targets": ".*", "base": "e4m3"},
    "nnx.value_and_grad": {"argnums": 0, "has_aux": False},
    "lora.Adapter": {"alpha": 1.0},
    "lora.freeze": {"spec": "e4m3", "targets": ".*kernel"},
    "lora.linear": {"dropout": 0.0},
    "lora.load": {"verify": True},
    "lora.save": {"base": "", "dropout": 0},
    "dist.all_reduce_gradients": GRADIENTS | {"dequantize": True},
    "dist.expert_collectives": {"dtype": "bf16", "kind": "ragged-all-to-all", "times": 1, "dispatches": 1},
    "dist.fsdp_gather_weight": {"dim": 0, "needs_values": True},
    "dist.gather_linear": {"dim": -2},
    "dist.gather_sequence": {"wire_format": "e4m3", "dim": -2},
    "dist.gather_weights": {"wire_format": "e4m3", "gradients": "bf16"},
    "dist.plan": {
        "layer_axes": 0, "tensor_dims": -1, "expert_dims": -1, "microbatches": 1, "activations": 0.0, "logits": 0.0,
        "unsharded": 0.0, "partition": "",
    },
    "dist.reduce_scatter_gradients": GRADIENTS,
    "dist.scatter_sequence": {"wire_format": "e4m3:token", "dim": -2},
    "dist.sequence_collectives": {"dtype": "bf16", "times": 1, "forward_gathers": 1},
    "recipes.Comm": {"form": "two_phase", "auto_scale": False},
    "recipes.Context": {"recompute_activations": False, "amax": "exact"},
    "recipes.Linear": {
        "w_dgrad": "same", "x_wgrad": "same", "dy_wgrad": "same", "x_residual": "same", "scaling": "current",
        "amax_history_length": 1024, "margin": 0, "threshold_update_factor": 1.3, "weight_amax_interval": 500,
        "skip_unprofitable": False,
    },
    "recipes.Optimizer": {"mu": "e4m3", "nu": "e4m3", "group_size": 128, "expand": True, "nu_rounding": "auto"},
    "recipes.Weights": {"master": "fp32", "compute": "bf16"},
}  # fmt: skip
# Options of the training program; those that are None or empty by default are left out.
TRAINING = {
    "recipe": ("bf16", "coat_optimizer"), "seed": 0,
    "field": "text", "tokenizer": "bytes", "vocab": 4096, "seq_len": 256, "batch": 8, "valid_fraction": 0.05,
    "eval_batches": 16,
    "model": "5m", "tied": False,
    "steps": 200, "lr": 1e-3, "final_lr": 0.1, "warmup": 20, "schedule": "cosine", "decay": 0.2, "b1": 0.9, "b2": 0.95,
    "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0, "balance_coefficient": 0.001, "z_coefficient": 0.001,
    "microbatches": 1,
    "lora_rank": 0, "lora_alpha": 16.0, "lora_dropout": 0.0, "lora_targets": ".*", "base": "e4m3",
    "run": "train", "out": pathlib.Path("runs"), "resume": "auto", "log_every": 10, "checkpoint_every": 50, "keep": 2,
    "eval_every": 50, "sample_tokens": 160, "expert_capacity": 0.0, "remat": "auto", "logits": "auto", "profile": 0,
    "telemetry": 0, "on_bad_step": "stop", "max_bad_steps": 10, "max_loss_jump": 0.0, "verbose": False, "patience": 120,
}  # fmt: skip


def defaults(function):
    """The defaults that are numbers, booleans or strings."""
    values = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str | np.integer)}


def list_public():
    for prefix in ("", "nnx", "linen", "lora", "dist", "recipes"):
        module = getattr(fp8jax, prefix) if prefix else fp8jax
        for name in getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]):
            value = getattr(module, name)
            is_error = inspect.isclass(value) and issubclass(value, Exception)
            if callable(value) and not is_error and (found := defaults(value)):
                yield f"{prefix}.{name}".lstrip("."), found


def test_defaults_of_public_functions():
    assert dict(list_public()) == LIBRARY
    assert recipes.Linear().fallback_fraction_range == (0.1, 0.3)
    assert recipes.Linear().fast_accumulation == ("forward",)
    assert recipes.coat().unquantized_blocks == (0, 0)


@pytest.mark.parametrize("name", ["compressed_adamw", "fp8lm_adamw", "optimizer"])
def test_settings_of_adamw_are_those_of_optax(name):
    ours, theirs = LIBRARY[name], defaults(optax.adamw)
    shared = set(ours) & set(theirs)
    assert shared >= {"b1", "b2", "eps", "eps_root", "weight_decay"}
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


def test_defaults_of_the_training_program():
    sections = [Config(), *(x for x in vars(Config()).values() if dataclasses.is_dataclass(x))]
    options = {name: value for section in sections for name, value in vars(section).items()}
    plain = {name: value for name, value in options.items() if not dataclasses.is_dataclass(value)}
    assert {name: value for name, value in plain.items() if value not in (None, "", ())} == TRAINING
