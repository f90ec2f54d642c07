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
TOKEN = "fp8jax_token"

CODES = (
    "a gradient through 8-bit codes would be 0: the cast to codes was differentiated, or an operation in 8 bits twice. "
    "Take fp8jax.saveable(x, name), whose gradient passes to x, or fp8jax.linear for a product, once; or "
    "jax.lax.stop_gradient(x) where no gradient is wanted"
)
VALUES = (
    "a gradient with respect to FP8 codes would itself be FP8, and NaN beyond its range: the cast from codes was "
    "differentiated. Differentiate with respect to the values that q.dequantize() returns"
)
TWICE = (
    "{} computes or saves in 8 bits and was differentiated twice: the gradient of its gradient would be 0. Give this "
    "part of the model recipe 'bf16', or differentiate it once: jax.lax.stop_gradient around an inner gradient makes "
    "it a constant for the outer one, as first-order MAML does"
)
FORWARD = (
    "{} has a derivative in reverse mode only; jax.jvp, jax.linearize, jax.jacfwd and jax.hessian go forward. Take "
    "jax.grad, jax.vjp or jax.jacrev, or leave this part of the model as it is written"
)


def refuse(reason: str, values: Tree, others: Any = ()) -> Tree:
    """`values`; raises ValueError with the reason where they, or `others`, are differentiated."""
    leaves, structure = jax.tree.flatten(values)
    found = _refused.bind(*leaves, *jax.tree.leaves(others), reason=reason, count=len(leaves))
    result: Tree = jax.tree.unflatten(structure, found)
    return result


def _refuse(*_: Any, reason: str, **__: Any) -> Any:
    raise ValueError(reason)


def named(operation: str) -> str:
    """An operation as messages name it: with the `jax.named_scope` around it, where there is one."""
    scope = re.sub(r"\w*\(|\)", "", str(source_info_util.current_name_stack())).strip("/")  # without "jvp(...)"
    return f"{operation} in {scope!r}" if scope else operation


def once(operation: str, values: Tree, others: Any = ()) -> Tree:
    """`values`, floats that an operation computes from `others`, and that have no derivative by these.

    The derivative may be asked for as long as it is not used, as under `jax.lax.stop_gradient`: ValueError is raised
    where a cotangent comes back to it, or where it is evaluated in forward mode. Nothing of it is in a program that
    differentiates once. `jax.vmap` maps all values where it maps one of the others.
    """
    leaves, structure = jax.tree.flatten(values)
    rest = [x for x in jax.tree.leaves(others) if jnp.issubdtype(x.dtype, jnp.floating)]
    result: Tree = jax.tree.unflatten(structure, _once.bind(*leaves, *rest, operation=operation, count=len(leaves)))
    return result


def token(operation: str, *inputs: Array | None) -> Array:
    """An array for a function with a backward pass of its own, which takes it as an operand and a residual.

    It is empty; on devices of a `jax.shard_map` it has one element. Its derivative by the inputs is as that of `once`:
    so forward mode is told before JAX comes to the function, and a backward pass knows the inputs whose derivative its
    results have not.
    """
    # XLA for CPU crashes on empty arrays that loops pass out of a shard_map; elsewhere they cost nothing.
    size = int(bool(jax.sharding.get_abstract_mesh().manual_axes))
    empty: Array = checkpoint_name(once(operation, jnp.zeros((size,), jnp.float32), inputs), TOKEN)
    return empty


def _differentiated(primals: Any, tangents: Any, *, count: int, **how: Any) -> tuple[Any, Any]:
    # Tangents that are 0 stand for no array; the first ones are there for their types.
    first = [ad.instantiate_zeros(t) for t in tangents[:count]]
    others = [t for t in tangents[count:] if type(t) is not ad.Zero]
    return _once.bind(*primals, count=count, **how), _lost.bind(*first, *others, count=count, **how)


def _never(*_: Any, operation: str, **__: Any) -> Any:
    raise ValueError(FORWARD.format(operation))


def _transposed(cotangents: Any, *operands: Any, operation: str, **_: Any) -> Any:
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [None] * len(operands)
    raise ValueError(TWICE.format(operation))


def _batched(primitive: Primitive, axis: Any, operands: Any, dims: Any, *, count: int, **how: Any) -> Any:
    if all(d is None for d in dims):
        return primitive.bind(*operands, count=count, **how), [None] * count
    place = axis.size, axis.explicit_mesh_axis
    operands = [batching.bdim_at_front(x, d, *place) for x, d in zip(operands, dims, strict=True)]
    return primitive.bind(*operands, count=count, **how), [0] * count


def _first(*operands: Any, count: int, **_: Any) -> list[Any]:
    return list(operands[:count])


# The first operands, which have no derivative at all.
_refused = Primitive("fp8jax_refused")
_refused.multiple_results = True
_refused.def_abstract_eval(_first)
_refused.def_impl(_first)
mlir.register_lowering(_refused, lambda _, *operands, **how: _first(*operands, **how))
batching.primitive_batchers[_refused] = lambda operands, dims, **how: (
    _refused.bind(*operands, **how),
    _first(*dims, **how),
)
ad.primitive_jvps[_refused] = _refuse

# The first operands; and of tangents a linear map, of which no more is known than that it is not 0.
_once, _lost = Primitive("fp8jax_once"), Primitive("fp8jax_lost")
for _primitive in (_once, _lost):
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(_first)
batching.fancy_primitive_batchers[_once] = functools.partial(_batched, _once)
# In reverse mode it is transposed before anything is mapped.
batching.fancy_primitive_batchers[_lost] = lambda _, operands, dims, **how: _never(**how)
_once.def_impl(_first)
mlir.register_lowering(_once, lambda _, *operands, **how: _first(*operands, **how))
ad.primitive_jvps[_once] = _differentiated
_lost.def_impl(_never)
mlir.register_lowering(_lost, lambda _, *operands, **how: _never(**how))
ad.primitive_jvps[_lost] = lambda primals, tangents, **how: _never(**how)
ad.primitive_transposes[_lost] = _transposed


def passed(name: str, result: Array, *inputs: Array | None) -> Array:
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
        "in 8 bits and pass its gradient take fp8jax.saveable(x, name)"
    )
    return refuse(reason, result, inputs)
