"""How the documentation site is built: `make docs`. Nothing is fetched, then or by its readers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

import adapterzoo

ROOT = Path(__file__).parents[1]


def notebooks() -> str:
    """A line for each notebook of the repository: its file, and what its first cell says."""
    lines = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        title, _, rest = text.partition("\n")
        about = " ".join(rest.strip().partition("\n\n")[0].split())
        lines.append(f"- `{path.name}` **{title.lstrip('# ')}** {about}")
    return "\n".join(lines)


project = "adapterzoo"
author = "The adapterzoo authors"
project_copyright = author
version = release = adapterzoo.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

myst_enable_extensions = ["deflist", "dollarmath", "substitution"]
myst_heading_anchors = 3
myst_substitutions = {"notebooks": notebooks()}

html_theme = "furo"
html_title = f"adapterzoo {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["find.js"]
html_show_sphinx = False
html_show_copyright = False
html_math_renderer = "mathml"
copybutton_exclude = ".linenos, .gp, .go"

# docstrings write code between single backticks, as Markdown does
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# what other libraries document on their own sites, which a build without a network cannot ask; and
# what annotations name that is no part of the reference: mypy knows whether it is there
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|transformers|collections|contextlib|os|pathlib|typing|abc)\..*"),
    ("py:class", r"adapterzoo\.[\w.]+|[A-Z]\w*"),
]

FENCE = re.compile(r"^```(\w+)$")


def fences(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn the fenced blocks of a docstring into what reStructuredText calls a code block."""
    made: list[str] = []
    inside = False
    for line in lines:
        opening = FENCE.match(line)
        if opening and not inside:
            made += [f".. code-block:: {opening[1]}", ""]
            inside = True
        elif inside and line == "```":
            made.append("")
            inside = False
        else:
            made.append(f"   {line}" if inside and line else line)
    lines[:] = made


def factories(
    app: Any,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Show the fresh dict of a field as what it is; `<factory>` is no Python."""
    return signature and signature.replace("<factory>", "{}"), returns


def inline_math(translator: Any, node: nodes.math) -> None:
    """A formula within a line, in the MathML that browsers draw themselves."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block_math(translator: Any, node: nodes.math_block) -> None:
    """A formula on a line of its own."""
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Enter the above."""
    # before napoleon reads the sections
    app.connect("autodoc-process-docstring", fences, priority=400)
    app.connect("autodoc-process-signature", factories)
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    return {"parallel_read_safe": True}
