"""``meshrec inspect`` for a log with users, items and times: write a recipe for a next-item model.

With a label column, the recipe is for a click model.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from meshrec.data.csv_dialects import DETECTED, CsvFormat
from meshrec.data.locations import is_address
from meshrec.data.log_columns import LogColumns

if TYPE_CHECKING:
    from meshrec.data.propose_log import LogProposal

NextItemModel = Literal["hstu", "sasrec", "gru4rec", "bert4rec", "two_tower"]
_STEPS = 3000
"""Number of training steps for small logs. Larger logs get at least four epochs."""
# Maximum history length in a click recipe.
_MAX_CLICKS = 50
_BYTES_PER_ROW, _MAX_SHARE = 150, 0.25
"""Bytes per row for sorting a log in memory, and the share of memory above which a folder is proposed
instead.
"""
_DOT_PRODUCTS = "softmax=SampledSoftmax(num_negatives=1024)"
_COSINES = 'softmax=SampledSoftmax(num_negatives=1024, similarity="cosine", temperature=0.05)'
_MODELS: dict[str, tuple[str, str]] = {
    "hstu": ("HSTU", f"HSTUConfig({_COSINES})"),
    "sasrec": ("SASRec", f"SASRecConfig({_DOT_PRODUCTS})"),
    "gru4rec": ("GRU4Rec", f"GRU4RecConfig({_DOT_PRODUCTS})"),
    "bert4rec": ("BERT4Rec", f"BERT4RecConfig({_DOT_PRODUCTS})"),
    "two_tower": ("Two towers", "TwoTowerConfig()"),
}


class _RecipeParts(NamedTuple):
    """Recipe parts that depend on the model. Strings are Python source code unless noted.

    Attributes:
        task: description of the recipe, not source code.
        source: class name of the data source.
        options: data source arguments in addition to files and columns.
        model: model configuration.
        loss: class name of the loss.
        table_lr: learning rate for tables.
        schedule: arguments of the learning rate schedule.
        num_samples: number of training samples per epoch.
        columns: log columns.
        reasons: remarks for the user, not source code.
    """

    task: str
    source: str
    options: tuple[str, ...]
    model: str
    loss: str
    table_lr: str
    schedule: str
    num_samples: int
    columns: LogColumns
    reasons: list[str]


def inspect_log(
    data: Sequence[str],
    columns: LogColumns,
    out: Path,
    *,
    label: str | None,
    model: NextItemModel,
    form: CsvFormat = DETECTED,
) -> int:
    """Look at a log, write a recipe, and print what to do next. Return the exit code.

    Args:
        data: files, folders or patterns.
        columns: log columns.
        out: recipe file to write.
        label: column with clicks; None: write a recipe for a next-item model.
        model: next-item model.
        form: CSV format.
    """
    text, log, parts = recipe_of_log(data, columns, out, label=label, model=model, form=form)
    out.write_text(text, encoding="utf-8")
    print(f"{log.num_rows:,} rows of {log.num_users:,} users and {log.num_items:,} items")
    for reason in parts.reasons:
        print(f"look at this: {reason}")
    print(f"the recipe, to read and to edit: {out}")
    print(f"to train it: meshrec train {quote(f'{out}:recipe')} --baselines")
    return 0


def recipe_of_log(
    data: Sequence[str],
    columns: LogColumns,
    out: Path,
    *,
    label: str | None,
    model: NextItemModel,
    form: CsvFormat = DETECTED,
) -> "tuple[str, LogProposal, _RecipeParts]":
    """Propose a recipe for a log, without writing it.

    Args:
        data, columns, out, label, model, form: see `inspect_log`.

    Returns:
        The recipe as Python source code, log statistics, and recipe parts.
    """
    from meshrec.data.propose_log import propose_log

    log = propose_log(data, columns, form)
    parts = _next_item_parts(log, model) if label is None else _click_parts(log, label)
    if form != DETECTED:
        parts = parts._replace(options=(f"csv={constructor_source(form)}", *parts.options))
    return _recipe_text(data, log, parts, out), log, parts


def _next_item_parts(log: "LogProposal", model: NextItemModel) -> _RecipeParts:
    """Return the recipe parts for a next-item model."""
    from meshrec.ops.mapping import memory_limit

    name, call = _MODELS[model]
    options = [f"history={log.history}"]
    reasons = [*log.reasons]
    options += [] if log.exclude_seen else ["exclude_seen=False"]
    if "SampledSoftmax(" in call and not log.exclude_seen:
        call = f"{call.removesuffix('))')}, repeats=True))"
        reasons.append("the model learns when items repeat (SampledSoftmax.repeats)")
    if model == "two_tower":
        options.append("windows=False")
    if log.num_rows * _BYTES_PER_ROW > _MAX_SHARE * memory_limit():
        # Relative, so that recipe and histories can move together.
        options.append('histories=Path("histories")')
        reasons.append("the log would take much of the memory: it is sorted into a folder here, once")
    num_samples = log.num_rows if model == "two_tower" else log.num_windows
    table_lr, schedule = ("2e-3", "") if model == "two_tower" else ("6e-3", "warmup_steps=50, ")
    return _RecipeParts(
        task=f"{name}: which item comes next?",
        source="Log",
        options=tuple(options),
        model=call,
        loss="NextItem",
        table_lr=table_lr,
        schedule=schedule,
        num_samples=num_samples,
        columns=log.columns,
        reasons=reasons,
    )


def _click_parts(log: "LogProposal", label: str) -> _RecipeParts:
    """Return the recipe parts for a click model."""
    return _RecipeParts(
        task="DIN: does the user click, given the clicks before?",
        source="ClickLog",
        options=(f"label={literal_source(label)}", f"history={min(log.history, _MAX_CLICKS)}"),
        model="DINConfig()",
        loss="BinaryCrossEntropy",
        table_lr="2e-3",
        schedule="",
        num_samples=log.num_rows * 8 // 10,
        # Clicks at the same time are not in each other's history, so their order does not matter.
        columns=replace(log.columns, ties="keep"),
        reasons=[],
    )


def _recipe_text(data: Sequence[str], log: "LogProposal", parts: _RecipeParts, out: Path) -> str:
    """Return a recipe for a log as Python source code."""
    # About 150 steps per epoch, with a power of two from 16 to 256 as batch size.
    batch = 2 ** round(math.log2(min(max(parts.num_samples / 150, 16), 256)))
    # As many epochs as `_STEPS` steps need, but at least 4 and at most 100.
    epochs = min(max(math.ceil(_STEPS * batch / max(parts.num_samples, 1)), 4), 100)
    files = literal_source(tuple(path_from(out.parent, path) for path in data))
    remarks = "".join(f"# Look at this: {reason}.\n" for reason in parts.reasons)
    options = "".join(f"\n            {option}," for option in parts.options)
    used = {"DenseOptimizer", "Recipe", "Schedule", "Training", parts.source, parts.loss}
    names = ", ".join(sorted({*used, parts.model.partition("(")[0]}, key=str.lower))
    softmax = "from meshrec.models import SampledSoftmax\n" if "SampledSoftmax" in parts.model else ""
    path = "from pathlib import Path\n\n" if "histories=Path" in options else ""
    csv = "from meshrec.data.csv_dialects import CsvFormat\n" if "csv=CsvFormat" in options else ""
    rows = f"{log.num_rows:,} rows"
    return f'''"""Recipe that `meshrec inspect` proposed for {rows}: change what you know better.

Train it: meshrec train {quote(f"{out}:recipe")} --baselines
"""

{path}{csv}from meshrec.data.log_columns import LogColumns
{softmax}from meshrec.optim import Adam
from meshrec.train import {names}

{remarks}COLUMNS = {constructor_source(parts.columns)}


def recipe() -> Recipe:
    """{parts.task}"""
    return Recipe(
        name={literal_source(out.stem)},
        data={parts.source}(
            log={files},
            columns=COLUMNS,{options}
        ),
        model={parts.model},
        loss={parts.loss}(),
        tables=Adam(lr={parts.table_lr}),
        dense=DenseOptimizer(kind="adam", lr=1e-3),
        schedule=Schedule({parts.schedule}decay="linear"),
        training=Training(batch_size={batch}, epochs={epochs}, patience=8),
    )
'''


def path_from(folder: Path, data: str) -> str:
    """Return a data path relative to ``folder``. Addresses and absolute paths are returned unchanged."""
    if is_address(data) or Path(data).is_absolute():
        return data
    return os.path.relpath(data, folder)


def constructor_source(value: Any) -> str:
    """Return Python source code that creates a dataclass, with all fields that differ from their defaults."""
    words = [
        f"{field.name}={literal_source(getattr(value, field.name))}"
        for field in fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(words)})"


def literal_source(value: Any) -> str:
    """Return Python source code for a value, with double quotes, like code formatters."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"({', '.join(map(literal_source, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def comment_safe(name: str) -> str:
    """Return a column name to be used in a comment. It is escaped if it has unprintable characters."""
    # A line break in a name would otherwise end the comment, and its rest would be executed.
    return name if name.isprintable() else repr(name)
