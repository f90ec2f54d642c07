"""Writes tests/data/hub with transformers (5.24.0, torch 2.14.1): `python -m tests.experiments.make_hub_golden`.

One file per case: config.json from transformers, names and shapes of tensors, and for drawn weights the fp32 logits of
tokens and the greedy continuation.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from tests.experiments import hub_cases as cases


def make(case: str) -> torch.nn.Module:
    """Returns transformers' model of a case, with drawn weights."""
    kind, settings = cases.CASES[case]
    auto = transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        auto.from_config(getattr(transformers, kind)(**settings)).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        cases.write(folder, config, shapes(folder))
        return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def shapes(folder: Path) -> dict[str, list[int]]:
    """Returns names and shapes of the tensors of a checkpoint in one file, with separate experts."""
    return {name: list(x.shape) for name, x in load_file(folder / "model.safetensors").items()}


def main() -> None:
    cases.GOLDEN.mkdir(parents=True, exist_ok=True)
    for case in sys.argv[1:] or cases.CASES:
        model = make(case)
        tokens = np.random.RandomState(0).randint(3, cases.VOCAB, (2, cases.LENGTH))
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits.numpy()
            greedy = model.generate(
                torch.from_numpy(tokens[:1, :7]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        model.config.architectures = [type(model).__name__]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            named = shapes(Path(folder))
        config = json.loads(model.config.to_json_string())
        config.pop("dtype")
        content = {
            "config": config,
            "shapes": named,
            "tokens": tokens.tolist(),
            "logits": [[[float(f"{x:.7g}") for x in row] for row in rows] for rows in logits.tolist()],
            "greedy": greedy[0].tolist(),
        }
        (cases.GOLDEN / f"{case}.json").write_text(json.dumps(content) + "\n")
        print(case, np.abs(logits).mean(), len(set(greedy[0].tolist())))


if __name__ == "__main__":
    main()
