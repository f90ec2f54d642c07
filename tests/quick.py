"""Runs one fast test file for each folder that changed since a commit: `python -m tests.quick`, two minutes at most.

`make quick` runs it. If nothing changed, it runs the files of all folders. Arguments go to pytest.
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
BASE = os.environ.get("BASE", "HEAD")
# The first folder that contains a changed file has its tests. A test file that changed runs itself.
FILES = {
    "fp8jax/core/": ["core/test_qtensor.py", "core/test_scaling_states.py"],
    "fp8jax/ops/losses/": ["ops/test_cross_entropy.py"],
    "fp8jax/ops/matmul/": ["ops/test_matmul.py"],
    "fp8jax/ops/nonlinear/": ["ops/test_contexts.py"],
    "fp8jax/ops/optimizers/": ["optim/test_compressed_adamw.py"],
    "fp8jax/ops/quantization/": ["ops/test_quantize.py", "ops/test_fold.py"],
    "fp8jax/ops/dispatch/": ["ops/test_partition.py"],
    "fp8jax/ops/": ["ops/test_linear.py"],
    "fp8jax/optim/": ["optim/test_contracts.py"],
    "fp8jax/dist/": ["dist/test_reduce.py"],
    "fp8jax/rewrite/": ["rewrite/test_transform.py"],
    "fp8jax/modules/": ["modules/test_quantized_nnx.py"],
    "fp8jax/": ["core/test_presets.py"],
    "pallas_kernels/matmul/": ["kernels/test_matmul.py"],
    "pallas_kernels/optimizers/": ["kernels/test_adamw_interpreted.py"],
    "pallas_kernels/nonlinear/": ["kernels/test_gradients_interpreted.py"],
    "pallas_kernels/": ["kernels/test_quantize.py"],
    "experiments/hub/": ["experiments/test_hub.py"],
    "experiments/text/": ["experiments/test_packing.py"],
    "experiments/results/": ["experiments/test_results.py"],
    "experiments/models/": ["experiments/test_llama.py"],
    "experiments/bench/": ["experiments/test_timing.py"],
    "experiments/": ["experiments/test_task.py"],
}
ALWAYS = ["test_house.py"]
FOLDERS = ("fp8jax/core/", "fp8jax/ops/", "fp8jax/optim/", "fp8jax/dist/", "fp8jax/rewrite/", "fp8jax/modules/",
         "experiments/")  # fmt: skip


def changed() -> list[str]:
    """Paths that differ from `BASE`, new files included."""
    commands = ["git", "diff", "--name-only", BASE], ["git", "ls-files", "--others", "--exclude-standard"]
    runs = [subprocess.run(x, cwd=ROOT, capture_output=True, text=True, check=True) for x in commands]
    return [line for run in runs for line in run.stdout.splitlines()]


def choose(paths: list[str]) -> list[str]:
    """The test files for changed paths, without duplicates."""
    chosen = list(ALWAYS)
    for path in paths:
        name = pathlib.PurePath(path)
        if path.startswith("tests/") and name.match("test_*.py"):
            chosen.append(path.removeprefix("tests/"))
        else:
            chosen += next((files for folder, files in FILES.items() if path.startswith(folder)), [])
    return [f"tests/{name}" for name in dict.fromkeys(chosen) if (ROOT / "tests" / name).exists()]


def main() -> None:
    paths = changed()
    code = [path for path in paths if path.endswith(".py")]
    files = choose(code or [*FOLDERS])
    print(f"{len(paths)} paths differ from {BASE}:", *files, sep="\n", flush=True)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *files, *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
