"""Report pages as self-contained HTML. They share a skeleton, a style sheet and JavaScript components."""

import json
from importlib.resources import files
from string import Template
from typing import Any


def to_page(script: str, data: Any) -> str:
    """Return the HTML for a report page, with all scripts, styles and data in it.

    Args:
        script: JavaScript file in this package, such as ``plan.js``, which draws the page. It can use the
            components in ``page.js``.
        data: JSON types, which the script reads as the variable ``data``.
    """
    # "</script" in a name would end the script element, and "<!--<script" would keep it open.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template(_read("page.html")).substitute(
        style=_read("page.css"), data=text, shared=_read("page.js"), script=_read(script)
    )


def _read(name: str) -> str:
    """Return the text of a packaged script or style sheet."""
    return files("meshrec.reports").joinpath(name).read_text(encoding="utf-8").strip()
