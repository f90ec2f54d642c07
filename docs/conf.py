"""Sphinx's settings: `make docs` builds docs/_build/html, where a warning is an error."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

import latex2mathml.converter  # noqa: E402
from docutils.nodes import SkipNode  # noqa: E402
from generate import pages  # noqa: E402

import fp8jax  # noqa: E402

project = "fp8jax"
author = "the fp8jax authors"
copyright = "the fp8jax authors, Apache 2.0"
version = release = fp8jax.__version__

extensions = ["myst_nb", "sphinx_copybutton"]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
exclude_patterns = ["_build", "examples", "generate", "README.md"]

python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# A name such as Recipe stands in two modules; which one a signature means is told by its page.
suppress_warnings = ["ref.python"]

# Formulas are MathML, made when the site is built: every browser shows them, and no script is fetched.
html_math_renderer = "mathml"

html_theme = "furo"
html_title = f"fp8jax {fp8jax.__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}


def _mathml(node, display):
    return latex2mathml.converter.convert(node.astext(), display=display)


def _inline(writer, node):
    writer.body.append(_mathml(node, "inline"))
    raise SkipNode


def _block(writer, node):
    writer.body.append(f'<div class="math-block">{_mathml(node, "block")}</div>')
    raise SkipNode


def _fill(app, docname, source):
    source[0] = pages.filled(source[0])


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("builder-inited", lambda app: pages.write())
    app.connect("source-read", _fill)
