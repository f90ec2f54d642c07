"""Kernels inside a `jax.shard_map` over some mesh axes, and on meshes of both axis types: XLA shards the rest."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

import fp8jax
from fp8jax.core import scaling
from fp8jax.ops.dispatch import choice, partition
from fp8jax.ops.dispatch.partition import run_partitioned
from fp8jax.ops.quantization import quantize as ops
from tests.distance import relative
from tests.ops.test_partition import draw, same, stand_ins, statistics
from tests.rows import covering, few, slow

__all__ = ["stand_ins"]
NAMES = ("data", "fsdp", "tensor")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# With mixed kinds some versions of JAX gather what enters a `jax.shard_map` over other axes.
KINDS = {"auto": (AUTO,) * 3, "explicit": (EXPLICIT,) * 3, "mixed": (AUTO, EXPLICIT, AUTO)}
LAYOUTS = [("tensor", "fsdp"), ("fsdp", "tensor"), (("tensor", "fsdp"),), (None, ("fsdp", "tensor")), (None, "tensor")]
checks = pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])


def mesh_of(kinds, order=NAMES):
    kind = dict(zip(NAMES, kinds, strict=True))
    return jax.make_mesh((2, 2, 2), order, axis_types=tuple(kind[name] for name in order))


def by_hand(function, check=True):
    """Returns the stacked results of each shard along "data"."""

    def inside(*parts):
        return jax.tree.map(lambda y: y[None], function(*(x[0] for x in parts)))

    return jax.shard_map(inside, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=check)


def collectives(text):
    return re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)


def expected(x):
    blocks = x.reshape(x.shape[0], -1, 4).max(-1)
    return x.T, x.max(), x.astype(np.int32).sum(0), blocks, np.arange(x.shape[0])


@pytest.mark.parametrize(
    ("kind", "order"),
    few(
        [(kind, order) for kind in KINDS for order in itertools.permutations(NAMES)],
        *((kind, ("tensor", "data", "fsdp")) for kind in KINDS),
    ),
    ids=str,
)  # fmt: skip
def test_parts_are_put_together_whatever_the_order_of_axes(kind, order):
    kinds = KINDS[kind]
    x = np.round(100 * np.asarray(draw(0, 2, 16, 32)))
    reference = tuple(np.stack(part) for part in zip(*map(expected, x), strict=True))
    with jax.set_mesh(mesh_of(kinds, order)):
        for layout in LAYOUTS:
            program = jax.jit(by_hand(statistics)).lower(jax.device_put(x, P("data", *layout))).compile()
            same(program(jax.device_put(x, P("data", *layout))), reference)
            if kinds != KINDS["mixed"]:
                assert set(collectives(program.as_text())) == {"all-reduce"}, layout


WITHIN = {
    "scan": lambda f: lambda x: jax.tree.map(lambda y: y[0], lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1]),
    "vmap": lambda f: lambda x: jax.tree.map(lambda y: y[0], jax.vmap(f)(x[None])),
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
}


@pytest.mark.parametrize(("within", "kinds", "check"), covering(WITHIN.values(), KINDS.values(), [True, False]))
def test_within_other_transformations(kinds, within, check):
    x = np.round(100 * np.asarray(draw(0, 2, 16, 32)))
    reference = tuple(np.stack(part) for part in zip(*map(expected, x), strict=True))
    with jax.set_mesh(mesh_of(kinds)):
        placed = jax.device_put(x, P("data", "tensor", "fsdp"))
        program = jax.jit(by_hand(within(statistics), check)).lower(placed).compile()
    same(program(placed), reference)
    if kinds != KINDS["mixed"]:
        assert set(collectives(program.as_text())) == {"all-reduce"}


def test_each_device_keeps_its_part_of_a_sum():
    def product(a, b):
        def local(dim_sharding, a, b):
            return dim_sharding.psum(lax.dot_general(a, b, (((1,), (1,)), ((), ()))), "k", "m n")

        y = run_partitioned("product", None, local, (a, b), ("m k", "n k"), "m n", sum_dim="k")
        return lax.with_sharding_constraint(y, P(None, "fsdp"))

    a, b = (np.round(8 * np.asarray(draw(i, 2, 16, 64))) for i in range(2))
    with jax.set_mesh(mesh_of(KINDS["auto"])):
        placed = [jax.device_put(x, P("data", None, ("tensor", "fsdp"))) for x in (a, b)]
        program = jax.jit(by_hand(product)).lower(*placed).compile()
    same(program(*placed), a @ b.swapaxes(1, 2))
    assert sorted(collectives(program.as_text())) == ["all-reduce", "reduce-scatter"]


@pytest.mark.parametrize(
    ("layout", "kinds"),
    covering(
        [("rows", "columns"), ("columns", "rows"), (("columns", "rows"),), (None, "rows")],
        [(AUTO, EXPLICIT), (EXPLICIT, AUTO)],
    ),
    ids=str,
)
def test_axes_of_both_kinds(kinds, layout):
    x = np.round(100 * np.asarray(draw(0, 16, 32)))
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=kinds)
    actual = jax.jit(statistics)(jax.device_put(x, NamedSharding(mesh, P(*layout))))
    same(actual, expected(x))
    assert not actual[0].sharding.is_fully_replicated


def test_axes_of_one_device_leave_arrays_a_devices_own():
    x = np.round(100 * np.asarray(draw(0, 8, 16, 32)))
    reference = tuple(np.stack(part) for part in zip(*map(expected, x), strict=True))
    with jax.set_mesh(jax.make_mesh((8, 1), ("data", "fsdp"), axis_types=(AUTO,) * 2)):
        same(jax.jit(by_hand(statistics))(jax.device_put(x, P("data"))), reference)


def test_parts_of_an_axis_are_no_mesh_axes():
    """Devices 0 and 2 of an axis of four, or its devices in another order: such arrays are gathered."""
    orders = partition._axes_by_device_order((("x", 4), ("y", 2)))
    assert orders[0, 2, 4, 6] == ("x",)
    assert orders[0, 1] == ("y",)
    assert orders[0, 1, 2, 3, 4, 5, 6, 7] == ("x", "y")
    assert orders[0, 2, 4, 6, 1, 3, 5, 7] == ("y", "x")
    assert (0, 4) not in orders
    assert (0, 4, 2, 6) not in orders


@pytest.mark.parametrize(
    ("rows", "kinds", "check"),
    covering(["e4m3", "e4m3:token", "e4m3:group16", "e4m3:block16"], KINDS.values(), [True, False]),
)
def test_codes_and_scales_are_those_of_one_device(stand_ins, kinds, rows, check):
    x = draw(0, 2, 64, 32)
    columns = None if rows == "e4m3:group16" else rows if rows == "e4m3:token" else "same"
    specs = ops._parse(rows, columns, scaling.find_scaling("current"), False)
    run = choice.mark_varying(lambda x: ops._kernel(specs, x, None, None, None))
    reference = [ops._reference(specs, part, None, None, None) for part in x]
    with jax.set_mesh(mesh_of(kinds)):
        actual = jax.jit(by_hand(run, check))(jax.device_put(x, P("data", "tensor", "fsdp")))
    same(jax.tree.leaves(actual), [np.stack(leaves) for leaves in zip(*map(jax.tree.leaves, reference), strict=True)])


@checks
@pytest.mark.parametrize("kinds", [KINDS["auto"], KINDS["explicit"]], ids=["auto", "explicit"])
def test_gradients_reduced_by_hand(stand_ins, monkeypatch, kinds, check):
    """A linear with tokens sharded over all axes, and the weight over the axis that is not manual."""
    calls = []

    def kernels(*args, cuda, default):
        if getattr(cuda, "func", None) is not ops._kernel:
            return choice.mark_varying(default)(*args)
        calls.append(cuda)
        return choice.mark_varying(cuda)(*args)

    monkeypatch.setattr(choice, "by_platform", kernels)
    x, w, dy = draw(0, 64, 32), draw(1, 32, 48), draw(2, 64, 48)
    recipe = fp8jax.recipes.te_current()

    def step(w, x, dy):
        with choice.target(capability=90):
            return jax.vjp(lambda w, x: fp8jax.linear(x, w, recipe=recipe), w, x)[1](dy)

    def inside(w, x, dy):
        # If JAX checks varying axes, it sums the gradients of replicated arrays.
        dw, dx = step(w, x, dy)
        return dw if check else lax.psum(dw, "data"), dx

    shards = [step(w, x[i:][:32], dy[i:][:32]) for i in (0, 32)]
    calls.clear()
    mapped = jax.shard_map(
        inside,
        in_specs=(P(), P("data"), P("data")),
        out_specs=(P(), P("data")),
        axis_names={"data"},
        check_vma=check,
    )
    with jax.set_mesh(mesh_of(kinds)):
        specs = P("fsdp", "tensor"), P(("data", "fsdp")), P(("data", "fsdp"), "tensor")
        dw, dx = jax.jit(mapped)(*map(jax.device_put, (w, x, dy), specs))
    assert calls
    assert relative(dw, shards[0][0] + shards[1][0]) < 1e-6
    assert relative(dx, jnp.concatenate([shards[0][1], shards[1][1]])) < 1e-6


@pytest.mark.parametrize(("kind", "spmd"), covering([AUTO, EXPLICIT], [None, "rows"]))
def test_under_vmap_of_an_axis_that_is_cut(kind, spmd):
    x = np.round(100 * np.asarray(draw(0, 4, 16, 32)))
    reference = tuple(np.stack(part) for part in zip(*map(expected, x), strict=True))
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(kind,) * 2)
    actual = jax.jit(jax.vmap(statistics, spmd_axis_name=spmd))(
        jax.device_put(x, NamedSharding(mesh, P("rows", None, "columns")))
    )
    same(actual, reference)
    assert actual[0].sharding.spec[0] == "rows"


@pytest.mark.parametrize("layout", [slow(LAYOUTS[0]), slow(LAYOUTS[1]), LAYOUTS[2]], ids=str)
def test_devices_in_any_order(layout):
    x = np.round(100 * np.asarray(draw(0, 2, 16, 32)))
    reference = tuple(np.stack(part) for part in zip(*map(expected, x), strict=True))
    devices = np.array(jax.devices())[[3, 1, 7, 0, 2, 6, 5, 4]].reshape(2, 2, 2)
    with jax.set_mesh(jax.sharding.Mesh(devices, NAMES)):
        same(jax.jit(by_hand(statistics))(jax.device_put(x, P("data", *layout))), reference)


def test_a_map_within_a_map_over_another_axis():
    x = np.round(100 * np.asarray(draw(0, 2, 2, 16, 32)))

    def inner(x):
        actual = jax.tree.map(lambda y: y[None], statistics(x[0, 0]))
        return jax.tree.map(lambda y: y[None], actual)

    specs = {"in_specs": P(None, "fsdp"), "out_specs": P(None, "fsdp"), "axis_names": {"fsdp"}}
    outer = jax.shard_map(
        lambda x: jax.shard_map(inner, **specs)(x), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with jax.set_mesh(mesh_of(KINDS["auto"])):
        actual = jax.jit(outer)(jax.device_put(x, P("data", "fsdp", None, "tensor")))
    parts = [tuple(np.stack(part) for part in zip(*map(expected, rows), strict=True)) for rows in x]
    same(actual, tuple(np.stack(part) for part in zip(*parts, strict=True)))


def test_under_pmap():
    x = np.round(100 * np.asarray(draw(0, 8, 16, 32)))
    same(jax.pmap(statistics)(x), tuple(np.stack(part) for part in zip(*map(expected, x), strict=True)))


def test_under_vmap_on_one_of_several_devices():
    x = np.round(100 * np.asarray(draw(0, 2, 16, 32)))
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(EXPLICIT,) * 2, devices=jax.devices()[2:3])
    actual = jax.jit(jax.vmap(statistics))(jax.device_put(x, NamedSharding(mesh, P("data"))))
    same(actual, tuple(np.stack(part) for part in zip(*map(expected, x), strict=True)))


def test_references_lie_as_kernels_do_on_axes_of_both_kinds():
    x = np.round(100 * np.asarray(draw(0, 16, 32)))
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(EXPLICIT, AUTO))
    run = jax.jit(lambda x: choice.by_platform(x, cuda=statistics, default=expected_in_jax))
    same(run(jax.device_put(x, NamedSharding(mesh, P("rows", "columns")))), expected(x))


def expected_in_jax(x):
    blocks = x.reshape(x.shape[0], -1, 4).max(-1)
    return x.T, x.max(), x.astype(jnp.int32).sum(0), blocks, jnp.arange(x.shape[0])
