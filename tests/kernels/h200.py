"""Compiles programs for an H200 on a machine that has none, and reports what became of them.

The CUDA plugin cannot be switched on in a process whose JAX already runs on CPU, so each report is made by a process
of its own: `python h200.py module:function`, where the function, or each of a list of them, returns a program and the
shapes of its arguments.
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

HERE = pathlib.Path(__file__).resolve().parent
PLUGIN = "jax_cuda13_plugin"
MARK = "found: "


def wheels() -> bool:
    """Whether the packages of the group `compile` exist for this machine; its markers say the same."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") and sys.version_info >= (3, 12)


def missing() -> str | None:
    """Why nothing can be compiled for a GPU here, or None."""
    if all(importlib.util.find_spec(name) for name in (PLUGIN, "jax_triton")):
        return None
    if wheels():
        return "the packages of 'compile' are not installed: pip install -c constraints.txt -e . --group compile"
    here = f"{platform.system()} on {platform.machine()} with Python {platform.python_version()}"
    return f"the packages of 'compile' need Linux on x86_64 or aarch64 and Python 3.12, not {here}"


def compile_for_h200(function: Callable[..., Any], *shapes: Any, gpus: int = 1, donate: tuple[int, ...] = ()) -> Any:
    """The executable of `function` for arguments of these ShapeDtypeStructs, replicated over `gpus` H200s."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        platform="cuda", target_config=(HERE / "h200.txtpb").read_text(), topology=f"1x1x{gpus}")  # fmt: skip
    mesh = jax.sharding.Mesh(np.array(description.devices), ("device",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated), shapes)
    return jax.jit(function, donate_argnums=donate).lower(*placed).compile()


def report(program: str, dump: str | None = None) -> dict[str, Any]:
    """Compiles `module:function` in a fresh process.

    Returns:
        "calls": targets of the program's custom calls; "copies": how often XLA moves an fp32 matrix itself; "narrow":
        how often it makes a single number in bf16; "in place": how many FP8 products cuBLASLt adds to what is there;
        "copied": how often XLA copies a bf16 matrix; "numbers": how many of its own launches make single numbers alone;
        "kernels": for each Mosaic kernel, by name, the bytes of its stack
        frame, of spill stores and of spill loads, its registers at entry, and how often the assembler added a wait for
        tensor-core products. `dump` keeps PTX and the assembler's reports in that folder.
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
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        completed = subprocess.run([sys.executable, __file__, program], env=env, capture_output=True, text=True)
        if completed.returncode:
            raise RuntimeError(f"{program} does not compile for an H200:\n{completed.stderr[-3000:]}")
        (printed,) = (line.removeprefix(MARK) for line in completed.stdout.splitlines() if line.startswith(MARK))
        kernels = {path.stem: resources(path.read_text()) for path in folder.glob("*.ptxas")}
        return {**json.loads(printed), "kernels": kernels}


def ptx(program: Callable[..., Any], *shapes: Any) -> Any:
    """What jax-triton compiles a program's last Triton kernel to; `binary` is its PTX. In a process on CPU.

    The program names the GPU's compute capability.
    """
    import jax
    import jax_triton.triton_lib

    compiled: list[Any] = []
    original = jax_triton.triton_lib.compile_ttir_to_ptx_inplace
    keep = lambda *args, **kwargs: compiled.append(original(*args, **kwargs)) or compiled[-1]  # noqa: E731
    jax_triton.triton_lib.compile_ttir_to_ptx_inplace = keep
    try:
        jax.jit(program).trace(*shapes).lower(lowering_platforms=("cuda",))
    finally:
        jax_triton.triton_lib.compile_ttir_to_ptx_inplace = original
    return compiled[-1]


def assembled(program: Callable[..., Any], *shapes: Any, arch: str = "sm_90a") -> list[int]:
    """Registers, bytes spilled and bytes of shared memory of a program's last Triton kernel, compiled for a GPU.

    In a process on CPU. The program names the GPU's compute capability, and `arch` its architecture: an H200's.
    """
    import triton

    compiled = ptx(program, *shapes)
    assembler = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        # Triton names the version of PTX that a driver here would take, not that of its own assembler.
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
