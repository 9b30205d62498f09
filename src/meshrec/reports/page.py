"""Self-contained HTML pages. All pages share skeleton, style, and components."""

import json
from importlib.resources import files
from string import Template
from typing import Any


def to_page(script: str, data: Any) -> str:
    """Return a page as HTML.

    Args:
        script: file in this package that draws the page, such as ``plan.js``. It can use the components in
            ``page.js``.
        data: plain JSON types, which the script reads as ``data``.
    """
    # "</" in a name would end the script element.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return Template(_read("page.html")).substitute(
        style=_read("page.css"), data=text, shared=_read("page.js"), script=_read(script)
    )


def _read(name: str) -> str:
    """Return the text of a packaged script or style sheet."""
    return files("meshrec.reports").joinpath(name).read_text(encoding="utf-8").strip()
