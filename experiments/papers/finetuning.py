"""Fine-tuning in 8 bits beside bf16: a checkpoint of our own, answers on another style of text, three seeds.

    python -m experiments.papers.finetuning                                  a small model, some minutes of a CPU
    python -m experiments.papers.finetuning --size 60m --data 'books/*.txt'  on a GPU

A small Llama is trained in bf16, written as a checkpoint of Hugging Face, and read again by `experiments.train --init`,
which fine-tunes it on questions and answers about Python's standard library, made here from its docstrings; losses are
those of answers alone. What is there under --out is not trained again: a command that was stopped goes on.
"""

import ast
import dataclasses
import json
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from experiments.errors import UserError
from experiments.hub.__main__ import main as export
from experiments.papers import common
from experiments.papers.common import Row
from experiments.train import cli

BASE, START = "bf16", "before"
SEEDS = 3
# The start of an arm's run, and its flags.
ARMS = {
    BASE: ("full", "--recipe bf16"),
    "coat": ("full", "--recipe coat"),
    "moss": ("full", "--recipe moss"),
    "int8_fallback": ("full", "--recipe int8_fallback"),
    "LoRA on bf16": ("lora", "--recipe bf16 --base bf16"),
    "LoRA on e4m3": ("lora", "--recipe te_current --base e4m3"),
}
TEMPLATE = (
    "{% for m in messages %}{{ '## ' + m.role + '\\n' + m.content + '<|document|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '## assistant\\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class TuningSetting:
    """Flags of the training program, for the checkpoint, for fine-tuning, and of learning rates."""

    model: str
    first: str
    then: str
    full: str
    lora: str


SIZES = {
    "tiny": TuningSetting(
        "--model 5m --dim 128 --layers 3 --heads 4 --kv-heads 2 --mlp-dim 384 --tokenizer bpe --vocab 512",
        "--steps 300 --warmup 30 --batch 8 --seq-len 128 --lr 2e-3",
        "--steps 60 --warmup 6 --batch 8 --seq-len 128",
        "--lr 5e-4",
        "--lr 5e-3 --lora-rank 8",
    ),
    "60m": TuningSetting(
        "--model 60m --tokenizer bpe --vocab 8192",
        "--steps 1500 --warmup 100 --batch 32 --seq-len 512 --lr 1e-3 --unroll 1",
        "--steps 150 --warmup 15 --batch 16 --seq-len 512 --unroll 1",
        "--lr 1e-4",
        "--lr 1e-3 --lora-rank 16",
    ),
}
ALWAYS = "--sample-tokens 0 --eval-every 1000000 --checkpoint-every 1000000 --log-every 100 --eval-batches 8"
Found = dict[str, dict[int, dict[str, float]]]
"""Losses by arm, seed and metric."""
METRICS = {"training": "training loss of answers", "validation": "validation loss of answers"}


def pairs(folder: Path, most: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Conversations about the functions and classes of the modules in a folder: what does it do, and its docstring.

    Args:
        folder: of Python sources; those at its top are read, in the order of their names.
        most: how many.
    """
    count = 0
    for path in sorted(folder.glob("*.py")):
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or not (told := ast.get_docstring(node)):
                continue
            signature = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
            question = f"What does {path.stem}.{node.name}{signature} do?"
            answer = told.split("\n\n")[0]
            if len(answer) < 20 or len(question) + len(answer) > 400:
                continue
            yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            count += 1
            if count == most:
                return


def checkpoint(out: Path, size: str, data: Sequence[str]) -> Path:
    """The folder of the checkpoint: trained and written now, or there before.

    Raises:
        UserError: training or writing did not end well.
    """
    setting, folder = SIZES[size], out / f"finetuning_{size}_checkpoint"
    if (folder / "tokenizer_config.json").exists() and (folder / "pairs.jsonl").exists():
        return folder
    run = f"finetuning_{size}_start"
    _train(f"{setting.model} {setting.first} --recipe bf16 --run {run}", out, data)
    if not folder.exists() and export(["--run", str(out / run), "--recipe", "bf16", "--out", str(folder)]):
        raise UserError(f"the checkpoint could not be written to {folder}")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": TEMPLATE}
    library = Path(sysconfig.get_path("stdlib"))
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs(library, 6000))
    (folder / "pairs.jsonl").write_text(lines)
    path.write_text(json.dumps(settings, indent=1))
    return folder


def _train(flags: str, out: Path, data: Sequence[str] = ()) -> None:
    given = ["--data", *data] if data else []
    if code := cli.main([*flags.split(), *ALWAYS.split(), "--out", str(out), *given]):
        raise UserError(f"python -m experiments.train {flags} ended with code {code}")


def losses(out: Path, size: str, folder: Path, arms: Sequence[str], until: float) -> Found:
    """Losses of each arm and seed, trained now or before; of arms and seeds in the order of their importance.

    Args:
        out: folder of runs. size: a name of `SIZES`. folder: of the checkpoint. arms: names.
        until: the time after which no run begins, as of `time.monotonic`.
    """
    setting, found = SIZES[size], Found()
    for seed in range(SEEDS):
        for arm in arms:
            start, flags = ARMS[arm]
            run = f"finetuning_{size}_{arm.replace(' ', '_')}_{seed}"
            recipe = flags.split()[1]
            path = out / run / recipe
            if not (path / "result.json").exists():
                if time.monotonic() > until:
                    continue
                rates = setting.full if start == "full" else setting.lora
                how = f"{setting.then} {rates} {flags} --init {folder} --seed {seed} --run {run}"
                _train(how, out, [str(folder / "pairs.jsonl")])
            found.setdefault(arm, {})[seed] = read(path)
    return found


def read(path: Path) -> dict[str, float]:
    """Losses of a run: of its first step, before any update, of its last tenth, and of validation after the last."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    training = [line["loss"] for line in lines if "loss" in line]
    valid = [line["valid_loss"] for line in lines if "valid_loss" in line]
    return {START: training[0], "training": float(np.mean(training[-len(training) // 10 :])), "validation": valid[-1]}


def rows(found: Found, size: str) -> list[Row]:
    """Means over seeds, differences from bf16 with the same seeds, and the spread of these."""
    table, entries = f"Fine-tuning, {size}", list[Row]()
    for arm, runs in found.items():
        for metric, name in METRICS.items():
            mean = float(np.mean([run[metric] for run in runs.values()]))
            entries.append(Row(arm, name, mean, "nats/token", table=table, pivot=(arm, name)))
            both = [seed for seed in runs if seed in found.get(BASE, {})]
            if arm != BASE and both:
                gaps = [100 * (runs[seed][metric] / found[BASE][seed][metric] - 1) for seed in both]
                for label, value in ((f"{metric}: % above bf16", np.mean(gaps)), (f"{metric}: spread", np.ptp(gaps))):
                    entries.append(Row(arm, label, float(value), "%", table=table, pivot=(arm, label)))
        entries.append(Row(arm, "seeds", len(runs), table=table, pivot=(arm, "seeds")))
    first = [run[START] for run in found.get(BASE, {}).values()]
    if first:
        entries.append(Row(START, METRICS["training"], float(np.mean(first)), "nats/token", table=table,
                           pivot=(START, METRICS["training"])))  # fmt: skip
    return entries


def notes(size: str, data: Sequence[str]) -> list[str]:
    """What was trained on what."""
    setting = SIZES[size]
    text = "the text of --data" if data else "the standard library's sources and docs, whose docstrings it has seen"
    return [
        f"The checkpoint: {setting.model} {setting.first}, bf16, on {text}, written as a checkpoint of Hugging Face "
        "and read again. Then questions about functions and classes of Python's standard library, answers from their "
        f"docstrings, loss of answers alone: {setting.then}; all weights {setting.full}; adapters {setting.lora}, with "
        "products of te_current on codes of e4m3 and of bf16 on bf16.",
        f"'{START}' is the loss of the first step, before any update. Training loss is the mean of the last tenth of "
        "the steps; differences are from bf16 with the same seed, the spread is from the least to the largest of them.",
    ]


def main() -> int:
    """Trains what is missing, and regenerates results/CARD/finetuning.json; 1 where runs are missing still."""
    parser = common.parser(__doc__)
    parser.add_argument("--data", nargs="*", default=[], help="text of the checkpoint, as experiments.train takes it")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model (default: tiny)")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="which to train (default: all)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no run begins")
    options = parser.parse_args()
    until = time.monotonic() + options.limit
    # Seeds share programs.
    jax.config.update("jax_compilation_cache_dir", str(options.out / "programs"))
    try:
        folder = checkpoint(options.out, options.size, options.data)
        found = losses(options.out, options.size, folder, options.arms, until)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments = f"--size {options.size}" + (" --data 'books/*.txt'" if options.data else "")
    title = "Fine-tuning in 8 bits, and adapters on an 8-bit base, beside bf16"
    common.write(
        "finetuning", title, rows(found, options.size), notes(options.size, options.data), None, options.results,
        arguments=arguments,
    )  # fmt: skip
    short = [arm for arm in options.arms if len(found.get(arm, {})) < SEEDS]
    if short:
        print(f"not finished: {', '.join(short)}; give the same command again")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
