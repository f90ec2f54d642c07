"""The training program on several devices: shardings, results, and checkpoints on another mesh."""

import dataclasses
import json
import re
import shutil
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8jax
from experiments import mesh
from experiments.mesh import flatten
from experiments.train import cli
from experiments.train import loop as loops
from experiments.train.checkpoint import Checkpoints
from experiments.train.task import TrainState

# Amax histories, quantized moments, and accumulated gradients.
FLAGS = (  # noqa: SIM905 (a command line reads best as one)
    "--recipe mixed --microbatches 2 --batch 16 --checkpoint-every 2 --eval-every 3 --keep 9 --steps 6 "
    "--layers 1 --mlp-dim 128 --run"
).split()
ROWS = P(("data", "fsdp", "expert"))


def mixed(_):
    coat = fp8jax.recipes.coat()
    return dataclasses.replace(fp8jax.recipes.te_delayed(), name="mixed", optimizer=coat.optimizer)


class Seen(loops.Loop):
    """A loop that records the shardings of its state and batches, and can stop early."""

    notes: ClassVar = None
    last: ClassVar = None

    def run(self, state):
        step, self.seen = self.step, []

        def noted(state, tokens):
            self.seen.append(
                (jax.tree.map(lambda x: x.sharding, state), getattr(tokens, "sharding", None), tokens.shape)
            )
            if len(self.seen) == Seen.last:
                self.stop.signum = 15
            return step(state, tokens)

        self.step = noted
        Seen.notes = self
        return super().run(state)


@pytest.fixture(scope="module")
def runs(argv, out):
    """The same training on one device, and on 8, then 4 of them, two of which share sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "SMALLEST", 1024)
        patch.setattr(cli, "Loop", Seen)
        calls, codes = [], []
        for run, where, last in (
            ("one", "data=1", None),
            ("many", "data=4,fsdp=2 --partition slices", 2),
            ("many", "fsdp=2,tensor=2", None),
        ):
            Seen.last = last
            codes.append(cli.main([*argv, *FLAGS, run, "--mesh", *where.split()], recipe=mixed))
            calls.append(Seen.notes)
            if (out / "many").exists():
                shutil.copytree(out / "many", out / f"many{len(calls)}")
    return codes, calls, out


def rows(folder):
    actual = [json.loads(line) for line in (folder / "mixed" / "metrics.jsonl").read_text().splitlines()]
    return {kind: {r["step"]: r[kind] for r in actual if kind in r} for kind in ("loss", "valid_loss")}


def test_training_goes_on_from_mesh_to_mesh_as_on_one_device(runs):
    codes, _, out = runs
    assert codes == [0, 143, 0]
    one, many = rows(out / "one"), rows(out / "many")
    assert sorted(many["loss"]) == [1, 2, 3, 4, 5, 6]
    for kind, values in one.items():
        assert values.keys() == many[kind].keys()
        for step, value in values.items():
            # bf16 sums in other orders; a code at a tie changes.
            np.testing.assert_allclose(many[kind][step], value, rtol=2e-3)


def test_parameters_state_and_batches_lie_as_the_mesh_says(runs):
    _, recorded, _ = runs
    assert recorded[0].seen[0][1] is None
    for loop, shape, among in ((recorded[1], (4, 2, 1, 1), ("fsdp", "data")), (recorded[2], (1, 2, 2, 1), "fsdp")):
        shared = ("tensor",) if shape[2] > 1 else ()
        # The first and the last step: outputs have the shardings of inputs.
        for state, batch, size in (loop.seen[0], loop.seen[-1]):
            assert (batch.spec, size) == (ROWS, (16, 17))
            assert batch.mesh.devices.shape == shape
            specs = {name.partition(":")[0]: x.spec for name, x in flatten(state).items()}
            up, down = "layers.mlp.up.kernel", "layers.mlp.down.kernel"
            assert specs[f"params.{up}"] == P(None, "fsdp", *shared)
            assert specs[f"params.{down}"] == P(None, (*shared, "fsdp") if shared else "fsdp")
            for moment in ("mu", "nu"):
                for part in ("codes", "scale", "expansion"):  # a row's group is not split
                    cut = shared if part == "codes" else ()
                    assert specs[f"opt_state.1.{moment}.{up}.{part}"] == P(None, among, *cut), part
            assert specs["step"] == specs["params.norm.scale"] == P()
            histories = [name for name in specs if name.startswith("model_state")]
            assert histories
            assert all(specs[name] == P() for name in histories)


def test_a_checkpoint_is_the_same_bits_on_any_mesh(runs):
    """The state after two steps on 8 devices, restored unsharded and on 4: each shard has its part of the bytes."""
    _, recorded, out = runs
    abstract = jax.eval_shape(lambda: None)
    with Checkpoints(out / "many2" / "mixed" / "checkpoints", 9, clean=False) as checkpoints:
        leaves = checkpoints.read_meta(2)["leaves"]
        shapes = {k: jax.ShapeDtypeStruct(v["shape"], v["dtype"]) for k, v in leaves.items()}
        whole, _ = checkpoints.restore(2, shapes)
        for loop in recorded[2:]:
            where = flatten(loop.seen[0][0])
            abstract = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[k]) for k, x in shapes.items()}
            placed, _ = checkpoints.restore(2, abstract)
            for name, x in placed.items():
                assert x.sharding == where[name]
                for shard in x.addressable_shards:
                    expected = np.asarray(whole[name])[shard.index]
                    assert np.asarray(shard.data).tobytes() == expected.tobytes(), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mesh model=2", "--mesh unknown axis 'model'; use data, fsdp, tensor or expert"),
        ("--mesh data=2,data=4", "--mesh axis data is repeated"),
        ("--mesh data=0", "--mesh data='0' is not a number of devices"),
        ("--mesh data", "--mesh data='' is not a number of devices"),
        ("--mesh data=4,fsdp=4", "data=4,fsdp=4 needs 16 devices, but there are 8; .* product 8"),
        ("--mesh data=3", "--mesh data=3: 3 devices do not divide the 4 of --batch; use --batch 6"),
        ("--mesh data=4,tensor=4", "data=4,fsdp=1,tensor=4 needs 16 devices"),
        ("--mesh data=3,tensor=2", "data=3,tensor=2: 3 devices do not divide the 4 of --batch"),
        (
            "--mesh tensor=4",
            r"--mesh 4 devices along tensor do not divide 2 key and value heads; tensor must be one of \[1, 2\]",
        ),
        ("--mesh tensor=2 --mlp-dim 33", "do not divide 33 MLP channels"),
        (
            "--mesh tensor=2 --batch 1 --seq-len 17",
            "do not divide the 17 tokens of a replica; use a multiple of 2 tokens$",
        ),
        (
            "--mesh tensor=2 --seq-len 12 --recipe int8_fallback jetfire",
            "48 tokens .* blocks of 32 with recipe jetfire",
        ),
        (
            "--mesh data=2,tensor=2 --batch 8 --microbatches 2 --seq-len 12 --recipe jetfire",
            "do not divide the 24 tokens of a replica, in blocks of 32 .* a multiple of 64 tokens$",
        ),
        (
            "--mesh tensor=2 --mlp-dim 192 --recipe te_current --lora-rank 4 --base e4m3:block128",
            "--mesh 2 devices along tensor have 96 of 192 MLP channels each, not a multiple of the group of 128",
        ),
        ("--mesh tensor=2 --release previous", "with tensor=2 gradients are summed .* Use fsdp=2 instead"),
        ("--mesh data=2,fsdp=2 --recipe fp8_lm", "Use --mesh with one axis"),
        (
            "--mesh data=1 --partition slices",
            "--partition slices: the optimizer state is sharded .* use --mesh data=2 or more",
        ),
        (
            "--mesh data=4 --partition tensors",
            "--partition tensors: 4 devices along data do not divide 2 layers; use slices",
        ),
        ("--mesh data=2 --partition slices --release twice", "--partition slices is not supported with --release"),
        ("--mesh data=4 --microbatches 2", "the 2 sequences of a microbatch .* use --batch 8"),
    ],
)
def test_a_wrong_mesh_is_one_line_that_names_it_and_the_fix(argv, capsys, flags, message):
    assert cli.main([*argv, "--run", "wrong", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


@pytest.mark.parametrize(("batch", "microbatches", "count"), [(8, 1, 8), (8, 2, 4), (12, 1, 6), (7, 1, 7), (3, 3, 1)])
def test_without_one_a_batch_is_spread_over_as_many_devices_as_divide_it(batch, microbatches, count):
    actual = mesh.choose("", batch, microbatches)
    assert dict(actual.shape) == {"data": count, "fsdp": 1, "tensor": 1, "expert": 1}


def test_several_processes_use_all_of_their_devices_and_rows_that_do_not_divide_are_everywhere():
    two = [SimpleNamespace(process_index=i // 2) for i in range(4)]
    with pytest.raises(ValueError, match=r"data=2 uses 2 of the 4 devices .* Use sizes with product 4"):
        mesh.choose("data=2", 8, 1, two)
    with pytest.raises(ValueError, match="empty, with 3 sequences of a microbatch, uses 3 of the 4 devices"):
        mesh.choose("", 6, 2, two)
    with pytest.raises(ValueError, match=r"^data=0,fsdp=1,tensor=2 needs 0 devices, but there are 8"):
        mesh.make(0, 1, tensor=2)
    with pytest.raises(ValueError, match=r"^data=16,fsdp=1 needs 16 devices"):
        mesh.make(16, 1)
    assert set(mesh.make(2, 1, kind=AxisType.Explicit).axis_types) == {AxisType.Explicit}
    mesh.check_partition("slices", {"data": 3}, 4)
    mesh.check_partition("", {"data": 1}, 4)
    with pytest.raises(ValueError, match=r"^tensors: the optimizer state is sharded"):
        mesh.check_partition("tensors", {"data": 1}, 4)
    rows = mesh.batches(mesh.make(2, 1, tensor=2))
    actual = [mesh.place(np.arange(n), rows) for n in (4, 2, 3)]
    assert [x.sharding.spec for x in actual] == [ROWS, ROWS, P()]
    np.testing.assert_array_equal(actual[2], np.arange(3))


SAME, UP, DOWN = None, P(None, "fsdp", "tensor"), P(None, ("tensor", "fsdp"))
UP_SLICED, DOWN_SLICED = P(None, ("fsdp", "data"), "tensor"), P(None, ("tensor", "fsdp", "data"))


@pytest.mark.parametrize(
    ("path", "shape", "place", "sliced"),
    [
        ("layers.mlp.up.kernel", (4, 256, 512), UP, UP_SLICED),
        ("layers.mlp.up.kernel", (4, 64, 64), P(None, None, "tensor"), SAME),  # a small one
        ("layers.mlp.up.kernel", (4, 255, 512), P(None, None, "tensor"), SAME),  # two devices do not divide its rows
        ("layers.mlp.up.kernel", (4, 254, 512), UP, SAME),
        ("layers.mlp.up.bias", (4, 512), P(None, "tensor"), SAME),
        ("layers.mlp.down.kernel", (4, 512, 256), DOWN, DOWN_SLICED),
        ("layers.mlp.down.kernel", (4, 510, 256), P(None, "tensor"), SAME),
        ("layers.mlp.down.bias", (4, 256), P(), SAME),
        ("layers.mlp_norm.scale", (4, 1 << 18), P(), SAME),
        ("embed.embedding", (512, 128), P(("fsdp", "tensor")), P(("fsdp", "tensor", "data"))),
        ("embed.embedding", (511, 129), P(), SAME),
        ("embed.embedding", (1022, 128), P("fsdp"), SAME),
        ("embed.embedding", (256, 64), P(), SAME),
        ("norm.scale", (1 << 18,), P(), SAME),
        ("layers.attention.q.lora_a", (4, 512, 8), P(), SAME),
        ("layers.attention.q.lora_b", (4, 8, 512), P(None, None, "tensor"), SAME),
        ("layers.attention.out.lora_a", (4, 512, 8), P(None, "tensor"), SAME),
        ("layers.attention.out.lora_b", (4, 8, 512), P(), SAME),
        ("layers.mlp.up.held.0", (4, 256, 512), UP, UP_SLICED),
        ("layers.mlp.up.held.0", "e4m3", DOWN, DOWN_SLICED),  # codes (4, 512, 256), of the transposed matrix
        ("layers.mlp.up.held.1", (4, 512, 1), P(None, "tensor"), SAME),
        ("layers.mlp.down.held.0", "e4m3", UP, UP_SLICED),
        ("layers.mlp_norm.held.0", (4, 512, 256), P(None, "fsdp"), P(None, ("fsdp", "data"))),
    ],
)
def test_where_an_array_lies_follows_from_its_name_and_shape(path, shape, place, sliced):
    """Includes the optimizer state of an array, sharded along "data" by the partition."""
    dtype = jnp.float8_e4m3fn if shape == "e4m3" else jnp.bfloat16
    tree: Any = jax.ShapeDtypeStruct((4, 512, 256) if shape == "e4m3" else shape, dtype)
    for name in reversed(path.split(".")):
        tree = {name: tree}
    devices = jax.sharding.AbstractMesh((2, 2, 2, 1), mesh.AXES)
    only = lambda tree: [x.spec for x in jax.tree.leaves(tree)]  # noqa: E731
    assert only(mesh.state(devices, tree)) == [place]
    assert only(mesh.state(jax.sharding.AbstractMesh((4, 1, 1, 1), mesh.AXES), tree)) == [P()]
    sliced = place if sliced is SAME else sliced
    by_layers = P("data", *place[1:]) if path.startswith("layers") else sliced
    for partition, expected in (("slices", sliced), ("tensors", by_layers)):
        state = mesh.state(devices, TrainState(None, tree, None, tree, None, None), partition)
        assert only(state.params) == [place]
        assert only(state.opt_state) == only(mesh.optimizer_shardings(devices, tree, partition)) == [expected]


def test_scales_of_blocks_are_cut_no_further_than_their_codes():
    """450 rows, which two devices divide and four do not, have four blocks."""
    spec = fp8jax.QuantSpec("e4m3", "block", 128, layer_axes=1)
    q = jax.eval_shape(lambda: fp8jax.quantize(jnp.zeros((4, 450, 512)), spec))
    assert q.scale.shape == (4, 4, 4)
    tree = {"layers": {"mlp": {"up": {"kernel": q}}}}
    actual = mesh.optimizer_shardings(jax.sharding.AbstractMesh((2, 2, 2, 1), mesh.AXES), tree, "slices")
    assert {x.spec for x in jax.tree.leaves(actual)} == {UP}


def test_the_line_about_the_mesh_says_which_recipes_gather_all_parameters_before_a_step():
    recipes = [fp8jax.recipes.coat(), fp8jax.recipes.fp8_lm()]
    description = mesh.describe(mesh.make(2, 2), recipes)
    assert description.endswith("and its moments; each gathers all parameters before a step with fp8_lm in bf16")
    assert "gathers" not in mesh.describe(mesh.make(2, 2), [*recipes[:1], fp8jax.recipes.fp8_lm_two_phase()])
    assert "gathers" not in mesh.describe(mesh.make(2, 1), recipes)
    description = mesh.describe(mesh.make(2, 1, tensor=2), recipes)
    assert description.startswith(
        "data=2,fsdp=1,tensor=2: each device takes 1 of 2 parts of a batch, with 1 of 2 parts of each"
    )
    assert description.endswith("and has 1 of 2 parts of each large matrix and its moments")
    assert "has 1 of 4 parts of each large matrix" in mesh.describe(mesh.make(1, 2, tensor=2), recipes[:1])
    assert "data=2,fsdp=1,expert=2: each device takes 1 of 4 parts of a batch, with 1 of 2 parts of the experts" in (
        mesh.describe(mesh.make(2, 1, expert=2))
    )
    assert mesh.describe(mesh.make(2, 1)).endswith(
        "takes 1 of 2 parts of a batch, and has all parameters and their moments"
    )
