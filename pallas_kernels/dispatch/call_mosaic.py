"""Calls of Mosaic GPU kernels, lowered once per process for each kernel and shape.

Arrays and hardware are those of the kernel; its results do not change.

Pallas lowers a kernel in Python. XLA's partitioner asks for a separate module per call, so that JAX's own cache of
lowerings does not help. The first lowering is therefore recorded as a custom call, which later calls repeat.
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
        attributes: backend configuration by name; strings are bytes, not necessarily UTF-8.
    """

    target: str
    attributes: dict[str, Any]


class Kernel:
    """A kernel as a parameter of the primitive; equal to every kernel with the same key.

    Attributes:
        key: static facts for which the kernel is compiled.
    """

    def __init__(self, key: Hashable, program: Any) -> None:
        self.key, self.program = key, program

    @functools.cached_property
    def lowered(self) -> CustomCall | None:
        """The custom call; None if the lowering is more than one custom call of all operands."""
        return _extract_custom_call(jaxpr_as_fun(self.program), self.program.in_avals)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Kernel({self.key})"


_KERNELS: dict[Hashable, Kernel] = {}
_call = Primitive("mosaic_call")
_call.multiple_results = True


def call(
    name: str,
    kernel: Callable[..., Sequence[Array]],
    operands: Sequence[Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    static_key: Hashable,
) -> list[Array]:
    """Return the results of a kernel, arrays like `outs`.

    Args:
        kernel: a `plgpu.kernel`, called with the operands.
        operands: arrays, the first a matrix. None varies over a mesh axis of a `jax.shard_map` that checks it.
        static_key: what the kernel is compiled for, apart from the shapes and dtypes of operands and results.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    key = name, static_key, tuple((x.shape, str(x.dtype)) for x in (*shapes, *outs))
    if key not in _KERNELS:
        _KERNELS.setdefault(key, Kernel(key, jax.make_jaxpr(kernel)(*shapes)))
    bind = functools.partial(_call.bind, kernel=_KERNELS[key])
    with jax.named_scope(name):
        results: list[Array] = jax.custom_batching.sequential_vmap(lambda *x: bind(*x))(*operands)
    return results


@_call.def_impl
@functools.partial(jax.jit, static_argnames="kernel")
def _call_impl(*operands: Array, kernel: Kernel) -> list[Array]:
    """Return the results of a kernel that is called outside of `jax.jit`."""
    results: list[Array] = _call.bind(*operands, kernel=kernel)
    return results


@_call.def_abstract_eval
def _call_abstract_eval(first: Any, *other_operands: Any, kernel: Kernel) -> Any:
    # `update` keeps the mesh of the operand.
    return [first.update(shape=out.shape, dtype=out.dtype, weak_type=False) for out in kernel.program.out_avals]


def _call_lowering(context: Any, *operands: Any, kernel: Kernel) -> Any:
    lowered = kernel.lowered
    if lowered is None:
        return mlir.lower_fun(jaxpr_as_fun(kernel.program), multiple_results=True)(context, *operands)
    return jax.ffi.ffi_lowering(lowered.target)(context, *operands, **lowered.attributes)


mlir.register_lowering(_call, _call_lowering, platform="cuda")


def _extract_custom_call(kernel: Callable[..., Any], operands: Sequence[Any]) -> CustomCall | None:
    """Return the custom call of a kernel's lowering; None if there is more than one call of all operands in order."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    module: Any = jax.jit(kernel).trace(*shapes).lower(lowering_platforms=("cuda",)).compiler_ir()
    (main,) = (x for x in module.body.operations if getattr(x, "name", None) and x.name.value == "main")
    (block,) = main.regions[0].blocks
    calls = [x for x in block.operations if x.operation.name == "stablehlo.custom_call"]
    # The only other operation is the return.
    if len(calls) != 1 or len(list(block.operations)) != 2 or [*calls[0].operands] != [*block.arguments]:
        return None
    attributes = calls[0].attributes
    config = attributes["mhlo.backend_config" if "mhlo.backend_config" in attributes else "backend_config"]
    config_entries = [config[i] for i in range(len(config))]
    return CustomCall(attributes["call_target_name"].value, {x.name: _attribute_value(x.attr) for x in config_entries})


def _attribute_value(attribute: Any) -> Any:
    text = getattr(attribute, "value_bytes", None)
    return attribute.value if text is None else text
