"""Names and parameters of JAX's primitives, their sub-jaxprs, and how to run an equation with other bodies.

This file has everything that may change with a JAX version: names, parameters, and two private names for source lines.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import source_info_util
from jax.extend import core

from fp8jax.core import blocks
from fp8jax.core.frames import is_library
from fp8jax.ops.autodiff.checkpointing import saves_products, with_products
from fp8jax.ops.products.token_rows import TOKEN_GATHER

# Primitives that change only a value's dtype; its shape; its sharding, name and the like.
CASTS = ("convert_element_type",)
PROBE_IDENTITY = (*CASTS, "copy")  # identities in float64
IDENTITY_PRIMITIVES = (
    *("copy", "name", "optimization_barrier", "sharding_constraint", "layout_constraint", "reshard"),
    *("pvary", "pcast", "mesh_cast"),
)
RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
LAYOUTS = (*CASTS, *IDENTITY_PRIMITIVES, *RESHAPES, "transpose")
# A slice of a parameter counts as a parameter.
SLICING_PRIMITIVES = ("slice", "dynamic_slice", "split", "unstack", "rev")
# Concatenated parameters count as one.
CONCAT_PRIMITIVES = ("concatenate", "stack")
# The kind of a node that calls a user's function for a grouped product. JAX has no such primitive.
GROUPED_CALL = "grouped_call"
GROUPED_KINDS = ("ragged_dot_general", GROUPED_CALL)
# A parameter that is gathered over devices, inside `jax.shard_map`, counts as a parameter.
GATHER_PRIMITIVES = ("all_gather", "all_gather_invariant")
CONVOLUTION = "conv_general_dilated"
PRODUCTS = (
    *("dot_general", CONVOLUTION, "scaled_dot", "pallas_call"),
    *GROUPED_KINDS,
)
SELECTION_PRIMITIVES = {
    "top_k": "top_k",
    "approx_top_k": "top_k",
    "argmax": "argmax",
    "argmin": "argmin",
    "sort": "sort",
}
# Calls with a custom derivative.
CUSTOM_DERIVATIVE_CALLS = ("custom_jvp_call", "custom_vjp_call")
_CALLS = ("jit", "pjit", "closed_call", "core_call")
_CHECKPOINTS = ("remat2", "remat", "checkpoint")


class SubJaxpr(NamedTuple):
    """A jaxpr in an equation's parameters.

    Attributes:
        operand_indices: the operands of the equation that are its inputs.
        carry_outputs: the inputs that later iterations replace, each with the output that replaces it.
    """

    jaxpr: Any
    consts: Sequence[Any]
    operand_indices: range
    carry_outputs: Mapping[int, int] = MappingProxyType({})

    def data_dependent_inputs(self, initial: Sequence[bool]) -> list[bool]:
        """Returns the inputs that depend on data in some iteration, if `initial` are those that do in the first.

        Loop counters, computed from integers alone, are not data. All other replaced inputs count as data.
        """
        is_integer = [jnp.issubdtype(v.aval.dtype, jnp.integer) for v in self.jaxpr.invars]
        is_dependent = list(initial)
        changed = counters = {i for i in self.carry_outputs if not is_dependent[i]}
        while changed:
            dependent_vars = {v for i, v in enumerate(self.jaxpr.invars) if is_dependent[i] or not is_integer[i]}
            for eqn in self.jaxpr.eqns:
                if any(not isinstance(v, core.Literal) and v in dependent_vars for v in eqn.invars):
                    dependent_vars.update(eqn.outvars)
            carry_vars = {i: self.jaxpr.outvars[self.carry_outputs[i]] for i in counters}
            changed = {i for i, v in carry_vars.items() if not isinstance(v, core.Literal) and v in dependent_vars}
            counters = counters - changed
            is_dependent = [before or i in changed for i, before in enumerate(is_dependent)]
        return is_dependent


def inlinable_jaxpr(eqn: Any) -> SubJaxpr | None:
    """The jaxpr of a call that can be inlined into its caller; None for any other equation.

    A jit with shardings, layouts or donated arguments is not inlined: these apply at its boundary.
    """
    if eqn.primitive.name not in _CALLS or _has_jit_boundary(eqn.params):
        return None
    return _sub_jaxpr(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], len(eqn.invars))


def _has_jit_boundary(params: dict[str, Any]) -> bool:
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    layouts = [*params.get("in_layouts", ()), *params.get("out_layouts", ())]
    is_placed = any(type(s).__name__ != "UnspecifiedValue" for s in shardings) or any(x is not None for x in layouts)
    return is_placed or any(params.get("donated_invars", ()))


def sub_jaxprs(eqn: Any) -> tuple[SubJaxpr, ...]:
    """The jaxprs of an equation that become sub-graphs; () for unknown primitives."""
    name, params, n = eqn.primitive.name, eqn.params, len(eqn.invars)
    if name in _CALLS:
        return (_sub_jaxpr(params.get("jaxpr") or params["call_jaxpr"], n),)
    if name in (*_CHECKPOINTS, "shard_map"):
        return (_sub_jaxpr(params["jaxpr"], n),)
    if name in CUSTOM_DERIVATIVE_CALLS:
        return (_sub_jaxpr(params["call_jaxpr"], n),)
    if name == "scan":
        consts, carries = count_consts_and_carries(params)
        inner = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
        # A carry that each iteration returns unchanged is loop-invariant: Flax carries a module's parameters so.
        is_invariant = [inner.outvars[i] is inner.invars[consts + i] for i in range(carries)]
        varying = {consts + i: i for i, same in enumerate(is_invariant) if not same}
        return (_sub_jaxpr(params["jaxpr"], n)._replace(carry_outputs=varying),)
    if name == "cond":
        return tuple(_sub_jaxpr(branch, n - 1, 1) for branch in params["branches"])
    if name == "while":
        num_cond_consts, consts = params["cond_nconsts"], params["body_nconsts"]
        varying = {i: i - consts for i in range(consts, n - num_cond_consts)}
        return (_sub_jaxpr(params["body_jaxpr"], n - num_cond_consts, num_cond_consts)._replace(carry_outputs=varying),)
    return ()


def is_opaque(eqn: Any) -> bool:
    """Whether an equation holds jaxprs that `sub_jaxprs` does not return, or runs a kernel."""
    values = [v for value in eqn.params.values() for v in (value if isinstance(value, (tuple, list)) else (value,))]
    has_jaxprs = any(hasattr(getattr(value, "jaxpr", value), "eqns") for value in values)
    return eqn.primitive.name == "pallas_call" or (has_jaxprs and inlinable_jaxpr(eqn) is None and not sub_jaxprs(eqn))


def _sub_jaxpr(jaxpr_or_closed: Any, count: int, first_operand: int = 0) -> SubJaxpr:
    jaxpr = getattr(jaxpr_or_closed, "jaxpr", jaxpr_or_closed)
    return SubJaxpr(jaxpr, getattr(jaxpr_or_closed, "consts", ()), range(first_operand, first_operand + count))


def count_consts_and_carries(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constant and of carried operands of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # JAX >= 0.11
    return len(consts), len(carries)


class LoopInfo(NamedTuple):
    """The iterations of a loop, or the devices of a mesh.

    Attributes:
        scanned_operands: the operands that are split into one row per iteration.
    """

    size: int
    scanned_operands: range = range(0)
    mesh_axes: tuple[str, ...] = ()


def is_outside_loop(eqn: Any) -> bool:
    """Whether each run of an equation's jaxpr has the same operands, as for a checkpoint, call or cond."""
    return eqn.primitive.name in (*_CHECKPOINTS, *_CALLS, "cond")


def runs_once(eqn: Any) -> bool:
    """Whether an equation runs one jaxpr, without a boundary: a call, a checkpoint, or a custom derivative."""
    is_call = inlinable_jaxpr(eqn) is not None
    return is_call or eqn.primitive.name in (*_CHECKPOINTS, *CUSTOM_DERIVATIVE_CALLS)


def separate_recomputation(eqn: Any, operands: list[Any]) -> list[Any]:
    """The operands of an equation; of a recomputation behind a barrier, or XLA would merge it with the first run."""
    is_recomputation = eqn.primitive.name in _CHECKPOINTS and eqn.params["differentiated"]
    is_separate = is_recomputation and np.any(eqn.params["prevent_cse"])
    return list(lax.optimization_barrier(operands)) if is_separate else operands


def rematerializes_products(eqn: Any) -> bool:
    """Whether an equation is a checkpoint with a policy that recomputes matmuls in the backward pass."""
    return eqn.primitive.name in _CHECKPOINTS and not saves_products(eqn.params["policy"])


def loop_info(eqn: Any) -> LoopInfo | None:
    """The iterations or devices of a scan or shard_map; None for any other equation."""
    if eqn.primitive.name == "scan":
        return LoopInfo(eqn.params["length"], range(sum(count_consts_and_carries(eqn.params)), len(eqn.invars)))
    if eqn.primitive.name == "shard_map":
        mesh = eqn.params["mesh"]
        axes = tuple(name for name in mesh.axis_names if name in eqn.params["newly_manual_axes"])
        return LoopInfo(math.prod(mesh.shape[name] for name in axes), mesh_axes=axes)
    return None


def splits_first_axis(eqn: Any, operand: int, *, partly: bool = False) -> bool:
    """Whether a shard_map splits the first axis of an operand over all of its devices, or `partly` over some."""
    info = loop_info(eqn)
    if info is None or not info.mesh_axes or operand < 0:
        return False
    axes = blocks.spec_entry_axes(next(iter(eqn.params["in_specs"][operand]), None))
    return bool(axes) if partly else axes == info.mesh_axes


def is_unrolled(eqn: Any, is_enclosing_unrolled: bool) -> bool:
    """Whether an equation's jaxpr is one iteration of a fully unrolled loop.

    `is_enclosing_unrolled`: the same for the program that the equation is in.
    """
    if eqn.primitive.name in ("scan", "while"):
        length, unroll = eqn.params.get("length", 0), eqn.params.get("unroll", 1)
        return bool(length > 1 and (unroll == 0 or unroll >= length))
    return is_enclosing_unrolled and eqn.primitive.name not in _CHECKPOINTS


def iteration_row(eqn: Any, iteration: int) -> int:
    """The row of scanned operands that an iteration of a loop reads."""
    return eqn.params["length"] - 1 - iteration if eqn.params.get("reverse") else iteration


def part_starts(eqn: Any, sizes: Sequence[int]) -> list[int]:
    """The first row of scanned operands that each part of a scan reads, from their numbers of iterations."""
    length, is_reversed, ends = eqn.params["length"], eqn.params["reverse"], itertools.accumulate(sizes)
    return [length - end if is_reversed else end - size for end, size in zip(ends, sizes, strict=True)]


def iteration_inputs(eqn: Any, inputs: Sequence[Any], iteration: int) -> list[Any]:
    """The inputs of an equation's jaxpr in an iteration, with the first carry, from the operands of the equation."""
    info = loop_info(eqn)
    scanned = range(0) if info is None else info.scanned_operands
    row = iteration_row(eqn, iteration)
    return [x[row] if i in scanned else x for i, x in enumerate(inputs)]


BodyFn = Callable[..., list[Any]]


def run_while(
    eqn: Any, operands: list[Any], body: Callable[[list[Any], Any], tuple[list[Any], Any]], added: Any = ()
) -> tuple[list[Any], Any]:
    """The carry and what is added to it after a while loop with another body.

    Under `jax.vmap` the condition may have a value for each member of the batch. A member that has ended then keeps its
    carry, and the added arrays keep their values once any member has ended.

    Args:
        body: `fn(inputs, added)`, which returns the next carry and the added arrays after it.
        added: a pytree, its first value.
    """
    num_cond_consts, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, rest = operands[:num_cond_consts], operands[num_cond_consts:]
    consts, carry = rest[:num_consts], rest[num_consts:]
    condition = _sub_jaxpr(eqn.params["cond_jaxpr"], 0)
    function = core.jaxpr_as_fun(core.ClosedJaxpr(condition.jaxpr, condition.consts))
    is_batched = condition.jaxpr.outvars[0].aval.ndim > 0

    def loop_body(state: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        carry, added = state
        results = body([*consts, *carry], added)
        if not is_batched:
            return results
        (is_running,) = function(*cond_consts, *carry)

        def select(new: Any, old: Any) -> Any:
            return jnp.where(is_running.reshape(is_running.shape + (1,) * (new.ndim - is_running.ndim)), new, old)

        update_while_running = functools.partial(jnp.where, jnp.all(is_running))
        return [*map(select, results[0], carry)], jax.tree.map(update_while_running, results[1], added)

    return lax.while_loop(lambda state: jnp.any(function(*cond_consts, *state[0])[0]), loop_body, (carry, added))


def rebind_control_flow(
    eqn: Any,
    operands: list[Any],
    body_fns: Sequence[BodyFn],
    extra_consts: Any = (),
    extra_xs: Any = (),
    num_extra_outputs: int = 0,
    part_sizes: Sequence[int] = (),
) -> list[Any]:
    """The outputs of an equation that is run with other functions in place of its jaxprs.

    Args:
        eqn: an equation with `sub_jaxprs`.
        body_fns: for each jaxpr `fn(inputs, extra_consts, extra_xs)`, which returns its outputs.
        extra_consts: a pytree that each iteration receives.
        extra_xs: a pytree that is split into one row per iteration of a scan, or per device.
        num_extra_outputs: the number of outputs that the functions add at the end. A scan or mesh stacks them by
            iteration or device. A while loop drops them.
        part_sizes: for each function the number of consecutive iterations of a scan that it runs; () if there is one.
    """
    name, params, body, num_outputs = eqn.primitive.name, eqn.params, body_fns[0], len(eqn.outvars)
    if name == "scan":
        consts, carries = count_consts_and_carries(params)
        consts_in, carry, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]

        def scan_body(body: BodyFn, carry: list[Any], row: Any) -> tuple[list[Any], list[Any]]:
            results = body([*consts_in, *carry, *row[0]], extra_consts, row[1])
            return results[:carries], results[carries:]

        keywords = {key: params[key] for key in ("reverse", "unroll", "_split_transpose") if key in params}
        length, stacked = params["length"], list[list[Any]]()
        sizes = part_sizes or (length,)
        for body, size, start in zip(body_fns, sizes, part_starts(eqn, sizes), strict=True):
            rows = xs, extra_xs
            if size < length:
                rows = jax.tree.map(lambda x, at=slice(start, start + size): x[at], rows)
            carry, ys = lax.scan(functools.partial(scan_body, body), carry, rows, length=size, **keywords)
            stacked.append(ys)
        if len(stacked) == 1:
            return [*carry, *stacked[0]]
        stacked = stacked[::-1] if params["reverse"] else stacked
        return [*carry, *(jnp.concatenate(parts) for parts in zip(*stacked, strict=True))]
    if name == "while":
        # Without the outputs that the function adds.
        loop_body = lambda inputs, added: (body(inputs, extra_consts, extra_xs)[:num_outputs], added)  # noqa: E731
        return run_while(eqn, operands, loop_body)[0]
    if name == "cond":
        branches = [lambda xs, more, r=r: r(xs, *more) for r in body_fns]
        return list(lax.switch(operands[0], branches, operands[1:], (extra_consts, extra_xs)))
    call_body = lambda operands, carried, rows: body(list(operands), carried, rows)  # noqa: E731
    if name in _CHECKPOINTS:
        policy, prevent_cse = with_products(params["policy"]), params["prevent_cse"]
        rematerialized = jax.checkpoint(call_body, policy=policy, prevent_cse=prevent_cse)
        return list(rematerialized(operands, extra_consts, extra_xs))
    if name == "shard_map":
        replicated, per_device = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(loop_info(eqn).mesh_axes)  # type: ignore[union-attr]

        def device_body(operands: Any, carried: Any, rows: Any) -> list[Any]:
            results = call_body(operands, carried, jax.tree.map(lambda row: row[0], rows))
            return [*results[:num_outputs], *(x[None] for x in results[num_outputs:])]

        mapped = jax.shard_map(
            device_body,
            mesh=params["mesh"],
            in_specs=(list(params["in_specs"]), replicated, per_device),
            out_specs=[*params["out_specs"], *[per_device] * num_extra_outputs],
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return list(mapped(operands, extra_consts, extra_xs))
    return list(_rebind_jit(params, call_body, operands, (extra_consts, extra_xs), num_extra_outputs))


def _rebind_jit(
    params: dict[str, Any], body: BodyFn, operands: list[Any], extras: Any, num_extra_outputs: int
) -> list[Any]:
    """The outputs of a jit with another body and the same shardings, donated arguments and options."""

    def call(*operands_and_extras: Any) -> list[Any]:
        return body(operands_and_extras[:-1], *operands_and_extras[-1])

    call.__name__ = call.__qualname__ = params["name"]
    donated = tuple(i for i, donated in enumerate(params["donated_invars"]) if donated)
    jitted = jax.jit(
        call,
        in_shardings=(*params["in_shardings"], None),
        out_shardings=[*params["out_shardings"], *[None] * num_extra_outputs],
        donate_argnums=donated,
        keep_unused=params["keep_unused"],
        inline=params["inline"],
    )
    return jitted(*operands, extras)


@contextlib.contextmanager
def equation_context(eqn: Any, scope: str) -> Iterator[None]:
    """A context with an equation's scopes, source line, mesh and settings."""
    with contextlib.ExitStack() as stack:
        for name in filter(None, scope.split("/")):
            stack.enter_context(jax.named_scope(name))
        stack.enter_context(source_info_util.user_context(eqn.source_info.traceback))
        stack.enter_context(eqn.ctx.manager)
        yield


class Equation:
    """One equation as a function of its operands, in the scopes of the calls around it."""

    def __init__(self, eqn: Any, scope: str) -> None:
        self._variable_indices = [i for i, v in enumerate(eqn.invars) if not isinstance(v, core.Literal)]
        variables = dict.fromkeys(eqn.invars[i] for i in self._variable_indices)
        info = core.DebugInfo("equation", "fp8jax", ("x",) * len(variables), ("y",) * len(eqn.outvars))
        program = core.Jaxpr((), list(variables), list(eqn.outvars), [eqn], eqn.effects, info)
        self._call = core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))
        equation_scopes = str(eqn.source_info.name_stack)
        self._outer_scopes = [name for name in scope.removesuffix(equation_scopes).strip("/").split("/") if name]
        self._variables = [eqn.invars[i] for i in self._variable_indices]

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        values = dict(zip(self._variables, (operands[i] for i in self._variable_indices), strict=True))
        with contextlib.ExitStack() as stack:
            for name in self._outer_scopes:
                stack.enter_context(jax.named_scope(name))
            return list(self._call(*values.values()))


def sent_bytes(eqn: Any, mesh_sizes: Mapping[str, int]) -> float:
    """Bytes that a device sends in a collective of tokens for experts; 0 for any other equation.

    In a ragged all-to-all each device is assumed to send as many rows to each device.

    Args:
        mesh_sizes: sizes of the mesh axes around it; others have one device.
    """
    if TOKEN_GATHER in str(eqn.source_info.name_stack) and "axis_size" in eqn.params:
        aval, devices = eqn.invars[0].aval, eqn.params["axis_size"]
        share = devices - 1 if eqn.primitive.name == "all_gather" else (devices - 1) / devices
        return float(aval.size * aval.dtype.itemsize * share)
    if eqn.primitive.name != "ragged_all_to_all":
        return 0.0
    axes, (rows, received) = eqn.params["axis_name"], (v.aval for v in eqn.invars[:2])
    devices = math.prod(mesh_sizes.get(name, 1) for name in (axes if isinstance(axes, tuple) else (axes,)))
    # One of both has room for the rows of all devices.
    return float(min(rows.size, received.size) * rows.dtype.itemsize * (devices - 1) / devices)


def mesh_sizes(eqn: Any) -> Mapping[str, int]:
    """Sizes of the mesh axes of a `shard_map` equation; none for any other equation."""
    return dict(eqn.params["mesh"].shape) if eqn.primitive.name == "shard_map" else {}


def ragged_weight_axes(eqn: Any) -> tuple[int, int, int] | None:
    """The axes of a ragged product's weight that are groups, inputs and outputs.

    None for a form other than (tokens, inputs) by a matrix for each group, without a group offset.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (x_contract, w_contract), batch = numbers.dot_dimension_numbers
    has_ragged_rows = tuple(numbers.lhs_ragged_dimensions) == (0,) and tuple(x_contract) == (1,)
    has_one_group_axis = len(numbers.rhs_group_dimensions) == len(w_contract) == 1
    is_offset = eqn.params.get("group_offset") is not None
    if any(batch) or is_offset or not has_ragged_rows or not has_one_group_axis:
        return None
    (group,), (inputs,) = numbers.rhs_group_dimensions, w_contract
    (outputs,) = {0, 1, 2} - {group, inputs}
    return group, inputs, outputs


def function_name(eqn: Any) -> str:
    """The name of the function that is called, has the custom derivative, or is a kernel; "" for other equations."""
    if eqn.primitive.name in _CALLS:
        return str(eqn.params.get("name", ""))
    if eqn.primitive.name == "pallas_call":
        return str(eqn.params["name"] or "")
    if eqn.primitive.name not in CUSTOM_DERIVATIVE_CALLS:
        return ""
    return str(_sub_jaxpr(eqn.params["call_jaxpr"], 0).jaxpr.debug_info.func_name)


DIFFERENTIATED_REASON = "part of a gradient that the function computes itself"


def is_differentiated(scope: str) -> bool:
    """Whether a scope belongs to a derivative inside of the program."""
    return "jvp(" in scope or "transpose(" in scope


def source_line(eqn: Any, enclosing: Sequence[Any] = ()) -> str:
    """The nearest source line of an equation outside of libraries, or else outside of JAX.

    Args:
        enclosing: the calls and loops around it, innermost first. JAX caches the jaxpr of a call with the lines of its
            first call. The line of the call is used if no user's line is inside.
    """
    frames, user_frames = _frames(eqn)
    for call in enclosing:
        if user_frames:
            break
        call_frames, user_frames = _frames(call)
        frames = call_frames if user_frames else frames
    if not frames:
        return "an unknown line"
    frame = (user_frames or frames)[0]
    return f"{frame.file_name}:{frame.line_num} ({frame.function_name.rpartition('.')[2]})"


def _frames(eqn: Any) -> tuple[list[Any], list[Any]]:
    """An equation's frames outside of JAX, and those outside of all libraries, innermost first."""
    traceback = eqn.source_info.traceback
    all_frames = [] if traceback is None else list(traceback.frames)
    non_jax_frames = [f for f in all_frames if not f.file_name.startswith((_JAX_DIR, "<frozen"))]
    return non_jax_frames, [f for f in non_jax_frames if not is_library(f.file_name)]


_JAX_DIR = jax.__file__.rpartition("/")[0]
