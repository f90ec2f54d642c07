"""The loop with a fake device: a clock, steps that take two seconds, logs and checkpoints."""

import dataclasses
import math
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from experiments.train import config, loop, report
from experiments.train.task import Task, TrainState
from fp8jax.optim.bad_steps import LOSS_WINDOW, init_monitor
from fp8jax.optim.fused import FusedTransformation


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


class Value:
    """A number on the device. Reading it waits for the step that computes it."""

    def __init__(self, value, clock=None):
        self.value, self.clock = value, clock

    def item(self):
        if self.clock:
            self.clock.now += 2.0
            self.clock = None
        return self.value


def made_state(step, bad_steps):
    monitor = init_monitor()._replace(total=jnp.int32(bad_steps))
    return TrainState(jnp.int32(step), jnp.int32(step), None, None, None, None, monitor=monitor)


class Fake:
    """Fakes of everything that the loop calls; `happened` lists the calls in order."""

    def __init__(self, *, bad_at=None, bad_batches=(), signal_at=None, valid_before=(), **settings):
        self.clock, self.happened, self.taken = Clock(), [], 0
        self.bad_at, self.bad_batches, self.signal_at = bad_at, bad_batches, signal_at
        self.is_skipping, self.is_broken, self.consecutive = settings.get("on_bad_step") == "skip", False, 0
        self.stop = SimpleNamespace(signum=None)
        self.saved = []
        self.validated = set(valid_before)
        optim = config.Optim(steps=settings.pop("steps", 7), warmup=3, lr=0.5, final_lr=0.2)
        self.loop = loop.Loop(
            self.step, self.loss, self, np.zeros((2, 3, 6), np.int32), optim, config.Run(**settings), self, {}, self,
            self.stop,
        )  # fmt: skip

    # The batches: three rows of five tokens and one more.
    def __next__(self):
        self.taken += 1
        return np.zeros((3, 6), np.int32)

    def get_state(self):
        return {"taken": self.taken}

    def set_state(self, state):
        self.taken = state["taken"]

    # The device.
    def step(self, state, tokens, *noted):
        number = int(state.step) + 1
        if number == self.signal_at:
            self.stop.signum = signal.SIGINT
        is_good = self.taken not in self.bad_batches and not self.is_broken
        self.is_broken = not is_good and not self.is_skipping
        total, self.consecutive = int(state.monitor.total) + (not is_good), 0 if is_good else self.consecutive + 1
        metrics = {
            "loss": Value(10.0 + number, self.clock),
            "grad_norm": Value(20.0 + number if number != self.bad_at and is_good else np.inf),
            "healthy": Value(number != self.bad_at and is_good),
            "bad_steps": Value(total),
            "consecutive_bad_steps": Value(self.consecutive),
        } | dict(zip(["signal"], map(Value, noted), strict=False))
        number -= not is_good
        return made_state(number, total), metrics

    def loss(self, params, model_state, tokens):
        self.clock.now += 50.0
        self.happened.append(("score", params))
        return np.float32(params)

    # The checkpoints.
    def latest(self):
        return self.saved[-1] if self.saved else None

    def save(self, step, state, *, loader, config, log):
        self.clock.now += 100.0
        assert (int(state.step), log) == (step, f"recent {step}")
        assert loader == {"taken": self.taken}
        assert self.bad_batches or self.taken == step
        self.saved.append(step)
        self.happened.append(("save", step))

    def resume(self, abstract, config, tell):
        self.is_broken = False
        self.happened.append(("resume", self.saved[-1]))
        return made_state(self.saved[-1], 0), {"step": self.saved[-1]}

    # The log.
    def rewind(self, step):
        self.happened.append(("rewind", step))

    def say(self, text):
        self.happened.append(("say", text))

    def log_step(self, step, loss, **rest):
        self.happened.append(("step", step, loss, rest))

    def recent(self, step):
        return f"recent {step}"

    def valid(self, step, loss):
        assert loss == step
        self.happened.append(("valid", step))

    def has_valid(self, step):
        return step in self.validated

    def run(self, monkeypatch, start=0):
        monkeypatch.setattr(loop, "time", self.clock)
        self.taken = start
        # The log's `step` and the device's have the same name.
        self.loop.log = SimpleNamespace(
            step=self.log_step, recent=self.recent, valid=self.valid, has_valid=self.has_valid, rewind=self.rewind,
            say=self.say,
        )  # fmt: skip
        return self.loop.run(made_state(start, 0))

    def of(self, kind):
        return [what[1] for what in self.happened if what[0] == kind]


def test_every_step_is_logged_with_its_rate_and_the_time_that_it_alone_took(monkeypatch):
    fake = Fake(checkpoint_every=3, eval_every=2)
    assert fake.run(monkeypatch).step == 7
    rows = [what for what in fake.happened if what[0] == "step"]
    assert [row[1] for row in rows] == list(range(1, 8))
    assert [row[2] for row in rows] == [11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    for _, step, _, rest in rows:
        # Linear over 3 steps to 0.5, then a cosine over the other 4 to 0.1; the first update has count 0.
        count = step - 1
        cosine = 0.1 + 0.4 * (1 + math.cos(math.pi * (count - 3) / 4)) / 2
        assert rest["lr"] == pytest.approx(0.5 * count / 3 if count < 3 else cosine, rel=1e-5)
        assert rest["grad_norm"] == 20.0 + step
        # Fifteen tokens in two seconds, without the time of checkpoints and validations.
        assert rest["tokens_per_s"] == pytest.approx(7.5)


def test_saves_and_validates_every_so_often_and_at_the_end(monkeypatch):
    fake = Fake(checkpoint_every=3, eval_every=2)
    fake.run(monkeypatch)
    assert fake.of("save") == [3, 6, 7]
    assert fake.of("valid") == [2, 4, 6, 7]
    assert fake.of("score") == [2, 2, 4, 4, 6, 6, 7, 7]  # two batches each
    # A checkpoint has no step that is not in the log.
    assert fake.happened.index(("save", 3)) > [what[:2] for what in fake.happened].index(("step", 3))


def test_goes_on_after_a_resume_and_makes_up_for_a_validation_that_was_lost(monkeypatch):
    fake, traced = Fake(checkpoint_every=3, eval_every=2), []
    fake.loop.trace = SimpleNamespace(before=lambda number, state: traced.append(number))
    fake.run(monkeypatch, start=6)
    assert traced == [0]  # of this process
    assert (fake.of("step"), fake.of("save"), fake.of("valid")) == ([7], [7], [6, 7])
    fake = Fake(checkpoint_every=3, eval_every=2, valid_before=[6, 7])
    fake.run(monkeypatch, start=7)
    assert fake.happened == []


def test_stops_at_what_is_not_finite_and_names_the_newest_checkpoint(monkeypatch):
    for release, applied in (("", "so nothing of it was applied"), ("twice", "and applied as --release does")):
        fake = Fake(checkpoint_every=3, eval_every=9, bad_at=5)
        fake.loop.optim = dataclasses.replace(fake.loop.optim, release=release)
        message = rf"step 5: loss 15.0, gradient norm inf; not finite, {applied} \(newest checkpoint: step 3\)"
        with pytest.raises(loop.BadStep, match=message):
            fake.run(monkeypatch)
        assert (fake.of("step"), fake.of("save")) == ([1, 2, 3, 4], [3])
    with pytest.raises(loop.BadStep, match="no checkpoint yet"):
        Fake(bad_at=1).run(monkeypatch)


def test_bad_batches_are_skipped_and_the_steps_that_they_were_for_get_the_next_ones(monkeypatch):
    """Batches 3, 4 and 8 are bad. The next batch is already dispatched when a step is read."""
    fake = Fake(on_bad_step="skip", max_bad_steps=2, checkpoint_every=3, eval_every=9, bad_batches={3, 4, 8})
    assert int(fake.run(monkeypatch).step) == 7
    rows = [x for x in fake.happened if x[0] == "step"]
    assert [row[1] for row in rows] == list(range(1, 8))
    assert all(row[3]["tokens_per_s"] == pytest.approx(7.5) for row in rows)
    assert [row[3]["bad_steps"] for row in rows] == [0, 0, 2, 2, 2, 3, 3]
    assert (fake.taken, fake.of("save")) == (10, [3, 6, 7])
    assert [x.partition(":")[0] for x in fake.of("say")] == ["step 3", "step 3", "step 6"]
    assert "not finite: skipped (2 in a row, of at most 2)" in fake.of("say")[1]
    fake = Fake(on_bad_step="skip", max_bad_steps=1, checkpoint_every=9, eval_every=9, bad_batches={3, 4, 8})
    with pytest.raises(loop.BadStep, match=r"step 3: .*not finite.*\(no checkpoint yet, bad step 2 of at most 1\)"):
        fake.run(monkeypatch)


def test_a_bad_batch_sets_training_back_to_the_newest_checkpoint_and_on_with_the_batch_after_it(monkeypatch):
    fake = Fake(on_bad_step="rewind", max_bad_steps=2, checkpoint_every=3, eval_every=9, bad_batches={2, 7})
    assert int(fake.run(monkeypatch).step) == 7
    assert fake.of("save") == [0, 3, 6, 7]
    assert (fake.of("resume"), fake.of("rewind")) == ([0, 3], [0, 3])
    # Batch 3 is for the first step again, and batch 8 for the fourth one.
    assert fake.of("step") == [1, 1, 2, 3, 4, 4, 5, 6, 7]
    assert fake.taken == 11
    assert "back to step 3, and on with the next batch (2 of at most 2 in all)" in fake.of("say")[1]
    fake = Fake(on_bad_step="rewind", max_bad_steps=1, checkpoint_every=3, eval_every=9, bad_batches={2, 7})
    with pytest.raises(loop.BadStep, match=r"newest checkpoint: step 3, bad step 2 of at most 1"):
        fake.run(monkeypatch)


def test_a_loss_that_jumps_is_named_with_its_limit(monkeypatch):
    reasons = ((5.5, "a jump, above 5.5000: 6 spreads over the median"), (99.0, "a scaling state is not finite"))
    for limit, reason in reasons:
        fake = Fake(max_loss_jump=6.0, bad_at=2)
        step, more = fake.loop.step, {"grad_norm": Value(1.0), "loss_limit": Value(limit)}
        fake.loop.step = lambda *args, step=step, more=more: (lambda s, m: (s, m | more))(*step(*args))
        with pytest.raises(loop.BadStep, match=rf"step 2: loss 12.0, .*; {reason}"):
            fake.run(monkeypatch)


def test_a_signal_saves_the_step_that_is_done(monkeypatch):
    fake = Fake(checkpoint_every=100, eval_every=100, signal_at=4)
    with pytest.raises(loop.Stopped) as caught:
        fake.run(monkeypatch)
    assert (caught.value.signum, caught.value.step) == (signal.SIGINT, 4)
    assert (fake.of("step"), fake.of("save"), fake.of("valid")) == ([1, 2, 3, 4], [4], [])


def test_of_several_processes_all_stop_by_a_step_that_has_told_them_and_validate_to_the_end(monkeypatch):
    """The signal in step 4 is an input of step 5, which is read while step 6 runs."""
    fake = Fake(checkpoint_every=100, eval_every=4, signal_at=4)
    monkeypatch.setattr(loop.hosts, "several", lambda: True)
    monkeypatch.setattr(loop.hosts, "signals", lambda mesh, signum: signum or 0)
    monkeypatch.setattr(loop.mesh, "place", lambda tokens, rows: tokens)
    fake.loop.rows = SimpleNamespace(mesh=None)
    with pytest.raises(loop.Stopped) as caught:
        fake.run(monkeypatch)
    assert (caught.value.signum, caught.value.step) == (signal.SIGINT, 6)
    assert (fake.of("step"), fake.of("save"), fake.of("valid")) == ([*range(1, 7)], [6], [4])


def test_the_first_signal_is_noted_and_the_second_one_ends_the_program():
    both = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(s) for s in both]
    with loop.StopSignals() as stop:
        stop.check()
        signal.raise_signal(signal.SIGINT)
        assert [signal.getsignal(s) for s in both] == [signal.SIG_DFL] * 2
        with pytest.raises(loop.Stopped) as caught:
            stop.check()
    assert (caught.value.signum, caught.value.step) == (signal.SIGINT, None)
    assert [signal.getsignal(s) for s in both] == before


def test_validation_is_the_mean_over_all_batches_with_the_models_state():
    state = SimpleNamespace(params=2.0, model_state=1.0)
    batches = np.arange(3).reshape(3, 1, 1)
    stop = SimpleNamespace(signum=None)
    assert loop.evaluate(lambda p, s, t: p * t[0, 0] ** 2 + s, state, batches, stop) == pytest.approx(2 * 5 / 3 + 1)
    stop.signum = signal.SIGTERM
    assert loop.evaluate(lambda p, s, t: 1.0, state, batches, stop) is None


@pytest.mark.parametrize(
    ("loss", "grad", "before", "healthy"),
    [
        (1.0, 1.0, True, True),
        (np.nan, 1.0, True, False),
        (1.0, np.inf, True, False),
        (1.0, np.nan, True, False),
        (1.0, 1.0, False, False),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_is_healthy_if_loss_gradient_and_all_steps_before_are(monkeypatch, loss, grad, before, healthy, fused):
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([[12.0 * grad]])}
    monkeypatch.setattr(Task, "gradients", lambda *_: ({"loss": jnp.float32(loss)}, grads, {"seen": jnp.array(1)}))
    sgd = optax.with_extra_args_support(optax.sgd(1.0))
    if fused:

        def step(grads, state, params, apply_if):
            return jax.tree.map(lambda p, g: jnp.where(apply_if, p - g, p), params, grads), state

        sgd = FusedTransformation(sgd.init, None, step)
    task = Task(None, sgd, fp8jax.recipes.bf16(), remat=False, seed=0)
    params = jax.tree.map(jnp.zeros_like, grads)
    opt_state = task.tx.init(params)
    monitor = init_monitor()
    state = TrainState(
        jnp.int32(4), params, {"seen": jnp.array(0)}, opt_state, jnp.zeros(2), jnp.array(before), monitor=monitor
    )
    after, metrics = task.step(state, None)
    assert bool(metrics["healthy"]) == bool(after.healthy) == healthy
    assert int(after.step) == 4 + healthy
    assert int(after.model_state["seen"]) == healthy
    for x, g in zip(*map(jax.tree.leaves, (after.params, grads)), strict=True):
        np.testing.assert_array_equal(x, -g if healthy else 0 * x)
    if np.isfinite(grad):
        np.testing.assert_allclose(metrics["grad_norm"], 13.0, rtol=1e-6)


@pytest.mark.parametrize("recorded", [0.5, np.nan])
def test_a_skipped_step_leaves_the_state_and_the_next_one_is_taken(monkeypatch, recorded):
    """Only a statistic of the step is not finite, or everything is."""
    grads, sgd = {"a": jnp.array([3.0, 4.0])}, optax.with_extra_args_support(optax.sgd(1.0))
    monkeypatch.setattr(
        Task, "gradients", lambda *_: ({"loss": jnp.float32(1)}, grads, {"seen": jnp.float32(recorded)})
    )
    task = Task(None, sgd, fp8jax.recipes.bf16(), remat=False, seed=0, on_bad_step="skip", max_loss_jump=6.0)
    params, model_state, healthy = {"a": jnp.zeros(2)}, {"seen": jnp.float32(0)}, jnp.array(True)
    # One loss short of a limit: the loss of this step is not compared with itself.
    monitor = init_monitor()._replace(losses=jnp.full(LOSS_WINDOW, 2.0), loss_count=jnp.int32(LOSS_WINDOW // 2 - 1))
    state = TrainState(jnp.int32(4), params, model_state, sgd.init(params), jnp.zeros(2), healthy, monitor=monitor)
    after, metrics = task.step(state, None)
    is_good = np.isfinite(recorded)
    assert bool(metrics["healthy"]) == is_good
    assert bool(after.healthy)
    assert (int(metrics["bad_steps"]), int(metrics["consecutive_bad_steps"])) == (not is_good, not is_good)
    assert (int(after.step), float(after.params["a"][0])) == ((5, -3) if is_good else (4, 0))
    assert float(after.model_state["seen"]) == (0.5 if is_good else 0)
    assert float(after.monitor.losses[LOSS_WINDOW // 2 - 1]) == (1 if is_good else 2)
    assert np.isinf(metrics["loss_limit"])


def test_results_are_of_the_last_steps(tmp_path):
    console = report.make_console()
    with report.RunLog(tmp_path, console, recipe="r", resumed=0, steps=80, every=20) as log:
        for step in range(1, 81):
            speed = 1.0 if step <= 30 else 100.0 + step
            log.step(step, float(step), grad_norm=1.0, lr=0.1, tokens_per_s=speed)
        log.valid(80, 3.5)
        result = log.result(7, {"mu": 1, "nu": 2, "other": 3}, "text")
    assert (result.recipe, result.steps, result.parameters, result.text) == ("r", 80, 7, "text")
    assert result.train_loss == np.mean(range(73, 81))  # a tenth of the steps
    assert result.tokens_per_s == 100 + np.median(range(31, 81))
    assert (result.valid_loss, result.state_bytes) == (3.5, {"mu": 1, "nu": 2, "other": 3})


def test_lines_of_progress_show_means_of_the_steps_since_the_last(tmp_path, capsys):
    with report.RunLog(tmp_path, report.make_console(), recipe="r", resumed=0, steps=5, every=2) as log:
        for step in range(1, 6):
            log.step(step, 2.0**step, grad_norm=step / 4, lr=step / 8, tokens_per_s=10.0 * step)
        log.valid(5, 1.25)
    assert capsys.readouterr().out.replace(" left 0:00", "").splitlines() == [
        "step 2/5 mean_loss 3.000 tokens/s 15 lr 2.50e-01 grad_norm 0.50 recipe r",
        "step 4/5 mean_loss 12.000 tokens/s 35 lr 5.00e-01 grad_norm 1.00 recipe r",
        "step 5/5 mean_loss 24.000 tokens/s 45 lr 6.25e-01 grad_norm 1.25 recipe r",
        "valid 5/5 loss 1.2500 recipe r",
    ]


def test_saturated_elements_are_logged_at_every_step_and_counted_in_lines_of_progress(tmp_path, capsys, monkeypatch):
    fake = Fake(steps=4, checkpoint_every=9, eval_every=9)
    step = fake.loop.step
    fake.loop.step = lambda *args: (lambda state, metrics: (state, metrics | {"saturated": Value(3.0)}))(*step(*args))
    fake.run(monkeypatch)
    rows = [x[3] for x in fake.happened if x[0] == "step"]
    assert [row["saturated"] for row in rows] == [3.0] * 4
    with report.RunLog(tmp_path, report.make_console(), recipe="r", resumed=0, steps=4, every=2) as log:
        for number, row in enumerate(rows, 1):
            log.step(number, 1.0, **row)
    assert ["grad_norm 22.00 saturated 6 left" in line for line in capsys.readouterr().out.splitlines()] == [
        True,
        False,
    ]
    assert [row["saturated"] for row in report.read_metrics(tmp_path / "metrics.jsonl")] == [3.0] * 4
