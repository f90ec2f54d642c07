"""Compiles programs for an H200 on a machine without a GPU, and reports on the compiled programs.

The CUDA plugin cannot be enabled in a process whose JAX runs on a CPU, so each report runs in its own process: `python
h200.py module:function`. The function, or each of a list of functions, returns a program and the shapes of its
arguments.
"""

import importlib
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
PLUGIN = "jax_cuda13_plugin"
MARK = "found: "


def wheels() -> bool:
    """Returns whether the packages of the group `compile` exist for this machine, as its markers say."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") and sys.version_info >= (3, 12)


def missing() -> str | None:
    """Returns why nothing can be compiled for a GPU on this machine, or None."""
    if all(importlib.util.find_spec(name) for name in (PLUGIN, "jax_triton")):
        return None
    if wheels():
        return "the packages of 'compile' are not installed: pip install -c constraints.txt -e . --group compile"
    machine = f"{platform.system()} on {platform.machine()} with Python {platform.python_version()}"
    return f"the packages of 'compile' need Linux on x86_64 or aarch64 and Python 3.12, not {machine}"


def compile_for_h200(function: Callable[..., Any], *shapes: Any, gpus: int = 1, donate: tuple[int, ...] = ()) -> Any:
    """Returns the executable of `function` for arguments with these ShapeDtypeStructs, replicated over `gpus` H200s."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        platform="cuda", target_config=(FOLDER / "h200.txtpb").read_text(), topology=f"1x1x{gpus}")  # fmt: skip
    mesh = jax.sharding.Mesh(np.array(description.devices), ("device",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated), shapes)
    return jax.jit(function, donate_argnums=donate).lower(*placed).compile()


def report(program: str, dump: str | None = None) -> dict[str, Any]:
    """Compiles `module:function` in a fresh process.

    Returns:
        "calls": targets of the program's custom calls.
        "copies": number of fp32 matrices that XLA moves itself.
        "narrow": number of scalars that it computes in bf16.
        "in place": number of FP8 products that cuBLASLt accumulates.
        "copied": number of bf16 matrices that XLA copies.
        "numbers": number of its own launches that compute only scalars.
        "kernels": for each Mosaic kernel, by name: bytes of its stack frame, of spill stores and of spill loads, its
        registers at entry, and the number of waits for tensor-core products that the assembler added. `dump` is a
        folder for PTX and the assembler's reports.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(dump or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        env = os.environ | {
            "JAX_PLATFORMS": "cuda,cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "MOSAIC_GPU_DUMP_TO": str(folder),
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
            "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        completed = subprocess.run([sys.executable, __file__, program], env=env, capture_output=True, text=True)
        if completed.returncode:
            raise RuntimeError(f"{program} does not compile for an H200:\n{completed.stderr[-3000:]}")
        (printed,) = (line.removeprefix(MARK) for line in completed.stdout.splitlines() if line.startswith(MARK))
        kernels = {path.stem: resources(path.read_text()) for path in folder.glob("*.ptxas")}
        return {**json.loads(printed), "kernels": kernels}


def ptx(program: Callable[..., Any], *shapes: Any) -> Any:
    """Returns jax-triton's compilation of a program's last Triton kernel; `binary` is its PTX.

    Run it in a process on a CPU. The program names the GPU's compute capability.
    """
    import jax
    import jax_triton.triton_lib

    compiled: list[Any] = []
    original = jax_triton.triton_lib.compile_ttir_to_ptx_inplace
    record = lambda *args, **kwargs: compiled.append(original(*args, **kwargs)) or compiled[-1]  # noqa: E731
    jax_triton.triton_lib.compile_ttir_to_ptx_inplace = record
    try:
        jax.jit(program).trace(*shapes).lower(lowering_platforms=("cuda",))
    finally:
        jax_triton.triton_lib.compile_ttir_to_ptx_inplace = original
    return compiled[-1]


def assembled(program: Callable[..., Any], *shapes: Any, arch: str = "sm_90a") -> list[int]:
    """Returns registers, spilled bytes and bytes of shared memory of a program's last Triton kernel, compiled for a
    GPU.

    Run it in a process on a CPU. The program names the GPU's compute capability, and `arch` its architecture (an H200's
    by default).
    """
    import triton

    compiled = ptx(program, *shapes)
    assembler = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        # Triton names the PTX version that this machine's driver supports, not that of its own assembler.
        (pathlib.Path(folder) / "k.ptx").write_text(re.sub(r"\.version [\d.]+", ".version 8.7", compiled.binary))
        command = [assembler, f"-arch={arch}", "-v", "k.ptx", "-o", "k.cubin"]
        printed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stderr
    actual = resources(printed)
    return [actual["registers"], actual["stores"], compiled.shared_mem_bytes]


def resources(assembler_report: str) -> dict[str, int]:
    pattern = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads[\s\S]*?Used (\d+) registers"
    actual = re.search(pattern, assembler_report)
    if actual is None:
        raise RuntimeError(f"the assembler's report has changed its form:\n{assembler_report}")
    values = dict(zip(("stack", "stores", "loads", "registers"), map(int, actual.groups()), strict=True))
    return values | {"waits": len(re.findall(r"warpgroup\.wait is injected|are serialized", assembler_report))}


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    actual = getattr(importlib.import_module(module), name)
    calls, copies, narrow, in_place, copied, numbers = [], 0, 0, 0, 0, 0
    for program in actual if isinstance(actual, list) else [actual]:
        function, shapes = program()
        text = compile_for_h200(function, *shapes).as_text()
        calls += re.findall(r'custom_call_target="([^"]+)"', text)
        copies += len(re.findall(r"= f32\[\d+,\d+\]\S* (?:fusion|copy|transpose)\(", text))
        narrow += len(re.findall(r"= bf16\[[1,]*\]", text))
        in_place += len(re.findall(r"matmul\$f8\".*output_to_operand_aliasing", text))
        copied += len(re.findall(r"= bf16\[\d+,\d+\]\S* copy\(", text))
        numbers += len(re.findall(r"= \(?(?:\w+\[[1,]*\][^ ]* ?)+\)? fusion\(", text.split("\nENTRY", 1)[1]))
    actual = {
        "calls": calls,
        "copies": copies,
        "narrow": narrow,
        "in place": in_place,
        "copied": copied,
        "numbers": numbers,
    }
    print(MARK + json.dumps(actual))


if __name__ == "__main__":
    main()
