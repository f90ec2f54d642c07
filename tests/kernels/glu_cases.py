"""Cases for the kernels of a grouped GLU, which are compared with their references in the interpreter and on a GPU."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.ops.quantization import fused_kernels, fused_reference
from pallas_kernels.nonlinear.operations_triton import Operation
from pallas_kernels.quantization import quantize_triton

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


class Case(NamedTuple):
    """Rows of groups, and the residuals of gate and up."""

    sizes: tuple[int, ...]
    num_rows: int
    channels: int
    coding: quantize_triton.Coding | None = quantize_triton.Coding("group", E4M3, 16, scale_dtype=jnp.bfloat16)


CASES = [Case((20, 0, 129), 155, 32), Case((3, 5), 8, 16, None)]


def results(backend: Any, case: Case) -> dict[str, jax.Array]:
    """Returns the results of the three kernels, or of their references, by name, without rows in no group."""
    rng = np.random.default_rng(0)
    rows = sum(case.sizes)
    tokens = PaddedTokens.from_groups(Groups.from_sizes(jnp.asarray(case.sizes), case.num_rows), case.num_rows)
    gate_up = jnp.asarray(rng.normal(size=(case.num_rows, 2 * case.channels)), jnp.bfloat16)
    gate_up = gate_up.at[1, 2].set(jnp.nan).at[2, 3].set(jnp.inf).at[rows:].set(jnp.nan)
    gradient = jnp.asarray(rng.normal(size=(case.num_rows, case.channels)), jnp.bfloat16).at[0, 1].set(jnp.nan)
    factor, result_factor = (jnp.asarray(rng.normal(size=case.num_rows), jnp.float32) for _ in range(2))
    exact = Operation(reads_arrays=True)
    amax, _ = backend.glu_row_statistics(exact, gate_up, None, None)
    saved, codes = backend.encode_glu(exact, gate_up, 100 * factor, case.coding, E4M3)
    actual = {"amax": amax[:rows], "codes": codes[:rows]}
    if case.coding is None:
        residual, scales, operation = gate_up, None, exact
    else:
        (residual, scales), operation = (
            fused_reference.encode_glu(exact, gate_up, factor, case.coding, E4M3)[0],
            Operation(),
        )
        actual |= {"gate and up": saved[0][:rows], "scales": saved[1][:rows]}
    amax, dots = backend.glu_row_statistics(operation, residual, scales, gradient)
    pair = 1000 * factor, 100 * result_factor
    parts = backend.quantize_glu_cotangents(operation, residual, scales, gradient, tokens.rows, *pair, E5M2, E4M3)
    names = ("cotangents", "columns", "result columns")
    actual |= {"amax of cotangents": amax[:rows], "dots": dots[:rows]} | dict(zip(names, parts, strict=True))
    return actual | {"cotangents": parts[0][:rows]}


def wrong(case: Case) -> dict[str, str]:
    """Returns differences that exceed the rounding of sums and elementary functions."""
    differ: dict[str, str] = {}
    actual = results(fused_kernels, case)
    for name, expected in results(fused_reference, case).items():
        result, want = np.asarray(actual[name]), np.asarray(expected)
        a, b = result.astype(np.float32), want.astype(np.float32)
        if a.shape != b.shape or (np.isnan(a) != np.isnan(b)).any():
            differ[name] = f"shapes {a.shape}, {b.shape}, or NaN"
            continue
        if result.dtype.itemsize == 1:  # next to a tie
            differs = np.abs(result.view(np.uint8).astype(int) - want.view(np.uint8).astype(int)) > 1
        else:
            differs = np.abs(a - b) > 1e-2 * np.max(np.abs(b), where=np.isfinite(b), initial=0)
        is_unequal = (a != b) & ~np.isnan(b)
        if (differs & is_unequal).any() or (result.dtype.itemsize == 1 and np.mean(is_unequal) > 0.02):
            differ[name] = f"{np.sum(differs & is_unequal)} far, {np.mean(is_unequal):.3f} unequal"
    return differ
