"""XLA's flags that programs here run with on a GPU: one place for benchmarks, tables and training."""

import os

# XLA's own Triton products off: its autotuner tries them for every shape, and with them on it calls cuBLASLt with
# widened operands, so that fp8jax takes its own kernels (fp8jax.ops.matmul.hopper).
RECOMMENDED = "--xla_gpu_enable_triton_gemm=false"


def recommend() -> str:
    """Adds `RECOMMENDED` to XLA_FLAGS unless this names the flag already; returns XLA_FLAGS.

    XLA reads it when JAX first asks for a device: call this before.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if RECOMMENDED.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {RECOMMENDED}".strip()
    return os.environ["XLA_FLAGS"]
