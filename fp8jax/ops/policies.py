"""Policies of `jax.checkpoint` for models with products in 8 bits.

JAX's own policies choose by the primitive that computes a value, and do not see a product that a kernel or a branch
computes: they would compute it again. Here products answer as the `dot_general` that they stand for.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from fp8jax.core.derivatives import GUARD_NAME
from fp8jax.ops.saveable import CHECKPOINT_NAMES, PRODUCT, PRODUCT_AUX

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
