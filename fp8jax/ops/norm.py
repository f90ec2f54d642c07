"""RMSNorm and LayerNorm that keep their input in 8 bits for the backward pass (COAT, section 5.2)."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import derivatives, formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Context, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import fused
from fp8jax.ops.fused_reference import norm_cotangents, normalized, statistics
from fp8jax.ops.microscaled import ABOVE
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
    bound = None if to is None or to.folds else ResultBound.of(weight, shift, x.shape[-1], to)
    part = codes = to_scale = None
    if operation is None:
        assert context.spec is not None
        z, inverse = statistics(value, eps, centered=centered)
        stored = NormSaved(keep(z if centered else value, context.spec), inverse, weight, shift)
        y = normalized(z, inverse, weight, shift).astype(dtype)
        to_scale = None if bound is None else bound.scale_given(scaling.largest_magnitude(y))
    elif written:
        stored, _, _, y, _ = _keep(operation, value, weight, shift, context.spec, eps, None, dtype)
        y = fused.array(y, value)
    else:
        to_dtype = None if to is None else formats.get(to.format).dtype
        stored, mean, peak, codes, to_scale = _keep(operation, value, weight, shift, context.spec, eps, bound, to_dtype)
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
    origin = fused.origin(context, how, stored, part, reader, to_scale, codes)
    y = derivatives.passed("a norm", y, x, scale, bias)
    return y, again, origin


class ResultBound(NamedTuple):
    """A bound on the magnitudes of a norm's result, known before it is computed.

    No normalized value is more than the root of the channels, the norm of its row. The bound is far too large if eps is
    far above the mean squares of all rows, or if one channel has a scale far above those of the others.

    Attributes:
        largest: the bound, an fp32 scalar.
        spread: how far the largest scale is above EVEN times the geometric mean of the others, fp32, at least 1.
        spec: how the result is quantized.
    """

    largest: Array
    spread: Array
    spec: QuantSpec

    @classmethod
    def of(cls, scale: Array | None, bias: Array | None, channels: int, spec: QuantSpec) -> "ResultBound":
        root, spread = math.sqrt(channels), jnp.float32(1)
        largest = jnp.float32(root)
        if scale is not None:
            top = scaling.largest_magnitude(scale)
            largest, spread = root * top, jnp.maximum(top / (EVEN * _geometric_mean(scale)), 1.0)
        if bias is not None:
            largest = largest + scaling.largest_magnitude(bias)
        return cls(jnp.minimum(1.01 * largest, np.finfo(np.float32).max), spread, spec)

    @property
    def scale(self) -> Array:
        """The scale that the bound gives."""
        return scaling.to_scale(self.largest, formats.get(self.spec.format))

    def is_loose(self, largest: Array) -> Array:
        """Whether the scale must come from the result's largest magnitude instead: `fp8jax.core.scaling.is_loose`."""
        return scaling.is_loose(self.largest * self.spread, largest, formats.get(self.spec.format))

    def scale_given(self, largest: Array) -> Array:
        """The scale of a result whose largest magnitude is known."""
        # The input of the weight's gradient is computed again from rounded codes.
        bound = jnp.where(self.is_loose(largest), jnp.minimum(ABOVE * largest, self.largest), self.largest)
        return scaling.to_scale(bound, formats.get(self.spec.format))


# How many times their geometric mean the largest scale of a norm's channels may be before it counts as an outlier.
EVEN = 8.0


def _geometric_mean(scale: Array) -> Array:
    """That of the finite magnitudes which are not 0, an fp32 scalar; 1 if there are none."""
    magnitude = jnp.abs(scale.astype(jnp.float32))
    counts = jnp.isfinite(magnitude) & (magnitude >= formats.TINY)
    logarithms = jnp.log2(jnp.where(counts, magnitude, 1.0))
    return jnp.exp2(jnp.sum(logarithms) / jnp.maximum(jnp.sum(counts, dtype=jnp.float32), 1.0))


def _keep(
    operation: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    spec: QuantSpec | None,
    eps: float,
    bound: ResultBound | None,
    dtype: DTypeLike | None,
) -> tuple[NormSaved, Array | None, Array, Any, Array | None]:
    """What is kept, the mean of rows where the norm is centered, and of the result what follows.

    These are its largest magnitude; what is asked for in `dtype`, codes under a scale, codes and scales of rows, or the
    result itself; and the scale, if there is a bound.
    """
    from pallas_kernels import remake_triton

    # JAX keeps traced functions: `make` must not hold arrays of a trace.
    coding, to = fused.coding(spec), None if bound is None else bound.spec

    def make(on: Any, x: Array, scale: Array | None, bias: Array | None, bound: tuple[Array, Array] | None) -> Any:
        limit = None if bound is None or to is None else ResultBound(*bound, to)
        result = None if dtype is None else (None if limit is None else limit.scale, dtype)
        *kept, peak, codes = on.forward(operation, x, scale, bias, eps, coding, result=result)
        if limit is None:
            return *kept, peak, codes, None
        inverse, mean = kept[2:]
        operands = remake_triton.Operands(x, inverse=inverse, mean=mean, weight=scale, bias=bias)
        to_scale, exact = limit.scale_given(peak), operation._replace(exact=True)
        with jax.named_scope("mend"):
            codes = on.mend(exact, (remake_triton.NORM,), operands, codes, to_scale, limit.is_loose(peak))
        return *kept, peak, codes, to_scale

    codes, scales, inverse, mean, peak, result, to_scale = fused.run(
        make, fused.matrix(x), scale, bias, None if bound is None else (bound.largest, bound.spread)
    )
    of_input = x if spec is None else fused.residual(codes, scales, x, spec)
    return NormSaved(of_input, fused.array(inverse[:, None], x), scale, bias), mean, peak, result, to_scale


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
