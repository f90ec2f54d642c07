"""Checks how the fused AdamW kernel decodes every code of an 8-bit format by its table. Import it only with Triton."""

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from fp8jax.core import expansion, formats
from pallas_kernels.dispatch import call_triton
from pallas_kernels.optimizers import adamw_tiles_triton as tiles
from pallas_kernels.optimizers import adamw_triton
from pallas_kernels.quantization import codec_triton as codec

BITS = {"e4m3": (4, 3), "e5m2": (5, 2)}
SCALES, EXPONENTS, FACTOR = (1.0, 3e-7, 5e-12, 0.7), (1.0, 0.25, 3.0, 16.0), 1.5


@triton.jit
def _decode(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    exponent_ptr: tl.tensor,
    table_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    result_ptr: tl.tensor,
    STORAGE: tl.constexpr,
) -> None:
    group = tl.arange(0, 4)
    offsets = (
        codec.broadcast_groups(group) * 256 + tl.arange(0, 2)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    )
    codes = tl.load(codes_ptr + offsets)
    scale, exponent = tl.load(scale_ptr + group), tl.load(exponent_ptr + group)
    logarithms = tiles.look_up_codes(codes, table_ptr)
    decoded = codec.decode_from_log2(logarithms, scale, exponent, tl.load(factor_ptr), STORAGE)
    tl.store(result_ptr + offsets, decoded)


def magnitudes(name: str) -> np.ndarray:
    """Returns the magnitudes of a format's 256 codes in float64, from their bits."""
    exponent_bits, mantissa_bits = BITS[name]
    results = []
    for byte in range(256):
        exponent = (byte & 0x7F) >> mantissa_bits
        mantissa = (byte & (2**mantissa_bits - 1)) / 2**mantissa_bits
        bias = 2 ** (exponent_bits - 1) - 1
        if name == "e5m2" and exponent == 31:
            results.append(np.nan if mantissa else np.inf)
        elif name == "e4m3" and byte & 0x7F == 0x7F:
            results.append(np.nan)
        else:
            results.append((mantissa + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias))
    return np.asarray(results)


def check_every_code(name: str) -> None:
    """Runs `_decode` on every code with several scales and exponents, and compares with float64."""
    fmt, expected = formats.get(name), magnitudes(name)
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(SCALES), 1)).view(fmt.dtype)
    storage = adamw_triton.Storage(
        fmt.max, (fmt.expansion_range, expansion.MIN_EXPONENT, expansion.MAX_EXPONENT), is_signed=False
    )
    (actual,) = call_triton.call(
        jnp.asarray(codes),
        jnp.asarray(SCALES, jnp.float32),
        jnp.asarray(EXPONENTS, jnp.bfloat16),
        jnp.asarray(adamw_triton.log2_code_magnitudes(fmt.dtype)),
        jnp.asarray([FACTOR], jnp.float32),
        kernel=_decode,
        out_shapes=[jax.ShapeDtypeStruct(codes.shape, jnp.float32)],
        num_programs=1,
        num_warps=1,
        compute_capability=None,
        aliases={},
        STORAGE=storage.constants,
    )
    scale, exponent = (np.asarray(x)[:, None] for x in (SCALES, EXPONENTS))
    expected = FACTOR * scale * fmt.max * (expected / fmt.max) ** (1 / exponent)
    assert np.isfinite(expected).sum() == 4 * {"e4m3": 254, "e5m2": 248}[name]
    np.testing.assert_array_equal(np.asarray(actual)[:, [0, 128]], 0)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=2e-5, atol=float(np.finfo(np.float32).tiny))
