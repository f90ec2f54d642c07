"""The storage of `compressed_adamw` around the moments of any optax transformation."""

import fnmatch
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fp8jax.core import encoding, formats, noise
from fp8jax.core.qtensor import QTensor, quantize, quantize_decaying
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.autodiff.observations import compare, current_layer_scope, observe
from fp8jax.ops.optimizers.leaf import load, scale_and_clip, store
from fp8jax.ops.optimizers.step import map_leaves
from fp8jax.optim import checks, flax_variables, master_weights
from fp8jax.optim import moments as storage
from fp8jax.optim.compressed_adamw import GROUP_SIZE, MIN_SIZE

DEFAULT_FORMAT = "e4m3"
# The smallest exponents of groups, by `flush_to_zero` of their spec: True for first moments. Moments of elements
# without gradients decay without end, and here, unlike in Adam, these elements are not known. The limit keeps range
# for the others.
MIN_EXPONENTS = {True: 0.7, False: 0.6}

_Storage: TypeAlias = QuantSpec | formats.Format
_Path: TypeAlias = tuple[Any, ...]


class CountedState(NamedTuple):
    """The state of a transformation that counts no steps (SGD, RMSProp, Adadelta), and a count."""

    count: Array  # type: ignore[assignment]
    inner: optax.OptState


def compress_state(
    tx: optax.GradientTransformation,
    moments: Mapping[str, str | QuantSpec] | None = None,
    *,
    group_size: int | np.integer = GROUP_SIZE,
    expand: bool | str = True,
    min_size: int | np.integer = MIN_SIZE,
    nu_rounding: str = "stochastic",
    master: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of an optax transformation in 8 bits between its steps.

    Each step decodes the moments, runs `tx` in fp32, and encodes them as `compressed_adamw` does. Groups run along the
    last axis, in place, with dynamic range expansion. The choice of quantized moments depends on global shapes only.

    A moment is a leaf of the state in a copy of the tree of parameters, with the shape of its parameter. Counts,
    hyperparameters, and Adafactor's rows and columns are not moments, and stay unchanged. The name of a moment is the
    path of its tree in the state, such as "0.mu", or "inner_states.muon.inner_state.0.mu".

    By default, optax's names of moments (`FIRST_MOMENTS`, `SECOND_MOMENTS`) are stored in e4m3. Sums and maxima
    (`MONOTONE_ACCUMULATORS`, of Adagrad, AMSGrad and Adadelta) stay in fp32, because rounding would stop them. The
    moments of `optax.rmsprop(centered=True)` do too, because rounding can make the variance nu - mu^2 negative. Any
    other name must be in `moments`. A nonzero value decodes to zero only if it is a first moment.

    **Range.** With expansion in e4m3, a first moment below 1/6,000,000 of its group's largest is stored as 0. Other
    moments have a lower limit of 1/80,000,000. Elements without gradients therefore reduce the range of the others only
    a little. Use `compressed_adamw` instead of `optax.adam` and `optax.adamw`: it finds dead elements by their updates.

    **Slow averages** do not stall and are unbiased. First moments are rounded with noise that is evenly distributed
    over the steps, with a phase for each element. Second moments, and bf16, are rounded with independent noise. Single
    elements scatter around the fp32 values, more if the average is slow and the gradients are noisy (figures:
    docs/howto/optimizer.md). If that matters, use {"ema": "bf16"}. With `nu_rounding="nearest"`, second moments with b2
    above 0.98 follow too slowly.

    **Long decays.** A second moment without a gradient is rounded at each step. After 100 steps its error is a third.
    This matters if a first moment decays more slowly, as in `optax.contrib.simplified_ademamix`. Use {"n": "fp32"}
    there.

    If the state has second moments, finite gradients are clipped to 2^62 (4.6e18), because their squares would
    overflow. NaN and Inf stay.

    `init` first creates the state of `tx`. If that does not fit in memory, use `jax.jit(tx.init)`.

    Args:
        tx: the transformation, such as `optax.lion(1e-4)`.
        moments: storage by name, such as `{"mu": "e5m2", "nu": "ude8"}`: an 8-bit format, or "bf16" or "fp32", which
            are cast, or a `QuantSpec`. A key is the end of a path and may contain the wildcards of `fnmatch` ("nu",
            "*muon*.mu", "*"). The first key that matches is used.
        group_size: elements that share a scale and an exponent.
        expand: dynamic range expansion; without it a group is scaled by its amax alone. "coat" uses the paper's
            exponents (`QuantSpec.expand`).
        min_size: smallest size of a parameter, in elements, with quantized moments.
        nu_rounding: how codes and bf16 of all but first moments are rounded: "stochastic", with noise that depends on
            the step, which follows slow averages; or "nearest".
        master: which weights `tx` updates, as of `compressed_adamw`.

    Returns:
        A transformation with the state of `tx`, where each quantized moment is a `QTensor`. The state is in a
        `CountedState` if `tx` counts no steps, and with a `master` it is the `inner` of a `MasterState`. Updates have
        the dtype of the parameters if they are passed to `update`, else that of the gradients; with `master` as of
        `compressed_adamw`.

    Raises:
        ValueError: an argument is out of range or unknown; or at `init`, a key matches no moment, or a leaf shaped like
            its parameter has a name that is neither in optax's list nor in `moments`; or `moments` rounds the moments
            of a variance; or `tx` is `optax.flatten(...)`, which joins the moments of all parameters.
        TypeError: `tx` is not a transformation; or at `init`, its moments are quantized already, or a parameter has 8
            bits; or at `update`, the gradient of a real parameter is complex.

    Examples:
        >>> import fp8jax, jax.numpy as jnp, optax
        >>> tx = fp8jax.compress_state(optax.lion(1e-4), {"mu": "e5m2"})
        >>> params = {"w": jnp.ones((64, 128))}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> optax.tree.get(state, "mu")["w"].codes.dtype
        dtype(float8_e5m2)

    References:
        Xi et al., COAT: Compressing Optimizer States and Activation for Memory-Efficient FP8 Training, ICLR 2025.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(f"compress_state expects an optax transformation, got {tx!r}")
    static_group_size, static_min_size = (
        storage.to_static_integer(name, n) for name, n in (("group_size", group_size), ("min_size", min_size))
    )
    if nu_rounding not in ("stochastic", "nearest"):
        raise ValueError(f"nu_rounding must be 'stochastic' or 'nearest', not {nu_rounding!r}")
    master_format = master_weights.parse_master(master)
    rules = {
        key: _resolve_storage(key, format_or_spec, static_group_size, expand)
        for key, format_or_spec in (moments or {}).items()
    }
    names = (*storage.FIRST_MOMENTS, *storage.SECOND_MOMENTS)
    default_storage = {
        name: _resolve_storage(
            name, "fp32" if name in storage.MONOTONE_ACCUMULATORS else DEFAULT_FORMAT, static_group_size, expand
        )
        for name in names
    }
    inner = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> optax.OptState:
        _, size = storage.require_static(static_group_size, static_min_size)
        checks.check_params(params, only_floating=False)
        inner_state = inner.init(_to_float32(params))
        if any(map(storage.is_quantized, jax.tree.leaves(inner_state, is_leaf=storage.is_quantized))):
            raise TypeError(
                "the moments of this transformation already have 8 bits. Use it unchanged, or wrap a transformation "
                "of optax"
            )
        plan = _make_plan(inner_state, params, rules, default_storage)
        stored_state = plan.encode_state(size)
        if _sum_counts(stored_state) is None:
            stored_state = CountedState(jnp.zeros((), jnp.int32), stored_state)
        return storage.replicate_scalars(stored_state, params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        is_counted = isinstance(state, CountedState)
        outer_state, state = state, state.inner if is_counted else state
        plan = _make_plan(state, updates, rules, default_storage)
        if static_group_size is not None and static_min_size is not None:
            plan.check_storage(static_min_size)
        loaded_state = plan.decode_state()
        wide_params = None if params is None else _to_float32(params)
        gradients = _to_float32(updates)
        if plan.has_second_moments:
            gradients = jax.tree.map(
                lambda g: scale_and_clip(g) if jnp.issubdtype(g.dtype, jnp.floating) else g, gradients
            )
        changes, new_state = inner.update(gradients, loaded_state, wide_params, **extra_args)
        like = updates if params is None else params
        changes = jax.tree_util.tree_map_with_path(_cast_like, changes, like)
        # The new state is stored like the old one: no step changes its types.
        count = optax.safe_increment(outer_state.count) if is_counted else _sum_counts(new_state)
        if count is None:
            raise ValueError(
                "the state has no step count, which compress_state needs for rounding. Create the state with init, or "
                "convert the state of an older version with fp8jax.optim.compress_state.CountedState(jnp.zeros((), "
                "jnp.int32), state)"
            )
        dither, step_seed, phases = noise.decay_dither(count), noise.step_seed(count), noise.step_seed(0)
        rows = []
        for leaf, value in zip(plan.leaves, plan.treedef.flatten_up_to(new_state), strict=True):
            seed = None
            if isinstance(leaf.value, QTensor) and leaf.value.spec.flush_to_zero:
                seed = phases
            elif leaf.role == "first" or (leaf.role == "other" and nu_rounding == "stochastic"):
                seed = step_seed
            if seed is not None:
                name = jax.tree_util.keystr(leaf.path, simple=True, separator="/")
                seed = noise.fold_in_seed(seed, noise.param_seed(name))
            rows.append((leaf.value, value, seed))
        stored = iter(map_leaves(_store_like, None, dither, [row for row in rows if isinstance(row[0], QTensor)]))
        new_leaves = [next(stored) if isinstance(row[0], QTensor) else _store_like(None, dither, row) for row in rows]
        if (layer_scope := current_layer_scope("")) is not None:
            for i, (leaf, (_, value, _), new) in enumerate(zip(plan.leaves, rows, new_leaves, strict=True)):
                if isinstance(new, QTensor):
                    role, layer_scope = "m" if leaf.role == "first" else "v", layer_scope._replace(layer=leaf.layer)
                    new_leaves[i] = new.with_codes(observe(new.codes, layer_scope, role, compare(value, new)))
        new_state = plan.treedef.unflatten(new_leaves)
        return changes, CountedState(count, new_state) if is_counted else new_state

    functions = (
        (init, update) if master_format is None else master_weights.with_master_weights(init, update, master_format)
    )
    return optax.GradientTransformationExtraArgs(*flax_variables.with_unboxed_variables(*functions))


def _cast_like(path: _Path, change: Array, like: Array) -> Array:
    if not jnp.issubdtype(like.dtype, jnp.complexfloating):
        checks.check_real(path, change)
    return change.astype(like.dtype)


class _StateLeaf(NamedTuple):
    """A leaf of a state.

    Attributes:
        param: the parameter that its path ends with, or None; `layer` is that parameter's path.
        storage: how it is stored; None for a leaf that is not a moment.
        role: "first" or "other"; None for a leaf that is not a moment.
    """

    path: _Path
    value: Any
    param: Any
    layer: str
    storage: _Storage | None = None
    role: str | None = None


class _MomentPlan(NamedTuple):
    """The leaves of a state, with the storage of its moments."""

    leaves: list[_StateLeaf]
    treedef: jax.tree_util.PyTreeDef

    @property
    def has_second_moments(self) -> bool:
        """Whether the state has second moments, of parameters or of their rows and columns."""
        keys = (key for leaf in self.leaves for key in leaf.path)
        return any(getattr(key, "name", None) in storage.SECOND_MOMENT_FIELDS for key in keys)

    def encode_state(self, min_size: int) -> optax.OptState:
        """The state with every moment stored by the plan."""
        return self.treedef.unflatten(
            [
                leaf.value if leaf.storage is None else _encode_moment(leaf.value, leaf.param, leaf.storage, min_size)
                for leaf in self.leaves
            ]
        )

    def check_storage(self, min_size: int) -> None:
        """Raises ValueError for moments that are not stored by the plan."""
        for path, x, *_, spec, _ in self.leaves:
            if spec is not None:
                is_quantized = isinstance(spec, QuantSpec) and storage.should_quantize(x.shape, spec, min_size)
                checks.check_storage("the moment", path, x, spec, is_quantized)

    def decode_state(self) -> optax.OptState:
        """The state with every moment in fp32."""
        quantized = [leaf.value for leaf in self.leaves if isinstance(leaf.value, QTensor)]
        decoded = iter(map_leaves(_decode_moment, None, None, quantized))
        return self.treedef.unflatten(
            [
                next(decoded) if isinstance(x, QTensor) else x if spec is None else load(x)
                for _, x, *_, spec, _ in self.leaves
            ]
        )


def _make_plan(
    state: optax.OptState, params: Any, rules: Mapping[str, _Storage], default_storage: Mapping[str, _Storage]
) -> _MomentPlan:
    """Finds the moments in a state by their paths.

    Args:
        state: of the wrapped transformation, in its own form or in the stored form.
        params: the tree of the parameters, or anything with its structure and shapes, such as the gradients.
        rules: the user's storage, by key.
        default_storage: the storage of optax's own names.

    Raises:
        ValueError: as `compress_state`; or a stored moment has another shape than its gradient.
    """
    params_by_path = {
        path: x for path, x in jax.tree_util.tree_leaves_with_path(params) if jnp.issubdtype(x.dtype, jnp.floating)
    }
    total_size = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    paths, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=storage.is_quantized)
    variance_paths = [
        path for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_variance) if _is_variance(node)
    ]
    leaves, names, used_rules = list[_StateLeaf](), set(), set()
    for path, leaf in paths:
        # The longest path of a parameter that this one ends with.
        param_start = next((n for n in range(len(path) + 1) if path[n:] in params_by_path), None)
        param = None if param_start is None else params_by_path[path[param_start:]]
        shape = None if param is None else param.shape
        if isinstance(leaf, QTensor) and leaf.shape != shape:
            found = "is None or not of a floating dtype" if shape is None else f"has shape {shape}"
            raise ValueError(
                f"the moment {jax.tree_util.keystr(path)} has shape {leaf.shape}, but its gradient {found}"
            )
        param_path = () if param_start is None else path[param_start:]
        leaves.append(_StateLeaf(path, leaf, param, jax.tree_util.keystr(param_path, simple=True, separator="/")))
        if param is None and leaf.shape == (total_size,) and getattr(path[-1], "name", None) in default_storage:
            raise ValueError(
                f"the moment {jax.tree_util.keystr(path)} is one array of all parameters, as inside of optax.flatten, "
                "which compress_state cannot quantize. Use optax.flatten(fp8jax.compress_state(...)) instead"
            )
        if leaf.shape != shape or not (isinstance(leaf, QTensor) or jnp.issubdtype(leaf.dtype, jnp.floating)):
            continue
        name = jax.tree_util.keystr(path[:param_start], simple=True, separator=".")
        last = name.rpartition(".")[2]
        if last in storage.FACTORED_MOMENTS:
            continue
        key = next((k for k in rules if fnmatch.fnmatchcase("." + name, "*." + k)), None)
        if key is None and last not in default_storage:
            raise ValueError(
                f"compress_state does not know the field {name!r} of the state; pass its storage, such as "
                f"moments={{'{last or '*'}': 'fp32'}}"
            )
        is_first, stored = last in storage.FIRST_MOMENTS, default_storage[last] if key is None else rules[key]
        if any(path[: len(start)] == start for start in variance_paths):
            stored = formats.get("fp32") if key is None else stored
            if stored != formats.get("fp32"):
                raise ValueError(
                    f"moments[{key!r}]: the moment {name!r} cannot be rounded, because the update divides by the root "
                    "of nu - mu**2, which would become negative; use 'fp32', or omit it"
                )
        leaves[-1] = leaves[-1]._replace(storage=stored, role="first" if is_first else "other")
        if is_first and isinstance(stored, QuantSpec) and not formats.get(stored.format).is_signed:
            raise ValueError(
                f"moments[{key!r}]: {stored.format!r} is unsigned, but the first moment {name!r} is signed"
            )
        names.add(name)
        used_rules.add(key)
    # Trees without leaves come from optax's tree.map_params and optax.partition.
    if params_by_path and (unused := [key for key in rules if key not in used_rules]):
        raise ValueError(
            f"moments: {', '.join(map(repr, unused))} matches no moment, or only those of an earlier key; the moments "
            f"are {', '.join(map(repr, sorted(names))) or 'none'}"
        )
    return _MomentPlan(leaves, treedef)


def _is_variance(node: Any) -> bool:
    """Whether a node is a state of optax's `scale_by_stddev`. optax exports only one of its two classes."""
    return type(node).__name__ in ("ScaleByRStdDevState", "ScaleByRStdDevWithCountState")


def _resolve_storage(
    name: str, format_or_spec: str | QuantSpec, group_size: int | None, expand: bool | str
) -> _Storage:
    """The storage of a moment from a format's name or a spec.

    Raises:
        ValueError: the format is unknown, or the storage unsuitable; the message names the moment.
    """
    if isinstance(format_or_spec, str) and not formats.get(format_or_spec).needs_scale:
        return formats.get(format_or_spec)
    is_first = name in storage.FIRST_MOMENTS
    spec = (
        QuantSpec(format_or_spec, "group", group_size or 1, expand=expand, flush_to_zero=is_first)
        if isinstance(format_or_spec, str)
        else format_or_spec
    )
    if not isinstance(spec, QuantSpec):
        raise ValueError(f"moments[{name!r}] must be the name of a format or a QuantSpec, not {format_or_spec!r}")
    if name in storage.FIRST_MOMENTS and not formats.get(spec.format).is_signed:
        raise ValueError(f"moments[{name!r}]: {spec.format!r} is unsigned, but first moments are signed")
    if formats.get(spec.format).bits not in (8, 16) or spec.granularity == "mx" or spec.rounding != "nearest":
        raise ValueError(
            f"moments[{name!r}]: {spec} cannot store moments; use 8 or 16 bits, rounding to nearest, and a "
            "granularity other than mx"
        )
    return spec


def _encode_moment(value: Array, param: Any, storage_spec: _Storage, min_size: int) -> QTensor | Array:
    """The stored form of a moment's first value, sharded like its parameter."""
    if isinstance(storage_spec, formats.Format):
        return value.astype(storage_spec.dtype)
    if not storage.should_quantize(param.shape, storage_spec, min_size):
        return value
    encoded = quantize(value, storage_spec)
    if isinstance(value, jax.core.Tracer) or isinstance(param, jax.ShapeDtypeStruct) or not value.committed:
        return encoded
    return jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), encoded, storage.zeros(param, storage_spec, min_size)
    )


def _sum_counts(state: optax.OptState) -> Array | None:
    """The sum of all fields named count in a state, which changes at each step; None if there is none.

    Other integers are not counts of steps, such as the failures that `optax.apply_if_finite` counts.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    counts = [
        x for path, x in leaves
        if path and getattr(path[-1], "name", None) == "count"
        and jnp.shape(x) == () and jnp.issubdtype(x.dtype, jnp.integer)
    ]  # fmt: skip
    return sum(counts[1:], counts[0]) if counts else None


def _decode_moment(_: None, __: None, moment: QTensor) -> Array:
    return load(moment)


def _store_like(_: None, dither: Array, row: tuple[QTensor | Array, Array, Array | None]) -> QTensor | Array:
    """A leaf of the new state, stored like the old one; keys and counts stay."""
    old, new, seed = row
    if isinstance(old, QTensor):
        new = encoding.limit_group_range(new, old.spec, MIN_EXPONENTS[old.spec.flush_to_zero])
        if old.spec.flush_to_zero:
            assert seed is not None
            return quantize_decaying(new, old, dither, seed)
        return store(new, old, seed)
    return store(new, old, seed) if jnp.issubdtype(old.dtype, jnp.floating) else new


def _to_float32(tree: Any) -> Any:
    """A tree with floating leaves in fp32, also abstract ones."""

    def widen(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.float32:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=jnp.float32)
        return x.astype(jnp.float32)

    return jax.tree.map(widen, tree)
