"""Triton kernels as kernels that XLA launches itself.

jax-triton's calls carry a kernel in a string that jaxlib hashes and compares before each run of a program, and XLA
records them into a command buffer (a CUDA graph) by running them into a stream, again whenever an address has changed:
milliseconds of a step during which the GPU waits if the host reads each loss. XLA's own call of PTX is taken apart when
a program is compiled. It is launched and recorded as XLA's own kernels are.

Such a kernel is given the addresses of the call's operands and then of its results, and nothing else. Parameters are
therefore declared anew: integers lie in an array, one more operand, where the kernel reads them; what Triton adds and
the kernel never reads is left out; a result that takes the place of an operand has a parameter. The instructions, and
so the bits, are those that jax-triton's call runs.

The GPU's driver assembles PTX when a program is loaded, each kernel once, and keeps what it made in its own cache
(~/.nv/ComputeCache, or CUDA_CACHE_PATH). The environment variable FP8JAX_KERNEL_CALLS says who launches: `xla`,
`triton` (jax-triton's call), or, unset, XLA where it can and jax is 0.11 or newer; before, that was not tried on a GPU.
It cannot where the driver keeps nothing, or where a small kernel of the same kind, launched once, fails; then
jax-triton's calls are taken and a warning says why.
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
NAME = "fp8jax"  # of our calls, among those of others
_LOGGER = logging.getLogger("fp8jax")
_BYTES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}
_ARRAY_KIND = "array"


@dataclasses.dataclass(frozen=True)
class KernelParameter:
    """A kernel's parameter: an array, or an integer of a type as `i32`."""

    kind: str
    value: int = 0


@dataclasses.dataclass(frozen=True)
class Launch:
    """What jax-triton is about to call: a compiled kernel, its grid and its parameters, without those Triton adds."""

    kernel: Any
    x: int
    y: int
    z: int
    parameters: list[KernelParameter]

    def to_proto(self, *_: Any) -> bytes:
        raise _LaunchCaptured(self)


class _LaunchCaptured(Exception):
    """Carries a launch out of jax-triton's lowering, before it writes a call."""


_capture = threading.local()


def _intercept(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (replacement if getattr(_capture, "on", False) else original)(*args, **kwargs)


def install() -> None:
    """Lets `capture_launch` see what jax-triton's lowering makes; calls of others are made as before."""
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
    """What jax-triton would call, from its lowering of a kernel's call; None, which is told, where that is not seen."""
    _capture.on = True
    try:
        lower()
        reason = "its lowering makes no single launch"
    except _LaunchCaptured as seen:
        return seen.args[0]  # type: ignore[no-any-return]
    except Exception as error:  # Of jax-triton's own, if it is wrong by itself: it comes again where the call is made.
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        _capture.on = False
    _warn_once(f"kernels are launched by jax-triton's calls: this jax-triton cannot be asked for less ({reason})")
    return None


def call(context: Any, operands: Sequence[Any], aliases: dict[int, int], lower: Callable[[], Any]) -> Any:
    """The results of a kernel's call as XLA's, or None where it has to stay jax-triton's.

    Args:
        context: of the lowering rule.
        operands: values in MLIR, the arrays.
        aliases: by operand the result that takes its place.
        lower: jax-triton's lowering of it.
    """
    if get_launcher() == "triton" or _failure_reasons or (captured := capture_launch(lower)) is None:
        return None
    name, warps, clusters, shared, code, *_ = kernel_cache_triton.kernel_parts(captured.kernel)
    kinds = tuple(p.kind for p in captured.parameters)
    results = len(context.avals_out)
    is_in_place = tuple(i in aliases.values() for i in range(results))
    kernel = redeclare_parameters(code, 32 * warps, kinds, len(operands), is_in_place) if clusters == 1 else None
    if kernel is None:
        _warn_once(f"the kernel {name} is launched by jax-triton's call: its PTX has another form than is known here")
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
        **{of: np.int32(size) for of, size in sizes.items()},
    )  # fmt: skip


def pack_integers(parameters: Sequence[KernelParameter]) -> np.ndarray:
    """A kernel's integers, each at a place that its size divides, as words of 32 bits."""
    content = bytearray()
    for p in parameters:
        if p.kind != _ARRAY_KIND:
            size = _BYTES[p.kind]
            content += bytes(-len(content) % size)
            content += (p.value % (1 << 8 * size)).to_bytes(size, "little")
    return np.frombuffer(bytes(content), np.int32)


@dataclasses.dataclass(frozen=True)
class RedeclaredKernel:
    """PTX whose parameters are a call's operands, its integers if it reads any (`has_integers`), and results."""

    code: str
    has_integers: bool


_ENTRY_POINT = re.compile(r"^\.visible \.entry (\w+)\(\n?([^)]*)\)", re.MULTILINE)


@functools.cache
def redeclare_parameters(
    code: str, threads: int, kinds: tuple[str, ...], num_operands: int, is_in_place: tuple[bool, ...]
) -> RedeclaredKernel | None:
    """A kernel's code with its parameters declared anew; None where it is not of the form known here.

    Args:
        code: PTX of one kernel, as `kernel_cache_triton.strip_debug_info` makes it.
        threads: of a program.
        kinds: of the parameters, without those that Triton adds.
        num_operands: the number of arrays that the call is given.
        is_in_place: for each result whether it takes an operand's place. It has a parameter of its own in kernels of
            jax-triton 0.3, none since 0.4.
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
    """Who launches kernels, by the environment: `xla` or `triton`.

    Raises:
        ValueError: the variable says something else.
    """
    value = os.environ.get(VARIABLE) or ("xla" if jax.__version_info__ >= (0, 11) else "triton")
    if value not in ("xla", "triton"):
        raise ValueError(f"{VARIABLE}={value!r}: give 'xla' or 'triton', or leave it unset")
    return value


_failure_reasons: list[str] = []


def check_launch(run_small_kernel: Callable[[], None]) -> None:
    """Takes jax-triton's calls from now on, and warns, where XLA's would be slow or fail; tries `run_small_kernel`.

    Nothing is tried where the environment variable is set: what it says holds.
    """
    if os.environ.get(VARIABLE) or get_launcher() == "triton" or _failure_reasons:
        return
    reason = missing_driver_cache()
    if reason is None:
        try:
            run_small_kernel()
        except Exception as error:  # XLA's errors are of many kinds; any means that its call is not for here.
            reason = f"XLA's own calls of PTX fail ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    if reason is not None:
        _failure_reasons.append(reason)
        _warn_once(f"kernels are launched by jax-triton's calls: {reason}. Each step takes the host longer")


def missing_driver_cache() -> str | None:
    """Why the GPU's driver keeps no assembled kernels, and would assemble one for each of its calls; or None."""
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
