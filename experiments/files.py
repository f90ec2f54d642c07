"""Reads and writes files: only regular files, only JSON that Python can represent, and atomic writes."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from experiments.errors import DiskError

_FILE_TYPES = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISDIR, "a folder"), (stat.S_ISSOCK, "a socket"))


def read_bytes(path: Path | str) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: it cannot be read; or it is a pipe, a folder or a device.
    """
    # Opening a pipe would wait for its writer.
    if reason := irregular(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, reason, str(path))
    return Path(path).read_bytes()


def irregular(mode: int) -> str:
    """Returns why a mode is not that of a regular file, such as "it is a pipe, not a regular file", or ""."""
    if stat.S_ISREG(mode):
        return ""
    kind = next((name for is_kind, name in _FILE_TYPES if is_kind(mode)), "a device")
    return f"it is {kind}, not a regular file"


def read_text(path: Path | str) -> str:
    """Returns the content of a UTF-8 file with any line endings.

    Raises:
        OSError: see `read_bytes`.
        UnicodeDecodeError: it is not UTF-8; a ValueError.
    """
    return read_bytes(path).decode().replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str) -> Any:
    """`json.loads` for values that Python can represent and print.

    Raises:
        ValueError: not JSON; nested too deep; an integer of more than 4,300 digits; or half of a surrogate pair.
    """
    try:
        value = json.loads(text)
        if r"\ud" in text or r"\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    except json.JSONDecodeError:
        raise
    except UnicodeEncodeError as error:
        raise ValueError(f"\\u{ord(error.object[error.start]):04x} is half of a surrogate pair") from None
    except ValueError as error:
        raise ValueError(str(error).partition(";")[0]) from None
    return value


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts errors of a file, such as a full disk, to a DiskError with its path."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{path} cannot be written ({error.strerror or error}). Fix this and run the same command again; it "
            "continues from the newest checkpoint"
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically: a kill leaves the old or the new content. Raises DiskError if it cannot be written.

    An existing link is replaced. The target of a link is never written to, because another user of the folder may
    have created the link.
    """
    with writing(path):
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` in UTF-8."""
    write_bytes(path, text.encode())


def open_to_append(path: Path) -> TextIO:
    """Opens a text file to append lines. Raises OSError if it is a link; see `write_bytes`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    return open(descriptor, "a", buffering=1, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Writes JSON. See `write_text`."""
    write_text(path, json.dumps(content, indent=1, default=str) + "\n")
