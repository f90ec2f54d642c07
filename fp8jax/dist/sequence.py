"""Activations at the boundary of tensor and sequence parallelism, sent as codes (FP8-LM, figure 2).

Between the linear layers of a block, each device has a shard of the sequence. Within them, it has a shard of the
channels.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax import recipes
from fp8jax.core import blocks, formats, scaling
from fp8jax.core.qtensor import QTensor, from_bytes, to_bytes
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.core.scaling import Current, Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.dist import manual, shared_scales
from fp8jax.dist.collectives import HLO_NAMES, Collective
from fp8jax.ops.autodiff.residuals import NO_FACTS, ArrayFacts
from fp8jax.ops.products.linear import linears, require_stateless
from fp8jax.ops.products.weights import QuantizedWeight
from fp8jax.ops.quantization.microscaling import fold_rows
from fp8jax.ops.quantization.quantize import quantize

WireFormatLike = QuantSpec | Recipe | Linear | str

UNQUANTIZED_DTYPES = ("bf16", "fp16", "fp32")


class WireFormat(NamedTuple):
    """The format of an array on the wire.

    Attributes:
        spec: `QuantSpec` of its codes; None for a plain dtype.
        dtype: name of the plain dtype; None for the array's own.
        strategy: scaling of granularity "tensor".
    """

    spec: QuantSpec | None
    dtype: str | None = None
    strategy: Scaling = Current()

    def cast(self, x: Array) -> Array:
        """The array in the plain dtype."""
        return x if self.dtype is None else x.astype(formats.get(self.dtype).dtype)


def operand_wire_format(caller: str, wire_format: WireFormatLike, operand: str) -> WireFormat:
    """The wire format of a product's operand, "x" or "dy": as the product quantizes it."""
    resolved = _resolve(wire_format)
    if isinstance(resolved, Linear):
        spec = resolved.spec(operand)
        # The product itself rounds stochastically: rounding twice would be biased or noisier. Codes of 4 bits have a
        # scale of the tensor above those of groups, which shards do not have.
        if spec is None or spec.rounding == "stochastic" or spec.is_packed:
            return WireFormat(None)
        return WireFormat(spec, strategy=resolved.stateless_strategy(operand))
    if isinstance(resolved, QuantSpec):
        _check_wire_spec(caller, resolved)
        return WireFormat(resolved)
    return WireFormat(None, resolved)


def sum_wire_format(caller: str, wire_format: WireFormatLike) -> WireFormat:
    """The wire format of the terms of a sum: with scales that devices share."""
    resolved = _resolve(wire_format)
    if isinstance(resolved, Linear):
        spec = resolved.spec("x")
        return WireFormat(None if spec is None or spec.is_packed else QuantSpec(spec.format, "token"))
    if isinstance(resolved, QuantSpec):
        _check_wire_spec(caller, resolved)
        is_summable = resolved.granularity in ("tensor", "token", "group") and resolved.scale_format == "fp32"
        return WireFormat(resolved if is_summable else QuantSpec(resolved.format, "token"))
    return WireFormat(None, resolved)


def _resolve(wire_format: WireFormatLike) -> QuantSpec | Linear | str:
    if isinstance(wire_format, str) and wire_format in UNQUANTIZED_DTYPES:
        return wire_format
    if isinstance(wire_format, QuantSpec) or (
        isinstance(wire_format, str) and wire_format not in (*recipes.NAMES, recipes.AUTO)
    ):
        return QuantSpec.parse(wire_format)
    try:
        return require_stateless(wire_format)
    except ValueError as error:
        raise ValueError(f"{error}. The wire format 'bf16' needs no state") from None


def _check_wire_spec(caller: str, spec: QuantSpec) -> None:
    """Raises ValueError for a spec that cannot be a wire format."""
    has_default_layout = (spec.expand, spec.layer_axes, spec.rounding, spec.axis) == (False, 0, "nearest", -1)
    if not formats.get(spec.format).is_matmul_format or spec.granularity == "channel" or not has_default_layout:
        raise ValueError(
            f"{caller}: {spec} is not a supported wire format. Use a matmul format that rounds to nearest, with "
            "scales per tensor, token, group or block along the channels, such as 'e4m3' or 'e4m3:group128', or use "
            "'bf16'"
        )


_ADVICE = (
    "Map the block over the mesh: jax.shard_map(block, mesh=mesh, in_specs=..., out_specs=P(None, {axes})). Under jit "
    "alone, apply jax.lax.with_sharding_constraint to the codes: first with the sharded layout, then with the "
    "gathered one"
)


def gather_sequence(
    x: Array,
    axes: manual.Axes,
    wire_format: WireFormatLike = "e4m3",
    *,
    gradients: WireFormatLike | None = None,
    dim: int = -2,
) -> Array:
    """The whole sequence from each device's shard, which is sent as codes; call it inside `jax.shard_map`.

    Every device quantizes its shard under the scales of the whole, as a product of the whole would. The codes therefore
    do not depend on the number of devices. The decoded values are rounded once. Products of the recipe in `wire_format`
    round them to the same codes again; `gather_linear` reads the codes themselves. In the backward pass the devices'
    partial gradients are summed as by `scatter_sequence`.

    A scale that spans tokens spans the whole sequence along `axes`. Along other mesh axes, such as data, devices have
    their own scales, as products inside `jax.shard_map` have.

    Args:
        x: (..., tokens, channels), a device's shard, of any floating dtype.
        axes: name or names of the mesh axes that shard the sequence.
        wire_format: format on the wire: a `QuantSpec` or its string form; a recipe, for its linear layers' inputs; or
            "bf16" or "fp32". A recipe that does not quantize inputs, or has 4-bit codes, uses the dtype of `x`.
        gradients: wire format of partial gradients, as for `scatter_sequence`; None uses that of `wire_format` there.
        dim: the sharded dimension; not the channels.

    Returns:
        (..., all tokens, channels) in the dtype of `x`.

    Raises:
        ValueError: outside of `jax.shard_map`; a spec that cannot be a wire format; a shard ends within a block; or the
            recipe's scaling of inputs has state.

    Examples:
        >>> import fp8jax, jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def perceptron(x, up, down):  # x (batch, tokens, channels), sharded along tokens; weights along `inner`
        ...     (h,) = fp8jax.dist.gather_linear(x, [up], "tensor", recipe="te_current")
        ...     y = fp8jax.linear(jax.nn.gelu(h), down, recipe="te_current")  # each device's part of the sum
        ...     return x + fp8jax.dist.scatter_sequence(y, "tensor", "te_current")
        >>> specs = jax.P(None, "tensor"), jax.P(None, "tensor"), jax.P("tensor")
        >>> run = jax.shard_map(perceptron, mesh=mesh, in_specs=specs, out_specs=specs[0])
        >>> jax.jit(run)(jnp.ones((2, 64, 32)), jnp.ones((32, 128)), jnp.ones((128, 32))).shape
        (2, 64, 32)
    """
    return _gather_with_codes("gather_sequence", x, axes, wire_format, gradients, dim)[0]


def gather_linear(
    x: Array,
    weights: list[Array] | tuple[Array, ...],
    axes: manual.Axes,
    *,
    recipe: Recipe | Linear | str,
    gradients: WireFormatLike | None = None,
    dim: int = -2,
    key: Array | None = None,
    quantized: list[QuantizedWeight] | tuple[QuantizedWeight, ...] | None = None,
) -> tuple[Array, ...]:
    """Linear layers of the whole sequence, such as q, k and v, with weights sharded over their outputs.

    It equals `gather_sequence` followed by `fp8jax.linear`, but the products read the gathered codes. Nothing is
    quantized twice, and the 16-bit whole is never written. The gradients of `x` of all layers are summed, then sent.

    If the recipe saves inputs as codes, those of the whole sequence are residuals; under `jax.checkpoint` they are
    gathered again.

    Args:
        x: (..., tokens, channels), a device's shard.
        weights: (channels, outputs) each, a device's columns.
        axes: name or names of the mesh axes that shard the sequence.
        recipe: recipe of the products and of the wire format.
        gradients, dim: as for `gather_sequence`.
        key: PRNG key for recipes that round stochastically.
        quantized: result of `fp8jax.quantize_weight` for each weight; None quantizes them in this call.

    Returns:
        (..., all tokens, outputs) for each weight, in the dtype of `x`.

    Raises:
        ValueError: as for `gather_sequence` and `fp8jax.linear`; or `quantized` has another length than `weights`.
    """
    linear = require_stateless(recipe)
    gathered, codes = _gather_with_codes("gather_linear", x, axes, linear, gradients, dim)
    facts = NO_FACTS if codes is None else ArrayFacts(codes=codes)
    return linears(gathered, weights, recipe=linear, facts=facts, key=key, quantized=quantized)


def scatter_sequence(
    x: Array,
    axes: manual.Axes,
    wire_format: WireFormatLike = "e4m3:token",
    *,
    gradients: WireFormatLike | None = None,
    dim: int = -2,
) -> Array:
    """Returns a device's shard, along the sequence, of a sum over devices. The terms are sent as codes. Call it inside
    `jax.shard_map`.

    If the contraction of a product is sharded, each device has one term of the sum. All devices quantize theirs under
    shared scales, from the largest amax of any device. Each device receives the codes of its shard of the sequence, and
    sums them in fp32. Sums cannot saturate and are not rounded to 8 bits. In the backward pass the gradient of the
    shard is gathered as by `gather_sequence`, in the format of the preceding product's gradient.

    Args:
        x: (..., all tokens, channels), each device's term of the sum.
        axes: name or names of the mesh axes to sum and scatter over.
        wire_format: format on the wire: a `QuantSpec` of granularity "tensor", "token" or "group", or its string form;
            a recipe, for the format of its linear layers' inputs with a scale per token; or "bf16" or "fp32", for sums
            of that dtype. A recipe that does not quantize inputs, or has 4-bit codes, uses the dtype of `x`.
        gradients: wire format of the gradient, as `wire_format` of `gather_sequence`. None uses a recipe's own for
            gradients (unquantized if it rounds stochastically), and `wire_format` otherwise.
        dim: the scattered dimension; not the channels.

    Returns:
        (..., tokens, channels) in the dtype of `x`.

    Raises:
        ValueError: as for `gather_sequence`; or the devices do not divide the dimension.
    """
    caller, names = "scatter_sequence", manual.axis_names(axes)
    devices, dim = manual.check_manual_axes(caller, axes, (), _ADVICE), _normalize_dim(caller, x, dim)
    if x.shape[dim] % devices:
        raise ValueError(
            f"{caller}: {devices} devices do not divide dimension {dim} of an array {x.shape}; pad the sequence"
        )
    backward_format = operand_wire_format(caller, wire_format if gradients is None else gradients, "dy")
    _check_shard_blocks(caller, backward_format, x.shape[dim] // devices, dim, x.ndim)
    return _scatter((names, dim, sum_wire_format(caller, wire_format), backward_format), x)


class _GatherConfig(NamedTuple):
    axes: tuple[str, ...]
    dim: int
    forward_format: WireFormat
    backward_format: WireFormat
    dtype: Any
    shape: tuple[int, ...]


def _gather_with_codes(
    caller: str,
    x: Array,
    axes: manual.Axes,
    wire_format: WireFormatLike,
    gradients: WireFormatLike | None,
    dim: int,
) -> tuple[Array, tuple[QuantSpec, QTensor] | None]:
    """The whole array; and its spec with its codes as bytes, or None if no codes were sent."""
    devices, dim = manual.check_manual_axes(caller, axes, (), _ADVICE), _normalize_dim(caller, x, dim)
    forward_format = operand_wire_format(caller, wire_format, "x")
    backward_format = sum_wire_format(caller, wire_format if gradients is None else gradients)
    _check_shard_blocks(caller, forward_format, x.shape[dim], dim, x.ndim)
    names, shape = manual.axis_names(axes), tuple(n * devices if i == dim else n for i, n in enumerate(x.shape))
    codes = None
    if forward_format.spec is not None:
        shard = _quantize_shard(lax.stop_gradient(x), forward_format, names)
        codes = forward_format.spec, _gather_codes(shard, x.shape, names, dim)
    static = _GatherConfig(names, dim, forward_format, backward_format, x.dtype, shape)
    gathered: Array = _gather(static, x, codes and codes[1])
    return gathered, codes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(static: _GatherConfig, x: Array, q: QTensor | None) -> Array:
    if q is None:
        return lax.all_gather(static.forward_format.cast(x), static.axes, axis=static.dim, tiled=True).astype(x.dtype)
    return from_bytes(q).dequantize(static.dtype).reshape(static.shape)


def _gather_backward(static: _GatherConfig, _: None, dy: Array) -> tuple[Array, None]:
    return _reduce_scatter(dy, static.backward_format, static.axes, static.dim).astype(static.dtype), None


_gather.defvjp(lambda static, x, q: (_gather(static, x, q), None), _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(static: tuple[tuple[str, ...], int, WireFormat, WireFormat], x: Array) -> Array:
    axes, dim, wire_format, _ = static
    return _reduce_scatter(x, wire_format, axes, dim)


def _scatter_backward(static: Any, _: None, dy: Array) -> tuple[Array]:
    axes, dim, _, backward_format = static
    if backward_format.spec is None:
        return (lax.all_gather(backward_format.cast(dy), axes, axis=dim, tiled=True).astype(dy.dtype),)
    q = from_bytes(_gather_codes(_quantize_shard(dy, backward_format, axes), dy.shape, axes, dim))
    shape = tuple(n * lax.axis_size(axes) if i == dim else n for i, n in enumerate(dy.shape))
    return (q.dequantize(dy.dtype).reshape(shape),)


_scatter.defvjp(lambda static, x: (_scatter(static, x), None), _scatter_backward)


def _reduce_scatter(x: Array, wire_format: WireFormat, axes: tuple[str, ...], dim: int) -> Array:
    """A device's shard, along `dim`, of the sum over all devices; it is sent in the wire format."""
    if wire_format.spec is None:
        return lax.psum_scatter(wire_format.cast(x), axes, scatter_dimension=dim, tiled=True).astype(x.dtype)
    (scale,) = shared_scales.shared_scales([x], [wire_format.spec], axes)
    return shared_scales.reduce_scatter_codes(x, wire_format.spec, scale, axes, dim).astype(x.dtype)


def _quantize_shard(x: Array, wire_format: WireFormat, axes: tuple[str, ...]) -> QTensor:
    """The codes of a device's shard, as bytes, (tokens, channels): equal to those in a product of the whole."""
    spec, matrix = wire_format.spec, x.reshape(-1, x.shape[-1])
    assert spec is not None
    fmt, scale = formats.get(spec.format), None
    granularity = spec.outer_scale if spec.granularity == "mx" else spec.granularity
    if granularity == "tensor":
        amax = scaling.compute_amax(matrix)
        if fmt.inf is None:  # put NaN into the scale as Inf: NCCL's maxima ignore NaN
            amax = jnp.where(jnp.all(jnp.isfinite(matrix)), amax, jnp.inf)
        (amax,) = shared_scales.pmax_arrays([amax], axes)
        scale = shared_scales.to_scale(jnp.where(jnp.isinf(amax), amax, wire_format.strategy.reduce_amax(amax)), fmt)
    if spec.is_folded:
        rows = None if scale is None else jnp.broadcast_to(scale, (matrix.shape[0], 1))
        return to_bytes(fold_rows(matrix, spec, rows))
    q = quantize(matrix, spec, scale=scale)[0]
    assert q is not None
    return to_bytes(q)


def _gather_codes(q: QTensor, shape: tuple[int, ...], axes: tuple[str, ...], dim: int) -> QTensor:
    """The codes of the whole, (all tokens, channels), from those of each device's shard of this shape."""

    def gather(x: Array) -> Array:
        shard = x.reshape(*shape[:-2], -1, x.shape[-1])
        return lax.all_gather(shard, axes, axis=dim, tiled=True).reshape(-1, x.shape[-1])

    is_per_tensor = q.spec.granularity == "tensor" or (q.spec.granularity == "mx" and q.spec.outer_scale != "token")
    scale, micro = q.scale if is_per_tensor else gather(q.scale), None if q.microscale is None else gather(q.microscale)
    return QTensor(gather(q.codes), scale, None, micro, q.spec)


def _normalize_dim(caller: str, x: Array, dim: int) -> int:
    if x.ndim < 2 or not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        raise ValueError(
            f"{caller} splits a dimension before the last one (channels), not dimension {dim} of an array {x.shape}"
        )
    return dim % x.ndim


def _check_shard_blocks(caller: str, wire_format: WireFormat, length: int, dim: int, ndim: int) -> None:
    """Raises ValueError if a device's shard ends within a block."""
    if wire_format.spec is None or wire_format.spec.granularity != "block":
        return
    assert wire_format.spec.group_size is not None
    if dim != ndim - 2 or length % wire_format.spec.group_size:
        raise ValueError(
            f"{caller}: shards of length {length} along dimension {dim} are not a multiple of the block of "
            f"{wire_format.spec}. Split dimension -2 at multiples of {wire_format.spec.group_size}, or use the wire "
            "format 'bf16'"
        )


CALLER = "sequence_collectives"


def sequence_collectives(
    tokens: int,
    width: int,
    devices: int,
    wire_format: WireFormatLike,
    dtype: str = "bf16",
    *,
    times: int = 1,
    forward_gathers: int = 1,
) -> list[Collective]:
    """The collectives of one `gather_sequence` and one `scatter_sequence`, forward and backward.

    Scalars, such as the amax of a tensor, are left out.

    Args:
        tokens, width: shape of the whole array.
        devices: number of devices that shard the tokens.
        wire_format: wire format, as for both functions.
        dtype: dtype of the array.
        times: number of calls of each.
        forward_gathers: number of forward gathers: 2 if the backward pass gathers again.

    Raises:
        ValueError: as for both functions.
    """
    forward_format, backward_format = (operand_wire_format(CALLER, wire_format, operand) for operand in ("x", "dy"))
    sum_format = sum_wire_format(CALLER, wire_format)
    result = []
    for operand, count in ((forward_format, forward_gathers * times), (backward_format, times)):
        result += [
            one._replace(times=count) for one in _gather_collectives(tokens // devices, width, devices, operand, dtype)
        ]
    return result + [
        one._replace(times=2 * times) for one in _sum_collectives(tokens, width, devices, sum_format, dtype)
    ]


def _gather_collectives(tokens: int, width: int, devices: int, wire_format: WireFormat, dtype: str) -> list[Collective]:
    """The collectives of a gather; `tokens` are those of one device's shard."""
    spec, size = wire_format.spec, tokens * width
    if spec is None:
        dtype_name = wire_format.dtype or dtype
        return [Collective("all-gather", HLO_NAMES[dtype_name], size * _itemsize(dtype_name), devices)]
    scales, codes = _scale_count(spec, tokens, width), size
    if spec.granularity == "mx" and not spec.is_folded:
        codes += math.prod(blocks.counts((tokens, width), spec.micro_shape((tokens, width))))
    result = [Collective("all-gather", "u8", codes, devices)]
    return result + ([Collective("all-gather", "f32", 4 * scales, devices)] if scales > 1 else [])


def _sum_collectives(tokens: int, width: int, devices: int, wire_format: WireFormat, dtype: str) -> list[Collective]:
    """The collectives of a reduce-scatter; `tokens` are those of the whole array."""
    spec, size = wire_format.spec, tokens * width
    if spec is None:
        dtype_name = wire_format.dtype or dtype
        return [Collective("reduce-scatter", HLO_NAMES[dtype_name], size * _itemsize(dtype_name), devices)]
    result = [Collective("all-to-all", "u8", size, devices)]
    scales = _scale_count(spec, tokens, width)
    return result + ([Collective("all-reduce", "f32", 4 * scales, devices)] if scales > 1 else [])


def _scale_count(spec: QuantSpec, tokens: int, width: int) -> int:
    if spec.is_folded:
        return tokens
    return math.prod(blocks.counts((tokens, width), spec.block_shape((tokens, width))))


def _itemsize(name: str) -> int:
    return int(formats.get(name).bytes_per_element)
