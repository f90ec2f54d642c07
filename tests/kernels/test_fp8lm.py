"""The fused kernel of fp8lm_adamw without a GPU: when it is chosen, and its compilation for an H200."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax.ops.dispatch import choice
from tests.kernels import h200
from tests.programs import triton_calls

triton = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
# Whether gradients are codes, dtype of the parameter, settings of the master weight, columns; maximum of registers. If
# rows do not begin at whole words, Triton 3.9 needs 253 of them, without spills.
CONFIGURATIONS = {
    "codes": (True, "bfloat16", {}, 4096, 128),
    "fp32 gradients": (False, "float32", {}, 4096, 128),
    "stochastic": (True, "bfloat16", {"master_rounding": "stochastic"}, 4096, 128),
    "unaligned": (True, "bfloat16", {}, 4095, 255),
    "24 bits": (True, "bfloat16", {"master": "bf16+int8"}, 4096, 96),
    "32 bits": (False, "bfloat16", {"master": "bf16+int16"}, 4096, 104),
    "bf16, stochastic": (True, "bfloat16", {"master": "bf16+stochastic"}, 4096, 96),
}


def arguments(codes=True, dtype="bfloat16", columns=4096):
    """Returns abstract parameters, one of them too small for codes, and gradients as from an 8-bit reduction."""
    params = {"w": jax.ShapeDtypeStruct((2, 1023, columns), dtype), "b": jax.ShapeDtypeStruct((128,), dtype)}
    spec = fp8jax.QuantSpec("e4m3", layer_axes=1)
    whole = jax.eval_shape(lambda x: fp8jax.quantize(x, spec), params["w"]) if codes else params["w"]
    return params, {"w": whole, "b": params["b"]}


def optimizer(**settings):
    return fp8jax.fp8lm_adamw(1e-3, weight_decay=0.1, layer_axes={"w": 1, "b": 0}, **settings)


@triton
def test_what_computes_a_step_is_told_and_an_explicit_kernel_does_not_run_on_cpu():
    params, grads = arguments(columns=64)
    state = jax.eval_shape(optimizer().init, params)

    def choose(grads=grads, **settings):
        with choice.record_choices() as choices:
            jax.jit(optimizer(**settings).step).trace(grads, state, params)
        assert {name for name, _ in choices} == {"fp8lm_adamw"}
        (how,) = [how for _, how in choices if how.reason != "no moment is quantized"]  # that of the bias
        return how

    assert choose().reason == "not the fused kernel: it needs a CUDA GPU"
    assert choose(impl="xla").reason == "asked for"
    wide = {"w": jax.ShapeDtypeStruct((2, 1023, 64), jnp.float64), "b": grads["b"]}
    with choice.target(capability=90):
        assert choose().impl == "triton"
        with pytest.raises(ValueError, match="gradient has dtype float64"), jax.enable_x64(True):
            choose(wide, impl="triton")
        text = jax.jit(optimizer().step).trace(grads, state, params).lower(lowering_platforms=("cuda",)).as_text()
    assert triton_calls(text) == 1
    with pytest.raises(ValueError, match="unknown impl 'mosaic'"):
        optimizer(impl="mosaic")
    with pytest.raises((NotImplementedError, ValueError), match="platform"):
        jax.jit(optimizer(impl="triton").step).lower(grads, state, params)


def assembled():
    """Prints registers, spilled bytes and bytes of shared memory of each configuration."""
    results = {}
    for name, (codes, dtype, settings, columns, _) in CONFIGURATIONS.items():
        params, grads = arguments(codes, dtype, columns)
        tx = optimizer(impl="triton", **settings)
        with choice.target(capability=90):
            results[name] = h200.assembled(tx.step, grads, jax.eval_shape(tx.init, params), params)
    print(json.dumps(results))


def memory(form, codes, *masters):
    """Prints bytes of temporaries and of the state, and numbers of kernels and copies, for each master, for an H200."""
    print(json.dumps([of_master(form, codes, master) for master in masters]))


def of_master(form, codes, master):
    params, grads = arguments(codes)
    tx = optimizer(impl="triton", master=master)
    tx = fp8jax.with_clipping(1.0, tx) if form == "step" else tx
    state = jax.eval_shape(tx.init, params)
    step = lambda grads, state, params, ok: tx.step(grads, state, params, apply_if=ok)  # noqa: E731
    run, donated = (step, (1, 2)) if form == "step" else (tx.update, (1,))
    flag = (jax.ShapeDtypeStruct((), jnp.bool_),) if form == "step" else ()
    compiled = h200.compile_for_h200(run, grads, state, params, *flag, donate=donated)
    entry = compiled.as_text().split("ENTRY")[1]
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    matrices = entry.count("= f16[2,1023,4096]{2,1,0} copy(") + entry.count("= bf16[2,1023,4096]{2,1,0} copy(")
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return temporaries, size, triton_calls(entry), matrices


def in_own_process(call, platforms="cpu"):
    root = pathlib.Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    env |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": platforms}
    command = [sys.executable, "-c", f"from tests.kernels import test_fp8lm; test_fp8lm.{call}"]
    completed = subprocess.run(command, env=env, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.slow
@triton
def test_the_kernel_assembled_for_hopper_spills_nothing():
    for name, (registers, spilled, _) in in_own_process("assembled()").items():
        assert spilled == 0, name
        assert registers <= CONFIGURATIONS[name][-1], (name, registers)


@pytest.mark.slow
@pytest.mark.skipif(h200.missing() is not None, reason="nothing can be compiled for a GPU here")
@pytest.mark.parametrize(
    ("form", "codes", "masters"),
    [
        ("step", True, (None, "bf16+int8", "bf16+stochastic")),
        ("update", False, (None,)),
    ],
    ids=str,
)
def test_a_step_is_one_kernel_in_place(form, codes, masters):
    for row in in_own_process(f"memory({form!r}, {codes!r}, *{masters!r})", "cuda,cpu"):
        temporaries, state, calls, copies = row
        assert (calls, copies) == (1, 0)
        assert temporaries <= 0.01 * state
