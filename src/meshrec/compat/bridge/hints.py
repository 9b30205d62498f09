"""TorchRec options that do not change results here: they are accepted, and logged once."""

import logging
from collections.abc import Mapping
from typing import Any

_logger = logging.getLogger("meshrec.compat")
# (class, option) pairs that were logged in this process, so that a loop over models logs once.
_logged: set[tuple[str, str]] = set()

MEMORY = {
    "enable_inplace_copy_batch": False,
    "free_features_storage_early": False,
    "clear_data_dist_inputs": False,
}
"""Pipeline options for batch memory, with TorchRec's defaults."""


def take_hints(owner: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Check the names of options, and log those that have no effect here.

    Args:
        owner: name of the class that takes the options.
        options: options from the program.
        defaults: TorchRec's option names and default values.

    Raises:
        TypeError: an option name is unknown.
    """
    for name, value in options.items():
        if name not in defaults:
            raise TypeError(
                f"{owner}() got an unexpected keyword argument {name!r}. It also takes {', '.join(defaults)}."
            )
        if value != defaults[name] and (owner, name) not in _logged:
            _logged.add((owner, name))
            _logger.info("%s: %s=%r changes nothing here; the numbers are the same", owner, name, value)
