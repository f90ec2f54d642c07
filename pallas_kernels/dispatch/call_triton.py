"""Calls of Triton kernels from JAX: the same with jax-triton before and since 0.4.

XLA launches the kernels itself where it can (`launch_triton`). Where it cannot, jax-triton's own calls stay. Since 0.4
XLA can record those, with all kernels around them, into a command buffer (a CUDA graph), which starts them without the
host. Before, it cannot, and every kernel of a program then waits for its own launch, which small layers spend more time
with than with their work. Here 0.3 makes calls as 0.4 does. (For `jax.export` all are custom calls whose check has to
be disabled, by the name `__gpu$xla.gpu.ptx` or `triton_kernel_call_ffi`.)
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
from jax_triton import triton_lib

from pallas_kernels.dispatch import kernel_cache_triton, launch_triton

kernel_cache_triton.install()
launch_triton.install()
IS_BEFORE_04 = "out_shape" in inspect.signature(jax_triton.triton_call).parameters
_TARGET = "triton_kernel_call_ffi"


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
    """Runs a kernel.

    Args:
        inputs: arrays, and integers for arguments that the kernel is not compiled for.
        kernel: function under `triton.jit`; its parameters are the inputs, then the results.
        out_shapes: shapes and dtypes.
        num_programs: their number.
        num_warps: of a program.
        compute_capability: of the GPU, as 90; None asks the one there is.
        aliases: by input the result that takes its place in memory; these are the first results.
        num_stages: of the pipelines that loops of loads and products become.
        static: what the kernel is compiled for.

    Returns:
        The results.
    """
    # As jax-triton 0.3 and Triton 3.6 do. Triton 3.10 will round products before sums; 3.9 writes PTX for an assembler
    # of its own, of CUDA 13.4, and XLA's, which gets it, may be older.
    options = {"enable_fp_fusion": True, "ptx_version": 87 if (compute_capability or 0) < 100 else 88}
    version_options: dict[str, Any] = {"out_type": out_shapes, "backend_options": options}
    # Since 0.4, a result that takes the place of an input is no parameter.
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
    """Lowers a small program with a kernel for CUDA; raises what the installed packages raise, if they do.

    On a GPU it is tried there, too, whether XLA launches such kernels.
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
    """Runs a small kernel on this process's first GPU; raises what JAX raises, and where its results are wrong."""
    x = jax.device_put(np.arange(32, dtype=np.float32), jax.local_devices()[0])
    for result in jax.jit(lambda x: _run_add(x, None))(x):
        np.testing.assert_array_equal(result, np.arange(32) + 3, "of a kernel that adds 3")


def _lower_call(lowering_rule: Callable[..., Any], context: Any, *operands: Any, **parameters: Any) -> Any:
    """A call as XLA's own where it is ours, else, or where that cannot be, as jax-triton's, made as 0.4 makes it."""
    lower = functools.partial(lowering_rule, context, *operands, **parameters)
    if parameters["name"] != launch_triton.NAME:
        return lower()
    aliases = dict(parameters["input_output_aliases"])
    results = launch_triton.call(context, operands, aliases, lower)
    return results if results is not None else _as_ffi_call(lower()) if USES_FFI_CALLS else lower()


def _as_ffi_call(results: Any) -> Any:
    """The results of a call of jax-triton 0.3 named `_TARGET`, whose convention it does not know, in that one."""
    from jax.extend.mlir import ir

    attributes = results[0].owner.attributes
    attributes["backend_config"] = ir.DictAttr.get({"opaque": attributes["backend_config"]})
    attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
    return results


def _dce_rule(used_outputs: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Which operands an equation that calls a kernel needs, and the equation; None where nobody reads its results.

    As every other equation of JAX. jax-triton 0.4 keeps all, by a rule of two arguments; since 0.12 JAX passes three.
    """
    equation = rest[-1]
    is_needed = any(used_outputs) or bool(equation.effects) or bool(equation.params.get("has_side_effect"))
    return [is_needed] * len(equation.invars), equation if is_needed else None


_jax_triton_dce_rule = partial_eval.dce_rules.get(triton_lib.triton_kernel_call_p)
if _jax_triton_dce_rule is not None and len(inspect.signature(_jax_triton_dce_rule).parameters) == 2:
    partial_eval.dce_rules[triton_lib.triton_kernel_call_p] = _dce_rule

# What answers to jax-triton's calls of this kind is in jaxlib 0.11; 0.4 needs that, too.
USES_FFI_CALLS = IS_BEFORE_04 and jax.__version_info__ >= (0, 11)
_target = triton_lib.get_cuda_backend if IS_BEFORE_04 else triton_lib.make_cuda_target
_original_lowering = functools.partial(triton_lib.triton_kernel_call_lowering, _target)
mlir.register_lowering(
    triton_lib.triton_kernel_call_p, functools.partial(_lower_call, _original_lowering), platform="cuda"
)
