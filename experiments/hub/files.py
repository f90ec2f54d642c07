"""A folder of safetensors: where each tensor lies, checked; and reading one at a time.

The library `safetensors` checks a file's header (its length, JSON, offsets, and that the file is whole). Bytes are read
here, because its NumPy side has no 8-bit floats, and because a mapped file counts as memory of the process.
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
# The entry of `__metadata__` in the first file of weights that `write_entry` writes and `check` reads; and the field of
# config.json that turns this check off.
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
        """As NumPy has it.

        Raises:
            UserError: it is none that a weight is stored in.
        """
        if self.kind not in _DTYPES:
            raise UserError(f"{self.file}: {self.name} is stored as {self.kind}; weights are {', '.join(_DTYPES)}")
        return _DTYPES[self.kind]

    def read(self) -> np.ndarray:
        """The tensor, read now.

        Raises:
            UserError: as `dtype`; or the file changed since it was opened, or since it was written with its digests.
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
    """A folder, or the folder in the local cache that `hf download OWNER/NAME` created. Nothing is downloaded.

    Raises:
        UserError: neither exists.
    """
    if Path(source).is_dir():
        return Path(source)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(str(source), local_files_only=True))
    except Exception as error:  # the library's own, and ValueError for what can be no name
        raise UserError(
            f"{source} is neither a folder nor a model in the local cache ({type(error).__name__}); download it with "
            "`hf download OWNER/NAME`"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: the file is missing, or is something else.
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
    """All tensors of a checkpoint by name, in one file or in those of its index; only headers are read.

    Raises:
        UserError: a file is missing, damaged, or outside of the folder; or files and index do not agree.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            other = sorted(p.name for p in [*folder.glob("*.bin"), *folder.glob("*.safetensors")])
            there = f"; it contains {', '.join(other[:3])}" if other else ""
            raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}{there}")
        return _header(folder / SINGLE)
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise UserError(f"{folder / INDEX}: weight_map is not an object with file names")
    tensors: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        if not _is_name(name):
            raise UserError(f"{folder / INDEX} names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing; {INDEX} names it")
        for tensor, stored in _header(folder / name).items():
            if places.get(tensor) != name:
                where = f"says {places[tensor]}" if tensor in places else "does not name it"
                raise UserError(f"{folder / name} holds {tensor}, but {INDEX} {where}")
            tensors[tensor] = stored
    if lost := sorted(set(places) - set(tensors)):
        raise UserError(f"{folder / places[lost[0]]} lacks {lost[0]}, which {INDEX} says is in it")
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
    """The entry of `__metadata__` that `check` compares a folder with.

    Args:
        settings: what config.json says of the model, as JSON.
        contents: of the files that are stored with the weights, by name.
    """
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return {FOLDER: json.dumps({"config": settings, "files": files})}


def check(folder: Path, settings: Mapping[str, Any] | None = None) -> None:
    """Compares the files stored with the weights with their state when the weights were written.

    A folder of another program has nothing to compare with. config.json may turn the check off.

    Args:
        folder: of the checkpoint.
        settings: what config.json says of the model; None compares the other files alone.

    Raises:
        UserError: a file is another one, or config.json says something else. The message names what.
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
        now, before = json.loads(json.dumps(settings)), written["config"]
        changed = [f"{k} {before.get(k)!r} and is {v!r}" for k, v in now.items() if before.get(k) != v]
        if changed:
            raise UserError(
                f"{folder / 'config.json'} is damaged, or was changed since the weights were written, with "
                f"{'; '.join(changed)}; {way_out}"
            )


def _written(folder: Path) -> dict[str, Any]:
    """The entry of a folder's weights; empty where they have none, or there are no weights."""
    path = folder / SINGLE
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX).get("weight_map")
        first = min(filter(_is_name, places.values()), default="") if isinstance(places, dict) else ""
        path = folder / first
    if not path.is_file():
        return {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(FOLDER)
        tensors = {} if text is None else parse_json(text)
        if text is not None and not all(isinstance(tensors[name], dict) for name in ("config", "files")):
            raise ValueError(f"{FOLDER} in its metadata is damaged")
    except Exception as error:  # SafetensorError, OSError, and of a damaged entry
        raise UserError(f"{path} is damaged or not a safetensors file ({str(error).splitlines()[0]})") from None
    result: dict[str, Any] = tensors
    return result


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def read_sidecar(folder: Path, name: str) -> bytes | None:
    """The content of a file of a checkpoint; None where there is none.

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
