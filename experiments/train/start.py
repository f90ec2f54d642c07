"""The start of training: devices, texts, and the shape and weights of a Hugging Face checkpoint (`--init`).

`experiments.hub` reads the checkpoint. It is imported only with `--init`.
"""

import dataclasses
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

import fp8jax
from experiments import mesh
from experiments.errors import UserError
from experiments.models.llama import LlamaConfig
from experiments.text import chat, data, packing, records
from experiments.text.packing import Document
from experiments.text.tokenizer import Tokenizer
from experiments.train import experts, parallel, tensor
from experiments.train.config import Config, Optim, flag


@dataclasses.dataclass(frozen=True)
class CheckpointTokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
        folder: folder of the checkpoint.
        vocab: rows of the embedding table; there may be fewer ids.
        model: tokenizer of the library tokenizers.
        begins: id of the start of a text, or None.
        ends: id of the end of a text, or None.
    """

    folder: Path
    vocab: int
    model: tokenizers.Tokenizer
    begins: int | None
    ends: int | None

    def encode(self, documents: Sequence[str]) -> np.ndarray:
        """Returns one array of ids for all documents. Each starts with `begins`, or with `ends` if that is None."""
        first = self.begins if self.begins is not None else self.ends
        dtype = np.uint16 if self.vocab <= 2**16 else np.uint32
        encoded = self.model.encode_batch(list(documents), add_special_tokens=False)
        return np.concatenate([np.array([*([] if first is None else [first]), *e.ids], dtype) for e in encoded])

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.model.decode(list(map(int, ids))))

    def document(self, ids: Sequence[int]) -> Document:
        """Returns a text with start and end tokens; all of it counts in the loss."""
        all_ids = [*([] if self.begins is None else [self.begins]), *ids, *([] if self.ends is None else [self.ends])]
        return Document(np.array(all_ids, np.int32), np.ones(len(all_ids), np.int8))


def devices(config: Config, recipes: Iterable[fp8jax.Recipe]) -> jax.sharding.Mesh:
    """Returns the mesh of a configuration.

    Raises:
        UserError: there are too few devices; or batch, model or optimizer state cannot be sharded over them; or a
            recipe cannot train the model's experts.
    """
    requested, llama = config.run.mesh, shape(config)
    try:
        for recipe in recipes if llama.experts else ():
            experts.check(recipe)
    except ValueError as error:
        raise UserError(f"--recipe {error}") from None
    try:
        chosen = mesh.choose(requested, config.data.batch, config.optim.microbatches)
        if chosen.size > 1:
            tokens = config.data.batch // config.optim.microbatches * config.data.seq_len
            for recipe in recipes:
                parallel.check(llama, recipe, chosen, tokens)
            if config.lora.lora_rank:
                tensor.check_base(llama, config.lora.base, chosen.shape[tensor.AXIS])
    except ValueError as error:
        raise UserError(f"--mesh {error}") from None
    try:
        if config.run.partition:
            mesh.check_partition(config.run.partition, chosen.shape, llama.layers)
    except ValueError as error:
        raise UserError(f"--partition {error}") from None
    return chosen


def shape(config: Config, vocab: int = 256) -> LlamaConfig:
    """Returns the shape of the checkpoint, or else of the configuration with this vocabulary size.

    Raises:
        UserError: the checkpoint cannot be read, or has learned positions, which packed documents do not support.
    """
    if not config.model.init:
        return _check_experts(config, config.model.shape(vocab))
    llama = _read_shape(resolve(config))
    if llama.learned_positions:
        raise UserError(
            f"--init {config.model.init}: packed documents need rotary positions, but this model has learned positions"
        )
    return _check_experts(config, llama)


def _read_shape(folder: Path) -> LlamaConfig:
    path = folder / "config.json"
    return _hub("families").read(path, _hub("files").read_json(path))[1]  # type: ignore[no-any-return]


def _check_experts(config: Config, llama: LlamaConfig) -> LlamaConfig:
    """Returns the shape. Raises UserError for settings that it does not support, with or without experts."""
    if llama.experts and config.lora.lora_rank:
        raise UserError(
            f"--lora-rank {config.lora.lora_rank}: adapters for experts are not supported; omit --lora-rank to train "
            "all weights"
        )
    if llama.experts and config.optim.release:
        raise UserError(f"--release {config.optim.release}: router losses are not supported; omit --release")
    for name in () if llama.experts else ("balance_coefficient", "z_coefficient"):
        if getattr(config.optim, name) != getattr(Optim, name):
            raise UserError(f"{flag(name)} requires a model with experts; omit it, or use --model moe-50m")
    return llama


def params(config: Config, mesh: jax.sharding.Mesh | None) -> Any:
    """Returns the stored parameters of the checkpoint, or None without one.

    With an 8-bit base, weights that are stored in 8 bits are `FrozenWeight`s.

    Raises:
        UserError: see `experiments.hub.load.load`.
    """
    if not config.model.init:
        return None
    codes = bool(config.lora.lora_rank) and config.lora.base != "bf16"
    return _hub("load").load(config.model.init, mesh=mesh, codes=codes).params


def tokenizer(config: Config) -> CheckpointTokenizer:
    """Returns the tokenizer of the checkpoint.

    Raises:
        UserError: see `experiments.hub.tokenizer.read`.
    """
    folder, module = resolve(config), _hub("tokenizer")
    vocab = _read_shape(folder).vocab
    model, ends = module.read(folder, vocab), module.ends(folder)
    # If a text contains the spelling of a separator, the checkpoint's tokenizer decides its ids.
    token = chat.token_of(chat.read_settings(folder), "bos_token")
    begins = None if token is None else model.token_to_id(token)
    return CheckpointTokenizer(folder, vocab, model, begins, ends[0] if ends else None)


def resolve(config: Config) -> Path:
    """Returns the checkpoint's folder."""
    folder: Path = _hub("files").resolve(config.model.init)
    return folder


def _hub(name: str) -> Any:
    try:
        return importlib.import_module(f"experiments.hub.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("experiments"):
            raise
        raise UserError(f"--init needs the package {error.name}: pip install --group hub -e .") from None


def read(config: Config) -> data.Corpus:
    """Returns the texts of a run, or records if --data has files of records or training starts from a checkpoint.

    Raises:
        UserError: see `data.read_corpus` and `records.read`.
    """
    patterns = config.data.data
    if not (config.model.init or (patterns and records.among(patterns))):
        return data.read_corpus(patterns, config.data.valid_fraction)
    chosen, files, skipped = records.read(patterns, config.data.field) if patterns else _stdlib()
    texts = tuple(record.text for record in chosen if record.text is not None)
    return data.Corpus(texts, (), files, tuple(skipped), tuple(chosen))


def _stdlib() -> tuple[list[records.TextRecord], int, list[str]]:
    corpus = data.read_corpus((), 0.5)
    return [records.TextRecord("the standard library", text) for text in corpus.train + corpus.valid], corpus.files, []


def encode(config: Config, corpus: data.Corpus, spelled: Tokenizer) -> data.Tokens | packing.Packed:
    """Returns both splits as tokens; records are packed into rows.

    Raises:
        UserError: there is too little text, or there are conversations without a chat template.
    """
    if not corpus.records:
        return data.encode(corpus, spelled, config.data.seq_len)
    chosen = corpus.records
    talks = [record for record in chosen if record.text is None]
    documents = [_as_document(text, spelled) for text in corpus.train]
    if talks:
        if not isinstance(spelled, CheckpointTokenizer):
            raise UserError(f"{talks[0].where}: conversations need the chat template of a checkpoint; set --init")
        template = chat.Template(spelled.folder)
        documents += [conversation(record, template, spelled.model) for record in talks]
    sizes = config.data
    return packing.pack(documents, sizes.valid_fraction, sizes.seq_len, keep_whole=bool(talks) and not corpus.train)


def _as_document(text: str, spelled: Tokenizer) -> Document:
    if isinstance(spelled, CheckpointTokenizer):
        return spelled.document(spelled.model.encode(text, add_special_tokens=False).ids)
    ids = spelled.encode([text]).astype(np.int32)
    return Document(ids, np.ones(len(ids), np.int8))


def conversation(record: records.TextRecord, template: chat.Template, model: tokenizers.Tokenizer) -> Document:
    """Returns the tokens of a conversation. Tokens of the assistant's messages are answers."""
    text, spans = template.spans(record.messages, record.where)
    encoded = model.encode(text, add_special_tokens=False)
    answers = np.zeros(len(encoded.ids), np.int8)
    for i, (start, end) in enumerate(encoded.offsets):
        answers[i] = any(first <= start and end <= last and end > start for first, last in spans)
    return Document(np.array(encoded.ids, np.int32), answers)


def prompt(tokens: data.Tokens | packing.Packed, longest: int) -> list[int]:
    """Returns the prompt of the sample: the start of the validation text, or of its first document up to an answer."""
    if longest < 1:
        return []
    if isinstance(tokens, data.Tokens):
        return [int(i) for i in tokens.valid[:longest]]
    ids, answers, segments = tokens.valid[0]
    size = int((segments == 1).sum())
    first = int(np.argmax(answers[:size])) if not answers[1:2].any() else size
    return [int(i) for i in ids[: min(longest, first or size)]]
