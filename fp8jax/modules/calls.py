"""Calls of methods of Flax modules as functions of parameters by path; which parameters are matrices of matmuls."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8jax.rewrite.call_info import CallInfo
from fp8jax.rewrite.planned import PlannedCall
from fp8jax.rewrite.rules import RuleSet
from fp8jax.rewrite.transform import Transformed

# Embedding tables, scales and the like are not matrices of matmuls.
_NON_MATRIX_NAMES = re.compile(r"(.*/)?(\w*(embed|pos_|position|token|scale|bias|gamma|beta|mask)\w*|pos)")
_ALTERNATIVES_TEXT = (
    "use fp8jax.transform(fn, rules) for any function of parameters, or call fp8jax.linear(x, w, recipe=...), "
    "fp8jax.einsum or fp8jax.dot_general; fp8jax.compressed_adamw accepts any pytree of parameters"
)

# For each of Flax's libraries, its name and the functions to use, by the name of their sibling in the other.
_FLAX_FUNCTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "linen": (
        "Linen",
        {
            "quantize": "fp8jax.linen.quantize",
            "unquantize": "fp8jax.linen.unquantize",
            "Optimizer": "fp8jax.linen.TrainState",
            "lora": "fp8jax.lora.freeze, init and adapt on its parameters, and fp8jax.linen.quantize",
        },
    ),
    "nnx": ("NNX", {"quantize": "fp8jax.nnx.quantize", "unquantize": "fp8jax.nnx.unquantize"}),
}


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter may be a factor of a matmul, by its name and shape."""
    return sum(n > 1 for n in shape) >= 2 and not _NON_MATRIX_NAMES.fullmatch(name)


# A longer axis of a parameter is one of inputs, as of (inputs, heads, width).
_MAX_MATRICES = 512


def count_stacked_axes(shape: tuple[int, ...]) -> int:
    """The number of first axes of a parameter that may stack matrices, as those of experts or layers."""
    return len(list(itertools.takewhile(lambda size: size <= _MAX_MATRICES, shape[:-2])))


def wrong_model_message(expectation: str, model: Any) -> str:
    """The message for an object that is not a Flax model of the expected library.

    Args:
        expectation: the start of the message, such as "fp8jax.nnx.quantize takes an NNX module".
    """
    kind = type(model)
    bases = {base.__module__.partition(".")[0] for base in kind.__mro__}
    flax = next(
        (name for name in _FLAX_FUNCTIONS if f"flax.{name}.module" in {base.__module__ for base in kind.__mro__}), None
    )
    if isinstance(model, type):
        description = f"the class {model.__name__}; pass an instance"
    elif flax is not None:
        library, functions = _FLAX_FUNCTIONS[flax]
        function = expectation.partition(" ")[0].rpartition(".")[2]
        description = (
            f"{kind.__name__}, a module of Flax {library}; use {functions.get(function, functions['quantize'])}"
        )
    elif "equinox" in bases:
        advice = "use fp8jax.filter_transform(loss, rules) for a function of the model and data"
        description = f"{kind.__name__}, of Equinox; {advice}"
    elif "haiku" in bases:
        description = f"{kind.__name__}, of Haiku; {_ALTERNATIVES_TEXT}"
    elif isinstance(model, dict):
        description = f"dict; pass the model, not its parameters. Without Flax, {_ALTERNATIVES_TEXT}"
    else:
        description = f"{kind.__name__}. Without Flax, {_ALTERNATIVES_TEXT}"
    return f"{expectation}, not {description}"


class CallLeaf(NamedTuple):
    """The kind of one leaf of the arguments or results of a call.

    Attributes:
        kind: "parameter", "array" of the module, "argument" array, "setting", or for a result that is an input
            "passthrough".
        value: the path of a parameter or of an adapter's array, the value of a setting, or the number of the input.
    """

    kind: str
    value: Any = None
    num_arrays: int = 1


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["structure", "leaves", "num_results"]
)
@dataclasses.dataclass(frozen=True)
class Results:
    """The results and side effects of a call.

    Attributes:
        arrays: those of the results, then new values of variables.
    """

    arrays: list[Any]
    structure: Any
    leaves: tuple[CallLeaf, ...]
    num_results: int


class Call(NamedTuple):
    """A method as a function of parameters and other arrays, and the arrays of one call."""

    transformed: Transformed
    params: dict[str, Any]
    other_arrays: list[Any]

    def plan_call(self) -> PlannedCall:
        return self.transformed.plan_call(self.params, self.other_arrays)


def is_array(x: Any) -> bool:
    """Whether a leaf is an array of JAX or NumPy, or a `jax.ShapeDtypeStruct`."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))


def partition_leaves(leaves: Sequence[CallLeaf], values: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The parameters among the leaves of a call, by path, and its other arrays."""
    pairs = list(zip(leaves, values, strict=True))
    params = {leaf.value: x for leaf, x in pairs if leaf.kind == "parameter"}
    return params, [x for leaf, x in pairs if leaf.kind in ("array", "argument")]


def merge_leaves(
    leaves: Sequence[CallLeaf], arrays: Iterator[Any], params: Mapping[str, Any] = {}, input_leaves: Sequence[Any] = ()
) -> list[Any]:
    """The leaves of a call or of its results.

    Args:
        input_leaves: the inputs of the call, for results that are inputs.
    """

    def resolve(leaf: CallLeaf) -> Any:
        if leaf.kind in ("setting", "passthrough"):
            return leaf.value if leaf.kind == "setting" else input_leaves[leaf.value]
        return params[leaf.value] if leaf.kind == "parameter" else next(arrays)

    return [resolve(leaf) for leaf in leaves]


def transform_call(
    call: Callable[[list[Any]], Results],
    original: Callable,
    leaves: Sequence[CallLeaf],
    rules: RuleSet,
    *,
    names: Callable[[str], tuple[str, ...]],
    requires_product: bool,
    is_module_method: bool = False,
    checks_rules: bool,
    state_axes: Mapping[str, tuple[int, ...]] | None,
) -> Transformed:
    """A call as a function of parameters and other arrays.

    Args:
        original: the method that the function is named after.
        names, requires_product, is_module_method, checks_rules, state_axes: as of `CallInfo`.
    """

    def function(params: dict[str, Any], other_arrays: list[Any]) -> Results:
        return call(merge_leaves(leaves, iter(other_arrays), params))

    functools.update_wrapper(function, original, updated=())
    # The parameters come first, by their paths.
    leaf_kinds = [
        (leaf.kind, leaf.value)
        for leaf in sorted(leaves, key=lambda leaf: leaf.kind != "parameter")
        for _ in range(leaf.num_arrays)
        if leaf.kind != "setting"
    ]
    argument_indices = frozenset(i for i, (kind, _) in enumerate(leaf_kinds) if kind == "argument")
    adapter_paths = {i: path for i, (kind, path) in enumerate(leaf_kinds) if kind == "array" and path}

    def call_info(results: Results) -> CallInfo:
        return CallInfo(
            results.num_results,
            argument_indices,
            is_module_method,
            names,
            adapter_paths,
            requires_product,
            checks_rules,
            state_axes,
        )

    return Transformed(function, rules, (0,), (), call_info)


def static_fingerprint(*settings: Any) -> Hashable:
    """The types of settings, and the attributes of objects that are compared by identity.

    Settings that compare as equal may differ in these: 1 and True, or an object that has changed.

    Raises:
        TypeError: the object has no attributes, or one is not hashable.
    """
    identity_compared = [x for x in settings if type(x).__hash__ is object.__hash__ and not callable(x)]
    attributes = tuple(tuple(sorted(vars(x).items())) for x in identity_compared)
    hash(attributes)
    return tuple(map(type, settings)), attributes


class LayerNames:
    """A function from the path of a parameter in a module to the paths that rules match.

    It is the path of the module that contains the parameter. If this module has several matrices, the path of the
    parameter comes first.
    """

    def __init__(self, prefix: str, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        self._prefix = prefix
        module_paths = [path.rpartition("/")[0] for path, shape in shapes if is_matrix(path.rpartition("/")[2], shape)]
        self._multi_matrix_modules = {holder for holder in module_paths if module_paths.count(holder) > 1}

    def __call__(self, path: str) -> tuple[str, ...]:
        module_path = path.rpartition("/")[0]
        layer = "/".join(filter(None, (self._prefix, module_path)))
        if module_path in self._multi_matrix_modules:
            return ("/".join(filter(None, (self._prefix, path))), layer)
        return (layer,)
