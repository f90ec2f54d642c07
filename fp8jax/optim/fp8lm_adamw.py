"""FP8-LM's AdamW (Peng et al., 2023, section 2.2): fp16 master weights and 8-bit first moments, 6 bytes a parameter."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from fp8jax.core import formats, noise
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import adamw, fp8lm
from fp8jax.ops.adamw_leaf import Form, renewed
from fp8jax.ops.choice import check_impl
from fp8jax.optim import checks, masters, moments, variables
from fp8jax.optim.compressed_adamw import MIN_SIZE, ScalarOrSchedule
from fp8jax.optim.fused import FusedTransformation

ROUNDINGS = ("nearest", "stochastic")
# An argument that is a Python integer, optax.inject_hyperparams would turn into a traced array.
NONE_STACKED = np.int32(0)
_NOT_CUT = (
    "fp8lm_adamw cuts no directions, so that fp8jax.tracked cannot follow it: chain fp8jax.track_weights() behind it, "
    "which measures updates"
)


class FP8LMState(NamedTuple):
    """State of `fp8lm_adamw` with master weights of its own.

    Attributes:
        count: steps taken, int32 scalar.
        largest: largest magnitudes of the three others, for each scale, of which the next step makes its bounds; None
            for what is kept in fp32.
        master: master weights: the tree of the parameters with an fp16 `QTensor` or an fp32 array for each.
        mu: first moments, an e4m3 `QTensor` or an fp32 array each.
        nu: second moments, an fp16 `QTensor` or an fp32 array each.

    Fields are in the order of the alphabet, as in a dict of them.
    """

    count: Array  # type: ignore[assignment]  # optax calls it so; tuple.count is shadowed
    largest: Any
    master: optax.Params
    mu: optax.Updates
    nu: optax.Updates


class FP8LMHeldState(NamedTuple):
    """State of `fp8lm_adamw` with a `master`, whose parameters are their own master weights, but for remainders.

    Attributes:
        count, mu, nu: as of `FP8LMState`.
        largest: largest magnitudes of both moments, likewise.
        remainder: the tree of the parameters with the int8 or int16 remainder of each that has one, None for others;
            None for "bf16+stochastic".
    """

    count: Array  # type: ignore[assignment]
    largest: Any
    mu: optax.Updates
    nu: optax.Updates
    remainder: Any


def fp8lm_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    mu: str = "e4m3",
    master: str | None = None,
    master_rounding: str = "nearest",
    stacked: Any = NONE_STACKED,
    group_size: int | np.integer | None = None,
    min_size: int | np.integer = MIN_SIZE,
    impl: str = "auto",
) -> FusedTransformation:
    r"""AdamW with its master weights in the state: 5 bytes a parameter, and 6 with a gradient in FP8.

    ============= ======================== =====
    fp16, scaled  master weight            2
    e4m3, scaled  first moment             1
    fp16, scaled  second moment            2
    e4m3, scaled  gradient                 1
    ============= ======================== =====

    Every one has one scale for each tensor or stacked layer, a power of two in the state, so that what does not change
    keeps its value when a scale does. All arithmetic is in fp32.

    So few scales cannot span everything: e4m3 reaches 2e-6 of a tensor's largest first moment, and fp16 the square of
    that of its second. Where gradients of a tensor span more, or after an outlier of 10,000 times their size or a
    hundredfold fall of all of them at b2 = 0.999, updates are off by 60 to 80 % for as long as the moments remember.
    `group_size=128` gives each 128 elements of the last axis scales of their own, for 0.2 bytes a parameter.

    Master weights are made of the parameters at `init`. What the caller holds is a working copy in whatever dtype the
    model computes with: in bf16 two bytes more. `update` gives its distance from the new master weights, and so puts
    right what rounding does to it; after `step` it is their value in its dtype, bit for bit. Where it is no rounding of
    its master weight, somebody has changed it, and it is taken in its place: parameters may be loaded, projected or
    averaged between steps, and what follows in a chain may change updates. Who keeps no copy between steps makes it of
    the state, `working_copy(state)`. While gradients are computed they exist in the dtype of the copy; accumulated over
    microbatches, in fp32.

    Gradients may be arrays, or a `QTensor` each, as `fp8jax.dist.all_reduce_gradients(..., decode=False)` leaves them.
    `optax.clip_by_global_norm` would take such codes for gradients: take `fp8jax.clipped` or
    `fp8jax.clip_by_global_norm`.

    A second moment that is not zero never becomes zero, and a first moment does before it: where rounding to nearest
    would undo a decay, up or down is by noise that all elements share (`fp8jax.core.noise.fading`). So a weight without
    a gradient stands still. A finite gradient beyond 1.8e19 has an infinite second moment, as in optax, and it alone.

    One fp16 step of a weight is 0.05 to 0.1 %: to nearest, changes under half of that are lost, which the paper
    accepts; stochastically they are kept on average. With `master` the parameters that the caller holds are the master
    weights, as of `compressed_adamw`: nothing is a copy, and with 8 bits of remainder beside bf16, 24 bits in all are
    6 bytes a parameter with both moments, where the paper's are 7 with the copy.

    Scales come from bounds, which nothing exceeds: each step tells the largest magnitudes that it stored, and those
    after the next one follow from them, the gradient's and the learning rate; they are one to two binades above the
    largest magnitudes themselves. A copy that was changed to what lies beyond them is taken one step later. So a step
    is one pass, after one over the gradient for its largest magnitudes: with gradients in FP8 and working copies in
    bf16 both read and write 16 bytes a parameter. XLA alone, which computes steps with groups, reads what it stored
    again.

    Args:
        learning_rate: step size, or a schedule of the number of steps taken.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment; not negative.
        eps_root: added to the second moment under the root; not negative.
        weight_decay: strength of the decoupled weight decay, multiplied by the learning rate.
        mask: tree of booleans with the structure of the parameters, or a function of the parameters that gives one:
            which parameters decay. None decays all.
        mu: format of the first moment, "e4m3" or "e5m2".
        master: what the optimizer updates. None: master weights in fp16 in its state, the paper's. "bf16+stochastic",
            "bf16+int8", "bf16+int16", "fp16+int8" and "fp16+int16": the parameters, as of `compressed_adamw`.
        master_rounding: how master weights in fp16 are rounded, "nearest" or "stochastic", with noise from the step's
            number, the parameter's path and the element's position.
        stacked: how many leading axes of a parameter stack layers, each of which has scales of its own: an integer, a
            tree of them that is a prefix of the parameters, or a function of the parameters that gives one. Groups are
            of one layer anyway.
        group_size: elements along the last axis that share a scale, such as 128; None for one scale a layer, the
            paper's. A parameter whose scales would take 10 % of its codes keeps all three in fp32.
        min_size: parameters of fewer elements keep all three in fp32, with `master` both moments.
        impl: "xla"; "triton", the fused kernel for parameters in codes on CUDA; or "auto", the kernel where it can run.
            JAX takes no kernels in a jitted program on a GPU whose arrays lie on two automatic meshes: "xla" there.

    Returns:
        A transformation with state `FP8LMState`, with `master` `FP8LMHeldState`, and `step(grads, state, params) ->
        (params, state)`, which replaces the parameters. Updates have the dtype of the parameters; of bf16 and fp16 ones
        with `master` they are fp32, and nothing may change them before they are added, as of `compressed_adamw`.

    Raises:
        ValueError: an argument is out of range or unknown; or at `update`, a gradient does not have the shape of its
            parameter, or no parameters are given.
        TypeError: at `init`, a parameter is not of a floating dtype, or not of the one that `master` says.

    Examples:
        >>> import fp8jax, jax.numpy as jnp
        >>> tx = fp8jax.fp8lm_adamw(3e-4, weight_decay=0.1)
        >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> grads = {"w": fp8jax.quantize(jnp.ones((64, 128)), "e4m3")}
        >>> params, state = tx.step(grads, state, params)
        >>> round(sum(fp8jax.state_bytes((state, grads)).values()) / params["w"].size, 2)
        6.0
    """
    for name, value, high in (("b1", b1, 1), ("b2", b2, 1), ("eps", eps, np.inf), ("eps_root", eps_root, np.inf)):
        checks.constant(name, value, high)
    checks.number("weight_decay", weight_decay, 0)
    checks.rate(learning_rate)
    if mu not in ("e4m3", "e5m2"):
        raise ValueError(f"mu {mu!r} is not 'e4m3' or 'e5m2'; fp8jax.compressed_adamw stores others")
    if master_rounding not in ROUNDINGS:
        raise ValueError(f"unknown master_rounding {master_rounding!r}; it is one of {', '.join(ROUNDINGS)}")
    of_master = masters.check(master)
    if of_master is not None and master_rounding != "nearest":
        raise ValueError(
            f"master_rounding is of master weights in fp16; master {master!r} says how its own are rounded"
        )
    kind: Any = FP8LMState if of_master is None else FP8LMHeldState
    check_impl(impl)
    smallest = moments.static_integer("min_size", min_size)
    size = None if group_size is None else moments.static_integer("group_size", group_size)
    if impl == "triton" and group_size is not None:
        raise ValueError(f"impl 'triton' is for one scale a layer; with group_size={group_size} take 'auto' or 'xla'")

    def stored(name: str, depth: Any) -> QuantSpec:
        fmt, underflow = mu if name == "mu" else "fp16", "smallest" if name == "nu" else "zero"
        if size is None:
            return QuantSpec(fmt, "tensor", stacked=int(depth), underflow=underflow)
        return QuantSpec(fmt, "group", size, underflow=underflow)

    def in_codes(x: Any, depth: Any) -> bool:
        """Whether a parameter is; of one mind for all that is stored of it."""
        assert smallest is not None
        return moments.is_compressed(x.shape, stored("mu", depth), smallest)

    def init(params: optax.Params) -> Any:
        if smallest is None or (size is None and group_size is not None):
            raise ValueError(
                "group_size and min_size are static: name them in optax.inject_hyperparams, "
                "static_args=('group_size', 'min_size')"
            )
        jax.tree_util.tree_map_with_path(checks.floating, params)
        depths = jax.tree.broadcast(moments.tree_of(stacked, params), params)

        def scaled(param: Any, depth: Any) -> adamw.Moment:
            if not in_codes(param, depth):
                return jnp.array(param, jnp.float32, copy=True)
            return _master(param, stored("master", depth))

        def zeros(name: str) -> optax.Updates:
            def one(param: Any, depth: Any) -> adamw.Moment:
                how = stored(name, depth) if in_codes(param, depth) else formats.get("fp32")
                return moments.zeros(param, how, 0)

            return jax.tree.map(one, params, depths)

        def largest(*stored: Any) -> Array | None:
            return jnp.stack([*map(fp8lm.largest, stored)]) if isinstance(stored[0], QTensor) else None

        kept = {"mu": zeros("mu"), "nu": zeros("nu")}
        own = {} if of_master else {"master": jax.tree.map(scaled, params, depths)}
        maxima = jax.tree.map(largest, *(own | kept).values(), is_leaf=moments.is_quantized)
        own = own or {"remainder": masters.remainders(params, of_master)}
        return moments.beside(params, kind(count=jnp.zeros([], jnp.int32), largest=maxima, **own, **kept))

    def advance(
        form: Form,
        grads: Any,
        state: Any,
        params: Any,
        adam: adamw.Adam,
        part: adamw.Portion = adamw.WHOLE,
    ) -> tuple[Any, Any]:
        """The changes of parameters or new ones, and the state."""
        if params is None:
            raise ValueError("fp8lm_adamw needs the parameters: call update(grads, state, params)")
        checks.gradients(grads, state.mu)
        structure: Any = jax.tree.structure(params)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        decays = moments.tree_of(mask, params)
        if of_master is None:
            weights, scaled = params, state.master
        else:
            weights, scaled = masters.of_state(params, state.remainder, of_master), jax.tree.map(lambda _: None, params)
        parts = {"master": scaled, "mu": state.mu, "nu": state.nu, "largest": state.largest}
        columns = {name: structure.flatten_up_to(tree) for name, tree in parts.items()}
        if smallest is not None and (size is not None or group_size is None):
            depths = structure.flatten_up_to(jax.tree.broadcast(moments.tree_of(stacked, params), params))
            for name in ("mu", "nu") if of_master else ("master", "mu", "nu"):
                for path, x, depth in zip(paths, columns[name], depths, strict=True):
                    checks.stored(name, path, x, stored(name, depth), in_codes(x, depth))
        of_step = noise.of_step(adam.count)

        def words(path: Any, x: Any) -> Array | None:
            rounds = master_rounding == "stochastic" or (of_master and of_master.stochastic and x.dtype == jnp.bfloat16)
            return part.own(fp8lm.salted(of_step, part.path(path)), x.shape) if rounds else None

        salted = [words(path, x) for path, x in zip(paths, jax.tree.leaves(params), strict=True)]
        which = structure.flatten_up_to(jax.tree.broadcast(True if decays is None else decays, params))
        given = structure.flatten_up_to(grads), structure.flatten_up_to(weights)
        leaves = [fp8lm.MasterLeaf(*row) for row in zip(*given, *columns.values(), salted, which, strict=True)]
        quantized, plain = ([leaf for leaf in leaves if leaf.quantized == kind] for kind in (True, False))
        fused, rest = iter(fp8lm.apply(form, quantized, adam, impl)), iter(_plain(form, plain, adam))
        rows = [next(fused if leaf.quantized else rest) for leaf in leaves]
        result, new_master, *new = (structure.unflatten([row[i] for row in rows]) for i in range(5))
        kept = dict(zip(("mu", "nu", "largest"), new, strict=True))
        if of_master is None:
            return result, FP8LMState(count=adam.count, master=new_master, **kept)
        result, remainder = (result, None) if state.remainder is None else masters.apart(result)
        return result, FP8LMHeldState(count=adam.count, remainder=remainder, **kept)

    def adam_of(state: Any, **gate: Any) -> adamw.Adam:
        checks.state(state, kind)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        count = optax.safe_increment(state.count)
        return adamw.Adam(b1, b2, eps, eps_root, count, rate, weight_decay, **gate)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if extra_args.get("max_direction") is not None:
            raise ValueError(_NOT_CUT)
        return advance("update", updates, state, params, adam_of(state))

    def step(
        grads: optax.Updates,
        state: Any,
        params: optax.Params,
        *,
        key: None = None,
        factor: ArrayLike | None = None,
        applied: ArrayLike | None = None,
        max_direction: ArrayLike | None = None,
        part: adamw.Portion = adamw.WHOLE,
    ) -> tuple[optax.Params, Any]:
        if max_direction is not None:
            raise ValueError(_NOT_CUT)
        if key is not None:
            raise ValueError(
                "fp8lm_adamw takes no key: its rounding is a hash of the step; give master_rounding='stochastic', or "
                "master='bf16+stochastic'"
            )
        new, advanced = advance("step", grads, state, params, adam_of(state, factor=factor, applied=applied), part)
        if applied is not None:
            advanced = advanced._replace(count=jnp.where(applied, advanced.count, state.count))
        return new, advanced

    return FusedTransformation(*variables.looking_through(init, update, step))


def is_state(node: Any) -> bool:
    """Whether a node of a tree is the state of `fp8lm_adamw`, whose scales are told by the axes that are stacked."""
    return isinstance(node, (FP8LMState, FP8LMHeldState))


def working_copy(state: FP8LMState, dtype: DTypeLike = jnp.bfloat16) -> optax.Params:
    """The parameters of the master weights of `fp8lm_adamw`, for who keeps none between steps.

    Raises:
        TypeError: the state has none: with `master`, the parameters are their own.
    """
    if not isinstance(state, FP8LMState):
        raise TypeError(
            f"a {type(state).__name__} has no master weights: fp8jax.master_weights(state, params) gives them"
        )
    return jax.tree.map(lambda x: adamw.load(x).astype(dtype), state.master, is_leaf=moments.is_quantized)


def _plain(form: Form, leaves: Sequence[fp8lm.MasterLeaf], adam: adamw.Adam) -> list[tuple[Any, ...]]:
    """The step of parameters that are too small for codes, with moments in fp32, and master weights or their own."""
    columns = ([adamw.load(leaf.grad) for leaf in leaves], [leaf.mu for leaf in leaves], [leaf.nu for leaf in leaves])
    rows = []
    for leaf, direction, m, v in zip(leaves, *adamw.advanced(*columns, adam), strict=True):
        value = leaf.weight.astype(jnp.float32) if leaf.master is None else fp8lm.current(leaf.master, leaf.copy)
        change = direction + adam.weight_decay * value if leaf.decays else direction
        change = jnp.asarray(-adam.rate, jnp.float32) * change
        if leaf.master is None:
            rows.append((renewed(form, leaf, change), None, m, v, None))
            continue
        new = value + change
        result = new - leaf.weight.astype(jnp.float32) if form == "update" else new
        rows.append((result.astype(leaf.dtype), new, m, v, None))
    if adam.applied is None:
        return rows
    old = [(leaf.weight, leaf.master, leaf.mu, leaf.nu, None) for leaf in leaves]
    applied: list[tuple[Any, ...]] = jax.tree.map(lambda new, old: jnp.where(adam.applied, new, old), rows, old)
    return applied


def _master(param: Array, spec: QuantSpec) -> QTensor:
    block = spec.block_shape(param.shape)
    return quantize_with_scale(param, spec, fp8lm.scale_above(fp8lm.largest_of(param, block), formats.get("fp16")))
