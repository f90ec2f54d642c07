"""A cache of compiled Triton kernels on disk, shared by processes.

The file name is a hash of everything that a compilation depends on: sources, argument types, constants, options, GPU
architecture and versions. Files are written atomically; a damaged one is replaced. Only PTX is stored, without debug
information or Triton IR: jaxlib hashes and compares all bytes of each call before each run of a program, on the host.

The folder is the environment variable FP8JAX_KERNEL_CACHE; an empty value disables the cache. If it is unset, the
folder is `fp8jax-triton` in JAX's compilation cache, or else `fp8jax/triton` in XDG_CACHE_HOME or ~/.cache.
"""

import hashlib
import json
import logging
import os
import pathlib
import re
import tempfile
import types
from collections.abc import Callable
from typing import Any

import jax
import jax_triton
import jaxlib.version
import triton
from jax_triton import triton_lib

VARIABLE = "FP8JAX_KERNEL_CACHE"
_LOGGER = logging.getLogger("fp8jax")


def cache_folder() -> pathlib.Path | None:
    """Return the folder of the cache, or None if it is disabled."""
    path = os.environ.get(VARIABLE)
    if path is not None:
        return pathlib.Path(path).expanduser() if path else None
    jax_cache = jax.config.jax_compilation_cache_dir
    if jax_cache and "://" not in jax_cache:
        return pathlib.Path(jax_cache).expanduser() / "fp8jax-triton"
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fp8jax" / "triton"


def load_or_compile(key: Any, compile_kernel: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `compile_kernel`, read from the cache if it holds the key, and written to it otherwise.

    Args:
        key: everything that the result depends on; its `repr` is hashed.
        compile_kernel: function of no arguments that returns JSON data.
    """
    folder_path = cache_folder()
    if folder_path is None:
        return compile_kernel()
    versions = (triton.__version__, jax_triton.__version__, jaxlib.version.__version__, "bare PTX, without indents")
    path = folder_path / f"{hashlib.sha256(repr((versions, key)).encode()).hexdigest()}.json"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOGGER.warning("%s is damaged (%s): the kernel is compiled again", path, error)
    kernel = compile_kernel()
    try:
        _write(path, kernel)
    except OSError as error:
        _LOGGER.warning(
            "compiled kernels cannot be kept in %s (%s); %s names another folder", folder_path, error, VARIABLE
        )
    return kernel


def _read(path: pathlib.Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    kernel: dict[str, Any] = content["made"]
    if content["digest"] != _digest(kernel):
        raise ValueError("its bytes are not those that were written")
    return kernel


def _write(path: pathlib.Path, kernel: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
        json.dump({"digest": _digest(kernel), "made": kernel}, file)
    try:
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise


def _digest(kernel: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(kernel, sort_keys=True).encode()).hexdigest()


_TRITON_KERNEL = triton_lib.triton_kernel_call_lib.TritonKernel
# Matches `.loc` and `.file` lines, debug sections and comments. Labels stay: the assembler reorders between them only.
_DEBUG_LINES = re.compile(
    r"""^[ \t]*\.(?:loc|file)\b.*\n | ^[ \t]*\.section[ \t]+\.debug_\w+\s*\{[^{}]*\}[ \t]*\n?
    | ^[ \t]*//.*\n | [ \t]*//.*$ | ^[ \t]+""",
    re.MULTILINE | re.VERBOSE,
)
# Kernel and constructor arguments of each compiled kernel of this process, by `id`.
_parts_by_id: dict[int, tuple[Any, list[Any]]] = {}


def _compile_and_record(*arguments: Any) -> Any:
    """Return jax-triton's compiled kernel with bare PTX and without Triton IR, and record its constructor arguments."""
    name, warps, clusters, shared, binary, _, *other_arguments = arguments
    return _make_kernel([name, warps, clusters, shared, strip_debug_info(binary), "", *other_arguments])


def _make_kernel(parts: list[Any]) -> Any:
    """Return jaxlib's kernel from its constructor's arguments, which `kernel_parts` finds later."""
    kernel = _TRITON_KERNEL(*parts)
    _parts_by_id[id(kernel)] = kernel, parts
    return kernel


def kernel_parts(kernel: Any) -> list[Any]:
    """Return a kernel's constructor arguments: name, warps, clusters, shared-memory bytes, bare PTX, and the rest."""
    return _parts_by_id[id(kernel)][1]


def strip_debug_info(ptx: str) -> str:
    """Return PTX without comments, indents and line information; the machine code is the same."""
    return _DEBUG_LINES.sub("", ptx).replace(" \t", " ").replace("\t", " ")


def install() -> None:
    """Patch jax-triton so that it uses this cache."""
    # The patched view belongs to jax-triton alone: other users of the jaxlib module keep the original class.
    module_view = vars(triton_lib.triton_kernel_call_lib) | {"TritonKernel": _compile_and_record}
    triton_lib.triton_kernel_call_lib = types.SimpleNamespace(**module_view)
    if hasattr(triton_lib, "TritonFunction"):
        triton_lib.TritonFunction._compile_kernel = _cached_since_04(triton_lib.TritonFunction._compile_kernel)
    else:
        triton_lib.get_or_create_triton_kernel = _cached_before_04(triton_lib.get_or_create_triton_kernel)


def _cached_since_04(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return `TritonFunction._compile_kernel` of jax-triton 0.4 or newer, with results from this cache if stored."""

    def call(self: Any, spec: Any, gpu_target: Any, backend: Any, options: Any) -> Any:
        compiled: list[Any] = []

        def make() -> dict[str, Any]:
            compiled.extend(compile_kernel(self, spec, gpu_target, backend, options))
            result = compiled[3]
            return {"kernel": kernel_parts(compiled[0]), "tensors": list(result.tensordesc_meta or ())}

        key = (
            self.fn.cache_key, sorted(spec.signature.items()), spec.specialization, sorted(spec.constants.items()),
            gpu_target, sorted(options.items()),
        )  # fmt: skip
        stored = load_or_compile(key, make)
        if compiled:
            return tuple(compiled)
        name, _, _, shared, binary, ttir, *_ = stored["kernel"]
        result = triton_lib.CompilationResult(binary, name, shared, "", "", tensordesc_meta=stored["tensors"])
        return _make_kernel(stored["kernel"]), ttir, backend.parse_options(options), result

    return call


def _cached_before_04(get_or_create: Callable[..., Any]) -> Callable[..., Any]:
    kernels: dict[str, Any] = {}

    def call(
        backend: Any, platform: str, fn: Any, kinds: Any, scalars: Any, *, compute_capability: Any, **options: Any
    ) -> Any:
        if compute_capability is None:
            compute_capability = triton_lib.triton_kernel_call_lib.get_compute_capability(0)
        compiled_now: list[Any] = []

        def make() -> dict[str, Any]:
            compiled = get_or_create(
                backend, platform, fn, kinds, scalars, compute_capability=compute_capability, **options
            )
            compiled_now.extend(compiled)
            return {
                "kernel": kernel_parts(compiled[0]),
                "attributes": [[*at, those] for at, those in compiled[1].items()],
            }

        options["metaparams"] = dict(sorted(options["metaparams"].items()))
        # A kernel is specialized only for the scalars None and 1; other values belong to the calling program.
        specialized_scalars = [(i, kind, value if value is None or value == 1 else ...) for i, kind, value in scalars]
        key_parts = (fn.cache_key, platform, kinds, specialized_scalars, compute_capability, sorted(options.items()))
        if (key := repr(key_parts)) not in kernels:
            stored = load_or_compile(key_parts, make)
            attributes = {(i,): those for i, those in stored["attributes"]}
            kernels[key] = tuple(compiled_now) if compiled_now else (_make_kernel(stored["kernel"]), attributes)
        return kernels[key]

    return call
