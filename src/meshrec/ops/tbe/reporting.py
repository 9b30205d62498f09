"""What must be said while ids are looked up, as an op: a traced graph cannot look at a count, but it can call
one that does. It is Python on every device, and so has a namespace of its own.
"""

import logging

import torch
from torch import Tensor

_logger = logging.getLogger("meshrec")


def report_clamped(total: Tensor, counts: Tensor, names: Tensor) -> None:
    """Adds the ids that ``clamp_ids`` replaced to ``total`` (int64, one element), and says so the first time.

    An op, because a traced graph cannot look at the count.
    """
    num_clamped = int(counts.sum())
    if num_clamped and not int(total):
        table, feature = bytes(names.tolist()).decode().split("\n")[int(counts.argmax())].split("\t")
        _logger.warning(
            "%d ids lie outside their table, most of them of feature %r in table %r; row 0 takes their "
            "place. This is said once; num_clamped_ids counts on.",
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


# Kept alive: a Library takes its ops with it when it is collected.
_registration = _register()
