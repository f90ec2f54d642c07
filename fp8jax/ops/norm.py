"""RMSNorm and LayerNorm that keep their input in 8 bits for the backward pass (COAT, section 5.2)."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import derivatives, formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Context, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import fused
from fp8jax.ops.fused_reference import Result, norm_cotangents, normalized, statistics
from fp8jax.ops.saveable import BESIDE, NORM, named
from fp8jax.ops.saved import NOTHING, Gradient, Made, Origin, decode, differentiable, keep
from fp8jax.recipes import context_part


def rms_norm(
    x: Array,
    scale: Array | None = None,
    *,
    recipe: Recipe | Context | str,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang and Sennrich, 2019).

    Forward it is exact, in fp32; the backward pass reads the codes of `x` and the fp32 root of each row. Where inputs
    are kept as they are JAX differentiates. `norm_linear` is a norm with the layers that read it, which keep less.

    Args:
        x: (..., channels), any floating dtype.
        scale: (channels,), or None.
        recipe: a `Recipe`, its part `Context`, or a name.
        eps: added to the mean square.
        dtype: of the result; that of `x` if None.

    Returns:
        (..., channels). Gradients have the dtypes of what they are gradients of.

    Raises:
        ValueError: the shapes do not match.
    """
    return normalize(x, scale, None, context_part(recipe), eps, dtype, centered=False)[0]


def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    recipe: Recipe | Context | str,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
) -> Array:
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + bias over the last axis (Ba et al., 2016).

    Forward it is exact, in fp32; the backward pass reads the codes of `x - mean(x)`, whose error unlike that of codes
    of `x` does not grow with the mean, and the fp32 root of each row.

    Args:
        x: (..., channels), any floating dtype.
        scale: (channels,), or None.
        bias: (channels,), or None.
        eps: added to the variance.
        recipe, dtype: as of `rms_norm`.

    Returns, raises: as `rms_norm`.
    """
    return normalize(x, scale, bias, context_part(recipe), eps, dtype, centered=True)[0]


class NormSaved(NamedTuple):
    """What a norm saves: the codes of its (centered) input, 1 / root of each row, fp32 (..., 1), and its parameters.

    Where inputs are kept as they are, the input in place of its codes.
    """

    codes: QTensor | Array
    inverse: Array
    scale: Array | None
    bias: Array | None


@dataclasses.dataclass(frozen=True)
class Norm:
    """How a norm goes back: `fp8jax.ops.saved.Remade`."""

    centered: bool
    dtype: DTypeLike

    def again(self, saved: NormSaved, gradient: Gradient) -> Made:
        z, mean = self._input(saved)
        y = normalized(z, saved.inverse, saved.scale, saved.bias).astype(self.dtype)
        operation, part = self._fused(saved, y), None
        if operation is not None:
            parts = fused.stored(saved.codes)
            (part,) = _result(operation, parts, saved.inverse, mean, saved.scale, saved.bias, None).parts
        return Made(y, part)

    def backward(
        self, saved: NormSaved, dy: Array, dtypes: tuple[DTypeLike | None, ...], others: Array | None, foreseen: Any
    ) -> tuple[tuple[Array | None, ...], tuple[Origin, ...]]:
        operation = self._fused(saved, dy, fp8=isinstance(saved.codes, Array) or not saved.codes.spec.packed)
        if operation is None:
            how = {"centered": self.centered, "biased": saved.bias is not None}
            dx, *sums = norm_cotangents(self._input(saved)[0], saved.inverse, saved.scale, dy, **how)
            return _cast((dx if others is None else dx + others.astype(jnp.float32), *sums), dtypes), ()

        operands = (*fused.stored(saved.codes), saved.inverse.reshape(-1), saved.scale, fused.matrix(dy))
        rest = None if others is None else fused.matrix(others)
        dx, *sums, peak = fused.run(
            lambda on, *arrays: on.backward(operation, *arrays[:-1], dtypes[0], arrays[-1]), *operands, rest
        )
        return _cast((fused.array(dx, dy), *sums), dtypes), (Origin(peak=peak),)

    def _input(self, saved: NormSaved) -> tuple[Array, Array | None]:
        """The input, centered where the norm is, and its mean where that is not taken from what is saved."""
        z = decode(saved.codes)
        if not (self.centered and isinstance(saved.codes, Array)):
            return z, None
        mean = jnp.mean(z, -1, keepdims=True)
        return z - mean, mean

    def _fused(self, saved: NormSaved, like: Array, *, fp8: bool = True) -> Any:
        fields = {"scaled": saved.scale is not None, "biased": saved.bias is not None}
        spec = None if isinstance(saved.codes, Array) else saved.codes.spec
        return fused.operation(like, spec, self.dtype, norm=True, fp8=fp8, centered=self.centered, **fields)


def normalize(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    recipe: Recipe | Context | str,
    eps: float,
    dtype: DTypeLike | None,
    *,
    centered: bool,
    residual: bool = False,
) -> tuple[Array, Array | None, Origin]:
    """A norm's result, and what it is made from; between them `x` for its other readers, if `residual`.

    The norm adds the gradients of those to its own.
    """
    for name, parameter in (("scale", scale), ("bias", bias)):
        if x.ndim < 1 or (parameter is not None and parameter.shape != x.shape[-1:]):
            shape = None if parameter is None else parameter.shape
            raise ValueError(f"a norm takes (..., channels) and {name} (channels,), not {x.shape} and {shape}")
    dtype, context, reader = jnp.dtype(x.dtype if dtype is None else dtype), context_part(recipe), fused.reader(recipe)
    operation, written = None, fused.written(recipe)
    if context.spec is not None or fused.at_once(recipe):
        fields = {"scaled": scale is not None, "biased": bias is not None, "centered": centered}
        operation = fused.operation(x, context.spec, dtype, norm=True, forward=True, fp8=not written, **fields)
    if context.spec is None and operation is None:
        z, inverse = statistics(x, eps, centered=centered)
        y = normalized(z, inverse, scale, bias).astype(dtype)
        return derivatives.passed("a norm", y, x, scale, bias), x if residual else None, NOTHING
    value, weight, shift = lax.stop_gradient((x, scale, bias))
    to = None if reader is None else reader.spec("x")
    bound = None if to is None or to.folds else _bound(weight, shift, x.shape[-1], to)
    part = codes = None
    if operation is None:
        assert context.spec is not None
        z, inverse = statistics(value, eps, centered=centered)
        stored = NormSaved(keep(z if centered else value, context.spec), inverse, weight, shift)
        y = normalized(z, inverse, weight, shift).astype(dtype)
    elif written:
        stored, _, _, y = _keep(operation, value, weight, shift, context.spec, eps, (None, dtype))
        y = fused.array(y, value)
    else:
        ahead = None if to is None else (bound, formats.get(to.format).dtype)
        stored, mean, peak, codes = _keep(operation, value, weight, shift, context.spec, eps, ahead)
        z, inverse = value.astype(jnp.float32), stored.inverse
        if mean is not None:
            z = z - mean.reshape(inverse.shape)
        exact = operation._replace(exact=True)
        (part,) = _result(exact, (fused.matrix(value), None), inverse, mean, weight, shift, peak).parts
        y = normalized(z, inverse, weight, shift).astype(dtype)
    if context.spec is None:
        stored = stored._replace(inverse=named(stored.inverse, BESIDE))
    else:
        stored = stored._replace(codes=named(stored.codes, NORM), inverse=named(stored.inverse, NORM))
    how = Norm(centered, dtype)
    y, again = differentiable(how, (x, scale, bias), stored, y, residual=residual, name="a norm")
    origin = fused.origin(context, how, stored, part, reader, bound, codes)
    y = derivatives.passed("a norm", y, x, scale, bias)
    return y, again, origin


def _bound(scale: Array | None, bias: Array | None, channels: int, to: QuantSpec) -> Array:
    """The scale of a norm's result from a bound on it: no value of a row is more than the root of all their squares."""
    bound = math.sqrt(channels) * (jnp.float32(1) if scale is None else scaling.largest_magnitude(scale))
    if bias is not None:
        bound = bound + scaling.largest_magnitude(bias)
    bound = jnp.minimum(1.01 * bound, np.finfo(np.float32).max)
    return scaling.to_scale(bound, formats.get(to.format))


def _keep(
    operation: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    spec: QuantSpec | None,
    eps: float,
    to: Result,
) -> tuple[NormSaved, Array | None, Array, Any]:
    """What is kept, the mean of rows where the norm is centered, the result's largest magnitude, and what `to` asks."""
    coding, (to_scale, dtype) = fused.coding(spec), to or (None, None)
    codes, scales, inverse, mean, peak, result = fused.run(
        lambda on, *arrays: on.forward(
            operation, *arrays[:-1], eps, coding, result=None if dtype is None else (arrays[-1], dtype)
        ),
        fused.matrix(x), scale, bias, to_scale,
    )  # fmt: skip
    of_input = x if spec is None else fused.residual(codes, scales, x, spec)
    return NormSaved(of_input, fused.array(inverse[:, None], x), scale, bias), mean, peak, result


def _result(
    operation: Any,
    parts: tuple[Array, Array | None],
    inverse: Array,
    mean: Array | None,
    scale: Array | None,
    bias: Array | None,
    peak: Array | None,
) -> fused.Computation:
    from pallas_kernels import remake_triton

    rows = {"inverse": inverse.reshape(-1), "mean": None if mean is None else mean.reshape(-1)}
    operands = remake_triton.Operands(parts[0], parts[1], weight=scale, bias=bias, **rows)
    return fused.Computation(operation, (remake_triton.NORM,), operands, () if peak is None else (peak,))


def _cast(cotangents: tuple[Array | None, ...], dtypes: tuple[DTypeLike | None, ...]) -> Any:
    return tuple(None if ct is None else ct.astype(dtype) for ct, dtype in zip(cotangents, dtypes, strict=True))
