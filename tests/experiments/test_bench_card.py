"""Whole models on few cards, as `bench release` steps them."""

import pytest

from experiments.bench import card
from experiments.models.shape import LlamaConfig

MODEL = LlamaConfig(vocab=256, dim=128, layers=2, heads=4, kv_heads=4, mlp_dim=256)


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
