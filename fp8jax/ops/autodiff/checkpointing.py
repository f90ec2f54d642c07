"""Values that `jax.checkpoint` saves in 8 bits, and the names of residuals for its policies.

Residuals of fp8jax's operations have names:

| name | residual |
|---|---|
| `fp8jax_norm` | codes of a norm's input, and 1 / root of each row |
| `fp8jax_activation` | codes of the gate or only input and of the factor; if not recomputed, of the activated gate |
| `fp8jax_input` | codes of a linear layer's input, one copy for all layers that read it |

Two names are not in `CHECKPOINT_NAMES`. `fp8jax_product` is the result of a product: a policy that saves JAX's
`dot_general` does not save that of a kernel. `fp8jax_beside_product` are one or two numbers per token that save a
recomputation of the operation before, and the codes of a weight for dgrad, one byte per parameter.

    policy = jax.checkpoint_policies.save_only_these_names(*fp8jax.CHECKPOINT_NAMES)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.core import derivatives
from fp8jax.core.derivatives import GUARD_NAME
from fp8jax.core.qtensor import from_bytes
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.autodiff.residuals import quantize_residual

PRODUCT, PRODUCT_AUX = "fp8jax_product", "fp8jax_product_aux"
NORM, ACTIVATION, INPUT = CHECKPOINT_NAMES = ("fp8jax_norm", "fp8jax_activation", "fp8jax_input")
Tree = TypeVar("Tree")


def save_quantized(x: Array, name: str, spec: QuantSpec | str = "e4m3:group16") -> Array:
    """Rounds `x` to codes and returns the rounded values, for a `jax.checkpoint` that saves the codes.

    The codes and their scales have a checkpoint name. If the policy of a block saves this name, the block saves them
    instead of the 16-bit array, and recomputes later operations from them:

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("hidden"))
        def block(x, w1, w2):
            h = fp8jax.save_quantized(x @ w1, "hidden")
            return jax.nn.gelu(h) @ w2

    Forward and backward pass read the same rounded values. Gradients of all orders pass to `x` unchanged. Without a
    policy that saves the name, values are rounded and nothing is saved in 8 bits.

    Args:
        x: (..., channels), any floating dtype.
        name: as of `jax.ad_checkpoint.checkpoint_name`; several values may share one.
        spec: a `QuantSpec` or its string form. A string stores scales in bf16 in place of fp32, as the residuals of a
            `Context`: 1.125 bytes per element for "e4m3:group16". With "+expand" a value under 1/57,344 of the amax of
            its group (e4m3) becomes 0, and the exponent is at least 1.

    Returns:
        (..., channels) in the dtype of `x`. NaN and Inf stay visible.

    Raises:
        ValueError: the spec is malformed or rounds stochastically; or `x` is not floating, or has no axis.
    """
    parsed_spec = QuantSpec.parse(spec)
    if isinstance(spec, str) and parsed_spec.scale_format == "fp32":
        parsed_spec = dataclasses.replace(parsed_spec, scale_format="bf16")
    if parsed_spec.rounding != "nearest":
        raise ValueError(f"save_quantized rounds to nearest and takes no key, got spec {spec!r}; omit '+stochastic'")
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"save_quantized expects (..., channels) with a floating-point dtype, got {x.dtype}{list(x.shape)}"
        )
    codes = with_checkpoint_name(quantize_residual(x, parsed_spec), name)
    values = _straight_through(x, from_bytes(codes).dequantize(x.dtype))
    return derivatives.check_differentiable_dtypes("save_quantized", values, x)


def with_checkpoint_name(tree: Tree, name: str) -> Tree:
    """Gives the arrays of a tree a name for policies of `jax.checkpoint`."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)


@jax.custom_jvp
def _straight_through(x: Array, rounded: Array) -> Array:
    """`rounded`, with derivative 1 with respect to `x`. It does not read `x`, so that no checkpoint recomputes `x`."""
    return rounded


@_straight_through.defjvp
def _straight_through_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _straight_through(*primals), tangents[0]


Policy = Callable[..., Any]
_FP8JAX_NAMES = (*CHECKPOINT_NAMES, PRODUCT, PRODUCT_AUX, GUARD_NAME)


def with_products(policy: Policy | None) -> Policy | None:
    """A policy that saves products of fp8jax if `policy` saves those of JAX.

        policy = fp8jax.checkpoint_policies.with_products(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        block = jax.checkpoint(block, policy=policy)

    If the policy saves a `dot_general`, the result of a product is saved. If the backward pass reads only the codes of
    norms, activations and linear layers, these are saved instead, which are smaller. `fp8jax.transform` applies this to
    checkpoints inside of the function that it transforms.

    Args:
        policy: any policy of `jax.checkpoint`; None, which saves nothing, stays None.

    Raises:
        TypeError: it is not a function.
    """
    if policy is None or isinstance(policy, WithProducts):
        return policy
    if not callable(policy):
        raise TypeError(f"with_products expects a policy such as jax.checkpoint_policies.dots_saveable, got {policy!r}")
    return WithProducts(policy)


@dataclasses.dataclass(frozen=True)
class WithProducts:
    """The policy of `with_products`. Equal policies return equal objects, so that JAX traces once."""

    policy: Policy

    def __call__(self, primitive: Any, *operands: Any, **params: Any) -> Any:
        """The decision for an equation, from its primitive, the types of its operands and its parameters."""
        decision = self.policy(primitive, *operands, **params)
        if primitive.name != "name" or params["name"] not in _FP8JAX_NAMES or _is_saved(decision):
            return decision
        return evaluate_on_product(self.policy, operands[0] if operands else None)


def evaluate_on_product(policy: Policy, result_type: Any = None) -> Any:
    """The decision of a policy for a product of two matrices with a result of this type."""
    dtype = jnp.bfloat16 if result_type is None else result_type.dtype
    dot_params: Any = {
        "dimension_numbers": (((1,), (0,)), ((), ())),
        "precision": None,
        "preferred_element_type": dtype,
    }
    operands = [] if result_type is None else [result_type, result_type]
    return policy(lax.dot_general_p, *operands, **dot_params, out_sharding=None)


def saves_products(policy: Policy | None) -> bool:
    """Whether a policy saves the results of products."""
    return policy is not None and _is_saved(evaluate_on_product(policy))


def _is_saved(decision: Any) -> bool:
    """Whether a decision is to save a value or to offload it: a bool, or one of JAX's own types."""
    return bool(decision) if isinstance(decision, bool) else type(decision).__name__ != "RecomputeType"
