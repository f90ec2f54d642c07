"""The comparison of whole training runs: what it reads, and that it tells a broken recipe from a sound one."""

import pytest

from experiments.tables import training_parity
from experiments.tables.training_parity import Arm

TINY = (
    "--layers 1 --dim 32 --heads 2 --kv-heads 2 --mlp-dim 48 --seq-len 16 --batch 4 --steps 4 --warmup 1 "
    "--eval-every 4 --eval-batches 2 --checkpoint-every 4 --sample-tokens 0"
)


def arm(loss, moments=8, date="2026-11-21"):
    result = {"valid_loss": loss, "parameters": 10, "state_bytes": {"mu": 5 * moments, "nu": 5 * moments, "other": 0}}
    return Arm(TINY, "cpu", date, result | {"tokens_per_s": 1e3}, [loss + 1 / i for i in range(1, 101)])


ARMS = {
    "bf16": arm(1.0),
    "coat": arm(1.004, moments=2),
    "control": arm(1.02),
    "coat, seed 1": arm(1.003003, moments=2),
    "bf16, seed 1": arm(1.001),
    "bf16, seed 2": arm(0.998),
}


def test_arms_are_told_apart_by_the_limit():
    assert training_parity.noise(ARMS) == pytest.approx(0.003)
    noise, coat, control, seed, missing = training_parity.verdict(ARMS)
    assert "0.30%" in noise
    assert coat == "coat: +0.40% of the validation loss of bf16, within the limit of 0.5%."
    assert missing == "Not trained yet: coat_fast; coat_optimizer; coat_activations."
    assert training_parity.noise({"bf16": ARMS["bf16"]}) is None
    assert control == "control: +2.00% of the validation loss of bf16, outside the limit of 0.5%."
    assert seed == "coat, seed 1: +0.20% of the validation loss of bf16, seed 1, within the limit of 0.5%."


def test_rows_are_relative_to_bf16():
    found = {(row.metric, row.case): row for row in training_parity.rows(ARMS)}
    assert found["validation loss", "coat"].ratio == pytest.approx(1.004)
    assert found["validation loss", "coat"].paper_ratio == pytest.approx(1.004, abs=1e-3)
    assert found["moments", "coat"].value == 2
    assert found["moments", "coat"].ratio == 0.25
    assert found["speed", "coat"].ratio == 1
    later = ARMS | {"coat": arm(1.004, date="2026-11-22")}
    (speed,) = (row for row in training_parity.rows(later) if (row.metric, row.case) == ("speed", "coat"))
    assert (speed.value, speed.ratio) == (1e3, None)
    assert len(training_parity.draw(ARMS).axes) == 2


def test_an_arm_is_trained_and_kept(corpus, tmp_path):
    results = tmp_path / "results"
    training_parity.collect(tmp_path, results, TINY)
    assert training_parity.read(results, TINY) == {}
    assert training_parity.train_arm("control", [str(corpus)], tmp_path, TINY) == 0
    training_parity.collect(tmp_path, results, TINY)
    found = training_parity.read(results, TINY)
    assert list(found) == ["control"]
    assert found["control"].result["recipe"] == "control"
    assert len(found["control"].losses) == 1
    assert training_parity.read(results, "--steps 5") == {}
