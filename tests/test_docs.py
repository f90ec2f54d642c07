"""The documentation: every public name has a page, every code block runs, every placeholder is filled."""

import os
import pathlib
import re
import sys

import jax
import matplotlib
import matplotlib.pyplot as plt
import pytest

import fp8jax
from tests import blocks

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

from generate import api, figures, links, names, packages, pages  # noqa: E402

# Pages that people write; the others are made.
WRITTEN = sorted(
    path for path in DOCS.rglob("*.md")
    if not {"_build", "api", "results", "examples"} & set(path.relative_to(DOCS).parts) and path.name != "changelog.md"
)  # fmt: skip
# Pages that are notebooks are run when the site is built, too; one_card.md and faq.md take longest.
WITH_CODE = [
    pytest.param(
        path,
        marks=[pytest.mark.slow] if "mystnb" in path.read_text() or path.stem in ("one_card", "faq") else [],
        id=str(path.relative_to(DOCS)),
    )
    for path in WRITTEN if blocks.blocks(path.read_text())
]  # fmt: skip
EXAMPLES = names.examples()
HEADINGS = ("Numerics", "Storage", "Measurements", "When not to use it", "Source")


@pytest.fixture(autouse=True)
def drawn_aside(monkeypatch, tmp_path):
    """Suppresses the display of plots, and restores the mesh after a page."""
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    before = jax.sharding.get_mesh()
    yield
    plt.close("all")
    jax.set_mesh(before)


@pytest.mark.parametrize("path", WITH_CODE)
def test_code_of_a_page_runs(path):
    namespace: dict = {}
    for i, block in enumerate(blocks.blocks(path.read_text())):
        blocks.run(block, f"{path.name}, block {i + 1}", namespace)


@pytest.mark.parametrize("path", sorted(EXAMPLES))
def test_the_example_of_a_name_runs_and_names_it(path):
    shared = [other for other in sorted(EXAMPLES) if EXAMPLES[other].code == EXAMPLES[path].code]
    if path == shared[0]:
        blocks.run(EXAMPLES[path].code, path, {})
    if path not in ("fp8jax.dist.Partition", "fp8jax.dist.Plan", "fp8jax.dist.Factors", "fp8jax.QTensor",
                    "fp8jax.QuantizedWeight", "fp8jax.recipes.Device"):  # fmt: skip
        assert path in EXAMPLES[path].code, "an example of a name has the name in it"


def test_every_public_name_has_an_example_and_a_page(monkeypatch):
    public = {name.path for name in names.public()}
    assert len(public) > 100
    assert public == set(EXAMPLES)
    assert {f"fp8jax.{name}" for name in dir(fp8jax) if not name.startswith("__")} <= public | set(names.SPACES)
    pages = api.written()
    for name in names.public():
        page = pages[f"api/{name.path}.md"]
        assert page.startswith(f"# {name.path}\n"), name
        assert EXAMPLES[name.path].code.strip() in page
        assert f"{name.name} <{name.path}>" in pages[f"api/{name.space}.md"]
    index = pages["api/index.md"]
    first = {f"fp8jax.{path}" for path in api.FIRST.split()}
    assert len(first) == 10
    assert {path: index.count(f"`{path} <{path}>`") for path in public} == {
        path: 1 + (path in first) for path in public
    }
    with monkeypatch.context() as patch:
        patch.setitem(api.TASKS, "Rematerialization", "save_quantized quantize unheard")
        with pytest.raises(
            ValueError, match=r"CHECKPOINT_NAMES.*policies.with_products.*fp8jax\.quantize, fp8jax\.unheard$"
        ):
            api.written()
    monkeypatch.setattr(fp8jax, "unheard", lambda: None, raising=False)
    monkeypatch.setattr(fp8jax, "__all__", [*fp8jax.__all__, "unheard"])
    with pytest.raises(ValueError, match=r"without an example in docs/examples: fp8jax\.unheard"):
        api.written()


def test_a_docstring_becomes_fields_code_and_links():
    text = """First line of `linear`.

    Args:
        x: an array,
            of two axes.
        w, b: of `fp8jax.other`.

    Raises:
        ValueError, TypeError: as `linear`.

    Examples:
        >>> 1 + 1
        2
    """
    page = api.markdown("\n".join(line[4:] if line.startswith("    ") else line for line in text.split("\n")),
                        {"fp8jax.linear", "fp8jax.other"}, "fp8jax.einsum")  # fmt: skip
    assert page.startswith("First line of {py:obj}`linear <fp8jax.linear>`.")
    assert ":param x: an array, of two axes.\n:param w, b: of {py:obj}`fp8jax.other <fp8jax.other>`." in page
    assert ":raises ValueError: as" in page
    assert ":raises TypeError: as" in page
    assert "```pycon\n>>> 1 + 1\n2\n```" in page


def test_signatures_are_those_of_the_source():
    assert api.signature(fp8jax.quantize) == "(x: Array, spec: QuantSpec | str, *, key: Array | None=None) -> QTensor"
    assert "known" not in api.signature(fp8jax.linear)
    assert api.signature(fp8jax.recipes.Comm).startswith("(gradients: ")


def test_every_recipe_has_a_page_with_all_its_parts():
    for name in fp8jax.recipes.NAMES:
        text = (DOCS / "recipes" / f"{name}.md").read_text()
        assert text.startswith(f"# {name}: ")
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == list(HEADINGS), name
        assert f"<!-- made: stored {name} -->\n" in text
        assert f"<!-- made: measured {name} -->\n" in text
        assert re.search(rf"^{name}$", (DOCS / "recipes" / "index.md").read_text(), re.MULTILINE)
    assert {path.stem for path in (DOCS / "recipes").glob("*.md")} == {*fp8jax.recipes.NAMES, "index"}


def step_ratio(recipe):
    """Returns the speed of a training step on one H200 over bf16, from the results file."""
    (ratio,) = (row["ratio"] for row in figures.results()["step"]["h200"]["rows"]
                if (row["impl"], row["metric"], row["baseline"]) == (recipe, "step", "bf16, recomputed")
                and row["case"].startswith("1b, one GPU"))  # fmt: skip
    return ratio


def test_places_are_filled_with_what_the_files_give():
    filled = {path: pages.filled(path.read_text()) for path in WRITTEN}
    assert not [path for path, text in filled.items() if "<!-- made:" in text]
    coat = filled[DOCS / "recipes" / "coat.md"]
    assert fp8jax.recipes.coat().explain() in coat
    assert f"[{step_ratio('coat'):.2f}x bf16 (H200)](/results/step.md)" in coat
    assert "| `coat_fast`" not in coat
    with pytest.raises(KeyError, match="nothing is made under 'nothing'"):
        pages.filled("<!-- made: nothing -->")


def test_recipes_of_the_table_exist_and_their_figures_are_theirs():
    for choice in figures.CHOICES:
        assert choice.recipe in fp8jax.recipes.NAMES
        for figure in choice.figures:
            assert list(figures.cards(figures.LOOKS[figure], choice.recipe)), (choice.recipe, figure)
    (line,) = [line for line in figures.chosen().split("\n") if line.startswith("| `moss` |")]
    assert line.split(" | ")[3].startswith(f"[{step_ratio('moss'):.2f}x bf16](/results/step.md)")
    assert figures.chosen().startswith("| recipe | figure | H100 | H200 |")


def test_roles_and_paths_in_pages_lead_somewhere():
    public = {name.path for name in names.public()}
    existing = {str(path.relative_to(DOCS).with_suffix("")) for path in WRITTEN} | {"changelog"}
    existing |= {path.removesuffix(".md") for path in [*pages.results(), *api.written()]}
    for path in WRITTEN:
        text = pages.filled(path.read_text())
        for target in re.findall(r"\{py:obj\}`(?:[^`<]*<)?([\w.]+)>?`", text):
            assert target in public, (path.name, target)
        for target in re.findall(r"\{doc\}`(?:[^`<]*<)?([\w./]+)>?`", text):
            target_page = target.lstrip("/") if target.startswith("/") else os.path.normpath(
                path.relative_to(DOCS).parent / target)  # fmt: skip
            assert target_page in existing, (path.name, target)


def test_code_of_other_libraries_is_read_by_python_at_least():
    actual = 0
    for path in WRITTEN:
        for block in re.findall(r"^```py\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            compile(block, path.name, "exec")
            actual += 1
    assert actual >= 5


def test_output_that_a_page_tells_is_checked():
    blocks.run("print(1 + 1)  # 2\n\nif True:\n    print(3)  # 4\n", "page", {})
    with pytest.raises(AssertionError, match="page: print"):
        blocks.run("x = 3\nprint(x)  # 2\n", "page", {})
    assert blocks.blocks("```python\na\n```\n```py\nb\n```\n```{code-cell} python\n:tags: [x]\nc\n```\n") == [
        "a\n",
        "c\n",
    ]


def test_packages_are_drawn_from_the_imports():
    arrows, picture = packages.arrows(), packages.picture()
    assert arrows["core", "ops"] > 20
    assert ("ops", "core") not in arrows
    rank = {name: y for y, row in enumerate(packages.ROWS) for name in row}
    for origin, into in arrows:
        assert rank[origin] <= rank[into], (origin, into)
        assert f"<title>{into} imports {arrows[origin, into]} names of {origin}</title>" in picture


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">x</a><a href="b.html#gone">y</a><a href="c.html">z</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="https://else.org/">x</a><a href="#there">y</a>')
    assert links.broken(tmp_path) == ["a.html: b.html#gone", "a.html: c.html"]


def test_commands_in_pages_are_those_of_the_program():
    """Modules exist, and flags are fields of a program's settings."""
    sources = "\n".join(path.read_text() for path in (ROOT / "experiments").rglob("*.py"))
    actual = 0
    for path in [ROOT / "README.md", *WRITTEN]:
        for line in re.findall(r"python -m (experiments[^\n`#;]*)", path.read_text()):
            module, *words = line.split()
            place = ROOT / module.replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), (path.name, line)
            for flag in re.findall(r"--([\w-]+)", " ".join(words)):
                assert re.search(rf"\b{flag.replace('-', '_')}\b|--{flag}\b", sources), (path.name, flag)
                actual += 1
    assert actual > 10
