"""Experts on several devices: tokens are sent to the devices of their experts as codes, and results are sent back.

Rows that are sent to experts are quantized once: tokens in the forward pass, and gradients of results in the backward
pass. Rows that are sent back are terms of sums over a token's experts. They keep their dtype.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import formats
from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.core.qtensor import QTensor
from fp8jax.dist import manual
from fp8jax.dist.chunks import split, to_bytes
from fp8jax.dist.collectives import HLO_NAMES, Collective
from fp8jax.dist.sequence import WireFormat, WireFormatLike, operand_wire_format
from fp8jax.ops.dispatch.choice import cast_varying_over, varying_axes
from fp8jax.ops.quantization.group_scales import alignment, quantize_rows

_CALLER = "TokenExchange"
SHARD_MAP_ADVICE = (
    "Map the layer over the mesh: jax.shard_map(layer, mesh=mesh, in_specs=(P({axes}), P({axes})), out_specs=P({axes}))"
)


class _Slices(NamedTuple):
    """The slices of consecutive rows that a device sends or receives, by device and by the experts of one device.

    Attributes:
        offsets: int32 (devices, local experts), the first row of each slice on this device.
        sizes: the number of rows of each.
        remote_offsets: the first row of each on the other device.
    """

    offsets: Array
    sizes: Array
    remote_offsets: Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["group_sizes", "overflow", "groups", "sent", "received"],
    meta_fields=["axes", "num_rows", "capacity"],
)
@dataclasses.dataclass(frozen=True)
class TokenExchange:
    """Which rows a device sends to the devices of their experts, and which rows it receives.

    Create it with `from_sizes`, inside `jax.shard_map`. Device i along the axes has the matrices of experts
    [i * local, (i + 1) * local). `dispatch` sends rows to the devices of their experts. `combine` sends rows back.
    Both are differentiable in their array, and the backward pass of each is the exchange of the other.

    On GPUs and TPUs rows are sent by `jax.lax.ragged_all_to_all`: each device sends its own rows. XLA for CPUs has no
    such collective. There each pair of devices exchanges `min(num_rows, capacity)` rows, filled up with zeros.

    Attributes:
        group_sizes: int32 (local experts,), the number of received rows of each expert of this device. They are
            consecutive, ordered by expert and then by the device that sent them.
        overflow: int32 scalar, the rows of all devices that exceed a capacity. If it is not 0, `combine` returns NaN on
            all devices.
        groups: this device's rows of each expert.
        sent, received: slices of rows.
        axes: the mesh axes.
        num_rows: number of rows that a device sends, those in no group included.
        capacity: number of rows of a received array.

    Examples:
        >>> import fp8jax, jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def products(x, w, sizes):  # rows sorted by expert, this device's matrices, rows of each of all experts
        ...     exchange = fp8jax.dist.TokenExchange.from_sizes(sizes, "expert", x.shape[0])
        ...     rows = exchange.dispatch(x, "coat")
        ...     y = fp8jax.ragged_dot(rows, w, exchange.group_sizes, recipe="coat")
        ...     return exchange.combine(y, "coat")
        >>> run = jax.shard_map(products, mesh=mesh, in_specs=jax.P("expert"), out_specs=jax.P("expert"))
        >>> jax.jit(run)(jnp.ones((12, 32)), jnp.ones((3, 32, 64)), jnp.array([4, 0, 8])).shape
        (12, 64)
    """

    group_sizes: Array
    overflow: Array
    groups: Groups
    sent: _Slices
    received: _Slices
    axes: tuple[str, ...]
    num_rows: int
    capacity: int

    @classmethod
    def from_sizes(
        cls, group_sizes: Array, axes: manual.Axes, num_rows: int, *, capacity: int | None = None
    ) -> "TokenExchange":
        """The exchange of rows that are sorted by expert. Devices share their group sizes, in one all-gather.

        Args:
            group_sizes: (experts,), integers, the rows of this device for each of all experts. Rows beyond their sum
                are in no group: they are not sent, may be NaN or Inf, and their results and gradients are 0.
            axes: name or names of the mesh axes that shard the experts.
            num_rows: number of rows of this device.
            capacity: number of rows that a device can receive. None is the largest possible number, the rows of all
                devices. No row is dropped silently: see `overflow`.

        Raises:
            ValueError: outside of `jax.shard_map`; the devices do not divide the experts; or `capacity` is below 1.
            TypeError: `group_sizes` are not integers.
        """
        devices, names = manual.check_manual_axes(_CALLER, axes, (), SHARD_MAP_ADVICE), manual.axis_names(axes)
        if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
            raise TypeError(f"{_CALLER} expects integer group_sizes, got {group_sizes.dtype}")
        if group_sizes.ndim != 1 or group_sizes.shape[0] % devices:
            raise ValueError(
                f"{_CALLER}: {devices} devices along {names} do not divide the experts of group_sizes, of shape "
                f"{group_sizes.shape}"
            )
        capacity = limit_capacity(_CALLER, capacity, devices * num_rows, "rows")
        groups = cast_varying_over(Groups.from_sizes(group_sizes, num_rows), names)
        # By (source, destination, expert of the destination).
        sizes = lax.all_gather(groups.sizes, names).reshape(devices, devices, -1)
        starts = jnp.cumsum(sizes.reshape(devices, -1), axis=1).reshape(sizes.shape) - sizes
        # By (destination, expert, source), the order of received rows.
        arriving = jnp.moveaxis(sizes, 0, 2)
        ends = jnp.cumsum(arriving.reshape(devices, -1), axis=1).reshape(arriving.shape)
        overflow = jnp.sum(jnp.maximum(ends[:, -1, -1] - capacity, 0))
        offsets = jnp.minimum(ends - arriving, capacity)
        fitting, device = jnp.minimum(ends, capacity) - offsets, lax.axis_index(names)
        sent = _Slices(starts[device], fitting[:, :, device], offsets[:, :, device])
        received = _Slices(offsets[device].T, fitting[device].T, starts[:, device])
        return cls(fitting[device].sum(1), overflow, groups, sent, received, names, num_rows, capacity)

    def dispatch(self, x: Array, wire_format: WireFormatLike = "e4m3:token") -> Array:
        """Rows on the devices of their experts. They are sent as codes, and their gradients in the dtype of `x`.

        Args:
            x: (num_rows, channels), floating, sorted by expert.
            wire_format: a `QuantSpec` with a scale per row, group, or tensor, or its string form; a recipe, for the
                format of its products' inputs; or "bf16", "fp16" or "fp32". A scale per tensor is one per expert,
                which its rows on all devices share: codes are those of `fp8jax.ragged_dot` on one device. Blocks of
                rows and channels become groups of channels. Recipes that round stochastically, have 4-bit codes or do
                not quantize send the dtype of `x`.

        Returns:
            (capacity, channels) in the dtype of `x`; rows in no group are 0.

        Raises:
            ValueError: `x` has another number of rows, or `wire_format` is not supported.
        """
        self._check("dispatch", x, self.num_rows)
        wire = operand_wire_format(_CALLER, wire_format, "x")
        return _dispatch(wire, cast_varying_over(x, self.axes), self)

    def combine(self, y: Array, wire_format: WireFormatLike = "e4m3:token") -> Array:
        """Rows on the devices that sent them by `dispatch`. They are sent in their dtype, their gradients as codes.

        Args:
            y: (capacity, channels), floating, in the order of `dispatch`.
            wire_format: as in `dispatch`, of the gradients; a recipe, for the format of its products' gradients.

        Returns:
            (num_rows, channels) in the dtype of `y`; rows in no group are 0. NaN if `overflow` is not 0.

        Raises:
            ValueError: `y` has another number of rows, or `wire_format` is not supported.
        """
        self._check("combine", y, self.capacity)
        wire = operand_wire_format(_CALLER, wire_format, "dy")
        return _combine(wire, cast_varying_over(y, self.axes), self)

    def _check(self, method: str, x: Array, num_rows: int) -> None:
        if x.ndim != 2 or x.shape[0] != num_rows:
            raise ValueError(f"{_CALLER}.{method} expects ({num_rows}, channels), got {x.shape}")

    def _send_to_experts(self, x: Array, wire: WireFormat) -> Array:
        if wire.spec is None:
            return self._move(wire.cast(x), self.sent, self.received, self.capacity).astype(x.dtype)
        leaves, structure = jax.tree.flatten(quantize_to_send(x, wire, self.groups, self.axes))
        # Codes and scales are one message.
        widths, width = _message_widths(leaves)
        padding = jnp.zeros((self.num_rows, width - sum(widths)), jnp.uint8)
        message = jnp.concatenate([*map(to_bytes, leaves), padding], axis=1)
        message = self._move(message, self.sent, self.received, self.capacity)
        parts = split(message, [*widths, width - sum(widths)])[: len(leaves)]
        leaves = [_from_bytes(part, leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        q: QTensor = jax.tree.unflatten(structure, leaves)
        return q.dequantize(x.dtype)

    def _send_back(self, y: Array) -> Array:
        return self._move(y, self.received, self.sent, self.num_rows)

    def _move(self, rows: Array, sent: _Slices, received: _Slices, length: int) -> Array:
        """`length` rows: slices from other devices, and zeros elsewhere."""
        out = cast_varying_over(jnp.zeros((length, rows.shape[1]), rows.dtype), varying_axes((rows, sent)))

        def ragged(rows: Array, out: Array, sent: _Slices, received: _Slices) -> Array:
            tables = sent.offsets, sent.sizes, sent.remote_offsets, received.sizes
            return lax.ragged_all_to_all(rows, out, *(at.reshape(-1) for at in tables), axis_name=self.axes)

        def padded(rows: Array, out: Array, sent: _Slices, received: _Slices) -> Array:
            bound = min(rows.shape[0], length)
            slots = rows.at[_packed_rows(sent, bound, rows.shape[0])].get(mode="fill", fill_value=0)
            slots = lax.all_to_all(slots, self.axes, 0, 0, tiled=True)
            return out.at[_packed_rows(received, bound, length)].set(slots, mode="drop")

        return lax.platform_dependent(rows, out, sent, received, cpu=padded, default=ragged)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(wire: WireFormat, x: Array, exchange: TokenExchange) -> Array:
    return exchange._send_to_experts(x, wire)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(wire: WireFormat, y: Array, exchange: TokenExchange) -> Array:
    rows = exchange._send_back(y)
    return jnp.where(exchange.overflow > 0, jnp.nan, rows).astype(y.dtype)


_dispatch.defvjp(
    lambda wire, x, exchange: (_dispatch(wire, x, exchange), exchange),
    lambda wire, exchange, ct: (exchange._send_back(ct), None),
)
_combine.defvjp(
    lambda wire, y, exchange: (_combine(wire, y, exchange), exchange),
    lambda wire, exchange, ct: (exchange._send_to_experts(ct, wire), None),
)


def _packed_rows(slices: _Slices, length: int, fill: int) -> Array:
    """The rows of the slices, one device after the other, padded with `fill` to `length`."""
    ends = jnp.cumsum(slices.sizes, axis=1)
    position = jnp.arange(length, dtype=jnp.int32)
    index = jnp.sum(position[None, :, None] >= ends[:, None, :], axis=2, dtype=jnp.int32)
    first = jnp.pad(slices.offsets - (ends - slices.sizes), ((0, 0), (0, 1)))
    rows = jnp.take_along_axis(first, index, axis=1) + position
    return jnp.where(position < ends[:, -1:], rows, fill)


def limit_capacity(caller: str, capacity: int | None, max_rows: int, name: str) -> int:
    """The number of rows that a device can receive: at most `max_rows`, the rows of all devices.

    Raises:
        ValueError: `capacity` is below 1.
    """
    if capacity is not None and capacity < 1:
        raise ValueError(
            f"{caller}: capacity must be at least 1, got {capacity}; None is enough for the {name} of all devices"
        )
    return max_rows if capacity is None else min(capacity, max_rows)


def quantize_to_send(x: Array, wire: WireFormat, groups: Groups, axes: tuple[str, ...] = ()) -> QTensor:
    """Codes of rows, with scales per row. Devices along the axes share scales of groups."""
    spec = wire.spec
    assert spec is not None
    if spec.granularity == "block":  # the rows of a block would depend on the number of devices
        spec = dataclasses.replace(spec, granularity="group")
    q = quantize_rows(x, spec, wire.strategy, PaddedTokens.from_groups(groups, x.shape[0], alignment(spec)), axes=axes)
    if spec.outer_scale != "none":
        return q
    # Each row is sent with all of its scales, also with the constant one above its powers of two.
    spec = dataclasses.replace(spec, outer_scale="token", exponent_rounding="down", fold_scales=False)
    return QTensor(q.codes, jnp.broadcast_to(q.scale, (x.shape[0], 1)), None, q.microscale, spec)


def _message_widths(leaves: Sequence[Any]) -> tuple[list[int], int]:
    """The bytes in a row of each array, and those in a row of a message of all of them."""
    widths = [leaf.shape[1] * leaf.dtype.itemsize for leaf in leaves]
    # XLA's kernel for GPUs moves 8 bytes at once if 8 divides the bytes of a row, else 4, 2 or 1.
    return widths, -(-sum(widths) // 8) * 8


def _from_bytes(raw: Array, dtype: Any) -> Array:
    size = jnp.dtype(dtype).itemsize
    return formats.bitcast(raw if size == 1 else raw.reshape(raw.shape[0], -1, size), dtype)


def expert_collectives(
    rows: int,
    width: int,
    devices: int,
    wire_format: WireFormatLike,
    dtype: str = "bf16",
    *,
    kind: Literal["ragged-all-to-all", "all-gather"] = "ragged-all-to-all",
    times: int = 1,
    dispatches: int = 1,
) -> list[Collective]:
    """The collectives of one `dispatch` and one `combine`, forward and backward, on GPUs and TPUs.

    Choices, their weights, group sizes and amax are left out. In a ragged all-to-all bytes are those of rows that a
    device sends, and devices are assumed to send as many rows to each device.

    Args:
        rows, width: shape of the rows of one device; of `TokenGather` its tokens.
        devices: number of devices that share experts.
        wire_format: as in both methods.
        dtype: dtype of the rows.
        kind: "ragged-all-to-all" for `TokenExchange`, "all-gather" for `TokenGather`.
        times: number of calls of each.
        dispatches: number of dispatches in a forward pass: 2 if the backward pass dispatches again.

    Raises:
        ValueError: as for both methods.
    """
    result, is_gather = [], kind == "all-gather"
    for operand, count in (("x", dispatches * times), ("dy", times)):
        wire = operand_wire_format("expert_collectives", wire_format, operand)
        if wire.spec is None:
            sent = {HLO_NAMES[wire.dtype or dtype]: _nbytes(rows, width, wire.dtype or dtype)}
        else:
            quantize = functools.partial(quantize_to_send, wire=wire, groups=Groups(*jnp.zeros((2, 1), jnp.int32)))
            leaves = jax.tree.leaves(jax.eval_shape(quantize, jax.ShapeDtypeStruct((rows, width), jnp.float32)))
            sent = {"u8": rows * _message_widths(leaves)[1]}
            if is_gather:  # scales are sent separately
                scales = sum(4 * leaf.size for leaf in leaves if leaf.dtype == jnp.float32)
                sent = {"u8": sum(leaf.size for leaf in leaves if leaf.dtype.itemsize == 1), "f32": scales}
        result += [Collective(kind, name, nbytes, devices, count) for name, nbytes in sent.items()]
    sums = Collective(kind, HLO_NAMES[dtype], _nbytes(rows, width, dtype), devices, 2 * times)
    return [*result, sums._replace(kind="reduce-scatter", nbytes=devices * sums.nbytes) if is_gather else sums]


def _nbytes(rows: int, width: int, name: str) -> int:
    return rows * width * int(formats.get(name).bytes_per_element)
