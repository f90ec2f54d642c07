"""`Recipe.unquantized_blocks`: the first and last blocks of a model, by path or in a loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.rewrite import heads

WIDTH = 32


def normal(i, *shape):
    return 0.2 * jax.random.normal(jax.random.key(i), shape)


X = 5 * normal(2, 32, WIDTH)


def test_the_first_and_the_last_blocks_stay_in_16_bits():
    """By the first number in a path, for each stack. If no other block is left, all are quantized."""
    p = {
        "blocks": {str(i): {"up": normal(i, WIDTH, WIDTH), "down": normal(9 + i, WIDTH, WIDTH)} for i in range(4)},
        "tail": {str(i): normal(20 + i, WIDTH, WIDTH) for i in range(2)},
        "out": normal(30, WIDTH, WIDTH),
    }

    def net(p, x):
        for w in p["blocks"].values():
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        for w in p["tail"].values():
            x = jnp.tanh(x @ w)
        return jnp.tanh(x @ p["out"])

    recipe = dataclasses.replace(fp8jax.recipes.te_current(), unquantized_blocks=(1, 1))
    explained = fp8jax.transform(net, recipe).explain(p, X)
    reasons = {e.path: e.reason for e in explained.skipped}
    assert reasons == {
        f"blocks/{i}/{name}": f"in the {edge} 1 of 4 blocks"
        for i, edge in ((0, "first"), (3, "last"))
        for name in ("up", "down")
    }
    (no_block,) = [e for e in explained.quantized if e.path == "out"]
    assert no_block.reason == "the recipe; its path has no number of a block"
    named = fp8jax.transform(net, [fp8jax.Rule("blocks/0/up", "te_current"), recipe]).explain(p, X)
    assert "blocks/0/up" in [e.path for e in named.quantized]
    wider = dataclasses.replace(recipe, unquantized_blocks=(0, 3))
    assert [e.path for e in fp8jax.transform(net, wider).explain(p, X).quantized if "blocks" in e.path] == [
        "blocks/0/up",
        "blocks/0/down",
    ]


def scanned_blocks(reverse=False):
    """Returns a function of stacked blocks and x by `jax.lax.scan`, and its parameters."""

    def block(x, w):
        h = jnp.tanh(x @ w["up"]) @ w["down"]
        return x + h, jnp.sum(h)

    def net(p, x):
        x, sums = jax.lax.scan(jax.checkpoint(block), x, p["blocks"], reverse=reverse)
        return jnp.tanh(x), sums

    return net, {"blocks": {name: normal(i, 5, WIDTH, WIDTH) / 4 for i, name in enumerate(("up", "down"))}}


EDGES = dataclasses.replace(fp8jax.recipes.te_current(), unquantized_blocks=(1, 2))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_over_blocks_leaves_its_first_and_last_iterations_in_16_bits(reverse):
    """Against unrolled blocks, with `fp8jax.linear` in the middle ones."""
    net, p = scanned_blocks(reverse)
    fast = fp8jax.transform(net, EDGES)

    def one_by_one(p, x):
        sums, order = [], list(range(5))[:: -1 if reverse else 1]
        for i, index in enumerate(order):
            up, down = (p["blocks"][name][index] for name in ("up", "down"))
            multiply = functools.partial(fp8jax.linear, recipe=EDGES) if i in (1, 2) else jnp.matmul
            h = multiply(jnp.tanh(multiply(x, up)), down)
            x, sums = x + h, [*sums, jnp.sum(h)]
        return jnp.tanh(x), jnp.stack(sums[:: -1 if reverse else 1])

    def loss(f):
        weighted = lambda y: jnp.vdot(jnp.sin(y), jnp.linspace(0, 1, y.size).reshape(y.shape))  # noqa: E731
        return jax.jit(jax.value_and_grad(lambda p: sum(map(weighted, f(p, X)))))

    for actual, expected in zip(jax.tree.leaves(loss(fast)(p)), jax.tree.leaves(loss(one_by_one)(p)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    if not reverse:
        explained = fast.explain(p, X)
        assert [e.reason for e in explained.skipped if e.path == "blocks/up"] == [
            "in the first 1 of 5 blocks",
            "in the last 2 of 5 blocks",
        ]
        assert [e.path for e in explained.quantized_layers] == ["blocks/up", "blocks/down"]
        flops = {e.reason: e.flops for e in explained.entries if e.path == "blocks/up"}
        assert flops == {reason: 2 * n * 32 * WIDTH**2 for reason, n in zip(flops, (1, 2, 2), strict=True)}
        assert fast.check(p, X).first_failure is None


def count_scans(fast, p):
    return [eqn.primitive.name for eqn in jax.make_jaxpr(fast)(p, X).jaxpr.eqns].count("scan")


def test_a_loop_is_split_only_for_what_its_recipe_leaves():
    net, p = scanned_blocks()
    assert count_scans(fp8jax.transform(net, EDGES), p) == 3
    with_output, more = (lambda p, x: net(p, x)[0] @ p["out"]), p | {"out": normal(9, WIDTH, WIDTH)}
    rule = fp8jax.Rule("blocks/.*", "te_current")
    assert count_scans(fp8jax.transform(with_output, [rule, EDGES]), more) == 1
    named = fp8jax.transform(net, [fp8jax.Rule("blocks/up", "te_current"), EDGES]).explain(p, X)
    assert [e.path for e in named.quantized] == ["blocks/up", "blocks/up", "blocks/down", "blocks/up"]
    every = dataclasses.replace(EDGES, unquantized_blocks=(3, 2))
    assert count_scans(fp8jax.transform(net, every), p) == 1  # no other block would be left
    mesh = jax.make_mesh((1,), ("pipe",), axis_types=(jax.sharding.AxisType.Auto,))
    stages = jax.shard_map(
        net, mesh=mesh, in_specs=(jax.P("pipe"), jax.P()), out_specs=(jax.P(), jax.P("pipe")), check_vma=False
    )
    explained = fp8jax.transform(stages, EDGES).explain(p, X)  # the edges of a device's layers are none of the model
    assert all("in a loop that may be over a part" in e.reason for e in explained.quantized)


@pytest.mark.filterwarnings("ignore:.*never calls advance")
def test_states_of_a_split_loop_have_a_row_for_each_iteration():
    net, p = scanned_blocks()
    fast = fp8jax.transform(net, dataclasses.replace(fp8jax.recipes.te_delayed(), unquantized_blocks=(1, 2)))
    states = fast.init(p, X)
    observed = jax.jit(jax.grad(lambda s: jnp.sum(fast(p, X, states=s)[0] ** 2)))(states)
    for path in ("blocks/up", "blocks/down"):
        (slots,) = observed[path].slots
        for stat in jax.tree.leaves(slots):
            np.testing.assert_array_equal(np.asarray(stat) > 0, [False, True, True, False, False])


@pytest.mark.parametrize(
    ("length", "counts", "parts"),
    [
        (4, (1, 1), [(1, "in the first 1 of 8 blocks", {0}), (2, "", None), (1, "in the last 1 of 8 blocks", {1})]),
        (2, (1, 0), [(1, "in the first 1 of 4 blocks", {0}), (1, "", None)]),
        (2, (1, 1), [(1, "in the first 1 of 4 blocks", {0}), (1, "in the last 1 of 4 blocks", {1})]),
        (4, (2, 3), [(1, "in the first 2 of 8 blocks", {0, 1}), (1, "", None), (2, "in the last 4 of 8 blocks", None)]),
        (2, (2, 2), [(2, "", None)]),
    ],
)
def test_an_iteration_of_several_blocks_leaves_the_numbers_at_its_edges(length, counts, parts):
    """As in models that scan over groups of layers. An edge consists of whole iterations."""
    paths = [f"layers/{i}/{name}" for i in range(2) for name in ("up", "down")]
    actual = heads.split_loop(paths, length, counts)
    assert [(part.size, part.reason, part.edge_numbers) for part in actual] == parts
    assert heads.edge_reason("layers/0/up", actual[0]) == actual[0].reason
    assert bool(heads.edge_reason("layers/1/up", actual[0])) == (counts[0] > 1 and len(actual) > 1)


def test_numbers_of_single_layers_are_no_blocks():
    """Such as those of unnamed layers in Linen."""
    parts = heads.split_loop(["blocks/Dense_0", "blocks/Dense_1", "blocks/Attention_0/query"], 3, (1, 1))
    assert [part.size for part in parts] == [1, 1, 1]
    assert {heads.edge_reason(f"blocks/Dense_{i}", parts[0]) for i in range(2)} == {"in the first 1 of 3 blocks"}


def test_numbers_of_layers_in_several_modules_are_no_blocks():
    paths = [f"layers/{module}/Dense_{i}" for module in ("attn", "mlp") for i in range(2)]
    parts = heads.split_loop(paths, 6, (1, 1))
    assert [(part.size, part.reason) for part in parts] == [
        (1, "in the first 1 of 6 blocks"),
        (4, ""),
        (1, "in the last 1 of 6 blocks"),
    ]
    assert all(heads.edge_reason(path, parts[0]) for path in paths)


ONE_EDGE = dataclasses.replace(EDGES, unquantized_blocks=(1, 1))


def block(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def stacked(*shape):
    return {name: normal(i, *shape, WIDTH, WIDTH) / 4 for i, name in enumerate(("up", "down"))}


def reasons(net, p):
    """Returns the reasons of the "up" matmuls, in program order."""
    return [e.reason for e in fp8jax.transform(net, ONE_EDGE).explain(p, X).entries if e.path.endswith("up")]


def test_a_loop_over_experts_is_not_split():
    """Its matmuls do not read the result of the last iteration."""

    def experts(x, w):
        def add(carry, expert):
            y, i = carry
            return (y + block(x * (i + 1.0), expert)[0], i + 1), None

        return x + jax.lax.scan(jax.checkpoint(add), (jnp.zeros_like(x), 0), w)[0][0], None

    def net(p, x):
        for w in p["blocks"]:
            x, _ = experts(x, w["experts"])
        return x

    p = {"blocks": [{"experts": stacked(8)} for _ in range(3)]}
    first, middle, last = reasons(net, p)
    assert (first, middle, last) == ("in the first 1 of 3 blocks", "the recipe", "in the last 1 of 3 blocks")
    layers = lambda p, x: jax.lax.scan(experts, x, p["layers"])[0]  # noqa: E731
    assert reasons(layers, {"layers": stacked(2, 8)}) == ["the recipe; its path has no number of a block"]
    assert reasons(layers, {"layers": stacked(3, 8)}) == [
        "in the first 1 of 3 blocks",
        "the recipe",
        "in the last 1 of 3 blocks",
    ]


def test_experts_in_a_list_are_no_blocks():
    """None reads the result of another, unlike the blocks around them."""

    def experts(p, x):
        x = jnp.tanh(x)
        return sum(block(x, w)[0] for w in p["experts"])

    def net(p, x):
        for w in p["blocks"]:
            x = jax.checkpoint(experts)(w, x)
        return x

    layer = {"experts": [stacked() for _ in range(3)]}
    assert reasons(experts, layer) == ["the recipe"] * 3
    edge = {0: "in the first 1 of 3 blocks", 2: "in the last 1 of 3 blocks"}
    assert reasons(net, {"blocks": [layer] * 3}) == [edge.get(i, "the recipe") for i in range(3) for _ in range(3)]


def slices_of_layers(p, x):
    for start in range(0, 12, 3):
        w = jax.tree.map(lambda w, start=start: w[start : start + 3], p["layers"])
        x = jax.checkpoint(lambda x, w: jax.lax.scan(block, x, w)[0])(x, w)
    return x


def layers_between_edges(p, x):
    x, _ = block(x, jax.tree.map(lambda w: w[0], p["layers"]))
    x, _ = jax.lax.scan(block, x, jax.tree.map(lambda w: w[1:-1], p["layers"]))
    return block(x, jax.tree.map(lambda w: w[-1], p["layers"]))[0]


def groups_of_layers(p, x):
    groups = jax.tree.map(lambda w: w.reshape(4, -1, WIDTH, WIDTH), p["layers"])
    return jax.lax.scan(lambda x, w: (jax.lax.scan(block, x, w)[0], None), x, groups)[0]


def indexed_layers(p, x):
    layer = jax.checkpoint(block)
    return jax.lax.fori_loop(0, 12, lambda i, x: layer(x, jax.tree.map(lambda w: w[i], p["layers"]))[0], x)


def numbered_loops(p, x):
    for w in p["segments"]:
        x, _ = jax.lax.scan(block, x, w)
    return x


@pytest.mark.parametrize(
    ("net", "p", "num_loops"),
    [
        (slices_of_layers, {"layers": stacked(12)}, 4),
        (layers_between_edges, {"layers": stacked(12)}, 1),
        (groups_of_layers, {"layers": stacked(12)}, 1),
        (indexed_layers, {"layers": stacked(12)}, 1),
        (groups_of_layers, {"layers": stacked(4, 3)}, 1),
        (numbered_loops, {"segments": [stacked(4) for _ in range(3)]}, 3),
    ],
)
def test_a_loop_that_may_lack_blocks_of_the_model_is_not_split_but_reported(net, p, num_loops):
    fast, text = fp8jax.transform(net, ONE_EDGE), "in a loop that may be over a part"
    explained = fast.explain(p, X)
    ups = [e for e in explained.entries if e.path.endswith("up")]
    assert all(e.is_quantized for e in ups)
    assert sum(text in e.reason for e in ups) == num_loops
    assert sum(text in note for note in explained.notes) == 1
    with pytest.warns(UserWarning, match=text):
        jax.eval_shape(fast, p, X)


def test_a_rule_for_a_layer_silences_the_report_of_its_loop():
    rules = [fp8jax.Rule("layers/up", "te_current"), ONE_EDGE]
    (note,) = fp8jax.transform(slices_of_layers, rules).explain({"layers": stacked(12)}, X).notes
    assert note.startswith("layers/down: runs in a loop")


@pytest.mark.parametrize("axis", [0, 1])
def test_a_whole_stack_is_found_through_calls_casts_and_other_axes(axis):
    """In a loop over microbatches, with concatenated, cast, transposed and rematerialized matrices."""
    p = {"layers": {name: jnp.moveaxis(w, 0, axis) for name, w in stacked(5).items()}}

    @jax.checkpoint
    def layers(p, x):
        up, down = (jnp.moveaxis(p["layers"][name].astype(jnp.bfloat16), axis, 0) for name in ("up", "down"))
        w = jnp.concatenate([up, down], 2)
        step = lambda x, w: (jnp.tanh(x @ w)[:, :WIDTH], None)  # noqa: E731
        return jax.lax.scan(step, x.astype(jnp.bfloat16), w)[0]

    def net(p, x):
        return jax.lax.scan(lambda total, x: (total + layers(p, x), None), jnp.zeros_like(X), jnp.stack([x, x]))[0]

    actual = [reason.partition(";")[0] for reason in reasons(net, p)]
    assert actual == ["in the first 1 of 5 blocks", "the recipe", "in the last 1 of 5 blocks"]
