"""Runs with a NaN batch end with the bits of runs without that batch, also after an interruption."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

import fp8jax
from experiments.train import checkpoint, cli, report, task
from tests.experiments.test_resuming import final_state

MARK = 251  # a byte that the corpus does not have
RECIPE = dataclasses.replace(fp8jax.recipes.te_delayed(), name="both", optimizer=fp8jax.recipes.coat().optimizer)


class Batches:
    """An iterator that marks or omits batches by their number, from 0."""

    def __init__(self, batches, bad, omitted):
        self.batches, self.bad, self.omitted = batches, bad, omitted

    def __next__(self):
        while (number := self.batches.get_state()["next_index"]) in self.omitted:
            next(self.batches)
        tokens = next(self.batches)
        if number in self.bad:
            tokens[0, 0] = MARK
        return tokens

    def get_state(self):
        return self.batches.get_state()

    def set_state(self, state):
        self.batches.set_state(state)


def mark_batches(patch, bad, omitted=()):
    """Gives batches with some numbers, from 0, a NaN loss by their first row, and omits others."""
    make, entropy = cli.data.train_batches, task.cross_entropy

    def marked_entropy(model, tokens, *args, **options):
        is_marked = jnp.any(tokens[:, 0] == MARK)
        return entropy(model, tokens, *args, **options) * jnp.where(is_marked, jnp.nan, 1)

    patch.setattr(task, "cross_entropy", marked_entropy)
    patch.setattr(cli.data, "train_batches", lambda *args: Batches(make(*args), bad, omitted))


@pytest.fixture
def train(argv, out, monkeypatch):
    """Trains a run and returns the digests of its last state. Marked batches have a NaN loss."""

    def run(name, *flags, bad=(), omitted=(), break_at=None):
        with monkeypatch.context() as patch:
            mark_batches(patch, bad, omitted)
            step = report.RunLog.step

            def breaking(self, number, *args, **values):
                step(self, number, *args, **values)
                if number == break_at:
                    raise KeyboardInterrupt

            patch.setattr(report.RunLog, "step", breaking)
            try:
                assert cli.main([*argv, "--recipe", "both", "--run", name, *flags], recipe=lambda _: RECIPE) == 0
            except KeyboardInterrupt:
                return None
        rows = report.read_metrics(out / name / "both" / "metrics.jsonl")
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
        digests = final_state(out / name / "both", 8)
        return {leaf: x["sha256"] for leaf, x in digests.items()}, [
            row.get("bad_steps") for row in rows if "loss" in row
        ]

    return run


# Steps 4 and 8 have checkpoints. Rewinding from the seventh batch also drops the two before it.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "bad", "omitted", "counts"),
    [("skip", {5}, {5}, [0, 0, 0, 0, 0, 1, 1, 1]), ("rewind", {6}, {4, 5, 6}, [0, 0, 0, 0, 1, 1, 1, 1])],
)
def test_a_run_with_a_bad_batch_ends_as_one_without_it_and_so_does_a_resumed_one(
    train, capsys, policy, bad, omitted, counts
):
    flags = ["--on-bad-step", policy]
    expected, _ = train(f"{policy}_omitted", *flags, omitted=omitted)
    actual, bad_steps = train(f"{policy}_bad", *flags, bad=bad)
    assert bad_steps == counts
    what = "skipped (1 in a row, of at most 10)" if policy == "skip" else "back to step 4, and on with the next batch"
    number = 6 if policy == "skip" else 7
    assert re.search(
        rf"step {number}: loss nan, gradient norm nan; not finite: {re.escape(what)}", capsys.readouterr().out
    )
    assert {leaf for leaf in expected if expected[leaf] != actual[leaf]} == {"monitor.total"}
    for place in (5, 7):
        assert train(f"{policy}_broken_{place}", *flags, bad=bad, break_at=place) is None
        assert train(f"{policy}_broken_{place}", *flags, bad=bad) == (actual, counts)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_another_policy_from_a_checkpoint_without_counts(train, capsys, monkeypatch):
    """Checkpoints of older versions have no monitor: it starts with zeros."""
    with monkeypatch.context() as patch:
        flatten = checkpoint.flatten
        patch.setattr(
            checkpoint,
            "flatten",
            lambda tree: {k: x for k, x in flatten(tree).items() if not k.startswith("monitor.")},
        )
        with pytest.raises(AssertionError):
            train("stopped", bad={5})
    assert "step 6: loss nan, gradient norm nan; not finite, so nothing of it was applied" in capsys.readouterr().err
    _, counts = train("stopped", "--on-bad-step", "skip", bad={5})
    assert counts[-3:] == [1, 1, 1]
    assert "resuming from step 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-bad-steps", "0"], "--max-bad-steps must be at least 1, got 0"),
        (["--max-loss-jump", "-1"], "--max-loss-jump must be finite and not negative, got -1.0"),
        (["--on-bad-step", "skip", "--release", "twice"], "Use --on-bad-step rewind or stop"),
    ],
)
def test_settings_that_cannot_be_are_refused(argv, capsys, flags, message):
    assert cli.main([*argv, *flags]) == 2
    assert message in capsys.readouterr().err
