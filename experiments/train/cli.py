"""The command line of the training program: from settings to the results of each recipe."""

import contextlib
import dataclasses
import errno
import functools
import json
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

import fp8jax
from experiments import mesh, packages, signals, train
from experiments.errors import UserError
from experiments.files import write_json
from experiments.models import sampling
from experiments.signals import Stopped, StopSignals
from experiments.text import data, packing
from experiments.text.tokenizer import Tokenizer
from experiments.train import (
    comparison,
    folders,
    hosts,
    introduction,
    lock,
    observed,
    report,
    start,
    wandb_log,
)
from experiments.train.adapters import PEFT_NAMES, by_path, joined
from experiments.train.checkpoint import Checkpoints, digest_of, quiet
from experiments.train.config import Config, check_same, flag, flatten_fields, parse
from experiments.train.form import in_chunks, remat_policy
from experiments.train.introduction import count
from experiments.train.loop import BadStep, Loop
from experiments.train.optimizer import configure, make_optimizer
from experiments.train.result import Result, read_result
from experiments.train.speed import Trace, share_of_peak
from experiments.train.task import Task, TrainState
from fp8jax.modules.compiled import describe
from fp8jax.ops.dispatch import choice
from fp8jax.ops.dispatch.choice import record_choices, record_residuals, summary

_PROGRAM = "experiments.train"
# Settings of `Run` that must be equal in all processes, because they change programs or the order of work.
_EVERYWHERE = (
    "resume",
    "checkpoint_every",
    "keep",
    "eval_every",
    "sample_tokens",
    "mesh",
    "partition",
    "remat",
    "logits",
    "unroll",
    "telemetry",
    "on_bad_step",
    "max_bad_steps",
    "max_loss_jump",
)


def main(argv: Sequence[str] | None = None, recipe: Callable[[str], fp8jax.Recipe] = fp8jax.recipes.get) -> int:
    """Parses the command line, trains, and returns the exit code. `recipe` maps names of `--recipe` to recipes."""
    command = shlex.join(["python", "-m", _PROGRAM, *(sys.argv[1:] if argv is None else argv)])
    quiet()
    try:
        with signals.started or StopSignals() as stop:
            stop.command = ""
            config = parse(argv, train.__doc__)
            hosts.join(config.run, stop)
            stop.check()
            run(config, report.make_console(quiet=not hosts.first()), stop, recipe)
        return hosts.end(0, agreed=True)
    except Exception as error:
        explanation = _explain(error, command)
        if explanation is None and not hosts.several():
            raise
        code, message = explanation or (1, "".join(traceback.format_exception(error)).rstrip())
        agreed = isinstance(error, (hosts.Agreed, BadStep)) or (isinstance(error, Stopped) and error.step is not None)
        return hosts.end(code, agreed, message)


def _explain(error: Exception, command: str) -> tuple[int, str] | None:
    """Returns exit code and message for the user, or None for an internal error."""
    match error:
        case UserError():
            return error.exit_code, f"error: {error}"
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS):
            return 3, f"error: {error}. Make it writable, or use another --out"
        case OSError():
            return 3, f"error: {error}"
        case ModuleNotFoundError() if line := packages.explain(error, _PROGRAM):
            return 2, f"error: {line}"
        case BadStep():
            return 1, f"stopped: {error}"
        case Stopped():
            return 128 + error.signum, error.message(command)
        case jax.errors.JaxRuntimeError() if "RESOURCE_EXHAUSTED" in str(error):
            return 3, (
                f"error: the device's memory is too small ({str(error).splitlines()[0]}). Try a smaller --batch, "
                "more --microbatches, --remat blocks, or a smaller --model"
            )
        case Exception() if hosts.is_other_process_gone(error):
            process_label = f"process {jax.process_index()} of {jax.process_count()}"
            return hosts.OTHER_PROCESS_GONE, hosts.other_process_gone_message(
                process_label, str(error).splitlines()[0][:200]
            )
    return None


@dataclasses.dataclass(frozen=True)
class Session:
    """The objects that all recipes of a run share.

    Attributes:
        config: settings.
        devices: the mesh of the training devices.
        tokens, tokenizer: the text and its tokenizer.
        shared: settings and text that checkpoints of all recipes must match.
        console, details: output for users, and detailed output.
        stop: signals that stop the run.
    """

    config: Config
    devices: jax.sharding.Mesh
    tokens: data.Tokens | packing.Packed
    tokenizer: Tokenizer
    shared: dict[str, Any]
    console: Console
    details: report.Details
    stop: StopSignals

    @property
    def rows(self) -> jax.sharding.NamedSharding | None:
        """The sharding of a batch over several devices, or None."""
        return mesh.batches(self.devices) if self.devices.size > 1 else None


def run(config: Config, console: Console, stop: StopSignals, recipe: Callable[[str], fp8jax.Recipe]) -> list[Result]:
    """Trains every recipe of the configuration in turn and reports.

    Raises:
        UserError, BadStep, Stopped: their messages are for the user.
    """
    recipes = {name: configure(_find(recipe, name), config) for name in config.recipe}
    devices = start.devices(config, recipes.values())
    with contextlib.ExitStack() as stack:
        with hosts.agreement():
            wandb_log.check(config.run.wandb)
            try:
                config.run.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--out {config.run.out}: cannot create it: {error.strerror}") from None
            if hosts.first():
                stack.enter_context(lock.hold(config.folder))
        session = _begin(config, recipes.values(), devices, console, stop)
        results = []
        for name, each in recipes.items():
            stop.check()
            results.append(_train_recipe(session, name, each))
        _compare(session, recipes, results)
        return results


def _begin(
    config: Config,
    recipes: Collection[fp8jax.Recipe],
    devices: jax.sharding.Mesh,
    console: Console,
    stop: StopSignals,
) -> Session:
    """Creates the run's folder, reads the text, and prints a description of the run. All processes agree on it."""
    details = report.Details(console, config.run.verbose)
    with hosts.agreement():
        if hosts.first():
            folders.prepare(config, console)
            details.keep(config.folder / "log.txt")
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(config.run.out.absolute() / ".xla_cache"))
    # The persistent cache also works for several devices: XLA partitions only custom calls of fp8jax, which have unique
    # names.
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    stop.check()
    with hosts.agreement(), report.waiting(console, "reading text"):
        corpus = start.read(config)
        if hosts.first():
            tokenizer = folders.get_tokenizer(config, corpus)
    with hosts.agreement(), report.waiting(console, "encoding text"):
        if not hosts.first():
            tokenizer = folders.load_tokenizer(config, config.folder)
        tokens = start.encode(config, corpus, tokenizer)
    stop.check()
    shared = config.mathematics() | {"text": tokens.fingerprint}
    hosts.check_same(
        {flag(name): value for name, value in ({"vocab": None} | shared).items()}
        | {"--recipe": [flatten_fields("recipe", each) for each in recipes]}
        | {flag(name): getattr(config.run, name) for name in _EVERYWHERE}
    )
    with hosts.agreement():
        if hosts.first():
            if folders.has_progress(config.folder):
                check_same(folders.read_config(config.folder), shared, config.folder)
            write_json(config.folder / "config.json", shared | {"all": dataclasses.asdict(config)})
    introduction.print_header(console, config, corpus, tokens, start.shape(config, tokenizer.vocab), devices.size)
    introduction.show_setup(details, config, corpus, tokens, devices, recipes)
    return Session(config, devices, tokens, tokenizer, shared, console, details, stop)


def _compare(session: Session, recipes: Mapping[str, fp8jax.Recipe], results: Sequence[Result]) -> None:
    """Prints the table of a run's recipes and a summary of their gains, and plots their losses."""
    config, console, backend = session.config, session.console, jax.default_backend()
    metrics = {}
    for name in recipes:
        path = config.folder / name / "metrics.jsonl"
        metrics[name] = report.read_metrics(path)
        gaps = report.missing((row["step"] for row in metrics[name] if "loss" in row), config.optim.steps)
        if gaps:
            console.print(f"{path} lacks steps {gaps}: loss.png has a gap there; the table below does not read it")
    spreads = {name: comparison.spread(rows) for name, rows in metrics.items()}
    quantized = {
        name: "INT8" if str(each.linear.x).startswith("int8") else "FP8"
        for name, each in recipes.items()
        if each.linear.is_quantized
    }
    has_speed = comparison.has_comparable_speeds(spreads, backend)
    console.print(comparison.comparison_table(results, has_speed=has_speed))
    for text in comparison.sentences(results, quantized, spreads, backend):
        report.print_text(console, text)
    if hosts.first():
        report.plot_losses(config.folder / "loss.png", metrics)
    files = f"Loss curves: {config.folder / 'loss.png'}. TensorBoard: tensorboard --logdir {config.folder}"
    report.print_text(console, files, 4)


def _train_recipe(session: Session, name: str, recipe: fp8jax.Recipe) -> Result:
    """Trains a recipe from its newest checkpoint or from the start. Returns the stored result if it is finished."""
    config, console, details = session.config, session.console, session.details
    folder, label = config.folder / name, f"{name:{max(map(len, config.recipe))}}"
    details.show(f"recipe {recipe.name}, {config.recipe.index(name) + 1} of {len(config.recipe)}")
    # A round trip through JSON, for equality with values in a checkpoint.
    identity = json.loads(json.dumps(session.shared | flatten_fields("recipe", recipe), default=str))
    if (finished := _read_finished(folder, identity, console)) is not None:
        console.print(f"{label}  already trained for {finished.steps} steps: its result is used as it is")
        return finished
    if hosts.first():
        folder.mkdir(parents=True, exist_ok=True)
    if name == fp8jax.recipes.AUTO:
        console.print(f"auto is {recipe.name} here: {fp8jax.recipes.device().description}")
    details.show(recipe.explain())
    task = _make_task(session, recipe)
    programs = _compile(session, task, label)

    params = start.params(config, session.devices if task.rows is not None else None)
    if params is not None and task.lora is not None:
        identity |= {"base_of": digest_of(params)}
    base = jax.jit(task.base, out_shardings=programs.base_places)(params)
    sizes, optim = config.data, config.optim
    with Checkpoints(folder / "checkpoints", config.run.keep) as checkpoints, contextlib.ExitStack() as stack:
        batches = data.train_batches(session.tokens.train, sizes.seq_len, sizes.batch, config.seed)
        saved = checkpoints.resume(programs.state, identity, console.print)
        if saved is None:
            state = jax.jit(task.init, out_shardings=programs.state_places)(params)
            meta: dict[str, Any] = {"step": 0, "log": ()}
        else:
            state, meta = saved
            batches.set_state(meta["loader"])
            console.print(f"resuming from step {meta['step']}")
        del params
        also = stack.enter_context(wandb_log.rows(config.run.wandb if hosts.first() else "", folder, identity))
        log = report.RunLog(
            folder,
            console,
            recipe=recipe.name,
            resumed=meta["step"],
            recent=meta["log"],
            steps=optim.steps,
            every=config.run.log_every,
            writes=hosts.first(),
            share=share_of_peak(task.llama, programs.state.params, programs.base, sizes.seq_len, session.devices.size),
            also=also,
            label=label,
        )
        if config.run.telemetry and hosts.first():
            stack.callback(_plot_telemetry, folder, details)  # also if the run stops early
        with log, Trace(folder / "profile", config.run.profile) as trace:
            valid = data.valid_batches(session.tokens.valid, sizes.seq_len, sizes.batch, sizes.eval_batches)
            step, loss = with_base(programs.step, jax.jit(task.loss, out_shardings=programs.everywhere), base)
            observed_step = programs.observed_step
            if observed_step is not None:
                observed_step, _ = with_base(observed_step, task.loss, base)
            loop = Loop(
                step=step,
                loss=loss,
                observed_step=observed_step,
                batches=batches,
                valid=valid,
                optim=optim,
                settings=config.run,
                checkpoints=checkpoints,
                config=identity,
                log=log,
                stop=session.stop,
                rows=task.rows,
                trace=trace,
            )
            state = loop.run(state)
    if task.lora is not None and hosts.first():
        _write_adapter(folder / "adapter", task, state, console)
    text = _write_text(session, task, state, base)
    result = log.result(count(programs.state.params), fp8jax.state_bytes(state.opt_state), text)
    if hosts.first():
        write_json(folder / "result.json", {"result": dataclasses.asdict(result), "config": identity})
    if text:
        report.print_text(console, f"{recipe.name} writes: {' '.join(text.split())}", 4, "dim")
    return result


def _plot_telemetry(folder: Path, details: report.Details) -> None:
    heat_maps = observed.plot(folder, report.read_metrics(folder / "metrics.jsonl"))
    details.show(f"telemetry: {', '.join(path.name for path in heat_maps)} in {folder}")


def _read_finished(folder: Path, identity: Mapping[str, Any], console: Console) -> Result | None:
    """Returns the result of a finished recipe, or None.

    Raises:
        UserError: it cannot be read, or has another configuration.
    """
    path = folder / "result.json"
    if not path.exists():
        return None
    try:
        result, is_complete = read_result(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); move it away") from None
    except ValueError as error:
        console.print(f"{path} is damaged ({error!r}); it is recreated from the newest checkpoint, if any")
        return None
    check_same(is_complete, identity, folder)
    return result


def _make_task(session: Session, recipe: fp8jax.Recipe) -> Task:
    """Returns the program of a recipe with the settings of a run."""
    config, optim = session.config, session.config.optim
    llama = start.shape(config, session.tokenizer.vocab)
    tokens = config.data.batch * config.data.seq_len // optim.microbatches // session.devices.size
    return Task(
        llama,
        make_optimizer(config, recipe),
        recipe,
        remat=remat_policy(config.run.remat, recipe),
        seed=config.seed,
        microbatches=optim.microbatches,
        rows=session.rows,
        unroll=config.run.unroll,
        lora=config.lora if config.lora.lora_rank else None,
        chunked=in_chunks(config.run.logits, tokens, llama.vocab),
        partition=config.run.partition,
        balance_coefficient=optim.balance_coefficient,
        z_coefficient=optim.z_coefficient,
        expert_capacity=config.run.expert_capacity,
        on_bad_step=config.run.on_bad_step,
        max_loss_jump=config.run.max_loss_jump,
    )


class Programs(NamedTuple):
    """The compiled step of a recipe, and its resources.

    Attributes:
        step: the compiled step.
        observed_step: the compiled step with telemetry, or None.
        state, base: shapes of the state and of frozen weights.
        state_places, base_places: shardings of these over several devices, or None.
        everywhere: replicated sharding over several devices, or None.
    """

    step: Any
    observed_step: Any
    state: TrainState
    base: Any
    state_places: Any = None
    base_places: Any = None
    everywhere: jax.sharding.NamedSharding | None = None


def _compile(session: Session, task: Task, label: str) -> Programs:
    """Compiles the step of a task, and shows its resources.

    The state is not yet in memory, so the sizes are shown before an allocation can fail.
    """
    config, console, details, devices = session.config, session.console, session.details, session.devices
    state, base = jax.eval_shape(task.init), jax.eval_shape(task.base)
    state_shardings = base_shardings = replicated = None
    if task.rows is not None:
        state_shardings, base_shardings = mesh.state(devices, state, config.run.partition), mesh.state(devices, base)
        state, base = mesh.with_shardings(state, state_shardings), mesh.with_shardings(base, base_shardings)
        replicated = mesh.replicated(devices)
    length = config.data.seq_len + 1
    row = (3, length) if session.tokens.train.ndim == 3 else (length,)
    batch = jax.ShapeDtypeStruct((config.data.batch, *row), jnp.int32, sharding=task.rows)
    step: Callable[..., Any] = task.step
    inputs: tuple[Any, ...] = (state, batch, base)
    if hosts.several():
        step, inputs = _signalled(task), (*inputs, hosts.signals(devices, None))
    # Output shardings equal input shardings, so the next step is the same program.
    compile_step = functools.partial(jax.jit, donate_argnums=0, out_shardings=(state_shardings, replicated))
    with report.waiting(console, f"{label}  compiling"), record_choices() as choices, record_residuals() as residuals:
        compiled = compile_step(step).lower(*inputs).compile()
    observed_step = None
    if config.run.telemetry:
        with report.waiting(console, f"{label}  compiling telemetry"):
            observed_step = compile_step(observed.observed(step)).lower(*inputs).compile()
    introduction.show_plan(details, task, state, base, compiled)
    backend = jax.default_backend()
    for line in [*computed_by(choices, residuals), *describe(compiled, choices, backend)]:
        details.show(line, 4)
        # On a CPU, a user cannot act on them.
        if line.startswith("WARNING") and backend != "cpu" and not config.run.verbose:
            report.print_text(console, line, 4, "yellow")
    return Programs(compiled, observed_step, state, base, state_shardings, base_shardings, replicated)


def computed_by(choices: Sequence[Any], residuals: Sequence[str]) -> list[str]:
    """Returns lines with implementation and residuals of each operation, and a warning if no kernel runs."""
    advice = choice.missing_kernels_advice() if choices else None
    warning = [] if advice is None else [f"WARNING: {advice}"]
    return [*warning, *summary(choices), *(f"saved {line}" for line in residuals)]


def _write_adapter(folder: Path, task: Task, state: TrainState, console: Console) -> None:
    """Writes the trained adapters as peft files, if peft has names for them."""
    assert task.lora is not None
    adapters = by_path(state.params, task.lora.lora_alpha)
    try:
        fp8jax.lora.save(folder, adapters, PEFT_NAMES, dropout=task.lora.lora_dropout)
        console.print(f"adapters: {folder}, in the format of peft")
    except (ValueError, ModuleNotFoundError) as error:
        console.print(f"adapters are only in the checkpoints: {error}")


def with_base(
    step: Callable[..., Any], loss: Callable[..., Any], base: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a step and a loss for `Loop` that have the frozen weights as an argument."""

    def of_step(state: TrainState, tokens_BxT: jax.Array, *telemetry_args: Any) -> Any:
        return step(state, tokens_BxT, base, *telemetry_args)

    def of_loss(params: Any, model_state: Any, tokens_BxT: jax.Array) -> Any:
        return loss(params, joined(model_state, base), tokens_BxT)

    return of_step, of_loss


def _signalled(task: Task) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Returns a step that distributes the signals of all processes, so that all stop at the same step."""

    def step(state: TrainState, tokens_BxT: jax.Array, base: Any, signals: jax.Array) -> Any:
        state, metrics = task.step(state, tokens_BxT, base)
        return state, metrics | {"signal": signals.max()}

    return step


def _find(recipe: Callable[[str], fp8jax.Recipe], name: str) -> fp8jax.Recipe:
    try:
        return recipe(name)
    except ValueError as error:
        raise UserError(f"--recipe: {error}") from None


def _write_text(session: Session, task: Task, state: TrainState, base: Any) -> str:
    """Returns the model's continuation of the first tokens of the validation text."""
    config = session.config
    length = min(config.run.sample_tokens, config.data.seq_len)
    prompt = start.prompt(session.tokens, min(24, length // 2))
    if not prompt:
        return ""
    key = jax.random.wrap_key_data(state.rng)
    variables = (state.params, joined(state.model_state, base))
    where = None if task.rows is None else mesh.replicated(task.rows.mesh)
    ids = sampling.sample(lambda v, t: task.model(*v)(t), variables, prompt, length, key, where=where)
    return session.tokenizer.decode(ids).strip()
