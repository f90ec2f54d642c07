"""Calls of Triton kernels from JAX, with jax-triton before and since 0.4.

XLA launches the kernels itself if it can (`launch_triton`); otherwise they are jax-triton's calls. Calls of 0.3 are
rewritten to the form of 0.4, which XLA can record into a command buffer (a CUDA graph). For `jax.export`, disable the
check of the custom call `__gpu$xla.gpu.ptx` or `triton_kernel_call_ffi`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import triton
import triton.language as tl
from jax import Array, lax
from jax.interpreters import mlir, partial_eval
from jax.typing import DTypeLike
from jax_triton import triton_lib

from pallas_kernels.dispatch import kernel_cache_triton, launch_triton

kernel_cache_triton.install()
launch_triton.install()
IS_BEFORE_04 = "out_shape" in inspect.signature(jax_triton.triton_call).parameters
_TARGET = "triton_kernel_call_ffi"


def bitcast_bytes(x: Array, dtype: DTypeLike) -> Array:
    """Return an array of one-byte elements as another dtype of one byte; unchanged if either dtype is wider.

    If a nested function reads the bits of a transposed constant, XLA (jaxlib 0.11) returns those of the constant before
    it was transposed. XLA reshapes the constant correctly, hence the additional axis.
    """
    if max(x.dtype.itemsize, jnp.dtype(dtype).itemsize) > 1:
        return x
    return lax.squeeze(lax.bitcast_convert_type(lax.expand_dims(x, [0]), dtype), [0])


def call(
    *inputs: Any,
    kernel: Any,
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    num_programs: int,
    num_warps: int,
    compute_capability: int | None,
    aliases: dict[int, int] | None = None,
    num_stages: int = 1,
    **constexprs: Any,
) -> Sequence[Array]:
    """Return the results of a Triton kernel.

    Args:
        inputs: arrays, and integers for the parameters that are not compile-time constants.
        kernel: function under `triton.jit`; its parameters are the inputs, then the results.
        num_programs: size of the one-dimensional grid.
        compute_capability: GPU architecture, such as 90; None for that of the present GPU.
        aliases: index of an input -> index of the result that reuses its memory. These results come first.
    """
    # These are the options of jax-triton 0.3 and Triton 3.6. Triton 3.10 will round products before sums. Triton 3.9
    # writes PTX for CUDA 13.4, which XLA's assembler may not read.
    options = {"enable_fp_fusion": True, "ptx_version": 87 if (compute_capability or 0) < 100 else 88}
    version_options: dict[str, Any] = {"out_type": out_shapes, "backend_options": options}
    # Since 0.4, an aliased result has no separate parameter.
    alias_placeholders = [1] * len(aliases or {})
    if IS_BEFORE_04:
        version_options, alias_placeholders = (
            {"out_shape": out_shapes} | ({"custom_call_target_name": _TARGET} if USES_FFI_CALLS else {}),
            [],
        )
    with jax.named_scope(kernel.__name__.strip("_")):
        outputs: Sequence[Array] = jax_triton.triton_call(
            *inputs,
            *alias_placeholders,
            kernel=kernel,
            grid=(num_programs,),
            num_warps=num_warps,
            num_stages=num_stages,
            compute_capability=compute_capability,
            input_output_aliases=aliases or {},
            name=launch_triton.NAME,
            **constexprs,
            **version_options,
        )
    return outputs


def join_dtypes(dtypes: Sequence[Any]) -> str:
    """Return the names of dtypes, for messages: "float32 or bfloat16"."""
    return " or ".join(str(jnp.dtype(dtype)) for dtype in dtypes)


@triton.jit
def _add(x_ptr: tl.tensor, n: tl.tensor, unused: tl.tensor, sum_ptr: tl.tensor, SIZE: tl.constexpr) -> None:
    offsets = tl.arange(0, SIZE)
    x = tl.load(x_ptr + offsets) + n
    tl.store(x_ptr + offsets, x)
    tl.store(sum_ptr + offsets, x)


def _run_add(x: Array, compute_capability: int | None) -> Sequence[Array]:
    return call(
        x, 3, kernel=_add, out_shapes=[jax.typeof(x)] * 2, num_programs=1, num_warps=1,
        compute_capability=compute_capability, aliases={0: 0}, SIZE=x.size,
    )  # fmt: skip


def check(compute_capability: int) -> None:
    """Lower a small program with a kernel for CUDA, and on a GPU also try whether XLA can launch it.

    Raises:
        Exception: any error of the installed packages.
    """
    x = jax.ShapeDtypeStruct((32,), jnp.float32)

    def step(x: Array, _: None) -> tuple[Array, Array]:
        sums = _run_add(x, compute_capability)
        return sums[0], sums[1]

    program = jax.jit(lambda x, unread: lax.scan(step, x, length=2)[0])
    program.trace(x, x).lower(lowering_platforms=("cuda",))
    if jax.devices()[0].platform == "gpu":
        launch_triton.check_launch(_run_small_kernel)


def _run_small_kernel() -> None:
    """Run a small kernel on the first local GPU; raise JAX's error, or AssertionError for a wrong result."""
    x = jax.device_put(np.arange(32, dtype=np.float32), jax.local_devices()[0])
    for result in jax.jit(lambda x: _run_add(x, None))(x):
        np.testing.assert_array_equal(result, np.arange(32) + 3, "of a kernel that adds 3")


def _lower_call(lowering_rule: Callable[..., Any], context: Any, *operands: Any, **parameters: Any) -> Any:
    """Lower a call: to XLA's own for our kernels if possible, otherwise to jax-triton's in the form of 0.4."""
    lower = functools.partial(lowering_rule, context, *operands, **parameters)
    if parameters["name"] != launch_triton.NAME:
        return lower()
    aliases = dict(parameters["input_output_aliases"])
    results = launch_triton.call(context, operands, aliases, lower)
    return results if results is not None else _as_ffi_call(lower()) if USES_FFI_CALLS else lower()


def _as_ffi_call(results: Any) -> Any:
    """Return the results of a call of jax-triton 0.3, converted to the typed FFI convention of `_TARGET`."""
    from jax.extend.mlir import ir

    attributes = results[0].owner.attributes
    attributes["backend_config"] = ir.DictAttr.get({"opaque": attributes["backend_config"]})
    attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
    return results


def _dce_rule(used_outputs: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Return which operands a kernel call needs, and the equation; None for the equation if no result is used."""
    equation = rest[-1]
    is_needed = any(used_outputs) or bool(equation.effects) or bool(equation.params.get("has_side_effect"))
    return [is_needed] * len(equation.invars), equation if is_needed else None


# jax-triton 0.4 keeps every call, by a rule of two arguments; JAX passes three since 0.12.
_jax_triton_dce_rule = partial_eval.dce_rules.get(triton_lib.triton_kernel_call_p)
if _jax_triton_dce_rule is not None and len(inspect.signature(_jax_triton_dce_rule).parameters) == 2:
    partial_eval.dce_rules[triton_lib.triton_kernel_call_p] = _dce_rule

# jaxlib has registered this call target since 0.11; jax-triton 0.4 needs it too.
USES_FFI_CALLS = IS_BEFORE_04 and jax.__version_info__ >= (0, 11)
_target = triton_lib.get_cuda_backend if IS_BEFORE_04 else triton_lib.make_cuda_target
_original_lowering = functools.partial(triton_lib.triton_kernel_call_lowering, _target)
mlir.register_lowering(
    triton_lib.triton_kernel_call_p, functools.partial(_lower_call, _original_lowering), platform="cuda"
)
