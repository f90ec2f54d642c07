"""Which parameters of a model are matrices of matmuls, and error messages for objects that are no model."""

import re
from typing import Any

# Embedding tables, scales and the like are no matrices of matmuls.
_NON_MATRIX_NAMES = re.compile(r"(.*/)?(\w*(embed|pos_|position|token|scale|bias|gamma|beta|mask)\w*|pos)")
_ALTERNATIVES_TEXT = (
    "fp8jax.transform(fn, rules) takes any function of parameters; fp8jax.linear(x, w, recipe=...), fp8jax.einsum and "
    "fp8jax.dot_general are products to call; fp8jax.compressed_adamw takes parameters of any kind"
)

# For each of Flax's libraries, its name and the functions to use, by the name of their sibling in the other.
_FLAX_FUNCTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "linen": (
        "Linen",
        {
            "quantize": "fp8jax.linen.quantize",
            "unquantize": "fp8jax.linen.unquantize",
            "lora": "fp8jax.lora.freeze, init and adapt on its parameters, and fp8jax.linen.quantize",
        },
    ),
    "nnx": ("NNX", {"quantize": "fp8jax.nnx.quantize", "unquantize": "fp8jax.nnx.unquantize"}),
}


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter may be a factor of a matmul, by its name and shape."""
    return sum(n > 1 for n in shape) >= 2 and not _NON_MATRIX_NAMES.fullmatch(name)


def wrong_model_message(expectation: str, model: Any) -> str:
    """The message for an object that is not a Flax model of the expected library.

    Args:
        expectation: the start of the message, such as "fp8jax.nnx.quantize takes an NNX module".
        model: the object.
    """
    kind = type(model)
    bases = {base.__module__.partition(".")[0] for base in kind.__mro__}
    flax = next(
        (name for name in _FLAX_FUNCTIONS if f"flax.{name}.module" in {base.__module__ for base in kind.__mro__}), None
    )
    if isinstance(model, type):
        description = f"the class {model.__name__}; make an instance of it"
    elif flax is not None:
        library, functions = _FLAX_FUNCTIONS[flax]
        function = expectation.partition(" ")[0].rpartition(".")[2]
        description = (
            f"{kind.__name__}, a module of Flax {library}: take {functions.get(function, functions['quantize'])}"
        )
    elif "equinox" in bases or "haiku" in bases:
        description = f"{kind.__name__}, of {'Equinox' if 'equinox' in bases else 'Haiku'}; {_ALTERNATIVES_TEXT}"
    elif isinstance(model, dict):
        description = (
            f"dict; give the model that has these parameters, not the parameters. Without Flax, {_ALTERNATIVES_TEXT}"
        )
    else:
        description = f"{kind.__name__}. Without Flax, {_ALTERNATIVES_TEXT}"
    return f"{expectation}, not {description}"
