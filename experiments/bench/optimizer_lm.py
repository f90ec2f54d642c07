"""The arms of FP8-LM's optimizer in the benchmark of the optimizer's step: `fp8lm_adamw` by its kernel and by XLA.

Gradients are e4m3 codes, as a reduction in 8 bits leaves them, and working copies bf16: 16 bytes a parameter. A second
case has bf16 gradients: 18 bytes. Largest magnitudes of gradients are found first.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

import fp8jax
from experiments.bench import optimizer_arms, timing
from pallas_kernels.dispatch import call_triton

# Read: gradient, twice, master weight, working copy, both moments. Written: these but for the gradient.
TRAFFIC = {name: 2 * size + 2 * (2 + 2 + 1 + 2) for name, size in (("fp8 gradients", 1), ("bf16 gradients", 2))}
# What XLA stores it reads once more, for the largest magnitudes.
READ_AGAIN = 2 + 1 + 2
FUSED, XLA = "fp8lm_adamw step", "fp8lm_adamw step, XLA"


@triton.jit
def _move(
    grad_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    master_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    nu_ptr: tl.tensor,
    spare1: tl.tensor,
    spare2: tl.tensor,
    spare3: tl.tensor,
    spare4: tl.tensor,
    SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Reads and writes what a step with gradients in FP8 does, with next to no arithmetic."""
    base = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.max_contiguous(tl.arange(0, SIZE), VECTOR)
    g, master = tl.load(grad_ptr + base + at).to(tl.float32), tl.load(master_ptr + base + at)
    mu, nu = tl.load(mu_ptr + base + at), tl.load(nu_ptr + base + at)
    new = tl.fma(g, 1e-4, master.to(tl.float32))
    tl.store(weight_ptr + base + at, new.to(weight_ptr.dtype.element_ty))
    tl.store(master_ptr + base + at, new.to(tl.float16))
    tl.store(mu_ptr + base + at, (mu.to(tl.float32) + g).to(mu_ptr.dtype.element_ty))
    tl.store(nu_ptr + base + at, (nu.to(tl.float32) + g).to(tl.float16))


def move(size: int, warps: int, state: Any, grads: Any) -> Any:
    """One step of `_move` on every (weight, master weight, first moment, second moment)."""

    def leaf(g: jax.Array, row: tuple) -> tuple:
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in row]
        return tuple(
            call_triton.call(
                g,
                *row,
                kernel=_move,
                out_shapes=outputs,
                num_programs=g.size // size,
                num_warps=warps,
                compute_capability=None,
                aliases={i + 1: i for i in range(4)},
                SIZE=size,
                VECTOR=8,
            )
        )

    return [leaf(g, row) for g, row in zip(grads, state, strict=True)]


def gradients(bench: optimizer_arms.Bench, kind: str) -> list[Any]:
    """Gradients of a case, as arrays or codes."""
    tree = bench.gradients(jnp.bfloat16)
    return [fp8jax.quantize(g, "e4m3") for g in tree] if kind == "fp8 gradients" else tree


def arms(bench: optimizer_arms.Bench, kind: str) -> list[optimizer_arms.OptimizerArm]:
    """`fp8lm_adamw` as the fused kernel and as XLA compiles it, each donating its own state."""
    return [_arm(bench, kind, *how) for how in (("triton", "nearest"), ("xla", "nearest"))]


def _arm(bench: optimizer_arms.Bench, kind: str, impl: str, rounding: str) -> optimizer_arms.OptimizerArm:
    tx = fp8jax.fp8lm_adamw(
        optimizer_arms.RATE,
        optimizer_arms.B1,
        optimizer_arms.B2,
        weight_decay=optimizer_arms.DECAY,
        impl=impl,
        master_rounding=rounding,
    )
    p, g = optimizer_arms.weights(bench.shape, jnp.bfloat16), gradients(bench, kind)
    state = tx.init(p)

    def run(params: Any, state: Any, grads: Any) -> Any:
        return tx.step(grads, state, params)

    compiled = timing.traced(run, p, state, g, donate_argnums=(0, 1))

    def step(carry: Any, grads: Any) -> Any:
        return compiled(*carry, grads)

    memory = compiled.memory_analysis()
    assert memory is not None
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    name = XLA if impl == "xla" else FUSED
    name += ", master weights rounded stochastically" if rounding == "stochastic" else ""
    traffic = TRAFFIC[kind] + (READ_AGAIN if impl == "xla" else 0)
    return optimizer_arms.OptimizerArm(
        name, optimizer_arms.State((p, state)).through(step, g), traffic, (memory.temp_size_in_bytes, size)
    )


def bytes_only(bench: optimizer_arms.Bench) -> dict[str, Callable]:
    """Launches of the kernel that only moves the bytes of a step with gradients in FP8; they share their state."""
    shape = bench.shape
    state = optimizer_arms.State(
        [
            (w, w.astype(jnp.float16), jnp.zeros(shape, jnp.float8_e4m3fn), jnp.zeros(shape, jnp.float16))
            for w in optimizer_arms.weights(shape, jnp.bfloat16)
        ]
    )
    g = [x.codes for x in gradients(bench, "fp8 gradients")]
    programs = {}
    for size, warps in optimizer_arms.LAUNCHES:

        def step(state: Any, grads: Any, size: int = size, warps: int = warps) -> Any:
            return move(size, warps, state, grads)

        programs[str((size, warps))] = state.through(timing.traced(step, state.value, g, donate_argnums=0), g)
    return programs
