"""Calls of Mosaic GPU kernels, each lowered once in a process, however many products of a program are alike.

Pallas lowers a kernel in Python, which takes half a second for a product. JAX shares that among equal calls of a
module. But XLA's partitioner asks for a module for each call: a model of 16 layers took minutes to compile for two
GPUs, and each of its kernels was compiled anew. So the first lowering is recorded, which is a custom call with its
attributes, and later calls repeat it.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array

_LOCK = threading.Lock()
_RECORDS: dict[Hashable, "CustomCall | None"] = {}


class Code(bytes):
    """Bytes of a string that need not be UTF-8; a printed program has their number alone."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


class CustomCall(NamedTuple):
    """A custom call as Pallas lowers it.

    Attributes:
        target: its name.
        attributes: its backend configuration, by name.
    """

    target: str
    attributes: dict[str, Any]


def call(
    name: str, kernel: Callable[..., Array], operands: Sequence[Array], out: jax.ShapeDtypeStruct, static: Hashable
) -> Array:
    """Runs a kernel of one result.

    Args:
        name: of the kernel, by which reports of compiled programs know it.
        kernel: of the operands; a `plgpu.kernel`.
        operands: arrays, which no `jax.shard_map` that checks what varies knows to vary.
        out: shape and dtype of the result.
        static: all that the kernel is compiled for, beside the shapes and dtypes of the operands and the result.
    """
    kinds = tuple((x.shape, x.dtype) for x in operands)
    key = name, static, kinds, (out.shape, out.dtype)
    with _LOCK:
        if key not in _RECORDS:
            _RECORDS[key] = _record(kernel, [jax.ShapeDtypeStruct(*kind) for kind in kinds])
        record = _RECORDS[key]
    if record is None:
        return kernel(*operands)
    run = jax.ffi.ffi_call(record.target, out, vmap_method="sequential")
    with jax.named_scope(name):
        result: Array = run(*operands, **record.attributes)
    return result


def _record(kernel: Callable[..., Array], operands: Sequence[jax.ShapeDtypeStruct]) -> CustomCall | None:
    """The custom call that a kernel is lowered to; None where it is not one of these operands, in order, alone."""
    module: Any = jax.jit(kernel).trace(*operands).lower(lowering_platforms=("cuda",)).compiler_ir()
    (main,) = (x for x in module.body.operations if getattr(x, "name", None) and x.name.value == "main")
    (block,) = main.regions[0].blocks
    calls = [x for x in block.operations if x.operation.name == "stablehlo.custom_call"]
    # Beside it stands the return alone.
    if len(calls) != 1 or len(list(block.operations)) != 2 or [*calls[0].operands] != [*block.arguments]:
        return None
    attributes = calls[0].attributes
    config = attributes["mhlo.backend_config" if "mhlo.backend_config" in attributes else "backend_config"]
    named = [config[i] for i in range(len(config))]
    return CustomCall(attributes["call_target_name"].value, {x.name: _value(x.attr) for x in named})


def _value(attribute: Any) -> Any:
    text = getattr(attribute, "value_bytes", None)
    return attribute.value if text is None else Code(text)
