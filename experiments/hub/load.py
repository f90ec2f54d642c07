"""Loads a Hugging Face checkpoint as a model of `experiments.models`: `load(folder)`."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import mesh as meshes
from experiments.errors import UserError
from experiments.hub import families, files, quantized
from experiments.hub.families import Family, Tensor
from experiments.hub.files import Stored
from experiments.hub.quantized import EightBits
from experiments.mesh import flatten
from experiments.models.llama import Llama
from experiments.models.shape import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory.

    Attributes:
        folder: folder of the checkpoint.
        family: family of the checkpoint.
        config: the model's shape.
        params: nested dict of arrays, like `nnx.to_pure_dict(nnx.state(Llama(config, ...), nnx.Param))`.
    """

    folder: Path
    family: Family
    config: LlamaConfig
    params: Any

    def model(self, dtype: jax.typing.DTypeLike = jnp.bfloat16, **settings: Any) -> Llama:
        """Returns the model with these parameters and compute dtype `dtype`. `settings` are arguments of `Llama`."""
        structure = nnx.eval_shape(lambda: Llama(self.config, dtype=dtype, rngs=nnx.Rngs(0), **settings))
        return nnx.merge(nnx.graphdef(structure), self.params)


def load(
    source: str | Path,
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    codes: bool = False,
) -> Loaded:
    """Reads a checkpoint parameter by parameter, so that only one parameter at a time is in memory twice.

    Args:
        source: a folder, or the name of a model in the local cache.
        mesh: mesh with axes "data" and "fsdp" for parameters, sharded as in training (`experiments.mesh.state`). None
            for the default device.
        dtype: dtype of parameters; None keeps those of tensors, with bfloat16 for 8-bit tensors.
        codes: whether to keep 8-bit weights as `FrozenWeight` (codes and scales), which `fp8jax.linear` and
            `fp8jax.lora` support, but not `Loaded.model`.

    Raises:
        UserError: the family or a setting is unknown, tensors are missing or unexpected, or a file is damaged (invalid,
            or not matching the digests of `save`). The message has the file and the problem.
    """
    folder = files.resolve(source)
    content = files.read_json(folder / "config.json")
    family, config = families.read(folder / "config.json", content)
    storage = quantized.read(folder / "config.json", content.get("quantization_config"))
    abstract = abstract_params(config)
    placed = shardings(abstract, mesh)
    sources = find(folder, family, config, storage)
    flat = flatten(abstract)
    leaves = []
    for path, sharding in flatten(placed).items():
        parts = sources[path]
        is_matrix = len(flat[path].shape) == 3  # stacked layers
        if codes and storage is not None and is_matrix and all(part.scale is not None for part in parts):
            leaves.append(_frozen(parts, storage, flat[path].shape, sharding))
        else:
            leaves.append(jax.device_put(_read(parts, storage, flat[path].shape, dtype), sharding))
    files.check(folder, settings(folder / "config.json", content))
    return Loaded(folder, family, config, jax.tree.unflatten(jax.tree.structure(abstract), leaves))


def settings(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a config.json: the model's shape, the format of its weights, and end-of-text tokens.

    Raises:
        UserError: see `families.read` and `quantized.read`.
    """
    family, config = families.read(path, content)
    storage = quantized.read(path, content.get("quantization_config"))
    weights = None if storage is None else dataclasses.asdict(storage)
    ends = content.get("eos_token_id")
    shape = dataclasses.asdict(config)
    if not config.experts:
        # Folders of versions without experts lack these fields.
        shape = {name: value for name, value in shape.items() if name not in _EXPERT_FIELDS}
    return {"family": family.name, **shape, "weights": weights, "eos_token_id": ends}


_EXPERT_FIELDS = ("experts", "experts_per_token", "normalize_choices")


def abstract_params(config: LlamaConfig) -> Any:
    """Returns the nested dict of a model's parameters, with shapes instead of arrays."""
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def shardings(abstract: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Returns the shardings of parameters."""
    if mesh is not None:
        return meshes.state(mesh, abstract)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: device, abstract)


@dataclasses.dataclass(frozen=True)
class Part:
    """A range of outputs of a stored tensor (values, or codes with scales), and its place in a parameter.

    Attributes:
        stored: the tensor.
        is_transposed: whether it is (outputs, inputs).
        start, size: the range.
        index: indices of layer and expert in the parameter.
        at: first output in the parameter.
        scale: scales of codes, or None.
    """

    stored: Stored
    is_transposed: bool
    start: int
    size: int
    index: tuple[int, ...] = ()
    at: int = 0
    scale: Stored | None = None

    def read(self, storage: EightBits | None) -> np.ndarray:
        """Returns the values in the model's layout: (inputs, outputs), or a vector."""
        values = self.stored.read()
        if storage is not None and self.scale is not None:
            values = quantized.decode(storage, values, quantized.read_scale(storage, self.stored, self.scale))
        values = values.T if self.is_transposed else values
        return values[..., self.start : self.start + self.size]


def find(folder: Path, family: Family, config: LlamaConfig, storage: EightBits | None = None) -> dict[str, list[Part]]:
    """Returns the stored tensors of each parameter, by path: one per layer, or a single one.

    Raises:
        UserError: tensors are missing, unexpected, or have wrong shapes; tied tables differ; or the storage of 8-bit
            weights is unknown because config.json or scales lack it.
    """
    stored_tensors = _with_prefix(family, files.tensors(folder))
    flat = flatten(abstract_params(config))
    parts: dict[str, list[Part]] = {}
    expected: set[str] = set()
    for tensor in family.tensors(config):
        for index in tensor.indices(config):
            name = tensor.name.format(*index)
            expected.add(name)
            if name not in stored_tensors:
                raise UserError(f"{folder} lacks {name}, which {family.architecture} with this config.json has")
            scale = None
            if stored_tensors[name].dtype == quantized.CODES:
                scale = _scale(folder, name, stored_tensors, tensor, storage)
                expected.add(scale)
            _split(stored_tensors[name], tensor, index, flat, parts, None if scale is None else stored_tensors[scale])
    unexpected = {
        name: x for name, x in stored_tensors.items() if name not in expected and not name.endswith(family.unused)
    }
    if config.tied and (head := unexpected.pop("lm_head.weight", None)) is not None:
        _check_tied(head, parts["embed.embedding"][0].stored)
    if unexpected:
        listed = f"{', '.join(sorted(unexpected)[:5])}{' ...' if len(unexpected) > 5 else ''}"
        raise UserError(
            f"{next(iter(unexpected.values())).file}: {len(unexpected)} tensors that do not belong to "
            f"{family.architecture} with this config.json: {listed}"
        )
    return parts


def names(tensor: Tensor, config: LlamaConfig) -> Iterator[str]:
    """Yields a tensor's names, one per layer and expert."""
    return (tensor.name.format(*index) for index in tensor.indices(config))


def _with_prefix(family: Family, stored_tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Returns tensors by full names. Files of the bare model omit the prefix."""
    if any(name.startswith(family.prefix) for name in stored_tensors):
        return stored_tensors
    return {name if name.startswith("lm_head.") else family.prefix + name: x for name, x in stored_tensors.items()}


def _scale(
    folder: Path, name: str, stored_tensors: dict[str, Stored], tensor: Tensor, storage: EightBits | None
) -> str:
    """Returns the name of the scales of 8-bit codes."""
    if storage is None or not tensor.linear or not tensor.is_transposed:
        why = "config.json has no quantization_config" if storage is None else "only linear layers can be"
        raise UserError(f"{stored_tensors[name].file}: {name} is stored in 8 bits, but {why}")
    scale = f"{name.removesuffix('weight')}{storage.scale}"
    if scale not in stored_tensors:
        raise UserError(f"{folder} lacks {scale}, the scales of {name}; quant_method is {storage.method!r}")
    return scale


def _split(
    stored: Stored,
    tensor: Tensor,
    index: tuple[int, ...],
    flat: dict[str, Any],
    parts: dict[str, list[Part]],
    scale: Stored | None,
) -> None:
    expected = tensor.shape(flat)
    if stored.shape != expected:
        raise UserError(
            f"{stored.file}: {stored.name} is {list(stored.shape)}, but config.json requires {list(expected)}"
        )
    start = 0
    for path, shape in zip(tensor.paths, tensor.shapes(flat), strict=True):
        offset = tensor.part[0] * shape[-1]
        parts.setdefault(path, []).append(Part(stored, tensor.is_transposed, start, shape[-1], index, offset, scale))
        start += shape[-1]


def _check_tied(head: Stored, table: Stored) -> None:
    if head.shape != table.shape or head.kind != table.kind or head.read().tobytes() != table.read().tobytes():
        raise UserError(
            f"{head.file}: {head.name} differs from {table.name}, but config.json ties them; set tie_word_embeddings "
            "to false in config.json, or remove the tensor"
        )


def _read(
    parts: list[Part], storage: EightBits | None, shape: tuple[int, ...], dtype: jax.typing.DTypeLike | None
) -> np.ndarray:
    """Reads a whole parameter, with stacked layers and experts."""
    if dtype is None:
        dtypes = {jnp.dtype(jnp.bfloat16) if part.scale is not None else part.stored.dtype for part in parts}
        dtype = jnp.result_type(*dtypes)
    joined = np.empty(shape, dtype)
    for part in parts:
        values, target = part.read(storage), joined[part.index][..., part.at : part.at + part.size]
        with np.errstate(over="ignore"):
            target[...] = values
        if joined.dtype == np.float16 and values.dtype != np.float16 and np.isinf(target).any():
            raise UserError(
                f"{part.stored.file}: {part.stored.name} has values outside the range of float16; load as bfloat16"
            )
    return joined


def _frozen(parts: list[Part], storage: EightBits, shape: tuple[int, ...], sharding: Any) -> Any:
    """Reads codes (layers, outputs, inputs) and scales of a parameter."""
    _, inputs, outputs = shape
    codes = np.empty((len(parts), outputs, inputs), quantized.CODES)
    scales = []
    for row, part in zip(codes, parts, strict=True):
        assert part.scale is not None
        row[...] = part.stored.read()
        scales.append(quantized.read_scale(storage, part.stored, part.scale))
    spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else ()
    # Codes are transposed: the last two axes of the sharding are swapped.
    axis_names = [*spec, *[None] * (len(shape) - len(spec))]
    axis_names[-2:] = axis_names[:-3:-1]

    def put(array: np.ndarray) -> jax.Array:
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return jax.device_put(array, sharding)
        axes = zip(axis_names, array.shape, strict=True)
        divided = [axis if axis and size % sharding.mesh.shape[axis] == 0 else None for axis, size in axes]
        return jax.device_put(array, jax.sharding.NamedSharding(sharding.mesh, jax.P(*divided)))

    return quantized.frozen(storage, codes, np.stack(scales), put)
