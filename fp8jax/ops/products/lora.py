"""Low-rank adapters of frozen weights (LoRA: Hu et al., 2021, section 4.1): y = x w + s (x a) b.

The weight may be a `FrozenWeight`, as in QLoRA (Dettmers et al., 2023), with products on 8-bit matrix units if the
device has them. Adapters are computed in the input's dtype.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.products.linear import linear
from fp8jax.ops.products.weights import FrozenWeight, freeze


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
    """The two factors of an update to a weight.

    Attributes:
        a: (..., inputs, rank), with the leading axes of the weight.
        b: (..., rank, outputs).
        alpha: static number. The product of the factors is multiplied by `scale` = alpha / rank.
    """

    a: Array
    b: Array
    alpha: float = dataclasses.field(default=1.0, metadata={"static": True})

    @property
    def rank(self) -> int:
        return int(self.a.shape[-1])

    @property
    def T(self) -> "Adapter":
        """The adapter of the transposed weight."""
        return dataclasses.replace(self, a=jnp.swapaxes(self.b, -1, -2), b=jnp.swapaxes(self.a, -1, -2))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the adapted weight, (..., inputs, outputs)."""
        return (*self.a.shape[:-1], self.b.shape[-1])


Weight = Array | FrozenWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A frozen parameter with its adapter, as `adapt` places it in a model's parameters.

    Attributes:
        weight: an array or a result of `freeze`.
        adapter: adapter of this weight as a matrix.
    """

    weight: Weight
    adapter: Adapter

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    def __jax_array__(self, *_: Any) -> Any:
        raise TypeError(
            f"a weight {self.shape} with an adapter is not an array. Call the model through fp8jax.transform, "
            "fp8jax.nnx.quantize or fp8jax.linen.quantize, or merge the adapter with fp8jax.lora.merge"
        )

    __getitem__ = __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __jax_array__


def init_adapter(
    key: Array, shape: tuple[int, ...], rank: int, alpha: float, dtype: DTypeLike = jnp.float32
) -> Adapter:
    """Return an adapter that adds zero: `a` uniform within 1 / sqrt(inputs), as in `peft`, and `b` zero.

    Args:
        key: PRNG key.
        shape: (..., inputs, outputs) of the weight.
        rank: columns of `a`.
        alpha: see `Adapter`.
        dtype: dtype of both factors.

    Raises:
        ValueError: the rank is not from 1 to the smaller side of the weight, or alpha is not positive and finite.
    """
    *stacked, inputs, outputs = shape
    if not 1 <= rank <= min(inputs, outputs):
        raise ValueError(
            f"the rank of an adapter for a weight {shape} must be from 1 to {min(inputs, outputs)}, got {rank}"
        )
    if not 0 < alpha < float("inf"):
        raise ValueError(f"alpha of an adapter must be positive and finite, got {alpha}")
    a = jax.random.uniform(key, (*stacked, inputs, rank), jnp.float32, -1, 1) / inputs**0.5
    return Adapter(a.astype(dtype), jnp.zeros((*stacked, rank, outputs), dtype), float(alpha))


def lora_linear(
    x: Array,
    w: Weight,
    adapter: Adapter,
    *,
    recipe: Recipe | Linear | str,
    key: Array | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
) -> Array:
    """Return x @ w + scale (x a) b, differentiable in x and the adapter, but not in the weight.

    Args:
        x: (..., inputs), floating.
        w: (inputs, outputs), an array or a result of `freeze`, for the recipe's products.
        adapter: adapter of `w`. Its factors are cast to the dtype of `x`.
        recipe, key: as in `fp8jax.linear`.
        dropout: rate of dropout on the adapter's input; needs `dropout_key`.

    Returns:
        (..., outputs) in the dtype of `x`.

    Raises:
        ValueError: the adapter does not fit the weight, dropout is out of range or has no key; or as `fp8jax.linear`.
    """
    check_adapter_shape(adapter, w.shape)
    y = linear(x, w if isinstance(w, FrozenWeight) else lax.stop_gradient(w), recipe=recipe, key=key)
    return y + apply_adapter(x, adapter, dropout, dropout_key)


def apply_adapter(x: Array, adapter: Adapter, dropout: float = 0.0, key: Array | None = None) -> Array:
    """Return the adapter's part of a product, scale (x a) b; see `lora_linear`."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    if dropout:
        if key is None:
            raise ValueError(f"dropout {dropout} needs dropout_key=jax.random.key(...); set dropout=0 for evaluation")
        x = jnp.where(jax.random.bernoulli(key, 1 - dropout, x.shape), x / (1 - dropout), 0).astype(x.dtype)
    return (x @ adapter.a.astype(x.dtype)) @ (adapter.b * adapter.scale).astype(x.dtype)


def check_adapter_shape(adapter: Adapter, shape: tuple[int, ...], name: str = "the weight") -> None:
    """Raise ValueError if an adapter does not fit a weight of this shape, or its factors have different ranks."""
    w_shape, stacked = tuple(shape), adapter.a.ndim - 2
    # A parameter may have several input or output axes.
    fits = w_shape[:stacked] == adapter.shape[:-2] and any(
        (math.prod(w_shape[stacked:i]), math.prod(w_shape[i:])) == adapter.shape[-2:]
        for i in range(stacked + 1, len(w_shape))
    )
    if adapter.a.shape[-1] != adapter.b.shape[-2] or not fits:
        raise ValueError(
            f"an adapter with a {tuple(adapter.a.shape)} and b {tuple(adapter.b.shape)} does not fit {name}, "
            f"{tuple(shape)}"
        )


def merge_adapter(w: Weight, adapter: Adapter, dtype: DTypeLike | None = None) -> Array:
    """Return w + scale a b, computed in fp32.

    Args:
        w: (..., inputs, outputs).
        adapter: adapter of `w`.
        dtype: dtype of the result; None means that of `w`, or fp32 for codes.

    Raises:
        ValueError: the adapter does not fit the weight.
    """
    check_adapter_shape(adapter, w.shape)
    values = w.dequantize() if isinstance(w, FrozenWeight) else w
    delta = jnp.matmul(adapter.a.astype(jnp.float32), adapter.b.astype(jnp.float32), precision="highest")
    return (values.astype(jnp.float32) + adapter.scale * delta.reshape(w.shape)).astype(dtype or values.dtype)


def adapt(params: Any, adapters: Mapping[str, Adapter]) -> Any:
    """Return the tree with `AdaptedWeight` in place of the weights at the adapters' paths.

    `fp8jax.transform` and `fp8jax.linen.quantize` accept these trees, and trees with frozen weights, as parameters,
    also through checkpointing, scans and sharding. Products with adapted weights become `fp8jax.lora.linear`.

    Args:
        params: tree of arrays or frozen weights.
        adapters: adapters by path, as in `init`.

    Raises:
        ValueError: a path has no weight, or one of another shape.
    """
    weights = _weights_by_path(params, adapters)
    for path, adapter in adapters.items():
        check_adapter_shape(adapter, weights[path].shape, path)
    return _replace_leaves(params, {path: AdaptedWeight(weights[path], adapter) for path, adapter in adapters.items()})


def _weights_by_path(params: Any, adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    weights = leaves_by_path(params)
    if unknown := sorted(set(adapters) - set(weights)):
        raise ValueError(f"there is no weight {unknown[0]!r} for an adapter; use one of {', '.join(weights)}")
    return weights


def _is_weight_leaf(x: Any) -> bool:
    return isinstance(x, (FrozenWeight, QTensor, Adapter, AdaptedWeight))


def leaves_by_path(params: Any) -> dict[str, Any]:
    """Return the leaves of a tree of parameters by path, joined by "/". Frozen weights and QTensors are leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_weight_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def match_matrices(params: Any, targets: str) -> dict[str, Any]:
    """Return the matrices of a tree with a path that fully matches a regular expression, by path.

    Raises:
        ValueError: it is not a regular expression, or matches no matrix. The message lists all matrices.
    """
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise ValueError(f"targets {targets!r} is not a regular expression: {error}") from None
    matrices = {path: w for path, w in leaves_by_path(params).items() if len(w.shape) >= 2}
    matches = {path: w for path, w in matrices.items() if pattern.fullmatch(path)}
    if not matches:
        raise ValueError(f"targets {targets!r} match no matrix; the matrices are: {', '.join(matrices) or 'none'}")
    return matches


def init_adapters(
    key: Array,
    params: Any,
    *,
    rank: int,
    alpha: float,
    targets: str,
    dtype: DTypeLike = jnp.float32,
    axes: tuple[int, int] = (1, 1),
) -> dict[str, Adapter]:
    """Return new adapters, by path, for the matrices with matching paths; these are the trainable parameters.

    Args:
        key: PRNG key.
        params: tree of arrays or frozen weights (..., inputs, outputs).
        rank, alpha, dtype: as in `init_adapter`.
        targets: regular expression of whole paths, such as r".*/(q|v)/kernel".
        axes: input and output axes of arrays, as in `freeze`. Frozen weights store their own.

    Raises:
        ValueError: nothing matches; or as `init_adapter`.
    """
    matrices = match_matrices(params, targets)
    return {
        path: init_adapter(jax.random.fold_in(key, i), matrix_shape(w, axes), rank, alpha, dtype)
        for i, (path, w) in enumerate(sorted(matrices.items()))
    }


def matrix_shape(w: Any, axes: tuple[int, int]) -> tuple[int, ...]:
    """Return (..., inputs, outputs) of a weight with `axes` input and output axes."""
    if isinstance(w, FrozenWeight):
        return w.matrix.shape
    n_stacked, ins = len(w.shape) - sum(axes), len(w.shape) - axes[1]
    return (*w.shape[:n_stacked], math.prod(w.shape[n_stacked:ins]), math.prod(w.shape[ins:]))


def freeze_weights(
    params: Any, spec: QuantSpec | str = "e4m3", *, targets: str = ".*kernel", axes: tuple[int, int] = (1, 1)
) -> Any:
    """Return the tree with the matching matrices frozen, one after the other, so that each can be freed.

    Codes are sharded like the weights. Args as in `freeze`; `targets` is a regular expression of whole paths.

    Raises:
        ValueError: nothing matches; or as `freeze`.
    """
    matrices = match_matrices(params, targets)
    freeze_jit = jax.jit(freeze, static_argnums=(1, 2))
    return _replace_leaves(params, {path: freeze_jit(w, QuantSpec.parse(spec), axes) for path, w in matrices.items()})


def merge_adapters(params: Any, adapters: Mapping[str, Adapter], dtype: DTypeLike | None = None) -> Any:
    """Return the tree with adapters merged into their weights by `merge_adapter`.

    Raises:
        ValueError: a path has no weight, or one of another shape.
    """
    weights = _weights_by_path(params, adapters)
    return _replace_leaves(
        params, {path: merge_adapter(weights[path], adapter, dtype) for path, adapter in adapters.items()}
    )


def _replace_leaves(params: Any, new: Mapping[str, Any]) -> Any:
    def replace_leaf(path: Any, x: Any) -> Any:
        return new.get(jax.tree_util.keystr(path, simple=True, separator="/"), x)

    return jax.tree_util.tree_map_with_path(replace_leaf, params, is_leaf=_is_weight_leaf)
