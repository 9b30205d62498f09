"""`Finding`, the result of a check on a host, and functions to merge findings from several ranks."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "fail"]
# From best to worst.
LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")


class Finding(NamedTuple):
    """Result of a check on a host.

    Attributes:
        check: name of the check, such as "memory".
        level: "ok", "warn" if training works but not well, or "fail" if training does not work.
        observation: observed values, in a line such as "1.5 GiB free for 2 ranks".
        remedy: next step for the user; empty if the level is "ok".
    """

    check: str
    level: Level
    observation: str
    remedy: str = ""


def merge_findings(by_rank: Sequence[Sequence[Finding]]) -> list[tuple[Finding, list[int]]]:
    """Merge equal findings from several ranks.

    Args:
        by_rank: findings from every rank.

    Returns:
        Pairs (finding, ranks which report it). Findings are sorted by check, in the order of the checks, and
        then by rank.
    """
    ranks: dict[Finding, list[int]] = {}
    # Position of every check, by the first rank which reports it.
    order: dict[str, int] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            order.setdefault(finding.check, len(order))
            ranks.setdefault(finding, []).append(rank)
    return sorted(ranks.items(), key=lambda entry: (order[entry[0].check], entry[1]))


def worst_level(findings: Sequence[Finding]) -> Level:
    """Return the worst level among the findings; "ok" if there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
