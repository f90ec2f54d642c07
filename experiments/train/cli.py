"""The command line of the training program: from settings to the results of each recipe."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fp8jax
from experiments import mesh, packages, signals, train
from experiments.errors import UserError
from experiments.files import write_json
from experiments.signals import Stopped, StopSignals
from experiments.train import hosts
from fp8jax.modules.compiled import describe
from fp8jax.ops.dispatch import choice
from fp8jax.ops.dispatch.choice import record_choices, record_residuals, summary

with packages.needed() as no_parser:
    from experiments.train.config import Config, check_same, flag, flatten_fields, parse
with packages.needed() as missing:
    from rich.console import Console

    from experiments.models import sampling
    from experiments.text import data, packing
    from experiments.text.tokenizer import Tokenizer
    from experiments.train import (
        comparison,
        folders,
        introduction,
        lock,
        observed,
        peft_files,
        report,
        start,
        wandb_log,
    )
    from experiments.train.adapters import joined, of_base
    from experiments.train.checkpoint import Checkpoints, digest_of, quiet
    from experiments.train.form import in_chunks, recomputed
    from experiments.train.introduction import count
    from experiments.train.loop import BadStep, Loop
    from experiments.train.optimizer import make_optimizer, with_head, with_master
    from experiments.train.result import Result, read_result
    from experiments.train.speed import Trace, share_of_peak
    from experiments.train.task import Task, TrainState

_PROGRAM = "experiments.train"
# Settings of `Run` that all processes must share, or their programs or their order of work differ.
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
    """Parses the command line, trains, and returns the exit code; `recipe` looks the names of `--recipe` up."""
    command = shlex.join(["python", "-m", _PROGRAM, *(sys.argv[1:] if argv is None else argv)])
    if no_parser:
        return no_parser.report(_PROGRAM)
    if missing:
        parse(argv, train.__doc__)
        return missing.report(_PROGRAM)
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
    """Exit code and message for the user; None for an error that is none of theirs."""
    match error:
        case UserError():
            return error.exit_code, f"error: {error}"
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS):
            return 3, f"error: {error}. Make that writable, or give another --out"
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
        case Exception() if hosts.gone(error):
            who = f"process {jax.process_index()} of {jax.process_count()}"
            return hosts.GONE, hosts.gone_message(who, str(error).splitlines()[0][:200])
    return None


def run(config: Config, console: Console, stop: StopSignals, recipe: Callable[[str], fp8jax.Recipe]) -> list[Result]:
    """Trains every recipe of the configuration in turn and reports.

    Raises:
        UserError, BadStep, Stopped: as the names say; their messages are for the user.
    """
    recipes = {name: _find(recipe, name) for name in config.recipe}
    recipes = {
        name: with_head(with_master(each, config.optim.master), config.optim.head) for name, each in recipes.items()
    }
    if config.lora.lora_rank:
        recipes = {name: of_base(each, config.lora) for name, each in recipes.items()}
    devices = start.devices(config, recipes.values())
    with contextlib.ExitStack() as stack:
        with hosts.agreement():
            wandb_log.check(config.run.wandb)
            try:
                config.run.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--out {config.run.out}: cannot make it: {error.strerror}") from None
            if hosts.first():
                stack.enter_context(lock.hold(config.folder))
        return _run(config, recipes, devices, console, stop)


def _run(
    config: Config,
    recipes: dict[str, fp8jax.Recipe],
    devices: jax.sharding.Mesh,
    console: Console,
    stop: StopSignals,
) -> list[Result]:
    details = report.Details(console, config.run.verbose)
    with hosts.agreement():
        if hosts.first():
            folders.prepare(config, console)
            details.keep(config.folder / "log.txt")
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(config.run.out.absolute() / ".xla_cache"))
    keep_programs()
    stop.check()

    with hosts.agreement(), report.waiting(console, "reading text"):
        corpus = start.read(config)
        if hosts.first():
            tokenizer = folders.get_tokenizer(config, corpus)
    with hosts.agreement(), report.waiting(console, "encoding text"):
        if not hosts.first():
            tokenizer = folders.load_tokenizer(config)
        tokens = start.encode(config, corpus, tokenizer)
    stop.check()
    shared = config.mathematics() | {"text": tokens.fingerprint}
    hosts.check_same(
        {flag(name): value for name, value in ({"vocab": None} | shared).items()}
        | {"--recipe": [flatten_fields("recipe", each) for each in recipes.values()]}
        | {flag(name): getattr(config.run, name) for name in _EVERYWHERE}
    )
    with hosts.agreement():
        if hosts.first():
            if folders.has_progress(config.folder):
                check_same(folders.read_config(config.folder), shared, config.folder)
            write_json(config.folder / "config.json", shared | {"all": dataclasses.asdict(config)})
    introduction.print_header(console, config, corpus, tokens, start.shape(config, tokenizer.vocab), devices.size)
    introduction.show_setup(details, config, corpus, tokens, devices, recipes.values())

    results = []
    for name, each in recipes.items():
        stop.check()
        folder = config.folder / name
        results.append(_train_recipe(config, each, devices, folder, shared, tokens, tokenizer, console, details, stop))
    metrics = {}
    for name in recipes:
        path = config.folder / name / "metrics.jsonl"
        metrics[name] = report.read_metrics(path)
        gaps = report.missing((row["step"] for row in metrics[name] if "loss" in row), config.optim.steps)
        if gaps:
            console.print(f"{path} lacks steps {gaps}: loss.png has a gap there; the table below does not read it")
    _print_comparison(config, recipes, results, metrics, console)
    if hosts.first():
        report.plot_losses(config.folder / "loss.png", metrics)
    files = f"Loss curves: {config.folder / 'loss.png'}. TensorBoard: tensorboard --logdir {config.folder}"
    report.told(console, files, 4)
    return results


def _print_comparison(
    config: Config,
    recipes: dict[str, fp8jax.Recipe],
    results: Sequence[Result],
    metrics: dict[str, list[dict[str, Any]]],
    console: Console,
) -> None:
    """The table of a run's recipes, and what they gained in sentences."""
    backend = jax.default_backend()
    spreads = {name: comparison.spread(rows) for name, rows in metrics.items()}
    quantized = {
        name: "INT8" if str(each.linear.x).startswith("int8") else "FP8"
        for name, each in recipes.items()
        if each.linear.is_quantized
    }
    has_speed = comparison.has_comparable_speeds(spreads, backend)
    console.print(comparison.comparison_table(results, has_speed=has_speed))
    for text in comparison.sentences(results, quantized, spreads, backend):
        report.told(console, text)


def _train_recipe(
    config: Config,
    recipe: fp8jax.Recipe,
    devices: jax.sharding.Mesh,
    folder: Path,
    shared: dict[str, Any],
    tokens: data.Tokens | packing.Packed,
    tokenizer: Tokenizer,
    console: Console,
    details: report.Details,
    stop: StopSignals,
) -> Result:
    """Trains one recipe from its newest checkpoint, or from the start; or returns its result where it is finished."""
    details.show(f"recipe {recipe.name}, {config.recipe.index(folder.name) + 1} of {len(config.recipe)}")
    label = f"{folder.name:{max(map(len, config.recipe))}}"
    # Through JSON, as it comes back from a checkpoint.
    identity = json.loads(json.dumps(shared | flatten_fields("recipe", recipe), default=str))
    finished = folder / "result.json"
    if finished.exists():
        try:
            result, known = read_result(finished)
        except OSError as error:
            raise UserError(f"{finished} cannot be read ({error.strerror}); move it away") from None
        except ValueError as error:
            console.print(f"{finished} is damaged ({error!r}): made again from the newest checkpoint, if any")
        else:
            check_same(known, identity, folder)
            console.print(f"{label}  already trained for {result.steps} steps: its result is used as it is")
            return result
    if hosts.first():
        folder.mkdir(parents=True, exist_ok=True)

    sizes, optim = config.data, config.optim
    llama = start.shape(config, tokenizer.vocab)
    rows = mesh.batches(devices) if devices.size > 1 else None
    task = Task.build(
        llama,
        make_optimizer(config, recipe),
        recipe,
        remat=recomputed(config.run.remat, recipe),
        seed=config.seed,
        microbatches=optim.microbatches,
        rows=rows,
        unroll=config.run.unroll,
        lora=config.lora if config.lora.lora_rank else None,
        chunked=in_chunks(
            config.run.logits, sizes.batch * sizes.seq_len // optim.microbatches // devices.size, llama.vocab
        ),
        partition=config.run.partition,
        balance_coefficient=optim.balance_coefficient,
        z_coefficient=optim.z_coefficient,
        expert_capacity=config.run.expert_capacity,
        on_bad_step=config.run.on_bad_step,
        max_loss_jump=config.run.max_loss_jump,
    )
    abstract, base_shapes = jax.eval_shape(task.init), jax.eval_shape(task.base)
    row = (3, sizes.seq_len + 1) if tokens.train.ndim == 3 else (sizes.seq_len + 1,)
    batch = jax.ShapeDtypeStruct((sizes.batch, *row), jnp.int32, sharding=rows)
    placed = everywhere = base_placed = None
    if rows is not None:
        placed, everywhere = mesh.state(devices, abstract, config.run.partition), mesh.whole(devices)
        base_placed = mesh.state(devices, base_shapes)
        abstract, base_shapes = mesh.on(abstract, placed), mesh.on(base_shapes, base_placed)
    # Nothing of the state is in memory yet: what does not fit has been shown before it fails.
    if folder.name == fp8jax.recipes.AUTO:
        console.print(f"auto is {recipe.name} here: {fp8jax.recipes.device().description}")
    details.show(recipe.explain())
    with report.waiting(console, f"{label}  compiling"), record_choices() as told, record_residuals() as kept:
        # A state comes out as it went in: the next step is the same program.
        step = _signalled(task) if hosts.several() else task.step
        inputs: tuple[Any, ...] = (abstract, batch, base_shapes)
        if hosts.several():
            inputs = (*inputs, hosts.signals(devices, None))
        compile_step = functools.partial(jax.jit, donate_argnums=0, out_shardings=(placed, everywhere))
        compiled = compile_step(step).lower(*inputs).compile()
    observed_step = None
    if config.run.telemetry:
        with report.waiting(console, f"{label}  compiling telemetry"):
            observed_step = compile_step(observed.observed(step)).lower(*inputs).compile()
    introduction.show_plan(details, task, abstract, base_shapes, compiled)
    for line in [*computed_by(told, kept), *describe(compiled, told, jax.default_backend())]:
        details.show(line, 4)
        # On a CPU there is nothing to do about them.
        if line.startswith("WARNING") and jax.default_backend() != "cpu" and not config.run.verbose:
            report.told(console, line, 4, "yellow")

    params = start.params(config, devices if rows is not None else None)
    if params is not None and task.lora is not None:
        identity |= {"base_of": digest_of(params)}
    base = jax.jit(task.base, out_shardings=base_placed)(params)
    with Checkpoints(folder / "checkpoints", config.run.keep) as checkpoints, contextlib.ExitStack() as stack:
        batches = data.train_batches(tokens.train, sizes.seq_len, sizes.batch, config.seed)
        saved = checkpoints.resume(abstract, identity, console.print)
        if saved is None:
            state, meta = jax.jit(task.init, out_shardings=placed)(params), dict[str, Any](step=0, log=())
        else:
            state, meta = saved
            batches.set_state(meta["loader"])
            console.print(f"resuming from step {meta['step']}")
        del params
        also = stack.enter_context(wandb_log.rows(config.run.wandb if hosts.first() else "", folder, identity))
        used = share_of_peak(llama, abstract.params, base_shapes, sizes.seq_len, devices.size)
        log = report.RunLog(
            folder,
            console,
            recipe=recipe.name,
            resumed=meta["step"],
            recent=meta["log"],
            steps=optim.steps,
            every=config.run.log_every,
            writes=hosts.first(),
            share=used,
            also=also,
            label=label,
        )
        if config.run.telemetry and hosts.first():
            stack.callback(_plot_telemetry, folder, details)  # of a run that stops, too
        with log, Trace(folder / "profile", config.run.profile) as trace:
            valid = data.valid_batches(tokens.valid, sizes.seq_len, sizes.batch, sizes.eval_batches)
            calls = with_base(compiled, jax.jit(task.loss, out_shardings=everywhere), base)
            loop = Loop(*calls, batches, valid, optim, config.run, checkpoints, identity, log, stop, rows, trace)
            if observed_step is not None:
                loop.observed_step, _ = with_base(observed_step, task.loss, base)
            state = loop.run(state)
    if task.lora is not None and hosts.first():
        _write_adapter(folder / "adapter", task, state, console)
    text = _write_text(config, task, state, base, tokens, tokenizer)
    result = log.result(count(abstract.params), fp8jax.state_bytes(state.opt_state), text)
    if hosts.first():
        write_json(finished, {"result": dataclasses.asdict(result), "config": identity})
    if text:
        report.told(console, f"{recipe.name} writes: {' '.join(text.split())}", 4, "dim")
    return result


def _plot_telemetry(folder: Path, details: report.Details) -> None:
    heat_maps = observed.plot(folder, report.read_metrics(folder / "metrics.jsonl"))
    details.show(f"telemetry: {', '.join(path.name for path in heat_maps)} in {folder}")


def computed_by(told: Sequence[Any], kept: Sequence[str]) -> list[str]:
    """Lines on what computes the operations of a step and what they save, with a warning where no kernel runs."""
    advice = choice.missing_kernels_advice() if told else None
    warning = [] if advice is None else [f"WARNING: {advice}"]
    return [*warning, *summary(told), *(f"saved {line}" for line in kept)]


def _write_adapter(folder: Path, task: Task, state: TrainState, console: Console) -> None:
    """The trained adapters in the files of peft, where these have names for them."""
    assert task.lora is not None
    found = peft_files.of_params(state.params, task.lora.lora_alpha)
    try:
        peft_files.save(folder, found, dropout=task.lora.lora_dropout)
        console.print(f"adapters: {folder}, as peft reads them")
    except UserError as error:
        console.print(f"adapters are in the checkpoints alone: {error}")


def with_base(
    step: Callable[..., Any], loss: Callable[..., Any], base: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A step and a loss as `Loop` calls them, of weights that are not trained."""

    def of_step(state: TrainState, tokens_BxT: jax.Array, *noted: Any) -> Any:
        return step(state, tokens_BxT, base, *noted)

    def of_loss(params: Any, model_state: Any, tokens_BxT: jax.Array) -> Any:
        return loss(params, joined(model_state, base), tokens_BxT)

    return of_step, of_loss


def _signalled(task: Task) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """A step by which all processes learn of a signal that one of them has received, at the same step."""

    def step(state: TrainState, tokens_BxT: jax.Array, base: Any, signals: jax.Array) -> Any:
        state, metrics = task.step(state, tokens_BxT, base)
        return state, metrics | {"signal": signals.max()}

    return step


def keep_programs() -> None:
    """Lets JAX's persistent cache find programs for several devices, too.

    All their calls that XLA partitions are fp8jax's own, whose names say what they are.
    """
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)


def _find(recipe: Callable[[str], fp8jax.Recipe], name: str) -> fp8jax.Recipe:
    try:
        return recipe(name)
    except ValueError as error:
        raise UserError(f"--recipe: {error}") from None


def _write_text(
    config: Config, task: Task, state: TrainState, base: Any, tokens: data.Tokens | packing.Packed, tokenizer: Tokenizer
) -> str:
    """What the model makes of the first tokens of the validation text."""
    length = min(config.run.sample_tokens, config.data.seq_len)
    prompt = start.prompt(tokens, min(24, length // 2))
    if not prompt:
        return ""
    key = jax.random.wrap_key_data(state.rng)
    variables = (state.params, joined(state.model_state, base))
    where = None if task.rows is None else mesh.whole(task.rows.mesh)
    ids = sampling.sample(lambda v, t: task.model(*v)(t), variables, prompt, length, key, where=where)
    return tokenizer.decode(ids).strip()
