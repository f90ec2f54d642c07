"""A folder of safetensors: where each tensor lies, checked; and reading one at a time.

The library `safetensors` checks a file's header (its length, JSON, offsets, and that the file is whole). Bytes are read
here, because its NumPy side has no 8-bit floats, and because a mapped file counts as memory of the process.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from experiments.config import UserError
from experiments.reading import parse_json, read_text

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor on disk: its file, its name and dtype as the file says them, its shape, and where its bytes begin."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int

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
            UserError: as `dtype`; or the file changed since it was opened.
        """
        count = int(np.prod(self.shape, dtype=np.int64))
        try:
            values = np.fromfile(self.file, self.dtype, count, offset=self.start)
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error.strerror or error})") from None
        if values.size != count:
            raise UserError(f"{self.file} ends within {self.name}: it is not the file that was opened; load it again")
        return values.reshape(self.shape)


def resolve(source: str | Path) -> Path:
    """A folder; or the folder of the local cache that `hf download OWNER/NAME` has filled. Nothing is downloaded.

    Raises:
        UserError: there is neither.
    """
    if Path(source).is_dir():
        return Path(source)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(str(source), local_files_only=True))
    except Exception as error:  # the library's own, and ValueError for what can be no name
        raise UserError(
            f"{source} is no folder, and no model in the local cache ({type(error).__name__}); "
            f"`hf download OWNER/NAME` fills the cache"
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
        raise UserError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint by name, in one file or in those of its index; only headers are read.

    Raises:
        UserError: a file is missing, damaged, or outside of the folder; or files and index do not agree.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            other = sorted(p.name for p in [*folder.glob("*.bin"), *folder.glob("*.safetensors")])
            there = f"; what is there is {', '.join(other[:3])}" if other else ""
            raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}{there}")
        return _header(folder / SINGLE)
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise UserError(f"{folder / INDEX}: weight_map is no object of file names")
    found: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or name in ("", ".", ".."):
            raise UserError(f"{folder / INDEX} names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing; {INDEX} names it")
        for tensor, stored in _header(folder / name).items():
            if places.get(tensor) != name:
                where = f"says {places[tensor]}" if tensor in places else "does not name it"
                raise UserError(f"{folder / name} holds {tensor}, but {INDEX} {where}")
            found[tensor] = stored
    if lost := sorted(set(places) - set(found)):
        raise UserError(f"{folder / places[lost[0]]} lacks {lost[0]}, which {INDEX} says is in it")
    return found


def _header(path: Path) -> dict[str, Stored]:
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except Exception as error:  # SafetensorError, OSError
        raise UserError(f"{path} is damaged or no safetensors file ({str(error).splitlines()[0]})") from None
    header.pop("__metadata__", None)
    return {
        name: Stored(path, name, x["dtype"], tuple(x["shape"]), 8 + length + x["data_offsets"][0])
        for name, x in header.items()
    }
