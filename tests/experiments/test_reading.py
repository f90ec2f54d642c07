"""Untrusted files: pipes are rejected by name, and JSON that Python cannot represent is an error."""

import json
import math
import os
import shutil

import numpy as np
import pytest

from experiments.errors import UserError
from experiments.files import parse_json, read_bytes, read_text
from experiments.text import chat, data, records, tokenizer
from experiments.train import cli, folders, lock, report, trained
from experiments.train.result import read_result

# Lines that Python cannot read, or that are not valid text, and their messages.
LINES = {
    '{"text":"ok","x":' + "[" * 50_000 + "]" * 50_000 + "}": "nested too deep",
    '{"text":"ok","x":' + '{"a":' * 50_000 + "1" + "}" * 50_001: "nested too deep",
    "[" * 100_000: "nested too deep",
    '{"text":"ok","n":' + "9" * 5000 + "}": "Exceeds the limit",
    '{"text":"ok","n":-' + "9" * 5000 + "}": "Exceeds the limit",
    '{"text":"ab \\ud800 cd"}': r"\\ud800 is half of a surrogate pair",
    '{"text":"ab \\uDC00 cd"}': r"\\udc00 is half of a surrogate pair",
    '{"text":"ok","other":["\\udfff"]}': r"\\udfff is half of a surrogate pair",
    '{"text":"ok","\\ud800":1}': r"\\ud800 is half of a surrogate pair",
    '{"text":"a\\u0000b"}': r"text contains the character U\+0000",
    '{"messages":[{"role":"assistant","content":"\\u0000"}]}': r"message 0 contains the character U\+0000",
    '{"text":' + "[" * 300 + "]" * 300 + "}": "text is .*not a text",
}
IDS = ["deep", "deep object", "open", "digits", "negative", "high", "low", "elsewhere", "key", "zero", "zero of one",
       "no text"]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=IDS)
def test_a_line_that_python_cannot_represent_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(UserError, match=f"{path}:2: .*{LINES[line]}") as error:
        records.read([str(path)], "text")
    assert "\n" not in str(error.value)


def test_pairs_of_surrogates_and_all_other_characters_are_read(tmp_path):
    texts = ["\U0001f600 é", "".join(map(chr, range(1, 300))), "\uffff\U0010ffff"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert [r.text for r in records.read([str(tmp_path / "a.jsonl")], "text")[0]] == texts
    assert parse_json('["\\\\ud800", "\\uD83D\\uDE00"]') == ["\\ud800", "\U0001f600"]


def test_a_zero_byte_is_no_text_of_bytes():
    with pytest.raises(UserError, match=r"a text contains the character U\+0000"):
        tokenizer.Bytes().encode(["a", "b\0"])
    np.testing.assert_array_equal(tokenizer.Bytes().encode(["a", "b"]), [0, 97, 0, 98])


READERS = {
    "read_bytes": (read_bytes, OSError),
    "read_text": (read_text, OSError),
    "data": (lambda path: data.read_corpus([str(path)], 0.5), UserError),
    "records": (lambda path: records.read([str(path)], "text"), UserError),
    "text": (data.read_text, UserError),
    "pairs": (tokenizer.BytePair.load, UserError),
    "config": (lambda path: folders.read_config(path.parent), UserError),
    "all of config": (lambda path: trained.read_config(path.parent), UserError),
    "result": (read_result, OSError),
    "metrics": (report.read_metrics, UserError),
    "settings": (lambda path: chat.read_settings(path.parent), UserError),
    "template": (lambda path: chat.Template(path.parent), UserError),
}
NAMES = {"settings": "tokenizer_config.json", "template": "chat_template.jinja", "records": "a.jsonl"}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused_by_name_and_not_waited_for(tmp_path, name):
    read, kind = READERS[name]
    path = tmp_path / NAMES.get(name, "config.json")
    os.mkfifo(path)
    with pytest.raises(
        kind, match=rf"{path.name}.*it is a pipe, not a regular file|a pipe, not a regular file.*{path.name}"
    ):
        read(path)
    assert lock._read_owner(path) == "another process"


def test_other_files_that_are_not_regular_are_told_apart(tmp_path):
    with pytest.raises(OSError, match="it is a folder, not a regular file"):
        read_bytes(tmp_path)
    with pytest.raises(OSError, match="it is a device, not a regular file"):
        read_bytes("/dev/null")
    with pytest.raises(UserError, match="--data /dev/null: it is a device, not a regular file; copy"):
        data.find_files(["/dev/null"])
    (tmp_path / "a").write_bytes("é\r\nb".encode())
    (tmp_path / "b").symlink_to("a")
    assert (read_bytes(tmp_path / "b"), read_text(tmp_path / "b")) == ("é\r\nb".encode(), "é\nb")
    (tmp_path / "a").write_bytes(b"a\rb\r\n\rc\n")
    assert read_text(tmp_path / "b") == "a\nb\n\nc\n"


def test_a_template_that_is_none_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ["x", {"name": "other"}]}')
    with pytest.raises(UserError, match="has no chat template"):
        chat.Template(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja cannot be read"):
        chat.Template(tmp_path)


def test_rows_of_metrics_that_are_no_numbers_are_left_out(tmp_path):
    row = {"step": 1, "loss": 1.5, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 5.0}
    wrong = [row | {"loss": "1.5"}, row | {"step": True}, row | {"lr": None}, row | {"mfu": [1]}]
    lines = [json.dumps(x) for x in (row, *wrong, row | {"step": 2, "loss": math.nan})]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, *LINES]))
    assert [(x["step"], str(x["loss"])) for x in report.read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, "1.5"),
        (2, "nan"),
    ]


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [("data", "seq_len", "16"), ("data", "batch", 0), ("optim", "lr", [1]), ("run", "keep", None), ("seed", "", "0")],
)
def test_a_configuration_of_a_run_that_cannot_be_is_named(finished, tmp_path, section, field, value):
    content = json.loads((finished / "config.json").read_text())
    trained.read_config(finished)
    if field:
        content["all"][section][field] = value
    else:
        content["all"][section] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        trained.read_config(tmp_path)


def test_a_run_ends_in_a_line_where_its_data_or_its_result_is_a_pipe(argv, finished, out, tmp_path, capsys):
    os.mkfifo(tmp_path / "a.txt")
    where = argv.index("--data")
    assert cli.main([*argv[:where], *argv[where + 2 :], "--data", str(tmp_path / "a.txt"), "--run", "pipe"]) == 2
    assert capsys.readouterr().err == (
        f"error: --data {tmp_path / 'a.txt'}: it is a pipe, not a regular file; copy its content to a regular file\n"
    )
    shutil.copytree(finished, out / "piped")
    (out / "piped" / "bf16" / "result.json").unlink()
    os.mkfifo(out / "piped" / "bf16" / "result.json")
    assert cli.main([*argv, "--recipe", "bf16", "--run", "piped"]) == 2
    assert "bf16/result.json cannot be read (it is a pipe, not a regular file); move it away" in capsys.readouterr().err
