"""FP8-LM's AdamW (Peng et al., 2023, section 2.2): fp16 master weights, 8-bit first moments, 5 bytes per parameter."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core import formats
from fp8jax.core.spec import ROUNDINGS, QuantSpec, check_choice
from fp8jax.ops.dispatch.choice import check_impl
from fp8jax.ops.optimizers import fp8lm
from fp8jax.ops.optimizers.leaf import Adam, Moment, load
from fp8jax.ops.optimizers.step import step_tree
from fp8jax.optim import checks, master_weights, moments
from fp8jax.optim.compressed_adamw import MIN_SIZE, ScalarOrSchedule
from fp8jax.optim.fused import FusedTransformation, StepOptions, fused_transformation

# A NumPy integer, because optax.inject_hyperparams traces Python integers.
NO_LAYER_AXES = np.int32(0)


class FP8LMState(NamedTuple):
    """State of `fp8lm_adamw` with its own master weights.

    Attributes:
        count: steps taken, int32 scalar.
        largest: amax of `master`, `mu` and `nu`, stacked, for each scale; the next step's bounds. None for parameters
            in fp32.
        master: master weights: the tree of the parameters with an fp16 `QTensor` or an fp32 array for each.
        mu: first moments, an e4m3 `QTensor` or an fp32 array each.
        nu: second moments, an fp16 `QTensor` or an fp32 array each.

    The fields are in alphabetical order, as in a dict.
    """

    count: Array  # type: ignore[assignment]  # optax calls it so; tuple.count is shadowed
    largest: Any
    master: optax.Params
    mu: optax.Updates
    nu: optax.Updates


class FP8LMRemainderState(NamedTuple):
    """State of `fp8lm_adamw` with a `master`: the parameters are their own master weights, except for remainders.

    Attributes:
        count, mu, nu: as of `FP8LMState`.
        largest: amax of both moments, likewise.
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
    r"""AdamW with master weights in its state: 5 bytes per parameter, and 6 with an FP8 gradient.

    ============= ======================== =====
    fp16, scaled  master weight            2
    e4m3, scaled  first moment             1
    fp16, scaled  second moment            2
    e4m3, scaled  gradient                 1
    ============= ======================== =====

    Each tensor, or each stacked layer, has one scale. Scales are powers of two, so a change of scale does not round
    values again. Arithmetic is in fp32.

    **Range.** One scale limits the range: e4m3 reaches 2e-6 of a tensor's largest first moment, and fp16 the square of
    that for the second. Beyond that range, updates are wrong by up to 80 %. This happens if gradients span more, or
    after an outlier of 10,000 times their size. It also happens if all gradients fall a hundredfold at b2 = 0.999.
    With `group_size=128`, each 128 elements have their own scales, which need 0.2 bytes per parameter.

    **Working copies.** `init` creates the master weights from the parameters. The caller's parameters are working
    copies in the dtype of the model; in bf16 they need two more bytes. `step` returns the masters rounded to that
    dtype. `update` returns the difference from the given parameters. If a parameter is not the rounded value of its
    master weight, the caller has changed it (loaded, projected or averaged it). The step then starts from the
    parameter. `params_from_master(state)` computes working copies from the state.

    **Gradients.** They may be arrays or `QTensor`s, as from `fp8jax.dist.all_reduce_gradients(..., dequantize=False)`.
    Clip `QTensor`s with `fp8jax.with_clipping` or `fp8jax.clip_by_global_norm`, not with optax. A finite gradient
    beyond 1.8e19 has an infinite second moment, as in optax.

    **Rounding.** A second moment above zero never becomes zero. First moments decay to zero, because they are rounded
    by a dither that all elements share (`fp8jax.core.noise.decay_dither`). The spacing of fp16 is 0.05 to 0.1 % of a
    weight. Rounding to nearest loses smaller changes, as in the paper; stochastic rounding keeps them on average. With
    `master`, the parameters are the master weights, as in `compressed_adamw`. "bf16+int8" and both moments then need 6
    bytes per parameter; the paper's state with a bf16 copy needs 7.

    **Scales.** The scales of a step come from bounds: the amax stored by the last step, the amax of the gradient, and
    the learning rate. They are one to two binades above the amax itself. A step therefore needs one pass over its
    arrays, after one over the gradient. If the caller changes a copy beyond the bound, the step uses it one step later.

    Args:
        learning_rate, b1, b2, eps, eps_root, weight_decay, mask, impl: as of `compressed_adamw`.
        mu: format of the first moment, "e4m3" or "e5m2".
        master: which weights the optimizer updates. None: master weights in fp16 in its state, as in the paper.
            "bf16+stochastic", "bf16+int8", "bf16+int16", "fp16+int8" and "fp16+int16": the parameters, as in
            `compressed_adamw`.
        master_rounding: how master weights in fp16 are rounded, "nearest" or "stochastic", with noise from the step's
            number, the parameter's path and the element's position.
        layer_axes: number of leading axes of a parameter that stack layers, each with its own scales: an integer, a
            tree that is a prefix of the parameters, or a function of the parameters that returns one. Groups never span
            layers.
        group_size: elements along the last axis that share a scale, such as 128; None for one scale per layer, as in
            the paper. If scales would need 10 % of the codes, the state stays in fp32.
        min_size: the state of parameters with fewer elements stays in fp32.

    Returns:
        A transformation with `step(grads, state, params) -> (params, state)`, which replaces the parameters. Its state
        is `FP8LMState`, or `FP8LMRemainderState` with `master`. Updates have the dtype of the parameters. With
        `master`, updates of 16-bit parameters are in fp32 and must be added unchanged.

    Raises:
        ValueError: an argument is out of range or unknown; or at `update`, a gradient does not have the shape of its
            parameter, or no parameters are given.
        TypeError: at `init`, a parameter is not of a floating dtype, has 8 bits, or is not of the dtype of `master`; or
            at `update`, a gradient is complex.

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
    checks.check_adamw(learning_rate, b1, b2, eps, eps_root, weight_decay)
    check_impl(impl)
    if mu not in ("e4m3", "e5m2"):
        raise ValueError(f"mu {mu!r} is not 'e4m3' or 'e5m2'; use fp8jax.compressed_adamw for other formats")
    check_choice("master_rounding", master_rounding, ROUNDINGS)
    master_format = master_weights.parse_master(master)
    if master_format is not None and master_rounding != "nearest":
        raise ValueError(
            f"master_rounding requires master weights in fp16; omit it, because master {master!r} determines its own "
            "rounding"
        )
    if impl == "triton" and group_size is not None:
        raise ValueError(
            f"impl 'triton' supports only one scale per layer; with group_size={group_size} use impl='auto' or 'xla'"
        )
    state_class: Any = FP8LMState if master_format is None else FP8LMRemainderState
    quantized_fields = ("mu", "nu") if master_format else ("master", "mu", "nu")
    static_min_size = moments.to_static_integer("min_size", min_size)
    # 0 stands for no groups, and None for a traced size.
    static_group_size = 0 if group_size is None else moments.to_static_integer("group_size", group_size)

    def storage_spec(name: str, num_layer_axes: Any) -> QuantSpec:
        fmt, flush_to_zero = mu if name == "mu" else "fp16", name != "nu"
        if not static_group_size:
            return QuantSpec(fmt, "tensor", layer_axes=int(num_layer_axes), flush_to_zero=flush_to_zero)
        return QuantSpec(fmt, "group", static_group_size, flush_to_zero=flush_to_zero)

    def is_quantized(x: Any, num_layer_axes: Any) -> bool:
        """Whether the state of a parameter of this shape is quantized: all of its arrays, or none."""
        assert static_min_size is not None
        return moments.should_quantize(x.shape, storage_spec("mu", num_layer_axes), static_min_size)

    def init_fn(params: optax.Params) -> Any:
        moments.require_static(static_group_size, static_min_size)
        checks.check_params(params)
        layer_axis_counts = jax.tree.broadcast(moments.resolve_tree(layer_axes, params), params)

        def init_field(name: str, param: Any, num_layer_axes: Any) -> Moment:
            stores_codes = is_quantized(param, num_layer_axes)
            spec = storage_spec(name, num_layer_axes) if stores_codes else formats.get("fp32")
            if name != "master":
                return moments.zeros(param, spec, 0)
            if isinstance(spec, QuantSpec):
                return fp8lm.quantize_to_pow2_scale(param, spec)
            return jnp.array(param, jnp.float32, copy=True)

        fields = {
            name: jax.tree.map(functools.partial(init_field, name), params, layer_axis_counts)
            for name in quantized_fields
        }
        fields["largest"] = jax.tree.map(fp8lm.stack_amax, *fields.values(), is_leaf=moments.is_quantized)
        if master_format is not None:
            fields["remainder"] = master_weights.init_remainders(params, master_format)
        return moments.replicate_scalars(state_class(count=jnp.zeros([], jnp.int32), **fields), params)

    def update_fn(grads: Any, state: Any, params: Any, options: StepOptions) -> tuple[Any, Any]:
        if options.max_direction is not None:
            raise ValueError(
                "fp8lm_adamw does not bound its updates, so fp8jax.with_weight_bounds cannot track it. Chain "
                "fp8jax.track_weight_amax() after it; it measures updates"
            )
        if options.key is not None:
            raise ValueError(
                "fp8lm_adamw does not use a key: its rounding is derived from a hash of the step. Set "
                "master_rounding='stochastic', or master='bf16+stochastic'"
            )
        checks.check_state(state, state_class)
        if params is None:
            raise ValueError("fp8lm_adamw needs the parameters: call update(grads, state, params)")
        checks.check_gradients(grads, state.mu)
        if static_min_size is not None and static_group_size is not None:
            layer_axis_counts = jax.tree.leaves(jax.tree.broadcast(moments.resolve_tree(layer_axes, params), params))
            for name in quantized_fields:
                stored = jax.tree_util.tree_leaves_with_path(getattr(state, name), is_leaf=moments.is_quantized)
                for (path, x), n in zip(stored, layer_axis_counts, strict=True):
                    checks.check_storage(name, path, x, storage_spec(name, n), is_quantized(x, n))
        remainder, decays = getattr(state, "remainder", None), moments.resolve_tree(mask, params)
        count = optax.safe_increment(state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        new = step_tree(
            fp8lm.FP8LM,
            Adam(b1, b2, eps, eps_root, count, rate, weight_decay, options.grad_scale, options.apply_if),
            grads,
            master_weights.join_remainders(params, remainder, master_format) if master_format else params,
            state.mu,
            state.nu,
            master=getattr(state, "master", None),
            amax=state.largest,
            decays=True if decays is None else decays,
            in_place=options.in_place,
            impl=impl,
            stochastic_weights=master_rounding == "stochastic"
            or (master_format is not None and master_format.is_stochastic),
            tree_slice=options.tree_slice,
        )
        if options.apply_if is not None:
            count = jnp.where(options.apply_if, count, state.count)
        if master_format is None:
            return new.weight, FP8LMState(count, new.amax, new.master, new.mu, new.nu)
        result, new_remainder = (new.weight, None) if remainder is None else master_weights.split_tree(new.weight)
        return result, FP8LMRemainderState(count, new.amax, new.mu, new.nu, new_remainder)

    return fused_transformation(init_fn, update_fn)


def is_fp8lm_state(node: Any) -> bool:
    """Whether a node of a tree is the state of `fp8lm_adamw`."""
    return isinstance(node, (FP8LMState, FP8LMRemainderState))


def params_from_master(state: FP8LMState, dtype: DTypeLike = jnp.bfloat16) -> optax.Params:
    """The parameters, from the master weights of `fp8lm_adamw`.

    Raises:
        TypeError: the state has none, because with `master` the parameters are the master weights.
    """
    if not isinstance(state, FP8LMState):
        raise TypeError(f"a {type(state).__name__} has no master weights; use fp8jax.master_weights(state, params)")
    return jax.tree.map(lambda x: load(x).astype(dtype), state.master, is_leaf=moments.is_quantized)
