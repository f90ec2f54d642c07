"""The collectives of a plan are those of the step compiled for several H200s: operations, dtypes and bytes."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels import h200

# The tests that always run compare plans with tables (tests/dist/test_plan.py) and with XLA's programs for CPUs
# (test_tensor.py).
pytestmark = [pytest.mark.slow, pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))]
# All-reduces of scalars, which a plan leaves out: the loss, norms, and keys.
NUMBERS, ALONE = 1024, (("all-reduce", "f32"), ("all-reduce", "u32"))
# Gradients of norms: XLA sums them over "tensor" and another axis at once.
NORMS = 4 * 5 * 256

# RECIPE:DATA:FSDP:TENSOR:GRADIENTS:FORM:PARTITION, without empty fields at the end.
STEPS = [
    "coat:1:2:2:e4m3:", "bf16:2:1:1::", "te_current:1:2:1::", "deepseek:2:2:1:e4m3:", "bf16:1:2:1::", "bf16:2:2:1::",
    "coat:2:1:1::", "coat:1:2:1::", "deepseek:1:2:1::", "int8_block:1:2:1::", "te_current:2:2:1::", "bf16:1:2:1:e4m3:",
    "bf16:2:1:1:bf16:", "coat:1:2:1:e4m3:", "te_current:1:2:1:e4m3:", "moss:1:2:1:e4m3:", "coat:2:1:1:e4m3:one_phase",
    "fp8_lm:1:2:1:e4m3:one_phase", "fp8_lm_two_phase:2:2:1:e4m3:", "int8_fallback:1:2:1:e4m3:", "bf16:1:1:2::",
    "te_current:1:1:2::", "deepseek:1:1:2::", "fast:1:1:2::", "moss_mx:1:1:2::", "int8_block:1:1:2::",
    "switchback:1:1:2::", "te_delayed:1:1:2::", "fp8_lm:2:1:2:e4m3:one_phase", "coat:2:1:2:e4m3:", "bf16:1:2:2::",
    "bf16:2:1:1:::slices", "bf16:2:1:1:::tensors", "coat:2:1:1:e4m3::tensors", "fp8_lm_two_phase:2:2:1:e4m3::slices",
    "coat:2:1:2:e4m3::slices",
]  # fmt: skip


def report(steps):
    """Returns, by step, the communication of its program and of its plan."""
    env = os.environ | {
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
        "PYTHONPATH": os.pathsep.join([str(h200.FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.experiments.compiled_steps", *steps]
    completed = subprocess.run(command, env=env, capture_output=True, text=True, cwd=h200.FOLDER.parents[1])
    assert not completed.returncode, completed.stderr[-3000:]
    (printed,) = (line.removeprefix(h200.MARK) for line in completed.stdout.splitlines() if line.startswith(h200.MARK))
    return json.loads(printed)


@pytest.mark.parametrize("steps", [STEPS[i : i + 6] for i in range(0, len(STEPS), 6)], ids=str)
def test_planned_collectives_are_those_of_the_step_compiled_for_gpus(steps):
    for step, (program, planned) in report(steps).items():
        actual, expected = ({tuple(key): size for *key, size in side} for side in (program, planned))
        sizes = step.split(":")[1:4]
        slack = NUMBERS + (2 * NORMS if sizes[2] != "1" and sizes != ["1", "1", sizes[2]] else 0)
        for key in sorted(actual.keys() | expected.keys()):
            differs = abs(actual.get(key, 0) - expected.get(key, 0))
            assert differs <= (slack if key[:2] in ALONE else 0), (step, key, actual, expected)
