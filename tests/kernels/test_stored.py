"""Compiled Triton kernels on disk: a second process compiles none, and damaged files are compiled again."""

import importlib.util
import json
import logging
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def lower():
    """Prints the lowered programs of two kernels for CUDA, and the number of Triton's compilations, in its
    own process."""
    from jax_triton import triton_lib

    from pallas_kernels.dispatch import call_triton
    from pallas_kernels.quantization import transpose_triton

    compiled, original = [], triton_lib.compile_ttir_to_ptx_inplace
    triton_lib.compile_ttir_to_ptx_inplace = lambda *a, **k: compiled.append(0) or original(*a, **k)
    x = jax.ShapeDtypeStruct((64, 128), jnp.float8_e4m3fn)
    program = jax.jit(lambda x: transpose_triton.transpose(x, compute_capability=90))
    text = program.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    alone = len(compiled)
    call_triton.check(90)
    print(json.dumps([alone, len(compiled), text]))


def in_process(folder):
    env = os.environ | {"FP8JAX_KERNEL_CACHE": str(folder), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from tests.kernels import test_stored; test_stored.lower()"]
    completed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return *json.loads(completed.stdout.splitlines()[-1]), completed.stderr


def test_a_second_process_compiles_only_what_is_damaged(tmp_path):
    alone, together, text, _ = in_process(tmp_path)
    assert (alone, together) == (1, 2)
    files = {path: path.read_text() for path in tmp_path.iterdir()}
    assert len(files) == 2
    for content in files.values():
        *_, binary, ttir, _ = json.loads(content)["made"]["kernel"]
        assert ".entry" in binary
        # Every byte of a call is hashed on the host before each run.
        assert not any(word in binary for word in (".loc", ".file", ".debug", "//"))
        assert ttir == ""
    (damaged,) = (path for path, content in files.items() if "_add" in json.loads(content)["made"]["kernel"][0])
    damaged.write_text(files[damaged].replace("add", "sub", 1))
    alone, together, again, message = in_process(tmp_path)
    assert (alone, together) == (0, 1)
    assert again == text, "the stored kernel is another one"
    assert f"{damaged} is damaged" in message
    assert {path: path.read_text() for path in tmp_path.iterdir()} == files


def test_bare_code_is_the_same_instructions():
    from pallas_kernels.dispatch import kernel_cache_triton

    code = """//
.version 8.7
.target sm_90a
\t// .globl\t_add
.visible .entry _add(
\t.param .u64 _add_param_0
)
.reqntid 32
{
\t.reg .b32 \t%r<3>;
\t.loc\t1 76 0                          // call.py:76:0
$L__func_begin0:
\tld.param.b64 \t%rd1, [_add_param_0];
$L__tmp0:
\t.loc\t1 77 5                          // call.py:77:5
\t// begin inline asm
\tadd.s64 %rd2, %rd1, 4; // inline
\t// end inline asm
$L__BB0_2:
\tret;
                                        // -- End function
}
\t.file\t1 "/a//b.py"
\t.section\t.debug_abbrev
\t{
.b8 1 // abbreviation
.b8 0
\t}
\t.section\t.debug_info
\t{
.b32 9
\t}
"""
    assert kernel_cache_triton.strip_debug_info(code).split("\n") == [
        ".version 8.7",
        ".target sm_90a",
        ".visible .entry _add(",
        ".param .u64 _add_param_0",
        ")",
        ".reqntid 32",
        "{",
        ".reg .b32 %r<3>;",
        "$L__func_begin0:",
        "ld.param.b64 %rd1, [_add_param_0];",
        "$L__tmp0:",
        "add.s64 %rd2, %rd1, 4;",
        "$L__BB0_2:",
        "ret;",
        "}",
        "",
    ]


def test_what_a_kernel_depends_on_is_in_its_key(monkeypatch, tmp_path, caplog):
    from pallas_kernels.dispatch import kernel_cache_triton

    monkeypatch.setenv("FP8JAX_KERNEL_CACHE", str(tmp_path))
    keys = []

    def make():
        keys.append({"number": len(keys)})
        return keys[-1]

    for parts in (("source", 90), ("source", 80), ("other", 90), ("source", 90)):
        kernel_cache_triton.load_or_compile(parts, make)
    assert kernel_cache_triton.load_or_compile(("source", 90), make) == {"number": 0}
    assert len(keys) == 3
    modules = kernel_cache_triton.triton, kernel_cache_triton.jax_triton, kernel_cache_triton.jaxlib.version
    for number, module in enumerate(modules, 3):
        monkeypatch.setattr(module, "__version__", "0")
        assert kernel_cache_triton.load_or_compile(("source", 90), make) == {"number": number}
    for content in ("", "[]", '{"made": 1}', "\0"):
        caplog.clear()
        for path in tmp_path.iterdir():
            path.write_text(content)
        with caplog.at_level(logging.WARNING, "fp8jax"):
            number = len(keys)
            assert kernel_cache_triton.load_or_compile(("source", 90), make) == {"number": number}
        assert "is damaged" in caplog.text
        assert kernel_cache_triton.load_or_compile(("source", 90), make) == {"number": number}


def test_a_kernel_is_whole_before_others_see_it(monkeypatch, tmp_path):
    from pallas_kernels.dispatch import kernel_cache_triton

    seen, replace = [], os.replace

    def watch(source, target):
        seen.append((json.loads(pathlib.Path(source).read_text())["made"], pathlib.Path(target).exists()))
        replace(source, target)

    monkeypatch.setenv("FP8JAX_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "replace", watch)
    kernel_cache_triton.load_or_compile(("source", 90), lambda: {"number": 7})
    assert seen == [({"number": 7}, False)]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_folder_is_that_of_the_variable_or_of_jax_or_the_users(monkeypatch, tmp_path, caplog):
    from pallas_kernels.dispatch import kernel_cache_triton

    monkeypatch.setenv("FP8JAX_KERNEL_CACHE", "")
    assert kernel_cache_triton.cache_folder() is None
    assert kernel_cache_triton.load_or_compile((), lambda: {"x": 1}) == {"x": 1}
    monkeypatch.setenv("FP8JAX_KERNEL_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING, "fp8jax"):
        assert kernel_cache_triton.load_or_compile((), lambda: {"x": 2}) == {"x": 2}
    assert "cannot be kept" in caplog.text
    monkeypatch.delenv("FP8JAX_KERNEL_CACHE")
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert kernel_cache_triton.cache_folder() == tmp_path / "fp8jax-triton"
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        assert kernel_cache_triton.cache_folder() == tmp_path / "home" / "fp8jax" / "triton"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
