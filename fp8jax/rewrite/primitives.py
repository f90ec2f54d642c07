"""What this room knows of JAX's primitives: their names, the programs in their parameters, and how one is run again.

Whatever may change with a version of JAX is in this file and in no other: names and parameters of equations, and the
two private names, those of source lines.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import source_info_util
from jax.extend import core

from fp8jax.ops.policies import keeps_products, with_products
from fp8jax.rewrite.caller import is_library

# What changes no value but its dtype; shapes; places on devices, names and the like.
CASTS = ("convert_element_type",)
SAME = (*CASTS, "copy")  # what a probe sees through
MARKS = (
    *("copy", "name", "optimization_barrier", "sharding_constraint", "layout_constraint", "reshard"),
    *("pvary", "pcast", "mesh_cast"),
)
RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
LAYOUTS = (*CASTS, *MARKS, *RESHAPES, "transpose")
# A part of a parameter is one, too.
PARTS = ("slice", "dynamic_slice", "split", "unstack", "rev")
# Parameters side by side are one, too: `jnp.stack` is a primitive of its own from JAX 0.11 on.
JOINS = ("concatenate", "stack")
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot", "scaled_dot", "pallas_call")
CHOICES = {"top_k": "top_k", "approx_top_k": "top_k", "argmax": "argmax", "argmin": "argmin", "sort": "sort"}
# What has a derivative of its own; its program says what it computes, and no more.
OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call")
_CALLS = ("jit", "pjit", "closed_call", "core_call")
_CHECKPOINTS = ("remat2", "remat", "checkpoint")


class Body(NamedTuple):
    """A program that an equation runs.

    Attributes:
        jaxpr: the program. consts: of its constant variables.
        inputs: which operands of the equation its inputs are.
        varying: the inputs that other turns of a loop replace, each with the output that does.
    """

    jaxpr: Any
    consts: Sequence[Any]
    inputs: range
    varying: Mapping[int, int] = MappingProxyType({})

    def depends(self, data: Sequence[bool]) -> list[bool]:
        """Which inputs depend on data in some turn, where these do in the first one.

        What loops count, computed of integers alone, is no data; all else that turns replace is taken for data.
        """
        whole = [jnp.issubdtype(v.aval.dtype, jnp.integer) for v in self.jaxpr.invars]
        found = list(data)
        new = counts = {i for i in self.varying if not found[i]}
        while new:
            known = {v for i, v in enumerate(self.jaxpr.invars) if found[i] or not whole[i]}
            for eqn in self.jaxpr.eqns:
                if any(not isinstance(v, core.Literal) and v in known for v in eqn.invars):
                    known.update(eqn.outvars)
            ends = {i: self.jaxpr.outvars[self.varying[i]] for i in counts}
            new = {i for i, v in ends.items() if not isinstance(v, core.Literal) and v in known}
            counts = counts - new
            found = [before or i in new for i, before in enumerate(found)]
        return found


def called(eqn: Any) -> Body | None:
    """The program of a call that can be read as a part of the one around it; None for any other equation.

    A jit with shardings, layouts or donated arguments of its own is no such call: these belong to its borders.
    """
    if eqn.primitive.name not in _CALLS or _bordered(eqn.params):
        return None
    return _closed(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], len(eqn.invars))


def _bordered(params: dict[str, Any]) -> bool:
    placed = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    formed = [*params.get("in_layouts", ()), *params.get("out_layouts", ())]
    places = any(type(s).__name__ != "UnspecifiedValue" for s in placed) or any(x is not None for x in formed)
    return places or any(params.get("donated_invars", ()))


def bodies(eqn: Any) -> tuple[Body, ...]:
    """The programs in an equation that are read as programs of their own; of those that are not known, none."""
    name, params, n = eqn.primitive.name, eqn.params, len(eqn.invars)
    if name in _CALLS:
        return (_closed(params.get("jaxpr") or params["call_jaxpr"], n),)
    if name in (*_CHECKPOINTS, "shard_map"):
        return (_closed(params["jaxpr"], n),)
    if name in OWN_DERIVATIVE:
        return (_closed(params["call_jaxpr"], n),)
    if name == "scan":
        consts, carries = scan_parts(params)
        inner = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
        # A carry that each turn passes on is no other in the next: Flax carries the parameters of a module so.
        fixed = [inner.outvars[i] is inner.invars[consts + i] for i in range(carries)]
        varying = {consts + i: i for i, same in enumerate(fixed) if not same}
        return (_closed(params["jaxpr"], n)._replace(varying=varying),)
    if name == "cond":
        return tuple(_closed(branch, n - 1, 1) for branch in params["branches"])
    if name == "while":
        first, consts = params["cond_nconsts"], params["body_nconsts"]
        varying = {i: i - consts for i in range(consts, n - first)}
        return (_closed(params["body_jaxpr"], n - first, first)._replace(varying=varying),)
    return ()


def unread(eqn: Any) -> bool:
    """Whether an equation holds programs that `bodies` does not give, or runs a kernel."""
    values = [v for value in eqn.params.values() for v in (value if isinstance(value, (tuple, list)) else (value,))]
    programs = any(hasattr(getattr(value, "jaxpr", value), "eqns") for value in values)
    return eqn.primitive.name == "pallas_call" or (programs and called(eqn) is None and not bodies(eqn))


def _closed(program: Any, count: int, first: int = 0) -> Body:
    jaxpr = getattr(program, "jaxpr", program)
    return Body(jaxpr, getattr(program, "consts", ()), range(first, first + count))


def scan_parts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants of its loop, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # JAX >= 0.11
    return len(consts), len(carries)


class Turns(NamedTuple):
    """The turns of a loop, or the devices of a mesh: what runs once for each of them.

    Attributes:
        times: how many.
        rows: the operands of which each gets a row.
        axes: of the mesh.
    """

    times: int
    rows: range = range(0)
    axes: tuple[str, ...] = ()


def once(eqn: Any) -> bool:
    """Whether an equation runs its program once, or again with the same operands: a checkpoint, a call, a choice."""
    return eqn.primitive.name in (*_CHECKPOINTS, *_CALLS, "cond")


def computes_again(eqn: Any) -> bool:
    """Whether an equation is a checkpoint whose policy has products computed again in the backward pass."""
    return eqn.primitive.name in _CHECKPOINTS and not keeps_products(eqn.params["policy"])


def turns(eqn: Any) -> Turns | None:
    """How often an equation runs its program at once or in turn, if that is counted; else None."""
    if eqn.primitive.name == "scan":
        return Turns(eqn.params["length"], range(sum(scan_parts(eqn.params)), len(eqn.invars)))
    if eqn.primitive.name == "shard_map":
        mesh = eqn.params["mesh"]
        axes = tuple(name for name in mesh.axis_names if name in _manual_axes(eqn.params))
        return Turns(math.prod(mesh.shape[name] for name in axes), axes=axes)
    return None


def unrolled(eqn: Any, around: bool) -> bool:
    """Whether the program of an equation is a turn of a loop of several that are written out, one after the other.

    `around` says so of the program that the equation is in.
    """
    if eqn.primitive.name in ("scan", "while"):
        length, unroll = eqn.params.get("length", 0), eqn.params.get("unroll", 1)
        return bool(length > 1 and (unroll == 0 or unroll >= length))
    return around and eqn.primitive.name not in _CHECKPOINTS


def _manual_axes(params: dict[str, Any]) -> frozenset[str]:
    return params.get("newly_manual_axes", params.get("manual_axes", frozenset()))  # type: ignore[no-any-return]


def first_turn(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """What the program of an equation gets in its first turn, of the operands that are its inputs."""
    counted = turns(eqn)
    rows = range(0) if counted is None else counted.rows
    last = counted.times - 1 if eqn.params.get("reverse") and counted is not None else 0
    return [x[last] if i in rows else x for i, x in enumerate(inputs)]


Run = Callable[..., list[Any]]


def run_again(
    eqn: Any, operands: list[Any], run: Sequence[Run], carried: Any = (), rows: Any = (), more: int = 0
) -> list[Any]:
    """Runs an equation with programs, with others in their place.

    Args:
        eqn: the equation, of which `bodies` gives the programs.
        operands: its operands.
        run: for each program `run(inputs, carried, rows)`, which returns its outputs.
        carried: further arrays, in any structure, that each turn gets.
        rows: likewise, of which each turn of a scan, or each device, gets a row.
        more: how many outputs the programs have beyond their own. They come last, of a scan or a mesh with a row for
            each turn or device; a `while_loop` gives none.
    """
    name, params, body, own = eqn.primitive.name, eqn.params, run[0], len(eqn.outvars)
    if name == "scan":
        consts, carries = scan_parts(params)
        fixed = operands[:consts]

        def turn(carry: list[Any], row: Any) -> tuple[list[Any], list[Any]]:
            results = body([*fixed, *carry, *row[0]], carried, row[1])
            return results[:carries], results[carries:]

        how = {key: params[key] for key in ("length", "reverse", "unroll", "_split_transpose") if key in params}
        carry, ys = lax.scan(turn, operands[consts : consts + carries], (operands[consts + carries :], rows), **how)
        return [*carry, *ys]
    if name == "while":
        first, consts = params["cond_nconsts"], params["body_nconsts"]
        held, fixed = operands[:first], operands[first : first + consts]
        asked = params["cond_jaxpr"]  # a program with its constants, whether JAX has given them to it or not
        condition = core.jaxpr_as_fun(asked if hasattr(asked, "consts") else core.ClosedJaxpr(asked, ()))
        body_of = lambda carry: body([*fixed, *carry], carried, rows)[:own]  # noqa: E731
        carry = operands[first + consts :]
        return list(lax.while_loop(lambda carry: condition(*held, *carry)[0], body_of, carry))
    if name == "cond":
        branches = [lambda xs, more, r=r: r(xs, *more) for r in run]
        return list(lax.switch(operands[0], branches, operands[1:], (carried, rows)))
    whole = lambda operands, carried, rows: body(list(operands), carried, rows)  # noqa: E731
    if name in _CHECKPOINTS:
        policy = {"policy": with_products(params["policy"]), "prevent_cse": params["prevent_cse"]}
        return list(jax.checkpoint(whole, **policy)(operands, carried, rows))
    if name == "shard_map":
        how = {"mesh": params["mesh"], "check_vma": params["check_vma"]}
        how["axis_names"] = set(_manual_axes(params))
        same, each = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(turns(eqn).axes)  # type: ignore[union-attr]

        def part(operands: Any, carried: Any, rows: Any) -> list[Any]:
            results = whole(operands, carried, jax.tree.map(lambda row: row[0], rows))
            return [*results[:own], *(x[None] for x in results[own:])]

        specs = (list(params["in_specs"]), same, each)
        mapped = jax.shard_map(part, in_specs=specs, out_specs=[*params["out_specs"], *[each] * more], **how)
        return list(mapped(operands, carried, rows))
    return list(_jit_again(params, whole, operands, (carried, rows), more))


def _jit_again(params: dict[str, Any], body: Run, operands: list[Any], given: Any, more: int) -> list[Any]:
    """A jit with its borders: where its arguments and results are, which of them it may overwrite, and its options."""

    def call(*arguments: Any) -> list[Any]:
        return body(arguments[:-1], *arguments[-1])

    call.__name__ = call.__qualname__ = params["name"]
    donated = tuple(i for i, donated in enumerate(params["donated_invars"]) if donated)
    again = jax.jit(
        call,
        in_shardings=(*params["in_shardings"], None),
        out_shardings=[*params["out_shardings"], *[None] * more],
        donate_argnums=donated,
        keep_unused=params["keep_unused"],
        inline=params["inline"],
    )
    return again(*operands, given)  # type: ignore[no-any-return]


@contextlib.contextmanager
def place_of(eqn: Any, scope: str) -> Iterator[None]:
    """Where an equation stood: its scopes, its line in the user's code, its mesh and other settings."""
    with contextlib.ExitStack() as stack:
        for name in filter(None, scope.split("/")):
            stack.enter_context(jax.named_scope(name))
        stack.enter_context(source_info_util.user_context(eqn.source_info.traceback))
        stack.enter_context(eqn.ctx.manager)
        yield


class Equation:
    """One equation as a function of its operands, under the scopes of the calls around it."""

    def __init__(self, eqn: Any, scope: str) -> None:
        self._names = [i for i, v in enumerate(eqn.invars) if not isinstance(v, core.Literal)]
        variables = dict.fromkeys(eqn.invars[i] for i in self._names)
        info = core.DebugInfo("equation", "fp8jax", ("x",) * len(variables), ("y",) * len(eqn.outvars))
        program = core.Jaxpr((), list(variables), list(eqn.outvars), [eqn], eqn.effects, info)
        self._call = core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))
        own = str(eqn.source_info.name_stack)
        self._around = [name for name in scope.removesuffix(own).strip("/").split("/") if name]
        self._variables = [eqn.invars[i] for i in self._names]

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        values = dict(zip(self._variables, (operands[i] for i in self._names), strict=True))
        with contextlib.ExitStack() as stack:
            for name in self._around:
                stack.enter_context(jax.named_scope(name))
            return list(self._call(*values.values()))


def ragged_by_rows(eqn: Any) -> bool:
    """Whether a ragged product is that of `jax.lax.ragged_dot`: (tokens, inputs) by (groups, inputs, outputs)."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    plain = tuple(map(tuple, numbers.dot_dimension_numbers[0])) == ((1,), (1,))
    ragged = tuple(numbers.lhs_ragged_dimensions) == tuple(numbers.rhs_group_dimensions) == (0,)
    return plain and ragged and not any(numbers.dot_dimension_numbers[1]) and eqn.params.get("group_offset") is None


def function_name(eqn: Any) -> str:
    """The name of the function that an equation calls, or of which it has a derivative; "" of any other equation."""
    if eqn.primitive.name in _CALLS:
        return str(eqn.params.get("name", ""))
    if eqn.primitive.name not in OWN_DERIVATIVE:
        return ""
    program = eqn.params["call_jaxpr"]
    info = getattr(getattr(program, "jaxpr", program), "debug_info", None)
    return str(getattr(info, "func_name", ""))


def differentiated(scope: str) -> bool:
    """Whether an equation is part of a derivative that the program takes itself, by the scopes that JAX gives it."""
    return "jvp(" in scope or "transpose(" in scope


def line_of(eqn: Any, around: Sequence[Any] = ()) -> str:
    """The line that an equation was written in: the nearest that is of no library, or else of none of JAX's.

    Args:
        eqn: the equation.
        around: those of the calls and loops that it stands in, the innermost first. Where no user's line is inside of
            one, it is that of the call. JAX keeps programs of calls, with the lines of the first call.
    """
    frames, own = _frames(eqn)
    for call in around:
        others, own_of_call = _frames(call)
        if own and not (_whole_tracebacks() and len(own_of_call) >= len(own)):
            break
        if own_of_call:
            frames, own = others, own_of_call
    if not frames:
        return "an unknown line"
    frame = (own or frames)[0]
    return f"{frame.file_name}:{frame.line_num} ({frame.function_name.rpartition('.')[2]})"


@functools.cache
def _whole_tracebacks() -> bool:
    """Whether the traceback of an equation in a call goes on around the call; in newer versions it ends there."""
    program = jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0)
    inner = _closed(program.jaxpr.eqns[0].params["jaxpr"], 1).jaxpr.eqns[0].source_info.traceback
    return inner is not None and any(f.function_name == _whole_tracebacks.__name__ for f in inner.frames)


def _frames(eqn: Any) -> tuple[list[Any], list[Any]]:
    """The frames of an equation that are not JAX's, and those of them that are of no library, the innermost first."""
    traceback = eqn.source_info.traceback
    every = [] if traceback is None else list(traceback.frames)
    others = [f for f in every if not f.file_name.startswith((_JAX, "<frozen"))]
    return others, [f for f in others if not is_library(f.file_name)]


_JAX = jax.__file__.rpartition("/")[0]


def same_elements(eqn: Any) -> bool:
    """Whether a layout keeps all elements in the order in which they lie in memory."""
    return eqn.primitive.name != "transpose" and math.prod(eqn.invars[0].aval.shape) == math.prod(
        eqn.outvars[0].aval.shape
    )
