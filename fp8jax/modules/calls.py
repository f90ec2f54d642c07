"""Calls of methods of Flax modules as functions of parameters by path, and of other arrays in a list."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8jax.modules.matrices import is_matrix
from fp8jax.rewrite.call_info import CallInfo
from fp8jax.rewrite.planned import PlannedCall
from fp8jax.rewrite.rules import RuleSet
from fp8jax.rewrite.transform import Transformed


class CallLeaf(NamedTuple):
    """What one leaf of a call is: a "parameter", with its path; another "array" of the module, or of an "argument"; a
    "setting", with its value; or of what a call leaves what was "given", with its number. An adapter's "array" has its
    path."""

    kind: str
    value: Any = None
    num_arrays: int = 1


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["structure", "leaves", "num_results"]
)
@dataclasses.dataclass(frozen=True)
class Results:
    """What a call leaves.

    Attributes:
        arrays: those of the results, and then new values of variables.
        structure: of all that it leaves.
        leaves: of that.
        num_results: how many arrays are of the results.
    """

    arrays: list[Any]
    structure: Any
    leaves: tuple[CallLeaf, ...]
    num_results: int


class Call(NamedTuple):
    """A call, taken apart: the method as a function of parameters and other arrays, and these."""

    transformed: Transformed
    params: dict[str, Any]
    other_arrays: list[Any]

    def plan_call(self) -> PlannedCall:
        return self.transformed.plan_call(self.params, self.other_arrays)


def is_array(x: Any) -> bool:
    """Whether a leaf is an array, of JAX or NumPy, or stands for one."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))


def partition_leaves(leaves: Sequence[CallLeaf], values: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The parameters among the leaves of a call, by path, and its other arrays."""
    pairs = list(zip(leaves, values, strict=True))
    params = {leaf.value: x for leaf, x in pairs if leaf.kind == "parameter"}
    return params, [x for leaf, x in pairs if leaf.kind in ("array", "argument")]


def merge_leaves(
    leaves: Sequence[CallLeaf], arrays: Iterator[Any], params: Mapping[str, Any] = {}, given_leaves: Sequence[Any] = ()
) -> list[Any]:
    """The leaves of a call, or of what it leaves.

    Args:
        leaves: what they are.
        arrays: in their order.
        params: by path.
        given_leaves: what leaves are that were given.
    """

    def resolve(leaf: CallLeaf) -> Any:
        if leaf.kind in ("setting", "given"):
            return leaf.value if leaf.kind == "setting" else given_leaves[leaf.value]
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
) -> Transformed:
    """A call as a function of parameters and other arrays.

    Args:
        call: the call, of its leaves.
        original: the method, after which it is named.
        leaves: what they are.
        rules: on the paths of layers.
        names, requires_product, is_module_method, checks_rules: what else is known of the caller; see `CallInfo`.
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
        )

    return Transformed(function, rules, (0,), (), call_info)


def static_fingerprint(*settings: Any) -> Hashable:
    """What tells settings apart that compare as equal: their types, as of 1 and True, and what objects hold that are
    compared by identity, and so may change.

    Raises:
        TypeError: that cannot be told, or a setting is not hashable.
    """
    identity_compared = [x for x in settings if type(x).__hash__ is object.__hash__ and not callable(x)]
    attributes = tuple(tuple(sorted(vars(x).items())) for x in identity_compared)
    hash(attributes)
    return tuple(map(type, settings)), attributes


class LayerNames:
    """The paths that rules match, for the path of a parameter in a module.

    That of a layer is that of the module that holds its matrix; of one of several matrices, first its own.

    Args:
        prefix: the path of the module in its model.
        shapes: the parameters of the module, by path.
    """

    def __init__(self, prefix: str, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        self._prefix = prefix
        module_paths = [path.rpartition("/")[0] for path, shape in shapes if is_matrix(path.rpartition("/")[2], shape)]
        self._multi_matrix_modules = {holder for holder in module_paths if module_paths.count(holder) > 1}

    def __call__(self, path: str) -> tuple[str, ...]:
        module_path = path.rpartition("/")[0]
        layer = "/".join(filter(None, (self._prefix, module_path)))
        return (
            ("/".join(filter(None, (self._prefix, path))), layer)
            if module_path in self._multi_matrix_modules
            else (layer,)
        )
