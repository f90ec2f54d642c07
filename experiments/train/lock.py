"""A lock, so that only one process writes to a run."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from experiments.errors import BusyError, DiskError
from experiments.files import parse_json, read_text, write_json


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Locks a run against other processes.

    The system releases the lock when this process ends, even if it is killed. The lock and owner files are next to the
    folder, because the folder may be moved aside.

    Args:
        folder: folder of the run; its parent must exist.

    Raises:
        BusyError: another process has the lock; the message names it.
        DiskError: the folder of runs cannot be written.
    """
    lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
    owner = folder.with_name(f".{folder.name}.owner")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise BusyError(
            f"{folder} is being trained by {_read_owner(owner)}. Wait for it, stop it, or use another --run"
        ) from None
    except OSError as error:
        raise DiskError(
            f"{folder.parent} cannot be written ({error.strerror or error}); make it writable, or use another --out"
        ) from None
    try:
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        write_json(owner, me)
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _read_owner(path: Path) -> str:
    try:
        other = parse_json(read_text(path))
        return f"process {other['pid']} on {other['host']} (since {other['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
