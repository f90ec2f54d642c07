"""The storage of `compressed_adamw` around the moments of any optax transformation."""

import fnmatch
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
from fp8jax.ops import adamw, alike
from fp8jax.ops.adamw_leaf import within
from fp8jax.optim import checks, masters, variables
from fp8jax.optim import moments as storage
from fp8jax.optim.compressed_adamw import GROUP_SIZE, MIN_SIZE

DEFAULT = "e4m3"
# The smallest exponents of groups, by what becomes of values under the smallest code: first moments and others. Moments
# of members without gradients fall without end, and which these are is not known, as it is in Adam. A group of e4m3 so
# spans 6e6, and 8e7 where its root divides, as among live members whose gradients are 9,000 times smaller than others'.
LOWEST = {"zero": 0.7, "smallest": 0.6}

_Stored: TypeAlias = QuantSpec | formats.Format
_Path: TypeAlias = tuple[Any, ...]


class CountedState(NamedTuple):
    """The state of a transformation that counts no steps (SGD's, RMSProp's, Adadelta's), and their number."""

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

    Each step decodes the moments, runs `tx` in fp32, and encodes them as `compressed_adamw` does: in groups along the
    last axis, in place, with dynamic range expansion; what is quantized depends on global shapes alone.

    A moment is a leaf of the state that stands at a parameter's place in a copy of the tree of parameters and has its
    shape. Counts, hyperparameters and Adafactor's factored rows and columns are none, and stay as they are. A moment
    goes by the path of its tree in the state, such as "0.mu", or "inner_states.muon.inner_state.0.mu". The names in
    which optax keeps moments (`FIRST_MOMENTS`, `SECOND_MOMENTS`) are stored in e4m3 unless `moments` says otherwise,
    and sums and maxima (`GROWING`: of Adagrad and AMSGrad) in fp32, for codes to nearest would stop them or hold them,
    as are the averages of Adadelta, each of which is made of the other, errors with it; any other has to be in
    `moments`. What is not a first moment by its name never decodes to zero where it is not.

    Args:
        tx: the transformation, such as `optax.lion(1e-4)`.
        moments: storage by name, such as `{"mu": "e5m2", "nu": "ude8"}`: an 8-bit format, or "bf16" or "fp32", which
            are cast, or a `QuantSpec` that says everything. A key is the end of a path and may hold the wildcards of
            `fnmatch` ("nu", "*muon*.mu", "*"); the first that fits counts.
        group_size: elements that share a scale and an exponent.
        expand: dynamic range expansion; without it a group is scaled by its largest magnitude alone. "coat" takes the
            paper's exponents (`QuantSpec.expand`).
        min_size: smallest parameter, in elements, whose moments are quantized.
        nu_rounding: how codes and bf16 of what is not a first moment are rounded: "stochastic", by noise of the step,
            which follows slow averages; or "nearest".
        master: what `tx` updates, as of `compressed_adamw`: None, "bf16+stochastic", or high and remainder.

    Returns:
        A transformation with the state of `tx`, where each quantized moment is a `QTensor`; in a `CountedState` where
        `tx` counts no steps, and with a `master` as the `inner` of a `MasterState`. Updates have the dtype of the
        parameters where `update` is given them, else of the gradients; with `master` as of `compressed_adamw`.

    Raises:
        ValueError: an argument is out of range or unknown; or at `init`, a key fits no moment, or a leaf shaped like
            its parameter has a name that neither optax's list nor `moments` holds.
        TypeError: `tx` is no transformation; or at `init`, its moments are quantized already.

    With expansion a value under 1/6,000,000 of its group's largest is stored as 0, in what is not a first moment one
    under 1/80,000,000 as that (e4m3; the exponent k is at least 0.7 and 0.6), so that members whose gradients are gone
    take few codes from the others: beside 1 to 64 dead members of 128 the updates of Adam's other members (b2 0.95) are
    at most 0.11 off after 400 steps (0.03 to 0.10 without dead ones), of live ones 1,000 times smaller at most 0.16. In
    place of `optax.adam` and `optax.adamw` take `compressed_adamw`, which knows the dead by their updates.

    Slow averages do not stall. A first moment is rounded up or down by noise that is even over the steps, with a phase
    of its own for each element. It follows rare gradients (Lion's at b2 0.99, SGD's at 0.99, the second one of
    AdEMAMix), and decays without gradients. Codes of second moments, and bf16 of both, are rounded by independent
    noise. Moments are unbiased. Single elements scatter around fp32, more so if the average is slow and the gradients
    are noisy: the page on optimizers has figures. If that matters, take {"ema": "bf16"}.

    With `nu_rounding="nearest"` a second
    moment with b2 from about 0.98 on is too slow: of gradients that come in 2 of 100 steps, updates after 1,000 steps
    are 0.62 of the exact ones at b2 0.999 (Adam, AdaBelief, LAMB; Yogi 0.77, Adafactor 0.68, RMSProp with decay 0.99
    0.83).

    A second moment that falls for n steps without a gradient is rounded n times: what is divided by it after 100 steps
    is off by a third. That matters where a first moment outlives the second, as in `optax.contrib.simplified_ademamix`,
    whose updates of rare gradients become 1.3 times too large: take {"n": "fp32"} there.

    If the state has second moments, a finite gradient beyond 2^62 (4.6e18) counts as 2^62, because its square would
    overflow. NaN and Inf stay.

    `init` makes the state of `tx` first. Where that does not fit beside the parameters, use `jax.jit(tx.init)`, which
    never holds it.

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
        raise TypeError(f"compress_state wraps an optax transformation, not {tx!r}")
    size, smallest = (
        storage.static_integer(name, n) for name, n in (("group_size", group_size), ("min_size", min_size))
    )
    if nu_rounding not in ("stochastic", "nearest"):
        raise ValueError(f"nu_rounding must be 'stochastic' or 'nearest', not {nu_rounding!r}")
    of_master = masters.check(master)
    rules = {key: _stored(key, how, size, expand) for key, how in (moments or {}).items()}
    names = (*storage.FIRST_MOMENTS, *storage.SECOND_MOMENTS)
    known = {name: _stored(name, "fp32" if name in storage.GROWING else DEFAULT, size, expand) for name in names}
    inner = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> optax.OptState:
        if size is None or smallest is None:
            raise ValueError(
                "group_size and min_size are static: name them in optax.inject_hyperparams, "
                "static_args=('group_size', 'min_size')"
            )
        jax.tree_util.tree_map_with_path(checks.array, params)
        made = inner.init(_widen(params))
        if any(map(storage.is_quantized, jax.tree.leaves(made, is_leaf=storage.is_quantized))):
            raise TypeError(
                "moments of this transformation are in 8 bits already: take it as it is, or wrap one of optax's own"
            )
        plan = _plan(made, params, rules, known)
        stored = plan.store(smallest)
        if _count(stored) is None:
            stored = CountedState(jnp.zeros((), jnp.int32), stored)
        return storage.beside(params, stored)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        counted = isinstance(state, CountedState)
        outer, state = state, state.inner if counted else state
        plan = _plan(state, updates, rules, known)
        if size is not None and smallest is not None:
            plan.check(smallest)
        loaded = plan.load()
        wide = None if params is None else _widen(params)
        gradients = _widen(updates)
        if plan.squares:
            gradients = jax.tree.map(lambda g: within(g) if jnp.issubdtype(g.dtype, jnp.floating) else g, gradients)
        changes, new = inner.update(gradients, loaded, wide, **extra_args)
        like = updates if params is None else params
        changes = jax.tree.map(lambda u, x: u.astype(x.dtype), changes, like)
        # As it was stored: no step changes a type of the state.
        count = optax.safe_increment(outer.count) if counted else _count(new)
        if count is None:
            raise ValueError(
                "the state counts no steps, and compress_state rounds by their number: make it by init, or of one that "
                "an older version has made fp8jax.optim.compress_state.CountedState(jnp.zeros((), jnp.int32), state)"
            )
        fading, of_step, phases = noise.fading(count), noise.of_step(count), noise.of_step(0)
        rows = []
        for path, leaf, value, role in zip(
            plan.paths, plan.leaves, plan.treedef.flatten_up_to(new), plan.roles, strict=True
        ):
            words = None
            if isinstance(leaf, QTensor) and leaf.spec.underflow == "zero":
                words = phases
            elif role == "first" or (role == "other" and nu_rounding == "stochastic"):
                words = of_step
            rows.append((leaf, value, None if words is None else noise.salted(words, _salt(path))))
        stored = iter(alike.each(_store_as, None, fading, [row for row in rows if isinstance(row[0], QTensor)]))
        new = plan.treedef.unflatten(
            [next(stored) if isinstance(row[0], QTensor) else _store_as(None, fading, row) for row in rows]
        )
        return changes, CountedState(count, new) if counted else new

    functions = (init, update) if of_master is None else masters.around(init, update, of_master)
    return optax.GradientTransformationExtraArgs(*variables.looking_through(*functions))


class _Plan(NamedTuple):
    """The leaves of a state, the parameter of each that is a moment, how that is stored, and which moment it is.

    Roles are "first", "other", and None of what is no moment.
    """

    paths: list[Any]
    leaves: list[Any]
    params: list[Any]
    stored: list[_Stored | None]
    roles: list[str | None]
    treedef: jax.tree_util.PyTreeDef

    @property
    def squares(self) -> bool:
        """Whether the state has second moments, of parameters or of their rows and columns."""
        return any(getattr(key, "name", None) in storage.SQUARES for path in self.paths for key in path)

    def store(self, min_size: int) -> optax.OptState:
        """The state with every moment as the plan says."""
        columns = zip(self.leaves, self.params, self.stored, strict=True)
        return self.treedef.unflatten([x if how is None else _encode(x, p, how, min_size) for x, p, how in columns])

    def check(self, min_size: int) -> None:
        """Refuses moments that are stored in another way than the plan says."""
        for path, x, how in zip(self.paths, self.leaves, self.stored, strict=True):
            if how is not None:
                in_codes = isinstance(how, QuantSpec) and storage.is_compressed(x.shape, how, min_size)
                checks.stored("the moment", path, x, how, in_codes)

    def load(self) -> optax.OptState:
        """The state with every moment in fp32."""
        wide = iter(alike.each(_load, None, None, [x for x in self.leaves if isinstance(x, QTensor)]))
        pairs = zip(self.leaves, self.stored, strict=True)
        return self.treedef.unflatten(
            [next(wide) if isinstance(x, QTensor) else x if how is None else adamw.load(x) for x, how in pairs]
        )


def _plan(state: optax.OptState, params: Any, rules: Mapping[str, _Stored], known: Mapping[str, _Stored]) -> _Plan:
    """Finds the moments in a state by their paths.

    Args:
        state: of the wrapped transformation, as it made it or as it is stored.
        params: the tree of the parameters, or anything with its structure and shapes, such as the gradients.
        rules: how the user stores the moments that a key fits.
        known: how the moments are stored that optax itself calls so.

    Raises:
        ValueError: as `compress_state`; or a stored moment has another shape than its gradient.
    """
    at = {path: x for path, x in jax.tree_util.tree_leaves_with_path(params) if jnp.issubdtype(x.dtype, jnp.floating)}
    paths, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=storage.is_quantized)
    plan = _Plan([path for path, _ in paths], [leaf for _, leaf in paths], [], [], [], treedef)
    names, used = set(), set()
    for path, leaf in paths:
        cut = _find(path, at)
        param = None if cut is None else at[path[cut:]]
        shape = None if param is None else param.shape
        if isinstance(leaf, QTensor) and leaf.shape != shape:
            where = jax.tree_util.keystr(path)
            raise ValueError(f"the moment {where} has shape {leaf.shape}, but its gradient has {shape}")
        plan.params.append(param)
        plan.stored.append(None)
        plan.roles.append(None)
        if leaf.shape != shape or not (isinstance(leaf, QTensor) or jnp.issubdtype(leaf.dtype, jnp.floating)):
            continue
        name = jax.tree_util.keystr(path[:cut], simple=True, separator=".")
        key = next((k for k in rules if fnmatch.fnmatchcase("." + name, "*." + k)), None)
        last = name.rpartition(".")[2]
        if key is None and last not in known:
            raise ValueError(
                f"compress_state does not know what {name!r} of the state is; say how to store it, such as "
                f"moments={{'{last or '*'}': 'fp32'}}"
            )
        plan.roles[-1] = "first" if last in storage.FIRST_MOMENTS else "other"
        plan.stored[-1] = stored = known[last] if key is None else rules[key]
        if last in storage.FIRST_MOMENTS and isinstance(stored, QuantSpec) and not formats.get(stored.format).signed:
            raise ValueError(f"moments[{key!r}]: {stored.format!r} has no signs, but the first moment {name!r} does")
        names.add(name)
        used.add(key)
    # A tree without leaves is one that optax probes with (tree.map_params), or a part of optax.partition.
    if at and (unused := [key for key in rules if key not in used]):
        raise ValueError(
            f"moments: {', '.join(map(repr, unused))} fits no moment, or none that an earlier key does not; "
            f"there are {', '.join(map(repr, sorted(names))) or 'none'}"
        )
    return plan


def _find(path: _Path, at: Mapping[_Path, Any]) -> int | None:
    """Where the longest end of a leaf's path begins that is the path of a parameter."""
    return next((n for n in range(len(path) + 1) if path[n:] in at), None)


def _stored(name: str, how: str | QuantSpec, group_size: int | None, expand: bool | str) -> _Stored:
    """How a moment is stored that is given by a format's name or a spec.

    Raises:
        ValueError: the format is unknown, or the storage unsuitable; the message names the moment.
    """
    if isinstance(how, str) and not formats.get(how).scaled:
        return formats.get(how)
    underflow = "zero" if name in storage.FIRST_MOMENTS else "smallest"
    spec = QuantSpec(how, "group", group_size or 1, expand=expand, underflow=underflow) if isinstance(how, str) else how
    if not isinstance(spec, QuantSpec):
        raise ValueError(f"moments[{name!r}] must be the name of a format or a QuantSpec, not {how!r}")
    if name in storage.FIRST_MOMENTS and not formats.get(spec.format).signed:
        raise ValueError(f"moments[{name!r}]: {spec.format!r} has no signs, but first moments do")
    if formats.get(spec.format).bits not in (8, 16) or spec.granularity == "mx" or spec.rounding != "nearest":
        raise ValueError(
            f"moments[{name!r}]: {spec} is no storage of moments: give 8 or 16 bits, unlike mx, to nearest"
        )
    return spec


def _encode(value: Array, param: Any, how: _Stored, min_size: int) -> QTensor | Array:
    """A moment's first value as it is stored, sharded as its parameter."""
    if isinstance(how, formats.Format):
        return value.astype(how.dtype)
    if not storage.is_compressed(param.shape, how, min_size):
        return value
    encoded = quantize(value, how)
    if isinstance(value, jax.core.Tracer) or isinstance(param, jax.ShapeDtypeStruct) or not value.committed:
        return encoded
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), encoded, storage.zeros(param, how, min_size))


def _count(state: optax.OptState) -> Array | None:
    """The sum of what is called count in a state, which is another at each step; None where nothing is.

    How fast moments decay is not known: first ones are rounded so wherever a decay could be lost. Other integers are
    no counts of steps: `optax.apply_if_finite` has numbers of those that failed.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    counts = [
        x for path, x in leaves
        if path and getattr(path[-1], "name", None) == "count"
        and jnp.shape(x) == () and jnp.issubdtype(x.dtype, jnp.integer)
    ]  # fmt: skip
    return sum(counts[1:], counts[0]) if counts else None


def _salt(path: _Path) -> int:
    return noise.salt(jax.tree_util.keystr(path, simple=True, separator="/"))


def _load(_: None, __: None, moment: QTensor) -> Array:
    return adamw.load(moment)


def _store_as(_: None, fading: Array, row: tuple[QTensor | Array, Array, Array | None]) -> QTensor | Array:
    """A leaf of the new state, stored in the way of the old one; keys and counts pass."""
    old, new, words = row
    if isinstance(old, QTensor):
        new = encoding.bounded(new, old.spec, LOWEST[old.spec.underflow])
        if old.spec.underflow == "zero":
            assert words is not None
            return quantize_decaying(new, old, fading, words)
        return adamw.store(new, old, words)
    return adamw.store(new, old, words) if jnp.issubdtype(old.dtype, jnp.floating) else new


def _widen(tree: Any) -> Any:
    """Floating leaves in fp32, abstract ones too: the arithmetic of a step is in fp32 whatever the parameters are."""

    def widen(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.float32:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=jnp.float32)
        return x.astype(jnp.float32)

    return jax.tree.map(widen, tree)
