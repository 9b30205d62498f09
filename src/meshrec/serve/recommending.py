"""Recommendations for requests with histories: the exact best items for the vectors of a model."""

from typing import NamedTuple
from urllib.parse import parse_qsl

from torch import Tensor

from meshrec.data.interactions import HISTORY, SEEN
from meshrec.export import Predictor
from meshrec.export.next_items import Recommended
from meshrec.serve.requests import Floats, Request, RequestError, shown

MOST_ITEMS = 10_000


class ItemsWanted(NamedTuple):
    """The options of a request for recommendations."""

    k: int = 10
    """The number of items."""
    keep_seen: bool = False
    """Whether items of the history, and those that are given as seen, may be among them."""


def recommended_by(query: bytes) -> ItemsWanted:
    """Parse the query of an address, such as ``k=20&keep_seen=1``.

    Raises:
        RequestError: it has another form.
    """
    given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    if unknown := sorted(given.keys() - {"k", "keep_seen"}):
        raise RequestError(f"the address has unknown {shown(unknown)}; there are k and keep_seen.")
    k, keep = given.get("k", "10"), given.get("keep_seen", "0")
    if not (k.isascii() and k.isdecimal() and len(k) < 10 and 1 <= int(k) <= MOST_ITEMS):
        raise RequestError(f"k must be a whole number from 1 to {MOST_ITEMS}, got {shown(k)}.")
    if keep not in ("0", "1"):
        raise RequestError(f"keep_seen must be 0 or 1, got {shown(keep)}.")
    return ItemsWanted(int(k), keep == "1")


class ItemVectors:
    """The vectors of a package's items, computed once for each version of the weights.

    Args:
        predictor: the package's predictor.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._known: tuple[str, Tensor] | None = None

    @property
    def are_known(self) -> bool:
        """Whether the package lists items."""
        return self._predictor.items is not None

    def best(self, queries: Floats, request: Request, wanted: ItemsWanted, version: str) -> Recommended:
        """Return the best items for the queries of a request, by the weights of a version."""
        items, features = self._predictor.items, self._predictor.features
        assert items is not None
        if self._known is None or self._known[0] != version:
            self._known = version, items.vectors(self._predictor.weights)
        hidden = [
            (request.values[at], request.lengths[at])
            for at, name in enumerate(features)
            if name in (HISTORY, SEEN) and SEEN in features and not wanted.keep_seen
        ]
        return items.best(queries, self._known[1], wanted.k, hidden)
