"""What the choice between a kernel and XLA rests on: the device, and how arrays lie on it."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax
from jax import Array, lax

from fp8jax.ops.dispatch import trace_cache


@dataclasses.dataclass(frozen=True)
class Choice:
    """What computes an operation.

    Attributes:
        impl: "xla", or the language of the kernel, "mosaic" or "triton".
        reason: why.
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
    """Says what computes an operation of the program that is being traced, to whoever listens; returns the choice."""
    if (records := _choices.get()) is not None:
        records.append((operation, choice))
    return choice


def record_choices() -> contextlib.AbstractContextManager[list[tuple[str, Choice]]]:
    """Within it, a list of the operations that are traced and of what computes each, in their order.

    A function that JAX has traced before, and does not trace again, says nothing.
    """
    return _recording(_choices)


def record_residual(description: str) -> None:
    """Says what a layer of the program that is being traced saves for its backward pass, to whoever listens."""
    if (records := _residuals.get()) is not None and description not in records:
        records.append(description)


def record_residuals() -> contextlib.AbstractContextManager[list[str]]:
    """Within it, a list of what the layers that are traced save for their backward passes, each kind once."""
    return _recording(_residuals)


def summary(recorded: Iterable[tuple[str, Choice]]) -> list[str]:
    """A line for each operation, what computes it and why.

    Without numbers: JAX traces some functions several times, such as the body of a loop. How often what runs is read
    from the compiled program (`fp8jax.modules.compiled`).
    """
    return [f"{name} by {c.impl}: {c.reason}" for name, c in dict.fromkeys(recorded)]


class Target(NamedTuple):
    """What programs are traced for; see `target`."""

    capability: int | None = None
    kernels: bool = True
    free_multiprocessors: int = 0


# JAX traces a function anew where it has another value.
_target: Any = jax.make_user_context(Target())


@contextlib.contextmanager
def target(
    *, capability: int | None = None, kernels: bool | None = None, free_multiprocessors: int | None = None
) -> Iterator[Target]:
    """Within it programs are traced for another GPU than the one that JAX finds here, or in another way.

    What is not given stays as it is around it.

    Args:
        capability: compute capability of the CUDA GPU that a program is compiled for ahead of time, as 80 for an A100.
        kernels: False traces programs for XLA alone, as if neither jax-triton nor Pallas were there.
        free_multiprocessors: how many of the GPU's multiprocessors Mosaic kernels leave to others, such as collectives
            that run at the same time. Those are persistent: else they take all, and NCCL waits for their end.

    Raises:
        ValueError: a number is out of range.
    """
    if capability is not None and not 50 <= capability < 1000:
        raise ValueError(f"capability is 80 for an A100 and 90 for an H200, not {capability!r}")
    if free_multiprocessors is not None and not 0 <= free_multiprocessors <= 64:
        raise ValueError(f"free_multiprocessors lies in [0, 64], not {free_multiprocessors!r}")
    settings = {"capability": capability, "kernels": kernels, "free_multiprocessors": free_multiprocessors}
    new = _target.value._replace(**{name: value for name, value in settings.items() if value is not None})
    with _target(new):
        yield new


def current_target() -> Target:
    """What programs are traced for here."""
    target: Target = _target.value
    return target


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def product_name_scope(a: Any, b: Any) -> Any:
    """A context in which a product is named by what it multiplies, for `fp8jax.modules.compiled` to read.

    Args:
        a, b: arrays, or tensors with a `spec`; where neither has one the product has no name.
    """
    if not (hasattr(a, "spec") or hasattr(b, "spec")):
        return contextlib.nullcontext()
    left, right = (x.spec.format if hasattr(x, "spec") else _SHORT.get(str(x.dtype), str(x.dtype)) for x in (a, b))
    return jax.named_scope(f"fp8jax:{left}*{right}")


def on_cuda() -> bool:
    """Whether programs run on CUDA GPUs, as `target` says, or JAX's backend."""
    return current_target().capability is not None or jax.default_backend() in ("cuda", "gpu")


def capability() -> int:
    """Compute capability of the GPU, as 90, or what `target` says; without either that of Hopper."""
    return current_target().capability or _detect_capability()


@functools.cache
def _detect_capability() -> int:
    device = jax.devices()[0]
    version = str(getattr(device, "compute_capability", "9.0")) if device.platform == "gpu" else "9.0"
    digits = version.replace(".", "")
    return int(digits) if digits.isdigit() else 0


def varying_axes(arrays: Any) -> frozenset[str]:
    """The mesh axes over which a `jax.shard_map` knows any array of a tree to vary."""
    axes: frozenset[str] = frozenset()
    for kind in map(jax.typeof, jax.tree.leaves(arrays)):
        manual = getattr(kind, "manual_axis_type", None)
        axes |= frozenset((getattr(kind, "vma", None) if manual is None else manual.varying) or ())
    return axes


def match_varying_axes(*arrays: Array | None) -> tuple[Array | None, ...]:
    """Arrays as values that vary over the same mesh axes, where a `jax.shard_map` checks that; gradients are summed.

    Operations of JAX do so by themselves, differentiation rules of our own do not: in data-parallel training weights do
    not vary over devices, their gradients on each do.
    """
    return cast_varying_like(arrays, *arrays)


def cast_varying_like(results: Any, *arguments: Any) -> Any:
    """A tree of arrays, each as one that varies over the mesh axes that any of the arguments varies over."""
    return cast_varying_over(results, varying_axes(arguments))


def cast_varying_over(results: Any, axes: Collection[str]) -> Any:
    """A tree of arrays, each as one that varies over these mesh axes."""

    def cast(x: Array) -> Array:
        missing = set(axes) - varying_axes(x)
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, results)


def mark_varying(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a device's own arrays, each of whose results may depend on all of them.

    The results of a kernel do not say over which mesh axes they vary; here it is those of any argument.
    """
    return lambda *args: cast_varying_like(function(*args), *args)


IMPLS = ("auto", "xla", "triton")


def check_impl(impl: str, impls: tuple[str, ...] = IMPLS) -> None:
    """Raises ValueError for an unknown `impl`."""
    if impl not in impls:
        raise ValueError(f"unknown impl {impl!r}; it is one of {', '.join(impls)}")


def choose_impl(impl: str, unsupported_reason: Callable[[], str | None], kernel: str = "the kernel") -> Choice:
    """What computes an operation for which there is a Triton kernel.

    Args:
        impl: "auto", "xla" or "triton".
        unsupported_reason: says why the kernel cannot take the operands, or None; not asked where programs run on no
            CUDA GPU, unless `impl` is "triton".
        kernel: what the kernel is called.

    Raises:
        ValueError: `impl` is unknown; or it is "triton", and the kernel cannot run.
    """
    check_impl(impl)
    if impl == "xla":
        return Choice("xla", "asked for")
    reason = unsupported_reason() if impl == "triton" or on_cuda() else "it needs a CUDA GPU"
    if reason is None:
        return Choice("triton", f"{kernel} takes it")
    if impl == "triton":
        raise ValueError(f"impl 'triton' cannot run: {reason}")
    return Choice("xla", f"not {kernel}: {reason}")


def by_platform(
    *args: Any, cuda: Callable[..., Any], default: Callable[..., Any], hide_explicit_axes: bool = False
) -> Any:
    """`cuda(*args)`, a kernel, where the program runs on a CUDA GPU, and elsewhere its reference, `default(*args)`.

    With `hide_explicit_axes` the reference knows nothing of Explicit axes. Both are traced once for all calls that are
    alike, as those of a model's blocks are.
    """
    return trace_cache.call_traced_once(functools.partial(_by_platform, cuda, default, hide_explicit_axes), *args)


def _by_platform(cuda: Callable[..., Any], default: Callable[..., Any], hide_explicit_axes: bool, *args: Any) -> Any:
    kernel = mark_varying(cuda)
    return lax.platform_dependent(
        *args, cuda=kernel, default=reshard_like(kernel, mark_varying(default), args, hide_explicit_axes)
    )


def run(choice: Choice, impl: str, *args: Any, kernel: Callable[..., Any], reference: Callable[..., Any]) -> Any:
    """The result of what was chosen: of a kernel that `impl` asked for wherever the program runs, else by platform."""
    if choice.impl == "xla":
        return reference(*args)
    return by_platform(*args, cuda=kernel, default=reference) if impl == "auto" else mark_varying(kernel)(*args)


def reshard_like(
    kernel: Callable[..., Any], reference: Callable[..., Any], args: Any, hide_explicit_axes: bool = False
) -> Callable[..., Any]:
    """The reference with results placed as the kernel's: on Explicit axes types say how results lie."""
    axes = [name for x in jax.tree.leaves(args) for name in jax.typeof(x).sharding.mesh.explicit_axes]
    if not axes:
        return reference
    closed, results = jax.make_jaxpr(kernel, return_shape=True)(*args)
    shardings = [kind.sharding for kind in closed.out_avals]
    if hide_explicit_axes:
        out = jax.tree.unflatten(jax.tree.structure(results), shardings)
        return jax.sharding.auto_axes(reference, axes=tuple(dict.fromkeys(axes)), out_sharding=out)  # type: ignore[no-any-return]

    def reshard_to(x: Array, sharding: Any) -> Array:
        return x if jax.typeof(x).sharding == sharding else jax.sharding.reshard(x, sharding)

    def resharded_reference(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(reference(*args))
        return jax.tree.unflatten(structure, map(reshard_to, leaves, shardings))

    return resharded_reference


TRITON_CAPABILITY = 75  # of kernels that convert no FP8


def missing_triton(kernel: str, *, fp8: bool = True) -> str | None:
    """Why a Triton kernel, a module of pallas_kernels, cannot run with the installed packages and GPU, or None.

    Args:
        kernel: its name in pallas_kernels, as "quantization.quantize_triton".
        fp8: whether it makes or reads FP8 codes, which GPUs convert from Ada (8.9) on. Kernels of int8 codes and of
            bytes run on Turing and Ampere (7.5 and 8.x), too.

    Raises:
        ValueError: the environment variable FP8JAX_KERNEL_CALLS has an unknown value.
    """
    return _missing_triton(kernel, capability(), fp8) if current_target().kernels else "kernels are switched off"


@functools.cache
def _missing_triton(kernel: str, capability: int, fp8: bool) -> str | None:
    if capability < TRITON_CAPABILITY:
        return f"the GPU has compute capability {capability}, and Triton's kernels need {TRITON_CAPABILITY}"
    try:
        module = importlib.import_module(f"pallas_kernels.{kernel}")
    except Exception as error:  # A broken installation fails to import in ways of its own.
        return f"jax-triton cannot be imported ({type(error).__name__}: {error})"
    if fp8 and capability < module.FP8_CAPABILITY:
        return f"the GPU has compute capability {capability}, and fp8 conversions need {module.FP8_CAPABILITY}"
    return _broken_triton(capability)


@functools.cache
def _broken_triton(capability: int) -> str | None:
    """Why the installed packages compile no Triton kernel, or None: seen from a small one, in a thread of its own.

    There nothing is known of the trace, mesh and settings around, nor of who listens to the choices.
    """
    from pallas_kernels.dispatch import call_triton, launch_triton

    launch_triton.get_launcher()  # raises for an unknown value of its variable, which no package is to blame for
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        error = pool.submit(call_triton.check, capability).exception()
    if error is None:
        return None
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax-triton", "triton", "jax"))
    return f"{versions} do not work together ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
