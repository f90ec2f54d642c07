"""Reading files that anybody may have written: regular ones alone, and JSON that Python can represent."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISDIR, "a folder"), (stat.S_ISSOCK, "a socket"))


def read_bytes(path: Path | str) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read; or it is a pipe, a folder or a device, which is not waited for.
    """
    # To open a pipe is to wait for its writer.
    if reason := irregular(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, reason, str(path))
    return Path(path).read_bytes()


def irregular(mode: int) -> str:
    """Why a file of this mode is not read, such as "it is a pipe, not a regular file"; "" for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")
    return f"it is {kind}, not a regular file"


def read_text(path: Path | str) -> str:
    """As `read_bytes`, as UTF-8 with any line endings.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is not UTF-8; a ValueError.
    """
    return read_bytes(path).decode().replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str) -> Any:
    """As `json.loads`, of what Python can represent and print.

    Raises:
        ValueError: no JSON; nested too deep; an integer of more than 4,300 digits; or half of a surrogate pair.
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
