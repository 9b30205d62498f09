"""Options of TorchRec that change no result: they are accepted, and one log line names them."""

import logging
from collections.abc import Mapping
from typing import Any

_logger = logging.getLogger("meshrec.compat")
_told: set[tuple[str, str]] = set()

MEMORY = {
    "enable_inplace_copy_batch": False,
    "free_features_storage_early": False,
    "clear_data_dist_inputs": False,
}
"""Options of pipelines about the memory of batches, with TorchRec's defaults."""


def take_hints(owner: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Check the names of options, and log once which of them have no effect here.

    Args:
        owner: the class that takes them.
        given: what the program gave.
        known: TorchRec's names and defaults.

    Raises:
        TypeError: a name is unknown.
    """
    for name, value in given.items():
        if name not in known:
            raise TypeError(
                f"{owner}() got an unexpected keyword argument {name!r}. It also takes {', '.join(known)}."
            )
        if value != known[name] and (owner, name) not in _told:
            _told.add((owner, name))
            _logger.info("%s: %s=%r changes nothing here; the numbers are the same", owner, name, value)
