"""Runs the quantize kernel in Triton's interpreter, on NumPy arrays, with guards around every output.

It needs its own process, because Triton selects the interpreter when a kernel is defined: `TRITON_INTERPRET=1
JAX_PLATFORMS=cpu python -m tests.kernels.triton_interpreter`. It prints one line of JSON: the cases in which the kernel
differs from the reference or, with given scales, from NumPy. ml_dtypes replaces the interpreter's conversions to 8
bits, which round wrongly. `tests.kernels.ptx` runs inline assembly and fused multiply-adds.
"""

import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter

from fp8jax.ops.dispatch import partition
from pallas_kernels.dispatch import call_triton
from pallas_kernels.matmul import matmul_int8_triton
from pallas_kernels.nonlinear import operations_triton
from pallas_kernels.quantization import encode_triton, quantize_triton, statistics_triton
from tests.kernels import glu_cases, group_cases, int8_cases, logits_cases, ptx, statistics_cases
from tests.kernels import quantize_cases as cases

GUARD = 4096
DTYPES = {
    "fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
}  # fmt: skip
NAMES = {np.dtype(v): getattr(tl, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[k])
         for k, v in DTYPES.items() if not k.startswith("fp8")}  # fmt: skip
NAMES |= {np.dtype(np.uint8): tl.uint8, np.dtype(np.uint32): tl.uint32, np.dtype(np.int32): tl.int32}
NAMES |= {
    np.dtype(np.int8): tl.int8,
    np.dtype(DTYPES["fp8e4nv"]): tl.float8e4nv,
    np.dtype(DTYPES["fp8e5"]): tl.float8e5,
}


class Tensor:
    """An array with the attributes that the interpreter reads from a tensor."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype, self.device = array, NAMES[array.dtype], "cpu"

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def itself(self, *_: Any, **__: Any) -> "Tensor":
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = size = stride = storage_offset = itself


def convert(values: np.ndarray, source: Any, target: Any, _: Any) -> np.ndarray:
    x, dtype = np.frombuffer(values.tobytes(), DTYPES[source.name]).astype(np.float32), np.dtype(DTYPES[target.name])
    if target.name.startswith("fp8"):  # saturates, like the hardware's conversion
        x = np.clip(x, -float(ml_dtypes.finfo(dtype).max), float(ml_dtypes.finfo(dtype).max))
    return x.astype(dtype).view(f"u{dtype.itemsize}").reshape(values.shape)


def create_fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    return interpreter.TensorHandle(ptx.register(ptx.fused(x.data, y.data, z.data)).view(np.float32), z.dtype.scalar)


def create_inline_asm(_: Any, text: str, constraints: str, values: Any, types: Any, pure: bool, pack: int) -> Any:
    dtypes = map(interpreter._get_np_dtype, types)
    results = ptx.run(text, constraints, [value.data for value in values], list(dtypes), pack)
    results = [interpreter.TensorHandle(x, dtype.scalar) for x, dtype in zip(results, types, strict=True)]
    return SimpleNamespace(get_result=results.__getitem__)


def call(
    kernel: Any,
    inputs: list[Any],
    shapes: list[Any],
    grid: int,
    launch: Any,
    _: Any,
    aliases: dict[int, int] | None = None,
    shape: tuple[int, int] | None = None,
    **static: Any,
) -> Any:
    m, n = shape or inputs[0].shape
    sizes = {"M": m, "N": n, "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n}
    return call_any(*inputs, kernel=kernel, out_shapes=shapes, num_programs=grid, aliases=aliases, **sizes, **static)


def call_any(
    *inputs: Any,
    kernel: Any,
    out_shapes: Any,
    num_programs: int,
    aliases: dict[int, int] | None = None,
    num_warps: int = 0,
    num_stages: int = 1,
    compute_capability: int | None = None,
    **static: Any,
) -> Any:
    """`call_triton.call`, with guards around its outputs."""
    arguments = [x if isinstance(x, int) else np.array(x) for x in inputs]
    buffers = [
        np.full(int(np.prod(s.shape)) * np.dtype(s.dtype).itemsize + 2 * GUARD, 0xA5, np.uint8) for s in out_shapes
    ]
    outputs = [b[GUARD:-GUARD].view(s.dtype).reshape(s.shape) for b, s in zip(buffers, out_shapes, strict=True)]
    for source, i in (aliases or {}).items():
        outputs[i][:] = arguments[source]
        arguments[source] = outputs[i]
    operands = (x if isinstance(x, int) else Tensor(x) for x in arguments)
    kernel[(num_programs,)](*operands, *map(Tensor, outputs), **static)
    for buffer in buffers:
        if not (buffer[:GUARD] == 0xA5).all() or not (buffer[-GUARD:] == 0xA5).all():
            raise RuntimeError(f"{kernel} wrote out of bounds")
    return [jnp.asarray(x) for x in outputs]


def patch_once() -> None:
    """Replaces the functions of triton.language once, for the whole process.

    The interpreter scans the language at every call of a device function, a third of its time, and restores it after
    each kernel. It computes a reduction by a custom function element by element, half of the remaining time; here,
    NumPy computes maxima.
    """
    patch, reduce, done = interpreter._patch_lang, interpreter.ReduceOps.apply_impl, set()

    def apply(self: Any, values: Any) -> Any:
        if getattr(self.combine_fn, "fn", None) in (
            encode_triton._larger_or_nan.fn,
            operations_triton.larger_or_nan.fn,
        ):
            return self.min_max(values[0], np.max)
        return reduce(self, values)

    def once(function: Any) -> Any:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang, interpreter.ReduceOps.apply_impl = once, apply
    types_once()


def types_once() -> None:
    """Computes the common parts of the tensor types of a shape once, and omits checks for integer overflow."""
    core, of_values, of_dtype = tl.core, tl.core._type_for_tuple_values, interpreter._get_np_dtype
    block, tensor = core.block_type.__init__, core.tensor.__init__
    tuples, blocks, shapes, dtypes = {}, {}, {}, {}

    def sizes_of(shape: Any) -> tuple[Any, ...]:
        return tuple([x if type(x) is int else getattr(x, "value", x) for x in getattr(shape, "values", shape)])

    def of_sizes(values: Any, fields: Any = None) -> Any:
        sizes = sizes_of(values)
        if fields is not None or not all([type(x) is int for x in sizes]):
            return of_values(values, fields)
        return tuples.get(sizes) or tuples.setdefault(sizes, of_values(values))

    def new_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, sizes_of(core._unwrap_if_constexpr(shape) if type(shape) is core.constexpr else shape)
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty, (self.shape, self.numel, self.name) = element_ty, blocks[key]

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype, (self.shape, self.numel) = handle, type, type.scalar, shapes[key]

    def np_dtype(kind: Any) -> Any:
        return dtypes.get(kind.name) or dtypes.setdefault(kind.name, of_dtype(kind))

    core._type_for_tuple_values, interpreter._get_np_dtype = of_sizes, np_dtype
    core.block_type.__init__, core.tensor.__init__ = new_block, new_tensor
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def arithmetic() -> None:
    """Adds missing arithmetic to the interpreter, and gives NaN the bits of a GPU."""
    binary_op = interpreter.InterpreterBuilder.binary_op

    def of_registers(*args: Any) -> Any:
        result = binary_op(*args)
        if result.data.dtype == np.float32:
            result.data = ptx.register(result.data).view(np.float32)
        return result

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.binary_op = of_registers
    interpreter.InterpreterBuilder.create_fma = create_fma
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm


def prepare() -> None:
    """Prepares this process to run kernels in the interpreter; it can then do nothing else."""
    patch_once()
    jax.custom_batching.sequential_vmap = lambda function: function
    partition.on_one_device, partition._mapped_kernel = lambda: True, lambda function, takes_stacks: function
    jax.lax.platform_dependent = lambda *args, cuda, default: cuda(*args)
    arithmetic()
    quantize_triton.call, call_triton.call, call_triton.check = call, call_any, lambda _: None


def main() -> None:
    prepare()
    wrong = {}
    runs = [*((case, cases.arrays) for case in cases.CASES), *((case, cases.folded) for case in cases.FOLDS)]
    for case, run in [*runs, *((case, cases.refolded) for case in cases.REFOLDS)]:
        expected, actual = run(case, "xla"), run(case, "triton")
        differ = [int(np.sum((a != b) & ((a == a) | (b == b)))) for a, b in zip(expected, actual, strict=True)]
        if any(differ):
            wrong[str(case)] = differ
    for case in cases.FALLBACKS:
        for name, differ in cases.wrong_fallback(case).items():
            if differ:
                wrong[f"{case}: {name}"] = [differ]
    for name, differ in cases.wrong_noise("triton").items():
        if differ:
            wrong[f"noise of {name}"] = [differ]
    nvfp4 = {"ties": cases.wrong_nvfp4_ties("triton"), "noise of a part": cases.wrong_part_of_nvfp4()}
    for name, differ in (nvfp4 | cases.wrong_nvfp4_noise("triton")).items():
        if differ:
            wrong[f"nvfp4: {name}"] = [int(differ)]
    for shape, down in (((70, 400), 2), ((48, 256), 2), ((64, 256), 2)):
        for name, differ in cases.wrong_maxima(shape, down).items():
            if differ:
                wrong[f"maxima {shape}: {name}"] = [differ]
    for shape in ((192, 150), (128, 256)):
        for name, differ in cases.wrong_blocks(shape).items():
            if differ:
                wrong[f"fallback {shape}: {name}"] = [differ]
    for widths, scale in (((128, 384, 128), None), ((256, 128), 1.7)):
        if any(differ := cases.wrong_packed(widths, scale)):
            wrong[f"{widths} side by side"] = differ
    for rows, columns, has_scale in cases.STACKS:
        if any(differ := cases.wrong_stack(rows, columns, has_scale)):
            wrong[f"stack {rows} {columns} {has_scale}"] = differ
    for shape, dtype in cases.TEN_BITS:
        for name, differ in cases.wrong_packing(shape, dtype).items():
            if differ:
                wrong[f"ten bits {shape} {dtype}: {name}"] = [differ]
    for name, shape in cases.SHIFTS:
        if differ := cases.wrong_shifted(name, shape):
            wrong[f"{name} shifted {shape}"] = [differ]
    for shape, rate in (((140, 200, 300), 0.5), ((130, 40, 128), 0.0), ((1100, 140, 8), 0.5)):  # more than a band
        error = int8_cases.error(matmul_int8_triton.matmul_int8_block, shape, rate)
        if not error < 3e-7:
            wrong[f"int8 product {shape} {rate}"] = [error]
    for case in cases.CASES[::3]:
        if any(cases.wrong_sums(case, "triton")):
            wrong[f"sums of {case}"] = cases.wrong_sums(case, "triton")
    differences = [(str(case), cases.wrong_under_given_scales(case, "triton")) for case in cases.GIVEN_SCALE_CASES]
    differences += [(f"{name} computed", cases.wrong_where_computed(name)) for name in ("e4m3", "e5m2")]
    for name, differ in differences:
        if any(differ):
            wrong[name] = differ
    for case in logits_cases.CASES:
        wrong |= {f"logits {case}: {name}": [n] for name, n in logits_cases.wrong(case, "triton").items() if n}
    for group_case in group_cases.CASES:
        wrong |= {f"{group_case}: {name}": [n] for name, n in group_cases.wrong(group_case, "triton").items() if n}
    statistics_triton._MAX_PARTS = 2  # parts of several tiles, as in a large matrix
    for statistics_case in statistics_cases.CASES:
        if differ := statistics_cases.wrong(statistics_case):
            wrong[str(statistics_case)] = differ
    if statistics_cases.wrong_merge():
        wrong["merged statistics"] = statistics_cases.wrong_merge()
    for moment_case in statistics_cases.MOMENTS:
        if differ := statistics_cases.wrong_moment(moment_case):
            wrong[str(moment_case)] = [differ]
    for glu_case in glu_cases.CASES:
        wrong |= {f"{glu_case}: {name}": [text] for name, text in glu_cases.wrong(glu_case).items()}
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
