"""Reports about a lookup, as an op: a traced graph cannot read a count, but it can call an op that does.

The op is Python on every device, so it has a namespace of its own.
"""

import logging

import torch
from torch import Tensor

_logger = logging.getLogger("meshrec")


def report_clamped(total: Tensor, counts: Tensor, names: Tensor) -> None:
    """Add the number of IDs that ``clamp_ids`` replaced to ``total`` (int64, one element). Warn the first
    time.
    """
    num_clamped = int(counts.sum())
    if num_clamped and not int(total):
        table, feature = bytes(names.tolist()).decode().split("\n")[int(counts.argmax())].split("\t")
        _logger.warning(
            "%d IDs lie outside their table, most of them of feature %r in table %r; row 0 takes their "
            "place. This warning appears once; num_clamped_ids has the total.",
            num_clamped,
            feature,
            table,
        )
    total += num_clamped


def _register() -> torch.library.Library:
    library = torch.library.Library("meshrec_host", "DEF")
    library.define("report_clamped(Tensor(a!) total, Tensor counts, Tensor names) -> ()")
    library.impl("report_clamped", report_clamped, "CompositeExplicitAutograd")
    library._register_fake("report_clamped", lambda *_: None)
    return library


# Keep a reference: the ops of a Library end with it.
_registration = _register()
