"""Experts on a few devices: each gathers the tokens of all, as codes. Results of experts are summed over devices.

A device sends each of its tokens once to every other device. `fp8jax.dist.TokenExchange` sends a token once for each of
its experts on other devices.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core.groups import Groups
from fp8jax.core.qtensor import QTensor, from_bytes, to_bytes
from fp8jax.dist import manual
from fp8jax.dist.experts import SHARD_MAP_ADVICE, limit_capacity, quantize_to_send
from fp8jax.dist.sequence import WireFormat, WireFormatLike, operand_wire_format
from fp8jax.ops.autodiff.checkpointing import INPUT, with_checkpoint_name
from fp8jax.ops.autodiff.residuals import ArrayFacts, CotangentFacts, Recomputed, attach_facts
from fp8jax.ops.dispatch.choice import cast_varying_over
from fp8jax.ops.products.token_rows import TOKEN_GATHER
from fp8jax.ops.quantization import fused_outputs
from fp8jax.ops.quantization.fused_reference import compute_row_amax
from fp8jax.ops.quantization.token_codes import TokenCodes, encode_tokens, token_scales

_CALLER = "TokenGather"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["group_sizes", "overflow", "is_routed", "row_tokens", "rows"],
    meta_fields=["axes"],
)
@dataclasses.dataclass(frozen=True)
class TokenGather:
    """The tokens of all devices that are rows of this device's experts.

    Create it with `from_choices`, inside `jax.shard_map`. Device i along the axes has the matrices of experts
    [i * local, (i + 1) * local). `dispatch` gathers the tokens of all devices, and returns the rows of this device's
    experts. `combine` adds the rows of each token, on all devices. Both are differentiable in their array.

    A device sends each token to `devices - 1` others. `TokenExchange` sends `(devices - 1) / devices` rows for each
    choice of a token. This class sends less if there are fewer devices than choices of a token.

    Attributes:
        group_sizes: int32 (local experts,), the number of rows of each expert of this device. They are consecutive,
            ordered by expert and then by token.
        overflow: int32 scalar, the rows of all devices that exceed a capacity. If it is not 0, `combine` returns NaN on
            all devices.
        is_routed: bool (tokens,), whether a token of this device has an expert.
        row_tokens: int32 (capacity,), the index of each row's token among the tokens of all devices. For a row in no
            group it is the number of these tokens.
        rows: int32 (all tokens, choices), the row of each choice. It is the capacity if this device has no such row.
        axes: the mesh axes.

    Examples:
        >>> import fp8jax, jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def layer(x, w, experts, weights):  # tokens of this device, its matrices, choices and weights of its tokens
        ...     gather = fp8jax.dist.TokenGather.from_choices(experts, 3, "expert")
        ...     rows = gather.dispatch(x, "coat")
        ...     y = fp8jax.ragged_dot(rows, w, gather.group_sizes, recipe="coat")
        ...     return gather.combine(y * gather.dispatch_weights(weights)[:, None], "coat")
        >>> run = jax.shard_map(layer, mesh=mesh, in_specs=jax.P("expert"), out_specs=jax.P("expert"))
        >>> experts = jnp.array([[0, 2], [2, 1], [0, 2], [2, 0]])
        >>> jax.jit(run)(jnp.ones((4, 32)), jnp.ones((3, 32, 64)), experts, jnp.full((4, 2), 0.5)).shape
        (4, 64)
    """

    group_sizes: Array
    overflow: Array
    is_routed: Array
    row_tokens: Array
    rows: Array
    axes: tuple[str, ...]

    @classmethod
    def from_choices(
        cls, experts: Array, num_experts: int, axes: manual.Axes, *, capacity: int | None = None
    ) -> "TokenGather":
        """Gather the choices of all devices, and sort them by expert.

        Args:
            experts: (tokens, choices), integers, the experts of each token of this device, counted over all devices. A
                number outside of [0, num_experts) is no expert. A token without experts may be NaN or Inf; its result
                and gradient are 0.
            num_experts: number of experts of all devices.
            axes: name or names of the mesh axes that shard the experts.
            capacity: number of rows that a device's experts can receive. None is the largest possible number, all
                choices of all devices. No row is dropped silently: see `overflow`.

        Raises:
            ValueError: outside of `jax.shard_map`; the devices do not divide the experts; or `capacity` is below 1.
            TypeError: `experts` are not integers.
        """
        devices, names = manual.check_manual_axes(_CALLER, axes, (), SHARD_MAP_ADVICE), manual.axis_names(axes)
        if not jnp.issubdtype(experts.dtype, jnp.integer):
            raise TypeError(f"{_CALLER} expects integer experts, got {experts.dtype}")
        if experts.ndim != 2:
            raise ValueError(f"{_CALLER} expects experts (tokens, choices), got {experts.shape}")
        if num_experts < 1 or num_experts % devices:
            raise ValueError(f"{_CALLER}: {devices} devices along {names} do not divide {num_experts} experts")
        experts = cast_varying_over(experts.astype(jnp.int32), names)
        is_routed = jnp.any((experts >= 0) & (experts < num_experts), axis=1)
        experts = lax.all_gather(experts, names, tiled=True)
        chosen, local = experts.reshape(-1), num_experts // devices
        capacity = limit_capacity(_CALLER, capacity, chosen.size, "choices")
        counts = jnp.sum(chosen[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
        overflow = jnp.sum(jnp.maximum(counts.reshape(devices, local).sum(1) - capacity, 0))
        first = lax.axis_index(names) * local
        groups = Groups.from_sizes(lax.dynamic_slice_in_dim(counts, first, local), capacity)
        # Choices of this device's experts come first.
        order = jnp.argsort(jnp.where(chosen < first, num_experts, chosen), stable=True).astype(jnp.int32)
        rows = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
        rows = jnp.where(rows < groups.ends[-1], rows, capacity).reshape(experts.shape)
        row_choices = jnp.where(jnp.arange(capacity) < groups.ends[-1], order[:capacity], order.size)
        return cls(groups.sizes, overflow, is_routed, row_choices // experts.shape[1], rows, names)

    def dispatch(self, x: Array, wire_format: WireFormatLike = "e4m3:token") -> Array:
        """The rows of this device's experts. Tokens are sent as codes, and sums of gradients in the dtype of `x`.

        Args:
            x: (tokens, channels), floating, the tokens of this device.
            wire_format: a `QuantSpec` with a scale per row, group, or tensor, or its string form; a recipe, for the
                format of its products' inputs; or "bf16", "fp16" or "fp32". A scale per tensor is common to the tokens
                of all devices, times a power of two for each token. Blocks of rows and channels become groups of
                channels. Recipes that round stochastically, have 4-bit codes or do not quantize send the dtype of `x`.

        Returns:
            (capacity, channels) in the dtype of `x`; rows in no group are 0.

        Raises:
            ValueError: `x` has another number of rows, or `wire_format` is not supported.
        """
        return self.dispatch_with_facts(x, wire_format)[0]

    def dispatch_with_facts(self, x: Array, wire_format: WireFormatLike) -> tuple[Array, ArrayFacts]:
        """The result of `dispatch`, and facts for `fp8jax.ragged_dot`.

        With these facts a product of the recipe in `wire_format` reads the codes that were sent, if they are per-tensor
        FP8. Its backward pass gathers them again.
        """
        self._check("dispatch", x, self.is_routed.shape[0])
        wire, x = operand_wire_format(_CALLER, wire_format, "x"), cast_varying_over(x, self.axes)
        shard = with_checkpoint_name(self._encode(lax.stop_gradient(x), wire), INPUT)
        operation, saved = _GatherTokens(wire, self.axes, jnp.dtype(x.dtype)), (shard, self.row_tokens)
        tokens, facts = operation.gather(*saved)
        return _dispatch(x, tokens, self), facts._replace(recompute_rule=(operation, saved))

    def dispatch_weights(self, weights: Array) -> Array:
        """The weight of each row's choice, (capacity,); 0 for rows in no group. Weights are sent in their own dtype.

        Args:
            weights: (tokens, choices), floating, those of this device.

        Raises:
            ValueError: `weights` have another shape.
        """
        shape = self.is_routed.shape[0], self.rows.shape[1]
        if weights.shape != shape:
            raise ValueError(f"{_CALLER}.dispatch_weights expects {shape}, got {weights.shape}")
        return _weights_of_rows(lax.all_gather(cast_varying_over(weights, self.axes), self.axes, tiled=True), self)

    def combine(self, y: Array, wire_format: WireFormatLike = "e4m3:token") -> Array:
        """The sum of each token's rows, in fp32 on a device. Sums are sent in the dtype of `y`, and gradients as codes.

        Args:
            y: (capacity, channels), floating, in the order of `dispatch`, multiplied by weights.
            wire_format: as in `dispatch`, of the gradients; a recipe, for the format of its products' gradients.

        Returns:
            (tokens, channels) in the dtype of `y`; tokens without experts are 0. NaN if `overflow` is not 0.

        Raises:
            ValueError: `y` has another number of rows, or `wire_format` is not supported.
        """
        self._check("combine", y, self.row_tokens.shape[0])
        return _combine(operand_wire_format(_CALLER, wire_format, "dy"), cast_varying_over(y, self.axes), self)

    def _check(self, method: str, x: Array, num_rows: int) -> None:
        if x.ndim != 2 or x.shape[0] != num_rows:
            raise ValueError(f"{_CALLER}.{method} expects ({num_rows}, channels), got {x.shape}")

    def _encode(self, x: Array, wire: WireFormat) -> QTensor | Array:
        """This device's tokens in the form in which they are sent: codes with scales per row, as bytes, or an array."""
        if wire.spec is None:
            return wire.cast(x)
        x = jnp.where(self.is_routed[:, None], x, 0)
        if not fused_outputs.supports(wire.spec):
            one_group = Groups(*jnp.array([[0], [x.shape[0]]], jnp.int32))
            return to_bytes(quantize_to_send(x, wire, one_group, self.axes))
        row_amax = compute_row_amax(x)
        largest = lax.pmax(jnp.max(row_amax, initial=0.0), self.axes)
        return encode_tokens(x, wire.spec, token_scales(row_amax, largest, wire.spec, wire.strategy))

    def _sum_over_devices(self, rows: Array) -> Array:
        """The sums of rows over all devices, for the tokens of this device."""
        terms = rows.at[self.rows].get(mode="fill", fill_value=0).astype(jnp.float32)
        sums = jnp.where(self.overflow > 0, jnp.nan, jnp.sum(terms, axis=1)).astype(rows.dtype)
        with jax.named_scope(TOKEN_GATHER):
            return lax.psum_scatter(sums, self.axes, tiled=True)


@dataclasses.dataclass(frozen=True)
class _GatherTokens:
    """The gather of all devices' tokens: a `fp8jax.ops.autodiff.residuals.Recomputable`.

    Attributes:
        wire: the format in which tokens are sent.
        axes: the mesh axes.
        dtype: of the tokens.
    """

    wire: WireFormat
    axes: tuple[str, ...]
    dtype: DTypeLike

    def gather(self, shard: QTensor | Array, row_tokens: Array) -> tuple[Array, ArrayFacts]:
        """The tokens of all devices from the shard of this one, and facts about an array with these tokens as rows."""
        with jax.named_scope(TOKEN_GATHER):
            gathered = jax.tree.map(lambda leaf: lax.all_gather(leaf, self.axes, tiled=True), shard)
        codes = None
        if isinstance(gathered, QTensor):
            assert self.wire.spec is not None
            tokens = from_bytes(gathered).dequantize(self.dtype)
            if fused_outputs.supports(self.wire.spec):
                codes = self.wire.spec, TokenCodes(gathered, row_tokens)
        else:
            tokens = gathered.astype(self.dtype)
        return tokens, ArrayFacts(codes=codes, row_source=(tokens, row_tokens))

    def recompute(self, saved: tuple[QTensor | Array, Array], gradient: CotangentFacts) -> Recomputed:
        tokens, facts = self.gather(*saved)
        return Recomputed(tokens, None if facts.codes is None else facts.codes[1])


def _rows_of(tokens: Array, gather: TokenGather) -> Array:
    return tokens.at[gather.row_tokens].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _dispatch(x: Array, tokens: Array, gather: TokenGather) -> Array:
    return _rows_of(tokens, gather)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(wire: WireFormat, y: Array, gather: TokenGather) -> Array:
    return gather._sum_over_devices(y)


def _combine_bwd(wire: WireFormat, gather: TokenGather, dy: Array) -> tuple[Array, None]:
    operation = _GatherTokens(wire, gather.axes, jnp.dtype(dy.dtype))
    tokens, facts = operation.gather(gather._encode(dy, wire), gather.row_tokens)
    ct = _rows_of(tokens, gather)
    attach_facts(ct, facts)
    return ct, None


@jax.custom_vjp
def _weights_of_rows(weights: Array, gather: TokenGather) -> Array:
    return jnp.zeros_like(weights, shape=gather.row_tokens.shape).at[gather.rows].set(weights, mode="drop")


_dispatch.defvjp(
    lambda x, tokens, gather: (_dispatch(x, tokens, gather), gather),
    lambda gather, ct: (gather._sum_over_devices(ct), None, None),
)
_combine.defvjp(lambda wire, y, gather: (_combine(wire, y, gather), gather), _combine_bwd)
_weights_of_rows.defvjp(
    lambda weights, gather: (_weights_of_rows(weights, gather), gather.rows),
    lambda rows, ct: (ct.at[rows].get(mode="fill", fill_value=0), None),
)
