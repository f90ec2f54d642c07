"""Whole models on few cards, as `bench release` steps them."""

import json
import types
from pathlib import Path

import pytest

from experiments.bench import card, release
from experiments.models import sizes
from experiments.models.shape import LlamaConfig
from tests.rows import slow

MODEL = LlamaConfig(vocab=256, dim=128, layers=2, heads=4, kv_heads=4, mlp_dim=256)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "coat_optimizer, released, bf16+int8 masters"])
def test_devices_share_sequences_and_no_channels(name):
    """cuDNN's attention refuses queries that lie otherwise than keys, as XLA places them where it alone decides."""
    arm = card.CardArm(name, MODEL, 1, 128, gpus=2)
    assert len(arm.tokens.sharding.device_set) == 2
    text = arm.program.as_text()
    assert " all-gather" in text
    assert " all-to-all" not in text
    arm.state = arm.begin()
    assert 5 < float(arm()) < 6


@pytest.mark.parametrize(
    "file", [slow("h100/release"), slow("h100/release_most"), "h100/release_8b", "h200/release_offload"]
)
def test_plans_are_what_compiled_programs_needed_on_gpus(file):
    """Within 2.5 %, of one sequence and of as many as fit; the files' own column "plan" is not read."""
    content = json.loads((Path(__file__).parents[2] / "results" / f"{file}.json").read_text())
    model, length = ("8b", 8192) if file.endswith("8b") else ("7b", 2048)
    found = {(row["impl"], row["metric"]): row["value"] for row in content["rows"]}
    needs = {name: value for (name, metric), value in found.items() if metric == "memory"}
    assert len(needs) > 1
    for name, memory in needs.items():
        batch = int(found.get((name, "batch"), 1))
        arm = card.CardArm(name, sizes.get(model, release.VOCAB.get(model, 32_000)), batch, length)
        assert sum(arm.plan.memory(batch).values()) / 1e9 == pytest.approx(memory, rel=0.025), name


def arms(plan, needs):
    """What makes arms whose plans and programs need so many GB of a batch, and the batches that are compiled."""
    seen = []

    class Arm:
        def __init__(self, batch):
            self.batch = batch
            most = lambda room: max((b for b in range(1, 200) if plan(b) <= room / 1e9), default=0)  # noqa: E731
            self.plan = types.SimpleNamespace(memory=lambda b: {"all": 1e9 * plan(b)}, most=most)

        @property
        def needs(self):
            if self.batch not in seen:
                seen.append(self.batch)
            return needs(self.batch)

    return Arm, seen


@pytest.mark.parametrize(
    ("planned", "needed", "most"),
    [(1.0, 1.0, 1), (1.0, 0.99, 2), (1.0, 1.01, 2), (0.7, 1.0, 3), (1.5, 1.0, 3), (1.0, 4.0, 3)],
)
def test_the_most_sequences_that_fit_are_found_by_few_programs(planned, needed, most):
    """Of 30 GB, 10 of them of the state: with an exact plan by the first."""
    make, seen = arms(lambda b: 10 + 0.37 * planned * b, lambda b: 10 + 0.37 * needed * b)
    arm = release.largest(make, 30)
    assert arm.needs <= 30 < make(arm.batch + 1).needs
    assert len(seen) - 1 <= most  # one is of this test
    with pytest.raises(ValueError, match=r"one sequence needs 1\d\.\d GB, and there are 10\.0"):
        release.largest(make, 10)
    with pytest.raises(ValueError, match="give --fit"):
        release.largest(make, float("inf"))


def test_a_plan_finds_the_largest_batch():
    plan = card.CardArm("coat, released", MODEL, 1, 128).plan
    need = lambda batch: sum(plan.memory(batch).values())  # noqa: E731
    assert plan.most(need(37)) == 37
    assert plan.most(need(38) - 1) == 37
    assert plan.most(need(1)) == 1
    assert plan.most(need(1) - 1) == 0
