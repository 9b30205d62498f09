"""Recommendations for user histories: the exact top items for a model's query vectors."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl

from torch import Tensor

from meshrec.data.faults import shown
from meshrec.data.interactions import HISTORY, SEEN
from meshrec.export import Predictor
from meshrec.export.next_items import Recommended
from meshrec.serve.requests import Floats, Request, RequestError

MAX_ITEMS = 10_000
"""Maximum number of items that a request may ask for."""


class ItemOptions(NamedTuple):
    """Options of a recommendation request.

    Attributes:
        k: number of items to recommend per history.
        keep_seen: whether items in the history, or given as seen, may be recommended. None: as in training,
            see `RankedItems.keep_seen`.
    """

    k: int = 10
    keep_seen: bool | None = None


def parse_item_options(query: bytes) -> ItemOptions:
    """Parse the options in the query part of a URL, such as ``k=20&keep_seen=1``.

    Raises:
        RequestError: an option is unknown, or has an invalid value.
    """
    given = parse_query(query, ("k", "keep_seen"))
    k, keep = given.get("k", "10"), given.get("keep_seen")
    if not (k.isascii() and k.isdecimal() and len(k) < 10 and 1 <= int(k) <= MAX_ITEMS):
        raise RequestError(f"k must be a whole number from 1 to {MAX_ITEMS}, got {shown(k)}.")
    if keep not in (None, "0", "1"):
        raise RequestError(f"keep_seen must be 0 or 1, got {shown(keep)}.")
    return ItemOptions(int(k), None if keep is None else keep == "1")


def parse_query(query: bytes, allowed: Sequence[str]) -> dict[str, str]:
    """Parse the query part of a URL, in which every allowed option may occur once.

    Raises:
        RequestError: an option is unknown or repeated.
    """
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    given = dict(pairs)
    if unknown := sorted(given.keys() - set(allowed)):
        there = f"allowed: {' and '.join(allowed)}" if allowed else "this path has no options. Remove it"
        raise RequestError(f"the address has the unknown option {shown(unknown[0])}; {there}.")
    # A dict keeps the last of repeated options, which the client would not notice.
    if len(given) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise RequestError(f"the address has {shown(twice)} twice. Give it once.")
    return given


class ItemVectors:
    """Item vectors of a package, with which its items are ranked.

    The vectors are computed once per version of the weights.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        # Weights version and item vectors [N, V]; from the first request until the version changes.
        self._vectors: tuple[str, Tensor] | None = None

    @property
    def is_available(self) -> bool:
        """Whether the package lists items to recommend."""
        return self._predictor.items is not None

    def best(self, queries: Floats, request: Request, options: ItemOptions, version: str) -> Recommended:
        """Return the best items for the query vectors of a request.

        Args:
            queries: query vectors, float32 [B, V].
            options: number of items, and whether seen items may be recommended.
        """
        items, features = self._predictor.items, self._predictor.features
        assert items is not None
        # The version changes with every applied delta, which may change item vectors.
        if self._vectors is None or self._vectors[0] != version:
            self._vectors = version, items.vectors(self._predictor.weights)
        keep_seen = items.keep_seen if options.keep_seen is None else options.keep_seen
        # Items in the history, and items that the request gives as seen.
        hidden = [
            (request.values[at], request.lengths[at])
            for at, name in enumerate(features)
            if name in (HISTORY, SEEN) and not keep_seen
        ]
        at = features.index(HISTORY) if items.repeats is not None else 0
        repeated = items.repeated(self._predictor.weights, request.values[at], request.lengths[at])
        return items.best(queries, self._vectors[1], options.k, hidden, repeated=repeated)
