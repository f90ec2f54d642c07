"""Triton kernels as kernels that XLA launches itself.

A call of jax-triton carries its kernel in a string, which jaxlib hashes and compares before each run. XLA records such
a call into a command buffer (a CUDA graph) again after each change of an address. XLA's own call of PTX is parsed once,
at compile time.

XLA passes only the addresses of operands and results. The PTX parameters are therefore declared again: integers move
into one more operand, an array; unused parameters of Triton are removed; an aliased result gets a parameter. The
instructions, and therefore the bits, stay the same.

The GPU driver assembles each kernel once, when a program is loaded, and caches it (~/.nv/ComputeCache or
CUDA_CACHE_PATH). The environment variable FP8JAX_KERNEL_CALLS selects the launcher: `xla`, `triton` (jax-triton), or,
if unset, XLA with jax 0.11 or newer. The default falls back to jax-triton, with a warning, if the driver has no cache
or a small test kernel fails.
"""

import dataclasses
import functools
import logging
import os
import pathlib
import re
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir
from jax_triton import triton_lib

from pallas_kernels.dispatch import kernel_cache_triton

VARIABLE = "FP8JAX_KERNEL_CALLS"
TARGET = "__gpu$xla.gpu.ptx"
NAME = "fp8jax"  # marks our calls
_LOGGER = logging.getLogger("fp8jax")
_BYTES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}
_ARRAY_KIND = "array"


@dataclasses.dataclass(frozen=True)
class KernelParameter:
    """A parameter of a kernel: an array, or an integer with its type, such as `i32`."""

    kind: str
    value: int = 0


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch by jax-triton: compiled kernel, grid and parameters, without those that Triton adds."""

    kernel: Any
    x: int
    y: int
    z: int
    parameters: list[KernelParameter]

    def to_proto(self, *_: Any) -> bytes:
        raise _LaunchCaptured(self)


class _LaunchCaptured(Exception):
    """Carries a launch out of jax-triton's lowering before a call is emitted."""


_capture = threading.local()


def _intercept(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (replacement if getattr(_capture, "is_active", False) else original)(*args, **kwargs)


def install() -> None:
    """Patch jax-triton for `capture_launch`. Calls without it stay unchanged."""
    jaxlib_module = triton_lib.triton_kernel_call_lib
    replacements: dict[str, Any] = {
        "create_array_parameter": lambda *_: KernelParameter(_ARRAY_KIND),
        "create_scalar_parameter": lambda value, dtype: KernelParameter(dtype, value),
        "TritonKernelCall": Launch,
    }
    replacements = {
        name: _intercept(getattr(jaxlib_module, name), replacement) for name, replacement in replacements.items()
    }
    triton_lib.triton_kernel_call_lib = types.SimpleNamespace(**vars(jaxlib_module) | replacements)


def capture_launch(lower: Callable[[], Any]) -> Launch | None:
    """Return the launch of jax-triton's lowering of a call; None, with a warning, if none can be captured."""
    _capture.is_active = True
    try:
        lower()
        reason = "its lowering makes no single launch"
    except _LaunchCaptured as seen:
        return seen.args[0]  # type: ignore[no-any-return]
    except Exception as error:  # jax-triton's own errors are raised again by its call
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        _capture.is_active = False
    _warn_once(f"kernels are launched by jax-triton's calls: this jax-triton cannot be asked for less ({reason})")
    return None


def call(context: Any, operands: Sequence[Any], aliases: dict[int, int], lower: Callable[[], Any]) -> Any:
    """Lower a kernel call to XLA's own; return its MLIR results, or None if it must stay jax-triton's.

    Args:
        operands: MLIR values of the array operands.
        aliases: index of an operand -> index of the result that reuses its memory.
    """
    if get_launcher() == "triton" or _failure_reasons or (captured := capture_launch(lower)) is None:
        return None
    name, warps, clusters, shared, code, *_ = kernel_cache_triton.kernel_parts(captured.kernel)
    kinds = tuple(p.kind for p in captured.parameters)
    results = len(context.avals_out)
    is_in_place = tuple(i in aliases.values() for i in range(results))
    kernel = redeclare_parameters(code, 32 * warps, kinds, len(operands), is_in_place) if clusters == 1 else None
    if kernel is None:
        _warn_once(f"the kernel {name} is launched by jax-triton's call: its PTX has an unknown form")
        return None
    integers = pack_integers(captured.parameters) if kernel.has_integers else None
    if integers is not None:
        context = context.replace(avals_in=[*context.avals_in, jax.core.ShapedArray(integers.shape, integers.dtype)])
        operands = [*operands, mlir.ir_constant(integers)]
    rule = jax.ffi.ffi_lowering(TARGET, api_version=4, operand_output_aliases=aliases)
    sizes = {
        "grid_x": captured.x,
        "grid_y": captured.y,
        "grid_z": captured.z,
        "block_x": 32 * warps,
        "block_y": 1,
        "block_z": 1,
    }
    return rule(
        context, *operands,
        name=name, kernel_type="ptx", kernel_data=kernel.code,
        shared_mem_bytes=np.int32(shared), output_indices=[np.int32(len(operands) + i) for i in range(results)],
        **{argument: np.int32(size) for argument, size in sizes.items()},
    )  # fmt: skip


def pack_integers(parameters: Sequence[KernelParameter]) -> np.ndarray:
    """Return the integer parameters as an int32 array, each aligned to its own size."""
    content = bytearray()
    for p in parameters:
        if p.kind != _ARRAY_KIND:
            size = _BYTES[p.kind]
            content += bytes(-len(content) % size)
            content += (p.value % (1 << 8 * size)).to_bytes(size, "little")
    return np.frombuffer(bytes(content), np.int32)


@dataclasses.dataclass(frozen=True)
class RedeclaredKernel:
    """PTX with the parameters: operands, the array of integers (if `has_integers`), then results."""

    code: str
    has_integers: bool


_ENTRY_POINT = re.compile(r"^\.visible \.entry (\w+)\(\n?([^)]*)\)", re.MULTILINE)


@functools.cache
def redeclare_parameters(
    code: str, threads: int, kinds: tuple[str, ...], num_operands: int, is_in_place: tuple[bool, ...]
) -> RedeclaredKernel | None:
    """Return the PTX of a kernel with new parameter declarations; None if its form is unknown.

    Args:
        code: PTX of one kernel, after `kernel_cache_triton.strip_debug_info`.
        kinds: kinds of the parameters, without those that Triton adds.
        is_in_place: for each result, whether it is an alias of an operand. An aliased result has its own parameter in
            jax-triton 0.3, but none since 0.4.
    """
    entry, block_size = _ENTRY_POINT.search(code), re.search(r"^\.reqntid (\d+)\b", code, re.MULTILINE)
    if entry is None or block_size is None or int(block_size[1]) != threads:
        return None
    declarations = [line.strip() for line in entry[2].split(",") if line.strip()]
    names = [line.split()[-1] for line in declarations]
    body = code[entry.end() :]
    used_names = {name for name in re.findall(r"\b\w+_param_\d+\b", body)}
    if len(names) < len(kinds) or used_names & set(names[len(kinds) :]) or not used_names <= set(names):
        return None
    arrays = [line for line, kind in zip(declarations, kinds, strict=False) if kind == _ARRAY_KIND]
    results = arrays[num_operands:]
    if len(results) == is_in_place.count(False):
        new_results = iter(results)
        results = [
            f".param .u64 {entry[1]}_unread_{i}" if is_aliased else next(new_results)
            for i, is_aliased in enumerate(is_in_place)
        ]
    elif len(results) != len(is_in_place):
        return None
    offset, array = 0, f"{entry[1]}_numbers"
    for name, kind in zip(names, kinds, strict=False):
        if kind == _ARRAY_KIND:
            continue
        if (size := _BYTES.get(kind)) is None:
            return None
        offset += -offset % size
        pattern, bits = re.escape(name), 8 * size
        load = re.compile(rf"^ld\.param\.[bus]{bits}\s+(%\w+), \[{pattern}\];$", re.MULTILINE)
        body = load.sub(rf"ld.param.b64 %numbers, [{array}];\nld.global.nc.b{bits} \1, [%numbers+{offset}];", body)
        if re.search(rf"\b{pattern}\b", body):
            return None
        offset += size
    has_integers = array in body
    if has_integers:
        body = body.replace("\n{\n", "\n{\n.reg .b64 %numbers;\n", 1)
    lines = [*arrays[:num_operands], *[f".param .u64 {array}"] * has_integers, *results]
    return RedeclaredKernel(
        code[: entry.start()] + f".visible .entry {entry[1]}(\n" + ",\n".join(lines) + "\n)" + body, has_integers
    )


def get_launcher() -> str:
    """Return the launcher that the environment selects: `xla` or `triton`.

    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get(VARIABLE) or ("xla" if jax.__version_info__ >= (0, 11) else "triton")
    if value not in ("xla", "triton"):
        raise ValueError(f"{VARIABLE}={value!r}; use 'xla' or 'triton', or leave it unset")
    return value


_failure_reasons: list[str] = []


def check_launch(run_small_kernel: Callable[[], None]) -> None:
    """Select jax-triton's calls, with a warning, if XLA's own would be slow or `run_small_kernel` fails.

    An explicit environment variable is not tested.
    """
    if os.environ.get(VARIABLE) or get_launcher() == "triton" or _failure_reasons:
        return
    reason = missing_driver_cache()
    if reason is None:
        try:
            run_small_kernel()
        except Exception as error:  # XLA raises many types; any of them rules its call out
            reason = f"XLA's own calls of PTX fail ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    if reason is not None:
        _failure_reasons.append(reason)
        _warn_once(f"kernels are launched by jax-triton's calls: {reason}. The host needs more time per step")


def missing_driver_cache() -> str | None:
    """Return why the GPU driver has no cache of assembled kernels, or None if it has one."""
    if os.environ.get("CUDA_CACHE_DISABLE", "0") not in ("", "0"):
        return "CUDA_CACHE_DISABLE is set, so that the driver would assemble a kernel again for each of its calls"
    folder = pathlib.Path(os.environ.get("CUDA_CACHE_PATH") or os.path.expanduser("~/.nv/ComputeCache"))
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return f"the driver cannot keep assembled kernels in {folder}; CUDA_CACHE_PATH names another folder"
    return None


@functools.cache
def _warn_once(message: str) -> None:
    _LOGGER.warning("%s", message)
