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
from fp8jax.ops.dispatch.choice import check_impl
from fp8jax.ops.optimizers import adamw, fp8lm
from fp8jax.ops.optimizers.adamw_leaf import Form, apply_change
from fp8jax.optim import checks, flax_variables, master_weights, moments
from fp8jax.optim.compressed_adamw import MIN_SIZE, ScalarOrSchedule
from fp8jax.optim.fused import FusedTransformation

ROUNDINGS = ("nearest", "stochastic")
# An argument that is a Python integer, optax.inject_hyperparams would turn into a traced array.
NO_LAYER_AXES = np.int32(0)
_NO_CLIP_MESSAGE = (
    "fp8lm_adamw cuts no directions, so that fp8jax.with_weight_bounds cannot follow it: chain "
    "fp8jax.track_weight_amax() behind it, which measures updates"
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


class FP8LMRemainderState(NamedTuple):
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
    layer_axes: Any = NO_LAYER_AXES,
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
    the state, `params_from_master(state)`. While gradients are computed they exist in the dtype of the copy;
    accumulated over microbatches, in fp32.

    Gradients may be arrays, or a `QTensor` each, as `fp8jax.dist.all_reduce_gradients(..., dequantize=False)` leaves
    them. `optax.clip_by_global_norm` would take such codes for gradients: take `fp8jax.with_clipping` or
    `fp8jax.clip_by_global_norm`.

    A second moment that is not zero never becomes zero, and a first moment does before it: where rounding to nearest
    would undo a decay, up or down is by noise that all elements share (`fp8jax.core.noise.decay_dither`). So a weight
    without a gradient stands still. A finite gradient beyond 1.8e19 has an infinite second moment, as in optax, and it
    alone.

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
        layer_axes: how many leading axes of a parameter stack layers, each of which has scales of its own: an integer,
            a tree of them that is a prefix of the parameters, or a function of the parameters that gives one. Groups
            are of one layer anyway.
        group_size: elements along the last axis that share a scale, such as 128; None for one scale a layer, the
            paper's. A parameter whose scales would take 10 % of its codes keeps all three in fp32.
        min_size: parameters of fewer elements keep all three in fp32, with `master` both moments.
        impl: "xla"; "triton", the fused kernel for parameters in codes on CUDA; or "auto", the kernel where it can run.
            JAX takes no kernels in a jitted program on a GPU whose arrays lie on two automatic meshes: "xla" there.

    Returns:
        A transformation with state `FP8LMState`, with `master` `FP8LMRemainderState`, and `step(grads, state, params)
        -> (params, state)`, which replaces the parameters. Updates have the dtype of the parameters; of bf16 and fp16
        ones with `master` they are fp32, and nothing may change them before they are added, as of `compressed_adamw`.

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
        checks.check_adam_constant(name, value, high)
    checks.check_number("weight_decay", weight_decay, 0)
    checks.check_learning_rate(learning_rate)
    if mu not in ("e4m3", "e5m2"):
        raise ValueError(f"mu {mu!r} is not 'e4m3' or 'e5m2'; fp8jax.compressed_adamw stores others")
    if master_rounding not in ROUNDINGS:
        raise ValueError(f"unknown master_rounding {master_rounding!r}; it is one of {', '.join(ROUNDINGS)}")
    master_format = master_weights.parse_master(master)
    if master_format is not None and master_rounding != "nearest":
        raise ValueError(
            f"master_rounding is of master weights in fp16; master {master!r} says how its own are rounded"
        )
    state_class: Any = FP8LMState if master_format is None else FP8LMRemainderState
    check_impl(impl)
    static_min_size = moments.to_static_integer("min_size", min_size)
    static_group_size = None if group_size is None else moments.to_static_integer("group_size", group_size)
    if impl == "triton" and group_size is not None:
        raise ValueError(f"impl 'triton' is for one scale a layer; with group_size={group_size} take 'auto' or 'xla'")

    def storage_spec(name: str, num_layer_axes: Any) -> QuantSpec:
        fmt, underflow = mu if name == "mu" else "fp16", "smallest" if name == "nu" else "zero"
        if static_group_size is None:
            return QuantSpec(fmt, "tensor", layer_axes=int(num_layer_axes), underflow=underflow)
        return QuantSpec(fmt, "group", static_group_size, underflow=underflow)

    def is_quantized(x: Any, num_layer_axes: Any) -> bool:
        """Whether a parameter is; of one mind for all that is stored of it."""
        assert static_min_size is not None
        return moments.should_quantize(x.shape, storage_spec("mu", num_layer_axes), static_min_size)

    def init(params: optax.Params) -> Any:
        if static_min_size is None or (static_group_size is None and group_size is not None):
            raise ValueError(
                "group_size and min_size are static: name them in optax.inject_hyperparams, "
                "static_args=('group_size', 'min_size')"
            )
        jax.tree_util.tree_map_with_path(checks.check_floating, params)
        depths = jax.tree.broadcast(moments.resolve_tree(layer_axes, params), params)

        def init_master(param: Any, depth: Any) -> adamw.Moment:
            if not is_quantized(param, depth):
                return jnp.array(param, jnp.float32, copy=True)
            return _quantize_master(param, storage_spec("master", depth))

        def zeros(name: str) -> optax.Updates:
            def zeros_for_param(param: Any, depth: Any) -> adamw.Moment:
                storage = storage_spec(name, depth) if is_quantized(param, depth) else formats.get("fp32")
                return moments.zeros(param, storage, 0)

            return jax.tree.map(zeros_for_param, params, depths)

        def stack_amax(*stored: Any) -> Array | None:
            return jnp.stack([*map(fp8lm.block_amax, stored)]) if isinstance(stored[0], QTensor) else None

        moment_trees = {"mu": zeros("mu"), "nu": zeros("nu")}
        weight_trees = {} if master_format else {"master": jax.tree.map(init_master, params, depths)}
        amax_tree = jax.tree.map(stack_amax, *(weight_trees | moment_trees).values(), is_leaf=moments.is_quantized)
        weight_trees = weight_trees or {"remainder": master_weights.init_remainders(params, master_format)}
        return moments.replicate_scalars(
            params, state_class(count=jnp.zeros([], jnp.int32), largest=amax_tree, **weight_trees, **moment_trees)
        )

    def apply_adamw(
        form: Form,
        grads: Any,
        state: Any,
        params: Any,
        adam: adamw.Adam,
        tree_slice: adamw.TreeSlice = adamw.WHOLE_TREE,
    ) -> tuple[Any, Any]:
        """The changes of parameters or new ones, and the state."""
        if params is None:
            raise ValueError("fp8lm_adamw needs the parameters: call update(grads, state, params)")
        checks.check_gradients(grads, state.mu)
        structure: Any = jax.tree.structure(params)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        decays = moments.resolve_tree(mask, params)
        if master_format is None:
            weights, master_tree = params, state.master
        else:
            weights, master_tree = (
                master_weights.join_remainders(params, state.remainder, master_format),
                jax.tree.map(lambda _: None, params),
            )
        state_trees = {"master": master_tree, "mu": state.mu, "nu": state.nu, "largest": state.largest}
        columns = {name: structure.flatten_up_to(tree) for name, tree in state_trees.items()}
        if static_min_size is not None and (static_group_size is not None or group_size is None):
            depths = structure.flatten_up_to(jax.tree.broadcast(moments.resolve_tree(layer_axes, params), params))
            for name in ("mu", "nu") if master_format else ("master", "mu", "nu"):
                for path, x, depth in zip(paths, columns[name], depths, strict=True):
                    checks.check_storage(name, path, x, storage_spec(name, depth), is_quantized(x, depth))
        step_seed = noise.step_seed(adam.count)

        def make_seed(path: Any, x: Any) -> Array | None:
            is_stochastic = master_rounding == "stochastic" or (
                master_format and master_format.is_stochastic and x.dtype == jnp.bfloat16
            )
            return (
                tree_slice.layer_seed(fp8lm.fold_in_master_seed(step_seed, tree_slice.path(path)), x.shape)
                if is_stochastic
                else None
            )

        seeds = [make_seed(path, x) for path, x in zip(paths, jax.tree.leaves(params), strict=True)]
        decay_flags = structure.flatten_up_to(jax.tree.broadcast(True if decays is None else decays, params))
        grads_and_weights = structure.flatten_up_to(grads), structure.flatten_up_to(weights)
        leaves = [
            fp8lm.FP8LMLeaf(*row) for row in zip(*grads_and_weights, *columns.values(), seeds, decay_flags, strict=True)
        ]
        quantized, unquantized = ([leaf for leaf in leaves if leaf.is_quantized == kind] for kind in (True, False))
        quantized_rows, unquantized_rows = (
            iter(fp8lm.apply(form, quantized, adam, impl)),
            iter(_apply_unquantized(form, unquantized, adam)),
        )
        rows = [next(quantized_rows if leaf.is_quantized else unquantized_rows) for leaf in leaves]
        result, new_master, *new_moments = (structure.unflatten([row[i] for row in rows]) for i in range(5))
        moment_trees = dict(zip(("mu", "nu", "largest"), new_moments, strict=True))
        if master_format is None:
            return result, FP8LMState(count=adam.count, master=new_master, **moment_trees)
        result, remainder = (result, None) if state.remainder is None else master_weights.split_tree(result)
        return result, FP8LMRemainderState(count=adam.count, remainder=remainder, **moment_trees)

    def make_adam(state: Any, **step_options: Any) -> adamw.Adam:
        checks.check_state(state, state_class)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        count = optax.safe_increment(state.count)
        return adamw.Adam(b1, b2, eps, eps_root, count, rate, weight_decay, **step_options)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if extra_args.get("max_direction") is not None:
            raise ValueError(_NO_CLIP_MESSAGE)
        return apply_adamw("update", updates, state, params, make_adam(state))

    def step(
        grads: optax.Updates,
        state: Any,
        params: optax.Params,
        *,
        key: None = None,
        grad_scale: ArrayLike | None = None,
        apply_if: ArrayLike | None = None,
        max_direction: ArrayLike | None = None,
        tree_slice: adamw.TreeSlice = adamw.WHOLE_TREE,
    ) -> tuple[optax.Params, Any]:
        if max_direction is not None:
            raise ValueError(_NO_CLIP_MESSAGE)
        if key is not None:
            raise ValueError(
                "fp8lm_adamw takes no key: its rounding is a hash of the step; give master_rounding='stochastic', or "
                "master='bf16+stochastic'"
            )
        new, new_state = apply_adamw(
            "step", grads, state, params, make_adam(state, grad_scale=grad_scale, apply_if=apply_if), tree_slice
        )
        if apply_if is not None:
            new_state = new_state._replace(count=jnp.where(apply_if, new_state.count, state.count))
        return new, new_state

    return FusedTransformation(*flax_variables.with_unboxed_variables(init, update, step))


def is_fp8lm_state(node: Any) -> bool:
    """Whether a node of a tree is the state of `fp8lm_adamw`, whose scales are told by the axes that are stacked."""
    return isinstance(node, (FP8LMState, FP8LMRemainderState))


def params_from_master(state: FP8LMState, dtype: DTypeLike = jnp.bfloat16) -> optax.Params:
    """The parameters of the master weights of `fp8lm_adamw`, for who keeps none between steps.

    Raises:
        TypeError: the state has none: with `master`, the parameters are their own.
    """
    if not isinstance(state, FP8LMState):
        raise TypeError(
            f"a {type(state).__name__} has no master weights: fp8jax.master_weights(state, params) gives them"
        )
    return jax.tree.map(lambda x: adamw.load(x).astype(dtype), state.master, is_leaf=moments.is_quantized)


def _apply_unquantized(form: Form, leaves: Sequence[fp8lm.FP8LMLeaf], adam: adamw.Adam) -> list[tuple[Any, ...]]:
    """The step of parameters that are too small for codes, with moments in fp32, and master weights or their own."""
    columns = ([adamw.load(leaf.grad) for leaf in leaves], [leaf.mu for leaf in leaves], [leaf.nu for leaf in leaves])
    rows = []
    for leaf, direction, m, v in zip(leaves, *adamw.adam_direction(*columns, adam), strict=True):
        value = (
            leaf.weight.astype(jnp.float32)
            if leaf.master is None
            else fp8lm.reconcile_master(leaf.master, leaf.working_copy)
        )
        change = direction + adam.weight_decay * value if leaf.decays else direction
        change = jnp.asarray(-adam.rate, jnp.float32) * change
        if leaf.master is None:
            rows.append((apply_change(form, leaf, change), None, m, v, None))
            continue
        new_master = value + change
        result = new_master - leaf.weight.astype(jnp.float32) if form == "update" else new_master
        rows.append((result.astype(leaf.dtype), new_master, m, v, None))
    if adam.apply_if is None:
        return rows
    old = [(leaf.weight, leaf.master, leaf.mu, leaf.nu, None) for leaf in leaves]
    gated_rows: list[tuple[Any, ...]] = jax.tree.map(lambda new, old: jnp.where(adam.apply_if, new, old), rows, old)
    return gated_rows


def _quantize_master(param: Array, spec: QuantSpec) -> QTensor:
    block = spec.block_shape(param.shape)
    return quantize_with_scale(
        param, spec, fp8lm.pow2_scale_from_bound(fp8lm.array_block_amax(param, block), formats.get("fp16"))
    )
