"""The training step and the loop around it.

A step that meets a loss or gradient that is not finite changes nothing and clears `healthy` in the state; steps that
were already dispatched behind it then change nothing either. So the loop may look at a step's metrics one step late.
"""

import dataclasses
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fp8jax
from experiments.checkpoint import Checkpoints
from experiments.config import Optim, Run
from experiments.models.llama import Llama, LlamaConfig
from experiments.report import RunLog


class TrainState(NamedTuple):
    """Everything that a step reads and writes, and a checkpoint holds.

    step: int32, updates applied. params: nested dict in the master format. opt_state: the optimizer's. rng: uint32
    data of a key, from which text is sampled. healthy: bool, False once a loss or gradient was not finite.
    """

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    rng: jax.Array
    healthy: jax.Array


class NotFinite(Exception):
    """A loss or gradient was NaN or infinite. The message names the step and what to try."""


class Stopped(Exception):
    """The user asked to stop. `signum` is the signal, `step` the step that is saved, if training had begun."""

    def __init__(self, signum: int, step: int | None = None) -> None:
        super().__init__(signum, step)
        self.signum, self.step = signum, step


class StopSignals:
    """Context manager that turns the first SIGINT or SIGTERM into a flag; a second one ends the program at once."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __enter__(self) -> "StopSignals":
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def check(self) -> None:
        """Raises Stopped where a signal has come."""
        if self.signum is not None:
            raise Stopped(self.signum)

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.signum = signum
        for s in self._before:
            signal.signal(s, signal.SIG_DFL)


@dataclasses.dataclass(frozen=True)
class Task:
    """One recipe's program: the model's structure and the optimizer, no arrays.

    Attributes:
        graphdef: of the Llama, quantized as the recipe says; `nnx.merge(graphdef, params)` is the model.
        tx: the optimizer, clipping included.
        llama: the shape.
        recipe: what everything is stored and computed in.
        seed: of the initial parameters.
    """

    graphdef: nnx.GraphDef[Llama]
    tx: optax.GradientTransformationExtraArgs
    llama: LlamaConfig
    recipe: fp8jax.Recipe
    remat: bool
    seed: int

    @classmethod
    def build(
        cls,
        llama: LlamaConfig,
        tx: optax.GradientTransformationExtraArgs,
        recipe: fp8jax.Recipe,
        *,
        remat: bool,
        seed: int,
    ) -> "Task":
        """Traces the model's structure; no parameter is made."""
        model = nnx.eval_shape(lambda: _plain(llama, recipe, remat, nnx.Rngs(seed)))
        if recipe.linear.quantized:
            model = fp8jax.nnx.quantize(model, recipe)
        return cls(nnx.split(model, nnx.Param)[0], tx, llama, recipe, remat, seed)

    def init(self) -> TrainState:
        """The state before the first step, the same for every recipe; under `jax.eval_shape`, its shapes."""
        key = jax.random.key(self.seed)
        model = _plain(self.llama, self.recipe, self.remat, nnx.Rngs(key))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return TrainState(
            step=jnp.zeros([], jnp.int32),
            params=params,
            opt_state=self.tx.init(params),
            rng=jax.random.key_data(jax.random.fold_in(key, 1)),
            healthy=jnp.array(True),
        )

    def loss(self, params: Any, tokens_BxT: jax.Array) -> jax.Array:
        """Mean cross-entropy of each next token, float32; tokens (B, T + 1)."""
        logits_BxTxV = nnx.merge(self.graphdef, params)(tokens_BxT[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxT[:, 1:]).mean()

    def step(self, state: TrainState, tokens_BxT: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update, or none from the first loss or gradient on that is not finite."""
        loss, grads = jax.value_and_grad(self.loss)(state.params, tokens_BxT)
        grad_norm = optax.tree.norm(grads)
        healthy = state.healthy & jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        def update() -> tuple[Any, optax.OptState]:
            updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
            return optax.apply_updates(state.params, updates), opt_state

        params, opt_state = jax.lax.cond(healthy, update, lambda: (state.params, state.opt_state))
        step = state.step + healthy.astype(jnp.int32)
        metrics = {"loss": loss, "grad_norm": grad_norm, "healthy": healthy}
        return TrainState(step, params, opt_state, state.rng, healthy), metrics


def _plain(llama: LlamaConfig, recipe: fp8jax.Recipe, remat: bool, rngs: nnx.Rngs) -> Llama:
    dtypes = {role: fp8jax.formats.get(getattr(recipe.weights, role)).dtype for role in ("compute", "master")}
    return Llama(llama, dtype=dtypes["compute"], param_dtype=dtypes["master"], remat=remat, rngs=rngs)


def schedule(optim: Optim) -> optax.Schedule:
    """Linear warm-up, then cosine decay that reaches `final_lr` of the peak at the last step."""
    return optax.warmup_cosine_decay_schedule(
        0.0 if optim.warmup else optim.lr, optim.lr, optim.warmup, optim.steps, optim.lr * optim.final_lr
    )


def decay_mask(params: Any) -> Any:
    """True for leaves that weight decay applies to: two or more dimensions and no norm (stacked norms have two)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.ndim >= 2 and "norm" not in jax.tree_util.keystr(path), params
    )


def evaluate(
    loss: Callable[[Any, jax.Array], jax.Array], params: Any, batches: np.ndarray, stop: StopSignals
) -> float | None:
    """Mean loss over fixed batches (count, rows, T + 1) of equal size; None where a signal came before the end."""
    losses = []
    for tokens_BxT in batches:
        if stop.signum is not None:
            return None
        losses.append(float(loss(params, tokens_BxT)))
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
        step, loss: compiled `Task.step` (its first argument donated) and `Task.loss`.
        batches: iterator of int32 (B, T + 1) with a `get_state()` that is JSON.
        valid: validation batches (count, rows, T + 1).
        config: what a checkpoint records and compares.
    """

    step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    loss: Callable[[Any, jax.Array], jax.Array]
    batches: Any
    valid: np.ndarray
    optim: Optim
    settings: Run
    checkpoints: Checkpoints
    config: dict[str, Any]
    log: RunLog
    stop: StopSignals

    def run(self, state: TrainState) -> TrainState:
        """Trains from `state.step` to `optim.steps`, logging, validating and saving on the way.

        Raises:
            NotFinite: a loss or gradient was not finite; nothing of it was applied.
            Stopped: a signal came; the last finished step is saved.
        """
        done = saved = int(state.step)
        behind: _Dispatched | None = None
        clock = time.perf_counter()
        while True:
            last = done == self.optim.steps
            save_due = done != saved and (last or done % self.settings.checkpoint_every == 0)
            # After a resume too: the process may have been killed between the checkpoint and its validation.
            eval_due = (last or (done > 0 and done % self.settings.eval_every == 0)) and not self.log.has_valid(done)
            if save_due or eval_due or self.stop.signum is not None:
                self._settle(behind, clock)
                behind = None
                if done != saved and (save_due or self.stop.signum is not None):
                    self.checkpoints.save(done, state, loader=self.batches.get_state(), config=self.config)
                    saved = done
                if eval_due:
                    loss = evaluate(self.loss, state.params, self.valid, self.stop)
                    if loss is not None:
                        self.log.valid(done, loss)
                if self.stop.signum is None:
                    clock = time.perf_counter()
                elif done == saved:
                    raise Stopped(self.stop.signum, done)
                else:
                    continue
            if last:
                return state
            tokens_BxT = next(self.batches)
            state, metrics = self.step(state, tokens_BxT)
            done += 1
            # Only now is the step before this one waited for, so that the device always has work.
            clock = self._settle(behind, clock)
            behind = _Dispatched(done, tokens_BxT.size - len(tokens_BxT), metrics)

    def _settle(self, behind: _Dispatched | None, clock: float) -> float:
        """Waits for a dispatched step and logs it; from the time it began to the time it was done."""
        if behind is None:
            return clock
        values = {name: value.item() for name, value in behind.metrics.items()}
        if not values["healthy"]:
            newest = self.checkpoints.latest()
            saved = "no checkpoint yet" if newest is None else f"newest checkpoint: step {newest}"
            raise NotFinite(
                f"step {behind.number}: loss {values['loss']}, gradient norm {values['grad_norm']}; not finite, so "
                f"nothing of it was applied ({saved}). Try a lower --lr, a longer --warmup or a smaller --clip, "
                "with --resume never or a new --run"
            )
        now = time.perf_counter()
        rate = float(schedule(self.optim)(behind.number - 1))
        speed = behind.tokens / (now - clock)
        self.log.step(behind.number, values["loss"], grad_norm=values["grad_norm"], lr=rate, tokens_per_s=speed)
        return now
