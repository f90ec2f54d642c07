"""The state of one optimizer as that of another, to change optimizers during a run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax.core.qtensor import QTensor
from fp8jax.ops.optimizers import fp8lm
from fp8jax.ops.optimizers.leaf import load, store
from fp8jax.optim import flax_variables, fp8lm_adamw, moments
from fp8jax.optim.compress_state import CountedState

_ADAM_FIELDS = ("count", "mu", "nu")
_REMAINDER_FIELD = "remainder"


def convert_state(state: optax.OptState, tx: optax.GradientTransformation, params: optax.Params) -> optax.OptState:
    """Converts the state of an optimizer to the state of another one.

    It converts between `optax.adamw`, `compressed_adamw` and `fp8lm_adamw`, each with any settings. Moments are decoded
    and stored as `tx` stores them, rounded to nearest. The count of steps continues, also that of a schedule. Wrappers
    (`optax.chain`, `inject_hyperparams`, `masked`, `MultiSteps`) may differ; the state that both have is kept. It also
    converts between any transformation and the same one in `compress_state`.

    Master weights need a second call. To `fp8lm_adamw`, pass fp32 `params`, from which it creates its masters. From
    `fp8lm_adamw`, use `params_from_master(state, jnp.float32)`. To a `master` with remainders, pass the `params` of
    `fp8jax.split_master_weights`, and set the remainders with `optax.tree.set(state, remainder=remainder)`. From that
    optimizer, use `fp8jax.master_weights(state, params)`.

    Args:
        state: of the old optimizer.
        tx: the new transformation, such as `fp8jax.compressed_adamw(3e-4)`.
        params: the parameters that it continues with.

    Returns:
        A state of `tx`, placed as `tx.init(params)`.

    Raises:
        TypeError: `tx` is not an optimizer.
        ValueError: the states differ in their number of Adam states or in the parameters of their moments; or arrays of
            the old state, such as the gradients that `optax.MultiSteps` has accumulated, have no counterpart in the new
            one.

    Examples:
        >>> import fp8jax, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones((64, 128))}
        >>> state = optax.adamw(3e-4).init(params)
        >>> tx = fp8jax.compressed_adamw(3e-4)
        >>> fp8jax.convert_state(state, tx, params).mu["w"].codes.dtype
        dtype(float8_e4m3fn)
    """
    if not hasattr(tx, "init"):
        raise TypeError(
            f"convert_state expects (state, tx, params), where tx is an optimizer, got a {type(tx).__name__}"
        )
    template = tx.init(params)
    (old, _), (new, count_mask) = (_strip_counts(flax_variables.unbox(x)) for x in (state, template))
    olds, news = (jax.tree_util.tree_leaves_with_path(x, is_leaf=moments.is_quantized) for x in (old, new))
    has_fp8lm = any(map(fp8lm_adamw.is_fp8lm_state, moments.iter_namedtuples(new, _is_adam)))
    if not has_fp8lm and [path for path, _ in olds] == [path for path, _ in news]:
        converted = jax.tree.map(_store_like, new, old, is_leaf=moments.is_quantized)
    else:
        converted = _convert_adams(old, new)
    leaves = iter(jax.tree.leaves(jax.tree.map(_place_like, converted, new)))
    init_leaves = jax.tree.leaves(template)
    rows = [x if is_count else next(leaves) for x, is_count in zip(init_leaves, count_mask, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(template), rows)


def _strip_counts(state: Any) -> tuple[Any, list[bool]]:
    """A state without the counts that `compress_state` adds, and for each array whether it is such a count."""

    def is_counted(node: Any) -> bool:
        return isinstance(node, CountedState)

    def mask_counts(node: Any) -> Any:
        return CountedState(True, jax.tree.map(lambda _: False, node.inner)) if is_counted(node) else False  # type: ignore[arg-type]

    without_counts = jax.tree.map(lambda node: node.inner if is_counted(node) else node, state, is_leaf=is_counted)
    return without_counts, jax.tree.leaves(jax.tree.map(mask_counts, state, is_leaf=is_counted))


def _convert_adams(old: Any, new: Any) -> Any:
    """The new state with the moments and the count of the old one, and all else that both have."""
    old_records = list(moments.iter_namedtuples(old, _is_adam))
    adams, other_records = ([x for x in old_records if _is_adam(x) == is_adam] for is_adam in (True, False))
    num_new_adams = sum(map(_is_adam, moments.iter_namedtuples(new, _is_adam)))
    if len(adams) != num_new_adams or not adams:
        raise ValueError(
            f"the old state has {len(adams)} parts with {', '.join(_ADAM_FIELDS)} (optax.adamw has one), and the new "
            f"state has {num_new_adams}. Convert between states with the same number of parts, or between a "
            "transformation and its compress_state"
        )
    count, remaining_adams = adams[0].count, iter(adams)

    def convert(node: Any) -> Any:
        if not moments.is_namedtuple(node):
            return node
        if _is_adam(node):
            return _convert_adam(next(remaining_adams), node)
        matching_index = next((i for i, x in enumerate(other_records) if type(x) is type(node)), None)
        matching_record = None if matching_index is None else other_records.pop(matching_index)

        def convert_field(name: str, value: Any) -> Any:
            old_value = getattr(matching_record, name, None)
            if _has_adam(value):
                return jax.tree.map(convert, value, is_leaf=moments.is_namedtuple)
            if isinstance(value, dict) and isinstance(old_value, dict):  # hyperparameters
                old_value = value | {key: x for key, x in old_value.items() if key in value}
            if matching_record is not None and _structure(old_value) == _structure(value):
                return jax.tree.map(_store_like, value, old_value, is_leaf=moments.is_quantized)
            return jnp.asarray(count, value.dtype) if name == "count" else value

        return node._replace(**{name: convert_field(name, value) for name, value in node._asdict().items()})

    converted = jax.tree.map(convert, new, is_leaf=moments.is_namedtuple)
    for node in other_records:
        non_adam_fields = [x for x in node if not _has_adam(x)]
        if any(jnp.ndim(x) for x in jax.tree.leaves(non_adam_fields)):
            raise ValueError(
                f"the new optimizer has no state that corresponds to the {type(node).__name__} of the old one"
            )
    return converted


def _has_adam(tree: Any) -> bool:
    return any(map(_is_adam, moments.iter_namedtuples(tree, _is_adam)))


def _is_adam(node: Any) -> bool:
    return fp8lm_adamw.is_fp8lm_state(node) or (
        moments.is_namedtuple(node) and sorted(set(node._fields) - {_REMAINDER_FIELD}) == sorted(_ADAM_FIELDS)
    )


def _convert_adam(old: Any, new: Any) -> Any:
    """The state of an Adam with the moments of another."""
    new_fields, is_fp8lm = {"count": jnp.asarray(old.count, new.count.dtype)}, fp8lm_adamw.is_fp8lm_state(new)
    for name in ("mu", "nu", "master"):
        if hasattr(new, name) and hasattr(old, name):
            tree, values = getattr(new, name), getattr(old, name)
            old_structure, new_structure = _structure(values), _structure(tree)
            if old_structure != new_structure:
                raise ValueError(f"{name} belongs to other parameters: {old_structure} before, and {new_structure} now")
            store = _store_fp8lm if is_fp8lm else _store_like
            new_fields[name] = jax.tree.map(store, tree, values, is_leaf=moments.is_quantized)
    remainder_trees = [getattr(x, _REMAINDER_FIELD, None) for x in (old, new)]
    if None not in remainder_trees and _structure(remainder_trees[0]) == _structure(remainder_trees[1]):
        new_fields[_REMAINDER_FIELD] = jax.tree.map(_store_like, remainder_trees[1], remainder_trees[0])
    new = new._replace(**new_fields)
    if not is_fp8lm:
        return new
    stored = [getattr(new, name) for name in ("master", "mu", "nu") if hasattr(new, name)]
    return new._replace(largest=jax.tree.map(fp8lm.stack_amax, *stored, is_leaf=moments.is_quantized))


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=moments.is_quantized)


def _store_like(like: Any, old: Any) -> Any:
    """The values of `old`, stored as `like` is; arrays without a floating dtype are returned unchanged."""
    if not isinstance(old, QTensor) and not (hasattr(old, "dtype") and jnp.issubdtype(old.dtype, jnp.floating)):
        return _convert_remainder(like, old)
    if old.shape != like.shape:
        raise ValueError(f"the old state has an array of shape {old.shape}, but the new one has shape {like.shape}")
    if isinstance(like, QTensor) and isinstance(old, QTensor) and like.storage_key == old.storage_key:
        return old if old.spec == like.spec else dataclasses.replace(old, spec=like.spec)
    values = load(old)
    return store(values, like)


def _convert_remainder(like: Any, old: Any) -> Any:
    """The remainder of a master weight in the width of `like`, int8 or int16; other arrays are returned unchanged."""
    dtypes = [getattr(x, "dtype", None) for x in (old, like)]
    if dtypes == [jnp.int8, jnp.int16]:
        return old.astype(jnp.int16) * 256
    if dtypes == [jnp.int16, jnp.int8]:
        return jnp.clip((old.astype(jnp.int32) + 128) // 256, -128, 127).astype(jnp.int8)
    return old


def _store_fp8lm(like: Any, old: Any) -> Any:
    """`_store_like` for `fp8lm_adamw`, whose scales are powers of two."""
    new = _store_like(like, old)
    if new is old or not isinstance(new, QTensor):
        return new
    return fp8lm.quantize_to_pow2_scale(load(old), new.spec)


def _place_like(x: Any, like: Any) -> Any:
    """An array with the sharding of `like`, if that is committed."""
    is_committed = isinstance(like, jax.Array) and not isinstance(like, jax.core.Tracer) and like.committed
    return jax.device_put(x, like.sharding) if is_committed else x
