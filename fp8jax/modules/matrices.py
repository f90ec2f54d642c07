"""Which parameters of a model are matrices of products, and what to say of what is no model."""

import re
from typing import Any

# Tables that are looked up or added, and what only scales, are no matrices of products.
_NO_FACTORS = re.compile(r"(.*/)?(\w*(embed|pos_|position|token|scale|bias|gamma|beta|mask)\w*|pos)")
_ELSEWHERE = (
    "fp8jax.transform(fn, rules) takes any function of parameters; fp8jax.linear(x, w, recipe=...), fp8jax.einsum and "
    "fp8jax.dot_general are products to call; fp8jax.compressed_adamw takes parameters of any kind"
)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter may be a factor of a product, by its name and shape."""
    return sum(n > 1 for n in shape) >= 2 and not _NO_FACTORS.fullmatch(name)


def not_a_model(takes: str, model: Any) -> str:
    """What to say where something else than a model of Flax is given.

    Args:
        takes: what is taken, such as "fp8jax.nnx.quantize takes an NNX module".
        model: the object.
    """
    kind = type(model)
    bases = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if isinstance(model, type):
        why = f"the class {model.__name__}; make an instance of it"
    elif "equinox" in bases or "haiku" in bases:
        why = f"{kind.__name__}, of {'Equinox' if 'equinox' in bases else 'Haiku'}; {_ELSEWHERE}"
    elif isinstance(model, dict):
        why = f"dict; give the model that has these parameters, not the parameters. Without Flax, {_ELSEWHERE}"
    else:
        why = f"{kind.__name__}. Without Flax, {_ELSEWHERE}"
    return f"{takes}, not {why}"
