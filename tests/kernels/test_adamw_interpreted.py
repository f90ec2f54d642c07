"""Compares the fused AdamW kernel in Triton's interpreter with its reference, in its own process.

`TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python -m tests.kernels.test_adamw_interpreted` raises if they differ.
"""

import collections
import dataclasses
import functools
import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.core import masters, noise
from fp8jax.ops.dispatch import partition
from fp8jax.ops.optimizers import adamw
from tests.kernels import adamw_cases
from tests.kernels.adamw_cases import ADAM, special, stored
from tests.rows import slow

SHAPES = {"whole": (20, 256), "short groups": (12, 200), "unaligned": (13, 131), "partial tile": (21, 128)}
CASES = [("whole", *m, *f) for m in (("e4m3", "e4m3", True), ("e5m2", "e5m2", True), ("e4m3", "e4m3", False),
                                     ("e4m3", "bf16", True), ("fp32", "e4m3", True))
         for f in (("step", "bfloat16", "float32"), ("update", "float32", "bfloat16"))]  # fmt: skip
CASES += [(shape, "e4m3", "e4m3", True, "step", "bfloat16", "float32") for shape in SHAPES if shape != "whole"]
CASES += [(shape, "e4m3", "e4m3", True, "stochastic", "bfloat16", "bfloat16") for shape in SHAPES]
EPS = [(1e-8, 0.0), (1e-3, 0.0), (1e-12, 0.0), (1e-8, 1e-9)]
CASES += [("whole", mu, "e4m3", True, "step", grad, "bfloat16", *eps)
          for mu, grad in (("e4m3", "bfloat16"), ("e5m2", "float32")) for eps in EPS]  # fmt: skip
# Gradient factors, for fast and general tiles. The last one is so small that no tile is fast.
CASES += [("whole", "e4m3", "e4m3", True, "step", "float32", weight, 1e-8, 0.0, factor)
          for weight, factor in (("bfloat16", 0.25), ("float32", 0.25), ("bfloat16", 2.0**-40))]  # fmt: skip
# Clipped directions: fast tiles, with the small eps and another, and general tiles; gated and not.
CASES += [("whole", "e4m3", "e4m3", True, form, "float32", weight, eps, 0.0, factor, 0.1)
          for form, weight, eps, factor in (("step", "bfloat16", 1e-8, 0.25), ("step", "bfloat16", 1e-3, 0.25),
                                            ("step", "float32", 1e-8, 0.25), ("update", "float32", 1e-8, None),
                                            ("update", "bfloat16", 1e-8, None))]  # fmt: skip
CASES += [(shape, "e4m3", nu, True, form, "bfloat16", "bfloat16", 1e-8, 0.0, None, 0.1)
          for shape, nu, form in (("short groups", "e4m3", "update"), ("unaligned", "e4m3", "step"),
                                  ("whole", "fp32", "update"))]  # fmt: skip
CASES.append(("whole", "e4m3", "e4m3", True, "stochastic", "bfloat16", "bfloat16", 1e-8, 0.0, None, 1.0))
FP32_GRADIENTS = ("whole", "e4m3", "e4m3", True, "stochastic", "float32", "bfloat16")
# Second moments with stochastic rounding: shape, format, range expansion, form, dtype of the weights.
NOISY = [("whole", "e4m3", False, "update", "bfloat16"), ("whole", "e4m3", True, "step", "bfloat16"),
         ("whole", "e5m2", True, "step", "bfloat16"), ("whole", "e5m2", False, "update", "float32"),
         ("whole", "e4m3", True, "update", "float32"), ("short groups", "e4m3", True, "step", "float32"),
         ("unaligned", "e4m3", True, "update", "float32"),
         ("partial tile", "e5m2", True, "step", "float32")]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_interpreted_kernel_equals_the_reference_on_special_groups(which):
    root = pathlib.Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.kernels.test_adamw_interpreted", which]
    completed = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert completed.stdout.splitlines()[-1] == f"{len(subset(CASES, which)) + len(subset(NOISY, which))} cases"


def subset(cases: Sequence[Any], which: str) -> list[Any]:
    """Returns all cases, a third of them, or as many as contain every setting.

    Each next case has the rarest settings.
    """
    if which == "all":
        return list(cases)
    settings = {case: set(enumerate(case)) for case in cases}
    recorded, chosen = collections.Counter[Any](), list[Any]()
    while len(chosen) < len(cases) // 3 or not set().union(*settings.values()) <= recorded.keys():
        remaining = [case for case in cases if case not in chosen]
        chosen.append(max(remaining, key=lambda case: sum(1 / (1 + recorded[x]) ** 2 for x in settings[case])))
        recorded.update(settings[chosen[-1]])
    return chosen


def marked(cases: Sequence[Any]) -> list[Any]:
    """Returns all cases as arguments of a test; those that are not in the subset are slow."""
    fast_cases = subset(cases, "few")
    return [case if case in fast_cases else slow(case) for case in cases]


def prepare() -> None:
    """Replaces calls of the kernel by the interpreter in this process."""
    import triton.language as tl

    from pallas_kernels.dispatch import call_triton
    from tests.kernels import triton_interpreter as tools

    tools.patch_once()
    tools.NAMES |= {np.dtype(ml_dtypes.bfloat16): tl.bfloat16, np.dtype(np.int16): tl.int16}

    def call(
        *args: Any, kernel: Any, out_shapes: Any, num_programs: int, aliases: dict[int, int], num_warps: int,
        compute_capability: int, **static: Any
    ) -> Any:  # fmt: skip
        arguments = [np.array(x) if hasattr(x, "shape") else x for x in args]
        aliased = {i: arguments[source] for source, i in aliases.items()}
        outputs = [aliased.get(i, np.zeros(x.shape, x.dtype)) for i, x in enumerate(out_shapes)]
        arguments += [1] * len(aliased) + [x for i, x in enumerate(outputs) if i not in aliased]
        kernel[(num_programs,)](*(tools.Tensor(x) if isinstance(x, np.ndarray) else x for x in arguments), **static)
        return [jnp.asarray(x) for x in outputs]

    jax.lax.platform_dependent = lambda *args, cuda, default=None: cuda(*args)
    tools.arithmetic()
    call_triton.call, call_triton.check = call, lambda _: None
    adamw._vmap_as_leading_axis = lambda local: local
    jax.custom_batching.sequential_vmap, partition.on_one_device = (lambda function: function), lambda: True


def compare(
    decays: bool, shape: str, mu: str, nu: str, expand: bool, form: str, grad: str, weight: str, *settings: Any
) -> None:
    from tests.kernels.test_adamw_gpu import EXACT, check_equal

    stochastic = form == "stochastic"
    if stochastic:
        values = [np.random.default_rng(seed).standard_normal(SHAPES[shape]).astype(np.float32) for seed in range(3)]
        values[1][0, 0], values[1][1, 1] = np.nan, np.inf
        values.append(values[1].copy())
        values[1][10] *= 1e30  # such a long direction that a weight overflows
        values[2][10] *= 1e-16
        values[3][5, 7], values[3][9, 100], values[3][9, 9] = -np.inf, np.nan, np.inf
    else:
        values = [special(SHAPES[shape], seed) for seed in range(3)]
    leaf = (
        jnp.asarray(values[0] * 0.1).astype(grad),
        stored(values[1], mu, 128, expand),
        stored(values[2] ** 2, nu, 128, expand, "nu"),
        jnp.asarray(values[3] if stochastic else np.nan_to_num(values[1] * 0.1)).astype(weight),
    )
    options = {"key": jax.random.key(7)} if stochastic else {}
    form = "step" if stochastic else form
    adam = dataclasses.replace(
        ADAM, **dict(zip(("eps", "eps_root", "grad_scale", "max_direction"), settings, strict=False))
    )
    run = functools.partial(getattr(adamw_cases, form), adam=adam, decays=decays, **options)
    expected = jax.jit(functools.partial(run, impl="xla"), compiler_options=EXACT)(*leaf)
    actual = run(*leaf, impl="triton")
    if not stochastic:
        check_equal(expected, actual, leaf, adam)
        return
    others = (leaf[3], leaf[3].astype(jnp.float32))
    nearest, exact = (adamw_cases.step(*leaf[:3], w, adam, decays=decays, impl="xla") for w in others)
    a, b, c, x = (np.asarray(r[0]).astype(np.float32) for r in (expected, actual, nearest, exact))
    finite = np.isfinite(a)
    assert not finite.all()
    # An infinite weight that does not decay stays infinite in the reference. The kernel multiplies it by a decay of 0.
    np.testing.assert_array_equal(finite, np.isfinite(b))
    assert np.all((a == b) | (np.isnan(b) & ~np.isfinite(leaf[3])) | (np.isnan(a) & np.isnan(b)) | finite)
    assert np.mean((a != b)[finite]) < 1e-3
    # One of two bf16 numbers around x; the probability of the farther one is the distance of the nearer one.
    fraction = (x.view(np.uint32) & 0xFFFF)[finite] / 2**16
    farther, differ = np.minimum(fraction, 1 - fraction).sum(), np.sum((a != c)[finite])
    assert abs(differ - farther) < 4 * farther**0.5, (differ, farther)


def compare_noise(shape: str, nu: str, expand: bool, form: str, weight: str) -> None:
    """With a stochastically rounded second moment, codes equal the reference's except for a few; other results are
    equal."""
    adam = dataclasses.replace(ADAM, b2=0.9)
    values = [special(SHAPES[shape], seed) for seed in range(3)]
    leaf = (
        jnp.asarray(values[0] * 0.1),
        stored(values[1], "e4m3"),
        stored(values[2] ** 2, nu, 128, expand, "nu"),
        jnp.asarray(np.nan_to_num(values[1] * 0.1)).astype(weight),
    )
    if expand and form == "update":
        # Exponents from an earlier step, which groups keep if their range still fits.
        start = adamw_cases.update(*leaf, adam, impl="xla", stochastic_nu=True)[2]
        leaf = (*leaf[:2], start, leaf[3])
    run = functools.partial(getattr(adamw_cases, form), *leaf, adam)
    want, actual = run(impl="xla", stochastic_nu=True), run(impl="triton", stochastic_nu=True)
    nearest = run(impl="triton")
    for x, y in ((actual[0], nearest[0]), (actual[1].codes, nearest[1].codes)):
        np.testing.assert_array_equal(*(np.asarray(a).view(np.uint8) for a in (x, y)))
    actual[2].validate()
    a, b, c = (np.asarray(x[2].codes).astype(np.float32) for x in (want, actual, nearest))
    # The sign of NaN has no meaning: XLA's on a GPU has one.
    for predicate in (np.isnan, np.isinf, lambda x: x == 0, lambda x: np.signbit(x) & ~np.isnan(x)):
        np.testing.assert_array_equal(predicate(a), predicate(b))
    has_same_exponent = np.ones(want[2].scale.shape, bool)
    if expand:
        has_same_exponent = np.asarray(want[2].expansion == actual[2].expansion)
        assert np.sum(~has_same_exponent) <= 1 + 5e-3 * has_same_exponent.size
    is_compared = np.repeat(has_same_exponent, 128, -1)[..., : a.shape[-1]] & ~np.isnan(a)
    # Probabilities agree within about 0.001: that fraction of codes differs, plus three standard deviations.
    differ, expected = np.sum((a != b)[is_compared]), 1.5e-3 * np.sum(is_compared)
    assert differ <= expected + 3 * np.sqrt(expected), (differ, expected)
    # If all of an unexpanded group decays at the same rate, its codes do not change.
    assert np.mean((b != c)[is_compared]) > (0.1 if expand else 0.005)
    ulps = np.abs(np.asarray(want[2].codes).view(np.int8).astype(int) - np.asarray(actual[2].codes).view(np.int8))
    assert ulps[is_compared].max() <= 1


def compare_noise_of_bf16(shape: str, expand: bool, form: str) -> None:
    """A stochastically rounded bf16 second moment and a first moment in codes.

    Noise depends on positions in full groups.
    """
    values = [special(SHAPES[shape], seed) for seed in range(3)]
    leaf = (jnp.asarray(values[0] * 0.1), stored(values[1], "e4m3", 128, expand), stored(values[2] ** 2, "bf16"))
    adam = dataclasses.replace(ADAM, b2=0.9)
    run = functools.partial(getattr(adamw_cases, form), *leaf, jnp.asarray(np.nan_to_num(values[1])), adam)
    expected, actual = run(impl="xla", stochastic_nu=True), run(impl="triton", stochastic_nu=True)
    nearest = run(impl="triton")
    for x, y in zip(jax.tree.leaves((actual[0], actual[1])), jax.tree.leaves((nearest[0], nearest[1])), strict=True):
        np.testing.assert_array_equal(*(np.asarray(a).view(np.uint8) for a in (x, y)))
    a, b, c = (np.asarray(x[2]).astype(np.float32) for x in (expected, actual, nearest))
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    is_compared = np.isfinite(a)
    assert np.mean((a != b)[is_compared]) < 1e-3
    np.testing.assert_allclose(a[is_compared], b[is_compared], rtol=2.0**-7, atol=1e-37)
    assert np.mean((b != c)[is_compared]) > 0.2


def compare_shards() -> None:
    """A shard of columns of some rows gets the codes of the full array, given its offset."""
    from pallas_kernels.optimizers import adamw_triton

    values = np.random.default_rng(0).standard_normal((2, 6, 512)).astype(np.float32)
    leaf = (jnp.asarray(values), stored(values, "e4m3"), stored(values**2, "e4m3", moment="nu"), jnp.asarray(values))
    full = adamw_cases.step(*leaf, ADAM, impl="triton", stochastic_nu=True)
    shard, groups = np.s_[1:, 2:4, 256:], np.s_[1:, 2:4, 2:]
    storages = [adamw._kernel_storage(leaf[i], i == 1, i == 2) for i in (1, 2)]
    words = np.asarray(noise.step_seed(ADAM.count)).copy()
    words[0] += np.uint32((1 * 6 * 4 + 2 * 4 + 2) * 16 * noise.STRIDE % 2**32)
    moments = [
        tuple(jnp.asarray(np.asarray(x)[at]) for x, at in ((q.codes, shard), (q.scale, groups), (q.expansion, groups)))
        for q in leaf[1:3]
    ]
    scalars = adamw_triton.AdamWScalars(1e-3, 0.1, 0.9, 0.1, 0.999, 0.001, 1 - 0.9**3, 1 - 0.999**3, 1e-8, 0.0)
    _, _, nu = adamw_triton.adamw(
        leaf[0][shard], leaf[3][shard], *moments, scalars, mu_storage=storages[0], nu_storage=storages[1],
        group_size=128, dead_elements=adamw.dead_element_params(),
        in_place=True, nu_seed=words, salt=noise.param_seed(""), run=(2, 4),
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(nu[0]).view(np.uint8), np.asarray(full[2].codes)[shard].view(np.uint8))


def compare_gated(weight: str) -> None:
    """A skipped step writes nothing. An applied one has the noise of a step without the condition, clipped or not."""
    values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    leaf = (jnp.asarray(values), stored(values, "e4m3"), stored(values**2, "e4m3", moment="nu"),
            jnp.asarray(values).astype(weight))  # fmt: skip
    run = functools.partial(adamw_cases.step, *leaf, impl="triton", stochastic_nu=True)
    unconditional, applied_step, skipped = (
        jax.tree.leaves(run(dataclasses.replace(ADAM, apply_if=applied))) for applied in (None, True, False)
    )
    before = jax.tree.leaves((leaf[3], *leaf[1:3]))
    unconditional, applied_step, skipped, before = (
        [np.asarray(x).tobytes() for x in leaves] for leaves in (unconditional, applied_step, skipped, before)
    )
    assert unconditional == applied_step
    assert skipped == before
    assert all(unconditional[i] != before[i] for i in (0, 4))  # the weight, codes of the second moment
    for applied in (None, True):
        shorter = jax.tree.leaves(run(dataclasses.replace(ADAM, apply_if=applied, max_direction=0.1)))
        assert [np.asarray(x).tobytes() for x in shorter[1:]] == unconditional[1:]
        assert np.asarray(shorter[0]).tobytes() != unconditional[0]


def compare_members(weight: str, eps_root: float = 0.0) -> None:
    """Groups with dead elements, some in fast tiles, are stored like the reference's."""
    from tests.kernels.test_adamw_gpu import check_equal

    random = np.random.default_rng(0)
    g, m, w = (random.standard_normal((64, 256)).astype(np.float32) for _ in range(3))
    v = 1 + random.random((64, 256), np.float32)
    m[:, ::5] *= 1e-5  # dead m, and zero next time
    g[:, ::5] *= 1e-4
    for columns, size in ((np.s_[1::8], 0.9), (np.s_[2::8], 0.2), (np.s_[3::8], 0.05), (np.s_[4::8], 1e-6)):
        rows = np.s_[16:32, columns]
        g[rows], m[rows], v[rows] = 0, 0, v[rows] * size  # dead v, of all magnitudes
    g[24:32] *= 1e-6  # the other gradients are 0 too
    g[32:48, 5::8], m[32:48, 5::8] = 0, m[32:48, 5::8] * 1e-9  # dead v, with first moments that are not zero
    g[48:, 6::8], m[48:, 6::8] = 0, 3 * np.geomspace(1 / 80, 1 / 20, 32)  # near the threshold of dead m
    v[32:] *= 0.01 + random.random((32, 256), np.float32)
    leaf = (jnp.asarray(g), stored(m, "e4m3"), stored(v, "e4m3", moment="nu"), jnp.asarray(w).astype(weight))
    adam = dataclasses.replace(ADAM, b2=0.95, eps_root=eps_root)
    expected, actual = (adamw_cases.step(*leaf, adam, impl=impl) for impl in ("xla", "triton"))
    check_equal(expected, actual, leaf, adam)
    before, after = (np.asarray(x.dequantize()) for x in (leaf[2], actual[2]))
    assert np.all(np.asarray(actual[1].codes).astype(np.float32)[:24, ::5] == 0)
    assert np.all(after[16:32, 3::8] > before[16:32, 3::8] * 0.99)


def compare_magnitudes(weight: str) -> None:
    """Tiles of equal groups, with all magnitudes that moments can have: the general path begins at the
    right magnitude."""
    from tests.kernels.test_adamw_gpu import check_equal

    powers = np.arange(-119, 120, 4)
    high = powers[powers > 0]
    pairs = [(powers, 0 * powers), (0 * powers, powers - 32), (high // 2, high), (high, high[::-1])]
    of_m, of_v = (np.repeat(np.concatenate(x), 8)[:, None] for x in zip(*pairs, strict=True))
    of_g = np.maximum(np.minimum(of_m, of_v / 2) - 3, -116)  # XLA flushes smaller, subnormal products to zero
    random = np.random.default_rng(0)
    sign, sizes = random.standard_normal((of_m.size, 128)), random.uniform(1 / 16, 1, (3, of_m.size, 128))
    with np.errstate(over="ignore"):
        g, m, v = (
            (np.copysign(x, sign) * 2.0**at).astype(np.float32) for x, at in zip(sizes, (of_g, of_m, of_v), strict=True)
        )
    w = jnp.ones(g.shape, weight)
    leaf = (jnp.asarray(g), stored(m, "e4m3"), stored(np.abs(v), "e4m3", moment="nu"), w)
    expected, actual = (adamw_cases.step(*leaf, ADAM, impl=impl) for impl in ("xla", "triton"))
    check_equal(expected, actual, leaf, ADAM)


def compare_slow(weight: str) -> None:
    """Expanded first moments that decay slowly are rounded with dither, in fast tiles too."""
    from tests.kernels.test_adamw_gpu import check_equal

    g, m, v, w = (special((16, 256), seed) for seed in range(4))
    leaf = (jnp.asarray(g), stored(m, "e4m3"), stored(v**2, "e4m3", moment="nu"), jnp.asarray(w).astype(weight))
    adam = dataclasses.replace(ADAM, b1=0.99, b2=0.995)
    expected, actual, other = (
        adamw_cases.step(*leaf, dataclasses.replace(adam, count=jnp.int32(count)), impl=impl)
        for count, impl in ((3, "xla"), (3, "triton"), (40, "triton"))
    )
    check_equal(expected, actual, leaf, adam)
    assert np.mean(np.asarray(actual[1].codes) != np.asarray(other[1].codes)) > 0.1


def compare_parts(remainder: str) -> None:
    """Split master weights have the same results as fp32 ones, bit for bit if both take the general path."""
    random = np.random.default_rng(0)
    for shape, exact in (((12, 200), True), ((20, 256), False)):
        g, m, w = (
            special(shape, seed) if exact else random.standard_normal(shape).astype(np.float32) for seed in range(3)
        )
        w = w * 10.0 ** random.uniform(-30, 2, shape).astype(np.float32)
        w[0, :3], w[1, 1] = (np.inf, -np.inf, 0.0), np.nan
        weight = masters.split(jnp.asarray(w), jnp.bfloat16, jnp.dtype(remainder))
        rest = (jnp.asarray(g * 0.1), stored(m, "e4m3"), stored(m**2, "e4m3", moment="nu"))
        value = masters.join(weight.high, weight.remainder)
        want, result = (adamw_cases.step(*rest, x, ADAM, impl="triton") for x in (value, weight))
        for other in ("xla", "triton"):
            adam = dataclasses.replace(ADAM, apply_if=jnp.bool_(False))
            skipped = jax.tree.leaves(adamw_cases.step(*rest, weight, adam, impl=other))
            for a, b in zip(skipped, jax.tree.leaves((weight, *rest[1:])), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        actual = np.asarray(masters.join(result[0].high, result[0].remainder))
        if exact:
            expected = masters.split(want[0], jnp.bfloat16, jnp.dtype(remainder))
            np.testing.assert_array_equal(result[0].remainder, expected.remainder)
            np.testing.assert_array_equal(np.asarray(result[0].high, np.float32), np.asarray(expected.high, np.float32))
            for a, b in zip(jax.tree.leaves(want[1:]), jax.tree.leaves(result[1:]), strict=True):
                np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        split_again = masters.split(jnp.asarray(actual), jnp.bfloat16, jnp.dtype(remainder))
        np.testing.assert_array_equal(split_again.remainder, result[0].remainder)
        rtol = 2.0**-15 if remainder == "int8" else 2.0**-22
        np.testing.assert_allclose(actual, want[0], rtol=rtol, atol=2e-5 * ADAM.rate)
        changes = adamw_cases.update(*rest, weight, ADAM, impl="triton")[0]
        updated_high = (weight.high.astype(jnp.float32) + changes.high).astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(updated_high, np.float32), np.asarray(result[0].high, np.float32))


def check_largest(form: str, weight: str) -> None:
    """No direction exceeds the maximum except by rounding; many reach it, in fast and in general tiles."""
    max_direction, rate = 2.0**-3, 2.0**-4
    adam = dataclasses.replace(ADAM, rate=rate, weight_decay=0.0, max_direction=max_direction)
    values = np.random.default_rng(0).standard_normal((4, 16, 256)).astype(np.float32)
    values[0, 9:] = values[2, 9:, ::100] = 0  # no fast tiles
    leaf = (jnp.asarray(values[0]), stored(values[1], "e4m3"), stored(values[2] ** 2, "e4m3", moment="nu"))
    w = jnp.zeros(values[3].shape, weight)
    changes = {impl: np.asarray(getattr(adamw_cases, form)(*leaf, w, adam, impl=impl)[0]) for impl in ("xla", "triton")}
    for changed in changes.values():
        lengths = np.abs(changed.astype(np.float64)) / rate
        assert lengths.max() <= max_direction * (1 + 2.0**-20)
        for rows in (lengths[:9], lengths[9:]):
            assert 0.2 < np.mean(rows > 0.999 * max_direction) < 0.95


def compare_large(weight: str) -> None:
    """Finite gradients whose squares overflow never become NaN. NaN and Inf of the gradient or factor remain."""
    from tests.kernels.test_adamw_gpu import check_equal

    values = np.random.default_rng(0).standard_normal((4, 20, 256)).astype(np.float32)
    sizes = (3e19, -1e30, 3.4e38, 1e25)
    for row, size in enumerate(sizes):
        values[0, row, 5:8] = size
    values[0, len(sizes), ::2] = 2e38
    values[0, len(sizes) + 1, 3:6] = np.inf, -np.inf, np.nan
    bad = np.zeros(values[0].shape, bool)
    bad[len(sizes) + 1, 3:6] = True
    leaf = (jnp.asarray(values[0]), stored(values[1], "e4m3"), stored(values[2] ** 2, "e4m3", moment="nu"),
            jnp.asarray(values[3]).astype(weight))  # fmt: skip
    for factor in (None, 0.25, 1e10, 1e-30, np.inf, np.nan):
        adam = dataclasses.replace(ADAM, grad_scale=factor)
        expected, actual = (adamw_cases.step(*leaf, adam, impl=impl) for impl in ("xla", "triton"))
        finite = np.isfinite(np.asarray(actual[0], np.float32))
        if factor is None or np.isfinite(factor):
            np.testing.assert_array_equal(finite, ~bad)
            scaled = values[0].astype(np.float64) * (factor or 1.0)
            clipped_gradient = np.where(bad, values[0], np.clip(scaled, -(2.0**62), 2.0**62)).astype(np.float32)
            check_equal(
                expected, actual, (jnp.asarray(clipped_gradient), *leaf[1:]), dataclasses.replace(adam, grad_scale=None)
            )
        else:
            assert not finite.any()
            assert not np.isfinite(np.asarray(expected[0], np.float32)).any()


def main() -> None:
    prepare()
    from tests.kernels.adamw_codes import BITS, check_every_code

    for name in BITS:
        check_every_code(name)
    which = sys.argv[1]
    for i, case in enumerate(subset(CASES, which)):
        try:
            compare(i % 2 == 0, *case)
        except Exception as error:
            raise AssertionError(f"case {case}") from error
    for case in subset(NOISY, which):
        try:
            compare_noise(*case)
        except Exception as error:
            raise AssertionError(f"case {case}") from error
    compare(True, *FP32_GRADIENTS)
    for shape, expand, form in (("whole", True, "step"), ("short groups", False, "update")):
        compare_noise_of_bf16(shape, expand, form)
    compare_shards()
    for remainder in masters.REMAINDER_DTYPES:
        compare_parts(remainder)
    checks = (
        compare_gated, compare_members, functools.partial(compare_members, eps_root=10.0), compare_slow,
        compare_magnitudes, compare_large, functools.partial(check_largest, "step"),
        functools.partial(check_largest, "update"),
    )  # fmt: skip
    for i, (check, weight) in enumerate(itertools.product(checks, ("bfloat16", "float32"))):
        # One of the two dtypes for each check, alternating.
        if which == "all" or (i ^ i >> 1) & 1:
            check(weight)
    print(f"{len(subset(CASES, which)) + len(subset(NOISY, which))} cases")


if __name__ == "__main__":
    main()
