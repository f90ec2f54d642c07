"""Texts and conversations from files, and messages about invalid lines."""

import json

import pytest

import fp8jax  # noqa: F401 (settings of JAX first)
from experiments.errors import UserError
from experiments.text import chat, records
from experiments.train import cli

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def write(path, *lines, end="\n"):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
    return str(path)


def test_lines_rows_and_texts_are_read_with_their_places(tmp_path):
    lines = write(tmp_path / "a.jsonl", {"text": "one"}, {"messages": TALK, "id": 3}, {"text": "two"}, end="")
    (tmp_path / "b.txt").write_text("three\nlines")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    (tmp_path / "blank.txt").write_text(" \n")
    actual, files, skipped = records.read([str(tmp_path)], "text")
    assert [r.text for r in actual] == ["one", None, "two", "three\nlines"]
    assert [r.where.removeprefix(lines) for r in actual[:3]] == [":1", ":2", ":3"]
    assert actual[1].messages == tuple(TALK)
    assert (files, skipped) == (4, [str(tmp_path / "c.bin")])
    instruction = {"role": "developer", "content": "be short"}
    assert records.record({"messages": [instruction, *TALK]}, "text", "here").messages[0] == instruction
    other = write(tmp_path / "d.ndjson", {"body": "x"})
    assert records.read([other], "body")[0][0].text == "x"
    assert records.among([other])
    assert not records.among([str(tmp_path / "b.txt")])


def test_files_without_texts_and_named_ones_that_are_none_are_refused(tmp_path):
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(UserError, match=r"c\.bin: the file is binary or not UTF-8; convert it, or exclude it"):
        records.read([str(tmp_path / "c.bin")], "text")
    with pytest.raises(UserError, match=f"--data {tmp_path}: there is no text or conversation in 2 files"):
        records.read([str(tmp_path)], "text")


def test_line_breaks_within_texts_end_no_line(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a\\u2028b\u2028c"}', {"text": "second"})
    actual = records.read([path], "text")[0]
    assert [r.text for r in actual] == ["a\u2028b\u2028c", "second"]
    assert actual[1].where == f"{path}:2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "an empty line"),
        ("   ", "an empty line"),
        ('{"text": "cut', r"not valid JSON \(Unterminated string starting at at column 10\)"),
        ("[1]", r"expected a JSON object, got \[1\]"),
        ('{"body": "x"}', r"neither messages nor text \(it has body\)"),
        ('{"text": 3}', "text is 3, not a text"),
        ('{"text": ""}', "text is empty, not a text"),
        ('{"messages": []}', "is not a list of messages"),
        ('{"messages": [{"role": "user"}]}', "message 0 has no text as its content"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "message 0 has the role 'robot'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message has the role assistant"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"}, line, {"text": "three"})
    with pytest.raises(UserError, match=f"a.jsonl:3: .*{message}") as error:
        records.read([path], "text")
    assert str(error.value).startswith(f"{path}:3: ")


def test_a_line_that_is_no_utf8_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:2: not UTF-8"):
        records.read([str(path)], "text")


def test_rows_of_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"messages": [TALK, TALK]}), path)
    assert records.read([str(path)], "text")[0][1] == records.TextRecord(f"{path}:2", None, tuple(TALK))
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(UserError, match=r"a.parquet:2: text is null"):
        records.read([str(path)], "text")
    with pytest.raises(UserError, match="has the columns text: neither messages nor body"):
        records.read([str(path)], "body")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"a.parquet cannot be read"):
        records.read([str(path)], "text")


def test_an_answer_begins_after_its_header_and_has_its_end(tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    talk = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    text, spans = chat.Template(tmp_path).spans(talk, "f:1")
    assert text == "[user]u;[assistant]a;[user]u;[assistant]a;"
    assert [text[start:end] for start, end in spans] == ["a;", "a;"]


def test_parquet_without_its_package_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="pip install pyarrow"):
        records.read([str(tmp_path / "a.parquet")], "text")


def test_a_run_on_lines_packs_and_resumes_and_a_broken_line_loses_nothing(argv, tmp_path, out, capsys):
    path = tmp_path / "texts.jsonl"
    lines = [{"text": " ".join(f"w{(i * 37 + j * j) % 101}" for j in range(3 + i % 5))} for i in range(60)]
    write(path, *lines)
    where = argv.index("--data")
    flags = [*argv[:where], *argv[where + 2 :], "--data", str(path), "--recipe", "bf16", "--valid-fraction", "0.2"]
    assert cli.main([*flags, "--run", "lines"]) == 0
    header = " ".join(capsys.readouterr().out.split())
    assert f"text {path} (1 file)" in header
    assert "rows of records" in header
    whole = json.loads((out / "lines" / "bf16" / "result.json").read_text())["result"]
    folder = out / "lines" / "bf16"
    (folder / "result.json").unlink()
    __import__("shutil").rmtree(folder / "checkpoints" / "8")
    write(path, *lines[:10], "", *lines[10:])
    assert cli.main([*flags, "--run", "lines"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{path}:11: an empty line" in error
    write(path, *lines)
    assert cli.main([*flags, "--run", "lines"]) == 0
    assert "resuming from step 4" in capsys.readouterr().out
    again = json.loads((folder / "result.json").read_text())["result"]
    assert again["valid_loss"] == whole["valid_loss"]
    write(path, *lines, {"text": "one more"})
    assert cli.main([*flags, "--run", "lines"]) == 2
    assert "the text of --data differs" in capsys.readouterr().err


def test_conversations_need_a_checkpoint(argv, tmp_path, capsys):
    path = write(tmp_path / "talks.jsonl", {"messages": TALK})
    where = argv.index("--data")
    assert cli.main([*argv[:where], *argv[where + 2 :], "--data", path, "--run", "talks"]) == 2
    assert f"{path}:1: conversations need the chat template of a checkpoint; set --init" in capsys.readouterr().err
