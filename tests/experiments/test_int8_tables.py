"""The table of INT8 layers: speeds beside bf16."""

import jax
import pytest

from experiments.models.llama import LlamaConfig
from experiments.papers import int8_speed
from fp8jax.ops.dispatch import choice


def test_speeds_are_ratios_to_bf16_and_a_backward_pass_is_the_rest(monkeypatch):
    """Of planted times: 4 and 10 ms of bf16, 2 and 5 of all others; a product 8 times as long as those of blocks."""
    monkeypatch.setenv("FP8JAX_DRY", "1")
    monkeypatch.setattr(int8_speed, "RECIPES", ("int8_block",))
    monkeypatch.setattr(int8_speed, "SIDES", (128,))
    monkeypatch.setattr(
        int8_speed, "QWEN", {"0.5B": LlamaConfig(vocab=32, dim=128, layers=1, heads=4, kv_heads=4, mlp_dim=256)}
    )
    monkeypatch.setattr(int8_speed.timing, "compiled", lambda functions, sets: dict.fromkeys(functions))

    def planted(ready, rounds, burst):
        base = {"bf16": 1e-2, "bf16, forward": 4e-3, "forward": 4e-3, "linear": 3e-3}
        return {name: base.get(name, 2e-3 if name.endswith("forward") else 5e-3) for name in ready}

    monkeypatch.setattr(int8_speed.timing, "seconds", planted)
    rows = {(row.case.split(",")[0], row.table.rpartition(", ")[2]): row for row in int8_speed.layers(64, 1, 1.0)}
    assert rows["int8_block", "backward"].value == pytest.approx(3)
    assert rows["int8_block", "backward"].ratio == pytest.approx(6 / 3)
    assert rows["int8_block", "both"].ratio == pytest.approx(2)
    assert rows["bf16", "forward"].value == pytest.approx(4)
    one, other = int8_speed.products(64, 1, 1.0)
    assert one.value == pytest.approx(2e-12 * 256**3 / 1e-2)
    assert (other.ratio, other.pivot[0]) == (2, "blocks of 128 (xla)")
    assert int8_speed.shares(1, 1.0)[0].value == pytest.approx(75)
    # The layer of GPT-2, whose four linear layers are quantized.
    layer, params, states = int8_speed.gpt_layer(128, "int8_block")
    x = int8_speed.inputs(128)[0]
    with choice.record_choices() as told:
        jax.eval_shape(layer, params, states, x)
    assert [operation for operation, _ in told].count("matmul") == 4
