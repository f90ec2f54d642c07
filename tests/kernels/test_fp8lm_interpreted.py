"""Compares the bits of the fused kernel of fp8lm_adamw in Triton's interpreter with its reference, in its own process.

`TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python -m tests.kernels.test_fp8lm_interpreted` raises if they differ. The
reference runs operation by operation, because XLA fuses multiply-adds on CPUs.
"""

import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.core import masters, noise
from fp8jax.ops.dispatch import partition
from fp8jax.ops.optimizers import fp8lm
from fp8jax.ops.optimizers.leaf import Adam, Leaf, load, master_seed
from fp8jax.ops.optimizers.step import step_leaves
from tests.kernels.test_adamw_interpreted import subset

SHAPES = {"whole": ((64, 96), 0), "stacked": ((3, 40, 96), 1), "odd": ((3, 17, 41), 1), "vector": ((5000,), 0)}
# Shape, gradient, parameter, first moment, form, factor, and the master weight: fp16 codes, rounded to "nearest" or
# "stochastic"; "own", the parameter; or the dtype of a remainder.
CASES: list[Any] = [(shape, grad, "bfloat16", "e4m3", form, None, "nearest")
                    for shape in SHAPES for grad in ("e4m3", "float32") for form in ("step", "update")]  # fmt: skip
SHAPES["tiny"] = (4, 20, 48), 1
# In the middle, where the subset "few" has every setting.
CASES[11:11] = [
          ("stacked", "e5m2", "float32", "e5m2", "step", 0.3, "nearest"),
          ("stacked", "e4m3", "bfloat16", "e4m3", "step", None, "stochastic"),
          ("odd", "bfloat16", "float16", "e5m2", "update", 3.0, "nearest"),
          ("odd", "float16", "float32", "e4m3", "update", 0.25, "stochastic"),
          ("stacked", "e4m3", "bfloat16", "e4m3", "step", None, "int8"),
          ("odd", "float32", "bfloat16", "e5m2", "update", 0.25, "int16"),
          ("odd", "e4m3", "bfloat16", "e4m3", "step", None, "own, stochastic"),
          ("stacked", "float32", "float32", "e4m3", "update", None, "own"),
          ("vector", "e4m3", "float32", "e4m3", "step", 0.25, "own"),
          ("tiny", "float32", "bfloat16", "e4m3", "step", None, "nearest")]  # fmt: skip
# Shardings of an array (6, 8, 64) over devices (4, 2). Each device has the bits of its shard.
SHARDINGS = [("x", None, None), (None, "x", None), ("y", "x", None), (None, "y", "x"), (None, None, ("x", "y"))]
MASTERS = ["nearest", "stochastic", "int8", "own, stochastic"]
ADAM = Adam(0.9, 0.95, 1e-8, 0.0, jnp.int32(3), 0.02, 0.1)


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_interpreted_kernel_has_the_bits_of_the_reference(which):
    root = pathlib.Path(__file__).resolve().parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.kernels.test_fp8lm_interpreted", which]
    completed = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]
    count = sum(len(shardings_of(master, which)) for master in MASTERS)
    assert completed.stdout.splitlines()[-1] == f"{len(subset(CASES, which))} cases, {count} shardings"


def prepare() -> None:
    """Replaces calls of the kernel by the interpreter in this process, also under `jax.jit` and on several devices."""
    from pallas_kernels.dispatch import call_triton
    from tests.kernels import test_adamw_interpreted as interpreted
    from tests.kernels import triton_interpreter as tools

    alone = threading.Lock()  # The interpreter keeps the program id in a global; devices have threads.
    on_one_device, sequential = partition.on_one_device, jax.custom_batching.sequential_vmap
    interpreted.prepare()
    partition.on_one_device, jax.custom_batching.sequential_vmap = on_one_device, sequential

    def call(
        *args: Any, kernel: Any, out_shapes: Any, num_programs: int, aliases: dict[int, int], num_warps: int,
        compute_capability: int, **static: Any
    ) -> Any:  # fmt: skip
        arrays = [i for i, x in enumerate(args) if hasattr(x, "shape")]

        def host(*values: Any) -> list[np.ndarray]:
            arguments = list(args)
            for i, x in zip(arrays, values, strict=True):
                arguments[i] = np.array(x)
            aliased = {i: arguments[source] for source, i in aliases.items()}
            # Elements that are not written stay NaN.
            outputs = [aliased.get(i, np.full(x.shape, np.nan, x.dtype)) for i, x in enumerate(out_shapes)]
            arguments += [1] * len(aliased) + [x for i, x in enumerate(outputs) if i not in aliased]
            with alone:
                kernel[(num_programs,)](
                    *(tools.Tensor(x) if isinstance(x, np.ndarray) else x for x in arguments), **static
                )
            return outputs

        values = [args[i] for i in arrays]
        if any(isinstance(x, jax.core.Tracer) for x in values):
            return jax.pure_callback(host, out_shapes, *values)
        return [jnp.asarray(x) for x in host(*map(np.asarray, values))]

    call_triton.call = call


def leaf_of(shape: tuple[int, ...], depth: int, grad: str, weight: str, mu: str, special: bool = True) -> Leaf:
    random = np.random.default_rng(len(shape))
    w, g, m, v = (random.standard_normal(shape).astype(np.float32) for _ in range(4))
    if special:
        for x, magnitude in ((g, 10.0), (m, 1e-3), (v, 1e-2), (w, 0.1)):
            x *= magnitude * 10.0 ** random.uniform(-6, 0, shape)
        for x in (w, g, m, v):
            x.reshape(-1)[:: len(shape) + 7] = 0
        for x, place in ((g, 5), (m, 300), (w, 700)):
            x.reshape(-1)[place : place + 4] = np.nan, np.inf, -np.inf, 1e-30
        g.reshape(-1)[1000:1003] = -0.0, 1e-20, -1e-22
        # With the next scale, for large gradients, these second moments are far below the smallest code.
        g.reshape(-1)[1010:1030], v.reshape(-1)[1010:1030] = 0, 1e-13
        if shape == SHAPES["tiny"][0]:
            # Second moments of the last layer decay below fp32's smallest number, like the squares of gradients.
            g[-1], m[-1], v[-1] = g[-1] * 1e-30, m[-1] * 1e-18, v[-1] * 1e-36

    def stored(x: Any, fmt: str, flush_to_zero: bool = True) -> Any:
        spec = fp8jax.QuantSpec(fmt, "tensor", layer_axes=depth, flush_to_zero=flush_to_zero)
        return fp8lm.quantize_to_pow2_scale(jnp.asarray(x), spec)

    gradient = stored(g, grad) if grad in ("e4m3", "e5m2") else jnp.asarray(g).astype(grad)
    stored_values = stored(w, "fp16"), stored(m, mu), stored(np.abs(v), "fp16", flush_to_zero=False)
    largest = fp8lm.stack_amax(*stored_values)
    copies = w.copy()
    if special:  # changed by the caller, within and beyond the range of the next scale
        copies.reshape(-1)[20:24] = 0.3, -1e4, 2.5e4, 7e-3
    return Leaf(gradient, jnp.asarray(copies).astype(weight), *stored_values[1:], stored_values[0], largest)


def step(form: str, leaf: Leaf, adam: Adam, impl: str) -> Any:
    return step_leaves(fp8lm.FP8LM, adam, [dataclasses.replace(leaf, in_place=form == "step")], impl)[0]


def assert_equal(expected: Any, actual: Any) -> None:
    """Bit for bit, except for the payload and sign of NaN."""
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for path, a in jax.tree_util.tree_leaves_with_path(expected):
        b = dict(jax.tree_util.tree_leaves_with_path(actual))[path]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        x, y = (np.asarray(z).astype(np.float32) for z in (a, b))
        np.testing.assert_array_equal(x, y, err_msg=str(path))
        np.testing.assert_array_equal(np.signbit(x) & ~np.isnan(x), np.signbit(y) & ~np.isnan(y), err_msg=str(path))


def with_master(leaf: Leaf, master: str) -> Leaf:
    if "stochastic" in master:
        leaf = dataclasses.replace(leaf, weight_seed=master_seed(noise.step_seed(3), "w"))
    if master in ("nearest", "stochastic"):
        return leaf
    value: Any = leaf.weight
    if "int" in master:
        value = masters.split(load(leaf.master), jnp.bfloat16, master)
    return dataclasses.replace(leaf, weight=value, master=None, amax=leaf.amax[1:])


def compare(decays: bool, shape: str, grad: str, weight: str, mu: str, form: Any, factor: Any, master: str) -> None:
    leaf = with_master(dataclasses.replace(leaf_of(*SHAPES[shape], grad, weight, mu), decays=decays), master)
    adam = dataclasses.replace(ADAM, grad_scale=factor)
    expected, actual = (step(form, leaf, adam, impl) for impl in ("xla", "triton"))
    assert_equal(expected, actual)
    assert (np.asarray(actual.nu.codes)[np.asarray(leaf.nu.codes) != 0] != 0).all()
    change = form == "update" and leaf.master is None
    new = (expected.weight.high if change and "int" in master else expected.weight).astype(jnp.float32)
    finite = np.isfinite(np.asarray(new))
    assert finite.mean() > 0.99
    assert not finite.all()
    values = [jnp.zeros_like(new) if change else leaf.weight.astype(jnp.float32), new]
    if leaf.master is not None:
        values = [x.master.dequantize() for x in (leaf, expected)]
    assert np.mean(np.asarray(values[0] != values[1])[finite]) > 0.5
    if "stochastic" in master:
        nearest = step(form, dataclasses.replace(leaf, weight_seed=None), adam, "xla")
        pair = [x.weight if x.master is None else x.master.codes for x in (nearest, actual)]
        assert np.mean(np.asarray(pair[0] != pair[1])) > 0.2


def compare_gated(master: str) -> None:
    """A skipped step writes nothing. An applied one has the bits of a step without the condition."""
    leaf = with_master(leaf_of((3, 40, 96), 1, "e4m3", "bfloat16", "e4m3", special=False), master)
    unconditional, applied_step, skipped = (
        step("step", leaf, dataclasses.replace(ADAM, apply_if=applied), "triton")
        for applied in (None, jnp.array(True), jnp.array(False))
    )
    assert_equal(unconditional, applied_step)
    assert_equal(leaf.unchanged, skipped)


def compare_large(grad: str, master: str) -> None:
    """Finite gradients whose squares overflow never become NaN. NaN and Inf of the gradient remain."""
    leaf = leaf_of((3, 40, 96), 1, "float32", "bfloat16", "e4m3", special=False)
    x = np.array(leaf.grad)
    x[0, 3, 5:9], x[1], x[2, 1, 2:4] = (3e19, -1e30, 2.9e38, 1e25), 2e38, (np.nan, np.inf)
    value: Any = jnp.asarray(x)
    if grad == "e5m2":
        spec = dataclasses.replace(leaf.mu.spec, format=grad)
        value = fp8lm.quantize_to_pow2_scale(jnp.asarray(x), spec)
    leaf = with_master(dataclasses.replace(leaf, grad=value), master)
    for factor in (None, 1e10) if master == "int8" else (0.25, 1e-30):
        adam = dataclasses.replace(ADAM, grad_scale=factor)
        expected, actual = (step("step", leaf, adam, impl) for impl in ("xla", "triton"))
        assert_equal(expected, actual)
        bad = np.zeros(x.shape, bool)
        bad[2, 1, 2:4] = True
        new = actual.weight.high if master == "int8" else actual.weight
        np.testing.assert_array_equal(np.isfinite(np.asarray(new, np.float32)), ~bad)
        for q in (actual.mu, actual.nu):
            assert not np.isnan(np.asarray(q.dequantize())[~bad]).any()


def shardings_of(master: str, which: str) -> list[Any]:
    if master == "nearest":
        return SHARDINGS if which == "all" else SHARDINGS[2:4]
    return SHARDINGS[:2] if which == "all" else SHARDINGS[:1] if master == "own, stochastic" else SHARDINGS[1:2]


def compare_sharded(master: str, which: str) -> None:
    """On Explicit axes of a mesh, each device updates its shard; amaxes are compared."""
    leaf = with_master(leaf_of((8, 8, 64), 1, "e4m3", "bfloat16", "e4m3", special=False), master)
    with jax.disable_jit():
        expected = step("step", leaf, ADAM, "triton")
    for axes in shardings_of(master, which):
        # A callback, here the interpreter, works only in programs that JAX lowers, not in those that XLA partitions.
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

        def place(x: Any, mesh: Any = mesh, axes: Any = axes) -> Any:
            if x.ndim < 3:
                return jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
            lead = x.ndim - 3
            axis_names = [axis if n in (8, 64) else None for axis, n in zip(axes, x.shape[lead:], strict=True)]
            return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*[None] * lead, *axis_names)))

        run = jax.jit(lambda leaf: step("step", leaf, ADAM, "triton"))
        with jax.set_mesh(mesh):
            actual = run(jax.tree.map(place, leaf))
            assert len(actual.mu.codes.sharding.device_set) == 8
            assert {x.sharding.spec for x in jax.tree.leaves((actual.weight, actual.mu.codes))} == {jax.P(*axes)}
            assert_equal(expected, actual)


def main() -> None:
    prepare()
    with jax.disable_jit():
        for i, case in enumerate(subset(CASES, sys.argv[1])):
            try:
                # One of every two neighbouring cases has weight decay, with each form of the other settings.
                compare(bool((i ^ i >> 1) & 1), *case)
            except Exception as error:
                raise AssertionError(f"case {case}") from error
        for master in ("nearest", "int8"):
            compare_gated(master)
            compare_large("float32" if master == "int8" else "e5m2", master)
    for master in MASTERS:
        compare_sharded(master, sys.argv[1])
    count = sum(len(shardings_of(master, sys.argv[1])) for master in MASTERS)
    print(f"{len(subset(CASES, sys.argv[1]))} cases, {count} shardings")


if __name__ == "__main__":
    main()
