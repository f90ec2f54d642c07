"""The tokenizer of a checkpoint, and its end-of-text ids."""

from pathlib import Path

import tokenizers

from experiments.errors import UserError
from experiments.hub import files
from experiments.hub.files import read_json


def read(folder: Path, vocab: int) -> tokenizers.Tokenizer:
    """Reads a folder's tokenizer.json.

    Args:
        folder: folder of the checkpoint.
        vocab: rows of the embedding table.

    Raises:
        UserError: the file is missing or damaged, or has ids without a row in the table; see also `files.check`.
    """
    path = folder / "tokenizer.json"
    files.check(folder)
    if not path.is_file():
        other = sorted(p.name for p in folder.glob("*.model"))
        note = f"; {', '.join(other)} is not read: save it again with transformers' fast tokenizer" if other else ""
        raise UserError(f"{path} is missing{note}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} cannot be read ({error})") from None
    ids = tokenizer.get_vocab(with_added_tokens=True)
    largest = max(ids, key=lambda token: ids[token], default=None)
    if largest is not None and ids[largest] >= vocab:
        raise UserError(
            f"{path} has ids up to {ids[largest]} ({largest!r}), but the checkpoint's embedding table has {vocab} "
            "rows. It belongs to another model, or tokens were added without rows"
        )
    return tokenizer


def ends(folder: Path) -> tuple[int, ...]:
    """Returns end-of-text ids of generation_config.json, else of config.json; empty if neither has them.

    Raises:
        UserError: a value is not an id.
    """
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).exists():
            continue
        ids = read_json(folder / name).get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise UserError(f"{folder / name}: eos_token_id is {ids}, not an id or a list of ids")
        return tuple(ids)
    return ()
