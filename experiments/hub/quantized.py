"""Weights of linear layers as 8-bit codes in a checkpoint: the formats, and the stored arrays of a matrix.

Both formats store float8_e4m3fn codes (outputs, inputs) and fp32 scales. As in fp8jax, a value is code times scale:

- compressed-tensors, `weight_scale`: one scale per tensor (1,), per output (outputs, 1), or per block;
- "fp8" of transformers, after DeepSeek-V3, `weight_scale_inv`: one scale per block of 128 x 128, not its inverse.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp8jax
from experiments.errors import UserError
from experiments.hub.files import Stored
from fp8jax.core.qtensor import from_bytes, to_bytes
from fp8jax.ops.products.weights import FrozenWeight

CODES = np.dtype(ml_dtypes.float8_e4m3fn)
# Specs of the transposed matrix, (outputs, inputs).
SPECS = {"tensor": "e4m3", "channel": "e4m3:token", "block": "e4m3:block128"}
_METHODS = ("compressed-tensors", "fp8")


@dataclasses.dataclass(frozen=True)
class EightBits:
    """The storage of 8-bit weights in a checkpoint.

    Attributes:
        method: `quant_method`, "compressed-tensors" or "fp8".
        strategy: granularity of scales: "tensor", "channel" (an output) or "block".
        block: rows and columns of a block.
        activations: whether servers should also quantize inputs of these layers dynamically.
    """

    method: str
    strategy: str
    block: tuple[int, int] = (128, 128)
    activations: bool = False

    @property
    def scale(self) -> str:
        """The suffix of the name of a scale."""
        return "weight_scale_inv" if self.method == "fp8" else "weight_scale"

    def fits(self, outputs: int, inputs: int) -> bool:
        """Returns whether readers of the format decode this matrix correctly.

        transformers 5 derives the blocks of "fp8" from the number of scales, which is wrong if 128 does not divide.
        """
        return self.method != "fp8" or (outputs % self.block[0] == 0 and inputs % self.block[1] == 0)

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Returns the shape of the scales of a matrix."""
        if self.strategy == "block":
            return math.ceil(outputs / self.block[0]), math.ceil(inputs / self.block[1])
        return (outputs, 1) if self.strategy == "channel" else (1,)

    def fields(self, unquantized: list[str]) -> dict[str, Any]:
        """Returns the `quantization_config` of a checkpoint in which the modules `unquantized` are not quantized."""
        if self.method == "fp8":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
                "modules_to_not_convert": unquantized,
            }
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = {**common, "strategy": self.strategy, "dynamic": False}
        inputs = {**common, "strategy": "token", "dynamic": True}
        if self.strategy == "block":
            weights["block_structure"] = list(self.block)
            inputs |= {"strategy": "group", "group_size": self.block[1]}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if self.activations else None}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized" if self.activations else "naive-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "output_activations": None}},
            "ignore": unquantized,
            "kv_cache_scheme": None,
        }


def read(path: Path, fields: dict[str, Any] | None) -> EightBits | None:
    """Returns the storage of 8-bit weights in a config.json, or None.

    Raises:
        UserError: the format is not one of those in the module's docstring.
    """
    if not fields:
        return None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: quantization_config is {type(fields).__name__}, not an object")
    method = fields.get("quant_method")
    if method == "fp8":
        block = fields.get("weight_block_size", [128, 128])
        _only(path, "fmt", fields.get("fmt"), None, "e4m3", "float8_e4m3fn")
        _only(path, "activation_scheme", fields.get("activation_scheme"), None, "dynamic")
        _only(path, "scale_fmt", fields.get("scale_fmt"), None, "float")
        return EightBits("fp8", "tensor") if block is None else EightBits("fp8", "block", _block(path, block))
    if method != "compressed-tensors":
        raise UserError(f"{path}: quant_method {method!r} is not supported; {' and '.join(_METHODS)} are")
    _only(path, "format", fields.get("format"), None, "float-quantized", "naive-quantized")
    _only(path, "kv_cache_scheme", fields.get("kv_cache_scheme"), None)
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise UserError(f"{path}: config_groups must be one group, of linear layers; got {groups!r}")
    (group,) = groups.values()
    weights = group.get("weights") or {} if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise UserError(f"{path}: config_groups must be one group, of linear layers; got {groups!r}")
    for name, allowed in {
        "num_bits": (8,),
        "type": ("float",),
        "symmetric": (True, None),
        "dynamic": (False, None),
    }.items():
        _only(path, f"weights.{name}", weights.get(name), *allowed)
    _only(path, "targets", group.get("targets"), ["Linear"])
    strategy = str(weights.get("strategy"))
    _only(path, "weights.strategy", strategy, *SPECS)
    block = _block(path, weights.get("block_structure")) if strategy == "block" else (128, 128)
    return EightBits(method, strategy, block, group.get("input_activations") is not None)


def _only(path: Path, name: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        raise UserError(f"{path}: quantization_config.{name} is {value!r}; supported are {list(allowed)}")


def _block(path: Path, sizes: Any) -> tuple[int, int]:
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise UserError(f"{path}: quantization_config has blocks of {sizes!r}, not [rows, columns]")
    return sizes[0], sizes[1]


def read_scale(storage: EightBits, codes: Stored, scale: Stored) -> np.ndarray:
    """Returns the scales of a matrix, fp32, (outputs or blocks, inputs or blocks) or (1, 1).

    Raises:
        UserError: they have the wrong shape, or are not positive and finite.
    """
    outputs, inputs = codes.shape
    expected, values = storage.shape(outputs, inputs), scale.read().astype(np.float32)
    if values.shape != expected and not (storage.strategy != "block" and values.size == math.prod(expected)):
        raise UserError(f"{scale.file}: {scale.name} is {list(values.shape)}, but its scales must be {list(expected)}")
    if not (np.isfinite(values) & (values > 0)).all():
        raise UserError(f"{scale.file}: {scale.name} has scales that are not positive and finite")
    return values.reshape(expected if storage.strategy == "block" else (-1, 1))


def decode(storage: EightBits, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Decodes a matrix to fp32 (outputs, inputs)."""
    rows, columns = codes.shape
    if storage.strategy == "block":
        scale = np.repeat(np.repeat(scale, storage.block[0], 0)[:rows], storage.block[1], 1)[:, :columns]
    return codes.astype(np.float32) * scale


def frozen(storage: EightBits, codes: np.ndarray, scale: np.ndarray, put: Any) -> FrozenWeight:
    """Converts stored matrices (..., outputs, inputs) to weights for matmuls.

    Raises:
        UserError: blocks are not 128 x 128.
    """
    if storage.strategy == "block" and storage.block != (128, 128):
        raise UserError(
            f"blocks of {storage.block} can be read as values, but not as codes; codes need blocks of 128 x 128"
        )
    spec = fp8jax.QuantSpec.parse(SPECS[storage.strategy])
    return FrozenWeight(to_bytes(fp8jax.QTensor(put(codes), put(scale), None, None, spec)))


def encode(w: Any, encoding: Any) -> fp8jax.QTensor:
    """Returns the codes of a weight (inputs, outputs) as (outputs, inputs).

    Args:
        w: the parameter, of any floating dtype.
        encoding: a spec of the transposed matrix, or the `Linear` of a recipe, for the codes of its forward matmul.
    """
    if isinstance(encoding, str | fp8jax.QuantSpec):
        return fp8jax.quantize(w.T, encoding)
    return from_bytes(fp8jax.quantize_weight(w, recipe=encoding).forward)
