"""Errors for arguments, parameters, gradients and states that an optimizer does not support."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor, storage_key
from fp8jax.core.spec import QuantSpec
from fp8jax.optim import moments


def as_float64(name: str, argument: Any) -> np.ndarray | None:
    """An argument in float64; None for a tracer, which has no value yet.

    Raises:
        TypeError: it is not a number.
    """
    if isinstance(argument, jax.core.Tracer):
        return None
    x = np.asarray(argument)
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{name} must be a number, not {argument!r} of type {type(argument).__name__}")
    return x.astype(np.float64)


def check_number(name: str, argument: Any, low: float = -np.inf, high: float = np.inf) -> None:
    """Raises TypeError for what is no number, and ValueError for one outside [low, high), NaN or infinite."""
    x = as_float64(name, argument)
    if x is not None and not ((x >= low) & (x < high) & np.isfinite(x)).all():
        raise ValueError(f"{name} must {'be finite' if low == -high else f'lie in [{low}, {high})'}, not {argument}")


def check_adam_constant(name: str, argument: Any, high: float = np.inf) -> None:
    """Raises TypeError or ValueError for a constant of Adam that is in 16 bits, no number, or not in [0, high).

    In bfloat16 0.999 is 1, and in float16 1e-8 is 0.
    """
    if getattr(argument, "dtype", None) in (jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{name} has dtype {argument.dtype}, which cannot represent values such as 0.999 or 1e-8. Pass it in "
            "float32, for example with optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32), whose default is "
            "the dtype of the parameters"
        )
    check_number(name, argument, 0, high)


def check_positive(name: str, argument: Any) -> None:
    """Raises TypeError for what is no number, and ValueError for one that is not above 0, such as NaN."""
    x = as_float64(name, argument)
    if x is not None and not (x > 0).all():
        raise ValueError(f"{name} must be positive, not {argument}")


def check_adamw(learning_rate: Any, b1: Any, b2: Any, eps: Any, eps_root: Any, weight_decay: Any) -> None:
    """Raises TypeError or ValueError for hyperparameters of AdamW that are not numbers or out of range."""
    for name, value, high in (("b1", b1, 1), ("b2", b2, 1), ("eps", eps, np.inf), ("eps_root", eps_root, np.inf)):
        check_adam_constant(name, value, high)
    check_learning_rate(learning_rate)
    check_number("weight_decay", weight_decay, 0)


def check_learning_rate(argument: Any) -> None:
    """Raises TypeError or ValueError for a learning rate that is neither a finite number nor a schedule."""
    if not callable(argument):
        check_number("learning_rate", argument)


def check_params(params: Any, *, only_floating: bool = True) -> None:
    """Raises TypeError for parameters that are no arrays, have 8-bit floats, or are not of a floating dtype.

    Args:
        params: tree of parameters.
        only_floating: whether other dtypes are refused.
    """
    for path, param in jax.tree_util.tree_leaves_with_path(params, is_leaf=moments.is_quantized):
        name, kind = _param_name(path), type(param).__name__
        if isinstance(param, QTensor):
            raise TypeError(f"{name} is a QTensor, which no optimizer updates; pass its dequantize() in 16 or 32 bits")
        if not hasattr(param, "dtype"):
            fix = "convert it with jnp.asarray"
            if callable(param):
                fix = "leave it out; for an Equinox model, pass equinox.filter(model, equinox.is_inexact_array)"
            raise TypeError(f"{name} is {param!r}, of type {kind}, not an array; {fix}")
        is_floating = jnp.issubdtype(param.dtype, jnp.floating)
        if is_floating and param.dtype.itemsize < 2:
            raise TypeError(
                f"{name} has dtype {param.dtype}, which loses most updates; convert it to bfloat16 or float32"
            )
        if only_floating and jnp.issubdtype(param.dtype, jnp.complexfloating):
            raise TypeError(
                f"{name} has dtype {param.dtype}; wrap the optimizer in optax.contrib.split_real_and_imaginary"
            )
        if only_floating and not is_floating:
            raise TypeError(f"{name} has dtype {param.dtype}; exclude it with optax.masked or optax.partition")


def check_state(opt_state: Any, expected: type) -> None:
    """Raises TypeError for the state of another optimizer, which may have fields of the same names."""
    if not isinstance(opt_state, expected):
        raise TypeError(
            f"the optimizer expects the state that its own `init` returns, a {expected.__name__}, got a "
            f"{type(opt_state).__name__}. Convert the state of another AdamW with fp8jax.convert_state(state, tx, "
            "params)"
        )


def check_gradients(grads: Any, moment_tree: Any) -> None:
    """Raises ValueError for gradients that are None or of another shape than their moments, TypeError if complex."""
    structure: Any
    paths, structure = jax.tree_util.tree_flatten_with_path(moment_tree, is_leaf=moments.is_quantized)
    for (path, moment), grad in zip(paths, structure.flatten_up_to(grads), strict=True):
        if grad is None:
            raise ValueError(
                f"the gradient of {_param_name(path)} is None, but the parameter has moments. Pass zeros, or exclude "
                "the parameter with optax.masked or optax.partition"
            )
        if grad.shape != moment.shape:
            raise ValueError(
                f"the gradient of {_param_name(path)} has shape {grad.shape}, but its moments have shape {moment.shape}"
            )
        check_real(path, grad)


def check_real(path: Any, grad: Any) -> None:
    """Raises TypeError for the complex gradient of a real parameter: a cast would drop the imaginary part."""
    if not isinstance(grad, QTensor) and jnp.issubdtype(grad.dtype, jnp.complexfloating):
        raise TypeError(
            f"the gradient of {_param_name(path)} is complex ({grad.dtype}), but the parameter is real; pass grad.real"
        )


def check_storage(
    name: str, path: Any, x: QTensor | Array, storage: QuantSpec | formats.Format, is_quantized: bool
) -> None:
    """Raises ValueError for a moment that is not stored as the optimizer stores it.

    Args:
        storage: the optimizer's: quantized, or cast to a plain format.
        is_quantized: whether a moment of this shape is quantized; else it is in fp32.
    """
    if isinstance(storage, formats.Format):
        expected = str(storage.dtype)
    elif isinstance(x, QTensor) or is_quantized:
        # A local shard of a quantized moment may be smaller than `min_size`.
        expected = storage_key(storage)
    else:
        expected = "float32"
    if isinstance(x, QTensor) and isinstance(storage, QuantSpec) and x.spec.expand != storage.expand:
        raise ValueError(
            f"{name} of {_param_name(path)} is stored with expand={x.spec.expand!r}, but this optimizer has "
            f"{storage.expand!r}. Convert the state with fp8jax.convert_state(state, tx, params)"
        )
    found = x.storage_key if isinstance(x, QTensor) else str(x.dtype)
    if found != expected:
        raise ValueError(
            f"{name} of {_param_name(path)} is stored as {found}, but this optimizer stores it as {expected}. Convert "
            "the state with fp8jax.convert_state(state, tx, params)"
        )


def _param_name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "the parameter"
