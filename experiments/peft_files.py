"""Adapters in the files of `peft`: adapter_config.json and adapter_model.safetensors, written and read.

Of Llamas and their relatives whose projections are layers of their own. There a matrix is (outputs, inputs) and each
layer has tensors of its own; here it is (inputs, outputs), and layers are stacked.
"""

import dataclasses
import importlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import report
from experiments.config import UserError
from experiments.result import parse_json
from fp8jax.lora import Adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# A projection's path here and its name there.
NAMES = {
    "layers/attention/q": "self_attn.q_proj",
    "layers/attention/k": "self_attn.k_proj",
    "layers/attention/v": "self_attn.v_proj",
    "layers/attention/out": "self_attn.o_proj",
    "layers/mlp/gate": "mlp.gate_proj",
    "layers/mlp/up": "mlp.up_proj",
    "layers/mlp/down": "mlp.down_proj",
}
_PATHS = {name: path for path, name in NAMES.items()}
_TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(\w+\.\w+)\.lora_([AB])\.weight")
# Settings of peft that change nothing of what a saved adapter computes, and those read here. Any other one, in this
# version of peft or in a later one, has to be empty.
_KNOWN = {
    *("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules"),
    *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("peft_version", "megatron_core", "ensure_weight_tying", "qalora_group_size", "eva_config", "runtime_config"),
}
_EMPTY: tuple[Any, ...] = (None, False, "none", {}, [])
# Of these alone the base is what it was; others, such as PiSSA, train beside another one.
_STARTS = (True, False, "gaussian", "orthogonal", "eva")


def of_params(params: Any, alpha: float) -> dict[str, Adapter]:
    """The adapters of a training state, by the path of their layer."""
    found: dict[str, Adapter] = {}

    def walk(tree: Mapping[str, Any], path: tuple[str, ...]) -> None:
        if "lora_a" in tree:
            found["/".join(path)] = Adapter(tree["lora_a"], tree["lora_b"], alpha)
            return
        for name, inner in tree.items():
            walk(inner, (*path, name))

    walk(params, ())
    return found


def save(folder: Path, adapters: Mapping[str, Adapter], *, base: str = "", dropout: float = 0.0) -> None:
    """Writes both files, fp32, which `peft.PeftModel.from_pretrained(model, folder)` reads.

    Args:
        folder: made where missing.
        adapters: by the path of their layer, stacked, all of one rank and alpha.
        base: name or folder of the model that they belong to, for `base_model_name_or_path`.
        dropout: that they were trained with.

    Raises:
        UserError: a layer has no name there, or the package safetensors is not installed.
    """
    safetensors = _library()
    if unknown := sorted(set(adapters) - set(NAMES)):
        raise UserError(f"{folder}: peft's files have no name for the adapter of {unknown[0]}")
    first = next(iter(adapters.values()))
    if any((a.rank, a.alpha) != (first.rank, first.alpha) for a in adapters.values()):
        raise UserError(f"{folder}: adapters of several ranks or alphas are not written here")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(NAMES[path].rpartition(".")[2] for path in adapters),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
    }
    tensors = {}
    for path, adapter in adapters.items():
        for which, stacked in (("A", adapter.a), ("B", adapter.b)):
            for i, matrix in enumerate(np.asarray(stacked, np.float32)):
                name = f"base_model.model.model.layers.{i}.{NAMES[path]}.lora_{which}.weight"
                tensors[name] = np.ascontiguousarray(matrix.T)
    folder.mkdir(parents=True, exist_ok=True)
    # The weights last: a folder that was cut short has none.
    report.write_json(folder / CONFIG, config)
    safetensors.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load(folder: Path) -> dict[str, Adapter]:
    """Adapters by the path of their layer, stacked, fp32.

    Raises:
        UserError: a file is missing or damaged; a setting changes what is computed in a way that is not known here; or
            tensors have other names, are missing in some layer, or are of different shapes. The message names it.
    """
    safetensors = _library()
    config = _read_config(folder / CONFIG)
    try:
        tensors = safetensors.load_file(folder / WEIGHTS)
    except Exception as error:  # of the library, and OSError
        raise UserError(f"{folder / WEIGHTS} cannot be read ({error})") from None
    found: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    for name, values in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[2] not in _PATHS:
            raise UserError(f"{folder / WEIGHTS}: {name} is the name of no adapter known here")
        parts = found.setdefault(_PATHS[match[2]], {"A": {}, "B": {}})
        parts[match[3]][int(match[1])] = np.asarray(values, np.float32).T
    layers = sorted({i for parts in found.values() for each in parts.values() for i in each})
    if layers != list(range(len(layers))) or not layers:
        raise UserError(f"{folder / WEIGHTS} has adapters of the layers {layers}, not of all from 0 on")
    alpha, adapters = config.alpha, {}
    for path, parts in found.items():
        stacked = []
        for which, each in parts.items():
            if missing := [i for i in layers if i not in each]:
                raise UserError(f"{folder / WEIGHTS} lacks lora_{which} of {NAMES[path]} in layer {missing[0]}")
            if len(shapes := {x.shape for x in each.values()}) > 1:
                raise UserError(f"{folder / WEIGHTS}: lora_{which} of {NAMES[path]} has several shapes, {shapes}")
            stacked.append(np.stack([each[i] for i in layers]))
        if stacked[0].shape[-1] != config.rank or stacked[1].shape[-2] != config.rank:
            raise UserError(f"{folder / CONFIG} has r={config.rank}; {NAMES[path]} has {stacked[0].shape[-1]}")
        adapters[path] = Adapter(stacked[0], stacked[1], alpha)  # type: ignore[arg-type]
    return adapters


@dataclasses.dataclass(frozen=True)
class _Settings:
    rank: int
    alpha: float


def _read_config(path: Path) -> _Settings:
    try:
        config = parse_json(path.read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error!r})") from None
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {config.get('peft_type')!r}; known here is 'LORA'")
    for name, value in config.items():
        if name not in _KNOWN and value not in _EMPTY:
            raise UserError(f"{path}: {name} = {json.dumps(value)} is not known here")
    if config.get("init_lora_weights", True) not in _STARTS:
        raise UserError(f"{path}: init_lora_weights = {config['init_lora_weights']!r} changes the base, too")
    # Rank-stabilised: alpha over the root of the rank.
    return _Settings(rank, alpha * math.sqrt(rank) if config.get("use_rslora") else alpha)


def _library() -> Any:
    try:
        return importlib.import_module("safetensors.numpy")
    except ModuleNotFoundError:
        raise UserError("adapters are written and read by the package safetensors: pip install safetensors") from None
