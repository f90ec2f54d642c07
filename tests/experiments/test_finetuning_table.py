"""Fine-tuning losses: the questions, and the arithmetic of the table."""

import json

import pytest

from experiments.papers import finetuning


def test_questions_are_about_what_has_a_docstring(tmp_path):
    (tmp_path / "b.py").write_text("def f(x, *, y=1):\n    '''Adds x to y, and more of it.\n\n    More.'''\n")
    (tmp_path / "a.py").write_text("class A:\n    '''Holds what is to be held.'''\n    def g(self): pass\n")
    (tmp_path / "c.py").write_text("def (")
    found = list(finetuning.pairs(tmp_path, 10))
    assert [[m["content"] for m in pair["messages"]] for pair in found] == [
        ["What does a.A do?", "Holds what is to be held."],
        ["What does b.f(x, *, y=1) do?", "Adds x to y, and more of it."],
    ]
    assert [m["role"] for m in found[0]["messages"]] == ["user", "assistant"]
    assert len(list(finetuning.pairs(tmp_path, 1))) == 1


def test_each_arm_and_seed_is_trained_with_its_own_flags_once(tmp_path, monkeypatch):
    """Seeds in the order of their importance, and none after the time is over."""
    given, folder = [], tmp_path / "checkpoint"

    def train(argv):
        given.append(" ".join(argv))
        run = tmp_path / argv[argv.index("--run") + 1] / argv[argv.index("--recipe") + 1]
        run.mkdir(parents=True)
        (run / "result.json").write_text("")
        (run / "metrics.jsonl").write_text('{"loss": 2.0, "valid_loss": 1.0}')
        return 0

    monkeypatch.setattr(finetuning.cli, "main", train)
    arms = ["bf16", "LoRA on e4m3"]
    assert finetuning.losses(tmp_path, "tiny", folder, arms, until=0.0) == {}
    for _ in range(2):
        found = finetuning.losses(tmp_path, "tiny", folder, arms, until=float("inf"))
        assert {arm: list(runs) for arm, runs in found.items()} == {arm: [0, 1, 2] for arm in arms}
    assert len(given) == 6
    assert "--lr 5e-4 --recipe bf16 --init" in given[0]
    assert "--lr 5e-3 --lora-rank 8 --recipe te_current --base e4m3 --init" in given[1]
    for i, line in enumerate(given):
        assert f"--seed {i // 2} " in line
        assert line.endswith(f"--out {tmp_path} --data {folder / 'pairs.jsonl'}")
        assert f"--init {folder} " in line


def test_a_run_is_read_and_differences_are_within_seeds(tmp_path):
    rows = [{"step": i, "loss": 5.0 - 0.1 * i} for i in range(20)] + [{"step": 20, "valid_loss": 3.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = finetuning.read(tmp_path)
    assert run == {"before": 5.0, "training": pytest.approx(3.15), "validation": 3.5}
    bf16 = {0: run, 1: {"before": 5.0, "training": 3.0, "validation": 3.0}}
    coat = {0: run | {"training": 3.15 * 1.01}, 1: bf16[1] | {"training": 3.0 * 0.99}}
    table = {(row.case, row.metric): row.value for row in finetuning.rows({"bf16": bf16, "coat": coat}, "tiny")}
    assert table["coat", "training: % above bf16"] == pytest.approx(0, abs=1e-9)
    assert table["coat", "training: spread"] == pytest.approx(2)
    assert table["coat", "validation: % above bf16"] == 0
    assert table["bf16", "training loss of answers"] == pytest.approx(3.075)
    assert table["before", "training loss of answers"] == 5.0
    assert table["coat", "seeds"] == 2
