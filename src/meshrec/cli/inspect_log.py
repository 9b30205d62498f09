"""``meshrec inspect`` of a log of users, items and times: a recipe that learns which item comes next."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshrec.cli.recipe_source import call_of, seen_from, text_of
from meshrec.data.log_columns import LogColumns

if TYPE_CHECKING:
    from meshrec.data.propose_log import LogProposal

_STEPS = 3000
"""Training steps that a small log gets; larger logs get at least four epochs."""


def inspect_log(data: Sequence[str], columns: LogColumns, out: Path) -> int:
    """Look at a log, and write the recipe.

    Args:
        data: files, folders or patterns.
        columns: the columns of the log.
        out: the recipe to write.
    """
    from meshrec.data.propose_log import propose_log

    found = propose_log(data, columns)
    out.write_text(_recipe_text(data, found, out), encoding="utf-8")
    print(f"{found.num_rows:,} rows of {found.num_users:,} users and {found.num_items:,} items")
    for reason in found.reasons:
        print(f"look at this: {reason}")
    print(f"the recipe, to read and to edit: {out}")
    print(f"to train it: meshrec train {out}:recipe --baselines")
    return 0


def _recipe_text(data: Sequence[str], found: "LogProposal", out: Path) -> str:
    batch = 2 ** round(math.log2(min(max(found.num_windows / 150, 16), 256)))
    epochs = min(max(math.ceil(_STEPS * batch / max(found.num_windows, 1)), 4), 100)
    files = text_of(tuple(seen_from(out.parent, each) for each in data))
    remarks = "".join(f"# Look at this: {each}.\n" for each in found.reasons)
    seen = "" if found.exclude_seen else "\n            exclude_seen=False,"
    rows = f"{found.num_rows:,} rows"
    return f'''"""Recipe that `meshrec inspect` proposed for {rows}: change what you know better.

Train it: meshrec train {out}:recipe --baselines
"""

from meshrec.data.log_columns import LogColumns
from meshrec.models import SampledSoftmax
from meshrec.optim import Adam
from meshrec.train import DenseOptimizer, HSTUConfig, Log, NextItem, Recipe, Schedule, Training

{remarks}COLUMNS = {call_of(found.columns)}


def recipe() -> Recipe:
    """HSTU: which item comes next?"""
    return Recipe(
        name={text_of(out.stem)},
        data=Log(
            log={files},
            columns=COLUMNS,
            history={found.history},{seen}
        ),
        model=HSTUConfig(
            softmax=SampledSoftmax(num_negatives=1024, similarity="cosine", temperature=0.05),
        ),
        loss=NextItem(),
        tables=Adam(lr=6e-3),
        dense=DenseOptimizer(kind="adam", lr=1e-3),
        schedule=Schedule(warmup_steps=50, decay="linear"),
        training=Training(batch_size={batch}, epochs={epochs}, patience=8),
    )
'''
