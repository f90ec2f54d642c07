"""Saves a model of `experiments.models` as a Hugging Face checkpoint: `save(folder, config, params)`."""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import fp8jax
from experiments.errors import DiskError, UserError
from experiments.hub import families, files, load, quantized
from experiments.hub.families import Tensor
from experiments.hub.quantized import EightBits
from experiments.mesh import flatten
from experiments.models.shape import LlamaConfig
from fp8jax.ops.products import peft_files

# Files of a checkpoint to copy, in addition to weights and config.json.
SIDECAR_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)

# Layers that servers fuse, and that must have the same storage.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


@dataclasses.dataclass(frozen=True)
class EncodedAs:
    """8-bit storage of linear layers except the head.

    Attributes:
        storage: the format.
        encoding: a spec of the transposed matrix; or the `Linear` of a recipe, for the codes of its forward matmul.
            Both quantize the parameter itself, as layers do.
        codes: existing codes by path, (..., outputs, inputs), as in the layers of a trained model.
    """

    storage: EightBits
    encoding: Any
    codes: Mapping[str, fp8jax.QTensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Written:
    """Tensors that are computed together: their names, shapes and dtypes, and the function that computes them."""

    kinds: dict[str, tuple[tuple[int, ...], np.dtype]]
    make: Callable[[], list[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.kinds.values())


def save(
    folder: Path,
    config: LlamaConfig,
    params: Any,
    *,
    like: Path | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    eight: EncodedAs | None = None,
    shard_bytes: int = 5_000_000_000,
    extra_files: dict[str, str] | None = None,
    fields: dict[str, Any] | None = None,
) -> list[str]:
    """Writes a checkpoint that transformers can load. In addition to the parameters, only one shard is in memory.

    A killed write leaves a folder with the suffix ".partial". The metadata of weights have digests of tensors and of
    the other files, which `load` compares.

    Args:
        folder: folder to create; it must not exist.
        config: the model's shape.
        params: parameters in the form of `load`.
        like: a checkpoint of the same shape; its config.json, tokenizer and generation settings are kept.
        dtype: dtype of weights; None keeps those of parameters.
        eight: 8-bit storage of linear layers; other weights have `dtype`.
        shard_bytes: maximum bytes of a file, unless a single tensor has more.
        extra_files: further files by name, such as tokenizer.json.
        fields: further fields of config.json.

    Returns:
        Modules that are not stored in 8 bits, because readers of the format would not decode them correctly.

    Raises:
        UserError: no family has this shape, or it differs from that of `like`; the folder exists; or a file of `like`
            is damaged or is a link out of its folder.
        DiskError: a file cannot be written.
    """
    if folder.exists():
        raise UserError(f"{folder} exists; use another folder, or move it away")
    content, family = {}, None
    if like is not None:
        content = files.read_json(like / "config.json")
        family, shape = families.read(like / "config.json", content)
        if shape != config:
            raise UserError(f"{like} has another shape, {shape}, than the model, {config}")
    family = family or families.of(config)
    if eight is not None and any(tensor.linear and not tensor.is_transposed for tensor in family.tensors(config)):
        raise UserError(f"{family.architecture} has no linear layers that an 8-bit format supports; use bfloat16")
    flat = flatten(params)
    expected = flatten(load.abstract_params(config))
    for path in sorted(set(expected) ^ set(flat)):
        raise UserError(f"the parameters {'lack' if path in expected else 'have'} {path}, unlike a model with {config}")
    tensors = list(family.tensors(config))
    unquantized = [] if eight is None else _unquantized_modules(tensors, config, flat, eight.storage)
    parts = [part for tensor in tensors for part in _parts(tensor, config, flat, dtype, eight, unquantized)]
    shards = _shards(parts, shard_bytes)
    content = {"model_type": family.name, "architectures": [family.architecture], **family.write(config), **content}
    for name in ("quantization_config", files.UNCHECKED):
        content.pop(name, None)
    content |= {"torch_dtype": _common(parts), **(fields or {})}
    content.pop("dtype", None)
    if eight is not None:
        # A tied head has no tensors, but readers treat it as a linear layer.
        content["quantization_config"] = eight.storage.fields(["lm_head", *unquantized])
    contents = {} if like is None else {name: files.read_sidecar(like, name) for name in SIDECAR_FILES}
    contents |= {name: text.encode() for name, text in (extra_files or {}).items()}
    sidecars = {name: x for name, x in contents.items() if x is not None}
    if like is not None:
        files.check(like)
    entry = files.entry(load.settings(folder / "config.json", content), sidecars)
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, x in sidecars.items():
            (partial / name).write_bytes(x)
        (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        _write(partial, shards, entry)
        os.replace(partial, folder)
    except OSError as error:
        raise DiskError(
            f"{folder} cannot be written ({error.strerror or error}); the partial result is {partial}"
        ) from error
    return unquantized


def _common(parts: list[Written]) -> str:
    """Returns the dtype of most bytes without codes, by its name in config.json."""
    sizes: dict[str, int] = {}
    for part in parts:
        for name, (shape, dtype) in part.kinds.items():
            if dtype != quantized.CODES and "weight_scale" not in name:
                sizes[dtype.name] = sizes.get(dtype.name, 0) + int(np.prod(shape))
    return max(sizes, key=lambda name: sizes[name])


def _unquantized_modules(
    tensors: Sequence[Tensor], config: LlamaConfig, flat: dict[str, Any], storage: EightBits
) -> list[str]:
    """Returns linear layers that stay in 16 bits: routers, layers that do not fit, and layers fused with them."""
    linear = {
        name.removesuffix(".weight"): storage.fits(*tensor.shape(flat))
        for tensor in tensors if tensor.linear for name in load.names(tensor, config)
    }  # fmt: skip

    def fused(name: str) -> list[str]:
        block, _, suffix = name.rpartition(".")
        group = next((group for group in FUSED if suffix in group), (suffix,))
        return [f"{block}.{other}" for other in group]

    routers = [
        name.removesuffix(".weight") for tensor in tensors if tensor.router for name in load.names(tensor, config)
    ]
    return routers + [name for name in linear if not all(linear[other] for other in fused(name))]


def _parts(
    tensor: Tensor,
    config: LlamaConfig,
    flat: dict[str, Any],
    dtype: jax.typing.DTypeLike | None,
    eight: EncodedAs | None,
    unquantized: list[str],
) -> Iterator[Written]:
    """Yields the written parts of a tensor, for each layer and expert."""
    for index in tensor.indices(config):
        name = tensor.name.format(*index)
        shape = tensor.shape(flat)
        if eight is not None and tensor.linear and name.removesuffix(".weight") not in unquantized:
            scale = f"{name.removesuffix('weight')}{eight.storage.scale}"
            shapes_and_dtypes = {
                name: (shape, quantized.CODES),
                scale: (eight.storage.shape(*shape), np.dtype(np.float32)),
            }
            yield Written(shapes_and_dtypes, functools.partial(_codes, tensor, flat, index, eight))
            continue
        storage_dtype = np.dtype(flat[tensor.paths[0]].dtype if dtype is None else dtype)
        yield Written({name: (shape, storage_dtype)}, functools.partial(_values, tensor, flat, index, storage_dtype))


def _slice(tensor: Tensor, x: Any, index: tuple[int, ...]) -> Any:
    """Returns the content of a tensor from a leaf."""
    x, (part, count) = x[index], tensor.part
    size = x.shape[-1] // count
    return x if count == 1 else x[..., part * size : (part + 1) * size]


def _values(tensor: Tensor, flat: dict[str, Any], index: tuple[int, ...], dtype: np.dtype) -> list[np.ndarray]:
    parts = [np.asarray(jax.device_get(_slice(tensor, flat[path], index))) for path in tensor.paths]
    joined = np.concatenate(parts, -1) if len(parts) > 1 else parts[0]
    with np.errstate(over="ignore"):
        cast = joined.astype(dtype)
    if not np.isfinite(cast.astype(np.float32)).all() and np.isfinite(joined.astype(np.float32)).all():
        raise UserError(f"{tensor.name.format(*index)} has values outside the range of {dtype.name}; use bfloat16")
    return [np.ascontiguousarray(cast.T if tensor.is_transposed else cast)]


def _codes(tensor: Tensor, flat: dict[str, Any], index: tuple[int, ...], eight: EncodedAs) -> list[np.ndarray]:
    (path,) = tensor.paths
    if path in eight.codes:
        part, count = tensor.part
        rows = lambda x: x if len(x) == 1 else np.split(x, count)[part]  # noqa: E731
        q = jax.tree.map(lambda x: rows(x[index]), eight.codes[path])
    else:
        q = quantized.encode(jnp.asarray(_slice(tensor, flat[path], index)), eight.encoding)
    return [np.asarray(q.codes).view(quantized.CODES), np.asarray(q.scale).reshape(eight.storage.shape(*q.shape))]


def _shards(parts: list[Written], limit: int) -> list[list[Written]]:
    if limit < 1:
        raise UserError(f"shards need at least 1 byte, got {limit}")
    shards: list[list[Written]] = [[]]
    for part in parts:
        if shards[-1] and sum(x.nbytes for x in shards[-1]) + part.nbytes > limit:
            shards.append([])
        shards[-1].append(part)
    return shards


def _write(folder: Path, shards: list[list[Written]], entry: dict[str, str]) -> None:
    """Writes the weights. The first file has the entry in its metadata; all files have digests."""
    file_of_tensor: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = files.SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        arrays: dict[str, np.ndarray] = {}
        for part in shard:
            arrays |= zip(part.kinds, part.make(), strict=True)
        for name in arrays:
            file_of_tensor[name] = file
        try:
            metadata = {"format": "pt", **(entry if i == 0 else {}), **peft_files.entries(arrays)}
            save_file(arrays, folder / file, metadata=metadata)
        except Exception as error:  # SafetensorError wraps errors of the file system
            raise OSError(str(error)) from error
    if len(shards) > 1:
        total = sum(part.nbytes for shard in shards for part in shard)
        index = {"metadata": {"total_size": total}, "weight_map": file_of_tensor}
        (folder / files.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def eight_bits(name: str, *, activations: bool = False) -> EncodedAs:
    """Returns a format by name: "tensor", "channel" or "block" (compressed-tensors), or "deepseek".

    Raises:
        UserError: the format does not exist.
    """
    if name == "deepseek":
        return EncodedAs(EightBits("fp8", "block"), quantized.SPECS["block"])
    if name not in quantized.SPECS:
        raise UserError(f"unknown 8-bit format {name!r}; use one of {', '.join([*quantized.SPECS, 'deepseek'])}")
    return EncodedAs(EightBits("compressed-tensors", name, activations=activations), quantized.SPECS[name])


def from_recipe(recipe: fp8jax.Recipe, *, deepseek: bool = False, activations: bool = False) -> EncodedAs:
    """Returns the format for the codes of a recipe's forward matmuls.

    Raises:
        UserError: the recipe's weights have no 8-bit codes, or codes that no format supports.
    """
    spec = recipe.linear.spec("w")
    strategies = {fp8jax.QuantSpec.parse(text): name for name, text in quantized.SPECS.items()}
    name = None if spec is None else strategies.get(spec)
    if name is None:
        raise UserError(
            f"recipe {recipe.name} multiplies by weights in {spec or 'the format of computation'}, which no export "
            f"format supports; the formats are {', '.join(quantized.SPECS.values())}"
        )
    if deepseek and name != "block":
        raise UserError(f"recipe {recipe.name} has one scale per {name}, but the deepseek format needs one per block")
    storage = EightBits("fp8", "block") if deepseek else EightBits("compressed-tensors", name, activations=activations)
    return EncodedAs(storage, recipe.linear)
