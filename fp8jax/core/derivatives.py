"""Values whose derivative would be lost in 8 bits: an exception takes the place of a gradient that is silently 0.

A cast to codes has the derivative 0 almost everywhere, and one from FP8 codes has a cotangent in FP8, which becomes NaN
beyond 448. So JAX's own rules give a gradient without a word, and no one sees that a part of the model has none.
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

# The name of a token for policies of `jax.checkpoint`: where it is not kept, what it depends on seems to be read again.
GUARD_NAME = "fp8jax_token"

CAST_TO_CODES_ERROR = (
    "a gradient through 8-bit codes would be 0: the cast to codes was differentiated, or an operation in 8 bits twice. "
    "Take fp8jax.save_quantized(x, name), whose gradient passes to x, or fp8jax.linear for a product, once; or "
    "jax.lax.stop_gradient(x) where no gradient is wanted"
)
CAST_FROM_CODES_ERROR = (
    "a gradient with respect to FP8 codes would itself be FP8, and NaN beyond its range: the cast from codes was "
    "differentiated. Differentiate with respect to the values that q.dequantize() returns"
)
SECOND_DERIVATIVE_ERROR = (
    "{} computes or saves in 8 bits and was differentiated twice: the gradient of its gradient would be 0. Give this "
    "part of the model recipe 'bf16', or differentiate it once: jax.lax.stop_gradient around an inner gradient makes "
    "it a constant for the outer one, as first-order MAML does"
)
FORWARD_MODE_ERROR = (
    "{} has a derivative in reverse mode only; jax.jvp, jax.linearize, jax.jacfwd and jax.hessian go forward. Take "
    "jax.grad, jax.vjp or jax.jacrev, or leave this part of the model as it is written"
)


def error_if_differentiated(reason: str, values: Tree, inputs: Any = ()) -> Tree:
    """`values`; raises ValueError with the reason where they, or `inputs`, are differentiated."""
    leaves, structure = jax.tree.flatten(values)
    found = _error_if_differentiated_p.bind(*leaves, *jax.tree.leaves(inputs), reason=reason, count=len(leaves))
    result: Tree = jax.tree.unflatten(structure, found)
    return result


def _raise_value_error(*_: Any, reason: str, **__: Any) -> Any:
    raise ValueError(reason)


def qualified_op_name(operation: str) -> str:
    """An operation as messages name it: with the `jax.named_scope` around it, where there is one."""
    scope = re.sub(r"\w*\(|\)", "", str(source_info_util.current_name_stack())).strip("/")  # without "jvp(...)"
    return f"{operation} in {scope!r}" if scope else operation


def differentiable_once(operation: str, values: Tree, inputs: Any = ()) -> Tree:
    """`values`, floats that an operation computes from `inputs`, and that have no derivative by these.

    The derivative may be asked for as long as it is not used, as under `jax.lax.stop_gradient`: ValueError is raised
    where a cotangent comes back to it, or where it is evaluated in forward mode. Nothing of it is in a program that
    differentiates once. `jax.vmap` maps all values where it maps one of the others.
    """
    leaves, structure = jax.tree.flatten(values)
    float_inputs = [x for x in jax.tree.leaves(inputs) if jnp.issubdtype(x.dtype, jnp.floating)]
    result: Tree = jax.tree.unflatten(
        structure, _differentiable_once_p.bind(*leaves, *float_inputs, operation=operation, count=len(leaves))
    )
    return result


def second_order_guard(operation: str, *inputs: Array | None) -> Array:
    """An array for a function with a backward pass of its own, which takes it as an operand and a residual.

    It is empty; on devices of a `jax.shard_map` it has one element. Its derivative by the inputs is as that of
    `differentiable_once`: so forward mode is told before JAX comes to the function, and a backward pass knows the
    inputs whose derivative its results have not.
    """
    # XLA for CPU crashes on empty arrays that loops pass out of a shard_map; elsewhere they cost nothing.
    size = int(bool(jax.sharding.get_abstract_mesh().manual_axes))
    empty: Array = checkpoint_name(differentiable_once(operation, jnp.zeros((size,), jnp.float32), inputs), GUARD_NAME)
    return empty


def _once_jvp(primals: Any, tangents: Any, *, count: int, **params: Any) -> tuple[Any, Any]:
    # Tangents that are 0 stand for no array; the first ones are there for their types.
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
    if all(d is None for d in dims):
        return primitive.bind(*operands, count=count, **params), [None] * count
    axis_args = axis.size, axis.explicit_mesh_axis
    operands = [batching.bdim_at_front(x, d, *axis_args) for x, d in zip(operands, dims, strict=True)]
    return primitive.bind(*operands, count=count, **params), [0] * count


def _leading_operands(*operands: Any, count: int, **_: Any) -> list[Any]:
    return list(operands[:count])


# The first operands, which have no derivative at all.
_error_if_differentiated_p = Primitive("fp8jax_refused")
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

# The first operands; and of tangents a linear map, of which no more is known than that it is not 0.
_differentiable_once_p, _forbidden_tangent_p = Primitive("fp8jax_once"), Primitive("fp8jax_lost")
for _primitive in (_differentiable_once_p, _forbidden_tangent_p):
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(_leading_operands)
batching.fancy_primitive_batchers[_differentiable_once_p] = functools.partial(_batch_once, _differentiable_once_p)
# In reverse mode it is transposed before anything is mapped.
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
    """The result of an operation, to which gradients pass: it and its inputs are floats of 16 bits or more.

    Arrays in FP8 are taken as long as nothing is differentiated.

    Raises:
        TypeError: an input is of no floating dtype.
        ValueError: an array of 8 bits is differentiated, or the result is to be no float.
    """
    dtypes = [x.dtype for x in (*inputs, result) if x is not None]
    if all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 for dtype in dtypes):
        return result
    for x in inputs:
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} takes arrays of a floating dtype, not {x.dtype}{list(x.shape)}: cast it to bf16")
    names = ", ".join(sorted({str(dtype) for dtype in dtypes}))
    reason = (
        f"{name} was differentiated in {names}: gradients in 8 bits would be 0 or NaN. Cast to bf16; to save a value "
        "in 8 bits and pass its gradient take fp8jax.save_quantized(x, name)"
    )
    return error_if_differentiated(reason, result, inputs)
