"""Tables and sentences fit the terminal without losing content."""

import itertools
import re

import pytest

import fp8jax
from fp8jax.core import tables

HEAD = ("layer", "kind", "kernel", "forward", "saved", "chosen by")
PAIR = "e4m3:tensor x e4m3:tensor"
ROWS = [
    HEAD,
    ("blocks/0/attention/query", "LinearGeneral", "(64,4,16)", PAIR, "e4m3:tensor", "the recipe"),
    ("blocks/0/head", "Linear", "(64,64)", "-", "bf16", "a rule that says at length why it leaves this layer alone"),
    ("blocks/1/attention/query", "LinearGeneral", "(64,4,16)", PAIR, "e4m3:tensor", "the recipe"),
]


def words(text):
    return sorted(re.findall(r"[^\s]+", text))


def test_a_wide_terminal_has_one_line_a_row():
    lines = tables.table(ROWS, 3, 200).splitlines()
    assert [re.split(r" {2,}", line) for line in lines] == [list(row) for row in ROWS]
    # Columns stand below each other.
    assert len({line.index(cell) for line, cell in zip(lines, ["forward", PAIR, "-  ", PAIR], strict=True)}) == 1


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_narrow_one_loses_nothing(width):
    text = tables.table(ROWS, 3, width)
    assert max(map(len, text.splitlines())) <= width
    joined = "".join(text.split())
    for row in ROWS[1:]:
        for cell in row[3:]:
            assert cell == "-" or "".join(cell.split()) in joined
    # Values that all rows share are written once, below both.
    assert text.count("the recipe") == 1
    order = [text.index(part) for part in ("blocks/0/", "blocks/1/", "the recipe", "head")]
    assert order == sorted(order)


def test_a_little_too_wide_is_wrapped_within_its_columns():
    rows = [
        ("role", "stored in"),
        ("first moment", "e4m3:group128+expand"),
        ("what is long", "computed again by a norm"),
    ]
    text = tables.table(rows, 1, 35)
    assert text.splitlines() == [
        "role          stored in",
        "first moment  e4m3:group128+expand",
        "what is long  computed again by a",
        "              norm",
    ]


def test_a_head_alone():
    assert tables.table([HEAD], 3, 200) == "  ".join(HEAD)
    assert max(map(len, tables.table([HEAD], 3, 40).splitlines())) <= 40


@pytest.mark.parametrize("width", [12, 20, 33, 79])
def test_sentences(width):
    text = "  WARNING: 14 products of e5m2 x e4m3 run in fp32: a/path/of/many/folders/and/a_name.py:10, so look there"
    folded = tables.sentence(text, width, 4)
    first, *rest = folded.splitlines()
    assert first.startswith("  W")
    assert rest
    assert all(line.startswith("    ") and line[4] != " " for line in rest)
    assert max(map(len, folded.splitlines())) <= width
    assert "".join(folded.split()) == "".join(text.split())
    assert width < 79 or words(folded) == words(text)


def expand(text):
    """Expands a text in brace notation to paths, as a shell does."""
    pieces = []
    for piece in re.split(r"(\{[^}]*\})", text):
        names = []
        for name in piece.strip("{}").split(",") if piece.startswith("{") else [piece]:
            first, dots, last = name.partition("..")
            names += [str(n) for n in range(int(first), int(last) + 1)] if dots else [name]
        pieces.append(names)
    return ["".join(names) for names in itertools.product(*pieces)]


@pytest.mark.parametrize(
    ("paths", "folded"),
    [
        ([f"blocks/{i}/{name}" for i in range(24) for name in ("q", "k")], ["blocks/{0..23}/{q,k}"]),
        ([f"h_{i}/fc{j}" for i in range(3) for j in (1, 2)], ["h_{0..2}/fc{1..2}"]),
        (["a/0/w", "a/3/w", "a/4/w", "a/5/w"], ["a/{0,3..5}/w"]),
        (["a/0/e/0", "a/0/e/1", "a/1/e/0"], None),  # no box: more than one name, and none too much
        (["q", "k", "layer_01/w", "layer_02/w", "x1"], None),
        (["up", "up", "down"], ["{up,down}"]),
        (["11/w", "9/w", "10/w"], ["{9..11}/w"]),
    ],
)
def test_folded_paths_stand_for_the_same_paths(paths, folded):
    actual = tables.fold_paths(paths)
    assert sorted(path for text in actual for path in expand(text)) == sorted(set(paths))
    assert folded is None or actual == folded


def test_sections_have_common_columns_and_titles():
    rows = [("a/b", "1", "why it is so, at length"), ("c", "22", "")]
    text = tables.sectioned_table(("name", "n", "note"), [("First: of two", rows), ("Second", rows[:1])], 28)
    assert max(map(len, text.splitlines())) <= 28
    lines = text.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["name   n   note", "First: of two", "Second"]
    (column,) = {line.index("why") for line in lines if "why" in line}
    assert column == lines[0].index("note")
    # Whatever is wrapped in the first column stays behind the titles.
    narrow = tables.sectioned_table(("name", "note"), [("First", [("a/long/path/of/names", "why"), ("b", "x")])], 18)
    assert [line for line in narrow.splitlines() if not line.startswith("  ")] == ["name          note", "First"]


def test_narrow_columns_keep_short_cells_and_few_lines():
    rows = [
        ("blocks/{0..1}/attention", "MultiHeadDotProductAttention", "", "both operands are data, as in attention", ""),
        ("blocks/{0..1}/up", "Dense", "(64,17,192)", "nothing: LayerNorm recomputes it", "476 KiB"),
    ]
    lines = tables.sectioned_table(("layers", "operation", "shape", "why", "bytes"), [("Rows", rows)], 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 7
    for cell in ("(64,17,192)", "476 KiB", " Attention"):
        assert any(cell in line for line in lines), cell
    # A text extends over the empty cells after it.
    assert max(len(line) for line in lines if "MultiHead" in line) > lines[0].index("bytes")
    # Free text is wrapped before several names are.
    names = [f"blocks/{{0..23}}/{name}" for name in ("attn/qkv", "attn/proj", "fc1", "fc2")]
    rows = [(name, "Linear", "(128,384)", "nothing: LayerNorm recomputes it", "0 B") for name in names]
    reason = "an embedding lookup, and its use as an output head (attend), are not quantized"
    rows += [(name, "Embed", "(128,128)", reason, "") for name in ("wte", "wpe")]
    text = tables.sectioned_table(HEAD[:5], [("Rows", rows)], 112)
    assert [line.split()[0] for line in text.splitlines() if not line.startswith("   ")][2:] == [row[0] for row in rows]


def test_the_terminal_says_the_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "133")
    assert tables.terminal_width() == 133
    monkeypatch.setenv("COLUMNS", "3")
    assert tables.terminal_width() == 20
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda fd: (_ for _ in ()).throw(OSError))
    assert tables.terminal_width() == 80


@pytest.mark.parametrize("name", fp8jax.recipes.NAMES)
def test_a_recipe_fits_into_80_columns(name, monkeypatch):
    recipe = fp8jax.recipes.get(name)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, recipe.explain().splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "300")
    roles = [role for role, *_ in recipe.plan()]
    lines = recipe.explain().splitlines()
    assert all(sum(line.startswith(role) for line in lines) >= 1 for role in roles)
