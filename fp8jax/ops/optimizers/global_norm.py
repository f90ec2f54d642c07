"""The norm of many arrays together, such as all gradients."""

from collections.abc import Sequence

import jax.numpy as jnp
import optax
from jax import Array

from fp8jax.ops.dispatch.choice import capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.dispatch.partition import on_one_device, run_partitioned
from fp8jax.ops.dispatch.shard_notation import DimSharding


def global_norm(arrays: Sequence[Array], *, impl: str = "auto") -> Array:
    """The root of the sum of the squares of all elements, an fp32 scalar.

    Args:
        arrays: floating, of any shapes.
        impl: "xla" reduces each array by itself, as `optax.tree.norm`. "auto" is a kernel that reduces many arrays at
            once, if they lie on one CUDA GPU or are local ones inside `jax.shard_map`; fp32 sums have another order.
            "triton" is the same, but raises where "auto" would fall back.

    Raises:
        ValueError: `impl` is unknown, or it is "triton" and the kernel cannot run.
    """
    choice = record_choice(
        "global norm",
        choose_impl(
            impl, lambda: missing_triton("optimizers.squares_triton", fp8=False) or _unsupported_reason(arrays)
        ),
    )
    return jnp.sqrt(run(choice, impl, *arrays, kernel=_kernel, reference=_reference))


def _unsupported_reason(arrays: Sequence[Array]) -> str | None:
    from pallas_kernels.quantization.quantize_triton import PLAIN_DTYPES

    if not on_one_device():
        return "on several devices XLA reduces each array where its parts lie"
    unsupported_dtypes = {str(x.dtype) for x in arrays if x.dtype not in PLAIN_DTYPES}
    return f"it takes no {', '.join(sorted(unsupported_dtypes))}" if unsupported_dtypes else None


def _reference(*arrays: Array) -> Array:
    norm: Array = optax.tree.norm([x.astype(jnp.float32) for x in arrays], squared=True)
    return jnp.asarray(norm, jnp.float32)


def _kernel(*arrays: Array) -> Array:
    from pallas_kernels.optimizers import squares_triton

    def total(_: DimSharding, *arrays: Array) -> Array:
        return squares_triton.sum_of_squares(arrays, compute_capability=capability())

    result: Array = run_partitioned("squares", None, total, arrays, [" ".join("-" * x.ndim) for x in arrays], "")
    return result
