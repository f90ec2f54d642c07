"""What a results file says of how it was measured: XLA's flags, the commit, and which kernels as they were then.

`changed` compares those kernels with today's, so that figures are marked that are older than what they time.
"""

import functools
import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_PRODUCTS = ("matmul_mosaic", "matmul_block_mosaic", "matmul_mx_mosaic")
_QUANTIZE = ("quantize_triton", "quantize_rows_triton", "maxima_triton", "fold_triton", "scaling_triton")
_LAYER = (*_PRODUCTS, *_QUANTIZE, "norm_triton", "activation_triton", "activation_rows_triton", "remake_triton")
_ALL = (*_LAYER, "adamw_triton")
_STEP = (*_ALL, "matmul_int8_mosaic", "fallback_triton", "cotangents_triton")
# What each results file times, in pallas_kernels/, besides what these import. Others time no kernel.
KERNELS = {
    "gemm": (*_PRODUCTS, "fold_triton", "quantize_triton"),
    "gemm_block": ("matmul_block_mosaic",),
    "gemm_int8": ("matmul_mosaic", "matmul_int8_mosaic", "matmul_int8_triton"),
    "quantize": _QUANTIZE,
    "linear": (*_PRODUCTS, "matmul_int8_mosaic", *_QUANTIZE, "fallback_triton"),
    "layer": _LAYER,
    "layer_counted": _LAYER,
    "coat_speed": _LAYER,
    "optimizer": ("adamw_triton", "fp8lm_triton"),
    "scaling": _QUANTIZE,
    "cold": _ALL,
    "step": _STEP,
    "moss_speed": _STEP,
    "training_parity": _ALL,
}
# How kernels are called, not what they do.
_CALL = ("call_triton", "call_mosaic", "stored_triton")


def stamp(bench: str) -> dict[str, Any]:
    """What a results file of this name has besides its rows: "flags", "commit" and "kernels"."""
    return {"flags": os.environ.get("XLA_FLAGS", ""), "commit": _commit(), "kernels": kernels(bench)}


def kernels(bench: str, folder: Path = ROOT / "pallas_kernels") -> dict[str, str]:
    """Twelve hexadecimal digits of the code of every kernel that a results file of this name times, by file name."""
    digests: dict[str, str] = {}
    waiting = list(KERNELS.get(bench, ()))
    while waiting:
        name = waiting.pop()
        path = folder / f"{name}.py"
        if name not in digests and name not in _CALL and path.exists():
            text = path.read_text()
            digests[name] = digest(text)
            imported = re.findall(r"^from pallas_kernels(?:\.(\w+))? import (.+)$", text, re.MULTILINE)
            waiting += [n for module, names in imported for n in ([module] if module else re.findall(r"\w+", names))]
    return dict(sorted(digests.items()))


def digest(text: str) -> str:
    """Of a program without its blank lines and the lines that are only comments."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def changed(result: Mapping[str, Any]) -> list[str] | None:
    """Kernels that are not today what they were when a results file was measured; None where it does not say."""
    if "kernels" not in result:
        return None if result["bench"] in KERNELS else []
    now, then = kernels(result["bench"]), result["kernels"]
    return sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))


@functools.cache
def _commit() -> str | None:
    """Short hash of the commit that runs, with a + where files differ from it; None outside of a repository."""
    try:
        git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
        name = git(["git", "rev-parse", "--short=10", "HEAD"]).stdout.strip()
        return name + ("+" if git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None
