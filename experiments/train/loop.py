"""The loop around the training step: logging, validation, checkpoints, signals."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import mesh
from experiments.signals import Stopped as Stopped
from experiments.signals import StopSignals as StopSignals
from experiments.train import hosts
from experiments.train.checkpoint import Checkpoints
from experiments.train.config import Optim, Run
from experiments.train.optimizer import schedule
from experiments.train.report import RunLog
from experiments.train.speed import Trace
from experiments.train.task import TrainState


class BadStep(Exception):
    """A loss, gradient or scale was not finite, or the loss jumped. The message names the step and possible fixes."""


def evaluate(
    loss: Callable[[Any, Any, jax.Array], jax.Array],
    state: TrainState,
    batches: np.ndarray,
    stop: StopSignals,
    rows: jax.sharding.NamedSharding | None = None,
) -> float | None:
    """Returns the mean loss over fixed batches (count, B, T + 1) of equal size, or None if a signal came before."""
    losses = []
    for tokens_BxT in batches:
        if stop.signum is not None:
            return None
        losses.append(float(loss(state.params, state.model_state, mesh.place(tokens_BxT, rows))))
    return float(np.mean(losses))


class _Dispatched(NamedTuple):
    """A dispatched step with metrics that were not read yet.

    Attributes:
        number, tokens, metrics: number, token count and metrics of the step.
        loader: state of the data iterator after its batch.
    """

    number: int
    tokens: int
    metrics: dict[str, jax.Array]
    loader: dict[str, Any]


@dataclasses.dataclass
class Loop:
    """Trains one recipe from some state to the last step.

    Attributes:
        step, loss: compiled `Task.step` (its first argument donated) and `Task.loss`. With several processes, the step
            also has the argument `hosts.signals` and returns their maximum as the metric "signal".
        batches: iterator of int32 (B, T + 1), or packed (B, 3, T + 1), with a `get_state()` that is JSON, and
            `set_state`.
        valid: validation batches (count, rows, T + 1), or packed.
        config: settings that a checkpoint stores and compares.
        rows: sharding of batches over several devices, or None.
        trace: profiler trace of some steps.
        observed_step: `step` with telemetry (`experiments.train.observed`), for each `settings.telemetry`-th step.
    """

    step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    loss: Callable[[Any, Any, jax.Array], jax.Array]
    batches: Any
    valid: np.ndarray
    optim: Optim
    settings: Run
    checkpoints: Checkpoints
    config: dict[str, Any]
    log: RunLog
    stop: StopSignals
    rows: jax.sharding.NamedSharding | None = None
    trace: Trace = dataclasses.field(default_factory=Trace)
    observed_step: Callable[..., tuple[TrainState, dict[str, Any]]] | None = None

    def __post_init__(self) -> None:
        self._told = self._done = self._saved = 0
        self._clock = 0.0

    def run(self, state: TrainState) -> TrainState:
        """Trains from `state.step` to `optim.steps`, with logs, validations and checkpoints.

        Raises:
            BadStep: a step was bad and the policy is to stop, or there were more than `settings.max_bad_steps`.
            Stopped: a process received a signal; the last finished step is saved.
        """
        self._done = self._saved = int(state.step)
        if self.settings.on_bad_step == "rewind" and self.checkpoints.latest() is None:
            self._saved = -1  # saves a checkpoint to rewind to
        pending: _Dispatched | None = None
        self._clock, calls = time.perf_counter(), 0
        while True:
            done = self._done
            is_last = done == self.optim.steps
            save_due = is_last or done % self.settings.checkpoint_every == 0
            # After a resume too: the process may have been killed between the checkpoint and its validation.
            eval_due = (is_last or (done > 0 and done % self.settings.eval_every == 0)) and not self.log.has_valid(done)
            if save_due or eval_due or self._signum is not None:
                state, _ = self._settle(pending, state)
                pending = None
                if self._done != done:
                    continue
                if done != self._saved and (save_due or self._signum is not None):
                    loader, recent = self.batches.get_state(), self.log.recent(done)
                    self.checkpoints.save(done, state, loader=loader, config=self.config, log=recent)
                    self._saved = done
                if eval_due:
                    # Several processes always finish a validation: signals are exchanged in training steps.
                    stop = StopSignals() if hosts.several() else self.stop
                    loss = evaluate(self.loss, state, self.valid, stop, self.rows)
                    if loss is not None:
                        self.log.valid(done, loss)
                if self._signum is None:
                    self._clock = time.perf_counter()
                elif done == self._saved:
                    raise Stopped(self._signum, done)
                else:
                    continue
            if is_last:
                return state
            self.trace.before(calls, state)
            tokens_BxT, calls = next(self.batches), calls + 1
            loader = self.batches.get_state()
            step = self.step
            if self.observed_step is not None and done % self.settings.telemetry == 0:
                step = self.observed_step
            state, metrics = step(state, mesh.place(tokens_BxT, self.rows), *self._telemetry_args())
            self._done += 1
            # Waits for the previous step only now, so that the device always has work.
            state, is_rewound = self._settle(pending, state)
            tokens = len(tokens_BxT) * (tokens_BxT.shape[-1] - 1)
            pending = None if is_rewound else _Dispatched(self._done, tokens, metrics, loader)

    @property
    def _signum(self) -> int | None:
        """Returns the signal to stop for, or None. With several processes: one that a step has distributed to all."""
        return self._told or None if hosts.several() else self.stop.signum

    def _telemetry_args(self) -> tuple[jax.Array, ...]:
        if not hosts.several():
            return ()
        assert self.rows is not None  # several processes imply several devices
        return (hosts.signals(self.rows.mesh, self.stop.signum),)

    def _settle(self, pending: _Dispatched | None, state: TrainState) -> tuple[TrainState, bool]:
        """Waits for a dispatched step, and logs or discards it. Returns the next state, and whether it was restored.

        The time of a step is the time between its end and the end of the previous step.
        """
        if pending is None:
            return state, False
        metrics = dict(pending.metrics)
        if (restored := metrics.pop("telemetry", None)) is not None:
            self.log.telemetry(pending.number, jax.device_get(restored))
        values = {name: value.item() for name, value in metrics.items()}
        self._told = values.get("signal", 0)
        if not values["healthy"]:
            return self._leave_out(pending, values, state)
        now = time.perf_counter()
        rate = float(schedule(self.optim)(pending.number - 1))
        speed = pending.tokens / (now - self._clock)
        names = ("grad_norm", "saturated", "balance_loss", "z_loss", "bad_steps")
        optional_metrics = {name: values[name] for name in names if name in values}
        self.log.step(pending.number, values["loss"], lr=rate, tokens_per_s=speed, **optional_metrics)
        self._clock = now
        return state, False

    def _leave_out(self, bad: _Dispatched, values: dict[str, Any], state: TrainState) -> tuple[TrainState, bool]:
        """Returns the result of `_settle` for a bad step, which is not in the state.

        "skip" uses the next batch for the same step. "rewind" uses the next batch for the step after the newest
        checkpoint (Chowdhery et al., PaLM, 2022, section 5.1).

        Raises:
            BadStep: the policy is "stop", or there are too many bad steps.
        """
        policy, max_bad_steps = self.settings.on_bad_step, self.settings.max_bad_steps
        description = (
            f"step {bad.number}: loss {values['loss']}, gradient norm {values['grad_norm']}; {self._reason(values)}"
        )
        count = values.get("consecutive_bad_steps" if policy == "skip" else "bad_steps", 0)
        if policy == "stop" or count > max_bad_steps:
            newest = self.checkpoints.latest()
            saved = "no checkpoint yet" if newest is None else f"newest checkpoint: step {newest}"
            limit = "" if policy == "stop" else f", bad step {count} of at most {max_bad_steps}"
            applied = "and applied as --release does" if self.optim.release else "so nothing of it was applied"
            raise BadStep(
                f"{description}, {applied} ({saved}{limit}). Try a lower --lr, a longer --warmup or a smaller --clip, "
                "with --resume never or a new --run; or --on-bad-step skip or rewind"
            )
        if policy == "skip":
            self._done -= 1
            self._clock = time.perf_counter()
            self.log.say(f"{description}: skipped ({count} in a row, of at most {max_bad_steps})")
            return state, False
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        jax.tree.map(lambda x: x.delete(), state)  # frees memory for the restored state
        restored = self.checkpoints.resume(abstract, self.config, self.log.say)
        assert restored is not None  # `run` saves one before the first step
        state, meta = restored
        # The checkpoint has the count before the bad step.
        total = jax.make_array_from_callback((), state.monitor.total.sharding, lambda _: np.full((), count, np.int32))
        state = state._replace(monitor=state.monitor._replace(total=total))
        self.batches.set_state(bad.loader)
        self._done = self._saved = meta["step"]
        self._clock = time.perf_counter()
        self.log.rewind(self._done)
        self.log.say(
            f"{description}: back to step {self._done}, and on with the next batch ({count} of at most {max_bad_steps} "
            "in all)"
        )
        return state, True

    def _reason(self, values: dict[str, Any]) -> str:
        """Returns the reason why a step is bad."""
        limit, jump = values.get("loss_limit", np.inf), self.settings.max_loss_jump
        if not np.isfinite([values["loss"], values["grad_norm"]]).all():
            room = self.settings.expert_capacity
            return "not finite" + (
                f", as if a device got more than --expert-capacity {room:g} times its rows" if room else ""
            )
        if values["loss"] > limit:
            return f"a jump, above {limit:.4f}: {jump:g} spreads over the median of the last losses"
        return "a scaling state is not finite"
