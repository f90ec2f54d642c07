"""Adapter files of `peft`: reads and writes adapter_config.json and adapter_model.safetensors.

In peft matrices are (outputs, inputs), one per layer. Here they are (inputs, outputs), and layers may be stacked.
"""

import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp8jax.ops.products.lora import Adapter

# Entry of `__metadata__`: a JSON object of digests by tensor name.
KEY = "fp8jax.sha256"


def digest(array: np.ndarray) -> str:
    """Return the SHA-256 of dtype, shape and row-major bytes, in hexadecimal."""
    hasher = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    # Extension dtypes (bfloat16, float8) have no buffer interface.
    hasher.update(np.ascontiguousarray(array).view(np.uint8))
    return hasher.hexdigest()


def entries(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the entries of `__metadata__` for a file of these tensors."""
    return {KEY: json.dumps({name: digest(x) for name, x in tensors.items()})}


def read(metadata: Mapping[str, str] | None, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of a file by tensor name; empty for a file without digests.

    Raises:
        ValueError: the digests do not match the names.
    """
    if not metadata or KEY not in metadata:
        return {}
    try:
        tensor_digests = json.loads(metadata[KEY])
    except (ValueError, RecursionError):
        tensor_digests = None
    if not isinstance(tensor_digests, dict) or not all(isinstance(x, str) for x in tensor_digests.values()):
        raise ValueError(f"{KEY} in its metadata is damaged")
    for name in sorted({*names} ^ tensor_digests.keys()):
        raise ValueError(f"{name} has a digest but no values" if name in tensor_digests else f"{name} has no digest")
    return tensor_digests


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings of peft that do not change a saved adapter's result, and those read here. All others, also of later versions,
# must be empty.
_KNOWN_SETTINGS = {
    *("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules"),
    *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("peft_version", "megatron_core", "ensure_weight_tying", "qalora_group_size", "eva_config", "runtime_config"),
}
_EMPTY_VALUES: tuple[Any, ...] = ("none", {}, [])
# Initialisations that keep the base weight. Others, such as PiSSA, train with another one.
_INITS_KEEPING_BASE = (True, False, "gaussian", "orthogonal", "eva")
# Settings that change an adapter's result. `save` also writes them to the file of weights.
_CHECKED_SETTINGS, _SETTINGS_KEY = ("r", "lora_alpha", "use_rslora"), "fp8jax.adapter"


def save(
    folder: Path | str, adapters: Mapping[str, Adapter], names: Mapping[str, str], *, base: str = "", dropout: float = 0
) -> None:
    """Write adapters, fp32, in the format of `peft.PeftModel.from_pretrained(model, folder)`.

    The file of weights also holds digests of the tensors, rank and alpha, with which `load` detects damage.

    Args:
        folder: created if missing.
        adapters: adapters by path, of one rank and alpha, from `fp8jax.lora.init` or `fp8jax.nnx.adapters`.
        names: peft's module name by path, such as "model.layers.{}.self_attn.q_proj". {} is the number of a stacked
            layer.
        base: name or folder of the base model.
        dropout: dropout rate of the training.

    Raises:
        ValueError: a path has no name, adapters differ in rank or alpha, or alpha is not positive and finite. Or a name
            has {} and its adapter is not stacked once, or the reverse.
        ModuleNotFoundError: the package safetensors is not installed.
    """
    folder, safetensors = Path(folder), _import_safetensors()
    if unknown := sorted(set(adapters) - set(names)):
        raise ValueError(f"{folder}: there is no PEFT name for the adapter of {unknown[0]}")
    if not adapters:
        raise ValueError(f"{folder}: there are no adapters")
    first = next(iter(adapters.values()))
    if any((a.rank, a.alpha) != (first.rank, first.alpha) for a in adapters.values()):
        raise ValueError(f"{folder}: adapters with different ranks or alphas are not supported")
    if not _is_alpha(first.alpha):
        raise ValueError(f"{folder}: alpha of an adapter must be positive and finite, got {first.alpha}")
    tensors = {}
    for path, adapter in adapters.items():
        name, stacked = names[path], "{}" in names[path]
        if adapter.a.ndim != 2 + stacked:
            raise ValueError(
                f"{folder}: the adapter of {path} is stacked {adapter.a.ndim - 2} times, but its name is {name}"
            )
        for which, factor in (("A", adapter.a), ("B", adapter.b)):
            values = np.asarray(factor, np.float32)
            for i, matrix in enumerate(values if stacked else values[None]):
                tensors[f"base_model.model.{name.format(i)}.lora_{which}.weight"] = np.ascontiguousarray(matrix.T)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": dropout,
        "target_modules": sorted({names[path].rpartition(".")[2] for path in adapters}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    # Write the weights last and atomically, so that an incomplete folder has none.
    partial_path = folder / f"{WEIGHTS}.partial"
    settings = {name: config[name] for name in _CHECKED_SETTINGS}
    metadata = {"format": "pt", _SETTINGS_KEY: json.dumps(settings), **entries(tensors)}
    safetensors.numpy.save_file(tensors, partial_path, metadata=metadata)
    os.replace(partial_path, folder / WEIGHTS)


def load(folder: Path | str, names: Mapping[str, str], *, verify: bool = True) -> dict[str, Adapter]:
    """Return the adapters of the files by path, fp32, stacked if the name has {}.

    Args:
        folder: folder with both files.
        names: as in `save`.
        verify: whether to compare tensors, rank and alpha with the digests of `save`. Use False after an intended
            change. Files of other programs have no digests and are not verified.

    Raises:
        ValueError: a file is missing or damaged, a setting is unsupported or invalid, or tensors have unknown names,
            missing layers or different shapes. The message has the details.
        ModuleNotFoundError: as in `save`.
    """
    folder, safetensors = Path(folder), _import_safetensors()
    config = _read_config(folder / CONFIG)
    rank, alpha = config["r"], float(config["lora_alpha"])
    tensors = _read_tensors(folder, safetensors, config if verify else None)
    patterns = {path: re.compile(re.escape(name).replace(r"\{\}", r"(\d+)")) for path, name in names.items()}
    found: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    for tensor, values in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", tensor)
        matches = [(path, m) for path, p in patterns.items() if match is not None and (m := p.fullmatch(match[1]))]
        if match is None or not matches:
            raise ValueError(f"{folder / WEIGHTS}: {tensor} is not the name of a known adapter")
        (path, m), *_ = matches
        factors = found.setdefault(path, {"A": {}, "B": {}})
        factors[match[2]][int(m[1]) if m.groups() else 0] = np.asarray(values, np.float32).T
    layers = sorted(
        {i for path, parts in found.items() if "{}" in names[path] for matrices in parts.values() for i in matrices}
    )
    if layers != list(range(len(layers))) or not found:
        raise ValueError(f"{folder / WEIGHTS} has adapters for the layers {layers}, not for every layer from 0 on")
    # Rank-stabilised LoRA divides alpha by the root of the rank.
    alpha = alpha * math.sqrt(rank) if config.get("use_rslora") else alpha
    return {path: _stack_adapter(folder, names[path], parts, layers, rank, alpha) for path, parts in found.items()}


def _stack_adapter(
    folder: Path,
    name: str,
    factors_by_layer: dict[str, dict[int, np.ndarray]],
    layers: list[int],
    rank: int,
    alpha: float,
) -> Adapter:
    factors, stacked = [], "{}" in name
    for which, matrices in factors_by_layer.items():
        if missing := [i for i in (layers if stacked else [0]) if i not in matrices]:
            raise ValueError(f"{folder / WEIGHTS} lacks lora_{which} of {name.format(missing[0])}")
        if len(shapes := {x.shape for x in matrices.values()}) > 1:
            raise ValueError(f"{folder / WEIGHTS}: lora_{which} of {name} has several shapes, {shapes}")
        factors.append(np.stack([matrices[i] for i in layers]) if stacked else matrices[0])
    if factors[0].shape[-1] != rank or factors[1].shape[-2] != rank:
        raise ValueError(f"{folder / CONFIG} has r={rank}; {name} has {factors[0].shape[-1]}")
    return Adapter(factors[0], factors[1], alpha)  # type: ignore[arg-type]


def _read_tensors(folder: Path, safetensors: Any, config: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """Return all tensors of the file of weights. With a config, verify the digests of the file."""
    path = folder / WEIGHTS
    try:
        if not path.is_file():
            raise ValueError("it is missing" if not path.exists() else "it is not a regular file")
        tensors: dict[str, np.ndarray] = safetensors.numpy.load_file(path)
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        expected = read(metadata, tensors) if config is not None else {}
    except Exception as error:  # the library's own, OSError and ValueError
        raise ValueError(f"{path} cannot be read ({error})") from None
    for name, value in expected.items():
        if digest(tensors[name]) != value:
            raise ValueError(f"{path} is damaged: the values of {name} do not match their digest")
    if config is not None and _SETTINGS_KEY in metadata:
        settings = {name: config.get(name) or False for name in _CHECKED_SETTINGS}
        try:
            written = json.loads(metadata[_SETTINGS_KEY])
        except (ValueError, RecursionError):
            written = None
        if written != settings:
            raise ValueError(
                f"{folder / CONFIG} has {settings}, but {WEIGHTS} was written with {written}: one of them is damaged. "
                "If you changed it on purpose, load with verify=False"
            )
    return tensors


def _read_config(path: Path) -> dict[str, Any]:
    """Return a configuration in which only rank, alpha and `use_rslora` affect the result."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        config = json.loads(path.read_text())
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error!r})") from None
    # No array has a rank of more than 31 bits.
    if type(rank) is not int or not 0 < rank < 2**31:
        raise ValueError(f"{path} cannot be read (r is {_format_setting(rank)}, not an integer of at least 1)")
    if not _is_alpha(alpha):
        raise ValueError(
            f"{path} cannot be read (lora_alpha is {_format_setting(alpha)}, not a positive and finite number)"
        )
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {config.get('peft_type')!r}; only 'LORA' is supported")
    if config.get("use_rslora") is not None and not isinstance(config["use_rslora"], bool):
        raise ValueError(
            f"{path} cannot be read (use_rslora is {_format_setting(config['use_rslora'])}, neither true nor false)"
        )
    for name, value in config.items():
        if name not in _KNOWN_SETTINGS and not _is_empty(value):
            raise ValueError(f"{path}: {name} = {_format_setting(value)} is not supported")
    if config.get("init_lora_weights", True) not in _INITS_KEEPING_BASE:
        raise ValueError(
            f"{path}: init_lora_weights = {config['init_lora_weights']!r} also changes the base weights, which is not "
            "supported"
        )
    return config


def _is_alpha(value: Any) -> bool:
    """Return whether a value is a number that is positive and finite in fp32, the dtype of the scale."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 2.0**-126 <= value < 2**128 - 2**103


def _is_empty(value: Any) -> bool:
    """Return whether a setting's value means unused. The number 0 does not."""
    return value is None or value is False or (isinstance(value, str | dict | list) and value in _EMPTY_VALUES)


def _format_setting(value: Any) -> str:
    try:
        return json.dumps(value)[:200]
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deep"


def _import_safetensors() -> Any:
    try:
        importlib.import_module("safetensors.numpy")
        return importlib.import_module("safetensors")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("PEFT files need the package safetensors: pip install safetensors") from None
