"""The page that shows, for each table, bytes against loss, and the chosen precision."""

from html import escape

from meshrec.modules import DataType
from meshrec.plan.text import size_text
from meshrec.quant.budget import Choice

_TYPES = [DataType.FP32, DataType.FP16, DataType.INT8, DataType.INT4, DataType.INT2]
_STYLE = (
    "body{font:15px system-ui;margin:2em;color-scheme:light dark}table{border-collapse:collapse}"
    "td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid #8884}td:first-child{text-align:left}"
    ".chosen{font-weight:bold;background:#3a84}small{opacity:.7}"
)


def page_of(choice: Choice, title: str) -> str:
    """Return one self-contained HTML page."""
    head = "".join(f"<th>{each}</th>" for each in _TYPES)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(_cell(choice, name, each) for each in _TYPES)}</tr>"
        for name in choice.types
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1><p>{escape(summary(choice))}</p>"
        f"<table><tr><th>table</th>{head}</tr>{rows}</table>"
        "<p><small>Bytes of a table, and by how much the loss rises when it alone has them: the mean, and "
        "what it is below with a confidence of 95 %, where it was measured.</small></p>"
    )


def summary(choice: Choice) -> str:
    """Return one line about the choice: bytes before and after, and the rise of the loss."""
    before = sum(own[DataType.FP32] for own in choice.num_bytes.values())
    after = sum(choice.num_bytes[name][each] for name, each in choice.types.items())
    return (
        f"{size_text(before)} as fp32, {size_text(after)} as chosen; the loss rises by "
        f"{choice.rise.mean:.4%}, and with 95 % confidence by less than {choice.rise.bound:.4%} (budget "
        f"{choice.budget:.4%}; {choice.num_evaluations} evaluations)."
    )


def _cell(choice: Choice, name: str, each: DataType) -> str:
    rise = choice.rises[name].get(each)
    told = "" if rise is None else f"<br><small>{rise.mean:+.4%}, &lt; {rise.bound:+.4%}</small>"
    mark = " class=chosen" if choice.types[name] is each else ""
    return f"<td{mark}>{size_text(choice.num_bytes[name][each])}{told}</td>"
