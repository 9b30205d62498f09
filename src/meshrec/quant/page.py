"""HTML page with the result of ``choose_precision``: bytes, loss increase and data type per table."""

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


def html_page(choice: Choice, title: str) -> str:
    """Return a self-contained HTML page that shows the result of ``choose_precision``."""
    head = "".join(f"<th>{data_type}</th>" for data_type in _TYPES)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(_cell(choice, name, data_type) for data_type in _TYPES)}</tr>"
        for name in choice.types
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1><p>{escape(summary(choice))}</p>"
        f"<table><tr><th>table</th>{head}</tr>{rows}</table>"
        "<p><small>Bytes per table and type, and the loss increase if only this table has it: mean, and "
        "95 % upper bound, where measured.</small></p>"
    )


def summary(choice: Choice) -> str:
    """Return a sentence with the bytes before and after, and the loss increase with all selected types."""
    before = sum(by_type[DataType.FP32] for by_type in choice.num_bytes.values())
    after = sum(choice.num_bytes[name][data_type] for name, data_type in choice.types.items())
    return (
        f"{size_text(before)} as fp32, {size_text(after)} as chosen; the loss rises by "
        f"{choice.rise.mean:.4%}, and with 95 % confidence by less than {choice.rise.bound:.4%} (budget "
        f"{choice.budget:.4%}; {choice.num_evaluations} evaluations)."
    )


def _cell(choice: Choice, name: str, data_type: DataType) -> str:
    """Return the HTML table cell for an embedding table in a data type, with bytes and loss increase."""
    rise = choice.rises[name].get(data_type)
    rise_text = "" if rise is None else f"<br><small>{rise.mean:+.4%}, &lt; {rise.bound:+.4%}</small>"
    mark = " class=chosen" if choice.types[name] is data_type else ""
    return f"<td{mark}>{size_text(choice.num_bytes[name][data_type])}{rise_text}</td>"
