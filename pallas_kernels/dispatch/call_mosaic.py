"""Calls of Mosaic GPU kernels, each lowered once in a process, however many products of a program are alike.

Pallas lowers a kernel in Python, which takes half a second for a product. JAX shares that among equal calls of a
module. But XLA's partitioner asks for a module for each call: a model of 16 layers took minutes to compile for two
GPUs, and each of its kernels was compiled anew. So the first lowering is recorded, which is a custom call with its
attributes, and later calls repeat it.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir


class CustomCall(NamedTuple):
    """A custom call as Pallas lowers it.

    Attributes:
        target: its name.
        attributes: its backend configuration, by name; strings as bytes, which need not be UTF-8.
    """

    target: str
    attributes: dict[str, Any]


class Kernel:
    """A kernel as a primitive's parameter, equal to others that are compiled for the same.

    Attributes:
        key: all that it is compiled for.
        program: as Pallas traces it.
    """

    def __init__(self, key: Hashable, program: Any) -> None:
        self.key, self.program = key, program

    @functools.cached_property
    def lowered(self) -> CustomCall | None:
        """As Pallas lowers it; None where that is more than a custom call of all operands."""
        return _extract_custom_call(jaxpr_as_fun(self.program), self.program.in_avals)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Kernel({self.key})"


_KERNELS: dict[Hashable, Kernel] = {}
_call = Primitive("mosaic_call")


def call(
    name: str, kernel: Callable[..., Array], operands: Sequence[Array], out: jax.ShapeDtypeStruct, static_key: Hashable
) -> Array:
    """Runs a kernel of one matrix.

    Args:
        name: of the kernel, by which reports of compiled programs know it.
        kernel: of the operands; a `plgpu.kernel`.
        operands: arrays, the first one a matrix, which no `jax.shard_map` that checks what varies knows to vary.
        out: shape and dtype of the result.
        static_key: all that the kernel is compiled for, beside the shapes and dtypes of the operands and the result.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    key = name, static_key, tuple((x.shape, str(x.dtype)) for x in (*shapes, out))
    if key not in _KERNELS:
        _KERNELS.setdefault(key, Kernel(key, jax.make_jaxpr(kernel)(*shapes)))
    bind = functools.partial(_call.bind, kernel=_KERNELS[key])
    with jax.named_scope(name):
        result: Array = jax.custom_batching.sequential_vmap(lambda *x: bind(*x))(*operands)
    return result


@_call.def_impl
@functools.partial(jax.jit, static_argnames="kernel")
def _call_impl(*operands: Array, kernel: Kernel) -> Array:
    """The kernel outside of any program: one of its own."""
    result: Array = _call.bind(*operands, kernel=kernel)
    return result


@_call.def_abstract_eval
def _call_abstract_eval(first: Any, *other_operands: Any, kernel: Kernel) -> Any:
    (out,) = kernel.program.out_avals
    # So that it lies on the mesh of the operands.
    return first.update(shape=out.shape, dtype=out.dtype, weak_type=False)


def _call_lowering(context: Any, *operands: Any, kernel: Kernel) -> Any:
    lowered = kernel.lowered
    if lowered is None:
        return mlir.lower_fun(jaxpr_as_fun(kernel.program), multiple_results=True)(context, *operands)
    return jax.ffi.ffi_lowering(lowered.target)(context, *operands, **lowered.attributes)


mlir.register_lowering(_call, _call_lowering, platform="cuda")


def _extract_custom_call(kernel: Callable[..., Any], operands: Sequence[Any]) -> CustomCall | None:
    """The custom call that a kernel is lowered to; None where it is not one of these operands, in order, alone."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    module: Any = jax.jit(kernel).trace(*shapes).lower(lowering_platforms=("cuda",)).compiler_ir()
    (main,) = (x for x in module.body.operations if getattr(x, "name", None) and x.name.value == "main")
    (block,) = main.regions[0].blocks
    calls = [x for x in block.operations if x.operation.name == "stablehlo.custom_call"]
    # Beside it stands the return alone.
    if len(calls) != 1 or len(list(block.operations)) != 2 or [*calls[0].operands] != [*block.arguments]:
        return None
    attributes = calls[0].attributes
    config = attributes["mhlo.backend_config" if "mhlo.backend_config" in attributes else "backend_config"]
    config_entries = [config[i] for i in range(len(config))]
    return CustomCall(attributes["call_target_name"].value, {x.name: _attribute_value(x.attr) for x in config_entries})


def _attribute_value(attribute: Any) -> Any:
    text = getattr(attribute, "value_bytes", None)
    return attribute.value if text is None else text
