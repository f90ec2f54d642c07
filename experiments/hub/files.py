"""A folder of safetensors files: locations of tensors, checks, and reading of single tensors.

The library `safetensors` checks a file's header (length, JSON, offsets, size of the file). This module reads the bytes,
because the library's NumPy interface has no 8-bit floats, and because mapped files count as memory of the process.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from experiments.errors import UserError
from experiments.files import parse_json, read_bytes, read_text
from fp8jax.ops.products import peft_files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The key of `entry` in `__metadata__` of the first file of weights, and the field of config.json that disables `check`.
FOLDER, UNCHECKED = "fp8jax.folder", "fp8jax_digests"
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor on disk: its file, its name and dtype in the file, its shape, and the offset of its bytes.

    `digest` is that of `fp8jax.ops.products.peft_files`, or "" in a file without digests.
    """

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    digest: str = ""

    @property
    def dtype(self) -> np.dtype:
        """NumPy dtype.

        Raises:
            UserError: weights cannot have this dtype.
        """
        if self.kind not in _DTYPES:
            raise UserError(f"{self.file}: {self.name} is stored as {self.kind}; weights are {', '.join(_DTYPES)}")
        return _DTYPES[self.kind]

    def read(self) -> np.ndarray:
        """Reads the tensor.

        Raises:
            UserError: see `dtype`; or the file has changed since it was opened, or does not match its digests.
        """
        count = int(np.prod(self.shape, dtype=np.int64))
        try:
            values = np.fromfile(self.file, self.dtype, count, offset=self.start)
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error.strerror or error})") from None
        if values.size != count:
            raise UserError(
                f"{self.file} ends within {self.name}: the file was changed while it was read; load it again"
            )
        values = values.reshape(self.shape)
        if self.digest and peft_files.digest(values) != self.digest:
            raise UserError(f"{self.file} is damaged: the values of {self.name} do not match their digest")
        return values


def resolve(source: str | Path) -> Path:
    """Returns a folder, or the folder of `hf download OWNER/NAME` in the local cache. Does not download.

    Raises:
        UserError: neither exists.
    """
    if Path(source).is_dir():
        return Path(source)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(str(source), local_files_only=True))
    except Exception as error:  # errors of the library, and ValueError for an invalid name
        raise UserError(
            f"{source} is neither a folder nor a model in the local cache ({type(error).__name__}); download it with "
            "`hf download OWNER/NAME`"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        UserError: the file is missing, or is not a JSON object.
    """
    try:
        content = parse_json(read_text(path))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} contains {type(content).__name__}, not a JSON object")
    return content


def tensors(folder: Path) -> dict[str, Stored]:
    """Returns all tensors of a checkpoint by name, from one file or the files of an index. Reads only headers.

    Raises:
        UserError: a file is missing, damaged, or outside of the folder; or files and index do not agree.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            other_files = sorted(p.name for p in [*folder.glob("*.bin"), *folder.glob("*.safetensors")])
            listed = f"; it contains {', '.join(other_files[:3])}" if other_files else ""
            raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}{listed}")
        return _header(folder / SINGLE)
    file_of_tensor = read_json(folder / INDEX).get("weight_map")
    if not isinstance(file_of_tensor, dict) or not all(isinstance(x, str) for x in file_of_tensor.values()):
        raise UserError(f"{folder / INDEX}: weight_map is not an object with file names")
    tensors: dict[str, Stored] = {}
    for name in sorted(set(file_of_tensor.values())):
        if not _is_name(name):
            raise UserError(f"{folder / INDEX} names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing; {INDEX} names it")
        for tensor, stored in _header(folder / name).items():
            if file_of_tensor.get(tensor) != name:
                where = f"says {file_of_tensor[tensor]}" if tensor in file_of_tensor else "does not name it"
                raise UserError(f"{folder / name} holds {tensor}, but {INDEX} {where}")
            tensors[tensor] = stored
    if missing := sorted(set(file_of_tensor) - set(tensors)):
        raise UserError(f"{folder / file_of_tensor[missing[0]]} lacks {missing[0]}, which {INDEX} says is in it")
    return tensors


def _header(path: Path) -> dict[str, Stored]:
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", None)
        tensors = peft_files.read(metadata, header)
    except Exception as error:  # SafetensorError, OSError, and ValueError of digests
        raise UserError(f"{path} is damaged or not a safetensors file ({str(error).splitlines()[0]})") from None
    return {
        name: Stored(
            path, name, x["dtype"], tuple(x["shape"]), 8 + length + x["data_offsets"][0], tensors.get(name, "")
        )
        for name, x in header.items()
    }


def entry(settings: Mapping[str, Any], contents: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the entry of `__metadata__` for `check`.

    Args:
        settings: model settings in config.json, as JSON.
        contents: contents of the files that are stored with the weights, by name.
    """
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return {FOLDER: json.dumps({"config": settings, "files": files})}


def check(folder: Path, settings: Mapping[str, Any] | None = None) -> None:
    """Compares the files stored with the weights with their state when the weights were written.

    Folders of other programs have no entry and are not checked. config.json may disable the check.

    Args:
        folder: folder of the checkpoint.
        settings: model settings in config.json; None compares only the other files.

    Raises:
        UserError: a file or a setting in config.json has changed. The message names it.
    """
    written = _written(folder)
    if not written or read_json(folder / "config.json").get(UNCHECKED) is False:
        return
    way_out = f'after an intended change, add "{UNCHECKED}": false to config.json'
    for name, digest in written["files"].items():
        content = read_sidecar(folder, name)
        if content is not None and hashlib.sha256(content).hexdigest() != digest:
            raise UserError(f"{folder / name} is damaged, or was changed since the weights were written; {way_out}")
    if settings is not None:
        now, written_settings = json.loads(json.dumps(settings)), written["config"]
        changed = [
            f"{k} {written_settings.get(k)!r} and is {v!r}" for k, v in now.items() if written_settings.get(k) != v
        ]
        if changed:
            raise UserError(
                f"{folder / 'config.json'} is damaged, or was changed since the weights were written, with "
                f"{'; '.join(changed)}; {way_out}"
            )


def _written(folder: Path) -> dict[str, Any]:
    """Returns the entry of a folder's weights; empty without entry or weights."""
    path = folder / SINGLE
    if (folder / INDEX).is_file():
        file_of_tensor = read_json(folder / INDEX).get("weight_map")
        first = min(filter(_is_name, file_of_tensor.values()), default="") if isinstance(file_of_tensor, dict) else ""
        path = folder / first
    if not path.is_file():
        return {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(FOLDER)
        tensors = {} if text is None else parse_json(text)
        if text is not None and not all(isinstance(tensors[name], dict) for name in ("config", "files")):
            raise ValueError(f"{FOLDER} in its metadata is damaged")
    except Exception as error:  # SafetensorError, OSError, and errors of a damaged entry
        raise UserError(f"{path} is damaged or not a safetensors file ({str(error).splitlines()[0]})") from None
    result: dict[str, Any] = tensors
    return result


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def read_sidecar(folder: Path, name: str) -> bytes | None:
    """Returns the content of a file of a checkpoint, or None if it does not exist.

    Links are followed within the folder, and from a snapshot of the local cache to its own blobs.

    Raises:
        UserError: it is a link out of the folder, or no regular file, or cannot be read.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    roots = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(root) for root in roots):
        raise UserError(f"{path} is a link to {target}, outside of the folder; replace it by the file, or remove it")
    try:
        return read_bytes(target)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
