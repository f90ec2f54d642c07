"""A mixture of experts: a router sends each token through the MLPs of a few experts. No token is dropped.

Rows are sorted by expert, so that one grouped matmul multiplies the rows of each expert by its matrix. The router's
weight scales the input of `down`, not its output. No gradient then needs the output, as in SonicMoE (Guo et al., 2025),
which computes the router's gradient from the gradient of the input of `down`.

Names have shape suffixes: N tokens, D width, E experts, K experts of a token, R = N x K rows, F width of an expert.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from experiments.models.parts import linear
from experiments.models.shape import LlamaConfig


@dataclasses.dataclass(frozen=True)
class ExpertProducts:
    """Matmuls and residuals of experts. This class uses JAX's grouped matmul and saves arrays."""

    def share(self, routes: "Routes", experts_NxK: jax.Array) -> Any:
        """Returns the routes of these choices to the experts of all devices; on one device `routes`, unchanged."""
        return routes

    def multiply(self, x_RxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """Multiplies the `sizes_E` consecutive rows of each expert by its matrix; returns (R, F) in the dtype of x."""
        return jax.lax.ragged_dot(x_RxD, w_ExDxF.astype(x_RxD.dtype), sizes_E)

    def encode(self, x: jax.Array) -> Any:
        """Returns the residual of an array (..., channels)."""
        return x

    def decode(self, saved: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns the argument of `encode`, exactly or approximately."""
        array: jax.Array = saved.astype(dtype)
        return array

    def mlp(
        self, x_NxD: jax.Array, tokens: Any, norm: "Norm | None", gate_up_ExDx2F: jax.Array, down_ExFxD: jax.Array,
        weights_R: jax.Array, routes: "Routes",
    ) -> jax.Array:  # fmt: skip
        """The sum over each token's experts of weight x down(silu(gate) x up), (N, D).

        Args:
            x_NxD: the tokens.
            tokens: their encoding, without gradient.
            norm: norm of the tokens, or None.
            gate_up_ExDx2F, down_ExFxD: the matrices.
            weights_R: router weight of each row, fp32.
            routes: the rows of each expert and token.
        """
        gate_up_Rx2F = recomputed(gate_and_up, self, x_NxD, tokens, gate_up_ExDx2F, routes, norm)
        saved = jax.lax.stop_gradient(self.encode(gate_up_Rx2F))
        return reduce_experts(self, gate_up_Rx2F.dtype, gate_up_Rx2F, saved, down_ExFxD, weights_R, routes)


class Routes(NamedTuple):
    """The assignment of tokens to experts.

    Attributes:
        order_R: int32, the choice of each row: K times its token, plus the index of the choice.
        rows_NxK: int32, the row of each choice.
        sizes_E: int32, number of rows of each expert.
    """

    order_R: jax.Array
    rows_NxK: jax.Array
    sizes_E: jax.Array

    @classmethod
    def from_choices(cls, experts_NxK: jax.Array, experts: int) -> "Routes":
        """Sorts rows by expert, and within an expert by token."""
        choices_R = experts_NxK.reshape(-1)
        order_R = jnp.argsort(choices_R, stable=True).astype(jnp.int32)
        rows_R = jnp.zeros_like(order_R).at[order_R].set(jnp.arange(order_R.size, dtype=jnp.int32), unique_indices=True)
        # Counts by comparisons: with a scatter-add, a GPU would serialize the additions to each expert.
        sizes_E = jnp.sum(choices_R[:, None] == jnp.arange(experts), 0, dtype=jnp.int32)
        return cls(order_R, rows_R.reshape(experts_NxK.shape), sizes_E)

    def permute(self, x_NxD: jax.Array) -> jax.Array:
        """Returns the token of each row, (R, D)."""
        return _permute(x_NxD, self.order_R, self.rows_NxK)

    def combine(self, y_RxD: jax.Array) -> jax.Array:
        """Returns the sum of each token's rows, (N, D)."""
        return _combine(y_RxD, self.order_R, self.rows_NxK)

    def per_row(self, weights_NxK: jax.Array) -> jax.Array:
        """Returns the value of each row's choice, (R,)."""
        return _per_row(weights_NxK, self.order_R, self.rows_NxK)


# JAX differentiates a gather to a scatter-add, whose order is not deterministic. The derivatives of these functions are
# gathers. Each of the first two is the derivative of the other.
@jax.custom_vjp
def _permute(x_NxD: jax.Array, order_R: jax.Array, rows_NxK: jax.Array) -> jax.Array:
    return x_NxD[order_R // rows_NxK.shape[1]]


@jax.custom_vjp
def _combine(y_RxD: jax.Array, order_R: jax.Array, rows_NxK: jax.Array) -> jax.Array:
    return y_RxD[rows_NxK].astype(jnp.float32).sum(1).astype(y_RxD.dtype)


@jax.custom_vjp
def _per_row(weights_NxK: jax.Array, order_R: jax.Array, rows_NxK: jax.Array) -> jax.Array:
    return weights_NxK.reshape(-1)[order_R]


def _forward(function: Callable[..., jax.Array], x: jax.Array, *indices: jax.Array) -> tuple[jax.Array, Any]:
    return function(x, *indices), indices


_permute.defvjp(functools.partial(_forward, _permute), lambda indices, ct: (_combine(ct, *indices), None, None))
_per_row.defvjp(functools.partial(_forward, _per_row), lambda indices, ct: (ct[indices[1]], None, None))
_combine.defvjp(functools.partial(_forward, _combine), lambda indices, ct: (_permute(ct, *indices), None, None))


def recomputed(
    function: Callable[..., jax.Array], products: ExpertProducts, x: jax.Array, saved: Any, *operands: Any
) -> jax.Array:
    """Computes function(products, x, *operands). The backward pass recomputes it with `products.decode(saved)` as x.

    It is `jax.checkpoint` of the function, except that an encoding of x is saved instead of x.
    """
    result: jax.Array = _recomputed(function, products, x.dtype, x, saved, operands)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _recomputed(function: Any, products: Any, dtype: Any, x: jax.Array, saved: Any, operands: Any) -> jax.Array:
    result: jax.Array = function(products, x, *operands)
    return result


def _recomputed_fwd(function: Any, products: Any, dtype: Any, x: jax.Array, saved: Any, operands: Any) -> Any:
    return function(products, x, *operands), (saved, operands)


def _recomputed_bwd(function: Any, products: Any, dtype: Any, residuals: Any, ct: jax.Array) -> Any:
    # Without the barrier, XLA reuses results of the forward pass, and keeps them in memory until here.
    saved, operands = jax.lax.optimization_barrier(residuals)
    vjp = jax.vjp(functools.partial(function, products), products.decode(saved, dtype), *operands)[1]
    dx, *gradients = vjp(ct)
    return dx, None, tuple(gradients)


_recomputed.defvjp(_recomputed_fwd, _recomputed_bwd)


class Norm(NamedTuple):
    """An RMSNorm of the tokens, which the backward pass recomputes.

    Attributes:
        scale_D: its scale.
        eps: added to the mean square.
    """

    scale_D: jax.Array
    eps: float

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        """Returns the norm in the dtype of x, computed in fp32."""
        x = x_NxD.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps) * self.scale_D.astype(jnp.float32)
        return y.astype(x_NxD.dtype)


def router_logits(
    products: ExpertProducts, x_NxD: jax.Array, router_DxE: jax.Array, norm: Norm | None = None
) -> jax.Array:
    """Returns the logits of experts, fp32 (N, E), by a matmul in x's dtype."""
    x_NxD = x_NxD if norm is None else norm(x_NxD)
    return jnp.matmul(x_NxD, router_DxE.astype(x_NxD.dtype), preferred_element_type=jnp.float32)


def gate_and_up(
    products: ExpertProducts, x_NxD: jax.Array, w_ExDx2F: jax.Array, routes: Routes, norm: Norm | None = None
) -> jax.Array:
    """Returns packed gate and up of each row, (R, 2 F), with a checkpoint name for policies of `jax.checkpoint`."""
    x_NxD = x_NxD if norm is None else norm(x_NxD)
    return checkpoint_name(products.multiply(routes.permute(x_NxD), w_ExDx2F, routes.sizes_E), "experts_product")


def weighted_swiglu(gate_up_Rx2F: jax.Array, weights_R: jax.Array) -> jax.Array:
    """Returns weight x silu(gate) x up of each row, (R, F), in the dtype of gate and up, computed in fp32."""
    gate, up = (x.astype(jnp.float32) for x in jnp.split(gate_up_Rx2F, 2, -1))
    return (jax.nn.silu(gate) * up * weights_R[:, None]).astype(gate_up_Rx2F.dtype)


def down_and_combine(products: ExpertProducts, h_RxF: jax.Array, w_ExFxD: jax.Array, routes: Routes) -> jax.Array:
    """Multiplies each row of h by its expert's matrix, and sums the rows of each token: (N, D)."""
    return routes.combine(products.multiply(h_RxF, w_ExFxD, routes.sizes_E))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def reduce_experts(
    products: ExpertProducts, dtype: Any, gate_up_Rx2F: jax.Array, saved: Any, w_ExFxD: jax.Array,
    weights_R: jax.Array, routes: Routes,
) -> jax.Array:  # fmt: skip
    """Returns the sum over each token's experts of weight x down(silu(gate) x up), (N, D).

    The backward pass recomputes the input of `down` from `products.decode(saved)` twice, to avoid fp32 arrays of gate
    and up.

    Args:
        products: matmuls of experts.
        dtype: dtype of gate and up.
        gate_up_Rx2F: packed gate and up of each row.
        saved: their encoding, without gradient.
        w_ExFxD: the matrices.
        weights_R: router weight of each row, fp32.
        routes: the rows of each expert and token.
    """
    return down_and_combine(products, weighted_swiglu(gate_up_Rx2F, weights_R), w_ExFxD, routes)


def _reduce_experts_fwd(
    products: Any, dtype: Any, gate_up_Rx2F: Any, saved: Any, w_ExFxD: Any, weights_R: Any, routes: Any
) -> Any:
    y_NxD = reduce_experts(products, dtype, gate_up_Rx2F, saved, w_ExFxD, weights_R, routes)
    return y_NxD, (saved, w_ExFxD, weights_R, routes)


def _reduce_experts_bwd(products: Any, dtype: Any, residuals: Any, ct_NxD: jax.Array) -> Any:
    saved, w_ExFxD, weights_R, routes = jax.lax.optimization_barrier(residuals)
    h_RxF = weighted_swiglu(products.decode(saved, dtype), weights_R)
    function = lambda h, w: down_and_combine(products, h, w, routes)  # noqa: E731
    dh_RxF, dw = jax.vjp(function, h_RxF, w_ExFxD)[1](ct_NxD)
    # Without the barrier, XLA decodes once, and keeps fp32 arrays of gate and up in memory until here.
    saved, dh_RxF = jax.lax.optimization_barrier((saved, dh_RxF))
    gate_up, weights = jax.vjp(weighted_swiglu, products.decode(saved, dtype), weights_R)[1](dh_RxF)
    return gate_up, None, dw, weights, None


reduce_experts.defvjp(_reduce_experts_fwd, _reduce_experts_bwd)


def route(logits_NxE: jax.Array, count: int, *, normalized: bool) -> tuple[jax.Array, jax.Array]:
    """Returns weights, fp32 (N, K), and indices, int32 (N, K), of each token's `count` most probable experts.

    The weights are softmax probabilities over all experts, divided by the sum of the chosen ones if `normalized`.
    """
    experts_NxK = jax.lax.top_k(jax.lax.stop_gradient(logits_NxE), count)[1]

    @jax.checkpoint
    def weigh(logits_NxE: jax.Array, experts_NxK: jax.Array) -> jax.Array:
        weights_NxK = jnp.take_along_axis(jax.nn.softmax(logits_NxE), experts_NxK, -1)
        return weights_NxK / weights_NxK.sum(-1, keepdims=True) if normalized else weights_NxK

    return weigh(logits_NxE.astype(jnp.float32), experts_NxK), experts_NxK


@jax.checkpoint
def balance_loss(logits_NxE: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Load-balancing loss, E sum_i f_i P_i, fp32: Switch Transformer (Fedus et al., 2022), eq. 4 without alpha.

    f_i is the number of tokens that choose expert i divided by N (eq. 5), and P_i the mean probability of i (eq. 6).
    With K choices per token, f sums to K, as in transformers' Mixtral and Qwen3-MoE. Balanced experts have a loss of K.
    """
    tokens, experts = logits_NxE.shape
    mean_E = jax.nn.softmax(logits_NxE.astype(jnp.float32)).mean(0)
    return experts * jnp.sum(sizes_E.astype(jnp.float32) / tokens * mean_E)


@jax.checkpoint
def z_loss(logits_NxE: jax.Array) -> jax.Array:
    """Router z-loss, the mean of (log sum_i exp logit_i)^2, fp32: ST-MoE (Zoph et al., 2022), eq. 5."""
    return jnp.mean(jax.nn.logsumexp(logits_NxE.astype(jnp.float32), -1) ** 2)


class RouterLoss(nnx.Variable):
    """A loss of a router in the last call, fp32."""


def router_losses(state: Any) -> dict[str, jax.Array]:
    """Returns the means over layers of "balance_loss" and "z_loss" in a called model's state; empty without experts."""
    values: dict[str, list[jax.Array]] = {}
    for path, value in nnx.to_flat_state(nnx.filter_state(state, RouterLoss)):
        values.setdefault(str(path[-1]), []).append(jnp.mean(value[...]))
    return {name: jnp.mean(jnp.stack(parts)) for name, parts in values.items()}


class Experts(nnx.Module):
    """A matrix for each expert: `kernel` (E, inputs, outputs)."""

    def __init__(
        self, experts: int, inner: int, outer: int, std: float, param_dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        init = nnx.initializers.normal(std)
        self.kernel = nnx.Param(init(rngs.params(), (experts, inner, outer), param_dtype))


class ExpertMLPs(nnx.Module):
    """The matrices of all experts."""

    def __init__(self, config: LlamaConfig, *, param_dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        out_std, count = 0.02 / (2 * config.layers) ** 0.5, config.experts
        # Gate and up are packed, so that one matmul reads the rows and one matmul computes their gradient.
        self.gate_up = Experts(count, config.dim, 2 * config.mlp_dim, 0.02, param_dtype, rngs)
        self.down = Experts(count, config.mlp_dim, config.dim, out_std, param_dtype, rngs)


class MoE(nnx.Module):
    """sum over the experts i of a token of weight_i down_i(silu(gate_i(x)) * up_i(x)).

    Residuals are encodings of the tokens (N, D) and of gate and up (R, 2 F), the router's logits, and indices. The
    norm, the permuted tokens and the input of `down` are recomputed.

    Args:
        config: the shape.
        dtype, param_dtype, rngs: see `Llama`.
        products: matmuls and residuals of experts; None for `ExpertProducts`.
        has_losses: whether a call sets the variables `balance_loss` and `z_loss`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: jax.typing.DTypeLike,
        param_dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        products: ExpertProducts | None = None,
        has_losses: bool = False,
    ) -> None:
        self.config, self.dtype, self.has_losses = config, dtype, has_losses
        self.products = ExpertProducts() if products is None else products
        self.router = linear(config.dim, config.experts, 0.02, dtype, param_dtype, rngs)
        self.experts = ExpertMLPs(config, param_dtype=param_dtype, rngs=rngs)
        if has_losses:
            self.balance_loss, self.z_loss = RouterLoss(jnp.zeros([])), RouterLoss(jnp.zeros([]))

    def __call__(self, x_NxD: jax.Array, norm: nnx.RMSNorm | nnx.LayerNorm | None = None) -> jax.Array:
        """Applies the layer to x, or to norm(x); with a norm, x before the norm is the residual."""
        config, products, x_NxD = self.config, self.products, x_NxD.astype(self.dtype)
        tokens = jax.lax.stop_gradient(products.encode(x_NxD))
        of_norm = None if norm is None or norm.scale is None else Norm(norm.scale[...], norm.epsilon)
        logits_NxE = recomputed(router_logits, products, x_NxD, tokens, self.router.kernel[...], of_norm)
        weights_NxK, experts_NxK = route(logits_NxE, config.experts_per_token, normalized=config.normalize_choices)
        routes = Routes.from_choices(experts_NxK, config.experts)
        if self.has_losses:
            self.balance_loss[...], self.z_loss[...] = balance_loss(logits_NxE, routes.sizes_E), z_loss(logits_NxE)
        routes = products.share(routes, experts_NxK)
        matrices = self.experts.gate_up.kernel[...], self.experts.down.kernel[...]
        return products.mlp(x_NxD, tokens, of_norm, *matrices, routes.per_row(weights_NxK), routes)
