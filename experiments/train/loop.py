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


class NotFinite(Exception):
    """A loss or gradient was NaN or infinite. The message names the step and what to try."""


def evaluate(
    loss: Callable[[Any, Any, jax.Array], jax.Array],
    state: TrainState,
    batches: np.ndarray,
    stop: StopSignals,
    rows: jax.sharding.NamedSharding | None = None,
) -> float | None:
    """Mean loss over fixed batches (count, B, T + 1) of equal size; None where a signal came before the end."""
    losses = []
    for tokens_BxT in batches:
        if stop.signum is not None:
            return None
        losses.append(float(loss(state.params, state.model_state, mesh.place(tokens_BxT, rows))))
    return float(np.mean(losses))


class _Dispatched(NamedTuple):
    """A step that was sent to the device and not yet looked at."""

    number: int
    tokens: int
    metrics: dict[str, jax.Array]


@dataclasses.dataclass
class Loop:
    """Trains one recipe from some state to the last step.

    Attributes:
        step, loss: compiled `Task.step` (its first argument donated) and `Task.loss`. Of several processes the step
            takes `hosts.signals` besides and gives their maximum among its metrics, as "signal".
        batches: iterator of int32 (B, T + 1), or packed (B, 3, T + 1), with a `get_state()` that is JSON.
        valid: validation batches (count, rows, T + 1), or packed.
        config: what a checkpoint records and compares.
        rows: how batches lie on several devices, or None.
        trace: of some steps.
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

    def __post_init__(self) -> None:
        self._told = 0

    def run(self, state: TrainState) -> TrainState:
        """Trains from `state.step` to `optim.steps`, logging, validating and saving on the way.

        Raises:
            NotFinite: a loss or gradient was not finite; nothing of it was applied.
            Stopped: a signal came, to any of several processes; the last finished step is saved.
        """
        done = saved = first = int(state.step)
        behind: _Dispatched | None = None
        clock = time.perf_counter()
        while True:
            last = done == self.optim.steps
            save_due = last or done % self.settings.checkpoint_every == 0
            # After a resume too: the process may have been killed between the checkpoint and its validation.
            eval_due = (last or (done > 0 and done % self.settings.eval_every == 0)) and not self.log.has_valid(done)
            if save_due or eval_due or self._signum is not None:
                self._settle(behind, clock)
                behind = None
                if done != saved and (save_due or self._signum is not None):
                    loader, recent = self.batches.get_state(), self.log.recent(done)
                    self.checkpoints.save(done, state, loader=loader, config=self.config, log=recent)
                    saved = done
                if eval_due:
                    # Several processes validate to the end: they learn of a signal from a step.
                    stop = StopSignals() if hosts.several() else self.stop
                    loss = evaluate(self.loss, state, self.valid, stop, self.rows)
                    if loss is not None:
                        self.log.valid(done, loss)
                if self._signum is None:
                    clock = time.perf_counter()
                elif done == saved:
                    raise Stopped(self._signum, done)
                else:
                    continue
            if last:
                return state
            self.trace.before(done - first, state)
            tokens_BxT = next(self.batches)
            state, metrics = self.step(state, mesh.place(tokens_BxT, self.rows), *self._noted())
            done += 1
            # Only now is the step before this one waited for, so that the device always has work.
            clock = self._settle(behind, clock)
            behind = _Dispatched(done, len(tokens_BxT) * (tokens_BxT.shape[-1] - 1), metrics)

    @property
    def _signum(self) -> int | None:
        """The signal to stop for, if any: of several processes one that all have learnt of, by the same step."""
        return self._told or None if hosts.several() else self.stop.signum

    def _noted(self) -> tuple[jax.Array, ...]:
        if not hosts.several():
            return ()
        assert self.rows is not None  # several processes have several devices
        return (hosts.signals(self.rows.mesh, self.stop.signum),)

    def _settle(self, behind: _Dispatched | None, clock: float) -> float:
        """Waits for a dispatched step and logs it; from the time it began to the time it was done."""
        if behind is None:
            return clock
        values = {name: value.item() for name, value in behind.metrics.items()}
        self._told = values.get("signal", 0)
        if not values["healthy"]:
            newest = self.checkpoints.latest()
            saved = "no checkpoint yet" if newest is None else f"newest checkpoint: step {newest}"
            room = self.settings.expert_capacity
            more = (
                f", or more --expert-capacity, if a device gets over {room:g} times its rows" if room else ""
            )
            raise NotFinite(
                f"step {behind.number}: loss {values['loss']}, gradient norm {values['grad_norm']}; not finite"
                f"{', and applied as --release does' if self.optim.release else ', so nothing of it was applied'} "
                f"({saved}). Try a lower --lr, a longer --warmup or a smaller --clip{more}, "
                "with --resume never or a new --run"
            )
        now = time.perf_counter()
        rate = float(schedule(self.optim)(behind.number - 1))
        speed = behind.tokens / (now - clock)
        names = ("grad_norm", "saturated", "balance_loss", "z_loss")
        seen = {name: values[name] for name in names if name in values}
        self.log.step(behind.number, values["loss"], lr=rate, tokens_per_s=speed, **seen)
        return now
