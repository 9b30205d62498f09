"""Check results, their levels, and merging of results between ranks."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")


class Finding(NamedTuple):
    """Check result.

    Attributes:
        check: check name.
        level: ``ok``; ``warn`` if training works but not well; ``fail`` if it does not work.
        observation: one line with figures.
        remedy: next step for the user; empty if ``ok``.
    """

    check: str
    level: Level
    observation: str
    remedy: str = ""


def merged(by_rank: Sequence[Sequence[Finding]]) -> list[tuple[Finding, list[int]]]:
    """Merge equal findings across ranks. Returns distinct findings with their ranks, in check order."""
    ranks: dict[Finding, list[int]] = {}
    order: dict[str, int] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            order.setdefault(finding.check, len(order))
            ranks.setdefault(finding, []).append(rank)
    return sorted(ranks.items(), key=lambda entry: (order[entry[0].check], entry[1]))


def worst(findings: Sequence[Finding]) -> Level:
    """Return the worst level among findings."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
