"""Codes at the boundaries of `jax.checkpoint`: values of any model that are saved in 8 bits.

What fp8jax's own operations save carries names, too, so that a policy can choose among them:

| name | what |
|---|---|
| `fp8jax_norm` | codes of a norm's input, and 1 / root of each row |
| `fp8jax_activation` | codes of the gate or only input and of the factor; if not recomputed, of the activated gate |
| `fp8jax_input` | codes of a linear layer's input, one copy for all layers that read it |

The result of a linear layer's product has the name `fp8jax_product`, which is not among `CHECKPOINT_NAMES`: a policy
that keeps what products give, by the name of JAX's primitive, does not see a kernel's. A number or two a token, without
which the operation before would have to run again, have the name `fp8jax_beside_product`; and so have the codes of a
weight for the backward pass, a byte a parameter, where one GPU makes both copies at once, outside of loops.

    policy = jax.checkpoint_policies.save_only_these_names(*fp8jax.CHECKPOINT_NAMES)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.core import derivatives, encoding
from fp8jax.core.derivatives import GUARD_NAME
from fp8jax.core.qtensor import quantize
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.autodiff.residuals import from_bytes, to_bytes

PRODUCT, PRODUCT_AUX = "fp8jax_product", "fp8jax_beside_product"
NORM, ACTIVATION, INPUT = CHECKPOINT_NAMES = ("fp8jax_norm", "fp8jax_activation", "fp8jax_input")
Tree = TypeVar("Tree")


def save_quantized(x: Array, name: str, spec: QuantSpec | str = "e4m3:group16") -> Array:
    """The values of `x` rounded to codes, for a `jax.checkpoint` that saves the codes.

    The codes and their scales carry a name. Under a policy that saves this name a block keeps them and no 16-bit copy,
    and what reads the value is computed again from them:

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("hidden"))
        def block(x, w1, w2):
            h = fp8jax.save_quantized(x @ w1, "hidden")
            return jax.nn.gelu(h) @ w2

    Forward and backward pass see the same rounded values. Gradients of all orders pass to `x` unchanged, as if nothing
    were rounded. Without a policy that saves the name nothing is saved in 8 bits, and values are rounded all the same.

    Args:
        x: (..., channels), any floating dtype.
        name: as of `jax.ad_checkpoint.checkpoint_name`; several values may share one.
        spec: a `QuantSpec` or its string form. Of a string scales are stored in bf16 where they are by default in fp32,
            as those of `Context.saved`: 1.125 bytes an element for "e4m3:group16". With "+expand" a value under
            1/57,344 of its group's largest (e4m3) becomes 0: no tiny one takes codes from the others (exponent >= 1).

    Returns:
        (..., channels) in the dtype of `x`. NaN and Inf stay visible.

    Raises:
        ValueError: the spec is malformed or rounds stochastically; or `x` is of no floating dtype, or has no axis.
    """
    parsed_spec = QuantSpec.parse(spec)
    if isinstance(spec, str) and parsed_spec.scale_format == "fp32":
        parsed_spec = dataclasses.replace(parsed_spec, scale_format="bf16")
    if parsed_spec.rounding != "nearest":
        raise ValueError(f"save_quantized takes no key and rounds to nearest, not {spec!r}; leave out '+stochastic'")
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"save_quantized takes (..., channels) of a floating dtype, not {x.dtype}{list(x.shape)}")
    codes = with_checkpoint_name(
        to_bytes(quantize(encoding.limit_group_range(lax.stop_gradient(x), parsed_spec, 1.0), parsed_spec)), name
    )
    return derivatives.check_differentiable_dtypes(
        "save_quantized", _straight_through(x, from_bytes(codes).dequantize(x.dtype)), x
    )


def with_checkpoint_name(tree: Tree, name: str) -> Tree:
    """A tree whose arrays carry a name for policies of `jax.checkpoint`."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)  # type: ignore[no-any-return]


@jax.custom_jvp
def _straight_through(x: Array, rounded: Array) -> Array:
    """`rounded`, whose derivative by `x` is 1. Nothing of `x` is read, so that no checkpoint computes it again."""
    return rounded


@_straight_through.defjvp
def _straight_through_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _straight_through(*primals), tangents[0]


Policy = Callable[..., Any]
_FP8JAX_NAMES = (*CHECKPOINT_NAMES, PRODUCT, PRODUCT_AUX, GUARD_NAME)


def with_products(policy: Policy | None) -> Policy | None:
    """A policy under which products of fp8jax are kept where JAX's own would be.

        policy = fp8jax.checkpoint_policies.with_products(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        block = jax.checkpoint(block, policy=policy)

    Where the policy keeps a `dot_general`, the result of a product is kept; or in its place, where that is all that the
    backward pass reads, the codes that norms, activations and linear layers keep, which are smaller. `fp8jax.transform`
    does so itself with checkpoints inside of the function that it is given.

    Args:
        policy: any policy of `jax.checkpoint`; None, which keeps nothing, stays None.

    Raises:
        TypeError: it is no function.
    """
    if policy is None or isinstance(policy, WithProducts):
        return policy
    if not callable(policy):
        raise TypeError(f"with_products takes a policy such as jax.checkpoint_policies.dots_saveable, not {policy!r}")
    return WithProducts(policy)


@dataclasses.dataclass(frozen=True)
class WithProducts:
    """What `with_products` returns; equal policies make equal ones, so that JAX traces once."""

    policy: Policy

    def __call__(self, primitive: Any, *operands: Any, **params: Any) -> Any:
        """As a policy is called: for each equation its primitive, the kinds of its operands, and its parameters."""
        decision = self.policy(primitive, *operands, **params)
        if primitive.name != "name" or params["name"] not in _FP8JAX_NAMES or _is_saved(decision):
            return decision
        return evaluate_on_product(self.policy, operands[0] if operands else None)


def evaluate_on_product(policy: Policy, result_type: Any = None) -> Any:
    """What a policy says of a product of two matrices whose result is of this kind."""
    dtype = jnp.bfloat16 if result_type is None else result_type.dtype
    dot_params: Any = {
        "dimension_numbers": (((1,), (0,)), ((), ())),
        "precision": None,
        "preferred_element_type": dtype,
    }
    operands = [] if result_type is None else [result_type, result_type]
    return policy(lax.dot_general_p, *operands, **dot_params, out_sharding=None)


def saves_products(policy: Policy | None) -> bool:
    """Whether a policy keeps the results of products."""
    return policy is not None and _is_saved(evaluate_on_product(policy))


def _is_saved(decision: Any) -> bool:
    """Whether an answer is to keep a value, or to move it to the host: JAX takes a bool, or a kind of its own."""
    return bool(decision) if isinstance(decision, bool) else type(decision).__name__ != "RecomputeType"
