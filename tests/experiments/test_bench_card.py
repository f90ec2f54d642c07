"""Whole models on a few GPUs, as in `bench release`."""

import pytest

from experiments.bench import card, release
from experiments.models.shape import LlamaConfig

MODEL = LlamaConfig(vocab=256, dim=128, layers=2, heads=4, kv_heads=4, mlp_dim=256)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "coat_optimizer, released, bf16+int8 masters"])
def test_devices_share_sequences_and_no_channels(name):
    """cuDNN's attention rejects queries with another sharding than keys, which XLA may choose without constraints."""
    arm = card.CardArm(name, MODEL, 1, 128, gpus=2)
    assert len(arm.tokens.sharding.device_set) == 2
    text = arm.program.as_text()
    assert " all-gather" in text
    assert " all-to-all" not in text
    arm.state = arm.begin()
    assert 5 < float(arm()) < 6


def arms(needs):
    """Returns a function that creates arms with this memory per batch, and the list of compiled batches."""
    calls = []

    class Arm:
        def __init__(self, batch):
            self.batch = batch

        @property
        def needs(self):
            if self.batch not in calls:
                calls.append(self.batch)
            return needs(self.batch)

    return Arm, calls


@pytest.mark.parametrize(
    ("needed", "most"),
    [
        (lambda b: 10 + 0.37 * b, 4),
        (lambda b: 10 + 9 * b, 3),
        (lambda b: 10 + 4 * b, 4),
        # From some batch on, another stage has the peak memory.
        (lambda b: max(22 + 0.01 * b, 10 + 0.37 * b), 6),
    ],
)
def test_the_most_sequences_that_fit_are_found_by_few_programs(needed, most):
    """30 GB, of which the state has 10."""
    make, recorded = arms(needed)
    arm = release.largest(make, 30)
    assert len(recorded) <= most
    assert arm.needs <= 30 < make(arm.batch + 1).needs
    with pytest.raises(ValueError, match=r"one sequence needs [12]\d\.\d GB, but only 10\.0 GB are available"):
        release.largest(make, 10)
    with pytest.raises(ValueError, match="set --fit"):
        release.largest(make, float("inf"))
