"""Training on several devices: 8-bit collectives, partitions and memory plans."""

from fp8jax.dist.experts import TokenExchange as TokenExchange
from fp8jax.dist.experts import expert_collectives as expert_collectives
from fp8jax.dist.gather import gather_weights as gather_weights
from fp8jax.dist.partition import Partition as Partition
from fp8jax.dist.partition import partition as partition
from fp8jax.dist.partition import slices as slices
from fp8jax.dist.plan import Plan as Plan
from fp8jax.dist.plan import plan as plan
from fp8jax.dist.reduce import Factors as Factors
from fp8jax.dist.reduce import all_reduce_gradients as all_reduce_gradients
from fp8jax.dist.reduce import init_factors as init_factors
from fp8jax.dist.reduce import reduce_scatter_gradients as reduce_scatter_gradients
from fp8jax.dist.sequence import gather_linear as gather_linear
from fp8jax.dist.sequence import gather_sequence as gather_sequence
from fp8jax.dist.sequence import scatter_sequence as scatter_sequence
from fp8jax.dist.sequence import sequence_collectives as sequence_collectives
from fp8jax.dist.token_gather import TokenGather as TokenGather
from fp8jax.dist.weight_gather import fsdp_gather_weight as fsdp_gather_weight
from fp8jax.dist.weight_gather import gather_quantized as gather_quantized
from fp8jax.dist.weight_gather import regather_policy as regather_policy

__all__ = [
    "Factors",
    "Partition",
    "Plan",
    "TokenExchange",
    "TokenGather",
    "all_reduce_gradients",
    "expert_collectives",
    "fsdp_gather_weight",
    "gather_linear",
    "gather_quantized",
    "gather_sequence",
    "gather_weights",
    "init_factors",
    "partition",
    "plan",
    "reduce_scatter_gradients",
    "regather_policy",
    "scatter_sequence",
    "sequence_collectives",
    "slices",
]


def __dir__() -> list[str]:
    return __all__
