"""The operations as functions for any model, each of which knows what the others have made: `fp8jax.linear` and so on.

They are those of `fp8jax.ops` with the registry of `fp8jax.modules.provenance`; give `known=fp8jax.ops.saved.BLANK` for
the operations without it.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from fp8jax.modules.provenance import REGISTRY
from fp8jax.ops import activation as activations
from fp8jax.ops import linear as products
from fp8jax.ops import lora, norm, ragged, scaled, transformer

Function = TypeVar("Function", bound=Callable[..., Any])


def _knowing(function: Function) -> Function:
    @functools.wraps(function)
    def call(*args: Any, known: Any = REGISTRY, **keywords: Any) -> Any:
        return function(*args, known=known, **keywords)

    return cast(Function, call)


activation = _knowing(activations.activation)
glu = _knowing(activations.glu)
rms_norm = _knowing(norm.rms_norm)
layer_norm = _knowing(norm.layer_norm)
dot_general = _knowing(products.dot_general)
einsum = _knowing(products.einsum)
scaled_linear = _knowing(scaled.scaled_linear)
delayed_linear = scaled_linear
norm_linear = _knowing(transformer.norm_linear)
attention_output = _knowing(transformer.attention_output)
glu_linear = _knowing(transformer.glu_linear)
linear = _knowing(products.linear)
ragged_dot = _knowing(ragged.ragged_dot)
lora_linear = _knowing(lora.lora_linear)
