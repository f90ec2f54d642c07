"""A checkpoint of Hugging Face as a model here: `load(folder)`."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import mesh as meshes
from experiments.checkpoint import flatten
from experiments.config import UserError
from experiments.hub import families, files
from experiments.hub.families import Family, Tensor
from experiments.hub.files import Stored
from experiments.models.llama import Llama
from experiments.models.shape import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory.

    Attributes:
        folder: it lies in.
        family: of it.
        config: the model's shape.
        params: nested dict of arrays, as `nnx.to_pure_dict(nnx.state(Llama(config, ...), nnx.Param))` gives.
    """

    folder: Path
    family: Family
    config: LlamaConfig
    params: Any

    def model(self, dtype: jax.typing.DTypeLike = jnp.bfloat16, **settings: Any) -> Llama:
        """The model with these parameters, computing in `dtype`; settings as `Llama` takes them."""
        structure = nnx.eval_shape(lambda: Llama(self.config, dtype=dtype, rngs=nnx.Rngs(0), **settings))
        return nnx.merge(nnx.graphdef(structure), self.params)


def load(
    source: str | Path, *, mesh: jax.sharding.Mesh | None = None, dtype: jax.typing.DTypeLike | None = None
) -> Loaded:
    """Reads a checkpoint, one parameter after the other: beside the parameters only one of them is in memory twice.

    Args:
        source: a folder, or the name of a model in the local cache.
        mesh: parameters lie on it as in training (`experiments.mesh.state`), with axes "data" and "fsdp"; None puts
            them on the default device.
        dtype: of parameters; None keeps that of each tensor.

    Raises:
        UserError: the checkpoint is of an unknown family, has unknown settings, lacks tensors or has others, or a file
            is damaged. The message names the file and what is wrong.
    """
    folder = files.resolve(source)
    family, config = families.read(folder / "config.json", files.read_json(folder / "config.json"))
    abstract = abstract_params(config)
    places = shardings(abstract, mesh)
    sources = find(folder, family, config)
    flat = flatten(abstract)
    leaves = {
        path: jax.device_put(_read(sources[path], flat[path].shape, dtype), place)
        for path, place in flatten(places).items()
    }
    return Loaded(folder, family, config, jax.tree.unflatten(jax.tree.structure(abstract), list(leaves.values())))


def abstract_params(config: LlamaConfig) -> Any:
    """The nested dict of a model's parameters, with shapes in place of arrays."""
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def shardings(abstract: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Where parameters go."""
    if mesh is not None:
        return meshes.state(mesh, abstract)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: device, abstract)


@dataclasses.dataclass(frozen=True)
class Part:
    """A parameter of one layer: a range of the outputs of a stored tensor."""

    stored: Stored
    turned: bool
    start: int
    size: int

    def read(self) -> np.ndarray:
        """As the model here has it: (inputs, outputs), or a vector."""
        values = self.stored.read()
        values = values.T if self.turned else values
        return values[..., self.start : self.start + self.size]


def find(folder: Path, family: Family, config: LlamaConfig) -> dict[str, list[Part]]:
    """Where each parameter is stored, by its path here: a part for each layer, or one.

    Raises:
        UserError: tensors are missing, or left over, or have other shapes; tied tables differ.
    """
    found = _named(family, files.tensors(folder))
    flat = flatten(abstract_params(config))
    parts: dict[str, list[Part]] = {}
    wanted: set[str] = set()
    for tensor in family.tensors(config):
        for name in names(tensor, config):
            wanted.add(name)
            if name not in found:
                raise UserError(f"{folder} lacks {name}, which {family.architecture} with this config.json has")
            _split(found[name], tensor, flat, parts)
    left = {name: x for name, x in found.items() if name not in wanted and not name.endswith(family.unused)}
    if config.tied and (head := left.pop("lm_head.weight", None)) is not None:
        _check_tied(head, parts["embed.embedding"][0].stored)
    if left:
        listed = f"{', '.join(sorted(left)[:5])}{' ...' if len(left) > 5 else ''}"
        raise UserError(
            f"{next(iter(left.values())).file}: {len(left)} tensors that {family.architecture} with this config.json "
            f"does not have: {listed}"
        )
    return parts


def names(tensor: Tensor, config: LlamaConfig) -> Iterator[str]:
    """A tensor's names, one for each layer."""
    yield from (tensor.name.format(i) for i in range(config.layers)) if tensor.stacked else (tensor.name,)


def _named(family: Family, found: dict[str, Stored]) -> dict[str, Stored]:
    """Tensors by their full names; files of the bare model leave out the prefix."""
    if any(name.startswith(family.prefix) for name in found):
        return found
    return {name if name.startswith("lm_head.") else family.prefix + name: x for name, x in found.items()}


def _split(stored: Stored, tensor: Tensor, flat: dict[str, Any], parts: dict[str, list[Part]]) -> None:
    shapes = [flat[path].shape[1:] if tensor.stacked else flat[path].shape for path in tensor.paths]
    whole = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    expected = whole[::-1] if tensor.turned else whole
    if stored.shape != expected:
        raise UserError(
            f"{stored.file}: {stored.name} is {list(stored.shape)}, but by config.json it is {list(expected)}"
        )
    _ = stored.dtype
    start = 0
    for path, shape in zip(tensor.paths, shapes, strict=True):
        parts.setdefault(path, []).append(Part(stored, tensor.turned, start, shape[-1]))
        start += shape[-1]


def _check_tied(head: Stored, table: Stored) -> None:
    if head.shape != table.shape or head.kind != table.kind or head.read().tobytes() != table.read().tobytes():
        raise UserError(
            f"{head.file}: {head.name} is not {table.name}, but config.json says that they are tied; "
            "set tie_word_embeddings to false there, or remove the tensor"
        )


def _read(parts: list[Part], shape: tuple[int, ...], dtype: jax.typing.DTypeLike | None) -> np.ndarray:
    """A whole parameter in memory, its layers stacked."""
    if dtype is None:
        dtype = jnp.result_type(*(part.stored.dtype for part in parts))
    whole = np.empty(shape, dtype)
    stacked = len(shape) > len(parts[0].stored.shape)
    for row, part in zip(whole if stacked else whole[None], parts, strict=True):
        values = part.read()
        with np.errstate(over="ignore"):
            row[...] = values
        if whole.dtype == np.float16 and values.dtype != np.float16 and np.isinf(row).any():
            raise UserError(f"{part.stored.file}: {part.stored.name} has values beyond float16; load as bfloat16")
    return whole
