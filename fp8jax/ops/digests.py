"""Digests of tensors in the metadata of safetensors files, whose readers elsewhere pass over them.

The format has no checksums. A changed bit in a tensor is other weights to every reader that does not look here.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping

import numpy as np

# The entry of `__metadata__`: a JSON object of digests by the names of all tensors of the file.
KEY = "fp8jax.sha256"


def digest(array: np.ndarray) -> str:
    """SHA-256 of dtype, shape and bytes in row-major order, in hexadecimal digits."""
    hasher = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    # Extension dtypes (bfloat16, float8) have no buffer interface of their own.
    hasher.update(np.ascontiguousarray(array).view(np.uint8))
    return hasher.hexdigest()


def entries(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Entries of `__metadata__` for a file of these tensors."""
    return {KEY: json.dumps({name: digest(x) for name, x in tensors.items()})}


def read(metadata: Mapping[str, str] | None, names: Iterable[str]) -> dict[str, str]:
    """The digests of a file by the name of the tensor; empty for a file without digests.

    Args:
        metadata: `__metadata__` of the file.
        names: of its tensors.

    Raises:
        ValueError: the digests are not those of these tensors.
    """
    if not metadata or KEY not in metadata:
        return {}
    try:
        tensor_digests = json.loads(metadata[KEY])
    except (ValueError, RecursionError):
        tensor_digests = None
    if not isinstance(tensor_digests, dict) or not all(isinstance(x, str) for x in tensor_digests.values()):
        raise ValueError(f"{KEY} in its metadata is damaged")
    for name in sorted({*names} ^ tensor_digests.keys()):
        raise ValueError(f"{name} has a digest and no values" if name in tensor_digests else f"{name} has no digest")
    return tensor_digests
