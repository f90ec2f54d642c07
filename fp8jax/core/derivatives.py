"""Errors in place of gradients that 8-bit casts would silently make 0 or NaN.

A cast to codes has derivative 0 almost everywhere. A cast from FP8 codes has an FP8 cotangent, which is NaN beyond 448.
JAX's own rules would return these gradients without an error.
"""

import functools
import re
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Tree = TypeVar("Tree")

# `checkpoint_name` of a guard. If a policy of `jax.checkpoint` does not save it, its inputs appear to be read again.
GUARD_NAME = "fp8jax_guard"

CAST_TO_CODES_ERROR = (
    "a gradient through 8-bit codes would be 0: the cast to codes was differentiated, or an 8-bit operation was "
    "differentiated twice. Use fp8jax.save_quantized(x, name), which passes the gradient to x, or fp8jax.linear, "
    "which can be differentiated once. Use jax.lax.stop_gradient(x) if you need no gradient"
)
CAST_FROM_CODES_ERROR = (
    "a gradient with respect to FP8 codes would itself be FP8, and NaN beyond its range: the cast from codes was "
    "differentiated. Differentiate with respect to the result of q.dequantize()"
)
SECOND_DERIVATIVE_ERROR = (
    "{} computes or saves in 8 bits and was differentiated twice: the gradient of its gradient would be 0. Use the "
    "recipe 'bf16' for this part of the model, or differentiate it once. For first-order methods such as first-order "
    "MAML, apply jax.lax.stop_gradient to the inner gradient"
)
FORWARD_MODE_ERROR = (
    "{} supports reverse-mode differentiation only, but jax.jvp, jax.linearize, jax.jacfwd and jax.hessian use "
    "forward mode. Use jax.grad, jax.vjp or jax.jacrev, or do not quantize this part of the model"
)


def error_if_differentiated(reason: str, values: Tree, inputs: Any = ()) -> Tree:
    """Returns `values`; raises ValueError(reason) if they or `inputs` are differentiated."""
    leaves, structure = jax.tree.flatten(values)
    found = _error_if_differentiated_p.bind(*leaves, *jax.tree.leaves(inputs), reason=reason, count=len(leaves))
    return jax.tree.unflatten(structure, found)


def _raise_value_error(*_: Any, reason: str, **__: Any) -> Any:
    raise ValueError(reason)


def qualified_op_name(operation: str) -> str:
    """The operation's name for messages, with the surrounding `jax.named_scope` if there is one."""
    scope = re.sub(r"\w*\(|\)", "", str(source_info_util.current_name_stack())).strip("/")  # without "jvp(...)"
    return f"{operation} in {scope!r}" if scope else operation


def differentiable_once(operation: str, values: Tree, inputs: Any = ()) -> Tree:
    """Returns `values`, computed from `inputs`, and forbids their derivative with respect to `inputs`.

    ValueError is raised if a cotangent reaches that derivative, or in forward mode. A derivative that is never used is
    allowed, as under `jax.lax.stop_gradient`. The check adds nothing to a program that differentiates once. `jax.vmap`
    maps all values if it maps one operand.
    """
    leaves, structure = jax.tree.flatten(values)
    float_inputs = [x for x in jax.tree.leaves(inputs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jax.tree.unflatten(
        structure, _differentiable_once_p.bind(*leaves, *float_inputs, operation=operation, count=len(leaves))
    )


def second_order_guard(operation: str, *inputs: Array | None) -> Array:
    """An fp32 array of shape (0,), an operand and residual of a function with its own backward pass.

    Its derivative by the inputs is that of `differentiable_once`. Forward mode therefore fails before JAX reaches the
    function, and a second derivative fails in its backward pass. Inside `jax.shard_map` the shape is (1,).
    """
    # XLA on CPUs crashes if a loop returns an empty array out of a shard_map. Elsewhere empty arrays are free.
    size = int(bool(jax.sharding.get_abstract_mesh().manual_axes))
    return checkpoint_name(differentiable_once(operation, jnp.zeros((size,), jnp.float32), inputs), GUARD_NAME)


def _once_jvp(primals: Any, tangents: Any, *, count: int, **params: Any) -> tuple[Any, Any]:
    # The first tangents are needed for their types only, so zeros are instantiated. Zeros among the others are dropped.
    first = [ad.instantiate_zeros(t) for t in tangents[:count]]
    nonzero_tangents = [t for t in tangents[count:] if type(t) is not ad.Zero]
    return _differentiable_once_p.bind(*primals, count=count, **params), _forbidden_tangent_p.bind(
        *first, *nonzero_tangents, count=count, **params
    )


def _raise_forward_mode(*_: Any, operation: str, **__: Any) -> Any:
    raise ValueError(FORWARD_MODE_ERROR.format(operation))


def _forbidden_tangent_transpose(cotangents: Any, *operands: Any, operation: str, **_: Any) -> Any:
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [None] * len(operands)
    raise ValueError(SECOND_DERIVATIVE_ERROR.format(operation))


def _batch_once(primitive: Primitive, axis: Any, operands: Any, dims: Any, *, count: int, **params: Any) -> Any:
    """The batching rule of a primitive that returns its first `count` operands: the batch axis comes first in all."""
    if all(d is None for d in dims):
        return primitive.bind(*operands, count=count, **params), [None] * count
    axis_args = axis.size, axis.explicit_mesh_axis
    operands = [batching.bdim_at_front(x, d, *axis_args) for x, d in zip(operands, dims, strict=True)]
    return primitive.bind(*operands, count=count, **params), [0] * count


def _leading_operands(*operands: Any, count: int, **_: Any) -> list[Any]:
    return list(operands[:count])


# Returns its first `count` operands; differentiating any operand is an error.
_error_if_differentiated_p = Primitive("fp8jax_error_if_differentiated")
_error_if_differentiated_p.multiple_results = True
_error_if_differentiated_p.def_abstract_eval(_leading_operands)
_error_if_differentiated_p.def_impl(_leading_operands)
mlir.register_lowering(
    _error_if_differentiated_p, lambda _, *operands, **params: _leading_operands(*operands, **params)
)
batching.primitive_batchers[_error_if_differentiated_p] = lambda operands, dims, **params: (
    _error_if_differentiated_p.bind(*operands, **params),
    _leading_operands(*dims, **params),
)
ad.primitive_jvps[_error_if_differentiated_p] = _raise_value_error

# `fp8jax_differentiable_once` returns its first operands. `fp8jax_forbidden_tangent` stands for its tangent: a linear
# map, known only to be non-zero.
_differentiable_once_p, _forbidden_tangent_p = (
    Primitive("fp8jax_differentiable_once"),
    Primitive("fp8jax_forbidden_tangent"),
)
for _primitive in (_differentiable_once_p, _forbidden_tangent_p):
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(_leading_operands)
batching.fancy_primitive_batchers[_differentiable_once_p] = functools.partial(_batch_once, _differentiable_once_p)
# In reverse mode it is transposed before batching, so only forward mode gets here.
batching.fancy_primitive_batchers[_forbidden_tangent_p] = lambda _, operands, dims, **params: _raise_forward_mode(
    **params
)
_differentiable_once_p.def_impl(_leading_operands)
mlir.register_lowering(_differentiable_once_p, lambda _, *operands, **params: _leading_operands(*operands, **params))
ad.primitive_jvps[_differentiable_once_p] = _once_jvp
_forbidden_tangent_p.def_impl(_raise_forward_mode)
mlir.register_lowering(_forbidden_tangent_p, lambda _, *operands, **params: _raise_forward_mode(**params))
ad.primitive_jvps[_forbidden_tangent_p] = lambda primals, tangents, **params: _raise_forward_mode(**params)
ad.primitive_transposes[_forbidden_tangent_p] = _forbidden_tangent_transpose


def check_differentiable_dtypes(name: str, result: Array, *inputs: Array | None) -> Array:
    """Returns `result`, after checking that it and its inputs are floats of at least 16 bits.

    FP8 arrays are allowed as long as nothing is differentiated.

    Raises:
        TypeError: an input is not of a floating dtype.
        ValueError: an 8-bit array is differentiated, or a result that is not a float.
    """
    dtypes = [x.dtype for x in (*inputs, result) if x is not None]
    if all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 for dtype in dtypes):
        return result
    for x in inputs:
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{name} expects arrays with a floating-point dtype, got {x.dtype}{list(x.shape)}; cast it to bfloat16"
            )
    names = ", ".join(sorted({str(dtype) for dtype in dtypes}))
    reason = (
        f"{name} was differentiated in {names}: gradients in 8 bits would be 0 or NaN. Cast to bfloat16. To save a "
        "value in 8 bits and pass its gradient, use fp8jax.save_quantized(x, name)"
    )
    return error_if_differentiated(reason, result, inputs)
