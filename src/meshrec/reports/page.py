"""Self-contained HTML pages. All pages share one skeleton, one style, and one set of parts."""

import json
from importlib.resources import files
from string import Template
from typing import Any


def to_page(script: str, data: Any) -> str:
    """Return a page as HTML.

    Args:
        script: the file of this package that draws the page, such as ``plan.js``. It can use the parts of
            ``page.js``.
        data: plain JSON types, which the script finds as ``data``.
    """
    # "</" would end the script element inside a name.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return Template(_read("page.html")).substitute(
        style=_read("page.css"), data=text, shared=_read("page.js"), script=_read(script)
    )


def _read(name: str) -> str:
    return files("meshrec.reports").joinpath(name).read_text(encoding="utf-8").strip()
