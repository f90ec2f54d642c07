"""Checkpoints of a training state, written by Orbax and checked leaf by leaf.

Orbax writes atomically (a killed save leaves no checkpoint of that step), in the background, and keeps the newest N. It
does not detect a flipped byte in an array, and casts silently if a leaf is requested in another dtype. Therefore the
metadata of a checkpoint contain the shape, dtype and digest of each leaf, and `restore` compares them. With a key in
the environment variable FP8JAX_CHECKPOINT_KEY the metadata is signed (HMAC-SHA-256), and only checkpoints of this key
are read.

The state is stored as a flat dict from a leaf's path to its array. Any pytree can be saved, and names in messages are
the names on disk. A single process copies the whole state to its memory. With several processes, each writes and reads
its own shards in the same folder. Their digests are sums over elements, which need no whole array.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from orbax.checkpoint import v1 as ocp

from experiments.errors import DiskError, UserError
from experiments.mesh import flatten
from experiments.train import hosts
from experiments.train.config import check_same
from fp8jax.ops.products.peft_files import digest as digest

_State = TypeVar("_State")
# The environment variable with the key, and the prefix of signatures.
KEY, _SIGNED = "FP8JAX_CHECKPOINT_KEY", "hmac-sha256:"
# Leaves that checkpoints of older versions lack start as zeros.
_ADDED = "monitor."


class DamagedError(UserError):
    """The bytes of a checkpoint differ from those that were saved."""


def quiet() -> None:
    """Silences Orbax's logs, and the tracebacks of its pending tasks after an error."""
    global _shown
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if sys.unraisablehook is not _show:
        _shown, sys.unraisablehook = sys.unraisablehook, _show


_shown: Callable[[Any], object] = sys.unraisablehook


def _show(unraisable: Any) -> None:
    # TensorStore calls back for each pending read after the first one has failed.
    if str(unraisable.exc_value) != "Event loop is closed":
        _shown(unraisable)


def checksums(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Returns 64 bits per array, as 16 hexadecimal digits, independent of its sharding.

    Two sums over elements of a hash of position and bits. A change of a single element always changes them.
    """
    sums = jax.jit(lambda leaves: [_sums(x) for x in leaves])(list(arrays.values()))
    return {k: "".join(f"{int(n):08x}" for n in np.asarray(x)) for k, x in zip(arrays, sums, strict=True)}


def digest_of(tree: Any) -> str:
    """Returns sixteen hexadecimal digits for all arrays of a tree and their paths, independent of sharding."""
    arrays = flatten(tree)
    types = {k: f"{x.dtype}{x.shape}" for k, x in arrays.items()}
    return hashlib.sha256(json.dumps([types, checksums(arrays)], sort_keys=True).encode()).hexdigest()[:16]


def _sums(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool:
        x = x.astype(jnp.uint8)
    words = lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
    # Positions are row and column indices: a flat view would gather shards.
    position = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        position = position * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, words.shape, dim)

    def total(odd: int, other: int) -> jax.Array:
        # Each line is a bijection of the words at a position.
        h = (words.astype(jnp.uint32) ^ (position * jnp.uint32(other))) * jnp.uint32(odd)
        h = (h ^ (h >> 15)) * jnp.uint32(0x2C1B3C6D)
        return jnp.sum(h ^ (h >> 13), dtype=jnp.uint32)

    return jnp.stack([total(0x9E3779B1, 0x85EBCA6B), total(0xC2B2AE3D, 0x27D4EB2F)])


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _seal(meta: dict[str, Any]) -> str:
    """Returns the digest of a checkpoint's metadata, or a signature (with a prefix) if there is a key."""
    content, key = json.dumps(meta, sort_keys=True).encode(), os.environ.get(KEY, "")
    if key:
        return _SIGNED + hmac.new(key.encode(), content, hashlib.sha256).hexdigest()
    return hashlib.sha256(content).hexdigest()


class Checkpoints:
    """The checkpoints of one recipe's run, in one folder. Use it as a context manager, or call `close`.

    Args:
        folder: the folder, created if missing.
        keep: number of newest checkpoints to keep.
        clean: whether to remove the remains of killed saves. Not safe while another process may save.

    Raises:
        UserError: the folder is a file, or there is a key with several processes.
        DiskError: the folder cannot be created or read.
    """

    def __init__(self, folder: Path, keep: int, *, clean: bool = True) -> None:
        self.folder = folder.absolute()
        if hosts.several() and os.environ.get(KEY):
            raise UserError(
                f"{KEY} can sign only checkpoints of one process. Those of several processes have checksums, which "
                f"detect damage but not forgery. Unset {KEY}"
            )
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            file_type = "a link to nothing" if self.folder.is_symlink() and not self.folder.exists() else "a file"
            raise UserError(f"{folder} is {file_type}, but the checkpoint folder must be there; move it away")
        if clean:
            # Orbax's cleaning continues in the background after `close`, and could delete saves of the next object.
            with hosts.agreement():
                for remains in self.folder.glob("*.orbax-checkpoint-tmp") if hosts.first() else ():
                    if remains.is_symlink() or not remains.is_dir():
                        raise UserError(f"{remains} is not a folder, but Orbax needs a folder there; move it away")
                    shutil.rmtree(remains)
        self._policy = ocp.training.preservation_policies.LatestN(keep)
        self._links = contextlib.ExitStack()
        self._unreadable: dict[int, DamagedError] = {}
        self._orbax = self._open()
        self._save: Any = None  # Orbax's response of the pending save

    def _open(self) -> ocp.training.Checkpointer:
        """Returns Orbax's object of this folder, or of a folder with links to its readable steps.

        Orbax reads the metadata of all steps at once and fails if one is unreadable. Such steps are in `_unreadable`.
        """
        steps = sorted(int(x.name) for x in self.folder.glob("*") if x.name.isdecimal() and x.name.isascii())
        self._unreadable = {step: error for step in steps if (error := self._irregular(step)) is not None}
        if not self._unreadable:
            try:
                return ocp.training.Checkpointer(self.folder, preservation_policy=self._policy)
            except Exception as error:  # Orbax, JSON and file system raise many types of errors on damaged files
                if isinstance(error, OSError) and not steps:
                    why = error.strerror or error
                    raise DiskError(f"{self.folder} cannot be created or read ({why}); make it writable") from None
                if hosts.is_other_process_gone(error) or not steps:
                    raise
                cause = error
        for step in steps:
            if step not in self._unreadable:
                try:
                    self._open_links([step]).close()
                except Exception as error:  # as above
                    self._unreadable[step] = self._damaged(step, f"its metadata cannot be read ({_first_line(error)})")
        if not self._unreadable:
            raise cause
        return self._open_links([step for step in steps if step not in self._unreadable])

    def _open_links(self, steps: Sequence[int]) -> ocp.training.Checkpointer:
        folder = Path(self._links.enter_context(tempfile.TemporaryDirectory(prefix="checkpoints-")))
        for step in steps:
            (folder / str(step)).symlink_to(self.folder / str(step))
        return ocp.training.Checkpointer(folder)

    def _irregular(self, step: int) -> DamagedError | None:
        """Returns an error if a file of a step is a pipe or device: reading it might never end."""
        for path in (self.folder / str(step)).rglob("*"):
            if path.exists() and not (path.is_file() or path.is_dir()):
                return self._damaged(step, f"{path} is no regular file")
        return None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for pending saves.

        Raises:
            DiskError: a save could not be written.
        """
        try:
            with self._saving():
                try:
                    self._wait()
                finally:
                    self._orbax.close()
        finally:
            self._links.close()

    def _wait(self) -> None:
        """Waits for a pending save."""
        save, self._save = self._save, None
        if save is not None:
            # Orbax keeps a thread with an event loop per save until its result is requested.
            save.result()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Converts errors of a save to DiskError, unless another process has ended."""
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise ValueError, OSError and more
            if hosts.is_other_process_gone(error):
                raise
            raise self._unwritten(error) from error

    def latest(self) -> int | None:
        """Returns the step of the newest complete checkpoint."""
        return max([x.step for x in self._orbax.checkpoints] + list(self._unreadable), default=None)

    def save(
        self,
        step: int,
        state: Any,
        *,
        loader: dict[str, Any],
        config: dict[str, Any],
        log: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Starts a save and returns; the state may be donated or overwritten at once.

        Args:
            step: number of steps before the state.
            state: any pytree of arrays.
            loader: the data iterator's state, as JSON.
            config: settings that must be equal at `resume`, as JSON.
            log: the newest rows of the log, as JSON.

        Raises:
            DamagedError: the metadata of a step cannot be read, and `resume` has not moved it away.
            DiskError: this or the previous save could not be written.
        """
        for error in self._unreadable.values():
            raise error
        arrays: dict[str, Any] = flatten(state)
        if hosts.several():
            algorithm, digests = "sum64", checksums(arrays)
        else:
            # A copy: on a CPU, a view would change during the background save once its buffer is donated.
            arrays = {name: np.array(leaf, copy=True) for name, leaf in arrays.items()}
            algorithm, digests = "sha256", {name: digest(x) for name, x in arrays.items()}
        leaves = {
            name: {"shape": list(x.shape), "dtype": str(x.dtype), algorithm: digests[name]}
            for name, x in arrays.items()
        }
        meta = {"step": step, "loader": loader, "config": config, "log": list(log), "leaves": leaves}
        # Orbax cannot store empty arrays. Their shape is in the metadata.
        stored = {name: x for name, x in arrays.items() if x.size}
        with self._saving():
            self._wait()
            self._save = self._orbax.save_checkpointables_async(
                step, {"state": stored}, force=True, custom_metadata={"seal": _seal(meta), **meta}
            )
            if hosts.several():
                # With several processes, Orbax reads the state itself, which the next step overwrites.
                self._wait()

    def read_meta(self, step: int) -> dict[str, Any]:
        """Returns the metadata of `save`: step, loader, config, log, and leaves.

        Raises:
            DamagedError: the checkpoint's metadata is missing or damaged, or signed with another key.
            UserError: it is signed but there is no key, or the reverse.
        """
        if step in self._unreadable:
            raise self._unreadable[step]
        try:
            meta = dict(self._orbax.metadata(step).custom_metadata)
            seal = meta.pop("seal")
        except Exception as error:  # Orbax, JSON and file system raise many types of errors on damaged files
            raise self._damaged(step, f"its metadata cannot be read ({_first_line(error)})") from error
        is_signed, key = str(seal).startswith(_SIGNED), os.environ.get(KEY, "")
        if is_signed != bool(key):
            raise UserError(
                f"checkpoint {self.folder / str(step)} is {'signed' if is_signed else 'not signed'}: "
                f"{f'set {KEY} to its key' if is_signed else f'unset {KEY}, or move it away'}"
            )
        if not hmac.compare_digest(str(seal).encode(), _seal(meta).encode()):
            if key:
                raise DamagedError(
                    f"checkpoint {self.folder / str(step)} was changed, or signed with another key than that in {KEY}"
                )
            raise self._damaged(step, "its metadata does not match its own digest")
        return meta

    def restore(self, step: int, abstract: _State) -> tuple[_State, dict[str, Any]]:
        """Returns the saved state, bit for bit, and the metadata.

        Args:
            step: the step of an existing checkpoint.
            abstract: the expected tree of arrays or ShapeDtypeStructs, with optional shardings.

        Raises:
            DamagedError: the bytes differ from those that were saved.
            UserError: the checkpoint has unexpected leaves, shapes or dtypes.
        """
        meta = self.read_meta(step)
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        expected = {
            k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or device)
            for k, x in flatten(abstract).items()
        }
        leaves = meta["leaves"]
        added = {name for name in expected if name.startswith(_ADDED) and name not in leaves}
        for name in sorted(set(expected) - added ^ set(leaves)):
            problem = "lacks" if name in expected else "has an unknown leaf"
            raise UserError(
                f"checkpoint {self.folder / str(step)} {problem} {name}: it belongs to another model or recipe"
            )
        for name, leaf in ((k, x) for k, x in expected.items() if k not in added):
            old = f"{leaves[name]['dtype']}{leaves[name]['shape']}"
            new = f"{leaf.dtype}{list(leaf.shape)}"
            if old != new:
                raise UserError(
                    f"checkpoint {self.folder / str(step)}: {name} is {old}, but this program expects {new}"
                )
        try:
            with hosts.agreement():
                stored = self._load(step, {k: x for k, x in expected.items() if x.size and k not in added})
        except hosts.Agreed as error:
            raise DamagedError(str(error)) from error
        arrays = {
            k: stored[k] if k in stored else jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
            for k, x in expected.items()
        }
        for name in _changed({k: x for k, x in arrays.items() if k not in added}, leaves):
            raise self._damaged(step, f"the bytes of {name} do not match their digest")
        return jax.tree.unflatten(jax.tree.structure(abstract), list(arrays.values())), meta

    def _load(self, step: int, expected: dict[str, Any]) -> dict[str, Any]:
        try:
            arrays: dict[str, Any] = self._orbax.load_checkpointables(step, {"state": expected})["state"]
        except Exception as error:  # TensorStore raises ValueError, RuntimeError and more
            if hosts.is_other_process_gone(error):
                raise
            raise self._damaged(step, f"Orbax cannot read it ({_first_line(error)})") from error
        return arrays

    def resume(
        self, abstract: _State, config: dict[str, Any], report: Callable[[str], None]
    ) -> tuple[_State, dict[str, Any]] | None:
        """Returns state and metadata of the newest intact checkpoint, or None without a checkpoint.

        Newer damaged checkpoints are reported and moved to `damaged-STEP` next to this folder, as are older ones with
        unreadable metadata.

        Args:
            abstract: see `restore`.
            config: the expected `config` of `save`.
            report: called with one line for each damaged checkpoint.

        Raises:
            UserError: the checkpoint belongs to another configuration, or none is intact.
        """
        with self._saving():
            self._wait()
        damaged: dict[int, DamagedError] = {}
        for step in sorted([*(x.step for x in self._orbax.checkpoints), *self._unreadable], reverse=True):
            try:
                check_same(self.read_meta(step)["config"], config, self.folder / str(step))
                state, meta = self.restore(step, abstract)
            except DamagedError as error:
                damaged[step] = error
                continue
            damaged |= self._unreadable
            for other, why in damaged.items():
                report(f"{why}; moved to {self._set_aside(other)}")
            if damaged:
                self._orbax.close()
                self._orbax = self._open()
            return state, meta
        for why in damaged.values():
            fix = f"Set {KEY} to the key of this run, or restart" if os.environ.get(KEY) else "Restart"
            raise UserError(f"{why}, and no older one is intact. {fix} the run with --resume never")
        return None

    def _set_aside(self, step: int) -> Path:
        target = base = self.folder.with_name(f"damaged-{step}")
        number = 1
        while target.exists():
            number += 1
            target = base.with_name(f"{base.name}.{number}")
        with hosts.agreement():
            if hosts.first():
                try:
                    os.rename(self.folder / str(step), target)
                except OSError as error:
                    raise DiskError(
                        f"{self.folder / str(step)} is damaged, and cannot be moved to {target} "
                        f"({error.strerror or error}); move it away"
                    ) from None
        return target

    def _damaged(self, step: int, what: str) -> DamagedError:
        return DamagedError(f"checkpoint {self.folder / str(step)} is damaged: {what}")

    def _unwritten(self, error: Exception) -> DiskError:
        steps = [int(path.name) for path in self.folder.glob("*") if path.name.isdigit()]
        saved = f"the newest is of step {max(steps)}" if steps else "there is none yet"
        why = os.strerror(errno.ENOSPC) if "No space left" in str(error) else _first_line(error)
        free = shutil.disk_usage(self.folder.parent).free / 2**20
        return DiskError(
            f"a checkpoint could not be written to {self.folder} ({why}; {free:,.1f} MiB are free there); {saved}. "
            "Fix this and run the same command again"
        )


def _changed(arrays: dict[str, Any], leaves: dict[str, dict[str, Any]]) -> list[str]:
    """Returns names of restored arrays that do not match their metadata (SHA-256, or sums with several processes)."""
    sums = checksums({k: x for k, x in arrays.items() if "sum64" in leaves[k]})
    return [
        k
        for k, x in arrays.items()
        if (sums[k] != leaves[k]["sum64"] if k in sums else digest(np.asarray(hosts.gather(x))) != leaves[k]["sha256"])
    ]


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
