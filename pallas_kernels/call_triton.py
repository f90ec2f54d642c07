"""Calls of Triton kernels from JAX: the same with jax-triton before and since 0.4.

Since 0.4 a call is one that XLA can record, with all kernels around it, into a command buffer (a CUDA graph), which
starts them without the host. Before, it is not, and splits the program: every kernel of it then waits for its own
launch, which small layers spend more time with than with their work. Here 0.3 makes calls as 0.4 does. (For
`jax.export` both are custom calls whose check has to be disabled, by the name `triton_kernel_call_ffi`.)
"""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax_triton
from jax import Array
from jax.interpreters import mlir
from jax_triton import triton_lib

OLD = "out_shape" in inspect.signature(jax_triton.triton_call).parameters
_TARGET = "triton_kernel_call_ffi"


def call(
    *inputs: Any,
    kernel: Any,
    results: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    warps: int,
    compute_capability: int | None,
    aliases: dict[int, int] | None = None,
    **static: Any,
) -> Sequence[Array]:
    """Runs a kernel.

    Args:
        inputs: arrays, and integers for arguments that the kernel is not compiled for.
        kernel: function under `triton.jit`; its parameters are the inputs, then the results.
        results: shapes and dtypes.
        programs: their number.
        warps: of a program.
        compute_capability: of the GPU, as 90; None asks the one there is.
        aliases: by input the result that takes its place in memory; these are the first results.
        static: what the kernel is compiled for.

    Returns:
        The results.
    """
    version: dict[str, Any] = {"out_type": results}
    # Since 0.4, a result that takes the place of an input is no parameter.
    spare = [1] * len(aliases or {})
    if OLD:
        version, spare = {"out_shape": results} | ({"custom_call_target_name": _TARGET} if RECORDED else {}), []
    found: Sequence[Array] = jax_triton.triton_call(
        *inputs,
        *spare,
        kernel=kernel,
        grid=(programs,),
        num_warps=warps,
        num_stages=1,
        compute_capability=compute_capability,
        input_output_aliases=aliases or {},
        **static,
        **version,
    )
    return found


def _lower(context: Any, *operands: Any, **parameters: Any) -> Any:
    """jax-triton 0.3's own lowering, but of calls named `_TARGET`, whose convention it does not know, in that one."""
    from jax.extend.mlir import ir

    results = triton_lib.triton_kernel_call_lowering(triton_lib.get_cuda_backend, context, *operands, **parameters)
    if parameters["custom_call_target_name"] == _TARGET:
        attributes = results[0].owner.attributes
        attributes["backend_config"] = ir.DictAttr.get({"opaque": attributes["backend_config"]})
        attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
    return results


# What answers to such calls is in jaxlib 0.11; 0.4 needs that, too.
RECORDED = OLD and jax.__version_info__ >= (0, 11)
if RECORDED:
    mlir.register_lowering(triton_lib.triton_kernel_call_p, _lower, platform="cuda")
