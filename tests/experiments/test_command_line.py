"""Wrong input gives exit code 2 and one line with the value and the fix, and leaves no files."""

import dataclasses
import importlib.util
import json
import math
import re
import shutil
from pathlib import Path

import pytest

import fp8jax
from experiments import errors, plan
from experiments.bench import __main__ as bench
from experiments.errors import BusyError, DiskError, UserError
from experiments.models import sizes
from experiments.results import report as tables_report
from experiments.train import cli, config, folders, help
from experiments.train.config import Config

SECTIONS = (config.Data, config.Model, config.Optim, config.Lora, config.Run)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipe", "bf17"], "'bf17'.*coat_optimizer"),
        (["--recipe", "bf16", "bf16"], "contains a recipe twice"),
        (["--model", "9b"], "--model: unknown model size '9b'.*7b"),
        (["--heads", "5"], "--dim 32 is not divisible by --heads 5"),
        (["--kv-heads", "3"], "--heads 4 is not divisible by --kv-heads 3"),
        (["--layers", "0"], "--layers must be at least 1, got 0"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--seq-len", "-3"], "--seq-len must be at least 1, got -3"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--unroll", "0"], "--unroll must be at least 1, got 0"),
        (["--keep", "0"], "--keep must be at least 1, got 0"),
        (["--checkpoint-every", "0"], "--checkpoint-every must be at least 1"),
        (["--lr", "0"], "--lr must be positive and finite, got 0"),
        (["--lr", "nan"], "--lr must be positive and finite, got nan"),
        (["--b2", "1"], "--b2 must be at least 0 and below 1, got 1"),
        (["--clip", "-1"], "--clip must be positive"),
        (["--weight-decay", "-0.1"], "--weight-decay must be finite and not negative"),
        (["--final-lr", "2"], "--final-lr must be a share"),
        (["--warmup", "8"], "--warmup 8 must be below --steps 8: pass a smaller --warmup or more --steps"),
        (["--valid-fraction", "1"], "--valid-fraction must be between 0 and 1"),
        (["--tokenizer", "bpe", "--vocab", "256"], "--vocab must be at least 257"),
        (["--run", "a/b"], "--run must be a name .* not a path, got 'a/b'"),
        (["--run", ".."], "--run must be a name .* not a path"),
        (["--run", ""], "--run must be a name"),
        (["--seq-len", "100000"], "training text has .* one sequence needs 100001"),
        (["--data", "nowhere/*.txt"], r"--data nowhere/\*.txt: the glob matches no file"),
        (["--data", "nowhere"], "--data nowhere: no such file or folder"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(argv, out, capsys, flags, message):
    assert cli.main([*argv, "--run", "wrong", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not (out / "wrong" / "config.json").exists()


# For each field, a value at its bound and one just beyond, with other settings that allow them.
BOUNDS = {
    **{("data", name): (1, 0) for name in ("seq_len", "batch", "eval_batches")},
    **{("run", name): (1, 0) for name in ("log_every", "checkpoint_every", "keep", "eval_every", "unroll", "patience")},
    **{("run", name): (0, -1) for name in ("sample_tokens", "profile", "telemetry")},
    ("optim", "steps"): (1, 0),
    ("optim", "microbatches"): (1, 0),
    ("optim", "warmup"): (9, 10),
    **{("optim", name): (1e-30, 0) for name in ("lr", "eps", "clip")},
    **{("optim", name): (0, 1) for name in ("b1", "b2")},
    ("optim", "final_lr"): (1, 1.01),
    ("optim", "weight_decay"): (0, -1e-9),
    ("optim", "decay"): (1, 1.01),
    ("data", "valid_fraction"): (1e-9, 0),
    ("data", "vocab"): (257, 256),
    ("lora", "lora_alpha"): (1e-9, 0),
    ("lora", "lora_dropout"): (0, 1),
    ("lora", "base"): ("int8:block128", "int10:group64"),
    ("run", "process_id"): (1, 2),
    ("run", "process_count"): (2, 1),
}
BESIDE = {
    "optim": {"steps": 10, "warmup": 0},
    "data": {"batch": 1, "tokenizer": "bpe"},
    "lora": {"lora_rank": 2, "lora_targets": ".*"},
    "run": {"coordinator": "node0:1", "process_id": 1, "process_count": 2},
}


@pytest.mark.parametrize(("section", "name"), BOUNDS)
def test_each_field_may_be_as_far_as_its_bound(section, name):
    kind = {"data": config.Data, "run": config.Run, "optim": config.Optim, "lora": config.Lora}[section]
    fits, beyond = BOUNDS[section, name]
    configs = [Config(**{section: kind(**(BESIDE[section] | {name: value}))}) for value in (fits, beyond)]
    configs[0].validate()
    Config(optim=config.Optim(steps=10, warmup=5, schedule="wsd", decay=0.5)).validate()
    Config(run=config.Run(**(BESIDE["run"] | {"process_id": 0}))).validate()
    with pytest.raises(UserError, match=f"{config.flag(name)}"):
        configs[1].validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim": {"lr": math.inf}}, "--lr must be positive and finite, got inf"),
        ({"optim": {"final_lr": -0.1}}, "--final-lr must be a share of --lr"),
        ({"optim": {"weight_decay": math.inf}}, "--weight-decay must be finite"),
        ({"optim": {"schedule": "wsd", "decay": 0.5, "warmup": 6}}, "--decay 0.5 starts at step 5 with wsd"),
        ({"optim": {"schedule": "wsd", "decay": 0.01}}, "--decay 0.01 starts at step 10 with wsd"),
        ({"optim": {"microbatches": 3}}, "--microbatches 3 must divide --batch"),
        ({"data": {"valid_fraction": 1.0}}, "--valid-fraction must be between 0 and 1"),
        ({"run": {"process_id": -1}}, "--process-id -1 must be from 0 to --process-count 2 - 1"),
        ({"run": {"process_count": None}}, "--coordinator node0:1 also needs --process-id and --process-count"),
        ({"run": {"coordinator": "auto"}}, "--process-id 1 and .* omit them: auto detects them"),
        ({"run": {"coordinator": ""}}, "set it, or omit them"),
        ({"run": {"coordinator": "", "process_count": None}}, "set it, or omit them"),
        ({"run": {"coordinator": ":1"}}, "--coordinator must be HOST:PORT, such as node0:12345, or auto, got ':1'"),
        ({"run": {"run": ".r"}}, "--run must be a name without a leading dot"),
        ({"lora": {"lora_rank": -1}}, "--lora-rank must be at least 0, got -1"),
        ({"lora": {"lora_rank": 0, "lora_alpha": 3.0}}, "--lora-alpha requires adapters; also set --lora-rank"),
        (
            {"lora": {"base": "e4m3:group128+stochastic"}},
            "--base must be bf16, or an 8-bit spec that rounds to nearest",
        ),
        ({"seed": 2**63}, "--seed must be at least 0 and below 2\\*\\*63, got 9223372036854775808"),
        ({"recipe": ()}, "--recipe needs at least one name"),
    ],
    ids=str,
)
def test_what_no_bound_says_is_refused(change, message):
    kinds = {"data": config.Data, "run": config.Run, "optim": config.Optim, "lora": config.Lora}
    parts = {k: kinds[k](**(BESIDE[k] | v)) if k in kinds else v for k, v in change.items()}
    with pytest.raises(UserError, match=message):
        Config(**parts).validate()


@pytest.mark.parametrize("option", ["--help", "-h", "--help-all"])
def test_help_lists_recipes_sizes_and_exit_codes(capsys, option, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main([option])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    words = re.sub(r"[\s│]+", " ", shown)
    assert ", ".join(fp8jax.recipes.NAMES) in words
    assert ", ".join(sizes.NAMES) in words
    codes = words.split("Exit codes: ")[1].split(". ")[0]
    assert re.findall(r"(\d+) (?!and)", codes + " ") == ["0", "1", "2", "3", "4", "5", "143"]
    for error in (UserError, DiskError, BusyError):
        assert f" {error.exit_code} " in f" {codes}"
    # One screen has the most common options, and names the others' command.
    options = {config.flag(field.name) for section in SECTIONS for field in dataclasses.fields(section)}
    listed = {option for option in options if re.search(rf"(?m)^[│ ]*{option}\b(?!-)", shown)}
    if option == "--help-all":
        assert listed == options
    else:
        assert len(shown.splitlines()) <= 40
        assert max(map(len, shown.splitlines())) <= 80
        assert listed == {config.flag(name) for name, _, _ in help.ESSENTIAL if name != "recipe"} < options
        assert "--help-all" in shown


def test_benchmarks_are_listed_and_an_unknown_one_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["bench", "--help"])
    assert bench.main() == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for name in bench.BENCHES:
        assert importlib.util.find_spec(f"experiments.bench.{name}"), name
        assert re.search(rf"(?m)^  {name} +\w", shown), name
    monkeypatch.setattr("sys.argv", ["bench", "gem"])
    assert bench.main() == 2
    shown, error = capsys.readouterr()
    assert shown == ""
    assert error.startswith("error: unknown benchmark 'gem'\n")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_the_plan_fits_a_terminal(capsys, option, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        plan.main([option])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 40
    assert max(map(len, shown.splitlines())) <= 80
    # Each option has a text.
    assert not re.findall(r"(?m)^  --\S+ \S+$(?!\n {20})", shown)


def test_report_of_no_results_is_refused_and_writes_nothing(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    for folder, message in (("nowhere", "no such folder"), ("results", "no results there (CARD/NAME.json)")):
        assert tables_report.main(["--results", str(tmp_path / folder), "--readme", str(tmp_path / "page.md")]) == 2
        assert capsys.readouterr().err == f"error: --results {tmp_path / folder}: {message}\n"
    assert [path.name for path in tmp_path.rglob("*")] == ["results"]


def test_unknown_flag_is_refused_by_the_parser(argv):
    with pytest.raises(SystemExit) as caught:
        cli.main([*argv, "--stepz", "3"])
    assert caught.value.code == 2


def test_out_that_is_a_file_is_an_error(argv, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main([*argv, "--out", str(tmp_path / "file")]) == 2
    assert "cannot create" in capsys.readouterr().err


def test_defaults_are_possible_and_flags_reach_their_fields():
    assert config.parse([]) == Config()
    parsed = config.parse(["--recipe", "bf16", "--data", "a", "b/*.txt", "--lr", "1e-3", "--resume", "never", "--tied"])
    assert parsed.recipe == ("bf16",)
    assert parsed.data.data == ("a", "b/*.txt")
    assert (parsed.optim.lr, parsed.run.resume, parsed.model.tied) == (1e-3, "never", True)


def test_where_and_how_often_is_no_mathematics():
    base = config.parse([]).mathematics()
    same = [
        "--run",
        "x",
        "--out",
        "y",
        "--log-every",
        "3",
        "--keep",
        "9",
        "--checkpoint-every",
        "2",
        "--eval-every",
        "7",
    ]
    assert config.parse(same).mathematics() == base


# Values other than the defaults, for fields whose default cannot be doubled.
OTHER = {"tokenizer": "bpe", "model": "15m", "tied": True, "layers": 7, "dim": 7, "heads": 7, "kv_heads": 7,
         "mlp_dim": 7}  # fmt: skip
MATHEMATICS = [("", "seed"), *((section, field.name) for section in ("data", "model", "optim", "lora")
               for field in dataclasses.fields(getattr(Config(), section)) if field.name != "data")]  # fmt: skip


@pytest.mark.parametrize(("section", "name"), MATHEMATICS, ids=" ".join)
def test_every_field_that_changes_the_numbers_is_compared_before_a_run_goes_on(section, name):
    def config_with(value):
        base = dataclasses.replace(Config(), data=config.Data(tokenizer="bpe")) if name == "vocab" else Config()
        if not section:
            return dataclasses.replace(base, **{name: value})
        return dataclasses.replace(base, **{section: dataclasses.replace(getattr(base, section), **{name: value})})

    old = getattr(getattr(Config(), section) if section else Config(), name)
    new = OTHER[name] if name in OTHER else old * 2 if old else 1
    before, after = (config_with(value).mathematics() for value in (old, new))
    assert {key for key in after if after[key] != before.get(key)} == {name} | ({"vocab"} if new == "bpe" else set())
    with pytest.raises(errors.UserError, match=re.escape(f"{name} was {old!r}, now {new!r}")):
        config.check_same(before, after, Path("runs"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "0.5"], "lr was 0.002, now 0.5"),
        (["--steps", "9"], "steps was 8, now 9"),
        (["--seed", "1", "--tied"], "seed was 0, now 1; tied was False, now True"),
        (["--eval-batches", "3"], "eval_batches was 2, now 3"),
        (["--data", __file__], "the text of --data differs"),
    ],
)
def test_run_of_another_configuration_is_refused(argv, finished, capsys, flags, message):
    assert cli.main([*argv, "--run", "finished", *flags]) == 2
    error = capsys.readouterr().err
    assert re.search(f"another configuration: {message}. Use the old values .* a new --run", error), error
    assert (finished / "loss.png").exists()


def test_result_of_a_recipe_that_changed_since_is_refused(argv, finished, capsys):
    changed = dataclasses.replace(fp8jax.recipes.bf16(), weights=fp8jax.recipes.Weights("fp32", "fp32"))
    assert cli.main([*argv, "--run", "finished", "--recipe", "bf16"], recipe=lambda name: changed) == 2
    assert "recipe.weights.compute was 'bf16', now 'fp32'" in capsys.readouterr().err


def unfinished(finished, out, name):
    """A copy of the finished run whose second recipe is not finished."""
    folder = out / name
    shutil.copytree(finished, folder)
    (folder / "coat_optimizer" / "result.json").unlink()
    return folder / "coat_optimizer" / "checkpoints"


def test_checkpoint_of_another_recipe_is_refused(argv, finished, out, capsys):
    checkpoints = unfinished(finished, out, "swapped")
    shutil.rmtree(checkpoints)
    shutil.copytree(finished / "bf16" / "checkpoints", checkpoints)
    assert cli.main([*argv, "--run", "swapped"]) == 2
    assert "recipe.name was 'bf16', now 'coat_optimizer'" in capsys.readouterr().err


def damage(checkpoint):
    largest = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)


def without_times(path):
    result = json.loads(path.read_text())["result"]
    return {name: value for name, value in result.items() if name != "tokens_per_s"}


def test_damaged_checkpoint_is_told_and_the_one_before_taken(argv, finished, out, capsys):
    checkpoints = unfinished(finished, out, "damaged")
    damage(checkpoints / "8")
    assert cli.main([*argv, "--run", "damaged"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"checkpoints/8 is damaged: .*; moved to \S*/coat_optimizer/damaged-8\nresuming from step 4", shown
    )
    assert (checkpoints.parent / "damaged-8" / "state").is_dir()
    assert sorted(p.name for p in checkpoints.iterdir()) == ["4", "8"]
    again, first = (without_times(f / "coat_optimizer" / "result.json") for f in (out / "damaged", finished))
    assert again == first


def test_checkpoints_that_are_all_damaged_are_refused_and_stay(argv, finished, out, capsys):
    checkpoints = unfinished(finished, out, "ruined")
    for step in ("4", "8"):
        damage(checkpoints / step)
    assert cli.main([*argv, "--run", "ruined"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(
        r"checkpoints/8 is damaged: .*, and no older one is intact\. Restart the run with --resume never", error
    )
    assert sorted(p.name for p in checkpoints.iterdir()) == ["4", "8"]


def test_progress_is_a_whole_checkpoint_or_a_result(tmp_path):
    for run, file, has in (("a", "bf16/checkpoints/4/x", True), ("b", "bf16/checkpoints/4.orbax-tmp/x", False),
                           ("c", "bf16/result.json", True), ("d", "config.json", False)):  # fmt: skip
        (tmp_path / run / file).parent.mkdir(parents=True)
        (tmp_path / run / file).touch()
        assert folders.has_progress(tmp_path / run) == has


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_config_file_is_an_error(argv, finished, tmp_path, capsys, content):
    unfinished(finished, tmp_path, "broken")
    (tmp_path / "broken" / "config.json").write_text(content)
    assert cli.main([*argv, "--out", str(tmp_path), "--run", "broken"]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
