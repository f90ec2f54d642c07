"""Triton kernels that XLA launches itself: the lowered programs, and when jax-triton's calls are used."""

import dataclasses
import logging
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.modules import compiled

pytest.importorskip("jax_triton")

import triton

from pallas_kernels.dispatch import call_triton, kernel_cache_triton, launch_triton
from pallas_kernels.quantization import transpose_triton

# Before jax 0.11, the default is jax-triton's calls.
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA is given kernels from jax 0.11 on")
TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
XLA, JAX_TRITON = f"custom_call @{launch_triton.TARGET}(", "custom_call @triton_kernel_call"
BYTES = jax.ShapeDtypeStruct((128, 256), jnp.uint8)
X = jax.ShapeDtypeStruct((32,), jnp.float32)


def transposed_copy(x):
    return transpose_triton.transpose(x, compute_capability=90)


def sums(x):
    return call_triton._run_add(x, 90)


def lowered(function, *shapes):
    return jax.jit(lambda *x: function(*x)).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def written(function, *shapes):
    """Returns XLA's call of a program's only kernel: the text of its attributes, and its PTX."""
    (call,) = re.findall(rf"{re.escape(XLA)}.*", lowered(function, *shapes))
    code = re.search(r'kernel_data = "(.*?)", kernel_type = "ptx"', call)[1]
    return call, re.sub(r"\\([0-9A-F]{2})", lambda of: chr(int(of[1], 16)), code)


def compiled_ptx(function, *shapes):
    """Returns Triton's PTX of a program's only kernel, without line numbers."""
    compiled = []
    with pytest.MonkeyPatch.context() as patch:
        own = launch_triton.redeclare_parameters
        patch.setattr(
            launch_triton, "redeclare_parameters", lambda code, *rest: compiled.append(code) or own(code, *rest)
        )
        lowered(function, *shapes)
    return compiled[0]


def instructions(code, folder):
    """Returns the machine code of PTX on an H100, without addresses of parameters."""
    (folder / "k.ptx").write_text(re.sub(r"\.version [\d.]+", ".version 8.7", code))
    run = {"cwd": folder, "check": True, "capture_output": True, "text": True}
    subprocess.run([TOOLS / "ptxas", "-arch=sm_90a", "k.ptx", "-o", "k.cubin"], **run)
    text = subprocess.run([TOOLS / "nvdisasm", "-c", "-hex", "k.cubin"], **run).stdout
    body = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(.*?;)", text, re.MULTILINE)
    return [re.sub(r"c\[0x0\]\[0x[0-9a-f]+\]", "c[parameter]", line) for line in body]


def test_xla_is_given_the_kernel_its_grid_and_its_memory(monkeypatch):
    own = launch_triton.capture_launch
    monkeypatch.setattr(launch_triton, "capture_launch", lambda lower: dataclasses.replace(own(lower), y=3, z=5))
    call, code = written(transposed_copy, BYTES)
    for name, value in {"block_x": 512, "block_y": 1, "block_z": 1, "grid_x": 2, "grid_y": 3, "grid_z": 5}.items():
        assert f"{name} = {value} : i32" in call
    assert "shared_mem_bytes = 16384 : i32" in call
    assert 'name = "_transpose"' in call
    assert "output_indices = [2 : i32]" in call
    assert code.count(".visible .entry _transpose(") == 1
    assert "api_version = 4" in call or "mhlo.backend_config" in call


def test_parameters_are_the_operands_then_integers_then_results():
    call, code = written(sums, X)
    declared = re.search(r"\.entry _add\(\n(.*?)\)", code, re.DOTALL)[1].replace("\n", "").split(",")
    names = [line.split()[-1] for line in declared]
    own = ["_add_param_2", "_add_param_3"] if call_triton.IS_BEFORE_04 else ["_add_unread_0", "_add_param_2"]
    assert names == ["_add_param_0", "_add_numbers", *own]
    assert "output_indices = [2 : i32, 3 : i32]" in call
    assert "output_tuple_indices = [0], operand_index = 0" in call
    assert "dense<3> : tensor<1xi32>" in lowered(sums, X)
    assert "(tensor<32xf32>, tensor<1xi32>) -> (tensor<32xf32>, tensor<32xf32>)" in call


@pytest.mark.parametrize("program", [(transposed_copy, BYTES), (sums, X)], ids=["transpose", "add"])
def test_the_machine_code_is_that_of_tritons_own_but_for_integers(program, tmp_path):
    ours, tritons = instructions(written(*program)[1], tmp_path), instructions(compiled_ptx(*program), tmp_path)
    if program[0] is transposed_copy:
        assert ours == tritons
        return
    # The integer is read from the address of the parameter.
    kind = lambda lines: sorted(re.sub(r"^@\S+ ", "", line).split()[0].rstrip(";") for line in lines)  # noqa: E731
    more = kind(ours)
    for name in kind(tritons):
        if name in more:
            more.remove(name)
    assert any(name.startswith("LDG") and "CONSTANT" in name for name in more)
    assert sum(name.startswith(("FADD", "I2F", "STG")) for name in kind(ours)) == sum(
        name.startswith(("FADD", "I2F", "STG")) for name in kind(tritons)
    )


CODE = """
.version 8.7
.target sm_90a
.visible .entry _k(
.param .u64 .ptr .global .align 1 _k_param_0,
.param .u32 _k_param_1,
.param .u64 _k_param_2,
.param .u64 .ptr .global .align 1 _k_param_3,
.param .u64 .ptr .global .align 1 _k_param_4
)
.reqntid 64
{
.reg .b32 %r<9>;
ld.param.b64 %rd1, [_k_param_0];
ld.param.b32 %r1, [_k_param_1];
ld.param.b64 %rd2, [_k_param_2];
ld.param.b64 %rd3, [_k_param_3];
ret;
}
"""
KINDS = ("array", "i32", "i64", "array")


def test_integers_lie_where_the_kernel_reads_them():
    actual = launch_triton.redeclare_parameters(CODE, 64, KINDS, 1, (False,))
    assert actual.has_integers
    assert actual.code.split("{\n")[1].split("\n")[:6] == [
        ".reg .b64 %numbers;",
        ".reg .b32 %r<9>;",
        "ld.param.b64 %rd1, [_k_param_0];",
        "ld.param.b64 %numbers, [_k_numbers];",
        "ld.global.nc.b32 %r1, [%numbers+0];",
        "ld.param.b64 %numbers, [_k_numbers];",
    ]
    assert "ld.global.nc.b64 %rd2, [%numbers+8];" in actual.code
    assert "_k_param_4" not in actual.code
    parameters = [
        launch_triton.KernelParameter(*p)
        for p in (("array",), ("i32", -7), ("i64", 5 << 32 | 9), ("array",), ("u32", 1), ("u64", 3))
    ]
    assert list(launch_triton.pack_integers(parameters)) == [-7, 0, 9, 5, 1, 0, 3, 0]
    # Unread integers are not passed.
    unread = re.sub(r"ld\.param.*_k_param_[12]\];\n", "", CODE)
    assert not launch_triton.redeclare_parameters(unread, 64, KINDS, 1, (False,)).has_integers
    assert "numbers" not in launch_triton.redeclare_parameters(unread, 64, KINDS, 1, (False,)).code
    # A result that aliases an operand has a parameter, although the kernel has none.
    assert ".param .u64 _k_unread_0,\n.param .u64 .ptr .global .align 1 _k_param_3\n)" in (
        launch_triton.redeclare_parameters(CODE, 64, KINDS, 1, (True, False)).code
    )


@pytest.mark.parametrize(
    ("change", "kinds", "threads"),
    [
        *(({}, KINDS, threads) for threads in (32, 128)),
        ({".reqntid 64\n": ""}, KINDS, 64),
        ({".visible .entry": ".visible .func"}, KINDS, 64),
        ({"[_k_param_3]": "[_k_param_4]"}, KINDS, 64),  # Triton's own pointer is read.
        ({"[_k_param_3]": "[_k_param_9]"}, KINDS, 64),
        ({"ld.param.b32 %r1": "@%p1 ld.param.b32 %r1"}, KINDS, 64),
        ({"ld.param.b32 %r1, [_k_param_1]": "mov.b64 %rd9, _k_param_1"}, KINDS, 64),
        ({"ld.param.b32 %r1": "ld.param.b16 %r1"}, KINDS, 64),
        ({}, ("array", "fp32", "i64", "array"), 64),
        ({".param .u64 .ptr .global .align 1 _k_param_0": ".param .align 64 .b8 _k_param_0[128]"}, KINDS, 64),
        ({}, (*KINDS, "array", "array"), 64),
        ({}, ("array", "i32", "i64", "array", "array"), 64),  # one result too many
        ({"ld.param.b64 %rd3, [_k_param_3];\n": ""}, KINDS[:3], 64),  # or too few
    ],
    ids=str,
)
def test_code_of_another_form_is_left_alone(change, kinds, threads):
    code = CODE
    for old, new in change.items():
        assert old in code
        code = code.replace(old, new)
    assert launch_triton.redeclare_parameters(code, threads, kinds, 1, (False,)) is None


@pytest.fixture
def log(monkeypatch, caplog):
    """Returns warnings. No failure is remembered from before or afterwards."""
    monkeypatch.delenv(launch_triton.VARIABLE, raising=False)
    monkeypatch.setattr(launch_triton, "_failure_reasons", [])
    launch_triton._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fp8jax"):
        yield caplog
    launch_triton._warn_once.cache_clear()


def test_the_environment_says_who_launches(log, monkeypatch):
    for value, target in (("triton", JAX_TRITON), ("xla", XLA), ("", XLA)):
        monkeypatch.setenv(launch_triton.VARIABLE, value)
        text = lowered(transposed_copy, BYTES)
        assert [target in text, text.count("custom_call")] == [True, 1], value
    monkeypatch.setenv(launch_triton.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="FP8JAX_KERNEL_CALLS='cuda'; use 'xla' or 'triton', or leave it unset"):
        lowered(transposed_copy, BYTES)
    assert not log.text
    monkeypatch.delenv(launch_triton.VARIABLE)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert launch_triton.get_launcher() == "triton"
    launch_triton.check_launch(lambda: pytest.fail("nothing is to be tried"))


def test_where_xlas_call_fails_jax_tritons_is_taken_and_told_once(log, monkeypatch):
    launch_triton.check_launch(lambda: None)
    assert XLA in lowered(transposed_copy, BYTES)

    def broken():
        raise RuntimeError("no such target\nand more")

    monkeypatch.setenv(launch_triton.VARIABLE, "xla")
    launch_triton.check_launch(broken)
    monkeypatch.delenv(launch_triton.VARIABLE)
    assert XLA in lowered(transposed_copy, BYTES), "who asks for it gets it"
    for _ in range(2):
        launch_triton.check_launch(broken)
    assert len(launch_triton._failure_reasons) == 1, "not tried again"
    assert JAX_TRITON in lowered(transposed_copy, BYTES)
    assert [r.getMessage() for r in log.records] == [
        "kernels are launched by jax-triton's calls: XLA's own calls of PTX fail (RuntimeError: no such target). "
        "The host needs more time per step"
    ]


def test_a_driver_that_keeps_nothing_is_not_asked_to_assemble_each_call(log, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_CACHE_DISABLE", raising=False)
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path / "new" / "folder"))
    assert launch_triton.missing_driver_cache() is None
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "0")
    assert launch_triton.missing_driver_cache() is None
    write = launch_triton.os.W_OK
    monkeypatch.setattr(launch_triton.os, "access", lambda path, how: how != write or pathlib.Path(path) != tmp_path)
    assert f"cannot keep assembled kernels in {tmp_path}/new/folder" in launch_triton.missing_driver_cache()
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    launch_triton.check_launch(lambda: pytest.fail("nothing is to be tried"))
    assert JAX_TRITON in lowered(transposed_copy, BYTES)
    assert "CUDA_CACHE_DISABLE is set" in log.text


def test_a_kernel_of_another_form_keeps_jax_tritons_call(log, monkeypatch):
    own = kernel_cache_triton.kernel_parts
    monkeypatch.setattr(
        launch_triton.kernel_cache_triton, "kernel_parts", lambda kernel: [*(of := own(kernel))[:2], 2, *of[3:]]
    )  # clusters of two programs
    assert JAX_TRITON in lowered(transposed_copy, BYTES)
    assert "the kernel _transpose is launched by jax-triton's call" in log.text


def test_a_jax_triton_of_another_form_keeps_its_calls(log, monkeypatch):
    for broken in (lambda *_: b"", lambda *_: 1 / 0):
        monkeypatch.setattr(launch_triton.Launch, "to_proto", broken)
        assert JAX_TRITON in lowered(transposed_copy, BYTES)
    reasons = [r.getMessage().partition(" asked for less ")[2] for r in log.records]
    assert reasons == ["(its lowering makes no single launch)", "(ZeroDivisionError: division by zero)"]


def test_what_a_compiled_program_runs_is_named():
    line = f'  %k = s32[8,8] custom-call(%a, %b), custom_call_target="{launch_triton.TARGET}", metadata={{op_name='
    text = (
        "ENTRY %main {\n  %a = s8[8,8] parameter(0)\n  %b = s8[8,8] parameter(1)\n"
        f'{line}"jit(f)/fp8jax:int8*int8/multiply/triton_kernel_call"}}, backend_config={{kernel_data = "{{ }}"}}\n}}\n'
    )
    (product,) = compiled.parse_products(text)
    assert (product.operation, product.kernel) == (launch_triton.TARGET, "multiply")


@pytest.mark.gpu
def test_both_calls_give_the_same_bits(monkeypatch):
    x = np.arange(32, dtype=np.float32)
    for launcher in ("xla", "triton"):
        monkeypatch.setenv(launch_triton.VARIABLE, launcher)
        call_triton._run_small_kernel()
        np.testing.assert_array_equal(x, np.arange(32))
