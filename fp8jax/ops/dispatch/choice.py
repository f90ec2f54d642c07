"""Choice between a kernel and XLA: compilation target, recorded choices, calls by platform, and missing kernels.

A model calls the same operations in each block. JAX's cache compares functions by identity, so equal closures and
partial functions would be traced again for each block. `call_traced_once` compares them by content.

Without Triton kernels XLA quantizes. Two parts of a recipe are then slower than 16 bits:

- 8-bit contexts (`Recipe.context`) cost a pass to quantize and one to decode. Norms and activations of models therefore
  stay as written, and layers quantize their inputs (`keeps_nonlinear_unchanged`). `fp8jax.rms_norm`, `glu` and the like
  follow the recipe.
- 8-bit optimizer states (`Recipe.optimizer`) stay in 8 bits, because they save memory.

The rest is equally fast: products with scales per tensor use cuBLASLt.
"""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.metadata
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from importlib.machinery import PathFinder
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType

from fp8jax.core import frames


class _FunctionByContent:
    """A function that is hashed and compared by its content."""

    def __init__(self, function: Callable[..., Any], content: Hashable) -> None:
        self.function, self._content = function, content

    def __hash__(self) -> int:
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FunctionByContent) and self._content == other._content


def call_traced_once(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, with the trace of an earlier call of an equal function on arrays of equal types.

    Functions are equal if their code, closures, bound arguments and defaults are. The trace is also lowered once, and
    compiled once on one CPU device. Functions that close over arrays or unhashable objects are traced each time.
    Outside of a trace the function is called directly.

    Args:
        function: function of arrays. JAX's cache accounts for its context, such as a mesh and
            `fp8jax.ops.dispatch.choice.target`.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
        return function(*args)
    try:
        content = _content(function)
        hash(content)
    except TypeError:
        return function(*args)
    call = _call_compiled_once if compiles_calls_once() else _call_inlined
    return call(_FunctionByContent(function, content), *args)


def _call(key: _FunctionByContent, *args: Any) -> Any:
    return key.function(*args)


# For functions that are called many times in a program. JAX before 0.11 has no such option.
XLA_LATE: Any = jax.Inline.XLA_LATE if hasattr(jax, "Inline") else False
_call_inlined = jax.jit(_call, static_argnums=0)
_call_compiled_once = jax.jit(_call, static_argnums=0, inline=XLA_LATE)


def compiles_calls_once() -> bool:
    """Return whether a jitted function with `inline=XLA_LATE` suits the traced program: on one CPU device.

    XLA on a CPU never inlines such calls, and compiles the function once. On a GPU, the calls would separate operations
    that XLA fuses. XLA does not shard functions that it has not inlined.
    """
    if on_cuda() or jax.default_backend() != "cpu":
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return all(size == 1 or kind == AxisType.Manual for size, kind in kinds)


def clear_trace_cache() -> None:
    """Clear all traces, for tests that replace what a function calls."""
    for jitted in (_call_inlined, _call_compiled_once):
        jitted.clear_cache()  # type: ignore[attr-defined]


_HASHABLE_TYPES = {bool, int, float, str, type(None), type}


def _content(x: Any) -> Hashable:
    """Return a hashable key of a function or of a value in its closure; raise TypeError if there is none."""
    if type(x) in _HASHABLE_TYPES:
        return type(x), x
    if isinstance(x, (jax.Array, jax.core.Tracer, np.ndarray)):
        raise TypeError("the content of a traced array is not known")
    if isinstance(x, functools.partial):
        return "partial", _content(x.func), _content(x.args), _content(tuple(sorted(x.keywords.items())))
    if isinstance(x, types.FunctionType) and (x.__closure__ or x.__defaults__ or x.__kwdefaults__):
        closure = tuple(cell.cell_contents for cell in x.__closure__ or ())
        defaults = x.__defaults__ or (), tuple(sorted((x.__kwdefaults__ or {}).items()))
        return x.__code__, _content(closure), _content(defaults)
    if type(x) is tuple:
        return tuple(_content(item) for item in x)
    return type(x), x


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation of an operation.

    Attributes:
        impl: "xla", or the kernel's language, "mosaic" or "triton".
    """

    impl: Literal["xla", "mosaic", "triton"]
    reason: str


_RecordsVar = contextvars.ContextVar[list[Any] | None]
_choices: _RecordsVar = contextvars.ContextVar("choices", default=None)
_residuals: _RecordsVar = contextvars.ContextVar("residuals", default=None)


@contextlib.contextmanager
def _recording(records_var: _RecordsVar) -> Iterator[list[Any]]:
    records: list[Any] = []
    token = records_var.set(records)
    try:
        yield records
    finally:
        records_var.reset(token)


def record_choice(operation: str, choice: Choice) -> Choice:
    """Add an operation's choice to the active `record_choices`, and return it."""
    if (records := _choices.get()) is not None:
        records.append((operation, choice))
    return choice


def record_choices() -> contextlib.AbstractContextManager[list[tuple[str, Choice]]]:
    """Return a context manager that yields the list of traced operations and their choices, in order.

    A function that JAX traced before and finds in its cache is not recorded again.
    """
    return _recording(_choices)


def record_residual(description: str) -> None:
    """Add the description of a saved residual to the active `record_residuals`."""
    if (records := _residuals.get()) is not None and description not in records:
        records.append(description)


def record_residuals() -> contextlib.AbstractContextManager[list[str]]:
    """Return a context manager that yields the list of residuals that traced layers save, each kind once."""
    return _recording(_residuals)


def summary(recorded: Iterable[tuple[str, Choice]]) -> list[str]:
    """Return a line per operation: its implementation and the reason.

    Counts are omitted, because JAX traces some functions several times. `fp8jax.modules.compiled` counts what runs.
    """
    return [f"{name} by {c.impl}: {c.reason}" for name, c in dict.fromkeys(recorded)]


class Target(NamedTuple):
    """The device that programs are traced for; see `target`."""

    capability: int | None = None
    kernels: bool = True
    free_multiprocessors: int = 0


# A part of JAX's trace cache key.
_target: Any = jax.make_user_context(Target())


@contextlib.contextmanager
def target(
    *, capability: int | None = None, kernels: bool | None = None, free_multiprocessors: int | None = None
) -> Iterator[Target]:
    """Return a context in which programs are traced for another GPU, or without kernels. None keeps the current value.

    Args:
        capability: compute capability of the CUDA GPU that a program is compiled for ahead of time, such as 80.
        kernels: False traces for XLA alone, as if jax-triton and Pallas were not installed.
        free_multiprocessors: number of multiprocessors that persistent Mosaic kernels leave free. Otherwise concurrent
            collectives (NCCL) wait for the end of the kernel.

    Raises:
        ValueError: a number is out of range.
    """
    if capability is not None and not 50 <= capability < 1000:
        raise ValueError(f"unknown capability; use 80 for an A100 or 90 for an H200, got {capability!r}")
    if free_multiprocessors is not None and not 0 <= free_multiprocessors <= 64:
        raise ValueError(f"free_multiprocessors must be in [0, 64], got {free_multiprocessors!r}")
    settings = {"capability": capability, "kernels": kernels, "free_multiprocessors": free_multiprocessors}
    new = _target.value._replace(**{name: value for name, value in settings.items() if value is not None})
    with _target(new):
        yield new


def current_target() -> Target:
    """Return the device that programs are traced for."""
    return _target.value


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def product_name_scope(a: Any, b: Any) -> Any:
    """Return a name scope with the specs of a product's operands, which `fp8jax.modules.compiled` reads.

    Args:
        a, b: arrays, or tensors with a `spec`. If neither has one, the scope is empty.
    """
    if not (hasattr(a, "spec") or hasattr(b, "spec")):
        return contextlib.nullcontext()
    left, right = (x.spec.format if hasattr(x, "spec") else _SHORT.get(str(x.dtype), str(x.dtype)) for x in (a, b))
    return jax.named_scope(f"fp8jax:{left}*{right}")


def on_cuda() -> bool:
    """Return whether programs run on CUDA GPUs, by `target` or JAX's backend."""
    return current_target().capability is not None or jax.default_backend() in ("cuda", "gpu")


def capability() -> int:
    """Return the compute capability of the target or GPU, such as 90. The default is Hopper's."""
    return current_target().capability or _detect_capability()


@functools.cache
def _detect_capability() -> int:
    device = jax.devices()[0]
    version = str(getattr(device, "compute_capability", "9.0")) if device.platform == "gpu" else "9.0"
    digits = version.replace(".", "")
    return int(digits) if digits.isdigit() else 0


def varying_axes(arrays: Any) -> frozenset[str]:
    """Return the mesh axes over which any array of a tree varies inside `jax.shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)))


def match_varying_axes(*arrays: Array | None) -> tuple[Array | None, ...]:
    """Return the arrays cast to vary over the same mesh axes of a `jax.shard_map`. Gradients are summed over them.

    JAX's operations do this implicitly, custom rules must do it. In data-parallel training weights do not vary over
    devices, but their gradients do.
    """
    return cast_varying_like(arrays, *arrays)


def cast_varying_like(results: Any, *arguments: Any) -> Any:
    """Cast a tree of arrays to vary over the mesh axes of any of the arguments."""
    return cast_varying_over(results, varying_axes(arguments))


def cast_varying_over(results: Any, axes: Collection[str]) -> Any:
    """Cast a tree of arrays to vary over these mesh axes."""

    def cast(x: Array) -> Array:
        missing = set(axes) - varying_axes(x)
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, results)


def mark_varying(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with results that vary over the mesh axes of any argument.

    Results of a kernel do not have this type.
    """
    return lambda *args: cast_varying_like(function(*args), *args)


IMPLS = ("auto", "xla", "triton")


def check_impl(impl: str, impls: tuple[str, ...] = IMPLS) -> None:
    """Raise ValueError for an unknown `impl`."""
    if impl not in impls:
        raise ValueError(f"unknown impl {impl!r}; use one of {', '.join(impls)}")


def choose_impl(impl: str, unsupported_reason: Callable[[], str | None], kernel: str = "the kernel") -> Choice:
    """Return the implementation of an operation that has a Triton kernel.

    Args:
        unsupported_reason: returns why the kernel cannot run, or None. Not called without a CUDA GPU, unless `impl` is
            "triton".

    Raises:
        ValueError: `impl` is unknown, or it is "triton" and the kernel cannot run.
    """
    check_impl(impl)
    if impl == "xla":
        return Choice("xla", "asked for")
    reason = unsupported_reason() if impl == "triton" or on_cuda() else "it needs a CUDA GPU"
    if reason is None:
        return Choice("triton", f"{kernel} supports it")
    if impl == "triton":
        raise ValueError(f"impl 'triton' cannot run: {reason}")
    return Choice("xla", f"not {kernel}: {reason}")


def by_platform(
    *args: Any, cuda: Callable[..., Any], default: Callable[..., Any], hide_explicit_axes: bool = False
) -> Any:
    """Return `cuda(*args)`, a kernel, if the program runs on a CUDA GPU, else its reference, `default(*args)`.

    Both are traced once for equal calls, such as those of a model's blocks. With `hide_explicit_axes` the reference
    sees no Explicit axes.
    """
    return call_traced_once(functools.partial(_by_platform, cuda, default, hide_explicit_axes), *args)


def _by_platform(cuda: Callable[..., Any], default: Callable[..., Any], hide_explicit_axes: bool, *args: Any) -> Any:
    kernel = mark_varying(cuda)
    return lax.platform_dependent(
        *args, cuda=kernel, default=reshard_like(kernel, mark_varying(default), args, hide_explicit_axes)
    )


def run(choice: Choice, impl: str, *args: Any, kernel: Callable[..., Any], reference: Callable[..., Any]) -> Any:
    """Run the chosen implementation. A kernel is selected by platform, or always if `impl` requests it."""
    if choice.impl == "xla":
        return call_traced_once(reference, *args)
    return by_platform(*args, cuda=kernel, default=reference) if impl == "auto" else mark_varying(kernel)(*args)


def reshard_like(
    kernel: Callable[..., Any], reference: Callable[..., Any], args: Any, hide_explicit_axes: bool = False
) -> Callable[..., Any]:
    """Return the reference with results sharded like the kernel's, since shardings on Explicit axes are types."""
    axes = [name for x in jax.tree.leaves(args) for name in jax.typeof(x).sharding.mesh.explicit_axes]
    if not axes:
        return reference
    closed, results = jax.make_jaxpr(kernel, return_shape=True)(*args)
    shardings = [kind.sharding for kind in closed.out_avals]
    if hide_explicit_axes:
        out = jax.tree.unflatten(jax.tree.structure(results), shardings)
        return jax.sharding.auto_axes(reference, axes=tuple(dict.fromkeys(axes)), out_sharding=out)

    def reshard_to(x: Array, sharding: Any) -> Array:
        return x if jax.typeof(x).sharding == sharding else jax.sharding.reshard(x, sharding)

    def resharded_reference(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(reference(*args))
        return jax.tree.unflatten(structure, map(reshard_to, leaves, shardings))

    return resharded_reference


TRITON_CAPABILITY = 75  # for kernels without FP8 conversions


def missing_triton(kernel: str, *, fp8: bool = True) -> str | None:
    """Return why a Triton kernel cannot run with the installed packages and GPU, or None.

    Args:
        kernel: module in pallas_kernels, such as "quantization.quantize_triton".
        fp8: whether it reads or writes FP8 codes, which needs Ada (8.9). Others run from Turing (7.5) on.

    Raises:
        ValueError: the environment variable FP8JAX_KERNEL_CALLS has an unknown value.
        ModuleNotFoundError: there is no such module in pallas_kernels.
    """
    return _missing_triton(kernel, capability(), fp8) if current_target().kernels else "kernels are switched off"


@functools.cache
def _missing_triton(kernel: str, capability: int, fp8: bool) -> str | None:
    if capability < TRITON_CAPABILITY:
        return f"the GPU has compute capability {capability}, and Triton's kernels need {TRITON_CAPABILITY}"
    package, _, name = f"pallas_kernels.{kernel}".rpartition(".")
    if PathFinder.find_spec(f"{package}.{name}", importlib.import_module(package).__path__) is None:
        # XLA must not take over silently for a misspelt name.
        raise ModuleNotFoundError(f"there is no kernel {package}.{name}", name=f"{package}.{name}")
    try:
        module = importlib.import_module(f"{package}.{name}")
    except Exception as error:  # a broken installation may raise anything
        return f"jax-triton cannot be imported ({type(error).__name__}: {error})"
    if fp8 and capability < module.FP8_CAPABILITY:
        return f"the GPU has compute capability {capability}, and fp8 conversions need {module.FP8_CAPABILITY}"
    return _broken_triton(capability)


@functools.cache
def _broken_triton(capability: int) -> str | None:
    """Return why the installed packages cannot compile a small Triton kernel, or None.

    It compiles in a new thread, without the caller's trace, mesh, settings and records.
    """
    from pallas_kernels.dispatch import call_triton, launch_triton

    launch_triton.get_launcher()  # an unknown value is the user's error
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        error = pool.submit(call_triton.check, capability).exception()
    if error is None:
        return None
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax-triton", "triton", "jax"))
    return f"{versions} do not work together ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"


# The bounds of pyproject.toml, which explains why Python 3.11 needs another Triton.
REQUIREMENTS = ("jax-triton>=0.3.1,<0.5", *(["triton>=3.6,<3.7"] if sys.version_info < (3, 12) else []))


class MissingKernelsWarning(UserWarning):
    """Warns that no Triton kernel of fp8jax runs on this GPU, so XLA is used, which is slower."""


def missing_kernels_reason() -> str | None:
    """Return why Triton kernels cannot run in programs traced here, or None if they can or the device needs none.

    Raises:
        ValueError: the environment variable FP8JAX_KERNEL_CALLS has an unknown value.
    """
    return missing_triton("dispatch.call_triton", fp8=False) if on_cuda() else None


def keeps_nonlinear_unchanged() -> bool:
    """Return whether norms and activations of models stay as written, under any context."""
    return missing_kernels_reason() is not None


def missing_kernels_advice() -> str | None:
    """Return why no kernels run here and the command to install them, or None if they run or are disabled."""
    if not current_target().kernels or (reason := missing_kernels_reason()) is None:
        return None
    packages = " ".join(f'"{requirement}"' for requirement in REQUIREMENTS)
    # Packages do not help if the GPU is too old.
    remedy = f". Run: pip install {packages}" if capability() >= TRITON_CAPABILITY else ""
    return (
        f"the Triton kernels of fp8jax cannot run on this GPU, because {reason}. Steps may be slower than in bf16: "
        f"XLA computes all codes, norms and activations are not fused, and 8-bit optimizer states cost time{remedy}"
    )


def warn_if_kernels_missing() -> None:
    """Warn, at the caller's line outside of libraries, if no kernel runs on an NVIDIA GPU."""
    if (message := missing_kernels_advice()) is not None and capability() != 0:
        frames.warn(message, MissingKernelsWarning)
