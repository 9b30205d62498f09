"""The result of a check, its level, and how the results of ranks are merged."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    """The name of the check."""
    level: Level
    """``ok``; ``warn``, if training works but not well; ``fail``, if it does not."""
    found: str
    """The observation, in one line with its figures."""
    remedy: str = ""
    """The next step for the user; empty if all is well."""


def merged(by_rank: Sequence[Sequence[Finding]]) -> list[tuple[Finding, list[int]]]:
    """Merge the findings of ranks: each different finding once, with its ranks, in the order of checks."""
    ranks: dict[Finding, list[int]] = {}
    order: dict[str, int] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            order.setdefault(finding.check, len(order))
            ranks.setdefault(finding, []).append(rank)
    return sorted(ranks.items(), key=lambda each: (order[each[0].check], each[1]))


def worst(findings: Sequence[Finding]) -> Level:
    """Return the worst level among findings."""
    return max((each.level for each in findings), key=LEVELS.index, default="ok")
